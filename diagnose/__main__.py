"""Every cheap check, one verdict: is this machine ready for a run?

    python -m diagnose [--json FILE] [--strict]

Under a minute on a CPU, compiles nothing big. The scripts behind it answer more when asked alone:
`python -m diagnose.env | compile_cache | comms | mask | batch | memory | throughput`, and
`python -m diagnose.fx_race`, which takes minutes and is never part of this.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

if not __package__:  # python diagnose: same imports as python -m diagnose
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from diagnose.report import Report, parse_args

SCRIPTS = ("env", "compile_cache", "comms", "mask", "batch", "memory", "throughput")


def present() -> list[str]:
    return [name for name in SCRIPTS if importlib.util.find_spec(f"diagnose.{name}")]


def ask(report: Report, name: str, args) -> None:
    """All checks of one script; what breaks outside its checks is a CRASH of this script alone."""
    report.section = name
    try:
        importlib.import_module(f"diagnose.{name}").checks(report, args)
    except (Exception, SystemExit) as error:
        report.crash(name, error)
    report.section = ""


def main(argv: list[str] | None = None) -> int:
    args = parse_args("diagnose", __doc__, argv)
    report = Report("diagnose", args)
    for name in present():
        report.say(f"{name}:")
        ask(report, name, args)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
