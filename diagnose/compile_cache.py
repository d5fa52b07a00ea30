"""Is the compile cache of this run there, warm, whole and safe to execute?

    python -m diagnose.compile_cache                           # the run `torchrun ... train.py` would start
    python -m diagnose.compile_cache --target DIR --data FILE  # any train.py flags: that run
    python -m diagnose.compile_cache --fix                     # set broken files aside
    python -m diagnose.compile_cache --prune                   # delete what other builds left
    python -m diagnose.compile_cache --probe                   # compile the run's layer in a child: a hit?

Without --probe nothing is compiled and nothing in the cache is executed or unpickled. `--compile-cache DIR`
as for train.py. "Broken" is judged by each format: pickles by their opcodes, ELF files (kernels, shared
objects) by their section table, JSON and Python by parsing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import datetime
import getpass
import json
import os
import pickletools
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # python diagnose/compile_cache.py: same imports as python -m diagnose.compile_cache
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import compile_utils
from diagnose.report import Finding, Parser, Report, add_arguments, fail, ok, skip, warn

MIB = 1 << 20
STALE_S = 3600.0  # a temporary file older than this was left by a process that died
PROBE_S = 900.0
LOCKS = ("lock",)  # Triton's; Inductor's and ours end in .lock
MINE = ("python", "-m", "diagnose.compile_cache")


# ---------------------------------------------------------------------------------------------------------
# Is a file whole?


def broken(path: Path) -> str:
    """Why this file of a cache cannot be used, an empty string when it looks whole. Executes nothing."""
    name = path.name
    if name.endswith(".lock") or name in LOCKS:
        return ""
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not content:
        return "is empty"
    if name.endswith(".json") or name.startswith("__grp__"):
        return _broken_json(content)
    if content[:4] == b"\x7fELF" or name.endswith((".so", ".cubin", ".hsaco", ".o")):
        return _broken_elf(content)
    if {"fxgraph", "aotautograd"} & set(path.parts):
        return _broken_pickle(content)
    if name.endswith(".py"):
        return _broken_python(content)
    return ""


def _broken_json(content: bytes) -> str:
    try:
        json.loads(content)
    except ValueError as error:
        return f"is not JSON ({error})"
    return ""


def _broken_elf(content: bytes) -> str:
    """The section table lies at an ELF file's end, so a cut file lacks it. 64-bit little-endian."""
    if content[:4] != b"\x7fELF":
        return "is not an ELF file"
    if len(content) < 64:
        return "is cut off within the ELF header"
    start = int.from_bytes(content[40:48], "little")
    size, count = (int.from_bytes(content[a : a + 2], "little") for a in (58, 60))
    if start + size * count > len(content):
        return f"is cut off: {len(content)} bytes, its section table ends at {start + size * count}"
    return ""


def _broken_pickle(content: bytes) -> str:
    try:
        for _ in pickletools.genops(content):
            pass
    except Exception as error:  # genops raises whatever the bytes lead it to; nothing was executed
        return f"is no whole pickle ({error})"
    return ""


def _broken_python(content: bytes) -> str:
    try:
        ast.parse(content)
    except (SyntaxError, ValueError) as error:
        return f"is not Python ({error})"
    return ""


def is_temporary(path: Path) -> bool:
    return path.name.endswith(".tmp") or any(p.startswith("tmp.pid_") for p in path.parts)


@dataclasses.dataclass
class Scan:
    """What one build's folder holds."""

    files: int = 0
    bytes: int = 0
    graphs: int = 0
    kernels: int = 0
    newest: float = 0.0
    broken: list[tuple[Path, str]] = dataclasses.field(default_factory=list)
    unsafe: list[tuple[Path, str]] = dataclasses.field(default_factory=list)
    stale: list[Path] = dataclasses.field(default_factory=list)


def scan(folder: Path, deep: bool = True, owner: int | None = None) -> Scan:
    """Count what is below `folder`; `deep` also checks every file's format, owner and permissions."""
    found, owner = Scan(), os.geteuid() if owner is None else owner
    for path in _walk(folder):
        try:
            info = path.lstat()
        except FileNotFoundError:  # somebody is using the cache
            continue
        if deep:
            why = _unsafe(path, info, owner)
            if why:
                found.unsafe.append((path, why))
        if stat.S_ISDIR(info.st_mode):
            found.kernels += _is_kernel(path)
            continue
        found.files += 1
        found.bytes += info.st_size
        found.newest = max(found.newest, info.st_mtime)
        found.graphs += "fxgraph" in path.parts and not is_temporary(path)
        if is_temporary(path):
            if time.time() - info.st_mtime > STALE_S:
                found.stale.append(path)
        elif deep and stat.S_ISREG(info.st_mode):
            why = broken(path)
            if why:
                found.broken.append((path, why))
    return found


def _walk(folder: Path) -> Iterator[Path]:
    yield folder
    for base, folders, names in os.walk(folder):
        if Path(base) == folder and "quarantine" in folders:
            folders.remove("quarantine")
        yield from (Path(base) / name for name in (*folders, *names))


def _is_kernel(path: Path) -> bool:
    return path.parent.name == "triton" or path.parent.parent.name == "triton"


def _unsafe(path: Path, info: os.stat_result, owner: int) -> str:
    if stat.S_ISLNK(info.st_mode):
        return f"is a symbolic link to {os.readlink(path)}"
    if info.st_uid != owner:
        return f"belongs to user {info.st_uid}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def quarantine(path: Path, build: Path) -> Path:
    """Move a broken file out of the way; a Triton kernel goes as a whole: its files need each other."""
    if path.is_relative_to(build / "triton") and path.parent != build / "triton":
        path = path.parent
    target = build / "quarantine" / f"{time.time_ns()}-{path.name}"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # gone already with its kernel's folder
        os.replace(path, target)
    return target


# ---------------------------------------------------------------------------------------------------------
# Checks


@dataclasses.dataclass
class Place:
    """The cache this run would use."""

    root: Path
    build: Path
    fix: bool
    mounts: Path = Path("/proc/mounts")
    flags: tuple[str, ...] = ()  # what the user gave to name the folder and the run

    def again(self, *more: str) -> str:
        """This script's command for the same folder and run."""
        return shlex.join([*MINE, *self.flags, *more])


def q(path: Path) -> str:
    return shlex.quote(str(path))


def check_folders(place: Place, report: Report) -> Finding:
    """List every cache on this machine that this user's compiles may have filled."""
    builds = sorted(p for p in place.root.iterdir() if p.is_dir()) if place.root.is_dir() else []
    named = [(b.name, b) for b in builds] + [("Inductor's default", p) for p in _inductor_default()]
    named.append(("Triton's default", Path.home() / ".triton" / "cache"))
    rows, data = [], []
    for name, folder in named:
        if not folder.is_dir():
            continue
        found, used = scan(folder, deep=False), folder == place.build
        age = _age(found.newest)
        rows.append(
            [
                name,
                folder,
                f"{found.bytes / MIB:.1f}",
                found.files,
                found.graphs,
                age,
                "yes" if used else "no",
            ]
        )
        data.append({"folder": str(folder), "bytes": found.bytes, "files": found.files, "used": used})
    if not rows:
        return ok(f"none yet; this run would make {place.build}", folders=[])
    report.table(
        rows, ["cache", "folder", "MiB", "files", "graphs", "newest", "this run"], disable_numparse=True
    )
    unused = sum(not d["used"] for d in data)
    return ok(f"{len(rows)} found, {unused} of them not used by this run", folders=data)


def _inductor_default() -> list[Path]:
    with contextlib.suppress(KeyError, OSError):
        return [Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"]
    return []


def _age(newest: float) -> str:
    if not newest:
        return "-"
    hours = max(0.0, time.time() - newest) / 3600
    return (
        f"{60 * hours:.0f} min" if hours < 1 else f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"
    )


def check_owner(place: Place) -> list[Finding] | Finding:
    """Folders and files that somebody else owns or can write: train.py would refuse, or run their code."""
    findings = []
    for folder in (place.root, place.build):
        if folder.is_symlink() and not folder.exists():
            return fail(f"{folder} is a symbolic link to nothing", f"rm {q(folder)}")
        if not folder.exists():
            continue
        if not folder.is_dir():
            return fail(f"{folder} is not a folder", f"mv {q(folder)} {q(folder)}.aside")
        if folder.is_symlink() and folder == place.build:
            return fail(f"{folder} is a symbolic link to {os.readlink(folder)}", f"rm {q(folder)}")
        problem = compile_utils.check_owner(folder)
        if problem and folder.stat().st_uid != os.geteuid():
            return fail(
                problem, f"mv {q(folder)} {q(folder)}.theirs  # or: --compile-cache with another folder"
            )
        if problem:
            return fail(problem, f"chmod go-w {q(folder)}  # delete it if somebody may have written to it")
    for parent in place.root.absolute().parents:
        if (
            parent.exists()
            and parent.stat().st_mode & stat.S_IWOTH
            and not parent.stat().st_mode & stat.S_ISVTX
        ):
            findings.append(warn(f"anybody can replace folders in {parent}", f"chmod o-w {q(parent)}"))
    if not place.build.exists():
        return findings or ok("the folder does not exist yet; it will be made owner-only")
    unsafe = scan(place.build).unsafe
    if unsafe:
        shown = "; ".join(f"{path} {why}" for path, why in unsafe[:3])
        return [*findings, fail(f"{len(unsafe)} entries: {shown}", f"rm -r {q(place.build)}")]
    return findings or ok(f"{place.build} and all below it are yours alone")


def check_mount(place: Place) -> Finding:
    point, kind = compile_utils.mount_of(place.root, place.mounts)
    if kind in compile_utils.NETWORK_FILE_SYSTEMS:
        fix = "df -hlT  # the disks of this node: give --compile-cache a folder on one of them"
        return warn(f"{place.root} lies on the network file system {kind} ({point})", fix)
    return ok(f"{kind} at {point}")


def check_space(place: Place) -> Finding:
    """Free bytes and inodes where the cache is or would be."""
    folder = _nearest(place.root)
    found = os.statvfs(folder)
    free, inodes = found.f_bavail * found.f_frsize, found.f_favail
    text = f"{free / (1 << 30):.1f} GiB free"
    if free < 64 * MIB:
        return fail(
            f"only {free / MIB:.0f} MiB free at {folder}",
            f"{place.again('--prune')}; df -h {q(folder)}; du -xsh {q(folder)}/* | sort -h | tail",
        )
    if found.f_files and inodes < 1000:
        return fail(f"only {inodes} inodes free at {folder}", f"{place.again('--prune')}; df -i {q(folder)}")
    if free < 1024 * MIB or (found.f_files and inodes < 5000):
        return warn(
            f"{text}, {inodes} inodes: a cold start may need 1 GiB and 5000 files",
            f"df -h {q(folder)}; df -i {q(folder)}",
        )
    return ok(text + (f", {inodes} inodes" if found.f_files else ""), free_bytes=free, free_inodes=inodes)


def check_write(place: Place) -> Finding:
    """Write, rename and lock as the cache does; in the nearest existing folder, leaving nothing behind."""
    folder = _nearest(place.build)
    try:
        compile_utils.check_write(folder)
    except compile_utils.CacheError as error:
        point, _ = compile_utils.mount_of(folder, place.mounts)
        fix = f"df -h {q(folder)}; df -i {q(folder)}; ls -ld {q(folder)}"
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            fix = f"sudo mount -o remount,rw {q(Path(point))}"
        return fail(str(error), f"{fix}  # or give --compile-cache another folder")
    return ok(f"files can be written, renamed and locked in {folder}")


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.is_dir())


def check_manifest(place: Place) -> Finding:
    path = place.build / "manifest.json"
    if not place.build.is_dir():
        return ok("no cache of this build yet")
    if not path.exists():
        if not any((place.build / part).is_dir() for part in ("inductor", "triton")):
            return ok("no cache of this build yet")
        return warn(f"{path} is missing: nobody knows which shapes are warm", place.again("--probe"))
    found = compile_utils.read_manifest(path)
    if not found:
        why = broken(path) or "has another format"
        if place.fix:
            moved = quarantine(path, place.build)
            return warn(f"{path} {why}: set aside as {moved.name}", place.again("--probe"))
        return fail(f"{path} {why}", place.again("--fix"))
    other = compile_utils.fingerprint_difference(found.get("fingerprint", {}))
    if other:
        return fail(f"{place.build} was filled by another build: {other}", f"rm -r {q(place.build)}")
    return ok(f"{len(found['warm'])} warm shapes noted", warm=found["warm"])


def check_entries(place: Place) -> list[Finding] | Finding:
    """Truncated and unparsable files, and what dead processes left."""
    if not place.build.is_dir():
        return ok("no cache of this build yet")
    found = scan(place.build)
    bad = [(p, why) for p, why in found.broken if p != place.build / "manifest.json"]
    findings = []
    for path, why in bad if place.fix else bad[:20]:
        if place.fix:
            moved = quarantine(path, place.build)
            findings.append(warn(f"{path} {why}: set aside in {moved.parent}", f"rm -r {q(moved.parent)}"))
        else:
            findings.append(fail(f"{path} {why}", place.again("--fix")))
    if len(bad) > 20 and not place.fix:
        findings.append(fail(f"and {len(bad) - 20} more broken files", place.again("--fix")))
    if bad and place.fix:
        _forget_warm(place.build / "manifest.json")
    if found.stale and place.fix:
        for path in found.stale:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    elif found.stale:
        text = f"{len(found.stale)} half-written files of processes that died, such as {found.stale[0]}"
        findings.append(warn(text, place.again("--fix")))
    whole = f"{found.files - len(bad)} files whole, {found.bytes / MIB:.1f} MiB, {found.graphs} graphs"
    return findings or ok(whole, bytes=found.bytes, files=found.files, graphs=found.graphs)


def _forget_warm(manifest: Path) -> None:
    """Something compiled is gone: the next gate finds out what is warm and notes it again."""
    found = compile_utils.read_manifest(manifest)
    if found:
        compile_utils.write_beside(manifest, json.dumps(found | {"warm": {}}, indent=1).encode())


def check_others(place: Place, prune: bool) -> Finding:
    """Other builds' folders: never used by this run, they only take space."""
    if not place.root.is_dir():
        return ok("no other build left anything")
    others = [p for p in place.root.glob("torch-*") if p.is_dir() and p != place.build and not p.is_symlink()]
    size = sum(scan(p, deep=False).bytes for p in others)
    if not others:
        return ok("no other build left anything")
    names = ", ".join(p.name for p in others[:4])
    if prune:
        for folder in others:
            shutil.rmtree(folder)
        return ok(f"deleted {len(others)} ({size / MIB:.1f} MiB): {names}")
    text = f"{len(others)} other builds keep {size / MIB:.1f} MiB: {names}"
    return warn(text, place.again("--prune")) if size > 4096 * MIB else ok(text)


def check_warm(place: Place, plan: tuple[str, str] | str) -> Finding:
    """Does the manifest call this run's shapes warm, for the model.py that is there now?"""
    if isinstance(plan, str):
        return skip(
            f"the run's shapes are unknown: {plan}",
            shlex.join([*MINE, "--target", "DIR", "--data", "FILE"]) + "  # as for train.py",
        )
    key, source = plan
    warm = compile_utils.read_manifest(place.build / "manifest.json").get("warm", {})
    entry = warm.get(f"{key} {source}")
    start = place.again("--probe") + "  # compiles them now; the run's first start would too"
    if entry:
        if not scan(place.build, deep=False).graphs:
            gone = f"cold: noted as warm on {entry['date'][:16]}, but the entries are gone: {key}"
            return warn(gone, start, key=key, warm=False)
        text = f"warm since {entry['date'][:16]}, {entry['graphs']} graphs, took {entry['seconds']} s: {key}"
        return ok(text, key=key, source=source, warm=True)
    if any(k.startswith(f"{key} ") for k in warm):
        why = "model.py or fp8.py changed since these shapes were compiled"
        return warn(f"cold: {why}: {key}", start, key=key, warm=False)
    return warn(f"cold: these shapes were never compiled here: {key}", start, key=key, warm=False)


# ---------------------------------------------------------------------------------------------------------
# This run's shapes, and the probe


def run_plan(flags: list[str]) -> tuple[str, str] | str:
    """(key, source hash) that `train.py FLAGS` would warm, or why they are unknown."""
    try:
        job = _job(flags, light=True)
    except (ImportError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    import train

    with compile_utils.planning() as planned:
        train.gate(job)
    return planned[0]


def _job(flags: list[str], light: bool):
    """A train.Job with only what its gate needs: no data, no target weights, no process group.

    `light` leaves both models out; the plan does not touch them. All layers of a target with the same window
    run one compiled code, so that one of them will do.
    """
    import types

    import torch

    import model
    import train
    import world

    c = train.parse_flags(flags)
    if c.target and not c.data:
        c.data = ["unread"]  # shapes do not depend on it
    t = train.backend(c).TargetConfig.from_folder(c.folder)
    asked_tp = c.target_tp
    alone = dataclasses.replace(c, drafters=0, layout="colocate", batches_per_step=0, target_tp=1)
    c = train.resolve(alone, t, 1, 1)  # the split over ranks does not change the shapes, but a target's
    c.target_tp = asked_tp
    job = object.__new__(train.Job)
    job.c, job.t, job.folder, job.world = c, t, None, world.World("colocate", 1)
    job.world.store = None
    gpu = torch.cuda.is_available() and c.device != "cpu"
    job.device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    job.dtype = torch.bfloat16 if gpu else torch.float32
    job.facts = {"mask_token": 0}
    d = job.drafter_config = c.drafter(t)
    job.shapes = train.message_shapes(c, d, job.dtype)
    if light:
        job.drafter, job.optimizer = types.SimpleNamespace(), None
        return job
    table = torch.ones(d.vocab, d.hidden, dtype=job.dtype, device=job.device)
    how = {"in_fp8": c.fp8, "dpace": c.loss_weights == "dpace"}
    job.drafter = model.Drafter(d, table, table, **how).to(job.device)
    job.optimizer = torch.optim.SGD(job.drafter.parameters())
    job.world.runs_target = train.backend(c) is model  # others are never compiled
    if job.world.runs_target:
        layers = max(d.ids) + 1 if any(t.windows) else 1
        job.target = model.Target(t, layers, head=False, parts=asked_tp).to(job.device, job.dtype)
    return job


def run_gate(flags: list[str]) -> None:
    """What the probe's child runs: the very gate of train.py."""
    import train

    train.gate(_job(flags, light=False))


def check_probe(place: Place, work: str, flags: list[str], timeout_s: float = PROBE_S) -> Finding:
    """Compile the run's layer in a fresh process against this cache and believe its counters only."""
    command = [
        sys.executable,
        "-m",
        "diagnose.compile_cache",
        "--child",
        work,
        "--compile-cache",
        str(place.root),
    ]
    start = time.monotonic()
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    try:
        child = subprocess.run(
            [*command, *flags], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return fail(f"the child compiled for more than {timeout_s:.0f} s", shlex.join([*command, *flags]))
    lines = [line for line in child.stdout.splitlines() if line.startswith("PROBE ")]
    if child.returncode or not lines:
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return fail(f"the child ended with {child.returncode}: {last}", shlex.join([*command, *flags]))
    result = json.loads(lines[-1].removeprefix("PROBE "))
    text = f"{result['hits']} hits, {result['misses']} misses in {result['seconds']:.1f} s"
    data = {**result, "wall_s": round(time.monotonic() - start, 1)}
    if result["eager"]:
        return skip(f"nothing compiles here: {result['eager']}", "apt-get install g++", **data)
    if result["misses"]:
        why = result["reason"] or "the keys are equal, the entries did not load"
        return warn(
            f"miss: {text}; {why}", place.again("--probe") + "  # compiled and kept now: again", **data
        )
    if not result["hits"]:
        return fail("the child compiled nothing at all", shlex.join([*command, *flags]), **data)
    return ok(f"hit: {text}", **data)


def probe_child(work: str, root: str | None, flags: list[str]) -> None:
    """Runs in the child: `work` is MODULE:FUNCTION, called with the flags; prints what the counters say."""
    import importlib

    module, _, function = work.partition(":")
    compile_utils.use_cache(root)
    before = compile_utils.counters()
    getattr(importlib.import_module(module), function)(flags)
    spent = compile_utils.counters() - before
    report = compile_utils.last_report()
    reason = next((r.reason for r in report.ranks if r.reason), "") if report else ""
    facts = {"hits": spent.hits, "misses": spent.compiled, "seconds": spent.seconds, "reason": reason}
    print("PROBE " + json.dumps({**facts, "eager": compile_utils.why_eager()}), flush=True)


# ---------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("diagnose.compile_cache", __doc__)
    parser.add_argument("--compile-cache", metavar="DIR", help="as for train.py (~/.cache/blockdraft)")
    parser.add_argument("--fix", action="store_true", help="set broken files aside")
    parser.add_argument("--prune", action="store_true", help="delete other builds' folders")
    parser.add_argument("--probe", action="store_true", help="compile the run's layer in a child process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", default="diagnose.compile_cache:run_gate", help=argparse.SUPPRESS)
    parser.add_argument("--mounts", type=Path, default=Path("/proc/mounts"), help=argparse.SUPPRESS)
    add_arguments(parser)
    args, args.flags = parser.parse_known_args(argv)
    if args.flags:
        import train

        try:
            train.parse_flags(args.flags)
        except ValueError as error:
            parser.refuse(error)
    return args


def checks(report: Report, args: argparse.Namespace | None = None) -> None:
    """Every check of this script; `python -m diagnose` calls it too, without this script's flags."""
    args = argparse.Namespace(**{**vars(parse([])), **(vars(args) if args else {})})
    folder = args.compile_cache
    root = Path(folder).expanduser().absolute() if folder else compile_utils.default_root()
    flags = (*(("--compile-cache", str(folder)) if folder else ()), *args.flags)
    place = Place(root, root / compile_utils.build_name(), args.fix, args.mounts, flags)
    report.run("folders", check_folders, place, report)
    report.run("owner", check_owner, place)
    report.run("mount", check_mount, place)
    report.run("space", check_space, place)
    report.run("write", check_write, place)
    report.run("manifest", check_manifest, place)
    report.run("entries", check_entries, place)
    report.run("other builds", check_others, place, args.prune)
    report.run("warm", lambda: check_warm(place, run_plan(args.flags)))
    if args.probe:
        report.run("probe", check_probe, place, args.work, args.flags)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        probe_child(args.child, args.compile_cache, args.flags)
        return 0
    report = Report("compile_cache", args)
    checks(report, args)
    report.extra = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
