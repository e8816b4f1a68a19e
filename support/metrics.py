"""A step as numbers, for metrics.jsonl, as warnings, for the console, and as some of its
completions, for samples.jsonl."""

import math
import statistics

from torch import Tensor

from gspo import completion_mean
from support.data import text_of

SAMPLER_KL = {"float32": 1e-3, "bfloat16": 2e-2}  # rounding makes at most 1e-9 and 9e-3
SHOWN_GROUPS = 4  # of a step in samples.jsonl
MANY_TRUNCATED = 1 / 3  # of the completions
TRUNCATED = "{:.0%} of completions are truncated: raise --max-new-tokens"


def group_metrics(dead: Tensor, correct: Tensor | None) -> dict:
    """Return metrics of all groups that a step sampled. dead (groups,) have equal rewards, correct
    (groups, G) is in [0, 1], None if the reward does not tell right from wrong."""
    row = {"dead": dead.float().mean(), "prompts_drawn": len(dead)}
    if correct is not None:
        row["solved"] = correct.mean()
        row["solved_any"] = correct.amax(1).mean()
        row["dead_right"] = (dead & (correct.amin(1) >= 1)).float().mean()
        row["dead_wrong"] = (dead & (correct.amax(1) <= 0)).float().mean()
    return row


def rollout_metrics(run, rollout, rewards: Tensor, verdicts: list) -> dict:
    """Return means over the completions that a step trains on."""
    lengths = rollout.completion_mask.sum(1).float()
    row = {"reward": rewards.mean(), "reward_std": rewards.std()}
    for name in run.reward.terms:
        row[f"reward/{name}"] = statistics.fmean(verdict.terms[name] for verdict in verdicts)
    row["length_mean"] = lengths.mean()
    row["length_min"] = lengths.min()
    row["length_max"] = lengths.max()
    row["truncated"] = rollout.truncated.float().mean()
    if run.turns:
        row |= run.turns.measure(rollout, run.ranks)
    return row


def advantage_metrics(advantages: Tensor, returns, values, mask: Tensor) -> dict:
    """Return the mean size of advantages, and how well a critic's values predict the returns."""
    magnitude = advantages.abs() if advantages.dim() == 1 else advantages[mask].abs()
    row = {"advantage_abs": magnitude.mean()}
    if returns is not None and mask.any():  # 1 if perfect, 0 for a constant
        left = (returns - values)[mask].var(correction=0)
        row["explained_variance"] = 1 - left / (returns[mask].var(correction=0) + 1e-8)
    return row


def teacher_metrics(old_logprobs: Tensor, teacher_logprobs: Tensor) -> dict:
    """Return the KL to the teacher (k1) and the share of tokens that it finds unlikely."""
    unlikely = (teacher_logprobs < math.log(1e-3)).float().mean()
    return {
        "teacher_kl": (old_logprobs - teacher_logprobs).mean(),
        "teacher_unlikely": unlikely,
    }


def mean_metrics(updates: list[dict]) -> dict:
    """Return the mean over updates of each metric, over those that have it."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)  # in their order
    return {
        name: statistics.fmean(each[name] for each in updates if name in each) for name in names
    }


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
    """Return a completion as a row of samples.jsonl or evaluations.jsonl."""
    asked = {"prompt": text_of(verdict.row["prompt"]), "answer": verdict.row["answer"]}
    return {"step": step, **asked, "completion": verdict.completion, "reward": verdict.reward}


def readable_samples(run, rollout, verdicts, advantages, log_ratios, last_live) -> list[dict]:
    """Return the rows of samples.jsonl: a completion of each of the first groups, then, token by
    token, the completions of one group among last_live, the live rows of the last update."""
    size, step = run.config.group_size, run.progress.step
    shown = [readable(verdict, step) for verdict in verdicts[::size][:SHOWN_GROUPS]]
    advantages = advantages.view(len(log_ratios), -1).expand_as(log_ratios)
    live = last_live.tolist()
    for row in live:
        if row // size != live[0] // size:
            continue
        own = rollout.completion_mask[row]  # without tokens of a tool
        ids = rollout.completions[row, own].tolist()
        shown.append(readable(verdicts[row], step))
        shown[-1]["group"] = row // size
        shown[-1]["tokens"] = [run.tokenizer.decode([token]) for token in ids]
        shown[-1]["advantage"] = [round(value, 6) for value in advantages[row, own].tolist()]
        shown[-1]["log_ratios"] = [round(value, 6) for value in log_ratios[row, own].tolist()]
    return shown
