"""train.py on a pretended CUDA device (pretend.py), each run in a process of its own: nothing mixes
devices, decode steps are captured and replayed, and a float32 run says what it says on the CPU."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import BASE, ROOT, command_line, good, metrics

pytestmark = pytest.mark.usefixtures("place")

CASES = {
    "ppo": "--dtype float32 --algo ppo --kl-coef 0.1 --gradient-checkpointing",
    "experts": "--dtype float32 --model models/moe --algo grpo --routing-replay --stale-steps 2",
    "lora": "--dtype float32 --lora-rank 4 --algo dapo --overlong-filter --entropy-coef 0.01",
    "bf16": "--dtype bfloat16 --algo gspo-token --reward pay.py:steps --tis-cap 2",
}


def pretended(runs, flags, source=ROOT):
    arguments = [*command_line(runs, flags), "--device", "cuda"]
    return subprocess.run(
        [sys.executable, ROOT / "tests/pretend.py", source / "train.py", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "case", ["ppo", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])]
)
def test_a_run_on_a_pretended_gpu_is_the_one_on_the_cpu(case, tmp_path):
    flags = f"{BASE} {CASES[case]}"
    done = pretended(tmp_path / "gpu", flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "without CUDA graphs" not in done.stderr
    counts = ast.literal_eval(done.stderr.splitlines()[-1])
    assert 0 < counts["captures"] < counts["replays"]
    folder = good(tmp_path / "cpu", flags).folder
    if case == "bf16":
        return
    for row, expected in zip(metrics(tmp_path / "gpu/run"), metrics(folder), strict=True):
        for name in ("reward", "length_mean", "ratio_mean", "grad_norm", "entropy", "loss"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, there, instead, word",
    [
        (
            "train.py",
            "torch.tensor(costs)).to(config.device)",
            "torch.tensor(costs))",
            "same device",
        ),
        (
            "rollout.py",
            "chosen, logprobs = sample(",
            "int(row[0]), sample(logits, uniform[:, None], 1)\n        chosen, logprobs = sample(",
            "without CUDA graphs",
        ),
    ],
)
def test_what_a_gpu_refuses_is_seen(file, there, instead, word, tmp_path):
    """A transfer that is left out; a value that is read while a decode step is captured."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gspo.py", "rollout.py", "rewards.py", "train.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "support", source / "support")
    text = (source / file).read_text()
    assert text.count(there) == 1
    (source / file).write_text(text.replace(there, instead))
    done = pretended(tmp_path / "gpu", f"{BASE} --steps 1 --dtype float32", Path(source))
    assert word in done.stderr
