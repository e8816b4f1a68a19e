"""Our attention in the layers of a model of transformers: which models take it, and how it gets in.

What texts are, and where their tokens lie, is the matter of a layout: see Slots in rollout.py."""

import contextlib
import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from support.data import need
from support.flags import extra

# model types that say that they take any attention, and do not take ours
NOT_OURS = {
    "diffllama": "two attentions a layer",
    "doge": "computes with the mask",
    "gemma4_unified": "a mask that looks positions up in a table",
    "hrm_text": "runs through its layers more than once",
    "llama4": "scales queries by where they stand in the pass, not by their position",
    "llama4_text": "the same",
}


def takes_our_attention(model) -> bool:
    """Whether keys and values are all that its layers remember, and their attention is replaced.

    If so it is sampled in `Slots` and scored packed; else (state spaces, linear attention) it is
    sampled by transformers, through support/extras/hybrids.py, and scored in padded rows."""
    memories = {type(memory) for memory in DynamicCache(config=model.config).layers}
    only_those = memories <= {DynamicLayer, DynamicSlidingWindowLayer}
    replaced = model._supports_attention_backend and model.config.model_type not in NOT_OURS
    return only_those and replaced


def body_of(model):
    """The part that makes hidden states of ids: the innermost with the embedding."""
    embedding = model.get_input_embeddings()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if embedding in part.modules()][-1]


# An attention layer of transformers hands queries, keys and values to the function that
# `config._attn_implementation` names; the mask is made, once a pass, by the function of that name
# in another table. Ours ask the layout of the moment: where tokens lie is its own matter.

LAYOUT = None  # Prompts, Slots or Packed, while it runs the model


def attend_in_layout(module, query, key, value, attention_mask, **options):
    return LAYOUT.attend(module, query, key, value, attention_mask, **options)


def mask_of_layout(config, mask_function, **_):
    """mask_function(row, head, query, key), the library's, causal or a sliding window, says whether
    one position sees another."""
    return LAYOUT.mask(mask_function)


AttentionInterface.register("ours", attend_in_layout)
AttentionMaskInterface.register("ours", mask_of_layout)


@contextlib.contextmanager
def our_attention(model, layout):
    """Within, the attention of the model is layout.attend."""
    global LAYOUT
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [config._attn_implementation for config in configs]
    outer = LAYOUT
    for config in configs:
        config._attn_implementation = "ours"
    LAYOUT = layout
    try:
        yield
    finally:
        LAYOUT = outer
        for config, implementation in zip(configs, before):
            config._attn_implementation = implementation


def checkpoint_layers(model):
    """Layers forget their activations, and run again in the backward pass.

    transformers would do so in training mode alone, which is also the mode of dropout."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    need(layers, f"--gradient-checkpointing: a {model.config.model_type} has no layers for it")
    for layer in layers:
        layer.forward = functools.partial(run_again, model, layer.forward)


def run_again(model, forward, *arguments, **options):
    """forward; by the backward pass `our_attention` has been left, and a replay of experts, too:
    they are entered once more."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    nothing, mixtures = contextlib.nullcontext(), extra("experts")
    attention = our_attention(model, LAYOUT) if LAYOUT else nothing
    experts = mixtures.once_more() if mixtures else nothing

    @contextlib.contextmanager
    def once_more():
        with attention, experts:
            yield

    def contexts():
        return nothing, once_more()

    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **options)


def mask_between(queries: Tensor, keys: Tensor, sees) -> Tensor:
    """What is added to scores, (rows, 1, queries, keys), from positions (rows, queries) and (rows
    or 1, keys)."""
    queries, keys = queries[:, None, :, None], keys[:, None, None, :]
    return torch.where(sees(0, 0, queries, keys), 0.0, -torch.inf)


# where shared key heads beside a mask would fall to the kernel that keeps all scores
EXPAND_HEADS = {"cuda"}


def attention(module, query, key, value, mask, scaling=None, **options):
    """Softmax attention, the mask (rows, 1, queries, keys) added to its scores.

    query (rows, heads, queries, dim); key, value (rows, kv_heads, keys, dim).
    Returns (rows, queries, heads, dim)."""
    mask = mask.to(query.dtype)
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        # capped scores, attention sinks: the fused kernel has neither, the model's file has
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, scaling=scaling, **options)[0]

    rows, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    if queries == 1:  # heads that share a key head become its queries: nothing is copied
        query = query.reshape(rows, kv_heads, heads // kv_heads, -1)
    elif query.device.type in EXPAND_HEADS:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return output.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous()
