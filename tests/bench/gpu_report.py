"""Measure this project on your GPU in about ten minutes, and print a Markdown block.

    python tests/bench/gpu_report.py

It runs the tests that need a GPU. It compares `generate` with transformers' (bench_rollout.py),
times a real training step by phase, and compares its memory with the counted memory. Weights are
random: nothing is downloaded. If a part fails, the block says so and the others continue."""

import subprocess
import sys
import time
import traceback

import torch
import transformers

import common
from bench_memory import GB, SHAPES, count_deep, measure


def gpu_tests() -> str:
    """Run the tests that are skipped where there is no GPU."""
    return output("-m", "pytest", "-q", "-k", "on_a_gpu", "tests").splitlines()[-1]


def sampling() -> str:
    return output("tests/bench/bench_rollout.py", "--model", "qwen3-0.6b", "--rows", "64")


def output(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=common.ROOT, capture_output=True, text=True, timeout=400
    )
    return (done.stdout or done.stderr[-2000:]).strip()


def training() -> str:
    """Return the seconds of the phases of the second step, and its memory beside the counted."""
    lines = [["trained", "seconds by phase", "tokens/s", "measured, GB", "counted, GB"]]
    for trained, rank in (("all", 0), ("LoRA", 16)):
        row = measure("0.6B", "--device", "cuda", "--lora-rank", str(rank))
        phases = [f"{key[8:]} {row[key]:.2f}" for key in row if key.startswith("seconds_")]
        counted = count_deep(SHAPES["0.6B"], rank).peak / GB
        line = [trained, ", ".join(phases), f"{row['tokens_per_second']:.0f}"]
        lines.append([*line, f"{row['memory_gb']:.2f}", f"{counted:.2f}"])
    return common.markdown(*lines)


PARTS = {"Tests that need a GPU": gpu_tests, "Sampling": sampling, "A training step": training}


def main() -> int:
    common.parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU here")
        return 2
    card = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{card.name}, {card.total_memory / GB:.0f} GB, {versions}")
    failed = False
    for title, part in PARTS.items():
        begun = time.perf_counter()
        try:
            text = part()
        except Exception as error:  # whatever it is: the other parts are worth having
            traceback.print_exc()
            text, failed = f"failed: {type(error).__name__}: {str(error)[:200]}", True
        print(f"\n**{title}** ({time.perf_counter() - begun:.0f} s)\n\n{text}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
