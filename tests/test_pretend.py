"""train.py on a pretended CUDA device (pretend.py), each run in a process of its own.

Nothing mixes devices, decode steps are captured as graphs and replayed, and in float32 a run says
what it says on the CPU. That the device would notice: a transfer taken out of the sources fails.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import BASE, ROOT, command_line, good, metrics

HERE = Path(__file__).parent
FLOAT32 = "--dtype float32"
CASES = {
    "gspo": f"{BASE} {FLOAT32}",
    "gspo in bfloat16": f"{BASE} --dtype bfloat16",
    "stale sampler": f"{BASE} {FLOAT32} --stale-steps 2 --tis-cap 2",
    "ppo": f"{BASE} {FLOAT32} --algo ppo",
    "experts replayed": f"--model models/moe --reward pay.py:even {FLOAT32} --routing-replay",
    "experts of the sampler replayed": (
        f"--model models/moe --reward pay.py:even {FLOAT32} --routing-replay sampler "
        "--stale-steps 2"
    ),
    "grpo, KL, checkpointing": (
        f"{BASE} {FLOAT32} --algo grpo --kl-coef 0.1 --gradient-checkpointing"
    ),
    "lora": f"{BASE} {FLOAT32} --lora-rank 4",
    "tool": (
        f"{BASE} {FLOAT32} --algo ppo --tool tool.py:seven --tool-after + --max-new-tokens 16"
    ),
}


def python(*arguments, **options) -> subprocess.CompletedProcess:
    """One thread; warnings are said, also those that a library would say only to its developers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        **options,
    )


def pretended(arguments, sources=ROOT):
    """train.py with these arguments on the pretended device, and what was seen there."""
    report = Path("seen.json")
    report.unlink(missing_ok=True)
    script = Path(sources, "train.py")
    done = python(HERE / "pretend.py", "--report", report, script, *arguments, "--device", "cuda")
    return SimpleNamespace(
        status=done.returncode,
        text=done.stdout + done.stderr,
        seen=json.loads(report.read_text()),
    )


def ran_on_the_device(result) -> None:
    """To its end, with graphs, and with attention that is not the slow one."""
    assert result.status == 0, result.text
    assert "sampling without CUDA graphs" not in result.text
    seen = result.seen
    assert seen["refused"] == []
    assert seen["captures"] > 0
    assert seen["replays"] > seen["captures"]
    assert seen["masked_grouped_attention"] == 0


def same_numbers(folder, on_cpu) -> None:
    """Every metric of the run on the CPU, but those of a clock, to 1e-3."""
    rows, expected = metrics(folder), metrics(on_cpu)
    assert len(rows) == len(expected)
    for row, reference in zip(rows, expected):
        assert row["memory_gb"] > 0 or row["step"] != 2  # the step that the device made
        for name, value in reference.items():
            if name.startswith("seconds_") or name in ("tokens_per_second", "memory_gb"):
                continue
            assert math.isclose(row[name], value, rel_tol=1e-3, abs_tol=1e-3), name


def slow_but(names, kept: str) -> list:
    """All of them as parameters; those but one take a while together."""
    return [name if name == kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("case", slow_but(CASES, "gspo in bfloat16"))
def test_a_run_on_the_pretended_device_says_what_one_on_the_cpu_says(case, place):
    flags = CASES[case]
    Path("tool.py").write_text("def seven(text):\n    return '=7'\n")
    result = pretended(command_line("gpu", flags))
    ran_on_the_device(result)
    if FLOAT32 in flags:
        good("cpu", flags, "--device", "cpu")
        same_numbers("gpu/run", "cpu/run")
    else:
        assert result.seen["autocast_attention"] > 0
        [first, *_] = metrics("gpu/run")
        assert 0 < first["sampler_kl"] < 0.1  # the sampler is a copy in bfloat16


@pytest.mark.slow
def test_a_run_goes_on_from_the_cpu_to_the_pretended_device_and_back(place):
    """The same three steps as in one go on the CPU: moments, weights and rows of data travel."""
    flags = f"{BASE} {FLOAT32}"
    good("cpu", flags, "--device", "cpu", "--steps", 3)

    good("all", flags, "--device", "cpu", "--steps", 1)
    resume = ["--resume", "--name", "run", "--runs", "all"]
    ran_on_the_device(pretended([*resume, "--steps", "2"]))
    good("all", "", *resume, "--steps", 3, "--device", "cpu", small=False)
    same_numbers("all/run", "cpu/run")


# ------------------------------------------------------------------------------ it would notice

TRANSFERS = {  # text that stands once in the file -> the same without its device
    "weights": (
        "train.py",
        "rollout.load_model(source, device=config.device)",
        "rollout.load_model(source)",
    ),
    "rewards": (
        "train.py",
        "rewards=shaped_rewards(config, judged).to(config.device)",
        "rewards=shaped_rewards(config, judged)",
    ),
    "sum of the losses": (
        "train.py",
        'totals = {"loss": torch.zeros((), device=config.device)}',
        'totals = {"loss": torch.zeros(())}',
    ),
    "random numbers": ("rollout.py", "uniforms[own].to(device)", "uniforms[own]"),
    "positions": (
        "rollout.py",
        "steps = torch.arange(completions.tokens.shape[1], device=device)",
        "steps = torch.arange(completions.tokens.shape[1])",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_transfer_that_is_missing_is_noticed(transfer, place):
    file, text, without = TRANSFERS[transfer]
    for source in ROOT.glob("*.py"):
        shutil.copy(source, source.name)
    source = Path(file).read_text()
    assert source.count(text) == 1, "the source has changed: choose another transfer"
    Path(file).write_text(source.replace(text, without))

    result = pretended(command_line("gpu", f"{BASE} {FLOAT32}"), sources=".")
    assert result.status != 0
    assert "same device" in result.text


# ------------------------------------------------------------------------------ the device itself

RULES = """
import sys
sys.path.insert(0, {tests!r})
import pretend
import torch

pretend.install(total_gb=1)
x = torch.arange(6.0, device="cuda")
host = torch.arange(6.0)
seen = pretend.SEEN
"""

MIXING = [
    "x + host",
    "x[host > 2] + x[host.long()] + (host[x.long()])",
    "x.index_copy_(0, host.long(), x)",
    "host.add_(x.sum())",
    "torch.cat([x, host[0][None]])",
    "torch.gather(x, 0, host.long())",
    "x[host.long()] = host",
    "torch.where(x > 2, x, host)",
    "x.numpy()",
]
ALLOWED = [
    "x + host[0]",
    "x * 2.0",
    "x[host.long()]",
    "x[0] = 2.0",
    "x.copy_(host)",
    "host.copy_(x)",
    "x.cpu() + host",
    "host.cuda() + x",
    "host.to(x) + x",
    "x.new_tensor([1.0]) + x",
    "torch.zeros_like(x) + x",
    "torch.as_tensor(host, device='cuda') + x",
    "torch.where(x > 2, x, 0.0)",
]
REFUSED_IN_CAPTURE = [
    "x.sum().item()",
    "x.tolist()",
    "bool((x > 2).any())",
    "x.cpu()",
    "host.to('cuda')",
    "x.copy_(host)",
    "x.nonzero()",
    "x[x > 2]",
    "x[x > 2] = 0.0",
    "x.masked_select(x > 2)",
    "x.unique()",
    "x[[0, 1]]",
    "x[host.long()]",
    "torch.tensor([1.0], device='cuda')",
    "torch.tensor(1.0, device='cuda')",
    "x.new_tensor([1.0])",
    "torch.rand(3, device='cuda')",
    "torch.multinomial(x, 1)",
    "x.bernoulli()",
]
CAPTURED = [
    "x.add_(1)",
    "torch.where(x > 2, x, 0.0)",
    "x.masked_fill(x > 2, 0.0)",
    "x[x.long()]",
    "x.index_copy_(0, x.long(), x)",
    "torch.arange(3, device='cuda') + torch.zeros(3, device='cuda')",
    "torch.full((2,), 3.0, device='cuda')",
    "torch.searchsorted(x, x)",
]


def check_rules(body: str) -> None:
    done = python("-c", RULES.format(tests=str(HERE)) + body)
    assert done.returncode == 0, done.stderr


def test_tensors_of_two_places_do_not_mix():
    check_rules(f"""
for line in {ALLOWED!r}:
    exec(line)
for line in {MIXING!r}:
    try:
        exec(line)
    except (RuntimeError, TypeError):
        continue
    sys.exit("no error: " + line)
""")


@pytest.mark.slow
def test_python_sees_the_place_of_a_tensor():
    check_rules("""
def is_on_gpu(tensor):
    said = {tensor.device.type == "cuda", tensor.is_cuda, tensor.get_device() == 0}
    [answer] = said | {not tensor.is_cpu}
    return answer

for tensor in (x, x[1:], x.view(2, 3).t(), x.sum(), x + 1, x.bool(), x.to(torch.bfloat16)):
    assert is_on_gpu(tensor)
assert is_on_gpu(torch.nn.Linear(2, 2).to("cuda").weight)
assert is_on_gpu(torch.nn.Linear(2, 2, device="cuda").weight)
for tensor in (host, x.cpu(), x.to("cpu", torch.long), torch.empty_like(x, device="cpu")):
    assert not is_on_gpu(tensor)
assert torch.empty(2, device="meta").device.type == "meta"

weight = torch.nn.Linear(6, 1).to("cuda").weight
(weight @ x).sum().backward()
assert is_on_gpu(weight.grad)
""")


def test_a_capture_refuses_what_a_gpu_refuses():
    check_rules(f"""
def capture(line):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exec(line)

for line in {CAPTURED!r}:
    capture(line)
assert seen.captures == {len(CAPTURED)} and seen.refused == []
for line in {REFUSED_IN_CAPTURE!r}:
    before = len(seen.refused)
    try:
        capture(line)
    except RuntimeError as error:
        assert "not permitted when stream is capturing" in str(error)
    assert len(seen.refused) == before + 1, "not refused: " + line
assert seen.captures == {len(CAPTURED)}
""")


def test_a_replay_does_it_again_in_the_same_memory():
    check_rules("""
graph, total = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
with torch.cuda.graph(graph):
    double = 2 * x
    total += double.sum()
assert float(total) == 0  # a capture computes nothing
for expected in (30.0, 60.0):
    graph.replay()
    assert float(total) == expected
x.fill_(1.0)
graph.replay()
assert float(total) == 72.0 and double.tolist() == [2.0] * 6
assert seen.replays == 3
""")


@pytest.mark.slow
def test_bytes_on_the_device_are_counted():
    check_rules("""
free, total = torch.cuda.mem_get_info()
big = torch.zeros(2**20, device="cuda")
half = big.half()
assert torch.cuda.mem_get_info() == (free - 6 * 2**20, total) and total == 2**30
view, on_host = big[2:], torch.zeros(2**20)
assert torch.cuda.memory_allocated() == 6 * 2**20 + total - free
del half
assert torch.cuda.memory_allocated() == 4 * 2**20 + total - free
assert torch.cuda.max_memory_allocated() == 6 * 2**20 + total - free
""")
