"""docs/from-ppo-to-gspo.md: its code is that of gspo.py, its numbers are right, and GitHub can show
its formulas. docs/objectives.md has all algorithms.

After a change of a loss: python tests/test_lesson.py
"""

import ast
import difflib
import inspect
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "tests/bench")]

import exercises  # noqa: E402

import gspo  # noqa: E402
import long  # noqa: E402
from support import report  # noqa: E402
from tools import metrics  # noqa: E402

PAGE = ROOT / "docs/from-ppo-to-gspo.md"
LESSON = PAGE.read_text(encoding="utf-8")
# a comment that GitHub hides, `diff old new` or `source name`, and the block below it
CODE = re.compile(r"<!-- (diff|source) (\w+) ?(\w*) -->\n```\w+\n.*?```\n", re.DOTALL)


def lines_of(name: str) -> list[str]:
    """The source of a loss, without its docstring and the arguments that all losses share."""
    source = inspect.getsource(getattr(gspo, name))
    function = ast.parse(source).body[0]
    given = function.args
    optional = given.args[-len(given.defaults) :] + given.kwonlyargs
    own = [
        f"{argument.arg}={ast.get_source_segment(source, default)}"
        for argument, default in zip(optional, given.defaults + given.kw_defaults)
    ]
    own[0] = "..."  # denom, and the four before it
    return [f"def {name}({', '.join(own)}):", *source.splitlines()[function.body[1].lineno - 1 :]]


def block(found: re.Match) -> str:
    """The comment and the block: a whole function, or a diff of two without docstrings."""
    kind, name, new = found.groups()
    language, lines = "python", lines_of(name)
    if kind == "source":
        lines = inspect.getsource(getattr(gspo, name)).splitlines()
    if kind == "diff":
        language = "diff"
        lines = [*difflib.unified_diff(lines, lines_of(new), lineterm="", n=len(lines))][3:]
    comment = found[0].splitlines()[0]
    return "\n".join([comment, f"```{language}", *lines, "```\n"])


def with_code(text: str) -> str:
    return CODE.sub(block, text)


def test_code_of_the_lesson_is_that_of_gspo():
    found = CODE.findall(LESSON)
    assert [kind for kind, *_ in found].count("diff") == LESSON.count("```diff") > 3
    assert ("source", "reinforce_loss", "") in found
    assert with_code(LESSON) == LESSON, "a loss has changed: python tests/test_lesson.py"


def test_program_prints_the_numbers_of_the_page(capsys):
    [(source, printed)] = re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", LESSON)
    with torch.random.fork_rng():
        exec(source, {})
    assert capsys.readouterr().out == printed


def test_batch_worked_by_hand_is_that_of_the_losses():
    """The table and the picture agree with the losses, and s is the root of the product."""
    assert f"```text\n{exercises.weights_table()}\n```" in LESSON
    for name, ratios in zip("abcd", exercises.RATIOS, strict=True):
        s = math.prod(ratios) ** (1 / len(ratios))
        assert f"{s:.4f}" in LESSON, name
    numbers = [ratio for row in exercises.RATIOS for ratio in row]
    for name in exercises.LOSSES:
        rows, _ = exercises.weights(getattr(gspo, f"{name}_loss"))
        numbers += [weight for row in rows for weight in row]
    picture = (ROOT / "docs/pictures/weights.svg").read_text(encoding="utf-8")
    shown = re.findall(r">(−?\d[\d.]*)</text>", picture)
    assert shown == [f"{number:.3g}".replace("-", "−") for number in numbers]


def test_clip_fraction_is_that_of_the_default_run():
    """In the lesson, and on the page of a run."""
    clipped = [row["clip_fraction"] for row in metrics(ROOT / "docs/runs/gspo")]
    first, last = fmean(clipped[:10]), fmean(clipped[-10:])
    prose = " ".join(LESSON.split())
    assert f"{first:.0%} in the first ten steps" in prose
    assert f"{last:.0%} in the last ten" in prose
    assert first == pytest.approx(0.5, abs=0.05) and last == pytest.approx(0.2, abs=0.05)
    assert "half at first" in report.CHARTS["clip_fraction"].healthy


def test_accuracies_by_learning_rate_are_those_of_the_runs():
    """Section 11: the mean of steps 12 and 16, in italics where it is below the mean start."""
    bands = ["gspo, ε 3e-4, 4e-4", "gspo, ε 3e-3", "gspo, ε 0.2", "luspo, ε 2e-3, 2.5e-3"]
    runs = [run for run in metrics(ROOT / "docs/runs/rates", "rows") if run["more"] == ""]
    table = long.cells(runs, said=lambda ends: f"{fmean(ends):.0f}")
    for name, line in zip([*bands, "grpo, no KL"], table.splitlines()[2:], strict=True):
        assert f"| {name} |{line.split('|', 2)[2]}" in LESSON, line


@pytest.mark.slow  # a fork's own are not documented here
def test_objectives_are_those_of_algos():
    """A row per algorithm: its function, its mean, and the defaults of its signature."""
    text = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `([\w+-]+)` \| .* \| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", text)
    assert [name for name, *_ in rows] == list(gspo.ALGOS)
    for name, function, mean, numbers, paper in rows:
        loss = gspo.ALGOS[name].loss
        defaults = inspect.signature(loss).parameters.values()
        own = [f"{each.name} {each.default:g}" for each in defaults if type(each.default) is float]
        unit = "token" if mean == "all tokens" else "completion"
        assert (function, unit) == (loss.__name__, gspo.ALGOS[name].per), name
        assert numbers == (", ".join(own) or "–"), name
        assert re.search(r"\]\(https://|Williams 1992", paper), name


def test_numbers_of_the_text_are_right():
    """Advantages if one or four of 8 completions are right, and those of eight times 0.1 without
    the test for equal rewards."""
    for right, wanted in ((1, (2.47, -0.35)), (4, (0.94, -0.94))):
        rewards = torch.tensor([1.0] * right + [0.0] * (8 - right))
        found = gspo.group_advantages(rewards, 8)
        assert (found[0].item(), found[-1].item()) == pytest.approx(wanted, abs=0.005)
    equal = torch.full((8,), 0.1)
    rounding = (equal - equal.mean()) / (equal.std() + 1e-6)
    assert rounding[0].item() == pytest.approx(-0.0074, abs=1e-4)


def test_kl_upside_down_is_wrong():
    """For pi = (0.5, 0.5) and ref = (0.9, 0.1) the KL is 0.511; k3 of pi / ref averages 1.267."""
    new, mask = torch.tensor([[0.5], [0.5]]).log(), torch.ones(2, 1)
    ref = torch.tensor([[0.9], [0.1]]).log()
    kl = (new - ref).mean().item()  # both tokens are equally likely
    assert round(kl, 3) == 0.511
    assert gspo.kl_penalty(new, ref, mask)[0].item() == pytest.approx(kl, rel=1e-5)
    assert gspo.kl_penalty(ref, new, mask)[0].item() == pytest.approx(1.267, abs=5e-4)


# ---- formulas of all pages -----------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_formulas_are_safe_from_markdown(page):
    """Within $...$ and $$...$$, GitHub removes the backslash of `\\,` and `\\{` and reads _..._ as
    emphasis; it leaves ```math blocks and $`...`$ alone. In a table, a | would end the cell."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```math\n(.*?)^```$", text)
    inline = re.findall(r"\$`([^`\n]*)`\$", text)
    for formula in (*blocks, *inline):
        assert formula.count("{") == formula.count("}") and "$" not in formula, formula
        assert formula.count(r"\left") == formula.count(r"\right"), formula
    for row in re.findall(r"(?m)^\|.*$", text):
        assert not any("|" in formula for formula in re.findall(r"\$`([^`]*)`\$", row)), row
    rest = re.sub(r"(?ms)^ *```.*?^ *```$|^    .*?$", "", text)
    rest = re.sub(r"\$`[^`\n]*`\$|`[^`]*`", "", rest)
    for paragraph in rest.split("\n\n"):
        assert paragraph.count("$") < 2, paragraph


if __name__ == "__main__":
    PAGE.write_text(with_code(LESSON), encoding="utf-8")
