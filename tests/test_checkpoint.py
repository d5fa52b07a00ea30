"""What a run leaves on disk comes back as it was, or is refused in one line; exports are what others load."""

import copy
import dataclasses
import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file

import checkpoint
import model
from world import UserError


def make_drafter(layers: int = 2, seed: int = 0, **changes) -> model.Drafter:
    """A drafter for the built-in target whose every weight differs from the initial ones."""
    config = model.DrafterConfig.of(model.TargetConfig.from_folder(TINY), layers, 8, 5, 4)
    config = dataclasses.replace(config, **changes)
    drafter = model.Drafter(config, *model.load_embedding_and_head(TINY, "cpu", torch.float32), seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.1 * p.abs().mean() * torch.randn(p.shape, generator=g))
    return drafter


def adam(drafter: model.Drafter) -> torch.optim.AdamW:
    return torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train_a_little(drafter: model.Drafter, optimizer: torch.optim.AdamW, steps: int) -> None:
    for step in range(steps):
        for number, p in enumerate(drafter.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number))
        optimizer.step()


def save(run, step: int, drafter, optimizer, keep: int = 0):
    return checkpoint.save(run, step, drafter, optimizer, {"next_batch": 2 * step, "config": {}}, keep)


def block_outputs(drafter: model.Drafter) -> tuple[torch.Tensor, torch.Tensor]:
    """(final states of every slot, logits) for a few blocks on two packed documents."""
    g = torch.Generator().manual_seed(5)
    T = 128
    doc_T = torch.tensor([0] * 60 + [1] * 50 + [-1] * (T - 110), dtype=torch.int32)
    positions_T = torch.cat([torch.arange(60), torch.arange(50), torch.zeros(T - 110, dtype=torch.int64)])
    tokens_T = torch.randint(20, 1000, (T,), generator=g)
    anchors_A = torch.tensor([3, 20, 57, 70, 100, -1])
    blocks = model.make_blocks(tokens_T, positions_T, doc_T, doc_T >= 0, anchors_A, 8, 4.0, 4)
    features_TKH = torch.randn(T, len(drafter.c.ids) * drafter.c.hidden, generator=g)
    with torch.no_grad():
        hidden_SH = drafter.hidden(drafter.context_keys_values(features_TKH, positions_T), blocks)
    return hidden_SH, hidden_SH @ drafter.head.T


# ---------------------------------------------------------------------------------------------------------
# Checkpoints


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    drafter = make_drafter()
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 3)
    place = save(tmp_path, 3, drafter, optimizer)
    other = make_drafter(seed=7)
    other_optimizer = adam(other)
    state = checkpoint.load(place, other, other_optimizer)
    assert state["step"] == 3 and state["next_batch"] == 6 and state["versions"]["torch"] == torch.__version__
    assert state["drafter"] == json.loads(json.dumps(dataclasses.asdict(drafter.c)))
    for d, o in ((drafter, optimizer), (other, other_optimizer)):
        train_a_little(d, o, 2)  # the moments and their step counts came back too
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))
    for a, b in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_keep_removes_the_oldest(tmp_path):
    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    for step in (2, 4, 6, 1000000):
        save(tmp_path, step, drafter, optimizer, keep=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-000006", "step-1000000"]
    assert {p.name for p in tmp_path.iterdir()} == {"step-000006", "step-1000000"}
    save(tmp_path, 6, drafter, optimizer)  # a step that a resumed run reaches again
    assert checkpoint.find_checkpoint(tmp_path / "step-000006") == (tmp_path, tmp_path / "step-000006")


@pytest.mark.parametrize("moment", ["save_file", "torch.save", "export", "os.rename"])
def test_a_save_that_fails_leaves_no_torn_checkpoint(tmp_path, monkeypatch, moment):
    """A full disk, or a kill, at each stage: the older checkpoint stays the newest whole one."""
    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    run = checkpoint.RunFolder(tmp_path / "run")
    old = save(run.path, 2, drafter, optimizer, keep=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    holder = {"torch.save": (torch, "save"), "os.rename": (os, "rename")}.get(moment, (checkpoint, moment))
    monkeypatch.setattr(*holder, full)
    with pytest.raises(OSError):
        save(run.path, 4, drafter, optimizer, keep=1)
    monkeypatch.undo()
    assert checkpoint.checkpoints(run.path) == [old]
    checkpoint.load(old, make_drafter(layers=1), adam(make_drafter(layers=1)))
    assert list(run.path.glob(".step-*"))  # what was being written: swept by the next job in this folder
    run._lock.close()
    checkpoint.RunFolder(run.path)
    assert not list(run.path.glob(".step-*")) and checkpoint.checkpoints(run.path) == [old]


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that takes nothing until it is told to: (started, go on)."""
    started, go_on, sync = threading.Event(), threading.Event(), checkpoint.sync

    def slowly(path):
        started.set()
        assert go_on.wait(30)
        sync(path)

    monkeypatch.setattr(checkpoint, "sync", slowly)
    yield started, go_on
    go_on.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, slow_disk):
    """What is on disk is what stood at that step, whatever happened meanwhile; nothing is seen before."""
    started, go_on = slow_disk
    drafter, said = make_drafter(layers=1), []
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 3)
    then = copy.deepcopy([drafter.state_dict(), optimizer.state_dict()])
    saver = checkpoint.Saver(tmp_path, 1, said.append)
    saver.save(3, drafter, optimizer, {"next_batch": 6, "config": {}})
    for _ in range(2):
        saver.before_update()
        train_a_little(drafter, optimizer, 1)
    assert started.wait(30) and checkpoint.checkpoints(tmp_path) == [] and said == []  # a kill here: none
    go_on.set()
    saver.wait()
    (place,) = checkpoint.checkpoints(tmp_path)
    assert said == [f"saved {place} (export: {place / 'export'})"]
    other = make_drafter(layers=1, seed=7)
    other_optimizer = adam(other)
    assert checkpoint.load(place, other, other_optimizer)["step"] == 3
    now = [other.state_dict(), other_optimizer.state_dict()]
    assert all(torch.equal(now[0][k], then[0][k]) for k in then[0])
    for i, entry in then[1]["state"].items():
        assert all(torch.equal(now[1]["state"][i][k], entry[k]) for k in entry)
    assert not torch.equal(next(other.parameters()), next(drafter.parameters()))  # it did go on
    exported = checkpoint.load_drafter(place / "export", TINY)
    assert all(
        torch.equal(a.bfloat16(), b.bfloat16())
        for a, b in zip(exported.parameters(), other.parameters(), strict=True)
    )


def test_checkpoints_are_written_one_at_a_time_and_pruned_when_whole(tmp_path, slow_disk):
    started, go_on = slow_disk
    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    go_on.set()
    old = save(tmp_path, 1, drafter, optimizer)
    saver = checkpoint.Saver(tmp_path, 1, lambda line: None)
    started.clear()
    go_on.clear()
    saver.save(2, drafter, optimizer, {"next_batch": 4, "config": {}})
    assert started.wait(30) and checkpoint.checkpoints(tmp_path) == [old]
    second = threading.Thread(
        target=saver.save, args=(3, drafter, optimizer, {"next_batch": 6, "config": {}})
    )
    second.start()
    second.join(0.3)
    assert second.is_alive()  # it waits for the one before
    go_on.set()
    second.join(30)
    saver.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize("moment", ["save_file", "export"])
def test_an_error_while_writing_ends_the_run(tmp_path, monkeypatch, moment):
    """It is raised by the next step, or by the next save, or at the end."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    saver = checkpoint.Saver(tmp_path, 1, lambda line: None)
    monkeypatch.setattr(checkpoint, moment, full)
    saver.before_update()
    saver.save(1, drafter, optimizer, {"next_batch": 2, "config": {}})
    saver.thread.join(30)
    for call in (saver.before_update, saver.wait, lambda: saver.save(2, drafter, optimizer, {})):
        with pytest.raises(UserError, match=r"step 1 could not be written .*No space left.*--resume"):
            call()
    assert checkpoint.checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "config.json", "curves.png"])
def test_a_full_disk_is_one_line_and_the_status_still_says_failed(tmp_path, monkeypatch, name):
    """/dev/full takes nothing, as a full disk does; what is there already may be written over."""
    run = checkpoint.RunFolder(tmp_path)
    run.open_metrics(0)
    run.write_metrics(
        {"step": 1, "loss": 1.0, "acc_len": 1, "tokens_per_s": 1, "wait_target": 0, "wait_drafter": 0}
    )
    run.write_status("running", why="x" * 100)
    run.log_file = run.metrics_file = open("/dev/full", "w", buffering=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(os, "replace", full)
    call = {
        "train.log": lambda: run.say("line"), "metrics.jsonl": lambda: run.write_metrics({"step": 2}),
        "config.json": lambda: run.write_config({}),
        "curves.png": lambda: checkpoint.draw_curves(tmp_path, "x"),
    }[name]  # fmt: skip
    with pytest.raises(UserError, match=rf"{name} could not be written \(No space left.*--resume"):
        call()
    run.write_status("failed", why="full")
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "failed", "why": "full"}


def damage(path, how: str) -> None:
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "noise": b"\x93noise" * 99}[how])


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "noise"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json"])
def test_a_damaged_checkpoint_is_refused(tmp_path, name, how):
    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    place = save(tmp_path, 1, drafter, optimizer)
    damage(place / name, how)
    if name == "state.json" and how == "gone":
        assert checkpoint.checkpoints(tmp_path) == []
    with pytest.raises(ValueError, match=r"step-000001.*resume from an older step") as error:
        checkpoint.load(place, make_drafter(layers=1), adam(make_drafter(layers=1)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "state", ["[]", "{}", '{"step": "x", "next_batch": 1}', '{"step": -1, "next_batch": 0}']
)
def test_a_state_without_a_step_is_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(ValueError, match=r"state\.json"):
        checkpoint.read_state(tmp_path)


def test_a_checkpoint_of_another_drafter_is_refused(tmp_path):
    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    place = save(tmp_path, 1, drafter, optimizer)
    for other in (make_drafter(layers=2), make_drafter(layers=1, intermediate=128)):
        with pytest.raises(ValueError, match="not a whole checkpoint of this drafter"):
            checkpoint.load(place, other, adam(other))
    moments = torch.load(place / "optimizer.pt", weights_only=True)
    moments["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(moments, place / "optimizer.pt")
    with pytest.raises(ValueError, match=r"moments of \[3\]"):
        checkpoint.load(place, drafter, optimizer)


def test_an_optimizer_file_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    drafter = make_drafter(layers=1)
    optimizer = adam(drafter)
    train_a_little(drafter, optimizer, 1)
    place = save(tmp_path, 1, drafter, optimizer)
    torch.save({"state": Evil(), "param_groups": []}, place / "optimizer.pt")
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        checkpoint.load(place, drafter, optimizer)
    assert not (tmp_path / "owned").exists()


# ---------------------------------------------------------------------------------------------------------
# The run folder


def test_runs_are_numbered(tmp_path):
    root = tmp_path / "runs"
    assert [checkpoint.next_free_run(root).name for _ in range(2)] == ["001", "002"]
    for name in ("007", "notes", "12x"):
        (root / name).mkdir()
    assert checkpoint.next_free_run(root).name == "008"
    (root / "999").mkdir()
    assert checkpoint.next_free_run(root).name == "1000"


def test_steps_that_are_passed_over_are_named(tmp_path):
    for step in (3, 6, 9):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / "step-000006" / "state.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    run, place = checkpoint.find_checkpoint(tmp_path)
    assert checkpoint.passed_over(run, place) == [f"{tmp_path}/step-000009 has no state.json: passed over"]
    (place / "state.json").unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint, step-000009 has no state\.json: put it back"):
        checkpoint.find_checkpoint(tmp_path)
    for step in (3, 6, 9):
        (tmp_path / f"step-{step:06d}").rmdir()
    run, place = checkpoint.find_checkpoint(tmp_path)
    assert place is None and checkpoint.passed_over(run, place) == [
        f"{tmp_path} has no checkpoint yet: from step 0 on"
    ]


def test_a_folder_has_one_job(tmp_path):
    first = checkpoint.RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match="another job runs in this folder: wait for its end"):
        checkpoint.RunFolder(tmp_path / "run")
    checkpoint.write_status(first.path, "running")
    checkpoint.note_failure(first.path, "the first job is gone")  # it is not
    assert json.loads((first.path / "status.json").read_text())["state"] == "running"
    first._lock.close()  # as when the process dies
    checkpoint.note_failure(first.path, "the first job is gone")
    status = json.loads((first.path / "status.json").read_text())
    assert status == {"state": "failed", "why": "the first job is gone"}
    checkpoint.write_status(first.path, "finished")
    checkpoint.note_failure(first.path, "too late")
    assert json.loads((first.path / "status.json").read_text())["state"] == "finished"
    checkpoint.RunFolder(tmp_path / "run")


def test_metrics_go_on_after_the_resumed_step(tmp_path):
    """Later lines, a line cut off by a crash and later checkpoints do not stay in the way."""
    run = checkpoint.RunFolder(tmp_path)
    assert run.open_metrics(0) == []
    for step in range(6):
        run.write_metrics({"step": step, "loss": 1 / 3 if step != 2 else float("nan")})
    run.metrics_file.write('{"step": 6, "lo')
    run.metrics_file.close()
    for step in (2, 4):
        (tmp_path / f"step-00000{step}").mkdir()
        (tmp_path / f"step-00000{step}" / "state.json").write_text("{}")
    assert [m["step"] for m in checkpoint.read_metrics(tmp_path)] == list(range(6))
    said = run.open_metrics(3)
    run.write_metrics({"step": 4, "loss": 2.0})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["loss"]) for m in records] == [
        (0, 1 / 3),
        (1, 1 / 3),
        (2, None),
        (3, 1 / 3),
        (4, 2.0),
    ]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-000002"]
    assert len(said) == 1 and (tmp_path / "aside-step-000004" / "state.json").exists()
    run.open_metrics(0)  # killed before its first checkpoint: step 0 is evaluated anew
    assert checkpoint.read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    "damage", [b"", b"[1]", b"7", b"null", b'{"loss": 1}', b'{"step": "a"}', b"\0\xff", b"[" * 9999]
)
def test_a_damaged_line_of_metrics_costs_that_line(tmp_path, damage):
    good = [b'{"step": %d, "loss": 1.0, "eval_loss": 1.0}' % step for step in range(4)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*good[:2], damage, *good[2:], b""]))
    assert [m["step"] for m in checkpoint.read_metrics(tmp_path)] == [0, 1, 2, 3]
    checkpoint.draw_curves(tmp_path, "no speed or waits in them, as in an older version's")
    checkpoint.RunFolder(tmp_path).open_metrics(2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [0, 1, 2]


def test_curves_of_a_long_run_take_no_more_memory(tmp_path):
    """Evenly spread steps and every evaluation, however long the run is."""
    run = checkpoint.RunFolder(tmp_path)
    run.open_metrics(0)
    for step in range(5001):
        run.write_metrics({"step": step, "loss": 1.0} | ({} if step % 777 else {"eval_loss": 2.0}))
    some, evaluated = checkpoint.read_metrics(tmp_path, 100), set(range(0, 5001, 777))
    assert {m["step"] for m in some if "eval_loss" in m} == evaluated
    spread = [m["step"] for m in some if m["step"] not in evaluated]
    assert 100 - len(evaluated) <= len(spread) < 200 and spread[-1] > 4900
    assert max(b - a for a, b in itertools.pairwise(spread)) <= 100
    assert len(checkpoint.read_metrics(tmp_path)) == 5001


def test_find_checkpoint_takes_the_newest_or_the_named(tmp_path):
    with pytest.raises(ValueError, match="neither a run folder nor a checkpoint"):
        checkpoint.find_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.find_checkpoint(tmp_path) == (tmp_path, None)
    for step in (2, 10):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "state.json").write_text("{}")
    (tmp_path / "step-000012").mkdir()  # not whole
    assert checkpoint.find_checkpoint(tmp_path) == (tmp_path, tmp_path / "step-000010")
    named = tmp_path / "step-000002"
    assert checkpoint.find_checkpoint(named) == (tmp_path, named)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\xff"])
def test_a_damaged_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        checkpoint.read_config(tmp_path)


def test_curves_survive_a_skipped_step(tmp_path):
    one = {"loss": 2.0, "acc_len": 1.5, "tokens_per_s": 10.0, "wait_target": 0.1, "wait_drafter": 0.2}
    lines = [{"step": 0, "eval_loss": 6.9, "eval_acc_len": 1.0, "eval_tau": 1.0}]
    lines += [{"step": 1, **one}, {"step": 2, **one, "loss": None}, {"step": 3, **one}]
    lines += [lines[0] | {"step": 3, "decode_tau": 1.5}]  # --eval-decode was given to the resumed run only
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    checkpoint.draw_curves(tmp_path, "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------
# Export


def published_names(layers: int) -> set[str]:
    """The names that other readers know."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(layers):
        names |= {f"layers.{i}.self_attn.{x}_proj.weight" for x in "qkvo"}
        names |= {f"layers.{i}.self_attn.{x}_norm.weight" for x in "qk"}
        names |= {f"layers.{i}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
        names |= {f"layers.{i}.{x}_layernorm.weight" for x in ("input", "post_attention")}
    return names


def test_an_export_gives_the_trained_drafters_block_outputs(tmp_path):
    """Of its weights rounded to bf16, exactly."""
    drafter = make_drafter(layers=3)
    checkpoint.export(drafter, tmp_path)
    back = checkpoint.load_drafter(tmp_path, TINY)
    assert back.c == drafter.c
    exact, _ = block_outputs(drafter)
    with torch.no_grad():
        for p in drafter.parameters():
            p.copy_(p.bfloat16())
    wanted, logits = block_outputs(drafter)
    got, got_logits = block_outputs(back)
    assert torch.equal(got, wanted) and torch.equal(got_logits, logits)
    assert not torch.equal(exact, wanted) and got.isfinite().all() and got[:40].abs().max() > 0.1


def test_an_export_has_the_published_names_and_fields(tmp_path):
    checkpoint.export(make_drafter(layers=2), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == published_names(2)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert weights["fc.weight"].shape == (128, 5 * 128)
    c = json.loads((tmp_path / "config.json").read_text())
    t = json.loads((TINY / "config.json").read_text())
    assert c["architectures"] == ["DFlashDraftModel"] and c["model_type"] == "qwen3"
    assert c["dflash_config"] == {"target_layer_ids": [0, 1, 2, 3, 4], "mask_token_id": 4}
    assert c["block_size"] == 8 and c["num_hidden_layers"] == 2 and c["hidden_act"] == "silu"
    assert c["layer_types"] == ["full_attention"] * 2 and c["num_target_layers"] == t["num_hidden_layers"]
    assert c["rope_parameters"]["rope_theta"] == c["rope_theta"] == t["rope_theta"]
    assert "rope_scaling" in c and c["head_dim"] == 32
    for name in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    ):
        assert c[name] == t[name]


def test_rope_scaling_and_windows_survive_an_export(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    drafter = make_drafter(layers=2, rope_scaling=scaling, windows=(0, 16))
    checkpoint.export(drafter, tmp_path)
    back = checkpoint.load_drafter(tmp_path, TINY)
    assert back.c == drafter.c and torch.equal(back.freq, drafter.freq)


@pytest.mark.parametrize("what", ["missing", "unknown", "shape", "no config", "other target", "cut", "field"])
def test_an_export_that_does_not_fit_is_refused(tmp_path, what):
    checkpoint.export(make_drafter(layers=1), tmp_path / "export")
    target, export = TINY, tmp_path / "export"
    weights = load_file(export / "model.safetensors")
    config = json.loads((export / "config.json").read_text())
    if what == "missing":
        del weights["layers.0.mlp.up_proj.weight"]
    elif what == "unknown":
        weights["embed_tokens.weight"] = torch.zeros(2, 2)
    elif what == "shape":
        weights["norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    elif what == "field":
        del config["dflash_config"]["mask_token_id"]
    elif what == "other target":
        target = shutil.copytree(TINY, tmp_path / "target", ignore=shutil.ignore_patterns("*.jsonl", "*.py"))
        other = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 5}
        (target / "config.json").write_text(json.dumps(other))
    save_file(weights, export / "model.safetensors")
    (export / "config.json").write_text(json.dumps(config))
    if what == "no config":
        (export / "config.json").unlink()
    elif what == "cut":
        damage(export / "model.safetensors", "cut")
    with pytest.raises(ValueError, match="export") as error:
        checkpoint.load_drafter(export, target)
    assert "\n" not in str(error.value)
