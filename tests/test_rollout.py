"""Sampling and scoring, compared with transformers' own forward pass and `generate` on tiny random
models, in both layouts: rows and trees."""

import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

import rollout as R
from bench_architectures import build, examine, trees_of
from support.errors import UserError
from support.models import configure_torch, critic_of, frozen_copy
from tools import character_tokenizer, watched

transformers.logging.set_verbosity_error()

# sliding windows, a head with a bias, learned positions, experts, attention sinks, keys and values
# of different sizes, no position_ids (trocr), states (mamba)
KINDS = ["qwen3", "mistral", "gemma2", "gemma3_text", "phi", "gpt2", "qwen3_moe", "gpt_oss"]
KINDS += ["deepseek_v3", "trocr", "mamba"]
OPTIONS = {"gemma2": dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0)}
ROWS_ONLY = {"gemma2", "gpt_oss", "trocr", "mamba"}  # no sdpa, or no position_ids
WITH_TREES = [kind for kind in KINDS if kind not in ROWS_ONLY]
LAYOUTS = [(kind, False) for kind in KINDS] + [(kind, True) for kind in WITH_TREES]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17], [18, 19, 20, 21, 22]]


def tiny(kind="qwen3", **options):
    return build(kind, **OPTIONS.get(kind, {}) | options)


def random_numbers(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def sampled(model, prompts=PROMPTS, seed=0, group_size=3, max_new_tokens=16, **options):
    uniforms = random_numbers(len(prompts), group_size, max_new_tokens, seed=seed)
    return R.generate(model, prompts, uniforms, **dict(eos_ids=[2], pad_id=2) | options)


def own_scores(model, out, temperature=1.0):
    """Log-probs and entropies, each (N, T), from a forward pass of each row without padding."""
    found = []
    for ids, size in zip(out.sequences(), out.prompt_lengths):
        ids = torch.tensor([ids])
        logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        logp = (logits[size - 1 : -1].float() / temperature).log_softmax(-1)
        both = torch.stack([logp.gather(1, ids[0, size:, None])[:, 0], -(logp.exp() * logp).sum(1)])
        found.append(F.pad(both, (0, out.completions.shape[1] - both.shape[1])))
    return torch.stack(found, dim=1)


def gradients(model):
    """Take the gradients of all parameters that have one."""
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def results(model, logprobs, entropy):
    """Both, and the gradients of a weighted sum in which every token has its own weight."""
    weights = torch.linspace(0.5, 1.5, logprobs.numel()).view_as(logprobs)
    (weights * (logprobs + 0.3 * entropy)).sum().backward()
    return [logprobs.detach(), entropy.detach(), *gradients(model)]


def assert_same_results(found, expected, name=None):
    scale = max(float(each.abs().max()) for each in expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        atol = 1e-5 if i < 2 else 1e-5 * scale
        torch.testing.assert_close(one, other, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "trocr", "mamba"])
def test_greedy_completions_are_those_of_transformers_generate(kind):
    """In batches smaller than the samples. The recorded log-probs are those of temperature 1."""
    model = tiny(kind)
    out = sampled(model, group_size=2, temperature=0, eos_ids=[2, 3], cache_gb=2e-5)
    with torch.no_grad():
        scored, _ = R.completion_logprobs(model, out, 1.0)
    torch.testing.assert_close(scored, out.sampler_logprobs, atol=2e-5, rtol=0)
    options = dict(do_sample=False, max_new_tokens=16, eos_token_id=[2, 3], pad_token_id=0)
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        ends = model.generate(ids, attention_mask=mask, **options)[0, len(prompt) :].tolist()
        for row in (2 * i, 2 * i + 1):
            assert out.completions[row, : out.lengths[row]].tolist() == ends
            assert out.truncated[row] == (ends[-1] not in (2, 3))


def test_an_end_at_the_last_token_is_no_truncation_even_if_it_is_the_pad_token():
    free = sampled(tiny(), eos_ids=[], group_size=8)
    assert free.truncated.all()
    end = next(ids[-1] for ids in free.completions.tolist() if ids[-1] not in ids[:-1])
    out = sampled(tiny(), eos_ids=[end], pad_id=end, group_size=8)
    last = out.completions.gather(1, out.lengths[:, None] - 1)[:, 0]
    assert torch.equal(last == end, ~out.truncated)
    assert out.lengths.min() < 16 and 0 < out.truncated.sum() < (out.lengths == 16).sum()
    assert torch.equal(out.completion_mask.sum(1), out.lengths)
    for row, n in zip(out.completions, out.lengths):
        assert end not in row[: n - 1] and (row[n:] == end).all()


@pytest.mark.parametrize("kind, wants_trees", LAYOUTS)
def test_scores_are_the_models_own_in_value_and_gradient(kind, wants_trees):
    """Those of the sampler, too. Scores are bit-identical with and without gradients."""
    model = tiny(kind)
    assert R.shares_prefixes(model) == (kind in WITH_TREES)
    out = sampled(model, temperature=0.7)
    trees = trees_of(out, 24) if wants_trees else None
    scored = R.completion_logprobs(model, out, 0.7, trees)
    with torch.no_grad():
        again = R.completion_logprobs(model, out, 0.7, trees)
    assert all(map(torch.equal, again, scored))
    assert scored[0].dtype == scored[1].dtype == torch.float32
    torch.testing.assert_close(again[0], out.sampler_logprobs, atol=2e-5, rtol=0)
    own = results(model, *own_scores(model, out, 0.7))  # 0 outside the mask
    assert_same_results(results(model, *scored), own)


ARCHITECTURES = {
    "gemma3": "right: rows and trees; checkpointed",  # composite, with windows
    "phi3 + longrope": "right: rows and trees, up to the original context; checkpointed",
    "falcon_h1": "right: rows; checkpointed",  # the head multiplies
    "xglm": "right: rows; checkpointed",  # a body inside the body
    "llama4_text": "right: rows; checkpointed",  # attention by length
    "roberta": "refused: .* our sampler differ by up to .* from roberta's own forward .*",
    "modernbert-decoder": "refused: .* our scorer differ by up to .*",  # its own head
    "rwkv": "refused: .* a rwkv does not use transformers' KV cache.*",
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures_are_scored_as_their_own_forward_pass_does_or_refused(kind):
    """To 1e-3, on sequences longer than every window and limit of the tiny model."""
    assert re.fullmatch(ARCHITECTURES[kind], ": ".join(examine(kind)))


def test_a_scorer_that_errs_is_found_and_trees_that_err_are_not_used(monkeypatch):
    model = tiny("gemma2")
    assert not R.check_scorer(model, PROMPTS[:2], pad_id=0)
    assert R.check_scorer(tiny(), PROMPTS[:2], pad_id=0)
    with monkeypatch.context() as patch:  # a node attends to all nodes before it in its row
        patch.setattr(R, "masks_of", lambda model, trees: None)
        assert not R.check_scorer(tiny(), PROMPTS[:2], pad_id=0)
    logits = R.logits_of
    for factor in (1.01, math.nan):
        monkeypatch.setattr(R, "logits_of", lambda *given: factor * logits(*given))  # noqa: B023
        with pytest.raises(UserError, match="log-probs of our scorer .* gemma2's own forward"):
            R.check_scorer(model, PROMPTS[:2], pad_id=0)


def test_a_large_vocabulary_is_drawn_from_as_exactly_as_float32_can():
    """The token that a float64 cumulative sum selects, except within 1e-6 of a boundary."""
    logits = 3 * torch.randn(1, 151_936, generator=torch.Generator().manual_seed(0))
    uniforms = random_numbers(20)
    tokens, logprobs = R.sample_token(logits.expand(20, -1), uniforms, 2.0)
    exact = (logits[0].double() / 2.0).softmax(-1)
    border = exact.cumsum(-1)
    below = border[tokens] - exact[tokens]
    assert (uniforms < border[tokens] + 1e-6).all() and (uniforms > below - 1e-6).all()
    # the sum of 151,936 terms: 1.4e-5 off on some CPUs
    torch.testing.assert_close(logprobs, exact[tokens].log().float(), atol=2e-5, rtol=0)


def test_the_smallest_and_the_largest_uniform_draw_possible_tokens():
    """Tokens of probability 0 or 1e-42 are never sampled, even at the ends of the vocabulary."""
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [0, 3, 255, 256]] = torch.tensor([-95.0, 0.0, 1.0, 2.0])
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    token, logprobs = R.sample_token(logits.expand(3, -1), uniform, 1.0)
    assert token.tolist() == [3, 256, 256] and logprobs.isfinite().all()


def test_long_sequences_and_logits_that_are_not_finite_are_refused():
    model = tiny("phi")
    assert len(sampled(model, group_size=1, max_new_tokens=119).tokens)
    with pytest.raises(UserError, match="129 tokens, prompt included: this phi reads at most 128"):
        sampled(model, max_new_tokens=120)
    for value in (math.nan, math.inf):
        model.lm_head.bias.data[7] = value
        with pytest.raises(UserError, match="the logits of this phi are not finite"):
            sampled(model)


@pytest.mark.parametrize("kind, cache_gb", [("qwen3", 1e-12), ("gemma2", 3e-5)])
def test_uniforms_alone_decide(kind, cache_gb):
    """Not the size of a batch (one sample, or a few), nor the other prompts, nor global state."""
    model, uniforms = tiny(kind), random_numbers(4, 4, 12)
    state, ends = torch.get_rng_state(), dict(eos_ids=[2], pad_id=2)
    whole = R.generate(model, PROMPTS, uniforms, **ends)
    other = R.generate(model, PROMPTS, uniforms, cache_gb=cache_gb, **ends)
    share = R.generate(model, PROMPTS[2:], uniforms[2:], **ends)
    assert torch.equal(state, torch.get_rng_state())
    assert whole.sequences() == other.sequences()
    assert whole.sequences()[8:] == share.sequences()
    torch.testing.assert_close(whole.sampler_logprobs, other.sampler_logprobs, atol=2e-5, rtol=0)
    assert R.generate(model, PROMPTS, 1 - uniforms, **ends).sequences() != whole.sequences()


def test_kv_caches_use_most_of_the_free_memory(monkeypatch, tmp_path):
    """80% of the 10 GB that are free on a GPU, or half of the memory of machine or container."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7e9, 20e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8e9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5e9)
    assert R.free_gb(torch.device("cuda")) == pytest.approx(8.0)
    bytes_here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(R, "Path", lambda path: tmp_path / "memory.max")
    assert R.free_gb(torch.device("cpu")) == pytest.approx(0.5e-9 * bytes_here)
    for limit, expected in (("max", bytes_here), ("400000000", 4e8)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert R.free_gb(torch.device("cpu")) == pytest.approx(0.5e-9 * expected)


def test_rows_and_joined_rollouts_keep_every_token():
    """The tokens of a tool (here some tokens) stay in the sequences, but not in the mask."""
    model = tiny()
    first, second = sampled(model), sampled(model, [[9] * 12], max_new_tokens=30, seed=1)
    first.completion_mask[[1, 3], [1, 0]] = False
    assert first.select([3, 0]).sequences() == [first.sequences()[3], first.sequences()[0]]
    both = R.Rollout.cat([first, second], pad_id=7)
    assert both.prompt_width == 12 and both.tokens[0, 0] == 7
    assert both.sequences() == first.sequences() + second.sequences()
    assert torch.equal(both.truncated, torch.cat([first.truncated, second.truncated]))
    assert both.completion_mask.sum() == both.lengths.sum() - 2
    scores, _ = R.completion_logprobs(model, both, 1.0)
    expected = both.sampler_logprobs * both.completion_mask
    torch.testing.assert_close(scores.detach(), expected, atol=2e-5, rtol=0)


def rollout_of(groups, forced=0.0):
    """A rollout of pairs (prompt, completions). A fraction `forced` of tokens is a tool's."""
    rows = [(prompt, completion) for prompt, group in groups for completion in group]
    prompts, completions = [list(column) for column in zip(*rows)]
    lengths = torch.tensor([len(completion) for completion in completions])
    tokens, ended = R.padded(completions, "cpu"), lengths > 0
    made = R.Rollout.of(prompts, tokens, torch.zeros(tokens.shape), lengths, ended, pad_id=0)
    chosen = random_numbers(*tokens.shape) >= forced
    return made._replace(completion_mask=made.completion_mask & chosen)


def micro_batches(out, tokens, shares):
    return R.micro_batches(out, torch.arange(len(out.tokens)), tokens, shares)


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
    "long and short": [(P + Q + C + P, [D]), ([9], [C + D + C + C, D])],
}


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_trees_have_the_scores_and_gradients_of_rows(kind):
    """One sequence per tree, several, all in one. Every other case has a tool's tokens."""
    model = tiny(kind)
    for i, (name, groups) in enumerate(CASES.items()):
        out = rollout_of(groups, forced=0.4 * (i % 2))
        by_rows = results(model, *R.completion_logprobs(model, out, 0.7))
        for width in (1, 20, 200):
            by_trees = R.completion_logprobs(model, out, 0.7, trees_of(out, width))
            assert_same_results(results(model, *by_trees), by_rows, name)
        with torch.autocast("cpu", torch.bfloat16):
            by_trees, _ = R.completion_logprobs(model, out, 0.7, trees_of(out, 20))
            with torch.no_grad():
                again, _ = R.completion_logprobs(model, out, 0.7, trees_of(out, 20))
        assert torch.equal(by_trees, again), name
        if kind != "qwen3_moe":  # rounding changes experts
            assert (by_trees - by_rows[0]).abs().mean() < 0.1, name


def random_groups(groups, size, prompt, longest):
    """A rollout of random tokens: completions of a group share only their prompt."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 2, longest + 1, (groups, size), generator=draw).tolist()

    def tokens(count):
        return torch.randint(3, 40, (count,), generator=draw).tolist()

    return rollout_of([(tokens(prompt), [tokens(n) for n in row]) for row in lengths])


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("tokens", [1, 80, 1000])
def test_micro_batches_compute_no_more_tokens_than_they_may(shares, tokens, monkeypatch):
    """Padding included, or one row. Together they have all completions and their log-probs."""
    model, rows = tiny("gemma3_text"), []
    out = random_groups(6, 8, prompt=40, longest=10)
    assert micro_batches(out.select([]), tokens, shares) == []
    whole, _ = R.completion_logprobs(model, out, 1.0)
    passes = watched(monkeypatch, model.model, "forward")
    for part in micro_batches(out, tokens, shares):
        logprobs, _ = R.completion_logprobs(model, part.rollout, 1.0, part.trees)
        torch.testing.assert_close(logprobs, whole[part.rows], atol=1e-5, rtol=0)
        rows += part.rows.tolist()
        assert (part.trees is not None) == (shares and tokens > 1)
    assert sorted(rows) == list(range(48))
    assert shares or out.lengths[rows].diff().max() <= 0  # longest first
    for (ids, *_), _, _ in passes:
        assert ids.numel() <= tokens or tokens == len(ids) == 1


def test_groups_stay_together_and_trees_are_balanced():
    """16 groups of about 105 nodes, in micro-batches of 256 tokens, then in two rows."""
    out = random_groups(16, 8, prompt=40, longest=10)
    parts = micro_batches(out, 256, shares=True)
    places = {(row // 8, i) for i, part in enumerate(parts) for row in part.rows.tolist()}
    assert len(parts) == 7 and len(places) <= 16 + 7 - 1
    [part] = micro_batches(out, 10_000, shares=True)
    used = part.trees.positions.count_nonzero(1) + 1
    assert len(used) == 2 and used.min() > 0.8 * used.max()


GROUPS = {  # number, completions of each, tokens of a prompt, and of the longest completion
    (4, 8, 100, 20): True,
    (4, 8, 10, 200): False,  # 10 of 200 tokens are shared
    (8, 1, 100, 20): False,  # nothing is
    (1, 8, 200, 4000): False,  # long completions
    (1, 8, 4000, 4000): False,  # half is shared, but the mask would be 36,000 wide
}


def test_trees_are_used_if_they_save_more_than_their_mask_costs():
    for sizes, wants_trees in GROUPS.items():
        parts = micro_batches(random_groups(*sizes), 10**6, shares=True)
        assert all((part.trees is not None) == wants_trees for part in parts), sizes


def test_the_mask_of_trees_has_the_dtype_of_autocast_and_no_row_without_a_node():
    """Else every layer would convert it, and keep its copy, and a softmax over nothing is NaN."""
    trees = trees_of(rollout_of(CASES["duplicate prompts"]), 30)
    with torch.autocast("cpu", torch.bfloat16):
        mask = R.masks_of(tiny(), trees)
    assert mask.dtype == torch.bfloat16 and (mask == 0).any(-1).all()


def test_long_prompts_are_read_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(R, "PROMPT_TOKENS", 20)
    parts = R.batches(tiny(), [[5] * 10] * 5, random_numbers(5, 3, 4), cache_gb=1.0)
    assert [len(part) for part in parts] == [6, 6, 3]


def test_results_of_a_users_sampler_are_checked():
    """Each of these would silently train on something else."""
    from support.extras.samplers import checked

    model, uniforms = tiny(), random_numbers(4, 3, 16)
    good = R.generate(model, PROMPTS, uniforms, eos_ids=[2], pad_id=2)

    def check(samples):
        checked(lambda *_: samples)(model, PROMPTS, uniforms)

    check(good)
    mask, logprobs = good.completion_mask, good.sampler_logprobs
    check(good._replace(completion_mask=mask & (random_numbers(*mask.shape) < 0.5)))  # a tool's
    unknown = good.tokens.index_fill(1, torch.tensor([9]), 40)  # the first token of completions
    wrong = {
        "a rollout.Rollout, found tuple": tuple(good),
        "12 completions": good.select(list(range(9))),
        "in the order of the prompts": good.select(list(range(11, -1, -1))),
        "lengths of 1 to 16": good._replace(lengths=good.lengths + 9),
        "lengths of 1 to": good._replace(lengths=0 * good.lengths),
        "without padding": good._replace(completion_mask=torch.ones_like(mask)),
        "completion_mask": good._replace(completion_mask=mask.float()),
        "token ids below 40": good._replace(tokens=unknown),
        "finite log-probs": good._replace(sampler_logprobs=logprobs + math.nan),
        "at most 0": good._replace(sampler_logprobs=logprobs.exp()),
        "all tensors on cpu": good._replace(lengths=good.lengths.to("meta")),
    }
    for words, samples in wrong.items():
        with pytest.raises(UserError, match="--sampler: expected .*" + words):
            check(samples)


@pytest.mark.parametrize(
    "kind, dropout", [("gemma3_text", "attention_dropout"), ("gpt2", "resid_pdrop")]
)
def test_gradient_checkpointing_changes_nothing(kind, dropout):
    """Layers run again in the backward pass, without dropout, in a copy, too."""
    from support.extras.gradient_checkpointing import checkpoint_layers

    model = tiny(kind, **{dropout: 0.5})
    out, runs = sampled(model), []
    trees = trees_of(out, 24) if kind == "gemma3_text" else None
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *_: runs.append(1))

    def scored(model):
        return results(model, *R.completion_logprobs(model, out, 1.0, trees))

    before = scored(model)
    assert len(runs) == 1
    checkpoint_layers(model)
    after = scored(model)
    assert len(runs) == 3  # forward, and again in the backward pass
    copied = scored(frozen_copy(model, torch.float32).requires_grad_(True))
    assert all(map(torch.equal, before, after)) and all(map(torch.equal, before, copied))
    assert torch.equal(sampled(model).tokens, out.tokens) and not gradients(model)
    with pytest.raises(UserError, match="--gradient-checkpointing: ctrl doesn't support it"):
        checkpoint_layers(build("ctrl"))


def test_the_head_never_holds_more_logits_than_a_chunk(monkeypatch):
    """2,000 tokens, 655 at a time. The backward pass recomputes all chunks but the last."""
    assert R.LOGITS_AT_ONCE <= 2**26  # float32: 256 MB
    monkeypatch.setattr(R, "LOGITS_AT_ONCE", 2**18)
    model, out = tiny(vocab_size=400), rollout_of([([5] * 4, [[5] * 100] * 20)])
    tokens = torch.randint(3, 400, (20, 104), generator=torch.Generator().manual_seed(0))
    out, calls = out._replace(tokens=tokens), watched(monkeypatch, R, "logits_of")
    scored = R.completion_logprobs(model, out, 1.0)
    assert [len(logits) for *_, logits in calls] == [655, 655, 655, 35]
    found = results(model, *scored)
    assert len(calls) == 7
    assert_same_results(found, results(model, *own_scores(model, out)))


def test_entropies_without_a_gradient_leave_that_of_the_log_probs():
    """And the values of both: only the backward pass through the entropies is skipped."""
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


def test_under_autocast_experts_are_computed_in_bf16(tmp_path, monkeypatch):
    """In the backward pass and with checkpointing, too. Without autocast nothing changes."""
    from support.extras.gradient_checkpointing import checkpoint_layers

    tiny("qwen3_moe").save_pretrained(tmp_path)
    model = R.load_model(str(tmp_path), "cpu")
    out = sampled(model)
    exact, _ = R.completion_logprobs(model, out, 1.0)
    assert torch.equal(exact, R.completion_logprobs(tiny("qwen3_moe"), out, 1.0)[0])

    calls, found = watched(monkeypatch, F, "grouped_mm"), []
    for prepare in (lambda model: None, checkpoint_layers):
        prepare(model)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = R.completion_logprobs(model, out, 1.0)
        logprobs.sum().backward()
        found.append(gradients(model))
        assert (logprobs - exact).abs().mean() < 0.1
    assert {each.dtype for given, _, _ in calls for each in given} == {torch.bfloat16}
    assert all(map(torch.equal, *found))
    assert all(gradient.dtype == torch.float32 for gradient in found[0])


@pytest.mark.parametrize("wants_trees", [False, True])
def test_a_critic_starts_at_zero_and_reads_the_state_before_each_token(wants_trees):
    """weights . hidden state + bias, from a forward pass of each sequence alone."""
    policy = tiny()
    out = sampled(policy)
    critic, trees = critic_of(policy), trees_of(out, 24) if wants_trees else None
    assert not R.completion_values(critic, out, trees).any()
    critic.value.data = torch.randn(33, generator=torch.Generator().manual_seed(0))
    values = R.completion_values(critic, out, trees)
    assert not values[~out.completion_mask].any()
    for row, text, size in zip(values, out.sequences(), out.prompt_lengths):
        with torch.no_grad():
            hidden = policy.model(torch.tensor([text]), use_cache=False)[0][0, size - 1 : -1]
        expected = hidden @ critic.value[:-1] + critic.value[-1]
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_the_command_prints_completions(tmp_path, capsys, monkeypatch):
    """Ends are those of the tokenizer and of the generation config."""
    model, tokenizer = tiny(vocab_size=18, eos_token_id=1), character_tokenizer()
    model.generation_config.eos_token_id = 1
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    capsys.readouterr()  # the progress of saving
    assert R.end_and_pad_ids(model, tokenizer) == dict(eos_ids=[1], pad_id=0)
    model.generation_config.eos_token_id, tokenizer.pad_token = [5, 4], None
    assert R.end_and_pad_ids(model, tokenizer) == dict(eos_ids=[1, 4, 5], pad_id=1)
    flags = f"--model {tmp_path} --prompt 1+2= --samples 3 --max-new-tokens 24 --device cpu"

    def command(more=""):
        return R.main(f"{flags} {more}".split()), *capsys.readouterr()

    transformers.utils.logging.enable_progress_bar()  # a pipe shows none
    first, same, other = command("--seed 0"), command("--seed 0"), command("--seed 1")
    assert first == same != other
    assert first == (0, first[1], "") and first[1].count("\n") >= 3
    error = "error: --temperature -1.0: expected at least 0\n"
    assert command("--temperature -1") == (2, "", error)
    hostile = "a\x1b[31mb\nc"  # escape sequences do not reach the terminal
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "decode", lambda *_, **__: hostile)
    assert command()[1] == 3 * "a\\x1b[31mb\nc\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("wants_trees", [False, True])
def test_on_a_gpu_a_bf16_sampler_and_the_scorer_agree(wants_trees):
    configure_torch()
    policy = tiny().cuda()
    out = sampled(frozen_copy(policy, torch.bfloat16), group_size=32, max_new_tokens=60)
    trees = trees_of(out, 1024) if wants_trees else None
    with torch.autocast("cuda", torch.bfloat16):
        scored, _ = R.completion_logprobs(policy, out, 1.0, trees)
        with torch.no_grad():
            assert torch.equal(scored, R.completion_logprobs(policy, out, 1.0, trees)[0])
    gap = (scored.detach() - out.sampler_logprobs)[out.completion_mask]
    assert gap.abs().mean() < 0.02 and math.isfinite(gap.sum().item())
