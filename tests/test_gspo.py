"""The specification of gspo.py: every objective, advantage and KL estimator, value and gradient.

The references are plain Python loops over floats. They are written from the formulas of the papers
and share no code with gspo.py. A loss is described by a rule and a mean:

    rule   the contribution of one token: its loss, its slope (d loss / d log-prob, derived by
           hand), and its part of every metric
    mean   "token"       sum / number of tokens
           "completion"  mean over the tokens of a completion, then over completions
           "constant"    sum / (completions * max_new_tokens)
           "sum"         sum / completions
           the metrics of the last two use "completion", so that a mean ratio of 1 is reported as 1

A sequence-level objective is also a rule: every token has the mean ratio s, and the slope of each
of L log-probs is s A / L (arXiv 2507.18071 eq. 10): the "completion" mean of s A.
"""

import dataclasses
import functools
import inspect
import math
import random
import re
import sys
from collections.abc import Callable
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import gspo
import train
from support.loss_flags import numbers_of

LENGTHS = (6, 0, 1, 4, 3, 6, 2, 5)
WIDTH = 6


# ---- the rules: one completion in, one (loss, slope, metrics) per token out ----------------------


def policy_metrics(ratio, advantage, stopped):
    return {
        "clip_fraction": float(stopped),
        "clip_fraction_high": float(stopped and advantage > 0),
        "ratio_mean": ratio,
        "approx_kl": ratio - 1 - math.log(ratio),
    }


def log_ratios(row):
    return [logprob - old for logprob, old in zip(row.logprobs, row.old_logprobs)]


def rule_of(terms, mean_ratio=False, mean_advantage=False, **fixed):
    """The rule of terms(log pi, ratio, A) -> loss, d loss / d log ratio, whether the clip stops it.
    All tokens may have the completion's mean ratio, and its mean advantage."""

    def rule(row, **numbers):
        ratios, advantages = map(math.exp, log_ratios(row)), row.advantages
        if mean_ratio:
            ratios = [math.exp(fmean(log_ratios(row)))] * len(row.places)
        if mean_advantage:
            advantages = [fmean(row.advantages)] * len(row.places)
        for logprob, ratio, advantage in zip(row.logprobs, ratios, advantages):
            loss, slope, stopped = terms(logprob, ratio, advantage, **fixed | numbers)
            yield loss, slope, policy_metrics(ratio, advantage, stopped)

    return rule


def clip(_, ratio, advantage, clip_low, clip_high, dual_clip=None, max_new_tokens=None):
    """-min(r A, clip(r) A) by cases."""
    if advantage > 0 and ratio > 1 + clip_high:
        return -(1 + clip_high) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0, True
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        return -dual_clip * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


def dppo(logprob, ratio, advantage, clip_low=0.2, clip_high=0.2, ratio_max=20.0):
    moved = math.exp(logprob) * (1 - 1 / ratio)  # pi - pi_old
    stopped = moved > clip_high if advantage > 0 else advantage < 0 and moved < -clip_low
    weight = 0.0 if stopped else min(ratio, ratio_max)
    return -weight * advantage * logprob, -weight * advantage, stopped


def cispo(logprob, ratio, advantage, ratio_max=5.0):
    weight = ratio_max if ratio > ratio_max else ratio
    return -weight * advantage * logprob, -weight * advantage, ratio > ratio_max


def sapo(_, ratio, advantage, tau_pos=1.0, tau_neg=1.05):
    tau = tau_pos if advantage > 0 else tau_neg
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage, False


def reinforce(logprob, _, advantage, per=None):
    return -advantage * logprob, -advantage, False


def gmpo_rule(row, clip_low=0.4, clip_high=0.4):
    advantage, gaps, stopped = fmean(row.advantages), [], []
    for gap in log_ratios(row):
        bound = clip_high if advantage > 0 else -clip_low
        stopped.append((gap - bound) * advantage > 0)  # beyond the bound, in the direction of A
        gaps.append(bound if stopped[-1] else gap)
    ratio, unclipped = math.exp(fmean(gaps)), math.exp(fmean(log_ratios(row)))
    for clipped in stopped:
        slope = 0.0 if clipped else -ratio * advantage
        yield -ratio * advantage, slope, policy_metrics(unclipped, advantage, clipped)


def value_rule(row, value_clip=0.2):
    for value, old, target in zip(row.values, row.old_values, row.returns):
        error = value - target
        loss, slope, stopped = 0.5 * error**2, error, 0.0
        if abs(value - old) > value_clip:
            near = old + math.copysign(value_clip, value - old) - target
            if near**2 > error**2:
                loss, slope, stopped = 0.5 * near**2, 0.0, 1.0
        yield loss, slope, {"value_clip_fraction": stopped, "value_loss": loss}


def kl_rule(row, estimator="k3", per=None):
    for logprob, ref in zip(row.logprobs, row.ref):
        gap = ref - logprob
        k3 = math.exp(gap) - gap - 1
        value = gap**2 / 2 if estimator == "k2" else k3
        slope = 1 - math.exp(gap) if estimator == "k3" else -gap
        yield value, slope, {"kl": value}


# ---- the cases: every loss, with the paper's numbers and with others -----------------------------

POLICY_INPUTS = ("logprobs", "old_logprobs", "advantages", "mask")


class Case(NamedTuple):
    """A loss under test: `numbers` go to the loss and to its rule."""

    name: str
    mean: str
    rule: Callable
    numbers: dict = {}
    spread: float = 0.5  # scale of the log-ratios, such that both sides of the clip occur
    inputs: tuple = POLICY_INPUTS

    @property
    def function(self):
        """The name of the loss, without the words that tell its cases apart."""
        word = self.name.split()[0]
        return "kl_penalty" if word == "kl" else f"{word}_loss"


VALUE = dict(inputs=("values", "old_values", "returns", "mask"))
KL = dict(inputs=("logprobs", "ref", "mask"))
TENS = dict(max_new_tokens=10)
NARROW = dict(clip_low=0.05, clip_high=0.1)
grpo_rule = rule_of(clip, clip_low=0.2, clip_high=0.2)
dapo_rule = rule_of(clip, clip_low=0.2, clip_high=0.28)
gspo_rule = rule_of(clip, True, True, clip_low=3e-4, clip_high=4e-4)
luspo_rule = rule_of(clip, True, True, clip_low=2e-3, clip_high=2.5e-3)
gspo_token_rule = rule_of(clip, True, False, clip_low=3e-4, clip_high=4e-4)
importance_rule = rule_of(clip, clip_low=math.inf, clip_high=math.inf)
CASES = [
    Case("ppo", "token", grpo_rule),
    Case("ppo dual", "token", grpo_rule, NARROW | dict(dual_clip=1.5)),
    Case("luspo", "sum", luspo_rule, spread=5e-3),
    Case("luspo wide", "sum", gspo_rule, NARROW),
    Case("grpo", "completion", grpo_rule),
    Case("grpo narrow", "completion", grpo_rule, NARROW),
    Case("dr_grpo", "constant", grpo_rule, TENS),
    Case("dr_grpo narrow", "constant", grpo_rule, NARROW | TENS),
    Case("dapo", "token", dapo_rule),
    Case("dapo narrow", "token", grpo_rule, NARROW),
    Case("gspo", "completion", gspo_rule, spread=1e-3),
    Case("gspo wide", "completion", gspo_rule, NARROW),
    Case("gspo_token", "completion", gspo_token_rule, spread=1e-3),
    Case("gspo_token wide", "completion", gspo_token_rule, NARROW),
    Case("cispo", "token", rule_of(cispo), spread=2.0),
    Case("cispo 1.2", "token", rule_of(cispo), dict(ratio_max=1.2)),
    Case("dppo", "token", rule_of(dppo)),
    Case("dppo narrow", "token", rule_of(dppo), NARROW | dict(ratio_max=1.2)),
    Case("sapo", "completion", rule_of(sapo)),
    Case("sapo 3 0.5", "completion", rule_of(sapo), dict(tau_pos=3.0, tau_neg=0.5)),
    Case("gmpo", "completion", gmpo_rule),
    Case("gmpo narrow", "completion", gmpo_rule, NARROW),
    Case("reinforce", "token", rule_of(reinforce)),
    Case("reinforce completion", "completion", rule_of(reinforce), dict(per="completion")),
    Case("importance", "token", importance_rule),
    Case("value", "token", value_rule, **VALUE),
    Case("value 0.6", "token", value_rule, dict(value_clip=0.6), **VALUE),
    Case("kl", "completion", kl_rule, **KL),
    Case("kl k3 token", "token", kl_rule, dict(per="token"), **KL),
    Case("kl k2", "completion", kl_rule, dict(estimator="k2"), **KL),
    Case("kl unbiased", "completion", kl_rule, dict(estimator="unbiased"), **KL),
]
POLICY_CASES = [each for each in CASES if each.inputs == POLICY_INPUTS]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)


def positions(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def make_batch(seed, spread, advantages="row"):
    """Ragged float64 rows. Row 1 is empty, row 4 has advantage 0, padding holds other numbers.

    The mask of seed 1 has holes, as completions have that called a tool."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), WIDTH)
    mask = positions(LENGTHS, WIDTH)
    if seed == 1:
        mask &= torch.rand(shape, generator=generator) < 0.7

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -noise(*shape).abs() - 0.1
    batch = {
        "logprobs": old + spread * noise(*shape),
        "old_logprobs": old,
        "ref": old + 0.5 * noise(*shape),
        "advantages": noise(len(LENGTHS)) if advantages == "row" else noise(*shape),
        "values": noise(*shape),
        "returns": noise(*shape),
        "mask": mask,
    }
    batch["old_values"] = batch["values"] + 0.4 * noise(*shape)
    batch["advantages"][4] = 0.0
    return batch


def rows_of(batch):
    """The completions of a batch as Python lists of their own tokens only."""
    for index, keep in enumerate(batch["mask"].tolist()):
        row = SimpleNamespace(places=[t for t, kept in enumerate(keep) if kept])
        for key, tensor in batch.items():
            numbers = tensor[index].tolist()
            numbers = numbers if isinstance(numbers, list) else [numbers] * len(keep)
            setattr(row, key, [numbers[t] for t in row.places])
        yield row


def reference(case, batch):
    """(loss, gradient (N, T), metrics) of the scalar loop."""
    lengths = batch["mask"].sum(1).tolist()
    loss, metrics = 0.0, {}
    gradient = torch.zeros(batch["mask"].shape, dtype=torch.float64)
    for index, row in enumerate(rows_of(batch)):
        weights = {
            "token": 1 / max(sum(lengths), 1),
            "completion": 1 / (len(lengths) * max(lengths[index], 1)),
            "constant": 1 / (len(lengths) * TENS["max_new_tokens"]),
            "sum": 1 / len(lengths),
        }
        weight = weights[case.mean]
        metric_weight = weights["token" if case.mean == "token" else "completion"]
        found = case.rule(row, **case.numbers) if row.places else []
        for place, (value, slope, parts) in zip(row.places, found):
            loss += weight * value
            gradient[index, place] = weight * slope
            for name, part in parts.items():
                metrics[name] = metrics.get(name, 0.0) + metric_weight * part
    metrics = {name: torch.tensor(part, dtype=torch.float64) for name, part in metrics.items()}
    return torch.tensor(loss, dtype=torch.float64), gradient, metrics


def evaluate(case, batch, denom=None, functions=gspo):
    """(loss, gradient, metrics) of the function under test. Only `logprobs` (or `values`) get a
    gradient, and the metrics are detached scalars."""
    given = {key: tensor.clone().requires_grad_(key != "mask") for key, tensor in batch.items()}
    function = getattr(functions, case.function)
    loss, metrics = function(*(given[key] for key in case.inputs), denom, **case.numbers)
    loss.backward()
    assert not any(metric.requires_grad for metric in metrics.values())
    first = case.inputs[0]
    assert {key for key, tensor in given.items() if tensor.grad is not None} == {first}
    return loss.detach(), given[first].grad, metrics


assert_same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


# ---- every loss ----------------------------------------------------------------------------------

GARBAGE = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0], dtype=torch.float64)


def with_garbage(batch, dtype=torch.bool):
    """The batch with anything on its padding, and with a mask of another type."""
    generator, dirty = torch.Generator().manual_seed(0), dict(batch)
    for key, tensor in batch.items():
        if tensor.shape == batch["mask"].shape and key != "mask":
            junk = GARBAGE[torch.randint(0, len(GARBAGE), tensor.shape, generator=generator)]
            dirty[key] = torch.where(batch["mask"], tensor, junk)
    return dirty | {"mask": batch["mask"].to(dtype)}


@every_case
def test_loss_matches_scalar_loop(case):
    """On batches in which the clip stops tokens on both sides, with NaN and infinity as padding."""
    high = low = 0.0
    for seed, dtype in enumerate((torch.bool, torch.long, torch.float32)):
        for advantages in ("row", "token"):
            batch = make_batch(seed, case.spread, advantages)
            wanted = reference(case, batch)
            assert_same(evaluate(case, with_garbage(batch, dtype)), wanted)
            high += wanted[2].get("clip_fraction_high", 0)
            low += wanted[2].get("clip_fraction", 0) - wanted[2].get("clip_fraction_high", 0)
    parameters = inspect.signature(getattr(gspo, case.function)).parameters
    clips = "clip_low" in parameters or "ratio_max" in parameters
    assert (high > 0.01, low > 0.01) == (clips, clips)


@every_case
def test_micro_batches_add_up_to_the_batch(case):
    """Four parts, each trimmed to its longest completion, with the denominator of the whole step. A
    mean of the parts' means would differ. The second part is one empty completion."""
    batch = make_batch(0, case.spread, "token")
    denom = sum(LENGTHS) if case.mean == "token" else len(LENGTHS)
    total, gradient, sums = 0.0, torch.zeros(len(LENGTHS), WIDTH, dtype=torch.float64), {}
    for rows in (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 8)):
        width = max(1, max(LENGTHS[rows]))
        part = {key: tensor[rows, :width] for key, tensor in batch.items()}
        loss, gradient[rows, :width], metrics = evaluate(case, part, denom=torch.tensor(denom))
        total = total + loss
        sums = {name: sums.get(name, 0) + metric for name, metric in metrics.items()}
    assert_same((total, gradient, sums), evaluate(case, batch))


@every_case
def test_share_without_tokens_has_loss_and_gradient_zero(case):
    """A process may get no completion at all, or only empty ones: loss 0, gradient 0, metrics 0."""
    batch = make_batch(0, case.spread)
    masked = batch | {"mask": torch.zeros_like(batch["mask"])}
    rowless = {key: tensor[:0] for key, tensor in batch.items()}
    for share in (masked, rowless):
        loss, gradient, metrics = evaluate(case, share)
        assert loss == 0 and not gradient.any()  # NaN would be "any", too
        assert all(metric == 0 for metric in metrics.values())


def test_far_log_ratio_keeps_its_gradient():
    """Clamping it to +-20 "for stability" would lose the gradient where the policy moved furthest.
    With A = -1 at 30 a slope is e^30, with A = 1 at -30 it is e^-30, small but not 0."""
    old = -torch.ones(2, 3, dtype=torch.float64)
    for gap, advantage in ((30.0, -1.0), (-30.0, 1.0)):
        batch = {"logprobs": old + gap, "old_logprobs": old, "mask": positions([3, 2], 3)}
        batch["advantages"] = torch.full((2,), advantage, dtype=torch.float64)
        for case in POLICY_CASES:
            assert_same(evaluate(case, batch), reference(case, batch), rtol=1e-10, atol=0)


def test_small_log_ratios_keep_their_digits_in_float32():
    """approx_kl and k3 are x^2 / 2 there. e^x - x - 1 gives 0 at 1e-4, and -5e-8 at 1e-6."""
    for gap in (1e-2, 1e-4, -1e-4, 1e-6, -1e-6):
        old, mask = torch.zeros(1, 3), torch.ones(1, 3)
        _, metrics = gspo.gspo_loss(old - gap, old, torch.ones(1), mask)
        k3, _ = gspo.kl_penalty(old, old + gap, mask)
        unbiased, _ = gspo.kl_penalty(old, old + gap, mask, estimator="unbiased")
        for found in (metrics["approx_kl"], k3, unbiased):
            assert found.dtype == torch.float32 and found.item() == pytest.approx(gap**2 / 2, 0.15)


def test_unknown_word_is_refused():
    ones = torch.ones(2, 3)
    for call in (
        lambda: gspo.kl_penalty(ones, ones, ones, estimator="K3"),
        lambda: gspo.reinforce_loss(ones, ones, ones, ones, per="sequence"),
        lambda: gspo.group_advantages(ones[0], 3, advantage_scale="std"),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()


@pytest.mark.slow  # a fork may do without
def test_every_loss_has_a_scalar_loop():
    tested = {case.function for case in CASES}
    assert {name for name in vars(gspo) if name.endswith("_loss")} == tested - {"kl_penalty"}


HELPERS = ("as_columns", "completion_mean", "masked_mean", "policy_metrics")


def test_losses_run_when_pasted_with_the_helpers_that_the_file_names():
    """Which imports torch and the standard library alone."""
    imported = set(re.findall(r"(?m)^(?:from|import) (\w+)", inspect.getsource(gspo)))
    assert imported - sys.stdlib_module_names == {"torch"}
    for case in CASES:
        parts = [inspect.getsource(getattr(gspo, name)) for name in (*HELPERS, case.function)]
        scope = {}
        exec("\n".join(["import torch", *parts]), scope)
        batch = make_batch(0, case.spread)
        pasted = evaluate(case, batch, functions=SimpleNamespace(**scope))
        assert_same(pasted, evaluate(case, batch), rtol=0, atol=0)


def test_k1_is_the_mean_log_ratio_without_a_gradient():
    """E_pi[grad log pi] is 0: a gradient would be noise. It is no loss, so it is no case above."""
    batch = with_garbage(make_batch(0, 0.5))
    kl, metrics = gspo.kl_penalty(
        batch["logprobs"].requires_grad_(), batch["ref"], batch["mask"], per="token", estimator="k1"
    )
    gaps = [new - ref for row in rows_of(batch) for new, ref in zip(row.logprobs, row.ref)]
    assert kl.item() == metrics["kl"].item() == pytest.approx(fmean(gaps))
    assert not kl.requires_grad


# ---- advantages of rewards -----------------------------------------------------------------------


def group_loop(rewards, size, scale):
    """NaN is a completion without a verdict: it is in no mean, and its advantage is 0."""
    out, judged = [], [reward for reward in rewards if reward == reward]
    for start in range(0, len(rewards), size):
        pays = [reward for reward in rewards[start : start + size] if reward == reward]
        if len(pays) < 2:
            out += [0.0] * size
            continue
        mean, count = fmean(pays), len(pays)
        divisors = {
            "group": stdev(pays) + 1e-6,
            "batch": stdev(judged) + 1e-6,
            "mean": mean if mean > 0 else math.inf,
            "none": 1,
            "leave one out": (count - 1) / count,  # r - mean of the others = (r - mean) n / (n - 1)
        }
        group = rewards[start : start + size]
        out += [(reward - mean) / divisors[scale] if reward == reward else 0.0 for reward in group]
    return out


GROUP_FUNCTIONS = {
    scale: functools.partial(gspo.group_advantages, advantage_scale=scale)
    for scale in ("group", "batch", "mean", "none")
} | {"leave one out": gspo.leave_one_out_advantages}
every_group_function = pytest.mark.parametrize("name", GROUP_FUNCTIONS)


@every_group_function
def test_group_advantages_match_scalar_loop(name):
    """Binary and dense rewards, some of negative mean, one group dead, some without a verdict."""
    assert not GROUP_FUNCTIONS[name](torch.full((8,), math.nan), 4).any()
    for seed, size in enumerate((2, 4, 8, 2, 4, 8, 2, 4, 8, 2, 4, 8)):
        rewards = torch.randn(24, generator=torch.Generator().manual_seed(seed)).double()
        if seed % 2:
            rewards = (rewards > 0).double()
        rewards[size : 2 * size] = 0.3
        if seed >= 6:
            rewards[[0, 5, 9, 17, 20, 21, 22, 23]] = math.nan
        wanted = torch.tensor(group_loop(rewards.tolist(), size, name), dtype=torch.float64)
        assert_same(GROUP_FUNCTIONS[name](rewards, size), wanted)
    wins = torch.tensor([True, False, False, True])
    assert torch.equal(GROUP_FUNCTIONS[name](wins, 2), GROUP_FUNCTIONS[name](wins.float(), 2))


@every_group_function
def test_dead_group_has_advantage_exactly_zero(name):
    """The float32 mean of equal rewards is not always that reward, and 1.5e-8 / (1.5e-8 + 1e-6) is
    an advantage of 0.015. A group of one is dead, too."""
    function = GROUP_FUNCTIONS[name]
    for value in (0.1, 1e6 + 0.1, -0.3):
        for size in (1, 3, 7, 8, 11, 64):
            dead, living = torch.full((size,), value), torch.linspace(0, 1, max(size, 2))[:size]
            assert torch.equal(function(dead, size), torch.zeros(size))
            both = function(torch.cat([dead, living]), size)
            assert torch.equal(both[:size], torch.zeros(size))
            assert (both[size:].abs().max() > 0) == (size > 1)
    assert function(torch.tensor([0.0, 1e-7]), 2)[1] > 0  # only equal rewards are dead


# ---- advantages of tokens ------------------------------------------------------------------------


def discounted_sums(numbers, discount):
    """Of each number and those after it."""
    steps = range(len(numbers))
    return [sum(discount ** (u - t) * numbers[u] for u in steps[t:]) for t in steps]


def assert_own_tokens(tensor, mask, rows):
    """These numbers on the tokens of the mask, and 0 elsewhere."""
    wanted = torch.zeros(mask.shape, dtype=torch.float64)
    wanted[mask] = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    assert_same(tensor, wanted)


def whitened_rows(rows):
    every = [x for row in rows for x in row]
    return [[(x - fmean(every)) / (stdev(every) + 1e-6) for x in row] for row in rows]


@pytest.mark.parametrize("numbers", [{}, dict(gamma=0.9, gae_lambda=0.8)])
def test_token_advantages_match_scalar_loop(numbers):
    """Tokens of a tool are skipped, not discounted. Without numbers nothing is truncated."""
    batch = make_batch(1, 0.5) | {"rewards": make_batch(2, 0.5)["values"]}
    dirty, mask = with_garbage(batch, torch.long), batch["mask"]
    given = dirty["rewards"], dirty["values"], dirty["mask"]
    last = [i / 4 - 1 if numbers else 0.0 for i in range(len(mask))]
    bootstrap = torch.tensor(last).double() if numbers else None
    gamma, gae_lambda = numbers.get("gamma", 1.0), numbers.get("gae_lambda", 0.95)
    wanted, targets, to_go = [], [], []
    for row, after in zip(rows_of(batch), last):
        steps = zip(row.rewards, row.values, [*row.values[1:], after])
        deltas = [r + gamma * ahead - v for r, v, ahead in steps]
        wanted.append(discounted_sums(deltas, gamma * gae_lambda))
        targets.append([a + v for a, v in zip(wanted[-1], row.values)])
        to_go.append(discounted_sums(row.rewards, gamma))

    advantages, returns = gspo.gae_advantages(*given, bootstrap, **numbers)
    assert_own_tokens(advantages, mask, wanted)
    assert_own_tokens(returns, mask, targets)
    whitened, same = gspo.ppo_advantages(*given, bootstrap, **numbers)
    assert_own_tokens(whitened, mask, whitened_rows(wanted))
    assert torch.equal(same, returns)
    whitened = gspo.reinforce_plus_plus_advantages(dirty["rewards"], dirty["mask"], gamma=gamma)
    assert_own_tokens(whitened, mask, whitened_rows(to_go))


def test_whitened_equal_returns_are_exactly_zero():
    """The float32 mean of 300 equal numbers need not be that number. Of one token, too."""
    for lengths in ([5, 3, 1], [7] * 40, [1], [0, 0]):
        mask = positions(lengths, 8)
        is_last = mask & ~mask.roll(-1, 1)
        assert not gspo.reinforce_plus_plus_advantages(0.1 * is_last, mask).any()


def step_loop(rewards, steps, size):
    """Reward-to-go per step, z-scored over the group's k-th steps, copied to the step's tokens.
    NaN is no verdict: it is in no mean, and its advantage is 0."""
    out = torch.zeros(steps.shape, dtype=torch.float64)
    ends = [row.nonzero()[:, 0].tolist() for row in steps]
    returns = [discounted_sums(row[own].tolist(), 1.0) for row, own in zip(rewards, ends)]
    for i, own in enumerate(ends):
        group = range(i - i % size, i - i % size + size)
        for k, end in enumerate(own):
            peers = [returns[j][k] for j in group if len(returns[j]) > k]
            judged = [pay for pay in peers if pay == pay]
            if math.isnan(returns[i][k]) or max(judged) == min(judged):
                continue
            score = (returns[i][k] - fmean(judged)) / (stdev(judged) + 1e-6)
            out[i, own[k - 1] + 1 if k else 0 : end + 1] = score
    return out


@pytest.mark.parametrize("size", [4, 6, 12])
def test_step_advantages_match_scalar_loop(size):
    """Ragged rows, some without a step. Only rewards at the end of a step count."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        mask = positions([9, 7, 0, 4, 9, 1, 8, 6, 5, 5, 5, 3], 9)
        steps = mask & (torch.rand(mask.shape, generator=generator) < 0.35)
        rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        if seed % 2:
            rewards = (rewards > 0).double()
        if seed > 1:
            rewards[torch.rand(mask.shape, generator=generator) < 0.2] = math.nan
        dirty = rewards.where(steps, (math.nan, 7.0)[seed % 2])
        actual = gspo.step_advantages(dirty, steps.long(), size)
        assert_same(actual, step_loop(rewards, steps, size))


def test_step_advantages_do_not_tell_equal_sums_apart_by_rounding(monkeypatch):
    """A GPU adds in float32, here one after another, and the order of rewards decides."""

    def one_by_one(values, dim):
        sums = values.clone() if values.is_floating_point() else values.long()
        for t in range(1, values.shape[dim]):
            sums[:, t] += sums[:, t - 1]
        return sums

    monkeypatch.setattr(torch.Tensor, "cumsum", one_by_one)
    rng, parts = random.Random(0), [0.1, 0.2, 0.3, 0.1, 0.2, 0.7]
    rewards = torch.tensor([rng.sample(parts, 6) for _ in range(64)])
    first = gspo.step_advantages(rewards, torch.ones(64, 6), 8)[:, 0]
    assert torch.equal(first, torch.zeros(64))


@pytest.mark.parametrize("numbers", [{}, dict(reward_coef=0.7)])
def test_teacher_advantages_match_scalar_loop(numbers):
    """log pi_teacher - log pi_old of the sampled token + reward_coef (r - mean of the group)."""
    batch = make_batch(0, 0.5)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.3, 0.3, 0.3, 0.9], dtype=torch.float64)
    dirty = with_garbage(batch, torch.long)
    given = rewards, 4, dirty["ref"].requires_grad_(), dirty["old_logprobs"], dirty["mask"]
    actual = gspo.teacher_advantages(*given, **numbers)
    rows = []
    for row, centred in zip(rows_of(batch), group_loop(rewards.tolist(), 4, "none")):
        gaps = [teacher - old for teacher, old in zip(row.ref, row.old_logprobs)]
        rows.append([gap + numbers.get("reward_coef", 0.0) * centred for gap in gaps])
    assert_own_tokens(actual, batch["mask"], rows)
    assert not actual.requires_grad


def test_truncated_importance_weights_match_scalar_loop():
    batch = make_batch(0, 1.5)
    dirty = with_garbage(batch, torch.long)
    given = dirty["logprobs"].requires_grad_(), dirty["old_logprobs"], dirty["mask"]
    for cap, numbers in ((2.0, {}), (1.1, dict(cap=1.1))):
        rows = [[min(math.exp(gap), cap) for gap in log_ratios(row)] for row in rows_of(batch)]
        assert len({weight for row in rows for weight in row}) > 5  # some are capped, some not
        actual = gspo.truncated_importance_weights(*given, **numbers)
        assert_own_tokens(actual, batch["mask"], rows)
        assert not actual.requires_grad


# ---- the table of algorithms ---------------------------------------------------------------------

PAPERS = "gspo gspo-token luspo grpo dr-grpo dapo cispo dppo sapo gmpo ppo reinforce++ reinforce"
LOSSES = {"reinforce++": "ppo", "rloo": "reinforce", "maxrl": "reinforce", "opd": "importance"}
DEAD_GROUPS_TEACH = {"ppo", "reinforce++", "reinforce", "opd"}
Z = 0.5**0.5  # the z-score of two unequal rewards
OUTCOMES = {  # advantages of rewards 1, 0, 0, 4 in groups of two. The others' are z-scores
    "dr-grpo": [0.5, -0.5, -2, 2],
    "maxrl": [1, -1, -1, 1],
    "rloo": [1, -1, -4, 4],
    "reinforce": [-0.25, -1.25, -1.25, 2.75],
}


def test_algorithms_are_those_of_the_papers():
    """`per`, by which the trainer counts, must be the unit of the loss's mean: a row that
    contradicted its loss had a gradient 20 times too large."""
    units = {}  # of the default, which is the first case
    for case in POLICY_CASES:
        units.setdefault(case.function, "token" if case.mean == "token" else "completion")
    for name in {*PAPERS.split(), *LOSSES}:
        row = gspo.ALGOS[name]
        loss = LOSSES.get(name, name.replace("-", "_")) + "_loss"
        assert row.loss is getattr(gspo, loss) and row.per == units[loss], name
        assert row.kl_in == ("reward" if name in ("ppo", "reinforce++") else "loss"), name
        assert row.dynamic_sampling == row.overlong_shaping == (name == "dapo"), name
        assert row.kl_coef == (0.04 if name == "grpo" else 0.0), name
        assert row.skip_dead_groups == (name not in DEAD_GROUPS_TEACH), name
        of_rewards = row.reads == ("rewards", "group_size")
        parameters = list(inspect.signature(row.advantages).parameters)
        assert list(row.reads) == parameters[: len(row.reads)], name
        if of_rewards:
            values = row.advantages(torch.tensor([1.0, 0.0, 0.0, 4.0]), 2).tolist()
            assert values == pytest.approx(OUTCOMES.get(name, [Z, -Z, -Z, Z]), abs=1e-5), name


def test_a_row_that_contradicts_itself_is_refused():
    """A KL in the reward that no advantage reads would do nothing, a critic without values, too."""
    for wrong in (
        dict(kl_in="reward"),
        dict(reads=("token_rewards", "values")),
        dict(per="tokens"),
        dict(per="token"),  # grpo_loss is a mean over completions
        dict(value_loss=gspo.value_loss),
    ):
        with pytest.raises(AssertionError):
            gspo.Algorithm(gspo.grpo_loss, **{"per": "completion"} | wrong)


def test_every_number_has_a_flag_and_every_flag_of_a_number_an_algorithm(monkeypatch):
    """A number called `temperature` would silently get the sampling temperature."""
    for name in gspo.ALGOS:
        train.parse_flags(["--algo", name, *(["--teacher", "any"] if name == "opd" else [])])
    numbers = {name for row in gspo.ALGOS.values() for name in numbers_of(row)}
    fields = dataclasses.fields(train.Config)
    assert numbers == {field.name for field in fields if field.metadata.get("is_number")}

    def forks_loss(logprobs, old_logprobs, advantages, mask, denom=None, *, temperature=0.5):
        raise AssertionError("never called")

    monkeypatch.setitem(gspo.ALGOS, "gspo", gspo.Algorithm(forks_loss, "completion"))
    with pytest.raises(AssertionError, match="temperature has no flag"):
        train.parse_flags(["--algo", "gspo"])


def test_dead_groups_are_those_whose_advantages_are_0():
    pays = torch.tensor([[1.0, 0], [0, 1], [1, 1], [1, 1], [1, math.nan], [1, 1]])
    ends = torch.ones(6, 2) > 0
    assert gspo.dead_groups(pays, ends, 2).tolist() == [False, True, True]
    outcomes = torch.tensor([[0.0, 0], [0, 1], [0, 1], [0, 1], [0, math.nan], [0, 1]])
    ends[:, 0] = False
    assert gspo.dead_groups(outcomes, ends, 2).tolist() == [False, True, True]
