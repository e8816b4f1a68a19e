"""The files of support/extras are optional: each is imported where a flag asks for it."""

from forks import QUICK, fork, program
from tools import copy_of_project

TRAIN = """
import sys, support.pretrain, train
support.pretrain.WARM_STEPS = 4
sys.exit(train.main(sys.argv[1:]))
"""
COLLECT = "import sys, pytest; sys.exit(pytest.main(['--collect-only', '-q', 'tests']))"
FLAGS = "--algo gspo --steps 1 --prompts-per-step 2 --eval-prompts 4 --eval-samples 0 --name run"


def test_without_the_optional_files_a_run_trains_and_the_tests_are_collected(models, tmp_path):
    out, collected, copy = tmp_path / "out", tmp_path / "collected", copy_of_project(tmp_path / "p")
    for path in copy.glob("support/extras/*.py"):
        if path.name != "__init__.py":
            path.unlink()
    cache = str(models / "cache")
    train = fork(program, TRAIN, *FLAGS.split(), out=out, folder=copy, XDG_CACHE_HOME=cache)
    collect = fork(program, COLLECT, out=collected, folder=copy, **QUICK)
    train.join()
    collect.join()
    assert train.exitcode == 0 and "held out" in out.read_text(), out.read_text()
    assert collect.exitcode == 0, collected.read_text()[-3000:]
