"""Train a language model with GSPO, or another algorithm in gspo.ALGOS, on rewards from a verifier.

    python train.py --algo gspo                          # tiny built-in policy, nothing downloaded
    python train.py --algo gspo --model Qwen/Qwen3-0.6B --data train.jsonl --reward math

Start with `train`, the whole algorithm in six phases. Its helpers follow, then the start-up code.

docs/deviations.md says where this differs from the papers."""

import os

# idle OpenMP workers busy-wait, which on a shared machine can take ten times the CPU time of the
# work: let them sleep sooner. Must be set before torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# the KV cache and the optimizer take turns using the same memory: avoid fragmentation
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import random
import sys
import typing

import torch
import transformers
from torch import Tensor

import gspo
import rewards as verifiers
from rollout import (
    MicroBatch,
    Rollout,
    check_scorer,
    completion_logprobs,
    completion_values,
    generate,
    micro_batches,
)
from support import console, data, health, report, resolve_flags, run_folder
from support import metrics as measure
from support.command_line import flag, number
from support.console import percent, say
from support.data import printable
from support.errors import UserError, need
from support.loss_flags import bind
from support.models import (
    Models,
    context_of,
    end_and_pad_ids,
    find_model,
    free_memory,
    load_model,
    lr_factor,
    make_optimizer,
    refresh,
)
from support.prefix_trees import shares_prefixes
from support.pretrain import BUILT_IN
from support.ranks import Ranks, joined_ranks
from support.reward_placement import place_rewards
from support.run_folder import Output, open_output
from support.shutdown import StopSignal, fail, farewell
from support.stop_texts import StopTexts
from support.tasks import TASKS, problems_of

MAX_REFILLS = 4  # extra rollouts per step, for dynamic sampling
DECISIVE = ("loss", "ratio_mean")  # skip an update if one of these or a norm isn't finite
MAX_BAD_UPDATES = 5  # skipped in a row; one more ends the run
SCHEDULES = ("constant", "linear", "cosine")
TRACKERS = ("tensorboard", "wandb", "trackio")
DTYPES = ("float32", "bfloat16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass
class Config:
    """The flags. None means off, or a default that depends on the model, task or algorithm."""

    algo: str = flag("gspo", "algorithm", heading="what to run", choices=tuple(gspo.ALGOS))
    model: str = flag("tiny", "built-in policy (tiny, tiny-moe), folder, or Hugging Face hub name")
    task: str = flag("arithmetic", "built-in task", choices=tuple(TASKS))
    data: str | None = flag(None, "JSONL file of training rows with prompt and answer")
    eval_data: str | None = flag(None, "JSONL file, default: a tenth of --data", needs="data")
    reward: str | None = flag(None, "'math+0.1*format', file.py:function; default: task's or math")
    teacher: str | None = flag(None, "opd: teacher model, a folder or hub name")
    tool: str | None = flag(None, "calculator, or file.py:function@TRIGGER_TEXT")
    sampler: str | None = flag(None, "vllm, or file.py:function like rollout.generate")
    steps: int = flag(50, "number of rollout steps", low=1)
    seed: int = flag(0, "random seed for problems, samples, shuffles and adapters", low=0)

    system: str | None = flag(None, "system message for the chat template", heading="prompts")
    chat_template_args: str = flag("{}", 'JSON for the chat template: {"enable_thinking": false}')
    prompt_template: str = flag("{prompt}", "text around {prompt}; \\n is a line break")

    prompts_per_step: int = flag(32, "prompts P per step", heading="rollout", low=1, high=10**6)
    group_size: int = flag(8, "completions G per prompt", low=2, high=10**6)
    max_new_tokens: int | None = flag(None, "tokens per completion, default: task's or 1024", low=1)
    stop: list[str] | None = flag(None, "text that ends a completion; may be repeated")
    temperature: float = flag(1.0, "sampling temperature, also used for scoring", above=0)
    cache_gb: float | None = flag(None, "GB for KV cache, default: free VRAM or half RAM", above=0)
    old_logprobs: str = flag("trainer", "source of old_logprobs", choices=("trainer", "sampler"))
    stale_steps: int = flag(1, "steps between sampler weight updates; see --tis-cap", low=1)
    tis_cap: float | None = flag(None, "cap on the weights pi_old / pi_sampler", above=0)

    entropy_coef: float = flag(0.0, "entropy bonus coefficient", heading="objective", low=0)
    kl_coef: float | None = flag(None, "KL penalty coefficient, default: grpo 0.04, else 0", low=0)
    ref_every: int = flag(0, "steps between reference updates, 0: never", low=0, needs="kl_coef")
    dynamic_sampling: bool | None = flag(None, "replace dead groups, default: only with dapo")
    overlong_cache: int | None = flag(None, "penalty ramp before the limit, in tokens", low=0)
    overlong_filter: bool = flag(False, "leave truncated completions out of the loss")
    routing_replay: bool = flag(False, "train with the experts that pi_old chose")
    clip_low: float | None = number("width of the clip range, downward", low=0)
    clip_high: float | None = number("width of the clip range, upward", low=0)
    dual_clip: float | None = number("upper bound on the ratio where A < 0", above=1)
    ratio_max: float | None = number("upper bound on a token's weight", above=0)
    tau_pos: float | None = number("steepness of the gate where A > 0", above=0)
    tau_neg: float | None = number("steepness of the gate where A < 0", above=0)
    advantage_scale: str | None = number("divisor of advantages", choices=gspo.ADVANTAGE_SCALES)
    gamma: float | None = number("discount factor per token", above=0, high=1)
    gae_lambda: float | None = number("lambda of GAE", low=0, high=1)
    value_clip: float | None = number("clip range of the critic's values", above=0)
    reward_coef: float | None = number("weight of the reward, 1 if --reward is given", low=0)

    epochs: int = flag(1, "passes over each rollout", heading="optimizer", low=1)
    completions_per_update: int | None = flag(None, "default: a quarter of a rollout", low=1)
    lr: float | None = flag(None, "default: 2e-4 built-in, else 1e-5; LoRA: ten times", above=0)
    lr_schedule: str = flag("constant", "learning-rate schedule over all steps", choices=SCHEDULES)
    critic_lr: float | None = flag(None, "ppo: lr of the critic, default: 10 x lr", above=0)
    warmup_steps: int | None = flag(None, "linear lr warmup, default: 0 built-in, else 3", low=0)
    max_grad_norm: float = flag(1.0, "maximum gradient norm", above=0)
    micro_batch_tokens: int = flag(16384, "tokens per forward and backward pass", low=1)
    gradient_checkpointing: bool = flag(False, "recompute activations: less memory, slower")
    lora_rank: int = flag(0, "rank of LoRA adapters, 0: train all weights", low=0)
    lora_alpha: float | None = flag(None, "default: 2 x rank", above=0, needs="lora_rank")

    eval_every: int = flag(10, "in steps, 0: only before and after", heading="evaluation", low=0)
    eval_prompts: int = flag(256, "held-out prompts, answered greedily", low=1)
    eval_samples: int = flag(8, "k of pass@k, before and after training; 0: none", low=0)

    name: str | None = flag(None, "run name, default: algorithm and number", heading="run")
    runs: str = flag("runs", "folder for all runs")
    resume: bool = flag(False, "continue --name from its newest checkpoint, with its flags")
    save_every: int = flag(10, "steps between checkpoints, 0: only after the last", low=0)
    track: str | None = flag(None, "also send metrics to this tracker", choices=TRACKERS)
    device: str = flag(DEVICE, "device for all models", choices=("cuda", "cpu", "mps"))
    dtype: str | None = flag(None, "default: bfloat16 on CUDA if the clip is wide", choices=DTYPES)


class Batch(typing.NamedTuple):
    """What a step trains on: N <= P * G completions, each prompt's G completions contiguous."""

    rollout: Rollout
    verdicts: list[verifiers.Verdict]  # N
    rewards: Tensor  # (N,) with overlong shaping; NaN without a verdict
    mask: Tensor  # (N, T) the tokens that enter the loss


# ---- the algorithm -------------------------------------------------------------------------------


def train(run: "Run", output: Output) -> None:
    """The training loop. Tensors have N rows, one per completion, and T columns, one per token."""
    config, algorithm, models, ranks = run.config, run.algorithm, run.models, run.ranks
    policy, optimizer, progress, log = models.policy, run.optimizer, run.progress, run.log
    entropy_mode = "gradient" if config.entropy_coef > 0 else "value"
    # KL, entropy and perhaps your own terms have a gradient even where the advantage is 0
    skip_dead_groups = algorithm.skip_dead_groups and not (config.kl_coef or config.entropy_coef)
    stop = StopSignal()
    for step in range(progress.step + 1, config.steps + 1):
        log.start_step()

        # 1. Snapshot: copy the policy's weights every --stale-steps steps to the sampler, unless it
        #    is the policy itself, and every --ref-every steps to the reference.
        if models.sampling_model is not policy and (step - 1) % config.stale_steps == 0:
            refresh(models.sampling_model, policy)
        if config.ref_every and step > 1 and (step - 1) % config.ref_every == 0:
            refresh(models.ref_policy, policy)

        # 2. Sample G completions per prompt and reward them.
        batch, row = draw_groups(run, step)
        rollout, mask = batch.rollout, batch.mask
        token_rewards, step_ends = place_rewards(
            run.decode, rollout, batch.rewards, [verdict.steps for verdict in batch.verdicts]
        )

        # 3. Score the active rows without gradients (40 of 64, say, if 3 of 8 groups are dead):
        #    log-probs under pi_old (the policy before its updates), the reference and a teacher,
        #    and a critic's values. The updates reuse these micro-batches: the same shapes give the
        #    same bits, so the trainer's ratios in the first update are exactly 1.
        active = mask.any(1)
        if skip_dead_groups:  # all rewards equal, shaping included; the metric `dead` ignores it
            dead = gspo.dead_groups(token_rewards, step_ends, config.group_size)
            active = active & ~dead.repeat_interleave(config.group_size)
        updates = plan_updates(run, rollout, active.cpu(), step)
        old_logprobs, ref_logprobs, teacher_logprobs, values = score(
            run, rollout, [part for _, _, parts in updates for part in parts]
        )
        log.lap("score")

        # 4. Advantages, computed from the inputs that the algorithm reads.
        if algorithm.kl_in == "reward" and config.kl_coef > 0:  # k1 per token
            token_rewards -= config.kl_coef * mask * (old_logprobs - ref_logprobs)
        bootstrap = None
        if models.critic:  # truncation is not termination: bootstrap from the last value
            last_action = rollout.latest_action[:, -1:]
            bootstrap = values.gather(1, last_action)[:, 0] * rollout.truncated
        inputs = {
            "rewards": batch.rewards,
            "group_size": config.group_size,
            "token_rewards": token_rewards,
            "step_ends": step_ends,
            "mask": mask,
            "old_logprobs": old_logprobs,
            "sampler_logprobs": rollout.sampler_logprobs,
            "ref_logprobs": ref_logprobs,
            "teacher_logprobs": teacher_logprobs,
            "values": values,
            "bootstrap": bootstrap,
        }
        result = algorithm.advantages(**{name: inputs[name] for name in algorithm.reads})
        advantages, returns = result if models.critic else (result, None)
        taught = (advantages.view(len(mask), -1) != 0) & mask
        assert not taught[~active].any(), "a dead group has an advantage: drop skip_dead_groups"
        if config.tis_cap:  # truncated importance sampling: the sampler is not exactly pi_old
            weights = gspo.truncated_importance_weights(
                old_logprobs, rollout.sampler_logprobs, mask, cap=config.tis_cap
            )
            advantages = advantages.view(len(mask), -1) * weights

        # 5. Updates: one optimizer step each, on gradients accumulated over micro-batches.
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor(config, step)
        counted = mask if algorithm.per == "token" else mask.any(1)  # what the loss averages over
        new_logprobs = torch.zeros_like(old_logprobs)  # from each row's latest forward pass
        # from the first update with active rows; earlier ones only move the policy by momentum
        first_logprobs, first_rows = torch.zeros_like(old_logprobs), []
        update_metrics, bad_updates = [], 0
        for rows, active_rows, parts in updates * config.epochs:
            # with 40 of 64 rows active, say, the loss is divided by 64, but the metrics by 40
            denom = counted[rows].sum()
            metric_scale = denom / counted[active_rows].sum()
            totals = collections.Counter()
            optimizer.zero_grad()
            for part in parts:
                at = part.rows  # where the micro-batch is in the batch
                logprobs, entropy = logprobs_of(run, policy, part, entropy_mode)
                others = {name: inputs[name][at] for name in algorithm.loss_reads}
                loss, metrics = algorithm.loss(
                    logprobs, old_logprobs[at], advantages[at], mask[at], denom, **others
                )
                mean_entropy = gspo.masked_mean(entropy, mask[at], algorithm.per, denom)
                loss = loss - config.entropy_coef * mean_entropy
                metrics["entropy"] = mean_entropy.detach()
                if models.ref_policy:
                    kl, kl_metrics = gspo.kl_penalty(
                        logprobs, ref_logprobs[at], mask[at], denom, algorithm.per
                    )
                    metrics |= kl_metrics
                    if algorithm.kl_in == "loss":
                        loss = loss + config.kl_coef * kl
                if models.critic:
                    new_values = critic_values(run, part)
                    critic_loss, critic_metrics = algorithm.value_loss(
                        new_values, values[at], returns[at], mask[at], denom
                    )
                    loss = loss + critic_loss
                    metrics |= critic_metrics
                loss.backward()
                new_logprobs[at] = logprobs.detach()
                totals["loss"] += float(loss.detach())
                for name, value in metrics.items():
                    totals[name] += float(value * metric_scale)
            if len(first_rows) == 0:
                first_logprobs, first_rows = new_logprobs.clone(), active_rows

            totals = ranks.sum_numbers(totals)
            for group in optimizer.param_groups:
                ranks.sum_gradients(group["params"])
                norm = torch.nn.utils.clip_grad_norm_(group["params"], config.max_grad_norm)
                totals[group["norm_metric"]] = float(norm)
            if not is_finite(run, step, totals):
                bad_updates += 1
                continue
            optimizer.step()  # even without active rows: AdamW's momentum still moves weights
            if len(active_rows) > 0:
                update_metrics.append(totals)
        optimizer.zero_grad()  # sampling needs the memory
        ranks.sum(new_logprobs, first_logprobs)  # other processes' rows are 0
        log.lap("update")

        # 6. Report: metrics, evaluation, checkpoint.
        tensors = inputs | {
            "advantages": advantages,
            "returns": returns,
            "new_logprobs": new_logprobs,
            "first_logprobs": first_logprobs,
        }
        row |= measure.step_metrics(run, batch, tensors, active, first_rows, update_metrics)
        row |= {"bad_updates": bad_updates, "lr": optimizer.param_groups[0]["lr"]}
        row |= log.end_step(tokens=int(rollout.completion_mask.sum()))
        progress.step, progress.seconds = step, log.elapsed()
        progress.quiet_steps = 0 if taught.any() else progress.quiet_steps + 1
        _, last_rows, _ = updates[-1]
        shown = measure.readable_samples(run, batch, tensors, last_rows)
        stopping = any(ranks.gather(stop.asked))
        row = report_step(run, output, row, shown, stopping)
        if stopping and step < config.steps:
            raise KeyboardInterrupt  # `main` prints "stopped" and returns exit status 130
    farewell(config, output.folder, progress, row, run.held_out[0]["prompt"])


# ---- sampling and rewards ------------------------------------------------------------------------


def draw_groups(run: "Run", step: int) -> tuple[Batch, dict]:
    """Sample and verify the groups of a step. Dynamic sampling drops groups whose rewards are all
    equal and draws more prompts, up to MAX_REFILLS times.

    Returns the batch, and metrics over every group drawn, dropped ones included."""
    config, size, count = run.config, run.config.group_size, run.config.prompts_per_step
    all_rollouts, verdicts = [], []
    for refill in range(1 + MAX_REFILLS):
        problems = list(itertools.islice(run.problems, count))
        run.progress.prompts_drawn += len(problems)
        model, seed = run.models.sampling_model, f"{step} {refill}"
        rollout, more = sample_and_verify(run, model, problems, size, config.temperature, seed)
        all_rollouts.append(rollout)
        verdicts += more
        dead, correct = judge_groups(run.reward, verdicts, size)
        if not config.dynamic_sampling or int((~dead).sum()) >= count:
            break
    row = {"step": step} | measure.group_metrics(dead, correct, verdicts)
    run.log.warn(health.fault_warnings(verdicts))

    groups = torch.arange(len(verdicts)).view(-1, size)
    kept = groups[~dead][:count] if config.dynamic_sampling else groups
    rows = kept.flatten() if len(kept) > 0 else groups[0]  # none left: a fully masked group
    rollout = Rollout.cat(all_rollouts, run.endings["pad_id"]).select(rows)
    verdicts = [verdicts[i] for i in rows]
    rewards = torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float64)
    rewards += gspo.soft_overlong_penalty(
        rollout.lengths.cpu(), config.max_new_tokens, config.overlong_cache
    )
    rewards = rewards.float().to(config.device)
    # no verdict, no gradient: the policy could learn to aim for whatever number we made up
    mask = rollout.completion_mask & ~rewards.isnan()[:, None] & (len(kept) > 0)
    if config.overlong_filter:
        mask = mask & ~rollout.truncated[:, None]
    return Batch(rollout, verdicts, rewards, mask), row


def sample_and_verify(
    run: "Run", model, problems: list[dict], group_size: int, temperature: float, seed: str
) -> tuple[Rollout, list[verifiers.Verdict]]:
    """Sample group_size completions for each problem and verify them. The same seed gives the same
    samples. Processes split the work, and each one gets all the results."""
    config, ranks = run.config, run.ranks
    number = random.Random(f"{config.seed} {seed}").getrandbits(60)
    generator = torch.Generator().manual_seed(number)
    # drawn for all prompts before splitting them, so the number of processes does not matter
    uniforms = torch.rand(len(problems), group_size, config.max_new_tokens, generator=generator)
    prompts = [problem[data.IDS] for problem in ranks.share(problems)]
    options = {"temperature": temperature, "cache_gb": config.cache_gb, **run.endings}
    free_memory(config.device)  # for the KV cache
    rollout = run.generate(model, prompts, ranks.share(uniforms), **options)
    if ranks.size > 1:
        everything = ranks.gather(rollout.to("cpu"))
        rollout = Rollout.cat(everything, run.endings["pad_id"]).to(config.device)
    free_memory(config.device)
    run.log.lap("sample")

    texts, rows, lengths = [], [], rollout.lengths.tolist()
    for i, ids in enumerate(rollout.completions.tolist()):
        texts.append(run.decode(ids[: lengths[i]]))
        row = {**problems[i // group_size], "tokens": lengths[i]}
        row.pop(data.IDS)
        rows.append(row)
    verdicts = run.reward.verify(ranks.share(texts), ranks.share(rows))
    verdicts = [verdict for share in ranks.gather(verdicts) for verdict in share]
    if run.turns:
        verdicts = run.turns.abstain(verdicts, ranks)
    run.log.lap("verify")
    return rollout, verdicts


def judge_groups(reward: verifiers.Reward, verdicts: list, group_size: int):
    """Return which groups (groups,) have equal rewards, ignoring shaping, and the correctness
    (groups, G) in [0, 1], NaN without a verdict; None if no verifier tells right from wrong."""
    rewarded, correct = reward.without_shaping(verdicts)
    # float32, like the advantages: a difference that float32 cannot hold teaches nothing
    rewarded = torch.tensor(rewarded, dtype=torch.float32).view(-1, group_size)
    if correct is not None:
        correct = torch.tensor(correct, dtype=torch.float64).view(-1, group_size)
    return gspo.all_equal(rewarded), correct


def plan_updates(run: "Run", rollout: Rollout, active: Tensor, step: int) -> list[tuple]:
    """Shuffle the groups and split them into updates. Returns, for each update, its rows, the
    active ones among them, and the micro-batches for this process's share of the active ones."""
    config = run.config
    groups = torch.arange(len(active)).view(-1, config.group_size)
    order = random.Random(f"{config.seed} {step}").sample(range(len(groups)), len(groups))
    updates = []
    for rows in groups[order].flatten().split(config.completions_per_update):
        active_rows = rows[active[rows]]
        own_rows = run.ranks.share(active_rows)
        parts = micro_batches(rollout, own_rows, config.micro_batch_tokens, run.share_prefixes)
        updates.append((rows, active_rows, parts))
    return updates


# ---- forward passes ------------------------------------------------------------------------------


def logprobs_of(run: "Run", model, part: MicroBatch, entropy="none") -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (n, T) of a micro-batch under a model."""
    config, routing = run.config, run.models.routing
    watches = routing and model is run.models.policy  # records or replays the experts of pi_old
    with run.autocast(), routing.over(part) if watches else contextlib.nullcontext():
        return completion_logprobs(
            model, part.rollout, config.temperature, part.trees, entropy=entropy
        )


def critic_values(run: "Run", part: MicroBatch) -> Tensor:
    """The critic's values (n, T) of a micro-batch."""
    with run.autocast():
        return completion_values(run.models.critic, part.rollout, part.trees)


@torch.no_grad()
def score(run: "Run", rollout: Rollout, parts: list[MicroBatch]) -> list[Tensor | None]:
    """Return old_logprobs, ref_logprobs, teacher_logprobs and values, each (N, T) and 0 outside
    the micro-batches, or None if there is no such model. pi_old is the policy itself, not the copy
    that samples, unless --old-logprobs is sampler."""
    models = run.models
    zeros = torch.zeros_like(rollout.sampler_logprobs)
    scorers = (models.policy, models.ref_policy, models.teacher, models.critic)
    scores = [zeros.clone() if scorer else None for scorer in scorers]
    old_logprobs, ref_logprobs, teacher_logprobs, values = scores
    if models.routing:
        models.routing.forget()
    for part in parts:
        if run.config.old_logprobs == "sampler":
            old_logprobs[part.rows] = part.rollout.sampler_logprobs
        else:
            old_logprobs[part.rows], _ = logprobs_of(run, models.policy, part)
        if models.ref_policy:
            ref_logprobs[part.rows], _ = logprobs_of(run, models.ref_policy, part)
        if models.teacher:
            teacher_logprobs[part.rows], _ = logprobs_of(run, models.teacher, part)
        if models.critic:
            values[part.rows] = critic_values(run, part)
    run.ranks.sum(*[each for each in scores if each is not None])  # rows of other processes are 0
    return scores


def is_finite(run: "Run", step: int, totals: dict[str, float]) -> bool:
    """Whether the loss, mean ratio and gradient norms are finite. If not, the update is skipped;
    more than MAX_BAD_UPDATES in a row end the run."""
    decisive = [name for name in totals if name in DECISIVE or name.endswith("grad_norm")]
    wrong = ", ".join(name for name in decisive if not math.isfinite(totals[name]))
    progress = run.progress
    if wrong:
        progress.bad_in_a_row += 1
        many = f"step {step}: {progress.bad_in_a_row} updates in a row were not finite: {wrong}"
        need(progress.bad_in_a_row <= MAX_BAD_UPDATES, many)
        run.log.warn({"bad": f"step {step}: skipped an update, not finite: {wrong}"})
    elif "loss" in totals:  # without active rows there is nothing to judge by
        progress.bad_in_a_row = 0
    return not wrong


# ---- evaluation and report -----------------------------------------------------------------------


def evaluate(run: "Run", pass_k: int) -> tuple[dict, list[dict]]:
    """Evaluate on the held-out prompts: greedy accuracy and pass@k, or the mean greedy reward if
    no verifier tells right from wrong. Completions without a verdict are left out.

    Returns the metrics and a few answers."""
    policy, model, held_out = run.models.policy, run.models.sampling_model, run.held_out
    if run.config.stale_steps > 1:  # the copy must stay stale
        model = policy
    elif model is not policy:
        refresh(model, policy)
    if pass_k:
        say(f"evaluating {len(held_out)} prompts, greedily and with {pass_k} samples each")
    _, greedy = sample_and_verify(run, model, held_out, 1, 0.0, "eval")
    faults = [verdict.fault for verdict in greedy if verdict.fault]
    if len(faults) == len(greedy) and run.progress.step == 0:
        raise UserError(f"--reward: it failed on every completion: {faults[0]}")
    _, correct = judge_groups(run.reward, greedy, 1)
    answers = measure.readable_answers(greedy, correct, run.progress.step)
    asked, said = printable(answers[0]["prompt"][-200:]), printable(answers[0]["completion"][-200:])
    run.log.say_if_new(f"held out: '{asked}' -> '{said}' has reward {answers[0]['reward']}")
    metrics = {"eval_abstained": len(faults) / len(greedy)} if faults else {}
    if correct is None:
        rewards = [verdict.reward for verdict in greedy]
        return metrics | {"eval_reward": measure.mean(rewards)}, answers
    metrics |= {"eval_solved": measure.mean(correct)}
    if lenient := run.reward.lenient_twin():  # a gain in eval_solved alone is only formatting
        texts, rows = [each.completion for each in greedy], [each.row for each in greedy]
        _, right = lenient.without_shaping(lenient.verify(texts, rows))
        metrics["eval_solved_lenient"] = measure.mean(right)
    if pass_k:
        _, several = sample_and_verify(run, model, held_out, pass_k, run.config.temperature, "eval")
        _, correct = judge_groups(run.reward, several, pass_k)
        if correct is not None:
            metrics[f"eval_pass@{pass_k}"] = measure.mean(measure.best_of_group(correct))
    return metrics, answers


def report_step(run: "Run", output: Output, row: dict, shown: list[dict], stopping: bool) -> dict:
    """Evaluate, warn, print the step's line, write its rows and save a checkpoint. If a tracker or
    report.html fails, the run goes on. Returns the row of metrics.jsonl."""
    config, step, folder = run.config, row["step"], output.folder
    last, answers = step == config.steps, []
    row["memory_gb"] = run.ranks.peak_memory(config.device)
    evaluates = last or (config.eval_every > 0 and step % config.eval_every == 0)
    if evaluates:
        accuracy, answers = evaluate(run, pass_k=config.eval_samples if last else 0)
        row |= accuracy
        if routing := run.models.routing:
            score_again = functools.partial(logprobs_of, run, run.models.policy)
            row |= routing.measure_flips(score_again, run.ranks)
    lost = [name for name, value in row.items() if not math.isfinite(value)]  # JSON has no NaN
    if lost:
        run.log.warn({"lost": f"step {step}: omitted because not finite: {', '.join(lost)}"})
    row = {name: float(value) for name, value in row.items() if name not in lost} | {"step": step}
    run.log.warn(health.warnings_of(run, row))

    if run.ranks.first:
        say(console.step_line(row, config.steps, (config.steps - step) * row["seconds_step"]))
        data.append_rows(folder / "metrics.jsonl", [row])
        data.append_rows(folder / "samples.jsonl", shown)
        data.append_rows(folder / "evaluations.jsonl", answers)
    if last or stopping or (config.save_every and step % config.save_every == 0):
        run_folder.save_checkpoint(folder, run)
    if output.tracker:
        with run.log.trying("--track"):
            output.tracker(row)
    if run.ranks.first and (evaluates or stopping):
        with run.log.trying("report.html"):
            sentences = report.write_report([folder], folder / "report.html")
            if last:
                print(*map(printable, sentences), sep="\n")
    return row


# ---- start-up ------------------------------------------------------------------------------------


class Run:
    """Everything that outlives a step. Most bad input is caught before weights are loaded."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config = config
        self.ranks = ranks  # this process among those torchrun started
        bfloat16 = {"dtype": torch.bfloat16, "enabled": config.dtype == "bfloat16"}
        self.autocast = functools.partial(torch.autocast, config.device, **bfloat16)
        if config.device == "cpu" and torch.version.cuda and not torch.cuda.is_available():
            say(f"--device cpu: torch is built for CUDA {torch.version.cuda}, but finds no GPU")
        torch.manual_seed(config.seed)  # so that any random weights agree in all processes

        # 1. reward, data and sampler
        self.algorithm = bind(config)  # a row of ALGOS, its numbers set by the flags
        self.reward = verifiers.parse_reward(config.reward, config.device)
        self.reward.reads_steps = "token_rewards" in self.algorithm.reads
        read = data.read_data if config.data else problems_of
        rows, held_out = read(config, self.reward)
        self.generate = generate  # rollout.generate or --sampler, wrapped in Turns if --tool is set
        self.turns = None  # that wrapper, which counts calls and faults
        if config.sampler:
            from support.extras.samplers import check_weights, load_sampler

            self.generate = sampler = load_sampler(config)
        saved, self.progress = run_folder.newest_checkpoint(config)  # and its counters

        # 2. tokenizer and prompts
        source, self.tokenizer, model_config = find_model(config, ranks)
        if config.tool:
            from support.extras.tools import Turns, parse_tool

            tool = parse_tool(config.tool)
            self.generate = self.turns = Turns(self.generate, tool, self.tokenizer)
        vocabulary = model_config.get_text_config().vocab_size
        context = context_of(model_config)
        began = ranks.from_first(self.progress.began)
        form = data.PromptFormat(self.tokenizer, config, vocabulary, context, began)
        problems, self.held_out = form.train_and_held_out(config, rows, held_out)
        run_folder.compare_data(self.progress, config, rows, self.held_out)
        self.problems = itertools.islice(problems, self.progress.prompts_drawn, None)
        few = min(len(self.held_out), config.prompts_per_step)
        need(ranks.size <= few, f"{ranks.size} processes: expected at most {few}, one per prompt")
        prompt = self.held_out[0][data.IDS]
        say(f"first held-out prompt: '{printable(self.tokenizer.decode(prompt))}'")

        # 3. models. Checkpoints have the adapters merged in; LoRA needs the original weights
        policy = load_model(source if config.lora_rank or not saved else str(saved), config.device)
        stops = StopTexts(self.tokenizer, config.stop) if config.stop else None
        self.endings = {**end_and_pad_ids(policy, self.tokenizer), "stops": stops}  # for `generate`
        eos_ids = self.endings["eos_ids"]
        self.decode = functools.partial(data.completion_text, self.tokenizer, eos_ids=eos_ids)
        ids = prompt[-63:]
        longer = [*ids, ids[-1]]  # a different length, to expose padding bugs
        self.share_prefixes = check_scorer(policy, [ids, longer], self.endings["pad_id"])
        if config.device == "cuda" and config.dtype == "bfloat16":
            # TF32 for the float32 head, else the slowest part. It moves log s by 5e-5; a bfloat16
            # body, by 2.5e-3. Set after check_scorer, because TF32 would fail that check
            torch.set_float32_matmul_precision("high")
        self.models = Models(config, self.algorithm, policy)
        if config.sampler:  # stale weights would raise no error
            copied = self.models.sampling_model
            check_weights(config, sampler, copied, [ids, longer], self.endings)
        if self.models.teacher:
            self.share_prefixes = self.share_prefixes and shares_prefixes(self.models.teacher)
        self.optimizer = make_optimizer(config, self.models)
        if saved:
            run_folder.restore(saved, config, self.models, self.optimizer)
        trained, every = policy.num_parameters(only_trainable=True), policy.num_parameters()
        size = f"{trained / 1e6:.1f} of {every / 1e6:.1f} M parameters are trained"
        size += ", prefixes shared" if self.share_prefixes else ", no prefix sharing"
        say(f"{config.algo}, {size}, {config.device} {config.dtype}, --reward {config.reward}")
        self.log = console.Log(config.device, self.progress.seconds)


parse_flags = functools.partial(resolve_flags.read, Config, __doc__)  # arguments -> Config


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()  # it would garble our output
    config, ranks = None, Ranks()
    try:
        if arguments[:1] == ["--report"]:
            return report.main(arguments[1:])
        config = parse_flags(arguments)
        with joined_ranks(config.device) as ranks:
            if config.model in BUILT_IN:  # at this size more threads only get in the way
                torch.set_num_threads(min(2, torch.get_num_threads()))
            run = Run(config, ranks)
            progress, answers = run.progress, []
            if not progress.before:  # a resumed run has it in its checkpoint
                progress.before, answers = evaluate(run, pass_k=config.eval_samples)
            say(f"{len(run.held_out)} held-out prompts, initially: {percent(progress.before)}")
            # no run folder exists before this, so an early failure leaves none
            train(run, open_output(config, ranks, progress, answers))
        return 0
    except BaseException as error:
        return fail(error, ranks, config)


if __name__ == "__main__":
    sys.exit(main())
