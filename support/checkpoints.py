"""The checkpoint of a run: its state beside the policy's own files, and its progress."""

import dataclasses
import json
import time
from pathlib import Path

from torch import Tensor

from support import folders
from support.console import say
from support.user import expecting, need


@dataclasses.dataclass
class Progress:
    """The state of a run beside its tensors."""

    step: int = 0  # rollout steps done
    began: float = dataclasses.field(default_factory=time.time)
    prompts_drawn: int = 0
    bad_in_a_row: int = 0  # updates that were skipped because they were not finite
    quiet_steps: int = 0  # in a row, without an advantage
    shaping: list[str] = dataclasses.field(default_factory=list)  # terms that `solved` leaves out
    before: dict = dataclasses.field(default_factory=dict)  # the evaluation before the first step


def save(folder: Path, config, models, tokenizer, optimizer, progress: Progress) -> None:
    """Write checkpoints/step-N in Hugging Face layout, with trainer/ for --resume."""
    policy = models.policy.module
    with folders.new_checkpoint(folder, progress.step) as unfinished:
        policy.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if config.lora_rank:
            from support.extras.lora import write_adapter

            write_adapter(policy, unfinished / "adapter", config.model)
        trainer = unfinished / "trainer"
        trainer.mkdir()
        state = trainer / "state.safetensors"
        folders.write_state(state, *parameters_of(models, config), optimizer)
        folders.write_json(trainer / "progress.json", dataclasses.asdict(progress))


def newest(config) -> tuple[Path | None, Progress]:
    """Return the newest checkpoint of the run, and how far it is. UserError if it is complete."""
    saved = None
    if config.resume:  # the run may have been stopped before its first
        saved = next(reversed(folders.checkpoints(Path(config.runs, config.name))), None)
        say(f"resume: from {saved}" if saved else "resume: no checkpoint yet, from the start")
    if saved is None:
        return None, Progress()
    with expecting(f"--resume: expected the state of the run in {saved}/trainer/progress.json"):
        progress = Progress(**json.loads((saved / "trainer/progress.json").read_text()))
    done = f"{saved} has {progress.step} steps already; pass a larger --steps"
    page = f"for its report: python train.py --report {Path(config.runs, config.name)}"
    need(progress.step < config.steps, f"--steps {config.steps}: {done}; {page}")
    return saved, progress


def restore(saved: Path, config, models, optimizer) -> None:
    """Read the state that `save` wrote. Raise UserError if it is not that of these models."""
    state = saved / "trainer/state.safetensors"
    folders.read_state(state, *parameters_of(models, config), optimizer)
    if config.lora_rank:
        from support.extras.lora import check_base

        check_base(models.policy.module, saved)


def parameters_of(models, config) -> tuple[dict[str, Tensor], set[str]]:
    """Return all parameters that a checkpoint keeps, by name, and the names of those that the
    policy's own files have."""
    modules = {"policy": models.policy.module}
    if models.critic:
        modules["critic"] = models.critic.module
    if models.ref_policy:
        modules["ref_policy"] = models.ref_policy.module
    if config.stale_steps > 1:
        modules["old_policy"] = models.old_policy
    names = {}  # of each parameter one, if modules share it
    for part, module in modules.items():
        for name, each in module.named_parameters():
            names.setdefault(each, f"{part}.{name}")
    named = {name: each for each, name in names.items()}
    return named, {f"policy.{name}" for name in modules["policy"].state_dict()}
