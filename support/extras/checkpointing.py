"""Gradient checkpointing: layers keep no activations and run again in the backward pass."""

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from support.user import need


def checkpoint_layers(model, context: Callable = contextlib.nullcontext) -> None:
    """Let each layer run again in the backward pass, in the context that context() returned in the
    forward pass. transformers does so in training mode alone, which switches dropout on."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    need(layers, f"--gradient-checkpointing: a {model.config.model_type} has no layers for it")
    for layer in layers:
        layer.forward = functools.partial(run_twice, context, layer.forward)


def run_twice(context: Callable, forward: Callable, *arguments, **options):
    """Run a layer now, and again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    contexts = (contextlib.nullcontext(), context())
    options |= {"use_reentrant": False, "context_fn": lambda: contexts}
    return checkpoint(forward, *arguments, **options)
