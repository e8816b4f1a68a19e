"""The README and its pages against the code: metrics, commands, examples, links; extending.md, step
by step."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import gspo
import rewards
import train
from tools import ROOT, strict, write_rows

README = (ROOT / "README.md").read_text()
# the pages that go on where the README stops; extending.md has commands of a copy of the project
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "tests").glob("*.md"))}
EXTENDED = PAGES.pop("extending.md")
ALL = "\n".join([README, *PAGES.values()])


def section(heading: str) -> str:
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def code(heading: str, language: str) -> str:
    """The first code block of a section."""
    return blocks(section(heading), language)[0]


def test_settings_of_the_results_are_the_defaults():
    c = train.Config
    assert f"{c.steps} steps of {c.prompts_per_step} prompts x {c.group_size} completions" in README
    assert f"({c.prompts_per_step} prompts x {c.group_size} completions, 4 updates" in README
    assert f"`--completions-per-update {c.prompts_per_step * c.group_size}`" in README
    assert f"{c.prompts_per_step * c.group_size} completions of up to 1,024 tokens" in README
    assert set(re.findall(r"/step-(\d+)", ALL)) == {str(c.steps)}


def test_objectives_are_those_of_algos():
    table = re.search(r"\n\| `--algo` \| ratio .*?\n\n", README, re.DOTALL)[0]
    assert table.count("\n| `") == len(gspo.ALGOS) + 1
    for name, algorithm in gspo.ALGOS.items():
        row = re.search(rf"\n\| `{re.escape(name)}` \|.*", table)[0]
        assert f"`{algorithm.loss.__name__}`" in row


def named(text: str) -> list[str]:
    """What the first cells of a table's rows name: | `one`, `another` | ..."""
    cells = re.findall(r"\n\| (`\w+`(?:, `\w+`)*) \|", text)
    return [name for cell in cells for name in re.findall(r"\w+", cell)]


def test_verifiers_are_those_of_rewards():
    assert sorted(named(PAGES["verifiers.md"])) == sorted(rewards.VERIFIERS)
    said = re.findall(r"`(\w+)`", section("Your own data and reward").partition("*verifiers*")[2])
    assert sorted(said) == sorted(rewards.VERIFIERS)


def commands(text: str) -> list[str]:
    """Every `python train.py ...` in a code block, in one line each, or within a line of text."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(python train\.py [^`]+)`", text)
    return [line.split("train.py", 1)[1] for line in lines if "train.py" in line]


# each once; --help and --report are no trainings, and have tests of their own
COMMANDS = [
    command
    for command in dict.fromkeys(commands(ALL))
    if not command.startswith((" --help", " --report"))
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command, tmp_path, monkeypatch):
    if "--resume" in command:  # of a run that there is
        monkeypatch.chdir(tmp_path)
        Path("runs/gspo-1").mkdir(parents=True)
        Path("runs/gspo-1/config.json").write_text(
            json.dumps(dataclasses.asdict(train.resolve({})))
        )
    train.resolve(train.parse_flags(shlex.split(command)))


def test_loss_example_runs_and_the_gradient_raises_the_better_completion():
    scope = {}
    exec(code("Copy the loss", "python"), scope)
    # A = ±0.7071 in both groups, s = 1, 4 completions of 6 tokens: dloss/dlogpi = -A / 24
    expected = torch.tensor([-1.0, 1.0, 1.0, -1.0])[:, None].expand(4, 6) * 0.5**0.5 / 24
    torch.testing.assert_close(scope["logprobs"].grad, expected, atol=1e-6, rtol=1e-4)


@pytest.fixture
def short_warm_start(monkeypatch, tmp_path):
    """The built-in policy after two steps of its warm start, in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(train, "WARM_STEPS", 2)
    monkeypatch.chdir(tmp_path)


SHORT = ["--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "2"]
SHORT += ["--completions-per-update", "2", "--eval-samples", "2", "--name", "run"]


def example_rows() -> list[dict]:
    """The row of the section, and others like it."""
    row = json.loads(re.search(r'`(\{"prompt".*?\})`', section("Your own data and reward"))[1])
    return [row] + [{"prompt": f"{i}+{i}*3=", "answer": "6"} for i in range(9)]


def test_reward_example_pays_and_trains(short_warm_start):
    source = code("Your own data and reward", "python")
    Path("my_reward.py").write_text(source)
    scope = {}
    exec(source, scope)
    pay = [scope["last_digit"](text, "6", "7+5*3=") for text in ("2*3=6#6", "#5", "6", "#66x")]
    assert pay == [1.0, 0.1, 0.0, 0.0]
    write_rows("mine.jsonl", example_rows())
    command = next(command for command in COMMANDS if "my_reward.py" in command)
    assert train.main(shlex.split(command) + SHORT) == 0
    assert "reward/last_digit" in Path("runs/run/metrics.jsonl").read_text()


def test_tool_example_replies():
    scope = {}
    [source] = blocks(PAGES["tools.md"], "python")
    exec(source, scope)
    assert scope["reply"]("r in <count>strawberry, r</count>") == "=3"
    assert scope["reply"]("<count>strawberry</count>") is None


def test_reward_model_command_trains(short_warm_start):
    """The command, with the built-in policy and a classifier of random weights of its kind."""
    folder = train.built_in_policy(rewards.TASKS["arithmetic"], "tiny")
    shape = transformers.Qwen3Config.from_pretrained(folder, num_labels=1)
    judge = transformers.AutoModelForSequenceClassification.from_config(shape)
    judge.save_pretrained("my-reward-model")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained("my-reward-model")
    write_rows("train.jsonl", example_rows())
    command = next(command for command in COMMANDS if "my-reward-model" in command)
    command = command.replace("Qwen/Qwen3-0.6B", str(folder))
    assert train.main(shlex.split(command) + SHORT + ["--max-new-tokens", "8"]) == 0
    assert "reward/model" in Path("runs/run/metrics.jsonl").read_text()


def test_every_metric_is_explained(short_warm_start):
    """In METRICS of train.py; and what the page explains is there."""
    assert train.main(["--algo", "grpo", *SHORT]) == 0  # with a reference: its KL is a metric
    for name in strict(Path("runs/run/metrics.jsonl").read_text()):
        name = re.sub(r"^reward/.*", "reward/NAME", re.sub(r"@\d+", "@K", name))
        assert name in train.METRICS, name
    watched = named(section("Metrics to watch"))
    assert len(watched) == 15 and set(watched) <= train.METRICS.keys()


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", *(f"tests/{name}" for name in PAGES)])
def test_links_lead_somewhere(page):
    """To a file of the project, and to a heading of it; every page has a link from the README."""
    assert page == "README.md" or f"]({page}" in README
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if not link.startswith(("https://", "http://")):
            name, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / name) if name else ROOT / page
            assert target.is_file(), link
            assert not anchor or anchor in anchors(target.read_text()), link


# ------------------------------------------------------------------------------ extending.md


def applied(step: str, project: Path) -> None:
    """Does what the first line of a code block says: `# FILE, above: PART OF A LINE`."""
    head, lines = step.split("\n", 1)
    name, where, anchor = re.fullmatch(r"# (\S+), (above|below|instead of): (.+)", head).groups()
    text = (project / name).read_text()
    [line] = [line for line in text.splitlines(keepends=True) if anchor in line]
    new = {"above": lines + line, "below": line + lines, "instead of": lines}[where]
    (project / name).write_text(text.replace(line, new))


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the project in which the steps of the page were done."""
    project = tmp_path_factory.mktemp("extended")
    for name in ("gspo.py", "rollout.py", "rewards.py", "train.py", "README.md"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "tests", project / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for step in blocks(EXTENDED, "python"):
        applied(step, project)
    return project


def run_there(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(project / "cache")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=project, capture_output=True, text=True, env=environment
    )


@pytest.mark.slow
def test_extended_as_the_page_says_it_trains(extended):
    """The command of the section, short: each of the five additions is at work."""
    [command] = commands(EXTENDED)
    program = "import sys, train; train.WARM_STEPS = 40; sys.exit(train.main(sys.argv[1:]))"
    done = run_there(extended, "-c", program, *shlex.split(command), *SHORT, "--group-size", "16")
    assert done.returncode == 0, done.stderr
    config = strict((extended / "runs/run/config.json").read_text())
    assert config["positive_weight"] == 0.2 and config["weight_decay"] == 0.01
    row = strict((extended / "runs/run/metrics.jsonl").read_text())
    assert {"length_std", "reward/last_line", "reward/exact"} <= row.keys()
    sample = strict((extended / "runs/run/samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"] == sample["answer"][::-1] + "="


def test_the_new_loss_of_the_page_weighs_what_it_says(extended):
    """A = 1 and -2, two tokens each, of four: the gradient is -0.1 / 4 and 2 / 4."""
    scope = {}
    exec(f"import torch\n{blocks(EXTENDED, 'python')[0]}", scope)
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    advantages = torch.tensor([1.0, -2.0])
    loss, metrics = scope["w_reinforce_loss"](logprobs, logprobs.detach(), advantages, mask)
    loss.backward()
    expected = torch.tensor([[-0.025, -0.025, 0], [0.5, 0.5, 0]])
    torch.testing.assert_close(logprobs.grad, expected)
    _, others = gspo.reinforce_loss(logprobs, logprobs.detach(), advantages, mask)
    assert metrics.keys() == others.keys()


def test_tests_that_the_page_names_exist():
    sources = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    pages = ALL + EXTENDED
    for name in re.findall(r"`tests/(test_\w+\.py)`", pages):
        assert name in sources
    for name in re.findall(r"`(test_\w+)`", pages):
        assert any(f"def {name}(" in source for source in sources.values()), name


@pytest.mark.slow
def test_tests_of_the_copy_speak_up_where_the_page_says(extended):
    """What it lacks is rows of the README; what it has is tried, and the flag refused elsewhere."""
    done = run_there(extended, "train.py", "--algo", "gspo", "--positive-weight", "0.2")
    assert done.returncode == 2 and done.stderr.startswith("error: --positive-weight 0.2: needs")

    done = run_there(extended, "-m", "pytest", "-q", "tests/test_readme.py", "-k", "_of_ or metric")
    missing = ("objectives_are_those_of_algos", "verifiers_are_those", "every_metric_is_explained")
    for name in missing:
        assert re.search(rf"FAILED .*{name}", done.stdout), done.stdout
    tried = (
        "tests/test_rewards.py",
        "tests/test_flags.py::test_a_flag_takes_its_range_and_no_more",
    )
    done = run_there(extended, "-m", "pytest", "-q", *tried)
    assert done.returncode == 0, done.stdout[-5000:]
