"""Muon for the drafter's matrices, AdamW for its norms and tables, as one: `train.py --optimizer muon`.

Muon (kellerjordan.github.io/posts/muon) makes the singular values of each matrix's averaged gradient nearly
equal and steps by that: about 0.2 times the learning rate an element, whatever the shape (arXiv 2502.16982,
2.2). That is meant to make AdamW's rates fit; on the built-in target a rate seven times AdamW's best is far
better. In Newton-Schulz's bf16 products tiny differences grow: replicas and resumed runs agree bit for bit,
runs under another split no better than to a bf16 rounding a step. Those products cost as much as a third of a
batch: the drafters share the matrices out, and each sends the others what became of its own.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.95


def share_out(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Which of `ranks` steps each matrix: the largest first, each to the one that has least to do."""
    owners, work = [0] * len(shapes), [0] * ranks
    costs = [math.prod(s) * min(s) for s in shapes]  # of Newton-Schulz's products
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = work.index(min(work))
        work[owners[i]] += costs[i]
    return owners


def step_flops(shapes: Sequence[Sequence[int]]) -> float:
    """Of a step of all of these: five Newton-Schulz rounds a matrix."""
    return sum(5.0 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)


def step_bytes(shapes: Sequence[Sequence[int]], ranks: int) -> int:
    """Of a step, on the rank with most of them: a copy of its matrices to go back to; of the largest the
    update in fp32, two of it in bf16, and two products of its shorter side.
    """
    copies, (rows, columns) = [0] * ranks, max(shapes, key=math.prod)
    for shape, owner in zip(shapes, share_out(shapes, ranks), strict=True):
        copies[owner] += 4 * math.prod(shape)
    return max(copies) + 8 * rows * columns + 4 * min(rows, columns) ** 2


class Muon:
    """What train.py and checkpoint.py need of an optimizer: matrices are numbered first, then the rest.

    A matrix is what a linear layer multiplies by. The codebooks of DFlash 2's selector are only looked up, a
    row at a time. `group`: the drafters, which step together.
    """

    def __init__(self, drafter: nn.Module, lr: float, group: dist.ProcessGroup | None = None):
        self.matrices = [m.weight for m in drafter.modules() if isinstance(m, nn.Linear)]
        ours = set(map(id, self.matrices))
        rest = [p for p in drafter.parameters() if id(p) not in ours]
        self.group, ranks = group, dist.get_process_group_ranks(group) if group else [0]
        owners = share_out([p.shape for p in self.matrices], len(ranks))
        self.owners = [ranks[i] for i in owners]  # of each matrix, by rank in the world
        self.rank = dist.get_rank() if group else 0
        how = {"weight_decay": 0.0, "momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
        self.muon = torch.optim.Muon(self.matrices, lr=lr, **how)
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.found_inf: Tensor | None = None  # above 0: leave all as it is

    @property
    def param_groups(self) -> list[dict]:
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """A skipped step is one without a branch: with its momentum for a gradient Muon's average stays
        exactly as it is, and the matrices are put back.
        """
        skip, before, theirs = self.found_inf > 0, [], []
        for p, owner in zip(self.matrices, self.owners, strict=True):
            state = self.muon.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            average = state["momentum_buffer"]
            torch.where(skip, average, p.grad, out=p.grad)
            if owner == self.rank:
                before.append((p, p.clone()))
            else:  # keep its average, which every checkpoint has, and leave the rest to its owner
                average.lerp_(p.grad, 1 - MOMENTUM)
                theirs.append((p, p.grad))
                p.grad = None
        self.muon.step()
        for p, old in before:
            torch.where(skip, old, p, out=p)
        for p, grad in theirs:
            p.grad = grad
        if self.group:
            whose = zip(self.matrices, self.owners, strict=True)
            sent = [dist.broadcast(p, owner, group=self.group, async_op=True) for p, owner in whose]
            for work in sent:
                work.wait()
        self.adamw.found_inf = self.found_inf
        self.adamw.step()

    def state_dict(self) -> dict:
        parts, first = (self.muon.state_dict(), self.adamw.state_dict()), len(self.matrices)
        state = parts[0]["state"] | {first + i: s for i, s in parts[1]["state"].items()}
        return {"state": state, "param_groups": [g for part in parts for g in part["param_groups"]]}

    def load_state_dict(self, found: dict) -> None:
        """The state alone: how to step is not the file's to say."""
        first = len(self.matrices)
        of_matrices = {i: s for i, s in found["state"].items() if i < first}
        of_rest = {i - first: s for i, s in found["state"].items() if i >= first}
        for optimizer, state in ((self.muon, of_matrices), (self.adamw, of_rest)):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
