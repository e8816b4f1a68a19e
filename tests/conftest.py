"""Put the project's files on the path, as a user's script would find them. Add --slow, and
fixtures that several test files share."""

import os
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "bench")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models so small wait for a second thread
if not any("on_a_gpu" in word for word in sys.argv):  # bf16 and its rounding would be the default
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import transformers  # noqa: E402

import train  # noqa: E402
from support import pretrain  # noqa: E402
from tools import EXPERTS, SHAPE, furnish, random_policy, write_rows  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="and tests that take a minute, or ask for docs"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, or asks for documentation: with --slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


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
    monkeypatch.setattr(pretrain, "WARM_STEPS", 8)
    return here


@pytest.fixture
def prompts(place):
    """rows.jsonl: prompts on 1, which pay.py:by_prompt finds right, on 2, wrong, and on 3."""
    rows = [{"prompt": f"{1 + i % 3}+{i}=", "answer": "0"} for i in range(12)]
    return write_rows(place / "rows.jsonl", rows)


@pytest.fixture
def seen(monkeypatch):
    """Keeps the run, and of every step the tensors of the loop, as its report begins."""
    kept = SimpleNamespace(run=None, steps=[])
    report_step = train.report_step

    def keep(run, *others):
        kept.run = run
        kept.steps.append(step_of(SimpleNamespace(**sys._getframe(1).f_locals)))
        return report_step(run, *others)

    monkeypatch.setattr(train, "report_step", keep)
    return kept


Step = namedtuple("Step", "batch updates constants advantages returns result")


def step_of(local) -> Step:
    """Order the local variables of `train` as the tests read them."""
    names = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
    constants = SimpleNamespace(**{name: getattr(local, name) for name in names})
    samples = [SimpleNamespace(text=v.completion, problem=v.row, verdict=v) for v in local.verdicts]
    batch = SimpleNamespace(
        step=local.step,
        rollout=local.rollout,
        samples=samples,
        mask=local.mask,
        rewards=local.rewards,
    )
    updates = [
        SimpleNamespace(rows=rows, active_rows=rows[local.alive[rows]], parts=parts)
        for rows, parts in local.updates
    ]
    result = SimpleNamespace(last_logprobs=local.new_logprobs, first_logprobs=local.first_logprobs)
    return Step(batch, updates, constants, local.advantages, local.returns, result)
