"""Do the ranks reach each other: every collective that training uses, and sends between every pair.

    python -m diagnose.comms                                   # one rank a GPU, or 2 gloo ranks on the CPU
    torchrun --nproc_per_node=8 -m diagnose.comms              # the ranks of a job, over nodes too
    python -m diagnose.comms --nproc 4 --mib 64                # ranks, and MiB of a message

Values are asserted, not only moved; bandwidth is of the slowest rank. Two ranks on one GPU are found by
UUID before NCCL is asked. Each rank sees its GPU as device 0, as train.py does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

if not __package__:  # python diagnose/comms.py: same imports as python -m diagnose.comms
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from diagnose.report import Finding, Parser, Report, add_arguments, fail, ok, skip

# Shapes: W ranks (the world), N elements of a message.

PLAIN = "python -m diagnose.comms"
TIMEOUT_S = 45  # of one collective: a rank that does not answer is an error, not a wait


def narrow_to_local_gpu() -> None:
    """Before torch is imported: this rank's GPU becomes device 0, unless torchrun has done it already."""
    local, per_node = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    listed = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local)
    elif len(listed) > 1 or (per_node > 1 and local < len(listed)):
        os.environ["CUDA_VISIBLE_DEVICES"] = listed[local] if local < len(listed) else ""


class Ranks:
    """This rank's side of the checks. Every check runs on all ranks; rank 0 keeps what came out."""

    def __init__(self, mib: float, use_cpu: bool):
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        timeout = timedelta(seconds=TIMEOUT_S)
        cuda = torch.cuda.is_available() and not use_cpu
        self.device = torch.device("cuda:0" if cuda else "cpu")
        self.backend = "nccl" if cuda else "gloo"
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self.length = int(mib * 2**20 / 4)  # float32
        self.sum = self.size * (self.size + 1) // 2
        self.findings: list[Finding] = []

    def gather(self, value) -> list:
        out = [None] * self.size
        self.dist.all_gather_object(out, value, group=self.control)
        return out

    def check(self, name: str, run: Callable[[], tuple[str, bool, str]], fix: str) -> bool:
        """All ranks run it; wrong values or an exception on any of them is a FAIL that names the rank."""
        try:
            message, right, wrong = run()
        except Exception as error:  # told to the others instead of leaving them waiting
            message, right, wrong = "", False, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        answers = self.gather("" if right else wrong)
        bad = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        self.findings.append(fail("; ".join(bad[:3]), fix, name=name) if bad else ok(message, name=name))
        return not bad

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds of the slowest rank for one run, after one to warm up."""
        run()
        self.wait()
        self.dist.barrier(group=self.control)
        start = time.perf_counter()
        run()
        self.wait()
        return max(self.gather(time.perf_counter() - start))

    def wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def full(self, value: float):
        return self.torch.full((self.length,), float(value), device=self.device)

    def is_all(self, x_N, value: float) -> bool:
        return bool((x_N == value).all())

    def speed(self, seconds: float, bytes_moved: float) -> str:
        return f"{bytes_moved / seconds / 1e9:.3g} GB/s"

    # ------------------------------------------------------------ the checks

    def gpus(self) -> tuple[str, bool, str]:
        """Who sits where; two ranks on one GPU deadlock or fail in NCCL with a hard to read error."""
        return judge_gpus(self.gather(self.place()), self.rank)

    def place(self) -> tuple[str, str]:
        """(host, UUID of this rank's GPU or '')."""
        on_gpu = self.device.type == "cuda"
        return socket.gethostname(), str(self.torch.cuda.get_device_properties(0).uuid) if on_gpu else ""

    def all_reduce(self) -> tuple[str, bool, str]:
        x_N = self.full(self.rank + 1)
        self.dist.all_reduce(x_N)
        got = float(x_N[-1])
        right = self.is_all(x_N, self.sum)
        y_N = self.full(0)
        seconds = self.timed(lambda: self.dist.all_reduce(y_N))
        bus = 2 * (self.size - 1) / self.size * y_N.nbytes
        told = f"sum {got:.0f} == {self.sum}, {self.speed(seconds, bus)}"
        return told, right, f"sum {got} instead of {self.sum}"

    def broadcast(self) -> tuple[str, bool, str]:
        seen = []
        for source in range(self.size):
            x_N = self.full(source + 1 if self.rank == source else 0)
            self.dist.broadcast(x_N, src=source)
            seen.append(self.is_all(x_N, source + 1))
        y_N = self.full(0)
        seconds = self.timed(lambda: self.dist.broadcast(y_N, src=0))
        told = f"{self.size} of {self.size} sources right, {self.speed(seconds, y_N.nbytes)}"
        return told, all(seen), f"wrong values from rank {seen.index(False) if False in seen else '-'}"

    def all_gather(self) -> tuple[str, bool, str]:
        out = [self.full(0) for _ in range(self.size)]
        mine = self.full(self.rank + 1)
        self.dist.all_gather(out, mine)
        right = all(self.is_all(part_N, rank + 1) for rank, part_N in enumerate(out))
        seconds = self.timed(lambda: self.dist.all_gather(out, mine))
        told = f"{self.size} parts right, {self.speed(seconds, (self.size - 1) * mine.nbytes)}"
        return told, right, "a part holds another rank's values"

    def objects(self) -> tuple[str, bool, str]:
        """The control groups' calls: pickled objects over gloo, and the barrier."""
        expected = [{"rank": rank, "text": "é" * rank} for rank in range(self.size)]
        right = self.gather(expected[self.rank]) == expected
        box = [expected[-1] if self.rank == 0 else None]
        self.dist.broadcast_object_list(box, src=0, group=self.control)
        self.dist.barrier(group=self.control)
        return f"{self.size} objects equal", right and box[0] == expected[-1], "objects differ"

    def send(self) -> tuple[str, bool, str]:
        """A bf16 message for every ordered pair (targets feed drafters; any rank may be either)."""
        bad, slowest = [], (0.0, "")
        for source in range(self.size):
            for to in range(self.size):
                if source == to:
                    continue
                seconds, right = self.one_send(source, to)
                slowest = max(slowest, (seconds, f"{source}->{to}"))
                bad += [] if right else [f"{source}->{to}"]
        pairs = self.size * (self.size - 1)
        told = (
            f"{pairs} of {pairs} pairs right, slowest {slowest[1]} {self.speed(slowest[0], self.length * 2)}"
        )
        return told, not bad, f"wrong values over {', '.join(bad)}"

    def one_send(self, source: int, to: int) -> tuple[float, bool]:
        # Small whole numbers are exact in bf16; a ramp shows shifted and cut messages, the pair swapped ones.
        ramp_N = self.torch.arange(self.length, device=self.device) % 64
        expected_N = (ramp_N + source + 2 * to).to(self.torch.bfloat16)
        got_N = self.torch.zeros_like(expected_N)

        def exchange() -> None:
            if self.rank == source:
                self.dist.isend(expected_N, to).wait()
            if self.rank == to:
                self.dist.irecv(got_N, source).wait()

        seconds = self.timed(exchange)
        return seconds, self.rank != to or bool(self.torch.equal(got_N, expected_N))

    def run_all(self) -> None:
        name = self.backend
        nccl = (
            "NCCL_DEBUG=INFO python -m diagnose.comms 2>&1 | grep -i -E 'warn|error|nvls|p2p|shm' | head -40"
        )
        gloo = f"GLOO_SOCKET_IFNAME=lo {PLAIN}"
        fix = unset_interfaces(nccl if name == "nccl" else gloo)
        cards = {uuid for host, uuid in self.gather(self.place()) if uuid and host == socket.gethostname()}
        alone = f"torchrun --nproc_per_node={len(cards)} -m diagnose.comms" if len(cards) > 1 else PLAIN
        alone += "  # one rank a GPU; nvidia-smi -L lists them"
        if not self.check("gpus", self.gpus, alone):
            return  # NCCL would only fail or hang
        self.check("gloo objects", self.objects, unset_interfaces(gloo))
        for what, run in (("all_reduce", self.all_reduce), ("broadcast", self.broadcast)):
            self.check(f"{name} {what}", run, fix)
        self.check(f"{name} all_gather", self.all_gather, fix)
        self.check(f"{name} send", self.send, fix)


def unset_interfaces(otherwise: str) -> str:
    """An interface named by hand, which another machine does not have, is the first thing to suspect."""
    named = [n for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(n)]
    return f"unset {' '.join(named)}" if named else otherwise


def judge_gpus(places: list[tuple[str, str]], rank: int) -> tuple[str, bool, str]:
    """(message, right, what is wrong for this rank) from each rank's (host, GPU UUID or '')."""
    hosts = len({host for host, _ in places})
    cards = [uuid for _, uuid in places if uuid]
    told = f"{len(places)} ranks on {hosts} host(s), " + (f"{len(cards)} GPUs" if cards else "CPU")
    if not places[rank][1]:
        return told, not cards, "no GPU, while other ranks have one"
    twins = [other for other, place in enumerate(places) if place == places[rank]]
    return told, len(twins) == 1, f"GPU {places[rank][1]} is used by ranks {', '.join(map(str, twins))}"


# ---------------------------------------------------------------- starting ranks


def rank_main(args: argparse.Namespace) -> list[Finding]:
    ranks = Ranks(args.mib or (16 if args.cpu else 64), args.cpu)
    try:
        ranks.run_all()
        ranks.gather(0)  # nobody leaves while another still reads
    finally:
        ranks.dist.destroy_process_group()
    return ranks.findings


def spawn(size: int, args: argparse.Namespace, limit: float = 90.0) -> list[Finding]:
    """Start `size` ranks of this script here, and bring back what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--findings", f"{folder}/found.json"]
        command += ["--mib", str(args.mib)] if args.mib else []
        command += ["--cpu"] if args.cpu else []
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        common |= {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        children = []
        for rank in range(size):
            environ = dict(os.environ) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(f"{folder}/{rank}.err", "w") as errors:
                child = subprocess.Popen(
                    command, env=environ, stdout=errors, stderr=errors, start_new_session=True
                )
            children.append(child)
        try:
            failed = wait_for(children, limit)
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        found = Path(folder, "found.json")
        if found.exists():
            return [Finding(*item) for item in json.loads(found.read_text())]
        lines = Path(folder, f"{failed or 0}.err").read_text(errors="replace").strip().splitlines()
        told = f"rank {failed or 0} failed: {lines[-1][:200] if lines else f'no end in {limit:.0f} s'}"
        return [fail(told, unset_interfaces(f"NCCL_DEBUG=INFO {PLAIN} --traceback"), name="ranks")]


def wait_for(children: list[subprocess.Popen], limit: float) -> int | None:
    """Until all ended, one failed (its rank is returned) or the limit passed."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [child.poll() for child in children]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad or None not in codes:
            return bad[0] if bad else None
        time.sleep(0.05)
    return None


def checks(report: Report, args: argparse.Namespace | None = None) -> None:
    """Every check of this script; `python -m diagnose` calls it too, without this script's flags."""
    args = argparse.Namespace(**{**vars(parse([])), **(vars(args) if args else {})})
    import torch

    gpus = 0 if args.cpu else torch.cuda.device_count()
    args.cpu = args.cpu or gpus == 0
    size = args.nproc or (gpus if gpus else 2)
    if gpus and size > gpus:
        args.cpu = True
    if gpus == 1 and not args.nproc:
        fix = "python -m diagnose.comms --cpu --nproc 2"
        report.add("nccl", skip("one GPU: nothing to send to over NCCL; gloo is tried on the CPU", fix))
        args.cpu, size = True, 2
    report.run("ranks", spawn, size, args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("diagnose.comms", __doc__)
    add_arguments(parser)
    parser.add_argument("--nproc", type=int, help="ranks to start (default one a GPU, or 2 on the CPU)")
    parser.add_argument("--mib", type=float, help="MiB of a message (default 64 on GPUs, 16 on the CPU)")
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU although there are GPUs")
    parser.add_argument("--findings", help=argparse.SUPPRESS)  # a rank started by spawn() writes there
    args = parser.parse_args(argv)
    if (args.nproc is not None and args.nproc < 2) or (args.mib is not None and args.mib <= 0):
        parser.error("--nproc must be at least 2 and --mib above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rank = int(os.environ.get("RANK", -1))
    if rank < 0 or (int(os.environ.get("WORLD_SIZE", 1)) < 2 and not args.findings):
        report = Report("comms", args)
        checks(report, args)
        return report.finish()
    narrow_to_local_gpu()
    if args.findings:
        findings = rank_main(args)
        if rank == 0:
            told = [(f.state, f.message, f.fix, f.name) for f in findings]
            Path(args.findings).write_text(json.dumps(told))
        return 0
    report = Report("comms", args, quiet=rank > 0)  # under torchrun
    report.run("ranks", rank_main, args)
    return report.finish()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    sys.exit(main())
