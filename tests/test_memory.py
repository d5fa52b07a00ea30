"""diagnose.memory: what is on paper is what modules hold, budgets are the largest that fit, and a job that
does not fit, or runs out, ends with one line.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY
from launch import environment

import checkpoint
import data
import headroom
import model
import stream
import train
from diagnose import memory
from model import Drafter, DrafterConfig, Target, TargetConfig

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
        "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
    "qwen3-8b": QWEN3 | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
    },
    "llama-70b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A folder with nothing but a config.json for each shape."""
    root, found = tmp_path_factory.mktemp("shapes"), {}
    for name, fields in SHAPES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(fields))
        found[name] = str(root / name)
    return found


def question(folder: str = "", *flags: object, ranks: int = 2) -> memory.Question:
    return memory.Question([*(["--target", folder] if folder else []), *map(str, flags)], ranks, 1)


def estimate(q: memory.Question, role: str, **changed) -> memory.Estimate:
    return memory.estimate(dataclasses.replace(q.config, **changed), q.target, role, q.ranks)


def bytes_of(tensors) -> int:
    """Of the distinct storages; meta tensors have sizes too."""
    return sum(
        s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
    )


# ---------------------------------------------------------------------------------------------------------
# What stands still is exact


@pytest.mark.parametrize("name", ["tiny", *SHAPES])
def test_weights_are_those_of_the_modules(folders, name):
    q = question(folders.get(name, ""))
    with torch.device("meta"):
        d = DrafterConfig.of(q.target, q.config.draft_layers, q.config.block_size, 5, 0)
        table = torch.empty(d.vocab, d.hidden, dtype=torch.bfloat16)
        tables = [table] if q.target.tied else [table, torch.empty_like(table)]
        drafter = Drafter(d, tables[0], tables[-1])
        target = Target(q.target, max(d.ids) + 1, head=False).bfloat16()
        whole = Target(q.target)
    found = estimate(q, "colocate").parts
    assert found["weights"] == found["gradients"] == bytes_of(drafter.parameters())
    assert found["embedding and head"] == bytes_of(tables)
    assert found["target weights"] == bytes_of(target.parameters())
    assert 4 * q.target.parameters(q.target.layers, head=True) == bytes_of(whole.parameters())


def test_moments_are_those_of_the_optimizer_that_a_run_saves(launcher, small, tmp_path):
    run = launcher.run(1, tmp_path / "run", *small, "--steps", 1, "--eval-every", 9).good()
    place = checkpoint.checkpoints(run.folder)[-1]
    state = torch.load(place / "optimizer.pt", weights_only=True)["state"].values()
    q = question("", "--draft-layers", 1)
    held = [s[k] for s in state for k in ("exp_avg", "exp_avg_sq")]
    assert estimate(q, "drafter").parts["moments"] == bytes_of(held)


@pytest.mark.parametrize("depth", [1, 3])
def test_feature_buffers_are_those_of_the_stream(depth):
    q = question("", "--depth", depth)
    c, width = q.config, 5 * q.target.hidden
    shapes = stream.Shapes(c.token_budget, c.anchors, c.max_batch_size, width, torch.bfloat16)
    held = bytes_of(stream.Buffers(shapes, depth, torch.device("cpu")).all)
    assert estimate(q, "drafter").parts["features"] == estimate(q, "target").parts["features"] == held
    assert estimate(q, "colocate").parts["features"] * depth == held


def test_paper_is_never_below_what_was_measured_and_close_to_it(tmp_path):
    """Of each row of docs/memory.md: within the larger of 5% and 300 MiB, by today's estimate."""
    text = (Path(memory.__file__).parents[1] / "docs" / "memory.md").read_text()
    rows = [
        re.split(r" *\| *", line)[1:] for line in text.splitlines() if re.match(r"\| (tiny|smol|qwen)", line)
    ]
    for row, (name, role, flags) in zip(rows, memory.SUITE, strict=True):
        assert row[0].split(",")[0] == name and row[1] == role
        if name in memory.SHAPES:
            (tmp_path / "config.json").write_text(json.dumps(memory.SHAPES[name]))
        q = question(str(tmp_path) if name in memory.SHAPES else "", *flags.split(), ranks=1)
        paper, device = estimate(q, role).peak / memory.GIB, float(row[8])
        assert -0.005 <= paper - device <= max(0.05 * device, 300 / 1024) + 0.005, (name, role, paper)
        assert f"{paper:.2f}" == row[9], (name, role)


# ---------------------------------------------------------------------------------------------------------
# More of anything is never less


@pytest.mark.parametrize("role", memory.ROLES)
@pytest.mark.parametrize("name", SHAPES)
def test_more_needs_more(folders, name, role):
    q = question(folders[name], "--token-budget", 8192, "--anchor-chunk", 512)
    base = estimate(q, role).peak
    assert estimate(q, role, token_budget=16384).peak > base
    assert estimate(q, role, depth=4).peak >= base + (role != "colocate")
    more = {"draft_layers": 6, "block_size": 24, "anchor_chunk": 1024}
    for field, value in more.items():
        assert (estimate(q, role, **{field: value}).peak > base) == (role != "target"), field


def test_memory_follows_the_chunk_and_not_the_budget(folders):
    """Four times the budget, at the same chunk, costs a drafter of an 8B target less than 1.35 times."""
    q = question(folders["qwen3-8b"], "--token-budget", 12288, "--anchors", 3072, "--anchor-chunk", 1536)
    four = question(folders["qwen3-8b"], "--token-budget", 49152, "--anchor-chunk", 1536)
    assert four.config.anchors == 4 * q.config.anchors
    assert estimate(q, "drafter").peak < estimate(four, "drafter").peak < 1.35 * estimate(q, "drafter").peak
    assert estimate(four, "drafter").peak < 60 * memory.GIB


def test_logits_are_counted_by_anchors_block_and_vocabulary(folders):
    """Case 12: one part of the logits and its gradient; never all of them."""
    q = question(folders["qwen3-8b"])
    d = DrafterConfig.of(q.target, 5, 16, 5, 0)
    _, few = d.chunk_moments(4, 8192)["loss"]
    assert few == 2 * 2 * 4 * 15 * d.vocab + 2 * 2 * 4 * 15 * d.hidden
    _, many = d.chunk_moments(2048, 8192)["loss"]
    rows = model.ChunkedCrossEntropy.rows(2048 * 15, d.vocab)
    assert many == 2 * 2 * rows * d.vocab + 2 * 2 * 2048 * 15 * d.hidden
    assert rows * d.vocab <= model.ChunkedCrossEntropy.ELEMENTS < 2 * rows * d.vocab


@pytest.mark.parametrize("total", [1, 7, 100, 101])
def test_parts_of_the_logits_are_what_the_loss_uses(monkeypatch, total):
    monkeypatch.setattr(model.ChunkedCrossEntropy, "ELEMENTS", 25 * 11)
    seen = []

    def rows(logits, *rest):
        seen.append(len(logits))
        return model.cross_entropy_rows(logits, *rest)

    h, head = torch.randn(total, 4, requires_grad=True), model.Head(torch.randn(11, 4))
    model.ChunkedCrossEntropy.apply(h, head, torch.zeros(total).long(), torch.ones(total), rows)
    assert max(seen) == model.ChunkedCrossEntropy.rows(total, 11) <= 25 and sum(seen) == total


# ---------------------------------------------------------------------------------------------------------
# What comes and goes, against train.accumulate and Target.features run on tensors without data


TRACED = [
    ("", "--token-budget 4096 --anchor-chunk 64"),
    ("smollm2-135m", memory.SMOL),
    ("qwen3-8b", "--token-budget 49152"),
    ("qwen3-8b", "--token-budget 16384 --anchor-chunk 16"),
    ("qwen3-8b", "--token-budget 65536 --anchor-chunk 32 --draft-layers 2"),
    ("qwen3-0.6b", "--token-budget 147456"),  # where a card is full of context
    ("smollm2-135m", "--token-budget 235776"),
]


@pytest.mark.parametrize("name, flags", TRACED)
def test_the_formula_agrees_with_the_trace_of_a_step(folders, name, flags):
    q = question(folders.get(name, ""), *flags.split())
    e = estimate(q, "drafter")
    assert sum(e.parts[p] for p in memory.PASSING) == pytest.approx(
        memory.trace_step(q.config, q.target), rel=0.05
    )


@pytest.mark.parametrize("name", ["", *SHAPES])
def test_the_formula_agrees_with_the_trace_of_the_target(folders, name):
    for flags in ("--token-budget 1024", "--token-budget 32768"):
        q = question(folders.get(name, ""), *flags.split())
        traced = memory.trace_features(q.config, q.target)
        assert estimate(q, "target").parts["target activations"] == pytest.approx(traced, rel=0.02)


def test_the_trace_sees_what_a_layer_keeps(monkeypatch):
    """A step that keeps one more tensor of a known size a layer is that much larger."""
    q, real = question("", "--token-budget", 2048, "--draft-layers", 3), model.DrafterLayer.mlp
    before = memory.trace_step(q.config, q.target)
    extra = q.config.anchor_chunk * q.config.block_size * q.target.hidden * 2

    def keeps_more(self, x):
        h = model.linear(x, self.q_proj)  # a product's result that the backward of x needs
        return (
            real(self, x) + h.unflatten(-1, (-1, 32)).sum(-1, keepdim=True).repeat(1, 1, 32).flatten(1).cos()
        )

    monkeypatch.setattr(model.DrafterLayer, "mlp", keeps_more)
    assert memory.trace_step(q.config, q.target) - before > 2 * extra


def test_tracing_leaves_the_model_as_it_was(capsys):
    real = model.attend, model.dense_mask, model.packed_causal_attention
    code, out, _ = run_script(capsys, "--trace")
    assert code == 0 and "[ok] trace of a drafter" in out and "[ok] trace of a target" in out
    assert real == (model.attend, model.dense_mask, model.packed_causal_attention)


def test_a_target_of_transformers_is_not_traced_as_another(capsys):
    pytest.importorskip("transformers")
    code, out, _ = run_script(capsys, "--trace", "--target-backend", "transformers")
    assert code == 0 and "[ok] trace of a drafter" in out and "[skip] trace of a target" in out


def test_the_trace_is_held_against_the_step_without_its_update(capsys):
    """Of so small a batch Muon's update is the largest moment, which is not traced."""
    few = ("--token-budget", 256, "--anchors", 4, "--draft-layers", 4, "--max-length", 128)
    code, out, _ = run_script(capsys, "--trace", "--optimizer", "muon", *few)
    assert code == 0 and "(update of the weights)" in out and "[ok] trace of a drafter" in out


# ---------------------------------------------------------------------------------------------------------
# Budgets


@pytest.mark.parametrize("most", [0, 1, 127, 128, 129, 1000, 4096])
def test_search_is_a_scan(most):
    for limit in range(0, 1500, 37):
        scanned = max((n for n in range(0, most + 1, 128) if n <= limit), default=0)
        assert headroom.search(lambda n, limit=limit: n <= limit, 128, most) == scanned


@pytest.mark.parametrize("card", ["24GB", "80GB", "141GB"])
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b"])
def test_the_largest_budget_fits_and_the_next_does_not(folders, name, card):
    q, have = question(folders[name]), memory.parse_memory(card)
    for role, squeezed in itertools.product(memory.ROLES, (False, True)):
        asked = (q.resolved, q.target, role, q.ranks, have)
        budget = memory.largest_token_budget(*asked, squeezed=squeezed)
        for tokens in (budget, budget + 128) if budget < headroom.MOST_TOKENS else (budget,):
            c = q.resolved(tokens or 128)
            spared = headroom.holes(c, c.drafter(q.target), role, 2) if squeezed else 0
            fits = memory.estimate(c, q.target, role, q.ranks).peak - spared <= have if tokens else True
            assert fits == (tokens == budget), (role, tokens)
        assert budget >= memory.largest_token_budget(*asked)


def test_the_largest_chunk_fits_and_the_next_does_not(folders):
    q = question(folders["qwen3-8b"], "--token-budget", 49152)
    have = 60 * memory.GIB
    chunk = memory.largest_anchor_chunk(q.config, q.target, "drafter", q.ranks, have)
    assert 0 < chunk < q.config.anchors
    for n in (chunk, chunk + 16):
        again = question(folders["qwen3-8b"], "--token-budget", 49152, "--anchor-chunk", n)
        assert (estimate(again, "drafter").peak <= have) == (n == chunk)


@pytest.mark.parametrize(
    "text, gib",
    [("96GB", 96 * 0.99), ("96", 96 * 0.99), ("80GiB", 80), ("1024MiB", 1), ("0.5 gib", 0.5)],
)
def test_cards(text, gib):
    assert memory.parse_memory(text) == int(gib * 2**30)


@pytest.mark.parametrize("text", ["0GB", "GB", "infGB", "9" * 400 + "GB"])
def test_no_cards(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give the memory of a card"):
        memory.parse_memory(text)


# ---------------------------------------------------------------------------------------------------------
# The script


def run_script(capsys, *argv: object) -> tuple[int, str, str]:
    code = memory.main([str(a) for a in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


STORY = "--token-budget 49152 --max-batch-size 64 --ranks 8 --drafters 3".split()


def test_the_known_story_gets_a_verdict(capsys, folders, tmp_path):
    """8B target, 8 cards of 96 GB, three of them drafting: with chunks it fits; in one chunk it does not."""
    file, target = tmp_path / "memory.json", ("--target", folders["qwen3-8b"], "--gpu-memory", "96GB", *STORY)
    code, out, _ = run_script(capsys, *target, "--json", file)
    assert code == 0 and "[ok] drafter  fits" in out and "[ok] target  fits" in out
    code, out, _ = run_script(capsys, *target, "--anchor-chunk", 12288, "--json", file)
    assert (
        code == 1 and "[FAIL] drafter  does not fit" in out and out.splitlines()[-1].startswith("NOT READY")
    )
    roles = json.loads(file.read_text())["roles"]
    assert set(roles) == set(memory.ROLES)
    for role in roles.values():
        assert {"peak_gib", "headroom_gib", "largest_token_budget"} <= role.keys()
        assert role["peak_gib"] + role["headroom_gib"] == pytest.approx(96 * 0.99, abs=1e-6)
    assert roles["drafter"]["headroom_gib"] < 0 < roles["target"]["headroom_gib"]
    fixes = [line for line in out.splitlines() if "train.py" in line]
    assert len(fixes) == 2 and all("--drafters 3" in line for line in fixes)
    for fix in fixes:  # each proposed launch fits by the same estimate
        flags = re.search(r"train.py (.*?)(  #|$)", fix)[1].split()
        again = memory.Question(flags, 8, 1)
        assert estimate(again, "drafter").peak <= memory.parse_memory("96GB")


def test_seventy_billion_from_a_config_alone(capsys, folders):
    path = folders["llama-70b"] + "/config.json"
    code, out, _ = run_script(capsys, "--target", path, "--gpu-memory", "80GB", "--ranks", 8)
    assert "target weights" in out and code == 1  # 78 layers of bf16 are more than this card
    assert "[FAIL] target  does not fit" in out and "no --token-budget fits" in out


def test_the_built_in_target_fits_this_machine(capsys, tmp_path):
    code, out, _ = run_script(capsys, "--png", tmp_path / "memory.png")
    assert code == 0 and "[ok] drafter" in out and "[ok] target" in out
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_little_headroom_is_a_warning(capsys, folders):
    q = question(folders["qwen3-8b"], ranks=1)
    card = f"{estimate(q, 'colocate').peak / memory.MIB + 100:.0f}MiB"
    code, out, _ = run_script(capsys, "--target", folders["qwen3-8b"], "--ranks", 1, "--gpu-memory", card)
    assert code == 0 and "[warn] colocate  fits, but only 0.1 GiB" in out and "fix: torchrun" in out
    more = ("--headroom", "5")
    code, out, _ = run_script(
        capsys, "--target", folders["qwen3-8b"], "--ranks", 1, "--gpu-memory", card, *more
    )
    assert code == 1 and "[FAIL] colocate" in out


def flags_of(fix: str) -> list[list[str]]:
    return [re.search(r"train.py (.*?)(  #|$)", line)[1].split() for line in fix.splitlines()]


@pytest.mark.parametrize("card", ["23GB", "24GB", "25GB", "32GB", "40GB", "46GB"])
@pytest.mark.parametrize("budget", [16384, 131072])
def test_a_proposed_launch_fits_with_room_and_says_where_it_cuts_documents(folders, card, budget):
    """Of the chunks asked for and halved, the largest whose budget holds a document of the largest length."""
    q, have = question(folders["qwen3-8b"], "--token-budget", budget, ranks=8), memory.parse_memory(card)
    found, _ = memory.judge(q, "drafter", have, 2)
    assert found.state == ("warn" if (card, budget) == ("46GB", 16384) else "FAIL")
    assert not re.search(r"--(token-budget|anchor-chunk) 0", found.message + found.fix)
    uncut, spared = [], int(0.95 * have)  # (room to spare?, chunk, budget) that cut no document
    for room, chunk in itertools.product((spared, have), (2048, 1024, 512, 256, 128, 64)):
        at = question(folders["qwen3-8b"], "--token-budget", budget, "--anchor-chunk", chunk, ranks=8)
        largest = memory.largest_token_budget(at.resolved, at.target, "drafter", 8, room)
        uncut += [(room < have, min(chunk, largest // 4), largest)] if largest >= 4096 else []
    for flags, line in zip(flags_of(found.fix), found.fix.splitlines(), strict=True):
        c = memory.Question(flags, 8, 1)
        verdict, cut = memory.judge(c, "drafter", have, 2)[0], c.config.token_budget < 4096
        assert (f"cuts documents to {c.config.token_budget} tokens" in line) == cut
        with_room = c.config.token_budget == budget or (uncut and uncut[0][0])
        assert verdict.state == ("ok" if with_room else "warn"), (line, verdict.message)
    c = memory.Question(flags_of(found.fix)[0], 8, 1).config
    if c.token_budget != budget:  # not the same budget in smaller chunks
        least = (min(64, c.token_budget // 4), c.token_budget)
        assert (c.anchor_chunk, c.token_budget) == (uncut[0][1:] if uncut else least)


def test_a_chunk_of_none_is_no_advice(capsys, folders):
    code, out, _ = run_script(capsys, "--target", folders["qwen3-8b"], "--gpu-memory", "24GB")
    (fix,) = [line for line in out.splitlines() if "fix: " in line]
    assert code == 1 and "--token-budget 3968 --anchor-chunk 64  # cuts documents to 3968 tokens" in fix
    assert "--draft-layers" in fix and "--anchor-chunk 0" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to compare with")
def test_without_a_card_it_asks_for_one(capsys, folders):
    code, out, _ = run_script(capsys, "--target", folders["qwen3-8b"])
    assert code == 0 and "[skip]" in out and f"--target {folders['qwen3-8b']} --gpu-memory 96GB" in out


@pytest.mark.parametrize(
    "flags",
    [
        ("--token-budget", "100"),
        ("--token-budget", "auto"),
        ("--no-such",),
        ("--target", "/nowhere"),
        ("--headroom", "100"),
        ("--nodes", "0"),
        ("--nodes", "-1"),
        ("--ranks", "-1"),
        ("--ranks", "3", "--nodes", "2"),
    ],
)
def test_usage_errors_are_one_line(capsys, flags):
    code, _, err = run_script(capsys, *flags)
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith("diagnose.memory: ")


def test_a_picture_that_cannot_be_written_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        memory.main(["--png", "/no/such/folder/memory.png"])
    assert stop.value.code == 2 and "cannot write /no/such/folder/memory.png" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------
# Measured


def worst(q: memory.Question) -> memory.WorstCase:
    return memory.WorstCase(dataclasses.replace(q.config, steps=2), q.target)


@pytest.mark.parametrize(
    "flags", ["", "--max-length 100", "--max-length 500 --max-batch-size 2", "--anchors 3000"]
)
def test_worst_batches_are_worst_and_well_formed(flags):
    q = question("", "--token-budget", 2048, *flags.split())
    batch, c = worst(q).train(0), q.config
    assert int((batch.doc_T >= 0).sum()) == min(2048, c.max_batch_size * c.max_length)
    lengths = torch.bincount(batch.doc_T[batch.doc_T >= 0])
    assert lengths.max() == min(c.max_length, 2048) and len(lengths) <= c.max_batch_size
    valid = data.valid_anchors(batch.mask_T.numpy(), batch.doc_T.numpy()).sum()
    assert int((batch.anchors_A >= 0).sum()) == min(valid, c.anchors)
    like = data.empty_batch(0, 2048, c.max_batch_size, c.anchors)
    for field in dataclasses.fields(data.Batch)[1:]:
        a, b = getattr(batch, field.name), getattr(like, field.name)
        assert a.shape == b.shape and a.dtype == b.dtype, field.name
    bounds = batch.cu_seqlens.tolist()
    for d, length in enumerate(lengths.tolist()):
        assert batch.positions_T[batch.doc_T == d].tolist() == list(range(length))
        assert bounds[d + 1] - bounds[d] == length
    assert bounds[-1] == 2048 and bounds == sorted(bounds)


def measure_one_rank(rank: int) -> None:
    """Called in ranks forked by the launcher."""
    flags = "--measure --random-weights --device cpu --token-budget 256 --anchor-chunk 32 --draft-layers 1"
    extra = ["--role", ROLE] if (ROLE := os.environ.get("PLANT_ROLE")) else []
    sys.exit(memory.main([*flags.split(), *extra, "--json", os.environ["PLANT_FILE"]]))


@pytest.mark.parametrize("ranks, role", [(1, ""), (1, "drafter"), (1, "target"), (3, "")])
def test_measuring_runs_the_real_loops_on_every_rank(launcher, tmp_path, ranks, role):
    file = tmp_path / "memory.json"
    env = {"PLANT_ROLE": role, "PLANT_FILE": str(file)}
    ended = launcher.call(ranks, "test_memory.measure_one_rank", **env).good()
    found = json.loads(file.read_text())["measured"]
    roles = ["drafter", "drafter", "target"] if ranks == 3 else [role or "colocate"]
    assert sorted(m["role"] for m in found) == sorted(roles)
    assert all(0 < m["device"] < 4 * 2**30 and m["paper"] > m["paper_tensors"] > 0 for m in found)
    assert ended.out[0].splitlines()[-1].startswith("READY") and not any(ended.out[1:])


def test_the_suite_is_refused_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "run_suite", None)  # would crash
    code, out, err = run_script(capsys, "--suite")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "--suite: " in err and "GPU" in err


@pytest.mark.parametrize("ranks", [1, 3])
def test_measuring_on_the_cpu_is_refused_where_memory_does_not_suffice(monkeypatch, folders, ranks):
    q = question(folders["smollm2-135m"], "--device", "cpu", ranks=ranks)
    roles = ["colocate"] if ranks == 1 else ["drafter"] * q.config.drafters
    roles += ["target"] * (ranks - len(roles))
    need = sum(memory.estimate(q.config, q.target, role, ranks, 4).peak for role in roles)
    monkeypatch.setattr(memory, "host_memory", lambda: need)
    memory.check_host(q, "")
    monkeypatch.setattr(memory, "host_memory", lambda: need - 1)
    with pytest.raises(ValueError, match="--measure: the CPU needs"):
        memory.check_host(q, "")


def test_measuring_an_8b_target_on_a_small_machine_is_one_line(capsys, monkeypatch, folders):
    monkeypatch.setattr(memory, "host_memory", lambda: 16 * memory.GIB)
    monkeypatch.setattr(memory, "measure", None)  # would crash
    asked = ("--measure", "--random-weights", "--device", "cpu", "--target", folders["qwen3-8b"])
    code, out, err = run_script(capsys, *asked)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "16.0 GiB are free" in err


HANGING = """
import os, signal, sys, time
from diagnose import memory

def hang(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that finishes its step first
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(60)

memory.measure = hang
memory.torch.cuda.is_available = lambda: True
if __name__ == "__main__":
    memory.main(["--suite", "--only", "tiny"])
"""


def wait_until(true, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def test_no_process_of_the_suite_outlives_it(tmp_path):
    """The suite's whole group is told to end, and its children do not listen."""
    script, file = tmp_path / "suite.py", tmp_path / "pid"
    script.write_text(HANGING)
    command, env = [sys.executable, str(script), str(file)], environment(tmp_path)
    suite = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        assert wait_until(file.exists, 60)
        child = int(file.read_text())
        assert is_running(child)
        os.killpg(suite.pid, signal.SIGTERM)
        ended = wait_until(lambda: not is_running(child), 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(suite.pid, signal.SIGKILL)
        out, _ = suite.communicate()
    assert ended and out.startswith("compiling 1 configuration(s) side by side, then measuring 1 in turn: ")


# ---------------------------------------------------------------------------------------------------------
# In training


CARD = "train.device_memory = lambda world: 600 * 2**20"


def test_the_automatic_budget_is_the_largest_that_leaves_the_headroom(launcher, small, tmp_path):
    """Of all ranks: the drafter's and the target's differ, the smaller one counts."""
    cut = small.index("--token-budget")
    flags = [*small[:cut], *small[cut + 2 :], "--token-budget", "auto", "--headroom", "10", "--steps", "1"]
    ended = launcher.run(2, tmp_path / "run", *flags, plant=CARD.replace("600", "2560"))
    assert ended.codes == [0, 0], ended.text
    c = json.loads((tmp_path / "run" / "config.json").read_text())
    q = question("", *flags[flags.index("--device") :], ranks=2)
    have = int(2560 * memory.MIB * 0.9)
    budgets = [memory.largest_token_budget(q.resolved, q.target, r, 2, have) for r in ("drafter", "target")]
    assert c["token_budget"] == min(budgets) and min(budgets) % 128 == 0 and budgets[0] != budgets[1]
    squeezed = min(
        memory.largest_token_budget(q.resolved, q.target, r, 2, have, squeezed=True)
        for r in ("drafter", "target")
    )
    assert "memory after a rehearsed step: at most " in ended.text
    assert f"auto: {min(budgets)}; up to {squeezed} may run" in ended.text and squeezed > min(budgets)


def test_an_automatic_budget_needs_a_gpu(launcher, small, tmp_path):
    cut = small.index("--token-budget")
    ended = launcher.run(1, tmp_path / "run", *small[:cut], *small[cut + 2 :], "--token-budget", "auto")
    assert ended.codes == [2] and "--token-budget auto: this run is on CPU" in ended.text


def test_a_hopeless_launch_is_refused_before_anything_is_loaded(launcher, small, tmp_path):
    plant = CARD + "\ntrain.model.Target.load = train.model.load_embedding_and_head = None"  # would crash
    ended = launcher.run(2, tmp_path / "run", *small, plant=plant)
    assert ended.codes == [2, 2] and "Traceback" not in ended.text
    (line,) = [line for line in ended.text.splitlines() if line.startswith("train.py:")]
    assert re.search(
        r"--token-budget 256: a drafter rank needs [\d.]+ GiB \(.+\), its GPU has 0.6 GiB: "
        r"no --token-budget fits: .+ or --ignore-headroom",
        line,
    )
    assert not (tmp_path / "run").exists()


def test_the_refusal_names_budgets_that_fit(folders):
    q = question(folders["qwen3-8b"], "--token-budget", 49152, "--anchor-chunk", 12288, ranks=8)
    for role in memory.roles_of(q.config.layout):
        have = memory.parse_memory("40GB") if role == "drafter" else estimate(q, role).peak - 1
        line = headroom.refusal(q.resolved, q.config, q.target, role, 8, have)
        assert line.startswith(f"--token-budget 49152: a {role} rank needs ") and "\n" not in line
        flags = re.findall(r"(--token-budget|--anchor-chunk) (\d+)", line)[1:]
        assert len(flags) == (2 if role == "drafter" else 1)
        for flag in flags:
            given = {"--token-budget": 49152, "--anchor-chunk": 12288} | {flag[0]: flag[1]}
            again = question(folders["qwen3-8b"], *(x for pair in given.items() for x in pair), ranks=8)
            assert estimate(again, role).peak <= have
    assert not headroom.refusal(q.resolved, q.config, q.target, "target", 8, 2**60)


FAULTS = "--drafters 2 --batches-per-step 2 --steps 6 --save-every 2 --eval-every 100".split()
OUT = "raise train.torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...')"
PLACES = {
    "target": ("train.Job.make_features", "RANK == 2 and args[1].index == 11", "rank 2 (target)"),
    "drafter": ("train.accumulate", "RANK == 1 and args[2].index == 7", "rank 1 (drafter)"),
    "gate": ("train.accumulate", "RANK == 0 and args[4:] == () and more.get('sync')", "rank 0 (drafter)"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_an_out_of_memory_error_ends_all_ranks_with_one_message(launcher, small, place, tmp_path):
    """Case 15: who, what it held by category, and the budget that would fit; the last checkpoint is whole."""
    where, when, who = PLACES[place]
    plant = f"real = {where}\ndef planted(*args, **more):\n    if {when}:\n        {OUT}\n"
    plant += f"    return real(*args, **more)\n{where} = planted"
    ended = launcher.run(3, tmp_path / "run", *small, "--token-budget", 512, *FAULTS, plant=plant)
    assert set(ended.codes) == ({2} if place == "gate" else {1}) and ended.seconds < 30
    (line,) = [
        line for line in ended.text.splitlines() if f"{who} ran out of memory" in line and "train.py:" in line
    ]
    phase = "before the first step" if place == "gate" else "in training"
    assert f"{who} ran out of memory {phase} (1.50 GiB more were asked for): on paper " in line
    parts = ("target weights", "features", "target activations")
    for part in (
        parts if place == "target" else ("weights", "gradients", "moments", "features", "activations")
    ):
        assert re.search(rf"\b{part} [\d.]+ [GM]iB", line), part
    assert 0 < int(re.search(r": give --token-budget (\d+)", line)[1]) < 512
    assert who in ended.status()["why"]
    assert "Traceback" not in ended.text
    if place != "gate":
        assert int(checkpoint.checkpoints(ended.folder)[-1].name[5:]) >= 2


def test_what_others_hold_of_a_gpu_is_not_ours(monkeypatch):
    """A bare context is all this process holds at the first question; later ones get the same answer."""

    class World:
        device = torch.device("cuda")

    free = iter([60 * memory.GIB, 1 * memory.GIB])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 140 * memory.GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    assert train.device_memory(World) == train.device_memory(World) == 60 * memory.GIB + headroom.BARE_CONTEXT


def test_other_errors_keep_their_traceback():
    assert headroom.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert headroom.is_out_of_memory(
        RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'")
    )
    assert not headroom.is_out_of_memory(RuntimeError("connection reset by peer"))
    assert not headroom.is_out_of_memory(MemoryError("out of memory"))


def test_the_flag_overrides(monkeypatch):
    class World:
        role, size, nodes = "drafter", 2, 1

    q = question()
    monkeypatch.setattr(train, "device_memory", lambda world: 1)
    with pytest.raises(ValueError, match="a drafter rank needs"):
        train.refuse_hopeless(q.config, q.target, World, q.resolved)
    train.refuse_hopeless(dataclasses.replace(q.config, ignore_headroom=True), q.target, World, q.resolved)
    assert (
        train.parse_flags(["--ignore-headroom"]).ignore_headroom and not train.parse_flags([]).ignore_headroom
    )
    monkeypatch.setattr(train, "device_memory", lambda world: 0)  # no GPU: nothing to check
    train.refuse_hopeless(q.config, q.target, World, q.resolved)


def test_paper_needs_only_a_config(folders):
    assert TargetConfig.from_folder(TINY).parameters(6, head=True) < 1.2e6
    for name in SHAPES:
        q = question(folders[name])
        assert estimate(q, "drafter").moment in memory.peaks(q.config, q.target, "drafter", q.ranks)
