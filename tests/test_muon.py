"""--optimizer muon: a step equals the formula, a skipped one is none, replicas agree, a resume is exact."""

import copy
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from test_checkpoint import make_drafter
from test_memory import bytes_of, estimate, question
from test_train import same_tensors, tensors

import checkpoint
import model
import muon
import train
from world import World

LR = 0.01


def give_gradients(drafter: model.Drafter, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        p.grad = torch.randn(p.shape, generator=random)


def job_of(drafter: model.Drafter) -> SimpleNamespace:
    optimizer = muon.Muon(drafter, LR)
    c, world = SimpleNamespace(clip=1e9), SimpleNamespace(drafters=1)
    return SimpleNamespace(drafter=drafter, optimizer=optimizer, c=c, world=world)


def update(job: SimpleNamespace, seed: int, weight: float = 1.0, spoil: float = 0.0) -> tuple:
    give_gradients(job.drafter, seed)
    job.drafter.layers[1].o_proj.weight.grad[3, 5] += spoil
    return train.update(job, torch.tensor(weight), LR)


def held(job: SimpleNamespace) -> dict[str, torch.Tensor]:
    state = job.optimizer.state_dict()["state"]
    found = {f"{i} {name}": value for i, entry in state.items() for name, value in entry.items()}
    return copy.deepcopy(found | job.drafter.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------------------------------------------
# A step


def formula(w: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Muon in fp64, from a decomposition: each round maps every singular value s to as + bs^3 + cs^5."""
    momentum = torch.zeros_like(w, dtype=torch.float64)
    w = w.double()
    for g in gradients:
        momentum = 0.95 * momentum + 0.05 * g.double()
        u, s, v = torch.linalg.svd(0.05 * g.double() + 0.95 * momentum, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = w - LR * 0.2 * math.sqrt(max(w.shape)) * (u * s) @ v
    return w


@pytest.mark.parametrize("variant, expected_matrices", [({}, 1 + 2 * 7), (model.DFLASH2, 1 + 2 * 9 + 1)])
def test_two_steps_equal_the_formula(variant, expected_matrices):
    """Matrices step by Muon; norms, codebooks and what is fixed in the convolutions by AdamW."""
    drafter = make_drafter(**variant)
    job, before = job_of(drafter), copy.deepcopy(drafter)
    gradients = []
    for seed in (1, 2):
        give_gradients(drafter, seed)
        gradients.append([p.grad.clone() for p in drafter.parameters()])
        norm, bad = train.update(job, torch.tensor(1.0), LR)
        assert norm > 0 and not bad
    adamw = torch.optim.AdamW(before.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    matrices = 0
    started = [p.detach().clone() for p in before.parameters()]
    for step in gradients:
        for p, g in zip(before.parameters(), step, strict=True):
            p.grad = g
        adamw.step()
    for i, ((name, ours), adam, old) in enumerate(
        zip(drafter.named_parameters(), before.parameters(), started, strict=True)
    ):
        if old.dim() != 2 or not name.endswith(".weight"):
            torch.testing.assert_close(ours, adam)
            continue
        moved = ours.double() - old.double()
        expected = formula(old, [step[i] for step in gradients]) - old.double()
        assert (moved - expected).norm() < 0.03 * expected.norm()  # its products are in bf16
        assert 0.5 < moved.pow(2).mean().sqrt() / (LR * 0.4) < 1.1  # two steps of AdamW's usual size, 0.2
        matrices += 1
    assert matrices == expected_matrices


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("spoil, weight", [(math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0)])
def test_a_skipped_step_leaves_everything_as_it_is(first, spoil, weight):
    """Not finite, or nothing supervised: weights, averages and counts; and the next step is as without it."""
    skipping, plain = job_of(make_drafter()), job_of(make_drafter())
    if not first:
        update(skipping, 1)
        update(plain, 1)
    before = held(skipping)
    _, bad = update(skipping, 2, weight, spoil)
    assert bad == (weight > 0)
    after = held(skipping)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert not any(after[k].any() for k in after.keys() - before.keys())  # averages that begin at zero
    update(skipping, 3)
    update(plain, 3)
    assert same(held(skipping), held(plain)) and not same(held(skipping), after)


def shared_by_three(rank: int) -> None:
    """Each rank steps its own share of the matrices; all end as one that steps them all, to the last bit."""
    world = World("colocate", 3)
    world.join("cpu", allow_cpu=True)
    ours, alone = job_of(make_drafter(**model.DFLASH2)), job_of(make_drafter(**model.DFLASH2))
    ours.optimizer = muon.Muon(ours.drafter, LR, world.draft_group)
    for seed, spoil in ((1, 0.0), (2, 0.0), (3, math.nan), (4, 0.0)):
        update(ours, seed, spoil=spoil)
        update(alone, seed, spoil=spoil)
        assert same(held(ours), held(alone)), (rank, seed)
    owners = ours.optimizer.owners
    assert set(owners) == {0, 1, 2} and alone.optimizer.owners == [0] * len(owners)
    if rank:  # and a rank that did nothing of its own would have stayed behind
        mine = {id(p) for p, owner in zip(ours.optimizer.matrices, owners, strict=True) if owner == rank}
        still = make_drafter(**model.DFLASH2)
        pairs = zip(ours.optimizer.matrices, muon.Muon(still, LR).matrices, strict=True)
        assert mine and not any(torch.equal(a, b) for a, b in pairs)
    world.leave()


def test_drafters_share_the_matrices_out(launcher):
    launcher.call(3, "test_muon.shared_by_three").good()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_shares_are_even(ranks):
    shapes = 5 * [(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)] + [(4096, 20480)]
    owners = muon.share_out(shapes, ranks)
    work = [
        sum(math.prod(s) * min(s) for s, owner in zip(shapes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    largest = max(math.prod(s) * min(s) for s in shapes)
    assert min(work) > 0 and max(work) - min(work) <= largest
    copies = muon.step_bytes(shapes, ranks) - muon.step_bytes(shapes, len(shapes))
    assert copies == max(
        4 * sum(math.prod(s) for s, owner in zip(shapes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ) - 4 * max(map(math.prod, shapes))


def test_a_checkpoint_brings_it_back(tmp_path):
    job, other = job_of(make_drafter()), job_of(make_drafter(seed=3))
    for seed in (1, 2):
        update(job, seed)
    place = checkpoint.save(tmp_path, 2, job.drafter, job.optimizer, {"next_batch": 2, "config": {}}, 0)
    checkpoint.load(place, other.drafter, other.optimizer)
    assert same(held(job), held(other))
    update(job, 3)
    update(other, 3)
    assert same(held(job), held(other))
    adamw = torch.optim.AdamW(other.drafter.parameters(), fused=True)
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        checkpoint.load(place, other.drafter, adamw)
    moments = torch.load(place / "optimizer.pt", weights_only=True)
    moments["state"][1]["momentum_buffer"][0, 0] = math.nan
    torch.save(moments, place / "optimizer.pt")
    with pytest.raises(ValueError, match="momentum_buffer of parameter 1 out of range"):
        checkpoint.load(place, other.drafter, other.optimizer)


def test_a_checkpoint_that_counts_the_codebooks_as_matrices_is_refused(tmp_path):
    """As Muon once did: other parameters have these numbers now. Its weights are still of use."""
    job = job_of(make_drafter(**model.DFLASH2))
    update(job, 1)
    place = checkpoint.save(tmp_path, 1, job.drafter, job.optimizer, {"next_batch": 1, "config": {}}, 0)
    moments, state = torch.load(place / "optimizer.pt", weights_only=True), {}
    for i, p in enumerate(sorted(job.drafter.parameters(), key=lambda p: p.dim() != 2)):
        names = ("momentum_buffer",) if p.dim() == 2 else ("exp_avg", "exp_avg_sq")
        state[i] = {name: torch.zeros_like(p) for name in names} | {"step": torch.tensor(1.0)}
    torch.save(moments | {"state": state}, place / "optimizer.pt")
    before = held(job)
    with pytest.raises(ValueError, match=r"optimizer\.pt has moments.*--init-draft .*step-000001$"):
        checkpoint.load(place, job.drafter, job.optimizer)
    assert same(held(job), before)


# ---------------------------------------------------------------------------------------------------------
# A run


KEEP_REPLICA = """
import torch
inner = train.run_drafter
def run_drafter(job, *rest):
    inner(job, *rest)
    torch.save(job.drafter.state_dict(), f"{job.run}/replica{RANK}.pt")
train.run_drafter = run_drafter
"""


def test_replicas_agree_and_a_resume_is_bit_for_bit(launcher, small, tmp_path):
    flags = ("--optimizer", "muon", "--layout", "colocate", "--batches-per-step", 4, "--steps", 4)
    flags += ("--eval-every", 4, "--save-every", 2)
    run = launcher.run(2, tmp_path / "run", *small, *flags, plant=KEEP_REPLICA).good()
    one, two = (torch.load(run.folder / f"replica{rank}.pt") for rank in range(2))
    assert same(one, two)
    assert run.records()[-1]["eval_loss"] < run.records()[0]["eval_loss"]
    again = tmp_path / "again"
    shutil.copytree(run.folder, again)
    shutil.rmtree(again / "step-000004")
    launcher.run(2, None, "--resume", again).good()
    assert same_tensors(run.folder / "step-000004", again / "step-000004")
    moments = {k: v for k, v in tensors(again / "step-000004").items() if k.startswith("optimizer")}
    q = question("", "--draft-layers", 1, "--optimizer", "muon")
    assert estimate(q, "drafter").parts["moments"] == bytes_of(
        v for k, v in moments.items() if not k.endswith(" step")
    )
    refused = launcher.run(1, None, "--resume", again, "--optimizer", "adamw")
    assert refused.codes == [2] and "--optimizer adamw" in refused.text and "has muon" in refused.text


@pytest.mark.parametrize("variant", [{}, model.DFLASH2])
def test_the_shapes_that_the_estimate_counts_are_the_drafters(variant):
    drafter = make_drafter(**variant)
    shapes = [tuple(p.shape) for p in muon.Muon(drafter, LR).matrices]
    assert sorted(shapes) == sorted(drafter.c.matrices())
    q = question("", "--token-budget", 128, "--anchors", 1, "--optimizer", "muon")
    assert (
        estimate(q, "drafter").moment == "update of the weights"
    )  # its copies are most where little is drafted


def test_another_name_is_refused_and_the_rate_is_its_own():
    t = model.TargetConfig.from_folder(train.TINY)
    rates = [
        train.resolve(train.parse_flags(["--optimizer", name]), t, 1, 1).lr for name in ("adamw", "muon")
    ]
    assert rates == [3e-3, 2e-2]
    c = train.parse_flags(["--optimizer", "muoon"])
    with pytest.raises(ValueError, match="--optimizer muoon: give adamw or muon"):
        train.resolve(c, model.TargetConfig.from_folder(train.TINY), 1, 1)
