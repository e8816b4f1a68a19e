"""The loop of train.py: from the rollout to the gradient, and the metrics."""

import dataclasses
import math
import re
import statistics

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gspo
import train
from tools import (
    BASE,
    by_group,
    centred,
    distance,
    good,
    gradients,
    metrics,
    newest,
    random_policy,
    refused,
    rows_of,
    spied,
    watched,
    write_rows,
    z_scores,
)

pytestmark = pytest.mark.usefixtures("place")

# ---- the first ratio


@pytest.fixture(scope="module")
def gpt2(models):
    """A policy whose configuration has dropout: it must be off wherever a model scores."""
    shape = dict(vocab_size=18, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ids = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    dropout = dict(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    random_policy(models / "gpt2", transformers.GPT2Config(**shape, **ids, **dropout))


@pytest.mark.parametrize(
    "algorithm, flags",
    [
        ("gspo", "--gradient-checkpointing --tis-cap 2 --stale-steps 2 --steps 2"),
        ("dapo", "--temperature 0.7"),
        ("ppo", "--kl-coef 0.1 --epochs 2"),
        ("gspo", "--dtype bfloat16 --overlong-filter --max-new-tokens 40"),
        ("gspo", "--lora-rank 2"),
        ("grpo", "--model models/moe --routing-replay"),
        ("grpo", "--model models/gpt2 --gradient-checkpointing"),
    ],
)
def test_the_first_ratio_is_exactly_1(algorithm, flags, gpt2, seen, tmp_path):
    """Log-probs of pi_old, without gradients, are bit-identical to those of the updates."""
    flags = f"--algo {algorithm} --micro-batch-tokens 24 --lr 1e-30 --steps 1 {flags}"
    good(tmp_path, f"{BASE} {flags}")
    for step in seen.steps:
        rows = torch.cat([rows_of(update) for update in step.updates])
        old = step.tensors.old_logprobs
        assert old[rows].any() and torch.equal(step.tensors.new_logprobs, old)
    parts = [part for step in seen.steps for update in step.updates for part in update.parts]
    assert len(parts) > 8  # several micro-batches an update
    assert len({part.trees is None for part in parts}) == 2 or "--max-new-tokens 40" in flags


def test_the_sampler_may_be_pi_old_and_ratios_leave_1_when_the_policy_moves(seen, tmp_path):
    """The sampler's log-probs are near the scorer's before the first update, and not after it."""
    good(tmp_path, f"{BASE} --old-logprobs sampler --steps 1 --epochs 2")
    [step] = seen.steps
    first, old = step.updates[0].active_rows, step.tensors.old_logprobs
    before = (step.tensors.first_logprobs - old)[first].abs().max()
    after = (step.tensors.new_logprobs - old)[first].abs().max()
    assert 0 < before < 1e-4 < 1e-3 < after


# ---- the gradient


def plain_logprobs(model, batch, i, temperature=1.0):
    """Log-probs of row i by one ordinary forward of the row alone, without padding."""
    ids = torch.tensor(batch.rollout.sequences()[i])
    p = int(batch.rollout.prompt_lengths[i])
    logits = model(ids[None], use_cache=False).logits[0, p - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[p:, None])[:, 0]


def same_gradient(ours, theirs, tolerance=1e-4):
    """Gradients agree up to a fraction of the largest entry."""
    scale = max(float(tensor.abs().max()) for tensor in theirs)
    assert scale > 0
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) < tolerance * scale


def norm_of(gradient) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in gradient))


def pays_of(batch) -> list[float]:
    return [each.reward for each in batch.verdicts]


ONE_UPDATE = "--steps 1 --completions-per-update 16 --max-grad-norm 1e9 --max-new-tokens 20"
ONE_UPDATE += " --micro-batch-tokens 70 --overlong-cache 0 --no-dynamic-sampling"


@pytest.fixture
def reference_apart(monkeypatch):
    """The reference is not the policy, so that a KL between them has a gradient."""
    make_run = train.Run

    def apart(config, ranks):
        run = make_run(config, ranks)
        for parameter in run.models.ref_policy.parameters():
            parameter += 0.01 * torch.sin(torch.arange(parameter.numel())).view_as(parameter)
        return run

    monkeypatch.setattr(train, "Run", torch.no_grad()(apart))


@pytest.mark.parametrize(
    "algorithm, unit, advantages",
    [
        ("gspo", "completion", z_scores),
        ("dapo", "token", z_scores),
        ("dr-grpo", "constant", centred),
        ("maxrl", "token", lambda values: [x / (sum(values) / 4 or 1) for x in centred(values)]),
        ("luspo", "sum", z_scores),
        ("reinforce++", "token", None),  # a KL in the reward: it is in the advantages
    ],
)
def test_first_gradient_is_reinforce_by_plain_forwards(
    algorithm, unit, advantages, seen, reference_apart, tmp_path
):
    """At ratio 1 every loss has the gradient of -A log pi, in the mean of its own unit. The KL term
    is 0.3 times the mean of e^x - x - 1, x = ref - new."""
    # answers to 1+1= are right and to 2+1= wrong: no advantage, and the KL needs these rows
    write_rows("rows.jsonl", [{"prompt": f"{i}+1=", "answer": "0"} for i in (1, 2, 3, 4)])
    flags = f"--algo {algorithm} {ONE_UPDATE} --temperature 0.8 --kl-coef 0.3"
    flags += " --data rows.jsonl --eval-data rows.jsonl --reward pay.py:by_prompt"
    with gradients() as steps:
        [row] = metrics(good(tmp_path, f"{BASE} {flags}").folder)
    batch = seen.steps[0].batch
    lengths = batch.rollout.lengths.tolist()
    assert len(set(lengths)) > 1  # ragged, or the units would be the same
    policy = AutoModelForCausalLM.from_pretrained("models/tiny", dtype=torch.float32)
    reference = seen.run.models.ref_policy
    if advantages:
        given = by_group(pays_of(batch), 4, advantages)
    else:
        given = [row[:n] for row, n in zip(seen.steps[0].tensors.advantages, lengths)]
    loss, kl, kl_coef = 0.0, 0.0, 0.3 if advantages else 0.0
    for i, (advantage, n) in enumerate(zip(given, lengths)):
        divisors = {"completion": 16 * n, "token": sum(lengths), "constant": 16 * 20, "sum": 16}
        divisor = divisors[unit]
        logprobs = plain_logprobs(policy, batch, i, 0.8)
        x = plain_logprobs(reference, batch, i, 0.8) - logprobs
        loss = loss - (advantage * logprobs).sum() / divisor
        kl = kl + (x.exp() - x - 1).sum() / (divisor if unit == "token" else 16 * n)
    assert seen.run.models.critic is None
    same_gradient(steps[0], torch.autograd.grad(loss + kl_coef * kl, list(policy.parameters())))
    assert row["kl"] == pytest.approx(kl.item(), rel=1e-3) and row["kl"] > 1e-3


@pytest.mark.parametrize(
    "flags",
    [
        "--algo dapo --overlong-cache 4",
        "--algo ppo --kl-coef 0.1 --entropy-coef 0.1",
        "--algo gspo --overlong-filter --max-new-tokens 24",
    ],
)
def test_many_micro_batches_have_the_gradient_of_one(flags, tmp_path):
    """A mean of means would differ. Also in the second update, where ratios are not 1."""
    flags = f"{BASE} {ONE_UPDATE} --completions-per-update 8 --lr 1e-4 {flags}"
    with gradients() as steps:
        [many] = metrics(good(tmp_path / "many", f"{flags} --micro-batch-tokens 30").folder)
        [one] = metrics(good(tmp_path / "one", f"{flags} --micro-batch-tokens 1000000").folder)
    same_gradient(steps[0], steps[2])
    same_gradient(steps[1], steps[3], 1e-2)
    for name in ("ratio_mean", "entropy", "loss", "grad_norm"):
        assert many[name] == pytest.approx(one[name], rel=1e-2, abs=1e-5), name


# ---- to the advantages


def test_dynamic_sampling_refills_until_the_batch_is_alive(seen, monkeypatch, tmp_path):
    """Prompts on 1 are always right, on 2 always wrong: neither may be left in the batch."""
    monkeypatch.setattr(train, "MAX_REFILLS", 40)
    mixed = [{"prompt": f"{first}+{i}=", "answer": str(i)} for first in "1234" for i in range(9)]
    write_rows("mixed.jsonl", mixed)
    flags = "--seed 1 --data mixed.jsonl --reward pay.py:by_prompt --algo dapo --eval-prompts 2"
    rows = metrics(good(tmp_path, f"{BASE} {flags}").folder)
    for (batch, *_), row in zip(seen.steps, rows, strict=True):
        for each, ids in zip(batch.verdicts, batch.rollout.sequences(), strict=True):
            prompt, answer = each.row["prompt"], each.row["answer"]
            assert prompt in (f"3+{answer}=", f"4+{answer}=")
            assert seen.run.decode(ids) == prompt + each.completion
        for group in (batch.verdicts[i : i + 4] for i in (0, 4, 8, 12)):
            assert len({each.reward for each in group}) > 1
            assert len({each.row["prompt"] for each in group}) == 1
        assert len(batch.verdicts) == 16
        assert row["prompts_drawn"] >= 8  # refilled, and dropped prompts are still counted
    assert sum(row["dead_right"] for row in rows) > 0 and sum(row["dead_wrong"] for row in rows) > 0


def test_dynamic_sampling_reads_the_rewards_that_the_algorithm_reads(seen, tmp_path):
    """pay.py:steps rewards steps, too. dapo reads outcomes alone: equal ones make a dead group."""
    good(tmp_path, f"{BASE} --algo dapo --reward pay.py:steps")
    for step in seen.steps:
        outcomes = torch.tensor([each.reward for each in step.batch.verdicts]).view(-1, 4)
        assert (outcomes.amin(1) < outcomes.amax(1)).all()
        assert step.tensors.advantages.view(-1, 4).any(1).all()


def test_dynamic_sampling_is_bounded_warns_once_and_trains_on_no_dead_group(seen, tmp_path):
    """Five rollouts of four prompts a step, all dead: not even costs of length move anything."""
    rows = [{"prompt": f"{1 + (i > 0)}+{i % 9}=", "answer": "0"} for i in range(40)]
    write_rows("dead.jsonl", rows)
    flags = f"{BASE} --data dead.jsonl --algo dapo"
    result = good(tmp_path, flags, "--reward", "pay.py:by_prompt + pay.py:broken")
    [warning] = [line for line in result.out.splitlines() if "--dynamic-sampling" in line]
    assert "0 of 20 groups" in warning and "expected 4" in warning
    made_up = {"loss", "grad_norm", "ratio_mean", "clip_fraction", "entropy", "policy_kl"}
    for row in metrics(result.folder):
        assert row["prompts_drawn"] == 20 and row["verifier_faults"] > 20
        assert row["dead"] == 1 and not made_up & row.keys()
    assert seen.steps[1].updates and not any(map(len, map(rows_of, seen.steps[1].updates)))
    assert distance(newest(result.folder), "models/tiny") == 0  # AdamW has no moment yet


@pytest.mark.parametrize("flags", ["--algo grpo", "--algo ppo", "--algo dapo --entropy-coef 0.1"])
def test_updates_that_the_overlong_filter_empties_are_in_no_mean(flags, seen, tmp_path):
    """Nothing moves, so every ratio is 1: an update of truncated completions alone has none."""
    flags += " --no-dynamic-sampling --overlong-filter --steps 1 --max-new-tokens 6"
    flags += " --completions-per-update 2 --lr 1e-30"
    [row] = metrics(good(tmp_path, f"{BASE} {flags}").folder)
    [(batch, updates, _)] = seen.steps
    whole = ~batch.rollout.truncated[:, None]
    assert torch.equal(batch.mask, batch.rollout.completion_mask & whole)
    emptied = [bool(batch.rollout.truncated[update.rows].all()) for update in updates]
    assert 0 < sum(emptied) < len(emptied) and row["truncated"] < 1
    assert row["bad_updates"] == 0
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("every", [2, 0])
def test_the_reference_follows_every_ref_every_steps(every, tmp_path):
    """One update a step: KL to the reference is 0 in the steps that begin at it, 1 and 3."""
    flags = f"--kl-coef 0.1 --steps 3 --completions-per-update 16 --ref-every {every}"
    kl = [row["kl"] for row in metrics(good(tmp_path, f"{BASE} {flags}").folder)]
    assert kl[0] == 0 < kl[1]
    assert kl[2] == 0 if every else kl[2] > kl[1]


def test_a_stale_sampler_is_one_step_behind_and_tis_weighs_its_tokens(seen, tmp_path):
    """Fresh in steps 1 and 3, behind in 2. The weights are min(pi_old / pi_sampler, 1.02)."""
    flags = f"{BASE} --algo grpo --kl-coef 0 --stale-steps 2 --steps 3 --tis-cap 1.02"
    drift = [row["sampler_kl"] for row in metrics(good(tmp_path, flags).folder)]
    assert max(drift[0], drift[2]) < 1e-8 < 1e-5 < drift[1]
    batch, _, tensors = seen.steps[1]
    plain = by_group(pays_of(batch), 4, z_scores)
    apart, weights = (tensors.old_logprobs - batch.rollout.sampler_logprobs).tolist(), []
    for i, n in enumerate(batch.rollout.lengths.tolist()):
        weights += [min(math.exp(x), 1.02) for x in apart[i][:n]]
        expected = [plain[i] * weight for weight in weights[-n:]]
        assert tensors.advantages[i, :n].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert min(weights) < 0.99 and 0.1 < statistics.fmean(x == 1.02 for x in weights) < 0.9


def test_an_entropy_bonus_raises_the_entropy_and_gradients_are_clipped(tmp_path):
    """All rewards are equal: the loss is - coef x mean entropy, which grows step by step."""
    flags = f"{BASE} --reward pay.py:always --steps 3 --lr 3e-3 --seed 2 --entropy-coef 0.5"
    with gradients() as steps:
        rows = metrics(good(tmp_path, f"{flags} --max-grad-norm 1e-3").folder)
    assert rows[-1]["entropy"] > rows[0]["entropy"] + 1e-3
    assert rows[0]["loss"] == pytest.approx(-0.5 * rows[0]["entropy"], rel=1e-4)
    assert norm_of(steps[0]) == pytest.approx(1e-3, rel=1e-2)
    assert rows[0]["grad_norm"] > 2e-3  # the norm before clipping


def test_a_learning_rate_warms_up_and_falls_by_its_schedule(tmp_path):
    """Two steps of warm-up, times the fraction of the four steps that is left as a step begins."""
    cosine = [(1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3)]
    expected = dict(constant=[0.5, 1, 1, 1], linear=[0.5, 0.75, 0.5, 0.25], cosine=[0.5, *cosine])
    flags = f"{BASE} --steps 4 --warmup-steps 2 --lr-schedule"
    for schedule, factors in expected.items():
        config = train.parse_flags(f"{flags} {schedule}".split())
        found = [train.lr_factor(config, step) for step in (1, 2, 3, 4)]
        assert found == pytest.approx(factors)
    rows = metrics(good(tmp_path, f"{flags} linear").folder)
    assert [row["lr"] / 1e-3 for row in rows] == pytest.approx(expected["linear"])


# ---- rewards that are not 0 or 1


def test_a_reward_outside_0_to_1_is_never_called_solved(tmp_path):
    """2 or 4. A warning says why there is no `solved`."""
    result = good(tmp_path, f"{BASE} --steps 1 --reward pay.py:far --algo dapo")
    [row] = metrics(result.folder)
    assert row["grad_norm"] > 0 and row["eval_reward"] >= 2
    assert not {"solved", "dead_right", "dead_wrong", "eval_solved"} & row.keys()
    assert "warning: --reward far gave a value outside [0, 1]: `solved` leaves it out" in result.out


def test_what_shapes_a_reward_is_not_counted_as_right(seen, tmp_path):
    """Groups of "1+" are all right: solved and dead. Yet their rewards differ, and train."""
    write_rows("rows.jsonl", [{"prompt": f"{1 + i % 2}+{i}=", "answer": "0"} for i in range(16)])
    flags = f"{BASE} --steps 1 --data rows.jsonl --eval-data rows.jsonl --prompts-per-step 8"
    [row] = metrics(good(tmp_path, f"{flags} --reward pay.py:first+-0.2*pay.py:even").folder)
    [step] = seen.steps
    correct = [each.terms["first"] for each in step.batch.verdicts]
    groups = [correct[i : i + 4] for i in range(0, 32, 4)]
    assert row["solved"] == pytest.approx(sum(correct) / 32)
    assert row["solved_any"] == sum(max(group) for group in groups) / 8
    assert row["dead_right"] == sum(min(group) for group in groups) / 8 > 0
    assert row["dead_wrong"] == sum(max(group) == 0 for group in groups) / 8
    assert row["dead"] == row["dead_right"] + row["dead_wrong"]
    easy = [each.row["prompt"][0] == "1" for each in step.batch.verdicts]
    assert step.tensors.advantages[easy].any()


# ---- the critic


def test_a_critic_starts_at_0_and_is_the_value_after_a_cut(monkeypatch, seen, tmp_path):
    """After the end token V is 0, after a cut the critic's. Metrics are means over tokens."""
    calls = spied(monkeypatch, "ppo", "advantages")
    flags = f"{BASE} --algo ppo --max-new-tokens 12 --critic-lr 3e-3"
    rows = metrics(good(tmp_path, flags).folder)
    assert not seen.steps[0].tensors.values.any()
    assert rows[0]["explained_variance"] == pytest.approx(0, abs=1e-5)
    batch, _, tensors = seen.steps[1]
    bootstrap = calls[1][1]["bootstrap"]
    truncated = batch.rollout.truncated
    assert 0 < int(truncated.sum()) < 16
    last = tensors.values.gather(1, batch.rollout.lengths[:, None] - 1)[:, 0]
    assert last.all() and torch.equal(bootstrap, last * truncated)
    size = float(tensors.advantages[batch.mask].abs().mean())
    assert rows[1]["advantage_abs"] == pytest.approx(size)
    values, returns = tensors.values[batch.mask].numpy(), tensors.returns[batch.mask].numpy()
    expected = 1 - (returns - values).var() / returns.var()
    assert values.all() and rows[1]["explained_variance"] == pytest.approx(expected, abs=1e-4) != 0


def test_kl_in_the_reward_is_k1_per_token(monkeypatch, seen, tmp_path):
    """r_t = -0.2 (log pi_old - log pi_ref), and the verifier's reward on top at the last token."""
    calls = spied(monkeypatch, "reinforce++", "advantages")
    good(tmp_path, f"{BASE} --algo reinforce++ --kl-coef 0.2")
    token_rewards = calls[1][1]["token_rewards"]
    batch, _, tensors = seen.steps[1]
    kl, nonzero = tensors.old_logprobs - tensors.ref_logprobs, 0
    for i, n in enumerate(batch.rollout.lengths.tolist()):
        expected = (-0.2 * kl[i, :n]).tolist()
        nonzero += sum(abs(x) > 1e-6 for x in expected)
        expected[-1] += batch.verdicts[i].reward
        assert token_rewards[i, :n].tolist() == pytest.approx(expected, abs=1e-6)
    assert nonzero > 16


# ---- a fork's own rows of ALGOS


def test_a_critic_has_the_unit_of_the_policys_loss(monkeypatch, tmp_path):
    row = gspo.ALGOS["ppo"]
    row = dataclasses.replace(row, loss=gspo.gspo_token_loss, per="completion")
    monkeypatch.setitem(gspo.ALGOS, "ppo", row)
    calls = spied(monkeypatch, "ppo", "value_loss")
    good(tmp_path, f"{BASE} --algo ppo --steps 1")
    assert calls and all(keywords["per"] == "completion" for _, keywords, _ in calls)


def test_a_dead_group_with_an_advantage_is_an_error(monkeypatch, tmp_path):
    """Its rows get no forward pass: the advantage would be without effect, silently."""
    spied(monkeypatch, "gspo", "advantages", lambda _, advantages: advantages + 0.1)
    with pytest.raises(AssertionError, match="skip_dead_groups"):
        good(tmp_path, f"{BASE} --steps 1 --reward pay.py:never")


def test_a_loss_may_read_another_tensor_of_the_step(seen, monkeypatch, tmp_path):
    """A row of ALGOS names it, and the rows of a micro-batch arrive."""
    given = []

    def loss(logprobs, old_logprobs, advantages, mask, denom=None, *, sampler_logprobs):
        given.append(sampler_logprobs)
        return gspo.gspo_loss(logprobs, old_logprobs, advantages, mask, denom)

    row = gspo.Algorithm(loss, "completion", loss_reads=("sampler_logprobs",))
    monkeypatch.setitem(gspo.ALGOS, "gspo", row)
    good(tmp_path, f"{BASE} --steps 1 --micro-batch-tokens 30")
    [step] = seen.steps
    parts = [part for update in step.updates for part in update.parts]
    expected = [step.batch.rollout.sampler_logprobs[part.rows] for part in parts]
    assert len(given) == len(expected) > 4 and all(map(torch.equal, given, expected))


def test_a_completion_without_a_verdict_is_left_out_of_the_loss(seen, tmp_path):
    """The console names the error, without the escape sequence of its message."""
    reward = "pay.py:even + pay.py:broken"  # it raises where the length is odd, and else pays 0
    result = good(tmp_path, f"{BASE} --steps 1", "--reward", reward)
    [row], [step] = metrics(result.folder), seen.steps
    failed = torch.tensor([len(each.completion) % 2 == 1 for each in step.batch.verdicts])
    assert 0 < failed.sum() < 16 and row["verifier_faults"] == failed.sum()
    assert step.batch.rewards.isnan().tolist() == failed.tolist()
    assert not step.batch.mask[failed].any() and not step.tensors.advantages[failed].any()
    pays = [x for x in pays_of(step.batch) if x == x]
    assert row["reward"] == pytest.approx(statistics.fmean(pays)) == row["reward/even"]
    assert row["reward/broken"] == 0
    trained = torch.cat([update.active_rows for update in step.updates])
    assert len(trained) > 0 and not failed[trained].any()
    assert "left out" in result.out and "\x1b" not in result.out + result.err
    assert re.search("warning: .*broken.*ArithmeticError.*boom", result.out)


# ---- metrics


def test_metrics_agree_with_the_samples_and_the_overlong_penalty_is_that_of_eq_13(seen, tmp_path):
    """Groups are made by position: here all have the same prompt. Of at most 12 tokens with a cache
    of 5, a length of 12 costs 1, 8 costs 1/5, 7 and less nothing."""
    write_rows("same.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 20)
    flags = "--data same.jsonl --eval-data same.jsonl --steps 1 --max-new-tokens 12"
    flags += " --overlong-cache 5"
    [row] = metrics(good(tmp_path, f"{BASE} {flags}").folder)
    [step] = seen.steps
    batch = step.batch
    pays, lengths = pays_of(batch), batch.rollout.lengths.tolist()
    assert min(lengths) <= 7 < max(lengths) == 12
    shaped = [pay - max(0, n - 7) / 5 for pay, n in zip(pays, lengths)]
    assert batch.rewards.tolist() == pytest.approx(shaped, abs=1e-6)
    advantages = by_group(shaped, 4, z_scores)
    assert step.tensors.advantages.tolist() == pytest.approx(advantages, abs=1e-4)
    expected = {
        "reward": sum(shaped) / 16,
        "reward_std": statistics.stdev(shaped),
        "reward/even": sum(pays) / 16,
        "length_mean": sum(lengths) / 16,
        "truncated": sum(batch.rollout.truncated.tolist()) / 16,
        "advantage_abs": sum(map(abs, advantages)) / 16,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    phases = [row[f"seconds_{phase}"] for phase in ("sample", "verify", "score", "update")]
    assert min(phases) > 0 and sum(phases) < 1.1 * row["seconds_step"]


def test_token_rows_of_samples_fit_the_metrics(tmp_path):
    """The ratios of a group's second pass have the KL and the spread that metrics.jsonl has."""
    flags = f"{BASE} --steps 1 --prompts-per-step 1 --completions-per-update 4 --epochs 2"
    flags += " --max-new-tokens 12 --lr 1e-2"
    folder = good(tmp_path, flags).folder
    [row] = metrics(folder)
    first, *shown = metrics(folder, "samples")
    assert "tokens" not in first and len(shown) == 4
    for each in shown:
        assert each["group"] == 0 and len(each["tokens"]) == len(each["log_ratios"])
        read = [token for token in each["tokens"] if token not in ("<pad>", "<eos>")]
        assert "".join(read) == each["completion"]
    pays = [each["reward"] for each in shown]
    advantages = [each["advantage"] for each in shown]
    assert [len(each["advantage"]) for each in shown] == [len(each["tokens"]) for each in shown]
    assert [each[0] for each in advantages] == pytest.approx(z_scores(pays), abs=1e-4)
    means = [statistics.fmean(each["log_ratios"]) for each in shown]
    tokens = [x for each in shown for x in each["log_ratios"]]
    kl = statistics.fmean(math.expm1(x) - x for x in tokens)
    assert row["policy_kl"] == pytest.approx(kl, rel=1e-3)
    assert row["policy_token_std"] == pytest.approx(statistics.pstdev(tokens), rel=1e-3)
    assert row["policy_sequence_std"] == pytest.approx(statistics.pstdev(means), rel=1e-3)
    assert kl > 1e-5 and len({len(each["tokens"]) for each in shown}) > 1  # with padding


@pytest.mark.parametrize(
    "flags",
    [
        "--algo ppo --overlong-filter --max-new-tokens 1",
        "--algo reinforce++ --reward pay.py:always",
        "--prompts-per-step 1 --group-size 2 --max-new-tokens 1 --completions-per-update 1",
    ],
)
def test_metrics_stay_finite_in_small_and_empty_corners(flags, tmp_path):
    """A std of one number, a mean over no rows: never NaN in the file."""
    for row in metrics(good(tmp_path, f"{BASE} {flags}").folder):
        assert all(map(math.isfinite, row.values()))


# ---- evaluation


def test_evaluation_is_greedy_and_pass_k_samples(monkeypatch, tmp_path):
    """Steps and refills have random numbers of their own, and all evaluations the same ones."""
    calls = watched(monkeypatch, train, "generate")
    flags = "--algo dapo --reward pay.py:never --eval-every 1 --eval-samples 3 --temperature 0.7"
    rows = metrics(good(tmp_path, f"{BASE} {flags}").folder)
    kinds, numbers = [], {}
    for (_, prompts, uniforms), keyword, _ in calls:
        kinds.append((len(prompts), uniforms.shape[1], keyword["temperature"]))
        numbers.setdefault(kinds[-1], []).append(uniforms)
    greedy, sampled, training = (8, 1, 0.0), (8, 3, 0.7), [(4, 4, 0.7)] * 5
    assert kinds == [greedy, sampled, *training, greedy, *training, greedy, sampled]
    assert ["eval_pass@3" in row for row in rows] == [False, True]
    assert all("eval_solved" in row for row in rows)
    drawn = torch.stack(numbers[training[0]]).flatten()
    assert len(drawn.unique()) > 0.999 * len(drawn)
    for evaluated in (numbers[greedy], numbers[sampled]):
        assert all(torch.equal(uniforms, evaluated[0]) for uniforms in evaluated)


def test_the_lenient_twin_judges_the_same_completions(tmp_path):
    """math wants a mark, and finds none. math_lenient takes the last number."""
    rows = [{"prompt": f"{i}+1=", "answer": str(n)} for i in range(5) for n in range(10)]
    write_rows("rows.jsonl", rows)
    flags = "--data rows.jsonl --eval-data rows.jsonl --reward math --eval-prompts 50 --steps 1"
    result = good(tmp_path, f"{BASE} {flags}")
    [row] = metrics(result.folder)
    assert row["eval_solved"] == 0 < row["eval_solved_lenient"] < 0.5
    assert "lenient" in result.out


# ---- faults


@pytest.mark.parametrize("poison, where", [(math.nan, "loss"), (math.inf, "grad_norm")])
def test_a_bad_update_is_skipped_and_counted(poison, where, monkeypatch, tmp_path):
    """Update 2 of 4 in step 1: weights stay finite, three updates are done, the row says one."""

    def spoil(number, result):
        loss, extra = result
        if number == 1 and where == "loss":
            loss = loss + poison  # whose gradient is as it was
        elif number == 1:
            loss.register_hook(lambda gradient: gradient * poison)  # and here the value is
        return loss, extra

    spied(monkeypatch, "rloo", "loss", spoil)  # no clip that could hold the gradient back
    with gradients() as steps:
        result = good(tmp_path, f"{BASE} --algo rloo --max-grad-norm 1e9")
    folder, told = result.folder, f"step 1: skipped an update, not finite: {where}"
    assert result.out.count("skipped an update") == 1 and told in result.out
    assert len(steps) == 7  # of 8
    expected = statistics.fmean(norm_of(step) for step in steps[3:])
    assert metrics(folder)[1]["grad_norm"] == pytest.approx(expected, rel=1e-4)
    assert all(torch.isfinite(tensor).all() for step in steps for tensor in step)
    assert [row["bad_updates"] for row in metrics(folder)] == [1, 0]
    assert all(math.isfinite(value) for row in metrics(folder) for value in row.values())


def test_a_metric_that_is_not_finite_skips_no_update(monkeypatch, tmp_path):
    """A fork's own: the console says so. One that update 1 lacks is a mean of the others."""

    def with_metric(number, result):
        loss, extra = result
        late = {"late": torch.tensor(2.0)} if number > 0 else {}
        return loss, extra | {"log_clip": torch.tensor(-math.inf)} | late

    spied(monkeypatch, "rloo", "loss", with_metric)
    result = good(tmp_path, f"{BASE} --algo rloo --steps 1")
    assert "step 1: omitted because not finite: log_clip" in result.out
    [row] = metrics(result.folder)
    assert row["bad_updates"] == 0 and "log_clip" not in row and row["late"] > 0


def test_bad_updates_in_a_row_stop_the_run(monkeypatch, tmp_path):
    """A good one, the fifth, resets the count, a resume does not: of 4 updates in each step, the
    last of step 3 is the sixth in a row."""

    def spoil(number, result):
        loss, extra = result
        return loss * (1 if number in (0, 5) else math.nan), extra

    spied(monkeypatch, "rloo", "loss", spoil)
    folder = good(tmp_path, f"{BASE} --algo rloo --entropy-coef 0.01").folder
    assert [row["bad_updates"] for row in metrics(folder)] == [3, 3]
    sentence = refused(tmp_path, "--resume --steps 4 --name run", small=False)
    assert "step 3: 6 updates in a row" in sentence
    weights = load_file(newest(folder) / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_values_that_are_not_finite_cost_a_step_and_no_more(monkeypatch, tmp_path):
    """Of the critic: no advantage is a number, no update is made, and the run goes on."""

    def spoil(number, result):  # a step has 4 before the updates, and 4 in them
        return result * math.nan if number < 8 else result

    watched(monkeypatch, train, "completion_values", spoil)
    rows = metrics(good(tmp_path, f"{BASE} --algo ppo").folder)
    assert [row["bad_updates"] for row in rows] == [4, 0]
    assert ["advantage_abs" in row for row in rows] == [False, True]


@pytest.mark.slow
def test_gspo_solves_the_built_in_task(tmp_path, monkeypatch):
    """The README's first command and result, less a margin: 50 steps from 26.5% to 98% or more."""
    monkeypatch.undo()  # the whole warm start
    run = good(tmp_path, "--algo gspo --name run", small=False)
    assert metrics(run.folder)[-1]["eval_solved"] > 0.95


# ---- on-policy distillation


def test_a_teacher_is_approached(tmp_path):
    flags = f"{BASE} --algo opd --teacher models/moe --reward-coef 0 --steps 4 --lr 5e-3"
    rows = metrics(good(tmp_path, flags).folder)
    assert rows[-1]["teacher_kl"] < 0.8 * rows[0]["teacher_kl"]
