"""docs/exercises.py: an empty function fails its tests, and the original passes them."""

import importlib.util

from forks import fork, program
from tools import ROOT

CHECK = """
import runpy, sys
sys.argv = ["docs/exercises.py", *sys.argv[1:]]
runpy.run_path("docs/exercises.py", run_name="__main__")
"""


def test_an_empty_function_fails_and_the_original_is_right(tmp_path):
    spec = importlib.util.spec_from_file_location("exercises", ROOT / "docs/exercises.py")
    exercises = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exercises)
    copy = tmp_path / "copy"
    exercises.make_copy(copy)
    for verdict in ("not yet", "right"):
        out = tmp_path / verdict
        process = fork(program, CHECK, *exercises.EXERCISES, out=out, folder=copy)
        process.join()
        for name, (file, _, _) in exercises.EXERCISES.items():
            assert f"\n{name}: {verdict}" in out.read_text(), out.read_text()
            (copy / file).write_text((ROOT / file).read_text())  # the solution
