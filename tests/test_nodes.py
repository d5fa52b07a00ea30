"""Several nodes: two torchrun agents, each with its ranks, its home and its compile cache, train as one.

Each node stands in a network namespace of its own where that is allowed, with a link between them; elsewhere
both share this machine's network.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import marked
from launch import ROOT, environment

LINK = """
mount -t tmpfs none /run && ip netns add node0 && ip netns add node1 &&
ip link add link0 netns node0 type veth peer name link0 netns node1 && for i in 0 1; do
    ip -n node$i addr add 10.77.0.$((i + 1))/24 dev link0
    ip -n node$i link set lo up && ip -n node$i link set link0 up
done && echo ready && exec sleep 600
"""


class Nodes:
    """Where two nodes can be started, node 0 keeping the rendezvous."""

    def __init__(self, home: Path):
        self.home, self.started = home, {}
        self.holder = subprocess.Popen(
            ["unshare", "-rmn", "sh", "-c", LINK],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.apart = self.holder.stdout.readline() == "ready\n"
        self.hosts = ["10.77.0.1", "10.77.0.2"] if self.apart else ["127.0.0.1"] * 2
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(
        self, node: int, ranks: int, flags: list, fewest: int = 2, restarts: int = 0, **env: str
    ) -> None:
        home = self.home / f"node{node}"
        home.mkdir()
        inside = f"nsenter -t {self.holder.pid} --user --mount --net --preserve-credentials ip netns exec"
        command = [*inside.split(), f"node{node}"] if self.apart else []
        command += [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={fewest}:2",
            f"--nproc_per_node={ranks}",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts[0]}:{self.port}", "--rdzv-id=two"]
        patience = "last_call_timeout=2,keep_alive_interval=1"  # of a rendezvous for whoever is missing
        command += [f"--rdzv-conf=is_host={node == 0},{patience}", f"--max-restarts={restarts}"]
        command += [f"--local-addr={self.hosts[node]}", str(ROOT / "train.py"), *map(str, flags)]
        env |= {"FAULTS_JOB": str(home), "GLOO_SOCKET_IFNAME": "link0" if self.apart else "lo"}
        self.started[node] = subprocess.Popen(
            command, env=environment(home, **env), cwd=ROOT, text=True, start_new_session=True,
            stdout=open(home / "out.txt", "w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def said(self, node: int) -> str:
        return (self.home / f"node{node}" / "out.txt").read_text()

    def alive(self, node: int) -> list[int]:
        return marked(self.home / f"node{node}")

    def kill(self, node: int) -> None:
        """All its processes at once, as when the power goes."""
        for pid in self.alive(node):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for node in self.started:
            self.kill(node)
            self.started[node].wait(30)
        self.holder.kill()
        self.holder.wait(30)


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    made.close()


def wait_for(nodes: Nodes, word: str) -> None:
    deadline = time.monotonic() + 90
    while word not in nodes.said(0):
        assert time.monotonic() < deadline, nodes.said(0) + nodes.said(1)
        time.sleep(0.05)


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_losses(a: Path, b: Path, tolerance: float) -> bool:
    ours, theirs = records(a), records(b)
    assert [m["step"] for m in ours] == [m["step"] for m in theirs]
    return all(
        abs(x[key] - y[key]) <= tolerance * abs(y[key])
        for x, y in zip(ours, theirs, strict=True)
        for key in ("loss", "grad_norm", "eval_loss")
        if key in y
    )


ON_TWO_NODES = """
import os, sys
import torch._dynamo
import compile_utils
torch._dynamo.config.disable = False
os.environ |= {{'LOCAL_WORLD_SIZE': '2', 'LOCAL_RANK': str(RANK % 2), 'TORCH_COMPILE_DISABLE': ''}}
sys.argv += ['--compile-cache', {cache!r} + str(RANK // 2)]
little = compile_utils.compile(lambda x: (x.sin() + 1).cos(), name='little')
compile_utils.compile = lambda fn, **_: fn
real = train.warm_up
def warm_up(job):
    work = real(job)
    return lambda: (work(), little(train.torch.ones(64, 64)))
train.warm_up = warm_up
"""


def test_two_nodes_train_as_one_and_each_leader_compiles_once(launcher, small, tmp_path):
    """Every rank does both; the caches start empty and have nothing in common.

    The tests below have agents; these ranks are forked, with the environment that agents would give them,
    and compile one little function in place of the layers, which would take a minute and tell no more.
    """
    flags = [
        *small,
        *"--layout colocate --batches-per-step 4 --steps 2 --eval-every 2 --save-every 4".split(),
    ]
    plant = ON_TWO_NODES.format(cache=str(tmp_path / "cache"))
    two = launcher.run(4, tmp_path / "two", *flags, plant=plant, limit_s=240).good()
    launcher.run(4, tmp_path / "one", *flags).good()
    assert same_losses(tmp_path / "two", tmp_path / "one", 1e-4)
    said = two.out[0]
    assert "on 2 node(s)" in said and said.count("finished: ") == 1 and "finished: " not in two.out[2]
    gate = {int(r): line for r, line in re.findall(r"gate: rank (\d) \(\S+\) (\d.*)", said)}
    assert sorted(gate) == [0, 1, 2, 3], said
    for rank, line in gate.items():
        hits, misses = (int(re.search(rf"(\d+) {word}", line)[1]) for word in ("hits", "misses"))
        if "eager" not in line:  # no C++ compiler here
            assert (misses > 0) == ("leader" in line) == (rank in (0, 2)) and (hits > 0) == (rank in (1, 3))


OTHER_DATA = """
import os, sys
os.environ |= {'LOCAL_WORLD_SIZE': '1', 'LOCAL_RANK': '0'}
if RANK == 1:
    sys.argv[sys.argv.index('--eval-data') + 1] = sys.argv[sys.argv.index('--data') + 1]
"""


def test_nodes_with_different_data_do_not_begin(launcher, small, tmp_path):
    ended = launcher.run(2, tmp_path / "run", *small, "--layout", "colocate", "--steps", 1, plant=OTHER_DATA)
    assert ended.codes == [2, 2] and "Traceback" not in ended.text
    assert ended.text.count("train.py: --data: the nodes hold different data or tokenizers") == 1


def test_the_death_of_a_node_ends_the_other(nodes, launcher, small, tmp_path, dead=0):
    """Of the one that keeps the rendezvous and writes; the test below has the other one."""
    flags = "--drafters 2 --batches-per-step 2 --save-every 3 --eval-every 5000".split()
    for node in (0, 1):
        nodes.start(node, 2, [*small, *flags, "--steps", 5000, "--out", tmp_path / "run"])
    wait_for(nodes, "step-000003")
    nodes.kill(dead)
    begun, other = time.monotonic(), 1 - dead
    while nodes.alive(other):
        assert time.monotonic() - begun < 60, nodes.said(other)
        time.sleep(0.1)
    assert nodes.started[other].wait(5) != 0
    said = nodes.said(other)
    assert said.count("train.py: ") == 1 and "lost the connection" in said, said
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed", status  # also where the node that wrote is gone
    newest = max(int(p.name[5:]) for p in (tmp_path / "run").glob("step-*"))
    launcher.run(2, None, "--resume", tmp_path / "run", "--drafters", 1, "--steps", newest + 1).good()
    assert records(tmp_path / "run")[-1]["step"] == newest + 1  # goes on, on one node


def test_a_job_that_lost_a_node_goes_on_with_the_others(nodes, launcher, small, tmp_path):
    """torchrun --nnodes=1:2 --max-restarts: restarted in a smaller world, it resumes by itself."""
    flags = [*small, *"--drafters 2 --batches-per-step 2 --save-every 3 --eval-every 5000".split()]
    for node in (0, 1):
        nodes.start(node, 2, [*flags, "--steps", 50, "--out", tmp_path / "run"], fewest=1, restarts=1)
    wait_for(nodes, "step-000003")
    nodes.kill(1)
    assert nodes.started[0].wait(100) == 0, nodes.said(0)
    said = nodes.said(0)
    assert (
        "2 drafter(s) + 2 target(s) on 2 node(s)" in said
        and "1 drafter(s) + 1 target(s) on 1 node(s)" in said
    )
    assert said.count("resumed from ") == 1 and said.count("Traceback") <= 1
    assert said.count("train.py: ") == 1 and "lost the connection" in said, said
    found = records(tmp_path / "run")
    assert [m["step"] for m in found] == list(range(51))
    launcher.run(4, tmp_path / "whole", *flags, "--steps", 50).good()
    first = int(re.search(r"resumed from \S+step-(\d+)", said)[1])
    whole = records(tmp_path / "whole")[: first + 20]
    assert max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(found[1:], whole[1:], strict=False)) < 1e-3
