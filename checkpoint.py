"""What a run leaves on disk: its folder, checkpoints to resume from, exports for servers, metrics, curves.

Whatever must be whole is written beside its place and renamed, so a torn checkpoint is never seen.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pickle
import pickletools
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data import read_json, short
from model import (
    DFLASH2,
    FLOATS,
    MOST_LAYERS,
    WIDEST,
    Drafter,
    DrafterConfig,
    TargetConfig,
    check_heads,
    layer_kinds,
    load_embedding_and_head,
    number,
    open_weights,
    parse_rope,
    real,
    switch,
    tap_layers,
    weight_files,
)
from world import UserError

EXPORT_DTYPE = torch.bfloat16
BROKEN = (  # what reading a damaged file raises, besides ValueError
    OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError,
    EOFError, MemoryError, pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip
TENSOR_PARTS = {  # all that the pickle of an optimizer's state names
    "collections OrderedDict", "torch FloatStorage", "torch._utils _rebuild_tensor_v2",
}  # fmt: skip


def reason(error: BaseException) -> str:
    """One line of an error of a library."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return short(text, 200)


def write_whole(path: Path, text: str) -> None:
    """Write a small file beside and rename it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


# ---------------------------------------------------------------------------------------------------------
# The run folder


def next_free_run(root: Path = Path("runs")) -> Path:
    """Make `runs/NNN`, one above the highest there; two jobs that ask at once get two."""
    while True:
        taken = [int(p.name) for p in root.glob("[0-9]*") if p.name.isdigit()] if root.is_dir() else []
        run = root / f"{max(taken, default=0) + 1:03d}"
        try:
            run.mkdir(parents=True)
            return run
        except FileExistsError:
            continue


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first."""
    found = (p for p in run.glob("step-[0-9]*") if p.name[5:].isdigit() and (p / "state.json").is_file())
    return sorted(found, key=lambda p: int(p.name[5:]))


def find_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint) of a `--resume` path: a run folder (its newest, None if it has none yet) or
    one.
    """
    if (path / "state.json").is_file():
        return path.parent, path
    if not (path / "config.json").is_file():
        raise ValueError(
            f"--resume {path}: neither a run folder nor a checkpoint: give RUN or RUN/step-NNNNNN"
        )
    newest = (checkpoints(path) or [None])[-1]
    if not newest and (damaged := damaged_steps(path)):  # to start over would delete what is left of it
        raise ValueError(
            f"--resume {path}: no whole checkpoint, {damaged[-1].name} has no state.json: put it back, or "
            "start a new run"
        )
    return path, newest


def damaged_steps(run: Path, after: int = 0) -> list[Path]:
    """Checkpoints later than a step that are not whole, oldest first; a killed job leaves none."""
    found = (p for p in run.glob("step-[0-9]*") if p.name[5:].isdigit() and int(p.name[5:]) > after)
    return sorted(p for p in found if not (p / "state.json").is_file())


def passed_over(run: Path, place: Path | None) -> list[str]:
    """What a resume from `place` says of later steps whose folders are damaged, and of none at all."""
    if not place:
        return [f"{run} has no checkpoint yet: from step 0 on"]
    after = int(place.name[5:]) if place.name[5:].isdigit() else 0
    return [f"{p} has no state.json: passed over" for p in damaged_steps(run, after)]


def read_config(run: Path) -> dict:
    """The saved config of a run; ValueError if it is none."""
    saved = read_json(run / "config.json", "start the run anew")
    if saved is None:
        raise ValueError(f"{run}/config.json: not there: start the run anew")
    return saved


def note_failure(run: Path, why: str) -> None:
    """For a rank other than 0: if rank 0 is gone without a word (its lock is free), say it in its place."""
    try:
        with open(run / ".lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                over = json.loads((run / "status.json").read_text(encoding="utf-8"))["state"] != "running"
            except (ValueError, KeyError, TypeError):  # damaged: what is known now is better
                over = False
            if not over:
                write_status(run, "failed", why=why)
    except (BlockingIOError, FileNotFoundError):  # it lives and writes itself, or is on another machine
        pass


def write_status(run: Path, state: str, **more: Any) -> None:
    path, text = run / "status.json", json.dumps({"state": state, **more}, indent=2) + "\n"
    try:
        write_whole(path, text)
    except OSError:  # a full disk, a read-only folder: over the old one, which has its place on the disk
        with open(path, "r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


@contextlib.contextmanager
def writing(run: Path, what: str = "") -> Iterator[None]:
    """What cannot be written is the user's to mend: one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{run}: {what or 'it'} could not be written ({error.strerror or error}): make room or give "
            f"write access, then go on with --resume {run}"
        ) from None


class RunFolder:
    """What rank 0 writes while a run goes on: config, status, log, metrics. Locked against a second job."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{path}: another job runs in this folder: wait for its end, or give a new --out"
            ) from None
        for pattern in (".step-*", ".curves.*", ".*.json*.*"):  # what a killed job was writing
            for left in path.glob(pattern):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        self.log_file = open(path / "train.log", "a", buffering=1, encoding="utf-8")
        self.metrics_file = None

    def say(self, line: str) -> None:
        """One line to the console and to train.log."""
        sys.stdout.write(line + "\n")  # in one piece: the thread that saves says something too
        sys.stdout.flush()
        with writing(self.path, "train.log"):
            self.log_file.write(line + "\n")

    def write_config(self, config: dict) -> None:
        with writing(self.path, "config.json"):
            write_whole(self.path / "config.json", json.dumps(config, indent=2) + "\n")

    def write_status(self, state: str, **more: Any) -> None:
        """status.json: running, finished, stopped or failed, and why."""
        write_status(self.path, state, **more)

    def open_metrics(self, step: int) -> list[str]:
        """Append to metrics.jsonl after `step`. Lines of later steps are dropped and their checkpoints set
        aside, since those steps will be done again; returns what to tell the user of that.
        """
        path, said = self.path / "metrics.jsonl", []
        done = read_metrics(self.path) if step else []  # step 0 is evaluated anew
        kept = [json.dumps(m) + "\n" for m in done if m["step"] <= step]
        write_whole(path, "".join(kept))
        self.metrics_file = open(path, "a", buffering=1, encoding="utf-8")
        for later in checkpoints(self.path):
            if int(later.name[5:]) > step:
                aside = self.path / f"aside-{later.name}"
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(later, aside)
                said.append(f"{later} comes after the step resumed from: set aside as {aside}")
        return said

    def write_metrics(self, record: dict) -> None:
        """With the time, in Unix seconds. A loss that is not finite is null: JSON knows no NaN."""
        record = record | {"time": time.time()}
        with writing(self.path, "metrics.jsonl"):
            self.metrics_file.write(json.dumps({k: finite(v) for k, v in record.items()}) + "\n")


def finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run: Path, most: int = 0) -> list[dict]:
    """The records of metrics.jsonl without damaged lines, such as one cut off by a crash. With `most`: that
    many (fewer than twice) evenly spread steps and every evaluation, in memory that does not grow with the
    run.
    """
    path, records = run / "metrics.jsonl", []
    if not path.exists():
        return records
    with open(path, encoding="utf-8", errors="replace") as file:
        every = max(1, sum(1 for _ in file) // most) if most else 1
        file.seek(0)
        for i, line in enumerate(file):
            if i % every and '"eval_loss"' not in line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
    return records


def draw_curves(run: Path, title: str, training: str = "training") -> None:
    """curves.png: loss, acceptance, speed and waits over the steps. `training`: what its loss is called."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = read_metrics(run, 1000)
    train = [m for m in records if "loss" in m]
    held_out = [m for m in records if "eval_loss" in m]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    panels = (
        (axes[0, 0], "loss (cross-entropy, nats)", [("loss", training)], [("eval_loss", "held out")]),
        (
            axes[0, 1],
            "tokens per target pass",
            [("acc_len", "training acc_len (teacher-forced)")],
            [
                ("eval_acc_len", "held-out acc_len"),
                ("eval_tau", "held-out tau"),
                ("decode_tau", "decoded (tau of --eval-decode)"),
            ],
        ),
        (axes[1, 0], "context tokens/s", [("tokens_per_s", "all drafters")], []),
        (
            axes[1, 1],
            "share of the step waited",
            [("wait_target", "targets"), ("wait_drafter", "drafters")],
            [],
        ),
    )
    for axis, label, per_step, per_evaluation in panels:
        for name, text in per_step:
            axis.plot([m["step"] for m in train], [m.get(name) for m in train], lw=0.8, alpha=0.6, label=text)
        for name, text in per_evaluation:
            points = [(m["step"], m[name]) for m in held_out if name in m]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", ms=4, label=text)
        axis.set(xlabel="step", ylabel=label)
        axis.grid(alpha=0.3)
        if per_step or held_out:
            axis.legend(fontsize=8)
    axes[1, 1].set_ylim(0, 1)
    figure.suptitle(title)
    beside = run / f".curves.{os.getpid()}.png"
    with writing(run, "curves.png"):
        figure.savefig(beside, dpi=110)
        os.replace(beside, run / "curves.png")
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


@dataclasses.dataclass
class Snapshot:
    """A drafter and its optimizer as they are after a step, in CPU memory: training may go on."""

    c: DrafterConfig
    weights: dict[str, Tensor]
    moments: dict  # optimizer.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights


def take_snapshot(drafter: Drafter, optimizer: torch.optim.Optimizer, kept: dict[str, Tensor]) -> Snapshot:
    """Copy into `kept` (made at the first call; pinned for a GPU, from which this returns at once)."""

    def copy(name: str, tensor: Tensor) -> Tensor:
        if name not in kept:
            kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return kept[name].copy_(tensor.detach(), non_blocking=True)

    weights = {name: copy(name, p) for name, p in drafter.state_dict().items()}
    moments = optimizer.state_dict()
    state = {
        i: {name: copy(f"{i} {name}", value) for name, value in entry.items()}
        for i, entry in moments["state"].items()
    }
    return Snapshot(drafter.c, weights, {**moments, "state": state})


def save(
    run: Path, step: int, drafter: Drafter, optimizer: torch.optim.Optimizer, state: dict, keep: int
) -> Path:
    """Write the checkpoint of a step and wait for it."""
    return write(run, step, take_snapshot(drafter, optimizer, {}), state, keep)


def write(run: Path, step: int, snapshot: Snapshot, state: dict, keep: int) -> Path:
    """Write `step-NNNNNN/` (fp32 weights, optimizer, state, export) whole or not at all; keep the newest
    `keep`.
    """
    place = run / f"step-{step:06d}"
    beside = run / f".{place.name}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    save_file(snapshot.weights, beside / "model.safetensors", metadata={"format": "pt"})
    torch.save(snapshot.moments, beside / "optimizer.pt")
    export(snapshot, beside / "export")
    state = {"step": step, "drafter": dataclasses.asdict(snapshot.c), "versions": versions(), **state}
    (beside / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    for path in [*beside.rglob("*"), beside]:
        sync(path)
    if place.exists():  # a resumed run reaches this step again
        remove(place)
    os.rename(beside, place)
    sync(run)
    for old in checkpoints(run)[:-keep] if keep else ():
        remove(old)
    return place


def remove(place: Path) -> None:
    """Out of sight first: a kill in between leaves no half of a checkpoint."""
    hidden = place.with_name(f".{place.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(place, hidden)
    shutil.rmtree(hidden)


class Saver:
    """Writes checkpoints in a thread, one at a time: the step waits for a copy in memory, never for the
    disk.

    What the thread meets is raised by the next call here. From a GPU the copy runs beside the next forward
    and backward; only the update that follows waits for it, on the device.
    """

    def __init__(self, run: Path, keep: int, say: Callable[[str], None]):
        self.run, self.keep, self.say = run, keep, say
        self.kept: dict[str, Tensor] = {}
        self.thread, self.error = threading.Thread(), None
        self.side: torch.cuda.Stream | None = None
        self.copied: torch.cuda.Event | None = None

    def save(self, step: int, drafter: Drafter, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """Take this step's snapshot and begin to write it, once the one before is written."""
        self.wait()
        if next(drafter.parameters()).is_cuda:
            self.side = self.side or torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                snapshot = take_snapshot(drafter, optimizer, self.kept)
                self.copied = self.side.record_event()
        else:
            snapshot = take_snapshot(drafter, optimizer, self.kept)
        self.thread = threading.Thread(target=self._write, args=(step, snapshot, state), daemon=True)
        self.thread.start()

    def _write(self, step: int, snapshot: Snapshot, state: dict) -> None:
        try:
            if self.copied is not None:
                self.copied.synchronize()
            with writing(self.run, f"the checkpoint of step {step}"):
                place = write(self.run, step, snapshot, state, self.keep)
            self.say(f"saved {place} (export: {place / 'export'})")
        except BaseException as error:  # whatever it is, the main thread must end with it
            self.error = error

    def before_update(self) -> None:
        """The update of the next step may change what is being copied: let the device wait for the copy."""
        self.check()
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the last checkpoint is written; raises what kept it from that."""
        if self.thread.ident is not None:
            self.thread.join(timeout_s)
        self.check()


def sync(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(place: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict:
    """Restore weights and optimizer of a checkpoint into place; returns its state. ValueError if it is not
    whole.
    """
    state, fix = read_state(place), "resume from an older step"
    try:
        weights = load_file(place / "model.safetensors")
        if odd := [name for name, w in weights.items() if not w.isfinite().all()]:
            raise ValueError(f"{odd[0]} is not finite")
        drafter.load_state_dict(weights)
        fix += f", or begin a new run with its weights: --init-draft {place}"
        device = next(drafter.parameters()).device
        moments = read_moments(place / "optimizer.pt", device)
        check_moments(moments, optimizer, state["step"])
        # How to step is the run's to say, never the file's.
        optimizer.load_state_dict(moments | {"param_groups": optimizer.state_dict()["param_groups"]})
    except BROKEN as error:
        raise ValueError(
            f"{place}: not a whole checkpoint of this drafter ({reason(error)}): {fix}"
        ) from None
    return state


def read_moments(path: Path, device: torch.device) -> dict:
    """The optimizer's state. Before it is unpickled, with weights only: the archive holds what it says, and
    its pickle names nothing but tensors (weights_only alone lets it ask for any amount of memory).
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        whole = sum(e.file_size for e in entries) <= path.stat().st_size
        if not whole or any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("optimizer.pt is a compressed archive")
        pickled = [e for e in entries if e.filename.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("optimizer.pt holds no state")
        for code, argument, _ in pickletools.genops(archive.read(pickled[0])):
            names_something = code.name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
            if names_something and argument not in TENSOR_PARTS:
                raise ValueError(f"optimizer.pt names {argument}, which is no tensor: do not trust it")
    return torch.load(path, map_location=device, weights_only=True)


def check_moments(moments: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """ValueError unless every parameter has finite moments of its shape."""
    of_adamw, of_muon = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)
    groups = [(g["params"], of_muon if "momentum" in g else of_adamw) for g in optimizer.param_groups]
    places, names = zip(*((p, names) for params, names in groups for p in params), strict=True)
    held = moments.get("state") if isinstance(moments, dict) else None
    if not isinstance(held, dict) or (step and held.keys() != set(range(len(places)))):
        raise ValueError(f"optimizer.pt has no moments for {len(places)} parameters")
    for i, entry in held.items():
        for name in names[i]:
            shape = torch.Size() if name == "step" else places[i].shape
            value = entry.get(name) if isinstance(entry, dict) else None
            if not isinstance(value, Tensor) or value.shape != shape or value.dtype != torch.float32:
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"optimizer.pt has moments of {found} for {list(shape)}")
            if not value.isfinite().all() or (name in ("step", "exp_avg_sq") and (value < 0).any()):
                raise ValueError(f"optimizer.pt has {name} of parameter {i} out of range")


def read_state(place: Path) -> dict:
    """step, next_batch, config and drafter of a checkpoint; ValueError if they cannot be."""
    path, fix = place / "state.json", "resume from an older step"
    state = read_json(path, fix)
    if state is None:
        raise ValueError(f"{path}: not there: {fix}")
    try:
        for name in ("step", "next_batch"):
            number(state, name, most=1 << 53, least=0)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {fix}") from None
    if not isinstance(state.get("config", {}), dict):
        raise ValueError(f"{path}: config is no object: {fix}")
    return state


# ---------------------------------------------------------------------------------------------------------
# Export: what vLLM, SGLang and the reference implementation load. They skip unknown or missing names
# silently.


def export_name(name: str) -> str:
    """A drafter parameter's published name."""
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        name = name.replace(f".{part}.", f".self_attn.{part}.")
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = name.replace(f".{part}.", f".mlp.{part}.")
    return name


def export_config(c: DrafterConfig) -> dict:
    """The usual Qwen3 fields plus `dflash_config`."""
    scaling = c.rope_scaling or {"rope_type": "default"}
    # Readers look for it in one place or the other.
    cap = {"final_logit_softcapping": c.softcap} if c.softcap else {}
    return {
        "architectures": ["DFlash2DraftModel" if c.variant == "dflash2" else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate,
        "vocab_size": c.vocab,
        "rms_norm_eps": c.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.max_position,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in c.windows],
        "sliding_window": max(map(abs, c.windows)) or None,
        "use_sliding_window": any(c.windows),
        **({"is_causal": False} if min(c.windows) < 0 else {}),
        "rope_parameters": {"rope_theta": c.rope_theta, **scaling},
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "tie_word_embeddings": False,
        "num_target_layers": c.target_layers,
        "block_size": c.block_size,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **cap,
        "dflash_config": {"target_layer_ids": list(c.ids), "mask_token_id": c.mask_token, **cap}
        | additions(c),
    }


def additions(c: DrafterConfig) -> dict:
    """What `dflash_config` of a DFlash 2 drafter holds besides; its readers look for all of it there."""
    if c.variant == "dflash":
        return {}
    return {"block_size": c.block_size, **{name: getattr(c, name) for name in DFLASH2}}


def export(drafter: Drafter | Snapshot, folder: Path) -> None:
    """Write config.json and bf16 model.safetensors, then read them back and compare name by name."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        export_name(name): p.detach().to("cpu", EXPORT_DTYPE).contiguous()
        for name, p in drafter.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors", 0o644)  # a server may run as somebody else
    (folder / "config.json").write_text(json.dumps(export_config(drafter.c), indent=2) + "\n")
    back = load_file(folder / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], w) for name, w in weights.items())


def parse_export(c: dict, t: TargetConfig, fc_width: int) -> DrafterConfig:
    """The config of an export, ours or one published in another form; ValueError says what does not fit.

    `block_size`, `mask_token_id`, `target_layer_ids`, `sliding_window`, `final_logit_softcapping` and what
    DFlash 2 adds may stand at top level or in `dflash_config`. Without `target_layer_ids` as many layers are
    tapped as fc, `fc_width` wide, takes in.
    """
    extra = {} if c.get("dflash_config") is None else c["dflash_config"]
    if not isinstance(extra, dict):
        raise ValueError("dflash_config is no object")
    hidden, layers = number(c, "hidden_size"), number(c, "num_hidden_layers", most=MOST_LAYERS)
    heads = number(c, "num_attention_heads")
    either = c | {name: value for name, value in extra.items() if value is not None}
    ids = either.get("target_layer_ids")
    ids = tap_layers(t.layers, fc_width // hidden) if ids is None else ids
    if not isinstance(ids, list) or len(ids) * hidden != fc_width:
        raise ValueError(
            f"fc.weight takes {fc_width} features, tapped layers {short(repr(ids), 60)} of {hidden} do not "
            "fit"
        )
    window = number(either, "sliding_window", 0, WIDEST, 0)
    first = number(c, "max_window_layers", 28, least=0) if switch(c, "use_sliding_window") else layers
    kinds = layer_kinds(c, layers, first)
    # Inside the block; where nothing is said sliding layers are causal and full ones are not.
    causal = c.get("is_causal") if c.get("is_causal") is not None else extra.get("causal")
    if causal not in (None, True, False) or (causal and "full_attention" in kinds):
        raise ValueError(f"is_causal {short(repr(causal), 40)} with full layers is not supported")
    if "sliding_attention" in kinds and not window:
        raise ValueError(f"layer_types has sliding layers, but sliding_window is {window}")
    for name in ("output_multiplier", "input_embedding_scale", "attention_value_scale"):
        if real(either, name, 1.0, 0.0, 1e6) != 1:
            raise ValueError(f"{name} {either[name]} is not supported, only 1")
    # These change what the same weights compute, so that the names of the weights do not tell.
    for name, only in (("hidden_act", "silu"), ("is_neox_style", True), ("use_swa", False)):
        if either.get(name) not in (None, only):
            raise ValueError(f"{name} {short(repr(either[name]), 40)} is not supported, only {only}")
    sign = -1 if causal is False else 1
    theta, scaling = parse_rope(c)
    return DrafterConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=number(c, "num_key_value_heads", heads),
        head_dim=number(c, "head_dim", hidden // heads),
        intermediate=number(c, "intermediate_size"),
        vocab=number(c, "vocab_size", t.vocab),
        eps=real(c, "rms_norm_eps", 1e-6, 1e-20, 1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        layers=layers,
        block_size=number(either, "block_size"),
        ids=tuple(ids),
        target_layers=number(c, "num_target_layers", t.layers),
        mask_token=number(either, "mask_token_id", least=0),
        max_position=number(c, "max_position_embeddings", t.max_position, WIDEST),
        windows=tuple(sign * window if kind == "sliding_attention" else 0 for kind in kinds),
        softcap=real(either, "final_logit_softcapping", 0.0, 0.0, 1e6),
        **{name: number(either, name, 0, least=0) for name in DFLASH2},
    )


def check_drafter(c: DrafterConfig, t: TargetConfig) -> None:
    """ValueError unless every size is in bounds: nothing is allocated by them before."""
    fields = vars(c)
    for name in "hidden heads kv_heads head_dim intermediate vocab".split():
        number(fields, name)
    number(fields, "layers", most=MOST_LAYERS)
    number(fields, "target_layers", most=MOST_LAYERS)
    number(fields, "max_position", most=WIDEST)
    number(fields, "block_size", most=1 << 16, least=2)
    number(fields, "mask_token", most=t.vocab - 1, least=0)
    number(fields, "conv_kernel_size", most=c.block_size, least=0)
    number(fields, "selector_rank", most=1 << 16, least=0)
    for name in ("conv_group_size", "selector_top_k"):
        number(fields, name, least=0)
    c.check_variant()
    real(fields, "eps", None, 1e-20, 1.0)
    check_heads(c.heads, c.kv_heads, c.head_dim)
    parse_rope({"rope_theta": c.rope_theta, "rope_scaling": c.rope_scaling})
    for name, least, most in (("ids", 0, t.layers - 1), ("windows", -WIDEST, WIDEST)):
        values = fields[name]
        if not isinstance(values, tuple) or not all(type(v) is int and least <= v <= most for v in values):
            raise ValueError(f"{name} {short(repr(values), 60)} are not numbers from {least} to {most}")
    if len(set(c.ids)) < len(c.ids):
        raise ValueError(f"tapped layers {list(c.ids)}: one of them twice")
    if not c.ids or len(c.windows) not in (0, c.layers):
        raise ValueError(
            f"{len(c.ids)} tapped layers and {len(c.windows)} windows do not fit {c.layers} layers"
        )


def find_drafter(path: Path, flag: str) -> Path:
    """The export or checkpoint that a flag names; of a run folder the newest checkpoint."""
    if (path / "state.json").is_file():
        return path
    if (path / "status.json").is_file():
        if not (found := checkpoints(path)):
            raise ValueError(f"{flag} {path}: a run without a checkpoint yet: wait for one")
        return found[-1]
    if not (path / "config.json").is_file():
        raise ValueError(f"{flag} {path}: not found: give an export, a run folder or a checkpoint")
    return path


def drafter_shape(place: Path, t: TargetConfig, target: str | Path) -> DrafterConfig:
    """The shape of a checkpoint's drafter or of an export, ours or published, made for this target.

    ValueError says what does not fit. Reads headers only; strict about every name and shape: what the config
    promises is compared before anything is allocated by it.
    """
    saved = (place / "state.json").is_file()
    try:
        stored = stored_weights(place)
        c = saved_shape(place) if saved else exported_shape(place, t, stored["fc.weight"][0][1])
        fits = (t.hidden, t.vocab, t.layers) == (c.hidden, c.vocab, c.target_layers)
        if fits:
            check_drafter(c, t)
            c = dataclasses.replace(c, softcap=c.softcap or getattr(t, "softcap", 0.0))
    except BROKEN as error:
        kind = "a whole checkpoint" if saved else "a drafter export"
        fix = "another one" if saved else "the export folder of a checkpoint, or a published drafter"
        raise ValueError(f"{place}: not {kind} ({reason(error)}): give {fix}") from None
    if not fits:
        theirs, ours = ((x.hidden, x.vocab, n) for x, n in ((c, c.target_layers), (t, t.layers)))
        raise ValueError(
            f"{place}: made for another target than {target} (hidden size, vocabulary, layers {theirs}, not "
            f"{ours}): give the target it was trained with"
        )
    with torch.device("meta"):
        nothing = torch.empty(c.vocab, c.hidden)
        shapes = {n: list(p.shape) for n, p in Drafter(c, nothing, nothing).named_parameters()}
    shapes = shapes if saved else {export_name(n): shape for n, shape in shapes.items()}
    if stored.keys() != shapes.keys():
        odd = short(min(stored.keys() ^ shapes.keys()), 60)
        raise ValueError(f"{place}: weight {odd} is missing or unknown: export the checkpoint again")
    for name, shape in shapes.items():
        found, kind = stored[name]
        if found != shape or kind not in FLOATS:
            raise ValueError(
                f"{place}: {name} is {short(str(found), 60)} of {kind}, expected {shape} floats: export the "
                "checkpoint again"
            )
    return c


def stored_weights(place: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and type of each weight in a folder's safetensors files."""
    found = {}
    for path in weight_files(place):
        with open_weights(path) as shard:
            for name in shard.keys():
                part = shard.get_slice(name)
                found[name] = (part.get_shape(), part.get_dtype())
    return found


def saved_shape(place: Path) -> DrafterConfig:
    """The drafter of a checkpoint's state.json, its values not yet checked."""
    fields = read_state(place).get("drafter")
    known = {f.name for f in dataclasses.fields(DrafterConfig)}
    if not isinstance(fields, dict) or not known - DFLASH2.keys() <= fields.keys() <= known:
        raise ValueError("state.json does not describe a drafter")
    return DrafterConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})


def exported_shape(folder: Path, t: TargetConfig, fc_width: int) -> DrafterConfig:
    c = read_json(folder / "config.json", "export it again")
    if c is None:
        raise ValueError("no config.json")
    return parse_export(c, t, fc_width)


@torch.no_grad()
def fill(drafter: Drafter, place: Path) -> None:
    """Copy the weights of a checkpoint or an export into a drafter of `drafter_shape(place)`."""
    saved = (place / "state.json").is_file()
    try:
        weights = {}
        for path in weight_files(place):
            weights |= load_file(path)
        for name, p in drafter.named_parameters():
            w = weights[name if saved else export_name(name)]
            p.copy_(w)
            if not p.isfinite().all():  # after the copy: float64 holds more than a weight does
                raise ValueError(f"{name} is not finite")
    except BROKEN as error:
        raise ValueError(f"{place}: {reason(error)}: give another checkpoint or export") from None


def load_drafter(
    place: str | Path, target: str | Path, device: torch.device | str = "cpu", dtype=torch.float32
) -> Drafter:
    """The drafter of a checkpoint or an export, its weights in full precision, with the embedding and head of
    its target in `dtype`; ValueError if it does not fit.
    """
    config = drafter_shape(Path(place), TargetConfig.from_folder(target), target)
    drafter = Drafter(config, *load_embedding_and_head(target, device, dtype))
    fill(drafter, Path(place))
    return drafter.to(device)
