"""A step as numbers, for metrics.jsonl, as warnings, for the console, and as some of its
completions, for samples.jsonl."""

import math
import statistics

import torch
from torch import Tensor

from gspo import completion_mean
from support.data import text_of

SHOWN_GROUPS = 4  # of a step in samples.jsonl
MANY_TRUNCATED = 1 / 3  # of the completions
TRUNCATED = "{:.0%} of completions are truncated: raise --max-new-tokens"


def measure(run, batch, updates, constants, advantages, returns, result) -> dict:
    """Return the row of metrics.jsonl, which docs/metrics.md explains. A new metric is a line.

    Every process calls it once a step: it gathers over processes, and ends the step's clock."""
    rollout, mask = batch.rollout, batch.mask
    dead, correct = batch.drawn.dead, batch.drawn.correct
    lengths = rollout.completion_mask.sum(1).float()
    row = {}
    # completions that are trained on
    row["reward"] = batch.rewards.mean()
    row["reward_std"] = batch.rewards.std()
    for name in run.reward.terms:
        row[f"reward/{name}"] = statistics.fmean(each.verdict.terms[name] for each in batch.samples)
    # all groups that were sampled
    if correct is not None:
        row["solved"] = correct.mean()
        row["solved_any"] = correct.amax(1).mean()
        row["dead_right"] = (dead & (correct.amin(1) >= 1)).float().mean()
        row["dead_wrong"] = (dead & (correct.amax(1) <= 0)).float().mean()
    row["dead"] = dead.float().mean()
    row["prompts_drawn"] = len(dead)
    # completions that are trained on
    row["length_mean"] = lengths.mean()
    row["length_min"] = lengths.min()
    row["length_max"] = lengths.max()
    row["truncated"] = rollout.truncated.float().mean()
    magnitude = advantages.abs() if advantages.dim() == 1 else advantages[mask].abs()
    row["advantage_abs"] = magnitude.mean()
    # active rows
    names = dict.fromkeys(name for metrics in result.metrics for name in metrics)  # in their order
    for name in names:  # clip_fraction, ratio_mean, ...
        row[name] = statistics.fmean(found[name] for found in result.metrics if name in found)
    row["bad_updates"] = result.bad_updates
    first = updates[0].active_rows
    active = torch.cat([update.active_rows for update in updates])
    policy_log_ratio = result.last_logprobs - constants.old_logprobs
    sampler_log_ratio = result.first_logprobs - rollout.sampler_logprobs
    row |= drift("policy", policy_log_ratio[active], mask[active])
    row |= drift("sampler", sampler_log_ratio[first], mask[first])
    if run.models.critic and mask.any():  # 1 if perfect, 0 for a constant
        left = (returns - constants.values)[mask].var(correction=0)
        row["explained_variance"] = 1 - left / (returns[mask].var(correction=0) + 1e-8)
    if run.models.teacher:
        teacher = constants.teacher_logprobs[mask]
        row["teacher_kl"] = (constants.old_logprobs[mask] - teacher).mean()  # k1, sampled tokens
        row["teacher_unlikely"] = (teacher < math.log(1e-3)).float().mean()
    row["verifier_faults"] = len(batch.drawn.faults)
    if run.turns:
        row |= run.turns.measure(rollout, run.ranks)
    row["lr"] = run.optimizer.param_groups[0]["lr"]
    row["memory_gb"] = run.ranks.peak_memory(run.config.device)
    row |= run.log.end_step()
    row["tokens_per_second"] = lengths.sum() / row["seconds_step"]
    numbers = {name: float(value) for name, value in row.items() if math.isfinite(value)}  # as JSON
    return {"step": batch.step, **numbers}


def drift(prefix: str, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far two policies are apart, from differences of log-probs (n, T): a KL in nats
    over the tokens (k3), the spread of the tokens' log-ratios, and that of log s."""
    tokens = log_ratio[mask]
    if len(tokens) == 0:
        return {}
    return {
        f"{prefix}_kl": (tokens.expm1() - tokens).mean(),
        f"{prefix}_token_std": tokens.std(correction=0),
        f"{prefix}_sequence_std": completion_mean(log_ratio, mask).std(correction=0),
    }


def warnings_of(run, batch, row: dict) -> dict[str, str]:
    """Return kind -> sentence about a step, of which the console shows each kind once."""
    config, sentences = run.config, {}
    if row["truncated"] > MANY_TRUNCATED:
        sentences["truncated"] = TRUNCATED.format(row["truncated"])
    groups = round(row["prompts_drawn"])
    kept = round(groups * (1 - row["dead"]))
    if config.dynamic_sampling and kept < config.prompts_per_step:
        few = f"{kept} of {groups} groups have different rewards"
        sentences["refills"] = f"--dynamic-sampling: {few}, expected {config.prompts_per_step}"
    if faults := batch.drawn.faults:
        sentences["fault"] = f"a verifier failed and gave reward 0: {faults[0]}"
    for name in run.reward.shaping - run.reward.shaping_at_first:
        why = "it gave a value below 0 or above 1, so `solved` and dead groups leave it out now"
        sentences[f"shaping {name}"] = f"--reward {name}: {why}"
    same_weights = config.dtype == "float32" and config.stale_steps == 1
    if same_weights and row.get("sampler_kl", 0.0) > 1e-3:
        found = f"the sampler draws from another distribution, sampler_kl {row['sampler_kl']:.2g}"
        sentences["sampler"] = f"{found}: another temperature in --sampler? See --tis-cap"
    ratio = row.get("ratio_mean", 1.0)
    if not 0.5 < ratio < 2:
        why = "lower --lr? A loss of your own: is `per` the unit of its mean?"
        sentences["ratio"] = f"the mean ratio is {ratio:.3g}, expected near 1: {why}"
    if run.progress.quiet_steps == 10:
        why = "all rewards are equal (another --reward? other prompts? more --group-size?)"
        if row["truncated"] == 1:
            why = "all completions are truncated (--max-new-tokens)"
        sentences["quiet"] = f"10 steps taught nothing: {why}"
    return sentences


def readable(sample, step: int) -> dict:
    """Return a Sample as a row of samples.jsonl or evaluations.jsonl."""
    asked = {"prompt": text_of(sample.problem["prompt"]), "answer": sample.problem["answer"]}
    return {"step": step, **asked, "completion": sample.text, "reward": sample.verdict.reward}


def readable_samples(run, batch, updates, constants, advantages, result) -> list[dict]:
    """Return the rows of samples.jsonl: a completion of each of the first groups, then, token by
    token, the active completions of one group of the last update."""
    size = run.config.group_size
    shown = [readable(sample, batch.step) for sample in batch.samples[::size][:SHOWN_GROUPS]]
    log_ratios = result.last_logprobs - constants.old_logprobs
    advantages = advantages.view(len(log_ratios), -1).expand_as(log_ratios)
    active = updates[-1].active_rows.tolist()
    for row in active:
        if row // size != active[0] // size:
            continue
        own = batch.rollout.completion_mask[row]  # without tokens of a tool
        ids = batch.rollout.completions[row, own].tolist()
        shown.append(readable(batch.samples[row], batch.step))
        shown[-1]["group"] = row // size
        shown[-1]["tokens"] = [run.tokenizer.decode([token]) for token in ids]
        shown[-1]["advantage"] = [round(value, 6) for value in advantages[row, own].tolist()]
        shown[-1]["log_ratios"] = [round(value, 6) for value in log_ratios[row, own].tolist()]
    return shown
