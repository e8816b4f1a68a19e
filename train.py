"""Train a language model with GSPO, or another algorithm of gspo.ALGOS, on rewards from a verifier.

    python train.py --algo gspo                          # tiny built-in policy, nothing downloaded
    python train.py --algo gspo --model Qwen/Qwen3-0.6B --data train.jsonl --reward math

Read `train`, the loop, then its phases, which stand below it in order. Of the three policies
`policy` is trained and `ref_policy` is there for a KL penalty. The old policy is the policy before
the first update of a step: its log-probs are kept as `old_logprobs`. `sampling_model` is the policy
itself, or a copy of it.

docs/deviations.md says where this differs from the papers."""

import os

# torch's threads spin while they wait. Beside other processes that takes ten times as long as the
# work, so they spin briefly, then sleep. It is read as torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# the KV cache and the optimiser take memory in turns: fixed segments would stay in pieces
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import collections
import contextlib
import dataclasses
import itertools
import math
import random
import statistics
import sys
import typing
from collections.abc import Callable, Iterator

try:
    import torch
    import transformers
    from torch import Tensor
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")

import gspo
import rewards
import rollout as rollouts  # below, `rollout` is a Rollout
from rollout import MicroBatch, Rollout
from support import checkpoints, console, data, flags, report
from support.command_line import flag, parse
from support.console import percent, say
from support.data import printable
from support.folders import Output, open_output
from support.metrics import measure, readable, readable_samples, warnings_of
from support.models import (
    context_of,
    critic_of,
    end_and_pad_ids,
    find_model,
    free_memory,
    frozen_copy,
    has_experts,
    load_model,
    refresh,
)
from support.process import StopSignal, fail, farewell
from support.ranks import Ranks, joined_ranks
from support.tasks import BUILT_IN, TASKS, problems_of
from support.user import expecting, function_of, need

# ---- flags ---------------------------------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass
class OwnFlags:
    """The flags of this file. Defaults of None depend on the model, the task or the algorithm:
    `flags.fill_defaults` has them."""

    algo: str = flag("gspo", "algorithm", heading="what to run", choices=tuple(gspo.ALGOS))
    model: str = flag("tiny", "built in (tiny, tiny-moe), a folder, or a name on the hub")
    task: str = flag("arithmetic", "built-in problems", choices=tuple(TASKS))
    data: str | None = flag(None, "JSONL file to train on: prompt and answer")
    eval_data: str | None = flag(None, "JSONL file of held-out rows, else a tenth", needs="data")
    reward: str | None = flag(
        None, "'math + 0.1*format' or file.py:function; default: the task's, or math"
    )
    teacher: str | None = flag(None, "OPD: a larger model, folder or hub name")
    tool: str | None = flag(None, "calculator, or file.py:function@TRIGGER_TEXT")
    sampler: str | None = flag(None, "file.py:function with the signature of rollout.generate")
    steps: int = flag(50, "rollout steps", low=1)
    seed: int = flag(0, "seed of problems, samples, shuffles and adapters", low=0)

    system: str | None = flag(None, "system message, for chat templates", heading="prompts")
    chat_template_args: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    prompt_template: str = flag("{prompt}", "text around {prompt}; \\n is a line break")

    prompts_per_step: int = flag(32, "prompts P of a step", heading="rollout", low=1, high=10**6)
    group_size: int = flag(8, "completions G of a prompt", low=2, high=10**6)
    max_new_tokens: int | None = flag(None, "of a completion; default the task's, or 1024", low=1)
    stop: list[str] | None = flag(None, "text that ends a completion; may be given several times")
    temperature: float = flag(1.0, "divides the logits, in sampling and in scoring", above=0)
    cache_gb: float | None = flag(None, "memory for KV caches; default: what is free", above=0)
    old_logprobs: str = flag("trainer", "who computes old_logprobs", choices=("trainer", "sampler"))
    stale_steps: int = flag(1, "steps between refreshes of the sampler; see --tis-cap", low=1)
    tis_cap: float | None = flag(None, "bound of importance weights, sampler to pi_old", above=0)

    entropy_coef: float = flag(0.0, "bonus per nat of entropy", heading="objective", low=0)
    kl_coef: float | None = flag(None, "weight of the KL to the reference; grpo 0.04", low=0)
    ref_every: int = flag(0, "steps between refreshes of the reference", low=0, needs="kl_coef")
    dynamic_sampling: bool | None = flag(None, "replace groups of equal rewards; default: dapo's")
    overlong_cache: int | None = flag(None, "tokens before the limit that are punished", low=0)
    overlong_filter: bool = flag(False, "leave truncated completions out of the loss")
    routing_replay: bool = flag(False, "train with the experts that pi_old chose")

    epochs: int = flag(1, "passes over a rollout", heading="optimiser", low=1)
    completions_per_update: int | None = flag(None, "default a quarter of a step's", low=1)
    lr: float | None = flag(None, "default 2e-4 built in, else 1e-5; LoRA x 10", above=0)
    lr_schedule: str = flag("constant", "over all steps", choices=("constant", "linear", "cosine"))
    critic_lr: float | None = flag(None, "of PPO's critic; default 10 x lr", above=0)
    warmup_steps: int | None = flag(None, "of the lr; default 0 built in, else 3", low=0)
    max_grad_norm: float = flag(1.0, "gradient clipping", above=0)
    micro_batch_tokens: int = flag(16384, "tokens of one forward and backward pass", low=1)
    gradient_checkpointing: bool = flag(False, "less memory for activations, but slower")
    lora_rank: int = flag(0, "train an adapter of this rank; 0: all weights", low=0)
    lora_alpha: float | None = flag(None, "its scale; default 2 x rank", above=0, needs="lora_rank")

    eval_every: int = flag(10, "steps; 0: before and after", heading="evaluation", low=0)
    eval_prompts: int = flag(256, "held-out prompts, greedy", low=1)
    eval_samples: int = flag(8, "k of pass@k, before and after; 0: none", low=0)

    name: str | None = flag(None, "folder of the run; default: algorithm, number", heading="run")
    runs: str = flag("runs", "folder of all runs")
    resume: bool = flag(False, "continue from the newest checkpoint of --name, with its flags")
    save_every: int = flag(10, "steps between checkpoints; 0: the last only", low=0)
    track: str | None = flag(None, "send metrics there, too", choices=flags.TRACKERS)
    device: str = flag(DEVICE, "where everything runs", choices=("cuda", "cpu", "mps"))
    dtype: str | None = flag(None, "default bfloat16 on CUDA", choices=("float32", "bfloat16"))


# Config is OwnFlags and a field for each keyword-only parameter of a loss or of advantages in
# gspo.py: `gspo_loss(..., *, clip_low=3e-4)` makes the flag --clip-low and Config.clip_low, which
# is None until `parse_flags` sets 3e-4. `start` then binds partial(gspo_loss, clip_low=3e-4)
NUMBER_DEFAULTS = {algo: flags.own_numbers(row, OwnFlags) for algo, row in gspo.ALGOS.items()}
NUMBER_FLAGS = flags.flags_of(NUMBER_DEFAULTS)
Config = dataclasses.make_dataclass("Config", NUMBER_FLAGS, bases=(OwnFlags,))

SHOWN_PROMPTS = 4  # of an evaluation in evaluations.jsonl
MAX_REFILLS = 4  # further rollouts of a step, for dynamic sampling
REWARDS_ALONE = ("rewards", "steps")  # kinds of Algorithm.reads that need no log-probs and values
DECISIVE = ("loss", "ratio_mean")  # an update is skipped if these or a norm are not finite
MAX_BAD_UPDATES = 5  # skipped in a row; one more ends the run

# ---- the loop ------------------------------------------------------------------------------------


def train(run: "Run", output: Output) -> None:
    """Run the loop. By default on a CPU there is one model: it samples, its log-probs before the
    first update are old_logprobs, and without a KL penalty no reference is loaded."""
    config, algorithm, models = run.config, run.algorithm, run.models
    stop = StopSignal()
    for step in range(run.progress.step + 1, config.steps + 1):
        run.log.start_step()

        # 1. snapshot    sampling_model <- policy, where it is a copy, and ref_policy <- policy
        #                every --ref-every steps
        refresh_models(models, config, step)

        # 2. sample      G completions for each of P prompts, and their rewards. Dynamic sampling
        #                drops groups of equal rewards and asks further prompts
        batch = collect(run, step)

        # 3. advantages  already here where rewards alone decide, as in GSPO: so phase 4 can leave
        #                out the forward passes of rows with advantage 0
        advantages, returns = None, None
        if algorithm.reads in REWARDS_ALONE:
            advantages, returns = compute_advantages(run, batch)

        # 4. plan        groups in a random order, in updates, in micro-batches
        updates = plan(run, batch, advantages)

        # 5. constants   log-probs of pi_old, pi_ref and a teacher, values of a critic: no gradient
        constants = compute_constants(run, batch, updates)

        # 6. advantages  if not in 3, as in PPO; then weights of tokens whose sampler was not pi_old
        if advantages is None:
            advantages, returns = compute_advantages(run, batch, constants)
        if config.tis_cap:
            advantages = weigh(advantages, batch, constants.old_logprobs, config.tis_cap)

        # 7. improve     for each update: accumulate micro-batches, clip, step
        result = improve(run, batch, updates, constants, advantages, returns)

        # 8. report      metrics, evaluation, checkpoint, console line, page
        run.progress.step = step
        run.progress.seconds = run.log.elapsed()
        row = measure(run, batch, updates, constants, advantages, returns, result)
        shown = readable_samples(run, batch, updates, constants, advantages, result)
        stopping = any(run.ranks.gather(stop.asked))
        report_step(run, output, batch, advantages, row, shown, stopping)
        if stopping and step < config.steps:
            raise KeyboardInterrupt  # `main` prints "stopped", exit status 130
    farewell(config, output.folder, run.progress, row, run.held_out[0]["prompt"])


# ---- the models, and all that outlives a step ----------------------------------------------------


@dataclasses.dataclass
class Scorer:
    """Computes log-probs, or a critic's values, of micro-batches by one of the models."""

    module: transformers.PreTrainedModel
    temperature: float
    in_bfloat16: bool  # the body's matrix products. The head is float32
    routing: typing.Any = None  # of a policy that is a mixture: extras.experts.Experts

    def logprobs(self, part: MicroBatch, entropy: str) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, (n, T) each: `completion_logprobs` of rollout.py."""
        routed = self.routing.over(part) if self.routing else contextlib.nullcontext()
        with torch.autocast(self.module.device.type, torch.bfloat16, self.in_bfloat16), routed:
            return rollouts.completion_logprobs(
                self.module, part.rollout, self.temperature, part.trees, entropy=entropy
            )

    def values(self, part: MicroBatch) -> Tensor:
        """Return the values (n, T) of a critic."""
        with torch.autocast(self.module.device.type, torch.bfloat16, self.in_bfloat16):
            return rollouts.completion_values(self.module, part.rollout, part.trees)


class Models(typing.NamedTuple):
    """A Scorer has its model as `module`. The sampling model is one itself."""

    policy: Scorer  # pi_theta
    sampling_model: transformers.PreTrainedModel  # pi_theta, or a copy (bfloat16, LoRA, stale)
    ref_policy: Scorer | None  # with --kl-coef
    teacher: Scorer | None  # with --teacher
    critic: Scorer | None  # where advantages read its values
    share_prefixes: bool  # whether texts may be scored as trees, by all of them


class Run(typing.NamedTuple):
    """Everything that outlives a step."""

    config: Config
    algorithm: gspo.Algorithm  # its functions have their numbers already
    ranks: Ranks
    tokenizer: transformers.PreTrainedTokenizerBase
    reward: rewards.Reward
    problems: Iterator[dict]  # rows of data to train on, without end
    held_out: list[dict]
    generate: Callable  # of rollout.py, --sampler or `turns`
    endings: dict  # eos_ids, pad_id and stops of generate
    turns: typing.Any  # extras.tools.Turns, with --tool, else None
    models: Models
    optimizer: torch.optim.Optimizer
    progress: checkpoints.Progress
    log: console.Log


# ---- 1. snapshot ---------------------------------------------------------------------------------


def refresh_models(models: Models, config: Config, step: int) -> None:
    """Refresh the sampler, where it is a copy, and pi_ref every --ref-every steps."""
    policy, steps_done = models.policy.module, step - 1
    if models.sampling_model is not policy and steps_done % config.stale_steps == 0:
        refresh(models.sampling_model, policy)
    if config.ref_every and steps_done > 0 and steps_done % config.ref_every == 0:
        refresh(models.ref_policy.module, policy)


# ---- 2. sample -----------------------------------------------------------------------------------


class Sample(typing.NamedTuple):
    """A completion as text, the problem that it answers, and its reward."""

    text: str
    problem: dict  # a row of data, with "tokens", the completion's length, for the reward
    verdict: rewards.Verdict


class Drawn(typing.NamedTuple):
    """All groups that a step sampled, also those that dynamic sampling dropped."""

    dead: Tensor  # (groups,) rewards are all equal, apart from shaping terms and overlong shaping
    correct: Tensor | None  # (groups, G) in [0, 1], where the reward tells right from wrong
    faults: list[str]  # of verifiers


class Batch(typing.NamedTuple):
    """The N completions that a step trains on, in groups of G, T tokens wide."""

    step: int
    rollout: Rollout  # as tokens
    samples: list[Sample]  # as texts
    mask: Tensor  # (N, T) tokens of the loss
    rewards: Tensor  # (N,) with overlong shaping
    drawn: Drawn


def collect(run: Run, step: int) -> Batch:
    """Sample and verify the completions of a step, and keep the groups that it trains on."""
    config, size, count = run.config, run.config.group_size, run.config.prompts_per_step
    rollout, samples, drawn = draw_groups(run, step)
    kept = [i for i, dead in enumerate(drawn.dead) if not (config.dynamic_sampling and dead)]
    groups = kept[:count] or [0]  # nothing kept: group 0 with an empty mask, so that shapes stay
    chosen = [size * group + member for group in groups for member in range(size)]
    rollout, samples = rollout.select(chosen), [samples[i] for i in chosen]

    mask = rollout.completion_mask  # that of the loss. Scoring and metrics read the rollout's own
    if not kept:
        mask = torch.zeros_like(mask)
    if config.overlong_filter:
        mask = mask & ~rollout.truncated[:, None]
    shaped = [sample.verdict.reward for sample in samples]
    if cache := config.overlong_cache:
        for i, length in enumerate(rollout.lengths.tolist()):
            shaped[i] += soft_overlong_penalty(length, config.max_new_tokens, cache)
    return Batch(step, rollout, samples, mask, torch.tensor(shaped, device=config.device), drawn)


def draw_groups(run: Run, step: int) -> tuple[Rollout, list[Sample], Drawn]:
    """Sample P groups. With dynamic sampling go on until P are not dead, or MAX_REFILLS times."""
    config, size, count = run.config, run.config.group_size, run.config.prompts_per_step
    all_rollouts, samples = [], []
    if run.turns:
        run.turns.faults.clear()  # an evaluation may have left some
    for refill in range(1 + MAX_REFILLS):
        problems = list(itertools.islice(run.problems, count))
        run.progress.prompts_drawn += len(problems)
        model, seed = run.models.sampling_model, f"{step} {refill}"
        rollout, verified = sample_and_verify(run, model, problems, size, config.temperature, seed)
        all_rollouts.append(rollout)
        samples += verified
        dead, correct = judge_groups(run.reward, samples, size)
        if not config.dynamic_sampling or int((~dead).sum()) >= count:
            break
    faults = [sample.verdict.fault for sample in samples if sample.verdict.fault]
    rollout = Rollout.cat(all_rollouts, run.endings["pad_id"])
    return rollout, samples, Drawn(dead, correct, faults)


def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Eq. 13 of arXiv 2503.14476: 0 up to max_length - cache tokens, then linear down to -1."""
    return -min(max(length - max_length + cache, 0) / max(cache, 1), 1.0)


def sample_and_verify(
    run: Run, model, problems: list[dict], group_size: int, temperature: float, seed: str
) -> tuple[Rollout, list[Sample]]:
    """Sample group_size completions of each problem and verify them; note shaping of the reward.
    Equal seed texts give equal samples. Processes share the work, and each gets all results."""
    config, ranks = run.config, run.ranks
    number = random.Random(f"{config.seed} {seed}").getrandbits(60)
    generator = torch.Generator().manual_seed(number)
    # made for all prompts, then shared: a prompt has the same numbers in whichever process
    uniforms = torch.rand(len(problems), group_size, config.max_new_tokens, generator=generator)
    with run.log.timer("sample"):
        free_memory(config.device)  # for the KV cache
        prompts = [problem[data.IDS] for problem in ranks.share(problems)]
        options = {"temperature": temperature, "cache_gb": config.cache_gb, **run.endings}
        rollout = run.generate(model, prompts, ranks.share(uniforms), **options)
        if ranks.size > 1:
            everything = ranks.gather(rollout.to("cpu"))
            rollout = Rollout.cat(everything, run.endings["pad_id"]).to(config.device)
        free_memory(config.device)

    texts, answered, lengths = [], [], rollout.lengths.tolist()
    for i, ids in enumerate(rollout.completions.tolist()):
        texts.append(run.tokenizer.decode(ids[: lengths[i]], skip_special_tokens=True))
        problem = {**problems[i // group_size], "tokens": lengths[i]}
        problem.pop(data.IDS)
        answered.append(problem)
    with run.log.timer("score"):
        verdicts = run.reward.verify(ranks.share(texts), ranks.share(answered))
        verdicts = [verdict for share in ranks.gather(verdicts) for verdict in share]
        run.reward.note_shaping(verdicts)
    return rollout, list(map(Sample, texts, answered, verdicts))


def judge_groups(reward: rewards.Reward, samples: list[Sample], group_size: int):
    """Return (groups,) which groups have equal rewards, before shaping, and (groups, G) how right
    completions are, in [0, 1]. The second is None where no verifier tells right from wrong."""
    rewarded, correct = reward.without_shaping([sample.verdict for sample in samples])
    rewarded = torch.tensor(rewarded, dtype=torch.float64).view(-1, group_size)
    if correct is not None:
        correct = torch.tensor(correct, dtype=torch.float64).view(-1, group_size)
    return rewarded.amax(1) == rewarded.amin(1), correct


# ---- 3. and 6. advantages ------------------------------------------------------------------------


def compute_advantages(
    run: Run, batch: Batch, constants: "Constants | None" = None
) -> tuple[Tensor, Tensor | None]:
    """Return advantages (N,) or (N, T), and returns (N, T), the targets of a critic, else None.
    `reads` of gspo.ALGOS names a case."""
    algorithm, size = run.algorithm, run.config.group_size
    if algorithm.reads == "rewards":
        return algorithm.advantages(batch.rewards, size), None
    if algorithm.reads == "teacher":
        teacher, old = constants.teacher_logprobs, constants.old_logprobs
        return algorithm.advantages(batch.rewards, size, teacher, old, batch.mask), None

    token_rewards, step_ends = data.place_rewards(
        run.tokenizer, batch.rollout, batch.rewards, [each.verdict.steps for each in batch.samples]
    )
    if algorithm.reads == "steps":
        return algorithm.advantages(token_rewards, step_ends, size), None
    if algorithm.kl_in == "reward" and run.config.kl_coef > 0:  # k1 per token
        kl = constants.old_logprobs - constants.ref_logprobs
        token_rewards -= run.config.kl_coef * batch.mask * kl
    if algorithm.reads == "tokens":
        return algorithm.advantages(token_rewards, batch.mask), None
    if algorithm.reads == "values":
        # a truncated completion, whose reward should be 0 (docs/deviations.md, 12), is not over:
        # the value before its last token stands for the rest
        last = batch.rollout.latest_action[:, -1:]
        bootstrap = constants.values.gather(1, last)[:, 0] * batch.rollout.truncated
        return algorithm.advantages(token_rewards, constants.values, batch.mask, bootstrap)
    raise ValueError(f"reads={algorithm.reads!r}: compute_advantages has no such case")


def has_advantage(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (N,) which rows have a token of the loss with an advantage that is not 0."""
    return ((advantages.view(len(mask), -1) != 0) & mask).any(1)


def weigh(advantages: Tensor, batch: Batch, old_logprobs: Tensor, cap: float) -> Tensor:
    """Multiply advantages by min(pi_old / pi_sampler, cap) of each token: (N, T)."""
    sampled = batch.rollout.sampler_logprobs
    weights = gspo.truncated_importance_weights(old_logprobs, sampled, batch.mask, cap=cap)
    return advantages.view(len(weights), -1) * weights


# ---- 4. plan -------------------------------------------------------------------------------------


class Update(typing.NamedTuple):
    """One optimiser step. Its loss is a mean over its rows. Those of advantage 0 are not active:
    they have no gradient, get no forward pass, and only count in the mean."""

    rows: Tensor  # (n,) indices into the batch
    active_rows: Tensor  # those that need a forward pass
    parts: list[MicroBatch]  # those of this process


def plan(run: Run, batch: Batch, advantages: Tensor | None) -> list[Update]:
    """Divide rows, groups in random order, into updates, and active rows into micro-batches."""
    config, shares = run.config, run.models.share_prefixes
    # terms of the loss that have a gradient where the advantage is 0
    needs_all_rows = run.algorithm.needs_all_rows or config.kl_coef > 0 or config.entropy_coef > 0
    if advantages is None or needs_all_rows:
        is_active = batch.mask.any(1).cpu()
    else:
        is_active = has_advantage(advantages, batch.mask).cpu()
    groups = torch.arange(len(is_active)).view(-1, config.group_size)
    rng = random.Random(f"{config.seed} {batch.step}")
    order = rng.sample(range(len(groups)), len(groups))
    updates = []
    for rows in groups[order].flatten().split(config.completions_per_update):
        active_rows = rows[is_active[rows]]
        own_rows = run.ranks.share(active_rows)
        parts = rollouts.micro_batches(batch.rollout, own_rows, config.micro_batch_tokens, shares)
        updates.append(Update(rows, active_rows, parts))
    return updates


# ---- 5. constants --------------------------------------------------------------------------------


class Constants(typing.NamedTuple):
    """(N, T) each, no gradient, 0 in rows that are not active. None without the model."""

    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    values: Tensor | None  # of the critic

    def select(self, rows: Tensor) -> "Constants":
        return Constants(*[None if column is None else column[rows] for column in self])


@torch.no_grad()
def compute_constants(run: Run, batch: Batch, updates: list[Update]) -> Constants:
    """Compute the log-probs of pi_old, pi_ref and a teacher, and the values of a critic. Before the
    first update the policy is pi_old: it scores, not the sampling model, in the micro-batches of
    the updates. So the first ratio is exactly 1, except with --old-logprobs sampler."""
    models = run.models
    scorers = (models.policy, models.ref_policy, models.teacher, models.critic)  # as in Constants
    zeros = torch.zeros_like(batch.rollout.sampler_logprobs)
    constants = Constants(*[zeros.clone() if scorer else None for scorer in scorers])
    with run.log.timer("constants"):
        if models.policy.routing:
            models.policy.routing.forget()
        for part in itertools.chain.from_iterable(update.parts for update in updates):
            if run.config.old_logprobs == "sampler":
                constants.old_logprobs[part.rows] = part.rollout.sampler_logprobs
            else:
                constants.old_logprobs[part.rows], _ = models.policy.logprobs(part, "none")
            if models.ref_policy:
                constants.ref_logprobs[part.rows], _ = models.ref_policy.logprobs(part, "none")
            if models.teacher:
                constants.teacher_logprobs[part.rows], _ = models.teacher.logprobs(part, "none")
            if models.critic:
                constants.values[part.rows] = models.critic.values(part)
        run.ranks.sum(*[each for each in constants if each is not None])  # others' rows are 0
    return constants


# ---- 7. improve ----------------------------------------------------------------------------------


class Improvement(typing.NamedTuple):
    """The result of the updates of a step, for `measure` alone."""

    metrics: list[dict[str, float]]  # of each update with active rows
    last_logprobs: Tensor  # (N, T) from the pass of a row's last update, before its optimiser step
    first_logprobs: Tensor  # (N, T) of the first update: old_logprobs, if the trainer computes them
    bad_updates: int  # skipped, because they were not finite


def improve(
    run: Run, batch: Batch, updates: list[Update], constants: Constants, advantages, returns
) -> Improvement:
    """Make the updates of a step, --epochs times in the same order."""
    config, progress, step = run.config, run.progress, batch.step
    last_logprobs, first_logprobs = torch.zeros_like(constants.old_logprobs), None
    all_metrics, bad_updates = [], 0
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lr_factor(config, step)
    with run.log.timer("improve"):
        for update in updates * config.epochs:
            metrics, logprobs = accumulate_gradients(
                run, batch, update, constants, advantages, returns
            )
            last_logprobs[update.active_rows] = logprobs[update.active_rows]
            if first_logprobs is None:
                first_logprobs = logprobs
            decisive = [name for name in metrics if name in DECISIVE or name.endswith("grad_norm")]
            wrong = ", ".join(name for name in decisive if not math.isfinite(metrics[name]))
            if wrong:
                bad_updates += 1
                progress.bad_in_a_row += 1
                too_many = f"{progress.bad_in_a_row} updates in a row were not finite, in {wrong}"
                need(progress.bad_in_a_row <= MAX_BAD_UPDATES, f"step {step}: {too_many}")
                run.log.warn("bad", f"step {step}: an update is skipped, not finite: {wrong}")
                continue
            # without active rows AdamW moves by its momentum, and there are no metrics
            run.optimizer.step()
            if len(update.active_rows) > 0:
                progress.bad_in_a_row = 0
                all_metrics.append(metrics)
        run.optimizer.zero_grad()  # sampling needs their memory
        run.ranks.sum(last_logprobs, first_logprobs)  # rows of other processes are 0
    return Improvement(all_metrics, last_logprobs, first_logprobs, bad_updates)


def lr_factor(config: Config, step: int) -> float:
    """Return the factor of the learning rate: warm-up, then --lr-schedule down to 0."""
    warm_up = min(1.0, step / max(config.warmup_steps, 1))
    left = 1 - (step - 1) / config.steps
    cosine = (1 - math.cos(math.pi * left)) / 2
    return warm_up * {"constant": 1.0, "linear": left, "cosine": cosine}[config.lr_schedule]


def accumulate_gradients(
    run: Run, batch: Batch, update: Update, constants: Constants, advantages, returns
) -> tuple[dict[str, float], Tensor]:
    """Sum the gradient of one update over micro-batches and processes. Return its metrics, and the
    log-probs (N, T) of the rows of this process; 0 elsewhere."""
    config, algorithm, models = run.config, run.algorithm, run.models
    # the loss is a mean over tokens or over completions. Rows that are not active add 0 to it, and
    # count. Metrics leave them out: of 64 rows, 40 active, loss = sum / 64, metric = sum / 40
    counted = batch.mask if algorithm.unit == "token" else batch.mask.any(1)
    denom = counted[update.rows].sum()
    metric_scale = denom / counted[update.active_rows].sum()
    all_logprobs = torch.zeros_like(constants.old_logprobs)
    totals = collections.Counter()
    wanted = "gradient" if config.entropy_coef > 0 else "value"
    run.optimizer.zero_grad()
    for part in update.parts:
        rows, values, returns_of_rows = part.rows, None, None
        logprobs, entropy = models.policy.logprobs(part, entropy=wanted)
        if models.critic:
            values, returns_of_rows = models.critic.values(part), returns[rows]
        loss, metrics = total_loss(
            algorithm,
            config,
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            constants=constants.select(rows),
            advantages=advantages[rows],
            returns=returns_of_rows,
            mask=batch.mask[rows],
            denom=denom,
        )
        loss.backward()
        all_logprobs[rows] = logprobs.detach()
        totals["loss"] += float(loss.detach())
        for name, value in metrics.items():
            totals[name] += float(value * metric_scale)
    totals = run.ranks.sum_numbers(totals)
    norms = sum_and_clip_gradients(run)
    return totals | norms, all_logprobs


def total_loss(
    algorithm, config, logprobs, entropy, values, constants, advantages, returns, mask, denom
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of n rows, the sum of all its terms, and their metrics.

    logprobs, entropy (n, T) are of the policy, values (n, T) of a critic, and these have a
    gradient. constants, advantages (n,) or (n, T), returns and mask (n, T) are those of the rows,
    denom is that of the update. Without a critic values and returns are None. The rows are active
    ones of an update, no whole groups. A term with a gradient at advantage 0 needs all: `plan`."""
    unit = algorithm.unit
    loss, metrics = algorithm.loss(logprobs, constants.old_logprobs, advantages, mask, denom)
    mean_entropy = gspo.masked_mean(entropy, mask, unit, denom)
    loss = loss - config.entropy_coef * mean_entropy
    metrics["entropy"] = mean_entropy.detach()
    if constants.ref_logprobs is not None:
        kl, of_kl = gspo.kl_penalty(logprobs, constants.ref_logprobs, mask, denom, per=unit)
        if algorithm.kl_in == "loss":  # else it is part of the reward, and here a metric
            loss = loss + config.kl_coef * kl
        metrics |= of_kl
    if values is not None:
        critic_loss, of_critic = algorithm.value_loss(
            values, constants.values, returns, mask, denom, per=unit
        )
        loss = loss + critic_loss
        metrics |= of_critic
    return loss, metrics


def sum_and_clip_gradients(run: Run) -> dict[str, float]:
    """Sum gradients over processes and clip them. Return the metrics of their norms before."""
    norms = {}
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:  # no active row here, or an unread head of a critic
                parameter.grad = torch.zeros_like(parameter)
        run.ranks.sum(*[parameter.grad for parameter in group["params"]])
        norm = torch.nn.utils.clip_grad_norm_(group["params"], run.config.max_grad_norm)
        norms[group["norm_metric"]] = float(norm)
    return norms


# ---- 8. report -----------------------------------------------------------------------------------


def report_step(
    run: Run, output: Output, batch: Batch, advantages, row: dict, shown: list, stopping: bool
) -> None:
    """Evaluate, warn, write the console line, the row of metrics.jsonl and rows `shown` of
    samples.jsonl, and save. The tracker and the page may fail without ending the run."""
    config, step, folder = run.config, batch.step, output.folder
    last, answers = step == config.steps, []
    evaluates = last or (config.eval_every > 0 and step % config.eval_every == 0)
    if evaluates:
        accuracy, answers = evaluate(run, pass_k=config.eval_samples if last else 0)
        row |= accuracy
        if routing := run.models.policy.routing:
            row |= routing.measure_flips(run.models.policy, run.ranks)

    taught = bool(has_advantage(advantages, batch.mask).any())
    run.progress.quiet_steps = 0 if taught else run.progress.quiet_steps + 1
    for kind, sentence in warnings_of(run, batch, row).items():
        run.log.warn(kind, sentence)
    if run.turns and run.turns.fault:
        run.log.warn("tool", f"the tool failed and gave no reply: {run.turns.fault}")

    if run.ranks.first:
        say(console.step_line(row, config.steps, (config.steps - step) * row["seconds_step"]))
        data.append_rows(folder / "metrics.jsonl", [row])
        data.append_rows(folder / "samples.jsonl", shown)
        data.append_rows(folder / "evaluations.jsonl", answers)

    if last or stopping or (config.save_every and step % config.save_every == 0):
        run.progress.shaping = sorted(run.reward.shaping)
        checkpoints.save(folder, run)

    if output.tracker:
        with run.log.trying("--track"):
            output.tracker(row)
    if run.ranks.first and (evaluates or stopping):
        with run.log.trying("report.html"):
            report.write_report([folder], folder / "report.html")


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(run: Run, pass_k: int) -> tuple[dict, list[dict]]:
    """Return held-out accuracy and some answers. Accuracy is greedy, and the fraction of prompts
    that one of k samples solves, or the greedy reward where no verifier tells right from wrong."""
    policy, model, held_out = run.models.policy.module, run.models.sampling_model, run.held_out
    if run.config.stale_steps > 1:  # the copy must stay stale
        model = policy
    elif model is not policy:  # a copy, for bfloat16 or LoRA: the next snapshot would do this
        refresh(model, policy)
    if pass_k:
        say(f"evaluating {len(held_out)} prompts, greedy and {pass_k} samples each")
    _, greedy = sample_and_verify(run, model, held_out, 1, 0.0, "eval")
    faults = [sample.verdict.fault for sample in greedy]
    begun = run.progress.step > 0
    need(begun or not all(faults), f"--reward: it failed on every completion: {faults[0]}")
    _, correct = judge_groups(run.reward, greedy, 1)
    answers = [readable(sample, run.progress.step) for sample in greedy[:SHOWN_PROMPTS]]
    for i, answer in enumerate(answers):
        answer["correct"] = None if correct is None else float(correct[i, 0])
    asked, said = printable(answers[0]["prompt"][-200:]), printable(answers[0]["completion"][-200:])
    say(f"held out: '{asked}' -> '{said}' has reward {answers[0]['reward']:g}")
    if correct is None:
        earned = statistics.fmean(sample.verdict.reward for sample in greedy)
        return {"eval_reward": earned}, answers
    metrics = {"eval_solved": float(correct.mean())}
    if lenient := run.reward.lenient_twin():
        # the same completions: a rise of eval_solved alone is format
        texts = [sample.text for sample in greedy]
        problems = [sample.problem for sample in greedy]
        _, right = lenient.without_shaping(lenient.verify(texts, problems))
        metrics["eval_solved_lenient"] = statistics.fmean(right)
    if pass_k:
        _, several = sample_and_verify(run, model, held_out, pass_k, run.config.temperature, "eval")
        _, correct = judge_groups(run.reward, several, pass_k)
        if correct is not None:
            metrics[f"eval_pass@{pass_k}"] = float(correct.amax(1).mean())
    return metrics, answers


# ---- start ---------------------------------------------------------------------------------------


def start(config: Config, ranks: Ranks) -> Run:
    """Return a run that can begin. Mistakes in the input are found before weights load."""
    if config.device == "cpu" and torch.version.cuda and not torch.cuda.is_available():
        say(f"--device cpu: torch is built for CUDA {torch.version.cuda}, but finds no GPU")
    torch.manual_seed(config.seed)  # for a forker's random weights: equal in all processes
    algorithm = flags.with_numbers(gspo.ALGOS[config.algo], config)
    reward = rewards.parse_reward(config.reward, config.device)
    reward.reads_steps = algorithm.reads in ("steps", "tokens", "values")
    rows, held_out = data.read_data(config, reward) if config.data else problems_of(config, reward)
    generate, turns = rollouts.generate, None
    if config.sampler:
        from support.extras.samplers import checked

        with expecting(f"--sampler {config.sampler}: expected file.py:function"):
            generate = checked(function_of(config.sampler))
    if config.tool:
        from support.extras.tools import Turns, parse_tool

        tool = parse_tool(config.tool)  # its Turns need the tokenizer, below
    saved, progress = checkpoints.newest(config)
    reward.shaping.update(progress.shaping)

    # tokens
    source, tokenizer, model_config = find_model(config, ranks)
    stops = data.StopTexts(tokenizer, config.stop) if config.stop else None
    if config.tool:
        generate = turns = Turns(generate, tool, tokenizer)
    vocabulary = model_config.get_text_config().vocab_size
    form = data.PromptFormat(tokenizer, config, vocabulary, context_of(model_config))
    held_out = form.encode_rows(list(itertools.islice(held_out, config.eval_prompts)), "held out")
    problems = form.training_problems(config, rows)
    problems = itertools.islice(problems, progress.prompts_drawn, None)
    fewest = min(len(held_out), config.prompts_per_step)
    need(ranks.size <= fewest, f"{ranks.size} processes: at most one for each of {fewest} prompts")
    say(f"first held-out prompt: '{printable(tokenizer.decode(held_out[0][data.IDS]))}'")

    # weights. Those of a checkpoint have the adapters merged: these need the ones before training
    weights = source if config.lora_rank or not saved else str(saved)
    policy = load_model(weights, config.device)
    endings = {**end_and_pad_ids(policy, tokenizer), "stops": stops}
    models = make_models(config, algorithm, policy, endings["pad_id"], held_out[0][data.IDS])
    optimizer = make_optimizer(config, models)
    if saved:
        checkpoints.restore(saved, config, models, optimizer)
    trained, every = policy.num_parameters(only_trainable=True), policy.num_parameters()
    size = f"{trained / 1e6:.1f} of {every / 1e6:.1f} M parameters are trained"
    size += ", scored with shared prefixes" if models.share_prefixes else ", scored a text a row"
    say(f"{config.algo}, {size}, {config.device} {config.dtype}, --reward {config.reward}")
    return Run(
        config=config,
        algorithm=algorithm,
        ranks=ranks,
        tokenizer=tokenizer,
        reward=reward,
        problems=problems,
        held_out=held_out,
        generate=generate,
        endings=endings,
        turns=turns,
        models=models,
        optimizer=optimizer,
        progress=progress,
        log=console.Log(config.device, progress.seconds),
    )


def make_models(
    config: Config, algorithm: gspo.Algorithm, policy, pad_id: int, ids: list[int]
) -> Models:
    """Check the scorer on the ids of a prompt, and make all models beside the policy."""
    prompt = ids[-63:]
    longer = [*prompt, prompt[-1]]  # of another length: errors of padding show
    share_prefixes = rollouts.check_scorer(policy, [prompt, longer], pad_id)
    if config.device == "cuda" and config.dtype == "bfloat16":
        # the float32 head would take most of the time. TF32 moves log s by 5e-5, a bf16 body by
        # 2.5e-3 (on a CPU, random weights, docs/metrics.md). The check has compared in float32
        torch.set_float32_matmul_precision("high")

    sampling_model, ref_policy, teacher, critic, routing = policy, None, None, None, None
    dtype = getattr(torch, config.dtype)
    scoring = (config.temperature, dtype == torch.bfloat16)
    # 1. copies without adapters. In float32, unless adapted or stale, the policy samples itself
    if dtype != torch.float32 or config.stale_steps > 1 or config.lora_rank:
        sampling_model = frozen_copy(policy, dtype)
    if config.kl_coef:
        ref_policy = Scorer(frozen_copy(policy, dtype), *scoring)
    if config.teacher:
        loaded = load_model(config.teacher, config.device, dtype, "--teacher")
        teacher = Scorer(loaded, *scoring)
        share_prefixes = share_prefixes and rollouts.shares_prefixes(teacher.module)
    rerun_context = contextlib.nullcontext  # of layers that run again in the backward pass
    if has_experts(policy.config) and config.old_logprobs == "trainer":
        from support.extras.experts import Experts, routing_now

        routing = Experts(config.routing_replay)
        rerun_context = routing_now
    # 2. adapters
    if config.lora_rank:
        from support.extras.lora import add_adapters

        add_adapters(policy, config, dtype)
    # 3. checkpointing of layers, adapters among them
    if config.gradient_checkpointing:
        from support.extras.checkpointing import checkpoint_layers

        checkpoint_layers(policy, rerun_context)
    # 4. a critic: a copy that has both
    if algorithm.value_loss:
        critic = Scorer(critic_of(policy), *scoring)
    scorer = Scorer(policy, *scoring, routing)
    return Models(scorer, sampling_model, ref_policy, teacher, critic, share_prefixes)


def make_optimizer(config: Config, models: Models) -> torch.optim.Optimizer:
    """Return the optimiser of the policy, and of a critic."""
    trained = [(models.policy, config.lr, "grad_norm")]
    if models.critic:
        trained.append((models.critic, config.critic_lr, "critic_grad_norm"))
    groups = []
    for scorer, lr, norm_metric in trained:
        parameters = [each for each in scorer.module.parameters() if each.requires_grad]
        rates = {"lr": lr, "initial_lr": lr}
        groups.append({"params": parameters, **rates, "norm_metric": norm_metric})
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


# ---- main ----------------------------------------------------------------------------------------


def parse_flags(arguments: list[str]) -> Config:
    """Return the flags of a run, checked, with their defaults. UserError for wrong ones."""
    config = parse(Config, __doc__, arguments, elsewhere=flags.ELSEWHERE)
    if config.resume:
        config = flags.with_saved(config, __doc__, arguments)
    flags.resolve(config, NUMBER_DEFAULTS)
    return config


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()  # it would break our lines
    config, ranks = None, Ranks()
    try:
        if arguments[:1] == ["--report"]:
            return report.main(arguments[1:])
        config = parse_flags(arguments)
        with joined_ranks(config.device) as ranks:
            if config.model in BUILT_IN:  # more threads only wait for each other at this size
                torch.set_num_threads(min(2, torch.get_num_threads()))
            run = start(config, ranks)
            progress, answers = run.progress, []
            if progress.step == 0:  # else it is in the checkpoint
                progress.before, answers = evaluate(run, pass_k=config.eval_samples)
            say(f"{len(run.held_out)} prompts held out, before step 1: {percent(progress.before)}")
            # a run that has failed by now has written nothing
            train(run, open_output(config, ranks, progress, answers))
        return 0
    except BaseException as error:
        return fail(error, ranks, config)


if __name__ == "__main__":
    sys.exit(main())
