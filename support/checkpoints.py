"""A run's checkpoint: the policy in its own files, and beside it all that a resumed run needs."""

import dataclasses
import json
import time
import zlib
from pathlib import Path

import safetensors.torch
from torch import Tensor

from support import run_folder
from support.console import say
from support.errors import dashed, expecting, need

# flags that a resumed run can't change: its checkpoint or its place in the prompts wouldn't fit
KEPT = ("algo", "model", "task", "seed", "lora_rank", "lora_alpha", "lr_schedule", "kl_coef")
KEPT += ("stale_steps",)
# flags that decide on an evaluation's numbers, besides its prompts
EVALUATION = ("reward", "max_new_tokens", "stop", "tool", "sampler", "temperature", "eval_samples")


@dataclasses.dataclass
class Progress:
    """The state of a run besides its tensors."""

    step: int = 0  # rollout steps so far
    began: float = dataclasses.field(default_factory=time.time)
    seconds: float = 0.0  # of all starts of the run
    prompts_drawn: int = 0
    bad_in_a_row: int = 0  # updates skipped because they were not finite
    quiet_steps: int = 0  # in a row, without any advantage
    before: dict = dataclasses.field(default_factory=dict)  # the evaluation before training
    evaluation: str = ""  # fingerprint of that evaluation's prompts and flags
    data: str = ""  # number and fingerprint of the rows of --data


def save(folder: Path, run) -> None:
    """Write checkpoints/step-N from the first process, in Hugging Face layout beside trainer/.

    trainer/state.safetensors has everything that the optimizer keeps of a parameter, as `KEY NAME`,
    and `weights NAME` unless the policy's own files have them. Learning rates come from the
    flags."""
    parameters, in_files = parameters_of(run.models, run.config)
    trained = [each for group in run.optimizer.param_groups for each in group["params"]]
    assert set(trained) <= set(parameters.values()), "a trained model is missing in parameters_of"
    sums = run.ranks.gather([float(each.detach().float().sum()) for each in trained])
    assert sums == [sums[0]] * len(sums), "the processes have different weights"
    if run.ranks.first:
        write(folder, run, parameters, in_files)
    run.ranks.from_first(None)  # the others wait until it is written


def write(folder: Path, run, parameters: dict[str, Tensor], in_files: set[str]) -> None:
    optimizer, progress = run.optimizer, dataclasses.asdict(run.progress)
    tensors, numbers = {}, {}
    for name, parameter in parameters.items():
        if name not in in_files:
            tensors[f"weights {name}"] = parameter.data
        for key, value in optimizer.state.get(parameter, {}).items():
            kept = tensors if isinstance(value, Tensor) else numbers
            kept[f"{key} {name}"] = value
    with run_folder.new_checkpoint(folder, run.progress.step) as unfinished:
        run.models.policy.save_pretrained(unfinished)
        run.tokenizer.save_pretrained(unfinished)
        trainer = unfinished / "trainer"
        trainer.mkdir()
        state = trainer / "state.safetensors"
        safetensors.torch.save_file(tensors, state, {"numbers": json.dumps(numbers)})
        progress["seal"] = seal(unfinished, progress)
        run_folder.write_json(trainer / "progress.json", progress)


def seal(checkpoint: Path, progress: dict) -> str:
    """Return a fingerprint of a checkpoint's progress and of its tensors' names and shapes. Files
    that are cut off raise an error."""
    content = [sorted(progress.items())]
    for path in sorted(checkpoint.rglob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:  # reads no more than the header
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            content += [path.name, sorted(shapes.items()), sorted(file.metadata().items())]
    return fingerprint(content)


def fingerprint(value) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def saved_flags(config) -> dict:
    """Return the flags of the run that --resume continues, from its config.json."""
    need(config.name, "--resume: needs --name, that of the run to continue")
    path = Path(config.runs, config.name, "config.json")
    with expecting(f"--resume: expected the --name of a run of this train.py, with {path}"):
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
    known = vars(config).keys() - {"resume", "runs", "name"}
    return {name: saved[name] for name in saved.keys() & known}


def check_kept(config, saved: dict) -> None:
    """Raise UserError for a changed flag that a resumed run must keep."""
    kept = KEPT if config.lr_schedule == "constant" else (*KEPT, "steps")  # where the lr is 0
    for name in kept:
        before = saved.get(name, getattr(config, name))
        same = getattr(config, name) == before
        need(same, f"{dashed(name)}: a resumed run keeps its own, {before}")


def newest(config) -> tuple[Path | None, Progress]:
    """Return the checkpoint to resume from and its progress, or None for a new run. UserError if
    there is none, if it is damaged, or if the run is complete."""
    if not config.resume:
        return None, Progress()
    folder = Path(config.runs, config.name)
    *earlier, saved = run_folder.checkpoints(folder) or [None]
    anew = "start anew under another --name"
    need(saved, f"--resume: {folder}/checkpoints has no checkpoint, or isn't mounted; else {anew}")
    say(f"resume: from {saved}")
    instead = f"move it away to resume from {earlier[-1]}" if earlier else anew
    with expecting(f"--resume: {saved} is damaged; {instead}"):
        progress = json.loads((saved / "trainer/progress.json").read_text())
        sealed = progress.pop("seal", None)  # older checkpoints have none
        need(sealed in (None, seal(saved, progress)), "its files are not those that were saved")
        known = vars(Progress()).keys() & progress.keys()  # older ones may have others
        progress = Progress(**{name: progress[name] for name in known})
    complete = f"{saved} has {progress.step} steps already; pass a larger --steps"
    page = f"for its report: python train.py --report {folder}"
    need(progress.step < config.steps, f"--steps {config.steps}: {complete}; {page}")
    return saved, progress


def compare_data(progress: Progress, config, rows, held_out: list[dict]) -> None:
    """Warn if the rows of --data have changed since the checkpoint. Forget its first evaluation if
    today's prompts or flags would give another: then one of today is the first."""
    if config.data:
        data = f"{len(rows)} rows with hash {fingerprint(rows)}"
        if progress.data not in ("", data):
            say(f"warning: --data {config.data} has {data}, but until now it had {progress.data}")
        progress.data = data
    evaluation = fingerprint([[getattr(config, name) for name in EVALUATION], held_out])
    if progress.before and progress.evaluation != evaluation:
        say("resume: evaluations have other prompts or flags than before, so the first is repeated")
        progress.before = {}
    progress.evaluation = evaluation


def restore(saved: Path, config, models, optimizer) -> None:
    """Load the state that `save` wrote. UserError if --model is not the adapter's base."""
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
    # the optimizer moves and casts what it loads, and keeps its own groups
    optimizer.load_state_dict(optimizer.state_dict() | {"state": by_index})
    if config.lora_rank:
        from support.extras.lora import check_base

        check_base(models.policy, saved)


def parameters_of(models, config) -> tuple[dict[str, Tensor], set[str]]:
    """Return a checkpoint's parameters by name, and the names that the policy's own files have."""
    modules = {"policy": models.policy, "critic": models.critic, "ref_policy": models.ref_policy}
    if config.stale_steps > 1:
        modules["sampler"] = models.sampling_model
    names = {}  # parameter -> its first name: a value head on the policy shares all of its weights
    for part in filter(modules.get, modules):
        for name, parameter in modules[part].named_parameters():
            names.setdefault(parameter, f"{part}.{name}")
    parameters = {name: parameter for parameter, name in names.items()}
    return parameters, {f"policy.{name}" for name in modules["policy"].state_dict()}
