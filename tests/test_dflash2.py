"""pytest tests/test_dflash2.py: what --variant dflash2 adds to the drafter, against oracles made of loops.

T packed context tokens, A anchors, B block size, S = A*B slots, H hidden, V vocabulary.
"""

import dataclasses
import json
import math
import shutil

import pytest
import test_decode
import test_drafter
import test_fp8
import torch
import torch.nn.functional as F
from conftest import TINY
from safetensors.torch import load_file, save_file
from test_drafter import GAMMA, MASK_TOKEN, SMALL, H, Row, V, make_features, make_row, rms, turn
from torch import Tensor

import checkpoint
import decode
import model
import train
from diagnose import compile_cache, memory
from model import ChunkedCrossEntropy, Drafter, DrafterConfig

ADDED = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=5)


def shake(drafter: Drafter, size: float = 0.5) -> Drafter:
    """Random convolutions and selector: fresh ones change nothing."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if "_conv." in name or "candidate_selector." in name:
                p.add_(torch.randn(p.shape, generator=random), alpha=size)
    return drafter


def make_drafter(**changes) -> Drafter:
    return shake(test_drafter.make_drafter(**(ADDED | changes)))


# ---------------------------------------------------------------------------------------------------------
# The oracles


def convolved(conv: model.BlockConv, x_BH: Tensor, source_BH: Tensor, side: int) -> Tensor:
    """One block, a slot and a group of channels at a time; `source_BH` is the sublayer's input."""
    B, groups = len(x_BH), H // conv.group
    delta = source_BH @ conv.kernel_projection.weight.T
    rows = []
    for i in range(B):
        row = []
        for g in range(groups):
            own, total = slice(g * conv.group, (g + 1) * conv.group), 0.0
            for t in range(min(conv.taps, i + 1)):
                tap = conv.base_kernel[side, t, own] + delta[i, (side * conv.taps + t) * groups + g]
                total = total + tap * x_BH[i - t, own]
            row.append(total)
        rows.append(torch.cat(row))
    return torch.stack(rows)


def oracle_states(drafter: Drafter, row: Row, features: Tensor, a: int) -> Tensor:
    """Final states [B, H] of the block that hangs on the anchor at packed index a."""
    c, w, B = drafter.c, dict(drafter.named_parameters()), drafter.c.block_size
    at = row.positions_T[a].item()
    ctx = rms(features[a - at : a] @ w["fc.weight"].T, w["hidden_norm.weight"], c.eps)
    x = drafter.embedding[[row.tokens_T[a].item()] + [MASK_TOKEN] * (B - 1)]
    for i, layer in enumerate(drafter.layers):
        own = {n.removeprefix(f"layers.{i}."): p for n, p in w.items() if n.startswith(f"layers.{i}.")}
        source = rms(x, own["input_layernorm.weight"], c.eps)
        h = convolved(layer.attention_conv, source, source, 0)
        both = torch.cat([ctx, h])
        q, k, v = (
            (side @ own[f"{name}_proj.weight"].T).unflatten(-1, (-1, c.head_dim))
            for name, side in (("q", h), ("k", both), ("v", both))
        )
        slots_at = [at + k for k in range(B)]
        q = turn(rms(q, own["q_norm.weight"], c.eps), slots_at, c.rope_theta)
        k = turn(rms(k, own["k_norm.weight"], c.eps), list(range(at)) + slots_at, c.rope_theta)
        heads = [n // (c.heads // c.kv_heads) for n in range(c.heads)]
        scores = torch.stack([q[:, n] @ k[:, g].T for n, g in enumerate(heads)]) / math.sqrt(c.head_dim)
        out = torch.cat([s.softmax(-1) @ v[:, g] for s, g in zip(scores, heads, strict=True)], -1)
        x = x + convolved(layer.attention_conv, out @ own["o_proj.weight"].T, source, 1)
        source = rms(x, own["post_attention_layernorm.weight"], c.eps)
        h = convolved(layer.mlp_conv, source, source, 0)
        h = F.silu(h @ own["gate_proj.weight"].T) * (h @ own["up_proj.weight"].T)
        x = x + convolved(layer.mlp_conv, h @ own["down_proj.weight"].T, source, 1)
    return rms(x, w["norm.weight"], c.eps)


def edge(drafter: Drafter, h_H: Tensor, before: int, token: int, logit: Tensor) -> Tensor:
    """The score of one transition."""
    w = dict(drafter.candidate_selector.named_parameters())
    state = w["hidden_projection.weight"] @ h_H
    return logit + (w["predecessor_codebook"][before] * state * w["successor_codebook"][token]).sum()


def oracle_logits(drafter: Drafter, states_BH: Tensor) -> Tensor:
    logits, cap = states_BH @ drafter.head.T, drafter.c.softcap
    return cap * torch.tanh(logits / cap) if cap else logits


def best(logits_V: Tensor, count: int) -> list[int]:
    return sorted(range(len(logits_V)), key=lambda v: -logits_V[v].item())[:count]


def oracle_loss(drafter: Drafter, states_BH: Tensor, labels: list[int], weights: list[float]) -> Tensor:
    """Cross-entropy over the vocabulary and over the candidates, slot by slot, predecessors the true ones."""
    logits, total = oracle_logits(drafter, states_BH), torch.zeros(())
    for k in range(1, drafter.c.block_size):
        tokens = best(logits[k], drafter.c.selector_top_k)
        if labels[k] not in tokens:
            tokens[-1] = labels[k]
        edges = [edge(drafter, states_BH[k], labels[k - 1], c, logits[k, c]) for c in tokens]
        picked = torch.stack(edges).log_softmax(0)[tokens.index(labels[k])]
        total = total - weights[k] * (picked + logits[k].log_softmax(0)[labels[k]])
    return total


def oracle_walk(drafter: Drafter, states_BH: Tensor, anchor: int) -> list[int]:
    logits, walked = oracle_logits(drafter, states_BH), [anchor]
    for k in range(1, drafter.c.block_size):
        tokens = best(logits[k], drafter.c.selector_top_k)
        edges = [edge(drafter, states_BH[k], walked[-1], c, logits[k, c]).item() for c in tokens]
        walked.append(tokens[edges.index(max(edges))])
    return walked[1:]


# ---------------------------------------------------------------------------------------------------------
# Convolution and selector in the drafter


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("taps, block_size", [(2, 8), (3, 10), (1, 2)])
def test_convolution_equals_the_loops(taps, block_size, side):
    """Also: the first slots of a block see nothing of the block before."""
    c = dataclasses.replace(make_drafter().c, conv_kernel_size=taps, block_size=block_size)
    conv, random = model.BlockConv(c), torch.Generator().manual_seed(0)
    for p in conv.parameters():
        p.data = torch.randn(p.shape, generator=random)
    source, x = (torch.randn(3 * block_size, H, generator=random) for _ in range(2))
    before, delta = conv.before(source)
    ours = conv.after(x, delta) if side else before
    given = x if side else source
    blocks = zip(given.split(block_size), source.split(block_size), strict=True)
    slow = torch.cat([convolved(conv, x_BH, source_BH, side) for x_BH, source_BH in blocks])
    torch.testing.assert_close(ours, slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_drafter_equals_one_anchor_at_a_time(softcap):
    """Loss, the tokens of evaluation's walk, and every gradient."""
    row = make_row(**(SMALL | dict(anchors=4, unused=1)))
    drafter, features = make_drafter(softcap=softcap), make_features(SMALL["T"])
    blocks = row.blocks(8)
    anchors = row.anchors_A[blocks.real_A].tolist()
    states = [oracle_states(drafter, row, features, a) for a in anchors]
    real = zip(states, blocks.labels_AB[blocks.real_A], blocks.weights_AB[blocks.real_A], strict=True)
    expected = sum(oracle_loss(drafter, s, labels.tolist(), w.tolist()) for s, labels, w in real)
    loss, predicted = drafter(drafter.context_keys_values(features, row.positions_T), blocks)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    logits = torch.stack([oracle_logits(drafter, s)[1:] for s in states])
    assert torch.equal(predicted[blocks.real_A], logits.argmax(-1))  # in training the head alone
    test_drafter.same_gradients(drafter, loss, expected)
    with torch.no_grad():
        same, walked = drafter(drafter.context_keys_values(features, row.positions_T), blocks)
    slow = [oracle_walk(drafter, s, row.tokens_T[a].item()) for s, a in zip(states, anchors, strict=True)]
    wanted, weights = (t[blocks.real_A, 1:].flatten() for t in (blocks.labels_AB, blocks.weights_AB))
    head_alone = (weights * F.cross_entropy(logits.flatten(0, 1), wanted, reduction="none")).sum()
    torch.testing.assert_close(same, head_alone, rtol=1e-5, atol=1e-5)  # comparable with that of DFlash
    assert walked[blocks.real_A].tolist() == slow
    assert not torch.equal(walked, predicted)


def test_fresh_it_drafts_as_dflash_does():
    row, features = make_row(**SMALL), make_features(SMALL["T"])
    tables = [torch.randn(V, H, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    plain = Drafter(test_drafter.CONFIG, *tables, seed=5)
    fresh = Drafter(dataclasses.replace(test_drafter.CONFIG, **ADDED), *tables, seed=5)
    weights = plain.state_dict()
    assert all(torch.equal(p, weights[n]) for n, p in fresh.state_dict().items() if n in weights)
    assert plain.c.variant == "dflash" and fresh.c.variant == "dflash2"
    logits = [test_drafter.block_logits(d, row, features) for d in (plain, fresh)]
    assert torch.equal(*logits)
    with torch.no_grad():
        outcomes = [
            d(d.context_keys_values(features, row.positions_T), row.blocks(8)) for d in (plain, fresh)
        ]
    assert all(map(torch.equal, *outcomes))


def test_nothing_of_another_block_reaches_a_block():
    row, drafter = make_row(**SMALL), make_drafter()
    features, blocks = make_features(SMALL["T"]), row.blocks(8)
    before = test_drafter.block_logits(drafter, row, features, blocks).detach()
    for i in range(len(row.anchors_A)):
        ids_S = blocks.ids_S.clone()
        ids_S[i * 8 : i * 8 + 8] = torch.randint(V, (8,), generator=torch.Generator().manual_seed(i))
        changed = dataclasses.replace(blocks, ids_S=ids_S)
        after = test_drafter.block_logits(drafter, row, features, changed).detach()
        moved = (after - before).abs().amax((1, 2)) > 1e-5
        assert torch.equal(moved, torch.arange(len(moved)) == i)


def test_chunks_of_anchors_and_of_logits_add_up_to_the_whole(monkeypatch):
    row, drafter, features = make_row(**SMALL), make_drafter(), make_features(SMALL["T"])
    loss, grads = test_drafter.gradients(drafter, row, features)
    monkeypatch.setattr(ChunkedCrossEntropy, "ELEMENTS", 6 * V)
    parts = [
        test_drafter.gradients(drafter, dataclasses.replace(row, anchors_A=part), features)
        for part in (row.anchors_A, *row.anchors_A.split(4))
    ]
    for again, found in (parts[0], (sum(p for p, _ in parts[1:]), None)):
        torch.testing.assert_close(again, loss)
        for name, g in grads.items():
            other = found[name] if found else sum(part[name] for _, part in parts[1:])
            torch.testing.assert_close(other, g, rtol=1e-4, atol=1e-5)


def test_unused_slots_change_nothing():
    row, drafter, features = make_row(**SMALL), make_drafter(), make_features(SMALL["T"])
    shorter = dataclasses.replace(row, anchors_A=row.anchors_A[row.anchors_A >= 0])
    (loss, grads), (expected, without) = (
        test_drafter.gradients(drafter, r, features) for r in (row, shorter)
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, without, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [-1, -5, -20])
@pytest.mark.parametrize("block_size", [8, 10])
def test_a_window_that_looks_both_ways_inside_the_block(block_size, window):
    """As published drafters with `is_causal` false: context as with W, all slots of the block."""
    row = make_row(**SMALL)
    blocks, T = row.blocks(block_size), SMALL["T"]
    mask = model.dense_mask(blocks.starts_A, blocks.ends_A, T, block_size, window)
    assert torch.equal(mask[:, :T], test_drafter.mask_oracle(row, block_size, -window)[:, :T])
    assert torch.equal(mask[:, T:], test_drafter.mask_oracle(row, block_size, 0)[:, T:])


def test_compiled_layer_and_selector_equal_eager():
    """Whole graphs of static shapes: one for the layers, as in DFlash, one for the selector's loss."""
    row, drafter, features = make_row(**SMALL), make_drafter(layers=3, windows=(0,) * 3), make_features(96)
    expected, without = test_drafter.gradients(drafter, row, features)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how = dict(fullgraph=True, dynamic=False, backend="aot_eager")
    drafter.run_layer = torch.compile(model.DrafterLayer.forward, **how)
    drafter.run_selector = torch.compile(model.selector_loss, **how)
    for _ in range(2):
        loss, grads = test_drafter.gradients(drafter, row, features)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(grads, without, rtol=1e-4, atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_in_8_bits_it_is_near_the_exact_one(monkeypatch):
    monkeypatch.setattr(test_fp8, "CONFIG", dataclasses.replace(test_fp8.CONFIG, **ADDED))
    monkeypatch.setattr(test_fp8, "Drafter", lambda *a, **k: shake(Drafter(*a, **k), 0.05))
    exact, gradients = test_fp8.step(False, torch.float32)
    loss, ours = test_fp8.step(True, torch.bfloat16)
    assert loss == pytest.approx(exact, rel=0.01)
    for name, g in ours.items():
        assert g.dtype == torch.float32, name
        assert F.cosine_similarity(g.flatten(), gradients[name].flatten(), dim=0) > 0.85, (
            name
        )  # other candidates here and there


# ---------------------------------------------------------------------------------------------------------
# On paper


def test_memory_on_paper_is_what_modules_hold_and_a_step_needs():
    q = memory.Question(["--variant", "dflash2"], 2, 1)
    d = q.config.drafter(q.target)
    with torch.device("meta"):
        drafter = Drafter(d, torch.empty(d.vocab, d.hidden), torch.empty(d.vocab, d.hidden))
    assert d.parameters() == sum(p.numel() for p in drafter.parameters())
    e = memory.estimate(q.config, q.target, "drafter", q.ranks)
    passing = sum(e.parts[p] for p in memory.PASSING)
    traced = memory.trace_step(q.config, q.target)
    assert 0.97 * traced < passing < 1.1 * traced, (passing, traced)
    plain = DrafterConfig.of(q.target, d.layers, d.block_size, 5, 0)
    assert d.step_flops(1024, 256) > plain.step_flops(1024, 256)


# ---------------------------------------------------------------------------------------------------------
# Exports


def tiny_drafter(**changes) -> Drafter:
    t = model.TargetConfig.from_folder(TINY)
    c = dataclasses.replace(DrafterConfig.of(t, 2, 8, 5, 4, "dflash2"), **changes)
    return shake(Drafter(c, *model.load_embedding_and_head(TINY, "cpu", torch.float32)), 0.1)


def test_an_export_has_the_public_names_and_comes_back(tmp_path):
    drafter = tiny_drafter()
    checkpoint.export(drafter, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    shapes = {name: list(w.shape) for name, w in weights.items()}
    added = {"candidate_selector.hidden_projection.weight": [256, 128]}
    added |= {f"candidate_selector.{side}_codebook": [1024, 256] for side in ("predecessor", "successor")}
    for conv in (
        "layers.0.attention_conv",
        "layers.0.mlp_conv",
        "layers.1.attention_conv",
        "layers.1.mlp_conv",
    ):
        added |= {f"{conv}.base_kernel": [2, 2, 128], f"{conv}.kernel_projection.weight": [2 * 2 * 8, 128]}
    plain = Drafter(
        dataclasses.replace(drafter.c, **dict.fromkeys(ADDED, 0)), drafter.embedding, drafter.head
    )
    names = {checkpoint.export_name(name) for name in plain.state_dict()}
    assert {n: s for n, s in shapes.items() if n not in names} == added and names < shapes.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"] and config["block_size"] == 8
    assert config["dflash_config"] == {
        "target_layer_ids": [0, 1, 2, 3, 4], "mask_token_id": 4, "block_size": 8, "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    }  # fmt: skip
    back = checkpoint.load_drafter(tmp_path, TINY)
    assert back.c == drafter.c
    for p, wanted in zip(back.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(p, wanted.bfloat16().float())
    for change in (
        lambda w: w.pop("candidate_selector.successor_codebook"),
        lambda w: w.update(odd=torch.ones(1)),
    ):
        changed = {name: w.clone() for name, w in weights.items()}
        change(changed)
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="is missing or unknown"):
            checkpoint.load_drafter(tmp_path, TINY)


def test_published_forms_are_read(tmp_path):
    """Sizes in `dflash_config` alone; sliding layers that look both ways; one addition without the other."""

    def nested(c: dict) -> None:
        del c["block_size"]
        c |= dict(is_causal=False, max_window_layers=2)

    for i, changes in enumerate(
        (
            dict(windows=(-24, -24)),
            dict(windows=(-24, 0)),
            dict(softcap=20.0),
            dict(conv_kernel_size=0, conv_group_size=0),
            dict(selector_rank=0, selector_top_k=0),
        )
    ):
        drafter = tiny_drafter(**changes)
        folder = test_decode.published(tmp_path / str(i), nested, drafter)
        assert checkpoint.load_drafter(folder, TINY).c == drafter.c


REFUSED = {
    "output_multiplier": lambda c: c["dflash_config"].update(output_multiplier=0.2),
    "input_embedding_scale": lambda c: c["dflash_config"].update(input_embedding_scale=2.0),
    "multiple": lambda c: c["dflash_config"].update(conv_group_size=24),
    "candidates": lambda c: c["dflash_config"].update(selector_top_k=2000),
    "conv_kernel_size": lambda c: c["dflash_config"].update(conv_kernel_size=9),
    "causal": lambda c: c.update(is_causal=True),
    "is missing or unknown": lambda c: c["dflash_config"].pop("selector_rank"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_read_is_one_line(said, tmp_path):
    folder = test_decode.published(tmp_path, REFUSED[said], tiny_drafter())
    with pytest.raises(ValueError, match=said) as error:
        checkpoint.load_drafter(folder, TINY)
    assert "\n" not in str(error.value)


def test_checkpoints_from_before_it_are_read(tmp_path):
    plain = test_decode.tiny_drafter()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    place = checkpoint.save(tmp_path, 0, plain, optimizer, {"next_batch": 0, "config": {}}, 0)
    state = json.loads((place / "state.json").read_text())
    for name in ADDED:
        del state["drafter"][name]
    (place / "state.json").write_text(json.dumps(state))
    assert checkpoint.load_drafter(place, TINY).c == plain.c


# ---------------------------------------------------------------------------------------------------------
# Decoding


plain_decoding_drafter = test_decode.make_drafter


def decoding_drafter(target: model.Target, **changes) -> Drafter:
    added = dict(
        conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=min(5, target.c.vocab)
    )
    return shake(plain_decoding_drafter(target, **(added | changes)))


@torch.no_grad()
def walk_in_training(target: model.Target, drafter: Drafter, ids: list[int]) -> list[int]:
    """The block at the last token, as evaluation predicts it from a packed pass over everything before."""
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    features = target.features(tokens, positions, bounds, len(ids), list(drafter.c.ids))
    row = Row(tokens, positions, torch.zeros(len(ids)).int(), torch.ones(len(ids)).bool(), positions[-1:])
    parts = (row.tokens_T, row.positions_T, row.doc_T, row.mask_T, row.anchors_A)
    blocks = model.make_blocks(*parts, drafter.c.block_size, GAMMA, drafter.c.mask_token)
    _, predicted = drafter(drafter.context_keys_values(features, positions), blocks)
    return predicted[0].tolist()


@pytest.mark.parametrize("windows", [(0, 0), (-3, -7)])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_answers_are_the_targets_own_and_blocks_those_of_evaluation(rows, windows):
    target = test_decode.make_target()
    drafter, prompts = decoding_drafter(target, windows=windows), test_decode.make_prompts(target)
    wanted = [test_decode.greedy(target, p) for p in prompts]
    size = test_decode.capacity(prompts)
    engine = test_decode.Recording(target, drafter, [test_decode.STOP], rows, size)
    engine.truth = {p.where: p.ids + w for p, w in zip(prompts, wanted, strict=True)}
    engine.notes = []
    assert [a.ids for a in engine.run(prompts, True).answers] == wanted
    engine = decode.Engine(target, drafter, [test_decode.STOP], rows, size)
    engine.use_chunks()
    assert [a.ids for a in engine.run(prompts, True).answers] == wanted


@pytest.mark.parametrize("windows", [(0, 0), (-3, -7)])
def test_blocks_are_those_of_evaluation(windows):
    target = test_decode.make_target()
    drafter, prompts = decoding_drafter(target, windows=windows), test_decode.make_prompts(target)
    engine = test_decode.Recording(target, drafter, [test_decode.STOP], 3, test_decode.capacity(prompts))
    engine.truth = {p.where: p.ids + test_decode.greedy(target, p) for p in prompts}
    engine.notes = []
    engine.run(prompts, True)
    assert len(engine.notes) > 40 and len({tuple(d) for _, d in engine.notes}) > 20
    for ids, drafted in engine.notes:
        assert drafted == walk_in_training(target, drafter, ids)


@torch.no_grad()
def test_sampled_answers_have_the_targets_distribution(monkeypatch):
    """DFlash's test with this drafter: 2 candidates of 4 tokens, so that q is 0 for half of them."""
    made = []

    def drafter(target):
        made.append(decoding_drafter(target, selector_top_k=2))
        return made[-1]

    monkeypatch.setattr(test_decode, "make_drafter", drafter)
    test_decode.test_sampled_answers_have_the_targets_distribution(True)
    assert made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_never_waits_for_the_host(temperature, monkeypatch):
    monkeypatch.setattr(test_decode, "make_drafter", decoding_drafter)
    test_decode.test_a_pass_never_waits_for_the_host(temperature)


def test_compiled_passes_decode_the_same_without_a_recompile(monkeypatch):
    def traced(fn, name):
        return torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(decode.compile_utils, "compile", traced)
    torch._dynamo.reset()
    target = test_decode.make_target()
    drafter, prompts = decoding_drafter(target), test_decode.make_prompts(target)
    size = (2, test_decode.capacity(prompts))
    eager, engine = (decode.Engine(target, drafter, [test_decode.STOP], *size) for _ in range(2))
    for one in (eager, engine):
        one.use_chunks()
    wanted = [a.ids for a in eager.run(prompts, True).answers]
    engine.compile()
    engine.warm_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [a.ids for a in engine.run(prompts, True).answers] == wanted
    noise = torch.rand(2, test_decode.B - 1, target.c.vocab)
    path = (torch.randn(2, test_decode.B - 1, target.c.hidden), drafter, torch.tensor([3, 4]), 0.8, noise)
    for ours, eagerly in zip(traced(decode.draft_path, "")(*path), decode.draft_path(*path), strict=True):
        torch.testing.assert_close(ours, eagerly)
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------------
# Whole jobs


STEPS = ("--variant", "dflash2", "--batches-per-step", 2, "--steps", 6, "--eval-every", 3, "--save-every", 3)


@pytest.fixture(scope="module")
def run(launcher, small, tmp_path_factory):
    """Six steps on one rank that does both, its evaluations decoded as well."""
    folder = tmp_path_factory.mktemp("dflash2") / "run"
    flags = ("--layout", "colocate", "--eval-decode", 999)
    return launcher.run(1, folder, *small, *STEPS, *flags).good()


def losses(records: list[dict]) -> list[float]:
    return [m[name] for m in records for name in ("loss", "eval_loss", "eval_tau") if name in m]


@pytest.mark.parametrize("ranks, flags", [(2, ()), (3, ("--drafters", 2, "--anchor-chunk", 8))])
def test_any_split_gives_the_same_losses(run, launcher, small, tmp_path, ranks, flags):
    other = launcher.run(ranks, tmp_path / "run", *small, *STEPS, *flags).good()
    ours, theirs = losses(run.records()), losses(other.records())
    assert len(ours) == 6 + 2 * 3 and ours == pytest.approx(theirs, rel=1e-5) and ours[-2] < ours[0]
    assert "dflash2 drafter: 1 layers, B 8" in other.text


def test_what_evaluation_walks_is_what_decoding_drafts(run):
    evaluations = [m for m in run.records() if "eval_tau" in m]
    assert len(evaluations) == 3 and evaluations[-1]["eval_tau"] > 1.01
    for m in evaluations:
        assert m["decode_tau"] == pytest.approx(m["eval_tau"], rel=1e-5)


def test_resume_is_bit_for_bit(run, launcher, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-000006")
    launcher.run(1, None, "--resume", tmp_path / "run").good()
    weights = [load_file(f / "step-000006" / "model.safetensors") for f in (run.folder, tmp_path / "run")]
    assert any("candidate_selector" in name for name in weights[0])
    assert all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())
    first = load_file(run.folder / "step-000003" / "model.safetensors")
    assert not any(torch.equal(w, first[name]) for name, w in weights[0].items())


def test_a_run_starts_from_an_export(run, launcher, small, tmp_path):
    export = run.folder / "step-000006" / "export"
    flags = [*test_decode.without(small, "--draft-layers"), "--init-draft", export, "--steps", 1]
    begun = launcher.run(1, tmp_path / "run", *flags).good().records()[0]
    assert begun["eval_loss"] == pytest.approx(run.records()[-1]["eval_loss"], rel=2e-2)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["variant"] == "dflash2"
    ended = launcher.run(1, tmp_path / "other", *flags, "--variant", "dflash")  # the default, but asked for
    assert ended.codes == [2] and "--variant dflash: " in ended.err[0] and "has dflash2" in ended.err[0]


def test_mistakes_are_one_line():
    t = model.TargetConfig.from_folder(TINY)
    c = train.Config(variant="dflash2", data=["x"])
    assert train.resolve(c, t, 1, 1).block_size == 8
    assert train.resolve(dataclasses.replace(c, target="x"), t, 1, 1).block_size == 8
    with pytest.raises(ValueError, match="--variant dflash3: give dflash or dflash2"):
        train.resolve(dataclasses.replace(c, variant="dflash3"), t, 1, 1)
    with pytest.raises(ValueError, match="--variant dflash2: the hidden size 120 is not a multiple"):
        train.resolve(c, dataclasses.replace(t, hidden=120), 1, 1)
    with pytest.raises(ValueError, match="--variant dflash2: 16 candidates of a slot"):
        train.resolve(c, dataclasses.replace(t, vocab=12), 1, 1)


def test_the_gate_knows_it_from_dflash():
    flags = ["--device", "cpu", "--layout", "colocate"]
    keys = [compile_cache.run_plan([*flags, *more])[0] for more in ((), ("--variant", "dflash2"))]
    assert keys[0] != keys[1] and "dflash2" in keys[1] and "dflash" not in keys[0]
