"""The loop of train.py: from the rollout to the gradient, metrics, and what a run leaves."""

import ast
import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import bench_algorithms
import gspo
import rewards
import rollout
import train
from tools import (
    BASE,
    ROOT,
    SMALL,
    Calls,
    by_group,
    centred,
    character_tokenizer,
    furnish,
    good,
    gradients,
    launch,
    metrics,
    newest,
    random_policy,
    refused,
    rows_of,
    same_run,
    spied,
    strict,
    timeless,
    write_rows,
    z_scores,
)

pytestmark = pytest.mark.usefixtures("place")

# ------------------------------------------------------------------------------ the first ratio


@pytest.fixture(scope="module")
def dropout_model(models):
    """A GPT-2 whose configuration asks for dropout: it must be off wherever a model scores."""
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=18,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.3,
        embd_pdrop=0.3,
        attn_pdrop=0.3,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder = models / "dropout"
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def architectures(models, dropout_model):
    """Policies of other architectures, with dropout where they have it, and of both ways to score:
    in our attention, and padded by transformers."""
    shape = dict(vocab_size=18, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    dropped = dict(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)
    random_policy(
        models / "opt",
        transformers.OPTConfig(
            **(shape | dropped),
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
        ),
    )
    random_policy(
        models / "bloom",
        transformers.BloomConfig(
            **shape, hidden_size=32, n_layer=2, n_head=2, hidden_dropout=0.3, attention_dropout=0.3
        ),
    )
    random_policy(
        models / "mamba",
        transformers.MambaConfig(**shape, hidden_size=32, state_size=4, num_hidden_layers=2),
    )
    return models


@pytest.fixture
def nothing_moves(monkeypatch):
    """Updates are computed, and none is made: pi_theta stays pi_old in all of a step."""
    monkeypatch.setattr(train, "take_step", lambda run: None)


def ratios_are_1(calls):
    """Old and new log-probs are the same bits in every call of a loss; how many calls."""
    for (logprobs, old_logprobs, _, mask), _, _ in calls:
        assert torch.equal(logprobs[mask], old_logprobs[mask])
    return len(calls)


@pytest.mark.parametrize(
    "algorithm, flags",
    [
        ("gspo", ""),
        ("dapo", ""),
        ("ppo", ""),
        ("reinforce++", "--kl-coef 0.1"),
        ("gmpo", "--epochs 2"),
        ("gspo", "--tis-cap 2"),
        ("gspo", "--dtype bfloat16"),
        ("gspo", "--stale-steps 2"),
        ("gspo", "--temperature 0.7"),
        ("grpo", "--model models/moe --routing-replay"),
        ("gspo", "--overlong-filter --max-new-tokens 40"),
    ],
)
def test_the_first_ratio_is_exactly_1(algorithm, flags, losses, nothing_moves, tmp_path):
    """What `freeze` scored without gradients, for all updates but the first, and the log-probs of
    the updates themselves are the same bits, row for row, as long as nothing moves."""
    calls = losses(algorithm)
    flags = f"{flags} --old-logprobs trainer --micro-batch-tokens 24"
    good(tmp_path, f"{BASE} --algo {algorithm} {flags}")
    assert ratios_are_1(calls) > 2 * 4  # two steps of four updates, of several micro-batches


@pytest.mark.parametrize(
    "algorithm, flags, who",
    [
        ("gspo", "", "sampler"),
        ("dapo", "--temperature 0.7", "sampler"),
        ("gspo", "--kl-coef 0.1", "sampler"),
        ("reinforce++", "--kl-coef 0.1", "trainer"),  # in the reward: exactly 0 at the start
        ("gspo", "--tis-cap 2", "trainer"),  # it compares the two
        ("gspo", "--mismatch-mask token", "trainer"),
        ("gspo", "--stale-steps 2", "trainer"),
        ("gspo", "--dtype bfloat16", "trainer"),
        ("gspo", "--lora-rank 2", "trainer"),
        ("gspo", "--model models/moe", "trainer"),  # nearly tied experts: rounding chooses
        ("gspo", "--model models/mamba", "trainer"),  # its state is computed in two ways
    ],
)
def test_a_sampler_that_is_the_policy_has_scored_pi_old(
    algorithm, flags, who, architectures, losses, nothing_moves, monkeypatch, tmp_path
):
    """To rounding; the first ratio of a step is exactly 1 all the same."""
    calls, scored = losses(algorithm), []
    score_old = train.score_old

    @functools.wraps(score_old)
    def watched(*arguments):
        scored.append(True)
        score_old(*arguments)

    monkeypatch.setattr(train, "score_old", watched)
    good(tmp_path, f"{BASE} --algo {algorithm} --steps 1 {flags}")
    assert len(calls) >= 3 and ratios_are_1(calls[:1])
    assert bool(scored) == (who == "trainer")
    for (logprobs, old_logprobs, _, mask), _, _ in calls:
        torch.testing.assert_close(logprobs[mask], old_logprobs[mask], atol=1e-5, rtol=0)
    if who == "sampler":  # or these are no other numbers
        assert not all(torch.equal(new[mask], old[mask]) for (new, old, _, mask), _, _ in calls)


@pytest.mark.parametrize("flags", ["", "--gradient-checkpointing"])
@pytest.mark.parametrize("model", ["tiny", "moe", "dropout", "opt", "bloom", "mamba"])
def test_the_first_ratio_is_exactly_1_in_every_architecture(
    model, flags, architectures, losses, nothing_moves, tmp_path
):
    """Dropout is off wherever a model scores, where layers are computed twice as well."""
    calls = losses("grpo")
    flags = f"--old-logprobs trainer --steps 1 {flags}"
    good(tmp_path, f"{BASE} --model models/{model} --algo grpo {flags}")
    assert ratios_are_1(calls) == 4


def test_models_that_read_each_prompt_for_itself_get_smaller_micro_batches(
    architectures, losses, tmp_path
):
    """An update of one group of 4; prompt and completion together are more than 4 tokens a row."""
    parts = {}
    for model in ("opt", "mamba"):  # the first reads a group's prompt once
        calls = losses("grpo")
        flags = "--group-size 4 --completions-per-update 4 --max-new-tokens 2 --kl-coef 0.1"
        good(
            tmp_path / model,
            f"{BASE} --model models/{model} --algo grpo --steps 1 --micro-batch-tokens 14 {flags}",
        )
        parts[model] = len(calls)
    assert parts["mamba"] >= 2 * parts["opt"]


def test_ratios_leave_1_when_the_policy_moves(losses, tmp_path):
    """Or the two tests above could not fail: here the second update of a step finds it moved."""
    calls = losses("gspo")
    good(tmp_path, f"{BASE} --steps 1")
    assert ratios_are_1(calls[:1]) == 1
    (logprobs, old_logprobs, _, mask), _, _ = calls[1]
    assert not torch.equal(logprobs[mask], old_logprobs[mask])


def test_sampler_logprobs_as_old_are_close_to_1(losses, tmp_path):
    calls = losses("gspo")
    good(tmp_path, f"{BASE} --old-logprobs sampler --completions-per-update 16 --steps 1")
    (logprobs, old_logprobs, _, mask), _, _ = calls[0]
    assert not torch.equal(logprobs, old_logprobs)
    torch.testing.assert_close(logprobs[mask], old_logprobs[mask], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------ the gradient


def plain_logprobs(model, batch, i, temperature=1.0):
    """Log-probs of row i by one ordinary forward of the row alone, without padding."""
    rows = batch.samples
    n, p = int(rows.lengths[i]), int(rows.prompt_lengths[i])
    ids = rows.tokens[i, rows.prompt_width - p : rows.prompt_width + n]
    logits = model(ids[None], use_cache=False).logits[0, p - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[p:, None])[:, 0]


def whole_gradient(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def close(ours, theirs, tolerance=1e-4):
    """Gradients agree up to a share of the largest entry."""
    assert len(ours) == len(theirs)
    scale = max(float(tensor.abs().max()) for tensor in theirs)
    assert scale > 0
    for one, other in zip(ours, theirs):
        assert float((one - other).abs().max()) < tolerance * scale


ONE_UPDATE = "--steps 1 --completions-per-update 16 --max-grad-norm 1e9 --max-new-tokens 20"


@pytest.mark.parametrize(
    "algorithm, unit, advantages",
    [
        ("gspo", "completion", z_scores),
        ("gspo-token", "completion", z_scores),
        ("grpo", "completion", z_scores),
        ("sapo", "completion", z_scores),
        ("gmpo", "completion", z_scores),
        ("cispo", "token", z_scores),
        ("dapo", "token", z_scores),
        ("dr-grpo", "constant", centred),
        ("rloo", "token", lambda values: [4 / 3 * x for x in centred(values)]),
    ],
)
def test_first_gradient_is_reinforce_by_plain_forwards(algorithm, unit, advantages, seen, tmp_path):
    """At ratio 1 every loss has the gradient of -A log pi, in the mean of its own unit.

    Sampling, rewards, advantages, scoring and accumulation at once, against one plain forward per
    row: sum_i A_i / (N L_i) sum_t (completion), sum_i A_i sum_t / sum L (token), / (N T_max).
    """
    with gradients() as steps:
        good(
            tmp_path,
            f"{BASE} --algo {algorithm} {ONE_UPDATE} --micro-batch-tokens 70 "
            "--temperature 0.8 --overlong-cache 0 --no-dynamic-sampling",
        )
    batch = seen.batches[0]
    lengths = batch.samples.lengths.tolist()
    assert len(set(lengths)) > 1  # ragged, or the units could not be told apart
    policy = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32)
    pays = by_group([score.reward for score in batch.scores], 4, advantages)
    loss = 0.0
    for i, (advantage, n) in enumerate(zip(pays, lengths)):
        divisor = {"completion": 16 * n, "token": sum(lengths), "constant": 16 * 20}[unit]
        loss = loss - advantage * plain_logprobs(policy, batch, i, 0.8).sum() / divisor
    close(steps[0], whole_gradient(loss, policy))


@pytest.mark.parametrize("algorithm", ["gspo", "dapo"])
def test_kl_term_has_the_unit_and_weight_of_its_algorithm(algorithm, seen, monkeypatch, tmp_path):
    """Equal rewards leave the KL term alone: c times the mean of e^x - x - 1, x = ref - new."""
    start = train.start

    def apart(config, ranks):
        run = start(config, ranks)
        with torch.no_grad():
            for parameter in run.ref_policy.parameters():
                parameter += 0.01 * torch.sin(torch.arange(parameter.numel())).view_as(parameter)
        return run

    monkeypatch.setattr(train, "start", apart)
    with gradients() as steps:
        result = good(
            tmp_path,
            f"{BASE} --reward pay.py:always --algo {algorithm} {ONE_UPDATE} "
            "--kl-coef 0.3 --overlong-cache 0 --no-dynamic-sampling "
            "--micro-batch-tokens 70",
        )
    batch, reference = seen.batches[0], seen.run.ref_policy
    policy = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32)
    lengths, kl = batch.samples.lengths.tolist(), 0.0
    for i, n in enumerate(lengths):
        with torch.no_grad():
            anchor = plain_logprobs(reference, batch, i)
        x = anchor - plain_logprobs(policy, batch, i)
        kl = kl + (x.exp() - x - 1).sum() / (sum(lengths) if algorithm == "dapo" else 16 * n)
    close(steps[0], whole_gradient(0.3 * kl, policy), 1e-3)
    assert metrics(result.folder)[0]["kl"] == pytest.approx(kl.item(), rel=1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        "--algo gspo",
        "--algo dapo",
        "--algo dr-grpo",
        "--algo grpo --kl-coef 0.1",
        "--algo ppo --kl-coef 0.1",
        "--algo reinforce++ --entropy-coef 0.1",
        "--algo gspo --overlong-filter --max-new-tokens 24",
        "--algo gspo --dtype bfloat16",
    ],
)
def test_many_micro_batches_have_the_gradient_of_one(flags, tmp_path):
    """Pitfall 1: a mean of means. Also in the second update, where ratios are not 1."""
    kept = []
    for tokens in (30, 10**6):
        with gradients() as steps:
            good(
                tmp_path / str(tokens),
                f"{BASE} {ONE_UPDATE} --completions-per-update 8 --lr 1e-4 "
                f"--micro-batch-tokens {tokens} {flags}",
            )
        kept.append(steps)
    assert len(kept[0]) == len(kept[1]) == 2
    close(kept[0][0], kept[1][0], 0.02 if "bfloat16" in flags else 1e-4)
    if "bfloat16" not in flags:  # there the first step, a sign for Adam, takes them apart
        close(kept[0][1], kept[1][1], 1e-2)


def test_gradients_are_clipped_to_the_norm(tmp_path):
    with gradients() as steps:
        result = good(
            tmp_path, f"{BASE} --steps 1 --completions-per-update 16 --max-grad-norm 1e-3"
        )
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in steps[0]))
    assert norm == pytest.approx(1e-3, rel=1e-2)
    assert metrics(result.folder)[0]["grad_norm"] > 0.01  # what it was before


def test_the_learning_rate_warms_up(tmp_path):
    result = good(tmp_path, f"{BASE} --warmup-steps 2 --steps 3")
    assert [row["lr"] for row in metrics(result.folder)] == pytest.approx([5e-4, 1e-3, 1e-3])


# ------------------------------------------------------------------------------ to the advantages


def test_a_repeated_prompt_does_not_merge_groups(seen, tmp_path):
    """Pitfall 11: 20 rows with one prompt still are groups by position, each with its own mean."""
    write_rows(Path("same.jsonl"), [{"prompt": "1+1=", "answer": "2"}] * 20)
    good(tmp_path, f"{BASE} --data same.jsonl --eval-data same.jsonl --steps 1")
    batch = seen.batches[0]
    expected = by_group([score.reward for score in batch.scores], 4, z_scores)
    assert batch.advantages.reshape(16, -1)[:, 0].tolist() == pytest.approx(expected, abs=1e-4)
    groups = [
        round(sum(score.reward for score in batch.scores[i : i + 4]), 6) for i in (0, 4, 8, 12)
    ]
    assert len(set(groups)) > 1  # else merging would change nothing


def test_dynamic_sampling_refills_until_the_batch_is_alive(seen, tmp_path):
    """Prompts on 1 are always right, on 2 always wrong: neither may be left in the batch."""
    write_rows(
        Path("mixed.jsonl"),
        [{"prompt": f"{first}+{i}=", "answer": "0"} for first in "123" for i in range(9)],
    )
    result = good(
        tmp_path,
        f"{BASE} --data mixed.jsonl --reward pay.py:by_prompt --algo dapo "
        "--max-refills 40 --eval-prompts 2",
    )
    for batch, row in zip(seen.batches, metrics(result.folder)):
        assert len(batch.rows) == 16
        assert {row["prompt"][0] for row in batch.rows} == {"3"}
        for i in range(0, 16, 4):
            correct = [score.correct for score in batch.scores[i : i + 4]]
            assert min(correct) < max(correct)
            assert len({row["prompt"] for row in batch.rows[i : i + 4]}) == 1
        assert row["prompts_drawn"] >= 8  # refilled, and what was dropped is still counted
    rows = metrics(result.folder)
    assert sum(row["dead_right"] for row in rows) > 0 and sum(row["dead_wrong"] for row in rows) > 0
    assert "warning" not in result.out


def test_dynamic_sampling_is_bounded_and_warns_with_the_numbers(seen, tmp_path):
    write_rows(
        Path("dead.jsonl"),
        [{"prompt": f"{1 + (i > 0)}+{i % 9}=", "answer": "0"} for i in range(40)],
    )
    result = good(
        tmp_path,
        f"{BASE} --data dead.jsonl --reward pay.py:by_prompt --algo dapo --max-refills 3 --steps 3",
    )
    warnings = [line for line in result.out.splitlines() if "--max-refills" in line]
    assert len(warnings) == 1  # once, not every step
    # alive of wanted, and prompts drawn
    assert re.search(r"\b0 of (the )?4\b", warnings[0]) and "16" in warnings[0]
    assert [row["prompts_drawn"] for row in metrics(result.folder)] == [16] * 3
    assert all(float(batch.advantages.abs().max()) == 0 for batch in seen.batches)


def test_overlong_filtering_leaves_the_other_rows_alone(losses, seen, tmp_path):
    """A truncated row leaves the loss, even where something (here the bonus) needs all others,
    which are scored as before."""
    calls = losses("gspo")
    flags = f"{BASE} --steps 1 --completions-per-update 16 --max-new-tokens 12 --lr 1e-4"
    flags += " --entropy-coef 0.1"
    good(tmp_path / "without", flags)
    good(tmp_path / "with", f"{flags} --overlong-filter")
    (before, _, _, all_tokens), _, _ = calls[0]
    (after, _, _, left), numbers, _ = calls[1]
    truncated = seen.batches[1].samples.truncated
    all_rows, rows = (rows_of(batch.updates[0]) for batch in seen.batches)
    assert 0 < int(truncated.sum()) < 16
    assert rows.tolist() == [row for row in all_rows.tolist() if not truncated[row]]
    torch.testing.assert_close(before[~truncated[all_rows]], after, rtol=1e-5, atol=1e-6)
    assert torch.equal(left, all_tokens[~truncated[all_rows]])


@pytest.mark.parametrize("algo", ["gspo", "grpo", "dapo"])
def test_overlong_filtering_counts_only_what_is_left(algo, tmp_path):
    """The mean is over what is in the loss: with one update a rollout the ratio is 1."""
    [row] = metrics(
        good(
            tmp_path,
            f"{BASE} --algo {algo} --steps 1 --completions-per-update 16 "
            "--max-new-tokens 12 --overlong-filter",
        ).folder
    )
    assert 0 < row["truncated"] < 1
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "flags", ["--algo grpo", "--algo reinforce++ --kl-coef 0.1", "--algo ppo", "--entropy-coef 0.1"]
)
def test_updates_that_the_overlong_filter_empties_are_in_no_mean(flags, seen, tmp_path):
    """Nothing moves, so every ratio is 1: an update of truncated completions alone has none."""
    flags += " --overlong-filter --max-new-tokens 6 --completions-per-update 2 --lr 1e-30"
    [row] = metrics(good(tmp_path, f"{BASE} --steps 1 {flags}").folder)
    truncated = seen.batches[0].samples.truncated
    emptied = [bool(truncated[update.rows].all()) for update in seen.batches[0].updates]
    assert 0 < sum(emptied) < len(emptied)
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert seen.batches[0].live.tolist() == (~truncated).tolist()


def test_dead_groups_of_dapo_keep_their_rewards_in_the_metrics(tmp_path):
    """0.7 each, with nothing off for length: no advantage, and a mean reward of 0.7."""
    folder = good(tmp_path, f"{BASE} --algo dapo --reward pay.py:always --overlong-cache 0").folder
    for row in metrics(folder):
        assert row["reward"] == pytest.approx(0.7) and row["advantage_abs"] == 0
    assert all(
        strict(line)["reward"] == pytest.approx(0.7)
        for line in (folder / "samples.jsonl").read_text().splitlines()
    )


def test_advantages_per_token_are_averaged_over_tokens(seen, tmp_path):
    """Not over padding: PPO's are whitened, so that their mean size is near 0.8, and never 0.1."""
    [row] = metrics(good(tmp_path, f"{BASE} --algo ppo --steps 1").folder)
    [batch] = seen.batches
    mask = batch.samples.completion_mask
    assert not mask.all()
    assert row["advantage_abs"] == pytest.approx(
        float(batch.advantages[mask].abs().mean()), rel=1e-5
    )


def test_soft_overlong_punishment_reaches_the_rewards(seen, tmp_path):
    """Length 12 of at most 12 with a cache of 5: -1; 8: -1/5; 7 and less: 0."""
    good(tmp_path, f"{BASE} --steps 1 --max-new-tokens 12 --overlong-cache 5")
    batch = seen.batches[0]
    lengths = batch.samples.lengths.tolist()
    assert min(lengths) <= 7 < max(lengths)
    for reward, score, n in zip(batch.rewards.tolist(), batch.scores, lengths):
        assert reward == pytest.approx(score.reward - max(0, n - 7) / 5, abs=1e-6)


def test_repetition_penalty_lowers_the_rewards(seen, tmp_path):
    good(tmp_path, f"{BASE} --steps 1 --max-new-tokens 16 --repetition-penalty 2 --seed 1")
    batch = seen.batches[0]
    expected = []
    for ids, n, score in zip(
        batch.samples.completions.tolist(), batch.samples.lengths.tolist(), batch.scores
    ):
        grams = [tuple(ids[i : i + 4]) for i in range(n - 3)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        expected.append(score.reward - 2 * repeated)
    assert expected != [score.reward for score in batch.scores]
    assert batch.rewards.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_reference_follows_every_ref_every_steps(tmp_path):
    """One update a step: KL to the reference is 0 in the steps that begin at it, 1 and 3."""
    result = good(
        tmp_path, f"{BASE} --kl-coef 0.1 --ref-every 2 --steps 4 --completions-per-update 16"
    )
    kl = [row["kl"] for row in metrics(result.folder)]
    assert kl[0] == kl[2] == 0 and kl[1] > 0 and kl[3] > 0


def test_the_reference_stays_without_ref_every(tmp_path):
    result = good(tmp_path, f"{BASE} --kl-coef 0.1 --steps 3 --completions-per-update 16")
    kl = [row["kl"] for row in metrics(result.folder)]
    assert kl[0] == 0 and kl[1] > 0 and kl[2] > kl[1]


def test_a_stale_sampler_is_one_step_behind(tmp_path):
    """--stale-steps 2: fresh in steps 1 and 3, behind in 2 and 4; pi_old is the trainer's still."""
    result = good(tmp_path, f"{BASE} --stale-steps 2 --steps 4")
    drift = [row["sampler_kl"] for row in metrics(result.folder)]
    assert max(drift[0], drift[2]) < 1e-8 < 1e-5 < min(drift[1], drift[3])


def test_a_bf16_sampler_is_told_by_how_much_it_is_off(tmp_path):
    """The sampler's drift shows, and the ratio, of float32 weights under autocast, has none."""
    result = good(tmp_path, f"{BASE} --dtype bfloat16 --steps 1 --completions-per-update 16")
    row = metrics(result.folder)[0]
    assert row["sampler_kl"] > 1e-9 and row["sampler_sequence_std"] > 1e-5
    assert row["sampler_outside_clip"] > 0
    assert row["policy_kl"] == 0 and row["ratio_mean"] == pytest.approx(1, abs=1e-6)
    weights = AutoModelForCausalLM.from_pretrained(newest(result.folder))
    assert weights.dtype == torch.float32


def test_epochs_go_over_the_rollout_again(tmp_path):
    counts = []
    for epochs in (1, 3):
        with gradients() as steps:
            good(tmp_path / str(epochs), f"{BASE} --steps 1 --epochs {epochs}")
        counts.append(len(steps))
    assert counts == [4, 12]


@pytest.mark.parametrize("level", ["token", "completion"])
def test_tis_with_exact_logprobs_changes_nothing(level, monkeypatch, tmp_path):
    """Every weight is min(exp(0), cap) = 1 where the sampler's log-probs are the trainer's."""
    freeze = train.freeze

    @functools.wraps(freeze)
    def exact(run, batch):
        freeze(run, batch)
        batch.samples.sampler_logprobs.copy_(batch.old_logprobs)

    monkeypatch.setattr(train, "freeze", exact)
    rows = []
    for name, flags in (("off", ""), ("on", f"--tis-cap 2 --tis-level {level}")):
        rows.append(timeless(good(tmp_path / name, f"{BASE} --algo grpo --lr 1e-5 {flags}").folder))
    for one, other in zip(*rows):
        for name in ("reward", "grad_norm", "ratio_mean", "entropy", "policy_kl"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-7), name


@pytest.mark.parametrize("level", ["token", "completion"])
def test_tis_weighs_the_advantages_by_the_mismatch(level, monkeypatch, losses, seen, tmp_path):
    """Old minus sampler of +-log 1.5 by turns: weights 1.5 and 1/1.5 per token, capped at 1.2."""
    freeze, calls = train.freeze, losses("grpo")

    @functools.wraps(freeze)
    def apart(run, batch):
        freeze(run, batch)
        turns = torch.where(torch.arange(batch.old_logprobs.shape[1]) % 2 == 0, 1.0, -1.0)
        batch.samples.sampler_logprobs.copy_(batch.old_logprobs - math.log(1.5) * turns)

    monkeypatch.setattr(train, "freeze", apart)
    good(
        tmp_path,
        f"{BASE} --algo grpo --steps 1 --tis-cap 1.2 --tis-level {level} "
        "--completions-per-update 16",
    )
    batch = seen.batches[0]
    plain = by_group([score.reward for score in batch.scores], 4, z_scores)
    (_, _, advantages, mask), _, _ = calls[0]
    rows = rows_of(batch.updates[0]).tolist()
    for i, row in enumerate(rows):
        n = int(batch.samples.lengths[row])
        if level == "token":
            weights = [1.2 if t % 2 == 0 else 1 / 1.5 for t in range(n)]
        else:
            weights = [min(1.2, 1.5 ** ((n % 2) / n))] * n
        expected = [plain[row] * weight for weight in weights]
        assert advantages[i, :n].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)


# ------------------------------------------------------------------------------ step rewards


class Pieces:
    """A tokenizer whose tokens are strings of several characters; 0 ends, and is special."""

    pieces = ["<end>", "ab", "c", "", "def"]

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(self.pieces[i] for i in ids if i)


def test_step_rewards_stand_at_the_token_that_completes_the_step():
    """Row 0 is ab|c|def|end with ends 2, 3, 5 in characters: a step that ends inside def (5) is
    complete with def. Row 1 is c|ab: an end beyond the text is at the last token, values add up.
    The completion's own reward, 8 and 16, is at the last token."""
    tokens = torch.tensor([[9, 1, 2, 4, 0], [9, 2, 1, 3, 3]])
    samples = rollout.Rollout(
        tokens,
        torch.tensor([1, 1]),
        torch.tensor([4, 2]),
        torch.zeros(2, 4),
        torch.tensor([False, True]),
    )
    scores = [
        rewards.Score(0.0, 0.0, {}, steps)
        for steps in ([(2, 1.0), (5, 0.25), (6, 0.5)], [(1, 2.0), (3, 1.0), (77, 4.0)])
    ]
    batch = SimpleNamespace(
        samples=samples,
        scores=scores,
        texts=["abcdef", "cab"],
        mask=samples.completion_mask,
        rewards=torch.tensor([8.0, 16.0]),
    )
    per_token, steps = train.place_rewards(SimpleNamespace(tokenizer=Pieces()), batch)
    assert per_token.tolist() == [[1.0, 0, 0.75, 8.0], [2.0, 21.0, 0, 0]]
    assert steps.tolist() == [[True, False, True, True], [True, True, False, False]]


def test_gspo_token_takes_the_steps_of_a_verifier(losses, seen, tmp_path):
    """`steps` pays 1 for an even first digit, then for all of it: the first token is a step."""
    calls = losses("gspo-token")
    good(
        tmp_path,
        f"{BASE} --algo gspo-token --reward pay.py:steps --steps 1 --completions-per-update 16",
    )
    batch = seen.batches[0]
    (_, _, advantages, _), _, _ = calls[0]
    rows = rows_of(batch.updates[0]).tolist()
    first, rest = [], []
    for score in batch.scores:
        first.append(score.steps[0][1] + score.reward)
        rest.append(score.reward)
    first, rest = by_group(first, 4, z_scores), by_group(rest, 4, z_scores)
    checked = 0
    for i, row in enumerate(rows):
        group = range(row - row % 4, row - row % 4 + 4)
        if any(len(batch.texts[j]) < max(2, int(batch.samples.lengths[j]) - 1) for j in group):
            continue  # too short for two steps, or special tokens in it, which are no characters
        checked += 1
        assert float(advantages[i, 0]) == pytest.approx(first[row], abs=1e-4)
        assert float(advantages[i, 1]) == pytest.approx(rest[row], abs=1e-4)
    assert checked >= 4


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_token_rewards_hold_the_steps_of_a_verifier(algorithm, monkeypatch, seen, tmp_path):
    """`steps` pays 1 for an even first digit at the first token, and the outcome at the last."""
    calls = spied(monkeypatch, algorithm, "advantages")
    good(tmp_path, f"{BASE} --algo {algorithm} --reward pay.py:steps --steps 1")
    (per_token, *_), _, _ = calls[0]
    batch, checked = seen.batches[0], 0
    for i, (score, n) in enumerate(zip(batch.scores, batch.samples.lengths.tolist())):
        if n > 1 and batch.samples.completions[i, 0] > 2:  # a character first, no special token
            expected = [0.0] * n
            expected[0] = float(batch.texts[i][0] in "02468")
            expected[-1] += score.reward
            assert per_token[i, :n].tolist() == pytest.approx(expected, abs=1e-6)
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    "algorithm, scale",
    [("gspo", "batch"), ("grpo", "none"), ("dr-grpo", "group"), ("dapo", "batch")],
)
def test_advantages_are_divided_by_the_std_that_the_flag_says(algorithm, scale, seen, tmp_path):
    good(
        tmp_path,
        f"{BASE} --algo {algorithm} --steps 1 --advantage-scale {scale} --overlong-cache 0 "
        "--no-dynamic-sampling",
    )
    batch = seen.batches[0]
    expected = gspo.group_advantages(batch.rewards, 4, scale=scale)
    assert torch.equal(batch.advantages.flatten(), expected) and float(expected.abs().max()) > 0


def test_an_entropy_bonus_raises_the_entropy(losses, tmp_path):
    """The gradient of - coef x mean entropy alone (all rewards equal): entropy grows step by step,
    and not without the flag."""
    flags = f"{BASE} --reward pay.py:always --steps 3 --lr 3e-3 --seed 2"
    plain = metrics(good(tmp_path / "off", flags).folder)
    bonus = metrics(good(tmp_path / "on", f"{flags} --entropy-coef 1").folder)
    assert "grad_norm" not in plain[-1] and bonus[0]["grad_norm"] > 0
    assert bonus[-1]["entropy"] > bonus[0]["entropy"] + 1e-3
    assert bonus[0]["loss"] == pytest.approx(-bonus[0]["entropy"], rel=1e-4)


@pytest.mark.parametrize("algorithm, estimator", [("ppo", "k3"), ("reinforce++", "k2")])
def test_where_the_kl_goes_and_what_the_advantages_take_are_two_things(
    algorithm, estimator, monkeypatch, tmp_path
):
    """A fork may move a KL from the reward to the loss."""
    row = dataclasses.replace(gspo.ALGOS[algorithm], kl_in="loss", kl_estimator=estimator)
    monkeypatch.setitem(gspo.ALGOS, algorithm, row)
    good(tmp_path, f"{BASE} --algo {algorithm} --kl-coef 0.1 --steps 1")


def test_steps_are_not_looked_for_where_nobody_reads_them(monkeypatch, tmp_path):
    """Finding the token of a step decodes many prefixes: seconds, with long completions."""
    monkeypatch.setattr(rollout, "token_that_completes", lambda *args: pytest.fail("looked"))
    good(tmp_path, f"{BASE} --reward pay.py:steps --steps 1")


def test_other_algorithms_take_the_outcome_only(losses, tmp_path):
    calls = losses("gspo")
    good(tmp_path, f"{BASE} --reward pay.py:steps --steps 1")
    (_, _, advantages, _), _, _ = calls[0]
    assert advantages.reshape(len(advantages), -1).shape[1] == 1


# ------------------------------------------------------------------------------ the critic


@pytest.mark.slow
def test_the_critic_learns_a_constant_reward(tmp_path):
    """Every completion pays 0.7: the value loss starts near 0.7^2 / 2 and falls to a tenth."""
    # the limit is high so that none is cut off, else 0.7 + V is paid
    result = good(
        tmp_path,
        f"{BASE} --algo ppo --reward pay.py:always --steps 6 --critic-lr 3e-3 "
        "--lr 1e-6 --gae-lambda 1 --max-new-tokens 400",
    )
    rows = metrics(result.folder)
    assert rows[0]["value_loss"] > 0.05
    assert rows[-1]["value_loss"] < 0.1 * rows[0]["value_loss"]
    assert all("explained_variance" in row for row in rows)


def test_ppo_whitens_its_advantages(losses, tmp_path):
    calls = losses("ppo")
    good(tmp_path, f"{BASE} --algo ppo --steps 1 --completions-per-update 16")
    (_, _, advantages, mask), _, _ = calls[0]
    tokens = advantages[mask.bool()]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-5)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-4)


def test_truncated_rows_bootstrap_from_the_critic(monkeypatch, seen, tmp_path):
    """Pitfall 13: V after the end token is 0, after a cut it is the critic's."""
    calls = spied(monkeypatch, "ppo", "advantages")
    good(tmp_path, f"{BASE} --algo ppo --max-new-tokens 12 --critic-lr 3e-3")
    _, keyword, _ = calls[1]  # the critic's value head starts at zero: the second step
    truncated = seen.batches[1].samples.truncated
    assert 0 < int(truncated.sum()) < 16
    assert (keyword["bootstrap"][truncated] != 0).all()
    assert (keyword["bootstrap"][~truncated] == 0).all()


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_kl_in_the_reward_is_k1_per_token(algorithm, monkeypatch, seen, tmp_path):
    """r_t = -0.2 (log pi_old - log pi_ref), and the verifier's reward on top at the last token."""
    calls = spied(monkeypatch, algorithm, "advantages")
    good(tmp_path, f"{BASE} --algo {algorithm} --kl-coef 0.2")
    positional, _, _ = calls[1]
    batch, lengths = seen.batches[1], seen.batches[1].samples.lengths.tolist()
    nonzero = 0
    for i, n in enumerate(lengths):
        expected = (-0.2 * (batch.old_logprobs[i, :n] - batch.ref_logprobs[i, :n])).tolist()
        nonzero += sum(abs(x) > 1e-6 for x in expected)
        expected[-1] += batch.scores[i].reward
        assert positional[0][i, :n].tolist() == pytest.approx(expected, abs=1e-6)
    assert nonzero > 16


@pytest.mark.parametrize("algorithm", gspo.ALGOS)
def test_every_algorithm_trains_and_has_a_critic_only_if_it_asks(algorithm, seen, tmp_path):
    before = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32)
    good(tmp_path, f"{BASE} --algo {algorithm} --steps 1 --prompts-per-step 2 --eval-prompts 1")
    assert (seen.run.critic is not None) == gspo.ALGOS[algorithm].critic
    assert len(seen.run.optimizer.param_groups) == 1 + gspo.ALGOS[algorithm].critic
    moved = [
        not torch.equal(*pair) for pair in zip(seen.run.policy.parameters(), before.parameters())
    ]
    assert any(moved)


@pytest.mark.slow
def test_gspo_solves_the_built_in_task_with_each_of_five_seeds(models):
    """The README's first command and result, less a margin: 50 steps from 26.5% to 98% or more."""
    results = bench_algorithms.train_all({"gspo": ["--algo", "gspo"]}, range(5), jobs=2, out=None)
    for run in results["gspo"]:
        assert "error" not in run, run
        assert 0.2 < run["before"] < 0.35 and bench_algorithms.after(run) > 0.95


# ------------------------------------------------------------------------------ what a run leaves


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """A run with everything in it; `policy` is the trained model as it was in memory."""
    here, kept, start = tmp_path_factory.mktemp("finished"), [], train.start
    furnish(here, models)

    def keep(config, ranks):
        kept.append(start(config, ranks))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(train, "start", keep)
        result = good(
            here / "runs",
            "--model models/tiny --steps 4 --save-every 1 --keep 2 --eval-every 2 "
            "--eval-samples 2 --kl-coef 0.05 --max-new-tokens 16 --lr 2e-4",
            "--reward",
            "pay.py:even + 0.5*arithmetic",
        )
    result.policy, result.rows = kept[0].policy, metrics(result.folder)
    return result


METRICS = {
    "reward": (0, 1.5),
    "reward_std": (0, 1),
    "reward/even": (0, 1),
    "reward/arithmetic": (0, 1),
    "solved": (0, 1),
    "dead_right": (0, 1),
    "dead_wrong": (0, 1),
    "prompts_drawn": (4, 4),
    "length_mean": (1, 16),
    "length_min": (1, 16),
    "length_max": (1, 16),
    "length_finished": (0, 16),
    "truncated": (0, 1),
    "advantage_abs": (0.1, 2),
    "ratio_mean": (0.8, 1.2),
    "policy_ratio_min": (0.5, 1),
    "policy_ratio_max": (1, 2),
    "policy_outside_clip": (0, 1),
    "policy_token_std": (0, 1),
    "policy_sequence_std": (0, 1),
    "clip_fraction": (0, 1),
    "clip_fraction_high": (0, 1),
    "approx_kl": (0, 0.1),
    "kl": (0, 1),
    "entropy": (0, math.log(18)),
    "grad_norm": (1e-3, 1e3),
    "lr": (2e-4, 2e-4),
    "sampler_kl": (0, 1e-6),
    "sampler_ratio_mean": (0.999, 1.001),
    "sampler_ratio_min": (0.999, 1),
    "sampler_ratio_max": (1, 1.001),
    "sampler_outside_clip": (0, 0.1),
    "bad_updates": (0, 0),
    "verifier_faults": (0, 0),
    "tokens_per_second": (1, 1e6),
}


def test_every_metric_is_there_every_step_within_reason(finished):
    for row in finished.rows:
        for name, (low, high) in METRICS.items():
            assert low - 1e-6 <= row[name] <= high + 1e-6, name


def test_metrics_are_numbers_one_row_a_step(finished):
    assert [row["step"] for row in finished.rows] == [1, 2, 3, 4]
    for row in finished.rows:
        for name, value in row.items():
            assert isinstance(value, (int, float)) and math.isfinite(value), name


def test_metrics_agree_with_the_samples(finished, seen, tmp_path):
    """reward, length and truncated are plain means over the rows of the step."""
    result = good(tmp_path, f"{BASE} --max-new-tokens 16")
    for row, batch in zip(metrics(result.folder), seen.batches):
        lengths, truncated = batch.samples.lengths.tolist(), batch.samples.truncated.tolist()
        pays = [score.reward for score in batch.scores]
        ended = [n for n, cut in zip(lengths, truncated) if not cut]
        assert row["reward"] == pytest.approx(sum(pays) / 16, abs=1e-5)
        assert row["reward_std"] == pytest.approx(
            math.sqrt(sum((x - sum(pays) / 16) ** 2 for x in pays) / 15), abs=1e-5
        )
        assert row["length_mean"] == pytest.approx(sum(lengths) / 16)
        assert (row["length_min"], row["length_max"]) == (min(lengths), max(lengths))
        assert row["truncated"] == pytest.approx(sum(truncated) / 16)
        assert ended and row["length_finished"] == pytest.approx(sum(ended) / len(ended))
        assert row["advantage_abs"] == pytest.approx(
            sum(map(abs, by_group(pays, 4, z_scores))) / 16, abs=1e-4
        )


def test_the_clip_is_told_by_length(seen, tmp_path):
    """A quarter of the live completions each, the shortest first: GSPO's clip and |log s|."""
    row = metrics(good(tmp_path, f"{BASE} --lr 2e-4 --steps 1").folder)[0]
    batch = seen.batches[0]
    found = []
    for i in range(16):
        length, advantage = int(batch.samples.lengths[i]), float(batch.advantages[i])
        if advantage == 0:
            continue
        moved = (batch.new_logprobs[i, :length] - batch.old_logprobs[i, :length]).tolist()
        log_s = sum(moved) / length
        ratio = math.exp(log_s)
        clipped = ratio > 1 + 4e-4 if advantage > 0 else ratio < 1 - 3e-4
        found.append((length, i, clipped, abs(log_s)))
    found.sort()
    assert len(found) == 16 and found[0][0] < found[-1][0]
    for quarter in range(4):
        four = found[4 * quarter : 4 * quarter + 4]
        clipped = sum(clipped for _, _, clipped, _ in four) / 4
        assert row[f"clip_fraction_q{quarter + 1}"] == pytest.approx(clipped)
        mean = sum(log_s for *_, log_s in four) / 4
        assert row[f"policy_log_s_q{quarter + 1}"] == pytest.approx(mean, rel=1e-4, abs=1e-7)
    assert 0 < sum(clipped for _, _, clipped, _ in found) < 16


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_row_and_goes_on_after_a_resume(name, monkeypatch, tmp_path):
    """The packages are not among ours: a module with their three functions stands in for them."""
    started, logged, ended = [], [], []
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.init = lambda **settings: started.append(settings)
    module.log = lambda row, step: logged.append({"step": step, **row})
    module.finish = lambda: ended.append(len(logged))
    monkeypatch.setitem(sys.modules, name, module)
    good(tmp_path, f"{BASE} --{name}")
    result = good(tmp_path, f"--resume --steps 3 --name run --{name}", small=False)

    assert logged == metrics(result.folder)
    assert ended == [2, 3]
    first, second = started
    assert first["name"].startswith("run") and first["config"]["lr"] == 1e-3
    assert first.get("id", first["name"]).startswith("run-")  # with the time that it began
    assert (first["name"], first.get("id")) == (second["name"], second.get("id"))
    assert second["resume"] == "allow"


def test_a_tracker_that_does_not_start_leaves_nothing_behind(monkeypatch, tmp_path):
    """It is started after the first evaluation, when the run's folder has files."""
    module = ModuleType("trackio")
    module.__spec__ = ModuleSpec("trackio", None)

    def init(name, **settings):
        assert (tmp_path / "runs/run/config.json").exists()
        raise OSError("no network")

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    error = refused(tmp_path / "runs", f"{BASE} --trackio")
    assert "--trackio: expected that it starts" in error and "no network" in error
    assert not (tmp_path / "runs").exists()


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = good(tmp_path, f"{BASE} --tensorboard")
    events = EventAccumulator(str(result.folder))
    events.Reload()
    rewards_told = [event.value for event in events.Scalars("reward")]
    assert rewards_told == pytest.approx([row["reward"] for row in metrics(result.folder)])


def test_seconds_are_told_by_phase(finished):
    for row in finished.rows:
        for phase in ("sample", "score", "freeze", "compare", "improve"):
            assert 0 <= row[f"seconds_{phase}"] < 60


def test_the_clip_fraction_is_told_by_side(losses, tmp_path):
    """Ratios are clipped above where the advantage is positive, and below where it is negative."""
    calls, over, under = losses("gspo"), 0, 0
    row = metrics(good(tmp_path, f"{BASE} --lr 3e-3 --epochs 4 --steps 1").folder)[0]
    for (logprobs, old_logprobs, advantages, mask), _, _ in calls:
        log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1) / mask.sum(1)
        over += int(((advantages > 0) & (log_ratio.exp() > 1 + 4e-4)).sum())
        under += int(((advantages < 0) & (log_ratio.exp() < 1 - 3e-4)).sum())
    assert over > 0 and under > 0
    assert row["clip_fraction_high"] == pytest.approx(over / 64)
    assert row["clip_fraction"] - row["clip_fraction_high"] == pytest.approx(under / 64)


@pytest.mark.parametrize(
    "flags",
    [
        "--completions-per-update 1",
        "--max-new-tokens 1",
        "--algo ppo --overlong-filter --max-new-tokens 1",
        "--prompts-per-step 1 --group-size 2 --completions-per-update 1",
        "--algo reinforce++ --reward pay.py:always",
        "--algo ppo --prompts-per-step 1 --group-size 2 "
        "--max-new-tokens 1 --completions-per-update 1",
    ],
)
def test_metrics_stay_finite_in_small_and_empty_corners(flags, tmp_path):
    """A std of one number, a mean over no rows: never NaN in the file."""
    for row in metrics(good(tmp_path, f"{BASE} {flags}").folder):
        assert all(math.isfinite(value) for value in row.values() if value is not None)


def test_evaluation_before_during_and_after(finished):
    """Greedy at 0, 2 and 4; pass@2 before and after; both ends in words, and the command to try."""
    assert ["eval_solved" in row for row in finished.rows] == [False, True, False, True]
    assert ["eval_pass@2" in row for row in finished.rows] == [False, False, False, True]
    for row in finished.rows[1::2]:
        assert 0 <= row["eval_solved"] <= 1
    last = " ".join(finished.out.splitlines()[-3:])
    assert "->" in last and "minutes" in last
    assert f"python rollout.py --model {newest(finished.folder)} --prompt" in last
    first = [line for line in finished.out.splitlines() if "held out" in line][0]
    assert "solved" in first and "pass@2" in first


def test_evaluation_is_greedy_and_pass_k_samples(monkeypatch, tmp_path):
    """Held-out prompts, once at temperature 0; before and after, k times at that of training."""
    calls = Calls(rollout.generate)
    monkeypatch.setattr(rollout, "generate", calls.stand_in)
    good(tmp_path, f"{BASE} --steps 2 --eval-every 1 --eval-samples 3 --temperature 0.7")
    kinds = [
        (len(positional[1]), keyword["group_size"], keyword["temperature"])
        for positional, keyword, _ in calls
        if "share" in keyword  # else the check of the scorer, before the weights are used
    ]
    greedy, sampled, training = (8, 1, 0.0), (8, 3, 0.7), (4, 4, 0.7)
    assert kinds == [greedy, sampled, training, greedy, training, greedy, sampled]


def test_every_step_draws_other_random_numbers(seen, tmp_path):
    """The same prompts and, at this learning rate, the same policy: the completions differ."""
    write_rows(Path("one.jsonl"), [{"prompt": "1+1=", "answer": "2"}] * 12)
    good(tmp_path, f"{BASE} --data one.jsonl --eval-data one.jsonl --lr 1e-9 --steps 2")
    assert seen.batches[0].texts != seen.batches[1].texts


def test_one_console_line_a_step_as_a_scientist_reads_it(finished):
    lines = [line for line in finished.out.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    for line in lines:
        for word in (
            "reward",
            "solved",
            "len",
            "truncated",
            "dead",
            "ratio",
            "clip",
            "kl",
            "entropy",
            "grad",
            "tok/s",
        ):  # names of the style guide
            assert f"| {word}" in line or word == "tok/s" and word in line, word
        assert "loss" not in line


def test_samples_are_readable_and_bounded(finished):
    rows = [strict(line) for line in (finished.folder / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
    assert len(rows) <= 4 * 8
    for row in rows:
        assert row["prompt"].endswith("=") and isinstance(row["completion"], str)
        assert math.isfinite(row["reward"]) and "<eos>" not in row["completion"]


def test_the_config_is_saved_resolved(finished):
    config = strict((finished.folder / "config.json").read_text())
    assert config.keys() == {field.name for field in dataclasses.fields(train.Config)}
    assert config["completions_per_update"] == 4 and config["dtype"] == "float32"
    assert config["device"] == "cpu" and config["overlong_cache"] == 0
    assert config["name"] == "run" and config["kl_coef"] == 0.05


def test_the_model_loads_in_transformers_with_the_same_logits(finished):
    folder = newest(finished.folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("7+5*3=")])
    with torch.no_grad():
        torch.testing.assert_close(finished.policy.eval()(ids).logits, loaded(ids).logits)
    before = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32).eval()
    assert not torch.allclose(before(ids).logits, loaded(ids).logits)  # it was trained
    out = loaded.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids.shape[1]


def test_the_last_keep_checkpoints_stay(finished):
    names = sorted(path.name for path in (finished.folder / "checkpoints").iterdir())
    assert names == ["step-3", "step-4"]


def test_no_pickle_in_a_run(finished):
    """Every file is JSON, text or safetensors: no pickle, and no zip, which torch.save writes."""
    files = [path for path in finished.folder.rglob("*") if path.is_file()]
    assert any(path.name == "model.safetensors" for path in files)
    for path in files:
        if path.name == "lock":
            assert path.read_bytes() == b""
            continue
        assert path.suffix in (".json", ".jsonl", ".safetensors", ".jinja", ".txt", ".html"), path
        start = path.read_bytes()[:2]
        assert start != b"PK" and not start.startswith(b"\x80"), path


def test_source_reads_no_pickle_and_trusts_no_code():
    for name in ("train.py", "rollout.py"):
        text = (ROOT / name).read_text().replace("safetensors.torch", "safetensors")
        assert "torch.load" not in text and "torch.save" not in text and "import pickle" not in text
        assert "trust_remote_code=True" not in text


def test_one_seed_gives_one_run_and_another_another(tmp_path):
    flags = f"{BASE} --max-new-tokens 12 --eval-samples 2"
    folders = [
        good(tmp_path / name, f"{flags} --seed {seed}").folder
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    same_run(folders[0], folders[1])
    assert (folders[0] / "samples.jsonl").read_text() == (folders[1] / "samples.jsonl").read_text()
    assert timeless(folders[0]) != timeless(folders[2])


def test_neither_slots_nor_micro_batches_change_what_is_sampled(seen, tmp_path):
    """Both are a matter of memory: the completions of the first step stay what they were."""
    good(tmp_path / "a", f"{BASE} --steps 1")
    good(tmp_path / "b", f"{BASE} --steps 1 --max-slots 3 --micro-batch-tokens 30")
    assert torch.equal(seen.batches[0].samples.tokens, seen.batches[1].samples.tokens)


def test_runs_are_numbered_without_a_name(tmp_path):
    flags = f"{SMALL.replace('--name run', '')} {BASE} --steps 1"
    for _ in range(2):
        good(tmp_path / "runs", flags, small=False)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["gspo-1", "gspo-2"]


def test_nothing_but_the_algorithm_is_needed(tmp_path, monkeypatch):
    """`train.py --algo gspo`, two steps of it: no model, no data, no reward, no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    result = launch(
        "runs",
        "--algo gspo --steps 2 --prompts-per-step 4 --eval-prompts 4 --eval-samples 2",
        small=False,
    )
    assert result.status == 0, result.err
    config = strict(Path("runs/gspo-1/config.json").read_text())
    assert config["reward"] == "arithmetic" and config["completions_per_update"] == 8
    assert 0 < config["lr"] < 1 and len(metrics("runs/gspo-1")) == 2
    assert len(list(Path("cache/gspo").iterdir())) == 1
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", None)  # the second run starts at once
    again = launch(
        "runs",
        "--algo gspo --steps 1 --prompts-per-step 4 --eval-prompts 4 --eval-samples 0 --name again",
        small=False,
    )
    assert again.status == 0, again.err


def test_the_built_in_mixture_of_experts_runs(tmp_path):
    good(tmp_path, "--model tiny-moe --steps 1")


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    "poison, where", [(math.nan, "loss"), (math.inf, "loss"), (math.inf, "gradient")]
)
def test_a_bad_update_is_skipped_and_counted(poison, where, losses, tmp_path):
    """Update 2 of 4 in step 1: weights stay finite, three updates are done, the row says one."""

    def spoil(number, result):
        loss, extra = result
        if number == 1 and where == "loss":
            loss = loss + poison  # whose gradient is as it was
        elif number == 1:
            loss.register_hook(lambda gradient: gradient * poison)  # and here the value is
        return loss, extra

    losses("rloo", spoil)  # no clip that could hold the gradient back
    with gradients() as steps:
        folder = good(tmp_path, f"{BASE} --algo rloo").folder
    assert len(steps) == 7  # of 8
    assert all(torch.isfinite(tensor).all() for step in steps for tensor in step)
    assert [row["bad_updates"] for row in metrics(folder)] == [1, 0]
    for row in metrics(folder):
        assert all(math.isfinite(value) for value in row.values())


def test_bad_updates_in_a_row_stop_the_run(losses, tmp_path):
    """Good ones reset the count: bad are 1, 2, and from 9 (the first of step 3) on all."""

    def spoil(number, result):
        bad = number in (0, 1) or number >= 8
        return (result[0] * float("nan"), result[1]) if bad else result

    losses("rloo", spoil)
    result = launch(tmp_path, f"{BASE} --algo rloo --steps 6 --save-every 1 --max-bad-updates 3")
    assert result.status not in (0, None)
    assert result.err.count("\n") == 1 and "Traceback" not in result.err
    assert "step 3" in result.err or "step 4" in result.err
    assert "grad_norm" in result.err or "loss" in result.err or "gradient" in result.err
    assert str(newest(result.folder)) in result.err
    assert [row["bad_updates"] for row in metrics(result.folder)][:2] == [2, 0]
    assert len(metrics(result.folder)) < 6
    weights = AutoModelForCausalLM.from_pretrained(newest(result.folder), dtype=torch.float32)
    assert all(torch.isfinite(p).all() for p in weights.parameters())


def test_bad_updates_in_a_row_are_counted_on_after_a_resume(losses, tmp_path):
    """All four of step 2 are bad, and the first of step 3 is the fifth. With an entropy bonus every
    row is live: none is skipped."""
    losses("rloo", lambda number, result: (result[0] * (1 if number < 4 else math.nan), result[1]))
    good(tmp_path, f"{BASE} --algo rloo --entropy-coef 0.01 --steps 2 --max-bad-updates 4")
    result = launch(tmp_path, "--resume --steps 3 --name run", small=False)
    assert result.status == 2
    assert "step 3: 5 bad updates in a row" in result.err


def test_logprobs_that_are_not_finite_leave_no_nan_in_the_metrics(monkeypatch, tmp_path):
    scores = rollout.completion_logprobs
    calls = Calls(
        scores,
        lambda number, result: (result[0] * float("nan"), result[1]) if number == 9 else result,
    )  # 4 in freeze, 4 in updates, a step
    monkeypatch.setattr(rollout, "completion_logprobs", calls.stand_in)
    for row in metrics(good(tmp_path, f"{BASE} --steps 3").folder):
        assert all(math.isfinite(value) for value in row.values() if value is not None)


def test_values_that_are_not_finite_cost_a_step_and_no_more(monkeypatch, tmp_path):
    """Of the critic, in freeze: no advantage is a number, no update is made, the run goes on."""
    calls = Calls(
        rollout.completion_values,
        lambda number, result: result * float("nan") if number < 8 else result,
    )  # 4 in freeze, 4 in updates, a step
    monkeypatch.setattr(rollout, "completion_values", calls.stand_in)
    rows = metrics(good(tmp_path, f"{BASE} --algo ppo").folder)
    assert [row["bad_updates"] for row in rows] == [4, 0]
    assert ["advantage_abs" in row for row in rows] == [False, True]


def test_a_verifier_that_raises_is_told_once_scored_0_and_counted(seen, tmp_path):
    result = good(
        tmp_path, "--model models/tiny --steps 3", "--reward", "pay.py:even + pay.py:broken"
    )
    told = [line for line in result.out.splitlines() if "boom" in line]
    assert len(told) == 1 and "broken" in told[0] and "ArithmeticError" in told[0]
    assert "\x1b" not in result.out + result.err  # what it raised holds an escape sequence
    rows = metrics(result.folder)
    assert [row["reward/broken"] for row in rows] == [0, 0, 0]
    for row, batch in zip(rows, seen.batches, strict=True):
        assert 0 < row["verifier_faults"] == sum(len(text) % 2 for text in batch.texts)
    assert rows[0]["reward"] == pytest.approx(rows[0]["reward/even"])


def test_prompts_are_printed_without_control_characters(tmp_path):
    """The last line quotes a prompt of the user's data: it may not move the cursor or ring."""
    write_rows(
        Path("escape.jsonl"), [{"prompt": f"{i}\x1b[2J\x07\r=", "answer": "0"} for i in range(12)]
    )
    result = good(tmp_path, f"{BASE} --data escape.jsonl --steps 1")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.out)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_the_last_line_can_be_pasted_into_a_shell(tmp_path):
    """A prompt of the user's data is one word there: nothing in it is run, or left out."""
    prompt = "1+$(touch ran)`touch ran`'\"$HOME\\!="
    write_rows(Path("shell.jsonl"), [{"prompt": prompt, "answer": "0"}] * 12)
    result = good(tmp_path, f"{BASE} --data shell.jsonl --eval-data shell.jsonl --steps 1")
    words = result.out.splitlines()[-1].removeprefix("python rollout.py")
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["--model", str(newest(result.folder)), "--prompt", prompt]
    assert not Path("ran").exists()


@pytest.mark.parametrize("reward", ["never", "always"])
def test_dead_groups_for_many_steps_are_warned_about_once(reward, tmp_path):
    """Dead is a group of equal rewards: all 0, and all 0.7 as well."""
    result = good(
        tmp_path,
        f"{BASE} --reward pay.py:{reward} --steps 12 --prompts-per-step 2 "
        "--group-size 2 --max-new-tokens 24",
    )
    told = [line for line in result.out.splitlines() if "warning" in line]
    assert len(told) == 1
    assert "all right or all wrong" in told[0] or "equal" in told[0]
    assert "--group-size" in told[0] or "--temperature" in told[0]


def test_a_short_run_that_taught_nothing_says_so_at_its_end(tmp_path):
    flags = f"{BASE} --reward pay.py:never --prompts-per-step 2 --group-size 2"
    [told] = [line for line in good(tmp_path, flags).out.splitlines() if "warning" in line]
    assert "none of the last 2 steps taught much" in told and "another --reward?" in told


def test_truncation_of_everything_is_warned_about_once(tmp_path):
    result = good(tmp_path, f"{BASE} --steps 12 --prompts-per-step 1 --max-new-tokens 2 --seed 1")
    told = [line for line in result.out.splitlines() if "warning" in line]
    assert len(told) == 1 and "--max-new-tokens" in told[0]


def test_a_live_run_is_not_warned_about(tmp_path):
    result = good(tmp_path, f"{BASE} --steps 12 --prompts-per-step 2 --max-new-tokens 24")
    assert "warning" not in result.out


# ------------------------------------------------------------------------------ structure


FILES = ("gspo.py", "rollout.py", "rewards.py", "train.py")


def imports_of(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_imports_go_one_way():
    own = {name.removesuffix(".py") for name in FILES}
    stdlib = sys.stdlib_module_names
    found = {name: imports_of(ROOT / name) for name in FILES}
    assert found["gspo.py"] - stdlib == {"torch"}
    assert not found["rewards.py"] - stdlib
    assert not any("train" in names for names in found.values())
    assert not found["rollout.py"] & {"gspo", "train"}
    assert found["train.py"] & own == {"gspo", "rollout", "rewards"}


def test_nothing_branches_on_an_algorithms_name():
    """What an algorithm is stands in its row of ALGOS."""
    for node in ast.walk(ast.parse((ROOT / "train.py").read_text())):
        if isinstance(node, ast.Compare):
            constants = {
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
            assert not constants & set(gspo.ALGOS), f"line {node.lineno}"
