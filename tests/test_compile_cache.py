"""diagnose.compile_cache: staged states of a cache, each with its verdict, and each FAIL's fix pasted into a
shell makes it READY. Only the tests of the probe compile.

The entries are small files in the formats of real ones: pickles, ELF objects, JSON groups, generated Python.
"""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import compile_utils
import model
import train
from diagnose import compile_cache
from diagnose.report import Report

REPOSITORY = Path(__file__).resolve().parents[1]
AS_ROOT = os.geteuid() == 0


def elf(size: int = 256) -> bytes:
    """The smallest thing that says where its section table ends: a 64-byte header and the table."""
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 40, size - 64)  # e_shoff
    struct.pack_into("<HH", header, 58, 64, 1)  # e_shentsize, e_shnum
    return bytes(header) + bytes(size - 64)


class Staged:
    """A warm cache of this build, to be spoiled."""

    KEY, SOURCE = "T1024 A256", "abcdef012345"

    def __init__(self, root: Path):
        self.root = root
        self.build = root / compile_utils.build_name()
        inductor, triton = self.build / "inductor", self.build / "triton"
        self.entry = inductor / "fxgraph" / "ab" / "fabc" / "entry"
        self.aot = inductor / "aotautograd" / "aabc" / "entry"
        self.python = inductor / "ab" / "cab.py"
        self.shared = inductor / "cd" / "ccd.so"
        self.lock = inductor / "locks" / "ccd.lock"
        self.kernel = triton / "KERNELKEY" / "k.cubin"
        self.group = triton / "KERNELKEY" / "__grp__k.json"
        self.manifest = self.build / "manifest.json"
        graph = pickle.dumps({"source_code": "x" * 300, "numbers": list(range(50))})
        warm = {f"{self.KEY} {self.SOURCE}": {"seconds": 9.5, "graphs": 6, "date": "2026-01-01T00:00:00"}}
        manifest = {"format": 1, "fingerprint": compile_utils.fingerprint(), "warm": warm}
        contents = {
            self.entry: graph,
            self.aot: graph,
            self.python: b"import torch\n\n\ndef call(args):\n    return args\n",
            self.shared: elf(),
            self.lock: b"",
            self.kernel: elf(),
            self.group: json.dumps({"child_paths": {"k.cubin": str(self.kernel)}}).encode(),
            self.manifest: json.dumps(manifest).encode(),
        }
        old = os.umask(0o077)
        try:
            for path, content in contents.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        finally:
            os.umask(old)

    def edit_manifest(self, **change) -> None:
        self.manifest.write_text(json.dumps(json.loads(self.manifest.read_text()) | change))


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Other caches of this user are not part of the staged state; neither is the run's real plan."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_cache, "_inductor_default", lambda: [])
    monkeypatch.setattr(compile_cache, "run_plan", lambda flags: (Staged.KEY, Staged.SOURCE))


@pytest.fixture
def cache(tmp_path):
    return Staged(tmp_path / "my cache")  # the fixes must quote it


def diagnose(root: Path, *argv: str) -> tuple[int, dict[str, list[dict]]]:
    """(exit code, {check: findings}); states, messages and fixes as the JSON has them."""
    args = compile_cache.parse(["--compile-cache", str(root), *argv])
    report = Report("compile_cache", args, quiet=True)
    compile_cache.checks(report, args)
    found: dict[str, list[dict]] = {}
    for check in report.checks:
        assert check["fix"] or check["state"] == "ok", check
        found.setdefault(check["name"], []).append(check)
    return report.finish(), found


def bad(found: dict[str, list[dict]]) -> dict[str, str]:
    """{check: worst state} of everything that is not ok."""
    order = ["warn", "skip", "FAIL", "CRASH"]
    states = {name: [c["state"] for c in checks if c["state"] != "ok"] for name, checks in found.items()}
    return {name: max(s, key=order.index) for name, s in states.items() if s}


def text(found: dict[str, list[dict]], name: str) -> str:
    return "; ".join(c["message"] for c in found[name])


def paste(fix: str, folder: Path) -> None:
    """The fix in a shell. Only this script's own commands then run in this process: it has the staged plan,
    and a new process would import torch. No sudo in tests.
    """
    tools, calls = folder / "tools", folder / "calls"
    tools.mkdir(exist_ok=True)
    calls.write_text("")
    for name, body in (
        ("python", f"printf '%s\\037' \"$@\" >> '{calls}'; echo >> '{calls}'"),
        ("sudo", '"$@"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o700)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", fix], env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, (fix, done.stderr)
    for line in calls.read_text().splitlines():
        module, name, *argv = line.split("\037")[:-1]
        assert (module, name) == ("-m", "diagnose.compile_cache")
        compile_cache.main(argv)


def ready_after_the_fixes(root: Path, found: dict[str, list[dict]], folder: Path) -> dict[str, list[dict]]:
    """Paste the fix of every FAIL; what the script then finds, which is READY."""
    fixes = [c["fix"] for checks in found.values() for c in checks if c["state"] == "FAIL"]
    for fix in dict.fromkeys(fixes):
        paste(fix, folder)
    code, after = diagnose(root)
    assert code == 0 and fixes, (fixes, bad(after))
    return after


# ---------------------------------------------------------------------------------------------------------
# States without a fault


def test_state_warm(cache):
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {}
    assert "6 graphs, took 9.5 s" in text(found, "warm")
    assert found["entries"][0]["files"] == 8 and found["entries"][0]["graphs"] == 1
    assert [f["used"] for f in found["folders"][0]["folders"]] == [True]


def test_state_cold(tmp_path):
    code, found = diagnose(tmp_path / "cache")
    assert code == 0 and bad(found) == {"warm": "warn"}
    assert "cold: these shapes were never compiled here" in text(found, "warm")
    folder = f"python -m diagnose.compile_cache --compile-cache {tmp_path}/cache --token-budget 256 --probe"
    assert diagnose(tmp_path / "cache", "--token-budget", "256")[1]["warm"][0]["fix"].startswith(folder)
    assert not (tmp_path / "cache").exists()  # diagnosing leaves nothing behind


def test_state_model_edited(cache):
    cache.edit_manifest(
        warm={f"{cache.KEY} another": {"seconds": 1, "graphs": 1, "date": "2026-01-01T00:00:00"}}
    )
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {"warm": "warn"}
    assert "model.py or fp8.py changed" in text(found, "warm")


def test_state_other_shapes(cache, monkeypatch):
    monkeypatch.setattr(compile_cache, "run_plan", lambda flags: ("T2048 A256", Staged.SOURCE))
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {"warm": "warn"}
    assert "never compiled here: T2048" in text(found, "warm")


def test_state_noted_as_warm_but_entries_deleted(cache):
    shutil.rmtree(cache.build / "inductor")
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {"warm": "warn"}
    assert "entries are gone" in text(found, "warm")


def test_state_other_torch(cache):
    """Another build's folder lies beside: this run is cold, and --prune removes the other only."""
    other = cache.root / "torch-2.0.0-0123456789ab"
    cache.build.rename(other)
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {"warm": "warn"}
    assert "torch-2.0.0" in text(found, "other builds")
    mine = Staged(cache.root)
    code, found = diagnose(cache.root, "--prune")
    assert code == 0 and not other.exists() and mine.entry.exists()


def test_state_folder_filled_by_another_build(cache, tmp_path):
    cache.edit_manifest(fingerprint=compile_utils.fingerprint() | {"triton": "2.0"})
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"manifest": "FAIL"}
    assert "triton 2.0 there" in text(found, "manifest")
    ready_after_the_fixes(cache.root, found, tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Broken files: named, set aside with --fix, fine after that


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"{'not': json")


BROKEN = {
    "truncated_entry": ("entry", cut),
    "empty_entry": ("entry", empty),
    "truncated_autograd_entry": ("aot", cut),
    "truncated_kernel": ("kernel", cut),
    "empty_kernel": ("kernel", empty),
    "truncated_shared_object": ("shared", cut),
    "kernel_that_is_no_kernel": ("kernel", garbage),
    "unparsable_group": ("group", garbage),
    "half_written_group": ("group", cut),
    "empty_group": ("group", empty),
    "half_written_python": ("python", lambda p: p.write_bytes(p.read_bytes()[:30])),
    "half_written_manifest": ("manifest", cut),
    "empty_manifest": ("manifest", empty),
}


@pytest.mark.parametrize("state", BROKEN)
def test_state_broken(cache, tmp_path, state):
    which, spoil = BROKEN[state]
    path = getattr(cache, which)
    spoil(path)
    check = "manifest" if which == "manifest" else "entries"
    code, found = diagnose(cache.root)
    expected = {check: "FAIL"} | ({"warm": "warn"} if which == "manifest" else {})
    assert code == 1 and bad(found) == expected
    assert str(path) in text(found, check)
    assert path.exists()  # nothing is touched without --fix
    ready_after_the_fixes(cache.root, found, tmp_path)
    assert not path.exists() and list((cache.build / "quarantine").iterdir())


def test_many_broken_files_are_summed_up_and_all_set_aside(cache, tmp_path):
    for i in range(30):
        garbage(cache.python.with_name(f"c{i}.py"))
    code, found = diagnose(cache.root)
    assert code == 1 and len(found["entries"]) == 21 and "10 more" in text(found, "entries")
    ready_after_the_fixes(cache.root, found, tmp_path)


def test_a_broken_kernel_goes_with_its_whole_folder(cache):
    cut(cache.kernel)
    diagnose(cache.root, "--fix")
    assert not cache.kernel.parent.exists() and cache.entry.exists()


def test_state_left_by_a_killed_process(cache):
    stale = cache.entry.with_name(".123.456.tmp")
    fresh = cache.entry.with_name(".124.456.tmp")
    kernel = cache.kernel.parent / "tmp.pid_77_abc" / "k.cubin"
    kernel.parent.mkdir()
    for path in (stale, fresh, kernel):
        path.write_bytes(b"half")
    for path in (stale, kernel):
        os.utime(path, (time.time() - 7200,) * 2)
    code, found = diagnose(cache.root)
    assert (
        code == 0 and bad(found) == {"entries": "warn"} and "2 half-written files" in text(found, "entries")
    )
    diagnose(cache.root, "--fix")
    assert not stale.exists() and not kernel.exists() and fresh.exists()  # somebody may be writing that one


# ---------------------------------------------------------------------------------------------------------
# Owners and permissions


@pytest.mark.parametrize("part", ["root", "build"])
def test_state_world_writable_folder(cache, tmp_path, part):
    getattr(cache, part).chmod(0o777)
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"owner": "FAIL"}
    assert "can be written by others (mode 0777)" in text(found, "owner")
    assert bad(ready_after_the_fixes(cache.root, found, tmp_path)) == {}


def test_state_world_writable_file(cache, tmp_path):
    cache.shared.chmod(0o666)
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"owner": "FAIL"}
    assert f"{cache.shared} can be written by others" in text(found, "owner")
    ready_after_the_fixes(cache.root, found, tmp_path)
    assert not cache.shared.exists()  # somebody may have written to it


def test_state_symbolic_link_inside(cache, tmp_path):
    (tmp_path / "elsewhere.so").write_bytes(elf())
    cache.shared.unlink()
    cache.shared.symlink_to(tmp_path / "elsewhere.so")
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"owner": "FAIL"} and "symbolic link" in text(found, "owner")
    ready_after_the_fixes(cache.root, found, tmp_path)
    assert (tmp_path / "elsewhere.so").exists()


def test_state_build_folder_is_a_symbolic_link(cache, tmp_path):
    cache.build.rename(tmp_path / "elsewhere")
    cache.build.symlink_to(tmp_path / "elsewhere")
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found)["owner"] == "FAIL" and "symbolic link" in text(found, "owner")
    with pytest.raises(compile_utils.CacheError, match="symbolic link"):
        compile_utils.use_cache(str(cache.root))
    ready_after_the_fixes(cache.root, found, tmp_path)
    assert (tmp_path / "elsewhere" / "manifest.json").exists()  # only the link is gone


def test_state_a_link_to_nothing(tmp_path):
    (tmp_path / "cache").symlink_to(tmp_path / "gone")
    code, found = diagnose(tmp_path / "cache")
    assert code == 1 and "symbolic link to nothing" in text(found, "owner")
    ready_after_the_fixes(tmp_path / "cache", found, tmp_path)


@pytest.mark.skipif(not AS_ROOT, reason="needs root, to give files away")
@pytest.mark.parametrize("part", ["root", "build", "entry"])
def test_state_foreign_owner(cache, tmp_path, part):
    os.chown(getattr(cache, part), 65534, 65534)
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"owner": "FAIL"} and "belongs to user 65534" in text(found, "owner")
    ready_after_the_fixes(cache.root, found, tmp_path)
    assert not getattr(cache, part).exists()


def test_state_parent_that_anybody_can_rename_in(tmp_path):
    parent = tmp_path / "open"
    parent.mkdir()
    cache = Staged(parent / "cache")
    parent.chmod(0o777)
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {"owner": "warn"} and str(parent) in text(found, "owner")
    paste(found["owner"][0]["fix"], tmp_path)
    assert bad(diagnose(cache.root)[1]) == {}


def test_state_a_file_is_in_the_way(tmp_path):
    (tmp_path / "cache").write_text("")
    code, found = diagnose(tmp_path / "cache")
    assert code == 1 and bad(found)["owner"] == "FAIL" and "not a folder" in text(found, "owner")
    ready_after_the_fixes(tmp_path / "cache", found, tmp_path)
    assert (tmp_path / "cache.aside").exists()


# ---------------------------------------------------------------------------------------------------------
# Disks


@pytest.fixture
def mounted(tmp_path):
    """mount(options) -> a small tmpfs that is gone after the test."""
    point = tmp_path / "disk"
    point.mkdir()

    def mount(options: str) -> Path:
        if not AS_ROOT or not shutil.which("mount"):
            pytest.skip("needs root, to mount a small disk")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
        return point

    yield mount
    subprocess.run(["umount", str(point)], capture_output=True, check=False)


def test_state_full_disk(mounted, tmp_path):
    """Another build's cache fills it: the fix deletes that one."""
    cache = Staged(mounted("size=100m,mode=0700") / "cache")
    other = cache.root / "torch-2.0.0-0123456789ab"
    other.mkdir()
    filler = os.open(other / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(filler, bytes(1 << 18))
    os.close(filler)
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"space": "FAIL", "write": "FAIL"}
    assert "only 0 MiB free" in text(found, "space") and "no space" in text(found, "write")
    with pytest.raises(compile_utils.CacheError, match=r"no space.*Fix:"):
        compile_utils.use_cache(str(cache.root))
    ready_after_the_fixes(cache.root, found, tmp_path)
    assert cache.entry.exists() and not other.exists()


def test_state_no_inodes(mounted, tmp_path):
    cache = Staged(mounted("size=200m,nr_inodes=1500,mode=0700") / "cache")
    other = cache.root / "torch-2.0.0-0123456789ab"
    other.mkdir()
    with pytest.raises(OSError):
        for i in range(2000):
            (other / f"filler{i}").touch()
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"space": "FAIL", "write": "FAIL"}
    assert "only 0 inodes free" in text(found, "space")
    ready_after_the_fixes(cache.root, found, tmp_path)


def test_state_little_space(mounted):
    cache = Staged(mounted("size=200m,mode=0700") / "cache")
    code, found = diagnose(cache.root)
    assert code == 0 and bad(found) == {"space": "warn"}


def test_state_read_only(mounted, tmp_path):
    point = mounted("size=2g,mode=0700")
    cache = Staged(point / "cache")
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
    code, found = diagnose(cache.root)
    assert code == 1 and bad(found) == {"write": "FAIL"} and "read-only" in text(found, "write")
    with pytest.raises(compile_utils.CacheError, match="read-only"):
        compile_utils.use_cache(str(cache.root))
    ready_after_the_fixes(cache.root, found, tmp_path)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_state_network_mount(cache, tmp_path, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/home {os.path.realpath(tmp_path)} {kind} rw 0 0\n")
    code, found = diagnose(cache.root, "--mounts", str(mounts))
    assert code == 0 and bad(found) == {"mount": "warn"} and kind in text(found, "mount")


# ---------------------------------------------------------------------------------------------------------
# The probe's words, and the command


def fake_child(monkeypatch, stdout: str = "", code: int = 0, stderr: str = "") -> None:
    def run(command, **_):
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    monkeypatch.setattr(compile_cache.subprocess, "run", run)


def probe(hits: int, misses: int, reason: str = "", eager: str = "") -> str:
    facts = {"hits": hits, "misses": misses, "seconds": 1.5, "reason": reason, "eager": eager}
    return "noise\nPROBE " + json.dumps(facts) + "\n"


@pytest.mark.parametrize(
    "stdout, code, state, words",
    [
        (probe(6, 0), 0, "ok", "hit: 6 hits"),
        (probe(0, 6, "inductor_config[x] (1 -> 2)"), 0, "warn", "inductor_config[x] (1 -> 2)"),
        (probe(5, 1), 0, "warn", "entries did not load"),
        (probe(0, 0), 0, "FAIL", "compiled nothing"),
        (probe(0, 0, eager="no compiler"), 0, "skip", "no compiler"),
        ("", -11, "FAIL", "ended with -11"),
        ("", 0, "FAIL", "said nothing"),
    ],
)
def test_the_probe_believes_the_counters_only(cache, monkeypatch, stdout, code, state, words):
    fake_child(monkeypatch, stdout, code)
    _, found = diagnose(cache.root, "--probe")
    assert found["probe"][0]["state"] == state and words in text(found, "probe")


@pytest.mark.skipif(not compile_utils.cpp_compiler(), reason="no C++ compiler here")
def test_probe_compiles_in_a_fresh_child_and_hits_the_second_time(tmp_path, monkeypatch):
    (tmp_path / "probed.py").write_text(
        "import torch, compile_utils\n"
        "def f(x):\n    return x @ x\n"
        "def work(flags):\n"
        "    compiled = compile_utils.compile(f, name='f')\n"
        "    compile_utils.gate(lambda: compiled(torch.ones(4, 4)), role='r', leader=0, key='k')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = compile_cache.Place(tmp_path / "cache", tmp_path / "cache" / compile_utils.build_name(), False)
    first = compile_cache.check_probe(place, "probed:work", [])
    assert first.state == "warn" and first.data["misses"] == 1 and "empty" in first.message, first
    second = compile_cache.check_probe(place, "probed:work", [])
    assert second.state == "ok" and second.data["hits"] == 1 and second.data["misses"] == 0, second
    for path in (place.build / "inductor" / "fxgraph").rglob("*"):
        if path.is_file():
            cut(path)  # the next run passes with what was set aside compiled anew
    args = ["--fix", "--compile-cache", str(place.root)]
    assert compile_cache.main(args) == 0
    third = compile_cache.check_probe(place, "probed:work", [])
    assert third.state == "warn" and "entries did not load" in third.message, third


def test_the_probe_runs_all_of_the_runs_gate(monkeypatch):
    """What the child calls unless it is told otherwise; eager here, to be quick."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    flags = "--token-budget 256 --anchors 32 --draft-layers 1 --loss-weights dpace".split()
    ran = []
    for owner, name in ((model.Target, "features"), (train, "accumulate"), (model, "dpace_weights")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, n=name, call=call, **k: (ran.append(n), call(*a, **k))[1])
    try:
        compile_cache.run_gate(flags)
    finally:
        compile_utils.thaw()
    assert compile_utils.last_report().ranks[0].worked
    assert set(ran) == {"features", "accumulate", "dpace_weights"}


def on_gpu(flags: list[str]) -> str:
    """The key of such a run where more than the drafter's layer is compiled."""
    job = compile_cache._job(flags, light=True)
    job.device = torch.device("cuda", 0)
    return train.gate_key(job)


@pytest.mark.parametrize(
    "flags", ["--fp8", "--draft-layers 3", "--taps 3", "--max-length 256", "--max-batch-size 7",
              "--loss-weights dpace", "--anchor-chunk 64", "--variant dflash2", "--target-tp 2"],
)  # fmt: skip
def test_what_changes_the_compiled_code_is_in_the_key(flags):
    assert on_gpu(flags.split()) != on_gpu([])


@pytest.mark.parametrize("flags", ["--lr 1e-3", "--seed 7", "--epochs 2", "--optimizer muon", "--depth 3"])
def test_what_leaves_the_compiled_code_alone_is_not_in_the_key(flags):
    assert on_gpu(flags.split()) == on_gpu([])


def test_the_command_in_the_docstring_runs_and_the_run_plan_is_train_pys(tmp_path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out.json"
    command = [sys.executable, "diagnose/compile_cache.py", "--compile-cache", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "--json", str(out), "--token-budget", "1152"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("READY")
    found = json.loads(out.read_text())
    assert found["verdict"] == "READY"
    [warm] = [c for c in found["checks"] if c["name"] == "warm"]
    assert warm["key"].startswith("T1152 ") and warm["warm"] is False


def test_unknown_flags_are_usage_errors(capsys):
    with pytest.raises(SystemExit) as error:
        compile_cache.parse(["--no-such-flag"])
    assert error.value.code == 2
