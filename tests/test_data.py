"""What a run reads: prompts and answers, chat templates, reward models."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rollout
from tools import (
    BASE,
    SHAPE,
    character_tokenizer,
    copied,
    good,
    metrics,
    random_policy,
    refused,
    strict,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("place")

# ------------------------------------------------------------------------------ data and templates


def decoded_prompts(batch, tokenizer):
    rows = batch.samples
    for i in range(0, len(rows.lengths), 4):
        p = int(rows.prompt_lengths[i])
        yield tokenizer.decode(rows.tokens[i, rows.prompt_width - p : rows.prompt_width].tolist())


def test_gsm8k_rows_are_read_as_they_are(seen, tmp_path):
    """question / answer, where the answer is a solution that ends in #### 42; `math` by default."""
    write_rows(
        Path("gsm8k.jsonl"),
        [
            {
                "question": f"What is {i}+1?",
                "answer": f"It is {i} and one more: <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}",
            }
            for i in range(12)
        ],
    )
    result = good(tmp_path, "--model models/tiny --data gsm8k.jsonl --steps 1")
    assert strict((result.folder / "config.json").read_text())["reward"] == "math"
    assert seen.run.reward.faults == 0
    assert all(row["prompt"].startswith("What is") for row in seen.batches[0].rows)


def test_data_is_shuffled_and_a_tenth_is_held_out(seen, tmp_path):
    """30 rows, of whose prompts the hash of 3 says so: none of them is trained on; an epoch has
    each of the 27 others once."""
    rows = [{"prompt": f"{i}+0=", "answer": "0"} for i in range(30)]
    write_rows(Path("thirty.jsonl"), rows)
    result = good(
        tmp_path,
        f"{BASE} --data thirty.jsonl --prompts-per-step 9 --group-size 2 "
        "--completions-per-update 18 --steps 6",
    )
    held_out = [row["prompt"] for row in seen.run.held_out]
    trained = [row["prompt"] for batch in seen.batches for row in batch.rows[::2]]
    assert len(held_out) == 3 and "3" in result.out
    assert len(set(trained[:27])) == 27 and set(trained[:27]) == set(trained[27:])
    assert trained[:27] != trained[27:]
    assert not set(held_out) & set(trained)


def test_eval_data_is_what_is_evaluated_on(seen, tmp_path):
    write_rows(Path("left.jsonl"), [{"prompt": f"{i}+1=", "answer": "0"} for i in range(6)])
    write_rows(Path("right.jsonl"), [{"prompt": f"{i}*1=", "answer": "0"} for i in range(5)])
    good(tmp_path, f"{BASE} --data left.jsonl --eval-data right.jsonl --steps 1")
    assert sorted(row["prompt"] for row in seen.run.held_out) == [f"{i}*1=" for i in range(5)]
    assert all("+" in row["prompt"] for row in seen.batches[0].rows)


def test_the_built_in_task_holds_prompts_out(seen, tmp_path):
    good(
        tmp_path,
        f"{BASE} --steps 2 --prompts-per-step 32 --group-size 2 --eval-prompts 64 "
        "--max-new-tokens 2",
    )
    trained = {row["prompt"] for batch in seen.batches for row in batch.rows}
    assert not trained & {row["prompt"] for row in seen.run.held_out}


@pytest.fixture(scope="module")
def chat(models):
    """The tiny policy with a chat template in characters that it knows."""
    return copied(
        models / "tiny",
        models / "chat",
        chat_template__jinja=(
            b"{% for m in messages %}{{ '#' if m.role == 'system' else ';' }}{{ m.content }}"
            b"{% endfor %}{{ mark | default('') }}{% if add_generation_prompt %}={% endif %}"
        ),
    )


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", ";7+{}="),
        ("--system 12", "#12;7+{}="),
        ("--prompt-template 1+{prompt}*2", ";1+7+{}*2="),
        ('--system 3 --chat-template-args {"mark":"**"}', "#3;7+{}**="),
    ],
)
def test_chat_template_system_and_prompt_template(flags, expected, chat, seen, tmp_path):
    write_rows(Path("chat.jsonl"), [{"prompt": f"7+{i}", "answer": "0"} for i in range(10)])
    good(tmp_path, f"--model models/chat --reward pay.py:even --data chat.jsonl --steps 1 {flags}")
    for prompt, row in zip(
        decoded_prompts(seen.batches[0], seen.run.tokenizer), seen.batches[0].rows[::4]
    ):
        assert prompt == expected.format(row["prompt"][2:])
    assert len(seen.batches[0].rows) == 16


def conversation(number: int) -> list[dict]:
    """A system message, an example with its answer, and a problem."""
    return [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": f"7+{number}"},
    ]


@pytest.fixture
def conversations(place) -> Path:
    rows = [{"prompt": conversation(i), "answer": str(7 + i)} for i in range(10)]
    return write_rows(place / "talks.jsonl", rows)


TALKS = "--model models/chat --data talks.jsonl --steps 1"


def test_a_prompt_may_be_a_list_of_messages(chat, conversations, seen, tmp_path):
    """The template reads all of them; samples, evaluations and the last line have their text."""
    result = good(tmp_path, f"{TALKS} --reward pay.py:even")
    rows = seen.batches[0].rows[::4]
    for prompt, row in zip(decoded_prompts(seen.batches[0], seen.run.tokenizer), rows):
        problem = row["prompt"][-1]["content"]
        assert prompt == f"#1;2+2;4;{problem}="
    held_out = {str(row["prompt"]) for row in seen.run.held_out}
    assert held_out and not held_out & {str(row["prompt"]) for row in rows}

    for name in ("samples", "evaluations"):
        row = strict((result.folder / f"{name}.jsonl").read_text().splitlines()[0])
        assert row["prompt"].startswith("system: 1\n\nuser: 2+2\n\nassistant: 4\n\nuser: 7+")
    last = seen.run.held_out[0]["prompt"][-1]["content"]
    assert result.out.endswith(f"--prompt {last}\n")


def test_a_reward_gets_the_messages_of_the_prompt(chat, conversations, tmp_path):
    Path("talk.py").write_text(
        "def roles(completion, answer, prompt):\n"
        "    return [m['role'] for m in prompt] == ['system', 'user', 'assistant', 'user']\n"
    )
    folder = good(tmp_path, f"{TALKS} --reward talk.py:roles").folder
    assert metrics(folder)[0]["reward"] == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        (f"{TALKS} --system 3", ["--system", "system message of its own"]),
        (f"{TALKS} --prompt-template 1+{{prompt}}", ["--prompt-template", "list of messages"]),
        ("--model models/tiny --data talks.jsonl", ["list of messages", "no chat template"]),
        ("--model tiny --data talks.jsonl", ["--data talks.jsonl", "another --model", "messages"]),
    ],
)
def test_messages_are_refused_where_they_cannot_be_read(
    flags, words, chat, conversations, tmp_path
):
    sentence = refused(tmp_path / "runs", f"{flags} --reward pay.py:even")
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "runs").exists()


def test_an_empty_system_message_is_one(chat, seen, tmp_path):
    """It stands against the one that some templates bring along."""
    write_rows(Path("chat.jsonl"), [{"prompt": f"7+{i}", "answer": "0"} for i in range(10)])
    flags = "--model models/chat --reward pay.py:even --data chat.jsonl --steps 1"
    good(tmp_path, flags, "--system", "")
    for prompt in decoded_prompts(seen.batches[0], seen.run.tokenizer):
        assert prompt.startswith("#;7+")
    sentence = refused(tmp_path / "none", BASE, "--system", "")
    assert "--system" in sentence and "chat template" in sentence


def test_a_prompt_template_without_chat(seen, tmp_path):
    write_rows(Path("chat.jsonl"), [{"prompt": f"7+{i}", "answer": "0"} for i in range(10)])
    good(tmp_path, f"{BASE} --data chat.jsonl --steps 1 --prompt-template {{prompt}}*1=")
    for prompt in decoded_prompts(seen.batches[0], seen.run.tokenizer):
        assert re.fullmatch(r"7\+\d\*1=", prompt)


def test_long_prompts_are_skipped_with_a_count(seen, tmp_path):
    write_rows(
        Path("long.jsonl"), [{"prompt": "1+" * n + "1=", "answer": "0"} for n in range(1, 21)]
    )
    write_rows(Path("short.jsonl"), [{"prompt": "1+1=", "answer": "2"}])
    flags = "--data long.jsonl --eval-data short.jsonl --max-prompt-tokens 22"
    result = good(tmp_path, f"{BASE} {flags}")
    assert all(len(row["prompt"]) <= 22 for batch in seen.batches for row in batch.rows)
    line = next(line for line in result.out.splitlines() if "skipped" in line)
    assert (
        "--data" in line and re.search(r"\d+ of \d+ prompts", line) and "exceed 22 tokens" in line
    )


def test_prompts_that_fill_the_context_but_for_the_completion_are_no_fault_of_the_model(
    seen, tmp_path
):
    """The model is tried on no more tokens than the run will sample: one with learned positions
    has none beyond its context."""
    shape = dict(n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    folder = random_policy(tmp_path / "gpt2", transformers.GPT2Config(vocab_size=18, **shape))
    rows = [{"prompt": f"{i}" + "+1" * 6 + "=", "answer": "0"} for i in range(10, 30)]  # 15 tokens
    write_rows(Path("long.jsonl"), rows)
    flags = f"--model {folder} --reward pay.py:even --data long.jsonl --max-new-tokens 1"
    good(tmp_path, flags)
    assert {int(width) for width in seen.batches[0].samples.prompt_lengths} == {15}


def test_long_prompts_of_a_built_in_task_are_skipped_too(seen, tmp_path):
    good(tmp_path, f"{BASE} --max-prompt-tokens 6 --steps 2")
    assert all(len(row["prompt"]) <= 6 for batch in seen.batches for row in batch.rows)
    sentence = refused(tmp_path / "none", f"{BASE} --max-prompt-tokens 5")
    assert "--max-prompt-tokens" in sentence


def test_every_end_token_of_the_generation_config_ends(models, seen, tmp_path):
    """Here `#` ends too, as <|im_end|> does beside <|endoftext|>."""
    folder = copied(models / "tiny", models / "two-ends")
    tokenizer = AutoTokenizer.from_pretrained("models/tiny")
    mark = tokenizer.encode("#")[0]
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(settings | {"eos_token_id": [tokenizer.eos_token_id, mark]})
    )
    good(tmp_path, "--model models/two-ends --reward pay.py:even --steps 1 --max-new-tokens 24")
    rows = seen.batches[0].samples
    ended = 0
    for ids, n in zip(rows.completions.tolist(), rows.lengths.tolist()):
        assert mark not in ids[: n - 1]
        ended += ids[n - 1] == mark
    assert ended > 0


# ------------------------------------------------------------------------------ reward models


@pytest.fixture(scope="module")
def judge(models):
    """A reward model of the policy's vocabulary, random weights, one label."""
    torch.manual_seed(1)
    shape = transformers.Qwen3Config(**SHAPE, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(shape)
    with torch.no_grad():
        model.score.weight.normal_(std=0.5)
    model.save_pretrained(models / "judge")
    character_tokenizer().save_pretrained(models / "judge")
    return model.eval()


@pytest.mark.parametrize(
    "reward, weights",
    [("model", (0, 1)), ("2*model", (0, 2)), ("pay.py:even+0.25*model", (1, 0.25))],
)
def test_a_reward_model_scores_prompt_and_completion(reward, weights, judge, seen, tmp_path):
    """reward = verifier + w model, the model read by transformers' own forward, row by row; it
    stays out of `solved` where a verifier judges."""
    good(tmp_path, f"--model models/tiny --reward-model models/judge --steps 1 --reward {reward}")
    batch, texts = seen.batches[0], character_tokenizer()
    for i, score in enumerate(batch.scores):
        ids = texts.encode(batch.rows[i]["prompt"] + batch.texts[i])
        with torch.no_grad():
            judged = float(judge(torch.tensor([ids]), use_cache=False).logits[0, 0])
        even = score.terms.get("even", 0.0)
        expected = weights[0] * even + weights[1] * judged
        assert float(batch.rewards[i]) == pytest.approx(expected, abs=1e-4)
        assert score.correct == pytest.approx(
            even if weights[0] else 1 / (1 + math.exp(-judged)), abs=1e-4
        )
    assert float(batch.rewards.std()) > 0


def test_a_reward_model_alone_tells_groups_apart_beyond_1(judge, monkeypatch, tmp_path):
    """Scores above 1 do not make every group all right: dynamic sampling keeps what differs."""

    def pays_much(prompts, texts):
        return [5.0 + text.count("2") + len(text) / 10 for text in texts]

    monkeypatch.setattr(rollout, "reward_model", lambda source, device: pays_much)
    result = good(
        tmp_path,
        "--model models/tiny --algo dapo --reward model --reward-model models/judge --steps 1",
    )
    row = metrics(result.folder)[0]
    assert row["advantage_abs"] > 0 and row["dead_right"] < 1 and row["reward"] > 1
    assert 0 < row["solved"] < 1


def test_a_reward_model_does_not_read_padding(judge, models, tmp_path):
    """Its scores in a batch are those of one row at a time, whatever pad token its config names;
    what is too long loses its beginning."""
    folder = tmp_path / "judge"
    shutil.copytree(models / "judge", folder)
    for pad in (2, None):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"pad_token_id": pad, "max_position_embeddings": 24})
        )
        score = rollout.reward_model(str(folder), "cpu")
        prompts, completions = ["3+4=", "5*", "1+" * 10], ["7", "11111111", "12345"]
        together = score(prompts, completions)
        alone = [score([prompt], [text])[0] for prompt, text in zip(prompts, completions)]
        assert together == pytest.approx(alone, abs=1e-5)
        assert score(["1+" * 20], ["5#5"]) != score(["1+" * 20], ["5#6"])
    many = score(["3+4="] * 40 + prompts, ["7"] * 40 + completions)
    assert len(set(many[:40])) == 1 and len(many) == 43  # equal texts, in several batches


@pytest.mark.parametrize("fault", ["nan", "template"])
def test_a_reward_model_that_cannot_score_is_refused(fault, judge, models, tmp_path):
    folder = tmp_path / "judge"
    shutil.copytree(models / "judge", folder)
    if fault == "nan":
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        torch.nn.init.constant_(model.score.weight, math.nan)
        model.save_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = "{{ raise_exception('no roles') }}"
        tokenizer.save_pretrained(folder)
    flags = f"--model models/tiny --reward model --reward-model {folder}"
    assert "--reward-model" in refused(tmp_path / "runs", flags)
    assert not (tmp_path / "runs").exists()


def test_a_reward_model_reads_its_own_chat_template(judge, models, tmp_path):
    """Prompt and completion are turns of a chat where its tokenizer has one; the first token of the
    template's text is not doubled."""
    folder = tmp_path / "chatty"
    shutil.copytree(models / "judge", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}1{% else %}2{% endif %}{{ m.content }}#"
        "{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    messages = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    prompts = ["3+4=", "5*", [*messages, {"role": "user", "content": "5"}]]
    completions = ["7", "11111111", "6"]
    scores = rollout.reward_model(str(folder), "cpu")(prompts, completions)
    for text, score in zip(("13+4=#27#", "15*#211111111#", "13#24#15#26#"), scores, strict=True):
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            assert score == pytest.approx(float(judge(ids).logits[0, 0]), abs=1e-5)


def test_a_reward_model_without_a_chat_template_reads_messages_as_text():
    judge = SimpleNamespace(template=None)
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert rollout.RewardModel.text(judge, "3+4=", "7") == "3+4=7"
    assert rollout.RewardModel.text(judge, messages, "7") == (
        "system: 1\n\nuser: 2\n\nassistant: 7"
    )
