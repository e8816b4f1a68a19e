"""docs/exercises.py: empty functions and planted bugs fail the tests, and the originals pass."""

import re

import exercises
import pytest

from forks import QUICK, fork, program
from tools import ROOT

CHECK = """
import runpy, sys
sys.argv = ["docs/exercises.py", *sys.argv[1:]]
sys.path.insert(0, "docs")
runpy.run_path("docs/exercises.py", run_name="__main__")
"""


def begin(folder):
    """Check the empty functions, the originals and the bugs."""
    exercises.make_copy(folder / "exercises")

    def check(project, out, *names):
        here = {"out": folder / out, "folder": project}
        return fork(program, CHECK, *names, nice=19, **here, **QUICK)

    checks = [
        check(folder / "exercises", "empty", *exercises.EXERCISES),
        check(ROOT, "original", *exercises.EXERCISES),
        check(ROOT, "bugs", "bugs"),
    ]
    return folder, checks


@pytest.mark.last
def test_empty_functions_and_bugs_fail_and_the_originals_are_right(begun):
    """Each bug with the test that finds it."""
    folder, checks = begun[__name__]
    for process in checks:
        process.join()
    empty, original, bugs = ((folder / out).read_text() for out in ("empty", "original", "bugs"))
    for name in exercises.EXERCISES:
        assert f"\n{name}: not yet" in f"\n{empty}" and f"\n{name}: right" in f"\n{original}"
    for name in exercises.BUGS:
        assert f"{name}_loss: not yet" in bugs
    assert bugs.count("loss: Expected ") + bugs.count("gradient: Greatest") == len(exercises.BUGS)


def test_hints_name_functions_that_exist():
    for file, _, hint in exercises.EXERCISES.values():
        for name in re.findall(r"\w{4,}_\w+", hint):
            assert f"def {name}(" in (ROOT / file).read_text(), name
