"""Runs the experiment on learning rates, a process a run.

    python tests/bench/long.py                     # every missing run
    python tests/bench/long.py --parts rates norm  # of these parts alone

A finished run is a line of --out, so the command can be stopped at any time and given again. Delete
lines to repeat runs. docs/results.md, "Learning rates", has the plan and the results."""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from support import tasks  # noqa: E402

STEPS, EVERY, PROMPTS = 16, 4, 256  # rollout steps, between evaluations, held-out prompts
COMPLETIONS = 16  # of an update: 256 of a step make 16 updates
WARM_STARTS = 5  # a seed of runs uses warm start seed % 5: other demonstrations, other weights
SEEDS = tuple(range(100, 110))  # in this order each warm start is used once, then once more
# fewest and most operations of a chain, by the tokens of a mean answer
LENGTHS = {80: (12, 15), 170: (24, 32)}

ROWS = {  # name -> flags of train.py
    "gspo": "--algo gspo",
    "gspo, 3e-3": "--algo gspo --clip-low 3e-3 --clip-high 3e-3",
    "gspo, 0.2": "--algo gspo --clip-low 0.2 --clip-high 0.2",
    "luspo": "--algo luspo",
    "grpo": "--algo grpo --kl-coef 0",
    "dapo's loss": "--algo dapo --no-dynamic-sampling --overlong-cache 0",
    "dr-grpo": "--algo dr-grpo",
    "cispo": "--algo cispo",
    "gmpo": "--algo gmpo",
    "sapo": "--algo sapo",
    "reinforce": "--algo reinforce",
}
MAIN = tuple(ROWS)[:5]
OTHERS = tuple(ROWS)[5:]
RATES = (1e-4, 2e-4, 2.8e-4, 4e-4, 5.6e-4, 8e-4)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The settings of a run; its seed is apart."""

    row: str
    lr: float
    tokens: int = 80  # of a mean answer
    more: str = ""  # further flags


def grid(rows, rates, **others) -> list[Experiment]:
    return [Experiment(row, lr, **others) for row, lr in itertools.product(rows, rates)]


# name -> experiments, seeds; in the order of their importance
PARTS = {
    "rates": (grid(MAIN, RATES), SEEDS),
    "norm": (grid(("gspo", "grpo"), (4e-4, 5.6e-4), more="--max-grad-norm 0.03"), SEEDS),
    "longer": (grid(MAIN, (5e-5, 1e-4, 2e-4), tokens=170), SEEDS),
    "others": (grid(OTHERS, RATES), SEEDS[:5]),
}
METRICS = ("clip_fraction", "policy_kl", "grad_norm", "entropy")


# ---- one run -------------------------------------------------------------------------------------


def flags_of(experiment: Experiment, seed: int) -> list[str]:
    flags = f"{ROWS[experiment.row]} --lr {experiment.lr:g} {experiment.more} --seed {seed} "
    flags += f"--task chains --steps {STEPS} --completions-per-update {COMPLETIONS} "
    flags += f"--eval-every {EVERY} --eval-prompts {PROMPTS} --eval-samples 0 --save-every 0 "
    return [*flags.split(), "--warmup-steps", "0"]  # as for a policy that is named tiny


def train_once(experiment: Experiment, seed: int) -> dict:
    """Run train.py to its end, and return the numbers that the tables need."""
    begun, warm = time.monotonic(), seed % WARM_STARTS
    tasks.TASKS["chains"] = tasks.chains(LENGTHS[experiment.tokens])
    policy = tasks.built_in_policy(tasks.TASKS["chains"], "tiny", warm)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", str(policy), *flags_of(experiment, seed), "--runs", folder]
        with open(Path(folder, "log"), "w") as log, contextlib.redirect_stdout(log):
            status = train.main([*flags, "--name", "one"])
        assert status == 0, f"{flags}: {Path(folder, 'log').read_text()[-2000:]}"
        metrics = read_rows(Path(folder, "one/metrics.jsonl"))
        before = read_rows(Path(folder, "one/starts.jsonl"))[0]["eval_solved"]
    solved = {row["step"]: row["eval_solved"] for row in metrics if "eval_solved" in row}
    found = dataclasses.asdict(experiment) | {"seed": seed, "warm": warm}
    found["solved"] = {0: before} | solved
    exact = {name: [row.get(name, 0.0) for row in metrics] for name in METRICS}  # of every step
    # two versions of the code that train the same bits have the same digest
    found["digest"] = hashlib.sha256(repr((found["solved"], exact)).encode()).hexdigest()[:12]
    for name, values in exact.items():
        found[name] = [float(f"{value:.3g}") for value in values]
    return found | {"seconds": round(time.monotonic() - begun)}


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def grouped(rows: list[dict]) -> dict[Experiment, list[dict]]:
    """Return experiment -> its runs, by seed."""
    names = [field.name for field in dataclasses.fields(Experiment)]
    found: dict[Experiment, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(Experiment(**{name: row[name] for name in names}), []).append(row)
    return found


def missing(arguments: argparse.Namespace) -> list[tuple[Experiment, int]]:
    """Return the runs that --out does not hold. All experiments of a part with one seed, in random
    order, come before those with the next seed. So an early end leaves whole blocks."""
    done, left = grouped(read_rows(arguments.out)), []
    for experiments, seeds in map(PARTS.get, arguments.parts):
        for seed in arguments.seeds or seeds:
            block = random.Random(seed).sample(experiments, len(experiments))
            for experiment in block:
                if all(run["seed"] != seed for run in done.get(experiment, [])):
                    left.append((experiment, seed))
    return left


def work(given: tuple[Experiment, int]) -> tuple[dict | None, str]:
    """Return the numbers of a run, or None, and a line about it."""
    os.nice(10)
    experiment, seed = given
    try:
        found = train_once(experiment, seed)
    except Exception as error:  # the other runs go on
        return None, f"{experiment}, seed {seed}: {error!r}"
    said = " ".join(f"{100 * share:.0f}" for share in found["solved"].values())
    return found, f"{experiment}, seed {seed}: {said} ({found['seconds']} s)"


def train_missing(arguments: argparse.Namespace) -> None:
    """Append a line to --out for each run that it does not hold."""
    left, failed = missing(arguments), 0
    print(len(left), "runs are missing", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # a fork for each run: it has a fresh state, and need not import torch again
    with multiprocessing.get_context("fork").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for found, said in pool.imap_unordered(work, left):
            print(said, flush=True)
            failed += found is None
            if found:
                with open(arguments.out, "a") as file:
                    file.write(json.dumps(found) + "\n")
    if failed:
        sys.exit(f"{failed} runs failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: as the plan says")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/runs/rates/rows.jsonl")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    train_missing(parser.parse_args())


if __name__ == "__main__":
    main()
