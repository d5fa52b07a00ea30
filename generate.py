"""The target's own answers to prompts, as training data: JSONL in, JSONL out that train.py reads.

    python generate.py --target DIR --prompts FILE... --out FILE.jsonl                     # greedy
    python generate.py --target DIR --prompts FILE... --out FILE.jsonl --temperature 0.7 --seed 1
    torchrun --nproc_per_node=8 generate.py --target DIR --prompts FILE... --out FILE.jsonl
    python generate.py --server http://HOST:8000 --model NAME --prompts FILE... --out FILE.jsonl

Prompts are what decode.py reads. Of a recorded conversation the last answer is written anew
(--every-turn: each in turn, after the new ones before it); every other field of a line is kept. A
line of the output adds `prompt_id`, `tokens` (of its answers) and `finished`: false where
--max-new-tokens cut the last answer, which train.py then takes without an end of turn. Prompts
without an answer (too long, nothing but spaces, refused by the server) are left out and counted.

Stopped in any way, the same command goes on where it was, under any number of ranks: finished
answers lie in FILE.jsonl.parts/ until all are there, and are then put together in the order of the
prompts. (Several nodes: on a folder that all of them see.)

A fixed number of rows is decoded at a time; a row that ends takes the next prompt. Greedy answers,
and samples for a given --seed, do not depend on what else is decoded beside them (in bf16: but for
rounding). The last line tells tokens/s, loading and compiling left out.

Shape letters: P rows, R prompts prefilled together, W their padded length, Q new tokens of a row, C
capacity of a cache, V vocabulary, H hidden.
"""

import argparse
import bisect
import collections
import dataclasses
import datetime
import fcntl
import hashlib
import http.client
import itertools
import json
import os
import queue
import random
import shutil
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import compile_utils
import data
import decode
import model
from decode import Prompt, Snapshot
from model import Target, TargetLayer
from train import TINY  # which makes this rank's GPU device 0
from world import ATTEMPT, env_int, refuse

CONSUMED = ("messages", "conversations", "system", "prompt", "response", "text", "input_ids", "loss_mask")
PREFILL = 8192  # padded tokens of one prefill
CHUNK = 1024  # of which so many of a row at a time: the mask is [W, W] otherwise
FEW = 8  # rows of the smallest prefill on a GPU; larger ones are powers of two: one graph for each
FREE = 1 / 16  # of the rows wait for each other, so that few are not prefilled for themselves
STEPS = 8  # steps of all rows between two looks at them, on a GPU
LISTED = 10  # bad lines of the prompts
ROWS, CPU_ROWS = 256, 32  # where memory allows
ATTEMPTS, BACKOFF_S = 8, 1.0  # of a request, and the wait between the first two: 1, 2, 4, ... s, at most 60
MOST_REFUSED = 20  # requests a server may refuse before it has answered one
REPLY_BYTES = 64 << 20
LINE_BYTES = 1 << 28  # a longer line of an earlier output is none of ours


# ---------------------------------------------------------------------------------------------------------
# Prompts


@dataclasses.dataclass
class Item:
    """One line of the prompts: messages up to each answer that is asked for; none for a plain text."""

    where: str
    record: dict
    turns: list[list[dict]]
    text: str
    source: str
    id: str = ""

    def talk(self, answers: list["Answer"]) -> list[dict]:
        """The conversation up to the last of these answers."""
        pairs = zip(self.turns, answers, strict=False)
        said = ([*turn, {"role": "assistant", "content": answer.text}] for turn, answer in pairs)
        return [message for part in said for message in part]

    def ask(self, answers: list["Answer"]) -> list[dict]:
        """The conversation up to the question after these answers."""
        return [*self.talk(answers), *self.turns[len(answers)]]


def read_items(files: list[str], chat: bool, every_turn: bool) -> list[Item]:
    """Every prompt of JSONL files; ValueError lists the first bad lines and counts the others."""
    items, bad = [], []
    for name in files:
        try:
            lines = Path(name).read_bytes().split(b"\n")  # as data.py counts them
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
                data.text_of(json.dumps(record, ensure_ascii=False), "the record")
                turns, text = questions(record, chat, every_turn)
            except (data.BadLine, RecursionError) as error:
                bad.append(f"{where}: {'nested too deeply' if isinstance(error, RecursionError) else error}")
                continue
            items.append(Item(where, record, turns, text, str(record.get("source", Path(name).stem))))
    if bad:
        raise ValueError(refusal(bad))
    if not items:
        raise ValueError(f"--prompts {' '.join(files)}: no prompts: give JSONL with messages, prompt or text")
    return items


def refusal(bad: list[str]) -> str:
    """The first bad line and what to do in one line, then some of the others."""
    told = f"{bad[0]}: correct or remove this line"
    if not bad[1:]:
        return told
    others = [f"    {line}" for line in bad[1:LISTED]]
    others += [f"    and {len(bad) - LISTED:,} more"] if bad[LISTED:] else []
    return "\n".join([f"{told}, and {len(bad) - 1:,} more:", *others])


def questions(record: dict, chat: bool, every_turn: bool) -> tuple[list[list[dict]], str]:
    """(messages up to each answer, ""), or ([], text to go on from), which a `prompt` is for want of a chat
    template. BadLine: there is nothing to answer.
    """
    if "messages" in record or "conversations" in record:
        messages = data.conversation_of(record) if decode.has_answer(record) else record["messages"]
        ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        ends += [] if messages[-1]["role"] == "assistant" else [len(messages)]
        ends = ends if every_turn else ends[-1:]
        for end in ends:
            if end and messages[end - 1]["role"] == "user" and not messages[end - 1]["content"].strip():
                raise data.BadLine(f"empty question (message {end})")
        if not every_turn:
            return [messages[: ends[0]]], ""
        starts = [0, *(end + 1 for end in ends)]
        return [messages[a:b] for a, b in zip(starts, ends, strict=False)], ""
    name = "prompt" if "prompt" in record else "text"
    if name not in record:
        raise data.BadLine("no messages, prompt or text")
    text = data.text_of(record[name], name)
    if not text.strip():
        raise data.BadLine(f"empty {name}")
    return ([[{"role": "user", "content": text}]], "") if name == "prompt" and chat else ([], text)


def name_items(items: list[Item], settings: list) -> None:
    """Each item's id: a hash of its prompt, of its number among equal ones, and of what shapes the answer."""
    seen: collections.Counter = collections.Counter()
    for item in items:
        asked = json.dumps([item.turns, item.text])
        content = json.dumps([settings, asked, seen[asked]]).encode()
        seen[asked] += 1
        item.id = hashlib.blake2b(content, digest_size=8).hexdigest()


def model_digest(folder: Path, tokenizer: data.Tokenizer) -> str:
    """Digest of a target: its config, its tokenizer, and samples of its weights, which may be many GB."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    digest.update(tokenizer.fingerprint.encode())
    for path in model.weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(256):
                file.seek(size * part // 256)
                digest.update(file.read(512))
    return digest.hexdigest()


@dataclasses.dataclass
class Answer:
    """What was said to one question; `finished` false: it was cut off."""

    text: str
    tokens: int
    finished: bool
    prompt_ids: list[int] = dataclasses.field(default_factory=list)  # of a plain text: its exact tokens
    ids: list[int] = dataclasses.field(default_factory=list)


def goes_on(item: Item, answers: list[Answer]) -> bool:
    """Is there another question, and did the last answer come to its end?"""
    return len(answers) < len(item.turns) and answers[-1].finished and bool(answers[-1].text.strip())


def answer_line(item: Item, answers: list[Answer]) -> dict:
    """The record of the output; a conversation ends before an answer that is empty."""
    if item.turns and not answers[-1].text.strip():
        answers = answers[:-1]
    if not answers:
        return left_out(item, "empty answer")
    last = answers[-1]
    line = {k: v for k, v in item.record.items() if k not in CONSUMED}
    line |= {"source": item.source, "prompt_id": item.id}
    line |= {"tokens": sum(a.tokens for a in answers), "finished": last.finished}
    if item.turns:
        return line | {"messages": item.talk(answers)}
    line |= {"text": item.text + last.text, "input_ids": [*last.prompt_ids, *last.ids]}
    return line | {"loss_mask": [0] * len(last.prompt_ids) + [1] * len(last.ids)}


def left_out(item: Item, why: str) -> dict:
    """A line of the parts that says why there is none in the output."""
    return {"prompt_id": item.id, "left_out": why if why.startswith(item.where) else f"{item.where}: {why}"}


# ---------------------------------------------------------------------------------------------------------
# The output: a part for each rank, then one file


class Store:
    """FILE.jsonl.parts/, one file a rank, appended to in whole lines; FILE.jsonl once all is there."""

    def __init__(self, out: str, items: list[Item]):
        self.out, self.folder = Path(out), Path(f"{out}.parts")
        self.items = items
        known = {item.id for item in items}
        self.done = {id for id, _ in self.lines()}
        if strange := self.done - known:
            raise ValueError(
                f"--out {data.short(out, 60)} holds {len(strange)} answer(s) to other prompts, of another "
                "target or made with other flags: give another --out, or remove it"
            )

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """(id, line) of everything written so far, a torn last line left out; ids can repeat after a kill."""
        for path in [self.out, *sorted(self.folder.glob("*.jsonl"))]:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror}): check it") from None
            with file:
                for number in itertools.count(1):
                    line = file.readline(LINE_BYTES)
                    try:
                        if len(line) == LINE_BYTES:
                            raise data.BadLine("longer than any answer")
                        if not line.endswith(b"\n"):
                            break
                        id = data.text_of(data.parse_line(line[:-1]).get("prompt_id"), "prompt_id")
                    except data.BadLine as error:
                        fix = "not a line of generate.py: give another --out"
                        raise ValueError(f"{path}:{number}: {error}: {fix}") from None
                    yield id, line[:-1]

    def open(self, rank: int) -> None:
        """Take this rank's part; what a kill left of a line is cut off."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{rank:05d}.jsonl"
        self.file = path.open("ab+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another run writes it: wait for it, or give another --out") from None
        self.file.seek(0)
        content = self.file.read()
        self.file.truncate(content.rfind(b"\n") + 1)

    def add(self, line: dict) -> None:
        self.file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self.file.flush()

    def merge(self) -> list[dict]:
        """All lines in the order of the prompts, into the output, which is replaced at once."""
        found = dict(self.lines())
        missing = sum(item.id not in found for item in self.items)
        if missing:
            raise ValueError(f"{missing} answers are not in {self.folder}: all nodes must share that folder")
        lines = [found[item.id] for item in self.items]
        records = [json.loads(line) for line in lines]
        kept = [line for line, r in zip(lines, records, strict=True) if "left_out" not in r]
        data.write_whole(self.out, b"".join(line + b"\n" for line in kept))
        shutil.rmtree(self.folder)
        return records


# ---------------------------------------------------------------------------------------------------------
# The target


def uniform(key_P: Tensor, count_P: Tensor) -> Tensor:
    """A number in [0, 1) for each key and count, fp64: the splitmix64 hash, in wrapping int64 arithmetic."""
    x = key_P + count_P * -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    x = x ^ (x >> 31 & (1 << 33) - 1)
    return (x >> 11 & (1 << 53) - 1).double() / (1 << 53)


def sample(logits_PV: Tensor, temperature: float, uniform_P: Tensor) -> Tensor:
    """The token at which the cumulated probabilities pass the row's random number."""
    cumulated_PV = torch.softmax(logits_PV.float() / temperature, -1).cumsum(-1, dtype=torch.float64)
    return (cumulated_PV <= uniform_P[:, None] * cumulated_PV[:, -1:]).sum(-1)


def size_at_least(need: int, most: int) -> int:
    """The smallest of 64, 96, 128, 192, 256, ... that holds so much: one graph for each."""
    size = 64
    while size < need:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, most)


def after_attention(layer: TargetLayer, x: Tensor, out: Tensor) -> Tensor:
    """The rest of TargetLayer.extend."""
    return layer.mlp(x + layer.o_proj(out))


class Writer(decode.Engine):
    """The target alone over P rows, which prompts enter many at a time."""

    def __init__(self, target: Target, stops: list[int], rows: int, capacity: int, temperature: float = 0.0):
        super().__init__(target, None, stops, rows, capacity)
        self.temperature = temperature
        on_gpu = self.device.type == "cuda"
        self.steps, self.few = (STEPS, min(FEW, rows)) if on_gpu else (1, 1)
        self.key_P = self.integers(rows)
        self.run_layer: Callable = TargetLayer.extend  # of a step; `compile` puts compiled code here
        c = target.c
        shape = (c.layers, 1, max(PREFILL, self.capacity), c.kv_heads, c.head_dim)
        self.scratch = model.new_cache(*shape, self.device, target.dtype)
        self.inbox: dict[tuple[int, int], Tensor] = {}
        self.ready: set[tuple] = set()
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None

    # Passes: each reads and writes static buffers only

    def pick(self, x_PH: Tensor, key_P: Tensor, count_P: Tensor) -> Tensor:
        logits_PV = self.logits(x_PH)
        if not self.temperature:
            return logits_PV.argmax(-1)
        return sample(logits_PV, self.temperature, uniform(key_P, count_P))

    def step(self, seen: int) -> None:
        """One token for every row, none of which that goes on is longer than `seen`."""
        token_P, first_P = self.last_tokens()
        run = (model.cache_inputs, self.run_layer)
        x_PH, _ = self.target.extend(token_P[:, None], first_P, self.cache, seen, (), *run)
        new_P = self.pick(x_PH, self.key_P, self.length_P)
        self.append(new_P[:, None], torch.ones_like(new_P))

    def admit(self, slots: int, width: int) -> None:
        """Prefill the prompts of the inbox: caches, first token and state of their rows."""
        inbox = self.inbox[slots, width]
        row_R, length_R, limit_R, key_R = inbox[:, :4].unbind(1)
        prompt_RW = inbox[:, 4:]
        caches = [
            tuple(t[0, : slots * width].unflatten(0, (slots, width)) for t in pair) for pair in self.scratch
        ]
        x_RH = self.prefilled(prompt_RW, length_R, caches)
        token_R = self.pick(x_RH, key_R, length_R)
        for cache, made in zip(self.cache, caches, strict=True):
            for whole, part in zip(cache, made, strict=True):
                whole[:, :width].index_copy_(0, row_R, part)
        self.tokens_PC[:, :width].index_copy_(0, row_R, prompt_RW)
        self.tokens_PC[row_R, length_R] = token_R
        self.length_P[row_R] = length_R + 1
        self.limit_P[row_R] = limit_R
        self.key_P[row_R] = key_R
        stopped_R = (token_R[:, None] == self.stops_E).any(-1)
        self.done_P[row_R] = stopped_R | (length_R + 1 >= limit_R)

    def prefilled(self, prompt_RW: Tensor, length_R: Tensor, caches: list) -> Tensor:
        """The last layer's output at each prompt's last token [R, H]."""
        slots, width = prompt_RW.shape
        row_R = torch.arange(slots, device=self.device)
        found_RH = None
        for low in range(0, width, CHUNK):
            part = prompt_RW[:, low : low + CHUNK]
            first_R = torch.full_like(length_R, low)
            x, _ = self.target.extend(part, first_R, caches, low + part.shape[1])
            at_R = length_R - 1 - low
            x_RH = x.unflatten(0, part.shape)[row_R, at_R.clamp(0, part.shape[1] - 1)]
            found_RH = x_RH if found_RH is None else torch.where(at_R[:, None] >= 0, x_RH, found_RH)
        return found_RH

    def compile(self) -> None:
        """Compile what a step does around the attention: one shape, however long the rows have become."""
        before = compile_utils.compile(TargetLayer.qkv, name="TargetLayer.qkv")
        after = compile_utils.compile(after_attention, name="after_attention")

        def run(layer, x, cos, sin, keys, values, at_PQ, bias):
            out = model.attend_cached(*before(layer, x, cos, sin), keys, values, at_PQ, bias)
            return after(layer, x, out)

        self.run_layer = run

    @torch.no_grad()
    def warm_up(self) -> None:
        """One step of empty rows, which compiles."""
        self.clear()
        self.step(min(64, self.capacity))

    def launch(self, *key) -> None:
        """Run a pass; on a GPU the first time as it is, from the second time on as one CUDA graph."""
        if key not in self.graphs and (self.pool is None or key not in self.ready):
            getattr(self, key[0])(*key[1:])
            self.ready.add(key)
            return
        if key not in self.graphs:
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], pool=self.pool):
                getattr(self, key[0])(*key[1:])
        self.graphs[key].replay()

    # Decoding

    def enter(self, rows: list[int], prompts: list[tuple[Prompt, int]]) -> None:
        """Prefill these (prompt, key) into these rows; slots left over repeat the first."""
        width = size_at_least(max(len(p.ids) for p, _ in prompts), self.capacity)
        slots = self.slots(width, len(rows))
        lines = [
            [row, len(p.ids), p.limit, key, *p.ids, *[0] * (width - len(p.ids))]
            for row, (p, key) in zip(rows, prompts, strict=True)
        ]
        lines += [lines[0]] * (slots - len(lines))
        if (slots, width) not in self.inbox:
            self.inbox[slots, width] = self.integers(slots, 4 + width)
        content = torch.tensor(lines)
        content = content.pin_memory() if self.pool is not None else content
        self.inbox[slots, width].copy_(content, non_blocking=True)
        self.launch("admit", slots, width)

    def slots(self, width: int, wanted: int) -> int:
        """How many prompts of this width one prefill takes."""
        return min(max(1, PREFILL // width), max(self.few, 1 << (wanted - 1).bit_length()))

    def wait(self, prompt: Prompt, key: int) -> int:
        """Queue a prompt, the longest being the next; its number."""
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.keys.append(key)
        bisect.insort(self.waiting, number, key=lambda i: len(self.prompts[i].ids))
        return number

    @torch.no_grad()
    def answers(self, prompts: list[Prompt], keys: list[int]) -> Iterator[tuple[int, list[int]]]:
        """(number of a prompt, tokens of its answer) as they are finished; `wait` adds prompts meanwhile.

        On a GPU the host looks at the rows every few steps, when the next ones are already queued.
        """
        self.prompts, self.keys = prompts, keys = list(prompts), list(keys)
        self.waiting = waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        held: list[int | None] = [None] * self.rows
        longest = [0] * self.rows  # tokens that the row has at most
        outcomes: collections.deque = collections.deque()
        self.clear()
        while waiting or any(number is not None for number in held):
            free = [row for row in range(self.rows) if held[row] is None]
            free = free if len(free) >= FREE * self.rows else []
            while free and waiting:
                width = size_at_least(len(prompts[waiting[-1]].ids), self.capacity)
                count = min(self.slots(width, min(len(free), len(waiting))), len(free), len(waiting))
                rows, free = free[:count], free[count:]
                for row in rows:
                    held[row] = waiting.pop()
                    longest[row] = len(prompts[held[row]].ids) + 1
                self.enter(rows, [(prompts[held[row]], keys[held[row]]) for row in rows])
            need = self.steps + max(longest[row] for row in range(self.rows) if held[row] is not None)
            for _ in range(self.steps):
                self.launch("step", size_at_least(need, self.capacity))
            longest = [
                n if i is None else min(n + self.steps, prompts[i].limit)
                for n, i in zip(longest, held, strict=True)
            ]
            state = torch.cat([self.done_P[:, None].long(), self.length_P[:, None], self.tokens_PC], 1)
            outcomes.append((list(held), Snapshot(state)))
            if len(outcomes) > self.lag:
                yield from self.finished(*outcomes.popleft(), held, prompts)

    def finished(self, of: list, snapshot: Snapshot, held: list, prompts: list[Prompt]) -> Iterator:
        """The answers that a snapshot shows to be complete; their rows become free."""
        if snapshot.event:
            snapshot.event.synchronize()
        state = snapshot.copy
        for row in state[:, 0].nonzero()[:, 0].tolist():
            number = held[row]
            if number is None or of[row] != number:
                continue
            held[row] = None
            begin, end = 2 + len(prompts[number].ids), 2 + int(state[row, 1])
            yield number, state[row, begin:end].tolist()


def choose_rows(c: argparse.Namespace, target: Target, capacity: int, prompts: int) -> int:
    """--batch-size, by default as many rows as make a GPU busy and fit into 70% of its free memory."""
    if c.device == "cpu":
        return min(c.batch_size or CPU_ROWS, prompts)
    rows = c.batch_size or ROWS  # however few prompts: what is compiled has this shape
    if not c.batch_size:
        t, size = target.c, torch.finfo(target.dtype).bits // 8
        row_bytes = 2 * t.layers * t.kv_heads * t.head_dim * capacity * size
        fit = int(0.7 * torch.cuda.mem_get_info()[0] / row_bytes)
        if not fit:
            raise ValueError(
                f"{capacity} tokens (prompt and --max-new-tokens) need {row_bytes / 2**30:.1f} GiB a row: "
                "give fewer new tokens, or leave out the longest prompts"
            )
        rows = min(rows, fit if fit < 32 else fit // 32 * 32)
    return rows


def make_writer(
    c: argparse.Namespace, capacity: int, prompts: int, folder: Path, stops: list[int], note: Callable
) -> Writer:
    target = Target.load(folder, c.device, getattr(torch, c.dtype), progress=sys.stderr.isatty())
    rows = choose_rows(c, target, capacity, prompts)
    note(f"target {folder} | {c.device} {c.dtype}, {rows} rows of {capacity - 1} tokens")
    return Writer(target, stops, rows, capacity, c.temperature)


def warm(c: argparse.Namespace, writer: Writer | None, note: Callable) -> None:
    """Compile on one rank of each node first; a rank that has nothing to do comes along."""
    note(f"compile cache {compile_utils.use_cache(c.compile_cache or None).folder}")
    key = "generate"
    if writer:
        writer.compile()
        t = writer.target.c
        shape = (t.hidden, t.intermediate, t.heads, t.kv_heads, t.head_dim)
        key = f"generate P{writer.rows} {shape} {c.dtype}"
    compile_utils.gate(
        writer.warm_up if writer else None,
        role="generate",
        leader=c.rank - env_int("LOCAL_RANK", 0),
        store=c.store,
        key=key,
        label="generate",
        source=compile_utils.source_hash(model, Path(__file__)),
    )


class Encoder:
    """Items to prompts of a target with `most` positions."""

    def __init__(self, tokenizer: data.Tokenizer, most: int, new: int):
        self.tokenizer, self.most, self.new = tokenizer, most, new

    def __call__(self, item: Item, answers: list[Answer]) -> Prompt:
        """The prompt for the next answer; `limit` is 0 where there is no room for one."""
        record = {"messages": item.ask(answers)} if item.turns else {"text": item.text}
        try:
            ids = decode.prompt_ids(record, self.tokenizer, False)[0]
        except ValueError as error:
            raise ValueError(f"{item.where}: {error}") from None
        limit = min(len(ids) + self.new, self.most) if len(ids) < self.most else 0
        return Prompt(ids, limit, item.source, item.where)

    def room(self, item: Item, first: Prompt) -> int:
        """Tokens of the whole conversation, about: of questions not yet asked a letter counts as a token."""
        later = sum(len(m["content"]) + 32 for turn in item.turns[1:] for m in turn)
        return min(self.most, first.limit + later + self.new * len(item.turns[1:]))


def target_answers(
    c: argparse.Namespace, items: list[Item], folder: Path, tokenizer: data.Tokenizer, note: Callable
) -> Iterator[dict]:
    """Load the target of a folder; yields the line of each item, in the order of their ends."""
    most = model.TargetConfig.from_folder(folder).max_position
    encode = Encoder(tokenizer, most, c.max_new_tokens)
    bar = tqdm(items, "tokenizing", leave=False, disable=not sys.stderr.isatty() or c.rank > 0)
    asked = [(item, encode(item, [])) for item in bar]
    lines = [left_out(item, f"longer than {most - 1} tokens") for item, p in asked if not p.limit]
    asked = [(item, p) for item, p in asked if p.limit]
    capacity = 1 + max((encode.room(item, p) for item, p in asked), default=0)
    stops = decode.stop_tokens(tokenizer)
    writer = make_writer(c, capacity, len(asked), folder, stops, note) if asked else None
    if c.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # its plans are made per shape, on the host
    if c.device == "cuda" and not c.no_compile:
        warm(c, writer, note)

    def decoded() -> Iterator[dict]:
        talks = dict(enumerate((item, []) for item, _ in asked))
        keys = [key_of(item) for item, _ in asked]
        for number, ids in writer.answers([p for _, p in asked], keys) if writer else ():
            item, answers = talks.pop(number)
            prompt, finished = writer.prompts[number], ids[-1] in stops
            text = tokenizer.decode(ids[:-1] if finished else ids, skip_special=True)
            answers.append(Answer(text, len(ids), finished, prompt.ids, ids))
            if goes_on(item, answers):
                try:
                    prompt = encode(item, answers)
                except ValueError as error:  # one conversation, hours after the start
                    yield left_out(item, data.short(str(error), 200))
                    continue
                prompt.limit = min(prompt.limit, capacity - 1)
                if len(prompt.ids) < prompt.limit:
                    talks[writer.wait(prompt, key_of(item))] = item, answers
                    continue
            yield answer_line(item, answers)

    return itertools.chain(lines, decoded())


def key_of(item: Item) -> int:
    """The id as a signed number: the key of an item's random numbers."""
    return int.from_bytes(bytes.fromhex(item.id), signed=True)


# ---------------------------------------------------------------------------------------------------------
# A server


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to the server that was named, nowhere else."""

    def redirect_request(self, *_):
        return None


class Refused(ValueError):
    """The server does not want this prompt; others it may."""


def converse(c: argparse.Namespace, item: Item) -> dict:
    """The line of one item from the server."""
    answers = [ask(c, item, [])]
    while goes_on(item, answers):
        answers.append(ask(c, item, answers))
    return answer_line(item, answers)


def ask(c: argparse.Namespace, item: Item, answers: list[Answer]) -> Answer:
    """The server's next answer, after as many attempts as it takes; ValueError when it fails."""
    body = {"model": c.model, "messages": item.ask(answers), "max_tokens": c.max_new_tokens}
    body |= {"temperature": c.temperature} | ({"seed": int(item.id[:7], 16)} if c.temperature else {})
    headers = {"Content-Type": "application/json"}
    if c.key:
        headers["Authorization"] = f"Bearer {c.key}"
    opener = urllib.request.build_opener(NoRedirect)
    request = urllib.request.Request(c.url, json.dumps(body).encode(), headers)
    for attempt in range(1, ATTEMPTS + 1):
        wait = min(60.0, BACKOFF_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        try:
            with opener.open(request, timeout=c.timeout) as reply:
                return answer_of(reply.read(REPLY_BYTES))
        except urllib.error.HTTPError as error:
            why = f"HTTP {error.code}: {reason(error)}"
            if error.code in (400, 413, 422):
                raise Refused(why) from None
            if error.code not in (408, 409, 425, 429) and error.code < 500:
                raise ValueError(f"--server {c.url}: {why}: correct --server, --model or the key") from None
            told = error.headers.get("Retry-After", "")
            wait = max(wait, min(60.0, float(told))) if told.isdecimal() else wait
        except (OSError, ValueError, http.client.HTTPException) as error:  # none, too late, or not an answer
            why = data.short(f"{getattr(error, 'reason', error) or type(error).__name__}", 160)
        if attempt < ATTEMPTS:
            time.sleep(wait)
    raise ValueError(
        f"--server {c.url}: {ATTEMPTS} attempts failed, the last with {why}: start the server, then again "
        "this command"
    )


def reason(error: urllib.error.HTTPError) -> str:
    """What the server says about it."""
    try:
        return data.short(error.read(2000).decode(errors="replace"), 160)
    except (OSError, http.client.HTTPException):
        return error.reason


def answer_of(reply: bytes) -> Answer:
    """The answer in what an OpenAI-compatible server answers."""
    try:
        got = json.loads(reply)
        choice = got["choices"][0]
        text, finished = choice["message"]["content"], choice.get("finish_reason") != "length"
        tokens = int((got.get("usage") or {}).get("completion_tokens", 0))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as e:
        raise ValueError(f"not a chat completion ({type(e).__name__})") from None
    if not 0 <= tokens < 1 << 40:
        raise ValueError("not a chat completion (completion_tokens)")
    return Answer(data.text_of(text or "", "the answer"), tokens, finished)


def server_answers(c: argparse.Namespace, items: list[Item]) -> Iterator[dict]:
    """The line of each item from the server, so many requests at a time; the first failure ends it."""
    waiting, results = collections.deque(items), queue.Queue()

    def work() -> None:
        while waiting:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                results.put((item, converse(c, item)))
            except Exception as error:  # for the main thread, which waits for as many results as items
                results.put((item, error))

    for _ in range(min(c.concurrency, len(items))):
        threading.Thread(target=work, daemon=True).start()
    answered, refused = False, 0
    for _ in range(len(items)):
        item, got = results.get()
        if isinstance(got, Refused):
            refused += 1
            if not answered and refused >= min(MOST_REFUSED, len(items)):
                raise ServerError(f"--server {c.url}: refuses every prompt: {got}: correct --model or flags")
            got = left_out(item, f"refused by the server: {got}")
        elif isinstance(got, Exception):
            raise ServerError(str(got)) if isinstance(got, ValueError) else got
        answered = answered or "left_out" not in got
        yield got


class ServerError(RuntimeError):
    """The server ended the run; what was answered is kept."""


# ---------------------------------------------------------------------------------------------------------
# The command


def parse_flags(argv: list[str] | None) -> argparse.Namespace:
    parser = data.Parser("generate.py", __doc__)
    add = parser.add_argument
    add("--target", default="", help="Hugging Face folder (default: the built-in target)")
    add("--prompts", nargs="+", default=[], help="JSONL with messages, conversations, prompt or text")
    add("--out", default="", help="JSONL for train.py --data; one that exists is continued")
    add("--every-turn", action="store_true", help="each answer of a conversation anew, not only the last")
    add("--max-new-tokens", type=int, default=1024, help="tokens of an answer, at most")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="seed of the samples")
    add("--batch-size", type=int, default=0, help=f"rows decoded at a time ({ROWS} on a GPU, or what fits)")
    add("--dtype", default="", help="float32, bfloat16 or float16 (float32 on a CPU, bfloat16 on a GPU)")
    add("--device", default="", help="cuda or cpu (default: cuda where there is one)")
    add("--no-compile", action="store_true", help="on a GPU: CUDA graphs of uncompiled layers")
    add("--compile-cache", default="", help="folder of compiled kernels (~/.cache/blockdraft)")
    add("--server", default="", help="URL of an OpenAI-compatible server that answers instead")
    add("--model", default="", help="the server's name for its model")
    add("--concurrency", type=int, default=64, help="requests to the server at a time")
    add("--timeout", type=float, default=600.0, help="seconds a request may take")
    add("--key-env", default="", help="environment variable that holds the server's key (none is sent)")
    c = parser.parse_args(argv)
    check_flags(c)
    return c


def check_flags(c: argparse.Namespace) -> None:
    """ValueError in one line for what cannot be; fills in what follows from other flags."""
    for name in ("target", "prompts", "out", "compile_cache"):
        for text in c.prompts if name == "prompts" else [getattr(c, name)]:
            if why := data.unfit_name(text):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {data.short(text, 60)} {why}: give another path")
    if not c.out:
        raise ValueError("--out is missing: give the JSONL file to write")
    if not Path(c.out).absolute().parent.is_dir() or Path(c.out).is_dir():
        raise ValueError(f"--out {data.short(c.out, 60)}: not a file in a folder that exists: make it first")
    if Path(c.out).exists() and not Path(c.out).is_file():  # renamed over: as root even /dev/null
        raise ValueError(f"--out {data.short(c.out, 60)}: is a device or a pipe: give the name of a file")
    bounds = {
        "max_new_tokens": (1, 1 << 24), "temperature": (0, 1e3), "seed": (0, (1 << 63) - 1),
        "batch_size": (0, 1 << 16), "concurrency": (1, 1 << 12), "timeout": (0.01, 1e6),
    }  # fmt: skip
    for name, (least, most) in bounds.items():
        if not least <= getattr(c, name) <= most:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {getattr(c, name)}: must be from {least} to {most:g}")
    decode.check_temperature(c.temperature)
    if not c.prompts and (c.target or c.server):
        raise ValueError("--prompts is missing: give JSONL files")
    c.prompts = c.prompts or [str(TINY / "eval.jsonl")]
    c.rank, c.world = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
    check_server(c) if c.server else check_device(c)


def check_server(c: argparse.Namespace) -> None:
    if c.target:
        raise ValueError("--server and --target: who is to answer? Leave one of them out")
    if not c.model:
        raise ValueError("--model is missing: give the name that the server has for its model")
    url = urllib.parse.urlsplit(c.server)
    port = url.netloc.rpartition("]")[2].partition(":")[2]
    plain = c.server.isascii() and c.server.isprintable() and " " not in c.server
    if url.scheme not in ("http", "https") or not url.hostname or not plain or not (port + "0").isdecimal():
        raise ValueError(f"--server {data.short(c.server, 60)}: give a URL such as http://localhost:8000")
    path = url.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    c.url = f"{url.scheme}://{url.netloc}{path}/v1/chat/completions"
    c.key = ""
    if c.key_env:
        c.key = os.environ.get(c.key_env, "")
        if not c.key:
            raise ValueError(f"--key-env {data.short(c.key_env, 60)}: no such environment variable: set it")


def check_device(c: argparse.Namespace) -> None:
    if c.device not in ("", "cpu", "cuda"):
        raise ValueError(f"--device {data.short(c.device, 40)}: give cuda or cpu")
    if c.device == "cuda" and c.world == 1 and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here: leave it out, or check the driver")
    if c.dtype not in ("", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {data.short(c.dtype, 40)}: give float32, bfloat16 or float16")
    c.device = c.device or ("cuda" if torch.cuda.is_available() else "cpu")
    c.dtype = c.dtype or ("bfloat16" if c.device == "cuda" else "float32")


def join(c: argparse.Namespace) -> None:
    """Meet the other ranks, if any; they talk at the start and at the end only, however long it takes."""
    c.store = None
    if c.world == 1:
        return
    store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=120)))
    c.store = dist.PrefixStore(f"blockdraft/{ATTEMPT}", store)
    long = datetime.timedelta(days=30)
    dist.init_process_group("gloo", store=c.store, rank=c.rank, world_size=c.world, timeout=long)
    gpus = [None] * c.world
    dist.all_gather_object(gpus, c.device == "cuda" and torch.cuda.is_available())
    if any(gpus) != all(gpus) or (c.device == "cuda" and not all(gpus)):
        raise ValueError(
            f"{c.world} ranks but {sum(gpus)} of them with a GPU: give --nproc_per_node their number, or "
            "--device cpu"
        )


def prepare(c: argparse.Namespace) -> tuple[Path, data.Tokenizer | None, Store]:
    """What every rank sees alike: the prompts and which of them are answered; then the ranks meet."""
    folder, tokenizer, who = Path(c.target or TINY), None, ["server", c.model]
    if not c.server:
        tokenizer = data.load_tokenizer(folder)
        model.TargetConfig.from_folder(folder)
        who = ["target", model_digest(folder, tokenizer)]
    items = read_items(c.prompts, not tokenizer or tokenizer.template_text is not None, c.every_turn)
    if c.server and (plain := next((i for i in items if not i.turns), None)):
        raise ValueError(f"{plain.where}: a plain text, which --server cannot go on from: give messages")
    name_items(items, [*who, c.max_new_tokens, c.temperature, c.temperature and c.seed])
    store = Store(os.path.realpath(c.out), items)  # a link stays one
    join(c)
    return folder, tokenizer, store


def generate(c: argparse.Namespace, folder: Path, tokenizer: data.Tokenizer | None, store: Store) -> None:
    note = (lambda text: print(text, flush=True)) if c.rank == 0 else (lambda text: None)
    mine = [item for item in store.items[c.rank :: c.world] if item.id not in store.done]
    store.open(c.rank)
    if store.done:
        note(f"{c.out}: {len(store.done):,} of {len(store.items):,} answers are there")
    answers = server_answers(c, mine) if c.server else target_answers(c, mine, folder, tokenizer, note)
    begun, tokens = time.perf_counter(), 0
    with progress(c, len(mine)) as bar:
        for line in answers:
            store.add(line)
            tokens += line.get("tokens", 0)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - begun):,.0f} tokens/s", refresh=False)
            bar.update()
    made = (tokens, time.perf_counter() - begun)
    ranks = [made] * c.world
    if tokenizer:
        tokenizer.close()
    if c.world > 1:
        dist.all_gather_object(ranks, made)  # from here on nobody writes
    if c.rank == 0:
        summary(c, store.merge(), ranks, note)
    if c.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def progress(c: argparse.Namespace, total: int) -> tqdm:
    often = 0.5 if sys.stderr.isatty() else 60.0
    return tqdm(total=total, desc="answers", mininterval=often, delay=often, leave=False, disable=c.rank > 0)


def summary(c: argparse.Namespace, records: list[dict], ranks: list[tuple[int, float]], note: Callable):
    """What --out now holds, and how fast the new part of it came."""
    kept = [r for r in records if "left_out" not in r]
    out = [r["left_out"] for r in records if "left_out" in r]
    cut = sum(not r["finished"] for r in kept)
    speed = sum(tokens for tokens, _ in ranks) / max(seconds for _, seconds in ranks)
    total = sum(r["tokens"] for r in kept)
    text = f"{c.out}: {len(kept):,} answers, {total:,} tokens, {speed:,.0f} tokens/s"
    note(f"{text} | {cut} cut (finished: false)" if cut else text)
    if out:
        note(f"{len(out)} prompt(s) left out, the first: {data.short(out[0], 300)}")


def main(argv: list[str] | None = None) -> int:
    """Exit 0: every prompt is answered; 1: failed on the way, the same command goes on; 2: a mistake."""
    own = False  # what is wrong with the flags, every rank sees
    try:
        c = parse_flags(argv)
        job = prepare(c)
        own = True
        generate(c, *job)
        return 0
    except ValueError as error:
        if not own:
            return refuse(f"generate.py: {error}")
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    except (ServerError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("generate.py: stopped: the same command goes on", file=sys.stderr)
        return 130
    except compile_utils.GateError as error:  # its traceback was shown
        print(f"generate.py: {error}: --no-compile goes without", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError:
        print("generate.py: out of GPU memory: give a smaller --batch-size", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
