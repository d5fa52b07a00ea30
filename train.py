"""Train a DFlash drafter: frozen target ranks stream hidden states to data-parallel drafter ranks.

    torchrun --standalone --nproc_per_node=2 train.py                               # the built-in tiny target
    torchrun --nproc_per_node=8 train.py --target DIR --data FILE... --drafters 3   # production
    python train.py                                                                 # one rank does both

From top to bottom: the flags, the job that both roles share, the two roles, evaluation, the log; then checks
of the flags, start and end. Elsewhere: the loss and its weights (model.py: cross_entropy_rows, slot_weights,
dpace_weights), where anchors fall (data.py: draw_anchors), the wire (stream.py), the gate (compile_utils.py).

Shape letters: T token budget, A anchors of a batch, B block size, K tapped layers, H hidden.
"""

import os


def see_one_gpu() -> None:
    """Make this rank's GPU device 0, before torch is imported: the device index is part of the compile
    cache's key.

    Where torchrun already did (--virtual-local-rank: LOCAL_RANK 0 and one device everywhere) this changes
    nothing.
    """
    local = os.environ.get("LOCAL_RANK")
    if local is None:
        return
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = local if listed is None else ([*listed.split(","), *[""] * int(local)])[int(local)].strip()
    os.environ["CUDA_VISIBLE_DEVICES"] = devices


see_one_gpu()
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same settings
    # Segments that grow in place: on a full card the holes between fixed ones cost gigabytes.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import contextlib
import dataclasses
import functools
import math
import resource
import sys
import textwrap
import time
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
import compile_utils
import data
import decode
import fp8
import headroom
import hf_target
import model
import muon
import stream
from model import Blocks, Drafter, DrafterConfig, TargetConfig
from world import Control, Ending, UserError, World, launcher_store, refuse

TINY = data.TINY
USER_CACHE = compile_utils.default_root()
SUMS = ("loss", "weight", "right", "slots", "prefix", "blocks")  # over the blocks of a step
COMPUTED = (*SUMS, "grad_norm", "skipped")
AT_MOST = {  # far beyond any use: a slip of the keyboard must not fill the memory
    "token_budget": 1 << 24, "anchors": 1 << 22, "block_size": 1 << 8, "max_batch_size": 1 << 20,
    "batches_per_step": 1 << 20, "draft_layers": 1 << 10, "taps": 1 << 10, "depth": 1 << 10,
    "steps": 1 << 40, "epochs": 1 << 40, "seed": (1 << 63) - 1, "lr": 1e6,
}  # fmt: skip
CHOICES = {
    "variant": ("dflash", "dflash2"), "loss_weights": ("decay", "dpace"), "optimizer": ("adamw", "muon"),
    "device": ("cuda", "cpu"),
}  # fmt: skip
AUTO = -1  # of --token-budget: what fits, found once the ranks have met
CONTROL_FIELDS = ("step_s", "wait_s", "data_s", "peak_gib", "free_gib", "stop", "tokens", *COMPUTED)


def option(default, text: str):
    """A Config field with its --help text."""
    factory = {"default_factory": lambda: default} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**factory, metadata={"help": text})


@dataclasses.dataclass
class Config:
    """The flags. 0 or empty means: chosen for the target and the world size (`resolve`).

    To add one: check it in `check_flags`; name it in `gate_key` if it changes what is compiled, in
    `changed_flags` if it changes the arithmetic, in headroom.py if it changes the memory, and in the README.
    """

    target: str = option("", "Hugging Face folder of the target LLM (default: the built-in tiny one)")
    target_backend: str = option("native", "native, or transformers for what model.py does not know")
    data: list[str] = option([], "training data, JSONL")
    eval_data: list[str] = option([], "held-out data, JSONL (default: 3%% of --data, at most 512 documents)")
    out: str = option("", "run folder (default: the next free runs/NNN)")
    resume: str = option("", "go on with a run: RUN (its newest checkpoint) or RUN/step-NNNNNN")
    init_draft: str = option(
        "", "start from an export, a published drafter or a checkpoint: its shape and weights"
    )
    layout: str = option("", "split: a rank drafts or runs the target; colocate: every rank does both")
    drafters: int = option(0, "ranks that draft, over the world; the others run the target")
    target_tp: int = option(1, "ranks that share one target, each with a part of every layer")
    token_budget: int = option(
        0, "packed tokens of a batch, a multiple of 128 (16384); auto: as many as leave --headroom"
    )
    headroom: float = option(5.0, "percent of each GPU that --token-budget auto leaves free")
    max_batch_size: int = option(64, "documents of a batch, at most")
    max_length: int = option(
        0, "tokens of a document, longer ones are cut (4096, at most what the target takes)"
    )
    variant: str = option("", "dflash, or dflash2: convolutions in the block, a candidate selector")
    block_size: int = option(0, "tokens of a block, B (16; 8 with dflash2)")
    draft_layers: int = option(0, "layers of the drafter (5)")
    taps: int = option(0, "target layers whose outputs the drafter sees, K (5)")
    anchors: int = option(0, "anchors of a batch, A (a quarter of the token budget)")
    anchor_chunk: int = option(
        0, "anchors at a time: memory follows this, the result does not (at most 2048)"
    )
    gamma: float = option(0.0, "decay of the loss weights within a block (7, 5, 4 for B = 16, 10, 8)")
    loss_weights: str = option("decay", "decay: by --gamma; dpace: by the drafter's own confidence")
    lr: float = option(0.0, "peak learning rate (6e-4; 4e-3 with --optimizer muon)")
    warmup_ratio: float = option(0.04, "share of the steps with rising learning rate")
    clip: float = option(1.0, "largest gradient norm")
    optimizer: str = option("adamw", "adamw, or muon for the drafter's matrices")
    steps: int = option(0, "optimizer steps (default: as many as --epochs takes)")
    epochs: int = option(0, "passes over the data (6)")
    batches_per_step: int = option(
        0, "batches of a step over all drafters, a multiple of their number (one each)"
    )
    save_every: int = option(0, "steps between checkpoints (a quarter of the run)")
    keep: int = option(3, "newest checkpoints to keep, 0 for all")
    eval_every: int = option(0, "steps between evaluations (a tenth of the run)")
    eval_decode: int = option(0, "held-out prompts to decode at each evaluation, where ranks do both (none)")
    compile_cache: str = option("", "folder of compiled kernels (~/.cache/blockdraft)")
    mask_token_id: int = option(-1, "mask token (default: the tokenizer's, or one nothing uses)")
    max_bad_lines: int = option(100, "broken lines to skip before giving up")
    depth: int = option(2, "feature buffers of a rank")
    seed: int = option(0, "seed of initial weights, packing and anchors")
    device: str = option("", "cuda or cpu (default: cuda where every rank has a GPU)")
    fp8: bool = option(False, "products of the drafter in 8-bit floats (GPUs of compute capability 8.9 on)")
    ignore_headroom: bool = option(False, "start although the estimate says that it does not fit the GPU")

    @property
    def folder(self) -> Path:
        return Path(self.target) if self.target else TINY

    @property
    def decodes(self) -> bool:
        """Are held-out prompts decoded at evaluations? That takes a rank with the whole target."""
        return self.eval_decode > 0 and self.layout == "colocate"

    def drafter(self, t: TargetConfig, mask_token: int = 0) -> DrafterConfig:
        """The shape of the run's drafter: that of what it starts from, else that of the flags."""
        if self.init_draft:
            return shape_to_start_from(self.init_draft, self.resume, self.target, self.target_backend)
        return DrafterConfig.of(t, self.draft_layers, self.block_size, self.taps, mask_token, self.variant)


# ---------------------------------------------------------------------------------------------------------
# The job: what both roles share


class Batches:
    """Batches by number, on the ranks that open the data set. Global order, padded at an epoch's end."""

    def __init__(self, c: Config, t: TargetConfig):
        self.c = c
        tokenizer = data.load_tokenizer(c.folder)
        options = (tokenizer, c.max_length, USER_CACHE / "tokens", c.max_bad_lines)
        self.corpus = self.held_out = data.load_corpus(c.data, *options)
        train_docs = np.arange(len(self.corpus))
        if c.eval_data:
            self.held_out = data.load_corpus(c.eval_data, *options)
            eval_docs = np.arange(len(self.held_out))
        else:
            train_docs, eval_docs = data.split_held_out(
                self.corpus, min(0.03, 512 / max(1, len(self.corpus))), c.seed
            )
        self.plan, self.eval_plan = (
            data.pack(corpus.lengths, docs, c.token_budget, c.max_batch_size, c.seed)
            for corpus, docs in ((self.corpus, train_docs), (self.held_out, eval_docs))
        )
        self.prompts, self.stops = [], []
        if c.decodes:
            self.prompts = decode.held_out_prompts(self.held_out, eval_docs, c.eval_decode, c.max_length)
            self.stops = decode.stop_tokens(tokenizer)
        few = f"only {len(eval_docs)} held-out document(s): too few to go by; give --eval-data"
        mask_token = None if c.mask_token_id < 0 else c.mask_token_id
        self.facts = {
            "batches": self.plan.batches,
            "eval_batches": self.eval_plan.batches,
            "mask_token": data.choose_mask_token(tokenizer, t.vocab, self.corpus, mask_token),
            "data": (self.corpus.folder.name, self.held_out.folder.name),  # keys of their content
            "sources": self.held_out.source_names,
            "about": f"{self.corpus.report}; batches {100 * self.plan.fill:.1f}% full",
            "notes": [note for note in (self.plan.note, few if len(eval_docs) < 20 else "") if note],
        }

    def train(self, b: int) -> data.Batch:
        """Batch b of the run; weight-zero batches fill an epoch up to whole steps."""
        c = self.c
        epoch, i = divmod(b, steps_per_epoch(c, self.plan.batches) * c.batches_per_step)
        if i >= self.plan.batches:
            return data.empty_batch(b, c.token_budget, c.max_batch_size, c.anchors)
        docs = self.plan.docs(self.plan.batch_of(epoch, i))
        return data.make_batch(self.corpus, docs, b, c.token_budget, c.max_batch_size, c.anchors, c.seed)

    def evaluation(self, j: int) -> data.Batch:
        c = self.c
        docs = self.eval_plan.docs(j)
        return data.make_batch(self.held_out, docs, j, c.token_budget, c.max_batch_size, c.anchors, c.seed)


def steps_per_epoch(c: Config, batches: int) -> int:
    return -(-batches // c.batches_per_step)


def message_shapes(c: Config, d: DrafterConfig, dtype: torch.dtype) -> stream.Shapes:
    sizes, width = (c.token_budget, c.anchors, c.max_batch_size), len(d.ids) * d.hidden
    return stream.Shapes(*sizes, width, dtype)


class Job:
    """One rank's view of the run: config, world, models, and the step it is at."""

    def __init__(
        self, c: Config, t: TargetConfig, world: World, ending: Ending, run: Path, place: Path | None = None
    ):
        self.c, self.t, self.world, self.ending = c, t, world, ending
        self.place = place  # the checkpoint to start from
        self.with_budget: Callable[[int], Config]  # this config with another --token-budget
        self.device = world.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.run = run
        self.batches = world.together(lambda: Batches(c, t) if world.runs_target else None, "data")
        self.folder = world.together(
            lambda: checkpoint.RunFolder(run) if world.rank == 0 else None, "run folder"
        )
        self.saver = checkpoint.Saver(run, c.keep, self.folder.say) if self.folder else None
        ending.on_forced_end = self.end_by_force
        facts = world.gather(self.batches.facts if self.batches else None)
        self.facts = next(f for f in facts if f)
        if any(f["data"] != self.facts["data"] for f in facts if f):
            raise UserError("--data: the nodes hold different data or tokenizers: copy them anew")
        c.mask_token_id = self.facts["mask_token"]  # a resumed run keeps it, whatever its data
        self.notes = list(self.facts["notes"])
        if c.eval_decode and not c.decodes:
            where = f"--target {c.folder} --draft {run}"
            self.notes.append(
                f"--eval-decode: no rank has both models; beside the run: python decode.py {where}"
            )
        if c.anchors > c.token_budget:
            self.notes.append(
                f"--anchors {c.anchors}: a batch of {c.token_budget} tokens has no place for more"
            )
        self.drafter_config = c.drafter(t, self.facts["mask_token"])
        if c.init_draft and len(set(map(str, world.gather(self.drafter_config)))) > 1:
            raise UserError(f"--init-draft {c.init_draft}: the nodes hold different drafters: copy it anew")
        self.total_steps = c.steps or c.epochs * steps_per_epoch(c, self.facts["batches"])
        self.eval_every = c.eval_every or -(-self.total_steps // (10 if c.target else 5))
        self.save_every = c.save_every or -(-self.total_steps // 4)
        self.first_step = world.together(
            lambda: checkpoint.read_state(place)["step"] if place else 0, "resume"
        )
        if self.first_step > self.total_steps:
            flag = f"--steps {c.steps}" if c.steps else f"--epochs {c.epochs}, {self.total_steps} steps"
            raise UserError(f"{flag}: {place} has done {self.first_step}: give at least that many")
        self.last_step = self.total_steps  # shrinks when a stop is asked for
        self.hurried = False  # saved at once after a signal
        self.shapes = message_shapes(c, self.drafter_config, self.dtype)
        # The targets are ahead of the drafters; ranks that do both are not, and can stop at once.
        ahead = 0 if world.colocate else c.depth + math.ceil(world.targets / c.batches_per_step)
        self.stop_notice = 1 if world.colocate else 1 + c.depth
        self.control = Control(world, 1 + ahead, CONTROL_FIELDS)
        self.loading = stream.Waits(world.device)  # for batches that the CPU is still making

    def load_models(self) -> None:
        c, d = self.c, self.drafter_config
        first = self.world.local == 0 or self.world.place == self.world.drafters_per_node
        show = first and sys.stderr.isatty()
        if self.world.runs_target:
            place = (c.folder, self.device, self.dtype)
            parts = (None, True) if c.decodes else (max(d.ids) + 1, False)  # training needs no more
            share = {"part": self.world.part, "parts": c.target_tp} if c.target_tp > 1 else {}
            self.target = self.world.together(
                lambda: backend(c).Target.load(*place, *parts, show, **share), "target"
            )
        else:
            self.world.together(lambda: None, "target")
        if self.world.drafts:
            tables = self.world.together(
                lambda: backend(c).load_embedding_and_head(c.folder, self.device, self.dtype), "target"
            )
            how = {"in_fp8": c.fp8, "dpace": c.loss_weights == "dpace"}
            self.drafter = Drafter(d, *tables, c.seed, **how).to(self.device)
            if c.optimizer == "muon":
                group = self.world.draft_group if self.world.drafters > 1 else None
                self.optimizer = muon.Muon(self.drafter, c.lr, group)
            else:
                self.optimizer = torch.optim.AdamW(
                    self.drafter.parameters(), lr=c.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
                )
        else:
            self.world.together(lambda: None, "target")
        if c.init_draft and not self.place:
            self.world.together(lambda: self.fill() if self.world.drafts else None, "--init-draft")

    def fill(self) -> None:
        """The weights of --init-draft into the fp32 masters."""
        checkpoint.fill(self.drafter, checkpoint.find_drafter(Path(self.c.init_draft), "--init-draft"))

    def end_by_force(self, why: str) -> None:
        """What is said when no step ends any more; a failure elsewhere has been said by its rank."""
        self.note_failure(f"ended by force: {why}")
        if self.folder:
            newest = (checkpoint.checkpoints(self.run) or ["none yet"])[-1]
            self.folder.say(f"ended by force: {why}; newest checkpoint: {newest}")

    def note_failure(self, why: str) -> None:
        """status.json says failed; where rank 0 is gone without a word, another rank writes it."""
        try:
            if self.folder:
                with contextlib.suppress(Exception):  # its failure is being told already
                    self.saver.wait(5)  # a checkpoint that is being written is worth some seconds
                self.folder.write_status("failed", why=why)
            else:
                checkpoint.note_failure(self.run, why)
        except OSError as problem:  # a full disk must not keep this process from ending
            print(f"train.py: status.json could not be written: {problem}", file=sys.stderr, flush=True)

    def put(self, t: Tensor) -> Tensor:
        """To this rank's device without waiting for it."""
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t

    def lr(self, step: int) -> float:
        """Linear warm-up, then cosine to 0; `step` counts from 1."""
        warm = max(1, round(self.c.warmup_ratio * self.total_steps))
        if step <= warm:
            return self.c.lr * step / warm
        return self.c.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.total_steps - warm)))

    def step_batches(self, step: int) -> range:
        """The batches of a step (from 1), in the run's global order."""
        n = self.c.batches_per_step
        return range((step - 1) * n, step * n)

    def evaluates(self, step: int) -> bool:
        """Is there an evaluation after this step? Not after the last one of a run that is stopped early."""
        return step == self.total_steps or (step % self.eval_every == 0 and step < self.last_step)

    def saves(self, step: int) -> bool:
        return step % self.save_every == 0 or step == self.last_step

    def load_batch(self, b: int) -> data.Batch:
        """Batch b of the run; counts the time that the device stands still for it."""
        begun = self.loading.begin()
        batch = self.batches.train(b)
        self.loading.end(begun)
        return batch

    def make_features(self, batch: data.Batch, out_TKH: Tensor) -> Tensor:
        """The target's hidden states of a packed batch, into `out_TKH` [T, K*H]."""
        tokens = int((batch.doc_T >= 0).sum())
        bounds = batch.cu_seqlens.clamp(max=tokens)  # the padding tail is no document
        inputs = [self.put(t) for t in (batch.tokens_T, batch.positions_T, bounds)]
        return self.target.features(*inputs, self.c.max_length, list(self.drafter_config.ids), out_TKH)


# ---------------------------------------------------------------------------------------------------------
# Where a drafter rank gets its batches


class Streamed:
    """Where a drafter rank gets its batches: from the targets, through the stream."""

    def __init__(self, job: Job):
        self.job, self.receiver = job, stream.Receiver(job.world, job.shapes, job.c.depth)
        self.waits, self.announced = self.receiver.waits, job.first_step

    def spare(self) -> Tensor:
        """A feature buffer that nothing is in: before anything is announced."""
        return self.receiver.buffers.all[0]

    def announce(self, step: int) -> None:
        """Let receives be posted for what surely comes: a stop takes effect later than `depth` steps
        ahead.
        """
        job, rank = self.job, self.job.world.rank
        for ahead in range(self.announced + 1, min(job.last_step, step + job.c.depth) + 1):
            for b in job.step_batches(ahead):
                if job.world.drafter_of(b) == rank:
                    self.receiver.expect(stream.TRAIN, b)
            if job.evaluates(ahead):
                self.announce_evaluation()
            self.announced = ahead

    def announce_evaluation(self) -> None:
        for j in range(self.job.facts["eval_batches"]):
            if self.job.world.drafter_of(j) == self.job.world.rank:
                self.receiver.expect(stream.EVAL, j)

    def train(self, b: int) -> tuple[data.Batch, Tensor]:
        return self.receiver.take()

    def evaluation(self, j: int) -> tuple[data.Batch, Tensor]:
        return self.receiver.take()

    def release(self) -> None:
        self.receiver.release()


class Colocated:
    """Where a rank that does both gets its batches: from its own target, in turn."""

    def __init__(self, job: Job):
        self.job, self.waits = job, stream.Waits(job.device)
        self.buffer = stream.Buffers(job.shapes, 1, job.device).all[0]

    def spare(self) -> Tensor:
        return self.buffer

    def announce(self, step: int) -> None:
        pass

    def announce_evaluation(self) -> None:
        pass

    def release(self) -> None:
        pass

    @torch.no_grad()
    def train(self, b: int) -> tuple[data.Batch, Tensor]:
        batch = self.job.load_batch(b)
        return batch, self.job.make_features(batch, self.buffer)

    @torch.no_grad()
    def evaluation(self, j: int) -> tuple[data.Batch, Tensor]:
        batch = self.job.batches.evaluation(j)
        return batch, self.job.make_features(batch, self.buffer)


# ---------------------------------------------------------------------------------------------------------
# The two roles


def steps(job: Job) -> Iterator[int]:
    """The steps still to do; ends where a stop was agreed on."""
    step = job.first_step
    while step < job.last_step:
        step += 1
        yield step


def sender_of(job: Job) -> stream.Sender | stream.Unsent:
    """Where a target's features go: of its ranks the leader sends them, the others drop them."""
    if job.world.rank == job.world.leader:
        return stream.Sender(job.world, job.shapes, job.c.depth)
    return stream.Unsent(job.world, job.shapes)


@torch.no_grad()
def run_target(job: Job, sender: stream.Sender | stream.Unsent, pulse: "Pulse") -> None:
    """Make the features of this target's batches, in global order, and send each to the drafter it belongs
    to. All ranks of a target do this together; its leader sends.
    """
    report_memory(job)
    if job.first_step == 0:
        send_evaluation(job, sender)
    for step in steps(job):
        pulse.begin_step()
        for b in job.step_batches(step):
            if job.world.target_of(b) == job.world.leader:
                batch = job.load_batch(b)
                job.make_features(batch, sender.buffer())
                sender.send(stream.TRAIN, batch)
        pulse.end_step(step, {})
        if job.evaluates(step):
            send_evaluation(job, sender)
    pulse.end()
    sender.close()


def send_evaluation(job: Job, sender: stream.Sender | stream.Unsent) -> None:
    for j in range(job.facts["eval_batches"]):
        if job.world.target_of(j) == job.world.leader:
            batch = job.batches.evaluation(j)
            job.make_features(batch, sender.buffer())
            sender.send(stream.EVAL, batch)


def run_drafter(job: Job, feed: Streamed | Colocated, pulse: "Pulse") -> None:
    """The optimizer steps: forward and backward over this rank's batches, one update together."""
    world, replica = job.world, wrap(job)
    rehearse(job, replica, feed.spare())
    report_memory(job)
    if job.first_step == 0:
        feed.announce_evaluation()
        pulse.evaluated(0, evaluate(job, feed))
    for step in steps(job):
        feed.announce(step)
        pulse.begin_step()
        totals, tokens = torch.zeros(6, device=job.device), 0
        mine = [b for b in job.step_batches(step) if world.drafter_of(b) == world.rank]
        for b in mine:
            batch, features_TKH = feed.train(b)
            totals += accumulate(job, replica, batch, features_TKH, sync=b == mine[-1])
            tokens += int((batch.doc_T >= 0).sum())
            feed.release()
        dist.all_reduce(totals, group=world.draft_group)
        if job.saver:
            job.saver.before_update()
        grad_norm, skipped = update(job, totals[1], job.lr(step))
        pulse.end_step(step, {"tokens": tokens}, torch.cat([totals, torch.stack([grad_norm, skipped])]))
        compile_utils.check_frozen()
        if job.evaluates(step):
            pulse.evaluated(step, evaluate(job, feed))
        hurry = job.ending.asked.is_set() and not job.hurried
        if job.folder and (job.saves(step) or hurry):
            job.hurried |= hurry  # the last step may come too late for torchrun: keep this one at least
            save(job, step)
    pulse.end()


def wrap(job: Job) -> nn.Module:
    """The data-parallel replica; with one drafter, the drafter itself."""
    if job.world.drafters == 1:
        return job.drafter
    ids = [0] if job.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        job.drafter, device_ids=ids, process_group=job.world.draft_group, gradient_as_bucket_view=True
    )


def rehearse(job: Job, replica: nn.Module, features_TKH: Tensor) -> None:
    """Two throw-away steps on an empty batch, before the first real one.

    Every shape is static, so this needs all the memory that a step will ever need. And DDP rebuilds its
    buckets after the first backward, which changes the order of sums: get that over beforehand.
    """
    c = job.c
    nothing = data.empty_batch(0, c.token_budget, c.max_batch_size, c.anchors)
    for _ in range(2):
        totals = accumulate(job, replica, nothing, features_TKH, sync=True)
        update(job, totals[1], 0.0)  # weight 0: nothing moves, but the optimizer takes its memory


def to_blocks(job: Job, batch: data.Batch, anchors_A: Tensor) -> Iterator[Blocks]:
    """The batch's anchors a chunk at a time, as blocks on the device; at least one chunk, the last padded."""
    row = [job.put(t) for t in (batch.tokens_T, batch.positions_T, batch.doc_T, batch.mask_T)]
    c = job.c
    whole = max(1, -(-len(anchors_A) // c.anchor_chunk)) * c.anchor_chunk
    anchors_A = nn.functional.pad(anchors_A, (0, whole - len(anchors_A)), value=-1)
    for chunk in job.put(anchors_A).split(c.anchor_chunk):
        yield model.make_blocks(*row, chunk, c.block_size, c.gamma, job.facts["mask_token"])


def accumulate(job: Job, replica: nn.Module, batch: data.Batch, features_TKH: Tensor, sync: bool) -> Tensor:
    """Forward and backward over one batch, chunk after chunk of anchors; gradients of plain sums add up.

    All chunks but the last run against detached context keys and values and leave their gradient there; the
    last chunk's backward carries it on through k_proj, v_proj and fc. So each parameter is touched once by
    the backward that DDP reduces. Returns fp32 sums [loss, weight, right, slots, prefix, blocks].
    """
    totals = torch.zeros(6, device=job.device)
    kv = job.drafter.context_keys_values(features_TKH, job.put(batch.positions_T))
    held = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in kv]
    chunks = list(to_blocks(job, batch, batch.anchors_A))
    for i, blocks in enumerate(chunks):
        last = i == len(chunks) - 1
        alone = not (last and sync) and replica is not job.drafter
        with replica.no_sync() if alone else contextlib.nullcontext():
            loss, predicted = replica(kv if last else held, blocks)
            if last:
                ends = [
                    (t, h.grad) for pair in zip(kv, held, strict=True) for t, h in zip(*pair, strict=True)
                ]
                ends = [(t, grad) for t, grad in ends if grad is not None]
                torch.autograd.backward([loss, *(t for t, _ in ends)], [None, *(grad for _, grad in ends)])
            else:
                loss.backward()
        totals += measure(loss.detach(), outcomes(predicted, blocks), blocks)
    return totals


def outcomes(predicted: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Of the drafted slots: right and supervised, bool [A, B-1], and each block's matching prefix [A]."""
    labels, weights = blocks.labels_AB[:, 1:], blocks.weights_AB[:, 1:]
    supervised = weights > 0
    return (predicted == labels) & supervised, supervised, model.matching_prefix(predicted, labels, weights)


def measure(loss: Tensor, found: tuple[Tensor, Tensor, Tensor], blocks: Blocks) -> Tensor:
    """fp32 sums [loss, weight, right, slots, prefix, blocks] of a chunk and its outcomes, on the device."""
    right, supervised, prefix = (part.sum() for part in found)
    sums = (loss, blocks.weights_AB[:, 1:].sum(), right, supervised, prefix, blocks.real_A.sum())
    return torch.stack([s.float() for s in sums])


def update(job: Job, weight: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Scale the summed gradients to the global mean, clip, step. Returns (norm, 1.0 where not finite).

    DDP divided by the drafters; the gradient of the one big batch is sum / global weight. A non-finite
    gradient skips the step on the device, without a branch, so that all replicas agree.
    """
    grads = [p.grad for p in job.drafter.parameters()]
    scale = job.world.drafters / weight.clamp(min=1e-9)
    norm = nn.utils.get_total_norm(grads) * scale
    bad = ~torch.isfinite(norm)
    skip = (bad | (weight == 0)).float()  # nothing supervised in the whole step: no failure, but no step
    factor = scale * (job.c.clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, torch.where(skip > 0, 0.0, factor))
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    # What torch.amp's scaler hands over: the fused kernel then leaves all as it is.
    job.optimizer.found_inf = skip
    job.optimizer.step()
    torch._foreach_zero_(grads)
    return norm, bad.float()


# ---------------------------------------------------------------------------------------------------------
# Evaluation: every supervised position of the held-out documents is an anchor


@torch.no_grad()
def evaluate(job: Job, feed: Streamed | Colocated) -> dict:
    """Held-out loss, accuracy (in all and by slot), acc_len and tau, over all drafters.

    acc_len is teacher-forced: the mean over all positions (where a block begins; inside it each slot follows
    what was drafted before it). tau walks each recorded answer as decoding would, so it is tokens per target
    pass, exactly so where the answers are the target's own greedy ones.
    """
    c, sources = job.c, job.facts["sources"]
    totals = torch.zeros(6, device=job.device)
    by_slot = torch.zeros(2, c.block_size - 1, device=job.device)
    walked = torch.zeros(2, len(sources), device=job.device)
    for j in range(job.facts["eval_batches"]):
        if job.world.drafter_of(j) == job.world.rank:
            of_batch = evaluate_batch(job, *feed.evaluation(j))
            for sums, more in zip((totals, by_slot, walked), of_batch, strict=True):
                sums += more
            feed.release()
    for sums in (totals, by_slot, walked):
        dist.all_reduce(sums, group=job.world.draft_group)
    loss, weight, right, slots, prefix, blocks_seen = totals.tolist()
    tokens, drafted = walked.tolist()
    decoded = {"decode_tau": decode_held_out(job)} if c.decodes else {}
    return decoded | {
        "eval_loss": loss / max(weight, 1e-9),
        "eval_acc": right / max(slots, 1),
        "eval_acc_len": 1 + prefix / max(blocks_seen, 1),
        "eval_tau": sum(tokens) / max(sum(drafted), 1),
        "eval_acc_by_slot": (by_slot[0] / by_slot[1].clamp(min=1)).tolist(),
        "eval_tau_by_source": {s: a / b for s, a, b in zip(sources, tokens, drafted, strict=True) if b},
    }


def evaluate_batch(job: Job, batch: data.Batch, features_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 sums: those of `measure`; right and supervised slots [2, B-1]; tokens and blocks of the walk, by
    source [2, sources].
    """
    c, totals, by_slot = job.c, torch.zeros(6, device=job.device), 0
    kv = job.drafter.context_keys_values(features_TKH, job.put(batch.positions_T))
    anchors_A, prefixes = every_anchor(batch), []
    for blocks in to_blocks(job, batch, anchors_A):
        loss, predicted = job.drafter(kv, blocks)
        right, supervised, prefix = found = outcomes(predicted, blocks)
        totals += measure(loss, found, blocks)
        by_slot = by_slot + torch.stack([right.sum(0), supervised.sum(0)])
        prefixes.append(prefix)
    prefix_T = torch.zeros(c.token_budget, dtype=torch.int64)
    prefix_T[anchors_A] = torch.cat(prefixes).cpu()[: len(anchors_A)]
    walked = torch.zeros(2, len(job.facts["sources"]))
    for document, tokens, drafted in model.walk_answers(prefix_T, batch.mask_T, batch.doc_T):
        walked[:, batch.source_D[document]] += torch.tensor([tokens, drafted])
    return totals, by_slot, walked.to(job.device)


def decode_held_out(job: Job) -> float:
    """Tokens per target pass of --eval-decode's prompts, decoded greedily, a share of them on each rank."""
    mine, done = job.batches.prompts[job.world.rank :: job.world.size], (0, 0)
    if mine:
        done = decode.acceptance(job.target, job.drafter, mine, job.batches.stops)
    sums = torch.tensor(done, dtype=torch.float32, device=job.device)
    dist.all_reduce(sums, group=job.world.draft_group)
    tokens, blocks = sums.tolist()
    return tokens / max(blocks, 1)


def every_anchor(batch: data.Batch) -> Tensor:
    """Packed indices of all valid anchors."""
    return torch.from_numpy(np.flatnonzero(data.valid_anchors(batch.mask_T.numpy(), batch.doc_T.numpy())))


# ---------------------------------------------------------------------------------------------------------
# The log


def device_in_use(job: Job) -> dict[str, float]:
    """Used and free memory, GiB: of the device where there is one, else of the process and the machine."""
    if job.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return {"peak_gib": (total - free) / 2**30, "free_gib": free / 2**30}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"peak_gib": peak / 2**30, "free_gib": pages / 2**30}


def report_memory(job: Job) -> None:
    """After the rehearsal of a step: what each rank has taken, which will not grow, and what is left."""
    found = job.world.gather((job.world.name(), device_in_use(job)))
    if job.folder:
        name, least = min(found, key=lambda pair: pair[1]["free_gib"])
        most = max(m["peak_gib"] for _, m in found)
        job.folder.say(
            f"memory after a rehearsed step: at most {most:.1f} GiB a rank; least left: "
            f"{least['free_gib']:.1f} GiB, {name}"
        )


class Pulse:
    """The end of each step: what this rank did goes to the control exchange, what all did to the log.

    On a GPU a step's numbers are still being computed when the host gets here, so they are posted one step
    later; reading them waits for the step before, never for the one just issued.
    """

    def __init__(self, job: Job, waits: stream.Waits):
        self.job, self.waits = job, waits
        self.unposted: list[tuple] = []
        self.logged = job.first_step
        self.bad_in_a_row, self.held, self.speed = 0, {}, []
        self.begun = None

    def mark(self):
        """Now, on this rank's device."""
        if self.job.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_step(self, step: int, known: dict[str, float], computed: Tensor | None = None) -> None:
        job = self.job
        if computed is not None and computed.is_cuda:
            computed = computed.to("cpu", non_blocking=True)
        ended = self.mark()  # behind that copy: `post` waits for this before it reads
        known = known | device_in_use(job) | {"stop": job.ending.asked.is_set()}
        self.unposted.append((step, known, computed, self.begun, ended, self.cut()))
        self.begun = ended
        flush = job.saves(step) or job.evaluates(step) or step == job.last_step
        while self.unposted and (flush or len(self.unposted) > 1):
            self.post(*self.unposted.pop(0))
        self.decide(step)
        if job.folder:
            self.log(step if flush else step - job.control.lag)
        if flush:  # evaluation and saving are not part of the next step's time
            self.begun = None

    def post(self, step: int, known: dict, computed: Tensor | None, begun, ended, cuts: dict) -> None:
        if self.job.device.type == "cuda":
            ended.synchronize()
            seconds = begun.elapsed_time(ended) / 1000 if begun is not None else 0.0
        else:
            seconds = ended - begun if begun is not None else 0.0
        if computed is not None:
            known |= dict(zip(COMPUTED, computed.tolist(), strict=True))
        waited = {name: stream.Waits.total(cut) for name, cut in cuts.items()}
        self.job.control.post(step, known | {"step_s": seconds} | waited)

    def begin_step(self) -> None:
        """A step begins where the one before ended, but for an evaluation or a checkpoint between them."""
        if self.begun is None:
            self.cut()
            self.begun = self.mark()

    def cut(self) -> dict[str, tuple]:
        """What this rank waited for in the step that ends here: the other side, and its own data."""
        return {"wait_s": self.waits.cut(), "data_s": self.job.loading.cut()}

    def decide(self, step: int) -> None:
        """What the exchange of `lag` steps ago says: stop soon, or give up. The same on every rank."""
        job, seen = self.job, step - self.job.control.lag
        begun = self.waits.begin()  # a side that is ahead waits here for the other one
        values = job.control.read(seen)
        self.waits.end(begun)
        if values is None:
            return
        if any(values["stop"]):
            job.last_step = min(job.last_step, step + job.stop_notice)
        self.bad_in_a_row = self.bad_in_a_row + 1 if values["skipped"][0] else 0
        if self.bad_in_a_row == 5:
            raise UserError(
                f"5 steps in a row with a non-finite gradient, up to step {seen}: lower --lr, check the data"
            )
        job.control.forget(min(self.logged, seen) if job.folder else seen)

    def end(self) -> None:
        """After the last step: decide on the steps that no later one has looked at."""
        for late in range(self.job.last_step + 1, self.job.last_step + self.job.control.lag + 1):
            self.decide(late)

    def log(self, upto: int) -> None:
        """Rank 0: one metrics line and one console line for each step that is known by now."""
        while self.logged < upto:
            step = self.logged + 1
            record = self.record(step, self.job.control.read(step))
            self.logged = step
            self.job.folder.say(self.line(record))
            if self.job.evaluates(step):
                self.held = record  # its line in metrics.jsonl also has the evaluation
            else:
                self.job.folder.write_metrics(record)

    def record(self, step: int, v: dict[str, list[float]]) -> dict:
        job, world = self.job, self.job.world
        drafters = world.drafter_ranks()
        leaders = [r for node in range(world.nodes) for r in world.leaders(node)]
        targets = drafters if world.colocate else leaders  # a target's other ranks wait with them
        # Of a target's ranks the others wait for the one whose data come last.
        loaders = [max(range(r, r + world.tp), key=lambda r: v["data_s"][r]) for r in targets]
        step_s = max(v["step_s"][r] for r in drafters)
        self.speed = [*self.speed[-49:], step_s] if step_s else self.speed

        def share(ranks: list[int], what: str = "wait_s") -> float:
            return sum(v[what][r] / v["step_s"][r] if v["step_s"][r] else 0.0 for r in ranks) / len(ranks)

        weight, slots, blocks = max(v["weight"][0], 1e-9), max(v["slots"][0], 1), max(v["blocks"][0], 1)
        mean_s = sum(self.speed) / max(1, len(self.speed))
        return {
            "step": step,
            "loss": v["loss"][0] / weight,
            "acc": v["right"][0] / slots,
            "acc_len": 1 + v["prefix"][0] / blocks,
            "lr": job.lr(step),
            "grad_norm": v["grad_norm"][0],
            "step_ms": 1000 * step_s,
            "tokens_per_s": sum(v["tokens"]) / step_s if step_s else 0.0,
            "wait_target": share(targets),
            "wait_drafter": share(drafters),
            "wait_data": share(loaders, "data_s"),
            "peak_gib": max(v["peak_gib"]),
            "headroom_gib": min(v["free_gib"]),
            "eta_s": (job.total_steps - step) * mean_s,
            **({"skipped": True} if v["skipped"][0] else {}),
        }

    def line(self, m: dict) -> str:
        total = m["peak_gib"] + m["headroom_gib"]
        text = (
            f"step {m['step']:05d}/{self.job.total_steps:05d} | loss {m['loss']:.4f} "
            f"| acc_len {m['acc_len']:.2f} | lr {m['lr']:.1e} | gnorm {m['grad_norm']:.2f} "
            f"| {m['step_ms']:.0f} ms | {m['tokens_per_s'] / 1000:.1f} Ktok/s "
            f"| wait t {100 * m['wait_target']:.0f}% d {100 * m['wait_drafter']:.0f}% "
            f"| {m['peak_gib']:.1f}/{total:.0f} GiB | eta {duration(m['eta_s'])}"
        )
        return text + (" | SKIPPED: gradient not finite" if m.get("skipped") else "")

    def evaluated(self, step: int, result: dict) -> None:
        """Rank 0: report an evaluation made after `step`."""
        folder = self.job.folder
        if not folder:
            return
        folder.write_metrics({"step": step, **self.held, **result})
        self.held = {}
        line = (
            f"eval {step:05d} | loss {result['eval_loss']:.4f} | acc {100 * result['eval_acc']:.1f}% "
            f"| acc_len {result['eval_acc_len']:.2f} (teacher-forced) | tau {result['eval_tau']:.2f} | "
            + (f"decoded {result['decode_tau']:.2f} | " if "decode_tau" in result else "")
            + ", ".join(
                f"{s} {tau:.2f}".replace(" ", "\0") for s, tau in result["eval_tau_by_source"].items()
            )
        )
        for part in textwrap.wrap(line, 100, subsequent_indent=" " * 13, break_on_hyphens=False):
            folder.say(part.replace("\0", " "))  # a source and its number stay together
        c, training = self.job.c, "training"
        if c.loss_weights == "dpace" or c.variant == "dflash2":
            training += ", in a unit of its own"  # other weights, or the selector's loss as well
        checkpoint.draw_curves(folder.path, f"{c.folder.name}: {folder.path}", training)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"


# ---------------------------------------------------------------------------------------------------------
# The flags: parse, check, choose


def backend(c: Config) -> types.ModuleType:
    """Whose TargetConfig, Target and load_embedding_and_head the run uses."""
    if c.target_backend not in ("native", "transformers"):
        raise ValueError(f"--target-backend {data.short(c.target_backend, 40)}: give native or transformers")
    return hf_target if c.target_backend == "transformers" else model


@functools.cache  # asked for many times, and the folder of --init-draft may go once the run has a checkpoint
def shape_to_start_from(init_draft: str, resume: str, target: str, target_backend: str) -> DrafterConfig:
    c = Config(target=target, target_backend=target_backend)
    place = checkpoint.find_checkpoint(Path(resume))[1] if resume else None
    place = place or checkpoint.find_drafter(Path(init_draft), "--init-draft")
    return checkpoint.drafter_shape(place, backend(c).TargetConfig.from_folder(c.folder), c.folder)


def restarted_run() -> str:
    """The run folder of this job before torchrun --max-restarts started it again, if it had begun."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
        return ""
    kept = launcher_store()
    run = kept.get("run").decode() if kept.check(["run"]) else ""
    return run if run and (Path(run) / "config.json").exists() else ""


def parse_flags(argv: list[str] | None = None, restarted: str = "") -> Config:
    """The config from the command line; the saved config of a resumed or restarted run fills in what is not
    given.
    """
    parser = data.Parser("train.py", __doc__)
    for f in dataclasses.fields(Config):
        how: dict = {"type": token_count if f.name == "token_budget" else f.type}
        if typing.get_origin(f.type) is list:
            how = {"type": str, "nargs": "+"}
        elif f.type is bool:
            how = {"action": "store_true"}
        flag, default = "--" + f.name.replace("_", "-"), getattr(Config, f.name, None)
        shown = f" ({default})" if default and default != -1 else ""  # else the text says what is chosen
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f.metadata["help"] + shown, **how)
    given = vars(parser.parse_args(argv))
    check_values(given, "--{}: give another value")
    for name, value in given.items():
        if value == getattr(Config, name, None) == 0 and name not in ("eval_decode", "seed"):
            raise ValueError(f"--{name.replace('_', '-')} 0: must be above 0; leave it out for the default")
    saved = {}
    if restarted:
        given = {k: v for k, v in given.items() if k != "out"} | {"resume": restarted}
    if given.get("resume"):
        if "out" in given:
            raise ValueError("--out with --resume: a resumed run stays in its folder: leave --out out")
        if "init_draft" in given and not restarted:
            raise ValueError(
                "--init-draft with --resume: a resumed run goes on from its checkpoint: leave one of them out"
            )
        run, _ = checkpoint.find_checkpoint(Path(given["resume"]))
        saved = checkpoint.read_config(run)
        if saved.pop("world_size", 0) != int(os.environ.get("WORLD_SIZE", 1)):
            saved |= {"drafters": 0, "layout": ""}  # another world: split it anew
            given = {k: v for k, v in given.items() if not restarted or k not in ("drafters", "layout")}
        elif given.get("target_tp") not in (None, saved.get("target_tp", 1)):
            saved |= {"drafters": 0, "layout": ""}  # other targets: likewise
        elif given.get("layout") not in (None, saved.get("layout")):
            saved["drafters"] = 0  # those of the other layout
        if "epochs" in given and "steps" not in given:
            saved["steps"] = 0  # which would go before it
        known = {f.name for f in dataclasses.fields(Config)}
        saved = {k: v for k, v in saved.items() if k in known} | {"out": str(run)}
        check_values(saved, f"{run}/config.json: {{}}: start the run anew")
    return Config(**(saved | given))


def token_count(text: str) -> int:
    if text == "auto":
        return AUTO
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{data.short(text, 40)}: give a number of tokens, or auto")
    return int(text)


def check_values(values: dict, place: str) -> None:
    """ValueError where a field of the config has another type than its flag, or text that cannot be shown."""
    for f in dataclasses.fields(Config):
        if f.name not in values:
            continue
        value, listed = values[f.name], typing.get_origin(f.type) is list
        texts = value if listed and isinstance(value, list) else [value]
        good = (type(value) is list) == listed and all(type(v) is (str if listed else f.type) for v in texts)
        if f.type is float and type(value) is int and abs(value) < 1 << 53:
            values[f.name], good = float(value), True
        kind = "a list of texts" if listed else f"a {f.type.__name__}"
        why = "" if good else f"is not {kind}"
        why = why or next(filter(None, map(data.unfit_name, (v for v in texts if isinstance(v, str)))), "")
        if why:
            name, shown = f.name.replace("_", "-"), data.short(str(value), 60)
            raise ValueError(place.format(f"{name} {shown} {why}"))


def resolve(c: Config, t: TargetConfig, world_size: int, nodes: int) -> Config:
    """Fill in what was left open and check the rest; ValueError names the flag and what would do."""
    tiny = not c.target
    c = take_shape(c, c.drafter(t)) if c.init_draft else dataclasses.replace(c)
    if c.token_budget in (0, AUTO):
        c.token_budget = 1024 if tiny else 16384
    c.variant = c.variant or "dflash"
    c.block_size = c.block_size or (8 if tiny or c.variant == "dflash2" else 16)
    c.draft_layers = c.draft_layers or (2 if tiny else 5)
    c.taps = c.taps or len(model.tap_layers(t.layers, 5))
    c.gamma = c.gamma or model.default_gamma(c.block_size)
    c.max_length = c.max_length or min(data.LENGTH, t.max_position, c.token_budget)
    c.anchors = c.anchors or max(1, c.token_budget // 4)
    c.anchor_chunk = min(c.anchor_chunk or 2048, c.anchors)
    if c.optimizer == "muon":
        c.lr = c.lr or (2e-2 if tiny else 4e-3)
    c.lr = c.lr or (3e-3 if tiny else 6e-4)
    if tiny:
        c.steps = c.steps or (0 if c.epochs else 250)
        if not c.data:
            c.data, c.eval_data = [str(TINY / "train.jsonl")], c.eval_data or [str(TINY / "eval.jsonl")]
    c.epochs = c.epochs or 6
    check_flags(c, t)
    return resolve_split(c, t, world_size, nodes)


def check_flags(c: Config, t: TargetConfig) -> None:
    """ValueError for a value that cannot be; what depends on the ranks is checked by `resolve_split`."""
    positive = (
        "token_budget max_batch_size max_length block_size draft_layers taps anchors anchor_chunk gamma "
    )
    for name in (positive + "lr clip epochs depth target_tp").split():
        if not getattr(c, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(c, name)}: must be above 0")
    not_below = "steps batches_per_step save_every keep eval_every eval_decode max_bad_lines drafters seed"
    for name in not_below.split():
        if getattr(c, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(c, name)}: must not be below 0")
    for name, choices in CHOICES.items():
        if (value := getattr(c, name)) not in (getattr(Config, name), *choices):
            flag = f"--{name.replace('_', '-')} {data.short(value, 40)}"
            raise ValueError(f"{flag}: give {' or '.join(choices)}")
    least = math.ceil((c.block_size - 2) / 0.85) / 100  # of which exp(-(B - 2) / gamma) is not 0 in fp32
    if c.gamma < least:
        raise ValueError(
            f"--gamma {c.gamma:g}: the last slots of a block weigh nothing: give at least {least}"
        )
    if c.mask_token_id < -1:
        raise ValueError(f"--mask-token-id {c.mask_token_id}: give a token id, or leave it out")
    for name, most in AT_MOST.items():
        if not getattr(c, name) <= most:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(c, name)}: must be at most {most}")
    if not c.data:
        raise ValueError("--data is missing: give the training data of this target, one or more JSONL files")
    if c.token_budget % model.TILE:
        better = -(-c.token_budget // model.TILE) * model.TILE
        raise ValueError(
            f"--token-budget {c.token_budget}: must be a multiple of {model.TILE}: give {better}"
        )
    if c.block_size < 2:
        raise ValueError(
            f"--block-size {c.block_size}: a block is one real token and at least one drafted: give 2 or more"
        )
    if c.taps > (most := len(model.tap_layers(t.layers, c.taps))) and not c.init_draft:
        raise ValueError(f"--taps {c.taps}: this target has {most} layers to tap: give at most {most}")
    if c.max_length > t.max_position:
        raise ValueError(
            f"--max-length {c.max_length}: the target takes {t.max_position} positions: give less"
        )
    if not 0 <= c.headroom < 100:
        raise ValueError(f"--headroom {c.headroom:g}: a percentage, at least 0 and below 100")
    if not 0 <= c.warmup_ratio < 1:
        raise ValueError(f"--warmup-ratio {c.warmup_ratio}: must be at least 0 and below 1")
    if c.eval_decode and backend(c) is not model:
        raise ValueError(
            f"--eval-decode with --target-backend {c.target_backend}: no cache to decode with: leave it out"
        )
    try:
        c.drafter(t).check_variant()
    except ValueError as error:
        raise ValueError(f"--variant dflash2: {error}: leave it out") from None
    if c.fp8:
        check_fp8(c, t)


def take_shape(c: Config, d: DrafterConfig) -> Config:
    """The shape of --init-draft in place of the defaults; ValueError for a flag that contradicts it."""
    shape = {"block_size": d.block_size, "draft_layers": d.layers, "taps": len(d.ids)}
    shape |= {"mask_token_id": d.mask_token, "variant": d.variant}
    for name, value in shape.items():
        if (given := getattr(c, name)) not in (getattr(Config, name), value):
            raise ValueError(
                f"--{name.replace('_', '-')} {given}: {data.short(c.init_draft, 100)} of --init-draft has "
                f"{value}: leave it out"
            )
    return dataclasses.replace(c, **shape)


def check_fp8(c: Config, t: TargetConfig) -> None:
    """ValueError where a product of the drafter has a size that 8-bit products cannot have."""
    d = c.drafter(t)
    sizes = {"hidden size": d.hidden, "intermediate size": d.intermediate, "vocabulary": d.vocab}
    sizes |= {"size of the keys": d.kv_heads * d.head_dim, "size of the queries": d.heads * d.head_dim}
    sizes["--anchor-chunk times --block-size"] = c.anchor_chunk * c.block_size
    for name, size in sizes.items():
        if size % fp8.MULTIPLE:
            raise ValueError(
                f"--fp8: the {name} is {size}, 8-bit products need multiples of {fp8.MULTIPLE}: leave it out"
            )


def resolve_split(c: Config, t: TargetConfig, world_size: int, nodes: int) -> Config:
    """Choose layout, drafters and batches per step for this world, or check what was asked for."""
    c.layout = c.layout or ("split" if world_size > 1 or c.target_tp > 1 else "colocate")
    if c.layout not in ("split", "colocate"):
        raise ValueError(f"--layout {data.short(c.layout, 40)}: give split or colocate")
    if c.target_tp > 1:
        check_tp(c, t, world_size // nodes)
    if c.layout == "colocate":
        if c.drafters not in (0, world_size):
            raise ValueError(
                f"--drafters {c.drafters}: with --layout colocate all {world_size} ranks draft: leave it out"
            )
        c.drafters = world_size
    else:
        resolve_drafters(c, t, world_size // nodes, nodes)
    c.batches_per_step = c.batches_per_step or c.drafters
    if c.batches_per_step % c.drafters:
        raise ValueError(
            f"--batches-per-step {c.batches_per_step}: must be a multiple of the {c.drafters} drafters"
        )
    return c


def resolve_drafters(c: Config, t: TargetConfig, per_node: int, nodes: int) -> None:
    """Of the split layout: choose the drafters by the work of each side, or check what was asked for."""
    if per_node < 2:
        raise ValueError(
            "--layout split: needs 2 ranks a node, one target and one drafter: give --layout colocate"
        )
    whole = range(per_node - c.target_tp, 0, -c.target_tp)[::-1]  # drafters that leave whole targets
    if not c.drafters:
        d = c.drafter(t)
        ours = d.step_flops(c.token_budget, c.anchors)
        theirs = t.prefill_flops(c.token_budget, max(d.ids) + 1)
        fits = [n for n in whole if not c.batches_per_step or c.batches_per_step % (n * nodes) == 0]
        if not fits:
            raise ValueError(
                f"--batches-per-step {c.batches_per_step}: no split of {per_node} ranks a node divides it"
                + (f" and leaves whole targets of {c.target_tp}" if c.target_tp > 1 else "")
            )
        best = per_node * ours / (ours + theirs)
        c.drafters = min(fits, key=lambda n: (abs(n - best), n)) * nodes
    if c.drafters % nodes or not 0 < c.drafters // nodes < per_node:
        most = (per_node - 1) * nodes
        choice = f"a multiple of {nodes} from {nodes} to {most}" if nodes > 1 else f"1 to {most}"
        raise ValueError(
            f"--drafters {c.drafters}: on {nodes} node(s) of {per_node} ranks give "
            f"{choice if most > nodes else most}, so that a node has a target too, or --layout colocate"
        )
    if c.drafters // nodes not in whole:
        choice = " or ".join(str(n * nodes) for n in whole)
        raise ValueError(
            f"--drafters {c.drafters}: what is left of {per_node} ranks a node is not whole targets of "
            f"{c.target_tp} ranks: give {choice}"
        )


def check_tp(c: Config, t: TargetConfig, per_node: int) -> None:
    """ValueError where targets of several ranks are asked for and cannot be had."""
    tp = f"--target-tp {c.target_tp}"
    if c.layout == "colocate":
        raise ValueError(f"{tp}: with --layout colocate every rank has a whole target: leave one of them out")
    if c.target_backend != "native":
        raise ValueError(f"{tp}: --target-backend {c.target_backend} cannot be shared: leave one of them out")
    if per_node <= c.target_tp:
        raise ValueError(
            f"{tp}: needs {c.target_tp + 1} ranks a node, a target's and a drafter, there are {per_node}: "
            "start more, or give a smaller one"
        )
    try:
        t.part(c.target_tp)
    except ValueError as error:
        most = min(per_node, t.kv_heads + 1)
        fits = [str(n) for n in range(1, most) if not t.kv_heads % n and not t.intermediate % n]
        raise ValueError(f"{tp}: {error}: give {' or '.join(fits)}") from None


# ---------------------------------------------------------------------------------------------------------
# Start and end


def save(job: Job, step: int) -> None:
    """Rank 0 copies what a finished step left, and a thread writes it while training goes on."""
    state = {"config": dataclasses.asdict(job.c), "next_batch": step * job.c.batches_per_step}
    job.saver.save(step, job.drafter, job.optimizer, state)


def gate(job: Job) -> None:
    """One rank of each node and role compiles what the run will run; then the others read it."""
    world, work = job.world, None
    cuda = job.device.type == "cuda"  # where it pays to compile more than attention
    source = compile_utils.source_hash(model, fp8)
    say = job.folder.say if job.folder else lambda line: None  # rank 0 says it for all
    if world.drafts:
        drafter = job.drafter
        drafter.run_layer = compile_utils.compile(model.DrafterLayer.forward, name="drafter layer", log=say)
        if cuda:
            drafter.run_context = compile_utils.compile(Drafter.project_context, name="context", log=say)
            drafter.run_norm = compile_utils.compile(model.RMSNorm.forward, name="norm", log=say)
            drafter.run_loss = compile_utils.compile(model.cross_entropy_rows, name="loss", log=say)
            drafter.run_selector = compile_utils.compile(model.selector_loss, name="selector", log=say)
    if cuda and isinstance(getattr(job, "target", None), model.Target):
        compile_target(job.target, say)
    if world.drafts or cuda:
        work = warm_up(job)
    key = gate_key(job)
    share_cache(job, f"{key} {source}", say)
    try:
        compile_utils.gate(
            work,
            role=world.role,
            leader=world.node * world.per_node + (0 if world.drafts else world.drafters_per_node),
            store=world.store,
            key=key,
            label=world.name(),
            source=source,
            log=say,
        )
    except compile_utils.GateError as error:  # the rank that failed has shown its traceback
        raise UserError(f"{error}") from None
    compile_utils.freeze()  # from here on a recompile is an error
    if world.target_group is not None:
        job.target.group = world.target_group  # till here each part ran alone, so that one rank can lead


def gate_key(job: Job) -> str:
    """What the compiled code of this run depends on, but for the build and the source. On a CPU that is the
    drafter's layer alone.
    """
    c, d = job.c, job.drafter_config
    shape = (d.hidden, d.intermediate, d.heads, d.kv_heads, d.head_dim, d.vocab)
    shape += d.windows if any(d.windows) else ()
    key = f"T{c.token_budget} A{c.anchor_chunk} B{d.block_size} {shape} {job.dtype}"
    if job.device.type == "cuda":
        key += f" layers {d.layers} taps {len(d.ids)} length {c.max_length} documents {c.max_batch_size}"
    key += " fp8" if c.fp8 else ""
    key += f" softcap {d.softcap:g}" if d.softcap else ""
    key += f" {d.variant} {d.added()}" if d.variant != "dflash" else ""
    key += f" tp{c.target_tp}" if c.target_tp > 1 else ""
    key += " dpace" if c.loss_weights == "dpace" else ""
    return key


def compile_target(target: model.Target, say: Callable[[str], None]) -> None:
    """A layer as one piece; of a part, the two pieces between its all-reduces."""
    layer = model.TargetLayer
    if target.parts == 1:
        target.run_layer = compile_utils.compile(layer.forward, name="target layer", log=say)
        return
    target.run_attention = compile_utils.compile(layer.attention, name="target attention", log=say)
    target.run_gated = compile_utils.compile(layer.gated, name="target MLP", log=say)


def share_cache(job: Job, shape: str, say: typing.Callable[[str], None]) -> None:
    """No cache folder in common: where node 0 is warm and another node is not, that leader gets a copy."""
    world = job.world
    if world.nodes == 1:
        return
    leaders = [node * world.per_node for node in range(world.nodes)]
    note = compile_utils.send_bundle(control=world.setup, leaders=leaders, shape=shape)
    notes = world.gather(note)
    for rank in leaders[1:]:
        if notes[rank] != "not needed":
            say(f"gate: compile cache of rank 0 for rank {rank}: {notes[rank]}")


def warm_up(job: Job) -> typing.Callable[[], None]:
    """All that this rank's role runs, on the run's shapes: the target; the drafter's training forward and
    backward and its evaluation forward, on the unwrapped module.
    """

    def work() -> None:
        with memory_explained(job):
            everything_once()

    def everything_once() -> None:
        c, shapes = job.c, job.shapes
        nothing = data.empty_batch(0, c.token_budget, c.max_batch_size, c.anchors)
        features_TKH = torch.zeros(shapes.tokens, shapes.width, dtype=shapes.dtype, device=job.device)
        with torch.no_grad():
            if job.world.runs_target:
                job.make_features(nothing, features_TKH)
        if job.world.drafts:
            accumulate(job, job.drafter, nothing, features_TKH, sync=True)
            with torch.no_grad():
                kv = job.drafter.context_keys_values(features_TKH, job.put(nothing.positions_T))
                job.drafter(kv, next(to_blocks(job, nothing, nothing.anchors_A[: c.anchor_chunk])))
            job.optimizer.zero_grad()
        if job.device.type == "cuda":
            torch.cuda.synchronize()

    return work


def check_goes_on(c: Config, place: Path) -> None:
    """ValueError where a checkpoint cannot be gone on with under these flags."""
    state = checkpoint.read_state(place)
    was = {"optimizer": "adamw", "variant": "dflash"} | state.get("config", {})  # older ones know no other
    was["batches_per_step"] = state["next_batch"] // max(1, state["step"])
    for name in ("batches_per_step", "optimizer", "variant", "draft_layers", "taps"):
        if was.get(name, getattr(c, name)) != getattr(c, name):
            flag, has = f"--{name.replace('_', '-')} {getattr(c, name)}", data.short(str(was[name]), 40)
            raise ValueError(f"{flag}: {place} has {has}: leave it out")


def changed_flags(c: Config, place: Path) -> list[str]:
    """What a resumed run does otherwise than before, of the flags that change its arithmetic."""
    state = checkpoint.read_state(place)
    was = state.get("config", {}) | {"mask_token_id": state["drafter"]["mask_token"]}
    names = "target data eval_data token_budget max_batch_size max_length block_size anchors mask_token_id "
    names += "gamma loss_weights lr warmup_ratio clip steps epochs seed fp8"
    pairs = [(name, getattr(c, name), was.get(name, getattr(c, name))) for name in names.split()]
    changed = [
        f"--{name.replace('_', '-')} {data.short(str(now), 60)} (was {data.short(str(old), 60)})"
        for name, now, old in pairs
        if now != old
    ]
    known = {f.name for f in dataclasses.fields(Config)}  # a checkpoint of another version may have more
    gone = [
        f"no --{data.short(name, 40).replace('_', '-')} (was {data.short(str(old), 60)})"
        for name, old in was.items()
        if name not in known and old
    ]
    return changed + gone


def choose_run(c: Config, world: World) -> tuple[Path, Path | None]:
    """(run folder, checkpoint to start from): rank 0 chooses, all hear it, elastic restarts keep it."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    def choose() -> tuple[Path, Path | None]:
        kept, place = launcher_store(), None  # outlives an elastic restart
        if c.resume:
            run, place = checkpoint.find_checkpoint(Path(c.resume))
            if place:
                check_goes_on(c, place)
        elif restarted and kept.check(["run"]):  # it had not begun
            return Path(kept.get("run").decode()), None
        else:
            run = Path(c.out) if c.out else checkpoint.next_free_run()
            never_begun = {".lock", "train.log"}  # what a job leaves that could not even write its config
            if run.exists() and {p.name for p in run.iterdir()} - never_begun:
                fix = f"give a new folder, or --resume {run} to go on with it"
                raise ValueError(f"--out {run}: not empty: {fix}")
        kept.set("run", str(run.absolute()))
        return run, place

    chosen = world.together(lambda: choose() if world.rank == 0 else None, "run folder")
    return world.gather(chosen)[0]


def start(job: Job) -> None:
    """Load everything, compile behind the gate, restore a checkpoint: ready for the first step."""
    c, world, folder = job.c, job.world, job.folder
    if folder:
        saved = {"out": str(folder.path), "resume": "", "world_size": world.size}
        if job.device.type == "cuda":
            saved["gpu"] = torch.cuda.get_device_name()  # diagnose.throughput judges the run by it elsewhere
        config = dataclasses.asdict(c) | saved
        if not job.place:  # else once its checkpoint is read: a refused --resume leaves the run as it was
            folder.write_config(config)
        folder.write_status("running", pid=os.getpid())
        for line in banner(job):
            folder.say(line)
    compile_utils.announce(world.role, world.store)
    job.load_models()
    stream.connect(world)
    gate(job)
    if job.place:
        restore = lambda: checkpoint.load(job.place, job.drafter, job.optimizer)  # noqa: E731
        world.together(restore if world.drafts else lambda: None, "resume")
    if folder:
        for line in folder.open_metrics(job.first_step):
            folder.say(line)
        if job.place:
            folder.write_config(config)
            folder.say(f"resumed from {job.place}: {job.first_step} of {job.total_steps} steps done")
    job.ending.training = True


@functools.cache  # first asked before anything is loaded, when all that this process holds is a bare context
def device_memory(world: World) -> int:
    """Bytes of this rank's GPU that nobody else holds; 0 where there is no GPU."""
    if world.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return min(total, free + torch.cuda.memory_reserved() + headroom.BARE_CONTEXT)


def check_device(c: Config, world: World) -> None:
    if c.fp8 and world.drafts and (why := fp8.why_not(world.device)):
        raise ValueError(f"--fp8: {why}: leave it out")


def refuse_hopeless(c: Config, t: TargetConfig, world: World, with_budget: Callable[[int], Config]) -> None:
    """The estimate of headroom.py, before any weight is loaded: ValueError where it cannot fit."""
    have = device_memory(world)
    if have and not c.ignore_headroom:
        asked = (with_budget, c, t, world.role, world.size, have)
        if problem := headroom.refusal(*asked, nodes=world.nodes):
            raise ValueError(problem)


def largest_that_fits(
    c: Config, t: TargetConfig, world: World, with_budget: Callable[[int], Config]
) -> tuple[Config, str]:
    """--token-budget auto: by the estimate of headroom.py, the most that leaves --headroom on every rank; and
    a note.
    """

    def largest() -> list[int]:
        have = int(device_memory(world) * (1 - c.headroom / 100))
        if not have:
            raise ValueError("--token-budget auto: this run is on CPU: give a number of tokens")
        asked = (with_budget, t, headroom.role_name(world.role), world.size, have)
        return [headroom.largest_token_budget(*asked, squeezed=squeezed) for squeezed in (False, True)]

    found = world.gather(world.together(largest, "--token-budget auto"))
    budget, squeezed = (min(of_ranks) for of_ranks in zip(*found, strict=True))
    if not budget:
        raise UserError(
            "--token-budget auto: nothing fits: python -m diagnose.memory shows where it goes; use a larger "
            "card, a smaller target or fewer --draft-layers"
        )
    note = f"--token-budget auto: {budget}; up to {squeezed} may run, the allocator short of room and slower"
    return with_budget(budget), note


@contextlib.contextmanager
def memory_explained(job: Job) -> Iterator[None]:
    """An out-of-memory error becomes one line: which rank, what it held, the budget that would fit."""
    try:
        yield
    except RuntimeError as error:
        if not headroom.is_out_of_memory(error):
            raise
        when = "in training" if job.ending.training else "before the first step"
        world, have = job.world, device_memory(job.world)
        asked = (job.with_budget, job.c, job.t, world.role, world.size, have)
        told = headroom.ran_out(error, *asked, nodes=world.nodes)
        raise UserError(f"{world.name()} ran out of memory {when}{told}") from None


def banner(job: Job) -> Iterator[str]:
    c, world, d = job.c, job.world, job.drafter_config
    dtype = str(job.dtype).removeprefix("torch.")
    target = c.folder.relative_to(Path.cwd()) if c.folder.is_relative_to(Path.cwd()) else c.folder
    yield f"run {job.folder.path} | target {target} | {job.facts['about']}"
    roles = f"{world.drafters} drafter(s) + {world.targets} target(s)"
    roles += f" of {c.target_tp} ranks" if c.target_tp > 1 else ""
    if world.colocate:
        roles = f"{world.size} rank(s), each drafter and target"
    yield f"{roles} on {world.nodes} node(s), {job.device.type} {dtype}"
    name = "drafter" if d.variant == "dflash" else f"{d.variant} drafter"
    yield (
        f"{name}: {d.layers} layers, B {d.block_size}, {d.parameters() / 1e6:.1f}M parameters, "
        f"taps {list(d.ids)}, mask token {d.mask_token}, gamma {c.gamma:g}, lr {c.lr:g}"
        + (", loss weights dpace" if c.loss_weights == "dpace" else "")
        + (", muon" if c.optimizer == "muon" else "")
    )
    yield (
        f"{job.total_steps} steps of {c.batches_per_step} batch(es) of {c.token_budget} tokens, {c.anchors} "
        f"anchors | evaluation every {job.eval_every}, checkpoint every {job.save_every}"
    )
    if c.init_draft and not job.place:
        yield f"starts from {checkpoint.find_drafter(Path(c.init_draft), '--init-draft')}"
    if job.place and (changes := changed_flags(c, job.place)):
        yield f"note: not as in {job.place}: {', '.join(changes)}"
    for note in job.notes:
        yield f"note: {note}"


def train(job: Job) -> None:
    world, folder = job.world, job.folder
    if job.first_step == job.total_steps:
        if folder:  # as it is: a resume would note another world size and layout
            folder.write_status("finished", step=job.total_steps)
            print(f"{job.run} has its {job.total_steps} steps: nothing to do; --steps N: N steps in all")
        return
    start(job)
    if world.drafts:
        feed = Colocated(job) if world.colocate else Streamed(job)
        run_drafter(job, feed, Pulse(job, feed.waits))
    else:
        sender = sender_of(job)
        run_target(job, sender, Pulse(job, sender.waits))
    if job.saver:
        job.saver.wait()
    world.barrier()
    if folder:
        stopped = job.last_step < job.total_steps
        why = {"why": f"{job.ending.reason or 'another rank was asked to'}"} if stopped else {}
        folder.write_status("stopped" if stopped else "finished", step=job.last_step, **why)
        place = (checkpoint.checkpoints(folder.path) or [folder.path])[-1]
        folder.say(f"{'stopped' if stopped else 'finished'}: checkpoint {place}, export {place / 'export'}")
        if stopped:
            alone = "--standalone " if world.nodes == 1 else ""  # beside a job that has the usual port
            ranks = f"torchrun {alone}--nproc_per_node={world.per_node}" if world.size > 1 else "python"
            folder.say(f"go on with: {ranks} train.py --resume {folder.path}")


def end_badly(error: BaseException, world: World, ending: Ending, job: Job | None) -> int:
    """One rank says what went wrong, once: a line for what the user must change, else its traceback."""
    first = ending.fail(error)
    alone = first["rank"] == -1 and (world.local == 0 or not isinstance(error, UserError))
    if first["rank"] == world.rank or alone:
        if not isinstance(error, UserError):
            traceback.print_exception(error, file=sys.stderr)
        print(f"train.py: {first['why']}", file=sys.stderr, flush=True)
    if job:
        job.note_failure(first["why"])
    return 1 if ending.training else 2


def main() -> int:
    """Parse and check, then join. Exit 0: finished or stopped; 2: before the first step; 1: after."""
    try:
        c = parse_flags(restarted=restarted_run())
        t = backend(c).TargetConfig.from_folder(c.folder)
        size = int(os.environ.get("WORLD_SIZE", 1))
        nodes = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
        asked, c = c, resolve(c, t, size, nodes)
        data.check_files([*c.data, *c.eval_data])
    except (UserError, ValueError) as error:
        return refuse(f"train.py: {error}")
    ending, world = Ending(), World(c.layout, c.drafters, c.target_tp)
    job, run, notes = None, None, []
    try:
        world.join(c.device, allow_cpu=not c.target)
        ending.watch(world)
        world.together(lambda: check_device(c, world), "--fp8")
        cache = world.together(lambda: compile_utils.use_cache(c.compile_cache or None), "--compile-cache")

        def with_budget(budget: int) -> Config:
            settled = {"layout": c.layout, "drafters": c.drafters, "token_budget": budget}
            return resolve(dataclasses.replace(asked, **settled), t, size, nodes)

        if asked.token_budget == AUTO:
            c, note = largest_that_fits(c, t, world, with_budget)
            notes.append(note)
        world.together(lambda: refuse_hopeless(c, t, world, with_budget), "memory")
        run, place = choose_run(c, world)
        job = Job(c, t, world, ending, run, place)
        job.notes += notes + cache.warnings + (checkpoint.passed_over(run, place) if c.resume else [])
        job.with_budget = with_budget
        with memory_explained(job):
            train(job)
        world.leave()
    except Exception as error:  # whatever it is, every rank must end with it
        code = end_badly(error, world, ending, job)
        if run and not job and world.rank == 0:
            with contextlib.suppress(OSError):  # not empty: not ours to remove
                run.rmdir()
        end(code)  # no destructor may wait for a rank that is gone
    ending.finished()
    return 0


def end(code: int) -> typing.NoReturn:
    """Leave without running destructors: those of torch 2.11 now and then abort a process that is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
