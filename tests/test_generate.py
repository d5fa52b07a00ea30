"""pytest tests/test_generate.py: answers are the target's own, and none is lost or made twice.

V vocabulary, P rows.
"""

import collections
import http.server
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY
from launch import ROOT, environment
from test_decode import STOP, TARGETS, greedy, make_target

import compile_utils
import data
import decode
import generate
from decode import Prompt
from generate import Writer
from model import Target

EVAL = TINY / "eval.jsonl"
LENGTHS = (70, 5, 33, 1, 14, 40, 9)  # of prompts: padded to 64 and to 96, in chunks of 32


def make_prompts(target: Target, new: int = 20) -> list[Prompt]:
    random = torch.Generator().manual_seed(11)
    drawn = [torch.randint(2, target.c.vocab - 1, (n,), generator=random).tolist() for n in LENGTHS]
    return [Prompt(ids, len(ids) + new - i, "", f"prompt {i}") for i, ids in enumerate(drawn)]


def write(target, prompts, rows, temperature=0.0, steps=1, lag=0, keys=None, stops=(STOP,)):
    writer = Writer(target, list(stops), rows, max(p.limit for p in prompts) + 1, temperature)
    writer.steps, writer.lag, writer.few = steps, lag, min(2, rows)  # as on a GPU
    keys = keys or [1000 + i for i in range(len(prompts))]
    found = dict(writer.answers(prompts, keys))
    assert sorted(found) == list(range(len(prompts)))
    return [found[i] for i in range(len(prompts))]


@pytest.fixture
def small_prefills(monkeypatch):
    for name, size in (("PREFILL", 300), ("CHUNK", 32), ("FEW", 2)):
        monkeypatch.setattr(generate, name, size)


# ---------------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_answers_are_the_targets_own(name, small_prefills):
    """However many rows there are, and however late the host sees that one of them has ended."""
    target = make_target(**TARGETS[name])
    prompts = make_prompts(target)
    whole = [greedy(target, p) for p in prompts]
    longest = max(whole, key=len)
    stops = {longest[5], whole[2][0], STOP}
    wanted = [w[: next((n for n, i in enumerate(w, 1) if i in stops), None)] for w in whole]
    assert 1 in map(len, wanted) and longest not in wanted and any(map(list.__eq__, wanted, whole))
    for rows, steps, lag in ((1, 1, 0), (2, 3, 1), (3, 1, 1), (7, 8, 1)):
        assert write(target, prompts, rows, steps=steps, lag=lag, stops=stops) == wanted, (rows, steps, lag)


def test_samples_depend_on_their_key_only(small_prefills):
    target = make_target()
    prompts = make_prompts(target)
    alone = write(target, prompts, 1, temperature=1.0)
    assert write(target, prompts, 3, temperature=1.0, steps=4, lag=1) == alone
    keys = [1000 + i for i in range(len(prompts))]
    assert write(target, prompts[::-1], 2, temperature=1.0, keys=keys[::-1]) == alone[::-1]
    other = write(target, prompts, 3, temperature=1.0, keys=[-k for k in keys])
    assert sum(a != b for a, b in zip(alone, other, strict=True)) >= 6


@torch.no_grad()
def test_samples_are_distributed_as_the_target_says():
    """Whole answers of up to three tokens, against the chain rule over whole forward passes."""
    target, temperature, times, new = make_target(V=5, spread=1.5), 1.3, 4000, 3
    ids = [3, 4, 2]

    def expect(more: tuple, count: float) -> dict[tuple, float]:
        if len(more) == new or STOP in more:
            return {more: count}
        logits = decode.next_logits(target, [*ids, *more], 256)
        chances = torch.softmax(logits.double() / temperature, -1).tolist()
        parts = [expect((*more, token), count * p) for token, p in enumerate(chances)]
        return dict(itertools.chain(*(part.items() for part in parts)))

    expected = expect((), times)
    prompts = [Prompt(ids, len(ids) + new, "", "")] * times
    seen = collections.Counter(map(tuple, write(target, prompts, 1000, temperature)))
    assert set(seen) <= set(expected)
    common = [pair for pair, n in expected.items() if n > 5]
    chi2 = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in common)
    assert len(common) > 20 and chi2 < len(common) + 4 * (2 * len(common)) ** 0.5, (chi2, len(common))


def test_random_numbers_are_splitmix64():
    def oracle(key: int, count: int) -> float:
        mask = (1 << 64) - 1
        x = (key + count * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return ((x ^ x >> 31) >> 11) / 2**53

    pairs = list(itertools.product([0, 1, -1, 1 << 62, -(1 << 63), 12345678901234567], [0, 1, 2, 999]))
    keys, counts = torch.tensor(pairs).unbind(1)
    assert generate.uniform(keys, counts).tolist() == [oracle(*pair) for pair in pairs]


def test_sizes_are_few_and_large_enough():
    for need, size in ((1, 64), (64, 64), (65, 96), (97, 128), (129, 192), (193, 256), (1000, 1024)):
        assert generate.size_at_least(need, 4096) == size
    assert generate.size_at_least(300, 320) == 320


@pytest.mark.skipif(bool(compile_utils.why_eager("cpu")), reason="nothing compiles here")
def test_compiled_steps_give_the_same_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = make_target()
    prompts = make_prompts(target, new=9)
    writer = Writer(target, [STOP], 3, max(p.limit for p in prompts) + 1)
    writer.compile()
    writer.warm_up()
    compiled = compile_utils.counters().frames
    found = dict(writer.answers(prompts, [0] * len(prompts)))
    assert [found[i] for i in range(len(prompts))] == [greedy(target, p) for p in prompts]
    assert compile_utils.counters().frames == compiled == 2  # rows grow, nothing is compiled again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_write_the_same(compiled, small_prefills):
    target = make_target()
    prompts = make_prompts(target)
    wanted = [greedy(target, p) for p in prompts]
    target = target.cuda()
    for temperature in (0.0, 1.0):
        found = []
        for rows in (2, 5):
            writer = Writer(target, [STOP], rows, max(p.limit for p in prompts) + 1, temperature)
            if compiled:
                writer.compile()
                writer.warm_up()
            keys = [1000 + i % len(prompts) for i in range(4 * len(prompts))]
            answers = dict(writer.answers(prompts * 4, keys))
            assert {key[0] for key in writer.graphs} == {"step", "admit"}
            found += [[answers[i] for i in range(n, n + len(prompts))] for n in range(0, len(keys), 7)]
        assert all(answers == (wanted if not temperature else found[0]) for answers in found)


# ---------------------------------------------------------------------------------------------------------
# The command


def run(*flags: object, code: int = 0) -> None:
    assert generate.main([str(f) for f in flags]) == code


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def some(tmp_path) -> Path:
    """Recorded conversations of the built-in target: its own greedy answers."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(EVAL.read_text().splitlines(keepends=True)[:24]))
    return path


def test_the_output_is_training_data_of_the_same_tokens(some, tmp_path, capsys):
    """Read as train.py reads it, each answer is supervised and is, token for token, what the target said."""
    out = tmp_path / "out.jsonl"
    run("--prompts", some, "--out", out)
    found, recorded = lines(out), lines(some)
    assert [r["messages"] for r in found] == [r["messages"] for r in recorded]
    assert [r["source"] for r in found] == [r["source"] for r in recorded]
    assert all(r["finished"] for r in found)
    tokenizer, target = data.load_tokenizer(TINY), Target.load(TINY)
    corpus = data.load_corpus(out, tokenizer, 512, tmp_path / "tokens", max_bad_lines=0)
    stops = decode.stop_tokens(tokenizer)
    for record, low, high in zip(found[:4], corpus.offsets, corpus.offsets[1:], strict=False):
        prompt = decode.prompt_ids(record, tokenizer, False)[0]
        ids, mask = corpus.tokens[low:high].tolist(), corpus.mask[low:high].tolist()
        answer = ids[len(prompt) : len(prompt) + record["tokens"]]
        assert ids[: len(prompt)] == prompt and all(mask[len(prompt) :][: record["tokens"]])
        assert answer[-1] in stops and not any(i in stops for i in answer[:-1])
        for n in range(len(answer)):
            assert int(decode.next_logits(target, prompt + answer[:n], 512).argmax()) == answer[n]
    tokenizer.close()
    total = sum(r["tokens"] for r in found)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"{out}: 24 answers, {total:,} tokens, ") and said.endswith(" tokens/s")


def test_every_shape_of_prompt_and_what_is_kept(tmp_path, capsys):
    ask = "Saven keeps 2 old buttons in Tarden. Vataro comes from Halmar at 9. Swap the two places."
    tell = {"role": "assistant", "content": "recorded"}
    user = {"role": "user", "content": ask}
    records = [
        {"messages": [user, tell, user, tell], "id": 7, "finished": False, "source": "mine"},
        {"messages": [user, tell, user]},
        {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": "recorded"}], "k": [1]},
        {"prompt": ask, "response": "recorded"},
        {"prompt": ask},
        {"text": "The lamps are "},
        {"prompt": "a b c d e f g h " * 200},
    ]
    prompts, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(r) + "\n\n" for r in records))
    run("--prompts", prompts, "--out", out, "--max-new-tokens", 30)
    found = lines(out)
    assert len(found) == 6
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"1 prompt(s) left out, the first: {prompts}:13: longer than 511 tokens"
    assert [m["role"] for m in found[0]["messages"]] == ["user", "assistant"] * 2
    assert found[0]["messages"][:3] == [user, tell, user] == found[1]["messages"][:3]
    assert found[0]["id"] == 7 and found[0]["source"] == "mine" and found[1]["source"] == "asked"
    assert found[0]["messages"] == found[1]["messages"] and found[0]["prompt_id"] != found[1]["prompt_id"]
    assert found[2]["k"] == [1] and "conversations" not in found[2]
    assert found[2]["messages"] == found[3]["messages"] == found[4]["messages"]
    assert found[2]["messages"][:1] == [user] and found[2]["messages"][1]["content"] != "recorded"
    assert "prompt" not in found[3] and "response" not in found[3]
    text = found[5]
    assert text["text"].startswith("The lamps are ") and sum(text["loss_mask"]) == text["tokens"]
    corpus = data.load_corpus(out, data.load_tokenizer(TINY), 512, tmp_path / "tokens", max_bad_lines=0)
    assert corpus.tokens[corpus.offsets[5] :].tolist() == text["input_ids"]


@pytest.fixture
def dialogues(tmp_path) -> tuple[Path, list[dict]]:
    """(conversations of two turns with strange answers, the same with the built-in target's own)."""
    recorded = [r for r in lines(EVAL) if len(r["messages"]) > 2][:10]
    path, strange = tmp_path / "dialogues.jsonl", {"role": "assistant", "content": "Never mind."}
    for record in recorded:
        asked = [m if m["role"] == "user" else strange for m in record["messages"]]
        with path.open("a") as file:
            file.write(json.dumps(record | {"messages": asked}) + "\n")
    return path, recorded


def test_every_turn_is_answered_after_the_new_answers(dialogues, tmp_path):
    """In few rows, so that later turns are queued beside first ones."""
    path, recorded = dialogues
    for rows in (3, 32):
        out = tmp_path / f"{rows}.jsonl"
        run("--prompts", path, "--out", out, "--every-turn", "--batch-size", rows)
        assert [r["messages"] for r in lines(out)] == [r["messages"] for r in recorded]
        assert all(r["tokens"] > 20 and r["finished"] for r in lines(out))
    run("--prompts", path, "--out", tmp_path / "last.jsonl")
    assert {r["messages"][1]["content"] for r in lines(tmp_path / "last.jsonl")} == {"Never mind."}


def test_a_conversation_that_the_template_refuses_later_is_left_out(dialogues, tmp_path, capsys, monkeypatch):
    path, recorded = dialogues
    prompt_ids, first = decode.prompt_ids, recorded[3]["messages"][0]

    def refuse(record, *more):
        if record["messages"][0] == first and len(record["messages"]) > 1:
            raise ValueError("no more of this")
        return prompt_ids(record, *more)

    monkeypatch.setattr(decode, "prompt_ids", refuse)
    run("--prompts", path, "--out", tmp_path / "out.jsonl", "--every-turn")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"1 prompt(s) left out, the first: {path}:4: no more of this"
    others = [r["messages"] for r in recorded if r != recorded[3]]
    assert [r["messages"] for r in lines(tmp_path / "out.jsonl")] == others


def test_a_conversation_ends_where_an_answer_is_cut(dialogues, tmp_path):
    path, recorded = dialogues
    run("--prompts", path, "--out", tmp_path / "out.jsonl", "--every-turn", "--max-new-tokens", 20)
    found = lines(tmp_path / "out.jsonl")
    assert {len(r["messages"]) for r in found} == {2, 4}
    for r, w in zip(found, recorded, strict=True):
        *before, last = r["messages"]
        assert before == w["messages"][: len(before)] and last["role"] == "assistant"
        assert w["messages"][len(before)]["content"].startswith(last["content"])
        assert r["finished"] == (last == w["messages"][len(before)])
        assert r["finished"] <= (len(r["messages"]) == 4)


def test_answers_that_are_cut_are_marked_and_not_taught_to_end(some, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    run("--prompts", some, "--out", out, "--max-new-tokens", 16)
    found, whole = lines(out), lines(some)
    cut = [r for r in found if not r["finished"]]
    assert 0 < len(cut) and all(r["tokens"] == 16 for r in cut)
    assert f"| {len(cut)} cut (finished: false)" in capsys.readouterr().out
    for r, w in zip(found, whole, strict=True):
        assert w["messages"][-1]["content"].startswith(r["messages"][-1]["content"])
    tokenizer = data.load_tokenizer(TINY)
    corpus = data.load_corpus(out, tokenizer, 512, tmp_path / "tokens", max_bad_lines=0)
    for r, low, high in zip(found, corpus.offsets, corpus.offsets[1:], strict=False):
        last = corpus.tokens[low:high][corpus.mask[low:high] > 0][-1]
        assert (last in decode.stop_tokens(tokenizer)) == r["finished"]
        prompt = decode.prompt_ids(r, tokenizer, False)[0]
        assert corpus.mask[low:high][len(prompt) :].sum() == r["tokens"]


def test_samples_of_a_seed_are_the_same_in_any_batch(some, tmp_path):
    files = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for file, rows, seed in zip(files, (3, 8, 8), (5, 5, 6), strict=True):
        run("--prompts", some, "--out", file, "--temperature", 1.5, "--seed", seed, "--batch-size", rows,
            "--max-new-tokens", 24)  # fmt: skip
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()


# ---------------------------------------------------------------------------------------------------------
# Stopped and started again


def start(home: Path, *flags: object) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "generate.py"), *map(str, flags)]
    return subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_at(process: subprocess.Popen, folder: Path, least: int) -> int:
    """Kill a run as soon as so many answers are there; how many were."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        count = sum(p.read_bytes().count(b"\n") for p in folder.glob("*.jsonl"))
        assert process.poll() is None, process.stdout.read().decode()
        if count >= least:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return sum(p.read_bytes().count(b"\n") for p in folder.glob("*.jsonl"))


def in_two_ranks(rank: int) -> None:
    """What a rank of the test below runs, forked with torchrun's environment."""
    import os

    code = generate.main(json.loads(os.environ["GENERATE"]))
    if code:
        raise SystemExit(code)


def test_killed_anywhere_and_resumed_on_two_ranks_gives_the_same_file(tmp_path, launcher):
    prompts, whole, out = tmp_path / "asked.jsonl", tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(EVAL.read_text().splitlines(keepends=True)[:60]))
    run("--prompts", prompts, "--out", whole)
    flags = ["--prompts", str(prompts), "--out", str(out)]
    parts = Path(f"{out}.parts")
    first = kill_at(start(tmp_path, *flags, "--batch-size", "2"), parts, 10)
    assert 10 <= first < 60 and not out.exists()
    with next(parts.glob("*.jsonl")).open("ab") as part:
        part.write(b'{"source": "json", "prompt_id": "c2f0')  # a torn line
    result = launcher.call(2, "test_generate.in_two_ranks", GENERATE=json.dumps([*flags, "--device", "cpu"]))
    result.good()
    assert f"{first} of 60 answers are there" in result.out[0] and not result.out[1], result.text
    assert out.read_bytes() == whole.read_bytes()
    assert not parts.exists()


def test_parts_of_two_ranks_are_continued_by_one(some, tmp_path, launcher):
    """One of two ranks fails on its way; what both had written is used."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run("--prompts", some, "--out", whole)
    lines_of = whole.read_bytes().splitlines(keepends=True)
    parts = Path(f"{out}.parts")
    parts.mkdir()
    (parts / "00000.jsonl").write_bytes(b"".join(lines_of[0:10:2]) + lines_of[10][:-1])
    (parts / "00001.jsonl").write_bytes(b"".join(lines_of[1:20:2]))
    out.write_bytes(b"".join(lines_of[1:3]))  # killed after merging an earlier, shorter list of prompts
    made = []
    add = generate.Store.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.Store, "add", lambda self, line: (made.append(line), add(self, line)))
        run("--prompts", some, "--out", out)
    assert [line["prompt_id"] for line in made] and len(made) == 24 - 5 - 10
    assert out.read_bytes() == whole.read_bytes()
    before = out.read_bytes()
    run("--prompts", some, "--out", out)  # all is there
    assert out.read_bytes() == before and not parts.exists()


def test_answers_of_other_flags_are_not_mixed_in(some, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    run("--prompts", some, "--out", out, "--max-new-tokens", 8)
    before = out.read_bytes()
    run("--prompts", some, "--out", out, "--max-new-tokens", 9, code=2)
    err = capsys.readouterr().err
    assert "holds 24 answer(s) to other prompts" in err and err.count("\n") == 1
    assert out.read_bytes() == before
    run("--prompts", some, some, "--out", out, "--max-new-tokens", 8)  # more prompts are welcome
    assert out.read_bytes().startswith(before) and len(lines(out)) == 48


def test_two_runs_do_not_write_the_same_file(some, tmp_path, capsys):
    store = generate.Store(str(tmp_path / "out.jsonl"), [])
    store.open(0)
    run("--prompts", some, "--out", tmp_path / "out.jsonl", code=2)
    assert "another run writes it" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------
# A server


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server of one word; `plan` says how it fails, request by request."""

    daemon_threads = True

    def __init__(self, plan=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan, self.lock = collections.deque(plan), threading.Lock()
        self.now, self.most, self.asked, self.keys = 0, 0, [], set()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that is gone is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.keys.add(self.headers.get("Authorization"))
        self.send_error(404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
            server.asked.append(body["messages"][-1]["content"])
            server.keys.add(self.headers.get("Authorization"))
            fault = server.plan.popleft() if server.plan else None
        time.sleep(0.02)
        asked = body["messages"][-1]["content"]
        if callable(fault):
            fault = fault(asked)
        with server.lock:
            server.now -= 1
        if self.path != "/v1/chat/completions" or body["model"] != "word":
            fault = 404
        elif fault == "close":
            self.close_connection = True
            self.connection.close()
            return
        if asked == "too long":
            fault = 400
        reply = {"error": "no"}
        if fault in (None, "length"):
            choice = {"message": {"role": "assistant", "content": f"<{asked}>"}}
            choice["finish_reason"] = fault or "stop"
            reply = {"choices": [choice], "usage": {"completion_tokens": 3}}
        content = b"<html>" if fault == "garbage" else json.dumps(reply).encode()
        self.send_response(fault if isinstance(fault, int) else 200)
        if fault == 302:
            self.send_header("Location", server.location)
        if fault == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def served(monkeypatch, tmp_path):
    """(prompts, flags): 20 questions for a server; waits between attempts are short."""
    monkeypatch.setattr(generate, "BACKOFF_S", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"word {i}", "n": i}) + "\n" for i in range(20)))
    return prompts, ["--prompts", prompts, "--model", "word", "--out", tmp_path / "out.jsonl"]


def test_a_server_that_fails_now_and_then_answers_all(served, tmp_path, capsys, monkeypatch):
    server = Server([429, 503, "close", None, "garbage", 500, "length", 429])
    monkeypatch.setenv("WORD_KEY", "s3cret")
    run("--server", server.url, *served[1], "--concurrency", 4, "--key-env", "WORD_KEY")
    found = lines(tmp_path / "out.jsonl")
    assert [r["messages"] for r in found] == [
        [{"role": "user", "content": f"word {i}"}, {"role": "assistant", "content": f"<word {i}>"}]
        for i in range(20)
    ]
    assert [r["n"] for r in found] == list(range(20)) and len(server.asked) == 26
    assert 1 < server.most <= 4 and server.keys == {"Bearer s3cret"}
    assert sum(not r["finished"] for r in found) == 1 and found[0]["tokens"] == 3
    assert "20 answers, 60 tokens" in capsys.readouterr().out
    tokenizer = data.load_tokenizer(TINY)
    assert data.load_corpus(tmp_path / "out.jsonl", tokenizer, 512, tmp_path / "t").report.bad == 0


def test_a_server_answers_every_turn(served, tmp_path):
    prompts, flags = served
    user = {"role": "user", "content": "more"}
    prompts.write_text(json.dumps({"messages": [user, {"role": "assistant", "content": "x"}, user]}) + "\n")
    server = Server()
    run("--server", server.url, *flags, "--every-turn")
    reply = {"role": "assistant", "content": "<more>"}
    (line,) = lines(tmp_path / "out.jsonl")
    assert line["messages"] == [user, reply, user, reply] and line["tokens"] == 6 and len(server.asked) == 2


def test_the_key_does_not_follow_a_redirect(served, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORD_KEY", "s3cret")
    other = Server()
    server = Server([302] * 100)
    server.location = f"{other.url}/v1/chat/completions"
    run("--server", server.url, *served[1], "--key-env", "WORD_KEY", code=1)
    assert "HTTP 302" in capsys.readouterr().err and not other.keys


def test_a_server_that_goes_away_loses_nothing(served, tmp_path, capsys):
    server = Server([None] * 7 + [500] * 1000)
    run("--server", server.url + "/v1/", *served[1], "--concurrency", 3, code=1)
    err = capsys.readouterr().err
    assert "8 attempts failed, the last with HTTP 500" in err and err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()
    first = set(server.asked[:7])
    again = Server()
    run("--server", again.url, *served[1])
    assert len(again.asked) == 13 and not first & set(again.asked) and again.keys == {None}
    assert [r["n"] for r in lines(tmp_path / "out.jsonl")] == list(range(20))


def test_a_prompt_that_a_server_refuses_is_left_out_and_said(served, tmp_path, capsys):
    with served[0].open("a") as file:
        file.write('{"prompt": "too long"}\n')
    run("--server", Server().url, *served[1], "--concurrency", 1)
    assert len(lines(tmp_path / "out.jsonl")) == 20
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        f"1 prompt(s) left out, the first: {served[0]}:21: refused by the server: HTTP 400"
    )
    served[0].write_text('{"prompt": "too long"}\n' * 3)
    run("--server", Server().url, *served[1][:-1], tmp_path / "other.jsonl", code=1)
    assert "refuses every prompt" in capsys.readouterr().err


def test_a_wrong_model_or_no_server_at_all_is_one_line(served, tmp_path, capsys):
    flags = [*served[1], "--model", "other"]
    run("--server", Server().url, *flags, code=1)
    assert "HTTP 404" in capsys.readouterr().err
    run("--server", "http://127.0.0.1:9", *flags, code=1)
    err = capsys.readouterr().err
    assert "8 attempts failed" in err and "refused" in err and err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------
# Mistakes


BAD_FLAGS = {
    "--out is missing": [],
    "make it first": ["--out", "nowhere/out.jsonl"],
    "--prompts is missing": ["--out", "x.jsonl", "--target", str(TINY)],
    "cannot be read": ["--out", "x.jsonl", "--prompts", "nowhere.jsonl"],
    "--max-new-tokens 0": ["--out", "x.jsonl", "--max-new-tokens", "0"],
    "--temperature nan": ["--out", "x.jsonl", "--temperature", "nan"],
    "--temperature 1e-300: 0 is greedy": ["--out", "x.jsonl", "--temperature", "1e-300"],
    "--concurrency 0": ["--out", "x.jsonl", "--concurrency", "0"],
    "who is to answer": ["--out", "x.jsonl", "--server", "http://a", "--target", "b", "--prompts", "c"],
    "--model is missing": ["--out", "x.jsonl", "--server", "http://a", "--prompts", "c"],
    "give a URL": ["--out", "x.jsonl", "--server", "localhost", "--model", "a", "--prompts", "c"],
    "no such environment variable": [
        *("--out", "x.jsonl", "--server", "http://a", "--model", "a", "--prompts", "c", "--key-env", "NO_KEY")
    ],
    "see generate.py --help": ["--out", "x.jsonl", "--sideways"],
    "no tokenizer.json and no tokenizer.model": ["--out", "x", "--target", ".", "--prompts", str(EVAL)],
}


@pytest.mark.parametrize("said", BAD_FLAGS)
def test_bad_flags_are_one_line(said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(*BAD_FLAGS[said], code=2)
    err = capsys.readouterr().err
    assert err.startswith("generate.py: ") and said in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


BAD_LINES = {
    "not JSON": b"{",
    "not UTF-8": b'{"prompt": "\xff"}',
    "a list": b"[]",
    "no messages, prompt or text": b"{}",
    "unknown role": b'{"messages": [{"role": "x", "content": ""}]}',
    "the conversation is empty": b'{"messages": []}',
    "prompt is a number": b'{"prompt": 3}',
    "nested too deeply": b'{"prompt": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "empty prompt": b'{"prompt": " \\n"}',
    "empty text": b'{"text": ""}',
    "empty question (message 1)": b'{"messages": [{"role": "user", "content": ""}]}',
    "empty question (message 3)": json.dumps(
        {
            "messages": [
                {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", " "))
            ]
        }
    ).encode(),
    "half a surrogate pair": b'{"prompt": "a", "id": "\\ud800"}',
}


@pytest.mark.parametrize("said", BAD_LINES)
def test_bad_lines_are_named(said, tmp_path, capsys):
    prompts = tmp_path / "asked.jsonl"
    prompts.write_bytes(b'{"prompt": "a"}\n' + BAD_LINES[said] + b"\n[]\n")
    run("--prompts", prompts, "--out", tmp_path / "out.jsonl", code=2)
    err = capsys.readouterr().err
    first, second = err.splitlines()
    assert f"{prompts}:2: " in first and said in first
    assert first.endswith(": correct or remove this line, and 1 more:")
    assert second == f"    {prompts}:3: a list, not an object"


@pytest.mark.parametrize("bad", [1, 9, 10, 11, 30])
def test_ten_bad_lines_are_listed_and_the_others_counted(bad, tmp_path, capsys):
    """Over all files, every good line left out."""
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    files[0].write_text('{"prompt": "a"}\n[]\n')
    files[1].write_text('{"prompt": "a"}\n' + "[]\n" * (bad - 1))
    places = [f"{files[0]}:2", *(f"{files[1]}:{n}" for n in range(2, bad + 1))]
    with pytest.raises(ValueError) as error:
        generate.read_items([str(f) for f in files], True, False)
    told = str(error.value).splitlines()
    assert told[0].endswith(f"this line, and {bad - 1} more:" if bad > 1 else "this line")
    listed = [line.strip() for line in told if "a list" in line]
    assert [line[: len(p) + 1] for line, p in zip(listed, places, strict=False)] == [
        f"{p}:" for p in places[:10]
    ]
    assert told[len(listed) :] == ([f"    and {bad - 10} more"] if bad > 10 else [])


def test_lines_are_counted_as_in_training(tmp_path):
    """A lone carriage return ends no line."""
    prompts = tmp_path / "asked.jsonl"
    prompts.write_bytes(b'{"prompt":\r"a"}\r\n\r\n[]\r\n')
    with pytest.raises(ValueError, match=r"asked\.jsonl:3: a list, not an object: .* this line$"):
        generate.read_items([str(prompts)], True, False)


def test_an_empty_turn_that_is_not_answered_anew_is_kept():
    turns = zip(("user", "assistant") * 2, (" ", "b", "c", "d"), strict=True)
    record = {"messages": [{"role": role, "content": c} for role, c in turns]}
    assert generate.questions(record, True, False) == ([record["messages"][:3]], "")
    with pytest.raises(data.BadLine, match=r"empty question \(message 1\)"):
        generate.questions(record, True, True)


def test_an_output_that_is_not_ours_is_not_touched(some, tmp_path, capsys):
    out = tmp_path / "mine.jsonl"
    out.write_text('{"messages": []}\n')
    run("--prompts", some, "--out", out, code=2)
    assert f"{out}:1: " in capsys.readouterr().err and out.read_text() == '{"messages": []}\n'


def test_a_device_is_never_replaced_and_a_link_stays_one(some, tmp_path, capsys):
    pipe, link, file = tmp_path / "pipe.jsonl", tmp_path / "link.jsonl", tmp_path / "real" / "file.jsonl"
    os.mkfifo(pipe)
    run("--prompts", some, "--out", pipe, "--device", "cpu", code=2)
    assert "is a device or a pipe" in capsys.readouterr().err and pipe.is_fifo()
    file.parent.mkdir()
    link.symlink_to(file)
    run("--prompts", some, "--out", link, "--device", "cpu", "--max-new-tokens", 4)
    assert link.is_symlink() and lines(file) == lines(link) != []
