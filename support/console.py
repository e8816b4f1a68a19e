"""Console output of a run: a line per step, the time spent in each phase, and warnings."""

import collections
import contextlib
import os
import sys
import time
from collections.abc import Iterator

import torch

from support.data import printable
from support.errors import reason

# metrics in a step's line, which should fit a narrow terminal; metrics.jsonl has all of them
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
    """Print a line. If the console is lost (| head, a full disk), the run continues without it."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(ascii(text)[1:-1], flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def step_line(row: dict, steps: int, seconds_left: float) -> str:
    """Format a row of metrics.jsonl as a line of the console."""
    shown = [name for name in STEP if name in row]
    if {"reward", "solved"} <= row.keys() and abs(row["reward"] - row["solved"]) < 1e-6:
        shown.remove("reward")  # it would repeat `solved`
    parts = [STEP[name].format(row[name]) for name in shown]
    return " | ".join([f"step {row['step']}/{steps}", *parts, f"{duration(seconds_left)} left"])


def duration(seconds: float) -> str:
    """Format a duration, as in 90 s, 2 min, 90 min or 3 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent(evaluation: dict) -> str:
    """Format an evaluation, as in "greedy 27.3%, pass@8 82.4%" or "mean reward 0.27"."""
    if "eval_reward" in evaluation:  # no verifier told right from wrong
        return f"mean reward {evaluation['eval_reward']:.2f}"
    parts = []
    for name, share in evaluation.items():
        shown = name.removeprefix("eval_").replace("solved", "greedy")
        parts.append(f"{shown} {share:.1%}")
    return ", ".join(parts)


class Log:
    """Times the phases of a step, and prints each warning once per run."""

    def __init__(self, device: str, seconds_before: float):
        self.device = torch.get_device_module(device)
        self.seconds = collections.Counter()  # per phase of this step
        self.warned = set()  # the kinds of warnings already printed
        self.last_said = None
        self.last_lap = time.perf_counter()
        self.run_start = self.last_lap - seconds_before  # counts the time before a resume

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap (or the start of the step) to a phase."""
        self.device.synchronize()
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"] += now - self.last_lap
        self.last_lap = now

    def elapsed(self) -> float:
        """Return the seconds that the run has taken, including those before it was resumed."""
        return time.perf_counter() - self.run_start

    def start_step(self) -> None:
        self.seconds.clear()
        self.step_start = self.last_lap = time.perf_counter()

    def end_step(self, tokens: int) -> dict[str, float]:
        """Return the seconds of each phase and of the step, and completion tokens per second."""
        seconds = time.perf_counter() - self.step_start
        return {**self.seconds, "seconds_step": seconds, "tokens_per_second": tokens / seconds}

    def say_if_new(self, text: str) -> None:
        """Print a line unless it repeats the last one passed to this method."""
        if text != self.last_said:
            self.last_said = text
            say(text)

    def warn(self, sentences: dict[str, str]) -> None:
        """Print each kind of warning once per run."""
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
            self.warn({name: f"{name} failed: {reason(error)}"})
