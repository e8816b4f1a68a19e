"""Write GSPO yourself: five functions, and tests that say when yours is right.

    python docs/exercises.py ../gspo-exercises     # copy the project, with five functions empty
    cd ../gspo-exercises
    python docs/exercises.py                       # list the exercises
    python docs/exercises.py gspo_loss             # run the tests of one

Each function keeps its signature and its docstring, which has the formula. Write the body. The
solution is the file that you copied from.
"""

import ast
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMPTY = '    raise NotImplementedError("your turn")\n'
LOSS = "test_gspo.py::test_loss_matches_scalar_loop"
EXERCISES = {  # in this order: file, tests, hint
    "group_advantages": (
        "gspo.py",
        ("test_gspo.py::test_group_advantages_match_scalar_loop", "test_gspo.py::test_dead_group"),
        "five lines for the default; then the other divisors, and groups of equal rewards",
    ),
    "gspo_loss": (
        "gspo.py",
        (f"{LOSS}[gspo]", f"{LOSS}[gspo wide]"),
        "eight lines; completion_mean and masked_mean take care of padding and denom",
    ),
    "kl_penalty": (
        "gspo.py",
        (f"{LOSS}[kl", "test_gspo.py::test_kl_estimators"),
        "x is log pi_ref - log pi; the padding may hold NaN",
    ),
    "gae_advantages": (
        "gspo.py",
        ("test_gspo.py::test_token_advantages_match_scalar_loop",),
        "one loop over t, backwards; tokens outside the mask are skipped, not discounted",
    ),
    "completion_logprobs": (
        "rollout.py",
        ("test_rollout.py::test_scores_are_the_models_own_in_value_and_gradient[plain-q",),
        "the logits one position earlier, divided by the temperature; float32",
    ),
}


def emptied(source: str, name: str) -> str:
    """Replace the body of a function, below its docstring, with an error."""
    [function] = [each for each in ast.parse(source).body if getattr(each, "name", "") == name]
    lines = source.splitlines(keepends=True)
    lines[function.body[0].end_lineno : function.end_lineno] = [EMPTY]
    return "".join(lines)


def make_copy(folder: Path) -> None:
    """Copy the project without its history and runs, and empty the functions there."""
    left = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache")
    shutil.copytree(ROOT, folder, ignore=left)
    for name, (file, _, _) in EXERCISES.items():
        path = folder / file
        path.write_text(emptied(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    print(f"cd {folder}; python docs/exercises.py")


class Chosen:
    """A pytest plugin that keeps the tests of some exercises, and notes which are right."""

    def __init__(self, names: list[str]):
        self.names, self.right = names, set()

    def exercises(self, test) -> set[str]:
        """Return those with this test, whose name begins as theirs. Its id begins with tests/."""
        return {name for name in self.names if test.nodeid[6:].startswith(EXERCISES[name][1])}

    def pytest_collection_modifyitems(self, items):
        items[:] = [each for each in items if self.exercises(each)]
        self.right = set().union(*map(self.exercises, items))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.right -= self.exercises(report)


def check(names: list[str]) -> bool:
    """Run the tests of exercises: up to the first failure, if it is one exercise."""
    import pytest

    chosen = Chosen(names)
    files = {test.partition("::")[0] for name in names for test in EXERCISES[name][1]}
    words = ["-q", "--no-header", "--tb=short", f"--maxfail={1 if len(names) == 1 else 0}"]
    words += [f"--rootdir={ROOT}", *(str(ROOT / "tests" / file) for file in files)]
    pytest.main(words, plugins=[chosen])
    for name in names:
        right = name in chosen.right
        print(f"{name}: right" if right else f"{name}: not yet. Hint: {EXERCISES[name][2]}")
    return chosen.right == set(names)


def main(arguments: list[str]) -> int:
    if not arguments:
        for name, (file, _, hint) in EXERCISES.items():
            print(f"{name} in {file}: {hint}")
    elif arguments[0] in EXERCISES:
        return 0 if check(arguments) else 1
    else:
        make_copy(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
