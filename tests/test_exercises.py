"""docs/exercises.py: empty functions and planted bugs fail the tests, and the originals pass."""

import importlib.util
import re

from forks import QUICK, fork, program
from tools import ROOT

CHECK = """
import runpy, sys
sys.argv = ["docs/exercises.py", *sys.argv[1:]]
sys.path.insert(0, "docs")
runpy.run_path("docs/exercises.py", run_name="__main__")
"""


SPEC = importlib.util.spec_from_file_location("exercises", ROOT / "docs/exercises.py")
exercises = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(exercises)


def test_empty_functions_and_bugs_fail_and_the_originals_are_right(tmp_path):
    copy = tmp_path / "copy"
    exercises.make_copy(copy)
    for verdict in ("not yet", "right"):
        both = {tmp_path / f"{verdict}, functions": exercises.EXERCISES}
        both[tmp_path / f"{verdict}, bugs"] = ["bugs"]
        checks = [fork(program, CHECK, *both[out], out=out, folder=copy, **QUICK) for out in both]
        for process in checks:
            process.join()
        text = "".join(out.read_text() for out in both)
        for name in (*exercises.EXERCISES, *(f"{name}_loss" for name in exercises.BUGS)):
            assert f"\n{name}: {verdict}" in f"\n{text}", text
        assert (text.count("loss: Expected ") >= 4) == (verdict == "not yet")
        for file in {file for file, _, _ in exercises.EXERCISES.values()}:
            (copy / file).write_text((ROOT / file).read_text())  # the solution
        (copy / "docs/bugs.py").write_text("from gspo import *\n")


def test_hints_name_functions_that_exist():
    for file, _, hint in exercises.EXERCISES.values():
        for name in re.findall(r"\w{4,}_\w+", hint):
            assert f"def {name}(" in (ROOT / file).read_text(), name
