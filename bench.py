"""How fast the parts of the job are, against what this machine can do.

    python bench.py step --shape qwen3-8b --json step.json   # drafter: forward and backward, no optimizer
    python bench.py step --shape qwen3-8b --cold             # also a start with an empty cache, then a second
    python bench.py target --shape qwen3-8b                  # packed prefill up to the last tapped layer
    torchrun --standalone --nproc_per_node=2 bench.py stream --shape qwen3-8b
    python bench.py decode [flags of decode.py]              # draft, verify, a token of the target alone
    python bench.py compare A.json B.json                    # two results of one shape

More flags are those of train.py (--anchor-chunk 1024), and what runs is train.py's own: its gate, its
accumulate, its make_features, its stream, on random weights and fresh random batches. Ceilings are measured
here and now: square products of random data for as long as the steps took, and a copy.

Shape letters: T packed tokens, A anchors, B block size, K tapped layers, H hidden.
"""

import train  # first: it makes this rank's GPU device 0 before torch is imported

# isort: split
import argparse
import bisect
import collections
import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import compile_utils
import data
import decode
import model
import stream
from diagnose.memory import SHAPES as MODELS
from diagnose.memory import use_random_weights
from model import DrafterConfig, TargetConfig
from world import Ending, World, refuse

GIB = 2**30
KINDS = ("step", "target", "stream", "decode")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's sizes (of diagnose.memory, '' is the built-in target) and a batch of equal documents."""

    model: str
    documents: int
    length: int
    anchors: int  # of a document
    flags: str = ""


SHAPES = {
    "tiny": Shape("", 8, 128, 32),
    "smollm2": Shape("smollm2-135m", 32, 280, 64, "--draft-layers 4 --block-size 8"),
    "qwen3-4b": Shape("qwen3-4b", 4, 2048, 512),
    "qwen3-8b": Shape("qwen3-8b", 4, 2048, 512),
}


# ---------------------------------------------------------------------------------------------------------
# The job that is timed: train.py's, with random weights and made-up batches


class RandomBatches:
    """In place of train.Batches: full rows of equal documents, all supervised, random tokens."""

    def __init__(self, c: train.Config, t: TargetConfig):
        self.c, self.vocab = c, t.vocab
        self.random = np.random.default_rng(c.seed)
        self.facts = {
            "batches": 1 << 20,
            "eval_batches": 1,
            "mask_token": 4 if c.mask_token_id < 0 else c.mask_token_id,
            "sources": ["random"],
            "data": (),
            "about": "random tokens",
            "notes": [],
        }

    def train(self, b: int) -> data.Batch:
        c, at = self.c, np.arange(self.c.token_budget)
        batch = data.empty_batch(b, c.token_budget, c.max_batch_size, c.anchors)
        doc, mask = (at // c.max_length).astype(np.int32), np.ones(len(at), bool)
        bounds = np.minimum(np.arange(c.max_batch_size + 2) * c.max_length, c.token_budget)
        anchors = data.draw_anchors(data.valid_anchors(mask, doc), doc, c.anchors, c.seed, b)
        batch.tokens_T = torch.from_numpy(self.random.integers(0, self.vocab, len(at)))
        batch.positions_T, batch.doc_T = torch.from_numpy(at % c.max_length), torch.from_numpy(doc)
        batch.mask_T, batch.anchors_A = torch.from_numpy(mask), torch.from_numpy(anchors)
        batch.cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
        batch.source_D[: int(doc[-1]) + 1] = 0
        return batch

    evaluation = train


def config_of(name: str, flags: list[str], folder: Path, size: int) -> tuple[train.Config, TargetConfig]:
    """train.py's config of a shape; `folder` gets the config.json of its target. ValueError for bad flags."""
    shape = SHAPES[name]
    mine = [*shape.flags.split(), "--max-length", str(shape.length), "--anchors", "0"]
    mine[-1] = str(shape.documents * shape.anchors)
    mine += ["--token-budget", str(shape.documents * shape.length), "--seed", str(time.time_ns() % (1 << 31))]
    if shape.model:
        (folder / "config.json").write_text(json.dumps(MODELS[shape.model]))
        mine += ["--target", str(folder), "--data", "made-up.jsonl"]
    asked = train.parse_flags([*mine, *flags])
    refuse_auto(asked)
    if asked.target_tp != 1:
        raise ValueError(f"--target-tp {asked.target_tp}: only whole targets are timed: leave it out")
    t = train.backend(asked).TargetConfig.from_folder(asked.folder)
    c = train.resolve(asked, t, size, 1)
    c.max_batch_size = -(-c.token_budget // c.max_length)
    return c, t


def refuse_auto(c: train.Config) -> None:
    if c.token_budget == train.AUTO:
        raise ValueError("--token-budget auto: give the number that the run's config.json has")


@contextlib.contextmanager
def job_of(c: train.Config, t: TargetConfig, role: str, batches: type = RandomBatches) -> Iterator[train.Job]:
    """A job of train.py that is past its gate; `role` drafter or target on one rank, '' under torchrun."""
    use_random_weights()
    train.Batches, train.checkpoint.RunFolder = batches, lambda run: None
    ending, world = Ending(), World(c.layout, c.drafters)
    world.join(c.device, allow_cpu=not c.target)
    ending.watch(world)
    try:
        compile_utils.use_cache(c.compile_cache or None)
        job = train.Job(c, t, world, ending, Path())
        job.with_budget = lambda budget: c
        if role:
            world.drafts, world.runs_target, world.role = role == "drafter", role == "target", role
            world.drafters_per_node = int(role == "drafter")
        with train.memory_explained(job):
            job.load_models()
            stream.connect(world)
            train.gate(job)
            yield job
        world.leave()
    except Exception as error:  # every rank must end with it, none may wait in a destructor
        train.end(train.end_badly(error, world, ending, None))
    finally:
        compile_utils.thaw()
        ending.finished()


class Clock:
    """Milliseconds between `begin` and `end` on the device, read once everything has been issued."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self.marks.append([self.mark()])

    def end(self) -> None:
        self.marks[-1].append(self.mark())

    def read(self) -> list[float]:
        wait(self.cuda)
        return [a.elapsed_time(b) if self.cuda else 1000 * (b - a) for a, b in self.marks]


def wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------
# Ceilings


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """What square products of random data reach, hot: median of the last half of so many seconds."""
    cuda = device.type == "cuda"
    n, several = (8192, 10) if cuda else (256, 1)
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        a, b, one = a.to(dtype), b.to(dtype).T, torch.ones((), device=device)

        def product() -> Tensor:
            return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    else:
        a, b = a.to(dtype), b.to(dtype)
        product = lambda: a @ b  # noqa: E731
    clock, until = Clock(device), time.perf_counter() + seconds
    product()
    while not clock.marks or time.perf_counter() < until:
        clock.begin()
        for _ in range(several):
            product()
        clock.end()
        wait(cuda)
    ms = clock.read()
    return several * 2 * n**3 / statistics.median(ms[len(ms) // 2 :]) / 1e9


def copy_gbs(device: torch.device) -> float:
    """GB/s, read and written, of a large copy on the device."""
    x = torch.empty((1 << 30) if device.type == "cuda" else (1 << 28), dtype=torch.uint8, device=device)
    y, clock = torch.zeros_like(x), Clock(device)
    for _ in range(10):
        clock.begin()
        x.copy_(y)
        clock.end()
    return 2 * x.nbytes / statistics.median(clock.read()) / 1e6


# ---------------------------------------------------------------------------------------------------------
# Where the time of a step goes

GEMMS = (
    "gemm",
    "nvjet",
    "cutlass",
    "cublas",
    "xmma",
    "splitk",
    "triton_tem_fused_mm",
    "triton_tem_fused_addmm",
)
CPU_GEMMS = ("aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cuMemCreate")
CASTS = re.compile(r"triton_poi_fused__to_copy(__to_copy|_t|_permute|_view|_transpose|_clone)*(_\d+)?$")
STEP, LOSS = "bench step", "CrossEntropy"
MARKS = {  # ranges of the host whose kernels belong to a part, whatever they are called
    "mark mask": "mask and blocks",
    "mark loss": "loss",
    LOSS: "loss",
    "torch::autograd::AccumulateGrad": "gradient sums",
    "mark measure": "counts",
}


@contextlib.contextmanager
def marked(job: train.Job) -> Iterator[None]:
    """Inside, what the step calls by these names is a range that the profiler sees."""

    def around(name: str, call: Callable) -> Callable:
        def inner(*args, **kwargs):
            with record_function(f"mark {name}"):
                return call(*args, **kwargs)

        return inner

    places = [(model, "block_mask", "mask"), (model, "dense_mask", "mask"), (model, "make_blocks", "mask")]
    places += [(train, "measure", "measure"), (train, "outcomes", "measure")]
    if hasattr(job, "drafter"):
        places += [(job.drafter, n, n[4:]) for n in vars(job.drafter) if n.startswith("run_")]
    kept = [
        (owner, name, getattr(owner, name), label) for owner, name, label in places if hasattr(owner, name)
    ]
    for owner, name, call, label in kept:
        setattr(owner, name, around(label, call))
    try:
        yield
    finally:
        for owner, name, call, _ in kept:
            setattr(owner, name, call)


def part_of(kernel: str, marks: frozenset[str]) -> str:
    """The part that a kernel (on the CPU: an operator) belongs to, by its name and its host ranges."""
    name = kernel.lower()
    if "attention_backward" in name or "flash_bwd" in name or "bwd_dq" in name:
        return "attention backward"
    if "scaled_dot_product" in name or "flex_attention" in name or "flash_fwd" in name or "fmha" in name:
        return "attention backward" if "backward" in name else "attention forward"
    if any(g in name for g in GEMMS) or kernel in CPU_GEMMS:
        return "head products" if LOSS in marks else "products"
    if "triton_tem" in name:  # a template with no name of its own: attention, since no product is one here
        return "attention backward" if "backward" in marks else "attention forward"
    for mark in marks:
        if mark in MARKS:
            return MARKS[mark]
    if "memcpy" in name or "memset" in name:
        return "copies and fills"
    return "casts" if CASTS.match(name) else "norms and pointwise"


CALLS = re.compile(r"(cuda|cu|hip)[A-Z]")  # names of the CUDA runtime and driver


def host_marks(events: list) -> tuple[dict[int, frozenset[str]], dict[int, frozenset[str]]]:
    """The ranges that each host event lies in, `backward` where autograd launched it; by correlation id,
    of operators and of CUDA calls (their ids are not the same count).
    """
    found: tuple[dict, dict] = ({}, {})
    by_thread = collections.defaultdict(list)
    for e in events:
        if e.device_type() == DeviceType.CPU:
            by_thread[e.start_thread_id()].append(e)
    for of_thread in by_thread.values():
        stack: list[tuple[int, frozenset[str]]] = []
        for e in sorted(of_thread, key=lambda e: (e.start_ns(), -e.duration_ns())):
            while stack and stack[-1][0] <= e.start_ns():
                stack.pop()
            marks = stack[-1][1] if stack else frozenset()
            name = e.name().removeprefix("autograd::engine::evaluate_function: ")
            found[bool(CALLS.match(name))][e.correlation_id()] = marks
            if name != e.name():
                marks |= {"backward"}
            if name in MARKS or name == STEP:
                marks |= {name}
            if LOSS in name:  # the autograd function, forward and backward
                marks |= {LOSS}
            if name.startswith("aten::"):
                marks |= {"operator"}
            stack.append((e.start_ns() + e.duration_ns(), marks))
    return found


def device_work(events: list, cuda: bool) -> list[tuple[int, int, str, str]]:
    """(start, end, part, name) in ns of all that ran: kernels, or on the CPU the outermost operators."""
    (operators, calls), work, none = host_marks(events), [], frozenset()
    for e in events:
        name = e.name()
        if (e.device_type() != DeviceType.CPU) != cuda or e.duration_ns() <= 0:
            continue
        if cuda:
            if (
                e.is_user_annotation()
                or name.startswith(("mark ", STEP))
                or name.endswith((" Sync", "Stream Wait Event"))
            ):
                continue
            marks = calls.get(e.correlation_id(), none) | operators.get(e.linked_correlation_id(), none)
        else:
            marks = operators.get(e.correlation_id(), none)
            if not name.startswith("aten::") or "operator" in marks or STEP not in marks:
                continue
        work.append((e.start_ns(), e.start_ns() + e.duration_ns(), part_of(name, marks), name))
    return sorted(work)


def split_time(work: list[tuple[int, int, str, str]]) -> tuple[dict[str, float], float, list]:
    """(milliseconds of each part, gaps included; total; kernels by time) from first start to last end.

    What runs at the same time counts once, for the one that began first, so that the parts sum to the total.
    """
    parts, kernels = collections.Counter(), collections.defaultdict(lambda: [0, 0.0])
    begun = done = work[0][0]
    for start, end, part, name in work:
        if start > done:
            parts["gaps"] += (start - done) / 1e6
            done = start
        alone = max(0, end - done) / 1e6
        done = max(done, end)
        parts[part] += alone
        entry = kernels[part, name]
        entry[0], entry[1] = entry[0] + 1, entry[1] + alone
    listed = sorted(((ms, count, *key) for key, (count, ms) in kernels.items()), reverse=True)
    return dict(parts), (done - begun) / 1e6, listed


def host_calls(events: list, names: tuple[str, ...]) -> collections.Counter:
    """Calls of the CUDA runtime with these names while a step was being issued, in any thread."""
    host = [e for e in events if e.device_type() == DeviceType.CPU]  # the GPU has the step's range too, later
    steps = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in host if e.name() == STEP)
    starts, found = [s for s, _ in steps], collections.Counter()
    for e in host:
        if e.name() in names:
            at = bisect.bisect_right(starts, e.start_ns()) - 1
            if at >= 0 and e.start_ns() < steps[at][1]:
                found[e.name()] += 1
    return found


def look_inside(job: train.Job, step: Callable[[int], object], steps: int = 3) -> dict:
    """A profile of a few steps in a row: time by part, idle share, what stops the host."""
    cuda = job.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with marked(job), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        for measured in (False, True) if cuda else (True,):  # its first start is slow
            with profile(activities=activities) as seen:
                for i in range(steps if measured else 1):
                    with record_function(STEP):
                        step(i)
                wait(cuda)
    events = list(seen.profiler.kineto_results.events())
    work = device_work(events, cuda)
    if not work:
        return {"profile": "the profiler saw no kernel: is CUPTI allowed for this user?"}
    parts, total, kernels = split_time(work)
    copies = [e for e in events if cuda and "memcpy dtoh" in e.name().lower()]
    return {
        "profiled_ms": total / steps,
        "parts_ms": {part: ms / steps for part, ms in sorted(parts.items(), key=lambda p: -p[1])},
        "idle_share": parts.get("gaps", 0.0) / total,
        "busy_ms": (total - parts.get("gaps", 0.0)) / steps,
        "launches": len(work) / steps,
        "syncs": {name: n / steps for name, n in host_calls(events, SYNCS).items()},
        "copies_to_host": len(copies) / steps,
        "allocations": {name: n / steps for name, n in host_calls(events, ALLOCATIONS).items()},
        "sync_lines": sync_lines(step) if cuda else [],
        "kernels": [
            {"ms": ms / steps, "calls": n / steps, "part": p, "name": k} for ms, n, p, k in kernels[:40]
        ],
    }


def sync_lines(step: Callable[[int], object]) -> list[str]:
    """Where a step makes the host wait for the GPU, as torch itself tells."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return list(dict.fromkeys(lines))


# ---------------------------------------------------------------------------------------------------------
# What every result says


def facts(kind: str, name: str, c: train.Config, job: train.Job | None) -> dict:
    dtype = str(job.dtype).removeprefix("torch.") if job else ""
    gpu = (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available() and job and job.device.type == "cuda"
        else ""
    )
    root = Path(__file__).parent
    found = {"bench": kind, "shape": name, "dtype": dtype + ("+fp8" if getattr(c, "fp8", False) else "")}
    found["sizes"] = {
        "tokens": c.token_budget, "documents": c.max_batch_size, "anchors": c.anchors, "block": c.block_size,
        "layers": c.draft_layers, "taps": c.taps,
    }  # fmt: skip
    found |= {"torch": torch.__version__, "gpu": gpu or "cpu", "commit": commit(root), "seed": c.seed}
    found["source"] = compile_utils.source_hash(model, train)
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return found | {"command": " ".join(["python", "bench.py", *sys.argv[1:]])}


def commit(root: Path) -> str:
    """The commit of these files, with a + where they were edited since."""
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        edited = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + "+" * bool(edited.stdout.strip()) if head.returncode == 0 else "unknown"


def spread(ms: list[float]) -> dict:
    """Median, 10th and 90th percentile."""
    low, high = np.percentile(ms, [10, 90])
    return {
        "median_ms": statistics.median(ms),
        "p10_ms": float(low),
        "p90_ms": float(high),
        "repeats": len(ms),
    }


def ceilings(job: train.Job, ms: list[float], flops: float) -> dict:
    """This device's own limits, and how near the work comes."""
    seconds = min(10.0, max(1.0, sum(ms) / 1000)) if job.device.type == "cuda" else 0.1
    found = {"ceiling_tflops": matmul_tflops(job.device, job.dtype, seconds)}
    if getattr(job.c, "fp8", False):
        found["ceiling_fp8_tflops"] = matmul_tflops(job.device, torch.float8_e4m3fn, seconds)
    tflops = flops / statistics.median(ms) / 1e9
    return {"flops": flops, "tflops": tflops, **found, "share": tflops / found["ceiling_tflops"]} | {
        "ceiling_gbs": copy_gbs(job.device)
    }


def memory(device: torch.device) -> dict:
    """GiB: the most that tensors held since the last reset; what the device has in use, caches included."""
    if device.type != "cuda":
        return {"peak_gib": None, "device_gib": None}
    free, total = torch.cuda.mem_get_info()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "device_gib": (total - free) / GIB}


def repeat(
    job: train.Job, step: Callable[[int], object], between: Callable[[], object], count: int
) -> list[float]:
    """Milliseconds of so many steps after a warm-up; `between` prepares the next one and is not timed."""
    for i in range(3):
        between()
        step(i)
    if job.device.type == "cuda":
        wait(True)
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(job.device)
    for i in range(count):
        between()
        clock.begin()
        step(i)
        clock.end()
    return clock.read()


# ---------------------------------------------------------------------------------------------------------
# step and target


def bench_step(name: str, c: train.Config, t: TargetConfig, count: int) -> dict:
    """One forward and backward of the drafter over a batch, as train.py runs it; then its update alone."""
    with job_of(c, t, "drafter") as job:
        batches = [job.batches.train(b) for b in range(8)]
        step, fresh = drafter_work(job, batches)
        ms = repeat(job, step, fresh, count)
        d: DrafterConfig = job.drafter_config
        mean = float(
            np.mean([(b.positions_T[b.anchors_A[b.anchors_A >= 0]]).float().mean() for b in batches])
        )
        anchors = int((batches[0].anchors_A >= 0).sum())
        found = facts("step", name, c, job) | spread(ms) | memory(job.device)
        found |= {"anchor_chunk": c.anchor_chunk} | gate_facts()
        found |= ceilings(job, ms, d.step_flops(c.token_budget, anchors, mean))
        found["tokens_per_s"] = c.token_budget / found["median_ms"] * 1000
        fresh()
        found |= look_inside(job, step)
        weight = step(0)[1]
        found["update_ms"] = statistics.median(
            repeat(job, lambda i: train.update(job, weight, 1e-6), lambda: None, 5)
        )
    return found


def drafter_work(
    job: train.Job, batches: list[data.Batch]
) -> tuple[Callable[[int], Tensor], Callable[[], None]]:
    """(one forward and backward of these batches in turn, new features and no gradients)."""
    features_TKH = torch.empty(job.shapes.tokens, job.shapes.width, dtype=job.dtype, device=job.device)

    def fresh() -> None:
        features_TKH.normal_()
        grads = [p.grad for p in job.drafter.parameters() if p.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def step(i: int) -> Tensor:
        return train.accumulate(job, job.drafter, batches[i % len(batches)], features_TKH, sync=True)

    fresh()
    return step, fresh


def bench_target(name: str, c: train.Config, t: TargetConfig, count: int) -> dict:
    """The target's features of a packed batch, up to its last tapped layer."""
    with job_of(c, t, "target") as job, torch.no_grad():
        batches = [job.batches.train(b) for b in range(8)]
        out_TKH = torch.empty(job.shapes.tokens, job.shapes.width, dtype=job.dtype, device=job.device)

        def step(i: int) -> Tensor:
            return job.make_features(batches[i % 8], out_TKH)

        ms = repeat(job, step, lambda: None, count)
        layers = max(job.drafter_config.ids) + 1
        found = facts("target", name, c, job) | spread(ms) | memory(job.device) | gate_facts()
        flops = t.prefill_flops(c.token_budget, layers) + attention_flops(t, batches[0], layers)
        found |= ceilings(job, ms, flops)
        found["tokens_per_s"] = c.token_budget / found["median_ms"] * 1000
        found |= look_inside(job, step)
    return found


def attention_flops(t: TargetConfig, batch: data.Batch, layers: int) -> float:
    """Useful FLOPs of causal attention inside each document, windows counted."""
    lengths = batch.cu_seqlens.diff().tolist()
    pairs = 0.0
    for window in t.windows[:layers]:
        for n in lengths:
            w = min(window or n, n)
            pairs += w * (w + 1) / 2 + (n - w) * w
    return 4.0 * t.heads * t.head_dim * pairs


def gate_facts() -> dict:
    """How the gate went: seconds of the work, graphs read and compiled."""
    report = compile_utils.last_report()
    mine = report.ranks[0] if report and report.ranks else None
    found = {"cold_s": None, "warm_s": None, "gate_s": mine.seconds if mine else None}
    return found | {"gate_hits": mine.counters.hits, "gate_misses": mine.counters.compiled} if mine else found


def cold_start(argv: list[str], cache: str) -> float | None:
    """Seconds of the gate's work with an empty cache folder, in a process of its own that ends there."""
    command = [sys.executable, __file__, *argv, "--compile-cache", cache, "--gate-only"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("gate took ")]
    if done.returncode or not lines:
        raise ValueError(
            f"the cold start failed: {(done.stderr.strip().splitlines() or ['no word'])[-1][:300]}"
        )
    return float(lines[0].split()[2])


# ---------------------------------------------------------------------------------------------------------
# stream


def bench_stream(name: str, c: train.Config, t: TargetConfig, count: int) -> dict:
    """From one target to one drafter: transfers alone, each side alone, and both at once.

    Each is measured twice, the second time in the opposite order: a GPU is slower when it is hot, and a
    percent of a step is more than a transfer.
    """
    with job_of(c, t, "") as job:
        world, nothing = job.world, lambda x: None
        batch = RandomBatches(c, t).train(0)
        draft = lambda x: train.accumulate(job, job.drafter, batch, x, sync=True)  # noqa: E731
        prefill = lambda x: job.make_features(batch, x)  # noqa: E731
        order = ("transfer", "drafter", "drafter+transfer", "target", "target+transfer")
        parts = dict.fromkeys(order, 0.0)
        for part in (*order, *reversed(order)):
            own = "drafter" if world.drafts else "target"
            work = (draft if world.drafts else prefill) if own in part else nothing
            parts[part] += side_by_side(job, count, "transfer" in part, work) / 2
        worst = {part: max(world.gather(ms)) for part, ms in parts.items()}
        found = facts("stream", name, c, job) | {"repeats": count, "ms": worst}
        size = job.shapes.tokens * job.shapes.width * torch.empty(0, dtype=job.dtype).element_size()
        found |= {"median_ms": worst["transfer"], "bytes": size, "gbs": size / worst["transfer"] / 1e6}
        for side in ("drafter", "target"):
            exposed = max(0.0, worst[f"{side}+transfer"] - worst[side])
            found[f"hidden_{side}"] = 1 - min(1.0, exposed / worst["transfer"])
    return found


def side_by_side(job: train.Job, rounds: int, send: bool, work: Callable[[Tensor], object]) -> float:
    """Milliseconds a batch of this rank's, when it does its work on each, sending or receiving where asked.

    A round has as many batches as make every rank's share whole; two rounds more, to fill the buffers.
    """
    world, cuda = job.world, job.device.type == "cuda"
    end = (stream.Receiver if world.drafts else stream.Sender)(world, job.shapes, job.c.depth)
    batch, own = RandomBatches(job.c, job.t).train(0), end.buffers.all[0]
    whose = world.drafter_of if world.drafts else world.target_of
    round_of = math.lcm(world.drafters_per_node, world.per_node - world.drafters_per_node) * world.nodes
    begun, done = 0.0, 0

    def expect(first: int, last: int) -> None:
        for b in range(first * round_of, last * round_of) if send and world.drafts else ():
            if whose(b) == world.rank:
                end.expect(stream.TRAIN, b)

    expect(0, 2)  # a receiver that expected more would wait for it before the barrier
    with torch.set_grad_enabled(world.drafts):
        for b in range((rounds + 2) * round_of):
            if b == 2 * round_of:
                wait(cuda)
                world.barrier()
                expect(2, rounds + 2)
                begun, done = time.perf_counter(), 0
            if whose(b) != world.rank:
                continue
            done += 1
            if not send:
                work(own)
            elif world.drafts:
                work(end.take()[1])
                end.release()
            else:
                work(end.buffer())
                end.send(stream.TRAIN, dataclasses.replace(batch, index=b))
        if send and not world.drafts:
            end.close()
        wait(cuda)
    return 1000 * (time.perf_counter() - begun) / done


# ---------------------------------------------------------------------------------------------------------
# decode


def bench_decode(flags: list[str]) -> tuple[dict, int]:
    """decode.py's own timing, with its flags."""
    with tempfile.TemporaryDirectory() as place:
        asked = decode.parse_flags([*flags, "--json", f"{place}/decode.json"])
        code = decode.decode(asked)
        r = json.loads(Path(place, "decode.json").read_text())
    found = {"bench": "decode", "shape": r["target"], "dtype": r["dtype"], "median_ms": r["step_ms"]}
    found |= {"torch": torch.__version__, "commit": commit(Path(__file__).parent)}
    found["gpu"] = torch.cuda.get_device_name(0) if r["device"] == "cuda" else "cpu"
    found["sizes"] = {"batch_size": r["batch_size"], "max_new_tokens": r["max_new_tokens"]}
    found |= {k: r[k] for k in r if k not in ("differences", "by_source")}
    t = TargetConfig.from_folder(r["target"])
    looked_up = 0 if t.tied else t.vocab * t.hidden  # a token takes one row of an embedding of its own
    read = t.parameters(t.layers, head=True) - looked_up
    size = torch.empty(0, dtype=getattr(torch, r["dtype"])).element_size()
    found |= {"bytes": read * size, "gbs": read * size / r["step_ms"] / 1e6}
    found["ceiling_gbs"] = copy_gbs(torch.device(r["device"]))
    print(
        f"a token of the target alone reads {read * size / 1e6:.1f} MB of weights: {found['gbs']:.4g} GB/s, "
        f"{100 * found['gbs'] / found['ceiling_gbs']:.0f}% of a copy"
    )
    return found, code


# ---------------------------------------------------------------------------------------------------------
# What is printed


def rows_of(r: dict) -> Iterator[tuple[str, str]]:
    """The result as lines of a table; only what was measured."""
    if "p10_ms" in r:
        yield (
            "median",
            f"{r['median_ms']:.1f} ms (p10 {r['p10_ms']:.1f}, p90 {r['p90_ms']:.1f}, {r['repeats']} times)",
        )
    if "flops" in r:
        yield "useful work", f"{r['flops'] / 1e12:.4g} TFLOP, {r['tflops']:.4g} TFLOP/s"
        yield (
            "of the ceiling",
            f"{100 * r['share']:.1f}% of {r['ceiling_tflops']:.4g} TFLOP/s (square products)",
        )
    if "ceiling_fp8_tflops" in r:
        yield "fp8 ceiling", f"{r['ceiling_fp8_tflops']:.4g} TFLOP/s"
    if "ceiling_gbs" in r:
        yield "copy ceiling", f"{r['ceiling_gbs']:.4g} GB/s"
    if r.get("peak_gib") is not None:
        yield "memory", f"{r['peak_gib']:.2f} GiB by tensors, {r['device_gib']:.2f} in use on the device"
    if r.get("gate_s") is not None:
        yield "gate", f"{r['gate_s']:.1f} s, {r['gate_hits']} hits, {r['gate_misses']} misses"
    if r.get("cold_s") is not None:
        yield "cold start, warm", f"{r['cold_s']:.1f} s, {r['warm_s']:.1f} s"
    if "tokens_per_s" in r and "flops" in r:
        yield "context tokens", f"{r['tokens_per_s'] / 1000:.4g} K/s"
    if "update_ms" in r:
        yield "optimizer", f"{r['update_ms']:.1f} ms more (not in the median)"
    if "profile" in r:
        yield "breakdown", r["profile"]
    if "idle_share" in r:
        idle = f"{100 * r['idle_share']:.2f}% of {r['profiled_ms']:.1f} ms profiled"
        if "busy_ms" in r:  # a profiler slows the host down
            idle += f", {100 * max(0.0, 1 - r['busy_ms'] / r['median_ms']):.2f}% of the median"
        yield "idle", f"{idle}; {r['launches']:.0f} launches"
        stops = ", ".join(f"{name} {n:g}" for name, n in {**r["syncs"], **r["allocations"]}.items())
        yield "host waits a step", f"{stops or 'none'}; {r['copies_to_host']:g} copies to the host"
        if r["sync_lines"]:
            yield "synchronises at", ", ".join(r["sync_lines"])[:75]
    if "gbs" in r:
        yield "link", f"{r['bytes'] / 1e6:.1f} MB in {r['median_ms']:.2f} ms, {r['gbs']:.4g} GB/s"
        for part, ms in r["ms"].items():
            yield f"  {part}", f"{ms:.2f} ms"
        for side in ("drafter", "target"):
            more = r["ms"][f"{side}+transfer"] / r["ms"][side] - 1
            hidden = f"{100 * r[f'hidden_{side}']:.0f}% of the transfer"
            yield f"hidden behind the {side}", f"{hidden}, its batch takes {100 * more:+.1f}%"


def show(r: dict) -> None:
    sizes = ", ".join(f"{k} {v}" for k, v in r["sizes"].items())
    print(f"{r['bench']} {r['shape']} | {r['dtype']} on {r['gpu']}, torch {r['torch']}, commit {r['commit']}")
    print(sizes)
    print(tabulate(list(rows_of(r)), tablefmt="plain"))
    if "parts_ms" in r:
        total = r["profiled_ms"]
        print(
            tabulate(
                [(p, ms, 100 * ms / total) for p, ms in r["parts_ms"].items()],
                ["part", "ms", "%"],
                floatfmt=".2f",
            )
        )
        shown = [(k["ms"], k["calls"], k["part"], k["name"][:46]) for k in r["kernels"][:14]]
        print(tabulate(shown, ["ms", "calls", "part", "kernel"], floatfmt=".2f"))


COMPARED = (
    "median_ms p10_ms p90_ms tflops ceiling_tflops share peak_gib device_gib cold_s warm_s gate_s update_ms "
    "idle_share launches tokens_per_s gbs hidden_drafter hidden_target draft_ms verify_ms step_ms"
).split()


def compare(a: dict, b: dict, names: tuple[str, str]) -> str:
    """Two results of the same work as one table. ValueError where it was not the same work."""
    shown = lambda value: data.short(str(value), 120)  # noqa: E731
    for field in ("bench", "shape", "sizes"):
        if a.get(field) != b.get(field):
            raise ValueError(
                f"compare: {field} is {shown(a.get(field))} in {names[0]} and {shown(b.get(field))} in "
                f"{names[1]}: measure the same shape twice"
            )
    rows = [(f, a.get(f), b.get(f)) for f in ("dtype", "gpu", "torch", "commit", "anchor_chunk")]
    rows = [(f, x, y) for f, x, y in rows if x is not None or y is not None]
    rows = [(f, shown(x), shown(y), "" if x == y else "differs") for f, x, y in rows]

    def numbers(name: str, x: float | None, y: float | None) -> tuple:
        return name, *(f"{v:.4g}" for v in (x, y)), f"{100 * (y / x - 1):+.1f}%" if x else ""

    found = [(f, a.get(f), b.get(f)) for f in COMPARED]
    parts = [
        (f"  {p}", ms, b.get(key, {}).get(p, 0.0))
        for key in ("parts_ms", "ms")
        for p, ms in a.get(key, {}).items()
    ]
    rows += [numbers(f, x, y) for f, x, y in [*found, *parts] if x is not None and y is not None]
    text = tabulate(rows, ["", *(Path(n).stem[:24] for n in names), "change"], disable_numparse=True)
    apart = b.get("p10_ms", 0) > a.get("p90_ms", 0) or b.get("p90_ms", 0) < a.get("p10_ms", 0)
    speed = a["median_ms"] / b["median_ms"]
    note = "" if apart or "p10_ms" not in a else " (within the spread)"
    return f"{text}\n{names[1]} is {speed:.3f} times as fast as {names[0]}{note}"


def read_result(name: str) -> dict:
    found = data.read_json(Path(name), "measure it again")
    if found is None or found.get("bench") not in KINDS or "median_ms" not in found:
        raise ValueError(f"{name}: no result of bench.py: give a file that --json wrote")
    for field in ("parts_ms", "ms"):
        if not isinstance(found.get(field, {}), dict):
            raise ValueError(f"{name}: {field} is no object: measure it again")
    listed = [(f, found.get(f)) for f in COMPARED]
    listed += [(p, ms) for field in ("parts_ms", "ms") for p, ms in found.get(field, {}).items()]
    for field, value in listed:
        missing = value is None and field != "median_ms"
        if not missing and not (type(value) in (int, float) and abs(value) < 1e18):  # json reads NaN too
            raise ValueError(
                f"{name}: {data.short(field, 40)} {data.short(str(value), 40)} is no number: measure it again"
            )
    if not found["median_ms"] > 0:
        raise ValueError(f"{name}: median_ms {found['median_ms']} must be above 0: measure it again")
    return found


# ---------------------------------------------------------------------------------------------------------
# The command


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(own flags, flags of train.py or decode.py)."""
    parser = data.Parser("bench.py", __doc__)
    parser.add_argument("what", choices=(*KINDS, "compare"))
    parser.add_argument("files", nargs="*", help="for compare: two files that --json wrote")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="sizes of model and batch (tiny)")
    parser.add_argument("--json", metavar="FILE", default="", help="write the result")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps (20)")
    parser.add_argument(
        "--cold", action="store_true", help="also a start with an empty cache, then a warm one"
    )
    parser.add_argument("--gate-only", action="store_true", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(argv)
    if args.what == "compare" and (len(args.files) != 2 or rest):
        parser.error("compare takes two files that --json wrote")
    if args.cold and args.what != "step":
        parser.error("--cold: only with step")
    if args.what != "compare" and args.files:
        parser.error(f"{args.what} takes no file: {args.files[0]}")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    try:
        if args.json:
            data.check_output(args.json)
    except ValueError as error:
        parser.error(f"--json {error}")
    return args, rest


def gate_only(c: train.Config, t: TargetConfig) -> None:
    with job_of(c, t, "drafter"):
        print(f"gate took {compile_utils.last_report().ranks[0].seconds} s", flush=True)


def measure(args: argparse.Namespace, flags: list[str], place: Path) -> dict | None:
    """The result of one command; None where it has none (another rank, a start alone)."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if (args.what == "stream") != (ranks == 2) or ranks > 2:
        launch = "torchrun --standalone --nproc_per_node=2" if args.what == "stream" else "python"
        raise ValueError(
            f"{args.what}: not with {ranks} rank(s): start it with {launch} bench.py {args.what}"
        )
    if SHAPES[args.shape].model and not torch.cuda.is_available():
        raise ValueError(f"--shape {args.shape}: torch sees no GPU here: --shape tiny runs on a CPU")
    c, t = config_of(args.shape, flags, place, ranks)
    if args.gate_only:
        return gate_only(c, t)
    cold = None
    if args.cold:
        c.compile_cache = str(place / "cache")
        cold = cold_start(["step", "--shape", args.shape, *flags], c.compile_cache)
    run = {"step": bench_step, "target": bench_target, "stream": bench_stream}[args.what]
    found = run(args.shape, c, t, args.repeats)
    if cold is not None:
        found |= {"cold_s": cold, "warm_s": found["gate_s"]}
    return found if int(os.environ.get("RANK", 0)) == 0 else None


def main(argv: list[str] | None = None) -> int:
    """Exit 0: measured; 2: a mistake, in one line."""
    code = 0
    try:
        args, flags = parse(argv)
        if args.what == "compare":
            print(compare(*map(read_result, args.files), tuple(args.files)))
            return 0
        if args.what == "decode":
            found, code = bench_decode(flags)
        else:
            with tempfile.TemporaryDirectory() as place:
                found = measure(args, flags, Path(place))
    except ValueError as error:
        return refuse(f"bench.py: {error}")
    if found and args.what != "decode":
        show(found)
    if found and args.json:
        try:
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            why = f"could not be written ({error.strerror}): give another file"
            print(f"bench.py: {args.json}: {why}", file=sys.stderr)
            return 1
    return code


if __name__ == "__main__":
    train.end(main())
