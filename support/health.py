"""Sentences about the problems of a run and their remedies, for its page."""

import math
from statistics import fmean, variance

from support.metrics import MANY_TRUNCATED, TRUNCATED
from support.pretrain import BUILT_IN

RECENT = 10  # the sentences about a run are about so many steps


def health(rows: list[dict], flags: dict) -> list[str]:
    """Return sentences about the last steps, a problem and its remedy."""
    if not rows:
        return ["no step is done yet"]
    recent = rows[-RECENT:]
    names = {name for row in recent for name in row}  # a step of dead groups has fewer
    now = {name: fmean(row[name] for row in recent if name in row) for name in names}
    found = []
    dead, right = now["dead"], now.get("dead_right", 0.0)
    if right > 0.9:
        found.append(f"in {right:.0%} of groups all answers are right: take harder prompts")
    elif dead > 0.9 and not flags.get("teacher"):  # a teacher needs no rewards
        found.append(f"{dead:.0%} of groups are dead: take easier prompts or a larger --group-size")
    if now["truncated"] > MANY_TRUNCATED:
        found.append(TRUNCATED.format(now["truncated"]))

    completions = flags["prompts_per_step"] * flags["group_size"]
    updates = completions // flags["completions_per_update"] * flags["epochs"]
    clipped = now.get("clip_fraction")
    if flags["clip_low"] is not None and clipped is not None:
        if updates == 1:
            found.append("one update a step: every ratio is near 1. Lower --completions-per-update")
        elif clipped == 0:
            found.append("nothing is clipped: the policy hardly moves. Raise --lr")
        elif clipped > 0.95 * (1 - 1 / updates):  # the first update clips nothing
            found.append(f"almost everything is clipped ({clipped:.0%}): lower --lr")
    if now.get("entropy", 1.0) < 0.01 and now.get("solved", 0.0) < 0.9:
        found.append("exploration ended, the entropy is near 0: lower --lr or use --entropy-coef")
    return found + of_reward(rows, now, flags)


def of_reward(rows: list[dict], now: dict, flags: dict) -> list[str]:
    """Say that the reward fell, or that it never rose."""
    rewards = [row["reward"] for row in rows]
    levels = [fmean(rewards[i : i + RECENT]) for i in range(0, len(rewards), RECENT)]
    best = max(levels)
    last = fmean(rewards[-RECENT:])
    is_noise = best - last < 0.1 * abs(best)  # where rewards are below 0
    if last < (best + min(levels[0], 0.0)) / 2 and not is_noise:
        return [f"the reward fell from {best:.2f} to {last:.2f}: lower --lr or the updates a step"]
    size = min(RECENT, len(rewards) // 2)
    if size < 5 or now.get("solved", 0.0) > 0.9:
        return []
    early, late = rewards[:size], rewards[-size:]
    noise = math.sqrt((variance(early) + variance(late)) / size)  # standard error of the rise
    first, last = fmean(early), fmean(late)
    if last - first > 2 * noise:
        return []
    change = f"{first:.2f} in the first {size} steps, {last:.2f} in the last {size}"
    best = "below 2B parameters 5e-6 to 3e-5 were best, for LoRA ten times as much"
    if flags["model"] in BUILT_IN:
        best = "its default is 2e-4"
    return [f"the reward does not rise ({change}). --lr {flags['lr']:g} is the usual cause: {best}"]
