"""How a run ends: its last lines, signals, a sentence for a mistake and a traceback for a bug."""

import os
import shlex
import signal
import sys
from pathlib import Path

from safetensors import SafetensorError

from support import run_folder
from support.console import duration, percent, say
from support.data import messages_of, printable, printable_lines
from support.errors import UserError, dashed


def farewell(config, folder: Path, progress, row: dict, prompt) -> None:
    """Print the last lines of a finished run. row: the metrics of its last step."""
    checkpoint = folder / f"checkpoints/step-{config.steps}"
    after = percent({name: row[name] for name in row if name.startswith("eval_")})
    say(f"held out: {percent(progress.before)} -> {after}, in {duration(progress.seconds)}")
    say(f"the model is in {checkpoint}, the report in {folder}/report.html; try it:")
    say(command_to_try(checkpoint, config, prompt))


def command_to_try(checkpoint, config, prompt: str | list[dict]) -> str:
    """Return a shell command, safe to print, that sends this prompt to the trained model."""
    *before, asked = messages_of(prompt)  # rollout.py only takes the last message
    command = ["python", "rollout.py", "--model", str(checkpoint), "--prompt", asked["content"]]
    if before and before[0]["role"] == "system":  # --system is refused for such prompts
        command += ["--system", before[0]["content"]]
    for name in ("system", "prompt_template", "chat_template_args"):
        if getattr(config, name) != getattr(type(config), name):
            command += [dashed(name), getattr(config, name)]
    for text in config.stop or []:
        command += ["--stop", text]
    return printable_lines(shlex.join(command))


class StopSignal:
    """The first SIGINT or SIGTERM asks the run to stop after its step, with a checkpoint. A second
    one stops it at once."""

    def __init__(self):
        self.asked = False
        self.pid = os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame) -> None:
        own = os.getpid() == self.pid  # False in a process that a reward forked
        signal.signal(number, signal.default_int_handler if own else signal.SIG_DFL)
        if own:
            self.asked = True
            say("stopping after this step, with a checkpoint; repeat to stop at once without one")
        elif number == signal.SIGTERM:  # Ctrl-C reaches forks, too, but the step needs them
            signal.raise_signal(number)


def fail(error: BaseException, ranks, config) -> int:
    """Print why the run failed, in one process only, and return the exit status. Bugs keep their
    traceback, and so does every error if $GSPO_TRACEBACK is set."""
    explained = explain(error)
    if not ranks.fails_first():  # another process prints the reason
        os._exit(explained[0] if explained else 2)
    if explained is None or os.environ.get("GSPO_TRACEBACK"):
        raise error
    status, sentence = explained
    named = config and config.name and not isinstance(error, UserError)
    if named and run_folder.checkpoints(Path(config.runs, config.name)):
        run = shlex.join(["--name", config.name, "--runs", config.runs])
        sentence += f"; to continue: python train.py --resume {run}"
    print(printable(sentence), file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # an orderly exit would wait for the others
    return status


def explain(error: BaseException) -> tuple[int, str] | None:
    """Return the exit status and a sentence for the user, or None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, (UserError, OSError, SafetensorError)):  # a full disk, for example
        return 2, f"error: {str(error) or type(error).__name__}"
    full = any(words in str(error) for words in ("out of memory", "can't allocate memory"))
    if isinstance(error, MemoryError) or (full and isinstance(error, RuntimeError)):  # GPU, CPU
        less = "lower --micro-batch-tokens, --cache-gb or --max-new-tokens"
        return 1, f"error: out of memory; {less}, or add --gradient-checkpointing or --lora-rank 16"
    return None
