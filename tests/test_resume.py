"""Runs that were stopped or killed continue as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

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


RESUMED = {
    "gspo": ("--eval-every 2 --save-every 2 --data rows.jsonl", 3),
    "grpo": ("--algo grpo --kl-coef 0.1 --ref-every 2", 3),
    "ppo": ("--algo ppo --kl-coef 0.1", 2),
    "dapo": ("--algo dapo --reward pay.py:by_prompt --warmup-steps 4 --epochs 2", 2),
    "stale-bf16": ("--stale-steps 3 --dtype bfloat16", 2),
    "moe": ("--model models/moe --algo grpo --routing-replay", 1),
    "lora": ("--lora-rank 2 --kl-coef 0.1 --reward pay.py:even+-2*pay.py:steps", 2),
    "opd": ("--algo opd --teacher models/moe", 2),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resuming_changes_nothing(case, tmp_path, monkeypatch):
    """A run that was stopped and resumed is bit-identical: rows of every step, all tensors."""
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
    drawn = sum(row["prompts_drawn"] for row in metrics(stopped.folder))
    assert (drawn > 4 * at) == (case == "dapo")  # it refilled, so that it is further in its prompts
    resumed = good(tmp_path / "stopped", "--resume --name run", small=False)
    assert [row["step"] for row in metrics(whole.folder)] == [1, 2, 3, 4]
    same_run(whole.folder, resumed.folder)
    shown = [Path(run.folder, "evaluations.jsonl").read_text() for run in (whole, resumed)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(number, tmp_path, monkeypatch):
    stopped = interrupted(tmp_path, f"{BASE} --steps 4", monkeypatch, 2, number)
    assert stopped.status == 130 and stopped.err.count("\n") == 1
    assert "stopping after this step, with a checkpoint" in stopped.out
    command = re.search(r": python train\.py (--resume .*)", stopped.err)[1]
    resumed = good(tmp_path, command, small=False)  # word for word, wherever the runs are
    assert f"resume: from {stopped.folder / 'checkpoints/step-2'}\n" in resumed.out
    assert [row["step"] for row in metrics(stopped.folder)] == [1, 2, 3, 4]


def test_a_second_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    freeze = train.freeze

    def impatient(run, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        freeze(run, batch)

    monkeypatch.setattr(train, "freeze", impatient)
    stopped = launch(tmp_path, BASE)
    assert stopped.status == 130 and not newest(stopped.folder)


def test_resuming_a_finished_run_says_so(tmp_path):
    folder = good(tmp_path, BASE).folder
    before = digests(folder), timeless(folder)
    sentence = refused(tmp_path, "--resume --name run", small=False)
    assert "--steps" in sentence and "step-2" in sentence
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


def test_flags_that_come_with_a_resume_hold_from_then_on(tmp_path):
    folder = good(tmp_path, f"{BASE} --max-new-tokens 6").folder
    good(tmp_path, "--resume --name run --steps 3 --lr 1e-4", small=False)
    assert metrics(folder)[-1]["lr"] == pytest.approx(1e-4)
    config = strict((folder / "config.json").read_text())
    assert (config["steps"], config["lr"], config["max_new_tokens"]) == (3, 1e-4, 6)


@pytest.mark.parametrize(
    "flags", ["--model models/moe", "--algo grpo", "--lora-rank 2", "--task calculator"]
)
def test_a_resumed_run_keeps_what_its_weights_are(flags, done, tmp_path):
    sentence = refused(tmp_path, f"--resume --name run --steps 2 {flags}", small=False)
    assert flags.split()[0] in sentence and "keeps its own" in sentence
    good(tmp_path, "--resume --name run --steps 2 --model models/tiny", small=False)


def test_a_torn_line_is_repaired_on_resume(tmp_path, monkeypatch):
    """A power failure cuts a line. The rest of it is no JSON."""
    whole = good(tmp_path / "whole", f"{BASE} --steps 3").folder
    folder = interrupted(tmp_path / "torn", f"{BASE} --steps 3", monkeypatch, 1).folder
    tails = {
        "metrics": '{"step": 2, "rew',
        "samples": '{"step": 1, "prompt": "a}',
        "evaluations": "\x00" * 40,
        "starts": '{"date": "2026-',
    }
    for name, tail in tails.items():
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write(tail)
    good(tmp_path / "torn", "--resume --name run", small=False)
    same_run(whole, folder)
    # needs train.claim_folder to call folders.repair
    starts = [strict(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2 and (folder / "report.html").exists()


def test_a_page_that_fails_costs_one_warning(tmp_path, monkeypatch):
    """Needs train.py to save first, and to call run.warn("page", ...) if the page fails."""

    def broken(folders, path):
        assert newest(tmp_path / "run")  # saved before
        raise KeyError("date")

    monkeypatch.setattr(report, "write_report", broken)
    result = good(tmp_path, f"{BASE} --eval-every 1 --save-every 1")
    assert result.out.count("warning") == 1 and "KeyError: 'date'" in result.out
    assert newest(result.folder).name == "step-2"


@pytest.mark.parametrize("garbage", ["what is this\n", "[1]\n", '{"reward": 1}\n'])
def test_garbage_in_the_metrics_is_one_sentence(garbage, done, tmp_path):
    path = done / "metrics.jsonl"
    path.write_text(garbage + path.read_text())
    before = path.read_bytes()
    sentence = refused(tmp_path, "--resume --name run --steps 3", small=False)
    assert f"{path}, line 1" in sentence
    assert path.read_bytes() == before


def test_a_run_without_its_rows_goes_on_from_its_checkpoint(tmp_path):
    """The checkpoint has everything. A person may have moved the other files."""
    whole = good(tmp_path / "whole", f"{BASE} --steps 4").folder
    folder = good(tmp_path / "lost", f"{BASE} --steps 2").folder
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    good(tmp_path / "lost", "--resume --name run --steps 4", small=False)
    assert digests(folder) == digests(whole)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    """Its files are those of a run that was never killed, with one first evaluation."""
    flags = f"{BASE} --eval-every 1"
    whole = good(tmp_path / "whole", flags).folder

    def broken_off(run):
        raise SystemExit(3)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train, "save", broken_off)
        launch(tmp_path / "killed", flags)
    folder = tmp_path / "killed/run"
    assert metrics(folder) and not newest(folder)
    good(tmp_path / "killed", "--resume --name run", small=False)
    same_run(whole, folder)
    shown = [Path(run, "evaluations.jsonl").read_text() for run in (whole, folder)]
    assert shown[0] == shown[1]


def test_resume_takes_the_newest_whole_checkpoint(tmp_path):
    """A checkpoint that lost files is skipped."""
    folder = good(tmp_path / "one", f"{BASE} --steps 3 --save-every 1").folder
    whole = good(tmp_path / "other", f"{BASE} --steps 3").folder
    shutil.rmtree(folder / "checkpoints" / "step-3" / "trainer")
    good(tmp_path / "one", "--resume --name run", small=False)
    same_run(whole, folder)


# ---- changed files


@pytest.mark.parametrize(
    "text, word",
    [
        ("{", "config.json"),
        ("[1]", "config.json"),
        ({"lr": -1}, "--lr"),
        ({"lr": "fast"}, "--lr"),
        ({"group_size": None}, "--group-size"),
        ({"algo": "gsop"}, "--algo"),
        ({"device": "mps"}, "--device mps"),
        ({"completions_per_update": 7}, "--completions-per-update 7"),
    ],
)
def test_a_config_that_was_edited_passes_the_checks_of_flags(text, word, done, tmp_path):
    if "mps" in str(text) and torch.backends.mps.is_available():
        pytest.skip("it is here")
    path = done / "config.json"
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    assert word in refused(tmp_path, "--resume --name run --steps 2", small=False)
    assert path.read_text() == text


def test_a_config_of_another_time_is_completed(done, tmp_path):
    """A flag that an older run lacks gets its default. A flag that is gone is dropped."""
    path = done / "config.json"
    config = json.loads(path.read_text())
    del config["entropy_coef"], config["old_logprobs"]
    path.write_text(json.dumps(config | {"max_slots": 3}))
    good(tmp_path, "--resume --name run --steps 2", small=False)
    completed = strict(path.read_text())
    assert completed["old_logprobs"] == "trainer" and "max_slots" not in completed


def changed_state(folder, change) -> Path:
    """The newest checkpoint's state of the trainer, changed."""
    path = newest(folder) / "trainer/state.safetensors"
    save_file(change(load_file(path)), path)
    return path


def one_of(state: dict, beginning: str) -> str:
    return next(key for key in state if key.startswith(beginning) and state[key].dim() > 1)


STATES = {
    "moments of another shape": ("", lambda s: s | {one_of(s, "exp_avg "): torch.zeros(3, 3)}),
    "a moment is missing": (
        "",
        lambda s: {k: v for k, v in s.items() if k != one_of(s, "exp_avg")},
    ),
    "a moment of nothing": ("", lambda s: s | {"exp_avg policy.nothing": torch.zeros(2)}),
    "no critic": (
        "--algo ppo",
        lambda s: {k: v for k, v in s.items() if not k.startswith("weights critic")},
    ),
    "no reference": (
        "--kl-coef 0.1",
        lambda s: {k: v for k, v in s.items() if "ref_policy" not in k},
    ),
    "a run without an adapter": (
        "--lora-rank 2",
        lambda s: {k.replace(".lora_A", ".weight"): v for k, v in s.items() if "lora_B" not in k},
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_not_what_would_be_written_is_refused(case, tmp_path):
    """In one sentence that names the file. Half a state would train without an error."""
    flags, change = STATES[case]
    folder = good(tmp_path, f"{BASE} --steps 1 {flags}").folder
    path = changed_state(folder, change)
    assert str(path) in refused(tmp_path, "--resume --name run --steps 2", small=False)


@pytest.mark.parametrize("flag", ["--kl-coef 0.1", "--stale-steps 2"])
def test_a_flag_that_a_resumed_run_cannot_switch_on_is_named(flag, done, tmp_path):
    sentence = refused(tmp_path, f"--resume --name run --steps 2 {flag}", small=False)
    assert flag.split()[0] in sentence and "weights" not in sentence


@pytest.mark.parametrize("name", ["trainer/state.safetensors", "trainer/progress.json"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 50, b"[]"])
def test_a_torn_file_of_a_checkpoint_is_one_sentence_with_its_name(name, content, done, tmp_path):
    path = newest(done) / name
    path.write_bytes(content)
    assert path.name in refused(tmp_path, "--resume --name run --steps 2", small=False)


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

    for module, name in (
        (os, "sync"),
        (os, "rename"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
        (safetensors.torch, "save_file"),
        (json, "dumps"),
    ):
        setattr(module, name, mortal(getattr(module, name)))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return train.main(arguments)


def forked(runs, flags, log, die_at=None, limit=None, small=True):
    return fork(mortal_run, command_line(runs, flags, small=small), die_at, limit, out=log)


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
    runs, folder = tmp_path / "killed", tmp_path / "killed" / "run"
    flags = f"{BASE} --steps 1000 --save-every 1"
    saved = 0
    for kill in range(kills):
        die_at = None  # but at a moment of the clock
        if kill % 2 == 0:
            die_at = rng.randrange(5, 110) if kill >= 4 else (2, 60)[kill // 2]
        resume = folders.is_run(folder)  # else it died too early, and starts over
        process = forked(
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
    process = forked(runs, f"--resume --name run --steps {saved + 2}", log, small=False)
    process.join(60)
    assert process.exitcode == 0, log.read_text()[-2000:]
    assert [row["step"] for row in metrics(folder)] == list(range(1, saved + 3))
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {f"step-{saved + 1}", f"step-{saved + 2}"}  # and nothing half deleted
    process = forked(tmp_path / "whole", f"{BASE} --steps {saved + 2}", log)
    process.join(60)
    assert process.exitcode == 0, log.read_text()[-2000:]
    same_run(tmp_path / "whole" / "run", folder)


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_of_it(monkeypatch, tmp_path):
    """The remains are no checkpoint, and the next save deletes them."""
    folder = good(tmp_path, f"{BASE} --save-every 1").folder
    rmtree = shutil.rmtree

    def killed(path, *args, **kwargs):
        if any(path.rglob("*.safetensors")):
            next(path.rglob("config.json")).unlink()
            raise SystemExit(9)
        rmtree(path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", killed)
        launch(tmp_path, "--resume --name run --steps 4", small=False)
    assert [path.name for path in folders.checkpoints(folder)] == ["step-2", "step-3"]
    good(tmp_path, "--resume --name run --steps 4", small=False)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"step-3", "step-4"}


@pytest.mark.skipif(os.name != "posix", reason="needs fork and limits")
@pytest.mark.parametrize("limit", [100_000, 3_000])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(limit, tmp_path):
    """A limit of file sizes replaces the full disk. First the weights do not fit, then not even the
    rows."""
    log, runs = tmp_path / "log", tmp_path / "full"
    flags = f"{BASE} --steps 2 --save-every 1"
    folder = good(runs, flags).folder
    before, kept = newest(folder), digests(folder)
    process = forked(runs, "--resume --name run --steps 9", log, limit=limit, small=False)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == 2, text
    errors = [line for line in text.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert str(folder) in errors[0]
    assert newest(folder) == before and digests(folder) == kept
    good(runs, "--resume --name run --steps 4", small=False)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert not list(folder.rglob("unfinished*"))


def test_a_dropped_sampler_leaves_the_checkpoints(tmp_path):
    """Only a run with --stale-steps saves the sampler's weights."""
    good(tmp_path / "a", f"{BASE} --stale-steps 3 --steps 1")
    good(tmp_path / "b", f"{BASE} --steps 1")
    names = [
        set(load_file(newest(tmp_path / n / "run") / "trainer/state.safetensors")) for n in "ab"
    ]
    assert any("old_policy" in name for name in names[0])
    assert not any("old_policy" in name for name in names[1])
