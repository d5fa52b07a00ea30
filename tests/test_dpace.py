"""D-PACE: a block's slots weighted by what they add to the length it is accepted to."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from test_checkpoint import make_drafter

import model
import train
from model import ChunkedCrossEntropy, DrafterConfig

A, B, T = 9, 8, 128
ANCHORS = [
    2,
    3,
    17,
    30,
    52,
    58,
    77,
    90,
    -1,
]  # of two documents; the block at 52 runs into an unsupervised gap


def loops(loss_AK: list[list[float]], supervised_AK: list[list[bool]]) -> list[list[float]]:
    """w_j = sum over m >= j of the product of (1 + exp(-loss_i)) / 2 over i <= m, up to the first gap."""
    weights = []
    for losses, supervised in zip(loss_AK, supervised_AK, strict=True):
        length = supervised.index(False) if False in supervised else len(supervised)
        row = [0.0] * len(losses)
        for j in range(length):
            for m in range(j, length):
                product = 1.0
                for i in range(m + 1):
                    product *= 0.5 + 0.5 * math.exp(-losses[i])
                row[j] += product
        weights.append(row)
    return weights


def test_weights_equal_the_loops():
    random = torch.Generator().manual_seed(0)
    loss_AK = torch.rand(50, 7, generator=random) * 6
    supervised_AK = torch.rand(50, 7, generator=random) < 0.85
    supervised_AK[0], supervised_AK[1] = True, False
    expected = torch.tensor(loops(loss_AK.tolist(), supervised_AK.tolist()))
    torch.testing.assert_close(model.dpace_weights(loss_AK, supervised_AK), expected)


def blocks_and_features(drafter: model.Drafter) -> tuple[model.Blocks, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    doc_T = torch.tensor([0] * 60 + [1] * 50 + [-1] * (T - 110))
    positions_T = torch.cat([torch.arange(60), torch.arange(50), torch.zeros(T - 110, dtype=torch.int64)])
    mask_T = (doc_T >= 0) & (torch.arange(T) != 55)
    tokens_T = torch.randint(20, 1000, (T,), generator=random)
    blocks = model.make_blocks(tokens_T, positions_T, doc_T, mask_T, torch.tensor(ANCHORS), B, 4.0, 4)
    return blocks, torch.randn(T, len(drafter.c.ids) * drafter.c.hidden, generator=random), positions_T


def gradients(drafter: model.Drafter, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(drafter.parameters())))


@pytest.mark.parametrize("blocks_of_a_part", [0.5, 2, 4.9, 100])
def test_loss_and_gradient_are_those_of_the_formula(monkeypatch, blocks_of_a_part):
    """Whatever part of the logits is formed at a time: the weights are constants of the gradient."""
    drafter = make_drafter()
    drafter.dpace = True
    monkeypatch.setattr(ChunkedCrossEntropy, "ELEMENTS", int(blocks_of_a_part * (B - 1) * drafter.c.vocab))
    blocks, features, positions_T = blocks_and_features(drafter)
    loss, _ = drafter(drafter.context_keys_values(features, positions_T), blocks)

    hidden_SH = drafter.hidden(drafter.context_keys_values(features, positions_T), blocks)
    logits = hidden_SH.unflatten(0, (A, B))[:, 1:] @ drafter.head.T
    naive_AK = F.cross_entropy(logits.flatten(0, 1), blocks.labels_AB[:, 1:].flatten(), reduction="none")
    naive_AK = naive_AK.unflatten(0, (A, B - 1))
    supervised = (blocks.weights_AB[:, 1:] > 0).tolist()
    assert [True] * 2 + [False] + [True] * 4 in supervised and [False] * 7 in supervised
    naive = (torch.tensor(loops(naive_AK.tolist(), supervised)) * naive_AK).sum()
    torch.testing.assert_close(loss, naive, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(drafter, loss), gradients(drafter, naive), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def test_evaluation_is_weighted_as_ever():
    drafter = make_drafter()
    other = copy.deepcopy(drafter)
    other.dpace = True
    blocks, features, positions_T = blocks_and_features(drafter)
    with torch.no_grad():
        plain, same = (d(d.context_keys_values(features, positions_T), blocks) for d in (drafter, other))
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    trained = other(other.context_keys_values(features, positions_T), blocks)
    assert torch.equal(trained[1], plain[1]) and not torch.isclose(trained[0], plain[0])


@pytest.mark.parametrize("total", [7, 70, 77, 105])
def test_the_loss_takes_whole_blocks_at_a_time_and_the_estimate_knows(monkeypatch, total):
    monkeypatch.setattr(ChunkedCrossEntropy, "ELEMENTS", 25 * 11)
    seen = []

    def rows(logits, *rest):
        seen.append(len(logits))
        return model.cross_entropy_rows(logits, *rest, block=7)

    h, head = torch.randn(total, 4, requires_grad=True), model.Head(torch.randn(11, 4))
    ChunkedCrossEntropy.apply(h, head, torch.zeros(total).long(), torch.ones(total), rows, 7)
    assert all(n % 7 == 0 and n <= 25 for n in seen) and sum(seen) == total
    d = DrafterConfig.of(model.TargetConfig.from_folder(train.TINY), 1, 8, 5, 0)
    d = dataclasses.replace(d, vocab=11)
    _, counted = d.chunk_moments(total // 7, 128, whole_blocks=True)["loss"]
    assert counted == 2 * 2 * max(seen) * 11 + 2 * 2 * total * d.hidden


def test_any_split_and_any_chunk_gives_the_same_losses(launcher, small, tmp_path):
    """Two ranks and chunks of anchors equal one rank; and the weights are not those of --gamma."""
    flags = ("--batches-per-step", 4, "--steps", 4, "--eval-every", 4)
    dpace = ("--loss-weights", "dpace")
    one = launcher.run(1, tmp_path / "one", *small, *flags, *dpace).good().records()
    chunked = ("--layout", "colocate", "--anchor-chunk", 8)
    two = launcher.run(2, tmp_path / "two", *small, *flags, *dpace, *chunked).good().records()
    plain = launcher.run(1, tmp_path / "plain", *small, *flags).good().records()
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-5), (a["step"], name)
    assert one[0]["eval_loss"] == plain[0]["eval_loss"]  # the same drafter, judged alike
    assert abs(one[1]["loss"] / plain[1]["loss"] - 1) > 0.01


def test_another_name_is_refused():
    c = train.parse_flags(["--loss-weights", "dpacer"])
    with pytest.raises(ValueError, match="--loss-weights dpacer: give decay or dpace"):
        train.resolve(c, model.TargetConfig.from_folder(train.TINY), 1, 1)
