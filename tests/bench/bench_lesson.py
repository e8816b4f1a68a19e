"""Measure the numbers in docs/from-ppo-to-gspo.md that no other benchmark covers, on one CPU core.

python tests/bench/bench_lesson.py variants  # GSPO without its root
python tests/bench/bench_lesson.py stops     # how far s is from 1 where GSPO doesn't clip
"""

import collections
import dataclasses
import statistics

import torch

import common
import gspo
from gspo import as_columns, completion_mean, masked_mean, policy_metrics


def rootless_loss(
    logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=3e-4, clip_high=4e-4
):
    """gspo_loss without the 1 / length in s: the ratio is a product of L numbers."""
    length = mask.sum(1, keepdim=True)
    log_ratio = length * completion_mean(logprobs - old_logprobs.detach(), mask)
    advantages = completion_mean(as_columns(advantages), mask)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    # the product's gradient is L times that of s; dividing by L makes them equal at ratio 1
    objective = torch.min(unclipped, clipped) / length.clamp(min=1)
    loss = -masked_mean(objective, mask, "completion", denom)
    stopped = clipped < unclipped
    return loss, policy_metrics(log_ratio, stopped, advantages, mask, "completion", denom)


def trained(loss, flags: str, seed: int) -> list[dict]:
    """Train with `loss` in place of gspo_loss and return the metrics."""
    gspo.ALGOS["gspo"] = dataclasses.replace(gspo.ALGOS["gspo"], loss=loss)
    flags = f"--algo gspo --seed {seed} --eval-samples 0 --save-every 0 {flags}"
    return common.train(flags.split())[1]


def variants(seeds: list[int]) -> None:
    """Print one line per variant: means over seeds, of 50 steps each."""
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
            found["clipped"].append(statistics.fmean(step["clip_fraction"] for step in steps))
        parts = [f"{key} {statistics.fmean(values):.4g}" for key, values in found.items()]
        print(f"{name}: {', '.join(parts)}; seeds after 50: {found['after 50']}")


def stops(seeds: list[int]) -> None:
    """Print, for the default run, the fraction of completions with A != 0 that the clip stops, and
    how far s is from 1 for the others."""
    first, later = [], []  # updates: pairs (|s - 1|, stopped)

    def noting_loss(
        logprobs, old_logprobs, advantages, mask, denom=None, *, clip_low=3e-4, clip_high=4e-4
    ):
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


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("measured", choices=("variants", "stops"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    {"variants": variants, "stops": stops}[given.measured](given.seeds)


if __name__ == "__main__":
    main()
