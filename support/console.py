"""Console output of a run: the line of each step, the timing of its phases, and warnings."""

import collections
import contextlib
import os
import sys
import time
from collections.abc import Iterator

import torch

from support.data import printable
from support.errors import reason

# metrics in a step's line, which should fit a narrow terminal; metrics.jsonl has them all
STEP = {
    "reward": "reward {:.2f}",
    "solved": "solved {:.0%}",
    "length_mean": "len {:.0f}",
    "dead": "dead {:.0%}",
    "clip_fraction": "clip {:.0%}",
    "entropy": "entropy {:.2f}",
    "eval_solved": "eval {:.1%}",
    "eval_reward": "eval reward {:.2f}",
}


def say(text: str) -> None:
    """Print a line. If the console is lost (| head, a full disk), the run goes on without it."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(ascii(text)[1:-1], flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def step_line(row: dict, steps: int, seconds_left: float) -> str:
    """A row of metrics.jsonl as one line."""
    shown = [name for name in STEP if name in row]
    if {"reward", "solved"} <= row.keys() and abs(row["reward"] - row["solved"]) < 1e-6:
        shown.remove("reward")  # the same number twice
    parts = [STEP[name].format(row[name]) for name in shown]
    return " | ".join([f"step {row['step']}/{steps}", *parts, f"{duration(seconds_left)} left"])


def duration(seconds: float) -> str:
    """Format a duration: 90 s, 2 min, 120 min, 3 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent(evaluation: dict) -> str:
    """Format an evaluation: greedy 27.3%, pass@8 82.4%, or mean reward 0.27."""
    if "eval_reward" in evaluation:  # no verifier told right from wrong
        return f"mean reward {evaluation['eval_reward']:.2f}"
    names = {name: name.removeprefix("eval_").replace("solved", "greedy") for name in evaluation}
    return ", ".join(f"{names[name]} {share:.1%}" for name, share in evaluation.items())


class Log:
    """Times the phases of a step, and prints each warning once per run."""

    def __init__(self, device: str, seconds_before: float):
        self.device = torch.get_device_module(device)
        self.seconds = collections.Counter()  # of the phases of this step
        self.warned = set()  # kinds
        self.last_said = None
        self.last_lap = time.perf_counter()
        self.run_start = self.last_lap - seconds_before  # includes time before a resume

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap, or since the start of the step, to this phase."""
        self.device.synchronize()
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"] += now - self.last_lap
        self.last_lap = now

    def elapsed(self) -> float:
        """Seconds since the run started, earlier starts included."""
        return time.perf_counter() - self.run_start

    def start_step(self) -> None:
        self.seconds.clear()
        self.step_start = self.last_lap = time.perf_counter()

    def end_step(self, tokens: int) -> dict[str, float]:
        """Seconds per phase and for the whole step, and completion tokens per second."""
        seconds = time.perf_counter() - self.step_start
        return {**self.seconds, "seconds_step": seconds, "tokens_per_second": tokens / seconds}

    def say_if_new(self, text: str) -> None:
        """Print a line unless it repeats the last one passed to this method."""
        if text != self.last_said:
            self.last_said = text
            say(text)

    def warn(self, sentences: dict[str, str]) -> None:
        """Print warnings by kind, each kind once per run."""
        for kind, sentence in sentences.items():
            if kind not in self.warned:
                self.warned.add(kind)
                say(f"warning: {printable(sentence)}")

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Turn an error inside the block into a warning, so that it never ends the run."""
        try:
            yield
        except Exception as error:
            self.warn({name: f"{name} was not written: {reason(error)}"})
