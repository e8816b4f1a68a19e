"""train.py on a pretended CUDA device (pretend.py), each run in a process of its own: nothing mixes
devices, and a float32 run has the metrics of the CPU."""

from pathlib import Path

import pytest

from forks import fork, program
from tools import BASE, ROOT, command_line, good, metrics

pytestmark = pytest.mark.usefixtures("place")

PROGRAM = f"""
import runpy, sys
sys.argv[0] = {str(ROOT / "tests/pretend.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SIZES = "--steps 1 --prompts-per-step 2 --eval-prompts 2 --max-new-tokens 6"
FAST = "--dtype float32 --algo ppo --kl-coef 0.1"
SLOW = [
    "--dtype float32 --model models/moe --algo grpo --routing-replay --stale-steps 2",
    "--dtype float32 --lora-rank 4 --algo dapo --overlong-filter --entropy-coef 0.01",
    "--dtype bfloat16 --algo gspo-token --reward pay.py:steps --tis-cap 2",
]


def pretended(folder, *arguments, nice=0):
    """A program on the device, which prints to two files of the folder."""
    out, err = folder / "gpu-out", folder / "gpu-err"
    words = map(str, arguments)
    return fork(program, PROGRAM, *words, out=out, err=err, folder=folder, nice=nice)


def run_on_the_gpu(folder, case, nice=0):
    flags = f"{BASE} {SIZES} {case}"
    words = command_line(folder / "gpu", flags, "--device", "cuda")
    process = pretended(folder, ROOT / "train.py", *words, nice=nice)
    return folder, process


def begin(folder):
    """Start the fast case, which runs beside the other tests."""
    return {FAST: run_on_the_gpu(folder, FAST, nice=19)}


CASES = [pytest.param(FAST, marks=pytest.mark.last)]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_pretended_gpu_is_the_one_on_the_cpu(case, begun, place, tmp_path):
    started = begun[__name__].get(case)
    if started is None:
        started = run_on_the_gpu(place, case)
    there, process = started
    process.join()
    out = (there / "gpu-out").read_text()
    said = (there / "gpu-err").read_text()
    assert process.exitcode == 0 and ", cuda " in out, said[-3000:]
    if "bfloat16" in case:
        return
    flags = f"{BASE} {SIZES} {case}"
    folder = good(tmp_path / "cpu", flags).folder
    for row, expected in zip(metrics(there / "gpu/run"), metrics(folder), strict=True):
        for name in ("reward", "length_mean", "ratio_mean", "grad_norm", "entropy", "loss"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


def test_a_transfer_that_is_missing_is_seen(place):
    lines = ("import torch", "there = torch.ones(2, device='cuda')", "there + torch.ones(2)")
    Path("mixed.py").write_text("\n".join(lines))
    pretended(place, "mixed.py").join()
    said = Path("gpu-err").read_text()
    assert "same device" in said and "line 3" in said
