"""Flags of a sampler that drifts, and of rewards of several terms: what reaches the loss."""

from pathlib import Path

import pytest
import torch

import gspo
import train
from tools import BASE, digests, good, metrics, refused, timeless


@pytest.fixture(autouse=True)
def stand_there(place):
    """Every run here stands in a folder of its own."""


@pytest.mark.parametrize(
    "flags", ["--mismatch-mask token", "--mismatch-mask completion", "--off-policy-delta 0.5"]
)
def test_a_mask_leaves_a_synchronous_float32_run_as_it_was(flags, tmp_path, monkeypatch):
    """Sampler and trainer agree to rounding, so nothing leaves: metrics and weights to the bit."""
    good(tmp_path / "without", f"{BASE} --steps 2")
    result = good(tmp_path / "with", f"{BASE} --steps 2 {flags}")
    rows = metrics(result.folder)
    masked = [row.pop(name) for row in rows for name in list(row) if name.endswith("_masked")]
    assert masked and set(masked) == {0.0}
    before = metrics(tmp_path / "without/run")
    for name in ("reward", "grad_norm", "ratio_mean", "clip_fraction", "policy_kl", "length_mean"):
        for one, other in zip(before, rows):
            assert one.get(name) == pytest.approx(other.get(name), rel=1e-5, abs=1e-7), name


def test_a_mismatch_mask_zeroes_the_advantages_outside(tmp_path, seen):
    """A stale sampler: tokens whose ratio to it is outside the band have advantage 0."""
    flags = "--stale-steps 3 --mismatch-mask token --mismatch-low 0.98 --mismatch-high 1.02"
    folder = good(tmp_path, f"{BASE} --steps 3 {flags}").folder
    batch = seen.batches[-1]
    ratio = (batch.old_logprobs - batch.samples.sampler_logprobs).exp()
    live = batch.mask & batch.live[:, None]
    outside = live & ((ratio < 0.98) | (ratio > 1.02))
    assert 0 < outside.sum() < live.sum()
    assert (batch.advantages[outside] == 0).all()
    assert (batch.advantages[live & ~outside] != 0).all()
    share = float(outside.sum() / live.sum())
    assert metrics(folder)[-1]["mismatch_masked"] == pytest.approx(share, abs=1e-6)


def test_an_off_policy_mask_is_made_at_every_update(tmp_path, losses):
    """With delta 0 every completion with A < 0 whose log-prob fell at all leaves."""
    calls = losses("gspo")
    folder = good(tmp_path, f"{BASE} --steps 1 --lr 1e-2 --off-policy-delta 0").folder
    masked = False
    for (logprobs, old, advantages, mask), _, _ in calls:
        fell = torch.where(mask, old - logprobs, 0.0).sum(1) / mask.sum(1) > 1e-6
        worse = advantages.view(len(mask), -1).lt(0).any(1)
        assert not (fell & worse).any()
        masked |= bool((advantages == 0).all(1).any())
    assert masked and metrics(folder)[-1]["off_policy_masked"] > 0


def test_advantages_per_term_reach_the_loss(tmp_path, seen):
    """Two verifiers: each normalised in its group, the weighted sum whitened."""
    good(tmp_path, f"{BASE} --reward pay.py:even+0.5*exact --advantage-scale terms --steps 1")
    [batch] = seen.batches
    terms = torch.tensor([[score.terms["even"], score.terms["exact"]] for score in batch.scores])
    expected = gspo.term_advantages(terms, [1.0, 0.5], seen.run.config.group_size)
    torch.testing.assert_close(batch.advantages, expected)


def test_equal_costs_are_equal_whatever_is_paid_beside_them(tmp_path, seen):
    """As one term of the reward: two thirds off each completion of six tokens of at most eight.
    The rounding of 70.1 - 2/3 would be a spread, which a std divides."""
    Path("large.py").write_text(
        "def large(completion, answer):\n    return 70.1 + 0.3 * sum(map(ord, completion))\n"
    )
    flags = "--model models/tiny --reward large.py:large --advantage-scale terms --steps 1"
    good(tmp_path, f"{flags} --overlong-cache 6 --lr 1e-6 --completions-per-update 16")
    [batch] = seen.batches
    samples = batch.samples._replace(lengths=torch.full_like(batch.samples.lengths, 6))
    judged = train.Judged(samples, batch.texts, batch.rows, batch.scores)
    batch.samples, batch.rewards = samples, train.shaped_rewards(seen.run.config, judged)
    terms, _ = train.reward_terms(seen.run, batch)
    assert len(terms[:, 0].unique()) > 8 and len(terms[:, 1].unique()) == 1
    paid = torch.tensor([score.reward for score in batch.scores])
    torch.testing.assert_close(terms[:, 1], batch.rewards - paid, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--mismatch-low 0.9", ["--mismatch-low", "--mismatch-mask"]),
        ("--mismatch-mask token --old-logprobs sampler", ["--mismatch-mask", "trainer"]),
        ("--algo rloo --advantage-scale terms", ["--advantage-scale", "rloo"]),
    ],
)
def test_flags_that_do_nothing_are_refused(flags, words, tmp_path):
    sentence = refused(tmp_path / "runs", f"{BASE} {flags}")
    assert all(word in sentence for word in words)


def test_the_same_masks_in_a_resumed_run(tmp_path):
    flags = f"{BASE} --stale-steps 2 --mismatch-mask completion --off-policy-delta 0.01"
    good(tmp_path / "whole", f"{flags} --steps 3 --save-every 1")
    good(tmp_path / "parts", f"{flags} --steps 2 --save-every 1")
    good(tmp_path / "parts", "--resume --name run --steps 3", small=False)
    whole, parts = tmp_path / "whole/run", tmp_path / "parts/run"
    assert digests(whole) == digests(parts)
    assert timeless(whole)[-1] == timeless(parts)[-1]  # the last of the parts was evaluated, too
