"""The fast files of support/extras against rollout.py, which test_rollout.py compares with the
model's own forward pass: values, entropies, gradients, samples, and the tokens that are read."""

import pytest
import torch

import rollout as R
from test_rollout import PROMPTS, gradients, rollout_of, sampled, tiny, watch
from tools import character_tokenizer, fast

KINDS = ["qwen3", "gpt2", "gemma2", "mistral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


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


def scores(model, out, way=fast, temperature=0.7):
    """Values, entropies, and gradients of a sum with a weight of its own for each."""
    logprobs, entropy = way.completion_logprobs(model, out, temperature)
    weights = torch.linspace(0.5, 1.5, logprobs.numel()).view_as(logprobs)
    (weights * (logprobs + 0.3 * entropy)).sum().backward()
    return [logprobs.detach(), entropy.detach()], gradients(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forced", [0.0, 0.4])
def test_packed_scores_are_the_plain_ones_in_value_and_gradient(kind, forced):
    """Windows of 6 tokens, caps, sinks, experts, shared heads. Gradients are finite everywhere:
    padding that saw no key would make them NaN."""
    model = tiny(kind)
    for name, groups in CASES.items():
        out = rollout_of(groups, forced)
        values, grads = scores(model, out)
        with torch.no_grad():
            assert torch.equal(fast.completion_logprobs(model, out, 0.7)[0], values[0]), name
        assert not values[0][~out.completion_mask].any()
        expected, own = scores(model, out, R)
        for one, other in zip(values, expected):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0, msg=name)
        scale = max(float(g.abs().max()) for g in own)
        assert len(grads) == len(own)
        for one, other in zip(grads, own):
            torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=0, msg=name)


def test_micro_batches_together_give_the_scores_of_all():
    model = tiny("gemma2")
    for name, groups in CASES.items():
        out = rollout_of(groups)
        whole, _ = fast.completion_logprobs(model, out, 1.0)
        for tokens in (1, 12, 40):
            parts = fast.micro_batches(out, tokens)
            assert torch.cat(parts).tolist() == list(range(len(whole))), name
            for rows in parts:
                texts = out[rows].sequences()
                prefixes = {tuple(text[: n + 1]) for text in texts for n in range(len(text))}
                assert len(prefixes) <= tokens or len(rows) == 1, name
                logprobs, _ = fast.completion_logprobs(model, out[rows], 1.0)
                torch.testing.assert_close(logprobs, whole[rows], atol=1e-5, rtol=0, msg=name)


def test_micro_batches_are_whole_groups_where_these_fit():
    """Three groups of 8, 13 and 4 nodes."""
    groups = [(P, [D, D[:2], D]), (Q[:2], [C + D, C, C]), ([9], [D, D, D[:1]])]
    out = rollout_of(groups)
    parts = [part.tolist() for part in fast.micro_batches(out, 24)]
    assert parts == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    parts = [part.tolist() for part in fast.micro_batches(out, 13)]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [len(part) for part in fast.micro_batches(out, 10_000)] == [9]
    assert fast.micro_batches(out[[]], 100) == []


def test_the_trie_of_the_worked_example():
    """The one in the comment of fast_scoring.py: "c d x" and "c e y" of "a b", "g z" of "f"."""
    a, b, c, d, e, f, g, x, y, z = range(5, 15)
    out = rollout_of([([a, b], [[c, d, x], [c, e, y]]), ([f], [[g, z]])])
    packed = fast.Packed(out)
    assert packed.ids.tolist() == [[a, b, f, c, d, e, g]]
    prompts, texts = packed.blocks
    assert prompts.positions.flatten()[prompts.is_new].tolist() == [0, 1, 0]
    assert texts.positions.flatten()[texts.is_new].tolist() == [2, 3, 3, 1]
    assert texts.queries.flatten()[texts.is_new].tolist() == [3, 4, 5, 6]
    assert texts.keys.tolist() == [[0, 1, 3, 4], [0, 1, 3, 5], [2, 6, 0, 0]]
    assert packed.parents.tolist() == [1, 3, 3, 2, 4, 5, 6]
    assert packed.targets.tolist() == [c, d, e, g, x, y, z]
    assert packed.prediction.tolist() == [0, 1, 4, 0, 2, 5, 3, 6]


def test_scoring_reads_no_padding_and_each_prefix_once(monkeypatch):
    """Of each text all tokens but the last, which nothing follows."""
    model, tokens = tiny(), []
    prompts = [*PROMPTS, [5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6]]
    out = sampled(model, prompts, group_size=8, max_new_tokens=30, temperature=0.3)
    watch(monkeypatch, model.model, "forward", lambda ids, **_: tokens.append(ids.numel()))
    fast.completion_logprobs(model, out, 1.0)
    texts = out.sequences()
    prefixes = {tuple(text[: n + 1]) for text in texts for n in range(len(text) - 1)}
    assert tokens == [len(prefixes)]
    assert tokens[0] < out.lengths.sum() + sum(map(len, prompts))


FEW = dict(temperature=0.3, cache_gb=5e-5)  # slots, which change hands


@pytest.mark.parametrize(
    "kind, options",
    [("qwen3", {}), ("gemma2", dict(temperature=0.3)), *((kind, FEW) for kind in KINDS)],
    ids=str,
)
def test_samples_in_slots_are_the_plain_ones(kind, options):
    model = tiny(kind)
    plain = sampled(model, group_size=6, max_new_tokens=20, **options)
    quick = sampled(model, group_size=6, max_new_tokens=20, generate=fast.generate, **options)
    assert len(set(plain.lengths.tolist())) > 1
    assert torch.equal(plain.tokens, quick.tokens)
    assert torch.equal(plain.truncated, quick.truncated)
    torch.testing.assert_close(plain.sampler_logprobs, quick.sampler_logprobs, atol=2e-5, rtol=0)


def test_a_stop_text_longer_than_a_slot_hides_no_other_one():
    model = tiny(vocab_size=18)
    options = dict(eos_ids=[1], stops=R.StopTexts(character_tokenizer(), ["12345" * 10, "5"]))
    plain = sampled(model, [[5], [6, 7]], **options)
    quick = sampled(model, [[5], [6, 7]], generate=fast.generate, **options)
    assert len(set(plain.lengths.tolist())) > 1
    assert torch.equal(plain.lengths, quick.lengths)
