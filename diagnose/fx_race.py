"""Does compiling in several threads break this torch, and is one process a rank with a gate clean?

    python -m diagnose.fx_race                          # every remedy and kind, a few minutes on a GPU
    python -m diagnose.fx_race --quick                  # under 3 minutes on 2 CPU cores
    python -m diagnose.fx_race --trials 2 --budget 230  # the table of one GPU in under 4 minutes
    python -m diagnose.fx_race --python A/bin/python --python B/bin/python   # is it the build or the design?

Each trial is a fresh child process (or one a rank) with its own empty compile cache and a time limit. The
workers compile and call flex_attention (forward; on a GPU forward and backward) and compare with dense
attention. A reproduced race is a finding: exit 0 when the designs that one would ship are clean and only
unsafe variants fail.

Outcomes: ok; fx_error ("Detected that you are using FX to symbolically trace ..."); other_error; wrong (not
equal to dense attention); eager (compile was asked, eager code ran); signal (the child died); hang.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

if not __package__:  # python diagnose/fx_race.py: same imports as python -m diagnose.fx_race
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from diagnose.report import Parser, Report, add_arguments, fail, ok, skip, warn

# Shapes: N heads, S sequence, E head size; a leading batch of one everywhere.

REMEDIES = {
    "none": "threads, nothing done",
    "lock": "threads, one lock around every compiled call",
    "warmup": "threads, main thread compiles first",
    "silence": "threads, error_on_nested_fx_trace=False",
    "force": "threads, force_compile_during_fx_trace=True",
    "processes": "one process a rank, no gate",
    "gate": "one process a rank, the leader compiles first",
}
KINDS = {
    "together": "all workers make their first call at the same instant",
    "staggered": "a worker starts when the one before has its first result and keeps calling",
    "held": "another thread (another rank, for processes) is inside a torch.fx trace all the time",
    "held_module": "the same, and an eager nn.Module is called instead of a compiled function",
    "eager_module": "two threads compile, a third calls an eager nn.Module",
}
OUTCOMES = ("ok", "fx_error", "other_error", "wrong", "eager", "signal", "hang")
SHIPPED = ("gate", "processes")  # what may be shipped: these must be clean
QUICK = (  # most telling first: the budget cuts the end
    *(("gate", "together"), ("none", "held"), ("none", "together"), ("processes", "together")),
    *(("silence", "held"), ("force", "held"), ("none", "held_module"), ("lock", "held")),
    *(("none", "staggered"), ("warmup", "held"), ("lock", "together"), ("warmup", "together")),
)
FULL = (
    *QUICK,
    *(("gate", "held"), ("none", "eager_module"), ("silence", "together"), ("silence", "staggered")),
    *(("force", "together"), ("force", "staggered")),
)
LEAST_S = 10  # with less of the budget left no trial is started
FX_ERROR = "Detected that you are using FX to symbolically trace"


# ---------------------------------------------------------------- inside a child: the work of one worker


class Work:
    """One worker's inputs, its dense reference, and the two functions that a drafter thread would call."""

    def __init__(self, index: int, spec: dict):
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.torch = torch
        self.device = torch.device(spec["devices"][index % len(spec["devices"])])
        cuda = self.device.type == "cuda"
        heads, head_size, documents = (8, 64, 4) if cuda else (2, 16, 2)
        # On a shared device equal shapes would be one compile for all threads, so each gets its own length.
        self.length = spec["tokens"] + (128 * index if spec["own_length"] else 0)
        generator = torch.Generator().manual_seed(index)
        shape = (1, heads, self.length, head_size)
        kind = {"device": self.device, "dtype": torch.bfloat16 if cuda else torch.float32}
        qkvg = [torch.randn(shape, generator=generator).to(**kind) for _ in range(4)]
        *self.qkv, self.grad = qkvg
        self.train = cuda  # flex_attention has no backward on CPU
        for tensor in self.qkv:
            tensor.requires_grad_(self.train)
        doc_S = torch.arange(self.length, device=self.device) * documents // self.length
        pos_S = torch.arange(self.length, device=self.device)

        def same_document(b, h, q, k):
            return (doc_S[q] == doc_S[k]) & (q >= k)

        size = self.length
        self.mask = create_block_mask(same_document, None, None, size, size, self.device, BLOCK_SIZE=128)
        self.allowed_SS = (doc_S[:, None] == doc_S) & (pos_S[:, None] >= pos_S)
        self.eager_calls = 0

        def attend(q, k, v, mask):
            # Dynamo folds this branch away; whoever gets in here asked for compiled code and runs eager.
            if not torch.compiler.is_dynamo_compiling():
                self.eager_calls += 1
            return flex_attention(q, k, v, block_mask=mask)

        self.attend = torch.compile(attend, fullgraph=True, dynamic=False)
        self.reference = self._dense()

    def _dense(self) -> list:
        torch = self.torch
        q, k, v = (t.detach().float().requires_grad_(self.train) for t in self.qkv)
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, k, v, attn_mask=self.allowed_SS)
        grads = torch.autograd.grad(out, (q, k, v), self.grad.float()) if self.train else ()
        return [out.detach(), *grads]

    def call(self) -> list:
        """One forward (and backward where there is one), finished on the device."""
        out = self.attend(*self.qkv, self.mask)
        grads = self.torch.autograd.grad(out, self.qkv, self.grad) if self.train else ()
        if self.train:
            self.torch.cuda.synchronize(self.device)
        return [out.detach(), *grads]

    def error(self, result: list) -> float:
        """Largest difference from dense fp32 attention, relative to its largest entry."""
        pairs = zip(result, self.reference, strict=True)
        return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)

    def is_wrong(self, error: float) -> bool:
        return not error < (0.05 if self.train else 1e-3)  # NaN is wrong too


def set_switch(remedy: str) -> None:
    """In each worker: from torch 2.13 on a new thread does not see the main thread's setting.

    Never set back: up to 2.12 the setting is the whole process's, and the first worker to leave would
    take it from the others.
    """
    import torch._dynamo.config as config

    if remedy == "silence":
        config.error_on_nested_fx_trace = False
    if remedy == "force":
        config.force_compile_during_fx_trace = True


def hold_trace(inside_forward: bool) -> threading.Event:
    """Open a torch.fx trace in a thread of its own and keep it open; returns the event that ends it."""
    import torch

    opened, release = threading.Event(), threading.Event()

    class Held(torch.fx.Tracer):
        def create_args_for_root(self, *args, **kwargs):  # the flag is set, nn.Module is not patched yet
            if not inside_forward:
                opened.set()
                release.wait()
            return super().create_args_for_root(*args, **kwargs)

    class Root(torch.nn.Module):
        def forward(self, x):  # the flag is set and nn.Module.__call__ is patched, for the whole process
            if inside_forward:
                opened.set()
                release.wait()
            return x + 1

    threading.Thread(target=lambda: Held().trace(Root()), daemon=True).start()
    if not opened.wait(30):
        raise RuntimeError("the torch.fx trace did not open in 30 s")
    return release


def compiled_graphs() -> dict[str, int]:
    """How many graphs Inductor gave out, by counters; `missed` were compiled, `hit` came from the cache."""
    from torch._dynamo.utils import counters

    inductor, aot = counters["inductor"], counters["aot_autograd"]
    missed = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    hit = inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"]
    return {"missed": missed, "hit": hit}


def narrow_vector_checks() -> None:
    """Inductor asks g++ about every vector unit of the CPU, 9 s a child on torch 2.11: AVX2 is enough."""
    from torch._inductor import cpu_vec_isa

    checker = getattr(cpu_vec_isa, "x86_isa_checker", None)
    if checker is not None and "avx2" in checker():
        cpu_vec_isa.x86_isa_checker = lambda: ["avx2"]


def describe(error: BaseException) -> dict:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    outcome = "fx_error" if FX_ERROR in str(error) else "other_error"
    first_line = (str(error).strip().splitlines() or [""])[0]
    return {"outcome": outcome, "detail": f"{type(error).__name__}: {first_line}"[:300], "place": place}


# ---------------------------------------------------------------- inside a child: threads, ranks, facts


class Threads:
    """The workers of one process as threads, as in the design that crashed."""

    def __init__(self, spec: dict):
        self.spec = spec
        self.works = [Work(i, spec) for i in range(spec["workers"])]
        self.lock = threading.Lock() if spec["remedy"] == "lock" else contextlib.nullcontext()
        # Under a held trace calls never overlap, so that the open trace is the only possible cause.
        self.turns = threading.Lock() if spec["kind"] == "held" else contextlib.nullcontext()
        self.begin = threading.Barrier(len(self.works))
        self.cold: dict[int, float] = {}
        self.failures: list[dict] = []
        self.go = threading.Event()
        self.speed: dict[int, float] = {}

    def call(self, work: Work) -> list:
        with self.lock:
            return work.call()

    def worker(self, index: int) -> None:
        work, kind = self.works[index], self.spec["kind"]
        try:
            set_switch(self.spec["remedy"])
            self.begin.wait(60)
            if kind in ("staggered", "held"):  # first calls one after another
                while len(self.cold) < index and not self.failures:
                    time.sleep(0.01)
            start = time.perf_counter()
            error = work.error(self.call(work))
            self.cold[index] = time.perf_counter() - start
            if work.is_wrong(error):
                self.fail({"outcome": "wrong", "detail": f"relative error {error:.2g}"})
            # torch 2.11 raises when a finished worker calls while another one compiles: keep calling.
            while len(self.cold) < len(self.works) and not self.failures and kind != "held":
                if nobody_measures(self.spec["steady_lock"]):
                    self.call(work)
                time.sleep(0.0005)
            self.go.wait()
            start, tokens, elapsed = time.perf_counter(), 0, 0.0
            while not self.failures and elapsed < self.spec["steady"]:
                with self.turns:
                    self.call(work)
                tokens, elapsed = tokens + work.length, time.perf_counter() - start
            self.speed[index] = tokens / elapsed if elapsed else 0.0
        except Exception as error:
            self.fail(describe(error))

    def fail(self, failure: dict) -> None:
        """Written at once: a crash of the process often follows, and what came first is the cause."""
        if not self.failures:
            Path(self.spec["out"]).with_name("first.json").write_text(json.dumps(failure))
        self.failures.append(failure)

    def run(self) -> dict:
        start = time.perf_counter()
        if self.spec["remedy"] == "warmup":
            for work in self.works:
                work.call()
        if self.spec["kind"] == "held":
            hold_trace(inside_forward=False)
        threads = [
            threading.Thread(target=self.worker, args=(i,), daemon=True) for i in range(len(self.works))
        ]
        for thread in threads:
            thread.start()
        while len(self.cold) < len(self.works) and not self.failures:
            time.sleep(0.005)
        cold_s = time.perf_counter() - start
        graphs = compiled_graphs()
        with one_at_a_time(self.spec["steady_lock"]):
            self.go.set()
            for thread in threads:
                thread.join(None if not self.failures else 0)
        eager_calls = sum(work.eager_calls for work in self.works)
        result = {"cold_s": cold_s, "graphs": graphs, "eager_calls": eager_calls}
        result |= {"tokens_per_s": sum(self.speed.values())}
        if self.failures:
            return result | self.failures[0]
        if eager_calls or not sum(graphs.values()):
            return result | {"outcome": "eager", "detail": f"{eager_calls} calls ran eager, without a word"}
        return result | {"outcome": "ok", "detail": f"{graphs['missed']} graphs compiled"}


def run_held_module(spec: dict) -> dict:
    """An eager module called while a trace is open elsewhere: nn.Module.__call__ is patched process-wide."""
    import torch

    module = torch.nn.Linear(4, 4).to(spec["devices"][0])
    x = torch.ones(2, 4, device=spec["devices"][0])
    hold_trace(inside_forward=True)
    start = time.perf_counter()
    try:
        module(x)
    except Exception as error:
        return describe(error)
    return {"outcome": "ok", "detail": "", "cold_s": time.perf_counter() - start}


def run_eager_module(spec: dict) -> dict:
    """Two threads compile, the main thread calls an eager module until they are done."""
    import torch

    works = [Work(i, spec) for i in range(2)]
    module = torch.nn.Linear(4, 4).to(spec["devices"][0])
    x = torch.ones(2, 4, device=spec["devices"][0])
    failures, done = [], []

    def compile_one(work: Work) -> None:
        try:
            work.call()
        except Exception as error:
            failures.append(describe(error))
        done.append(1)

    for work in works:
        threading.Thread(target=compile_one, args=(work,), daemon=True).start()
    start, calls = time.perf_counter(), 0
    while len(done) < 2 and not failures:
        try:
            module(x)
        except Exception as error:
            return describe(error)
        calls += 1
        time.sleep(0.0002)
    result = {"cold_s": time.perf_counter() - start}
    return result | (failures[0] if failures else {"outcome": "ok", "detail": f"{calls} eager calls"})


def run_rank(spec: dict) -> dict:
    """One process a rank. With the gate, rank 0 compiles into the shared empty cache, then the others."""
    rank, folder = spec["rank"], Path(spec["folder"])
    work = Work(rank, spec)
    if rank == spec["holder"]:
        hold_trace(inside_forward=False)
    meet(folder, "imported", rank, spec["workers"])
    if spec["remedy"] == "gate" and rank > 0:
        wait_for(folder / "leader.done")
    result: dict = {"outcome": "ok", "detail": ""}
    start = time.perf_counter()
    if rank != spec["holder"]:
        error = work.error(work.call())
        if work.is_wrong(error):
            result = {"outcome": "wrong", "detail": f"relative error {error:.2g}"}
    result["seconds_to_first_result"] = time.perf_counter() - start
    result["graphs"] = compiled_graphs()
    result["finished_at"] = time.time()
    if rank == 0:
        (folder / "leader.done").touch()
    meet(folder, "cold", rank, spec["workers"])
    tokens, elapsed = 0, 0.0
    with one_at_a_time(spec["steady_lock"]) if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            (folder / "steady").touch()
        wait_for(folder / "steady")
        start = time.perf_counter()
        while rank != spec["holder"] and elapsed < spec["steady"]:
            work.call()
            tokens, elapsed = tokens + work.length, time.perf_counter() - start
        meet(folder, "done", rank, spec["workers"])
    if work.eager_calls and result["outcome"] == "ok":
        result |= {"outcome": "eager", "detail": f"{work.eager_calls} calls ran eager"}
    return result | {"tokens_per_s": tokens / elapsed if elapsed else 0.0, "eager_calls": work.eager_calls}


def meet(folder: Path, name: str, rank: int, ranks: int) -> None:
    (folder / f"{name}.{rank}").touch()
    for other in range(ranks):
        wait_for(folder / f"{name}.{other}")


def wait_for(path: Path) -> None:
    while not path.exists():  # the parent's time limit ends this
        time.sleep(0.005)


def nobody_measures(path: str) -> bool:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextlib.contextmanager
def one_at_a_time(path: str):
    """Trials may compile side by side, but only one measures its steady speed."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def facts() -> dict:
    """What this interpreter has, and where its torch keeps and reads the flag."""
    import torch

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    root = Path(torch.__file__).parent
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "gpus": names,
        "explanation": explain(root),
    }


def explain(root: Path) -> dict:
    """Find in the source of the torch installed at `root` where the flag lives, who sets and who reads it."""
    trace, frame = root / "fx/_symbolic_trace.py", root / "_dynamo/eval_frame.py"
    places = {
        "defined": find_line(trace, "_is_fx_tracing_flag", "=", at_start=True),
        "set": find_line(trace, "_is_fx_tracing_flag = True"),
        "read": find_line(trace, "return _is_fx_tracing_flag and"),
        "checked": find_line(frame, "is_fx_symbolic_tracing()"),
        "raised": find_line(frame, FX_ERROR),
        "patched": find_line(trace, "patch_method(", after="def module_call_wrapper"),
        "compile_guard": find_line(root / "_dynamo/convert_frame.py", "_compile_session_context()"),
        "compile_flag": find_line(root / "compiler/__init__.py", "_is_compiling_flag", "=", at_start=True),
    }
    # A guard would have to make the flag a threading.local or a ContextVar; the definition shows it.
    definition = places["defined"]["text"] if places["defined"] else ""
    per_thread = "local" in definition or "ContextVar" in definition
    return {"places": places, "per_thread": per_thread, "flag_found": bool(definition)}


def find_line(path: Path, *parts: str, at_start: bool = False, after: str = "") -> dict | None:
    if not path.is_file():
        return None
    seen = not after
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if seen and all(p in line for p in parts) and (not at_start or line.startswith(parts[0])):
            return {"file": str(path), "line": number, "text": line.strip()}
        seen = seen or after in line
    return None


def child(spec_path: str) -> None:
    """Entry of a child process: run one spec, write its result beside it, leave without a teardown."""
    spec = json.loads(Path(spec_path).read_text())
    if spec["kind"] == "facts":
        result = facts()
    else:
        import torch

        if spec["devices"] == ["cpu"]:
            torch.set_num_threads(1)
            narrow_vector_checks()
        run = {"held_module": run_held_module, "eager_module": run_eager_module}.get(spec["kind"])
        run = run or (run_rank if spec["remedy"] in SHIPPED else lambda s: Threads(s).run())
        try:
            result = run(spec)
        except Exception as error:
            result = describe(error)
    beside = Path(spec["out"] + ".tmp")
    beside.write_text(json.dumps(result))
    beside.rename(spec["out"])
    sys.stdout.flush()
    os._exit(0)  # threads may still hang in a trace or in a compile


# ---------------------------------------------------------------- the parent: trials under a time limit


class Laboratory:
    """Starts children of one interpreter, waits for them, ends them, and says what became of them."""

    def __init__(self, python: str, args: argparse.Namespace):
        self.python, self.args = python, args
        self.folder = Path(tempfile.mkdtemp(prefix="fx_race_"))
        self.started = time.monotonic()
        self.numbers = itertools.count()
        self.live: set[subprocess.Popen] = set()

    def left(self) -> float:
        return self.args.budget - (time.monotonic() - self.started)

    def start(self, spec: dict, cache: Path, env: dict | None = None) -> tuple[subprocess.Popen, Path]:
        folder = self.folder / f"child{next(self.numbers):03}"
        folder.mkdir()
        spec = spec | {"out": str(folder / "result.json")}
        (folder / "spec.json").write_text(json.dumps(spec))
        environ = dict(os.environ)
        environ.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
        environ |= {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"}
        environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no worker pool to wait for in each child
        environ.setdefault("OMP_NUM_THREADS", "1")
        command = [self.python, str(Path(__file__).resolve()), "--child", str(folder / "spec.json")]
        with open(folder / "stderr", "w") as stderr:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environ | (env or {}),
                stderr=stderr,
                stdout=stderr,
                start_new_session=True,
            )
        self.live.add(process)
        return process, folder

    def wait(self, process: subprocess.Popen, folder: Path, limit: float) -> dict:
        """The child's result, or signal or hang or other_error told by its end."""
        try:
            code = process.wait(max(0.1, limit))
        except subprocess.TimeoutExpired:
            self.end(process)
            return {"outcome": "hang", "detail": f"no result after {limit:.0f} s"}
        self.live.discard(process)
        if code < 0:
            where = crash_frame((folder / "stderr").read_text(errors="replace"))
            died = f"died by {signal.Signals(-code).name}{where}"
            if (folder / "first.json").exists():
                first = json.loads((folder / "first.json").read_text())
                return first | {"detail": f"{first['detail']}; then {died}"}
            return {"outcome": "signal", "detail": died}
        if not (folder / "result.json").exists():
            tail = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-1:]
            return {"outcome": "other_error", "detail": f"exit {code}: {' '.join(tail)}"[:300]}
        return json.loads((folder / "result.json").read_text())

    def end(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.live.discard(process)

    def close(self) -> None:
        for process in list(self.live):
            self.end(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self) -> dict:
        process, folder = self.start({"kind": "facts"}, self.folder)
        found = self.wait(process, folder, 120)
        if "torch" not in found:
            raise SystemExit(f"fx_race: {self.python} cannot import torch: {found['detail']}")
        return found

    def trial(self, remedy: str, kind: str, devices: list[str]) -> dict | None:
        """One trial; None when the budget ends it, which says nothing about torch."""
        if self.left() < LEAST_S:
            return None
        args, start = self.args, time.monotonic()
        cut = self.left() < args.limit
        spec = {"remedy": remedy, "kind": kind, "workers": args.workers, "devices": devices}
        spec |= {"tokens": 2048 if devices[0] != "cpu" else 256, "own_length": False}
        spec |= {"steady": args.steady, "steady_lock": str(self.folder / "steady.lock")}
        limit = min(args.limit, self.left())
        run = self._ranks if remedy in SHIPPED else self._threads
        result = run(spec, limit)
        if result["outcome"] == "hang" and cut:
            return None
        seconds = round(time.monotonic() - start, 2)
        return {"remedy": remedy, "kind": kind} | result | {"seconds": seconds}

    def _threads(self, spec: dict, limit: float) -> dict:
        cache = self.folder / f"cache{next(self.numbers):03}"
        # Under a held trace the calls come one by one, so one compile for all of them is enough.
        spec["own_length"] = len(spec["devices"]) < spec["workers"] and spec["kind"] != "held"
        process, folder = self.start(spec, cache)
        return self.wait(process, folder, limit)

    def _ranks(self, spec: dict, limit: float) -> dict:
        deadline = time.monotonic() + limit
        meeting = self.folder / f"meeting{next(self.numbers):03}"
        meeting.mkdir()
        cache = self.folder / f"cache{next(self.numbers):03}"  # shared by the ranks and empty
        spec["holder"] = spec["workers"] - 1 if spec["kind"] == "held" else -1
        children = []
        for rank in range(spec["workers"]):
            device = spec["devices"][rank % len(spec["devices"])]
            env = {}
            if device != "cpu":  # each rank sees its own GPU as device 0, or its cache key would differ
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                entry = device.split(":")[1]
                env = {"CUDA_VISIBLE_DEVICES": visible.split(",")[int(entry)] if visible else entry}
            own = spec | {"rank": rank, "folder": str(meeting)}
            own["devices"] = ["cpu" if device == "cpu" else "cuda:0"]
            children.append(self.start(own, cache, env))
        return self._gather(spec, children, deadline, meeting)

    def _gather(self, spec: dict, children: list, deadline: float, meeting: Path) -> dict:
        results = [self.wait(p, folder, deadline - time.monotonic()) for p, folder in children]
        worst = max(results, key=lambda r: OUTCOMES.index(r["outcome"]))
        combined = {"outcome": worst["outcome"], "detail": worst.get("detail", "")}
        if worst["outcome"] != "ok":
            return combined
        working = [r for i, r in enumerate(results) if i != spec["holder"]]
        opened = max((meeting / f"imported.{r}").stat().st_mtime for r in range(spec["workers"]))
        combined["cold_s"] = max(r["finished_at"] for r in working) - opened
        combined["tokens_per_s"] = sum(r["tokens_per_s"] for r in working)
        combined["graphs"] = [r["graphs"] for r in working]
        followers = working[1:]
        combined["followers_hit"] = all(r["graphs"]["hit"] and not r["graphs"]["missed"] for r in followers)
        times = ", ".join(f"{r['seconds_to_first_result']:.1f}" for r in working)
        combined["detail"] = f"first result after {times} s a rank"
        return combined


def crash_frame(stderr: str) -> str:
    """The innermost Python frame that faulthandler wrote for the thread that crashed, shortened."""
    current = stderr.partition("Current thread")[2] or stderr
    for line in current.splitlines():
        if line.strip().startswith("File "):
            return " in " + line.strip()[5:].split("site-packages/")[-1].replace('"', "")
    return ""


def measure(python: str, args: argparse.Namespace, say) -> dict:
    """All trials under one interpreter."""
    lab = Laboratory(python, args)
    try:
        found = lab.facts()
        device = args.device if args.device != "auto" else ("cuda" if found["gpus"] else "cpu")
        if device == "cuda" and not found["gpus"]:
            raise SystemExit(f"fx_race: --device cuda, but {python} sees no GPU; use --device cpu")
        if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            raise SystemExit(
                "fx_race: no C++ compiler, so nothing compiles on the CPU; sudo apt-get install g++"
            )
        count = min(args.workers, max(1, len(found["gpus"])))
        devices = [f"cuda:{i}" for i in range(count)] if device == "cuda" else ["cpu"]
        jobs = args.jobs or (min(4, max(1, (os.cpu_count() or 1) // 4)) if device == "cuda" else 1)
        say(f"torch {found['torch']}, python {found['python']}, {', '.join(found['gpus']) or 'CPU'}")
        trials, skipped = [], []
        plan = [pair for _ in range(args.trials) for pair in args.plan]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(lab.trial, *pair, devices): pair for pair in plan}
            try:
                for future in concurrent.futures.as_completed(futures):
                    remedy, kind = futures[future]
                    trial = future.result()
                    if trial is None:
                        skipped.append({"remedy": remedy, "kind": kind})
                        continue
                    trials.append(trial)
                    what = f"{remedy:9} {kind:12} {trial['outcome']:11}"
                    say(f"  {what} {trial['seconds']:5.1f} s  {trial.get('detail', '')[:70]}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                lab.close()
                raise
    finally:
        lab.close()
    return found | {"device": device, "trials": trials, "skipped": skipped}


# ---------------------------------------------------------------- what it means


def outcomes_of(result: dict, remedy: str, kind: str | None = None) -> list[str]:
    return [t["outcome"] for t in result["trials"] if t["remedy"] == remedy and kind in (None, t["kind"])]


def median_of(result: dict, key: str, remedy: str, kind: str) -> float | None:
    wanted = [t for t in result["trials"] if (t["remedy"], t["kind"]) == (remedy, kind)]
    values = [t[key] for t in wanted if t["outcome"] in ("ok", "eager") and t.get(key)]
    return statistics.median(values) if values else None


def table_rows(result: dict) -> list[list]:
    gated = median_of(result, "tokens_per_s", "gate", "together")
    rows = []
    for remedy, kind in itertools.product(REMEDIES, KINDS):
        outcomes = outcomes_of(result, remedy, kind)
        if not outcomes:
            continue
        told = ", ".join(f"{o} {outcomes.count(o)}" for o in OUTCOMES if o in outcomes)
        cold, speed = (median_of(result, key, remedy, kind) for key in ("cold_s", "tokens_per_s"))
        relative = f"{speed / gated:.2f}" if speed and gated else "-"
        rows.append([remedy, kind, len(outcomes), told, f"{cold:.1f}" if cold else "-", relative])
    return rows


def place(result: dict, name: str) -> str:
    found = result["explanation"]["places"][name]
    if not found:
        return "(not found)"
    path = Path(found["file"])
    parts = path.parts[path.parts.index("torch") :] if "torch" in path.parts else path.parts
    return f"{'/'.join(parts)}:{found['line']}"


def explanation(result: dict) -> list[str]:
    """Which flag, where it is read in this torch, and whether this torch guards it."""
    at = {name: place(result, name) for name in result["explanation"]["places"]}
    lines = [
        "The flag: torch.fx._symbolic_trace._is_fx_tracing_flag, "
        + (
            "kept for each thread"
            if result["explanation"]["per_thread"]
            else "one global of the whole process"
        )
        + f" ({at['defined']}). Every torch.fx trace sets it ({at['set']}), torch.compile's own traces too.",
        f"A compiled function reads it on every call ({at['checked']}, through {at['read']}) "
        f"and raises ({at['raised']}).",
    ]
    if result["explanation"]["places"]["compile_guard"]:
        lines.append(
            f"This torch guards half of it: while something compiles, {at['compile_guard']} holds "
            f"_is_compiling_flag ({at['compile_flag']}), so compile against compile no longer raises. "
            "That flag is global too, and a trace outside a compile is not guarded."
        )
    else:
        lines.append(
            "This torch has no guard: one thread's compile is enough to make another thread's call raise."
        )
    lines.append(
        f"A trace also patches nn.Module.__call__ ({at['patched']}) process-wide: eager modules fail."
    )
    return lines


def conclusion(result: dict) -> list[str]:
    """The verdict in words, from what was seen in these trials only."""
    lines = []
    for remedy, meaning in REMEDIES.items():
        outcomes = outcomes_of(result, remedy)
        if not outcomes:
            continue
        bad = sorted(
            {f"{t['outcome']} ({t['kind']})" for t in result["trials"] if t["remedy"] == remedy} - {""}
        )
        bad = [b for b in bad if not b.startswith("ok ")]
        if not bad:
            said = "clean" if remedy in SHIPPED else "clean here, which is no proof: threads share the flag"
        else:
            said = ", ".join(bad)
        lines.append(f"{remedy:9} ({meaning}): {said}")
    return lines


def finding(result: dict) -> str:
    racy = [t for t in result["trials"] if t["remedy"] == "none" and t["outcome"] != "ok"]
    if not outcomes_of(result, "none"):
        return "not tried"
    if not racy:
        return "not reproduced in these trials"
    kinds = ", ".join(dict.fromkeys(f"{t['kind']}: {t['outcome']}" for t in racy))
    return f"race reproduced ({kinds})"


def build_or_design(results: list[dict]) -> str:
    """Compare interpreters: what fails under every build is the design."""
    broken = []
    for result in results:
        unsafe = [t for t in result["trials"] if t["remedy"] not in SHIPPED and t["outcome"] != "ok"]
        broken.append({(t["remedy"], t["kind"]) for t in unsafe})
    names = [f"{r['torch']} ({r['executable']})" for r in results]
    everywhere = sorted(set.intersection(*broken))
    some = sorted(set.union(*broken) - set(everywhere))
    shipped = [[o for s in SHIPPED for o in outcomes_of(r, s)] for r in results]
    clean = all(outcomes and set(outcomes) == {"ok"} for outcomes in shipped)
    parts = []
    if everywhere:
        told = ", ".join(f"{remedy}/{kind}" for remedy, kind in everywhere)
        parts.append(f"It is the design: {told} fail under every build ({'; '.join(names)}).")
    elif not any(broken):
        parts.append("Nothing failed under any build: neither is shown to be at fault.")
    else:
        parts.append("It depends on the build: no variant fails under all of them.")
    for remedy, kind in some:
        where = [n for n, b in zip(names, broken, strict=True) if (remedy, kind) in b]
        parts.append(f"{remedy}/{kind} failed only under {'; '.join(where)}.")
    if clean:
        parts.append("One process a rank was clean under each of them.")
    return " ".join(parts)


def check_shipped(result: dict, remedy: str, command: str):
    trials = [t for t in result["trials"] if t["remedy"] == remedy]
    if not trials:
        return skip("no trial was run", f"{command} --remedies {remedy}")
    bad = [t for t in trials if t["outcome"] != "ok"]
    if bad:
        first = bad[0]
        message = (
            f"{first['outcome']} ({first['kind']}) in {len(bad)} of {len(trials)}: {first.get('detail', '')}"
        )
        return fail(message, f"{command} --remedies {remedy} --trials 3 --limit 300")
    cold = median_of(result, "cold_s", remedy, "together") or median_of(result, "cold_s", remedy, "held")
    message = f"clean in {len(trials)} of {len(trials)} trials, cold start {cold:.1f} s"
    if remedy == "gate" and not all(t.get("followers_hit") for t in trials):
        return warn(
            f"{message}, but a follower missed the leader's cache", "python -m diagnose.compile_cache --probe"
        )
    return ok(message + (", every follower hit" if remedy == "gate" else ""))


def check_budget(result: dict, command: str):
    done = {(t["remedy"], t["kind"]) for t in result["trials"]}
    cut = [f"{s['remedy']}/{s['kind']}" for s in result["skipped"] if (s["remedy"], s["kind"]) not in done]
    total = len(result["trials"]) + len(result["skipped"])
    if not cut:
        return ok(f"{len(result['trials'])} of {total} trials, each remedy and kind at least once")
    names = ", ".join(dict.fromkeys(cut))
    return skip(f"the time budget ended before {names}", f"{command} --budget 3600")


# ---------------------------------------------------------------- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("diagnose.fx_race", __doc__)
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="2 workers, one trial each, in under 3 minutes")
    parser.add_argument(
        "--trials", type=int, default=None, help="trials of each remedy and kind (default 2; quick 1)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--python", action="append", metavar="EXE", help="another interpreter; repeat to compare"
    )
    parser.add_argument("--workers", type=int, default=None, help="threads or ranks (default 3; quick 2)")
    parser.add_argument("--remedies", help=f"comma-separated, of {','.join(REMEDIES)}")
    parser.add_argument("--kinds", help=f"comma-separated, of {','.join(KINDS)}")
    parser.add_argument(
        "--limit", type=float, default=None, help="seconds for one trial before it counts as a hang"
    )
    parser.add_argument(
        "--budget", type=float, default=None, help="seconds for everything (quick 165; else 3600)"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, help="trials side by side (default 1 on CPU, up to 4 on GPU)"
    )
    parser.add_argument("--steady", type=float, default=None, help="seconds of the steady measurement")
    parser.add_argument(
        "--stagger", type=float, default=1.0, help="seconds between two starts when staggered"
    )
    args = parser.parse_args(argv)
    args.trials = args.trials if args.trials is not None else (1 if args.quick else 2)
    args.workers = args.workers if args.workers is not None else (2 if args.quick else 3)
    args.budget = args.budget if args.budget is not None else (165.0 if args.quick else 3600.0)
    args.limit = args.limit if args.limit is not None else (75.0 if args.quick else 180.0)
    args.steady = args.steady if args.steady is not None else (1.0 if args.quick else 2.0)
    if args.trials < 1 or args.workers < 2:
        parser.error("--trials must be at least 1 and --workers at least 2 (one worker cannot race)")
    remedies = chosen(parser, "--remedies", args.remedies, REMEDIES)
    kinds = chosen(parser, "--kinds", args.kinds, KINDS)
    args.plan = [(r, k) for r, k in (QUICK if args.quick else FULL) if r in remedies and k in kinds]
    if not args.plan:
        parser.error("no trial has these remedies and kinds; leave out --remedies or --kinds")
    for python in args.python or []:
        if not shutil.which(python):
            parser.error(f"--python {python}: no such program; name the python of an environment with torch")
    return args


def chosen(parser: argparse.ArgumentParser, flag: str, text: str | None, known: dict) -> set[str]:
    names = set(text.split(",")) if text else set(known)
    if names - set(known):
        parser.error(
            f"{flag}: unknown {', '.join(sorted(names - set(known)))}; choose from {', '.join(known)}"
        )
    return names


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    report = Report("fx_race", args)
    pythons = [shutil.which(p) for p in args.python] if args.python else [sys.executable]
    command = "python -m diagnose.fx_race" + (" --quick" if args.quick else "")
    results = []
    for python in pythons:
        result = measure(python, args, report.say)
        results.append(result)
        tag = f" ({result['torch']})" if len(pythons) > 1 else ""
        report.say()
        headers = ["remedy", "kind", "trials", "outcomes", "cold s", "steady tokens/s (gate = 1)"]
        report.table(table_rows(result), headers, disable_numparse=True)
        report.say()
        for line in (*conclusion(result), "", *explanation(result), ""):
            report.say(line)
        for remedy in SHIPPED:
            if any(r == remedy for r, _ in args.plan):
                report.run(remedy + tag, check_shipped, result, remedy, command)
        report.add("finding" + tag, ok(finding(result)))
        report.run("trials" + tag, check_budget, result, command)
    report.extra = {"trials": results[0]["trials"], "finding": finding(results[0]), "builds": results}
    if len(results) > 1:
        report.extra["trials"] = [t | {"torch": r["torch"]} for r in results for t in r["trials"]]
        report.extra["build_or_design"] = build_or_design(results)
        report.add("build or design", ok(report.extra["build_or_design"]))
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended too
    sys.exit(main())
