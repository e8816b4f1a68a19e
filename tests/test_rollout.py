"""Sampling and scoring against transformers' own forward pass and `generate`, on tiny
random models.

Models that share prefixes are scored in both layouts: rows and trees."""

import math
import os

import pytest
import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

import rollout as R
from bench_architectures import build, examine, trees_of
from support.errors import UserError
from support.models import configure_torch, critic_of, frozen_copy
from tools import character_tokenizer, watched

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
# no sdpa, or no position_ids
ROWS_ONLY = {"gemma2", "gpt_oss", "trocr", "mamba"}
WITH_TREES = [kind for kind in KINDS if kind not in ROWS_ONLY]
LAYOUTS = [(kind, False) for kind in KINDS] + [(kind, True) for kind in WITH_TREES]
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


def layout(out, wants_trees, width=24):
    """Return trees in several rows, or None for a row a text."""
    return trees_of(out, width) if wants_trees else None


def gradients(model):
    """Of all parameters that have one. They are gone afterwards."""
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


# ---- parity with transformers


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_completions_are_those_of_transformers_generate(kind):
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


def test_an_end_as_the_last_token_that_is_allowed_is_no_truncation():
    model = tiny()
    free = sampled(model, eos_ids=[], max_new_tokens=4)
    assert free.truncated.all()
    row = next(i for i, ids in enumerate(free.completions.tolist()) if ids[3] not in ids[:3])
    ended = sampled(model, eos_ids=[int(free.completions[row, 3])], max_new_tokens=4)
    assert ended.lengths[row] == 4 and not ended.truncated[row]


@pytest.mark.parametrize("kind, wants_trees", LAYOUTS)
def test_scores_are_the_models_own_in_value_and_gradient(kind, wants_trees):
    """Against a forward pass for each row. So are the sampler's. Scores are bit-identical with and
    without gradients."""
    model = tiny(kind)
    assert R.shares_prefixes(model) == (kind in WITH_TREES)
    out = sampled(model, temperature=0.7)
    trees = layout(out, wants_trees)
    scored, entropy = R.completion_logprobs(model, out, 0.7, trees)
    assert scored.dtype == entropy.dtype == torch.float32 and scored.shape == out.completions.shape
    torch.testing.assert_close(scored.detach(), out.sampler_logprobs, atol=2e-5, rtol=0)
    assert not scored[~out.completion_mask].any() and not entropy[~out.completion_mask].any()
    with torch.no_grad():
        again = R.completion_logprobs(model, out, 0.7, trees)
    assert all(map(torch.equal, again, (scored, entropy)))

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


BOTH, ROWS = "rows and trees; checkpointed", "rows; checkpointed"
SHORTER = "rows and trees, up to the original context; checkpointed"
ARCHITECTURES = {
    "falcon_h1": ROWS,  # the head multiplies
    "xglm": ROWS,  # a body within the body
    "gemma3": BOTH,  # a composite model, with windows in some layers
    "gemma2": ROWS,  # no sdpa
    "qwen3_next": ROWS,  # states
    "doge": "rows and trees, up to the original context; checkpointed",
    "llama4_text": ROWS,  # something changes with the length of a text
    "ministral3": BOTH,
    "llama + dynamic": SHORTER,
    "phi3 + longrope": SHORTER,
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures_are_sampled_and_scored_as_their_own_forward_pass_does(kind):
    """Sampler, scorer and whole model to 1e-3, on texts longer than every window and limit of the
    tiny model. Gradient checkpointing is bit-identical, and the backward pass runs."""
    assert examine(kind) == ("right", ARCHITECTURES[kind])


@pytest.mark.parametrize(
    "kind, words",
    [
        ("roberta", "our sampler are up to .* the roberta's own forward"),
        ("modernbert-decoder", "our scorer are up to"),  # the head has layers of its own
        ("rwkv", "a rwkv does not use transformers' KV cache"),
    ],
)
def test_a_model_that_we_would_read_otherwise_is_refused(kind, words):
    with pytest.raises(UserError, match=words):
        R.check_scorer(build(kind), PROMPTS[:2], pad_id=0)


def test_a_scorer_that_errs_is_found_and_trees_that_err_are_not_used(monkeypatch):
    model = tiny("gemma2")
    assert not R.check_scorer(model, PROMPTS[:2], pad_id=0)
    assert R.check_scorer(tiny(), PROMPTS[:2], pad_id=0)
    with monkeypatch.context() as patch:  # a node sees all that stands before it in its row
        patch.setattr(R.Trees, "visible", lambda trees, _: trees.end[:, None] > -1)
        assert not R.check_scorer(tiny(), PROMPTS[:2], pad_id=0)
    logits = R.logits_of
    for factor in (1.01, math.nan):
        monkeypatch.setattr(R, "logits_of", lambda *given: factor * logits(*given))  # noqa: B023
        with pytest.raises(UserError, match="log-probs of our scorer .* the gemma2's own forward"):
            R.check_scorer(model, PROMPTS[:2], pad_id=0)


def test_a_text_beyond_the_context_is_refused():
    assert len(sampled(tiny(), max_new_tokens=119).tokens)
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
    # the sum of 151,936 terms: 1.4e-5 off on some CPUs
    torch.testing.assert_close(logprobs, exact[tokens].log().float(), atol=2e-5, rtol=0)


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
def test_completions_do_not_depend_on_the_number_of_slots(kind, cache_gb):
    """One slot, a few. Rows are stepped in another order, and end where they did."""
    model = tiny(kind)
    whole = sampled(model, group_size=7, max_new_tokens=12)
    other = sampled(model, group_size=7, max_new_tokens=12, cache_gb=cache_gb)
    assert len(set(whole.lengths.tolist())) > 3
    assert torch.equal(whole.tokens, other.tokens)
    assert torch.equal(whole.truncated, other.truncated)
    torch.testing.assert_close(whole.sampler_logprobs, other.sampler_logprobs, atol=2e-5, rtol=0)


def test_uniforms_alone_decide_whoever_samples_and_no_global_state_moves():
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


def test_the_end_token_stays_in_the_mask_when_it_is_the_pad_token():
    out = sampled(tiny(), group_size=8, max_new_tokens=40)
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert 0 < out.truncated.sum() < 32
    assert torch.equal(last == 2, ~out.truncated)
    assert torch.equal(out.completion_mask.sum(1), out.lengths)
    for row, n in zip(out.completions, out.lengths):
        assert 2 not in row[: n - 1] and (row[n:] == 2).all()


def test_most_of_what_is_free_on_a_gpu_is_for_keys_and_values(monkeypatch, tmp_path):
    """0.8 of 10 GB that are free, 3 of them in PyTorch's cache. Of this machine, or of the memory
    that a container may use, half."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7e9, 20e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8e9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5e9)
    assert R.free_gb(torch.device("cuda")) == pytest.approx(8.0)
    bytes_here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(R, "Path", lambda path: tmp_path / "memory.max")
    for limit, expected in (("", bytes_here), ("max", bytes_here), ("400000000", 4e8)):
        if limit:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert R.free_gb(torch.device("cpu")) == pytest.approx(0.5e-9 * expected)


# ---- rollouts


def test_rows_and_joined_rollouts_keep_every_token():
    """A tool's tokens, here some of them, stay in the text and out of the mask."""
    model = tiny()
    first, second = sampled(model), sampled(model, [[9] * 12], max_new_tokens=30, seed=1)
    first.completion_mask[[1, 3], [1, 0]] = False
    assert first.select([3, 0]).sequences() == [first.sequences()[3], first.sequences()[0]]
    both = R.Rollout.cat([first, second], pad_id=7)
    assert both.prompt_width == 12 and both.tokens[0, 0] == 7
    assert both.sequences() == first.sequences() + second.sequences()
    assert both.truncated.tolist() == first.truncated.tolist() + second.truncated.tolist()
    assert not both.completion_mask[[1, 3], [1, 0]].any()
    assert both.completion_mask.sum() == both.lengths.sum() - 2
    scores, _ = R.completion_logprobs(model, both, 1.0)
    expected = both.sampler_logprobs * both.completion_mask
    torch.testing.assert_close(scores.detach(), expected, atol=2e-5, rtol=0)


def rollout_of(groups, forced=0.0):
    """Return a rollout of pairs (prompt, completions), of which a fraction of the completions'
    tokens is not the policy's own."""
    rows = [(prompt, completion) for prompt, group in groups for completion in group]
    prompts, completions = [list(column) for column in zip(*rows)]
    lengths = torch.tensor([len(completion) for completion in completions])
    tokens, ended = R.padded(completions, "cpu"), lengths > 0
    made = R.Rollout.of(prompts, tokens, torch.zeros(tokens.shape), lengths, ended, pad_id=0)
    chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) >= forced
    return made._replace(completion_mask=made.completion_mask & chosen)


def by_length(lengths, prompt=1):
    """Return a rollout of completions of such lengths, all of the same prompt."""
    return rollout_of([([5] * prompt, [[5] * length for length in lengths])])


# ---- micro-batches and trees


def micro_batches(out, tokens, shares):
    """Those of all rows of a rollout."""
    return R.micro_batches(out, torch.arange(len(out.tokens)), tokens, shares)


def test_micro_batches_of_rows_are_by_length_under_the_budget_with_their_padding():
    """A row that fills the budget alone, and 23 of 11 tokens, nine of which fit in a part."""

    def parts(out, tokens):
        return [part.rows.tolist() for part in micro_batches(out, tokens, shares=False)]

    out = by_length([100] + [10] * 23)
    assert [len(part) for part in parts(out, 101)] == [1, 9, 9, 5]
    assert sorted(sum(parts(out, 101), [])) == list(range(24))
    out = by_length([5, 1, 9, 3])
    assert parts(out, 20) == [[2, 0], [3, 1]]
    assert len(parts(out, 1)) == 4
    # every prompt counts: four times 9 + 1, and not 9 + 4
    assert [len(part) for part in parts(by_length([1] * 4, prompt=9), 20)] == [2, 2]
    assert parts(out.select([]), 100) == []


P, Q = [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]
C, D = [20, 21, 22, 23, 24, 25, 26, 27], [30, 31, 32]
CASES = {
    "identical": [(P, [C, C, C]), (Q, [C, C])],
    "prefixes of each other": [(P, [C, C[:3], C[:1], C[:7], C + D])],
    "one-token prompts": [([3], [C, D]), ([3], [D, C[:5]]), ([4], [C, C[:2]])],
    "one-token completions": [(P, [[1], [2], [1]]), (Q, [[2], [2]])],
    "one token each": [([1], [[5], [5]]), ([2], [[6], [7]])],
    "duplicate prompts": [(P, [C, D]), (Q, [D]), (P, [C, D, C[:2]])],
    "a prompt goes on as a completion": [(P, [C, C[:2] + D]), (P + C[:2], [C[2:], D])],
    "one row": [(Q, [C])],
    "long and short": [(P + Q + C + P, [D]), ([9], [C + D + C + C, D])],
}


def scores(model, out, trees):
    """Values, entropies, and gradients of a sum with a weight of its own for each."""
    logprobs, entropy = R.completion_logprobs(model, out, 0.7, trees)
    weights = torch.linspace(0.5, 1.5, logprobs.numel()).view_as(logprobs)
    (weights * (logprobs + 0.3 * entropy)).sum().backward()
    return [logprobs.detach(), entropy.detach(), *gradients(model)]


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_trees_have_the_scores_and_gradients_of_rows(kind):
    """A text a row, several, all in one. Windows of 6 tokens, experts, shared heads. Every other
    case has tokens that are not the policy's own. Under autocast the mask has another dtype: bf16
    rounds both layouts. Padding that saw no token would make NaN."""
    model = tiny(kind)
    for i, (name, groups) in enumerate(CASES.items()):
        out = rollout_of(groups, forced=0.4 * (i % 2))
        by_rows = scores(model, out, None)
        scale = max(1.0, *[float(each.abs().max()) for each in by_rows])
        for width in (1, 20, 200):
            by_trees = scores(model, out, trees_of(out, width))
            for one, other in zip(by_trees, by_rows, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=0, msg=name)
        with torch.autocast("cpu", torch.bfloat16):
            by_trees, _ = R.completion_logprobs(model, out, 0.7, trees_of(out, 20))
            with torch.no_grad():
                again, _ = R.completion_logprobs(model, out, 0.7, trees_of(out, 20))
        assert torch.equal(by_trees, again), name
        if kind != "qwen3_moe":  # rounding changes experts
            assert (by_trees - by_rows[0]).abs().mean() < 0.1, name


def random_groups(groups, size, prompt, longest, seed=0):
    """Completions of random tokens: a group shares its prompt alone."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(3, 40, (count,), generator=draw).tolist()

    lengths = torch.randint(longest // 2, longest + 1, (groups, size), generator=draw).tolist()
    return rollout_of([(tokens(prompt), [tokens(n) for n in row]) for row in lengths])


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("tokens", [1, 80, 200, 1000])
def test_micro_batches_compute_no_more_tokens_than_they_may(shares, tokens, monkeypatch):
    """Padding included, or one row. Together they are all completions, with their log-probs."""
    model, rows = tiny("gemma3_text"), []
    out = random_groups(6, 8, prompt=40, longest=10)
    whole, _ = R.completion_logprobs(model, out, 1.0)
    passes = watched(monkeypatch, model.model, "forward")
    for part in micro_batches(out, tokens, shares):
        logprobs, _ = R.completion_logprobs(model, part.rollout, 1.0, part.trees)
        torch.testing.assert_close(logprobs, whole[part.rows], atol=1e-5, rtol=0)
        rows += part.rows.tolist()
        assert (part.trees is not None) == (shares and tokens > 1)
    assert sorted(rows) == list(range(48))
    for (ids, *_), _, _ in passes:
        assert ids.numel() <= tokens or tokens == len(ids) == 1


def test_groups_stay_together_but_at_borders_and_rows_of_trees_are_of_one_size():
    """16 groups of about 105 nodes, in micro-batches of 256, then in two rows."""
    out = random_groups(16, 8, prompt=40, longest=10)
    parts = micro_batches(out, 256, shares=True)
    places = {(row // 8, i) for i, part in enumerate(parts) for row in part.rows.tolist()}
    assert len(parts) == 7 and len(places) <= 16 + 7 - 1
    [part] = micro_batches(out, 10_000, shares=True)
    used = part.trees.positions.count_nonzero(1) + 1
    assert len(used) == 2 and used.min() > 0.8 * used.max()


def test_trees_are_used_where_they_save_enough_and_their_mask_costs_less():
    """Groups, completions of each, tokens of a prompt and a completion."""
    for sizes, expected in (
        ((4, 8, 100, 20), True),
        ((4, 8, 10, 200), False),  # 10 of 200 tokens are shared
        ((8, 1, 100, 20), False),  # nothing is
        ((1, 8, 200, 4000), False),  # long completions
        ((1, 8, 4000, 4000), False),  # half of them is shared, and the mask would be 36,000 wide
        ((1, 64, 1500, 100), True),
    ):
        out = random_groups(*sizes)
        parts = micro_batches(out, 10**6, shares=True)
        assert all((part.trees is not None) == expected for part in parts), sizes
        assert all(part.trees is None for part in micro_batches(out, 10**6, shares=False))


@pytest.mark.parametrize("kind, masks_of_a_pass", [("qwen3", 1), ("gemma3_text", 2)])
def test_attention_gets_no_mask_for_rows_and_one_of_its_dtype_for_trees(
    kind, masks_of_a_pass, monkeypatch
):
    """One tensor for all layers of a kind. Its rows are a multiple of 8 numbers. (Windows of rows
    need the library's own mask.)"""
    model, out = tiny(kind), rollout_of(CASES["duplicate prompts"])
    calls = watched(monkeypatch, torch.nn.functional, "scaled_dot_product_attention")
    R.completion_logprobs(model, out, 1.0)
    masks = [options["attn_mask"] for _, options, _ in calls]
    assert masks.count(None) == {"qwen3": 2, "gemma3_text": 1}[kind]
    for dtype in (torch.float32, torch.bfloat16):
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            R.completion_logprobs(model, out, 1.0, trees_of(out, 30))
        masks = [options["attn_mask"] for _, options, _ in calls]
        assert {mask.dtype for mask in masks} == {dtype}
        assert all(mask.shape[-1] % 8 == 0 for mask in masks)
        assert all((mask == 0).any(-1).all() for mask in masks)  # padding sees itself: no NaN
        assert len({mask.data_ptr() for mask in masks}) == masks_of_a_pass


def test_long_prompts_are_read_a_few_at_a_time(monkeypatch):
    """Their activations take memory that the size of the KV cache does not count."""
    monkeypatch.setattr(R, "PROMPT_TOKENS", 20)
    parts = R.batches(tiny(), [[5] * 10] * 5, random_numbers(5, 3, 4), cache_gb=1.0)
    assert [len(part) for part in parts] == [6, 6, 3]


# ---- results of a user's sampler


def test_results_of_a_users_sampler_are_checked():
    """Each of these would train, without an error, on something else than it says."""
    from support.extras.samplers import checked

    model, uniforms = tiny(), random_numbers(4, 3, 16)
    good = R.generate(model, PROMPTS, uniforms, eos_ids=[2], pad_id=2)

    def check(samples):
        checked(lambda *_: samples)(model, PROMPTS, uniforms)

    check(good)
    tool = good.completion_mask & (random_numbers(*good.completion_mask.shape) < 0.5)
    check(good._replace(completion_mask=tool))
    full = torch.ones_like(good.completion_mask)
    unknown = good.tokens.clone()
    unknown[:, 9] = 40  # the first token of completions
    wrong = {
        "a rollout.Rollout, found tuple": tuple(good),
        "12 completions": good.select(list(range(9))),
        "in the order of the prompts": good.select(list(range(11, -1, -1))),
        "lengths of 1 to 16": good._replace(lengths=good.lengths + 9),
        "lengths of 1 to": good._replace(lengths=0 * good.lengths),
        "without padding": good._replace(completion_mask=full),
        "completion_mask": good._replace(completion_mask=good.completion_mask.float()),
        "token ids below 40": good._replace(tokens=unknown),
        "finite log-probs": good._replace(sampler_logprobs=good.sampler_logprobs + math.nan),
        "at most 0": good._replace(sampler_logprobs=good.sampler_logprobs.exp()),
        "all tensors on cpu": good._replace(lengths=good.lengths.to("meta")),
    }
    for words, samples in wrong.items():
        with pytest.raises(UserError, match="--sampler: expected .*" + words):
            check(samples)


# ---- scoring


@pytest.mark.parametrize(
    "kind, wants_trees",
    [("gemma3_text", True), ("gpt2", True), ("gpt2", False), ("mamba", False)],
)
def test_gradient_checkpointing_changes_nothing(kind, wants_trees):
    """Layers run again in the backward pass. Dropout stays out, and a copy is checkpointed, too."""
    from support.extras.recompute import checkpoint_layers

    dropout = {"gemma3_text": dict(attention_dropout=0.5), "gpt2": dict(resid_pdrop=0.5)}
    model = tiny(kind, **dropout.get(kind, {}))
    out = sampled(model)
    runs, results = [], []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: runs.append(1))

    def scored(model):
        runs.clear()
        logprobs, entropy = R.completion_logprobs(model, out, 1.0, layout(out, wants_trees))
        (logprobs.sum() + entropy.sum()).backward()
        results.append([logprobs.detach(), *gradients(model)])
        return len(runs)

    assert scored(model) == 1
    checkpoint_layers(model)
    assert scored(model) == 2  # forward, and again in the backward pass
    assert torch.equal(sampled(model).tokens, out.tokens)
    scored(frozen_copy(model, torch.float32).requires_grad_(True))
    assert not gradients(model)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_model_without_layers_for_checkpointing_is_refused():
    from support.extras.recompute import checkpoint_layers

    with pytest.raises(UserError, match="--gradient-checkpointing: a ctrl has no layers for it"):
        checkpoint_layers(build("ctrl"))


def test_the_head_never_holds_more_logits_than_a_chunk(monkeypatch):
    """2,000 tokens of a vocabulary of 400, 655 at a time. The backward pass computes those of all
    chunks but the last again. The gradients are those of the whole at once."""
    assert R.LOGITS_AT_ONCE <= 2**26  # float32: 256 MB
    monkeypatch.setattr(R, "LOGITS_AT_ONCE", 2**18)
    model = tiny(vocab_size=400)
    out = by_length([100] * 20, prompt=4)
    tokens = torch.randint(3, 400, (20, 104), generator=torch.Generator().manual_seed(0))
    out, calls = out._replace(tokens=tokens), watched(monkeypatch, R, "logits_of")
    logprobs, entropy = R.completion_logprobs(model, out, 1.0)
    assert [len(logits) for *_, logits in calls] == [655, 655, 655, 35]
    (logprobs.sum() + entropy.sum()).backward()
    assert len(calls) == 7
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
    for kind in ("gradient", "value"):
        logprobs, entropy = R.completion_logprobs(model, out, 0.7, entropy=kind)
        logprobs.sum().backward(retain_graph=True)
        found.append([entropy, *gradients(model)])
        entropy.sum().backward()
        assert any(gradient.any() for gradient in gradients(model)) == (kind == "gradient")
    assert all(map(torch.equal, *found))
    again, nothing = R.completion_logprobs(model, out, 0.7, entropy="none")
    assert torch.equal(again, logprobs) and not nothing.any()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_under_autocast_experts_are_computed_in_bf16(kind, tmp_path, monkeypatch):
    """As every other linear map: in values and gradients it is rounding, and it saves time and
    memory on a GPU. Without autocast, and with gradient checkpointing, nothing changes."""
    from support.extras.recompute import checkpoint_layers

    tiny(kind).save_pretrained(tmp_path)
    model = R.load_model(str(tmp_path), "cpu")
    out = sampled(model)
    exact, _ = R.completion_logprobs(model, out, 1.0)
    assert torch.equal(exact, R.completion_logprobs(tiny(kind), out, 1.0)[0])

    calls, found = watched(monkeypatch, torch.nn.functional, "grouped_mm"), []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_layers(model)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = R.completion_logprobs(model, out, 1.0)
        logprobs.sum().backward()
        found.append(gradients(model))
        assert (logprobs - exact).abs().mean() < 0.1
    assert {each.dtype for given, _, _ in calls for each in given} == {torch.bfloat16}
    assert all(map(torch.equal, *found))
    assert all(gradient.dtype == torch.float32 for gradient in found[0])


@pytest.mark.parametrize("wants_trees", [False, True])
def test_a_critic_begins_at_zero_and_reads_the_state_before_each_token(wants_trees):
    """By hand: weights . hidden state + bias, of a forward pass of each text alone."""
    policy = tiny()
    out = sampled(policy)
    critic, trees = critic_of(policy), layout(out, wants_trees)
    assert not R.completion_values(critic, out, trees).any()
    critic.value.data = torch.randn(33, generator=torch.Generator().manual_seed(0))
    values = R.completion_values(critic, out, trees)
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


def test_the_command_prints_completions(folder, capsys, monkeypatch):
    flags = f"--model {folder} --prompt 1+2= --samples 3 --max-new-tokens 24 --device cpu"

    def command(more=""):
        return R.main(f"{flags} {more}".split()), *capsys.readouterr()

    transformers.utils.logging.enable_progress_bar()  # a pipe shows none
    first, same, other = command("--seed 0"), command("--seed 0"), command("--seed 1")
    assert first == same != other
    status, text, errors = first
    assert status == 0 and errors == "" and text.count("\n") >= 3
    error = "error: --temperature -1.0: expected at least 0\n"
    assert command("--temperature -1") == (2, "", error)
    hostile = "a\x1b[31mb\nc"  # escape sequences do not reach the terminal
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "decode", lambda *_, **__: hostile)
    assert command()[1] == 3 * "a\\x1b[31mb\nc\n"


def test_ends_are_the_tokenizers_and_the_generation_configs(folder):
    model, tokenizer = R.load_model(str(folder), "cpu"), R.inspect_model(str(folder))[0]
    assert R.end_and_pad_ids(model, tokenizer) == dict(eos_ids=[1], pad_id=0)
    model.generation_config.eos_token_id, tokenizer.pad_token = [5, 4], None
    assert R.end_and_pad_ids(model, tokenizer) == dict(eos_ids=[1, 4, 5], pad_id=1)


# ---- GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("wants_trees", [False, True])
def test_on_a_gpu_a_bf16_sampler_and_the_scorer_agree(wants_trees):
    configure_torch()
    policy = tiny().cuda()
    out = sampled(frozen_copy(policy, torch.bfloat16), group_size=32, max_new_tokens=60)
    trees = layout(out, wants_trees, width=1024)
    with torch.autocast("cuda", torch.bfloat16):
        scored, _ = R.completion_logprobs(policy, out, 1.0, trees)
        with torch.no_grad():
            assert torch.equal(scored, R.completion_logprobs(policy, out, 1.0, trees)[0])
    gap = (scored.detach() - out.sampler_logprobs)[out.completion_mask]
    assert gap.abs().mean() < 0.02 and math.isfinite(gap.sum().item())
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert torch.equal(last == 2, ~out.truncated)
