"""Measure the numbers of docs/from-ppo-to-gspo.md that no other benchmark has, on one CPU core.

python tests/bench/bench_lesson.py variance  # of the gradient, by length and by weight
python tests/bench/bench_lesson.py variants  # GSPO without its root
python tests/bench/bench_lesson.py stops     # how far s is from 1 where GSPO does not clip
"""

import collections
import statistics

import torch

import common
import gspo
import rollout
import train
from bench_pictures import sampled, short_run
from gspo import as_columns, completion_mean, masked_mean, policy_metrics

# ---- GSPO without its root -----------------------------------------------------------------------


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
    objective = torch.min(unclipped, clipped) / length.clamp(min=1)
    loss = -masked_mean(objective, mask, "completion", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def trained(loss, flags: str, seed: int) -> list[dict]:
    """Train with a loss in the place of gspo_loss. Return the metrics."""
    gspo.ALGOS["gspo"] = gspo.Algorithm(loss)
    flags = f"--algo gspo --seed {seed} --eval-samples 0 --save-every 0 {flags}"
    _, metrics = common.train(flags.split())
    return metrics


def variants(seeds: list[int]) -> None:
    """Print a line per variant: means over seeds, of 50 steps."""
    for name, loss, flags in (
        ("gspo", gspo.gspo_loss, ""),
        ("without 1 / length, the same band", rootless_loss, ""),
        ("without 1 / length, 0.2", rootless_loss, "--clip-low 0.2 --clip-high 0.2"),
    ):
        found = collections.defaultdict(list)
        for seed in seeds:
            steps = trained(loss, f"{flags} --eval-every 10", seed)
            found["after 10"].append(steps[9]["eval_solved"])
            found["after 50"].append(steps[-1]["eval_solved"])
            for metric in ("clip_fraction", "policy_kl"):
                found[metric].append(statistics.fmean(step[metric] for step in steps))
        parts = [f"{key} {statistics.fmean(values):.4g}" for key, values in found.items()]
        print(f"{name}: {', '.join(parts)}; seeds after 50: {found['after 50']}")


# ---- the completions that GSPO's clip lets through ----------------------------------------------


def stops(seeds: list[int]) -> None:
    """Print, for the default run, the share of completions with A != 0 that the clip stops, and the
    distance |s - 1| of the others."""
    first, later = [], []  # updates: pairs (|s - 1|, whether it is stopped)

    def noting_loss(
        logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=3e-4, clip_high=4e-4
    ):
        if logprobs.requires_grad:
            a = completion_mean(as_columns(advantages), mask)
            s = completion_mean(logprobs.detach() - old_logprobs, mask).exp()
            stopped = (a > 0) & (s > 1 + clip_high) | (a < 0) & (s < 1 - clip_low)
            noted = first if (s == 1).all() else later
            noted += zip((s - 1).abs()[a != 0].tolist(), stopped[a != 0].tolist())
        return gspo.gspo_loss(logprobs, old_logprobs, advantages, mask, denom)

    for seed in seeds:
        trained(noting_loss, "--eval-every 0", seed)
    for title, rows in (("all updates", first + later), ("after the first", later)):
        through = [distance for distance, stopped in rows if not stopped]
        share, cut = 1 - len(through) / len(rows), statistics.quantiles(through, n=10)[-1]
        print(f"{title}: {len(rows)} completions, {share:.1%} stopped, 90% of the others: ", end="")
        print(f"|s - 1| below {cut:.5f}")


# ---- variance of the gradient --------------------------------------------------------------------

BUCKETS = ((8, 15), (16, 25), (26, 37), (38, 52))  # tokens of a completion


def weights(log_ratio: torch.Tensor, advantage: float) -> dict[str, torch.Tensor]:
    """Return weights of a token's A grad log pi, each () or (T,)."""
    ratio = log_ratio.exp()
    stopped = (ratio > 1.2) if advantage > 0 else (ratio < 0.8)
    return {
        "1": torch.tensor(1.0),
        "r_t": ratio,
        "r_t in 0.8 to 1.2": torch.where(stopped, 0.0, ratio),
        "s": log_ratio.mean().exp(),
        "product": log_ratio.sum().exp(),
    }


def gradients(run, step_data, row: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the gradient of one completion's objective, (1 / L) sum of weight A grad log pi, for
    each weight, and its log-ratios."""
    policy, batch = run.models.policy.module, step_data.batch
    mask, advantage = batch.mask[row], float(step_data.advantages[row])
    logprobs = rollout.completion_logprobs(policy, batch.rollout.select([row]), 1.0)[0][0][mask]
    log_ratio = logprobs.detach() - step_data.constants.old_logprobs[row][mask]
    parameters, found = list(policy.parameters()), {}
    for name, weight in weights(log_ratio, advantage).items():
        objective = (weight * advantage * logprobs).mean()
        parts = torch.autograd.grad(objective, parameters, retain_graph=True)
        found[name] = torch.cat([each.flatten() for each in parts])
    return found, log_ratio


def variance(_) -> None:
    """Print, for chains of 1 to 8 operations, the variance of one completion's gradient by length,
    relative to that of the same gradient without a weight."""
    log_ratios = {bucket: [] for bucket in BUCKETS}
    totals, squares = collections.defaultdict(float), collections.defaultdict(list)
    with short_run() as run:
        for step in range(1, 15):
            step_data = sampled(run, step)
            train.improve(run, *step_data)
            active = torch.cat([update.active_rows for update in step_data.updates]).tolist()
            for row in active if step > 6 else []:
                length = int(step_data.batch.mask[row].sum())
                for bucket in [(low, high) for low, high in BUCKETS if low <= length <= high]:
                    found, log_ratio = gradients(run, step_data, row)
                    log_ratios[bucket].append(log_ratio)
                    for name, gradient in found.items():
                        totals[bucket, name] = totals[bucket, name] + gradient
                        squares[bucket, name].append(float(gradient.square().sum()))
    for bucket, rows in log_ratios.items():
        print(f"{bucket[0]} to {bucket[1]} tokens, {len(rows)} completions; medians:")
        typical = {
            "furthest token": [row.abs().max() for row in rows],
            "log s": [row.mean() for row in rows],
            "log of the product": [row.sum() for row in rows],
        }
        for title, values in typical.items():
            print(f"  {title} {float(torch.stack(values).abs().median()):.4f}")
        parts, variances = [], {}
        for name in found:
            mean, total = totals[bucket, name] / len(rows), sum(squares[bucket, name])
            variances[name] = total / len(rows) - float(mean.square().sum())
            share, of_one = variances[name] / variances["1"], max(squares[bucket, name]) / total
            parts.append(f"{name}: {share:.2f} ({of_one:.0%} of it one completion)")
        print("  variance:", "; ".join(parts))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("measured", choices=("variance", "variants", "stops"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    {"variants": variants, "stops": stops, "variance": variance}[given.measured](given.seeds)


if __name__ == "__main__":
    main()
