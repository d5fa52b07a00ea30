"""diagnose.fx_race: the three faces of an open trace are told apart, and each end of a child has its name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diagnose import fx_race

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """One real run: a trace held open in one thread, compiled functions called in the others."""
    file = tmp_path_factory.mktemp("race") / "held.json"
    command = [sys.executable, "diagnose/fx_race.py", "--quick", "--device", "cpu", "--steady", "0.1"]
    command += ["--remedies", "none,silence,force", "--kinds", "held,held_module", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done, json.loads(file.read_text())


def test_open_trace_raises_runs_eager_or_compiles(held):
    done, written = held
    outcomes = {(t["remedy"], t["kind"]): t["outcome"] for t in written["trials"]}
    assert outcomes == {
        ("none", "held"): "fx_error",
        ("none", "held_module"): "other_error",  # NameError: module is not installed as a submodule
        ("silence", "held"): "eager",
        ("force", "held"): "ok",
    }, done.stdout
    graphs = {t["remedy"]: sum(t["graphs"].values()) for t in written["trials"] if t["kind"] == "held"}
    assert graphs == {"none": 0, "silence": 0, "force": 1}, "the counters say who compiled"


def test_a_reproduced_race_is_a_finding(held):
    done, written = held
    assert (done.returncode, written["verdict"]) == (0, "READY")
    assert written["finding"].startswith("race reproduced (held: fx_error")
    assert done.stdout.splitlines()[-1].startswith("READY (")


def test_places_are_where_they_are_said_to_be(held):
    explained = held[1]["builds"][0]["explanation"]
    words = {"defined": "_is_fx_tracing_flag = False", "set": "_is_fx_tracing_flag = True"}
    words |= {"checked": "is_fx_symbolic_tracing()", "raised": fx_race.FX_ERROR}
    for name, text in words.items():
        place = explained["places"][name]
        assert text in Path(place["file"]).read_text().splitlines()[place["line"] - 1]
    assert explained["flag_found"] and not explained["per_thread"]


@pytest.mark.parametrize("guarded", [False, True])
def test_explanation_follows_the_source(tmp_path, guarded):
    """A torch that keeps the flag for each thread, or guards compiles, is described as such."""
    for folder in ("fx", "_dynamo", "compiler"):
        (tmp_path / folder).mkdir()
    flag = "threading.local()" if guarded else "False"
    (tmp_path / "fx/_symbolic_trace.py").write_text(f"import x\n_is_fx_tracing_flag = {flag}\n")
    if guarded:
        source = "def f():\n    with torch.compiler._compile_session_context():\n"
        (tmp_path / "_dynamo/convert_frame.py").write_text(source)
    found = fx_race.explain(tmp_path)
    assert (found["per_thread"], found["places"]["defined"]["line"]) == (guarded, 2)
    assert bool(found["places"]["compile_guard"]) == guarded
    told = " ".join(fx_race.explanation({"explanation": found}))
    assert ("This torch has no guard" in told) != guarded


def laboratory(tmp_path, script: str, **options):
    """A Laboratory whose interpreter is a shell script: `$2` is the folder-relative spec of the child."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nout="$(dirname "$3")/result.json"\n{script}\n')
    program.chmod(0o755)
    args = fx_race.parse(["--quick"])
    for name, value in options.items():
        setattr(args, name, value)
    return fx_race.Laboratory(str(program), args)


ENDS = {
    "signal": ("kill -SEGV $$", "SIGSEGV"),
    "hang": ("sleep 60", "no result after"),
    "other_error": ("echo boom >&2; exit 3", "exit 3: boom"),
    "ok": ('echo \'{"outcome": "ok"}\' > $out', ""),
    "fx_error": (
        'echo \'{"outcome": "fx_error", "detail": "first"}\' > $(dirname $3)/first.json; kill -SEGV $$',
        "then",
    ),
}


@pytest.mark.parametrize(
    "remedy, outcome", [(r, o) for r in ("none", "gate") for o in ENDS if (r, o) != ("gate", "ok")]
)
def test_each_end_of_a_child_has_its_outcome(tmp_path, remedy, outcome):
    script, words = ENDS[outcome]
    lab = laboratory(tmp_path, script, limit=0.5 if outcome == "hang" else 20)
    try:
        trial = lab.trial(remedy, "together", ["cpu"])
        assert trial["outcome"] == outcome and words in trial.get("detail", "")
        assert not lab.live, "a hanging child is ended"
    finally:
        lab.close()
    assert not lab.folder.exists()


def test_a_trial_cut_by_the_budget_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fx_race, "LEAST_S", 0.2)
    lab = laboratory(tmp_path, "sleep 60", budget=0.5, limit=30)
    assert lab.trial("none", "held", ["cpu"]) is None
    assert lab.trial("none", "held", ["cpu"]) is None, "and none is started when too little is left"
    lab.close()


def result_of(*trials, torch="2.11.0", skipped=()):
    told = [
        {"remedy": r, "kind": k, "outcome": o, "cold_s": 9.0, "followers_hit": True} for r, k, o in trials
    ]
    return {"trials": told, "torch": torch, "executable": torch, "skipped": list(skipped)}


def threads(tmp_path, attend):
    """The threads of one trial in this process; `attend(work)` stands in for compiled attention."""
    spec = {"remedy": "none", "kind": "together", "workers": 2, "devices": ["cpu"], "tokens": 256}
    spec |= {"own_length": True, "steady": 0.01, "steady_lock": f"{tmp_path}/lock", "out": f"{tmp_path}/out"}
    running = fx_race.Threads(spec)
    for work in running.works:
        work.attend = lambda *inputs, work=work: attend(work)
    return running.run()


def shifted(work, by):
    out = work.reference[0].clone()
    out[0, 0, 7, 3] += by
    return out


def test_a_wrong_result_is_told_from_a_right_one(tmp_path):
    assert (
        threads(tmp_path, lambda work: shifted(work, 1e-6))["outcome"] == "eager"
    )  # right, but not compiled
    for by in (0.1, float("nan")):
        assert threads(tmp_path, lambda work, by=by: shifted(work, by))["outcome"] == "wrong"
    assert json.loads((tmp_path / "first.json").read_text())["outcome"] == "wrong"


@pytest.mark.parametrize("text, outcome", [(fx_race.FX_ERROR + " a", "fx_error"), ("boom", "other_error")])
def test_an_error_of_one_worker_is_the_outcome(tmp_path, text, outcome):
    def attend(work):
        if work.length > 256:  # the second worker
            raise RuntimeError(text)
        return work.reference[0]

    assert threads(tmp_path, attend)["outcome"] == outcome


CLEAN = [("gate", "together", "ok"), ("gate", "held", "ok")]


def test_the_gate_must_be_clean():
    assert fx_race.check_shipped(result_of(*CLEAN), "gate", "c").state == "ok"
    for outcome in fx_race.OUTCOMES[1:]:
        bad = result_of(*CLEAN, ("gate", "together", outcome))
        assert fx_race.check_shipped(bad, "gate", "c").state == "FAIL"
    missed = result_of(*CLEAN)
    missed["trials"][0]["followers_hit"] = False
    assert fx_race.check_shipped(missed, "gate", "c").state == "warn"
    assert fx_race.check_shipped(result_of(("none", "held", "ok")), "gate", "c").state == "skip"


def test_build_or_design():
    race = ("none", "held", "fx_error")
    old = result_of(*CLEAN, race, ("none", "together", "signal"))
    new = result_of(*CLEAN, race, ("none", "together", "ok"), torch="2.13.0")
    told = fx_race.build_or_design([old, new])
    assert told.startswith("It is the design: none/held fail under every build")
    assert "none/together failed only under 2.11.0" in told and "2.13.0" in told
    assert "One process a rank was clean" in told
    fixed = result_of(*CLEAN, ("none", "held", "ok"), torch="3.0")
    assert fx_race.build_or_design([result_of(race), fixed]).startswith("It depends on the build")
    assert fx_race.build_or_design([fixed, fixed]).startswith("Nothing failed")
    untried = result_of(race)
    assert "was clean" not in fx_race.build_or_design([old, untried]), "no trial of it, no word about it"


def test_table_is_relative_to_the_gated_design():
    result = result_of(*CLEAN[:1], ("none", "together", "ok"), ("none", "together", "signal"))
    for trial, speed in zip(result["trials"], (200.0, 50.0, None), strict=True):
        trial["tokens_per_s"] = speed
    assert fx_race.table_rows(result) == [
        ["none", "together", 2, "ok 1, signal 1", "9.0", "0.25"],
        ["gate", "together", 1, "ok 1", "9.0", "1.00"],
    ]


def test_only_pairs_never_tried_are_skipped():
    again = result_of(*CLEAN, skipped=[{"remedy": "gate", "kind": "held"}])
    assert fx_race.check_budget(again, "c").state == "ok"
    never = result_of(*CLEAN, skipped=[{"remedy": "lock", "kind": "held"}])
    assert (
        fx_race.check_budget(never, "c").state == "skip"
        and "lock/held" in fx_race.check_budget(never, "c").message
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--remedies", "prayer"],
        ["--kinds", "solo"],
        ["--workers", "1"],
        ["--trials", "0"],
        ["--python", "/no/such/python"],
        ["--remedies", "gate", "--kinds", "held_module"],
    ],
    ids=str,
)
def test_usage_errors_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        fx_race.parse(argv)
    assert stop.value.code == 2
