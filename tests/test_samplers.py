"""Samplers that are not ours. Those of a user's file may do anything; vLLM's has tests of its own."""

import copy
import sys

import pytest
import torch

import rollout
from tools import BASE, good, metrics, refused

pytestmark = pytest.mark.usefixtures("place")

SAMPLER = """
import copy, torch, rollout
OWN = []

def follows(model, prompts, uniforms, **options):
    return rollout.generate(model, prompts, uniforms, **options)

def frozen(model, prompts, uniforms, **options):
    "Its copy is made in the first call, and never updated."
    OWN[:] = OWN or [copy.deepcopy(model)]
    return rollout.generate(OWN[0], prompts, uniforms, **options)

def stale_matrix(model, prompts, uniforms, **options):
    "It forgets one of the matrices."
    own = copy.deepcopy(model)
    OWN[:] = OWN or [own.model.layers[0].mlp.down_proj]
    own.model.layers[0].mlp.down_proj = OWN[0]
    return rollout.generate(own, prompts, uniforms, **options)

def warmer(model, prompts, uniforms, **options):
    options["temperature"] *= 2
    return rollout.generate(model, prompts, uniforms, **options)

def fails(model, prompts, uniforms, **options):
    raise RuntimeError("no kernel for this model")
"""
STALE = "nats a token away from the model's once the weights have changed"


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("frozen", STALE),
        ("stale_matrix", STALE),
        ("warmer", STALE),
        ("fails", r"failed on two short prompts: RuntimeError: no kernel .*my.py, line"),
    ],
)
def test_a_sampler_that_does_not_follow_the_weights_is_refused(name, sentence, place, tmp_path):
    place.joinpath("my.py").write_text(SAMPLER)
