"""The built-in tasks: problems, demonstrations, verifiers, and the policies that have seen them."""

import itertools
import json
import random
import re
import tempfile

import pytest

import rewards
from support import pretrain, tasks
from support.tasks import TASKS, problems
from tools import refused

VERIFY = rewards.VERIFIERS


def test_arithmetic_steps_reward_each_operation():
    """(end in characters, reward), the outcome last: 7+5*3 from left to right modulo 10 is 6."""
    for completion, expected in (
        ("7+5=2;2*3=6#6", [(6, 1), (12, 1), (13, 1)]),
        ("7+5=3;3*3=9#9", [(6, 0), (12, 1), (13, 0)]),  # an error costs its step, and the outcome
        ("7+5=2;3*3=9#9", [(6, 1), (12, 0), (13, 0)]),  # does not take up the last result
        ("7+5=2;2+3=5#5", [(6, 1), (12, 0), (13, 0)]),  # not the prompt's operation
        ("7+5=2;2*3=6;6+0=6#6", [(6, 1), (12, 1), (19, 1)]),  # more operations earn nothing
        ("7+5=2;2*3", [(6, 1), (10, 0), (9, 0)]),
        ("", [(1, 0), (0, 0)]),
        ("7+5=٢;٢*3=6#6", [(6, 0), (12, 0), (13, 1)]),
    ):
        found = VERIFY["arithmetic_steps"](completion, "6", prompt="7+5*3=")
        assert found == expected, completion


def test_arithmetic_rewards_what_stands_behind_the_last_mark():
    """To the letter. The answer may be a number."""
    for right in ("7+5=2;2*3=6#6", "#5#6"):
        assert VERIFY["arithmetic"](right, "6") == VERIFY["arithmetic"](right, 6) == 1.0
    for wrong in ("6", "#6 ", "#", "", "#66", "#6#", "#６", "6#5"):
        assert VERIFY["arithmetic"](wrong, "6") == 0.0


def take(task, count, seed=0, held_out=False) -> list[dict]:
    return list(itertools.islice(problems(task, seed, held_out), count))


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.demonstration])
def test_task_demonstrations_are_well_formed_and_often_wrong(name):
    task = TASKS[name]
    reward = rewards.parse_reward(task.verifier)
    rng = random.Random(0)
    correct = 0
    for problem in take(task, 500):
        demonstration = task.demonstration(problem, rng)
        assert set(problem["prompt"] + demonstration) <= set(task.alphabet)
        assert len(demonstration) < task.max_new_tokens
        assert reward.check_answer(problem["answer"]) is None
        [score] = reward.verify([demonstration], [problem])
        assert not score.fault
        correct += score.reward
    assert 0.05 < correct / 500 < 0.6


@pytest.mark.parametrize("name", list(TASKS))
def test_task_problems_are_deterministic_and_held_out_ones_apart(name):
    task = TASKS[name]
    assert take(task, 50, seed=3) == take(task, 50, seed=3) != take(task, 50, seed=4)
    train = {problem["prompt"] for seed in range(3) for problem in take(task, 200, seed)}
    held_out = {problem["prompt"] for problem in take(task, 100, held_out=True)}
    assert not train & held_out and len(held_out) > 50


CHAINS = [
    (TASKS["arithmetic"], tasks.ARITHMETIC_OPERATIONS, "0123456789"),
    (TASKS["chains"], (12, 15), "3678"),
]


@pytest.mark.parametrize("task, operations, hard", CHAINS)
def test_chains_go_from_left_to_right_and_demonstrations_err_at_hard_products(
    task, operations, hard
):
    """A step has 6 tokens with its semicolon: the last has none, `#6` and the end have 3."""
    rng, counts, wrong = random.Random(0), set(), {True: [], False: []}
    for row in take(task, 150):
        demonstration, value = task.demonstration(row, rng), int(row["prompt"][0])
        written, asked = demonstration[0], re.findall("[+*][0-9]", row["prompt"])
        steps = demonstration.partition("#")[0].split(";")
        for operation, step in zip(asked, steps, strict=True):
            value = eval(f"{value}{operation}") % 10
            assert step[:-1] == f"{written}{operation}="
            right = eval(f"{written}{operation}") % 10
            wrong[operation[0] == "*" and operation[1] in hard].append(step[-1] != str(right))
            written = step[-1]
        assert row["answer"] == str(value)
        assert len(demonstration) + 1 == 6 * len(asked) + 2 <= task.max_new_tokens
        counts.add(len(asked))
    assert (min(counts), max(counts)) == operations
    assert not any(wrong[False])
    assert 0.5 < sum(wrong[True]) / len(wrong[True]) < 0.6  # 0.6, less those that are right so


def test_a_policy_is_made_once_for_a_recipe_and_named_if_it_is_broken(
    monkeypatch, tmp_path, capsys
):
    """It tells its steps and the time left."""
    monkeypatch.setattr(pretrain, "WARM_STEPS", 3)
    monkeypatch.setattr(pretrain, "SECONDS_A_LINE", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = pretrain.built_in_policy(TASKS["arithmetic"], "tiny")
    lines = re.findall("pretraining: step (.*)", capsys.readouterr().out)
    assert len(lines) == 2 and re.fullmatch(r"1/3, \d+ s left", lines[0])
    assert list((tmp_path / "gspo").iterdir()) == [folder]
    for path in (folder, *folder.iterdir()):  # other users of a shared cache read it
        assert path.stat().st_mode & 0o044 == 0o044
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "warm_start", None)  # the second run starts at once
        assert pretrain.built_in_policy(TASKS["arithmetic"], "tiny") == folder
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[:99])
        sentence = refused(tmp_path, "--algo gspo")
        assert f"built-in policy is broken; delete its folder {folder}: " in sentence
        assert "--model" not in sentence
        (folder / file).write_bytes(whole)

    longer = tasks.chains((6, 7))._replace(warm_steps=2)  # a length of its own
    of_chains = pretrain.built_in_policy(longer, "tiny")
    config = json.loads((of_chains / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 1000
    monkeypatch.setattr(pretrain, "WARM_LR", 1e-3)  # another recipe
    another = pretrain.built_in_policy(TASKS["arithmetic"], "tiny")
    assert len({folder, of_chains, another}) == 3


@pytest.mark.parametrize("home", ["/dev/null", None])
def test_a_user_without_a_home_gets_a_temporary_cache(home, tmp_path, monkeypatch, capsys):
    """In a container / is a home, or there is none, neither in the environment nor in passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if home:
        monkeypatch.setenv("HOME", home)
    else:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    folder = pretrain.cache_folder()
    assert folder.parent == tmp_path and f"{folder} ($XDG" in capsys.readouterr().out


def test_countdown_problems_can_be_solved():
    for problem in take(TASKS["countdown"], 20):
        numbers, target = problem["answer"]["numbers"], problem["answer"]["target"]
        assert problem["prompt"] == f"{' '.join(map(str, numbers))}={target}:"
        values = set()
        for order in itertools.permutations(numbers):
            for symbols in itertools.product("+-*", repeat=len(order) - 1):
                pairs = zip(order, [*symbols, ""])
                values.add(eval("".join(f"{n}{symbol}" for n, symbol in pairs)))
        assert target in values


def test_demonstrations_teach_the_completion_and_not_the_tool(monkeypatch):
    """Labels are the policy's own tokens: not the prompt, and not the calculator's replies."""
    monkeypatch.setattr(pretrain, "WARM_STEPS", 4)
    task = TASKS["calculator"]
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *task.alphabet])}
    letters = {i: word for word, i in words.items()}
    for row in pretrain.demonstrations(task, words):
        assert all(label in (i, -100) for i, label in zip(row["input_ids"], row["labels"]))
        text = "".join(letters[i] for i in row["input_ids"])
        own = "".join(letters[i] for i in row["labels"] if i != -100)
        completion = text.partition("=")[2]
        assert own == re.sub(r"(</calc>)=-?\d+", r"\1", completion)
        for call, value in re.findall(r"<calc>(.*?)</calc>=(-?\d+)", completion):
            assert eval(call) == int(value)
