"""One line a check and one verdict: what every diagnose script prints.

    args = parse_args("diagnose.env", __doc__)      # --strict, --json FILE, --traceback
    report = Report("env", args)
    report.run("disk", check_disk, "runs")          # prints `[ok] disk  41 GiB free`
    sys.exit(report.finish())                       # prints `READY (1 ok)`, gives the exit code

A check returns (or raises) `ok(message)`, `warn(message, fix)`, `fail(message, fix)` or `skip(message, fix)`,
or a list of them; `fix` is a command to paste. Anything else it raises is a CRASH of that check alone.
Exit codes: 0 ready, 1 FAIL or CRASH, 2 usage. `--strict` counts warn and skip as FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

LONGEST_FIX = 1000  # characters of a command to paste
STATES = ("ok", "warn", "skip", "FAIL", "CRASH")


class Finding(Exception):
    """The outcome of one check; an exception so that a check may also raise it from deep inside."""

    def __init__(self, state: str, message: str, fix: str = "", name: str = "", **data):
        super().__init__(message)
        assert state in STATES, state
        assert fix or state == "ok", f"[{state}] {message}: everything but ok needs a fix"
        self.state, self.message, self.fix, self.name, self.data = state, message, fix, name, data


def ok(message: str, *, name: str = "", **data) -> Finding:
    """`name` replaces the check's name (for a check that returns several); `data` goes into the JSON."""
    return Finding("ok", message, name=name, **data)


def warn(message: str, fix: str, *, name: str = "", **data) -> Finding:
    return Finding("warn", message, fix, name, **data)


def fail(message: str, fix: str, *, name: str = "", **data) -> Finding:
    return Finding("FAIL", message, fix, name, **data)


def skip(message: str, fix: str, *, name: str = "", **data) -> Finding:
    return Finding("skip", message, fix, name, **data)


def set_aside(file: str, functions: str) -> str:
    """The fix for a rule that an edit broke; git keeps the edit."""
    return f"git stash push -- {file}  # sets your edit of {functions} aside; back with: git stash pop"


def again(script: str) -> str:
    """The command that shows the traceback: this script's own flags, none for one that `diagnose` asked."""
    words = ["python", "-m", "diagnose" if script == "diagnose" else f"diagnose.{script}", "--traceback"]
    called = Path(sys.argv[0])
    if script == (called.parent.name if called.stem == "__main__" else called.stem):
        words += [flag for flag in sys.argv[1:] if flag != "--traceback"]
    command = shlex.join(words)
    if len(command) <= LONGEST_FIX:
        return command
    return f"{command[:LONGEST_FIX].rpartition(' ')[0]} …  # and the other flags as before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="count warn and skip as FAIL")
    parser.add_argument("--json", metavar="FILE", type=writable, help="also write everything as JSON")
    parser.add_argument("--traceback", action="store_true", help="print the traceback of a CRASH")


class Parser(argparse.ArgumentParser):
    """The flags of a script; a wrong one is one line and exit 2, without argparse's usage before it.

    Not data.py's, which needs numpy: `env` must run where that is missing.
    """

    def __init__(self, prog: str, doc: str | None):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=doc, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.refuse(f"{message}: see python -m {self.prog} --help")

    def refuse(self, message: object) -> NoReturn:
        """For a mistake that --help would not clear up."""
        self.exit(2, f"{self.prog}: {' '.join(str(message).split())}\n")


def parse_args(prog: str, doc: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """For scripts without flags of their own."""
    parser = Parser(prog, doc)
    add_arguments(parser)
    return parser.parse_args(argv)


def writable(name: str) -> str:
    folder = Path(name).parent
    if not folder.is_dir() or Path(name).is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {name}: name a file in a folder that can be written")
    # What is renamed into its place would be gone: as root even /dev/null.
    if Path(name).is_symlink() or (Path(name).exists() and not Path(name).is_file()):
        raise argparse.ArgumentTypeError(f"cannot write {name}: it is a link or a device: name a file")
    return name


def picture(name: str) -> str:
    if Path(name).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{name}: give a name that ends in .png, .svg or .pdf")
    return writable(name)


class Report:
    """Collects findings and prints each at once. `quiet` is for ranks other than 0."""

    def __init__(self, script: str, args: argparse.Namespace | None = None, quiet: bool = False):
        self.script, self.args, self.quiet = script, args, quiet
        self.section = ""  # set by `python -m diagnose`, which asks several scripts
        self.checks: list[dict] = []
        self.extra: dict = {}  # top-level JSON keys of one script, such as fx_race's `trials`

    def say(self, text: str = "") -> None:
        if self.quiet:
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `| head` has seen enough; the verdict and --json still come
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def table(self, rows: Iterable, headers: Iterable[str], **options) -> None:
        from tabulate import tabulate  # here, so that env can still say that it is missing

        self.say(tabulate(list(rows), headers=list(headers), **options))

    def run(self, name: str, check: Callable, *args, **kwargs) -> list[Finding]:
        """Run one check, print its lines; never raises (except when the user interrupts)."""
        start = time.perf_counter()
        trace = ""
        try:
            result = check(*args, **kwargs)
        except Finding as finding:
            result = finding
        except (Exception, SystemExit) as error:  # the check is broken or the machine is: say it, go on
            trace = traceback.format_exc()
            result = self._crash(name, error)
        try:
            findings = _as_list(result)
        except TypeError as error:
            findings = [self._crash(name, error)]
        seconds = (time.perf_counter() - start) / max(1, len(findings))
        for finding in findings:
            self.add(name, finding, seconds, trace)
        return findings

    def add(self, name: str, finding: Finding, seconds: float = 0.0, trace: str = "") -> None:
        """Print and keep a finding that is already known."""
        name = finding.name or name
        message = " ".join(finding.message.split())
        self.say(f"[{finding.state}] {name}  {message}")
        for i, line in enumerate(finding.fix.splitlines()):
            self.say(("    fix: " if i == 0 else "         ") + line)
        if trace and self.args is not None and getattr(self.args, "traceback", False):
            self.say(trace.rstrip())
        check = {"section": self.section, "name": name, "state": finding.state, "message": message}
        check |= {"fix": finding.fix, "seconds": round(seconds, 4), **finding.data}
        self.checks.append(check | ({"traceback": trace} if trace else {}))

    def crash(self, name: str, error: BaseException) -> None:
        """Keep what broke outside of a check; call it while the exception is being handled."""
        self.add(name, self._crash(name, error), trace=traceback.format_exc())

    def _crash(self, name: str, error: BaseException) -> Finding:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        message = f"{type(error).__name__}: {error}{place}"
        return Finding("CRASH", message, again(self.section or self.script), name)

    def finish(self, args: argparse.Namespace | None = None) -> int:
        """Print the verdict, write the JSON, give the exit code."""
        args = args or self.args
        strict = bool(getattr(args, "strict", False))
        verdict, line, code = judge(self.checks, strict)
        if getattr(args, "json", None) and not self.quiet:
            content = {"script": self.script, "verdict": verdict, "summary": line, "exit_code": code}
            content |= {"strict": strict, "python": sys.executable, "host": platform.node()}
            write_json(args.json, content | self.extra | {"checks": self.checks})
        self.say(line)
        return code


def judge(checks: list[dict], strict: bool = False) -> tuple[str, str, int]:
    """(`READY` or `NOT READY`, the last line, the exit code)."""
    if not checks:
        return "NOT READY", "NOT READY: nothing was checked", 1
    names: dict[str, list[str]] = {state: [] for state in STATES}
    for check in checks:
        state = "FAIL" if strict and check["state"] in ("warn", "skip") else check["state"]
        section = check.get("section")
        names[state].append(f"{section}: {check['name']}" if section else check["name"])
    broken = [s for s in ("FAIL", "CRASH") if names[s]]
    if broken:
        parts = [f"{len(names[s])} {s} ({', '.join(dict.fromkeys(names[s]))})" for s in broken]
        return "NOT READY", "NOT READY: " + ", ".join(parts), 1
    counts = ", ".join(f"{len(names[s])} {s}" for s in ("ok", "warn", "skip") if names[s])
    return "READY", f"READY ({counts})", 0


def leave(code: int) -> NoReturn:
    """End a script; a rank as train.py ends, since destructors now and then abort one that is done."""
    if "RANK" in os.environ:
        import train

        train.end(code)
    sys.exit(code)


def write_json(path: str | Path, content: dict) -> None:
    """Written beside and renamed, so that a reader never sees half of it."""
    beside = Path(f"{path}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=1, default=str) + "\n")
    os.replace(beside, path)


def _as_list(result) -> list[Finding]:
    findings = [result] if isinstance(result, Finding) else result
    if not isinstance(findings, (list, tuple)) or not all(isinstance(f, Finding) for f in findings):
        raise TypeError(f"a check returns ok(), warn(), fail() or skip(), not {type(result).__name__}")
    if not findings:
        raise TypeError("a check returned no finding at all")
    return list(findings)
