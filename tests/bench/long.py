"""Runs the experiment on long answers, a process a run, and prints its tables.

    python tests/bench/long.py                     # every missing run of the built-in policies
    python tests/bench/long.py --parts main why    # of these parts alone
    python tests/bench/long.py --parts real --real FOLDER  # of a pretrained model
    python tests/bench/long.py --table             # the tables, and no run

A finished run is a line of --out, so the command can be stopped at any time and given again. Delete
lines to repeat runs. docs/results.md, "Long answers", has the plan and the results.
bench_pictures.py --long draws the picture."""

import argparse
import dataclasses
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import gspo  # noqa: E402
from support import tasks  # noqa: E402

STEPS, EVERY, PROMPTS = 16, 4, 128  # rollout steps, between evaluations, held-out prompts
COMPLETIONS = 256  # of a step
# the real model: 64 completions of about 80 tokens, 16 updates a step
REAL = "--prompts-per-step 8 --max-new-tokens 128 --temperature 0.6 --steps 8 --eval-prompts 32"
# fewest and most operations of a chain, by the tokens of a mean answer
LENGTHS = {40: (6, 7), 80: (12, 15), 170: (24, 32), 340: (48, 62)}

WIDE = "--clip-low 0.2 --clip-high 0.2"
ROWS = {  # name -> flags of train.py
    "gspo": "--algo gspo",
    "gspo, 0.2": f"--algo gspo {WIDE}",
    "gspo, 3e-3": "--algo gspo --clip-low 3e-3 --clip-high 3e-3",
    "grpo": "--algo grpo --kl-coef 0",
    "grpo, no clip": "--algo grpo --kl-coef 0 --clip-low 1 --clip-high 1e9",
    "grpo, gspo's clip": "--algo r-stops-at-s",
    "gspo, grpo's clip": "--algo s-stops-at-r",
    "dapo's loss": "--algo dapo --no-dynamic-sampling --overlong-cache 0",
    "cispo": "--algo cispo",
    "sapo": "--algo sapo",
    "gmpo": "--algo gmpo",
    "luspo": "--algo luspo",
    "dr-grpo": "--algo dr-grpo",
    "reinforce": "--algo reinforce",
}
BASIC = ("gspo", "gspo, 0.2", "grpo")
WHY = {  # weight of a token's gradient -> without a stop, with GRPO's clip, with GSPO's
    "r": ("grpo, no clip", "grpo", "grpo, gspo's clip"),
    "s": ("gspo, 0.2", "gspo, grpo's clip", "gspo"),
}
BETWEEN = ("grpo, no clip", "grpo, gspo's clip", "gspo, grpo's clip")
OTHERS = ("gspo, 3e-3", "dapo's loss", "cispo", "sapo", "gmpo", "luspo", "dr-grpo", "reinforce")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The settings of a run; its seed is apart."""

    row: str
    lr: float
    updates: int = 16  # of a step
    tokens: int = 80  # of a mean answer
    more: str = ""  # further flags
    task: str = "chains"

    def flags(self, real: Path) -> list[str]:
        """real: a folder with a pretrained model, for the task "numbers"."""
        found = f"{ROWS[self.row]} --lr {self.lr:g} {self.more} --eval-every {EVERY} "
        found += "--eval-samples 0 --save-every 0 "
        if self.task == "chains":
            found += f"--task chains --steps {STEPS} --eval-prompts {PROMPTS} "
            found += f"--completions-per-update {COMPLETIONS // self.updates}"
        else:
            found += f"{REAL} --model {real.resolve()} --data train.jsonl --eval-data test.jsonl "
            found += f"--reward {__file__}:counted --completions-per-update {64 // self.updates}"
        return found.split()


def grid(rows, rates, **others) -> list[Experiment]:
    return [Experiment(row, lr, **others) for row, lr in itertools.product(rows, rates)]


# name -> experiments, seeds; in the order of their importance
PARTS = {
    "main": (grid(BASIC, (4e-4, 2e-4, 1e-4)), 5),
    "why": (grid(BETWEEN, (4e-4,)), 5),
    "others": (grid(OTHERS, (4e-4,)), 3),
    "longer": (grid(BASIC, (1e-4,), tokens=170), 3),
    "updates": (grid(BASIC, (4e-4,), updates=4), 3),
    "sampler": (grid(BASIC, (2e-4,), more="--dtype bfloat16 --old-logprobs sampler"), 3),
    "shorter": (grid(BASIC, (4e-4, 2e-4), tokens=40), 3),
    "others-slow": (grid(OTHERS, (2e-4,)), 3),
    "experts": (
        grid(BASIC, (2e-4,), more="--model tiny-moe")
        + grid(BASIC, (2e-4,), more="--model tiny-moe --routing-replay"),
        3,
    ),
    "longer-fast": (grid(BASIC, (2e-4,), tokens=170), 3),
    "longest": (grid(BASIC, (5e-5,), tokens=340), 3),  # this and the next: planned later
    "real": (grid(BASIC, (1e-5,), tokens=80, task="numbers"), 3),
    "others-slowest": (grid(OTHERS, (1e-4,)), 3),
    "others-updates": (grid(OTHERS, (4e-4,), updates=4), 3),
    "norm": (grid(BASIC, (4e-4,), more="--max-grad-norm 0.03"), 3),  # not in the plan
}
METRICS = ("clip_fraction", "policy_kl", "grad_norm", "entropy", "length_mean", "truncated")


# ---- the real model's task -----------------------------------------------------------------------


def write_numbers(folder: Path) -> None:
    """Write train.jsonl and test.jsonl: questions for 14 to 20 numbers in a row, up or down."""
    rng, rows = random.Random(0), []
    for first, count in itertools.product(range(1, 80), range(14, 21)):
        last = first + count - 1
        prompt = f"List the numbers from {first} to {last}, separated by commas."
        rows.append({"prompt": prompt, "answer": [first, last]})
        prompt = f"Count down from {last} to {first}. Separate the numbers by commas."
        rows.append({"prompt": prompt, "answer": [last, first]})
    rng.shuffle(rows)
    for name, part in (("test", rows[:32]), ("train", rows[32:])):
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def counted(completion: str, answer: list[int]) -> float:
    """Return the share of the numbers that come first and in order. One more number halves it."""
    first, last = answer
    step = 1 if last > first else -1
    expected = list(range(first, last + step, step))
    found = [int(number) for number in re.findall("[0-9]{1,4}", completion)]
    if found[:2] == [first, last]:  # "The numbers from 4 to 23 are: 4, 5 ..."
        found = found[2:]
    right = 0
    for number, next_one in zip(found, expected):
        if number != next_one:
            break
        right += 1
    return right / len(expected) / (2 if len(found) > len(expected) else 1)


# ---- one run -------------------------------------------------------------------------------------


def child(tokens: int, flags: list[str]) -> int:
    """Run train.py with chains of another length, and with two more algorithms."""
    tasks.TASKS["chains"] = tasks.chains(LENGTHS[tokens])
    gspo.ALGOS["r-stops-at-s"] = gspo.Algorithm(mixed("token", "completion"))
    gspo.ALGOS["s-stops-at-r"] = gspo.Algorithm(mixed("completion", "token"))
    import train  # it reads both tables as it is imported

    return train.main(flags)


def mixed(weight: str, stop: str):
    """Return a loss between GSPO and GRPO.

    weight: of a token's gradient, its own ratio r ("token") or the completion's s ("completion").
    stop: the gradient of a token ends where r leaves 0.8 to 1.2 ("token"), or the gradient of a
    completion ends where s leaves GSPO's band ("completion").
    ("token", "token") is GRPO, ("completion", "completion") is GSPO."""

    def loss(logprobs, old_logprobs, advantages, mask, denom=None):
        log_ratio = torch.where(mask > 0, logprobs - old_logprobs.detach(), 0.0)
        advantages = gspo.as_columns(advantages)
        ratio = log_ratio.exp().detach()  # r, (N, T)
        s = gspo.completion_mean(log_ratio, mask).exp().detach()  # (N, 1)
        tested, low, high = (ratio, 0.8, 1.2) if stop == "token" else (s, 1 - 3e-4, 1 + 4e-4)
        stopped = (advantages > 0) & (tested > high) | (advantages < 0) & (tested < low)
        one = (log_ratio - log_ratio.detach()).exp()  # 1, with the token's gradient
        objective = (ratio if weight == "token" else s) * one * advantages
        objective = torch.where(stopped, objective.detach(), objective)
        mean = -gspo.masked_mean(objective, mask, "completion", denom)
        told = (log_ratio, stopped.expand_as(mask), advantages, mask, "completion", denom)
        return mean, gspo.policy_metrics(*told)

    return loss


def train(experiment: Experiment, seed: int, real: Path) -> dict:
    """Run train.py to its end, and return the numbers that the tables need."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w") as log:
        if experiment.task == "numbers":
            write_numbers(Path(folder))
        command = ["nice", "-n", "10", sys.executable, __file__, "--child", str(experiment.tokens)]
        command += [*experiment.flags(real), "--seed", str(seed), "--runs", folder, "--name", "one"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=log, stderr=log, cwd=folder, env=environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {Path(folder, 'log').read_text()[-2000:]}")
        metrics = read_rows(Path(folder, "one/metrics.jsonl"))
        before = read_rows(Path(folder, "one/starts.jsonl"))[0]["eval_solved"]
    solved = {row["step"]: row["eval_solved"] for row in metrics if "eval_solved" in row}
    found = dataclasses.asdict(experiment) | {"seed": seed, "solved": {0: before} | solved}
    for name in METRICS:  # of every step
        found[name] = [float(f"{row.get(name, 0.0):.3g}") for row in metrics]
    return found | {"seconds": round(time.monotonic() - begun)}


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def grouped(rows: list[dict]) -> dict[Experiment, list[dict]]:
    """Return experiment -> its runs, by seed."""
    names = [field.name for field in dataclasses.fields(Experiment)]
    found: dict[Experiment, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        settings = {name: row[name] for name in names if name in row}
        found.setdefault(Experiment(**settings), []).append(row)
    return found


def train_missing(arguments: argparse.Namespace) -> None:
    """Append a line to --out for each run that it does not hold: all experiments of a part with one
    seed, then the next seed."""
    done = grouped(read_rows(arguments.out))
    left = []
    for experiments, count in map(PARTS.get, arguments.parts):
        for seed, experiment in itertools.product(arguments.seeds or range(count), experiments):
            if all(run["seed"] != seed for run in done.get(experiment, [])):
                left.append((experiment, seed))
    print(len(left), "runs are missing", flush=True)

    def work(experiment: Experiment, seed: int) -> bool:
        try:
            found = train(experiment, seed, arguments.real)
        except RuntimeError as error:
            print(error, flush=True)
            return False
        with open(arguments.out, "a") as file:
            file.write(json.dumps(found) + "\n")
        said = " ".join(f"{100 * share:.0f}" for share in found["solved"].values())
        print(f"{experiment}, seed {seed}: {said} ({found['seconds']} s)", flush=True)
        return True

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:  # Ctrl-C also ends train.py, after its step
        ended = list(pool.map(work, *zip(*left)))
    if not all(ended):
        sys.exit(f"{ended.count(False)} runs failed")


# ---- tables --------------------------------------------------------------------------------------


def at_end(run: dict) -> float:
    """Return the outcome of a run: held-out percent, mean of the last two evaluations."""
    return 50 * sum(list(run["solved"].values())[-2:])


def mean_drift(run: dict) -> float:
    return statistics.fmean(run["policy_kl"])


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.0f} ({min(values):.0f}–{max(values):.0f})"


def table(runs: dict[Experiment, list[dict]]) -> str:
    """Return held-out percent by step, mean (lowest to highest seed). Clip fraction, drift and norm
    are means over steps and seeds. Entropy and length are those of the last step."""
    steps = [str(step) for step in range(0, STEPS + 1, EVERY)]
    head = ["", "lr", "seeds", "start", *[f"step {step}" for step in steps[1:]]]
    head += ["clipped", "`policy_kl`", "`grad_norm`", "entropy", "length"]
    lines = [head, ["---"] * len(head)]
    for given, seeds in runs.items():
        name = f"`{given.row}`" + ", real model" * (given.task == "numbers")
        name += f" {given.more}" * bool(given.more)
        name += f", {given.updates} updates" * (given.updates != 16)
        name += f", {given.tokens} tokens" * (given.tokens != 80)
        line = [name, f"{given.lr:.0e}".replace("e-0", "e-"), str(len(seeds))]
        for step in steps:
            at_step = [100 * run["solved"][step] for run in seeds if step in run["solved"]]
            line.append(spread(at_step) if at_step else "")
        for metric, digits in (
            ("clip_fraction", ".2%"),
            ("policy_kl", ".4f"),
            ("grad_norm", ".2f"),
        ):
            line.append(f"{statistics.fmean(x for run in seeds for x in run[metric]):{digits}}")
        for metric, digits in (("entropy", ".2f"), ("length_mean", ".0f")):
            line.append(f"{statistics.fmean(run[metric][-1] for run in seeds):{digits}}")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def permutation_p(differences: list[float]) -> float:
    """Return the exact two-sided p: the share of choices of signs whose sum is as far from 0."""
    seen = abs(sum(differences))
    signs = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * each for sign, each in zip(some, differences))) for some in signs]
    return sum(each >= seen - 1e-9 for each in sums) / len(sums)


def compare(first: list[dict], second: list[dict], outcome=at_end) -> str:
    """Compare the outcomes of two rows, paired by seed."""
    ends = [{run["seed"]: outcome(run) for run in runs} for runs in (first, second)]
    gaps = [ends[0][seed] - ends[1][seed] for seed in sorted(ends[0].keys() & ends[1].keys())]
    if not gaps:
        return "no common seed"
    apart = min(ends[0].values()) > max(ends[1].values())
    apart |= max(ends[0].values()) < min(ends[1].values())
    said = f"{statistics.fmean(gaps):+.1f} points, by seed {', '.join(f'{x:+.0f}' for x in gaps)}"
    return f"{said}; p {permutation_p(gaps):.3f}; ranges {'apart' if apart else 'overlap'}"


def verdicts(runs: dict[Experiment, list[dict]]) -> str:
    """Compare gspo with every other row of the same settings."""
    lines = []
    for given, seeds in runs.items():
        ours = runs.get(dataclasses.replace(given, row="gspo"))
        if ours and given.row != "gspo":
            where = f"{given.lr:g} x{given.updates} {given.tokens} tokens {given.more}"
            lines.append(f"gspo - {given.row}, {where}: {compare(ours, seeds)}")
    return "\n".join(lines)


def ranks(values: list[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def why(runs: dict[Experiment, list[dict]]) -> str:
    """Return the table of weight by stop at 4e-4: outcome, `policy_kl` of the first step and of all
    16. Then compare neighbours in a column, in a row, and rows as means over both clips."""
    lines = ["| weight | no stop | GRPO's clip | GSPO's clip |", "| --- | --- | --- | --- |"]
    rows = {name: runs.get(Experiment(name, 4e-4)) for name in ROWS}
    if not all(rows[name] for names in WHY.values() for name in names):
        return ""
    for weight, names in WHY.items():
        line = []
        for name in names:
            first = statistics.fmean(run["policy_kl"][0] for run in rows[name])
            drift = statistics.fmean(map(mean_drift, rows[name]))
            ends = spread([at_end(run) for run in rows[name]])
            line.append(f"{ends}, {first:.4f}, {drift:.4f}")
        lines.append(f"| {weight} | {' | '.join(line)} |")
    lines.append("")
    pairs = list(zip(WHY["s"], WHY["r"]))
    pairs += [pair for names in WHY.values() for pair in itertools.combinations(names[::-1], 2)]
    for one, other in pairs:
        lines.append(f"{one} - {other}: {compare(rows[one], rows[other])}")
        drift = compare(rows[one], rows[other], lambda run: 1e4 * mean_drift(run))
        lines.append(f"    1e4 policy_kl: {drift}")
    both = {}  # weight -> means of both clips, by seed
    for weight, (_, *names) in WHY.items():
        clips = zip(*(map(at_end, rows[name]) for name in names))
        both[weight] = [statistics.fmean(ends) for ends in clips]
    gaps = [one - other for one, other in zip(both["s"], both["r"])]
    said = f"{statistics.fmean(gaps):+.1f} points, p {permutation_p(gaps):.3f}"
    lines.append(f"s - r, mean of both clips: {said}")
    there = [row for row in rows.values() if row]
    ends = [statistics.fmean(map(at_end, row)) for row in there]
    for steps in (4, STEPS):
        drifts = [
            statistics.fmean(x for run in row for x in run["policy_kl"][:steps]) for row in there
        ]
        correlation = statistics.correlation(ranks(drifts), ranks(ends))
        said = f"policy_kl of {steps} steps with the outcome, {len(there)} rows"
        lines.append(f"rank correlation of {said}: {correlation:.2f}")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(int(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    without_model = [part for part in PARTS if part != "real"]
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=without_model)
    parser.add_argument("--seeds", nargs="+", type=int, help="default: as the plan says")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/runs/long/rows.jsonl")
    parser.add_argument("--real", type=Path, default=Path("real"), help="folder of a real model")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--table", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        train_missing(arguments)
    found = grouped(read_rows(arguments.out))
    print(table(found), verdicts(found), why(found), sep="\n\n")


if __name__ == "__main__":
    main()
