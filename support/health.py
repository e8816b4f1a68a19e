"""Say in plain sentences what looks wrong in a run and what to do about it: in a step, for the
console, and in the run as a whole, for report.html and the last lines of output."""

import math
from statistics import fmean, variance

from support.pretrain import BUILT_IN

MANY = 1 / 3  # share of completions that may be truncated, or have no verdict
TRUNCATED = "{:.0%} of completions are truncated: raise --max-new-tokens"
RECENT = 10  # steps that `health` averages over


def fault_warnings(verdicts: list) -> dict[str, str]:
    """Return warnings about completions without a verdict, by kind."""
    faults = [verdict.fault for verdict in verdicts if verdict.fault]
    sentences = {}
    if faults:
        sentences["fault"] = f"a completion has no verdict and is left out: {faults[0]}"
    if len(faults) > MANY * len(verdicts):
        share = f"{len(faults) / len(verdicts):.0%} of completions have no verdict"
        sentences["faults"] = f"{share}, so nothing is learned from them; the first: {faults[0]}"
    return sentences


def warnings_of(run, row: dict) -> dict[str, str]:
    """Return warnings about a step, by kind. The console shows each kind once per run."""
    config, sentences = run.config, {}
    if row["truncated"] > MANY:
        sentences["truncated"] = TRUNCATED.format(row["truncated"])
    groups = round(row["prompts_drawn"])
    kept = round(groups * (1 - row["dead"]))
    if config.dynamic_sampling and kept < config.prompts_per_step:
        few = f"{kept} of {groups} groups have unequal rewards"
        sentences["refills"] = f"--dynamic-sampling: {few}, expected {config.prompts_per_step}"
    for name in run.reward.out_of_range:
        use = "counts it as 0 or 1 (set `shaping = True` on the function to leave it out)"
        if name in run.reward.shaping:
            use = "leaves it out"
        told = f"--reward {name} gave a value outside [0, 1]: `solved` {use}"
        sentences[f"shaping {name}"] = told
    # rounding alone causes 1e-10 in float32 and at most 1e-2 in bfloat16
    most = 1e-3 if config.dtype == "float32" else 2e-2
    if config.stale_steps == 1 and row.get("sampler_kl", 0.0) > most:
        found = f"the sampler draws from another distribution, sampler_kl {row['sampler_kl']:.2g}"
        sentences["sampler"] = f"{found}: does --sampler use another temperature? See --tis-cap"
    ratio = row.get("ratio_mean", 1.0)
    if not 0.5 < ratio < 2:
        todo = "lower --lr. In a loss of your own, check that its mean matches `per`"
        sentences["ratio"] = f"the mean ratio is {ratio:.3g}, but it should be near 1: {todo}"
    if run.progress.quiet_steps == 10:
        why = "all rewards are equal (change --reward or the prompts, or raise --group-size)"
        if row["truncated"] == 1:
            why = "all completions are truncated (--max-new-tokens)"
        sentences["quiet"] = f"10 steps in a row taught nothing: {why}"
    return sentences


def health(rows: list[dict], flags: dict, before: dict | None = None) -> list[str]:
    """Return a run's recent problems and remedies. `before` is the evaluation before step 1."""
    if not rows:
        return ["no step has finished yet"]
    recent = rows[-RECENT:]
    names = {name for row in recent for name in row}  # steps with only dead groups lack metrics
    now = {name: fmean(row[name] for row in recent if name in row) for name in names}
    found = []
    dead, right = now["dead"], now.get("dead_right", 0.0)
    prompts = now.get("prompts_drawn", flags["prompts_per_step"])
    if now.get("verifier_faults", 0) > MANY * prompts * flags["group_size"]:
        found.append("verifiers fail on more than a third of completions: fix --reward")
    if len(recent) > 1 and now.get("reward_std", 1.0) == 0 and right < 0.9:
        found.append("all completions earn the same reward, so nothing is learned: check --reward")
    elif right > 0.9:
        found.append(f"all answers are right in {right:.0%} of groups: use harder prompts")
    elif dead > 0.9 and not flags.get("teacher"):  # a teacher needs no rewards
        found.append(f"{dead:.0%} of groups are dead: use easier prompts or a larger --group-size")
    if now["truncated"] > MANY:
        found.append(TRUNCATED.format(now["truncated"]))

    completions = flags["prompts_per_step"] * flags["group_size"]
    updates = completions // flags["completions_per_update"] * flags["epochs"]
    clipped = now.get("clip_fraction")
    if flags["clip_low"] is not None and clipped is not None:
        if updates == 1:
            found.append("one update per step keeps ratios near 1: lower --completions-per-update")
        elif clipped == 0:
            found.append("nothing is clipped because the policy hardly moves: raise --lr")
        elif clipped > 0.95 * (1 - 1 / updates):  # the first update clips nothing
            found.append(f"almost everything is clipped ({clipped:.0%}): lower --lr")
    if now.get("entropy", 1.0) < 0.01 and now.get("solved", 0.0) < 0.9:
        found.append("exploration is over (entropy near 0): lower --lr or use --entropy-coef")
    return found + of_evaluations(rows, flags, before or {}) + of_reward(rows, now, flags)


def of_evaluations(rows: list[dict], flags: dict, before: dict) -> list[str]:
    """Name held-out metrics over 5 points and two standard errors below their best."""
    found = []
    evaluations = [before, *rows]
    for name in dict.fromkeys(name for row in evaluations for name in row):
        if name != "eval_solved" and not name.startswith("eval_pass@"):
            continue
        values = [row[name] for row in evaluations if name in row]
        best, last = max(values), values[-1]
        noise = math.sqrt((best * (1 - best) + last * (1 - last)) / flags["eval_prompts"])
        if best - last > max(2 * noise, 0.05):
            shown = name.removeprefix("eval_")
            fall = f"held-out {shown} fell from {best:.0%} to {last:.0%}"
            found.append(f"{fall}: lower --lr, use an earlier checkpoint, or add --kl-coef")
    return found


def of_reward(rows: list[dict], now: dict, flags: dict) -> list[str]:
    """Return a sentence if the reward fell or never rose."""
    rewards = [row["reward"] for row in rows if "reward" in row]  # steps without verdicts have none
    if not rewards:
        return []
    levels = [fmean(rewards[i : i + RECENT]) for i in range(0, len(rewards), RECENT)]
    best = max(levels)
    last = fmean(rewards[-RECENT:])
    is_noise = best - last < 0.1 * abs(best)  # rewards may be below 0
    if last < (best + min(levels[0], 0.0)) / 2 and not is_noise:
        return [f"the reward fell from {best:.2f} to {last:.2f}: lower --lr or make fewer updates"]
    size = min(RECENT, len(rewards) // 2)
    if size < 5 or now.get("solved", 0.0) > 0.9:
        return []
    early, late = rewards[:size], rewards[-size:]
    noise = math.sqrt((variance(early) + variance(late)) / size)  # standard error of the rise
    first, last = fmean(early), fmean(late)
    if last - first > 2 * noise:
        return []
    change = f"{first:.2f} in the first {size} steps, {last:.2f} in the last {size}"
    hint = "below 2B parameters, 1e-5 to 3e-5 worked best (ten times that with LoRA)"
    if flags["model"] in BUILT_IN:
        hint = "the default for built-in policies is 2e-4"
    return [f"the reward isn't rising ({change}). The usual cause is --lr {flags['lr']:g}; {hint}"]
