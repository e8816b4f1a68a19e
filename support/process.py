"""How a run ends: last lines, signals, a sentence for a mistake, a traceback for a bug."""

import os
import shlex
import signal
import sys
from pathlib import Path

from support import folders
from support.console import duration, percent, say
from support.data import messages_of, printable, printable_lines
from support.user import UserError, dashed


def farewell(config, folder: Path, progress, row: dict, prompt) -> None:
    """Print the last lines of a run, whose last step has this row."""
    checkpoint = folder / f"checkpoints/step-{config.steps}"
    after = percent({name: row[name] for name in row if name.startswith("eval_")})
    say(f"held out: {percent(progress.before)} -> {after}, in {duration(progress.seconds)}")
    say(f"the model is in {checkpoint}, the report in {folder}/report.html; try it:")
    say(command_to_try(checkpoint, config, prompt))


def command_to_try(checkpoint, config, prompt: str | list[dict]) -> str:
    """Return the command that asks the trained model this prompt, without control characters."""
    *before, asked = messages_of(prompt)  # of a conversation, the last message
    command = ["python", "rollout.py", "--model", str(checkpoint), "--prompt", asked["content"]]
    if before and before[0]["role"] == "system":  # then --system was refused
        command += ["--system", before[0]["content"]]
    for name in ("system", "prompt_template", "chat_template_args"):
        if getattr(config, name) != getattr(type(config), name):
            command += [dashed(name), getattr(config, name)]
    for text in config.stop or []:
        command += ["--stop", text]
    return printable_lines(shlex.join(command))


class StopSignal:
    """Asks the run to end after its step, with a checkpoint. A second signal ends it at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(number, signal.default_int_handler)
        say("stopping after this step, with a checkpoint; once more: at once, without")


def fail(error: BaseException, ranks, config) -> int:
    """Print why the run ends, once for all processes, and return the exit status. A bug of the code
    keeps its traceback. With $GSPO_TRACEBACK everything does."""
    explained = explain(error)
    if not ranks.fails_first():  # another process says why
        os._exit(explained[0] if explained else 2)
    if explained is None or os.environ.get("GSPO_TRACEBACK"):
        raise error
    status, sentence = explained
    named = config and config.name and status != 2
    if named and folders.checkpoints(Path(config.runs, config.name)):
        run = shlex.join(["--name", config.name, "--runs", config.runs])
        sentence += f"; to continue: python train.py --resume {run}"
    print(printable(sentence), file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # at once: an orderly end would wait for the others
    return status


def explain(error: BaseException) -> tuple[int, str] | None:
    """Return exit status and a sentence. None for a bug of the code, which keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, (UserError, OSError)):
        return 2, f"error: {error}"
    full = any(words in str(error) for words in ("out of memory", "can't allocate memory"))
    if isinstance(error, MemoryError) or (full and isinstance(error, RuntimeError)):  # GPU, CPU
        less = "lower --micro-batch-tokens, --cache-gb or --max-new-tokens"
        return 1, f"error: out of memory; {less}, or add --gradient-checkpointing, --lora-rank 16"
    return None
