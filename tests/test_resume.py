"""Runs that were stopped or killed continue as if nothing had happened."""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

import train
from forks import fork
from support import report, run_folder
from support.errors import UserError
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
    watched,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("place")
FORKED = multiprocessing.get_context("fork")


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

    def stop(steps_before, result):
        if steps_before == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        watched(patch, train.console.Log, "end_step", stop)
        return launch(runs, flags)


def resumed(runs, flags=""):
    return good(runs, f"--resume --name run {flags}", small=False)


def not_resumed(runs, flags="") -> str:
    return refused(runs, f"--resume --name run {flags}", small=False)


RESUMED = {  # flags, the step in which the signal comes
    "gspo": ("--eval-every 2 --save-every 2 --data rows.jsonl --stop 2; --stop #", 3),
    "ppo": ("--algo ppo --kl-coef 0.1 --ref-every 2 --stale-steps 3 --dtype bfloat16", 3),
    "dapo": ("--algo dapo --reward pay.py:by_prompt --warmup-steps 4 --epochs 2", 2),
    "lora": ("--lora-rank 2 --kl-coef 0.1 --ref-every 2 --stale-steps 2", 1),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resuming_changes_nothing(case, tmp_path, monkeypatch):
    """Rows of every step, all tensors. A power failure cuts off a line, a user's own file stays."""
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
    tails = {"metrics": '{"step": 2, "re', "samples": '{"step": 1, "prompt": "a}', "starts": '{"d'}
    for name, tail in (tails | {"evaluations": "\x00" * 40, "mine": '{"step": 9}\n{"'}).items():
        with open(stopped.folder / f"{name}.jsonl", "a") as file:
            file.write(tail)
    command = re.search(r"to continue: python train\.py (--resume .*)", stopped.err)[1]
    told = good(tmp_path, command, small=False).out
    assert f"resume: from {stopped.folder / 'checkpoints'}/step-{at}\n" in told
    assert (stopped.folder / "mine.jsonl").read_text() == '{"step": 9}\n{"'
    assert len(metrics(stopped.folder, "starts")) == 2
    assert [row["step"] for row in metrics(whole)] == [1, 2, 3, 4]
    same_run(whole, stopped.folder)
    after = strict((newest(stopped.folder) / "trainer/progress.json").read_text())
    assert after["seconds"] > progress["seconds"] > 0  # of both starts


def test_a_process_of_a_reward_ends_by_a_signal_and_has_no_lock(tmp_path, monkeypatch):
    """It inherits the run's handlers. The first Ctrl-C, which a terminal sends to all, does not end
    it, as the step needs it. The run's lock is not inherited by a process that outlives it."""
    reader, writer = multiprocessing.Pipe()

    def work():
        try:
            run_folder.lock(tmp_path / "run")
        except UserError as error:
            writer.send(str(error))
        time.sleep(60)

    def fork_one(_, result):
        child.start()
        os.kill(child.pid, signal.SIGINT)
        return result

    child = FORKED.Process(target=work)
    watched(monkeypatch, train, "score", fork_one)
    folder = good(tmp_path, f"{BASE} --steps 1").folder
    assert reader.poll(9), "it has got the lock of the run"
    assert f"process {os.getpid()} is already working in {folder}" in reader.recv()
    run_folder.lock(folder).close()
    child.join(0.1)
    assert child.is_alive()
    child.terminate()
    child.join(9)
    assert child.exitcode == -signal.SIGTERM


def test_a_second_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    def impatient(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "score", impatient)
    stopped = launch(tmp_path, BASE)
    assert stopped.status == 130 and not newest(stopped.folder)


def test_a_page_or_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch):
    """They come last: the checkpoint is there before."""

    def broken(*args, **kwargs):
        assert newest(tmp_path / "run")
        raise KeyError("date")

    module = SimpleNamespace(__spec__="a module", init=lambda **settings: None, log=broken)
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr(report, "write_report", broken)
    result = good(tmp_path, f"{BASE} --eval-every 1 --save-every 1 --track trackio")
    for name in ("report.html", "--track"):
        assert result.out.count(f"warning: {name} failed: KeyError: 'date'\n") == 1
    assert newest(result.folder).name == "step-2"


@pytest.mark.parametrize("resume", [False, True])
def test_what_another_process_has_just_trained_is_left_alone(resume, done, tmp_path, monkeypatch):
    """Both start with one name. The other runs to its end while this one loads and evaluates."""
    runs = tmp_path if resume else tmp_path / "new"
    flags = "--resume --name run --steps 2" if resume else BASE
    open_output = train.open_output

    def late(*arguments):
        monkeypatch.setattr(train, "open_output", open_output)
        good(runs, flags, small=not resume)
        return open_output(*arguments)

    monkeypatch.setattr(train, "open_output", late)
    assert "--name" in refused(runs, f"{flags} --lr 0.5", small=not resume)
    assert newest(runs / "run").name == "step-2" and len(metrics(runs / "run")) == 2
    assert strict((runs / "run/config.json").read_text())["lr"] == 1e-3


# ---- changed files


def changed(file, change):
    """A function that changes the bytes of a run's file."""

    def apply(run):
        content = (run / file).read_bytes()
        assert change(content) != content
        (run / file).write_bytes(change(content))

    return apply


def config(**flags):
    return changed("config.json", lambda text: json.dumps(json.loads(text) | flags).encode())


def flattened(content):
    tensors = {key: each.flatten() for key, each in safetensors.torch.load(content).items()}
    return safetensors.torch.save(tensors, {"numbers": "{}"})


def no_disk(run):
    (run / "checkpoints").rename(run / "elsewhere")
    (run / "checkpoints").symlink_to("not-mounted")


NEWEST = "checkpoints/step-1"
EMPTY = safetensors.torch.save({}, {"numbers": "{}"})  # without moments
PROGRESS = f"{NEWEST}/trainer/progress.json"
STATE = f"{NEWEST}/trainer/state.safetensors"
DAMAGED = f"run/{NEWEST} is damaged; move it away to resume from "
UNFIT = [  # what happens to a run's folder, words of the sentence, flags
    (changed("config.json", lambda text: b"[1]"), "config.json"),
    (config(lr="fast"), "--lr fast: expected float"),
    (config(epochs=None), "--epochs None: expected int"),
    (config(overlong_filter=1), "--overlong-filter 1: expected bool"),
    (config(stop=[1]), "--stop [1]: expected non-empty strings"),
    (config(completions_per_update=7), "--completions-per-update 7"),
    (config(lr_schedule="linear"), "--steps: a resumed run must keep 1"),
    (lambda run: shutil.rmtree(run / "checkpoints"), "run/checkpoints has no checkpoint"),
    (no_disk, "run/checkpoints has no checkpoint"),
    (changed(PROGRESS, lambda text: text[:40]), DAMAGED),
    (changed(PROGRESS, lambda text: text.replace(b'drawn": 4', b'drawn": "4"')), DAMAGED),
    (changed(PROGRESS, lambda text: text.replace(b"before", b"after")), DAMAGED),
    (changed(STATE, lambda content: content[:-9]), DAMAGED),
    (changed(f"{NEWEST}/model.safetensors", lambda content: content[:-9]), DAMAGED),
    (changed(STATE, lambda content: EMPTY), DAMAGED),
    (changed(STATE, flattened), DAMAGED),
    (None, "is already at step 1; pass a larger --steps; for its report", "--steps 1"),
]
for flag in ("--model models/moe", "--lora-rank 2", "--lr-schedule cosine", "--kl-coef 0.1"):
    UNFIT.append((None, f"{flag.split()[0]}: a resumed run must keep ", flag))


@pytest.mark.parametrize("happens, words, flags", [(*case, "")[:3] for case in UNFIT])
def test_a_run_that_cannot_be_resumed_is_one_sentence(
    happens, words, flags, done, tmp_path, monkeypatch
):
    """Before a model loads, and all files stay. It names the checkpoint before a damaged one."""
    earlier = shutil.copytree(done / NEWEST, done / "checkpoints/step-0")
    changed("trainer/progress.json", lambda text: text.replace(b'"step": 1', b'"step": 0'))(earlier)
    if happens:
        happens(done)
    monkeypatch.setattr(train, "load_model", None)
    files = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    words += str(earlier) * (words == DAMAGED)
    assert words in not_resumed(tmp_path, f"--steps 2 {flags}")
    assert files == {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}


def test_a_resume_with_other_rows_or_evaluations_says_so(tmp_path):
    """Where the first evaluation is not like those to come, today's policy is evaluated first."""
    rows = [{"prompt": f"{i}+1=", "answer": "0"} for i in range(15)]
    write_rows("rows.jsonl", rows)
    write_rows("held-out.jsonl", rows[::2])
    good(tmp_path, f"{BASE} --steps 1 --data rows.jsonl --eval-data held-out.jsonl")
    changes = ("", "--reward pay.py:never", "--eval-data rows.jsonl", "rows")
    for steps, change in enumerate(changes, 2):
        if change == "rows":
            write_rows("rows.jsonl", [*rows, rows[0]])
        said = resumed(tmp_path, f"--steps {steps} {change.removeprefix('rows')}").out
        start = metrics(tmp_path / "run", "starts")[-1]
        assert ("eval_solved" in start or "eval_reward" in start) == bool(change)
        assert ("first evaluation is repeated" in said) == bool(change)
        warning = "warning: --data rows.jsonl has 16 rows .*until now it had 15 rows"
        assert len(re.findall(warning, said)) == (change == "rows")


def test_a_config_of_another_time_is_completed(done, tmp_path):
    """Flags given with --resume hold from then on, even where they equal a default."""
    path, progress = done / "config.json", newest(done) / "trainer/progress.json"
    changes = {"max_slots": 3, "temperature": 0.9, "epochs": 2, "eval_every": 3}
    older = json.loads(path.read_text()) | changes
    del older["entropy_coef"], older["old_logprobs"]
    path.write_text(json.dumps(older))
    older = strict(progress.read_text()) | {"shaping": ["even"]}
    del older["seal"], older["evaluation"], older["data"]
    progress.write_text(json.dumps(older))
    Path("runs").symlink_to(tmp_path)  # as if the folder had been moved
    flags = "--resume --name run --steps 2 --lr 1e-4 --model models/tiny --epochs 1"
    assert train.main(flags.split()) == 0
    completed = strict(path.read_text())
    expected = {"old_logprobs": "trainer", "steps": 2, "lr": 1e-4, "temperature": 0.9}
    expected |= {"epochs": 1, "eval_every": 3, "runs": "runs"}
    assert completed | expected == completed and "max_slots" not in completed
    assert metrics(done)[-1]["lr"] == pytest.approx(1e-4)


class Counting(torch.optim.SGD):
    """Beside the momentum, the state of a parameter is an integer, a float, nothing and a row."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                steps, size = state.get("steps", 0) + 1, state.get("size", 1.0) + 1 / 3
                row = state.get("row", 0.0) + parameter.grad.mean(-1)
                state |= {"steps": steps, "size": size, "nothing": None, "row": row}
                parameter.grad /= steps * (size + float(row.norm()))
        super().step()


def test_another_optimizer_continues_to_the_same_bits(tmp_path, monkeypatch):
    """Whatever it keeps of a parameter. The policy's weights are in its own files alone."""
    make_optimizer = train.make_optimizer

    def another(config, models):
        names = ("params", "lr", "initial_lr", "norm_metric")
        groups = make_optimizer(config, models).param_groups
        own = [{name: group[name] for name in names} for group in groups]
        return Counting(own, lr=1.0, momentum=0.9)

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
    found = newest(folder)
    return int(found.name[5:]) if found else 0


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_and_resumed_many_times_is_the_run_that_was_not(kills, tmp_path):
    """SIGKILL comes at random moments, half of them between two disk accesses of a checkpoint."""
    rng, log = random.Random(0), tmp_path / "log"
    runs, folder = tmp_path / "killed", tmp_path / "killed/run"
    saved = 0
    for kill in range(kills):
        die_at = None  # but at a moment of the clock
        if kill % 2 == 0:
            die_at = rng.randrange(5, 110) if kill else 70
        resume = saved > 0
        if not resume:  # it died too early, and starts over
            shutil.rmtree(folder, ignore_errors=True)
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


def test_the_newest_two_checkpoints_are_kept_beside_copies_and_after_a_kill(monkeypatch, tmp_path):
    """What a kill leaves of an old one that was being deleted is none, nor are copies."""
    rmtree, saved = shutil.rmtree, tmp_path / "run/checkpoints"

    def killed(path, *args, **kwargs):
        if any(path.rglob("*.safetensors")):
            next(path.rglob("config.json")).unlink()
            raise SystemExit(9)
        rmtree(path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", killed)
        launch(tmp_path, f"{BASE} --save-every 1 --steps 4")
    copies = {"step-1-good", "step-99x", "step-1000", "best"}
    for name in copies:
        shutil.copytree(saved / "step-2", saved / name)
    (saved / "step-99x/trainer/progress.json").write_text("damaged")
    assert [path.name for path in run_folder.checkpoints(tmp_path / "run")] == ["step-2", "step-3"]
    resumed(tmp_path)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert {path.name for path in saved.iterdir()} == {"step-3", "step-4"} | copies


@pytest.mark.parametrize("limit", [100_000, 3_000])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(limit, done, tmp_path):
    """A limit of file sizes, which the weights, then even the rows do not fit."""
    log, before, kept = tmp_path / "log", newest(done), digests(done)
    flags = "--resume --name run --steps 9 --save-every 1"
    process = fork(mortal_run, command_line(tmp_path, flags, small=False), None, limit, out=log)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == 2, text
    [error] = [line for line in text.splitlines() if "error: " in line]
    assert "Traceback" not in text, text
    assert f"; to continue: python train.py --resume --name run --runs {tmp_path}" in error
    assert newest(done) == before and digests(done) == kept
    resumed(tmp_path, "--steps 3")
    assert [row["step"] for row in metrics(done)] == [1, 2, 3]
    assert not list(done.rglob("unfinished*"))


def test_a_trained_model_that_no_checkpoint_keeps_is_found_when_it_is_saved(tmp_path, monkeypatch):
    """A fork's second policy: its weights would be missing at --resume, much later."""
    monkeypatch.setattr(run_folder, "parameters_of", lambda *models: ({}, set()))
    with pytest.raises(AssertionError, match="parameters_of"):
        launch(tmp_path, f"{BASE} --steps 1")
