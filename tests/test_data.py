"""Rows of prompts and answers, held-out rows, and how prompts become tokens."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import processors

import rewards
from support.data import (
    IDS,
    PromptFormat,
    completion_text,
    hold_out,
    read_data,
    read_rows,
    shuffled_epochs,
)
from support.errors import UserError
from tools import BASE, byte_tokenizer, character_tokenizer, copied, good, metrics, write_rows

# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, words",
    [
        ('[\n  {"prompt": "a",\n   "answer": "1"}\n]', "line 1: expected UTF-8 JSONL, one object"),
        ('{"a":' * 100_000, "line 1: expected UTF-8 JSONL"),
        ("\n\n", "empty"),
        ('{"prompt": "a", "solution": "1"}', "line 1: .*answer.*found prompt, solution"),
        ('{"prompt": "a", "answer": null}', "line 1: .*field answer: found null, expected"),
        ('{"prompt": "a", "answer": {"b": [1, -Infinity]}}', "line 1: .*finite numbers"),
        ('{"prompt": "a", "answer": "1", "tokens": 9}', "line 1: .*field tokens: rename it"),
        ('{"prompt": 12, "answer": "1"}', "line 1: .*field prompt: found 12, expected text"),
        ('{"prompt": " ", "answer": "1"}', "line 1: .*no text"),
        ('{"prompt": "a\\ud800", "answer": "1"}', "line 1: .*surrogates"),
        ('{"prompt": [], "answer": "1"}', "line 1: .*expected messages"),
        ('{"prompt": [{"role": "u", "content": [{"image": "b"}]}], "answer": "1"}', "messages"),
        ('{"prompt": [{"role": "u", "content": "\\ud800"}], "answer": "1"}', "surrogates"),
        ('{"prompt": [{"role": "assistant", "content": "b"}], "answer": "1"}', "its last message"),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}', "line 3: .*answer"),
    ],
)
def test_read_rows_says_what_to_do_in_one_sentence(content, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_rows(str(path), "--data", rewards.parse_reward("exact").check_answer)
    message = str(error.value)
    assert message.startswith(f"--data {path}") and "\n" not in message and len(message) < 700
    assert re.search(words, message), message


def test_read_rows_keeps_all_fields_in_order(tmp_path):
    """`question`, as in GSM8K, is the prompt if there is no other. Parts of a message are joined.
    Whole numbers are integers: as a text, the float 1e20 is 1e+20, and a right answer earns 0."""
    path, answers = tmp_path / "rows.jsonl", []
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows = [{"question": "q", "answer": "1", "level": 3}, {"prompt": "ü", "answer": "x"}]
    numbers = [1e20, 1e23, -5.0, 0.5, 7]
    rows += [{"question": "q", "prompt": [{"role": "user", "content": parts}], "answer": numbers}]
    first, *others = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"\ufeff{first}\n\n" + "\r\n".join(others))
    rows[0]["prompt"], rows[2]["prompt"] = "q", [{"role": "user", "content": "ab"}]
    rows[2]["answer"] = [10**20, 10**23, -5, 0.5, 7]
    assert str(read_rows(str(path), "--data", answers.append)) == str(rows)
    assert answers == [row["answer"] for row in rows]


def test_a_tenth_is_held_out_by_the_prompt_wherever_it_stands():
    """In any order, with other rows and with repeated rows. No prompt is on both sides."""
    rows = [{"prompt": f"{i}+0=", "answer": i, IDS: [i]} for i in range(200)]
    train, held_out = hold_out([*rows, *rows[:50]], "--data")
    texts = {row["prompt"] for row in held_out}
    assert 10 <= len(texts) <= 30 and not texts & {row["prompt"] for row in train}
    assert len(train) + len(held_out) == 250
    _, backwards = hold_out(rows[::-2], "--data")
    assert backwards == [row for row in rows[::-2] if row["prompt"] in texts]
    for few in (backwards, *(rows[:count] for count in range(2, 9))):  # hashes of all, or of none
        train, held_out = hold_out(few, "--data")
        assert train and held_out and len(train) + len(held_out) == len(few)
    with pytest.raises(UserError, match="--data x: expected at least two prompts"):
        hold_out([{"prompt": "a", IDS: [1]}, {"prompt": "a ", IDS: [1]}], "--data x")


def test_no_row_is_trained_on_that_reads_like_a_held_out_one():
    """A template may strip spaces: "x" and "x " are then one prompt, token for token."""
    forms = ("{}", "{} ", " {}")
    rows = [{"prompt": form.format(i), IDS: [i]} for i in range(100) for form in forms]
    train, held_out = hold_out(rows, "--data")
    assert len(train) + len(held_out) == 300 and 10 <= len(held_out) <= 120
    assert not {row[IDS][0] for row in train} & {row[IDS][0] for row in held_out}


def test_an_epoch_has_each_row_once_in_an_order_of_its_own():
    rows = [{"prompt": str(i)} for i in range(30)]
    drawn = [row["prompt"] for row in itertools.islice(shuffled_epochs(rows, 7), 60)]
    assert sorted(drawn[:30], key=int) == sorted(drawn[30:], key=int) == [str(i) for i in range(30)]
    assert drawn[:30] != drawn[30:]
    assert drawn == [row["prompt"] for row in itertools.islice(shuffled_epochs(rows, 7), 60)]
    assert drawn != [row["prompt"] for row in itertools.islice(shuffled_epochs(rows, 8), 60)]


# ---- prompts to tokens ---------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ '#' if m.role == 'system' else ';' }}{{ m.content }}{% endfor %}"
    "{{ mark | default('') }}{% if add_generation_prompt %}={% endif %}"
)


def form(template=None, vocabulary=math.inf, context=math.inf, **flags):
    """Return a PromptFormat of the tests' tokenizer: one token a character."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    defaults = {"system": None, "prompt_template": "{prompt}", "chat_template_args": "{}"}
    flags = SimpleNamespace(**defaults | {"max_new_tokens": 4} | flags)
    return PromptFormat(tokenizer, flags, vocabulary, context)


def encoded(prompt, *arguments, **flags):
    """Return the text that the model gets for a prompt."""
    made = form(*arguments, **flags)
    return made.tokenizer.decode(made.encode({"prompt": prompt})[IDS])


def conversation(number: int) -> list[dict]:
    """A system message, an example with its answer, and a problem."""
    return [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": f"7+{number}"},
    ]


@pytest.mark.parametrize(
    "template, flags, expected",
    [
        (None, {"vocabulary": 14}, "7+5"),  # `+` is token 13
        (TEMPLATE, {}, ";7+5="),
        (TEMPLATE, {"system": ""}, "#;7+5="),  # against the template's own
        (TEMPLATE, {"prompt_template": "1+{prompt}*2"}, ";1+7+5*2="),
        (TEMPLATE, {"system": "3", "chat_template_args": '{"mark": "**"}'}, "#3;7+5**="),
    ],
)
def test_what_the_model_sees_of_a_prompt(template, flags, expected):
    assert encoded("7+5", template, **flags) == expected


def test_a_line_break_of_the_shell_is_one_but_not_in_a_latex_command():
    latex = r"Say if {prompt} \neq 0, \nabla f, \nu"
    assert form(prompt_template=latex).template == latex
    spelled, meant = r"\n\n{prompt}\nSo\n#\nnote\nanswer:", "\n\n{prompt}\nSo\n#\nnote\nanswer:"
    assert form(prompt_template=spelled).template == meant


@pytest.mark.parametrize(
    "prompt, template, flags, words",
    [
        ("7+5", None, {"system": ""}, "--system.* no chat template"),
        ("7+5", None, {"chat_template_args": '{"a": 1}'}, "--chat-template-args.* no chat"),
        ("7+5", None, {"chat_template_args": "{a: 1}"}, "--chat-template-args .*JSON object"),
        (conversation(5), None, {}, "list of messages needs a chat template"),
        (conversation(5), TEMPLATE, {"system": "3"}, "--system.* system message of its own"),
        (conversation(5), TEMPLATE, {"prompt_template": "1"}, "--prompt-template.* list"),
        ("7+5", "{{ raise_exception('roles') }}", {}, "--system.* template accepts.*roles"),
        ("7+é%é", None, {}, "'7\\+é%é'.* another --model .*'%é'"),
        ("7+5", None, {"vocabulary": 13}, "token 13 of the prompt '7.*vocabulary of 13"),
    ],
)
def test_prompts_that_a_model_cannot_read_are_refused(prompt, template, flags, words):
    with pytest.raises(UserError, match=words) as error:
        encoded(prompt, template, **flags)
    assert "\n" not in str(error.value)


def test_long_prompts_are_skipped_with_a_count(capsys):
    """A context of 26 has room for 22 of the prompt beside 4 of the completion."""
    rows = [{"prompt": "1+" * n + "1="} for n in range(1, 21)]
    kept = form(context=26).encode_rows(rows, "--data long.jsonl")
    assert [len(row[IDS]) for row in kept] == list(range(4, 23, 2))
    line = capsys.readouterr().out
    assert "--data long.jsonl: 10 of 20 prompts have more than 22 tokens" in line
    assert form(context=26).encode_rows(kept, "") == kept and capsys.readouterr().out == ""
    with pytest.raises(UserError, match="held out: 19 of 19 prompts"):
        form(context=7).encode_rows(rows[1:], "held out")
    problems = form(context=26).encode_problems(itertools.cycle(rows))
    assert [len(row[IDS]) for row in itertools.islice(problems, 12)] == [*range(4, 23, 2), 4, 6]


CHAT = "<s>{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


def special_form(template=None, adds="$A", wrap="{prompt}"):
    """A PromptFormat of a tokenizer with special tokens. It adds BOS or an end token by itself."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    turns = {"user": "<|user|>", "assistant": "<|assistant|>", "end": "<|end|>", "tag": "<think>"}
    tokenizer = byte_tokenizer(**special, **turns)
    tokenizer.add_special_tokens({"extra_special_tokens": list(turns.values())})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in special.values()]
    processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.chat_template = template
    flags = {"system": None, "prompt_template": wrap, "chat_template_args": "{}"}
    return PromptFormat(tokenizer, SimpleNamespace(**flags, max_new_tokens=4))


@pytest.mark.parametrize(
    "template, adds, wrap, prompt, words",
    [
        (CHAT, "$A", "{prompt}", "<|user|>b<|end|>", r"<\|user\|> is already .* adds it"),
        (CHAT, "$A", "<|user|>{prompt}<|end|>", "b", r"<\|user\|> is already .* adds it"),
        (CHAT, "$A", "{prompt}", [{"role": "user", "content": "<|end|>"}], r"<\|end\|> is already"),
        (CHAT, "$A", "{prompt}", "write <think> first", ""),  # not a token of the template
        (CHAT, "<s> $A </s>", "{prompt}", "b", ""),  # the template alone writes special tokens
        (CHAT + "</s>", "$A", "{prompt}", "b", "</s> ends the prompt .*add_eos_token"),
        (None, "<s> $A", "{prompt}", "<s>b", "<s> is already .* adds it"),
        (None, "$A </s>", "{prompt}", "b", "</s> ends the prompt .*add_eos_token"),
    ],
)
def test_special_tokens_in_the_wrong_place_are_named_once(
    template, adds, wrap, prompt, words, capsys
):
    rows = [{"prompt": "a"}, {"prompt": prompt}, {"prompt": prompt}]
    special_form(template, adds, wrap).encode_rows(rows, "--data x.jsonl")
    out = capsys.readouterr().out
    assert out.count("warning: --data x.jsonl: ") == out.count("; first in '") == out.count("\n")
    assert re.search(words, out) if words else out == ""


def test_a_completion_keeps_its_tags_and_loses_what_ends_it():
    """<think> is often a special token. Without it, text before </think> would be an answer."""
    tokenizer = special_form().tokenizer
    text = "<think>5</think>a<|end|>"
    ids = tokenizer.encode(f"<s>{text}</s><pad><pad>", add_special_tokens=False)
    assert completion_text(tokenizer, ids) == text
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert completion_text(tokenizer, ids, [end]) == "<think>5</think>a"


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_gsm8k_rows_are_read_as_they_are(seen, tmp_path):
    """The reward is `math`. The first epoch has all rows that are not held out."""
    solution = "It is {0} and one more: <<{0}+1={1}>>{1}.\n#### {1}"
    rows = [{"question": f"{i}+1=", "answer": solution.format(i, i + 1)} for i in range(30)]
    write_rows("gsm8k.jsonl", rows)
    flags = "--data gsm8k.jsonl --prompts-per-step 30 --group-size 2 --steps 1"
    good(tmp_path, f"--model models/tiny {flags}")
    assert seen.run.config.reward == "math"
    verdicts = seen.steps[0].batch.verdicts
    assert all(verdict.fault == "" for verdict in verdicts)
    held_out = {row["prompt"] for row in seen.run.held_out}
    trained = {verdict.row["prompt"] for verdict in verdicts}
    assert not trained & held_out and trained | held_out == {row["question"] for row in rows}


@pytest.fixture(scope="module")
def chat(models):
    """The tiny policy with a chat template."""
    return copied(models / "tiny", models / "chat", chat_template__jinja=TEMPLATE.encode())


@pytest.mark.usefixtures("place")
def test_eval_data_is_what_is_evaluated_on(chat, seen, tmp_path):
    """And its first prompt is shown as the model sees it."""
    write_rows("left.jsonl", [{"prompt": f"{i}+1=", "answer": "0"} for i in range(6)])
    right = [{"prompt": f"{i}*1=", "answer": "0"} for i in range(5)]
    write_rows("right.jsonl", right)
    flags = f"--data left.jsonl --eval-data right.jsonl --steps 1 --model {chat} --system 12"
    given = "--chat-template-args", '{"mark":"**"}', "--prompt-template", "3+{prompt}"
    result = good(tmp_path, f"{BASE} {flags}", *given)
    assert [row["prompt"] for row in seen.run.held_out] == [row["prompt"] for row in right]
    assert all("+" in each.row["prompt"] for each in seen.steps[0].batch.verdicts)
    text = "#12;3+0*1=**="
    assert seen.run.tokenizer.decode(seen.run.held_out[0][IDS]) == text
    assert result.out.count(f"'{text}'\n") == 1


def test_prompts_of_an_evaluation_come_from_the_whole_file(tmp_path, capsys):
    """A file may be sorted by level. That it is also the file to train on is said."""
    nothing = SimpleNamespace(check=list, check_answer=str)
    rows = [{"prompt": f"{level}+{i}", "answer": "1"} for level in (1, 2) for i in range(40)]
    path = str(write_rows(tmp_path / "sorted.jsonl", rows))
    config = SimpleNamespace(data=path, eval_data=path, eval_prompts=20, seed=0)
    _, held_out = form().train_and_held_out(config, *read_data(config, nothing))
    assert len(held_out) == 20 and {row["prompt"][0] for row in held_out} == {"1", "2"}
    assert "warning: --eval-data: 80 of 80 prompts are also in --data" in capsys.readouterr().out
    assert form().train_and_held_out(config, *read_data(config, nothing))[1] == held_out


@pytest.mark.usefixtures("place")
def test_a_conversation_is_sampled_judged_and_shown(chat, seen, tmp_path):
    """The reward gets all messages and any field of the row, also one named `ids`."""
    rows = [{"prompt": conversation(i), "answer": "1", "ids": [i, -1]} for i in range(10)]
    write_rows("talks.jsonl", rows)
    Path("talk.py").write_text(
        "def whole(completion, answer, prompt, ids):\n"
        "    roles = [m['role'] for m in prompt]\n"
        "    seen = [roles, prompt[-1]['content'], ids[1:]]\n"
        "    return seen == [['system', 'user', 'assistant', 'user'], f'7+{ids[0]}', [-1]]\n"
    )
    result = good(tmp_path, f"--model {chat} --data talks.jsonl --reward talk.py:whole --steps 1")
    assert metrics(result.folder)[0]["reward"] == 1
    for row in seen.run.held_out:
        problem = row["prompt"][-1]["content"]
        assert seen.run.tokenizer.decode(row[IDS]) == f"#1;2+2;4;{problem}="
    sample = metrics(result.folder, "samples")[0]
    assert sample["prompt"].startswith("system: 1\n\nuser: 2+2\n\nassistant: 4\n\nuser: 7+")
