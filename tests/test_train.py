"""Whole training jobs: any split gives the same losses, a resume goes on as if nothing had happened, and
every way to end is orderly.
"""

import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from launch import ROOT, environment, torchrun
from safetensors.torch import load_file

import checkpoint
import data
import model
import train
from diagnose import throughput
from diagnose.report import Report

STEPS = 8
METRICS = (
    "step loss acc acc_len lr grad_norm step_ms tokens_per_s wait_target wait_drafter peak_gib headroom_gib "
    "eta_s wait_data time"
).split()
EVALUATION = "eval_loss eval_acc eval_acc_len eval_tau".split()
UNROUNDED = ("loss", "grad_norm", "eval_loss")


def relative_difference(a: list[dict], b: list[dict]) -> float:
    """The largest between two runs' losses and gradient norms, step by step."""
    assert [m["step"] for m in a] == [m["step"] for m in b]
    pairs = [(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in UNROUNDED if k in x or k in y]
    assert len(pairs) >= 2 * STEPS
    return max(abs(x - y) / max(abs(x), 1e-9) for x, y in pairs)


def tensors(place: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, optimizer state, export."""
    found = {f"weight {k}": v for k, v in load_file(place / "model.safetensors").items()}
    found |= {f"export {k}": v for k, v in load_file(place / "export" / "model.safetensors").items()}
    optimizer = torch.load(place / "optimizer.pt", weights_only=True)
    for number, state in optimizer["state"].items():
        found |= {f"optimizer {number} {k}": torch.as_tensor(v) for k, v in state.items()}
    return found


def same_tensors(a: Path, b: Path) -> bool:
    x, y = tensors(a), tensors(b)
    assert x.keys() == y.keys() and any("exp_avg_sq" in k for k in x)
    return all(torch.equal(x[k], y[k]) for k in x)


# ---------------------------------------------------------------------------------------------------------
# Splits


SPLITS = {
    "1 colocate": (1, ()),
    "1+1": (2, ("--drafters", 1)),
    "2 colocate": (2, ("--layout", "colocate")),
    "2+1": (3, ("--drafters", 2)),
    "1+2": (3, ("--drafters", 1)),
    "3+1": (4, ("--drafters", 3)),
    "3+2": (5, ("--drafters", 3)),
    "2 nodes of 1+1": (4, ("--drafters", 2)),
    "chunks of 16": (2, ("--anchor-chunk", 16)),
    "chunks of 8": (2, ("--layout", "colocate", "--anchor-chunk", 8)),
    "chunks of 12": (2, ("--layout", "colocate", "--anchor-chunk", 12)),  # of 32: the last one is padded
}


TWO_NODES = "import os; os.environ |= {'LOCAL_WORLD_SIZE': '2', 'LOCAL_RANK': str(RANK % 2)}"


@pytest.fixture(scope="module")
def runs(launcher, small, tmp_path_factory):
    """The same 8 steps of 12 batches under each split, each run once and only when asked for."""
    folder, done = tmp_path_factory.mktemp("splits"), {}

    def run(name: str):
        if name not in done:
            ranks, flags = SPLITS[name]
            flags = ("--batches-per-step", 12, "--steps", STEPS, "--eval-every", 8, "--save-every", 4, *flags)
            plant = TWO_NODES if "nodes" in name else ""
            done[name] = launcher.run(
                ranks, folder / name.replace(" ", "-"), *small, *flags, plant=plant
            ).good()
        return done[name]

    return run


@pytest.mark.parametrize("name", list(SPLITS)[1:])
def test_any_split_and_any_chunk_gives_the_same_losses(runs, name):
    assert relative_difference(runs("1 colocate").records(), runs(name).records()) < 1e-5


def test_an_epoch_is_whole_and_its_tail_is_padded(runs, small):
    """Case 18: 12 batches a step do not divide the epoch, yet every token is trained on once an epoch."""
    corpus = data.load_corpus([small[1]], data.load_tokenizer(TINY), 256, runs("3+1").folder / "tokens", 0)
    plan = data.pack(corpus.lengths, range(len(corpus)), 256, 16, 0)
    assert plan.batches % 12 and math.ceil(plan.batches / 12) == 4
    for name in ("1 colocate", "3+1", "3+2"):
        steps = [m for m in runs(name).records() if m["step"]]
        tokens = [round(m["tokens_per_s"] * m["step_ms"] / 1000) for m in steps]
        assert sum(tokens[:4]) == sum(tokens[4:]) == corpus.lengths.sum()


# ---------------------------------------------------------------------------------------------------------
# Resume


def interrupted(run, place: Path, cut: bool = True) -> Path:
    """A copy of a run's folder, as if it had been killed after the checkpoint of step 4 (or 8)."""
    shutil.copytree(run.folder, place)
    if cut:
        shutil.rmtree(place / "step-000008")
    return place


def test_resume_on_the_same_split_is_bit_for_bit(launcher, runs, tmp_path):
    """Case 20: 8 steps are 4, a resume and 4 more: weights, moments and every unrounded loss."""
    whole = runs("3+1")
    again = launcher.run(4, None, "--resume", interrupted(whole, tmp_path / "run")).good()
    again.folder = tmp_path / "run"
    assert same_tensors(whole.folder / "step-000008", again.folder / "step-000008")
    assert not same_tensors(whole.folder / "step-000004", again.folder / "step-000008")
    assert relative_difference(whole.records(), again.records()) == 0 and "not as in" not in again.text
    assert (again.folder / "step-000004" / "state.json").exists()


def test_resume_of_a_named_checkpoint_on_another_split(launcher, runs, tmp_path):
    """The saved batches per step stay; the metrics of the steps done again are replaced, not doubled."""
    whole, run = runs("3+1"), interrupted(runs("3+1"), tmp_path / "run", cut=False)
    again = launcher.run(3, None, "--resume", run / "step-000004", "--drafters", 2).good()
    again.folder = run
    assert 0 < relative_difference(whole.records(), again.records()) < 1e-5
    before, after = tensors(whole.folder / "step-000008"), tensors(run / "step-000008")
    for name in before:
        if "weight" in name:
            torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-5)
    assert json.loads((run / "config.json").read_text())["batches_per_step"] == 12
    assert (run / "aside-step-000008").exists()  # the old future is kept, out of the way


def test_a_resume_with_other_batches_a_step_is_refused(launcher, runs, tmp_path):
    run = interrupted(runs("3+1"), tmp_path / "run")
    ended = launcher.run(2, None, "--resume", run, "--batches-per-step", 6)
    assert ended.codes == [2, 2] and "Traceback" not in ended.text
    assert ended.text.count("train.py: --batches-per-step 6") == 1 and "has 12" in ended.text
    # The refused flag is not remembered: the plain resume goes on.
    assert json.loads((run / "config.json").read_text())["batches_per_step"] == 12


def test_a_resume_may_change_the_layout(launcher, runs, tmp_path):
    """The saved number of drafters is that of the layout before, and not asked for."""
    run = interrupted(runs("3+1"), tmp_path / "run")
    again = launcher.run(4, None, "--resume", run, "--layout", "colocate").good()
    saved = json.loads((run / "config.json").read_text())
    assert (saved["layout"], saved["drafters"]) == ("colocate", 4)
    again.folder = run
    assert relative_difference(runs("3+1").records(), again.records()) < 1e-5


def test_a_finished_run_is_left_as_it_is(launcher, runs, tmp_path):
    """On another world size too, which an edited config.json would tell of; more steps are a flag away."""
    run = interrupted(runs("3+1"), tmp_path / "run", cut=False)
    before = contents(run)
    again = launcher.run(1, None, "--resume", run).good()
    assert "has its 8 steps: nothing to do" in again.text and "gate" not in again.text
    after = contents(run)
    assert before.keys() == after.keys()
    changed = {n for n in before if before[n] != after[n]}
    assert changed <= {".lock", "status.json"}
    assert before["status.json"][1] == after["status.json"][1]
    for flag, number, told in (("--steps", 3, "--steps 3: "), ("--epochs", 1, "--epochs 1, 4 steps: ")):
        fewer = launcher.run(1, None, "--resume", run, flag, number)
        assert fewer.codes == [2] and fewer.err[0].count("\n") == 1
        assert f"{told}{run}/step-000008 has done 8" in fewer.text
        assert [contents(run)[n][1] for n in after] == [data for _, data in after.values()]


def test_a_resume_for_more_epochs_is_not_ended_by_the_steps_before(runs):
    run = str(runs("3+1").folder)
    assert train.parse_flags(["--resume", run]).steps == STEPS
    c = train.parse_flags(["--resume", run, "--epochs", "9"])
    assert (c.steps, c.epochs) == (0, 9)
    c = train.parse_flags(["--resume", run, "--epochs", "9", "--steps", "20"])
    assert (c.steps, c.epochs) == (20, 9)


def test_a_resume_says_what_it_changes(runs):
    place = runs("3+1").folder / "step-000004"
    c = train.parse_flags(["--resume", str(place)])
    assert train.changed_flags(c, place) == []
    c = train.parse_flags(["--resume", str(place), "--seed", "7", "--drafters", "1", "--clip", "0.5"])
    assert train.changed_flags(c, place) == ["--clip 0.5 (was 1.0)", "--seed 7 (was 0)"]


@pytest.mark.parametrize("was, said", [(0.2, ["no --old-share (was 0.2)"]), (0.0, [])])
def test_a_flag_that_is_gone_is_not_dropped_in_silence(runs, tmp_path, was, said):
    """A run of a version that had one more goes on without it; where it was in use, that is said."""
    run = interrupted(runs("3+1"), tmp_path / "run")
    for path in (run / "config.json", run / "step-000004" / "state.json"):
        saved = json.loads(path.read_text())
        saved.get("config", saved)["old_share"] = was
        path.write_text(json.dumps(saved))
    c = train.parse_flags(["--resume", str(run)])
    assert not hasattr(c, "old_share") and not hasattr(throughput.read_run(run).config, "old_share")
    assert train.changed_flags(c, run / "step-000004") == said


def test_a_torn_checkpoint_is_refused_in_one_line(launcher, runs, tmp_path):
    run = interrupted(runs("3+1"), tmp_path / "run")
    torn = run / "step-000004" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    ended = launcher.run(2, None, "--resume", run)
    assert ended.codes == [2, 2]
    lines = [line for line in "".join(ended.err).splitlines() if "train.py:" in line]
    assert len(lines) == 1 and "step-000004" in lines[0] and "not a whole checkpoint" in lines[0]
    assert "Traceback" not in ended.text


# ---------------------------------------------------------------------------------------------------------
# The run folder


@pytest.fixture(scope="module")
def first_run(launcher, small, tmp_path_factory):
    """(folder of runs, what was printed): `python train.py`, one process, as a user types it."""
    place = tmp_path_factory.mktemp("work")
    flags = "--steps 6 --batches-per-step 2 --eval-every 3 --save-every 2 --keep 2".split()
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *small, *flags],
        env=environment(launcher.home),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loading weights" not in done.stderr  # a bar that moves is for a terminal
    return place / "runs", done.stdout


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def test_what_a_run_leaves_in_its_folder(first_run):
    runs, said = first_run
    run = runs / "001"
    names = {p.name for p in run.iterdir() if p.name != ".lock"}
    kept = {"step-000004", "step-000006"}  # --keep 2 of steps 2, 4 and 6
    assert names == {"config.json", "status.json", "train.log", "metrics.jsonl", "curves.png"} | kept
    assert json.loads((run / "status.json").read_text()) == {"state": "finished", "step": 6}
    config = json.loads((run / "config.json").read_text())
    assert config["layout"] == "colocate" and config["batches_per_step"] == 2 and config["keep"] == 2
    assert config["mask_token_id"] == 4  # a resume keeps it, whatever its data have
    assert (run / "train.log").read_text() == said
    assert "note: only 8 held-out document(s)" in said
    for place in kept:
        files = {str(p.relative_to(run / place)) for p in (run / place).rglob("*") if p.is_file()}
        export = {"export/config.json", "export/model.safetensors"}
        assert files == {"model.safetensors", "optimizer.pt", "state.json"} | export
    assert "export runs/001/step-000006/export" in said.splitlines()[-1]


def test_metrics_have_the_keys_of_the_contract(first_run):
    records = [json.loads(line) for line in (first_run[0] / "001" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in records] == list(range(7))
    more = {"eval_acc_by_slot", "eval_tau_by_source"}
    for m in records:
        wanted = {"step", "time"} if m["step"] == 0 else set(METRICS)
        wanted |= {*EVALUATION, *more} if m["step"] in (0, 3, 6) else set()
        assert m.keys() == wanted
        assert all(math.isfinite(v) for v in m.values() if isinstance(v, float))
    assert len(repr(records[1]["loss"])) > 8  # unrounded
    assert len(records[0]["eval_acc_by_slot"]) == 7
    assert records[0]["eval_acc_len"] < 1.1 < math.log(1024) / 6 and records[6]["loss"] < records[1]["loss"]


def test_the_learning_rate_rises_in_a_line_and_falls_as_a_cosine():
    job = object.__new__(train.Job)
    job.c, job.total_steps = train.Config(lr=2.0, warmup_ratio=0.04), 200
    assert [job.lr(step) for step in (1, 4, 8)] == [0.25, 1.0, 2.0]
    falling = [job.lr(step) for step in (8, 56, 104, 152, 200)]
    assert falling == pytest.approx([1 + math.cos(math.pi * quarter / 4) for quarter in range(5)])


def test_a_record_adds_up_what_the_ranks_did(monkeypatch):
    """Two drafters and a target: tokens of all in the time of the slowest drafter, each side's mean wait."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    pulse = object.__new__(train.Pulse)
    world = train.World("split", 2)
    pulse.job, pulse.speed = SimpleNamespace(world=world, total_steps=10, lr=lambda step: 1.0), [2.0]
    of_ranks = {"step_s": [2.0, 4.0, 3.0], "wait_s": [1.0, 1.0, 0.3], "data_s": [0.0, 0.0, 0.6]}
    of_ranks |= {"tokens": [100, 140, 0], "peak_gib": [1, 2, 3], "free_gib": [9, 8, 7]}
    sums = {"loss": 6.0, "weight": 4.0, "right": 3.0, "slots": 12.0, "prefix": 5.0, "blocks": 2.0}
    m = pulse.record(
        4, of_ranks | {k: [v] * 3 for k, v in (sums | {"grad_norm": 7.0, "skipped": 0.0}).items()}
    )
    wanted = {"loss": 1.5, "acc": 0.25, "acc_len": 3.5, "step_ms": 4000.0, "tokens_per_s": 60.0}
    wanted |= {"wait_drafter": 0.375, "wait_target": 0.1, "wait_data": 0.2, "peak_gib": 3, "headroom_gib": 7}
    wanted |= {"step": 4, "lr": 1.0, "grad_norm": 7.0, "eta_s": 18.0}
    assert m == pytest.approx(wanted)


SLOW_DATA = """
import time
plain = train.Batches.train
def slowly(self, b):
    time.sleep(0.8)
    return plain(self, b)
if RANK == {last}:
    train.Batches.train = slowly
"""


@pytest.mark.parametrize(("ranks", "flags"), [(1, ()), (2, ()), (3, ("--target-tp", 2))])
def test_a_slow_data_loader_is_named(launcher, small, first_run, tmp_path, capsys, ranks, flags):
    """Of a rank that does both, of a target, of the last rank of a target."""
    flags = (*small, "--steps", 6, "--eval-every", 100, *flags)
    slow = launcher.run(ranks, tmp_path / "run", *flags, plant=SLOW_DATA.format(last=ranks - 1)).good()
    assert statistics.median(m["wait_data"] for m in slow.records() if m["step"]) > 0.5
    told = []
    for folder in (slow.folder, first_run[0] / "001"):
        report = Report("throughput")
        throughput.judge_run(report, folder)
        told.append({c["name"]: (c["state"], c["message"]) for c in report.checks}["data"])
    assert told[0][0] == "FAIL" and "a slow data loader" in told[0][1] and told[1][0] == "ok"


def test_the_console_mirrors_the_metrics(first_run):
    lines = [line for line in first_run[1].splitlines() if line.startswith("step ")]
    assert len(lines) == 6
    form = (
        r"step 0000\d/00006 \| loss \d+\.\d{4} \| acc_len \d\.\d\d \| lr \d\.\de-\d\d \| gnorm \d+\.\d\d "
        r"\| \d+ ms \| \d+\.\d Ktok/s \| wait t \d+% d \d+% \| \d+\.\d/\d+ GiB \| eta \d+[smh]"
    )
    assert all(re.fullmatch(form, line) for line in lines[:5]), lines


def test_the_numbers_of_a_step_are_copied_before_the_mark_that_is_waited_for():
    """On a GPU the copy is asynchronous: only a mark behind it says that they have come."""
    done, pulse = [], train.Pulse.__new__(train.Pulse)
    never = {"saves": lambda _: False, "evaluates": lambda _: False}
    ending = SimpleNamespace(asked=SimpleNamespace(is_set=lambda: False))
    pulse.job = SimpleNamespace(**never, last_step=9, folder=None, ending=ending, device=torch.device("cpu"))
    pulse.unposted, pulse.begun = [], None
    pulse.mark, pulse.cut, pulse.decide = lambda: done.append("mark"), dict, lambda _: None
    computed = SimpleNamespace(is_cuda=True, to=lambda *_, **__: done.append("copy"))
    pulse.end_step(1, {}, computed)
    assert done == ["copy", "mark"]


def test_an_evaluation_of_many_sources_is_broken_into_lines(monkeypatch):
    taus = {f"source {i} of-many": 1 + i / 10 for i in range(30)} | {"x" * 150: 2.0}
    said = []
    folder = SimpleNamespace(say=said.append, write_metrics=said.append, path=Path("run"))
    pulse = train.Pulse.__new__(train.Pulse)
    pulse.job, pulse.held = SimpleNamespace(folder=folder, c=train.Config()), {}
    monkeypatch.setattr(checkpoint, "draw_curves", lambda *_: None)
    result = dict.fromkeys(("eval_loss", "eval_acc", "eval_acc_len", "eval_tau", "decode_tau"), 1.0)
    pulse.evaluated(20000, result | {"eval_tau_by_source": taus})
    _, *lines = said
    assert max(map(len, lines)) <= 100 and lines[0].startswith("eval 20000 | loss 1.0000 | acc 100.0% |")
    for source, tau in list(taus.items())[:30]:
        assert sum(f"{source} {tau:.2f}" in line for line in lines) >= 1
    assert all(line.startswith(" " * 13) for line in lines[1:])


def test_curves_are_a_picture(first_run):
    from matplotlib.image import imread

    picture = imread(first_run[0] / "001" / "curves.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 300 and picture.std() > 0.01


def test_a_second_run_leaves_the_first_alone(launcher, small, first_run):
    before = contents(first_run[0] / "001")
    go_there = f"import os; os.chdir({str(first_run[0].parent)!r})"
    flags = "--steps 1 --batches-per-step 2".split()
    launcher.run(1, None, *small, *flags, plant=go_there).good()
    assert (first_run[0] / "002" / "step-000001" / "state.json").exists()
    refused = launcher.run(2, first_run[0] / "001", *small, *flags)
    assert refused.codes == [2, 2] and "Traceback" not in refused.text
    lines = [line for line in "".join(refused.err).splitlines() if "train.py:" in line]
    assert len(lines) == 1 and "not empty" in lines[0] and "--resume" in lines[0]
    assert contents(first_run[0] / "001") == before


def test_export_of_a_run_reads_back_as_the_trained_drafter(first_run):
    place = first_run[0] / "001" / "step-000006"
    trained, back = load_file(place / "model.safetensors"), checkpoint.load_drafter(place / "export", TINY)
    for name, p in back.state_dict().items():
        assert torch.equal(p, trained[name].bfloat16().float())


# ---------------------------------------------------------------------------------------------------------
# Data that trains nothing


UNSUPERVISED = """
real = train.data.make_batch
def planted(corpus, docs, index, *rest):
    batch = real(corpus, docs, index, *rest)
    if 4 <= index < 16 or index in (17, 18):
        batch.mask_T.zero_()
        batch.anchors_A.fill_(-1)
    return batch
train.data.make_batch = planted
"""


def test_batches_without_anchors_hang_nothing(launcher, small, tmp_path):
    """Case 16: six steps with nothing to learn, then two where one drafter of two has nothing."""
    flags = "--drafters 2 --batches-per-step 2 --steps 11 --save-every 2 --keep 0 --eval-every 20".split()
    done = launcher.run(3, tmp_path / "run", *small, *flags, plant=UNSUPERVISED).good()
    losses = [m["loss"] for m in done.records() if m["step"]]
    assert [loss == 0 for loss in losses] == [False] * 2 + [True] * 6 + [False] * 3
    assert not any("skipped" in m for m in done.records())  # nothing to learn is no failure, even 6 times
    assert same_tensors(done.folder / "step-000002", done.folder / "step-000008")
    assert not same_tensors(done.folder / "step-000008", done.folder / "step-000010")
    assert all(torch.isfinite(t).all() for t in tensors(done.folder / "step-000011").values())


NAN_FEATURES = """
real = train.Job.make_features
def planted(job, batch, out):
    real(job, batch, out)
    if {when}:
        out.fill_(float("nan"))
    return out
train.Job.make_features = planted
"""


def test_a_step_with_a_nan_changes_nothing(launcher, small, tmp_path):
    """Case 24: skipped on every replica, counted, and the moments and their step counts stay as they were."""
    flags = "--drafters 2 --batches-per-step 2 --steps 5 --save-every 1 --keep 0".split()
    plant = NAN_FEATURES.format(when="batch.index == 5")  # drafter 1, step 3
    done = launcher.run(3, tmp_path / "run", *small, *flags, plant=plant).good()
    assert [m["step"] for m in done.records() if m.get("skipped")] == [3]
    assert [m["loss"] is None for m in done.records() if m["step"]] == [False, False, True, False, False]
    assert "SKIPPED" in done.out[0]
    two, three, four = (done.folder / f"step-00000{n}" for n in (2, 3, 4))
    assert same_tensors(two, three) and not same_tensors(three, four)
    assert all(torch.isfinite(t).all() for t in tensors(done.folder / "step-000005").values())


def test_five_steps_of_nan_in_a_row_end_the_run(launcher, small, tmp_path):
    flags = "--drafters 2 --batches-per-step 2 --steps 20 --save-every 2".split()
    plant = NAN_FEATURES.format(when="batch.index >= 4")
    ended = launcher.run(3, tmp_path / "run", *small, *flags, plant=plant)
    assert ended.codes == [1, 1, 1] and "Traceback" not in ended.text
    assert ended.text.count("train.py: 5 steps in a row with a non-finite gradient, up to step 7") == 1
    assert ended.status()["state"] == "failed" and "5 steps in a row" in ended.status()["why"]


# ---------------------------------------------------------------------------------------------------------
# Faults and signals


FAULT_FLAGS = "--drafters 2 --batches-per-step 2 --steps 16 --save-every 2 --eval-every 100".split()
AT = {
    "target": """
real = train.Job.make_features
def planted(job, batch, out):
    if RANK == 2 and batch.index == 7:
        {what}
    return real(job, batch, out)
train.Job.make_features = planted
""",
    "drafter": """
real = train.accumulate
def planted(job, replica, batch, features, sync):
    if RANK == 1 and batch.index == 7:
        {what}
    return real(job, replica, batch, features, sync)
train.accumulate = planted
""",
    "rank 0": """
real = train.accumulate
def planted(job, replica, batch, features, sync):
    if RANK == 0 and batch.index == 6:
        {what}
    return real(job, replica, batch, features, sync)
train.accumulate = planted
""",
    "gate": """
real = train.warm_up
def planted(job):
    work = real(job)
    def first():
        if RANK == 0:
            {what}
        work()
    return first
train.warm_up = planted
""",
    "save": """
real = train.checkpoint.export
def planted(drafter, folder):
    if "step-000004" in str(folder):
        {what}
    real(drafter, folder)
train.checkpoint.export = planted
""",
}


def at(place: str, what: str) -> str:
    return "import os\n" + AT[place].format(what=what)


def send(name: str) -> str:
    return f"os.kill(os.getpid(), {int(signal.Signals[name])})"


@pytest.fixture(scope="module")
def undisturbed(launcher, small, tmp_path_factory):
    return launcher.run(3, tmp_path_factory.mktemp("undisturbed") / "run", *small, *FAULT_FLAGS).good()


def goes_on_as_if_nothing_had_happened(launcher, folder: Path, undisturbed) -> None:
    """Resume to the end: exactly the losses and the last checkpoint of the undisturbed run."""
    again = launcher.run(3, None, "--resume", folder).good()
    again.folder = folder
    assert again.status()["state"] == "finished"
    assert relative_difference(undisturbed.records(), again.records()) == 0
    assert same_tensors(undisturbed.folder / "step-000016", folder / "step-000016")


@pytest.mark.parametrize("place", ["target", "drafter", "rank 0", "gate", "save"])
def test_an_exception_on_any_rank_ends_the_job(launcher, small, place, tmp_path):
    """All ranks end by themselves, with that rank's traceback once."""
    ended = launcher.run(
        3, tmp_path / "run", *small, *FAULT_FLAGS, plant=at(place, "raise MemoryError('planted')")
    )
    assert ended.codes == ([2] * 3 if place == "gate" else [1] * 3) and ended.seconds < 30
    assert ended.text.count("Traceback (most recent call last)") == 1
    assert ended.text.count("train.py: ") == 1 and "planted" in ended.text.split("train.py: ")[1]
    assert ended.status()["state"] == "failed" and "planted" in ended.status()["why"]
    whole = checkpoint.checkpoints(ended.folder)
    assert [p.name for p in whole] == ["step-000002", "step-000004"][: len(whole)]
    assert len(whole) in {"gate": [0], "save": [1]}.get(place, [0, 1]) and all(tensors(p) for p in whole)


@pytest.mark.parametrize("place", ["target", "rank 0"])
def test_a_killed_rank_ends_the_job(launcher, small, undisturbed, place, tmp_path):
    ended = launcher.run(3, tmp_path / "run", *small, *FAULT_FLAGS, plant=at(place, send("SIGKILL")))
    assert sorted(ended.codes) == [-9, 1, 1] and ended.seconds < 30
    assert ended.status()["state"] == "failed" and "lost the connection" in ended.status()["why"]
    assert ended.text.count("train.py: ") == 1
    if place == "rank 0":
        goes_on_as_if_nothing_had_happened(launcher, ended.folder, undisturbed)


@pytest.mark.parametrize(
    ("name", "place"), [("SIGTERM", "gate"), ("SIGINT", "save"), ("SIGHUP", "drafter"), ("SIGTERM", "target")]
)
def test_a_signal_to_any_rank_stops_the_job_in_order(launcher, small, undisturbed, name, place, tmp_path):
    """Case 19: finish the step, save, say stopped, exit 0 everywhere; a resume goes on from there."""
    ended = launcher.run(3, tmp_path / "run", *small, *FAULT_FLAGS, plant=at(place, send(name))).good()
    assert ended.seconds < 30 and ended.status()["state"] == "stopped"
    newest = checkpoint.checkpoints(ended.folder)[-1]
    assert newest.name == f"step-{ended.status()['step']:06d}" and ended.status()["step"] < 16
    assert [m["step"] for m in ended.records()] == list(range(ended.status()["step"] + 1))
    if place == "target":
        goes_on_as_if_nothing_had_happened(launcher, ended.folder, undisturbed)


def test_a_second_signal_ends_the_job_at_once(launcher, small, tmp_path):
    what = f"import time; {send('SIGTERM')}; time.sleep(2.3); {send('SIGTERM')}; time.sleep(60)"
    ended = launcher.run(3, tmp_path / "run", *small, *FAULT_FLAGS, plant=at("target", what))
    assert ended.codes == [1, 1, 143] and ended.seconds < 25
    assert ended.status()["state"] == "failed"


def test_sigterm_to_torchrun_stops_the_job_in_order(launcher, small, undisturbed, tmp_path):
    slowly = "import time\n" + at("target", "pass").replace("if RANK", "time.sleep(0.1)\n    if RANK")
    flags = [*small, *FAULT_FLAGS, "--out", tmp_path / "run"]
    job = torchrun(tmp_path, 3, flags, plant=slowly)
    said = []
    for line in job.stdout:
        said.append(line)
        if line.startswith("saved") and "step-000002" in line:
            job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 1  # torchrun's own answer to a signal
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(3)] == ["0"] * 3, "".join(said)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "stopped" and "SIGTERM" in status["why"], "".join(said)
    goes_on_as_if_nothing_had_happened(launcher, tmp_path / "run", undisturbed)


def test_an_elastic_restart_goes_on_in_the_same_folder(launcher, small, undisturbed, tmp_path):
    """torchrun --max-restarts: the restarted job finds its own folder and newest checkpoint."""
    once = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and fail()"
    plant = "def fail(): raise RuntimeError('planted')\n" + at("drafter", once)
    job = torchrun(tmp_path, 3, [*small, *FAULT_FLAGS], plant, ("--max-restarts=1",), cwd=tmp_path)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    assert said.count("RuntimeError: planted\n") == 2 and "resumed from" in said  # traceback and its line
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["001"]
    records = [json.loads(m) for m in (tmp_path / "runs" / "001" / "metrics.jsonl").read_text().splitlines()]
    assert relative_difference(undisturbed.records(), records) == 0


# ---------------------------------------------------------------------------------------------------------
# Flags


BAD_FLAGS = {
    "--drafters 5": "--drafters",
    "--layout split --drafters 4": "--drafters",
    "--layout colocate --drafters 1": "--drafters",
    "--layout sideways": "--layout",
    "--batches-per-step 7 --drafters 2": "--batches-per-step",
    "--token-budget 1000": "1024",
    "--token-budget 2": "--token-budget",
    "--token-budget -128": "--token-budget",
    "--block-size 1": "--block-size",
    "--anchors -1": "--anchors",
    "--anchor-chunk -1": "--anchor-chunk",
    "--lr nan": "--lr",
    "--lr -1": "--lr",
    "--warmup-ratio 1": "--warmup-ratio",
    "--steps -1": "--steps",
    "--steps 0": "leave it out",
    "--gamma 0": "leave it out",
    "--gamma 0.07": "give at least 0.08",
    "--eval-every 0": "leave it out",
    "--drafters 0": "leave it out",
    "--keep -1": "--keep",
    "--depth 0": "--depth",
    "--seed -1": "--seed",
    "--max-length 100000": "--max-length",
    "--device tpu": "--device",
    "--steps many": "--steps",
    "--no-such-flag": "--no-such-flag",
    "--resume nowhere": "--resume nowhere",
    "--resume nowhere --out x": "--out",
    "--target nowhere": "nowhere",
    "--target .": "config.json",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_bad_flag_is_named_in_one_line(flags):
    with pytest.raises((ValueError, train.UserError)) as error:
        c = train.parse_flags(flags.split())
        train.resolve(c, model.TargetConfig.from_folder(c.folder), 4, 1)
    assert BAD_FLAGS[flags] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags", ["--token-budget 1000", "--no-such-flag", "--device cuda", "--data nowhere"]
)
def test_a_bad_start_is_said_once_and_writes_nothing(launcher, small, flags, tmp_path):
    if flags == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    ended = launcher.run(2, tmp_path / "run", *small, *flags.split())
    assert ended.codes == [2, 2]
    assert len("".join(ended.err).splitlines()) == 1 and "".join(ended.err).startswith("train.py: ")
    assert flags.split()[-1] in ended.text and not (tmp_path / "run").exists()


SLOW_TO_SAY = """
import os, time
plain = train.refuse
def late(line):
    time.sleep(1 if RANK == 0 else 0)
    code = plain(line)
    if RANK == 1:
        print(open(os.readlink('/proc/self/fd/2').replace('1.err', '0.err')).read())
    return code
train.refuse = late
"""


def test_a_rank_waits_for_the_one_that_says_what_is_wrong(launcher, tmp_path):
    """torchrun would end rank 0, line and all, as soon as another rank has ended."""
    ended = launcher.run(2, tmp_path / "run", "--no-such-flag", plant=SLOW_TO_SAY)
    assert ended.codes == [2, 2]
    assert ended.out[1].startswith("train.py: ") and ended.out[1].strip() == ended.err[0].strip()


def test_the_default_split_divides_the_batches_of_a_step():
    t = model.TargetConfig.from_folder(TINY)
    for size in range(2, 9):
        c = train.resolve(train.Config(), t, size, 1)
        assert 0 < c.drafters < size and c.batches_per_step == c.drafters
        c = train.resolve(train.Config(batches_per_step=12), t, size, 1)
        assert 12 % c.drafters == 0
    c = train.resolve(train.Config(), t, 8, 2)
    assert c.drafters % 2 == 0 and c.drafters < 8


@pytest.mark.parametrize(
    ("local", "listed", "sees"),
    [
        ("0", None, "0"),
        ("3", None, "3"),
        ("1", "4,7", "7"),
        ("1", "4, 7", "7"),
        ("0", "GPU-aa,GPU-bb", "GPU-aa"),
        ("1", "GPU-aa,GPU-bb", "GPU-bb"),
        ("2", "0,1", ""),  # more ranks than GPUs: none, found when the ranks agree on a device
        ("0", "5", "5"),  # --virtual-local-rank: LOCAL_RANK 0 everywhere, one device
        ("0", "", ""),
        (None, "4,7", "4,7"),
        (None, None, None),
    ],
)
def test_every_rank_sees_one_gpu(local, listed, sees):
    """The first lines of train.py, before torch is imported."""
    head = (ROOT / "train.py").read_text().split("\nimport argparse")[0]
    env = {"LOCAL_RANK": local, "CUDA_VISIBLE_DEVICES": listed}
    code = f"{head}\nimport sys\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'), 'torch' in sys.modules)"
    env = {k: v for k, v in env.items() if v is not None}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{sees} False\n"
