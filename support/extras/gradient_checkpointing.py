"""Gradient checkpointing: recompute activations in the backward pass instead of keeping them."""

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from support.errors import need


def checkpoint_layers(model, context: Callable = contextlib.nullcontext) -> None:
    """Checkpoint every layer. It is recomputed in the context that context() returned in its first
    run. transformers only does this in training mode, which would turn on dropout."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    need(layers, f"--gradient-checkpointing: {model.config.model_type} doesn't support it")
    for layer in layers:
        layer.forward = functools.partial(run_twice, context, layer.forward)


def run_twice(context: Callable, forward: Callable, *arguments, **options):
    """Run a layer now and, if there are gradients, again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    contexts = (contextlib.nullcontext(), context())
    options |= {"use_reentrant": False, "context_fn": lambda: contexts}
    return checkpoint(forward, *arguments, **options)
