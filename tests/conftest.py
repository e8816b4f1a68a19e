"""Put the project's files on the path, as a user's script would find them. Add --slow, and
fixtures that several test files share."""

import gc
import os
import sys
from collections import defaultdict, namedtuple
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "bench"), str(TESTS.parent / "docs")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models so small wait for a second thread
if not any("on_a_gpu" in word for word in sys.argv):  # bf16 and its rounding would be the default
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import forks  # noqa: E402, F401, what the fork server imports

gc.disable()  # during the imports, of which nothing is garbage

if "pytest" in sys.argv[0] and not any("test_" in word for word in sys.argv):
    forkserver.ensure_running()  # of the whole suite: it imports torch while we do

import transformers  # noqa: E402

import train  # noqa: E402
from support import pretrain  # noqa: E402
from tools import EXPERTS, SHAPE, furnish, random_policy  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="and tests that take a minute, or ask for docs"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, or asks for documentation: with --slow")
    config.addinivalue_line("markers", "last: waits for processes that run beside the other tests")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: "last" in item.keywords)
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


def pytest_collection_finish():
    gc.freeze()  # what the imports have made need not be searched again and again
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def begun(request, tmp_path_factory):
    """What the tests marked `last` wait for, by the name of their module."""
    modules = {item.module for item in request.session.items if "last" in item.keywords}
    folder = tmp_path_factory.mktemp("begun")
    if modules:
        furnish(folder, request.getfixturevalue("models"))
    return defaultdict(dict, {each.__name__: each.begin(folder) for each in modules})


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of the models of the test runs. Tests add theirs under other names.

    tiny is dense, of one layer. moe is a mixture of 8 experts, 2 of them active, in 2 layers."""
    folder = tmp_path_factory.mktemp("models")
    random_policy(folder / "tiny", transformers.Qwen3Config(**SHAPE))
    random_policy(folder / "moe", transformers.Qwen3MoeConfig(**EXPERTS))
    return folder


@pytest.fixture
def place(models, tmp_path, monkeypatch):
    """A working directory of its own, so that flags are short. --model tiny warms up briefly."""
    here = tmp_path / "here"
    here.mkdir()
    furnish(here, models)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(models / "cache"))
    monkeypatch.setattr(pretrain, "WARM_STEPS", 3)
    return here


Step = namedtuple("Step", "batch updates tensors")
Update = namedtuple("Update", "rows active_rows parts")


@pytest.fixture
def seen(monkeypatch):
    """Keeps the run and, of every step, the batch, the updates and the loop's tensors by name."""
    kept = SimpleNamespace(run=None, steps=[])
    plan_updates, step_metrics = train.plan_updates, train.measure.step_metrics

    def keep_updates(*given):
        kept.updates = plan_updates(*given)
        return kept.updates

    def keep_step(run, batch, tensors, *others):
        kept.run = run
        updates = [Update(*each) for each in kept.updates]
        kept.steps.append(Step(batch, updates, SimpleNamespace(**tensors)))
        return step_metrics(run, batch, tensors, *others)

    monkeypatch.setattr(train, "plan_updates", keep_updates)
    monkeypatch.setattr(train.measure, "step_metrics", keep_step)
    return kept
