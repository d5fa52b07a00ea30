"""The ranks of a job: who drafts, their process groups, the control exchange, and how a job ends.

On each node the first ranks draft (so rank 0 leads) and the others run the target; in the colocate layout
every rank does both. A target is one rank, or `tp` ranks in a row that each hold a part of it and are led by
the first. Batches have one global order: batch b belongs to node b mod n, is made by target (b//n) mod t and
consumed by drafter (b//n) mod d of that node, so features stay on their node and any split sees the same
batches.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
# After a signal the process ends by itself after this long: torchrun kills it after 30 s, nobody a plain
# process.
STOP_LIMIT_S = 20.0 if "TORCHELASTIC_RUN_ID" in os.environ else 300.0
JOIN_LIMIT_S = 5.0  # likewise where it waits for a rank that never joins: nothing is to be saved
FAILURE_LIMIT_S = 8.0  # likewise after another rank's failure
LOST = re.compile("connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
SHORT_S, LONG_S = 120.0, 3600.0  # time-outs of the control groups: training, and loading and compiling


class UserError(Exception):
    """Something the user must change; shown as one line, without a traceback."""


def env_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def launcher_store() -> dist.Store:
    """The store that the launcher keeps, by a connection of its own; it outlives an elastic restart."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=10))
    return dist.PrefixStore(f"blockdraft/{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}", store)


def refuse(line: str) -> int:
    """Exit code 2, said once a node: by its first rank, for which the others wait, since torchrun ends all
    ranks when the first of them ends, perhaps before that line.
    """
    local = env_int("LOCAL_RANK", 0)
    if local == 0:
        print(line, file=sys.stderr, flush=True)
    if env_int("WORLD_SIZE", 1) > 1 and "MASTER_PORT" in os.environ:
        said = f"refused/{ATTEMPT}/{env_int('RANK', 0) - local}"
        with contextlib.suppress(RuntimeError):  # nobody keeps a store, or the first rank is content
            store = launcher_store()
            store.set(said, "1") if local == 0 else store.wait([said], datetime.timedelta(seconds=10))
    return 2


class World:
    """This rank's place in the job. `join` makes the process groups; before it only the environment is
    read.
    """

    def __init__(self, layout: str, drafters: int, tp: int = 1):
        self.rank, self.size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
        self.local, self.per_node = env_int("LOCAL_RANK", 0), env_int("LOCAL_WORLD_SIZE", self.size)
        self.node, self.nodes = self.rank // self.per_node, self.size // self.per_node
        self.colocate = layout == "colocate"
        self.drafters_per_node = self.per_node if self.colocate else drafters // self.nodes
        self.drafters = self.drafters_per_node * self.nodes
        self.tp = tp  # ranks of a target
        self.targets = self.size if self.colocate else (self.size - self.drafters) // tp
        self.device = torch.device("cpu")  # until `join` has asked every rank
        self.place = self.rank % self.per_node  # among this node's ranks
        self.drafts = self.place < self.drafters_per_node
        self.runs_target = self.colocate or not self.drafts
        self.role = "drafter+target" if self.colocate else "drafter" if self.drafts else "target"
        self.part = 0 if self.drafts else (self.place - self.drafters_per_node) % tp
        self.leader = self.rank - self.part  # of this rank's target
        self.target_group: dist.ProcessGroup | None = None  # of a target of several ranks, on them

    def drafter_of(self, batch: int) -> int:
        """Global rank of the drafter that consumes this batch."""
        node, turn = batch % self.nodes, batch // self.nodes
        return node * self.per_node + turn % self.drafters_per_node

    def target_of(self, batch: int) -> int:
        """Global rank of the target that makes this batch; of its leader."""
        if self.colocate:
            return self.drafter_of(batch)
        node, turn = batch % self.nodes, batch // self.nodes
        return self.leaders(node)[turn % (self.targets // self.nodes)]

    def leaders(self, node: int) -> range:
        """Global rank of the first rank of each target of a node."""
        first = node * self.per_node
        return range(first + self.drafters_per_node, first + self.per_node, self.tp)

    def drafter_ranks(self) -> list[int]:
        return [r for r in range(self.size) if r % self.per_node < self.drafters_per_node]

    def name(self, rank: int | None = None) -> str:
        """A rank as messages show it: `rank 3 (target)`, `rank 4 (target 1, part 2 of 2)`."""
        rank = self.rank if rank is None else rank
        drafts = rank % self.per_node < self.drafters_per_node
        role = self.role if self.colocate else "drafter" if drafts else "target"
        if role == "target" and self.tp > 1:
            target, part = divmod(rank % self.per_node - self.drafters_per_node, self.tp)
            target += rank // self.per_node * (self.targets // self.nodes)
            role = f"target {target}, part {part + 1} of {self.tp}"
        return f"rank {rank} ({role})"

    def join(self, device: str, allow_cpu: bool) -> None:
        """Rendezvous, agree on the device, make the groups: NCCL (gloo on CPU) for data, gloo for control."""
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if "MASTER_PORT" not in os.environ:  # plain `python train.py`: a free port of our own
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=SHORT_S)))
        self.store = dist.PrefixStore(f"blockdraft/{ATTEMPT}", store)  # torchrun keeps it over a restart
        self.device = self.choose_device(device, allow_cpu)
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size)
        short, long = (datetime.timedelta(seconds=s) for s in (SHORT_S, LONG_S))
        self.control = dist.new_group(backend="gloo", timeout=short)  # every step, after the gate
        self.setup = dist.new_group(backend="gloo", timeout=long)  # loading, compiling, evaluation, saving
        self.headers = dist.new_group(backend="gloo", timeout=long)  # stream.py: what describes a batch
        self.draft_group = dist.new_group(self.drafter_ranks())
        if self.tp > 1:
            self.join_targets(long)
        self.barrier()

    def join_targets(self, timeout: datetime.timedelta) -> None:
        """A group for the ranks of each target; long, since they wait for a leader whose buffers are full."""
        for node in range(self.nodes):
            for leader in self.leaders(node):
                group = dist.new_group(range(leader, leader + self.tp), timeout=timeout)
                if leader == self.leader and not self.drafts:
                    self.target_group = group

    def choose_device(self, asked: str, allow_cpu: bool) -> torch.device:
        """cuda where every rank has a GPU of its own, said and checked over the store before NCCL is
        touched.
        """
        mine = ""
        if asked != "cpu" and torch.cuda.is_available():
            mine = f"{socket.gethostname()}/{self.node}/{torch.cuda.get_device_properties(0).uuid}"
        self.store.set(f"gpu/{self.rank}", mine)
        gpus = [self.store.get(f"gpu/{r}").decode() for r in range(self.size)]
        without = gpus.count("")
        if asked == "cpu" or without == self.size:
            if asked == "cuda":
                raise UserError("--device cuda: torch sees no GPU here: run python -m diagnose.env")
            return torch.device("cpu")
        shared = without or len(set(gpus)) < self.size
        if not shared:
            return torch.device("cuda", 0)
        if allow_cpu and asked != "cuda":
            if self.rank == 0:
                print(
                    f"{self.size} ranks but {len(set(gpus) - {''})} GPU(s): all ranks run on CPU", flush=True
                )
            return torch.device("cpu")
        raise UserError(
            f"{self.size} ranks but {len(set(gpus) - {''})} GPU(s): give --nproc_per_node their number, "
            "or --layout colocate on one GPU, or --device cpu"
        )

    def barrier(self) -> None:
        dist.barrier(group=self.setup)

    def gather(self, value: T) -> list[T]:
        """One object of every rank, on every rank."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.setup)
        return out

    def together(self, work: Callable[[], T], what: str) -> T:
        """Run `work` on every rank; if it fails on one, all end with that rank's message, said once."""
        result, error = None, ""
        try:
            result = work()
        except (UserError, ValueError, OSError) as problem:
            error = f"{problem}" or type(problem).__name__  # an empty message is a failure too
        errors = self.gather(error)
        for message in errors:
            if message:
                raise UserError(message if message[0] in "-/." or ":" in message else f"{what}: {message}")
        return result

    def leave(self) -> None:
        """The orderly end: nobody closes its sockets before everybody is done."""
        self.barrier()
        dist.destroy_process_group()


class Control:
    """One small asynchronous all-gather an optimizer step: what every rank did, read `lag` steps later.

    A blocking exchange would couple both sides at every step. Every rank reads the exchange of the same step
    at the same step, so that what it decides takes effect at the same later step everywhere. `lag` covers
    the batches that the targets can be ahead of the drafters.
    """

    def __init__(self, world: World, lag: int, fields: tuple[str, ...]):
        self.world, self.lag, self.fields = world, lag, fields
        self.pending: dict[int, tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = {}
        self.known: dict[int, torch.Tensor] = {}

    def post(self, step: int, values: dict[str, float]) -> None:
        """Send this rank's values of a finished step (missing fields are 0)."""
        mine = torch.tensor([float(values.get(f, 0.0)) for f in self.fields], dtype=torch.float64)
        out = [torch.empty_like(mine) for _ in range(self.world.size)]
        work = dist.all_gather(out, mine, group=self.world.control, async_op=True)
        self.pending[step] = (work, mine, out)

    def read(self, step: int) -> dict[str, list[float]] | None:
        """Every rank's values of that step, by field; waits for the slowest rank. None if it was never
        posted.
        """
        if step in self.pending:
            work, _, out = self.pending.pop(step)
            try:
                work.wait()
            except RuntimeError as error:
                if "timed out" not in f"{error}".lower():
                    raise
                raise UserError(
                    f"{self.world.name()} has waited {SHORT_S:.0f} s for another rank to end step {step}: it "
                    "hangs, or its batches (give a smaller --token-budget) or its disk (a larger "
                    "--save-every) are that slow"
                ) from error
            self.known[step] = torch.stack(out)
        if step not in self.known:
            return None
        return {f: self.known[step][:, i].tolist() for i, f in enumerate(self.fields)}

    def forget(self, before: int) -> None:
        for step in [s for s in self.known if s < before]:
            del self.known[step]


class Ending:
    """How a job ends before its last step: signals, and failures anywhere.

    Signals are taken by a thread through a wake-up descriptor, since a rank that is blocked in a receive
    never runs a Python handler: the first one asks for an orderly stop, a second one ends the process at
    once. A failure is written to the store, where every rank's thread looks twice a second. Either way the
    process ends by itself some seconds later if nothing else has ended it.
    """

    def __init__(self):
        self.asked = threading.Event()  # an orderly stop
        self.reason = ""
        self.training = False
        self.on_forced_end: Callable[[str], None] = lambda why: None
        self._world: World | None = None
        self._over = threading.Event()
        self._signalled = self._failed = 0.0
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._read.settimeout(0.5)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants SIGHUP ignored
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def watch(self, world: World) -> None:
        """From now on look for other ranks' failures; a store connection of its own, for the thread."""
        self._store, self._world = dist.PrefixStore(ATTEMPT, launcher_store()), world

    def fail(self, error: BaseException) -> dict:
        """Tell every rank of this rank's error; returns the job's first failure, {rank, why}."""
        first_line = f"{error}".strip().partition("\n")[0]  # CUDA's go on; the traceback has all
        why = f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {first_line}"
        mine = {"rank": -1 if self._world is None else self._world.rank, "why": why}
        if self._world is None:
            return mine
        lost = isinstance(error, dist.DistError | RuntimeError) and LOST.search(f"{error}")
        if lost:
            mine["why"] = (
                f"{self._world.name()} lost the connection to another rank, which was killed or crashed"
            )
            time.sleep(1.5)  # the one that really failed may be about to say so
        try:
            return json.loads(self._store.compare_set("failure", "", json.dumps(mine)))
        except (RuntimeError, ValueError):  # the launcher, which keeps the store, is gone
            leader = self._world.node * self._world.per_node
            return mine | {"rank": leader} if lost or isinstance(error, UserError) else mine  # once a node

    def finished(self) -> None:
        self._over.set()
        signal.set_wakeup_fd(-1)

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                for number in self._read.recv(16):
                    self._signal(number)
            except TimeoutError:
                pass
            now = time.monotonic()
            if self._world is not None and not self._failed and self._failure():
                self._failed = now
            if self._failed and now - self._failed > FAILURE_LIMIT_S:
                self._end(self._failure(), 1)
            limit = STOP_LIMIT_S if self._world is not None else JOIN_LIMIT_S
            if self._signalled and now - self._signalled > limit:
                what = "the step" if self.training else "loading or compiling"
                self._end(f"{self.reason}, and {what} did not end within {limit:.0f} s", 1)

    def _failure(self) -> str:
        try:
            return json.loads(self._store.get("failure"))["why"] if self._store.check(["failure"]) else ""
        except (RuntimeError, ValueError):
            return "the launcher is gone"

    def _signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._signalled:
            self._signalled, self.reason = now, signal.Signals(number).name
            self.asked.set()
            if self.training and self._world.rank == 0:
                told = f"{self.reason}: a checkpoint, then a stop within a few steps; another ends it at once"
                print(told, file=sys.stderr, flush=True)
        elif now - self._signalled > 2:  # torchrun passes a Ctrl-C on as a second signal within milliseconds
            self._end(f"{self.reason} twice", 128 + number)

    def _end(self, why: str, code: int) -> None:
        try:
            self.on_forced_end(why)
            sys.stderr.flush()
        finally:  # whatever happens in there, on a full disk say
            os._exit(code)
