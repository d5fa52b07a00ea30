"""The gate, the cache folder, the guard and the bundles, with real gloo processes and real compiles.

One cold compile serves all tests that need one (`starts`).
"""

import contextlib
import datetime
import json
import os
import platform
import re
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import compile_utils
from compile_utils import BundleError, CacheError, Counters, GateError, GateReport, RankReport

REPOSITORY = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(not compile_utils.cpp_compiler(), reason="no C++ compiler here")

# What every child runs: one tiny layer, forward and backward, on the shapes of the run.
CHILD = """
import datetime, json, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
import compile_utils
from compile_utils import GateError, RecompileError

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(8))
    def forward(self, x):
        return x @ self.w  # no generated kernel: g++ would take most of the time

def join(pg_timeout=30):
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), WORLD, RANK == 0)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD,
                            timeout=datetime.timedelta(seconds=pg_timeout))
    return store

def say(**facts):
    print("SAY " + json.dumps(facts), flush=True)

def train(layer, compiled, rows=4):
    compiled(layer, torch.ones(rows, 8)).sum().backward()
"""


def start(code: str, **env: object) -> subprocess.Popen:
    text = CHILD + textwrap.dedent(code)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
    } | {k: str(v) for k, v in env.items()}
    return subprocess.Popen(
        [sys.executable, "-c", text], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run_world(
    code: str, world: int, timeout: float = 100.0, **env: object
) -> list[tuple[int, list[dict], str, str]]:
    """[(exit code, what it said, stdout, stderr)] of `world` processes running `code`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [start(code, RANK=r, WORLD_SIZE=world, PORT=port, **env) for r in range(world)]
    results = []
    try:
        end = time.monotonic() + timeout
        for child in children:
            out, err = child.communicate(timeout=max(1.0, end - time.monotonic()))
            said = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("SAY ")]
            results.append((child.returncode, said, out, err))
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return results


def fork_world(body, world: int, folder: Path, timeout: float = 60.0) -> list[tuple[int, list[dict], str]]:
    """[(exit code, what it said, output)] of `world` forked processes running body(rank, store).

    For what compiles nothing: importing torch in each would take most of the time.
    """
    pids = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _child(body, rank, world, port, folder / f"out-{rank}")
        pids.append(pid)
    return [
        _collect(pid, folder / f"out-{rank}", time.monotonic() + timeout) for rank, pid in enumerate(pids)
    ]


def _child(body, rank: int, world: int, port: int, out: Path) -> None:
    code = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
        group_timeout = datetime.timedelta(seconds=2)  # shorter than the gate's work
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=group_timeout)
        body(rank, store)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _collect(pid: int, out: Path, end: float) -> tuple[int, list[dict], str]:
    status = 0
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    text = out.read_text()
    said = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("SAY ")]
    return os.waitstatus_to_exitcode(status), said, text


def say(**facts) -> None:
    print("SAY " + json.dumps(facts), flush=True)


# ---------------------------------------------------------------------------------------------------------
# Fingerprint and source


def test_every_part_of_the_fingerprint_changes_the_folder():
    of = compile_utils.fingerprint()
    names = {compile_utils.build_name(of)}
    for part in of:
        names.add(compile_utils.build_name({**of, part: "something else"}))
    assert len(names) == len(of) + 1
    assert compile_utils.fingerprint_difference(of) == ""
    assert "torch 2.0 there" in compile_utils.fingerprint_difference({**of, "torch": "2.0"})


def test_source_hash_follows_the_text(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("a = 1\n")
    before = compile_utils.source_hash(file)
    file.write_text("a = 2\n")
    assert compile_utils.source_hash(file) != before
    assert compile_utils.source_hash(Counters) == compile_utils.source_hash(Counters)
    ab, abc = tmp_path / "ab", tmp_path / "abc"  # where one text ends and the next begins matters
    for name, text in (("a", "xy"), ("b", "z")):
        (tmp_path / name).write_text(text)
    ab.write_text("x"), abc.write_text("yz")
    assert compile_utils.source_hash(tmp_path / "a", tmp_path / "b") != compile_utils.source_hash(ab, abc)


# ---------------------------------------------------------------------------------------------------------
# The folder


@pytest.fixture
def own_cache(monkeypatch):
    """use_cache changes the process: put the environment and the module's state back."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(compile_utils, "_cache", None)


def test_folder_is_owner_only_and_named_by_the_build(tmp_path, own_cache):
    old = os.umask(0)  # the worst umask
    try:
        info = compile_utils.use_cache(str(tmp_path / "cache"))
    finally:
        os.umask(old)
    for folder in (info.root, info.folder, info.folder / "inductor", info.folder / "triton"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert stat.S_IMODE(info.manifest.stat().st_mode) == 0o600
    assert info.folder.name == compile_utils.build_name()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(info.folder / "inductor")
    assert json.loads(info.manifest.read_text())["fingerprint"] == compile_utils.fingerprint()
    assert not [p for p in info.folder.iterdir() if p.name.startswith(".probe")]


def test_the_leader_waits_for_the_workers_when_its_shapes_are_cold(tmp_path, own_cache, monkeypatch):
    waits, order = [], []
    monkeypatch.setattr(compile_utils, "start_workers", lambda s=0.0: (waits.append(s), order.append("wait")))
    compile_utils.use_cache(str(tmp_path / "cache"))
    assert waits == [0.0]  # started, not waited for
    once = dict(role="drafter", leader=0, key="k", source="s", log=lambda text: None)
    compile_utils.gate(lambda: order.append("work"), **once)
    assert waits[1:] == [compile_utils.WORKERS_S] and order[1:] == ["wait", "work"]
    compile_utils.record_warm(compile_utils.use_cache(str(tmp_path / "cache")), "k", "s", seconds=1.0)
    compile_utils.gate(lambda: None, **once)
    assert waits[2:] == [0.0]  # of use_cache: the warm gate did not wait


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_that_others_can_write_is_refused(tmp_path, own_cache, mode):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(CacheError, match=r"can be written by others.*chmod go-w"):
        compile_utils.use_cache(str(root))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
@pytest.mark.parametrize("part", ["root", "build"])
def test_folder_of_somebody_else_is_refused(tmp_path, own_cache, part):
    root = tmp_path / "cache"
    build = root / compile_utils.build_name()
    build.mkdir(parents=True, mode=0o700)
    os.chown(root if part == "root" else build, 65534, 65534)
    with pytest.raises(CacheError, match="belongs to user 65534"):
        compile_utils.use_cache(str(root))


def test_folder_behind_a_file_is_refused_in_words(tmp_path, own_cache):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(CacheError, match=r"file.*Fix:"):
            compile_utils.use_cache(str(folder))


@pytest.mark.parametrize(
    "kind, warned", [("nfs4", True), ("lustre", True), ("ext4", False), ("tmpfs", False)]
)
def test_network_mounts_are_told_by_the_longest_mount_point(tmp_path, kind, warned):
    mounts = tmp_path / "mounts"
    home = Path(os.path.realpath(tmp_path)) / "a b"
    point = str(home).replace(" ", r"\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {point} {kind} rw 0 0\nnone {point}x nfs rw 0 0\n")
    assert compile_utils.mount_of(home / "cache", mounts) == (str(home), kind)
    assert (kind in compile_utils.NETWORK_FILE_SYSTEMS) == warned


def test_use_cache_outside_the_main_thread_is_refused(tmp_path):
    caught = []

    def attempt():
        with pytest.raises(RuntimeError, match="only the main thread may compile") as error:
            compile_utils.use_cache(str(tmp_path))
        caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert caught


def test_manifest_writers_never_lose_each_others_notes(tmp_path):
    """Eight processes note eight shapes each at once; all 64 are there and the file is whole all the time."""
    of = compile_utils.fingerprint()
    cache = compile_utils.CacheInfo(tmp_path, tmp_path, of, [])

    def note(i):
        for j in range(8):
            compile_utils.record_warm(cache, f"shape {i} {j}", "source", seconds=1.0)

    threads = [threading.Thread(target=note, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if cache.manifest.exists():
            json.loads(cache.manifest.read_text())
    assert len(compile_utils.read_manifest(cache.manifest)["warm"]) == 64
    assert cache.warm("shape 3 4", "source") and cache.warm("shape 3 4", "edited") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 99, "warm": {}}', '{"format": 1}'])
def test_broken_manifest_reads_as_empty(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert compile_utils.read_manifest(tmp_path / "manifest.json") == {}


# ---------------------------------------------------------------------------------------------------------
# What the reports say


def rank_report(rank, hits=0, misses=0, worked=True, leader=0, reason=""):
    return RankReport(
        rank, "drafter", leader, worked, 1.0, Counters(hits=hits, misses=misses), reason, "host"
    )


def test_never_warm_because_rank_0_is():
    warm, missed, idle = (
        rank_report(0, hits=6),
        rank_report(1, misses=6, reason="why"),
        rank_report(2, worked=False),
    )
    assert GateReport("k", 1.0, [warm, rank_report(1, hits=6), idle]).warm
    assert not GateReport("k", 1.0, [warm, missed, idle]).warm
    assert not GateReport("k", 1.0, [warm, rank_report(1, hits=5, misses=1)]).warm
    assert not GateReport("k", 1.0, [warm, rank_report(1)]).warm  # ran eager: nothing was read
    assert not GateReport("k", 1.0, [idle]).warm


def test_a_follower_that_misses_is_called_out_with_the_reason():
    report = GateReport(
        "k", 1.0, [rank_report(0, misses=6), rank_report(1, misses=6, reason="device 1, not 0")]
    )
    assert [r.rank for r in report.missed] == [1]
    lines = report.lines()
    assert lines[1].startswith("warning: gate: rank 1") and "device 1, not 0" in lines[1]
    assert not lines[0].startswith("warning") and "followers missed" in lines[-1]


# ---------------------------------------------------------------------------------------------------------
# The gate, without a compile


def gate_with(folder, deed, leader=0, timeout_s=60.0, world=3):
    """Ranks 0 and 1 draft, rank 2 is a target; the leader does `deed` after a second."""

    def body(rank, store):
        def work():
            if rank == leader:
                time.sleep(1)
                deed()

        begin = time.monotonic()
        drafts = rank < 2
        try:
            compile_utils.gate(
                work if drafts else None,
                role="drafter" if drafts else "target",
                leader=leader if drafts else 2,
                store=store,
                timeout_s=timeout_s,
                tick_s=0.3,
            )
            say(error="")
        except GateError as error:
            say(error=str(error), seconds=time.monotonic() - begin)
            raise SystemExit(3) from None

    return fork_world(body, world, folder)


def no_memory():
    raise MemoryError("no memory for 3 GiB")


@pytest.mark.parametrize("leader", [0, 1])  # rank 0 holds the store: its news must survive it
def test_leader_fails_and_all_end_at_once_with_its_error(tmp_path, leader):
    results = gate_with(tmp_path, no_memory, leader)
    assert [code for code, *_ in results] == [3, 3, 3], results
    for _, said, _ in results:
        assert (
            said[0]["error"]
            == f"rank {leader} (drafter) failed in the gate: MemoryError: no memory for 3 GiB"
        )
        assert said[0]["seconds"] < 20
    printed = [out.count("Traceback (most recent call last)") for _, _, out in results]
    assert printed[leader] == 1 and sum(printed) == 1


@pytest.mark.parametrize("leader", [0, 1])
def test_killed_leader_is_noticed_by_all(tmp_path, leader):
    results = gate_with(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL), leader)
    assert results[leader][0] == -signal.SIGKILL
    lost = r"lost rank 1 \(drafter\), last seen compiling .* process \d+ is gone"
    for rank in {0, 1, 2} - {leader}:
        code, said, _ = results[rank]
        assert code == 3 and said[0]["seconds"] < 20
        assert re.search(lost if leader else "rank that holds the store is gone", said[0]["error"])


def test_a_rank_of_another_container_with_this_host_name_is_not_lost(monkeypatch):
    """Its process id means nothing here; one of this pid namespace that is gone is lost at once."""
    meeting = compile_utils._Meeting(None, "gate", "drafter", 60.0, print)
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = compile_utils._pid_space()
    for space, lost in ((f"{here} of a container", False), (here, True)):
        entry = ["compiling", "drafter", platform.node(), gone.pid, space]
        monkeypatch.setattr(meeting, "states", lambda entry=entry: {1: entry})
        with pytest.raises(GateError, match="lost rank 1") if lost else contextlib.nullcontext():
            meeting.look_for_lost()


def test_time_out_names_the_rank_that_still_compiles(tmp_path):
    results = gate_with(tmp_path, lambda: time.sleep(3), timeout_s=2)
    for code, said, _ in results:
        assert code == 3
        named = r"still rank 0 \(drafter\) compiling after 2 s.*py-spy dump --pid \d+"
        assert re.search(named, said[0]["error"]), said


def test_compiling_longer_than_the_process_group_time_out_survives_with_progress(tmp_path):
    results = gate_with(tmp_path, lambda: time.sleep(2))
    assert [code for code, *_ in results] == [0, 0, 0], results
    assert re.search(r"gate: rank 0 \(drafter\) compiling, \d+ s", results[0][2])
    assert "compiling" not in results[1][2] + results[2][2]  # said once


def test_a_late_rank_is_named(tmp_path):
    def body(rank, store):
        if rank == 1:
            time.sleep(3)
        with pytest.raises(GateError, match="rank 1 not at the gate yet after 1 s"):
            compile_utils.gate(None, role="target", leader=0, store=store, timeout_s=1)

    results = fork_world(body, 2, tmp_path)
    assert [code for code, *_ in results] == [0, 0], results


# ---------------------------------------------------------------------------------------------------------
# The gate, the guard and the bundle, with one real cold compile


WORLD = """
store = join()
cache = compile_utils.use_cache(os.environ["FOLDER"])
compiled = compile_utils.compile(Layer.forward, name="layer")
layer = Layer()
for start in ("cold", "warm", "odd"):
    torch._dynamo.reset()  # as a new process: nothing compiled in memory
    if start == "odd" and RANK == 1:
        torch._inductor.config.max_fusion_size = 32
    report = compile_utils.gate(lambda: train(layer, compiled), role="drafter", leader=0, store=store,
                                key="tiny", source="s1", label="tiny layer")
    say(warm=report.warm, missed=[r.rank for r in report.missed], lines=report.lines(),
        hits=[r.counters.hits for r in report.ranks], misses=[r.counters.compiled for r in report.ranks],
        manifest=cache.warm("tiny", "s1"))
if RANK == 0:
    assert compile_utils.save_bundle(os.environ["BUNDLE"]).note == "saved"
"""


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """(folder, {start: what each of two ranks said}): cold, warm, and with one setting changed on rank 1."""
    folder = tmp_path_factory.mktemp("warm") / "cache"
    results = run_world(WORLD, 2, FOLDER=folder, BUNDLE=folder.with_name("bundle"))
    assert [code for code, *_ in results] == [0, 0], results
    return folder, dict(zip(("cold", "warm", "odd"), zip(*[r[1] for r in results], strict=True), strict=True))


@needs_compiler
def test_cold_start_leader_compiles_and_follower_hits(starts):
    said = starts[1]["cold"]
    for one in said:
        assert one["misses"] == [2, 0] and one["hits"] == [0, 2], one  # forward and backward
        assert one["missed"] == [] and not one["warm"]
    assert said[0]["manifest"]["graphs"] == 2 and said[0]["manifest"]["label"] == "tiny layer"
    assert said[0]["lines"][:-1] == said[1]["lines"][:-1]  # the same report on every rank


@needs_compiler
def test_second_start_is_warm_on_every_rank(starts):
    for one in starts[1]["warm"]:
        assert one["warm"] and one["hits"] == [2, 2] and one["misses"] == [0, 0]


@needs_compiler
def test_a_follower_whose_settings_differ_misses_and_is_called_out(starts):
    for one in starts[1]["odd"]:
        assert one["missed"] == [1] and not one["warm"] and one["misses"][0] == 0, one
        assert (
            one["lines"][1].startswith("warning: gate: rank 1")
            and "max_fusion_size] (64 -> 32)" in one["lines"][1]
        )


GUARD = """
compile_utils.use_cache(os.environ["FOLDER"])
compiled = compile_utils.compile(Layer.forward, name="layer")
other = compile_utils.compile(lambda x: x @ x, name="other")  # no generated kernel
layers = [Layer(), Layer()]
def step(rows=4):
    compiled(layers[1], compiled(layers[0], torch.ones(rows, 8))).sum().backward()
def caught(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
import threading
found = []
thread = threading.Thread(target=lambda: found.append(caught(step)))
thread.start(); thread.join()
say(early=found.pop(), frames=compile_utils.counters().frames)
compile_utils.gate(step, role="drafter", leader=0)
compile_utils.freeze()
step()
compile_utils.check_frozen()
say(rows=caught(lambda: step(5)), dtype=caught(lambda: compiled(layers[0], torch.ones(4, 8).double())),
    grad=caught(lambda: torch.no_grad()(step)()), first=caught(lambda: other(torch.ones(3, 3))))
thread = threading.Thread(target=lambda: found.append(caught(lambda: step(6))))
thread.start(); thread.join()
from torch.nn.attention.flex_attention import flex_attention
q = torch.ones(1, 1, 16, 16)
say(thread=found[0], flex=caught(lambda: flex_attention(q, q, q)), still=caught(compile_utils.check_frozen))
compile_utils.thaw()
eager = caught(lambda: other(torch.ones(3, 3)))
from torch._dynamo.utils import counters
compile_utils.freeze()
counters["inductor"]["fxgraph_cache_miss"] += 1  # as a backward compiled late does
say(thawed=eager, late=caught(compile_utils.check_frozen), raw=compiled.raw is Layer.forward)
"""


@needs_compiler
def test_after_the_gate_whatever_compiles_or_runs_flex_eagerly_is_an_error(starts):
    [(code, said, _, err)] = run_world(GUARD, 1, FOLDER=starts[0])
    assert code == 0, err
    found = said[0] | said[1] | said[2] | said[3]
    assert "only the main thread may compile" in found["early"] and found["frames"] == 0
    assert re.match(r"RecompileError: layer .*size mismatch at index 0. expected 4, actual 5", found["rows"])
    assert (
        found["dtype"].startswith("RecompileError: layer would compile again") and "dtype" in found["dtype"]
    )
    assert "grad_mode" in found["grad"]
    assert found["first"].startswith("RecompileError: other") and "never called" in found["first"]
    assert "actual 6" in found["thread"]
    assert "flex_attention called without torch.compile" in found["flex"]
    assert found["still"] == "" and found["thawed"] == "" and found["raw"]
    assert "1 graphs compiled" in found["late"]


BUNDLE = """
cache = compile_utils.use_cache(os.environ["FOLDER"])
compile_utils.load_bundle(os.environ["LOAD"])
compiled = compile_utils.compile(Layer.forward, name="layer")
work = lambda: train(Layer(), compiled)
report = compile_utils.gate(work, role="drafter", leader=0, key="tiny", source="s1")
say(warm=report.warm, hits=report.ranks[0].counters.hits, manifest=cache.warm("tiny", "s1"))
try:
    compile_utils.load_bundle(os.environ["LOAD"])
except compile_utils.BundleError as error:
    say(again=str(error))
"""


@needs_compiler
def test_a_bundle_makes_another_folder_warm_by_the_counters(starts, tmp_path):
    bundle = starts[0].with_name("bundle")
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    [(code, said, _, err)] = run_world(BUNDLE, 1, FOLDER=tmp_path / "elsewhere", LOAD=bundle)
    assert code == 0, err
    assert said[0]["warm"] and said[0]["hits"] == 2 and said[0]["manifest"]["graphs"] == 2
    assert "before the first compile" in said[1]["again"]


GPU = """
from torch._inductor.async_compile import AsyncCompile
from torch.nn.attention.flex_attention import flex_attention
cache = compile_utils.use_cache(os.environ["FOLDER"])
if os.environ.get("LOAD"):
    compile_utils.load_bundle(os.environ["LOAD"])
compiled = compile_utils.compile(lambda q: flex_attention(q, q, q), name="flex")
ready = []
def work():
    workers = AsyncCompile._ready_future
    ready.append(bool(workers and workers.done()))
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled(q).sum().backward()
    torch.cuda.synchronize()
def kernels():
    return sorted(p.name for p in (cache.folder / "triton").iterdir())
before = kernels()
report = compile_utils.gate(work, role="drafter", leader=0, key="flex", source="s")
spent = report.ranks[0].counters
say(hits=spent.hits, misses=spent.compiled, ready=ready[0], before=before, after=kernels())
compile_utils.freeze()
work()
compile_utils.check_frozen()
if os.environ.get("SAVE"):
    compile_utils.save_bundle(os.environ["SAVE"])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_bundle_saves_tritons_work_too(tmp_path):
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    [(code, said, _, err)] = run_world(GPU, 1, FOLDER=tmp_path / "a", SAVE=tmp_path / "bundle", **gpu)
    assert code == 0 and said[0]["misses"] > 0 and said[0]["after"], err
    assert said[0]["ready"]  # no kernel is compiled in the process itself
    [(code, warm, _, err)] = run_world(GPU, 1, FOLDER=tmp_path / "b", LOAD=tmp_path / "bundle", **gpu)
    assert code == 0, err
    assert warm[0]["misses"] == 0 and warm[0]["hits"] == said[0]["misses"]
    assert warm[0]["after"] == warm[0]["before"] == said[0]["after"]  # Triton compiled nothing again


# ---------------------------------------------------------------------------------------------------------
# Bundles, without a compile


def fake_cache(folder: Path, graphs: int = 2, warm: tuple[str, ...] = ("a s",)) -> compile_utils.CacheInfo:
    """A folder that looks like a filled cache of this build."""
    of = compile_utils.fingerprint()
    for i in range(graphs):
        entry = folder / "inductor" / "fxgraph" / "ab" / f"f{i}" / "entry"
        entry.parent.mkdir(parents=True)
        entry.write_bytes(b"graph %d" % i)
    kernel = folder / "triton" / "KEY"
    kernel.mkdir(parents=True)
    (kernel / "k.cubin").write_bytes(b"\x7fELF")
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(kernel / "k.cubin")}}))
    manifest = {"format": 1, "fingerprint": of, "warm": {w: {"seconds": 1.0} for w in warm}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return compile_utils.CacheInfo(folder.parent, folder, of, [])


def test_bundle_round_trip_is_exact_and_moves_tritons_groups(tmp_path):
    one, two = fake_cache(tmp_path / "one" / "b"), fake_cache(tmp_path / "two" / "b", 0, ("z s",))
    (tmp_path / "two/b/triton/KEY/k.cubin").unlink()
    (tmp_path / "two/b/triton/KEY/__grp__k.json").unlink()
    (one.folder / "inductor" / ".x.tmp").write_text("half")
    compile_utils.save_bundle(tmp_path / "bundle", one)
    compile_utils.load_bundle(tmp_path / "bundle", two)
    names = {p.relative_to(one.folder) for p in compile_utils._files(one.folder)} - {Path("inductor/.x.tmp")}
    for name in names - {Path("manifest.json"), Path("triton/KEY/__grp__k.json")}:
        assert (two.folder / name).read_bytes() == (one.folder / name).read_bytes()
    group = json.loads((two.folder / "triton/KEY/__grp__k.json").read_text())
    assert group["child_paths"] == {"k.cubin": str(two.folder / "triton/KEY/k.cubin")}
    assert set(compile_utils.read_manifest(two.manifest)["warm"]) == {"a s", "z s"}
    assert not (two.folder / "inductor" / ".x.tmp").exists()


def test_a_bundle_is_never_replaced_by_a_poorer_one(tmp_path):
    rich, poor = fake_cache(tmp_path / "r" / "b", 3, ("a s", "b s")), fake_cache(tmp_path / "p" / "b", 3)
    fewer = fake_cache(tmp_path / "f" / "b", 2, ("a s", "b s", "c s"))
    bundle = tmp_path / "bundle"
    assert compile_utils.save_bundle(bundle, poor).note == "saved"
    assert compile_utils.save_bundle(bundle, rich).note == "saved"  # richer: replaced
    before = bundle.read_bytes()
    for cache in (poor, fewer):
        assert "kept the bundle" in compile_utils.save_bundle(bundle, cache).note
        assert bundle.read_bytes() == before
    assert compile_utils.save_bundle(bundle, rich).note == "saved"


def test_a_bundle_of_another_build_is_refused(tmp_path):
    one, two = fake_cache(tmp_path / "one" / "b"), fake_cache(tmp_path / "two" / "b", 0)
    one.fingerprint["gpu"] = "another GPU"
    compile_utils.save_bundle(tmp_path / "bundle", one)
    with pytest.raises(BundleError, match="gpu another GPU there"):
        compile_utils.load_bundle(tmp_path / "bundle", two)
    assert "another build" in compile_utils.save_bundle(tmp_path / "bundle", two).note


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_bytes(b"hello")
    elif how == "writable":
        path.chmod(0o666)
    elif how == "missing":
        path.unlink()
    elif how == "foreign":
        os.chown(path, 65534, 65534)
    else:
        with tarfile.open(path, "r:gz") as tar:
            header = tar.extractfile("header.json").read()
        facts = json.loads(header)
        if how == "elsewhere":
            header = json.dumps(facts | {"files": {"run.sh": 1}}).encode()
        elif how in ("list", "no_files"):
            header = json.dumps([] if how == "list" else facts | {"files": None}).encode()
        with tarfile.open(path, "w:gz") as tar:
            compile_utils._add(tar, "header.json", header)
            if how == "extra":
                compile_utils._add(tar, "cache/inductor/extra.py", b"x")
            elif how == "outside":
                compile_utils._add(tar, "cache/../../../outside", b"x")
            elif how == "elsewhere":
                compile_utils._add(tar, "cache/run.sh", b"x")
            elif how == "link":
                member = tarfile.TarInfo("cache/inductor/fxgraph/ab/f0/entry")
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(member)


@pytest.mark.parametrize(
    "how, word",
    [
        ("cut", "damaged"),
        ("empty", "not a blockdraft bundle|damaged"),
        ("text", "damaged"),
        ("writable", "written by others"),
        ("missing", "No such file"),
        ("foreign", "belongs to user 65534"),
        ("extra", "unexpected member"),
        ("outside", "unexpected member"),
        ("link", "unexpected member"),
        ("elsewhere", "unexpected member"),
        ("list", "another version"),
        ("no_files", "its header"),
        ("lacking", "lacks files"),
    ],
)
def test_a_damaged_or_foreign_bundle_is_refused_and_adds_nothing(tmp_path, how, word):
    if how == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    one, two = fake_cache(tmp_path / "one" / "b"), fake_cache(tmp_path / "two" / "b", 0)
    compile_utils.save_bundle(tmp_path / "bundle", one)
    before = sorted(compile_utils._files(tmp_path / "two"))
    damage(tmp_path / "bundle", how)
    with pytest.raises(BundleError, match=word):
        compile_utils.load_bundle(tmp_path / "bundle", two)
    assert sorted(compile_utils._files(tmp_path / "two")) == before


def test_the_leaders_bundle_reaches_the_other_nodes_leaders_only(tmp_path):
    def body(rank, store):
        folder = tmp_path / str(rank) / "b"
        cache = fake_cache(folder, 3 if rank == 0 else 0, ("a s",) if rank == 0 else ())
        if rank == 3:
            cache.fingerprint["torch"] = "another"
        compile_utils._cache = cache
        note = compile_utils.send_bundle(control=dist.group.WORLD, leaders=[0, 2, 3], part=100)
        say(note=note, graphs=len(list(folder.glob("inductor/fxgraph/*/*/*"))))

    results = fork_world(body, 4, tmp_path)
    assert [r[0] for r in results] == [0] * 4, results
    notes, graphs = zip(*[(r[1][0]["note"], r[1][0]["graphs"]) for r in results], strict=True)
    assert graphs == (3, 0, 3, 0)
    assert notes[0] == "sent" and notes[1] == "not needed" and notes[2].startswith("added 3 of")
    assert "another build (torch" in notes[3]
    assert not list(tmp_path.rglob(".bundle-*"))


def test_nothing_is_packed_when_the_shape_of_the_run_is_warm_everywhere(tmp_path):
    def body(rank, store):
        cache = fake_cache(tmp_path / str(rank) / "b", 1, ("a s", "b s") if rank == 0 else ("a s",))
        compile_utils._cache = cache
        compile_utils.save_bundle = None  # would raise
        say(note=compile_utils.send_bundle(control=dist.group.WORLD, leaders=[0, 1], shape="a s"))

    results = fork_world(body, 2, tmp_path)
    assert [r[1][0]["note"] for r in results] == ["not needed"] * 2, results


def test_a_bundle_that_cannot_be_packed_or_taken_leaves_nobody_waiting(tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    def body(rank, store):
        for broken in ("save_bundle", "load_bundle"):
            compile_utils._cache = fake_cache(tmp_path / broken / f"{rank}", 1 - rank, ("a s",) * (1 - rank))
            healthy = getattr(compile_utils, broken)
            setattr(compile_utils, broken, full)
            say(note=compile_utils.send_bundle(control=dist.group.WORLD, leaders=[0, 1]))
            setattr(compile_utils, broken, healthy)

    results = fork_world(body, 2, tmp_path)
    assert [r[0] for r in results] == [0, 0], results
    notes = [[one["note"] for one in r[1]] for r in results]
    assert all(n[0].startswith("refused: rank 0 cannot pack its cache: [Errno 28]") for n in notes), notes
    assert notes[0][1] == "sent" and notes[1][1].startswith("refused: [Errno 28] No space")


def test_a_job_on_two_nodes_with_folders_of_their_own_shares_what_node_0_has(launcher, small, tmp_path):
    """Two ranks that believe to be a node each; node 0 is warm for whatever this run asks."""
    plant = f"""
import os, sys, compile_utils
os.environ |= {{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}}
sys.argv += ["--compile-cache", f"{tmp_path}/node{{RANK}}"]
real = train.share_cache
def share(job, shape, say):
    if RANK == 0:
        cache = compile_utils._cache
        (cache.folder / "inductor" / "entry").write_bytes(b"compiled")
        compile_utils.record_warm(cache, *shape.rsplit(" ", 1), seconds=1.0)
    real(job, shape, say)
train.share_cache = share
"""
    flags = [*small, "--layout", "colocate", "--steps", "1", "--eval-every", "9", "--save-every", "9"]
    result = launcher.run(2, tmp_path / "run", *flags, plant=plant).good()
    said = "gate: compile cache of rank 0 for rank 1: added 1 of 1 files"
    assert said in result.out[0] and said not in result.out[1]
    [entry] = (tmp_path / "node1").glob("*/inductor/entry")
    assert entry.read_bytes() == b"compiled"
    assert len(compile_utils.read_manifest(entry.parents[1] / "manifest.json")["warm"]) == 1


def test_bundles_by_command(tmp_path, own_cache, capsys):
    """The docstring's two commands, as a user types them: what they say, and one line when they cannot."""
    bundle, folders = tmp_path / "cache.bundle", [str(tmp_path / name) for name in ("one", "two")]
    fake_cache(Path(folders[0]) / compile_utils.build_name()).root.chmod(0o700)

    def run(command: str, folder: str, file: Path = bundle) -> tuple[int, str]:
        code = compile_utils.main([command, str(file), "--compile-cache", folder])
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1 and bool(err) == bool(code)
        return code, out + err

    assert "start train.py once" in run("save", folders[1])[1] and not Path(folders[1]).exists()
    assert "No such file" in run("load", folders[1])[1]
    assert run("save", folders[0], tmp_path / "no such folder" / "b")[0] == 2
    code, said = run("save", folders[0])
    assert code == 0 and "saved; 4 files" in said and "warm shapes: a s" in said
    code, said = run("load", folders[1])
    assert code == 0 and "added 4 of 4 files" in said
    assert len(list(Path(folders[1]).glob("*/inductor/fxgraph/ab/*/entry"))) == 2
    (bundle := tmp_path / "text").write_text("mine")
    assert run("save", folders[0], bundle)[0] == 2 and bundle.read_text() == "mine"
    other = tmp_path / "other"
    cache = fake_cache(tmp_path / "three" / "b")
    cache.fingerprint["gpu"] = "another GPU"
    compile_utils.save_bundle(other, cache)
    for command in ("save", "load"):
        code, said = run(command, folders[0], other)
        assert code == 2 and "another" in said


@pytest.mark.parametrize("argv", [[], ["save"], ["send", "x"], ["save", "x", "--cache", "y"]], ids=str)
def test_bundle_usage_errors_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        compile_utils.main(argv)
    assert stop.value.code == 2


# ---------------------------------------------------------------------------------------------------------
# Where nothing compiles


def test_without_a_compiler_the_cpu_runs_eager_and_says_so_once(monkeypatch):
    monkeypatch.setattr(compile_utils, "cpp_compiler", lambda: None)
    monkeypatch.setattr(compile_utils, "_said", set())
    lines = []
    for name in ("a", "b"):
        fn = compile_utils.compile(torch.sin, name=name, device="cpu", log=lines.append)
        assert fn is torch.sin
    assert len(lines) == 1 and "no C++ compiler" in lines[0]


def test_compile_switched_off_is_refused_on_a_gpu_and_said_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(ValueError, match="unset TORCH_COMPILE_DISABLE"):
        compile_utils.why_eager("cuda")
    assert "TORCH_COMPILE_DISABLE" in compile_utils.why_eager("cpu")


def test_planning_runs_nothing():
    with compile_utils.planning() as planned:
        compile_utils.gate(lambda: 1 / 0, role="drafter", leader=0, key="k", source="s")
    assert planned == [("k", "s")]
    with pytest.raises(GateError, match="ZeroDivisionError"):
        compile_utils.gate(lambda: 1 / 0, role="drafter", leader=0, log=lambda line: None)
