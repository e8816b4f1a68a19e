"""LoRA: the adapter, its layers, merging, checkpoints, resuming."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from bench_architectures import build
from support.errors import UserError
from support.models import refresh
from tools import BASE, SHAPE, good, metrics, newest, random_policy, refused

lora = pytest.importorskip("support.extras.lora")
pytestmark = pytest.mark.usefixtures("place")
LORA = f"{BASE} --lora-rank 4 --lr 1e-2"


def with_adapters(model, dtype=torch.float32, rank=4, seed=0):
    """Return a copy of the model with adapters that do not change it yet."""
    policy = copy.deepcopy(model)
    config = SimpleNamespace(lora_rank=rank, lora_alpha=2.0 * rank, seed=seed)
    lora.add_adapters(policy, config, dtype)
    return policy


def adapted(model, dtype=torch.float32):
    """Return a copy of the model with adapters whose B is not 0."""
    policy = with_adapters(model, dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 17)[None], use_cache=False).logits


# two multiply by weights themselves, a router returns more, a hybrid
ODD = ["mamba", "deepseek_v32", "llama4_text", "qwen3_5_text"]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", *ODD])
def test_the_adapter_is_what_is_merged(kind):
    """Training starts at the plain model, bit by bit."""
    model = build(kind)
    assert torch.equal(logits(with_adapters(model)), logits(model))

    policy = adapted(model)
    assert policy.state_dict().keys() == model.state_dict().keys()
    merged = copy.deepcopy(model)
    refresh(merged, policy)
    torch.testing.assert_close(logits(policy), logits(merged), atol=1e-4, rtol=1e-4)
    assert (logits(policy) - logits(model)).abs().max() > 0.05
    policy(torch.arange(3, 17)[None], use_cache=False).logits.square().sum().backward()
    trained = {name for name, each in policy.named_parameters() if each.grad is not None}
    assert trained and all("lora_" in name and "head" not in name for name in trained)


def test_a_starts_as_torch_initialises_a_linear_layer_and_b_at_zero():
    """Uniform in +-1/sqrt(in). The seed decides, and no layer repeats another one's numbers."""
    layers = nn.Sequential(nn.Linear(400, 300), nn.Linear(400, 300))
    layers.get_output_embeddings = lambda: None
    layers.config = SimpleNamespace(model_type="two layers")
    same, again, other = (with_adapters(layers, rank=50, seed=seed) for seed in (0, 0, 1))
    a = same[0].lora_A.detach()  # 20,000 numbers
    assert 0.049 < a.max() <= 0.05 and -0.05 <= a.min() < -0.049 and abs(a.mean()) < 1e-3
    assert torch.equal(a, again[0].lora_A) and not same[0].lora_B.any()
    assert not torch.equal(a, other[0].lora_A) and not torch.equal(a, same[1].lora_A)


@pytest.mark.parametrize("kind, words", [("gpt2", "no nn.Linear"), ("zamba", "share weights")])
def test_models_whose_layers_cannot_be_adapted_are_refused(kind, words):
    with pytest.raises(UserError, match=f"--lora-rank: .*{kind} .*{words}"):
        adapted(build(kind))


def test_biases_and_bfloat16_outside_autocast(tmp_path):
    """With --stale-steps the evaluation samples the policy itself. Qwen2's layers have biases."""
    fields = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    base = random_policy(tmp_path / "qwen2", transformers.Qwen2Config(**fields))
    flags = f"{LORA} --model {base} --dtype bfloat16 --stale-steps 2 --eval-every 1"
    assert "eval_solved" in metrics(good(tmp_path, flags).folder)[-1]


def test_a_resumed_run_keeps_its_base_and_its_adapter(tmp_path, seen):
    """Other weights in --model are another model. A checkpoint holds the merged one."""
    base = random_policy(tmp_path / "base", transformers.Qwen3Config(**SHAPE))
    good(tmp_path, f"{LORA} --model {base} --steps 1")
    resume = "--resume --name run --steps 2"
    for flag in ("--lora-rank 8", "--lora-alpha 3"):
        assert flag.split()[0] in refused(tmp_path, f"{resume} {flag}", small=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        other = copy.deepcopy(model)
        other.get_parameter(name).data.flatten()[0] += 0.1
        other.save_pretrained(base)
        sentence = refused(tmp_path, resume, small=False)
        assert name in sentence and "--model" in sentence
    model.save_pretrained(base)
    folder = newest(good(tmp_path, resume, small=False).folder)
    saved, policy = AutoModelForCausalLM.from_pretrained(folder), seen.run.models.policy
    torch.testing.assert_close(logits(saved), logits(policy), atol=1e-4, rtol=1e-4)
    assert (logits(saved) - logits(model)).abs().max() > 1e-3
