"""Write GSPO yourself: five functions to fill in, six bugs to find, and tests that check your work.

    python docs/exercises.py ../gspo-exercises     # copy the project and empty five functions
    cd ../gspo-exercises
    python docs/exercises.py                       # list the exercises
    python docs/exercises.py gspo_loss             # check one of them
    python docs/exercises.py bugs                  # check the six losses in docs/bugs.py
    python docs/exercises.py weights               # print the batch that the lesson works by hand

Each function keeps its signature and its docstring, which contains the formula; you write the body.
For the solution, look at the file in the original project.
"""

import ast
import contextlib
import inspect
import io
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import gspo  # noqa: E402

EMPTY = '    raise NotImplementedError("your turn")\n'
LOSS = "test_gspo.py::test_loss_matches_scalar_loop"
EXERCISES = {  # name: (file, tests, hint)
    "group_advantages": (
        "gspo.py",
        ("test_gspo.py::test_group_advantages_match_scalar_loop", "test_gspo.py::test_dead_group_"),
        "five lines for the default; then add the other divisors and groups with equal rewards",
    ),
    "gspo_loss": (
        "gspo.py",
        (f"{LOSS}[gspo]", f"{LOSS}[gspo wide]"),
        "eight lines; completion_mean and masked_mean handle padding and denom",
    ),
    "kl_penalty": (
        "gspo.py",
        (f"{LOSS}[kl", "test_gspo.py::test_kl_estimators"),
        "x is log pi_ref - log pi; padding may hold NaN",
    ),
    "gae_advantages": (
        "gspo.py",
        ("test_gspo.py::test_token_advantages_match_scalar_loop",),
        "one backward loop over t; skip tokens outside the mask instead of discounting them",
    ),
    "completion_logprobs": (
        "rollout.py",
        ("test_rollout.py::test_scores_are_the_models_own_in_value_and_gradient[qwen3-",),
        "hidden_states returns the states that predict the tokens in the mask, token_logprobs "
        "turns them into log-probs; put these where the mask is",
    ),
}
# losses in docs/bugs.py, and the case of tests/test_gspo.py that catches each bug
BUGS = {"grpo": "", "gspo": " wide", "cispo": "", "dapo": "", "sapo": "", "gspo_token": " wide"}


# ---- the batch of the lesson ---------------------------------------------------------------------

# two completions of "Is 7 prime?", and two of "Is 9 prime?"
TOKENS = (("Yes", ",", "prime", "<end>"), ("No", "<end>"), ("<end>",), ("No", ".", "<end>"))
REWARDS = (1.0, 0.0, 0.0, 1.0)
RATIOS = ((1.0, 1.25, 1.0, 1.0), (0.125, 8.0), (0.98,), (0.9, 1.0, 0.95))  # pi / pi_old
LOSSES = ("reinforce", "ppo", "grpo", "dapo", "cispo", "gspo", "luspo")


def weights(loss) -> tuple[list[list[float]], float]:
    """The weight of each token's gradient, -d loss / d log pi, in percent of |A|, and the clip
    fraction."""
    rows = [torch.tensor(row) for row in RATIOS]
    ratios = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logprobs = ratios.log().requires_grad_()  # pi_old is 1; the padding becomes log 0
    advantages = gspo.group_advantages(torch.tensor(REWARDS), 2)
    value, metrics = loss(logprobs, torch.zeros_like(ratios), advantages, ratios > 0)
    value.backward()
    found = 0.0 - 100 * logprobs.grad / advantages.abs()[:, None]
    return [row[: len(own)].tolist() for row, own in zip(found, RATIOS)], metrics["clip_fraction"]


def weights_table() -> str:
    """One line per loss: the weights of the ten tokens and the clip fraction."""
    lines = [["", *(token for row in TOKENS for token in row), "clipped"]]
    lines.append(["pi / pi_old", *(f"{ratio:g}" for row in RATIOS for ratio in row), ""])
    for name in LOSSES:
        found, clipped = weights(getattr(gspo, f"{name}_loss"))
        numbers = [f"{weight:.3g}" for row in found for weight in row]
        lines.append([name, *numbers, f"{clipped:.0%}"])
    laid_out = (f"{name:11}" + "".join(f"{cell:>8}" for cell in row) for name, *row in lines)
    return "\n".join(line.rstrip() for line in laid_out)


# ---- copies and tests ----------------------------------------------------------------------------


def emptied(source: str, name: str) -> str:
    """Replace the body of a function, below its docstring, with an error."""
    [function] = [each for each in ast.parse(source).body if getattr(each, "name", "") == name]
    lines = source.splitlines(keepends=True)
    lines[function.body[0].end_lineno : function.end_lineno] = [EMPTY]
    return "".join(lines)


def make_copy(folder: Path) -> None:
    """Copy the project without its history and runs, and empty the functions in the copy."""
    left = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache")
    shutil.copytree(ROOT, folder, ignore=left)
    for name, (file, _, _) in EXERCISES.items():
        path = folder / file
        path.write_text(emptied(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    print(f"cd {folder}; python docs/exercises.py")


class Chosen:
    """A pytest plugin that selects the tests of some exercises and records which exercises pass,
    and why the others don't."""

    def __init__(self, tests: dict[str, tuple[str, ...]]):
        self.tests, self.right, self.reasons = tests, set(), {}

    def exercises(self, test) -> set[str]:
        """The exercises that a test belongs to. Its node id starts with tests/."""
        return {name for name, own in self.tests.items() if test.nodeid[6:].startswith(own)}

    def pytest_collection_modifyitems(self, items):
        items[:] = [each for each in items if self.exercises(each)]
        self.right = set().union(*map(self.exercises, items))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.right -= self.exercises(report)
            lines = report.longrepr.reprcrash.message.splitlines()
            values = [line for line in lines if line.startswith(("Expected", "Greatest absolute"))]
            for name in self.exercises(report):
                self.reasons.setdefault(name, (values or lines)[0])


def run_tests(tests: dict[str, tuple[str, ...]], *words: str) -> Chosen:
    """Run the tests of some exercises and return the plugin with its records."""
    import pytest

    chosen = Chosen(tests)
    files = {ROOT / "tests" / test.partition("::")[0] for own in tests.values() for test in own}
    pytest.main(["-q", "--no-header", f"--rootdir={ROOT}", *words, *map(str, files)], [chosen])
    return chosen


def check(names: list[str]) -> bool:
    """Run the tests of some exercises. If there is only one, stop at its first failure."""
    most = f"--maxfail={1 if len(names) == 1 else 0}"
    right = run_tests({name: EXERCISES[name][1] for name in names}, "--tb=short", most).right
    for name in names:
        print(f"{name}: right" if name in right else f"{name}: not yet. Hint: {EXERCISES[name][2]}")
    return right == set(names)


def check_bugs() -> bool:
    """Swap in the losses of docs/bugs.py and run our own tests on them."""
    import bugs

    tests = {}
    for name, case in BUGS.items():
        function = getattr(bugs, f"{name}_loss")
        setattr(gspo, f"{name}_loss", function)
        in_parts = "test_gspo.py::test_micro_batches_add_up_to_the_batch"
        tests[f"{name}_loss"] = (f"{LOSS}[{name}{case}]", f"{in_parts}[{name}{case}]")
    with contextlib.redirect_stdout(io.StringIO()):  # hide pytest's dots
        found = run_tests(tests, "--tb=no")
    for name in tests:
        message = inspect.getdoc(getattr(bugs, name))
        print(f"{name}: right" if name in found.right else f"{name}: not yet. {message}")
        if reason := found.reasons.get(name):
            where = "gradient" if reason.startswith("Greatest") else "loss"
            print(f"    {where}: {reason}")
    return found.right == tests.keys()


def main(arguments: list[str]) -> int:
    if not arguments:
        for name, (file, _, hint) in EXERCISES.items():
            print(f"{name} in {file}: {hint}")
        print("bugs in docs/bugs.py: six losses with one bug each")
    elif arguments[0] == "weights":
        print(weights_table())
    elif arguments[0] == "bugs":
        return 0 if check_bugs() else 1
    elif arguments[0] in EXERCISES:
        return 0 if check(arguments) else 1
    else:
        make_copy(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
