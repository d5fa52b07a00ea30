"""Training data: read JSONL, tokenize it with the target's tokenizer and chat template, pack, place anchors.

    python data.py --target DIR FILE...  # every bad line, documents, tokens, supervised share

One record a line, in one of five shapes:
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": "...", "response": "..."}
    {"text": "..."}                                          every token but the first is supervised
    {"input_ids": [...], "loss_mask": [...]}
and optionally "source": a name to report by (default the file's), and "finished": false for an answer that
was cut off, whose end-of-turn token is then not supervised.

Shapes: T token budget (packed tokens of a batch), D documents, A anchors, N tokens of the corpus, M the
max_batch_size.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import io
import itertools
import json
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

if TYPE_CHECKING:
    import torch  # imported where it is used: worker processes run this file too and must start fast

TINY = Path(__file__).parent / "assets" / "tiny"  # the built-in target
LENGTH = 4096  # tokens of a document at most, where no flag says otherwise
FORMAT = 1  # part of every cache key: raise it when the same input would give other tokens or masks
MAX_LINE_BYTES = 8 << 20  # a longer line is a bad line: it must not fill the memory
CHUNK_BYTES = 1 << 20  # what one worker gets at a time
START_LIMIT_S = 120.0  # to start a worker and load the tokenizer, on a busy machine too
RENDER_LIMIT_S = 20.0  # a worker silent for so long is stuck in its template and is killed
MOST_FILE_BYTES = 256 << 20  # of a tokenizer, a template, a config
RENDER_LIMIT_BYTES = 2 << 30  # address space a worker may add to what it holds once the tokenizer is loaded
KEPT_BAD_LINES = 1000  # that many are listed in the report; all are counted
COMES_AFTER = {
    "system": ("start",),
    "developer": ("start",),
    "user": ("start", "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
ROLES = set(COMES_AFTER)
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
SHAREGPT_ROLES |= {"function": "tool", "observation": "tool"} | {role: role for role in ROLES}


class BadLine(ValueError):
    """A record that cannot be used; the message is the reason."""


class BadData(ValueError):
    """A data set that cannot be used; `report` holds what was found in it until then."""

    def __init__(self, message: str, report: Report):
        super().__init__(message)
        self.report = report


# ----------------------------------------------------------------------------------------------------------
# Tokenizers: tokenizer.json and SentencePiece behind one face: ids with the characters they cover


def read_json(path: Path, fix: str = "copy the file again") -> dict | None:
    """The object in a JSON file, None if there is no such file; ValueError if it is anything else."""
    if not path.exists():
        return None
    try:
        value = json.loads(read_small(path, fix).decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({short(str(error), 120)}): {fix}") from None
    except RecursionError:
        raise ValueError(f"{path}: not JSON (nested too deeply): {fix}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {kind_of(value)}, only an object is supported: {fix}")
    return value


def kind_of(value) -> str:
    """What JSON calls it."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def unfit_name(text: str) -> str:
    """Why a text cannot be the path of a file, or be shown in a message; empty if it can."""
    if not text.isprintable():
        return "holds characters that cannot be shown"
    if len(text) > 1000 or any(len(part.encode("utf-8")) > 255 for part in text.split("/")):
        return "is too long for the name of a file"
    return ""


def read_small(path: Path, fix: str = "copy the file again", most: int = MOST_FILE_BYTES) -> bytes:
    """A file that is read whole, its size checked first."""
    try:
        size = path.stat().st_size
        if not path.is_file() and not path.is_dir():  # a pipe would be waited for, a device read, without end
            raise ValueError(f"{path}: not a file: {fix}")
        if size > most:
            raise ValueError(f"{path}: has {size:,} bytes, far more than such a file: {fix}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): {fix}") from None


class JsonBackend:
    """A tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Fast

        text = read_small(path)
        try:
            self.fast = Fast.from_buffer(text)
        except BaseException as error:  # a panic in the Rust library is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(
                f"{path}: not a usable tokenizer.json ({short(str(error), 200)}); copy the file again"
            ) from None
        self.fast.no_truncation()
        self.fast.no_padding()
        added = self.fast.get_added_tokens_decoder()
        self.added = {token.content: index for index, token in added.items()}
        self.special_ids = {index for index, token in added.items() if token.special}
        self.used_ids = set(self.fast.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.fast.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self.fast.decode(ids, skip_special_tokens=skip_special)

    def prefix(self) -> list[int]:
        """What the tokenizer itself puts before a plain text (Llama 3: the begin-of-text token)."""
        with_special = self.fast.encode("a").ids
        plain = self.fast.encode("a", add_special_tokens=False).ids
        return next(
            (with_special[:i] for i in range(len(with_special)) if with_special[i:][: len(plain)] == plain),
            [],
        )


class SentencePieceBackend:
    """A tokenizer.model. SentencePiece sees no control pieces in a text, so the text is cut at them first.

    The space SentencePiece puts before a text belongs before the first word only, not after every chat piece:
    `first` encodes what begins a text, `rest` what follows a piece ("legacy": true in tokenizer_config.json:
    `first` everywhere, as Hugging Face does).
    """

    def __init__(self, path: Path, config: dict):
        from sentencepiece import SentencePieceProcessor

        proto = read_small(path)
        try:
            self.first = SentencePieceProcessor(model_proto=proto)
            # Bytes appended to a protobuf message override fields: normalizer_spec.add_dummy_prefix = false.
            rest = SentencePieceProcessor(model_proto=proto + b"\x1a\x02\x18\x00")
            pieces = [self.first.id_to_piece(i) for i in range(self.first.get_piece_size())]
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(
                f"{path}: not a SentencePiece model ({short(str(error), 200)}); copy the file again"
            ) from None
        self.rest = self.first if config.get("legacy") is True else rest
        self.prefix_ids = (
            [self.first.bos_id()] if config.get("add_bos_token") and self.first.bos_id() >= 0 else []
        )
        try:
            known = self._user_defined(proto)
        except ValueError as error:
            raise ValueError(f"{path}: not a SentencePiece model ({error}); copy the file again") from None
        self.added = {
            piece: i
            for i, piece in enumerate(pieces)
            if (self.first.is_control(i) or i in known)
            and len(piece) > 1
            and not piece.replace("▁", " ").isspace()
        }
        self.special_ids = set(self.added.values())
        for content, (index, special) in added_tokens(path.parent, config).items():
            self.added[content] = index
            if special:
                self.special_ids.add(index)
        self.names = {index: content for content, index in self.added.items()}
        self.used_ids = set(range(len(pieces))) | set(self.added.values())
        longest_first = sorted(self.added, key=len, reverse=True)
        self.cut = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @staticmethod
    def _user_defined(proto: bytes) -> set[int]:
        """Ids of user-defined pieces (type 4), from the model's bytes: the Python interface does not tell."""
        found, index = set(), 0
        for number, value in protobuf_fields(proto):
            if number == 1:  # repeated SentencePiece pieces
                if any(n == 3 and v == 4 for n, v in protobuf_fields(value)):
                    found.add(index)
                index += 1
        return found

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets, at = [], [], 0
        for match in self.cut.finditer(text) if self.cut else ():
            self._plain(text, at, match.start(), ids, offsets)
            ids.append(self.added[match.group()])
            offsets.append(match.span())
            at = match.end()
        self._plain(text, at, len(text), ids, offsets)
        return ids, offsets

    def _plain(self, text: str, start: int, end: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        if start == end:
            return
        processor = self.first if start == 0 else self.rest
        part = text[start:end]
        if hasattr(processor, "encode_as_offset_mapping"):  # sentencepiece 0.2.3
            found = processor.encode_as_offset_mapping(part)
            ids += found["ids"]
            spans = found["offsets"]
        else:
            pieces = processor.encode(part, out_type="immutable_proto").pieces
            ids += [piece.id for piece in pieces]
            spans = [(piece.begin, piece.end) for piece in pieces]
        covered, until = [], 0
        for a, b in reversed(spans):
            until = b if b > a else max(until, a)  # of a character's bytes only the last is given its width
            covered.append((start + a, start + until))
        offsets += reversed(covered)

    def decode(self, ids: list[int], skip_special: bool) -> str:
        text, run, processor = [], [], self.first
        for i in [*ids, None]:
            if i is not None and i not in self.names:
                run.append(i)
                continue
            if run:
                text.append(processor.decode(run))
            run, processor = [], self.rest
            if i is not None and not (skip_special and i in self.special_ids):
                text.append(self.names[i])
        return "".join(text)

    def prefix(self) -> list[int]:
        return self.prefix_ids


def protobuf_fields(data: bytes):
    """(field number, value) of each field of a protobuf message; ValueError if the bytes are not one."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("cut off inside a protobuf message")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire)
        if size is None and wire != 2:
            raise ValueError(f"unknown protobuf wire type {wire}")
        size = varint() if size is None else size
        if size > len(data) - at:
            raise ValueError("cut off inside a protobuf message")
        yield key >> 3, data[at : at + size]
        at += size


def added_tokens(folder: Path, config: dict) -> dict[str, tuple[int, bool]]:
    """Tokens a Hugging Face folder adds to its SentencePiece model: content -> (id, special)."""
    found = {}
    for content, index in (read_json(folder / "added_tokens.json") or {}).items():
        found[content] = (index, True)
    decoder = config.get("added_tokens_decoder")
    decoder = {} if decoder is None else decoder
    if not isinstance(decoder, dict) or not all(isinstance(token, dict) for token in decoder.values()):
        raise ValueError(
            f"{folder}: added_tokens_decoder is no object of tokens; correct tokenizer_config.json"
        )
    for index, token in decoder.items():
        index = int(index) if index.isdecimal() and len(index) < 12 else index
        found[token_text(token.get("content"), f"added token {index}", folder)] = (
            index,
            bool(token.get("special")),
        )
    for content, (index, _) in found.items():
        if not content or type(index) is not int or not 0 <= index < 1 << 24:
            raise ValueError(
                f"{folder}: added token {short(repr(content), 40)} has id {short(repr(index), 40)}; correct "
                "added_tokens.json or tokenizer_config.json"
            )
    return found


def token_text(value, name: str, folder: Path) -> str:
    """The text of a token that a tokenizer's files name."""
    try:
        return text_of(value, short(name, 40))
    except BadLine as error:
        raise ValueError(f"{folder}: {error}; correct tokenizer_config.json") from None


class Tokenizer:
    """The tokenizer and chat template of a model folder. Public: see load_tokenizer.

    The template comes from a stranger, so `render` and `encode_chat` ask a worker process with limits; only
    inside the worker is the template compiled (`compile_template`).
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_json(self.folder / "tokenizer_config.json") or {}
        if (self.folder / "tokenizer.json").exists():
            self.backend = JsonBackend(self.folder / "tokenizer.json")
        elif (self.folder / "tokenizer.model").exists():
            self.backend = SentencePieceBackend(self.folder / "tokenizer.model", self.config)
        else:
            raise ValueError(
                f"{self.folder}: no tokenizer.json and no tokenizer.model; give a Hugging Face model folder"
            )
        self.used_ids = self.backend.used_ids
        if not self.used_ids:
            raise ValueError(f"{self.folder}: the tokenizer has no tokens; copy its files again")
        self.added = self.backend.added
        self.vocab_size = max(self.used_ids) + 1
        self.special_ids = sorted(self.backend.special_ids)
        self.named_tokens = self._named_tokens()
        self.bos_id, self.pad_id, self.mask_id = (
            self._id_of(name) for name in ("bos_token", "pad_token", "mask_token")
        )
        self.eos_ids = self._eos_ids()
        self.template_text = self._template_text()
        self.fingerprint = self._fingerprint()
        self.template = None  # compiled in the worker only
        self.end_of_turn = None  # id that ends an assistant turn, seen when the template is compiled
        self._worker = None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text; special tokens written in it are recognised, none are added."""
        return self.backend.encode(text)[0]

    def decode(self, ids, skip_special: bool = False) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special)

    def render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """The conversation as the model's chat template writes it. ValueError if the template refuses it."""
        if self.template is None:
            head, _ = self._ask({"op": "render", "messages": messages, "generate": add_generation_prompt})
            return head["text"]
        return self._render_here(messages, add_generation_prompt)

    def encode_chat(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """(ids, mask): mask 1 on the tokens of assistant answers and the end-of-turn token after each."""
        if self.template is None:
            head, _ = self._ask({"op": "chat", "messages": messages})
            return head["ids"], head["mask"]
        return chat_tokens(self, check_messages(messages))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ask(self, head: dict) -> tuple[dict, bytes]:
        if self._worker is None:
            self._worker = Worker(self.folder, max_length=0)
        try:
            reply, body = self._worker.ask(head)
        except ValueError:
            self._worker = None  # it is gone
            raise
        if "error" in reply:
            raise ValueError(f"{self.folder}: {reply['error']}; correct the chat template or the messages")
        return reply, body

    def _named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ...: as text, for the template and for looking up ids."""
        merged = {**(read_json(self.folder / "special_tokens_map.json") or {}), **self.config}
        found = {}
        for name, value in merged.items():
            if name.endswith("_token") and name.startswith(
                ("bos", "eos", "pad", "unk", "mask", "cls", "sep")
            ):
                text = value.get("content") if isinstance(value, dict) else value
                if text is not None:
                    found[name] = token_text(text, name, self.folder)
        return found

    def _id_of(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        if text in self.added:
            return self.added[text]
        if text is None:
            return None
        ids = self.backend.encode(text)[0]
        return ids[0] if len(ids) == 1 else None

    def _eos_ids(self) -> list[int]:
        """Every id that ends a generation: the tokenizer's, generation_config.json's, config.json's."""
        found = {self._id_of("eos_token")}
        for name in ("generation_config.json", "config.json"):
            value = (read_json(self.folder / name) or {}).get("eos_token_id")
            for i in value if isinstance(value, list) else [value]:
                if i is not None and (type(i) is not int or not -1 <= i < 1 << 24):
                    raise ValueError(
                        f"{self.folder / name}: eos_token_id holds {short(repr(i), 40)}; correct it to ids"
                    )
                found.add(i)
        return sorted(found - {None, -1})

    def _template_text(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.exists():
            try:
                return read_small(path).decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: not UTF-8 ({short(str(error), 100)}); copy the file again"
                ) from None
        value = self.config.get("chat_template")
        if isinstance(value, list):  # several named templates
            named = {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
            value = named.get("default", False)
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"{self.folder}/tokenizer_config.json: chat_template is not text; put a Jinja template there"
            )
        return value

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name in ("tokenizer.json", "tokenizer.model", "added_tokens.json"):
            path = self.folder / name
            content = read_small(path) if path.exists() else None
            digest.update(b"-" if content is None else f"{name} {len(content)}\n".encode() + content)
        parts = (self.template_text, self.named_tokens, self.eos_ids, sorted(self.added.items()))
        flags = [self.config.get(key) for key in ("legacy", "add_bos_token")]
        digest.update(json.dumps([FORMAT, parts, flags]).encode())
        return digest.hexdigest()

    # What follows runs in a worker process.

    def compile_template(self) -> None:
        """Compile the chat template and see which token ends an assistant turn. ValueError: it does not."""
        if self.template_text is None:
            return
        self.template = compile_template(self.template_text, self.folder)
        mark = answer_mark([], 0)
        sample = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        try:
            tail = self._render_here(sample, False).partition(mark)[2]
        except BadLine:
            return
        ids, offsets = self.backend.encode(tail)
        added = set(self.added.values())
        for i, (a, _) in zip(ids, offsets, strict=True):
            if i in added:
                self.end_of_turn = i if not tail[:a].strip() else None
                return

    def _render_here(self, messages: list[dict], add_generation_prompt: bool) -> str:
        import jinja2

        if self.template is None:
            raise BadLine("the model folder has no chat template, which a conversation needs")
        try:
            text = self.template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.named_tokens,
            )
        except MemoryError:
            raise
        except jinja2.TemplateError as error:
            raise BadLine(f"the chat template refuses it: {short(str(error), 120)}") from None
        except Exception as error:  # a stranger's code: it can raise anything
            raise BadLine(
                f"the chat template fails on it: {type(error).__name__}: {short(str(error), 120)}"
            ) from None
        if len(text) > 4 * MAX_LINE_BYTES:
            raise BadLine(f"the chat template makes {len(text):,} characters of it")
        return text_of(text, "what the chat template makes of it")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Tokenizer of a Hugging Face folder (tokenizer.json or SentencePiece tokenizer.model, chat template).

    Gives .encode(text), .decode(ids), .render(messages, add_generation_prompt), .encode_chat(messages) ->
    (ids, mask), .vocab_size, .special_ids, .eos_ids, .bos_id, .pad_id, .mask_id (None: there is none), and
    .fingerprint.
    ValueError names the file that is missing or broken.
    """
    return Tokenizer(folder)


def compile_template(text: str, folder: Path):
    """A template as Hugging Face renders it: sandbox, trimmed blocks, loop controls, generation tags."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the answer for others; here the answer is found in the rendered text."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(str(message))

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    env.globals["raise_exception"] = raise_exception
    # A fixed day: tokens must not depend on when, or on which rank, a document is rendered.
    env.globals["strftime_now"] = lambda form: time.strftime(form, time.gmtime(1721952000))
    try:
        return env.from_string(text)
    except (jinja2.TemplateError, RecursionError, ValueError, TypeError) as error:
        raise ValueError(
            f"the chat template of {folder} does not compile: {short(str(error), 200)}; correct it"
        ) from None


# ----------------------------------------------------------------------------------------------------------
# One record: from a line to tokens and mask


def parse_line(raw: bytes) -> dict:
    """The record of one line. BadLine tells what is wrong with it."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raise BadLine("starts with a byte order mark; save the file as UTF-8 without one")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadLine("is UTF-16; save the file as UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1})") from None
    try:
        record = json.loads(text)
    except RecursionError:
        raise BadLine("not JSON: nested too deeply") from None
    except ValueError as error:
        where = getattr(error, "pos", None)
        if where is not None and not text[where:].strip():
            raise BadLine("not JSON: cut off") from None
        raise BadLine(f"not JSON: {short(str(error), 80)}") from None
    if not isinstance(record, dict):
        raise BadLine(f"{kind_of(record)}, not an object")
    return record


def text_of(value, name: str) -> str:
    if not isinstance(value, str):
        raise BadLine(f"{name} is {kind_of(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLine(f"{name} holds half a surrogate pair") from None
    return value


def check_messages(messages) -> list[dict]:
    """Messages with known roles in order (system first, assistant after user or tool), text everywhere."""
    if not isinstance(messages, list) or not messages:
        raise BadLine(
            "the conversation is not a list of messages" if messages != [] else "the conversation is empty"
        )
    before = "start"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise BadLine(f"message {number} is not an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadLine(f"message {number} has the unknown role {short(repr(role), 40)}")
        if before not in COMES_AFTER[role]:
            taken = " or ".join(COMES_AFTER[role])
            raise BadLine(
                f"roles out of order: message {number} is {role} after {before}; it comes after {taken} only"
            )
        content = text_of(message.get("content"), f"content of message {number}")
        if role == "assistant" and not content.strip():
            raise BadLine(f"empty answer (message {number})")
        before = role
    if not any(m["role"] == "assistant" for m in messages):
        raise BadLine("no assistant turn")
    return messages


def conversation_of(record: dict) -> list[dict]:
    """The messages of a record with `messages`, ShareGPT `conversations`, or `prompt` and `response`."""
    if "messages" in record:
        return check_messages(record["messages"])
    if "conversations" not in record:
        return check_messages(
            [
                {"role": "user", "content": record["prompt"]},
                {"role": "assistant", "content": record["response"]},
            ]
        )
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise BadLine("conversations is not a list of objects")
    messages = []
    if isinstance(record.get("system"), str) and record["system"].strip():
        messages.append({"role": "system", "content": record["system"]})
    for number, turn in enumerate(turns, 1):
        speaker = turn.get("from", turn.get("role"))
        if not isinstance(speaker, str) or speaker.lower() not in SHAREGPT_ROLES:
            raise BadLine(f"message {number} is from the unknown {short(repr(speaker), 40)}")
        messages.append(
            {"role": SHAREGPT_ROLES[speaker.lower()], "content": turn.get("value", turn.get("content"))}
        )
    return check_messages(messages)


def answer_mark(messages: list[dict], number: int) -> str:
    """A word that stands in for answer `number`; it occurs in none of the messages."""
    mark = f"qzx{number}answer{number}xzq"
    while any(mark in str(m) for m in messages):
        mark = f"q{mark}q"
    return mark


def find_answers(tokenizer: Tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """(rendered conversation, [(start, end) of each answer in it]).

    The conversation is rendered twice, once with a mark for each answer: what stands around the marks must
    stand around the answers too, whatever else the template does, and between it stands the answer, perhaps
    stripped. Of an answer with a thinking part only what follows the thinking is marked; where the template
    drops the thinking (all but the last turn, usually), that turn is not what the model said and is not
    supervised.
    """
    answers = [m for m in messages if m["role"] == "assistant"]
    marks = [answer_mark(messages, n) for n in range(len(answers))]
    heads = [
        m["content"][: m["content"].rfind("</think>") + 8] if "</think>" in m["content"] else ""
        for m in answers
    ]
    turn = iter(zip(marks, heads, strict=True))
    marked = [
        {**m, "content": "".join(reversed(next(turn)))} if m["role"] == "assistant" else m for m in messages
    ]
    full, rest = tokenizer._render_here(messages, False), tokenizer._render_here(marked, False)
    around = []
    for number, mark in enumerate(marks, 1):
        before, found, rest = rest.partition(mark)
        if not found:
            raise BadLine(f"the chat template leaves out answer {number}; rendered: {short(repr(full), 200)}")
        around.append(before)
    around.append(rest)
    if not full.startswith(around[0]):
        raise BadLine(f"the rendered text changes with the answer; rendered: {short(repr(full), 200)}")
    spans, at = [], 0
    for number, (message, head) in enumerate(zip(answers, heads, strict=True)):
        at += len(around[number])
        said = message["content"][len(head) :]
        fits = (
            form
            for form in dict.fromkeys((said, said.strip(), said.lstrip(), said.rstrip()))
            if full.startswith(form, at) and full.startswith(around[number + 1], at + len(form))
        )
        form = next(fits, None)
        if form is None:
            raise BadLine(
                f"the rendered text does not hold answer {number + 1}; rendered: {short(repr(full), 200)}"
            )
        start = at
        if head:
            thought = full.rfind(head.strip(), 0, at)
            start = thought if thought >= 0 and not full[thought + len(head.strip()) : at].strip() else None
        if start is not None and at + len(form) > start:
            spans.append((start, at + len(form)))
        at += len(form)
    if full[at:] != around[-1] or not spans:
        raise BadLine(f"the rendered text does not hold the answers; rendered: {short(repr(full), 200)}")
    return full, spans


def tokens_with_offsets(tokenizer: Tokenizer, text: str, max_length: int):
    """Ids and offsets of at least the first max_length tokens (0: all), without tokenizing megabytes."""
    enough = 32 * max_length + 4096
    if 0 < max_length and len(text) > enough:
        ids, offsets = tokenizer.backend.encode(text[:enough])
        if len(ids) > max_length + 64:  # the cut can change the tokens next to it only
            return ids, offsets
    return tokenizer.backend.encode(text)


def chat_tokens(tokenizer: Tokenizer, messages: list[dict], finished: bool = True, max_length: int = 0):
    """(ids, mask) of a conversation. `finished` false: the last answer was cut off, no end of turn."""
    text, spans = find_answers(tokenizer, messages)
    ids, offsets = tokens_with_offsets(tokenizer, text, max_length)
    mask = [0] * len(ids)
    starts, ends = [a for a, _ in offsets], [b for _, b in offsets]
    stops = {*tokenizer.eos_ids, tokenizer.end_of_turn}
    for start, end in spans:
        # Tokens that overlap the answer. One that also holds letters of what stands before it is a header's;
        # one that holds a space before it ("▁Hello") is the answer's.
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(starts, end)
        while first < last and starts[first] < start and text[starts[first] : start].strip():
            first += 1
        if finished or end != spans[-1][1]:
            stop = last
            while stop < len(ids) and ids[stop] not in stops and not text[starts[stop] : ends[stop]].strip():
                stop += 1
            if stop < len(ids) and ids[stop] in stops:
                last = stop + 1
        mask[first:last] = [1] * (last - first)
    return ids, mask


def pair_tokens(tokenizer: Tokenizer, prompt: str, response: str, finished: bool, max_length: int):
    """(ids, mask) of prompt + response for a folder without a chat template: plain text, then end of text."""
    text = prompt + response
    ids, offsets = tokens_with_offsets(tokenizer, text, max_length)
    mask = [int(b > len(prompt) and not text[a : len(prompt)].strip()) for a, b in offsets]
    if finished and tokenizer.eos_ids:
        ids, mask = [*ids, tokenizer.eos_ids[0]], [*mask, 1]
    return tokenizer.backend.prefix() + ids, [0] * len(tokenizer.backend.prefix()) + mask


def check_pair(prompt, response) -> tuple[str, str]:
    if not text_of(response, "response").strip():
        raise BadLine("empty answer (response)")
    return text_of(prompt, "prompt"), response


def check_ids(ids, mask, limit: int) -> tuple[list[int], list[int]]:
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask) or not ids:
        raise BadLine("input_ids and loss_mask are not two lists of one length, one entry or more")
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < limit]
    if wrong:
        raise BadLine(f"input_ids holds {short(repr(wrong[0]), 40)}; the tokenizer has ids 0 to {limit - 1}")
    if any(type(m) not in (int, bool) or m not in (0, 1) for m in mask):
        raise BadLine("loss_mask holds something other than 0 and 1")
    return ids, [int(m) for m in mask]


def content_of(tokenizer: Tokenizer, record: dict):
    """(shape, content) of a record: chat, messages; pair, (prompt, response) for want of a chat template;
    ids, (ids, mask); text, the text. BadLine tells why it cannot be used.
    """
    source = record.get("source", "")
    if not isinstance(source, str) or len(source) > 200:
        raise BadLine("source is not a short text")
    pair = "prompt" in record and "response" in record
    if pair and tokenizer.template_text is None:
        return "pair", check_pair(record["prompt"], record["response"])
    if "messages" in record or "conversations" in record or pair:
        return "chat", conversation_of(record)
    if "input_ids" in record and "loss_mask" in record:
        return "ids", check_ids(record["input_ids"], record["loss_mask"], tokenizer.vocab_size)
    if "text" in record:
        if not text_of(record["text"], "text").strip():
            raise BadLine("empty text")
        return "text", record["text"]
    keys = ", ".join(map(repr, list(record)[:6])) or "nothing"
    raise BadLine(
        f"no messages, conversations, prompt+response, text or input_ids+loss_mask, only {short(keys, 100)}"
    )


def record_tokens(tokenizer: Tokenizer, record: dict, max_length: int) -> tuple[list[int], list[int], str]:
    """(ids, mask, shape) of a record; shape is chat, text or ids. BadLine tells why it cannot be used."""
    shape, content = content_of(tokenizer, record)
    finished = record.get("finished", True) is not False
    if shape == "pair":
        return *pair_tokens(tokenizer, *content, finished, max_length), "chat"
    if shape == "chat":
        return *chat_tokens(tokenizer, content, finished, max_length), "chat"
    if shape == "ids":
        return *content, "ids"
    ids = tokenizer.backend.prefix() + tokens_with_offsets(tokenizer, content, max_length)[0]
    return ids, [0] + [1] * (len(ids) - 1), "text"


def short(text: str, length: int) -> str:
    """One printable line of at most so many characters."""
    text = " ".join(text[: 20 * length].split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


class Parser(argparse.ArgumentParser):
    """The flags of a script. A wrong one is a ValueError of one line, where argparse prints all its usage on
    every rank.
    """

    def __init__(self, prog: str, doc: str | None):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=doc, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{short(message, 300)}: see {self.prog} --help")


# ----------------------------------------------------------------------------------------------------------
# Worker processes: plain subprocesses of this file: no torch, no fork of a rank, not the rank's main module


def send(pipe, head: dict, body: bytes = b"") -> None:
    text = json.dumps(head).encode()
    pipe.write(struct.pack("<IQ", len(text), len(body)) + text)
    pipe.write(body)
    pipe.flush()


def receive(pipe) -> tuple[dict, bytes]:
    """The next message of a pipe; EOFError when the other side is gone."""

    def exactly(size: int) -> bytes:
        parts = []
        while size:
            part = pipe.read(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    n_text, n_body = struct.unpack("<IQ", exactly(12))
    return json.loads(exactly(n_text)), exactly(n_body)


class Worker:
    """A process that renders and tokenizes. Silent for RENDER_LIMIT_S: killed, ValueError."""

    def __init__(self, folder: Path, max_length: int):
        self.folder, self.line = folder, None
        one_thread = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
        )
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select() must not miss what a buffer already holds
            env={**os.environ, **one_thread, "TOKENIZERS_PARALLELISM": "false"},
        )
        self.requests = io.BufferedWriter(self.process.stdin)
        options = {"folder": str(folder), "max_length": max_length, "memory": RENDER_LIMIT_BYTES}
        for head, limit_s in (
            ({**options, "limit_s": RENDER_LIMIT_S}, START_LIMIT_S),
            ({"op": "compile"}, 0.0),
        ):
            reply, _ = self.ask(head, limit_s)
            if "error" in reply:
                self.close()
                raise ValueError(reply["error"])

    def ask(self, head: dict, limit_s: float = 0.0, body: bytes = b"") -> tuple[dict, bytes]:
        """Send a request and wait for its reply; every sign of life starts the time limit anew."""
        limit_s = limit_s or RENDER_LIMIT_S
        self.line = head.get("line")
        try:
            send(self.requests, head, body)
            while True:
                if not self._readable(limit_s):
                    self._fail(f"ran for more than {limit_s:.0f} s")
                reply, data = receive(self.process.stdout)
                if "fatal" in reply:
                    self._fail(reply["fatal"])
                if "beat" not in reply:
                    return reply, data
                self.line = reply["beat"]
        except (EOFError, BrokenPipeError):
            self._fail(f"ended its process (exit code {self.process.wait()})")

    def _readable(self, limit_s: float) -> bool:
        for wait_s in (limit_s, 1.0):  # once more: it may be this process that was stopped
            if select.select([self.process.stdout], [], [], wait_s)[0]:
                return True
        return False

    def _fail(self, what: str) -> None:
        self.close()
        where = "" if self.line is None else f", at or after line {self.line}"
        raise ValueError(
            f"rendering with the chat template of {self.folder} {what}{where}; read the template before you "
            "trust it, or give records with input_ids and loss_mask"
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        try:
            self.requests.close()
        except BrokenPipeError:
            pass  # what was not yet written to a process that is gone


def limit_worker(memory: int) -> None:
    """No more address space than now plus `memory`."""
    if sys.platform == "linux":
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process after so many more seconds of computing: also when the parent is gone."""
    if sys.platform == "linux":
        import resource

        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, resource.RLIM_INFINITY))


def worker_main() -> None:
    """What a worker process runs: one reply a request, until its input ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    pipe_in, pipe_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a print of some library must not end up between the messages
    head, _ = receive(pipe_in)
    max_length, limit_s = head["max_length"], head["limit_s"]
    try:
        tokenizer = Tokenizer(head["folder"])
        limit_worker(head["memory"])
    except ValueError as error:
        send(pipe_out, {"error": str(error)})
        return
    send(pipe_out, {"ready": True})
    while True:
        try:
            head, body = receive(pipe_in)
        except EOFError:
            return
        limit_cpu(2 * limit_s)
        try:
            send(pipe_out, *work(tokenizer, head, body, max_length, limit_s, pipe_out))
        except MemoryError:
            send(pipe_out, {"fatal": "needs more memory than a worker may have"})
            return


def work(tokenizer, head: dict, body: bytes, max_length: int, limit_s: float, pipe_out) -> tuple[dict, bytes]:
    """The reply to one request."""
    try:
        if head["op"] == "render":
            return {"text": tokenizer._render_here(head["messages"], head["generate"])}, b""
        if head["op"] == "chat":
            ids, mask = chat_tokens(tokenizer, check_messages(head["messages"]))
            return {"ids": ids, "mask": mask}, b""
        if head["op"] == "compile":
            tokenizer.compile_template()
            return {"compiled": True}, b""
    except ValueError as error:
        return {"error": str(error)}, b""
    beat = time.monotonic()
    found = Chunk(head["stem"])
    for number, raw in enumerate(body.split(b"\n"), head["line"]):
        if time.monotonic() - beat > 0.1:
            beat = time.monotonic()
            send(pipe_out, {"beat": number})
            limit_cpu(2 * limit_s)
        if raw.strip():
            try:
                found.add(tokenizer, parse_line(raw), max_length)
            except BadLine as error:
                found.bad.append((number, str(error)))
    return found.message(tokenizer)


class Chunk:
    """What a worker found in its lines."""

    def __init__(self, stem: str):
        self.stem, self.sources, self.bad = stem, {}, []
        self.ids, self.mask, self.rows = [], [], []  # a row: length, source, of one document
        self.counts = dict.fromkeys(COUNTS, 0)
        self.example = None

    def add(self, tokenizer: Tokenizer, record: dict, max_length: int) -> None:
        ids, mask, shape = record_tokens(tokenizer, record, max_length)
        source = record.get("source", self.stem)
        ids, mask = np.array(ids, np.int32), np.array(mask, np.uint8)
        self.counts["truncated"] += len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        supervised = int(mask.sum())
        self.counts["seen_tokens"] += len(ids)
        if shape == "chat":
            self.counts["chat_tokens"] += len(ids)
            self.counts["chat_supervised"] += supervised
            self.example = self.example or tokenizer.decode(ids[:100])
        if not (mask[:-1] & mask[1:]).any():
            self.counts["no_anchor"] += 1
            return
        self.ids.append(ids)
        self.mask.append(mask)
        self.rows.append((len(ids), self.sources.setdefault(source, len(self.sources))))

    def message(self, tokenizer: Tokenizer) -> tuple[dict, bytes]:
        ids = np.concatenate([np.zeros(0, np.int32), *self.ids])
        mask = np.concatenate([np.zeros(0, np.uint8), *self.mask])
        rows = np.array(self.rows, np.int32).reshape(-1, 2)
        special = np.array(tokenizer.special_ids, np.int32)
        head = {
            "tokens": len(ids),
            "documents": len(rows),
            "sources": list(self.sources),
            "bad": self.bad,
            "counts": {name: int(value) for name, value in self.counts.items()},
            "example": self.example,
            "special": special[np.isin(special, ids)].tolist(),
        }
        return head, ids.tobytes() + mask.tobytes() + rows.tobytes()


# ----------------------------------------------------------------------------------------------------------
# The corpus: tokenized once, kept in memory-mapped files

COUNTS = ("seen_tokens", "chat_tokens", "chat_supervised", "truncated", "no_anchor")
PARTS = {"tokens": np.int32, "mask": np.uint8, "offsets": np.int64, "source": np.int32}


@dataclass
class Report:
    """What tokenizing found. `bad_lines` lists (file, line, reason) of the first KEPT_BAD_LINES bad lines."""

    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0  # longer than max_length, cut
    no_anchor: int = 0  # no two supervised tokens in a row (answer cut off or empty), left out
    bad: int = 0
    bad_lines: list[tuple[str, int, str]] = field(default_factory=list)
    seen_tokens: int = 0
    chat_tokens: int = 0
    chat_supervised: int = 0
    special_seen: list[int] = field(default_factory=list)  # special ids that occur
    example: str | None = None

    def __str__(self) -> str:
        share = 100 * self.supervised / max(1, self.tokens)
        text = f"{self.documents:,} documents, {self.tokens:,} tokens, {share:.1f}% supervised"
        if self.truncated:
            text += f"; {self.truncated:,} cut to max_length"
        if self.no_anchor:
            text += f"; {self.no_anchor:,} left out (nothing to learn: under two supervised tokens in a row)"
        if self.bad:
            text += f"; {self.bad:,} bad lines skipped, first {bad_line(self.bad_lines[0])}"
        return text


def bad_line(entry: tuple[str, int, str]) -> str:
    return f"{entry[0]}:{entry[1]}: {entry[2]}"


class Corpus:
    """Tokenized documents, memory-mapped: tokens int32 [N], mask uint8 [N], offsets int64 [D+1], source int32
    [D]."""

    def __init__(self, folder: Path, report: Report, source_names: list[str], vocab_size: int):
        self.folder, self.report, self.source_names, self.vocab_size = (
            folder,
            report,
            source_names,
            vocab_size,
        )
        for name, kind in PARTS.items():
            # as plain arrays: slicing a memmap object is several times slower
            setattr(self, name, np.memmap(folder / f"{name}.bin", kind, "r").view(np.ndarray))

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def check_files(files: Iterable[str | Path]) -> None:
    """ValueError for the first of them that is no file."""
    missing = next((f for f in map(Path, files) if not f.is_file()), None)
    if missing is not None:
        why = "is a folder" if missing.is_dir() else "is no file" if missing.exists() else "does not exist"
        raise ValueError(f"data file {missing} {why}: correct its path")


def check_output(name: str) -> None:
    """ValueError where no file of this name can be made."""
    if Path(name).is_dir():
        raise ValueError(f"{short(name, 100)}: is a folder: give the name of a file")
    if not Path(name).absolute().parent.is_dir():
        name = short(name, 100)
        raise ValueError(f"{name}: there is no folder {Path(name).absolute().parent}: make it first")


def load_corpus(
    files,
    tokenizer: Tokenizer,
    max_length: int,
    cache_dir,
    max_bad_lines: int | None = 100,
    workers: int | None = None,
) -> Corpus:
    """Tokenize JSONL files, or open what an earlier call made of the same content, tokenizer and template.

    Concurrent ranks may call it at once: one tokenizes, the others wait. ValueError: a file is missing,
    more than max_bad_lines bad lines, nothing or everything of the conversations supervised, a template out
    of bounds. max_bad_lines None: any number of them, and all that are read now are listed in the report.
    """
    files = [Path(f) for f in ([files] if isinstance(files, (str, Path)) else files)]
    if not files:
        raise ValueError("no data file; give --data")
    check_files(files)
    if max_length < 2:
        raise ValueError(f"max_length {max_length} is too short; give 2 or more")
    cache_dir = Path(cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        key = cache_key(files, tokenizer, max_length, cache_dir)
        folder = cache_dir / key
        corpus = open_corpus(folder, files)
        if corpus is None:
            with Lock(cache_dir / f"{key}.lock"):
                corpus = open_corpus(folder, files)
                if corpus is None:
                    build_corpus(
                        files, tokenizer, max_length, folder, max_bad_lines, workers or usable_cores()
                    )
                    corpus = open_corpus(folder, files)
    except OSError as error:
        raise ValueError(
            f"token cache {cache_dir}: {error}; free space there or choose another folder"
        ) from error
    check_bad_lines(corpus.report, max_bad_lines)
    return corpus


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_key(files: list[Path], tokenizer: Tokenizer, max_length: int, cache_dir: Path) -> str:
    parts = [
        FORMAT,
        tokenizer.fingerprint,
        max_length,
        [(f.stem, file_digest(f, cache_dir)) for f in files],
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def file_digest(path: Path, cache_dir: Path) -> str:
    """Digest of a file's content, remembered by size, times and inode: not read at every start."""
    stat = path.stat()
    state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
    memo = cache_dir / f"{name}.digest"
    try:
        known = json.loads(memo.read_text())
        if isinstance(known, dict) and known.get("state") == state and isinstance(known.get("digest"), str):
            return known["digest"]
    except (FileNotFoundError, ValueError):
        pass  # not hashed before, or a torn memo: hash it now
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    # A file just written may change again within its time stamp's resolution.
    if time.time() - stat.st_mtime > 2:
        write_whole(memo, json.dumps({"state": state, "digest": digest.hexdigest()}).encode())
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Written beside and renamed: readers see the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=path.name + ".tmp-", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


class Lock:
    """One process at a time; the kernel releases it when its holder dies."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        import fcntl

        self.file = self.path.open("a")
        start, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self
            except BlockingIOError:
                time.sleep(0.1)
            except (
                OSError
            ) as error:  # a file system without locks: every rank tokenizes, the rename keeps it safe
                print(f"no lock on {self.path} ({error}): each rank tokenizes for itself", file=sys.stderr)
                return self
            if not told and time.monotonic() - start > 5:
                told = True
                print(f"waiting for the process that is tokenizing into {self.path.parent}", file=sys.stderr)

    def __exit__(self, *exception):
        self.file.close()


def open_corpus(folder: Path, files: list[Path]) -> Corpus | None:
    """The cached corpus in a folder; None if there is none or it is not whole (then it is made again)."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in PARTS}
        if sizes != meta["sizes"] or min(sizes.values()) == 0:
            return None
        report = Report(**meta["report"])
        report.bad_lines = [(str(files[number]), line, reason) for number, line, reason in report.bad_lines]
        corpus = Corpus(folder, report, meta["source_names"], meta["vocab_size"])
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return None
    whole = (
        len(corpus.offsets) == len(corpus) + 1 == report.documents + 1
        and corpus.offsets[0] == 0
        and corpus.offsets[-1] == len(corpus.tokens) == len(corpus.mask)
        and corpus.lengths.min() > 0
        and 0 <= corpus.source.min() <= corpus.source.max() < len(corpus.source_names)
    )
    return corpus if whole else None


def build_corpus(files, tokenizer, max_length: int, folder: Path, max_bad_lines: int | None, workers: int):
    """Tokenize into a folder beside the final one, then rename it. Raises what is wrong with the data."""
    for left in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that died; whoever lives would hold the lock
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        report, source_names = tokenize(files, tokenizer, max_length, temporary, max_bad_lines, workers)
        check_supervision(report, tokenizer, files)
        sizes = {name: (temporary / f"{name}.bin").stat().st_size for name in PARTS}
        numbers = {str(file): number for number, file in enumerate(files)}  # the cache outlives their names
        report.bad_lines = [(numbers[file], line, reason) for file, line, reason in report.bad_lines]
        meta = {"sizes": sizes, "report": asdict(report), "source_names": source_names}
        meta["vocab_size"] = tokenizer.vocab_size
        write_whole(temporary / "meta.json", json.dumps(meta).encode())
        if folder.exists():
            shutil.rmtree(folder)  # torn: open_corpus refused it
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def chunks_of(path: Path):
    """(first line number, bytes of whole lines) of each piece; None for a line over MAX_LINE_BYTES."""
    line, kept, size, skipping = 1, [], 0, False
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            if skipping:
                at = block.find(b"\n")
                if at < 0:
                    continue
                skipping, block, line = False, block[at + 1 :], line + 1
            at = block.rfind(b"\n") + 1
            if at:
                whole = b"".join([*kept, block[: at - 1]])
                yield line, whole
                line, kept, size, block = line + whole.count(b"\n") + 1, [], 0, block[at:]
            kept.append(block)
            size += len(block)
            if size > MAX_LINE_BYTES:
                yield line, None
                kept, size, skipping = [], 0, True
    if size:
        yield line, b"".join(kept)


def tokenize(files, tokenizer, max_length: int, folder: Path, max_bad_lines: int | None, workers: int):
    """Run the workers over all chunks, write their results in order. Returns (Report, names of sources)."""
    from tqdm import tqdm

    report, sources, ends = Report(), {}, [0]
    total = sum(f.stat().st_size for f in files)
    workers = max(1, min(workers, total // CHUNK_BYTES + 1))
    crew, mine = [], threading.local()
    crew_lock = threading.Lock()

    def run(path: Path, line: int, body: bytes | None):
        if body is None:
            reason = f"longer than {MAX_LINE_BYTES / 2**20:g} MiB"
            return {
                "tokens": 0,
                "documents": 0,
                "sources": [],
                "bad": [(line, reason)],
                "counts": {},
                "special": [],
            }, b""
        if not hasattr(mine, "worker"):
            mine.worker = Worker(tokenizer.folder, max_length)
            with crew_lock:
                crew.append(mine.worker)
        head = {"op": "lines", "line": line, "stem": path.stem}
        try:
            return mine.worker.ask(head, body=body)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    jobs = ((path, line, body) for path in files for line, body in chunks_of(path))
    every = 0.1 if sys.stderr.isatty() else 10.0
    pool = ThreadPoolExecutor(workers)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", mininterval=every, file=sys.stderr)
    writers = {name: (folder / f"{name}.bin").open("wb") for name in PARTS}
    try:
        ahead = deque()
        for job in jobs:
            ahead.append((job, pool.submit(run, *job)))
            if len(ahead) > 2 * workers:
                take(*ahead.popleft(), report, sources, ends, writers, bar, max_bad_lines)
        while ahead:
            take(*ahead.popleft(), report, sources, ends, writers, bar, max_bad_lines)
        bar.update(total - bar.n)
        for writer in writers.values():
            writer.flush()
            os.fsync(writer.fileno())
    finally:
        bar.close()
        for worker in crew:
            worker.process.kill()  # whoever still waits for one gets its end of file
        pool.shutdown(cancel_futures=True)
        for worker in crew:
            worker.close()
        for writer in writers.values():
            writer.close()
    return report, list(sources)


def take(
    job, future, report: Report, sources: dict, ends: list, writers: dict, bar, max_bad_lines: int | None
) -> None:
    """Write one chunk's result and add it to the report."""
    (path, _, body), (head, data) = job, future.result()
    n, d = head["tokens"], head["documents"]
    if len(data) != 5 * n + 8 * d:
        raise ValueError(
            f"{path}: a worker answered {len(data)} bytes for {n} tokens of {d} documents; run again"
        )
    rows = np.frombuffer(data, np.int32, offset=5 * n).reshape(d, 2)
    writers["tokens"].write(data[: 4 * n])
    writers["mask"].write(data[4 * n : 5 * n])
    if report.documents == 0 and d:
        writers["offsets"].write(np.zeros(1, np.int64).tobytes())
    offsets = ends[0] + np.cumsum(rows[:, 0], dtype=np.int64)
    writers["offsets"].write(offsets.tobytes())
    here = np.array([sources.setdefault(name, len(sources)) for name in head["sources"]], np.int32)
    writers["source"].write(here[rows[:, 1]].tobytes() if d else b"")
    ends[0] += n
    report.documents, report.tokens = report.documents + d, report.tokens + n
    report.supervised += int(np.frombuffer(data, np.uint8, n, 4 * n).sum())
    for name, value in head["counts"].items():
        setattr(report, name, getattr(report, name) + value)
    report.special_seen = sorted({*report.special_seen, *head["special"]})
    report.example = report.example or head.get("example")
    report.bad += len(head["bad"])
    room = None if max_bad_lines is None else KEPT_BAD_LINES - len(report.bad_lines)
    report.bad_lines += [(str(path), line, reason) for line, reason in head["bad"][:room]]
    bar.update(len(body or b""))
    check_bad_lines(report, max_bad_lines)


def check_bad_lines(report: Report, max_bad_lines: int | None) -> None:
    if max_bad_lines is not None and report.bad > max_bad_lines:
        first = "; ".join(bad_line(entry) for entry in report.bad_lines[:3])
        raise ValueError(
            f"more than {max_bad_lines} bad lines: {first}; correct the data, or raise --max-bad-lines"
        )


def check_supervision(report: Report, tokenizer: Tokenizer, files: list[Path]) -> None:
    """BadData where the loss mask cannot be right: none or all of the conversations supervised."""
    where = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
    if report.chat_tokens and report.chat_supervised in (0, report.chat_tokens):
        share = "0%" if report.chat_supervised == 0 else "100%"
        raise BadData(
            f"{where}: {share} of the conversations' tokens are supervised: the chat template of "
            f"{tokenizer.folder} does not mark who speaks, or max_length cuts off every answer; rendered: "
            f"{short(repr(report.example), 300)}; use the model's own chat template, or raise max_length",
            report,
        )
    if report.documents == 0:
        first = f"first {bad_line(report.bad_lines[0])}" if report.bad_lines else "no line holds a record"
        raise BadData(
            f"{where}: no document to train on ({report.no_anchor} without two supervised tokens in a row, "
            f"{report.bad} bad lines; {first}); give records with answers",
            report,
        )


def split_held_out(corpus: Corpus, fraction: float = 0.03, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(documents to train on, documents held out), both ascending; of two or more, at least one each."""
    n = len(corpus)
    held = min(n - 1, max(1, round(fraction * n))) if fraction > 0 else 0
    order = np.random.default_rng([seed, 0x5B117]).permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])


# ----------------------------------------------------------------------------------------------------------
# Packing


@dataclass
class Plan:
    """Which documents share a batch. Fixed for a run; each epoch takes the batches in another order."""

    flat: np.ndarray  # documents, batch after batch
    bounds: np.ndarray  # [batches + 1]
    seed: int
    fill: float  # share of the token budget that holds tokens
    note: str  # what the user should know about it; empty if all is well

    @property
    def batches(self) -> int:
        return len(self.bounds) - 1

    def docs(self, i: int) -> np.ndarray:
        return self.flat[self.bounds[i] : self.bounds[i + 1]]

    def batch_of(self, epoch: int, i: int) -> int:
        """The batch that comes i-th in an epoch."""
        if getattr(self, "_epoch", None) != epoch:
            self._order = np.random.default_rng([self.seed, epoch, 0xE90C]).permutation(self.batches)
            self._epoch = epoch
        return int(self._order[i])


def pack(lengths, docs, token_budget: int, max_batch_size: int, seed: int, window: int = 2048) -> Plan:
    """Group documents into batches of at most token_budget tokens and max_batch_size documents, nearly full.

    Documents come through a window in an order drawn from the seed. A batch is steered to be like the
    window: while what is left of it asks for longer documents than the average, it draws from those,
    otherwise from the shorter ones; the last ones are the longest that fit. So neither long nor short
    documents are left over, also where max_batch_size nearly binds. A document longer than the budget is
    cut to it (make_batch).
    """
    docs, lengths = np.asarray(docs, np.int64), np.asarray(lengths, np.int64)
    if token_budget < 2 or max_batch_size < 1:
        raise ValueError(
            f"token budget {token_budget} and max_batch_size {max_batch_size}: give at least 2 and 1"
        )
    rng = np.random.default_rng([seed, 0x9ACC])
    order = docs[rng.permutation(len(docs))]
    size = np.minimum(lengths[order], token_budget)
    # An item is length << 40 | rank in the order: one sorted list of integers serves as the window.
    items = iter(((size << 40) | np.arange(len(order))).tolist())
    pool = sorted(itertools.islice(items, window))
    total = sum(item >> 40 for item in pool)
    dice, flat, bounds = iter(()), [], [0]
    while pool:
        room, picked = token_budget, 0
        aim = min(max_batch_size, -(-len(pool) * token_budget // total))  # documents of a batch like the pool
        while pool and room and picked < max_batch_size:
            fits = bisect.bisect_left(pool, (room + 1) << 40)
            if fits == 0:
                break
            low, high = fits - 1, fits
            if picked < aim - 1:
                need = room / (aim - picked)
                middle = bisect.bisect_left(pool, (int(need) + 1) << 40)
                if need * len(pool) > total:
                    low = min(middle, low)
                else:
                    low, high = 0, max(1, min(middle, fits))
            roll = next(dice, None)
            if roll is None:
                dice = iter(rng.random(4096).tolist())
                roll = next(dice)
            item = pool.pop(low + int(roll * (high - low)))
            flat.append(item & ((1 << 40) - 1))
            total -= item >> 40
            room, picked = room - (item >> 40), picked + 1
        bounds.append(len(flat))
        while len(pool) < window and (item := next(items, None)) is not None:
            bisect.insort(pool, item)
            total += item >> 40
    flat, bounds = np.array(flat, np.int64), np.array(bounds, np.int64)
    fill = float(size.sum()) / max(1, (len(bounds) - 1) * token_budget)
    note = packing_note(
        size, int((lengths[order] > token_budget).sum()), bounds, token_budget, max_batch_size, fill
    )
    return Plan(order[flat], bounds, seed, fill, note)


def packing_note(size, cut: int, bounds, token_budget: int, max_batch_size: int, fill: float) -> str:
    """What to tell the user about a plan: a batch size that binds, documents that were cut."""
    notes = []
    capped = np.diff(bounds) == max_batch_size
    if len(size) and fill < 0.97 and capped.mean() > 0.5:
        full = int(0.97 * size.mean() * max_batch_size)
        need = int(1.03 * token_budget / size.mean()) + 1
        notes.append(
            f"max_batch_size {max_batch_size} binds: batches are {100 * fill:.0f}% full; a token budget of "
            f"about {full} would be full, or a max_batch_size of {need}"
        )
    if cut:
        notes.append(f"{cut} documents are longer than the token budget {token_budget} and are cut to it")
    return "; ".join(notes)


# ----------------------------------------------------------------------------------------------------------
# Batches and anchors


@dataclass
class Batch:
    """One packed row and its anchors, on the CPU. Every shape is the same for every batch of a run."""

    index: int
    tokens_T: torch.Tensor  # int64, 0 on padding
    positions_T: torch.Tensor  # int64, counted in the document; 0 on padding
    doc_T: torch.Tensor  # int32, -1 on padding
    mask_T: torch.Tensor  # bool, supervised
    anchors_A: torch.Tensor  # int64, packed index, ascending; -1 in unused slots, which come last
    cu_seqlens: torch.Tensor  # int32 [M+2], bounds of the documents, then T
    source_D: torch.Tensor  # int32 [M], -1 where there is no document


def valid_anchors(mask_T: np.ndarray, doc_T: np.ndarray) -> np.ndarray:
    """bool [T]: p can be an anchor when p and p+1 are supervised and belong to one document."""
    mask_T = np.asarray(mask_T).astype(bool)
    valid_T = np.zeros(len(mask_T), bool)
    valid_T[:-1] = mask_T[:-1] & mask_T[1:] & (doc_T[:-1] == doc_T[1:]) & (doc_T[:-1] >= 0)
    return valid_T


def anchor_quotas(valid_D: np.ndarray, anchors: int) -> np.ndarray:
    """int64 [D]: anchors of each document, in proportion to its valid positions.

    Largest remainder, ties to the lower document; all positions when there are no more than `anchors`.
    """
    valid_D = np.asarray(valid_D, np.int64)
    total = int(valid_D.sum())
    if total <= anchors:
        return valid_D.copy()
    quota_D, remainder_D = np.divmod(anchors * valid_D, total)
    left = anchors - int(quota_D.sum())
    quota_D[np.argsort(-remainder_D, kind="stable")[:left]] += 1
    return quota_D


def draw_anchors(valid_T: np.ndarray, doc_T: np.ndarray, anchors: int, seed: int, index: int) -> np.ndarray:
    """int64 [A]: packed indices of the anchors, ascending, -1 in unused slots; fixed by (seed, index)."""
    chosen = np.flatnonzero(valid_T)
    if len(chosen) > anchors:
        doc = np.asarray(doc_T)[chosen]
        valid_D = np.bincount(doc)
        quota_D = anchor_quotas(valid_D, anchors)
        # Within each document the positions with the smallest draws: without replacement, uniform.
        draws = np.random.default_rng([seed, index, 0xA7C4]).random(len(chosen))
        order = np.argsort(doc + draws, kind="stable")
        rank = np.arange(len(chosen)) - np.repeat(np.cumsum(valid_D) - valid_D, valid_D)
        chosen = np.sort(chosen[order[rank < np.repeat(quota_D, valid_D)]])
    out_A = np.full(anchors, -1, np.int64)
    out_A[: len(chosen)] = chosen
    return out_A


def make_batch(
    corpus, docs, index: int, token_budget: int, max_batch_size: int, anchors: int, seed: int
) -> Batch:
    """Pack documents into one row of token_budget tokens and draw its anchors from (seed, index).

    A document longer than what is left of the row is cut (pack does that only to one longer than the budget).
    """
    import torch

    docs = np.asarray(docs, np.int64)
    if len(docs) > max_batch_size:
        raise ValueError(
            f"batch {index} has {len(docs)} documents, more than max_batch_size {max_batch_size}; pack again"
        )
    T = token_budget
    tokens_T, positions_T = np.zeros(T, np.int64), np.zeros(T, np.int64)
    doc_T, mask_T = np.full(T, -1, np.int32), np.zeros(T, bool)
    cu_seqlens, source_D = np.full(max_batch_size + 2, T, np.int32), np.full(max_batch_size, -1, np.int32)
    cu_seqlens[0] = at = 0
    for d, doc in enumerate(docs.tolist()):
        start = int(corpus.offsets[doc])
        end = min(int(corpus.offsets[doc + 1]), start + T - at)
        row = slice(at, at + end - start)
        tokens_T[row] = corpus.tokens[start:end]
        mask_T[row] = corpus.mask[start:end]
        positions_T[row] = np.arange(end - start)
        doc_T[row] = d
        source_D[d] = corpus.source[doc]
        at = row.stop
        cu_seqlens[d + 1] = at
    if tokens_T.min() < 0 or tokens_T.max() >= corpus.vocab_size:
        raise ValueError(
            f"{corpus.folder}: damaged (a token id out of range); delete this folder, it is made again"
        )
    anchors_A = draw_anchors(valid_anchors(mask_T, doc_T), doc_T, anchors, seed, index)
    arrays = (tokens_T, positions_T, doc_T, mask_T, anchors_A, cu_seqlens, source_D)
    return Batch(index, *map(torch.from_numpy, arrays))


def empty_batch(index: int, token_budget: int, max_batch_size: int, anchors: int) -> Batch:
    """A batch of weight zero: no document, no anchor. It pads the tail of an epoch."""
    import torch

    T, M = token_budget, max_batch_size
    cu_seqlens = np.full(M + 2, T, np.int32)
    cu_seqlens[0] = 0
    arrays = (np.zeros(T, np.int64), np.zeros(T, np.int64), np.full(T, -1, np.int32), np.zeros(T, bool))
    arrays += (np.full(anchors, -1, np.int64), cu_seqlens, np.full(M, -1, np.int32))
    return Batch(index, *map(torch.from_numpy, arrays))


def choose_mask_token(
    tokenizer: Tokenizer, embedding_rows: int, corpus: Corpus | None, override: int | None = None
) -> int:
    """The id that stands for "to be predicted".

    --mask-token-id, else the tokenizer's mask token, else the first embedding row no token uses, else the
    highest special token that occurs in neither data nor template. Never a token that pads, begins or ends a
    text, unless the user says so. ValueError says how to choose.
    """
    if override is not None:
        if not 0 <= override < embedding_rows:
            last = embedding_rows - 1
            raise ValueError(
                f"--mask-token-id {override}: the target has embedding rows 0 to {last}; choose one"
            )
        return override
    taken = {tokenizer.pad_id, tokenizer.bos_id, *tokenizer.eos_ids}
    own = tokenizer.mask_id
    if own is not None and own not in taken and own < embedding_rows:
        return own
    unused = next((i for i in range(embedding_rows) if i not in tokenizer.used_ids), None)
    if unused is not None and unused not in taken:
        return unused
    taken |= set(corpus.report.special_seen) if corpus is not None else set()
    names = {index: content for content, index in tokenizer.added.items()}
    template = tokenizer.template_text or ""
    for i in reversed(tokenizer.special_ids):
        if i < embedding_rows and i not in taken and i in names and names[i] not in template:
            return i
    raise ValueError(
        f"{tokenizer.folder}: no mask token, no unused embedding row below {embedding_rows}, and every "
        "special token occurs in the data or the template; choose an id the data never use: --mask-token-id"
    )


def main() -> int:
    """Exit 0: train.py takes the data; 1: it does not, or there is no such file or model; 2: a wrong flag."""
    parser = Parser("data.py", __doc__)
    parser.add_argument("files", nargs="+", help="JSONL files")
    parser.add_argument("--target", default="", help="model folder with the tokenizer and its chat template")
    parser.add_argument(
        "--max-length", type=int, default=0, help="tokens of a document (4096, at most what the target takes)"
    )
    parser.add_argument(
        "--max-bad-lines", type=int, default=100, help="exit 1 above it (100, as train.py); all are printed"
    )
    parser.add_argument("--cache", default=None, help="folder for the tokens (default: a temporary one)")
    try:
        args = parser.parse_args()
    except ValueError as error:
        print(f"data.py: {error}", file=sys.stderr)
        return 2
    try:
        return check(args)
    except ValueError as error:
        raise SystemExit(f"data.py: {error}") from None
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def default_length(folder: Path) -> int:
    """Tokens of a document at which train.py cuts by itself: LENGTH, or what the target takes."""
    config = read_json(folder / "config.json") or {}
    text = config.get("text_config")
    most = (config | text if isinstance(text, dict) else config).get("max_position_embeddings")
    return min(LENGTH, most) if type(most) is int and most > 0 else LENGTH


def check(args: argparse.Namespace) -> int:
    """Print every bad line, their number in each file, what is in the data; the exit code."""
    folder = Path(args.target or TINY)
    tokenizer, unusable, start = load_tokenizer(folder), None, time.monotonic()
    length = args.max_length or default_length(folder)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            report = load_corpus(args.files, tokenizer, length, args.cache or temporary, None).report
            if len(report.bad_lines) < report.bad:  # from the cache, where train.py lists the first ones
                report = load_corpus(args.files, tokenizer, length, temporary, None).report
        except BadData as error:
            report, unusable = error.report, error
    seconds = time.monotonic() - start
    for entry in report.bad_lines:
        print("bad line", bad_line(entry))
    for file, count in Counter(file for file, _, _ in report.bad_lines).items():
        print(f"{file}: {count:,} bad lines")
    if unusable:
        raise unusable
    speed = f"{seconds:.1f} s, {report.seen_tokens / seconds / 1e6:.2f} Mtok/s"
    print(f"{report}; max_length {length}; {speed}", flush=True)
    check_bad_lines(report, args.max_bad_lines)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker_main()
    else:
        sys.exit(main())
