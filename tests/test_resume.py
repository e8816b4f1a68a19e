"""Runs that were stopped or killed continue as if nothing had happened."""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

import train
from forks import fork
from support import folders, report
from tools import (
    BASE,
    command_line,
    digests,
    furnish,
    good,
    launch,
    metrics,
    newest,
    refused,
    same_run,
    strict,
    timeless,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(scope="module")
def one_step(models, tmp_path_factory):
    """The folder of a run of one step."""
    here = tmp_path_factory.mktemp("one")
    furnish(here, models)
    with contextlib.chdir(here):
        good(here / "runs", f"{BASE} --steps 1")
    return here / "runs/run"


@pytest.fixture
def done(one_step, tmp_path):
    """A copy of it."""
    return shutil.copytree(one_step, tmp_path / "run")


def interrupted(runs, flags, monkeypatch, at):
    """Run until a signal comes in step `at`."""
    end_step = train.console.Log.end_step

    def stopping(log, tokens):
        stopping.steps += 1
        if stopping.steps == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return end_step(log, tokens)

    stopping.steps = 0

    with monkeypatch.context() as patch:
        patch.setattr(train.console.Log, "end_step", stopping)
        return launch(runs, flags)


def resumed(runs, flags=""):
    return good(runs, f"--resume --name run {flags}", small=False)


def not_resumed(runs, flags="") -> str:
    return refused(runs, f"--resume --name run {flags}", small=False)


RESUMED = {  # flags, the step in which the signal comes
    "gspo": ("--eval-every 2 --save-every 2 --data rows.jsonl --stop 2; --stop #", 3),
    "ppo": ("--algo ppo --kl-coef 0.1 --ref-every 2", 3),
    "dapo": ("--algo dapo --reward pay.py:by_prompt --warmup-steps 4 --epochs 2", 2),
    "stale-bf16": ("--stale-steps 3 --dtype bfloat16", 2),
    "moe": ("--model models/moe --algo grpo --routing-replay", 1),
    "lora": ("--lora-rank 2 --kl-coef 0.1 --reward pay.py:even+-2*pay.py:steps", 2),
    "lora-ppo": ("--lora-rank 2 --algo ppo --ref-every 2 --kl-coef 0.1 --stale-steps 2", 1),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resuming_changes_nothing(case, tmp_path, monkeypatch):
    """A run that was stopped, and resumed with the command that it prints, is bit-identical: rows
    of every step, all tensors."""
    flags, at = RESUMED[case]
    write_rows("rows.jsonl", [{"prompt": f"{i}+1=", "answer": "0"} for i in range(15)])
    flags = f"{BASE} --steps 4 {flags}"
    whole = good(tmp_path / "whole", flags).folder
    stopped = interrupted(tmp_path / "stopped", flags, monkeypatch, at)
    assert stopped.status == 130 and stopped.err.count("\n") == 1
    assert "stopping after this step, with a checkpoint" in stopped.out
    rows = metrics(stopped.folder)
    assert [row["step"] for row in rows] == list(range(1, at + 1))
    drawn = sum(row["prompts_drawn"] for row in rows)
    assert (drawn > 4 * at) == (case == "dapo")  # it refilled, so that it is further in its prompts
    assert (stopped.folder / "report.html").exists()
    progress = strict((newest(stopped.folder) / "trainer/progress.json").read_text())
    command = re.search(r"to continue: python train\.py (--resume .*)", stopped.err)[1]
    told = good(tmp_path, command, small=False).out
    assert f"resume: from {stopped.folder / 'checkpoints'}/step-{at}\n" in told
    assert [row["step"] for row in metrics(whole)] == [1, 2, 3, 4]
    same_run(whole, stopped.folder)
    after = strict((newest(stopped.folder) / "trainer/progress.json").read_text())
    assert after["seconds"] > progress["seconds"] > 0  # of both starts


def test_a_second_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    def impatient(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "score", impatient)
    stopped = launch(tmp_path, BASE)
    assert stopped.status == 130 and not newest(stopped.folder)


def test_resuming_a_finished_run_says_so(done, tmp_path):
    before = digests(done), timeless(done)
    sentence = not_resumed(tmp_path)
    assert re.search("--steps 1: .*step-1 has 1 steps already.*--report", sentence)
    assert (digests(done), timeless(done)) == before


def test_a_torn_line_is_repaired_on_resume(tmp_path, monkeypatch):
    """A power failure cuts a line. The rest of it is no JSON."""
    whole = good(tmp_path / "whole", BASE).folder
    folder = interrupted(tmp_path / "torn", BASE, monkeypatch, 1).folder
    tails = {
        "metrics": '{"step": 2, "rew',
        "samples": '{"step": 1, "prompt": "a}',
        "evaluations": "\x00" * 40,
        "starts": '{"date": "2026-',
    }
    for name, tail in tails.items():
        path = folder / f"{name}.jsonl"
        path.write_text(path.read_text() + tail)
    resumed(tmp_path / "torn")
    same_run(whole, folder)
    assert len(metrics(folder, "starts")) == 2 and (folder / "report.html").exists()


def test_a_page_or_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch):
    """They come last: the checkpoint is there before."""

    def broken(*args):
        assert newest(tmp_path / "run")
        raise KeyError("date")

    Path("trackio.py").write_text(
        "def init(**settings):\n    pass\n\ndef log(row, step):\n    raise KeyError('date')\n"
    )
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(report, "write_report", broken)
    result = good(tmp_path, f"{BASE} --eval-every 1 --save-every 1 --track trackio")
    del sys.modules["trackio"]
    for name in ("report.html", "--track"):
        assert result.out.count(f"warning: {name} was not written: KeyError: 'date'\n") == 1
    assert newest(result.folder).name == "step-2"


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    """Its files are those of a run that was never killed, with one first evaluation."""
    flags, folder = f"{BASE} --eval-every 1 --steps 1", tmp_path / "killed/run"
    whole = good(tmp_path / "whole", flags).folder
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train.checkpoints, "save", None)
        launch(tmp_path / "killed", flags)
    assert metrics(folder) and not newest(folder)
    resumed(tmp_path / "killed")
    same_run(whole, folder)


# ---- changed files


CHANGED = [  # the text of config.json, or some fields of it, words of the sentence, other flags
    ("{", "config.json"),
    ("[1]", "config.json"),
    ({"lr": "fast"}, "config.json: TypeError"),
    ({"completions_per_update": 7}, "--completions-per-update 7"),
    ({"lr_schedule": "linear"}, "--steps: a resumed run keeps its own, 1"),
    ({}, "--model: a resumed run keeps its own, models/tiny", "--model models/moe"),
    ({}, "--algo: a resumed run keeps its own, gspo", "--algo grpo"),
    ({}, "--lora-rank: a resumed run keeps its own, 0", "--lora-rank 2"),
    ({}, "--task: a resumed run keeps its own, arithmetic", "--task calculator"),
    ({}, "--lr-schedule: a resumed run keeps its own,", "--lr-schedule cosine"),
    ({}, "--kl-coef: a resumed run keeps its own, 0.0", "--kl-coef 0.1"),
    ({}, "--stale-steps: a resumed run keeps its own, 1", "--stale-steps 2"),
    ({}, "--seed: a resumed run keeps its own, 0", "--seed 5"),  # other prompts
]


@pytest.mark.parametrize("change, words, flags", [(*case, "")[:3] for case in CHANGED])
def test_a_change_of_the_config_is_one_sentence_and_stays(change, words, flags, done, tmp_path):
    path = done / "config.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(change)
    assert words in not_resumed(tmp_path, f"--steps 2 {flags}")
    assert path.read_text() == change


def test_a_config_of_another_time_is_completed(done, tmp_path):
    """A flag that an older run lacks gets its default. A flag that is gone is dropped. Flags that
    come with the resume hold from then on, also those that are the default of a run, and others are
    kept, but for the place."""
    path = done / "config.json"
    config = json.loads(path.read_text()) | {"max_slots": 3, "temperature": 0.9}
    config |= {"epochs": 2, "eval_every": 3}
    del config["entropy_coef"], config["old_logprobs"]
    path.write_text(json.dumps(config))
    Path("runs").symlink_to(tmp_path)  # as if the folder had been moved
    flags = "--resume --name run --steps 2 --lr 1e-4 --model models/tiny --epochs 1"
    assert train.main(flags.split()) == 0
    completed = strict(path.read_text())
    assert completed["old_logprobs"] == "trainer" and "max_slots" not in completed
    assert [completed[name] for name in ("steps", "lr", "temperature")] == [2, 1e-4, 0.9]
    assert [completed[name] for name in ("epochs", "eval_every")] == [1, 3]
    assert completed["runs"] == "runs" and metrics(done)[-1]["lr"] == pytest.approx(1e-4)


class Counting(torch.optim.SGD):
    """The state of a parameter is an integer, a float and nothing."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                steps, size = state.get("steps", 0) + 1, state.get("size", 1.0) + 1 / 3
                state |= {"steps": steps, "size": size, "nothing": None}
                parameter.grad /= steps * size
        super().step()


OPTIMIZERS = {
    "sgd with momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,  # a row and a column for a matrix
    "numbers": Counting,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_optimizer_continues_to_the_same_bits(kind, tmp_path, monkeypatch):
    """Whatever it keeps of a parameter. The policy's weights are in its own files alone."""
    make_optimizer = train.make_optimizer

    def another(config, models):
        names = ("params", "lr", "initial_lr", "norm_metric")
        groups = make_optimizer(config, models).param_groups
        return OPTIMIZERS[kind]([{name: group[name] for name in names} for group in groups], lr=1.0)

    monkeypatch.setattr(train, "make_optimizer", another)
    folder = good(tmp_path / "one", f"{BASE} --algo ppo --save-every 1").folder
    state = load_file(newest(folder) / "trainer/state.safetensors")
    kept = {name.split()[1].split(".")[0] for name in state if name.startswith("weights ")}
    assert kept == {"critic"}
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(newest(folder))
    resumed(tmp_path / "one")
    same_run(whole, folder)


# ---- kill -9, a full disk


def mortal_run(arguments, die_at, limit):
    """Run train.main. Die at its die_at-th access to the disk, or limit the size of files."""
    accesses = itertools.count(1)

    def mortal(function):
        def call(*args, **kwargs):
            if next(accesses) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("sync", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, mortal(getattr(os, name)))
    safetensors.torch.save_file = mortal(save_file)
    json.dumps = mortal(json.dumps)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return train.main(arguments)


def saved_steps(folder) -> int:
    found = folders.checkpoints(folder)
    return int(found[-1].name[5:]) if found else 0


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_and_resumed_many_times_is_the_run_that_was_not(kills, tmp_path):
    """SIGKILL comes at random moments, half of them between two disk accesses of a checkpoint. An
    early kill is in the start, a later one while an old checkpoint is deleted."""
    rng, log = random.Random(0), tmp_path / "log"
    runs, folder = tmp_path / "killed", tmp_path / "killed/run"
    saved = 0
    for kill in range(kills):
        die_at = None  # but at a moment of the clock
        if kill % 2 == 0:
            die_at = rng.randrange(5, 110) if kill >= 4 else (2, 60)[kill // 2]
        resume = folders.is_run(folder)  # else it died too early, and starts over
        flags = "--resume --name run" if resume else f"{BASE} --steps 1000 --save-every 1"
        arguments = command_line(runs, flags, small=not resume)
        process = fork(mortal_run, arguments, die_at, None, out=log)
        give_up = time.monotonic() + 60  # a step takes seconds on a busy machine
        while process.is_alive() and time.monotonic() < give_up:
            if not die_at and saved_steps(folder) > saved:
                process.join(rng.uniform(0, 0.5))
                break
            time.sleep(0.02)
        assert process.exitcode in (None, -signal.SIGKILL), log.read_text()[-2000:]
        process.kill()
        process.join()
        assert saved_steps(folder) >= saved  # only steps since the last checkpoint are lost
        saved = saved_steps(folder)
    assert saved > 0, log.read_text()[-2000:]
    resumed(runs, f"--steps {saved + 2}")
    assert [row["step"] for row in metrics(folder)] == list(range(1, saved + 3))
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {f"step-{saved + 1}", f"step-{saved + 2}"}  # and nothing half deleted
    same_run(good(tmp_path / "whole", f"{BASE} --steps {saved + 2}").folder, folder)


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_of_it(monkeypatch, tmp_path):
    """The remains are no checkpoint, and the next save deletes them."""
    rmtree, folder = shutil.rmtree, tmp_path / "run"

    def killed(path, *args, **kwargs):
        if any(path.rglob("*.safetensors")):
            next(path.rglob("config.json")).unlink()
            raise SystemExit(9)
        rmtree(path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", killed)
        launch(tmp_path, f"{BASE} --save-every 1 --steps 4")
    assert [path.name for path in folders.checkpoints(folder)] == ["step-2", "step-3"]
    resumed(tmp_path)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"step-3", "step-4"}


@pytest.mark.parametrize("limit", [100_000, 3_000])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(limit, done, tmp_path):
    """A limit of file sizes replaces the full disk. First the weights do not fit, then not even the
    rows."""
    log, before, kept = tmp_path / "log", newest(done), digests(done)
    flags = "--resume --name run --steps 9 --save-every 1"
    process = fork(mortal_run, command_line(tmp_path, flags, small=False), None, limit, out=log)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == 2, text
    [error] = [line for line in text.splitlines() if "error: " in line]
    assert "Traceback" not in text and str(done) in error, text
    assert newest(done) == before and digests(done) == kept
    resumed(tmp_path, "--steps 3")
    assert [row["step"] for row in metrics(done)] == [1, 2, 3]
    assert not list(done.rglob("unfinished*"))


def test_a_trained_model_that_no_checkpoint_keeps_is_found_when_it_is_saved(tmp_path, monkeypatch):
    """A fork's second policy: its weights would be missing at --resume, much later."""
    monkeypatch.setattr(train.checkpoints, "parameters_of", lambda *models: ({}, set()))
    with pytest.raises(AssertionError, match="parameters_of"):
        launch(tmp_path, f"{BASE} --steps 1")
