"""data.py: supervision through any chat template, bad lines, the cache, packing, anchors, the mask token.

pytest tests/test_data.py
"""

import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import train
from model import TargetConfig

ROOT = Path(__file__).resolve().parent.parent
CHAT_PIECES = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<turn>", "</turn>"]
WORDS = "the a red green boat stone runs sings quickly under over moon river counts seven and or not".split()

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # in the manner of Llama 3: the content is trimmed
    "{{ bos_token }}{% for m in messages %}"
    "<|start|>{{ m.role }}<|start|>\n\n{{ m.content | trim }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|start|>\n\n{% endif %}"
)
TURNS = (  # in the manner of Gemma: other role names, alternation demanded, trimmed
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set who = 'model' if m.role == 'assistant' else m.role %}"
    "<turn>{{ who }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
BRACKETS = (  # in the manner of Llama 2: no role header, a space before the end of text
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
THINKING = (  # in the manner of Qwen 3: thinking of earlier turns is dropped
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
)
# name: (template, the answer as it is rendered, the text of the end of turn)
TEMPLATES = {
    "chatml": (CHATML, lambda s: s, "<|im_end|>"),
    "default system": (DEFAULT_SYSTEM, lambda s: s, "<|im_end|>"),
    "headers": (HEADERS, str.strip, "<|stop|>"),
    "turns": (TURNS, str.strip, "</turn>"),
    "brackets": (BRACKETS, str.strip, " </s>"),
    "tagged": (TAGGED, lambda s: s, "<|im_end|>"),
}


def words(rng: random.Random, low: int = 1, high: int = 12) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def conversation(rng: random.Random, turns: int) -> list[dict]:
    """User and assistant in turn; users often say exactly what the assistant says, to mislead a search."""
    messages = []
    for _ in range(turns):
        answer = rng.choice(["", "", "é ", "好", "\N{GRINNING FACE}"]) + words(rng)
        answer += rng.choice(["", ".", "!\nAnd é 好 \N{GRINNING FACE}", "\n\n- one\n- two", " 12"])
        question = answer if rng.random() < 0.4 else words(rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


@pytest.fixture(scope="session")
def json_base(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *CHAT_PIECES, "<|extra", "<|extra|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator((words(rng) for _ in range(500)), trainer)
    folder = tmp_path_factory.mktemp("json")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def spm_base(tmp_path_factory) -> Path:
    import sentencepiece

    rng, model = random.Random(0), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([words(rng) for _ in range(500)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=[*CHAT_PIECES[:3], "<|extra", "<|extra|>"],
        user_defined_symbols=CHAT_PIECES[3:],
        minloglevel=2,
    )
    folder = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


@pytest.fixture(params=["json", "spm"])
def base(request) -> Path:
    return request.getfixturevalue(f"{request.param}_base")


def model_folder(base: Path, tmp_path: Path, template: str | None = CHATML, **config) -> Path:
    folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
    shutil.copytree(base, folder)
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def here(folder: Path) -> data.Tokenizer:
    """A tokenizer that renders in this process, as a worker does."""
    tokenizer = data.load_tokenizer(folder)
    tokenizer.compile_template()
    return tokenizer


def write_lines(path: Path, records) -> Path:
    path.write_bytes(
        b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)
    )
    return path


def chat(question: str = "how many", answer: str = "seven red boats", **more) -> dict:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        **more,
    }


def runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    """The supervised tokens, one list for each unbroken run."""
    found, before = [], 0
    for i, m in zip(ids, mask, strict=True):
        if m and not before:
            found.append([])
        if m:
            found[-1].append(i)
        before = m
    return found


# --- tokenizers and the loss mask


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_is_each_answer_and_its_end_of_turn(base, tmp_path, name):
    template, shown, end = TEMPLATES[name]
    tokenizer = here(model_folder(base, tmp_path, template))
    rng = random.Random(name)
    for turns in (1, 1, 2, 3, 5):
        messages = conversation(rng, turns)
        if name not in ("turns", "brackets") and rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": words(rng)})
        ids, mask = tokenizer.encode_chat(messages)
        answers = [shown(m["content"]) + end for m in messages if m["role"] == "assistant"]
        found = [tokenizer.decode(run) for run in runs(ids, mask)]
        if name == "brackets":  # "[/INST] answer": the space belongs to the answer's first token
            found = [text.lstrip() for text in found]
        assert found == answers
        assert ids == tokenizer.encode(tokenizer.render(messages))


def test_mask_by_hand(base, tmp_path):
    tokenizer = here(model_folder(base, tmp_path))
    ids, mask = tokenizer.encode_chat(chat("the moon", "the moon")["messages"])
    start, end = tokenizer.added["<|im_start|>"], tokenizer.added["<|im_end|>"]
    second = [n for n, i in enumerate(ids) if i == start][1]
    header = len(tokenizer.backend.encode("<|im_start|>assistant\n")[0])
    expected = [0] * (second + header) + [1] * (ids.index(end, second) - second - header + 1)
    assert mask == expected + [0] * (len(ids) - len(expected)) and sum(mask) > 2


def test_template_may_strip_or_reformat_what_surrounds_the_answer(base, tmp_path):
    tokenizer = here(model_folder(base, tmp_path, HEADERS))
    ids, mask = tokenizer.encode_chat(chat("  a  ", "\n  red boat \n")["messages"])
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "red boat<|stop|>"


def test_thinking_that_the_template_drops_is_not_supervised(base, tmp_path):
    tokenizer = here(model_folder(base, tmp_path, THINKING))
    said = ["<think>\nred\n</think>\n\ngreen", "<think>\nmoon\n</think>\n\nriver"]
    messages = [m for answer in said for m in chat("go", answer)["messages"]]
    ids, mask = tokenizer.encode_chat(messages)
    assert [tokenizer.decode(run) for run in runs(ids, mask)] == [said[1] + "<|im_end|>"]


def test_answer_cut_off_has_no_end_of_turn_label(base, tmp_path):
    tokenizer = here(model_folder(base, tmp_path))
    ids, mask, _ = data.record_tokens(tokenizer, chat(answer="red boat", finished=False), 100)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "red boat"


def test_token_shared_with_the_header_is_not_supervised(base, tmp_path):
    shared = 0
    for word in WORDS:
        head, answer = word[:1], word[1:] or "x"
        template = "{% for m in messages %}<|im_start|>" + head + "{{ m.content }}<|im_end|>{% endfor %}"
        tokenizer = here(model_folder(base, tmp_path, template))
        messages = chat("12", answer)["messages"]
        _, mask = tokenizer.encode_chat(messages)
        text = tokenizer.render(messages)
        start = len(text) - len(answer + "<|im_end|>")
        offsets = tokenizer.backend.encode(text)[1]
        assert mask == [int(a >= start) for a, _ in offsets]
        shared += any(a < start < b for a, b in offsets)
    assert shared


def test_long_text_is_cut_before_tokenizing_without_a_trace(json_base, tmp_path):
    tokenizer, rng = here(model_folder(json_base, tmp_path)), random.Random(5)
    text = words(rng, 3000, 3000)
    whole = tokenizer.backend.encode(text)
    for length in (0, 5, 50, 100_000):
        part = data.tokens_with_offsets(tokenizer, text, length)
        assert all(a[: length or None] == b[: length or None] for a, b in zip(part, whole, strict=True))
    assert len(data.tokens_with_offsets(tokenizer, text, 5)[0]) < len(whole[0])
    sparse = SimpleNamespace(backend=SimpleNamespace(encode=lambda text: (text[::5000], list(text[::5000]))))
    assert (
        len(data.tokens_with_offsets(sparse, text[:1] * 100_000, 15)[0]) >= 15
    )  # long tokens: needs the whole


def test_template_that_loses_or_changes_the_answer_is_refused(json_base, tmp_path):
    for template in (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:4] }}{% endfor %}",
    ):
        with pytest.raises(ValueError, match="rendered:"):
            here(model_folder(json_base, tmp_path, template)).encode_chat(chat()["messages"])


def test_special_pieces_in_text_are_single_ids_and_offsets_cover_the_text(base, tmp_path):
    tokenizer = here(model_folder(base, tmp_path))
    rng = random.Random(1)
    parts = [
        *WORDS,
        *CHAT_PIECES,
        "<|extra",
        "<|extra|>",
        "<s>",
        "</s>",
        " ",
        "\n",
        "é",
        "好",
        "\N{GRINNING FACE}",
        "</",
        "<|im",
        "  ",
        "\t",
        "ß",
    ]
    for _ in range(200):
        text = "".join(rng.choice(parts) + rng.choice(["", " "]) for _ in range(rng.randint(1, 20)))
        ids, offsets = tokenizer.backend.encode(text)
        assert tokenizer.decode(ids) == text
        covered = set()
        for (a, b), (c, d) in itertools.pairwise(offsets):
            assert a <= b and a <= c and b <= d
        for a, b in offsets:
            covered |= set(range(a, b))
        assert all(n in covered for n, letter in enumerate(text) if not letter.isspace())
        at = 0
        while (at := min((p for s in tokenizer.added if (p := text.find(s, at)) >= 0), default=-1)) >= 0:
            piece = max((s for s in tokenizer.added if text.startswith(s, at)), key=len)
            assert ids[offsets.index((at, at + len(piece)))] == tokenizer.added[piece]
            at += len(piece)


def test_render_in_a_worker_equals_render_here_and_refusals_reach_the_caller(json_base, tmp_path):
    folder = model_folder(json_base, tmp_path, TURNS)
    tokenizer, inside = data.load_tokenizer(folder), here(folder)
    messages = chat()["messages"]
    assert tokenizer.render(messages[:1], True) == inside.render(messages[:1], True)
    assert tokenizer.encode_chat(messages) == inside.encode_chat(messages)
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.render(messages + messages[1:])
    assert tokenizer.render(messages) == inside.render(messages)  # the worker survives a refusal
    tokenizer.close()


def test_matches_transformers_template_rendering(json_base, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, (template, _, _) in TEMPLATES.items():
        folder = model_folder(json_base, tmp_path, template)
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            bos_token="<s>",
            eos_token="</s>",
            chat_template=template,
        )
        messages = conversation(random.Random(name), 3)
        mine = here(folder)
        assert theirs.apply_chat_template(messages, tokenize=False) == mine.render(messages)
        assert (
            theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
            == mine.encode_chat(messages)[0]
        )


def test_broken_tokenizer_files_are_named(json_base, spm_base, tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no tokenizer\.model"):
        data.load_tokenizer(tmp_path)
    for base, name in ((json_base, "tokenizer.json"), (spm_base, "tokenizer.model")):
        whole = (base / name).read_bytes()
        for damage in (b"", b"{}", b"[1]", whole[: len(whole) // 2], bytes(100)):
            folder = model_folder(base, tmp_path)
            (folder / name).write_bytes(damage)
            with pytest.raises(ValueError, match=name):
                data.load_tokenizer(folder)
    folder = model_folder(json_base, tmp_path)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        data.load_tokenizer(folder)


# --- templates of strangers


@pytest.mark.parametrize(
    "template, what",
    [
        ("{{ 7**(7**8) }}", "ran for more than 0 s"),
        (
            CHATML + "{% if 'red' in messages[1].content %}{{ 7**(7**(6 + messages|length)) }}{% endif %}",
            "line 1",
        ),
        (CHATML + "{% if 'red' in messages[1].content %}{{ ('x' * 10**9)|length }}{% endif %}", "memory"),
    ],
    ids=["folded while compiling", "while rendering", "memory"],
)
def test_template_cannot_take_time_or_memory(json_base, tmp_path, monkeypatch, template, what):
    monkeypatch.setattr(data, "RENDER_LIMIT_S", 0.5 if what != "memory" else 20.0)
    monkeypatch.setattr(data, "RENDER_LIMIT_BYTES", 1 << 28)
    path = write_lines(tmp_path / "d.jsonl", [chat()] * 3)
    tokenizer = data.load_tokenizer(model_folder(json_base, tmp_path, template))
    with pytest.raises(ValueError, match=f"chat template of .*{what}") as error:
        data.load_corpus(path, tokenizer, 100, tmp_path / "cache", 2, 1)
    assert "\n" not in str(error.value)
    for _ in range(2 if what == "memory" else 1):  # a worker that was ended is replaced
        with pytest.raises(ValueError, match=r"chat template of .*(memory|more than 0 s)"):
            tokenizer.render(chat()["messages"])


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{% if %}"]
)
def test_template_cannot_leave_the_sandbox_and_must_compile(json_base, tmp_path, template):
    with pytest.raises(ValueError, match="chat template"):
        here(model_folder(json_base, tmp_path, template)).render(chat()["messages"])


def test_worker_imports_no_torch():
    code = "import sys, data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- records and bad lines


def test_five_shapes_and_their_sources(base, tmp_path):
    tokenizer = data.load_tokenizer(model_folder(base, tmp_path))
    turns = [{"from": "human", "value": "how many"}, {"from": "gpt", "value": "seven red boats"}]
    records = [
        chat(),
        {"conversations": turns, "source": "share"},
        {"prompt": "how many", "response": "seven red boats"},
        {"text": "seven red boats run", "source": "plain"},
        {"input_ids": [20, 21, 22, 23, 24], "loss_mask": [0, 1, 1, 0, 1]},
    ]
    corpus = data.load_corpus(
        write_lines(tmp_path / "mine.jsonl", records), tokenizer, 100, tmp_path / "cache", 0, 2
    )
    documents = [slice(a, b) for a, b in itertools.pairwise(corpus.offsets)]
    tokens, mask = ([array[d].tolist() for d in documents] for array in (corpus.tokens, corpus.mask))
    assert tokens[0] == tokens[1] == tokens[2] and mask[0] == mask[1] == mask[2]
    assert tokens[3] == tokenizer.encode("seven red boats run") and mask[3] == [0] + [1] * (
        len(tokens[3]) - 1
    )
    assert (tokens[4], mask[4]) == ([20, 21, 22, 23, 24], [0, 1, 1, 0, 1])
    assert [corpus.source_names[s] for s in corpus.source] == ["mine", "share", "mine", "plain", "mine"]
    assert corpus.report.documents == 5 and corpus.report.supervised == int(corpus.mask.sum())


def test_pair_without_a_template_is_plain_text(base, tmp_path):
    tokenizer = here(model_folder(base, tmp_path, None))
    ids, mask, _ = data.record_tokens(tokenizer, {"prompt": "the moon ", "response": "runs over"}, 100)
    assert tokenizer.decode(ids) == "the moon runs over</s>"
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).strip() == "runs over</s>"
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat(chat()["messages"])


def said(*roles: str, content="red") -> dict:
    return {"messages": [{"role": role, "content": content} for role in roles]}


def swap(record: dict, number: int, **fields) -> dict:
    record["messages"][number].update(fields)
    return record


WHOLE = json.dumps(chat(answer="a long answer")).encode()
BAD = {
    "cut off": (WHOLE[:-20], "not JSON"),
    "garbage": (b"hello", "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + WHOLE, "byte order mark"),
    "utf-16": ("\ufeff{}".encode("utf-16-le"), "UTF-16"),
    "latin-1": (WHOLE.replace(b"long", "lóng".encode("latin-1")), "not UTF-8"),
    "array": (b"[" + WHOLE + b"]", "list, not an object"),
    "number": (b"3", "a number, not an object"),
    "null": (b"null", "not an object"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "huge number": (b'{"text": ' + b"9" * 10_000 + b"}", "not JSON"),
    "no known key": ({"question": "a", "answer": "b"}, "no messages"),
    "null content": (swap(chat(), 1, content=None), "null, not text"),
    "list content": (swap(chat(), 0, content=["a"]), "list, not text"),
    "surrogate": (WHOLE.replace(b"long", b"\\ud800"), "surrogate"),
    "message not an object": ({"messages": ["hello"]}, "not an object"),
    "messages not a list": ({"messages": {"role": "user"}}, "not a list"),
    "no message": ({"messages": []}, "empty"),
    "unknown role": (said("user", "robot"), "unknown role"),
    "role of another type": (swap(chat(), 0, role=["user"]), "unknown role"),
    "assistant first": (said("assistant", "user"), "roles out of order"),
    "two users": (said("user", "user", "assistant"), "roles out of order"),
    "two assistants": (said("user", "assistant", "assistant"), "roles out of order"),
    "late system": (said("user", "system", "assistant"), "system after user; it comes after start only"),
    "tool first": (said("tool", "assistant"), "tool after start; it comes after assistant or tool only"),
    "no assistant": (said("user"), "no assistant"),
    "empty answer": (swap(chat(), 1, content=" \n"), "empty answer"),
    "empty response": ({"prompt": "a", "response": ""}, "empty answer"),
    "null response": ({"prompt": "a", "response": None}, "null, not text"),
    "empty text": ({"text": "  "}, "empty text"),
    "text of another type": ({"text": 5}, "not text"),
    "sharegpt speaker": ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown"),
    "sharegpt turn": ({"conversations": [1]}, "not a list of objects"),
    "lengths differ": ({"input_ids": [1, 2], "loss_mask": [1]}, "one length"),
    "id too large": ({"input_ids": [1, 10**9], "loss_mask": [1, 1]}, "1000000000"),
    "id negative": ({"input_ids": [1, -1], "loss_mask": [1, 1]}, "-1"),
    "id a float": ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "2.5"),
    "mask not binary": ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "0 and 1"),
    "source not text": (chat(source=5), "source"),
}


def test_bad_lines_are_named_skipped_and_counted(json_base, tmp_path):
    tokenizer = data.load_tokenizer(model_folder(json_base, tmp_path))
    lines, expected = [], []
    for name, (line, reason) in BAD.items():
        lines += [chat(answer=f"the {name} moon"), b"", line]  # an empty line is no error
        expected.append((len(lines), reason))
    path = write_lines(tmp_path / "d.jsonl", lines)
    corpus = data.load_corpus(path, tokenizer, 200, tmp_path / "cache", len(BAD), 2)
    assert len(corpus) == len(BAD) == corpus.report.bad
    for (file, line, reason), (number, part) in zip(corpus.report.bad_lines, expected, strict=True):
        assert (file, line) == (str(path), number) and part in reason and "\n" not in reason
    with pytest.raises(ValueError, match=rf"more than {len(BAD) - 1} bad lines: .*d\.jsonl:3: not JSON"):
        data.load_corpus(path, tokenizer, 200, tmp_path / "cache", len(BAD) - 1, 2)  # from the cache
    with pytest.raises(ValueError, match=r"more than 5 bad lines: .*d\.jsonl:3: not JSON") as error:
        data.load_corpus(path, tokenizer, 200, tmp_path / "other", 5, 1)
    assert "\n" not in str(error.value)


def test_lines_and_numbers_survive_chunking(json_base, tmp_path, monkeypatch):
    """Whatever the chunk size, each line is read once, whole, with its number; long ones are bad."""
    monkeypatch.setattr(data, "MAX_LINE_BYTES", 300)
    rng = random.Random(2)
    for last in (b"", b"\n"):
        lines = [b"x" * rng.choice([0, 1, 5, 80, 299, 1000, 5000]) for _ in range(120)]
        (tmp_path / "f").write_bytes(b"\n".join(lines) + last)
        for size in (1, 7, 64, 100, 1 << 20):
            monkeypatch.setattr(data, "CHUNK_BYTES", size)
            seen = {}
            for number, body in data.chunks_of(tmp_path / "f"):
                for n, line in enumerate(body.split(b"\n") if body is not None else [None], number):
                    assert n not in seen or not line
                    seen.setdefault(n, line)
            for n, line in enumerate(lines, 1):
                if seen.get(n, b"") is None:
                    assert len(line) > 300
                else:
                    assert seen.get(n, b"") == line
                    assert len(line) <= 300 + size


def test_ten_megabyte_line_and_workers_change_nothing(json_base, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CHUNK_BYTES", 1 << 15)
    tokenizer = data.load_tokenizer(model_folder(json_base, tmp_path))
    rng = random.Random(3)
    lines = [chat(words(rng), words(rng, 40, 200), source=rng.choice("abc")) for _ in range(300)]
    lines.insert(70, chat(answer="x" * 10_000_000))
    lines.insert(90, chat(answer="red " * 250_000))  # a megabyte: cut, not refused
    path = write_lines(tmp_path / "d.jsonl", lines)
    one, two = (data.load_corpus(path, tokenizer, 300, tmp_path / f"cache{n}", 1, n) for n in (1, 3))
    assert one.report.bad_lines == two.report.bad_lines and one.report.bad_lines[0][1:] == (
        71,
        "longer than 8 MiB",
    )
    assert len(one) == 301 and one.lengths.max() == 300 and one.report.truncated >= 1
    for name in data.PARTS:
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert one.source_names == two.source_names


@pytest.mark.parametrize(
    "template, max_length, share",
    [
        ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}", 100, "100%"),
        (CHATML, 4, "0%"),
    ],
)
def test_nothing_or_everything_supervised_stops_with_an_example(base, tmp_path, template, max_length, share):
    tokenizer = data.load_tokenizer(model_folder(base, tmp_path, template))
    path = write_lines(tmp_path / "d.jsonl", [chat(), {"text": "seven red boats"}])
    with pytest.raises(ValueError, match=f"d.jsonl: {share} .*rendered:") as error:
        data.load_corpus(path, tokenizer, max_length, tmp_path / "cache", 10, 1)
    assert "\n" not in str(error.value)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_documents_without_an_anchor_are_counted_and_left_out(base, tmp_path):
    tokenizer = data.load_tokenizer(model_folder(base, tmp_path))
    ids = {"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 0, 1]}
    records = [ids, chat(), chat(question="the moon " * 60), {"text": "é"}]
    corpus = data.load_corpus(
        write_lines(tmp_path / "d.jsonl", records), tokenizer, 40, tmp_path / "cache", 0, 1
    )
    report = corpus.report
    assert len(corpus) + report.no_anchor == 4 and report.no_anchor >= 2 and report.truncated == 1
    for a, b in itertools.pairwise(corpus.offsets):
        assert (corpus.mask[a : b - 1] & corpus.mask[a + 1 : b]).any()
    write_lines(tmp_path / "d.jsonl", [ids])
    with pytest.raises(ValueError, match="no document to train on"):
        data.load_corpus(tmp_path / "d.jsonl", tokenizer, 40, tmp_path / "cache", 0, 1)
    with pytest.raises(ValueError, match="does not exist"):
        data.load_corpus(tmp_path / "none.jsonl", tokenizer, 40, tmp_path / "cache", 0, 1)


# --- the cache


def test_cache_is_used_keyed_and_never_torn(json_base, tmp_path, monkeypatch):
    folder = model_folder(json_base, tmp_path)
    tokenizer, cache = data.load_tokenizer(folder), tmp_path / "cache"
    path = write_lines(tmp_path / "d.jsonl", [chat(), chat(answer="a green moon")])
    built = []
    build = data.build_corpus
    monkeypatch.setattr(data, "build_corpus", lambda *a: (built.append(1), build(*a)))

    def load(max_length=100, tokenizer=tokenizer):
        before = len(built)
        corpus = data.load_corpus(path, tokenizer, max_length, cache, 0, 1)
        return corpus, len(built) - before

    first, made = load()
    assert made == 1
    again, made = load()
    assert made == 0 and np.array_equal(first.tokens, again.tokens) and again.report == first.report
    for damage in (
        lambda f: (f / "tokens.bin").write_bytes((f / "tokens.bin").read_bytes()[:-4]),
        lambda f: (f / "offsets.bin").write_bytes(bytes((f / "offsets.bin").stat().st_size)),
        lambda f: (f / "meta.json").write_text((f / "meta.json").read_text()[:-5]),
        lambda f: (f / "mask.bin").unlink(),
        lambda f: shutil.rmtree(f),
    ):
        damage(first.folder)
        repaired, made = load()
        assert made == 1 and np.array_equal(first.mask, repaired.mask)
    assert load(max_length=99)[1] == 1
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": DEFAULT_SYSTEM}))
    other, made = load(tokenizer=data.load_tokenizer(folder))
    assert made == 1 and len(other.tokens) > len(first.tokens)
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"green", b"under"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time stamp, other content
    assert load()[1] == 1
    assert not list(cache.glob("*.tmp-*"))


def test_concurrent_ranks_share_one_tokenizing(json_base, tmp_path):
    folder = model_folder(json_base, tmp_path)
    rng = random.Random(4)
    path = write_lines(tmp_path / "d.jsonl", [chat(words(rng), words(rng, 20, 80)) for _ in range(500)])
    left = tmp_path / "cache"
    code = (
        "import data, sys; b = data.build_corpus\n"
        "data.build_corpus = lambda *a: (print('built', flush=True), b(*a))\n"
        f"t = data.load_tokenizer({str(folder)!r})\n"
        f"c = data.load_corpus({str(path)!r}, t, 100, {str(left)!r}, 0, 1)\n"
        "print(len(c), int(c.tokens.sum()))"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), said
    assert sum("built" in out for out, _ in said) == 1
    assert len({out.splitlines()[-1] for out, _ in said}) == 1
    assert len([p for p in left.iterdir() if p.is_dir()]) == 1


# --- packing


@pytest.mark.parametrize("seed", range(6))
def test_every_document_once_within_both_limits(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 700, rng.integers(1, 3000))
    docs = np.sort(rng.permutation(len(lengths))[: rng.integers(1, len(lengths) + 1)])
    budget, most = int(rng.integers(100, 3000)), int(rng.integers(1, 40))
    plan = data.pack(lengths, docs, budget, most, seed, window=int(rng.integers(1, 500)))
    seen = []
    for i in range(plan.batches):
        batch = plan.docs(i)
        assert 1 <= len(batch) <= most
        assert sum(min(lengths[d], budget) for d in batch) <= budget
        seen += batch.tolist()
    assert sorted(seen) == docs.tolist()
    one, two, other = (data.pack(lengths, docs, budget, most, s) for s in (seed, seed, seed + 1))
    assert one.flat.tolist() == two.flat.tolist() and one.bounds.tolist() == two.bounds.tolist()
    assert len(docs) < 10 or one.flat.tolist() != other.flat.tolist()


def test_mixed_lengths_fill_97_percent():
    rng = np.random.default_rng(0)
    for lengths in (
        rng.lognormal(5.5, 1, 10_000),
        rng.integers(10, 4096, 5_000),
        rng.choice([30, 2000], 10_000),
    ):
        lengths = np.clip(lengths.astype(int), 2, 8192)
        for budget in (16384, 49152):
            for share in (1.06, 2, 20):  # also where max_batch_size nearly binds
                most = int(share * budget / lengths.mean())
                plan = data.pack(lengths, np.arange(len(lengths)), budget, most, 1)
                assert plan.fill >= 0.97 and plan.note == "", (plan.fill, plan.note)


def test_binding_batch_size_is_said_with_the_budget_that_would_be_full():
    lengths = np.random.default_rng(0).integers(100, 300, 4000)
    docs = np.arange(4000)
    plan = data.pack(lengths, docs, 49152, 64, 0)
    assert "max_batch_size 64 binds" in plan.note and plan.fill < 0.4
    budget = int(plan.note.split("token budget of about ")[1].split()[0])
    assert data.pack(lengths, docs, budget, 64, 0).fill > 0.97
    most = int(plan.note.rsplit(" ", 1)[1])
    assert data.pack(lengths, docs, 49152, most, 0).fill > 0.95
    long = data.pack(np.array([50, 5000]), np.arange(2), 1000, 8, 0)
    assert "1 documents are longer than the token budget 1000" in long.note


def test_each_epoch_is_another_order_of_the_same_batches():
    plan = data.pack(np.full(1000, 10), np.arange(1000), 100, 50, 3)
    orders = [[plan.batch_of(e, i) for i in range(plan.batches)] for e in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(plan.batches))


# --- batches and anchors


class Documents:
    """A corpus in memory."""

    vocab_size, folder = 1000, Path("memory")

    def __init__(self, rng, lengths, share=0.6):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = rng.integers(0, 1000, self.offsets[-1]).astype(np.int32)
        self.mask = (np.convolve(rng.random(self.offsets[-1]), np.ones(5) / 5, "same") < share).astype(
            np.uint8
        )
        self.source = rng.integers(0, 3, len(lengths)).astype(np.int32)


def plain_quotas(valid: list[int], anchors: int) -> list[int]:
    """Largest remainder with exact fractions, one at a time."""
    from fractions import Fraction

    if sum(valid) <= anchors:
        return list(valid)
    share = [Fraction(anchors * v, sum(valid)) for v in valid]
    quota = [int(s) for s in share]
    while sum(quota) < anchors:
        rest = [s - q for s, q in zip(share, quota, strict=True)]
        quota[rest.index(max(rest))] += 1  # the first of equal ones: the lower document
    return quota


@pytest.mark.parametrize("seed", range(8))
def test_batch_and_anchors_equal_a_loop_written_oracle(seed):
    rng = np.random.default_rng(seed)
    T, M, A = 400, 12, [5, 40, 120, 1000][seed % 4]
    corpus = Documents(rng, rng.integers(1, 60, 30), [0.5, 0.6, 0.0, 2.0][seed // 2])
    docs = rng.permutation(30)[: rng.integers(0, 7)]
    batch = data.make_batch(corpus, docs, 17, T, M, A, seed)
    tokens, positions, doc, mask = [0] * T, [0] * T, [-1] * T, [False] * T
    bounds, sources, at = [0], [], 0
    for d, n in enumerate(docs):
        for p in range(corpus.offsets[n], corpus.offsets[n + 1]):
            tokens[at], positions[at] = int(corpus.tokens[p]), p - corpus.offsets[n]
            doc[at], mask[at] = d, bool(corpus.mask[p])
            at += 1
        bounds.append(at)
        sources.append(int(corpus.source[n]))
    assert batch.index == 17
    assert batch.tokens_T.tolist() == tokens and batch.positions_T.tolist() == positions
    assert batch.doc_T.tolist() == doc and batch.mask_T.tolist() == mask
    assert batch.cu_seqlens.tolist() == bounds + [T] * (M + 2 - len(bounds))
    assert batch.source_D.tolist() == sources + [-1] * (M - len(sources))

    valid = [[] for _ in docs]
    for p in range(T - 1):
        if mask[p] and mask[p + 1] and doc[p] == doc[p + 1] >= 0:
            valid[doc[p]].append(p)
    anchors = batch.anchors_A.tolist()
    used = [a for a in anchors if a >= 0]
    assert anchors == sorted(used) + [-1] * (A - len(used)) and len(set(used)) == len(used)
    assert all(a in valid[doc[a]] for a in used)
    assert [sum(doc[a] == d for a in used) for d in range(len(docs))] == plain_quotas(
        [len(v) for v in valid], A
    )
    dtypes = (
        batch.tokens_T,
        batch.positions_T,
        batch.doc_T,
        batch.mask_T,
        batch.anchors_A,
        batch.cu_seqlens,
        batch.source_D,
    )
    expected = [torch.int64, torch.int64, torch.int32, torch.bool, torch.int64, torch.int32, torch.int32]
    assert [x.dtype for x in dtypes] == expected


def test_quotas_break_ties_to_the_lower_document():
    assert data.anchor_quotas([1, 1, 1, 1], 2).tolist() == [1, 1, 0, 0]
    assert data.anchor_quotas([3, 0, 3], 3).tolist() == [2, 0, 1]
    assert data.anchor_quotas([2, 5], 100).tolist() == [2, 5]
    assert data.anchor_quotas([0, 0], 4).tolist() == [0, 0]


def test_anchors_follow_seed_and_index_and_are_uniform():
    doc_T = np.repeat([0, 1, -1], [60, 30, 10]).astype(np.int32)
    valid_T = doc_T >= 0
    draw = [data.draw_anchors(valid_T, doc_T, 30, 5, i) for i in range(3000)]
    assert np.array_equal(draw[7], data.draw_anchors(valid_T, doc_T, 30, 5, 7))
    assert not np.array_equal(draw[7], draw[8])
    assert not np.array_equal(draw[7], data.draw_anchors(valid_T, doc_T, 30, 6, 7))
    counts = np.bincount(np.concatenate(draw), minlength=100)
    assert counts[90:].sum() == 0
    assert abs(counts[:90] - 1000).max() < 6 * np.sqrt(3000 * (1 / 3) * (2 / 3))


def test_no_document_is_starved_of_anchors():
    """Case 26: with twice as many anchors as documents each of equal ones gets two."""
    rng = np.random.default_rng(1)
    corpus = Documents(rng, np.full(64, 100), 2.0)
    batch = data.make_batch(corpus, np.arange(64), 0, 6400, 64, 128, 0)
    assert np.bincount(batch.doc_T[batch.anchors_A], minlength=64).tolist() == [2] * 64


def test_unsupervised_short_or_no_documents_keep_every_shape():
    """Case 16: such a batch differs in values only."""
    rng = np.random.default_rng(2)
    usual = data.make_batch(Documents(rng, [20, 30]), [0, 1], 0, 64, 4, 16, 0)
    blank = data.make_batch(Documents(rng, [20, 1], 0.0), [0, 1], 1, 64, 4, 16, 0)
    none = data.empty_batch(2, 64, 4, 16)
    also_none = data.make_batch(Documents(rng, [20]), [], 2, 64, 4, 16, 0)
    for name in vars(usual):
        if name != "index":
            a, others = getattr(usual, name), [getattr(b, name) for b in (blank, none, also_none)]
            assert all(a.shape == b.shape and a.dtype == b.dtype for b in others)
            assert torch.equal(others[1], others[2])
    assert (blank.anchors_A == -1).all() and (none.anchors_A == -1).all() and (none.doc_T == -1).all()


def test_document_longer_than_the_budget_is_cut_and_too_many_are_refused():
    rng = np.random.default_rng(3)
    corpus = Documents(rng, [100, 10, 10], 2.0)
    batch = data.make_batch(corpus, [0], 0, 64, 2, 200, 0)
    assert batch.tokens_T.tolist() == corpus.tokens[:64].tolist() and batch.cu_seqlens.tolist() == [
        0,
        64,
        64,
        64,
    ]
    assert batch.anchors_A[:63].tolist() == list(range(63)) and (batch.anchors_A[63:] == -1).all()
    with pytest.raises(ValueError, match="max_batch_size 2"):
        data.make_batch(corpus, [0, 1, 2], 0, 64, 2, 8, 0)
    corpus.tokens[3] = 1000
    with pytest.raises(ValueError, match="damaged"):
        data.make_batch(corpus, [0], 0, 64, 2, 8, 0)


def test_held_out_documents_are_disjoint_and_complete():
    for n, fraction in ((1, 0.03), (2, 0.03), (100, 0.03), (1000, 0.1), (50, 0.0)):
        train, held = data.split_held_out(np.zeros(n), fraction, 7)
        assert sorted([*train, *held]) == list(range(n)) and len(train) > 0
        assert len(held) == (0 if n == 1 or fraction == 0 else max(1, round(fraction * n)))


# --- the mask token


def test_mask_token_order_of_choice(base, tmp_path):
    named = data.load_tokenizer(model_folder(base, tmp_path, mask_token="<|extra|>"))
    rows, extra = named.vocab_size, named.added["<|extra|>"]
    assert data.choose_mask_token(named, rows + 5, None) == extra
    assert data.choose_mask_token(named, rows, None, override=3) == 3
    with pytest.raises(ValueError, match="--mask-token-id"):
        data.choose_mask_token(named, rows, None, override=rows)
    plain = data.load_tokenizer(model_folder(base, tmp_path))
    assert data.choose_mask_token(plain, rows + 5, None) == rows
    unused = sorted((i for i in plain.special_ids if i not in {plain.bos_id, *plain.eos_ids}), reverse=True)
    in_template = {plain.added["<|im_start|>"], plain.added["<|im_end|>"]}
    assert data.choose_mask_token(plain, rows, None) == next(i for i in unused if i not in in_template)


@pytest.mark.parametrize("wrong", ["</s>", "<s>"])
def test_mask_token_is_never_end_begin_or_padding_and_never_one_that_occurs(base, tmp_path, wrong):
    """Case 29: pad equals eos, the named mask token is one of them, every special token is in use."""
    tokenizer = data.load_tokenizer(model_folder(base, tmp_path, mask_token=wrong, pad_token="</s>"))
    assert tokenizer.pad_id in tokenizer.eos_ids
    used = {tokenizer.added["<|im_start|>"], tokenizer.added["<|im_end|>"]}
    ids = {"input_ids": [tokenizer.added["<|extra|>"]] * 3, "loss_mask": [0, 1, 1]}
    path = write_lines(tmp_path / "d.jsonl", [chat(), ids])
    corpus = data.load_corpus(path, tokenizer, 50, tmp_path / "cache", 0, 1)
    assert set(corpus.report.special_seen) == used | {tokenizer.added["<|extra|>"]}
    special = sorted(set(tokenizer.special_ids) - {tokenizer.bos_id, tokenizer.pad_id} - used, reverse=True)
    for expected in special:
        if expected not in corpus.report.special_seen:
            assert data.choose_mask_token(tokenizer, tokenizer.vocab_size, corpus) == expected
            corpus.report.special_seen.append(expected)
    with pytest.raises(ValueError, match="--mask-token-id"):
        data.choose_mask_token(tokenizer, tokenizer.vocab_size, corpus)


def test_command_line_reports_and_refuses_in_one_line(json_base, tmp_path):
    folder = model_folder(json_base, tmp_path)
    path = write_lines(tmp_path / "d.jsonl", [chat(), b"oops"])
    command = [sys.executable, str(ROOT / "data.py"), "--target", str(folder), str(path)]
    good = subprocess.run(command, capture_output=True, text=True)
    assert good.returncode == 0 and "1 documents" in good.stdout and "d.jsonl:2: not JSON" in good.stdout
    bad = subprocess.run([*command, "--max-bad-lines", "0"], capture_output=True, text=True)
    assert bad.returncode == 1 and "Traceback" not in bad.stderr and "bad lines" in bad.stderr


@pytest.mark.parametrize("usable", [True, False])
def test_command_line_prints_every_bad_line(json_base, tmp_path, usable):
    """Also where training would have given up, or has kept the first ones only; then with exit code 1."""
    folder = model_folder(json_base, tmp_path)
    one = write_lines(tmp_path / "one.jsonl", [*[b"oops"] * 150, chat() if usable else b"oops"])
    two = write_lines(tmp_path / "two.jsonl", [{"text": 5}, {"prompt": "a"}] * 500)
    cache = tmp_path / "cache"
    if usable:
        data.load_corpus([one, two], data.load_tokenizer(folder), 4096, cache, 2000)
    command = [sys.executable, str(ROOT / "data.py"), "--target", str(folder), str(one), str(two)]
    done = subprocess.run([*command, "--cache", str(cache)], capture_output=True, text=True)
    told = done.stdout.splitlines()
    first = [f"bad line {one}:{n}:" for n in range(1, 151 if usable else 152)]
    wanted = first + [f"bad line {two}:{n}:" for n in range(1, 1001)]
    bad = [line for line in told if line.startswith("bad line ")]
    assert [line[: len(want)] for line, want in zip(bad, wanted, strict=True)] == wanted
    rest = told[len(bad) :]
    assert rest[:2] == [f"{one}: {len(first)} bad lines", f"{two}: 1,000 bad lines"]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert ("data.py: more than 100 bad lines" if usable else "no document to train on") in done.stderr


def test_command_line_takes_what_training_takes(json_base, tmp_path):
    folder = model_folder(json_base, tmp_path)
    path = write_lines(tmp_path / "d.jsonl", [chat(), *[b"oops"] * 100])
    command = [sys.executable, str(ROOT / "data.py"), "--target", str(folder), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("bad line ") == 100


def test_command_line_counts_what_training_counts(tmp_path, capsys, monkeypatch):
    """Without flags: of the built-in target, cut where train.py cuts."""
    asked, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "so " * 2000}
    path = write_lines(tmp_path / "d.jsonl", [{"messages": [asked, answer]}] * 3)
    monkeypatch.setattr(sys, "argv", ["data.py", str(path)])
    assert data.main() == 0
    tiny = train.TINY
    c = train.resolve(train.parse_flags(["--data", str(path)]), TargetConfig.from_folder(tiny), 1, 1)
    report = data.load_corpus(
        [path], data.load_tokenizer(tiny), c.max_length, tmp_path / "cache", None
    ).report
    told = capsys.readouterr().out
    assert told.startswith(f"{report}; max_length {c.max_length}; ") and "3 cut to max_length" in told
