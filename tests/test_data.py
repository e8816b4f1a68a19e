"""Rows of prompts and answers, held-out rows, and how prompts become tokens."""

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import rewards
from support.data import IDS, PromptFormat, hold_out, read_data, read_rows, shuffled_epochs
from support.user import UserError
from tools import BASE, character_tokenizer, copied, good, metrics, write_rows

# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, words",
    [
        (
            '[\n  {"prompt": "a",\n   "answer": "1"}\n]',
            "line 1: .*found a JSON array; expected JSONL",
        ),
        ('{"a":' * 100_000, "line 1: expected an object"),
        ("3", "line 1: expected an object"),
        ("\n\n", "empty"),
        ('{"prompt": "a", "solution": "1"}', "line 1: .*answer.*found prompt, solution"),
        ('{"prompt": "a", "answer": null}', "line 1: .*field answer: found null, expected"),
        ('{"prompt": "a", "answer": "1", "tokens": 9}', "line 1: .*field tokens: .*another name"),
        ('{"prompt": 12, "answer": "1"}', "line 1: .*field prompt: found 12, expected text"),
        ('{"prompt": " ", "answer": "1"}', "line 1: .*no text"),
        ('{"prompt": "a\\ud800", "answer": "1"}', "line 1: .*surrogates"),
        ('{"prompt": [], "answer": "1"}', "line 1: .*expected messages"),
        ('{"prompt": ["a"], "answer": "1"}', "line 1: .*role"),
        ('{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}', "with texts"),
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
    """`question`, as in GSM8K, is the prompt if there is no other. Empty lines are skipped."""
    path, answers = tmp_path / "rows.jsonl", []
    rows = [{"question": "q", "answer": "1", "level": 3}]
    rows += [{"question": "q", "prompt": "p", "answer": 2}, {"prompt": "ü", "answer": "x"}]
    first, *others = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"\ufeff{first}\n\n" + "\r\n".join(others))
    assert read_rows(str(path), "--data", answers.append) == [rows[0] | {"prompt": "q"}, *rows[1:]]
    assert answers == ["1", 2, "x"]
    with pytest.raises(UserError, match="--data nowhere.jsonl: expected a file"):
        read_rows("nowhere.jsonl", "--data", print)


def test_a_tenth_is_held_out_by_the_prompt_wherever_it_stands():
    """In any order, with other rows and with repeated rows. No prompt is on both sides."""
    rows = [{"prompt": f"{i}+0=", "answer": i} for i in range(200)]
    train, held_out = hold_out([*rows, *rows[:50]], "--data")
    texts = {row["prompt"] for row in held_out}
    assert 10 <= len(texts) <= 30 and not texts & {row["prompt"] for row in train}
    assert len(train) + len(held_out) == 250
    _, backwards = hold_out(rows[::-2], "--data")
    assert backwards == [row for row in rows[::-2] if row["prompt"] in texts]
    for few in (backwards, *(rows[:count] for count in range(2, 9))):  # hashes of all, or of none
        train, held_out = hold_out(few, "--data")
        assert train and held_out and len(train) + len(held_out) == len(few)
    with pytest.raises(UserError, match="--data x: expected two prompts"):
        hold_out([{"prompt": "a"}, {"prompt": "a"}], "--data x")


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
        (None, {"prompt_template": "{prompt}*1="}, "7+5*1="),
        (TEMPLATE, {}, ";7+5="),
        (TEMPLATE, {"system": "12"}, "#12;7+5="),
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
        ("7+5", None, {"chat_template_args": "[]"}, "--chat-template-args .*JSON object"),
        ("7+5", None, {"chat_template_args": "{a: 1}"}, "--chat-template-args .*JSON object"),
        (conversation(5), None, {}, "list of messages.* no chat template"),
        (conversation(5), TEMPLATE, {"system": "3"}, "--system.* system message of its own"),
        (conversation(5), TEMPLATE, {"prompt_template": "1"}, "--prompt-template.* list"),
        ("7+5", "{{ raise_exception('roles') }}", {}, "--system.* template takes.*roles"),
        ("7+é%é", None, {}, "'7\\+é%é'.* another --model .*'%é'"),
        ("7+5", None, {"vocabulary": 13}, "tokenizer makes token 13 of the prompt '7.*embeds 13"),
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


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_gsm8k_rows_are_read_as_they_are(seen, tmp_path):
    """Fields question and answer, a solution that ends in #### 42. The reward is `math`. Rows are
    shuffled, and a tenth of the prompts is held out."""
    solution = "It is {0} and one more: <<{0}+1={1}>>{1}.\n#### {1}"
    rows = [{"question": f"{i}+1=", "answer": solution.format(i, i + 1)} for i in range(30)]
    write_rows("gsm8k.jsonl", rows)
    flags = "--data gsm8k.jsonl --prompts-per-step 9 --group-size 2 --completions-per-update 18"
    good(tmp_path, f"--model models/tiny {flags} --steps 3")
    assert seen.run.config.reward == "math"
    assert all(each.verdict.fault == "" for step in seen.steps for each in step.batch.samples)
    held_out = [row["prompt"] for row in seen.run.held_out]
    trained = [each.problem["prompt"] for step in seen.steps for each in step.batch.samples[::2]]
    assert len(set(trained[: 30 - len(held_out)])) == 30 - len(held_out)  # the first epoch
    assert {*trained, *held_out} == {row["question"] for row in rows}
    assert trained != sorted(trained, key=lambda text: int(text[:-3]))


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
    assert all("+" in each.problem["prompt"] for each in seen.steps[0].batch.samples)
    text = "#12;3+0*1=**="
    assert seen.run.tokenizer.decode(seen.run.held_out[0][IDS]) == text
    assert result.out.count(f"'{text}'\n") == 1


def test_prompts_of_an_evaluation_come_from_the_whole_file(tmp_path):
    """A file may be sorted by level. The choice is the same in each run."""
    path, nothing = tmp_path / "sorted.jsonl", SimpleNamespace(check=list, check_answer=str)
    rows = [{"prompt": f"{level} {i}", "answer": "1"} for level in "ab" for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SimpleNamespace(data=str(path), eval_data=str(path), eval_prompts=20)
    _, held_out = read_data(config, nothing)
    assert len(held_out) == 20 and {row["prompt"][0] for row in held_out} == {"a", "b"}
    assert read_data(config, nothing)[1] == held_out


@pytest.mark.usefixtures("place")
def test_a_conversation_is_sampled_judged_and_shown(chat, seen, tmp_path):
    """The template gets all messages, and so does the reward, which gets any field of the row, also
    one named `ids`. Samples have the text."""
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
