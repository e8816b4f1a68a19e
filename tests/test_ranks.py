"""Several processes train as one does: the same run up to rounding, decisions alike, no hang.

Processes are forked with the environment that torchrun would give them. At the end torchrun itself
starts some. Gloo, on the CPU, one thread each."""

import os
import re
import signal
import socket
import subprocess
import sys
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train
from forks import fork
from support import run_folder
from support.errors import UserError
from support.models import critic_of
from support.ranks import joined_ranks
from tools import BASE, ROOT, command_line, distance, good, metrics, newest, refused, timeless

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.skipif(os.name != "posix", reason="needs fork and signals"),
]
MINUTES = 300  # seconds that a run may take on a busy machine
SOON = 120  # seconds within which all end where one does, on a busy machine

# ---- tools


def one_rank(rank, arguments, trouble, troubled):
    """train.main. One rank comes into trouble in step 2: a signal, or an error."""
    draw_groups = train.draw_groups

    def collect_in_trouble(run, step):
        if step == 2 and rank == troubled:
            if isinstance(trouble, Exception):
                raise trouble
            os.kill(os.getpid(), trouble)
        return draw_groups(run, step)

    train.draw_groups = collect_in_trouble
    return train.main(arguments)


def start(size, logs, function, *arguments, **where) -> list[tuple]:
    """Start function(rank, *arguments) in some processes, of which each has a file to print to."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    together = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(size):
        log = logs.with_name(f"{logs.name}-log{rank}")
        log.write_text("")
        own = {"out": log, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append((fork(function, rank, *arguments, **own, **together, **where), log))
    return started


def wait(started) -> tuple[list[int], list[str]]:
    """The statuses of these processes, and what they have printed."""
    processes, logs = zip(*started)
    connection.wait([process.sentinel for process in processes], MINUTES)
    for process in processes:  # where one ends, the others end soon, or hang
        process.join(SOON)
        process.kill()
        process.join()
    return [process.exitcode for process in processes], [log.read_text() for log in logs]


class Together:
    """A run in some processes."""

    def __init__(self, size, runs, flags, trouble=None, troubled=None, small=True, **where):
        self.folder = runs / "run"
        given = (command_line(runs, flags, small=small), trouble, troubled)
        self.started = start(size, runs, one_rank, *given, **where)

    def end(self):
        """Wait for the processes. Keep their statuses and what they have printed."""
        self.statuses, self.texts = wait(self.started)
        return self

    def one_sentence(self) -> str:
        """The error of all processes, and no traceback."""
        text = "\n".join(self.texts)
        assert "Traceback" not in text
        [sentence] = re.findall("^(?:error: |stopped;).*", text, re.MULTILINE)
        return sentence


def ended_well(run: Together) -> Path:
    """The folder of a run that must end well, of which only the first process is heard."""
    run.end()
    size = len(run.statuses)
    assert run.statuses == [0] * size, run.texts
    assert run.texts[1:] == [""] * (size - 1)
    return run.folder


def alike(one: Path, other: Path):
    """Two runs are the same up to rounding."""
    first = [Path(run, "samples.jsonl").read_text().splitlines()[:4] for run in (one, other)]
    assert first[0] == first[1]  # completions and rewards of the first step, to the bit
    for row, expected in zip(timeless(one), timeless(other), strict=True):
        assert row.keys() == expected.keys()
        for name in row:
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name
    for path in ("model.safetensors", "trainer/state.safetensors"):
        assert distance(newest(one), newest(other), path) < 1e-4


# ---- the same run

SAME = {
    # groups that do not divide evenly, refills, rows that leave the loss, and dead ones
    "dapo with refills": (
        "--algo dapo --data rows.jsonl --eval-data rows.jsonl --reward pay.py:by_prompt "
        "--overlong-filter --max-new-tokens 20 --prompts-per-step 5 --completions-per-update 5"
    ),
    "ppo": "--algo ppo --critic-lr 1e-3 --kl-coef 0.1 --reward pay.py:steps",
    "grpo with a KL": "--algo grpo --kl-coef 0.1 --ref-every 1 --stale-steps 2 --tis-cap 2",
    "experts": "--model models/moe --algo grpo --kl-coef 0 --routing-replay --eval-every 1",
    "lora": "--lora-rank 4 --epochs 2",
    "opd": "--algo opd --teacher models/moe",
    # the first process has no row of any update
    "one row": "--prompts-per-step 2 --eval-prompts 3 --completions-per-update 1",
}
FAST = ("dapo with refills", "ppo", "one row")
SLOW = ("grpo with a KL", "experts", "lora", "opd")
SIZES = {"grpo with a KL": 4}  # of the others 2
CASES = [pytest.param(case, marks=pytest.mark.last) for case in FAST]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in SLOW]


def flags_of(case) -> str:
    return f"{BASE} --lr 1e-4 --eval-samples 2 {SAME[case]}"


def begin(folder):
    """Start the fast cases, which run beside the other tests."""
    where = {"folder": folder, "nice": 19}
    return {case: Together(2, folder / case, flags_of(case), **where) for case in FAST}


@pytest.mark.parametrize("case", CASES)
def test_several_processes_train_as_one(case, begun, tmp_path):
    alone = good(tmp_path / "one", flags_of(case)).folder
    several = begun[__name__].get(case)
    if several is None:
        several = Together(SIZES.get(case, 2), tmp_path / "several", flags_of(case))
    alike(ended_well(several), alone)
    rows = metrics(alone)
    assert len(rows) == 2 and sum(row["advantage_abs"] for row in rows) > 0


def talk(rank) -> int:
    """What two processes say to each other, one device alone."""
    torch.cuda.device_count = torch.cuda.set_device = None  # --device cpu never asks
    both = [torch.Generator().manual_seed(seed) for seed in range(2)]
    shapes, dtypes = [(2, 3), (2,), (), (3, 5), (4,), (4,)], [torch.float32] * 5 + [torch.float64]
    values = []
    for generator in both:
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        values.append([each.to(dtype) for each, dtype in zip(drawn, dtypes)])
    with joined_ranks("cpu") as ranks:
        assert ranks.from_first(f"from {rank}") == "from 0"
        assert ranks.gather(rank) == [0, 1] and ranks.share("abcde") == ("ab", "cde")[rank]
        assert ranks.sum_numbers({"a": 1, f"b{rank}": 2}) == {"a": 2, "b0": 2, "b1": 2}
        own = [value.clone() for value in values[rank]]
        own[0] = own[0].T.contiguous().T  # as some gradients lie
        ranks.sum(*own)
        for total, *parts in zip(own, *values):
            assert torch.equal(total, sum(parts)) and total.dtype == parts[0].dtype
    return 0


def test_two_processes_talk(tmp_path):
    """Sums of tensors have the bits of a plain sum, whatever their shapes, dtypes and strides."""
    statuses, texts = wait(start(2, tmp_path / "talk", talk))
    assert statuses == [0, 0], texts


# ---- decisions and ends


def test_a_signal_to_one_stops_all_and_a_run_goes_on_in_another_number(tmp_path):
    """1, then 2, then 1, with a checkpoint. Together they do as one that was not stopped."""
    flags = f"{BASE} --algo ppo --lr 1e-4 --eval-every 1"
    whole = good(tmp_path / "whole", f"{flags} --steps 3").folder
    good(tmp_path / "parts", f"{flags} --steps 1")
    more = "--resume --name run --steps 3"
    stopped = Together(2, tmp_path / "parts", more, signal.SIGTERM, troubled=1, small=False)
    stopped.end()
    assert stopped.statuses == [130, 130], stopped.texts
    assert newest(stopped.folder).name == "step-2"
    assert "--resume --name run" in stopped.one_sentence()
    alike(good(tmp_path / "parts", "--resume --name run", small=False).folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("trouble, rank", [(signal.SIGKILL, 0), (ValueError("a bug"), 2)])
def test_where_one_dies_the_others_end(trouble, rank, tmp_path):
    died = Together(3, tmp_path / "died", f"{BASE} --steps 99", trouble, rank).end()
    if trouble == signal.SIGKILL:
        assert died.statuses.pop(rank) == -signal.SIGKILL
    else:
        assert "ValueError: a bug" in died.texts[rank]
    assert all(status > 0 for status in died.statuses)  # and were not killed by this test


@pytest.mark.parametrize(
    "flags, trouble, words",
    [
        ("--runs taken --name run", None, "--resume"),
        ("--prompts-per-step 1", None, "2 processes"),
        ("--steps 99", UserError("the water is cold"), "error: the water is cold"),
    ],
)
def test_a_mistake_of_the_user_is_one_sentence_of_all(flags, trouble, words, tmp_path):
    """Before the run, and in step 2 of one process."""
    Path("taken/run").mkdir(parents=True)
    Path("taken/run/config.json").write_text("{}")
    refused = Together(2, tmp_path / "runs", f"{BASE} {flags}", trouble, troubled=1).end()
    assert refused.statuses == [2, 2], refused.texts
    assert words in refused.one_sentence()
    assert (tmp_path / "runs").exists() == bool(trouble)


@pytest.mark.slow
def test_a_fault_of_a_verifier_on_another_process_is_counted_and_told(tmp_path):
    Path("fails.py").write_text(
        "import os\n\n\ndef fails(completion, answer):\n"
        "    if os.environ.get('RANK') == '1' and completion not in ('', answer):\n"
        "        raise SystemExit(3)\n"
        "    return len(completion) % 3 / 2\n"
    )
    flags = "--model models/tiny --reward fails.py:fails --steps 2"
    result = Together(2, tmp_path / "runs", flags).end()
    assert result.statuses == [0, 0], result.texts
    assert metrics(result.folder)[0]["verifier_faults"] > 0
    assert "SystemExit" in result.texts[0]


@pytest.mark.slow
def test_torchrun_starts_the_same_train_py(tmp_path):
    """The console is that of one process, and so is the folder."""
    flags = f"{BASE} --lr 1e-4"
    alone = good(tmp_path / "one", flags).folder
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "train.py")]
    command += command_line(tmp_path / "two", flags)
    here = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=MINUTES)
    assert done.returncode == 0 and "error" not in done.stderr, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 2
    several = tmp_path / "two/run"
    alike(several, alone)
    assert {path.name for path in several.iterdir()} == {path.name for path in alone.iterdir()}


def test_an_error_is_said_whatever_variables_another_launch_has_left(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "_exit", None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for error, said in ((UserError("--x: no"), "--x: no"), (OSError(), "OSError")):
        monkeypatch.setattr(train, "parse_flags", Mock(side_effect=error))
        assert refused(tmp_path) == f"error: {said}"


def test_processes_whose_weights_differ_end_at_the_checkpoint(seen, tmp_path, monkeypatch):
    """Nothing sends weights. A forker's random head, say, would let them part without a word."""
    good(tmp_path, f"{BASE} --steps 1")
    apart = SimpleNamespace(gather=lambda sums: [sums, [each + 1 for each in sums]], first=True)
    seen.run.ranks = apart
    with pytest.raises(AssertionError, match="different weights"):
        run_folder.save_checkpoint(tmp_path, seen.run)


def test_random_weights_of_a_fork_come_from_the_seed(tmp_path, monkeypatch):
    def random_critic(policy):
        critic = critic_of(policy)
        torch.nn.init.normal_(critic.value, std=0.02)
        return critic

    monkeypatch.setattr("support.models.critic_of", random_critic)
    flags = f"{BASE} --algo ppo --steps 1"
    first, second = [metrics(good(tmp_path / name, flags).folder) for name in ("a", "b")]
    assert first[0]["value_loss"] == second[0]["value_loss"]
