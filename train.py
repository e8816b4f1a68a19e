"""Train a language model with GSPO, or another row of gspo.ALGOS, on rewards from a verifier.

    python train.py --algo gspo                          # tiny built-in policy, nothing downloaded
    python train.py --algo gspo --model Qwen/Qwen3-0.6B --data train.jsonl --reward math

`train`, near the end, is the loop: read it first. `policy` learns, `old_policy` samples, and a KL
is measured to `ref_policy`."""

import os
import signal

if __name__ == "__main__":  # Ctrl-C during the slow imports below ends all without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# PyTorch's threads wait for each other by spinning. Where another process wants their cores, that
# takes ten times as long as the work; so they spin briefly, and sleep. It is read as torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import collections
import contextlib
import copy
import dataclasses
import hashlib
import html
import importlib.util
import itertools
import json
import math
import random
import re
import shlex
import shutil
import sys
import time
import typing
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import gspo
import rewards
import rollout
from rewards import UserError, did_you_mean, expecting, need, printable

# ------------------------------------------------------------------------------ flags


def flag(
    default,
    help,
    *,
    heading=None,
    choices=None,
    alone=None,
    at_least=None,
    above=None,
    at_most=math.inf,
):
    """A field of Config that is also a command-line flag: its help text and what it may be.
    heading: the group of flags in --help that begins here. alone: the value of a flag that is given
    without one; there is --no-FLAG, too, then."""
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "heading": heading,
            "choices": choices,
            "alone": alone,
            "at_least": at_least,
            "above": above,
            "at_most": at_most,
        },
    )


@dataclasses.dataclass
class Config:
    """Every flag. None: the algorithm, the model or the task decides, in `fill_defaults`; for the
    objective's numbers, which `given_flags` passes on, the signatures in gspo.py do."""

    algo: str = flag("gspo", "algorithm", heading="what to run", choices=tuple(gspo.ALGOS))
    model: str = flag("tiny", "built in (tiny, tiny-moe), a folder, or a name on the hub")
    task: str = flag(
        "arithmetic", "built-in problems, and what tiny has seen", choices=tuple(rewards.TASKS)
    )
    data: str | None = flag(
        None, "JSONL file to train on: prompt and answer, or question and answer"
    )
    eval_data: str | None = flag(None, "JSONL file to evaluate on; without it a tenth of --data")
    reward: str | None = flag(
        None, "'math + 0.1*format' or file.py:function; default math or the task's"
    )
    reward_model: str | None = flag(None, "classifier with one output, called model in --reward")
    tool: str | None = flag(
        None, "answers completions: calculator, or file.py:function; default none or the task's"
    )
    tool_after: str | None = flag(None, "text of a completion after which --tool is asked: </calc>")
    steps: int = flag(50, "rollout steps", at_least=1)
    seed: int = flag(0, "of problems, samples, shuffles and adapters", at_least=0)

    system: str | None = flag(
        None, "system message, for tokenizers with a chat template", heading="prompts"
    )
    chat_template_args: str | None = flag(
        None, 'JSON for its chat template: {"enable_thinking": false}'
    )
    prompt_template: str | None = flag(None, "text around the prompt, with {prompt} in it")
    max_prompt_tokens: int | None = flag(
        None, "longer ones are skipped; default: the context less --max-new-tokens", at_least=1
    )

    prompts_per_step: int = flag(32, "prompts P of a rollout step", heading="rollout", at_least=1)
    group_size: int = flag(8, "completions G of a prompt", at_least=2)
    max_new_tokens: int | None = flag(
        None,
        "of a completion, a tool's included; default: the task's; with --data and a --model 1024",
        at_least=1,
    )
    temperature: float = flag(1.0, "divides the logits, in sampling and in scoring", above=0)
    max_slots: int | None = flag(
        None, "completions sampled at a time; default: all that fit", at_least=1
    )
    cache_gb: float | None = flag(
        None,
        "GB for the sampler's keys and values; default: most of a free GPU, half of a CPU's memory",
        above=0,
    )
    old_logprobs: str = flag(
        "auto",
        "whose log-probs are pi_old's: the trainer's, of a pass before the updates; the sampler's, "
        "of when it drew; auto: the sampler's where it is the policy itself, in float32, and "
        "rounding decides on no advantage or expert",
        choices=("auto", "trainer", "sampler"),
    )
    stale_steps: int = flag(
        1, "between refreshes of the sampler; --tis-cap corrects for it", at_least=1
    )
    tis_cap: float | None = flag(
        None, "of truncated importance sampling, sampler to pi_old", above=0
    )
    tis_level: str | None = flag(
        None, "unit of its ratio; default token", choices=("token", "completion")
    )

    mismatch_mask: str | None = flag(
        None,
        "tokens or completions leave the loss where sampler and trainer are far apart",
        choices=("token", "completion"),
    )
    mismatch_low: float | None = flag(
        None,
        "least ratio pi_old / sampler that stays; default 0.5, of completions 0.99",
        above=0,
        at_most=1,
    )
    mismatch_high: float | None = flag(
        None, "greatest ratio that stays; default 5, of completions 1.01", at_least=1
    )
    off_policy_delta: float | None = flag(
        None, "a completion with A < 0 leaves once log pi fell by more nats a token", at_least=0
    )

    clip_low: float | None = flag(
        None,
        "the ratio stays above 1 - clip_low; GSPO 3e-4 (dppo: probabilities; gmpo: log-ratios)",
        heading="objective (defaults are the papers', in gspo.py)",
        at_least=0,
    )
    clip_high: float | None = flag(
        None, "the ratio stays below 1 + clip_high; GSPO 4e-4", at_least=0
    )
    dual_clip: float | None = flag(
        None, "PPO, REINFORCE++: bound on the objective, in units of A, where A < 0", above=1
    )
    ratio_max: float | None = flag(None, "CISPO, DPPO: bound on a token's weight", above=0)
    tau_pos: float | None = flag(None, "SAPO: steepness of the gate where A > 0", above=0)
    tau_neg: float | None = flag(None, "SAPO: the same where A < 0", above=0)
    kl_coef: float | None = flag(
        None, "weight of the KL to the reference; GRPO 0.04, else 0", at_least=0
    )
    ref_every: int = flag(0, "steps between refreshes of the reference; 0: never", at_least=0)
    routing_replay: str | None = flag(
        None,
        "train with the experts that pi_old chose, or those of the sampler (MoE); alone: policy",
        choices=("policy", "sampler"),
        alone="policy",
    )
    dynamic_sampling: bool | None = flag(None, "refill groups that are all right or all wrong")
    max_refills: int = flag(4, "further rollouts of a step for dynamic sampling", at_least=0)
    overlong_cache: int | None = flag(
        None, "punished tokens before the limit; DAPO a fifth", at_least=0
    )
    overlong_filter: bool = flag(False, "truncated completions leave the loss")
    repetition_penalty: float = flag(
        0.0, "times the share of repeated 4-grams, off the reward", at_least=0
    )
    entropy_coef: float = flag(0.0, "bonus per nat of the tokens' mean entropy", at_least=0)
    advantage_scale: str | None = flag(
        None,
        "divides advantages: std of the group or batch, mean of the group; terms: of each verifier",
        choices=("group", "batch", "mean", "terms", "none"),
    )
    gamma: float | None = flag(
        None, "discount per token of PPO and REINFORCE++; default 1", above=0, at_most=1
    )
    gae_lambda: float | None = flag(
        None, "of PPO's advantages; default 0.95", at_least=0, at_most=1
    )
    critic_lr: float | None = flag(None, "of PPO's critic; default 10 x lr", above=0)
    value_clip: float | None = flag(
        None, "PPO's critic: how far a value may move in a step; default 0.2", above=0
    )

    completions_per_update: int | None = flag(
        None, "default: for 4 updates a rollout, or fewer", heading="optimiser", at_least=1
    )
    epochs: int = flag(1, "passes over a rollout", at_least=1)
    lr: float | None = flag(
        None,
        "of AdamW; default 2e-4 for built-in models, else 1e-6; ten times that with LoRA",
        above=0,
    )
    warmup_steps: int | None = flag(
        None, "of the lr; default 0 for built-in models, else 10", at_least=0
    )
    max_grad_norm: float = flag(1.0, "gradient clipping", above=0)
    max_bad_updates: int = flag(
        5, "skipped in a row, as not finite; one more stops the run", at_least=0
    )
    micro_batch_tokens: int = flag(
        16384, "tokens of one forward and backward, each once that is read", at_least=1
    )
    gradient_checkpointing: bool = flag(False, "less memory for activations, but slower")
    lora_rank: int = flag(0, "train an adapter of this rank (LoRA); 0: all weights", at_least=0)
    lora_alpha: float | None = flag(None, "its scale, times the rank; default 2 x rank", above=0)
    lora_targets: str | None = flag(
        None, "linear layers that get one: q_proj,v_proj; default all but the head"
    )

    eval_every: int = flag(
        10,
        "steps between evaluations; 0: before and after only",
        heading="evaluation",
        at_least=0,
    )
    eval_prompts: int = flag(256, "held-out prompts, greedy", at_least=1)
    eval_samples: int = flag(8, "k of pass@k, before and after; 0: none", at_least=0)

    name: str | None = flag(
        None, "folder of the run; default: the algorithm and a number", heading="run"
    )
    runs: str = flag("runs", "folder of all runs")
    resume: bool = flag(False, "go on from the newest checkpoint of --name, with its flags")
    save_every: int = flag(10, "steps between checkpoints; 0: the last only", at_least=0)
    keep: int = flag(2, "newest checkpoints that stay", at_least=1)
    device: str = flag(
        "cuda" if torch.cuda.is_available() else "cpu", "device", choices=("cuda", "cpu", "mps")
    )
    dtype: str | None = flag(
        None, "of autocast and sampler; bfloat16 on CUDA", choices=("float32", "bfloat16")
    )
    tensorboard: bool = flag(False, "write TensorBoard events too")
    wandb: bool = flag(False, "send metrics to Weights & Biases too")
    trackio: bool = flag(False, "send metrics to Trackio too")

    # names of the flags that were given; itself no flag
    given: list[str] = dataclasses.field(default_factory=list)


FLAGS = [field for field in dataclasses.fields(Config) if field.metadata]


def dashed(name: str) -> str:
    """The flag of a field: --group-size of group_size."""
    return "--" + name.replace("_", "-")


def parse_flags(arguments: list[str] | None = None) -> dict:
    """The flags that were given, name -> value; which were not given matters to `validate`."""
    parser = rollout.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group = parser
    for field in FLAGS:
        if field.metadata["heading"]:
            group = parser.add_argument_group(field.metadata["heading"])
        add_flag(group, field)

    parser.add_argument(
        "--report",
        nargs="+",
        metavar="RUN",
        help="write report.html of these folders of runs, beside the first, and train nothing",
    )

    given = vars(parser.parse_args(arguments))
    for field in FLAGS:
        if field.name in given:
            check_value(field, given[field.name])
    return given


def add_flag(group, field: dataclasses.Field) -> None:
    help = field.metadata["help"]
    if field.default is not None:
        help += f"; default {field.default}"

    if bool in value_types(field):
        group.add_argument(dashed(field.name), action=argparse.BooleanOptionalAction, help=help)
        return

    [kind] = value_types(field)
    metavar = kind.__name__.upper()
    if field.metadata["choices"]:
        metavar = "{" + ", ".join(field.metadata["choices"]) + "}"
    if field.metadata["alone"]:
        add_flag_alone(group, field, metavar, help)
        return
    group.add_argument(dashed(field.name), type=kind, metavar=metavar, help=help)


def add_flag_alone(group, field: dataclasses.Field, metavar: str, help: str) -> None:
    """A flag that may stand without a value, and its --no-FLAG."""
    group.add_argument(
        dashed(field.name), nargs="?", const=field.metadata["alone"], metavar=metavar, help=help
    )
    group.add_argument(
        "--no-" + dashed(field.name)[2:],
        dest=field.name,
        action="store_const",
        const=field.default,
        help=argparse.SUPPRESS,
    )


def value_types(field: dataclasses.Field) -> list[type]:
    """[float] of a field `float | None`."""
    kinds = typing.get_args(field.type) or (field.type,)
    return [kind for kind in kinds if kind is not type(None)]


def check_value(field: dataclasses.Field, value) -> None:
    """UserError for a value outside of what the flag takes."""
    if value is None:  # --no-FLAG
        return
    wrong = f"{dashed(field.name)} {value}"
    choices = field.metadata["choices"]
    if choices:
        near = did_you_mean(str(value), choices)
        need(value in choices, f"{wrong}: expected one of {', '.join(choices)}{near}")

    at_least, above, at_most = (field.metadata[key] for key in ("at_least", "above", "at_most"))
    upper = "" if at_most == math.inf else f", at most {at_most}"
    if at_least is not None:
        fits = at_least <= value <= at_most and value < math.inf
        need(fits, f"{wrong}: expected a number, at least {at_least}{upper}")
    if above is not None:
        fits = above < value <= at_most and value < math.inf
        need(fits, f"{wrong}: expected a number above {above}{upper}")


def resolve(given: dict) -> Config:
    """The config of a run: the flags given, with --resume those it was given, defaults for the
    rest. UserError for what cannot be, or would do nothing."""
    if not given.get("resume"):
        return complete(given)
    saved, saved_given = saved_flags(given)
    weights = ["model", "lora_rank", "lora_alpha", "lora_targets"]  # what they are
    if saved["model"] in BUILT_IN:
        weights.append("task")  # it knows the characters of no other
    for name in weights:
        need(
            name not in given or given[name] == saved[name],
            f"{dashed(name)} {given.get(name)}: a run that is resumed keeps its own, {saved[name]}",
        )
    config = complete({**saved_given, **given})
    for name, value in dataclasses.asdict(config).items():
        if name not in ("resume", "runs", "given") and value != saved[name]:
            print(f"resume: {name} was {saved[name]}, from now on it is {value}")
    return config


def complete(given: dict) -> Config:
    config = Config(**given, given=sorted(given.keys() - {"resume"}))
    fill_defaults(config)
    validate(config, given)
    return config


def saved_flags(given: dict) -> tuple[dict, dict]:
    """The resolved flags of the run that --resume goes on with, and those that it was given."""
    need("name" in given, "--resume: needs --name, of the run to go on with")
    path = Path(given.get("runs", Config.runs), given["name"], "config.json")
    with expecting(f"--resume: expected the --name of a run, with {path}"):
        saved = dict(json.loads(path.read_text()))
        if isinstance(saved.get("routing_replay"), bool):  # it was a switch once
            saved["routing_replay"] = "policy" if saved["routing_replay"] else None
        known = {field.name for field in FLAGS}
        names = saved.pop("given")
        strange = sorted(saved.keys() - known) + sorted(known - saved.keys())
        need(not strange, f"its flags are not those of this train.py: {', '.join(strange)}")
        return saved, {name: saved[name] for name in names if name in known}


def fill_defaults(config: Config) -> None:
    """Replaces each None that stands for "as the model, the task or the algorithm wants it". The
    numbers of an objective are the defaults of its functions in gspo.py."""
    algorithm, task = gspo.ALGOS[config.algo], rewards.TASKS[config.task]
    built_in = config.model in BUILT_IN

    def default(name, value):
        if getattr(config, name) is None:
            setattr(config, name, value)

    own_data = config.data is not None and not built_in
    default("reward", "math" if own_data else task.verifier)
    if not own_data:
        default("tool", task.tool)
    if config.tool in rewards.TOOLS:
        default("tool_after", rewards.TOOLS[config.tool].after)
    full_lr = 2e-4 if built_in else 1e-6
    default("lr", 10 * full_lr if config.lora_rank else full_lr)
    if config.lora_rank:
        default("lora_alpha", 2.0 * config.lora_rank)
    default("warmup_steps", 0 if built_in else 10)
    default("max_new_tokens", 1024 if own_data else task.max_new_tokens)
    default("dtype", "bfloat16" if config.device == "cuda" else "float32")
    default("dynamic_sampling", algorithm.dynamic_sampling)
    default("overlong_cache", config.max_new_tokens // 5 if algorithm.overlong_shaping else 0)
    default("kl_coef", algorithm.kl_coef)
    if config.mismatch_mask == "completion":  # a mean over tokens spreads far less than a token
        default("mismatch_low", 0.99)
        default("mismatch_high", 1.01)
    if algorithm.critic:
        default("critic_lr", 10 * config.lr)
    for function, flags in objective_functions(config):
        parameters = gspo.keyword_parameters(function)
        for parameter, name in flags.items():
            default(name, parameters[parameter])
    completions = config.prompts_per_step * config.group_size
    default(
        "completions_per_update",
        smallest_divisor(completions, at_least=math.ceil(completions / 4)),
    )


def objective_functions(config: Config) -> list[tuple[Callable, dict[str, str]]]:
    """The functions of gspo.py that the run will call, each with parameter -> flag."""
    algorithm = gspo.ALGOS[config.algo]
    functions = [
        (algorithm.loss, algorithm.loss_flags),
        (algorithm.advantages, algorithm.advantage_flags),
    ]
    if algorithm.critic:
        functions.append((gspo.value_loss, VALUE_FLAGS))
    if config.mismatch_mask:
        functions.append((gspo.mismatch_mask, MISMATCH_FLAGS))
    return functions


def smallest_divisor(number: int, at_least: int) -> int:
    return next(k for k in range(at_least, number + 1) if number % k == 0)


# parameter -> flag, of functions that are no algorithm's own
VALUE_FLAGS = {"clip": "value_clip"}
MISMATCH_FLAGS = {"low": "mismatch_low", "high": "mismatch_high"}
CRITIC_FLAGS = {"critic_lr", *VALUE_FLAGS.values()}


def flags_of(algorithm: gspo.Algorithm) -> set[str]:
    """Those that its functions read."""
    reached = {*algorithm.loss_flags.values(), *algorithm.advantage_flags.values()}
    if algorithm.critic:
        reached |= CRITIC_FLAGS
    return reached


# flags that only some algorithms have: those that ALGOS does not name for this one do nothing
OBJECTIVE_FLAGS = {flag for algorithm in gspo.ALGOS.values() for flag in flags_of(algorithm)}
OBJECTIVE_FLAGS.remove("max_new_tokens")  # every run has it


def validate(config: Config, given: dict) -> None:
    """Refuses what cannot be, and flags that were given and would do nothing."""
    values = dataclasses.asdict(config)

    def refuse(name, needs):
        raise UserError(f"{dashed(name)} {values[name]}: needs {needs}")

    refuse_inert_flags(config, given, refuse)
    refuse_values(config, refuse)


def refuse_inert_flags(config: Config, given: dict, refuse: Callable[[str, str], None]) -> None:
    """Flags that need another flag, or another algorithm."""
    values = dataclasses.asdict(config)

    # flags of some algorithms, given with another
    reached = flags_of(gspo.ALGOS[config.algo])
    for name in given:
        if name in OBJECTIVE_FLAGS and name not in reached:
            those = [algo for algo, row in gspo.ALGOS.items() if name in flags_of(row)]
            refuse(name, f"--algo {' or '.join(those)}, {config.algo} has none")

    # flags that need another one
    if "max_refills" in given and not config.dynamic_sampling:
        refuse("max_refills", "--dynamic-sampling")
    if config.eval_data and not config.data:
        refuse("eval_data", "--data")
    if "task" in given and config.data and config.model not in BUILT_IN and not config.resume:
        refuse("task", "no --data, whose rows are the problems")
    if config.ref_every and not config.kl_coef:
        refuse("ref_every", "--kl-coef")
    if config.ref_every and config.lora_rank:
        refuse("ref_every", "no --lora-rank: the reference is the model without its adapter")
    for name in ("lora_alpha", "lora_targets"):
        if name in given and not config.lora_rank:
            refuse(name, "--lora-rank")
    if config.tis_level and not config.tis_cap:
        refuse("tis_level", "--tis-cap")
    for name in ("mismatch_low", "mismatch_high"):
        if name in given and not config.mismatch_mask:
            refuse(name, "--mismatch-mask")
    for name in ("tis_cap", "mismatch_mask"):
        if values[name] and config.old_logprobs == "sampler":
            refuse(name, "--old-logprobs trainer")
    if config.routing_replay == "policy" and config.old_logprobs == "sampler":
        refuse("routing_replay", "--old-logprobs trainer")


def refuse_values(config: Config, refuse: Callable[[str, str], None]) -> None:
    """Values that cannot be, alone or with others, or not on this machine."""
    for name, value in dataclasses.asdict(config).items():
        # of a shell's variable that is not set; an empty system message is one
        need(value != "" or name == "system", f"{dashed(name)}: it is empty, expected a value")
    completions = config.prompts_per_step * config.group_size
    if completions % config.completions_per_update:
        refuse("completions_per_update", f"a divisor of {completions}")
    if config.name and not re.fullmatch(r"\w[\w.+-]{0,99}", config.name):
        refuse("name", "letters, digits, ._+-")
    if config.overlong_cache > config.max_new_tokens:
        refuse("overlong_cache", f"at most --max-new-tokens {config.max_new_tokens}")
    if config.prompt_template and config.prompt_template.count("{prompt}") != 1:
        refuse("prompt_template", "one {prompt}")

    if config.model in BUILT_IN and not rewards.TASKS[config.task].alphabet:
        refuse("task", "a --model that can read")

    # what is not on this machine
    if not torch.get_device_module(config.device).is_available():
        refuse("device", "one that is here")
    for tracker in asked_trackers(config):
        if not importlib.util.find_spec(tracker):
            refuse(tracker, f"pip install {tracker}")


# ------------------------------------------------------------------------------ input


@dataclasses.dataclass
class PromptFormat:
    """How the text of a prompt becomes token ids, and how many of them fit."""

    tokenizer: transformers.PreTrainedTokenizerBase
    template: str  # with {prompt} in it
    system: str | None
    chat_template_args: dict | None
    context: int  # tokens of the model, prompt and completion
    longest: int  # tokens of a prompt
    vocabulary: int  # token ids of the model

    def encode(self, row: dict) -> dict:
        """The row with "ids", the tokens of its prompt."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = self.template.replace("{prompt}", prompt)
        else:
            need(
                self.template == "{prompt}",
                "--prompt-template: expected prompts that are texts, found a list of messages",
            )
        ids = rollout.encode_prompt(
            self.tokenizer,
            prompt,
            self.system,
            self.chat_template_args,
            vocabulary=self.vocabulary,
        )
        return {**row, "ids": ids}

    def fits(self, row: dict) -> bool:
        return len(row["ids"]) <= self.longest


def prompt_format(config: Config, model: rollout.ModelFacts) -> PromptFormat:
    room = model.context - config.max_new_tokens
    need(
        room > 0,
        f"--max-new-tokens {config.max_new_tokens}: the context of the model is {model.context} "
        "tokens, prompt and completion; expected fewer",
    )
    return PromptFormat(
        tokenizer=model.tokenizer,
        template=prompt_template(config),
        system=config.system,
        chat_template_args=chat_template_args(config, model.tokenizer),
        context=model.context,
        longest=min(config.max_prompt_tokens or room, room),
        vocabulary=model.vocabulary,
    )


def prompt_template(config: Config) -> str:
    """A shell passes \\n as two characters: a line break is meant."""
    return (config.prompt_template or "{prompt}").replace("\\n", "\n")


def chat_template_args(config: Config, tokenizer) -> dict | None:
    """The variables of --chat-template-args; UserError for one that the template does not read."""
    if config.chat_template_args is None:
        return None
    with expecting(f"--chat-template-args {config.chat_template_args}: expected JSON, an object"):
        given = {**json.loads(config.chat_template_args)}
    if tokenizer.chat_template:
        template = tokenizer.get_chat_template()
        for name in given:
            need(
                re.search(rf"\b{re.escape(name)}\b", template),
                f"--chat-template-args: the chat template of the model does not use {name}",
            )
    return given


def check_characters(config: Config, rows: list[dict], source: str) -> None:
    """A built-in policy knows the characters of its task, and no others."""
    alphabet = rewards.TASKS[config.task].alphabet
    template = prompt_template(config)
    for row in rows:
        need(
            isinstance(row["prompt"], str),
            f"{source}: expected another --model for prompts that are lists of messages",
        )
        text = template.replace("{prompt}", row["prompt"])
        strange = "".join(sorted(set(text) - set(alphabet)))
        need(
            not strange,
            f"{source}: expected another --model for the characters {strange!r} of {text[:60]!r}",
        )


def encode_rows(rows: list[dict], form: PromptFormat, source: str) -> list[dict]:
    """The rows of a file with their tokens, less those that are too long, which is said."""
    encoded = [form.encode(row) for row in rows]
    kept = [row for row in encoded if form.fits(row)]
    if len(kept) < len(rows):
        message = (
            f"{source}: {len(rows) - len(kept)} of {len(rows)} prompts exceed "
            f"{form.longest} tokens (--max-prompt-tokens, or the context of {form.context} less "
            "--max-new-tokens)"
        )
        need(kept, message)
        print("skipped:", message)
    return kept


def built_in_problems(config: Config, form: PromptFormat, held_out: bool) -> Iterator[dict]:
    """Problems of the task without end; those that are too long are skipped without a word."""
    for problem in rewards.problems(rewards.TASKS[config.task], config.seed, held_out):
        row = form.encode(problem)
        if form.fits(row):
            yield row


def shuffled_epochs(rows: list[dict], seed: int) -> Iterator[dict]:
    """The rows without end, each epoch in an order of its own."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


# ------------------------------------------------------------------------------ built-in policies

BUILT_IN = {
    "tiny": {"model_type": "qwen3", "num_hidden_layers": 2},
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
WARM_STEPS = 560  # of supervised learning from demonstrations, many of them wrong
WARM_ROWS = 24  # demonstrations a step
WARM_LR = 3e-3


def built_in_policy(task: rewards.Task, name: str) -> Path:
    """Folder of a built-in policy, a character a token: made once, then found in the cache."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *task.alphabet])}
    config = transformers.AutoConfig.for_model(
        **BUILT_IN[name],
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.06,
        pad_token_id=words["<pad>"],
        eos_token_id=words["<eos>"],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # for short texts
    )
    shown = demonstrations(task, words)

    # whatever decides on the weights is part of the name
    recipe = repr((config.to_dict(), shown, WARM_LR, torch.__version__, transformers.__version__))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gspo")
    folder = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder

    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    with expecting(
        f"{cache}: expected to write the built-in policy there ($XDG_CACHE_HOME moves it)"
    ):
        temporary.mkdir(parents=True)
    try:
        tokenizer = character_tokenizer(words)
        warm_start(config, tokenizer, shown).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        with contextlib.suppress(OSError):  # another run may have been faster
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def start_model(config: Config) -> str | Path:
    """What the run began with: a folder, or a name on the hub."""
    if config.model in BUILT_IN:
        return built_in_policy(rewards.TASKS[config.task], config.model)
    return config.model


def demonstrations(task: rewards.Task, words: dict[str, int]) -> list[dict]:
    """Rows to learn from, in the order of the steps; the loss is of the completions alone."""
    rng, rows = random.Random(0), []
    for row in itertools.islice(rewards.problems(task, seed=-1), WARM_STEPS * WARM_ROWS):
        prompt = [words[character] for character in row["prompt"]]
        text, own = with_replies(task.demonstration(row, rng), rewards.TOOLS.get(task.tool))
        completion = [words[character] for character in text]
        labels = [word if mine else -100 for word, mine in zip(completion, own)]
        completion.append(words["<eos>"])
        labels.append(words["<eos>"])
        rows.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + labels})

    # rows of like length stand together, within windows of four steps: little padding
    window = 4 * WARM_ROWS
    order = sorted(range(len(rows)), key=lambda i: (i // window, len(rows[i]["labels"])))
    return [rows[i] for i in order]


def with_replies(text: str, tool: rewards.Tool | None) -> tuple[str, list[bool]]:
    """The completion of which the policy writes `text`, and which characters are the policy's.

    Those of the tool are no labels: a policy that learned to foretell them would do without it."""
    if tool is None:
        return text, [True] * len(text)
    written, own = "", []
    for character in text:
        written += character
        own.append(True)
        if written.endswith(tool.after):
            reply = tool.function(written) or ""
            written += reply
            own += [False] * len(reply)
    return written, own


def character_tokenizer(words: dict[str, int]) -> transformers.PreTrainedTokenizerFast:
    characters = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges=[], unk_token="<unk>"))
    characters.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def warm_start(config, tokenizer, shown: list[dict]):
    """Supervised learning: a policy that has the form of an answer, and gets many wrong."""
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_config(config)
    adam = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    pad = transformers.DataCollatorForSeq2Seq(tokenizer)
    steps = transformers.utils.logging.tqdm(
        range(WARM_STEPS), "warm start", disable=None, leave=False
    )
    for step in steps:
        batch = pad(shown[step * WARM_ROWS : (step + 1) * WARM_ROWS])
        rising = (step + 1) / 20  # in 20 steps
        falling = 2 - 2 * step / WARM_STEPS  # from the middle on, to 0
        adam.param_groups[0]["lr"] = WARM_LR * min(1, rising, falling)
        adam.zero_grad()
        policy(batch["input_ids"], labels=batch["labels"], use_cache=False).loss.backward()
        adam.step()
    return policy


# ------------------------------------------------------------------------------ processes


@dataclasses.dataclass
class Ranks:
    """The processes of a run, which torchrun starts with one command; one alone is the usual case.

    All of them draw the same prompts, know all completions and decide alike. What is shared out is
    the work: sampling, judging, forward and backward passes, the optimiser's moments."""

    rank: int = 0
    size: int = 1
    seconds: float = 0.0  # of this step that went into waiting for others, and into sending

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files, and speaks."""
        return self.rank == 0

    @contextlib.contextmanager
    def timer(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun

    def sum(self, *tensors: Tensor) -> None:
        """Each tensor becomes, in place, the sum of those of all processes."""
        if self.size == 1:
            return
        with self.timer():
            waiting = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for each in waiting:
                each.wait()

    def gather(self, value) -> list:
        """The values of all processes, in their order."""
        values = [value] * self.size
        if self.size > 1:
            with self.timer():
                dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all processes are here."""
        self.gather(None)

    def from_first(self, value):
        """The value of the first process."""
        return self.gather(value if self.first else None)[0]

    def send(self, tensors: list[Tensor], owners: list[int]) -> None:
        """Each tensor becomes, in place, that of the process that owns it."""
        if self.size == 1:
            return
        with self.timer():
            pairs = zip(tensors, owners)
            waiting = [dist.broadcast(tensor, owner, async_op=True) for tensor, owner in pairs]
            for each in waiting:
                each.wait()

    def fails_first(self) -> bool:
        """Whether this process is the first to fail: it says why, and the others are silent."""
        if self.size == 1:
            return True
        try:
            return dist.distributed_c10d._get_default_store().add("failures", 1) == 1
        except RuntimeError:  # the store went with the process that failed
            return False


def join_ranks() -> Ranks:
    """What torchrun says in the environment; without it this process is alone."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return Ranks()
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    ranks = Ranks(dist.get_rank(), size)
    if not ranks.first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        transformers.utils.logging.disable_progress_bar()
    return ranks


# ------------------------------------------------------------------------------ start


@dataclasses.dataclass
class Learner:
    """Parameters that are trained: by name, and which process owns their moments."""

    parameters: dict[str, Tensor]
    owners: dict[str, int]
    lr: float
    norm: str  # name of the metric that is the norm of their gradient


class Tracker(typing.NamedTuple):
    """TensorBoard, Weights & Biases or Trackio: takes the rows of metrics.jsonl, too."""

    log: Callable[[dict], None]
    close: Callable[[], None]


@dataclasses.dataclass
class Run:
    """All that a run holds."""

    config: Config
    algorithm: gspo.Algorithm
    ranks: Ranks
    folder: Path
    lock: contextlib.AbstractContextManager  # an open file: nobody else writes into the folder
    checkpoint: Path | None  # that it goes on from
    done: int  # rollout steps of the run before it

    # input
    tokenizer: transformers.PreTrainedTokenizerBase
    reward: rewards.Reward
    reward_model: Callable | None  # (prompts, completions) -> scores
    replies: rollout.Replies | None  # of a tool
    prompts: Iterator[dict]  # rows to train on, without end
    held_out: list[dict]

    # the three policies, and what learns
    policy: transformers.PreTrainedModel | None = None  # pi_theta
    old_policy: transformers.PreTrainedModel | None = None  # the sampler: pi_theta or a copy
    ref_policy: transformers.PreTrainedModel | None = None  # only with --kl-coef
    critic: torch.nn.Module | None = None  # only where the algorithm has one
    learners: dict[str, Learner] = dataclasses.field(default_factory=dict)  # policy, critic
    optimizer: torch.optim.Optimizer | None = None  # of the parameters that this process owns
    ends: dict = dataclasses.field(default_factory=dict)  # eos_ids and pad_id, for `generate`
    records_experts: bool = False  # its configuration speaks of experts: routers are watched

    # in progress
    started: float = dataclasses.field(default_factory=time.time)
    before: dict = dataclasses.field(default_factory=dict)  # evaluation before the first step here
    shown_answers: list[dict] = dataclasses.field(default_factory=list)  # of the latest one
    completions_judged: int = 0
    trackers: list[Tracker] = dataclasses.field(default_factory=list)  # beside metrics.jsonl
    step_began: float = 0.0  # as time.perf_counter says
    seconds: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    warned: set[str] = dataclasses.field(default_factory=set)
    stopped: bool = False  # a signal came, to any process: save after this step, and end
    bad_in_a_row: int = 0  # updates skipped because something was not finite
    quiet_steps: int = 0  # steps in a row that taught nothing

    def autocast(self):
        enabled = self.config.dtype == "bfloat16"
        return torch.autocast(self.config.device, torch.bfloat16, enabled=enabled)

    def logprobs(self, model, samples: rollout.Rollout) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N, T): one path for the policy, pi_old and the reference."""
        with self.autocast():
            return rollout.completion_logprobs(
                model,
                samples,
                temperature=self.config.temperature,
                entropy_gradient=self.config.entropy_coef != 0,
            )

    def values(self, samples: rollout.Rollout) -> Tensor:
        """The critic's values (N, T)."""
        with self.autocast():
            return rollout.completion_values(self.critic, samples)

    @contextlib.contextmanager
    def timer(self, phase: str):
        """Adds the seconds within to the metrics, under the name of the phase."""
        begun = time.perf_counter()
        yield
        torch.get_device_module(self.config.device).synchronize()
        self.seconds[f"seconds_{phase}"] += time.perf_counter() - begun

    def warn(self, key: str, message: str) -> None:
        """Says it once a run."""
        if key not in self.warned:
            self.warned.add(key)
            print("warning:", printable(message), flush=True)


def start(config: Config, ranks: Ranks) -> Run:
    """A run that can begin. What can be wrong with the input is found before weights load, and
    where something is, no file is written and no folder stays behind."""
    begun = time.time()
    reward = rewards.parse_reward(config.reward)
    need(
        ("model" in reward.terms) == bool(config.reward_model),
        f"--reward {config.reward}: model in it and --reward-model need each other",
    )
    tool = rewards.parse_tool(config.tool, config.tool_after)
    rows, held_out = read_data(config, reward)
    saved = checkpoint_to_resume(config)
    if config.resume and ranks.first:
        print(f"resume: from {saved}" if saved else "resume: no checkpoint yet, from the start")
    if config.model in BUILT_IN:
        # more threads only wait for each other at this size
        torch.set_num_threads(min(2, torch.get_num_threads()))
    if not ranks.first:
        ranks.wait()  # the first process makes a built-in policy, the others find it
    model_source = saved or start_model(config)
    if ranks.first:
        ranks.wait()
    model = rollout.inspect_model(model_source)
    need(
        model.has_experts or not config.routing_replay,
        "--routing-replay: expected a mixture of experts",
    )
    if config.routing_replay == "sampler":
        with expecting("--routing-replay sampler: expected experts that the sampler can tell"):
            rollout.need_recorded_experts(model_source)
    prompts, held_out = split_prompts(config, prompt_format(config, model), rows, held_out)
    reward_model = replies = None
    if tool:
        replies = rollout.Replies(tool, model.tokenizer, model.vocabulary)
    if config.reward_model:
        reward_model = rollout.reward_model(config.reward_model, config.device)

    with own_folder(config, ranks) as (folder, lock):
        run = Run(
            config=config,
            algorithm=gspo.ALGOS[config.algo],
            ranks=ranks,
            folder=folder,
            lock=lock,
            checkpoint=saved,
            done=steps_of(saved) if saved else 0,
            started=begun,
            tokenizer=model.tokenizer,
            reward=reward,
            reward_model=reward_model,
            replies=replies,
            prompts=prompts,
            held_out=held_out,
            records_experts=model.has_experts,
        )
        load_weights(run, model_source)
        show_first_prompt(run)
        run.before = evaluate(run, "before", run.done, pass_k=True)
        check_verifiers(run)
        open_files(run)
        return run


def read_data(config: Config, reward: rewards.Reward) -> tuple[list | None, list | None]:
    """The rows of --data and --eval-data, None where the flag is not given.

    UserError for what the reward, tried on the first row, or a built-in policy cannot use."""
    rows = held_out = None
    if config.data:
        rows = rewards.read_rows(config.data, "--data", reward)
    if config.eval_data:
        held_out = rewards.read_rows(config.eval_data, "--eval-data", reward)
    task = rewards.TASKS[config.task]
    reward.check(rows or list(itertools.islice(rewards.problems(task, config.seed), 1)))
    if config.model in BUILT_IN:
        source = f"--data {config.data}" if config.data else "--prompt-template"
        check_characters(config, rows or [{"prompt": ""}], source)
        check_characters(config, held_out or [], f"--eval-data {config.eval_data}")
    return rows, held_out


def checkpoint_to_resume(config: Config) -> Path | None:
    """The newest checkpoint of --name, None for a run that begins.

    UserError where the name is taken, or no step is left."""
    if not config.name:
        return None
    folder = Path(config.runs, config.name)
    need(
        config.resume or not folder.exists(),
        f"--name: {folder} exists; new name or --resume?",
    )
    saved = checkpoints(folder)
    if not saved:
        return None
    done = steps_of(saved[-1])
    need(
        done < config.steps,
        f"--steps {config.steps}: {folder} is at step {done}; to go on, ask for more steps",
    )
    return saved[-1]


@contextlib.contextmanager
def own_folder(config: Config, ranks: Ranks) -> Iterator[tuple[Path, typing.Any]]:
    """The run's folder and its lock, for this run alone, made by the first of its processes. If
    what is within fails, folders that were made for it go again."""
    ranks.wait()  # all have seen what is there
    if not ranks.first:
        config.name = ranks.from_first(None)
        yield Path(config.runs, config.name), contextlib.nullcontext()
        return

    runs = Path(config.runs)
    made = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    runs.mkdir(parents=True, exist_ok=True)
    if config.resume:
        folder = runs / config.name
    else:
        folder = named_folder(config)
        made = [folder, *made]
    lock = open(folder / "lock", "w")  # noqa: SIM115 (it stays open while the run lasts)
    try:
        need(take_lock(lock), f"--name {config.name}: another process is at work in {folder}")
        ranks.from_first(config.name)
        yield folder, lock
    except BaseException:
        lock.close()
        if folder in made:
            # with all that is in it: trackers, which may not start, come after our first files
            shutil.rmtree(folder)
        for empty in made:
            with contextlib.suppress(OSError):
                empty.rmdir()
        raise


def named_folder(config: Config) -> Path:
    """Makes runs/NAME, or runs/gspo-1 or the next that is free: runs that start at once get one
    each."""
    if config.name:
        folder = Path(config.runs, config.name)
        folder.mkdir()
        return folder
    for number in itertools.count(1):
        config.name = f"{config.algo}-{number}"
        folder = Path(config.runs, config.name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def take_lock(file: typing.IO) -> bool:
    """Whether nobody else has it. It is free again when the process ends, however it does."""
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_model(run: Run) -> None:
    """Samples and scores a few tokens in float32: some architectures would be trained wrongly."""
    rollout.check_scorer(
        run.policy,
        short_prompts(run),
        pad_id=run.ends["pad_id"],
        max_new_tokens=few_tokens(run),
        record_experts=run.config.routing_replay == "sampler",
    )


@torch.no_grad()
def check_dtype(run: Run) -> None:
    """A few tokens as the run will sample and score them: some models mix float32 and bfloat16."""
    dtype = run.config.dtype
    if dtype == "float32":  # that is what check_model tries
        return
    with expecting(
        f"--dtype {dtype}: the model cannot be sampled and scored in it, expected float32"
    ):
        samples = rollout.generate(
            run.old_policy,
            short_prompts(run),
            group_size=2,
            max_new_tokens=few_tokens(run),
            generator=torch.Generator().manual_seed(0),
            **run.ends,
        )
        run.logprobs(run.policy, samples)


def short_prompts(run: Run) -> list[list[int]]:
    """Two of the held-out prompts, or their ends."""
    prompts = sorted((row["ids"] for row in run.held_out), key=len)
    return [prompt[-64:] for prompt in (prompts[0], prompts[len(prompts) // 4])]


def few_tokens(run: Run) -> int:
    """How many the checks sample: behind the longest prompts fit no more than the run will."""
    return min(8, run.config.max_new_tokens)


def show_first_prompt(run: Run) -> None:
    """The text that the model sees: templates are easily wrong, and nothing else would tell."""
    ids = run.held_out[0]["ids"]
    text = printable(run.tokenizer.decode(ids))
    print(f"first held-out prompt, {len(ids)} tokens: '{text}'", flush=True)


def check_verifiers(run: Run) -> None:
    """UserError if no completion of the first evaluation could be judged: no reward would come."""
    terms = len(run.reward.terms)
    need(
        run.reward.faults < run.completions_judged * terms,
        f"--reward {run.config.reward}: it failed on every completion of the first evaluation: "
        f"{run.reward.fault}",
    )


def split_prompts(
    config: Config, form: PromptFormat, rows: list[dict] | None, held_out: list[dict] | None
) -> tuple[Iterator[dict], list[dict]]:
    """Prompts to train on, without end, and those to evaluate on, each with its tokens."""
    if rows is None:
        problems = rewards.problems(rewards.TASKS[config.task], config.seed, held_out=True)
        problems = list(itertools.islice(problems, config.eval_prompts))
        prompts = built_in_problems(config, form, held_out=False)
        return prompts, encode_rows(problems, form, "held out")

    if held_out is None:
        rows, held_out = hold_out(rows, f"--data {config.data}")
    rows = encode_rows(rows, form, f"--data {config.data}")
    held_out = encode_rows(held_out[: config.eval_prompts], form, "held out")
    return shuffled_epochs(rows, config.seed), held_out


def hold_out(rows: list[dict], source: str) -> tuple[list[dict], list[dict]]:
    """(rows to train on, held-out rows): one prompt in ten, by its hash, wherever it stands."""
    prompts = [rewards.text_of(row["prompt"]) for row in rows]
    different = sorted(set(prompts))
    need(len(different) > 1, f"{source}: expected two prompts, as one in ten is held out")
    held_out = {prompt for prompt in different if rewards.is_held_out(prompt)}
    if not held_out or len(held_out) == len(different):  # a small file
        held_out = {different[0]}
    return (
        [row for row, prompt in zip(rows, prompts) if prompt not in held_out],
        [row for row, prompt in zip(rows, prompts) if prompt in held_out],
    )


def open_files(run: Run) -> None:
    """Flags, metrics, samples and trackers; with --resume what came after the checkpoint will come
    again: its rows are cut off, and prompts go on behind those that were drawn before it."""
    config, folder = run.config, run.folder
    drawn = 0
    if run.ranks.first:
        drawn = prompts_drawn(folder / "metrics.jsonl", run.done)
        keep_rows(folder / "samples.jsonl", run.done)
        # a run without a checkpoint begins again, with the evaluation before its first step
        keep_rows(folder / "evaluations.jsonl", run.done if run.done else -1)
        (folder / "config.new").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        (folder / "config.new").rename(folder / "config.json")
    run.prompts = itertools.islice(run.prompts, run.ranks.from_first(drawn), None)
    if run.ranks.first:
        for name in asked_trackers(config):
            run.trackers.append(open_tracker(name, config, folder, run.done))
    if not run.done:
        keep_answers(run)


def prompts_drawn(path: Path, done: int) -> int:
    """How many the steps so far have drawn, which the rows that stay of metrics.jsonl say."""
    rows = keep_rows(path, done)
    with expecting(f"{path}: expected a row with prompts_drawn of each of {done} steps"):
        need([row["step"] for row in rows] == list(range(1, done + 1)), f"found {len(rows)} rows")
        return sum(int(row["prompts_drawn"]) for row in rows)


def keep_rows(path: Path, done: int) -> list[dict]:
    """Cuts off what a JSONL file has of steps after `done`, and a torn last line; returns what
    stays."""
    rows, size = [], 0
    with open(path, "a+b") as file:
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            with expecting(f"{path}, line {number}: expected a row of a step, in JSON"):
                row = json.loads(line)
                if row["step"] > done:
                    break
            rows.append(row)
            size += len(line)
        file.truncate(size)
    return rows


def load_weights(run: Run, source: str | Path) -> None:
    """The three policies, from safetensors only, the critic and the optimiser."""
    config = run.config
    if config.lora_rank and run.done:
        source = start_model(config)  # the frozen weights; the checkpoint's are merged and rounded
    run.policy = rollout.load_model(source, device=config.device)
    run.ends = rollout.end_and_pad_ids(run.policy, run.tokenizer)
    check_model(run)
    if config.gradient_checkpointing:
        with expecting("--gradient-checkpointing: expected a model that has it"):
            run.policy.activation_checkpointing_enable()

    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    run.old_policy = run.policy  # nothing moves while it samples
    if dtype != torch.float32 or config.stale_steps > 1 or config.lora_rank:
        run.old_policy = rollout.sampler_copy(run.policy, dtype)
    if config.kl_coef:
        run.ref_policy = run.policy  # with LoRA: without its adapter
        if not config.lora_rank:
            run.ref_policy = rollout.sampler_copy(run.policy, dtype)
    if config.lora_rank:
        add_adapters(config, run.policy, dtype)
    check_dtype(run)

    run.learners["policy"] = learner(run.policy, config.lr, "grad_norm", run.ranks)
    if run.algorithm.critic:
        run.critic = critic_of(run.policy)
        run.learners["critic"] = learner(
            run.critic, config.critic_lr, "critic_grad_norm", run.ranks
        )
    run.optimizer = make_optimizer(run)
    if run.done:
        load_trainer_state(run, run.checkpoint / "trainer/state.safetensors")


def learner(module: torch.nn.Module, lr: float, norm: str, ranks: Ranks) -> Learner:
    """The moments of AdamW are shared out over the processes; weights and gradients are not."""
    named = module.named_parameters()
    parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
    owners, loads = {}, [0] * ranks.size
    for name, parameter in parameters.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += parameter.numel()
    return Learner(parameters, owners, lr, norm)


def make_optimizer(run: Run) -> torch.optim.AdamW:
    groups = []
    for each in run.learners.values():
        own = [name for name, owner in each.owners.items() if owner == run.ranks.rank]
        groups.append({"params": [each.parameters[name] for name in own], "initial_lr": each.lr})
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=run.config.device != "mps")


def critic_of(policy) -> torch.nn.Module:
    """The policy's body, and a value that is 0 everywhere."""
    critic = copy.deepcopy(rollout.body_of(policy))
    weights_and_bias = policy.config.get_text_config().hidden_size + 1
    critic.value = torch.nn.Parameter(torch.zeros(weights_and_bias, device=policy.device))
    return critic


# ------------------------------------------------------------------------------ LoRA


class LoraLinear(torch.nn.Module):
    """A frozen linear layer and its adapter: x W^T + alpha / R x A^T B^T (arXiv 2106.09685).

    B is 0 at first, so that training begins at the model itself."""

    def __init__(self, linear: torch.nn.Linear, rank: int, alpha: float, dtype: torch.dtype):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.linear.weight.data = linear.weight.data.to(dtype)
        device = linear.weight.device
        self.lora_A = torch.nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_B = torch.nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
        self.scale = alpha / rank
        self.on = True

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs.to(self.linear.weight.dtype))
        if not self.on:
            return outputs
        down = torch.nn.functional.linear(inputs, self.lora_A)
        return outputs + self.scale * torch.nn.functional.linear(down, self.lora_B)

    @property
    def weight(self) -> Tensor:
        """For layers that multiply by the weight themselves (Mamba, DeepSeek V3.2)."""
        if not self.on:
            return self.linear.weight
        return self.merged()

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def merged(self) -> Tensor:
        """(out, in) the weight of one linear layer that does the same, float32."""
        return self.linear.weight.float() + self.scale * (self.lora_B @ self.lora_A)


def add_adapters(config: Config, policy, dtype: torch.dtype) -> None:
    """Every weight is frozen, and linear layers of the body get an adapter each; layers that share
    a weight (Zamba) share it."""
    policy.requires_grad_(False)
    body = rollout.body_of(policy)
    layers = {name: module for name, module in body.named_modules() if is_linear(module)}
    need(layers, f"--lora-rank: {policy.config.model_type} has no linear layers of torch")
    wanted = {name.rpartition(".")[2] for name in layers}
    if config.lora_targets:
        known, wanted = wanted, set(config.lora_targets.replace(" ", "").split(","))
        need(
            wanted <= known,
            f"--lora-targets {config.lora_targets}: the model has {', '.join(sorted(known))}",
        )
    generator = torch.Generator().manual_seed(config.seed)
    adapters: dict[int, LoraLinear] = {}  # by the identity of the weight
    for name, linear in layers.items():
        path, _, last = name.rpartition(".")
        if last not in wanted:
            linear.weight.data = linear.weight.data.to(dtype)
            continue
        adapter = LoraLinear(linear, config.lora_rank, config.lora_alpha, dtype)
        twin = adapters.setdefault(id(linear.weight), adapter)
        if twin is adapter:
            bound = linear.in_features**-0.5  # as a linear layer begins
            start = torch.rand(adapter.lora_A.shape, generator=generator) * 2 * bound - bound
            adapter.lora_A.data.copy_(start)
        adapter.lora_A, adapter.lora_B = twin.lora_A, twin.lora_B
        setattr(body.get_submodule(path), last, adapter)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer and nothing more: a router that is derived of one returns what
    it chose, too (Llama 4)."""
    if type(module).__name__ == "FalconLinear":  # the same, written out
        return True
    return type(module).forward is torch.nn.Linear.forward


@contextlib.contextmanager
def adapters_off(policy) -> Iterator[None]:
    """Within, the policy is the model that it began as."""
    adapters = [module for module in policy.modules() if isinstance(module, LoraLinear)]
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def merged_weights(policy) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, buffers too, of the model without adapters that does the same."""
    adapters = {
        path: module for path, module in policy.named_modules() if isinstance(module, LoraLinear)
    }
    inside = tuple(f"{path}." for path in adapters)
    for name, tensor in policy.state_dict().items():
        if not name.startswith(inside):
            yield name, tensor
    for path, adapter in adapters.items():
        yield f"{path}.weight", adapter.merged()
        if adapter.linear.bias is not None:
            yield f"{path}.bias", adapter.linear.bias


@torch.no_grad()
def refresh(copied, policy) -> None:
    """A frozen copy takes the policy's weights, in place: captured graphs stay valid."""
    tensors = copied.state_dict()
    for name, weight in merged_weights(policy):
        tensors[name].copy_(weight)


def write_adapter(run: Run, folder: Path) -> None:
    """The adapter alone, as the peft package reads it."""
    config, tensors, targets = run.config, {}, set()
    for path, module in run.policy.named_modules():
        if isinstance(module, LoraLinear):
            targets.add(path.rpartition(".")[2])
            for name, weight in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
                # a copy: a file has no room for one that two layers share
                tensors[f"base_model.model.{path}.{name}.weight"] = weight.detach().clone()
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model),
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")


# ------------------------------------------------------------------------------ phases of a step


@dataclasses.dataclass
class MicroBatch:
    """Rows of a batch that run through the model together, and what pi_old chose for them."""

    rows: Tensor  # (n,) indices into the batch
    unscored: bool = False  # its old log-probs are those of its first forward pass in `improve`
    routing: rollout.Routing | None = None  # experts that pi_old chose, with a mixture of experts


@dataclasses.dataclass
class Update:
    """One optimiser step: its completions, and those of them that can move the policy."""

    rows: Tensor  # (n,) indices into the batch; the loss is divided by their completions or tokens
    micro_batches: list[MicroBatch]  # of live rows alone, and of those that this process works on


@dataclasses.dataclass
class Batch:
    """One rollout step: N completions in groups of G, T tokens wide."""

    # collect
    step: int
    samples: rollout.Rollout
    rows: list[dict]  # the data behind each completion
    texts: list[str]
    scores: list[rewards.Score]
    rewards: Tensor  # (N,) with shaping
    mask: Tensor  # (N, T) tokens that the loss sees
    correct: Tensor  # (prompts drawn, G) float64, what was not kept included

    # plan
    live: Tensor | None = None  # (N,) completions that can move the policy
    updates: list[Update] = dataclasses.field(default_factory=list)

    # freeze: constants of the step, (N, T)
    old_logprobs: Tensor | None = None  # for the first update's rows they come in `losses`
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None

    # compare, or plan where rewards alone decide
    advantages: Tensor | None = None  # (N,) or (N, T)
    returns: Tensor | None = None  # (N, T), the critic's targets
    mismatched: Tensor | None = None  # (N, T) tokens that --mismatch-mask leaves out

    # improve
    new_logprobs: Tensor | None = None  # (N, T), each row as its own update saw it
    first_logprobs: Tensor | None = None  # (N, T) of the first update's forward pass: of pi_old
    bad_updates: int = 0

    def own_micro_batches(self) -> list[MicroBatch]:
        """Those of all updates that this process works on."""
        return [part for update in self.updates for part in update.micro_batches]

    @property
    def all_dead(self) -> bool:
        """No group could teach: each is all right or all wrong."""
        return bool((self.correct.amax(1) == self.correct.amin(1)).all())


@dataclasses.dataclass
class Judged:
    """Completions with their texts, the rows of data behind them, and their scores."""

    samples: rollout.Rollout
    texts: list[str]
    rows: list[dict]
    scores: list[rewards.Score]


def sample(
    run: Run,
    model,
    prompts: list[dict],
    seed: str,
    group_size: int,
    temperature: float,
    record_experts: bool = False,
) -> Judged:
    """group_size completions of each prompt, scored; the same seed text gives the same."""
    config, ranks = run.config, run.ranks
    number = int(hashlib.sha256(f"{config.seed} {seed}".encode()).hexdigest()[:15], 16)
    own = prompts[ranks.rank :: ranks.size]
    faults = run.reward.faults  # before: only what is added here is summed over processes
    judged = None
    if own:
        with run.timer("sample"):
            samples = rollout.generate(
                model,
                [row["ids"] for row in prompts],
                group_size=group_size,
                max_new_tokens=config.max_new_tokens,
                temperature=temperature,
                generator=torch.Generator().manual_seed(number),
                max_slots=config.max_slots,
                cache_gb=cache_gb(run),
                share=rollout.Share(ranks.rank, ranks.size),
                record_experts=record_experts,
                replies=run.replies,
                **run.ends,
            )
        with run.timer("score"):
            judged = judge(run, samples, [row for row in own for _ in range(group_size)])
    run.completions_judged += len(prompts) * group_size
    if ranks.size == 1:
        return judged
    with run.timer("sample"):
        return from_all(run, judged, faults, len(prompts), group_size)


def cache_gb(run: Run) -> float:
    """Memory for keys and values; on a GPU what is free, less what the updates will want."""
    if run.config.cache_gb is not None:
        return run.config.cache_gb
    trained = sum(
        parameter.nbytes for each in run.learners.values() for parameter in each.parameters.values()
    )
    later = trained  # gradients
    if run.optimizer is not None and not run.optimizer.state:  # AdamW's moments come with a step
        later += 2 * trained / run.ranks.size
    return rollout.default_cache_gb(run.policy.device, later / 1e9)


def judge(run: Run, samples: rollout.Rollout, rows: list[dict]) -> Judged:
    """What the verifiers say of completions; a reward model's score is a field of the row for them.

    rows: the data behind each completion."""
    texts = []
    for ids, length in zip(samples.completions.tolist(), samples.lengths.tolist()):
        texts.append(run.tokenizer.decode(ids[:length], skip_special_tokens=True))
    if run.reward_model:
        found = run.reward_model([row["prompt"] for row in rows], texts)
        rows = [{**row, "reward_model": score} for row, score in zip(rows, found)]
    return Judged(samples, texts, rows, run.reward.score(texts, rows))


def from_all(run: Run, judged: Judged | None, faults: int, prompts: int, group_size: int) -> Judged:
    """The completions of all processes, in the order of the prompts."""
    if judged is not None:
        judged.samples = judged.samples.to("cpu")
    found = run.ranks.gather((judged, run.reward.faults - faults, run.reward.fault))
    run.reward.faults = faults + sum(more for _, more, _ in found)
    for _, _, fault in found:
        run.reward.fault = run.reward.fault or fault

    # process r has the prompts r, r + size, ...
    parts = [part for part, _, _ in found if part is not None]
    order = [
        prompt
        for rank in range(run.ranks.size)
        for prompt in range(prompts)[rank :: run.ranks.size]
    ]
    groups = torch.tensor(order).argsort().tolist()  # for each prompt the place of its group
    everything = join(parts, members(groups, group_size), run.ends["pad_id"])
    everything.samples = everything.samples.to(run.config.device)
    return everything


def collect(run: Run, step: int) -> Batch:
    """Sample and score P groups; dynamic sampling goes on until P of them are neither all right nor
    all wrong, or --max-refills are over. Then `plan` what to do with them."""
    config, size = run.config, run.config.group_size
    run.reward.faults = 0
    if run.replies:
        run.replies.faults = 0
    attempts = 1
    if config.dynamic_sampling:
        attempts += config.max_refills

    drawn: list[Judged] = []
    for attempt in range(attempts):
        prompts = list(itertools.islice(run.prompts, config.prompts_per_step))
        seed = f"{step} {attempt}"
        judged = sample(
            run,
            run.old_policy,
            prompts,
            seed,
            size,
            config.temperature,
            record_experts=config.routing_replay == "sampler",
        )
        drawn.append(judged)
        correct = [score.correct for each in drawn for score in each.scores]
        correct = torch.tensor(correct, dtype=torch.float64).view(-1, size)
        groups = kept_groups(correct, config)
        if len(groups) == config.prompts_per_step:
            break
    else:
        run.warn(
            "refills",
            f"step {step}: {len(groups)} of {config.prompts_per_step} groups are neither all right "
            f"nor all wrong, after {len(correct)} prompts (--max-refills {config.max_refills})",
        )
    if not groups:
        groups = [0]  # a batch is never empty; the advantages of this group will be 0

    completions = members(groups, size)
    judged = join(drawn, completions, run.ends["pad_id"])
    samples = judged.samples
    mask = samples.completion_mask
    if config.overlong_filter:  # what was cut off leaves the loss, but not the attention
        mask = mask & ~samples.truncated[:, None]
    batch = Batch(
        step=step,
        samples=samples,
        rows=judged.rows,
        texts=judged.texts,
        scores=judged.scores,
        rewards=shaped_rewards(config, judged).to(config.device),
        mask=mask,
        correct=correct,
    )
    plan(run, batch)
    return batch


def kept_groups(correct: Tensor, config: Config) -> list[int]:
    """Indices of the groups to train on: by position, as a prompt may come twice."""
    if not config.dynamic_sampling:
        return list(range(len(correct)))
    alive = correct.amax(1) != correct.amin(1)
    return alive.nonzero()[:, 0].tolist()[: config.prompts_per_step]


def members(groups: list[int], group_size: int) -> list[int]:
    """Indices of the completions of some groups: those of one group are contiguous."""
    return [group_size * group + member for group in groups for member in range(group_size)]


def join(drawn: list[Judged], completions: list[int], pad_id: int) -> Judged:
    """The chosen completions of several rollouts, in one."""
    texts = [text for judged in drawn for text in judged.texts]
    rows = [row for judged in drawn for row in judged.rows]
    scores = [score for judged in drawn for score in judged.scores]
    return Judged(
        samples=rollout.Rollout.cat([judged.samples for judged in drawn], pad_id)[completions],
        texts=[texts[i] for i in completions],
        rows=[rows[i] for i in completions],
        scores=[scores[i] for i in completions],
    )


def shaped_rewards(config: Config, judged: Judged) -> Tensor:
    """(N,) what the verifiers pay, less what length and repetition cost."""
    costs = costs_of_texts(config, judged.samples)
    return torch.tensor([score.reward + cost for score, cost in zip(judged.scores, costs)])


def costs_of_texts(config: Config, samples: rollout.Rollout) -> list[float]:
    """What length and repetition add to each reward: 0 or less.

    The length is the whole text's, as --max-new-tokens is: a tool's part of it counts."""
    costs = []
    for ids, length in zip(samples.completions.tolist(), samples.lengths.tolist()):
        repetition = rewards.repetition_penalty(ids[:length])
        overlong = rewards.soft_overlong_penalty(
            length, config.max_new_tokens, config.overlong_cache
        )
        costs.append(config.repetition_penalty * repetition + overlong)
    return costs


def plan(run: Run, batch: Batch) -> None:
    """Works out advantages where rewards alone decide on them, marks the live rows, and divides the
    batch into updates (of whole groups where they divide) and micro-batches (of live rows)."""
    config = run.config
    packed = rollout.takes_our_attention(run.policy)
    batch.advantages = advantages_of_rewards(run, batch)
    batch.live = live_rows(run, batch)
    groups = torch.arange(len(batch.rewards)).view(-1, config.group_size)
    shuffled = random.Random(f"{config.seed} {batch.step}").sample(range(len(groups)), len(groups))
    for rows in groups[shuffled].flatten().split(config.completions_per_update):
        live = rows[batch.live[rows]]
        _, turn = (live // config.group_size).unique_consecutive(return_inverse=True)
        own = live[turn % run.ranks.size == run.ranks.rank]  # whole groups, dealt out in turn
        parts = []
        if len(own):
            samples = batch.samples[own]
            parts = rollout.micro_batches(samples, config.micro_batch_tokens, packed)
        batch.updates.append(Update(rows, [MicroBatch(own[part]) for part in parts]))


def advantages_of_rewards(run: Run, batch: Batch) -> Tensor | None:
    """Advantages where rewards alone decide on them; None where log-probs or values may, too:
    `compare` makes those."""
    config, algorithm = run.config, run.algorithm
    settings = settings_of(config, algorithm.advantage_flags)
    if config.advantage_scale == "terms":
        terms, weights = reward_terms(run, batch)
        advantages = gspo.term_advantages(terms, weights, config.group_size)
    elif algorithm.reads == "outcomes":
        advantages = algorithm.advantages(batch.rewards, config.group_size, **settings)
    elif algorithm.reads == "steps":
        token_rewards, step_ends = place_rewards(run, batch)
        advantages = algorithm.advantages(token_rewards, step_ends, config.group_size, **settings)
    else:
        return None
    if config.dynamic_sampling and batch.all_dead:
        advantages.zero_()  # a dead group moves nothing, not by penalties for its lengths either
    return advantages


def reward_terms(run: Run, batch: Batch) -> tuple[Tensor, list[float]]:
    """(N, K) what each verifier pays, and what length and repetition cost; K weights."""
    names = list(run.reward.terms)
    terms = torch.tensor(
        [[score.terms[name] for name in names] for score in batch.scores],
        device=batch.rewards.device,
    )
    # not as a difference of rewards, whose rounding would tell equal costs apart
    costs = torch.tensor(costs_of_texts(run.config, batch.samples), device=batch.rewards.device)
    weights = [run.reward.terms[name].weight for name in names]
    return torch.cat([terms, costs[:, None]], dim=1), [*weights, 1.0]


def live_rows(run: Run, batch: Batch) -> Tensor:
    """(N,) completions that are worth a forward pass, on the CPU: those whose advantage is not 0,
    or all where that is not known yet, or something beside it reads log-probs; but none of which
    the loss sees no token, under --overlong-filter."""
    if batch.advantages is None or run.ref_policy is not None or run.config.entropy_coef:
        return batch.mask.any(1).cpu()
    moving = (batch.advantages.view(len(batch.mask), -1) != 0) & batch.mask
    return moving.any(1).cpu()


@torch.no_grad()
def freeze(run: Run, batch: Batch) -> None:
    """Scores pi_old, pi_ref and the critic, before the first update moves anything.

    In the micro-batches of the updates, so that the first ratio is exactly 1. The first update
    itself is where the policy still is pi_old: its own forward pass says what pi_old says."""
    scorer = scores_pi_old(run)
    sampler_alone = run.config.old_logprobs == "sampler"  # asked for: of the first update, too
    first_update_tells = not sampler_alone and not old_logprobs_are_read_before(run)
    batch.old_logprobs = torch.zeros_like(batch.samples.sampler_logprobs)
    if scorer == "sampler":
        batch.old_logprobs = batch.samples.sampler_logprobs.clone()
    batch.ref_logprobs = torch.zeros_like(batch.old_logprobs)
    batch.values = torch.zeros_like(batch.old_logprobs)
    for update in batch.updates:
        for micro_batch in update.micro_batches:
            if first_update_tells and update is batch.updates[0]:
                micro_batch.unscored = True
            elif scorer == "trainer":
                score_old(run, batch, micro_batch)
            rows = micro_batch.rows
            if run.ref_policy is not None:
                with adapters_off(run.ref_policy):
                    batch.ref_logprobs[rows], _ = run.logprobs(run.ref_policy, batch.samples[rows])
            if run.critic is not None:
                batch.values[rows] = run.values(batch.samples[rows])
    for scored in (batch.old_logprobs, batch.ref_logprobs, batch.values):
        know_all_rows(run, batch, scored)


def scores_pi_old(run: Run) -> str:
    """trainer or sampler: the policy itself has scored in float32 what it has drawn.

    To rounding alone, so not where rounding may choose another expert, nor where advantages come of
    it: a KL to a reference that is still the policy has to be exactly 0."""
    if run.config.old_logprobs != "auto":
        return run.config.old_logprobs
    same = run.old_policy is run.policy and rollout.takes_our_attention(run.policy)
    rounding_matters = run.records_experts or old_logprobs_are_read_before(run)
    return "sampler" if same and not rounding_matters else "trainer"


def know_all_rows(run: Run, batch: Batch, values: Tensor) -> None:
    """values (N, T) become, in place, those of the process that worked on the row."""
    if run.ranks.size == 1:
        return
    own = torch.zeros(len(values), 1, dtype=torch.bool, device=values.device)
    for micro_batch in batch.own_micro_batches():
        own[micro_batch.rows] = True
    values.copy_(torch.where(own, values, 0.0))
    run.ranks.sum(values)


def old_logprobs_are_read_before(run: Run) -> bool:
    """Whether advantages depend on old log-probs, so that no update can bring them."""
    kl_in_reward = run.ref_policy is not None and run.algorithm.kl_in == "reward"
    return bool(run.config.tis_cap or run.config.mismatch_mask) or kl_in_reward


def score_old(run: Run, batch: Batch, micro_batch: MicroBatch) -> None:
    with recording(run, micro_batch):
        logprobs, _ = run.logprobs(run.policy, batch.samples[micro_batch.rows])
    batch.old_logprobs[micro_batch.rows] = logprobs


@contextlib.contextmanager
def recording(run: Run, micro_batch: MicroBatch) -> Iterator[None]:
    """Keeps the experts that pi_old chooses within, where there are any."""
    if not run.records_experts:
        yield
        return
    with new_routing(run) as micro_batch.routing:
        yield
    need(
        micro_batch.routing.experts or not run.config.routing_replay,
        "--routing-replay: the routers of this model cannot be watched",
    )


def new_routing(run: Run) -> rollout.Routing:
    """What watches the routers of a pass that replays nothing of pi_old's. What the sampler chose
    is replayed in every pass, if at all."""
    if run.config.routing_replay == "sampler":
        return rollout.SamplerRouting()
    return rollout.Routing()


def compare(run: Run, batch: Batch) -> None:
    """Advantages that need log-probs or values (the others are there since `plan`); less weight, or
    none, where the sampler was another policy."""
    config, samples = run.config, batch.samples
    if batch.advantages is None:
        batch.advantages = advantages_of_tokens(run, batch)
    if config.tis_cap:
        weights = gspo.truncated_importance_weights(
            batch.old_logprobs,
            samples.sampler_logprobs,
            batch.mask,
            cap=config.tis_cap,
            per=config.tis_level or "token",
        )
        batch.advantages = batch.advantages.view(len(weights), -1) * weights
    if config.mismatch_mask:
        stays = gspo.mismatch_mask(
            batch.old_logprobs,
            samples.sampler_logprobs,
            batch.mask,
            per=config.mismatch_mask,
            **settings_of(config, MISMATCH_FLAGS),
        )
        batch.advantages = batch.advantages.view(len(stays), -1) * stays
        batch.mismatched = batch.mask & ~stays


def advantages_of_tokens(run: Run, batch: Batch) -> Tensor:
    """(N, T) from rewards that stand at their tokens, log-probs and values."""
    config, algorithm, samples = run.config, run.algorithm, batch.samples
    settings = settings_of(config, algorithm.advantage_flags)
    token_rewards, _ = place_rewards(run, batch)
    if algorithm.kl_in == "reward":  # k1, per token
        kl = batch.old_logprobs - batch.ref_logprobs
        token_rewards -= config.kl_coef * batch.mask * kl

    if algorithm.reads == "tokens":
        advantages = algorithm.advantages(token_rewards, batch.mask, **settings)
    else:
        # a completion that was cut off is not over: the critic's last word stands for the rest
        bootstrap = batch.values.gather(1, last_token(samples))[:, 0] * samples.truncated
        advantages, batch.returns = algorithm.advantages(
            token_rewards, batch.values, batch.mask, bootstrap=bootstrap, **settings
        )
        advantages = gspo.whiten(advantages, batch.mask)
    if config.dynamic_sampling and batch.all_dead:
        advantages.zero_()
    return advantages


def settings_of(config: Config, flags: dict[str, str]) -> dict:
    """Parameter -> the value of the flag that sets it."""
    return {parameter: getattr(config, name) for parameter, name in flags.items()}


def latest_own(samples: rollout.Rollout) -> Tensor:
    """(N, T) for each token the index of the last one up to it that is the policy's own."""
    mask = samples.completion_mask
    steps = torch.arange(mask.shape[1], device=mask.device)
    return (steps * mask).cummax(1).values


def last_token(samples: rollout.Rollout) -> Tensor:
    """(N, 1) index of each completion's last token that is the policy's own."""
    return latest_own(samples)[:, -1:]


def place_rewards(run: Run, batch: Batch) -> tuple[Tensor, Tensor]:
    """Rewards where they are earned, and where steps end, (N, T) each.

    The outcome stands at the last token; a step's reward where its text is complete. What a tool
    wrote is no action: what would stand there goes to the policy's token before."""
    own = latest_own(batch.samples)
    last = own[:, -1:]
    token_rewards = torch.zeros_like(batch.samples.sampler_logprobs)
    token_rewards = token_rewards.scatter(1, last, batch.rewards[:, None])
    step_ends = torch.zeros_like(batch.mask).scatter(1, last, True)
    for i, score in enumerate(batch.scores):
        if not score.steps:
            continue
        ids = batch.samples.completions[i, : batch.samples.lengths[i]].tolist()
        for end, reward in score.steps:
            token = rollout.token_that_completes(ids, batch.texts[i][:end], run.tokenizer)
            token = int(own[i, token])
            token_rewards[i, token] += reward
            step_ends[i, token] = True
    return token_rewards, step_ends


def improve(run: Run, batch: Batch) -> list[dict]:
    """The updates of a step: epochs over its minibatches. Returns the metrics of those made."""
    config = run.config
    for group in run.optimizer.param_groups:
        warm_up = min(1.0, batch.step / max(config.warmup_steps, 1))
        group["lr"] = group["initial_lr"] * warm_up

    batch.new_logprobs = torch.zeros_like(batch.old_logprobs)
    made = []
    for update in batch.updates * config.epochs:
        metrics = accumulate_gradients(run, batch, update)
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:  # no step: it would ruin the weights
            batch.bad_updates += 1
            run.bad_in_a_row += 1
            need(
                run.bad_in_a_row <= config.max_bad_updates,
                f"step {batch.step}: {run.bad_in_a_row} bad updates in a row, "
                f"not finite in {', '.join(wrong)}",
            )
        else:
            take_step(run)
            made.append(metrics)
            if metrics:  # an update without a live row says nothing
                run.bad_in_a_row = 0
        if batch.first_logprobs is None:
            batch.first_logprobs = batch.new_logprobs.clone()
    forget_gradients(run)  # their memory is for sampling
    for scored in (batch.old_logprobs, batch.new_logprobs, batch.first_logprobs):
        know_all_rows(run, batch, scored)
    return made


def take_step(run: Run) -> None:
    """Each process moves the parameters that it owns, and all get them."""
    run.optimizer.step()
    for each in run.learners.values():
        weights = [parameter.data for parameter in each.parameters.values()]
        run.ranks.send(weights, list(each.owners.values()))


def forget_gradients(run: Run) -> None:
    for each in run.learners.values():
        for parameter in each.parameters.values():
            parameter.grad = None


def accumulate_gradients(run: Run, batch: Batch, update: Update) -> dict:
    """The gradient of one update, summed over its micro-batches, at most --max-grad-norm long;
    returns the update's metrics."""
    config = run.config
    denom = units(batch.mask[update.rows], run.algorithm.unit)
    live_mask = batch.mask[update.rows[batch.live[update.rows]]]
    totals = {"loss": torch.zeros((), device=config.device)}
    forget_gradients(run)
    for micro_batch in update.micro_batches:
        loss, metrics = losses(run, batch, micro_batch, denom, live_mask)
        loss.backward()
        totals["loss"] += loss.detach()
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0) + value

    norms = {}
    for each in run.learners.values():
        parameters = list(each.parameters.values())
        sum_gradients(run, parameters, nothing_to_learn=not len(live_mask))
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        norms[each.norm] = float(norm)
    if not len(live_mask):
        return {}  # it moves by momentum alone: nothing to measure
    sums = collections.Counter()
    for each in run.ranks.gather({name: float(value) for name, value in totals.items()}):
        sums.update(each)  # a Counter's update adds
    return {**sums, **norms}


def sum_gradients(run: Run, parameters: list[Tensor], nothing_to_learn: bool) -> None:
    """The gradient of all processes; where no row is live it is 0, and momentum alone moves."""
    if run.ranks.size == 1 and not nothing_to_learn:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    run.ranks.sum(*[parameter.grad for parameter in parameters])


def units(mask: Tensor, unit: str) -> Tensor:
    """Tokens, or completions with a token, of a mask (n, T): 0-d, at least 1."""
    if unit == "completion":
        mask = mask.any(1)
    return mask.sum().clamp(min=1)


def losses(
    run: Run, batch: Batch, micro_batch: MicroBatch, denom: Tensor, live_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the update's loss (0-d), and of its metrics (0-d, detached).

    denom: completions or tokens of the whole update, for the loss; live_mask (n, T): the mask of
    its live rows, for metrics, which are means over those."""
    config, algorithm, rows = run.config, run.algorithm, micro_batch.rows
    samples, mask = batch.samples[rows], batch.mask[rows]
    with routing_of_update(run, micro_batch):
        logprobs, entropy = run.logprobs(run.policy, samples)
    batch.new_logprobs[rows] = logprobs.detach()
    if micro_batch.unscored:
        batch.old_logprobs[rows] = logprobs.detach()
        micro_batch.unscored = False

    advantages = batch.advantages[rows]
    if config.off_policy_delta is not None:
        stays = gspo.off_policy_mask(
            logprobs,
            samples.sampler_logprobs,
            advantages,
            mask,
            delta=config.off_policy_delta,
        )
        advantages = advantages.view(len(stays), -1) * stays
    loss, metrics = algorithm.loss(
        logprobs,
        batch.old_logprobs[rows],
        advantages,
        mask,
        denom=denom,
        **settings_of(config, algorithm.loss_flags),
    )
    # the loss is a mean over all completions of the update, its metrics over the live ones
    all_to_live = denom / units(live_mask, algorithm.unit)
    metrics = {name: value * all_to_live for name, value in metrics.items()}

    if config.off_policy_delta is not None:
        metrics["off_policy_masked"] = (mask & ~stays).sum() / units(live_mask, "token")

    mean_entropy = (entropy * mask).sum() / units(live_mask, "token")
    loss = loss - config.entropy_coef * mean_entropy
    metrics["entropy"] = mean_entropy.detach()

    if run.ref_policy is not None:
        in_loss = algorithm.kl_in == "loss"
        kl, kl_metrics = gspo.kl_penalty(
            logprobs if in_loss else logprobs.detach(),  # in the reward it is a metric here
            batch.ref_logprobs[rows],
            mask,
            estimator=algorithm.kl_estimator,
            per=algorithm.unit,
            denom=denom,
        )
        loss = loss + config.kl_coef * kl
        metrics |= kl_metrics

    if run.critic is not None:
        critic_loss, critic_metrics = gspo.value_loss(
            run.values(samples),
            batch.values[rows],
            batch.returns[rows],
            mask,
            denom=denom,
            **settings_of(config, VALUE_FLAGS),
        )
        loss = loss + critic_loss
        metrics |= critic_metrics
    return loss, metrics


def routing_of_update(run: Run, micro_batch: MicroBatch):
    """Experts in the updates: recorded where pi_old's are not yet known, replayed where asked."""
    if micro_batch.unscored:
        return recording(run, micro_batch)
    if run.config.routing_replay == "policy":
        return rollout.Routing(micro_batch.routing)
    if run.config.routing_replay == "sampler":
        return rollout.SamplerRouting()
    return contextlib.nullcontext()


# ------------------------------------------------------------------------------ report


# a documentation of metrics.jsonl: name -> what it is; what is healthy
METRICS = {
    # what came in
    "step": "rollout step, from 1",
    # rewards: of what is trained on, but solved and dead: of all that was drawn
    "reward": "mean over the completions trained on, shaping included; rises",
    "reward_std": "its standard deviation; above 0",
    "reward/NAME": "mean of one verifier, before its weight; rises",
    "solved": (
        "mean correctness of all completions drawn: the share that is right where verifiers pay 0 "
        "or 1 (pass@1 at the training temperature); rises"
    ),
    "solved_any": (
        "mean over prompts of the best completion: the share solved at least once (pass@G) "
        "where rewards are 0 or 1; above solved: there is something to learn"
    ),
    "dead_right": (
        "share of groups that are all right: advantage 0, but for shaping, `format` and `model`; "
        "rises as the task is learned; near 1: take harder prompts"
    ),
    "dead_wrong": (
        "share of groups that are all wrong: advantage 0, but for shaping, `format` and `model`; "
        "falls; near 1: take easier prompts or a larger group"
    ),
    "prompts_drawn": (
        "prompts sampled this step, refills of dynamic sampling included; --prompts-per-step "
        "without dynamic sampling"
    ),
    # lengths, in tokens that are the policy's own: those of a tool do not count
    "length_mean": "tokens of a completion, without a tool's; no drift to the limit",
    "length_min": "tokens of the shortest; above 1",
    "length_max": "tokens of the longest; below --max-new-tokens",
    "length_finished": "mean tokens of those that ended by themselves; near length_mean",
    "length_right": (
        "mean tokens of the completions that are right, if any are; drifts as the next, or "
        "not at all"
    ),
    "length_wrong": "mean tokens of those that are wrong; rising alone: wrong ones run on",
    "truncated": (
        "share without an end token within --max-new-tokens; near 0; if it rises with length, "
        "raise the limit"
    ),
    "tool_calls": "with --tool: replies that were written into a completion, mean",
    "tool_tokens": "with --tool: share of the completions' tokens that it wrote; steady",
    "tool_faults": "with --tool: times that it raised, or returned no text, in this step; 0",
    # what moved the policy: means over updates, and in each over its live rows
    "advantage_abs": (
        "mean of |A| over all that is trained on, live or not; falls as dead groups grow"
    ),
    "clip_fraction": (
        "share of units whose clipped branch is active: completions for GSPO, tokens for most "
        "others; GSPO's is far above GRPO's (the paper: 0.15 against 0.0013, of tokens). The "
        "first update of a rollout clips nothing: with four it is 0.75 at most, with one 0"
    ),
    "clip_fraction_q1": (
        "clip_fraction of the shortest quarter of the live completions; as that of the longest, "
        "unless the clip weighs on lengths"
    ),
    "clip_fraction_q2": "of the second quarter",
    "clip_fraction_q3": "of the third quarter",
    "clip_fraction_q4": "of the longest quarter",
    "clip_fraction_high": "the part of it above the band, where the advantage is positive",
    "ratio_mean": "mean importance ratio, in the algorithm's unit; within 0.003 of 1 for GSPO",
    "approx_kl": (
        "mean of ratio − 1 − log ratio, in the algorithm's unit (GSPO: of s): drift from π_old "
        "within the step, in nats; small and steady; a rise comes before collapse"
    ),
    "mismatch_masked": (
        "with --mismatch-mask: share of tokens that it leaves out of the loss; near 0"
    ),
    "off_policy_masked": "with --off-policy-delta: share of tokens that it leaves out; near 0",
    "expert_flips": (
        "mixtures of experts, at evaluations: share of (completion token, layer) whose set of "
        "experts differs from π_old's after the updates; not with --old-logprobs sampler; with "
        "--routing-replay sampler what the routers would choose, each on top of the sampler's "
        "experts; small and steady"
    ),
    "sampler_flips": (
        "with --routing-replay sampler, not --old-logprobs sampler: share of (completion token, "
        "layer) where the trainer's π_old would choose another set of experts than the sampler "
        "did; 0 up to ties in float32; bfloat16, --stale-steps: what the replay hides"
    ),
    "kl": "KL to the reference, nats, with --kl-coef only; grows slowly",
    "entropy": (
        "of the policy's token distribution, nats, from the logits; falls slowly; near 0 "
        "early: exploration is over"
    ),
    "value_loss": "PPO's critic: half the clipped squared error, in units of reward squared; falls",
    "value_clip_fraction": "share of tokens whose value moved too far in one step to count; near 0",
    "explained_variance": (
        "1 − variance of (return − value) / variance of the return, before the updates; above "
        "0; it falls again when all is solved and returns hardly vary"
    ),
    "critic_grad_norm": "the critic's, before clipping; steady",
    "grad_norm": "before clipping at --max-grad-norm, mean over updates; steady",
    # how far apart: pi_theta from pi_old, each completion as its own update saw it
    "policy_kl": (
        "π_θ against π_old over the tokens of all live completions, each as its own update saw it "
        "(so that those of the first update count 0); as approx_kl"
    ),
    "policy_token_std": "spread of token log-ratios; above the next",
    "policy_sequence_std": (
        "spread of length-normalised sequence log-ratios; steady; a multiple of GSPO's band "
        "means that most completions are clipped"
    ),
    "policy_log_s_q1": (
        "mean of |log s| over the shortest quarter of the live completions; above the longest "
        "one's: short completions reach GSPO's band first"
    ),
    "policy_log_s_q2": "of the second quarter",
    "policy_log_s_q3": "of the third quarter",
    "policy_log_s_q4": "of the longest quarter",
    "policy_ratio_mean": "mean of s; near 1",
    "policy_ratio_min": "smallest s",
    "policy_ratio_max": "largest s",
    "policy_outside_clip": (
        "share of completions with s outside 1 − 3e-4 … 1 + 4e-4; above GSPO's clip_fraction: "
        "only one side is clipped"
    ),
    # and the trainer's pi_old from the sampler, before the first update
    "sampler_kl": (
        "trainer's against sampler's log-probs, before the first update; 0 up to rounding in "
        "float32; bfloat16, --stale-steps: watch it"
    ),
    "sampler_token_std": "spread of that log-ratio by token; below 1e-4 in float32",
    "sampler_sequence_std": (
        "spread by sequence; below 1e-5 in float32, else --old-logprobs trainer"
    ),
    "sampler_ratio_mean": "mean sequence ratio; 1",
    "sampler_ratio_min": "smallest; 1",
    "sampler_ratio_max": "largest; 1",
    "sampler_outside_clip": (
        "share of completions that the sampler alone puts outside GSPO's band; 0"
    ),
    # the run and the machine
    "loss": (
        "of the algorithm, KL, entropy bonus and critic included, mean over updates; near 0, and "
        "not to be looked at"
    ),
    "bad_updates": (
        "updates skipped, a statistic of theirs not being finite; more than --max-bad-updates "
        "in a row stop the run; 0"
    ),
    "verifier_faults": "times a verifier raised, or returned no number, in this step; 0",
    "lr": "learning rate of the policy, after warm-up --lr",
    "seconds_sample": "sampling",
    "seconds_score": "the verifier; a slow one looks like this",
    "seconds_compare": "advantages that need log-probs or values; near 0 for GSPO",
    "seconds_freeze": (
        "reference log-probs, values, and old log-probs where the trainer scores them, but for "
        "the first update's"
    ),
    "seconds_flips": "scoring once more for expert_flips",
    "seconds_improve": "forward, backward, optimiser",
    "seconds_ranks": "part of all these: waiting for other processes, and sending to them",
    "tokens_per_second": (
        "completion tokens trained on, a second of the step, evaluation and checkpoint left out"
    ),
    "memory_gb": "peak memory of the GPU since the start; below the card's",
    "eval_solved": "held-out greedy accuracy, every --eval-every steps; rises with solved",
    "eval_pass@K": (
        "share of held-out prompts that one of K samples solves, at the end; above eval_solved"
    ),
}


def measure(run: Run, batch: Batch, updates: list[dict], thorough: bool) -> dict:
    """The row of metrics.jsonl: what a person may want to see of a step.

    thorough: what costs a pass over the batch, too."""
    row = {"step": batch.step}
    row |= measure_rewards(run, batch)
    row |= measure_lengths(batch)
    row |= measure_tool(run, batch)
    row |= measure_by_length(run, batch)
    row |= measure_learning(run, batch, updates)
    row |= measure_distances(run, batch)
    row |= measure_sampler_experts(run, batch)
    if thorough:
        row |= measure_experts(run, batch)
    row |= measure_machine(run, batch)
    numbers = {name: float(value) for name, value in row.items()}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}  # for JSON
    return {**numbers, "step": batch.step}


def measure_rewards(run: Run, batch: Batch) -> dict:
    """Rewards, of what is trained on; right and wrong, of all that was drawn. Add yours here."""
    correct = batch.correct
    row = {}
    row["reward"] = batch.rewards.mean()
    row["reward_std"] = batch.rewards.std()
    for name in batch.scores[0].terms:
        terms = [score.terms[name] for score in batch.scores]
        row[f"reward/{name}"] = sum(terms) / len(terms)
    row["solved"] = correct.mean()
    row["solved_any"] = correct.amax(1).mean()
    row["dead_right"] = (correct.amin(1) == 1).float().mean()
    row["dead_wrong"] = (correct.amax(1) == 0).float().mean()
    row["prompts_drawn"] = len(correct)
    row["verifier_faults"] = run.reward.faults
    return row


def measure_lengths(batch: Batch) -> dict:
    """In tokens that are the policy's own."""
    lengths = batch.samples.completion_mask.sum(1).float()
    finished = lengths[~batch.samples.truncated]
    right = torch.tensor([score.correct for score in batch.scores], device=lengths.device) >= 1
    row = {}
    row["length_mean"] = lengths.mean()
    row["length_min"] = lengths.min()
    row["length_max"] = lengths.max()
    row["length_finished"] = finished.sum() / max(len(finished), 1)
    row["truncated"] = 1 - len(finished) / len(lengths)
    if right.any():
        row["length_right"] = lengths[right].mean()
    if not right.all():
        row["length_wrong"] = lengths[~right].mean()
    return row


def measure_tool(run: Run, batch: Batch) -> dict:
    if run.replies is None:
        return {}
    forced = batch.samples.forced
    begins = forced[:, 1:] & ~forced[:, :-1]  # the first token is always the policy's
    row = {}
    row["tool_calls"] = begins.sum() / len(forced)
    row["tool_tokens"] = forced.sum() / batch.samples.lengths.sum()
    found = run.ranks.gather((run.replies.faults, run.replies.fault))
    row["tool_faults"] = sum(faults for faults, _ in found)
    for _, fault in found:
        if fault:
            run.warn("tool", fault)
    return row


def measure_by_length(run: Run, batch: Batch) -> dict:
    """What the clip does to short and to long completions, a quarter of the live ones each."""
    live = batch.live.nonzero()[:, 0]
    if len(live) < 4:
        return {}
    lengths = batch.mask[live].sum(1).cpu()  # as `live` is
    shortest_first = live[lengths.argsort(stable=True)]
    flags = settings_of(run.config, run.algorithm.loss_flags)
    row = {}
    for quarter, rows in enumerate(shortest_first.tensor_split(4), start=1):
        mask = batch.mask[rows]
        new, old = batch.new_logprobs[rows], batch.old_logprobs[rows]
        _, metrics = run.algorithm.loss(new, old, batch.advantages[rows], mask, **flags)
        row[f"clip_fraction_q{quarter}"] = metrics["clip_fraction"]
        row[f"policy_log_s_q{quarter}"] = sequence_log_ratios(new - old, mask).abs().mean()
    return row


def measure_learning(run: Run, batch: Batch, updates: list[dict]) -> dict:
    """What moved the policy: |A| over all rows, the rest over live ones, means over the updates
    that had some."""
    row = {}
    row["advantage_abs"] = mean_advantage(batch)
    for name in dict.fromkeys(name for metrics in updates for name in metrics):
        values = [metrics[name] for metrics in updates if name in metrics]
        row[name] = sum(values) / len(values)
    row["bad_updates"] = batch.bad_updates
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    if batch.mismatched is not None:
        live_tokens = batch.mask[batch.live].sum().clamp(min=1)
        row["mismatch_masked"] = batch.mismatched[batch.live].sum() / live_tokens
    if run.critic is not None and batch.mask.sum() > 1:
        row["explained_variance"] = explained_variance(batch)
    return row


def measure_distances(run: Run, batch: Batch) -> dict:
    """How far policies are apart: the new one and the old, the trainer's old one and the sampler's;
    the latter over the first update's rows, which were scored before anything moved."""
    live = batch.live.nonzero()[:, 0]
    first = batch.updates[0].rows
    first = first[batch.live[first]]
    samples = batch.samples
    return {
        **drift("policy", batch.new_logprobs, batch.old_logprobs, samples, live),
        **drift("sampler", batch.first_logprobs, samples.sampler_logprobs, samples, first),
    }


def measure_experts(run: Run, batch: Batch) -> dict:
    if not run.records_experts:
        return {}
    changed, seen = expert_flips(run, batch)
    if not seen:  # nobody watched pi_old, or no layer is a mixture
        return {}
    return {"expert_flips": changed / seen}


def measure_sampler_experts(run: Run, batch: Batch) -> dict:
    """Where pi_old was scored on top of the sampler's experts, its own choices are known."""
    if run.config.routing_replay != "sampler":
        return {}
    changed, seen = 0, 0
    for micro_batch in batch.own_micro_batches():
        if micro_batch.routing is not None and micro_batch.routing.choices:
            flips = micro_batch.routing.sampler_flips()
            changed += int(flips.sum())
            seen += len(flips)
    changed, seen = of_all_processes(run, changed, seen)
    return {"sampler_flips": changed / seen} if seen else {}


def measure_machine(run: Run, batch: Batch) -> dict:
    row = {name: round(seconds, 3) for name, seconds in run.seconds.items()}
    row["memory_gb"] = max(run.ranks.gather(torch.cuda.max_memory_allocated() / 1e9))
    if run.ranks.size > 1:
        row["seconds_ranks"] = round(run.ranks.seconds, 3)
    tokens = float(batch.samples.completion_mask.sum())
    row["tokens_per_second"] = round(tokens / (time.perf_counter() - run.step_began), 1)
    return row


def mean_advantage(batch: Batch) -> Tensor:
    """Mean of |A|, over completions or tokens."""
    size = batch.advantages.abs()
    if batch.advantages.dim() == 1:
        return size.sum() / len(batch.advantages)
    mask = batch.samples.completion_mask
    return (size * mask).sum() / mask.sum()


def drift(
    prefix: str, logprobs: Tensor, old_logprobs: Tensor, samples: rollout.Rollout, rows: Tensor
) -> dict[str, Tensor]:
    """How far two scorings (N, T) of some rows are apart, 0-d each: k3 over tokens, std of token
    and of sequence log-ratios, mean, min and max of s_i, share of s_i outside GSPO's own band."""
    if not len(rows):
        return {}
    mask = samples.completion_mask[rows]
    log_ratio = logprobs[rows] - old_logprobs[rows]
    tokens = log_ratio[mask]
    sequences = sequence_log_ratios(log_ratio, mask)
    ratio = sequences.exp()
    outside = (ratio < 1 - 3e-4) | (ratio > 1 + 4e-4)
    return {
        f"{prefix}_kl": (tokens.exp() - 1 - tokens).mean(),
        f"{prefix}_token_std": tokens.std(correction=0),
        f"{prefix}_sequence_std": sequences.std(correction=0),
        f"{prefix}_ratio_mean": ratio.mean(),
        f"{prefix}_ratio_min": ratio.min(),
        f"{prefix}_ratio_max": ratio.max(),
        f"{prefix}_outside_clip": outside.float().mean(),
    }


def sequence_log_ratios(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(N, T) -> (N,) log s, the mean over a completion's tokens; 0 where there are none."""
    return torch.where(mask, log_ratio, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def explained_variance(batch: Batch) -> Tensor:
    """1 - var(return - value) / var(return): 1 for a perfect critic, 0 for a constant."""
    returns = batch.returns[batch.mask]
    error = returns - batch.values[batch.mask]
    return 1 - error.var() / (returns.var() + 1e-8)


@torch.no_grad()
def expert_flips(run: Run, batch: Batch) -> tuple[int, int]:
    """How many pairs of completion token and layer have other experts now that the policy has moved
    than pi_old chose, and of how many pairs both are known."""
    changed, seen = 0, 0
    for micro_batch in batch.own_micro_batches():
        if micro_batch.routing is None or not micro_batch.routing.choices:
            continue
        rows = micro_batch.rows
        with run.timer("flips"), new_routing(run) as now:
            run.logprobs(run.policy, batch.samples[rows])
        flips = micro_batch.routing.flips(now)
        changed += int(flips.sum())
        seen += len(flips)
    return of_all_processes(run, changed, seen)


def of_all_processes(run: Run, changed: int, seen: int) -> tuple[int, int]:
    found = run.ranks.gather((changed, seen))
    return sum(one for one, _ in found), sum(one for _, one in found)


SHOWN_PROMPTS = 4  # whose greedy answers every evaluation keeps, for report.html


def evaluate(run: Run, name: str, step: int, pass_k: bool = False) -> dict:
    """Held-out accuracy: greedy, and the share of prompts that one of k samples solves. Some of the
    greedy answers stay in run.shown_answers, for `keep_answers`."""
    config, k = run.config, run.config.eval_samples
    with fresh_sampler(run) as sampler:
        greedy = sample(run, sampler, run.held_out, f"eval {name}", 1, temperature=0.0)
        result = {"eval_solved": share_solved(greedy, 1)}
        if pass_k and k:
            several = sample(run, sampler, run.held_out, f"eval {name}", k, config.temperature)
            result[f"eval_pass@{k}"] = share_solved(several, k)
    run.shown_answers = [
        {
            "step": step,
            "prompt": rewards.text_of(row["prompt"]),
            "answer": row["answer"],
            "completion": text,
            "reward": score.reward,
            "rendered": run.tokenizer.decode(row["ids"]),
        }
        for row, text, score in zip(greedy.rows, greedy.texts, greedy.scores)
    ][:SHOWN_PROMPTS]
    return result


def share_solved(judged: Judged, group_size: int) -> float:
    """Mean over prompts of the best of group_size completions."""
    correct = torch.tensor([score.correct for score in judged.scores]).view(-1, group_size)
    return float(correct.amax(1).mean())


CONSOLE = {  # metric -> (what the line calls it, how it is written); after those always there
    "ratio_mean": ("ratio", ".4f"),
    "clip_fraction": ("clip", ".0%"),
    "kl": ("kl", ".4f"),
    "entropy": ("entropy", ".2f"),
    "tool_calls": ("calls", ".2f"),
    "grad_norm": ("grad", ".2f"),
    "eval_solved": ("held out", ".1%"),
}


def console_line(row: dict) -> str:
    """What a scientist looks at. Not the loss: it is near 0 by construction."""
    parts = [
        f"step {row['step']}",
        f"reward {row['reward']:.2f}",
        f"solved {row['solved']:.0%}",
        f"len {row['length_mean']:.0f}",
        f"truncated {row['truncated']:.0%}",
        f"dead {row['dead_right'] + row['dead_wrong']:.0%}",
    ]
    for name, (label, form) in CONSOLE.items():
        if name in row:
            parts.append(f"{label} {row[name]:{form}}")
    parts.append(f"{row['tokens_per_second'] / 1000:.1f}k tok/s")
    return " | ".join(parts)


def report(run: Run, batch: Batch, row: dict) -> None:
    """One console line, one row for metrics.jsonl and the trackers, a few samples that a person can
    read; warnings."""
    if not run.ranks.first:
        return
    print(console_line(row), flush=True)
    append_rows(run.folder / "metrics.jsonl", [row])
    append_rows(run.folder / "samples.jsonl", readable_samples(batch, run.config.group_size))
    for tracker in run.trackers:
        tracker.log(row)

    if run.reward.fault:
        run.warn(
            "fault",
            f"{run.reward.fault}: paid 0; what follows is counted in verifier_faults",
        )
    # what is not finite is not in the row
    taught_nothing = row["truncated"] == 1 or row.get("advantage_abs") == 0
    run.quiet_steps = run.quiet_steps + 1 if taught_nothing else 0
    is_last = row["step"] == run.config.steps
    none_taught = run.quiet_steps == row["step"] - run.done  # of those since the run's start here
    if run.quiet_steps == 10 or (is_last and none_taught):
        run.warn(
            "quiet",
            f"none of the last {run.quiet_steps} steps taught much: {row['truncated']:.0%} cut off "
            "(if many: --max-new-tokens), or all groups of equal reward (another --reward? other "
            "prompts? more --group-size?)",
        )


def keep_answers(run: Run) -> None:
    """What the policy answers to some held-out prompts now, and the page that shows it."""
    if run.ranks.first:
        append_rows(run.folder / "evaluations.jsonl", run.shown_answers)
    show_page(run)


def show_page(run: Run) -> None:
    if run.ranks.first:
        write_report([run.folder], run.folder / "report.html")


def readable_samples(batch: Batch, group_size: int) -> list[dict]:
    """The first completion of the first four groups."""
    return [
        {
            "step": batch.step,
            "prompt": rewards.text_of(batch.rows[i]["prompt"]),
            "completion": batch.texts[i],
            "answer": batch.rows[i]["answer"],
            "reward": float(batch.rewards[i]),
        }
        for i in range(0, len(batch.texts), group_size)[:4]
    ]


def append_rows(path: Path, rows: list[dict]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# ---------------------------------------------------------------- trackers of experiments


def asked_trackers(config: Config) -> list[str]:
    flags = {
        "tensorboard": config.tensorboard,
        "wandb": config.wandb,
        "trackio": config.trackio,
    }
    return [name for name, asked in flags.items() if asked]


def open_tracker(name: str, config: Config, folder: Path, done: int) -> Tracker:
    """Of tensorboard, wandb or trackio. A resumed run goes on in the curve that it began."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return tensorboard_tracker(SummaryWriter(folder, purge_step=done + 1))

    module = importlib.import_module(name)
    started = {"project": "gspo", "config": dataclasses.asdict(config), "resume": "allow"}
    with expecting(f"--{name}: expected that it starts"):
        if name == "wandb":
            module.init(name=folder.name, id=tracked_name(folder), dir=folder, **started)
        else:
            module.init(name=tracked_name(folder), **started)
    return module_tracker(module)


@contextlib.contextmanager
def closed_at_the_end(trackers: list[Tracker]) -> Iterator[None]:
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.close()


def tensorboard_tracker(writer) -> Tracker:
    def log(row: dict) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, row["step"])

    return Tracker(log, writer.close)


def module_tracker(module) -> Tracker:
    """Of wandb or trackio, which have the same functions."""

    def log(row: dict) -> None:
        numbers = {name: value for name, value in row.items() if name != "step"}
        module.log(numbers, step=row["step"])

    return Tracker(log, module.finish)


def tracked_name(folder: Path) -> str:
    """The run's name and when it began: an earlier run may have had the same name."""
    path = folder / "tracked-as"
    if not path.exists():
        path.write_text(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return path.read_text()


# ------------------------------------------------------------------------------ report.html


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture of the report: a metric over the steps, or a sum of some, and what is healthy."""

    title: str
    healthy: str
    band: tuple[float, float] | None = None  # shaded
    parts: tuple[str, ...] = ()  # the metrics that are summed; without them the title's


PHASES = tuple(f"seconds_{name}" for name in ("sample", "score", "freeze", "compare", "improve"))
CHARTS = (
    Chart("reward", "rises"),
    Chart("solved", "rises with the reward"),
    Chart("eval_solved", "held-out prompts, greedy; rises with solved"),
    Chart("length_mean", "tokens; no drift to --max-new-tokens"),
    Chart("tool_calls", "replies of --tool in a completion"),
    Chart("truncated", "near 0, else raise --max-new-tokens", band=(0, 0.1)),
    Chart("dead groups", "near 1 little is learned", (0, 0.9), ("dead_right", "dead_wrong")),
    Chart("entropy", "nats; falls slowly; near 0 exploration is over"),
    Chart("clip_fraction", "GSPO 0.1 to 0.6, less once all is solved; token ratios below 0.02"),
    Chart("ratio_mean", "GSPO: within 0.003 of 1", band=(0.997, 1.003)),
    Chart("approx_kl", "nats to π_old; a rise comes before collapse"),
    Chart("kl", "nats to π_ref; grows slowly"),
    Chart("sampler_kl", "0 up to rounding in float32", band=(-1e-5, 1e-5)),
    Chart("grad_norm", "before clipping; steady"),
    Chart("seconds a step", "without evaluations", parts=PHASES),
)
COLORS = 8  # of REPORT_STYLE; then they come again
# what a page shows of a long run
MOST_POINTS = 240  # of a curve
MOST_DOTS = 40
MOST_EVALUATIONS = 12
MOST_CHARACTERS = 2000  # of a text
REPORT_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1d21; --dim: #63676e; --line: #d9dbdf;
  --card: #f5f6f7; --band: #2f9e5d26; --odd: #b3261e; --c0: #0067b1; --c1: #c24a00; --c2: #00825f;
  --c3: #a8407f; --c4: #7a6200; --c5: #4b4fc4; --c6: #99322f; --c7: #3c7d8c }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --text: #e6e8eb; --dim: #9aa0a8;
  --line: #34383e; --card: #1f2226; --band: #4cc38a2b; --odd: #ff8a80; --c0: #5db2f2;
  --c1: #f59a5b; --c2: #45c79f; --c3: #e58fc3; --c4: #d3b545; --c5: #9ea2ff; --c6: #ee8b86;
  --c7: #7cc4d4 } }
* { box-sizing: border-box; overflow-wrap: anywhere }
body { margin: 0 auto; padding: 16px; max-width: 1400px; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 22px } h2 { font-size: 18px; margin: 32px 0 8px }
h1 { margin: 16px 0 4px } figure, p { margin: 0 } .dim, text { color: var(--dim) }
.grid { display: grid; gap: 20px; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)) }
svg { display: block; width: 100% } text { fill: currentColor; font-size: 11px }
.axis { stroke: var(--line) } .band { fill: var(--band) }
.curve { stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round;
  stroke-linecap: round; fill: none }
.area, .dot { stroke: var(--c); fill: var(--c) }
.key { margin-right: 14px; display: inline-block; max-width: 100% }
.key::before { content: "■ "; color: var(--c) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
td, th { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; min-width: 120px }
.differs { font-weight: 600; color: var(--c1) }
.turns { display: flex; gap: 10px; overflow-x: auto; margin: 6px 0 20px }
.turn { flex: 1 0 210px; max-width: 420px; padding: 8px 10px; border-radius: 6px;
  background: var(--card); border-top: 3px solid var(--line) } .new { border-color: var(--c0) }
pre { margin: 4px 0 0; white-space: pre-wrap; max-height: 320px; overflow-y: auto;
  unicode-bidi: isolate; font: 13px/1.4 ui-monospace, monospace }
.prompt { font-weight: 600; max-height: 160px } .odd { color: var(--odd); font-size: 0.85em }
summary { cursor: pointer; margin: 10px 0 }
"""
REPORT_STYLE += "".join(f".color{i} {{ --c: var(--c{i}) }}\n" for i in range(COLORS))


@dataclasses.dataclass
class Chronicle:
    """What a run's folder tells."""

    name: str
    flags: dict
    rows: list[dict]  # metrics.jsonl
    evaluations: list[dict]  # evaluations.jsonl: step, prompt, answer, completion, reward


def write_report(folders: list[Path], path: Path) -> None:
    """Writes one self-contained page about runs: no script, nothing loaded from elsewhere."""
    runs = [read_chronicle(folder) for folder in folders]
    title = "Report of " + ", ".join(run.name for run in runs)
    names = [legend(i, visible(run.name)) for i, run in enumerate(runs)]
    body = [
        tag("h1", visible(title)),
        tag("p", *names, tag("span", "shaded: healthy", class_="dim")),
        tag("h2", "Metrics"),
        tag("div", *[metric_figure(chart, runs) for chart in CHARTS], class_="grid"),
        tag("h2", "Seconds by phase"),
        tag("div", *[phase_figure(run) for run in runs], class_="grid"),
        tag("h2", "The same held-out prompts at every evaluation"),
        *[answers(run) for run in runs],
        tag("h2", "Flags"),
        flag_table(runs),
    ]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # completions are hostile; should one get past visible(), it still loads and runs nothing
        '<meta http-equiv="Content-Security-Policy" content="',
        "default-src 'none'; style-src 'unsafe-inline'\">",
        tag("title", html.escape(title)),
        tag("style", REPORT_STYLE),
    ]
    body = tag("body", "\n".join(body))
    page = "<!doctype html>\n" + tag("html", tag("head", *head), body, lang="en") + "\n"
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(page, encoding="utf-8", errors="replace")
    unfinished.replace(path)  # whoever opens it finds a whole page


def read_chronicle(folder: Path) -> Chronicle:
    flags = read_objects(folder / "config.json", whole=True)
    rows = read_objects(folder / "metrics.jsonl")
    evaluations = read_objects(folder / "evaluations.jsonl")
    return Chronicle(
        name=folder.resolve().name,
        flags=flags[0] if flags else {},
        rows=[row for row in rows if is_number(row.get("step"))],
        evaluations=[row for row in evaluations if is_number(row.get("step"))],
    )


def read_objects(path: Path, whole: bool = False) -> list[dict]:
    """The objects of a file, one a line, or one as a whole. What is torn is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    found = []
    for part in [text] if whole else text.split("\n"):
        try:
            value = json.loads(part)
        except ValueError:  # a line that is being written
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def is_number(value) -> bool:
    """Finite, and small enough for a float."""
    return type(value) in (int, float) and abs(value) < 1e300  # nan is not


# ---------------------------------------------------------------- its HTML


def tag(name: str, *inside: str, **attributes) -> str:
    """An element. What is inside is HTML already; attributes are written class_, stroke_width."""
    words = [name]
    for key, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else html.escape(str(value))
        name_in_html = key.strip("_").replace("_", "-")
        words.append(f'{name_in_html}="{text}"')
    return f"<{' '.join(words)}>{''.join(inside)}</{name}>"


def visible(value) -> str:
    """Text as HTML: escaped, and what would hide or reorder text (control, bidi) as its code."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    left = len(text) - MOST_CHARACTERS
    pieces = []
    for character in text[:MOST_CHARACTERS]:
        kind = unicodedata.category(character)
        if character in "\n\t" or (kind[0] != "C" and kind not in ("Zl", "Zp")):
            pieces.append(html.escape(character))
        else:
            pieces.append(tag("span", f"[U+{ord(character):04X}]", class_="odd"))
    if left > 0:
        pieces.append(tag("span", f" … and {left} more characters", class_="odd"))
    return "".join(pieces)


def legend(color: int, text: str) -> str:
    return tag("span", text, class_=f"key color{color % COLORS}")


def figure(picture: str, *caption: str) -> str:
    return tag("figure", picture, tag("figcaption", *caption))


# ---------------------------------------------------------------- its curves


def points_of(rows: list[dict], metrics: tuple[str, ...]) -> list[tuple[float, float]]:
    """(step, sum of the metrics), nan where one is not finite; a row that has none is no point."""
    points = []
    for row in rows:
        values = [row[name] for name in metrics if name in row]
        if values:
            finite = all(is_number(value) for value in values)
            points.append((row["step"], sum(values) if finite else math.nan))
    return thinned(points)


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of as many neighbours as it takes for at most MOST_POINTS points."""
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    means = []
    for start in range(0, len(points), size):
        steps, values = zip(*points[start : start + size])
        means.append((sum(steps) / len(steps), sum(values) / len(values)))
    return means


@dataclasses.dataclass
class Plot:
    """Axes of a picture: from (step, value) to a place in it."""

    first: float  # step
    last: float
    low: float  # value
    high: float

    left, right, top, bottom = 52.0, 314.0, 6.0, 132.0  # of 320 x 150, the rest is for labels

    def x(self, step: float) -> float:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Values beyond the axes lie on their ends."""
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - min(max(share, 0), 1) * (self.bottom - self.top)

    def path(self, points: list[tuple[float, float]]) -> str:
        """A line with gaps where values are nan."""
        moves, gap = [], True
        for step, value in points:
            if math.isnan(value):
                gap = True
                continue
            place = f"{self.x(step):.1f} {self.y(value):.1f}"
            moves.append(f"M{place}h0" if gap else f"L{place}")  # h0: a dot, should it stay alone
            gap = False
        return "".join(moves)

    def band(self, low: float, high: float) -> str:
        top, bottom = self.y(high), self.y(low)
        size = {"width": self.right - self.left, "height": bottom - top}
        return tag("rect", class_="band", x=self.left, y=top, **size)

    def dots(self, points: list[tuple[float, float]], color: str) -> list[str]:
        """With their numbers, for a mouse that rests on them."""
        drawn = []
        for step, value in points:
            if not math.isnan(value):
                note = tag("title", f"step {step:g}: {value:.5g}")
                place = {"cx": self.x(step), "cy": self.y(value), "r": 2}
                drawn.append(tag("circle", note, class_=f"dot {color}", **place))
        return drawn

    def axes(self) -> list[str]:
        drawn = []
        for tick in round_ticks(self.low, self.high):
            y = self.y(tick)
            drawn.append(tag("path", class_="axis", d=f"M{self.left} {y:.1f}H{self.right}"))
            drawn.append(tag("text", f"{tick:.6g}", x=self.left - 5, y=y + 4, text_anchor="end"))
        drawn.append(tag("text", f"step {self.first:g}", x=self.left, y=146))
        drawn.append(tag("text", f"{self.last:g}", x=self.right, y=146, text_anchor="end"))
        return drawn


def round_ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers between them."""
    decade = 10.0 ** math.floor(math.log10(high - low))
    steps = [decade * factor for factor in (0.2, 0.5, 1, 2)]
    step = next(step for step in steps if (high - low) / step <= 5)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * number for number in range(first, last + 1)]


def value_range(values: list[float]) -> tuple[float, float]:
    """What an axis shows: all values with a margin, none of it negative if they are not."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    margin = 0.05 * (high - low)
    if size < 1e-100:  # 0, as far as a picture can tell
        margin = 1.0
    elif margin <= 1e-9 * size:  # flat but for rounding
        margin = 0.1 * size
    if low >= 0:
        return max(low - margin, 0.0), high + margin
    return low - margin, high + margin


def picture(drawn: list[str], name: str) -> str:
    return tag("svg", *drawn, viewBox="0 0 320 150", role="img", aria_label=name)


def metric_figure(chart: Chart, runs: list[Chronicle]) -> str:
    """One metric of all runs; nothing where no run has it."""
    metrics = chart.parts or (chart.title,)
    curves = [points_of(run.rows, metrics) for run in runs]
    steps = [step for curve in curves for step, _ in curve]
    values = [value for curve in curves for _, value in curve if not math.isnan(value)]
    if not values:
        return ""
    plot = Plot(min(steps), max(steps), *value_range(values))
    drawn = []
    if chart.band:
        drawn.append(plot.band(*chart.band))
    drawn += plot.axes()
    for i, curve in enumerate(curves):
        color = f"color{i % COLORS}"
        drawn.append(tag("path", class_=f"curve {color}", d=plot.path(curve)))
        if len(curve) <= MOST_DOTS:
            drawn += plot.dots(curve, color)
    last = [legend(i, f"{curve[-1][1]:.5g}") for i, curve in enumerate(curves) if curve]
    healthy = tag("div", visible(chart.healthy), class_="dim")
    return figure(picture(drawn, chart.title), tag("b", chart.title), " ", *last, healthy)


def phase_figure(run: Chronicle) -> str:
    """Where the seconds of a run's steps go, phases on top of each other."""
    found = {name for row in run.rows for name in row if name.startswith("seconds_")}
    found.discard("seconds_ranks")  # is part of the others
    names = [name for name in PHASES if name in found] + sorted(found.difference(PHASES))
    if not names:
        return tag("p", visible(run.name), ": no step yet")
    rows = [stacked(row, names) for row in run.rows]
    top = points_of(rows, names[-1:])
    highest = max(seconds for _, seconds in top)
    plot = Plot(top[0][0], top[-1][0], 0.0, max(highest, 1e-3))
    drawn, legends = [], []
    for i, name in enumerate(names):
        line = plot.path(points_of(rows, (name,)))
        area = f"{line}V{plot.bottom}H{plot.left}Z"
        drawn.insert(0, tag("path", class_=f"area color{i % COLORS}", d=area))  # lower ones cover
        seconds = [row[name] for row in run.rows if is_number(row.get(name))]
        mean = sum(seconds) / len(run.rows)
        legends.append(legend(i, f"{visible(name.removeprefix('seconds_'))} {mean:.3f} s"))
    drawn += plot.axes()
    caption = tag("b", visible(run.name)), ", mean of its steps:<br>", *legends
    return figure(picture(drawn, "seconds by phase"), *caption)


def stacked(row: dict, names: list[str]) -> dict:
    """The row's value of each name, on top of those of the names before it."""
    total, sums = 0.0, {"step": row["step"]}
    for name in names:
        if is_number(row.get(name)):
            total += row[name]
        sums[name] = total
    return sums


# ---------------------------------------------------------------- its texts


def answers(run: Chronicle) -> str:
    """A run's answers to each of the held-out prompts, evaluation after evaluation."""
    prompts: dict[str, dict] = {}  # prompt -> step -> row; of a step that came twice, the later
    for row in run.evaluations:
        prompts.setdefault(str(row.get("prompt")), {})[row["step"]] = row
    parts = []
    for prompt, by_step in prompts.items():
        first = next(iter(by_step.values()))
        answer = tag("span", "answer: ", visible(first.get("answer")), class_="dim")
        parts.append(tag("pre", visible(prompt), class_="prompt") + answer)
        parts.append(tag("div", *turns(by_step), class_="turns", tabindex=0))
    rendered = [row["rendered"] for row in run.evaluations if "rendered" in row]
    if rendered:
        summary = tag("summary", "the first prompt as the model reads it")
        parts.append(tag("details", summary, tag("pre", visible(rendered[0]))))
    if not parts:
        parts.append("no evaluation yet")
    name = tag("b", visible(run.name))
    return tag("details", tag("summary", name), *parts, open="")


def turns(by_step: dict[float, dict]) -> list[str]:
    """A card per evaluation, evenly chosen if there are many; marked where the text is new."""
    steps = sorted(by_step)
    size = max(1, math.ceil((len(steps) - 1) / (MOST_EVALUATIONS - 1)))
    chosen = steps[:-1:size] + steps[-1:]  # the first and the last are there
    cards, before = [], None
    for step in chosen:
        row = by_step[step]
        text = row.get("completion")
        head = tag("span", f"step {step:g}, reward ", visible(row.get("reward")), class_="dim")
        kind = "turn" if text == before else "turn new"
        cards.append(tag("div", head, tag("pre", visible(text)), class_=kind))
        before = text
    return cards


def flag_table(runs: list[Chronicle]) -> str:
    """The resolved flags of all runs, those that differ marked."""
    head = [tag("th", "flag")] + [tag("th", visible(run.name)) for run in runs]
    lines = [tag("tr", *head)]
    for name in dict.fromkeys(name for run in runs for name in run.flags):
        values = [visible(run.flags.get(name)) for run in runs]
        cells = [tag("td", text) for text in (visible(name), *values)]
        kind = "same" if len(set(values)) == 1 else "differs"
        lines.append(tag("tr", *cells, class_=kind))
    summary = tag("summary", "all resolved flags; colored: where these runs differ")
    return tag("details", summary, tag("div", tag("table", *lines), class_="wide"))


# ------------------------------------------------------------------------------ checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones of a run, the newest last."""
    found = [path.parents[1] for path in folder.glob("checkpoints/*/trainer/state.safetensors")]
    found = [path for path in found if re.fullmatch("step-[0-9]+", path.name)]  # no copies of them
    return sorted(found, key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """12 of checkpoints/step-12."""
    return int(checkpoint.name.removeprefix("step-"))


def save(run: Run, step: int) -> Path:
    """checkpoints/step-N in Hugging Face layout, and trainer/ for --resume; whole or not there."""
    final = run.folder / "checkpoints" / f"step-{step}"
    state = trainer_state(run)
    if run.ranks.first:
        write_checkpoint(run, state, final)
    run.ranks.wait()  # it is written
    return final


def write_checkpoint(run: Run, state: dict[str, Tensor], final: Path) -> None:
    temporary = final.with_name("unfinished")
    for stale in (temporary, final):  # of a run that was killed, or a copy that broke off
        shutil.rmtree(stale, ignore_errors=True)
    if run.config.lora_rank:
        weights = {name: weight.detach() for name, weight in merged_weights(run.policy)}
        run.policy.save_pretrained(temporary, state_dict=weights)
        write_adapter(run, temporary / "adapter")
    else:
        run.policy.save_pretrained(temporary)
    run.tokenizer.save_pretrained(temporary)
    (temporary / "trainer").mkdir()
    safetensors.torch.save_file(state, temporary / "trainer/state.safetensors")
    if hasattr(os, "sync"):  # not on Windows
        os.sync()  # the files and the rows so far are on the disk before the name is there
    temporary.rename(final)
    for old in checkpoints(run.folder)[: -run.config.keep]:
        shutil.rmtree(old)


def parameters_of_state(run: Run) -> dict[str, Tensor]:
    """PART.NAME -> parameter of the policy and of all else that a checkpoint keeps."""
    parts = {"policy": run.policy, "critic": run.critic}
    if run.ref_policy is not run.policy:
        parts["ref_policy"] = run.ref_policy
    if run.config.stale_steps > 1:
        parts["old_policy"] = run.old_policy
    return {
        f"{part}.{name}": parameter
        for part, module in parts.items()
        if module is not None
        for name, parameter in module.named_parameters()
    }


def owners_of_state(run: Run) -> dict[str, int]:
    """PART.NAME -> the process that has the moments of a parameter that is trained."""
    return {
        f"{part}.{name}": owner
        for part, learner in run.learners.items()
        for name, owner in learner.owners.items()
    }


def trainer_state(run: Run) -> dict[str, Tensor]:
    """What --resume needs beside the policy: "weights NAME" of the critic, the reference and a
    stale sampler, "NAME MOMENT" of AdamW, from the process that has it, and "run bad_in_a_row"."""
    state, owners = {}, owners_of_state(run)
    if run.bad_in_a_row:
        state["run bad_in_a_row"] = torch.tensor(run.bad_in_a_row)
    stepped = any(run.ranks.gather(len(run.optimizer.state) > 0))
    for name, parameter in parameters_of_state(run).items():
        if not name.startswith("policy.") or (run.config.lora_rank and parameter.requires_grad):
            state[f"weights {name}"] = parameter.data
        if name in owners and stepped:
            for moment, value in moments(run, parameter, owners[name]).items():
                state[f"{name} {moment}"] = value
    return state


def moments(run: Run, parameter: Tensor, owner: int) -> dict[str, Tensor]:
    """AdamW's numbers of one parameter, for the process that writes them."""
    if run.ranks.rank == owner:
        found = run.optimizer.state[parameter]
    else:
        found = {
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            "step": torch.zeros((), device=device_of_step(run)),
        }
    names = sorted(found)
    run.ranks.send([found[name] for name in names], [owner] * len(names))
    if run.ranks.size == 1:
        return found
    return {name: found[name].cpu() for name in names if run.ranks.first}


def device_of_step(run: Run) -> str:
    """AdamW counts its steps on the CPU, but where it is fused on a GPU."""
    return "cuda" if run.config.device == "cuda" else "cpu"


def load_trainer_state(run: Run, path: Path) -> None:
    """Puts back what `trainer_state` wrote; what it has of parts that are no more is of no use."""
    parameters, owners = parameters_of_state(run), owners_of_state(run)
    state = safetensors.torch.load_file(path, device=run.config.device)
    weights = [key for key in state if key.startswith("weights ")]
    saved_parts = {key.removeprefix("weights ").partition(".")[0] for key in weights}
    if run.ref_policy not in (None, run.policy) and "ref_policy" not in saved_parts:
        # --kl-coef is new: the reference is still the model that the run began with
        run.ref_policy.load_state_dict(rollout.load_model(start_model(run.config)).state_dict())
    for key, value in state.items():
        first, second = key.split()  # "weights NAME", "NAME MOMENT", or "run bad_in_a_row"
        if first == "run":
            run.bad_in_a_row = int(value)
        elif first == "weights" and second in parameters:
            parameters[second].data.copy_(value)
        elif owners.get(first) == run.ranks.rank:
            run.optimizer.state[parameters[first]][second] = value
    if run.old_policy is not run.policy and "old_policy" not in saved_parts:
        refresh(run.old_policy, run.policy)  # it was not stale so far


# ------------------------------------------------------------------------------ the loop


def train(run: Run) -> None:
    """The three-policy loop. A signal to stop raises KeyboardInterrupt when its step is saved."""
    config = run.config
    stop_on_signals(run)
    for step in range(run.done + 1, config.steps + 1):
        last = step == config.steps
        run.seconds.clear()
        run.ranks.seconds = 0.0
        run.step_began = time.perf_counter()

        # 1. snapshot: pi_old <- pi_theta, where the sampler is a copy; pi_ref every ref_every steps
        snapshot(run, step)

        # 2. sample G completions for each of P prompts, 3. score them; with dynamic sampling drop
        # and refill dead groups; then `plan`: advantages that rewards decide on, and the updates
        batch = collect(run, step)

        # 4. freeze: old_logprobs, ref_logprobs, values, without gradients. pi_old needs no pass
        # where its sampler has scored it (`scores_pi_old`), nor for the first update: the policy
        # still is pi_old, so `losses` keeps what its own forward pass says
        with run.timer("freeze"):
            freeze(run, batch)

        # 5. compare: advantages that need phase 4 (those of a critic, or with a KL in the reward),
        # and corrections for a sampler that drifts; for GSPO by itself there is nothing left to do
        with run.timer("compare"):
            compare(run, batch)

        # 6. improve: minibatches of completions, each one optimiser step
        with run.timer("improve"):
            updates = improve(run, batch)

        # 7. report: metrics, evaluation, samples, checkpoint
        evaluates = last or (config.eval_every > 0 and step % config.eval_every == 0)
        row = measure(run, batch, updates, thorough=evaluates)
        if evaluates:
            after = evaluate(run, "after" if last else str(step), step, pass_k=last)
            row |= after
        report(run, batch, row)
        if evaluates:
            keep_answers(run)
        run.stopped = any(run.ranks.gather(run.stopped))
        if last or run.stopped or (config.save_every and step % config.save_every == 0):
            checkpoint = save(run, step)
        if run.stopped and not last:
            show_page(run)
            raise KeyboardInterrupt

    say_how_it_went(run, after, checkpoint)


def say_what_begins(run: Run) -> None:
    config = run.config
    size = f"{run.policy.num_parameters() / 1e6:.1f} M parameters"
    print(
        f"{config.algo}, {size}, {config.device} {config.dtype}, {run.folder}; "
        f"{len(run.held_out)} prompts held out: {percent(run.before)}",
        flush=True,
    )


def say_how_it_went(run: Run, after: dict, checkpoint: Path) -> None:
    config = run.config
    minutes = (time.time() - run.started) / 60
    command = ["python", "rollout.py", "--model", str(checkpoint)]
    for name, value in (
        ("--system", config.system),
        ("--prompt-template", config.prompt_template),
        ("--chat-template-args", config.chat_template_args),
        ("--tool", config.tool),
        ("--tool-after", config.tool_after),
        ("--prompt", rewards.messages_of(run.held_out[0]["prompt"])[-1]["content"]),
    ):
        if value is not None:
            command += [name, printable(value)]
    print(f"held out: {percent(run.before)} -> {percent(after)}, in {minutes:.1f} minutes")
    print(f"the model is in {checkpoint}, try it:")
    print(shlex.join(command))


def percent(result: dict) -> str:
    """solved 27.3%, pass@8 82.4%"""
    return ", ".join(f"{name.removeprefix('eval_')} {value:.1%}" for name, value in result.items())


def snapshot(run: Run, step: int) -> None:
    """Refreshes the sampler and the reference where this step is due."""
    config = run.config
    if run.old_policy is not run.policy and (step - 1) % config.stale_steps == 0:
        refresh(run.old_policy, run.policy)
    if config.ref_every and step > 1 and (step - 1) % config.ref_every == 0:
        refresh(run.ref_policy, run.policy)


@contextlib.contextmanager
def fresh_sampler(run: Run) -> Iterator[transformers.PreTrainedModel]:
    """The sampler with the weights that the policy has now; a stale one then has its own again."""
    if run.old_policy is run.policy:
        yield run.policy
        return
    stale = {}
    if run.config.stale_steps > 1:
        stale = {name: weight.clone() for name, weight in run.old_policy.named_parameters()}
    refresh(run.old_policy, run.policy)
    yield run.old_policy
    for name, weight in run.old_policy.named_parameters():
        if name in stale:
            weight.copy_(stale[name])


def stop_on_signals(run: Run) -> None:
    """The first signal ends the run after its step, with a checkpoint; the next one at once."""

    def stop(number, frame):
        run.stopped = True
        signal.signal(number, signal.default_int_handler)
        if run.ranks.first:
            print("stopping after this step, with a checkpoint", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def report_of_runs(given: dict) -> None:
    """One page for several runs: python train.py --report runs/a runs/b"""
    need(len(given) == 1, "--report: expected no other flag")
    folders = [Path(folder) for folder in given["report"]]
    for folder in folders:
        need(
            (folder / "metrics.jsonl").is_file(),
            f"--report {folder}: expected the folder of a run, with a metrics.jsonl",
        )
    page = folders[0].parent / "report.html"
    write_report(folders, page)
    print(f"the report is in {page}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # transformers' own, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config, ranks, run = Config(), Ranks(), None
    try:
        ranks = join_ranks()
        given = parse_flags(arguments)
        if "report" in given:
            report_of_runs(given)
            return 0
        config = resolve(given)
        run = start(config, ranks)
        with run.lock, closed_at_the_end(run.trackers):
            say_what_begins(run)
            train(run)
        if ranks.size > 1:
            dist.destroy_process_group()
        return 0
    except (UserError, safetensors.SafetensorError) as error:
        status, message = 2, str(error)
    except OSError as error:
        status, message = 2, f"--runs {config.runs}: {error}"
    except KeyboardInterrupt:
        status, message = 130, "stopped"
    except torch.OutOfMemoryError:
        status = 1
        message = (
            f"out of memory; lower --micro-batch-tokens {config.micro_batch_tokens}, "
            f"--cache-gb, --max-slots {config.max_slots} or --max-new-tokens "
            f"{config.max_new_tokens}, or train with --gradient-checkpointing or --lora-rank 16"
        )
    except RuntimeError as error:
        if ranks.size == 1:
            raise
        status, message = 2, f"process {ranks.rank} of {ranks.size}: {error}"
    if run is not None:
        for checkpoint in checkpoints(run.folder)[-1:]:
            message += (
                f"; to go on from {checkpoint}: "
                f"python train.py --resume --name {config.name} --runs {config.runs}"
            )
    if ranks.fails_first():
        kind = "" if status == 130 else "error: "
        print(f"{kind}{printable(message)}", file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # at once: an orderly end would wait for the others
    return status


if __name__ == "__main__":
    sys.exit(main())
