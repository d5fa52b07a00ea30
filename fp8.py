"""Matrix products in 8-bit floats for the drafter: what `train.py --fp8` computes with.

Values are e4m3, gradients e5m2 (more range, less precision: arXiv 2209.05433), one scale a tensor, found anew
each time; products sum in fp32 and return bf16. Master weights, norms, attention and the optimizer stay as
they are. The hardware multiplies rows by rows, so that what the backward pass needs transposed is cast to
both layouts at once.

Shape letters: R rows, M in, N out, V vocabulary, H hidden.
"""

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch have no triton
    triton = None

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST_CAPABILITY = (8, 9)
MULTIPLE = 16  # of every dimension of such a product
GRADIENT_UNIT = 2.0**-15  # of d loss / d logits, which is known to lie within [-1, 1]
TILE = 64


def why_not(device: torch.device) -> str:
    """Why this device cannot do it, or nothing."""
    if device.type != "cuda":
        return "needs a GPU"
    have = torch.cuda.get_device_capability(device)
    if have < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"needs compute capability 8.9 (Ada, Hopper, Blackwell), {name} has {have[0]}.{have[1]}"
    return ""


def cast(x_RM: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x / scale in 8 bits [R, M], the same transposed [M, R], scale fp32 scalar): its largest is the largest
    of `dtype`.
    """
    most = torch.finfo(dtype).max
    # Row by row first: Inductor then finds it in the kernel that writes x, where it compiles that kernel.
    scale = x_RM.abs().amax(-1).amax().float().clamp(min=1e-12) / most
    return *torch.ops.blockdraft.cast_both(x_RM, scale, dtype), scale


@torch.library.custom_op("blockdraft::cast_both", mutates_args=())
def cast_both(x_RM: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in `dtype`, saturated, as [R, M] and as [M, R]; on a GPU in one pass over x."""
    rows, columns = x_RM.shape
    x_RM = x_RM.contiguous()
    if x_RM.device.type != "cuda":
        most = torch.finfo(dtype).max
        low = (x_RM.float() / scale).clamp(-most, most).to(dtype)
        return low, low.t().contiguous()
    low, turned = _empty_both(x_RM, scale, dtype)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    _cast_both[grid](x_RM, scale, low, turned, rows, columns, torch.finfo(dtype).max, TILE)
    return low, turned


@cast_both.register_fake
def _empty_both(x_RM: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x_RM.shape
    return x_RM.new_empty(rows, columns, dtype=dtype), x_RM.new_empty(columns, rows, dtype=dtype)


if triton:

    @triton.jit
    def _cast_both(x, scale, low, turned, rows, columns, most, TILE: tl.constexpr):
        """One TILE x TILE square: read once, written in both layouts."""
        row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
        value = tl.clamp(value, -most, most, propagate_nan=tl.PropagateNan.ALL)
        cast = value.to(low.dtype.element_ty)
        tl.store(low + at, cast, mask=inside)
        at_turned = column[:, None] * rows + row[None, :]
        inside_turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(turned + at_turned, tl.trans(cast), mask=inside_turned)


def multiply(a_RM: Tensor, b_NM: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.T of two casts, [R, N] in `dtype`. Both are read along M, as the hardware needs them."""
    return torch._scaled_mm(a_RM, b_NM.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)


class _Product(torch.autograd.Function):
    """x [R, M] and weight [N, M] to x @ weight.T, all three products of a step in 8 bits."""

    @staticmethod
    def forward(ctx, x_RM, weight_NM):
        low_RM, turned_MR, x_scale = cast(x_RM, E4M3)
        weight_low_NM, weight_MN, weight_scale = cast(weight_NM, E4M3)
        ctx.save_for_backward(turned_MR, x_scale, weight_MN, weight_scale)
        ctx.dtype = x_RM.dtype
        return multiply(low_RM, weight_low_NM, x_scale, weight_scale, x_RM.dtype)

    @staticmethod
    def backward(ctx, grad_RN):
        turned_MR, x_scale, weight_MN, weight_scale = ctx.saved_tensors
        low_RN, turned_NR, scale = cast(grad_RN, E5M2)
        grad_RM = multiply(low_RN, weight_MN, scale, weight_scale, ctx.dtype)
        grad_NM = multiply(turned_NR, turned_MR, scale, x_scale, ctx.dtype)
        return grad_RM, grad_NM.float()


def linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """One product with the weights of `layers`, their outputs side by side, forward and backward in 8 bits;
    x [R, M] in bf16, weights in fp32.
    """
    weights = [layer.weight for layer in layers]
    return _Product.apply(x, weights[0] if len(weights) == 1 else torch.cat(weights))


class Head:
    """The frozen head [V, H] in 8 bits, for the loss: logits, and their gradient's way back.

    The scale of the gradient is known beforehand, so that the loss can write it in 8 bits at once.
    """

    unit, grad_dtype = GRADIENT_UNIT, E5M2

    def __init__(self, head_VH: Tensor):
        self.shape = head_VH.shape
        self.low_VH, self.turned_HV, self.scale = cast(head_VH, E4M3)
        self.grad_scale = torch.full((), GRADIENT_UNIT, device=head_VH.device)

    def logits(self, h_RH: Tensor) -> Tensor:
        low_RH, _, scale = cast(h_RH, E4M3)
        return multiply(low_RH, self.low_VH, scale, self.scale, h_RH.dtype)

    def back(self, grad_RV: Tensor, out_RH: Tensor) -> None:
        """d loss / d h of rows whose d loss / d logits is `grad_RV` times GRADIENT_UNIT."""
        out_RH.copy_(multiply(grad_RV, self.turned_HV, self.grad_scale, self.scale, out_RH.dtype))

    def rows(self, ids_RM: Tensor, dtype: torch.dtype) -> Tensor:
        """The head's rows of these tokens, [R, M, H]; gathered as bytes, which every device can."""
        low_RMH = self.low_VH.view(torch.uint8)[ids_RM].view(self.low_VH.dtype)
        return (low_RMH.float() * self.scale).to(dtype)
