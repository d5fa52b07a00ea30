"""How fast will it be, how should the ranks be split, and why is this run slow?

    python -m diagnose.throughput [--gpus 8] [--target DIR] [flags of train.py] # sides alone, then all splits
    torchrun --nproc_per_node=8 -m diagnose.throughput [flags of train.py]      # and one split tried out
    python -m diagnose.throughput RUN_DIR                                       # what slows a run, by its log
    python -m diagnose.throughput --simulate nodes=8,gpus=8,link=400Gb,gpu=H200 # a cluster on paper
    python -m diagnose.throughput --gpus 8 --png timeline.png                   # draw the best split

Measured with random weights on the job's shapes: with --data (or the built-in target) on its batches,
else on full rows of documents of --max-length. A target makes features, a link carries them, a drafter uses
them, every rank has --depth buffers, and a step ends with the gradients' all-reduce and the update. From
these five times the steps of any split follow one after another.

--simulate: nodes; gpus of a node; link, what all network cards of a node carry each way (400Gb or 50GB);
nvlink between GPUs of a node (300GB); gpu, a name of the table below, for times on paper, or target_ms and
drafter_ms (of a batch) and update_ms (of a step). Features never leave their node, gradients do.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # python diagnose/throughput.py: same imports as python -m diagnose.throughput
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from diagnose.report import Finding, Parser, Report, add_arguments, fail, leave, ok, picture, skip, warn

GPUS = {  # dense bf16 TFLOP/s by data sheet; the later name wins where two fit
    "A100": 312, "A10": 125, "A40": 150, "A6000": 155, "L4": 121, "L40": 181, "L40S": 362, "H20": 148,
    "H100": 989, "H100 PCIe": 756, "H200": 989, "B200": 2250, "B300": 2250, "RTX 3090": 71, "RTX 4090": 165,
    "RTX 5090": 209, "RTX PRO 6000": 504,
}  # fmt: skip
REACHED = 0.8  # of the data sheet by large products of random data (790 of 989 measured on an H200)
PAPER = 0.6  # of that by a whole side, on paper
LAUNCHING_S = 1.5e-3  # of an uncompiled layer of a batch, at most: small models are bound by it
TARGET_LAYER_S, DRAFT_LAYER_S = 0.45e-3, 4e-3  # of a compiled one, at least: SmolLM2 beside an H200
BUCKET = 25 << 20  # bytes of DDP's buckets: the last one cannot hide behind the backward
SLOW, BROKEN = 1.6, 2.5  # times what a side should take: worth a warning, a failure
IDLE = 0.25  # share of a step spent waiting that is worth a word
NVLINK = 300e9  # bytes/s between two GPUs of a node, where nothing was measured
MOST_GPUS, MOST_NODES = 128, 1 << 20  # of a node, since every split of it is walked; of a job
BEYOND = 1e15  # a number that large was not measured


# ---------------------------------------------------------------- the model of the pipeline


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds: of a batch on each side and on the link, and of what ends a step."""

    target: float
    drafter: float
    transfer: float = 0.0
    update: float = 0.0
    reduce: float = 0.0  # of the gradients' all-reduce, what the backward does not hide


@dataclasses.dataclass
class Plan:
    """One split of a node's GPUs and what it would do; idle shares are means over the side's ranks."""

    layout: str
    targets: int
    drafters: int
    per_step: int  # batches of a step, of this node
    step_s: float
    idle_target: float
    idle_drafter: float
    spans: list[tuple[str, str, float, float]] = dataclasses.field(default_factory=list, repr=False)
    reduce_s: float = 0.0  # of a step, for gradients
    note: str = ""
    tp: int = 1  # GPUs of a target

    @property
    def batches_per_s(self) -> float:
        return self.per_step / self.step_s


def pipeline(
    t: Times, targets: int, drafters: int, per_step: int, depth: int, steps: int
) -> tuple[list[float], list[tuple[str, str, float, float]]]:
    """(end of each step, spans (rank, what, begin, end)) of a node, in the order of its batches.

    A target begins a batch when it is done with the one before and a buffer's message has left. A message
    goes when its features stand, its receive is posted (a buffer was released) and both ends are done with
    the message before. A drafter begins when it is there. Then come the step's all-reduce and update.
    """
    made: list[list[float]] = [[] for _ in range(targets)]
    left: list[list[float]] = [[] for _ in range(targets)]
    come: list[list[float]] = [[] for _ in range(drafters)]
    used: list[list[float]] = [[] for _ in range(drafters)]
    free, ends, spans = [0.0] * drafters, [], []
    for b in range(steps * per_step):
        i, j = b % targets, b % drafters
        n, m = len(made[i]), len(used[j])
        begin = max(made[i][-1] if n else 0.0, left[i][n - depth] if n >= depth else 0.0)
        ready = begin + t.target
        posted = used[j][m - depth] if m >= depth else 0.0
        go = max(ready, posted, left[i][-1] if n else 0.0, come[j][-1] if m else 0.0)
        there = go + t.transfer
        start = max(there, free[j])
        free[j] = start + t.drafter
        made[i].append(ready), left[i].append(there), come[j].append(there), used[j].append(free[j])
        spans += [(f"target {i}", "features", begin, ready), (f"target {i}", "send", go, there)]
        spans.append((f"drafter {j}", "drafter", start, free[j]))
        if (b + 1) % per_step == 0:
            end = max(free) + t.reduce + t.update
            spans += [(f"drafter {k}", "update", max(free), end) for k in range(drafters)]
            free = [end] * drafters
            ends.append(end)
    return ends, spans


def split_plan(t: Times, targets: int, drafters: int, per_step: int, depth: int) -> Plan:
    """The steady state of a split: the mean over whole rounds, late enough for the buffers to be full."""
    round_of = math.lcm(targets, per_step) // per_step  # steps until the same ranks meet again
    window = round_of * -(-24 // round_of)
    warm = window + 2 * depth * (targets + drafters)
    ends, spans = pipeline(t, targets, drafters, per_step, depth, warm + window)
    step_s = (ends[-1] - ends[-1 - window]) / window
    busy_target = t.target * per_step / targets / step_s
    busy_drafter = (t.drafter * per_step / drafters + t.update + t.reduce) / step_s
    late = [s for s in spans if s[3] > ends[warm]]
    idle = (max(0.0, 1 - share) for share in (busy_target, busy_drafter))
    return Plan("split", targets, drafters, per_step, step_s, *idle, late, t.reduce)


def colocate_plan(t: Times, gpus: int, per_step: int) -> Plan:
    """Every rank makes its features and uses them in turn; nothing is sent, nobody waits."""
    each = per_step / gpus
    step_s = each * (t.target + t.drafter) + t.update + t.reduce
    spans, at = [], 0.0
    for _ in range(4):
        for name, part in (("features", each * t.target), ("drafter", each * t.drafter), ("update", None)):
            end = at + part if part else math.ceil(at / step_s + 1e-9) * step_s
            spans += [(f"rank {r}", name, at, end) for r in range(gpus)]
            at = end
    return Plan("colocate", gpus, gpus, per_step, step_s, 0.0, 0.0, spans, t.reduce)


def exposed_reduce(
    size: float, drafters: int, nodes: int, nvlink: float, link: float, backward_s: float
) -> float:
    """Seconds of a ring all-reduce of `size` bytes that the last batch's backward does not hide.

    `drafters` of each node; every node's link carries the whole ring once in and once out.
    """
    ranks = drafters * nodes
    if ranks == 1 or not size:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * size
    whole = max(moved / nvlink if drafters > 1 else 0.0, moved / link if nodes > 1 else 0.0)
    return max(whole * min(1.0, BUCKET / size), whole - backward_s)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the job has: nodes of so many GPUs, and bytes/s between GPUs and between nodes."""

    gpus: int
    nodes: int = 1
    nvlink: float = NVLINK
    link: float = 50e9


def plans(
    t: Times, m: Machine, per_step: int, depth: int, gradient: float, chunks: int = 1, tp: int = 1
) -> list[Plan]:
    """Every split of a node and colocate, the fastest first; `per_step` 0: a batch for each drafter; `tp`
    GPUs a target, which leaves no colocate.

    Two that are within 1% are as good: then the one with fewer drafters, whose gradients travel less.
    """
    found = []
    for drafters in range(1, m.gpus + 1):
        mine = per_step // m.nodes if per_step else drafters
        if mine % drafters or mine * m.nodes != (per_step or drafters * m.nodes):
            continue
        targets, rest = divmod(m.gpus - drafters, tp)
        if rest or (tp > 1 and not targets):
            continue
        hidden = t.drafter * 2 / 3 / chunks  # the last chunk's backward, which DDP overlaps with
        exposed = exposed_reduce(gradient, drafters, m.nodes, m.nvlink, m.link, hidden)
        times = dataclasses.replace(t, reduce=exposed)
        if drafters == m.gpus:
            found.append(colocate_plan(times, m.gpus, mine))
        else:
            found.append(split_plan(times, targets, drafters, mine, depth))
        found[-1].tp = tp
    found.sort(key=lambda p: -p.batches_per_s)
    near = [p for p in found if p.batches_per_s > 0.99 * found[0].batches_per_s] if found else []
    near.sort(key=lambda p: p.drafters)
    return near + found[len(near) :]


# ---------------------------------------------------------------- each side alone


class Question:
    """The job that is asked about: its config for one rank or for this world, its target, its sizes."""

    def __init__(self, flags: list[str], ranks: int, nodes: int = 1):
        import train

        self.train, asked = train, train.parse_flags(flags)
        if asked.token_budget == train.AUTO:
            raise ValueError(
                "--token-budget auto: give a number; python -m diagnose.memory tells the largest that fits"
            )
        self.layout, self.tp = asked.layout, asked.target_tp
        if ranks == 1:  # every split is looked at
            asked.layout, asked.drafters = "", 0
            flags = without(flags, ("--layout", "--drafters"))
        self.flags = flags
        if Path(asked.target).name == "config.json":
            asked.target = str(Path(asked.target).parent)
        self.own_data = bool(asked.data) or not asked.target
        asked.data = asked.data or (["made-up.jsonl"] if asked.target else [])
        self.per_step = asked.batches_per_step
        self.target = train.backend(asked).TargetConfig.from_folder(asked.folder)
        if self.tp > 1 and ranks == 1:
            train.check_tp(dataclasses.replace(asked, layout=self.layout), self.target, self.tp + 1)
            asked.target_tp = 1
        self.config = train.resolve(asked, self.target, ranks, nodes)
        c = self.config
        self.drafter = c.drafter(self.target)

    @property
    def gradient(self) -> int:
        """Bytes of a drafter's gradients."""
        return 4 * self.drafter.parameters()

    def feature_bytes(self, size: int) -> int:
        return self.drafter.feature_bytes(self.config.token_budget, size)

    def must_be_whole(self) -> None:
        if self.tp > 1:
            raise ValueError(
                f"--target-tp {self.tp}: only whole targets are timed: leave it out, or ask the paper: "
                "--simulate gpus=8,gpu=H200"
            )

    def batches(self) -> type:
        import bench

        return self.train.Batches if self.own_data else bench.RandomBatches

    @property
    def chunks(self) -> int:
        return self.config.anchors // self.config.anchor_chunk

    def work(self) -> tuple[float, float]:
        """Useful FLOPs of a batch: (the target's, the drafter's)."""
        c, d = self.config, self.drafter
        context = c.max_length / 4  # of a slot, where documents are of any length up to that
        theirs = self.target.prefill_flops(c.token_budget, max(d.ids) + 1)
        return theirs, d.step_flops(c.token_budget, c.anchors, context)


def without(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """Flags of train.py but these, which take one value."""
    at = [i for i, f in enumerate(flags) if f.split("=")[0] in names]
    gone = {i + k for i in at for k in range(1 if "=" in flags[i] else 2)}
    return [f for i, f in enumerate(flags) if i not in gone]


def pace(job, work, count: int = 6) -> float:
    """Seconds of one of `count` calls in a row, the host's part included, after two to warm up."""
    import bench

    for i in range(count + 2):
        if i == 2:
            bench.wait(job.device.type == "cuda")
            begun = time.perf_counter()
        work(i)
    bench.wait(job.device.type == "cuda")
    return (time.perf_counter() - begun) / count


def side_alone(job, batches: list, count: int = 6) -> dict[str, float]:
    """What this rank's role takes without the other side, in seconds."""
    import torch

    import bench

    if job.world.drafts:
        step, _ = bench.drafter_work(job, batches)
        found = {"drafter": pace(job, step, count)}
        weight = step(0)[1]
        found["update"] = pace(job, lambda i: job_update(job, weight), 3)
        job.optimizer.zero_grad()
        return found
    out_TKH = torch.empty(job.shapes.tokens, job.shapes.width, dtype=job.dtype, device=job.device)
    with torch.no_grad():
        found = {"target": pace(job, lambda b: job.make_features(job.batches.train(b), out_TKH), count)}
    return found | {"data": pace(job, job.batches.train, 10)}


def job_update(job, weight) -> None:
    import train

    train.update(job, weight, 0.0)


def measure_role(q: Question, role: str) -> dict:
    """One side on this process's device, as train.py runs it; for a process of its own."""
    import bench

    with bench.job_of(q.config, q.target, role, q.batches()) as job:
        batches = [job.batches.train(b) for b in range(8)]
        found = side_alone(job, batches) | {
            "size": job.dtype.itemsize,
            "gpu": gpu_name(),
            "total": total_batches(job),
        }
        found["tokens"] = sum(int((b.doc_T >= 0).sum()) for b in batches) / 8
    return found


def total_batches(job) -> int:
    """Batches of the whole run; 0 where the data are made up."""
    made_up = job.facts["batches"] == 1 << 20
    return 0 if made_up else job.total_steps * job.c.batches_per_step


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def measure_sides(flags: list[str], report: Report) -> dict:
    """Both sides one after the other, each in a process that ends before the next begins, with the threads
    that torchrun gives a rank.
    """
    found, environment = {}, {"OMP_NUM_THREADS": "1"} | os.environ
    with tempfile.TemporaryDirectory() as place:
        for role in ("target", "drafter"):
            file = f"{place}/{role}.json"
            command = [sys.executable, str(Path(__file__).resolve()), "--measure-role", role, file, *flags]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if not Path(file).exists():
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
                what = "step" if role == "drafter" else "target"
                raise fail(f"the {role} alone failed: {last}", f"python bench.py {what} {shlex.join(flags)}")
            found |= json.loads(Path(file).read_text())
    report.say(
        f"alone on {found['gpu']}, a batch: features {1000 * found['target']:.1f} ms (making the batch "
        f"{1000 * found['data']:.1f}), drafter {1000 * found['drafter']:.1f} ms; update "
        f"{1000 * found['update']:.1f} ms a step"
    )
    return found


# ---------------------------------------------------------------- recommend


def show_plans(report: Report, listed: list[Plan], m: Machine, tokens: float, total: int) -> None:
    """All splits as a table, the fastest first."""
    rows = []
    for p in listed:
        per_s, split = p.batches_per_s * m.nodes, p.layout == "split"
        of = f" of {p.tp}" if p.tp > 1 else ""
        name = f"{p.targets}{of} + {p.drafters}" if split else "colocate"
        idle = [f"{100 * share:.0f}%" if split else "-" for share in (p.idle_target, p.idle_drafter)]
        eta = clock(total / per_s) if total else "-"
        rows.append((name, 1000 * p.step_s, 1000 * p.reduce_s, per_s * tokens / 1000, *idle, eta, p.note))
    heads = ("targets + drafters", "step ms", "reduce ms", "Ktok/s", "idle t", "idle d", "eta", "")
    shown = len(heads) - (not any(p.note for p in listed))
    report.table([row[:shown] for row in rows], heads[:shown], floatfmt=",.1f")
    report.extra["plans"] = [
        {k: v for k, v in dataclasses.asdict(p).items() if k != "spans"}
        | {"tokens_per_s": p.batches_per_s * m.nodes * tokens, "eta_s": total / (p.batches_per_s * m.nodes)}
        for p in listed
    ]


def clock(seconds: float) -> str:
    import train

    return train.duration(seconds)


def mark_memory(q: Question, listed: list[Plan], m: Machine, have: int) -> list[Plan]:
    """Plans that fit first; the others say what does not."""
    import headroom

    for p in listed if have else ():
        for role in headroom.roles_of(p.layout):
            split = {"layout": p.layout, "drafters": p.drafters * m.nodes, "target_tp": p.tp}
            c = dataclasses.replace(q.config, **split)
            if headroom.estimate(c, q.target, role, m.gpus * m.nodes).peak > have:
                p.note = f"a {role} rank does not fit"
    return sorted(listed, key=lambda p: bool(p.note))


def recommend(report: Report, q: Question, t: Times, m: Machine, facts: dict, png: str) -> None:
    """The table of all splits, the best one as a command."""
    per_step = q.per_step
    listed = plans(t, m, per_step, q.config.depth, q.gradient, q.chunks, q.tp)
    listed = [p for p in listed if p.layout == (q.layout or p.layout)]
    if not listed:
        fix = f"python -m diagnose.throughput --gpus {m.gpus}  # and leave --batches-per-step out"
        told = f"no split of {m.gpus} GPU(s) has that --layout, divides --batches-per-step {per_step}"
        told += f" and has targets of {q.tp} GPUs" if q.tp > 1 else ""
        report.add("split", fail(told, fix))
        return
    listed = mark_memory(q, listed, m, facts.get("memory", 0))
    show_plans(report, listed, m, facts["tokens"], facts.get("total", 0))
    best = listed[0]
    report.say(f"start it with: {launch(q, best, m)}")
    told = describe(best, m, facts["tokens"])
    other = next((p for p in listed if p.layout != best.layout and not p.note), None)
    told += f"; next {describe(other, m, facts['tokens'])}" if other else ""
    data = {"layout": best.layout, "drafters": best.drafters * m.nodes, "step_ms": 1000 * best.step_s}
    waiting = best.reduce_s / best.step_s
    if best.note:
        fix = f"python -m diagnose.memory {shlex.join(q.flags)}"
        report.add("split", fail(f"nothing fits: {best.note}", fix))
    elif waiting > IDLE:
        told += f"; {100 * waiting:.0f}% of a step the drafters wait for each other's gradients"
        fix = f"--batches-per-step {4 * best.per_step * m.nodes}  # add it: fewer steps send gradients"
        report.add("split", warn(told, fix, **data))
    else:
        report.add("split", ok(told, **data))
    if png:
        draw(png, best)
        report.say(f"drawn: {png}")


def describe(p: Plan, m: Machine, tokens: float) -> str:
    of = f" of {p.tp} GPUs" if p.tp > 1 else ""
    split = f"{p.targets} target(s){of} + {p.drafters} drafter(s)" if p.layout == "split" else "colocate"
    idle = f", idle t {100 * p.idle_target:.0f}% d {100 * p.idle_drafter:.0f}%" if p.layout == "split" else ""
    each = " on each node" if m.nodes > 1 else ""
    return f"{split}{each}: {ktok(tokens * p.batches_per_s * m.nodes)}{idle}"


def ktok(per_s: float) -> str:
    return f"{per_s / 1000:.3g} Ktok/s" if per_s < 1e5 else f"{per_s / 1000:,.0f} Ktok/s"


def launch(q: Question, p: Plan, m: Machine) -> str:
    split = ["--layout", "colocate"] if p.layout == "colocate" else ["--drafters", str(p.drafters * m.nodes)]
    start = "python" if m.gpus * m.nodes == 1 else f"torchrun --nproc_per_node={m.gpus}"
    start += f" --nnodes={m.nodes}" if m.nodes > 1 else ""
    return f"{start} train.py {shlex.join([*q.flags, *split])}"


def draw(file: str, p: Plan) -> None:
    """The timeline of a few steps in steady state, a bar a rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"features": "tab:blue", "send": "tab:cyan", "drafter": "tab:orange", "update": "tab:red"}
    first = min(s[2] for s in p.spans)
    until = first + 4 * p.step_s
    ranks = sorted({s[0] for s in p.spans})
    figure, axis = plt.subplots(figsize=(11, 1.2 + 0.45 * len(ranks)), constrained_layout=True)
    for what, color in colors.items():
        for rank in ranks:
            bars = [(1000 * (a - first), 1000 * (b - a)) for r, w, a, b in p.spans if (r, w) == (rank, what)]
            bars = [bar for bar in bars if bar[0] < 1000 * (until - first)]
            low, height = (
                (ranks.index(rank) + 0.28, 0.1) if what == "send" else (ranks.index(rank) - 0.3, 0.55)
            )
            axis.broken_barh(bars, (low, height), color=color, edgecolor="white", linewidth=0.4)
        axis.plot([], [], color=color, lw=6, label=what)
    axis.set(yticks=range(len(ranks)), yticklabels=ranks, xlabel="ms", xlim=(0, 4000 * p.step_s))
    axis.set_title(f"{p.layout}: step {1000 * p.step_s:.0f} ms; white is waiting", fontsize=10)
    figure.legend(ncols=4, fontsize=8, loc="outside lower center")
    figure.savefig(file, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- checked under torchrun


class Recorder:
    """In place of the run folder on rank 0: keeps the metrics, writes nothing."""

    path = Path()

    def __init__(self):
        self.records: list[dict] = []

    def say(self, line: str) -> None:
        pass

    def write_metrics(self, record: dict) -> None:
        self.records.append(record)


def check_split(report: Report, q: Question, png: str, steps: int = 24) -> None:
    """Each side alone on every rank of this world, the split that follows, and the split itself."""
    import bench
    import stream
    import train

    c = dataclasses.replace(q.config, steps=steps, eval_every=1 << 30, save_every=1 << 30)
    recorder = Recorder()
    train.save, train.checkpoint.draw_curves = lambda job, step: None, lambda *_: None
    with bench.job_of(c, q.target, "", q.batches()) as job:
        world = job.world
        made = world.gather([job.batches.train(b) for b in range(8)] if job.batches else [])
        alone = world.gather(side_alone(job, next(filter(None, made))))
        worst = {k: max(a.get(k, 0.0) for a in alone) for k in ("target", "drafter", "update", "data")}
        worst["transfer"] = max(world.gather(bench.side_by_side(job, 6, True, lambda x: None))) / 1000
        worst["reduce"] = max(world.gather(reduce_alone(job, q.gradient))) if world.drafters > 1 else 0.0
        hidden = worst["drafter"] * 2 / 3 / q.chunks
        times = Times(worst["target"], worst["drafter"], worst["transfer"], worst["update"])
        times = dataclasses.replace(times, reduce=max(0.0, worst["reduce"] - hidden))
        per_node = c.batches_per_step // world.nodes
        plan = split_plan(times, world.targets // world.nodes, world.drafters_per_node, per_node, c.depth)
        if world.rank == 0:
            job.folder = recorder
        if world.drafts:
            feed = train.Streamed(job)
            train.run_drafter(job, feed, train.Pulse(job, feed.waits))
        else:
            sender = stream.Sender(world, job.shapes, c.depth)
            train.run_target(job, sender, train.Pulse(job, sender.waits))
        world.barrier()
    if report.quiet:
        return
    compare_split(report, worst, plan, recorder.records[steps // 2 :])
    if png:
        draw(png, plan)
        report.say(f"drawn: {png}")


def reduce_alone(job, size: int) -> float:
    """Seconds of an all-reduce of the drafters' gradients, nothing else going on."""
    import torch
    import torch.distributed as dist

    if not job.world.drafts:
        return 0.0
    gradient = torch.zeros(size // 4, device=job.device)
    return pace(job, lambda i: dist.all_reduce(gradient, group=job.world.draft_group), 3)


def compare_split(report: Report, worst: dict[str, float], plan: Plan, records: list[dict]) -> None:
    """Predicted against seen. Good: within 15%."""
    seen = statistics.median(m["step_ms"] for m in records)
    waits = [statistics.mean(m[k] for m in records) for k in ("wait_target", "wait_drafter")]
    report.say("alone, ms: " + ", ".join(f"{k} {1000 * v:.1f}" for k, v in worst.items() if v))
    rows = [("step ms", 1000 * plan.step_s, seen), ("wait t %", 100 * plan.idle_target, 100 * waits[0])]
    rows.append(("wait d %", 100 * plan.idle_drafter, 100 * waits[1]))
    report.table(rows, ("", "predicted", "seen"), floatfmt=".1f")
    off = seen / (1000 * plan.step_s) - 1
    data = {
        "predicted_ms": 1000 * plan.step_s,
        "seen_ms": seen,
        "wait_target": waits[0],
        "wait_drafter": waits[1],
    }
    slower = max(
        worst["target"] * plan.per_step / plan.targets, worst["drafter"] * plan.per_step / plan.drafters
    )
    data["of_slower_side"] = 1000 * slower / seen
    told = f"step {seen:.1f} ms, predicted {1000 * plan.step_s:.1f} ({100 * off:+.0f}%); "
    told += f"{100 * data['of_slower_side']:.0f}% of the slower side alone"
    if abs(off) <= 0.15:
        report.add("prediction", ok(told, **data))
    else:
        fix = "python bench.py step; python bench.py target  # is one side slower next to the other?"
        report.add("prediction", warn(told, fix, **data))


# ---------------------------------------------------------------- a cluster on paper


def parse_size(text: str, flag: str = "--simulate") -> float:
    """`400Gb` or `50GB` (a second) in bytes/s."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(Gb|GB)(?:/s)?", text)
    if not match or not 0 < float(match[1]) < BEYOND:
        raise ValueError(f"{flag}: {text[:60]!r} is no bandwidth: give such as 400Gb (bits) or 50GB (bytes)")
    return float(match[1]) * (1.25e8 if match[2] == "Gb" else 1e9)


FIELDS = "nodes gpus link nvlink gpu target_ms drafter_ms update_ms".split()


def parse_simulation(text: str) -> dict:
    found: dict = {"nodes": 1, "gpus": 8, "link": 50e9, "nvlink": NVLINK}
    for part in text.split(","):
        (name, _, value), told = part.partition("="), part[:60]
        if name not in FIELDS or not value:
            raise ValueError(f"--simulate: {told!r}: give {', '.join(f'{f}=...' for f in FIELDS)}")
        try:
            if name in ("nodes", "gpus"):
                found[name] = int(value)
            else:
                found[name] = (
                    value if name == "gpu" else parse_size(value) if "link" in name else float(value)
                )
        except ValueError as error:
            raise ValueError(f"{error}" if "link" in name else f"--simulate: {told}: not a number") from None
        if name == "gpu":
            continue
        if not found[name] > 0:
            raise ValueError(f"--simulate: {told}: must be above 0")
        most = {"gpus": MOST_GPUS, "nodes": MOST_NODES}.get(name, BEYOND)
        if found[name] > most:
            raise ValueError(f"--simulate: {told}: must be at most {most:g}")
    if ("target_ms" in found) != ("drafter_ms" in found):
        raise ValueError("--simulate: target_ms and drafter_ms: give both or none")
    return found


def ceiling_of(gpu: str) -> float:
    """FLOP/s that large bf16 products reach on a GPU of this name; 0: unknown."""
    fits = [name for name in GPUS if re.search(rf"\b{re.escape(name)}\b", gpu)]
    return GPUS[max(fits, key=len)] * 1e12 * REACHED if fits else 0.0


def paper_times(q: Question, gpu: str, nvlink: float) -> Times:
    """Seconds of a batch from useful work, or from launching kernels where that takes longer, and what the
    GPUs of a target send each other. The update is that of one drafter; several share Muon's out.
    """
    import muon

    ceiling = ceiling_of(gpu)
    if not ceiling:
        raise ValueError(
            f"--simulate: gpu={gpu[:60]!r} is not known: give one of {', '.join(GPUS)}, or the times"
        )
    theirs, ours = q.work()
    moved = 28 * q.drafter.parameters()  # AdamW reads and writes weights, moments and gradients in fp32
    more = muon.step_flops(q.drafter.matrices()) / ceiling / PAPER if q.config.optimizer == "muon" else 0.0
    output = 2 * q.config.token_budget * q.target.hidden  # of a layer, in bf16; two all-reduces add it up
    shared = (max(q.drafter.ids) + 1) * 2 * output * 2 * (q.tp - 1) / q.tp / nvlink
    features = max(theirs / q.tp / ceiling / PAPER, (max(q.drafter.ids) + 1) * TARGET_LAYER_S) + shared
    drafter = max(ours / ceiling / PAPER, q.drafter.layers * q.chunks * DRAFT_LAYER_S)
    return Times(features, drafter, update=moved / 2.5e12 + more)


def simulate(report: Report, q: Question, text: str, png: str) -> None:
    """Predict a cluster: nothing is run unless neither times nor a GPU's name are given."""
    s = parse_simulation(text)
    facts: dict = {"tokens": q.config.token_budget}
    if "target_ms" in s:
        t = Times(s["target_ms"] / 1000, s["drafter_ms"] / 1000, update=s.get("update_ms", 0.0) / 1000)
    elif "gpu" in s:
        t = paper_times(q, s["gpu"], s["nvlink"])
        about = f"{100 * PAPER:.0f}% of {ceiling_of(s['gpu']) / 1e12:.0f} TFLOP/s on both sides"
        report.say(f"on paper: {about}, small models bound by launching kernels")
    else:
        q.must_be_whole()
        found = measure_sides(q.flags, report)
        t, facts = times_of(found), found
    m = Machine(s["gpus"], s["nodes"], s["nvlink"], s["link"])
    t = dataclasses.replace(t, transfer=q.feature_bytes(2) / m.nvlink)
    about = str(q.config.folder) if q.config.target else "the built-in target, for yours give --target DIR"
    report.say(f"predicted: {about}; batches of {q.config.token_budget} tokens")
    report.say(
        f"a batch: features {1000 * t.target:.1f} ms, drafter {1000 * t.drafter:.1f} ms, "
        f"{q.feature_bytes(2) / 1e6:.0f} MB sent in {1000 * t.transfer:.1f} ms; "
        f"gradients {q.gradient / 1e9:.2f} GB"
    )
    recommend(report, q, t, m, facts, png)
    if m.nodes > 1:
        wait = exposed_reduce(q.gradient, 1, m.nodes, m.nvlink, m.link, t.drafter * 2 / 3 / q.chunks)
        report.say(
            f"one drafter a node: the link adds {1000 * wait:.1f} ms a step that the backward cannot hide"
        )


def times_of(found: dict) -> Times:
    return Times(found["target"], found["drafter"], update=found["update"])


# ---------------------------------------------------------------- what slows a run, from its log


@dataclasses.dataclass
class Run:
    """What a run folder tells: its config, its steps, its log, how it stands."""

    path: Path
    config: object
    target: object
    world_size: int
    nodes: int
    records: list[dict]
    log: str
    status: dict
    age_s: float  # since the metrics were written to
    gpu: str
    ceiling: float

    @property
    def drafters(self) -> int:
        return self.config.drafters

    @property
    def colocate(self) -> bool:
        return self.config.layout == "colocate"

    @property
    def targets(self) -> int:
        if self.colocate:
            return self.world_size
        return (self.world_size - self.drafters) // self.config.target_tp

    @property
    def state(self) -> str:
        found = self.status.get("state")
        return found if found in ("running", "finished", "stopped", "failed") else "unknown"

    def median(self, key: str) -> float:
        """Of the newest 200 steps; 0 where this is not logged."""
        found = (m.get(key) for m in self.records[-200:])
        return statistics.median(v if measured(v) else 0.0 for v in found)


NEEDED = ("step", "step_ms", "tokens_per_s", "wait_target", "wait_drafter")


def measured(value) -> bool:
    """Is it a number that a run may have logged? Not NaN, which json reads too, nor one out of all bounds."""
    return type(value) in (int, float) and -BEYOND < value < BEYOND


def read_run(path: Path) -> Run:
    """A run folder since its last start; ValueError where it is none."""
    import checkpoint
    import train

    if not (path / "config.json").exists():
        raise ValueError(f"{path} is no run folder, it has no config.json: give one such as runs/001")
    saved = checkpoint.read_config(path)
    size = saved.get("world_size") or 1
    if type(size) is not int or not 0 < size <= MOST_NODES:
        raise ValueError(
            f"{path}/config.json: world_size {str(size)[:40]} is no number of ranks: start the run anew"
        )
    known = {f.name for f in dataclasses.fields(train.Config)}
    given = {k: v for k, v in saved.items() if k in known}
    train.check_values(given, f"{path}/config.json: {{}}: start the run anew")
    c = train.Config(**given | {"resume": str(path)})  # the folder of --init-draft may be gone
    log = last_start(read_text(path / "train.log"))
    nodes, resumed = (
        re.search(r" on ([1-9]\d{,8}) node", log),
        re.search(r"^resumed from .*: (\d{1,15}) of ", log, re.M),
    )
    nodes, after = int(nodes[1]) if nodes else 1, int(resumed[1]) if resumed else 0
    if size // nodes > MOST_GPUS:
        raise ValueError(f"{path}: {size} ranks on {nodes} node(s): at most {MOST_GPUS} a node are judged")
    t = train.backend(c).TargetConfig.from_folder(c.folder)
    c = train.resolve(c, t, size, nodes)
    steps = [m for m in checkpoint.read_metrics(path) if isinstance(m, dict)]
    steps = [m for m in steps if all(measured(m.get(k)) for k in NEEDED)]
    steps = [m for m in steps if m["step"] > after and m["step_ms"] > 0]
    metrics = path / "metrics.jsonl"
    age = time.time() - metrics.stat().st_mtime if metrics.exists() else 0.0
    gpu = str(saved.get("gpu") or gpu_name())
    if ", cpu float" in log:
        gpu = "cpu"
    elif gpu == "cpu":  # this machine has none, the run's had
        gpu = ""
    skipped = min(5, len(steps) // 4)  # the first ones fill buffers and caches
    return Run(path, c, t, size, nodes, steps[skipped:], log, status(path), age, gpu, ceiling_of(gpu))


def last_start(log: str) -> str:
    """The part of a log since the run was last started or resumed, by its banner."""
    starts = [m.start() for m in re.finditer(r"^run .* \| target ", log, re.M)]
    return log[starts[-1] :] if starts else log


def status(path: Path) -> dict:
    """status.json; empty where it is missing or damaged."""
    try:
        found = json.loads(read_text(path / "status.json") or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def should_take(run: Run) -> tuple[float, float]:
    """Seconds of a step that (a target, a drafter) should be busy: useful work at half of the GPU's ceiling,
    and launching the layers' kernels, which is what bounds small models.
    """
    import train

    c = run.config
    # An estimate, by the flags alone: the folder of --init-draft may be gone.
    d = train.DrafterConfig.of(run.target, c.draft_layers, c.block_size, c.taps, 0, c.variant)
    layers = max(d.ids) + 1
    of_target = run.target.prefill_flops(c.token_budget, layers) / c.target_tp / (run.ceiling / 2)
    of_target += layers * LAUNCHING_S
    chunks = c.anchors // c.anchor_chunk
    of_drafter = d.step_flops(c.token_budget, c.anchors, c.max_length / 4) / (run.ceiling / 2)
    of_drafter += 2 * c.draft_layers * chunks * LAUNCHING_S
    return of_target * c.batches_per_step / run.targets, of_drafter * c.batches_per_step / run.drafters


def busy(run: Run) -> tuple[float, float]:
    """Seconds of a step that (a target, a drafter) did not wait."""
    step = run.median("step_ms") / 1000
    return step * (1 - run.median("wait_target")), step * (1 - run.median("wait_drafter"))


def judge_progress(run: Run) -> Finding:
    step, last = run.median("step_ms") / 1000, run.records[-1]
    eta = last.get("eta_s") if measured(last.get("eta_s")) else 0.0
    told = f"{run.state}, step {last['step']}, {ktok(run.median('tokens_per_s'))}, "
    told += f"step {1000 * step:.0f} ms, eta {clock(eta)}"
    if run.state == "running" and run.age_s > max(120.0, 20 * step):
        fix = f"py-spy dump --pid {run.status.get('pid', 'PID')}  # rank 0; an evaluation takes its time too"
        return fail(f"no step for {run.age_s:.0f} s: {told}", fix)
    return ok(told, tokens_per_s=run.median("tokens_per_s"), step_ms=1000 * step)


def judge_kernels(run: Run) -> Finding:
    """What the gate said: a GPU run whose graphs were neither read nor compiled runs uncompiled."""
    gates = re.findall(r"gate: rank (\d+) \(([^)]+)\) \S+ s, (\d+) hits, (\d+) misses", run.log)
    eager = re.search(r"^compile: eager, (.*)$", run.log, re.M)
    missed = re.findall(r"gate: rank (\d+) .*MISSED", run.log)
    bare = [f"rank {rank} ({role})" for rank, role, hits, misses in gates if hits == misses == "0"]
    if run.gpu != "cpu" and (eager or bare):
        why = eager[1] if eager else f"{', '.join(bare)} compiled nothing"
        return fail(
            f"kernels run uncompiled: {why}",
            "env | grep -E 'TORCH(DYNAMO|_COMPILE)'  # unset what turns it off",
        )
    if missed:
        fix = "python -m diagnose.compile_cache"
        return warn(f"rank {', '.join(missed)} compiled what it should have read: a slow start", fix)
    if run.gpu == "cpu" and not gates and not eager:
        return ok("no rank is through the gate yet")
    return ok(
        f"{len(gates)} rank(s) compiled or read their graphs" if gates and not eager else "eager, on the CPU"
    )


def judge_speed(run: Run) -> list[Finding]:
    """Each side's own work against what the GPU could do; the case of idle GPUs that look busy."""
    if not run.ceiling:
        return [skip(f"no ceiling known for {run.gpu or 'this GPU'}", "python bench.py step", name="speed")]
    found = []
    wanted, took = should_take(run), busy(run)
    loading = run.median("step_ms") / 1000 * run.median("wait_data")  # has a verdict of its own
    took = max(0.0, took[0] - loading), took[1]
    if run.colocate:
        wanted, took = (sum(wanted),), (took[0],)
    for side, want, have in zip(
        ("target", "drafter") if len(took) == 2 else ("rank",), wanted, took, strict=True
    ):
        factor = have / want
        name = f"{side} speed"
        told = (
            f"a step's own work takes {1000 * have:.0f} ms, {factor:.1f} times the {1000 * want:.0f} ms that "
        )
        told += f"half of {run.ceiling / 1e12:.0f} TFLOP/s would need"
        data = {"name": name, "factor": factor, "busy_ms": 1000 * have, "should_ms": 1000 * want}
        if factor < SLOW:
            found.append(ok(told, **data))
            continue
        what = "target" if side == "target" else "step"
        fix = f"python bench.py {what} {shlex.join(flags_of(run))}  # the kernels alone"
        found.append((fail if factor >= BROKEN else warn)(told, fix, **data))
    return found


def judge_data(run: Run) -> Finding:
    """Does a GPU stand still while the CPU makes its next batch, and does that hold the run back?"""
    if not any(measured(m.get("wait_data")) for m in run.records):
        return skip("an older version's log: it does not tell the time of making batches", "nproc; top -H")
    share = run.median("wait_data")
    told = f"{100 * share:.0f}% of a step a {'rank' if run.colocate else 'target'} waits for its next batch"
    if share <= IDLE / 2:
        return ok(told, wait_data=share)
    if not run.colocate and run.median("wait_drafter") <= IDLE / 2:
        return ok(f"{told}, but no drafter for it", wait_data=share)
    fix = "nproc; iostat -x 1 3  # more cores a rank, or ~/.cache/blockdraft on a local disk"
    told += " to be made on the CPU: a slow data loader"
    return (fail if share >= 2 * IDLE else warn)(told, fix, wait_data=share)


def flags_of(run: Run) -> list[str]:
    """The shape flags of a run, for bench.py."""
    c = run.config
    kept = ("target", "token_budget", "anchors", "anchor_chunk", "block_size", "draft_layers", "max_length")
    pairs = [("--" + k.replace("_", "-"), str(getattr(c, k))) for k in kept if getattr(c, k)]
    return [part for pair in pairs for part in pair]


def judge_balance(run: Run) -> Finding:
    """Who waits for whom, and whether these ranks would be faster otherwise."""
    if run.colocate:
        return ok("colocate: no side waits for another")
    t, d = run.median("wait_target"), run.median("wait_drafter")
    told = f"waiting: targets {100 * t:.0f}%, drafters {100 * d:.0f}% of a step"
    data = {"wait_target": t, "wait_drafter": d}
    if t > IDLE and d > IDLE:
        moved = feature_bytes(run) * run.config.batches_per_step / min(run.targets, run.drafters)
        speed = moved / (run.median("step_ms") / 1000) / 1e9
        told += (
            f": neither side is the bottleneck, the link between them is ({speed:.2g} GB/s a rank at least)"
        )
        return fail(told, f"torchrun --nproc_per_node={run.world_size} -m diagnose.comms", **data)
    if max(t, d) <= IDLE:
        return ok(told, **data)
    if t > d:
        told += ": the targets are held up, their buffers are full: the drafters are the bottleneck"
    else:
        told += ": the drafters starve, they wait for features: the targets are the bottleneck"
    best, gain, kept = better_split(run)
    if gain < 1.1:
        return ok(f"{told}; no other split of these {run.world_size} ranks is faster", **data)
    together = best.layout == "colocate"
    split = "--layout colocate" if together else f"--drafters {best.drafters * run.nodes}"
    told += f"; {split} would be {gain:.1f} times as fast"
    fix = f"torchrun --nproc_per_node={run.world_size // run.nodes} train.py "
    fix += f"--resume {run.path} {split}" if kept else f"{split} ..."
    notes = [] if kept else ["a new run: a resumed one keeps its batches"]
    notes += ["if it fits: python -m diagnose.memory --layout colocate ..."] if together else []
    fix += f"  # {'; '.join(notes)}" if notes else ""
    return warn(told, fix, gain=gain, **data)


def better_split(run: Run) -> tuple[Plan | None, float, bool]:
    """(the fastest split of a node for what its sides are busy with, times as fast as now, may this run be
    resumed with it): a resumed run keeps its batches of a step. Colocate, which needs more memory, only where
    it is faster than any.
    """
    c, (of_target, of_drafter) = run.config, busy(run)
    each = Times(of_target * run.targets / c.batches_per_step, of_drafter * run.drafters / c.batches_per_step)
    now = c.batches_per_step / (run.median("step_ms") / 1000)
    machine, found = Machine(run.world_size // run.nodes, run.nodes), (None, 0.0, True)
    listed = {n: plans(each, machine, n, c.depth, 0.0, tp=c.target_tp) for n in (c.batches_per_step, 0)}
    for layout, per_step in itertools.product(("split", "colocate"), listed):
        best = next((p for p in listed[per_step] if p.layout == layout), None)
        if best and layout == "split" and best.drafters * run.nodes == run.drafters:
            continue  # it is what the run has, only measured otherwise
        gain = best.batches_per_s * run.nodes / now if best else 0.0
        if gain > 1.1 * max(1.0, found[1]):
            found = (best, gain, per_step > 0)
    return found


def feature_bytes(run: Run) -> float:
    """Of a batch, in bf16 on a GPU and fp32 on a CPU."""
    c = run.config
    return c.drafter(run.target).feature_bytes(c.token_budget, 4 if run.gpu == "cpu" else 2)


def judge_drift(run: Run) -> list[Finding]:
    """Steps that become slower, and steps that are much slower than the others."""
    ms = [m["step_ms"] for m in run.records]
    if len(ms) < 20:
        return [ok(f"only {len(ms)} steps: too few to see a drift", name="drift")]
    quarter = len(ms) // 4
    first, last = statistics.median(ms[:quarter]), statistics.median(ms[-quarter:])
    told = f"median step {first:.0f} ms at first, {last:.0f} ms at last"
    fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK | grep -i -E 'active|temp|sm'; nvidia-smi"
    found = [ok(told, name="drift", change=last / first - 1)]
    if last > 1.1 * first:
        told += f", {100 * (last / first - 1):.0f}% slower: clocks throttled, or another job on these GPUs"
        found = [warn(told, fix, name="drift", change=last / first - 1)]
    middle = statistics.median(ms)
    extra = sum(x - middle for x in ms if x > 2 * middle) / sum(ms)
    if extra > 0.1:
        count = sum(x > 2 * middle for x in ms)
        told = f"{count} of {len(ms)} steps take more than twice the median: {100 * extra:.0f}% of the time"
        found.append(warn(told, "vmstat 1 5; iostat -x 1 3  # a busy host, a slow disk?", name="slow steps"))
    return found


def judge_run(report: Report, path: Path) -> None:
    """All verdicts on a run folder."""
    run = read_run(path)
    c = run.config
    report.say(
        f"{path}: {c.layout}, {run.drafters} drafter(s) + {run.targets} target(s) on "
        f"{run.gpu or 'an unknown GPU'}, {c.token_budget} tokens a batch, {c.batches_per_step} batches a step"
    )
    report.run("kernels", judge_kernels, run)
    if not run.records:
        fix = f"python -m diagnose.throughput {path}  # again, in a while"
        report.add("progress", skip(f"{run.state}, and no step was logged yet", fix))
        return
    for name, judge in (("progress", judge_progress), ("speed", judge_speed), ("data", judge_data)):
        report.run(name, judge, run)
    report.run("balance", judge_balance, run)
    report.run("drift", judge_drift, run)


# ---------------------------------------------------------------- the command


def checks(report: Report, args=None) -> None:
    """What `python -m diagnose` asks: is there a run going on here, and is it slower than it should be?"""
    going = [
        p.parent for p in Path("runs").glob("*/status.json") if status(p.parent).get("state") == "running"
    ]
    if going:
        try:
            judge_run(report, max(going))
        except ValueError as error:
            fix = f"python -m diagnose.throughput {max(going)}"
            report.add("runs", warn(f"{error}", fix))
    else:
        report.add("runs", ok("none is going on in runs/; python -m diagnose.throughput predicts one"))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """(own flags, flags of train.py); a run folder can only come first."""
    argv = list(sys.argv[1:] if argv is None else argv)
    run = argv.pop(0) if argv and not argv[0].startswith("-") else ""
    parser = Parser("diagnose.throughput", __doc__)
    parser.usage = "%(prog)s [RUN_DIR] [options] [flags of train.py]"
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs of a node to split (this machine's; 2 without)"
    )
    parser.add_argument(
        "--simulate", default="", metavar="nodes=8,gpus=8,...", help="predict a cluster on paper"
    )
    parser.add_argument("--nvlink", default="300GB", help="what two GPUs of a node send each other (300GB)")
    parser.add_argument("--png", type=picture, metavar="FILE", help="draw the timeline of the best split")
    parser.add_argument("--measure-role", nargs=2, default=None, help=argparse.SUPPRESS)
    add_arguments(parser)
    args, flags = parser.parse_known_args(argv)
    args.run = run
    return args, flags


def predict(report: Report, args: argparse.Namespace, q: Question) -> None:
    """Each side alone here, then every split of --gpus."""
    import torch

    q.must_be_whole()
    count, nvlink = torch.cuda.device_count(), parse_size(args.nvlink, "--nvlink")
    gpus = args.gpus or count or 2
    if not count and not q.own_data:
        fix = f"python -m diagnose.throughput --simulate gpus={gpus},gpu=H200 {shlex.join(q.flags)}"
        raise skip("no GPU here to measure on", fix)
    found = measure_sides(q.flags, report)
    if count:
        found["memory"] = torch.cuda.mem_get_info()[1]
    speed = nvlink if count else 1e9
    t = dataclasses.replace(times_of(found), transfer=q.feature_bytes(found["size"]) / speed)
    report.say(f"assumed: {speed / 1e9:.0f} GB/s from rank to rank, so {1000 * t.transfer:.2f} ms a batch")
    report.extra["alone"] = found
    recommend(report, q, t, Machine(gpus, 1, speed), found, args.png)


def main(argv: list[str] | None = None) -> int:
    args, flags = parse(argv)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    report = Report("throughput", args, quiet=rank > 0)
    try:
        if args.run:
            if flags or args.simulate or args.png:
                raise ValueError("a run folder is judged by its log alone: leave the other flags out")
            judge_run(report, Path(args.run))
            return report.finish()
        if args.gpus < 0:
            raise ValueError(f"--gpus {args.gpus}: give a number above 0")
        if args.gpus > MOST_GPUS:
            raise ValueError(f"--gpus {args.gpus}: of one node, at most {MOST_GPUS}")
        if args.gpus and args.simulate:
            raise ValueError(f"--gpus {args.gpus}: beside --simulate write --simulate gpus={args.gpus},...")
        nodes = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
        q = Question(flags, size, nodes)
        if args.measure_role:
            role, file = args.measure_role
            Path(file).write_text(json.dumps(measure_role(q, role)))
            return 0
        if size > 1 and q.config.layout == "colocate":
            raise ValueError("--layout colocate: nothing is sent: start it without torchrun")
        if args.simulate:
            simulate(report, q, args.simulate, args.png)
        elif size > 1:
            q.must_be_whole()
            check_split(report, q, args.png)
            if rank > 0:
                return 0
        else:
            predict(report, args, q)
    except Finding as finding:
        report.add(finding.name or "throughput", finding)
    except ValueError as error:
        from world import refuse

        return refuse(f"diagnose.throughput: {error}")
    return report.finish()


if __name__ == "__main__":
    leave(main())
