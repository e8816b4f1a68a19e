"""A step as numbers, for metrics.jsonl, as warnings, for the console, and as some of its
completions, for samples.jsonl."""

import math
import statistics

import torch
from torch import Tensor

from gspo import completion_mean
from support.data import text_of

SAMPLER_KL = {"float32": 1e-3, "bfloat16": 2e-2}  # rounding makes at most 1e-9 and 9e-3
SHOWN_GROUPS = 4  # of a step in samples.jsonl
MANY_TRUNCATED = MANY_FAULTS = 1 / 3  # of the completions
TRUNCATED = "{:.0%} of completions are truncated: raise --max-new-tokens"


def number(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return None if math.isnan(value) else float(value)


def mean(values) -> float:
    """The mean of numbers without the NaN, which stand for no verdict. NaN if there are none."""
    return float(torch.as_tensor(values, dtype=torch.float64).nanmean())


def group_metrics(dead: Tensor, correct: Tensor | None, verdicts: list) -> dict:
    """Metrics of all groups that a step sampled. dead (groups,) have equal rewards, correct
    (groups, G) is in [0, 1], None if the reward does not tell right from wrong."""
    row = {"dead": dead.float().mean(), "prompts_drawn": len(dead)}
    row["verifier_faults"] = sum(bool(verdict.fault) for verdict in verdicts)
    if correct is not None:
        judged = ~correct.isnan()
        highest = correct.nan_to_num(0.0).amax(1)
        row["solved"] = mean(correct)
        row["solved_any"] = highest.mean()
        all_right = correct.nan_to_num(1.0).amin(1) >= 1
        row["dead_right"] = (dead & all_right & judged.any(1)).float().mean()
        row["dead_wrong"] = (dead & (highest <= 0) & judged.any(1)).float().mean()
    return {name: value for name, value in row.items() if not math.isnan(value)}


def fault_warnings(verdicts: list) -> dict[str, str]:
    """kind -> sentence about completions without a verdict."""
    faults = [verdict.fault for verdict in verdicts if verdict.fault]
    sentences = {}
    if faults:
        sentences["fault"] = f"a verifier failed, its completion is left out: {faults[0]}"
    if len(faults) > MANY_FAULTS * len(verdicts):
        share = f"verifiers failed on {len(faults) / len(verdicts):.0%} of completions"
        sentences["faults"] = f"{share}: nothing is learned from those. The first: {faults[0]}"
    return sentences


def step_metrics(run, batch, tensors: dict, active: Tensor, first_rows, updates: list) -> dict:
    """Metrics of a step: of its completions, advantages and updates.

    tensors has the inputs of the losses by name, and advantages, returns, new_logprobs (of each
    row's latest forward pass) and first_logprobs (of the first update with active rows, which are
    first_rows). active (N,) marks rows that got forward passes. updates has the metrics of each
    update. A mean over nothing is left out."""
    rollout, mask = batch.rollout, batch.mask
    row = rollout_metrics(batch, run.reward.terms)
    if run.turns:
        row |= run.turns.measure(rollout, run.ranks)
    row |= advantage_metrics(tensors["advantages"], tensors["returns"], tensors["values"], mask)
    row |= mean_metrics(updates)
    log_ratios = tensors["new_logprobs"] - tensors["old_logprobs"]
    row |= drift("policy", log_ratios[active], mask[active])
    # the policy has not moved yet: the gap is the sampler's rounding, or its fault
    sampler_gap = tensors["first_logprobs"] - rollout.sampler_logprobs
    row |= drift("sampler", sampler_gap[first_rows], mask[first_rows])
    if tensors["teacher_logprobs"] is not None and mask.any():
        row |= teacher_metrics(tensors["old_logprobs"][mask], tensors["teacher_logprobs"][mask])
    return row


def rollout_metrics(batch, terms) -> dict:
    """Means over the completions that a step trains on, rewards over those with a verdict."""
    lengths = batch.rollout.completion_mask.sum(1).float()
    judged = batch.rewards[~batch.rewards.isnan()]
    row = {}
    if len(judged) > 0:
        row = {
            "reward": judged.mean(),
            "reward_std": judged.std(correction=min(len(judged) - 1, 1)),
        }
    for name in terms:
        value = mean([verdict.terms[name] for verdict in batch.verdicts])
        if not math.isnan(value):
            row[f"reward/{name}"] = value
    row["length_mean"] = lengths.mean()
    row["length_min"] = lengths.min()
    row["length_max"] = lengths.max()
    row["truncated"] = batch.rollout.truncated.float().mean()
    return row


def advantage_metrics(advantages: Tensor, returns, values, mask: Tensor) -> dict:
    """The mean size of advantages, and how well a critic's values predict the returns."""
    magnitude = advantages.abs() if advantages.dim() == 1 else advantages[mask].abs()
    row = {"advantage_abs": magnitude.mean()} if len(magnitude) > 0 else {}
    if returns is not None and mask.any():  # 1 if perfect, 0 for a constant
        left = (returns - values)[mask].var(correction=0)
        row["explained_variance"] = 1 - left / (returns[mask].var(correction=0) + 1e-8)
    return row


def teacher_metrics(old_logprobs: Tensor, teacher_logprobs: Tensor) -> dict:
    """The KL to the teacher (k1) and the share of tokens that it finds unlikely."""
    unlikely = (teacher_logprobs < math.log(1e-3)).float().mean()
    return {
        "teacher_kl": (old_logprobs - teacher_logprobs).mean(),
        "teacher_unlikely": unlikely,
    }


def mean_metrics(updates: list[dict]) -> dict:
    """The mean of each metric over the updates that have it."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)  # in their order
    return {
        name: statistics.fmean(each[name] for each in updates if name in each) for name in names
    }


def drift(prefix: str, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far two policies are apart, from differences of log-probs (n, T): a KL in nats over the
    tokens (k3), the spread of the tokens' log-ratios, and that of log s."""
    tokens = log_ratio[mask]
    if len(tokens) == 0:
        return {}
    return {
        f"{prefix}_kl": (tokens.expm1() - tokens).mean(),
        f"{prefix}_token_std": tokens.std(correction=0),
        f"{prefix}_sequence_std": completion_mean(log_ratio, mask).std(correction=0),
    }


def warnings_of(run, row: dict) -> dict[str, str]:
    """Return kind -> sentence about a step, of which the console shows each kind once."""
    config, sentences = run.config, {}
    if row["truncated"] > MANY_TRUNCATED:
        sentences["truncated"] = TRUNCATED.format(row["truncated"])
    groups = round(row["prompts_drawn"])
    kept = round(groups * (1 - row["dead"]))
    if config.dynamic_sampling and kept < config.prompts_per_step:
        few = f"{kept} of {groups} groups have different rewards"
        sentences["refills"] = f"--dynamic-sampling: {few}, expected {config.prompts_per_step}"
    for name in run.reward.shaping - run.reward.shaping_at_first:
        why = "it gave a value below 0 or above 1, so `solved` and dead groups leave it out now"
        sentences[f"shaping {name}"] = f"--reward {name}: {why}"
    if config.stale_steps == 1 and row.get("sampler_kl", 0.0) > SAMPLER_KL[config.dtype]:
        found = f"the sampler draws from another distribution, sampler_kl {row['sampler_kl']:.2g}"
        sentences["sampler"] = f"{found}: another temperature in --sampler? See --tis-cap"
    ratio = row.get("ratio_mean", 1.0)
    if not 0.5 < ratio < 2:
        why = "lower --lr? A loss of your own: is `per` the unit of its mean?"
        sentences["ratio"] = f"the mean ratio is {ratio:.3g}, expected near 1: {why}"
    if run.turns and run.turns.fault:
        sentences["tool"] = f"the tool failed and gave no reply: {run.turns.fault}"
    if run.progress.quiet_steps == 10:
        why = "all rewards are equal (another --reward? other prompts? more --group-size?)"
        if row["truncated"] == 1:
            why = "all completions are truncated (--max-new-tokens)"
        sentences["quiet"] = f"10 steps taught nothing: {why}"
    return sentences


def readable(verdict, step: int) -> dict:
    """A completion as a row of samples.jsonl or evaluations.jsonl. Without a verdict its reward is
    null."""
    asked = {"prompt": text_of(verdict.row["prompt"]), "answer": verdict.row["answer"]}
    reward = number(verdict.reward)
    return {"step": step, **asked, "completion": verdict.completion, "reward": reward}


def readable_samples(run, batch, tensors: dict, last_rows: Tensor) -> list[dict]:
    """The rows of samples.jsonl: one completion of each of the first groups, then, token by token,
    the completions of one group among last_rows, the active rows of the last update."""
    size, step = run.config.group_size, run.progress.step
    shown = [readable(verdict, step) for verdict in batch.verdicts[::size][:SHOWN_GROUPS]]
    log_ratios = tensors["new_logprobs"] - tensors["old_logprobs"]
    advantages = tensors["advantages"].view(len(log_ratios), -1).expand_as(log_ratios)
    last_rows = last_rows.tolist()
    for row in last_rows:
        if row // size != last_rows[0] // size:
            continue
        own = batch.rollout.completion_mask[row]  # without tokens of a tool
        ids = batch.rollout.completions[row, own].tolist()
        shown.append(readable(batch.verdicts[row], step))
        shown[-1]["group"] = row // size
        shown[-1]["tokens"] = [run.tokenizer.decode([token]) for token in ids]
        shown[-1]["advantage"] = [round(value, 6) for value in advantages[row, own].tolist()]
        shown[-1]["log_ratios"] = [round(value, 6) for value in log_ratios[row, own].tolist()]
    return shown
