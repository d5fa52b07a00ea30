"""Files and command lines from strangers, mutated: each is refused in one line, or skipped and counted.

    pytest tests/test_fuzz.py
    FUZZ_SEED=123 FUZZ_TIMES=20 pytest tests/test_fuzz.py      # other inputs, twenty times as many

A case is fixed by (seed, kind, number); a failure names it. For every case the oracle demands: only the
agreed type of exception; one line that names the place and says what to do; no hang; no big allocation;
nothing written; and of what is accepted, that it means what the file says.
"""

import contextlib
import copy
import dataclasses
import faulthandler
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file

import checkpoint
import compile_utils
import data
import decode
import generate
import model
import stream
import train

ROOT = Path(__file__).resolve().parent.parent
SEED = int(os.environ.get("FUZZ_SEED", "7"))
TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
LIMIT_S = 10.0  # of a case
LIMIT_BYTES = 1 << 30  # address space a case may add
LONGEST = 700  # characters of a message
FIX = re.compile(
    r"\b(fetch|copy|give|use|correct|delete|choose|save|resume|start|export|check|leave|raise|read|do not|"
    r"make|see|chmod|free|unset|put|run|must (not )?be)\b",
    re.I,
)
RAW = re.compile(
    r"\b\w+(Error|Exception)\(|Traceback|<class|object at 0x|\bnot subscriptable|unsupported operand"
)
DEEP = 200_000  # nested brackets
HOSTILE = [
    None, True, False, "", "x", "7", -1, 0, 1, 3, 2.5, -2.5, 1e-300, 1e308, math.inf, -math.inf, math.nan,
    10**9, 2**31, 2**63, 10**30, 10**400, [], [1], [None], [[1]], {}, {"a": 1}, "\ud800", "a" * 5000,
    "two\nlines", "\0", "../../x", [0] * 5000,
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# The oracle


class Hang(BaseException):
    """A case took longer than LIMIT_S."""


@dataclasses.dataclass
class Attempt:
    """What to try on a mutated input, and what may come of it."""

    call: Callable[[], object]
    named: tuple[str, ...]  # the message holds one of these: the file, the folder or the flag
    what: str  # the mutation, for the failure's text
    agreed: tuple[type, ...] = (ValueError,)
    must_refuse: bool = False
    accepted: Callable[[object], None] = lambda value: None  # asserts that what was accepted is meant


@contextlib.contextmanager
def limits():
    """A case ends in LIMIT_S seconds and may not take more than LIMIT_BYTES."""

    def hang(*_):
        raise Hang

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, hang)
    faulthandler.dump_traceback_later(6 * LIMIT_S, exit=True)  # where no Python code runs any more
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and time of change."""
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


def complaint(error: BaseException, attempt: Attempt) -> str:
    """What is wrong with how an input was refused; empty if nothing."""
    text = str(error)
    if not isinstance(error, attempt.agreed):
        return f"{type(error).__name__} instead of {attempt.agreed[0].__name__}: {text[:300]}"
    faults = {
        "more than one line": len(text.splitlines()) != 1,
        "too long": len(text) > LONGEST,
        "does not name the place": not any(name in text for name in attempt.named),
        "is Python's own text": RAW.search(text) is not None,
        "no fix": FIX.search(text) is None,
        "unprintable": not text.isprintable(),
    }
    wrong = [name for name, is_so in faults.items() if is_so]
    return f"{', '.join(wrong)}: {text[:900]!r}" if wrong else ""


def judge(attempt: Attempt, folder: Path) -> tuple[str, str]:
    """(refused or accepted, what is wrong) of one case."""
    before = snapshot(folder)
    try:
        with limits():
            value = attempt.call()
    except (KeyboardInterrupt, pytest.fail.Exception):
        raise
    except BaseException as error:
        outcome, wrong = "refused", complaint(error, attempt)
    else:
        outcome, wrong = "accepted", "must be refused" if attempt.must_refuse else ""
        try:
            attempt.accepted(value)
        except AssertionError as error:
            wrong = f"accepted, but {error}"
    if outcome == "refused" and snapshot(folder) != before:
        wrong += f" wrote {sorted(snapshot(folder).items() ^ before.items())[:3]}"
    return outcome, wrong


KINDS: dict[str, tuple[int, Callable]] = {}


def kind(cases: int):
    """A function (rng, folder, base) that makes one Attempt; `cases` of them are tried."""

    def register(function):
        KINDS[function.__name__] = cases, function
        return function

    return register


# ---------------------------------------------------------------------------------------------------------
# Mutations


def places(value, at=()) -> list[tuple]:
    """The paths of all fields of a JSON value, the root's own left out."""
    found = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += [(*at, key), *places(inner, (*at, key))]
    return found


def mutate_json(rng: random.Random, value, only: tuple = ()) -> tuple[object, tuple, str]:
    """(a copy with one field changed, the field's path, what was done)."""
    value = copy.deepcopy(value)
    path = rng.choice([p for p in places(value) if not only or p[0] in only])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.15:
        del holder[path[-1]]
        return value, path, f"{path} left out"
    new = rng.choice([h for h in HOSTILE])
    holder[path[-1]] = new
    return value, path, f"{path} = {repr(new)[:40]}"


def mutate_bytes(rng: random.Random, path: Path) -> str:
    """Damage a file in place, as disks, downloads and editors do; returns how."""
    raw = path.read_bytes()
    at = rng.randrange(max(1, len(raw)))
    size = rng.randrange(1, 64)
    how = rng.choice("cut empty flip flips zeros drop double noise mark deep sparse folder gone".split())
    if how in ("folder", "gone"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        return how
    if how == "sparse":
        os.truncate(path, 1 << 36)
        return "64 GiB of nothing at the end"
    flipped = bytearray(raw)
    for i in [at] if how == "flip" else [rng.randrange(max(1, len(raw))) for _ in range(20)]:
        if how in ("flip", "flips") and raw:
            flipped[i] ^= 1 << rng.randrange(8)
    path.write_bytes(
        {
            "cut": raw[:at],
            "empty": b"",
            "flip": bytes(flipped),
            "flips": bytes(flipped),
            "zeros": raw[:at] + bytes(min(size, len(raw) - at)) + raw[at + size :],
            "drop": raw[:at] + raw[at + size :],
            "double": raw[:at] + raw[at : at + size] + raw[at:],
            "noise": rng.randbytes(300),
            "mark": b"\xff\xfe" + raw,
            "deep": b"[" * DEEP,
        }[how]
    )
    return f"{how} at {at}"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def copied(base: Path, folder: Path) -> Path:
    """A fresh copy of a base folder (links would let a mutation reach the base)."""
    return Path(shutil.copytree(base, folder / "input"))


# ---------------------------------------------------------------------------------------------------------
# Whole inputs that the mutations start from


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folders: target, sharded (it in two files), json (a tokenizer.json), run (a checkpoint), cache."""
    root = tmp_path_factory.mktemp("whole")
    skip = shutil.ignore_patterns("*.jsonl", "*.py", "__pycache__")
    shutil.copytree(TINY, root / "target", ignore=skip)
    make_shards(root / "target", root / "sharded")
    make_json_tokenizer(root / "json")
    make_run(root / "run")
    make_cache(root / "cache")
    torch.set_num_threads(1)
    return root


def make_shards(target: Path, folder: Path) -> None:
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    weights = load_file(target / "model.safetensors")
    where = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {n: w for i, (n, w) in enumerate(sorted(weights.items())) if i % 2 == number - 1}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def make_json_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the red boat", "a green stone"] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    )
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 3]})
    write_json(folder / "special_tokens_map.json", {"pad_token": {"content": "</s>"}})
    write_json(folder / "added_tokens.json", {"<|im_end|>": 3})


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_drafter() -> tuple[model.Drafter, torch.optim.AdamW]:
    """A small drafter of the tiny target with an optimizer that has moments."""
    config = model.DrafterConfig.of(model.TargetConfig.from_folder(TINY), 1, 8, 2, 4)
    drafter = model.Drafter(config, *model.load_embedding_and_head(TINY, "cpu", torch.float32))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for p in drafter.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    return drafter, optimizer


def make_run(run: Path) -> None:
    run.mkdir()
    config = dataclasses.asdict(train.resolve(train.Config(), model.TargetConfig.from_folder(TINY), 1, 1))
    write_json(run / "config.json", config | {"out": str(run), "world_size": 1})
    write_json(run / "status.json", {"state": "finished"})
    checkpoint.save(run, 3, *make_drafter(), {"next_batch": 3, "config": config}, 0)


def make_cache(folder: Path) -> None:
    """A compile cache of this build with two graphs, and a bundle of it."""
    of = compile_utils.fingerprint()
    build = folder / compile_utils.build_name(of)
    for i in range(2):
        entry = build / "inductor" / "fxgraph" / "ab" / f"f{i}" / "entry"
        entry.parent.mkdir(parents=True)
        entry.write_bytes(b"graph %d" % i * 100)
    manifest = {"format": 1, "fingerprint": of, "warm": {"key source": {"seconds": 1.0, "graphs": 2}}}
    write_json(build / "manifest.json", manifest)
    info = compile_utils.CacheInfo(folder, build, of, [])
    compile_utils.save_bundle(folder / "bundle.tar.gz", info)


# ---------------------------------------------------------------------------------------------------------
# Model folders


TARGET_FIELDS = {
    "vocab_size": "vocab", "hidden_size": "hidden", "intermediate_size": "intermediate",
    "num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim", "max_position_embeddings": "max_position", "rms_norm_eps": "eps",
    "rope_theta": "rope_theta", "tie_word_embeddings": "tied",
}  # fmt: skip


def means_the_file(path: Path) -> Callable[[object], None]:
    """Asserts that an accepted target has exactly what its config.json says, in sane types."""

    def check(target: model.Target) -> None:
        c, t = json.loads(path.read_text()), target.c
        for name, field in TARGET_FIELDS.items():
            value = getattr(t, field)
            assert c.get(name) is None or c[name] == value, f"{name} {c[name]!r} became {value!r}"
            assert type(value) in (int, float, bool) and math.isfinite(value), f"{name} is {value!r}"
            assert field == "tied" or value > 0, f"{name} is {value!r}"
        assert all(type(w) is int and w >= 0 for w in t.windows), f"windows {t.windows}"
        assert torch.isfinite(target.freq).all(), "RoPE frequencies are not finite"

    return check


@kind(60)
def config_fields(rng, folder, base):
    place = copied(base / "target", folder)
    c, _, what = mutate_json(rng, json.loads((place / "config.json").read_text()) | rope_of(rng))
    write_json(place / "config.json", c)
    return Attempt(
        lambda: model.Target.load(place), (str(place),), what, accepted=means_the_file(place / "config.json")
    )


def rope_of(rng: random.Random) -> dict:
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    linear = {"type": "linear", "factor": 2.0}
    sliding = {"sliding_window": 9, "layer_types": ["sliding_attention"] * 6}
    mistral = {"architectures": ["MistralForCausalLM"], **sliding}
    return rng.choice([{}, {"rope_scaling": llama3}, {"rope_scaling": linear}, mistral])


@kind(20)
def config_bytes(rng, folder, base):
    place = copied(base / "target", folder)
    what = mutate_bytes(rng, place / "config.json")
    return Attempt(
        lambda: model.Target.load(place), (str(place),), what, accepted=means_the_file(place / "config.json")
    )


def read_header(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_header(path: Path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


DTYPES = "F64 I64 I32 U8 BOOL F8_E4M3 F8_E5M2 F8_E8M0 F4 F6_E2M3 C64 XX".split()


@kind(40)
def safetensors_header(rng, folder, base):
    place = copied(base / "target", folder)
    path = place / "model.safetensors"
    header, body = read_header(path)
    name = rng.choice([n for n in header if n != "__metadata__"])
    entry, how = header[name], rng.randrange(7)
    if how == 0:
        header, _, what = mutate_json(rng, header, (name,))
    elif how == 1:
        entry["dtype"] = rng.choice(DTYPES)
        what = f"{name} dtype {entry['dtype']}"
    elif how == 2:
        entry["shape"] = rng.choice([[2**40, 2**40], [10**9], [-1], [0], entry["shape"][::-1], [1] * 500, []])
        what = f"{name} shape {entry['shape'][:9]}"
    elif how == 3:
        entry["data_offsets"] = rng.choice([[0, 0], [5, 2], [0, 2**62], [len(body), len(body) + 9], [0, 4]])
        what = f"{name} offsets {entry['data_offsets']}"
    elif how == 4:
        header[rng.choice(["odd", "model.layers.99.mlp.up_proj.weight", "a" * 3000, "two\nlines"])] = (
            header.pop(name)
        )
        what = f"{name} renamed"
    elif how == 5:
        size = rng.choice([0, 1, 2**20, 2**31, 2**63, 2**64 - 1])
        path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
        return load_weights(place, f"header of {size} bytes", True)
    else:
        what = "bytes: " + mutate_bytes(rng, path)
        return load_weights(place, what, False)
    write_header(path, header, body)
    return load_weights(place, what, header != read_header(base / "target" / "model.safetensors")[0])


def load_weights(place: Path, what: str, must_refuse: bool) -> Attempt:
    def same_shapes(target: model.Target) -> None:
        assert target.embed_tokens.weight.shape == (1024, 128), "another shape"

    return Attempt(
        lambda: model.Target.load(place),
        (str(place),),
        what,
        must_refuse=must_refuse,
        accepted=same_shapes,
    )


@kind(30)
def shards_and_index(rng, folder, base):
    place = copied(base / "sharded", folder)
    index = place / "model.safetensors.index.json"
    shards = sorted(place.glob("*.safetensors"))
    how = rng.randrange(5)
    if how == 0:
        return load_weights(place, "index " + mutate_bytes(rng, index), False)
    if how == 1:
        return load_weights(place, "shard " + mutate_bytes(rng, rng.choice(shards)), False)
    if how == 2:
        first = load_file(shards[0])
        second = load_file(shards[1])
        name = rng.choice(sorted(first))
        second[name] = first[name] + 1
        save_file(second, shards[1], metadata={"format": "pt"})
        return load_weights(place, f"{name} in both shards", True)
    c = json.loads(index.read_text())
    if how == 3:
        name = rng.choice(sorted(c["weight_map"]))
        c["weight_map"][name] = rng.choice(
            ["../target/model.safetensors", "/etc/passwd", "..", ".", "", "a\0.safetensors",
             "two\n.safetensors", "x/../model-00001-of-00002.safetensors", "~/.safetensors",
             "nothing.safetensors", 3, None, ["a"], {"a": 1}, "a" * 3000 + ".safetensors"]
        )  # fmt: skip
        write_json(index, c)
        return load_weights(place, f"index says {str(c['weight_map'][name])[:40]!r}", True)
    c, path, what = mutate_json(rng, c, ("weight_map",))
    write_json(index, c)
    return load_weights(place, "index " + what, len(path) == 1 and c.get("weight_map") != {})


# ---------------------------------------------------------------------------------------------------------
# Tokenizers, templates, data


SAMPLE = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "seven red boats"}]


def use_tokenizer(place: Path) -> data.Tokenizer:
    """What training does with a tokenizer, in this process as a worker does it."""
    tokenizer = data.load_tokenizer(place)
    tokenizer.compile_template()
    tokenizer.decode(tokenizer.encode("the red boat <s> é"))
    with contextlib.suppress(data.BadLine):  # a record the template refuses is a bad line, counted
        if tokenizer.template:
            data.chat_tokens(tokenizer, SAMPLE)
    return tokenizer


def ids_in_range(tokenizer: data.Tokenizer) -> None:
    ids = [*tokenizer.special_ids, *tokenizer.eos_ids, *tokenizer.used_ids]
    ids += [i for i in (tokenizer.pad_id, tokenizer.bos_id, tokenizer.mask_id) if i is not None]
    assert all(type(i) is int and 0 <= i < 1 << 24 for i in ids), "ids out of range"
    assert tokenizer.vocab_size == max(tokenizer.used_ids) + 1, "vocab_size"


@kind(25)
def tokenizer_model(rng, folder, base):
    place = copied(base / "target", folder)
    what = mutate_bytes(rng, place / "tokenizer.model")
    return Attempt(lambda: use_tokenizer(place), (str(place),), what, accepted=ids_in_range)


@kind(40)
def tokenizer_json(rng, folder, base):
    place = copied(base / "json", folder)
    path = place / "tokenizer.json"
    if rng.random() < 0.4:
        what = mutate_bytes(rng, path)
    else:
        c = json.loads(path.read_text())
        c["model"]["vocab"] = dict(list(c["model"]["vocab"].items()))
        few = {k: v for k, v in c.items() if k != "model"} | {"model": {k: 0 for k in c["model"]}}
        _, at, _ = mutate_json(rng, few)
        holder = c
        for key in at[:-1]:
            holder = holder[key]
        holder[at[-1]] = rng.choice(HOSTILE)
        what = f"{at} = {repr(holder[at[-1]])[:40]}"
        write_json(path, c)
    return Attempt(lambda: use_tokenizer(place), (str(place),), what, accepted=ids_in_range)


@kind(50)
def tokenizer_config(rng, folder, base):
    place = copied(base / rng.choice(["json", "target"]), folder)
    names = (
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    )
    name = rng.choice([n for n in names if (place / n).exists()])
    if rng.random() < 0.3:
        what = mutate_bytes(rng, place / name)
    else:
        c, _, what = mutate_json(rng, json.loads((place / name).read_text()))
        write_json(place / name, c)
    return Attempt(
        lambda: use_tokenizer(place), (str(place),), f"{name} {what}", accepted=no_silent_default(place)
    )


def no_silent_default(place: Path) -> Callable[[object], None]:
    """A named token or id that a file holds is used, or it was refused; nothing wrong is passed over."""

    def check(tokenizer: data.Tokenizer) -> None:
        ids_in_range(tokenizer)
        c = (
            json.loads((place / "tokenizer_config.json").read_text())
            if (place / "tokenizer_config.json").exists()
            else {}
        )
        for name in ("bos_token", "eos_token", "pad_token", "mask_token"):
            value = c.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            assert text is None or tokenizer.named_tokens.get(name) == text, (
                f"{name} {value!r} is passed over"
            )
        template = c.get("chat_template")
        assert template is None or tokenizer.template_text is not None, (
            f"chat_template {template!r} is passed over"
        )
        for name in ("generation_config.json", "config.json"):
            path = place / name
            ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
            for i in ids if isinstance(ids, list) else [ids]:
                assert i is None or i == -1 or i in tokenizer.eos_ids, (
                    f"{name}: eos_token_id {i!r} is passed over"
                )

    return check


BITS = (
    "{{ }} {% %} {# m [ ] | loop endfor ' ''.__class__ \\ raise_exception( |tojson(indent=9) range(10) "
    "\ud800 {%raw%} |attr('__init__') 1/0 namespace()"
).split(" ")


@kind(40)
def chat_template(rng, folder, base):
    place = copied(base / rng.choice(["json", "target"]), folder)
    c = json.loads((place / "tokenizer_config.json").read_text())
    text = c["chat_template"]
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(text) + 1), rng.randrange(12)
        text = text[:at] + rng.choice([*BITS, "", ""]) + text[at + size :]
    if rng.random() < 0.3:
        (place / "chat_template.jinja").write_text(text, encoding="utf-8", errors="surrogatepass")
    else:
        write_json(place / "tokenizer_config.json", c | {"chat_template": text})
    return Attempt(lambda: use_tokenizer(place), (str(place),), repr(text[-80:]))


GOOD_LINES = [
    {"messages": SAMPLE},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a red boat"}]},
    {"prompt": "how many", "response": "seven red boats", "source": "x"},
    {"text": "the red boat runs"},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "finished": True},
]


def mutate_line(rng: random.Random) -> bytes:
    """One JSONL record, damaged as a value or as bytes; never empty, never two lines."""
    record = rng.choice(GOOD_LINES)
    if rng.random() < 0.65:
        return json.dumps(mutate_json(rng, record)[0]).encode()
    raw = json.dumps(record).encode()
    at = rng.randrange(1, len(raw))
    return rng.choice(
        [raw[:at], raw[:at] + raw[at + 3 :], b"\xef\xbb\xbf" + raw, "é".encode("latin-1") + raw,
         b"[" + raw + b"]", raw + raw, raw[:at] + b"\xff" + raw[at:], raw[:at] + b"\0" + raw[at:],
         b"[" * DEEP, b'{"a":' * DEEP,
         raw.decode().encode("utf-16"), b"null", b"NaN", b"1" * 5000, rng.randbytes(60)]
    ).replace(b"\n", b"?")  # fmt: skip


@kind(90)
def data_lines(rng, folder, base):
    """A line alone, as a worker takes it; `test_bad_lines_...` below reads them as a file."""
    line = mutate_line(rng)

    def call():
        chunk = data.Chunk("stem")
        try:
            chunk.add(HERE[base], data.parse_line(line), 64)
        except data.BadLine as error:
            raise ValueError(f"data.jsonl:1: {error}; correct or remove this line") from None
        return chunk

    def whole(chunk: data.Chunk) -> None:
        assert all(0 <= i < HERE[base].vocab_size for ids in chunk.ids for i in ids.tolist()), (
            "ids out of range"
        )

    HERE.setdefault(base, use_tokenizer(base / "target"))
    return Attempt(call, ("data.jsonl:1:",), repr(line[:80]), accepted=whole)


HERE: dict[Path, data.Tokenizer] = {}  # a tokenizer that renders in this process


@kind(20)
def prompts(rng, folder, base):
    """decode.py --prompts."""
    lines = [json.dumps(GOOD_LINES[0]).encode(), mutate_line(rng)]
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines))
    HERE.setdefault(base, use_tokenizer(base / "target"))
    every = rng.random() < 0.5
    return Attempt(
        lambda: decode.read_prompts([str(path)], HERE[base], every), (f"{path}:2",), repr(lines[1][:80])
    )


# ---------------------------------------------------------------------------------------------------------
# Checkpoints, exports, run folders


def restore(place: Path) -> dict:
    """What --resume does with a checkpoint."""
    _, found = checkpoint.find_checkpoint(place)
    state = checkpoint.read_state(found)
    drafter, optimizer = RESTORED.setdefault("models", make_drafter())
    checkpoint.load(found, drafter, optimizer)
    assert all(torch.isfinite(p).all() for p in drafter.parameters())
    return state


def as_saved(_) -> None:
    """How to step is the run's to say, whatever the file holds; the moments are the saved ones."""
    (group,) = RESTORED["models"][1].param_groups
    assert group["lr"] == 1e-3 and group["betas"] == (0.9, 0.95) and len(group["params"]) == 14, (
        "another step"
    )
    assert all(s["step"] == 1 for s in RESTORED["models"][1].state.values()), "other moments"


RESTORED: dict[str, tuple] = {}


def sound_state(state: dict) -> None:
    for name in ("step", "next_batch"):
        assert type(state[name]) is int and 0 <= state[name] < 2**53, f"{name} is {state[name]!r}"


@kind(40)
def checkpoints(rng, folder, base):
    place = copied(base / "run", folder) / "step-000003"
    name = rng.choice(["state.json", "state.json", "optimizer.pt", "model.safetensors"])
    if name == "state.json" and rng.random() < 0.7:
        c, _, what = mutate_json(
            rng, json.loads((place / name).read_text()), ("step", "next_batch", "drafter")
        )
        write_json(place / name, c)
    else:
        what = mutate_bytes(rng, place / name)
    call = rng.choice([restore, lambda p: checkpoint.load_drafter(p, TINY) and checkpoint.read_state(p)])
    gone = (str(place), f"--resume {place}")
    return Attempt(lambda: call(place), gone, f"{name} {what}", accepted=sound_state)


class Runs:
    """Unpickled, it would call something."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@kind(20)
def optimizer_pickles(rng, folder, base):
    place = copied(base / "run", folder) / "step-000003"
    path, mark = place / "optimizer.pt", folder / "input" / "owned"
    held = torch.load(path, weights_only=True)
    wide = torch.zeros(1).expand(10**6, 10**6)
    bombs = [
        Runs(os.mkdir, (str(mark),)), Runs(os.system, (f"touch {mark}",)),
        Runs(exec, (f"open({str(mark)!r},'w')",)), Runs(bytearray, (10**11,)),
        Runs(eval, ("7**(7**8)",)), Runs(torch.load, (str(path),)),
    ]  # fmt: skip
    how = rng.randrange(5)
    if how == 0:
        held["state"] = rng.choice(bombs)
        torch.save(held, path)
    elif how == 1:
        path.write_bytes(pickle.dumps(rng.choice(bombs)))
    elif how == 2:
        held["state"][0][rng.choice(["exp_avg", "exp_avg_sq", "step"])] = rng.choice(
            [
                wide,
                torch.zeros(3),
                torch.full_like(held["state"][0]["exp_avg"], math.nan),
                3,
                None,
                "x",
                torch.tensor(-1.0),
            ]
        )
        torch.save(held, path)
    elif how == 3:
        deep: object = 0
        for _ in range(60):
            deep = [deep, deep]
        held[rng.choice(["state", "param_groups"])] = rng.choice(
            [
                deep,
                {0: deep},
                [],
                {},
                [{}],
                None,
                3,
                [{"params": [0]}],
                {"a": 1},
                [{"params": list(range(10**5))}],
            ]
        )
        torch.save(held, path)
        return Attempt(lambda: restore(place), (str(place),), f"how {how}", accepted=as_saved)
    else:  # the same archive, its records deflated: 50 MiB of zeros take 50 KiB
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_DEFLATED) as new:
            for n in old.namelist():
                new.writestr(n, bytes(50 << 20) if n.endswith("/data/0") else old.read(n))
        os.replace(folder / "new", path)

    def nothing_ran(_) -> None:
        assert not mark.exists(), "the pickle ran code"

    return Attempt(
        lambda: restore(place), (str(place),), f"how {how}", must_refuse=True, accepted=nothing_ran
    )


@kind(40)
def exports(rng, folder, base):
    place = copied(base / "run" / "step-000003" / "export", folder)
    if rng.random() < 0.6:
        c, _, what = mutate_json(rng, json.loads((place / "config.json").read_text()))
        write_json(place / "config.json", c)
    else:
        name = rng.choice(["config.json", "model.safetensors"])
        what = f"{name} {mutate_bytes(rng, place / name)}"

    def sane(drafter: model.Drafter) -> None:
        c = drafter.c
        sizes = (c.hidden, c.heads, c.kv_heads, c.head_dim, c.intermediate, c.vocab, c.layers, c.block_size)
        assert all(type(s) is int and s > 0 for s in (*sizes, c.max_position)), (
            f"sizes {sizes} {c.max_position}"
        )
        assert math.isfinite(c.eps) and c.eps > 0, f"eps {c.eps}"
        assert torch.isfinite(drafter.freq).all(), "RoPE frequencies are not finite"

    return Attempt(lambda: checkpoint.load_drafter(place, TINY), (str(place),), what, accepted=sane)


@kind(40)
def run_configs(rng, folder, base):
    """config.json of a run, read by --resume, then checked as flags are."""
    run = copied(base / "run", folder)
    path = run / "config.json"
    if rng.random() < 0.7:
        c, _, what = mutate_json(rng, json.loads(path.read_text()))
        write_json(path, c)
    else:
        what = mutate_bytes(rng, path)
    return Attempt(
        lambda: flags_of(["--resume", str(run)]), (str(run), "--"), what, (ValueError,), accepted=sound_flags
    )


# ---------------------------------------------------------------------------------------------------------
# Compile caches, the stream


@kind(30)
def manifests(rng, folder, base):
    """A manifest that cannot be read is a cold cache; never more."""
    place = copied(base / "cache", folder)
    path = next(place.glob("torch-*/manifest.json"))
    if rng.random() < 0.6:
        c, _, what = mutate_json(rng, json.loads(path.read_text()))
        write_json(path, c)
    else:
        what = mutate_bytes(rng, path)
    info = compile_utils.CacheInfo(place, path.parent, compile_utils.fingerprint(), [])

    def sane(found) -> None:
        noted = info.warm("key", "source")
        assert noted is None or isinstance(noted, dict), f"warm is {noted!r}"
        assert found == {} or isinstance(found["warm"], dict), "warm is no dictionary"

    return Attempt(lambda: compile_utils.read_manifest(path), (str(path),), what, accepted=sane)


@kind(40)
def bundles(rng, folder, base):
    place = copied(base / "cache", folder)
    bundle = place / "bundle.tar.gz"
    shutil.rmtree(next(place.glob("torch-*")) / "inductor")
    how = rng.randrange(4)
    if how == 0:
        what = mutate_bytes(rng, bundle)
    else:
        with tarfile.open(bundle, "r:gz") as tar:
            header = json.load(tar.extractfile("header.json"))
            rest = {m.name: tar.extractfile(m).read() for m in tar if m.name != "header.json"}
        if how == 1:
            header, _, what = mutate_json(rng, header)
        elif how == 2:
            header = rng.choice(
                [[], {}, None, 3, {"format": 1}, {"format": 1, "fingerprint": {}, "files": []}]
            )
            what = f"header {header}"
        else:
            name = rng.choice(
                ["cache/../../up", "cache//etc/x", "cache/a\0b", "cache/", "cache/.", "cache/inductor"]
            )
            rest[name] = b"x"
            header["files"][name.removeprefix("cache/")] = 1
            if rng.random() < 0.5:
                header["files"]["inductor/fxgraph"] = 1
                rest["cache/inductor/fxgraph"] = b"x"
            what = f"member {name!r}"
        with tarfile.open(bundle, "w:gz") as tar:
            compile_utils._add(tar, "header.json", json.dumps(header).encode())
            for name, content in rest.items():
                compile_utils._add(tar, name, content)
    into = folder / "into"
    shutil.copytree(next(place.glob("torch-*")), into / "build")
    info = compile_utils.CacheInfo(into, into / "build", compile_utils.fingerprint(), [])

    def call():
        found = compile_utils.load_bundle(bundle, info)
        return found, {str(p.relative_to(folder)) for p in compile_utils._files(folder)}

    def only_its_own(value) -> None:
        found, added = value
        assert isinstance(found.warm, dict), f"warm is {found.warm!r}"
        assert all(name.startswith(("input/", "into/build/")) for name in added), f"added {added}"

    return Attempt(call, (str(bundle),), what, (ValueError,), accepted=only_its_own)


SHAPES = stream.Shapes(64, 8, 4, 24, torch.float32)


@kind(40)
def stream_headers(rng, folder, base):
    header = SHAPES.header(stream.TRAIN, 12, 99)
    at = rng.choice([i for i in range(len(header)) if i != 9])
    old = int(header[at])
    header[at] = rng.choice([old + 1, -old - 1, old ^ (1 << rng.randrange(63)), 2**62, -(2**62)])
    return Attempt(
        lambda: SHAPES.check(header, stream.TRAIN, 12, 3),
        ("message from rank 3",),
        f"field {at} = {int(header[at])}",
        (stream.StreamError,),
        must_refuse=True,
    )


# ---------------------------------------------------------------------------------------------------------
# Command lines


def flags_of(argv: list[str]) -> train.Config:
    """What train.py does with its command line before it joins the others."""
    c = train.parse_flags(argv)
    return train.resolve(c, model.TargetConfig.from_folder(c.folder), 1, 1)


def sound_flags(c: train.Config) -> None:
    for f in dataclasses.fields(c):
        value = getattr(c, f.name)
        assert type(value) is (list if f.name in ("data", "eval_data") else f.type), f"{f.name} is {value!r}"
        if isinstance(value, float):
            assert not math.isnan(value), f"{f.name} is {value!r}"
    elements = c.token_budget * 8 + c.max_batch_size + c.anchors * c.block_size
    assert elements < 2**31, f"buffers of {elements} elements"
    assert 0 <= c.seed < 2**63 and c.depth <= 1024 and c.draft_layers <= 1024, "beyond what torch takes"


VALUES = (
    "0 -1 1 2 7 128 1e3 nan inf -inf x  1.5 999999999999999999999 10000000000000 0x10 ٣ cpu split nowhere / "
    f"a\0b two\nlines --steps True {'é' * 400} "
).split(" ")


@kind(80)
def train_flags(rng, folder, base):
    names = ["--" + f.name.replace("_", "-") for f in dataclasses.fields(train.Config)]
    names += ["--no-such", "--", "-x", "--token_budget", "--stepz"]
    argv = []
    for name in rng.sample(names, rng.randint(1, 3)):
        argv += [name, *[rng.choice(VALUES) for _ in range(rng.choice([0, 1, 1, 1, 1, 2]))]]
    return Attempt(lambda: flags_of(argv), ("-", *argv), repr(argv)[:200], accepted=sound_flags)


@kind(40)
def decode_flags(rng, folder, base):
    known = "target draft prompts limit max-new-tokens batch-size temperature seed dtype device json png show"
    argv = []
    for name in rng.sample([*known.split(), "no-such", "verify", "every-turn"], rng.randint(1, 3)):
        argv += [f"--{name}", *[rng.choice(VALUES) for _ in range(rng.choice([0, 1, 1, 1, 2]))]]

    def sane(c) -> None:
        assert math.isfinite(c.temperature) and 0 <= c.seed < 2**63, f"{c.temperature} {c.seed}"
        assert c.batch_size <= 2**20 and c.max_new_tokens <= 2**31, "beyond any memory"

    return Attempt(lambda: decode.parse_flags(argv), ("-", *argv), repr(argv)[:200], accepted=sane)


# ---------------------------------------------------------------------------------------------------------
# generate.py: its flags, its prompts, what it left of an earlier start, what a server answers


@kind(40)
def generate_flags(rng, folder, base):
    known = "target prompts out max-new-tokens temperature seed batch-size dtype device server model "
    known += "concurrency timeout key-env every-turn no-such"
    argv = ["--out", str(folder / "out.jsonl")] if rng.random() < 0.8 else []
    for name in rng.sample(known.split(), rng.randint(1, 3)):
        more = (*VALUES, "http://a", "http://[", "http://a:x", "ftp://a", "PATH")
        argv += [f"--{name}", *[rng.choice(more) for _ in range(rng.choice([0, 1, 1, 1, 2]))]]

    def sane(c) -> None:
        assert 0 <= c.temperature < 1e4 and 0 < c.timeout < 1e7 and 0 <= c.seed < 2**63, vars(c)
        assert c.batch_size <= 2**20 and c.max_new_tokens <= 2**31 and c.concurrency <= 2**12, vars(c)

    return Attempt(lambda: generate.parse_flags(argv), ("-", *argv), repr(argv)[:200], accepted=sane)


@kind(40)
def generate_prompts(rng, folder, base):
    lines = [json.dumps(GOOD_LINES[0]).encode(), mutate_line(rng)]
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines))
    chat, every = rng.random() < 0.7, rng.random() < 0.5

    def call() -> list:
        items = generate.read_items([str(path)], chat, every)
        generate.name_items(items, [])
        return items

    def askable(items: list) -> None:
        assert len({item.id for item in items}) == len(items) <= 2
        for item in items:
            assert all(type(m["content"]) is str for turn in item.turns for m in turn), item.turns
            assert type(item.text) is str and json.dumps(item.record).isprintable()

    return Attempt(call, (f"{path}:2",), repr(lines[1][:80]), accepted=askable)


@kind(25)
def generate_outputs(rng, folder, base):
    """Of an earlier start: --out or a part of it, damaged; what is taken from it is one of its prompts'."""
    prompts, out = folder / "prompts.jsonl", folder / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"how many {i}"}) + "\n" for i in range(3)))
    items = generate.read_items([str(prompts)], True, False)
    generate.name_items(items, [])
    answers = [generate.answer_line(item, [generate.Answer("seven", 2, True)]) for item in items]
    path = out if rng.random() < 0.5 else folder / "out.jsonl.parts" / "00000.jsonl"
    path.parent.mkdir(exist_ok=True)
    if rng.random() < 0.5:
        answers[1], _, what = mutate_json(rng, answers[1])
        path.write_text("".join(json.dumps(line) + "\n" for line in answers))
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in answers))
        what = mutate_bytes(rng, path)

    def known(store) -> None:
        assert store.done <= {item.id for item in items}

    return Attempt(lambda: generate.Store(str(out), items), ("--out", str(out)), what, accepted=known)


@kind(30)
def server_replies(rng, folder, base):
    reply = {"choices": [{"message": {"content": "seven"}, "finish_reason": "stop"}]}
    reply |= {"usage": {"completion_tokens": 3}}
    path = folder / "reply"
    if rng.random() < 0.6:
        changed, _, what = mutate_json(rng, reply)
        path.write_text(json.dumps(changed))
    else:
        path.write_text(json.dumps(reply))
        what = mutate_bytes(rng, path)
    raw = b""
    if path.is_file():
        with path.open("rb") as file:
            raw = file.read(min(1 << 24, generate.REPLY_BYTES))

    def call():
        try:
            return generate.answer_of(raw)
        except ValueError as error:
            raise ValueError(f"--server: {error}: start the server") from None

    def an_answer(got) -> None:
        assert type(got.text) is str and type(got.tokens) is int and 0 <= got.tokens < 2**63, got

    return Attempt(call, ("--server",), what, accepted=an_answer)


# ---------------------------------------------------------------------------------------------------------
# The tests


def test_there_are_enough_inputs():
    assert sum(cases for cases, _ in KINDS.values()) >= 300


@pytest.mark.parametrize("name", KINDS)
def test_every_mutated_input_is_refused_in_one_line_or_means_what_it_says(
    name, base, tmp_path, record_property
):
    cases, make = KINDS[name]
    only = os.environ.get("FUZZ_CASE")
    failures, outcomes = [], {"refused": 0, "accepted": 0}
    for number in [int(only)] if only else range(cases * TIMES):
        rng = random.Random(f"{SEED} {name} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        attempt = make(rng, folder, base)
        outcome, wrong = judge(attempt, folder)
        outcomes[outcome] += 1
        if wrong:
            failures.append(f"FUZZ_SEED={SEED} FUZZ_CASE={number} ({attempt.what}): {wrong}")
        shutil.rmtree(folder)
    print(f"{name}: {outcomes}, seed {SEED}")
    assert not failures, f"{len(failures)} of {cases * TIMES} {name}:\n" + "\n".join(failures)


def test_bad_lines_of_a_file_are_skipped_and_counted_one_by_one(base, tmp_path):
    """Through the workers: as many documents, left-out records and bad lines as lines tried alone."""
    rng = random.Random(f"{SEED} file")
    lines = [json.dumps(r).encode() for r in GOOD_LINES] + [mutate_line(rng) for _ in range(150)]
    rng.shuffle(lines)
    tokenizer, alone, bad = HERE.setdefault(base, use_tokenizer(base / "target")), data.Chunk("d"), {}
    for number, line in enumerate(lines, 1):
        try:
            alone.add(tokenizer, data.parse_line(line), 64)
        except data.BadLine as error:
            bad[number] = str(error)
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    fresh = data.load_tokenizer(base / "target")
    corpus = data.load_corpus(tmp_path / "d.jsonl", fresh, 64, tmp_path / "cache", len(lines), 1)
    assert {number: reason for _, number, reason in corpus.report.bad_lines} == bad and len(bad) > 50
    assert (len(corpus), corpus.report.no_anchor) == (len(alone.rows), alone.counts["no_anchor"])
    with pytest.raises(ValueError, match=r"more than 3 bad lines: .*d\.jsonl:\d+: ") as error:
        data.load_corpus(tmp_path / "d.jsonl", fresh, 64, tmp_path / "other", 3, 1)
    assert len(str(error.value).splitlines()) == 1
    assert not list((tmp_path / "other").glob("*.tmp-*"))


GREEDY = {
    "power": "{{ 7**(7**8) }}",
    "text": "{{ 'a' * 10**10 }}",
    "list": "{{ ([0] * 10**10)|length }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "justify": "{{ 'a'.ljust(10**10) }}",
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}"
    "{% endfor %}{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "late": CHATML + "{% if messages[0].content != 'a' %}{{ 7**(7**(6 + messages|length)) }}{% endif %}",
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_template_ends_within_its_limits(name, base, tmp_path, monkeypatch):
    """In a worker process: an alarm in this one would not stop a power of Python integers."""
    monkeypatch.setattr(data, "RENDER_LIMIT_S", 0.5)
    monkeypatch.setattr(data, "RENDER_LIMIT_BYTES", 1 << 28)
    place = copied(base / "json", tmp_path)
    c = json.loads((place / "tokenizer_config.json").read_text())
    write_json(place / "tokenizer_config.json", c | {"chat_template": GREEDY[name]})
    tokenizer = data.load_tokenizer(place)
    attempt = Attempt(lambda: tokenizer.render(SAMPLE), (str(place),), name, must_refuse=True)
    before = set(children())
    try:
        with pytest.raises(ValueError) as error:
            attempt.call()
        assert not complaint(error.value, attempt), complaint(error.value, attempt)
    finally:
        tokenizer.close()
    assert set(children()) <= before, "a worker is left"


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_bundle_that_unpacks_to_gigabytes_is_refused_before_it_does(base, tmp_path):
    place = copied(base / "cache", tmp_path)
    info = compile_utils.CacheInfo(place, next(place.glob("torch-*")), compile_utils.fingerprint(), [])
    bomb = place / "bomb.tar.gz"
    with tarfile.open(bomb, "w:gz", compresslevel=1) as tar:
        header = tarfile.TarInfo("header.json")
        header.type, header.size = tarfile.XHDTYPE, 1 << 28  # an extended header is read whole by tarfile
        tar.addfile(header, Zeros())
    assert bomb.stat().st_size < 1 << 21
    attempt = Attempt(lambda: compile_utils.load_bundle(bomb, info), (str(bomb),), "bomb", must_refuse=True)
    outcome, wrong = judge(attempt, tmp_path)
    assert outcome == "refused" and not wrong, wrong


class Zeros:
    def read(self, size: int) -> bytes:
        return bytes(size)


def test_the_oracle_itself_finds_what_is_wrong(tmp_path):
    """Each kind of wrong ending is told apart, so that the fuzz above can fail."""
    path = str(tmp_path)

    def told(call, **more) -> str:
        return judge(Attempt(call, (path,), "", **more), tmp_path)[1]

    def fail(text, error=ValueError):
        def call():
            raise error(text)

        return call

    assert told(fail(f"{path}: broken: fetch it again")) == ""
    assert "KeyError instead" in told(fail(path, KeyError))
    assert "more than one line" in told(fail(f"{path}:\ngive another"))
    assert "does not name" in told(fail("broken: give another"))
    assert "Python's own" in told(fail(f"{path}: ValueError('x'): give another"))
    assert "no fix" in told(fail(f"{path}: broken"))
    assert "unprintable" in told(fail(f"{path}: \0: give another"))
    assert "must be refused" in told(lambda: 1, must_refuse=True)
    assert "Hang" in told(lambda: signal.raise_signal(signal.SIGALRM))
    assert "instead of ValueError" in told(lambda: torch.empty(2 * LIMIT_BYTES, dtype=torch.uint8))
    assert "MemoryError" in told(lambda: bytearray(2 * LIMIT_BYTES))
    written = told(lambda: (tmp_path / "half").write_text("x") and fail(f"{path}: broken: fetch it again")())
    assert "wrote" in written


# ---------------------------------------------------------------------------------------------------------
# Whole commands


def broken(place: Path, name: str) -> list[str]:
    """Flags of a job whose input has this mistake."""
    if name == "flag":
        return ["--token-budget", "99999999999999999999"]
    if name == "config":
        write_json(
            place / "config.json", json.loads((place / "config.json").read_text()) | {"head_dim": 10**9}
        )
    if name == "weights":
        os.truncate(place / "model.safetensors", 1 << 20)
    if name == "tokenizer":
        (place / "tokenizer.model").write_bytes(b"[" * DEEP)
    if name == "data":
        (place / "bad.jsonl").write_bytes(b"[" * DEEP + b"\n\xff\n")
        return ["--data", str(place / "bad.jsonl"), "--max-bad-lines", "1"]
    if name == "template":
        c = json.loads((place / "tokenizer_config.json").read_text())
        write_json(place / "tokenizer_config.json", c | {"chat_template": "{% if %}"})
    return ["--target", str(place)]


@pytest.mark.parametrize("name", ["flag", "config", "weights", "tokenizer", "data", "template"])
def test_a_job_with_a_broken_input_exits_2_with_one_line(name, launcher, small, base, tmp_path):
    place = copied(base / "target", tmp_path)
    ended = launcher.run(1, tmp_path / "run", *small, "--steps", 1, *broken(place, name))
    said = [line for line in ended.text.splitlines() if line.startswith("train.py: ")]
    assert ended.codes == [2] and len(said) == 1 and "Traceback" not in ended.text, ended.text
    assert FIX.search(said[0]) and (str(place) in said[0] or said[0].startswith("train.py: --")), said
    assert not (tmp_path / "run").exists() or (tmp_path / "run" / "status.json").exists()


@pytest.mark.parametrize("script", ["train.py --layout sideways", "decode.py --draft nowhere"])
def test_the_command_exits_2_with_one_line(script, tmp_path):
    name, *flags = script.split()
    done = subprocess.run(
        [sys.executable, ROOT / name, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.startswith(f"{name}: {flags[0]}") and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------
# SECURITY.md


def test_code_of_a_model_folder_never_runs(base, tmp_path, monkeypatch):
    """Neither code that its config names, nor modules that lie where the command is started."""
    place, mark = copied(base / "json", tmp_path), tmp_path / "owned"
    shutil.copy(base / "target" / "config.json", place)
    shutil.copy(base / "target" / "model.safetensors", place)
    for name in ("modeling_odd", "tokenization_odd", "tokenizers", "numpy", "jinja2", "json"):
        (place / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name, entry in (
        ("config.json", {"AutoConfig": "modeling_odd.C"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_odd.T", None]}),
    ):
        write_json(place / name, json.loads((place / name).read_text()) | {"auto_map": entry})
    monkeypatch.chdir(place)
    tokenizer = data.load_tokenizer(place)
    assert "seven red boats" in tokenizer.render(SAMPLE)
    tokenizer.close()
    assert model.Target.load(place).c.layers == 6
    c = json.loads((place / "config.json").read_text())
    write_json(place / "config.json", c | {"architectures": ["OddForCausalLM"]})
    with pytest.raises(ValueError, match="OddForCausalLM is not supported"):
        model.Target.load(place)
    assert not mark.exists()


def test_no_source_loads_a_pickle_or_remote_code():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("diagnose/*.py")]:
        text = path.read_text()
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", text):
            assert "weights_only=True" in call, f"{path.name}: {call}"
        assert not re.search(
            r"pickle\.loads?\(|Unpickler\(|trust_remote_code=True|allow_pickle=True", text
        ), path


def test_every_test_that_security_md_names_is_there():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(T|tests/\w+\.py)::(\w+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "promise | test" not in line]
    assert len(rows) >= 10 and all(re.search(r"`(T|tests/\w+\.py)::\w+`", row) for row in rows)
    for file, name in named:
        source = (ROOT / ("tests/test_fuzz.py" if file == "T" else file)).read_text()
        assert f"\ndef {name}(" in source and (file != "T" or name in KINDS or name.startswith("test_")), name
