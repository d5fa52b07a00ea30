"""Start real training jobs for the tests: gloo ranks on the CPU, under torchrun or forked.

Forked ranks come from one process that has torch and train.py loaded, with the environment that torchrun
would give them and a store kept by a process of its own, as torchrun's agent keeps it. That saves an import
of torch a rank, shows each rank's own exit code and output, and nobody ends the ranks but themselves.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 90


@dataclass
class Result:
    """How a job ended: an exit code a rank (negative: a signal; None: still alive at the time limit)."""

    codes: list[int | None]
    out: list[str]
    err: list[str]
    seconds: float
    folder: Path

    @property
    def text(self) -> str:
        """Everything all ranks said, for assertions and their messages."""
        return "\n".join(
            f"--- rank {r}\n{o}{e}" for r, (o, e) in enumerate(zip(self.out, self.err, strict=True))
        )

    def good(self) -> "Result":
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n{self.text}"
        return self

    def records(self) -> list[dict]:
        """metrics.jsonl of the run."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())


def environment(home: Path, **more: str) -> dict[str, str]:
    """A clean environment: one thread a rank, caches in `home`, nothing of a surrounding torchrun."""
    strange = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH", "CUDA_VISIBLE")
    env = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    return env | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_COMPILE_DISABLE": "1",  # the gate then runs eager: no compile time in these tests
        **more,
    }


class Launcher:
    """The process that ranks are forked from; one job at a time."""

    def __init__(self, home: Path):
        self.home, self.jobs = home, 0
        self.server = subprocess.Popen(
            [sys.executable, __file__], env=environment(home), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip

    def run(
        self, ranks: int, out: Path, *flags: object, plant: str = "", limit_s: float = LIMIT_S, **env: str
    ):
        """Run train.py with these flags on so many ranks; `plant` is code run in each rank beforehand.

        In `plant`, `train` is imported and RANK is this rank's number.
        """
        self.jobs += 1
        logs = self.home / f"job{self.jobs}"
        logs.mkdir()
        job = {
            "ranks": ranks,
            "flags": [str(f) for f in (*flags, "--out", out)] if out else [str(f) for f in flags],
        }
        job |= {"plant": plant, "logs": str(logs), "limit_s": limit_s, "env": env}
        begun = time.monotonic()
        self.server.stdin.write(json.dumps(job) + "\n")
        codes = json.loads(self.server.stdout.readline())
        out_err = [[(logs / f"{r}.{kind}").read_text() for r in range(ranks)] for kind in ("out", "err")]
        return Result(codes, *out_err, time.monotonic() - begun, Path(out) if out else logs)

    def call(self, ranks: int, function: str, *, limit_s: float = LIMIT_S, **env: str) -> Result:
        """Call a test module's function (`module.name`) with the rank's number instead of train.py."""
        module, name = function.split(".")
        plant = f"import {module}; {module}.{name}(RANK); raise SystemExit(0)"
        return self.run(ranks, None, plant=plant, limit_s=limit_s, **env)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait(timeout=30)


def torchrun(
    home: Path, ranks: int, flags: list, plant: str = "", options: tuple[str, ...] = (), cwd: Path = ROOT
) -> subprocess.Popen:
    """The same under torchrun, as a session of its own; stdout and stderr joined, to be read by the caller.

    Each rank leaves its exit code in `home`/code<rank>.
    """
    script = home / f"planted{time.monotonic_ns()}.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "import train\n"
        "RANK = int(os.environ['RANK'])\n"
        f"{plant}\n"
        "code = train.main()\n"
        f"pathlib.Path({str(home)!r}, f'code{{RANK}}').write_text(str(code))\n"
        "train.end(code)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen(
        [*command, *options, str(script), *map(str, flags)],
        env=environment(home), cwd=cwd, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# The forking process


def serve() -> None:
    import matplotlib.pyplot  # noqa: F401 - so that no rank has to
    import torch

    import train  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


def run_job(job: dict) -> list[int | None]:
    keeper, port = fork_store()
    pids = [fork_rank(job, rank, port) for rank in range(job["ranks"])]
    codes: list[int | None] = [None] * len(pids)
    deadline = time.monotonic() + job["limit_s"]
    while None in codes and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                ended, how = os.waitpid(pid, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(how) if ended else None
        time.sleep(0.01)
    for pid in [keeper, *(p for p, code in zip(pids, codes, strict=True) if code is None)]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def fork_store() -> tuple[int, int]:
    """(pid, port) of a process that keeps the store, as torchrun's agent does."""
    import torch.distributed as dist

    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        port = int(os.read(read, 16))
        os.close(read)
        return pid, port
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, str(store.port).encode())
    while True:
        time.sleep(60)


def fork_rank(job: dict, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{job['logs']}/{rank}.{kind}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        size = str(job["ranks"])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **job["env"]}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        sys.argv = ["train.py", *job["flags"]]
        import train

        exec(job["plant"], {"train": train, "RANK": rank})
        code = train.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
