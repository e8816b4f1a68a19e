"""Completions without advantage are not computed, and the trained weights are the same.

Prompts on 1 are always right and those on 2 always wrong: dead groups, whose advantages are 0.
Those on 3 are rewarded for even digits: live. In the order of the steps, updates are all three:
live, dead and mixed."""

import pytest
import torch
from safetensors.torch import load_file

import gspo
import rollout
import train
from tools import BASE, distance, good, gradients, metrics, newest, rows_of, watched

pytestmark = pytest.mark.usefixtures("place")

MIXED = (
    f"{BASE} --data rows.jsonl --eval-data rows.jsonl --reward pay.py:by_prompt --steps 3 "
    "--lr 1e-4 --prompts-per-step 6 --completions-per-update 8 --eval-prompts 1 "
    "--overlong-cache 0 --no-dynamic-sampling --kl-coef 0"
)


def kinds_of_updates(steps) -> set[str]:
    """Return which of live, dead and mixed updates there are."""
    updates = [update for step in steps for update in step.updates]
    shares = {len(update.active_rows) / len(update.rows) for update in updates}
    return {{0: "dead", 1: "live"}.get(share, "mixed") for share in shares}


def check_live_rows(step) -> int:
    """Updates are of all rows, and their micro-batches of the live ones. Return how many live."""
    every = torch.cat([update.rows for update in step.updates])
    assert sorted(every.tolist()) == list(range(24))
    for update in step.updates:
        live = [row for row in update.rows.tolist() if step.tensors.advantages[row] != 0]
        for rows in (update.active_rows, rows_of(update)):
            assert sorted(rows.tolist()) == sorted(live)
    return int(step.tensors.advantages.count_nonzero())


@pytest.mark.parametrize("algorithm", ["gspo", "dapo"])  # a mean over completions, and over tokens
def test_rows_without_advantage_change_no_weight(algorithm, monkeypatch, seen, tmp_path):
    """Against a run in which all rows are scored and trained on. An update of dead rows alone is a
    step, by momentum. Metrics that need no log-probs include dead groups."""
    flags = f"{MIXED} --algo {algorithm} --micro-batch-tokens 30"
    calls = watched(monkeypatch, train, "completion_logprobs")
    with gradients() as some:
        one = good(tmp_path / "live", flags).folder
    alive = sum(check_live_rows(step) for step in seen.steps)
    scored = {True: 0, False: 0}  # with and without a gradient
    for (_, completions, *_), _, (logprobs, _) in calls:
        scored[logprobs.requires_grad] += len(completions.lengths)
    assert scored[True] == scored[False] == alive < 3 * 24

    monkeypatch.setattr(gspo, "dead_groups", lambda rewards, *_: torch.zeros(6) > 0)
    with gradients() as all_of_them:
        other = good(tmp_path / "all", flags).folder
    assert len(some) == len(all_of_them) == 3 * 3
    assert kinds_of_updates(seen.steps[3:]) == {"live"}

    moved = distance(newest(one), "models/tiny")
    assert moved > 3e-4 and distance(newest(one), newest(other)) < 0.01 * moved

    mine, theirs = [load_file(newest(each) / "trainer/state.safetensors") for each in (one, other)]
    assert mine.keys() == theirs.keys()
    steps = [name for name in mine if name.startswith("step ")]
    assert steps and all(mine[name] == theirs[name] == 9 for name in steps)

    assert kinds_of_updates(seen.steps[:3]) == {"live", "dead", "mixed"}
    live, every = metrics(one)[0], metrics(other)[0]
    for name in ("reward", "reward_std", "solved", "dead_right", "length_mean", "advantage_abs"):
        assert live[name] == every[name], name
    first = [each.row["prompt"][0] for each in seen.steps[0].batch.verdicts[::4]]
    assert live["dead_right"] == pytest.approx(first.count("1") / 6)
    assert live["dead_wrong"] == pytest.approx(first.count("2") / 6)
    assert live["dead"] == pytest.approx(1 - first.count("3") / 6)
    assert live["grad_norm"] > every["grad_norm"] > 0
    assert live["entropy"] != pytest.approx(every["entropy"], rel=1e-4)
    live_updates = live["grad_norm"] / every["grad_norm"]
    assert live["loss"] == pytest.approx(every["loss"] * live_updates, rel=0.01, abs=1e-6)


def test_where_something_else_reads_logprobs_all_rows_stay(seen, tmp_path):
    """KL, entropy bonus and critic are of dead groups, too."""
    for flags in ("--kl-coef 0.1", "--entropy-coef 0.01", "--algo ppo"):
        good(tmp_path / flags, f"{MIXED} {flags} --steps 1")
        for update in seen.steps[-1].updates:
            assert sorted(rows_of(update).tolist()) == sorted(update.rows.tolist()), flags


@pytest.mark.parametrize("algorithm", ["gspo", "dapo"])
def test_metrics_are_means_over_live_rows(algorithm, seen, tmp_path):
    """In the unit of the algorithm. With one update a rollout every ratio is 1."""
    flags = f"{MIXED} --algo {algorithm} --completions-per-update 24 --steps 1"
    [row] = metrics(good(tmp_path, flags).folder)
    [(batch, [update], *_)] = seen.steps
    assert 0 < len(update.active_rows) < 24 and row["ratio_mean"] == pytest.approx(1, abs=1e-6)
    samples = batch.rollout.select(update.active_rows)
    policy = rollout.load_model("models/tiny", "cpu")
    _, entropy = rollout.completion_logprobs(policy, samples, temperature=1.0, entropy="value")
    expected = entropy.sum() / samples.lengths.sum()
    if algorithm == "gspo":
        expected = (entropy.sum(1) / samples.lengths).mean()
    assert row["entropy"] == pytest.approx(expected.item(), rel=1e-5)
