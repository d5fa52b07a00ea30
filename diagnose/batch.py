"""What does one real batch hold? A wrong chat template or loss mask is seen in ten seconds.

    python -m diagnose.batch                                   # the built-in target and data
    python -m diagnose.batch --target DIR --data FILE...       # any train.py flags: a batch of that run
    python -m diagnose.batch --index 7 --documents 0 --png batch.png      # batch 7, all of its documents

Decodes the batch that train.py would train on, supervised tokens in colour (between ⟦ and ⟧ where the output
is no terminal), the first character of each anchor's token underlined (after ▸), a line break as ↵. Then
checks it against the lines of the data files it was made of: positions, who is supervised, headers, ends of
turn, anchors and their spread over the documents, the text itself.

Shape letters: T token budget, A anchors.
"""

from __future__ import annotations

import argparse
import dataclasses
import fractions
import itertools
import os
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # python diagnose/batch.py: same imports as python -m diagnose.batch
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

import data
import model
import train
from diagnose.report import Finding, Parser, Report, add_arguments, fail, ok, set_aside, skip, warn, writable

WIDTH = 100
MARK = "qzxanswerxzq"  # stands for an answer where the template is looked at
LONGEST = 240  # characters shown of a stretch of text that is supervised, or not, throughout


# ---------------------------------------------------------------- the run and its batch


@dataclasses.dataclass
class Run:
    """The data side of the run that some train.py flags describe, made by train.py itself."""

    c: train.Config
    t: model.TargetConfig
    flags: list[str]
    batches: train.Batches

    @staticmethod
    def configure(flags: list[str], **small) -> tuple[train.Config, model.TargetConfig]:
        """Flags parsed and checked as train.py does; `small`: fields to set where no flag does. ValueError.

        The split over ranks changes no batch (but where an epoch ends): one rank is enough.
        """
        c = train.parse_flags(flags)
        missing = next((f for f in [*c.data, *c.eval_data] if not Path(f).is_file()), None)
        if missing:
            raise ValueError(f"data file {missing} does not exist: correct --data or --eval-data")
        for name, value in small.items():
            setattr(c, name, getattr(c, name) or value)
        c.batches_per_step, c.drafters, c.layout = c.batches_per_step or c.drafters, 0, ""
        c.target_tp = 1
        t = train.backend(c).TargetConfig.from_folder(c.folder)
        return train.resolve(c, t, 1, 1), t

    @staticmethod
    def from_flags(flags: list[str], **small) -> Run:
        c, t = Run.configure(flags, **small)
        return Run(c, t, flags, train.Batches(c, t))

    def again(self, *more: str) -> str:
        """The command of this script with the same flags and some more."""
        return shlex.join(["python", "-m", "diagnose.batch", *self.flags, *more])

    def documents_of(self, b: int) -> list[int]:
        """Corpus numbers of the documents of batch b, none in a weight-zero batch at an epoch's end."""
        plan, c = self.batches.plan, self.c
        epoch, i = divmod(b, train.steps_per_epoch(c, plan.batches) * c.batches_per_step)
        return plan.docs(plan.batch_of(epoch, i)).tolist() if i < plan.batches else []


@dataclasses.dataclass
class Document:
    """One document of the batch. Indices of tokens count within it; spans are characters [a, b) of text."""

    number: int
    corpus_number: int
    source: str
    start: int  # packed index of its first token
    ids: list[int]
    supervised: list[bool]
    anchors: list[int]
    text: str
    spans: list[tuple[int, int]]
    line: str = ""  # file:line it was made of
    kind: str = ""  # chat, pair, text or ids: the shape of that line's record
    record: dict = dataclasses.field(default_factory=dict)
    messages: list[dict] = dataclasses.field(default_factory=list)
    rendered: str = ""  # what the text should be
    cut: bool = False

    @property
    def valid(self) -> int:
        return sum(a and b for a, b in itertools.pairwise(self.supervised))

    @property
    def share(self) -> str:
        return f"{100 * len(self.anchors) / self.valid:.1f}%" if self.valid else "-"

    def line_in(self, length: int) -> str:
        """file:line, the file's name shortened, never the number."""
        name, _, number = self.line.rpartition(":")
        return f"{data.short(name, max(2, length - 1 - len(number)))}:{number}" if name else "-"

    def __str__(self) -> str:
        return f"document {self.number}" + (f" ({self.line})" if self.line else "")


@dataclasses.dataclass
class View:
    """A batch, its documents, and how the template writes turns."""

    run: Run
    tokenizer: data.Tokenizer
    batch: data.Batch
    documents: list[Document]
    header: str  # what stands before an answer, first line; empty: nothing
    end_of_turn: str  # what ends an answer; empty: no token does


def look(run: Run, index: int) -> View:
    """Take batch `index` apart and find the lines it was made of."""
    tokenizer = data.load_tokenizer(run.c.folder)
    batch = run.batches.train(index)
    try:
        header, end_of_turn = how_turns_look(tokenizer)
        documents = take_apart(run, tokenizer, batch, run.documents_of(index))
        find_lines(run, tokenizer, documents)
    finally:
        tokenizer.close()
    return View(run, tokenizer, batch, documents, header, end_of_turn)


def take_apart(run: Run, tokenizer, batch: data.Batch, numbers: list[int]) -> list[Document]:
    tokens_T, doc_T, mask_T = batch.tokens_T.tolist(), batch.doc_T.tolist(), batch.mask_T.tolist()
    anchors_A = [a for a in batch.anchors_A.tolist() if a >= 0]
    documents, at = [], 0
    for d, stretch in itertools.groupby(doc_T):
        end = at + len(list(stretch))
        if 0 <= d < len(numbers):
            source = run.batches.corpus.source_names[int(batch.source_D[d])]
            ids, anchors = tokens_T[at:end], [a - at for a in anchors_A if at <= a < end]
            text, spans = characters(tokenizer, ids)
            found = Document(d, numbers[d], source, at, ids, mask_T[at:end], anchors, text, spans)
            documents.append(found)
        at = end
    return documents


def characters(tokenizer, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The decoded text and the characters [a, b) of each token in it."""
    text = tokenizer.decode(ids)
    again, spans = tokenizer.backend.encode(text)
    same = common_start(again, ids)
    if same == len(ids) == len(again):
        return text, spans
    same = max(0, same - 1)
    ends = [b for _, b in spans[:same]]
    # Ids that this text would not give (cut within a character, or given as ids): decode ever more of them.
    ends += [len(tokenizer.decode(ids[: i + 1])) for i in range(same, len(ids))]
    ends = [min(e, len(text)) for e in itertools.accumulate(ends, max)]
    starts = [a for a, _ in spans[:same]] + [0, *ends][same : len(ids)]
    return text, list(zip(starts, ends, strict=True))


def how_turns_look(tokenizer) -> tuple[str, str]:
    """(first line of an answer's header, text of the token that ends a turn), seen by rendering a mark."""
    if tokenizer.template_text is None:
        return "", ""
    user = [{"role": "user", "content": "a"}]
    before, _, after = tokenizer.render([*user, {"role": "assistant", "content": MARK}]).partition(MARK)
    header = before[common_start(before, tokenizer.render(user)) :].strip()
    tail = tokenizer.encode(after.strip())[:1]
    end = tokenizer.decode(tail) if tail and tail[0] in set(tokenizer.added.values()) else ""
    return header.splitlines()[0] if header else "", end


def common_start(one, other) -> int:
    """How many items two texts or lists share at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


# ---------------------------------------------------------------- the lines it was made of


def lines_of(files: list[str]) -> Iterator[tuple[str, bytes]]:
    """(file:line, bytes) of every line that is not blank."""
    for name in files:
        with open(name, "rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield f"{Path(name).name}:{number}", raw


def find_lines(run: Run, tokenizer, documents: list[Document]) -> None:
    """Fill in line, kind, record and rendered text: the line whose tokens a document has.

    Document d of the corpus is line d or later by at most the lines that were left out.
    """
    report = run.batches.corpus.report
    left_out = report.bad + report.no_anchor
    waiting = sorted(documents, key=lambda d: d.corpus_number)
    for number, (line, raw) in enumerate(lines_of(run.c.data)):
        waiting = [d for d in waiting if not d.kind and d.corpus_number + left_out >= number]
        if not waiting:
            return
        tried = [d for d in waiting if d.corpus_number <= number]
        if tried:
            try:
                match(run, tokenizer, tried, line, data.parse_line(raw))
            except ValueError:
                continue  # a bad line, or one that the template refuses: it made no document


def match(run: Run, tokenizer, tried: list[Document], line: str, record: dict) -> None:
    """Give the record to the first document that has its tokens. ValueError: it makes no document."""
    kind, content = data.content_of(tokenizer, record)  # as training takes it: both call the same lines bad
    messages, rendered = [], ""
    if kind == "pair":
        end = tokenizer.decode(tokenizer.eos_ids[:1]) if record.get("finished", True) is not False else ""
        rendered = "".join(content) + end
    elif kind == "chat":
        messages = content
        answer = next(m["content"] for m in messages if m["role"] == "assistant").split("</think>")[-1]
        # Asking the template is slow: look first whether the answer's first word is there.
        start = normal(answer.split()[0][:20]) if answer.split() else ""
        if not any(len(d.ids) >= run.c.max_length or start in normal(d.text) for d in tried):
            return
        rendered = tokenizer.render(messages)
    elif kind == "text":
        rendered = content
    ids = content[0] if kind == "ids" else tokenizer.encode(rendered)
    if kind in ("text", "pair"):
        ids = tokenizer.backend.prefix() + ids
        rendered = tokenizer.decode(tokenizer.backend.prefix()) + rendered
    longest = min(run.c.max_length, run.c.token_budget)
    for d in tried:
        if not d.kind and ids[:longest] == d.ids:
            d.line, d.kind, d.record, d.messages, d.rendered = line, kind, record, messages, rendered
            d.cut = len(ids) > longest
            return


# ---------------------------------------------------------------- who may be supervised


@dataclasses.dataclass
class Turn:
    """Characters of one assistant turn: the answer [start, end), its end-of-turn token up to stop."""

    start: int
    end: int
    stop: int
    asked: int  # from here on every token has to be supervised (a thinking part before it may be)
    finished: bool = True


def turns_of(view: View, d: Document) -> list[Turn] | None:
    """The assistant's turns in a document's text; None where nothing tells who speaks."""
    if d.kind in ("text", "pair"):
        first = d.spans[1][0] if d.kind == "text" else len(d.rendered) - len(d.rendered.lstrip())
        if d.kind == "pair":
            first = d.rendered.rfind(d.record["response"])
        return [Turn(first, len(d.text), len(d.text), first)]
    if d.kind == "chat":
        return turns_of_messages(view, d)
    if not view.header or view.header not in d.text:
        return None
    turns, at = [], 0
    while (at := d.text.find(view.header, at)) >= 0:
        at += len(view.header)
        end = d.text.find(view.end_of_turn, at) if view.end_of_turn else d.text.find(view.header, at)
        end = end if end >= 0 else len(d.text)
        stop = min(len(d.text), end + len(view.end_of_turn))
        turns.append(Turn(at, end, stop, end, finished=stop > end))
    return turns


def turns_of_messages(view: View, d: Document) -> list[Turn]:
    """Each answer of the record looked up in the rendered text, in order, after its header."""
    turns, at = [], 0
    text = d.rendered if d.cut else d.text
    for message in d.messages:
        content = message["content"]
        if message["role"] != "assistant":
            found = text.find(content.strip(), at)
            at = found + len(content.strip()) if found >= 0 else at
            continue
        head = max(at, text.find(view.header, at)) + len(view.header) if view.header else at
        answer = find_answer(text, content, head)
        if answer is None:
            continue
        start, asked, end, whole = answer
        after = end + len(text[end:]) - len(text[end:].lstrip())
        ends = bool(view.end_of_turn) and text.startswith(view.end_of_turn, after)
        stop = after + len(view.end_of_turn) if ends else after
        turns.append(Turn(start, end, stop, asked, ends and whole))
        at = end
    if turns and d.record.get("finished", True) is False:
        turns[-1].finished = False  # cut off: its end of turn is not the model's
    return turns


def find_answer(text: str, content: str, head: int) -> tuple[int, int, int, bool] | None:
    """(start, from where on supervised, end, is it all that was said) of an answer after its header."""
    for said in (content.rstrip(), content.strip()):
        start = text.find(said, head)
        if start >= 0:
            end = start + len(said)
            return start, end - len(said.lstrip()), end, True
    if "</think>" not in content:
        return None
    thought, _, said = content.rpartition("</think>")  # the template rewrites or drops the thinking
    said, thought = said.strip(), thought.replace("<think>", "").strip()
    start = text.find(said, head)
    if start < 0:
        return None
    end, whole = start + len(said), thought in text[head:start]
    return head, start if whole else end, end, whole  # without its thought it is not what the model said


def core(d: Document, i: int) -> tuple[int, int]:
    """Characters of a token without the white space around them, which may belong to either side."""
    a, b = d.spans[i]
    part = d.text[a:b]
    if not part.strip():
        return a, b
    return a + len(part) - len(part.lstrip()), b - len(part) + len(part.rstrip())


def around(d: Document, i: int) -> str:
    """A token in its text, for a message."""
    a, b = d.spans[i]
    return show_plain(f"{d.text[max(0, a - 24) : a]}[{d.text[a:b]}]{d.text[b : b + 16]}")


def how_to_correct(view: View, d: Document) -> str:
    if d.kind == "ids":
        return f"{view.run.again('--documents', '0')}  # read it, then correct loss_mask of {d.line}"
    folder = view.run.c.folder
    return f"{view.run.again('--documents', '0')}  # read it, then correct the chat template in {folder}"


# ---------------------------------------------------------------- checks


def check_positions(view: View) -> Finding:
    """Positions count from 0 in each document; documents follow each other; bounds say the same."""
    b, T = view.batch, view.run.c.token_budget
    positions_T, doc_T = b.positions_T.tolist(), b.doc_T.tolist()
    fix = set_aside("data.py", "make_batch")
    bounds, before, want = [0], -1, 0
    for i in range(T):
        if doc_T[i] != before:
            if doc_T[i] not in (before + 1, -1):
                return fail(f"packed token {i}: document {doc_T[i]} follows document {before}", fix)
            if i:
                bounds.append(i)
            before, want = doc_T[i], 0
        if positions_T[i] != (want if doc_T[i] >= 0 else 0):
            told = f"packed token {i} of document {doc_T[i]} has position {positions_T[i]}, not {want}"
            return fail(told, fix)
        want += 1
    bounds += [T] * (len(b.cu_seqlens) - len(bounds))
    if b.cu_seqlens.tolist() != bounds:
        return fail(f"cu_seqlens is {b.cu_seqlens.tolist()[:6]}..., not {bounds[:6]}...", fix)
    return ok(f"restart at 0 in each of {len(view.documents)} documents, 0 on padding; bounds agree")


def check_headers(view: View) -> Finding:
    """No supervised token holds letters of the header before an answer."""
    if not view.header:
        return ok("the template writes no header before an answer")
    seen = 0
    for d in view.documents:
        at = -1
        inside = [(t.start, t.end) for t in turns_of(view, d) or ()] if d.kind == "chat" else []
        while d.kind in ("chat", "ids", "") and (at := d.text.find(view.header, at + 1)) >= 0:
            if any(a <= at < b for a, b in inside):
                continue  # an answer that quotes the header
            seen += 1
            for i in range(len(d.ids)):
                a, b = core(d, i)
                if d.supervised[i] and a < at + len(view.header) and b > at:
                    told = f"{d}: a token of the header {view.header!r} is supervised: {around(d, i)}"
                    return fail(told, how_to_correct(view, d))
    return ok(f"{seen} headers {view.header!r}, none supervised")


def check_turns(view: View) -> Finding:
    """Supervised tokens are an assistant's, and all of the assistant's are supervised."""
    turns_seen, supervised, unknown = 0, 0, 0
    for d in view.documents:
        turns = turns_of(view, d)
        if turns is None:
            unknown += 1
            continue
        turns_seen += len(turns)
        for i in range(len(d.ids)):
            a, b = core(d, i)
            inside = any(t.start <= a and b <= t.stop for t in turns)
            asked = any(t.asked <= a and b <= t.end and a < b for t in turns)
            supervised += d.supervised[i]
            if d.supervised[i] and not inside:
                told = f"{d}: a token outside of the assistant's turns is supervised: {around(d, i)}"
                return fail(told, how_to_correct(view, d))
            if asked and not d.supervised[i]:
                told = f"{d}: a token of an answer is not supervised: {around(d, i)}"
                return fail(told, how_to_correct(view, d))
    note = f"; {unknown} documents of ids do not show who speaks" if unknown else ""
    return ok(f"{turns_seen} assistant turns, {supervised} supervised tokens, all theirs{note}")


def check_end_of_turn(view: View) -> Finding:
    """The token that ends a turn is supervised: else the drafter never learns to stop."""
    if view.tokenizer.template_text is not None and not view.end_of_turn:
        fix = view.run.again("--documents", "0") + "  # then let the chat template end an answer with a token"
        return warn("the template ends an answer with no token of its own: drafts will not end either", fix)
    ends, without, first = 0, 0, ""
    for d in view.documents:
        for turn in turns_of(view, d) or () if d.kind not in ("text", "pair") else ():
            tokens = [i for i in range(len(d.ids)) if turn.end <= d.spans[i][0] < turn.stop]
            if not tokens or not turn.finished:
                continue
            ends += 1
            if not d.supervised[tokens[-1]]:
                without += 1
                told = f"{d}: the end of turn {view.end_of_turn!r} is not supervised: {around(d, tokens[-1])}"
                if d.kind == "chat":
                    return fail(told, how_to_correct(view, d))
                first = first or told
    if without:
        return warn(f"{without} of {ends}: {first}", how_to_correct(view, view.documents[0]))
    return ok(f"{ends} turns end with {view.end_of_turn!r}, supervised" if ends else "no turn ends here")


def check_anchors(view: View) -> Finding:
    """Ascending, each once, unused slots last; each anchor and the token after it supervised."""
    anchors_A, b = view.batch.anchors_A.tolist(), view.batch
    doc_T, mask_T = b.doc_T.tolist(), b.mask_T.tolist()
    fix = set_aside("data.py", "draw_anchors or valid_anchors")
    used = [a for a in anchors_A if a >= 0]
    if anchors_A != used + [-1] * (len(anchors_A) - len(used)):
        return fail("unused slots (-1) stand before used ones", fix)
    for before, after in itertools.pairwise(used):
        if before >= after:
            why = "twice" if before == after else "not sorted, attention is several times slower"
            return fail(f"anchor {after} follows anchor {before}: {why}", fix)
    for a in used:
        if a + 1 >= len(doc_T) or doc_T[a] < 0 or doc_T[a] != doc_T[a + 1]:
            return fail(f"anchor {a} is on padding or the last token of its document", fix)
        if not (mask_T[a] and mask_T[a + 1]):
            return fail(f"anchor {a} of document {doc_T[a]}: it or the next token is not supervised", fix)
    return ok(f"{len(used)} of {len(anchors_A)} slots used, sorted, each with a supervised token after it")


def check_coverage(view: View) -> Finding:
    """Anchors spread over the documents in proportion to their valid positions, by largest remainder."""
    A, valid_D = len(view.batch.anchors_A), [d.valid for d in view.documents]
    total, got_D = sum(valid_D), [len(d.anchors) for d in view.documents]
    want_D = list(valid_D)
    if total > A:
        exact_D = [fractions.Fraction(A * v, total) for v in valid_D]
        want_D = [int(e) for e in exact_D]
        by_remainder = sorted(range(len(want_D)), key=lambda d: (want_D[d] - exact_D[d], d))
        for d in by_remainder[: A - sum(want_D)]:
            want_D[d] += 1
    for d, (got, want) in enumerate(zip(got_D, want_D, strict=True)):
        if got != want:
            told = f"document {d} has {got} anchors on {valid_D[d]} valid positions, its share is {want}"
            return fail(told, set_aside("data.py", "anchor_quotas or draw_anchors"))
    shares = [g / v for g, v in zip(got_D, valid_D, strict=True) if v]
    if not shares:
        return ok("no valid position in this batch")
    spread = f"{100 * min(shares):.1f}% to {100 * max(shares):.1f}% of a document"
    return ok(f"{sum(got_D)} of {total} valid positions, {100 * sum(got_D) / total:.1f}%; {spread}")


def check_text(view: View) -> list[Finding] | Finding:
    """What the tokens decode to is what the template wrote (or the line says)."""
    same, softly, ids = 0, "", 0
    tokens = shlex.quote(str(view.run.batches.corpus.folder))
    for d in view.documents:
        if not d.kind:
            fix = f"rm -r {tokens}  # the next start tokenizes again"
            return fail(f"{d}: no line of the data gives its tokens: the token cache is of other data", fix)
        if d.kind == "ids":
            ids += 1
            continue
        got, want = (d.text.rstrip("\ufffd"), d.rendered) if d.cut else (d.text, d.rendered)
        want = want[: len(got)] if d.cut else want
        if got == want:
            same += 1
            continue
        at = common_start(got, want)
        told = f"{d}: decodes to …{show_plain(got[max(0, at - 8) : at + 16])!r}, "
        told += f"the template wrote …{show_plain(want[max(0, at - 8) : at + 16])!r}"
        if normal(got) != normal(want):
            folder = shlex.quote(str(view.run.c.folder))
            fix = f"rm -r {tokens}; ls -l {folder}  # tokenizes again; or tokenizer and template do not fit"
            return fail(told, fix)
        softly = softly or told
    if softly:
        return warn(f"{softly} (white space or normalisation only)", view.run.again("--documents", "0"))
    note = f"; {ids} given as ids" if ids else ""
    return ok(f"{same} documents decode to exactly what was written{note}")


def normal(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split()).casefold()


def check_fill(view: View) -> Finding:
    plan, c = view.run.batches.plan, view.run.c
    told = f"{sum(len(d.ids) for d in view.documents)} of {c.token_budget} tokens here"
    told += f", {100 * plan.fill:.1f}% over {plan.batches} batches"
    if not plan.note:
        return ok(told)
    if "binds" in plan.note:
        mean = view.run.batches.corpus.lengths.mean()
        more = ["--max-batch-size", str(int(1.25 * c.token_budget / mean) + 1)]
    else:
        longest = int(view.run.batches.corpus.lengths.max())
        more = ["--token-budget", str(-(-longest // model.TILE) * model.TILE)]
    return warn(f"{told}: {plan.note}", view.run.again(*more))


def check_mask_token(view: View) -> Finding:
    token, tokenizer = view.run.batches.facts["mask_token"], view.tokenizer
    told = f"{token} {name_of(tokenizer, token)}: {how_chosen(view)}"
    used = next((d for d in view.documents if token in d.ids), None)
    double = token in {tokenizer.pad_id, tokenizer.bos_id, *tokenizer.eos_ids}
    if not used and not double:
        return ok(told)
    fix = view.run.again("--mask-token-id", unused_token(view)) + "  # an id that the data never use"
    if used:
        return fail(f"{told}, but {used} holds it", fix)
    return warn(f"{told}, but it also pads, begins or ends texts", fix)


def unused_token(view: View) -> str:
    """The highest id that occurs nowhere in the data and has no duty of its own."""
    tokenizer, tokens_N = view.tokenizer, view.run.batches.corpus.tokens
    free = np.ones(view.run.t.vocab, bool)
    for lo in range(0, len(tokens_N), 1 << 24):
        free[np.unique(tokens_N[lo : lo + (1 << 24)])] = False
    free[[i for i in (tokenizer.pad_id, tokenizer.bos_id, *tokenizer.eos_ids) if i is not None]] = False
    return str(np.flatnonzero(free)[-1]) if free.any() else "ID"


def how_chosen(view: View) -> str:
    token, tokenizer = view.run.batches.facts["mask_token"], view.tokenizer
    if view.run.c.mask_token_id >= 0:
        return "asked for with --mask-token-id"
    if token == tokenizer.mask_id:
        return "the tokenizer's mask token"
    if token not in tokenizer.used_ids:
        return "the first embedding row that no token uses"
    return "the highest special token that is in neither data nor template"


def name_of(tokenizer, token: int) -> str:
    return repr(show_plain(tokenizer.decode([token]))) if token in tokenizer.used_ids else "(no token)"


# ---------------------------------------------------------------- on the console


def show_plain(text: str) -> str:
    """Line breaks as ↵, and nothing that could steer a terminal."""
    text = text.replace("\r\n", "↵").replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def width_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cells_of(d: Document) -> list[tuple[str, bool, bool]]:
    """(character, supervised, first of an anchor's token), long stretches shortened with …"""
    supervised, anchor = [False] * len(d.text), [False] * len(d.text)
    for i, (a, b) in enumerate(d.spans):
        if d.supervised[i]:
            supervised[a:b] = [True] * (b - a)
    for i in d.anchors:
        a = core(d, i)[0]
        if a < len(anchor):
            anchor[a] = True
    cells = []
    for _, stretch in itertools.groupby(
        zip(show_one(d.text), supervised, anchor, strict=True), lambda c: c[1]
    ):
        part = list(stretch)
        if len(part) > LONGEST:
            part = [*part[: LONGEST // 2], ("…", part[0][1], False), *part[-LONGEST // 2 :]]
        cells += part
    return cells


def show_one(text: str) -> list[str]:
    return [show_plain(character) for character in text]


def lines_to_show(d: Document, colour: bool, most: int = 14) -> list[str]:
    """The document's text in lines of at most WIDTH columns."""
    lines, line, used, now = [], [], 2, False

    def end_line() -> None:
        nonlocal line, used
        lines.append("  " + "".join(line) + ("\033[0m" if colour else ""))
        line, used = ["\033[32m"] if colour and now else [], 2

    for character, supervised, anchor in [*cells_of(d), ("", False, False)]:
        pieces = []
        if supervised != now:
            now = supervised
            pieces.append(("\033[32m" if now else "\033[0m") if colour else "⟦" if now else "⟧")
        if anchor:
            pieces.append("\033[1;4m" if colour else "▸")
        wide = width_of(character) if character else 0
        wide += 0 if colour else len(pieces)
        if used + wide > WIDTH:
            end_line()
        pieces.append(character + ("\033[22;24m" if anchor and colour else ""))
        line += pieces
        used += wide
    end_line()
    if len(lines) > most:
        lines = [*lines[: most // 2], "  …", *lines[-(most // 2) :]]
    return lines


def show(report: Report, view: View, documents: int, colour: bool) -> None:
    """The batch for a reader: facts, a table of its documents, the text of some of them."""
    shown = view.documents[: documents or None]
    if not view.documents:
        report.say("a batch of weight zero: it fills the last step of an epoch and holds no document")
    for d in shown:
        report.say(heading(d))
        for line in lines_to_show(d, colour):
            report.say(line)
    if len(shown) < len(view.documents):
        report.say(f"… and {len(view.documents) - len(shown)} more documents (--documents 0 shows all)")
    legend = "supervised in green, anchors underlined" if colour else "⟦supervised⟧, ▸anchor"
    report.say(f"legend: {legend}, ↵ line break, … left out")
    rows = []
    for d in view.documents:
        where = (d.number, data.short(d.source, 14), d.line_in(26))
        rows.append((*where, len(d.ids), sum(d.supervised), d.valid, len(d.anchors), d.share))
    headers = ("document", "source", "line", "tokens", "supervised", "valid", "anchors", "coverage")
    report.table(rows, headers)
    report.say(summary(view))


def heading(d: Document) -> str:
    last = len(d.ids) - 1
    told = f"document {d.number}, {data.short(d.source, 16)}, {d.line_in(30)}: positions 0 to {last}"
    told += f", packed {d.start} to {d.start + last}" + (", cut" if d.cut else "")
    return told[:WIDTH]


def summary(view: View) -> str:
    c, lengths = view.run.c, sorted(len(d.ids) for d in view.documents) or [0]
    used = sum(a >= 0 for a in view.batch.anchors_A.tolist())
    told = (
        f"batch {view.batch.index}: {len(view.documents)} documents of {lengths[0]} to {lengths[-1]} tokens"
    )
    told += f", {100 * sum(lengths) / c.token_budget:.1f}% of {c.token_budget}"
    return f"{told}, {used} of {c.anchors} anchors"


def draw(view: View, path: str) -> None:
    """A bar a document: its tokens, the supervised ones in green, a tick for each anchor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = max(1, len(view.documents))
    figure, axis = plt.subplots(figsize=(12, 2.2 + 0.26 * rows), layout="constrained")
    for d in view.documents:
        at = 0
        for supervised, stretch in itertools.groupby(d.supervised):
            length = len(list(stretch))
            axis.barh(d.number, length, left=at, height=0.8, color="#74c476" if supervised else "#d9d9d9")
            at += length
        axis.vlines([a + 0.5 for a in d.anchors], d.number - 0.4, d.number, color="black", lw=0.7)
        axis.annotate(d.share, (at, d.number), (4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [f"{d.number}  {data.short(d.source, 16)}  {d.line_in(28)}" for d in view.documents]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set(
        ylim=(rows - 0.4, -0.6), xlabel="position in the document (tokens); right: share of valid positions"
    )
    axis.set_title(f"{view.run.c.folder.name}: {summary(view)}", fontsize=10)
    handles = [
        Patch(color="#d9d9d9", label="context only"),
        Patch(color="#74c476", label="supervised"),
        Line2D([], [], color="black", lw=0, marker="|", label="anchor"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    beside = f"{path}.{os.getpid()}.tmp"
    figure.savefig(beside, dpi=110, format="png")
    plt.close(figure)
    os.replace(beside, path)


# ---------------------------------------------------------------- all of it


def check_data(found: list[View], flags: list[str], index: int) -> Finding:
    """Open the data as train.py does; the view of the batch goes into `found`."""
    c = Run.configure(flags)[0]
    try:
        run = Run.from_flags(flags)
        found.append(look(run, index))
    except ValueError as error:
        files = [str(f) for f in c.data]
        return fail(str(error), shlex.join(["python", "data.py", "--target", str(c.folder), *files]))
    return ok(run.batches.facts["about"])


def checks(report: Report, args: argparse.Namespace | None = None) -> None:
    """Every check of this script; `python -m diagnose` calls it too, without this script's flags."""
    args = argparse.Namespace(**{**vars(parse([])), "quiet": True, **(vars(args) if args else {})})
    found: list[View] = []
    report.run("data", check_data, found, args.flags, args.index)
    if not found:
        return
    view = found[0]
    if not args.quiet:
        report.extra["documents"] = [
            {"number": d.number, "source": d.source, "line": d.line, "tokens": len(d.ids)}
            | {"supervised": sum(d.supervised), "valid": d.valid, "anchors": len(d.anchors)}
            for d in view.documents
        ]
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        show(report, view, args.documents, colour)
    report.run("positions", check_positions, view)
    report.run("headers", check_headers, view)
    report.run("supervised", check_turns, view)
    report.run("end of turn", check_end_of_turn, view)
    report.run("anchors", check_anchors, view)
    report.run("coverage", check_coverage, view)
    report.run("text", check_text, view)
    report.run("fill", check_fill, view)
    report.run("mask token", check_mask_token, view)
    if args.png:
        report.run("picture", picture, view, args.png)


def picture(view: View, path: str) -> Finding:
    try:
        draw(view, path)
    except ImportError as error:
        return skip(f"{path} was not drawn: {error}", "pip install matplotlib")
    except OSError as error:
        return fail(f"{path}: {error.strerror}", view.run.again("--png", "batch.png"))
    return ok(f"drawn in {path}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("diagnose.batch", __doc__)
    add_arguments(parser)
    parser.add_argument("--index", type=int, default=0, help="which batch of the run, from 0")
    parser.add_argument("--documents", type=int, default=6, help="documents to show, 0 for all")
    parser.add_argument("--png", type=writable, metavar="FILE", help="also draw the batch there")
    args, args.flags = parser.parse_known_args(argv)
    if args.index < 0 or args.documents < 0:
        parser.error("--index and --documents must be at least 0")
    if args.flags:
        try:
            Run.configure(args.flags)
        except ValueError as error:
            parser.refuse(error)
    args.quiet = False
    return args


def main(argv: list[str] | None = None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    args = parse(argv)
    report = Report("batch", args)
    try:
        checks(report, args)
        return report.finish()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


if __name__ == "__main__":
    sys.exit(main())
