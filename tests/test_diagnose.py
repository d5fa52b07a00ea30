"""python -m diagnose in a shell: planted faults make it NOT READY, their fixes, pasted, make it READY.

The faults are real: an edited model.py and data.py in a copy of the repository, a torn cache entry, variables
of the shell. What each script finds besides is in its own test file.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compile_utils

ROOT = Path(__file__).resolve().parents[1]
SEES_ITS_ANCHOR = """

_sees = sees


def sees(starts, ends, context, B, window=0):
    return _sees(starts, ends + (ends > starts), context, B, window)
"""
DRAWS_BACKWARDS = """

_draw = draw_anchors


def draw_anchors(*args, **more):
    return _draw(*args, **more)[::-1].copy()
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    """The scripts in a git repository of their own, as a user has them."""
    if not shutil.which("git"):
        pytest.skip("no git here: edits cannot be set aside")
    folder = tmp_path / "blockdraft"
    shutil.copytree(ROOT / "assets", folder / "assets")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "diagnose", folder / "diagnose", ignore=ignored)
    for file in [*ROOT.glob("*.py"), *ROOT.glob("*.txt")]:
        shutil.copy(file, folder)
    who = "git -c user.name=u -c user.email=u@example.org"
    command = f"git init -q && git add . && {who} commit -q -m all && printf __pycache__ > .git/info/exclude"
    subprocess.run(command, shell=True, cwd=folder, check=True)
    return folder


def shell(tmp_path: Path, clone: Path, script: str, **more: str) -> tuple[int, str]:
    """(exit code, output) of a user's shell, in which `python` is this one."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    strange = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH", "XDG_", "PYTHONPATH", "GLOO_", "NCCL_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    env |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {
        f"GIT_{role}_{what}": "u@example.org"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=env | more, capture_output=True, text=True, timeout=150
    )
    return done.returncode, done.stdout + done.stderr


def test_planted_faults_and_their_pasted_fixes(tmp_path, clone):
    with open(clone / "model.py", "a") as model, open(clone / "data.py", "a") as data:
        model.write(SEES_ITS_ANCHOR), data.write(DRAWS_BACKWARDS)
    build = tmp_path / ".cache" / "blockdraft" / compile_utils.build_name()
    entry = build / "inductor" / "fxgraph" / "ab" / "fabc" / "entry"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"half of a pickle")
    (tmp_path / "elsewhere" / "torch").mkdir(parents=True)
    env = {"PYTHONPATH": str(tmp_path / "elsewhere"), "GLOO_SOCKET_IFNAME": "nosuch0"}

    code, out = shell(tmp_path, clone, "python -m diagnose --json found.json", **env)
    found = json.loads((clone / "found.json").read_text())
    assert code == 1 and found["verdict"] == "NOT READY", out
    failed = {(c["section"], c["name"]): c["fix"] for c in found["checks"] if c["state"] == "FAIL"}
    assert set(failed) == {
        ("env", "settings"),
        ("compile_cache", "entries"),
        ("comms", "ranks"),
        ("mask", "dense mask"),
        ("mask", "block mask"),
        ("batch", "anchors"),
    }, out
    assert "CRASH" not in out

    fixes = dict.fromkeys(failed.values())
    code, out = shell(tmp_path, clone, "\n".join([*fixes, "python -m diagnose --json after.json"]), **env)
    assert code == 0 and out.splitlines()[-1].startswith("READY ("), out
    assert json.loads((clone / "after.json").read_text())["verdict"] == "READY"
    assert (build / "quarantine").is_dir() and not entry.exists()  # set aside, not lost
    stashed = subprocess.run(["git", "stash", "list"], cwd=clone, capture_output=True, text=True, check=True)
    assert len(stashed.stdout.splitlines()) == 2
