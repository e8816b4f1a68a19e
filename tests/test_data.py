"""Rows of prompts and answers, held-out rows, and how prompts become tokens."""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

import bench_peers
import rewards
from support.data import IDS, PromptFormat, hold_out, read_rows, shuffled_epochs, text_of
from support.user import UserError
from tools import BASE, character_tokenizer, copied, good, metrics, refused, strict, write_rows

# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, words",
    [
        ('[{"prompt": "a", "answer": "1"}]', ["line 1: expected an object in JSON"]),
        ('[\n  {"prompt": "a",\n   "answer": "1"}\n]', ["line 1: expected an object in JSON"]),
        ("prompt,answer\na,1", ["line 1", "JSON"]),
        ('{"prompt": "a", "solution": "1"}', ["line 1", "answer", "found prompt, solution"]),
        ('{"prompt": "a", "answer": null}', ["line 1", "field answer: found null", "expected"]),
        ("[" * 100_000, ["line 1"]),
        ('{"a":' * 100_000, ["line 1"]),
        ("PAR1\0\1", ["line 1"]),
        ("3", ["line 1", "expected an object"]),
        ("\n\n", ["empty"]),
        ('{"prompt": 12, "answer": "1"}', ["line 1", "field prompt: found 12, expected text"]),
        ('{"prompt": " ", "answer": "1"}', ["line 1", "no text"]),
        ('{"prompt": "a\\ud800", "answer": "1"}', ["line 1", "surrogates"]),
        ('{"prompt": [], "answer": "1"}', ["line 1", "expected messages"]),
        ('{"prompt": ["a"], "answer": "1"}', ["line 1", "role"]),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', ["content"]),
        ('{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}', ["with texts"]),
        ('{"prompt": [{"role": "u", "content": "\\ud800"}], "answer": "1"}', ["surrogates"]),
        (
            '{"prompt": [{"role": "assistant", "content": "b"}], "answer": "1"}',
            ["its last message"],
        ),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}', ["line 3", "answer"]),
    ],
)
def test_read_rows_says_what_to_do_in_one_sentence(content, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_rows(str(path), "--data", rewards.parse_reward("exact").check_answer)
    message = str(error.value)
    assert message.startswith(f"--data {path}") and "\n" not in message and len(message) < 700
    assert all(word in message for word in words)


def test_read_rows_keeps_all_fields_in_order(tmp_path):
    """`question`, as in GSM8K, is the prompt if there is no other. Empty lines are skipped."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '\ufeff{"question": "q", "answer": "1", "level": 3}\n\n'
        '{"question": "q", "prompt": "p", "answer": 2}\r\n'
        '{"prompt": "ü", "answer": "x"}'
    )
    answers = []
    assert read_rows(str(path), "--data", answers.append) == [
        {"prompt": "q", "question": "q", "answer": "1", "level": 3},
        {"prompt": "p", "question": "q", "answer": 2},
        {"prompt": "ü", "answer": "x"},
    ]
    assert answers == ["1", 2, "x"]
    with pytest.raises(UserError, match="--data nowhere.jsonl: expected a file"):
        read_rows("nowhere.jsonl", "--data", print)


def test_peers_get_conversations_as_they_are():
    rows = [{"prompt": "7+5"}, {"prompt": conversation(3)}]
    assert bench_peers.trl_prompts(rows[:1], False) == ["7+5"]
    assert bench_peers.trl_prompts(rows, True)[0] == [{"role": "user", "content": "7+5"}]
    assert bench_peers.trl_prompts(rows, False)[1] == conversation(3)


def test_a_tenth_is_held_out_by_the_prompt_wherever_it_stands():
    """In any order, with other rows and with repeated rows. No prompt is on both sides."""
    rows = [{"prompt": f"{i}+0=", "answer": i} for i in range(200)]
    train, held_out = hold_out([*rows, *rows[:50]], "--data")
    texts = {row["prompt"] for row in held_out}
    assert 10 <= len(texts) <= 30 and not texts & {row["prompt"] for row in train}
    assert len(train) + len(held_out) == 250
    assert {row["prompt"] for row in hold_out(rows[::-2], "--data")[1]} == texts & {
        row["prompt"] for row in rows[::-2]
    }
    for count in range(2, 9):  # even if the hash of none, or of all, says so
        train, held_out = hold_out(rows[:count], "--data")
        assert train and held_out and len(train) + len(held_out) == count
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


def test_what_the_model_sees_of_a_prompt():
    """With a chat template and without. The two characters \\n are a line break, but not in a
    LaTeX command."""
    latex = r"Say if {prompt} \neq 0, \nabla f, \nu"
    assert form(prompt_template=latex).template == latex
    assert form(prompt_template=r"\n\n{prompt}\n#\n").template == "\n\n{prompt}\n#\n"
    assert encoded("7+5", TEMPLATE) == ";7+5="
    assert encoded("7+5", TEMPLATE, system="12") == "#12;7+5="
    assert encoded("7+5", TEMPLATE, system="") == "#;7+5="  # against the template's own
    assert encoded("7+5", TEMPLATE, prompt_template="1+{prompt}*2") == ";1+7+5*2="
    marked = encoded("7+5", TEMPLATE, system="3", chat_template_args='{"mark": "**"}')
    assert marked == "#3;7+5**="
    assert encoded("7+5", prompt_template="{prompt}*1=") == "7+5*1="
    assert encoded("7+5") == "7+5"
    assert form(prompt_template="{prompt}\\nSo\\n").template == "{prompt}\nSo\n"
    prompt = conversation(5)
    assert encoded(prompt, TEMPLATE) == "#1;2+2;4;7+5="
    assert text_of(prompt) == "system: 1\n\nuser: 2+2\n\nassistant: 4\n\nuser: 7+5"
    assert prompt == conversation(5)  # as the reward gets it


@pytest.mark.parametrize(
    "prompt, template, flags, words",
    [
        ("7+5", None, {"system": "3"}, ["--system", "no chat template"]),
        ("7+5", None, {"system": ""}, ["--system", "no chat template"]),
        ("7+5", None, {"chat_template_args": '{"a": 1}'}, ["--chat-template-args", "no chat"]),
        (conversation(5), None, {}, ["list of messages", "no chat template"]),
        (conversation(5), TEMPLATE, {"system": "3"}, ["--system", "system message of its own"]),
        (conversation(5), TEMPLATE, {"prompt_template": "1"}, ["--prompt-template", "list"]),
        ("7+5", "{{ raise_exception('roles') }}", {}, ["--system", "template takes", "roles"]),
        ("7+5", "{{ nothing.of.that.name }}", {}, ["template takes", "nothing"]),
        ("7+é%é", None, {}, ["'7+é%é'", "another --model", "'%é'"]),
    ],
)
def test_prompts_that_a_model_cannot_read_are_refused(prompt, template, flags, words):
    with pytest.raises(UserError) as error:
        encoded(prompt, template, **flags)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_formats_that_no_prompt_can_have_are_refused():
    for wrong in ("[]", "{a: 1}"):
        with pytest.raises(UserError, match="--chat-template-args .*JSON object"):
            form(chat_template_args=wrong)
    with pytest.raises(UserError, match="--max-new-tokens 4: the model's context is 4 tokens"):
        form(context=4)


def test_tokens_beyond_the_vocabulary_are_refused():
    """The tokenizer is another model's: token 17, `#`, has no row in an embedding of 17."""
    form(vocabulary=17).encode({"prompt": "1+1="})
    form(vocabulary=18).encode({"prompt": "#"})
    with pytest.raises(UserError, match="tokenizer makes token 17 of the prompt '#'.*embeds 17"):
        form(vocabulary=17).encode({"prompt": "#"})


def test_long_prompts_are_skipped_with_a_count(capsys):
    """A context of 26 leaves 22 for the prompt beside 4 of the completion."""
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
    """Fields question and answer, a solution that ends in #### 42. The reward is `math`."""
    solution = "It is {0} and one more: <<{0}+1={1}>>{1}.\n#### {1}"
    rows = [{"question": f"{i}+1=", "answer": solution.format(i, i + 1)} for i in range(12)]
    write_rows(Path("gsm8k.jsonl"), rows)
    result = good(tmp_path, "--model models/tiny --data gsm8k.jsonl --steps 1")
    assert strict((result.folder / "config.json").read_text())["reward"] == "math"
    assert all(score.fault == "" for batch in seen.batches for score in batch.samples.scores)
    assert all(re.fullmatch(r"\d+\+1=", row["prompt"]) for row in seen.run.held_out)


@pytest.mark.usefixtures("place")
def test_data_is_shuffled_and_a_tenth_is_held_out(seen, tmp_path):
    rows = [{"prompt": f"{i}+0=", "answer": "0"} for i in range(30)]
    write_rows(Path("thirty.jsonl"), rows)
    flags = "--data thirty.jsonl --prompts-per-step 9 --group-size 2 --completions-per-update 18"
    good(tmp_path, f"{BASE} {flags} --steps 3")
    held_out = [row["prompt"] for row in seen.run.held_out]
    trained = [row["prompt"] for batch in seen.batches for row in batch.samples.rows[::2]]
    assert len(set(trained)) == 27 and set(trained) | set(held_out) == {r["prompt"] for r in rows}
    assert trained != sorted(trained, key=lambda prompt: int(prompt.split("+")[0]))


@pytest.mark.usefixtures("place")
def test_eval_data_is_what_is_evaluated_on(seen, tmp_path):
    write_rows(Path("left.jsonl"), [{"prompt": f"{i}+1=", "answer": "0"} for i in range(6)])
    write_rows(Path("right.jsonl"), [{"prompt": f"{i}*1=", "answer": "0"} for i in range(5)])
    good(tmp_path, f"{BASE} --data left.jsonl --eval-data right.jsonl --steps 1")
    assert sorted(row["prompt"] for row in seen.run.held_out) == [f"{i}*1=" for i in range(5)]
    assert all("+" in row["prompt"] for row in seen.batches[0].samples.rows)


@pytest.mark.usefixtures("place")
def test_a_conversation_is_sampled_judged_and_shown(models, seen, tmp_path):
    """The template gets all messages, and so does the reward. Samples have their text."""
    chat = copied(models / "tiny", tmp_path / "chat", chat_template__jinja=TEMPLATE.encode())
    rows = [{"prompt": conversation(i), "answer": str(7 + i)} for i in range(10)]
    write_rows(Path("talks.jsonl"), rows)
    Path("talk.py").write_text(
        "def roles(completion, answer, prompt):\n"
        "    return [m['role'] for m in prompt] == ['system', 'user', 'assistant', 'user']\n"
    )
    result = good(tmp_path, f"--model {chat} --data talks.jsonl --reward talk.py:roles --steps 1")
    assert metrics(result.folder)[0]["reward"] == 1
    tokenizer = AutoTokenizer.from_pretrained(chat)
    for row in seen.run.held_out:
        problem = row["prompt"][-1]["content"]
        assert tokenizer.decode(row[IDS]) == f"#1;2+2;4;{problem}="
    sample = strict((result.folder / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("system: 1\n\nuser: 2+2\n\nassistant: 4\n\nuser: 7+")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--data talks.jsonl", ["list of messages", "no chat template"]),
        ("--data strange.jsonl", ["another --model", "'é'"]),
        ("--max-new-tokens 512", ["--max-new-tokens 512", "context is 512"]),
        ("--max-new-tokens 510", ["held out", "more than 2 tokens"]),
    ],
)
def test_what_a_run_cannot_read_is_refused_before_it_begins(flags, words, tmp_path):
    write_rows(Path("talks.jsonl"), [{"prompt": conversation(i), "answer": "1"} for i in range(9)])
    write_rows(Path("strange.jsonl"), [{"prompt": f"{i}é=", "answer": "1"} for i in range(9)])
    sentence = refused(tmp_path / "runs", f"{BASE} {flags}")
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("place")
def test_a_field_of_the_data_reaches_the_reward_whatever_its_name(tmp_path):
    """Also `ids`, in `check` before training and in every step."""
    rows = [{"prompt": f"{i}+0=", "answer": "0", "ids": [i, -1]} for i in range(12)]
    write_rows(Path("rows.jsonl"), rows)
    Path("named.py").write_text(
        "def named(completion, answer, prompt, ids):\n"
        "    return prompt == f'{ids[0]}+0=' and ids[1:] == [-1]\n"
    )
    flags = "--reward named.py:named --model models/tiny --data rows.jsonl --steps 1"
    assert metrics(good(tmp_path, flags).folder)[0]["reward"] == 1
