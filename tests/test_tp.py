"""pytest tests/test_tp.py: a target that several ranks share is the target, and a job knows its ranks as one.

T packed tokens, K tapped layers, H hidden.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY
from test_target import CASES, IDS, LENGTHS, SIZES, packed_row, randomise
from test_train import relative_difference
from test_world import place

import headroom
import model
import train
from diagnose import memory
from model import Target, TargetConfig
from world import World

# ---------------------------------------------------------------------------------------------------------
# The model


def save(folder: Path, case: str, **sizes) -> Path:
    """A random model as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes | sizes))
    hf = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(hf)
    hf.save_pretrained(folder)
    return folder


SHARED = [case for case in CASES if CASES[case][1].get("num_key_value_heads", 2) % 2 == 0]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def features_of_parts(rank: int) -> None:
    """What the ranks compute together is what one computes alone: in fp32 to rounding, in bf16 no worse."""
    world = World("split", 1, 2)
    world.join("cpu", allow_cpu=True)
    assert (world.target_group is not None) == (rank > 0)
    for folder in sorted(Path(os.environ["MODELS"]).iterdir()) if rank else ():
        part, bf16_part = (
            Target.load(folder, dtype=dtype, layers=3, head=False, part=world.part, parts=2)
            for dtype in (torch.float32, torch.bfloat16)
        )
        whole = Target.load(folder, layers=3, head=False)
        tokens, positions, bounds = packed_row(whole.c.vocab)
        inputs = (tokens, positions, bounds, max(LENGTHS), IDS)
        expected_TKH, alone_TKH = whole.features(*inputs), part.features(*inputs)
        assert off(alone_TKH, expected_TKH) > 0.05, folder  # one part by itself is not the target
        part.group = bf16_part.group = world.target_group
        assert off(part.features(*inputs), expected_TKH) < 1e-5, folder
        rounded = off(whole.bfloat16().features(*inputs).float(), expected_TKH)
        assert 0 < off(bf16_part.features(*inputs).float(), expected_TKH) < 3 * rounded, folder
    world.leave()


def test_features_of_two_ranks_are_those_of_one(launcher, tmp_path):
    for case in SHARED:
        save(tmp_path / case, case)
    launcher.call(3, "test_tp.features_of_parts", MODELS=str(tmp_path)).good()


@pytest.mark.parametrize("parts", [2, 4])
def test_the_parts_are_the_weights_once_and_none_reads_more(tmp_path, monkeypatch, parts):
    """What the parts give adds up to the whole layer's; together they read each of its matrices once."""
    folder = save(tmp_path, "llama-biases", num_key_value_heads=4)
    read = []
    plain = model.read_weights

    def spy(*args):
        for name, weight in plain(*args):
            read.append((name, weight.numel()))
            yield name, weight

    whole = Target.load(folder, dtype=torch.float64, layers=2, head=False)
    monkeypatch.setattr(model, "read_weights", spy)
    how = {"dtype": torch.float64, "layers": 2, "head": False, "parts": parts}
    held = [Target.load(folder, part=part, **how) for part in range(parts)]
    sizes = {name: sum(n for other, n in read if other == name) for name, _ in read}
    c, x = whole.c, torch.randn(7, whole.c.hidden, dtype=torch.float64)
    q = c.heads * c.head_dim
    assert sizes["model.layers.1.self_attn.q_proj.weight"] == q * c.hidden
    assert sizes["model.layers.1.mlp.down_proj.weight"] == c.intermediate * c.hidden
    assert sizes["model.embed_tokens.weight"] == parts * c.vocab * c.hidden  # that one is whole on all
    for i, layer in enumerate(whole.layers):
        gated = sum(target.layers[i].gated(x) for target in held)
        torch.testing.assert_close(gated, layer.gated(x))
    assert sum(p.numel() for p in held[0].parameters()) == c.part(parts).parameters(2)


def test_parts_that_do_not_come_out_even(tmp_path):
    c = TargetConfig.from_folder(save(tmp_path, "llama"))
    assert c.part(1) == c and c.part(2).heads * 2 == c.heads
    with pytest.raises(ValueError, match="4 ranks cannot share the target's 2 key/value heads evenly"):
        c.part(4)
    with pytest.raises(ValueError, match="2 ranks cannot share the target's 41 columns of the MLP evenly"):
        dataclasses.replace(c, intermediate=41).part(2)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_estimate_is_of_the_part(parts):
    """On paper against the bytes that a part's tensors take and those that come and go as it runs."""
    sizes = {"hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "intermediate": 1536}
    t = dataclasses.replace(TargetConfig.from_folder(TINY), **sizes)
    c = train.resolve(train.parse_flags(["--token-budget", "4096"]), t, 8, 1)
    c.target_tp = parts
    paper = headroom.estimate(c, t, "target", 8).parts
    d = c.drafter(t)
    with torch.device("meta"):
        target = Target(t, max(d.ids) + 1, head=False, parts=parts)
    assert paper["target weights"] == 2 * sum(p.numel() for p in target.parameters())
    traced = memory.trace_features(c, t)  # a part lets go of some of it earlier than the formula knows
    assert traced <= 1.001 * paper["target activations"] <= (1.3 if parts > 1 else 1.1) * traced


def test_a_target_that_is_too_large_is_told_how_many_ranks_share_it(tmp_path, capsys):
    """The smallest number that fits, as a flag; with it the verdict is good, with one less it is not."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | sizes))
    asked = ["--target", str(tmp_path), "--draft-layers", "2", "--anchor-chunk", "512"]

    def told(gpu: str, *flags: str) -> tuple[int, str]:
        return memory.main([*asked, "--gpu-memory", gpu, *flags]), capsys.readouterr().out

    code, said = told("96GB")
    assert code == 1 and re.search("--target-tp 2 .*# each target on 2 GPUs", said)
    assert "target  does not fit" in said
    assert told("96GB", "--target-tp", "2")[0] == 0
    code, said = told("60GB", "--target-tp", "2")
    assert code == 1 and re.search("--target-tp 4 .*# each target on 4 GPUs", said)
    assert told("60GB", "--target-tp", "4")[0] == 0
    q = memory.Question([*asked, "--target-tp", "2"], 8, 1)
    told = headroom.refusal(q.resolved, q.config, q.target, "target", 8, 60 << 30)
    assert "or --target-tp 4, or --ignore-headroom" in told or "give --target-tp 4" in told
    told = headroom.refusal(q.resolved, q.config, q.target, "target", 8, 60 << 30, nodes=2)
    assert "--target-tp" not in told  # a node of 4 ranks has no room for a target of 4 and a drafter
    whole = dataclasses.replace(q.config, target_tp=1)
    both = [headroom.estimate(c, q.target, "colocate", 8).peak for c in (whole, q.config)]
    assert both[0] == both[1]  # a rank that does both has all of it


# ---------------------------------------------------------------------------------------------------------
# The world


WORLDS = [(3, 1, 1, 2), (5, 1, 1, 2), (8, 1, 2, 3), (8, 2, 4, 2), (12, 2, 4, 2)]


@pytest.mark.parametrize(("size", "nodes", "drafters", "tp"), WORLDS)
def test_batches_go_to_leaders_and_names_tell_the_part(monkeypatch, size, nodes, drafters, tp):
    worlds = [place_tp(monkeypatch, rank, size, nodes, drafters, tp) for rank in range(size)]
    first = worlds[0]
    assert first.targets * tp + first.drafters == size
    made = [first.target_of(b) for b in range(first.targets * 6)]
    assert {made.count(rank) for rank in made} == {6} and len(set(made)) == first.targets
    assert all(w.target_of(b) == made[b] for w in worlds for b in range(len(made)))
    assert all(worlds[leader].node == b % nodes for b, leader in enumerate(made))
    members = {leader: [w for w in worlds if w.leader == leader and not w.drafts] for leader in set(made)}
    for leader, ranks in members.items():
        assert [w.rank for w in ranks] == list(range(leader, leader + tp))
        assert [w.part for w in ranks] == list(range(tp))
        assert len({w.node for w in ranks}) == 1
    names = {w.name() for w in worlds if w.runs_target}
    told = {f"target {t}, part {p} of {tp}" for t in range(first.targets) for p in range(1, tp + 1)}
    assert {re.search(r"\((.*)\)", name)[1] for name in names} == told
    assert {w.role for w in worlds} == {"drafter", "target"}


def place_tp(monkeypatch, rank: int, size: int, nodes: int, drafters: int, tp: int) -> World:
    place(monkeypatch, rank, size, nodes, "split", drafters)  # the environment
    return World("split", drafters, tp)


# ---------------------------------------------------------------------------------------------------------
# Jobs

STEPS = ("--batches-per-step", 4, "--steps", 8, "--eval-every", 4, "--save-every", 4)


@pytest.fixture(scope="module")
def plain(launcher, small, tmp_path_factory):
    return launcher.run(2, tmp_path_factory.mktemp("plain") / "run", *small, *STEPS).good()


@pytest.fixture(scope="module")
def shared(launcher, small, tmp_path_factory):
    return launcher.run(3, tmp_path_factory.mktemp("tp") / "run", *small, *STEPS, "--target-tp", 2).good()


def test_a_shared_target_gives_the_same_losses(plain, shared):
    assert "1 drafter(s) + 1 target(s) of 2 ranks" in shared.text
    assert relative_difference(plain.records(), shared.records()) < 1e-5


def test_two_shared_targets_give_the_same_losses(launcher, small, plain, tmp_path):
    run = launcher.run(5, tmp_path / "run", *small, *STEPS, "--target-tp", 2, "--drafters", 1).good()
    assert "1 drafter(s) + 2 target(s) of 2 ranks" in run.text
    assert relative_difference(plain.records(), run.records()) < 1e-5


def test_resume_with_another_number_of_ranks_a_target(launcher, plain, shared, monkeypatch):
    """From the checkpoint of step 4 on, 4 steps with whole targets; the split is made anew."""
    place = shared.folder / "step-000004"
    monkeypatch.setenv("WORLD_SIZE", "3")
    for flags, drafters in (([], 1), (["--target-tp", "2"], 1), (["--target-tp", "1"], 0)):
        assert train.parse_flags(["--resume", str(place), *flags]).drafters == drafters
    again = launcher.run(3, None, "--resume", place, "--target-tp", 1, "--drafters", 2).good()
    assert "2 drafter(s) + 1 target(s) on" in again.text
    assert relative_difference(plain.records(), shared.records()) < 1e-5


DIES = """
import os, model
plain, calls = model.Target.run_part, []
def run_part(*args):
    calls.append(1)
    if RANK == {rank} and len(calls) > 60:
        os.kill(os.getpid(), 9)
    return plain(*args)
model.Target.run_part = run_part
"""


def test_a_part_that_dies_ends_the_job(launcher, small, tmp_path, rank=2):
    flags = (*small, "--steps", 1000, "--target-tp", 2)
    run = launcher.run(3, tmp_path / "run", *flags, plant=DIES.format(rank=rank), limit_s=30)
    assert run.codes[rank] == -9
    assert {code for r, code in enumerate(run.codes) if r != rank} == {1}, run.text
    assert "lost the connection to another rank" in run.text
    assert run.status()["state"] == "failed"


IN_A_PART = """
import os
plain = train.Job.make_features
def make_features(job, batch, out):
    if RANK == {rank} and batch.index == 9:
        {what}
    return plain(job, batch, out)
train.Job.make_features = make_features
"""


def test_an_exception_in_a_part_and_a_signal_to_one_end_the_job(launcher, small, tmp_path):
    flags = (*small, "--steps", 40, "--eval-every", 5, "--target-tp", 2)
    plants = [
        IN_A_PART.format(rank=2, what=what)
        for what in ("raise OSError('planted')", "os.kill(os.getpid(), 15)")
    ]
    failed = launcher.run(3, tmp_path / "failed", *flags, plant=plants[0], limit_s=30)
    assert failed.codes == [1, 1, 1] and failed.text.count("Traceback (most") == 1
    assert failed.status() == {"state": "failed", "why": "OSError: planted"}
    stopped = launcher.run(3, tmp_path / "stopped", *flags, plant=plants[1], limit_s=30).good()
    assert stopped.status()["state"] == "stopped" and 9 < stopped.status()["step"] < 20


BAD = {
    "no room": (2, ("--target-tp", 2), "--target-tp 2: needs 3 ranks a node"),
    "alone": (1, ("--target-tp", 2), "--target-tp 2: needs 3 ranks a node"),
    "nothing": (3, ("--target-tp", 0), "--target-tp 0: must be above 0"),
    "colocate": (3, ("--target-tp", 2, "--layout", "colocate"), "--target-tp 2: with --layout colocate"),
    "backend": (3, ("--target-tp", 2, "--target-backend", "transformers"), "transformers cannot be shared"),
    "rest": (4, ("--target-tp", 2, "--drafters", 1), "give 2"),
    "heads": (9, ("--target-tp", 8), "key/value heads evenly: give 1 or 2"),
    "batches": (8, ("--target-tp", 2, "--batches-per-step", 7), "and leaves whole targets of 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_one_line(monkeypatch, capsys, case):
    size, flags, words = BAD[case]
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr("sys.argv", ["train.py", *map(str, flags)])
    assert train.main() == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said and said.startswith("train.py: --")


@pytest.mark.parametrize(("size", "nodes"), [(3, 1), (5, 1), (6, 1), (8, 1), (6, 2)])
def test_the_split_leaves_whole_targets(size, nodes):
    c = train.parse_flags(["--target-tp", "2"])
    c = train.resolve(c, TargetConfig.from_folder(c.folder), size, nodes)
    per_node = size // nodes
    assert c.layout == "split" and (per_node - c.drafters // nodes) % 2 == 0 < c.drafters
