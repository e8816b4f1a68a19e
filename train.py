"""Train a language model with GSPO, or with another row of gspo.ALGOS, on rewards from a verifier.

    python train.py --algo gspo                          # tiny built-in policy, nothing downloaded
    python train.py --algo gspo --model Qwen/Qwen3-0.6B --data train.jsonl --reward math
    python train.py --resume --name NAME                 # go on with runs/NAME
    python train.py --watch runs/NAME                    # curves of a run, in the terminal

Three policies: `policy` is trained; `old_policy` is the sampler's snapshot of it, together with the
tensor old_logprobs; `ref_policy` anchors the KL term, where there is one. `train` is the loop: read
it first. Every random number is a function of (seed, step), so there is no random state to keep.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import gspo
import rewards
import rollout


BUILT_IN = ("tiny", "tiny-moe")
WARM_STEPS, WARM_ROWS, WARM_LR = 300, 32, 3e-3  # supervised learning of the built-in policies


class UserError(Exception):
    """A mistake of the user's: one sentence, exit status 2."""


@dataclasses.dataclass
class Config:
    # The comments are the help texts, and the range at their end is checked.
    # --- what to run
    algo: str = "gspo"  # algorithm {ALGOS}
    model: str = "tiny"  # tiny or tiny-moe (built in), a folder, or a name on the hub
    task: str = "arithmetic"  # built-in problems, unless there is --data {TASKS}
    data: str | None = None  # JSONL file to train on: prompt and answer, or question and answer
    eval_data: str | None = None  # JSONL file to evaluate on; without it a tenth of --data
    reward: str | None = None  # as "math + 0.1*format" or file.py:function; default: the task's
    reward_model: str | None = None  # folder of a sequence classifier with one label
    reward_model_weight: float = 0.5  # w of (1 - w) verifier + w model; 1: the model alone (0, 1]
    steps: int = 50  # rollout steps [1, inf)
    seed: int = 0  # of problems, samples and shuffles [0, inf)
    # --- prompts
    system: str | None = None  # system message, for tokenizers with a chat template
    prompt_template: str | None = None  # text around the prompt, with {prompt} in it
    chat_template_args: dict | None = None  # JSON object, as {"enable_thinking": false}
    max_prompt_tokens: int | None = None  # longer ones are skipped; default: the context [1, inf)
    # --- rollout
    prompts_per_step: int = 32  # prompts P of a rollout step [1, inf)
    group_size: int = 8  # completions G of a prompt [2, inf)
    max_new_tokens: int | None = None  # of a completion; default: the task's, or 1024 [1, inf)
    temperature: float = 1.0  # divides the logits, in sampling and in scoring (0, inf)
    max_slots: int | None = None  # completions sampled at a time; default: all that fit [1, inf)
    cache_gb: float | None = None  # memory for the sampler's keys and values, in GB (0, inf)
    stale_steps: int = 1  # rollout steps between refreshes of the sampler's snapshot [1, inf)
    old_logprobs: str = "trainer"  # who scores pi_old {trainer, sampler}
    tis_cap: float | None = None  # truncated importance sampling from sampler to trainer (0, inf)
    tis_level: str = "token"  # unit of its ratio {token, completion}
    # --- objective (defaults are the papers', in gspo.py)
    clip_low: float | None = None  # the ratio stays above 1 - clip_low; GSPO 3e-4 [0, inf)
    clip_high: float | None = None  # the ratio stays below 1 + clip_high; GSPO 4e-4 [0, inf)
    loss_args: dict | None = None  # JSON object of the loss's other numbers, as {"ratio_max": 4}
    kl_coef: float | None = None  # weight of the KL to the reference; GRPO 0.04, else 0 [0, inf)
    ref_every: int = 0  # steps between refreshes of the reference; 0: never [0, inf)
    advantage_scale: str | None = None  # what group advantages are divided by {group, batch, none}
    entropy_coef: float = 0.0  # bonus per nat of entropy, mean over tokens [0, inf)
    dynamic_sampling: bool | None = None  # refill groups that are all right or all wrong
    max_refills: int = 4  # further rollouts of a step for dynamic sampling [0, inf)
    overlong_cache: int | None = None  # punished tokens before the limit; DAPO a fifth [0, inf)
    overlong_filter: bool = False  # truncated completions leave the loss
    repetition_penalty: float = 0.0  # times the share of repeated 4-grams, off the reward [0, inf)
    gamma: float | None = None  # discount per token, with rewards per token; default 1 (0, 1]
    gae_lambda: float | None = None  # GAE's lambda, with a critic; default 0.95 [0, 1]
    critic_lr: float | None = None  # learning rate of the critic; default 10 x lr (0, inf)
    # --- optimiser
    completions_per_update: int | None = None  # default: a quarter of the rollout's P x G [1, inf)
    epochs: int = 1  # passes over a rollout [1, inf)
    lr: float | None = None  # of AdamW; default 1e-4 for built-in models, else 1e-6 (0, inf)
    warmup_steps: int | None = None  # of the lr; default 0 for built-in models, else 10 [0, inf)
    max_grad_norm: float = 1.0  # gradient clipping (0, inf)
    micro_batch_tokens: int = 16384  # padded tokens of one forward and backward [1, inf)
    gradient_checkpointing: bool = False  # less memory for activations, a third more compute
    routing_replay: bool = False  # mixture of experts: train with the experts that pi_old chose
    max_bad_updates: int = 5  # non-finite updates in a row that are skipped [0, inf)
    # --- evaluation
    eval_every: int = 10  # steps between evaluations; 0: before and after only [0, inf)
    eval_prompts: int = 256  # held-out prompts, greedy [1, inf)
    eval_samples: int = 8  # k of pass@k, before and after; 0: none [0, inf)
    # --- run
    name: str | None = None  # folder of the run; default: the algorithm and a number
    runs: str = "runs"  # folder of all runs
    resume: bool = False  # go on with the newest checkpoint of --name
    save_every: int = 0  # steps between checkpoints; 0: the last only [0, inf)
    keep: int = 2  # checkpoints that are kept [1, inf)
    device: str = "auto"  # device {auto, cuda, cpu, mps}
    dtype: str = "auto"  # of autocast, sampler and reference {auto, float32, bfloat16}
    tensorboard: bool = False  # write TensorBoard events too
    watch: str | None = None  # draw the curves of this run folder and train nothing


# --------------------------------------------------------------------------- flags and input


def need(condition, message: str) -> None:
    if not condition:
        raise UserError(message)


def checked(kind: type, text: str):
    """Converter for argparse that holds to the (range] at the end of a help text."""
    rule = re.search(r"([\[(])(\S+), (\S+)([\])])$", text)

    def convert(value: str):
        result = dict(json.loads(value)) if kind is dict else kind(value)
        if rule:
            above = result > float(rule[2]) or result == float(rule[2]) and rule[1] == "["
            below = result < float(rule[3]) or result == float(rule[3]) and rule[4] == "]"
            if not (above and below):
                raise argparse.ArgumentTypeError(f"found {value}, expected a number in {rule[0]}")
        return result

    convert.__name__ = {dict: "JSON object"}.get(kind, kind.__name__)
    return convert


class Parser(argparse.ArgumentParser):
    def error(self, message):
        names, wrong = self._option_string_actions, re.search(r"(?:arguments|choice): '?([^' ]+)", message)
        if "invalid choice" in message:
            names = re.findall(r"[\w+-]+", message.split("choose from")[1])
        near = difflib.get_close_matches(wrong[1], list(names), 1, 0.5) if wrong else []
        raise UserError(message.removeprefix("argument ") + "".join(f"; did you mean {n}?" for n in near))


def parse_flags(arguments: list[str]) -> dict:
    """The flags that were given, name -> value. The parser is made from Config's source."""
    parser = Parser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    group, kinds = parser, {"int": int, "float": float, "str": str, "dict": dict}
    for line in inspect.getsource(Config).splitlines():
        if "# --- " in line:
            group = parser.add_argument_group(line.split("# --- ")[1])
        if found := re.match(r"    (\w+): (\w+).*? = (.+?)  # (.+?)(?: \{(.*)\})?$", line):
            name, kind, default, text, choices = found.groups()
            choices = {"ALGOS": list(gspo.ALGOS), "TASKS": list(rewards.TASKS)}.get(
                choices, choices and choices.split(", "))
            options = {"action": argparse.BooleanOptionalAction} if kind == "bool" else {
                "type": checked(kinds[kind], text), "choices": choices, "metavar": kind.upper()}
            text += f": {', '.join(choices)}" if choices else ""
            text += "" if default == "None" else f"; default {default}"
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, help=text.replace("%", "%%"), **options)
    return vars(parser.parse_args(arguments))


def resolve(given: dict) -> Config:
    """Config with every default filled in; raises UserError for what cannot be or does nothing."""
    if given.get("resume"):
        saved = Path(given.get("runs", "runs"), given.get("name", ""), "config.json")
        need(given.get("name") and saved.is_file(), f"--resume: expected --name of a run, no {saved}")
        before = json.loads(saved.read_text())
        for name in given.keys() - {"resume"}:
            if before[name] != given[name]:
                print(f"resume: {name} was {before[name]}, {given[name]} is used from now on")
        given = before | given
    config = Config(**given)
    algorithm, task = gspo.ALGOS[config.algo], rewards.TASKS[config.task]
    takes = inspect.signature(algorithm.loss).parameters
    built_in, rows = config.model in BUILT_IN, config.prompts_per_step * config.group_size
    for name, value in (config.loss_args or {}).items():
        need(name in takes and isinstance(value, (int, float)),
             f"--loss-args: expected numbers that the loss of {config.algo} takes, found {name}")
    for name, used in {"clip_low": "clip_low" in takes, "clip_high": "clip_high" in takes,
                       "gae_lambda": algorithm.critic, "critic_lr": algorithm.critic,
                       "gamma": algorithm.advantages in ("reward_to_go", "gae"),
                       "advantage_scale": algorithm.advantages == "group",
                       "tis_cap": config.old_logprobs == "trainer"}.items():
        need(used or config.resume or getattr(config, name) is None, f"--{name.replace('_', '-')}: "
             f"does nothing with --algo {config.algo} --old-logprobs {config.old_logprobs}")
    limit = config.max_new_tokens or (task.max_new_tokens if built_in else 1024)
    for name, value in {
            "reward": "math" if config.data else task.verifier, "lr": 1e-4 if built_in else 1e-6,
            "warmup_steps": 0 if built_in else 10, "completions_per_update": max(rows // 4, 1),
            "max_new_tokens": limit, "gamma": 1.0, "gae_lambda": 0.95,
            "kl_coef": takes["kl_coef"].default if "kl_coef" in takes else 0.0,
            "advantage_scale": algorithm.scale, "dynamic_sampling": algorithm.dynamic_sampling,
            "overlong_cache": limit // 5 if algorithm.overlong_shaping else 0}.items():
        setattr(config, name, value if getattr(config, name) is None else getattr(config, name))
    config.critic_lr = config.critic_lr or 10 * config.lr
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.dtype == "auto":
        config.dtype = "bfloat16" if config.device == "cuda" else "float32"
    need(rows % config.completions_per_update == 0, f"--completions-per-update "
         f"{config.completions_per_update}: expected a divisor of a rollout's {rows} completions")
    need(config.kl_coef or not config.ref_every, "--ref-every: expected --kl-coef above 0 with it")
    need(config.data or not config.eval_data, "--eval-data: expected --data with it")
    need(re.fullmatch(r"\w[\w.+-]*", config.name or "x"),
         f"--name {config.name}: expected letters, digits and . _ + - only")
    need((config.prompt_template or "{prompt}").count("{prompt}") == 1,
         "--prompt-template: expected {prompt} in it, once")
    need(getattr(torch, config.device).is_available(),
         f"--device {config.device}: this machine or this torch has none")
    need(not config.tensorboard or importlib.util.find_spec("tensorboard"),
         "--tensorboard: expected the package tensorboard; install it with: pip install tensorboard")
    return config


def read_rows(flag: str, path: str, reward: rewards.Reward) -> list[dict]:
    """Rows {"prompt", "answer", ...} of a JSONL file; `question` may stand for prompt (GSM8K)."""
    need(Path(path).is_file(), f"{flag} {path}: expected a JSONL file, and there is no such file")
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        place = f"{flag} {path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: expected a JSON object in UTF-8: {error}")
        need(isinstance(row, dict), f"{place}: expected a JSON object, found {type(row).__name__}")
        if "prompt" not in row and "question" in row:
            row["prompt"] = row.pop("question")
        need({"prompt", "answer"} <= row.keys(), f"{place}: expected the fields prompt (or question) "
             f"and answer, found {', '.join(row) or 'none'}")
        need(isinstance(row["prompt"], str) and row["prompt"], f"{place}, field prompt: expected text")
        reason = reward.check_answer(row["answer"])
        need(reason is None, f"{place}, field answer: {reason}")
        rows.append(row)
    need(rows, f"{flag} {path}: expected rows, and the file is empty")
    return rows


def encode(tokenizer, config: Config, text: str) -> list[int]:
    """Token ids of a prompt, inside the template and the chat template where there is one."""
    text = (config.prompt_template or "{prompt}").replace("{prompt}", text)
    if not tokenizer.chat_template:
        return tokenizer.encode(text)
    turns = [{"role": "system", "content": config.system}] if config.system else []
    turns.append({"role": "user", "content": text})
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True,
                                         **(config.chat_template_args or {}))
    return tokenizer.encode(text, add_special_tokens=False)


def fitting(rows: list[dict], flag: str, config: Config, tokenizer, context: int) -> list[dict]:
    """The rows, with their prompts' "ids", less those that are too long."""
    limit = min(config.max_prompt_tokens or context, context - config.max_new_tokens)
    for number, row in enumerate(rows, 1):
        row["ids"] = encode(tokenizer, config, row["prompt"])
        need(config.model not in BUILT_IN or tokenizer.unk_token_id not in row["ids"],
             f"{flag}, row {number}: the built-in model only knows the characters "
             f"{rewards.TASKS[config.task].alphabet!r}; expected --model with another one")
    kept = [row for row in rows if len(row["ids"]) <= limit]
    message = (f"{flag}: {len(rows) - len(kept)} of {len(rows)} prompts are longer than {limit} "
               f"tokens (--max-prompt-tokens, or the context {context} less --max-new-tokens)")
    need(kept, message)
    print(f"skipped: {message}\n" if len(kept) < len(rows) else "", end="")
    return kept


# --------------------------------------------------------------------------- models


def tiny_model(name: str, task: rewards.Task) -> Path:
    """Folder of a built-in policy: supervised learning on demonstrations that are often wrong.

    Made once, on the CPU, from fixed seeds; kept in a cache folder named by what it is made from.
    """
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *task.alphabet])}
    characters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    shape = dict(vocab_size=len(words), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=0,
                 eos_token_id=1, max_position_embeddings=512, tie_word_embeddings=True,
                 rope_parameters={"rope_type": "default", "rope_theta": 100.0})  # short texts
    kind = transformers.Qwen3Config
    if name == "tiny-moe":
        kind = transformers.Qwen3MoeConfig
        shape |= dict(num_hidden_layers=4, num_experts=8, num_experts_per_tok=2,
                      moe_intermediate_size=64, norm_topk_prob=True)
    problems, rng = rewards.problems(task, seed=-1), random.Random(0)
    shown = [(row["prompt"], task.demonstration(row, rng))
             for row in itertools.islice(problems, WARM_STEPS * WARM_ROWS)]
    recipe = repr((shape, shown, WARM_LR, torch.__version__, transformers.__version__))
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gspo",
                  f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}")
    if folder.exists():
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(kind(**shape))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step in range(WARM_STEPS):
        rows = [(len(prompt), tokenizer.encode(prompt + text) + [1])  # a token is a character
                for prompt, text in shown[step * WARM_ROWS:(step + 1) * WARM_ROWS]]
        width = max(len(ids) for _, ids in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for _, ids in rows])
        labels = torch.tensor([[-100] * start + ids[start:] + [-100] * (width - len(ids))
                               for start, ids in rows])
        optimizer.param_groups[0]["lr"] = WARM_LR * min(1, (step + 1) / 20, 2 - 2 * step / WARM_STEPS)
        optimizer.zero_grad()
        policy(ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        progress("warm start", step + 1, WARM_STEPS)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    policy.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    with contextlib.suppress(OSError):  # another run may have been faster
        temporary.rename(folder)
    return folder


def progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\r" if done < total else "\r\033[K"
        print(f"{what} [{'#' * (30 * done // total):30}] {done}/{total}", end=end, file=sys.stderr)


def inspect_model(source: str, flag: str, kinds) -> tuple:
    """(tokenizer, context in tokens) of a model, all checked before its weights load."""
    try:
        config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{flag} {source}: expected a folder or hub name of a model: {reason}")
    need(type(config) in kinds, f"{flag} {source}: {config.model_type} is no model of the kind needed")
    need(tokenizer.eos_token_id is not None, f"{flag} {source}: its tokenizer has no end token")
    pickles = " but pickles, which can run code when they load" * any(Path(source).glob("*.bin"))
    need(not Path(source).is_dir() or any(Path(source).glob("*.safetensors")),
         f"{flag} {source}: expected *.safetensors weights in the folder, found none{pickles}")
    return tokenizer, getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20


def start(config: Config) -> SimpleNamespace:
    """All that a run holds. What can be wrong with the input is found before weights load."""
    run = SimpleNamespace(config=config, algorithm=gspo.ALGOS[config.algo], seconds={},
                          ref_policy=None, critic=None, reward_model=None, tensorboard=None,
                          state={"step": 0, "cursor": 0, "bad": 0, "quiet": 0, "warned": []})
    try:
        run.reward = rewards.parse_reward(config.reward)
    except ValueError as error:
        raise UserError(str(error))
    rows = read_rows("--data", config.data, run.reward) if config.data else None
    held_out = read_rows("--eval-data", config.eval_data, run.reward) if config.eval_data else None
    numbers = (i for i in itertools.count(1) if not Path(config.runs, f"{config.algo}-{i}").exists())
    config.name = config.name or f"{config.algo}-{next(numbers)}"
    run.folder = Path(config.runs, config.name)
    need(config.resume or not run.folder.exists(),
         f"--name {config.name}: {run.folder} exists; expected a new name, or --resume")
    task, source = rewards.TASKS[config.task], config.model
    if source in BUILT_IN:
        source = tiny_model(source, task)
    run.tokenizer, context = inspect_model(source, "--model", transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
    if config.reward_model:
        inspect_model(config.reward_model, "--reward-model",
                      transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    if rows and not held_out:
        random.Random(config.seed).shuffle(rows)
        count = min(config.eval_prompts, max(1, len(rows) // 10))
        need(len(rows) > count, f"--data {config.data}: expected two rows or more, to hold one out")
        held_out, rows = rows[:count], rows[count:]
        print(f"held out for evaluation: {count} of the {len(rows) + count} rows of --data")
    if rows is None:
        run.prompts = rewards.problems(task, config.seed)
        held_out = itertools.islice(rewards.problems(task, config.seed, held_out=True), config.eval_prompts)
        run.prompts = (fitting([row], "--task", config, run.tokenizer, context)[0] for row in run.prompts)
    else:
        rows = fitting(rows, "--data", config, run.tokenizer, context)
        shuffled = (random.Random(f"{config.seed} {epoch}").sample(rows, len(rows))
                    for epoch in itertools.count())
        run.prompts = itertools.chain.from_iterable(shuffled)
    run.held_out = fitting(list(held_out)[:config.eval_prompts], "held out", config, run.tokenizer, context)
    try:
        (run.folder / "checkpoints").mkdir(parents=True, exist_ok=config.resume)
    except OSError as error:
        raise UserError(f"--runs {config.runs}: expected a folder that can be written: {error}")
    write(run.folder / "config.json", json.dumps(vars(config) | {"resume": False}, indent=1))
    load_weights(run, source, (checkpoints(run.folder) or [None])[-1])
    return run


def load_weights(run, source, checkpoint: Path | None) -> None:
    """The policies, and the critic and the reward model where there are any; all from safetensors."""
    config, dtype = run.config, getattr(torch, run.config.dtype)

    def load(path, dtype, kind=AutoModelForCausalLM):
        model = kind.from_pretrained(path, dtype=dtype, use_safetensors=True)
        return model.to(config.device).eval()

    run.policy = load(checkpoint or source, torch.float32)
    run.moe = any("TopKRouter" in type(module).__name__ for module in run.policy.modules())
    need(run.moe or not config.routing_replay, "--routing-replay: expected a mixture of experts")
    if config.gradient_checkpointing:
        run.policy.gradient_checkpointing_enable()
    run.old_policy = run.policy  # nothing moves while it samples, so its own weights will do
    if config.dtype != "float32" or config.stale_steps > 1:
        run.old_policy = rollout.sampler_copy(run.policy, dtype)
    groups = [{"params": list(run.policy.parameters()), "base_lr": config.lr}]
    if config.kl_coef:
        run.ref_policy = load(source, dtype).requires_grad_(False)
    if run.algorithm.critic:
        run.critic = rollout.make_critic(run.policy)
        groups.append({"params": list(run.critic.parameters()), "base_lr": config.critic_lr})
    if config.reward_model:
        kind = transformers.AutoModelForSequenceClassification
        run.reward_model = load(config.reward_model, dtype, kind)
    run.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=config.device == "cuda")
    ends = run.policy.generation_config.eos_token_id
    ends = {run.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    run.eos_ids, pad = sorted(ends), run.tokenizer.pad_token_id
    run.pad_id = run.eos_ids[0] if pad is None else pad
    takes = inspect.signature(run.algorithm.loss).parameters
    run.loss_args = {name: value for name, value in {
        "clip_low": config.clip_low, "clip_high": config.clip_high, "per": run.algorithm.denom,
        "max_completion_length": config.max_new_tokens}.items() if name in takes and value is not None}
    run.loss_args |= config.loss_args or {}
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # not among our requirements
        run.tensorboard = SummaryWriter(run.folder)
    if checkpoint:
        run.state = json.loads((checkpoint / "trainer" / "state.json").read_text())
        for path in (checkpoint / "trainer").glob("*.safetensors"):
            if path.stem == "optimizer":
                moments = {}
                for name, tensor in load_file(path).items():
                    moments.setdefault(int(name.split(".")[0]), {})[name.split(".")[1]] = tensor
                run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": moments})
            else:
                getattr(run, path.stem).load_state_dict(load_file(path), strict=False)  # tied weights
    for path in (run.folder / "metrics.jsonl", run.folder / "samples.jsonl"):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}")]  # a killed run may leave a torn line
        kept = [line for line in kept if json.loads(line)["step"] <= run.state["step"]]
        write(path, "".join(line + "\n" for line in kept))
    run.prompts = itertools.islice(run.prompts, run.state["cursor"], None)


# --------------------------------------------------------------------------- the phases of a step


def sample(run, model, rows: list[dict], seed: str, **options) -> tuple[rollout.Rollout, list[str]]:
    """Completions of prompts, and their texts; the same seed text gives the same ones."""
    config = run.config
    number = int(hashlib.sha256(f"{config.seed} {seed}".encode()).hexdigest()[:15], 16)
    options = {"group_size": config.group_size, "temperature": config.temperature} | options
    samples = rollout.generate(
        model, [row["ids"] for row in rows], max_new_tokens=config.max_new_tokens,
        eos_ids=run.eos_ids, pad_id=run.pad_id, generator=torch.Generator().manual_seed(number),
        max_slots=config.max_slots, cache_gb=config.cache_gb,
        progress=functools.partial(progress, "sampling"), **options)
    pairs = zip(samples.completions.tolist(), samples.lengths.tolist())
    return samples, [run.tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in pairs]


def snapshot(run, step: int) -> None:
    """pi_old <- pi_theta every stale_steps steps; pi_ref <- pi_theta every ref_every steps."""
    if run.old_policy is not run.policy and (step - 1) % run.config.stale_steps == 0:
        rollout.refresh(run.old_policy, run.policy)
    if run.config.ref_every and step > 1 and (step - 1) % run.config.ref_every == 0:
        rollout.refresh(run.ref_policy, run.policy)


def collect(run, step: int) -> SimpleNamespace:
    """Sample and score P groups; dynamic sampling goes on until P of them are not dead."""
    config, size, wanted = run.config, run.config.group_size, run.config.prompts_per_step
    drawn, texts, rows, scores = [], [], [], []
    for attempt in range(1 + config.max_refills * config.dynamic_sampling):
        prompts = list(itertools.islice(run.prompts, wanted))
        run.state["cursor"] += wanted
        samples, new_texts = sample(run, run.old_policy, prompts, f"{step} {attempt}")
        new_rows = [row for row in prompts for _ in range(size)]
        scores += run.reward.score(new_texts, new_rows)
        drawn, texts, rows = drawn + [samples], texts + new_texts, rows + new_rows
        groups = torch.tensor([score.correct for score in scores]).view(-1, size)
        alive = groups.amax(1) != groups.amin(1)  # by position: a prompt may come twice
        keep = (alive if config.dynamic_sampling else alive | True).nonzero().flatten()[:wanted]
        if len(keep) == wanted:
            break
    else:
        warn(run, "refills", f"step {step}: {len(keep)} of the {wanted} groups wanted are neither all "
             f"right nor all wrong, after {len(groups)} prompts (--max-refills {config.max_refills})")
    keep = keep if len(keep) else torch.zeros(1, dtype=torch.long)  # a dead group moves nothing
    keep = (keep[:, None] * size + torch.arange(size)).flatten()
    samples = rollout.Rollout.cat(drawn, run.pad_id)[keep]
    batch = SimpleNamespace(
        rollout=samples, texts=[texts[i] for i in keep], rows=[rows[i] for i in keep],
        scores=[scores[i] for i in keep], groups=groups, mask=samples.completion_mask, experts={})
    batch.rewards = torch.tensor([score.reward for score in batch.scores]).to(config.device)
    if run.reward_model is not None:
        with autocast(config):
            judged = rollout.reward_model_scores(run.reward_model, samples)
        batch.rewards += config.reward_model_weight * (judged - batch.rewards)
    for i, (ids, n) in enumerate(zip(samples.completions.tolist(), samples.lengths.tolist())):
        batch.rewards[i] += config.repetition_penalty * rewards.repetition_penalty(ids[:n])
        if config.overlong_cache:
            batch.rewards[i] += rewards.soft_overlong_penalty(
                n, config.max_new_tokens, config.overlong_cache)
    if config.overlong_filter:  # out of the loss, not out of the attention
        batch.mask = batch.mask & ~samples.truncated[:, None]
    order = torch.arange(len(keep)).view(-1, size)
    shuffled = random.Random(f"{config.seed} {step}").sample(range(len(order)), len(order))
    # optimiser steps, of whole groups where they divide; each a list of micro-batches of rows
    batch.plan = [[rows[part] for part in rollout.micro_batches(samples[rows], config.micro_batch_tokens)]
                  for rows in order[shuffled].flatten().split(config.completions_per_update)]
    return batch


def autocast(config: Config):
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def logprobs_of(run, model, batch, rows, replay=None) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Log-probs, entropies and chosen experts of some rows: one path for policy, old and ref."""
    routing = rollout.routing(model, replay) if run.moe else contextlib.nullcontext([])
    with autocast(run.config), routing as experts:
        return *rollout.completion_logprobs(
            model, batch.rollout[rows], temperature=run.config.temperature), experts


@torch.no_grad()
def freeze(run, batch) -> None:
    """What stays while pi_theta moves: old_logprobs, ref_logprobs, values. They are scored in the
    updates' own micro-batches, so that the ratio of the first update is exactly 1."""
    batch.old_logprobs = batch.rollout.sampler_logprobs.clone()
    batch.ref_logprobs, batch.values = (torch.zeros_like(batch.old_logprobs) for _ in range(2))
    for rows in itertools.chain(*batch.plan):
        if run.config.old_logprobs == "trainer" or run.moe:
            logprobs, _, batch.experts[int(rows[0])] = logprobs_of(run, run.policy, batch, rows)
        if run.config.old_logprobs == "trainer":
            batch.old_logprobs[rows] = logprobs
        if run.ref_policy is not None:
            batch.ref_logprobs[rows] = logprobs_of(run, run.ref_policy, batch, rows)[0]
        if run.critic is not None:
            with autocast(run.config):
                batch.values[rows] = rollout.completion_values(run.critic, batch.rollout[rows])


def compare(run, batch) -> None:
    """Advantages (N,) or (N, T): how much better than its peers, or than the critic's guess."""
    config, samples, mask = run.config, batch.rollout, batch.rollout.completion_mask
    last = (samples.lengths - 1).clamp(min=0)[:, None]
    token_rewards = torch.zeros_like(batch.old_logprobs).scatter(1, last, batch.rewards[:, None])
    if run.algorithm.kl == "reward" and run.ref_policy is not None:
        token_rewards -= config.kl_coef * mask * (batch.old_logprobs - batch.ref_logprobs)
    kind = run.algorithm.advantages
    if run.algorithm.step_rewards and batch.scores[0].steps is not None:
        batch.advantages = gspo.step_advantages(*step_rewards(run, batch), mask, config.group_size)
    elif kind == "group":
        batch.advantages = gspo.group_advantages(
            batch.rewards, config.group_size, scale=config.advantage_scale)
    elif kind == "leave_one_out":
        batch.advantages = gspo.leave_one_out_advantages(batch.rewards, config.group_size)
    elif kind == "batch_mean":
        batch.advantages = gspo.group_advantages(batch.rewards, len(mask), scale="none")
    elif kind == "reward_to_go":
        batch.advantages = gspo.reinforce_plus_plus_advantages(token_rewards, mask, gamma=config.gamma)
    else:  # a completion that was cut off is not over: the critic's last word stands for the rest
        advantages, batch.returns = gspo.gae_advantages(
            token_rewards, batch.values, mask, gamma=config.gamma, lam=config.gae_lambda,
            bootstrap=batch.values.gather(1, last)[:, 0] * samples.truncated)
        batch.advantages = gspo.whiten(advantages, batch.mask)
    if config.tis_cap is not None:
        weights = gspo.truncated_importance_weights(
            batch.old_logprobs, samples.sampler_logprobs, mask, cap=config.tis_cap, per=config.tis_level)
        batch.advantages = batch.advantages.reshape(len(mask), -1) * weights


def step_rewards(run, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(rewards, steps), (N, T): a step that ends at a character ends at that character's token."""
    values = torch.zeros_like(batch.old_logprobs)
    steps = torch.zeros_like(values, dtype=torch.bool)
    rows = zip(batch.rollout.completions.tolist(), batch.rollout.lengths.tolist())
    for i, (ids, n) in enumerate(rows):
        read = [len(run.tokenizer.decode(ids[:t + 1], skip_special_tokens=True)) for t in range(n)]
        for end, value in batch.scores[i].steps or []:
            token = next((t for t in range(n) if read[t] >= end), n - 1)
            values[i, token] += value
            steps[i, token] = True
    return values, steps


def update(run, batch, micro_batches: list) -> dict:
    """One optimiser step, its gradient accumulated over micro-batches; returns its metrics."""
    config, algorithm, totals = run.config, run.algorithm, {}
    rows = torch.cat(micro_batches)
    tokens = batch.mask[rows].sum().clamp(min=1)
    denom = tokens if algorithm.denom == "token" else len(rows)
    run.optimizer.zero_grad()
    for rows in micro_batches:
        mask, replay = batch.mask[rows], batch.experts[int(rows[0])] if config.routing_replay else None
        logprobs, entropy, _ = logprobs_of(run, run.policy, batch, rows, replay)
        batch.new_logprobs[rows] = logprobs.detach()
        loss, metrics = algorithm.loss(logprobs, batch.old_logprobs[rows], batch.advantages[rows],
                                       mask, denom=denom, **run.loss_args)
        metrics["entropy"] = (entropy * mask).sum() / tokens
        loss = loss - config.entropy_coef * metrics["entropy"]
        if run.ref_policy is not None:
            in_loss = algorithm.kl != "reward"  # else it is in the advantages, and here a metric
            kl, kl_metrics = gspo.kl_penalty(
                logprobs if in_loss else logprobs.detach(), batch.ref_logprobs[rows], mask,
                denom=denom, per=algorithm.denom, estimator=algorithm.kl if in_loss else "k1")
            loss, metrics = loss + config.kl_coef * kl * in_loss, metrics | kl_metrics
        if run.critic is not None:
            with autocast(config):
                values = rollout.completion_values(run.critic, batch.rollout[rows])
            critic_loss, critic_metrics = gspo.value_loss(
                values, batch.values[rows], batch.returns[rows], mask, denom=denom)
            loss, metrics = loss + critic_loss, metrics | critic_metrics
        loss.backward()
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.detach()
    norms = [torch.nn.utils.clip_grad_norm_(group["params"], config.max_grad_norm)
             for group in run.optimizer.param_groups]
    totals = {name: float(value) for name, value in totals.items()} | {"grad_norm": float(sum(norms))}
    bad = [name for name, value in totals.items() if not math.isfinite(value)]
    if bad:  # one bad update must not ruin the weights
        run.state["bad"] += 1
        if run.state["bad"] > config.max_bad_updates:
            raise FloatingPointError(f"{run.state['bad']} updates in a row were not finite ({bad[0]})")
        return {"bad_updates": 1}
    run.state["bad"] = 0
    run.optimizer.step()
    return totals


def improve(run, batch, step: int) -> list[dict]:
    """The updates of a step: epochs over its minibatches. Returns the metrics of each."""
    for group in run.optimizer.param_groups:
        group["lr"] = group["base_lr"] * min(1.0, step / max(run.config.warmup_steps, 1))
    batch.new_logprobs, updates = torch.zeros_like(batch.old_logprobs), []
    for micro_batches in batch.plan * run.config.epochs:
        updates.append(update(run, batch, micro_batches))
        if len(updates) == 1:  # of pi_theta before it moved: what the sampler compares with
            batch.first_rows = torch.cat(micro_batches)
            batch.first_logprobs = batch.new_logprobs[batch.first_rows]
    return updates


# --------------------------------------------------------------------------- report


def drift(prefix: str, logprobs, old_logprobs, mask) -> dict:
    """How far two scorings of the same completions (N, T) are apart, by token and by sequence."""
    tokens = (logprobs - old_logprobs)[mask]
    sequences = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    ratio, band = sequences.exp(), inspect.signature(gspo.gspo_loss).parameters
    outside = (ratio < 1 - band["clip_low"].default) | (ratio > 1 + band["clip_high"].default)
    return {f"{prefix}_{name}": float(value) for name, value in {
        "kl": (tokens.exp() - 1 - tokens).mean(), "token_std": tokens.std(),
        "sequence_std": sequences.std(), "ratio_mean": ratio.mean(), "ratio_min": ratio.min(),
        "ratio_max": ratio.max(), "outside_gspo_band": outside.float().mean()}.items()}


def measure(run, batch, step: int, updates: list[dict]) -> dict:
    """The row of metrics.jsonl: all that a person may want to see of a step (README explains each)."""
    samples, groups, scores = batch.rollout, batch.groups, batch.scores
    lengths, finished = samples.lengths.float(), samples.lengths[~samples.truncated].float()
    row = {name: float(value) for name, value in {
        "reward": batch.rewards.mean(), "reward_std": batch.rewards.std(), "solved": groups.mean(),
        "solved_any": (groups.amax(1) > 0).float().mean(),
        "dead_right": (groups.amin(1) == 1).float().mean(),
        "dead_wrong": (groups.amax(1) == 0).float().mean(), "prompts_drawn": len(groups),
        "length_mean": lengths.mean(), "length_min": lengths.min(), "length_max": lengths.max(),
        "length_finished": finished.sum() / max(len(finished), 1),
        "truncated": 1 - len(finished) / len(lengths),
        "advantage_abs": batch.advantages.abs().mean(), "verifier_faults": run.reward.faults,
        "bad_updates": sum("bad_updates" in one for one in updates)}.items()}
    row |= {f"reward/{name}": sum(score.terms[name] for score in scores) / len(scores)
            for name in scores[0].terms}
    updates = [one for one in updates if "bad_updates" not in one]
    for name in updates[0] if updates else ():
        row[name] = sum(one[name] for one in updates) / len(updates)
    first, mask = batch.first_rows, samples.completion_mask
    row |= drift("sampler", batch.first_logprobs, samples.sampler_logprobs[first], mask[first])
    row |= drift("policy", batch.new_logprobs, batch.old_logprobs, mask)
    if run.critic is not None:
        unexplained = (batch.returns - batch.values)[batch.mask].var()
        row["explained_variance"] = float(1 - unexplained / (batch.returns[batch.mask].var() + 1e-8))
    if run.moe:
        row["expert_flips"] = expert_flips(run, batch)
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row |= {f"seconds_{name}": round(value, 3) for name, value in run.seconds.items()}
    row["tokens_per_second"] = round(float(lengths.sum()) / sum(run.seconds.values()), 1)
    if run.config.device == "cuda":
        row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return {"step": step} | row


@torch.no_grad()
def expert_flips(run, batch) -> float:
    """Share of (token, layer) whose set of experts is not that of pi_old any more."""
    flips = []
    for rows in itertools.chain(*batch.plan):
        now = logprobs_of(run, run.policy, batch, rows)[2]
        for old, new in zip(batch.experts[int(rows[0])], now):
            flips.append((old.sort(-1).values != new.sort(-1).values).any(-1).float())
    return float(torch.cat(flips).mean())


def evaluate(run, name: str, pass_k: bool = False) -> dict:
    """Held-out accuracy: greedy, and the share of prompts that one of k samples solves."""
    result, k = {}, run.config.eval_samples
    for label, size, temperature in [("solved", 1, 0.0)] + [(f"pass@{k}", k, 1.0)] * bool(pass_k and k):
        _, texts = sample(run, run.policy, run.held_out, f"eval {name}",
                          group_size=size, temperature=temperature)
        scores = run.reward.score(texts, [row for row in run.held_out for _ in range(size)])
        best = torch.tensor([score.correct for score in scores]).view(-1, size).amax(1)
        result[f"eval_{label}"] = float(best.mean())
    return result


def percent(result: dict) -> str:
    return ", ".join(f"{name.removeprefix('eval_')} {value:.1%}" for name, value in result.items())


def report(run, batch, row: dict) -> None:
    """One console line, one row of metrics.jsonl, a few samples that a person can read."""
    seen, dead = dict.fromkeys(("ratio_mean", "clip_fraction", "kl", "entropy", "grad_norm"), 0.0) | row, (
        row["dead_right"] + row["dead_wrong"])
    print(f"step {row['step']} | reward {row['reward']:.2f} | solved {row['solved']:.0%} | "
          f"len {row['length_mean']:.0f} | truncated {row['truncated']:.0%} | dead groups {dead:.0%} | "
          f"ratio {seen['ratio_mean']:.4f} | clip {seen['clip_fraction']:.0%} | kl {seen['kl']:.4f} | "
          f"entropy {seen['entropy']:.2f} | grad {seen['grad_norm']:.2f} | "
          f"{row['tokens_per_second'] / 1000:.1f}k tok/s"
          + (f" | held out {row['eval_solved']:.1%}" if "eval_solved" in row else ""), flush=True)
    append(run.folder / "metrics.jsonl", row)
    for i in range(0, len(batch.texts), run.config.group_size)[:4]:
        append(run.folder / "samples.jsonl", {
            "step": row["step"], "prompt": batch.rows[i]["prompt"], "completion": batch.texts[i],
            "reward": float(batch.rewards[i]), "answer": batch.rows[i]["answer"]})
    for name, value in row.items() if run.tensorboard else ():
        run.tensorboard.add_scalar(name, value, row["step"])
    if run.reward.first_fault:
        warn(run, "fault", run.reward.first_fault)
    cut = row["truncated"] == 1
    run.state["quiet"] = run.state["quiet"] + 1 if cut or dead == 1 else 0
    if run.state["quiet"] >= 10:
        warn(run, "quiet", "nothing was learned for 10 steps: " + (
            "every completion is cut off; raise --max-new-tokens" if cut else "the completions of "
            "every prompt are all right or all wrong; take other prompts or a larger --group-size"))


def warn(run, key: str, message: str) -> None:
    if key not in run.state["warned"]:  # once a run
        run.state["warned"].append(key)
        print(f"warning: {message}", flush=True)


# --------------------------------------------------------------------------- files of a run


def write(path: Path, text: str) -> None:
    """The whole text or, when the machine or the disk fails, the file as it was."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def append(path: Path, row: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))


def save(run) -> Path:
    """checkpoints/step-N, in Hugging Face layout, with trainer/ beside the weights. Whole or not
    there: it is written under another name, synced and renamed. The last --keep stay."""
    final = run.folder / "checkpoints" / f"step-{run.state['step']}"
    temporary = final.with_name("unfinished")
    shutil.rmtree(temporary, ignore_errors=True)
    trainer = temporary / "trainer"
    trainer.mkdir(parents=True)
    run.policy.save_pretrained(temporary)
    run.tokenizer.save_pretrained(temporary)
    moments = run.optimizer.state_dict()["state"]
    save_file({f"{i}.{name}": tensor for i, state in moments.items()
               for name, tensor in state.items()}, trainer / "optimizer.safetensors")
    for name, moves in {"critic": run.critic is not None, "ref_policy": run.config.ref_every,
                        "old_policy": run.config.stale_steps > 1}.items():
        if moves:
            tensors = getattr(run, name).state_dict()
            save_file({key: tensor.clone() for key, tensor in tensors.items()},  # tied ones too
                      trainer / f"{name}.safetensors")
    write(trainer / "state.json", json.dumps(run.state))
    for path in [*temporary.rglob("*"), temporary]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in checkpoints(run.folder)[:-run.config.keep]:
        shutil.rmtree(old)
    return final


def watch(folder: Path) -> int:
    """Draws the curves of a run, again and again until it is over or Ctrl-C."""
    steps = json.loads((folder / "config.json").read_text())["steps"]
    while True:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        print("\033[2J\033[H" * sys.stdout.isatty(), end="")
        for name in ("reward", "solved", "length_mean", "truncated", "entropy", "clip_fraction"):
            values = [row.get(name, 0.0) for row in rows][-60:]
            low, span = min(values, default=0), max(values, default=0) - min(values, default=0)
            bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * (value - low) / (span or 1))] for value in values)
            print(f"{name:>13} {bars} {values[-1] if values else 0:.3g}")
        if not sys.stdout.isatty() or rows and rows[-1]["step"] >= steps:
            return 0
        time.sleep(2)


# --------------------------------------------------------------------------- the loop


def train(config: Config) -> int:
    """The three-policy loop. Returns the exit status."""
    started, stopped, run = time.time(), [], start(config)
    for number in (signal.SIGINT, signal.SIGTERM):  # the first one asks, the second one insists
        signal.signal(number, lambda number, _: stopped.append(number) or signal.signal(
            number, signal.SIG_DFL))
    if run.state["step"] == 0:
        run.state["before"] = evaluate(run, "before", pass_k=True)
    print(f"{config.algo}, {run.policy.num_parameters() / 1e6:.1f} M parameters, {config.device} "
          f"{config.dtype}, {run.folder}; held out: {percent(run.state['before'])}", flush=True)
    for step in range(run.state["step"] + 1, config.steps + 1):
        clock = [time.perf_counter()]
        # 1. snapshot: pi_old <- pi_theta, and pi_ref <- pi_theta every ref_every steps
        snapshot(run, step)
        # 2. sample G completions for each of P prompts, 3. score them with the verifier; dynamic
        #    sampling drops dead groups and refills
        batch = collect(run, step)
        clock.append(time.perf_counter())
        # 4. freeze: old_logprobs, ref_logprobs and values, no grad, before the first update
        freeze(run, batch)
        # 5. compare: advantages; after 4, as a KL in the reward and a critic come into them
        compare(run, batch)
        clock.append(time.perf_counter())
        # 6. improve: minibatches of completions, each one optimiser step
        updates = improve(run, batch, step)
        clock.append(time.perf_counter())
        # 7. report: metrics, samples, evaluation, checkpoint
        run.state["step"], last = step, step == config.steps
        run.seconds = {name: after - before for name, before, after in zip(
            ("sample", "freeze", "update"), clock, clock[1:])}
        row = measure(run, batch, step, updates)
        if last or (config.eval_every and step % config.eval_every == 0):
            row |= evaluate(run, "after" if last else step, pass_k=last)
        report(run, batch, row)
        if last or stopped or (config.save_every and step % config.save_every == 0):
            folder = save(run)
        if stopped and not last:
            print(f"stopped by signal {stopped[0]} after step {step}, saved in {folder}; go on with: "
                  f"python train.py --resume --runs {config.runs} --name {config.name}")
            return 128 + stopped[0]
        if last:
            after = {name: value for name, value in row.items() if name.startswith("eval_")}
            print(f"held out: {percent(run.state['before'])} -> {percent(after)}, in "
                  f"{(time.time() - started) / 60:.1f} minutes\nthe model is in {folder}, try it:\n"
                  f"python rollout.py --model {folder} --prompt {shlex.quote(run.held_out[0]['prompt'])}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    try:
        given = parse_flags(arguments)
        if folder := given.get("watch"):
            need(Path(folder, "metrics.jsonl").is_file(), f"--watch {folder}: expected a run's folder")
            return watch(Path(folder))
        config = resolve(given)
        return train(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        reason = (f"out of GPU memory; lower --micro-batch-tokens (now {config.micro_batch_tokens}), "
                  f"--max-slots (now {config.max_slots}) or --max-new-tokens (now "
                  f"{config.max_new_tokens}), or set --gradient-checkpointing")
    except (OSError, SafetensorError, FloatingPointError) as error:
        reason = str(error)
    found = checkpoints(Path(config.runs, config.name))
    print(f"error: {reason}; the last good checkpoint: {found[-1] if found else 'none'}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
