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
def test_memory_of_a_run_is_counted_phase_by_phase():
    """Four bytes a parameter for the policy, two for the sampler, eight for AdamW, four for the
    gradients. Checkpointed layers and an adapter need less. Sampling stays under its limit."""
    flags = ["--micro-batch-tokens", "1024", "--cache-gb", "0.001"]
    memory = count_memory(TINY, *flags)
    count = memory.parameters
    assert memory.weights == pytest.approx(6 * count, rel=0.01)
    assert memory.moments == pytest.approx(8 * count, rel=0.01)
    assert memory.gradients == pytest.approx(4 * count, rel=0.01)
    fixed = memory.weights + memory.moments
    assert memory.sampling - fixed > 1e5
    assert memory.updating > memory.scoring > fixed
    assert memory.updating > fixed + memory.gradients

    less = count_memory(TINY, *flags, "--gradient-checkpointing")
    assert less.updating < memory.updating
    lora = count_memory(TINY, *flags, "--lora-rank", "2")
    assert lora.moments < memory.moments / 4
    assert lora.weights < memory.weights
    assert lora.peak == max(lora.sampling, lora.scoring, lora.updating)


@pytest.mark.parametrize(
    "updating, less, fits",
    [(22e9, 20e9, ["yes", "yes"]), (23e9, 20e9, [LESS, "yes"]), (79e9, 70e9, ["no", LESS])],
)
def test_the_table_says_what_fits(updating, less, fits, monkeypatch):
    """1.5 GB of a card are left."""

    def count(shape, *flags):
        peak = less if "--gradient-checkpointing" in flags else updating
        return Memory(int(1e9), 6e9, 8e9, 4e9, sampling=15e9, scoring=16e9, updating=peak)

    monkeypatch.setattr(bench_memory, "count_memory", count)
    head, rule, *rows = memory_table(["tiny"]).splitlines()
    numbers = ["6.0", "8.0", "4.0", "15.0", f"{updating / 1e9}", f"{less / 1e9}", "2.0", "16.0"]
    for row, trained in zip(rows, ("all", "LoRA"), strict=True):
        assert head.count("|") == rule.count("|") == row.count("|") == 13
        cells = row.strip("| ").split(" | ")
        assert cells == ["Qwen3-tiny", trained, *numbers, *fits]


@pytest.mark.slow
def test_training_is_measured():
    row = measure("tiny")
    assert row["step"] == 2 and row["grad_norm"] > 0
    assert 0.1 < row["memory_gb"] < 50
