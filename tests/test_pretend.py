"""train.py on a pretended CUDA device (pretend.py), each run in a process of its own: nothing mixes
devices, and a float32 run has the metrics of the CPU."""

import shutil
from pathlib import Path

import pytest

from forks import fork, program
from tools import BASE, ROOT, command_line, good, metrics

pytestmark = pytest.mark.usefixtures("place")

PROGRAM = """
import runpy, sys

sys.argv[:1] = []
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CASES = {
    "ppo": "--dtype float32 --algo ppo --kl-coef 0.1 --gradient-checkpointing",
    "experts": "--dtype float32 --model models/moe --algo grpo --routing-replay --stale-steps 2",
    "lora": "--dtype float32 --lora-rank 4 --algo dapo --overlong-filter --entropy-coef 0.01",
    "bf16": "--dtype bfloat16 --algo gspo-token --reward pay.py:steps --tis-cap 2",
}


def pretended(runs, flags, source=ROOT):
    """Return the exit status of a run on the device, and its stderr."""
    arguments = [str(source / "train.py"), *command_line(runs, flags), "--device", "cuda"]
    out, err = Path("out"), Path("err")
    process = fork(program, PROGRAM, str(ROOT / "tests/pretend.py"), *arguments, out=out, err=err)
    process.join()
    return process.exitcode, err.read_text()


@pytest.mark.parametrize(
    "case", ["ppo", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])]
)
def test_a_run_on_a_pretended_gpu_is_the_one_on_the_cpu(case, tmp_path):
    flags = f"{BASE} {CASES[case]}"
    status, said = pretended(tmp_path / "gpu", flags)
    assert status == 0, said[-3000:]
    assert ", cuda " in Path("out").read_text()
    folder = good(tmp_path / "cpu", flags).folder
    if case == "bf16":
        return
    for row, expected in zip(metrics(tmp_path / "gpu/run"), metrics(folder), strict=True):
        for name in ("reward", "length_mean", "ratio_mean", "grad_norm", "entropy", "loss"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_a_transfer_that_is_missing_is_seen(tmp_path):
    source, there = tmp_path / "source", "torch.tensor(outcomes, device=config.device)"
    source.mkdir()
    for name in ("gspo.py", "rollout.py", "rewards.py", "train.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "support", source / "support")
    text = (source / "train.py").read_text()
    assert text.count(there) == 1
    (source / "train.py").write_text(text.replace(there, "torch.tensor(outcomes)"))
    _, said = pretended(tmp_path / "gpu", f"{BASE} --steps 1 --dtype float32", source)
    assert "same device" in said
