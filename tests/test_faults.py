"""Some of the faults of faults.py, that the rig sees what it looks for, and a stop that comes too late."""

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import KINDS, PHASES, Rig, compare_checkpoints, compare_metrics, make_plan, marked, wait_for_end
from launch import ROOT, environment
from test_train import NAN_FEATURES

SHORT = [  # what no other test has: (kind, role); `python tests/faults.py --seeds 0-199` has everything
    ("killed launcher", "launcher"), ("SIGSTOP for a while", "target"), ("full disk", "leader"),
    ("lost connection", "target"), ("corrupt message", "target"), ("clock jump", "target"),
]  # fmt: skip


def short_seeds() -> list[int]:
    """The first seed of each (kind, role) that is cheap: few ranks, no compile."""

    def cheap(plan: dict, kind: str, role: str) -> bool:
        wanted = plan["kind"], plan["role"], plan["split"]
        return wanted == (kind, role, "1+1") and not plan["compile"]

    plans = [make_plan(seed) for seed in range(2000)]
    return [next(p["seed"] for p in plans if cheap(p, *wanted)) for wanted in SHORT]


def test_some_faults(tmp_path):
    script, seeds, record = ROOT / "tests" / "faults.py", short_seeds(), tmp_path / "faults.jsonl"
    done = subprocess.run(
        [sys.executable, script, "--seeds", ",".join(map(str, seeds)), "--json", record],
        env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    found = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f["seed"] for f in found] == seeds
    print(done.stdout)


def test_every_kind_meets_every_role_and_phase():
    plans = [make_plan(seed) for seed in range(200)]
    met = {(p["kind"], p["role"], p["phase"]) for p in plans}
    for kind, (_, roles, phases) in KINDS.items():
        assert {p for k, _, p in met if k == kind} == set(phases), kind
        assert {r for k, r, _ in met if k == kind} == set(roles), kind
    assert {p["split"] for p in plans} >= {"1+1", "2+1", "1+2", "2+3", "2 colocate"}
    assert {p["compile"] for p in plans} == {"", "warm", "cold"} and {p["restarts"] for p in plans} == {0, 1}
    assert all(p["phase"] in PHASES and p == make_plan(p["seed"]) for p in plans)


# ---------------------------------------------------------------------------------------------------------
# The rig itself


def test_an_orphan_is_found_and_ended(tmp_path, monkeypatch):
    """The job ends, its child does not: reported after the time limit, and killed."""
    monkeypatch.setattr("faults.END_LIMIT_S", 1.0)
    (tmp_path / "struck").write_text(str(time.monotonic()))
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    env = os.environ | {"FAULTS_JOB": str(tmp_path)}
    job = subprocess.Popen([sys.executable, "-c", child], env=env, start_new_session=True)
    seen, problems = wait_for_end(job, tmp_path, "ends")
    assert len(problems) == 1 and "1 processes live" in problems[0] and seen["end_s"] >= 1
    time.sleep(0.2)
    assert marked(tmp_path) == []


def test_a_torn_checkpoint_and_another_loss_are_seen(launcher, small, tmp_path):
    flags = [*small, *"--steps 2 --batches-per-step 1 --save-every 1".split()]
    run = launcher.run(2, tmp_path / "run", *flags).good().folder
    other = Path(shutil.copytree(run, tmp_path / "other"))
    assert compare_checkpoints(other, run, 2) == [] and compare_metrics(other, run) == []
    weights = other / "step-000002" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\0\0\1")
    assert "differs" in compare_checkpoints(other, run, 2)[0]
    weights.write_bytes(whole[:-4])
    assert "not whole" in compare_checkpoints(other, run, 2)[0]
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    for changed in (
        [*lines, lines[-1]],
        lines[:-1],
        [*lines[:-1], lines[-1].replace('"loss": ', '"loss": 1')],
    ):
        (other / "metrics.jsonl").write_text("".join(changed))
        assert compare_metrics(other, run)


def test_the_disk_that_is_full_is_small(monkeypatch):
    """The fault fills whatever disk the run folder is on: it must never be the machine's own."""
    rig = object.__new__(Rig)
    rig.clock = Path("/nonexistent")
    seed = next(s for s in range(2000) if make_plan(s)["kind"] == "full disk")
    monkeypatch.delenv("FAULTS_MOUNTS", raising=False)
    assert "skipped" in rig.one(seed)["outcome"]


# ---------------------------------------------------------------------------------------------------------
# The last steps


def test_a_run_whose_last_five_steps_are_bad_has_not_finished(launcher, small, tmp_path):
    """Every step is looked at some steps later, the last ones at the end."""
    flags = "--drafters 1 --batches-per-step 2 --steps 9 --save-every 3 --eval-every 20".split()
    plant = NAN_FEATURES.format(when="batch.index >= 8")
    ended = launcher.run(2, tmp_path / "run", *small, *flags, plant=plant)
    assert ended.codes == [1, 1] and ended.status()["state"] == "failed", ended.text
    assert ended.text.count("train.py: 5 steps in a row with a non-finite gradient, up to step 9") == 1
    plant = NAN_FEATURES.format(when="batch.index >= 10")
    assert launcher.run(2, tmp_path / "four", *small, *flags, plant=plant).good().status()["step"] == 9


# ---------------------------------------------------------------------------------------------------------
# A restarted job


def test_a_restarted_job_goes_on_from_its_newest_checkpoint(launcher, small, tmp_path):
    """Not from the one it was once told to resume from; with what it was told beside that, split anew."""
    run, flags = tmp_path / "run", "--drafters 2 --batches-per-step 2 --save-every 2 --eval-every 9".split()
    launcher.run(3, run, *small, *flags, "--steps", 6).good()
    again = ["--resume", run / "step-000002", "--drafters", 2, "--steps", 8]
    kept = f"train.launcher_store().set('run', {str(run)!r})"  # by the first attempt, for the second
    done = launcher.run(2, None, *again, plant=kept, TORCHELASTIC_RESTART_COUNT="1").good()
    assert f"resumed from {run}/step-000006: 6 of 8 steps done" in done.out[0], done.text
    assert "1 drafter(s) + 1 target(s)" in done.out[0]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(9)) and not list(run.glob("aside-*"))


# ---------------------------------------------------------------------------------------------------------
# A terminal that is lost

IN_A_SHELL = "{how} -m torch.distributed.run --standalone --nproc_per_node=2 {train} {flags} > {log} 2>&1"


@pytest.mark.parametrize("how", ["in front", "detached"])
def test_a_lost_terminal(small, tmp_path, how):
    """In front, the job stops in order; detached (`setsid ... &`, as the README says) it goes on to its end.

    `nohup` is not enough: torchrun takes SIGHUP back.
    """
    flags = [*small, *"--steps 150 --save-every 5 --eval-every 1000 --out".split(), str(tmp_path / "run")]
    command = IN_A_SHELL.format(
        how=f"{'setsid ' * (how == 'detached')}{sys.executable}", train=ROOT / "train.py",
        flags=" ".join(flags), log=tmp_path / "log",
    )  # fmt: skip
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve("/bin/bash", ["bash", "--norc", "-i"], environment(tmp_path, FAULTS_JOB=str(tmp_path)))
    os.write(terminal, f"{command}{' &' * (how == 'detached')}\n".encode())
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "step-000005").exists():
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.02)
    os.close(terminal)  # the shell gets SIGHUP and passes it on to its jobs
    os.waitpid(pid, 0)
    while marked(tmp_path):
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == ("stopped" if how == "in front" else "finished"), (status, how)
    log = [
        line.split()[1]
        for line in (tmp_path / "run" / "train.log").read_text().splitlines()
        if "gnorm" in line
    ]
    assert log == [f"{n:05d}/00150" for n in range(1, status["step"] + 1)]  # complete either way
    assert (tmp_path / "run" / f"step-{status['step']:06d}" / "state.json").exists()


# ---------------------------------------------------------------------------------------------------------
# A stop that comes too late

SLOW = """
import os, pathlib, time, world
world.STOP_LIMIT_S = 4.0
pid = pathlib.Path({pid})
if RANK == 0:
    pid.write_text(str(os.getpid()))
real = train.Job.make_features
def planted(job, batch, out):
    if batch.index == 8:  # as torchrun passes a signal on
        for number in (os.getpid(), int(pid.read_text())):
            os.kill(number, 15)
    if batch.index >= 8:
        time.sleep(0.6)
    return real(job, batch, out)
train.Job.make_features = planted
"""


def test_steps_too_slow_for_an_orderly_stop_are_not_lost(launcher, small, tmp_path):
    """The stop takes effect some steps later; what rank 0 has when it hears of it is written at once."""
    flags = [
        *small,
        *"--drafters 1 --batches-per-step 2 --steps 12 --save-every 100 --eval-every 100".split(),
    ]
    whole = launcher.run(2, tmp_path / "whole", *flags).good()
    ended = launcher.run(2, tmp_path / "run", *flags, plant=SLOW.format(pid=repr(str(tmp_path / "pid"))))
    assert ended.codes == [1, 1] and ended.seconds < 30, ended.text
    assert ended.status()["state"] == "failed" and "ended by force: SIGTERM" in ended.status()["why"]
    (place,) = (tmp_path / "run").glob("step-*")
    step = int(place.name[5:])
    assert 1 <= step < 12
    launcher.run(2, None, "--resume", tmp_path / "run").good()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    again = {m["step"]: m for m in map(json.loads, lines)}
    assert all(again[m["step"]]["loss"] == m["loss"] for m in whole.records() if m["step"] > step)
    assert compare_checkpoints(tmp_path / "run", whole.folder, 12) == []
