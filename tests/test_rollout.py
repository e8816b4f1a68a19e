"""Sampling and scoring, compared with transformers' own forward and `generate`."""

import os
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import rollout as R  # noqa: E402

TINY = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {
    "qwen3": dict(head_dim=8),
    "llama": {},
    "qwen2": {},
    "mistral": dict(sliding_window=6),
    "gemma2": dict(head_dim=8, sliding_window=6, attn_logit_softcapping=5.0),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "qwen3_moe": dict(
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17], [18, 19, 20, 21, 22]]


def tiny(kind, seed=0, **extra):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**TINY, **CONFIGS[kind], **extra})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # default initialisation gives nearly flat logits
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def greedy(model, prompt, steps, eos):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=steps,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_is_generates(kind):
    model = tiny(kind)
    out = R.generate(
        model, PROMPTS, group_size=1, max_new_tokens=16, temperature=0, eos_ids=[2, 3], pad_id=2
    )
    for i, prompt in enumerate(PROMPTS):
        ours = out.completions[i, : out.lengths[i]].tolist()
        assert ours == greedy(model, prompt, 16, [2, 3])


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_are_the_samplers_and_the_same_bits_without_gradients(kind):
    model = tiny(kind)
    seed = torch.Generator().manual_seed(0)
    out = R.generate(
        model, PROMPTS, group_size=3, max_new_tokens=16, eos_ids=[2], pad_id=2, generator=seed
    )
    scored, entropy = R.completion_logprobs(model, out, temperature=1.0)
    assert scored.requires_grad
    torch.testing.assert_close(scored.detach(), out.sampler_logprobs, atol=2e-5, rtol=0)
    with torch.no_grad():
        again, entropy_again = R.completion_logprobs(model, out, temperature=1.0)
    assert torch.equal(scored, again) and torch.equal(entropy, entropy_again)
    assert (scored[~out.completion_mask] == 0).all()


def test_the_end_token_stays_in_the_mask_when_it_is_the_pad_token():
    model = tiny("qwen3")
    out = R.generate(model, PROMPTS, group_size=8, max_new_tokens=40, eos_ids=[2], pad_id=2)
    ends = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert (~out.truncated).any()
    assert torch.equal(ends == 2, ~out.truncated)
    assert out.completion_mask.gather(1, out.lengths[:, None] - 1).all()
