"""The built-in target: small, its own greedy answers, and features that make the drafter's guesses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

import data
import model
from model import Drafter, DrafterConfig, Target

T, DOCUMENTS, ANCHORS, STEPS = 1024, 32, 256, 110


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(TINY)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, data.Corpus]:
    tokenizer = data.load_tokenizer(TINY)
    cache = tmp_path_factory.mktemp("tokens")
    return {n: data.load_corpus(TINY / f"{n}.jsonl", tokenizer, 512, cache) for n in ("train", "eval")}


def batches(corpus: data.Corpus, seed: int) -> list[data.Batch]:
    plan = data.pack(corpus.lengths, np.arange(len(corpus)), T, DOCUMENTS, seed)
    return [
        data.make_batch(corpus, plan.docs(i), i, T, DOCUMENTS, ANCHORS, seed) for i in range(plan.batches)
    ]


def inputs(batch: data.Batch) -> tuple:
    real = int((batch.doc_T >= 0).sum())
    return batch.tokens_T, batch.positions_T, batch.cu_seqlens.clamp(max=real), 512


def test_it_is_under_4_mb_and_about_a_million_parameters(target):
    assert sum(p.stat().st_size for p in Path(TINY).iterdir() if p.is_file()) < 4e6
    assert 0.8e6 < sum(p.numel() for p in target.parameters()) < 1.5e6


@torch.no_grad()
def test_the_recorded_answers_are_its_own_greedy_ones(target, corpora):
    wrong = seen = 0
    for batch in [*batches(corpora["eval"], 0), *batches(corpora["train"], 0)[:20]]:
        best_T = target.logits(*inputs(batch)).argmax(-1)
        anchors = torch.from_numpy(data.valid_anchors(batch.mask_T.numpy(), batch.doc_T.numpy()))
        wrong += int((best_T[:-1] != batch.tokens_T[1:])[anchors[:-1]].sum())
        seen += int(anchors.sum())
    assert seen > 10_000 and wrong == 0, f"{wrong} of {seen} recorded tokens are not the target's choice"


def loss_and_prefix(drafter: Drafter, batch: data.Batch, features_TKH: torch.Tensor):
    kv = drafter.context_keys_values(features_TKH, batch.positions_T)
    row = (batch.tokens_T, batch.positions_T, batch.doc_T, batch.mask_T, batch.anchors_A)
    blocks = model.make_blocks(*row, 8, 4.0, drafter.c.mask_token)
    loss, predicted = drafter(kv, blocks)
    prefix = model.matching_prefix(predicted, blocks.labels_AB[:, 1:], blocks.weights_AB[:, 1:])
    return loss / blocks.weights_AB.sum(), prefix[blocks.real_A]


def of_another_document(batch: data.Batch, features_TKH: torch.Tensor) -> torch.Tensor:
    """Each document gets the features of the next one in the row, repeated or cut to its length."""
    out, documents = features_TKH.clone(), int(batch.doc_T.max()) + 1
    for d in range(documents):
        mine, other = ((batch.doc_T == n).nonzero()[:, 0] for n in (d, (d + 1) % documents))
        out[mine] = features_TKH[other[torch.arange(len(mine)) % len(other)]]
    return out


def test_the_features_make_the_guesses(target, corpora):
    """Some training, then the same drafter on the same held-out blocks with another document's features."""
    c = DrafterConfig.of(target.c, 2, 8, 5, mask_token=4)
    drafter = Drafter(c, target.embed_tokens.weight, target.head_VH, seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    ids = list(c.ids)
    for step, batch in enumerate(batches(corpora["train"], 1)[:STEPS]):
        with torch.no_grad():
            features_TKH = target.features(*inputs(batch), ids)
        loss, _ = loss_and_prefix(drafter, batch, features_TKH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 5, 2.5 * (STEPS - step) / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    own, other = [], []
    with torch.no_grad():
        for batch in batches(corpora["eval"], 0)[:6]:
            features_TKH = target.features(*inputs(batch), ids)
            own.append(loss_and_prefix(drafter, batch, features_TKH)[1])
            other.append(loss_and_prefix(drafter, batch, of_another_document(batch, features_TKH))[1])
    own_len, other_len = (1 + torch.cat(p).double().mean().item() for p in (own, other))
    assert own_len - other_len >= 1, (
        f"acc_len {own_len:.2f} with its own features, {other_len:.2f} with others'"
    )
