"""One compile for the whole job: the cache folder, the gate, the recompile guard and portable bundles.

    python compile_utils.py save FILE [--compile-cache DIR]     # this build's cache as one file
    python compile_utils.py load FILE [--compile-cache DIR]     # into another node's cache, before its start

In train.py:

    cache = use_cache(None)                       # before anything compiles, on the main thread
    layer = compile(DrafterLayer.forward, name="drafter layer")
    report = gate(warm_up, role="drafter", leader=0, control=group, store=store, key="step", ...)
    freeze()                                      # from here on a recompile is an error
    ...
    check_frozen()                                # once a step, a few dictionary look-ups

Why one process and one compile at a time: `torch.fx` keeps "somebody is tracing" in a process global, so a
second thread's trace makes the first thread's compiled call raise. Here only the main thread compiles, the
leader of each (node, role) compiles first, and its peers read what it wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import gzip
import hashlib
import importlib.metadata
import inspect
import io
import json
import logging
import os
import platform
import re
import shutil
import stat
import sys
import tarfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._functorch.config
import torch.distributed as dist

from world import UserError

FORMAT = 1  # of the manifest and of bundles
MIB = 1 << 20
NETWORK_FILE_SYSTEMS = (
    "nfs nfs3 nfs4 cifs smb2 smb3 smbfs lustre gpfs beegfs ceph afs 9p glusterfs pvfs2 orangefs wekafs panfs "
    "fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.gcsfuse fuse.rclone fuse.juicefs fuse.mountpoint-s3"
).split()
POLL_S = 0.05  # how often a waiting rank looks at the store
WORKERS_S = 60.0  # how long a cold compile waits for its worker processes
SILENT_S = 180.0  # how long a compiling rank of another node may be silent


class CacheError(ValueError):
    """The cache folder cannot be used; the message says where and how to fix it."""


class BundleError(ValueError):
    """The bundle cannot be used here."""


class GateError(RuntimeError):
    """Some rank failed in the gate; raised on every rank with the first failing rank's error."""


class RecompileError(RuntimeError):
    """Something was compiled, or ran uncompiled, after the gate."""


# ---------------------------------------------------------------------------------------------------------
# Fingerprint: what must be equal for one build's entries to be another's


def fingerprint() -> dict[str, str]:
    """What a compiled entry depends on, apart from the source and the shapes."""
    gpu, capability = "none", "none"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu, capability = properties.name, f"{properties.major}.{properties.minor}"
    found = {
        "torch": torch.__version__,
        "torch_git": (torch.version.git_version or "unknown")[:12],
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "triton": _version("triton"),
        "python": platform.python_version(),
        "gpu": gpu,
        "gpu_capability": capability,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
    }
    if gpu == "none":  # Inductor compiles C++ for the very CPU it runs on (-march=native)
        found["cpu"] = _cpu_model()
    return found


def fingerprint_hash(of: dict[str, str] | None = None) -> str:
    """12 hex digits of a fingerprint (this build's by default)."""
    text = json.dumps(of if of is not None else fingerprint(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint_difference(theirs: dict[str, str], ours: dict[str, str] | None = None) -> str:
    """`torch 2.11.0 there, 2.13.0 here; gpu ...`, or an empty string."""
    ours = fingerprint() if ours is None else ours
    keys = [k for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k)]
    text = "; ".join(
        f"{k} {theirs.get(k, 'unknown')} there, {ours.get(k, 'unknown')} here" for k in keys[:20]
    )
    return "".join(c if c.isprintable() else "?" for c in text)[:400]  # theirs may be anything


def build_name(of: dict[str, str] | None = None) -> str:
    """The folder of one build inside the cache, such as `torch-2.11.0+cu130-1a2b3c4d5e6f`."""
    of = fingerprint() if of is None else of
    return f"torch-{re.sub(r'[^0-9A-Za-z.+]', '_', of['torch'])}-{fingerprint_hash(of)}"


def source_hash(*sources: object) -> str:
    """12 hex digits over the text of modules, classes or functions, or of the files at given paths.

    Users edit model.py: the manifest calls a shape warm only for the source it was compiled from.
    """
    digest = hashlib.sha256()
    for source in sources:
        if isinstance(source, (str, Path)):
            text = Path(source).read_text(encoding="utf-8")
        else:
            text = inspect.getsource(source)
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    for name in (package, f"pytorch-{package}"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


# ---------------------------------------------------------------------------------------------------------
# The cache folder


@dataclasses.dataclass
class CacheInfo:
    """Where this build's compiled code lives. `warnings` are worth a line each in the log."""

    root: Path
    folder: Path
    fingerprint: dict[str, str]
    warnings: list[str]

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def warm(self, key: str, source: str) -> dict | None:
        """What the manifest says about these shapes compiled from this source, None when cold."""
        return read_manifest(self.manifest).get("warm", {}).get(f"{key} {source}")


_cache: CacheInfo | None = None


def default_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "blockdraft"


def use_cache(folder: str | None = None, compiles: bool = True) -> CacheInfo:
    """Make Inductor and Triton keep compiled code in `folder`/<build>; before any compile, main thread only.
    Not `compiles`: this process only packs or unpacks the cache and needs no workers.

    Raises CacheError when the folder could hand somebody else's code to this process, or cannot be written.
    """
    global _cache
    _main_thread_only("use_cache")
    root = Path(folder).expanduser().absolute() if folder else default_root()
    of = fingerprint()
    build = root / build_name(of)
    for part in (root, build, build / "inductor", build / "triton"):
        _make_private(part, part == root)
    notes = [*_check_space(build), *_check_mount(root), *_check_parents(root)]
    check_write(build)

    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(build / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(build / "triton")
    inductor_config.fx_graph_cache = True
    inductor_config.fx_graph_remote_cache = False
    functorch_config.enable_autograd_cache = True
    if inductor_config.force_disable_caches:
        notes.append("TORCHINDUCTOR_FORCE_DISABLE_CACHES is set, every rank compiles: unset it")
    _cache = CacheInfo(root, build, of, notes)
    if not _cache.manifest.exists():
        with _manifest_lock(_cache.manifest):
            if not _cache.manifest.exists():
                write_beside(_cache.manifest, json.dumps(_empty_manifest(of), indent=1).encode())
    if compiles:
        start_workers()
    return _cache


def start_workers(wait_s: float = 0.0) -> None:
    """Inductor's processes that compile Triton kernels: start them, or wait that long until they are ready.

    Inductor starts them at its first compile and does not wait: until they have imported torch, its own
    process compiles one kernel after another. Started here, they come up while weights are loaded.
    """
    if torch.cuda.is_available():
        from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool

        maybe_warm_pool()
        if wait_s:
            with contextlib.suppress(TimeoutError):  # then it goes without them
                AsyncCompile.wait_pool_ready(wait_s)


def check_owner(path: Path, owner: int | None = None) -> str | None:
    """Why code in `path` must not be executed by this user (or `owner`), None when it may."""
    owner = os.geteuid() if owner is None else owner
    info = path.stat()
    if info.st_uid != owner:
        return (
            f"{path} belongs to user {info.st_uid}, not to you ({owner}): it holds code that will be executed"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def _make_private(folder: Path, root: bool) -> None:
    """`root` may be a link of the user's own (a home on another disk); what lies in it may not."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem, mine = check_owner(folder), folder.stat().st_uid == os.geteuid()
    except OSError as error:
        raise CacheError(_os_reason(folder, error)) from error
    fix = f"chmod go-w {folder} (see who wrote to it)" if mine else "give --compile-cache another folder"
    if folder.is_symlink() and not root:
        problem, fix = f"{folder} is a symbolic link to {os.readlink(folder)}", f"rm {folder}"
    if problem:
        raise CacheError(f"compile cache: {problem}. Fix: {fix}")


def _os_reason(folder: Path, error: OSError) -> str:
    reasons = {
        errno.ENOSPC: ("no space or no inodes left", f"df -h {folder}; df -i {folder}"),
        errno.EDQUOT: ("your disk quota is used up", "free some space"),
        errno.EROFS: ("the file system is read-only", "mount it writable"),
        errno.EACCES: ("you may not write there", f"ls -ld {folder}"),
        errno.ENOTDIR: ("a part of the path is a file", "move that file"),
        errno.EEXIST: ("there is a file of that name", "move it"),
    }
    reason, fix = reasons.get(error.errno, (error.strerror or str(error), f"ls -ld {folder}"))
    return f"compile cache {folder}: {reason}. Fix: {fix}, or give --compile-cache another folder"


def check_write(folder: Path) -> None:
    """Writes, renames and locks a file as the cache will."""
    probe = folder / f".probe-{os.getpid()}"
    moved = probe.with_suffix(".moved")
    try:
        with open(probe, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(probe, moved)
    except OSError as error:
        raise CacheError(_os_reason(folder, error)) from error
    finally:
        for path in (probe, moved):
            with contextlib.suppress(OSError):
                path.unlink()


def _check_space(folder: Path) -> list[str]:
    found = os.statvfs(folder)
    notes = []
    free = found.f_bavail * found.f_frsize
    if free < 1024 * MIB:
        notes.append(f"compile cache {folder}: only {free / MIB:.0f} MiB free, a cold start may need 1 GiB")
    if found.f_files and found.f_favail < 5000:
        notes.append(f"compile cache {folder}: only {found.f_favail} inodes free, a cold start may need 5000")
    return notes


def mount_of(path: Path, mounts: Path = Path("/proc/mounts")) -> tuple[str, str]:
    """(mount point, file system type) that holds `path`."""
    best = ("/", "unknown")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return best
    path = Path(os.path.realpath(path))
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[1])
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best


def _check_mount(root: Path) -> list[str]:
    point, kind = mount_of(root)
    if kind not in NETWORK_FILE_SYSTEMS:
        return []
    return [
        f"compile cache {root} lies on {kind} ({point}): renames and locks may be slow or late there; "
        "prefer a disk of the node (--compile-cache /local/...), and send a bundle between nodes"
    ]


def _check_parents(root: Path) -> list[str]:
    notes = []
    for parent in root.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            notes.append(f"compile cache: anybody can replace folders in {parent}: chmod o-w {parent}")
    return notes


def write_beside(path: Path, content: bytes) -> None:
    """Written beside and renamed, owner-only, so that nobody ever reads half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _empty_manifest(of: dict[str, str]) -> dict:
    return {"format": FORMAT, "fingerprint": of, "warm": {}}


def read_manifest(path: Path) -> dict:
    """The manifest; an empty dictionary when it is missing, broken or of another format."""
    try:
        if path.stat().st_size > 64 * MIB:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    good = isinstance(found, dict) and found.get("format") == FORMAT and isinstance(found.get("warm"), dict)
    return found if good and all(isinstance(noted, dict) for noted in found["warm"].values()) else {}


@contextlib.contextmanager
def _manifest_lock(manifest: Path) -> Iterator[None]:
    with open(manifest.with_suffix(".lock"), "a") as lock:
        # Some network file systems cannot lock; the rename still is atomic.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def record_warm(cache: CacheInfo, key: str, source: str, **facts: object) -> None:
    """Note in the manifest that `key` compiled from `source` is warm now (seconds, graphs, bytes, label)."""
    with _manifest_lock(cache.manifest):
        found = read_manifest(cache.manifest) or _empty_manifest(cache.fingerprint)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found["warm"][f"{key} {source}"] = {"date": date, **facts}
        write_beside(cache.manifest, json.dumps(found, indent=1).encode())


def folder_size(folder: Path) -> tuple[int, int]:
    """(bytes, files) below a folder; files that vanish meanwhile are not counted."""
    size = files = 0
    for path in _files(folder):
        with contextlib.suppress(OSError):
            size, files = size + path.lstat().st_size, files + 1
    return size, files


def _files(folder: Path) -> Iterator[Path]:
    for base, _, names in os.walk(folder):
        yield from (Path(base) / name for name in names)


# ---------------------------------------------------------------------------------------------------------
# Compile, and what happened while compiling


@dataclasses.dataclass
class Counters:
    """Since the process started, or a difference of two: graphs found in and missed by the cache.

    A graph is one FX graph: a training layer is two (forward, backward), an evaluation forward is a third.
    """

    hits: int = 0
    misses: int = 0
    bypasses: int = 0
    aot_hits: int = 0
    aot_misses: int = 0
    frames: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Counters) -> Counters:
        a, b = dataclasses.asdict(self), dataclasses.asdict(other)
        return Counters(**{k: a[k] - b[k] for k in a})

    @property
    def compiled(self) -> int:
        """Graphs that were compiled here rather than read."""
        return self.misses + self.bypasses

    @property
    def events(self) -> int:
        """Changes whenever anything was compiled or loaded, a lazily compiled backward included."""
        return self.hits + self.misses + self.bypasses + self.aot_hits + self.aot_misses + self.frames


def counters() -> Counters:
    """What dynamo and Inductor have counted in this process (torch 2.11 to 2.13 name them alike)."""
    from torch._dynamo.utils import compilation_time_metrics
    from torch._dynamo.utils import counters as found

    fx, aot = found["inductor"], found["aot_autograd"]
    return Counters(
        hits=fx["fxgraph_cache_hit"],
        misses=fx["fxgraph_cache_miss"],
        bypasses=fx["fxgraph_cache_bypass"],
        aot_hits=aot["autograd_cache_hit"],
        aot_misses=aot["autograd_cache_miss"] + aot["autograd_cache_bypass"],
        frames=found["stats"]["unique_graphs"],
        seconds=sum(compilation_time_metrics.get("_compile.compile_inner", ())),
    )


class Unit:
    """A compiled function: call it; `raw` is the function itself, for saving and decoding."""

    def __init__(self, raw: Callable, handle: Callable, name: str):
        self.raw, self.handle, self.name = raw, handle, name

    def __call__(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread() and _frozen is None:
            _main_thread_only(f"the first call of the compiled {self.name}")
        try:
            return self.handle(*args, **kwargs)
        except RuntimeError as error:
            if _frozen is None or "fail_on_recompile" not in str(error):
                raise
            raise RecompileError(_recompile_message(self.name, str(error))) from error


_units: list[Unit] = []
_said: set[str] = set()


def compile(
    fn: Callable, *, name: str, device: str = "", log: Callable[[str], None] | None = None
) -> Unit | Callable:
    """`torch.compile(fn, fullgraph=True, dynamic=False)`, known to the guard; a module is compiled as its
    forward. Where there is no GPU and no C++ compiler: `fn` itself, said once.
    """
    _main_thread_only(f"compiling {name}")
    reason = why_eager(device)
    if reason and "once" not in _said:
        _said.add("once")
        (log or _print)(f"compile: eager, {reason}")
    if reason:
        return fn
    call = fn.forward if isinstance(fn, torch.nn.Module) else fn
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # never quietly dense after the eighth shape
    # Keep inputs of products only where computing them again would take another product: on the reference
    # shape 8 GiB less for the same time (docs/performance.md).
    torch._functorch.config.ban_recompute_materialized_backward = False
    unit = Unit(fn, torch.compile(call, fullgraph=True, dynamic=False), name)
    _units.append(unit)
    return unit


def why_eager(device: str = "") -> str:
    """Why nothing is compiled here; an empty string where compiling works. Raises ValueError on a GPU."""
    on_gpu = device.startswith("cuda") if device else torch.cuda.is_available()
    for variable in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(variable, "0") not in ("", "0", "false", "False"):
            if on_gpu:
                raise ValueError(
                    f"{variable} is set: flex_attention needs torch.compile. Fix: unset {variable}"
                )
            return f"{variable} is set"
    if on_gpu or cpp_compiler():
        return ""
    return "there is no C++ compiler (install g++, or set CXX, to compile on the CPU)"


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use on the CPU."""
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, (tuple, list)) else (config.cpp.cxx,)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _main_thread_only(what: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{what} in thread {threading.current_thread().name}: only the main thread may compile "
            "(torch.fx keeps its tracing flag in a process global)"
        )


def _print(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------
# After the gate: a recompile is an error


_frozen: Counters | None = None
_flex_filter: tuple | None = None
FLEX_MESSAGE = "flex_attention called without torch.compile"
FLEX_ID = "flex_attention_performance"  # torch's own "warned already" mark of the uncompiled path


def freeze() -> None:
    """From here on compiling raises, naming the guard that changed, in every thread.

    torch's stance does that at the call, first compiles of other functions included (dynamo's
    error_on_recompile does not see those, and on 2.13 not other threads either). What it cannot see, a
    backward compiled late, is found by `check_frozen`. Uncompiled flex_attention raises where it is called,
    before its scores are materialised.
    """
    global _frozen, _flex_filter
    torch.compiler.set_stance("fail_on_recompile")
    warnings.filterwarnings("error", message=FLEX_MESSAGE)
    _flex_filter = warnings.filters[0]
    _flex_shown().discard(FLEX_ID)
    _frozen = counters()


def thaw() -> None:
    """Undo `freeze` (tests, and a resumed run that compiles again)."""
    global _frozen, _flex_filter
    torch.compiler.set_stance("default")
    if _flex_filter in warnings.filters:
        warnings.filters.remove(_flex_filter)
    _frozen = _flex_filter = None


def check_frozen() -> None:
    """Raise RecompileError if anything was compiled, or flex_attention ran uncompiled, since `freeze`."""
    if _frozen is None:
        return
    if FLEX_ID in _flex_shown():
        raise RecompileError(f"{FLEX_MESSAGE} after the gate: the full score matrix was materialised")
    now = counters()
    if now.events != _frozen.events:
        new = now - _frozen
        names = ", ".join(unit.name for unit in _units) or "nothing is registered"
        raise RecompileError(
            f"after the gate: {new.frames} frames and {new.compiled} graphs compiled, {new.hits} graphs read "
            f"from the cache. The gate must run every shape and grad mode of the run. Compiled units: {names}"
        )


def _flex_shown() -> set[str]:
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return getattr(flex, "_WARNINGS_SHOWN", set())


def _recompile_message(name: str, text: str) -> str:
    """torch's message, the changed sizes first: one graph's sizes differ, the others' grad modes do."""
    reasons = re.findall(r"^\s*-\s*\d+/\d+:\s*(.+?)\s*$", text, re.MULTILINE)
    ranked = sorted(dict.fromkeys(reasons), key=lambda r: ("size" not in r, "dtype" not in r))
    sized = [r for r in ranked if "size" in r or "dtype" in r]  # other graphs' grad modes would only distract
    why = "; ".join(sized or ranked) or "it was never called in the gate"
    return (
        f"{name} would compile again after the gate: {why}. Keep shapes static, or run this one in the gate"
    )


# ---------------------------------------------------------------------------------------------------------
# Parts of cache keys: why a graph missed


class _KeyParts(logging.Filter):
    """Collects, from torch's own debug log, what each cache key was made of."""

    LOGGERS = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")
    HEAD = re.compile(r"hash details for key (\S+):\n")
    PART = re.compile(r"^\[(\w{20,})\] ([\w\[\]. ]+): ?(.*)$", re.MULTILINE)

    def __init__(self):
        super().__init__()
        self.keys: dict[str, dict[str, list[str]]] = {}
        self.levels: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.DEBUG and "hash details for key" in str(record.msg):
            text = record.getMessage()
            head = self.HEAD.search(text)
            if head:
                parts = self.PART.findall(text, head.end())
                self.keys[head[1]] = {name: [digest, value[:300]] for digest, name, value in parts}
        return record.levelno >= self.levels[record.name]

    def __enter__(self) -> _KeyParts:
        for name in self.LOGGERS:
            logger = logging.getLogger(name)
            self.levels[name] = logger.getEffectiveLevel()
            self.previous = {**getattr(self, "previous", {}), name: logger.level}
            logger.addFilter(self)
            logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeFilter(self)
            logging.getLogger(name).setLevel(self.previous[name])


def save_key_parts(cache: CacheInfo, keys: dict[str, dict]) -> None:
    """Beside the entries, so that a rank or a later run that misses can say what changed."""
    folder = cache.folder / "keys"
    folder.mkdir(mode=0o700, exist_ok=True)
    for key, parts in keys.items():
        path = folder / f"{key}.json"
        if not path.exists():
            write_beside(path, json.dumps(parts).encode())


def why_missed(cache: CacheInfo, keys: dict[str, dict]) -> str:
    """Which part of a key differs from the nearest one known to the cache; empty when all are known."""
    known = {}
    for path in (cache.folder / "keys").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            known[path.stem] = json.loads(path.read_text())
    new = {key: parts for key, parts in keys.items() if key not in known}
    if not new:
        return ""
    if not known:
        return "the cache was empty"
    found: dict[str, None] = {}
    for key, parts in new.items():
        same_kind = [k for k in known if k[0] == key[0]] or list(known)
        nearest = min(same_kind, key=lambda k: len(_differing(known[k], parts)))
        for name in _differing(known[nearest], parts):
            found[_describe_part(name, known[nearest].get(name), parts.get(name))] = None
    told = "; ".join(part if len(part) < 100 else part[:97] + "..." for part in list(found)[:2])
    return told + (f"; and {len(found) - 2} more parts" if len(found) > 2 else "")


def _differing(a: dict, b: dict) -> list[str]:
    return [k for k in sorted(a.keys() | b.keys()) if (a.get(k) or [""])[0] != (b.get(k) or [""])[0]]


def _describe_part(name: str, old: list[str] | None, new: list[str] | None) -> str:
    if old is None or new is None:
        return f"{name} only {'here' if old is None else 'in the cache'}"
    words = [re.findall(r"[^\s,(]+=(?:\S*\([^)]*\)+|[^,\s]+)|[^\s,]+", text) for text in (old[1], new[1])]
    changes = [f"{a} -> {b}" for a, b in zip(*words, strict=False) if a != b] if all(words) else []
    readable = all(text.isprintable() for text in (old[1], new[1]))
    return f"{name} ({', '.join(changes[:3])})" if changes and readable else f"{name} changed"


# ---------------------------------------------------------------------------------------------------------
# The gate


@dataclasses.dataclass
class RankReport:
    """What one rank did in the gate; `seconds` is its own work, without the waiting."""

    rank: int
    role: str
    leader: int
    worked: bool
    seconds: float
    counters: Counters
    reason: str  # why it compiled something, if it did
    host: str

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def missed(self) -> bool:
        """A follower that compiled what its leader had just compiled."""
        return self.worked and not self.leads and self.counters.compiled > 0

    def line(self) -> str:
        head = f"gate: rank {self.rank} ({self.role})"
        c = self.counters
        if not self.worked:
            return f"{head} had nothing to compile"
        counts = f"{self.seconds:.1f} s, {c.hits} hits, {c.compiled} misses"
        if not (c.hits or c.compiled):
            state = "already compiled or eager"
        elif self.missed:
            reason = self.reason or "the keys are equal, the entries did not load"
            state = f"MISSED what rank {self.leader} compiled: {reason}"
        elif self.leads and c.compiled:
            state = "leader, compiled" + (f": {self.reason}" if self.reason else "")
        else:
            state = "leader, warm" if self.leads else "follower, warm"
        return f"{head} {counts} ({state})"


@dataclasses.dataclass
class GateReport:
    """The same on every rank. `warm`: every rank that worked read every graph; never rank 0's word alone."""

    key: str
    seconds: float
    ranks: list[RankReport]

    @property
    def warm(self) -> bool:
        working = [r.counters for r in self.ranks if r.worked]
        return bool(working) and all(c.hits and not c.compiled for c in working)

    @property
    def missed(self) -> list[RankReport]:
        return [r for r in self.ranks if r.missed]

    def lines(self) -> list[str]:
        """One a rank that worked, one for all that only waited; followers that missed are warnings."""
        found = [("warning: " if r.missed else "") + r.line() for r in self.ranks if r.worked]
        idle = [r for r in self.ranks if not r.worked]
        if len(idle) == 1:
            found.append(idle[0].line())
        elif idle:
            roles = ", ".join(sorted({r.role for r in idle}))
            found.append(f"gate: {len(idle)} ranks ({roles}) had nothing to compile")
        state = (
            "warm on every rank"
            if self.warm
            else f"{len(self.missed)} followers missed"
            if self.missed
            else "done"
        )
        return [*found, f"gate: {self.key} {state} in {self.seconds:.1f} s"]


_gates = 0
_last: GateReport | None = None
_planned: list[tuple[str, str]] | None = None


@contextlib.contextmanager
def planning() -> Iterator[list[tuple[str, str]]]:
    """Inside, `gate` runs nothing and notes the (key, source) it would have warmed: for diagnose."""
    global _planned
    _planned = []
    try:
        yield _planned
    finally:
        _planned = None
        thaw()


def gate(
    work: Callable[[], object] | None,
    *,
    role: str,
    leader: int,
    store: dist.Store | None = None,
    key: str = "step",
    label: str = "",
    source: str = "",
    timeout_s: float = 1800.0,
    log: Callable[[str], None] = _print,
    tick_s: float = 10.0,
) -> GateReport:
    """Compile once for each (node, role), then let the others read it; every rank of the world calls this.

    `work` runs what the run will run (training forward and backward, evaluation forward, real shapes, the
    unwrapped module); None for a rank that compiles nothing. `leader` is the global rank that leads this
    rank's (node, role). `store` is the world's store, None for a single process. `key` and `source` (from
    `source_hash`) name the shapes in the manifest.

    Raises GateError on every rank, within seconds, when any rank's work fails or a rank is lost, and after
    `timeout_s` with the names of the ranks that are still compiling. No process group is used, so none of
    their time-outs matters.
    """
    global _gates, _last
    _main_thread_only("gate")
    if _planned is not None:
        _planned.append((key, source))
        return GateReport(key, 0.0, [])
    _gates += 1
    meeting = _Meeting(store, f"blockdraft/gate/{_gates}", role, timeout_s, log)
    start = time.monotonic()
    leads = meeting.rank == leader
    with meeting.ticker(tick_s), meeting.store_errors():
        meeting.say_state("starting")
        cold = _cache is not None and not _cache.warm(key, source)
        mine = _work(meeting, work, leader, cold) if leads else None
        meeting.wait("leaders")
        mine = mine or _work(meeting, work, leader)
        _note_warm(mine, key, source, label)
        meeting.publish(mine)
        meeting.wait("followers")
        report = GateReport(key, time.monotonic() - start, meeting.collect())
        meeting.linger("left")
    _last = report
    if meeting.rank == 0:
        for line in report.lines():
            log(line)
    return report


def announce(role: str, store: dist.Store | None) -> None:
    """On the way to the next gate: the ranks that wait there see whether this process still lives."""
    _Meeting(store, f"blockdraft/gate/{_gates + 1}", role, 0.0, _print).say_state("loading")


def last_report() -> GateReport | None:
    """What the newest gate of this process reported."""
    return _last


def _work(meeting: _Meeting, work: Callable | None, leader: int, cold: bool = False) -> RankReport:
    """Run this rank's work and say what it cost; the first error of the job is told to everybody."""
    who = (meeting.rank, meeting.role, leader)
    if work is None:
        return RankReport(*who, False, 0.0, Counters(), "", platform.node())
    meeting.say_state("compiling")
    start, before, reason = time.monotonic(), counters(), ""
    try:
        if cold:
            start_workers(WORKERS_S)
        with _KeyParts() as parts:
            work()
    except Exception as error:
        meeting.fail(error, traceback.format_exc())
        raise GateError(meeting.failure(error)) from error
    seconds, spent = time.monotonic() - start, counters() - before
    if _cache and (spent.compiled or spent.aot_misses):
        reason = why_missed(_cache, parts.keys)
        save_key_parts(_cache, parts.keys)
    return RankReport(*who, True, seconds, spent, reason, platform.node())


def _note_warm(report: RankReport, key: str, source: str, label: str) -> None:
    """The leader writes into the manifest what it made warm, or found warm without a note."""
    spent = report.counters
    if _cache is None or not report.leads or not spent.hits + spent.compiled:
        return
    if spent.compiled or not _cache.warm(key, source):
        size, files = folder_size(_cache.folder)
        facts = {"seconds": round(report.seconds, 2), "graphs": spent.hits + spent.compiled}
        record_warm(_cache, key, source, **facts, bytes=size, files=files, label=label)


class _Meeting:
    """Where the ranks meet: what they tell each other through the store, polled.

    Not a gloo barrier: an exception on a rank whose asynchronous barrier is pending keeps that process from
    exiting until the barrier times out (measured on torch 2.11 and 2.13), which is the hang the gate must
    not have. Killed ranks are noticed by their process id on this host, and elsewhere by their silence.
    """

    def __init__(self, store: dist.Store | None, prefix: str, role: str, timeout_s: float, log: Callable):
        alone = store is None
        self.rank = 0 if alone else dist.get_rank()
        self.world = 1 if alone else dist.get_world_size()
        self.store = dist.PrefixStore(prefix, dist.HashStore() if alone else store)
        self.role, self.timeout_s, self.log = role, timeout_s, log
        self.start = time.monotonic()
        self.who = f"rank {self.rank} ({role})"
        self.beats: dict[int, tuple[bytes, float]] = {}  # of the others: last beat and when it changed

    def say_state(self, state: str) -> None:
        entry = [state, self.role, platform.node(), os.getpid(), _pid_space()]
        self.store.set(f"state/{self.rank}", json.dumps(entry))

    def states(self) -> dict[int, list]:
        """{rank: [state, role, host, pid, pid space]} of the ranks that have arrived or are on the way."""
        keys = [(rank, f"state/{rank}") for rank in range(self.world)]
        return {rank: json.loads(self.store.get(key)) for rank, key in keys if self.store.check([key])}

    def busy(self) -> str:
        """`rank 0 (drafter) compiling`, for progress and for the time-out's message."""
        found = self.states()
        names = [f"rank {r} ({s[1]}) {s[0]}" for r, s in found.items() if s[0] != "waiting"]
        late = [str(r) for r in range(self.world) if r not in found]
        if late:
            names.append(f"rank{'s' * (len(late) > 1)} {', '.join(late)} not at the gate yet")
        return ", ".join(names) or "every rank waiting"

    def tell(self, text: str) -> bool:
        """Make this the job's error unless there is one already; True if it is the first."""
        return self.store.compare_set("error", "", text).decode() == text

    def failure(self, error: BaseException) -> str:
        if isinstance(error, UserError):  # says itself who and why
            return f"{error}"
        return f"{self.who} failed in the gate: {type(error).__name__}: {error}"

    def fail(self, error: Exception, trace: str) -> None:
        """Tell everybody, print the traceback (only the first failing rank does), wait until it was heard."""
        if self.tell(self.failure(error)) and not isinstance(error, UserError):
            self.log(f"gate: {self.who} failed\n{trace.rstrip()}")
        self.linger("heard")

    def raise_failure(self) -> None:
        if self.store.check(["error"]):
            text = self.store.get("error").decode()
            self.linger("heard")
            raise GateError(text)

    def linger(self, what: str) -> None:
        """Rank 0 may hold the store: it leaves last, for at most 3 s, lest it take the news away."""
        self.store.add(what, 1)
        end = time.monotonic() + 3
        while self.rank == 0 and self.store.add(what, 0) < self.world and time.monotonic() < end:
            time.sleep(POLL_S)

    def wait(self, stage: str) -> None:
        """Until every rank has reached `stage`; shows errors, lost ranks and the time-out at once."""
        self.say_state("waiting")
        look = time.monotonic()
        if self.store.add(stage, 1) == self.world:
            self.store.set(f"go/{stage}", "")
        while not self.store.check([f"go/{stage}"]):
            self.raise_failure()
            now = time.monotonic()
            if now - self.start > self.timeout_s:
                self.give_up()
            if now > look:
                self.look_for_lost()
                look = now + 1
            time.sleep(POLL_S)
        self.raise_failure()

    def give_up(self) -> None:
        busy = self.busy()
        pids = [str(entry[3]) for entry in self.states().values() if entry[0] == "compiling"]
        fix = f"see where it is: py-spy dump --pid {' '.join(pids)}; " if pids else ""
        self.tell(f"gate: still {busy} after {self.timeout_s:.0f} s. Fix: {fix}or allow it more time")
        self.raise_failure()

    def look_for_lost(self) -> None:
        """Processes that this one would see and that are gone; ranks elsewhere that compile in silence."""
        now = time.monotonic()
        for rank, (state, role, host, pid, space) in self.states().items():
            why = ""
            if space == _pid_space() and rank != self.rank:
                why = (
                    "" if _alive(pid) else f"its process {pid} is gone (killed? see dmesg for out of memory)"
                )
            elif state == "compiling" and self.store.check([f"beat/{rank}"]):
                beat = self.store.get(f"beat/{rank}")
                if self.beats.get(rank, (b"", 0.0))[0] != beat:
                    self.beats[rank] = (beat, now)
                silent = now - self.beats[rank][1]
                why = f"not heard of for {silent:.0f} s" if silent > SILENT_S else ""
            if why:
                self.tell(f"gate: lost rank {rank} ({role}), last seen {state} on {host}: {why}")
                self.raise_failure()

    def publish(self, report: RankReport) -> None:
        self.store.set(f"report/{self.rank}", json.dumps(dataclasses.asdict(report)))

    def collect(self) -> list[RankReport]:
        found = []
        for rank in range(self.world):
            fields = json.loads(self.store.get(f"report/{rank}"))
            found.append(RankReport(**{**fields, "counters": Counters(**fields["counters"])}))
        return found

    @contextlib.contextmanager
    def store_errors(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise GateError(f"gate: the rank that holds the store is gone ({_first_line(error)})") from error

    @contextlib.contextmanager
    def ticker(self, every_s: float) -> Iterator[None]:
        """A thread that only talks to the store: every rank's sign of life, and rank 0's line of progress
        (rank 0 may be compiling itself).
        """
        stop = threading.Event()

        def tick() -> None:
            beat = 0
            while not stop.wait(every_s):
                try:
                    beat += 1
                    self.store.set(f"beat/{self.rank}", str(beat))
                    if self.rank == 0:
                        self.log(f"gate: {self.busy()}, {time.monotonic() - self.start:.0f} s")
                except RuntimeError:  # the store is gone: the main thread says so
                    return

        thread = threading.Thread(target=tick, name="gate-ticker", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=2)


def _pid_space() -> str:
    """Where a process id means one process: containers and machines may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _alive(pid: int) -> bool:
    """Is there such a process, and is it more than a zombie its parent has not collected yet?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except (OSError, IndexError):
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------------------------------------------------
# Bundles: one build's cache as one file


@dataclasses.dataclass
class BundleInfo:
    """What a bundle holds. `note` says what was done with it."""

    path: Path
    fingerprint: dict[str, str]
    warm: dict[str, dict]
    files: int
    bytes: int
    note: str = ""


def save_bundle(path: str | Path, cache: CacheInfo | None = None) -> BundleInfo:
    """Write this build's cache as one file, unless the file there already holds more.

    A tar of the folder rather than torch.compiler.save_cache_artifacts, which is read by unpickling and on
    the CPU leaves out the compiled .so files: 5 of 5 graphs "hit" after loading it, in 28 s, as long as a
    cold start (21 s); from our tar the same 5 hits took 5 s.
    """
    cache, path = cache or _need_cache(), Path(path).expanduser().absolute()
    members = sorted(p for p in _files(cache.folder) if _bundled(p.relative_to(cache.folder)))
    sizes = {str(p.relative_to(cache.folder)): p.stat().st_size for p in members}
    warm = read_manifest(cache.manifest).get("warm", {})
    header = {"format": FORMAT, "fingerprint": cache.fingerprint, "warm": warm, "files": sizes}
    info = BundleInfo(path, cache.fingerprint, warm, len(sizes), sum(sizes.values()), "saved")
    if path.exists():
        old = _read_header(path)
        lost = _poorer(header, old)
        if lost:
            note = f"kept the bundle that was there: it holds {lost}"
            return BundleInfo(
                path, old["fingerprint"], old["warm"], len(old["files"]), path.stat().st_size, note
            )
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with (
            open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar,
        ):
            _add(tar, "header.json", json.dumps(header).encode())
            for member in members:
                _add(tar, f"cache/{member.relative_to(cache.folder)}", member.read_bytes())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
    return info


def load_bundle(path: str | Path, cache: CacheInfo | None = None) -> BundleInfo:
    """Add a bundle's entries to this build's cache; before any compile, on the main thread.

    Adds only what is missing, so a poor bundle cannot harm a rich cache. Whether it helped is for
    `counters()` to say. Raises BundleError when it is of another build, could have been written by somebody
    else, or is damaged.
    """
    _main_thread_only("load_bundle")
    cache, path = cache or _need_cache(), Path(path).expanduser().absolute()
    if counters().frames:
        raise BundleError("load the bundle before the first compile: this process has compiled already")
    try:
        problem = check_owner(path)
    except OSError as error:
        raise BundleError(f"bundle {path}: {error.strerror}. Fix: give a bundle that is there") from error
    if problem:
        raise BundleError(f"bundle {problem}. Fix: chmod 600 it if it is yours, make a new one if not")
    header = _read_header(path)
    other = fingerprint_difference(header["fingerprint"], cache.fingerprint)
    if other:
        raise BundleError(
            f"bundle {path} is of another build ({other}). Fix: save one on a machine like this one"
        )
    contents = _read_members(path, header)
    added = 0
    for name, content in contents.items():
        target = cache.folder / name
        if not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_beside(target, _relocated(target, content))
            target.chmod(0o700 if name.endswith(".so") else 0o600)
            added += 1
    with _manifest_lock(cache.manifest):
        manifest = read_manifest(cache.manifest) or _empty_manifest(cache.fingerprint)
        manifest["warm"] = {**header["warm"], **manifest["warm"]}
        write_beside(cache.manifest, json.dumps(manifest, indent=1).encode())
    size = sum(header["files"].values())
    note = f"added {added} of {len(contents)} files"
    return BundleInfo(path, header["fingerprint"], header["warm"], len(contents), size, note)


def send_bundle(
    *, control: dist.ProcessGroup, leaders: list[int], source: int = 0, shape: str = "", part: int = 64 * MIB
) -> str:
    """The cache of rank `source` to the other nodes' leaders; every rank of the world calls this.

    Receivers first look at what the source has warm (at `shape` alone where it is given, "KEY SOURCE" as in
    the manifest); nothing is packed or sent unless one of them lacks it. Returns what happened on this rank:
    "sent", "added ...", "refused ...", "not needed".
    """
    _main_thread_only("send_bundle")
    rank, cache = dist.get_rank(), _need_cache()
    warm = [s for s in read_manifest(cache.manifest).get("warm", {}) if s == (shape or s)]
    box: list = [(cache.fingerprint, warm)]
    dist.broadcast_object_list(box, src=source, group=control)
    answer = _want(*box[0], cache) if rank in leaders and rank != source else "not needed"
    answers: list = [None] * dist.get_world_size(control)
    dist.all_gather_object(answers, answer, group=control)
    if "wanted" not in answers:
        return answer
    path = cache.folder.parent / f".bundle-{os.getpid()}.tar.gz"
    try:
        content, problem = _pack(path, cache) if rank == source else (b"", "")
        box = [(len(content), problem)]
        dist.broadcast_object_list(box, src=source, group=control)
        size, problem = box[0]
        if problem:
            return f"refused: rank {source} cannot pack its cache: {problem}"
        received = io.BytesIO()
        for lo in range(0, size, part):
            chunk = torch.empty(min(part, size - lo), dtype=torch.uint8)
            if rank == source:
                chunk = torch.frombuffer(bytearray(content[lo : lo + part]), dtype=torch.uint8)
            dist.broadcast(chunk, src=source, group=control)
            if answer == "wanted":
                received.write(chunk.numpy().tobytes())
        if answer == "wanted":
            return _unpack(path, received.getvalue(), cache)
        return "sent" if rank == source else answer
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _pack(path: Path, cache: CacheInfo) -> tuple[bytes, str]:
    """(the bundle, why there is none): the others are told rather than left waiting for it."""
    try:
        save_bundle(path, cache)
        return path.read_bytes(), ""
    except OSError as error:
        return b"", f"{error}"


def _unpack(path: Path, content: bytes, cache: CacheInfo) -> str:
    """A rank that cannot take the bundle says so and compiles for itself."""
    try:
        write_beside(path, content)
        return load_bundle(path, cache).note
    except (BundleError, OSError) as error:
        return f"refused: {error}"


def _relocated(target: Path, content: bytes) -> bytes:
    """Triton's group files list their kernels by absolute path: point them at the new folder."""
    if not target.name.startswith("__grp__"):
        return content
    group = json.loads(content)
    names = {name: Path(path).name for name, path in group.get("child_paths", {}).items()}
    return json.dumps({"child_paths": {n: str(target.parent / file) for n, file in names.items()}}).encode()


def _want(theirs: dict[str, str], warm: list[str], cache: CacheInfo) -> str:
    other = fingerprint_difference(theirs, cache.fingerprint)
    if other:
        return f"refused: another build ({other})"
    return "not needed" if set(warm) <= set(read_manifest(cache.manifest).get("warm", {})) else "wanted"


def _need_cache() -> CacheInfo:
    if _cache is None:
        raise RuntimeError("call use_cache() first")
    return _cache


def _bundled(name: Path) -> bool:
    """Compiled code and its keys, but no locks and nothing half-written."""
    if len(name.parts) < 2 or name.parts[0] not in ("inductor", "triton", "keys"):
        return False
    return not (name.name.startswith(".") or name.suffix in (".lock", ".tmp"))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
    tar.addfile(member, io.BytesIO(content))


def _poorer(new: dict, old: dict) -> str:
    """What `old` holds and `new` lacks, for the same build; empty when nothing is lost."""
    if old["fingerprint"] != new["fingerprint"]:
        return "another build's cache (give this one another name)"
    shapes = sorted(set(old["warm"]) - set(new["warm"]))
    if shapes:
        return f"{len(shapes)} more warm shapes ({shapes[0]})"
    graphs = [n for n in old["files"] if "/fxgraph/" in f"/{n}" and n not in new["files"]]
    return f"{len(graphs)} more graphs" if graphs else ""


class _Unpacked(gzip.GzipFile):
    """What a bundle unpacks to; no single read may be far larger than the file: it would be a bomb."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or size > 64 * MIB + 100 * os.fstat(self.fileno()).st_size:
            raise tarfile.ReadError("it claims to hold far more than it can")
        return super().read(size)


@contextlib.contextmanager
def _open_bundle(path: Path) -> Iterator[tarfile.TarFile]:
    """The bundle's tar; BundleError for whatever breaks while it is read."""
    try:
        with _Unpacked(path, "rb") as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
            yield tar
    except BundleError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, tarfile.TarError) as error:
        reason = _first_line(error)[:200]
        raise BundleError(f"bundle {path} is damaged ({reason}). Fix: delete it and save it again") from error


def _read_header(path: Path) -> dict:
    with _open_bundle(path) as tar:
        first = tar.next()
        if first is None or first.name != "header.json" or first.size > 64 * MIB:
            raise BundleError(f"bundle {path}: this is not a blockdraft bundle. Fix: give one that it saved")
        header = json.loads(tar.extractfile(first).read(first.size))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BundleError(
            f"bundle {path} is of another version, this one reads format {FORMAT}. Fix: save it again"
        )
    parts = [header.get(name) for name in ("fingerprint", "warm", "files")]
    good = all(isinstance(part, dict) for part in parts) and all(type(n) is int for n in parts[2].values())
    good = good and all(isinstance(noted, dict) for noted in parts[1].values())
    if not good or sum(parts[2].values()) > 64 * MIB + 100 * path.stat().st_size:
        raise BundleError(f"bundle {path} is damaged (its header). Fix: delete it and save it again")
    return header


def _read_members(path: Path, header: dict) -> dict[str, bytes]:
    """All files of a bundle, checked against its header before the first is written."""
    found = {}
    with _open_bundle(path) as tar:
        for member in tar:
            name = member.name.removeprefix("cache/")
            if member.name == "header.json":
                continue
            safe = member.isreg() and ".." not in Path(name).parts and "\0" not in name
            safe = safe and _bundled(Path(name))
            if not safe or header["files"].get(name) != member.size:
                raise BundleError(f"bundle {path}: unexpected member {member.name!r}. Fix: do not use it")
            found[name] = tar.extractfile(member).read(member.size)
    if found.keys() != header["files"].keys():
        raise BundleError(f"bundle {path} lacks files of its own list. Fix: delete it and save it again")
    return found


def main(argv: list[str] | None = None) -> int:
    """The two commands of the docstring. Exit 2 with one line when it cannot be done."""
    parser = argparse.ArgumentParser(
        prog="compile_utils.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("save", "load"))
    parser.add_argument("file", help="the bundle: one file, for nodes with this torch, GPU and Python")
    parser.add_argument("--compile-cache", metavar="DIR", help="as for train.py (~/.cache/blockdraft)")
    args = parser.parse_args(argv)
    try:
        print(_command(args.command, args.file, args.compile_cache))
    except (CacheError, BundleError, OSError) as error:
        print(f"compile_utils.py: {error}", file=sys.stderr)
        return 2
    return 0


def _command(command: str, file: str, folder: str | None) -> str:
    build = (Path(folder).expanduser().absolute() if folder else default_root()) / build_name()
    if command == "save" and not any((build / part).is_dir() for part in ("inductor", "triton")):
        raise CacheError(f"{build}: nothing compiled by this build yet. Fix: start train.py once")
    cache = use_cache(folder, compiles=False)
    info = save_bundle(file, cache) if command == "save" else load_bundle(file, cache)
    if info.fingerprint != cache.fingerprint:
        raise BundleError(f"{info.path}: {info.note}")
    shapes = ", ".join(sorted(info.warm)) or "none noted"
    size = f"{info.files} files, {info.bytes / MIB:.1f} MiB"
    done = info.note if command == "save" else f"{info.note} to {cache.folder}"
    return f"{info.path}: {done}; {size}; warm shapes: {shapes}"


if __name__ == "__main__":
    sys.exit(main())
