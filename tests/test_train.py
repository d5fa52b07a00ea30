"""Whole training jobs: any split gives the same losses, a resume goes on as if nothing had happened, and
every way to end is orderly.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file

import data

STEPS = 8
METRICS = (
    "step loss acc acc_len lr grad_norm step_ms tokens_per_s wait_target wait_drafter peak_gib headroom_gib "
    "eta_s"
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
    "chunks of 16": (2, ("--anchor-chunk", 16)),
    "chunks of 8": (2, ("--layout", "colocate", "--anchor-chunk", 8)),
}


@pytest.fixture(scope="module")
def runs(launcher, small, tmp_path_factory):
    """The same 8 steps of 12 batches under each split, each run once and only when asked for."""
    folder, done = tmp_path_factory.mktemp("splits"), {}

    def run(name: str):
        if name not in done:
            ranks, flags = SPLITS[name]
            flags = ("--batches-per-step", 12, "--steps", STEPS, "--eval-every", 4, "--save-every", 4, *flags)
            done[name] = launcher.run(ranks, folder / name.replace(" ", "-"), *small, *flags).good()
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
    assert relative_difference(whole.records(), again.records()) == 0
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


def test_a_torn_checkpoint_is_refused_in_one_line(launcher, runs, tmp_path):
    run = interrupted(runs("3+1"), tmp_path / "run")
    torn = run / "step-000004" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    ended = launcher.run(2, None, "--resume", run)
    assert ended.codes == [2, 2]
    lines = [line for line in "".join(ended.err).splitlines() if "train.py:" in line]
    assert len(lines) == 1 and "step-000004" in lines[0] and "not a whole checkpoint" in lines[0]
    assert "Traceback" not in ended.text
