"""Compute a step's metrics for metrics.jsonl, and pick some completions for samples.jsonl."""

import math
import statistics

import torch
from torch import Tensor

from gspo import completion_mean
from support.data import text_of

SHOWN = 4  # groups per step in samples.jsonl, prompts per evaluation in evaluations.jsonl


def number(value: float) -> float | None:
    """Return a number that JSON can hold, or None for NaN."""
    return None if math.isnan(value) else float(value)


def mean(values) -> float:
    """Average the values that are not NaN (no verdict). Returns NaN if there are none."""
    return float(torch.as_tensor(values, dtype=torch.float64).nanmean())


def best_of_group(correct: Tensor) -> Tensor:
    """Return the highest value of each group, (groups, G) -> (groups,), or NaN if all are NaN."""
    best = correct.nan_to_num(-1.0).amax(1)
    return torch.where(best < 0, torch.nan, best)


def group_metrics(dead: Tensor, correct: Tensor | None, verdicts: list) -> dict:
    """Metrics over every group sampled in a step. `dead` (groups,) marks those with equal rewards.
    `correct` (groups, G) is in [0, 1], or None if the reward can't tell right from wrong."""
    row = {"dead": dead.float().mean(), "prompts_drawn": len(dead)}
    row["verifier_faults"] = sum(bool(verdict.fault) for verdict in verdicts)
    if correct is not None:
        judged = ~correct.isnan()
        best, worst = best_of_group(correct), correct.nan_to_num(1.0).amin(1)
        row["solved"] = mean(correct)
        row["solved_any"] = mean(best)
        row["dead_right"] = (dead & (worst >= 1) & judged.any(1)).float().mean()
        row["dead_wrong"] = (dead & (best <= 0)).float().mean()
    return {name: value for name, value in row.items() if not math.isnan(value)}


def step_metrics(run, batch, tensors: dict, active: Tensor, first_rows, updates: list) -> dict:
    """Metrics of a step's completions, advantages and updates.

    `tensors` holds the inputs of the losses by name, plus advantages, returns, new_logprobs (from
    each row's latest forward pass) and first_logprobs (from the first update with active rows,
    which are `first_rows`). `active` (N,) marks the rows that had a forward pass, and `updates`
    holds the metrics of each update. Means over nothing are left out."""
    rollout, mask = batch.rollout, batch.mask
    row = rollout_metrics(batch, run.reward.terms)
    if run.turns:
        row |= run.turns.measure(rollout)
    advantages, returns = tensors["advantages"], tensors["returns"]
    magnitude = advantages.abs() if advantages.dim() == 1 else advantages[mask].abs()
    if len(magnitude) > 0:
        row["advantage_abs"] = magnitude.mean()
    if returns is not None and mask.any():  # 1 for a perfect critic, 0 for a constant one
        left = (returns - tensors["values"])[mask].var(correction=0)
        row["explained_variance"] = 1 - left / (returns[mask].var(correction=0) + 1e-8)
    for name in dict.fromkeys(name for metrics in updates for name in metrics):  # keeps their order
        row[name] = statistics.fmean(each[name] for each in updates if name in each)
    log_ratios = tensors["new_logprobs"] - tensors["old_logprobs"]
    row |= drift("policy", log_ratios[active], mask[active])
    # the policy has hardly moved, so a gap means rounding, a bug or a stale sampler
    sampler_gap = tensors["first_logprobs"] - rollout.sampler_logprobs
    row |= drift("sampler", sampler_gap[first_rows], mask[first_rows])
    if tensors["teacher_logprobs"] is not None and mask.any():
        old, teacher = tensors["old_logprobs"][mask], tensors["teacher_logprobs"][mask]
        row["teacher_kl"] = (old - teacher).mean()  # k1
    return row


def rollout_metrics(batch, terms) -> dict:
    """Metrics of the completions trained on. Rewards are averaged over those with a verdict."""
    lengths = batch.rollout.completion_mask.sum(1).float()
    judged = batch.rewards[~batch.rewards.isnan()]
    row = {}
    if len(judged) > 0:
        row["reward"] = judged.mean()
        row["reward_std"] = judged.std(correction=min(len(judged) - 1, 1))
    for name in terms:
        value = mean([verdict.terms[name] for verdict in batch.verdicts])
        if not math.isnan(value):
            row[f"reward/{name}"] = value
    row["length_mean"] = lengths.mean()
    row["length_min"] = lengths.min()
    row["length_max"] = lengths.max()
    row["truncated"] = batch.rollout.truncated.float().mean()
    return row


def drift(prefix: str, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute the KL per token in nats (k3), and the standard deviations of the token log-ratios
    and of log s, from the difference (n, T) between two policies' log-probs."""
    tokens = log_ratio[mask]
    if len(tokens) == 0:
        return {}
    return {
        f"{prefix}_kl": (tokens.expm1() - tokens).mean(),
        f"{prefix}_token_std": tokens.std(correction=0),
        f"{prefix}_sequence_std": completion_mean(log_ratio, mask).std(correction=0),
    }


def readable(verdict, step: int) -> dict:
    """Return a row of samples.jsonl or evaluations.jsonl. Without a verdict its reward is null."""
    prompt = text_of(verdict.row["prompt"])
    row = {"step": step, "prompt": prompt, "answer": verdict.row["answer"]}
    return row | {"completion": verdict.completion, "reward": number(verdict.reward)}


def readable_answers(verdicts: list, correct: Tensor | None, step: int) -> list[dict]:
    """Return rows of evaluations.jsonl. `correct` (N, 1) is in [0, 1], or None if it is unknown."""
    rows = [readable(verdict, step) for verdict in verdicts[:SHOWN]]
    for i, row in enumerate(rows):
        row["correct"] = None if correct is None else number(correct[i, 0])
    return rows


def readable_samples(run, batch, tensors: dict, last_rows: Tensor) -> list[dict]:
    """Return rows of samples.jsonl: one completion from each of the first groups, and then, token
    by token, the first group in `last_rows` (the active rows of the last update)."""
    size, step = run.config.group_size, run.progress.step
    shown = [readable(verdict, step) for verdict in batch.verdicts[::size][:SHOWN]]
    log_ratios = tensors["new_logprobs"] - tensors["old_logprobs"]
    advantages = tensors["advantages"].view(len(log_ratios), -1).expand_as(log_ratios)
    for row in last_rows[last_rows // size == last_rows[:1] // size].tolist():
        own = batch.rollout.completion_mask[row]  # excludes tool tokens
        ids = batch.rollout.completions[row, own].tolist()
        shown.append(readable(batch.verdicts[row], step))
        shown[-1]["group"] = row // size
        shown[-1]["tokens"] = [run.tokenizer.decode([token]) for token in ids]
        shown[-1]["advantage"] = [round(value, 6) for value in advantages[row, own].tolist()]
        shown[-1]["log_ratios"] = [round(value, 6) for value in log_ratios[row, own].tolist()]
    return shown
