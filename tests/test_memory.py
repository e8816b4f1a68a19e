"""Counted memory (bench_memory.py, counting.py) is the memory that real tensors take."""

import re

import pytest
import torch
import transformers

import bench_memory
import common
from bench_memory import CARDS, HEAD, LESS, PUBLISHED, ROOM, SHAPES, count_memory
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
    """Bytes a parameter: 4 for the policy, 2 for the sampler, 8 for AdamW, 4 for the gradients."""
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


def test_the_table_says_what_fits():
    """1.5 GB of a card are left. The largest of the four peaks decides, in the page's table."""
    page = (common.ROOT / "docs/memory.md").read_text()
    rows = re.findall(r"(?m)^\| (Qwen3-.*) \|$", page)
    assert f"| {' | '.join(HEAD)} |" in page and len(rows) == 2 + 2 * len(PUBLISHED)
    for row in rows:
        cells = row.split(" | ")
        *others, updating, less = map(float, cells[5:10])  # loading, refreshing, sampling
        for card, fits in zip(CARDS, cells[-3:], strict=True):
            ways = {"yes": max(*others, updating), f"with `{LESS}`": max(*others, less), "no": 0}
            expected = next(way for way, peak in ways.items() if peak <= card - ROOM)
            assert fits == expected, row
