"""Break real torchrun jobs in every way we know, at random moments, and look at what is left.

    python tests/faults.py --seeds 0-49                     # one fault a seed, each about 8 s of two cores
    python tests/faults.py --seeds 50-99 --reference DIR    # parts share DIR: undisturbed runs and caches
    python tests/faults.py --seeds 0-49 --json FILE         # add one line of JSON a fault to FILE
    python tests/faults.py --table FILE...                  # the figures of docs/reliability.md
    python tests/faults.py --soak 5000                      # so many tiny steps: does anything grow?

A seed gives the kind of fault, the role and the phase that it hits, and the moment. The ranks run train.py's
own main(), from a script that first puts the fault in front of one of its functions. Afterwards: the job has
ended in time (or gone on, where it should), said it once, left no process and no shared memory; every
checkpoint equals the one of an undisturbed run, bit for bit; and a resume goes on with exactly its losses.

Linux only. The script makes itself a mount namespace: a small tmpfs is the disk that gets full.
"""

import argparse
import ctypes
import json
import math
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

STEPS, SAVE_EVERY, EVAL_EVERY = 12, 3, 6
END_LIMIT_S = 30.0  # from the fault to the end of the last process
JOB_LIMIT_S = 100.0  # of a whole job, mostly starting it
PHASES = ("loading", "compiling", "stepping", "evaluating", "saving")
SPLITS = {  # name: ranks, flags, drafters, how often
    "1+1": (2, "--drafters 1", 1, 5),
    "2 colocate": (2, "--layout colocate", 2, 2),
    "2+1": (3, "--drafters 2", 2, 4),
    "1+2": (3, "--drafters 1", 1, 3),
    "2+2": (4, "--drafters 2", 2, 1),
    "2+3": (5, "--drafters 2", 2, 1),
}
RANKS = ("leader", "drafter", "target")  # the leader is rank 0: a drafter, and the one that writes
PROCESSES = (*RANKS, "launcher")
KINDS = {  # kind: what must come of it, whom it may hit, when
    "SIGKILL": ("ends", RANKS, PHASES),
    "killed launcher": ("ends", ("launcher",), PHASES),
    "SIGTERM": ("stops", PROCESSES, PHASES),
    "SIGINT": ("stops", PROCESSES, PHASES),
    "SIGHUP": ("stops", PROCESSES, PHASES),
    "SIGSTOP for a while": ("goes on", PROCESSES, PHASES),
    "exception": ("ends", RANKS, PHASES),
    "out of memory": ("ends", RANKS, PHASES),
    "NaN once": ("goes on", RANKS, ("stepping",)),
    "NaN for good": ("ends", RANKS, ("stepping",)),
    "full disk": ("ends", ("leader",), PHASES),
    "read-only folder": ("ends", ("leader",), PHASES),
    "lost connection": ("ends or goes on", RANKS, PHASES[1:]),
    "slow rank": ("goes on", RANKS, PHASES),
    "corrupt message": ("ends", ("target",), ("stepping", "evaluating")),
    "clock jump": ("goes on", RANKS, PHASES),
}
SIGNALS = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP for a while", "killed launcher"}
PLACES = {  # where a fault is put, as names of train.py; a target's where it is one
    "loading": ("World.join", "Job.load_models", "checkpoint.RunFolder.write_config", "stream.connect"),
    "compiling": ("compile_utils.gate", "warm_up"),
    "stepping": ("Pulse.begin_step", "accumulate", "update", "Pulse.end_step"),
    "evaluating": ("evaluate", "every_anchor", "Pulse.evaluated"),
    "saving": (
        "save", "checkpoint.save_file", "checkpoint.torch.save", "checkpoint.export", "checkpoint.sync",
        "checkpoint.os.rename",
    ),
}  # fmt: skip
TARGET_PLACES = {
    "loading": ("World.join", "Batches.__init__", "Job.load_models", "stream.connect"),
    "compiling": ("compile_utils.gate",),
    "stepping": ("Pulse.begin_step", "Job.make_features", "stream.Sender.send", "Pulse.end_step"),
    "evaluating": ("send_evaluation", "Batches.evaluation"),
}
ENTRIES = {  # a call of one of these is the next step, evaluation or save
    "Pulse.begin_step": "stepping", "evaluate": "evaluating", "send_evaluation": "evaluating",
    "save": "saving",
}  # fmt: skip
CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long ahead;
void clock_jump(long seconds) { ahead += seconds; }
int clock_gettime(clockid_t id, struct timespec *t) {
    int r = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += ahead;
    return r;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec s;
    clock_gettime(CLOCK_REALTIME, &s);
    t->tv_sec = s.tv_sec;
    t->tv_usec = s.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec s;
    clock_gettime(CLOCK_REALTIME, &s);
    if (t) *t = s.tv_sec;
    return s.tv_sec;
}
"""

# ---------------------------------------------------------------------------------------------------------
# The plan of a seed


def make_plan(seed: int) -> dict:
    """Kind, role and phase in turn through a shuffled list of all there are; the rest at random."""
    cells = [
        (k, role, phase) for k, (_, roles, phases) in KINDS.items() for role in roles for phase in phases
    ]
    random.Random(7).shuffle(cells)
    kind, role, phase = cells[seed % len(cells)]
    rng = random.Random(1000 + seed)
    if phase == "saving" and role != "leader" and kind not in SIGNALS:
        role = "leader"  # nobody else runs code of its own then
    splits = [s for s, (_, _, drafters, _) in SPLITS.items() if drafters == 2 or role != "drafter"]
    if role == "target":
        splits.remove("2 colocate")
    cold = phase == "compiling" and rng.random() < 0.25  # a real compile
    cold = cold and kind not in (
        "full disk",
        "read-only folder",
        "lost connection",
    )  # which nobody meets before its end
    warm = not cold and rng.random() < 0.1
    splits = [s for s in splits if s in ("1+1", "2+1")] if cold or warm else splits
    split = rng.choices(splits, [SPLITS[s][3] for s in splits])[0]
    ranks, drafters = SPLITS[split][0], SPLITS[split][2]
    target = rng.randrange(drafters, ranks) if ranks > drafters else 0
    victim = {"leader": 0, "drafter": 1, "target": target, "launcher": -1}
    # The process that notices the moment: the victim, but only rank 0 saves and a launcher is outside.
    trigger = 0 if phase == "saving" or role == "launcher" else victim[role]
    places = TARGET_PLACES if trigger >= drafters else PLACES
    places = [p for p in places[phase] if trigger == 0 or "write_config" not in p]
    last = {"stepping": STEPS, "evaluating": 1 + STEPS // EVAL_EVERY, "saving": STEPS // SAVE_EVERY}
    plan = {
        "seed": seed, "kind": kind, "role": role, "phase": phase, "split": split, "victim": victim[role],
        "trigger": trigger, "place": rng.choice(places), "count": rng.randint(1, last.get(phase, 1)),
        "delay_s": rng.choice([0, 0.02, 0.1, 0.3]) * rng.random() if not cold else 8 * rng.random(),
        "compile": "cold" if cold else "warm" if warm else "", "pick": rng.random(), "restarts": 0,
    }  # fmt: skip
    if kind in ("SIGKILL", "exception", "out of memory") and rng.random() < 0.3:
        plan["restarts"] = 1
    if kind == "NaN for good":
        plan["count"] = rng.randint(SAVE_EVERY + 1, 5)  # after a checkpoint, and five steps before the end
    if kind.startswith("NaN"):
        plan["place"] = "Job.make_features" if role == "target" else "accumulate"
    if kind == "corrupt message":
        plan["place"] = "send_evaluation" if phase == "evaluating" else "stream.Sender.send"
    return plan


def expected(plan: dict) -> str:
    return "goes on" if plan["restarts"] else KINDS[plan["kind"]][0]


# ---------------------------------------------------------------------------------------------------------
# In a rank: put the fault in front of a function


def rank_main(plan_file: str, flags: list[str]) -> None:
    """What torchrun starts. Output goes to a file a rank; the exit code is left beside it."""
    import faulthandler

    plan = json.loads(Path(plan_file).read_text())
    home, rank = Path(plan["home"]), int(os.environ["RANK"])
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(home / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    (home / f"pid{rank}").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a job that hangs is asked for its stacks
    import train

    real_end = train.end

    def end(code: int) -> None:
        (home / f"code{rank}").write_text(str(code))
        real_end(code)

    train.end = end
    if plan["kind"] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        Fault(plan, rank, train).plant()
    sys.argv = ["train.py", *flags]
    train.end(train.main())


class Fault:
    """The fault of a plan, in one rank."""

    def __init__(self, plan: dict, rank: int, train):
        self.plan, self.rank, self.train = plan, rank, train
        self.home, self.counts, self.calls = Path(plan["home"]), dict.fromkeys(PHASES, 0), 0
        self.struck = self.poisoned = False

    def plant(self) -> None:
        if self.rank != self.plan["trigger"]:
            return
        names = {*(n for n, phase in ENTRIES.items() if phase == self.plan["phase"]), self.plan["place"]}
        for name in names:
            self.put_before(name)
        if self.plan["kind"] == "corrupt message":
            self.put_before("stream.dist.isend", self.corrupt)

    def put_before(self, name: str, change: Callable | None = None) -> None:
        """Call `at` (or let `change` alter the arguments) before train.NAME."""
        owner = self.train
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        real = getattr(owner, last)

        def planted(*args, **kwargs):
            if change:
                args = change(*args)
            elif name == "warm_up":  # the compile itself is what it returns
                work = real(*args)
                return lambda: (self.at(name, args), work())
            elif name == "Job.make_features":  # (job, batch, out): a NaN goes into what it made
                made = real(*args)
                self.at(name, args)
                return made
            else:
                self.at(name, args)
            return real(*args, **kwargs)

        setattr(owner, last, planted)

    def at(self, name: str, args: tuple) -> None:
        """A planted function is called: is this the moment?"""
        plan, phase = self.plan, self.plan["phase"]
        if ENTRIES.get(name) == phase:
            self.counts[phase] += 1
        right = phase in ("loading", "compiling") or self.counts[phase] == plan["count"]
        if name == plan["place"] and right and not self.struck:
            self.struck = True
            self.strike(args)
        elif self.struck:
            self.again(name, args)

    def mark(self) -> None:
        beside = self.home / "struck.new"
        beside.write_text(str(time.monotonic()))
        os.rename(beside, self.home / "struck")

    def strike(self, args: tuple) -> None:
        kind = self.plan["kind"]
        if kind in SIGNALS:
            threading.Timer(self.plan["delay_s"], self.send_signal).start()
            return
        time.sleep(self.plan["delay_s"] / 10)
        self.mark()
        if kind == "exception":
            raise RuntimeError("planted")
        if kind == "out of memory":
            self.train.torch.empty(1 << 50)
        if kind.startswith("NaN"):
            self.again(self.plan["place"], args)
        if kind == "slow rank":
            time.sleep(2 * self.plan["pick"])
        if kind == "corrupt message":
            self.poisoned = True
        if kind == "clock jump":
            ctypes.CDLL(None).clock_jump(ctypes.c_long(random.Random(self.plan["pick"]).choice(
                [86400 * 30, 3600, 61, -61, -3600, -86400 * 30])))  # fmt: skip
        if kind == "full disk":
            fill_disk(Path(self.plan["run"]), self.home)
        if kind == "read-only folder":
            Path(self.plan["run"]).chmod(0o555)
        if kind == "lost connection":
            self.cut_connection()

    def again(self, name: str, args: tuple) -> None:
        """The planted functions after the fault: some faults last."""
        kind, self.calls = self.plan["kind"], self.calls + 1
        if kind == "slow rank" and self.calls < 20:
            time.sleep(0.3 * self.plan["pick"])
        nan = kind == "NaN for good" or (kind == "NaN once" and self.calls == 1)
        if nan and name in ("accumulate", "Job.make_features"):
            args[3 if name == "accumulate" else 2].fill_(math.nan)

    def send_signal(self) -> None:
        """To the victim; Ctrl-C and a lost terminal reach the launcher's process group."""
        kind, victim, launcher = self.plan["kind"], self.plan["victim"], os.getppid()
        pid = launcher if victim < 0 else int((self.home / f"pid{victim}").read_text())
        number = getattr(signal, kind.split()[0], signal.SIGKILL)
        self.mark()
        if kind == "SIGSTOP for a while":
            seconds = 1 + 4 * self.plan["pick"]
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True)
        if victim < 0 and kind in ("SIGINT", "SIGHUP"):
            os.killpg(os.getpgid(pid), number)
        else:
            os.kill(pid, number)

    def corrupt(self, tensor, *rest) -> tuple:
        """One number of a header or of a batch's integers, on its way."""
        torch = self.train.torch
        whole = (torch.int32,) if self.plan["pick"] < 0.5 else (torch.int64,)
        if self.poisoned and tensor.dtype in whole:
            self.poisoned = False
            tensor = tensor.clone()
            tensor[int(2 * self.plan["pick"] % 1 * len(tensor))] += 1
        return (tensor, *rest)

    def cut_connection(self) -> None:
        """Shut one of this rank's connections: to another rank, or to the launcher's store."""
        found = []
        for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    one = socket.socket(fileno=os.dup(fd))
                    one.getpeername()
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(one)
            except OSError:  # a closed or listening one
                continue
        one = found[int(self.plan["pick"] * len(found))]
        (self.home / "cut").write_text(f"{one.getsockname()} to {one.getpeername()}, of {len(found)}")
        one.shutdown(socket.SHUT_RDWR)


def fill_disk(run: Path, home: Path) -> None:
    """Fill the small tmpfs that the run folder stands on."""
    with open(run.parent / "filler", "wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    filler.write(bytes(size))
            except OSError:
                continue


# ---------------------------------------------------------------------------------------------------------
# Around a job


class Rig:
    """Jobs, the undisturbed runs to compare with, and the caches they share: all in `folder`."""

    def __init__(self, folder: Path):
        from launch import Launcher

        self.folder = folder.absolute()
        self.home = self.folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        for name, lines in (("train", 60), ("eval", 4)):
            text = (ROOT / "assets" / "tiny" / f"{name}.jsonl").read_text().splitlines(keepends=True)
            (self.folder / f"{name}.jsonl").write_text("".join(text[:lines]))
        self.clock = self.folder / "clock.so"
        if not self.clock.exists() and shutil.which("cc"):
            command = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(self.clock)]
            subprocess.run(command, input=CLOCK, text=True, check=True)
        self.logs = Path(tempfile.mkdtemp(prefix="resumes-", dir=self.folder))
        self.launcher = Launcher(self.logs)

    def flags(self, split: str, steps: int = STEPS) -> list[str]:
        flags = f"--data {self.folder}/train.jsonl --eval-data {self.folder}/eval.jsonl --device cpu --keep 0"
        flags += " --token-budget 256 --anchors 32 --draft-layers 1 --max-batch-size 16 --batches-per-step 2"
        flags += f" --steps {steps} --save-every {SAVE_EVERY} --eval-every {EVAL_EVERY} {SPLITS[split][1]}"
        return flags.split()

    def compiling(self, compiled: bool) -> dict[str, str]:
        return {"TORCH_COMPILE_DISABLE": ""} if compiled else {}

    def reference(self, split: str, compiled: bool) -> Path:
        """The undisturbed run of a split, with a checkpoint of every step; made once."""
        run = self.folder / f"undisturbed {split}{' compiled' * compiled}".replace(" ", "-")
        if not (run / f"step-{STEPS:06d}").exists():
            shutil.rmtree(run, ignore_errors=True)
            flags = [*self.flags(split), "--out", str(run), "--save-every", "1"]
            job = self.torchrun(SPLITS[split][0], flags, compiled)
            assert job.returncode == 0, job.stdout + job.stderr
        return run

    def torchrun(self, ranks: int, flags: list, compiled: bool) -> subprocess.CompletedProcess:
        from launch import environment

        env = environment(self.home, **self.compiling(compiled))
        command = self.command(ranks, ROOT / "train.py", [str(f) for f in flags])
        return subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True, timeout=JOB_LIMIT_S)

    def command(self, ranks: int, script: Path, flags: list[str], *options: str) -> list[str]:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
        ]
        return [*torchrun, *options, str(script), *flags]

    def one(self, seed: int) -> dict:
        """One fault: the job, its end, what it left, its resume."""
        plan = make_plan(seed)
        if plan["kind"] == "clock jump" and not self.clock.exists():
            return plan | {"outcome": "skipped: no C compiler"}
        if plan["kind"] == "full disk" and not os.environ.get("FAULTS_MOUNTS"):
            return plan | {"outcome": "skipped: nothing can be mounted here"}
        begun = time.monotonic()
        home = Path(tempfile.mkdtemp(prefix=f"fault{seed}-", dir=self.folder))
        disk = home / "disk"
        disk.mkdir()
        if plan["kind"] == "full disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", disk], check=True)
        plan |= {"home": str(home), "run": str(disk / "run")}
        try:
            undisturbed = self.reference(plan["split"], bool(plan["compile"]))
            found = self.break_job(plan, home)
            problems = found["problems"] + look_at(plan, found, home, disk / "run", undisturbed)
            if not problems:
                problems = self.resume(plan, found, disk / "run", undisturbed)
        finally:
            if plan["kind"] == "full disk":
                subprocess.run(["umount", "-l", disk], check=True)
        found |= {"problems": problems, "seconds": round(time.monotonic() - begun, 1)}
        if not problems:
            shutil.rmtree(home)
        return {k: v for k, v in (plan | found).items() if k not in ("run", "codes", "text", "err")}

    def break_job(self, plan: dict, home: Path) -> dict:
        """Run the job to its end, however that comes about; what is seen from outside."""
        from launch import environment

        more = {"FAULTS_JOB": str(home)} | self.compiling(bool(plan["compile"]))
        flags = [*self.flags(plan["split"]), "--out", plan["run"]]
        if plan["compile"] == "cold":
            flags += ["--compile-cache", str(home / "cache")]
        if plan["kind"] == "clock jump":
            more["LD_PRELOAD"] = str(self.clock)
        (home / "plan.json").write_text(json.dumps(plan))
        options = [f"--max-restarts={plan['restarts']}"] if plan["restarts"] else []
        arguments = ["rank", str(home / "plan.json"), *flags]
        command = self.command(SPLITS[plan["split"]][0], Path(__file__), arguments, *options)
        if plan["kind"] == "read-only folder" and os.getuid() == 0:  # root writes anywhere: not here
            command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
        shared = set(os.listdir("/dev/shm"))
        with open(home / "launcher.txt", "w") as log:
            job = subprocess.Popen(
                command, env=environment(self.home, **more), stdout=log, stderr=log, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        ended, problems = wait_for_end(job, home, expected(plan))
        left = sorted(set(os.listdir("/dev/shm")) - shared)
        problems += [f"left in shared memory: {left}"] if left else []
        return {"problems": problems, "launcher": job.poll(), **ended}

    def resume(self, plan: dict, found: dict, run: Path, undisturbed: Path) -> list[str]:
        """Go on to the end: exactly the undisturbed losses, then exactly its last checkpoint."""
        if plan["kind"] == "NaN once":
            return []
        ranks, flags = SPLITS[plan["split"]][0], ["--resume", run]
        if plan["kind"] == "NaN for good":  # from before the first bad step
            flags = ["--resume", run / f"step-{SAVE_EVERY:06d}"]
        elif not (run / "config.json").exists():  # it had not begun
            flags = [*self.flags(plan["split"]), "--out", run]
        if plan["kind"] == "read-only folder" and run.exists():
            run.chmod(0o755)
        if plan["kind"] == "full disk":
            (run.parent / "filler").unlink(missing_ok=True)
        if found["state"] == "finished":
            return compare_metrics(run, undisturbed)
        if plan["compile"]:  # forked ranks cannot compile
            again = self.torchrun(ranks, flags, True)
            codes, text = {again.returncode}, again.stdout + again.stderr
        else:
            again = self.launcher.run(ranks, None, *flags, limit_s=JOB_LIMIT_S)
            codes, text = set(again.codes), again.text
        if codes != {0}:
            return [f"resume: exit codes {codes}: {text[-2000:]}"]
        stopped = found["newest"] if found["state"] == "stopped" else -1
        return compare_metrics(run, undisturbed, stopped) + compare_checkpoints(run, undisturbed, STEPS)

    def close(self) -> None:
        self.launcher.close()
        shutil.rmtree(self.logs)


def marked(home: Path) -> list[int]:
    """The processes of a job that live, found by its mark in their environment."""
    mark, found = f"FAULTS_JOB={home}\0".encode(), []
    for entry in os.listdir("/proc"):
        try:
            if not entry.isdigit() or mark not in Path("/proc", entry, "environ").read_bytes() + b"\0":
                continue
            command = Path("/proc", entry, "cmdline").read_bytes()
            if not command.startswith(b"sh\0") and not command.startswith(b"sleep\0"):  # ours: kill -CONT
                found.append(int(entry))
        except OSError:  # gone, or somebody else's
            continue
    return found


def wait_for_end(job: subprocess.Popen, home: Path, what: str) -> tuple[dict, list[str]]:
    """Wait for every process of the job; ({seconds from the fault to the end}, problems)."""
    begun, problems, struck = time.monotonic(), [], home / "struck"
    while True:
        job.poll()
        alive, now = marked(home), time.monotonic()
        since = now - float(struck.read_text()) if struck.exists() else 0.0
        if not alive and job.poll() is not None:
            break
        late = "ends" in what or what == "stops"
        if (late and since > END_LIMIT_S) or now - begun > JOB_LIMIT_S:
            problems.append(f"{len(alive)} processes live {since:.0f} s after the fault")
            for pid in alive:
                for number in (signal.SIGUSR1, signal.SIGKILL):
                    try:
                        os.kill(pid, number)
                        time.sleep(0.5)
                    except ProcessLookupError:
                        break
            job.wait()
            break
        time.sleep(0.05)
    return {"end_s": round(since, 1)}, problems


def look_at(plan: dict, found: dict, home: Path, run: Path, undisturbed: Path) -> list[str]:
    """What the job said and left, against what must come of this fault. Adds state and codes to `found`."""
    ranks, what, problems = SPLITS[plan["split"]][0], expected(plan), []
    said = {r: "".join(read(home / f"{r}.{kind}") for kind in ("out", "err")) for r in range(ranks)}
    text = "".join(said.values())
    found["codes"] = [read(home / f"code{r}") for r in range(ranks)]
    status = json.loads(read(run / "status.json") or "{}")
    found["state"], found["why"] = status.get("state", "none"), status.get("why", "")
    steps = [p.name for p in sorted(run.glob("step-*"))]
    found["newest"] = int(steps[-1][5:]) if steps else 0
    ended_well = found["launcher"] == 0 and found["state"] == "finished"
    if not (home / "struck").exists():
        found["outcome"] = "it had ended before the fault"
        return [] if ended_well else ["the fault never struck"]
    finished = found["state"] == "finished" and found["newest"] == STEPS  # a fault after the last save
    if what == "goes on" and not ended_well:
        problems.append(f"did not go on: launcher {found['launcher']}, {status}")
    # A compile cannot be stopped in order: where it outlasts the signal's limit, the job ends by force.
    forced = plan["compile"] == "cold" and found["why"].startswith("ended by force: SIG")
    if (
        what == "stops"
        and not forced
        and (found["state"] not in ("stopped", "finished") or set(found["codes"]) != {"0"})
    ):
        problems.append(f"no orderly stop: exit codes {found['codes']}, {status}")
    if (
        what == "ends"
        and not finished
        and (found["launcher"] == 0 or found["state"] in ("stopped", "finished"))
    ):
        problems.append(f"no failure: launcher {found['launcher']}, {status}")
    if what == "ends or goes on" and not ended_well and found["launcher"] == 0:
        problems.append(f"neither failed nor finished: {status}")
    if found["state"] == "running":
        problems.append(f"status.json says running: {status}")
    tracebacks = text.count("Traceback (most recent call last)")
    lines = sum(line.startswith("train.py: ") and "status.json" not in line for line in text.splitlines())
    most = 0 if what in ("stops", "goes on") and not plan["restarts"] and not forced else 1
    if tracebacks > most or (plan["kind"] == "exception" and tracebacks != 1):
        problems.append(f"{tracebacks} tracebacks")
    if lines > most or (what == "ends" and not lines and not finished and plan["kind"] != "killed launcher"):
        problems.append(f"{lines} lines of error")
    for word in ("Segmentation", "Fatal Python", "terminate called", "Aborted"):
        problems += [f"{word} in the output"] if word in text + read(home / "launcher.txt") else []
    nan = plan["count"] if plan["kind"].startswith("NaN") else STEPS + 1
    for name in steps:
        if int(name[5:]) < nan:
            problems += compare_checkpoints(run, undisturbed, int(name[5:]))
    if plan["kind"] == "NaN once":
        problems += check_skip(run, undisturbed, plan["count"])
    return problems


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values(records: list[dict]) -> list[tuple]:
    return [tuple(m.get(k) for k in ("step", "loss", "grad_norm", "eval_loss", "eval_tau")) for m in records]


def compare_metrics(run: Path, undisturbed: Path, stopped: int = -1) -> list[str]:
    """Every step once, with the very same numbers; the step where a run stopped was not evaluated."""
    ours, theirs = values(metrics(run)), values(metrics(undisturbed))
    ours, theirs = ([(*v[:3], *v[3:] * (v[0] != stopped)) for v in side] for side in (ours, theirs))
    if ours == theirs:
        return []
    odd = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
    return [f"{len(ours)} records for {len(theirs)}, first difference {odd[:1]}"]


def compare_checkpoints(run: Path, undisturbed: Path, step: int) -> list[str]:
    """Weights, moments and export of a step, bit for bit."""
    from test_train import same_tensors

    name = f"step-{step:06d}"
    try:
        json.loads((run / name / "state.json").read_text())
        same = same_tensors(run / name, undisturbed / name)
    except Exception as error:  # whatever a torn file raises
        return [f"{name} is not whole: {error!r}"]
    return [] if same else [f"{name} differs from the undisturbed run's"]


def check_skip(run: Path, undisturbed: Path, step: int) -> list[str]:
    """One skipped step, nothing different before it, all finite at the end."""
    from test_train import tensors

    found = metrics(run)
    skipped = [m["step"] for m in found if m.get("skipped")]
    problems = [] if skipped == [step] else [f"skipped {skipped}, not {step}"]
    if values(found)[:step] != values(metrics(undisturbed))[:step]:
        problems.append("steps before the NaN differ")
    if not all(t.isfinite().all() for t in tensors(run / f"step-{STEPS:06d}").values()):
        problems.append("the last checkpoint is not finite")
    return problems


# ---------------------------------------------------------------------------------------------------------
# A long run


def soak(rig: Rig, steps: int) -> int:
    """So many tiny steps, stopped half-way by SIGTERM and resumed: memory, handles, threads, step time."""
    home = Path(tempfile.mkdtemp(prefix="soak-", dir=rig.folder))
    run, keep, problems = home / "run", 3, []
    tiny = [*rig.flags("1+1", steps), *"--token-budget 128 --anchors 8 --max-length 128".split()]
    tiny += f"--batches-per-step 1 --save-every 50 --keep {keep} --eval-every {steps // 100}".split()
    for part, flags in enumerate(([*tiny, "--out", run], ["--resume", run])):
        samples = watch(rig, home, flags, steps // 2 if part == 0 else 0)
        for rank, seen in sorted(samples.items()):
            early, late = ([median(part) for part in zip(*s, strict=True)] for s in late_thirds(seen))
            problems += [f"rank {rank} grew"] if late[1] > early[1] + 8 or late[2:] > early[2:] else []
            shown = zip(early, late, ("of the steps", "MiB", "handles", "threads"), strict=True)
            grown = ", ".join(f"{a:.0f} to {b:.0f} {name}" for a, b, name in shown)
            print(f"part {part + 1}, rank {rank}: {grown}", flush=True)
        kept = len(list(run.glob("step-*")))
        problems += [f"{kept} checkpoints"] if kept > keep else []
    records = metrics(run)
    if [m["step"] for m in records] != list(range(steps + 1)):
        problems.append("metrics.jsonl has steps twice or not at all")
    lines = [line.split()[1] for line in read(run / "train.log").splitlines() if line.startswith("step ")]
    if len(lines) != len(set(lines)) or len(lines) != steps:
        problems.append(f"train.log has {len(lines)} steps, {len(set(lines))} different ones")
    times = [m["step_ms"] for m in records if m["step"]]
    fifths = [median(times[i * steps // 5 : (i + 1) * steps // 5]) for i in range(5)]
    print(f"median step of each fifth: {', '.join(f'{ms:.1f}' for ms in fifths)} ms")
    print("; ".join(problems) or f"{steps} steps: nothing grew")
    shutil.rmtree(home)
    return int(bool(problems))


def watch(rig: Rig, home: Path, flags: list, stop_at: int) -> dict[str, list[tuple]]:
    """Run a job, sending it SIGTERM at a step; (step, MiB, handles, threads) of each rank, once a second."""
    from launch import environment

    samples, asked = {}, False
    begun = len(read(home / "run" / "metrics.jsonl").splitlines())
    env = environment(rig.home, FAULTS_JOB=str(home))
    with open(home / "launcher.txt", "a") as log:
        command = rig.command(2, ROOT / "train.py", [str(f) for f in flags])
        job = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    while job.poll() is None:
        time.sleep(1)
        lines = read(home / "run" / "metrics.jsonl").splitlines()
        for pid in marked(home) if len(lines) > begun + 100 else ():
            try:
                place = Path("/proc", str(pid))
                ranks = [v for v in (place / "environ").read_bytes().split(b"\0") if v.startswith(b"RANK=")]
                status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
                sizes = int(status["VmRSS"].split()[0]) / 1024, len(list((place / "fd").iterdir()))
                for rank in ranks:
                    seen = samples.setdefault(rank.decode()[5:], [])
                    seen.append((len(lines), *sizes, int(status["Threads"])))
            except (OSError, KeyError):  # it has just ended
                continue
        if stop_at and len(lines) > stop_at and not asked:
            asked = True
            job.send_signal(signal.SIGTERM)
    assert job.returncode == int(asked), read(home / "launcher.txt")[-2000:]
    return samples


def late_thirds(seen: list[tuple]) -> tuple[list[tuple], list[tuple]]:
    """The samples of the second third, and of the last; in the first the pictures grow to their full size."""
    third = max(1, len(seen) // 3)
    return seen[third : 2 * third], seen[-third:]


def median(values) -> float:
    return sorted(values)[len(values) // 2]


# ---------------------------------------------------------------------------------------------------------
# Start


def table(files: list[Path]) -> str:
    """Figures of recorded faults: how often in which phase, on whom, what came of it, how long it took."""
    from tabulate import tabulate

    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = [f for f in found if "outcome" not in f]
    rows = []
    for kind, (what, roles, _) in KINDS.items():
        mine = [f for f in found if f["kind"] == kind]
        counts = [sum(f["phase"] == phase for f in mine) for phase in PHASES]
        whom = ", ".join(f"{r} {n}" for r in roles if (n := sum(f["role"] == r for f in mine)))
        worst = max((f["end_s"] for f in mine if expected(f) != "goes on"), default=None)
        bad = sum(bool(f["problems"]) for f in mine)
        rows.append([kind, what, *counts, whom, worst, bad])
    rows.append(["all", "", *(sum(r[i] for r in rows) for i in range(2, 7)), f"{len(found)} faults"])
    rows[-1] += [max(r[8] or 0 for r in rows[:-1]), sum(r[9] for r in rows[:-1])]
    head = ["fault", "the job", *PHASES, "on", "worst s to the end", "problems"]
    return tabulate(rows, head, tablefmt="github")


def describe(p: dict) -> str:
    """One line a fault."""
    where = f"{p['kind']}, {p['role']} of {p['split']} while {p['phase']} ({p['place']} {p['count']})"
    extra = "".join(
        f", {k}" for k in (p["compile"] and f"{p['compile']} compile", p["restarts"] and "restart") if k
    )
    if "outcome" in p:
        return f"seed {p['seed']:3d}  {where}{extra}: {p['outcome']}"
    after = f"{p['state']} after {p['end_s']:.1f} s, newest {p['newest']}"
    return f"seed {p['seed']:3d}  {where}{extra}: {after}  [{'; '.join(p['problems']) or 'ok'}]"


def run_seeds(rig: Rig, seeds: list[int], record: Path | None) -> int:
    bad = 0
    for seed in seeds:
        done = rig.one(seed)
        print(describe(done), flush=True)
        bad += bool(done.get("problems"))
        if record:
            with open(record, "a") as file:
                file.write(json.dumps(done) + "\n")
    print(f"{len(seeds)} faults, {bad} with problems", flush=True)
    return int(bad > 0)


def in_namespace() -> None:
    """Start again in a mount namespace of our own, with a /dev/shm of our own, where that is allowed."""
    if os.environ.get("FAULTS_MOUNTS") is not None:
        return
    able = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    os.environ["FAULTS_MOUNTS"] = "yes" if able else ""
    if able:
        again = 'mount -t tmpfs none /dev/shm && exec "$@"'
        os.execvp("unshare", ["unshare", "-rm", "sh", "-c", again, "sh", sys.executable, *sys.argv])


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0-9", help="such as 0-49 or 3,17")
    parser.add_argument("--reference", type=Path, help="folder of the undisturbed runs (a temporary one)")
    parser.add_argument("--json", type=Path, help="add one line a fault")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="figures of such files")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="one long run instead of faults")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return 0
    in_namespace()
    seeds = []
    for part in args.seeds.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        rig = Rig(args.reference or Path(temporary))
        try:
            return soak(rig, args.soak) if args.soak else run_seeds(rig, seeds, args.json)
        finally:
            rig.close()


if __name__ == "__main__":
    sys.exit(main())
