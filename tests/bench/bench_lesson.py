"""Measure the numbers in docs/from-ppo-to-gspo.md that no other benchmark covers, on one CPU core.

python tests/bench/bench_lesson.py variance  # of one completion's gradient, by length and by weight
python tests/bench/bench_lesson.py variants  # GSPO without its root
python tests/bench/bench_lesson.py stops     # how far s is from 1 where GSPO doesn't clip
"""

import collections
import dataclasses
import itertools
import statistics

import torch
import transformers

import common
import gspo
from gspo import as_columns, completion_mean, masked_mean, policy_metrics
from rollout import completion_logprobs, generate, micro_batches
from support.models import end_and_pad_ids
from support.pretrain import built_in_policy
from support.tasks import TASKS, chain_problem, problems

# ---- GSPO without its root, and what its clip lets through ---------------------------------------


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


# ---- variance of the gradient --------------------------------------------------------------------

BUCKETS = ((8, 15), (16, 25), (26, 37), (38, 52))  # tokens of a completion
PROMPTS, GROUP_SIZE, MOST_TOKENS, LR = 32, 8, 80, 2e-4


def steps_of_training(steps: int, seed: int):
    """Train the built-in policy with GSPO's defaults on chains of 1 to 8 operations. Yields it
    after the updates of each step, with the rollout, old_logprobs and advantages."""
    task = TASKS["arithmetic"]._replace(problem=lambda rng: chain_problem(rng, (1, 8)))
    folder = built_in_policy(task, "tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    endings, stream = end_and_pad_ids(policy, tokenizer), problems(task, seed)
    torch.manual_seed(seed)
    for _ in range(steps):
        asked = list(itertools.islice(stream, PROMPTS))
        prompts = [tokenizer.encode(problem["prompt"]) for problem in asked]
        rollout = generate(policy, prompts, torch.rand(PROMPTS, GROUP_SIZE, MOST_TOKENS), **endings)
        texts = tokenizer.batch_decode(rollout.completions, skip_special_tokens=True)
        answers = [problem["answer"] for problem in asked for _ in range(GROUP_SIZE)]
        rewards = [float(text.endswith(f"#{right}")) for text, right in zip(texts, answers)]
        advantages = gspo.group_advantages(torch.tensor(rewards), GROUP_SIZE)
        groups = torch.arange(len(texts)).view(PROMPTS, GROUP_SIZE)[torch.randperm(PROMPTS)]
        updates = [micro_batches(rollout, rows.flatten(), 16384, False) for rows in groups.chunk(4)]
        with torch.no_grad():
            old_logprobs = torch.zeros_like(rollout.sampler_logprobs)
            for part in itertools.chain.from_iterable(updates):
                old_logprobs[part.rows], _ = completion_logprobs(policy, part.rollout, 1.0)
        for parts in updates:
            optimizer.zero_grad()
            for part in parts:
                own, mask = part.rows, part.rollout.completion_mask
                logprobs, _ = completion_logprobs(policy, part.rollout, 1.0)
                loss, _ = gspo.gspo_loss(
                    logprobs, old_logprobs[own], advantages[own], mask, denom=len(texts) / 4
                )
                loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        yield policy, rollout, old_logprobs, advantages


def weights(log_ratio: torch.Tensor, advantage: float) -> dict[str, torch.Tensor]:
    """Weights of a token's A grad log pi, () or (T,) each."""
    ratio = log_ratio.exp()
    stopped = (ratio > 1.2) if advantage > 0 else (ratio < 0.8)
    return {
        "1": torch.tensor(1.0),
        "r_t": ratio,
        "r_t under GRPO's clip": torch.where(stopped, 0.0, ratio),
        "product": log_ratio.sum().exp(),
        "s": log_ratio.mean().exp(),
    }


def variance(seeds: list[int]) -> None:
    """Print the variance of one completion's gradient, (1 / L) sum_t weight A grad log pi, by
    length, relative to that of the same gradient without a weight. Steps 7 to 14 of a run."""
    for seed in seeds:
        counts, totals = collections.Counter(), collections.defaultdict(float)
        squares = collections.defaultdict(list)
        for step in itertools.islice(steps_of_training(14, seed), 6, None):
            policy, rollout, old_logprobs, advantages = step
            parameters = list(policy.parameters())
            for row in (advantages != 0).nonzero()[:, 0].tolist():
                mask, advantage = rollout.completion_mask[row], float(advantages[row])
                length = int(mask.sum())
                bucket = next((each for each in BUCKETS if each[0] <= length <= each[1]), None)
                if bucket is None:
                    continue
                counts[bucket] += 1
                logprobs = completion_logprobs(policy, rollout.select([row]), 1.0)[0][0][mask]
                log_ratio = logprobs.detach() - old_logprobs[row][mask]
                for name, weight in weights(log_ratio, advantage).items():
                    objective = (weight * advantage * logprobs).mean()
                    parts = torch.autograd.grad(objective, parameters, retain_graph=True)
                    gradient = torch.cat([each.flatten() for each in parts])
                    totals[bucket, name] = totals[bucket, name] + gradient
                    squares[bucket, name].append(float(gradient.square().sum()))
        for bucket in BUCKETS:
            found, said = {}, []
            for name in weights(torch.zeros(1), 1.0):
                count, own = counts[bucket], squares[bucket, name]
                mean = totals[bucket, name] / count
                found[name] = sum(own) / count - float(mean.square().sum())
                relative, largest = found[name] / found["1"], max(own) / sum(own)
                said.append(f"{name}: {relative:.2f} ({largest:.0%} of it one completion)")
            print(f"seed {seed}, {bucket[0]} to {bucket[1]} tokens, {count}:", "; ".join(said))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("measured", choices=("variance", "variants", "stops"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    {"variants": variants, "stops": stops, "variance": variance}[given.measured](given.seeds)


if __name__ == "__main__":
    main()
