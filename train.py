"""Train a language model with GSPO, or another algorithm of gspo.ALGOS, on rewards from a verifier.

    python train.py --algo gspo                          # tiny built-in policy, nothing downloaded
    python train.py --algo gspo --model Qwen/Qwen3-0.6B --data train.jsonl --reward math

Read `train`, the loop, then its phases below it. `policy` is trained, `old_policy` samples, and the
KL penalty, if there is one, compares with `ref_policy`. `plug_in` chooses everything optional.

Where this differs from the papers (docs/deviations.md has all of it):
1. All algorithms share one set of run settings: 32 prompts x 8 completions, 4 updates a rollout.
2. A group of equal rewards has advantage exactly 0. Rows with advantage 0 are not computed.
3. Each optimiser step divides by its own completions or tokens, not by those of the rollout.
4. Dynamic sampling stops after 4 further rollouts and continues with the groups it has.
5. PPO's critic trains from the first step on and starts with the value 0.
6. No log-ratio is clamped: an update that is not finite is skipped."""

import os

# torch's threads spin while they wait. Beside other processes that takes ten times as long as the
# work, so they spin briefly, then sleep. It is read as torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import bisect
import collections
import contextlib
import dataclasses
import importlib.util
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
from support.console import percent, say
from support.data import printable
from support.flags import ELSEWHERE, dashed, extra, flag, flags_of, keywords, parse
from support.models import checkpoint_layers, critic_of, frozen_copy, has_experts, refresh
from support.ranks import Ranks, joined_ranks
from support.tasks import BUILT_IN, TASKS, built_in_policy, problems
from support.user import expecting, function_of, need, reason

# ---- flags ---------------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclasses.dataclass
class OwnFlags:
    """The flags of this file. `fill_defaults` replaces None. gspo.py has the other flags: each
    number of an objective is one."""

    algo: str = flag("gspo", "algorithm", heading="what to run", choices=tuple(gspo.ALGOS))
    model: str = flag("tiny", "built in (tiny, tiny-moe), a folder, or a name on the hub")
    task: str = flag("arithmetic", "built-in problems", choices=tuple(TASKS))
    data: str | None = flag(None, "JSONL file to train on: prompt and answer")
    eval_data: str | None = flag(None, "JSONL file of held-out rows, else a tenth", needs="data")
    reward: str | None = flag(None, "'math + 0.1*format' or file.py:function; default: the task's")
    teacher: str | None = flag(None, "OPD: a larger model, folder or hub name")
    tool: str | None = flag(None, "calculator, or file.py:function@TRIGGER_TEXT", extra="tools")
    sampler: str | None = flag(None, "file.py:function with the signature of rollout.generate")
    steps: int = flag(50, "rollout steps", low=1)
    seed: int = flag(0, "seed of problems, samples, shuffles and adapters", low=0)

    system: str | None = flag(None, "system message, for chat templates", heading="prompts")
    chat_template_args: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    prompt_template: str = flag("{prompt}", "text around {prompt}; \\n is a line break")

    prompts_per_step: int = flag(32, "prompts P of a rollout step", heading="rollout", low=1)
    group_size: int = flag(8, "completions G of a prompt", low=2)
    max_new_tokens: int | None = flag(None, "of a completion; default the task's, or 1024", low=1)
    stop: list[str] | None = flag(None, "text that ends a completion; may be given several times")
    temperature: float = flag(1.0, "divides the logits, in sampling and in scoring", above=0)
    cache_gb: float | None = flag(None, "memory for KV caches; default: what is free", above=0)
    old_logprobs: str = flag("trainer", "source of pi_old's", choices=("trainer", "sampler"))
    stale_steps: int = flag(1, "steps between refreshes of the sampler", low=1)
    tis_cap: float | None = flag(None, "bound of importance weights, sampler to pi_old", above=0)

    entropy_coef: float = flag(0.0, "bonus per nat of entropy", heading="objective", low=0)
    kl_coef: float | None = flag(None, "weight of the KL to the reference; grpo 0.04", low=0)
    ref_every: int = flag(0, "steps between refreshes of the reference", low=0, needs="kl_coef")
    dynamic_sampling: bool | None = flag(None, "replace groups of equal rewards; default: dapo's")
    overlong_cache: int | None = flag(None, "tokens before the limit that are punished", low=0)
    overlong_filter: bool = flag(False, "leave truncated completions out of the loss")
    routing_replay: bool = flag(False, "train with the experts that pi_old chose", extra="experts")

    epochs: int = flag(1, "passes over a rollout", heading="optimiser", low=1)
    completions_per_update: int | None = flag(None, "of an optimiser step; default 1/4", low=1)
    lr: float | None = flag(None, "default 2e-4 built in, else 1e-5; LoRA x 10", above=0)
    lr_schedule: str = flag("constant", "after warm-up", choices=("constant", "linear", "cosine"))
    critic_lr: float | None = flag(None, "of PPO's critic; default 10 x lr", above=0)
    warmup_steps: int | None = flag(None, "of the lr; default 0 built in, else 3", low=0)
    max_grad_norm: float = flag(1.0, "gradient clipping", above=0)
    micro_batch_tokens: int = flag(16384, "tokens of one forward and backward pass", low=1)
    gradient_checkpointing: bool = flag(False, "less memory for activations, but slower")
    lora_rank: int = flag(0, "train an adapter of this rank; 0: all weights", low=0, extra="lora")
    lora_alpha: float | None = flag(None, "its scale; default 2 x rank", above=0, needs="lora_rank")

    eval_every: int = flag(10, "steps; 0: before and after", heading="evaluation", low=0)
    eval_prompts: int = flag(256, "held-out prompts, greedy", low=1)
    eval_samples: int = flag(8, "k of pass@k, before and after; 0: none", low=0)

    name: str | None = flag(None, "folder of the run; default: algorithm, number", heading="run")
    runs: str = flag("runs", "folder of all runs")
    resume: bool = flag(False, "continue from the newest checkpoint of --name, with its flags")
    save_every: int = flag(10, "steps between checkpoints; 0: the last only", low=0)
    track: str | None = flag(None, "send metrics there, too", choices=TRACKERS, extra="trackers")
    device: str = flag(DEVICE, "where everything runs", choices=("cuda", "cpu", "mps"))
    dtype: str | None = flag(None, "default bfloat16 on CUDA", choices=("float32", "bfloat16"))


def own_numbers(algorithm: gspo.Algorithm) -> dict[str, typing.Any]:
    """Return flag -> default of all numbers of an algorithm, without the flags of every run."""
    numbers = keywords(algorithm.loss) | keywords(algorithm.advantages)
    if algorithm.reads == "values":
        numbers |= keywords(gspo.value_loss)
    return {name: default for name, default in numbers.items() if not hasattr(OwnFlags, name)}


# Every flag. A keyword-only parameter of a loss in gspo.py is one at once: clip_low of gspo_loss is
# --clip-low and config.clip_low, and `numbers_for` passes it to the loss
NUMBER_FLAGS = flags_of({algo: own_numbers(row) for algo, row in gspo.ALGOS.items()}, gspo.NUMBERS)
Config = dataclasses.make_dataclass("Config", NUMBER_FLAGS, bases=(OwnFlags,))

READS_STEPS = ("steps", "tokens", "values")  # inputs of advantages that rewards of steps enter
# input of advantages -> flags that only such algorithms have
FLAGS_OF_INPUTS = {"values": {"critic_lr"}, "teacher": {"teacher"}}
KEPT_FLAGS = ("algo", "model", "task", "lora_rank", "lora_alpha", "lr_schedule")  # by --resume
KEPT_FLAGS += ("kl_coef", "stale_steps")  # they decide which models a checkpoint has
SHOWN_PROMPTS = 4  # of a step in samples.jsonl, of an evaluation in report.html
MAX_REFILLS = 4  # further rollouts of a step, for dynamic sampling
MAX_BAD_UPDATES = 5  # skipped in a row, because they were not finite; one more ends the run

# ---- the loop ------------------------------------------------------------------------------------


def train(run: "Run") -> None:
    """Run the loop of seven phases.

    By default on a CPU there is one model: it samples, its log-probs before the first update are
    old_logprobs, and without a KL penalty no reference is loaded."""
    config = run.config
    stop_on_signals(run)
    for step in range(run.progress.step + 1, config.steps + 1):
        begun = time.perf_counter()
        run.seconds.clear()

        # 1. snapshot   pi_old <- pi_theta, and pi_ref <- pi_theta every --ref-every steps
        snapshot(run)

        # 2. sample     G completions for each of P prompts
        batch = sample(run, step)

        # 3. score      rewards; dynamic sampling replaces groups of equal rewards
        score(run, batch)

        # 4. freeze     plan the minibatches, without rows of advantage 0; log-probs of pi_old,
        #               pi_ref and a teacher, values of a critic: no gradient
        freeze(run, batch)

        # 5. compare    advantages
        compare(run, batch)

        # 6. improve    for each minibatch: accumulate gradients of micro-batches, clip, step
        made = improve(run, batch)

        # 7. report     metrics, evaluation, checkpoint, console line, page
        run.progress.step = step
        run.seconds["seconds_step"] = time.perf_counter() - begun
        row = measure(run, batch, made)
        report(run, batch, row)
        if run.stopped:
            raise KeyboardInterrupt
    say_goodbye(run, row)


# ---- state ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Progress:
    """The state of a run beside its tensors. Each checkpoint has it."""

    step: int = 0  # rollout steps done
    began: float = dataclasses.field(default_factory=time.time)
    prompts_drawn: int = 0
    bad_in_a_row: int = 0  # updates that were skipped because they were not finite
    shaping: list[str] = dataclasses.field(default_factory=list)  # terms that `solved` leaves out
    before: dict = dataclasses.field(default_factory=dict)  # the evaluation before the first step


@dataclasses.dataclass
class Run:
    """Everything that a run holds."""

    config: Config
    algorithm: gspo.Algorithm
    ranks: Ranks

    # input
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: list[int]
    pad_id: int
    stops: rollout.StopTexts | None  # of --stop
    reward: rewards.Reward
    lenient: rewards.Reward | None  # the same without the format, for evaluation
    prompts: Iterator[dict]  # rows to train on, without end
    held_out: list[dict]

    # models
    policy: transformers.PreTrainedModel  # pi_theta
    old_policy: transformers.PreTrainedModel  # the sampler: pi_theta itself or a copy
    ref_policy: transformers.PreTrainedModel | None  # with --kl-coef
    teacher: transformers.PreTrainedModel | None  # with --teacher
    critic: torch.nn.Module | None = None  # where advantages read values
    optimizer: torch.optim.Optimizer | None = None

    # chosen in `plug_in`
    generate: Callable | None = None  # the signatures are those of rollout.py
    shares: bool = False  # scoring may use trees, see rollout.py
    experts: typing.Any = None  # records the routing of a mixture
    meters: list[Callable] = dataclasses.field(default_factory=list)  # (run, rollout) -> metrics
    write_adapter: Callable | None = None
    open_tracker: Callable | None = None
    write_page: Callable | None = None

    # in progress
    progress: Progress = dataclasses.field(default_factory=Progress)
    folder: Path | None = None
    lock: typing.IO | None = None  # stays open: no other process writes into the folder
    tracker: Callable[[dict], None] | None = None  # gets each row of metrics.jsonl
    began: float = dataclasses.field(default_factory=time.time)
    seconds: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    answers: list[dict] = dataclasses.field(default_factory=list)  # some, of the last evaluation
    warned: set[str] = dataclasses.field(default_factory=set)
    quiet_steps: int = 0  # steps in a row without an advantage
    signalled: bool = False  # a signal came
    stopped: bool = False  # the run ends after this step, because a signal came to some process

    def autocast(self):
        enabled = self.config.dtype == "bfloat16"
        return torch.autocast(self.config.device, torch.bfloat16, enabled=enabled)

    def logprobs(self, model, part: rollout.MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies (n, T) of a micro-batch, by any of the models. Only passes
        with gradients need entropies: the others get 0."""
        entropy_grad = self.config.entropy_coef > 0 if torch.is_grad_enabled() else None
        with self.autocast():
            return rollout.completion_logprobs(
                model,
                part.completions,
                self.config.temperature,
                part.trees,
                entropy_grad=entropy_grad,
            )

    def values(self, part: rollout.MicroBatch) -> Tensor:
        """Return the critic's values (n, T) of a micro-batch."""
        with self.autocast():
            return rollout.completion_values(self.critic, part.completions, part.trees)

    def routing(self, part: rollout.MicroBatch):
        """Return the context of a pass of the policy over a micro-batch."""
        return self.experts.over(part) if self.experts else contextlib.nullcontext()

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to the metric of the phase."""
        begun = time.perf_counter()
        yield
        torch.get_device_module(self.config.device).synchronize()
        self.seconds[f"seconds_{phase}"] += time.perf_counter() - begun

    def warn(self, kind: str, message: str) -> None:
        """Print a warning of this kind once a run."""
        if kind not in self.warned:
            self.warned.add(kind)
            say(f"warning: {printable(message)}")


@dataclasses.dataclass
class Sample:
    """A completion as text, the row of data that it answers, and its score."""

    text: str
    row: dict  # with "tokens", the completion's length, for the reward
    score: rewards.Score | None = None

    def readable(self, step: int) -> dict:
        """Return it as a row of samples.jsonl or evaluations.jsonl."""
        return {
            "step": step,
            "prompt": data.text_of(self.row["prompt"]),
            "answer": self.row["answer"],
            "completion": self.text,
            "reward": self.score.reward,
        }


@dataclasses.dataclass
class Update:
    """One optimiser step. The loss is a mean over its rows; only the active ones can change it."""

    rows: Tensor  # (n,) indices into the batch
    active: Tensor  # those that need a forward pass
    parts: list[rollout.MicroBatch]  # of this process, with rows of the batch


@dataclasses.dataclass
class Batch:
    """One rollout step: N completions in groups of G, T tokens wide."""

    # sample
    step: int
    rollout: rollout.Rollout  # the completions as tokens
    samples: list[Sample]  # the same as texts

    # score
    mask: Tensor | None = None  # (N, T) tokens of the loss
    rewards: Tensor | None = None  # (N,) with overlong shaping
    token_rewards: Tensor | None = None  # (N, T), where the algorithm reads them
    step_ends: Tensor | None = None  # (N, T) last tokens of steps
    # of every group that was sampled, dropped ones included
    dead: Tensor | None = None  # (groups,) those of equal rewards
    correct: Tensor | None = None  # (groups, G), where the reward tells right from wrong
    faults: list[str] = dataclasses.field(default_factory=list)  # of verifiers

    # freeze: (N, T), constants of the step
    updates: list[Update] = dataclasses.field(default_factory=list)
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None

    # compare
    advantages: Tensor | None = None  # (N,) or (N, T)
    returns: Tensor | None = None  # (N, T) targets of a critic

    # improve
    new_logprobs: Tensor | None = None  # (N, T), each row as its own update computed it
    first_logprobs: Tensor | None = None  # those of the first update, before anything changed
    bad_updates: int = 0  # skipped, because they were not finite

    @property
    def active(self) -> Tensor:
        return torch.cat([update.active for update in self.updates])


# ---- 1. snapshot ---------------------------------------------------------------------------------


def snapshot(run: Run) -> None:
    """Refresh the sampler, where it is a copy, and pi_ref every --ref-every steps."""
    config, done = run.config, run.progress.step
    if run.old_policy is not run.policy and done % config.stale_steps == 0:
        refresh(run.old_policy, run.policy)
    if config.ref_every and done > 0 and done % config.ref_every == 0:
        refresh(run.ref_policy, run.policy)


# ---- 2. sample -----------------------------------------------------------------------------------


def sample(run: Run, step: int, refill: int = 0) -> Batch:
    """Sample G completions for each of the next P prompts. Dynamic sampling refills a step."""
    config = run.config
    rows = list(itertools.islice(run.prompts, config.prompts_per_step))
    run.progress.prompts_drawn += len(rows)
    size, seed = config.group_size, f"{step} {refill}"
    return Batch(step, *complete(run, run.old_policy, rows, size, config.temperature, seed))


def complete(
    run: Run, model, rows: list[dict], group_size: int, temperature: float, seed: str
) -> tuple[rollout.Rollout, list[Sample]]:
    """Sample group_size completions of each row's prompt. Equal seed texts give equal samples.

    Each process samples its share of the prompts and gets the completions of all."""
    config, ranks = run.config, run.ranks
    number = random.Random(f"{config.seed} {seed}").getrandbits(60)
    generator = torch.Generator().manual_seed(number)
    # of all prompts: a share gets the numbers that it has among all
    uniforms = torch.rand(len(rows), group_size, config.max_new_tokens, generator=generator)
    with run.timer("sample"):
        rollouts = run.generate(
            model,
            [row[data.IDS] for row in ranks.share(rows)],
            ranks.share(uniforms),
            temperature=temperature,
            cache_gb=config.cache_gb,
            stops=run.stops,
            eos_ids=run.eos_ids,
            pad_id=run.pad_id,
        )
        if ranks.size > 1:
            everything = ranks.gather(rollouts.to("cpu"))
            rollouts = rollout.Rollout.cat(everything, run.pad_id).to(config.device)

    samples, lengths = [], rollouts.lengths.tolist()
    for i, ids in enumerate(rollouts.completions.tolist()):
        row = {**rows[i // group_size], "tokens": lengths[i]}
        row.pop(data.IDS)
        text = run.tokenizer.decode(ids[: lengths[i]], skip_special_tokens=True)
        samples.append(Sample(text, row))
    return rollouts, samples


# ---- 3. score ------------------------------------------------------------------------------------


def score(run: Run, batch: Batch) -> None:
    """Compute rewards. Dynamic sampling drops groups of equal rewards and samples other prompts,
    until P groups are left or MAX_REFILLS are over."""
    config, size = run.config, run.config.group_size
    score_samples(run, batch.samples)
    kept = judge_groups(run, batch)
    for refill in range(1, 1 + MAX_REFILLS):
        if len(kept) == config.prompts_per_step:
            break
        more = sample(run, batch.step, refill)
        score_samples(run, more.samples)
        batch.rollout = rollout.Rollout.cat([batch.rollout, more.rollout], run.pad_id)
        batch.samples += more.samples
        kept = judge_groups(run, batch)
    batch.faults = [each.score.fault for each in batch.samples if each.score.fault]
    rows = [size * group + member for group in kept or [0] for member in range(size)]
    batch.rollout, batch.samples = batch.rollout[rows], [batch.samples[row] for row in rows]

    batch.mask = batch.rollout.completion_mask
    if config.overlong_filter:  # truncated completions leave the loss, but not the attention
        batch.mask = batch.mask & ~batch.rollout.truncated[:, None]
    if not kept:  # a batch is never empty, but this one teaches nothing
        batch.mask = torch.zeros_like(batch.mask)

    limit, cache = config.max_new_tokens, config.overlong_cache
    outcomes = []
    for each, length in zip(batch.samples, batch.rollout.lengths.tolist()):
        penalty = rewards.soft_overlong_penalty(length, limit, cache)
        outcomes.append(each.score.reward + penalty)
    batch.rewards = torch.tensor(outcomes, device=config.device)
    if run.algorithm.reads in READS_STEPS:
        place_rewards(run, batch)


def score_samples(run: Run, samples: list[Sample]) -> None:
    """Compute the scores of completions. Each process computes its share and gets all."""
    with run.timer("score"):
        own = run.ranks.share(samples)
        scores = run.reward.score([each.text for each in own], [each.row for each in own])
        scores = [score for share in run.ranks.gather(scores) for score in share]
    for each, score in zip(samples, scores):
        each.score = score
    run.reward.note_shaping(scores)


def judge_groups(run: Run, batch: Batch) -> list[int]:
    """Note which groups are dead and which completions right. Return the groups that stay."""
    config = run.config
    rewarded, batch.correct = verdicts(run, batch.samples, config.group_size)
    batch.dead = rewarded.amax(1) == rewarded.amin(1)
    kept = torch.arange(len(batch.dead))
    if config.dynamic_sampling:
        kept = kept[~batch.dead]
    return kept[: config.prompts_per_step].tolist()


def verdicts(run: Run, samples: list[Sample], group_size: int):
    """Return rewards before shaping and how right completions are, in [0, 1]: (P, G) each. The
    second is None where no verifier tells right from wrong."""
    rewarded, correct = run.reward.verdicts([each.score for each in samples])
    rewarded = torch.tensor(rewarded, dtype=torch.float64).view(-1, group_size)
    if correct is not None:
        correct = torch.tensor(correct, dtype=torch.float64).view(-1, group_size)
    return rewarded, correct


def place_rewards(run: Run, batch: Batch) -> None:
    """Put the outcome at a completion's last token, and the reward of a step, (end in characters,
    reward), at the token that completes it."""
    own = last_own_token(batch.rollout.completion_mask)
    last = own[:, -1:]
    zeros = torch.zeros_like(batch.rollout.sampler_logprobs)
    batch.token_rewards = zeros.scatter(1, last, batch.rewards[:, None])
    batch.step_ends = zeros.bool().scatter(1, last, True)
    for i, each in enumerate(batch.samples):
        ids = batch.rollout.completions[i, : batch.rollout.lengths[i]].tolist()
        for end, reward in each.score.steps:
            token = own[i, token_that_completes(run.tokenizer, ids, end)]
            batch.token_rewards[i, token] += reward
            batch.step_ends[i, token] = True


def last_own_token(mask: Tensor) -> Tensor:
    """Return (N, T): for each token the index of the latest token, up to it, that the policy wrote.
    A tool's tokens are no action: their rewards go to the action before them."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    return (steps * mask).cummax(1).values


def token_that_completes(tokenizer, ids: list[int], characters: int) -> int:
    """Return the index of the token with which a completion's text has so many characters."""

    def count(token):
        text = tokenizer.decode(ids[: token + 1], skip_special_tokens=True)
        return len(text.rstrip("\ufffd"))  # the first bytes of a character

    return bisect.bisect_left(range(len(ids) - 1), characters, key=count)


# ---- 4. freeze -----------------------------------------------------------------------------------


@torch.no_grad()
def freeze(run: Run, batch: Batch) -> None:
    """Plan the updates, and compute the log-probs of pi_old, pi_ref and a teacher and the values of
    a critic before the first of them. The micro-batches are those of the updates, so that the first
    ratio is exactly 1."""
    with run.timer("freeze"):
        batch.updates = plan(run, batch)
        batch.old_logprobs = torch.zeros_like(batch.rollout.sampler_logprobs)
        batch.ref_logprobs = torch.zeros_like(batch.old_logprobs)
        batch.teacher_logprobs = torch.zeros_like(batch.old_logprobs)
        batch.values = torch.zeros_like(batch.old_logprobs)
        if run.experts:
            run.experts.forget()
        for part in itertools.chain.from_iterable(each.parts for each in batch.updates):
            rows = part.rows
            if run.config.old_logprobs == "sampler":
                batch.old_logprobs[rows] = part.completions.sampler_logprobs
            else:
                with run.routing(part):
                    batch.old_logprobs[rows], _ = run.logprobs(run.policy, part)
            if run.ref_policy is not None:
                batch.ref_logprobs[rows], _ = run.logprobs(run.ref_policy, part)
            if run.teacher is not None:
                batch.teacher_logprobs[rows], _ = run.logprobs(run.teacher, part)
            if run.critic is not None:
                batch.values[rows] = run.values(part)
        frozen = (batch.old_logprobs, batch.ref_logprobs, batch.teacher_logprobs, batch.values)
        run.ranks.sum(*frozen)  # rows of other processes are 0


def plan(run: Run, batch: Batch) -> list[Update]:
    """Divide the rows, group after group in a random order, into updates."""
    config = run.config
    active = find_active_rows(run, batch)
    groups = torch.arange(len(active)).view(-1, config.group_size)
    rng = random.Random(f"{config.seed} {batch.step}")
    order = rng.sample(range(len(groups)), len(groups))
    updates = []
    for rows in groups[order].flatten().split(config.completions_per_update):
        needed = rows[active[rows]]
        own = run.ranks.share(needed)
        parts = rollout.micro_batches(batch.rollout[own], config.micro_batch_tokens, run.shares)
        parts = [part._replace(rows=own[part.rows]) for part in parts]
        updates.append(Update(rows, needed, parts))
    return updates


def find_active_rows(run: Run, batch: Batch) -> Tensor:
    """Return (N,) which rows need a forward pass. Where rewards alone decide on advantages, rows
    with advantage 0 need none, unless a KL penalty or an entropy bonus reads their log-probs.

    The advantages are computed here for this question alone. `compare` computes those of the loss,
    for all algorithms alike, when the log-probs are there."""
    active = batch.mask.any(1).cpu()
    by_rewards = run.algorithm.reads in ("outcomes", "steps")
    if by_rewards and run.ref_policy is None and run.config.entropy_coef == 0:
        not_zero = compute_advantages(run, batch).view(len(active), -1) != 0
        active = (not_zero & batch.mask).any(1).cpu()
    return active


# ---- 5. compare ----------------------------------------------------------------------------------


def compare(run: Run, batch: Batch) -> None:
    """Compute advantages. --tis-cap gives tokens less weight where the sampler was not pi_old."""
    batch.advantages = compute_advantages(run, batch)
    if run.config.tis_cap:
        weights = gspo.truncated_importance_weights(
            batch.old_logprobs, batch.rollout.sampler_logprobs, batch.mask, cap=run.config.tis_cap
        )
        batch.advantages = batch.advantages.view(len(weights), -1) * weights


def compute_advantages(run: Run, batch: Batch) -> Tensor:
    """Return (N,) or (N, T) by the algorithm's function. A critic's targets go into the batch."""
    config, algorithm, group_size = run.config, run.algorithm, run.config.group_size
    compute, numbers = algorithm.advantages, numbers_for(config, algorithm.advantages)
    if algorithm.reads == "outcomes":
        return compute(batch.rewards, group_size, **numbers)
    if algorithm.reads == "teacher":
        scored = (batch.teacher_logprobs, batch.old_logprobs, batch.mask)
        return compute(batch.rewards, group_size, *scored, **numbers)
    if algorithm.reads == "steps":
        return compute(batch.token_rewards, batch.step_ends, group_size, **numbers)
    token_rewards = batch.token_rewards
    if algorithm.kl_in == "reward":  # k1 per token
        kl = batch.old_logprobs - batch.ref_logprobs
        token_rewards = token_rewards - config.kl_coef * batch.mask * kl
    if algorithm.reads == "tokens":
        return compute(token_rewards, batch.mask, **numbers)
    # a truncated completion is not over: the critic's last value stands for the rest
    last = last_own_token(batch.rollout.completion_mask)[:, -1:]
    bootstrap = batch.values.gather(1, last)[:, 0] * batch.rollout.truncated
    scored = (token_rewards, batch.values, batch.mask, bootstrap)
    advantages, batch.returns = compute(*scored, **numbers)
    return advantages


def numbers_for(config: Config, function: Callable) -> dict[str, typing.Any]:
    """Return the keyword-only parameters of a function in gspo.py, as the flags say."""
    return {name: getattr(config, name) for name in keywords(function)}


# ---- 6. improve ----------------------------------------------------------------------------------


def improve(run: Run, batch: Batch) -> list[dict]:
    """Make the updates of a step, --epochs times. Return the metrics of each."""
    config, made = run.config, []
    batch.new_logprobs = torch.zeros_like(batch.old_logprobs)
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lr_factor(config, batch.step)
    with run.timer("improve"):
        for update in batch.updates * config.epochs:
            metrics = accumulate_gradients(run, batch, update)
            if batch.first_logprobs is None:
                batch.first_logprobs = batch.new_logprobs.clone()
            wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
            if wrong:  # skip the update
                batch.bad_updates += 1
                run.progress.bad_in_a_row += 1
                bad = f"{run.progress.bad_in_a_row} updates in a row were not finite"
                sentence = f"step {batch.step}: {bad}, in {', '.join(wrong)}"
                need(run.progress.bad_in_a_row <= MAX_BAD_UPDATES, sentence)
                continue
            run.optimizer.step()  # without active rows AdamW moves by momentum alone: no metrics
            if len(update.active) > 0:
                run.progress.bad_in_a_row = 0
                made.append(metrics)
        run.optimizer.zero_grad()  # sampling needs their memory
        run.ranks.sum(batch.new_logprobs, batch.first_logprobs)  # rows of other processes are 0
    return made


def lr_factor(config: Config, step: int) -> float:
    """Return the factor of the learning rate: warm-up, then --lr-schedule down to 0."""
    warm_up = min(1.0, step / max(config.warmup_steps, 1))
    done = (step - 1) / config.steps
    cosine = (1 + math.cos(math.pi * done)) / 2
    return warm_up * {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[config.lr_schedule]


def accumulate_gradients(run: Run, batch: Batch, update: Update) -> dict[str, float]:
    """Sum the gradient of one update over micro-batches and processes. Return its metrics."""
    units = batch.mask  # of the loss's mean: tokens, or completions that have some
    if run.algorithm.unit == "completion":
        units = batch.mask.any(1)
    # denom counts active rows only, so metrics are means over these. The loss is a mean over all
    # rows, and the others add 0, so it is multiplied by active / all.
    denom = units[update.active].sum()
    share = denom / units[update.rows].sum()
    totals = collections.Counter()
    run.optimizer.zero_grad()
    for part in update.parts:
        loss, logprobs, metrics = losses(run, batch, part, denom)
        (share * loss).backward()
        batch.new_logprobs[part.rows] = logprobs
        metrics["loss"] = share * loss.detach()
        totals.update({name: float(value) for name, value in metrics.items()})  # adds
    return run.ranks.sum_numbers(totals) | clip_gradients(run)


def losses(
    run: Run, batch: Batch, part: rollout.MicroBatch, denom: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the loss, its log-probs (n, T), and its share of metrics."""
    config, algorithm, unit = run.config, run.algorithm, run.algorithm.unit
    rows = part.rows
    mask = batch.mask[rows]
    with run.routing(part):
        logprobs, entropy = run.logprobs(run.policy, part)
    old_logprobs, advantages = batch.old_logprobs[rows], batch.advantages[rows]
    loss, metrics = algorithm.loss(
        logprobs, old_logprobs, advantages, mask, denom, **numbers_for(config, algorithm.loss)
    )

    mean_entropy = gspo.masked_mean(entropy, mask, unit, denom)
    loss = loss - config.entropy_coef * mean_entropy
    metrics["entropy"] = mean_entropy.detach()

    if run.ref_policy is not None:
        kl, kl_metrics = gspo.kl_penalty(logprobs, batch.ref_logprobs[rows], mask, denom, per=unit)
        if algorithm.kl_in == "loss":  # else it is part of the reward, and here a metric
            loss = loss + config.kl_coef * kl
        metrics |= kl_metrics

    if run.critic is not None:
        values, old_values, returns = run.values(part), batch.values[rows], batch.returns[rows]
        critic_loss, critic_metrics = gspo.value_loss(
            values, old_values, returns, mask, denom, **numbers_for(config, gspo.value_loss)
        )
        loss = loss + critic_loss
        metrics |= critic_metrics
    return loss, logprobs.detach(), metrics


def clip_gradients(run: Run) -> dict[str, float]:
    """Sum gradients over processes and clip them. Return their norms before clipping."""
    norms = {}
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:  # this process had no active row
                parameter.grad = torch.zeros_like(parameter)
        run.ranks.sum(*[parameter.grad for parameter in group["params"]])
        norm = torch.nn.utils.clip_grad_norm_(group["params"], run.config.max_grad_norm)
        norms[group["norm"]] = float(norm)
    return norms


# ---- 7. report -----------------------------------------------------------------------------------


def measure(run: Run, batch: Batch, made: list[dict]) -> dict:
    """Return the row of metrics.jsonl, which docs/metrics.md explains. A new metric is a line.

    made: the metrics of each update."""
    correct = batch.correct
    lengths = batch.rollout.completion_mask.sum(1).float()
    row = {}
    row["reward"] = batch.rewards.mean()
    row["reward_std"] = batch.rewards.std()
    for name in run.reward.terms:
        row[f"reward/{name}"] = statistics.fmean(each.score.terms[name] for each in batch.samples)
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
    row["truncated"] = batch.rollout.truncated.float().mean()
    size = batch.advantages.abs()
    row["advantage_abs"] = size.mean() if size.dim() == 1 else size[batch.mask].mean()
    for name in made[0] if made else []:  # clip_fraction, ratio_mean, entropy, grad_norm, ...
        row[name] = statistics.fmean(metrics[name] for metrics in made)
    row["bad_updates"] = batch.bad_updates
    active, first = batch.active, batch.updates[0].active
    moved = batch.new_logprobs - batch.old_logprobs
    apart = batch.first_logprobs - batch.rollout.sampler_logprobs
    row |= drift("policy", moved[active], batch.mask[active])
    row |= drift("sampler", apart[first], batch.mask[first])
    if run.critic is not None and batch.mask.any():  # 1 if perfect, 0 for a constant
        values, returns = batch.values[batch.mask], batch.returns[batch.mask]
        left = (returns - values).var(correction=0)
        row["explained_variance"] = 1 - left / (returns.var(correction=0) + 1e-8)
    if run.teacher is not None:
        teacher, old = batch.teacher_logprobs[batch.mask], batch.old_logprobs[batch.mask]
        row["teacher_kl"] = (old - teacher).mean()  # k1, from sampled tokens
        row["teacher_unlikely"] = (teacher < math.log(1e-3)).float().mean()
    row["verifier_faults"] = len(batch.faults)
    for meter in run.meters:
        row |= meter(run, batch.rollout)
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row["memory_gb"] = max(run.ranks.gather(console.peak_memory(run.config.device)))
    row |= run.seconds
    row["tokens_per_second"] = lengths.sum() / run.seconds["seconds_step"]
    numbers = {name: float(value) for name, value in row.items() if math.isfinite(value)}  # as JSON
    return {"step": batch.step, **numbers}


def drift(prefix: str, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far two policies are apart, from differences of log-probs (n, T): a KL in nats
    over the tokens (k3), the spread of the tokens' log-ratios, and that of log s."""
    tokens = log_ratio[mask]
    if len(tokens) == 0:
        return {}
    log_s = torch.where(mask, log_ratio, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    return {
        f"{prefix}_kl": (tokens.expm1() - tokens).mean(),
        f"{prefix}_token_std": tokens.std(correction=0),
        f"{prefix}_sequence_std": log_s.std(correction=0),
    }


def report(run: Run, batch: Batch, row: dict) -> None:
    """Evaluate, write the console line and the rows of the step, and save a checkpoint. The tracker
    and the page come last: they may fail without ending the run."""
    config, step = run.config, batch.step
    last = step == config.steps
    evaluates = last or (config.eval_every > 0 and step % config.eval_every == 0)
    if evaluates:
        row |= evaluate(run, pass_k=config.eval_samples * last)
        if run.experts:
            row |= run.experts.measure_flips(run)
    warn(run, batch, row)
    write_rows(run, batch, row)
    stopping = any(run.ranks.gather(run.signalled))
    run.stopped = stopping and not last
    if last or stopping or (config.save_every and step % config.save_every == 0):
        save(run)
    if config.device == "mps":  # its allocator keeps memory of every shape that it has seen
        torch.mps.empty_cache()
    if run.tracker and run.ranks.first:
        try_to(run, "--track", lambda: run.tracker(row))
    if (evaluates or stopping) and run.write_page and run.ranks.first:
        try_to(run, "report.html", lambda: run.write_page([run.folder], run.folder / "report.html"))


def try_to(run: Run, name: str, write: Callable) -> None:
    """Call write. An error costs one warning, never the run."""
    try:
        write()
    except Exception as error:
        run.warn(name, f"{name} was not written: {reason(error)}")


def write_rows(run: Run, batch: Batch, row: dict) -> None:
    """Write one console line, one row of metrics.jsonl, and a few samples."""
    if not run.ranks.first:
        return
    seconds_left = (run.config.steps - batch.step) * row["seconds_step"]
    say(console.step_line(row, run.config.steps, seconds_left))
    folders.append_rows(run.folder / "metrics.jsonl", [row])
    first_of_groups = batch.samples[:: run.config.group_size][:SHOWN_PROMPTS]
    samples = [each.readable(batch.step) for each in first_of_groups]
    folders.append_rows(run.folder / "samples.jsonl", samples)
    answers = [each for each in run.answers if each["step"] == batch.step]  # evaluated just now
    folders.append_rows(run.folder / "evaluations.jsonl", answers)


def warn(run: Run, batch: Batch, row: dict) -> None:
    """Warn of dead groups, faults of verifiers, and steps that teach nothing."""
    config, kept = run.config, int((~batch.dead).sum())
    if config.dynamic_sampling and kept < config.prompts_per_step:
        drawn = f"{kept} of {len(batch.dead)} groups have different rewards"
        run.warn("refills", f"--dynamic-sampling: {drawn}, expected {config.prompts_per_step}")
    if batch.faults:
        run.warn("fault", f"a verifier failed and gave reward 0: {batch.faults[0]}")
    seen = batch.advantages.view(len(batch.mask), -1).masked_select(batch.mask)
    run.quiet_steps = 0 if seen.any() else run.quiet_steps + 1
    if run.quiet_steps == 10:
        why = "all rewards are equal (another --reward? other prompts? more --group-size?)"
        if row["truncated"] == 1:
            why = "all completions are truncated (--max-new-tokens)"
        run.warn("quiet", f"10 steps taught nothing: {why}")


def evaluate(run: Run, pass_k: int = 0) -> dict:
    """Return held-out accuracy: greedy, and the fraction of prompts that one of k samples solves.
    Where no verifier tells right from wrong, return the greedy reward."""
    sampler, count = run.old_policy, len(run.held_out)
    if run.config.stale_steps > 1:  # the policy is evaluated, and its sampler must stay stale
        sampler = run.policy
    elif sampler is not run.policy:
        refresh(sampler, run.policy)
    if pass_k:
        say(f"evaluating {count} prompts, greedy and {pass_k} samples each")
    _, greedy = complete(run, sampler, run.held_out, 1, 0.0, "eval")
    score_samples(run, greedy)
    faults = [each.score.fault for each in greedy]
    begun = run.progress.step > 0
    need(begun or not all(faults), f"--reward: it failed on every completion: {faults[0]}")
    _, correct = verdicts(run, greedy, 1)
    keep_answers(run, greedy, correct)
    if correct is None:
        return {"eval_reward": statistics.fmean(each.score.reward for each in greedy)}
    found = {"eval_solved": float(correct.mean())}
    if run.lenient:  # the same completions: a rise of eval_solved alone is format
        texts, rows = [each.text for each in greedy], [each.row for each in greedy]
        _, correct = run.lenient.verdicts(run.lenient.score(texts, rows))
        found["eval_solved_lenient"] = statistics.fmean(correct)
    if pass_k:
        _, several = complete(run, sampler, run.held_out, pass_k, run.config.temperature, "eval")
        score_samples(run, several)
        _, correct = verdicts(run, several, pass_k)
        if correct is not None:
            found[f"eval_pass@{pass_k}"] = float(correct.amax(1).mean())
    return found


def keep_answers(run: Run, greedy: list[Sample], correct: Tensor | None) -> None:
    """Keep the greedy answers to a few prompts for report.html, and show one."""
    run.answers = [each.readable(run.progress.step) for each in greedy[:SHOWN_PROMPTS]]
    for i, row in enumerate(run.answers):
        row["correct"] = None if correct is None else float(correct[i, 0])
    first = run.answers[0]
    said = [printable(first[name][-200:]) for name in ("prompt", "completion")]
    say(f"held out: '{said[0]}' -> '{said[1]}' has reward {first['reward']:g}")


def say_goodbye(run: Run, row: dict) -> None:
    config, checkpoint = run.config, run.folder / f"checkpoints/step-{run.config.steps}"
    after = {name: value for name, value in row.items() if name in run.progress.before}
    took = console.duration(time.time() - run.began)
    say(f"held out: {percent(run.progress.before)} -> {percent(after)}, in {took}")
    page = f", the report in {run.folder}/report.html" if run.write_page else ""
    say(f"the model is in {checkpoint}{page}; try it:")
    say(console.command_to_try(checkpoint, config, run.held_out[0]["prompt"]))


# ---- checkpoints ---------------------------------------------------------------------------------


def save(run: Run) -> None:
    """Write checkpoints/step-N in Hugging Face layout, with trainer/ for --resume."""
    config, step = run.config, run.progress.step
    run.progress.shaping = sorted(run.reward.shaping)
    if run.ranks.first:
        with folders.new_checkpoint(run.folder, step) as folder:
            run.policy.save_pretrained(folder)
            run.tokenizer.save_pretrained(folder)
            if run.write_adapter:
                run.write_adapter(run.policy, folder / "adapter", config.model)
            trainer = folder / "trainer"
            trainer.mkdir()
            folders.write_state(trainer / "state.safetensors", *trainer_state(run))
            folders.write_json(trainer / "progress.json", dataclasses.asdict(run.progress))
    run.ranks.from_first(None)  # the others wait until it is written


def trainer_state(run: Run) -> tuple[dict[str, Tensor], set[str], torch.optim.Optimizer]:
    """Return all parameters of the run by name, the names of those that the policy's own files
    have, and the optimiser."""
    parts = {"policy": run.policy, "critic": run.critic, "ref_policy": run.ref_policy}
    if run.config.stale_steps > 1:
        parts["old_policy"] = run.old_policy
    named = {}
    for part, module in parts.items():
        if module is not None:
            named |= {f"{part}.{name}": each for name, each in module.named_parameters()}
    in_files = {f"policy.{name}" for name in run.policy.state_dict()}
    return named, in_files, run.optimizer


# ---- start ---------------------------------------------------------------------------------------


def start(config: Config, ranks: Ranks) -> Run:
    """Return a run that can begin. Mistakes in the input are found before weights load, and nothing
    is written before the policy has been evaluated."""
    reward = rewards.parse_reward(config.reward, config.device)
    reward.reads_steps = gspo.ALGOS[config.algo].reads in READS_STEPS
    rows, held_out = read_data(config, reward)
    tool = extra("tools").parse_tool(config.tool) if config.tool else None
    with expecting(f"--sampler {config.sampler}: expected file.py:function"):
        sampler = function_of(config.sampler) if config.sampler else None
    saved, progress = checkpoint_to_resume(config)
    source, tokenizer, model_config = find_model(config, ranks)
    stops = rollout.StopTexts(tokenizer, config.stop) if config.stop else None
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
    say(f"first held-out prompt: '{printable(tokenizer.decode(held_out[0][data.IDS]))}'")

    # the weights of a checkpoint have the adapters merged: these need the weights before training
    weights = source if config.lora_rank or not saved else str(saved)
    policy = rollout.load_model(weights, config.device)
    run = Run(
        config=config,
        algorithm=gspo.ALGOS[config.algo],
        ranks=ranks,
        tokenizer=tokenizer,
        stops=stops,
        reward=reward,
        lenient=reward.lenient_twin(),
        prompts=itertools.islice(prompts, progress.prompts_drawn, None),
        held_out=held_out,
        progress=progress,
        policy=policy,
        **frozen_policies(config, policy),
        **rollout.end_and_pad_ids(policy, tokenizer),
    )
    plug_in(run, tool, sampler)
    run.optimizer = make_optimizer(run)
    reward.shaping.update(progress.shaping)
    if saved:
        path = saved / "trainer/state.safetensors"
        folders.read_state(path, *trainer_state(run), config.device)
    if saved and config.lora_rank:
        extra("lora").check_base(run.policy, saved)

    trained, every = policy.num_parameters(only_trainable=True), policy.num_parameters()
    size = f"{trained / 1e6:.1f} of {every / 1e6:.1f} M parameters are trained"
    say(f"{config.algo}, {size}, {config.device} {config.dtype}, --reward {config.reward}")
    if progress.step == 0:  # a resumed run has it in its checkpoint
        progress.before = evaluate(run, pass_k=config.eval_samples)
    say(f"{len(held_out)} prompts held out, before step 1: {percent(progress.before)}")
    claim_folder(run)
    return run


def plug_in(run: Run, tool=None, sampler: Callable | None = None) -> None:
    """Choose everything optional, once. Each file of support/extras can be deleted.

    tool: of --tool; sampler: of --sampler."""
    config, contexts = run.config, []
    run.generate = rollout.generate
    # of two lengths: errors of padding show
    ids = run.held_out[0][data.IDS][-64:]
    prompts = [ids, ids[1:] or ids * 2]
    run.shares = rollout.check_scorer(run.policy, prompts, run.pad_id)
    if run.teacher is not None:
        run.shares = run.shares and rollout.shares_prefixes(run.teacher)
    if sampler:
        run.generate = sampler
    if tool:
        run.generate = extra("tools").Turns(run.generate, tool, run.tokenizer)
        run.meters.append(run.generate.measure)
    if has_experts(run.policy.config) and config.old_logprobs == "trainer" and extra("experts"):
        run.experts = extra("experts").Experts(config.routing_replay)
        contexts.append(extra("experts").routing_now)
    if config.lora_rank:
        extra("lora").add_adapters(run.policy, config, getattr(torch, config.dtype))
        run.write_adapter = extra("lora").write_adapter
    if config.gradient_checkpointing:
        checkpoint_layers(run.policy, contexts)
    if config.track:
        run.open_tracker = extra("trackers").open_tracker
    if extra("report"):
        run.write_page = extra("report").write_report


def frozen_policies(config: Config, policy) -> dict:
    """Return the models that are not trained."""
    dtype = getattr(torch, config.dtype)
    old_policy, ref_policy, teacher = policy, None, None
    # nothing changes while the policy samples: in float32 on one step's weights it needs no copy
    if dtype != torch.float32 or config.stale_steps > 1 or config.lora_rank:
        old_policy = frozen_copy(policy, dtype)
    if config.kl_coef:
        ref_policy = frozen_copy(policy, dtype)
    if config.teacher:
        teacher = frozen_copy(rollout.load_model(config.teacher, config.device), dtype)
    return {"old_policy": old_policy, "ref_policy": ref_policy, "teacher": teacher}


def make_optimizer(run: Run) -> torch.optim.Optimizer:
    """Return the optimiser of the policy, and of a critic where the advantages read its values."""
    trained = [(run.policy, run.config.lr, "grad_norm")]  # the metric: its gradient's norm
    if run.algorithm.reads == "values":
        run.critic = critic_of(run.policy)
        trained.append((run.critic, run.config.critic_lr, "critic_grad_norm"))
    groups = []
    for module, lr, norm in trained:
        parameters = [each for each in module.parameters() if each.requires_grad]
        groups.append({"params": parameters, "lr": lr, "initial_lr": lr, "norm": norm})
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def find_model(config: Config, ranks: Ranks) -> tuple[str, typing.Any, typing.Any]:
    """Return its folder or name, its tokenizer and its config. The first process makes a built-in
    one."""
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
    """Return rows to train on and held-out rows, of a file or of a built-in task."""
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
    need(progress.step < config.steps, f"--steps {config.steps}: {done}")
    return saved, progress


def claim_folder(run: Run) -> None:
    """Make the run's folder and lock it. The first process does it for all."""
    config = run.config
    if run.ranks.first:
        folder = folders.make_folder(config.runs, config.name, config.algo)
        run.lock = folders.lock(folder)
        config.name = folder.name
        folders.write_json(folder / "config.json", dataclasses.asdict(config))
        folders.repair(folder, run.progress.step)
        command = shlex.join(["python", "train.py", *sys.argv[1:]])
        begin = {"date": time.strftime("%Y-%m-%d"), "command": command, "step": 0}
        folders.append_rows(folder / "starts.jsonl", [begin | run.progress.before])
        folders.append_rows(folder / "evaluations.jsonl", run.answers)
        if run.open_tracker:
            done, began = run.progress.step, run.progress.began
            run.tracker = run.open_tracker(config.track, folder, vars(config), began, done)
    config.name = run.ranks.from_first(config.name)
    run.folder = Path(config.runs, config.name)


# ---- checks of the flags -------------------------------------------------------------------------


def parse_flags(arguments: list[str]) -> Config:
    """Return the flags of a run, checked, with their defaults. UserError for wrong ones."""
    config = parse(Config, __doc__, arguments, elsewhere=ELSEWHERE)
    if config.resume:
        config = with_saved_flags(config, arguments)
    refuse_flags_of_others(config)
    fill_defaults(config)
    check_together(config)
    return config


def with_saved_flags(config: Config, arguments: list[str]) -> Config:
    """Return the flags of the run that --resume continues, and those that come with --resume."""
    need(config.name, "--resume: needs --name, of the run to continue")
    path = Path(config.runs, config.name, "config.json")
    with expecting(f"--resume: expected the --name of a run of this train.py, with {path}"):
        saved = dict(json.loads(path.read_text(encoding="utf-8")))
        known = {field.name for field in dataclasses.fields(Config)} - {"resume", "runs", "name"}
        saved = {name: saved[name] for name in saved.keys() & known}
        config = parse(Config, __doc__, arguments, defaults=saved, elsewhere=ELSEWHERE)
    kept = KEPT_FLAGS
    if config.lr_schedule != "constant":  # it ends after these steps
        kept = (*kept, "steps")
    for name in kept:
        same = getattr(config, name) == saved.get(name, getattr(config, name))
        need(same, f"{dashed(name)}: a resumed run keeps its own, {saved.get(name)}")
    return config


def refuse_flags_of_others(config: Config) -> None:
    """UserError for a flag of other algorithms: it would do nothing."""
    flags = {}
    for algo, row in gspo.ALGOS.items():
        flags[algo] = own_numbers(row).keys() | FLAGS_OF_INPUTS.get(row.reads, set())
    for name in sorted(set().union(*flags.values()) - flags[config.algo]):
        those = ", ".join(algo for algo in flags if name in flags[algo])
        value = getattr(config, name)
        need(value is None, f"{dashed(name)} {value}: {config.algo} has none; {those} have it")


def fill_defaults(config: Config) -> None:
    """Replace each None by the default of the algorithm, the model or the task."""
    algorithm, task = gspo.ALGOS[config.algo], TASKS[config.task]
    built_in = config.model in BUILT_IN

    def default(name, value):
        if getattr(config, name) is None:
            setattr(config, name, value)

    if algorithm.reads == "teacher":  # a reward that is asked for counts
        default("reward_coef", 1.0 if config.reward else 0.0)
    if config.data and not built_in:
        default("reward", "math")
        default("max_new_tokens", 1024)
    else:
        default("tool", task.tool)
    default("reward", task.verifier)
    default("max_new_tokens", task.max_new_tokens)
    default("dtype", "bfloat16" if config.device == "cuda" else "float32")

    lr = 2e-4 if built_in else 1e-5
    if config.lora_rank:
        lr *= 10
        default("lora_alpha", 2.0 * config.lora_rank)
    default("lr", lr)
    default("warmup_steps", 0 if built_in else 3)

    default("kl_coef", algorithm.kl_coef)
    default("dynamic_sampling", algorithm.dynamic_sampling)
    default("overlong_cache", config.max_new_tokens // 5 if algorithm.overlong_shaping else 0)
    if algorithm.reads == "values":
        default("critic_lr", 10 * config.lr)
    for name, number in own_numbers(algorithm).items():
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
    if config.tool:  # the task may have one
        here = extra("tools")
        need(here, f"--tool {config.tool}: needs support/extras/tools.py, which is not here")
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


# ---- main ----------------------------------------------------------------------------------------


def stop_on_signals(run: Run) -> None:
    """End the run after its step, with a checkpoint, at the first signal; at once at the second."""

    def stop(number, frame):
        run.signalled = True
        signal.signal(number, signal.default_int_handler)
        say("stopping after this step, with a checkpoint; once more: at once, without")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()  # it would break our lines
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
        sentence += f"; to continue: {console.command_to_resume(config.runs, config.name)}"
    print(printable(sentence), file=sys.stderr, flush=True)
    if ranks.size > 1:
        os._exit(status)  # at once: an orderly end would wait for the others
    return status


if __name__ == "__main__":
    sys.exit(main())
