"""Lossless speculative decoding with a trained drafter: what it accepts and how much faster it is.

    python decode.py                                                   # the newest finished run, tiny target
    python decode.py --target DIR --draft DIR --prompts FILE           # an export, a run or a checkpoint
    python decode.py --target DIR --draft DIR --prompts FILE --verify  # token for token what the target says

A round drafts one block in one pass (slot 0 the last real token, the rest mask tokens), verifies it in one
target pass, and keeps the longest matching prefix plus the target's own next token. With --temperature the
drafts are accepted by rejection sampling: the output has exactly the target's distribution. Acceptance is
counted as training's tau is: (answer tokens after the first, end of turn included) / (blocks drafted). The
target alone decodes the same prompts with the same caches, compiled layers and CUDA graphs.

Shape letters: P rows (prompts decoded at a time), Q new tokens of a row, B block size, D = B-1 drafts,
C capacity of a cache, V vocabulary, H hidden, K tapped layers.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import checkpoint
import compile_utils
import data
import model
from model import Drafter, DrafterLayer, RMSNorm, Target, TargetLayer

TINY = data.TINY
CHUNK = 128  # prompt tokens of one prefill graph
STRIDE = 64  # capacities and, without graphs, the cache rows attended to are multiples of this
LEAST_TEMPERATURE = 1e-6  # below, logits divided by it overflow to no distribution at all
TIE_ULPS = 4  # a gap of so many units in the last place of the top logit counts as a tie


# ---------------------------------------------------------------------------------------------------------
# Prompts


@dataclasses.dataclass
class Prompt:
    """Token ids to go on from, and at which length to stop."""

    ids: list[int]
    limit: int
    source: str
    where: str


def read_prompts(files: list[str], tokenizer: data.Tokenizer, every_turn: bool) -> list[Prompt]:
    """The prompts of JSONL files, `limit` not yet set; ValueError names the file and line."""
    prompts = []
    for name in files:
        try:
            lines = Path(name).read_bytes().splitlines()
        except OSError as error:
            raise ValueError(
                f"--prompts {name}: cannot be read ({error.strerror}): give a JSONL file"
            ) from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                record = data.parse_line(line)
                source = str(record.get("source", Path(name).stem))
                prompts += [
                    Prompt(ids, 0, source, where) for ids in prompt_ids(record, tokenizer, every_turn)
                ]
            except ValueError as error:
                raise ValueError(f"{where}: {error}: correct or remove this line") from None
    if not prompts:
        raise ValueError(f"--prompts {' '.join(files)}: no prompts: give JSONL with messages, prompt or text")
    return prompts


def prompt_ids(record: dict, tokenizer: data.Tokenizer, every_turn: bool) -> list[list[int]]:
    """Token ids of the prompts of one record: up to its last assistant turn, or up to each of them."""
    if "messages" in record or "conversations" in record or {"prompt", "response"} <= record.keys():
        messages = data.conversation_of(record) if has_answer(record) else record["messages"]
    elif "prompt" in record and tokenizer.template_text is not None:
        messages = [{"role": "user", "content": data.text_of(record["prompt"], "prompt")}]
    elif "prompt" in record or "text" in record:
        name = "prompt" if "prompt" in record else "text"
        ids = tokenizer.backend.prefix() + tokenizer.encode(data.text_of(record[name], name))
        if not ids:
            raise data.BadLine(f"empty {name}")
        return [ids]
    else:
        raise data.BadLine("no messages, prompt or text")
    if tokenizer.template_text is None:
        raise ValueError(f"{tokenizer.folder} has no chat template: give the prompts as text")
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    cuts = ends if every_turn else ends[-1:]
    return [tokenizer.encode(tokenizer.render(messages[:cut], add_generation_prompt=True)) for cut in cuts]


def has_answer(record: dict) -> bool:
    """Is this a recorded conversation? Else it must be messages that end with the question."""
    messages = record.get("messages")
    if not isinstance(messages, list) or any(
        not isinstance(m, dict) or m.get("role") == "assistant" for m in messages
    ):
        return True
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if not isinstance(role, str) or role not in data.ROLES:
            raise data.BadLine(f"message {number} has the unknown role {data.short(repr(role), 40)}")
        data.text_of(message.get("content"), f"content of message {number}")
    return not messages


def stop_tokens(tokenizer: data.Tokenizer) -> list[int]:
    """Every token that ends an answer: end of text, and the end of an assistant turn in the chat template."""
    stops = set(tokenizer.eos_ids)
    if tokenizer.template_text is not None:
        sample = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids, mask = tokenizer.encode_chat(sample)
        last = max(i for i, m in enumerate(mask) if m)
        stops |= {ids[last]} & set(tokenizer.added.values())
    return sorted(stops)


# ---------------------------------------------------------------------------------------------------------
# Accepting drafts


def choose(logits: Tensor, temperature: float, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(tokens, probabilities): the most likely ones, or samples by an exponential race with the noise."""
    if not temperature:
        return logits.argmax(-1), None
    probability = torch.softmax(logits.float() / temperature, -1)
    return (probability / noise).argmax(-1), probability


def head_logits(x: Tensor, norm: RMSNorm, head_VH: Tensor) -> Tensor:
    return F.linear(norm(x), head_VH)


def draft_path(
    x_PDH: Tensor,
    drafter: Drafter,
    token_P: Tensor,
    temperature: float,
    noise_PDV: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """DFlash 2: (tokens [P, D], probabilities [P, D, V]) of a walk over each slot's candidates, from the last
    token on. A sample is drawn from the candidates alone: q is 0 for all other tokens.
    """
    selector = drafter.candidate_selector
    h_PDH = drafter.norm(x_PDH)
    all_PDV = F.linear(h_PDH, drafter.head)
    logits_PDM, ids_PDM = all_PDV.topk(selector.top_k)
    logits_PDM = model.soft_capped(logits_PDM, drafter.c.softcap)
    noise_PDM = noise_PDV.gather(-1, ids_PDM) if temperature else None

    def choose_edge(edges_PM: Tensor, slot: int) -> tuple[Tensor, Tensor | None]:
        return choose(edges_PM, temperature, noise_PDM[:, slot] if temperature else None)

    tokens_PD, odds = selector.walk(h_PDH, ids_PDM, logits_PDM, token_P, choose_edge)
    if not temperature:
        return tokens_PD, None
    q_PDV = torch.zeros_like(all_PDV, dtype=torch.float32).scatter(-1, ids_PDM, torch.stack(odds, 1))
    return tokens_PD, q_PDV


def accept_greedy(drafted_PD: Tensor, logits_PBV: Tensor) -> tuple[Tensor, Tensor]:
    """(the target's own tokens [P, B], how many of them follow from accepted drafts, 1 to B)."""
    new_PB = logits_PBV.argmax(-1)
    return new_PB, 1 + (drafted_PD == new_PB[:, :-1]).long().cumprod(1).sum(1)


def accept_sampled(
    drafted_PD: Tensor, q_PDV: Tensor, p_PBV: Tensor, uniform_PD: Tensor, noise_PV: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling (Leviathan et al. 2023): the tokens are distributed as p, whatever proposed them.

    A draft of q is accepted with probability min(1, p/q); the first rejected one is replaced by a sample of
    max(p - q, 0), normalised; after the last accepted one comes a sample of p. Returns tokens and counts.
    """
    drafts = drafted_PD.shape[1]
    p_of, q_of = (t.gather(-1, drafted_PD[..., None])[..., 0] for t in (p_PBV[:, :drafts], q_PDV))
    kept_P = (uniform_PD * q_of < p_of).long().cumprod(1).sum(1)
    row = torch.arange(len(kept_P), device=kept_P.device)
    p_PV = p_PBV[row, kept_P]
    q_PV = q_PDV[row, kept_P.clamp(max=drafts - 1)] * (kept_P < drafts)[:, None]
    rest_PV = (p_PV - q_PV).clamp(min=0)
    rest_PV = torch.where(rest_PV.sum(-1, keepdim=True) > 0, rest_PV, p_PV)
    last_P = (rest_PV / noise_PV).argmax(-1)
    new_PB = F.pad(drafted_PD, (0, 1)).scatter(1, kept_P[:, None], last_P[:, None])
    return new_PB, kept_P + 1


def advance(
    new_PQ: Tensor,
    count_P: Tensor,
    stops_E: Tensor,
    tokens_PC: Tensor,
    length_P: Tensor,
    limit_P: Tensor,
    done_P: Tensor,
    jumps_PQ: Tensor,
) -> None:
    """Append the first count_P of the new tokens to each row that is not done, up to its limit or its end.

    jumps_PQ counts the rounds by how many tokens they gave. On the device, without a branch.
    """
    slot_Q = torch.arange(new_PQ.shape[1], device=new_PQ.device)
    kept_PQ = slot_Q < torch.minimum(count_P, limit_P - length_P)[:, None]
    stop_PQ = (new_PQ[..., None] == stops_E).any(-1) & kept_PQ
    kept_PQ = kept_PQ & (stop_PQ.long().cumsum(1) - stop_PQ.long() == 0)
    count_P = torch.where(done_P, 0, kept_PQ.sum(1))
    at_PQ = length_P[:, None] + slot_Q  # tokens beyond the count are written too, and overwritten later
    tokens_PC.scatter_(1, at_PQ, new_PQ)
    jumps_PQ.scatter_add_(1, (count_P[:, None] - 1).clamp(min=0), (~done_P).long()[:, None])
    length_P.add_(count_P)
    done_P.logical_or_(stop_PQ.any(1) | (length_P >= limit_P))


COMPILED = (
    TargetLayer.extend,
    DrafterLayer.extend,
    Drafter.extend_context,
    model.cache_inputs,
    head_logits,
    choose,
    draft_path,
    accept_greedy,
    accept_sampled,
    advance,
)


# ---------------------------------------------------------------------------------------------------------
# The engine: static buffers, and the passes over them


@dataclasses.dataclass
class Answer:
    """Decoded tokens of a prompt; jumps[i]: rounds that gave i+1 tokens, the first token not among them."""

    ids: list[int]
    jumps: list[int]


@dataclasses.dataclass
class Decoded:
    """Answers in the order of the prompts, wall-clock seconds, and ms of each timed pass."""

    answers: list[Answer]
    seconds: float
    ms: dict[str, list[float]]

    def add(self, more: "Decoded") -> None:
        self.answers += more.answers
        self.seconds += more.seconds
        for name, times in more.ms.items():
            self.ms[name] = self.ms.get(name, []) + times


class Engine:
    """A target, perhaps a drafter, and P rows of static caches. All state is on the device.

    Row p holds length_P[p] tokens; the last of them is not yet in the target's cache, and the drafter's
    context cache holds what comes before it. What lies behind in a cache belongs to rejected drafts: it is
    never seen, and overwritten. So cropping a cache is moving length_P.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        stops: list[int],
        rows: int,
        capacity: int,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        self.target, self.drafter, self.rows, self.temperature = target, drafter, rows, temperature
        self.device = target.embed_tokens.weight.device
        self.block = drafter.c.block_size if drafter else 1
        self.capacity = self.seen = -(-capacity // STRIDE) * STRIDE
        self.ids = drafter.c.ids if drafter else ()
        c, place = target.c, (self.device, target.dtype)
        self.cache = model.new_cache(c.layers, rows, self.capacity, c.kv_heads, c.head_dim, *place)
        if drafter:
            d = drafter.c
            self.context = model.new_cache(d.layers, rows, self.capacity, d.kv_heads, d.head_dim, *place)
        self.stops_E = torch.tensor(stops or [-1], device=self.device)
        self.tokens_PC = self.integers(rows, self.capacity)
        self.length_P, self.limit_P = self.integers(rows), self.integers(rows)
        self.done_P = torch.ones(rows, dtype=torch.bool, device=self.device)
        self.jumps_PB, self.drafted_PD = self.integers(rows, self.block), self.integers(rows, self.block - 1)
        self.prompt_Q = self.integers(1, 1)
        self.first_1, self.last_1, self.first_token_1 = (self.integers(1) for _ in range(3))
        self.noise_PV = self.uniform_PD = self.draft_noise_PDV = self.q_PDV = None
        self.random = torch.Generator(self.device).manual_seed(seed)
        if temperature:
            drafted = (rows, self.block - 1, c.vocab)
            self.noise_PV = torch.ones(rows, c.vocab, device=self.device)
            self.uniform_PD = torch.zeros(drafted[:2], device=self.device)
            self.draft_noise_PDV = torch.ones(drafted, device=self.device)
            self.q_PDV = torch.zeros(drafted, device=self.device)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.chunked = False
        self.lag = 1 if self.device.type == "cuda" else 0  # rounds queued before an outcome is looked at
        self.on_answer: Callable[[], object] = lambda: None
        self.fast: dict[Callable, Callable] = {part: part for part in COMPILED}
        for m in (target, drafter) if drafter else (target,):
            m.freq = m.freq.to(self.device)  # no pass may copy from the host
        self.clear()

    def integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def clear(self) -> None:
        """No prompt in any row."""
        self.length_P.fill_(1)
        self.limit_P.fill_(1)
        self.done_P.fill_(True)

    # The passes. Each reads and writes static buffers only, so that it can be captured as a CUDA graph.

    def extend_target(self, tokens_PQ: Tensor, first_P: Tensor, caches: list, ids: tuple[int, ...]):
        run = (self.fast[model.cache_inputs], self.fast[TargetLayer.extend])
        return self.target.extend(tokens_PQ, first_P, caches, self.seen, ids, *run)

    def logits(self, x: Tensor) -> Tensor:
        return self.fast[head_logits](x, self.target.norm, self.target.head_VH)

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """Each row's last token and its position."""
        first_P = self.length_P - 1
        return self.tokens_PC.gather(1, first_P[:, None])[:, 0], first_P

    def draft(self) -> None:
        """One block a row in one drafter pass."""
        token_P, first_P = self.last_tokens()
        run = (self.fast[model.cache_inputs], self.fast[DrafterLayer.extend])
        x_PDH = self.drafter.extend(token_P, first_P, self.context, self.seen, *run)[:, 1:]
        how = (self.temperature, self.draft_noise_PDV)
        if self.drafter.candidate_selector is not None:
            tokens_PD, q_PDV = self.fast[draft_path](x_PDH, self.drafter, token_P, *how)
        else:
            logits = self.fast[head_logits](x_PDH.flatten(0, 1), self.drafter.norm, self.drafter.head)
            tokens_PD, q_PDV = self.fast[choose](logits.unflatten(0, self.drafted_PD.shape), *how)
        self.drafted_PD.copy_(tokens_PD)
        if q_PDV is not None:
            self.q_PDV.copy_(q_PDV)

    def verify(self) -> None:
        """The target over the block: its tokens, its features for the drafter's context, what is accepted."""
        token_P, first_P = self.last_tokens()
        block_PB = torch.cat([token_P[:, None], self.drafted_PD], 1)
        x, features = self.extend_target(block_PB, first_P, self.cache, self.ids)
        features_PBKH = features.unflatten(0, block_PB.shape)
        self.fast[Drafter.extend_context](self.drafter, features_PBKH, first_P, self.context)
        logits_PBV = self.logits(x).unflatten(0, block_PB.shape)
        if self.temperature:
            p_PBV = torch.softmax(logits_PBV.float() / self.temperature, -1)
            new_PB, count_P = self.fast[accept_sampled](
                self.drafted_PD, self.q_PDV, p_PBV, self.uniform_PD, self.noise_PV
            )
        else:
            new_PB, count_P = self.fast[accept_greedy](self.drafted_PD, logits_PBV)
        self.append(new_PB, count_P)

    def step(self) -> None:
        """The target alone: one token a row."""
        token_P, first_P = self.last_tokens()
        x, _ = self.extend_target(token_P[:, None], first_P, self.cache, ())
        new_P, _ = self.fast[choose](self.logits(x), self.temperature, self.noise_PV)
        self.append(new_P[:, None], torch.ones_like(new_P))

    def append(self, new_PQ: Tensor, count_P: Tensor) -> None:
        state = (self.tokens_PC, self.length_P, self.limit_P, self.done_P, self.jumps_PB)
        self.fast[advance](new_PQ, count_P, self.stops_E, *state)

    def prefill(self, row: int, speculative: bool) -> None:
        """Prompt tokens prompt_Q at position first_1 into a row's caches; the token after number last_1."""
        cache = [(k[row : row + 1], v[row : row + 1]) for k, v in self.cache]
        ids = self.ids if speculative else ()
        x, features = self.extend_target(self.prompt_Q, self.first_1, cache, ids)
        if speculative:
            context = [(k[row : row + 1], v[row : row + 1]) for k, v in self.context]
            self.fast[Drafter.extend_context](self.drafter, features[None], self.first_1, context)
        noise = None if self.noise_PV is None else self.noise_PV[row : row + 1]
        logits = self.logits(x.index_select(0, self.last_1))
        token_1, _ = self.fast[choose](logits, self.temperature, noise)
        self.first_token_1.copy_(token_1)

    # On a GPU: compiled layers, each pass one CUDA graph

    def passes(self, speculative: bool) -> list[tuple]:
        prefills = [("prefill", row, speculative) for row in range(self.rows)]
        return [*prefills, *([("draft",), ("verify",)] if speculative else [("step",)])]

    def compile(self) -> None:
        """One compiled code for all layers of a model; a shape of its own for each pass."""
        self.fast = {part: compile_utils.compile(part, name=part.__qualname__) for part in COMPILED}

    def use_chunks(self) -> None:
        """From here on every pass has one shape: prompts go in chunks, whole caches are attended to."""
        self.chunked, self.seen, self.prompt_Q = True, self.capacity, self.integers(1, CHUNK)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run each pass once, so that everything is compiled and every library has its workspace."""
        self.limit_P.fill_(self.capacity - self.block)
        for speculative in [False, True] if self.drafter else [False]:
            for name, *arguments in self.passes(speculative):
                for _ in range(2):
                    getattr(self, name)(*arguments)
        self.clear()

    @torch.no_grad()
    def capture(self) -> None:
        """Record each pass as a CUDA graph; they run one after another, so they may share their memory."""
        self.use_chunks()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        for speculative in [False, True] if self.drafter else [False]:
            for key in self.passes(speculative):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    getattr(self, key[0])(*key[1:])
                self.graphs[key] = graph
        self.clear()

    def launch(self, *key) -> None:
        if key in self.graphs:
            self.graphs[key].replay()
        else:
            getattr(self, key[0])(*key[1:])

    # Decoding

    def shake(self) -> None:
        """Fresh noise for the samples of a round; the passes themselves draw nothing."""
        if self.temperature:
            for noise in (self.noise_PV, self.draft_noise_PDV):
                noise.exponential_(generator=self.random).clamp_(min=1e-30)
            self.uniform_PD.uniform_(generator=self.random)

    def start(self, row: int, prompt: Prompt, speculative: bool) -> None:
        """Prefill a row and put its first token behind the prompt."""
        length = len(prompt.ids)
        ids = torch.tensor([prompt.ids], device=self.device)
        self.shake()
        width = CHUNK if self.chunked else length
        self.seen = self.capacity if self.chunked else length
        for low in range(0, length, width):
            part = ids[:, low : low + width]
            if self.chunked:  # rows of the cache behind the prompt's end are overwritten before they are seen
                self.prompt_Q[:, : part.shape[1]].copy_(part)
            else:
                self.prompt_Q = part
            self.first_1.fill_(low)
            self.last_1.fill_(part.shape[1] - 1)
            self.launch("prefill", row, speculative)
        self.tokens_PC[row, :length] = ids[0]
        self.tokens_PC[row, length] = self.first_token_1[0]
        self.length_P[row] = length + 1
        self.limit_P[row] = prompt.limit
        self.done_P[row] = (self.stops_E == self.first_token_1).any() | (length + 1 >= prompt.limit)
        self.jumps_PB[row] = 0

    def round(self, speculative: bool, clock: "Clock") -> None:
        """One block, or one token of the target alone, for every row."""
        self.shake()
        if not self.chunked:
            room = int(self.length_P.max()) + self.block
            self.seen = min(self.capacity, -(-room // STRIDE) * STRIDE)
        clock.mark("draft" if speculative else "step")
        if speculative:
            self.launch("draft")
            clock.mark("verify")
            self.launch("verify")
        else:
            self.launch("step")
        clock.mark("")

    @torch.no_grad()
    def run(self, prompts: list[Prompt], speculative: bool) -> Decoded:
        """Decode all prompts, P at a time; a finished row takes the next prompt.

        On a GPU the host looks at a round's outcome only when the next round is already queued.
        """
        waiting = collections.deque(range(len(prompts)))
        held: list[int | None] = [None] * self.rows
        answers: list[Answer | None] = [None] * len(prompts)
        outcomes: collections.deque = collections.deque()
        clock = Clock(self.device)
        self.clear()
        begun = clock.now()
        while waiting or any(number is not None for number in held):
            for row in range(self.rows):
                if held[row] is None and waiting:
                    held[row] = waiting.popleft()
                    self.start(row, prompts[held[row]], speculative)
            self.round(speculative, clock)
            outcomes.append((list(held), Snapshot(self.done_P)))
            if len(outcomes) <= self.lag:
                continue
            of, done = outcomes.popleft()
            for row, finished in enumerate(done.read()):
                if finished and held[row] is not None and of[row] == held[row]:
                    answers[held[row]] = self.collect(row, len(prompts[held[row]].ids))
                    held[row] = None
                    self.on_answer()
        return Decoded(answers, clock.now() - begun, clock.passes())

    def collect(self, row: int, prompt: int) -> Answer:
        ids = self.tokens_PC[row, prompt : int(self.length_P[row])].tolist()
        return Answer(ids, self.jumps_PB[row].tolist())


class Snapshot:
    """A small tensor as it is at this point of the device's queue, read later without waiting for more."""

    def __init__(self, t: Tensor):
        self.event = torch.cuda.Event() if t.is_cuda else None
        if self.event:
            self.copy = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self.copy.copy_(t, non_blocking=True)
            self.event.record()
        else:
            self.copy = t.clone()

    def read(self) -> list:
        if self.event:
            self.event.synchronize()
        return self.copy.tolist()


class Clock:
    """Times of passes: on a GPU between events of its queue, which nothing waits for until the end."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self, name: str) -> None:
        """What comes from here to the next mark is called `name`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def passes(self) -> dict[str, list[float]]:
        """ms of each pass, by name."""
        found: dict[str, list[float]] = collections.defaultdict(list)
        for (name, a), (_, b) in zip(self.marks, self.marks[1:], strict=False):
            if name:
                found[name].append(a.elapsed_time(b) if self.cuda else 1000 * (b - a))
        return dict(found)


# ---------------------------------------------------------------------------------------------------------
# Which models


def find_draft(given: str, target: str) -> Path:
    """The export or checkpoint that --draft names; by default the newest finished run of the target."""
    if not given:
        runs = [p.parent for p in Path("runs").glob("*/status.json") if finished(p.parent, target)]
        if not runs:
            raise ValueError(
                f"no finished run of {target or 'the built-in target'} in runs/: train one with "
                "`torchrun --standalone --nproc_per_node=2 train.py`, or give --draft"
            )
        given = str(max(runs, key=lambda run: (run / "status.json").stat().st_mtime))
    return checkpoint.find_drafter(Path(given), "--draft")


def finished(run: Path, target: str) -> bool:
    """Did this run end well, with that target ('' is the built-in one)?"""
    try:
        status = json.loads((run / "status.json").read_text(encoding="utf-8"))
        saved = checkpoint.read_config(run)
    except (ValueError, OSError):  # a run that ended before it wrote them, or damaged files
        return False
    if not isinstance(status, dict):
        return False
    same = (Path(saved.get("target") or TINY)).resolve() == (Path(target or TINY)).resolve()
    return same and status.get("state") == "finished"


def target_of(place: Path, given: str) -> str:
    """--target, else the one a checkpoint was trained with ('' is the built-in one)."""
    if given or not (place / "state.json").is_file():
        return given
    return checkpoint.read_state(place).get("config", {}).get("target", "")


def load_models(c: argparse.Namespace, device: torch.device, dtype: torch.dtype):
    """(target folder, draft folder, target, drafter); the drafter shares the target's embedding and head."""
    place = find_draft(c.draft, c.target)
    folder = Path(target_of(place, c.target) or TINY)
    drafter = checkpoint.load_drafter(place, folder, device, dtype).to(dtype).requires_grad_(False)
    target = Target.load(folder, device, dtype, progress=sys.stderr.isatty())
    drafter.embedding, drafter.head = target.embed_tokens.weight.detach(), target.head_VH.detach()
    return folder, place, target, drafter


# ---------------------------------------------------------------------------------------------------------
# Beside training: what --eval-decode of train.py calls

ROWS = 4  # prompts at a time


def held_out_prompts(corpus: data.Corpus, docs, count: int, max_length: int) -> list[Prompt]:
    """`count` recorded answers, evenly spread over these documents: what stands before each is the prompt,
    and a new answer may be as long as the recorded one.
    """
    found = []
    for doc in docs.tolist():
        low, high = corpus.offsets[doc : doc + 2].tolist()
        high = min(high, low + max_length)
        mask = [0, *corpus.mask[low:high].tolist(), 0]
        edges = [i for i, (a, b) in enumerate(itertools.pairwise(mask)) if a != b]
        source = corpus.source_names[corpus.source[doc]]
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            first = max(first, 1)  # a text without a prompt: its first token is one
            if end - first > 1:  # else there is no block
                ids = corpus.tokens[low : low + first].tolist()
                found.append(Prompt(ids, end, source, f"document {doc}"))
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def acceptance(target: Target, drafter: Drafter, prompts: list[Prompt], stops: list[int]) -> tuple[int, int]:
    """(answer tokens after the first, blocks drafted) of greedy answers, decoded eagerly."""
    room = max(p.limit for p in prompts) + drafter.c.block_size
    plain = plain_copy(drafter, target)
    engine = Engine(target, plain, stops, min(ROWS, len(prompts)), -(-room // CHUNK) * CHUNK)
    if engine.device.type == "cuda":
        engine.use_chunks()  # so that a long prompt takes no more memory than a short one
    answers = engine.run(prompts, True).answers
    return sum(len(a.ids) - 1 for a in answers), sum(sum(a.jumps) for a in answers)


def plain_copy(drafter: Drafter, target: Target) -> Drafter:
    """A drafter in training as an export would have it: the target's dtype, products not in 8-bit floats."""
    with torch.device("meta"):
        nothing = torch.empty(drafter.c.vocab, drafter.c.hidden)
        plain = Drafter(drafter.c, nothing, nothing)
    plain = plain.to(target.dtype).to_empty(device=target.embed_tokens.weight.device).requires_grad_(False)
    plain.load_state_dict(drafter.state_dict())
    plain.embedding, plain.head = target.embed_tokens.weight.detach(), target.head_VH.detach()
    plain.freq = drafter.freq
    return plain


# ---------------------------------------------------------------------------------------------------------
# What was achieved


@dataclasses.dataclass
class Group:
    """The prompts of one source, decoded with the drafter and by the target alone."""

    prompts: list[Prompt]
    drafted: Decoded
    alone: Decoded

    def totals(self) -> dict:
        """Sums that can be added over groups. `tokens` are counted after each answer's first, as tau is."""
        answers = self.drafted.answers
        return {
            "prompts": len(answers),
            "tokens": sum(len(a.ids) - 1 for a in answers),
            "blocks": sum(sum(a.jumps) for a in answers),
            "seconds": self.drafted.seconds,
            "alone_tokens": sum(len(a.ids) - 1 for a in self.alone.answers),
            "alone_seconds": self.alone.seconds,
        }


def rates(totals: dict) -> dict:
    """Acceptance and speeds from sums; None where nothing was drafted."""
    speed = totals["tokens"] / totals["seconds"]
    alone = totals["alone_tokens"] / totals["alone_seconds"]
    return {
        "prompts": totals["prompts"],
        "tokens": totals["tokens"],
        "blocks": totals["blocks"],
        "acceptance": totals["tokens"] / totals["blocks"] if totals["blocks"] else None,
        "tokens_per_s": speed,
        "target_tokens_per_s": alone,
        "speedup": speed / alone if alone else None,
    }


def decode_both(engine: Engine, prompts: list[Prompt]) -> Group:
    """The prompts with the drafter and by the target alone, in turn, so that both meet the same machine."""
    group = Group(prompts, Decoded([], 0.0, {}), Decoded([], 0.0, {}))
    size = 4 if engine.rows == 1 else len(prompts)  # full rows matter more where there are many
    for low in range(0, len(prompts), size):
        part = prompts[low : low + size]
        group.drafted.add(engine.run(part, True))
        group.alone.add(engine.run(part, False))
    return group


def compare(target: Target, groups: dict[str, Group], max_length: int) -> list[dict]:
    """Where greedy answers with the drafter and without part: position, both tokens and their logit gap.

    The gap comes from a plain forward pass of the target over what both share. `tie`: it is within TIE_ULPS
    units in the last place of the top logit, so that the order of a sum decides.
    """
    found = []
    for group in groups.values():
        pairs = zip(group.prompts, group.drafted.answers, group.alone.answers, strict=True)
        for prompt, ours, theirs in pairs:
            if ours.ids == theirs.ids:
                continue
            both = zip(ours.ids, theirs.ids, strict=False)
            at = next((i for i, (a, b) in enumerate(both) if a != b), None)
            if at is None:  # one is a prefix of the other: no near-tie can explain that
                found.append({"where": prompt.where, "position": min(len(ours.ids), len(theirs.ids))})
                found[-1] |= {"tokens": None, "gap": None, "tie": False}
                continue
            logits = next_logits(target, prompt.ids + ours.ids[:at], max_length)
            a, b, top = ours.ids[at], theirs.ids[at], logits.max().item()
            gap = (logits[a] - logits[b]).abs().item()
            least = min(logits[a].item(), logits[b].item())
            room = TIE_ULPS * torch.finfo(target.dtype).eps * abs(top)
            found.append({"where": prompt.where, "position": at, "tokens": [a, b], "gap": gap})
            found[-1]["tie"] = top - least <= room
    return found


@torch.no_grad()
def next_logits(target: Target, ids: list[int], max_length: int) -> Tensor:
    """fp32 logits [V] after these tokens, by the packed forward pass that training uses."""
    device = target.embed_tokens.weight.device
    tokens_T = torch.tensor(ids, device=device)
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
    return target.logits(tokens_T, torch.arange(len(ids), device=device), bounds, max_length)[-1].float()


def report(groups: dict[str, Group], differences: list[dict] | None) -> dict:
    """What --json writes."""
    by_source = {name: group.totals() for name, group in groups.items()}
    total = {key: sum(t[key] for t in by_source.values()) for key in next(iter(by_source.values()))}
    ms: dict[str, list[float]] = collections.defaultdict(list)
    jumps = {
        name: [sum(n) for n in zip(*(a.jumps for a in g.drafted.answers), strict=True)]
        for name, g in groups.items()
    }
    for group in groups.values():
        for decoded in (group.drafted, group.alone):
            for name, times in decoded.ms.items():
                ms[name] += times
    return {
        **rates(total),
        "by_source": {name: {**rates(t), "histogram": jumps[name]} for name, t in by_source.items()},
        "histogram": [sum(n) for n in zip(*jumps.values(), strict=True)],
        "identical": None if differences is None else not differences,
        "differences": differences,
        "draft_ms": mean(ms["draft"]),
        "verify_ms": mean(ms["verify"]),
        "step_ms": mean(ms["step"]),
    }


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def show(r: dict, dtype: str) -> None:
    """The report as a table and lines."""
    heads = ("source", "prompts", "tokens", "acceptance", "tokens/s", "target alone", "speed-up")
    sources = r["by_source"] if len(r["by_source"]) > 1 else {}
    fields = ("prompts", "tokens", "acceptance", "tokens_per_s", "target_tokens_per_s", "speedup")
    rows = [(name, *(t[f] for f in fields)) for name, t in [*sources.items(), ("all", r)]]
    formats = ("", "", "", ".2f", ",.0f", ",.0f", ".2f")
    print(tabulate(rows, heads, floatfmt=formats, missingval="-"))
    if r["blocks"]:
        shares = "  ".join(f"{i}: {100 * n / r['blocks']:.0f}%" for i, n in enumerate(r["histogram"], 1))
        print(f"tokens a block (bonus included)  {shares}")
        print(
            f"draft {r['draft_ms']:.2f} ms, verify {r['verify_ms']:.2f} ms, "
            f"a token of the target alone {r['step_ms']:.2f} ms"
        )
    if r["differences"] is None:
        return
    same = r["prompts"] - len(r["differences"])
    print(f"{same} of {r['prompts']} answers token-identical to the target's own ({dtype})")
    for d in r["differences"]:
        if d["gap"] is None:
            print(f"  {d['where']}: answer ends differently at token {d['position']}")
        else:
            kind = "near-tie" if d["tie"] else "NOT a near-tie"
            print(f"  {d['where']}: token {d['position']}: {d['tokens']}, logit gap {d['gap']:.3g}, {kind}")


def draw(r: dict, path: str) -> None:
    """A picture of the acceptance: tokens a block, and by source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    sizes = range(1, len(r["histogram"]) + 1)
    left.bar(sizes, [n / max(1, r["blocks"]) for n in r["histogram"]])
    left.set(xlabel="tokens a block, bonus included", ylabel="share of blocks", xticks=list(sizes))
    left.set_title(f"acceptance {r['acceptance'] or 0:.2f}, speed-up {r['speedup'] or 0:.2f}")
    names = list(r["by_source"])
    right.barh(names, [r["by_source"][n]["acceptance"] or 0 for n in names])
    right.set(xlabel="tokens per target pass, bonus included", xlim=(0, len(r["histogram"])))
    right.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------
# The command


def check_temperature(temperature: float) -> None:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"--temperature {temperature}: 0 is greedy, else at least {LEAST_TEMPERATURE:g}")


def parse_flags(argv: list[str] | None) -> argparse.Namespace:
    parser = data.Parser("decode.py", __doc__)
    add = parser.add_argument
    add("--target", default="", help="Hugging Face folder (default: the drafter's, or the built-in target)")
    add("--draft", default="", help="export, run folder or checkpoint (default: the newest finished run)")
    add("--prompts", nargs="+", default=[], help="JSONL with messages, prompt or text (the tiny eval.jsonl)")
    add("--every-turn", action="store_true", help="decode each assistant turn, as evaluation does")
    add("--limit", type=int, default=0, help="prompts of each source, at most (all)")
    add("--max-new-tokens", type=int, default=512, help="tokens of an answer, at most")
    add("--batch-size", type=int, default=1, help="prompts decoded at a time")
    add("--temperature", type=float, default=0.0, help="0 is greedy; above, exact sampling from the target")
    add("--seed", type=int, default=0, help="seed of the samples")
    add("--verify", action="store_true", help="exit with 1 if a greedy answer is not the target's own")
    add("--dtype", default="", help="float32, bfloat16 or float16 (float32 on a CPU, bfloat16 on a GPU)")
    add("--device", default="", help="cuda or cpu (default: cuda where there is one)")
    add("--eager", action="store_true", help="on a GPU: neither compile nor CUDA graphs")
    add("--no-compile", action="store_true", help="on a GPU: CUDA graphs of uncompiled layers")
    add("--compile-cache", default="", help="folder of compiled kernels (~/.cache/blockdraft)")
    add("--json", default="", help="write the numbers to this file")
    add("--png", default="", help="draw the acceptance into this file")
    add("--show", type=int, default=0, help="print this many answers")
    c = parser.parse_args(argv)
    for name in ("target", "draft", "prompts", "compile_cache", "json", "png"):
        for text in c.prompts if name == "prompts" else [getattr(c, name)]:
            if why := data.unfit_name(text):
                raise ValueError(
                    f"--{name.replace('_', '-')} {data.short(text, 60)} {why}: give another path"
                )
    for name in ("limit", "temperature", "seed", "show"):
        if not getattr(c, name) >= 0:
            raise ValueError(f"--{name} {getattr(c, name)}: must not be below 0")
    for name in ("max_new_tokens", "batch_size"):
        if getattr(c, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(c, name)}: must be at least 1")
    check_temperature(c.temperature)
    most = {"temperature": 1e3, "seed": (1 << 63) - 1, "batch_size": 1 << 16, "max_new_tokens": 1 << 24}
    for name, limit in most.items():
        if getattr(c, name) > limit:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(c, name)}: must be at most {limit}")
    if c.device not in ("", "cpu", "cuda"):
        raise ValueError(f"--device {data.short(c.device, 40)}: give cuda or cpu")
    if c.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here: leave it out, or check the driver")
    if c.dtype not in ("", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {data.short(c.dtype, 40)}: give float32, bfloat16 or float16")
    if c.verify and c.temperature:
        raise ValueError("--verify --temperature: samples differ from run to run: leave one of them out")
    for name in filter(None, (c.json, c.png)):
        data.check_output(name)
    if c.json and c.png and Path(c.json).resolve() == Path(c.png).resolve():
        raise ValueError("--json --png: both name the same file: give two")
    if c.png and Path(c.png).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--png {data.short(c.png, 100)}: give a name that ends in .png, .svg or .pdf")
    c.device = c.device or ("cuda" if torch.cuda.is_available() else "cpu")
    c.dtype = c.dtype or ("bfloat16" if c.device == "cuda" else "float32")
    return c


def choose_prompts(
    c: argparse.Namespace, tokenizer: data.Tokenizer, max_position: int
) -> dict[str, list[Prompt]]:
    """Prompts by source, each with its limit; those too long for the target are left out, and it is said."""
    files = c.prompts or [str(TINY / "eval.jsonl")]
    groups: dict[str, list[Prompt]] = collections.defaultdict(list)
    prompts = read_prompts(files, tokenizer, c.every_turn)
    long = [p for p in prompts if len(p.ids) >= max_position]
    if long:
        print(f"{len(long)} prompt(s) left out, longer than {max_position - 1} tokens: {long[0].where}")
    for prompt in prompts:
        group = groups[prompt.source]
        if len(prompt.ids) < max_position and not (c.limit and len(group) >= c.limit):
            prompt.limit = min(len(prompt.ids) + c.max_new_tokens, max_position)
            group.append(prompt)
    groups = {name: group for name, group in groups.items() if group}
    if not groups:
        raise ValueError(f"--prompts: every prompt is longer than the target's {max_position - 1} tokens")
    return groups


def make_engine(
    c: argparse.Namespace, target: Target, drafter: Drafter, stops: list[int], prompts: list[Prompt]
) -> Engine:
    """An engine large enough for the prompts; on a GPU compiled and captured."""
    rows = min(c.batch_size, len(prompts))
    longest = max(len(p.ids) for p in prompts)
    capacity = max(max(p.limit for p in prompts) + drafter.c.block_size, -(-longest // CHUNK) * CHUNK)
    engine = Engine(target, drafter, stops, rows, capacity, c.temperature, c.seed)
    if c.device == "cpu" or c.eager:
        return engine
    torch.backends.cuda.enable_cudnn_sdp(False)  # its plans are made per shape, on the host
    if c.no_compile:
        engine.capture()
        return engine
    cache = compile_utils.use_cache(c.compile_cache or None)
    print(f"compile cache {cache.folder}", flush=True)
    engine.compile()
    t, d = target.c, drafter.c
    shape = (t.hidden, t.intermediate, t.heads, t.kv_heads, t.head_dim, d.layers, len(d.ids), t.vocab)
    shape += d.added() if d.variant != "dflash" else ()
    compile_utils.gate(
        engine.capture,
        role="decode",
        leader=0,
        key=f"decode P{rows} C{engine.capacity} B{d.block_size} {shape} {c.dtype} t{c.temperature:g}",
        label="decode",
        source=compile_utils.source_hash(model, Path(__file__)),
    )
    return engine


def decode(c: argparse.Namespace) -> int:
    device, dtype = torch.device(c.device), getattr(torch, c.dtype)
    folder, place, target, drafter = load_models(c, device, dtype)
    if c.device == "cpu" and folder.resolve() == TINY.resolve() and "OMP_NUM_THREADS" not in os.environ:
        # Of so small a model two threads do no more than one, and on a busy machine they wait for each other:
        # a tenth of the speed was seen.
        torch.set_num_threads(1)
    tokenizer = data.load_tokenizer(folder)
    groups = choose_prompts(c, tokenizer, target.c.max_position)
    stops = stop_tokens(tokenizer)
    everything = [p for group in groups.values() for p in group]
    print(f"target {folder} | draft {place} | {c.device} {c.dtype}, {c.batch_size} at a time", flush=True)
    engine = make_engine(c, target, drafter, stops, everything)
    for speculative in (False, True):
        engine.run(everything[: c.batch_size], speculative)  # what is slow only once is not measured
    with tqdm(
        total=2 * len(everything), desc="decoding", leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        engine.on_answer = bar.update
        results = {name: decode_both(engine, prompts) for name, prompts in groups.items()}
    differences = None
    if not c.temperature:
        differences = compare(target, results, target.c.max_position)
    r = report(results, differences)
    r |= {"target": str(folder), "draft": str(place), "device": c.device, "dtype": c.dtype}
    r |= {"batch_size": c.batch_size, "temperature": c.temperature, "max_new_tokens": c.max_new_tokens}
    answers = [pair for g in results.values() for pair in zip(g.prompts, g.drafted.answers, strict=True)]
    for prompt, answer in answers[: c.show]:
        print(f"--- {prompt.where}\n{tokenizer.decode(answer.ids, skip_special=True)}")
    tokenizer.close()
    show(r, c.dtype)
    try:
        if c.json:
            Path(c.json).write_text(json.dumps(r, indent=2) + "\n")
        if c.png:
            draw(r, c.png)
    except OSError as error:
        name = data.short(error.filename or c.json or c.png, 100)
        raise ValueError(f"{name}: could not be written ({error.strerror}): give another file") from None
    wrong = [d for d in differences or () if c.dtype == "float32" or not d["tie"]]
    return 1 if c.verify and wrong else 0


def main(argv: list[str] | None = None) -> int:
    """Exit 0: decoded; 1: --verify found a difference; 2: a mistake, in one line."""
    try:
        return decode(parse_flags(argv))
    except ValueError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    except compile_utils.GateError as error:  # its traceback was shown
        print(f"decode.py: {error}: --no-compile or --eager go without", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
