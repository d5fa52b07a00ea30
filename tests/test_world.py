"""Who drafts, which batch goes where, how ranks agree, and how they end."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from world import Control, UserError, World


def place(monkeypatch, rank: int, size: int, nodes: int, layout: str, drafters: int) -> World:
    """The world as this rank sees it before it joins."""
    per_node = size // nodes
    env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))
    return World(layout, drafters)


WORLDS = [
    (1, 1, "colocate", 1),
    (3, 1, "colocate", 3),
    (2, 1, "split", 1),
    (5, 1, "split", 3),
    (8, 1, "split", 3),
    (4, 2, "split", 2),
    (12, 3, "split", 6),
]


@pytest.mark.parametrize(("size", "nodes", "layout", "drafters"), WORLDS)
def test_every_rank_agrees_where_a_batch_goes(monkeypatch, size, nodes, layout, drafters):
    worlds = [place(monkeypatch, rank, size, nodes, layout, drafters) for rank in range(size)]
    first = worlds[0]
    assert [w.rank for w in worlds if w.drafts] == first.drafter_ranks() and first.drafts
    assert len(first.drafter_ranks()) == drafters == first.drafters
    for batch in range(4 * size * nodes):
        (maker,) = {w.target_of(batch) for w in worlds}
        (user,) = {w.drafter_of(batch) for w in worlds}
        assert worlds[maker].runs_target and worlds[user].drafts
        assert worlds[maker].node == worlds[user].node == batch % nodes  # features stay on their node
        assert (maker == user) == (layout == "colocate")


@pytest.mark.parametrize(("size", "nodes", "layout", "drafters"), WORLDS)
def test_batches_are_shared_out_evenly(monkeypatch, size, nodes, layout, drafters):
    world = place(monkeypatch, 0, size, nodes, layout, drafters)
    for start in (0, drafters, 5 * drafters):  # every step of one batch a drafter
        assert sorted(world.drafter_of(b) for b in range(start, start + drafters)) == world.drafter_ranks()
    made = [world.target_of(b) for b in range(world.targets * 6)]
    assert {made.count(rank) for rank in made} == {6} and len(set(made)) == world.targets


def test_names_tell_the_role(monkeypatch):
    world = place(monkeypatch, 4, 5, 1, "split", 3)
    assert [world.name(r) for r in (0, 3)] == ["rank 0 (drafter)", "rank 3 (target)"]
    assert world.name() == "rank 4 (target)" and world.role == "target"
    assert place(monkeypatch, 1, 2, 1, "colocate", 2).name() == "rank 1 (drafter+target)"


# ---------------------------------------------------------------------------------------------------------
# With real processes: each function runs on every rank of a small gloo world


def joined(layout: str, drafters: int) -> World:
    world = World(layout, drafters)
    world.join("cpu", allow_cpu=True)
    return world


def together(rank: int) -> None:
    """A failure on one rank is every rank's failure, with its message."""
    world = joined("split", 2)
    assert world.together(lambda: 10 * rank, "numbers") == 10 * rank
    assert world.gather(rank) == [0, 1, 2]

    def fail():
        if rank == 1:
            raise ValueError("disk is full")
        return rank

    with pytest.raises(UserError, match=r"^saving: disk is full$"):
        world.together(fail, "saving")

    def fail_without_a_word():
        if rank == 1:
            raise BrokenPipeError

    with pytest.raises(UserError, match=r"^saving: BrokenPipeError$"):
        world.together(fail_without_a_word, "saving")
    assert world.gather("still here") == ["still here"] * 3
    world.leave()


def control(rank: int) -> None:
    """Every rank reads the same values of the same step, later than they were posted; posting never waits."""
    world = joined("split", 1)
    lag, seen = 3, {}
    exchange = Control(world, lag, ("loss", "stop"))
    for step in range(1, 9):
        if rank == 0 and step == 4:
            world.store.wait(["rank 2 is done"])  # posting and running ahead does not wait for rank 0
        if step > lag and rank == 0:
            seen[step - lag] = exchange.read(step - lag)
        exchange.post(step, {"loss": step + rank / 10, "stop": rank == 1 and step == 5, "other": 7})
        if rank == 2 and step == 6:
            world.store.set("rank 2 is done", "yes")
    seen = {step: exchange.read(step) or seen[step] for step in range(1, 9)}
    for step, values in seen.items():
        assert values["loss"] == pytest.approx([step, step + 0.1, step + 0.2], abs=0)
        assert values["stop"] == [0, float(step == 5), 0]
    assert exchange.read(9) is None
    assert all(world.gather(seen)[0] == other for other in world.gather(seen))
    exchange.forget(5)
    assert exchange.read(4) is None and exchange.read(5) == seen[5]
    world.leave()


def control_times_out(rank: int) -> None:
    """Who waits too long for a step of another rank says for what, and what to do."""
    world = joined("split", 2)
    world.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1))
    exchange = Control(world, 1, ("loss",))
    if rank:
        exchange.post(1, {"loss": 1.0})
        with pytest.raises(
            UserError, match=rf"^rank {rank} .* waited 120 s for another rank to end step 1: "
        ):
            exchange.read(1)
    world.gather("done")
    os._exit(0)  # an exchange that nobody ended would hold up an orderly end


@pytest.mark.parametrize("work", [together, control, control_times_out], ids=lambda f: f.__name__)
def test_on_three_ranks(launcher, work):
    launcher.call(3, f"test_world.{work.__name__}", limit_s=60).good()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_more_ranks_than_gpus_run_on_cpu_or_say_so(monkeypatch):
    """What each rank reports is faked here: one GPU that two ranks share."""

    class Store(dict):
        def set(self, key, value):
            self[key] = value.encode()

        def get(self, key):
            return dict.get(self, key, b"host/0/GPU-a")

    world = place(monkeypatch, 1, 2, 1, "split", 1)
    world.store = Store()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = type("Properties", (), {"uuid": "GPU-a"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    assert world.choose_device("", allow_cpu=True).type == "cpu"
    for asked, allow in (("cuda", True), ("", False)):
        with pytest.raises(UserError, match="2 ranks but 1 GPU"):
            world.choose_device(asked, allow)
    properties.uuid = "GPU-b"
    assert world.choose_device("", allow_cpu=True) == torch.device("cuda", 0)
    world.store["gpu/0"] = b""
    with pytest.raises(UserError, match="2 ranks but 1 GPU"):
        world.choose_device("", False)
