"""pytest tests/test_drafter.py: who attends to whom, the drafter and its loss, against slow oracles.

T packed context tokens, A anchors, B block size, S = A*B slots, K tapped layers, H hidden, V vocabulary.
"""

import dataclasses
import itertools
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import model
from model import TILE, Blocks, ChunkedCrossEntropy, Drafter, DrafterConfig, DrafterLayer

GAMMA = 4.0
H, V, MASK_TOKEN = 32, 61, 60


@dataclasses.dataclass
class Row:
    """One packed row and its anchors, as data.make_batch hands them over."""

    tokens_T: Tensor
    positions_T: Tensor
    doc_T: Tensor
    mask_T: Tensor
    anchors_A: Tensor

    def blocks(self, block_size: int) -> Blocks:
        row = self.tokens_T, self.positions_T, self.doc_T, self.mask_T, self.anchors_A
        return model.make_blocks(*row, block_size, GAMMA, MASK_TOKEN)


def make_row(lengths: tuple[int, ...], T: int, anchors: int, unused: int, seed: int = 0) -> Row:
    """Documents of these lengths and padding; anchors at both ends of a document too, some slots unused."""
    random = torch.Generator().manual_seed(seed)
    tail = T - sum(lengths)
    doc_T = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((tail,), -1)])
    positions_T = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(tail, dtype=torch.int64)])
    mask_T = (torch.rand(T, generator=random) < 0.8) & (doc_T >= 0)
    starts = [0, *itertools.accumulate(lengths)]
    edges = {starts[0], starts[1] - 2, starts[1]}  # no context; almost no room; the next document at once
    for p in edges:
        mask_T[p : p + 2] = True
    valid = [p for p in range(T - 1) if mask_T[p] and mask_T[p + 1] and doc_T[p] == doc_T[p + 1]]
    rest = [p for p in valid if p not in edges]
    drawn = [rest[i] for i in torch.randperm(len(rest), generator=random)[: anchors - len(edges)].tolist()]
    anchors_A = torch.tensor(sorted([*edges, *drawn]) + [-1] * unused)
    tokens_T = torch.randint(V - 1, (T,), generator=random)
    return Row(tokens_T, positions_T, doc_T.int(), mask_T, anchors_A)


SMALL = dict(lengths=(23, 3, 40, 17), T=96, anchors=9, unused=2)
CONFIG = DrafterConfig(
    hidden=H,
    heads=4,
    kv_heads=2,
    head_dim=12,
    intermediate=40,
    vocab=V,
    eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    layers=2,
    block_size=8,
    ids=(0, 1),
    target_layers=4,
    mask_token=MASK_TOKEN,
    max_position=64,
    windows=(0, 0),
)


def make_drafter(tied: bool = False, **changes) -> Drafter:
    random = torch.Generator().manual_seed(3)
    embedding, head = (torch.randn(V, H, generator=random) for _ in range(2))
    drafter = Drafter(dataclasses.replace(CONFIG, **changes), embedding, embedding if tied else head, seed=5)
    with torch.no_grad():  # norms away from 1, so that leaving one out shows
        for p in drafter.parameters():
            if p.dim() == 1:
                p.mul_(1 + 0.3 * torch.randn(p.shape, generator=random))
    return drafter


def make_features(T: int, taps: int = 2) -> Tensor:
    return torch.randn(T, taps * H, generator=torch.Generator().manual_seed(11))


def block_logits(drafter: Drafter, row: Row, features: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Logits of every slot, [A, B, V]."""
    kv = drafter.context_keys_values(features, row.positions_T)
    h = drafter.hidden(kv, blocks or row.blocks(drafter.c.block_size))
    return (h @ drafter.head.T).unflatten(0, (-1, drafter.c.block_size))


# ---------------------------------------------------------------------------------------------------------
# Who attends to whom


def mask_oracle(row: Row, block_size: int, window: int) -> Tensor:
    """The rule of the paper position by position, bool [S, T+S]."""
    T, anchors = len(row.tokens_T), row.anchors_A.tolist()
    doc, position = row.doc_T.tolist(), row.positions_T.tolist()
    allowed = torch.zeros(len(anchors) * block_size, T + len(anchors) * block_size, dtype=torch.bool)
    for i, a in enumerate(anchors):
        for slot in range(block_size):
            q = i * block_size + slot
            for other in range(block_size):
                allowed[q, T + i * block_size + other] = not window or other <= slot
            if a < 0:
                continue
            for t in range(T):
                near = not window or position[t] >= position[a] + slot - (window - 1)
                allowed[q, t] = doc[t] == doc[a] and position[t] < position[a] and near
    return allowed


@pytest.mark.parametrize("window", [0, 1, 5, 20])
@pytest.mark.parametrize("block_size", [8, 10, 16])
def test_dense_mask_equals_the_loops(block_size, window):
    row = make_row(**SMALL)
    blocks = row.blocks(block_size)
    mask = model.dense_mask(blocks.starts_A, blocks.ends_A, SMALL["T"], block_size, window)
    assert torch.equal(mask, mask_oracle(row, block_size, window))


LARGE = dict(lengths=(4 * TILE, 7, 90, 200), T=7 * TILE, anchors=90, unused=3)


def tiles(mask) -> tuple[Tensor, Tensor]:
    """Which tiles of a BlockMask are partial and which are full, bool [rows, columns]."""

    def listed(counts: Tensor, indices: Tensor) -> Tensor:
        found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
        for r, count in enumerate(counts[0, 0].tolist()):
            found[r, indices[0, 0, r, :count].long()] = True
        return found

    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    return listed(mask.kv_num_blocks, mask.kv_indices), full


@pytest.mark.parametrize("window", [0, 20, 200])
@pytest.mark.parametrize("block_size", [8, 10, 16])
def test_block_mask_equals_the_dense_mask(block_size, window):
    """Skipped tiles hold nothing, full tiles everything; without a window none is listed needlessly."""
    row = make_row(**LARGE)
    blocks = row.blocks(block_size)
    ranges = (blocks.starts_A, blocks.ends_A, LARGE["T"], block_size, window)
    dense, mask = model.dense_mask(*ranges), model.block_mask(*ranges)
    slots, keys = dense.shape
    assert mask.seq_lengths == (slots, keys)
    partial, full = tiles(mask)
    assert not (partial & full).any()
    spread = [t.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:slots, :keys] for t in (partial, full)]
    q, kv = torch.arange(slots)[:, None], torch.arange(keys)
    assert torch.equal(spread[1] | spread[0] & mask.mask_mod(None, None, q, kv), dense)
    reference = create_block_mask(model.sees(*ranges), None, None, slots, keys, device="cpu")
    if not window:
        assert full.any() and all(
            torch.equal(a, b) for a, b in zip(tiles(mask), tiles(reference), strict=True)
        )
        assert torch.equal(mask.to_dense(), reference.to_dense())


def test_block_mask_at_the_edges_of_tiles():
    """Ranges that begin and end on, before and after tile bounds; empty ones; a last row cut short."""
    edges = [0, *(TILE * i + d for i in (1, 2, 3) for d in (-1, 0, 1))]
    random = torch.Generator().manual_seed(8)
    full_tiles = 0
    for _ in range(30):
        pairs = torch.tensor(edges)[torch.randint(len(edges), (3, 2), generator=random)].sort(1).values
        pairs = pairs.repeat_interleave(TILE // 16, 0)[:20]  # two tile rows of 8 blocks each and one of 4
        ranges = (pairs[:, 0], pairs[:, 1], 4 * TILE, 16)
        reference = create_block_mask(model.sees(*ranges), None, None, 320, 4 * TILE + 320, device="cpu")
        ours, theirs = tiles(model.block_mask(*ranges)), tiles(reference)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), pairs
        full_tiles += ours[1].sum().item()
        of_backward = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
        listed = model.block_mask(*ranges)
        again = BlockMask.from_kv_blocks(
            listed.kv_num_blocks, listed.kv_indices, listed.full_kv_num_blocks, listed.full_kv_indices
        )
        assert all(torch.equal(getattr(listed, name), getattr(again, name)) for name in of_backward), pairs
    assert full_tiles > 10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on purpose: the oracle
@pytest.mark.parametrize("window", [0, 20])
def test_flex_attention_equals_dense_attention(window):
    row, block_size = make_row(**LARGE), 10
    blocks = row.blocks(block_size)
    ranges = (blocks.starts_A, blocks.ends_A, LARGE["T"], block_size, window)
    dense, mask = model.dense_mask(*ranges), model.block_mask(*ranges)
    random = torch.Generator().manual_seed(1)
    slots, keys = dense.shape
    q = torch.randn(1, 4, slots, 16, generator=random)
    k, v = (torch.randn(1, 2, keys, 16, generator=random) for _ in range(2))
    slow = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask, enable_gqa=True), slow)


def test_block_mask_forms_no_dense_mask():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, Tensor):
                    self.elements = max(self.elements, t.numel())
            return out

    T, anchors = 64 * TILE, 512
    ends_A = torch.arange(anchors) * (T // anchors)
    for block_size in (10, 16):
        with Largest() as largest:
            model.block_mask(torch.zeros_like(ends_A), ends_A, T, block_size)
        assert largest.elements < anchors * block_size * T / 64


# ---------------------------------------------------------------------------------------------------------
# Case 22: nobody sees the future or another block


@pytest.mark.parametrize("windows", [(0, 0), (0, 6)])
def test_nothing_at_or_after_an_anchor_reaches_its_block(windows):
    row, drafter = make_row(**SMALL), make_drafter(windows=windows)
    features = make_features(SMALL["T"])
    before = block_logits(drafter, row, features).detach()
    for i, a in enumerate(row.anchors_A[row.anchors_A >= 0].tolist()):
        changed, noise = dataclasses.replace(row, tokens_T=row.tokens_T.clone()), features.clone()
        changed.tokens_T[a + 1 :] = (row.tokens_T[a + 1 :] + 1) % (V - 1)
        noise[a:] += 10
        after = block_logits(drafter, changed, noise)[i].detach()
        torch.testing.assert_close(after, before[i], rtol=0, atol=1e-5)
        # The anchor's own token is slot 0 and every token's features before it are seen.
        changed.tokens_T[a] = (row.tokens_T[a] + 1) % (V - 1)
        assert (block_logits(drafter, changed, features)[i] - before[i]).abs().amax(1).min() > 1e-3
        if row.positions_T[a] > 0:
            noise = features.clone()
            noise[a - 1] += 10
            assert (block_logits(drafter, row, noise)[i] - before[i]).abs().max() > 1e-3


def test_other_documents_and_padding_do_not_reach_a_block():
    row, drafter = make_row(**SMALL), make_drafter()
    features = make_features(SMALL["T"])
    before = block_logits(drafter, row, features).detach()
    for doc in (-1, *range(len(SMALL["lengths"]))):
        noise = features + 10 * (row.doc_T == doc)[:, None]
        moved = (block_logits(drafter, row, noise) - before).abs().amax((1, 2)) > 1e-5
        sees = (row.anchors_A >= 0) & (row.doc_T[row.anchors_A] == doc) & (row.positions_T[row.anchors_A] > 0)
        assert torch.equal(moved, sees)


def test_changing_another_block_leaves_a_block():
    row, drafter = make_row(**SMALL), make_drafter()
    features = make_features(SMALL["T"])
    blocks = row.blocks(8)
    before = block_logits(drafter, row, features, blocks).detach()
    for i in range(len(row.anchors_A)):
        ids_S = blocks.ids_S.clone()
        ids_S[i * 8 : i * 8 + 8] = torch.randint(V, (8,), generator=torch.Generator().manual_seed(i))
        after = block_logits(drafter, row, features, dataclasses.replace(blocks, ids_S=ids_S)).detach()
        moved = (after - before).abs().amax((1, 2)) > 1e-5
        assert torch.equal(moved, torch.arange(len(moved)) == i)


# ---------------------------------------------------------------------------------------------------------
# Blocks


def test_blocks_equal_the_loops():
    row, B = make_row(**SMALL), 10
    blocks = row.blocks(B)
    T = SMALL["T"]
    for i, a in enumerate(row.anchors_A.tolist()):
        assert blocks.real_A[i] == (a >= 0)
        if a < 0:
            assert not blocks.weights_AB[i].any() and blocks.starts_A[i] == blocks.ends_A[i]
            continue
        own = slice(i * B, i * B + B)
        assert blocks.ids_S[own].tolist() == [row.tokens_T[a].item()] + [MASK_TOKEN] * (B - 1)
        assert blocks.positions_S[own].tolist() == [row.positions_T[a].item() + k for k in range(B)]
        assert blocks.ends_A[i] == a and row.positions_T[blocks.starts_A[i]] == 0
        for k in range(B):
            p = a + k
            inside = p < T and row.doc_T[p] == row.doc_T[a]
            weight = math.exp(-(k - 1) / GAMMA) if k and inside and row.mask_T[p] else 0.0
            assert blocks.weights_AB[i, k].item() == pytest.approx(weight)
            if inside:
                assert blocks.labels_AB[i, k] == row.tokens_T[p]


def test_block_that_runs_over_the_end_of_the_row():
    row = make_row(**(SMALL | dict(lengths=(23, 73))))
    row.mask_T[-3:], row.anchors_A[0] = True, 94
    blocks = row.blocks(8)
    assert (blocks.weights_AB[0] > 0).tolist() == [False, True] + [False] * 6
    assert blocks.labels_AB[0, 1] == row.tokens_T[95]


def test_gamma_table():
    table = {2: 1, 4: 2, 8: 4, 9: 4.5, 10: 5, 13: 6, 16: 7, 19: 8, 32: 7 + 16 / 3}
    assert {size: model.default_gamma(size) for size in table} == pytest.approx(table)
    weights = model.slot_weights(16, 7.0)
    assert weights[:2].tolist() == [0, 1] and weights[8].item() == pytest.approx(math.exp(-1))


# ---------------------------------------------------------------------------------------------------------
# Case 25: the drafter one anchor at a time, from the paper


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """RoPE of x [tokens, heads, D], one token and one pair of numbers at a time as a complex product."""
    half = x.shape[-1] // 2
    rows = []
    for t, p in enumerate(positions):
        angle = p * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        z = torch.complex(x[t, :, :half], x[t, :, half:]) * torch.polar(torch.ones(half), angle.float())
        rows.append(torch.cat([z.real, z.imag], -1))
    return torch.stack(rows)


def oracle_block(drafter: Drafter, row: Row, features: Tensor, a: int) -> Tensor:
    """Logits [B, V] of the block that hangs on the anchor at packed index a."""
    c, w, B = drafter.c, dict(drafter.named_parameters()), drafter.c.block_size
    at = row.positions_T[a].item()
    ctx = rms(features[a - at : a] @ w["fc.weight"].T, w["hidden_norm.weight"], c.eps)
    seen_at, slots_at = list(range(at)), [at + k for k in range(B)]
    x = drafter.embedding[[row.tokens_T[a].item()] + [MASK_TOKEN] * (B - 1)]
    for i, window in enumerate(c.windows):
        own = {
            name.removeprefix(f"layers.{i}."): p for name, p in w.items() if name.startswith(f"layers.{i}.")
        }
        h = rms(x, own["input_layernorm.weight"], c.eps)
        both = torch.cat([ctx, h])
        q, k, v = (
            (side @ own[f"{name}_proj.weight"].T).unflatten(-1, (-1, c.head_dim))
            for name, side in (("q", h), ("k", both), ("v", both))
        )
        q = turn(rms(q, own["q_norm.weight"], c.eps), slots_at, c.rope_theta)
        k = turn(rms(k, own["k_norm.weight"], c.eps), seen_at + slots_at, c.rope_theta)
        rows = []
        for slot in range(B):
            seen = list(range(at + B))
            if window:
                seen = [j for j in seen if at + slot - (window - 1) <= j < at or at <= j <= at + slot]
            heads = []
            for n in range(c.heads):
                g = n // (c.heads // c.kv_heads)
                scores = (k[seen, g] @ q[slot, n]) / math.sqrt(c.head_dim)
                heads.append(scores.softmax(0) @ v[seen, g])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ own["o_proj.weight"].T
        h = rms(x, own["post_attention_layernorm.weight"], c.eps)
        h = F.silu(h @ own["gate_proj.weight"].T) * (h @ own["up_proj.weight"].T)
        x = x + h @ own["down_proj.weight"].T
    return rms(x, w["norm.weight"], c.eps) @ drafter.head.T


def plain_loss(logits_AB: Tensor, blocks: Blocks) -> Tensor:
    """Weighted sum of textbook cross-entropies; logits [A, B, V] of the real anchors."""
    each = F.cross_entropy(
        logits_AB.flatten(0, 1), blocks.labels_AB[blocks.real_A].flatten(), reduction="none"
    )
    return (each * blocks.weights_AB[blocks.real_A].flatten()).sum()


def same_gradients(drafter, loss, expected):
    """Each parameter has a gradient, and both losses the same."""
    parameters = list(drafter.parameters())
    for ours, theirs, (name, _) in zip(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters),
        drafter.named_parameters(),
        strict=True,
    ):
        assert theirs.any(), name
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("block_size, windows, tied", [(8, (0, 0), False), (10, (0, 6), True)])
def test_drafter_equals_one_anchor_at_a_time(block_size, windows, tied):
    row = make_row(**SMALL)
    drafter = make_drafter(tied, block_size=block_size, windows=windows)
    features, blocks = make_features(SMALL["T"]), row.blocks(block_size)
    fast = block_logits(drafter, row, features)[blocks.real_A]
    anchors = row.anchors_A[blocks.real_A].tolist()
    slow = torch.stack([oracle_block(drafter, row, features, a) for a in anchors])
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)

    loss, predicted = drafter(drafter.context_keys_values(features, row.positions_T), blocks)
    expected = plain_loss(slow, blocks)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(predicted[blocks.real_A], slow.argmax(-1)[:, 1:])
    same_gradients(drafter, loss, expected)


def test_rope_angles_stay_fp32_in_bf16():
    drafter = make_drafter().to(torch.bfloat16)
    assert drafter.freq.dtype == torch.float32 and drafter.fc.weight.dtype == torch.bfloat16
    cos, sin = model.rope_angles(torch.tensor([3001]), drafter.freq)
    exact = 3001 * 10000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0, :6].double(), exact.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[0, 6:].double(), exact.sin(), rtol=0, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------
# Cases 23 and 24: where training starts, and what must not train


@pytest.mark.parametrize("scale", [0.02, 1.0, 5.0])
@pytest.mark.parametrize("tied", [True, False])
def test_first_loss_is_near_ln_v(tied, scale):
    """Whatever the size of the head's rows: unit logits cost half a nat above ln V."""
    vocab, row = 1500, make_row(**(SMALL | dict(lengths=(40, 56))))
    random = torch.Generator().manual_seed(0)
    embedding, head = (torch.randn(vocab, H, generator=random) * scale for _ in range(2))
    drafter = Drafter(dataclasses.replace(CONFIG, vocab=vocab), embedding, embedding if tied else head)
    blocks = row.blocks(8)
    loss, _ = drafter(drafter.context_keys_values(make_features(SMALL["T"]), row.positions_T), blocks)
    assert abs(loss.item() / blocks.weights_AB.sum().item() - math.log(vocab)) < 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_head_and_embedding_are_the_targets_and_frozen(tied):
    random, row = torch.Generator().manual_seed(3), make_row(**SMALL)
    embedding, other = (torch.randn(V, H, generator=random, requires_grad=True) for _ in range(2))
    head = embedding if tied else other
    drafter = Drafter(CONFIG, embedding, head)
    assert drafter.embedding.data_ptr() == embedding.data_ptr() and drafter.head.data_ptr() == head.data_ptr()
    embedding, head = embedding.detach().clone(), head.detach().clone()
    names = set(drafter.state_dict()) | {name for name, _ in drafter.named_parameters()}
    assert not any("embed" in name or "head" in name for name in names)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    kv = drafter.context_keys_values(make_features(SMALL["T"]), row.positions_T)
    drafter(kv, row.blocks(8))[0].backward()
    optimizer.step()
    assert torch.equal(drafter.embedding, embedding) and torch.equal(drafter.head, head)
    assert drafter.embedding.grad is None and drafter.head.grad is None
    assert not any(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def test_same_seed_same_weights():
    one, two = (Drafter(CONFIG, torch.ones(V, H), torch.ones(V, H), seed=5).state_dict() for _ in range(2))
    other = Drafter(CONFIG, torch.ones(V, H), torch.ones(V, H), seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def gradients(drafter: Drafter, row: Row, features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    drafter.zero_grad()
    kv = drafter.context_keys_values(features, row.positions_T)
    loss, _ = drafter(kv, row.blocks(drafter.c.block_size))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in drafter.named_parameters()}


@pytest.mark.parametrize("case", ["nothing supervised", "no anchor"])
def test_nothing_to_learn_is_zero_loss_and_zero_gradient(case):
    row, drafter = make_row(**SMALL), make_drafter()
    if case == "no anchor":
        row.anchors_A[:] = -1
    else:
        row.mask_T[:] = False
    features = make_features(SMALL["T"])
    loss, grads = gradients(drafter, row, features)
    assert loss == 0
    assert all(not g.any() and g.isfinite().all() for g in grads.values())
    assert block_logits(drafter, row, features).isfinite().all()


def test_unused_slots_change_nothing():
    row, drafter = make_row(**SMALL), make_drafter()
    features = make_features(SMALL["T"])
    shorter = dataclasses.replace(row, anchors_A=row.anchors_A[row.anchors_A >= 0])
    assert len(shorter.anchors_A) < len(row.anchors_A)
    (loss, grads), (expected, without) = (gradients(drafter, r, features) for r in (row, shorter))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, without)
    assert block_logits(drafter, row, features).isfinite().all()


@pytest.mark.parametrize("changes", [{}, model.DFLASH2 | dict(selector_top_k=4)])
def test_one_graph_is_compiled_for_all_layers_chunks_and_evaluation(changes):
    """The first layer, whose input is frozen, and the others; held context and real; evaluation."""
    drafter, row = make_drafter(layers=3, windows=(0, 0, 0), **changes), make_row(**SMALL)
    layer, context, norm = (CompileCounter() for _ in range(3))
    drafter.run_layer = torch.compile(DrafterLayer.forward, backend=layer)
    drafter.run_context = torch.compile(Drafter.project_context, backend=context)
    drafter.run_norm = torch.compile(model.RMSNorm.forward, backend=norm)
    features, blocks = make_features(SMALL["T"]), row.blocks(8)
    kv = drafter.context_keys_values(features, row.positions_T)
    held = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in kv]
    losses = [drafter(chunk, blocks)[0] for chunk in (held, kv)]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        evaluated, _ = drafter(drafter.context_keys_values(features, row.positions_T), blocks)
    assert not evaluated.requires_grad
    assert changes or losses[0] == losses[1] == evaluated  # with a selector the held-out loss is the head's
    assert [c.frame_count for c in (layer, context, norm)] == [1, 1, 1]


def test_chunks_of_anchors_add_up_to_the_whole():
    row, drafter = make_row(**SMALL), make_drafter()
    features = make_features(SMALL["T"])
    loss, grads = gradients(drafter, row, features)
    parts = [
        gradients(drafter, dataclasses.replace(row, anchors_A=part), features)
        for part in row.anchors_A.split(4)
    ]
    assert len(parts) == 3
    torch.testing.assert_close(sum(part_loss for part_loss, _ in parts), loss)
    for name, g in grads.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), g, rtol=1e-4, atol=1e-5)


def test_bf16_features_train_fp32_weights():
    """Computed in the dtype of the features and the head; weights and gradients stay fp32, near fp32's."""
    row, drafter = make_row(**SMALL), make_drafter()
    features = make_features(SMALL["T"]).bfloat16()
    rounded = drafter.embedding.bfloat16(), drafter.head.bfloat16()
    drafter.embedding, drafter.head = (t.float() for t in rounded)
    expected, exact = gradients(drafter, row, features.float())
    drafter.embedding, drafter.head = rounded
    kv = drafter.context_keys_values(features, row.positions_T)
    assert all(t.dtype == torch.bfloat16 for pair in kv for t in pair)
    loss, grads = gradients(drafter, row, features)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for name, g in grads.items():
        assert g.dtype == torch.float32
        assert (g - exact[name]).norm() < 0.05 * exact[name].norm(), name


# ---------------------------------------------------------------------------------------------------------
# The loss


@pytest.mark.parametrize("elements", [1, V * 7, V * 10, 1 << 28])
def test_chunked_cross_entropy_equals_whole(monkeypatch, elements):
    """Value, prediction and gradient for any chunk, the last one shorter, under an outer factor."""
    monkeypatch.setattr(ChunkedCrossEntropy, "ELEMENTS", elements)
    random = torch.Generator().manual_seed(2)
    h, head = torch.randn(23, H, generator=random, requires_grad=True), torch.randn(V, H, generator=random)
    labels = torch.randint(V, (23,), generator=random)
    weights = torch.rand(23, generator=random) * (torch.arange(23) % 3 > 0)
    rows = []

    def run_rows(logits, *rest):
        rows.append(len(logits))
        return model.cross_entropy_rows(logits, *rest)

    loss, predicted = ChunkedCrossEntropy.apply(h, model.Head(head), labels, weights, run_rows)
    assert sum(rows) == 23 and max(rows) * V <= max(elements, V)
    logits = h @ head.T
    whole = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    torch.testing.assert_close(loss, whole)
    assert torch.equal(predicted, logits.argmax(-1))
    ours, theirs = (torch.autograd.grad(3.0 * value, h)[0] for value in (loss, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not ours[weights == 0].any()


def test_cross_entropy_of_large_logits_is_finite():
    logits = torch.tensor([[300.0, -300.0, 0.0]] * 2, dtype=torch.bfloat16)
    labels, weights = torch.tensor([0, 1]), torch.tensor([1.0, 0.5])
    loss, predicted, grad = model.cross_entropy_rows(logits, labels, weights)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(300.0)
    assert predicted.tolist() == [0, 0] and grad.dtype == torch.bfloat16
    assert grad.tolist() == [[0, 0, 0], [0.5, -0.5, 0]]


def test_evaluation_needs_no_gradient():
    row, drafter = make_row(**SMALL), make_drafter()
    features, blocks = make_features(SMALL["T"]), row.blocks(8)
    expected, predicted = drafter(drafter.context_keys_values(features, row.positions_T), blocks)
    with torch.no_grad():
        loss, same = drafter(drafter.context_keys_values(features, row.positions_T), blocks)
    assert not loss.requires_grad and torch.equal(loss, expected) and torch.equal(same, predicted)


def test_matching_prefix_equals_the_loops():
    random = torch.Generator().manual_seed(4)
    predicted = torch.randint(2, (200, 7), generator=random)
    labels = torch.zeros_like(predicted)
    weights = (torch.rand(200, 7, generator=random) < 0.8) * model.slot_weights(8, GAMMA)[1:]
    expected = []
    for i in range(200):
        length = 0
        while length < 7 and predicted[i, length] == labels[i, length] and weights[i, length] > 0:
            length += 1
        expected.append(length)
    assert model.matching_prefix(predicted, labels, weights).tolist() == expected
    assert set(expected) > {0, 1, 2, 3}


# ---------------------------------------------------------------------------------------------------------
# Compiled


def compiled_equals_eager(layers: int, backend: str) -> int:
    """Loss and gradients of a drafter with a compiled layer, twice; the number of graphs it took."""
    row, drafter = make_row(**SMALL), make_drafter(layers=layers, windows=(0,) * layers)
    features = make_features(SMALL["T"])
    expected, without = gradients(drafter, row, features)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    drafter.run_layer = torch.compile(DrafterLayer.forward, fullgraph=True, dynamic=False, backend=backend)
    graphs = []
    for _ in range(2):
        loss, grads = gradients(drafter, row, features)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(grads, without, rtol=1e-4, atol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[0] == graphs[1]
    return graphs[0]


def test_all_layers_share_one_compiled_code():
    assert compiled_equals_eager(layers=1, backend="aot_eager") == 1
    assert compiled_equals_eager(layers=4, backend="aot_eager") == 1


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_inductor_layer_equals_eager():
    """The one real C++ compile of these tests: some 15 s with a cold cache, for a single layer."""
    assert compiled_equals_eager(layers=1, backend="inductor") == 1


# ---------------------------------------------------------------------------------------------------------
# GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("block_size, windows", [(8, (0, 0)), (10, (0, 0)), (16, (0, 200))])
def test_compiled_flex_equals_dense_fp32(block_size, windows):
    """The GPU route (block mask, flex) against the CPU route (dense mask), loss and every gradient."""
    shape = dict(heads=8, head_dim=32, block_size=block_size, windows=windows)
    row, features = make_row(**LARGE), make_features(LARGE["T"])
    expected, without = gradients(make_drafter(**shape), row, features)
    random = torch.Generator().manual_seed(3)
    embedding, head = (torch.randn(V, H, generator=random).cuda() for _ in range(2))
    drafter = Drafter(dataclasses.replace(CONFIG, **shape), embedding, head).cuda()
    drafter.load_state_dict(make_drafter(**shape).state_dict())
    drafter.run_layer = torch.compile(DrafterLayer.forward, fullgraph=True, dynamic=False)
    on_gpu = Row(*(getattr(row, f.name).cuda() for f in dataclasses.fields(Row)))
    loss, grads = gradients(drafter, on_gpu, features.cuda())
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-3)
    for name, g in grads.items():
        error = (g.cpu() - without[name]).norm() / without[name].norm()
        assert error < 1e-3, (name, error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_block_mask_is_built_without_waiting_for_the_gpu():
    row = make_row(**LARGE)
    on_gpu = Row(*(getattr(row, f.name).cuda() for f in dataclasses.fields(Row)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        blocks = on_gpu.blocks(16)
        model.block_mask(blocks.starts_A, blocks.ends_A, LARGE["T"], 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
