"""diagnose.throughput: the pipeline against a ticking clock, advice against every split, runs by their logs.

The clock knows no formula: it has targets, links and drafters that look, each tick, whether they may begin.
Run folders are written by a small generator from the times that sides really take. No time is asserted.
"""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import environment

import train
from diagnose import throughput
from diagnose.memory import SHAPES
from diagnose.report import Report
from diagnose.throughput import Machine, Times, exposed_reduce, pipeline, plans, split_plan

ROOT = Path(__file__).parent.parent
SMALL = "--token-budget 128 --anchors 32 --draft-layers 1 --device cpu".split()


# ---------------------------------------------------------------------------------------------------------
# The oracle: a clock


class Ticking:
    """A node, tick by tick. All times are whole, and the update takes at least one tick."""

    def __init__(self, t: Times, targets: int, drafters: int, per_step: int, depth: int, steps: int):
        self.t, self.per_step, self.depth, self.total = t, per_step, depth, steps * per_step
        self.of_target = [[b for b in range(self.total) if b % targets == i] for i in range(targets)]
        self.of_drafter = [[b for b in range(self.total) if b % drafters == j] for j in range(drafters)]
        self.made, self.sent, self.used = set(), set(), set()  # batches that are done with
        self.making, self.sending, self.using = {}, {}, {}  # batch: ticks left
        self.updating, self.steps, self.now = 0, 0, 0
        self.ends: list[int] = []
        self.busy_target = [0] * targets

    def run(self) -> list[int]:
        while len(self.ends) * self.per_step < self.total:
            while self.begin():
                pass
            self.now += 1
            for i, queue in enumerate(self.of_target):
                self.busy_target[i] += any(b in self.making for b in queue)
            for running, done in (
                (self.making, self.made),
                (self.sending, self.sent),
                (self.using, self.used),
            ):
                for b in list(running):
                    running[b] -= 1
                    if running[b] == 0:
                        del running[b]
                        done.add(b)
            if self.updating:
                self.updating -= 1
                if self.updating == 0:
                    self.ends.append(self.now)
        return self.ends

    def begin(self) -> bool:
        """Start what may start now; True if anything did."""
        began = False
        for queue in self.of_target:
            held = sum(b in self.made or b in self.making for b in queue) - sum(b in self.sent for b in queue)
            todo = [b for b in queue if b not in self.made and b not in self.making]
            if todo and not any(b in self.making for b in queue) and held < self.depth:
                self.making[todo[0]] = self.t.target
                began = True
        for b in range(self.total):
            if b in self.made and b not in self.sent and b not in self.sending and self.may_send(b):
                self.sending[b] = self.t.transfer
                began = True
        for queue in self.of_drafter:
            todo = [b for b in queue if b not in self.used]
            if not todo or todo[0] in self.using or todo[0] not in self.sent or self.updating:
                continue
            if todo[0] // self.per_step == len(self.ends):
                self.using[todo[0]] = self.t.drafter
                began = True
        step = range(len(self.ends) * self.per_step, (len(self.ends) + 1) * self.per_step)
        if not self.updating and all(b in self.used for b in step):
            self.updating = self.t.update + self.t.reduce
            began = True
        return began

    def may_send(self, b: int) -> bool:
        for queues in (self.of_target, self.of_drafter):
            queue = next(q for q in queues if b in q)
            before = queue[: queue.index(b)]
            if any(x not in self.sent for x in before):
                return False
        posted = sum(x in self.sent or x in self.sending for x in queue) - sum(x in self.used for x in queue)
        return posted < self.depth


def draw_case(draw: random.Random) -> tuple:
    t = Times(*(draw.randrange(1, 12) for _ in range(5)))
    drafters = draw.randrange(1, 4)
    return t, draw.randrange(1, 4), drafters, drafters * draw.randrange(1, 3), draw.randrange(1, 4)


def test_the_steps_of_a_split_end_when_a_ticking_clock_says_so():
    draw = random.Random(5)
    for _ in range(60):
        case = draw_case(draw)
        assert pipeline(*case, 6)[0] == Ticking(*case, 6).run(), case


def test_two_equal_sides_or_one_slow_one_give_the_slowest_part():
    for target, drafter, transfer, update in [(10, 3, 1, 1), (3, 10, 1, 2), (5, 4, 2, 1), (2, 2, 9, 1)]:
        plan = split_plan(Times(target, drafter, transfer, update), 1, 1, 1, 2)
        slowest = max(target, drafter + update, transfer)
        assert plan.step_s == pytest.approx(slowest)
        assert plan.idle_target == pytest.approx(1 - target / slowest)
        assert plan.idle_drafter == pytest.approx(1 - (drafter + update) / slowest)
    # With one buffer nothing overlaps its own transfer.
    assert split_plan(Times(10, 3, 2, 1), 1, 1, 1, 1).step_s == pytest.approx(12)


def test_no_split_is_faster_than_its_slowest_side_and_the_steady_state_is_the_clocks():
    draw = random.Random(11)
    for _ in range(12):
        t, targets, drafters, per_step, _ = case = draw_case(draw)
        plan = split_plan(*case)
        sides = (t.target * per_step / targets, t.drafter * per_step / drafters + t.update + t.reduce)
        assert plan.step_s >= max(*sides, t.transfer * per_step / min(targets, drafters)) - 1e-9
        clock = Ticking(*case, 60)
        ends = clock.run()
        assert plan.step_s == pytest.approx((ends[-1] - ends[19]) / 40, rel=0.02), case
        idle = 1 - sum(clock.busy_target) / targets / ends[-1]
        assert plan.idle_target == pytest.approx(idle, abs=0.06), case


# ---------------------------------------------------------------------------------------------------------
# The advice


def test_the_recommended_split_is_the_best_of_all_that_a_clock_tries():
    draw = random.Random(3)
    for _ in range(6):
        t = Times(draw.randrange(2, 20), draw.randrange(2, 20), 1, draw.randrange(1, 4))
        gpus = draw.randrange(2, 5)
        listed = [p for p in plans(t, Machine(gpus), 0, 2, 0.0) if p.layout == "split"]
        assert sorted(p.drafters for p in listed) == list(range(1, gpus))
        speeds = {}
        for drafters in range(1, gpus):
            ends = Ticking(t, gpus - drafters, drafters, drafters, 2, 40).run()
            speeds[drafters] = 20 * drafters / (ends[-1] - ends[19])
        best = max(speeds, key=speeds.get)
        assert speeds[listed[0].drafters] >= 0.985 * speeds[best], (t, gpus, speeds, listed)


def test_batches_per_step_and_layout_are_kept():
    t = Times(1.0, 2.0, 0.1, 0.1)
    assert {p.drafters for p in plans(t, Machine(8), 6, 2, 1e9)} == {1, 2, 3, 6}
    assert all(p.per_step == 3 for p in plans(t, Machine(4, 2), 6, 2, 1e9))
    assert plans(t, Machine(4, 3), 8, 2, 1e9) == []  # 8 batches over 3 nodes: none


def test_an_all_reduce_hides_behind_the_backward_but_for_its_last_bucket():
    size, nvlink, link = 4e9, 100e9, 10e9
    assert exposed_reduce(size, 1, 1, nvlink, link, 0.0) == 0.0
    whole = 2 * 7 / 8 * size / nvlink
    assert exposed_reduce(size, 8, 1, nvlink, link, 0.0) == pytest.approx(whole)
    assert exposed_reduce(size, 8, 1, nvlink, link, 100.0) == pytest.approx(whole * throughput.BUCKET / size)
    assert exposed_reduce(size, 8, 1, nvlink, link, whole / 2) == pytest.approx(whole / 2)
    over = 2 * 15 / 16 * size / link  # two nodes: their link is what limits
    assert exposed_reduce(size, 8, 2, nvlink, link, 0.0) == pytest.approx(over)
    assert exposed_reduce(size, 1, 2, nvlink, link, 0.0) == pytest.approx(size / link)


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504), ("NVIDIA Nonesuch 1", 0), ("", 0),
    ],
)  # fmt: skip
def test_a_gpus_name_gives_its_ceiling(gpu, tflops):
    assert throughput.ceiling_of(gpu) == pytest.approx(tflops * 1e12 * throughput.REACHED)


def test_a_bandwidth_is_in_bits_or_bytes():
    assert throughput.parse_size("400Gb") == throughput.parse_size("50GB") == 50e9
    for text in ("400", "fastGb", "0Gb", "-1GB"):
        with pytest.raises(ValueError, match="400Gb"):
            throughput.parse_size(text)


# ---------------------------------------------------------------------------------------------------------
# Runs by their logs


class Job:
    """Writes the folder of a run from the times that its sides take (ms a batch), as train.py would."""

    def __init__(self, folder: Path, shape: str = "qwen3-8b", gpu: str = "NVIDIA H200", **flags):
        self.folder, self.gpu, self.size = folder, gpu, flags.pop("world_size", 8)
        target = folder.parent / "target"
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps(SHAPES[shape]))
        c = train.Config(target=str(target), data=["x.jsonl"], **{"token_budget": 16384, **flags})
        t = train.TargetConfig.from_folder(target)
        self.c = train.resolve(c, t, self.size, 1)
        d = train.DrafterConfig.of(t, self.c.draft_layers, self.c.block_size, self.c.taps, 0)
        ceiling = throughput.ceiling_of(gpu) or throughput.ceiling_of("NVIDIA H200")
        # At 55% of the ceiling, in ms of a batch.
        self.target = 1000 * t.prefill_flops(self.c.token_budget, max(d.ids) + 1) / ceiling / 0.55
        self.drafter = 1000 * d.step_flops(self.c.token_budget, self.c.anchors, 1000) / ceiling / 0.55
        self.link = 2.0

    def write(
        self, steps: int = 60, change=lambda m, i: None, log: str = "", state: str = "finished"
    ) -> Path:
        c, draw = self.c, random.Random(1)
        colocate = c.layout == "colocate"
        targets = self.size if colocate else (self.size - c.drafters) // c.target_tp
        of_target = self.target * c.batches_per_step / targets
        of_drafter = self.drafter * c.batches_per_step / c.drafters + 12
        of_link = self.link * c.batches_per_step / min(targets, c.drafters)
        step = of_target + of_drafter if colocate else max(of_target, of_drafter, of_link)
        lines = []
        for i in range(1, steps + 1):
            ms = step * draw.uniform(0.98, 1.04)
            m = {
                "step": i,
                "loss": 2.0,
                "step_ms": ms,
                "tokens_per_s": 0.99e3 * c.token_budget * c.batches_per_step / ms,
            }
            m |= {
                "wait_target": 1 - of_target / ms,
                "wait_drafter": 1 - of_drafter / ms,
                "wait_data": 0.01,
                "eta_s": 1.0 * (steps - i),
            }
            m = {k: max(0.0, v) for k, v in m.items()}
            change(m, i)
            m["tokens_per_s"] *= ms / m["step_ms"]
            lines.append(json.dumps(m))
        self.folder.mkdir()
        saved = dataclasses.asdict(c) | {"world_size": self.size, "gpu": self.gpu}
        (self.folder / "config.json").write_text(json.dumps(saved))
        (self.folder / "status.json").write_text(json.dumps({"state": state, "pid": 1}))
        log = log or "\n".join(
            f"gate: rank {r} (drafter) 5.1 s, 7 hits, 0 misses (leader, warm)" for r in range(c.drafters)
        )
        (self.folder / "train.log").write_text(
            f"{c.drafters} drafter(s) + {targets} target(s) on 1 node(s), cuda bfloat16\n{log}\n"
        )
        (self.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" if lines else "")
        return self.folder


@pytest.fixture
def job(tmp_path):
    return lambda **flags: Job(tmp_path / "run", **flags)


def verdicts(run: Path, capsys) -> dict[str, tuple[str, str, str]]:
    """Check: (state, message, fix)."""
    report = Report("throughput")
    throughput.judge_run(report, run)
    capsys.readouterr()
    return {c["name"]: (c["state"], c["message"], c["fix"]) for c in report.checks}


def bad(found: dict) -> set[str]:
    return {name for name, (state, *_) in found.items() if state != "ok"}


def test_a_run_near_the_ceiling_is_fine(job, capsys):
    found = verdicts(job(drafters=6).write(), capsys)
    assert not bad(found), found


def test_4_6_instead_of_20_ktok_s_with_idle_targets_is_recognised(job, tmp_path, capsys):
    """Eight GPUs of 96 GB, three of them drafters: everything runs, the loss falls, the targets idle."""
    story = dict(
        gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition", drafters=3, token_budget=8192, anchors=2048
    )
    healthy = verdicts(Job(tmp_path / "healthy", **story).write(), capsys)
    assert 17 < float(re.search(r"([\d.]+) Ktok/s", healthy["progress"][1])[1]) < 25, healthy
    assert not {name for name in bad(healthy) if "speed" in name}
    slow = job(**story)
    slow.drafter *= 4.2
    found = verdicts(slow.write(), capsys)
    assert 4 < float(re.search(r"([\d.]+) Ktok/s", found["progress"][1])[1]) < 5, found
    state, told, fix = found["drafter speed"]
    assert state == "FAIL" and fix.startswith("python bench.py step --target"), found
    assert float(re.search(r"([\d.]+) times", told)[1]) == pytest.approx(0.5 / 0.55 * 4.2, abs=0.3)
    assert found["target speed"][0] == "ok" and found["balance"][1].count("starve") == 0
    assert (
        "targets are held up" in found["balance"][1] and "drafters are the bottleneck" in found["balance"][1]
    )


def test_a_slow_data_loader_is_told_from_slow_kernels(job, capsys):
    slow = job(drafters=5)
    slow.target *= 4
    found = verdicts(slow.write(change=lambda m, i: m.update(wait_data=0.72)), capsys)
    assert found["data"][0] == "FAIL" and "72% of a step a target waits" in found["data"][1]
    assert found["target speed"][0] == found["drafter speed"][0] == "ok"


def test_data_that_nobody_waits_for_are_no_bottleneck(job, tmp_path, capsys):
    """Seven targets with slow data in front of one drafter, which they still keep busy."""
    found = verdicts(job(drafters=1).write(change=lambda m, i: m.update(wait_data=0.6)), capsys)
    assert found["data"][0] == "ok" and "no drafter" in found["data"][1]
    both = Job(tmp_path / "both", layout="colocate", drafters=8)
    both.target *= 3
    found = verdicts(both.write(change=lambda m, i: m.update(wait_data=0.3)), capsys)
    assert found["data"][0] == "warn" and "a rank waits" in found["data"][1]
    old = Job(tmp_path / "old", drafters=6).write(change=lambda m, i: m.pop("wait_data"))
    assert verdicts(old, capsys)["data"][0] == "skip"
    lost = Job(tmp_path / "lost", drafters=6).write(change=lambda m, i: m.update(wait_data=None))
    assert verdicts(lost, capsys)["data"][0] == "skip"


def test_slow_target_kernels_are_not_blamed_on_the_data(job, capsys):
    slow = job(drafters=5)
    slow.target *= 4
    found = verdicts(slow.write(), capsys)
    assert found["target speed"][0] == "FAIL" and found["data"][0] == "ok"


def test_starved_drafters_get_a_better_split_and_it_is_better(job, capsys):
    found = verdicts(job(drafters=7).write(), capsys)  # one target cannot feed seven
    state, told, fix = found["balance"]
    assert state == "warn" and "drafters starve" in told and bad(found) == {"balance"}, found
    assert "targets are the bottleneck" in told
    assert (
        "--drafters 6" in told and "--drafters 6 " in fix and "--resume" not in fix
    )  # 7 batches a step stay 7


def test_the_split_that_a_run_has_is_no_better_one(job, capsys):
    """Two ranks can only be split one way, whatever the time that neither side accounts for."""
    found = verdicts(
        job(drafters=1, world_size=2).write(
            change=lambda m, i: m.update(wait_target=0.6, wait_drafter=0.12, step_ms=1.2 * m["step_ms"])
        ),
        capsys,
    )
    state, told, fix = found["balance"]
    assert "--drafters" not in told and "--layout colocate would be" in told, told
    assert (
        state == "warn" and "--resume" not in fix and "python -m diagnose.memory" in fix
    )  # two batches a step


def test_colocate_is_named_where_it_is_faster_and_that_is_how_fast_it_is(job, capsys):
    """The drafter is always busy, the target a tenth of it: two that do both take 1.1 for two batches."""
    run = job(drafters=1, world_size=2)
    run.target = 0.1 * run.drafter
    state, told, _ = verdicts(run.write(), capsys)["balance"]
    assert state == "warn" and "--layout colocate would be 1.8 times as fast" in told, told


def test_a_target_of_several_ranks_is_not_told_to_colocate(job, capsys):
    run = job(drafters=1, world_size=3, target_tp=2)
    run.target = 0.1 * run.drafter
    state, told, _ = verdicts(run.write(), capsys)["balance"]
    assert state == "ok" and "no other split" in told, told


def test_a_run_whose_init_draft_is_gone_is_judged(launcher, small, tmp_path, capsys):
    first = launcher.run(1, tmp_path / "first", *small, "--steps", 1).good().folder
    flags = [f for f in small if f not in ("--draft-layers", "1")] + ["--init-draft", str(first)]
    later = launcher.run(1, tmp_path / "later", *flags, "--steps", 2).good().folder
    shutil.rmtree(first)
    train.shape_to_start_from.cache_clear()
    assert verdicts(later, capsys)["progress"][0] == "ok"


def test_a_split_that_a_resumed_run_may_take_is_a_command(job, capsys):
    """Six batches a step over six drafters; what halves them is a resume away."""
    slow = job(drafters=6, batches_per_step=6)
    slow.target *= 8
    state, told, fix = verdicts(slow.write(), capsys)["balance"]
    assert state == "warn" and f"--resume {slow.folder} --drafters" in fix, (told, fix)
    chosen = int(fix.split()[-1])
    speeds = {}
    for drafters in (1, 2, 3, 6):
        t = Times(round(slow.target / 100), round(slow.drafter / 100), 1, 1)
        ends = Ticking(t, 8 - drafters, drafters, 6, 2, 12).run()
        speeds[drafters] = 6 / (ends[-1] - ends[5])
    assert speeds[chosen] >= 0.97 * max(speeds.values()), speeds


def test_a_slow_link_makes_both_sides_wait(job, capsys):
    slow = job(drafters=6)
    slow.link = 2.5 * slow.drafter
    found = verdicts(slow.write(), capsys)
    state, told, fix = found["balance"]
    assert state == "FAIL" and "link" in told and "diagnose.comms" in fix


def test_steps_that_drift_and_steps_that_hang_are_told_apart(job, tmp_path, capsys):
    drifting = verdicts(
        job(drafters=6).write(change=lambda m, i: m.update(step_ms=m["step_ms"] * (1 + i / 200))), capsys
    )
    assert drifting["drift"][0] == "warn" and "slow steps" not in drifting
    again = Job(tmp_path / "again", drafters=6)
    spiky = verdicts(
        again.write(change=lambda m, i: m.update(step_ms=m["step_ms"] * (1 + 5 * (i % 10 == 0)))), capsys
    )
    assert spiky["slow steps"][0] == "warn" and spiky["drift"][0] == "ok"


def test_kernels_that_were_never_compiled_are_a_failure_on_a_gpu(job, capsys):
    log = "gate: rank 0 (drafter) 0.2 s, 0 hits, 0 misses (already compiled or eager)"
    found = verdicts(job(drafters=6).write(log=log), capsys)
    assert found["kernels"][0] == "FAIL" and "rank 0 (drafter)" in found["kernels"][1]


def test_a_cold_start_is_no_failure_and_a_missed_cache_a_warning(job, tmp_path, capsys):
    log = "gate: rank 0 (drafter) 25.5 s, 0 hits, 7 misses (leader, compiled: the cache was empty)"
    assert verdicts(job(drafters=6).write(log=log), capsys)["kernels"][0] == "ok"
    log += "\nwarning: gate: rank 1 (drafter) 20.1 s, 0 hits, 7 misses (MISSED what rank 0 compiled: device)"
    found = verdicts(Job(tmp_path / "again", drafters=6).write(log=log), capsys)
    assert found["kernels"][0] == "warn" and "rank 1" in found["kernels"][1]


def test_a_run_that_stands_still_and_one_that_has_not_begun(job, tmp_path, capsys):
    still = job(drafters=6).write(state="running")
    hour_ago = time.time() - 3600
    os.utime(still / "metrics.jsonl", (hour_ago, hour_ago))
    assert verdicts(still, capsys)["progress"][0] == "FAIL"
    new = Job(tmp_path / "new", drafters=6).write(steps=0, state="running")
    assert verdicts(new, capsys)["progress"][0] == "skip"


def test_a_small_model_bound_by_its_launches_is_not_called_broken(job, capsys):
    """SmolLM2 as measured on two H200s: a step of 39 ms, 227 Ktok/s, drafters wait 20%."""
    small = job(
        shape="smollm2-135m", world_size=2, drafters=1, token_budget=8960, anchors=2048, max_batch_size=32,
        max_length=2048, draft_layers=4, block_size=8,
    )  # fmt: skip
    small.target, small.drafter = 39.0, 19.0
    found = verdicts(small.write(), capsys)
    assert not {name for name in bad(found) if "speed" in name}, found


def test_only_what_came_after_the_last_start_is_judged(job, capsys):
    """Five slow steps with uncompiled kernels, then a resume that is fine; and lines that are damaged."""
    resumed = job(drafters=6).write(
        change=lambda m, i: m.update(step_ms=m["step_ms"] * (9 if i <= 25 else 1))
    )
    good = (resumed / "train.log").read_text()
    old = "run R | target T | x\ngate: rank 0 (drafter) 0.2 s, 0 hits, 0 misses (already compiled or eager)\n"
    now = "run R | target T | x\nresumed from R/step-000025: 25 of 60 steps done\n"
    (resumed / "train.log").write_text(old + now + good)
    with open(resumed / "metrics.jsonl", "a") as file:
        file.write('[1]\n{"step": "x"}\n{"step": 61, "step_ms": null}\n{"step": 62, "st')
    assert not bad(verdicts(resumed, capsys))
    (resumed / "train.log").write_text(old + good)
    assert "kernels" in bad(verdicts(resumed, capsys))


def test_an_unknown_gpu_is_no_verdict_on_its_speed(job, capsys):
    found = verdicts(job(drafters=6, gpu="NVIDIA Nonesuch 1").write(), capsys)
    assert found["speed"][0] == "skip"


def test_a_real_run_on_the_cpu_is_read(launcher, small, tmp_path, capsys):
    done = launcher.run(2, tmp_path / "run", *small, "--steps", 8).good()
    found = verdicts(done.folder, capsys)
    assert found["progress"][0] == found["kernels"][0] == "ok" and "finished, step 8" in found["progress"][1]
    assert found["speed"][0] == "skip" and "CRASH" not in {state for state, *_ in found.values()}


def test_python_m_diagnose_judges_the_run_that_is_going_on(tmp_path, monkeypatch, capsys):
    def asked() -> dict[str, str]:
        report = Report("diagnose")
        throughput.checks(report)
        capsys.readouterr()
        return {c["name"]: c["state"] for c in report.checks}

    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert asked() == {"runs": "ok"}
    Job(tmp_path / "runs" / "001", drafters=6).write(state="finished")
    assert asked() == {"runs": "ok"}
    Job(tmp_path / "runs" / "002", drafters=7).write(state="running")
    assert asked()["balance"] == "warn"
    (tmp_path / "runs" / "002" / "config.json").write_text("{")
    assert asked() == {"runs": "warn"}


def test_a_folder_that_is_no_run_is_one_line_and_exit_2(tmp_path, capsys):
    assert throughput.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} is no run folder" in line and line.endswith("give one such as runs/001")


@pytest.mark.parametrize(
    "key", ["step_ms", "tokens_per_s", "wait_target", "wait_drafter", "wait_data", "eta_s"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "x"], ids=["nan", "inf", "big", "text"])
def test_a_record_with_a_number_that_is_none_is_passed_over(key, value, job, capsys):
    run = job(drafters=3).write()
    before = verdicts(run, capsys)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with open(run / "metrics.jsonl", "a") as file:
        for m in lines[-40:]:
            file.write(json.dumps(m | {key: value}) + "\n")
    states = {name: state for name, (state, *_) in verdicts(run, capsys).items()}
    assert states == {name: state for name, (state, *_) in before.items()}


def test_a_damaged_run_folder_is_one_line_or_passed_over(job, capsys):
    run = job(drafters=3).write()
    good = verdicts(run, capsys)
    (run / "status.json").write_text("[" * 100_000)
    (run / "train.log").write_text("8 ranks on 0 node(s)\n" + (run / "train.log").read_text())
    assert verdicts(run, capsys).keys() == good.keys()
    (run / "status.json").write_text('{"state": "\\u001b[31mred"}')
    assert "unknown, step" in verdicts(run, capsys)["progress"][1]
    saved = json.loads((run / "config.json").read_text())
    for size in (10**30, 4096, -3):
        (run / "config.json").write_text(json.dumps(saved | {"world_size": size}))
        assert throughput.main([str(run)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(size) in line


# ---------------------------------------------------------------------------------------------------------
# The commands


def run(home: Path, *arguments: object, ranks: int = 1) -> subprocess.CompletedProcess:
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    command = [*start, "diagnose.throughput", *map(str, arguments)]
    return subprocess.run(
        command, env=environment(home), capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_both_sides_are_measured_and_every_split_is_listed(tmp_path):
    done = run(tmp_path, "--gpus", 3, "--png", tmp_path / "t.png", "--json", tmp_path / "t.json", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "t.json").read_text())
    assert {(p["layout"], p["drafters"]) for p in found["plans"]} == {
        ("split", 1),
        ("split", 2),
        ("colocate", 3),
    }
    assert all(found["alone"][k] > 0 for k in ("target", "drafter", "update", "data", "tokens", "total"))
    speeds = [p["tokens_per_s"] for p in found["plans"]]
    assert max(speeds) * 0.99 <= speeds[0] and (tmp_path / "t.png").stat().st_size > 1000
    assert f"--drafters {found['plans'][0]['drafters']}" in done.stdout or "colocate" in done.stdout


def test_under_torchrun_the_prediction_is_held_against_a_run(tmp_path):
    done = run(tmp_path, "--json", tmp_path / "t.json", *SMALL, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads((tmp_path / "t.json").read_text())["checks"]
    assert check["name"] == "prediction" and check["state"] in ("ok", "warn")
    assert check["predicted_ms"] > 0 and check["seen_ms"] > 0 and 0 <= check["wait_target"] <= 1


@pytest.mark.parametrize("targets", [1, 7])
def test_the_legend_of_a_timeline_covers_nothing(targets, tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    throughput.draw(str(tmp_path / "t.png"), throughput.split_plan(Times(0.04, 0.5), targets, 1, 1, 2))
    monkeypatch.undo()
    (figure,) = drawn
    (legend,) = figure.findobj(plt.matplotlib.legend.Legend)
    (axis,) = figure.axes
    box = legend.get_window_extent()
    assert not any(box.overlaps(x.get_window_extent()) for x in (axis, axis.xaxis.label))
    assert box.y0 >= 0
    plt.close(figure)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--simulate", "nodes=0"], "above 0"),
        (["--simulate", "link=fast"], "400Gb"),
        (["--simulate", "gpu=Abacus"], "H200"),
        (["--simulate", "target_ms=3"], "both or none"),
        (["--simulate", "speed=3"], "nodes=..."),
        (["--simulate", "gpu=H200", "--gpus", "4"], "gpus=4"),
        (["--simulate", "gpus=1000,gpu=H200"], "at most 128"),
        (["--gpus", "1000"], "at most 128"),
        (["--simulate", "target_ms=inf,drafter_ms=1"], "at most"),
        (["--simulate", "nodes=8,target_ms=1,drafter_ms=1,update_ms=inf"], "at most"),
        (["--simulate", "link=1..2Gb,gpu=H200"], "400Gb"),
        (["--nvlink", "0GB"], "--nvlink"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--token-budget", "auto"], "diagnose.memory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, told, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert throughput.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_cluster_on_paper_scales_until_its_link_is_too_slow(tmp_path, capsys):
    def speed(text: str) -> float:
        assert throughput.main(["--simulate", text, "--json", str(tmp_path / "s.json")]) == 0
        capsys.readouterr()
        return json.loads((tmp_path / "s.json").read_text())["plans"][0]["tokens_per_s"]

    times = "target_ms=40,drafter_ms=60,update_ms=5"
    one = speed(f"gpus=4,{times}")
    assert speed(f"nodes=4,gpus=4,link=400Gb,{times}") == pytest.approx(4 * one, rel=0.02)
    assert speed(f"nodes=4,gpus=4,link=0.01Gb,{times}") < 2 * one


def test_a_prediction_on_paper_names_its_target(tmp_path, capsys):
    place = Job(tmp_path / "run").c.target
    for flags, told in ([], "the built-in target"), (["--target", place], place):
        assert throughput.main(["--simulate", "nodes=8,gpus=8,gpu=H200", *flags]) == 0
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("predicted: ")]
        assert told in line


def test_a_link_that_most_of_a_step_waits_for_is_a_warning_and_its_fix_helps(tmp_path, capsys):
    place = Job(tmp_path / "run").c.target
    told = "nodes=4,gpus=4,target_ms=190,drafter_ms=490,update_ms=13,link="

    def check(link: str, *flags: str) -> dict:
        asked = ["--simulate", told + link, "--target", place, "--json", str(tmp_path / "s.json"), *flags]
        assert throughput.main(asked) == 0
        capsys.readouterr()
        return json.loads((tmp_path / "s.json").read_text())

    assert check("400Gb")["checks"][0]["state"] == "ok"
    slow = check("10Gb")
    assert slow["checks"][0]["state"] == "warn"
    better = check("10Gb", *slow["checks"][0]["fix"].split("#")[0].split())
    assert better["plans"][0]["tokens_per_s"] > 2 * slow["plans"][0]["tokens_per_s"]


def test_a_small_model_on_paper_is_bound_by_its_launches(tmp_path):
    """docs/performance.md: SmolLM2's sides alone on an H200 took 13.2 and 15.8 ms."""
    place = Job(tmp_path / "run", shape="smollm2-135m").c.target
    sizes = "--draft-layers 4 --block-size 8 --token-budget 8960 --anchors 2048 --max-length 2048"
    q = throughput.Question(["--target", str(place), *sizes.split()], 1)
    t = throughput.paper_times(q, "H200", throughput.NVLINK)
    assert 1000 * t.target == pytest.approx(13.2, rel=0.25)
    assert 1000 * t.drafter == pytest.approx(15.8, rel=0.25)
    assert throughput.ktok(1.6699e6) == "1,670 Ktok/s" and throughput.ktok(4600) == "4.6 Ktok/s"


def test_a_cluster_on_paper_with_targets_of_several_gpus(tmp_path, capsys):
    """Only splits into whole targets; more GPUs a target are faster by less than their number."""
    place = Job(tmp_path / "run").c.target

    def found(tp: int) -> list[dict]:
        told = ["--simulate", "gpus=8,gpu=H200", "--target", place, "--json", str(tmp_path / "s.json")]
        assert throughput.main([*told, "--target-tp", str(tp)]) == 0
        assert tp == 1 or f"--target-tp {tp}" in capsys.readouterr().out
        return json.loads((tmp_path / "s.json").read_text())["plans"]

    whole, shared = found(1), found(4)
    assert [(p["layout"], p["targets"], p["drafters"]) for p in shared] == [("split", 1, 4)]
    bound = [next(p for p in whole if p["targets"] == n and p["layout"] == "split") for n in (1, 4)]
    assert bound[0]["drafters"] == 7 and bound[1]["drafters"] == 4
    assert bound[0]["tokens_per_s"] < shared[0]["tokens_per_s"] <= bound[1]["tokens_per_s"]
    for flags, told in (("--target-tp 3", "evenly"), ("--target-tp 2 --layout colocate", "colocate")):
        assert throughput.main(["--target", place, *flags.split()]) == 2
        assert told in capsys.readouterr().err


def test_the_log_of_a_run_with_shared_targets_is_judged(job, tmp_path, capsys):
    """Two targets of two GPUs and four drafters: a target's work is divided by its GPUs."""
    good = job(drafters=4, target_tp=2)
    good.target /= 2
    gates = [f"gate: rank {r} (drafter) 5.1 s, 7 hits, 0 misses (leader, warm)" for r in range(4)]
    gates += [f"gate: rank {r} (target {r // 2 - 2}, part {r % 2 + 1} of 2) 1.0 s, 2 hits, 0 misses (warm)"
              for r in range(4, 8)]  # fmt: skip
    found = verdicts(good.write(log="\n".join(gates)), capsys)
    assert not {name for name in bad(found) if name != "balance"}, found
    assert found["kernels"][1].startswith("8 rank(s)")
    slow = Job(tmp_path / "slow", drafters=4, target_tp=2)
    slow.target *= 2
    gates[5] = gates[5].replace("2 hits", "0 hits")
    found = verdicts(slow.write(log="\n".join(gates)), capsys)
    assert found["target speed"][0] == "FAIL" and found["kernels"][0] == "FAIL"
    assert "rank 5 (target 0, part 2 of 2)" in found["kernels"][1]
