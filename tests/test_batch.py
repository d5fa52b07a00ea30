"""diagnose.batch: a healthy batch is ok whatever the template; each planted fault is found with a fix."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data
import train
from diagnose import batch
from diagnose.report import Report

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "assets" / "tiny"
CHECKS = {
    "positions": batch.check_positions,
    "headers": batch.check_headers,
    "supervised": batch.check_turns,
    "end of turn": batch.check_end_of_turn,
    "anchors": batch.check_anchors,
    "coverage": batch.check_coverage,
    "text": batch.check_text,
    "fill": batch.check_fill,
    "mask token": batch.check_mask_token,
}


@pytest.fixture(autouse=True, scope="session")
def token_cache(tmp_path_factory):
    before, train.USER_CACHE = train.USER_CACHE, tmp_path_factory.mktemp("cache")
    yield
    train.USER_CACHE = before


@pytest.fixture
def view(small) -> batch.View:
    return batch.look(batch.Run.from_flags([*small, "--token-budget", "512"]), 1)


def states(view: batch.View) -> dict[str, str]:
    """What every check says; all but ok carry a fix."""
    found = {name: check(view) for name, check in CHECKS.items()}
    for finding in found.values():
        assert finding.fix or finding.state == "ok"
        if finding.fix:
            subprocess.run(["bash", "-n", "-c", finding.fix], check=True)
    return {name: f.state for name, f in found.items()}


def only(view: batch.View, **bad: str) -> None:
    """These checks, and no others, are not ok."""
    want = dict.fromkeys(CHECKS, "ok") | {name.replace("_", " "): state for name, state in bad.items()}
    assert states(view) == want


def folder_with(tmp_path: Path, template: str | None) -> Path:
    """The built-in target's tokenizer under another chat template; no weights: no batch needs them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.model"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def look_at(tmp_path: Path, records: list[dict], template: str | None = None, *flags: str) -> batch.View:
    """The first batch of a small data set, by default under the built-in template."""
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    folder = folder_with(tmp_path, template if template is not None else config["chat_template"])
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    files = ["--target", str(folder), "--data", str(file), "--eval-data", str(file)]
    return batch.look(batch.Run.from_flags([*files, "--token-budget", "512", *flags]), 0)


def chat(*turns: str, **more) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)], **more}


TALK = [
    chat("Count the blue kettles.", "There are 12 kettles.", "And the pears?", "a|b|c\n1"),
    chat("user", "assistant"),
    chat("a", "The word <|x|> is not a token.  ", source="odd"),
    {"prompt": "Say it in Ünïcödé", "response": "Grüße, 世界 🙂!"},
    {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello there, friend."}]},
    {"text": "A plain text, all of it supervised but its first token."},
    chat("Begin a story.", "Once upon a", finished=False),
]


# ---------------------------------------------------------------- healthy


def test_healthy(view):
    only(view)
    assert len(view.documents) > 3 and all(d.kind == "chat" and d.line for d in view.documents)
    assert view.header == "<|assistant|>" and view.end_of_turn == "<|end|>"
    assert sum(len(d.ids) for d in view.documents) == int((view.batch.doc_T >= 0).sum())


TEMPLATES = {
    "own": None,
    "no header": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content.strip() }}<|end|>{% endif %}{% endfor %}",
    "header in words": "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}<|end|>\n\n{% endfor %}",
    "a system turn": "<s><|system|>\nYou answer the user.<|end|>\n{% for m in messages %}<|{{ m.role }}|>\n"
    "{{ m.content | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_healthy_templates(tmp_path, name):
    view = look_at(tmp_path, TALK, TEMPLATES[name])
    only(view)
    assert len(view.documents) == len(TALK), "some documents are not in the batch"
    assert {d.kind for d in view.documents} == {"chat", "text"}
    assert {d.line for d in view.documents} == {f"records.jsonl:{n + 1}" for n in range(len(TALK))}


def test_thinking_that_the_template_drops_or_rewrites(tmp_path):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if '</think>' in m.content and loop.last %}"
        "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
        "{{ m.content.split('</think>')[-1].strip() }}"
        "{% else %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}<|end|>\n{% endfor %}"
    )
    turns = ("Two and two?", "<think>2+2=4</think>It is 4.", "Sure?", "<think>\nyes\n</think>\n\nYes, 4.")
    view = look_at(tmp_path, [chat(*turns), chat("Hello?", "No thought here.")], template)
    only(view)


def test_without_a_template(tmp_path):
    pairs = [{"prompt": f"Number {n}: ", "response": f"it is {n}."} for n in range(5)]
    view = look_at(tmp_path, pairs, "")
    only(view)
    assert {d.kind for d in view.documents} == {"pair"}


def test_lines_are_found_behind_bad_and_blank_ones(tmp_path):
    good = chat("Who?", "Nobody, I think.")
    file = tmp_path / "some.jsonl"
    lines = ["", "{broken", json.dumps(chat("q", "")), json.dumps(good), "", json.dumps(good)]
    file.write_text("\n".join(lines) + "\n")
    flags = ["--data", str(file), "--eval-data", str(file), "--token-budget", "128"]
    view = batch.look(batch.Run.from_flags(flags), 0)
    assert sorted(d.line for d in view.documents) == ["some.jsonl:4", "some.jsonl:6"]
    only(view)


BAD_RECORDS = [
    {"question": "a", "answer": "b"}, {"prompt": "a"}, {"text": 5}, {"text": None}, {"text": " "}, {},
    {"prompt": "a", "response": 5}, {"prompt": None, "response": "b"}, {"prompt": "a", "response": ""},
    {"input_ids": 5, "loss_mask": 5}, {"input_ids": [5, "x"], "loss_mask": [1, 1]}, {"input_ids": [5]},
    {"messages": None}, {"messages": [5]}, {"messages": [], "prompt": "a"}, {"conversations": {}},
    {"messages": [{"role": "tool", "content": "a"}]}, {"text": "Good text.", "source": 5},
]  # fmt: skip


@pytest.mark.parametrize("template", [None, ""])
def test_lines_that_training_skips_are_skipped(tmp_path, template):
    """Before, between and after good ones: nothing crashes, and no document is said to come from them."""
    records = [r for bad in BAD_RECORDS for r in (bad, {"text": "Good text."})]
    view = look_at(tmp_path, [*records, *BAD_RECORDS], template)
    assert view.run.batches.corpus.report.bad == 2 * len(BAD_RECORDS)
    lines = sorted(int(d.line.rpartition(":")[2]) for d in view.documents)
    assert lines == list(range(2, 2 * len(BAD_RECORDS) + 1, 2))
    only(view)


def test_cut_documents(tmp_path):
    view = look_at(tmp_path, [chat("Tell me.", "word " * 400 + "é")] * 2, None, "--max-length", "100")
    only(view)
    assert all(d.cut and len(d.ids) == 100 for d in view.documents)


def test_characters_of_tokens():
    """Each token's span is what decoding one token more adds."""
    tokenizer = data.load_tokenizer(TINY)
    for text in ("<|user|>\nHello there<|end|>", "Grüße, 世界 🙂!", "  two  spaces "):
        ids = tokenizer.encode(text)
        for cut in (ids, ids[:-1], [*ids, 3, *ids]):
            got, spans = batch.characters(tokenizer, cut)
            assert got == tokenizer.decode(cut) and len(spans) == len(cut)
            assert all(0 <= a <= b <= len(got) for a, b in spans)
            assert all(a[1] <= b[1] for a, b in itertools.pairwise(spans))


# ---------------------------------------------------------------- planted faults


def token_at(d: batch.Document, text: str) -> int:
    at = d.text.rindex(text)
    return next(i for i, (a, b) in enumerate(d.spans) if a <= at < b)


def test_a_supervised_header(view):
    d = view.documents[0]
    d.supervised[token_at(d, "<|assistant|>")] = True
    found = batch.check_headers(view)
    assert found.state == "FAIL" and "<|assistant|>" in found.message and "chat template" in found.fix
    assert d.line in found.message and batch.check_turns(view).state == "FAIL"


def test_a_supervised_question_and_an_unsupervised_answer(view):
    d = view.documents[0]
    d.supervised[2] = True
    only(view, supervised="FAIL")
    d.supervised[2] = False
    d.supervised[token_at(d, "<|end|>") - 3] = False
    assert "not supervised" in batch.check_turns(view).message


def test_an_unsupervised_end_of_turn(view):
    d = view.documents[-1]
    d.supervised[token_at(d, "<|end|>")] = False
    assert batch.check_end_of_turn(view).state == "FAIL"


def ids_record(extra: list[int] = (), end: int = 1) -> dict:
    """A conversation given as ids; `extra` are supervised although they should not be."""
    tokenizer = data.load_tokenizer(TINY)
    try:
        ids, mask = tokenizer.encode_chat(chat("Which one?", "The green one.")["messages"])
    finally:
        tokenizer.close()
    for i in extra:
        mask[i] = 1
    last = max(i for i, token in enumerate(ids) if tokenizer.decode([token]) == "<|end|>")
    mask[last] = end
    return {"input_ids": ids, "loss_mask": mask, "header": ids.index(tokenizer.added["<|assistant|>"])}


def test_masks_given_with_the_data(tmp_path):
    """No template decides here: the record says who is supervised."""
    good = ids_record()
    for number, (record, bad) in enumerate(
        [
            (good, {}),
            (ids_record([good["header"]]), {"headers": "FAIL", "supervised": "FAIL"}),
            (ids_record([1, 2]), {"supervised": "FAIL"}),
            (ids_record(end=0), {"end_of_turn": "warn"}),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        view = look_at(place, [good, record])
        only(view, **bad)
        assert {d.kind for d in view.documents} == {"ids"}
        if bad:
            name = next(iter(bad)).replace("_", " ")
            assert "loss_mask of records.jsonl:2" in CHECKS[name](view).fix or bad == {"end_of_turn": "warn"}


def test_a_template_without_an_end_of_turn(tmp_path):
    view = look_at(
        tmp_path, TALK[:3], "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    )
    only(view, end_of_turn="warn")


@pytest.mark.parametrize("fault", ["unsorted", "twice", "unused first", "not valid", "first ones"])
def test_wrong_anchors(small, monkeypatch, fault):
    draw = data.draw_anchors

    def wrong(valid_T, doc_T, anchors, seed, index):
        drawn_A = draw(valid_T, doc_T, anchors, seed, index)
        if fault == "unsorted":
            return drawn_A[::-1].copy()
        if fault == "twice":
            drawn_A[1] = drawn_A[0]
        if fault == "unused first":
            drawn_A[0] = -1
        if fault == "not valid":
            drawn_A[0] = 0
        return np.flatnonzero(valid_T)[:anchors] if fault == "first ones" else drawn_A

    monkeypatch.setattr(data, "draw_anchors", wrong)
    view = batch.look(batch.Run.from_flags([*small, "--token-budget", "512"]), 1)
    fixes = [check(view).fix for check in (batch.check_anchors, batch.check_coverage)]
    assert all(fix.startswith("git stash push -- data.py ") for fix in fixes if fix)
    assert states(view)["coverage" if fault == "first ones" else "anchors"] == "FAIL"


def test_wrong_positions_and_bounds(view):
    start = view.documents[1].start
    view.batch.positions_T[start:] += 1
    only(view, positions="FAIL")
    view.batch.positions_T[start:] -= 1
    view.batch.cu_seqlens[1] += 1
    only(view, positions="FAIL")


def test_text_that_is_not_what_was_written(view):
    d = view.documents[1]
    d.rendered = d.rendered.replace("\n", "\n ", 1)
    only(view, text="warn")
    d.rendered = "Something else"
    assert batch.check_text(view).state == "FAIL"
    d.kind = ""
    assert "token cache" in batch.check_text(view).message


def test_a_spoiled_token_cache_is_found_and_the_fix_works_when_pasted(small, tmp_path, monkeypatch):
    """A valid cache of other tokens, as a disk gone bad or an edit of data.py leaves it."""
    monkeypatch.setattr(train, "USER_CACHE", tmp_path)
    flags = [*small, "--token-budget", "512"]
    folder = batch.Run.from_flags(flags).batches.corpus.folder
    file = folder / "tokens.bin"
    tokens_N = np.fromfile(file, np.int32)
    file.chmod(0o600)
    np.where(tokens_N == tokens_N[40], 9, tokens_N).astype(np.int32).tofile(file)
    found = batch.check_text(batch.look(batch.Run.from_flags(flags), 1))
    assert found.state == "FAIL"
    subprocess.run(found.fix, shell=True, check=True)
    only(batch.look(batch.Run.from_flags(flags), 1))


def test_a_mask_token_that_the_data_use(small):
    view = batch.look(batch.Run.from_flags([*small, "--mask-token-id", "8"]), 0)
    found = batch.check_mask_token(view)
    assert found.state == "FAIL" and "--mask-token-id" in found.message
    flags = shlex.split(found.fix, comments=True)[3:]
    assert batch.check_mask_token(batch.look(batch.Run.from_flags(flags), 0)).state == "ok", "no help"
    view = batch.look(batch.Run.from_flags([*small, "--mask-token-id", "0"]), 0)
    assert batch.check_mask_token(view).state == "warn"


def test_a_batch_size_that_binds(small):
    view = batch.look(batch.Run.from_flags([*small, "--token-budget", "1024", "--max-batch-size", "2"]), 0)
    found = batch.check_fill(view)
    assert found.state == "warn" and "--max-batch-size" in found.fix
    flags = found.fix.split("diagnose.batch ")[1].split()
    assert batch.check_fill(batch.look(batch.Run.from_flags(flags), 0)).state == "ok", "the fix does not help"


def test_a_template_that_leaves_the_answers_out_is_a_finding(tmp_path, capsys):
    folder = folder_with(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    flags = ["--target", str(folder), "--data", str(TINY / "eval.jsonl"), "--eval-data"]
    assert batch.main([*flags, str(TINY / "eval.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "leaves out answer" in out and "fix: python data.py" in out
    assert out.splitlines()[-1] == "NOT READY: 1 FAIL (data)"


# ---------------------------------------------------------------- the script


def test_output_and_verdict(small, tmp_path, capsys):
    png, found = tmp_path / "batch.png", tmp_path / "batch.json"
    assert batch.main([*small, "--png", str(png), "--json", str(found), "--strict", "--documents", "0"]) == 0
    out = capsys.readouterr().out
    shown = out.split("[ok] positions")[0].split("\n", 1)[1]
    assert max(map(len, shown.splitlines())) <= 100 and "\033" not in out
    assert "⟦" in shown and "<|end|>⟧" in shown and "▸" in shown and "more documents" not in shown
    content = json.loads(found.read_text())
    assert content["verdict"] == "READY" and sum(d["anchors"] for d in content["documents"]) == 32
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("colour", [False, True])
def test_text_is_shown_whole_in_100_columns_and_safely(tmp_path, colour):
    answer = "世界 " * 60 + "\033[2J danger \u202e e\u0301"
    view = look_at(tmp_path, [chat("Show it.", answer), chat("a", "b c d")])
    for d in view.documents:
        lines = batch.lines_to_show(d, colour)
        plain = [re.sub(r"\033\[[0-9;]*m", "", line) for line in lines]
        assert all(sum(map(batch.width_of, line)) <= 100 for line in plain)
        assert not any("\033" in line or "\u202e" in line for line in plain)
        joined = "".join(line[2:] for line in plain).replace("▸", "")
        assert ("<|assistant|>↵⟦" in joined and "<|end|>⟧" in joined) != colour
        green = [
            re.sub(r"\033\[[0-9;]*m", "", g) for g in re.findall(r"\033\[32m(.*?)\033\[0m", "".join(lines))
        ]
        assert not colour or ("<|assistant|>" not in "".join(green) and "<|end|>" in "".join(green))


@pytest.mark.parametrize(
    "flags",
    [
        ["--index", "-1"],
        ["--no-such-flag"],
        ["--data", "/no/such/file.jsonl"],
        ["--token-budget", "100"],
        ["--target", "/no/such/model", "--data", str(TINY / "eval.jsonl")],
        ["--png", "/no/such/folder/batch.png"],
    ],
)
def test_usage_errors_are_one_line(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        batch.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("diagnose.batch: ") and error.count("\n") == 1


def test_a_batch_of_weight_zero(small, capsys):
    run = batch.Run.from_flags([*small, "--batches-per-step", "1000"])
    view = batch.look(run, run.batches.plan.batches)
    only(view)
    batch.show(Report("batch"), view, 6, False)
    assert "weight zero" in capsys.readouterr().out


def test_flags_of_a_split_run_give_the_same_batch(small):
    """--drafters and --layout of the pasted launch command change no batch."""
    one = batch.Run.from_flags(small).batches.train(3)
    other = batch.Run.from_flags([*small, "--drafters", "3", "--layout", "split"]).batches.train(3)
    assert one.tokens_T.equal(other.tokens_T) and one.anchors_A.equal(other.anchors_A)


def test_script_runs_from_anywhere(small, tmp_path):
    """`python diagnose/batch.py`, as its docstring's other form, on a console that knows only ASCII."""
    command = [sys.executable, str(ROOT / "diagnose" / "batch.py"), "--documents", "1", "--strict", *small]
    environ = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "READY (10 ok)"
