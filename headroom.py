"""What a rank holds at its largest moment, on paper: the estimate before a launch, the words after an
out-of-memory.

Only config.json and the flags are needed. diagnose/memory.py prints it and holds it against measurements;
train.py refuses a hopeless launch with it. The bytes of a model's parts are on the model itself (model.py).
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable

import torch

import decode
import muon
from model import TILE, DrafterConfig, TargetConfig

GIB, MIB = 2**30, 2**20
# Measured on an H200 with torch 2.11, the allocator's part fitted to 16 configurations (docs/memory.md).
CONTEXT = {"drafter": 1320 * MIB, "target": 770 * MIB, "colocate": 1320 * MIB}  # CUDA, its loaded kernels
BARE_CONTEXT = 400 * MIB  # of it before any kernel is loaded; 620 MiB on an H200, the less the safer
NCCL = 780 * MIB  # communicators of a rank that has peers; measured on two H200: 770, of a target 600
HOLES = 1.1  # times a context tensor of each layer and a slot tensor: what the allocator leaves open
WORKSPACE = 150 * MIB  # of products, and rounding
CPU_BASE = 700 * MIB  # a process that has imported torch
TIGHT = 0.05  # less headroom than this share of the card is worth a warning
MOST_TOKENS = 1 << 22
ROLES = ("drafter", "target", "colocate")
PARTS = (
    "weights",
    "gradients",
    "moments",
    "embedding and head",
    "target weights",
    "features",
    "context",
    "activations",
    "loss",
    "target activations",
    "allocator",
    "CUDA and NCCL",
)
PASSING = ("context", "activations", "loss", "target activations")


@dataclasses.dataclass
class Estimate:
    """Bytes of one role by part, at the `moment` of a step when they are most."""

    role: str
    moment: str
    parts: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def estimate(c, t: TargetConfig, role: str, ranks: int, size: int = 2) -> Estimate:
    """The largest moment of a rank's life. `c` is train.py's resolved Config; elements of `size` bytes."""
    return max(estimates(c, t, role, ranks, size), key=lambda e: e.peak)


def estimates(c, t: TargetConfig, role: str, ranks: int, size: int = 2) -> list[Estimate]:
    """One for each moment that can be the largest."""
    d = c.drafter(t)
    held = standing(c, t, d, role, size)
    return [
        Estimate(role, moment, finish(held | parts, c, d, role, ranks, size))
        for moment, parts in moments(c, t, d, role, size).items()
    ]


def peaks(c, t: TargetConfig, role: str, ranks: int, size: int = 2) -> dict[str, int]:
    return {e.moment: e.peak for e in estimates(c, t, role, ranks, size)}


def standing(c, t: TargetConfig, d: DrafterConfig, role: str, size: int) -> dict[str, int]:
    """What a rank holds all the time."""
    parts, feature_buffer = dict.fromkeys(PARTS, 0), d.feature_bytes(c.token_budget, size)
    if role != "target":
        parts["weights"] = parts["gradients"] = 4 * d.parameters()  # fp32
        parts["moments"] = 8 * d.parameters()
        if c.optimizer == "muon":
            parts["moments"] -= 4 * sum(map(math.prod, d.matrices()))
        tables = 2 * size if c.fp8 or not t.tied else size  # an 8-bit head has both layouts
        parts["embedding and head"] = d.vocab * d.hidden * tables
    if role != "drafter":
        whole = (t.layers, True) if decodes(c, role) else (max(d.ids) + 1, False)
        parts["target weights"] = share_of(c, t, role).parameters(*whole) * size
    parts["features"] = feature_buffer * (1 if role == "colocate" else c.depth)
    return parts


def moments(c, t: TargetConfig, d: DrafterConfig, role: str, size: int) -> dict[str, dict[str, int]]:
    """What comes and goes, by the moment of a step."""
    found, tokens = {}, c.token_budget
    if role != "drafter":
        found["features"] = {"target activations": share_of(c, t, role).features_bytes(tokens, size)}
    if decodes(c, role):
        found["decoding"] = {"target activations": decoding_bytes(c, t, d, size)}
    if role != "target":
        chunks = -(-c.anchors // c.anchor_chunk)
        context = d.context_bytes(tokens, size)
        slots = c.anchor_chunk * c.block_size
        context += d.context_gradient_bytes(tokens + slots, size) if chunks > 1 else 0
        options = (size, c.fp8, c.loss_weights == "dpace")
        for moment, (layers, loss) in d.chunk_moments(c.anchor_chunk, tokens, *options).items():
            found[moment] = {"context": context, "activations": layers, "loss": loss}
        for moment, all_of_it in d.context_moments(tokens, slots, chunks, size).items():
            found[moment] = {"context": all_of_it}
        if c.optimizer == "muon":
            found["update of the weights"] = {"activations": muon.step_bytes(d.matrices(), c.drafters)}
    return found


def share_of(c, t: TargetConfig, role: str) -> TargetConfig:
    """What a rank of this role has of the target."""
    return t if role == "colocate" else t.part(c.target_tp)


def decodes(c, role: str) -> bool:
    """--eval-decode: does this rank hold the whole target, and decode at evaluations?"""
    return role == "colocate" and c.eval_decode > 0


def decoding_bytes(c, t: TargetConfig, d: DrafterConfig, size: int) -> int:
    """The caches of both models, the drafter in the compute dtype, the logits of a block."""
    rows = min(decode.ROWS, c.eval_decode)
    of_token = 2 * size * (t.layers * t.kv_heads * t.head_dim + d.layers * d.kv_heads * d.head_dim)
    caches = rows * (c.max_length + d.block_size) * of_token
    return caches + size * d.parameters() + 3 * size * rows * d.block_size * t.vocab


def finish(parts: dict[str, int], c, d: DrafterConfig, role: str, ranks: int, size: int) -> dict[str, int]:
    """Add what lives outside the tensors. fp32 means the CPU: no context, no caching allocator."""
    if size == 4:
        return parts | {"CUDA and NCCL": CPU_BASE}
    outside = CONTEXT[role] + (NCCL if ranks > 1 else 0)
    return parts | {"allocator": WORKSPACE + holes(c, d, role, size), "CUDA and NCCL": outside}


def holes(c, d: DrafterConfig, role: str, size: int) -> int:
    """What the caching allocator leaves open between tensors that come and go. Short of room it gives them
    back and asks anew, which takes time: a run that has no room for them may still run.
    """
    if role == "target":  # between its layers' tensors there is room for two hidden states
        return 2 * size * c.token_budget * d.hidden
    of_context = d.layers * c.token_budget * d.kv_heads * d.head_dim
    return int(HOLES * size * (of_context + c.anchor_chunk * c.block_size * d.intermediate))


def search(fits: Callable[[int], bool], step: int, most: int) -> int:
    """The largest multiple of `step` up to `most` that fits, while the next one does not; 0: none does."""
    low, high = 0, step
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most // step * step + step)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_token_budget(
    resolved: Callable[[int], object],
    t: TargetConfig,
    role: str,
    ranks: int,
    have: int,
    size: int = 2,
    squeezed: bool = False,
) -> int:
    """`resolved(budget)` is train.py's Config with that budget (what follows from the budget follows it).
    `squeezed`: with no room for holes.
    """

    def fits(budget: int) -> bool:
        c = resolved(budget)
        spared = holes(c, c.drafter(t), role, size) if squeezed and size < 4 else 0
        return estimate(c, t, role, ranks, size).peak - spared <= have

    return search(fits, TILE, MOST_TOKENS)


def largest_anchor_chunk(c, t: TargetConfig, role: str, ranks: int, have: int, size: int = 2) -> int:
    def fits(chunk: int) -> bool:
        changed = dataclasses.replace(c, anchor_chunk=chunk)
        return estimate(changed, t, role, ranks, size).peak <= have

    step = min(16, c.anchors)
    return c.anchors if fits(c.anchors) else search(fits, step, c.anchors)


def smallest_target_tp(c, t: TargetConfig, per_node: int, have: int, size: int = 2) -> int:
    """The fewest ranks a target, more than now, whose part fits beside a node's drafter; 0: none do."""
    for parts in range(c.target_tp + 1, per_node) if c.target_backend == "native" else ():
        with contextlib.suppress(ValueError):  # not a number that divides the target evenly
            t.part(parts)
            changed = dataclasses.replace(c, target_tp=parts)
            if estimate(changed, t, "target", per_node, size).peak <= have:
                return parts
    return 0


def roles_of(layout: str) -> tuple[str, ...]:
    return ("colocate",) if layout == "colocate" else ("drafter", "target")


def role_name(role: str) -> str:
    return "colocate" if role == "drafter+target" else role


def gib(amount: float) -> str:
    return f"{amount / GIB:.1f}"


def said(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB / 10 else f"{amount / MIB:.1f} MiB"


# ---------------------------------------------------------------- in training


def advice(
    resolved: Callable, c, t: TargetConfig, role: str, ranks: int, have: int, size: int, nodes: int
) -> str:
    """The flags that would fit, as the end of a message."""
    budget = largest_token_budget(resolved, t, role, ranks, have, size)
    chunk = largest_anchor_chunk(c, t, role, ranks, have, size) if role != "target" else 0
    flags = [f"--token-budget {budget}"] if budget else []
    flags += [f"--anchor-chunk {chunk}"] if 0 < chunk < c.anchor_chunk else []
    parts = smallest_target_tp(c, t, ranks // nodes, have, size) if role == "target" else 0
    flags += [f"--target-tp {parts}"] if parts else []
    if not flags:
        return "no --token-budget fits: use a larger card, a smaller target or fewer --draft-layers"
    return "give " + " or ".join(flags)


def refusal(
    resolved: Callable, c, t: TargetConfig, role: str, ranks: int, have: int, size: int = 2, nodes: int = 1
) -> str:
    """One line if this rank cannot hold what it will be asked to, else nothing."""
    role = role_name(role)
    need = estimate(c, t, role, ranks, size)
    if need.peak <= have:
        return ""
    return (
        f"--token-budget {c.token_budget}: a {role} rank needs {said(need.peak)} ({need.moment}), its GPU "
        f"has {said(have)}: {advice(resolved, c, t, role, ranks, have, size, nodes)}, or --ignore-headroom "
        "to try all the same (python -m diagnose.memory shows where it goes)"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Of the allocator, of cuBLAS or of NCCL, which have errors of their own."""
    words = f"{error}"
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in words or "STATUS_ALLOC_FAILED" in words)
    )


def ran_out(
    error: BaseException,
    resolved: Callable,
    c,
    t: TargetConfig,
    role: str,
    ranks: int,
    have: int,
    nodes: int = 1,
) -> str:
    """What follows `rank 3 (target) ran out of memory`: how full it was, what it held, what would fit.

    `have` bytes of GPU; 0: none, a CPU run. Whatever the estimate says, this budget was too much: the advice
    stays 5% below it.
    """
    role, size = role_name(role), 2 if have else 4
    held = estimate(c, t, role, ranks, size)
    facts = re.findall(r"Tried to allocate ([\d.]+ \w+)", f"{error}")
    full = [f"{facts[0]} more were asked for"] if facts else []
    if have:
        free, total = torch.cuda.mem_get_info()
        full.append(
            f"{said(total - free)} of {said(total)} in use, {said(torch.cuda.memory_allocated())} by tensors"
        )
    parts = sorted(((n, part) for part, n in held.parts.items() if n), reverse=True)
    listed = ", ".join(f"{part} {said(n)}" for n, part in parts)
    tensors = held.peak - held.parts["CUDA and NCCL"]
    less = min(have or held.peak, held.peak - tensors // 20)
    return (
        (f" ({'; '.join(full)})" if full else "")
        + f": on paper {said(held.peak)} at its peak ({held.moment}): {listed}: "
        + advice(resolved, c, t, role, ranks, less, size, nodes)
    )
