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
    chat_template_args: str | None = None  # JSON object, as {"enable_thinking": false}
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
    loss_args: str | None = None  # JSON object of the loss's other numbers, as {"ratio_max": 4}
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
    watch: str | None = None  # draw the curves of this run folder, and train nothing


# --------------------------------------------------------------------------- flags and input


def need(condition, message: str) -> None:
    if not condition:
        raise UserError(message)


def nearest(name: str, names) -> str:
    near = difflib.get_close_matches(name, list(names), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def checked(kind: type, text: str):
    """Converter for argparse that holds to the (range] or the {choices} at the end of a help text."""
    rule = re.search(r"([\[(])(\S+), (\S+)([\])])$|\{(.*)\}$", text)

    def convert(value: str):
        result = kind(value)
        if rule and rule[5]:
            names = rule[5].split(", ")
            good, wanted = result in names, f"one of {rule[5]}{nearest(value, names)}"
        elif rule:
            above = result >= float(rule[2]) if rule[1] == "[" else result > float(rule[2])
            below = result <= float(rule[3]) if rule[4] == "]" else result < float(rule[3])
            good, wanted = above and below, f"a number in {rule[0]}"
        if rule and not good:
            raise argparse.ArgumentTypeError(f"found {value}, expected {wanted}")
        return result

    convert.__name__ = kind.__name__
    return convert


class Parser(argparse.ArgumentParser):
    def error(self, message):
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            message = f"{unknown[1]}: no such flag{nearest(unknown[1], self._option_string_actions)}"
        raise UserError(f"{message.removeprefix('argument ')} (--help lists all flags)")


def parse_flags(arguments: list[str]) -> dict:
    """The flags that were given, name -> value. The parser is made from Config's source."""
    parser = Parser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser
    for line in inspect.getsource(Config).splitlines():
        if "# --- " in line:
            group = parser.add_argument_group(line.split("# --- ")[1])
        if found := re.match(r"    (\w+): (\w+).*? = (.+?)  # (.+)", line):
            name, kind, default, text = found.groups()
            for key, names in (("{ALGOS}", gspo.ALGOS), ("{TASKS}", rewards.TASKS)):
                text = text.replace(key, f"{{{', '.join(names)}}}")
            options = {"action": argparse.BooleanOptionalAction} if kind == "bool" else {
                "type": checked({"int": int, "float": float, "str": str}[kind], text),
                "metavar": kind.upper()}
            text += "" if default == "None" else f"; default {default}"
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, help=text.replace("%", "%%"), **options)
    return vars(parser.parse_args(arguments))


def json_object(flag: str, text: str | None) -> dict:
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text or "{}"), dict):
            return value
    raise UserError(f"{flag}: expected a JSON object, found {text!r}")


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
    for name, value in json_object("--loss-args", config.loss_args).items():
        need(name in takes and isinstance(value, (int, float)), f"--loss-args: expected numbers "
             f"that the loss of {config.algo} takes, found {name}{nearest(name, takes)}")
    json_object("--chat-template-args", config.chat_template_args)
    per_token = algorithm.advantages in ("reward_to_go", "gae")
    for name, used in {"clip_low": "clip_low" in takes, "clip_high": "clip_high" in takes,
                       "gae_lambda": algorithm.critic, "critic_lr": algorithm.critic,
                       "gamma": per_token, "advantage_scale": algorithm.advantages == "group",
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
                                         **json.loads(config.chat_template_args or "{}"))
    return tokenizer.encode(text, add_special_tokens=False)


def fitting(rows: list[dict], flag: str, config: Config, tokenizer, context: int) -> list[dict]:
    """The rows, with their prompts' "ids", less those that are too long or cannot be written."""
    limit = min(config.max_prompt_tokens or context, context - config.max_new_tokens)
    for number, row in enumerate(rows, 1):
        row["ids"] = encode(tokenizer, config, row["prompt"])
        need(config.model not in BUILT_IN or tokenizer.unk_token_id not in row["ids"],
             f"{flag}, row {number}: the built-in model only knows the characters "
             f"{rewards.TASKS[config.task].alphabet!r}; expected --model with another one")
    kept = [row for row in rows if len(row["ids"]) <= limit]
    message = (f"{flag}: {len(rows) - len(kept)} of {len(rows)} prompts are longer than {limit} tokens "
               f"(--max-prompt-tokens, or the context of {context} less --max-new-tokens)")
    need(kept, message)
    if len(kept) < len(rows):
        print(f"skipped: {message}")
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
    if name == "tiny-moe":
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
    kind = transformers.Qwen3MoeConfig if name == "tiny-moe" else transformers.Qwen3Config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(kind(**shape))
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step in range(WARM_STEPS):
        batch = [(tokenizer.encode(prompt), tokenizer.encode(prompt + text) + [1])
                 for prompt, text in shown[step * WARM_ROWS:(step + 1) * WARM_ROWS]]
        width = max(len(ids) for _, ids in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for _, ids in batch])
        labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt):] + [-100] * (width - len(ids))
                               for prompt, ids in batch])
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


def inspect_model(source: str, flag: str = "--model"):
    """(tokenizer, architecture config) of a model that can be trained, before its weights load."""
    try:
        architecture, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flag} {source}: expected a folder or hub name of a causal language model: "
                        f"{str(error).strip().splitlines()[0]}")
    need(type(architecture) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
         f"{flag} {source}: expected a causal language model, found {architecture.model_type}")
    need(tokenizer.eos_token_id is not None, f"{flag} {source}: its tokenizer has no end token")
    pickles = " but pickles, which can run code when they load" if any(Path(source).glob("*.bin")) else ""
    need(not Path(source).is_dir() or any(Path(source).glob("*.safetensors")),
         f"{flag} {source}: expected *.safetensors weights in the folder, found none{pickles}")
    return tokenizer, architecture


def start(config: Config) -> SimpleNamespace:
    """Everything that a run holds. Whatever can be wrong with the input is found before weights load."""
    run = SimpleNamespace(config=config, step=0, cursor=0, bad=0, quiet=0, warned=set(), seconds={}, ref_policy=None,
                          critic=None, reward_model=None, algorithm=gspo.ALGOS[config.algo])
    try:
        run.reward = rewards.parse_reward(config.reward)
    except ValueError as error:
        raise UserError(str(error))
    rows = read_rows("--data", config.data, run.reward) if config.data else None
    held_out = read_rows("--eval-data", config.eval_data, run.reward) if config.eval_data else None
    number = next(i for i in itertools.count(1) if not Path(config.runs, f"{config.algo}-{i}").exists())
    config.name = config.name or f"{config.algo}-{number}"
    run.folder = Path(config.runs, config.name)
    need(config.resume or not run.folder.exists(),
         f"--name {config.name}: {run.folder} exists; expected a new name, or --resume")
    task, source = rewards.TASKS[config.task], config.model
    if source in ("tiny", "tiny-moe"):
        source = tiny_model(source, task)
    run.tokenizer, architecture = inspect_model(source)
    context = getattr(architecture.get_text_config(), "max_position_embeddings", None) or 2**20
    if rows and not held_out:
        random.Random(config.seed).shuffle(rows)
        count = min(config.eval_prompts, max(1, len(rows) // 10))
        need(len(rows) > count, f"--data {config.data}: expected two rows or more, to hold one out")
        held_out, rows = rows[:count], rows[count:]
        print(f"held out for evaluation: {count} of the {len(rows) + count} rows of --data")
    fit = lambda rows, flag: fitting(rows, flag, config, run.tokenizer, context)
    if rows is None:
        run.prompts = (fit([row], "--task")[0] for row in rewards.problems(task, config.seed))
        held_out = itertools.islice(rewards.problems(task, config.seed, held_out=True), config.eval_prompts)
    else:
        rows = fit(rows, "--data")
        run.prompts = itertools.chain.from_iterable(
            random.Random(f"{config.seed} {epoch}").sample(rows, len(rows)) for epoch in itertools.count())
    run.held_out = fit(list(held_out)[:config.eval_prompts], "--eval-data" if config.eval_data else "held out")
    try:
        (run.folder / "checkpoints").mkdir(parents=True, exist_ok=config.resume)
        write(run.folder / "config.json", json.dumps(dataclasses.asdict(config) | {"resume": False}, indent=1))
    except OSError as error:
        raise UserError(f"--runs {config.runs}: expected a folder that can be written: {error}")
    found = sorted(run.folder.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))
    load_weights(run, source, found[-1] if found else None)
    return run


def load_weights(run, source, checkpoint: Path | None) -> None:
    """policy, old_policy and, where the algorithm has them, ref_policy, critic and reward model."""
    config = run.config
    load = lambda path, dtype: AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True).to(config.device)
    dtype = getattr(torch, config.dtype)
    run.policy = load(checkpoint or source, torch.float32)
    run.moe = any("TopKRouter" in type(module).__name__ for module in run.policy.modules())
    need(run.moe or not config.routing_replay, "--routing-replay: expected a mixture-of-experts model")
    if config.gradient_checkpointing:
        run.policy.gradient_checkpointing_enable()
    run.old_policy = run.policy  # nothing moves while it samples, so its own weights will do
    if config.dtype != "float32" or config.stale_steps > 1:
        run.old_policy = rollout.sampler_copy(run.policy, dtype)
    takes = inspect.signature(run.algorithm.loss).parameters
    run.numbers = {name: getattr(config, name) for name in ("clip_low", "clip_high")
                   if getattr(config, name) is not None} | json.loads(config.loss_args or "{}")
    run.numbers |= {"max_completion_length": config.max_new_tokens} if "max_completion_length" in takes else {}
    run.numbers |= {"per": run.algorithm.denom} if "per" in takes else {}
    run.tensorboard = None
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter  # not among our requirements
        run.tensorboard = SummaryWriter(run.folder)
    groups = [{"params": list(run.policy.parameters()), "base_lr": config.lr}]
    if config.kl_coef:
        run.ref_policy = load(source, dtype).requires_grad_(False)
    if run.algorithm.critic:
        run.critic = rollout.make_critic(run.policy)
        groups.append({"params": list(run.critic.parameters()), "base_lr": config.critic_lr})
    if config.reward_model:
        inspect_model(config.reward_model, "--reward-model")
        run.reward_model = transformers.AutoModelForSequenceClassification.from_pretrained(
            config.reward_model, dtype=dtype, use_safetensors=True).to(config.device)
    run.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=config.device == "cuda")
    ends = run.policy.generation_config.eos_token_id
    run.eos_ids = sorted({run.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
    run.pad_id = run.eos_ids[0] if run.tokenizer.pad_token_id is None else run.tokenizer.pad_token_id
    if checkpoint:
        state = json.loads((checkpoint / "trainer" / "state.json").read_text())
        run.reward.faults = state.pop("faults")
        vars(run).update(state, warned=set(state["warned"]))
        for name in ("ref_policy", "old_policy", "critic"):
            if (path := checkpoint / "trainer" / f"{name}.safetensors").exists():
                getattr(run, name).load_state_dict(load_file(path), strict=False)
        moments = {}
        for name, tensor in load_file(checkpoint / "trainer" / "optimizer.safetensors").items():
            moments.setdefault(int(name.split(".")[0]), {})[name.split(".")[1]] = tensor
        run.optimizer.load_state_dict(run.optimizer.state_dict() | {"state": moments})
    for name in ("metrics.jsonl", "samples.jsonl"):  # steps after the checkpoint are done again
        lines = (run.folder / name).read_text().splitlines() if (run.folder / name).exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= run.step]
        write(run.folder / name, "".join(line + "\n" for line in kept))
    run.prompts = itertools.islice(run.prompts, run.cursor, None)


# --------------------------------------------------------------------------- the phases of a step


def sample(run, model, rows: list[dict], seed: str, **options) -> tuple[rollout.Rollout, list[str]]:
    """Completions of prompts and their texts; the same seed text gives the same ones."""
    config = run.config
    number = int(hashlib.sha256(f"{config.seed} {seed}".encode()).hexdigest()[:15], 16)
    options = {"group_size": config.group_size, "temperature": config.temperature} | options
    samples = rollout.generate(
        model, [row["ids"] for row in rows], max_new_tokens=config.max_new_tokens,
        eos_ids=run.eos_ids, pad_id=run.pad_id, generator=torch.Generator().manual_seed(number),
        max_slots=config.max_slots, cache_gb=config.cache_gb,
        progress=lambda done, total: progress("sampling", done, total), **options)
    pairs = zip(samples.completions.tolist(), samples.lengths.tolist())
    return samples, [run.tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in pairs]


def timed(phase):
    """Keeps the seconds of a phase of the step in run.seconds."""
    @functools.wraps(phase)
    def wrapper(run, *arguments):
        begun = time.perf_counter()
        result = phase(run, *arguments)
        if run.config.device == "cuda":
            torch.cuda.synchronize()
        run.seconds[phase.__name__] = time.perf_counter() - begun
        return result
    return wrapper


def snapshot(run, step: int) -> None:
    """pi_old <- pi_theta every stale_steps steps; pi_ref <- pi_theta every ref_every steps."""
    if run.old_policy is not run.policy and (step - 1) % run.config.stale_steps == 0:
        rollout.refresh(run.old_policy, run.policy)
    if run.config.ref_every and step > 1 and (step - 1) % run.config.ref_every == 0:
        rollout.refresh(run.ref_policy, run.policy)


@timed
def collect(run, step: int) -> SimpleNamespace:
    """Sample and score P groups; dynamic sampling goes on until P of them are not dead."""
    config, size = run.config, run.config.group_size
    drawn, texts, rows, scores, keep = [], [], [], [], []
    for attempt in range(1 + config.max_refills * config.dynamic_sampling):
        prompts = list(itertools.islice(run.prompts, config.prompts_per_step))
        run.cursor += len(prompts)
        samples, new_texts = sample(run, run.old_policy, prompts, f"{step} {attempt}")
        new_rows = [row for row in prompts for _ in range(size)]
        scores += run.reward.score(new_texts, new_rows)
        drawn, texts, rows = drawn + [samples], texts + new_texts, rows + new_rows
        groups = torch.tensor([score.correct for score in scores]).view(-1, size)
        alive = groups.amax(1) != groups.amin(1)
        keep = (alive if config.dynamic_sampling else torch.ones_like(alive)).nonzero().flatten()
        if len(keep) >= config.prompts_per_step:
            break
    else:
        warn(run, "refills", f"{len(keep)} of {config.prompts_per_step} groups are neither all right nor "
             f"all wrong after {len(groups)} prompts (--max-refills {config.max_refills}); going on with those")
    keep = keep[:config.prompts_per_step] if len(keep) else torch.zeros(1, dtype=torch.long)
    keep = (keep[:, None] * size + torch.arange(size)).flatten()
    samples = rollout.Rollout.cat(drawn, run.pad_id)[keep]
    batch = SimpleNamespace(
        rollout=samples, texts=[texts[i] for i in keep], rows=[rows[i] for i in keep],
        scores=[scores[i] for i in keep], groups=groups, mask=samples.completion_mask, experts={})
    reward = torch.tensor([score.reward for score in batch.scores])
    if run.reward_model is not None:
        with autocast(config):
            reward += config.reward_model_weight * (
                rollout.reward_model_scores(run.reward_model, samples).cpu() - reward)
    for i, (ids, n) in enumerate(zip(samples.completions.tolist(), samples.lengths.tolist())):
        if config.overlong_cache:
            reward[i] += rewards.soft_overlong_penalty(n, config.max_new_tokens, config.overlong_cache)
        if config.repetition_penalty:
            reward[i] += config.repetition_penalty * rewards.repetition_penalty(ids[:n])
    batch.rewards = reward.to(config.device)
    if config.overlong_filter:  # out of the loss, not out of the attention
        batch.mask = batch.mask & ~samples.truncated[:, None]
    order = torch.arange(len(keep)).view(-1, size)
    order = order[random.Random(f"{config.seed} {step}").sample(range(len(order)), len(order))].flatten()
    # optimiser steps of whole groups where they divide, each a list of micro-batches of rows
    batch.plan = [[rows[part] for part in rollout.micro_batches(samples[rows], config.micro_batch_tokens)]
                  for rows in order.split(config.completions_per_update)]
    return batch


def autocast(config: Config):
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def logprobs_of(run, model, batch, rows, replay=None) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Log-probs, entropies and chosen experts of some rows: one path for policy, old and ref."""
    routing = rollout.routing(model, replay) if run.moe else contextlib.nullcontext([])
    with autocast(run.config), routing as experts:
        return *rollout.completion_logprobs(
            model, batch.rollout[rows], temperature=run.config.temperature), experts


@timed
@torch.no_grad()
def freeze(run, batch) -> None:
    """What stays while pi_theta moves: old_logprobs, ref_logprobs, values. They are scored in the
    updates' own micro-batches, so that the ratio of the first update is exactly 1."""
    batch.old_logprobs = batch.rollout.sampler_logprobs.clone()
    batch.ref_logprobs, batch.values = (torch.zeros_like(batch.old_logprobs) for _ in range(2))
    for rows in itertools.chain(*batch.plan):
        if run.config.old_logprobs == "trainer":
            logprobs, _, batch.experts[int(rows[0])] = logprobs_of(run, run.policy, batch, rows)
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
    """(rewards, steps), both (N, T): a step scored up to a character ends at that character's token."""
    values = torch.zeros_like(batch.old_logprobs)
    steps = torch.zeros_like(values, dtype=torch.bool)
    for i, (ids, n) in enumerate(zip(batch.rollout.completions.tolist(), batch.rollout.lengths.tolist())):
        ends = [len(run.tokenizer.decode(ids[:t + 1], skip_special_tokens=True)) for t in range(n)]
        for end, value in batch.scores[i].steps or []:
            token = next((t for t in range(n) if ends[t] >= end), n - 1)
            values[i, token] += value
            steps[i, token] = True
    return values, steps


def update(run, batch, micro_batches: list) -> dict:
    """One optimiser step, its gradient accumulated over micro-batches; returns its metrics."""
    config, algorithm, totals = run.config, run.algorithm, {}
    rows = torch.cat(micro_batches)
    tokens = batch.mask[rows].sum().clamp(min=1)
    denom = tokens if algorithm.denom == "token" else len(rows)
    run.optimizer.zero_grad(set_to_none=True)
    for rows in micro_batches:
        mask, replay = batch.mask[rows], batch.experts[int(rows[0])] if config.routing_replay else None
        logprobs, entropy, _ = logprobs_of(run, run.policy, batch, rows, replay)
        loss, metrics = algorithm.loss(logprobs, batch.old_logprobs[rows], batch.advantages[rows],
                                       mask, denom=denom, **run.numbers)
        metrics["entropy"] = (entropy * mask).sum() / tokens
        loss = loss - config.entropy_coef * metrics["entropy"]
        if run.ref_policy is not None:
            in_loss = algorithm.kl != "reward"
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
        batch.new_logprobs[rows] = logprobs.detach()
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.detach()
    norms = [torch.nn.utils.clip_grad_norm_(group["params"], config.max_grad_norm)
             for group in run.optimizer.param_groups]
    totals = {name: float(value) for name, value in totals.items()} | {"grad_norm": float(norms[0])}
    bad = [name for name, value in totals.items() if not math.isfinite(value)]
    if bad or not all(map(torch.isfinite, norms)):  # one bad update must not ruin the weights
        run.bad += 1
        need(run.bad <= config.max_bad_updates, f"stopped: {run.bad} updates in a row were not finite "
             f"({', '.join(bad) or 'the gradient'}); the last good checkpoint is {newest(run.folder)}")
        return {"bad_updates": 1}
    run.bad = 0
    run.optimizer.step()
    return totals


@timed
def improve(run, batch, step: int) -> list[dict]:
    """The updates of a step: epochs over its minibatches; returns the metrics of each update."""
    for group in run.optimizer.param_groups:
        group["lr"] = group["base_lr"] * min(1.0, step / max(run.config.warmup_steps, 1))
    batch.new_logprobs = torch.zeros_like(batch.old_logprobs)
    updates = []
    for epoch in range(run.config.epochs):
        for micro_batches in batch.plan:
            updates.append(update(run, batch, micro_batches))
            if len(updates) == 1:  # pi_theta has not moved yet: the sampler and the trainer compared
                batch.first_logprobs, batch.first_rows = batch.new_logprobs.clone(), torch.cat(micro_batches)
    return updates


# --------------------------------------------------------------------------- report


def drift(prefix: str, logprobs, old_logprobs, mask) -> dict:
    """How far two scorings of the same completions (N, T) are apart, by token and by sequence."""
    tokens = (logprobs - old_logprobs)[mask]
    sequences = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    ratio, band = sequences.exp(), inspect.signature(gspo.gspo_loss).parameters
    outside = (ratio < 1 - band["clip_low"].default) | (ratio > 1 + band["clip_high"].default)
    values = {"kl": (tokens.exp() - 1 - tokens).mean(), "token_std": tokens.std(),
              "sequence_std": sequences.std(), "ratio_mean": ratio.mean(), "ratio_min": ratio.min(),
              "ratio_max": ratio.max(), "outside_gspo_band": outside.float().mean()}
    return {f"{prefix}_{name}": float(value) for name, value in values.items()}


def measure(run, batch, step: int, updates: list[dict]) -> dict:
    """The row of metrics.jsonl: all that a person may want to see of a step (README explains each)."""
    samples, groups = batch.rollout, batch.groups
    lengths, done = samples.lengths.float(), ~samples.truncated
    row = {"step": step, "reward": float(batch.rewards.mean()), "reward_std": float(batch.rewards.std()),
           "solved": float(groups.mean()), "solved_any": float((groups.amax(1) > 0).float().mean()),
           "dead_right": float((groups.amin(1) == 1).float().mean()),
           "dead_wrong": float((groups.amax(1) == 0).float().mean()), "prompts_drawn": len(groups),
           "length_mean": float(lengths.mean()), "length_min": int(lengths.min()),
           "length_max": int(lengths.max()), "truncated": 1 - float(done.float().mean()),
           "length_finished": float(lengths[done].mean()) if done.any() else None,
           "advantage_abs": float(batch.advantages.abs().mean())}
    for name in batch.scores[0].terms:
        row[f"reward/{name}"] = sum(score.terms[name] for score in batch.scores) / len(batch.scores)
    row["bad_updates"] = sum("bad_updates" in one for one in updates)
    row["verifier_faults"] = run.reward.faults
    good = [one for one in updates if "bad_updates" not in one]
    for name in good[0] if good else ():
        row[name] = sum(one[name] for one in good) / len(good)
    rows = batch.first_rows
    row |= drift("sampler", batch.first_logprobs[rows], samples.sampler_logprobs[rows], samples.completion_mask[rows])
    row |= drift("policy", batch.new_logprobs, batch.old_logprobs, samples.completion_mask)
    if run.critic is not None:
        returns, mask = batch.returns, batch.mask
        row["explained_variance"] = float(1 - (returns - batch.values)[mask].var() / (returns[mask].var() + 1e-8))
    if run.moe:
        row["expert_flips"] = expert_flips(run, batch)
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row |= {f"seconds_{name}": round(value, 3) for name, value in run.seconds.items()}
    row["tokens_per_second"] = round(float(lengths.sum()) / sum(run.seconds.values()), 1)
    if run.config.device == "cuda":
        row["seconds_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return row


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
    """Held-out accuracy: greedy pass@1, and the share of prompts that k samples solve once or more."""
    result, k = {}, run.config.eval_samples
    for label, size, temperature in [("solved", 1, 0.0)] + [(f"pass@{k}", k, 1.0)] * bool(pass_k and k):
        samples, texts = sample(run, run.policy, run.held_out, f"eval {name}", group_size=size, temperature=temperature)
        scores = run.reward.score(texts, [row for row in run.held_out for _ in range(size)])
        best = torch.tensor([score.correct for score in scores]).view(-1, size).amax(1)
        result[f"eval_{label}"] = float(best.mean())
    return result


def report(run, batch, row: dict) -> None:
    """One console line, one row of metrics.jsonl, a few samples that a person can read."""
    get = lambda name: row.get(name) or 0.0
    print(f"step {row['step']} | reward {row['reward']:.2f} | solved {row['solved']:.0%} | len "
          f"{row['length_mean']:.0f} | truncated {row['truncated']:.0%} | dead groups "
          f"{row['dead_right'] + row['dead_wrong']:.0%} | ratio {get('ratio_mean'):.4f} | clip "
          f"{get('clip_fraction'):.0%} | kl {get('kl'):.4f} | entropy {get('entropy'):.2f} | grad "
          f"{get('grad_norm'):.2f} | {row['tokens_per_second'] / 1000:.1f}k tok/s"
          + (f" | held out {row['eval_solved']:.1%}" if "eval_solved" in row else ""), flush=True)
    append(run.folder / "metrics.jsonl", row)
    for i in range(0, min(len(batch.texts), 4 * run.config.group_size), run.config.group_size):
        append(run.folder / "samples.jsonl", {
            "step": row["step"], "prompt": batch.rows[i]["prompt"], "completion": batch.texts[i],
            "reward": float(batch.rewards[i]), "correct": batch.scores[i].correct, "answer": batch.rows[i]["answer"]})
    if run.tensorboard:
        for name, value in row.items():
            run.tensorboard.add_scalar(name, value or 0.0, row["step"])
        run.tensorboard.flush()
    if run.reward.first_fault:
        warn(run, "fault", run.reward.first_fault)
    quiet = row["dead_right"] + row["dead_wrong"] == 1
    run.quiet = run.quiet + 1 if quiet or row["truncated"] == 1 else 0
    if run.quiet >= 10:
        warn(run, "quiet", "nothing was learned for 10 steps: " + (
            "every completion is cut off; raise --max-new-tokens" if row["truncated"] == 1 else
            "the completions of every prompt are all right or all wrong; take easier or harder prompts, "
            "a larger --group-size or a higher --temperature"))


def warn(run, key: str, message: str) -> None:
    if key not in run.warned:  # once a run
        run.warned.add(key)
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


def newest(folder: Path) -> Path | None:
    found = sorted(folder.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))
    return found[-1] if found else None


def save(run) -> Path:
    """checkpoints/step-N, in Hugging Face layout, with trainer/ beside the weights. Whole or not
    there: it is written under another name, synced and renamed. The last --keep stay."""
    final = run.folder / "checkpoints" / f"step-{run.step}"
    temporary = final.with_name(f"tmp-{run.step}")
    shutil.rmtree(temporary, ignore_errors=True)
    trainer = temporary / "trainer"
    trainer.mkdir(parents=True)
    run.policy.save_pretrained(temporary)
    run.tokenizer.save_pretrained(temporary)
    moments = run.optimizer.state_dict()["state"]
    save_file({f"{i}.{name}": tensor for i, state in moments.items() for name, tensor in state.items()},
              trainer / "optimizer.safetensors")
    moved = {"critic": run.critic, "ref_policy": run.ref_policy if run.config.ref_every else None,
             "old_policy": run.old_policy if run.config.stale_steps > 1 else None}
    for name, model in moved.items():
        if model is not None:
            save_file(model.state_dict(), trainer / f"{name}.safetensors")
    write(trainer / "state.json", json.dumps({"step": run.step, "cursor": run.cursor, "bad": run.bad, "quiet": run.quiet,
                                                    "warned": sorted(run.warned), "faults": run.reward.faults, "before": run.before}))
    for path in [*temporary.rglob("*"), temporary]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    for old in sorted(run.folder.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))[:-run.config.keep]:
        shutil.rmtree(old)
    return final


# --------------------------------------------------------------------------- the loop


def train(config: Config) -> int:
    """The three-policy loop. Returns the exit status."""
    started, stopped, run = time.time(), [], start(config)
    for number in (signal.SIGINT, signal.SIGTERM):  # the first one asks, the second one insists
        signal.signal(number, lambda number, _: (stopped.append(number), signal.signal(number, signal.SIG_DFL)))
    if run.step == 0:
        run.before = evaluate(run, "before", pass_k=True)
    print(f"{config.algo}, {run.policy.num_parameters() / 1e6:.1f} M parameters, {config.device} "
          f"{config.dtype}, {run.folder}; held out: {percent(run.before)}", flush=True)
    for step in range(run.step + 1, config.steps + 1):
        # 1. snapshot: pi_old <- pi_theta, and pi_ref <- pi_theta every ref_every steps
        snapshot(run, step)
        # 2. sample G completions for each of P prompts, 3. score them with the verifier; dynamic
        #    sampling drops and refills dead groups
        batch = collect(run, step)
        # 4. freeze: old_logprobs, ref_logprobs and values, no grad, before the first update
        freeze(run, batch)
        # 5. compare: advantages, after 4 because a KL in the reward and a critic come into them
        compare(run, batch)
        # 6. improve: minibatches of completions, each one optimiser step
        updates = improve(run, batch, step)
        # 7. report: metrics, samples, evaluation, checkpoint
        run.step, last = step, step == config.steps
        row = measure(run, batch, step, updates)
        if last or (config.eval_every and step % config.eval_every == 0):
            run.after = evaluate(run, "after" if last else step, pass_k=last)
            row |= run.after
        report(run, batch, row)
        if last or stopped or (config.save_every and step % config.save_every == 0):
            folder = save(run)
        if stopped:
            print(f"stopped by signal {stopped[0]} after step {step}, saved in {folder}; go on with: "
                  f"python train.py --resume --name {config.name}")
            return 128 + stopped[0]
    if run.step >= config.steps:
        prompt = run.held_out[0]["prompt"]
        print(f"held out: {percent(run.before)} -> {percent(run.after)} in {(time.time() - started) / 60:.1f} minutes; the model is in "
              f"{folder}\ntry it: python rollout.py --model {folder} --prompt {shlex.quote(prompt)}")
    return 0


def percent(result: dict) -> str:
    return ", ".join(f"{name.removeprefix('eval_')} {value:.1%}" for name, value in result.items())


def watch(folder: Path) -> int:
    """Draws the curves of a run again and again, until it is over or Ctrl-C."""
    while True:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        print("\033[2J\033[H" if sys.stdout.isatty() else "", end="")
        for name in ("reward", "solved", "length_mean", "truncated", "entropy", "clip_fraction", "grad_norm"):
            values = [row[name] for row in rows if row.get(name) is not None][-60:]
            low, high = min(values, default=0), max(values, default=0)
            bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * (value - low) / (high - low or 1))] for value in values)
            print(f"{name:>14} {values[-1] if values else 0:8.3f} {bars}  [{low:.3g}, {high:.3g}]")
        steps = json.loads((folder / "config.json").read_text())["steps"]
        if not rows or rows[-1]["step"] >= steps or not sys.stdout.isatty():
            return 0
        time.sleep(2)


def main(arguments: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    try:
        given = parse_flags(arguments)
        if "watch" in given:
            need(Path(given["watch"], "metrics.jsonl").is_file(), f"--watch {given['watch']}: expected the folder of a run")
            return watch(Path(given["watch"]))
        config = resolve(given)
        return train(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        print(f"error: out of GPU memory; lower --micro-batch-tokens (now {config.micro_batch_tokens}), --max-slots (now "
              f"{config.max_slots}) or --max-new-tokens (now {config.max_new_tokens}), or set --gradient-checkpointing", file=sys.stderr)
    except (OSError, SafetensorError) as error:
        print(f"error: a file of the run could not be written: {error}; the last whole checkpoint "
              f"is {newest(Path(config.runs, config.name or ''))}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
