"""The README and docs/ against the code: commands, examples, links, tables. extending.md is
followed step by step in a copy."""

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gspo
import rewards
import rollout
import train
from forks import fork, program
from support import report
from tools import ROOT, copy_of_project, digests, good, metrics, strict, watched, write_rows

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
PAGES["README.md"] = (ROOT / "README.md").read_text()
README = PAGES["README.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def first_cells(page: str) -> set[str]:
    """The names in the first cells of the page's tables: | `one`, `another` | ..."""
    cells = re.findall(r"(?m)^\| (`[^|]+`(?:, `[^|]+`)*) \|", PAGES[page])
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


# ---- tables --------------------------------------------------------------------------------------


def test_the_console_of_the_readme_is_that_of_the_default_run():
    """Of docs/runs/gspo, which --report plots beside a user's."""
    story = report.read_story(ROOT / "docs/runs/gspo")
    before, after = [
        f"greedy {row['eval_solved']:.1%}, pass@8 {row['eval_pass@8']:.1%}"
        for row in (story.starts[0], story.rows[-1])
    ]
    assert f"held out: {before} -> {after}" in README
    assert report.health(story.rows, story.flags) == []


@pytest.mark.slow  # a fork's own are not documented here
def test_verifiers_are_those_of_rewards():
    names = {*rewards.VERIFIERS, *rewards.MATHEMATICS, "code"}
    assert names <= first_cells("verifiers.md")


RUN = "--steps 1 --prompts-per-step 2 --group-size 2 --eval-prompts 2 --eval-samples 2 --name run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--algo ppo --kl-coef 0.1 --model models/tiny --reward pay.py:even",
        "--model models/moe --reward pay.py:even",
        "--task calculator --max-new-tokens 8",
        "--algo opd --teacher models/tiny --model models/tiny",
    ],
)
def test_every_metric_is_explained(place, flags):
    run = good(".", f"{RUN} {flags}", small=False)
    explained = first_cells("metrics.md")
    for name in metrics(run.folder)[-1].keys() - {"step"}:
        name = re.sub(r"^reward/.*", "reward/NAME", re.sub(r"@\d+", "@K", name))
        assert name in explained


# ---- links, pictures and commands ----------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.stem)
def test_pictures_are_well_formed_and_described(path):
    """With a title and a description for screen readers, and no word outside the picture."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, root.get("viewBox").split())
    assert root.find(f"{svg}title").text and root.find(f"{svg}desc").text.endswith(".")
    for word in root.iter(f"{svg}text"):
        assert 0 <= float(word.get("x")) <= width and 0 < float(word.get("y")) < height


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """To a file of the project, and to a heading of it."""
    folder = ROOT if page == "README.md" else (DOCS / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = folder / (name or Path(page).name)
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text()), link


def test_every_page_has_a_link_from_another():
    text = "".join(PAGES.values())
    linked = set(re.findall(r"\]\((?:docs/)?(\w[\w/-]*\.md)", text))
    assert PAGES.keys() - {"README.md"} <= linked


def test_tests_that_the_pages_name_exist():
    text = "".join(PAGES.values())
    written = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`tests/([a-z_]+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in written, name


def commands() -> list[str]:
    """Every `python train.py ...` of the pages, in a code block or a line of text."""
    found = []
    for page in PAGES:
        if page != "extending.md":  # those are of a copy
            lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
            lines += re.findall(r"`(python train\.py [^`]+)`", PAGES[page])
            found += [line.partition("train.py ")[2] for line in lines if " train.py " in line]
    shown = ("--help", "--report", "--algo gspo ...")
    return [each for each in dict.fromkeys(found) if not each.startswith(shown)]


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command, place):
    words = shlex.split(command, comments=True)
    if "--resume" in words:  # of a run that there is
        good("runs", "--model models/tiny --reward pay.py:even --name gspo-1")
    for name in {"mine.jsonl", "train.jsonl", "test.jsonl"} & set(words):
        write_rows(name, [{"prompt": f"{i}+1=", "answer": "2"} for i in range(9)])
    for page in PAGES:
        for source in blocks(page, "python"):
            if named := re.match(r"# (\w+\.py)\n", source):  # a file of the reader's own
                Path(named[1]).write_text(source)
    train.parse_flags(words)


def test_flags_that_the_pages_name_exist():
    fields = {f"--{name.replace('_', '-')}" for name in train.Config.__dataclass_fields__}
    ours = re.compile(r"(?<![\w-])`(--[a-z-]+)(?: [^`]*)?`")
    elsewhere = {"--slow", "--help", "--report", "--write", "--out", "--eps-clip"}
    elsewhere |= {"--seeds", "--turns", "--threads"}
    for page, text in PAGES.items():
        if page not in ("extending.md", "copying.md"):
            named = {flag.replace("--no-", "--") for flag in ours.findall(text)}
            assert named <= fields | elsewhere, page


# ---- examples ------------------------------------------------------------------------------------


def example(page: str, part: str) -> str:
    """The program of a page with this part."""
    [source] = [each for each in blocks(page, "python") if part in each]
    return source


def test_the_short_loss_of_the_readme_is_gspo_loss():
    scope = {"torch": torch}
    exec(example("README.md", "def gspo_loss("), scope)
    torch.manual_seed(0)
    logprobs = -torch.rand(4, 6)
    old_logprobs = logprobs + 1e-3 * torch.randn(4, 6)  # s is on both sides of both limits
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    mask = torch.arange(6) < torch.tensor([[6], [5], [2], [6]])
    values, gradients = [], []
    for loss in (scope["gspo_loss"], lambda *given: gspo.gspo_loss(*given)[0]):
        own = logprobs.clone().requires_grad_()
        value = loss(own, old_logprobs, advantages, mask)
        value.backward()
        values.append(value)
        gradients.append(own.grad)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)
    assert 0 < (gradients[0] != 0).any(1).sum() < 4


def test_loss_example_runs_and_the_gradient_raises_the_better_completion():
    scope = {}
    exec(example("README.md", "print(logprobs.grad"), scope)
    # A = ±0.7071 in both groups, s = 1, 4 completions of 6 tokens: dloss/dlogpi = -A / 24
    expected = torch.tensor([-1.0, 1.0, 1.0, -1.0])[:, None].expand(4, 6) * 0.5**0.5 / 24
    torch.testing.assert_close(scope["logprobs"].grad, expected, atol=1e-6, rtol=1e-4)


def test_reward_example_pays_and_trains(place):
    source, scope = example("README.md", "def final_result"), {}
    Path("my_reward.py").write_text(source)
    exec(source, scope)
    pay = [scope["final_result"](text, "6") for text in ("2*3=6#6", "#5", "6", "#66x")]
    assert pay == [1.0, 0.0, 0.0, 0.0]
    row = json.loads(re.search(r'`(\{"prompt".*?\})`', README)[1])
    rows = [row, *({"prompt": f"{i}+{i}*3=", "answer": "6"} for i in range(9))]
    write_rows("mine.jsonl", rows)
    [command] = [each for each in commands() if "my_reward.py" in each]
    run = good("runs", f"{command} {RUN} --model models/tiny --max-new-tokens 8", small=False)
    assert "reward/final_result" in metrics(run.folder)[0]


# ---- extending.md --------------------------------------------------------------------------------


def applied(step: str, project: Path) -> None:
    """Apply a block as its first line says: `# FILE, above: PART OF A LINE`, or `# FILE`."""
    head, lines = step.split("\n", 1)
    found = re.fullmatch(r"# (\S+?)(?:, (above|below|instead of): (.+))?", head)
    name, where, anchor = found.groups()
    if where is None:
        (project / name).write_text(lines)
        return
    text = (project / name).read_text()
    [line] = [line for line in text.splitlines(keepends=True) if anchor in line]
    new = {"above": lines + line, "below": line + lines, "instead of": lines}[where]
    (project / name).write_text(text.replace(line, new))


PROGRAM = """
import json, pathlib, sys, torch
import rollout, train
from support import pretrain

print("refused", train.main(["--positive-weight", "0.2"]))
logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log().expand(800, 4)
token, logprobs = rollout.sample_token(logits, (torch.arange(800) + 0.5) / 800, 1.0, 0.7)
print("nucleus", [token.bincount(minlength=4).tolist(), logprobs.exp().unique().tolist()])
pretrain.WARM_STEPS = 40
print("trained", train.main(sys.argv[1:]))

pathlib.Path("right.py").write_text("def right(completion, answer):\\n    return answer != '2'\\n")
rows = [{"prompt": f"{level}=", "answer": str(level), "level": level} for level in (2, 0, 1)]
pathlib.Path("levels.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
small = "--group-size 2 --eval-prompts 2 --eval-samples 0 --task reverse --max-new-tokens 4"
data = "--data levels.jsonl --eval-data levels.jsonl --reward right.py:right --prompts-per-step 1"
print("levels", train.main(f"--name levels --steps 5 {small} {data}".split()))
ppo = "--name ppo --algo ppo --prompts-per-step 4"
print("ppo", train.main(f"{ppo} --steps 1 {small}".split()))
decoupled = "--name decoupled --algo decoupled --stale-steps 2 --steps 2 --entropy-coef 1e-3"
print("decoupled", train.main(f"{decoupled} --clip-low 0.3 --lr 1e-2 {small}".split()))
print("resumed", train.main("--resume --name ppo --steps 2".split()))
print("whole", train.main(f"{ppo} --name whole --save-every 1 --steps 2 {small}".split()))
"""


def begin(folder):
    """A copy of the project with the steps of the page, in which PROGRAM runs beside the tests."""
    project = copy_of_project(folder / "extended")
    for step in blocks("extending.md", "python"):
        applied(step, project)
    command = "\n".join(blocks("extending.md", "bash")).replace("\\\n", " ")
    flags = command.partition("train.py ")[2] + f" {RUN} --steps 2 --group-size 16 --track csv"
    here = {"out": project / "out", "folder": project, "XDG_CACHE_HOME": str(project / "cache")}
    words = shlex.split(flags)
    process = fork(program, PROGRAM, *words, nice=19, **here)
    return project, process


@pytest.fixture(scope="module")
def extended(begun):
    """The copy, and what PROGRAM printed."""
    project, process = begun[__name__]
    process.join(300)
    process.kill()  # if a step never ends
    return project, (project / "out").read_text()


@pytest.mark.last
def test_extended_as_the_page_says_it_trains(extended):
    """Of chances 0.5, 0.3, 0.15 and 0.05 a nucleus of 0.7 keeps the first two: 5/8 and 3/8."""
    project, said = extended
    assert "--positive-weight 0.2: gspo doesn't use it" in said and "refused 2\n" in said, said
    counts, chances = json.loads(re.search(r"nucleus (.*)", said)[1])
    assert counts == [0, 500, 0, 300] and chances == pytest.approx([3 / 8, 5 / 8])
    assert "trained 0\n" in said, said
    config = strict((project / "runs/run/config.json").read_text())
    assert (config["positive_weight"], config["optimizer"], config["top_p"]) == (0.2, "sgd", 0.9)
    state = load_file(project / "runs/run/checkpoints/step-2/trainer/state.safetensors")
    assert {name.split()[0] for name in state} == {"momentum_buffer"}
    row = metrics(project / "runs/run")[0]
    assert {"length_std", "reward/last_line", "reward/length"} <= row.keys()
    assert row["sampler_kl"] > 1e-3  # the nucleus is another distribution
    sample = metrics(project / "runs/run", "samples")[0]
    assert sample["prompt"] == sample["answer"][::-1] + "="
    assert (project / "runs/run/rewards.csv").read_text().startswith("1,")


@pytest.mark.last
def test_the_loss_of_the_page_that_reads_the_sampler_is_weighted(extended):
    """In step 2 the sampler is older than pi_old. Without a sixth tensor the loss fails."""
    project, said = extended
    assert "decoupled 0\n" in said, said
    config = strict((project / "runs/decoupled/config.json").read_text())
    assert config["clip_low"] == 0.3
    first, second = metrics(project / "runs/decoupled")
    assert first["sampler_kl"] < 1e-9 < second["sampler_kl"]


@pytest.mark.last
def test_the_curriculum_of_the_page_begins_with_easy_rows_and_skips_mastered_ones(extended):
    project, said = extended
    assert "levels 0\n" in said, said
    samples = {row["step"]: row["prompt"] for row in metrics(project / "runs/levels", "samples")}
    assert samples == {1: "0=", 2: "1=", 3: "2=", 4: "2=", 5: "2="}


@pytest.mark.last
def test_the_value_head_of_the_page_is_trained_saved_and_resumed(extended):
    project, said = extended
    assert "resumed 0\n" in said and said.endswith("whole 0\n"), said
    assert digests(project / "runs/ppo") == digests(project / "runs/whole")
    one, two = [
        load_file(project / f"runs/ppo/checkpoints/step-{step}/model.safetensors")["value"]
        for step in (1, 2)
    ]
    assert one.any() and not torch.equal(one, two)
    assert metrics(project / "runs/ppo")[0]["critic_grad_norm"] > 0


def test_the_sampler_of_the_page_trains(place, monkeypatch):
    """It samples evaluations, too: ours only samples for the check of the model."""
    ours = watched(monkeypatch, rollout, "generate")
    Path("my_sampler.py").write_text(example("extending.md", "# my_sampler.py"))
    flags = f"{RUN} --sampler my_sampler.py:generate --model models/tiny --reward pay.py:even"
    row = metrics(good("runs", f"{flags} --temperature 0.7", small=False).folder)[0]
    assert abs(row["sampler_kl"]) < 1e-9 and 1 < row["length_mean"] < 40 and len(ours) == 1


def test_the_new_loss_of_the_page_weighs_what_it_says():
    """A = 1 and -2, two tokens each, of four: the gradient is -0.1 / 4 and 2 / 4."""
    scope = dict(vars(gspo))
    exec(blocks("extending.md", "python")[0], scope)
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    advantages = torch.tensor([1.0, -2.0])
    scope["w_reinforce_loss"](logprobs, logprobs.detach(), advantages, mask)[0].backward()
    expected = torch.tensor([[-0.025, -0.025, 0], [0.5, 0.5, 0]])
    torch.testing.assert_close(logprobs.grad, expected)


def test_the_replay_buffer_of_the_page_fills_the_place_of_dead_groups():
    """Of two groups of two, which differ in width. The third batch has more that teach."""
    scope = {}
    exec(example("extending.md", "# replay.py"), scope)
    buffer = scope["Replay"](1, 2, 0)

    def batch(name: str, rewards: list[float], width: int):
        count = len(rewards)
        ones, lengths = torch.ones(count, width), torch.full((count,), width)
        tokens = torch.full((count, 1 + width), ord(name))
        completions = rollout.Rollout(tokens, lengths * 0 + 1, lengths, ones > 0, ones, ones[:, 0])
        rewards = torch.tensor(rewards)
        samples = [f"{name}{i}" for i in range(count)]
        return train.Batch(completions, samples, rewards, ones > 0)

    def mixed(*made) -> list[str]:
        found = buffer.mix(batch(*made))
        assert [chr(row[1]) for row in found.rollout.tokens] == [x[0] for x in found.verdicts]
        assert torch.equal(found.mask, found.rollout.completion_mask)
        assert len(found.rewards) == len(found.verdicts)
        return found.verdicts

    assert mixed("a", [1.0, 1.0, 0.0, 1.0], 3) == ["a2", "a3", "a0", "a1"]
    assert mixed("b", [0.0, 0.0, 1.0, 1.0], 5) == ["a2", "a3", "b0", "b1"]
    assert mixed("c", [0.0, 1.0, 1.0, 1.0], 2) == ["c0", "c1", "a2", "a3"]
    assert mixed("d", [0.0, 0.0, 0.0, 0.0], 2) == ["c0", "c1", "d0", "d1"]
