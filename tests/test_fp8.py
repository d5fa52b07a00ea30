"""Products in 8-bit floats against fp32: casts, products, loss, a whole step; on a GPU the fused cast."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8
import model
from model import ChunkedCrossEntropy, Drafter, DrafterConfig

R, M, N = 48, 64, 32


def near(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def parts(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype, error", [(fp8.E4M3, 0.04), (fp8.E5M2, 0.08)])
def test_a_cast_is_the_tensor_and_its_transpose(dtype, error):
    x = parts(R, M) * 1e-4
    low, turned, scale = fp8.cast(x, dtype)
    assert low.dtype == turned.dtype == dtype and low.shape == (R, M) and turned.shape == (M, R)
    assert torch.equal(low.float(), turned.float().t())
    assert near(low.float() * scale, x) < error
    assert low.float().abs().max() == torch.finfo(dtype).max  # all of the range is used


def test_a_cast_of_zeros_and_of_what_is_not_finite():
    low, _, scale = fp8.cast(torch.zeros(R, M), fp8.E4M3)
    assert not low.float().any() and scale > 0
    for bad in (float("nan"), float("inf")):
        low, _, scale = fp8.cast(parts(R, M).index_fill_(0, torch.tensor([3]), bad), fp8.E4M3)
        assert not torch.isfinite(low.float() * scale).all()  # the step's guard must see it


@pytest.mark.parametrize("layers", [1, 3])
def test_linear_and_its_gradients(layers):
    """Each within a few percent of fp32, several layers side by side in one product."""
    modules = [nn.Linear(M, N, bias=False) for _ in range(layers)]
    x = parts(R, M).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    out, exact = fp8.linear(x, *modules), torch.cat([m(wide) for m in modules], 1)
    assert out.dtype == torch.bfloat16 and near(out, exact) < 0.06
    weights = [m.weight for m in modules]
    grad = parts(R, N * layers, seed=1)
    expected = torch.autograd.grad(exact, [wide, *weights], grad)
    for ours, theirs in zip(torch.autograd.grad(out, [x, *weights], grad.bfloat16()), expected, strict=True):
        assert near(ours, theirs) < 0.1
    assert all(w.dtype == torch.float32 for w in weights)


def test_the_loss_with_an_8_bit_head():
    """Value within 1%, the same predictions but for near-ties, gradient within a few percent."""
    h, head = parts(R, M).bfloat16().requires_grad_(), parts(512, M, seed=1) * 0.3
    labels, weights = torch.arange(R) * 7 % 512, torch.rand(R) * (torch.arange(R) % 3 > 0)
    args = (labels, weights, model.cross_entropy_rows)
    exact, right = ChunkedCrossEntropy.apply(h.float(), model.Head(head), *args)
    loss, predicted = ChunkedCrossEntropy.apply(h, fp8.Head(head.bfloat16()), *args)
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    assert (predicted == right).float().mean() > 0.8
    (ours,), (theirs,) = torch.autograd.grad(loss, h), torch.autograd.grad(exact, h)
    assert near(ours, theirs) < 0.1
    assert not ours[weights == 0].any()


CONFIG = DrafterConfig(
    hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, eps=1e-6, rope_theta=1e4,
    rope_scaling=None, layers=2, block_size=8, ids=(0, 1, 2), target_layers=4, mask_token=5,
    max_position=4096, windows=(0, 0),
)  # fmt: skip


def step(in_fp8: bool, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one chunk of 16 blocks over 128 tokens."""
    table = (parts(CONFIG.vocab, CONFIG.hidden) * 0.05).to(dtype)
    drafter = Drafter(CONFIG, table, table, in_fp8=in_fp8)
    at = torch.arange(128)
    anchors = torch.arange(16) * 7
    row = (at * 31 % 512, at, torch.zeros_like(at), at >= 0, anchors)
    blocks = model.make_blocks(*row, block_size=8, gamma=4.0, mask_token=5)
    kv = drafter.context_keys_values(parts(128, 3 * CONFIG.hidden, seed=2).to(dtype), at)
    loss, _ = drafter(kv, blocks)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in drafter.named_parameters()}


def test_a_whole_step_is_near_the_exact_one():
    exact, gradients = step(False, torch.float32)
    loss, ours = step(True, torch.bfloat16)
    assert loss == pytest.approx(exact, rel=0.01)
    for name, g in ours.items():
        assert g.dtype == torch.float32 and near(g, gradients[name]) < 0.35, name
        assert F.cosine_similarity(g.flatten(), gradients[name].flatten(), dim=0) > 0.95, name


def test_evaluation_leaves_no_graph():
    with torch.no_grad():
        drafter = Drafter(CONFIG, *[parts(512, 64).bfloat16()] * 2, in_fp8=True)
        assert drafter.head is None and drafter.fp8_head.shape == (512, 64)
        assert not fp8.linear(parts(R, M).bfloat16(), nn.Linear(M, N, bias=False)).requires_grad


def test_a_cpu_is_told_so():
    assert fp8.why_not(torch.device("cpu")) == "needs a GPU"


def test_sizes_that_cannot_be_are_named():
    import train

    t = model.TargetConfig.from_folder(train.TINY)
    c = train.Config(fp8=True, data=["x"])
    assert train.resolve(c, t, 1, 1).fp8
    with pytest.raises(ValueError, match=r"--fp8: the vocabulary is 1001, .* multiples of 16"):
        train.resolve(c, dataclasses.replace(t, vocab=1001), 1, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(64, 64), (1000, 48), (16, 4112)])
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_the_fused_cast_equals_the_plain_one(shape, dtype):
    x = parts(*shape).bfloat16()
    scale = x.abs().amax().float() / torch.finfo(dtype).max * 0.9  # some of it saturates
    for ours, theirs in zip(
        fp8.cast_both(x.cuda(), scale.cuda(), dtype), fp8.cast_both(x, scale, dtype), strict=True
    ):
        assert torch.equal(ours.cpu().float(), theirs.float())
