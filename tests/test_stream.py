"""What a drafter receives is what a target sent, in any world, and a message that is not the expected one
is refused before what it describes is received.
"""

import os
import random
import zlib

import pytest
import torch
import torch.distributed as dist

import data
import stream
from world import World

SHAPES = stream.Shapes(tokens=96, anchors=8, documents=5, width=24, dtype=torch.float32)


def random_batch(index: int, shapes: stream.Shapes = SHAPES) -> data.Batch:
    """A batch that both sides can make from its number, with no document at all in every seventh."""
    g = torch.Generator().manual_seed(index)
    if index % 7 == 6:
        return data.empty_batch(index, shapes.tokens, shapes.documents, shapes.anchors)

    def numbers(low: int, high: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=g).to(dtype)

    return data.Batch(
        index,
        numbers(0, 2**31 - 1, shapes.tokens, torch.int64),
        numbers(0, shapes.tokens, shapes.tokens, torch.int64),
        numbers(-1, shapes.documents, shapes.tokens, torch.int32),
        numbers(0, 2, shapes.tokens, torch.bool),
        numbers(-1, shapes.tokens, shapes.anchors, torch.int64),
        numbers(0, shapes.tokens, shapes.documents + 2, torch.int32),
        numbers(-1, 9, shapes.documents, torch.int32),
    )


def random_features(index: int, kind: int, shapes: stream.Shapes = SHAPES) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * kind + index)
    return torch.randn(shapes.tokens, shapes.width, generator=g).to(shapes.dtype)


def same(a: data.Batch, b: data.Batch) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_survive_one_row(dtype):
    shapes = stream.Shapes(tokens=33, anchors=7, documents=4, width=3, dtype=dtype)
    for index in range(14):
        batch = random_batch(index, shapes)
        row = stream.pack_integers(batch)
        assert row.dtype == torch.int32 and row.shape == (shapes.integers,)
        assert same(stream.unpack_integers(row, shapes, index), batch)


FIELDS = {
    "magic": 0,
    "kind": 1,
    "batch": 2,
    "tokens": 3,
    "anchors": 4,
    "documents": 5,
    "width": 6,
    "dtype": 7,
    "integers": 8,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_header_that_disagrees_names_the_field(name):
    header = SHAPES.header(stream.TRAIN, 12, 99)
    assert header.shape == (stream.HEADER,) and SHAPES.check(header, stream.TRAIN, 12, 3) == 99
    for change in (1, -1, 2**40):
        wrong = header.clone()
        wrong[FIELDS[name]] += change
        with pytest.raises(stream.StreamError, match=f"rank 3: {name} is"):
            SHAPES.check(wrong, stream.TRAIN, 12, 3)


# ---------------------------------------------------------------------------------------------------------
# Between real processes: each function runs on every rank of a small gloo world


def joined(drafters: int) -> World:
    world = World("split", drafters)
    world.join("cpu", allow_cpu=True)
    stream.connect(world)
    return world


def traffic(world: World, depth: int, shapes: stream.Shapes, seed: int) -> None:
    """Phases of training and evaluation batches, each side at its own random pace."""
    pace = random.Random(seed + world.rank)
    phases = [(stream.EVAL, 5), (stream.TRAIN, 23), (stream.EVAL, 5), (stream.TRAIN, 12)]
    if world.drafts:
        receiver = stream.Receiver(world, shapes, depth)
        mine = [(k, i) for k, count in phases for i in range(count) if world.drafter_of(i) == world.rank]
        for number, (kind, index) in enumerate(mine):
            for ahead in mine[number : number + 3] if number == 0 else mine[number + 2 : number + 3]:
                receiver.expect(*ahead)
            batch, features = receiver.take()
            if pace.random() < 0.3:
                torch.randn(200, 200) @ torch.randn(200, 200)
            assert same(batch, random_batch(index, shapes)), f"batch {index} at depth {depth}"
            assert torch.equal(features, random_features(index, kind, shapes)), f"features {index}"
            receiver.release()
        assert not receiver.expected and not receiver.posted
    else:
        sender = stream.Sender(world, shapes, depth)
        for kind, count in phases:
            for index in range(count):
                if world.target_of(index) == world.rank:
                    sender.buffer().copy_(random_features(index, kind, shapes))
                    sender.send(kind, random_batch(index, shapes))
                    if pace.random() < 0.3:
                        torch.randn(200, 200) @ torch.randn(200, 200)
        sender.close()


def received_equals_sent(drafters: int) -> None:
    world = joined(drafters)
    for depth in (1, 2, 3):
        for dtype in (torch.float32, torch.bfloat16):
            traffic(world, depth, stream.Shapes(96, 8, 5, 24, dtype), seed=10 * depth)
    world.leave()


def one_to_one(rank):
    received_equals_sent(1)


def one_to_two(rank):
    received_equals_sent(2)


def two_to_one(rank):
    received_equals_sent(1)


def two_to_three(rank):
    received_equals_sent(3)


@pytest.mark.parametrize(
    ("ranks", "work"), [(2, one_to_one), (3, one_to_two), (3, two_to_one), (5, two_to_three)]
)
def test_received_equals_sent(launcher, ranks, work):
    launcher.call(ranks, f"test_stream.{work.__name__}", limit_s=60).good()


def full_buffers(rank: int) -> None:
    """Back-pressure: a target that is far ahead waits for a buffer; its waiting is measured, and only its."""
    world = joined(1)
    if world.drafts:
        receiver = stream.Receiver(world, SHAPES, 2)
        for index in range(6):
            receiver.expect(stream.TRAIN, index)
        world.store.wait(["the target waits"])
        for index in range(6):
            batch, features = receiver.take()
            assert batch.index == index and torch.equal(features, random_features(index, 0))
            receiver.release()
        assert len(receiver.idle) == 2
    else:
        sender = stream.Sender(world, SHAPES, 2)
        for index in range(6):
            if index == 2:
                world.store.set("the target waits", "yes")
            features = sender.buffer()
            assert features.data_ptr() in [b.data_ptr() for b in sender.buffers.all]
            features.copy_(random_features(index, 0))
            sender.send(stream.TRAIN, random_batch(index))
        sender.close()
        assert stream.Waits.total(sender.waits.cut()) > 0 and stream.Waits.total(sender.waits.cut()) == 0
    world.leave()


WRONG = {  # what rank 1 sends in place of training batch 0 of SHAPES, and what the receiver says of it
    "tokens is 128, expected 96": (stream.TRAIN, 0, stream.Shapes(128, 8, 5, 24, torch.float32)),
    "anchors is 9": (stream.TRAIN, 0, stream.Shapes(96, 9, 5, 24, torch.float32)),
    "documents is 6": (stream.TRAIN, 0, stream.Shapes(96, 8, 6, 24, torch.float32)),
    "width is 12": (stream.TRAIN, 0, stream.Shapes(96, 8, 5, 12, torch.float32)),
    "dtype is 1": (stream.TRAIN, 0, stream.Shapes(96, 8, 5, 24, torch.bfloat16)),
    "batch is 1, expected 0": (stream.TRAIN, 1, SHAPES),
    "kind is 1": (stream.EVAL, 0, SHAPES),
    "magic is": (stream.TRAIN, 0, SHAPES),
    "damaged": (stream.TRAIN, 0, SHAPES),
}


def disagreement(rank: int) -> None:
    """Case 17: the error names what differs, before anything described by the header is received."""
    said = list(WRONG)[int(os.environ["WRONG"])]
    kind, index, shapes = WRONG[said]
    world = joined(1)
    if world.drafts:
        receiver = stream.Receiver(world, SHAPES, 1)
        receiver.expect(stream.TRAIN, 0)
        with pytest.raises(stream.StreamError, match=f"rank 1: .*{said}"):
            receiver.take()
        assert not receiver.posted and not any(b.any() for b in receiver.buffers.all)
        world.store.set("seen", "yes")
        return
    if said == "magic is":
        stream.MAGIC += 1
    sender = stream.Sender(world, shapes, 1)
    sender.buffer().copy_(random_features(index, kind, shapes))
    if said == "damaged":
        send_damaged(world, sender.buffers.all[0])
    else:
        sender.send(kind, random_batch(index, shapes))
    world.store.wait(["seen"])


def send_damaged(world: World, features: torch.Tensor) -> None:
    """The message of batch 0 with one bit of one integer turned over after the checksum was taken."""
    integers = stream.pack_integers(random_batch(0))
    header = SHAPES.header(stream.TRAIN, 0, zlib.crc32(integers.numpy()))
    integers[17] ^= 1
    for part in (header, integers):
        dist.send(part, 0, group=world.headers)
    dist.isend(features, 0)


def test_full_buffers_hold_the_target_back(launcher):
    launcher.call(2, "test_stream.full_buffers", limit_s=60).good()


@pytest.mark.parametrize("number", range(len(WRONG)), ids=list(WRONG))
def test_a_disagreement_is_found_before_the_payload(launcher, number):
    launcher.call(2, "test_stream.disagreement", limit_s=30, WRONG=str(number)).good()


def test_a_job_whose_sides_disagree_ends_with_the_field(launcher, small, tmp_path):
    """A whole job: the target was started from other code or flags."""
    plant = "if RANK == 1: train.stream.DTYPES.reverse()"
    ended = launcher.run(2, tmp_path / "run", *small, "--steps", 2, plant=plant)
    assert ended.codes == [1, 1] and ended.seconds < 30
    assert "train.py: StreamError: message from rank 1: dtype is 2, expected 0" in ended.text
