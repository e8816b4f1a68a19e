"""Runs that were stopped, killed or broken off go on as if they had not been."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from tools import (
    BASE,
    ROOT,
    command_line,
    digests,
    good,
    launch,
    metrics,
    newest,
    refused,
    same_run,
    timeless,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("place")

# ------------------------------------------------------------------------------ resuming


def interrupted(runs, flags, monkeypatch, at, number=signal.SIGTERM):
    """The run, stopped by a signal that comes while step `at` is reported."""
    report = train.report

    def stopping(run, batch, row):
        report(run, batch, row)
        if row["step"] == at:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train, "report", stopping)
        return launch(runs, flags)


RESUMED = {
    "gspo": ("--eval-every 2 --save-every 2", 3),
    "warm-up": ("--warmup-steps 4 --epochs 2", 1),
    "grpo": ("--algo grpo --kl-coef 0.1 --ref-every 2", 3),
    "ppo": ("--algo ppo --kl-coef 0.1", 2),
    "dapo": ("--algo dapo --reward pay.py:by_prompt --max-refills 1", 2),
    "stale": ("--stale-steps 2", 3),
    "stale-bf16": ("--stale-steps 3 --dtype bfloat16", 2),
    "data": ("--data rows.jsonl", 2),
    "moe": ("--model models/moe --algo grpo --routing-replay", 1),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resuming_changes_nothing(case, tmp_path, monkeypatch):
    """Interrupted and resumed: the rows of every step and all final tensors are the same bits."""
    flags, at = RESUMED[case]
    write_rows(
        Path("rows.jsonl"),
        [{"prompt": f"{i}+{j}=", "answer": "0"} for i in range(3) for j in range(5)],
    )
    flags = f"{BASE} --steps 4 {flags}"
    whole = good(tmp_path / "whole", flags)
    stopped = interrupted(tmp_path / "stopped", flags, monkeypatch, at)
    assert stopped.status == 130
    assert [row["step"] for row in metrics(stopped.folder)] == list(range(1, at + 1))
    resumed = good(tmp_path / "stopped", "--resume --name run", small=False)
    assert [row["step"] for row in metrics(whole.folder)] == [1, 2, 3, 4]
    same_run(whole.folder, resumed.folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(number, tmp_path, monkeypatch):
    stopped = interrupted(tmp_path, f"{BASE} --steps 4", monkeypatch, 2, number)
    assert stopped.status == 130
    assert stopped.err.splitlines()[0] == "stopping after this step, with a checkpoint"
    assert stopped.err.count("\n") == 2
    assert stopped.err.splitlines()[1].startswith("stopped; to go on from")
    assert str(stopped.folder / "checkpoints" / "step-2") in stopped.err
    command = re.search(r": python train\.py (--resume .*)", stopped.err)[1]
    resumed = good(tmp_path, command, small=False)  # word for word, wherever the runs are
    assert f"resume: from {stopped.folder / 'checkpoints/step-2'}\n" in resumed.out
    assert [row["step"] for row in metrics(stopped.folder)] == [1, 2, 3, 4]


def test_a_stopped_run_leaves_a_page_with_all_of_its_steps(tmp_path, monkeypatch):
    """Not those to its last evaluation alone, which was before the first step."""
    folder = interrupted(tmp_path, f"{BASE} --steps 9 --eval-every 0", monkeypatch, at=3).folder
    assert "step 3: " in (folder / "report.html").read_text()


def test_resuming_a_finished_run_says_so(tmp_path):
    folder = good(tmp_path, BASE).folder
    before = digests(folder), timeless(folder)
    sentence = refused(tmp_path, "--resume --name run", small=False)
    assert f"--steps 2: {folder} is at step 2" in sentence and "more steps" in sentence
    assert "--resume" not in sentence  # the command that was just given
    assert (digests(folder), timeless(folder)) == before


def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    folder = good(tmp_path / "one", BASE).folder
    good(tmp_path / "one", "--resume --name run --steps 4", small=False)
    whole = good(tmp_path / "other", f"{BASE} --steps 4").folder
    for row, expected in zip(timeless(folder), timeless(whole), strict=True):
        row.pop("eval_solved", None)  # the end of the shorter run was evaluated, too
        expected.pop("eval_solved", None)
        assert row == expected
    assert digests(folder) == digests(whole)


def test_resuming_with_other_flags_says_which(tmp_path):
    folder = good(tmp_path, f"{BASE} --max-new-tokens 6").folder
    result = good(
        tmp_path, "--resume --name run --steps 3 --lr 1e-4 --max-new-tokens 6", small=False
    )
    told = [line for line in result.out.splitlines() if line.startswith("resume:")]
    assert len(told) == 3  # max_new_tokens is what it was; the last one names the checkpoint
    assert any("lr" in line and "0.001" in line and "0.0001" in line for line in told)
    assert any("steps" in line and "2" in line and "3" in line for line in told)
    assert metrics(folder)[-1]["lr"] == pytest.approx(1e-4)
    assert json.loads((folder / "config.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    "before, after",
    [
        ("gspo", "ppo"),
        ("ppo", "gspo"),
        ("ppo --kl-coef 0.1", "gspo --kl-coef 0.1"),
    ],
)
def test_resuming_may_change_the_algorithm(before, after, tmp_path):
    """Critic and reference come and go: what a checkpoint has of them is used, the rest is left."""
    folder = good(tmp_path, f"{BASE} --algo {before} --steps 1").folder
    more = "" if "kl-coef" in after else " --kl-coef 0"
    good(tmp_path, f"--resume --name run --steps 2 --algo {after}{more}", small=False)
    assert [row["step"] for row in metrics(folder)] == [1, 2]
    assert metrics(folder)[1]["bad_updates"] == 0


@pytest.mark.parametrize("tail", ['{"step": 2, "rew', '{"step": 1, "prompt": "a}', "\x00" * 40])
def test_a_torn_line_is_repaired_on_resume(tail, tmp_path, monkeypatch):
    """Power fails in the middle of a line: what is left of it is no JSON, whatever it ends with."""
    whole = good(tmp_path / "whole", f"{BASE} --steps 3").folder
    folder = interrupted(tmp_path / "torn", f"{BASE} --steps 3", monkeypatch, 1).folder
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as file:
            file.write(tail)
    good(tmp_path / "torn", "--resume --name run", small=False)
    same_run(whole, folder)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    """Its files are those of one that was never killed: the first evaluation is there once."""
    flags = f"{BASE} --eval-every 1"
    whole = good(tmp_path / "whole", flags).folder
    with monkeypatch.context() as patch:
        patch.setattr(train, "save", broken_off)
        with pytest.raises(SystemExit):
            launch(tmp_path / "killed", flags)
    folder = tmp_path / "killed/run"
    assert metrics(folder) and not newest(folder)
    good(tmp_path / "killed", "--resume --name run", small=False)
    same_run(whole, folder)
    shown = [Path(run, "evaluations.jsonl").read_text() for run in (whole, folder)]
    assert shown[0] == shown[1]


def broken_off(run, step):
    raise SystemExit(3)


def test_resume_takes_the_newest_whole_checkpoint(tmp_path):
    """A checkpoint that lost files (a copy that broke off, say) is passed over."""
    folder = good(tmp_path / "one", f"{BASE} --steps 3 --save-every 1").folder
    whole = good(tmp_path / "other", f"{BASE} --steps 3").folder
    shutil.rmtree(folder / "checkpoints" / "step-3" / "trainer")
    good(tmp_path / "one", "--resume --name run", small=False)
    same_run(whole, folder)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_resuming_with_a_broken_config_is_one_sentence(text, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(tmp_path, "--resume --name run --steps 4", small=False)


# a server that has imported everything forks the runs that are killed: no seconds for imports
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "transformers.models.qwen3.modeling_qwen3"])


def forked(arguments, log, die_at, limit):
    """A run in a process of its own, which may die at its die_at-th touch of the disk."""
    import resource  # unix only

    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115, open until it dies
    left = [die_at or -1]

    def mortal(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, name in (
        (os, "sync"),
        (os, "rename"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
        (train.safetensors.torch, "save_file"),
        (json, "dumps"),
    ):
        setattr(module, name, mortal(getattr(module, name)))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    status = train.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def fork(runs, flags, log, die_at=None, limit=None, small=True):
    arguments = command_line(runs, flags, small=small)
    with pytest.MonkeyPatch.context() as patch:
        # the server reads it when it starts, with its first fork
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{Path(__file__).parent}")
        patch.setenv("OMP_NUM_THREADS", "1")
        process = FORKS.Process(target=forked, args=(arguments, str(log), die_at, limit))
        process.start()
    return process


def saved_steps(folder) -> int:
    return int(newest(folder).name[5:]) if newest(folder) else 0


def wait_for_more_steps(process, folder, saved) -> None:
    """Until a run has a checkpoint beyond `saved`; on a busy machine that takes seconds."""
    give_up = time.monotonic() + 60
    while saved_steps(folder) <= saved and process.is_alive() and time.monotonic() < give_up:
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_and_resumed_many_times_is_the_run_that_was_not(kills, tmp_path):
    """SIGKILL at random moments, half of them between two touches of the disk of a checkpoint."""
    rng, log = random.Random(0), tmp_path / "log"
    runs, folder = tmp_path / "killed", tmp_path / "killed" / "run"
    flags = f"{BASE} --steps 1000 --save-every 1"
    saved = 0
    for kill in range(kills):
        die_at = None  # but at a moment of the clock
        if kill % 2 == 0:
            die_at = rng.randrange(5, 110) if kill >= 8 else 1 + 4 * kill
        resume = (folder / "config.json").exists()  # else it died too early, and starts over
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        process = fork(
            runs, "--resume --name run" if resume else flags, log, die_at, small=not resume
        )
        if die_at:
            process.join(60)
        else:
            wait_for_more_steps(process, folder, saved)
            process.join(rng.uniform(0, 0.5))
        assert process.exitcode in (None, -signal.SIGKILL), log.read_text()[-2000:]
        process.kill()
        process.join()
        assert saved_steps(folder) >= saved  # only steps since the last checkpoint are lost
        saved = saved_steps(folder)
    assert saved > 0, log.read_text()[-2000:]
    process = fork(runs, f"--resume --name run --steps {saved + 2}", log, small=False)
    process.join(60)
    assert process.exitcode == 0, log.read_text()[-2000:]
    assert [row["step"] for row in metrics(folder)] == list(range(1, saved + 3))
    assert not list(folder.rglob("unfinished*"))
    process = fork(tmp_path / "whole", f"{BASE} --steps {saved + 2}", log)
    process.join(60)
    assert process.exitcode == 0, log.read_text()[-2000:]
    same_run(tmp_path / "whole" / "run", folder)


RESUMED_WRONGLY = {
    "ref-every-without-kl": (
        "--kl-coef 0.1 --ref-every 1",
        "--kl-coef 0",
        ["--ref-every", "--kl-coef"],
    ),
    "not-dividing": (
        "--completions-per-update 4",
        "--prompts-per-step 3 --group-size 3",
        ["--completions-per-update", "divisor"],
    ),
    "tis-of-the-sampler": ("--tis-cap 2", "--old-logprobs sampler", ["--tis-cap", "trainer"]),
    "out-of-range": ("--tis-cap 2 --tis-level completion", "--tis-cap 0", ["--tis-cap 0"]),
}


@pytest.mark.parametrize("case", RESUMED_WRONGLY)
def test_flags_of_a_run_and_those_of_its_resuming_must_fit(case, tmp_path):
    """What was right for the run, and is not with what --resume changes, is one sentence; the run
    goes on without it."""
    flags, changed, fragments = RESUMED_WRONGLY[case]
    good(tmp_path, f"{BASE} {flags} --steps 1")
    before = (tmp_path / "run" / "config.json").read_bytes()
    sentence = refused(tmp_path, f"--resume --name run --steps 2 {changed}", small=False)
    assert all(fragment in sentence for fragment in fragments)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    good(tmp_path, "--resume --name run --steps 2", small=False)


def test_a_device_of_a_run_that_is_not_here_is_one_sentence(tmp_path):
    if torch.backends.mps.is_available():
        pytest.skip("it is here")
    folder = good(tmp_path, f"{BASE} --steps 1").folder
    config = json.loads((folder / "config.json").read_text())
    config |= {"device": "mps", "given": [*config["given"], "device"]}
    (folder / "config.json").write_text(json.dumps(config))
    sentence = refused(tmp_path, "--resume --name run --steps 2", small=False)
    assert "--device mps" in sentence


def test_a_dropped_sampler_leaves_the_checkpoints(tmp_path):
    """--stale-steps keeps the sampler's weights; a resume without it drops them, and one that wants
    them again begins with the policy's."""
    good(tmp_path, f"{BASE} --stale-steps 3 --steps 2")
    good(tmp_path, "--resume --name run --steps 3 --stale-steps 1", small=False)
    good(tmp_path, "--resume --name run --steps 4 --stale-steps 3", small=False)
    names = [
        set(load_file(tmp_path / f"run/checkpoints/step-{n}/trainer/state.safetensors"))
        for n in (3, 4)
    ]
    assert not any("old_policy" in name for name in names[0])
    assert any("old_policy" in name for name in names[1])


@pytest.mark.skipif(os.name != "posix", reason="needs fork and limits")
@pytest.mark.parametrize("limit", [100_000, 3_000])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(limit, tmp_path):
    """A file-size limit stands for the disk: first the weights do not fit, then
    not even the rows."""
    log, runs = tmp_path / "log", tmp_path / "full"
    flags = f"{BASE} --steps 2 --save-every 1"
    folder = good(runs, flags).folder
    before, kept = newest(folder), digests(folder)
    process = fork(runs, "--resume --name run --steps 9", log, limit=limit, small=False)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == 2, text
    errors = [line for line in text.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert str(before) in errors[0]
    assert newest(folder) == before and digests(folder) == kept
    good(runs, "--resume --name run --steps 4", small=False)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert not list(folder.rglob("unfinished*"))
