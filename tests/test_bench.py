"""bench.py: what is timed is train.py's own work, and each number is the sum or quotient it claims to be.

The commands run in processes of their own, since they replace parts of train.py. No time is asserted.
"""

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY
from launch import environment
from torch.autograd import DeviceType

import bench
import data
from model import DrafterConfig, Target, TargetConfig

ROOT = Path(__file__).parent.parent
SMALL = "--token-budget 256 --anchors 64 --draft-layers 1 --max-length 128 --device cpu".split()


def run(home: Path, *arguments: object, ranks: int = 1) -> subprocess.CompletedProcess:
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*start, str(ROOT / "bench.py"), *map(str, arguments)]
    return subprocess.run(
        command, env=environment(home), capture_output=True, text=True, cwd=ROOT, timeout=120
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def step(home) -> dict:
    file = home / "step.json"
    done = run(home, "step", "--repeats", 3, "--json", file, *SMALL, "--anchor-chunk", 32)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100, done.stdout
    return json.loads(file.read_text())


# ---------------------------------------------------------------------------------------------------------
# The commands


def test_a_step_has_every_field_and_its_rate_is_work_over_time(step):
    promised = "shape dtype median_ms tflops peak_gib cold_s torch gpu commit".split()
    assert set(promised) <= step.keys()
    assert (step["shape"], step["dtype"], step["gpu"], step["torch"]) == (
        "tiny",
        "float32",
        "cpu",
        torch.__version__,
    )
    assert step["tflops"] == pytest.approx(step["flops"] / step["median_ms"] / 1e9)
    assert step["share"] == pytest.approx(step["tflops"] / step["ceiling_tflops"])
    assert step["p10_ms"] <= step["median_ms"] <= step["p90_ms"] and step["repeats"] == 3
    assert step["sizes"]["tokens"] == 256 and step["anchor_chunk"] == 32  # train.py's flags were heard


def test_the_parts_of_a_step_sum_to_its_time_and_attention_and_products_are_among_them(step):
    parts = step["parts_ms"]
    assert sum(parts.values()) == pytest.approx(step["profiled_ms"])
    assert step["busy_ms"] == pytest.approx(step["profiled_ms"] - parts.get("gaps", 0.0))
    assert step["idle_share"] == pytest.approx(parts.get("gaps", 0.0) / step["profiled_ms"])
    wanted = {
        "products",
        "head products",
        "attention forward",
        "attention backward",
        "loss",
        "mask and blocks",
    }
    assert wanted <= parts.keys()
    assert sum(k["ms"] for k in step["kernels"]) <= step["profiled_ms"] - parts.get("gaps", 0.0) + 1e-6


def test_target_counts_what_lies_before_the_last_tap(home):
    file = home / "target.json"
    done = run(home, "target", "--repeats", 2, "--json", file, *SMALL)
    assert done.returncode == 0, done.stderr
    r = json.loads(file.read_text())
    c, t = bench.config_of("tiny", SMALL, home, 1)
    layers = max(DrafterConfig.of(t, 1, 8, c.taps, 0).ids) + 1
    attention = 2 * layers * 4 * t.heads * t.head_dim * sum(range(1, 129))  # two documents of 128 tokens
    assert r["flops"] == t.prefill_flops(256, layers) + attention
    assert r["tokens_per_s"] == pytest.approx(256 / r["median_ms"] * 1000)
    assert "products" in r["parts_ms"] and "attention backward" not in r["parts_ms"]


def test_stream_moves_whole_features_and_tells_each_side_alone(home):
    file = home / "stream.json"
    done = run(home, "stream", "--repeats", 2, "--json", file, *SMALL, ranks=2)
    assert done.returncode == 0, done.stderr
    r = json.loads(file.read_text())
    c, t = bench.config_of("tiny", SMALL, home, 2)
    assert r["bytes"] == 256 * len(DrafterConfig.of(t, 1, 8, c.taps, 0).ids) * t.hidden * 4
    assert r["gbs"] == pytest.approx(r["bytes"] / r["median_ms"] / 1e6)
    assert set(r["ms"]) == {"drafter", "transfer", "drafter+transfer", "target", "target+transfer"}
    assert all(ms > 0 for ms in r["ms"].values())
    assert 0 <= r["hidden_drafter"] <= 1 and 0 <= r["hidden_target"] <= 1


def test_decode_is_decodes_own_timing(home, monkeypatch):
    def decoded(c) -> int:
        keys = "step_ms draft_ms verify_ms acceptance"
        r = dict.fromkeys(keys.split(), 2.0) | {"target": str(TINY), "dtype": c.dtype, "device": c.device}
        r |= {"batch_size": c.batch_size, "max_new_tokens": c.max_new_tokens, "differences": None}
        Path(c.json).write_text(json.dumps(r))
        return 0

    monkeypatch.setattr(bench.decode, "decode", decoded)
    r, code = bench.bench_decode(["--max-new-tokens", "9", "--device", "cpu"])
    assert code == 0 and (r["bench"], r["sizes"]["max_new_tokens"], r["draft_ms"]) == ("decode", 9, 2.0)
    t = TargetConfig.from_folder(TINY)
    weights = sum(p.numel() for p in Target(t).parameters()) - (0 if t.tied else t.vocab * t.hidden)
    assert r["bytes"] == 4 * weights and r["gbs"] == pytest.approx(4 * weights / 2e6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["step", "--anchor-chunk", "-1"], "must be above 0"),
        (["step", "--no-such-flag"], "--no-such-flag"),
        (["step", "--token-budget", "auto"], "give the number"),
        (["step", "--shape", "huge"], "invalid choice"),
        (["stream"], "torchrun --standalone --nproc_per_node=2"),
        (["target", "--cold"], "only with step"),
        (["compare", "only-one.json"], "two files"),
        (["compare", "none.json", "none.json"], "no result of bench.py"),
        (["compare", *2 * [str(TINY / "config.json")]], "no result of bench.py"),
        (["decode", "--limit", "-1"], "--limit"),
        (["step", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["step", "--json", "/"], "is a folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, told, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        code = bench.main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2 and told in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------
# Compare


def test_compare_refuses_other_work_and_tells_the_ratio(step, tmp_path):
    for change in ({"shape": "smollm2"}, {"bench": "target"}, {"sizes": step["sizes"] | {"anchors": 1}}):
        with pytest.raises(ValueError, match=next(iter(change))):
            bench.compare(step, step | change, ("a", "b"))
    twice = step | {"median_ms": step["median_ms"] / 2, "dtype": "bfloat16+fp8"}
    twice |= {"p10_ms": step["p10_ms"] / 2, "p90_ms": step["p90_ms"] / 2, "anchor_chunk": 64}
    text = bench.compare(step, twice, ("a.json", "b.json"))
    assert "b.json is 2.000 times as fast as a.json" in text and "-50.0%" in text
    assert "within the spread" in bench.compare(step, step, ("a", "b"))
    assert max(map(len, text.splitlines())) <= 100


def test_compare_of_streams_lists_each_part_and_half_a_result_is_refused(tmp_path):
    ms = {"transfer": 1.0, "drafter": 480.0, "drafter+transfer": 486.0}
    a = {"bench": "stream", "shape": "qwen3-8b", "sizes": {}, "median_ms": 1.0, "ms": ms}
    rows = bench.compare(a, a | {"ms": ms | {"drafter+transfer": 243.0}}, ("a", "b")).splitlines()
    assert [r.split()[-1] for r in rows if r.split()[0] in ms] == ["+0.0%", "+0.0%", "-50.0%"]
    (tmp_path / "half.json").write_text('{"bench": "step"}')
    with pytest.raises(ValueError, match=r"no result of bench\.py"):
        bench.read_result(str(tmp_path / "half.json"))


@pytest.mark.parametrize(
    "change",
    [
        {"median_ms": 0},
        {"median_ms": None},
        {"median_ms": math.nan},
        {"median_ms": 10**400},
        {"p90_ms": "4"},
        {"tflops": [1]},
        {"ms": [1.0]},
        {"ms": {"transfer": "x"}},
        {"parts_ms": None},
    ],
)
def test_a_damaged_result_is_one_line_that_names_the_field(change, tmp_path, capsys):
    good = {"bench": "step", "shape": "tiny", "sizes": {}, "median_ms": 1.0, "p10_ms": 0.9, "p90_ms": 1.1}
    files = []
    for name, r in (("good", good), ("bad", good | change)):
        files.append(str(tmp_path / f"{name}.json"))
        Path(files[-1]).write_text(json.dumps(r))
    assert bench.main(["compare", files[0], files[0]]) == 0
    for pair in (files, files[::-1]):
        assert bench.main(["compare", *pair]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and files[1] in line and line.endswith("measure it again\n")
        assert next(iter(change)) in line or "transfer" in line


# ---------------------------------------------------------------------------------------------------------
# Arithmetic


def test_the_reference_shape_is_281_tflop_a_step(tmp_path):
    """DESIGN's R8: 4 documents of 2048 tokens, 512 anchors each, B 16, 5 layers."""
    c, t = bench.config_of("qwen3-8b", ["--device", "cpu"], tmp_path, 1)
    assert (c.token_budget, c.max_batch_size, c.anchors, c.block_size, c.draft_layers) == (
        8192,
        4,
        2048,
        16,
        5,
    )
    flops = DrafterConfig.of(t, 5, 16, 5, 0).step_flops(8192, 2048, 1023.5)
    assert 281e12 < flops < 283e12


def test_random_batches_are_what_make_batch_would_give(tmp_path):
    c, t = bench.config_of("tiny", [*SMALL, "--seed", "3"], tmp_path, 1)
    made = bench.RandomBatches(c, t)
    a, b, like = (
        made.train(0),
        made.train(1),
        data.empty_batch(0, c.token_budget, c.max_batch_size, c.anchors),
    )
    for field in vars(like):
        if field != "index":
            assert getattr(a, field).shape == getattr(like, field).shape, field
            assert getattr(a, field).dtype == getattr(like, field).dtype, field
    assert not torch.equal(a.tokens_T, b.tokens_T) and not torch.equal(a.anchors_A, b.anchors_A)
    assert a.cu_seqlens.tolist() == [0, 128, 256, 256]
    for p in range(256):
        assert (a.doc_T[p], a.positions_T[p]) == (p // 128, p % 128)
    valid = np.flatnonzero(data.valid_anchors(a.mask_T.numpy(), a.doc_T.numpy()))
    assert set(a.anchors_A.tolist()) <= set(valid.tolist()) and len(set(a.anchors_A.tolist())) == 64
    assert (a.doc_T[a.anchors_A] == 0).sum() == 32


def test_attention_work_equals_a_loop_over_pairs():
    t = SimpleNamespace(windows=(0, 3, 0, 100), heads=2, head_dim=8)
    batch = SimpleNamespace(cu_seqlens=torch.tensor([0, 5, 5, 12, 13]))
    pairs = 0
    for window in t.windows[:3]:
        for n in (5, 0, 7, 1):
            pairs += sum(1 for q in range(n) for k in range(q + 1) if not window or q - k < window)
    assert bench.attention_flops(t, batch, 3) == 4 * 2 * 8 * pairs


def test_time_is_split_as_an_oracle_that_walks_each_nanosecond_would():
    draw = random.Random(7)
    for _ in range(50):
        work = []
        for i in range(draw.randrange(1, 9)):
            start = draw.randrange(60)
            work.append((start, start + draw.randrange(1, 15), draw.choice("abc"), f"k{i}"))
        work.sort()
        parts: dict[str, int] = {}
        first, last = min(w[0] for w in work), max(w[1] for w in work)
        for ns in range(first, last):
            running = [w for w in work if w[0] <= ns < w[1]]
            part = min(running)[2] if running else "gaps"
            parts[part] = parts.get(part, 0) + 1
        found, total, kernels = bench.split_time(work)
        assert total == pytest.approx((last - first) / 1e6)
        assert {p: round(ms * 1e6) for p, ms in found.items() if ms} == parts
        assert sum(ms for ms, *_ in kernels) == pytest.approx(
            sum(parts[p] for p in parts if p != "gaps") / 1e6
        )


class Event:
    """A profiler event, of the host unless `device`."""

    def __init__(self, name, start, end, at, linked=0, device=False, thread=1):
        self.fields = dict(name=name, start_ns=start, duration_ns=end - start, correlation_id=at)
        self.fields |= dict(linked_correlation_id=linked, start_thread_id=thread, is_user_annotation=False)
        self.fields["device_type"] = DeviceType.CUDA if device else DeviceType.CPU

    def __getattr__(self, name):
        return lambda: self.fields[name]


def test_kernels_belong_to_the_ranges_that_launched_them():
    host = [
        Event(bench.STEP, 0, 100, 1),
        Event("mark mask", 0, 10, 2),
        Event("aten::ge", 1, 9, 3),
        Event("cudaLaunchKernel", 2, 3, 50, linked=3),
        Event("ChunkedCrossEntropy", 20, 60, 4),
        Event("mark loss", 30, 40, 5),
        Event("cuLaunchKernelEx", 31, 32, 3),  # the id of an operator: another count
        Event("aten::mm", 41, 50, 6),
        Event("cudaLaunchKernel", 42, 43, 51, linked=6),
        Event("cudaStreamSynchronize", 52, 53, 52),
        Event("autograd::engine::evaluate_function: CompiledFunctionBackward", 62, 80, 7, thread=2),
        Event("cuLaunchKernelEx", 63, 64, 53, thread=2),
        Event("cudaDeviceSynchronize", 101, 105, 54),
    ]
    device = [
        Event("void at::native::compare(int)", 10, 20, 50, linked=3, device=True),
        Event("triton_red_fused_max_0", 35, 45, 3, device=True),
        Event("nvjet_hsh_128x256", 45, 55, 51, linked=6, device=True),
        Event("triton_tem_fused_1", 70, 90, 53, device=True),
        Event("mark mask", 10, 20, 2, device=True),
        Event(bench.STEP, 10, 110, 1, device=True),  # the range as the GPU saw it: the host was done before
    ]
    work = bench.device_work([*host, *device], cuda=True)
    assert [part for *_, part, _ in work] == [
        "mask and blocks",
        "loss",
        "head products",
        "attention backward",
    ]
    assert bench.host_calls([*host, *device], bench.SYNCS) == {"cudaStreamSynchronize": 1}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128", "products"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...", "products"),
        ("triton_tem_fused_flex_attention_2", "attention forward"),
        ("triton_tem_fused_flex_attention_backward_7", "attention backward"),
        ("triton_tem_fused_zeros_flex_attention_backward_3", "attention backward"),
        ("void pytorch_flash::flash_fwd_kernel<...", "attention forward"),
        ("triton_poi_fused__to_copy_3", "casts"),
        ("triton_poi_fused__to_copy_t_12", "casts"),
        ("triton_poi_fused__to_copy_mul_silu_4", "norms and pointwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms and pointwise"),
    ],
)
def test_kernel_names_alone_tell_most_parts(kernel, part):
    assert bench.part_of(kernel, frozenset()) == part
