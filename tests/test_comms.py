"""diagnose.comms: real gloo ranks; a planted wrong value, dead rank or shared GPU is found and named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diagnose import comms
from diagnose.report import Report

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"gpus", "gloo objects", "gloo all_reduce", "gloo broadcast", "gloo all_gather", "gloo send"}


def started(tmp_path, command: list[str]) -> tuple[int, dict, str]:
    file = tmp_path / "comms.json"
    command = [sys.executable, *command, "--cpu", "--mib", "0.5", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    return done.returncode, json.loads(file.read_text()), done.stdout


def test_healthy_ranks_started_by_the_script(tmp_path):
    code, written, out = started(tmp_path, ["diagnose/comms.py", "--nproc", "3"])
    assert code == 0 and written["verdict"] == "READY", out
    assert {c["name"] for c in written["checks"]} == NAMES
    assert "[ok] gloo all_reduce  sum 6 == 6" in out and "6 of 6 pairs right" in out


def test_healthy_ranks_under_torchrun(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "diagnose.comms"]
    code, written, out = started(tmp_path, torchrun)
    assert code == 0 and {c["name"] for c in written["checks"]} == NAMES
    assert out.count("[ok] gloo send") == 1, "rank 0 alone speaks"


FAULTS = {  # check: what breaks it, what it then says
    "gloo all_reduce": (
        "reduce = dist.all_reduce\n"
        "dist.all_reduce = lambda x, *a, **k: reduce(x.clone() if bad else x, *a, **k)",
        "rank 1: sum 2.0 instead of 3",
    ),
    "gloo broadcast": (
        "cast = dist.broadcast\n"
        "def broadcast(x, *a, **k):\n"
        "    cast(x, *a, **k)\n"
        "    if bad: x[len(x) // 2] += 1\n"
        "dist.broadcast = broadcast",
        "rank 1: wrong values from rank 0",
    ),
    "gloo all_gather": (
        "gather = dist.all_gather\n"
        "dist.all_gather = lambda out, x, **k: gather(out[::-1] if bad else out, x, **k)",
        "rank 1: a part holds another rank's values",
    ),
    "gloo send": (
        "send = dist.isend\ndist.isend = lambda x, to, **k: send(x.roll(1) if bad else x, to, **k)",
        "rank 0: wrong values over 1->0",
    ),
    "gloo objects": (
        "def broken(*a, **k): raise RuntimeError('no such device')\n"
        "if bad: comms.Ranks.objects = broken\n"
        "else: comms.Ranks.objects = lambda self: ('', True, '')",
        "rank 1: RuntimeError: no such device",
    ),
}


def spawned(tmp_path, monkeypatch, fault: str) -> tuple[int, list[dict]]:
    """The script's own ranks, with `fault` in effect on rank 1 (where `bad` is true)."""
    driver = tmp_path / "driver.py"
    lines = [f"import os, sys; sys.path[0] = {str(ROOT)!r}", "import torch.distributed as dist"]
    lines += [
        "from diagnose import comms",
        "bad = os.environ['RANK'] == '1'",
        fault,
        "sys.exit(comms.main())",
    ]
    driver.write_text("\n".join(lines))
    monkeypatch.setattr(comms, "__file__", str(driver))
    args = comms.parse(["--cpu", "--nproc", "2", "--mib", "0.25"])
    report = Report("comms", args)
    comms.checks(report, args)
    return report.finish(), report.checks


def test_planted_faults_are_found_each_by_its_check(tmp_path, monkeypatch):
    """All of them in one start; the healthy runs above show that no check fails without its fault."""
    code, found = spawned(tmp_path, monkeypatch, "\n".join(source for source, _ in FAULTS.values()))
    assert code == 1
    failed = {c["name"]: c["message"] for c in found if c["state"] == "FAIL"}
    assert failed == {name: words for name, (_, words) in FAULTS.items()}


def test_a_dead_rank_ends_the_check_and_is_named(tmp_path, monkeypatch):
    code, (found,) = spawned(tmp_path, monkeypatch, "if bad: sys.exit('rank died of a planted fault')")
    assert (code, found["state"]) == (1, "FAIL")
    assert "rank 1 failed: rank died of a planted fault" in found["message"]


def test_ranks_on_one_gpu_are_found_by_uuid():
    apart = [("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1x")]
    assert all(comms.judge_gpus(apart, rank)[1] for rank in range(3))
    shared = [("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")]
    assert [comms.judge_gpus(shared, rank)[1] for rank in range(3)] == [False, True, False]
    assert "ranks 0, 2" in comms.judge_gpus(shared, 0)[2]
    mixed = [("a", "GPU-1"), ("a", "")]
    assert [comms.judge_gpus(mixed, rank)[1] for rank in range(2)] == [True, False]
    assert all(comms.judge_gpus([("a", ""), ("a", "")], rank)[1] for rank in range(2))


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,GPU-x"}, "GPU-x"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "5"}, "5"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "5"}, "5"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}, ""),
    ],
    ids=str,
)
def test_each_rank_sees_its_gpu_as_device_0(monkeypatch, environ, expected):
    monkeypatch.setattr(comms.os, "environ", dict(environ))
    comms.narrow_to_local_gpu()
    assert comms.os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize("argv", [["--nproc", "1"], ["--mib", "0"], ["--nproc", "many"]], ids=str)
def test_usage_errors_exit_2(argv):
    with pytest.raises(SystemExit) as stop:
        comms.parse(argv)
    assert stop.value.code == 2
