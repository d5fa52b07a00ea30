"""--distill: the target's own distribution reaches the loss exactly, through any split, and is paid for on
paper.

Shape letters as in model.py: T packed tokens, A anchors, B block size, H hidden, V vocabulary,
J likely tokens.
"""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from test_memory import bytes_of, estimate, question
from test_target import LENGTHS, packed_row
from test_train import relative_difference, same_tensors
from torch import Tensor

import data
import fp8
import headroom
import model
import stream
import train
from diagnose.memory import Live
from model import LIKELY, ChunkedCrossEntropy, Likely, Target, TargetConfig

H, V, J, ROWS = 12, 40, 5, 23

# ---------------------------------------------------------------------------------------------------------
# The loss


def rows_of_a_loss(share: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Likely]:
    """(h, head, labels, weights, likely): labels among the likely tokens and not, some without weight."""
    random = torch.Generator().manual_seed(3)
    h, head = torch.randn(ROWS, H, generator=random), torch.randn(V, H, generator=random)
    ids = torch.rand(ROWS, V, generator=random).argsort(-1)[:, :J]
    labels = torch.where(torch.arange(ROWS) % 2 > 0, ids[:, 2], torch.randint(V, (ROWS,), generator=random))
    assert (labels[::2, None] != ids[::2]).all(1).any()
    p = torch.randn(ROWS, J, generator=random).softmax(-1)
    weights = torch.rand(ROWS, generator=random) * (torch.arange(ROWS) % 3 > 0)
    return h.requires_grad_(), head, labels, weights, (ids.int(), p * share)


def naive(h, head, labels, weights, likely, share: float, softcap: float) -> Tensor:
    """sum of w * ((1 - W) CE(label) + W CE(the target's distribution)), everything whole."""
    logits = h @ head.T
    log_p = (softcap * torch.tanh(logits / softcap) if softcap else logits).log_softmax(-1)
    q = torch.zeros(ROWS, V)
    for row, (ids, p) in enumerate(zip(*likely, strict=True)):
        for token, mass in zip(ids.tolist(), p.tolist(), strict=True):
            q[row, token] += mass / share
    hard = F.nll_loss(log_p, labels, reduction="none")
    return (weights * ((1 - share) * hard - share * (q * log_p).sum(-1))).sum()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("elements", [V, 7 * V, 1 << 28])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_loss_and_gradient_are_those_of_the_naive_formula(monkeypatch, share, elements, softcap):
    """However many rows there are at a time."""
    monkeypatch.setattr(ChunkedCrossEntropy, "ELEMENTS", elements)
    h, head, labels, weights, likely = rows_of_a_loss(share)

    def run_rows(*args, **soft):
        return model.cross_entropy_rows(*args, **soft, softcap=softcap)

    loss, predicted = ChunkedCrossEntropy.apply(h, model.Head(head), labels, weights, run_rows, likely)
    expected = naive(h, head, labels, weights, likely, share, softcap)
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(2.0 * x, h)[0] for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(predicted, (h @ head.T).argmax(-1)) and not ours[weights == 0].any()
    assert not torch.allclose(ours, torch.autograd.grad(plain(h, head, labels, weights), h)[0], atol=1e-3)


def plain(h, head, labels, weights) -> Tensor:
    return ChunkedCrossEntropy.apply(h, model.Head(head), labels, weights, model.cross_entropy_rows)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_probabilities_of_zero_change_no_bit(dtype):
    """Nor does the way of 8-bit floats, which are moved as bytes."""
    h, head, labels, weights, (ids, _) = rows_of_a_loss(1.0)
    unit = fp8.GRADIENT_UNIT if dtype == torch.float8_e5m2 else 1.0
    rows = ((h @ head.T).detach(), labels, weights, unit, dtype)
    before = model.cross_entropy_rows(*rows)
    after = model.cross_entropy_rows(*rows, likely=(ids, torch.zeros(ROWS, J)))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(before, after, strict=True))
    moved = model.cross_entropy_rows(*rows, likely=(ids, torch.full((ROWS, J), 0.1)))[2]
    assert moved.dtype == dtype and not torch.equal(moved.float(), before[2].float())


def test_a_drafter_that_agrees_with_the_target_has_no_gradient():
    """All mass on the J tokens on both sides: also in bf16, where large terms must not be left to cancel."""
    logits = torch.full((1, V), -100.0, dtype=torch.bfloat16)
    logits[0, :J] = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    likely = torch.arange(J)[None].int(), logits[:, :J].float().softmax(-1)
    grad = model.cross_entropy_rows(logits, torch.tensor([9]), torch.ones(1), likely=likely)[2]
    assert grad.abs().max() < 1e-6


# ---------------------------------------------------------------------------------------------------------
# The target's side


@pytest.mark.parametrize("elements", [4 * 1024 * 9, 1 << 28])
@torch.no_grad()
def test_likely_tokens_are_those_of_the_whole_logits(monkeypatch, elements):
    """And the features are as they were."""
    monkeypatch.setattr(ChunkedCrossEntropy, "ELEMENTS", elements)
    target, ids = Target.load(TINY), [0, 2, 4]
    row = (*packed_row(target.c.vocab), max(LENGTHS))
    T = len(row[0])
    likely = torch.full((T, LIKELY), -1, dtype=torch.int32), torch.full((T, LIKELY), -1.0)
    features = target.features(*row, ids, None, likely)
    assert torch.equal(features, target.features(*row, ids))
    logits = target.logits(*row)
    for t in range(T):
        order = sorted(range(target.c.vocab), key=lambda v: -logits[t, v])[:LIKELY]
        assert likely[0][t].tolist() == order
        q = logits[t].exp()[order]
        torch.testing.assert_close(likely[1][t], q / q.sum(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_probabilities_in_bf16_are_not_those_of_rounded_logits():
    target = Target.load(TINY, dtype=torch.bfloat16)
    x = 3 * torch.randn(50, target.c.hidden).bfloat16()
    ids, p = torch.zeros(50, LIKELY, dtype=torch.int32), torch.zeros(50, LIKELY)
    target.likely(x, ids, p)
    exact = (target.norm(x).float() @ target.head_VH.float().T).gather(1, ids.long()).softmax(-1)
    torch.testing.assert_close(p, exact, rtol=1e-4, atol=1e-5)


def test_a_label_meets_the_distribution_of_the_position_before_it():
    T, B = 30, 4
    doc_T = torch.tensor([0] * 12 + [1] * 15 + [-1] * 3, dtype=torch.int32)
    positions_T = torch.cat([torch.arange(12), torch.arange(15), torch.zeros(3, dtype=torch.int64)])
    row = (torch.arange(T), positions_T, doc_T, doc_T >= 0)
    likely = torch.arange(T)[:, None] * 10 + torch.arange(J), torch.arange(T)[:, None] + torch.rand(J)
    anchors = torch.tensor([0, 5, 10, 12, 25, -1])
    blocks = model.make_blocks(*row, anchors, B, 4.0, 0, likely)
    for a, k in (blocks.weights_AB > 0).nonzero().tolist():
        p = int(anchors[a]) + k
        assert blocks.labels_AB[a, k] == p
        for part, whole in zip(blocks.likely, likely, strict=True):
            assert torch.equal(part[a, k], whole[p - 1])


@torch.no_grad()
def test_the_likeliest_token_is_mostly_the_recorded_one(tmp_path):
    """On the tiny target's own data, from the files to the blocks; one position off it would be rare."""
    c = train.resolve(train.Config(distill=1.0), TargetConfig.from_folder(TINY), 1, 1)
    corpus = data.load_corpus(c.eval_data, data.load_tokenizer(TINY), 512, tmp_path, 0)
    batch = data.make_batch(corpus, np.arange(8), 0, c.token_budget, c.max_batch_size, c.anchors, 0)
    job = object.__new__(train.Job)
    job.c, job.device, job.facts, job.target = c, torch.device("cpu"), {"mask_token": 4}, Target.load(TINY)
    job.drafter_config = c.drafter(job.target.c)
    job.shapes = train.message_shapes(c, job.drafter_config, torch.float32)
    buffer = job.make_features(batch, stream.Buffers(job.shapes, 1, job.device).all[0])
    right = seen = 0
    for blocks in train.to_blocks(job, batch, batch.anchors_A, job.shapes.parts(buffer)[1]):
        learned = blocks.weights_AB > 0
        right += int((blocks.likely[0][..., 0] == blocks.labels_AB)[learned].sum())
        seen += int(learned.sum())
        torch.testing.assert_close(blocks.likely[1][learned].sum(-1), torch.ones(int(learned.sum())))
    assert seen > 100 and right > 0.8 * seen


# ---------------------------------------------------------------------------------------------------------
# The stream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_buffer_do_not_meet(dtype):
    for tokens, width in ((128, 6), (384, 640), (256, 4096)):
        shapes = stream.Shapes(tokens, 8, 5, width, dtype, LIKELY)
        buffer = stream.Buffers(shapes, 1, torch.device("cpu")).all[0]
        features, (ids, p) = shapes.parts(buffer)
        assert features.shape == (tokens, width) and features.is_contiguous() and features.dtype == dtype
        assert ids.shape == p.shape == (tokens, LIKELY) and (ids.dtype, p.dtype) == (
            torch.int32,
            torch.float32,
        )
        wanted = torch.randn(tokens, width).to(dtype), torch.randint(1 << 31, ids.shape), torch.rand(p.shape)
        for part, value in zip((features, ids, p), wanted, strict=True):
            part.copy_(value)
        features, (ids, p) = shapes.parts(buffer.clone())
        assert all(torch.equal(a, b) for a, b in zip((features, ids.long(), p), wanted, strict=True))
        assert 0 <= buffer.nbytes - features.nbytes - ids.nbytes - p.nbytes < width * dtype.itemsize


def test_a_side_without_it_is_found_by_the_header():
    one, other = (stream.Shapes(96, 8, 5, 24, torch.float32, n) for n in (LIKELY, 0))
    assert one.check(one.header(stream.TRAIN, 3, 7), stream.TRAIN, 3, 1) == 7
    for a, b in ((one, other), (other, one)):
        with pytest.raises(stream.StreamError, match="rank 1: likely is"):
            a.check(b.header(stream.TRAIN, 3, 7), stream.TRAIN, 3, 1)
    buffer = torch.zeros(96, 24)
    assert other.rows == 96 and other.parts(buffer) == (buffer, None)


# ---------------------------------------------------------------------------------------------------------
# Whole jobs

RUNS = {
    "colocate": (1, ("--distill", 0.5)),
    "1+1": (2, ("--distill", 0.5, "--anchor-chunk", 8)),
    "2+1 of 2": (4, ("--distill", 0.5, "--drafters", 2, "--target-tp", 2)),
    "plain": (1, ("--distill", 0)),
    "default": (1, ()),
}


@pytest.fixture(scope="module")
def runs(launcher, small, tmp_path_factory):
    folder, done = tmp_path_factory.mktemp("distill"), {}

    def run(name: str):
        if name not in done:
            ranks, flags = RUNS[name]
            flags = ("--batches-per-step", 2, "--steps", 8, "--eval-every", 8, "--save-every", 4, *flags)
            done[name] = launcher.run(ranks, folder / name.replace(" ", "-"), *small, *flags).good()
        return done[name]

    return run


@pytest.mark.parametrize("name", ["1+1", "2+1 of 2"])
def test_any_split_gives_the_same_losses(runs, name):
    assert relative_difference(runs("colocate").records(), runs(name).records()) < 1e-5


def test_the_share_changes_what_is_learned_and_not_how_it_is_judged(runs):
    ours, plain = runs("colocate").records(), runs("plain").records()
    assert ours[0]["eval_loss"] == plain[0]["eval_loss"] and ours[0]["step"] == 0
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(ours[1:], plain[1:], strict=True)) > 1e-3


def test_no_share_is_the_plain_run_bit_for_bit(runs):
    plain, default = runs("plain"), runs("default")
    assert relative_difference(plain.records(), default.records()) == 0
    assert same_tensors(plain.folder / "step-000008", default.folder / "step-000008")


def test_a_resume_goes_on_with_it(launcher, runs, tmp_path):
    whole = runs("1+1")
    shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-000008")
    again = launcher.run(2, None, "--resume", tmp_path / "run").good()
    assert "distill 0.5" in again.text
    assert same_tensors(whole.folder / "step-000008", tmp_path / "run" / "step-000008")


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--distill 1.5", "--distill 1.5: must be from 0 to 1"),
        ("--distill -0.1", "--distill -0.1: must be from 0 to 1"),
        ("--distill nan", "--distill nan: must be from 0 to 1"),
        ("--distill 0.5 --target-backend transformers", "--distill with --target-backend transformers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        train.resolve(train.parse_flags(flags.split()), TargetConfig.from_folder(TINY), 1, 1)


# ---------------------------------------------------------------------------------------------------------
# On paper


@pytest.mark.parametrize("role", headroom.ROLES)
def test_the_estimate_has_the_buffers_and_the_rest_of_the_target(role):
    q = question("", "--token-budget", 2048)
    c = dataclasses.replace(q.config, distill=0.5)
    before, after = estimate(q, role).parts, estimate(q, role, distill=0.5).parts
    shapes = train.message_shapes(c, c.drafter(q.target), torch.bfloat16)
    depth = 1 if role == "colocate" else c.depth
    assert after["features"] == bytes_of(stream.Buffers(shapes, depth, torch.device("cpu")).all)
    assert after["features"] - before["features"] >= depth * 2048 * LIKELY * 8
    if role != "drafter":
        with torch.device("meta"):
            assert after["target weights"] == bytes_of(Target(q.target).bfloat16().parameters())
        assert after["target weights"] > before["target weights"]


@pytest.mark.parametrize("sizes", [(576, 49152, 16384), (4096, 151936, 16384), (4096, 151936, 384)])
@torch.no_grad()
def test_the_formula_agrees_with_the_trace_of_likely(sizes):
    hidden, vocab, tokens = sizes
    c = dataclasses.replace(TargetConfig.from_folder(TINY), hidden=hidden, vocab=vocab)
    with torch.device("meta"):
        target = Target(c, 1).bfloat16()
        x, ids = torch.empty(tokens, hidden, dtype=torch.bfloat16), torch.empty(tokens, LIKELY)
    with Live() as live:
        target.likely(x, ids.int(), ids.clone())
    traced = live.most - 2 * ids.nbytes + x.nbytes + 8 * c.head_dim * tokens
    assert c.likely_bytes(tokens) == pytest.approx(traced, rel=0.1)


def test_all_layers_and_the_head_are_counted_as_the_targets_work():
    t = TargetConfig.from_folder(TINY)
    few, all_of_it = (train.resolve(train.Config(distill=w), t, 4, 1) for w in (0.0, 0.5))
    d, T = few.drafter(t), few.token_budget
    assert few.target_flops(t, d) == t.prefill_flops(T, max(d.ids) + 1)
    assert all_of_it.target_flops(t, d) == t.prefill_flops(T, t.layers) + 2 * T * t.hidden * t.vocab
