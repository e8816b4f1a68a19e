"""Mixtures of experts: replayed choices, their weights, and the fraction of choices that change."""

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest
import torch
import transformers

import rollout
import train
from bench_architectures import build
from support.models import has_experts
from support.prefix_trees import grow, in_order
from support.ranks import Ranks
from tools import EXPERTS, SHAPE, distance, good, metrics, newest, random_policy, refused

Experts = pytest.importorskip("support.extras.experts").Experts
pytestmark = pytest.mark.usefixtures("place")

MIXTURES = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    # groups of experts are chosen first, and the first layer is dense
    "deepseek_v3": dict(num_hidden_layers=3, n_routed_experts=8, n_group=4, topk_group=2),
}
ROWS = torch.tensor([4, 0, 2])


def mixture(kind="qwen3_moe", **options):
    """Return two layers of experts, with weights so large that texts differ in their experts."""
    model = build(kind, **MIXTURES[kind] | options)
    move(model, 0.3)
    return model


def move(model, much=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += much * torch.randn_like(parameter)


def completions(model):
    prompts, uniforms = [[3, 4], [5, 6, 7]], torch.rand(2, 3, 8)
    return rollout.generate(model, prompts, uniforms, eos_ids=[1], pad_id=0).select(ROWS)


def part_of(model, samples):
    """Return a micro-batch of the samples, as trees where the model may get these."""
    rows = torch.arange(len(samples.lengths))
    if not rollout.shares_prefixes(model):
        return rollout.MicroBatch(rows, samples, None)
    trees = grow(in_order(samples.sequences()), width=samples.tokens.shape[1])
    return rollout.micro_batch_of_trees(samples, rows, trees)


def run_of(model, experts):
    models = SimpleNamespace(policy=model, routing=experts)
    config = SimpleNamespace(temperature=1.0)
    return SimpleNamespace(models=models, config=config, autocast=contextlib.nullcontext)


def scored(model, part, experts=None):
    return train.logprobs_of(run_of(model, experts), model, part)[0]


def flips(model, experts) -> float:
    score = functools.partial(train.logprobs_of, run_of(model, experts), model)
    return experts.measure_flips(score, Ranks())["expert_flips"]


def module_of(model, ending):
    return next(each for each in model.modules() if type(each).__name__.endswith(ending))


@contextlib.contextmanager
def choices(model):
    """Keep the experts (tokens, k) that the layers of the model take in the block, in order."""
    taken, hooks = [], []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            keep = module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[1]))
            hooks.append(keep)
    yield taken
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_replayed_mixture_takes_the_experts_of_before(kind):
    """Before the weights move, that changes nothing. Afterwards the weights of now still count."""
    model = mixture(kind)
    part = part_of(model, completions(model))
    plain = scored(model, part)
    experts = Experts(replays=True)
    assert torch.equal(scored(model, part, experts), plain)
    with choices(model) as before:
        free = scored(model, part, experts)
    assert torch.equal(free, plain)
    move(model)
    with choices(model) as after:
        replayed = scored(model, part, experts)
    with choices(model) as now:
        assert (scored(model, part) - replayed).abs().max() > 1e-2
    assert not torch.equal(free, replayed)
    assert all(map(torch.equal, before, after)) and not any(map(torch.equal, before, now))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_replayed_experts_are_weighed_by_the_router_of_now(kind):
    """Against a scalar loop: softmax, the experts of before, renormalised where the model does."""
    model = mixture(kind, num_hidden_layers=1)
    part, experts = part_of(model, completions(model)), Experts(replays=True)
    scored(model, part, experts)
    router, module = module_of(model, "TopKRouter"), module_of(model, "Experts")
    with torch.no_grad():
        router.weight += 0.3 * torch.randn_like(router.weight)
    given, taken = [], []
    router.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs))
    scored(model, part, experts).sum().backward()

    [hidden], [(_, chosen, found)] = given, taken
    scores = hidden.flatten(0, -2) @ router.weight.T
    expected = []
    for row, picks in zip(scores.tolist(), chosen.tolist(), strict=True):
        exps = [math.exp(x - max(row)) for x in row]
        picked = [exps[pick] / sum(exps) for pick in picks]
        total = sum(picked) if getattr(router, "norm_topk_prob", True) else 1.0
        expected.append([weight / total for weight in picked])
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_flips_are_a_count_of_sets(kind):
    """In python, at the tokens before those of completions, without choices of groups."""
    model, experts = mixture(kind), Experts(replays=False)
    part = part_of(model, completions(model))
    with choices(model) as before:
        scored(model, part, experts)
    move(model)
    with choices(model) as after:
        found = flips(model, experts)
    changed = []
    for old, new in zip(before, after, strict=True):
        for token in rollout.predicting(part.rollout, part.trees):
            changed.append(set(old[token].tolist()) != set(new[token].tolist()))
    assert 0 < found == sum(changed) / len(changed) < 1
    assert torch.equal(scored(model, part, experts), scored(model, part))


MOE = "--model models/moe --reward pay.py:even --algo grpo --kl-coef 0 --lr 1e-2"


def test_every_update_takes_the_experts_of_pi_old(monkeypatch, tmp_path):
    """In every pass with gradients. Checkpointing changes neither weights nor flips."""
    taken, logprobs = {}, train.logprobs_of

    def watched(run, model, part, entropy="none"):
        with choices(model) as chosen:
            found = logprobs(run, model, part, entropy)
        passes = taken.setdefault(str(part.rollout.tokens.tolist()), [])
        passes.append([layer.tolist() for layer in chosen])
        return found

    flags = f"{MOE} --routing-replay --epochs 2 --eval-every 2"
    checkpointed = good(tmp_path / "checkpointed", f"{flags} --gradient-checkpointing").folder
    monkeypatch.setattr(train, "logprobs_of", watched)
    plain = good(tmp_path / "plain", flags).folder
    assert len(taken) == 8
    for of_old, first, second, *_ in taken.values():
        assert of_old == first == second
    # the last, for expert_flips, chooses freely
    assert any(passes[-1] != passes[0] for passes in taken.values())
    flips = [row.get("expert_flips") for row in metrics(plain)]
    assert flips[0] is None and 0 < flips[1] < 1
    assert metrics(checkpointed)[1]["expert_flips"] == pytest.approx(flips[1])
    assert distance(newest(plain), newest(checkpointed)) < 1e-5


def test_where_no_router_is_recorded_nothing_is_measured_or_replayed(tmp_path):
    """A dense model with the config of a mixture, and pi_old's log-probs of the sampler."""
    config = transformers.Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[0, 1])
    assert has_experts(config) and not has_experts(transformers.Qwen3Config(**SHAPE))
    dense = random_policy(tmp_path / "dense", config)
    flags = f"{MOE} --model {dense} --steps 1"
    assert "expert_flips" not in metrics(good(tmp_path / "dense runs", flags).folder)[0]
    sentence = refused(tmp_path / "replayed", f"{flags} --routing-replay")
    assert "--routing-replay: no router" in sentence
    sentence = refused(tmp_path, f"{MOE} --old-logprobs sampler --routing-replay")
    assert "--routing-replay" in sentence and "--old-logprobs trainer" in sentence
