"""Is this Python environment and this machine fit for a run?

    python -m diagnose.env [--json FILE] [--strict]

Looks, installs nothing, compiles nothing: torch and its CUDA build, driver, Triton, Python, GPUs and who
uses them, wheels that fight in one environment, leftovers of editable installs, disk, shared memory, open
files, memory, thread and allocator settings. Every line but ok comes with a command to paste.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

if not __package__:  # python diagnose/env.py: same imports as python -m diagnose.env
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from diagnose.report import Finding, Report, fail, ok, parse_args, skip, warn

GIB = 2**30
REPOSITORY = Path(__file__).resolve().parents[1]
SUPPORTED = ((2, 11), (2, 13))  # torch, both ends tested
# Packages that pin a torch of their own and pull another one in; they belong in another environment.
SERVING = ("vllm", "sglang", "lmdeploy", "tensorrt-llm", "text-generation", "sgl-kernel")


# ---------------------------------------------------------------- packages


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(paths: list[str] | None = None) -> list[metadata.Distribution]:
    """Every distribution on the path (tests pass a folder of planted ones); nameless remains are kept."""
    return list(metadata.distributions(path=paths) if paths else metadata.distributions())


def versions(dists: list[metadata.Distribution]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for dist in dists:
        name = dist.metadata["Name"] if dist.metadata else None
        if name:
            found.setdefault(normal(name), []).append(dist.version)
    return found


def requirements_of(dist: metadata.Distribution) -> list:
    """What `dist` requires here: (name, specifier) pairs, extras and other systems left out."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for line in dist.requires or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # metadata of strangers; pip refuses such a package itself
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append((normal(requirement.name), requirement.specifier))
    return found


def check_torch(dists: list[metadata.Distribution]):
    """One torch, of a tested version."""
    found = versions(dists).get("torch", [])
    fix = f"{sys.executable} -m pip install -r {shlex.quote(str(REPOSITORY / 'requirements.txt'))}"
    if not found:
        return fail("torch is not installed here", fix)
    if len(set(found)) > 1:
        return fail(
            f"{len(found)} torch installations on one path: {', '.join(found)}",
            "\n".join([f"{sys.executable} -m pip uninstall -y torch"] * len(found) + [fix]),
        )
    numbers = tuple(int(n) for n in re.findall(r"\d+", found[0])[:2])
    if not SUPPORTED[0] <= numbers <= SUPPORTED[1]:
        low, high = (".".join(map(str, end)) for end in SUPPORTED)
        return fail(f"torch {found[0]}, tested are {low} to {high}", fix)
    return ok(f"{found[0]}", version=found[0])


def check_wheels(dists: list[metadata.Distribution]) -> list[Finding]:
    """Packages that require another torch, torch's own parts at other versions, CUDA wheels of two majors."""
    pip = f"{sys.executable} -m pip"
    try:
        import packaging  # noqa: F401  (pytest and matplotlib bring it)
    except ImportError:
        return [skip("requirements cannot be compared without packaging", f"{pip} install packaging")]
    have = versions(dists)
    torch_dist = next((d for d in dists if d.metadata and normal(d.metadata["Name"] or "") == "torch"), None)
    findings = []
    for dist in dists if torch_dist else []:
        name = normal(dist.metadata["Name"] or "") if dist.metadata else ""
        for wanted, specifier in requirements_of(dist):
            if wanted != "torch" or specifier.contains(torch_dist.version, prereleases=True):
                continue
            fix = f"{pip} uninstall -y {name}"
            if name in SERVING:
                fix += f"\npython3 -m venv serving && serving/bin/pip install {name}=={dist.version}"
            what = f"{name} {dist.version} requires torch{specifier}, installed is {torch_dist.version}"
            findings.append(fail(what, fix, name="other torch"))
    findings += _torch_parts(torch_dist, have, pip) if torch_dist else []
    findings += _cuda_majors(have, torch_dist, pip)
    for name, several in have.items():
        if len(set(several)) > 1 and (name in ("torch", "triton") or name.startswith("nvidia-")):
            fix = f"{pip} uninstall -y {name}; {pip} uninstall -y {name}; {pip} install {name}=={several[0]}"
            findings.append(
                fail(f"{name} is here {len(several)} times: {', '.join(several)}", fix, name="twice")
            )
    return findings or [ok(f"{len(have)} packages agree on one torch")]


def _torch_parts(torch_dist: metadata.Distribution, have: dict[str, list[str]], pip: str) -> list[Finding]:
    """What torch itself requires at an exact version (triton, nvidia-*): swaps leave other ones behind."""
    findings = []
    for name, specifier in requirements_of(torch_dist):
        if name != "triton" and not name.startswith("nvidia-"):
            continue
        if name not in have:
            state = "which is missing"
        elif not specifier.contains(have[name][0], prereleases=True):
            state = f"installed is {have[name][0]}"
        else:
            continue
        message = f"torch {torch_dist.version} requires {name}{specifier}, {state}"
        findings.append(fail(message, f"{pip} install '{name}{specifier}'", name="torch parts"))
    return findings


def _cuda_majors(
    have: dict[str, list[str]], torch_dist: metadata.Distribution | None, pip: str
) -> list[Finding]:
    """nvidia-*-cu12 beside nvidia-*-cu13: two runtimes in one process. Keep the one torch asks for."""
    majors: dict[str, list[str]] = {}
    for name in have:
        if match := re.fullmatch(r"nvidia-.+-(cu\d+)", name):
            majors.setdefault(match[1], []).append(name)
    if len(majors) < 2:
        return []
    asked = " ".join(torch_dist.requires or []) if torch_dist else ""
    keep = {major for major, names in majors.items() if any(n in asked for n in names)} or {max(majors)}
    rest = sorted(n for major, names in majors.items() if major not in keep for n in names)
    if not rest:  # torch itself asks for both, as some builds do
        return []
    counts = ", ".join(f"{len(names)} of {major}" for major, names in sorted(majors.items()))
    return [
        fail(
            f"CUDA wheels of several majors: {counts}; torch uses {', '.join(sorted(keep))}",
            f"{pip} uninstall -y {' '.join(rest)}",
            name="cuda wheels",
        )
    ]


def check_leftovers(folders: list[Path]) -> list[Finding]:
    """Editable installs whose source is gone, half-removed packages: they shadow or break imports."""
    findings = []
    for folder in folders:
        if not folder.is_dir():
            continue
        for remains in sorted(folder.glob("~*")):
            message = f"{remains.name} in {folder} is the rest of an interrupted pip"
            findings.append(warn(message, f"rm -rf {shlex.quote(str(remains))}"))
        for file in sorted(
            [*folder.glob("*.pth"), *folder.glob("*.egg-link"), *folder.glob("__editable__*.py")]
        ):
            gone = [path for path in _paths_in(file) if not (folder / path).exists()]
            if gone:
                message = f"{file.name} in {folder} points to {gone[0]}, which is gone"
                findings.append(warn(message, f"rm {shlex.quote(str(file))}"))
    return findings or [ok("no dead editable installs")]


def _paths_in(file: Path) -> list[str]:
    text = file.read_text(errors="replace")
    if file.suffix == ".py":  # setuptools' finder keeps MAPPING: dict[str, str] = {'name': '/path'}
        mapping = re.search(r"^MAPPING[^=]*=\s*(\{.*?\})", text, re.M | re.S)
        return re.findall(r":\s*'(/[^']*)'", mapping[1]) if mapping else []
    lines = [line.strip() for line in text.splitlines()]
    if file.suffix == ".egg-link":
        return lines[:1]
    return [line for line in lines if line and not line.startswith(("#", "import ", "import\t"))]


# ---------------------------------------------------------------- torch, driver, GPUs


def check_python():
    return ok(f"{sys.version.split()[0]} at {sys.executable}")


def check_build():
    """The torch that is imported: where from, for which CUDA, does it see the GPUs that the driver sees."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    message = f"torch {torch.__version__} ({build}), Triton {triton_version or 'none'}"
    gpus, _ = query_gpus()
    fix = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11,<=2.13.0'"
    recorded = metadata.version("torch")
    if recorded.split("+")[0] != torch.__version__.split("+")[0]:
        return fail(f"pip knows torch {recorded}, imported is {torch.__version__} from {torch.__file__}", fix)
    if gpus and not torch.version.cuda:
        return fail(f"{len(gpus)} GPUs here, but this torch is built for the CPU: {message}", fix)
    if gpus and not torch.cuda.is_available():
        command = "import torch; torch.cuda.init()"  # its error names the driver that is too old, or worse
        return fail(
            f"{len(gpus)} GPUs here, but torch cannot use them: {message}", f'{sys.executable} -c "{command}"'
        )
    if torch.version.cuda and gpus and not triton_version:
        return fail(f"no Triton, so nothing compiles on the GPU: {message}", fix)
    return ok(f"{message}, from {Path(torch.__file__).parent}")


def query_gpus(run=subprocess.run) -> tuple[list[dict], str]:
    """What nvidia-smi says of every GPU, or ([], why not)."""
    fields = "index,uuid,name,driver_version,memory.total,memory.used,power.draw,power.limit,persistence_mode"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return [], "no nvidia-smi"
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi gave no answer in 30 s"
    if done.returncode:
        return [], f"nvidia-smi failed: {(done.stdout + done.stderr).strip()[:120]}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(fields.split(","), row, strict=False)) for row in rows], ""


def query_processes(run=subprocess.run) -> list[dict]:
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = run(command, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if "," in line]
    return [dict(zip(("uuid", "pid", "mib"), row, strict=False)) for row in rows]


def check_gpus(gpus: list[dict], why: str, processes: list[dict]) -> list[Finding]:
    """Driver, power, and memory that somebody else holds."""
    if not gpus:
        if why != "no nvidia-smi":
            return [fail(why, "nvidia-smi; sudo dmesg | grep -i -E 'nvrm|xid' | tail")]
        return [ok("none (no nvidia-smi): everything here runs on the CPU")]
    findings = []
    for gpu in gpus:
        name = f"gpu {gpu['index']}"
        total, used = number(gpu["memory.total"]), number(gpu["memory.used"])
        draw, limit = number(gpu["power.draw"]), number(gpu["power.limit"])
        told = (
            f"{gpu['name']}, driver {gpu['driver_version']}, {used / 1024:.1f} of {total / 1024:.0f} GiB used"
        )
        told += f", {draw:.0f} of {limit:.0f} W" if limit else ""
        others = [p for p in processes if p["uuid"] == gpu["uuid"] and p["pid"] != str(os.getpid())]
        if used > 0.02 * total and used > 1500:
            who = (
                ", ".join(f"pid {p['pid']} ({p['mib']} MiB)" for p in others) or "nobody that nvidia-smi sees"
            )
            pids = ",".join(p["pid"] for p in others)
            fix = f"ps -o pid,user,etime,args -p {pids}" if pids else "nvidia-smi; sudo fuser -v /dev/nvidia*"
            findings.append(warn(f"{told}; held by {who}", fix, name=name))
        else:
            findings.append(ok(told, name=name))
    drivers = {gpu["driver_version"] for gpu in gpus}
    if len(drivers) > 1:
        findings.append(
            fail(f"several drivers: {', '.join(sorted(drivers))}", "sudo systemctl reboot", name="driver")
        )
    return findings


def number(text: str) -> float:
    match = re.search(r"[\d.]+", text)
    return float(match[0]) if match else 0.0


# ---------------------------------------------------------------- the machine


def check_disk(folder: Path, needed_gib: float = 10.0):
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    inodes = os.statvfs(folder)
    fix = f"df -h {shlex.quote(str(folder))}; du -xsh {shlex.quote(str(folder))}/* | sort -h | tail"
    if inodes.f_files and inodes.f_favail < 10_000:
        return fail(f"{inodes.f_favail} inodes free at {folder}", fix.replace("df -h", "df -i"))
    if free < needed_gib / 10:
        return fail(f"{free:.2f} GiB free at {folder}, checkpoints and compile cache need space", fix)
    if free < needed_gib:
        return warn(f"{free:.1f} GiB free at {folder}, a run of an 8B target wants {needed_gib:.0f}", fix)
    return ok(f"{free:.0f} GiB free at {folder}")


def check_shared_memory(folder: Path = Path("/dev/shm")):
    """NCCL and multiprocessing put buffers there; containers give 64 MiB by default."""
    fix = "sudo mount -o remount,size=8G /dev/shm  # a container: docker run --ipc=host or --shm-size=8g"
    if not folder.is_dir():
        return warn(f"{folder} does not exist", fix)
    usage = shutil.disk_usage(folder)
    if usage.free < 2**26 * 2:
        return warn(f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} in {folder}", fix)
    return ok(f"{usage.free / GIB:.1f} GiB free in {folder}")


def check_open_files(limits: tuple[int, int] | None = None):
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        target = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        fix = f"ulimit -n {target}" if target >= 1024 else "sudo prlimit --nofile=65536:65536 --pid $$"
        return warn(f"only {soft} open files allowed, ranks and loaders need 1024 or more", fix)
    return ok("unlimited" if soft == resource.RLIM_INFINITY else f"{soft} open files")


def memory_gib(meminfo: str, cgroup_max: str | None, cgroup_used: str | None) -> tuple[float, float]:
    """(total, available) of what this process may use: the machine's, or less where a cgroup says so."""
    values = {key: int(kib) / 2**20 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.M)}
    total, free = values["MemTotal"], values.get("MemAvailable", values["MemFree"])
    if cgroup_max and cgroup_max.strip().isdigit():
        limit = int(cgroup_max) / GIB
        used = int(cgroup_used) / GIB if cgroup_used else 0.0
        total, free = min(total, limit), min(free, max(0.0, limit - used))
    return total, free


def check_memory():
    def read(name: str) -> str | None:
        path = Path("/sys/fs/cgroup") / name
        return path.read_text() if path.is_file() else None

    if not Path("/proc/meminfo").is_file():
        return skip("no /proc/meminfo on this system", "vm_stat | head")
    total, free = memory_gib(Path("/proc/meminfo").read_text(), read("memory.max"), read("memory.current"))
    message = f"{free:.1f} of {total:.1f} GiB available, {usable_cpus()} CPUs"
    fix = "ps -eo pid,user,rss,args --sort=-rss | head"
    if free < 1:
        return fail(message, fix)
    return warn(message, fix) if free < 3 else ok(message)


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_settings(environ: dict[str, str], cpus: int) -> list[Finding]:
    """Environment variables that slow a run, hide errors or change what is compiled."""
    findings = []
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads and not (threads.isdigit() and int(threads) > 0):
        findings.append(warn(f"OMP_NUM_THREADS={threads!r} is no number", "export OMP_NUM_THREADS=1"))
    elif threads and int(threads) > cpus:
        findings.append(warn(f"OMP_NUM_THREADS={threads} on {cpus} CPUs", f"export OMP_NUM_THREADS={cpus}"))
    for name, why in UNWANTED.items():
        if environ.get(name, "0") not in ("", "0"):
            findings.append(warn(f"{name}={environ[name]}: {why}", f"unset {name}"))
    allocator = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    for item in filter(None, re.sub(r"\[[^\]]*\]", "list", allocator).split(",")):
        key, _, value = item.partition(":")
        if not value.strip() or not key.strip().startswith(ALLOCATOR):
            fix = "export PYTORCH_ALLOC_CONF=expandable_segments:True; unset PYTORCH_CUDA_ALLOC_CONF"
            findings.append(warn(f"the allocator setting {item!r} is none that torch knows", fix))
    if environ.get("PYTHONPATH"):
        where = environ["PYTHONPATH"]
        if any((Path(p) / "torch").is_dir() for p in where.split(":") if p):
            findings.append(fail(f"PYTHONPATH={where} brings a torch of its own", "unset PYTHONPATH"))
    told = f"OMP_NUM_THREADS={threads or 'unset'}, allocator {allocator or 'default'}"
    return findings or [ok(told)]


UNWANTED = {
    "TORCHDYNAMO_DISABLE": "nothing is compiled, flex_attention materialises its scores",
    "TORCH_COMPILE_DISABLE": "nothing is compiled, flex_attention materialises its scores",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every rank compiles everything at every start",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits, nothing overlaps",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
    "NCCL_P2P_DISABLE": "GPUs talk through host memory",
}
ALLOCATOR = ("backend", "expandable_segments", "garbage_collection_threshold", "max_split_size_mb", "pinned_")
ALLOCATOR += (
    "roundup_power2_divisions",
    "max_non_split_rounding_mb",
    "release_lock_on_",
    "use_",
    "throw_on_",
)
ALLOCATOR += ("per_process_memory_fraction", "graph_capture_record_stream_reuse", "large_segment_size_mb")


# ---------------------------------------------------------------- all of it


def site_folders() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(p) for p in dict.fromkeys((paths["purelib"], paths["platlib"]))]


def checks(report: Report, args=None) -> None:
    """Every check of this script; `python -m diagnose` calls it too."""
    dists = installed()
    report.run("python", check_python)
    report.run("torch", check_torch, dists)
    report.run("build", check_build)
    report.run("wheels", check_wheels, dists)
    report.run("leftovers", check_leftovers, site_folders())
    gpus, why = query_gpus()
    report.run("gpus", check_gpus, gpus, why, query_processes() if gpus else [])
    report.run("disk", check_disk, REPOSITORY)
    report.run("shared memory", check_shared_memory)
    report.run("open files", check_open_files)
    report.run("memory", check_memory)
    report.run("settings", check_settings, dict(os.environ), usable_cpus())


def main(argv: list[str] | None = None) -> int:
    args = parse_args("diagnose.env", __doc__, argv)
    report = Report("env", args)
    checks(report, args)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
