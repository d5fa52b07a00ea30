"""Noise on features: as large as asked for, the same for any split and after a resume, none at evaluation."""

import shutil

import pytest
import torch
from test_train import same_tensors

import model
import train


def test_noise_is_uniform_within_a_share_of_each_features_rms():
    T, K, H = 64, 3, 400
    random = torch.Generator().manual_seed(0)
    scale_TK1 = torch.rand(T, K, 1, generator=random) * torch.tensor([1.0, 30.0, 0.01])[:, None]
    scale_TK1[5] = 0.0
    before = (torch.randn(T, K, H, generator=random) * scale_TK1).flatten(1)
    after, again, other_batch, other_seed = (before.clone() for _ in range(4))
    model.add_noise(after, 0.2, H, (7, 3))
    model.add_noise(again, 0.2, H, (7, 3))
    model.add_noise(other_batch, 0.2, H, (7, 4))
    model.add_noise(other_seed, 0.2, H, (8, 3))
    assert torch.equal(after, again)
    rms_TK1 = before.unflatten(1, (K, H)).pow(2).mean(2, keepdim=True).sqrt()
    shares = []
    for noisy in (after, other_batch, other_seed):
        noise_TKH = (noisy - before).unflatten(1, (K, H))
        assert not noise_TKH[5].any()
        shares.append((noise_TKH / rms_TK1.clamp(min=1e-9))[torch.arange(T) != 5])
        share = shares[-1]
        assert 0.19 < share.abs().max() < 0.2001
        torch.testing.assert_close(share.std(2), torch.full((T - 1, K), 0.2 / 3**0.5), rtol=0.15, atol=0)
        assert share.mean().abs() < 0.002
    drawn = torch.stack([s.flatten() for s in (*shares, shares[0].roll(1, 1), shares[0].roll(1, 0))])
    assert (torch.corrcoef(drawn) - torch.eye(5)).abs().max() < 0.02  # of batches, seeds, layers, tokens


def test_the_noise_is_the_same_for_any_split_and_after_a_resume(launcher, small, tmp_path):
    flags = ("--batches-per-step", 4, "--steps", 4, "--eval-every", 4, "--save-every", 2)
    noise = ("--feature-noise", 0.5)
    chunked = ("--layout", "colocate", "--anchor-chunk", 8)
    one = launcher.run(1, tmp_path / "one", *small, *flags, *noise).good().records()
    two = launcher.run(2, tmp_path / "two", *small, *flags, *noise, *chunked).good()
    plain = launcher.run(1, tmp_path / "plain", *small, *flags).good().records()
    for a, b in zip(one, two.records(), strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-5), (a["step"], name)
    assert one[0]["eval_loss"] == plain[0]["eval_loss"]  # the same drafter, judged without noise
    assert abs(one[1]["loss"] / plain[1]["loss"] - 1) > 1e-4

    shutil.copytree(two.folder, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "step-000004")
    launcher.run(2, None, "--resume", tmp_path / "again").good()
    assert same_tensors(two.folder / "step-000004", tmp_path / "again" / "step-000004")


def test_an_amount_that_is_none_is_refused():
    for amount in ("-0.1", "nan", "11"):
        c = train.parse_flags(["--feature-noise", amount])
        with pytest.raises(ValueError, match="--feature-noise"):
            train.resolve(c, model.TargetConfig.from_folder(train.TINY), 1, 1)
