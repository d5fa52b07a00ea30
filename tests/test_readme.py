"""The README is a contract: every command, flag and path that it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {p.name: p.read_text(encoding="utf-8") for p in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]}
TORCHRUN = {"standalone", "nproc_per_node", "nnodes", "rdzv-backend", "rdzv-endpoint", "max-restarts"}


IN_TURN = """
import os, runpy, sys, traceback
sys.path[:0] = ["."]
import train, generate  # what takes seconds to import, once for all scripts
for n, script in enumerate(sys.argv[1:]):
    print(f"=== {script}", flush=True)
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{script} --help failed")
        continue
    sys.argv = [script, "--help"]
    try:
        if script.startswith("-m "):
            runpy.run_module(script[3:], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(script) or "."
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(1 if ended.code else 0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each script of a command says to --help."""
    scripts = {script_of(command) for text in DOCS.values() for command in commands(text)} - {None}
    asked = sorted({"train.py", *scripts})
    done = subprocess.run([sys.executable, "-c", IN_TURN, *asked], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("=== ")[1:]
    return {script: part for script, part in zip(asked, parts, strict=True) if part.startswith(script)}


def commands(text: str) -> list[str]:
    """The command lines of the code blocks, comments and continuation marks taken off."""
    lines = "\n".join(re.findall(r"```\n(.*?)```", text, re.S)).replace("\\\n", " ").splitlines()
    commands = [part.split("#")[0].strip() for line in lines for part in line.split("&&")]
    return [c for c in commands if re.match(r"(setsid )?(python|torchrun|pip|pytest)\b", c)]


def script_of(command: str) -> str | None:
    """`train.py` or `-m diagnose.env` of a command line."""
    found = re.search(r"(-m diagnose(?:\.\w+)?|\b[\w/]+\.py\b)", command)
    return found and found.group(1)


@pytest.mark.parametrize("name", sorted(DOCS))
def test_commands_run_scripts_that_exist_with_flags_that_exist(name, helps):
    for command in commands(DOCS[name]):
        script = script_of(command)
        if script is None:
            assert command.startswith(("pip install -r requirements.txt", "pytest", "python -c ")), command
            continue
        place = script.removeprefix("-m ").replace(".", "/") if script.startswith("-m") else script
        assert (ROOT / place).is_dir() or (ROOT / place).with_suffix(".py").is_file(), command
        known = set(re.findall(r"--([\w-]+)", helps[script])) | TORCHRUN
        if re.search(r"flags (are those )?of train\.py", helps[script]):
            known |= set(re.findall(r"--([\w-]+)", helps["train.py"]))
        assert set(re.findall(r"--([\w-]+)", command)) <= known, command


def test_every_train_flag_is_in_the_table_and_the_other_way_round(helps):
    known = set(re.findall(r"^  --([\w-]+)", helps["train.py"], re.M))
    table = README[README.index("## Flags of train.py") :]
    assert set(re.findall(r"`--([\w-]+)`", table)) == known


def test_the_tree_names_what_is_there_and_all_scripts_are_in_it():
    tree = re.search(r"## What is where\n\n```\n(.*?)```", README, re.S).group(1)
    named = [line.split()[0] for line in tree.splitlines()]
    for place in named:
        assert (ROOT / place).exists(), place
    assert {p.name for p in ROOT.glob("*.py")} <= set(named)


def test_linked_and_quoted_places_exist():
    for name, text in DOCS.items():
        folder = ROOT / "docs" if (ROOT / "docs" / name).exists() else ROOT
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert "://" in link or (folder / link).exists(), f"{name}: {link}"
        for place in re.findall(r"`((?:assets|docs|diagnose|tests)/[\w./]*)`", text):
            assert (ROOT / place).exists(), f"{name}: {place}"


def test_the_diagnose_scripts_named_are_the_ones_there_are():
    named = re.search(r"with NAME one of (.*?);", README).group(1)
    scripts = {p.stem for p in (ROOT / "diagnose").glob("*.py")} - {"__init__", "__main__", "report"}
    assert set(re.findall(r"`(\w+)`", named)) == scripts


def test_the_output_shown_has_the_log_line_of_this_version():
    import train

    shown = next(line for line in README.splitlines() if line.startswith("step 00100"))
    v = dict.fromkeys(("loss", "lr", "grad_norm", "wait_target", "wait_drafter"), 0.0)
    v |= dict.fromkeys(("acc_len", "step_ms", "tokens_per_s", "peak_gib", "headroom_gib", "eta_s"), 1.0)

    class Job:
        total_steps = 250

    pulse = train.Pulse.__new__(train.Pulse)
    pulse.job = Job
    line = pulse.line(v | {"step": 100})
    strip = re.compile(r"[\d.e+-]+")
    assert strip.sub("", line).startswith(strip.sub("", shown.removesuffix("| ..."))[:-1].rstrip())
