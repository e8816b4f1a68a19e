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
    """A pytest plugin that keeps the tests whose names begin as those of an exercise."""

    def __init__(self, beginnings: tuple[str, ...]):
        self.beginnings = beginnings

    def pytest_collection_modifyitems(self, items):
        items[:] = [each for each in items if each.nodeid[6:].startswith(self.beginnings)]


def check(name: str) -> bool:
    """Run the tests of an exercise."""
    import pytest

    _, tests, hint = EXERCISES[name]
    words = ["-q", "--no-header", "--tb=short", "--maxfail=1", f"--rootdir={ROOT}"]
    files = [*dict.fromkeys(str(ROOT / "tests" / each.partition("::")[0]) for each in tests)]
    right = pytest.main([*words, *files], plugins=[Chosen(tests)]) == 0
    print(f"{name}: right" if right else f"{name}: not yet. Hint: {hint}")
    return right


def main(arguments: list[str]) -> int:
    if not arguments:
        for name, (file, _, hint) in EXERCISES.items():
            print(f"{name} in {file}: {hint}")
        return 0
    if arguments[0] in EXERCISES:
        return 0 if all([check(name) for name in arguments]) else 1
    make_copy(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
