"""Who attends to whom: is the drafter's attention mask the rule, and what does it look like?

    python -m diagnose.mask [--png FILE] [--json FILE] [--strict]
    python -m diagnose.mask --window 40 --block-size 16          # the example with a sliding window, B 16
    python -m diagnose.mask --target DIR --data FILE...          # any train.py flags: a batch of that run

Draws the block mask of a small batch and proves model.py's masks (dense_mask, and block_mask's tiles) equal
to an oracle written with loops from the rule (arXiv 2602.06036): a slot sees the context of its own document
strictly before its anchor and all slots of its own block; with a window of W tokens only the context from
position anchor+slot-(W-1) on, and the block causally. On a GPU compiled flex_attention is compared with
dense fp32 attention too, gradients included. For a run's batch --token-budget is 768 and --anchors 64 unless
given.

Shape letters: T packed context tokens, A anchors, B block size, S = A*B block slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import sys
from pathlib import Path

if not __package__:  # python diagnose/mask.py: same imports as python -m diagnose.mask
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch

import data
import model
from diagnose.report import Finding, Parser, Report, add_arguments, fail, ok, set_aside, skip, warn, writable

BLOCK_SIZES = (8, 10, 16)
WINDOWS = (0, 5, 150)  # none, shorter than a block, longer than a tile
LARGEST = 4096  # tokens, and slots, of a batch that is drawn and checked pair by pair
FIX = set_aside("model.py", "sees, dense_mask, block_mask or make_blocks")


@dataclasses.dataclass
class Case:
    """One batch under one block size and window. Lists, since the oracle reads them element by element."""

    name: str
    doc_T: list[int]  # -1 on padding
    position_T: list[int]
    anchor_A: list[int]  # packed index, -1 in an unused slot
    block_size: int
    window: int = 0

    @property
    def context(self) -> int:
        return len(self.doc_T)

    @property
    def slots(self) -> int:
        return len(self.anchor_A) * self.block_size

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.name}, B {self.block_size}{window}"

    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What model.make_blocks makes of the anchors: starts_A, ends_A."""
        doc_T, position_T = torch.tensor(self.doc_T), torch.tensor(self.position_T)
        nothing_T = torch.zeros(self.context, dtype=torch.int64)
        anchors_A = torch.tensor(self.anchor_A)
        row = (nothing_T, position_T, doc_T, nothing_T.bool(), anchors_A)
        blocks = model.make_blocks(*row, self.block_size, gamma=4.0, mask_token=0)
        return blocks.starts_A, blocks.ends_A

    def arguments(self) -> tuple:
        return *self.ranges(), self.context, self.block_size, self.window


def oracle(case: Case) -> np.ndarray:
    """bool [S, T+S]: the rule, pair by pair. Calls nothing of model.py."""
    T, B, W = case.context, case.block_size, case.window
    may = np.zeros((case.slots, T + case.slots), bool)
    for i, a in enumerate(case.anchor_A):
        for slot in range(B):
            row = may[i * B + slot]
            for t in range(T) if a >= 0 else ():
                same_document = case.doc_T[t] == case.doc_T[a]
                before = case.position_T[t] < case.position_T[a]
                near = not W or case.position_T[t] >= case.position_T[a] + slot - (W - 1)
                if same_document and before and near:
                    row[t] = True
            for other in range(B):
                if not W or other <= slot:
                    row[T + i * B + other] = True
    return may


# ---------------------------------------------------------------- batches to try


def layout(name: str, lengths: list[int], answers: list[tuple[int, int]], T: int, A: int) -> Case:
    """Documents one after another, anchors drawn by data.py from what each answer (start, end) supervises."""
    doc_T, position_T, mask_T = np.full(T, -1), np.zeros(T, int), np.zeros(T, bool)
    at = 0
    for d, (length, (start, end)) in enumerate(zip(lengths, answers, strict=True)):
        doc_T[at : at + length], position_T[at : at + length] = d, np.arange(length)
        mask_T[at + start : at + end] = True
        at += length
    anchor_A = data.draw_anchors(data.valid_anchors(mask_T, doc_T), doc_T, A, seed=0, index=0)
    return Case(name, doc_T.tolist(), position_T.tolist(), anchor_A.tolist(), 8)


def example() -> Case:
    """What is drawn: three documents and padding; some tiles are full, some anchors unused."""
    return layout("example", [290, 120, 70], [(190, 211), (40, 46), (60, 64)], T=512, A=32)


def cases() -> list[Case]:
    """Every layout under every block size and window."""
    layouts = [
        layout(
            "several documents", [170, 1, 40, 90, 60], [(20, 170), (0, 1), (0, 40), (3, 9), (58, 60)], 384, 32
        ),
        layout("unused anchors", [100, 90], [(95, 100), (0, 6)], 256, 24),
        layout("one document", [256], [(0, 256)], 256, 32),
        layout("long prompt", [384], [(260, 384)], 384, 32),
        layout("no document", [], [], 128, 16),
    ]
    tries = itertools.product(layouts, BLOCK_SIZES, WINDOWS)
    return [dataclasses.replace(case, block_size=b, window=w) for case, b, w in tries]


def real_case(flags: list[str]) -> Case:
    """The first batch of the run that these train.py flags would start, with a small token budget."""
    from diagnose.batch import Run

    run = Run.from_flags(flags, token_budget=768, anchors=64)
    batch = run.batches.train(0)
    lists = (batch.doc_T.tolist(), batch.positions_T.tolist(), batch.anchors_A.tolist())
    return Case(f"first batch of {run.c.folder.name}", *lists, run.c.block_size)


# ---------------------------------------------------------------- proofs


def place(case: Case, q: int, kv: int) -> str:
    """A pair in the reader's words."""
    a, slot = case.anchor_A[q // case.block_size], q % case.block_size
    who = f"slot {slot} of block {q // case.block_size} "
    who += f"(anchor {a}: document {case.doc_T[a]}, position {case.position_T[a]})" if a >= 0 else "(unused)"
    if kv < case.context:
        what = f"document {case.doc_T[kv]}, position {case.position_T[kv]}"
        return f"{who} and context {kv} ({what if case.doc_T[kv] >= 0 else 'padding'})"
    other = kv - case.context
    return f"{who} and slot {other % case.block_size} of block {other // case.block_size}"


def difference(case: Case, got: np.ndarray, want: np.ndarray) -> str:
    """The first pair where a mask is not the oracle; empty when they are equal."""
    if got.shape != want.shape:
        return f"{case}: the mask is {list(got.shape)}, not {list(want.shape)}"
    wrong = np.argwhere(got != want)
    if not len(wrong):
        return ""
    q, kv = map(int, wrong[0])
    verb = "must see but does not" if want[q, kv] else "sees but must not"
    return f"{case}: {len(wrong)} pairs differ from the rule; it {verb}: {place(case, q, kv)}"


def check_dense(tried: list[Case]) -> Finding:
    pairs = 0
    for case in tried:
        want = oracle_of(case)
        wrong = difference(case, model.dense_mask(*case.arguments()).numpy(), want)
        if wrong:
            return fail(wrong, FIX)
        pairs += want.size
    return ok(f"{len(tried)} cases, {pairs:,} pairs equal to the oracle{told(tried)}")


def tiles_of(mask) -> np.ndarray:
    """int [2, rows, columns]: how often each tile stands in the partial and in the full list."""
    rows, columns = (-(-n // model.TILE) for n in mask.seq_lengths)
    found = np.zeros((2, rows, columns), int)
    lists = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    for kind, (counts, indices) in enumerate(lists):
        for row in range(rows):
            for column in indices[0, 0, row, : int(counts[0, 0, row])].tolist():
                found[kind, row, column] += 1
    return found


def backward_tiles_of(mask) -> np.ndarray:
    """The same from the lists that the backward pass walks, which go by columns."""
    rows, columns = (-(-n // model.TILE) for n in mask.seq_lengths)
    found = np.zeros((2, rows, columns), int)
    lists = ((mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices))
    for kind, (counts, indices) in enumerate(lists):
        for column in range(columns):
            for row in indices[0, 0, column, : int(counts[0, 0, column])].tolist():
                found[kind, row, column] += 1
    return found


def effective(mask) -> np.ndarray:
    """bool [S, T+S]: what flex_attention lets through: full tiles whole, partial ones by their mask_mod."""
    slots, keys = mask.seq_lengths
    q, kv = torch.arange(slots)[:, None], torch.arange(keys)[None, :]
    element = mask.mask_mod(None, None, q, kv).numpy()
    partial, full = (np.kron(t > 0, np.ones((model.TILE,) * 2, bool))[:slots, :keys] for t in tiles_of(mask))
    return full | (partial & element)


def check_tiles(tried: list[Case]) -> Finding:
    """Full and partial tiles together let through what the rule allows, each once, in both directions."""
    counts, idle = np.zeros(2, int), []
    for case in tried:
        mask, want = model.block_mask(*case.arguments()), oracle_of(case)
        if tuple(mask.seq_lengths) != want.shape:
            return fail(f"{case}: the block mask is {mask.seq_lengths}, not {want.shape}", FIX)
        wrong = difference(case, effective(mask), want)
        if wrong:
            return fail(wrong, FIX)
        tiles = tiles_of(mask)
        twice = np.argwhere(tiles.sum(0) > 1)
        if len(twice):
            where = f"row {twice[0][0]}, column {twice[0][1]}"
            return fail(f"{case}: the tile at {where} is listed twice: its keys count double", FIX)
        if not np.array_equal(backward_tiles_of(mask), tiles):
            return fail(f"{case}: the lists of the backward pass hold other tiles than the forward's", FIX)
        counts += tiles.sum((1, 2))
        if not case.window and needless(case, tiles, want):
            idle.append(str(case))
    seen = f"{counts[0]} partial and {counts[1]} full tiles"
    if idle:
        return warn(f"{seen} are right, but some hold nothing to see (slow, not wrong): {idle[0]}", FIX)
    return ok(f"{len(tried)} cases, {seen} equal to the oracle, each once, backward lists too{told(tried)}")


def needless(case: Case, tiles: np.ndarray, want: np.ndarray) -> int:
    """Tiles of the context that are walked although no pair in them is allowed."""
    walked = np.argwhere(tiles.sum(0)[:, : case.context // model.TILE])
    size = model.TILE
    return sum(not want[r * size : (r + 1) * size, c * size : (c + 1) * size].any() for r, c in walked)


def told(tried: list[Case]) -> str:
    sizes = ", ".join(str(b) for b in sorted({c.block_size for c in tried}))
    windows = [str(w) for w in sorted({c.window for c in tried}) if w]
    return f" (B {sizes}{'; windows ' + ', '.join(windows) if windows else ''})"


def check_flex(case: Case, device: torch.device | None, tolerance: float = 0.03) -> Finding:
    """Compiled flex_attention under the block mask against dense fp32 attention under the oracle."""
    if device is None:
        fix = "python -m diagnose.mask  # on a machine with a GPU"
        return skip("no GPU: compiled flex_attention was not compared with dense attention", fix)
    import compile_utils

    compile_utils.use_cache()
    attend = compile_utils.compile(model.attend, name="attend", device=device.type)
    starts_A, ends_A, *sizes = case.arguments()
    mask = model.block_mask(starts_A.to(device), ends_A.to(device), *sizes)
    worst, what = attention_error(case, attend, mask, device)
    message = f"{case}: largest error {worst:.1e} ({what}), bf16 against dense fp32"
    return ok(message) if worst <= tolerance else fail(f"{message}, more than {tolerance}", FIX)


def attention_error(case: Case, attend, mask, device: torch.device) -> tuple[float, str]:
    """(largest difference relative to the largest value, of what): output and, on a GPU, gradients."""
    keys = case.context + case.slots
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    given = [draw(case.slots, 4, 64), draw(keys, 2, 64), draw(keys, 2, 64), draw(case.slots, 256)]
    dense_mask = torch.from_numpy(oracle_of(case)).to(device)
    grads = device.type == "cuda"  # flex_attention has no backward on the CPU
    results = []
    for run, its_mask, dtype in ((attend, mask, torch.bfloat16), (model.attend, dense_mask, torch.float32)):
        q, k, v, up = (t.to(torch.bfloat16).to(device, dtype) for t in given)
        leaves = [t.requires_grad_(grads) for t in (q, k, v)]
        out = run(q, k, v, its_mask)
        found = torch.autograd.grad(out, leaves, up) if grads else ()
        results.append([t.detach().float() for t in (out, *found)])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True)]
    if not all(np.isfinite(errors)):
        return float("inf"), "not finite"
    worst = int(np.argmax(errors))
    return errors[worst], ("output", "gradient of q", "gradient of k", "gradient of v")[worst]


_oracles: dict[int, tuple[Case, np.ndarray]] = {}


def oracle_of(case: Case) -> np.ndarray:
    """Each case's oracle once."""
    if id(case) not in _oracles:
        _oracles[id(case)] = (case, oracle(case))
    return _oracles[id(case)][1]


# ---------------------------------------------------------------- pictures


def character_picture(case: Case, width: int = 100) -> list[str]:
    """The mask in characters: a row a block (or several), a column some keys, then its tiles."""
    may, T, B = oracle_of(case), case.context, case.block_size
    blocks = len(case.anchor_A)
    a_row = -(-blocks // 40)  # blocks of a row
    own = range(0, blocks, -(-blocks // 24))
    a_column = -(-T // (width - 27 - len(own)))
    context = range(0, T, a_column)
    keys = [slice(t, min(T, t + a_column)) for t in context]
    keys += [slice(T + b * B, min(T + case.slots, T + (b + own.step) * B)) for b in own]
    lines = [f"{case}: T {T} context tokens, A {blocks} blocks, S {case.slots} slots"]
    strip = "".join("-" if case.doc_T[t] < 0 else str(case.doc_T[t] % 10) for t in context)
    lines.append(f"{'document':>24} |{strip}|{'blocks':^{len(own)}}")
    for first in range(0, blocks, a_row):
        rows = may[first * B : (first + a_row) * B]
        marks = "".join(".+#"[int(rows[:, k].any()) + int(rows[:, k].all())] for k in keys)
        a = case.anchor_A[first]
        name = f"document {case.doc_T[a]} position {case.position_T[a]}" if a >= 0 else "unused"
        lines.append(f"{name:>24} |{marks[: len(context)]}|{marks[len(context) :]}")
    lines.append(
        f"legend: . sees nothing  + some  # all; {a_row} block(s) a row, {a_column} tokens a column,"
    )
    lines.append(f"        {own.step} block(s) a column on the right; - padding")
    return lines + tile_picture(case)


def tile_picture(case: Case, most: int = 40) -> list[str]:
    tiles = tiles_of(model.block_mask(*case.arguments()))
    count, size = tiles.sum((1, 2)), model.TILE
    left = f"{tiles[0].size - count.sum()} of {tiles[0].size} left out"
    lines = [f"tiles of {size} slots x {size} keys: {count[0]} partial (P), {count[1]} full (F), {left}"]
    columns = case.context // size
    for row in range(min(most, tiles.shape[1])):
        marks = ["F" if f else "P" if p else "." for p, f in zip(*tiles[:, row].tolist(), strict=True)]
        text = f"{' '.join(marks[:columns])} | {' '.join(marks[columns:])}"
        lines.append(f"{f'slots {row * size} to {min((row + 1) * size, case.slots) - 1}':>24} | {text}"[:100])
    return lines


def draw(case: Case, path: str) -> None:
    """A pair a pixel, coloured by document; tiles outlined; each anchor's own token marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    may, T, B = oracle_of(case), case.context, case.block_size
    figure, axis = plt.subplots(figsize=(14, 7.6), layout="constrained")
    axis.imshow(
        colours(case, may),
        extent=(0, T + case.slots, case.slots, 0),
        aspect="auto",
        interpolation="nearest" if case.slots <= 1024 else "antialiased",
    )
    draw_tiles(axis, case)
    label_documents(axis, case)
    real = [(a + 0.5, (i + 0.5) * B) for i, a in enumerate(case.anchor_A) if a >= 0]
    (marks,) = axis.plot(*zip(*real, strict=True), "k.", ms=3) if real else axis.plot([], [], "k.", ms=3)
    axis.axvline(T, color="black", lw=2)
    axis.set(xlim=(0, T + case.slots), ylim=(case.slots, 0))
    axis.set_xlabel(f"keys: {T} context tokens (packed index), then {case.slots} block slots")
    axis.set_ylabel(f"queries: {len(case.anchor_A)} blocks of {B} slots, by anchor")
    every = max(1, -(-len(case.anchor_A) // 40))
    shown = range(0, len(case.anchor_A), every)
    axis.set_yticks([(i + 0.5) * B for i in shown], [anchor_name(case, i) for i in shown], fontsize=7)
    handles = [
        Patch(facecolor=document_colour(0), label="sees this context token (colour: document)"),
        Patch(facecolor=OWN, label="sees this slot of its own block"),
        Patch(facecolor=PADDING, label="padding: seen by none"),
        Patch(facecolor="none", edgecolor=FULL, hatch="//", lw=2, label="full tile (no element mask)"),
        Patch(facecolor="none", edgecolor=PARTIAL, lw=1.5, label="partial tile (masked by element)"),
        (marks, "the anchor's own token: not seen, only what is before it"),
    ]
    marks.set_label(handles.pop()[1])
    figure.legend(handles=[*handles, marks], loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    axis.set_title(f"drafter attention mask: {case}", pad=24)
    beside = f"{path}.{os.getpid()}.tmp"
    figure.savefig(beside, dpi=120, format="png")
    plt.close(figure)
    os.replace(beside, path)


OWN, PADDING, FULL, PARTIAL = "#303030", "#e4e4e4", "#006d2c", "#d95f02"


def document_colour(d: int) -> str:
    return ("#6baed6", "#fdd0a2", "#a1d99b", "#bcbddc", "#fa9fb5", "#9edae5", "#dbdb8d")[d % 7]


def anchor_name(case: Case, i: int) -> str:
    a = case.anchor_A[i]
    return f"d{case.doc_T[a]} p{case.position_T[a]}" if a >= 0 else "unused"


def colours(case: Case, may: np.ndarray) -> np.ndarray:
    from matplotlib.colors import to_rgb

    image = np.ones((*may.shape, 3), np.float32)
    column_T = [to_rgb(document_colour(d)) if d >= 0 else to_rgb(PADDING) for d in case.doc_T]
    image[:, : case.context] = np.where(may[:, : case.context, None], np.array(column_T)[None], 1.0)
    padding_T = np.array(case.doc_T) < 0
    image[:, : case.context][:, padding_T] = to_rgb(PADDING)
    image[:, case.context :][may[:, case.context :]] = to_rgb(OWN)
    return image


def draw_tiles(axis, case: Case) -> None:
    from matplotlib.patches import Rectangle

    tiles, size = tiles_of(model.block_mask(*case.arguments())), model.TILE
    for kind, row, column in np.argwhere(tiles).tolist():
        corner = (column * size, row * size)
        wide = min(size, case.context + case.slots - corner[0])
        high = min(size, case.slots - corner[1])
        style = {"edgecolor": FULL, "hatch": "//", "lw": 2.5, "zorder": 4} if kind else {"edgecolor": PARTIAL}
        axis.add_patch(Rectangle(corner, wide, high, fill=False, **({"lw": 1.5, "zorder": 3} | style)))


def label_documents(axis, case: Case) -> None:
    """A strip above the picture: which columns are which document."""
    at = 0
    for d, run in itertools.groupby(case.doc_T):
        length = len(list(run))
        colour = document_colour(d) if d >= 0 else PADDING
        axis.plot([at, at + length], [1.012, 1.012], transform=axis.get_xaxis_transform(), color=colour, lw=7)
        axis.lines[-1].set(clip_on=False, solid_capstyle="butt")
        name = f"document {d}" if length > 0.08 * (case.context + case.slots) else f"d{d}"
        if length > 0.02 * (case.context + case.slots):
            text = name if d >= 0 else "padding"
            where = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 8}
            axis.text(at + length / 2, 1.022, text, **where)
        at += length
    middle = (case.context + case.slots / 2, 1.022)
    axis.text(*middle, "slots of the blocks", transform=axis.get_xaxis_transform(), ha="center", fontsize=8)


# ---------------------------------------------------------------- all of it


def checks(report: Report, args: argparse.Namespace | None = None) -> None:
    """Every check of this script; `python -m diagnose` calls it too, without this script's flags."""
    drawn = getattr(args, "case", None)
    tried = cases() + ([drawn] if drawn else [])
    report.run("dense mask", check_dense, tried)
    report.run("block mask", check_tiles, tried)
    device = torch.device("cuda") if torch.cuda.is_available() else None
    report.run("flex", check_flex, dataclasses.replace(example(), block_size=16), device)
    _oracles.clear()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("diagnose.mask", __doc__)
    add_arguments(parser)
    parser.add_argument("--png", type=writable, metavar="FILE", help="also draw the mask there")
    parser.add_argument("--block-size", type=int, default=0, help="tokens of a block, B (8, or train.py's)")
    parser.add_argument("--window", type=int, default=0, help="sliding window of the picture, 0 for none")
    args, flags = parser.parse_known_args(argv)
    if args.block_size < 0 or args.block_size == 1 or args.window < 0:
        parser.error("--block-size must be at least 2 and --window at least 0")
    try:
        args.case = choose_case(args, flags)
    except ValueError as error:
        parser.refuse(error)
    return args


def choose_case(args: argparse.Namespace, flags: list[str]) -> Case:
    """The batch to draw: the example, or a small one of the run that the other flags describe."""
    if flags:
        case = real_case([*flags, *(["--block-size", str(args.block_size)] if args.block_size else [])])
    else:
        case = dataclasses.replace(example(), block_size=args.block_size or 8)
    if case.context > LARGEST or case.slots > LARGEST:
        raise ValueError(
            f"{case.context} tokens and {case.slots} slots are too many to draw pair by pair: give at most "
            f"--token-budget {LARGEST} and --anchors {LARGEST // case.block_size}"
        )
    return dataclasses.replace(case, window=args.window)


def main(argv: list[str] | None = None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    args = parse(argv)
    report = Report("mask", args)
    try:
        report.run("picture", picture, report, args)
        checks(report, args)
        return report.finish()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def picture(report: Report, args: argparse.Namespace) -> Finding:
    for line in character_picture(args.case):
        report.say(line)
    if not args.png:
        return ok("drawn above; --png FILE draws every pair")
    try:
        draw(args.case, args.png)
    except ImportError as error:
        return skip(f"{args.png} was not drawn: {error}", "pip install matplotlib")
    except OSError as error:
        return fail(f"{args.png}: {error.strerror}", "python -m diagnose.mask --png mask.png")
    return ok(f"drawn above and in {args.png}")


if __name__ == "__main__":
    sys.exit(main())
