"""Measure the numbers of docs/from-ppo-to-gspo.md that no other benchmark has, on one CPU core.

    python tests/bench/bench_lesson.py variance  # of the gradient, by length and by weight
    python tests/bench/bench_lesson.py variants  # GSPO without its root, k3 upside down
    python tests/bench/bench_lesson.py stops     # how far s is from 1 where GSPO does not clip

A variant is a row of ALGOS, or another function in the place of ours.
"""

import argparse
import collections
import functools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import gspo  # noqa: E402
from gspo import as_columns, completion_mean, masked_mean, policy_metrics  # noqa: E402

# ---- variants ------------------------------------------------------------------------------------


def rootless_loss(
    logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=3e-4, clip_high=4e-4
):
    """Compute gspo_loss without 1 / length in s: the ratio is a product of L numbers."""
    length = mask.sum(1, keepdim=True)
    log_ratio = length * completion_mean(logprobs - old_logprobs.detach(), mask)
    advantages = completion_mean(as_columns(advantages), mask)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    # its gradient is L times that of s. Divided by L, both are equal at ratio 1
    loss = -masked_mean(
        torch.min(unclipped, clipped) / length.clamp(min=1), mask, "completion", denom
    )
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def upside_down_penalty(logprobs, ref_logprobs, mask, denom=None, per="completion"):
    """Compute k3 with pi / pi_ref, which is upside down."""
    x = torch.where(mask > 0, logprobs - ref_logprobs.detach(), 0.0)
    loss = masked_mean(x.exp() - x - 1, mask, per, denom)
    return loss, {"kl": loss.detach()}


gspo.ALGOS["rootless"] = gspo.Algorithm(rootless_loss)

import rollout  # noqa: E402
import train  # noqa: E402  # after the row above, which --algo then takes
from bench_pictures import sampled, short_run  # noqa: E402

UPSIDE_DOWN = "grpo, KL x 1, upside down"
VARIANTS = {
    "gspo": "--algo gspo",
    "without 1 / length, the same band": "--algo rootless",
    "without 1 / length, 0.2": "--algo rootless --clip-low 0.2 --clip-high 0.2",
    "grpo, KL x 1": "--algo grpo --kl-coef 1",
    UPSIDE_DOWN: "--algo grpo --kl-coef 1",
}


def trained(flags: str, seed: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{flags} --seed {seed} --eval-samples 0 --save-every 0 --runs {folder} --name run"
        if train.main(flags.split()):
            raise SystemExit("the run failed")
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run_variants(seeds: list[int]) -> None:
    """Print a line per variant: means over seeds, of 50 steps."""
    right = gspo.kl_penalty
    for name, flags in VARIANTS.items():
        gspo.kl_penalty = upside_down_penalty if name == UPSIDE_DOWN else right
        found = collections.defaultdict(list)
        for seed in seeds:
            steps = trained(f"{flags} --eval-every 10", seed)
            found["after 10"].append(steps[9]["eval_solved"])
            found["after 50"].append(steps[-1]["eval_solved"])
            for metric in ("clip_fraction", "policy_kl", "kl"):
                found[metric].append(statistics.fmean(step.get(metric, 0) for step in steps))
        parts = [f"{key} {statistics.fmean(values):.4g}" for key, values in found.items()]
        print(f"{name}: {', '.join(parts)}; seeds after 50: {found['after 50']}")


# ---- the completions that GSPO's clip lets through ----------------------------------------------


def stops(seeds: list[int]) -> None:
    """Print, for the default run, the share of completions with A != 0 that the clip stops, and the
    distance |s - 1| of the others."""
    noted = collections.defaultdict(list)  # pairs (|s - 1|, whether it is stopped)

    @functools.wraps(gspo.gspo_loss)
    def noting_loss(logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low, clip_high):
        if logprobs.requires_grad:
            a = completion_mean(as_columns(advantages), mask)
            s = completion_mean(logprobs.detach() - old_logprobs, mask).exp()
            stopped = (a > 0) & (s > 1 + clip_high) | (a < 0) & (s < 1 - clip_low)
            exact = bool((s == 1).all())  # the first update
            noted[exact] += zip((s - 1).abs()[a != 0].tolist(), stopped[a != 0].tolist())
        band = {"clip_low": clip_low, "clip_high": clip_high}
        return gspo.gspo_loss(logprobs, old_logprobs, advantages, mask, denom, **band)

    gspo.ALGOS["gspo"] = gspo.Algorithm(noting_loss)
    for seed in seeds:
        trained("--algo gspo --eval-every 0", seed)
    noted = {"all updates": noted[True] + noted[False], "after the first": noted[False]}
    for title, rows in noted.items():
        through = [distance for distance, stopped in rows if not stopped]
        cuts = statistics.quantiles(through, n=20)
        share = 1 - len(through) / len(rows)
        print(
            f"{title}: {len(rows)} completions, {share:.1%} stopped; |s - 1| of the others: median "
            f"{cuts[9]:.5f}, 90% below {cuts[17]:.5f}, 95% below {cuts[18]:.5f}"
        )


# ---- variance of the gradient --------------------------------------------------------------------

BUCKETS = ((8, 15), (16, 25), (26, 37), (38, 52))  # tokens of a completion


def grpo_clip(log_ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio = log_ratio.exp()
    stopped = (ratio > 1.2) if advantage > 0 else (ratio < 0.8)
    return torch.where(stopped, 0.0, ratio)


WEIGHTS = {  # of a token's A grad log pi, from log-ratios (T,) and A
    "1": lambda d, _: torch.ones_like(d),
    "r_t": lambda d, _: d.exp(),
    "r_t in 0.8 to 1.2": grpo_clip,
    "s": lambda d, _: d.mean().exp().expand_as(d),
    "product": lambda d, _: d.sum().exp().expand_as(d),
}


def gradients(
    run, batch, constants, advantages, row: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the gradient of one completion's objective, (1 / L) sum of weight A grad log pi, for
    each weight, and its log-ratios."""
    policy, mask, advantage = run.models.policy.module, batch.mask[row], float(advantages[row])
    logprobs = rollout.completion_logprobs(policy, batch.rollout.select([row]), 1.0)[0][0][mask]
    log_ratio = logprobs.detach() - constants.old_logprobs[row][mask]
    parameters, found = list(policy.parameters()), {}
    for name, weight in WEIGHTS.items():
        objective = (weight(log_ratio, advantage) * advantage * logprobs).mean()
        parts = torch.autograd.grad(objective, parameters, retain_graph=True)
        found[name] = torch.cat([each.flatten() for each in parts])
    return found, log_ratio


def variance(_) -> None:
    """Print, for chains of 1 to 8 operations, the variance of one completion's gradient by length,
    relative to that of the same gradient without a weight."""
    totals, squares = collections.defaultdict(float), collections.defaultdict(list)
    log_ratios = collections.defaultdict(list)
    with short_run() as run:
        for step in range(1, 15):
            batch, updates, constants, advantages, returns = sampled(run, step)
            train.improve(run, batch, updates, constants, advantages, returns)
            active = torch.cat([update.active for update in updates]).tolist()
            for row in active if step > 6 else []:
                length = int(batch.mask[row].sum())
                bucket = next((b for b in BUCKETS if b[0] <= length <= b[1]), None)
                found, log_ratio = gradients(run, batch, constants, advantages, row)
                for name, gradient in found.items():
                    totals[bucket, name] = totals[bucket, name] + gradient
                    squares[bucket, name].append(float(gradient.square().sum()))
                log_ratios[bucket].append(log_ratio)
    for bucket in BUCKETS:
        count = len(squares[bucket, "1"])
        parts, variances = [], {}
        for name in WEIGHTS:
            mean = totals[bucket, name] / count
            variances[name] = sum(squares[bucket, name]) / count - float(mean.square().sum())
            of_one = max(squares[bucket, name]) / sum(squares[bucket, name])
            share = variances[name] / variances["1"]
            parts.append(f"{name}: {share:.2f} ({of_one:.0%} of it one completion)")
        rows = log_ratios[bucket]
        print(f"{bucket[0]} to {bucket[1]} tokens, {count} completions; medians:")
        typical = {
            "furthest token": [row.abs().max() for row in rows],
            "log s": [row.mean() for row in rows],
            "log of the product": [row.sum() for row in rows],
        }
        for title, values in typical.items():
            print(f"  {title} {float(torch.stack(values).abs().median()):.4f}")
        print("  variance:", "; ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("variance", "variants", "stops"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    {"variants": run_variants, "stops": stops, "variance": variance}[options.what](options.seeds)


if __name__ == "__main__":
    main()
