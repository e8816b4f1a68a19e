"""Sampling and scoring against transformers' own forward pass and `generate`, on tiny
random models.

`way` runs a test with rollout.py and with the fast files of support/extras. test_fast.py compares
them."""

import contextlib
import json
import math
import os
import shutil
import types
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import GradientCheckpointingLayer

import pretend
import rollout as R
from bench_architectures import build, examine
from support.extras import fast_sampling, fast_scoring
from support.models import checkpoint_layers, critic_of, frozen_copy, refresh
from support.user import UserError
from tools import character_tokenizer, fast

transformers.logging.set_verbosity_error()

# models of bench_architectures.py: each has something that is sampled or scored in its own way
KINDS = {
    "qwen3": {},
    "mistral": {},  # a sliding window
    "gemma2": dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3_text": {},
    "cohere": dict(logit_scale=0.25),
    "phi": {},  # a bias in the head
    "gpt2": {},  # learned positions
    "gpt_bigcode": {},  # one key head
    "opt": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},  # attention sinks
    "deepseek_v3": {},  # keys have another size than values
    "trocr": {},  # no position_ids: each batch has prompts of one length
    "mamba": {},
}
PLAIN_ONLY = {"trocr", "mamba"}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17], [18, 19, 20, 21, 22]]


def tiny(kind="qwen3", **options):
    return build(kind, **KINDS[kind] | options)


def random_numbers(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def sampled(
    model, prompts=PROMPTS, seed=0, group_size=3, max_new_tokens=16, generate=None, **options
):
    uniforms = random_numbers(len(prompts), group_size, max_new_tokens, seed=seed)
    generate = generate or R.generate
    return generate(model, prompts, uniforms, **dict(eos_ids=[2], pad_id=2) | options)


def own_logprobs(model, out, temperature=1.0):
    """Log-probs and entropies of each row from a forward pass of its own, without any padding."""
    for text, n in zip(out.sequences(), out.prompt_lengths):
        ids = torch.tensor([text])
        logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        logp = (logits[n - 1 : -1].float() / temperature).log_softmax(-1)
        yield logp.gather(1, ids[0, n:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def gradients(model):
    """Of all parameters that have one. They are gone afterwards."""
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def fast_where_it_fits(plain, quick):
    def either(model, *given, **options):
        return (quick if fast.fits(model) else plain)(model, *given, **options)

    return either


@pytest.fixture
def quick(monkeypatch):
    """Replace the functions of rollout.py by the fast ones, for models that fit."""
    for name in ("generate", "completion_logprobs", "completion_values"):
        monkeypatch.setattr(R, name, fast_where_it_fits(getattr(R, name), getattr(fast, name)))


@pytest.fixture(params=["plain", "fast"])
def way(request):
    if request.param == "fast":
        request.getfixturevalue("quick")


def watch(monkeypatch, owner, name, note):
    """Call note with the arguments of each call of a function."""
    function = getattr(owner, name)

    def watched(*arguments, **options):
        note(*arguments, **options)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, watched)


# ---- parity with transformers


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_completions_are_those_of_transformers_generate(kind, way):
    """Mixed prompt lengths, two end tokens, fewer slots than rows, group members alike. Recorded
    are log-probs at temperature 1."""
    model = tiny(kind)
    out = sampled(model, group_size=2, temperature=0, eos_ids=[2, 3], cache_gb=2e-5)
    with torch.no_grad():
        scored, _ = R.completion_logprobs(model, out, 1.0)
    torch.testing.assert_close(scored, out.sampler_logprobs, atol=2e-5, rtol=0)
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


def test_an_end_as_the_last_token_that_is_allowed_is_no_truncation(way):
    model = tiny()
    free = sampled(model, eos_ids=[], max_new_tokens=4)
    assert free.truncated.all()
    row = next(i for i, ids in enumerate(free.completions.tolist()) if ids[3] not in ids[:3])
    ended = sampled(model, eos_ids=[int(free.completions[row, 3])], max_new_tokens=4)
    assert ended.lengths[row] == 4 and not ended.truncated[row]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_models_own_in_value_and_gradient(kind, way):
    """Against a forward pass for each row. So are the sampler's. Scores are bit-identical with and
    without gradients."""
    model = tiny(kind)
    assert fast.fits(model) == (kind not in PLAIN_ONLY)
    out = sampled(model, temperature=0.7)
    scored, entropy = R.completion_logprobs(model, out, 0.7)
    assert scored.dtype == entropy.dtype == torch.float32 and scored.shape == out.completions.shape
    torch.testing.assert_close(scored.detach(), out.sampler_logprobs, atol=2e-5, rtol=0)
    assert not scored[~out.completion_mask].any() and not entropy[~out.completion_mask].any()
    with torch.no_grad():
        assert all(map(torch.equal, R.completion_logprobs(model, out, 0.7), (scored, entropy)))

    weights = torch.linspace(0.5, 1.5, scored.numel()).view_as(scored)
    (weights * (scored + 0.3 * entropy)).sum().backward()
    found = gradients(model)
    for i, (logprobs, entropies) in enumerate(own_logprobs(model, out, 0.7)):
        n = len(logprobs)
        torch.testing.assert_close(scored[i, :n], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[i, :n], entropies, atol=1e-5, rtol=0)
        (weights[i, :n] * (logprobs + 0.3 * entropies)).sum().backward()
    own = gradients(model)
    scale = max(g.abs().max() for g in own)
    assert len(own) == len(found)
    assert max((a - b).abs().max() for a, b in zip(own, found)) < 1e-5 * scale


OURS, THEIRS = "plain and fast; checkpointed", "plain; checkpointed"
SHORTER = "plain and fast, up to the original context; checkpointed"
ARCHITECTURES = {
    "modernbert-decoder": OURS,  # the head is more than a linear map
    "falcon_h1": THEIRS,  # so is this one
    "xglm": THEIRS,  # a body within the body
    "gemma3": OURS,  # a composite model
    "diffllama": THEIRS,  # an attention of its own
    "qwen3_next": THEIRS,  # states
    "doge": "plain, up to the original context; checkpointed",
    "llama4_text": THEIRS,  # something changes with the length of a text
    "ministral3": OURS,
    "llama + dynamic": SHORTER,
    "phi3 + longrope": SHORTER,
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures_are_sampled_and_scored_as_their_own_forward_pass_does(kind):
    """Sampler, scorer and whole model to 1e-3, on texts longer than every window and limit of the
    tiny model. Gradient checkpointing is bit-identical, and the backward pass runs."""
    assert examine(kind) == ("right", ARCHITECTURES[kind])


REFUSED = {
    "roberta": "our sampler are up to .* the roberta's own forward",
    "rwkv": "a rwkv does not use transformers' KV cache",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_we_would_read_otherwise_is_refused(kind):
    with pytest.raises(UserError, match=REFUSED[kind]):
        R.check_scorer(build(kind), PROMPTS[:2], pad_id=0)


def test_a_scorer_that_errs_is_found(monkeypatch):
    model = tiny("gemma2")
    R.check_scorer(model, PROMPTS[:2], pad_id=0)
    logits = R.logits_of
    for factor in (1.01, math.nan):
        monkeypatch.setattr(R, "logits_of", lambda *given: factor * logits(*given))  # noqa: B023
        with pytest.raises(UserError, match="log-probs of our scorer .* the gemma2's own forward"):
            R.check_scorer(model, PROMPTS[:2], pad_id=0)


def test_a_context_is_that_in_which_a_text_means_the_same():
    def context(**fields):
        text_config = types.SimpleNamespace(**fields)
        return R.context_of(types.SimpleNamespace(get_text_config=lambda: text_config))

    long = dict(rope_type="longrope", original_max_position_embeddings=64)
    yarn = long | dict(rope_type="yarn")
    assert context() == context(max_position_embeddings=-1) == 2**20
    assert context(max_position_embeddings=128) == 128
    assert context(max_position_embeddings=128, rope_parameters=long) == 64
    assert context(max_position_embeddings=128, rope_parameters=yarn) == 128
    assert context(max_position_embeddings=128, rope_parameters=dict(full=long, local=yarn)) == 64


def test_a_text_beyond_the_context_is_refused(way):
    R.check_context(tiny(), PROMPTS, torch.zeros(4, 1, 119))
    with pytest.raises(UserError, match="129 tokens, prompt and completion: this qwen3 reads 128"):
        sampled(tiny(), max_new_tokens=120)


# ---- the draw


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_large_vocabulary_is_drawn_from_as_exactly_as_float32_can(temperature):
    """151,936 tokens, as Qwen's: the token of a float64 cumulative sum, but where the uniform is
    within 1e-6 of a border."""
    logits = 3 * torch.randn(1, 151_936, generator=torch.Generator().manual_seed(0))
    uniforms = random_numbers(100)
    tokens, logprobs = R.sample_token(logits.expand(100, -1), uniforms, temperature)
    exact = (logits[0].double() / temperature).softmax(-1)
    border = exact.cumsum(-1)
    below = border[tokens] - exact[tokens]
    assert (uniforms < border[tokens] + 1e-6).all() and (uniforms > below - 1e-6).all()
    torch.testing.assert_close(logprobs, exact[tokens].log().float(), atol=1e-5, rtol=0)


def test_the_first_and_the_last_uniform_draw_tokens_that_can_be():
    """Tokens of probability 0 or 1e-42, at both ends of the vocabulary too, are never sampled."""
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [0, 3, 255, 256]] = torch.tensor([-95.0, 0.0, 1.0, 2.0])
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    token, logprobs = R.sample_token(logits.expand(3, -1), uniform, 1.0)
    assert token.tolist() == [3, 256, 256] and logprobs.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value, temperature):
    model = tiny("phi")
    model.lm_head.bias.data[7] = value
    with pytest.raises(UserError, match="the logits of this phi are not finite"):
        sampled(model, temperature=temperature)


# ---- slots


@pytest.mark.parametrize("kind, cache_gb", [("qwen3", 1e-12), ("gemma2", 3e-5)])
def test_completions_do_not_depend_on_the_number_of_slots(kind, cache_gb, way):
    """One slot, a few. Rows are stepped in another order, and end where they did."""
    model = tiny(kind)
    whole = sampled(model, group_size=7, max_new_tokens=12)
    other = sampled(model, group_size=7, max_new_tokens=12, cache_gb=cache_gb)
    assert len(set(whole.lengths.tolist())) > 3
    assert torch.equal(whole.tokens, other.tokens)
    assert torch.equal(whole.truncated, other.truncated)
    torch.testing.assert_close(whole.sampler_logprobs, other.sampler_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("slots", [1, 8, 12])
def test_cache_gb_bounds_the_keys_and_values_of_samples(slots, monkeypatch, quick):
    """2 layers x 2 x 2 heads x 8 x 4 bytes = 256 a token, 9 + 24 tokens a slot."""
    held = []

    def note(slots, *_):
        held.append(sum(memory.nbytes for memory in slots.keys + slots.values))

    watch(monkeypatch, fast.Slots, "decode_one_token", note)
    sampled(tiny(), max_new_tokens=24, cache_gb=slots * 256e-9 * 33 + 1e-9)
    assert set(held) == {slots * 256 * 33}


def test_prompts_are_read_in_parts_each_once(monkeypatch, quick):
    """40 prompts of 1 to 9 tokens, 60 tokens at once with their padding."""
    model, parts = tiny(), []
    prompts = [[3 + i % 37, *range(5, 5 + i % 9)] for i in range(40)]  # no two alike
    whole = sampled(model, prompts)
    monkeypatch.setattr(fast_sampling, "PROMPT_TOKENS", 60)
    watch(monkeypatch, fast.Prompts, "__init__", lambda _, model, prompts: parts.append(prompts))
    out = sampled(model, prompts)
    assert torch.equal(out.tokens, whole.tokens)
    read = [list(prompt) for part in parts[1:] for prompt in part]  # the first is a probe
    assert read == prompts
    assert all(len(part) * max(map(len, part)) <= 60 for part in parts) and len(parts) > 4


def test_uniforms_alone_decide_whoever_samples_and_no_global_state_moves(way):
    """All prompts at once, or a share of them with its share of the uniforms."""
    model, uniforms = tiny(), random_numbers(4, 3, 16)
    state = torch.get_rng_state()
    ends = dict(eos_ids=[2], pad_id=2)
    whole = R.generate(model, PROMPTS, uniforms, **ends)
    shares = [R.generate(model, PROMPTS[i::2], uniforms[i::2], **ends) for i in (0, 1)]
    for i, share in enumerate(shares):
        texts = [text for group in range(i, 4, 2) for text in whole.sequences()[3 * group :][:3]]
        assert share.sequences() == texts
    assert torch.equal(state, torch.get_rng_state())
    assert sampled(model, seed=1).sequences() != whole.sequences()


def test_samples_of_a_group_differ_at_the_first_token_and_repeated_prompts_stay_apart(way):
    out = sampled(tiny(), [PROMPTS[0], PROMPTS[0]], group_size=16)
    firsts = out.completions[:, 0].view(2, 16)
    assert all(len(set(row.tolist())) > 3 for row in firsts) and not torch.equal(*firsts)


def test_every_stepped_row_is_active_and_a_prompt_is_read_once_for_its_group(quick, monkeypatch):
    read, row_steps = [], []
    watch(monkeypatch, fast.Slots, "decode_one_token", lambda _, rows, span: row_steps.append(rows))
    watch(monkeypatch, fast.Prompts, "__init__", lambda _, model, prompts: read.append(prompts))
    out = sampled(tiny(), max_new_tokens=40, group_size=8)
    assert sum(row_steps) == out.lengths.sum()
    assert [[list(prompt) for prompt in part] for part in read] == [PROMPTS[:1], PROMPTS]


def test_one_new_token_and_one_token_prompts(way):
    out = sampled(tiny(), [[5], [6]], max_new_tokens=1)
    assert out.tokens.shape == (6, 2) and out.lengths.tolist() == [1] * 6
    scored, _ = R.completion_logprobs(tiny(), out, 1.0)
    torch.testing.assert_close(scored.detach(), out.sampler_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("bias, lengths", [(50.0, [1] * 12), (-50.0, [16] * 12)])
def test_all_rows_ending_at_once_and_none_ending(bias, lengths, way):
    """A bias of ±50 on the end token, which is also the pad token."""
    model = tiny("phi")
    model.lm_head.bias.data[2] += bias
    out = sampled(model, cache_gb=3e-5)
    assert out.lengths.tolist() == lengths
    assert out.truncated.tolist() == [bias < 0] * 12
    assert out.completion_mask.sum(1).tolist() == lengths


def test_the_end_token_stays_in_the_mask_when_it_is_the_pad_token(way):
    out = sampled(tiny(), group_size=8, max_new_tokens=40)
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert 0 < out.truncated.sum() < 32
    assert torch.equal(last == 2, ~out.truncated)
    assert torch.equal(out.completion_mask.sum(1), out.lengths)
    for row, n in zip(out.completions, out.lengths):
        assert 2 not in row[: n - 1] and (row[n:] == 2).all()


def test_the_model_is_left_as_it_was_also_after_an_error(way):
    model = tiny("gpt2")
    out = sampled(model)
    before = model.config.to_dict()

    def fail(module, inputs):
        raise RuntimeError("stopped")

    hook = model.transformer.h[0].register_forward_pre_hook(fail)
    for work in (lambda: R.completion_logprobs(model, out, 1.0), lambda: sampled(model)):
        with pytest.raises(RuntimeError, match="stopped"):
            work()
    hook.remove()
    assert model.config.to_dict() == before and model.config._attn_implementation == "eager"
    assert not hasattr(model.config, "layout") and torch.equal(sampled(model).tokens, out.tokens)


@pytest.fixture
def taped(quick, monkeypatch):
    """The pace of a GPU, and graphs that record operations. Yield a count of their replays."""
    modes = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", pretend.Graph)
    monkeypatch.setattr(torch.cuda, "graph", pretend.capturing)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setitem(fast.PACE, "cpu", fast.Pace(span=2, steps=3, rows=4, graphs=True))
    monkeypatch.setitem(pretend.COUNTS, "replays", 0)
    yield lambda: pretend.COUNTS["replays"]
    assert modes == ["error", "default"] * (len(modes) // 2)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("qwen3", {}),
        ("gemma2", dict(cache_gb=5e-5, temperature=0.7)),
        ("deepseek_v3", dict(cache_gb=5e-5)),
        ("gpt_oss", dict(temperature=0.0, eos_ids=[])),
    ],
    ids=str,
)
def test_captured_steps_sample_what_eager_ones_do(kind, options, taped, monkeypatch):
    """A captured step is replayed on later contents of the slots, dead slots among them."""
    model, shapes = tiny(kind), []
    watch(monkeypatch, fast.Slots, "decode_one_token", lambda slots, *shape: shapes.append(shape))
    out = sampled(model, **options)
    assert len(shapes) < 2 * taped()
    assert shapes[::2] == shapes[1::2]  # each shape once in earnest, then once on the tape
    replays = taped()
    monkeypatch.setitem(fast.PACE, "cpu", fast.Pace(span=32, steps=1, rows=1))
    same = sampled(model, **options)
    assert torch.equal(out.tokens, same.tokens) and taped() == replays
    assert torch.equal(out.lengths, same.lengths) and torch.equal(out.truncated, same.truncated)
    torch.testing.assert_close(out.sampler_logprobs, same.sampler_logprobs, atol=1e-5, rtol=0)


def test_a_step_that_cannot_be_captured_runs_as_it_is(taped):
    """A model that reads a value, as no capture may: one warning, and the same completions."""
    model = tiny()
    expected = sampled(model)
    replays = taped()
    assert replays
    model.lm_head.register_forward_pre_hook(lambda _, given: print(end="" * given[0].argmax()))
    with pytest.warns(UserWarning, match="sampling without CUDA graphs: .*not permitted") as warned:
        warnings.simplefilter("default")
        out = sampled(model)
    assert taped() == replays and len(warned) == 1 and torch.equal(out.tokens, expected.tokens)


def test_memory_that_runs_out_in_a_capture_is_no_capture_that_failed(taped, monkeypatch):
    """It goes on to the caller, who says which flags help. There is no warning."""

    def full(*_):
        if pretend.CAPTURES:
            raise torch.OutOfMemoryError("CUDA out of memory")

    watch(monkeypatch, fast.Slots, "decode_one_token", full)
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError):
        warnings.simplefilter("error")
        sampled(tiny())


def test_most_of_what_is_free_on_a_gpu_is_for_keys_and_values(monkeypatch):
    """0.8 of 10 GB that are free, 3 of them in PyTorch's cache. Of this machine half."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7e9, 20e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8e9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5e9)
    assert R.free_gb(torch.device("cuda")) == pytest.approx(8.0)
    bytes_here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert R.free_gb(torch.device("cpu")) == pytest.approx(0.5e-9 * bytes_here)


def test_grouped_heads_never_meet_a_mask_where_that_is_slow(monkeypatch, quick):
    """As if on a GPU: shared heads are expanded, and the results and gradients stay."""
    seen, results = [], []

    def note(*_, attn_mask=None, enable_gqa=False, **options):
        seen.append(enable_gqa and attn_mask is not None)

    watch(monkeypatch, R.F, "scaled_dot_product_attention", note)
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(fast_scoring, "EXPAND_HEADS", devices)
        model = tiny()
        logprobs, _ = R.completion_logprobs(model, sampled(model), 1.0)
        logprobs.sum().backward()
        results.append([logprobs.detach(), *gradients(model)])
        assert any(seen) == (not devices)
        seen.clear()
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# ---- rollouts


def test_rows_and_joined_rollouts_keep_every_token(way):
    """A tool's tokens, here some of them, stay in the text and out of the mask."""
    model = tiny()
    first, second = sampled(model), sampled(model, [[9] * 12], max_new_tokens=30, seed=1)
    first.completion_mask[[1, 3], [1, 0]] = False
    assert first[[3, 0]].sequences() == [first.sequences()[3], first.sequences()[0]]
    assert torch.equal(first[torch.tensor([3, 0])].tokens, first[[3, 0]].tokens)

    both = R.Rollout.cat([first, second], pad_id=7)
    assert both.prompt_width == 12 and both.tokens[0, 0] == 7
    assert both.sequences() == first.sequences() + second.sequences()
    scores, _ = R.completion_logprobs(model, both, 1.0)
    for part, rows in ((first, slice(0, 12)), (second, slice(12, 15))):
        assert torch.equal(both.truncated[rows], part.truncated)
        own, _ = R.completion_logprobs(model, part, 1.0)
        columns = [(scores, own), (both.sampler_logprobs, part.sampler_logprobs)]
        for joined, column in [*columns, (both.completion_mask, part.completion_mask)]:
            expected = torch.zeros_like(joined[rows])
            expected[:, : column.shape[1]] = column
            torch.testing.assert_close(joined[rows], expected, atol=1e-5, rtol=0)


def test_what_a_tool_wrote_is_read_and_not_scored(way):
    """Values and gradients of the tokens that the policy wrote, within the whole text."""
    model = tiny("gemma2")
    out = sampled(model)
    mask = out.completion_mask & (random_numbers(*out.completion_mask.shape) < 0.6)
    results = []
    for one in (out, out._replace(completion_mask=mask)):
        logprobs, entropy = R.completion_logprobs(model, one, 1.0)
        wanted = torch.where(mask, logprobs + entropy, 0.0)
        wanted.sum().backward()
        results.append([wanted.detach(), *gradients(model)])
    assert not logprobs[~mask].any() and not entropy[~mask].any()
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def rollout_of(groups, forced=0.0):
    """Return a rollout of pairs (prompt, completions). Padding is any token, and a fraction of the
    completions' tokens is not the policy's own."""
    rows = [(prompt, completion) for prompt, group in groups for completion in group]
    width, longest = [max(map(len, column)) for column in zip(*rows)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (len(rows), width + longest), generator=generator)
    for line, (prompt, completion) in zip(tokens, rows):
        text = torch.tensor([*prompt, *completion])
        line[width - len(prompt) : width + len(completion)] = text
    lengths = torch.tensor([len(completion) for _, completion in rows])
    mask = torch.arange(longest) < lengths[:, None]
    return R.Rollout(
        tokens=tokens,
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
        lengths=lengths,
        completion_mask=mask & (torch.rand(mask.shape, generator=generator) >= forced),
        sampler_logprobs=torch.zeros(len(rows), longest),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
    )


def by_length(lengths, prompt=1):
    """Return a rollout of completions of such lengths, all of the same prompt."""
    return rollout_of([([5] * prompt, [[5] * length for length in lengths])])


def test_plain_micro_batches_are_by_length_under_the_budget_with_their_padding():
    """A row that fills the budget alone, and 23 of 11 tokens, nine of which fit in a part."""
    out = by_length([100] + [10] * 23)
    parts = R.micro_batches(out, 101)
    assert [len(part) for part in parts] == [1, 9, 9, 5]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(24))
    out = by_length([5, 1, 9, 3])
    assert [part.tolist() for part in R.micro_batches(out, 20)] == [[0, 2], [1, 3]]
    assert len(R.micro_batches(out, 1)) == 4
    # every prompt counts: four times 9 + 1, and not 9 + 4
    parts = R.micro_batches(by_length([1] * 4, prompt=9), 20)
    assert [len(part) for part in parts] == [2, 2]


# ---- scoring


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "mamba"])
def test_gradient_checkpointing_changes_nothing(kind, way):
    """Layers run again in the backward pass, when our attention has been left. Dropout stays out,
    and a copy is checkpointed, too."""
    dropout = {"gemma2": dict(attention_dropout=0.5), "gpt2": dict(resid_pdrop=0.5)}
    model = tiny(kind, **dropout.get(kind, {}))
    out = sampled(model)
    runs, results = [], []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: runs.append(1))

    def scored(model):
        runs.clear()
        logprobs, entropy = R.completion_logprobs(model, out, 1.0)
        (logprobs.sum() + entropy.sum()).backward()
        results.append([logprobs.detach(), *gradients(model)])
        return len(runs)

    assert scored(model) == 1
    checkpoint_layers(model, [fast.attention_now])
    assert scored(model) == 2  # forward, and again in the backward pass
    assert torch.equal(sampled(model).tokens, out.tokens)
    scored(frozen_copy(model, torch.float32).requires_grad_(True))
    assert not gradients(model)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_model_without_layers_for_checkpointing_is_refused():
    with pytest.raises(UserError, match="--gradient-checkpointing: a ctrl has no layers for it"):
        checkpoint_layers(build("ctrl"), [])


def test_the_head_never_holds_more_logits_than_a_chunk(monkeypatch):
    """2,000 tokens of a vocabulary of 400, 655 at a time. The backward pass computes those of all
    chunks but the last again. The gradients are those of the whole at once."""
    assert R.LOGITS_AT_ONCE <= 2**26  # float32: 256 MB
    monkeypatch.setattr(R, "LOGITS_AT_ONCE", 2**18)
    model = tiny(vocab_size=400)
    out = by_length([100] * 20, prompt=4)
    tokens = torch.randint(3, 400, (20, 104), generator=torch.Generator().manual_seed(0))
    out, sizes = out._replace(tokens=tokens), []
    model.lm_head.register_forward_hook(lambda *given: sizes.append(given[2].numel()))
    logprobs, entropy = R.completion_logprobs(model, out, 1.0)
    assert len(sizes) == 4 and sum(sizes) == 2000 * 400
    (logprobs.sum() + entropy.sum()).backward()
    assert len(sizes) == 7 and max(sizes) <= 2**18
    found = gradients(model)
    own, entropies = map(torch.cat, zip(*own_logprobs(model, out)))
    torch.testing.assert_close(logprobs.flatten(), own, atol=1e-5, rtol=1e-5)
    (own.sum() + entropies.sum()).backward()
    for one, other in zip(found, gradients(model)):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


def test_entropies_without_a_gradient_leave_that_of_the_log_probs():
    """And their values: only the backward pass through the entropies is skipped."""
    model = tiny(vocab_size=50)
    out, found = sampled(model), []
    for entropy_grad in (True, False):
        logprobs, entropy = R.completion_logprobs(model, out, 0.7, entropy_grad=entropy_grad)
        logprobs.sum().backward(retain_graph=True)
        found.append([entropy, *gradients(model)])
        entropy.sum().backward()
        assert any(gradient.any() for gradient in gradients(model)) == entropy_grad
    assert all(map(torch.equal, *found))
    again, nothing = R.completion_logprobs(model, out, 0.7, entropy_grad=None)
    assert torch.equal(again, logprobs) and not nothing.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_softmax_comes_from_float32_logits(dtype):
    """Under autocast, and of a copy in bf16: its hidden states through a float32 head. The results
    are bit-identical with and without gradients."""
    model = frozen_copy(tiny(attention="sdpa"), dtype)
    out = sampled(model)
    seen = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        logprobs, entropy = R.completion_logprobs(model, out, 1.0)
        with torch.no_grad():
            assert torch.equal(logprobs, R.completion_logprobs(model, out, 1.0)[0])
    row, step = out.completion_mask.nonzero(as_tuple=True)
    hidden = seen[0][row, out.prompt_lengths[row] + step - 1].float()
    logp = (hidden @ model.lm_head.weight.float().T).log_softmax(-1)
    expected = logp.gather(1, out.completions[out.completion_mask][:, None])[:, 0]
    torch.testing.assert_close(logprobs[out.completion_mask], expected, atol=1e-6, rtol=0)
    expected = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(entropy[out.completion_mask], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_under_autocast_experts_are_computed_in_bf16(kind, tmp_path, monkeypatch, quick):
    """As every other linear map: in values and gradients it is rounding, and it saves time and
    memory on a GPU. Without autocast, and with gradient checkpointing, nothing changes."""
    tiny(kind).save_pretrained(tmp_path)
    model, dtypes = R.load_model(str(tmp_path), "cpu"), []
    out = sampled(model)
    exact, _ = R.completion_logprobs(model, out, 1.0)
    assert torch.equal(exact, R.completion_logprobs(tiny(kind), out, 1.0)[0])

    def note(states, weights, **_):
        dtypes.extend([states.dtype, weights.dtype])

    watch(monkeypatch, torch.nn.functional, "grouped_mm", note)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model, [fast.attention_now])
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = R.completion_logprobs(model, out, 1.0)
        logprobs.sum().backward()
        found.append(gradients(model))
        assert (logprobs - exact).abs().mean() < 0.1
    assert set(dtypes) == {torch.bfloat16}
    assert all(map(torch.equal, *found))
    assert all(gradient.dtype == torch.float32 for gradient in found[0])


def test_a_bf16_sampler_is_frozen_and_refreshed_in_place():
    policy = tiny(seed=1, tie_word_embeddings=True)
    sampler = frozen_copy(policy, torch.bfloat16)
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in sampler.parameters())
    assert sampler.model.rotary_emb.inv_freq.dtype == torch.float32
    assert sampler.lm_head.weight is sampler.model.embed_tokens.weight
    assert next(policy.parameters()).dtype == torch.float32
    places = [p.data_ptr() for p in sampler.parameters()]
    for parameter in policy.parameters():
        parameter.data += 1
    refresh(sampler, policy)
    assert [p.data_ptr() for p in sampler.parameters()] == places
    for a, b in zip(sampler.parameters(), policy.parameters()):
        assert torch.equal(a, b.to(torch.bfloat16))
    assert sampled(sampler).sampler_logprobs.dtype == torch.float32


def test_a_critic_begins_at_zero_and_reads_the_state_before_each_token(way):
    """By hand: weights . hidden state + bias, of a forward pass of each text alone."""
    policy = tiny()
    out = sampled(policy)
    critic = critic_of(policy)
    assert not R.completion_values(critic, out).any()
    critic.value.data = torch.randn(33, generator=torch.Generator().manual_seed(0))
    values = R.completion_values(critic, out)
    assert not values[~out.completion_mask].any()
    for row, text, size in zip(values, out.sequences(), out.prompt_lengths):
        with torch.no_grad():
            hidden = policy.model(torch.tensor([text]), use_cache=False)[0][0, size - 1 : -1]
        expected = hidden @ critic.value[:-1] + critic.value[-1]
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=1e-5)


# ---- models, and the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = tiny(vocab_size=18, eos_token_id=1)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def command(capsys):
    """command(arguments...) -> its status and output. It shows no progress bar in a pipe."""

    def run(*arguments):
        transformers.utils.logging.enable_progress_bar()
        status = R.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_completions(folder, command, monkeypatch):
    flags = "--prompt 1+2= --samples 3 --max-new-tokens 24 --device cpu"
    first, same, other = [
        command("--model", folder, *flags.split(), "--seed", seed) for seed in (0, 0, 1)
    ]
    assert first == same != other
    status, text, errors = first
    assert status == 0 and errors == "" and text.count("\n") >= 3
    hostile = "a\x1b[31mb\nc"  # escape sequences do not reach the terminal
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "decode", lambda *_, **__: hostile)
    _, text, _ = command("--model", folder, *flags.split())
    assert text == 3 * "a\\x1b[31mb\nc\n"


WRONG_FLAGS = {
    "--prompt " + 130 * "1": "138 tokens, prompt and completion: this qwen3 reads 128",
    "--prompt-template \udc80": "--prompt-template",
    "--system Hi": "the model has no chat template",
    "--temperature -1": "--temperature -1.0: expected at least 0",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_a_wrong_flag_is_one_sentence_and_status_2(flags, folder, command):
    default = ["--model", folder, "--prompt", "1+2=", "--max-new-tokens", "8"]
    status, out, error = command(*default, *flags.split())
    assert status == 2 and out == "" and error.count("\n") == 1
    assert WRONG_FLAGS[flags] in error


def config(**fields):
    def change(copy):
        path = copy / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def without_tokenizer(copy):
    for path in copy.glob("*token*"):
        path.unlink()


def in_a_run(copy):
    (copy / "checkpoints").mkdir()


def pickled(copy):
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()


def without_a_layer(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})


def broken_off(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


ENCODER = dict(model_type="bert", architectures=["BertForMaskedLM"])
MISSING = "1 are missing or have other shapes, model.layers.1.mlp.up_proj.weight among"


@pytest.mark.parametrize(
    "change, words",
    [
        (shutil.rmtree, "there is no such folder"),  # no hub is asked
        (without_tokenizer, "a tokenizer with an end token"),
        (in_a_run, "it is a run's folder"),
        (pickled, "safetensors"),
        (config(**ENCODER), "expected a causal language model, found BertForMaskedLM"),
        (without_a_layer, MISSING),
        (config(intermediate_size=80), "layers.0.mlp.down_proj.weight"),
        (broken_off, "--model"),
    ],
)
def test_a_wrong_model_is_one_sentence(change, words, folder, tmp_path, command):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    change(copy)
    status, out, error = command("--model", copy, "--prompt", "1+2=")
    assert status == 2 and out == "" and error.count("\n") == 1
    assert error.startswith("error: --model") and words in error


def test_a_loaded_model_is_the_saved_one_without_dropout(folder):
    model = R.load_model(str(folder), "cpu")
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])
    assert not model.training and model.lm_head.weight.dtype == torch.float32


def test_ends_are_the_tokenizers_and_the_generation_configs(folder):
    model, tokenizer = R.load_model(str(folder), "cpu"), R.inspect_model(str(folder))[0]
    assert R.end_and_pad_ids(model, tokenizer) == dict(eos_ids=[1], pad_id=0)
    model.generation_config.eos_token_id, tokenizer.pad_token = [5, 4], None
    assert R.end_and_pad_ids(model, tokenizer) == dict(eos_ids=[1, 4, 5], pad_id=1)


# ---- GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_bf16_sampler_and_the_scorer_agree(way):
    policy = tiny(attention="sdpa").cuda()
    out = sampled(frozen_copy(policy, torch.bfloat16), group_size=32, max_new_tokens=60)
    with torch.autocast("cuda", torch.bfloat16):
        scored, _ = R.completion_logprobs(policy, out, 1.0)
        with torch.no_grad():
            assert torch.equal(scored, R.completion_logprobs(policy, out, 1.0)[0])
    gap = (scored.detach() - out.sampler_logprobs)[out.completion_mask]
    assert gap.abs().mean() < 0.02 and math.isfinite(gap.sum().item())
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert torch.equal(last == 2, ~out.truncated)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, dict(cache_gb=4e-4, temperature=0.7)], ids=str)
def test_on_a_gpu_captured_steps_sample_what_eager_ones_do(options, monkeypatch):
    """No warning: there are graphs. Rounding may differ where rows do, and with it a few tokens."""
    model = tiny(attention="sdpa").cuda()
    options |= dict(group_size=32, max_new_tokens=100, generate=fast.generate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        out = sampled(model, **options)
    monkeypatch.setattr(fast_sampling, "capture", lambda step, shape: None)
    same = sampled(model, **options)
    equal = [a == b for a, b in zip(out.sequences(), same.sequences())]
    assert sum(equal) / len(equal) > 0.98


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_capture_that_breaks_off_leaves_no_trace():
    """A model that reads a value: its completions, and memory and random numbers as before."""
    model = tiny(attention="sdpa").cuda()
    expected = sampled(model, generate=fast.generate)
    model.lm_head.register_forward_pre_hook(lambda _, given: print(end="" * given[0].argmax()))
    with pytest.warns(UserWarning, match="sampling without CUDA graphs"):
        out = sampled(model, generate=fast.generate)
    assert torch.equal(out.tokens, expected.tokens)
    held = torch.zeros(2**28, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 2**30
    assert torch.rand(9, device="cuda").max() < 1
