"""Hidden states from target ranks to drafter ranks; the only file with point-to-point calls.

A message is a header (gloo, fixed size), the integers of the batch (gloo) and the features (NCCL; gloo on
CPU). The header is checked before the receive of anything it describes is posted: gloo takes a short message
silently and aborts the process on a long one, NCCL says nothing. Each rank owns `depth` feature buffers,
whoever is at the other end: that is the back-pressure. Waits are measured where the device waits, since
waiting on an NCCL work returns at once on the host.

T packed tokens, A anchors, D documents, K tapped layers, H hidden.
"""

import time
import zlib
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from data import Batch
from world import World

MAGIC, HEADER = 0xB10CD4AF, 12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRAIN, EVAL = 0, 1


class StreamError(RuntimeError):
    """Both sides disagree on what comes next; the message says on what."""


class Shapes:
    """The static shapes of every message of a run."""

    def __init__(self, tokens: int, anchors: int, documents: int, width: int, dtype: torch.dtype):
        self.tokens, self.anchors, self.documents = tokens, anchors, documents
        self.width, self.dtype = width, dtype

    @property
    def integers(self) -> int:
        return 4 * self.tokens + self.anchors + (self.documents + 2) + self.documents

    def header(self, kind: int, index: int, checksum: int) -> Tensor:
        values = [MAGIC, kind, index, self.tokens, self.anchors, self.documents, self.width]
        values += [DTYPES.index(self.dtype), self.integers, checksum, 0, 0]
        return torch.tensor(values, dtype=torch.int64)

    def check(self, header: Tensor, kind: int, index: int, source: int) -> int:
        """Compare a received header with what must come next; returns the checksum of the integers."""
        got, want = header.tolist(), self.header(kind, index, 0).tolist()
        names = "magic kind batch tokens anchors documents width dtype integers checksum spare spare".split()
        for name, a, b in zip(names, got, want, strict=True):
            if a != b and name != "checksum":
                raise StreamError(
                    f"message from rank {source}: {name} is {a}, expected {b}: ranks differ in code or "
                    "flags: start all of them with the same"
                )
        return got[names.index("checksum")]


def pack_integers(batch: Batch) -> Tensor:
    """Everything of a batch but its features as one int32 row."""
    parts = (batch.tokens_T, batch.positions_T, batch.doc_T, batch.mask_T, batch.anchors_A)
    return torch.cat([p.to(torch.int32) for p in (*parts, batch.cu_seqlens, batch.source_D)])


def unpack_integers(row: Tensor, shapes: Shapes, index: int) -> Batch:
    t, d = shapes.tokens, shapes.documents
    tokens, positions, doc, mask, anchors, bounds, source = row.split([t, t, t, t, shapes.anchors, d + 2, d])
    return Batch(index, tokens.long(), positions.long(), doc, mask.bool(), anchors.long(), bounds, source)


class Waits:
    """Time this rank's device (its CPU, without one) spent waiting for the other side."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.events = device, 0.0, []

    def begin(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begun) -> None:
        if self.device.type != "cuda":
            self.seconds += time.perf_counter() - begun
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((begun, event))

    def cut(self) -> list:
        """The waits since the last cut, to be read by `total` once the device has passed them."""
        taken, self.events, self.seconds = (self.seconds, self.events), [], 0.0
        return taken

    @staticmethod
    def total(cut) -> float:
        seconds, events = cut
        return seconds + sum(a.elapsed_time(b) for a, b in events) / 1000


class Buffers:
    """`depth` feature buffers [T, K*H] of one rank, handed out in turn."""

    def __init__(self, shapes: Shapes, depth: int, device: torch.device):
        shape = (shapes.tokens, shapes.width)
        self.all = [torch.zeros(shape, dtype=shapes.dtype, device=device) for _ in range(depth)]
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.free = [None] * depth  # CUDA: the event after which a buffer may be overwritten


class Sender:
    """A target rank's end. `buffer()` then `send(...)`, batch after batch."""

    def __init__(self, world: World, shapes: Shapes, depth: int):
        self.world, self.shapes, self.waits = world, shapes, Waits(world.device)
        self.buffers, self.turn = Buffers(shapes, depth, world.device), 0
        # Of each buffer's last message: works, and what they must keep alive.
        self.sends: list[tuple] = [()] * depth

    def buffer(self) -> Tensor:
        """The next buffer to write features into; waits until its last message has left."""
        begun = self.waits.begin()
        works, _ = self.sends[self.turn] or ((), ())
        for work in works:
            work.wait()
        self.waits.end(begun)
        return self.buffers.all[self.turn]

    def send(self, kind: int, batch: Batch) -> None:
        """Post the message of a batch whose features stand (or will, on this stream) in the last
        `buffer()`.
        """
        to, features = self.world.drafter_of(batch.index), self.buffers.all[self.turn]
        integers = pack_integers(batch)
        header = self.shapes.header(kind, batch.index, zlib.crc32(integers.numpy()))
        works = [dist.isend(part, to, group=self.world.headers) for part in (header, integers)]
        if self.buffers.side is None:
            works.append(dist.isend(features, to))
        else:
            self.buffers.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.buffers.side):
                works.append(dist.isend(features, to))
        self.sends[self.turn] = (works, (header, integers))
        self.turn = (self.turn + 1) % len(self.sends)

    def close(self) -> None:
        """Wait for everything sent."""
        for _ in self.sends:
            self.buffer()
            self.turn = (self.turn + 1) % len(self.sends)


class Unsent:
    """In place of a Sender on a rank that does not lead its target: the leader sends the same features."""

    def __init__(self, world: World, shapes: Shapes):
        self.waits = Waits(world.device)
        self.scratch = Buffers(shapes, 1, world.device).all[0]

    def buffer(self) -> Tensor:
        return self.scratch

    def send(self, kind: int, batch: Batch) -> None:
        pass

    def close(self) -> None:
        pass


class Receiver:
    """A drafter rank's end: `expect` what comes, `take()` it in that order, `release()` it once used."""

    def __init__(self, world: World, shapes: Shapes, depth: int):
        self.world, self.shapes, self.waits = world, shapes, Waits(world.device)
        self.buffers = Buffers(shapes, depth, world.device)
        self.idle = deque(range(depth))
        self.expected: deque[tuple[int, int]] = deque()
        self.posted: deque[tuple[Batch, dist.Work, int]] = deque()
        self.taken: deque[int] = deque()

    def expect(self, kind: int, index: int) -> None:
        """Announce a batch; it must surely come. Receives are posted as buffers allow."""
        self.expected.append((kind, index))

    def post(self) -> None:
        """Post the receives of expected batches while there are free buffers; waits for each one's header."""
        while self.expected and self.idle:
            kind, index = self.expected.popleft()
            at, source = self.idle.popleft(), self.world.target_of(index)
            header = torch.zeros(HEADER, dtype=torch.int64)
            dist.recv(header, source, group=self.world.headers)
            checksum = self.shapes.check(header, kind, index, source)
            integers = torch.zeros(self.shapes.integers, dtype=torch.int32)
            dist.recv(integers, source, group=self.world.headers)
            if zlib.crc32(integers.numpy()) != checksum:
                raise StreamError(
                    f"message from rank {source}: the integers of batch {index} are damaged: resume the run"
                )
            features = self.buffers.all[at]
            if self.buffers.side is None:
                work = dist.irecv(features, source)
            else:  # on a stream of its own: after the buffer's last reader, beside everything else
                if self.buffers.free[at] is not None:
                    self.buffers.side.wait_event(self.buffers.free[at])
                with torch.cuda.stream(self.buffers.side):
                    work = dist.irecv(features, source)
            self.posted.append((unpack_integers(integers, self.shapes, index), work, at))

    def take(self) -> tuple[Batch, Tensor]:
        """The next batch and its features [T, K*H]; the device (the CPU, without one) waits for them."""
        begun = self.waits.begin()
        self.post()
        batch, work, at = self.posted.popleft()
        work.wait()
        self.waits.end(begun)
        self.taken.append(at)
        return batch, self.buffers.all[at]

    def release(self) -> None:
        """The oldest taken batch has been used by all the work issued so far: its buffer may be refilled."""
        at = self.taken.popleft()
        if self.buffers.side is not None:
            self.buffers.free[at] = torch.cuda.current_stream().record_event()
        self.idle.append(at)


def connect(world: World) -> None:
    """Make every communicator of the run, in one fixed order, before anything else runs on the device: of the
    drafters, of the ranks of each target, of each target-drafter pair of this node.

    A communicator is made, and takes its memory, at its first message: that must neither fall into the
    overlap of a step nor find the card full.
    """
    token = torch.zeros(1, device=world.device)
    for group in (world.draft_group if world.drafts else None, world.target_group):
        if group is not None:
            dist.all_reduce(token, group=group)
    first = world.node * world.per_node
    for target in world.leaders(world.node) if not world.colocate else ():
        for drafter in range(first, first + world.drafters_per_node):
            if world.rank == target:
                dist.send(token, drafter)
            elif world.rank == drafter:
                dist.recv(token, target)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
