"""Counted memory (bench_memory.py, counting.py) is what real tensors take."""

import pytest
import torch
import transformers

from bench_memory import SHAPES, count_memory, measure, memory_table
from counting import Counting

TINY = SHAPES["tiny"]


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
    """What the forward pass keeps for the backward pass, by saved_tensors_hooks."""
    config = transformers.Qwen3Config(**TINY)

    def model_and_ids():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config), torch.ones(
            2, 50, dtype=torch.long
        )

    model, ids = model_and_ids()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.is_floating_point():
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, use_cache=False).logits.sum()
    real = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)

    with Counting() as counting:
        model, ids = model_and_ids()
        before = counting.bytes_now
        loss = model(ids, use_cache=False).logits.sum()
        counted = counting.bytes_now - before
        loss.backward()
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        assert counting.bytes_now - before >= gradients
    assert counted == pytest.approx(real, rel=0.02)  # the loss itself, tables of rotations


@pytest.mark.slow
def test_memory_of_a_run_is_counted_phase_by_phase():
    """Four bytes a parameter for the policy, two for the sampler, eight for AdamW, four for the
    gradients; checkpointed layers and an adapter need less; sampling stays under its limit."""
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


@pytest.mark.slow
def test_the_table_says_what_fits(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    head, rule, *rows = memory_table(["tiny"]).splitlines()
    assert head.count("|") == rule.count("|") == rows[0].count("|") == 13
    assert len(rows) == 2
    assert all(row.endswith("| yes | yes |") for row in rows)


@pytest.mark.slow
def test_training_is_measured():
    row = measure("tiny")
    assert row["step"] == 2 and row["grad_norm"] > 0
    assert 0.1 < row["memory_gb"] < 50
