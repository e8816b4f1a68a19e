"""A tool answers in the middle of a completion, and its reply is no action of the policy's."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gspo
import rollout
import train
from rewards import Verdict
from support.data import completion_text
from test_ranks import Together, alike, ended_well
from tools import BASE, byte_tokenizer, character_tokenizer, good, metrics, refused, same_run

pytest.importorskip("support.extras.tools")
from support.extras.tools import Tool, Turns, calculate, parse_tool  # noqa: E402

END, LIMIT = 1, 16
PROMPTS = ["1+2=", "34*5+6=", "7="]
UNIFORMS = torch.rand(len(PROMPTS), 3, LIMIT, generator=torch.Generator().manual_seed(0))
TOKENIZER = character_tokenizer()


def says(text):
    """The tool of most tests: its answer depends on the text, and is sometimes none."""
    return [None, "=7", "", "#12", "3;"][len(text) % 5]


@pytest.fixture(scope="module")
def model(models):
    return rollout.load_model(str(models / "tiny"), "cpu")


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def sampled(model, function=says, after=";", **options):
    turns = Turns(rollout.generate, Tool(function, after), TOKENIZER)
    options = dict(eos_ids=[END], pad_id=0, temperature=1.0) | options
    return turns(model, [ids_of(prompt) for prompt in PROMPTS], UNIFORMS, **options)


@torch.no_grad()
def by_hand(model, function=says, after=";", temperature=1.0, stop=None):
    """A loop without cache or turns: tokens, which are the policy's, their log-probs, truncated."""
    for prompt, rows in zip(PROMPTS, UNIFORMS):
        for row in rows:
            tokens, own, logprobs, ended = [], [], [], False
            while len(tokens) < LIMIT and not ended:
                ids = torch.tensor([ids_of(prompt) + tokens])
                logits = model(ids, use_cache=False).logits[:, -1]
                token, logprob = rollout.sample_token(logits, row[None, len(tokens)], temperature)
                tokens.append(int(token))
                own.append(True)
                logprobs.append(float(logprob))
                ended = tokens[-1] == END or (stop and TOKENIZER.decode(tokens).endswith(stop))
                text = completion_text(TOKENIZER, tokens)
                if not ended and text.endswith(after) and tokens[-1] in ids_of(after):
                    reply = ids_of(function(text) or "")[: LIMIT - len(tokens)]
                    tokens += reply
                    own += [False] * len(reply)
                    logprobs += [0.0] * len(reply)
            yield tokens, own, logprobs, not ended


def sampled_as_by_hand(model, function=says, after=";", temperature=1.0, stop=None, **options):
    stops = rollout.StopTexts(TOKENIZER, [stop]) if stop else None
    out = sampled(model, function, after, temperature=temperature, stops=stops, **options)
    rows = list(by_hand(model, function, after, temperature, stop))
    assert not all(all(own) for _, own, _, _ in rows) and len(rows) == len(out.lengths)
    for i, (tokens, own, logprobs, cut) in enumerate(rows):
        rest = [0] * (out.completion_mask.shape[1] - len(tokens))  # padding
        assert out.lengths[i] == len(tokens) and bool(out.truncated[i]) == cut
        assert out.completions[i].tolist() == tokens + rest
        assert out.completion_mask[i].tolist() == own + rest
        assert out.sampler_logprobs[i].tolist() == pytest.approx(logprobs + rest, abs=2e-5)
    return out


# ---- sampling


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_gb": 3e-5}, {"temperature": 0.0, "after": "8"}, {"after": "<unk>"}],
    ids=str,
)
def test_sampling_in_turns_is_a_loop_that_appends_what_the_tool_says(model, options):
    """Few slots, too, so that samples take the places of others, and a special token that asks."""
    sampled_as_by_hand(model, **options)


def test_a_marker_of_several_tokens(model):
    """`+` may end it, and mostly does not: then the completion goes on as if nothing was."""
    texts = TOKENIZER.batch_decode(sampled(model, str).completions, skip_special_tokens=True)
    after = next(text[3:5] for text in texts if len(set(text[3:5])) == 2)
    sampled_as_by_hand(model, lambda text: "=7", after)


def test_the_limit_bounds_the_whole_completion_and_cuts_a_reply(model):
    out = sampled_as_by_hand(model, lambda text: "3" * 100)
    assert (out.truncated & (out.lengths == LIMIT) & ~out.completion_mask[:, -1]).any()


def test_a_context_that_is_almost_full_takes_more_turns(model):
    """A long text beside one with much room: together they would not fit. The same tokens."""
    expected = sampled(model, after="2")
    config, longest = model.config, max(len(ids_of(prompt)) for prompt in PROMPTS)
    before, config.max_position_embeddings = config.max_position_embeddings, longest + LIMIT
    out = sampled(model, after="2")
    config.max_position_embeddings = before
    assert torch.equal(out.tokens, expected.tokens)


def test_an_end_token_that_may_ask_ends_and_one_in_a_reply_does_not(model):
    asked = []
    ends = ids_of(";")
    out = sampled(model, asked.append, eos_ids=ends)
    assert not asked and (~out.truncated).any()
    out = sampled(model, lambda text: "5", after="+", eos_ids=ids_of("5"))
    given = (out.completions == ids_of("5")[0]) & ~out.completion_mask
    assert (given & (torch.arange(LIMIT) < out.lengths[:, None] - 1)).any()


def test_a_stop_text_may_begin_in_an_earlier_turn(model):
    """Of two tokens, of which the first asks the tool, which mostly says nothing."""

    def function(text):
        return "=7" if len(text) % 3 == 2 else ""

    free = sampled(model, function)
    texts = [completion_text(TOKENIZER, ids) for ids in free.completions.tolist()]
    stop = next(text[i : i + 2] for text in texts for i in [text.find(";")] if 0 <= i < 14)
    out = sampled_as_by_hand(model, function, stop=stop)
    assert (out.lengths < free.lengths).any()


# ---- calls of the tool


def test_it_is_asked_when_its_text_is_complete():
    """Once each, whatever the tokens. Only after a token that may ask."""
    tokenizer = byte_tokenizer([(">", "b")])
    for text, after, expected in (
        ("a</c>d</c>c.", "</c>", ["a</c>", "a</c>d</c>"]),
        ("c>>>c>", "c>", ["c>", "c>>>c>"]),
        ("a</c>b.", "</c>", ["a</c>b"]),  # one token holds more than the end
        ("no such text > </b>", "</c>", []),
    ):
        turns = Turns(None, Tool(str, after), tokenizer)
        ids, asked = tokenizer.encode(text), []
        for count in range(1, len(ids) + 1):
            if turns.is_asked(ids[:count]):
                assert ids[count - 1] in turns.asking
                asked.append(tokenizer.decode(ids[:count]))
        assert asked == expected


def test_a_tool_that_fails_gives_no_reply_and_no_verdict():
    """In a process of two, which has the first two of three completions."""
    verdict = Verdict("1;", {}, -1.0, {"near": -1.0}, [(1, 0.5)], {"near": -0.5}, "")
    ranks = SimpleNamespace(gather=lambda mine: [mine, ["boom"]])
    for words, function in (
        ("ZeroDivisionError", lambda text: 1 / 0),
        ("", lambda text: "\ud800"),  # no text: half of a character
        ("SystemExit", lambda text: exit(3)),
    ):
        turns = Turns(None, Tool(function, ";"), TOKENIZER)
        turns.faults = ["", ""]
        assert turns.reply(1, "1;") == []
        first, second, third = turns.abstain([verdict] * 3, ranks)
        assert first == verdict and third.fault == "boom"
        assert words in second.fault and "1;" in second.fault and second.steps == []
        numbers = (second.reward, second.terms["near"], second.with_steps["near"])
        assert all(map(math.isnan, numbers))


def test_a_reply_is_plain_text():
    """`<eos>` is five characters, which this tokenizer mostly does not know."""
    turns = Turns(None, Tool(lambda text: "1<eos>2<pad>", ";"), TOKENIZER)
    found = turns.reply(0, "3;")
    assert not {0, END}.intersection(found) and len(found) == 12


def test_the_calculator_computes_one_operation_of_two_numbers():
    assert calculate("<calc>12*7</calc>") == "=84"
    assert calculate("<calc>1+2</calc>=3<calc>3-20</calc>") == "=-17"
    for call in ("", "1234567890*1", "1/0", "2**9", "1+2+3", "٣+٣", "__import__('os')"):
        assert calculate(f"<calc>{call}</calc>") == "=?", call


# ---- runs

TOOL = """
def answer(text):
    return "=7" if len(text) % 2 else None

def fails(text):
    raise ArithmeticError("\\x1b[31mboom")
"""
WITH = f"{BASE} --tool tool.py:answer@2 --max-new-tokens 16"


@pytest.fixture(autouse=True)
def stand(place):
    Path("tool.py").write_text(TOOL)


def test_a_place_is_read_or_refused_in_one_sentence(tmp_path):
    assert parse_tool("calculator").after == "</calc>"
    tool = parse_tool("tool.py:answer@</a@b>")
    assert tool.after == "</a@b>" and tool.function("1") == "=7"
    for place, words in {
        "tool.py:answer": "called after TEXT",
        "calc": "calculator",
        "tool.py:answers@;": "has no answers",
        "no.py:answer@;": "FileNotFoundError",
        "tool.py:answer@</c>": "no token of this tokenizer can complete",
    }.items():
        sentence = refused(tmp_path / "runs", BASE, "--tool", place)
        assert words in sentence and "--tool" in sentence
    # a task brings its tool where the model is built in
    assert train.parse_flags(["--task", "calculator"]).tool == "calculator"
    assert train.parse_flags(["--model", "models/tiny", "--data", "rows.jsonl"]).tool is None


ALGORITHMS = [
    name if name in ("gspo", "ppo") else pytest.param(name, marks=pytest.mark.slow)
    for name in gspo.ALGOS
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_of_a_reply_enters_a_run(algorithm, tmp_path, monkeypatch, seen):
    """Whatever the scorer and the critic return for the tool's tokens, all is bit-identical."""
    knobs = "--kl-coef 0.1 --entropy-coef 0.01 --overlong-cache 4"
    special = {
        "gspo-token": f"{knobs} --reward pay.py:steps",
        "ppo": knobs.replace("--overlong-cache 4", ""),
        "opd": "--teacher models/tiny",
    }
    flags = f"{WITH} --algo {algorithm} {special.get(algorithm, knobs)} --epochs 2 --steps 1"
    plain = good(tmp_path / "plain", flags)
    [step], [row] = seen.steps, metrics(plain.folder)
    completions = step.batch.rollout
    own = completions.completion_mask
    assert torch.equal(step.batch.mask, own)
    inside = torch.arange(own.shape[1]) < completions.lengths[:, None]
    replies = own[:, :-1] & ~own[:, 1:] & inside[:, 1:]  # their first tokens
    assert row["tool_calls"] == pytest.approx(replies.sum() / len(own)) != 0

    score, values = rollout.completion_logprobs, rollout.completion_values

    def babbling(model, samples, *more, **options):
        found = score(model, samples, *more, **options)
        return [torch.where(samples.completion_mask, one, 3.7) for one in found]

    def guessing(critic, samples, *more):
        return torch.where(samples.completion_mask, values(critic, samples, *more), -2.5)

    monkeypatch.setattr(train, "check_scorer", lambda *arguments: True)  # it has no tool
    monkeypatch.setattr(train, "completion_logprobs", babbling)
    monkeypatch.setattr(train, "completion_values", guessing)
    same_run(plain.folder, good(tmp_path / "other", flags).folder)


def test_completions_in_which_the_tool_failed_have_no_reward(tmp_path):
    """A tool that is called after a 2, and raises. Before, they had the rewards of the others."""
    result = good(tmp_path, f"{BASE} --tool tool.py:fails@2 --max-new-tokens 16")
    assert "ArithmeticError" in result.out and "\x1b" not in result.out
    for row in metrics(result.folder):
        assert 0 < row["verifier_faults"] < 16 and row["tool_calls"] == 0
    for sample in metrics(result.folder, "samples"):
        failed = "2" in sample["completion"][:15]  # the limit is 16: then nobody asks
        assert (sample["reward"] is None) == failed, sample


@pytest.mark.slow
def test_two_processes_with_a_tool_train_as_one(tmp_path):
    flags = f"{WITH} --algo gspo-token --reward pay.py:steps --steps 4 --lr 1e-4"
    several = Together(2, tmp_path / "several", flags)
    alike(ended_well(several), good(tmp_path / "one", flags).folder)
