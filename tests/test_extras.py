"""The files of support/extras are optional: each is imported where a flag asks for it."""

import pytest

from forks import QUICK, fork, program
from tools import copy_of_project

TRAIN = """
import sys, support.pretrain, train
support.pretrain.WARM_STEPS = 4
sys.exit(train.main(sys.argv[1:]))
"""
COLLECT = "import sys, pytest; sys.exit(pytest.main(['--collect-only', '-q', 'tests']))"
FLAGS = "--algo gspo --steps 1 --prompts-per-step 2 --eval-prompts 4 --eval-samples 0 --name run"


def begin(folder):
    """Train in a copy without those files, and collect its tests."""
    copy = copy_of_project(folder / "without")
    for path in copy.glob("support/extras/*.py"):
        if path.name != "__init__.py":
            path.unlink()
    here = {"folder": copy, "nice": 19, "XDG_CACHE_HOME": str(folder / "cache")}
    train = fork(program, TRAIN, *FLAGS.split(), out=folder / "trained", **here)
    collect = fork(program, COLLECT, out=folder / "collected", **here, **QUICK)
    return folder, train, collect


@pytest.mark.last
def test_without_the_optional_files_a_run_trains_and_the_tests_are_collected(begun):
    folder, train, collect = begun[__name__]
    train.join()
    collect.join()
    trained, collected = ((folder / name).read_text() for name in ("trained", "collected"))
    assert train.exitcode == 0 and "held out" in trained, trained
    assert collect.exitcode == 0, collected[-3000:]
