"""diagnose.mask: the oracle is the rule, a healthy model.py equals it, every broken rule is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import model
from diagnose import mask

ROOT = Path(__file__).resolve().parents[1]
CASES = mask.cases()  # once: their oracles are kept


def test_oracle_by_hand():
    """Two documents of 4 and 3 tokens and padding; anchors at 2, 5 and an unused slot; B 2."""
    case = mask.Case("hand", [0, 0, 0, 0, 1, 1, 1, -1], [0, 1, 2, 3, 0, 1, 2, 0], [2, 5, -1], 2)
    rows = ["11000000 110000"] * 2 + ["00001000 001100"] * 2 + ["00000000 000011"] * 2
    want = np.array([[c == "1" for c in row if c != " "] for row in rows])
    assert np.array_equal(mask.oracle(case), want)
    # W 2: slot 0 of anchor position 2 sees from position 1 on, slot 1 nothing of the context.
    case = mask.dataclasses.replace(case, window=2)
    rows = ["01000000 100000", "00000000 110000", "00001000 001000", "00000000 001100"]
    rows += ["00000000 000010", "00000000 000011"]
    assert np.array_equal(mask.oracle(case), [[c == "1" for c in row if c != " "] for row in rows])


def test_healthy_and_the_cases_are_not_trivial():
    dense, tiles = mask.check_dense(CASES), mask.check_tiles(CASES)
    assert (dense.state, tiles.state) == ("ok", "ok"), (dense.message, tiles.message)
    assert {(c.block_size, bool(c.window)) for c in CASES} >= {
        (b, w) for b in (8, 10, 16) for w in (True, False)
    }
    assert any(-1 in c.anchor_A for c in CASES) and any(max(c.doc_T) > 2 for c in CASES)
    found = [mask.tiles_of(model.block_mask(*c.arguments())) for c in CASES]
    assert sum(t[1].sum() for t in found) > 9, "hardly any full tile is tried"


def not_before(starts, ends, context, B, window=0):
    """The anchor's own feature is seen too."""
    return SEES(starts, ends + (ends > starts), context, B, window)


def other_documents(starts, ends, context, B, window=0):
    return SEES(torch.zeros_like(starts), ends, context, B, window)


def causal_block(starts, ends, context, B, window=0):
    healthy = SEES(starts, ends, context, B, window)
    return lambda b, h, q, kv: healthy(b, h, q, kv) & ((kv < context) | ((kv - context) <= q))


def wide_window(starts, ends, context, B, window=0):
    return SEES(starts, ends, context, B, window + 1 if window else 0)


def two_blocks(starts, ends, context, B, window=0):
    healthy = SEES(starts, ends, context, B, window)
    return lambda b, h, q, kv: healthy(b, h, q, kv) | ((kv - context == 0) & (q == B))


SEES, BLOCK_MASK, DENSE_MASK = model.sees, model.block_mask, model.dense_mask
BROKEN = [not_before, other_documents, causal_block, wide_window, two_blocks]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_found(monkeypatch, rule):
    monkeypatch.setattr(model, "sees", rule)
    for finding in (mask.check_dense(CASES), mask.check_tiles(CASES)):
        assert finding.state == "FAIL" and finding.fix and "slot" in finding.message, finding.message


def test_a_broken_dense_mask_or_range_is_found(monkeypatch):
    monkeypatch.setattr(model, "dense_mask", lambda *a: DENSE_MASK(*a).roll(1, 1))
    assert mask.check_dense(CASES).state == "FAIL"
    assert mask.check_tiles(CASES).state == "ok"
    monkeypatch.undo()
    make = model.make_blocks

    def from_zero(*args, **kwargs):
        blocks = make(*args, **kwargs)
        blocks.starts_A = torch.zeros_like(blocks.starts_A)
        return blocks

    monkeypatch.setattr(model, "make_blocks", from_zero)
    assert mask.check_dense(CASES).state == mask.check_tiles(CASES).state == "FAIL"


def rebuild(change):
    """block_mask with its partial and full tiles changed by `change(partial, full)`."""

    def broken(starts, ends, context, B, window=0):
        healthy = BLOCK_MASK(starts, ends, context, B, window)
        partial, full = (torch.tensor(t) for t in mask.tiles_of(healthy))
        change(partial, full)
        counts, keys = model._tile_lists(torch.stack([partial, full]).bool())
        lists, shape = (counts[0], keys[0], counts[1], keys[1]), healthy.seq_lengths
        return BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=model.TILE, mask_mod=healthy.mask_mod, seq_lengths=shape
        )

    return broken


def all_full(partial, full):
    full |= partial
    partial.zero_()


def one_missing(partial, full):
    partial[0, int(partial[0].argmax())] = 0


def twice(partial, full):
    partial |= full


def idle(partial, full):
    partial |= 1 - full


@pytest.mark.parametrize(
    "change,state", [(all_full, "FAIL"), (one_missing, "FAIL"), (twice, "FAIL"), (idle, "warn")]
)
def test_broken_tiles_are_found(monkeypatch, change, state):
    monkeypatch.setattr(model, "block_mask", rebuild(change))
    finding = mask.check_tiles(CASES)
    assert finding.state == state and finding.fix, finding.message
    assert mask.check_dense(CASES[:3]).state == "ok"


def test_broken_backward_lists_are_found(monkeypatch):
    def broken(*args):
        healthy = BLOCK_MASK(*args)
        healthy.q_num_blocks = healthy.q_num_blocks - 1
        return healthy

    monkeypatch.setattr(model, "block_mask", broken)
    assert "backward" in mask.check_tiles(CASES).message


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_compared_with_the_oracle(monkeypatch):
    """Uncompiled, forward only: what a CPU can do of it."""
    case = mask.dataclasses.replace(mask.example(), block_size=8)
    cpu = torch.device("cpu")
    error, _ = mask.attention_error(case, model.attend, model.block_mask(*case.arguments()), cpu)
    assert error < 0.03
    monkeypatch.setattr(model, "sees", not_before)
    error, _ = mask.attention_error(case, model.attend, model.block_mask(*case.arguments()), cpu)
    assert error > 0.03
    assert mask.check_flex(case, None).state == "skip" and mask.check_flex(case, None).fix


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compiled flex_attention")
@pytest.mark.parametrize("window", [0, 40])
def test_flex_compiled_equals_dense(window):
    case = mask.dataclasses.replace(mask.example(), block_size=16, window=window)
    finding = mask.check_flex(case, torch.device("cuda"))
    assert finding.state == "ok", finding.message


def test_picture_and_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mask, "cases", lambda: CASES[::9])
    png, found = tmp_path / "mask.png", tmp_path / "mask.json"
    assert mask.main(["--png", str(png), "--json", str(found), "--window", "40", "--block-size", "10"]) == 0
    out = capsys.readouterr().out
    drawn = out.split("[ok]")[0].splitlines()
    assert max(map(len, drawn)) <= 100 and "legend" in out and "window 40" in drawn[0]
    assert png.read_bytes().startswith(b"\x89PNG") and json.loads(found.read_text())["verdict"] == "READY"
    monkeypatch.setattr(model, "sees", not_before)
    assert mask.main([]) == 1
    assert "NOT READY" in capsys.readouterr().out


def test_character_picture_says_what_the_mask_says():
    """Rows of the example: the last column with a mark stands at the anchor, nothing right of it."""
    case = mask.example()
    rows = [line for line in mask.character_picture(case) if " position " in line]
    step = -(-case.context // rows[0].split("|")[1].__len__())
    for row, a in zip(rows, case.anchor_A, strict=False):
        context = row.split("|")[1]
        assert len(context.rstrip(".")) == -(-a // step)
        assert context[: (a - case.position_T[a]) // step].strip(".") == ""


@pytest.mark.parametrize(
    "flags",
    [
        ["--block-size", "1"],
        ["--window", "-1"],
        ["--png", "/no/such/folder/mask.png"],
        ["--no-such-flag"],
        ["--token-budget", "65536"],
        ["--data", "/no/such/file.jsonl"],
    ],
)
def test_usage_errors_are_one_line(flags, capsys, tmp_path, monkeypatch):
    import train

    monkeypatch.setattr(train, "USER_CACHE", tmp_path)
    with pytest.raises(SystemExit) as stop:
        mask.main(flags)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_real_batch_is_drawn(small, capsys, tmp_path, monkeypatch):
    import train

    monkeypatch.setattr(train, "USER_CACHE", tmp_path)
    monkeypatch.setattr(mask, "cases", lambda: [])
    assert mask.main([*small, "--block-size", "8"]) == 0
    assert "first batch of tiny, B 8: T 256" in capsys.readouterr().out


def test_script_runs_from_anywhere(tmp_path):
    """`python diagnose/mask.py`, as its docstring's other form."""
    command = [sys.executable, str(ROOT / "diagnose" / "mask.py")]
    environ = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("READY (")
