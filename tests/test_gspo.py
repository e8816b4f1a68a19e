"""The specification of gspo.py: every objective, advantage and KL estimator, value and gradient.

Each reference below is a plain python loop over floats, written from the papers' formulas and
sharing nothing with gspo.py. A loss is described by a *rule* and a *mean*:

    rule   what one token adds: its loss, its slope (d loss / d log-prob, worked out by hand), and
           its share of every metric
    mean   what the tokens of the batch are averaged over
             "token"       sum / number of tokens
             "completion"  mean over a completion's tokens, then over completions
             "constant"    sum / (completions * max_completion_length)
             "sum"         sum / completions
           the metrics of the last two are averaged as "completion": a ratio mean of 1 is 1

A sequence-level objective is a rule too: every token of the completion carries the same
-min(s A, clip(s) A), and the slope that it hands to each of its L log-probs is s A / L (eq. 10 of
arXiv 2507.18071), which is "completion" averaging of the token slope s A.
"""

import ast
import dataclasses
import functools
import inspect
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch

import gspo

EXACT = dict(rtol=1e-10, atol=1e-12)
LENGTHS = (6, 0, 1, 4, 3, 6, 2, 5)
WIDTH = 6
POLICY_METRICS = {"clip_fraction", "clip_fraction_high", "ratio_mean", "approx_kl"}


def mean_of(numbers):
    return math.fsum(numbers) / len(numbers)


def std_of(numbers):
    """ddof 1."""
    centre = mean_of(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


# ---- the rules: one completion in, one (loss, slope, metrics) per token out ----------------------


def clipped_surrogate(ratio, advantage, clip_low, clip_high, dual_clip=None):
    """-min(r A, clip(r) A) by cases: (loss, d loss / d log r, whether the clip holds it back)."""
    if advantage > 0 and ratio > 1 + clip_high:
        return -(1 + clip_high) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0, True
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        return -dual_clip * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


def policy_metrics(ratio, advantage, clipped=False):
    return {
        "clip_fraction": float(clipped),
        "clip_fraction_high": float(clipped and advantage > 0),
        "ratio_mean": ratio,
        "approx_kl": ratio - 1 - math.log(ratio),
    }


def token_clip_rule(row, clip_low=0.2, clip_high=0.2, dual_clip=None):
    for logprob, old, advantage in zip(row.logprobs, row.old_logprobs, row.advantages):
        ratio = math.exp(logprob - old)
        loss, slope, clipped = clipped_surrogate(ratio, advantage, clip_low, clip_high, dual_clip)
        yield loss, slope, policy_metrics(ratio, advantage, clipped)


def mean_log_ratio(row):
    return mean_of([logprob - old for logprob, old in zip(row.logprobs, row.old_logprobs)])


def gspo_rule(row, clip_low=3e-4, clip_high=4e-4):
    ratio, advantage = math.exp(mean_log_ratio(row)), mean_of(row.advantages)
    loss, slope, clipped = clipped_surrogate(ratio, advantage, clip_low, clip_high)
    for _ in row.logprobs:
        yield loss, slope, policy_metrics(ratio, advantage, clipped)


def gspo_token_rule(row, clip_low=3e-4, clip_high=4e-4):
    ratio = math.exp(mean_log_ratio(row))
    for advantage in row.advantages:
        loss, slope, clipped = clipped_surrogate(ratio, advantage, clip_low, clip_high)
        yield loss, slope, policy_metrics(ratio, advantage, clipped)


def dppo_rule(row, clip_low=0.2, clip_high=0.2, ratio_max=20.0):
    for logprob, old, advantage in zip(row.logprobs, row.old_logprobs, row.advantages):
        ratio, moved = math.exp(logprob - old), math.exp(logprob) - math.exp(old)
        if advantage > 0:
            stopped = moved > clip_high
        else:
            stopped = advantage < 0 and moved < -clip_low
        weight = 0.0 if stopped else min(ratio, ratio_max)
        metrics = policy_metrics(ratio, advantage, stopped)
        yield -weight * advantage * logprob, -weight * advantage, metrics


def cispo_rule(row, ratio_max=5.0):
    for logprob, old, advantage in zip(row.logprobs, row.old_logprobs, row.advantages):
        ratio = math.exp(logprob - old)
        weight = ratio_max if ratio > ratio_max else ratio
        metrics = policy_metrics(ratio, advantage, ratio > ratio_max)
        yield -weight * advantage * logprob, -weight * advantage, metrics


def sapo_rule(row, tau_pos=1.0, tau_neg=1.05):
    for logprob, old, advantage in zip(row.logprobs, row.old_logprobs, row.advantages):
        ratio = math.exp(logprob - old)
        tau = tau_pos if advantage > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        slope = -4 * gate * (1 - gate) * ratio * advantage
        yield -4 / tau * gate * advantage, slope, policy_metrics(ratio, advantage)


def gmpo_rule(row, clip_low=0.4, clip_high=0.4):
    advantage, gaps, held_back = mean_of(row.advantages), [], []
    for logprob, old in zip(row.logprobs, row.old_logprobs):
        gap = logprob - old
        bound = clip_high if advantage > 0 else -clip_low
        held_back.append((gap - bound) * advantage > 0)  # beyond the bound, the way that A pulls
        gaps.append(bound if held_back[-1] else gap)
    ratio = math.exp(mean_of(gaps))
    for clipped in held_back:
        slope = 0.0 if clipped else -ratio * advantage
        metrics = policy_metrics(math.exp(mean_log_ratio(row)), advantage, clipped)
        yield -ratio * advantage, slope, metrics


def reinforce_rule(row):
    for logprob, old, advantage in zip(row.logprobs, row.old_logprobs, row.advantages):
        metrics = policy_metrics(math.exp(logprob - old), advantage)
        yield -advantage * logprob, -advantage, metrics


def importance_rule(row):
    for logprob, old, advantage in zip(row.logprobs, row.old_logprobs, row.advantages):
        ratio = math.exp(logprob - old)
        yield -ratio * advantage, -ratio * advantage, policy_metrics(ratio, advantage)


def value_rule(row, clip=0.2):
    for value, old, target in zip(row.values, row.old_values, row.returns):
        error = value - target
        loss, slope, was_clipped = 0.5 * error**2, error, 0.0
        if clip is not None and abs(value - old) > clip:
            held_back = old + math.copysign(clip, value - old) - target
            if held_back**2 > error**2:
                loss, slope, was_clipped = 0.5 * held_back**2, 0.0, 1.0
        yield loss, slope, {"value_clip_fraction": was_clipped, "value_loss": loss}


def kl_rule(row, estimator="k3"):
    for logprob, ref in zip(row.logprobs, row.ref):
        gap = ref - logprob
        k3 = math.exp(gap) - gap - 1
        value, slope = {
            "k2": (gap**2 / 2, -gap),
            "k3": (k3, 1 - math.exp(gap)),
            "unbiased": (k3, k3 + 1 - math.exp(gap)),
        }[estimator]
        yield value, slope, {"kl": value}


# ---- the cases: every loss, with the paper's numbers and with others -----------------------------


POLICY_INPUTS = ("logprobs", "old_logprobs", "advantages", "mask")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    function: str
    mean: str
    rule: object
    spread: float = 0.5  # scale of the log-ratios, so that both sides of the clip are met
    options: dict = dataclasses.field(default_factory=dict)
    inputs: tuple = POLICY_INPUTS

    def __call__(self, batch, function=None, **more):
        function = function or getattr(gspo, self.function)
        return function(*(batch[key] for key in self.inputs), **self.options, **more)

    @property
    def is_policy(self):
        return self.inputs[1] == "old_logprobs"


VALUE = dict(inputs=("values", "old_values", "returns", "mask"))
KL = dict(inputs=("logprobs", "ref", "mask"))
NARROW = dict(clip_low=0.05, clip_high=0.1)
TENS = dict(max_completion_length=10)


def case(name, mean, loop, numbers=None, *, options=None, **rest):
    """numbers go to both the loss and its loop; options to the loss alone."""
    numbers = numbers or {}
    options = {**numbers, **(options or {})}
    loop = functools.partial(loop, **numbers)
    return Case(name, name.split()[0] + "_loss", mean, loop, options=options, **rest)


def kl_case(name, estimator, per):
    """The default estimator and unit are left to the signature."""
    options = {} if (estimator, per) == ("k3", "completion") else dict(estimator=estimator, per=per)
    return Case(
        name,
        "kl_penalty",
        per,
        functools.partial(kl_rule, estimator=estimator),
        options=options,
        **KL,
    )


LUSPO = functools.partial(gspo_rule, clip_low=2e-3, clip_high=2.5e-3)
DAPO = functools.partial(token_clip_rule, clip_low=0.2, clip_high=0.28)
CASES = [
    case("ppo", "token", token_clip_rule),
    case("ppo narrow", "token", token_clip_rule, NARROW),
    case("ppo dual", "token", token_clip_rule, dict(dual_clip=1.5)),
    Case("luspo", "luspo_loss", "sum", LUSPO, spread=5e-3),
    case("luspo wide", "sum", gspo_rule, NARROW),
    case("grpo", "completion", token_clip_rule),
    case("grpo narrow", "completion", token_clip_rule, NARROW),
    case("dr_grpo", "constant", token_clip_rule, options=TENS),
    case("dr_grpo narrow", "constant", token_clip_rule, NARROW, options=TENS),
    Case("dapo", "dapo_loss", "token", DAPO),
    case("dapo narrow", "token", token_clip_rule, NARROW),
    case("gspo", "completion", gspo_rule, spread=1e-3),
    case("gspo wide", "completion", gspo_rule, NARROW),
    case("gspo_token", "completion", gspo_token_rule, spread=1e-3),
    case("gspo_token wide", "completion", gspo_token_rule, NARROW),
    case("cispo", "token", cispo_rule, spread=2.0),
    case("cispo 1.2", "token", cispo_rule, dict(ratio_max=1.2)),
    case("dppo", "token", dppo_rule),
    case("dppo narrow", "token", dppo_rule, dict(clip_low=0.05, clip_high=0.1, ratio_max=1.2)),
    case("sapo", "completion", sapo_rule),
    case("sapo 3 0.5", "completion", sapo_rule, dict(tau_pos=3.0, tau_neg=0.5)),
    case("gmpo", "completion", gmpo_rule),
    case("gmpo narrow", "completion", gmpo_rule, NARROW),
    case("reinforce", "token", reinforce_rule),
    case("reinforce completion", "completion", reinforce_rule, options=dict(per="completion")),
    case("importance", "token", importance_rule),
    case("value", "token", value_rule, **VALUE),
    case("value 0.6", "token", value_rule, dict(clip=0.6), **VALUE),
    case("value unclipped", "token", value_rule, dict(clip=math.inf), **VALUE),
    kl_case("kl", "k3", "completion"),
    kl_case("kl k3 token", "k3", "token"),
    kl_case("kl k2", "k2", "completion"),
    kl_case("kl unbiased", "unbiased", "completion"),
]
POLICY_CASES = [each for each in CASES if each.is_policy]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
every_policy_case = pytest.mark.parametrize("case", POLICY_CASES, ids=lambda each: each.name)


def positions(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def make_batch(seed, spread, advantages="row", lengths=LENGTHS, width=WIDTH):
    """Ragged float64 rows, one of them empty, one of advantage 0; padding holds other numbers."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (len(lengths), width)
    old = -noise(*shape).abs() - 0.1
    batch = {
        "logprobs": old + spread * noise(*shape),
        "old_logprobs": old,
        "ref": old + 0.5 * noise(*shape),
        "advantages": noise(len(lengths)) if advantages == "row" else noise(*shape),
        "values": noise(*shape),
        "returns": noise(*shape),
        "mask": positions(lengths, width),
    }
    batch["old_values"] = batch["values"] + 0.4 * noise(*shape)
    batch["advantages"][4] = 0.0
    return batch


def rows_of(batch):
    """The completions of a batch as python lists of their own tokens only."""
    for index, keep in enumerate(batch["mask"].tolist()):
        row = SimpleNamespace(places=[t for t, kept in enumerate(keep) if kept])
        for key, tensor in batch.items():
            numbers = tensor[index].tolist()
            numbers = numbers if isinstance(numbers, list) else [numbers] * len(keep)
            setattr(row, key, [numbers[t] for t in row.places])
        yield row


def reference(case, batch):
    """(loss, gradient as (N, T), metrics) of the scalar loop."""
    lengths = [sum(keep) for keep in batch["mask"].tolist()]
    loss, metrics = 0.0, {}
    gradient = torch.zeros(batch["mask"].shape, dtype=torch.float64)
    for index, row in enumerate(rows_of(batch)):
        weights = {
            "token": 1 / max(sum(lengths), 1),
            "completion": 1 / (len(lengths) * max(lengths[index], 1)),
            "constant": 1 / (len(lengths) * TENS["max_completion_length"]),
            "sum": 1 / len(lengths),
        }
        weight = weights[case.mean]
        metric_weight = weights["token" if case.mean == "token" else "completion"]
        for place, (value, slope, shares) in zip(row.places, case.rule(row) if row.places else []):
            loss += weight * value
            gradient[index, place] = weight * slope
            for name, share in shares.items():
                metrics[name] = metrics.get(name, 0.0) + metric_weight * share
    return loss, gradient, metrics


def evaluate(case, batch, **more):
    """(loss, gradient, metrics) of the function under test."""
    leaf = batch[case.inputs[0]].clone().requires_grad_()
    loss, metrics = case({**batch, case.inputs[0]: leaf}, **more)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def assert_same(actual, expected, **tolerance):
    tolerance = tolerance or EXACT
    for got, wanted in zip(actual[:2], expected[:2]):
        wanted = torch.as_tensor(wanted, dtype=got.dtype)
        torch.testing.assert_close(got, wanted, **tolerance)
    assert set(actual[2]) == set(expected[2])
    for name, got in actual[2].items():
        wanted = torch.as_tensor(expected[2][name], dtype=got.dtype)
        torch.testing.assert_close(got, wanted, msg=f"{name}: {got} for {wanted}", **tolerance)


# ---- every loss against its loop -----------------------------------------------------------------


@every_case
@pytest.mark.parametrize("advantages", ["row", "token"])
def test_loss_matches_scalar_loop(case, advantages):
    for seed in range(3):
        batch = make_batch(seed, case.spread, advantages)
        assert_same(evaluate(case, batch), reference(case, batch))


@every_case
def test_loss_takes_a_mask_with_holes(case):
    """A completion's tokens need not be adjacent (several turns, tool output between them)."""
    batch = make_batch(0, case.spread)
    batch["mask"] = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.6
    batch["mask"][2] = False
    assert_same(evaluate(case, batch), reference(case, batch))


@every_case
def test_loss_returns_scalars_and_detached_metrics(case):
    batch = make_batch(0, case.spread)
    batch[case.inputs[0]].requires_grad_()
    loss, metrics = case(batch)
    assert loss.shape == () and loss.requires_grad
    names = {"value_loss": {"value_clip_fraction", "value_loss"}, "kl_penalty": {"kl"}}
    assert set(metrics) == names.get(case.function, POLICY_METRICS)
    for name, metric in metrics.items():
        assert isinstance(metric, torch.Tensor) and metric.shape == (), name
        assert not metric.requires_grad, name


@every_case
def test_loss_of_no_token_at_all_is_zero(case):
    """Every completion empty: 0 / max(0, 1), no NaN in loss, gradient or metrics."""
    batch = make_batch(0, case.spread)
    batch["mask"] = torch.zeros_like(batch["mask"])
    loss, gradient, metrics = evaluate(case, batch)
    assert loss == 0 and torch.equal(gradient, torch.zeros_like(gradient))
    assert all(metric == 0 for metric in metrics.values())


@every_case
def test_loss_stays_in_float32(case):
    """float32 in, float32 out, close to the float64 loop."""
    batch = make_batch(0, case.spread)
    single = {key: tensor.float() if key != "mask" else tensor for key, tensor in batch.items()}
    actual = evaluate(case, single)
    assert actual[0].dtype == torch.float32
    double = {key: tensor.double() if key != "mask" else tensor for key, tensor in single.items()}
    assert_same(actual, reference(case, double), rtol=1e-4, atol=1e-5)


@every_policy_case
def test_loss_comparisons_meet_the_clip_on_both_sides(case):
    """Otherwise the scalar loops above would compare nothing but -r A."""
    high, low = 0.0, 0.0
    for seed in range(3):
        metrics = reference(case, make_batch(seed, case.spread))[2]
        high += metrics["clip_fraction_high"]
        low += metrics["clip_fraction"] - metrics["clip_fraction_high"]
    clips = case.function not in ("sapo_loss", "reinforce_loss", "importance_loss")
    assert (high > 0.01, low > 0.01) == (clips, clips)


@every_case
def test_loss_gradient_goes_to_its_first_argument_alone(case):
    """old_logprobs, advantages, old_values and returns are data."""
    batch = make_batch(0, case.spread)
    for key, tensor in batch.items():
        tensor.requires_grad_(key != "mask")
    case(batch)[0].backward()
    assert {key for key, tensor in batch.items() if tensor.grad is not None} == {case.inputs[0]}


@pytest.mark.parametrize(
    "function, inputs, wrong",
    [
        ("kl_penalty", ("logprobs", "ref", "mask"), dict(estimator="K3")),
        ("kl_penalty", ("logprobs", "ref", "mask"), dict(per="tokens")),
        ("reinforce_loss", POLICY_INPUTS, dict(per="sequence")),
        ("truncated_importance_weights", ("logprobs", "ref", "mask"), dict(per="tokens")),
        ("mismatch_mask", ("logprobs", "ref", "mask"), dict(per="tokens")),
    ],
)
def test_unknown_word_is_refused(function, inputs, wrong):
    """Never a silent default."""
    batch = make_batch(0, 0.5)
    with pytest.raises(ValueError, match="expected"):
        getattr(gspo, function)(*(batch[key] for key in inputs), **wrong)


# ---- a loss can be pasted elsewhere --------------------------------------------------------------


def source_with_helpers(name):
    """What a person copies: the function, and the functions of gspo.py that it calls."""
    found, missing = {}, [name]
    while missing:
        name = missing.pop()
        found[name] = inspect.getsource(getattr(gspo, name))
        used = {node.id for node in ast.walk(ast.parse(found[name])) if isinstance(node, ast.Name)}
        missing += [
            each for each in used - found.keys() if inspect.isfunction(vars(gspo).get(each))
        ]
    return "import torch\n\n\n" + "\n\n".join(found.values())


LOSSES = [*dict.fromkeys(each.function for each in CASES)]


def test_all_losses_are_among_the_cases():
    assert {name for name in vars(gspo) if name.endswith("_loss")} == {*LOSSES} - {"kl_penalty"}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_runs_when_pasted_with_its_helpers(name):
    """In at most 75 lines."""
    source = source_with_helpers(name)
    assert len(source.splitlines()) <= 75
    scope = {}
    exec(compile(source, name, "exec", dont_inherit=True), scope)
    for case in CASES:
        if case.function == name:
            batch = make_batch(0, case.spread)
            actual = evaluate(case, batch, function=scope[name])
            assert_same(actual, evaluate(case, batch), rtol=0, atol=0)


def test_module_imports_nothing_but_torch_and_the_standard_library():
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(gspo))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch"}


# ---- padding -------------------------------------------------------------------------------------

GARBAGE = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0], dtype=torch.float64)


def filled(tensor, mask, junk):
    """The tensor with a number, or a tensor of numbers, on its padding."""
    return torch.where(mask, tensor, torch.as_tensor(junk, dtype=tensor.dtype))


@every_case
def test_padding_may_hold_anything(case):
    """Pitfall 6: NaN * 0 is NaN, and the gradient of exp(inf) * 0 is inf * 0. Selecting with
    torch.where before the exp keeps value, gradient and metrics bit for bit."""
    batch = make_batch(0, case.spread, "token")
    mask, clean = batch["mask"], evaluate(case, batch)
    generator = torch.Generator().manual_seed(0)
    for kind in (*GARBAGE[:4].tolist(), "mixed"):
        dirty = {"mask": mask}
        for key in [key for key in batch if key != "mask"]:
            picks = torch.randint(0, len(GARBAGE), mask.shape, generator=generator)
            junk = GARBAGE[picks] if kind == "mixed" else kind
            dirty[key] = filled(batch[key], mask, junk)
        for dtype in (torch.bool, torch.long, torch.float32):
            actual = evaluate(case, {**dirty, "mask": mask.to(dtype)})
            assert_same(actual, clean, rtol=0, atol=1e-15)
        assert torch.equal(actual[1][~mask], torch.zeros_like(actual[1][~mask]))


@every_case
def test_padded_width_changes_nothing(case):
    """Pitfall 9: Dr. GRPO divides by a constant, and nobody divides by the tensor's width."""
    batch = make_batch(0, case.spread, "token")
    wide = {
        key: torch.nn.functional.pad(tensor, (0, 5), value=0 if key == "mask" else 7.0)
        for key, tensor in batch.items()
    }
    loss, gradient, metrics = evaluate(case, wide)
    assert_same((loss, gradient[:, :WIDTH], metrics), evaluate(case, batch))


# ---- denom: micro-batches ------------------------------------------------------------------------

MICRO_BATCHES = (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 8))  # the second: one empty row


def micro_batches(batch, parts):
    """Each micro-batch trimmed to its own longest completion, as a trainer would pack it."""
    for rows in parts:
        width = max(1, max(LENGTHS[rows]))
        yield {
            key: tensor[rows, :width] if tensor.ndim == 2 else tensor[rows]
            for key, tensor in batch.items()
        }


def accumulate(case, batch, denom, parts=MICRO_BATCHES):
    leaf = batch[case.inputs[0]].clone().requires_grad_()
    total, metrics = 0.0, {}
    for micro in micro_batches({**batch, case.inputs[0]: leaf}, parts):
        loss, parts = case(micro, denom=denom)
        loss.backward()
        total += loss.detach()
        for name, part in parts.items():
            metrics[name] = metrics.get(name, 0.0) + part
    return total, leaf.grad, metrics


@every_case
def test_denom_makes_micro_batches_equal_one_batch(case):
    """Pitfall 1: with the denominator of the whole optimiser step (8 completions, or their 27
    tokens), the four parts add up to the whole: value, gradient and every metric."""
    batch = make_batch(0, case.spread, "token")
    denom = sum(LENGTHS) if case.mean == "token" else len(LENGTHS)
    assert_same(accumulate(case, batch, denom), evaluate(case, batch))
    assert_same(evaluate(case, batch, denom=torch.tensor(denom)), evaluate(case, batch))


# ---- one worked example per loss -----------------------------------------------------------------


def worked(function, ratios, advantages, *, logprobs=None, **options):
    """(loss, gradient per row, metrics) for ragged lists of token ratios, as python numbers."""
    width = max(map(len, ratios))
    mask = positions([len(row) for row in ratios], width)
    padded = [[*row, *[1.0] * (width - len(row))] for row in ratios]
    log_ratio = torch.tensor(padded, dtype=torch.float64).log()
    new = log_ratio * 0 - 1.0 if logprobs is None else torch.tensor(logprobs, dtype=torch.float64)
    leaf = new.clone().requires_grad_()
    advantages = torch.tensor(advantages, dtype=torch.float64)
    loss, metrics = getattr(gspo, function)(leaf, new - log_ratio, advantages, mask, **options)
    loss.backward()
    gradient = [leaf.grad[i, : len(row)].tolist() for i, row in enumerate(ratios)]
    return loss.item(), gradient, {name: metric.item() for name, metric in metrics.items()}


def check(result, loss, gradient, **metrics):
    assert result[0] == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert len(result[1]) == len(gradient)
    for got, wanted in zip(result[1], gradient):
        assert got == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    for name, wanted in metrics.items():
        assert result[2][name] == pytest.approx(wanted, rel=1e-12, abs=1e-14), name


# ---- what the objectives have in common, and what sets them apart --------------------------------


@every_policy_case
def test_first_update_is_reinforce(case):
    """At pi = pi_old every ratio is 1 and no clip acts, so each objective's gradient is
    REINFORCE's, -A grad log pi, in its own mean (SAPO: 4/tau * tau * 1/4 = 1). GSPO's equals
    GRPO's there: with one update per rollout the two are one algorithm."""
    batch = make_batch(0, 0.0)
    _, gradient, metrics = evaluate(case, batch)
    plain = Case("plain", "reinforce_loss", case.mean, reinforce_rule)
    torch.testing.assert_close(gradient, reference(plain, batch)[1], **EXACT)
    assert metrics["clip_fraction"] == 0 and metrics["approx_kl"] == 0
    _, metrics = case(make_batch(0, 0.0, lengths=(6,) * 8))
    assert metrics["ratio_mean"].item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("numbers", [{}, NARROW], ids=["paper", "wide"])
@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_equals_gspo_for_constant_advantages(numbers, seed):
    """Eq. 13 and 17: s_{i,t} = sg[s_i] pi/sg[pi] has the value s_i, and its gradient is
    s_i grad log pi. Pitfall 5: with the stop-gradient forgotten on s_i the gradient doubles."""
    batch = make_batch(seed, 0.5 if numbers else 1e-3)
    whole = Case("whole", "gspo_loss", "completion", None, options=numbers)
    parts = Case("parts", "gspo_token_loss", "completion", None, options=numbers)
    expected = evaluate(whole, batch)
    assert_same(evaluate(parts, batch), expected)
    spelled_out = batch["advantages"][:, None].expand(-1, WIDTH)
    assert_same(evaluate(parts, {**batch, "advantages": spelled_out}), expected)
    assert_same(evaluate(whole, {**batch, "advantages": spelled_out}), expected)


def test_gspo_weighs_the_tokens_of_a_completion_equally_and_grpo_does_not():
    """Eq. 10 against eq. 11: ratios 1.5, 1, 0.8 (product 1.2), A = 1, no clip.

    GSPO: s/3 each, s = 1.2^(1/3). GRPO: each its own ratio, 1.5/3, 1/3, 0.8/3."""
    ratios, open_clip = [[1.5, 1.0, 0.8]], dict(clip_low=0.9, clip_high=9.0)
    s = 1.2 ** (1 / 3)
    check(worked("gspo_loss", ratios, [1.0], **open_clip), -s, [[-s / 3] * 3])
    check(worked("grpo_loss", ratios, [1.0], **open_clip), -1.1, [[-0.5, -1 / 3, -0.8 / 3]])


@pytest.mark.parametrize("function", ["gspo_loss", "luspo_loss", "gmpo_loss"])
def test_sequence_loss_averages_token_advantages(function):
    """A sequence-level objective has one advantage per completion: advantages 3 and -1 act as 1,
    and what stands on the padding does not enter."""
    ratios = [[1.1, 1.0], [1.0]]
    tokens = worked(function, ratios, [[3.0, -1.0], [-2.0, 50.0]])
    rows = worked(function, ratios, [1.0, -2.0])
    check(tokens, rows[0], rows[1], **rows[2])


# ---- pitfalls ------------------------------------------------------------------------------------


@every_policy_case
def test_empty_completion_adds_nothing_but_counts(case):
    """Pitfall 7: an empty completion's s is exp(0/1) = 1, but it has no token: its share of the
    objective is 0, not -A. It still counts: among 2 completions the other one weighs 1/2 and not
    1; among tokens it has none to count."""
    batch = make_batch(0, case.spread)
    both = {key: tensor[:2] for key, tensor in batch.items()}  # 6 tokens, and none
    lone = {key: tensor[:1] for key, tensor in batch.items()}
    alone, together = evaluate(case, lone), evaluate(case, both)
    share = 1 if case.mean == "token" else 0.5
    scaled = {name: metric * share for name, metric in alone[2].items()}
    gradient = torch.cat([alone[1] * share, torch.zeros_like(alone[1])])
    assert_same(together, (alone[0] * share, gradient, scaled))


@pytest.mark.parametrize(
    "case",
    [each for each in POLICY_CASES if each.spread > 0.1],
    ids=lambda each: each.name,
)
@pytest.mark.parametrize("gap", [30.0, -30.0])
def test_far_log_ratio_keeps_its_gradient(case, gap):
    """Pitfall 8: many codes clamp the log-ratio to +-10 or +-20 "for stability", and so lose the
    gradient exactly where the policy has gone furthest. A = -1 at log-ratio 30: the slope of a
    token is e^30 = 1.07e13, and the objective means it (SAPO's gate closes there, by design); A = 1
    at -30: e^-30, small but not 0."""
    advantage = -1.0 if gap > 0 else 1.0
    old = -torch.ones(2, 3, dtype=torch.float64)
    batch = {
        "logprobs": old + gap,
        "old_logprobs": old,
        "advantages": torch.full((2,), advantage, dtype=torch.float64),
        "mask": positions([3, 2], 3),
    }
    assert_same(evaluate(case, batch), reference(case, batch), rtol=1e-10, atol=0)


@every_policy_case
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_overflow_of_a_ratio_shows_in_ratio_mean(case, advantage):
    """e^100 is no float32: ratio_mean is not finite, so a trainer knows. The gradient may be NaN
    (the clip's 0 times inf); where it is finite it is float64's, to which e^100 is a number."""
    old = -101 * torch.ones(2, 3, dtype=torch.float64)
    exact = {
        "logprobs": old + 100,
        "old_logprobs": old,
        "advantages": torch.full((2,), advantage, dtype=torch.float64),
        "mask": positions([3, 2], 3),
    }
    rounded = {key: tensor.float() for key, tensor in exact.items()}
    _, gradient, metrics = evaluate(case, rounded)
    _, wanted, finite = evaluate(case, exact)
    assert not math.isfinite(metrics["ratio_mean"]) and math.isfinite(finite["ratio_mean"])
    assert wanted.isfinite().all()
    seen = gradient.isfinite()
    torch.testing.assert_close(gradient[seen].double(), wanted[seen], rtol=1e-5, atol=1e-9)


def test_value_clip_fraction_ignores_rounding():
    """v_old + (v - v_old) is not always v in float32: where |v - v_old| is under the clip, both
    branches are one, and a difference in the last bit must not count as clipped. Values near 0,
    as a critic's are at the start, round the most."""
    generator = torch.Generator().manual_seed(0)
    old, values = 0.05 * torch.rand(2, 64, 16, generator=generator)
    returns = (torch.rand(64, 16, generator=generator) < 0.5).float()
    mask = torch.ones(64, 16, dtype=torch.bool)
    assert (old + (values - old) != values).any()
    _, metrics = gspo.value_loss(values, old, returns, mask)
    assert metrics["value_clip_fraction"] == 0


# ---- KL: exact expectations over a vocabulary of five --------------------------------------------

LOGITS = torch.tensor([1.2, -0.3, 0.4, -1.5, 0.1], dtype=torch.float64)
REF = torch.tensor([-0.4, 0.9, 0.2, 0.5, -1.1], dtype=torch.float64).log_softmax(0)


def expected_kl(estimator):
    """(sum over v of pi(v) kl_penalty(v), its gradient by the logits with the weights pi(v) held
    fixed): each token v is a completion of length one that pi sampled."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = logprobs.detach().exp()
    mask = torch.ones(1, 1, dtype=torch.bool)
    total = 0.0
    for token in range(5):
        new, ref = logprobs[token].view(1, 1), REF[token].view(1, 1)
        kl, _ = gspo.kl_penalty(new, ref, mask, estimator=estimator)
        total = total + weights[token] * kl
    (gradient,) = torch.autograd.grad(total, logits)
    return total.item(), gradient.tolist()


def exact_kl():
    """Reverse KL(pi || ref) and the closed-form gradients by the logits:
    reverse  pi_j (log pi_j/ref_j - KL);  forward KL(ref || pi)  pi_j - ref_j."""
    pi = [math.exp(each) for each in LOGITS.log_softmax(0).tolist()]
    ref = [math.exp(each) for each in REF.tolist()]
    kl = sum(p * math.log(p / q) for p, q in zip(pi, ref))
    reverse = [p * (math.log(p / q) - kl) for p, q in zip(pi, ref)]
    forward = [p - q for p, q in zip(pi, ref)]
    return kl, reverse, forward


def test_kl_k1_is_a_metric_with_the_right_mean_and_no_gradient():
    """E_pi[log pi - log ref] = KL(pi || ref). Pitfall 4: the gradient of -x is grad log pi whatever
    ref is, and E_pi[grad log pi] = 0: a penalty that pulls nowhere and adds noise."""
    logprobs = LOGITS.log_softmax(0).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    mean = 0.0
    for new, ref in zip(logprobs, REF):
        value, metrics = gspo.kl_penalty(new.view(1, 1), ref.view(1, 1), mask, estimator="k1")
        assert not value.requires_grad and metrics["kl"] == value
        mean += new.exp().item() * value.item()
    assert mean == pytest.approx(exact_kl()[0], rel=1e-12)


def test_kl_k3_has_the_mean_of_the_reverse_and_the_gradient_of_the_forward_kl():
    """E_pi[ref/pi - log(ref/pi) - 1] = 1 + KL - 1. Its gradient, with tokens drawn from pi, is
    E_pi[(1 - ref/pi) grad log pi]: pi_j - ref_j by the logits, the forward KL's."""
    kl, reverse, forward = exact_kl()
    value, gradient = expected_kl("k3")
    assert value == pytest.approx(kl, rel=1e-12)
    assert gradient == pytest.approx(forward, rel=1e-10)
    assert gradient != pytest.approx(reverse, rel=1e-2)


def test_kl_k2_has_the_gradient_of_the_reverse_kl():
    """E_pi[-x grad log pi] = pi_j (log pi_j/ref_j - KL); its value is not the KL."""
    kl, reverse, _ = exact_kl()
    value, gradient = expected_kl("k2")
    assert gradient == pytest.approx(reverse, rel=1e-10)
    assert value != pytest.approx(kl, rel=1e-2)


def test_kl_unbiased_has_both_mean_and_gradient_of_the_reverse_kl():
    """r k3 with r = pi/sg[pi]: the value is k3's, the slope k3 + 1 - e^x = -x is k2's."""
    kl, reverse, _ = exact_kl()
    value, gradient = expected_kl("unbiased")
    assert value == pytest.approx(kl, rel=1e-12)
    assert gradient == pytest.approx(reverse, rel=1e-10)


# ---- advantages ----------------------------------------------------------------------------------


def groups_of(numbers, size):
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def group_factor(group, rewards, scale):
    if scale == "group":
        return 1 / (std_of(group) + 1e-6)
    if scale == "batch":
        return 1 / (std_of(rewards) + 1e-6)
    if scale == "mean":
        return 1 / mean_of(group) if mean_of(group) > 0 else 0.0
    return 1.0


def group_loop(rewards, size, scale):
    out = []
    for group in groups_of(rewards, size):
        for reward in group:
            if max(group) == min(group):
                out.append(0.0)
            else:
                out.append((reward - mean_of(group)) * group_factor(group, rewards, scale))
    return out


def leave_one_out_loop(rewards, size):
    out = []
    for group in groups_of(rewards, size):
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            out.append(0.0 if max(group) == min(group) else reward - mean_of(others))
    return out


def random_rewards(seed, count, size):
    """Binary or dense rewards with one dead group."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    if seed % 2:
        rewards = (rewards > 0).double()
    rewards[size : 2 * size] = 0.3
    return rewards


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_group_advantages_match_scalar_loop(scale, size):
    for seed in range(4):
        rewards = random_rewards(seed, 24, size)
        wanted = torch.tensor(group_loop(rewards.tolist(), size, scale), dtype=torch.float64)
        actual = gspo.group_advantages(rewards, size, scale=scale)
        torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_leave_one_out_advantages_match_scalar_loop(size):
    for seed in range(4):
        rewards = random_rewards(seed, 24, size)
        wanted = torch.tensor(leave_one_out_loop(rewards.tolist(), size), dtype=torch.float64)
        torch.testing.assert_close(gspo.leave_one_out_advantages(rewards, size), wanted, **EXACT)


def test_maxrl_advantages_without_a_positive_mean_are_zero():
    """(r - mean) / mean would turn the signs around: -3 and -1 have mean -2; 1 and -1 have 0."""
    rewards = torch.tensor([-3.0, -1.0, 1.0, -1.0, 3.0, 1.0])
    actual = gspo.group_advantages(rewards, 2, scale="mean")
    assert actual.tolist() == [0, 0, 0, 0, 0.5, -0.5]


def term_loop(term_rewards, weights, size):
    """Every term z-scored in its group, the weighted sums z-scored over the batch."""
    columns = [group_loop(list(column), size, "group") for column in zip(*term_rewards)]
    sums = [math.fsum(w * a for w, a in zip(weights, row)) for row in zip(*columns)]
    return [(x - mean_of(sums)) / (std_of(sums) + 1e-6) for x in sums]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_term_advantages_match_scalar_loop(size):
    for seed in range(4):
        columns = [random_rewards(seed + k, 24, 2 * k + 2 if k else size) for k in range(3)]
        rewards, weights = torch.stack(columns, 1), [1.0, 0.1, -0.5]
        wanted = torch.tensor(term_loop(rewards.tolist(), weights, size), dtype=torch.float64)
        for given in (weights, torch.tensor(weights, dtype=torch.float64)):
            actual = gspo.term_advantages(rewards, given, size)
            torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0])
def test_term_advantages_of_a_dead_group_are_exactly_zero(value):
    """Also beside living ones, where the batch's mean is 0 but for rounding; a term may be dead."""
    generator = torch.Generator().manual_seed(0)
    for size in range(2, 20):
        rewards = torch.rand(3 * size, 2, generator=generator)
        rewards[:size] = value
        rewards[size : 2 * size, 0] = value
        actual = gspo.term_advantages(rewards, [1.0, 0.3], size)
        assert torch.equal(actual[:size], torch.zeros(size))
        assert actual[size:].view(2, size).abs().amax(1).min() > 0
        assert torch.equal(
            gspo.term_advantages(rewards[:size], [1.0, 0.3], size), torch.zeros(size)
        )


GROUP_FUNCTIONS = {
    "group": gspo.group_advantages,
    "group batch": functools.partial(gspo.group_advantages, scale="batch"),
    "group mean": functools.partial(gspo.group_advantages, scale="mean"),
    "group none": functools.partial(gspo.group_advantages, scale="none"),
    "leave one out": gspo.leave_one_out_advantages,
}


@pytest.mark.parametrize("seed", range(2))
def test_reinforce_advantages_match_scalar_loop(seed):
    """The baseline is the mean of the whole batch, whatever the groups."""
    rewards = random_rewards(seed, 24, 4)
    wanted = torch.tensor([x - mean_of(rewards.tolist()) for x in rewards.tolist()]).double()
    for size in (1, 4, 24):
        actual = gspo.reinforce_advantages(rewards, size)
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
@pytest.mark.parametrize("value", [0.1, 1e-8, 1e6 + 0.1, -0.3, 0.0])
def test_dead_group_has_advantage_exactly_zero(name, value):
    """Equal rewards teach nothing. In float32 the mean of 0.1 repeated is not always 0.1, and
    1.5e-8 over (1.5e-8 + 1e-6) is an advantage of 0.015 out of nowhere: the test must be
    max == min, for every group size from 3 to 64, alone and beside a living group."""
    function = GROUP_FUNCTIONS[name]
    for size in range(3, 65):
        dead = torch.full((size,), value, dtype=torch.float32)
        assert torch.equal(function(dead, size), torch.zeros(size))
        alive = torch.linspace(0, 1, size)
        both = function(torch.cat([dead, alive]), size)
        assert torch.equal(both[:size], torch.zeros(size))
        assert both[size:].abs().max() > 0


def test_group_of_nearly_equal_rewards_is_not_dead():
    """Rewards 0 and 1e-7: mean 5e-8, std 7.07e-8: +-5e-8 / (7.07e-8 + 1e-6) = +-0.0467. The 1e-6
    damps them, by the formula; only equality makes a group dead. MaxRL: 5e-8/5e-8."""
    rewards = torch.tensor([0.0, 1e-7], dtype=torch.float64)
    wanted = 5e-8 / (1e-7 / math.sqrt(2) + 1e-6)
    for scale, advantage in dict(group=wanted, batch=wanted, mean=1.0, none=5e-8).items():
        actual = gspo.group_advantages(rewards, 2, scale=scale).tolist()
        assert actual == pytest.approx([-advantage, advantage], rel=1e-12, abs=0)


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
def test_group_of_one_has_advantage_zero(name):
    """No other completion to compare with: 0, and not the NaN of a std over one number."""
    for count in (1, 3):
        rewards = torch.arange(1, count + 1, dtype=torch.float32)
        assert torch.equal(GROUP_FUNCTIONS[name](rewards, 1), torch.zeros(count))


def token_rewards(seed, lengths=LENGTHS, width=WIDTH, dense=True):
    generator = torch.Generator().manual_seed(seed)
    mask = positions(lengths, width)
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    if not dense:
        ends = mask & ~positions([max(length - 1, 0) for length in lengths], width)
        rewards = torch.where(ends, rewards, torch.zeros_like(rewards))
    return rewards, values, mask


def nested(mask, rows):
    """A list of rows of their own tokens, as (N, T) with zeros on the padding."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def reward_to_go(rewards, gamma):
    steps = range(len(rewards))
    return [sum(gamma ** (u - t) * rewards[u] for u in steps[t:]) for t in steps]


def own_tokens(tensor, mask):
    return [row[keep].tolist() for row, keep in zip(tensor, mask)]


def assert_own_tokens(tensor, mask, rows):
    """These numbers on the tokens of the mask, and 0 elsewhere."""
    wanted = torch.zeros(mask.shape, dtype=torch.float64)
    wanted[mask] = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    torch.testing.assert_close(tensor, wanted, **EXACT)


def whitened_rows(rows):
    every = [x for row in rows for x in row]
    return [[(x - mean_of(every)) / (std_of(every) + 1e-6) for x in row] for row in rows]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(2))
def test_reinforce_plus_plus_advantages_match_scalar_loop(gamma, seed):
    rewards, _, mask = token_rewards(seed, dense=seed != 1)
    to_go = [reward_to_go(row, gamma) for row in own_tokens(rewards, mask)]
    actual = gspo.reinforce_plus_plus_advantages(rewards, mask, gamma=gamma)
    assert_own_tokens(actual, mask, whitened_rows(to_go))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0, 0.0])
def test_reinforce_plus_plus_of_equal_returns_is_exactly_zero(value):
    """The same reward at the end of every completion: each token's return is that value, and the
    float32 mean of 300 of them need not be. One token alone: std of one number, still 0."""
    for lengths in ([5, 3, 1], [7] * 40, [1], [0, 0]):
        mask = positions(lengths, 8)
        rewards = torch.zeros(mask.shape)
        for row, length in enumerate(lengths):
            rewards[row, max(length - 1, 0)] = value
        actual = gspo.reinforce_plus_plus_advantages(rewards, mask)
        assert torch.equal(actual, torch.zeros(mask.shape))


def gae_loop(rewards, values, last, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k}; `last` is V after the last token."""
    after = [*values[1:], last]
    deltas = [r + gamma * nxt - v for r, v, nxt in zip(rewards, values, after)]
    return reward_to_go(deltas, gamma * lam)


@pytest.mark.parametrize("numbers", [{}, dict(gamma=0.9, lam=0.8), dict(gamma=0.95, lam=0.0)])
@pytest.mark.parametrize("truncated", [False, True])
def test_gae_matches_scalar_loop(numbers, truncated):
    """Over a completion's own tokens: what lies between two turns is skipped, not discounted."""
    rewards, values, mask = token_rewards(0)
    mask[0, 2] = mask[5, 1] = mask[5, 2] = False
    last, options = torch.zeros(len(mask)).double(), numbers
    if truncated:
        last = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
        options = dict(**numbers, bootstrap=last)
    advantages, returns = gspo.gae_advantages(rewards, values, mask, **options)
    gamma, lam = numbers.get("gamma", 1.0), numbers.get("lam", 0.95)
    rows = zip(own_tokens(rewards, mask), own_tokens(values, mask), last.tolist())
    wanted = [gae_loop(*row, gamma, lam) for row in rows]
    assert_own_tokens(advantages, mask, wanted)
    targets = [[a + v for a, v in zip(*row)] for row in zip(wanted, own_tokens(values, mask))]
    assert_own_tokens(returns, mask, targets)
    whitened, same = gspo.ppo_advantages(rewards, values, mask, **options)
    assert_own_tokens(whitened, mask, whitened_rows(wanted))
    assert torch.equal(same, returns)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long], ids=str)
def test_token_advantages_ignore_padding(junk, dtype):
    """Pitfall 13: what rewards and values hold behind the end token is nobody's."""
    rewards, values, mask = token_rewards(0)
    dirty_rewards, dirty_values = (x.masked_fill(~mask, junk) for x in (rewards, values))

    def outputs(rewards, values, mask):
        whitened = gspo.reinforce_plus_plus_advantages(rewards, mask)
        return *gspo.ppo_advantages(rewards, values, mask), whitened

    clean = outputs(rewards, values, mask)
    for got, wanted in zip(outputs(dirty_rewards, dirty_values, mask.to(dtype)), clean):
        assert torch.equal(got, wanted)
        assert torch.equal(got[~mask], torch.zeros_like(got[~mask]))


# ---- step advantages -----------------------------------------------------------------------------


def step_loop(rewards, steps, size):
    """Reward-to-go per step, z-scored over the group's k-th steps, spread over the tokens."""
    count, width = steps.shape
    marks, given = steps.tolist(), rewards.tolist()
    ends = [[t for t in range(width) if marks[i][t]] for i in range(count)]
    returns = [reward_to_go([given[i][t] for t in ends[i]], 1.0) for i in range(count)]
    out = torch.zeros(count, width, dtype=torch.float64)
    for i in range(count):
        first = i - i % size
        for k, end in enumerate(ends[i]):
            peers = [returns[j][k] for j in range(first, first + size) if len(returns[j]) > k]
            equal = max(peers) == min(peers)
            score = 0.0 if equal else (returns[i][k] - mean_of(peers)) / (std_of(peers) + 1e-6)
            start = ends[i][k - 1] + 1 if k else 0
            for t in range(start, end + 1):
                out[i, t] = score
    return out


def random_steps(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [9, 7, 0, 4, 9, 1, 8, 6, 5, 5, 5, 3]
    mask = positions(lengths, 9)
    steps = torch.rand(mask.shape, generator=generator) < 0.35
    steps[3] = False  # a completion that wrote no step
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    if seed % 2:
        rewards = (rewards > 0).double()
    return rewards, steps & mask


@pytest.mark.parametrize("size", [4, 6, 12])
def test_step_advantages_match_scalar_loop(size):
    for seed in range(6):
        rewards, steps = random_steps(seed)
        actual = gspo.step_advantages(rewards, steps, size)
        torch.testing.assert_close(actual, step_loop(rewards, steps, size), **EXACT)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -7.0])
def test_step_advantages_read_only_step_ends(junk):
    """Rewards anywhere but on a step's end token are ignored; steps may be zeros and ones."""
    rewards, steps = random_steps(0)
    dirty = torch.where(steps, rewards, torch.full_like(rewards, junk))
    actual = gspo.step_advantages(dirty, steps.long(), 4)
    assert torch.equal(actual, gspo.step_advantages(rewards, steps, 4))
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("seed", range(8))
def test_step_advantages_do_not_tell_equal_sums_apart_by_rounding(seed, monkeypatch):
    """A GPU adds up in float32, in an order that depends on positions: here a cumsum that adds
    pairwise. The same rewards in another order, at other tokens, are still a dead group."""
    cumsum = torch.Tensor.cumsum

    def pairwise(values, dim):
        if values.dtype not in (torch.float32, torch.float64):
            return cumsum(values, dim)
        reach = 1
        while reach < values.shape[dim]:  # a scan as a GPU does it
            values = values + torch.nn.functional.pad(values, (reach, 0))[:, : values.shape[1]]
            reach *= 2
        return values

    monkeypatch.setattr(torch.Tensor, "cumsum", pairwise)
    rng = random.Random(seed)
    steps, rewards = torch.zeros(8, 40, dtype=torch.bool), torch.zeros(8, 40)
    for i in range(8):
        places, parts = sorted(rng.sample(range(40), 6)), [0.1, 0.2, 0.3, 0.1, 0.2]
        rng.shuffle(parts)
        for place, part in zip(places, [*parts, 0.7]):
            steps[i, place], rewards[i, place] = True, part
    first = gspo.step_advantages(rewards, steps, 8)
    starts = [int(row.nonzero()[0]) for row in steps]
    assert all(float(first[i, start]) == 0 for i, start in enumerate(starts))


# ---- on-policy distillation ----------------------------------------------------------------------


@pytest.mark.parametrize("reward_coef", [0.0, 0.7])
def test_teacher_advantages_match_scalar_loop(reward_coef):
    """log pi_teacher - log pi_old of the sampled token; where rewards count, that much of r - mean
    of its group is added to each token of its completion."""
    batch = make_batch(0, 0.5)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.3, 0.3, 0.3, 0.9], dtype=torch.float64)
    teacher, old, mask = batch["ref"].requires_grad_(), batch["old_logprobs"], batch["mask"]
    advantages = functools.partial(gspo.teacher_advantages, rewards, 4, reward_coef=reward_coef)
    actual = advantages(teacher, old, mask)
    assert not actual.requires_grad
    rows = []
    for row, of_reward in zip(rows_of(batch), group_loop(rewards.tolist(), 4, "none")):
        gaps = [a - b for a, b in zip(row.ref, row.old_logprobs)]
        rows.append([gap + reward_coef * of_reward for gap in gaps])
    assert_own_tokens(actual, mask, rows)
    dirty = (filled(each, mask, math.nan) for each in (teacher, old))
    assert torch.equal(advantages(*dirty, mask.long()), actual)


def distilled(teacher, old, logits):
    """The expected gradient by the logits of opd's loss: token v, a completion of its own, counts
    with its probability under pi_old, which sampled it."""
    logits = logits.clone().requires_grad_()
    tokens, mask = torch.arange(5), torch.ones(5, 1, dtype=torch.bool)
    teacher, old = (each[:, None] for each in (teacher, old))
    advantages = gspo.teacher_advantages(torch.zeros(5).double(), 1, teacher, old, mask)
    total = 0.0
    for v in tokens:
        new = logits.log_softmax(0)[v].view(1, 1)
        loss, _ = gspo.importance_loss(new, old[v : v + 1], advantages[v : v + 1], mask[:1])
        total = total + old[v, 0].exp() * loss
    return torch.autograd.grad(total, logits)[0].tolist()


def test_distillation_has_the_gradient_of_the_reverse_kl_to_the_teacher():
    """E_pi[-(log teacher - log pi) grad log pi] = grad KL(pi || teacher)."""
    _, reverse, _ = exact_kl()
    assert distilled(REF, LOGITS.log_softmax(0), LOGITS) == pytest.approx(reverse, rel=1e-10)


def test_distillation_corrects_for_the_policy_that_sampled():
    """sum over v of pi_old r A grad log pi = that of pi: where pi has moved to the teacher, the
    advantages, which are of pi_old, still point from there: pi_j (A_j - mean of A under pi)."""
    old, new = LOGITS.log_softmax(0), REF
    pi, gaps = [math.exp(x) for x in new.tolist()], (REF - old).tolist()
    centre = math.fsum(p * gap for p, gap in zip(pi, gaps))
    wanted = [-p * (gap - centre) for p, gap in zip(pi, gaps)]
    assert distilled(REF, old, REF) == pytest.approx(wanted, rel=1e-10)


# ---- sampler and trainer apart -------------------------------------------------------------------


def sampler_ratios(row, per):
    gaps = [a - b for a, b in zip(row.logprobs, row.old_logprobs)]
    if per == "completion" and gaps:
        gaps = [mean_of(gaps)] * len(gaps)
    return [math.exp(gap) for gap in gaps]


CORRECTIONS = {  # name -> (function of (old, sampler, mask, per), what it makes of a ratio)
    "weights": (gspo.truncated_importance_weights, lambda ratio: min(ratio, 2.0)),
    "weights 1.1": (
        functools.partial(gspo.truncated_importance_weights, cap=1.1),
        lambda ratio: min(ratio, 1.1),
    ),
    "mask": (gspo.mismatch_mask, lambda ratio: 0.5 <= ratio <= 5.0),
    "mask 0.8 1.1": (
        functools.partial(gspo.mismatch_mask, low=0.8, high=1.1),
        lambda ratio: 0.8 <= ratio <= 1.1,
    ),
}


@pytest.mark.parametrize("per", ["token", "completion"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_of_the_sampler_match_scalar_loop(name, per):
    """Also with anything on the padding, and without a gradient."""
    function, rule = CORRECTIONS[name]
    found = set()
    for seed in range(3):
        batch = make_batch(seed, 1.5)
        old, sampler, mask = batch["logprobs"], batch["old_logprobs"], batch["mask"]
        rows = [[float(rule(x)) for x in sampler_ratios(row, per)] for row in rows_of(batch)]
        found |= {x for row in rows for x in row}
        for junk in GARBAGE.tolist():
            dirty = (filled(each, mask, junk).requires_grad_() for each in (old, sampler))
            actual = function(*dirty, mask.long(), per=per)
            assert not actual.requires_grad
            assert_own_tokens(actual.double(), mask, rows)
    assert len(found) > 1  # else any rule would do


@pytest.mark.parametrize("delta", [0.05, 0.5])
@pytest.mark.parametrize("advantages", ["row", "token"])
def test_off_policy_mask_matches_scalar_loop(delta, advantages):
    found = set()
    for seed in range(4):
        batch = make_batch(seed, 1.0, advantages)
        rows = []
        for row in rows_of(batch):
            far = bool(row.places) and -mean_log_ratio(row) > delta
            rows.append([not (far and advantage < 0) for advantage in row.advantages])
            found |= set(rows[-1])
        actual = gspo.off_policy_mask(*(batch[key] for key in POLICY_INPUTS), delta=delta)
        assert_own_tokens(actual.double(), batch["mask"], rows)
    assert found == {True, False}


# ---- the table of algorithms ---------------------------------------------------------------------

PAPERS = {
    # name: loss, advantages of rewards (1, 0, 0, 4) in groups of two, unit, where a KL goes
    "gspo": (gspo.gspo_loss, "group", "completion", "loss"),
    "gspo-token": (gspo.gspo_token_loss, "steps", "completion", "loss"),
    "luspo": (gspo.luspo_loss, "group", "completion", "loss"),
    "grpo": (gspo.grpo_loss, "group", "completion", "loss"),
    "dr-grpo": (gspo.dr_grpo_loss, "centred", "completion", "loss"),
    "dapo": (gspo.dapo_loss, "group", "token", "loss"),
    "ppo": (gspo.ppo_loss, "values", "token", "reward"),
    "cispo": (gspo.cispo_loss, "group", "token", "loss"),
    "dppo": (gspo.dppo_loss, "group", "token", "loss"),
    "sapo": (gspo.sapo_loss, "group", "completion", "loss"),
    "gmpo": (gspo.gmpo_loss, "group", "completion", "loss"),
    "rloo": (gspo.reinforce_loss, "leave one out", "token", "loss"),
    "maxrl": (gspo.reinforce_loss, "over the mean", "token", "loss"),
    "reinforce++": (gspo.ppo_loss, "tokens", "token", "reward"),
    "reinforce": (gspo.reinforce_loss, "batch mean", "token", "loss"),
    "opd": (gspo.importance_loss, "teacher", "token", "loss"),
}
KINDS = {
    "group": [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5],
    "centred": [0.5, -0.5, -2, 2],
    "over the mean": [1, -1, -1, 1],
    "leave one out": [1, -1, -4, 4],
    "batch mean": [-0.25, -1.25, -1.25, 2.75],
}
every_algorithm = pytest.mark.parametrize("name", gspo.ALGOS)


def test_algorithms_are_those_of_the_papers():
    assert set(gspo.ALGOS) == set(PAPERS)
    for name, row in gspo.ALGOS.items():
        loss, kind, unit, kl_in = PAPERS[name]
        assert row.loss is loss, name
        assert (row.unit, row.kl_in) == (unit, kl_in), name
        assert row.dynamic_sampling == row.overlong_shaping == (name == "dapo"), name
        assert row.kl_coef == (0.04 if name == "grpo" else 0.0), name
        if row.reads == "outcomes":
            values = row.advantages(torch.tensor([1.0, 0.0, 0.0, 4.0]), 2).tolist()
            assert values == pytest.approx(KINDS[kind], abs=1e-5), name
        else:
            assert row.reads == kind, name


@every_algorithm
def test_algorithm_names_the_unit_of_its_losses_mean(name):
    """Pitfall 2: the denominator that the trainer counts, by ALGOS[name].unit, must be the one that
    the loss divides by: with it the micro-batches add up to the batch."""
    row = gspo.ALGOS[name]
    budget = TENS if row.loss is gspo.dr_grpo_loss else {}
    rows = Case(name, row.loss.__name__, row.unit, None, options=budget)
    batch = make_batch(0, 0.5)
    denom = {"completion": len(LENGTHS), "token": sum(LENGTHS)}[row.unit]
    assert_same(accumulate(rows, batch, denom), evaluate(rows, batch))
