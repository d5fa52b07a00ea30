"""pytest tests/test_decode.py: decoding changes nothing but the time, against oracles that keep no cache.

P rows, B block size, D = B-1 drafts, H hidden, V vocabulary.
"""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import compile_utils
import data
import decode
import model
from decode import Engine, Prompt, accept_sampled
from model import Blocks, Drafter, DrafterConfig, Target, TargetConfig

B, STOP = 4, 1
LENGTHS = (5, 1, 9, 14, 3)  # prompts of different lengths
NEW = 24


def make_target(V: int = 37, spread: float = 2.0, **changes) -> Target:
    """A random target whose greedy text is no loop, since its logits depend on many tokens."""
    c = dict(
        family="llama", hidden=32, layers=4, heads=4, kv_heads=2, head_dim=12, intermediate=40, vocab=V,
        eps=1e-6, rope_theta=10000.0, rope_scaling=None, tied=False, qkv_bias=False, out_bias=False,
        mlp_bias=False, qk_norm=False, windows=(0,) * 4, max_position=256,
    )  # fmt: skip
    target = Target(TargetConfig(**(c | changes))).requires_grad_(False).eval()
    random = torch.Generator().manual_seed(3)
    for p in target.parameters():
        noise = torch.randn(p.shape, generator=random)
        p.copy_(noise * spread * p.shape[1] ** -0.5 if p.dim() == 2 else 1 + 0.3 * noise)
    return target


def make_drafter(target: Target, **changes) -> Drafter:
    c = DrafterConfig.of(target.c, 2, B, 3, mask_token=target.c.vocab - 1)
    drafter = Drafter(
        dataclasses.replace(c, **changes), target.embed_tokens.weight, target.head_VH, seed=1
    ).requires_grad_(False)
    random = torch.Generator().manual_seed(5)
    for p in drafter.parameters():
        p.copy_(2 * p if p.dim() == 2 else 1 + 0.3 * torch.randn(p.shape, generator=random))
    return drafter


def make_prompts(target: Target, new: int = NEW) -> list[Prompt]:
    random = torch.Generator().manual_seed(11)
    drawn = [torch.randint(2, target.c.vocab - 1, (n,), generator=random).tolist() for n in LENGTHS]
    return [Prompt(ids, len(ids) + new, f"source{i % 2}", f"prompt {i}") for i, ids in enumerate(drawn)]


TARGETS = {
    "llama": {},
    "biases, norms, as many heads": dict(qkv_bias=True, qk_norm=True, kv_heads=4),
    "windows": dict(windows=(0, 3, 6, 3), kv_heads=1),
}


@torch.no_grad()
def greedy(target: Target, prompt: Prompt) -> list[int]:
    """The oracle: one whole forward pass a token, no cache."""
    ids = list(prompt.ids)
    while len(ids) < prompt.limit:
        ids.append(int(decode.next_logits(target, ids, 256).argmax()))
        if ids[-1] == STOP:
            break
    return ids[len(prompt.ids) :]


class Guessing(Engine):
    """Drafts what the oracle knows to come, but wrong from a different slot each time: every jump occurs."""

    truth: dict[tuple, list[int]]
    rounds = 0

    def draft(self) -> None:
        super().draft()  # its keys and values must do no harm
        for row in range(self.rows):
            known = self.tokens_PC[row, : self.length_P[row]].tolist()
            rest = next((t[len(known) :] for t in self.truth.values() if t[: len(known)] == known), [])
            right = self.rounds % B
            self.rounds += 1
            guess = [*rest[:right], *[0] * B][: B - 1]
            self.drafted_PD[row] = torch.tensor(guess)


def capacity(prompts: list[Prompt]) -> int:
    return max(decode.CHUNK, max(p.limit for p in prompts) + B)


# ---------------------------------------------------------------------------------------------------------
# Greedy: the same tokens


@pytest.mark.parametrize("chunked", [False, True], ids=["", "chunked"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_answers_are_the_targets_own(name, rows, chunked):
    """Whatever is drafted: by a drafter that knows nothing, and by one that is right for a while."""
    target = make_target(**TARGETS[name])
    prompts = make_prompts(target)
    wanted = [greedy(target, p) for p in prompts]
    assert len({tuple(w) for w in wanted}) == len(wanted) and len({*itertools.chain(*wanted)}) > 7
    seen = torch.zeros(B, dtype=torch.int64)
    for kind in (Engine, Guessing):
        engine = kind(target, make_drafter(target), [STOP], rows, capacity(prompts))
        engine.truth = {p.where: p.ids + w for p, w in zip(prompts, wanted, strict=True)}
        if chunked:
            engine.use_chunks()
            engine.lag = 1
        for speculative in (True, False):
            decoded = engine.run(prompts, speculative)
            assert [a.ids for a in decoded.answers] == wanted
            for answer in decoded.answers:
                made = sum(n * size for size, n in enumerate(answer.jumps, 1))
                assert made == len(answer.ids) - 1
            if speculative:
                seen += torch.tensor([a.jumps for a in decoded.answers]).sum(0)
    assert (seen > 0).all(), seen  # every jump from 1 to B was taken


def test_an_answer_stops_at_its_first_stop_token_and_at_its_limit():
    target = make_target()
    prompts = make_prompts(target)
    whole = [greedy(target, p) for p in prompts]
    stops = sorted({whole[0][7], whole[2][0]})  # in the middle of a jump; the very first token
    engine = Guessing(target, make_drafter(target), stops, 2, capacity(prompts))
    engine.truth = {p.where: p.ids + w for p, w in zip(prompts, whole, strict=True)}
    answers = engine.run(prompts, True).answers
    for answer, w in zip(answers, whole, strict=True):
        end = next((i for i, t in enumerate(w) if t in stops), len(w) - 1)
        assert answer.ids == w[: end + 1]
    assert len(answers[2].ids) == 1 and answers[2].jumps == [0] * B
    short = [dataclasses.replace(p, limit=len(p.ids) + n) for n, p in enumerate(prompts, 1)]
    answers = engine.run(short, True).answers
    assert all(len(a.ids) <= n for n, a in enumerate(answers, 1)) and len(answers[0].ids) == 1


# ---------------------------------------------------------------------------------------------------------
# The drafter in decoding is the drafter of training


class Recording(Guessing):
    """Notes the tokens of each row and the logits' winners that the drafter itself gave for them."""

    def draft(self) -> None:
        Engine.draft(self)
        own = self.drafted_PD.clone()
        for row in range(self.rows):
            if not self.done_P[row]:
                self.notes.append((self.tokens_PC[row, : self.length_P[row]].tolist(), own[row].tolist()))
        super().draft()


@torch.no_grad()
def drafts_in_training(target: Target, drafter: Drafter, ids: list[int]) -> list[int]:
    """The block at the last token, by the packed pass of training over everything before it."""
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    features = target.features(tokens, positions, bounds, len(ids), list(drafter.c.ids))
    kv = drafter.context_keys_values(features, positions)
    mask_T, doc_T = torch.ones(len(ids), dtype=torch.bool), torch.zeros(len(ids), dtype=torch.int32)
    anchor = torch.tensor([len(ids) - 1])
    row = (tokens, positions, doc_T, mask_T, anchor)
    blocks: Blocks = model.make_blocks(*row, B, 4.0, drafter.c.mask_token)
    return (drafter.hidden(kv, blocks)[1:] @ drafter.head.T).argmax(-1).tolist()


@pytest.mark.parametrize("windows", [(0, 0), (2, 0), (7, 7)])
@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_are_those_of_training(windows, rows):
    """Case 25: positions, tapped layers and context, cached bit by bit, give the drafts of a whole pass."""
    target = make_target(windows=(0, 5, 0, 0))
    drafter, prompts = make_drafter(target, windows=windows), make_prompts(target)
    engine = Recording(target, drafter, [STOP], rows, capacity(prompts))
    engine.truth, engine.notes = {p.where: p.ids + greedy(target, p) for p in prompts}, []
    engine.run(prompts, True)
    assert len(engine.notes) > 40 and len({tuple(d) for _, d in engine.notes}) > 20
    for ids, drafted in engine.notes:
        assert drafted == drafts_in_training(target, drafter, ids)


@torch.no_grad()
def test_acceptance_is_the_tau_of_evaluation():
    """Walking recorded greedy answers counts exactly the blocks that decoding them drafts."""
    target = make_target(V=4, spread=2.0)  # of four tokens even a drafter that knows nothing guesses some
    drafter, prompts = make_drafter(target), make_prompts(target, new=60)
    engine = Engine(target, drafter, [STOP], 1, capacity(prompts))
    answers = engine.run(prompts, True).answers
    counted = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = prompt.ids + answer.ids
        prefix_T = torch.zeros(len(ids), dtype=torch.int64)
        for a in range(len(prompt.ids), len(ids) - 1):
            drafted, rest = drafts_in_training(target, drafter, ids[: a + 1]), ids[a + 1 :]
            same = [d == r for d, r in zip(drafted, rest, strict=False)]
            prefix_T[a] = [*same, False].index(False)
        mask_T = torch.arange(len(ids)) >= len(prompt.ids)
        counted += list(model.walk_answers(prefix_T, mask_T, torch.full((len(ids),), i)))
    assert counted == [(i, len(a.ids) - 1, sum(a.jumps)) for i, a in enumerate(answers) if len(a.ids) > 1]
    tokens, blocks = (sum(c[i] for c in counted) for i in (1, 2))
    assert tokens / blocks > 1.2 and len(counted) > 2, counted


# ---------------------------------------------------------------------------------------------------------
# Sampling: the target's distribution


def chi_square(counts: Tensor, p: Tensor) -> float:
    """Pearson's statistic over outcomes expected 5 times or more, as standard deviations above its mean."""
    expected = p * counts.sum()
    use = expected >= 5
    rest_c, rest_e = counts[~use].sum(), expected[~use].sum()
    statistic = ((counts[use] - expected[use]) ** 2 / expected[use]).sum()
    if rest_e > 0:
        statistic += (rest_c - rest_e) ** 2 / rest_e
    freedom = int(use.sum())
    return ((statistic - freedom) / (2 * freedom) ** 0.5).item()


def test_rejection_sampling_gives_the_targets_distribution():
    """p and q of any shape, an impossible token in each; every outcome of three drafts and the bonus."""
    V, rows = 4, 400_000
    random = torch.Generator().manual_seed(0)
    q_DV = torch.tensor([[0.7, 0.1, 0.2, 0.0], [0.25] * 4, [0.0, 0.5, 0.3, 0.2]])
    p_BV = torch.rand(B, V, generator=random)  # independent of what came before: enough to count exactly
    p_BV[1, 2], p_BV[2] = 0.0, q_DV[2]
    p_BV /= p_BV.sum(-1, keepdim=True)
    drafted = torch.multinomial(q_DV, rows, True, generator=random).T
    uniform = torch.rand(rows, B - 1, generator=random)
    noise = torch.empty(rows, V).exponential_(generator=random)
    q, p = q_DV.expand(rows, -1, -1), p_BV.expand(rows, -1, -1)
    new, count = accept_sampled(drafted, q, p, uniform, noise)
    for k in range(B):
        there = new[count > k, k]  # given the tokens before, whether slot k is reached says nothing about it
        assert chi_square(torch.bincount(there, minlength=V).double(), p_BV[k].double()) < 4, k
    overlap = torch.minimum(p_BV[:-1], q_DV).sum(-1).cumprod(0)
    for k in range(1, B):
        assert abs((count > k).float().mean() - overlap[k - 1]) < 0.004  # as many accepted as can be


@torch.no_grad()
@pytest.mark.parametrize("speculative", [True, False])
def test_sampled_answers_have_the_targets_distribution(speculative):
    """Next three tokens of one prompt, 1500 times, against the exact probabilities of all 64 outcomes."""
    temperature, V, times = 1.3, 4, 1500
    target = make_target(V=V, spread=1.2)
    prompt = Prompt([2, 3, 1, 2, 0], 8, "", "")
    engine = Engine(target, make_drafter(target), [], 500, 16, temperature, seed=4)
    answers = engine.run([prompt] * times, speculative).answers
    p = torch.ones(V, V, V, dtype=torch.float64)
    for a in range(V):
        for b in range(V):
            for depth, more in ((0, []), (1, [a]), (2, [a, b])):
                logits = decode.next_logits(target, prompt.ids + more, 64).double()
                row = torch.softmax(logits / temperature, -1)
                p[a, b] *= row[a] if depth == 0 else row[b] if depth == 1 else row
    counts = torch.zeros(V, V, V, dtype=torch.float64)
    for answer in answers:
        counts[tuple(answer.ids)] += 1
    assert abs(p.sum() - 1) < 1e-9 and p.max() < 0.5
    assert chi_square(counts.flatten(), p.flatten()) < 4
    total_variation = 0.5 * (counts / times - p).abs().sum()
    assert total_variation < 0.1
    if speculative:
        assert sum(a.jumps[1] for a in answers) > times / 20  # drafts were accepted, and rejected
        assert sum(a.jumps[0] for a in answers) > times / 20


def test_samples_depend_on_the_seed_alone():
    target = make_target()
    prompts = make_prompts(target)
    ids = []
    for seed in (0, 0, 1):
        engine = Engine(target, make_drafter(target), [STOP], 2, capacity(prompts), 1.0, seed)
        ids.append([a.ids for a in engine.run(prompts, True).answers])
    assert ids[0] == ids[1] != ids[2]


# ---------------------------------------------------------------------------------------------------------
# Fit for a GPU: one shape a pass, nothing asked of the host


class HostQuestions(TorchDispatchMode):
    """Notes operators whose result the host must wait for, and copies from the host."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(name in str(operator) for name in self.ASKING):
            self.found.append(str(operator))
        return operator(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_never_waits_for_the_host(temperature):
    target = make_target()
    engine = Engine(target, make_drafter(target), [STOP], 2, 128, temperature)
    engine.use_chunks()
    with HostQuestions() as asked:
        for speculative in (True, False):
            for name, *arguments in engine.passes(speculative):
                getattr(engine, name)(*arguments)
    assert not asked.found
    with HostQuestions() as asked:
        engine.length_P.max().item()
    assert asked.found


def test_compiled_passes_decode_the_same_without_a_recompile(monkeypatch):
    """Traced as whole graphs with static shapes; the code generator is left out."""
    monkeypatch.setattr(
        compile_utils,
        "compile",
        lambda fn, name: torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager"),
    )
    torch._dynamo.reset()
    target = make_target(windows=(0, 3, 0, 0))
    drafter, prompts = make_drafter(target, windows=(0, 5)), make_prompts(target)
    eager, engine = (Engine(target, drafter, [STOP], 2, capacity(prompts)) for _ in range(2))
    wanted = [a.ids for a in eager.run(prompts, True).answers]
    engine.compile()
    engine.use_chunks()
    engine.warm_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [a.ids for a in engine.run(prompts, True).answers] == wanted
        alone = [a.ids for a in engine.run(prompts, False).answers]
    assert alone == wanted
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_decode_the_same(compiled):
    target = make_target()
    prompts = make_prompts(target)
    wanted = [greedy(target, p) for p in prompts]
    target, drafter = target.cuda(), make_drafter(target).cuda()
    drafter.embedding, drafter.head = target.embed_tokens.weight.detach(), target.head_VH.detach()
    for rows in (1, 3):
        engine = Engine(target, drafter, [STOP], rows, capacity(prompts))
        if compiled:
            engine.compile()
        engine.capture()
        for speculative in (True, False):
            assert [a.ids for a in engine.run(prompts, speculative).answers] == wanted


# ---------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def run(launcher, small, tmp_path_factory):
    """A short run with the built-in target, which names no target, in a folder `runs`."""
    folder = tmp_path_factory.mktemp("decode") / "runs" / "001"
    launcher.run(1, folder, *small, "--steps", 30, "--eval-every", 30, "--save-every", 30).good()
    return folder


def command(capsys, *flags) -> tuple[int, str, str]:
    code = decode.main([str(f) for f in flags])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_decodes_with_the_newest_run_and_reports_evaluations_tau(
    run, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(run.parent.parent)
    files = ("--json", tmp_path / "out.json", "--png", tmp_path / "out.png")
    code, out, err = command(
        capsys, "--prompts", small[3], "--every-turn", "--device", "cpu", "--verify", *files
    )
    assert code == 0, out + err
    r = json.loads((tmp_path / "out.json").read_text())
    assert r["identical"] is True and f"{r['prompts']} of {r['prompts']} answers token-identical" in out
    evaluated = [json.loads(m) for m in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert r["acceptance"] == pytest.approx(evaluated["eval_tau"], rel=1e-6) and r["acceptance"] > 1.05
    by_source = {name: t["acceptance"] for name, t in r["by_source"].items()}
    assert by_source == pytest.approx(evaluated["eval_tau_by_source"], rel=1e-6)
    assert r["tokens"] == sum(n * size for size, n in enumerate(r["histogram"], 1))
    assert sum(r["histogram"]) == r["blocks"] and r["draft_ms"] > 0 and r["verify_ms"] > 0
    for t in r["by_source"].values():
        assert t["tokens"] == sum(n * size for size, n in enumerate(t["histogram"], 1))
        assert sum(t["histogram"]) == t["blocks"] > 0
    assert r["speedup"] == pytest.approx(r["tokens_per_s"] / r["target_tokens_per_s"])
    assert (tmp_path / "out.png").stat().st_size > 5000


def test_exports_runs_and_checkpoints_are_drafters(run, small):
    flags = ["--prompts", small[3], "--device", "cpu"]
    for place, exact in ((run, True), (run / "step-000030", True), (run / "step-000030" / "export", False)):
        c = decode.parse_flags([*flags, "--draft", str(place)])
        folder, _, target, drafter = decode.load_models(c, torch.device("cpu"), torch.float32)
        assert folder == TINY and drafter.head.data_ptr() == target.head_VH.data_ptr()
        trained = load_file(run / "step-000030" / "model.safetensors")
        for name, p in drafter.named_parameters():
            assert torch.equal(p, trained[name] if exact else trained[name].bfloat16().float())


MISTAKES = {
    "no run": ([], "no finished run"),
    "no draft": (["--draft", "nowhere"], "nowhere"),
    "no prompts": (["--draft", "RUN", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    "bad line": (["--draft", "RUN", "--prompts", "bad.jsonl"], "bad.jsonl:2: not JSON"),
    "empty": (["--draft", "RUN", "--prompts", "empty.jsonl"], "no prompts"),
    "long": (["--draft", "RUN", "--prompts", "long.jsonl"], "longer than"),
    "no answer": (["--draft", "RUN", "--prompts", "roles.jsonl"], "unknown role"),
    "flag": (["--speed", "9"], "--help"),
    "temperature": (["--temperature", "-1"], "--temperature"),
    "too cold": (["--temperature", "1e-300"], "--temperature 1e-300: 0 is greedy"),
    "both": (["--temperature", "1", "--verify"], "--verify"),
    "batch": (["--batch-size", "0"], "--batch-size"),
    "json": (["--json", "nowhere/a.json"], "no folder"),
    "json folder": (["--json", "."], "is a folder"),
    "one file": (["--json", "a.png", "--png", "a.png"], "the same file"),
    "full disk": (
        ["--draft", "RUN", "--limit", "1", "--max-new-tokens", "2", "--json", "/dev/full"],
        "/dev/full: could not be written",
    ),
    "picture": (["--png", "a.xyz"], "--png a.xyz: give a name that ends in"),
    "other target": (["--draft", "RUN/step-000030/export", "--target", "other"], "another target"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("empty.jsonl").write_text("\n")
    Path("long.jsonl").write_text(json.dumps({"text": "word " * 3000}) + "\n")
    Path("roles.jsonl").write_text(json.dumps({"messages": [{"role": "who", "content": "a"}]}) + "\n")
    if name == "other target":
        shutil.copytree(TINY, "other", ignore=shutil.ignore_patterns("*.jsonl", "*.py"))
        config = json.loads((TINY / "config.json").read_text())
        Path("other/config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    flags, said = MISTAKES[name]
    code, _, err = command(capsys, "--device", "cpu", *(f.replace("RUN", str(run)) for f in flags))
    assert code == 2 and err.startswith("decode.py: ") and said in err
    assert err.count("\n") == 1 and "Traceback" not in err


# ---------------------------------------------------------------------------------------------------------
# Prompts, and near-ties


def test_prompts_are_cut_before_the_answer_as_training_sees_it(tmp_path):
    """The prompt of a recorded answer is exactly what stands before its first supervised token."""
    tokenizer = data.load_tokenizer(TINY)
    lines = (TINY / "eval.jsonl").read_text().splitlines()[:30]
    records = [json.loads(line) for line in lines]
    assert any(len(r["messages"]) > 2 for r in records)
    for record in records:
        ids, mask = tokenizer.encode_chat(record["messages"])
        starts = [i for i, m in enumerate(mask) if m and not mask[i - 1]]
        assert decode.prompt_ids(record, tokenizer, True) == [ids[:s] for s in starts]
        assert decode.prompt_ids(record, tokenizer, False) == [ids[: starts[-1]]]
        asked = {"messages": record["messages"][:-1]}  # ends with the question
        assert decode.prompt_ids(asked, tokenizer, False) == [ids[: starts[-1]]]
        assert decode.prompt_ids(asked, tokenizer, True) == [ids[:s] for s in starts]
    user = {"messages": [{"role": "user", "content": "Hello"}]}
    wanted = decode.prompt_ids(user, tokenizer, False)
    for other in ({"prompt": "Hello"}, {"prompt": "Hello", "response": "Yes"}):
        assert decode.prompt_ids(other, tokenizer, False) == wanted
    assert decode.prompt_ids({"text": "Hello"}, tokenizer, False) == [tokenizer.encode("Hello")]
    assert decode.stop_tokens(tokenizer) == [ids[max(i for i, m in enumerate(mask) if m)]]
    tokenizer.close()


def test_verify_tells_a_near_tie_from_a_wrong_token():
    target = make_target()
    prompts = make_prompts(target)[:2]
    own = [greedy(target, p) for p in prompts]
    logits = decode.next_logits(target, prompts[0].ids + own[0][:3], 256)
    second = int(logits.topk(2).indices[1])
    answers = [decode.Answer(a, [0] * B) for a in own]
    other = [decode.Answer([*own[0][:3], second, 9], [0] * B), answers[1]]
    group = decode.Group(prompts, decode.Decoded(other, 1.0, {}), decode.Decoded(answers, 1.0, {}))
    (found,) = decode.compare(target, {"": group}, 256)
    assert found["position"] == 3 and found["tokens"] == [second, own[0][3]] and not found["tie"]
    gap = (logits[own[0][3]] - logits[second]).item()
    assert found["gap"] == pytest.approx(gap) and gap > 0
    head = target.lm_head.weight
    head[second] = head[own[0][3]] * (1 + 1e-7)
    (found,) = decode.compare(target, {"": group}, 256)
    assert found["tie"] and found["gap"] < 1e-5


# ---------------------------------------------------------------------------------------------------------
# Drafters published in other forms


def published(folder: Path, change, drafter: Drafter) -> Path:
    checkpoint.export(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_drafter(layers: int = 2, taps: int = 5, **changes) -> Drafter:
    t = TargetConfig.from_folder(TINY)
    c = dataclasses.replace(DrafterConfig.of(t, layers, 8, taps, 4), **changes)
    return Drafter(c, *model.load_embedding_and_head(TINY, "cpu", torch.float32))


def nest_block_size(c: dict) -> None:
    c["dflash_config"]["block_size"] = c.pop("block_size")


def flatten_all(c: dict) -> None:
    c |= c.pop("dflash_config")


def old_rope(c: dict) -> None:
    del c["rope_parameters"]


def new_rope(c: dict) -> None:
    del c["rope_theta"], c["rope_scaling"]


def no_ids(c: dict) -> None:
    del c["dflash_config"]["target_layer_ids"]


def least(c: dict) -> None:
    for name in ("num_target_layers", "head_dim", "layer_types", "vocab_size", "max_position_embeddings"):
        del c[name]


FORMS = (nest_block_size, flatten_all, old_rope, new_rope, no_ids, least)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_a_drafter_published_in_another_form_is_the_same(form, tmp_path):
    wanted = tiny_drafter(rope_theta=5e5)
    back = checkpoint.load_drafter(published(tmp_path, form, wanted), TINY)
    assert back.c == wanted.c
    for p, w in zip(back.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(p, w.bfloat16().float())


def test_taps_that_are_not_named_follow_the_width_of_fc(tmp_path):
    """Also more tapped layers than drafter layers, and fewer than five."""
    for taps in (1, 2, 3, 4):
        drafter = tiny_drafter(layers=1, taps=taps)
        folder = published(tmp_path / str(taps), no_ids, drafter)
        back = checkpoint.load_drafter(folder, TINY)
        assert back.c.ids == drafter.c.ids == tuple(model.tap_layers(6, taps))


def test_sliding_layers_are_read_from_either_form(tmp_path):
    drafter = tiny_drafter(windows=(0, 24))

    def by_depth(c: dict) -> None:
        del c["layer_types"]
        c["max_window_layers"] = 1

    for i, change in enumerate((lambda c: None, by_depth)):
        back = checkpoint.load_drafter(published(tmp_path / str(i), change, drafter), TINY)
        assert back.c.windows == (0, 24)


BROKEN_FORMS = {
    "yarn": lambda c: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    "ids": lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]),
    "ids twice": lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2, 3, 3]),
    "ids beyond": lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2, 3, 9]),
    "kinds": lambda c: c.update(layer_types=["chunked_attention"] * 2),
    "window": lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=None),
    "block size": lambda c: c.pop("block_size"),
    "mask token": lambda c: c["dflash_config"].update(mask_token_id=1024),
    "not a dict": lambda c: c.update(dflash_config=[1]),
    "activation": lambda c: c.update(hidden_act="gelu"),
    "interleaved rope": lambda c: c.update(is_neox_style=False),
    "partial rope": lambda c: c.update(partial_rotary_factor=0.5),
    "window unnamed": lambda c: c["dflash_config"].update(use_swa=True, swa_window_size=64),
    "value scale": lambda c: c["dflash_config"].update(attention_value_scale=0.5),
}


@pytest.mark.parametrize("name", BROKEN_FORMS)
def test_a_form_that_does_not_fit_is_one_line(name, tmp_path):
    folder = published(tmp_path, BROKEN_FORMS[name], tiny_drafter())
    with pytest.raises(ValueError, match="not a drafter export") as error:
        checkpoint.load_drafter(folder, TINY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_one_line_and_never_waited_for(name, tmp_path):
    folder = published(tmp_path, lambda c: None, tiny_drafter())
    (folder / name).unlink()
    os.mkfifo(folder / name)
    code = "import sys, checkpoint; checkpoint.load_drafter(*sys.argv[1:])"
    arguments = [sys.executable, "-c", code, str(folder), str(TINY)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=60, cwd=Path(model.__file__).parent
    )
    assert f"{folder / name}: not a file" in done.stderr.splitlines()[-1]


def test_a_weight_too_large_for_a_float_is_refused(tmp_path):
    folder = published(tmp_path, lambda c: None, tiny_drafter())
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"] = torch.full(weights["norm.weight"].shape, 1e300, dtype=torch.float64)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight is not finite"):
        checkpoint.load_drafter(folder, TINY)


def test_a_drafter_in_several_files_is_read_whole(tmp_path):
    checkpoint.export(tiny_drafter(), tmp_path)
    wanted = checkpoint.load_drafter(tmp_path, TINY)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves, index = (sorted(weights)[::2], sorted(weights)[1::2]), {}
    for i, names in enumerate(halves):
        save_file({n: weights[n] for n in names}, tmp_path / f"part{i}.safetensors")
        index |= {n: f"part{i}.safetensors" for n in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    back = checkpoint.load_drafter(tmp_path, TINY)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), wanted.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------------------
# train.py --init-draft


def without(flags: list[str], name: str) -> list[str]:
    at = flags.index(name)
    return flags[:at] + flags[at + 2 :]


@pytest.mark.parametrize(("part", "exact"), [("", 1e-6), ("step-000030/export", 2e-2)])
def test_a_run_goes_on_from_what_another_one_left(part, exact, run, launcher, small, tmp_path):
    """Its first evaluation is the other run's last, and its shape needs no flag; then it stands alone."""
    start = shutil.copytree(run, tmp_path / "start") / part
    flags = ["--init-draft", start, "--steps", 4, "--save-every", 2, "--eval-every", 4]
    first = launcher.run(2, tmp_path / "new", *without(small, "--draft-layers"), *flags).good()
    last = [json.loads(m) for m in (run / "metrics.jsonl").read_text().splitlines()][-1]
    begun = first.records()[0]
    assert begun["step"] == 0 and begun["eval_loss"] == pytest.approx(last["eval_loss"], rel=exact)
    assert begun["eval_tau"] == pytest.approx(last["eval_tau"], rel=exact * 10)
    assert begun["eval_loss"] < 0.9 * run_loss(run, 0)
    saved = json.loads((tmp_path / "new" / "config.json").read_text())
    assert saved["init_draft"] == str(start) and saved["draft_layers"] == 1 and saved["block_size"] == 8
    shutil.rmtree(tmp_path / "start")  # the checkpoints of the new run have all it needs
    shutil.rmtree(tmp_path / "new" / "step-000004")
    again = launcher.run(1, None, "--resume", tmp_path / "new").good()
    again.folder = tmp_path / "new"
    assert [m["loss"] for m in again.records() if m["step"]] == pytest.approx(
        [m["loss"] for m in first.records() if m["step"]], rel=1e-5
    )


def run_loss(run: Path, step: int) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return next(m["eval_loss"] for m in map(json.loads, lines) if m["step"] == step and "eval_loss" in m)


def test_a_published_drafter_of_another_shape_is_trained_on(launcher, small, tmp_path):
    """Other heads, width, taps, block size, RoPE and a sliding layer: none of them is the default."""
    shape = dict(layers=2, taps=3, heads=2, kv_heads=1, head_dim=24, intermediate=96, block_size=6)
    drafter = tiny_drafter(**shape, windows=(0, 24), rope_theta=5e4, mask_token=7)
    start = published(tmp_path / "published", nest_block_size, drafter)
    flags = ["--init-draft", start, "--steps", 6, "--save-every", 6, "--eval-every", 6, "--lr", 3e-3]
    done = launcher.run(1, tmp_path / "run", *without(small, "--draft-layers"), *flags).good()
    back = checkpoint.load_drafter(tmp_path / "run" / "step-000006", TINY)
    assert back.c == drafter.c
    given = checkpoint.load_drafter(start, TINY)
    moved = [(a - b).abs().max().item() for a, b in zip(back.parameters(), given.parameters(), strict=True)]
    assert all(0 < m < 0.1 for m in moved)  # each parameter is trained on, none starts anew
    losses = [m["loss"] for m in done.records() if m["step"]]
    assert losses[-1] < losses[0]
    assert checkpoint.load_drafter(tmp_path / "run" / "step-000006" / "export", TINY).c == drafter.c


def of_another_size(folder: Path) -> Path:
    drafter = tiny_drafter()
    c = dataclasses.replace(drafter.c, hidden=64)
    tables = (torch.ones(c.vocab, 64),) * 2
    return published(folder, lambda config: None, Drafter(c, *tables))


UNFIT = {
    "hidden size": (of_another_size, "", "another target"),
    "nowhere": (lambda folder: folder / "nowhere", "", "--init-draft"),
    "contradiction": (lambda folder: published(folder, no_ids, tiny_drafter()), "--block-size 16", "has 8"),
    "taps": (lambda folder: published(folder, no_ids, tiny_drafter()), "--taps 3", "has 5"),
    "mask": (lambda folder: published(folder, no_ids, tiny_drafter()), "--mask-token-id 5", "has 4"),
    "form": (lambda folder: published(folder, BROKEN_FORMS["window"], tiny_drafter()), "", "sliding_window"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_start_that_does_not_fit_is_refused_in_one_line(name, launcher, small, tmp_path):
    make, flags, said = UNFIT[name]
    flags = ["--init-draft", make(tmp_path / "export"), *flags.split()]
    ended = launcher.run(2, tmp_path / "run", *without(small, "--draft-layers"), *flags)
    err = "".join(ended.err)
    assert ended.codes == [2, 2] and len(err.splitlines()) == 1 and err.startswith("train.py: ")
    assert said in err and not (tmp_path / "run").exists(), err


def test_init_draft_is_of_no_use_to_a_resumed_run(run, launcher):
    ended = launcher.run(1, None, "--resume", run, "--init-draft", run)
    assert ended.codes == [2] and "leave one of them out" in ended.text


# ---------------------------------------------------------------------------------------------------------
# train.py --eval-decode


def test_decoding_at_an_evaluation_gives_its_tau(run, launcher, small, tmp_path):
    """The held-out answers are the target's own, so walking them and decoding them anew is the same."""
    flags = ["--init-draft", run, "--steps", 2, "--eval-every", 2, "--layout", "colocate"]
    done = launcher.run(2, tmp_path / "run", *without(small, "--draft-layers"), *flags, "--eval-decode", 999)
    evaluations = [m for m in done.good().records() if "eval_tau" in m]
    assert len(evaluations) == 2 and evaluations[0]["eval_tau"] > 1.05
    for m in evaluations:
        assert m["decode_tau"] == pytest.approx(m["eval_tau"], rel=1e-5)
        assert f"| tau {m['eval_tau']:.2f} | decoded {m['decode_tau']:.2f} |" in done.text


def test_what_a_run_begins_with_is_told_once(run, launcher, small, tmp_path):
    """The checkpoint it starts from; ranks of one side do not decode; anchors without a place."""
    flags = ["--init-draft", run, "--steps", 1, "--eval-decode", 2, "--anchors", 264]
    done = launcher.run(2, tmp_path / "run", *without(small, "--draft-layers"), *flags).good()
    assert done.text.count(f"starts from {run}/step-") == 1
    assert done.text.count("--eval-decode: no rank has both models") == 1
    assert done.text.count("--anchors 264: a batch of 256 tokens has no place") == 1
    assert not any("decode_tau" in m for m in done.records())


def test_held_out_prompts_are_spread_and_end_where_the_answer_begins(tmp_path):
    tokenizer = data.load_tokenizer(TINY)
    corpus = data.load_corpus([str(TINY / "eval.jsonl")], tokenizer, 256, tmp_path, 0)
    docs = torch.arange(len(corpus)).numpy()
    everything = decode.held_out_prompts(corpus, docs, 10**6, 256)
    texts = [json.loads(line) for line in (TINY / "eval.jsonl").read_text().splitlines()]
    wanted = [ids for record in texts for ids in decode.prompt_ids(record, tokenizer, True)]
    assert [p.ids for p in everything] == wanted
    few = decode.held_out_prompts(corpus, docs, 6, 256)
    assert few == [everything[i * len(everything) // 6] for i in range(6)]
    assert all(len(p.ids) < p.limit <= 256 for p in everything)
    tokenizer.close()
