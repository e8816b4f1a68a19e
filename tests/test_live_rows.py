"""Completions without advantage are not computed, and the trained weights are the same.

Prompts on 1 are always right and those on 2 always wrong: dead groups, whose advantages are 0.
Those on 3 are paid for even digits: live. In the order of the steps, updates are all three: live,
dead and mixed."""

import functools

import pytest
import torch
from safetensors.torch import load_file

import gspo
import rollout
import train
from tools import BASE, Calls, good, gradients, metrics, newest, rows_of, write_rows

pytestmark = pytest.mark.usefixtures("place", "prompts")

MIXED = (
    f"{BASE} --data rows.jsonl --eval-data rows.jsonl --reward pay.py:by_prompt --steps 3 "
    "--lr 1e-4 --prompts-per-step 6 --completions-per-update 8 --eval-prompts 1 "
    "--overlong-cache 0 --no-dynamic-sampling --kl-coef 0"
)


@pytest.fixture
def prompts(place):
    rows = [{"prompt": f"{1 + i % 3}+{i}=", "answer": "0"} for i in range(12)]
    return write_rows(place / "rows.jsonl", rows)


@pytest.fixture
def everything_is_live(monkeypatch):
    """Calling it treats every row of later runs as one that can move the policy."""

    def all_rows(run, batch):
        return torch.ones(len(batch.rewards), dtype=torch.bool)

    return lambda: monkeypatch.setattr(train, "live_rows", all_rows)


def kinds_of_updates(batches) -> set[str]:
    """Which of live, dead and mixed there are."""
    kinds = set()
    for batch in batches:
        for update in batch.updates:
            live = int(batch.live[update.rows].sum())
            kinds.add({0: "dead", len(update.rows): "live"}.get(live, "mixed"))
    return kinds


FAST = ("gspo", "dapo", "ppo", "cispo")  # a loss, a mean and advantages of each kind


@pytest.mark.parametrize(
    "algorithm",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in gspo.ALGOS],
)
def test_rows_without_advantage_change_no_weight(algorithm, everything_is_live, seen, tmp_path):
    """Against a run in which all rows are scored and trained on: weights to rounding, and as many
    steps of AdamW for every parameter."""
    flags = f"{MIXED} --algo {algorithm}"
    with gradients() as some:
        one = good(tmp_path / "live", flags).folder
    batches = list(seen.batches)
    everything_is_live()
    with gradients() as all_of_them:
        other = good(tmp_path / "all", flags).folder
    assert len(some) == len(all_of_them) == 3 * 3
    if algorithm not in ("reinforce", "reinforce++", "ppo"):  # whose baselines are no group's mean
        assert kinds_of_updates(batches) == {"live", "dead", "mixed"}
    assert kinds_of_updates(seen.batches[3:]) == {"live"}

    start = load_file("models/tiny/model.safetensors")
    mine = load_file(newest(one) / "model.safetensors")
    theirs = load_file(newest(other) / "model.safetensors")
    moved = max(float((mine[name] - start[name]).abs().max()) for name in start)
    apart = max(float((mine[name] - theirs[name]).abs().max()) for name in start)
    assert moved > 3e-4 and apart < 0.01 * moved

    mine = load_file(newest(one) / "trainer/state.safetensors")
    theirs = load_file(newest(other) / "trainer/state.safetensors")
    assert mine.keys() == theirs.keys()
    steps = {name for name in mine if name.endswith(" step")}
    assert steps and all(mine[name] == theirs[name] == 9 for name in steps)
    for name in mine.keys() - steps:
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-3 * scale, rtol=1e-3)


def test_the_rewards_and_lengths_of_a_step_are_of_all_rows(everything_is_live, tmp_path):
    """What needs no log-probs is told of dead groups, too; what needs them is not."""
    one = metrics(good(tmp_path / "live", MIXED).folder)[0]
    everything_is_live()
    other = metrics(good(tmp_path / "all", MIXED).folder)[0]
    for name in ("reward", "reward_std", "solved", "dead_right", "length_mean", "advantage_abs"):
        assert one[name] == other[name], name
    # means over the updates that had a live row
    assert one["grad_norm"] > other["grad_norm"] > 0
    assert one["entropy"] != pytest.approx(other["entropy"], rel=1e-4)


def test_an_update_of_dead_rows_alone_is_a_step_of_adamw(monkeypatch, seen, tmp_path):
    """Its gradient is 0, and momentum moves the weights on."""
    take_step, kept = train.take_step, []

    @functools.wraps(take_step)
    def watched(run):
        weight = next(run.policy.parameters())
        gradient, before = weight.grad.clone(), weight.detach().clone()
        take_step(run)
        kept.append((gradient, float((weight.detach() - before).abs().max())))

    monkeypatch.setattr(train, "take_step", watched)
    good(tmp_path, MIXED)
    updates = [update for batch in seen.batches for update in batch.updates]
    found = list(zip(updates, kept, strict=True))
    first_live = next(i for i, (update, _) in enumerate(found) if update.micro_batches)
    dead = [each for each in found[first_live:] if not each[0].micro_batches]
    assert dead
    for _, (gradient, moved) in dead:
        assert not gradient.any() and moved > 0


def test_without_a_live_row_nothing_moves_and_no_metric_is_made_up(seen, tmp_path):
    """Nor does AdamW without a moment yet: the weights stay, to the bit."""
    flags = MIXED.replace("by_prompt", "always")
    folder = good(tmp_path, flags).folder
    for row in metrics(folder):
        assert row["advantage_abs"] == 0
        assert not {"grad_norm", "loss", "entropy", "ratio_mean"} & row.keys()
        for name in ("ratio_mean", "clip_fraction", "entropy", "policy_kl", "sampler_kl"):
            assert name not in row
        assert row["length_mean"] > 0 and row["reward"] == pytest.approx(0.7)
    assert not any(batch.live.any() for batch in seen.batches)
    start = load_file("models/tiny/model.safetensors")
    weights = load_file(newest(folder) / "model.safetensors")
    assert all(torch.equal(weights[name], start[name]) for name in start)


@pytest.mark.parametrize(
    "flags",
    [
        "--kl-coef 0.1",
        "--algo reinforce++ --kl-coef 0.1",
        "--entropy-coef 0.01",
        "--algo ppo",
    ],
)
def test_where_something_else_reads_logprobs_all_rows_stay(flags, seen, tmp_path):
    """KL, entropy bonus and critic are of dead groups, too."""
    good(tmp_path, f"{MIXED} {flags} --steps 1")
    [batch] = seen.batches
    assert batch.live.all()
    for update in batch.updates:
        assert sorted(rows_of(update).tolist()) == sorted(update.rows.tolist())


def test_micro_batches_are_of_live_rows(seen, tmp_path):
    """Updates share out all rows; their micro-batches share out the live ones, each once."""
    good(tmp_path, f"{MIXED} --micro-batch-tokens 30")
    for batch in seen.batches:
        assert len(batch.live) == 24
        every = torch.cat([update.rows for update in batch.updates])
        assert sorted(every.tolist()) == list(range(24))
        for update in batch.updates:
            live = [row for row in update.rows.tolist() if batch.advantages[row] != 0]
            learned = [row for part in update.micro_batches for row in part.rows.tolist()]
            assert sorted(learned) == sorted(live)


def test_rows_of_dead_groups_are_not_scored(everything_is_live, monkeypatch, seen, tmp_path):
    """Rows that go through the model, frozen and trained on, those of the first update once."""
    calls = Calls(rollout.completion_logprobs)
    monkeypatch.setattr(rollout, "completion_logprobs", calls.stand_in)

    def scored(gradients):
        with_gradients = [result[0].requires_grad for _, _, result in calls]
        rows = [len(samples.lengths) for (_, samples), _, _ in calls]
        chosen = zip(rows, with_gradients)
        return sum(number for number, has in chosen if has == gradients)

    flags = f"{MIXED} --old-logprobs trainer"
    good(tmp_path / "live", flags)
    live = sum(int(batch.live.sum()) for batch in seen.batches)
    first = sum(int(batch.live[batch.updates[0].rows].sum()) for batch in seen.batches)
    check = 4  # rows of the check that the model can be scored, before the run
    assert scored(gradients=True) == live < 3 * 24
    assert scored(gradients=False) == live - first + check

    calls.clear()
    everything_is_live()
    good(tmp_path / "all", flags)
    assert scored(gradients=True) == 3 * 24
    assert scored(gradients=False) == 3 * 16 + check


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--algo grpo --micro-batch-tokens 24",
        "--algo dapo --temperature 0.7",
        "--gradient-checkpointing",
        "--dtype bfloat16",
        "--model models/moe --algo grpo",
        "--model models/moe --algo grpo --routing-replay",
        "--algo ppo",
        "--completions-per-update 24 --epochs 2",
    ],
)
def test_old_logprobs_of_the_first_update_are_those_of_a_pass_without_gradients(
    flags, monkeypatch, tmp_path
):
    """To the bit: the first update brings its own, as the policy still is the old one."""
    improve, checked = train.improve, []

    @functools.wraps(improve)
    def watched(run, batch):
        expected = []
        for update in batch.updates:
            for part in update.micro_batches:
                assert part.unscored == (update is batch.updates[0])
                if part.unscored:
                    with torch.no_grad():
                        logprobs, _ = run.logprobs(run.policy, batch.samples[part.rows])
                    expected.append((part.rows, logprobs))
        made = improve(run, batch)
        for rows, logprobs in expected:
            assert torch.equal(batch.old_logprobs[rows], logprobs)
            checked.append(len(rows))
        return made

    monkeypatch.setattr(train, "improve", watched)
    folder = good(tmp_path, f"{MIXED} {flags}").folder
    assert sum(checked) >= 8
    if "24 --epochs" not in flags:
        assert metrics(folder)[-1]["policy_kl"] > 0  # other updates found the policy moved


@pytest.mark.parametrize("flags", ["--tis-cap 2", "--algo reinforce++ --kl-coef 0.1"])
def test_old_logprobs_that_advantages_need_are_scored_before(flags, monkeypatch, tmp_path):
    improve = train.improve

    @functools.wraps(improve)
    def watched(run, batch):
        assert not any(part.unscored for part in batch.own_micro_batches())
        for part in batch.own_micro_batches():
            lengths = batch.samples.lengths[part.rows]
            first = batch.old_logprobs[part.rows][:, 0]
            assert bool((lengths > 0).all()) and bool((first < 0).all())
        return improve(run, batch)

    monkeypatch.setattr(train, "improve", watched)
    good(tmp_path, f"{MIXED} {flags} --steps 1")


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo"])
def test_metrics_are_means_over_live_rows(algorithm, seen, tmp_path):
    """With one update a rollout every ratio is 1, and so is their mean; the entropy is that of the
    live rows' tokens."""
    flags = f"{MIXED} --algo {algorithm} --completions-per-update 24 --steps 1"
    [row] = metrics(good(tmp_path, flags).folder)
    [batch] = seen.batches
    assert 0 < int(batch.live.sum()) < 24
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-6)
    policy = rollout.load_model("models/tiny")
    _, entropy = rollout.completion_logprobs(policy, batch.samples[batch.live], temperature=1.0)
    tokens = batch.samples.lengths[batch.live].sum()
    assert row["entropy"] == pytest.approx(float(entropy.detach().sum() / tokens), rel=1e-5)


def test_entropies_that_no_loss_reads_have_no_gradient(monkeypatch, tmp_path):
    """A coefficient of 0 multiplies it: without it the trained weights are the same, to the bit."""
    score, asked = rollout.completion_logprobs, []

    def scored(*args, entropy_gradient=True, **options):
        asked.append(entropy_gradient)
        return score(*args, entropy_gradient=entropy_gradient, **options)

    def always(*args, entropy_gradient=True, **options):
        return score(*args, **options)

    monkeypatch.setattr(rollout, "completion_logprobs", scored)
    one = good(tmp_path / "without", f"{MIXED} --steps 2").folder
    assert asked.count(False) > 2
    asked.clear()
    good(tmp_path / "bonus", f"{MIXED} --steps 1 --entropy-coef 0.01")
    assert False not in asked and len(asked) > 2
    monkeypatch.setattr(rollout, "completion_logprobs", always)
    other = good(tmp_path / "with", f"{MIXED} --steps 2").folder
    weights = [load_file(newest(folder) / "model.safetensors") for folder in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
