"""Counted memory (bench_memory.py, counting.py) is the memory that real tensors take."""

import pytest
import torch
import transformers

import bench_memory
from bench_memory import SHAPES, Memory, count_memory, measure, memory_table
from counting import Counting

TINY = SHAPES["tiny"]
LESS = "with `--gradient-checkpointing`"


def test_bytes_are_counted_while_they_live():
    with Counting() as counting:
        big = torch.zeros(2**20)
        half = (big + 1).half()
        view = big[2:]
        assert counting.bytes_now == 6 * 2**20
        del big
        assert counting.bytes_now == 6 * 2**20  # the view holds it
        del half, view
        assert counting.bytes_now == 0
        assert counting.bytes_peak == 10 * 2**20  # the sum lived until it was half
        steps = torch.arange(6)
        assert steps[steps > 2].tolist() == [3, 4, 5]  # integers are real
        assert counting.bytes_now == 0


def test_counted_bytes_of_a_backward_pass_are_those_of_a_real_one():
    """The tensors that the forward pass keeps for the backward pass, by saved_tensors_hooks."""
    ids = torch.ones(2, 50, dtype=torch.long)
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point():
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**TINY))
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, use_cache=False).logits.sum()
    real = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)

    with Counting() as counting:
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**TINY))
        before = counting.bytes_now
        loss = model(ids, use_cache=False).logits.sum()
        assert counting.bytes_now - before == pytest.approx(real, rel=0.02)  # tables of rotations
        loss.backward()
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        assert counting.bytes_now - before >= gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_memory_of_a_run_is_counted_phase_by_phase(monkeypatch):
    """Four bytes a parameter for the policy, two for the sampler, eight for AdamW, four for the
    gradients. Checkpointed layers and an adapter need less."""
    monkeypatch.setattr(bench_memory, "CACHE_GB", 0.01)
    memory, less, lora = count_memory(TINY), count_memory(TINY, 0, True), count_memory(TINY, 2)
    count = memory.parameters
    fixed = memory.weights + memory.moments
    assert memory.weights == memory.loading == pytest.approx(6 * count, rel=0.01)
    assert memory.moments == pytest.approx(8 * count, rel=0.01)
    assert memory.gradients == pytest.approx(4 * count, rel=0.01)
    assert memory.refreshing == pytest.approx(fixed, rel=0.01)
    assert 0.008e9 < memory.sampling - fixed < 0.04e9
    assert memory.updating > less.updating > fixed + memory.gradients
    assert lora.moments < memory.moments / 4 and lora.weights < memory.weights
    assert lora.loading == pytest.approx(memory.loading, rel=0.05)  # the plain model comes first
    assert lora.peak == max(lora.refreshing, lora.sampling, lora.updating)


@pytest.mark.parametrize(
    "updating, less, fits",
    [
        (22e9, 20e9, ["yes", "yes", "yes"]),
        (23e9, 20e9, [LESS, "yes", "yes"]),
        (79e9, 70e9, ["no", "no", LESS]),
    ],
)
def test_the_table_says_what_fits(updating, less, fits, monkeypatch):
    """1.5 GB of a card are left. The largest of the four peaks decides."""
    peaks = ["loading", "refreshing", "sampling", "updating"]
    every = Memory(*[10**9] * len(Memory._fields))

    def count(shape, rank, checkpointing=False):
        return every._replace(**{peaks[rank % 3]: less if checkpointing else updating})

    monkeypatch.setattr(bench_memory, "count_deep", count)
    monkeypatch.setattr(bench_memory, "count_memory", count)
    _, _, *rows = memory_table(["tiny"]).splitlines()
    for row, trained in zip(rows, ("all", "LoRA"), strict=True):
        cells = row.strip("| ").split(" | ")
        assert cells[:2] == ["Qwen3-tiny", trained] and cells[-3:] == fits
        assert len(cells) == len(bench_memory.HEAD) and f"{updating / 1e9}" in cells


@pytest.mark.slow
def test_training_is_measured():
    row = measure("tiny")
    assert row["step"] == 2 and row["grad_norm"] > 0
    assert 0.1 < row["memory_gb"] < 50
