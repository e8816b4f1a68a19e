"""Sampling and scoring against transformers' own forward and `generate`, on tiny random models."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.insert(0, str(Path(__file__).parent.parent))

import rollout as R  # noqa: E402
from bench_architectures import EXTRA, build, examine  # noqa: E402

transformers.logging.set_verbosity_error()

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
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
HYBRID = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
CONFIGS = {
    "qwen3": dict(head_dim=8),
    "llama": {},
    "qwen2": {},
    "mistral": dict(sliding_window=6),
    "gemma": dict(head_dim=8),
    "gemma2": dict(head_dim=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0, **HYBRID),
    "gemma3_text": dict(head_dim=8, **HYBRID),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "qwen3_moe": dict(head_dim=8, **EXPERTS),
    "gpt_neox": {},
    "phi3": {},
    "phi": {},
    "olmo2": {},
    "olmo3": HYBRID,
    "olmoe": EXPERTS,
    "qwen2_moe": dict(shared_expert_intermediate_size=32, **EXPERTS),
    "mixtral": dict(num_local_experts=4, sliding_window=None),
    "falcon": dict(multi_query=True),
    "deepseek_v3": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gpt_oss": dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "cohere": dict(logit_scale=0.25),
    "cohere2": dict(head_dim=8, **HYBRID),
    "granite": dict(logits_scaling=3.0),
    "starcoder2": dict(sliding_window=6),
    "smollm3": {},
    "glm4": dict(head_dim=8),
    "exaone4": HYBRID,
    "gpt_bigcode": dict(n_embd=32, n_layer=2, n_head=4),
    "bloom": dict(n_layer=2, n_head=4),
    "mamba": dict(state_size=4),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
}
WITHOUT_SLOTS = {"falcon", "bloom", "mamba"}
EAGER = R.PACE["cpu"]
ALONE = EAGER._replace(shares=False)  # a slot for every sample, as on a GPU
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17], [18, 19, 20, 21, 22]]


def tiny(kind="qwen3", seed=0, attention="eager", **extra):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**TINY, **CONFIGS[kind], **extra})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():  # as initialised, logits are nearly flat
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def sampled(model, prompts=PROMPTS, seed=0, **options):
    options = dict(group_size=3, max_new_tokens=16, eos_ids=[2], pad_id=2) | options
    return R.generate(model, prompts, generator=torch.Generator().manual_seed(seed), **options)


def own_logprobs(model, out, temperature=1.0):
    """Log-probs and entropies of each row from a forward of its own, without any padding."""
    for row, n, length in zip(out.tokens, out.prompt_lengths, out.lengths):
        ids = row[out.prompt_width - n : out.prompt_width + length][None]
        logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        logp = (logits[n - 1 : -1].float() / temperature).log_softmax(-1)
        yield logp.gather(1, ids[0, n:, None])[:, 0], -(logp.exp() * logp).sum(-1)


# ---- parity with transformers


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_completions_are_those_of_transformers_generate(kind):
    """Mixed prompt lengths, two end tokens, fewer slots than rows, group members alike."""
    model = tiny(kind)
    out = sampled(model, group_size=2, temperature=0, eos_ids=[2, 3], max_slots=3)
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        ends = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=[2, 3],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for row in (2 * i, 2 * i + 1):
            assert out.completions[row, : out.lengths[row]].tolist() == ends
            assert out.truncated[row] == (ends[-1] not in (2, 3))


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_are_the_models_own_in_value_and_gradient(kind):
    """Packed prompts and completions against a forward for each row; the sampler's against both;
    the same bits with and without gradients."""
    model = tiny(kind)
    assert R.takes_our_attention(model) == (kind not in WITHOUT_SLOTS)
    out = sampled(model, temperature=0.7)
    scored, entropy = R.completion_logprobs(model, out, temperature=0.7)
    assert scored.dtype == entropy.dtype == torch.float32 and scored.shape == out.completions.shape
    torch.testing.assert_close(scored.detach(), out.sampler_logprobs, atol=2e-5, rtol=0)
    assert not scored[~out.completion_mask].any() and not entropy[~out.completion_mask].any()
    with torch.no_grad():
        assert all(
            map(torch.equal, R.completion_logprobs(model, out, temperature=0.7), (scored, entropy))
        )

    weights = torch.linspace(0.5, 1.5, scored.numel()).view_as(scored)
    (weights * (scored + 0.3 * entropy)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for i, (logprobs, entropies) in enumerate(own_logprobs(model, out, 0.7)):
        torch.testing.assert_close(scored[i, : len(logprobs)], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[i, : len(logprobs)], entropies, atol=1e-5, rtol=0)
        (weights[i, : len(logprobs)] * (logprobs + 0.3 * entropies)).sum().backward()
    own = [p.grad for p in model.parameters() if p.grad is not None]
    scale = max(g.abs().max() for g in own)
    assert len(own) == len(gradients)
    assert max((a - b).abs().max() for a, b in zip(own, gradients)) < 1e-5 * scale


def test_encoder_decoders_are_refused_in_one_sentence():
    config = AutoConfig.for_model("t5", d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=9)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ValueError, match="t5 is an encoder-decoder"):
        R.generate(model, [[1]], group_size=1, max_new_tokens=1, eos_ids=[0], pad_id=0)


def test_a_model_with_two_attentions_in_a_layer_is_refused(monkeypatch):
    """diffllama says that it takes any attention, and calls it twice for each layer."""
    monkeypatch.delitem(R.NOT_OURS, "diffllama")
    with pytest.raises(ValueError, match="expected one attention a layer"):
        sampled(build("diffllama"))


OURS, THEIRS = "ours, packed; checkpointed", "`generate`, padded; checkpointed"


@pytest.mark.parametrize(
    "kind, path",
    [
        # heads that are more than a linear map
        ("cohere", OURS),
        ("granite", OURS),
        ("gemma2", OURS),
        ("modernbert-decoder", OURS),
        ("falcon_h1", THEIRS),
        ("recurrent_gemma", THEIRS),
        # layers that call dropout by their own mode, a body within the body
        ("opt", OURS),
        ("xglm", THEIRS),
        ("biogpt", THEIRS),
        ("gpt2", OURS),
        # composite models
        ("gemma3", OURS),
        ("llama4", OURS),
        ("llama4_text", OURS),
        # attention in words of their own
        ("afmoe", OURS),
        ("doge", THEIRS),
        ("diffllama", THEIRS),
        # states
        ("mamba", THEIRS),
        ("qwen3_next", THEIRS),
        ("lfm2", THEIRS),
    ],
)
def test_architectures_are_sampled_and_scored_as_their_own_forward_pass_does(kind, path):
    """Sampler, scorer and whole model to 1e-3; with gradient checkpointing in training mode the
    first log-probs are those without gradients, in every bit, and the backward pass runs."""
    assert examine(kind) == ("right", path)


@pytest.mark.parametrize("kind", ["roberta", "rwkv"])
def test_a_model_that_we_would_read_otherwise_is_refused(kind):
    with pytest.raises(R.UserError, match=f"{kind}: log-probs of our sampler are up to"):
        R.check_scorer(build(kind), PROMPTS[:2], pad_id=0)


def test_a_scorer_that_errs_is_found(monkeypatch):
    """A head that forgets its cap."""
    model = tiny("gemma2")
    R.check_scorer(model, PROMPTS[:2], pad_id=0)
    logits = R.Head.logits
    monkeypatch.setattr(R.Head, "logits", lambda self, hidden: 1.01 * logits(self, hidden))
    with pytest.raises(R.UserError, match="gemma2: log-probs of our scorer are up to"):
        R.check_scorer(model, PROMPTS[:2], pad_id=0)


# ---- the draw


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_frequencies_and_logprobs_are_those_of_the_distribution(temperature):
    """χ² of 20,000 draws over 7 tokens: the right distribution stays below 28 in 99.99%."""
    logits = torch.randn(1, 7, generator=torch.Generator().manual_seed(3)) * 2
    uniform = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(11))
    token, logprobs = R.sample(logits.expand(20_000, -1), uniform, temperature)
    probs = (logits / temperature).softmax(-1)[0]
    torch.testing.assert_close(logprobs, probs[token].log(), atol=1e-5, rtol=0)
    counts = token.bincount(minlength=7)
    assert not counts[probs == 0].any()
    expected = 20_000 * probs[probs > 0]
    assert ((counts[probs > 0] - expected) ** 2 / expected).sum() < 28


def test_sampled_frequencies_are_the_scored_probabilities_at_temperature_0_7():
    """5 tokens, no end: 4,000 first tokens against the exp of what the scorer says of them."""
    model = tiny(vocab_size=5, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    out = sampled(
        model, [[1, 2, 3]], group_size=4000, max_new_tokens=1, temperature=0.7, eos_ids=[]
    )
    with torch.no_grad():
        scored, _ = R.completion_logprobs(model, out, temperature=0.7)
    counts = out.completions[:, 0].bincount(minlength=5)
    probs = torch.stack([scored[out.completions == token][0].exp() for token in range(5)])
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    assert ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum() < 23.5  # 99.99%, 4 degrees


def test_a_draw_is_the_inverse_of_the_distribution_function():
    """On a grid of uniforms a token gets its share of the square, to the grid's resolution: blocks
    of 256 of a vocabulary of 700, its last block padded."""
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0)) * 3
    grid = (torch.arange(300) + 0.5) / 300
    uniform = torch.cartesian_prod(grid, grid)
    token, logprobs = R.sample(logits.expand(len(uniform), -1), uniform)
    probs = logits.softmax(-1)[0]
    shares = token.bincount(minlength=700) / len(uniform)
    assert (shares - probs).abs().max() < 1 / 100
    torch.testing.assert_close(logprobs, probs[token].log(), atol=1e-5, rtol=0)


def test_the_first_and_the_last_uniform_draw_tokens_that_can_be():
    """Tokens of probability 0 at both ends of blocks and of the vocabulary are never drawn."""
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 255, 256, 599]] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits[0, 599] = -torch.inf
    ends = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    token, logprobs = R.sample(logits.expand(9, -1), torch.cartesian_prod(ends, ends))
    assert set(token.tolist()) <= {3, 255, 256} and logprobs.isfinite().all()


def test_a_uniform_of_zero_draws_no_impossible_token(monkeypatch):
    """torch.rand is 0 once in 2^24 draws; token 0 stands first, with a probability of e^-60."""
    model = tiny("phi")
    model.lm_head.bias.data[0] -= 60
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.zeros(shape))
    out = sampled(model)
    assert 0 not in out.completions and out.sampler_logprobs.min() > -20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    model = tiny("phi")
    model.lm_head.bias.data[7] = value
    with pytest.raises(R.UserError, match="phi: the model's logits are not finite"):
        sampled(model, temperature=temperature)


def test_a_logit_of_minus_infinity_is_a_token_that_never_comes():
    """A padded vocabulary: entropies and gradients are those of the model without these tokens."""
    model = tiny("phi")
    out = sampled(model, [[5, 6, 7]], eos_ids=[])
    results = []
    for shift in (-200.0, -math.inf):
        model.lm_head.bias.data[30:] = shift
        model.zero_grad()
        out = sampled(model, [[5, 6, 7]], eos_ids=[]) if shift == -200.0 else out
        logprobs, entropy = R.completion_logprobs(model, out, temperature=1.0)
        (logprobs.sum() + entropy.sum()).backward()
        results.append([logprobs.detach(), entropy.detach(), model.lm_head.weight.grad.clone()])
    assert results[1][1].min() > 0 and out.completions.max() < 30
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_greedy_records_logprobs_at_temperature_1():
    model = tiny()
    out = sampled(model, temperature=0)
    with torch.no_grad():
        scored, _ = R.completion_logprobs(model, out, temperature=1.0)
    torch.testing.assert_close(scored, out.sampler_logprobs, atol=2e-5, rtol=0)


# ---- slots


@pytest.mark.parametrize(
    "kind, group_size, few",
    [
        ("qwen3", 25, dict(max_slots=1)),
        ("qwen3", 25, dict(max_slots=7)),
        ("qwen3", 25, dict(cache_gb=2e-5)),
        ("gemma2", 5, dict(max_slots=7)),
        ("falcon", 5, dict(max_slots=7)),
    ],
)
def test_completions_do_not_depend_on_the_number_of_slots(kind, group_size, few):
    """99% of them: float32 sums in another order may move a draw over a border."""
    model = tiny(kind)
    whole, other = [
        sampled(model, group_size=group_size, max_new_tokens=12, **options) for options in ({}, few)
    ]
    same = [
        n == m and torch.equal(a[:n], b[:n])
        for a, b, n, m in zip(whole.completions, other.completions, whole.lengths, other.lengths)
    ]
    assert sum(same) >= 0.99 * len(same)
    width = min(whole.completions.shape[1], other.completions.shape[1])
    torch.testing.assert_close(
        whole.sampler_logprobs[same, :width],
        other.sampler_logprobs[same, :width],
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("tokens", [9 + 33, 60, 100, 350, 700, 2000])
def test_cache_gb_bounds_the_keys_and_values_of_prompts_and_samples(tokens, monkeypatch):
    """2 layers x 2 x 2 heads x 8 x 4 bytes = 256 a token; 9 of the longest prompt, 24 more of a
    sample. Whatever is held, while prompts are read and at each step, stays under the limit."""
    held, prompts, slots_of = [], weakref.WeakSet(), []
    read, start, one = R.PackedPrompts.run, R.Slots.__init__, R.Slots.decode_one_token

    def measure():
        slots = sum(m.nbytes for slots in slots_of for m in slots.keys + slots.values)
        held.append(slots + sum(one.nbytes() for one in prompts))

    def reading(self, body):
        prompts.add(self)
        read(self, body)
        measure()

    monkeypatch.setattr(R.PackedPrompts, "run", reading)
    monkeypatch.setattr(
        R.Slots, "__init__", lambda self, *args: start(self, *args) or slots_of.append(self)
    )
    monkeypatch.setattr(
        R.Slots, "decode_one_token", lambda self, *shape: one(self, *shape) or measure()
    )
    out = sampled(tiny(), max_new_tokens=24, cache_gb=256e-9 * tokens)
    assert max(held) <= 256 * tokens
    assert max(held) > 256 * min(tokens, 33 * 12) / 3  # it is used, too
    monkeypatch.undo()
    assert torch.equal(sampled(tiny(), max_new_tokens=24).tokens, out.tokens)


def test_a_cache_without_room_for_one_completion_is_refused():
    with pytest.raises(R.UserError, match="cache_gb 1e-06: expected at least 1.08e-05"):
        sampled(tiny(), max_new_tokens=24, cache_gb=1e-6)


def test_prompts_are_read_in_chunks_each_once(monkeypatch):
    """40 prompts of 1 to 9 tokens, a third of them twice, 60 tokens at once with their padding."""
    model, chunks, run = tiny(), [], R.PackedPrompts.run
    sizes = [1 + i % 9 for i in range(30)]
    prompts = [list(range(5, 5 + size)) for size in sizes for _ in range(1 + (size % 3 == 0))]
    whole = sampled(model, prompts)
    monkeypatch.setattr(R, "PROMPT_TOKENS", 60)
    monkeypatch.setattr(
        R.PackedPrompts, "run", lambda self, body: chunks.append(self.shapes[0]) or run(self, body)
    )
    for slots in (None, 7):
        chunks.clear()
        out = sampled(model, prompts, max_slots=slots)
        assert torch.equal(out.tokens, whole.tokens)
        assert sum(count for count, _ in chunks[1:]) == 30 and len(chunks) > 4
        assert all(count * longest <= 60 for count, longest in chunks)


def test_the_same_seed_gives_the_same_completions_and_a_generator_moves_no_global_state():
    model = tiny()
    state = torch.get_rng_state()
    first, again, other = sampled(model), sampled(model), sampled(model, seed=1)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.sampler_logprobs, again.sampler_logprobs)
    assert not torch.equal(first.tokens[:, :12], other.tokens[:, :12])
    assert torch.equal(state, torch.get_rng_state())
    options = dict(group_size=3, max_new_tokens=16, eos_ids=[2], pad_id=2)
    free = [R.generate(model, PROMPTS, **options).tokens for _ in range(2)]
    assert free[0].shape != free[1].shape or not torch.equal(*free)  # no generator: torch's own


def test_samples_of_a_group_differ_at_the_first_token_and_repeated_prompts_stay_apart():
    """Two groups of one prompt share its keys and values, not its random numbers."""
    out = sampled(tiny(), [PROMPTS[0], PROMPTS[0]], group_size=16)
    firsts = out.completions[:, 0].view(2, 16)
    assert all(len(set(row.tolist())) > 3 for row in firsts) and not torch.equal(*firsts)


def distinct_prefixes(out):
    """Of a prompt and what was written after it: those after which some row has another token."""
    return {
        (tuple(row[out.prompt_width - size : out.prompt_width + step].tolist()), size)
        for row, size, length in zip(out.tokens, out.prompt_lengths.tolist(), out.lengths.tolist())
        for step in range(length)
    }


@pytest.mark.parametrize("pace", [EAGER, ALONE], ids=["shared slots", "alone"])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_row_steps_and_prompt_tokens_are_the_useful_ones(pace, temperature, monkeypatch):
    """A prompt is prefilled once for its group, and every row of every step is alive; where slots
    are shared, every distinct prefix is stepped once."""
    monkeypatch.setitem(R.PACE, "cpu", pace)
    model, prompt_tokens, row_steps = tiny(), [], []
    monkeypatch.setattr(model.model, "forward", counted(model.model.forward, prompt_tokens))
    one = R.Slots.decode_one_token
    monkeypatch.setattr(
        R.Slots,
        "decode_one_token",
        lambda self, rows, span: (row_steps.append(rows), one(self, rows, span)),
    )
    for slots in (None, 5):
        del prompt_tokens[:], row_steps[:]
        out = sampled(
            model, max_new_tokens=40, group_size=8, max_slots=slots, temperature=temperature
        )
        tokens, prefixes = int(out.lengths.sum()), len(distinct_prefixes(out))
        assert prefixes < tokens * (0.7 if temperature < 1 else 1)
        if pace is ALONE:
            assert sum(row_steps) == tokens
        elif slots is None:
            assert sum(row_steps) == prefixes
        else:  # a sample that starts later shares no slot with those that have started
            assert prefixes < sum(row_steps) < tokens
        assert max(row_steps) <= (slots or 32)
        assert prompt_tokens[:2] == [1, sum(map(len, PROMPTS))]  # how large a token is, and all
        assert sum(prompt_tokens[2:]) == sum(row_steps)


def counted(forward, tokens):
    def count(*args, **kwargs):
        tokens.append((args[0] if args else kwargs["input_ids"]).numel())
        return forward(*args, **kwargs)

    return count


def test_progress_counts_up_to_all(monkeypatch):
    """A bar for each call, that ends at the number of samples."""
    bars = []

    class Bar(contextlib.nullcontext):
        def __init__(self, iterable, name, total, *options, **more):
            super().__init__(self)
            self.total, self.n = total, 0
            bars.append(self)

        def update(self, n):
            self.n += n

    monkeypatch.setattr(R, "tqdm", Bar)
    sampled(tiny(), max_slots=5)
    assert [(bar.n, bar.total) for bar in bars] == [(12, 12)]


def test_one_new_token_and_one_token_prompts():
    out = sampled(tiny(), [[5], [6]], max_new_tokens=1)
    assert out.tokens.shape == (6, 2) and out.lengths.tolist() == [1] * 6
    scored, _ = R.completion_logprobs(tiny(), out, temperature=1.0)
    torch.testing.assert_close(scored.detach(), out.sampler_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("bias, lengths", [(50.0, [1] * 12), (-50.0, [16] * 12)])
def test_all_rows_ending_at_once_and_none_ending(bias, lengths):
    """A bias of ±50 on the end token, which is also the pad token."""
    model = tiny("phi")
    model.lm_head.bias.data[2] += bias
    out = sampled(model, max_slots=5)
    assert out.lengths.tolist() == lengths
    assert out.truncated.tolist() == [bias < 0] * 12
    assert out.completion_mask.sum(1).tolist() == lengths


def test_the_end_token_stays_in_the_mask_when_it_is_the_pad_token():
    out = sampled(tiny(), group_size=8, max_new_tokens=40)
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert 0 < out.truncated.sum() < 32
    assert torch.equal(last == 2, ~out.truncated)
    assert torch.equal(out.completion_mask.sum(1), out.lengths)
    for row, n in zip(out.completions, out.lengths):
        assert 2 not in row[: n - 1] and (row[n:] == 2).all()


@pytest.mark.parametrize(
    "wrong, expected",
    [
        (dict(group_size=0), "group_size 0: expected at least 1"),
        (dict(max_new_tokens=0), "max_new_tokens 0: expected at least 1"),
        (dict(prompts=[]), "prompts: expected one or more"),
        (dict(prompts=[[5], []]), "prompts: expected one or more, of one token or more"),
        (dict(temperature=-1.0), "temperature -1.0: expected at least 0"),
        (dict(prompts=[[5], [6, 40]]), "prompts: expected tokens below 40"),
    ],
)
def test_what_cannot_be_sampled_is_a_value_error(wrong, expected):
    with pytest.raises(ValueError, match=expected):
        sampled(tiny(), **wrong)


def test_the_model_is_left_as_it_was_and_its_dropout_stays_out():
    """Training mode, a frozen part in evaluation mode, attention and configuration come back, also
    after an error; a dropout of one half changes nothing."""
    model = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    quiet = sampled(model)
    expected, _ = R.completion_logprobs(model, quiet, temperature=1.0)
    model.train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    before = model.config.to_dict()
    assert torch.equal(sampled(model).tokens, quiet.tokens)
    assert torch.equal(R.completion_logprobs(model, quiet, temperature=1.0)[0], expected)

    def fail(module, inputs):
        raise RuntimeError("stopped")

    hook = model.transformer.h[0].register_forward_pre_hook(fail)
    for work in (
        lambda: R.completion_logprobs(model, quiet, temperature=1.0),
        lambda: sampled(model),
    ):
        with pytest.raises(RuntimeError, match="stopped"):
            work()
    hook.remove()
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == before and model.config._attn_implementation == "eager"


def test_weights_that_lay_transposed_come_back(monkeypatch):
    """They do while rows are sampled, also those that the embedding shares; after it, and after an
    error, they lie as they were, in every bit."""
    model = tiny(tie_word_embeddings=True)
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    before = [(weight.data, weight.data.clone()) for weight in linear]
    seen, step = [], R.Slots.decode_one_token

    def look(slots, *shape):
        seen.extend(weight.stride() for weight in linear)
        if len(seen) > 200:
            raise RuntimeError("stopped")
        step(slots, *shape)

    monkeypatch.setattr(R.Slots, "decode_one_token", look)
    sampled(model, max_new_tokens=2)
    assert seen and all(first == 1 for first, _ in seen)
    with pytest.raises(RuntimeError, match="stopped"):
        sampled(model)
    for weight, (data, copy) in zip(linear, before):  # also for who holds the data
        assert torch.equal(weight, copy) and weight.is_contiguous()
        assert weight.data_ptr() == data.data_ptr() and torch.equal(data, copy)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_decode_step_never_waits_for_the_device():
    """On the meta device whatever reads a value fails: the step could be captured in a graph."""
    model = tiny().to("meta")
    page = R.Page([[3, 4, 5]], 6, 8, 0, torch.Generator(), "meta", R.Share())
    memory = [torch.zeros(1, 2, 3, 8, device="meta")] * 2
    prompts = types.SimpleNamespace(keys=memory, values=memory)
    for temperature in (1.0, 0.7, 0.0):
        with torch.device("meta"), torch.no_grad():
            slots = R.Slots(model, 6, 12, prompts, page, [2], temperature)
            with R.our_attention(R.configs_of(model), slots):
                slots.decode_one_token(5, 8)
    assert slots.state.shape == (6, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        slots.state.max().item()


READING = {"item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"}
READING |= {"unique_consecutive", "_unique2", "unique_dim", "is_nonzero"}
RANDOM = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli"}
RANDOM |= {"uniform_", "normal_", "bernoulli_", "exponential_", "native_dropout"}
ILLEGAL = READING | RANDOM | {"lift_fresh"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index"}


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph where there is no GPU. What runs in its context is noted, and what
    was there before stays as it was; replay does it again, in the same memory, whatever that holds
    by then. As in a capture, no value can be read, no mask of bools indexes, no random numbers are
    drawn, and no tensor is made of Python's numbers."""

    replays, modes = 0, []

    def __init__(self):
        super().__init__()
        self.calls, self.own = [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        by_mask = name in INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in ILLEGAL or by_mask:
            raise RuntimeError("operation not permitted when stream is capturing")
        if function._schema.is_mutable:
            self.calls.append((function, args, kwargs, []))
            if args[0].untyped_storage().data_ptr() in self.own:
                function(*args, **kwargs)
            return args[0]
        result = function(*args, **kwargs)
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        results = [
            one
            for one in (result if isinstance(result, (tuple, list)) else [result])
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given
        ]
        if results:  # else a view
            self.calls.append((function, args, kwargs, results))
            self.own |= {one.untyped_storage().data_ptr() for one in results}
        return result

    def replay(self):
        Tape.replays += 1
        with torch.inference_mode():
            for function, args, kwargs, results in self.calls:
                again = function(*args, **kwargs)
                for one, new in zip(
                    results, again if isinstance(again, (tuple, list)) else [again]
                ):
                    one.copy_(new)


@pytest.fixture
def taped(monkeypatch):
    """The pace of a GPU, and tapes for graphs."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", lambda tape: tape)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", Tape.modes.append)
    monkeypatch.setitem(R.PACE, "cpu", R.Pace(span=2, steps=3, rows=4, graphs=True))
    monkeypatch.setattr(Tape, "replays", 0)
    yield
    assert Tape.modes == ["error", "default"] * (len(Tape.modes) // 2)
    Tape.modes.clear()


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "mistral",
        "gemma2",
        "gpt2",
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, dict(max_slots=5, temperature=0.7), dict(temperature=0.0, eos_ids=[])],
    ids=str,
)
def test_captured_steps_sample_what_eager_ones_do(kind, options, taped, monkeypatch):
    """A step captured at one time, replayed on what the slots hold later, dead slots among them."""
    model, shapes, step = tiny(kind), [], R.Slots.decode_one_token
    monkeypatch.setattr(
        R.Slots,
        "decode_one_token",
        lambda slots, *shape: shapes.append(shape) or step(slots, *shape),
    )
    out = sampled(model, **options)
    assert all(rows % 4 == 0 or rows == 5 for rows, _ in shapes) and len(shapes) < 2 * Tape.replays
    assert shapes[::2] == shapes[1::2]  # each shape once in earnest, then once on the tape
    replays = Tape.replays
    monkeypatch.setitem(R.PACE, "cpu", EAGER)
    same = sampled(model, **options)
    assert torch.equal(out.tokens, same.tokens) and Tape.replays == replays
    assert torch.equal(out.lengths, same.lengths) and torch.equal(out.truncated, same.truncated)
    torch.testing.assert_close(out.sampler_logprobs, same.sampler_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "illegal",
    [
        lambda hidden: hidden.argmax().item(),
        lambda hidden: hidden[hidden > 0],
        lambda hidden: torch.rand(3),
        lambda hidden: torch.tensor([1.0, 2.0]),
    ],
    ids=["reads a value", "indexes by a mask", "draws", "makes a tensor of numbers"],
)
def test_a_step_that_cannot_be_captured_runs_as_it_is(illegal, taped):
    """A model that does what no capture may: one warning, and the completions that it had."""
    model = tiny()
    expected = sampled(model)
    assert Tape.replays
    Tape.replays = 0

    def hook(module, given):
        illegal(given[0])

    model.lm_head.register_forward_pre_hook(hook)
    with pytest.warns(UserWarning, match="sampling without CUDA graphs: .*not permitted") as warned:
        warnings.simplefilter("default")
        out = sampled(model)
    assert not Tape.replays and len(warned) == 1 and torch.equal(out.tokens, expected.tokens)


def test_memory_that_runs_out_in_a_capture_is_no_capture_that_failed(taped, monkeypatch):
    """It goes on to the caller, who says which flags help; without a warning."""
    one, calls = R.Slots.decode_one_token, []

    def full(slots, *shape):
        calls.append(shape)
        if len(calls) == 2:  # the first is in earnest, the second on the tape
            raise torch.OutOfMemoryError("CUDA out of memory")
        one(slots, *shape)

    monkeypatch.setattr(R.Slots, "decode_one_token", full)
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError):
        warnings.simplefilter("error")
        sampled(tiny())


@pytest.mark.parametrize("kind", ["qwen3", "gpt_bigcode", "deepseek_v3"])
def test_grouped_heads_never_meet_a_mask_where_that_is_slow(kind, monkeypatch):
    """As if on a GPU: keys and values are expanded, and values and gradients stay."""
    seen, fused = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, enable_gqa=False, **options):
        seen.append(enable_gqa and attn_mask is not None)
        return fused(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(R.F, "scaled_dot_product_attention", watched)
    results = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(R, "EXPAND_HEADS", devices)
        model = tiny(kind)
        out = sampled(model)
        logprobs, _ = R.completion_logprobs(model, out, temperature=1.0)
        logprobs.sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([logprobs.detach(), *gradients])
        assert any(seen) == (not devices and kind != "deepseek_v3")
        seen.clear()
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# ---- rollouts


def test_rows_and_joined_rollouts_keep_every_token():
    model = tiny()
    first, second = sampled(model), sampled(model, [[9] * 12], max_new_tokens=30, seed=1)
    rows = first[[3, 0]]
    assert torch.equal(rows.tokens, first.tokens[[3, 0]])
    assert torch.equal(first[torch.tensor([3, 0])].completions, rows.completions)
    both = R.Rollout.cat([first, second], pad_id=7)
    assert both.prompt_width == 12 and both.completions.shape[1] == max(
        first.completions.shape[1], second.completions.shape[1]
    )
    for i, row in enumerate([*range(12), *range(3)]):
        one = (first, second)[i >= 12]
        n, m = one.prompt_lengths[row], one.lengths[row]
        kept = one.tokens[row, one.prompt_width - n : one.prompt_width + m]
        assert torch.equal(both.tokens[i, 12 - n : 12 + m], kept)
        assert (both.tokens[i, : 12 - n] == 7).all() or i >= 12 or one.prompt_width > n
        assert both.lengths[i] == m and both.truncated[i] == one.truncated[row]
        assert torch.equal(both.sampler_logprobs[i, :m], one.sampler_logprobs[row, :m])
    scored = torch.cat(
        [R.completion_logprobs(model, one, temperature=1.0)[0].flatten() for one in (first, second)]
    )
    joined, _ = R.completion_logprobs(model, both, temperature=1.0)
    torch.testing.assert_close(joined[both.completion_mask], scored[scored != 0], atol=1e-5, rtol=0)


def test_one_long_row_does_not_scatter_the_others():
    """A row that fills the budget alone, and 23 of 10 tokens, ten of which fit in a part."""
    lengths = torch.tensor([100] + [10] * 23)
    out = R.Rollout(
        torch.ones(24, 1 + 100, dtype=torch.long),
        torch.ones(24, dtype=torch.long),
        lengths,
        torch.zeros(24, 100),
        torch.zeros(24, dtype=torch.bool),
    )
    assert [len(part) for part in R.micro_batches(out, 101)] == [1, 10, 10, 3]


def test_rows_that_read_their_own_prompt_count_it_each():
    """A group of four, prompts of 9 tokens, completions of 1: 9 + 4, or 4 x (9 + 1)."""
    out = R.Rollout(
        torch.ones(4, 9 + 1, dtype=torch.long),
        torch.full((4,), 9),
        torch.ones(4, dtype=torch.long),
        torch.zeros(4, 1),
        torch.zeros(4, dtype=torch.bool),
    )
    assert [len(part) for part in R.micro_batches(out, 14)] == [4]
    assert [len(part) for part in R.micro_batches(out, 20, packed=False)] == [2, 2]


def test_micro_batches_are_whole_groups_by_length_under_the_budget():
    """Rows once each, sorted; no part over the budget but a row alone; and the same scores."""
    model = tiny()
    out = sampled(model, [[5] * 9, [6] * 9, [7] * 3, [8] * 20], group_size=6, max_new_tokens=30)

    def cost(rows):
        prompts = {(tuple(out.tokens[row, : out.prompt_width].tolist())) for row in rows.tolist()}
        sizes = [sum(token in (5, 6, 7, 8) for token in prompt) for prompt in prompts]
        return sum(sizes) + out.lengths[rows].sum()

    whole = R.completion_logprobs(model, out, temperature=1.0)
    for budget in (1, 40, 200, 400, 10_000, None):
        parts = R.micro_batches(out, budget)
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(24))
        assert all(torch.equal(part, part.sort().values) for part in parts)
        assert [p.tolist() for p in parts] == [p.tolist() for p in R.micro_batches(out, budget)]
        longest = [out.lengths[part // 6 * 6 + 5].max() for part in parts]
        if budget is None or budget == 10_000:
            assert len(parts) == 1
        else:
            assert len(parts) > 1 and len(longest) == len(parts)
            assert all(cost(part) <= budget + 20 * 2 or len(part) == 1 for part in parts)
        if budget == 1:
            assert len(parts) == 24
        for a, b in zip(
            whole, R.completion_logprobs(model, out, temperature=1.0, micro_batch_tokens=budget)
        ):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_scoring_runs_no_padding_and_each_prefix_once(temperature, monkeypatch):
    """Tokens of the forward: a prompt without its last token once for its rows, what completions
    begin with once for all that do, and what prompts begin with."""
    model, tokens = tiny(), []
    out = sampled(model, group_size=8, max_new_tokens=30, temperature=temperature)
    assert len(distinct_prefixes(out)) < out.lengths.sum()
    monkeypatch.setattr(model.model, "forward", counted(model.model.forward, tokens))
    R.completion_logprobs(model, out, temperature=1.0)
    assert tokens == [sum(map(len, PROMPTS)) - 4 + len(distinct_prefixes(out))]

    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6], [5, 6, 7, 8, 9, 11, 12]]
    out = sampled(model, prompts, group_size=8)
    tokens.clear()
    R.completion_logprobs(model, out, temperature=1.0)
    assert tokens == [6 + len(distinct_prefixes(out))]  # 5, 5 6, ..., 5 6 7 8 9 11


def by_hand(completions, forced=None, prompts=([5, 6, 7], [5, 6])):
    """A rollout of the first prompt's completions, the second's, ..., lists of tokens."""
    rows = [(prompt, row) for prompt, group in zip(prompts, completions) for row in group]
    width, longest = max(map(len, prompts)), max(len(row) for _, row in rows)
    lengths = torch.tensor([len(row) for _, row in rows])
    tokens = torch.full((len(rows), width + longest), 2)
    for line, (prompt, row) in zip(tokens, rows):
        line[width - len(prompt) : width + len(row)] = torch.tensor(prompt + row)
    return R.Rollout(
        tokens=tokens,
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
        lengths=lengths,
        sampler_logprobs=torch.zeros(len(rows), longest),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        forced=forced,
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("with_forced", [False, True])
def test_rows_that_share_what_they_begin_with_keep_their_values_and_gradients(kind, with_forced):
    """Equal rows, apart and adjacent; one that ends where another goes on; the same tokens written
    once by the policy and once by a tool; the same completion of two prompts."""
    model = tiny(kind)
    first = [[8, 9, 10], [8, 9], [11], [8, 9, 10], [8, 9, 10, 12, 13], [8, 14, 10], [8, 14, 10]]
    out = by_hand([first, [[8, 9, 10], [8, 9]], [[8, 9, 10]]], prompts=([5, 6, 7], [5, 6], [5, 4]))
    if with_forced:
        forced = torch.zeros_like(out.sampler_logprobs, dtype=torch.bool)
        forced[3, 1:2] = forced[5, :2] = forced[8, 1] = True
        out = out._replace(forced=forced)
    mask = out.completion_mask
    scored, entropy = R.completion_logprobs(model, out, temperature=0.7)
    weights = torch.linspace(0.5, 1.5, scored.numel()).view_as(scored)
    (weights * (scored + 0.3 * entropy)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert not scored[~mask].any() and not entropy[~mask].any()

    model.zero_grad()
    for i, (logprobs, entropies) in enumerate(own_logprobs(model, out, 0.7)):
        n, own = len(logprobs), mask[i, : len(logprobs)]
        torch.testing.assert_close(scored[i, :n][own], logprobs[own], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[i, :n][own], entropies[own], atol=1e-5, rtol=0)
        (own * weights[i, :n] * (logprobs + 0.3 * entropies)).sum().backward()
    own = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(own) == len(gradients)
    for mine, expected in zip(gradients, own):
        torch.testing.assert_close(mine, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_prefixes_are_numbered_as_in_a_dictionary():
    """Random texts of few letters: rows have the same number where they have begun alike."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        tokens = torch.randint(0, 2, (9, 6), generator=generator)
        sizes = torch.randint(1, 7, (9,), generator=generator)
        prefixes = R.Prefixes(tokens, sizes)
        texts = [tuple(row[:size]) for row, size in zip(tokens.tolist(), sizes.tolist())]
        assert [texts[i] for i in prefixes.first_rows] == sorted(set(texts))
        assert all(texts.index(texts[i]) == i for i in prefixes.first_rows)
        found = {}
        for text, numbers in zip(texts, prefixes.number[prefixes.text].tolist()):
            for end, number in enumerate(numbers[: len(text)]):
                assert found.setdefault(number, text[: end + 1]) == text[: end + 1]
        assert len(found) == len({text[: i + 1] for text in texts for i in range(len(text))})


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("options", [dict(temperature=0.3), dict(max_slots=5), {}], ids=str)
def test_samples_in_shared_slots_are_those_in_slots_of_their_own(kind, options, monkeypatch):
    model = tiny(kind)
    options = dict(group_size=7, max_new_tokens=24) | options
    shared = sampled(model, **options)
    monkeypatch.setitem(R.PACE, "cpu", ALONE)
    alone = sampled(model, **options)
    assert len(set(shared.lengths.tolist())) > 3
    assert torch.equal(shared.tokens, alone.tokens)
    assert torch.equal(shared.truncated, alone.truncated)
    torch.testing.assert_close(shared.sampler_logprobs, alone.sampler_logprobs, atol=2e-5, rtol=0)


# ---- scoring


@pytest.mark.parametrize("kind", ["gemma2", "opt", "gpt2", "mamba"])
def test_gradient_checkpointing_changes_nothing(kind):
    """Layers run again in the backward pass, when the forward pass's contexts are gone: without
    dropout, with the same attention; the modes of modules stay."""
    dropout = {"gemma2": dict(attention_dropout=0.5), "opt": dict(dropout=0.5), "mamba": {}}
    model = tiny(kind, **dropout.get(kind, dict(resid_pdrop=0.5)))
    out = sampled(model)
    results, runs = [], []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: runs.append(1))
    for checkpointing in (False, True):
        runs.clear()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logprobs, entropy = R.completion_logprobs(model, out, temperature=1.0)
            model.zero_grad()
            (logprobs.sum() + entropy.sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([logprobs.detach(), *gradients])
        assert len(runs) == 1 + checkpointing  # forward, and again in the backward pass
    assert all(map(torch.equal, *results))
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        assert torch.equal(R.completion_logprobs(model, out, temperature=1.0)[0], results[1][0])
    assert torch.equal(sampled(model).tokens, out.tokens)


def test_the_head_never_holds_more_logits_than_a_chunk(monkeypatch):
    """V = 20,000 and 2,000 tokens: 40 million logits, 33.5 million at a time, and the gradients of
    the whole at once. Those of the first chunk are computed again, those of the last one stay."""
    torch.manual_seed(0)
    model = tiny(vocab_size=20_000, num_hidden_layers=1)
    lengths = torch.full((20,), 100)
    tokens = torch.randint(3, 20_000, (20, 104))
    out = R.Rollout(
        tokens,
        torch.full((20,), 4),
        lengths,
        torch.zeros(20, 100),
        torch.zeros(20, dtype=torch.bool),
    )
    sizes, linear = [], torch.nn.functional.linear

    def recorded(*args):
        output = linear(*args)
        sizes.append(output.numel())
        return output

    monkeypatch.setattr(R.F, "linear", recorded)
    logprobs, entropy = R.completion_logprobs(model, out, temperature=1.0)
    of_head = [size for size in sizes if size >= 20_000 * 100]
    assert len(of_head) == 2
    sizes.clear()
    (logprobs.sum() + entropy.sum()).backward()
    assert of_head[0] <= 2**25
    assert [size for size in sizes if size >= 20_000 * 100] == of_head[:1]
    monkeypatch.undo()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    for row in range(0, 20, 10):
        values = own_logprobs(model, out[list(range(row, row + 10))])
        sum(a.sum() + b.sum() for a, b in values).backward()
    torch.testing.assert_close(gradient, model.lm_head.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("at_once", [2**25, 400])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_without_a_gradient_are_the_same_numbers(temperature, at_once, monkeypatch):
    """Log-probs, entropies and the gradient of log-probs are, in every bit, those that a loss gets
    which multiplies entropies by 0; in one chunk, and in chunks of ten tokens."""
    monkeypatch.setattr(R, "LOGITS_AT_ONCE", at_once)
    model = tiny()
    out = sampled(model, temperature=temperature)
    results = []
    for entropy_gradient in (True, False):
        logprobs, entropy = R.completion_logprobs(
            model, out, temperature=temperature, entropy_gradient=entropy_gradient
        )
        (logprobs.sum() - 0.0 * entropy.sum()).backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        results.append([logprobs.detach(), entropy.detach(), *gradients])
    assert results[0][1].max() > 0.1
    assert all(map(torch.equal, *results))

    for entropy_gradient in (True, False):
        _, entropy = R.completion_logprobs(
            model, out, temperature=temperature, entropy_gradient=entropy_gradient
        )
        entropy.sum().backward()
        moved = any(parameter.grad.any() for parameter in model.parameters())
        assert moved == entropy_gradient
        model.zero_grad()


def test_under_autocast_the_log_softmax_comes_from_float32_logits():
    """A bf16 body, a float32 head: the same bits with and without gradients, and log-probs and
    entropies that are not those of bf16 logits."""
    model = tiny(attention="sdpa")
    out = sampled(model)
    seen = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = R.completion_logprobs(model, out, temperature=1.0)
        with torch.no_grad():
            assert torch.equal(logprobs, R.completion_logprobs(model, out, temperature=1.0)[0])
    assert logprobs.dtype == torch.float32
    layout = R.PackedTexts(out)
    hidden = seen[0][0, layout.predicting[layout.predicted]].float()
    logp = (hidden @ model.lm_head.weight.T).log_softmax(-1)
    expected = logp.gather(1, out.completions[out.completion_mask][:, None])[:, 0]
    torch.testing.assert_close(logprobs[out.completion_mask], expected, atol=1e-6, rtol=0)
    expected = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(entropy[out.completion_mask], expected, atol=1e-5, rtol=0)
    logprobs.sum().backward()


def test_a_bf16_sampler_is_frozen_and_refreshed_in_place():
    policy = tiny("llama", seed=1)
    policy.register_buffer("counter", torch.zeros(3))
    sampler = R.sampler_copy(policy, torch.bfloat16)
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in sampler.parameters())
    assert sampler.model.rotary_emb.inv_freq.dtype == torch.float32
    assert next(policy.parameters()).dtype == torch.float32
    places = [p.data_ptr() for p in sampler.parameters()]
    for parameter in policy.parameters():
        parameter.data += 1
    policy.counter += 5
    sampler.load_state_dict(policy.state_dict())
    assert [p.data_ptr() for p in sampler.parameters()] == places
    for a, b in zip(sampler.parameters(), policy.parameters()):
        assert torch.equal(a, b.to(torch.bfloat16))
    assert sampler.counter.tolist() == [5.0] * 3
    out = sampled(sampler)
    assert out.sampler_logprobs.dtype == torch.float32 and out.sampler_logprobs.isfinite().all()


def test_tied_weights_stay_tied_in_the_sampler():
    sampler = R.sampler_copy(tiny(tie_word_embeddings=True), torch.bfloat16)
    assert sampler.lm_head.weight is sampler.model.embed_tokens.weight


# ---- mixtures of experts


@pytest.mark.parametrize("topk", [torch.topk, torch.Tensor.topk])
def test_routing_records_and_replays_the_indices_of_topk(topk):
    """By hand: of (3, 1, 2) the two largest are 0 and 2; of (1, 3, 2) they would be 1 and 2, but 0
    and 2 are chosen again, with the values of today, whose gradient flows."""
    with R.Routing() as before:
        first = topk(torch.tensor([[3.0, 1.0, 2.0]]), 2)
    assert first.indices.tolist() == [[0, 2]] and before.experts[0] is first.indices
    now = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
    with R.Routing(before) as after:
        again = topk(now, 2)
        further = topk(now, 1)  # nothing recorded is left
    assert again.indices.tolist() == [[0, 2]] and again.values.tolist() == [[1.0, 2.0]]
    assert further.indices.tolist() == [[1]]
    assert [x.tolist() for x in after.experts] == [[[0, 2]], [[1]]]
    (again.values * torch.tensor([[5.0, 7.0]])).sum().backward()
    assert now.grad.tolist() == [[5.0, 0.0, 7.0]]
    assert topk(now, 1).indices.tolist() == [[1]] and len(after.experts) == 2  # outside


def test_routing_leaves_other_calls_alone():
    with R.Routing() as routing:
        values, indices = torch.topk(torch.arange(8.0).view(1, 2, 4), 2)  # no tokens x experts
        torch.sort(torch.arange(4.0))
    assert indices.tolist() == [[[3, 2], [3, 2]]] and routing.experts == []


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "olmoe"])
def test_all_experts_and_the_chosen_ones_share_are_the_experts_own(kind):
    """Decode steps that are captured compute every expert; their values are the model's own."""
    model, ids = tiny(kind), torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with R.experts_by(R.configs_of(model), "every_expert"):
            calls = [c._experts_implementation for c in (model.config, model.base_model.config)]
            logits = model(ids, use_cache=False).logits
    assert calls == ["every_expert"] * 2 and model.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_under_autocast_experts_are_computed_in_bf16(kind, monkeypatch):
    """As every other linear map: in values and gradients it is rounding, and it saves time and
    memory on a GPU. Without autocast, and with gradient checkpointing, nothing changes."""
    model, dtypes, product = tiny(kind), [], torch.nn.functional.grouped_mm
    out = sampled(model)
    exact, _ = R.completion_logprobs(model, out, temperature=1.0)

    def watched(states, weights, **options):
        dtypes.append((states.dtype, weights.dtype))
        return product(states, weights, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = R.completion_logprobs(model, out, temperature=1.0)
        model.zero_grad()
        logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        assert (logprobs - exact).abs().mean() < 0.1
    assert set(dtypes) == {(torch.bfloat16, torch.bfloat16)}
    assert all(map(torch.equal, *gradients))
    assert all(gradient.dtype == torch.float32 for gradient in gradients[0])


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_flips_are_of_completion_tokens_alone_once_a_layer(kind, monkeypatch):
    """Packed, padded (qwen3_next), and with groups of experts that are chosen first (DeepSeek-V3).
    By hand: for each row alone, the experts of the tokens before those of its completion."""
    shape = dict(n_routed_experts=8, n_group=4, topk_group=2) if kind == "deepseek_v3" else {}
    monkeypatch.setitem(EXTRA, kind, shape)
    monkeypatch.setattr(R, "BODIES", {})  # so that the body is sought within the recording
    model = build(kind)
    out = sampled(model, group_size=3)
    R.BODIES.clear()
    with torch.no_grad(), R.Routing() as before:
        R.completion_logprobs(model, out, temperature=1.0)
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    assert len(before.experts) == len(routers) > 0
    assert not before.flips(before).any()
    for router in routers:
        router.weight.data += 0.3 * torch.randn_like(router.weight)
    with torch.no_grad(), R.Routing() as after:
        R.completion_logprobs(model, out, temperature=1.0)
    flips = before.flips(after)
    assert len(flips) == len(routers) * out.lengths.sum() and 0 < flips.float().mean() < 1

    old, new = [
        torch.cat([choice.experts[choice.predicting] for choice in routing.expert_choices()])
        for routing in (before, after)
    ]
    assert flips.tolist() == [set(a) != set(b) for a, b in zip(old.tolist(), new.tolist())]
    first, by_row = out.completions[out.completion_mask], []
    for row in range(len(out.lengths)):
        start = out.prompt_width - out.prompt_lengths[row]
        ids = out.tokens[row, start : out.prompt_width + out.lengths[row]][None]
        with torch.no_grad(), R.Routing() as alone:
            model(ids, use_cache=False)
        by_row.append(alone.experts[0][out.prompt_lengths[row] - 1 : -1])
    assert torch.equal(torch.cat(by_row), new[: len(first)])


# ---- where a text is complete


def byte_tokenizer(fallback):
    """One token a byte, as byte-level BPE has it, or as SentencePiece falls back to bytes."""
    if fallback:
        vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
        for letter in "abc .":
            vocabulary[letter] = len(vocabulary)
        inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: number for number, letter in enumerate(letters)}
        inner = Tokenizer(models.BPE(vocabulary, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_step_ends_with_the_token_that_completes_its_text(fallback):
    """The first n with decode(ids[:n]) beginning with the text, found by trying each; a few
    decodings find it, too. 。 and → are three tokens, the emoji are four."""
    tokenizer = byte_tokenizer(fallback)
    for text in ("abc. a→b。c", "。。。→→→", "a 🙂🙂🙂🙂 b.", "abc" * 30 + "→"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        prefixes = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        for end in range(1, len(text) + 1):
            expected = next(n for n, read in enumerate(prefixes) if read.startswith(text[:end]))
            assert R.token_that_completes(ids, text[:end], tokenizer) == expected
    calls = []
    counting = types.SimpleNamespace(
        decode=lambda ids, **options: calls.append(ids) or tokenizer.decode(ids, **options)
    )
    ids = tokenizer.encode("abc" * 1000 + "→" + "abc" * 1000, add_special_tokens=False)
    assert R.token_that_completes(ids, "abc" * 1000 + "→", counting) == 3002
    assert len(calls) < 20


# ---- by hand


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<eos>", "<unk>", *"0123456789+*=;#\x1b\n"]
    characters = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    model = tiny(vocab_size=len(words), eos_token_id=1)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_command_prints_completions_with_their_rewards(folder, capsys):
    flags = "--prompt 1+2= --n 3 --max-new-tokens 24 --answer 3 --reward exact --device cpu"
    status = R.main(["--model", str(folder), *flags.split()])
    text = capsys.readouterr().out
    assert status == 0 and text.count("[reward ") == 3
    assert "\x1b" not in text and "\\x1b" in text  # escape sequences do not reach the terminal


def one_sentence(capsys, *arguments) -> str:
    """What the command says, with status 2, on one line of standard error."""
    assert R.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--n 0", "--n 0: expected at least 1"),
        ("--max-new-tokens 0", "--max-new-tokens 0: expected at least 1"),
        ("--temperature -1", "--temperature -1.0: expected a number of at least 0"),
        ("--temperature nan", "--temperature nan: expected a number of at least 0"),
        ("--temperature warm", "--temperature: invalid float value: 'warm'"),
        ("--seed -1", "--seed -1: expected"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--device mps", "--device mps: expected one that is on this machine"),
        (
            "--prompt " + 130 * "1",
            "--prompt: expected fewer tokens than the model's context of 128",
        ),
        ("--system Hi", "--system, --chat-template-args: the model has no chat template"),
        ("--answer 3 --reward maths", "--reward maths"),
        ("--max-new-token 8", "unknown flag --max-new-token; did you mean --max-new-tokens?"),
        ("--reward math", "--reward math: needs --answer"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_status_2(flags, words, folder, capsys):
    default = ["--model", folder, "--prompt", "1+2="]
    assert words in one_sentence(capsys, *default, *flags.split())


def test_a_verifier_that_fails_is_one_sentence(folder, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def bad(completion, answer):\n    return 1 if completion == '' else 1 / 0\n"
    )
    reward = f"{tmp_path / 'mine.py'}:bad"
    error = one_sentence(
        capsys, "--model", folder, "--prompt", "1+2=", "--answer", "3", "--reward", reward
    )
    assert reward in error and "ZeroDivisionError" in error


def test_a_verifier_that_wants_a_field_is_refused_before_the_model_loads(
    folder, capsys, monkeypatch, tmp_path
):
    (tmp_path / "mine.py").write_text("def f(completion, answer, hint):\n    return 1\n")
    monkeypatch.setattr(R, "load_model", None)
    arguments = ["--model", folder, "--prompt", "1+2=", "--answer", "3"]
    error = one_sentence(capsys, *arguments, "--reward", f"{tmp_path / 'mine.py'}:f")
    assert "no field 'hint' in the data" in error


TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def test_a_wrong_model_is_one_sentence_and_status_2(folder, tmp_path, capsys):
    missing = one_sentence(capsys, "--model", tmp_path / "none", "--prompt", "1+2=")
    assert "--model" in missing and str(tmp_path / "none") in missing
    assert "there is no such folder" in missing  # the hub is not asked
    wordless = tmp_path / "wordless"
    shutil.copytree(folder, wordless, ignore=lambda *_: TOKENIZER_FILES)
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(wordless)
    error = one_sentence(capsys, "--model", wordless, "--prompt", "1+2=")
    assert "found no tokenizer there (tokenizer.save_pretrained writes one)" in error
    built_in = one_sentence(capsys, "--model", "tiny", "--prompt", "1+2=")
    assert "python train.py" in built_in and "checkpoints/step-N" in built_in
    for step in ("step-5", "step-10"):
        shutil.copytree(folder, tmp_path / "run" / "checkpoints" / step)
    run = one_sentence(capsys, "--model", tmp_path / "run", "--prompt", "1+2=")
    assert "the folder of a run" in run and str(tmp_path / "run/checkpoints/step-10") in run


def test_weights_that_do_not_fit_are_one_sentence(folder, tmp_path, capsys):
    """A missing shard, a missing layer, other shapes, a file that broke off, a vocabulary that is
    larger than the embedding; where all is well, what comes is what was saved."""
    model = R.load_model(folder)
    assert torch.equal(
        model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"]
    )
    assert not model.training and model.lm_head.weight.dtype == torch.float32

    def broken(name, change):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        change(copy)
        return one_sentence(capsys, "--model", copy, "--prompt", "1+2=", "--device", "cpu")

    def in_shards(copy):
        (copy / "model.safetensors").unlink()
        model.save_pretrained(copy, max_shard_size="20KB")
        next(copy.glob("*00002-of*")).unlink()

    def without_a_layer(copy):
        weights = load_file(copy / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, copy / "model.safetensors", {"format": "pt"})

    def config(**fields):
        def change(copy):
            path = copy / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))

        return change

    def cut(copy):
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:5000])

    assert "model-00002-of" in broken("shards", in_shards)
    error = broken("layer", without_a_layer)
    assert "1 are missing, model.layers.1.mlp.up_proj.weight among them" in error
    error = broken("shape", config(intermediate_size=80))
    assert "down_proj.weight has the shape (32, 64), not (32, 80)" in error
    assert "incomplete" in broken("cut", cut)
    error = broken("small", config(vocab_size=6))
    assert "its embedding has 6 rows" in error


@pytest.mark.slow
def test_no_bar_of_loading_is_drawn_into_a_pipe(folder):
    command = [sys.executable, R.__file__, "--model", str(folder), "--prompt", "1+2=", "--n", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


# ---- GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_bf16_sampler_and_the_scorer_agree():
    policy = tiny(attention="sdpa").cuda()
    out = sampled(R.sampler_copy(policy, torch.bfloat16), group_size=32, max_new_tokens=60)
    with torch.autocast("cuda", torch.bfloat16):
        scored, _ = R.completion_logprobs(policy, out, temperature=1.0)
        with torch.no_grad():
            assert torch.equal(scored, R.completion_logprobs(policy, out, temperature=1.0)[0])
    gap = (scored.detach() - out.sampler_logprobs)[out.completion_mask]
    assert gap.abs().mean() < 0.02 and math.isfinite(gap.sum().item())
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert torch.equal(last == 2, ~out.truncated)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, dict(max_slots=40, temperature=0.7)], ids=str)
def test_on_a_gpu_captured_steps_sample_what_eager_ones_do(options, monkeypatch):
    """No warning: graphs there are. Rounding may differ where rows do, and with it a few tokens."""
    model, options = (
        tiny(attention="sdpa").cuda(),
        dict(group_size=32, max_new_tokens=100) | options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        out = sampled(model, **options)
    monkeypatch.setattr(R, "capture", lambda step, shape: None)
    same = sampled(model, **options)
    width = min(out.completions.shape[1], same.completions.shape[1])
    equal = (out.completions[:, :width] == same.completions[:, :width]).all(1)
    assert equal.float().mean() > 0.98


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_capture_that_breaks_off_leaves_no_trace():
    """A model that reads a value: its completions, and memory and random numbers as before."""
    model = tiny(attention="sdpa").cuda()
    expected = sampled(model)
    model.lm_head.register_forward_pre_hook(lambda module, given: print(end="" * given[0].argmax()))
    with pytest.warns(UserWarning, match="sampling without CUDA graphs"):
        assert torch.equal(sampled(model).tokens, expected.tokens)
    held = torch.zeros(2**28, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert (
        torch.cuda.memory_reserved() <= reserved - 2**30 and torch.rand(9, device="cuda").max() < 1
    )
