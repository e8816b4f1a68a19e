"""Runs that were stopped or killed continue as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
import time

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

import train
from forks import fork
from support import folders
from support.extras import report
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
    """A folder of runs with one run of one step."""
    here = tmp_path_factory.mktemp("one")
    furnish(here, models)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        good(here / "runs", f"{BASE} --steps 1")
    return here / "runs"


@pytest.fixture
def done(one_step, tmp_path):
    """A copy of that run's folder."""
    return shutil.copytree(one_step / "run", tmp_path / "run")


def interrupted(runs, flags, monkeypatch, at, number=signal.SIGTERM):
    """Run until a signal comes in the report of step `at`."""
    write_rows = train.write_rows

    def stopping(run, batch, row):
        write_rows(run, batch, row)
        if row["step"] == at:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train, "write_rows", stopping)
        return launch(runs, flags)


def resumed(runs, flags=""):
    return good(runs, f"--resume --name run {flags}", small=False)


def not_resumed(runs, flags="") -> str:
    return refused(runs, f"--resume --name run {flags}", small=False)


RESUMED = {  # flags, the step in which the signal comes
    "gspo": ("--eval-every 2 --save-every 2 --data rows.jsonl", 3),
    "ppo": ("--algo ppo --kl-coef 0.1 --ref-every 2", 3),
    "dapo": ("--algo dapo --reward pay.py:by_prompt --warmup-steps 4 --epochs 2", 2),
    "stale-bf16": ("--stale-steps 3 --dtype bfloat16", 2),
    "moe": ("--model models/moe --algo grpo --routing-replay", 1),
    "lora": ("--lora-rank 2 --kl-coef 0.1 --reward pay.py:even+-2*pay.py:steps", 2),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resuming_changes_nothing(case, tmp_path, monkeypatch):
    """A run that was stopped and resumed is bit-identical: rows of every step, all tensors."""
    flags, at = RESUMED[case]
    rows = [{"prompt": f"{i}+{j}=", "answer": "0"} for i in range(3) for j in range(5)]
    write_rows("rows.jsonl", rows)
    flags = f"{BASE} --steps 4 {flags}"
    whole = good(tmp_path / "whole", flags).folder
    stopped = interrupted(tmp_path / "stopped", flags, monkeypatch, at)
    assert stopped.status == 130
    assert [row["step"] for row in metrics(stopped.folder)] == list(range(1, at + 1))
    drawn = sum(row["prompts_drawn"] for row in metrics(stopped.folder))
    assert (drawn > 4 * at) == (case == "dapo")  # it refilled, so that it is further in its prompts
    folder = resumed(tmp_path / "stopped").folder
    assert [row["step"] for row in metrics(whole)] == [1, 2, 3, 4]
    same_run(whole, folder)


def test_a_signal_saves_and_says_how_to_go_on(tmp_path, monkeypatch):
    stopped = interrupted(tmp_path, f"{BASE} --steps 3", monkeypatch, 2, signal.SIGINT)
    assert stopped.status == 130 and stopped.err.count("\n") == 1
    assert "stopping after this step, with a checkpoint" in stopped.out
    command = re.search(r"to continue: python train\.py (--resume .*)", stopped.err)[1]
    told = good(tmp_path, command, small=False).out  # word for word, wherever the runs are
    assert f"resume: from {stopped.folder / 'checkpoints/step-2'}\n" in told
    assert [row["step"] for row in metrics(stopped.folder)] == [1, 2, 3]


def test_a_second_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    freeze = train.freeze

    def impatient(run, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        freeze(run, batch)

    monkeypatch.setattr(train, "freeze", impatient)
    stopped = launch(tmp_path, BASE)
    assert stopped.status == 130 and not newest(stopped.folder)


def test_resuming_a_finished_run_says_so(done, tmp_path):
    before = digests(done), timeless(done)
    sentence = not_resumed(tmp_path)
    assert "--steps" in sentence and "step-1" in sentence
    assert (digests(done), timeless(done)) == before


def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    """The checkpoint has everything. A person may have moved the other files."""
    folder = good(tmp_path / "one", BASE).folder
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    resumed(tmp_path / "one", "--steps 4")
    whole = good(tmp_path / "other", f"{BASE} --steps 4").folder
    assert timeless(folder) == timeless(whole)[2:]
    assert digests(folder) == digests(whole)


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--model models/moe", "a resumed run keeps its own, models/tiny"),
        ("--algo grpo", "a resumed run keeps its own, gspo"),
        ("--lora-rank 2", "a resumed run keeps its own, 0"),
        ("--task calculator", "a resumed run keeps its own, arithmetic"),
        ("--lr-schedule cosine", "a resumed run keeps its own, constant"),
        ("--kl-coef 0.1", "a resumed run keeps its own, 0.0"),
        ("--stale-steps 2", "a resumed run keeps its own, 1"),
    ],
)
def test_a_resumed_run_keeps_what_its_weights_are(flag, words, done, tmp_path):
    sentence = not_resumed(tmp_path, f"--steps 2 {flag}")
    assert flag.split()[0] in sentence and words in sentence


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
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write(tail)
    resumed(tmp_path / "torn")
    same_run(whole, folder)
    starts = [strict(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2 and (folder / "report.html").exists()


def test_a_page_or_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch):
    """They come last: the checkpoint is there before."""
    claim_folder = train.claim_folder

    def with_tracker(run):
        claim_folder(run)
        run.tracker = broken

    def broken(*args):
        assert newest(tmp_path / "run")
        raise KeyError("date")

    monkeypatch.setattr(train, "claim_folder", with_tracker)
    monkeypatch.setattr(report, "write_report", broken)
    result = good(tmp_path, f"{BASE} --eval-every 1 --save-every 1")
    for name in ("report.html", "--track"):
        assert result.out.count(f"warning: {name} was not written: KeyError: 'date'\n") == 1
    assert newest(result.folder).name == "step-2"


@pytest.mark.parametrize("garbage", ["what is this\n", '{"reward": 1}\n'])
def test_garbage_in_the_metrics_is_one_sentence(garbage, done, tmp_path):
    path = done / "metrics.jsonl"
    path.write_text(garbage + path.read_text())
    before = path.read_bytes()
    assert f"{path}, line 1" in not_resumed(tmp_path, "--steps 3")
    assert path.read_bytes() == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    """Its files are those of a run that was never killed, with one first evaluation."""
    flags = f"{BASE} --eval-every 1 --steps 1"
    whole = good(tmp_path / "whole", flags).folder

    def broken_off(run):
        raise SystemExit(3)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train, "save", broken_off)
        launch(tmp_path / "killed", flags)
    folder = tmp_path / "killed/run"
    assert metrics(folder) and not newest(folder)
    resumed(tmp_path / "killed")
    same_run(whole, folder)


def test_resume_takes_the_newest_whole_checkpoint(tmp_path):
    """A checkpoint that lost files is skipped."""
    folder = good(tmp_path / "one", f"{BASE} --save-every 1").folder
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "checkpoints/step-2/trainer")
    resumed(tmp_path / "one")
    same_run(whole, folder)


# ---- changed files


@pytest.mark.parametrize(
    "text, word",
    [
        ("{", "config.json"),
        ("[1]", "config.json"),
        ({"lr": "fast"}, "--lr"),
        ({"group_size": None}, "--group-size"),
        ({"algo": "gsop"}, "--algo"),
        ({"completions_per_update": 7}, "--completions-per-update 7"),
        ({"lr_schedule": "linear"}, "--steps: a resumed run keeps its own, 1"),
    ],
)
def test_a_config_that_was_edited_passes_the_checks_of_flags(text, word, done, tmp_path):
    path = done / "config.json"
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    assert word in not_resumed(tmp_path, "--steps 2")
    assert path.read_text() == text


def test_a_config_of_another_time_is_completed(done, tmp_path):
    """A flag that an older run lacks gets its default. A flag that is gone is dropped. Flags that
    come with the resume hold from then on, and others are kept."""
    path = done / "config.json"
    config = json.loads(path.read_text()) | {"max_slots": 3, "temperature": 0.9}
    del config["entropy_coef"], config["old_logprobs"]
    path.write_text(json.dumps(config))
    resumed(tmp_path, "--steps 2 --lr 1e-4 --model models/tiny")
    completed = strict(path.read_text())
    assert completed["old_logprobs"] == "trainer" and "max_slots" not in completed
    assert [completed[name] for name in ("steps", "lr", "temperature")] == [2, 1e-4, 0.9]
    assert metrics(done)[-1]["lr"] == pytest.approx(1e-4)


STATES = {  # flags, the change of the state
    "moments of another shape": (
        "",
        # that would broadcast
        lambda state: {key: state[key][:1] if state[key].dim() else state[key] for key in state},
    ),
    "a moment is missing": ("", lambda state: dict(list(state.items())[1:])),
    "a moment of nothing": ("", lambda state: state | {"exp_avg policy.nothing": torch.zeros(2)}),
    "no critic": (
        "--algo ppo",
        lambda state: {key: state[key] for key in state if not key.startswith("weights critic")},
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_not_what_would_be_written_is_refused(case, done, tmp_path):
    """In one sentence that names the file. Half a state would train without an error."""
    flags, change = STATES[case]
    if flags:
        shutil.rmtree(done)
        good(tmp_path, f"{BASE} --steps 1 {flags}")
    path = newest(done) / "trainer/state.safetensors"
    save_file(change(load_file(path)), path)
    assert str(path) in not_resumed(tmp_path, "--steps 2")


@pytest.mark.parametrize("name", ["trainer/state.safetensors", "trainer/progress.json"])
@pytest.mark.parametrize("content", [b"", b"[]"])
def test_a_torn_file_of_a_checkpoint_is_one_sentence_with_its_name(name, content, done, tmp_path):
    path = newest(done) / name
    path.write_bytes(content)
    assert path.name in not_resumed(tmp_path, "--steps 2")


# ---- kill -9, a full disk


def mortal_run(arguments, die_at, limit):
    """Run train.main. Die at its die_at-th access to the disk, or limit the size of files."""
    import resource  # unix only

    left = [die_at or -1]

    def mortal(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
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


def forked(runs, flags, log, die_at=None, limit=None, seconds=60, small=True):
    """Start a run in a process of its own. Wait for its end, at most so many seconds."""
    arguments = command_line(runs, flags, small=small)
    process = fork(mortal_run, arguments, die_at, limit, out=log)
    process.join(seconds)
    return process


def saved_steps(folder) -> int:
    found = folders.checkpoints(folder)
    return int(found[-1].name[5:]) if found else 0


def wait_for_more_steps(process, folder, saved) -> None:
    """Wait until a run has a newer checkpoint, which takes seconds on a busy machine."""
    give_up = time.monotonic() + 60
    while saved_steps(folder) <= saved and process.is_alive() and time.monotonic() < give_up:
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")
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
        process = forked(runs, flags, log, die_at, seconds=60 if die_at else 0, small=not resume)
        if not die_at:
            wait_for_more_steps(process, folder, saved)
            process.join(rng.uniform(0, 0.5))
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


@pytest.mark.skipif(os.name != "posix", reason="needs fork and limits")
@pytest.mark.parametrize("limit", [100_000, 3_000])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(limit, done, tmp_path):
    """A limit of file sizes replaces the full disk. First the weights do not fit, then not even the
    rows."""
    log, before, kept = tmp_path / "log", newest(done), digests(done)
    flags = "--resume --name run --steps 9 --save-every 1"
    process = forked(tmp_path, flags, log, limit=limit, small=False)
    text = log.read_text()
    assert process.exitcode == 2, text
    errors = [line for line in text.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert str(done) in errors[0]
    assert newest(done) == before and digests(done) == kept
    resumed(tmp_path, "--steps 3")
    assert [row["step"] for row in metrics(done)] == [1, 2, 3]
    assert not list(done.rglob("unfinished*"))


def test_a_checkpoint_has_the_weights_of_a_sampler_only_with_stale_steps(done):
    names = load_file(newest(done) / "trainer/state.safetensors")
    assert names and not any("old_policy" in name for name in names)
