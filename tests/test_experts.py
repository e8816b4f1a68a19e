"""Mixtures of experts: what is replayed, with which weights, and how many changed their mind."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rollout
import train
from support.extras.experts import Experts, routing_now
from support.models import checkpoint_layers, has_experts
from support.ranks import Ranks
from tools import EXPERTS, SHAPE, fast, good, metrics, newest, random_policy, refused

LATENT = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MIXTURES = {
    "qwen3_moe": dict(num_experts=6),
    "qwen2_moe": dict(num_experts=6, shared_expert_intermediate_size=16),
    "mixtral": dict(num_local_experts=6, sliding_window=None),
    "olmoe": dict(num_experts=6, num_experts_per_tok=3),
    "gpt_oss": dict(num_local_experts=6),
    "granitemoe": dict(num_local_experts=6),
    # groups of experts are chosen first; the first layer is dense
    "deepseek_v3": dict(
        num_hidden_layers=3,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **LATENT,
    ),
}
ROWS = torch.tensor([4, 0, 2])


def opinionated_mixture(kind, **shape):
    """Two layers of experts; weights so large that texts differ in them, and no two are tied."""
    torch.manual_seed(0)
    shape = dict(num_experts_per_tok=2, num_hidden_layers=2, head_dim=8) | MIXTURES[kind] | shape
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=18,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **shape,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    move(model, 0.3)
    return model


def move(model, much=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += much * torch.randn_like(parameter)


def completions(model):
    prompts, uniforms = [[3, 4], [5, 6, 7]], torch.rand(2, 3, 8)
    return fast.generate(model, prompts, uniforms, eos_ids=[1], pad_id=0)[ROWS]


def scored(model, samples, experts=None):
    if experts is None:
        return fast.completion_logprobs(model, samples, temperature=1.0)[0]
    with experts.over(torch.arange(len(samples.lengths))):
        return fast.completion_logprobs(model, samples, temperature=1.0)[0]


def run_of(model):
    """As much of a run as is read to measure flips."""
    return SimpleNamespace(
        policy=model,
        predicting=fast.predicting,
        logprobs=partial(scored, experts=None),
        ranks=Ranks(),
    )


def module_of(model, ending):
    return next(each for each in model.modules() if type(each).__name__.endswith(ending))


# ------------------------------------------------------------------------------ one model


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_replayed_mixture_takes_the_experts_of_before(kind):
    """Watching changes nothing, nor does a replay before the weights move. Afterwards a replay is
    not a free pass, and every layer takes the experts of before."""
    model = opinionated_mixture(kind)
    samples = completions(model)
    plain = scored(model, samples)
    experts = Experts(replays=True)
    assert torch.equal(scored(model, samples, experts), plain)
    assert torch.equal(scored(model, samples, experts), plain)

    taken = []
    module = module_of(model, "Experts")
    spy = module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[1]))
    free = scored(model, samples, experts)
    move(model)
    replayed = scored(model, samples, experts)
    assert (scored(model, samples) - replayed).abs().max() > 1e-2
    assert not torch.equal(free, replayed)
    spy.remove()
    before, after, now = taken
    assert torch.equal(before, after) and not torch.equal(before, now)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_replayed_experts_are_weighed_by_the_router_of_now(kind):
    """Against a scalar reading of what the block should do: softmax over all experts of today's
    router, those of before chosen, renormalised where the model does; and its gradient flows."""
    model = opinionated_mixture(kind, num_hidden_layers=1)
    samples, experts = completions(model), Experts(replays=True)
    scored(model, samples, experts)
    router, module = module_of(model, "TopKRouter"), module_of(model, "Experts")
    with torch.no_grad():
        router.weight += 0.3 * torch.randn_like(router.weight)
    given, taken = [], []
    router.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs))
    scored(model, samples, experts).sum().backward()

    [hidden], [(_, chosen, found)] = given, taken
    scores = hidden.reshape(-1, 16) @ router.weight.T
    expected = []
    for row, picks in zip(scores.tolist(), chosen.tolist(), strict=True):
        exps = [math.exp(x - max(row)) for x in row]
        picked = [exps[pick] / sum(exps) for pick in picks]
        total = sum(picked) if getattr(router, "norm_topk_prob", True) else 1.0
        expected.append([weight / total for weight in picked])
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_flips_are_a_count_of_sets(kind):
    """In python, of what the layers of experts were given before and after the weights moved, at
    the tokens before those of the completions; the choices of groups of experts are none."""
    model = opinionated_mixture(kind)
    samples, experts, taken = completions(model), Experts(replays=False), []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[1].tolist()))
    scored(model, samples, experts)
    move(model)
    found = experts.measure_flips(run_of(model), samples)["expert_flips"]
    pairs = []
    for before, after in zip(taken[:2], taken[2:], strict=True):
        pairs += [(before[i], after[i]) for i in fast.predicting(samples).tolist()]
    changed = sum(set(before) != set(after) for before, after in pairs)
    assert 0 < found == changed / len(pairs) < 1


def test_what_is_not_replayed_is_a_free_pass():
    model = opinionated_mixture("qwen3_moe")
    samples, experts = completions(model), Experts(replays=False)
    scored(model, samples, experts)
    move(model)
    assert torch.equal(scored(model, samples, experts), scored(model, samples))


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_recomputed_layers_take_the_same_experts(kind, replays):
    """With gradient checkpointing the backward pass chooses again: the same gradients."""
    model = opinionated_mixture(kind)
    samples, experts = completions(model), Experts(replays)
    scored(model, samples, experts)
    move(model)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model, [fast.attention_now, routing_now])
            model.train()
        model.zero_grad()
        scored(model, samples, experts).sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    plain, recomputed = gradients
    assert plain["model.layers.1.mlp.gate.weight"].abs().sum() > 0
    torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------ runs

MOE = "--model models/moe --reward pay.py:even --algo grpo --kl-coef 0 --lr 1e-2"


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("flags", ["", "--routing-replay", "--lora-rank 2 --routing-replay"])
def test_expert_flips_are_told_with_evaluations(flags, tmp_path):
    """A share; it costs a pass over the batch."""
    rows = metrics(good(tmp_path, f"{MOE} --steps 4 --eval-every 2 {flags}").folder)
    assert ["expert_flips" in row for row in rows] == [False, True, False, True]
    assert 0 < rows[1]["expert_flips"] < 1


@pytest.mark.usefixtures("place")
def test_no_flips_while_nothing_moves(tmp_path):
    """A learning rate that no weight can feel."""
    rows = metrics(good(tmp_path, f"{MOE} --lr 1e-30 --eval-every 1").folder)
    assert [row["expert_flips"] for row in rows] == [0, 0] and rows[1]["grad_norm"] > 0


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("flags", ["", "--gradient-checkpointing"])
def test_every_update_takes_the_experts_of_pi_old(flags, monkeypatch, tmp_path):
    """Two epochs of several updates: for the same rows, in each pass with gradients, the same."""
    taken, module = {}, transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    forward, logprobs, rows_read = module.forward, train.Run.logprobs, []

    def keep(self, hidden, experts, weights):
        if rows_read:
            taken.setdefault(rows_read[-1], []).append(experts.tolist())
        return forward(self, hidden, experts, weights)

    def watched(run, model, samples):
        rows_read.append(str(samples.tokens.tolist()))
        return logprobs(run, model, samples)

    monkeypatch.setattr(module, "forward", keep)
    monkeypatch.setattr(train.Run, "logprobs", watched)
    good(tmp_path, f"{MOE} --routing-replay --epochs 2 --steps 1 --eval-every 9 {flags}")
    assert len(taken) == 4
    for layers in taken.values():
        # of pi_old and two epochs, two layers each; then expert_flips chooses freely
        first, second = layers[:2]
        passes = layers[: 2 * 3 if not flags else 2 * 5]
        for choice in passes:
            assert choice in (first, second)
    assert any(layers[-1] != layers[1] for layers in taken.values())


@pytest.mark.usefixtures("place")
def test_checkpointing_changes_neither_flips_nor_weights(tmp_path):
    flips, weights = [], []
    for more in ("", "--gradient-checkpointing"):
        flags = f"{MOE} --steps 2 --eval-every 1 --routing-replay {more}"
        folder = good(tmp_path / f"run{more}", flags).folder
        flips.append([row["expert_flips"] for row in metrics(folder)])
        weights.append(load_file(newest(folder) / "model.safetensors"))
    assert flips[0] == pytest.approx(flips[1]) and max(flips[0]) > 0
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("place")
def test_a_dense_model_with_the_config_of_a_mixture(tmp_path):
    """It has nothing to tell, and nothing to replay."""
    config = transformers.Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[0, 1])
    assert has_experts(config) and not has_experts(transformers.Qwen3Config(**SHAPE))
    folder = random_policy(tmp_path / "moe", config)
    flags = f"--model {folder} --reward pay.py:even --steps 1"
    assert "expert_flips" not in metrics(good(tmp_path, flags).folder)[0]
    sentence = refused(tmp_path / "other", f"{flags} --routing-replay")
    assert "--routing-replay: no router" in sentence


@pytest.mark.usefixtures("place")
def test_where_the_sampler_tells_old_logprobs_nobody_watched_pi_old(tmp_path):
    flags = f"{MOE} --old-logprobs sampler --steps 1"
    assert "expert_flips" not in metrics(good(tmp_path / "free", flags).folder)[0]
    sentence = refused(tmp_path / "replayed", f"{flags} --routing-replay")
    assert "--routing-replay" in sentence and "--old-logprobs trainer" in sentence


@pytest.mark.parametrize("plain", [False, True])
def test_flips_are_those_of_each_completion_alone(plain, monkeypatch):
    """What texts have in common is read once, or padded: a completion's tokens count as if it had
    been scored by itself."""
    if plain:
        for name in ("completion_logprobs", "predicting"):
            monkeypatch.setattr(fast, name, getattr(rollout, name))
    model = opinionated_mixture("qwen3_moe")
    samples, together = completions(model), Experts(replays=False)
    scored(model, samples, together)
    alone = {row: Experts(replays=False) for row in range(3)}
    for row, experts in alone.items():
        with experts.over(torch.tensor([row])):
            scored(model, samples[[row]])
    move(model)
    run, lengths = run_of(model), samples.lengths.tolist()
    shares = [one.measure_flips(run, samples)["expert_flips"] for one in alone.values()]
    changed = sum(share * length for share, length in zip(shares, lengths))
    found = together.measure_flips(run, samples)["expert_flips"]
    assert found == pytest.approx(changed / sum(lengths)) and 0 < found < 1
