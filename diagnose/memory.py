"""Does the run fit on the card, and what is the largest that does?

    python -m diagnose.memory [--target DIR] [--ranks 8] [--gpu-memory 96GB] [flags of train.py]  # on paper
    python -m diagnose.memory --target DIR --png memory.png              # stacked bars against the card
    torchrun --nproc_per_node=8 -m diagnose.memory --measure --target DIR [flags of train.py]  # on the GPUs
    python -m diagnose.memory --measure --random-weights --role drafter --target DIR  # config.json alone
    python -m diagnose.memory --suite                                    # a dozen shapes measured on one GPU

On paper: from config.json alone and without a GPU, what each role holds at its largest moment: drafter,
target, and a rank that is both (colocate). The verdict is about the roles of the layout that train.py would
choose. A card of 96GB is taken as 96 GiB less 1%, which is what a driver leaves of it; GiB and MiB are exact.

Measured: train.py's own loops on the worst batches there can be (full, every anchor valid, documents of the
largest length), two steps with their optimizer, evaluations and transfers, read from the device and from the
allocator on every rank, next to the estimate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import operator
import os
import re
import shlex
import sys
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path

if not __package__:  # python diagnose/memory.py: same imports as python -m diagnose.memory
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from diagnose.report import (
    Finding,
    Parser,
    Report,
    add_arguments,
    fail,
    leave,
    ok,
    picture,
    skip,
    warn,
    write_json,
)
from headroom import (
    GIB,
    MIB,
    PARTS,
    PASSING,
    ROLES,
    TIGHT,
    Estimate,
    estimate,
    gib,
    largest_anchor_chunk,
    largest_token_budget,
    peaks,
    role_name,
    roles_of,
    said,
    smallest_target_tp,
)
from model import TargetConfig
from world import refuse

LEAST_CHUNK = 64  # anchors: of smaller chunks the products are too small for a GPU

# ---------------------------------------------------------------- traced


class Live(TorchDispatchMode):
    """Bytes of the storages made while it is on, and the most there were at once; meta tensors have sizes."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known, self.paused = WeakIdKeyDictionary(), False

    def adopt(self, tensors) -> None:
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor) and t.untyped_storage() not in self.known:
                storage = t.untyped_storage()
                self.known[storage] = size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self.drop, size)
        self.most = max(self.most, self.now)

    def ignore(self, tensors) -> None:
        """What was there before, views of it included, does not count."""
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self.known.setdefault(t.untyped_storage(), 0)

    def drop(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.paused:
            self.ignore((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            self.adopt(out)
        return out

    def run(self, work: Callable, passing: int):
        """Call what is one kernel, or a few, on a GPU: only its results and its passing bytes count."""
        paused, before = self.paused, self.now
        self.paused = True
        out = work()
        self.paused = paused
        self.most = max(self.most, before + passing)
        self.adopt(out)
        return out


def is_view(n: torch.fx.Node) -> bool:
    if n.target is operator.getitem:
        return True
    returns = getattr(getattr(n.target, "_schema", None), "returns", ())
    return n.op == "call_function" and len(returns) == 1 and returns[0].alias_info is not None


def is_pointwise(n: torch.fx.Node) -> bool:
    """A gather of a table's rows is pointwise as well."""
    others = (torch.ops.prims.convert_element_type.default, torch.ops.aten.embedding.default)
    return n.op == "call_function" and (
        torch.Tag.pointwise in getattr(n.target, "tags", ()) or n.target in others
    )


def fuses_inputs(n: torch.fx.Node) -> bool:
    """Reads pointwise work in one kernel with it: more of it, a reduction or concatenation, sums by index."""
    aten = torch.ops.aten
    joined = (aten.sum.dim_IntList, aten.mean.dim, aten.cat.default, aten.sum.default)
    return is_pointwise(n) or n.target in joined or "index_put" in str(n.target)


def node_bytes(n: torch.fx.Node) -> int:
    values = tree_leaves(n.meta.get("val"))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def graph_peak(graph: torch.fx.Graph, may_free: Callable[[torch.fx.Node], bool]) -> int:
    """Most bytes that a compiled graph holds beyond what it is given, as Inductor runs it: pointwise work is
    fused into what reads it unless a product, attention or the caller reads it; saved inputs are freed as
    soon as they are used, and a pointwise result takes the place of an input of its size.
    """
    order = list(graph.nodes)

    def read_by_kernel(n: torch.fx.Node) -> bool:
        return any(
            u.op == "output" or (read_by_kernel(u) if is_view(u) else not fuses_inputs(u)) for u in n.users
        )

    behind, held, last = {}, {}, {}  # of a node: the memory it reads, the memory it is; who reads that last
    for at, n in enumerate(order):
        behind[n] = set().union(*(held[source] for source in n.all_input_nodes))
        fused = is_view(n) or (is_pointwise(n) and not read_by_kernel(n))
        held[n] = behind[n] if fused else {n}
        if n.op == "output" or not fused:
            last |= dict.fromkeys(behind[n], at)
    now = most = 0
    for at, n in enumerate(order):
        if n.op != "call_function" or held[n] != {n}:
            continue
        dying = [s for s in behind[n] if last[s] == at and (s.op != "placeholder" or may_free(s))]
        new, in_place = node_bytes(n), is_pointwise(n) and any(node_bytes(s) == node_bytes(n) for s in dying)
        most = max(most, now + (0 if in_place else new))
        now += new - sum(map(node_bytes, dying))
    return most


def attention_ops() -> None:
    """Attention as one opaque operator that keeps what flex_attention keeps: q, k, v, its output and lse."""
    if hasattr(torch.ops.blockdraft_memory, "attend"):
        return
    library = torch.library.Library("blockdraft_memory", "FRAGMENT")
    library.define("attend(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
    inputs = ", ".join(f"Tensor {x}" for x in "gqkvol")
    library.define(f"backward({inputs}) -> (Tensor, Tensor, Tensor)")
    attention_ops.library = library  # it lives as long as this reference
    name = "blockdraft_memory::"
    torch.library.register_fake(
        name + "attend", lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32))
    )
    torch.library.register_fake(
        name + "backward", lambda g, q, k, v, out, lse: tuple(map(torch.empty_like, (q, k, v)))
    )
    torch.library.register_autograd(
        name + "attend",
        lambda ctx, g, _: torch.ops.blockdraft_memory.backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )


class Call(torch.nn.Module):
    """`fn(module, *inputs)` as a module's own forward."""

    def __init__(self, module: torch.nn.Module, fn: Callable):
        super().__init__()
        self.module, self.fn = module, fn

    def forward(self, *inputs):
        return self.fn(self.module, *inputs)


class Traced:
    """In place of a compiled unit `fn(module, *inputs)`: the same joint graph, cut by the same partitioner
    into what is kept. `reads`: part of the names of the parameters it has to do with.
    """

    def __init__(self, live: Live, fn: Callable, reads: tuple[str, ...] = ("",)):
        self.live, self.fn, self.reads, self.made = live, fn, reads, {}

    def __call__(self, module, *inputs):
        from torch._functorch import config
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        call = Call(module, self.fn)
        read = ((name, p) for name, p in call.named_parameters() if any(part in name for part in self.reads))
        names, values = zip(*read, strict=True)
        needs = inputs[0].requires_grad  # layer 0 has an input without gradient: a graph of its own
        if needs not in self.made:

            def forward(values, *inputs):
                state = dict(zip(names, values, strict=True))
                return torch.func.functional_call(call, state, inputs)

            self.made[needs] = aot_function(
                forward,
                fw_compiler=self.compiler(lambda n: False),
                bw_compiler=self.compiler(lambda n: not n.name.startswith("primals")),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
        self.live.ignore((values, inputs))
        self.live.paused = True  # tracing it, the first time
        try:
            with config.patch(ban_recompute_materialized_backward=False):  # as compile_utils.compile has it
                return self.made[needs](list(values), *inputs)
        finally:
            self.live.paused = False

    def compiler(self, may_free):
        def compile_graph(gm: torch.fx.GraphModule, _):
            most = graph_peak(gm.graph, may_free)

            def call(inputs: list):
                def work():
                    taken = list(inputs)
                    inputs.clear()
                    return gm(*taken)

                return self.live.run(work, most)

            call._boxed_call = True
            return call

        return compile_graph


@contextlib.contextmanager
def traceable():
    """model.py's attention and masks as operators that meta tensors can pass."""
    import model

    attention_ops()
    real = model.attend, model.dense_mask, model.packed_causal_attention

    def packed(q, k, v, *_):
        out = torch.ops.blockdraft_memory.attend(q, k, v)[0]
        return torch.where(torch.empty(len(q), 1, 1, device="meta", dtype=torch.bool), out, 0)

    model.attend = lambda q, k, v, mask: torch.ops.blockdraft_memory.attend(q, k, v)[0].flatten(1)
    model.dense_mask = lambda *_: None
    model.packed_causal_attention = packed
    try:
        yield
    finally:
        model.attend, model.dense_mask, model.packed_causal_attention = real


def trace_features(c, t: TargetConfig) -> int:
    """Peak bytes of Target.features besides weights and features, by running it on meta tensors in bf16."""
    import model

    d = c.drafter(t)
    with torch.device("meta"):
        # Its layers are alike: a few will do.
        target = model.Target(t, d.ids[0] + 1, head=False, parts=c.target_tp).bfloat16()
        out = torch.empty(c.token_budget, len(d.ids) * d.hidden, dtype=torch.bfloat16)
        row = torch.empty(c.token_budget, dtype=torch.int64)
    live = Live()
    whole = Traced(live, lambda layer, *inputs: model.TargetLayer.forward(layer, *inputs, None, 0))
    attention = Traced(live, lambda layer, *inputs: model.TargetLayer.attention(layer, *inputs, None, 0))
    target.run_layer = lambda *inputs: whole(*inputs[:4])
    target.run_attention = lambda *inputs: attention(*inputs[:4])
    target.run_gated = Traced(live, model.TargetLayer.gated)
    with traceable(), torch.no_grad(), live:
        target.features(row, row, row, c.max_length, [d.ids[0]], out)
    return live.most


def trace_step(c, t: TargetConfig) -> int:
    """Peak bytes of train.accumulate besides weights, gradients and features, run on meta tensors."""
    import data
    import model
    import train

    c = dataclasses.replace(c, anchors=min(c.anchors, 3 * c.anchor_chunk))  # a fourth chunk is like the third
    d = c.drafter(t)
    bf16 = {"device": "meta", "dtype": torch.bfloat16}
    table = torch.empty(d.vocab, d.hidden, **bf16)
    with torch.device("meta"):
        drafter = model.Drafter(d, table, table, dpace=c.loss_weights == "dpace")
    live = Live()
    of_context = ("fc.", "hidden_norm.", "k_proj.", "v_proj.", "k_norm.")
    drafter.run_context = Traced(live, model.Drafter.project_context, of_context)
    layer = Traced(live, lambda layer, *inputs: model.DrafterLayer.forward(layer, *inputs, None))
    drafter.run_layer = lambda *inputs_and_mask: layer(*inputs_and_mask[:-1])
    drafter.run_norm = Traced(live, model.RMSNorm.forward)
    drafter.run_loss = lambda *a, **k: live.run(lambda: model.cross_entropy_rows(*a, **k), a[0].nbytes)
    drafter.run_selector = Traced(live, model.selector_loss)
    job = types.SimpleNamespace(
        c=c, drafter=drafter, device=torch.device("meta"), facts={"mask_token": 0}, put=lambda x: x.to("meta")
    )
    batch = data.empty_batch(0, c.token_budget, c.max_batch_size, c.anchors)
    features_TKH = torch.empty(c.token_budget, len(d.ids) * d.hidden, **bf16)
    for p in drafter.parameters():
        p.grad = torch.empty_like(p)
    with traceable(), live:
        train.accumulate(job, drafter, batch, features_TKH, sync=True)
    return live.most


def compare_traced(report: Report, q: Question) -> None:
    """Estimate against trace, of what comes and goes. Good: within 10%."""
    for role, trace in (("drafter", trace_step), ("target", trace_features)):
        if role == "target" and q.config.target_backend != "native":
            of = f"--role target --target {shlex.quote(str(q.config.folder))} --target-backend transformers"
            fix = f"python -m diagnose.memory --measure {of}  # on a GPU"
            report.add("trace of a target", skip("of a transformers model there is none", fix))
            continue
        begun = time.perf_counter()
        c = dataclasses.replace(q.config, optimizer="adamw")  # the trace ends before the update
        traced, paper = trace(c, q.target), estimate(c, q.target, role, q.ranks)
        passing = sum(paper.parts[part] for part in PASSING)
        off = 100 * (passing / traced - 1)
        told = f"activations by formula {said(passing)}, traced {said(traced)} ({off:+.1f}%), "
        told += f"{time.perf_counter() - begun:.0f} s"
        data = {"role": role, "traced_gib": traced / GIB, "formula_gib": passing / GIB}
        if abs(passing / traced - 1) <= 0.1:
            report.add(f"trace of a {role}", ok(told, **data))
        else:
            fix = "python -m diagnose.memory --suite  # on a GPU: which of the two is right?"
            report.add(f"trace of a {role}", warn(told, fix, **data))


# ---------------------------------------------------------------- measured


class WorstCase:
    """In place of train.Batches: full rows of documents of the largest length, all of it supervised."""

    def __init__(self, c, t: TargetConfig):
        import numpy as np

        self.c, self.vocab = c, t.vocab
        ends = list(range(c.max_length, c.token_budget, c.max_length))[: c.max_batch_size - 1]
        bounds = [0, *ends, min(c.token_budget, c.max_length * (len(ends) + 1))]
        self.bounds = np.array(bounds + [c.token_budget] * (c.max_batch_size + 2 - len(bounds)), np.int32)
        self.documents = len(bounds) - 1
        self.facts = {
            "batches": c.steps * c.batches_per_step,
            "eval_batches": c.drafters,
            "mask_token": 4 if c.mask_token_id < 0 else c.mask_token_id,
            "sources": ["worst case"],
            "data": (),
            "about": "the worst batches there can be",
            "notes": [],
        }

    def batch(self, index: int, supervised: int):
        """Its first `supervised` tokens can be anchors; random tokens, so that no product is special."""
        import numpy as np

        import data

        tokens = data.empty_batch(index, self.c.token_budget, self.c.max_batch_size, self.c.anchors)
        at = np.arange(self.c.token_budget)
        doc = np.searchsorted(self.bounds[1 : self.documents + 1], at, side="right")
        real = doc < self.documents
        first = self.bounds[np.minimum(doc, self.documents - 1)]
        doc = np.where(real, doc, -1).astype(np.int32)
        mask = real & (at < supervised)
        valid = np.flatnonzero(data.valid_anchors(mask, doc))[: self.c.anchors]
        tokens.anchors_A[: len(valid)] = torch.from_numpy(valid)
        random = np.random.default_rng(index)
        tokens.tokens_T = torch.from_numpy(random.integers(min(5, self.vocab - 1), self.vocab, len(at)))
        tokens.positions_T = torch.from_numpy(np.where(real, at - first, 0))
        tokens.doc_T, tokens.mask_T = torch.from_numpy(doc), torch.from_numpy(mask)
        tokens.cu_seqlens = torch.from_numpy(self.bounds)
        tokens.source_D[: self.documents] = 0
        return tokens

    def train(self, b: int):
        return self.batch(b, self.c.token_budget)

    def evaluation(self, j: int):
        """Two chunks are enough: a third one would need no more."""
        return self.batch(j, 2 * self.c.anchor_chunk + 1)


class Alone:
    """Both ends of the stream for a role without its peer: `depth` buffers in turn, nothing sent."""

    def __init__(self, job):
        import stream

        self.job, self.waits, self.turn = job, stream.Waits(job.device), 0
        self.buffers = stream.Buffers(job.shapes, job.c.depth, job.device).all

    def buffer(self):
        self.turn += 1
        return self.buffers[self.turn % len(self.buffers)]

    def train(self, b: int):
        return self.job.batches.train(b), self.buffer()

    def evaluation(self, j: int):
        return self.job.batches.evaluation(j), self.buffer()

    def spare(self):
        return self.buffers[0]

    def nothing(self, *_) -> None:
        pass

    announce = announce_evaluation = release = send = close = nothing


def use_random_weights() -> None:
    """Let train.py's loading make weights up, on the device: a config.json is then enough."""
    import model

    def target(folder, device, dtype, layers=None, head=True, progress=False, part=0, parts=1):
        with torch.device("meta"):
            made = model.Target(TargetConfig.from_folder(folder), layers, head, parts)
        made = made.to(dtype).to_empty(device=device).requires_grad_(False).eval()
        for p in made.parameters():
            p.normal_(std=0.02)
        return made

    def tables(folder, device, dtype):
        t = TargetConfig.from_folder(folder)
        made = [torch.empty(t.vocab, t.hidden, device=device, dtype=dtype).normal_(std=0.02)]
        made += [] if t.tied else [made[0].clone()]
        return made[0], made[-1]

    model.Target.load, model.load_embedding_and_head = staticmethod(target), tables
    model.Drafter._reset = lambda self, seed: None  # torch's own initial weights do


def measure(q: Question, role: str, random_weights: bool, compile_only: bool = False) -> list[dict]:
    """Run the worst case on this rank and tell what every rank held; `role` alone on one rank, or empty."""
    import compile_utils
    import stream
    from world import Ending, World

    train, ranks = q.train, int(os.environ.get("WORLD_SIZE", 1))
    c = dataclasses.replace(q.config, steps=2, eval_every=2, save_every=1 << 30)
    ending, world = Ending(), World(c.layout, c.drafters, c.target_tp)
    world.join(c.device, allow_cpu=q.built_in)
    ending.watch(world)
    try:
        compile_utils.use_cache(c.compile_cache or None)
        if random_weights:
            use_random_weights()
        # The batches are made up and nothing is written; all the rest is what a run does.
        train.Batches, train.checkpoint.RunFolder = WorstCase, lambda run: None
        job = train.Job(c, q.target, world, ending, Path())
        job.with_budget = q.resolved
        if role:
            world.drafts, world.runs_target = role != "target", role != "drafter"
            world.role = role
        with train.memory_explained(job):
            job.load_models()
            stream.connect(world)
            train.gate(job)
            if not compile_only:
                run_loops(job, role)
        found = world.gather(read_memory(job, role or role_name(world.role), ranks))
        world.leave()
    except Exception as error:  # every rank must end with it
        code = train.end_badly(error, world, ending, None)
        sys.stdout.flush()
        os._exit(code)
    finally:
        torch.cuda.synchronize() if world.device.type == "cuda" else None
    ending.finished()
    return found


def run_loops(job, role: str) -> None:
    """train.py's own loops, with their real stream unless a role is alone."""
    import train

    if job.world.drafts:
        feed = (
            Alone(job)
            if role == "drafter"
            else train.Colocated(job)
            if job.world.colocate
            else train.Streamed(job)
        )
        train.run_drafter(job, feed, train.Pulse(job, feed.waits))
    else:
        sender = Alone(job) if role == "target" else train.sender_of(job)
        train.run_target(job, sender, train.Pulse(job, sender.waits))


def read_memory(job, role: str, ranks: int) -> dict:
    """Bytes at most: of the device (of the process, without a GPU), reserved, held by tensors; on paper."""
    import resource

    cuda = job.device.type == "cuda"
    paper = estimate(job.c, job.t, role, ranks, 2 if cuda else 4)
    outside = ("allocator", "CUDA and NCCL")
    found = {"name": job.world.name(), "role": role, "moment": paper.moment, "paper": paper.peak}
    found["paper_tensors"] = paper.peak - sum(paper.parts[part] for part in outside)
    found |= {
        "budget": job.c.token_budget,
        "chunk": job.c.anchor_chunk,
        "device": 0,
        "reserved": 0,
        "tensors": 0,
    }
    if not cuda:
        return found | {"device": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found["reserved"], found["tensors"] = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    # What the allocator gave back when it was short counts as well: it was held.
    return found | {"device": total - free - torch.cuda.memory_reserved() + found["reserved"]}


def measured_row(name: str, m: dict) -> list:
    off = m["paper"] - m["device"]
    row = [name, m["role"], m["budget"], m["chunk"], m["paper"], m["device"], off]
    row += [m["paper_tensors"], m["tensors"], m["reserved"] - m["tensors"], m["device"] - m["reserved"]]
    return row[:4] + [value / GIB for value in row[4:]] + [f"{100 * off / m['device']:+.1f}%", m["moment"]]


MEASURED = (
    "", "role", "budget", "chunk", "paper", "device", "paper-device", "tensors, paper", "tensors", "holes",
    "outside torch", "off", "moment",
)  # fmt: skip


def compare_measured(report: Report, rows: list[tuple[str, dict]]) -> None:
    """Paper against measured. Good: never below, and within the larger of 5% and 300 MiB."""
    report.table([measured_row(name, m) for name, m in rows], MEASURED, floatfmt=".2f")
    report.extra["measured"] = [{"of": name} | m for name, m in rows]
    for name, m in rows:
        off, told = m["paper"] - m["device"], f"paper {said(m['paper'])}, measured {said(m['device'])}"
        label = f"{name} {m['role']} {m['budget']}".strip()
        near = max(0.05 * m["device"], 300 * MIB) if m["reserved"] else m["paper"]  # no GPU: an upper bound
        if 0 <= off <= near:
            report.add(label, ok(told))
        else:
            how = "below" if off < 0 else "far above"
            fix = "python -m diagnose.memory --suite  # then set the constants of this file by its table"
            report.add(label, warn(f"{told}: the estimate is {how} what was measured", fix))


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128, "rope_theta": 1e6}
QWEN3 |= {"max_position_embeddings": 40960, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}


def sized(base: dict, hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return base | sizes | {"intermediate_size": intermediate, "tie_word_embeddings": tied}


SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "num_key_value_heads": 3}
SHAPES = {
    "smollm2-135m": sized(SMOLLM2 | {"max_position_embeddings": 8192}, 576, 30, 9, 1536, True),
    "qwen3-0.6b": sized(QWEN3, 1024, 28, 16, 3072, True),
    "qwen3-4b": sized(QWEN3, 2560, 36, 32, 9728, True),
    "qwen3-8b": sized(QWEN3, 4096, 36, 32, 12288, False),
}
SMOL = (
    "--draft-layers 4 --block-size 8 --token-budget 8960 --anchors 2048 --max-batch-size 32 --max-length 2048"
)
SMALL, MIDDLE = "--token-budget 16384", "--token-budget 16384 --anchor-chunk 1024"
SUITE = (  # those with the same shapes next to each other: the second finds the first one's compiled code
    ("tiny", "colocate", ""),
    ("smollm2-135m", "drafter", SMOL),
    ("smollm2-135m", "target", SMOL),
    ("smollm2-135m", "colocate", SMOL),
    ("qwen3-0.6b", "drafter", SMALL),
    ("qwen3-0.6b", "colocate", SMALL),
    ("qwen3-0.6b", "colocate", "--token-budget 147456"),  # more context than chunk
    ("qwen3-4b", "drafter", MIDDLE),
    ("qwen3-4b", "target", MIDDLE),
    ("qwen3-4b", "colocate", MIDDLE),
    ("qwen3-8b", "drafter", "--token-budget 12288"),
    ("qwen3-8b", "drafter", "--token-budget 49152"),
    ("qwen3-8b", "drafter", "--token-budget 49152 --fp8"),
    ("qwen3-8b", "target", SMALL),
    ("qwen3-8b", "target", "--token-budget 49152"),
    ("qwen3-8b", "colocate", "--token-budget 49152"),
)


def measured_child(flags: list[str], role: str, file: str, compile_only: bool) -> None:
    """One configuration in a process of its own; what it says goes to a log next to its result."""
    end_with_the_suite()
    log = os.open(f"{file}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    q = Question(flags, 1, 1)
    found = measure(q, "" if role == "colocate" else role, not q.built_in, compile_only)
    write_json(file, found[0])


def end_with_the_suite() -> None:
    """A process of the suite must not outlive it, however that ended: SIGTERM alone would let it go on."""
    import multiprocessing
    import signal
    import threading

    def watch():
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run_suite(report: Report, only: str, cache: str) -> None:
    """Measure each configuration of SUITE one after another; first compile all of them at the same time."""
    import multiprocessing
    import tempfile

    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["train"])
    with tempfile.TemporaryDirectory() as place:
        jobs = []
        for n, (name, role, flags) in enumerate(SUITE):
            if only and only not in f"{name} {role}":
                continue
            folder = Path(place, name)
            if name in SHAPES:
                folder.mkdir(exist_ok=True)
                (folder / "config.json").write_text(json.dumps(SHAPES[name]))
            target = ["--target", str(folder)] if name in SHAPES else []
            cached = ["--compile-cache", cache] if cache else []
            jobs.append((name, role, [*target, *flags.split(), *cached], f"{place}/{n}.json"))

        def start(job: tuple, compile_only: bool):
            _, role, flags, file = job
            child = processes.Process(target=measured_child, args=(flags, role, file, compile_only))
            child.start()
            return child

        first = {}  # one of each that compiles something
        for name, role, flags, file in jobs:
            if role != "target":
                first.setdefault(" ".join(flags), (name, "drafter", flags, f"{file}.cold"))
        report.say(
            f"compiling {len(first)} configuration(s) side by side, then measuring {len(jobs)} in turn: "
            f"about {len(jobs) / 2:g} minutes"
        )
        begun = time.perf_counter()
        for child in [start(job, True) for job in first.values()]:
            child.join(150)
        report.say(f"{len(first)} configurations compiled in {time.perf_counter() - begun:.0f} s")
        rows = []
        for job in jobs:
            begun, child = time.perf_counter(), start(job, False)
            child.join(120)
            if child.is_alive():
                child.kill()
                child.join()
            name, role, _, file = job
            if Path(file).exists():
                m = json.loads(Path(file).read_text())
                rows.append((name, m))
                found = (
                    f"{said(m['paper'])} on paper, {said(m['device'])} in use, {said(m['tensors'])} tensors"
                )
                # At once, not only in the table: a suite that is cut off has still measured something.
                report.say(
                    f"{name} {role} {m['budget']}/{m['chunk']}: {found} ({time.perf_counter() - begun:.0f} s)"
                )
            else:
                log = Path(f"{file}.log")
                last = (
                    (log.read_text().strip().splitlines() or ["said nothing"])[-1]
                    if log.exists()
                    else "no log"
                )
                fix = f"python -m diagnose.memory --suite --only {shlex.quote(f'{name} {role}')}"
                report.add(f"{name} {role}", fail(f"exit code {child.exitcode}: {last[:300]}", fix))
    compare_measured(report, rows)


# ---------------------------------------------------------------- the report


def parse_memory(text: str) -> int:
    """`96GB`, `80GiB`, `40000MiB` in bytes."""
    match = re.fullmatch(r"([\d.]+)\s*(GB|GiB|MiB|G)?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give the memory of a card, such as 96GB or 80GiB")
    unit = (match[2] or "GB").lower()
    return int(number * (MIB if unit == "mib" else GIB if unit == "gib" else 0.99 * GIB))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(own flags, flags of train.py)."""
    parser = Parser("diagnose.memory", __doc__)
    parser.add_argument(
        "--ranks", type=int, default=0, help="ranks of the job (8, with the built-in target 2)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes they are on")
    parser.add_argument("--gpu-memory", type=parse_memory, metavar="96GB", help="default: this machine's GPU")
    parser.add_argument("--headroom", type=float, default=0.0, metavar="%", help="to leave free, percent (0)")
    parser.add_argument("--png", type=picture, metavar="FILE", help="draw each role against the card")
    parser.add_argument("--trace", action="store_true", help="also find activations on tensors without data")
    parser.add_argument(
        "--measure", action="store_true", help="run the worst case here, alone or under torchrun"
    )
    parser.add_argument(
        "--role", choices=("drafter", "target"), default="", help="measure one role, on one rank"
    )
    parser.add_argument("--random-weights", action="store_true", help="measure from a config.json alone")
    parser.add_argument(
        "--suite", action="store_true", help="measure a dozen shapes, each in its own process"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="of the suite, those whose name has TEXT")
    add_arguments(parser)
    return parser.parse_known_args(argv)


def machine(wanted: int | None, built_in: bool, ranks: int) -> tuple[int, int, str]:
    """(bytes a rank has, size of an element, words for it); raises skip where nothing is known."""
    if wanted:
        return wanted, 2, f"a card of {gib(wanted)} GiB"
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]
        return total, 2, f"{torch.cuda.get_device_name(0)}, {gib(total)} GiB"
    if not built_in:
        raise skip("no GPU here to compare with", "python -m diagnose.memory --gpu-memory 96GB")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // ranks, 4, f"no GPU: {gib(pages)} GiB of host memory for {ranks} ranks"


class Question:
    """One configuration to be judged: what was asked, and what train.py makes of it."""

    def __init__(self, flags: list[str], ranks: int, nodes: int):
        import train

        asked = train.parse_flags(flags)
        if Path(asked.target).name == "config.json":
            asked.target = str(Path(asked.target).parent)
        asked.data = asked.data or (["any.jsonl"] if asked.target else [])  # its size does not depend on it
        self.asked, self.built_in, self.nodes = asked, not asked.target, nodes
        self.ranks = ranks or (2 if self.built_in else 8)
        if nodes < 1 or self.ranks < 1 or self.ranks % nodes:
            raise ValueError(
                f"--ranks {self.ranks} --nodes {nodes}: give as many ranks to each node, 1 or more"
            )
        self.target = train.backend(asked).TargetConfig.from_folder(asked.folder)
        self.train = train
        self.config = self.resolved(asked.token_budget)

    def resolved(self, budget: int, **more):
        changed = dataclasses.replace(self.asked, token_budget=budget, **more)
        return self.train.resolve(changed, self.target, self.ranks, self.nodes)


def judge(q: Question, role: str, have: int, size: int) -> tuple[Finding, Estimate]:
    """Does this role fit, and how far could its flags go?"""
    found = estimate(q.config, q.target, role, q.ranks, size)
    budget, squeezed = (
        largest_token_budget(q.resolved, q.target, role, q.ranks, have, size, squeezed)
        for squeezed in (False, True)
    )
    chunk = largest_anchor_chunk(q.config, q.target, role, q.ranks, have, size)
    left = have - found.peak
    data = {
        "role": role,
        "peak_gib": found.peak / GIB,
        "headroom_gib": left / GIB,
        "largest_token_budget": budget,
        "squeezed_token_budget": squeezed,
        "largest_anchor_chunk": None if role == "target" else chunk,
        "moment": found.moment,
        "parts_gib": {part: n / GIB for part, n in found.parts.items()},
    }
    largest = f"largest --token-budget {budget}" if budget else "no --token-budget fits"
    largest += f" (up to {squeezed} may run, slower)" if squeezed > budget else ""
    largest += f", --anchor-chunk {chunk} of {q.config.anchors}" if role != "target" and chunk else ""
    told = f"{gib(found.peak)} of {gib(have)} GiB at its peak ({found.moment})"
    if left < 0:
        return fail(f"does not fit: {told}; {largest}", launches(q, role, have, size), **data), found
    if left < TIGHT * have:
        fix = launches(q, role, have, size, fits=True)
        return warn(f"fits, but only {gib(left)} GiB are left: {told}; {largest}", fix, **data), found
    return ok(f"fits: {told}, {gib(left)} left; {largest}", **data), found


def launches(q: Question, role: str, have: int, size: int, fits: bool = False) -> str:
    """The commands that would do: with room to spare, or just so where that would cut documents."""
    found, cut = smaller(q, role, int((1 - TIGHT) * have), size)
    if cut and not fits:
        found, _ = smaller(q, role, have, size)
    if role == "target" and not fits:
        tp = smallest_target_tp(q.config, q.target, q.ranks // q.nodes, have, size)
        found += [f"{train_command(q, target_tp=tp)}  # each target on {tp} GPUs"] if tp else []
    helps = "a larger card, a smaller target or fewer --draft-layers"
    nothing = (
        f"{train_command(q)}  # nothing leaves more room but {helps}" if fits else f"only {helps} would do"
    )
    return "\n".join(found) or nothing


def smaller(q: Question, role: str, have: int, size: int) -> tuple[list[str], bool]:
    """(commands that fit, must the first of them cut documents?): a smaller budget, at smaller chunks where
    that spares the documents, and the same budget at smaller chunks.
    """
    c = q.config
    length, chunk = min(c.max_length, c.token_budget), c.anchor_chunk

    def largest(chunk: int) -> int:
        resolved = functools.partial(q.resolved, anchor_chunk=chunk)
        return min(c.token_budget, largest_token_budget(resolved, q.target, role, q.ranks, have, size))

    budget = largest(chunk)
    while role != "target" and budget < length and chunk > LEAST_CHUNK:
        chunk = max(LEAST_CHUNK, chunk // 32 * 16)  # a multiple of 16, for 8-bit products
        budget = largest(chunk)
    found, cut = [], budget < length
    if budget:
        more = {"anchor_chunk": chunk} if chunk < c.anchor_chunk else {}
        other = "a larger card" if role == "target" else "fewer --draft-layers or a larger card"
        note = f"  # cuts documents to {budget} tokens: {other} would not" if cut else ""
        found.append(train_command(q, token_budget=budget, **more) + note)
    same = largest_anchor_chunk(c, q.target, role, q.ranks, have, size) if role != "target" else 0
    if 0 < same < c.anchor_chunk:
        line = train_command(q, token_budget=c.token_budget, anchor_chunk=same)
        kept = [] if cut or budget == c.token_budget else found
        found, cut = [*kept, f"{line}  # the same budget, a chunk at a time"], False
    return found, cut


def train_command(q: Question, **changed) -> str:
    """The launch that was asked for, but for what is `changed`."""
    default, flags = dataclasses.asdict(type(q.asked)()), []
    for name, value in (dataclasses.asdict(q.asked) | changed).items():
        auto = name == "token_budget" and value < 0
        if auto or value in (default[name], ["any.jsonl"]):
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    return f"torchrun --nproc_per_node={q.ranks // q.nodes} train.py {shlex.join(flags)}".rstrip()


def compare(report: Report, q: Question, have: int, size: int, png: str | None = None) -> None:
    """The table of all roles, then a verdict for those that the layout has."""
    c, judged = q.config, {role: judge(q, role, have, size) for role in ROLES}
    shared = f", {c.target_tp} to a target" if c.target_tp > 1 else ""
    report.say(
        f"{c.folder}: {c.layout}, {q.ranks} rank(s){shared}, --token-budget {c.token_budget} "
        f"--anchors {c.anchors} --anchor-chunk {c.anchor_chunk} --max-batch-size {c.max_batch_size}"
    )
    rows = [
        [part, *(found.parts[part] / GIB for _, found in judged.values())]
        for part in PARTS
        if any(found.parts[part] for _, found in judged.values())
    ]
    rows.append(["peak", *(found.peak / GIB for _, found in judged.values())])
    rows.append(["headroom", *((have - found.peak) / GIB for _, found in judged.values())])
    by_moment = {role: peaks(c, q.target, role, q.ranks, size) for role in ROLES}
    names = list(dict.fromkeys(name for peaks_of in by_moment.values() for name in peaks_of))
    rows += [
        [f"at: {name}", *(by_moment[role].get(name, 0) / GIB or None for role in ROLES)] for name in names
    ]
    report.table(rows, ["GiB", *ROLES], floatfmt=".2f")
    report.extra["roles"] = {role: finding.data for role, (finding, _) in judged.items()}
    for role in roles_of(c.layout):
        report.add(role, judged[role][0])
    if png:
        draw(png, {role: found for role, (_, found) in judged.items()}, have, f"{c.folder}")
        report.say(f"drawn: {png}")


def draw(file: str, found: dict[str, Estimate], have: int, title: str) -> None:
    """Stacked bars of each role, the card as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5), constrained_layout=True)
    colors = plt.get_cmap("tab20").colors
    bottoms = [0.0] * len(found)
    for i, part in enumerate(PARTS):
        heights = [e.parts[part] / GIB for e in found.values()]
        if not any(heights):
            continue
        axis.bar(list(found), heights, bottom=bottoms, label=part, color=colors[i], width=0.55)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    for i, (top, e) in enumerate(zip(bottoms, found.values(), strict=True)):
        axis.annotate(f"{top:.1f} GiB\n{e.moment}", (i, top), ha="center", va="bottom", fontsize=8)
    axis.axhline(have / GIB, color="black", ls="--", lw=1)
    axis.text(-0.3, have / GIB, f"the card: {gib(have)} GiB", va="bottom", fontsize=8)
    axis.set(ylabel="GiB", ylim=(0, 1.15 * max(have / GIB, *bottoms)), title=title)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=110)
    plt.close(figure)


def checks(report: Report, args=None) -> None:
    """What `python -m diagnose` asks: would the main command fit on this machine?"""

    def check() -> Finding:
        q = Question([], 0, 1)
        have, size, words = machine(None, True, q.ranks)
        findings = [judge(q, role, have, size)[0] for role in roles_of(q.config.layout)]
        for role, finding in zip(roles_of(q.config.layout), findings, strict=True):
            finding.name, finding.message = role, f"built-in target, {words}: {finding.message}"
        return findings

    report.run("memory", check)


def check_host(q: Question, role: str) -> None:
    """ValueError where the ranks of this node would measure on a CPU that has not the memory for it."""
    if q.config.device != "cpu" and torch.cuda.is_available():
        return
    c, each = q.config, q.ranks // q.nodes
    drafters = c.drafters // q.nodes
    ranks = (
        {"drafter": drafters, "target": each - drafters}
        if c.layout == "split"
        else {role or "colocate": each}
    )
    need = sum(n * estimate(c, q.target, role, q.ranks, 4).peak for role, n in ranks.items())
    have = host_memory()
    if need > have:
        raise ValueError(
            f"--measure: the CPU needs {said(need)}, {said(have)} are free: use a GPU or a smaller target"
        )


def host_memory() -> int:
    """Bytes that this machine, or its container, has available."""
    from diagnose.env import memory_gib

    files = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current")]
    of_group = [file.read_text() if file.is_file() else None for file in files]
    return int(memory_gib(Path("/proc/meminfo").read_text(), *of_group)[1] * GIB)


def main(argv: list[str] | None = None) -> int:
    args, flags = parse(argv)
    rank = int(os.environ.get("RANK", 0))
    report = Report("memory", args, quiet=rank > 0)
    try:
        if args.measure:
            args.ranks = int(os.environ.get("WORLD_SIZE", 1))
            args.nodes = args.ranks // int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
            if args.role and args.ranks > 1:
                raise ValueError("--role: one role is measured on one rank: start it without torchrun")
        q = Question(flags, args.ranks, args.nodes)
        if q.asked.token_budget < 0:
            raise ValueError(
                "--token-budget auto: leave it out: the largest that fits is told, --headroom 5 tells auto's"
            )
        if not 0 <= args.headroom < 100:
            raise ValueError(f"--headroom {args.headroom:g}: a percentage, 0 to 99")
        if args.suite and not torch.cuda.is_available():
            raise ValueError("--suite: no GPU here to measure on: start it where torch sees one")
        if args.measure:
            check_host(q, args.role)
    except ValueError as error:
        return refuse(f"diagnose.memory: {error}")
    if args.suite:
        run_suite(report, args.only, q.asked.compile_cache)
        return report.finish()
    if args.measure:
        found = measure(q, args.role, args.random_weights)
        compare_measured(report, [(m["name"], m) for m in found])
        return report.finish()
    try:
        have, size, words = machine(args.gpu_memory, q.built_in, q.ranks)
    except Finding as finding:
        again = shlex.join(sys.argv[1:] if argv is None else argv)
        finding.fix = f"python -m diagnose.memory {again} --gpu-memory 96GB"
        report.add("memory", finding)
        return report.finish()
    report.say(words)
    compare(report, q, int(have * (1 - args.headroom / 100)), size, args.png)
    if args.trace:
        compare_traced(report, q)
    return report.finish()


if __name__ == "__main__":
    leave(main())
