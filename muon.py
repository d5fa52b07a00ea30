"""Muon for the drafter's matrices, AdamW for its norms and tables, as one: `train.py --optimizer muon`.

Muon (kellerjordan.github.io/posts/muon) makes the singular values of each matrix's averaged gradient nearly
equal and steps by that: about 0.2 times the learning rate an element, whatever the shape (arXiv 2502.16982,
2.2). That is meant to make AdamW's rates fit; on the built-in target a rate seven times AdamW's best is far
better. In Newton-Schulz's bf16 products tiny differences grow: replicas and resumed runs agree bit for bit,
runs under another split no better than to a bf16 rounding a step.
"""

import torch
from torch import Tensor, nn


class Muon:
    """What train.py and checkpoint.py need of an optimizer: matrices are numbered first, then the rest.

    A matrix is what a linear layer multiplies by. The codebooks of DFlash 2's selector are only looked up, a
    row at a time.
    """

    def __init__(self, drafter: nn.Module, lr: float):
        self.matrices = [m.weight for m in drafter.modules() if isinstance(m, nn.Linear)]
        ours = set(map(id, self.matrices))
        rest = [p for p in drafter.parameters() if id(p) not in ours]
        self.muon = torch.optim.Muon(self.matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
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
        skip, before = self.found_inf > 0, [p.clone() for p in self.matrices]
        for p in self.matrices:
            state = self.muon.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            torch.where(skip, state["momentum_buffer"], p.grad, out=p.grad)
        self.muon.step()
        for p, old in zip(self.matrices, before, strict=True):
            torch.where(skip, old, p, out=p)
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
