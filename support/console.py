"""What a run says on the console: lines, a step in one of them, the sentence that it ends with."""

import os
import re
import shlex
import sys

from support.data import UserError, messages_of
from support.flags import dashed

STEP = {  # metric -> how the line of a step writes it
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
    """A line on the console. Losing the console (| head, a full disk) costs the console alone."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(ascii(text)[1:-1], flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def step_line(row: dict, steps: int, seconds_left: float) -> str:
    """A row of metrics.jsonl, as a scientist looks at it. Not the loss: it is near 0 always."""
    parts = [f"step {row['step']}/{steps}"]
    parts += [form.format(row[name]) for name, form in STEP.items() if name in row]
    return " | ".join([*parts, f"{duration(seconds_left)} left"])


def duration(seconds: float) -> str:
    """90 s, 2 min, 120 min, 3 h"""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def percent(found: dict) -> str:
    """solved 27.3%, pass@8 82.4%; or reward 0.27"""
    parts = []
    for name, value in found.items():
        form = ".2f" if name == "eval_reward" else ".1%"
        parts.append(f"{name.removeprefix('eval_')} {value:{form}}")
    return ", ".join(parts)


def peak_memory(device: str) -> float:
    """GB since the start: of the GPU, or of this process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    import resource  # there is none on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # there it is in bytes
        return peak / 1e9
    return peak / 1e6


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit status and a sentence, for what is not a bug of the code: that keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, (UserError, OSError)):
        return 2, f"error: {error}"
    full = re.search("out of memory|can't allocate memory", str(error))  # of a GPU, of a CPU
    if isinstance(error, MemoryError) or (full and isinstance(error, RuntimeError)):
        lower = "--micro-batch-tokens, --cache-gb or --max-new-tokens"
        more = "--gradient-checkpointing or --lora-rank 16"
        return 1, f"error: out of memory; lower {lower}, or take {more}"
    return None


def command_to_resume(runs: str, name: str) -> str:
    return shlex.join(["python", "train.py", "--resume", "--name", name, "--runs", runs])


def command_to_try(checkpoint, config, prompt: str | list[dict]) -> str:
    """rollout.py's, that asks the trained model what a prompt asks."""
    asked = messages_of(prompt)[-1]["content"]
    command = ["python", "rollout.py", "--model", str(checkpoint), "--prompt", asked]
    for name in ("system", "prompt_template", "chat_template_args"):
        if getattr(config, name) != getattr(type(config), name):
            command += [dashed(name), getattr(config, name)]
    return shlex.join(command)
