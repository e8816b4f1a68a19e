"""The console of a run: its lines, the line of a step, the sentence of an error."""

import collections
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from support import folders
from support.data import messages_of, printable
from support.user import UserError, dashed, reason

BEGAN = time.time()  # of this process

STEP = {  # metric -> its format in the line of a step
    "reward": "reward {:.2f}",
    "solved": "solved {:.0%}",
    "length_mean": "len {:.0f}",
    "truncated": "truncated {:.0%}",
    "dead": "dead {:.0%}",
    "ratio_mean": "ratio {:.4f}",
    "clip_fraction": "clip {:.0%}",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.2f}",
    "tool_calls": "calls {:.2f}",
    "grad_norm": "grad {:.2f}",
    "eval_solved": "held out {:.1%}",
    "eval_reward": "held-out reward {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "seconds_step": "{:.1f} s",
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
    """Return a row of metrics.jsonl as one line. The loss is left out: it is always near 0."""
    parts = [form.format(row[name]) for name, form in STEP.items() if name in row]
    return " | ".join([f"step {row['step']}/{steps}", *parts, f"{duration(seconds_left)} left"])


def duration(seconds: float) -> str:
    """Return 90 s, 2 min, 120 min, 3 h."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent(found: dict) -> str:
    """Return an evaluation as text: solved 27.3%, pass@8 82.4%, or reward 0.27."""
    parts = []
    for name, value in found.items():
        form = ".2f" if name == "eval_reward" else ".1%"
        parts.append(f"{name.removeprefix('eval_')} {value:{form}}")
    return ", ".join(parts)


def peak_memory(device: str) -> float:
    """Return the peak since the start in GB, of the GPU or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource  # missing on Windows

    unit = 1 if sys.platform == "darwin" else 1000  # in bytes, or in kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def free_memory(device: str) -> None:
    """Give unused memory back to a GPU. Its allocator keeps blocks of every size that it has seen,
    and the optimiser's between those of KV caches leave too little in one piece."""
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def explain(error: BaseException) -> tuple[int, str] | None:
    """Return exit status and a sentence. None for a bug of the code, which keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, (UserError, OSError)):
        return 2, f"error: {error}"
    full = re.search("out of memory|can't allocate memory", str(error))  # of a GPU, of a CPU
    if isinstance(error, MemoryError) or (full and isinstance(error, RuntimeError)):
        less = "lower --micro-batch-tokens, --cache-gb or --max-new-tokens"
        return 1, f"error: out of memory; {less}, or add --gradient-checkpointing, --lora-rank 16"
    return None


def end(error: BaseException, ranks, config) -> int:
    """Print why the run ends, once for all processes, and return the exit status. A bug of the code
    keeps its traceback."""
    explained = explain(error)
    if not ranks.fails_first():  # another process says why
        os._exit(explained[0] if explained else 2)
    if explained is None:
        raise error
    status, sentence = explained
    asked = config and config.name and status != 2
    if asked and folders.checkpoints(Path(config.runs, config.name)):
        sentence += f"; to continue: {command_to_resume(config.runs, config.name)}"
    print(printable(sentence), file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # at once: an orderly end would wait for the others
    return status


def quoted(word: str) -> str:
    """Quote a word for bash or zsh, without control characters: a line break is $'\\n'."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = {"\\": "\\\\", "'": "\\'", "\n": "\\n"}
    for c in set(word) - escaped.keys():
        if not c.isprintable():
            escaped[c] = "".join(f"\\x{byte:02x}" for byte in c.encode(errors="replace"))
    return f"$'{word.translate(str.maketrans(escaped))}'"


def command_to_resume(runs: str, name: str) -> str:
    words = ["python", "train.py", "--resume", "--name", name, "--runs", runs]
    return " ".join(map(quoted, words))


def command_to_try(checkpoint, config, prompt: str | list[dict]) -> str:
    """Return the command of rollout.py that asks the trained model this prompt."""
    *before, asked = messages_of(prompt)  # of a conversation, the last message
    command = ["python", "rollout.py", "--model", str(checkpoint), "--prompt", asked["content"]]
    if before and before[0]["role"] == "system":  # then --system was refused
        command += ["--system", before[0]["content"]]
    for name in ("system", "prompt_template", "chat_template_args"):
        if getattr(config, name) != getattr(type(config), name):
            command += [dashed(name), getattr(config, name)]
    for text in config.stop or []:
        command += ["--stop", text]
    return " ".join(map(quoted, command))


def say_goodbye(config, folder: Path, before: dict, row: dict, prompt: str | list[dict]) -> None:
    """Say what the run has reached, and how to try its model. row: the metrics of the last step"""
    after = {name: value for name, value in row.items() if name in before}
    say(f"held out: {percent(before)} -> {percent(after)}, in {duration(time.time() - BEGAN)}")
    checkpoint = folder / f"checkpoints/step-{config.steps}"
    say(f"the model is in {checkpoint}, the report in {folder}/report.html; try it:")
    say(command_to_try(checkpoint, config, prompt))


class Log:
    """Measures the seconds of a step's phases, and prints each warning once a run."""

    def __init__(self, device: str):
        self.device = torch.get_device_module(device)
        self.seconds, self.begun, self.warned = collections.Counter(), time.perf_counter(), set()

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to the metric of the phase."""
        begun = time.perf_counter()
        yield
        self.device.synchronize()
        self.seconds[f"seconds_{phase}"] += time.perf_counter() - begun

    def start_step(self) -> None:
        self.seconds.clear()
        self.begun = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """Return the seconds of the phases and of the step."""
        return self.seconds | {"seconds_step": time.perf_counter() - self.begun}

    def warn(self, kind: str, message: str) -> None:
        """Print a warning of this kind once a run."""
        if kind not in self.warned:
            self.warned.add(kind)
            say(f"warning: {printable(message)}")

    def warn_of(self, config, batch, row: dict, quiet_steps: int) -> None:
        """Warn of dead groups, faults of verifiers, and steps that teach nothing."""
        kept = int((~batch.dead).sum())
        if config.dynamic_sampling and kept < config.prompts_per_step:
            drawn = f"{kept} of {len(batch.dead)} groups have different rewards"
            self.warn("refills", f"--dynamic-sampling: {drawn}, expected {config.prompts_per_step}")
        if batch.faults:
            self.warn("fault", f"a verifier failed and gave reward 0: {batch.faults[0]}")
        if quiet_steps == 10:
            why = "all rewards are equal (another --reward? other prompts? more --group-size?)"
            if row["truncated"] == 1:
                why = "all completions are truncated (--max-new-tokens)"
            self.warn("quiet", f"10 steps taught nothing: {why}")

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Let an error inside the block cost a warning, never the run."""
        try:
            yield
        except Exception as error:
            self.warn(name, f"{name} was not written: {reason(error)}")


class StopSignal:
    """Asks the run to end after its step, with a checkpoint, at the first signal. The second ends
    it at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(number, signal.default_int_handler)
        say("stopping after this step, with a checkpoint; once more: at once, without")
