"""The two models of the job: the frozen target and the DFlash drafter (arXiv 2602.06036).

Shape letters, as suffixes: T packed context tokens (the token budget), A anchors of a chunk, B block size,
S = A*B block slots, K tapped layers, H hidden, N query heads, G key/value heads, D head size, V vocabulary.
A packed row holds several documents one after another; `cu_seqlens` are their bounds in it.
Decoding: P rows (prompts at a time), Q new tokens of a row, C capacity of a row's cache.
DFlash 2: M candidates of a slot, Z rank of the selector, U taps of the convolution, W groups of its channels.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from tqdm import tqdm

import fp8
from data import read_json, short

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
TILE = 128  # rows and columns of one flex_attention mask block
MOST_LAYERS = 1024  # of any config, so that a wrong number cannot fill the memory
WIDEST = 1 << 31  # positions
FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of weights as safetensors names them
DFLASH2 = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)  # as published
SELECTOR_WEIGHT = 1.0  # of the selector's loss beside the head's
VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


# ---------------------------------------------------------------------------------------------------------
# Parts both models use


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


def linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """One product with the weights of `layers`, their outputs side by side, in the dtype of x: the drafter
    keeps fp32 master weights and computes in bf16.
    """
    weights = [layer.weight.to(x.dtype) for layer in layers]
    return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))


def rope_frequencies(head_dim: int, theta: float, scaling: dict | None) -> Tensor:
    """Inverse RoPE frequencies, fp32 [D/2], after default, linear or llama3 scaling.

    Always fp32: in bf16 the angles are off by radians at a few thousand positions.
    """
    freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "linear":
        return freq / scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        # 1: a short wave, unchanged; 0: a long one, stretched
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return freq * keep + freq / scaling["factor"] * (1 - keep)
    return freq


def rope_angles(positions: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [...] to (cos, sin), fp32 [..., D], the halves repeated."""
    angle = positions.float()[..., None] * freq
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [tokens, heads, D] with (cos, sin) [tokens, D]."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (wide * cos[:, None] + turned * sin[:, None]).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------
# Target


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """What blockdraft needs to know of a Hugging Face decoder folder. `windows[i]`: 0 is full attention."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    rope_scaling: dict | None
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    max_position: int

    def part(self, parts: int) -> "TargetConfig":
        """What each of so many ranks holds of the layers: whole heads, a share of the MLP."""
        for size, what in ((self.kv_heads, "key/value heads"), (self.intermediate, "columns of the MLP")):
            if size % parts:
                raise ValueError(f"{parts} ranks cannot share the target's {size} {what} evenly")
        share = {name: getattr(self, name) // parts for name in ("heads", "kv_heads", "intermediate")}
        return dataclasses.replace(self, **share)

    def prefill_flops(self, tokens: int, layers: int) -> float:
        """Useful FLOPs of the matrix products of `layers` layers over so many tokens (attention itself
        left out).
        """
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return 2.0 * tokens * layers * self.hidden * (heads + 3 * self.intermediate)

    def parameters(self, layers: int, head: bool = False) -> int:
        """Of the embedding and the first `layers` layers; `head` adds the final norm and an untied head."""
        q, kv, h, i = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.hidden,
            self.intermediate,
        )
        layer = h * (2 * q + 2 * kv) + 3 * h * i + 2 * h + 2 * self.head_dim * self.qk_norm
        layer += self.qkv_bias * (q + 2 * kv) + self.out_bias * h + self.mlp_bias * (2 * i + h)
        ends = self.vocab * h + head * (h + (not self.tied) * self.vocab * h)
        return ends + layers * layer

    def features_bytes(self, tokens: int, size: int = 2) -> int:
        """Peak of `Target.features` besides weights and features, with elements of `size` bytes: one layer at
        the largest of its moments.

        On a GPU (2 bytes) it is compiled: pointwise work leaves nothing between products. On a CPU it counts
        what Python still names: the layer's input, q, k, the fused q-k-v that v is a view of.
        """
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        fused, rotated = q + 2 * kv, q + kv
        normed = q + kv if self.qk_norm else 0
        moments = {
            "rope": h + 2 * fused,
            "attention": h + fused + q,
            "gate and up": 3 * h + 2 * self.intermediate,
            "mlp": 2 * h + 3 * self.intermediate,
        }
        if size > 2:
            moments = {
                "norm": 2 * h + 2,
                "rope of q": h + fused + normed + 4 * q,
                "attention": h + kv + 2 * q + fused + rotated,
                "mlp": 2 * h + fused + rotated + q + 4 * self.intermediate,
            }
        return tokens * (size * max(moments.values()) + 8 * self.head_dim)

    @staticmethod
    def from_folder(folder: str | Path) -> "TargetConfig":
        """Read `config.json`; ValueError names what is missing or not supported, and what is."""
        path = Path(folder) / "config.json"
        c = read_json(path, "fetch the model folder again")
        if c is None:
            raise ValueError(f"{path}: cannot be read (no such file): --target takes a model folder")
        listed = c.get("architectures")
        architecture = listed[0] if isinstance(listed, list) and listed else "none"
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise ValueError(
                f"{path}: architecture {short(str(architecture), 60)} is not supported: use one of "
                f"{', '.join(FAMILIES)}; train.py takes others with --target-backend transformers"
            )
        try:
            return _parse_target(c, FAMILIES[architecture])
        except ValueError as error:
            raise ValueError(f"{path}: {error}: fetch the model folder again, or use another model") from None


def number(c: dict, name: str, default: int | None = None, most: int = 1 << 24, least: int = 1) -> int:
    """A whole number of a config, in bounds: sizes are checked before anything is allocated by them.

    A field that is absent or null has its default, where there is one.
    """
    value = c.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"the field {name!r} is missing")
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {short(repr(value), 40)}, not a number from {least} to {most}")
    return value


def real(c: dict, name: str, default: float | None, least: float, most: float) -> float:
    """A number of a config, in bounds."""
    value = default if c.get(name) is None else c[name]
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError(f"{name} is {short(repr(value), 40)}, not a number from {least:g} to {most:g}")
    return float(value)


def switch(c: dict, name: str) -> bool:
    """A yes or no of a config, no where it is absent."""
    value = False if c.get(name) is None else c[name]
    if type(value) is not bool:
        raise ValueError(f"{name} is {short(repr(value), 40)}, not true or false")
    return value


def layer_kinds(c: dict, layers: int, first: int) -> list[str]:
    """Attention of each layer: `layer_types`, else sliding from layer `first` on."""
    kinds = c.get("layer_types")
    if kinds is None:
        return ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else "no"
        raise ValueError(f"layer_types names {count} layers of {layers} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(
                f"layer type {short(repr(kind), 40)} is not supported: use a model of full or sliding "
                "attention"
            )
    return kinds


def _parse_target(c: dict, family: str) -> TargetConfig:
    if c.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"hidden_act {short(str(c['hidden_act']), 40)} is not supported: use a model with silu"
        )
    theta, scaling = parse_rope(c)
    hidden, heads = number(c, "hidden_size"), number(c, "num_attention_heads")
    layers = number(c, "num_hidden_layers", most=MOST_LAYERS)
    kv_heads = number(c, "num_key_value_heads", heads)
    head_dim = number(c, "head_dim", hidden // heads)
    check_heads(heads, kv_heads, head_dim)
    windowed = family == "mistral" or (family != "llama" and switch(c, "use_sliding_window"))
    window = number(c, "sliding_window", 0, WIDEST, 0) if windowed else 0
    first = number(c, "max_window_layers", 28, least=0) if family in ("qwen2", "qwen3") else 0
    kinds = layer_kinds(c, layers, first)
    bias = switch(c, "attention_bias") and family != "mistral"
    return TargetConfig(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=number(c, "intermediate_size"),
        vocab=number(c, "vocab_size"),
        eps=real(c, "rms_norm_eps", 1e-6, 1e-20, 1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=switch(c, "tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=switch(c, "mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        max_position=number(c, "max_position_embeddings", 2048, WIDEST),
    )


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    if head_dim % 2 or heads * head_dim > 1 << 24:
        raise ValueError(
            f"head_dim is {head_dim} for {heads} heads, not an even number that such models have"
        )


ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def parse_rope(c: dict) -> tuple[float, dict | None]:
    """(theta, scaling or None) from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if c.get("rope_parameters") is None else "rope_parameters"
    rope = {} if c.get(name) is None else c[name]
    if not isinstance(rope, dict):
        raise ValueError(f"{name} is {short(repr(rope), 40)}, not an object")
    theta = real(c if rope.get("rope_theta") is None else rope, "rope_theta", 10000.0, 1.0, 1e12)
    rope = {k: v for k, v in rope.items() if k != "rope_theta"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = [x.get("partial_rotary_factor") for x in (c, rope)]  # older configs have it at top level
    if any(share not in (None, 1) for share in partial):
        raise ValueError(f"partial_rotary_factor {short(repr(partial), 40)} is not supported, only 1")
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise ValueError(
            f"RoPE scaling {short(repr(kind), 40)} is not supported: use a model with default, linear or "
            "llama3"
        )
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"RoPE of its own for {short(nested[0], 40)} is not supported: use a model with one for all "
            "layers"
        )
    for name in ROPE_FIELDS[kind]:
        real(rope, name, None, 1e-3, 1e9)
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ValueError("high_freq_factor of RoPE is not above low_freq_factor")
    return theta, rope if kind != "default" else None


def tap_layers(layers: int, taps: int) -> list[int]:
    """0-based ids of the tapped layers, whose outputs are the features; the last layer is never tapped."""
    if taps < 1 or layers < 1:
        raise ValueError(f"cannot tap {taps} of {layers} layers: both must be at least 1")
    if taps == 1:
        return [layers // 2] if layers > 1 else [0]
    if layers - 3 >= taps:
        return [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]
    taps = min(taps, max(1, layers - 1))
    return [0] if taps == 1 else [round(i * (layers - 2) / (taps - 1)) for i in range(taps)]


def packed_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: int
) -> Tensor:
    """Causal attention inside each document of a packed row.

    q [T, N, D], k and v [T, G, D], cu_seqlens int32 [documents+1] on q's device, `longest` at least the
    longest document, window 0 for full attention. Rows after the last document are zeros.
    """
    if q.is_cuda:
        span = (window - 1 if window else -1, 0)
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=span, **VARLEN_GQA)
        # The kernel leaves the other rows unwritten.
        real = torch.arange(len(q), device=q.device) < cu_seqlens[-1]
        return torch.where(real[:, None, None], out, 0)
    out = torch.zeros_like(q)
    bounds = cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        if end == start:
            continue
        mask = None
        if window:
            row = torch.arange(end - start)
            mask = (row[:, None] >= row) & (row[:, None] - row < window)
        one = (t[None, start:end].transpose(1, 2) for t in (q, k, v))
        done = F.scaled_dot_product_attention(*one, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        out = out.index_copy(0, torch.arange(start, end), done[0].transpose(0, 1))
    return out


KeysValues = tuple[Tensor, Tensor]


def new_cache(
    layers: int,
    rows: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[KeysValues]:
    """Each layer's zeroed cache: keys and values [P rows, C capacity, G, D], row j of C for position j."""
    shape = (rows, capacity, kv_heads, head_dim)
    return [
        (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
        for _ in range(layers)
    ]


def cache_inputs(
    first_P: Tensor,
    freq: Tensor,
    new: int,
    seen: int,
    windows: tuple[int, ...],
    block: bool,
    copies: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, dict[int, Tensor]]:
    """What all layers share that extend P cached rows by `new` tokens each, from positions first_P on.

    Returns positions [P, Q], angles (cos, sin) [P*Q, D] and, for each window, who attends to whom: 0 or -inf,
    [P, 1, copies*new, seen], for `copies` query heads a key head. `block` false: causal, in the last `window`
    positions if there is a window (a target). True: a drafter's block, by the rule of `sees`. What a cache
    holds after the newest token, left there by tokens that were not accepted, is never seen.
    """
    at_PQ = first_P[:, None] + torch.arange(new, device=first_P.device)
    cos, sin = rope_angles(at_PQ.flatten(), freq)
    key, query, first = torch.arange(seen, device=first_P.device), at_PQ[..., None], first_P[:, None, None]
    biases = {}
    for window in set(windows):
        sees = (key < first + new).expand(-1, new, -1) if block and window <= 0 else key <= query
        if window:
            near = key > query - abs(window)
            sees = sees & (near | (key >= first) if block else near)
        bias = torch.zeros((), device=key.device, dtype=dtype).where(sees, float("-inf"))
        biases[window] = bias.repeat(1, copies, 1)[:, None]
    return at_PQ, cos, sin, biases


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at_PQ: Tensor, bias: Tensor
) -> Tensor:
    """Write k, v [P*Q, G, D] at positions at_PQ of the cache, then attend to it: q [P*Q, N, D] to [P*Q, N*D].

    The query heads of a group become queries of their one key head, so that nothing is copied.
    """
    rows, new = at_PQ.shape
    row = torch.arange(rows, device=at_PQ.device)[:, None]
    keys[row, at_PQ] = k.unflatten(0, (rows, new))
    values[row, at_PQ] = v.unflatten(0, (rows, new))
    seen, groups = bias.shape[-1], keys.shape[2]
    q = q.view(rows, new, groups, -1, q.shape[-1]).permute(0, 2, 3, 1, 4)
    k, v = keys[:, :seen].transpose(1, 2), values[:, :seen].transpose(1, 2)
    out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=bias)
    return out.unflatten(2, (-1, new)).permute(0, 3, 1, 2, 4).reshape(rows * new, -1)


class TargetLayer(nn.Module):
    """Pre-norm decoder layer; q, k, v and gate, up are fused, since frozen weights allow larger products."""

    def __init__(self, c: TargetConfig, window: int):
        super().__init__()
        self.c, self.window = c, window
        self.qkv_proj = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=c.out_bias)
        self.gate_up_proj = nn.Linear(c.hidden, 2 * c.intermediate, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=c.mlp_bias)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] to rotated q [T, N, D], rotated k and plain v [T, G, D]."""
        c = self.c
        fused = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, c.head_dim))
        q, k, v = fused.split([c.heads, c.kv_heads, c.kv_heads], dim=-2)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def gated(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.gated(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        return self.mlp(x + self.attention(x, cos, sin, cu_seqlens, longest))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """What `forward` adds to x first; `gated` is what it adds next. Parts of a layer meet after each."""
        q, k, v = self.qkv(x, cos, sin)
        out = packed_causal_attention(q, k, v.contiguous(), cu_seqlens, longest, self.window)
        return self.o_proj(out.flatten(1))

    def extend(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at_PQ: Tensor, bias: Tensor
    ) -> Tensor:
        """`forward` for Q new tokens of each of P rows [P*Q, H], whose earlier tokens are in the cache."""
        out = attend_cached(*self.qkv(x, cos, sin), keys, values, at_PQ, bias)
        return self.mlp(x + self.o_proj(out))


class Target(nn.Module):
    """The frozen LLM. `layers` fewer than the config's: only that many are built (training stops early).

    `parts` above 1: one of so many ranks, each of which has some heads and some columns of the MLP of every
    layer, and everything else whole. A layer then adds up over `group` what its parts give, twice. These
    are slices and plain all-reduces, not torch.distributed.tensor.parallel: its ColwiseParallel would cut the
    fused q, k, v across their borders, and plain ones need no DTensor in compiled code.
    """

    def __init__(self, c: TargetConfig, layers: int | None = None, head: bool = True, parts: int = 1):
        super().__init__()
        self.c, self.parts = c, parts
        self.group: dist.ProcessGroup | None = None  # None: nothing is added up, to rehearse a part alone
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        mine = c.part(parts)
        self.layers = nn.ModuleList(TargetLayer(mine, c.windows[i]) for i in range(layers or c.layers))
        self.norm = RMSNorm(c.hidden, c.eps) if head else None
        self.lm_head = nn.Linear(c.hidden, c.vocab, bias=False) if head and not c.tied else None
        # A plain attribute, not a buffer: `.to(bfloat16)` must never reach it.
        self.freq = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        self.run_layer: Callable = TargetLayer.forward  # train.py puts compiled handles here
        self.run_attention: Callable = TargetLayer.attention  # of a part: the all-reduces are between
        self.run_gated: Callable = TargetLayer.gated

    @staticmethod
    def load(
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: int | None = None,
        head: bool = True,
        progress: bool = False,
        part: int = 0,
        parts: int = 1,
    ) -> "Target":
        """Stream the weights of a Hugging Face folder shard by shard to the device, frozen, in `dtype`.

        `layers` and `head` leave out what training never runs; of a part only its share is read. ValueError
        for a missing, extra or misshapen weight.
        """
        c = TargetConfig.from_folder(folder)
        with torch.device("meta"):
            target = Target(c, layers, head, parts)
        shapes = _expected_shapes(c)
        check_weights(folder, shapes)
        target = target.to(dtype).to_empty(device=device).requires_grad_(False).eval()
        places = {name: place for name, place in _weight_places(target)}
        shares = {name: share_of(shapes[name], place, part) for name, place in places.items()}
        for name, weight in read_weights(folder, shares, device, progress):
            places[name].copy_(weight)
        for name, bias in target.named_parameters():
            if part and name.endswith(("o_proj.bias", "down_proj.bias")):
                bias.zero_()  # the sum over the parts has it once
        return target

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens)

    @property
    def head_VH(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor, longest: int
    ) -> Iterator[Tensor]:
        """The output [T, H] of each built layer in turn, for packed documents."""
        self.freq = self.freq.to(tokens_T.device)  # once: a copy from the host would wait for the device
        cos, sin = rope_angles(positions_T, self.freq)
        x = self.embed(tokens_T)
        run = self.run_layer if self.parts == 1 else self.run_part
        for layer in self.layers:
            x = run(layer, x, cos, sin, cu_seqlens, longest)
            yield x

    def run_part(self, layer: TargetLayer, x: Tensor, *inputs) -> Tensor:
        """A layer of which this rank has a part; what comes out is whole."""
        x = self.add_up(self.run_attention(layer, x, *inputs), x)
        return self.add_up(self.run_gated(layer, x), x)

    def add_up(self, mine: Tensor, x: Tensor) -> Tensor:
        """x and what every part gives, in the memory of this one's."""
        if self.group is not None:
            dist.all_reduce(mine, group=self.group)
        return mine.add_(x)

    def features(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        ids: list[int],
        out_TKH: Tensor | None = None,
    ) -> Tensor:
        """Outputs of the tapped layers side by side, [T, K*H]; stops after the last of them.

        cu_seqlens int32 [documents+1] must not run past the last real token; rows after it mean nothing.
        longest: an upper bound of the documents' lengths. Writes into `out_TKH` where given.
        """
        if out_TKH is None:
            out_TKH = torch.empty(
                len(tokens_T), len(ids) * self.c.hidden, device=tokens_T.device, dtype=self.dtype
            )
        hidden = self.c.hidden
        for i, x in enumerate(self.hidden_states(tokens_T, positions_T, cu_seqlens, longest)):
            if i in ids:
                at = ids.index(i)
                out_TKH[:, at * hidden : (at + 1) * hidden] = x
            if i == max(ids):
                break
        return out_TKH

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def logits(self, tokens_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Next-token logits [T, V] of packed documents."""
        *_, last = self.hidden_states(tokens_T, positions_T, cu_seqlens, longest)
        return F.linear(self.norm(last), self.head_VH)

    def extend(
        self,
        tokens_PQ: Tensor,
        first_P: Tensor,
        caches: list[KeysValues],
        seen: int,
        ids: Sequence[int] = (),
        run_inputs: Callable = cache_inputs,
        run_layer: Callable = TargetLayer.extend,
    ) -> tuple[Tensor, Tensor | None]:
        """Q new tokens of P rows, at positions first_P and after, over the caches' first `seen` rows.

        Returns the last layer's output [P*Q, H] and, where layers are tapped, the features [P*Q, K*H].
        """
        c, freq = self.c, self.freq.to(first_P.device)
        shared = (tokens_PQ.shape[1], seen, c.windows, False, c.heads // c.kv_heads, self.dtype)
        at_PQ, cos, sin, bias = run_inputs(first_P, freq, *shared)
        x, tapped = self.embed(tokens_PQ.flatten()), {}
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x = run_layer(layer, x, cos, sin, *cache, at_PQ, bias[c.windows[i]])
            if i in ids:
                tapped[i] = x
        return x, torch.cat([tapped[i] for i in ids], -1) if ids else None


def _expected_shapes(c: TargetConfig) -> dict[str, list[int]]:
    """Every weight that the folder of such a model holds, with its shape."""
    with torch.device("meta"):
        return {name: list(place.shape) for name, place in _weight_places(Target(c))}


def _weight_places(target: Target) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's weight names with the (parts of) our parameters they fill."""
    c = target.c.part(target.parts)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    fused = {"qkv_proj": ("self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv))}
    fused["gate_up_proj"] = ("mlp", ("gate_proj", "up_proj"), (c.intermediate, c.intermediate))
    groups = {"o_proj": "self_attn.", "q_norm": "self_attn.", "k_norm": "self_attn.", "down_proj": "mlp."}
    for name, p in target.named_parameters():
        if not name.startswith("layers."):
            yield (name if name.startswith("lm_head") else f"model.{name}"), p.data
            continue
        _, i, part, kind = name.split(".")
        if part in fused:
            group, names, sizes = fused[part]
            for piece, place in zip(names, p.data.split(sizes), strict=True):
                yield f"model.layers.{i}.{group}.{piece}.{kind}", place
        else:
            yield f"model.layers.{i}.{groups.get(part, '')}{part}.{kind}", p.data


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder, one or many; paths in the index cannot leave the folder."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    named = read_json(index, "fetch the model folder again").get("weight_map")
    if not isinstance(named, dict):
        raise ValueError(f"{index}: not a weight index (no weight_map): fetch the model folder again")
    names = list(named.values())
    for name in names:
        plain = isinstance(name, str) and name.isprintable() and len(name) < 256 and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index}: {short(repr(name), 60)} is not a file of this folder: do not trust this model "
                "folder"
            )
    return [folder / name for name in sorted(set(names))]


@contextlib.contextmanager
def open_weights(path: Path, device: torch.device | str = "cpu") -> Iterator[safe_open]:
    """A safetensors file; ValueError in one line for whatever is wrong with it."""
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise ValueError(f"{path}: not a file: fetch it again")
    try:
        with safe_open(path, framework="pt", device=str(device)) as shard:
            yield shard
    except FileNotFoundError:
        raise ValueError(f"{path}: not found: fetch the model folder again") from None
    except (OSError, MemoryError) as error:
        raise ValueError(f"{path}: cannot be read ({short(str(error), 100)}): check the file") from None
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({short(str(error), 200)}): fetch it again"
        ) from None


def check_weights(folder: str | Path, shapes: dict[str, list[int]]) -> None:
    """ValueError unless the folder holds exactly these weights, once each, as floats.

    Reads headers only: what config.json promises is compared before anything is allocated by it.
    """
    seen: set[str] = set()
    for path in weight_files(folder):
        with open_weights(path) as shard:
            for name in shard.keys():
                if name in seen:
                    raise ValueError(
                        f"{path}: {short(name, 60)} is in two files: fetch the model folder again"
                    )
                seen.add(name)
                # A tied head may be stored as well; rotary frequencies are computed, never read.
                if name not in shapes:
                    if name == "lm_head.weight" or name.endswith("inv_freq"):
                        continue
                    raise ValueError(
                        f"{path}: unexpected weight {short(name, 60)}: config.json is of another model: "
                        "fetch the model folder again"
                    )
                found = shard.get_slice(name)
                shape, kind = found.get_shape(), found.get_dtype()
                if shape != shapes[name] or kind not in FLOATS:
                    raise ValueError(
                        f"{path}: {name} is {short(str(shape), 60)}, config.json says {shapes[name]} "
                        f"(stored as {kind}, of {', '.join(FLOATS)}): fetch the model folder again"
                    )
    if missing := shapes.keys() - seen:
        raise ValueError(
            f"{folder}: weight {min(missing)} is missing ({len(missing)} in all): fetch the folder again"
        )


Share = tuple[slice, ...] | None  # what is read of a weight; None: all of it


def share_of(whole: Sequence[int], place: Tensor, part: int) -> Share:
    """The share of a weight that fills the place, which is as long in all dimensions or shorter in one."""
    if list(whole) == list(place.shape):
        return None
    pairs = zip(whole, place.shape, strict=True)
    return tuple(slice(None) if n == size else slice(part * n, (part + 1) * n) for size, n in pairs)


def read_weights(
    folder: str | Path, wanted: dict[str, Share], device: torch.device | str, progress: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on device) for each wanted weight of a folder that `check_weights` has seen."""
    with tqdm(total=len(wanted), desc="loading weights", unit="", disable=not progress, leave=False) as bar:
        for path in weight_files(folder):
            with open_weights(path, device) as shard:
                for name in sorted(wanted.keys() & set(shard.keys())):
                    share = wanted[name]
                    yield name, shard.get_tensor(name) if share is None else shard.get_slice(name)[share]
                    bar.update()


def load_embedding_and_head(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The target's frozen (embedding [V, H], head [V, H]) for a drafter rank; a tied head is the
    embedding.
    """
    c = TargetConfig.from_folder(folder)
    check_weights(folder, _expected_shapes(c))
    names = ["model.embed_tokens.weight"] + ([] if c.tied else ["lm_head.weight"])
    found = {name: w.to(dtype) for name, w in read_weights(folder, dict.fromkeys(names), device)}
    embedding = found["model.embed_tokens.weight"]
    return embedding, embedding if c.tied else found["lm_head.weight"]


# ---------------------------------------------------------------------------------------------------------
# Who attends to whom


@dataclasses.dataclass
class Blocks:
    """The blocks of a chunk of anchors. Tensors on the compute device.

    ids_S: slot 0 the real token, the rest the mask token. positions_S: in the document. starts_A, ends_A:
    each anchor sees the context rows [start, end) of the packed row, strictly before itself. labels_AB.
    weights_AB: 0 where the label is not supervised or beyond the document, in unused slots and at slot 0.
    real_A: not padding.
    """

    ids_S: Tensor
    positions_S: Tensor
    starts_A: Tensor
    ends_A: Tensor
    labels_AB: Tensor
    weights_AB: Tensor
    real_A: Tensor


def slot_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """Loss weight of each slot, fp32 [B]: exp(-(k-1)/gamma), 0 for slot 0 (paper, training loss)."""
    k = torch.arange(block_size, device=device, dtype=torch.float32)
    return torch.where(k > 0, torch.exp(-(k - 1) / gamma), 0.0)


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for B = 16, 10, 8, linear between; B/2 below 8; 7 + (B-16)/3 above 16."""
    if block_size <= 8:
        return block_size / 2
    if block_size <= 10:
        return 4 + (block_size - 8) / 2
    return 5 + (block_size - 10) / 3 if block_size <= 16 else 7 + (block_size - 16) / 3


def make_blocks(
    tokens_T: Tensor,
    positions_T: Tensor,
    doc_T: Tensor,
    mask_T: Tensor,
    anchors_A: Tensor,
    block_size: int,
    gamma: float,
    mask_token: int,
) -> Blocks:
    """Blocks for anchors (packed index, -1 for an unused slot); all tensors on one device, no host sync."""
    real_A = anchors_A >= 0
    at_A = anchors_A.clamp(min=0)
    slot_B = torch.arange(block_size, device=tokens_T.device)
    index_AB = at_A[:, None] + slot_B
    inside_AB = (index_AB < len(tokens_T)) & real_A[:, None]
    index_AB = index_AB.clamp(max=len(tokens_T) - 1)
    same_AB = inside_AB & (doc_T[index_AB] == doc_T[at_A][:, None])
    supervised_AB = same_AB & mask_T[index_AB].bool() & (slot_B > 0)
    ids_AB = torch.full_like(index_AB, mask_token)
    ids_AB[:, 0] = tokens_T[at_A]
    positions_A = positions_T[at_A]
    return Blocks(
        ids_S=ids_AB.flatten(),
        positions_S=(positions_A[:, None] + slot_B).flatten(),
        starts_A=torch.where(real_A, at_A - positions_A, 0),
        ends_A=torch.where(real_A, at_A, 0),
        labels_AB=tokens_T[index_AB],
        weights_AB=supervised_AB * slot_weights(block_size, gamma, tokens_T.device),
        real_A=real_A,
    )


def sees(starts_A: Tensor, ends_A: Tensor, context: int, block_size: int, window: int = 0) -> Callable:
    """The attention rule as a flex_attention mask_mod: may slot `q` see key `kv`?

    Keys are the `context` packed tokens, then the S block slots. A slot sees the context of its own document
    strictly before its anchor and all slots of its own block. With a window of W tokens (a sliding layer):
    context from position anchor+k-(W-1) on, and the block causally; with -W all slots of the block.
    """

    def mask_mod(b, h, q, kv):
        anchor, slot = q // block_size, q % block_size
        start = starts_A[anchor]
        own = (kv >= context) & ((kv - context) // block_size == anchor)
        if window:
            start = torch.maximum(start, ends_A[anchor] + slot - (abs(window) - 1))
        if window > 0:
            own = own & ((kv - context) % block_size <= slot)
        return (kv >= start) & (kv < torch.clamp(ends_A[anchor], max=context)) | own

    return mask_mod


def dense_mask(starts_A: Tensor, ends_A: Tensor, context: int, block_size: int, window: int = 0) -> Tensor:
    """`sees` written out, bool [S, context+S]: the CPU route and the oracle of the block mask."""
    slots = len(starts_A) * block_size
    q = torch.arange(slots, device=starts_A.device)[:, None]
    kv = torch.arange(context + slots, device=starts_A.device)[None, :]
    return sees(starts_A, ends_A, context, block_size, window)(None, None, q, kv)


def block_mask(starts_A: Tensor, ends_A: Tensor, context: int, block_size: int, window: int = 0) -> BlockMask:
    """`sees` as a flex BlockMask, its tiles found from the anchors' ranges: no S x (T+S) mask is ever formed.

    `context` must be a multiple of TILE. A context tile is needed when any range of the row's anchors meets
    it, and full (no element mask) when every one covers it; window layers treat every tile as partial.
    """
    assert context % TILE == 0, context
    device, slots = starts_A.device, len(starts_A) * block_size
    rows, columns = -(-slots // TILE), context // TILE
    group = math.gcd(TILE, block_size)  # slots of a tile that surely share their anchor
    first = torch.arange(rows * TILE // group, device=device) * group
    anchor = (first // block_size).clamp(max=len(starts_A) - 1)
    used = (first < slots).view(rows, -1, 1)
    start, end = starts_A[anchor].view(rows, -1, 1), ends_A[anchor].view(rows, -1, 1)
    if window:  # the smallest start over the slots of a block: a superset of the needed tiles
        start = torch.maximum(start, end - (abs(window) - 1))
    low = torch.arange(columns, device=device) * TILE
    meets = (used & (start < low + TILE) & (end > low) & (end > start)).any(1)
    covers = ((start <= low) & (end >= low + TILE) & used).all(1)
    if window:
        covers = torch.zeros_like(covers)
    # The blocks' own slots: tile row i meets the slot tiles its blocks reach into, all of them partial.
    row = torch.arange(rows, device=device)[:, None] * TILE
    reach_low, reach_high = row // block_size * block_size, ((row + TILE - 1) // block_size + 1) * block_size
    column = torch.arange(rows, device=device)[None, :] * TILE
    own = (column < reach_high) & (column + TILE > reach_low)
    partial = torch.cat([meets & ~covers, own], 1)
    full = torch.cat([covers, torch.zeros_like(own)], 1)
    tiles = torch.stack([partial, full])
    (counts, keys), (counts_of_keys, queries) = _tile_lists(tiles), _tile_lists(tiles.transpose(1, 2))
    return BlockMask(  # from_kv_blocks finds the backward's lists through vmap: most of a mask's host time
        seq_lengths=(slots, context + slots),
        kv_num_blocks=counts[0],
        kv_indices=keys[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=keys[1],
        q_num_blocks=counts_of_keys[0],
        q_indices=queries[0],
        full_q_num_blocks=counts_of_keys[1],
        full_q_indices=queries[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=sees(starts_A, ends_A, context, block_size, window),
    )


def _tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Bool tiles [2, rows, columns] as BlockMask wants each of the two: counts [2, 1, 1, rows], indices
    [2, 1, 1, rows, columns].
    """
    order = torch.argsort(tiles.to(torch.uint8), dim=2, descending=True, stable=True)
    return tiles.sum(2, dtype=torch.int32)[:, None, None], order.to(torch.int32).contiguous()[:, None, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """q [S, N, D], k and v [T+S, G, D] to [S, N*D]: flex under a BlockMask, dense under a bool mask."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


# ---------------------------------------------------------------------------------------------------------
# Drafter


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; `of` takes everything but depth and block size from the target."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    rope_scaling: dict | None
    layers: int
    block_size: int
    ids: tuple[int, ...]
    target_layers: int
    mask_token: int
    max_position: int
    windows: tuple[int, ...] = ()  # by the rule of `sees`
    softcap: float = 0.0  # c: the target's logits are c * tanh(product / c); 0: the product itself
    conv_kernel_size: int = 0  # taps of the convolutions around each sublayer; 0: none
    conv_group_size: int = 0
    selector_rank: int = 0  # of the candidate selector; 0: none
    selector_top_k: int = 0

    @property
    def variant(self) -> str:
        return "dflash2" if self.conv_kernel_size or self.selector_rank else "dflash"

    def added(self) -> tuple[int, ...]:
        """Sizes of what DFlash 2 adds."""
        return tuple(getattr(self, name) for name in DFLASH2)

    def conv_parameters(self) -> int:
        """Of the matrices of a layer's two convolutions."""
        return sum(map(math.prod, self.conv_matrices()))

    def conv_matrices(self) -> list[tuple[int, int]]:
        if not self.conv_kernel_size:
            return []
        return 2 * [(2 * self.conv_kernel_size * (self.hidden // self.conv_group_size), self.hidden)]

    def selector_parameters(self) -> int:
        return self.selector_rank * (2 * self.vocab + self.hidden)

    def layer_matrices(self) -> list[tuple[int, int]]:
        h, i = self.hidden, self.intermediate
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(q, h), (kv, h), (kv, h), (h, q), (i, h), (i, h), (h, i), *self.conv_matrices()]

    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of what the linear layers multiply by."""
        selector = [(self.selector_rank, self.hidden)] if self.selector_rank else []
        of_layers = self.layers * self.layer_matrices()
        return [(self.hidden, len(self.ids) * self.hidden), *of_layers, *selector]

    def layer_parameters(self) -> int:
        """Of the matrices of a layer."""
        return sum(map(math.prod, self.layer_matrices()))

    def parameters(self) -> int:
        """Trained parameters: the matrices, the norms, what is fixed in the convolutions, the codebooks."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim) + 2 * self.hidden
        fixed = self.layers * 4 * self.conv_kernel_size * self.hidden
        codebooks = 2 * self.vocab * self.selector_rank
        return sum(map(math.prod, self.matrices())) + norms + fixed + codebooks

    def step_flops(self, tokens: int, anchors: int, context: float = 0.0) -> float:
        """Useful FLOPs of a forward and backward: products, head, attention over `context` mean tokens a
        slot.
        """
        slots = anchors * self.block_size
        of_slots = self.layers * self.layer_parameters() * slots
        of_context = (
            (len(self.ids) * self.hidden + self.layers * 2 * self.kv_heads * self.head_dim)
            * self.hidden
            * tokens
        )
        head = anchors * (self.block_size - 1) * self.hidden * self.vocab  # frozen: forward and one gradient
        attention = slots * (context + self.block_size) * self.heads * self.head_dim * 2 * self.layers
        selector = anchors * (self.block_size - 1) * self.selector_rank * (self.hidden + self.selector_top_k)
        return 2.0 * (3 * (of_slots + of_context + selector) + 2 * head + 3.5 * attention)

    def feature_bytes(self, tokens: int, size: int = 2) -> int:
        """Of a batch, as it is sent and held in a buffer."""
        return tokens * len(self.ids) * self.hidden * size

    def context_bytes(self, tokens: int, size: int = 2) -> int:
        """What is kept of the context, from the output of fc to each layer's keys and values."""
        kv = self.kv_heads * self.head_dim
        copies = 2 * kv * self.hidden * size if size < 4 else 0  # of k_proj and v_proj, in the compute dtype
        of_layer = tokens * kv * 3 * size + copies
        return tokens * (self.hidden * size + 8 * self.head_dim) + self.layers * of_layer

    def context_gradient_bytes(self, tokens: int, size: int = 2) -> int:
        """One gradient for each layer's keys and values. An earlier chunk's is the context's part of a tensor
        that has the slots as well, all of which stays: `tokens` then counts both.
        """
        return self.layers * tokens * 2 * self.kv_heads * self.head_dim * size

    def layer_bytes(self, slots: int, tokens: int, size: int = 2, in_fp8: bool = False) -> int:
        """What one compiled layer keeps for its backward: its input, the results of its products and of
        attention, and the weights in the compute dtype; in fp8 the inputs of products too. All else is
        computed again.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        of_slot = size * (2 * self.hidden + 3 * q + 2 * kv + 2 * self.intermediate)
        of_slot += 4 * (2 + 2 * self.heads + self.kv_heads)  # 1/rms of four norms and attention's logsumexp
        of_slot += (2 * self.hidden + q + self.intermediate) * in_fp8
        if self.conv_kernel_size:  # the dynamic taps, what goes into both sublayers and comes out
            of_slot += size * (self.conv_parameters() // self.hidden + 4 * self.hidden)
        copies = self.layer_parameters() * (1 if in_fp8 else size) if size < 4 else 0
        copies += self.conv_parameters() * (size - 1) * in_fp8  # which stay as they are
        return slots * of_slot + 2 * size * (tokens + slots) * kv + copies

    def chunk_moments(
        self, anchors: int, tokens: int, size: int = 2, in_fp8: bool = False, whole_blocks: bool = False
    ) -> dict[str, tuple[int, int]]:
        """Bytes (of the layers, of the loss) of one chunk of anchors at the moments that can be its peak, its
        context not counted. `whole_blocks`: the loss takes no part of one at a time.
        """
        slots, drafted = anchors * self.block_size, anchors * (self.block_size - 1)
        h, i, kv = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        of_a_layer = self.layer_bytes(slots, tokens, size, in_fp8)
        kept = self.layers * of_a_layer + slots * (size * h + 8 * self.head_dim)
        kept += 40 * slots  # ids, positions, labels, weights
        rows = ChunkedCrossEntropy.rows(drafted, self.vocab, self.block_size - 1 if whole_blocks else 1)
        logits = (size + (1 if in_fp8 else size)) * rows * self.vocab
        of_layer = 2 * size * i * slots + (4 + size) * h * i
        after = 4 * self.layer_parameters() + 2 * size * (2 * tokens + slots) * kv
        after -= of_a_layer  # a layer's gradients leave together
        selector = {"backward of the selector": (kept, self.selector_bytes(drafted, size))}
        return (selector if self.selector_rank else {}) | {
            "loss": (kept, 2 * size * drafted * h + logits),
            "backward of the last norm": (kept + slots * h * 4 * size, 0),
            "backward of a layer": (kept + size * slots * h + max(of_layer, after), 0),
        }

    def selector_bytes(self, drafted: int, size: int = 2) -> int:
        """Of the loss, in the selector's backward: h and its gradients; the codebooks' rows of the candidates
        and fp32 gradients beside those they are added to, or, later, the head's rows of some candidates.
        """
        candidates = self.selector_top_k + 1
        kept = drafted * (3 * size * self.hidden + candidates * 16)
        of_codebooks = size * drafted * (candidates + 2) * self.selector_rank + 4 * self.selector_parameters()
        width = candidates * self.hidden
        of_head = size * (drafted * self.hidden + ChunkedCrossEntropy.rows(drafted, width) * width)
        return kept + max(of_codebooks, of_head)

    def context_moments(self, tokens: int, slots: int, chunks: int, size: int = 2) -> dict[str, int]:
        """Bytes of the context's own backward, after the last chunk's; chunks before it left a gradient."""
        h = self.hidden
        left = self.context_gradient_bytes(tokens + slots, size) if chunks > 1 else 0
        new = self.context_gradient_bytes(tokens + (slots if chunks == 1 else 0), size)
        of_all = 2 * tokens * h * size + (4 + size) * len(self.ids) * h * h
        return {"backward of the context": self.context_bytes(tokens, size) + left + new + of_all}

    @staticmethod
    def of(
        t: TargetConfig, layers: int, block_size: int, taps: int, mask_token: int, variant: str = "dflash"
    ) -> "DrafterConfig":
        same = {f.name: getattr(t, f.name) for f in dataclasses.fields(DrafterConfig) if hasattr(t, f.name)}
        same |= dict(layers=layers, block_size=block_size, mask_token=mask_token, windows=(0,) * layers)
        same |= DFLASH2 if variant == "dflash2" else {}
        return DrafterConfig(**same, ids=tuple(tap_layers(t.layers, taps)), target_layers=t.layers)

    def check_variant(self) -> None:
        """ValueError where the sizes do not allow what DFlash 2 adds."""
        if self.conv_kernel_size and (not self.conv_group_size or self.hidden % self.conv_group_size):
            raise ValueError(
                f"the hidden size {self.hidden} is not a multiple of the convolution's group of "
                f"{self.conv_group_size} channels"
            )
        if self.selector_rank and not 0 < self.selector_top_k <= self.vocab:
            raise ValueError(f"{self.selector_top_k} candidates of a slot, of a vocabulary of {self.vocab}")


class BlockConv(nn.Module):
    """A convolution along the slots of each block, before and after a sublayer (DFlash 2).

    out[i, c] = sum over taps t of (base[t, c] + delta[i, t, group of c]) * x[i - t, c]: each channel for
    itself, nothing from before the block. One product with the sublayer's input gives delta for both sides.
    Starts as the identity.
    """

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.block_size, self.taps, self.group = c.block_size, c.conv_kernel_size, c.conv_group_size
        identity = torch.zeros(2, self.taps, c.hidden)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(c.hidden, 2 * self.taps * (c.hidden // self.group), bias=False)

    def before(self, x_SH: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input, and the delta for its output."""
        delta = linear(x_SH, self.kernel_projection).unflatten(-1, (2, self.taps, -1))
        return self.convolve(x_SH, delta[:, 0], 0), delta[:, 1]

    def after(self, x_SH: Tensor, delta_SUW: Tensor) -> Tensor:
        return self.convolve(x_SH, delta_SUW, 1)

    def convolve(self, x_SH: Tensor, delta_SUW: Tensor, side: int) -> Tensor:
        """Computed in fp32 (1 + delta would lose the delta in bf16), returned in the input's dtype.

        Of x only slices are made, and the products are padded: a shifted or wider x would be kept for the
        backward pass.
        """
        x = x_SH.unflatten(-1, (-1, self.group)).unflatten(0, (-1, self.block_size))
        base = self.base_kernel[side].float().unflatten(-1, (-1, self.group))
        delta = delta_SUW.float().unflatten(0, (-1, self.block_size))
        out = torch.zeros_like(x, dtype=torch.float32)
        for t in range(self.taps):
            product = (base[t] + delta[:, t:, t, :, None]) * x[:, : self.block_size - t].float()
            out = out + F.pad(product, (0, 0, 0, 0, t, 0))
        return out.flatten(0, 1).flatten(1).to(x_SH.dtype)


class NoConv(nn.Module):
    """DFlash: a sublayer as it is."""

    def before(self, x_SH: Tensor) -> tuple[Tensor, None]:
        return x_SH, None

    def after(self, x_SH: Tensor, _: None) -> Tensor:
        return x_SH


class DrafterLayer(nn.Module):
    """Qwen3-style pre-norm layer whose keys and values are [context ; block], queries the block only."""

    product: Callable = staticmethod(linear)  # or fp8.linear

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)
        self.attention_conv, self.mlp_conv = (
            BlockConv(c) if c.conv_kernel_size else NoConv() for _ in range(2)
        )

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, H] to rotated keys and values [tokens, G, D]; one projection for context and block."""
        k, v = self.product(x, self.k_proj, self.v_proj).chunk(2, -1)
        return self.turned_keys(k, cos, sin), self.split_heads(v)

    def turned_keys(self, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.k_norm(self.split_heads(k)), cos, sin)

    def forward(
        self, x_SH: Tensor, ctx_k: Tensor, ctx_v: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor
    ) -> Tensor:
        """Block states [S, H], context keys and values [T, G, D], angles [S, D] to block states [S, H]."""
        h, delta = self.attention_conv.before(self.input_layernorm(x_SH))
        q = rotate(self.q_norm(self.split_heads(self.product(h, self.q_proj))), cos, sin)
        k, v = self.keys_values(h, cos, sin)
        out = self.product(attend(q, torch.cat([ctx_k, k]), torch.cat([ctx_v, v]), mask), self.o_proj)
        return self.mlp(x_SH + self.attention_conv.after(out, delta))

    def mlp(self, x_SH: Tensor) -> Tensor:
        h, delta = self.mlp_conv.before(self.post_attention_layernorm(x_SH))
        act = F.silu(self.product(h, self.gate_proj)) * self.product(h, self.up_proj)
        return x_SH + self.mlp_conv.after(self.product(act, self.down_proj), delta)

    def extend(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at_PB: Tensor, bias: Tensor
    ) -> Tensor:
        """`forward` for one block of each of P rows [P*B, H], with the context before it in the cache.

        The block's own keys and values go into the cache behind the context, which will overwrite them.
        """
        h, delta = self.attention_conv.before(self.input_layernorm(x))
        q = rotate(self.q_norm(self.split_heads(self.product(h, self.q_proj))), cos, sin)
        out = attend_cached(q, *self.keys_values(h, cos, sin), keys, values, at_PB, bias)
        return self.mlp(x + self.attention_conv.after(self.product(out, self.o_proj), delta))


class CandidateSelector(nn.Module):
    """Of a slot's most likely tokens, the one that goes best with the token before it (DFlash 2).

    edge(p -> c) = <predecessor[p] * projection(h), successor[c]> + logit[c], with the slot's final state h:
    a transition of low rank Z on top of what the head says. Starts with the head's word alone.
    """

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.top_k = c.selector_top_k
        self.hidden_projection = nn.Linear(c.hidden, c.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(c.vocab, c.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(c.vocab, c.selector_rank))

    def edges(self, state_RZ: Tensor, before_R: Tensor, ids_RM: Tensor, logits_RM: Tensor) -> Tensor:
        """fp32 [R, M] of each row's candidates after the token before_R; state_RZ is projection(h)."""
        gate_RZ = F.embedding(before_R, self.predecessor_codebook).to(state_RZ.dtype) * state_RZ
        successors = F.embedding(ids_RM, self.successor_codebook).to(state_RZ.dtype)
        return logits_RM.float() + (gate_RZ[:, None] * successors).sum(-1, dtype=torch.float32)

    def walk(
        self, h_ABH: Tensor, ids_ABM: Tensor, logits_ABM: Tensor, token_A: Tensor, choose: Callable
    ) -> tuple[Tensor, list]:
        """The drafted tokens [A, B-1], each chosen after the one before it; slots 1..B-1 given.

        Begins after the anchor's token_A. `choose(edges [A, M], slot)`: index of a candidate [A], and its
        odds, which are handed back for each slot.
        """
        state_ABZ = linear(h_ABH, self.hidden_projection)
        tokens, odds = [], []
        for k in range(ids_ABM.shape[1]):
            edges_AM = self.edges(state_ABZ[:, k], token_A, ids_ABM[:, k], logits_ABM[:, k])
            at_A, odds_AM = choose(edges_AM, k)
            token_A = ids_ABM[:, k].gather(1, at_A[:, None])[:, 0]
            tokens.append(token_A)
            odds.append(odds_AM)
        return torch.stack(tokens, 1), odds


def selector_loss(
    selector: CandidateSelector,
    h_RH: Tensor,
    before_R: Tensor,
    weights_R: Tensor,
    ids_RM: Tensor,
    logits_RM: Tensor,
) -> Tensor:
    """Weighted sum of cross-entropies over the candidates of each row, given the true token before_R.

    The last column is the label. Where it is not among the candidates it takes the last one's place.
    """
    edges_RM = selector.edges(linear(h_RH, selector.hidden_projection), before_R, ids_RM, logits_RM)
    edges_RM, label_R = edges_RM[:, :-1], edges_RM[:, -1]
    missing_R = (ids_RM[:, :-1] != ids_RM[:, -1:]).all(1)
    last_R = torch.where(missing_R, label_R, edges_RM[:, -1])
    edges_RM = torch.cat([edges_RM[:, :-1], last_R[:, None]], 1)
    return (weights_R * (edges_RM.logsumexp(1) - label_R)).sum()


ContextKV = list[tuple[Tensor, Tensor]]


class Drafter(nn.Module):
    """The block-diffusion drafter: context from the target's features, blocks of mask tokens, the target's
    head.

    `embedding` and `head` [V, H] are the target's, as plain attributes: neither saved nor trained.
    `run_context`, `run_layer`, `run_norm`, `run_loss` and `run_selector` are what a step calls: train.py puts
    compiled handles there; saving and decoding go through the module itself. `in_fp8`: products of the layers
    and of the loss in 8-bit floats (fp8.py); convolutions and selector stay as they are. `dpace`: in
    training the slots are weighted by `dpace_weights`.
    """

    def __init__(
        self,
        c: DrafterConfig,
        embedding: Tensor,
        head: Tensor,
        seed: int = 0,
        in_fp8: bool = False,
        dpace: bool = False,
    ):
        super().__init__()
        self.c = c
        self.fc = nn.Linear(len(c.ids) * c.hidden, c.hidden, bias=False)
        self.hidden_norm = RMSNorm(c.hidden, c.eps)
        self.layers = nn.ModuleList(DrafterLayer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.eps)
        self.candidate_selector = CandidateSelector(c) if c.selector_rank else None
        self.embedding, self.head = embedding.detach(), head.detach()
        self.freq = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        self.run_context: Callable = Drafter.project_context
        self.run_layer: Callable = DrafterLayer.forward
        self.run_norm: Callable = RMSNorm.forward
        self.run_loss: Callable = cross_entropy_rows
        self.dpace = dpace
        self.run_selector: Callable = selector_loss
        self._reset(seed)
        self.fp8_head = fp8.Head(self.head) if in_fp8 else None
        if in_fp8:
            self.head = None  # bf16, and not needed any more
            for layer in self.layers:
                layer.product = fp8.linear

    @torch.no_grad()
    def _reset(self, seed: int) -> None:
        """Initial weights from a CPU generator, the same on every rank and device.

        The final norm starts at 1/|head row|, so that the first logits have unit spread: with a weight of 1
        before a large tied head the loss starts several times above ln V and the first hundred steps only
        undo that. What DFlash 2 adds changes nothing at first: the same seed gives the same drafts as DFlash.
        """
        random = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith(("kernel_projection.weight", "successor_codebook")):
                p.zero_()
            elif p.dim() == 2 and p.device.type != "meta":
                scale = p.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale /= math.sqrt(2 * self.c.layers)
                p.copy_(torch.randn(p.shape, generator=random) * scale)
        if self.norm.weight.device.type != "meta" and self.head.device.type != "meta":
            self.norm.weight.fill_(1.0 / self.head.float().norm(dim=1).mean().item())

    def context(self, features_TKH: Tensor) -> Tensor:
        """ctx [T, H] = RMSNorm(fc(features)); computed once and shared by all layers."""
        return self.hidden_norm(linear(features_TKH, self.fc))

    def context_keys_values(self, features_TKH: Tensor, positions_T: Tensor) -> ContextKV:
        """Each layer's context keys and values [T, G, D]; no layer norm on the context."""
        with torch.enable_grad():  # see `hidden`
            return self.run_context(self, features_TKH, *self.angles(positions_T))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.freq = self.freq.to(positions.device)  # once: a copy from the host would wait for the device
        return rope_angles(positions, self.freq)

    def project_context(self, features_TKH: Tensor, cos: Tensor, sin: Tensor) -> ContextKV:
        """One product for the keys of all layers and one for their values, which become tensors of their
        own: the gradient of a view would take the room of all layers'.
        """
        ctx, product, n = self.context(features_TKH), self.layers[0].product, len(self.layers)
        keys = product(ctx, *(layer.k_proj for layer in self.layers)).chunk(n, -1)
        values = product(ctx, *(layer.v_proj for layer in self.layers)).chunk(n, -1)
        return [
            (layer.turned_keys(k, cos, sin), layer.split_heads(v).contiguous())
            for layer, k, v in zip(self.layers, keys, values, strict=True)
        ]

    def hidden(self, kv: ContextKV, blocks: Blocks) -> Tensor:
        """Final normed block states [S, H] for the blocks of a chunk.

        With gradients, in evaluation too, and even for the frozen embedding: all layers then run one graph
        and its backward, where each of these cases would be another to compile before the first step.
        """
        x = F.embedding(blocks.ids_S, self.embedding)
        cos, sin = self.angles(blocks.positions_S)
        ranges = (blocks.starts_A, blocks.ends_A, len(kv[0][0]), self.c.block_size)
        make = block_mask if x.is_cuda else dense_mask
        masks = {window: make(*ranges, window) for window in set(self.c.windows)}
        with torch.enable_grad():
            x.requires_grad_()
            for layer, (k, v), window in zip(self.layers, kv, self.c.windows, strict=True):
                x = self.run_layer(layer, x, k, v, cos, sin, masks[window])
            return self.run_norm(self.norm, x)

    def extend_context(self, features_PQKH: Tensor, first_P: Tensor, caches: list[KeysValues]) -> None:
        """Cache the context keys and values of Q tokens of each of P rows, from position first_P on."""
        rows, new = features_PQKH.shape[:2]
        at_PQ = first_P[:, None] + torch.arange(new, device=first_P.device)
        row = torch.arange(rows, device=first_P.device)[:, None]
        kv = self.project_context(features_PQKH.flatten(0, 1), *self.angles(at_PQ.flatten()))
        for (keys, values), (k, v) in zip(caches, kv, strict=True):
            keys[row, at_PQ] = k.unflatten(0, (rows, new))
            values[row, at_PQ] = v.unflatten(0, (rows, new))

    def extend(
        self,
        tokens_P: Tensor,
        first_P: Tensor,
        caches: list[KeysValues],
        seen: int,
        run_inputs: Callable = cache_inputs,
        run_layer: Callable = DrafterLayer.extend,
    ) -> Tensor:
        """The last layer's output [P, B, H] for one block a row: anchor token tokens_P at first_P."""
        c, freq = self.c, self.freq.to(first_P.device)
        ids_PB = F.pad(tokens_P[:, None], (0, c.block_size - 1), value=c.mask_token)
        x = F.embedding(ids_PB.flatten(), self.embedding)
        shared = (c.block_size, seen, c.windows, True, c.heads // c.kv_heads, x.dtype)
        at_PB, cos, sin, bias = run_inputs(first_P, freq, *shared)
        for layer, cache, window in zip(self.layers, caches, c.windows, strict=True):
            x = run_layer(layer, x, cos, sin, *cache, at_PB, bias[window])
        return x.unflatten(0, ids_PB.shape)

    def forward(self, kv: ContextKV, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Plain weighted loss sum (fp32 scalar) and the predicted tokens [A, B-1] of a chunk."""
        h = self.hidden(kv, blocks)
        h = h if torch.is_grad_enabled() else h.detach()
        h = h.unflatten(0, (-1, self.c.block_size))[:, 1:].flatten(0, 1)
        labels, weights = blocks.labels_AB[:, 1:].flatten(), blocks.weights_AB[:, 1:].flatten()
        head = self.fp8_head or Head(self.head)
        cap, run_rows, drafted = self.c.softcap, self.run_loss, self.c.block_size - 1
        run_rows = functools.partial(run_rows, softcap=cap) if cap else run_rows
        whole, selector = 1, self.candidate_selector
        if self.dpace and torch.is_grad_enabled():
            whole, run_rows = drafted, functools.partial(run_rows, block=drafted)
        inputs = (h, head, labels, weights, run_rows, whole, selector.top_k if selector else 0)
        loss, predicted, *candidates = ChunkedCrossEntropy.apply(*inputs)
        if not selector:
            return loss * whole, predicted.unflatten(0, (-1, drafted))
        ids_RM, logits_RM = candidates
        logits_RM = soft_capped(logits_RM, self.c.softcap)
        if torch.is_grad_enabled():  # a walk would only serve the log: acc and acc_len are the head's alone
            before = blocks.labels_AB[:, :-1].flatten()
            more = self.run_selector(selector, h, before, weights, ids_RM, logits_RM)
            return loss * whole + SELECTOR_WEIGHT * more, predicted.unflatten(0, (-1, drafted))
        # Evaluation predicts as decoding drafts, by a walk from the anchor; the last candidate is the label.
        parts = (t.unflatten(0, (-1, drafted)) for t in (h, ids_RM[:, :-1], logits_RM[:, :-1]))
        return loss, selector.walk(*parts, blocks.labels_AB[:, 0], most_likely)[0]


def most_likely(edges_AM: Tensor, slot: int) -> tuple[Tensor, None]:
    """The greedy choice of `CandidateSelector.walk`."""
    return edges_AM.argmax(-1), None


# ---------------------------------------------------------------------------------------------------------
# Loss


def dpace_weights(loss_AK: Tensor, supervised_AK: Tensor, smoothing: float = 0.5) -> Tensor:
    """D-PACE (arXiv 2605.18810): what each drafted slot adds to the length that its block is accepted to,
    fp32 [A, B-1], from the drafter's own cross-entropies.

    w_j = sum over m >= j of the product of q_1 .. q_m, each q = exp(-loss) drawn halfway to 1. A block ends
    at its first unsupervised slot: no weight from there on.
    """
    q_AK = smoothing + (1 - smoothing) * torch.exp(-loss_AK)
    reached_AK = torch.where(supervised_AK, q_AK, 0.0).cumprod(1)
    return reached_AK.flip(1).cumsum(1).flip(1)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """fp32 logits of a target that caps them (Gemma); 0: the logits as they are."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    unit: float = 1.0,
    dtype: torch.dtype | None = None,
    softcap: float = 0.0,
    block: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss sum, argmax and d loss / d logits of some rows; logits [rows, V] in any dtype.

    The gradient is in multiples of `unit`, in `dtype` (that of the logits). With `block` drafted slots the
    rows are whole blocks, weighted by `dpace_weights` / `block` where `weights` has any: fp8.py counts on
    weights of at most 1.
    """
    wide = soft_capped(logits, softcap).float()
    top = wide.amax(-1)
    e = torch.exp(wide - top[:, None])
    z = e.sum(-1)
    picked = wide.gather(1, labels[:, None])[:, 0]
    loss_R = top + z.log() - picked
    if block:
        weights = dpace_weights(loss_R.view(-1, block), weights.view(-1, block) > 0).flatten() / block
    loss = (weights * loss_R).sum()
    # The argmax as a minimum of columns, which shares a pass with the gradient; int32, or it would be slower.
    column = torch.arange(wide.shape[1], device=wide.device, dtype=torch.int32)
    predicted = torch.where(wide == top[:, None], column, wide.shape[1]).amin(-1)
    hit = column == labels.to(torch.int32)[:, None]
    grad = e * (weights / z)[:, None] - torch.where(hit, weights[:, None], 0.0)
    if softcap:
        grad = grad * (1 - (wide / softcap).square())
    return loss, predicted.long(), (grad / unit).to(dtype or logits.dtype)


class Head:
    """The frozen head [V, H] for the loss; fp8.Head is the same in 8 bits."""

    unit, grad_dtype = 1.0, None

    def __init__(self, head_VH: Tensor):
        self.head_VH, self.shape = head_VH, head_VH.shape

    def logits(self, h_RH: Tensor) -> Tensor:
        return h_RH @ self.head_VH.T

    def back(self, grad_RV: Tensor, out_RH: Tensor) -> None:
        """d loss / d h from d loss / d logits, into `out_RH`."""
        torch.mm(grad_RV, self.head_VH, out=out_RH)

    def rows(self, ids_RM: Tensor, dtype: torch.dtype) -> Tensor:
        """The head's rows of these tokens, [R, M, H]."""
        return F.embedding(ids_RM, self.head_VH)


class ChunkedCrossEntropy(torch.autograd.Function):
    """sum_i w_i * CE(h_i @ head.T, label_i) without ever holding all the logits.

    The head is frozen, so the gradient with respect to h is formed in the forward pass from the same logits:
    two matrix products for a chunk of rows and no recompute. Only the loss carries a gradient.

    With `top_k`: also the most likely tokens of each row, then its label, [R, top_k + 1], and their logits,
    which carry a gradient too.
    """

    ELEMENTS = 1 << 28  # logits at a time: 0.5 GiB in bf16

    @staticmethod
    def rows(total: int, vocab: int, block: int = 1) -> int:
        """Rows of logits at a time, whole blocks of them; those of one part live together with their
        gradient. In equal parts where some more would be equal: a last one of its own size is a graph more
        to compile.
        """
        total = total // block
        parts = -(-total // max(1, ChunkedCrossEntropy.ELEMENTS // (block * vocab)))
        equal = (n for n in range(parts, parts + parts // 4 + 2) if total % n == 0)
        return -(-total // next(equal, parts)) * block

    @staticmethod
    def forward(ctx, h, head, labels, weights, run_rows, block=1, top_k=0):
        rows = ChunkedCrossEntropy.rows(len(h), head.shape[0], block)
        grad = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        loss, predicted, ids, tops = h.new_zeros((), dtype=torch.float32), [], [], []
        for lo in range(0, len(h), rows):
            part = slice(lo, lo + rows)
            logits = head.logits(h[part])
            part_loss, part_predicted, grad_logits = run_rows(
                logits, labels[part], weights[part], head.unit, head.grad_dtype
            )
            loss += part_loss
            predicted.append(part_predicted)
            if grad is not None:
                head.back(grad_logits, grad[part])
            if top_k:
                ids.append(torch.cat([logits.topk(top_k).indices, labels[part, None]], 1))
                tops.append(logits.gather(1, ids[-1]))
            del logits, grad_logits  # before the next part's are made
        predicted, *found = map(torch.cat, (predicted, ids, tops) if top_k else (predicted,))
        ctx.mark_non_differentiable(predicted, *found[:1])
        ctx.save_for_backward(grad, *found[:1])
        ctx.head = head
        return loss, predicted, *found

    @staticmethod
    def backward(ctx, grad_loss, _, *grads):
        grad, *ids = ctx.saved_tensors
        grad = grad * grad_loss.to(grad.dtype)
        if ids:
            _, grad_RM = grads
            add_candidates_gradient(grad, ctx.head, *ids, grad_RM)
        return grad, None, None, None, None, None, None


def add_candidates_gradient(grad_RH: Tensor, head: Head, ids_RM: Tensor, grad_RM: Tensor) -> None:
    """Add d loss / d h of the candidates' logits, which are h times a few rows of the head."""
    rows = ChunkedCrossEntropy.rows(len(ids_RM), ids_RM.shape[1] * grad_RH.shape[1])
    for lo in range(0, len(ids_RM), rows):
        part = slice(lo, lo + rows)
        of_head = head.rows(ids_RM[part], grad_RH.dtype)
        grad_RH[part] += (grad_RM[part, None].to(grad_RH.dtype) @ of_head)[:, 0]


def matching_prefix(predicted_AB: Tensor, labels_AB: Tensor, weights_AB: Tensor) -> Tensor:
    """Drafted tokens that match before the first miss or unsupervised slot, int64 [A]; slots 1..B-1 given."""
    right = (predicted_AB == labels_AB) & (weights_AB > 0)
    return right.long().cumprod(1).sum(1)


def walk_answers(prefix_T: Tensor, mask_T: Tensor, doc_T: Tensor) -> Iterator[tuple[int, int, int]]:
    """Walk each recorded answer as decoding would: (document, answer tokens after the first, blocks drafted).

    prefix_T int64 [T]: matching prefix of the block at each position that can be an anchor; mask_T
    supervised, doc_T the document of each position (-1 padding); CPU. From an answer's first token draft,
    jump by the matching prefix plus one, cut the last jump at the answer's end.
    """
    prefix, doc = prefix_T.tolist(), doc_T.tolist()
    supervised = [m and d >= 0 for m, d in zip(mask_T.tolist(), doc, strict=True)]
    at = 0
    while at < len(prefix):
        if not supervised[at]:
            at += 1
            continue
        end = at
        while end + 1 < len(prefix) and supervised[end + 1] and doc[end + 1] == doc[at]:
            end += 1
        first, blocks, here = at, 0, at
        while here < end:
            here, blocks = here + prefix[here] + 1, blocks + 1
        if end > first:
            yield doc[first], end - first, blocks
        at = end + 1
