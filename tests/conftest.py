"""Fixtures that several test files share."""

import sys
from pathlib import Path

import pytest
from launch import Launcher

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"


@pytest.fixture(scope="module", autouse=True)
def as_in_a_fresh_process():
    """What other files' tests compiled in this process must not be counted here."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].utils.counters.clear()


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """The process that training ranks are forked from, with a home (and so caches) of its own."""
    home = tmp_path_factory.mktemp("home")
    started = Launcher(home)
    yield started
    started.close()


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> list[str]:
    """Flags of a job that takes seconds: little data, short batches, one layer."""
    folder = tmp_path_factory.mktemp("data")
    for name, lines in (("train", 120), ("eval", 8)):
        text = (TINY / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(text[:lines]))
    flags = f"--data {folder}/train.jsonl --eval-data {folder}/eval.jsonl --device cpu --token-budget 256"
    return [*flags.split(), "--anchors", "32", "--draft-layers", "1", "--max-batch-size", "16"]
