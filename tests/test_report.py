"""The report: one line a check, a fix for everything but ok, a crash that stays alone, one verdict."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diagnose.report import Finding, Report, fail, judge, ok, parse_args, skip, warn

STATES = {"ok": ok("m"), "warn": warn("m", "do"), "skip": skip("m", "do"), "FAIL": fail("m", "do")}


def run(capsys, *findings, argv=()):
    report = Report("env", parse_args("report", "", list(argv)))
    for i, finding in enumerate(findings):
        report.run(f"check{i}", lambda f=finding: f)
    code = report.finish()
    return code, capsys.readouterr().out.splitlines(), report


def test_line_formats(capsys):
    code, lines, _ = run(capsys, ok("sum 36 == 36, 412 GB/s"), warn("slow", "ulimit -n 65536\nexec bash"))
    assert lines[:2] == ["[ok] check0  sum 36 == 36, 412 GB/s", "[warn] check1  slow"]
    assert lines[2:] == ["    fix: ulimit -n 65536", "         exec bash", "READY (1 ok, 1 warn)"]
    assert code == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_verdict_of_each_state(capsys, state, strict):
    code, lines, _ = run(capsys, ok("fine"), STATES[state], argv=["--strict"] if strict else [])
    bad = state == "FAIL" or (strict and state in ("warn", "skip"))
    assert code == (1 if bad else 0)
    assert lines[-1].startswith("NOT READY: 1 FAIL (check1)" if bad else "READY (")


def test_crash_stays_alone_and_is_not_ready(capsys):
    report = Report("env", parse_args("report", "", []))
    report.run("breaks", lambda: 1 / 0)
    report.run("leaves", lambda: sys.exit("gone"))
    report.run("nothing", lambda: None)
    report.run("raises", lambda: (_ for _ in ()).throw(fail("deep", "do")))
    report.run("works", lambda: ok("fine"))
    assert report.finish() == 1
    out = capsys.readouterr().out.splitlines()
    assert [c["state"] for c in report.checks] == ["CRASH", "CRASH", "CRASH", "FAIL", "ok"]
    assert "ZeroDivisionError" in out[0] and "test_report.py" in out[0]
    assert out[-1] == "NOT READY: 1 FAIL (raises), 3 CRASH (breaks, leaves, nothing)"
    assert sum(line.startswith("    fix: ") for line in out) == 4


@pytest.mark.parametrize(
    ("called", "script", "section", "flags"),
    [
        ("/a/diagnose/batch.py", "batch", "", ["--target", "a dir", "--data", "x.jsonl", "it's"]),
        ("/a/diagnose/__main__.py", "diagnose", "", ["--strict", "--json", "out file"]),
        ("/a/diagnose/__main__.py", "diagnose", "batch", []),  # batch does not know the flags of diagnose
        ("/usr/bin/pytest", "batch", "", []),
    ],
)
def test_fix_of_a_crash_is_the_same_command_with_its_flags(monkeypatch, called, script, section, flags):
    given = flags or ["--strict", "--json", "out file"]
    for more in ([], ["--traceback"]):
        monkeypatch.setattr(sys, "argv", [called, *given, *more])
        report = Report(script, parse_args("report", "", []), quiet=True)
        report.section = section
        report.run("breaks", lambda: 1 / 0)
        module = ".".join(dict.fromkeys(["diagnose", section or script]))
        assert shlex.split(report.checks[0]["fix"]) == ["python", "-m", module, "--traceback", *flags]


def test_fix_of_a_crash_with_very_many_flags_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diagnose/batch.py", "--data", *(f"{n:05d}.jsonl" for n in range(999))])
    report = Report("batch", quiet=True)
    report.run("breaks", lambda: 1 / 0)
    fix = report.checks[0]["fix"]
    assert fix.startswith("python -m diagnose.batch --traceback --data 00000.jsonl 00001.jsonl ")
    assert fix.endswith(".jsonl …  # and the other flags as before") and len(fix) < 1100


def test_interrupt_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Report("env").run("a", interrupted)


def test_everything_but_ok_needs_a_fix():
    for state in ("warn", "skip", "FAIL", "CRASH"):
        with pytest.raises(AssertionError):
            Finding(state, "message")


def test_json_always_has_a_verdict(tmp_path, capsys):
    file = tmp_path / "r.json"
    for finding, verdict, code in ((ok("m", gib=3), "READY", 0), (fail("m", "do"), "NOT READY", 1)):
        report = Report("memory", parse_args("report", "", ["--json", str(file)]))
        report.extra["peak_gib"] = 3
        report.run("a", lambda f=finding: f)
        assert report.finish() == code
        written = json.loads(file.read_text())
        assert (written["verdict"], written["exit_code"], written["peak_gib"]) == (verdict, code, 3)
        assert written["checks"][0]["state"] == finding.state
    assert not [p for p in tmp_path.iterdir() if p != file], "no half-written file stays"


def test_nothing_checked_is_not_ready():
    assert judge([])[2] == 1


def test_sections_name_the_script_in_the_verdict(capsys):
    report = Report("diagnose", parse_args("report", "", []))
    report.section = "memory"
    report.run("headroom", lambda: fail("m", "do"))
    report.finish()
    assert capsys.readouterr().out.splitlines()[-1] == "NOT READY: 1 FAIL (memory: headroom)"


def test_usage_errors_exit_2(tmp_path):
    for argv in (["--nonsense"], ["--json", str(tmp_path / "missing" / "r.json")], ["--json", str(tmp_path)]):
        with pytest.raises(SystemExit) as stop:
            parse_args("report", "", argv)
        assert stop.value.code == 2


SCRIPTS = ("__main__", "batch", "comms", "compile_cache", "env", "fx_race", "mask", "memory", "throughput")


@pytest.mark.parametrize("script", [*(f"diagnose.{name}" for name in SCRIPTS), "bench", "data", "decode"])
def test_a_wrong_flag_is_one_line_and_exit_2(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--nonsense"])
    try:
        code = importlib.import_module(script).main()
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    line = said.err.removesuffix("\n")
    assert code == 2 and "\n" not in line and not said.out
    assert line.startswith(script.removesuffix(".__main__"))
    assert "--help" in line and ("--nonsense" in line or "required" in line)


def test_a_reader_that_has_seen_enough_takes_nothing_away(tmp_path):
    """`python -m diagnose.env --json FILE | head`: the verdict and the file still come, and no traceback."""
    file, (read, write) = tmp_path / "r.json", os.pipe()
    os.close(read)  # a reader that is gone already
    command = [sys.executable, "-m", "diagnose.env", "--json", str(file)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert not done.stderr
    assert json.loads(file.read_text())["exit_code"] == done.returncode


def test_report_needs_no_package_beyond_python():
    code = "import sys, diagnose.report; print(sorted({'torch', 'numpy', 'tabulate'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_script_is_asked_and_a_broken_one_stays_alone(capsys, monkeypatch):
    main = importlib.import_module("diagnose.__main__")
    broken, fine = ModuleType("diagnose.mask"), ModuleType("diagnose.batch")  # the first has no checks()
    fine.checks = lambda report, args: report.run("coverage", lambda: ok("31%"))
    monkeypatch.setitem(sys.modules, "diagnose.mask", broken)
    monkeypatch.setitem(sys.modules, "diagnose.batch", fine)
    monkeypatch.setattr(main, "present", lambda: ["mask", "batch"])
    assert main.main([]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "[ok] coverage  31%" in out and "    fix: python -m diagnose.mask --traceback" in out
    assert out[-1] == "NOT READY: 1 CRASH (mask: mask)"


def test_only_scripts_that_exist_are_asked():
    main = importlib.import_module("diagnose.__main__")
    there = {path.stem for path in Path(main.__file__).parent.glob("*.py")}
    assert set(main.present()) == there & set(main.SCRIPTS) and "env" in main.present()


@pytest.mark.parametrize("script", ["memory", "throughput", "batch", "mask"])
def test_a_device_or_a_link_is_never_replaced(script, tmp_path, monkeypatch, capsys):
    """What is renamed into place would take it away, from everybody where root asks."""
    pipe, link, file = tmp_path / "pipe.png", tmp_path / "link.png", tmp_path / "file.png"
    os.mkfifo(pipe)
    file.write_text("kept")
    link.symlink_to(file)
    parse = importlib.import_module(f"diagnose.{script}").parse
    for flag in ("--json", "--png"):
        for name in (pipe, link):
            with pytest.raises(SystemExit) as stop:
                parse([flag, str(name)])
            assert stop.value.code == 2 and "it is a link or a device" in capsys.readouterr().err
        parse([flag, str(file)])


@pytest.mark.parametrize("script", ["memory", "throughput"])
def test_a_picture_of_no_known_kind_is_refused(script, capsys):
    parse = importlib.import_module(f"diagnose.{script}").parse
    for name in ("x.foo", "x"):
        with pytest.raises(SystemExit):
            parse(["--png", name])
        assert "ends in .png" in capsys.readouterr().err
