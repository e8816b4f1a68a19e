"""The checkpoint of a run: its state beside the policy's own files, and its progress."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
from torch import Tensor

from support import folders
from support.console import say
from support.user import dashed, expecting, need

# a resumed run keeps these flags, which decide on its models, and on the state of these
KEPT = ("algo", "model", "task", "seed", "lora_rank", "lora_alpha", "lr_schedule", "kl_coef")
KEPT += ("stale_steps",)


@dataclasses.dataclass
class Progress:
    """The state of a run beside its tensors."""

    step: int = 0  # the number of rollout steps so far
    began: float = dataclasses.field(default_factory=time.time)
    seconds: float = 0.0  # of all starts of the run
    prompts_drawn: int = 0
    bad_in_a_row: int = 0  # updates that were skipped because they were not finite
    quiet_steps: int = 0  # in a row, without an advantage
    before: dict = dataclasses.field(default_factory=dict)  # the evaluation before the first step


def save(folder: Path, run) -> None:
    """Let the first process write checkpoints/step-N, in Hugging Face layout beside trainer/.

    The state has, by a parameter's name, all that the optimiser keeps of it, as `KEY NAME`, and
    `weights NAME` if the policy's own files lack it. Learning rates come from the flags."""
    parameters, in_files = parameters_of(run.models, run.config)
    trained = [each for group in run.optimizer.param_groups for each in group["params"]]
    assert set(trained) <= set(parameters.values()), "a trained model is missing in parameters_of"
    sums = run.ranks.gather([float(each.detach().float().sum()) for each in trained])
    assert sums == [sums[0]] * len(sums), "the processes have different weights"
    if run.ranks.first:
        write(folder, run, parameters, in_files)
    run.ranks.from_first(None)  # the others wait until it is written


def write(folder: Path, run, parameters: dict[str, Tensor], in_files: set[str]) -> None:
    """Write the checkpoint of `save`."""
    optimizer, progress = run.optimizer, run.progress
    tensors, numbers = {}, {}
    for name, parameter in parameters.items():
        if name not in in_files:
            tensors[f"weights {name}"] = parameter.data
        for key, value in optimizer.state.get(parameter, {}).items():
            kept = tensors if isinstance(value, Tensor) else numbers
            kept[f"{key} {name}"] = value
    with folders.new_checkpoint(folder, progress.step) as unfinished:
        run.models.policy.save_pretrained(unfinished)
        run.tokenizer.save_pretrained(unfinished)
        trainer = unfinished / "trainer"
        trainer.mkdir()
        state = trainer / "state.safetensors"
        safetensors.torch.save_file(tensors, state, {"numbers": json.dumps(numbers)})
        folders.write_json(trainer / "progress.json", dataclasses.asdict(progress))


@contextlib.contextmanager
def saved_flags(config) -> Iterator[dict]:
    """Yield the flags of the run that --resume continues. UserError if they cannot be used."""
    need(config.name, "--resume: needs --name, of the run to continue")
    path = Path(config.runs, config.name, "config.json")
    with expecting(f"--resume: expected the --name of a run of this train.py, with {path}"):
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
        known = vars(config).keys() - {"resume", "runs", "name"}
        yield {name: saved[name] for name in saved.keys() & known}


def check_kept(config, saved: dict) -> None:
    """UserError for a flag that a resumed run must keep, and that has changed."""
    kept = KEPT if config.lr_schedule == "constant" else (*KEPT, "steps")  # where the lr is 0
    for name in kept:
        before = saved.get(name, getattr(config, name))
        same = getattr(config, name) == before
        need(same, f"{dashed(name)}: a resumed run keeps its own, {before}")


def newest(config) -> tuple[Path | None, Progress]:
    """Return the newest checkpoint of the run, and how far it is. UserError if it is complete."""
    saved = None
    if config.resume:  # the run may have been stopped before its first
        saved = next(reversed(folders.checkpoints(Path(config.runs, config.name))), None)
        say(f"resume: from {saved}" if saved else "resume: no checkpoint yet, from the start")
    if saved is None:
        return None, Progress()
    progress = Progress(**json.loads((saved / "trainer/progress.json").read_text()))
    complete = f"{saved} has {progress.step} steps already; pass a larger --steps"
    page = f"for its report: python train.py --report {Path(config.runs, config.name)}"
    need(progress.step < config.steps, f"--steps {config.steps}: {complete}; {page}")
    return saved, progress


def restore(saved: Path, config, models, optimizer) -> None:
    """Read the state that `save` wrote. UserError if --model is not the base of an adapter."""
    parameters, in_files = parameters_of(models, config)
    with safetensors.safe_open(saved / "trainer/state.safetensors", "pt") as file:
        entries = {entry: file.get_tensor(entry) for entry in file.keys()}  # noqa: SIM118
        entries |= json.loads(file.metadata()["numbers"])
    state = {name: {} for name in parameters}
    for entry, value in entries.items():
        key, _, name = entry.rpartition(" ")
        state[name][key] = value
    for name in sorted(parameters.keys() - in_files):
        parameters[name].data.copy_(state[name].pop("weights"))
    names = {parameter: name for name, parameter in parameters.items()}
    trained = [names[each] for group in optimizer.param_groups for each in group["params"]]
    by_index = {index: state[name] for index, name in enumerate(trained)}
    # the optimiser moves and casts what it loads, and keeps the groups that it has
    optimizer.load_state_dict(optimizer.state_dict() | {"state": by_index})
    if config.lora_rank:
        from support.extras.lora import check_base

        check_base(models.policy, saved)


def parameters_of(models, config) -> tuple[dict[str, Tensor], set[str]]:
    """Return all parameters of a checkpoint, by name, and the names in the policy's own files."""
    modules = {"policy": models.policy}
    if models.critic:
        modules["critic"] = models.critic
    if models.ref_policy:
        modules["ref_policy"] = models.ref_policy
    if config.stale_steps > 1:
        modules["sampler"] = models.sampling_model
    names = {}  # parameter -> its first name, if modules share it
    for part, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(parameter, f"{part}.{name}")
    parameters = {name: parameter for parameter, name in names.items()}
    return parameters, {f"policy.{name}" for name in modules["policy"].state_dict()}
