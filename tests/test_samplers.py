"""Samplers that are not ours: those of a user's file. vLLM's has a test file of its own."""

import sys

import pytest

import train
from tools import BASE, good, metrics, refused, timeless

pytestmark = pytest.mark.usefixtures("place")

SAMPLER = """
import copy, torch, rollout
OWN = []

def follows(model, prompts, uniforms, **options):
    return rollout.generate(model, prompts, uniforms, **options)

def stale_matrix(model, prompts, uniforms, **options):
    "It forgets to update one of the matrices."
    own = copy.deepcopy(model)
    OWN[:] = OWN or [own.model.layers[0].mlp.down_proj]
    own.model.layers[0].mlp.down_proj = OWN[0]
    return rollout.generate(own, prompts, uniforms, **options)

def warmer(model, prompts, uniforms, **options):
    options["temperature"] *= 2
    return rollout.generate(model, prompts, uniforms, **options)
"""


@pytest.mark.parametrize("name", ["stale_matrix", "warmer"])
def test_a_sampler_that_does_not_follow_the_weights_is_refused(name, place, tmp_path):
    place.joinpath(f"{name}.py").write_text(SAMPLER)
    error = refused(tmp_path, f"{BASE} --sampler {name}.py:{name}")
    assert f"--sampler {name}.py:{name}: its log-probs are " in error
    assert "nats per token away from the model's once the weights have changed" in error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_that_follows_them_trains_as_ours(dtype, place, tmp_path):
    """The weights were negated twice for the check, and are the same bits."""
    place.joinpath("my.py").write_text(SAMPLER)
    flags = f"{BASE} --dtype {dtype} --steps 1"
    ours, theirs = (
        timeless(good(tmp_path / kind, f"{flags} {more}").folder)
        for kind, more in (("ours", ""), ("theirs", "--sampler my.py:follows"))
    )
    assert ours == theirs


def test_a_rollout_of_lists_ends_at_the_first_stop_or_end_token():
    """4 is a stop, 2 an end token. What an engine wrote after a stop becomes padding."""
    from support.extras.samplers import rollout_of

    prompts, completions = [[7], [8, 8], [9]], [[5, 6, 2], [5, 4, 4, 7], [5]]
    logprobs = [[-1.0] * len(ids) for ids in completions]
    found = rollout_of(prompts, completions, logprobs, [2], 0, stops=lambda ids: ids[:, -1] == 4)
    assert found.sequences() == [[7, 5, 6, 2], [8, 8, 5, 4], [9, 5]]
    assert found.truncated.tolist() == [False, False, True]
    assert found.sampler_logprobs.tolist() == [[-1, -1, -1], [-1, -1, 0], [-1, 0, 0]]


def test_vllm_that_is_not_installed_is_named_with_its_pip_line(monkeypatch, tmp_path):
    """Before a model loads, also where it is installed and its import fails."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(train, "load_model", None)
    assert "--sampler vllm: needs pip install vllm==" in refused(tmp_path, f"{BASE} --sampler vllm")


def test_the_sampler_is_measured_where_the_first_update_has_no_active_row(seen, tmp_path):
    """Of 3 updates, of a group each, those of dead groups have none."""
    flags = "--model models/tiny --data rows.jsonl --reward pay.py:by_prompt --steps 6"
    flags += " --prompts-per-step 3 --completions-per-update 4 --eval-data rows.jsonl"
    rows = metrics(good(tmp_path, flags).folder)
    active = [[len(update.active_rows) > 0 for update in step.updates] for step in seen.steps]
    assert any(not updates[0] and any(updates) for updates in active)
    assert [row.get("sampler_kl", 1) < 1e-3 for row in rows] == [any(each) for each in active]
