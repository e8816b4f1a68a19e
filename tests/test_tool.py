"""Several turns with a tool: what it writes is read by the model, and is no action of the policy's.

`Script` answers samples of random models, after some tokens and with whatever tokens a test wants;
`rollout.Replies`, which does so by a text and a tokenizer, is tested by itself and in real runs."""

import json
import math
import types
from pathlib import Path

import pytest
import torch
import transformers

import gspo
import rewards
import rollout as R
import train
from test_experts import check_recorded, opinionated_mixture, recorded
from test_ranks import alike, together
from test_resume import interrupted
from test_rollout import EAGER, PROMPTS, Tape, byte_tokenizer, own_logprobs, taped, tiny
from tools import (
    BASE,
    character_tokenizer,
    digests,
    good,
    metrics,
    refused,
    same_run,
    timeless,
)

_ = taped  # a fixture

END, ASKS = 2, [20, 21, 22, 23, 24, 25]
REPLY = [30, 31, 32]


class Script:
    """Stands in for Replies: `answer(tokens so far)` is the reply after any of `asking_tokens`."""

    vocabulary = 40

    def __init__(self, answer, asking_tokens=ASKS):
        self.answer, self.asking_tokens, self.asked = answer, list(asking_tokens), []

    def to(self, ids, room):
        assert ids[-1] in self.asking_tokens and room > 0
        self.asked.append(ids)
        return self.answer(ids)[:room]


def always(reply=REPLY):
    return Script(lambda ids: reply)


def sampled(model, replies, prompts=PROMPTS, **options):
    """As test_rollout's, with a tool."""
    options = dict(group_size=3, max_new_tokens=16, eos_ids=[END], pad_id=0) | options
    generator = torch.Generator().manual_seed(0)
    return R.generate(model, prompts, generator=generator, replies=replies, **options)


@torch.no_grad()
def by_hand(model, replies, prompts=PROMPTS, group_size=3, limit=16, temperature=1.0):
    """What a loop without cache, slots or batches samples: for each row its tokens, which of them
    were given, their log-probs, and whether it was cut off."""
    page = R.Page(prompts, group_size, limit, 0, torch.Generator().manual_seed(0), "cpu", R.Share())
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    for prompt, uniforms in zip(rows, page.uniforms):
        tokens, given, logprobs, waiting = [], [], [], []
        while len(tokens) < limit and (not tokens or given[-1] or tokens[-1] != END):
            if waiting:
                tokens.append(waiting.pop(0))
                given.append(True)
                logprobs.append(0.0)
                continue
            ids = torch.tensor([prompt + tokens])
            logits = model(ids, use_cache=False).logits[:, -1]
            token, logprob = R.sample(logits, uniforms[len(tokens)][None], temperature)
            tokens.append(int(token))
            given.append(False)
            logprobs.append(float(logprob))
            if tokens[-1] in replies.asking_tokens and len(tokens) < limit:
                waiting = list(replies.answer(tokens))
        yield tokens, given, logprobs, given[-1] or tokens[-1] != END


def same_as_by_hand(out, rows):
    assert any(any(given) for _, given, _, _ in rows)
    for i, (tokens, given, logprobs, cut) in enumerate(rows):
        length = int(out.lengths[i])
        assert out.completions[i, :length].tolist() == tokens
        assert out.forced[i].tolist() == given + [False] * (out.forced.shape[1] - length)
        assert bool(out.truncated[i]) == cut
        assert out.sampler_logprobs[i, :length].tolist() == pytest.approx(logprobs, abs=2e-5)
        assert (out.sampler_logprobs[i, length:] == 0).all()


# ------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2", "qwen3_moe", "gpt_oss"])
def test_sampling_with_a_tool_is_a_loop_that_appends_what_it_says(kind):
    model = tiny(kind)
    same_as_by_hand(sampled(model, always()), list(by_hand(model, always())))


@pytest.mark.parametrize(
    "options",
    [dict(max_slots=1), dict(max_slots=5), dict(cache_gb=3e-5), dict(temperature=0.0)],
    ids=str,
)
def test_with_a_tool_slots_are_refilled_and_moved_together(options):
    """Few slots, so that samples take the places of others; then fewer live ones, together."""
    model = tiny()
    out = sampled(model, always(), **options)
    temperature = options.get("temperature", 1.0)
    same_as_by_hand(out, list(by_hand(model, always(), temperature=temperature)))


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, dict(max_slots=5)], ids=str)
def test_captured_steps_force_what_eager_ones_do(kind, options, monkeypatch):
    """Three steps between looks: a sample that asks waits, and then goes on as if it had not."""
    model = tiny(kind)
    out = sampled(model, always(), **options)
    replays = Tape.replays
    assert replays
    same_as_by_hand(out, list(by_hand(model, always())))
    monkeypatch.setitem(R.PACE, "cpu", EAGER)
    same = sampled(model, always(), **options)
    assert torch.equal(out.tokens, same.tokens) and torch.equal(out.forced, same.forced)
    assert Tape.replays == replays


def test_two_processes_sample_with_a_tool_what_one_does():
    model = tiny()
    whole = sampled(model, always())
    for first in range(2):
        part = sampled(model, always(), share=R.Share(first, 2))
        rows = [3 * prompt + member for prompt in (first, first + 2) for member in range(3)]
        for mine, row in zip(part.completions, rows):
            length = int(whole.lengths[row])
            assert mine[:length].tolist() == whole.completions[row, :length].tolist()
        width = part.forced.shape[1]
        assert torch.equal(part.forced, whole.forced[rows, :width])


def test_a_reply_in_one_row_leaves_the_others_as_they_were():
    """Tokens of the other rows, and of this one up to its reply."""
    model = tiny()
    silent = sampled(model, None)
    rows = list(by_hand(model, always(), group_size=3))
    chosen = next(i for i, (_, given, _, _) in enumerate(rows) if any(given[:8]))
    begins = rows[chosen][1].index(True)
    prefix = rows[chosen][0][:begins]
    out = sampled(model, Script(lambda ids: REPLY if ids == prefix else []))
    assert out.forced.sum() == len(REPLY) and out.forced[chosen, begins]
    for i in range(len(rows)):
        length = begins if i == chosen else int(silent.lengths[i])
        assert i == chosen or out.lengths[i] == length
        assert torch.equal(out.completions[i, :length], silent.completions[i, :length])
        one, other = out.sampler_logprobs[i, :length], silent.sampler_logprobs[i, :length]
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    after = begins + len(REPLY)
    assert out.completions[chosen, begins:after].tolist() == REPLY


def test_a_tool_that_is_silent_changes_nothing():
    model = tiny()
    replies = always([])
    out, without = sampled(model, replies), sampled(model, None)
    assert replies.asked and without.forced is None and not out.forced.any()
    assert torch.equal(out.completion_mask, without.completion_mask)
    for name in ("tokens", "lengths", "sampler_logprobs", "truncated"):
        assert torch.equal(getattr(out, name), getattr(without, name))


def test_it_is_asked_once_for_each_token_that_may_ask_and_for_no_other():
    """Not at the limit, where nothing could be written, and not for tokens of its own."""
    model, replies = tiny(), always([20, 30])
    out = sampled(model, replies)
    expected = []
    for tokens, mine, length in zip(out.completions, out.completion_mask, out.lengths.tolist()):
        for step in range(min(length, 15)):
            if mine[step] and int(tokens[step]) in ASKS:
                expected.append(tokens[: step + 1].tolist())
    assert sorted(replies.asked) == sorted(expected) and expected


def test_the_limit_bounds_the_whole_completion_and_cuts_a_reply():
    """A reply of a hundred tokens fills its row, which is cut off, to the limit and no further."""
    model = tiny()
    out = sampled(model, always([30] * 100), max_new_tokens=8)
    full = out.forced.any(1)
    assert full.any() and (out.lengths[full] == 8).all() and out.truncated[full].all()
    assert (out.forced[full].sum(1) + out.completion_mask[full].sum(1) == 8).all()
    same_as_by_hand(out, list(by_hand(model, always([30] * 100), limit=8)))


def test_an_end_token_in_a_reply_ends_nothing():
    model, reply = tiny(), [30, END, 31]
    out = sampled(model, always(reply))
    same_as_by_hand(out, list(by_hand(model, always(reply))))
    ends = out.forced & (out.completions == END)
    row, step = ends.nonzero()[0].tolist()
    assert out.lengths[row] > step + 1


def test_tokens_that_end_beside_a_tool_still_end():
    """An end token that may also ask: the sample is over, and nobody is asked."""
    replies = Script(lambda ids: REPLY, asking_tokens=[END])
    out = sampled(tiny(), replies)
    assert not replies.asked and (~out.truncated).any()


@pytest.mark.parametrize("kind", ["falcon", "mamba"])
def test_a_tool_is_refused_where_transformers_samples(kind):
    with pytest.raises(rewards.UserError, match=f"--tool: {kind} is sampled by transformers"):
        sampled(tiny(kind), always())


def test_rows_and_joined_rollouts_keep_what_was_forced():
    model = tiny()
    first = sampled(model, always())
    second = sampled(model, always(), [[9] * 12], max_new_tokens=30)
    both = R.Rollout.cat([first, second], pad_id=7)
    assert both.forced.shape == both.completions.shape and second.forced.any()
    assert first.forced.shape[1] != second.forced.shape[1]
    for rows, one in ((slice(0, 12), first), (slice(12, 15), second)):
        width = one.forced.shape[1]
        assert torch.equal(both.forced[rows, :width], one.forced)
        assert not both.forced[rows, width:].any()
    some = both[[14, 2]]
    assert torch.equal(some.forced, both.forced[[14, 2]])
    assert torch.equal(some.completion_mask, some.text_mask & ~some.forced)
    assert both.to("cpu").forced is not None and sampled(model, None)[[0]].forced is None


# ------------------------------------------------------------------------------ scoring


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_moe", "falcon", "mamba"])
def test_scores_are_the_models_own_around_replies_in_value_and_gradient(kind):
    """Every row by a forward pass of its own; a model that others sample is scored the same way."""
    model = tiny(kind)
    samples = sampled(tiny(), always())
    logprobs, entropy = R.completion_logprobs(model, samples, temperature=1.0)
    weights = torch.rand(logprobs.shape, generator=torch.Generator().manual_seed(1))
    (logprobs * weights + entropy).sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]

    model.zero_grad()
    total = 0.0
    for i, (own, own_entropy) in enumerate(own_logprobs(model, samples)):
        length = len(own)
        mask = samples.completion_mask[i, :length]
        assert (logprobs[i, :length][~mask] == 0).all() and (entropy[i, :length][~mask] == 0).all()
        torch.testing.assert_close(logprobs[i, :length][mask], own[mask], atol=2e-5, rtol=0)
        torch.testing.assert_close(entropy[i, :length][mask], own_entropy[mask], atol=2e-5, rtol=0)
        total = total + (own * weights[i, :length] + own_entropy)[mask].sum()
    total.backward()
    for gradient, parameter in zip(found, model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_moe"])
def test_sampler_and_scorer_agree_around_replies(kind):
    model = tiny(kind)
    samples = sampled(model, always())
    scored, _ = R.completion_logprobs(model, samples, temperature=1.0, micro_batch_tokens=40)
    assert samples.forced.any() and (scored != 0).sum() == samples.completion_mask.sum()
    torch.testing.assert_close(scored, samples.sampler_logprobs, atol=2e-5, rtol=0)


def test_what_a_tool_wrote_is_read_and_moves_nothing_before_it():
    model = tiny()
    samples = sampled(model, always())
    last = train.last_token(samples)[:, 0]
    row, step = next([r, t] for r, t in samples.forced.nonzero().tolist() if t < last[r])
    after = samples.completion_mask[row].clone()
    after[:step] = False
    other = samples.tokens.clone()
    other[row, samples.prompt_width + step] = 33
    one, two = (
        R.completion_logprobs(model, samples._replace(tokens=tokens), temperature=1.0)[0]
        for tokens in (samples.tokens, other)
    )
    changed = (one - two).abs() > 1e-4
    assert changed[row][after].all()
    changed[row, step:] = False
    assert not changed.any()


def test_the_head_never_sees_what_predicts_a_reply(monkeypatch):
    """No logits are made there, so none can enter anything."""
    model, seen, logits = tiny(), [], R.Head.logits
    samples = sampled(model, always())
    monkeypatch.setattr(
        R.Head, "logits", lambda head, hidden: seen.append(len(hidden)) or logits(head, hidden)
    )
    R.completion_logprobs(model, samples, temperature=1.0)
    assert sum(seen) == samples.completion_mask.sum() < samples.lengths.sum()


def test_values_and_flips_are_of_own_tokens():
    model = tiny("qwen3_moe")
    samples = sampled(model, always())
    critic = train.critic_of(model)
    with torch.no_grad():
        critic.value[-1] = 0.5
    values = R.completion_values(critic, samples)
    assert torch.equal(values != 0, samples.completion_mask)
    with R.Routing() as old, torch.no_grad():
        R.completion_logprobs(model, samples, temperature=1.0)
    own = int(samples.completion_mask.sum())
    assert len(old.flips(old)) == own * model.config.num_hidden_layers
    assert len(old.experts[0]) > own  # though all that is read is recorded, and can be replayed


@torch.no_grad()
def test_the_samplers_experts_are_recorded_around_replies():
    """A sample that waits for its reply is stepped along: what it chose is written once."""
    model = opinionated_mixture("qwen3_moe")
    replies = Script(lambda ids: [6, 7], asking_tokens=range(10, 18))
    samples = recorded(model, replies=replies, max_slots=5)
    assert samples.forced.any()
    check_recorded(model, samples)


# ------------------------------------------------------------------------------ losses


def random_logprobs(samples, seed):
    shape = samples.sampler_logprobs.shape
    return -torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.1


def test_gspo_over_replies_is_a_loop_over_own_tokens():
    """Value, gradient and clip fraction: s_i = exp(mean over the policy's tokens), and nothing of
    what stands at the others, NaN and inf, comes through."""
    samples = sampled(tiny(), always())
    mask = samples.completion_mask
    new, old = random_logprobs(samples, 1), random_logprobs(samples, 2)
    advantages = torch.linspace(-1, 1, len(mask))
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 7.0])
    holes = torch.where(mask, 0.0, garbage[torch.arange(mask.numel()).view(mask.shape) % 4])
    given = (new + holes).requires_grad_()
    loss, found = gspo.gspo_loss(given, old - holes, advantages, mask, clip_low=0.1, clip_high=0.1)
    loss.backward()

    expected, clipped = 0.0, 0
    gradient = torch.zeros_like(new)
    for i in range(len(mask)):
        own = [t for t in range(mask.shape[1]) if mask[i, t]]
        ratio = math.exp(math.fsum(float(new[i, t] - old[i, t]) for t in own) / len(own))
        advantage = float(advantages[i])
        bounded = min(max(ratio, 0.9), 1.1)
        expected -= min(ratio * advantage, bounded * advantage) / len(mask)
        if bounded * advantage < ratio * advantage:
            clipped += 1
            continue
        for t in own:
            gradient[i, t] = -ratio * advantage / len(own) / len(mask)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(found["clip_fraction"]) == pytest.approx(clipped / len(mask), rel=1e-5)
    torch.testing.assert_close(given.grad, gradient, atol=1e-7, rtol=1e-4)


def without_holes(values, mask):
    return [[float(x) for x, own in zip(row, kept) if own] for row, kept in zip(values, mask)]


def test_returns_and_gae_pass_over_replies_as_loops_do():
    """Each row with the tool's tokens cut out, by a loop in floats: what a token's advantage is
    does not depend on how much a tool wrote between it and the next."""
    samples = sampled(tiny(), always())
    mask = samples.completion_mask
    paid, values = random_logprobs(samples, 3), random_logprobs(samples, 4)
    bootstrap = torch.linspace(-1, 1, len(mask))
    gamma, lam = 0.9, 0.8
    found, _ = gspo.gae_advantages(paid, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    to_go = gspo.rewards_to_go(paid, mask, gamma=gamma)
    assert (found[~mask] == 0).all() and (to_go[~mask] == 0).all()

    kept = zip(without_holes(paid, mask), without_holes(values, mask), bootstrap.tolist())
    for i, (rewards_, values_, last) in enumerate(kept):
        advantage, ahead, value_ahead = 0.0, 0.0, last
        by_token, sums = [], []
        for reward, value in zip(reversed(rewards_), reversed(values_)):
            delta = reward + gamma * value_ahead - value
            advantage = delta + gamma * lam * advantage
            ahead = reward + gamma * ahead
            value_ahead = value
            by_token.insert(0, advantage)
            sums.insert(0, ahead)
        assert found[i][mask[i]].tolist() == pytest.approx(by_token, rel=1e-4, abs=1e-5)
        assert to_go[i][mask[i]].tolist() == pytest.approx(sums, rel=1e-4, abs=1e-5)


def placed(steps, forced, text="12;=7=7+3"):
    """place_rewards of one completion, a character a token; outcome 5."""
    tokenizer = character_tokenizer()
    ids = torch.tensor([tokenizer.encode(text)])
    samples = R.Rollout(
        tokens=ids,
        prompt_lengths=torch.tensor([0]),
        lengths=torch.tensor([len(text)]),
        sampler_logprobs=torch.zeros(1, len(text)),
        truncated=torch.tensor([True]),
        forced=torch.tensor([[place in forced for place in range(len(text))]]),
    )
    batch = types.SimpleNamespace(
        samples=samples,
        rewards=torch.tensor([5.0]),
        mask=samples.completion_mask,
        texts=[text],
        scores=[rewards.Score(5.0, 1.0, {}, steps)],
    )
    run = types.SimpleNamespace(tokenizer=tokenizer)
    token_rewards, step_ends = train.place_rewards(run, batch)
    last = int(train.last_token(samples))
    return token_rewards[0].tolist(), step_ends[0].nonzero()[:, 0].tolist(), last


def test_a_reward_inside_a_reply_goes_to_the_policys_token_before_it():
    """`12;` is the policy's, `=7=7` the tool's, `+3` the policy's: ends at 3, 5 and 7 characters
    are all at its third token, the one at 8 at its fourth."""
    token_rewards, ends, last = placed([(3, 1.0), (5, 0.5), (7, 0.25), (8, 2.0)], range(3, 7))
    assert token_rewards == [0, 0, 1.75, 0, 0, 0, 0, 2.0, 5.0]
    assert ends == [2, 7, 8] and last == 8


def test_an_outcome_after_a_reply_that_was_cut_goes_to_the_policys_last_token():
    token_rewards, ends, last = placed([(9, 1.0)], range(3, 9))
    assert token_rewards == [0, 0, 6.0, 0, 0, 0, 0, 0, 0]
    assert ends == [2] and last == 2


def test_lengths_are_own_tokens_and_what_bounds_them_is_the_whole_text():
    """Metrics count the policy's tokens; overlong shaping, as the limit, what a tool wrote, too."""
    samples = sampled(tiny(), always())
    own = [int(row.sum()) for row in samples.completion_mask]
    score = rewards.Score(1.0, 1.0, {}, [])
    batch = types.SimpleNamespace(
        samples=samples,
        scores=[score] * len(own),
        advantages=torch.ones_like(samples.sampler_logprobs),
    )
    row = train.measure_lengths(batch)
    assert row["length_mean"] == pytest.approx(sum(own) / len(own))
    assert (row["length_min"], row["length_max"]) == (min(own), max(own))
    assert train.mean_advantage(batch) == 1

    config = train.Config(max_new_tokens=16, overlong_cache=8)
    judged = types.SimpleNamespace(samples=samples, scores=batch.scores)
    shaped = train.shaped_rewards(config, judged).tolist()
    whole = samples.lengths.tolist()
    assert shaped == pytest.approx([1 - max(length - 8, 0) / 8 for length in whole])
    assert shaped != pytest.approx([1 - max(length - 8, 0) / 8 for length in own])


# ------------------------------------------------------------------------------ what it is asked


def replies_of(function, after="</c>", tokenizer=None):
    tokenizer = tokenizer or byte_tokenizer(fallback=False)
    return R.Replies(rewards.Tool(function, after), tokenizer, len(tokenizer))


def when_asked(replies, text) -> list[str]:
    """The texts that the tool was given while a completion was written, a token at a time."""
    ids, asked = replies.tokenizer.encode(text, add_special_tokens=False), []
    replies.tool = replies.tool._replace(function=asked.append)
    for count in range(1, len(ids) + 1):
        if ids[count - 1] in replies.asking_tokens:
            assert replies.to(ids[:count], room=9) == []
    return asked


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    "text, after, expected",
    [
        ("a</c>b</c>c.", "</c>", ["a</c>", "a</c>b</c>"]),
        ("</c </c> > >", "</c>", ["</c </c>"]),
        ("c>>>c>", "c>", ["c>", "c>>>c>"]),
        ("。a→b。→", "→", ["。a→", "。a→b。→"]),
        ("no such text > </b>", "</c>", []),
    ],
)
def test_a_tool_is_asked_when_the_marker_is_complete(text, after, expected, fallback):
    tokenizer = byte_tokenizer(fallback)
    assert when_asked(replies_of(str, after, tokenizer), text) == expected


def test_a_token_that_holds_more_than_the_end_of_the_marker_completes_it():
    """`>b` is one token: the tool sees it whole."""
    words = {word: i for i, word in enumerate(["<eos>", "<unk>", *"abc</>", ">b"])}
    tokenizer = character_tokenizer()
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    inner["model"]["vocab"], inner["added_tokens"], inner["pre_tokenizer"] = words, [], None
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(inner)),
        eos_token="<eos>",
        unk_token="<unk>",
    )
    asked = []
    replies = R.Replies(rewards.Tool(asked.append, "</c>"), tokenizer, len(tokenizer))
    assert sorted(tokenizer.convert_ids_to_tokens(replies.asking_tokens)) == [">", ">b"]
    replies.to(tokenizer.convert_tokens_to_ids(["a", "<", "/", "c", ">b"]), room=1)
    assert asked == ["a</c>b"]


def test_a_marker_is_found_behind_bytes_that_alone_are_no_character():
    """Of `。→é`, seven tokens as é is one, the last five begin within a character, and a run of
    bytes that begins so reads as no character at all: the whole is read."""
    inner = json.loads(byte_tokenizer(fallback=True).backend_tokenizer.to_str())
    inner["model"]["vocab"]["é"] = len(inner["model"]["vocab"])
    backend = type(character_tokenizer().backend_tokenizer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend.from_str(json.dumps(inner))
    )
    ids = tokenizer.encode("。→é", add_special_tokens=False)
    assert len(ids) == 7 and "→" not in tokenizer.decode(ids[-5:])
    assert when_asked(replies_of(str, "→é", tokenizer), "。→é→") == ["。→é"]


def test_nothing_is_decoded_where_no_token_could_complete_the_marker(monkeypatch):
    """A long completion costs no more than its tokens that could; a decoding of its end, mostly."""
    replies = replies_of(lambda text: "1", after="</c>")
    ids = replies.tokenizer.encode("a>b" * 1000, add_special_tokens=False)
    read, lengths = replies.read, []
    monkeypatch.setattr(replies, "read", lambda ids: lengths.append(len(ids)) or read(ids))
    assert replies.to(ids[:-1], room=9) == [] and lengths == [len("</c>")]
    assert ids[0] not in replies.asking_tokens


def test_a_reply_is_cut_to_the_room_and_tokenised_no_further(monkeypatch):
    replies = replies_of(lambda text: "12345")
    ids = replies.tokenizer.encode("</c>", add_special_tokens=False)
    assert replies.read(replies.to(ids, room=3)) == "123" and replies.to(ids, room=1000)
    replies.tool = rewards.Tool(lambda text: "1" * 10**7, "</c>")
    assert len(replies.to(ids, room=10**7)) == R.LONGEST_REPLY and replies.faults == 0


def test_control_tokens_in_a_reply_are_plain_text():
    """`<eos>` is five characters, which this tokenizer mostly does not know."""
    tokenizer = character_tokenizer()
    replies = R.Replies(rewards.Tool(lambda text: "1<eos>2<pad>", ";"), tokenizer, len(tokenizer))
    ids = tokenizer.encode("3;")
    found = replies.to(ids, room=99)
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id}.intersection(found)
    assert found[0] == tokenizer.encode("1")[0] and len(found) == 12 and replies.faults == 0


def test_a_tokenizer_that_makes_control_tokens_of_text_is_refused():
    careless = types.SimpleNamespace(
        tokenizer=lambda text, **options: types.SimpleNamespace(input_ids=[5, 1]),
        control={1},
        vocabulary=18,
    )
    with pytest.raises(rewards.UserError, match="'1<eos>' holds a control token"):
        R.Replies.tokens(careless, "1<eos>")


def leave(text):
    raise SystemExit(3)


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda text: 1 / 0, "ZeroDivisionError"),
        (lambda text: 7, "it returned 7; expected text or None"),
        (lambda text: ["7"], "expected text or None"),
        (lambda text: b"7", "expected text or None"),
        (lambda text: "\ud800", ""),  # no text either: half of a character
        (leave, "SystemExit"),
    ],
    ids=["raises", "number", "list", "bytes", "surrogate", "exits"],
)
def test_a_tool_that_fails_is_a_fault_and_no_reply(function, words):
    replies = replies_of(function)
    ids = replies.tokenizer.encode("1</c>", add_special_tokens=False)
    assert [replies.to(ids, room=9), replies.to(ids, room=9)] == [[], []]
    assert replies.faults == 2 and words in replies.fault and "1</c>" in replies.fault


def test_a_marker_that_no_token_can_complete_is_refused():
    with pytest.raises(rewards.UserError, match="--tool-after </c>: no token"):
        replies_of(str, tokenizer=character_tokenizer())


# ------------------------------------------------------------------------------ the calculator


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<calc>12*7</calc>", "=84"),
        ("<calc>1+2</calc>=3<calc>3-20</calc>", "=-17"),
        ("12*7</calc>", "=84"),  # it need not be opened
        ("<calc>999999999*999999999</calc>", "=999999998000000001"),
        ("<calc>12*7</calc>\n", "=84"),
        ("<calc>1234567890*1</calc>", "=?"),
        ("<calc>1/0</calc>", "=?"),
        ("<calc>2**9</calc>", "=?"),
        ("<calc>1+2+3</calc>", "=?"),
        ("<calc>-1+2</calc>", "=?"),
        ("<calc> 1+2</calc>", "=?"),
        ("<calc>1+2\n</calc>", "=?"),
        ("<calc>٣+٣</calc>", "=?"),
        ("<calc></calc>", "=?"),
        ("<calc>__import__('os')</calc>", "=?"),
        ("", "=?"),
    ],
)
def test_the_calculator_computes_one_operation_of_two_numbers(text, expected):
    assert rewards.calculate(text) == expected


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("<calc>12*34</calc>=408<calc>408+56</calc>=464#464", [(18, 1), (41, 1), (49, 1)]),
        ("<calc>12*34</calc>=408#408", [(18, 1), (26, 0)]),
        ("<calc>12*35</calc>=420<calc>420+56</calc>=476#476", [(18, 0), (41, 0), (49, 0)]),
        ("<calc>12*35</calc>=420<calc>408+56</calc>=464#464", [(18, 0), (41, 1), (49, 1)]),
        ("<calc>12*34</calc>=408<calc>408-56</calc>=352#352", [(18, 1), (41, 0), (49, 0)]),
        ("<calc>408+56</calc>=464#464", [(19, 0), (27, 1)]),
        ("<calc>12*34</calc>" * 3 + "#464", [(18, 1), (36, 0), (58, 1)]),
        ("#464", [(4, 1)]),
        ("<calc><calc>12*34</calc>", [(24, 1), (24, 0)]),
        ("12*34</calc>", [(12, 1), (12, 0)]),
        ("<calc>12*34", [(11, 0)]),
        ("", [(0, 0)]),
    ],
)
def test_calculator_steps_pay_each_call_that_is_needed(completion, expected):
    """12*34+56 is 408+56 is 464: ends in characters, the outcome last."""
    found = rewards.VERIFIERS["calculator_steps"](completion, "464", prompt="12*34+56=")
    assert found == expected


def test_calculator_problems_are_what_their_answers_say():
    rows = rewards.problems(rewards.TASKS["calculator"], 0)
    for _, row in zip(range(300), rows):
        left, right, number = map(
            int, row["prompt"][:-1].replace("+", "*").replace("-", "*").split("*")
        )
        sign = 1 if "+" in row["prompt"] else -1
        assert int(row["answer"]) == left * right + sign * number
        assert all(10 <= each <= 99 for each in (left, right, number))


def test_demonstrations_hold_the_tools_replies_but_do_not_teach_them():
    """What stands between `</calc>` and what the policy writes next is the calculator's, and no
    label; a fifth to a half of the demonstrations do without it."""
    task = rewards.TASKS["calculator"]
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *task.alphabet])}
    letters = list(words)
    calls = 0
    shown = train.demonstrations(task, words)[:400]
    for row in shown:
        text = "".join(letters[i] for i in row["input_ids"])
        own = "".join(letters[i] for i in row["labels"] if i != -100)
        prompt, completion = text[:9], text[9:]
        if "<calc>" not in completion:
            assert completion == own
            continue
        calls += 1
        written = ""
        for part in own.split("</calc>")[:-1]:
            written += part + "</calc>"
            written += rewards.calculate(written)
        assert prompt + written + own.rpartition("</calc>")[2] == text
    assert 0.5 < calls / len(shown) < 0.8


# ------------------------------------------------------------------------------ runs

TOOL = """
def answer(text):
    return "=7" if len(text) % 2 else None

def fails(text):
    if len(text) > 3:
        with open("failures", "a") as file:
            file.write("once\\n")
        raise ArithmeticError("\\x1b[31mboom")

def number(text):
    return len(text)

def two(text, other):
    return ""

def broken(text):
    return 1 / 0

async def later(text):
    return ""
"""
WITH = f"{BASE} --tool tool.py:answer --tool-after ; --max-new-tokens 16"


@pytest.fixture
def stand(place):
    Path("tool.py").write_text(TOOL)
    return place


def knobs(algorithm) -> str:
    """Flags that bring in what else reads tokens: KL, entropy, overlong shaping, the sampler."""
    flags = "--kl-coef 0.1 --entropy-coef 0.01 --overlong-cache 4 --epochs 2"
    if algorithm in ("gspo", "grpo"):
        flags += " --tis-cap 2 --off-policy-delta 0.1 --repetition-penalty 0.1"
    if algorithm == "gspo-token":
        flags += " --reward pay.py:steps --mismatch-mask completion"
    return flags


ALGORITHMS = [
    name if name in ("gspo", "ppo") else pytest.param(name, marks=pytest.mark.slow)
    for name in gspo.ALGOS
]


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_of_a_reply_enters_a_run(algorithm, tmp_path, monkeypatch, seen):
    """Every algorithm, two steps: whatever scorer and critic said of the tool's tokens, all metrics
    and weights are the same bits; the loss's mask leaves them out, and denominators count none."""
    flags = f"{WITH} --algo {algorithm} {knobs(algorithm)}"
    plain = good(tmp_path / "plain", flags)
    for batch in seen.batches:
        samples = batch.samples
        assert samples.forced.any() and torch.equal(batch.mask, samples.completion_mask)
        assert (samples.sampler_logprobs[samples.forced] == 0).all()
        own = torch.zeros(len(batch.mask))
        for i, length in enumerate(samples.lengths.tolist()):
            own[i] = sum(not each for each in samples.forced[i, :length])
        row = metrics(plain.folder)[batch.step - 1]
        assert row["length_mean"] == pytest.approx(float(own.mean()))
        assert row["length_max"] == own.max()
        forced = float(samples.forced.sum() / samples.lengths.sum())
        assert row["tool_tokens"] == pytest.approx(forced)
        assert row["tool_calls"] == pytest.approx(calls_by_hand(samples))
        assert row["tool_faults"] == 0

    score = R.completion_logprobs
    values = R.completion_values

    def babbling(model, samples, **options):
        found = score(model, samples, **options)
        return [torch.where(samples.forced, 3.7, one) for one in found]

    def guessing(critic, samples):
        return torch.where(samples.forced, -2.5, values(critic, samples))

    monkeypatch.setattr(R, "check_scorer", lambda *args, **options: None)  # it has no tool
    monkeypatch.setattr(R, "completion_logprobs", babbling)
    monkeypatch.setattr(R, "completion_values", guessing)
    other = good(tmp_path / "other", flags)
    assert timeless(plain.folder) == timeless(other.folder)
    assert digests(plain.folder) == digests(other.folder)


def calls_by_hand(samples) -> float:
    total = 0
    for row in samples.forced.tolist():
        total += sum(now and not before for before, now in zip([False, *row], row))
    return total / len(samples.lengths)


@pytest.mark.usefixtures("stand")
def test_a_run_shows_the_whole_text_and_evaluates_with_the_tool(tmp_path):
    folder = good(tmp_path, f"{WITH} --steps 3 --eval-every 1").folder
    rows = [json.loads(line) for line in Path(folder, "samples.jsonl").read_text().splitlines()]
    shown = Path(folder, "evaluations.jsonl").read_text() + json.dumps(rows)
    asked = [row["completion"] for row in rows if ";" in row["completion"][:10]]
    assert asked
    for text in asked:
        place = text.index(";") + 1
        assert (text[place : place + 2] == "=7") == (place % 2 == 1)
    assert ";=7" in shown
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["tool"] == "tool.py:answer" and config["tool_after"] == ";"
    assert "tool_calls" in Path(folder, "report.html").read_text()


@pytest.mark.usefixtures("stand")
def test_a_tool_reaches_the_held_out_prompts(tmp_path, monkeypatch):
    generate, given = R.generate, []

    def watched(model, prompts, **options):
        given.append((options.get("replies"), options.get("temperature")))
        return generate(model, prompts, **options)

    monkeypatch.setattr(train.rollout, "generate", watched)
    good(tmp_path, f"{WITH} --steps 1 --eval-samples 2")
    assert given.pop(0) == (None, None)  # check_scorer's
    assert {temperature for _, temperature in given} == {0.0, 1.0}
    assert all(replies is not None for replies, _ in given)


@pytest.mark.usefixtures("stand")
def test_a_tool_that_fails_is_counted_step_by_step_and_said_once(tmp_path, monkeypatch):
    collect, expected = train.collect, []
    Path("failures").write_text("")

    def failures():
        return Path("failures").read_text().count("\n")

    def watched(run, step):
        before = failures()
        batch = collect(run, step)
        expected.append(failures() - before)
        return batch

    monkeypatch.setattr(train, "collect", watched)
    result = good(tmp_path, f"{WITH} --tool tool.py:fails --steps 3 --max-new-tokens 24")
    rows = metrics(result.folder)
    assert [row["tool_faults"] for row in rows] == expected and sum(expected) > 1
    assert all(row["verifier_faults"] == row["tool_calls"] == 0 for row in rows)
    assert result.out.count("ArithmeticError") == 1 and "\x1b" not in result.out


@pytest.mark.usefixtures("stand")
def test_a_resumed_run_with_a_tool_is_the_same_run(tmp_path, monkeypatch):
    flags = f"{WITH} --algo ppo --steps 4"
    whole = good(tmp_path / "whole", flags)
    stopped = interrupted(tmp_path / "stopped", flags, monkeypatch, at=2)
    assert stopped.status == 130
    resumed = good(tmp_path / "stopped", "--resume --name run", small=False)
    same_run(whole.folder, resumed.folder)


@pytest.mark.slow
@pytest.mark.usefixtures("stand")
def test_two_processes_with_a_tool_train_as_one(tmp_path):
    flags = f"{WITH} --algo gspo-token --reward pay.py:steps --steps 4 --lr 1e-4"
    alone = together(1, tmp_path / "one", flags)
    several = together(2, tmp_path / "several", flags)
    alike(several, alone)
    assert sum(row["tool_calls"] for row in metrics(alone.folder)) > 0


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("whose", ["policy", "sampler"])
def test_experts_are_replayed_around_replies(whose, tmp_path):
    flags = f"{WITH} --model models/moe --routing-replay {whose} --eval-every 1"
    rows = metrics(good(tmp_path, flags).folder)
    assert all(row["expert_flips"] < 0.5 and row["tool_calls"] > 0 for row in rows)


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize(
    "name, words",
    [
        ("two", ["tool.py:two", "other", "text"]),
        ("broken", ["tool.py:broken", "ZeroDivisionError"]),
        ("later", ["tool.py:later", "async"]),
    ],
)
def test_a_function_that_cannot_answer_is_one_sentence(name, words, tmp_path):
    """Others are in test_flags."""
    sentence = refused(tmp_path / "runs", f"{BASE} --tool tool.py:{name} --tool-after ;")
    assert all(word in sentence for word in words), sentence


@pytest.mark.usefixtures("stand")
def test_a_model_that_transformers_samples_is_refused_with_a_tool(models, tmp_path):
    config = transformers.MambaConfig(
        vocab_size=18, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0
    )
    config.eos_token_id = 1
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(models / "mamba")
    character_tokenizer().save_pretrained(models / "mamba")
    flags = WITH.replace("models/tiny", "models/mamba")
    assert "--tool: mamba is sampled by transformers" in refused(tmp_path, flags)


@pytest.mark.usefixtures("stand")
def test_the_command_of_rollout_takes_the_tool(models, capsys):
    flags = ["--model", str(models / "tiny"), "--prompt", "1+2=", "--n", "8", "--device", "cpu"]
    flags += ["--max-new-tokens", "24"]
    assert R.main([*flags, "--tool", "tool.py:answer", "--tool-after", "+"]) == 0
    assert "+=7" in capsys.readouterr().out
    assert R.main([*flags, "--tool", "tool.py:answer"]) == 2
    assert "--tool-after" in capsys.readouterr().err


def test_a_task_brings_its_tool_where_the_model_is_its_own(place):
    own = train.resolve(train.parse_flags(["--task", "calculator"]))
    assert (own.tool, own.tool_after, own.reward) == ("calculator", "</calc>", "arithmetic")
    assert train.resolve({"task": "arithmetic"}).tool is None
    data = {"model": "models/tiny", "data": "rows.jsonl"}
    assert train.resolve(data).tool is None


# ------------------------------------------------------------------------------ it is learned


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", gspo.ALGOS)
def test_every_algorithm_trains_on_the_calculator(algorithm, place, tmp_path, monkeypatch, seen):
    """Two steps of the policy as it is after its whole warm start."""
    monkeypatch.setattr(train, "WARM_STEPS", 560)
    reward = "--reward calculator_steps" if algorithm == "gspo-token" else ""
    flags = (
        f"--task calculator --algo {algorithm} --max-new-tokens 64 --prompts-per-step 8 {reward}"
    )
    folder = good(tmp_path, flags).folder
    for row in metrics(folder):
        assert row["tool_calls"] > 0.1 and 0 < row["tool_tokens"] < 0.5
        assert math.isfinite(row["grad_norm"]) and row["bad_updates"] == 0


@pytest.mark.slow
def test_the_tiny_policy_learns_to_use_the_calculator(place, tmp_path, monkeypatch):
    """In 8 steps (in 50 it solves nearly all, see the README)."""
    monkeypatch.setattr(train, "WARM_STEPS", 560)
    flags = "--task calculator --steps 8 --name run --eval-samples 0 --eval-every 0"
    rows = metrics(good(tmp_path, flags, small=False).folder)
    assert rows[0]["solved"] < 0.25 and rows[0]["tool_calls"] < 0.6
    assert rows[-1]["solved"] > 0.4 and rows[-1]["tool_calls"] > 1
