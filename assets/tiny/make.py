"""Make the built-in target: its text, tokenizer, weights and its own greedy answers.

    python assets/tiny/make.py --device cuda     # minutes on a GPU
    python assets/tiny/make.py                   # the same at a small scale: a quarter of an hour on 2 cores

Writes config.json, model.safetensors, tokenizer.model, tokenizer_config.json, train.jsonl and eval.jsonl
beside this file (or into --out). Answers depend on the prompt in wording, order, names and numbers, so that a
drafter needs the target's features; made-up names and short pieces keep the first piece of a word from giving
the rest away. While training, small heads also predict the tokens 2 to 8 ahead from the last tapped layer (as
multi-token prediction does in large models); they are thrown away, but the plan they ask for stays in the
hidden states, which is where a drafter finds it.

Shape letters: N rows, S tokens a row, H hidden, V vocabulary, P chosen positions.
"""

import argparse
import io
import json
import math
import random
import time
from pathlib import Path

import jinja2
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

PIECES = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "\n"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
RENDER = jinja2.Template(TEMPLATE)
SCALE = {
    "cpu": {"chats": 40_000, "steps": 1200, "batch": 20},
    "cuda": {"chats": 200_000, "steps": 2500, "batch": 128},
}
AHEAD = 7  # extra tokens the throw-away heads predict: the drafter's block of 8 less its anchor

# ------------------------------------------------------------------------------------------
# The text

THINGS = (
    "cup boat lamp stone coin book chair drum kite plum pear bell brick candle carpet basket ticket "
    "marble button feather ladder pillow bucket hammer mirror pencil ribbon saddle shovel spoon "
    "tractor violin wagon whistle biscuit cabbage lemon melon onion potato turnip walnut blanket "
    "bottle helmet kettle magnet parcel"
).split()
LOOKS = (
    "red blue green yellow purple white black grey small large heavy light old new round square "
    "wooden silver golden broken clean dusty plain striped warm cold soft shiny rare cheap"
).split()
PLACE_HEADS = "Vel Bran Os Tar Nor Hal Mon Gil Cas Fen Lud Quin".split()
PLACE_TAILS = "to wick mar den dale by ford ley burn holm".split()
NAME_HEADS = "Ma Ti Lo Ke Ru Sa Be Do Ni Va Jo Pe Ha Li".split()
NAME_MIDS = "ra lo mi ta ve du ni ko sha be".split()
NAME_TAILS = ["n", "la", "s", "ro", "ni", "", "th", "k", "rin", "do"]
VERBS = "count merge scale shift adjust update compute measure convert balance reduce extend".split()
FIELDS = "name city age score color item price owner size level team rank weight year count place".split()


def person(r: random.Random) -> str:
    return r.choice(NAME_HEADS) + r.choice(NAME_MIDS) + r.choice(NAME_TAILS)


def people(r: random.Random, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        name = person(r)
        if name not in names:
            names.append(name)
    return names


def place(r: random.Random) -> str:
    return r.choice(PLACE_HEADS) + r.choice(PLACE_TAILS)


def things(r: random.Random) -> str:
    return f"{r.choice(LOOKS)} {r.choice(THINGS)}s"


def joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def word_problem(r: random.Random) -> list[str]:
    """A stock that people add to and take from; the prompt's last sentence decides the form."""
    what, where, total = things(r), place(r), r.randint(10, 60)
    names = people(r, r.randint(3, 4))
    story = [f"{names[0]} has {total} {what} in {where}."]
    sums, events, start = [], [], total
    for name in names[1:]:
        more = r.random() < 0.6 or total < 20
        amount = r.randint(2, 30) if more else r.randint(2, total - 5)
        after = total + amount if more else total - amount
        verb = r.choice(["brings", "adds", "sends"]) if more else r.choice(["takes", "buys", "breaks"])
        sums.append(f"{total} {'+' if more else '-'} {amount} = {after}")
        events.append((name, verb, amount, after))
        story.append(f"{name} {verb} {amount}.")
        total = after
    style = r.choice(
        ["Show each step.", "Explain it in words.", "Use a list.", "Start with the result.", "Be brief."]
    )
    prompt = " ".join([*story, f"How many {what.split()[1]} are there now?", style])
    if style == "Show each step.":
        lines = [f"{n} {v} {a}: {s}" for (n, v, a, _), s in zip(events, sums, strict=True)]
        return [prompt, "\n".join([*lines, f"Answer: {total} {what} in {where}"])]
    if style == "Explain it in words.":
        lines = [f"Then {n} {v} {a}, which makes {after}." for n, v, a, after in events]
        return [
            prompt,
            " ".join([f"{names[0]} begins with {start} {what}.", *lines, f"So {where} holds {total}."]),
        ]
    if style == "Use a list.":
        lines = [f"- {n}: {s}" for (n, *_), s in zip(events, sums, strict=True)]
        return [prompt, "\n".join([f"- {names[0]}: {start}", *lines, f"- {where}: {total} {what}"])]
    if style == "Start with the result.":
        causes = joined([f"{n} {v} {a}" for n, v, a, _ in events])
        return [prompt, f"{total} {what}, because {causes} in {where}."]
    return [prompt, "; ".join(sums) + f"; {names[0]} has {total} {what}."]


def table(r: random.Random) -> list[str]:
    """Rows of the prompt as a table, in the order that the prompt asks for."""
    heads = r.sample(FIELDS, 3)
    rows = [[n, place(r), str(r.randint(2, 99))] for n in people(r, r.randint(3, 4))]
    width = r.randint(2, 3)
    columns = [0, 2] if width == 2 else r.choice([[0, 1, 2], [2, 0, 1]])
    order = r.choice(["Keep the order.", "Reverse the order.", "Put the last row first."])
    given = "; ".join(" ".join(row[c] for c in (range(3) if width == 3 else (0, 2))) for row in rows)
    shown = [heads[c] for c in columns]
    prompt = f"Make a table with {joined(shown)}: {given}. {order}"
    if order == "Reverse the order.":
        rows = rows[::-1]
    if order == "Put the last row first.":
        rows = rows[-1:] + rows[:-1]
    lines = [shown, ["-"] * width, *([row[c] for c in columns] for row in rows)]
    return [prompt, "\n".join("|" + "|".join(cells) + "|" for cells in lines)]


def as_json(r: random.Random) -> list[str]:
    """Fields of the prompt as JSON: one object, a list of pairs, or only some of the fields."""
    fields = r.sample(FIELDS, r.randint(4, 5))
    makers = [person, place, things, lambda r: r.randint(2, 999), lambda r: r.choice(LOOKS)]
    values = [r.choice(makers)(r) for _ in fields]
    given = ", ".join(f"{f} {v}" for f, v in zip(fields, values, strict=True))
    kind = r.choice(["object", "list", "without", "backwards"])
    if kind == "object":
        return [f"Write this as JSON: {given}", json.dumps(dict(zip(fields, values, strict=True)))]
    if kind == "list":
        pairs = [{f: v} for f, v in zip(fields, values, strict=True)]
        return [f"Write a JSON list of these: {given}", json.dumps(pairs)]
    if kind == "without":
        drop = r.choice(fields)
        kept = {f: v for f, v in zip(fields, values, strict=True) if f != drop}
        return [f"Write this as JSON without {drop}: {given}", json.dumps(kept)]
    back = dict(zip(fields[::-1], values[::-1], strict=True))
    return [f"Write this as JSON, last field first: {given}", json.dumps(back)]


def function(r: random.Random) -> list[str]:
    """A short function from its description."""
    name = f"{r.choice(VERBS)}_{r.choice(THINGS)}"
    x, y = r.sample([*FIELDS, "x", "y", "total", "rate"], 2)
    ops = [(r.choice(["add", "subtract", "multiply by", "divide by"]), r.choice([y, str(r.randint(2, 99))]))]
    while len(ops) < r.randint(2, 4):
        ops.append(
            (r.choice(["add", "subtract", "multiply by", "divide by"]), r.choice([y, str(r.randint(2, 99))]))
        )
    signs = {"add": "+", "subtract": "-", "multiply by": "*", "divide by": "/"}
    told = ", ".join(f"{op} {v}" for op, v in ops)
    style = r.choice(["steps", "one line", "comments"])
    prompt = f"Write {name}({x}, {y}) in {style}: {told}."
    head = f"def {name}({x}, {y}):\n"
    if style == "steps":
        return [prompt, head + "".join(f"  {x} {signs[op]}= {v}\n" for op, v in ops) + f"  return {x}"]
    if style == "comments":
        body = "".join(f"  # {op} {v}\n  {x} {signs[op]}= {v}\n" for op, v in ops)
        return [prompt, head + body + f"  return {x}"]
    value = x
    for op, v in ops:
        value = f"({value} {signs[op]} {v})"
    return [prompt, head + f"  return {value}"]


def dialogue(r: random.Random) -> list[str]:
    """Two turns about the same facts."""
    (a, b, c), where, other = people(r, 3), place(r), place(r)
    what, gift, hour, count = things(r), things(r), r.randint(1, 12), r.randint(2, 99)
    own, comes = f"{count} {what}", f"comes from {other} at {hour} with {gift}"
    told = f"{a} keeps {own} in {where}. {b} {comes}."
    firsts = {
        "Say it the other way round.": f"{b} {comes}. In {where} {a} keeps {own}.",
        f"Tell {c} politely.": f"Dear {c}, may I say that {a} has {own} in {where}? {b} will bring {gift}.",
        "Who has what?": f"{a} has {own} and {b} has {gift}.",
        "Where are they from?": f"{a} is in {where} and {b} is from {other}.",
        f"Write a note to {c}.": f"{c}, meet {b} of {other} at {hour}: {gift} for {own}. Yours, {a}",
    }
    more = things(r)
    seconds = {
        f"What does {a} keep?": f"{a} keeps {own} in {where}.",
        f"When does {b} come?": f"{b} comes at {hour}, from {other}, with {gift}.",
        f"Now {c} comes too, with {more}.": f"Then {b} has {gift}, {c} has {more} and {a} has {what}.",
        "Swap the two places.": f"{a} keeps {own} in {other}. {b} {comes.replace(other, where)}.",
        "Swap the two people.": f"{b} keeps {own} in {where}. {a} {comes}.",
    }
    (first, answer), (second, reply) = r.choice(list(firsts.items())), r.choice(list(seconds.items()))
    return [f"{told} {first}", answer, second, reply]


def listing(r: random.Random) -> list[str]:
    """A list copied, turned round, numbered or told with its owners."""
    items = [things(r) for _ in range(r.randint(4, 6))]
    task = r.choice(["Number", "Reverse", "Rotate", "Assign", "Count"])
    if task == "Number":
        start = r.randint(1, 4)
        answer = "\n".join(f"{i}. {item}" for i, item in enumerate(items, start))
        return [f"Number from {start}: {', '.join(items)}", answer]
    if task == "Reverse":
        return [f"Reverse this list: {', '.join(items)}", ", ".join(items[::-1])]
    if task == "Rotate":
        return [f"Move the first to the end: {', '.join(items)}", ", ".join([*items[1:], items[0]])]
    if task == "Assign":
        names = people(r, 4)
        answer = ". ".join(f"{n} gets the {i}" for n, i in zip(names, items, strict=False)) + "."
        return [f"Give {', '.join(items[:4])} to {', '.join(names)}, in this order.", answer]
    numbers = [r.randint(2, 99) for _ in items]
    given = ", ".join(f"{n} {i}" for n, i in zip(numbers, items, strict=True))
    return [
        f"Make an inventory: {given}",
        "\n".join(f"{i}: {n}" for n, i in zip(numbers, items, strict=True)),
    ]


KINDS = {
    "word_problem": word_problem,
    "table": table,
    "json": as_json,
    "function": function,
    "dialogue": dialogue,
    "list": listing,
}


def write_chats(count: int, seed: int) -> list[tuple[str, list[dict]]]:
    """`count` chats as (kind, messages), kinds in turn, from the seed alone."""
    r = random.Random(seed)
    chats = []
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        turns = KINDS[kind](r)
        roles = ["user", "assistant"] * (len(turns) // 2)
        chats.append((kind, [{"role": a, "content": t} for a, t in zip(roles, turns, strict=True)]))
    return chats


# ------------------------------------------------------------------------------------------
# The tokenizer


def train_tokenizer(chats: list, out: Path, vocab: int) -> sentencepiece.SentencePieceProcessor:
    """Short pieces, digits alone, bytes as fallback; newlines and runs of blanks survive a round trip."""
    lines = (line for _, messages in chats for m in messages for line in m["content"].split("\n"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=vocab,
        model_type="bpe",
        max_sentencepiece_length=6,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=PIECES,
        control_symbols=["<mask>"],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        num_threads=1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (out / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *PIECES[:4]]
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "additional_special_tokens": PIECES[:3],
        "added_tokens_decoder": {
            str(tokenizer.piece_to_id(p)): {"content": p, "special": True, "normalized": False}
            for p in special
        },
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def pack_rows(chats: list, tokenizer, row: int) -> torch.Tensor:
    """Whole chats in rows, int16 [rows, 4, row]: token, position, document (-1 is padding), supervised."""
    texts = [RENDER.render(messages=messages) for _, messages in chats]
    start, end = tokenizer.piece_to_id("<|assistant|>"), tokenizer.piece_to_id("<|end|>")
    rows, current, used, document = [], None, row, 0
    for ids in tokenizer.encode(texts, num_threads=torch.get_num_threads()):
        if len(ids) > row:
            raise SystemExit(f"a chat of {len(ids)} tokens does not fit in --row {row}")
        if used + len(ids) > row:
            current = torch.zeros(4, row, dtype=torch.int16)
            current[2] = -1
            rows.append(current)
            used, document = 0, 0
        inside, since, mask = False, 0, []
        for token in ids:  # supervised: after "<|assistant|>\n" up to and with its "<|end|>"
            mask.append(inside and since >= 1)
            since += 1
            if token == start:
                inside, since = True, 0
            elif token == end:
                inside = False
        span = slice(used, used + len(ids))
        current[0, span] = torch.tensor(ids, dtype=torch.int16)
        current[1, span] = torch.arange(len(ids), dtype=torch.int16)
        current[2, span] = document
        current[3, span] = torch.tensor(mask, dtype=torch.int16)
        used, document = used + len(ids), document + 1
    return torch.stack(rows)


# ------------------------------------------------------------------------------------------
# The model


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Layer(nn.Module):
    """One Llama layer; module names are Hugging Face's."""

    def __init__(self, c: dict):
        super().__init__()
        h, i, self.head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        heads, kv = c["num_attention_heads"] * self.head, c["num_key_value_heads"] * self.head
        self.self_attn = nn.ModuleDict(
            {"q_proj": nn.Linear(h, heads, bias=False), "k_proj": nn.Linear(h, kv, bias=False),
             "v_proj": nn.Linear(h, kv, bias=False), "o_proj": nn.Linear(heads, h, bias=False)}
        )  # fmt: skip
        self.mlp = nn.ModuleDict(
            {"gate_proj": nn.Linear(h, i, bias=False), "up_proj": nn.Linear(h, i, bias=False),
             "down_proj": nn.Linear(i, h, bias=False)}
        )  # fmt: skip
        self.input_layernorm = nn.RMSNorm(h, eps=c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(h, eps=c["rms_norm_eps"])

    def forward(self, x_NSH, cos, sin, mask, cache=None, at=None):
        """`cache`: (keys, values), written at index `at` [N, S] of every row, then seen under `mask`."""
        n, s, _ = x_NSH.shape
        y = self.input_layernorm(x_NSH)
        q, k, v = (self.self_attn[p](y).view(n, s, -1, self.head) for p in ("q_proj", "k_proj", "v_proj"))
        q, k = rotate(q, cos.to(q.dtype), sin.to(q.dtype)), rotate(k, cos.to(q.dtype), sin.to(q.dtype))
        if cache is not None:
            rows = torch.arange(n, device=x_NSH.device)[:, None]
            cache[0][rows, at], cache[1][rows, at] = k, v
            k, v = cache
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if s == 1:  # decoding: the heads of a group are the queries of one product, nothing is copied
            o = F.scaled_dot_product_attention(q.view(n, k.shape[1], -1, self.head), k, v, attn_mask=mask)
            o = o.reshape(q.shape)
        else:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x_NSH = x_NSH + self.self_attn["o_proj"](o.transpose(1, 2).reshape(n, s, -1))
        y = self.post_attention_layernorm(x_NSH)
        return x_NSH + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Llama(nn.Module):
    """A decoder with a tied head; returns the output of the last layer but one and of the final norm."""

    def __init__(self, c: dict):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        half = c["head_dim"] // 2
        angles = torch.outer(
            torch.arange(c["max_position_embeddings"]).float(),
            c["rope_theta"] ** (-torch.arange(half) / half),
        )
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.06 / (math.sqrt(2 * len(self.layers)) if deep else 1))

    def forward(self, tokens_NS, positions_NS, mask, caches=None, at=None):
        x = self.embed_tokens(tokens_NS)
        cos, sin = self.cos[positions_NS][:, :, None], self.sin[positions_NS][:, :, None]
        tapped = x
        for i, layer in enumerate(self.layers):
            tapped = x
            x = layer(x, cos, sin, mask, None if caches is None else caches[i], at)
        return tapped, self.norm(x)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.embed_tokens.weight)


def model_config(args: argparse.Namespace, tokenizer) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size(),
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": tokenizer.piece_to_id("<|end|>"),
        "pad_token_id": 0,
        "initializer_range": 0.06,
        "torch_dtype": "bfloat16",
    }


# ------------------------------------------------------------------------------------------
# The training


def step_loss(
    model: Llama, ahead: nn.ModuleList, rows: torch.Tensor, weight: float
) -> tuple[torch.Tensor, ...]:
    """Cross-entropy of the supervised next tokens, and of the 7 after them at an eighth of the positions."""
    tokens, positions, document, supervised = rows.long().unbind(1)
    n, s = tokens.shape
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    tapped, x = model(tokens, positions, mask)
    shifted = F.pad(tokens, (0, AHEAD + 1))
    labels = torch.where(F.pad(supervised, (0, AHEAD + 1)) > 0, shifted, -100)
    owner = F.pad(document, (0, AHEAD + 1), value=-1)
    flat = lambda t: t.reshape(n * s, *t.shape[2:])  # noqa: E731
    where = flat(labels[:, 1 : s + 1]).ge(0).nonzero()[:, 0]
    loss = F.cross_entropy(model.head(flat(x)[where]).float(), flat(labels[:, 1 : s + 1])[where])
    some = where[torch.randperm(len(where), device=where.device)[: len(where) // 8]]
    total = loss
    for k, project in enumerate(ahead, start=2):
        same = flat(owner[:, k : s + k]) == flat(document)
        label_P = torch.where(same, flat(labels[:, k : s + k]), -100)[some]
        logits_PV = model.head(project(F.rms_norm(flat(tapped)[some], (tapped.shape[-1],)))).float()
        total = total + weight * 0.85 ** (k - 2) / AHEAD * F.cross_entropy(
            logits_PV, label_P, ignore_index=-100
        )
    return total, loss


def train(model: Llama, rows: torch.Tensor, args: argparse.Namespace) -> None:
    h = model.config["hidden_size"]
    ahead = nn.ModuleList(nn.Linear(h, h, bias=False) for _ in range(AHEAD)).to(args.device)
    for project in ahead:
        nn.init.eye_(project.weight)
    matrices = [p for p in [*model.parameters(), *ahead.parameters()] if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    # Muon learns to copy in far fewer tokens than AdamW does; embeddings and norms stay with AdamW
    inner = [p for p in matrices if p is not model.embed_tokens.weight]
    others = [model.embed_tokens.weight, *norms]
    optimizers = [
        torch.optim.Muon(inner, lr=args.lr * 5, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    full = [group["lr"] for o in optimizers for group in o.param_groups]
    began, limit = time.time(), args.minutes * 60
    step, done = 0, 0.0
    order = torch.empty(0, dtype=torch.long)
    while done < 1:
        if len(order) < args.batch:
            order = torch.randperm(len(rows))
        index, order = order[: args.batch], order[args.batch :]
        done = max((step + 1) / args.steps, (time.time() - began) / limit if limit else 0)
        rate = min(1, (step + 1) / 50) * min(1, max(0.01, 1.6 * (1 - done)))
        for lr, group in zip(full, (group for o in optimizers for group in o.param_groups), strict=True):
            group["lr"] = lr * rate
        with torch.autocast(args.device, torch.bfloat16):
            total, loss = step_loss(model, ahead, rows[index.to(rows.device)], args.ahead)
        total.backward()
        nn.utils.clip_grad_norm_([*inner, *others], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 100 == 0 or done >= 1:
            speed = step * args.batch * args.row / (time.time() - began) / 1e3
            parts = f"loss {loss.item():.4f} | with ahead {total.item():.4f} | {speed:.0f} Ktok/s"
            print(f"step {step} | {parts}", flush=True)


# ------------------------------------------------------------------------------------------
# The answers


@torch.no_grad()
def answer(model: Llama, prompts: list[list[int]], limit: int, end: int) -> list[list[int]]:
    """Greedy answers in one batch, end of turn included; rows of different length, one cache index a row."""
    c, device = model.config, model.cos.device
    n, longest = len(prompts), max(map(len, prompts))
    size = min(longest + limit, c["max_position_embeddings"])
    shape = (n, size, c["num_key_value_heads"], c["head_dim"])
    caches = [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in model.layers]
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    last = torch.tensor([len(p) - 1 for p in prompts], device=device)
    at, slots = torch.arange(longest, device=device).expand(n, -1), torch.arange(size, device=device)
    _, x = model(tokens, at, (slots <= at[:, :, None])[:, None], caches, at)
    token = model.head(x[torch.arange(n, device=device), last]).argmax(-1)
    said = [token]
    open_ = token != end
    while open_.any() and longest + len(said) < size:
        at = (last + len(said))[:, None]  # overwrites the padding that the first pass left in the cache
        _, x = model(token[:, None], at, (slots <= at[:, :, None])[:, None], caches, at)
        token = model.head(x[:, 0]).argmax(-1)
        said.append(token)
        open_ &= token != end
    answers = []
    for row in torch.stack(said, 1).tolist():
        answers.append(row[: row.index(end) + 1] if end in row else row)
    return answers


@torch.no_grad()
def sure(model: Llama, ids: list[int], spans: list[tuple[int, int]], gap: float = 1e-3) -> bool:
    """Whether a plain forward gives the same greedy tokens, none so near a tie that rounding decides."""
    at = torch.arange(len(ids), device=model.cos.device)[None]
    _, x = model(torch.tensor([ids], device=at.device), at, (at <= at[0, :, None])[None])
    best, token = model.head(x[0]).topk(2, dim=-1)
    wide = ((best[:, 0] - best[:, 1]) > gap).tolist()
    told = token[:, 0].tolist()
    return all(told[p - 1] == ids[p] and wide[p - 1] for a, b in spans for p in range(a, b))


def answer_chats(model: Llama, tokenizer, chats: list, args: argparse.Namespace) -> list[dict]:
    """Replace every answer by the model's own; chats that end early or read back differently are dropped."""
    end = tokenizer.piece_to_id("<|end|>")
    lines = [(kind, [m["content"] for m in messages[::2]], messages[1::2]) for kind, messages in chats]
    lines.sort(key=lambda line: (len(line[1]), len(line[2][0]["content"])))  # a batch ends about together
    kept, right, written = [], 0, 0
    for start in range(0, len(lines), 256):
        group = [(kind, questions, wanted, [], []) for kind, questions, wanted in lines[start : start + 256]]
        for turn in range(max(len(questions) for _, questions, *_ in group)):
            active = [g for g in group if len(g[1]) > turn and len(g[3]) == 2 * turn]
            if not active:
                break
            for _, questions, _, messages, _ in active:
                messages.append({"role": "user", "content": questions[turn]})
            texts = [RENDER.render(messages=g[3], add_generation_prompt=True) for g in active]
            prompts = tokenizer.encode(texts)
            for g, prompt, ids in zip(active, prompts, answer(model, prompts, 160, end), strict=True):
                text = tokenizer.decode(ids[:-1])
                if ids[-1] == end and len(ids) > 1 and text.strip() and "<" not in text:
                    g[3].append({"role": "assistant", "content": text})
                    g[4].append((len(prompt), prompt + ids))
        for kind, questions, wanted, messages, spans in group:
            if len(messages) < 2 * len(questions):
                continue
            ids = tokenizer.encode(RENDER.render(messages=messages))
            same = all(ids[: len(told)] == told for _, told in spans)
            if same and sure(model, ids, [(a, len(told)) for a, told in spans]):
                kept.append({"source": kind, "messages": messages})
                written += len(wanted)
                right += sum(m == w for m, w in zip(messages[1::2], wanted, strict=True))
    print(f"{len(kept)} of {len(chats)} chats kept; {right} of {written} answers as written")
    return kept


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path(__file__).parent)
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--chats", type=int, help="chats to train on (default by device, as --steps, --batch)")
    p.add_argument("--steps", type=int, help="0: answer with the model that is in --out")
    p.add_argument(
        "--minutes", type=float, default=0, help="end training after this time (0: by steps alone)"
    )
    p.add_argument("--batch", type=int, help="rows a step")
    p.add_argument("--row", type=int, default=192, help="tokens a row")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--ahead", type=float, default=1.0, help="weight of the throw-away heads")
    p.add_argument("--vocab", type=int, default=1024)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--intermediate", type=int, default=256)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--answers", type=int, default=2800, help="lines asked for train.jsonl")
    p.add_argument("--held-out", type=int, default=150, help="lines of eval.jsonl")
    args = p.parse_args()
    for name, value in SCALE[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def make_model(args: argparse.Namespace) -> None:
    """Tokenizer, weights and config into --out."""
    chats = write_chats(args.chats, args.seed)
    tokenizer = train_tokenizer(chats[:12_000], args.out, args.vocab)
    rows = pack_rows(chats, tokenizer, args.row).to(args.device)
    model = Llama(model_config(args, tokenizer)).to(args.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {len(chats)} chats in {len(rows)} rows, {(rows[:, 2] >= 0).sum():,} tokens")
    train(model, rows, args)
    weights = {"model." + name: p.detach().bfloat16().cpu() for name, p in model.named_parameters()}
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    (args.out / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU here; leave the flag out")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.steps:
        make_model(args)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(args.out / "tokenizer.model"))
    model = Llama(json.loads((args.out / "config.json").read_text())).to(args.device)
    weights = load_file(args.out / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    for name, count, seed in (("train", args.answers, 1_000_003), ("eval", args.held_out, 2_000_003)):
        asked = write_chats(int(count * 1.12), args.seed + seed)
        lines = answer_chats(model, tokenizer, asked, args)
        if not lines:
            raise SystemExit("no answer reached its end of turn: train longer (--steps)")
        random.Random(args.seed).shuffle(lines)
        text = "".join(json.dumps(line) + "\n" for line in lines[:count])
        (args.out / f"{name}.jsonl").write_text(text)
        print(f"{name}.jsonl: {min(count, len(lines))} lines, {len(text) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
