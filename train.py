"""Train a language model with GSPO, or another row of gspo.ALGOS, on rewards from a verifier.

    python train.py --algo gspo                          # tiny built-in policy, nothing downloaded
    python train.py --algo gspo --model Qwen/Qwen3-0.6B --data train.jsonl --reward math

`train`, near the end, is the loop: read it first. `policy` learns, `old_policy` samples, and a KL
is measured to `ref_policy`. A flag with `extra=NAME` is done by support/NAME.py, and refused where
that file was deleted."""

import os

# PyTorch's threads wait for each other by spinning. Where another process wants their cores, that
# takes ten times as long as the work; so they spin briefly, and sleep. It is read as torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import collections
import contextlib
import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import random
import re
import shlex
import signal
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

import gspo
import rewards
import rollout
from support import console, data, folders
from support.attention import checkpoint_layers
from support.console import percent, say
from support.credit import own_tokens, placed
from support.data import expecting, need, printable
from support.flags import ELSEWHERE, dashed, extra, flag, parse
from support.metrics import drift, of_critic, of_teacher
from support.models import critic_of, frozen_copy, has_experts, refresh
from support.ranks import Ranks, joined_ranks
from support.tasks import BUILT_IN, TASKS, built_in_policy, problems

# ---- flags ---------------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclasses.dataclass
class OwnFlags:
    """The flags of this file. None: the algorithm, the model or the task decides, in
    `fill_defaults`. The numbers of the objectives come from gspo.py, below."""

    algo: str = flag("gspo", "algorithm", heading="what to run", choices=tuple(gspo.ALGOS))
    model: str = flag("tiny", "built in (tiny, tiny-moe), a folder, or a name on the hub")
    task: str = flag("arithmetic", "built-in problems", choices=tuple(TASKS))
    data: str | None = flag(None, "JSONL file to train on: prompt and answer")
    eval_data: str | None = flag(None, "JSONL file of held-out rows, else a tenth", needs="data")
    reward: str | None = flag(None, "'math + 0.1*format' or file.py:function; default: as the task")
    teacher: str | None = flag(None, "OPD: a larger model, folder or hub name")
    tool: str | None = flag(None, "answers: calculator, or file.py:function@TEXT", extra="tools")
    steps: int = flag(50, "rollout steps", low=1)
    seed: int = flag(0, "decides on problems, samples, shuffles, adapters", low=0)

    system: str | None = flag(None, "system message, for chat templates", heading="prompts")
    chat_template_args: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    prompt_template: str = flag("{prompt}", "text around the prompt, with {prompt} in it")

    prompts_per_step: int = flag(32, "prompts P of a rollout step", heading="rollout", low=1)
    group_size: int = flag(8, "completions G of a prompt", low=2)
    max_new_tokens: int | None = flag(None, "of a completion; default the task's, or 1024", low=1)
    temperature: float = flag(1.0, "divides the logits, in sampling and in scoring", above=0)
    cache_gb: float | None = flag(None, "for keys and values; default what is free", above=0)
    old_logprobs: str = flag("trainer", "whose are pi_old's", choices=("trainer", "sampler"))
    stale_steps: int = flag(1, "steps between refreshes of the sampler", low=1)
    tis_cap: float | None = flag(None, "bounds importance weights, sampler to pi_old", above=0)

    kl_coef: float | None = flag(
        None, "weight of the KL to the reference; GRPO 0.04", heading="objective", low=0
    )
    ref_every: int = flag(0, "steps between refreshes of the reference", low=0, needs="kl_coef")
    entropy_coef: float = flag(0.0, "bonus per nat of the mean entropy", low=0)
    dynamic_sampling: bool | None = flag(None, "refill groups whose completions are paid alike")
    overlong_cache: int | None = flag(None, "tokens before the limit that cost", low=0)
    overlong_filter: bool = flag(False, "truncated completions leave the loss")
    routing_replay: bool = flag(False, "train with the experts that pi_old chose", extra="experts")

    completions_per_update: int | None = flag(None, "default 1/4", heading="optimiser", low=1)
    epochs: int = flag(1, "passes over a rollout", low=1)
    lr: float | None = flag(None, "of AdamW; default 2e-4 for built-in models, else 1e-6", above=0)
    critic_lr: float | None = flag(None, "of PPO's critic; default 10 x lr", above=0)
    warmup_steps: int | None = flag(None, "of the lr; default 0 for built-in, else 10", low=0)
    max_grad_norm: float = flag(1.0, "gradient clipping", above=0)
    micro_batch_tokens: int = flag(16384, "tokens of one forward and backward", low=1)
    gradient_checkpointing: bool = flag(False, "less memory for activations, but slower")
    lora_rank: int = flag(0, "train an adapter of this rank; 0: all weights", low=0, extra="lora")
    lora_alpha: float | None = flag(None, "its scale; default 2 x rank", above=0, needs="lora_rank")

    eval_every: int = flag(10, "steps; 0: before and after", heading="evaluation", low=0)
    eval_prompts: int = flag(256, "held-out prompts, greedy", low=1)
    eval_samples: int = flag(8, "k of pass@k, before and after; 0: none", low=0)

    name: str | None = flag(None, "folder of the run; default: algorithm, number", heading="run")
    runs: str = flag("runs", "folder of all runs")
    resume: bool = flag(False, "go on from the newest checkpoint of --name, with its flags")
    save_every: int = flag(10, "steps between checkpoints; 0: the last only", low=0)
    track: str | None = flag(None, "send metrics there, too", choices=TRACKERS, extra="trackers")
    device: str = flag(DEVICE, "where all of it runs", choices=("cuda", "cpu", "mps"))
    dtype: str | None = flag(None, "default bfloat16 on CUDA", choices=("float32", "bfloat16"))


def numbers(config, function: Callable) -> dict:
    """The keyword-only parameters of a function in gspo.py, as the flags say."""
    return {name: getattr(config, name) for name in numbers_of(function)}


def numbers_of(function: Callable) -> dict[str, typing.Any]:
    """The keyword-only parameters of a function in gspo.py, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def numbers_of_algorithm(algorithm: gspo.Algorithm) -> dict[str, typing.Any]:
    """Flag -> default of every number in its objective, but for those that all runs have."""
    numbers = numbers_of(algorithm.loss) | numbers_of(algorithm.advantages)
    if algorithm.reads == "values":
        numbers |= numbers_of(gspo.value_loss)
    return {name: default for name, default in numbers.items() if not hasattr(OwnFlags, name)}


def objective_flags() -> list[tuple[str, type, dataclasses.Field]]:
    """A flag for each number of the objectives; --help lists the default of each algorithm."""
    defaults = collections.defaultdict(dict)  # flag -> default -> algorithms
    for algo, row in gspo.ALGOS.items():
        for name, default in numbers_of_algorithm(row).items():
            defaults[name].setdefault(default, []).append(algo)
    flags, heading = [], "numbers of the objective"
    for name, algos in defaults.items():
        rules = {"help": name.replace("_", " "), **gspo.NUMBERS.get(name, {})}
        of_each = "; ".join(f"{default} {', '.join(those)}" for default, those in algos.items())
        text = f"{rules.pop('help')}; default {of_each}"
        kind = next((type(each) for each in algos if isinstance(each, (str, bool))), float)
        flags.append((name, kind | None, flag(None, text, heading=heading, **rules)))
        heading = None
    return flags


# Every flag. A keyword-only parameter that is added to a loss in gspo.py is a flag at once
Config = dataclasses.make_dataclass("Config", objective_flags(), bases=(OwnFlags,))

# what a resumed run cannot change: its weights are of these
KEPT_FLAGS = ("algo", "model", "task", "lora_rank", "lora_alpha")
SHOWN_PROMPTS = 4  # of a step in samples.jsonl, of an evaluation in report.html
MAX_REFILLS = 4  # further rollouts of a step, for dynamic sampling
MAX_BAD_UPDATES = 5  # in a row, skipped as something was not finite; one more ends the run


def parse_flags(arguments: list[str]) -> Config:
    """The flags of a run, checked, with their defaults. UserError for what cannot be."""
    config = parse(Config, __doc__, arguments, elsewhere=ELSEWHERE)
    if config.resume:
        saved = saved_flags(config)
        with expecting(f"--resume: expected the flags of a run in {config.runs}/{config.name}"):
            config = parse(Config, __doc__, arguments, defaults=saved, elsewhere=ELSEWHERE)
        for name in KEPT_FLAGS:
            same = getattr(config, name) == saved.get(name, getattr(config, name))
            need(same, f"{dashed(name)}: a run that is resumed keeps its own, {saved.get(name)}")
    refuse_flags_of_others(config)
    fill_defaults(config)
    check_together(config)
    return config


def saved_flags(config: Config) -> dict:
    """Those of the run that --resume goes on with; what has come since has its default."""
    need(config.name, "--resume: needs --name, of the run to go on with")
    path = Path(config.runs, config.name, "config.json")
    with expecting(f"--resume: expected the --name of a run of this train.py, with {path}"):
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
    known = {field.name for field in dataclasses.fields(Config)}
    return {name: saved[name] for name in saved.keys() & known - {"resume", "runs", "name"}}


# flags of the algorithms whose advantages read these
FLAGS_OF_INPUTS = {"values": {"critic_lr"}, "teacher": {"teacher"}}


def refuse_flags_of_others(config: Config) -> None:
    """UserError for a flag of other algorithms: it would do nothing."""
    flags = {}
    for algo, row in gspo.ALGOS.items():
        flags[algo] = numbers_of_algorithm(row).keys() | FLAGS_OF_INPUTS.get(row.reads, set())
    for name in sorted(set().union(*flags.values()) - flags[config.algo]):
        those = " or ".join(algo for algo in flags if name in flags[algo])
        value = getattr(config, name)
        need(value is None, f"{dashed(name)} {value}: {config.algo} has none; --algo {those} has")


def fill_defaults(config: Config) -> None:
    """Replaces each None that stands for what the algorithm, the model or the task wants."""
    algorithm, task = gspo.ALGOS[config.algo], TASKS[config.task]
    built_in = config.model in BUILT_IN

    def default(name, value):
        if getattr(config, name) is None:
            setattr(config, name, value)

    if algorithm.reads == "teacher":  # a reward that is asked for adds up
        default("reward_coef", 1.0 if config.reward else 0.0)
    if config.data and not built_in:
        default("reward", "math")
        default("max_new_tokens", 1024)
    else:
        default("tool", task.tool)
    default("reward", task.verifier)
    default("max_new_tokens", task.max_new_tokens)
    default("dtype", "bfloat16" if config.device == "cuda" else "float32")

    lr = 2e-4 if built_in else 1e-6
    if config.lora_rank:
        lr *= 10
        default("lora_alpha", 2.0 * config.lora_rank)
    default("lr", lr)
    default("warmup_steps", 0 if built_in else 10)

    default("kl_coef", algorithm.kl_coef)
    default("dynamic_sampling", algorithm.dynamic_sampling)
    default("overlong_cache", config.max_new_tokens // 5 if algorithm.overlong_shaping else 0)
    if algorithm.reads == "values":
        default("critic_lr", 10 * config.lr)
    for name, number in numbers_of_algorithm(algorithm).items():
        default(name, number)

    completions = config.prompts_per_step * config.group_size
    divisors = (k for k in range(1, completions + 1) if completions % k == 0)
    default("completions_per_update", next(k for k in divisors if 4 * k >= completions))


def check_together(config: Config) -> None:
    """UserError for flags that do not fit each other, or this machine."""
    for field in dataclasses.fields(config):
        other = field.metadata["needs"]
        if other and getattr(config, field.name) != field.default:
            need(getattr(config, other), f"{dashed(field.name)}: needs {dashed(other)}")
    if config.tool:  # the task may have brought it
        need(
            extra("tools"),
            f"--tool {config.tool}: needs support/extras/tools.py, which is not here",
        )
    completions = config.prompts_per_step * config.group_size
    each = config.completions_per_update
    need(completions % each == 0, f"--completions-per-update {each}: no divisor of {completions}")
    if config.old_logprobs == "sampler":
        need(not config.tis_cap, "--tis-cap: needs --old-logprobs trainer")
        need(not config.routing_replay, "--routing-replay: needs --old-logprobs trainer")
    one = config.prompt_template.count("{prompt}") == 1
    need(one, "--prompt-template: expected one {prompt} in it")
    fits = config.overlong_cache <= config.max_new_tokens
    need(fits, f"--overlong-cache {config.overlong_cache}: more than --max-new-tokens")
    readable = TASKS[config.task].alphabet or config.model not in BUILT_IN
    need(readable, f"--task {config.task}: needs a --model that can read")
    if config.name is not None:
        fits = re.fullmatch(r"\w[\w.+-]{0,99}", config.name)
        need(fits, f"--name {config.name}: expected letters, digits, ._+-")
        taken = not config.resume and folders.is_run(Path(config.runs, config.name))
        need(not taken, f"--name {config.name}: that run is there; new name or --resume?")
    tracks = config.track is None or importlib.util.find_spec(config.track)
    need(tracks, f"--track {config.track}: needs pip install {config.track}")
    here = torch.get_device_module(config.device).is_available()
    need(here, f"--device {config.device}: there is none here")
    taught = gspo.ALGOS[config.algo].reads != "teacher" or config.teacher
    need(taught, f"--algo {config.algo}: needs a --teacher")


# ---- start ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Progress:
    """What a resumed run must know beside tensors; part of each checkpoint."""

    step: int = 0  # rollout steps done
    began: float = dataclasses.field(default_factory=time.time)
    prompts_drawn: int = 0
    bad_in_a_row: int = 0  # updates that were skipped, as something was not finite
    # terms of the reward that do not count in `solved`
    shaping: list[str] = dataclasses.field(default_factory=list)
    before: dict = dataclasses.field(default_factory=dict)  # the evaluation before the first step


@dataclasses.dataclass
class Run:
    """All that a run holds."""

    config: Config
    algorithm: gspo.Algorithm
    ranks: Ranks

    # input
    tokenizer: transformers.PreTrainedTokenizerBase
    reward: rewards.Reward
    generate: Callable  # rollout.generate, or with a tool that answers
    prompts: Iterator[dict]  # rows to train on, without end
    held_out: list[dict]

    # the three policies, and what learns
    policy: transformers.PreTrainedModel  # pi_theta
    old_policy: transformers.PreTrainedModel  # the sampler: pi_theta itself, or a copy, or older
    ref_policy: transformers.PreTrainedModel | None  # only with --kl-coef
    critic: torch.nn.Module | None  # only where advantages read values
    teacher: transformers.PreTrainedModel | None  # only where they read its log-probs
    optimizer: torch.optim.Optimizer
    ends: dict  # eos_ids and pad_id

    # in progress
    progress: Progress
    folder: Path | None = None
    lock: typing.IO | None = None  # stays open: nobody else writes into the folder
    tracker: Callable[[dict], None] | None = None  # takes the rows of metrics.jsonl, too
    began: float = dataclasses.field(default_factory=time.time)
    seconds: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    answers: list[dict] = dataclasses.field(default_factory=list)  # some, of the last evaluation
    warned: set[str] = dataclasses.field(default_factory=set)
    quiet_steps: int = 0  # steps in a row that taught nothing
    stopping: bool = False  # a signal came: the run ends after this step

    def autocast(self):
        enabled = self.config.dtype == "bfloat16"
        return torch.autocast(self.config.device, torch.bfloat16, enabled=enabled)

    def logprobs(self, model, samples: rollout.Rollout) -> tuple[Tensor, Tensor]:
        """Log-probs and, with gradients, entropies (N, T): one path for the policy, pi_old and the
        reference."""
        config = self.config
        entropy_grad = None  # nobody reads entropies of the other passes
        if torch.is_grad_enabled():
            entropy_grad = config.entropy_coef > 0
        with self.autocast():
            return rollout.completion_logprobs(
                model, samples, config.temperature, entropy_grad=entropy_grad
            )

    def values(self, samples: rollout.Rollout) -> Tensor:
        """The critic's values (N, T)."""
        with self.autocast():
            return rollout.completion_values(self.critic, samples)

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the seconds within to the metric of the phase."""
        begun = time.perf_counter()
        yield
        torch.get_device_module(self.config.device).synchronize()
        self.seconds[f"seconds_{phase}"] += time.perf_counter() - begun

    def warn(self, kind: str, message: str) -> None:
        """Says it once a run."""
        if kind not in self.warned:
            self.warned.add(kind)
            say(f"warning: {printable(message)}")


def start(config: Config, ranks: Ranks) -> Run:
    """A run that can begin. What can be wrong with the input is found before weights load; nothing
    is written before the policy has been evaluated."""
    reward = rewards.parse_reward(config.reward, config.device)
    rows, held_out = read_data(config, reward)
    saved, progress = checkpoint_to_resume(config)
    source, tokenizer, model_config = find_model(config, ranks)
    vocabulary = model_config.get_text_config().vocab_size
    context = rollout.context_of(model_config)
    form = data.PromptFormat(tokenizer, config, vocabulary, context)
    held_out = form.encode_rows(list(itertools.islice(held_out, config.eval_prompts)), "held out")
    if config.data:
        rows = form.encode_rows(rows, f"--data {config.data}")
        prompts = data.shuffled_epochs(rows, config.seed)
    else:
        prompts = form.encode_problems(rows)
    fewest = min(len(held_out), config.prompts_per_step)
    need(ranks.size <= fewest, f"{ranks.size} processes: at most one for each of {fewest} prompts")
    generate = rollout.generate
    if config.tool:
        tools = extra("tools")
        generate = tools.Turns(generate, tools.parse_tool(config.tool), tokenizer)
    say(f"first held-out prompt: '{printable(tokenizer.decode(held_out[0]['ids']))}'")

    # with adapters a checkpoint's weights are merged; the frozen ones are those of the beginning
    weights = source if config.lora_rank or not saved else str(saved)
    policy = rollout.load_model(weights, config.device)
    ends = rollout.end_and_pad_ids(policy, tokenizer)
    rollout.check_scorer(policy, [row["ids"][-64:] for row in held_out[:2]], ends["pad_id"])
    if config.gradient_checkpointing:
        checkpoint_layers(policy)
    run = Run(
        config=config,
        algorithm=gspo.ALGOS[config.algo],
        ranks=ranks,
        tokenizer=tokenizer,
        reward=reward,
        generate=generate,
        prompts=itertools.islice(prompts, progress.prompts_drawn, None),
        held_out=held_out,
        progress=progress,
        ends=ends,
        **policies(config, policy),
    )
    run.reward.shaping.update(progress.shaping)
    if saved:
        path = saved / "trainer/state.safetensors"
        folders.read_state(path, *trainer_state(run), config.device)
    if saved and config.lora_rank:
        extra("lora").check_base(run.policy, saved)
    first_evaluation(run)
    own_folder(run)
    return run


def find_model(config: Config, ranks: Ranks) -> tuple[str, typing.Any, typing.Any]:
    """Where it is, its tokenizer and its config; a built-in one is made by the first process."""
    source = config.model
    if source in BUILT_IN and ranks.first:
        source = str(built_in_policy(TASKS[config.task], source))
    source = ranks.from_first(source)
    tokenizer, model_config = rollout.inspect_model(source)
    fits = has_experts(model_config) or not config.routing_replay
    need(fits, "--routing-replay: needs a mixture of experts")
    if config.teacher:
        its_tokenizer, _ = rollout.inspect_model(config.teacher, "--teacher")
        same = its_tokenizer.get_vocab() == tokenizer.get_vocab()
        need(same, f"--teacher {config.teacher}: expected the tokens of --model {config.model}")
    return source, tokenizer, model_config


def read_data(config: Config, reward: rewards.Reward) -> tuple[Iterable[dict], Iterable[dict]]:
    """Rows to train on, of a file or problems without end, and held-out ones."""
    if config.data is None:
        task = TASKS[config.task]
        reward.check(list(itertools.islice(problems(task, config.seed), 1)))
        return problems(task, config.seed), problems(task, config.seed, held_out=True)
    rows = data.read_rows(config.data, "--data", reward.check_answer)
    reward.check(rows)
    if config.eval_data:
        held_out = data.read_rows(config.eval_data, "--eval-data", reward.check_answer)
    else:
        rows, held_out = data.hold_out(rows, f"--data {config.data}")
    return rows, held_out


def checkpoint_to_resume(config: Config) -> tuple[Path | None, Progress]:
    """The newest one of the run, and how far it is; UserError where no step is left."""
    saved = None
    if config.resume:  # it may have been stopped before its first
        saved = next(reversed(folders.checkpoints(Path(config.runs, config.name))), None)
        say(f"resume: from {saved}" if saved else "resume: no checkpoint yet, from the start")
    if saved is None:
        return None, Progress()
    with expecting(f"--resume: expected how far the run is in {saved}/trainer/progress.json"):
        progress = Progress(**json.loads((saved / "trainer/progress.json").read_text()))
    left = progress.step < config.steps
    need(
        left, f"--steps {config.steps}: {saved} has {progress.step} of the whole run; ask for more"
    )
    return saved, progress


def policies(config: Config, policy) -> dict:
    """The fields of Run that are models, and the optimiser of those that learn."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    old_policy, ref_policy, critic, teacher = policy, None, None, None
    # nothing moves while the policy samples: in float32 on one step's weights it needs no copy
    if dtype != torch.float32 or config.stale_steps > 1 or config.lora_rank:
        old_policy = frozen_copy(policy, dtype)
    if config.kl_coef:
        ref_policy = frozen_copy(policy, dtype)
    if config.teacher:
        teacher = frozen_copy(rollout.load_model(config.teacher, config.device), dtype)
    if config.lora_rank:
        extra("lora").add_adapters(policy, config, dtype)
    groups = [learner("", policy, config.lr)]
    if gspo.ALGOS[config.algo].reads == "values":
        critic = critic_of(policy)
        groups.append(learner("critic_", critic, config.critic_lr))
    return {
        "policy": policy,
        "old_policy": old_policy,
        "ref_policy": ref_policy,
        "critic": critic,
        "teacher": teacher,
        "optimizer": torch.optim.AdamW(groups, weight_decay=0.0, fused=config.device != "mps"),
    }


def learner(prefix: str, module: torch.nn.Module, lr: float) -> dict:
    """A group of the optimiser; prefix: of the metric that is the norm of its gradient."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    return {"params": parameters, "initial_lr": lr, "norm": f"{prefix}grad_norm"}


def first_evaluation(run: Run) -> None:
    """How good the policy is before the first step; a resumed run has it in its checkpoint."""
    config, policy = run.config, run.policy
    learn, every = policy.num_parameters(only_trainable=True), policy.num_parameters()
    size = f"{learn / 1e6:.1f} of {every / 1e6:.1f} M parameters learn"
    say(f"{config.algo}, {size}, {config.device} {config.dtype}, --reward {config.reward}")
    if config.steps <= config.warmup_steps:
        say(f"a smoke test: --steps {config.steps} end inside --warmup-steps {config.warmup_steps}")
    if run.progress.step == 0:
        run.progress.before = evaluate(run, pass_k=config.eval_samples)
    say(f"{len(run.held_out)} prompts held out, before step 1: {percent(run.progress.before)}")


def own_folder(run: Run) -> None:
    """The run's folder and its lock, for this run alone; the first of its processes makes it."""
    config = run.config
    if run.ranks.first:
        folder = folders.make_folder(config.runs, config.name, config.algo)
        run.lock = folders.lock(folder)
        config.name = folder.name
        folders.write_json(folder / "config.json", dataclasses.asdict(config))
        for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
            folders.cut_back(folder / name, run.progress.step or -1)  # a fresh start keeps none
        command = shlex.join(["python", "train.py", *sys.argv[1:]])
        date = time.strftime("%Y-%m-%d")
        begin = {"date": date, "command": command, "step": 0, **run.progress.before}
        folders.append_rows(folder / "starts.jsonl", [begin])
        folders.append_rows(folder / "evaluations.jsonl", run.answers)
        if config.track:
            trackers, done, began = extra("trackers"), run.progress.step, run.progress.began
            run.tracker = trackers.open_tracker(config.track, folder, vars(config), began, done)
    config.name = run.ranks.from_first(config.name)
    run.folder = Path(config.runs, config.name)


# ---- sampling and judging ------------------------------------------------------------------------


@dataclasses.dataclass
class Judged:
    """Completions with their texts, the rows of data behind them, and their scores."""

    samples: rollout.Rollout
    texts: list[str]
    rows: list[dict]
    scores: list[rewards.Score]

    @staticmethod
    def join(parts: list["Judged"], pad_id: int) -> "Judged":
        return Judged(
            samples=rollout.Rollout.cat([part.samples for part in parts], pad_id),
            texts=[text for part in parts for text in part.texts],
            rows=[row for part in parts for row in part.rows],
            scores=[score for part in parts for score in part.scores],
        )

    def readable(self, i: int, step: int) -> dict:
        """One completion, for a person: a row of samples.jsonl or evaluations.jsonl."""
        return {
            "step": step,
            "prompt": data.text_of(self.rows[i]["prompt"]),
            "answer": self.rows[i]["answer"],
            "completion": self.texts[i],
            "reward": self.scores[i].reward,
        }

    def __getitem__(self, chosen: list[int]) -> "Judged":
        columns = (self.texts, self.rows, self.scores)
        return Judged(self.samples[chosen], *([each[i] for i in chosen] for each in columns))


def sample(
    run: Run, model, prompts: list[dict], group_size: int, temperature: float, seed: str
) -> Judged:
    """group_size completions of each prompt, judged; the same seed text gives the same.

    Each process works on its share of the prompts, and gets the completions of all."""
    config, ranks = run.config, run.ranks
    number = random.Random(f"{config.seed} {seed}").getrandbits(60)
    generator = torch.Generator().manual_seed(number)
    shape = (len(prompts), group_size, config.max_new_tokens)
    uniforms = torch.rand(shape, generator=generator)  # of all: a share is what it is among all
    own = ranks.share(prompts)
    with run.timer("sample"):
        samples = run.generate(
            model,
            [row["ids"] for row in own],
            ranks.share(uniforms),
            temperature=temperature,
            cache_gb=config.cache_gb,
            **run.ends,
        )
    with run.timer("score"):
        judged = judge(run, samples, [row for row in own for _ in range(group_size)])
    if ranks.size == 1:
        return judged
    judged.samples = judged.samples.to("cpu")
    everything = Judged.join(ranks.gather(judged), run.ends["pad_id"])
    everything.samples = everything.samples.to(config.device)
    return everything


def judge(run: Run, samples: rollout.Rollout, rows: list[dict]) -> Judged:
    """What the reward says of completions; it may ask for the number of their tokens."""
    texts, lengths = [], samples.lengths.tolist()
    for ids, length in zip(samples.completions.tolist(), lengths):
        texts.append(run.tokenizer.decode(ids[:length], skip_special_tokens=True))
    rows = [{**row, "tokens": length} for row, length in zip(rows, lengths)]
    return Judged(samples, texts, rows, run.reward.score(texts, rows))


def verdicts(run: Run, scores: list[rewards.Score], group_size: int):
    """What completions were paid before shaping, and how right they are, in [0, 1]: (P, G) each;
    None for the second where no verifier says what is right."""
    run.reward.note_shaping(scores)
    paid, correct = run.reward.verdicts(scores)
    paid = torch.tensor(paid, dtype=torch.float64).view(-1, group_size)
    if correct is not None:
        correct = torch.tensor(correct, dtype=torch.float64).view(-1, group_size)
    return paid, correct


# ---- phases of a step ----------------------------------------------------------------------------


@dataclasses.dataclass
class Update:
    """One optimiser step. The loss is a mean over its rows, of which the live ones can move it."""

    rows: Tensor  # (n,) indices into the batch
    live: Tensor  # those of them that take a forward pass
    # those of them that this process works on, and their completions, in micro-batches
    parts: list[tuple[Tensor, rollout.Rollout]]


@dataclasses.dataclass
class Batch:
    """One rollout step: N completions in groups of G, T tokens wide."""

    # collect
    step: int
    judged: Judged
    mask: Tensor  # (N, T) tokens that the loss sees
    # of all that was drawn, what was not kept included
    dead: Tensor  # (prompts drawn,) groups whose completions are paid alike
    correct: Tensor | None  # (prompts drawn, G)
    faults: list[str]  # of verifiers

    # score
    rewards: Tensor | None = None  # (N,) with shaping
    advantages: Tensor | None = None  # (N,) or (N, T), in `compare` if not rewards alone decide
    updates: list[Update] = dataclasses.field(default_factory=list)
    experts: typing.Any = (
        None  # of a mixture: what support/extras/experts.py saw the routers choose
    )

    # freeze: constants of the step, (N, T)
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None

    # compare
    returns: Tensor | None = None  # (N, T), the critic's targets

    # improve
    new_logprobs: Tensor | None = None  # (N, T), each row as its own update saw it
    first_logprobs: Tensor | None = None  # the same of the first update, when nothing had moved
    bad_updates: int = 0  # skipped, as something was not finite

    @property
    def samples(self) -> rollout.Rollout:
        return self.judged.samples

    @property
    def live(self) -> Tensor:
        return torch.cat([update.live for update in self.updates])

    def routing(self, rows: Tensor):
        """Around a pass of the policy over some rows."""
        if self.experts is None:
            return contextlib.nullcontext()
        return self.experts.over(rows)


def snapshot(run: Run) -> None:
    """The sampler takes pi_theta's weights, where it is a copy; pi_ref does every --ref-every."""
    config, done = run.config, run.progress.step
    if run.old_policy is not run.policy and done % config.stale_steps == 0:
        refresh(run.old_policy, run.policy)
    if config.ref_every and done > 0 and done % config.ref_every == 0:
        refresh(run.ref_policy, run.policy)


def collect(run: Run, step: int) -> Batch:
    """Sample and judge P groups; dynamic sampling goes on until P of them are not paid alike, or
    MAX_REFILLS are over."""
    config, size, drawn = run.config, run.config.group_size, []
    refills = MAX_REFILLS if config.dynamic_sampling else 0
    for attempt in range(1 + refills):
        prompts = list(itertools.islice(run.prompts, config.prompts_per_step))
        run.progress.prompts_drawn += len(prompts)
        seed = f"{step} {attempt}"
        drawn.append(sample(run, run.old_policy, prompts, size, config.temperature, seed))
        scores = [score for judged in drawn for score in judged.scores]
        paid, correct = verdicts(run, scores, size)
        dead = paid.amax(1) == paid.amin(1)
        kept = torch.arange(len(dead))
        if config.dynamic_sampling:
            kept = kept[~dead]
        kept = kept[: config.prompts_per_step].tolist()
        if len(kept) == config.prompts_per_step:
            break
    chosen = [size * group + member for group in kept or [0] for member in range(size)]
    judged = Judged.join(drawn, run.ends["pad_id"])[chosen]
    mask = judged.samples.completion_mask
    if config.overlong_filter:  # what was cut off leaves the loss, but not the attention
        mask = mask & ~judged.samples.truncated[:, None]
    if not kept:  # a batch is never empty, but this one teaches nothing
        mask = torch.zeros_like(mask)
    faults = [score.fault for score in scores if score.fault]
    return Batch(step, judged, mask, dead, correct, faults)


def score(run: Run, batch: Batch) -> None:
    """Rewards: what the verifiers pay, less what overlong completions cost. Advantages where these
    alone decide, and so which rows can move the policy, and the updates they are divided into."""
    config = run.config
    limit, cache = config.max_new_tokens, config.overlong_cache
    earned = [score.reward for score in batch.judged.scores]
    costs = [rewards.soft_overlong_penalty(n, limit, cache) for n in batch.samples.lengths.tolist()]
    batch.rewards = (torch.tensor(earned) + torch.tensor(costs)).to(config.device)
    if run.algorithm.reads in ("outcomes", "steps"):
        batch.advantages = advantages(run, batch)
    batch.updates = plan(run, batch)
    experts = extra("experts")
    if experts and has_experts(run.policy.config) and config.old_logprobs == "trainer":
        batch.experts = experts.Experts(config.routing_replay)


def plan(run: Run, batch: Batch) -> list[Update]:
    """Whole groups in a random order, divided into updates. What cannot move the policy takes no
    forward pass: rows of advantage 0, if that is known and nothing else reads their log-probs."""
    config = run.config
    live = batch.mask.any(1).cpu()
    reads_all = run.ref_policy is not None or config.entropy_coef > 0
    if batch.advantages is not None and not reads_all:
        moves = batch.advantages.view(len(live), -1) != 0
        live = (moves & batch.mask).any(1).cpu()
    groups = torch.arange(len(live)).view(-1, config.group_size)
    rng = random.Random(f"{config.seed} {batch.step}")
    order = rng.sample(range(len(groups)), len(groups))
    updates = []
    for rows in groups[order].flatten().split(config.completions_per_update):
        learning = rows[live[rows]]
        own = run.ranks.share(learning)
        samples = batch.samples[own]
        parts = rollout.micro_batches(run.policy, samples, config.micro_batch_tokens)
        updates.append(Update(rows, learning, [(own[part], samples[part]) for part in parts]))
    return updates


@torch.no_grad()
def freeze(run: Run, batch: Batch) -> None:
    """Scores pi_old, pi_ref and the critic, before the first update moves anything; of live rows
    alone, in the micro-batches of the updates, so that the first ratio is exactly 1."""
    batch.old_logprobs = torch.zeros_like(batch.samples.sampler_logprobs)
    batch.ref_logprobs = torch.zeros_like(batch.old_logprobs)
    batch.teacher_logprobs = torch.zeros_like(batch.old_logprobs)
    batch.values = torch.zeros_like(batch.old_logprobs)
    for rows, samples in (part for update in batch.updates for part in update.parts):
        if run.config.old_logprobs == "sampler":
            batch.old_logprobs[rows] = samples.sampler_logprobs
        else:
            with batch.routing(rows):
                batch.old_logprobs[rows], _ = run.logprobs(run.policy, samples)
        if run.ref_policy is not None:
            batch.ref_logprobs[rows], _ = run.logprobs(run.ref_policy, samples)
        if run.teacher is not None:
            batch.teacher_logprobs[rows], _ = run.logprobs(run.teacher, samples)
        if run.critic is not None:
            batch.values[rows] = run.values(samples)
    for scored in (batch.old_logprobs, batch.ref_logprobs, batch.teacher_logprobs, batch.values):
        run.ranks.sum(scored)  # others' rows are 0


def compare(run: Run, batch: Batch) -> None:
    """Advantages that need log-probs or values (the others are there since `score`); less weight
    where the sampler was another policy."""
    config, sampler_logprobs = run.config, batch.samples.sampler_logprobs
    if batch.advantages is None:
        batch.advantages = advantages(run, batch)
    if config.tis_cap:
        weights = gspo.truncated_importance_weights(
            batch.old_logprobs, sampler_logprobs, batch.mask, cap=config.tis_cap
        )
        batch.advantages = batch.advantages.view(len(weights), -1) * weights


def advantages(run: Run, batch: Batch) -> Tensor:
    """(N,) or (N, T), of what the algorithm reads; of a critic the batch keeps its targets, too."""
    config, algorithm = run.config, run.algorithm
    options = numbers(config, algorithm.advantages)
    if algorithm.reads == "outcomes":
        return algorithm.advantages(batch.rewards, config.group_size, **options)
    if algorithm.reads == "teacher":
        scored = (batch.teacher_logprobs, batch.old_logprobs, batch.mask)
        return algorithm.advantages(batch.rewards, config.group_size, *scored, **options)
    steps = [score.steps for score in batch.judged.scores]
    token_rewards, step_ends = placed(batch.rewards, steps, batch.samples, run.tokenizer)
    if algorithm.reads == "steps":
        return algorithm.advantages(token_rewards, step_ends, config.group_size, **options)
    if algorithm.kl_in == "reward":  # k1, per token
        kl = batch.old_logprobs - batch.ref_logprobs
        token_rewards -= config.kl_coef * batch.mask * kl
    if algorithm.reads == "tokens":
        return algorithm.advantages(token_rewards, batch.mask, **options)
    # a completion that was cut off is not over: the critic's last word stands for the rest
    last = own_tokens(batch.samples)[:, -1:]
    bootstrap = batch.values.gather(1, last)[:, 0] * batch.samples.truncated
    found, batch.returns = algorithm.advantages(
        token_rewards, batch.values, batch.mask, bootstrap, **options
    )
    return found


def improve(run: Run, batch: Batch) -> list[dict]:
    """The updates of a step, --epochs times. Returns the metrics of those that were made."""
    config, made = run.config, []
    batch.new_logprobs = torch.zeros_like(batch.old_logprobs)
    for group in run.optimizer.param_groups:
        warm_up = min(1.0, batch.step / max(config.warmup_steps, 1))
        group["lr"] = group["initial_lr"] * warm_up
    for update in batch.updates * config.epochs:
        metrics = accumulate_gradients(run, batch, update)
        if batch.first_logprobs is None:
            batch.first_logprobs = batch.new_logprobs.clone()
        wrong = ", ".join(name for name, value in metrics.items() if not math.isfinite(value))
        if wrong:  # no step: it would ruin the weights
            batch.bad_updates += 1
            run.progress.bad_in_a_row += 1
            bad = run.progress.bad_in_a_row
            sentence = f"step {batch.step}: {bad} updates in a row were not finite, in {wrong}"
            need(bad <= MAX_BAD_UPDATES, sentence)
            continue
        run.optimizer.step()  # without a live row by momentum alone: nothing to measure
        if len(update.live) > 0:
            run.progress.bad_in_a_row = 0
            made.append(metrics)
    run.optimizer.zero_grad()  # their memory is for sampling
    run.ranks.sum(batch.new_logprobs, batch.first_logprobs)  # others' rows are 0
    return made


def accumulate_gradients(run: Run, batch: Batch, update: Update) -> dict[str, float]:
    """The gradient of one update, summed over micro-batches and processes; returns its metrics."""
    unit = run.algorithm.unit
    denom = count_units(batch.mask[update.live], unit)
    # denom counts live rows: metrics are means over these. The loss is a mean over all rows of the
    # update, of which the others add 0: hence the share
    share = denom / count_units(batch.mask[update.rows], unit)
    totals = collections.Counter()
    run.optimizer.zero_grad()
    for rows, samples in update.parts:
        loss, logprobs, metrics = losses(run, batch, rows, samples, denom)
        (share * loss).backward()
        batch.new_logprobs[rows] = logprobs
        metrics["loss"] = share * loss.detach()
        totals.update({name: float(value) for name, value in metrics.items()})  # adds
    return run.ranks.sum_numbers(totals) | clip_gradients(run)


def clip_gradients(run: Run) -> dict[str, float]:
    """Sums them over processes; returns their norms before clipping."""
    norms = {}
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:  # no live row was this process's
                parameter.grad = torch.zeros_like(parameter)
        run.ranks.sum(*[parameter.grad for parameter in group["params"]])
        norm = torch.nn.utils.clip_grad_norm_(group["params"], run.config.max_grad_norm)
        norms[group["norm"]] = float(norm)
    return norms


def count_units(mask: Tensor, unit: str) -> Tensor:
    """Tokens, or completions with a token, of a mask (n, T): 0-d, at least 1."""
    if unit == "completion":
        mask = mask.any(1)
    return mask.sum().clamp(min=1)


def losses(
    run: Run, batch: Batch, rows: Tensor, samples: rollout.Rollout, denom: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A micro-batch's share of an update's loss, the log-probs (n, T) that it was made of, and its
    share of metrics; means over the live rows of the update, denom of them (or of their tokens)."""
    config, algorithm, unit = run.config, run.algorithm, run.algorithm.unit
    mask = batch.mask[rows]
    with batch.routing(rows):
        logprobs, entropy = run.logprobs(run.policy, samples)
    old_logprobs, advantages = batch.old_logprobs[rows], batch.advantages[rows]
    options = numbers(config, algorithm.loss)
    loss, metrics = algorithm.loss(logprobs, old_logprobs, advantages, mask, denom, **options)

    mean_entropy = gspo.masked_mean(entropy, mask, unit, denom)
    loss = loss - config.entropy_coef * mean_entropy
    metrics["entropy"] = mean_entropy.detach()

    if run.ref_policy is not None:
        in_loss = logprobs
        if algorithm.kl_in == "reward":
            in_loss = logprobs.detach()  # there it works, here it is a metric
        ref_logprobs = batch.ref_logprobs[rows]
        kl, kl_metrics = gspo.kl_penalty(in_loss, ref_logprobs, mask, denom, per=unit)
        loss = loss + config.kl_coef * kl
        metrics |= kl_metrics

    if run.critic is not None:
        options = numbers(config, gspo.value_loss)
        values, old_values = run.values(samples), batch.values[rows]
        critic_loss, critic_metrics = gspo.value_loss(
            values, old_values, batch.returns[rows], mask, denom, **options
        )
        loss = loss + critic_loss
        metrics |= critic_metrics
    return loss, logprobs.detach(), metrics


# ---- report --------------------------------------------------------------------------------------


def measure(run: Run, batch: Batch, updates: list[dict]) -> dict:
    """The row of metrics.jsonl, explained in docs/metrics.md. Add a line for a metric of yours."""
    samples, correct = batch.samples, batch.correct
    lengths = samples.completion_mask.sum(1).float()
    row = {}
    row["reward"] = batch.rewards.mean()
    row["reward_std"] = batch.rewards.std()
    for name in run.reward.terms:
        row[f"reward/{name}"] = statistics.fmean(each.terms[name] for each in batch.judged.scores)
    if correct is not None:
        row["solved"] = correct.mean()
        row["solved_any"] = correct.amax(1).mean()
        row["dead_right"] = (batch.dead & (correct.amin(1) >= 1)).float().mean()
        row["dead_wrong"] = (batch.dead & (correct.amax(1) <= 0)).float().mean()
    row["dead"] = batch.dead.float().mean()
    row["prompts_drawn"] = len(batch.dead)
    row["length_mean"] = lengths.mean()
    row["length_min"] = lengths.min()
    row["length_max"] = lengths.max()
    row["truncated"] = samples.truncated.float().mean()
    size = batch.advantages.abs()
    row["advantage_abs"] = size.mean() if size.dim() == 1 else size[batch.mask].mean()
    for name in updates[0] if updates else []:  # clip_fraction, ratio_mean, entropy, grad_norm, ...
        row[name] = statistics.fmean(update[name] for update in updates)
    row["bad_updates"] = batch.bad_updates
    live, first = batch.live, batch.updates[0].live
    moved = batch.new_logprobs - batch.old_logprobs
    apart = batch.first_logprobs - samples.sampler_logprobs
    row |= drift("policy", moved[live], batch.mask[live])
    row |= drift("sampler", apart[first], batch.mask[first])
    if run.critic is not None:
        row |= of_critic(batch.values[batch.mask], batch.returns[batch.mask])
    if run.teacher is not None:
        taught = batch.teacher_logprobs[batch.mask], batch.old_logprobs[batch.mask]
        row |= of_teacher(*taught)
    row["verifier_faults"] = len(batch.faults)
    if run.config.tool:
        row |= run.generate.measure(run, samples)
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row["memory_gb"] = max(run.ranks.gather(console.peak_memory(run.config.device)))
    row |= run.seconds
    row["tokens_per_second"] = lengths.sum() / run.seconds["seconds_step"]
    numbers = {name: float(value) for name, value in row.items() if math.isfinite(value)}  # JSON
    return {"step": batch.step, **numbers}


def report(run: Run, batch: Batch, row: dict) -> None:
    """One console line, one row of metrics.jsonl, a few samples that a person can read."""
    warn(run, batch, row)
    if not run.ranks.first:
        return
    steps_left = run.config.steps - batch.step
    seconds_left = steps_left * statistics.fmean(run.step_seconds[-10:])
    say(console.step_line(row, run.config.steps, seconds_left))
    folders.append_rows(run.folder / "metrics.jsonl", [row])
    first_of_groups = range(0, len(batch.rewards), run.config.group_size)[:SHOWN_PROMPTS]
    samples = [batch.judged.readable(i, batch.step) for i in first_of_groups]
    folders.append_rows(run.folder / "samples.jsonl", samples)
    answers = [each for each in run.answers if each["step"] == batch.step]  # evaluated just now
    folders.append_rows(run.folder / "evaluations.jsonl", answers)
    if run.tracker:
        run.tracker(row)


def warn(run: Run, batch: Batch, row: dict) -> None:
    """What a person should know beside the numbers."""
    config, kept = run.config, int((~batch.dead).sum())
    if config.dynamic_sampling and kept < config.prompts_per_step:
        drawn = f"of {len(batch.dead)} groups drawn {kept} are not paid alike"
        run.warn("refills", f"--dynamic-sampling: {drawn}, expected {config.prompts_per_step}")
    if batch.faults:
        run.warn("fault", f"a verifier failed and paid 0: {batch.faults[0]}")
    taught = row["truncated"] < 1 and row.get("advantage_abs", 0) > 0
    run.quiet_steps = 0 if taught else run.quiet_steps + 1
    if run.quiet_steps == 10 or run.quiet_steps == len(run.step_seconds) == config.steps:
        why = "all groups are paid alike (another --reward? other prompts? more --group-size?)"
        if row["truncated"] == 1:
            why = "all completions are cut off (--max-new-tokens)"
        run.warn("quiet", f"{run.quiet_steps} steps taught nothing: {why}")


def evaluate(run: Run, pass_k: int = 0) -> dict:
    """Held-out accuracy: greedy, and the share of prompts that one of k samples solves; the greedy
    reward where no verifier says what is right."""
    sampler, count = run.old_policy, len(run.held_out)
    if run.config.stale_steps > 1:  # what is evaluated is not
        sampler = run.policy
    elif sampler is not run.policy:
        refresh(sampler, run.policy)
    if pass_k:
        say(f"evaluating {count} prompts, greedy and {pass_k} samples each")
    greedy = sample(run, sampler, run.held_out, 1, 0.0, "eval")
    faults = [score.fault for score in greedy.scores]
    begun = run.progress.step > 0
    need(begun or not all(faults), f"--reward: it failed on every completion: {faults[0]}")
    _, correct = verdicts(run, greedy.scores, 1)
    keep_answers(run, greedy, correct)
    if correct is None:
        return {"eval_reward": statistics.fmean(score.reward for score in greedy.scores)}
    found = {"eval_solved": float(correct.mean())}
    if pass_k:
        several = sample(run, sampler, run.held_out, pass_k, run.config.temperature, "eval")
        _, correct = verdicts(run, several.scores, pass_k)
        if correct is not None:
            found[f"eval_pass@{pass_k}"] = float(correct.amax(1).mean())
    return found


def keep_answers(run: Run, greedy: Judged, correct: Tensor | None) -> None:
    """Some greedy answers to the same prompts, for report.html, and one for the console."""
    shown = range(len(greedy.texts))[:SHOWN_PROMPTS]
    run.answers = [greedy.readable(i, run.progress.step) for i in shown]
    for i, row in enumerate(run.answers):
        row["correct"] = None if correct is None else float(correct[i, 0])
    first = run.answers[0]
    said = [printable(first[name][-200:]) for name in ("prompt", "completion")]
    say(f"held out: '{said[0]}' -> '{said[1]}' is paid {first['reward']:g}")


# ---- checkpoints ---------------------------------------------------------------------------------


def save(run: Run) -> Path:
    """checkpoints/step-N in Hugging Face layout, and trainer/ for --resume; whole or not there."""
    config, step = run.config, run.progress.step
    run.progress.shaping = sorted(run.reward.shaping)
    if run.ranks.first:
        with folders.new_checkpoint(run.folder, step) as folder:
            run.policy.save_pretrained(folder)
            run.tokenizer.save_pretrained(folder)
            if config.lora_rank:
                extra("lora").write_adapter(run.policy, folder / "adapter", config.model)
            trainer = folder / "trainer"
            trainer.mkdir()
            folders.write_state(trainer / "state.safetensors", *trainer_state(run))
            folders.write_json(trainer / "progress.json", dataclasses.asdict(run.progress))
    run.ranks.from_first(None)  # the others wait until it is written
    return run.folder / f"checkpoints/step-{step}"


def trainer_state(run: Run) -> tuple[dict[str, Tensor], set[str], torch.optim.Optimizer]:
    """All parameters of the run by name, the names of those that the policy's own files have, and
    the optimiser."""
    parts = {"policy": run.policy, "critic": run.critic, "ref_policy": run.ref_policy}
    if run.config.stale_steps > 1:
        parts["old_policy"] = run.old_policy
    named = {}
    for part, module in parts.items():
        if module is not None:
            named |= {f"{part}.{name}": each for name, each in module.named_parameters()}
    in_files = {f"policy.{name}" for name in run.policy.state_dict()}
    return named, in_files, run.optimizer


# ---- the loop ------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """The loop, in seven phases. In float32 the sampler is the policy itself, and without a KL
    there is no reference: the three policies are then one model and a tensor."""
    config = run.config
    stop_on_signals(run)
    for step in range(run.progress.step + 1, config.steps + 1):
        begun = time.perf_counter()
        run.seconds.clear()
        last = step == config.steps

        # 1. snapshot: the sampler takes pi_theta's weights, where it is a copy; pi_ref now and then
        snapshot(run)

        # 2. sample G completions for each of P prompts, and let the verifiers judge them; dynamic
        # sampling drops and refills dead groups
        batch = collect(run, step)

        # 3. score: rewards, and which completions can move the policy
        score(run, batch)

        # 4. freeze: old_logprobs, and those of a reference, teacher or critic, without gradients
        with run.timer("freeze"):
            freeze(run, batch)

        # 5. compare: advantages that read these; for GSPO there is nothing left but --tis-cap
        compare(run, batch)

        # 6. improve: minibatches of completions, each one optimiser step
        with run.timer("improve"):
            updates = improve(run, batch)

        # 7. report: metrics, evaluation, samples, checkpoint
        run.progress.step = step
        run.seconds["seconds_step"] = time.perf_counter() - begun
        run.step_seconds.append(run.seconds["seconds_step"])
        row = measure(run, batch, updates)
        evaluates = last or (config.eval_every > 0 and step % config.eval_every == 0)
        if evaluates:
            after = evaluate(run, pass_k=config.eval_samples * last)
            row |= after
            if batch.experts:
                row |= batch.experts.measure_flips(run, batch.samples)
        report(run, batch, row)
        stopping = any(run.ranks.gather(run.stopping))
        if evaluates or stopping:
            write_page(run)
        if last or stopping or (config.save_every and step % config.save_every == 0):
            checkpoint = save(run)
        if stopping and not last:
            raise KeyboardInterrupt
    took = console.duration(time.time() - run.began)
    say(f"held out: {percent(run.progress.before)} -> {percent(after)}, in {took}")
    page = f", the report in {run.folder}/report.html" if extra("report") else ""
    say(f"the model is in {checkpoint}{page}; try it:")
    say(printable(console.command_to_try(checkpoint, config, run.held_out[0]["prompt"])))


def stop_on_signals(run: Run) -> None:
    """The first signal ends the run after its step, with a checkpoint; the next one at once."""

    def stop(number, frame):
        run.stopping = True
        signal.signal(number, signal.default_int_handler)
        say("stopping after this step, with a checkpoint; once more: at once, without")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def write_page(run: Run) -> None:
    page = extra("report")
    if page and run.ranks.first:
        page.write_report([run.folder], run.folder / "report.html")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()  # between our lines
    config, ranks = None, Ranks()
    try:
        if arguments[:1] == ["--report"]:
            page = extra("report")
            need(page, "--report: needs support/extras/report.py, which is not here")
            return page.main(arguments[1:])
        with joined_ranks() as ranks:
            config = parse_flags(arguments)
            if config.model in BUILT_IN:  # more threads only wait for each other at this size
                torch.set_num_threads(min(2, torch.get_num_threads()))
            train(start(config, ranks))
        return 0
    except BaseException as error:
        explained = console.explain(error)
        if not ranks.fails_first():  # another process says why
            os._exit(explained[0] if explained else 2)
        if explained is None:
            raise
    status, sentence = explained
    asked = config and config.name and status != 2
    if asked and folders.checkpoints(Path(config.runs, config.name)):
        sentence += f"; to go on: {console.command_to_resume(config.runs, config.name)}"
    print(printable(sentence), file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # at once: an orderly end would wait for the others
    return status


if __name__ == "__main__":
    sys.exit(main())
