"""Every call of a model: sampling completions, and scoring them again with gradients.

    python rollout.py --model runs/demo/checkpoints/step-100 --prompt "7+5*3="

Read `generate` (sampling), then `completion_logprobs` (scoring). Both run the model's own layers
with our attention, over a layout that knows where each token lies: `Slots` and `Packed`. What texts
begin with in common is computed once: `Prefixes`, `SharedSlots`.
"""

import argparse
import bisect
import contextlib
import contextvars
import copy
import json
import os
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import tqdm

from rewards import (
    Tool,
    UserError,
    did_you_mean,
    expecting,
    messages_of,
    need,
    parse_reward,
    parse_tool,
    printable,
    text_of,
)


class Rollout(typing.NamedTuple):
    """N completions; those of one prompt, a group, are contiguous.

    |<-------- S: prompt_width --------->|<-------------- T ------------->|
    pad pad pad  p   p   p   p   p   p   p   c   c   c   c  eos  pad pad pad
                |<--- prompt_lengths --->|<---- lengths ---->|
    """

    tokens: Tensor  # (N, S + T)
    prompt_lengths: Tensor  # (N,) tokens
    lengths: Tensor  # (N,) completion tokens, the first end token included
    sampler_logprobs: Tensor  # (N, T) float32, 0 on padding and on what a tool wrote
    truncated: Tensor  # (N,) no end token within max_new_tokens
    # (N, S + T, C) what the sampler's routers chose as it read the token at a position of the row,
    # counted from its first token that is no padding; see Recorder; None: not recorded
    experts: Tensor | None = None
    forced: Tensor | None = None  # (N, T) tokens that a tool wrote; None: there was no tool

    @property
    def prompt_width(self) -> int:
        return self.tokens.shape[1] - self.sampler_logprobs.shape[1]

    @property
    def completions(self) -> Tensor:  # (N, T)
        return self.tokens[:, self.prompt_width :]

    @property
    def text_mask(self) -> Tensor:  # (N, T) all that the model reads, whoever wrote it
        # from positions: comparing ids with the pad id loses the end token when pad == eos
        steps = torch.arange(self.completions.shape[1], device=self.tokens.device)
        return steps < self.lengths[:, None]

    @property
    def completion_mask(self) -> Tensor:  # (N, T) the policy's own tokens: its actions
        if self.forced is None:
            return self.text_mask
        return self.text_mask & ~self.forced

    def to(self, device) -> "Rollout":
        return self.each(lambda column: column.to(device))

    def __getitem__(self, rows) -> "Rollout":
        """Some rows, by a list, slice or LongTensor; S and T stay."""
        return self.each(lambda column: column[rows])

    def each(self, change: Callable[[Tensor], Tensor]) -> "Rollout":
        """All columns changed, but for what is not there."""
        return Rollout(*[None if column is None else change(column) for column in self])

    @staticmethod
    def cat(rollouts: list["Rollout"], pad_id: int) -> "Rollout":
        """All rows, padded to the widest S and T."""
        widest_prompt = max(rollout.prompt_width for rollout in rollouts)
        widest_completion = max(rollout.completions.shape[1] for rollout in rollouts)
        padded = []
        for rollout in rollouts:
            left = widest_prompt - rollout.prompt_width
            right = widest_completion - rollout.completions.shape[1]
            wider = rollout._replace(
                tokens=F.pad(rollout.tokens, (left, right), value=pad_id),
                sampler_logprobs=F.pad(rollout.sampler_logprobs, (0, right)),
            )
            if rollout.forced is not None:
                wider = wider._replace(forced=F.pad(rollout.forced, (0, right)))
            if rollout.experts is not None:  # positions count from the left: all room is behind
                experts = F.pad(rollout.experts, (0, 0, 0, left + right))
                wider = wider._replace(experts=experts)
            padded.append(wider)
        return Rollout(
            *[None if columns[0] is None else torch.cat(columns) for columns in zip(*padded)]
        )


# ---- how our attention gets in
#
# An attention layer of transformers projects its queries, keys and values, rotates them, and hands
# them to the function that `config._attn_implementation` names ("eager", "sdpa", ...). The mask is
# made, once a forward pass, by the function of the same name in another table. We register ours in
# both tables under the name "layout". They ask the layout of the moment (`our_attention` sets it):
#
#     layout.pairs    positions of queries and of keys, for each mask that the layout wants
#     layout.attend   attention, once a layer; what it keeps of keys and values is its own matter
#
# So one class decides where tokens lie, and the model's layers, rotary embeddings, sliding windows
# and experts are the library's own. It works where keys and values are all that a layer remembers.
# Other models (Mamba and other state spaces, hybrids of them with attention such as Qwen3-Next,
# LFM2, RecurrentGemma, Falcon-H1, Bamba, Jamba, Zamba) and those whose attention cannot be replaced
# (Falcon, Bloom) are sampled by transformers' own `generate` and scored padded: see
# `takes_our_attention`, `fill_page_by_transformers` and `padded_states`. tests/architectures.md
# has the outcome for every architecture.

LAYOUT = contextvars.ContextVar("layout")  # of the forward pass under way


def attend_in_layout(module, query, key, value, attention_mask, **options):
    return LAYOUT.get().attend(module, query, key, value, attention_mask, **options)


def masks_of_layout(config, mask_function, **_):
    """For each pair of the layout what is added to the scores, (rows, 1, queries, keys).

    mask_function(row, head, query, key) says whether one position may see another: it is the
    library's, causal or a sliding window."""
    masks = []
    for queries, keys in LAYOUT.get().pairs:  # positions (rows, queries), (rows, keys)
        seen = mask_function(0, 0, queries[:, None, :, None], keys[:, None, None, :])
        masks.append(torch.where(seen, 0.0, -torch.inf))
    return masks


AttentionInterface.register("layout", attend_in_layout)
AttentionMaskInterface.register("layout", masks_of_layout)


def configs_of(model) -> list:
    """A composite model's parts may hold copies of its configurations."""
    return [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]


@contextlib.contextmanager
def our_attention(configs: list, layout):
    """Within, the attention of a model that has these configurations is layout.attend."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = "layout"
    token = LAYOUT.set(layout)
    try:
        yield
    finally:
        LAYOUT.reset(token)
        for config, implementation in zip(configs, before):
            config._attn_implementation = implementation


# model types that say that they take any attention, and do not take ours
NOT_OURS = {
    "diffllama": "two attentions a layer",
    "doge": "computes with the mask",
    "gemma4_unified": "a mask that looks positions up in a table",
    "hrm_text": "runs through its layers more than once",
}


def takes_our_attention(model) -> bool:
    """Whether keys and values are all that its layers remember, and their attention is replaced."""
    config = model.config
    need(
        not config.is_encoder_decoder,
        f"{config.model_type} is an encoder-decoder: expected a causal language model",
    )
    layers = DynamicCache(config=config).layers
    only_keys_and_values = all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    )
    replaced = model._supports_attention_backend and config.model_type not in NOT_OURS
    return only_keys_and_values and replaced


def attention(module, query, key, value, mask, scaling=None, expand_heads=False, **options):
    """Softmax attention of one block, the mask added to its scores.

    query: (rows, heads, queries, dim).
    key, value: (rows, kv_heads, keys, dim).
    mask: (rows, 1, queries, keys).
    expand_heads: repeat key heads for the heads that share them.
    Returns (rows, queries, heads, dim)."""
    rows, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    mask = mask.to(query.dtype)

    if options.get("softcap") is not None or options.get("s_aux") is not None:
        # capped scores, attention sinks: the fused kernel has neither, the model's file has
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, scaling=scaling, **options)[0]

    if queries == 1:  # heads that share a key head become its queries
        query = query.reshape(rows, kv_heads, heads // kv_heads, -1)
    grouped = query.shape[1] != kv_heads
    if grouped and expand_heads:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
        grouped = False
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return output.reshape(rows, heads, queries, -1).transpose(1, 2)


# ---- conditions of a forward pass


@contextlib.contextmanager
def dropout_off(model):
    """Every module in evaluation mode, and afterwards in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def recomputed_layers(model, layout):
    """Layers with gradient checkpointing run again in the backward pass: under the same conditions.

    transformers would checkpoint them in training mode alone, which is also the mode of dropout;
    and by the backward pass the contexts of the forward pass have been left. So we call torch's
    checkpoint, and what it repeats enters them again. layout: None for its own attention."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    if not torch.is_grad_enabled():
        layers = []
    own = [layer.__dict__.get("forward") for layer in layers]
    configs = configs_of(model)
    for layer in layers:
        layer.forward = Recomputed(layer, configs, layout)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own):
            del layer.forward
            if forward is not None:
                layer.forward = forward


class Recomputed:
    """The forward method of a layer whose activations are not kept."""

    def __init__(self, layer, configs, layout):
        self.layer, self.configs, self.layout = layer, configs, layout
        self.forward = layer.forward

    def __call__(self, *args, **kwargs):
        routing = ROUTING.get()
        done = 0 if routing is None else len(routing.choices)
        return checkpoint(self.run, routing, done, *args, use_reentrant=False, **kwargs)

    def run(self, routing, done, *args, **kwargs):
        """routing: of the forward pass; done: choices before this layer's."""
        with (
            dropout_off(self.layer),
            experts_by(self.configs, "grouped_in_autocast"),
            contextlib.ExitStack() as stack,
        ):
            if self.layout is not None:
                stack.enter_context(our_attention(self.configs, self.layout))
            if routing is not None and ROUTING.get() is not routing:  # it was left: backward pass
                stack.enter_context(routing.once_more(done))
            return self.forward(*args, **kwargs)


@contextlib.contextmanager
def transposed_weights(model):
    """On a CPU the weights of linear layers lie transposed: faster for a few rows at a time.

    The very storages come back, as others may hold them (the optimiser, a tied embedding)."""
    moved = []
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                moved.append((weight, weight.data))
                weight.data = weight.data.t().contiguous().t()
    try:
        yield
    finally:
        for weight, data in reversed(moved):  # a weight that two layers share was moved twice
            weight.data = data


# ---- how experts are computed
#
# transformers has a table of functions for that, from which mixtures choose by their configuration.
# Its default, a grouped product, takes the weights as they are, float32 ones under autocast too;
# and but for the newest GPUs it reads how many tokens each expert has, which waits for the device
# and cannot be captured in a graph. So we add two functions.


class InDtype:
    """A module seen with its weights in another dtype."""

    def __init__(self, module, dtype: torch.dtype):
        self.module, self.dtype = module, dtype

    def __getattr__(self, name):
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, Tensor) else value


def grouped_in_autocast(experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The library's grouped product, in the dtype of autocast as any other linear map."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        experts = InDtype(experts, torch.get_autocast_dtype(kind))
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


class NoBias(typing.NamedTuple):
    gate_up_proj_bias: None = None
    up_proj_bias: None = None
    down_proj_bias: None = None


WITHOUT_BIAS = NoBias()


def every_expert(experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """All experts on all tokens, then the chosen ones' share: no shape depends on a value.

    For decode steps, whose tokens choose nearly all experts together, so that all weights are read
    anyway. hidden (n, H); chosen, weights (n, k); returns (n, H)."""

    def linear(states, weight, bias):  # (E, n, in) -> (E, n, out)
        if not experts.is_transposed:
            weight = weight.transpose(1, 2)
        states = torch.bmm(states, weight)
        if experts.has_bias:
            states = states + bias[:, None]
        return states

    biases = experts if experts.has_bias else WITHOUT_BIAS
    states = hidden.expand(experts.num_experts, -1, -1)
    if experts.has_gate:
        states = linear(states, experts.gate_up_proj, biases.gate_up_proj_bias)
        states = experts._apply_gate(states)
    else:
        states = experts.act_fn(linear(states, experts.up_proj, biases.up_proj_bias))
    states = linear(states, experts.down_proj, biases.down_proj_bias)
    if experts.has_post_expert_norm:
        states = experts.post_expert_norm(states)
    shares = weights.new_zeros(len(hidden), experts.num_experts).scatter_add(1, chosen, weights)
    return torch.einsum("ne,enh->nh", shares.to(states.dtype), states).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register("grouped_in_autocast", grouped_in_autocast)
ALL_EXPERTS_FUNCTIONS.register("every_expert", every_expert)


@contextlib.contextmanager
def experts_by(configs: list, name: str):
    """Within, this function computes experts that the library's grouped product would compute."""
    changed = [config for config in configs if config._experts_implementation == "grouped_mm"]
    for config in changed:
        config._experts_implementation = name
    try:
        yield
    finally:
        for config in changed:
            config._experts_implementation = "grouped_mm"


def grouped_product_waits(device: torch.device) -> bool:
    """Whether it cannot be captured: but for the generations 9 and 10 PyTorch has no kernel."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10)


# ---- a model's body and its head
#
# The body makes hidden states, the head makes logits of them: a linear map, which some models scale
# (Cohere, Granite, Falcon-H1), cap (Gemma 2) or precede by layers (ModernBERT). The head is never
# written again here: it is the model's own forward pass, with the body replaced by one that hands
# over hidden states which it had made before, a chunk of them at a time.

BODIES: dict[type, str] = {}  # class of a model -> name of its body


def body_of(model):
    """The part of a causal model that makes hidden states: the first that its forward calls."""
    if type(model) not in BODIES:
        BODIES[type(model)] = find_body(model)
    return model.get_submodule(BODIES[type(model)])


@torch.no_grad()
def find_body(model) -> str:
    called = []

    def note(name):
        return lambda module, inputs: called.append(name)

    hooks = [
        part.register_forward_pre_hook(note(name))
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and part is not model
    ]
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    token = ROUTING.set(None)  # nothing to record
    try:
        with dropout_off(model):
            model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        ROUTING.reset(token)
        for hook in hooks:
            hook.remove()
    need(called, f"{model.config.model_type}: found no part of it that makes hidden states")
    return called[0]


class BodyOutput:
    """What a head may ask of its body's output: hidden states; all else is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name):
        return None


class HandOver(torch.nn.Module):
    """Stands where a model's body was, and gives the hidden states that it is told to."""

    def __init__(self, body):
        super().__init__()
        self.replaced = [body]  # in a list: it is not a part of this module

    def __getattr__(self, name):  # Falcon-H1's head asks its body for a factor
        return getattr(self.__dict__["replaced"][0], name)

    def forward(self, *args, **kwargs):
        return BodyOutput(self.hidden)


class Head:
    """A model whose body is a HandOver; all other parts are the model's own, not copies."""

    def __init__(self, model):
        self.body = HandOver(body_of(model))
        self.model = part = shallow_copy(model)
        *path, last = BODIES[type(model)].split(".")
        for name in path:
            part._modules[name] = shallow_copy(part._modules[name])
            part = part._modules[name]
        part._modules[last] = self.body

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (M, H) -> (M, V), in float32 whatever autocast says and the weights are.

        bf16 logits would blur the ratio."""
        self.body.hidden = hidden.float()[None]
        weights = {name: weight.float() for name, weight in self.model.named_parameters()}
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False), dropout_off(self.model):
            output = torch.func.functional_call(self.model, weights, kwargs={"input_ids": ids})
        del self.body.hidden
        return output.logits[0].float()


def shallow_copy(module):
    """The module with a table of its own of the same parts."""
    module = copy.copy(module)
    module._modules = dict(module._modules)
    return module


# ---- mixtures of experts

ROUTING = contextvars.ContextVar("routing", default=None)  # the innermost Routing


class Choice(typing.NamedTuple):
    """What one call of torch.topk chose, a row for each token that the model read."""

    experts: Tensor  # (tokens, k) indices
    among: int  # how many it could choose from
    predicting: Tensor | None  # the rows that predict completion tokens; None: all
    sampler: Tensor | None = None  # (tokens, k) what was taken instead, by SamplerRouting


class Routing(torch.overrides.TorchFunctionMode):
    """Routing Replay (arXiv 2507.18071), a context that sees every torch.topk of a router.

    choices: what was chosen, call by call: once a layer, or twice where groups of experts are
    chosen first (DeepSeek-V3).
    recorded: another such context, whose indices are chosen again, and weighed by the router of
    now, whose gradient flows."""

    def __init__(self, recorded: "Routing | None" = None):
        super().__init__()
        self.choices: list[Choice] = []
        self.predicting: Tensor | None = None  # of the forward pass under way
        self.to_replay = recorded.choices if recorded else []

    def __enter__(self):
        self.token = ROUTING.set(self)
        return super().__enter__()

    def __exit__(self, *error):
        ROUTING.reset(self.token)
        return super().__exit__(*error)

    # the same as hooks of a module, for `entered_with`

    def enter(self, module, inputs):
        self.__enter__()

    def leave(self, module, inputs, output):
        self.__exit__(None, None, None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function not in (torch.topk, torch.Tensor.topk) or result[1].dim() != 2:
            return result
        if ROUTING.get() is not self:  # a pass that is no part of what is recorded
            return result
        taken = self.taken(result[1], args[0].shape[-1])
        if taken is result[1]:
            return result
        return torch.return_types.topk((args[0].gather(-1, taken), taken))

    def taken(self, own: Tensor, among: int) -> Tensor:
        """What a router gets in place of its own choice, (tokens, k) each; keeps a Choice of it."""
        if len(self.choices) < len(self.to_replay):
            own = self.to_replay[len(self.choices)].experts
        self.choices.append(Choice(own, among, self.predicting))
        return own

    def reads(self, predicting: Tensor, sampled: Tensor | None):
        """A forward pass begins; predicting: the tokens that predict completion tokens; sampled
        (tokens, C): what the sampler's routers chose for all its tokens, where it is known."""
        self.predicting = predicting

    def once_more(self, done: int) -> "Routing":
        """A context that does again what this one did after its first `done` choices."""
        again = copy.copy(self)
        again.choices = self.choices[:done]
        return again

    @property
    def experts(self) -> list[Tensor]:
        """(tokens, k) indices, a layer each: without the choices of groups of experts."""
        return [choice.experts for choice in self.expert_choices()]

    def expert_choices(self) -> list[Choice]:
        number = max((choice.among for choice in self.choices), default=0)
        return [choice for choice in self.choices if choice.among == number]

    def flips(self, later: "Routing") -> Tensor:
        """Whether other experts were chosen later, for each layer and completion token."""
        pairs = zip(self.expert_choices(), later.expert_choices())
        return torch.cat([flipped(old, new.experts) for old, new in pairs])


def flipped(choice: Choice, other: Tensor) -> Tensor:
    """Whether its set of experts is another than (tokens, k), for each completion token."""
    differ = (choice.experts.sort()[0] != other.sort()[0]).any(1)
    return differ if choice.predicting is None else differ[choice.predicting]


class SamplerRouting(Routing):
    """Rollout Routing Replay, R3 (arXiv 2510.11370): the sampler's experts are taken again.

    What it chose comes with the rollout that is scored, `Rollout.experts`. As in Megatron-LM's
    RouterReplay, which verl (router_replay mode R3) and SkyRL use, the indices alone are replayed:
    the router of now weighs them, and its gradient flows.

    choices: what its routers would have chosen, each on top of the sampler's choices before it
    (of groups of experts, too)."""

    def __init__(self):
        super().__init__()
        self.sampled: Tensor | None = None  # (tokens, C) of the forward pass under way
        self.begun = 0  # choices before it

    def reads(self, predicting: Tensor, sampled: Tensor | None):
        need(sampled is not None, "expected a rollout with the experts that its sampler chose")
        self.predicting, self.sampled, self.begun = predicting, sampled, len(self.choices)

    def taken(self, own: Tensor, among: int) -> Tensor:
        column = sum(choice.experts.shape[1] for choice in self.choices[self.begun :])
        sampler = self.sampled[:, column : column + own.shape[1]]
        need(sampler.shape == own.shape, "expected the routers that the sampler has")
        self.choices.append(Choice(own, among, self.predicting, sampler))
        return sampler.long()

    def sampler_flips(self) -> Tensor:
        """Whether the sampler chose other experts, for each layer and completion token."""
        return torch.cat([flipped(one, one.sampler) for one in self.expert_choices()])


def will_read(predicting: Tensor, sampled: Tensor | None = None):
    """Tells a Routing, where there is one, of the forward pass to come; see Routing.reads."""
    routing = ROUTING.get()
    if routing is not None:
        routing.reads(predicting, sampled)


# ---- scoring


# kinds of devices where grouped heads beside a mask would fall to the kernel that keeps all scores
EXPAND_HEADS = {"cuda"}


class Prefixes:
    """The distinct prefixes of some texts, numbered: what texts share is computed once.

    texts        their prefixes, each by its number
    a b c d      0 1 2 3
    a b e        0 1 4
    a b c d      the first text again
    """

    first_rows: Tensor  # (D,) the first row of each distinct text; texts that begin alike adjoin
    text: Tensor  # (N,) which of the distinct texts each row is
    number: Tensor  # (D, T) of the prefix that ends with this token; on padding any

    def __init__(self, tokens: Tensor, sizes: Tensor):
        """tokens (N, T): texts, padded on the right; sizes (N,): how many tokens each has."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        padding = steps >= sizes[:, None]
        texts, self.text = tokens.masked_fill(padding, -1).unique(dim=0, return_inverse=True)
        self.first_rows = first_of_each(self.text, len(texts))

        # texts are sorted: a prefix that the text above does not begin with is in no text above
        is_new = torch.ones_like(texts, dtype=torch.bool)
        is_new[1:] = (texts[1:] != texts[:-1]).cumsum(1) > 0
        number = is_new.flatten().cumsum(0).view(is_new.shape) - 1
        # a prefix that is not new has the number of the last text above where it was
        rows = torch.arange(len(texts), device=tokens.device)
        owner = torch.where(is_new, rows[:, None], 0).cummax(0).values
        self.number = number.gather(0, owner)


def first_of_each(which: Tensor, count: int) -> Tensor:
    """(count,) where each of 0, ..., count - 1 stands first in which (n,), which has them all."""
    places = torch.arange(len(which), device=which.device)
    return torch.full_like(places[:count], len(which)).scatter_reduce_(0, which, places, "amin")


class Block(typing.NamedTuple):
    """Rows of tokens that attention sees, padded on the right."""

    tokens: Tensor  # (rows, width)
    sizes: Tensor  # (rows,) tokens of each row
    # (rows, width) of the prefix that ends with a token; see Prefixes. Those of prompts are below
    # rows x width
    number: Tensor

    @staticmethod
    def of_prompts(prompts: Tensor, sizes: Tensor) -> "Block":
        """prompts (P, S): right-aligned; sizes (P,): how many tokens of each."""
        width = prompts.shape[1]
        if width == 0:
            return Block(prompts, sizes, prompts)
        steps = torch.arange(width, device=prompts.device)
        # moved to the left; what comes round is padding
        prompts = prompts.gather(1, (steps - sizes[:, None]) % width)
        prefixes = Prefixes(prompts, sizes)
        return Block(prompts, sizes, prefixes.number[prefixes.text])

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.sizes[:, None]


class Packed:
    """The layout of a pass over whole texts: every distinct prefix once, without padding.

    The model's matrices see one sequence of M tokens; attention sees two padded blocks. So a prompt
    is read once for all completions of its group, and what completions, or prompts, begin with in
    common is read once for all of them. Below a token has the letter of the text that brought it
    first; the second completion of prompt a begins as the first does:

        ids (1, M)        a a a b b b b | c c c d d e          positions (1, M)

        prompts (P, S)    queries = keys          completions (D, T)  queries   keys (D, S + T)
                          a a a .                                     c c c     a a a . c c c
                          b b b b                                     c d d     a a a . c d d
                                                                      e . .     b b b b e . .

    A token is read in order to predict the next one: the last token of a prompt is the first that
    a completion reads, and the last token of a completion is never read.
    """

    ids: Tensor  # (1, M)
    positions: Tensor  # (1, M) within prompt and completion
    places: Tensor  # (M,) where a token stands first in the blocks, flattened one after the other
    sources: Tensor  # for every place of the blocks the index of its token among M; on padding any
    shapes: list  # (P, S) and (D, T)
    group_sizes: list[int]  # distinct completions of each prompt
    pairs: list  # positions of queries and keys, for both blocks
    calls: int  # of attend, one a layer
    experts: Tensor | None = None  # (M, C) that the sampler chose for these tokens

    def __init__(self, prompts: Block, completions: Block, group_sizes: list[int]):
        """Completions of one prompt adjoin; group_sizes: how many each prompt has."""
        device = prompts.tokens.device
        self.group_sizes = group_sizes
        self.shapes = [prompts.tokens.shape, completions.tokens.shape]
        sizes = [shape.numel() for shape in self.shapes]

        # places with the same number have the same token of the M
        places = torch.cat([prompts.mask.flatten(), completions.mask.flatten()]).nonzero()[:, 0]
        number = torch.cat([prompts.number.flatten(), sizes[0] + completions.number.flatten()])
        distinct, which = number[places].unique(return_inverse=True)
        self.places = places[first_of_each(which, len(distinct))]
        self.sources = torch.zeros_like(number)
        self.sources[places] = which

        # causal masks are made of positions
        prompt_steps = torch.arange(prompts.tokens.shape[1], device=device)
        steps = torch.arange(completions.tokens.shape[1], device=device)
        before = prompts.sizes[:, None].repeat_interleave(
            torch.tensor(group_sizes, device=device), dim=0, output_size=len(completions.tokens)
        )
        queries = before + steps
        prefix = torch.where(prompt_steps < before, prompt_steps, 2**30)  # padding: never seen
        self.pairs = [
            (prompt_steps[None], prompt_steps[None]),
            (queries, torch.cat([prefix, queries], dim=1)),
        ]

        of_prompts = prompt_steps.expand(self.shapes[0])
        self.ids = torch.cat([prompts.tokens.flatten(), completions.tokens.flatten()])
        self.ids = self.ids[self.places][None]
        self.positions = torch.cat([of_prompts.flatten(), queries.flatten()])[self.places][None]
        self.expand_heads = device.type in EXPAND_HEADS
        self.calls = 0

    def run(self, body) -> Tensor:
        """Hidden states (M, H) of all tokens."""
        with our_attention(configs_of(body), self), recomputed_layers(body, self):
            output = body(
                self.ids,
                position_ids=self.positions,
                attention_mask=torch.ones_like(self.ids),
                use_cache=False,
            )
        layers = body.config.get_text_config().num_hidden_layers
        need(
            self.calls == layers,
            f"{body.config.model_type}: expected one attention a layer, found {self.calls} in "
            f"{layers} layers: its keys and values cannot be kept",
        )
        return output.last_hidden_state[0]

    def attend(self, module, query, key, value, masks, **options):
        """query, key and value (1, heads, M, dim); returns (1, M, heads, dim)."""
        self.calls += 1
        options["expand_heads"] = self.expand_heads
        prompt_query, query = self.in_blocks(query)
        prompt_key, key = self.in_blocks(key)
        prompt_value, value = self.in_blocks(value)

        outputs = []
        if prompt_query.numel():
            output = attention(module, prompt_query, prompt_key, prompt_value, masks[0], **options)
            outputs.append(output.flatten(0, 1))
        if query.numel():
            key = torch.cat([self.for_each_completion(prompt_key), key], dim=2)
            value = torch.cat([self.for_each_completion(prompt_value), value], dim=2)
            output = attention(module, query, key, value, masks[1], **options)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.places)[None], None

    def in_blocks(self, packed: Tensor) -> list[Tensor]:
        """(1, heads, M, dim) -> (P, heads, S, dim) and (D, heads, T, dim); on padding any token."""
        rows = repeated_rows(packed[0].transpose(0, 1), self.sources)
        blocks = zip(rows.split([shape.numel() for shape in self.shapes]), self.shapes)
        return [block.unflatten(0, shape).transpose(1, 2) for block, shape in blocks]

    def for_each_completion(self, prompts: Tensor) -> Tensor:
        """(P, ...) -> (D, ...); expanded, as the backward pass of indexing is many times slower."""
        each = zip(prompts.split(1), self.group_sizes)
        return torch.cat([prompt.expand(size, -1, -1, -1) for prompt, size in each])


class PackedTexts(Packed):
    """All that must be read to predict every completion token that is the policy's own.

    E tokens are predicted: one for each distinct prefix that ends with such a token."""

    predicting: Tensor  # (E,) those of M that are read to predict them
    targets: Tensor  # (E,) their ids
    predicted: Tensor  # (tokens,) which of them each of the policy's own tokens is, row by row

    def __init__(self, rollout: Rollout):
        prompts, sizes, group_sizes = distinct_prompts(rollout)
        prompt_of_row = torch.arange(len(prompts), device=prompts.device).repeat_interleave(
            torch.tensor(group_sizes, device=prompts.device), output_size=len(rollout.lengths)
        )
        last, longest = rollout.prompt_width - 1, int(rollout.lengths.max())
        tokens = rollout.tokens[:, last : last + longest + 1]

        # a text here: the index of its prompt, in place of all prompt tokens but the last; that
        # one; the completion. So texts of one prompt adjoin when sorted
        texts = Prefixes(torch.cat([prompt_of_row[:, None], tokens], dim=1), rollout.lengths + 2)
        rows, number = texts.first_rows, texts.number[:, 1:]
        super().__init__(
            Block.of_prompts(prompts, sizes),
            Block(tokens[rows, :-1], rollout.lengths[rows], number[:, :-1]),
            prompt_of_row[rows].bincount(minlength=len(prompts)).tolist(),
        )

        own = rollout.completion_mask[:, :longest]
        distinct, self.predicted = number[texts.text, 1:][own].unique(return_inverse=True)
        reading = self.sources[self.shapes[0].numel() :].view(self.shapes[1])[texts.text][own]
        first = first_of_each(self.predicted, len(distinct))
        self.predicting = reading[first]
        self.targets = tokens[:, 1:][own][first]

        if rollout.experts is not None:  # rows with the same prefix: the first one's
            first_rows = first_of_each(prompt_of_row, len(prompts))
            (_, prompt_width), (_, width) = self.shapes
            owners = torch.cat(
                [first_rows.repeat_interleave(prompt_width), rows.repeat_interleave(width)]
            )
            self.experts = rollout.experts[owners[self.places], self.positions[0]]

    def run(self, body) -> Tensor:
        """Hidden states (E, H) that predict the distinct tokens."""
        will_read(self.predicting[self.predicted], self.experts)
        return repeated_rows(super().run(body), self.predicting)


def repeated_rows(rows: Tensor, which: Tensor) -> Tensor:
    """rows[which], where rows may come more than once, or never.

    As an embedding: its backward pass adds up in a fixed order on every device, and is many times
    faster than that of indexing."""
    return F.embedding(which, rows.flatten(1)).view(len(which), *rows.shape[1:])


def distinct_prompts(rollout: Rollout) -> tuple[Tensor, Tensor, list[int]]:
    """Prompts without their last token; equal ones are one where they follow each other.

    Returns their tokens (P, S), right-aligned, their sizes (P,) and how many rows have each."""
    sizes = rollout.prompt_lengths - 1
    last = rollout.prompt_width - 1
    tokens = rollout.tokens[:, last - int(sizes.max()) : last]
    distinct, counts = torch.unique_consecutive(
        torch.cat([sizes[:, None], tokens], dim=1), dim=0, return_counts=True
    )
    return distinct[:, 1:], distinct[:, 0], counts.tolist()


def micro_batches(
    rollout: Rollout, micro_batch_tokens: int | None, packed: bool = True
) -> list[Tensor]:
    """Partition the rows, by length, under a budget of tokens (None: one part); a row that is
    longer than that is a part of its own.

    packed: the prompt of a group is read once, and counts once; else each row reads its own. What
    completions begin with in common is not deducted: a part may take less.
    Groups stay together, but for those at borders.
    Returns LongTensors of rows, in rising order."""
    if micro_batch_tokens is None:
        return [torch.arange(len(rollout.lengths))]

    _, _, group_sizes = distinct_prompts(rollout)
    groups = torch.arange(len(rollout.lengths)).split(group_sizes)
    longest_first = sorted(groups, key=lambda rows: -int(rollout.lengths[rows].max()))

    parts, tokens = [[]], 0.0
    for rows in longest_first:
        readers = len(rows) if packed else 1
        costs = rollout.lengths[rows] + rollout.prompt_lengths[rows] / readers
        for row, cost in zip(rows.tolist(), costs.tolist()):
            tokens += cost
            if tokens > micro_batch_tokens and parts[-1]:
                parts.append([])
                tokens = cost
            parts[-1].append(row)
    return [torch.tensor(sorted(part)) for part in parts]


def padded_states(body, rollout: Rollout) -> Tensor:
    """Hidden states (tokens, H) that predict the policy's own tokens, row by row, of any causal
    model: rows padded on the right, which none sees."""
    start = rollout.prompt_width
    texts = [
        row[start - before : start + length]
        for row, before, length in zip(rollout.tokens, rollout.prompt_lengths, rollout.lengths)
    ]
    ids = pad_sequence(texts, batch_first=True)
    row, step = rollout.completion_mask.nonzero(as_tuple=True)
    position = rollout.prompt_lengths[row] - 1 + step  # of the token before
    will_read(row * ids.shape[1] + position)
    with recomputed_layers(body, layout=None):
        hidden = body(ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    return hidden[row, position]


def score(body, rollout: Rollout, micro_batch_tokens: int | None, head: Callable) -> Tensor:
    """What `head` makes of the hidden states before all completion tokens that are the policy's.

    head: hidden (M, H), targets (M,) -> (k, M).
    Returns (k, N, T) float32, 0 on padding and on what a tool wrote."""
    packed = takes_our_attention(body)
    batches = micro_batches(rollout, micro_batch_tokens, packed)
    scores = []
    with dropout_off(body), experts_by(configs_of(body), "grouped_in_autocast"):
        for rows in batches:
            part = rollout[rows]
            mask = part.completion_mask
            if packed:
                layout = PackedTexts(part)
                values = head(layout.run(body), layout.targets)
                values = repeated_rows(values.T, layout.predicted).T  # of every row's tokens again
            else:
                values = head(padded_states(body, part), part.completions[mask])
            page = values.new_zeros(len(values), *mask.shape)
            scores.append(page.masked_scatter(mask, values))
    in_order = torch.cat(batches).argsort()
    return torch.cat(scores, 1)[:, in_order]


LOGITS_AT_ONCE = 2**25  # float32: 128 MB


def completion_logprobs(
    model,
    rollout: Rollout,
    *,
    temperature: float,
    micro_batch_tokens: int | None = None,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions, and entropies of the distributions, at a temperature.

    entropy_gradient: False where no loss reads entropies, whose gradient is as dear as that of the
    log-probs: it passes over all logits.
    Returns both (N, T), float32, 0 on padding and on what a tool wrote; the same bits with and
    without gradients."""
    head = Head(model)
    at_once = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)

    def chunk(hidden, targets):
        logits = head.logits(hidden)
        if temperature != 1:
            logits = logits / temperature
        logp = logits.log_softmax(-1)
        chosen = logp.gather(1, targets[:, None])[:, 0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = entropies(logp)
        return torch.stack([chosen, entropy])

    def in_chunks(hidden, targets):
        *parts, last = zip(hidden.split(at_once), targets.split(at_once))
        # checkpointed: the backward pass computes the logits of one chunk at a time again; it
        # begins with the last one, whose logits may as well stay
        values = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
        return torch.cat([*values, chunk(*last)], dim=1)

    logprobs, entropy = score(body_of(model), rollout, micro_batch_tokens, in_chunks)
    return logprobs, entropy


def entropies(logp: Tensor) -> Tensor:
    """(M, V) -> (M,), in float32: autocast would round the products to bf16."""
    with torch.autocast(logp.device.type, enabled=False):
        entropy = -torch.linalg.vecdot(logp.exp(), logp)
        if entropy.isnan().any():  # 0 * -inf; seldom, and this is one more pass over all logits
            finite = logp.clamp(min=torch.finfo(logp.dtype).min)
            entropy = -torch.linalg.vecdot(logp.exp(), finite)
    return entropy


SOUND = 1e-3  # nats by which float32 log-probs may differ; rounding makes 1e-5


@torch.no_grad()
def check_scorer(
    model,
    prompts: list[list[int]],
    *,
    pad_id: int,
    max_new_tokens: int = 8,
    record_experts: bool = False,
):
    """Refuses a model that we would sample or score otherwise than its own forward pass does.

    Samples a few tokens, and compares three log-probs of them: the sampler's, the scorer's, and
    those of the whole model over each text alone.
    model: with float32 weights. prompts: a few short ones, of different lengths.
    record_experts: as `generate` will be asked to.
    Raises UserError where a token differs by more than SOUND; with experts, where more than one in
    ten do: where two experts are nearly tied, rounding chooses."""
    name = model.config.model_type
    with expecting(f"{name}: expected a model that can be sampled and scored token by token"):
        samples = generate(
            model,
            prompts,
            group_size=2,
            max_new_tokens=max_new_tokens,
            eos_ids=[],
            pad_id=pad_id,
            generator=torch.Generator().manual_seed(0),
            record_experts=record_experts,
        )
        scored, _ = completion_logprobs(model, samples, temperature=1.0)
        with dropout_off(model):
            own = whole_model_logprobs(model, samples)
    for who, logprobs in (("sampler", samples.sampler_logprobs), ("scorer", scored)):
        gap = (logprobs - own).abs()
        allowed = 0.1 if has_experts(model.config) else 0.0
        need(
            (gap > SOUND).float().mean() <= allowed and bool(gap.isfinite().all()),
            f"{name}: log-probs of our {who} are up to {float(gap.max()):.1g} away from those of "
            f"the model's own forward pass, expected at most {SOUND:g}: it cannot be trained here",
        )


def whole_model_logprobs(model, rollout: Rollout) -> Tensor:
    """What completion_logprobs returns at temperature 1, by a forward pass for each row alone."""
    logprobs = torch.zeros_like(rollout.sampler_logprobs)
    for i, length in enumerate(rollout.lengths.tolist()):
        first = rollout.prompt_width - int(rollout.prompt_lengths[i])
        ids = rollout.tokens[i, first : rollout.prompt_width + length][None]
        output = model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        logp = output.logits[0, -length - 1 : -1].float().log_softmax(-1)
        logprobs[i, :length] = logp.gather(1, ids[0, -length:, None])[:, 0]
    return logprobs


def completion_values(critic, rollout: Rollout, micro_batch_tokens: int | None = None) -> Tensor:
    """Value before each token of the policy's own, (N, T) float32, 0 elsewhere.

    critic: a model's body with a head, critic.value (H + 1,): weights and bias."""

    def head(hidden, _):
        weights, bias = critic.value[:-1], critic.value[-1]
        return ((hidden.float() * weights).sum(-1) + bias)[None]

    return score(critic, rollout, micro_batch_tokens, head)[0]


# ---- sampling

BLOCK = 256  # tokens that a draw takes together


def sample(logits: Tensor, uniform: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Exact inverse-CDF draws: of a block of the vocabulary by its mass, then of a token in it.

    logits: (rows, V), any float dtype.
    uniform: (rows, 2) in (0, 1); unused where temperature is 0, which is greedy.
    Returns tokens (rows,) and their float32 log-probs (rows,) at that temperature (greedy: 1)."""
    logits = logits.float()
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], logits.log_softmax(-1).gather(1, token)[:, 0]
    if temperature != 1:
        logits = logits / temperature

    # masses of tokens, in blocks: a cumulative sum over V would be slow, and less exact
    rows, vocabulary = logits.shape
    block = min(BLOCK, vocabulary)
    peak = logits.amax(-1, keepdim=True)
    # a copy, even where nothing is padded: logits are read again
    whole_blocks = F.pad(logits, (0, -vocabulary % block), value=-torch.inf)
    mass = whole_blocks.sub_(peak).exp_().view(rows, -1, block)

    blocks = mass.sum(-1).cumsum(-1)
    total = blocks[:, -1:]
    chosen = torch.searchsorted(blocks, uniform[:, :1] * total, right=True)
    chosen.clamp_(max=blocks.shape[1] - 1)

    inside = mass.gather(1, chosen[..., None].expand(-1, -1, block))[:, 0].cumsum(-1)
    offset = torch.searchsorted(inside, uniform[:, 1:] * inside[:, -1:], right=True)
    token = (chosen * block + offset).clamp_(max=vocabulary - 1)
    return token[:, 0], (logits.gather(1, token) - peak - total.log())[:, 0]


class Share(typing.NamedTuple):
    """The prompts first, first + step, ... of all: what one of several processes samples."""

    first: int = 0
    step: int = 1


class Page:
    """What is being written: prompts on the left, completions as they come.

    One row more than there are samples, and one column: rows that have ended, and are stepped along
    with the others, write there."""

    tokens: Tensor  # (N + 1, T + 1)
    logprobs: Tensor  # (N + 1, T + 1) float32
    uniforms: Tensor  # (N + 1, T + 1, 2): what a sample draws depends on its index and step alone
    prompts: Tensor  # (N, S), padded on the left
    prompt_sizes: Tensor  # (N,)
    recorder: "Recorder | None" = None  # of experts, where asked

    # with a tool
    replies: "Replies | None" = None
    forced: Tensor | None = None  # (N + 1, T + 1) tokens that are not drawn, but given; -1: drawn
    asks: Tensor | None = None  # (V,) drawn tokens after which a sample stops to ask the tool

    def __init__(self, prompts, group_size, max_new_tokens, pad_id, generator, device, share):
        rows = [
            torch.tensor(prompt, device=device)
            for prompt in prompts[share.first :: share.step]
            for _ in range(group_size)
        ]
        self.prompt_sizes = torch.tensor([len(row) for row in rows], device=device)
        self.prompts = pad_sequence(
            rows, batch_first=True, padding_value=pad_id, padding_side="left"
        )
        shape = (len(rows) + 1, max_new_tokens + 1)
        self.tokens = torch.full(shape, pad_id, device=device)
        self.logprobs = torch.zeros(shape, device=device)

        # drawn for all prompts, so that a completion is the same whoever samples it
        total = len(prompts) * group_size
        uniforms = torch.rand(total + 1, max_new_tokens + 1, 2, generator=generator)
        uniforms.clamp_(min=2**-25)  # never 0, which would draw a token however unlikely
        groups = torch.arange(total).view(-1, group_size)[share.first :: share.step]
        own = torch.cat([groups.flatten(), torch.tensor([total])])
        self.uniforms = uniforms[own].to(device)

    def listen_to(self, replies: "Replies"):
        """From now on a tool may write into the completions."""
        device = self.tokens.device
        self.replies = replies
        self.forced = torch.full_like(self.tokens, -1)
        self.asks = torch.zeros(replies.vocabulary, dtype=torch.bool, device=device)
        self.asks[replies.asking_tokens] = True

    def rollout(self, eos_ids: list[int]) -> Rollout:
        tokens = self.tokens[:-1, :-1]
        ends = torch.isin(tokens, torch.tensor(eos_ids, dtype=torch.long, device=tokens.device))
        if self.forced is not None:  # what a tool wrote ends nothing
            ends = ends & (self.forced[:-1, :-1] < 0)
        ended = ends.any(1)
        lengths = torch.where(ended, ends.int().argmax(1) + 1, tokens.shape[1])
        longest = lengths.max()
        experts = None
        if self.recorder is not None:
            experts = self.recorder.of_samples(self.prompts.shape[1] + longest)
        return Rollout(
            tokens=torch.cat([self.prompts, tokens[:, :longest]], dim=1),
            prompt_lengths=self.prompt_sizes,
            lengths=lengths,
            sampler_logprobs=self.logprobs[:-1, :longest],
            truncated=~ended,
            experts=experts,
            forced=None if self.forced is None else self.forced[:-1, :longest] >= 0,
        )


class PackedPrompts(Packed):
    """Prompts alone, whose keys and values are kept for the samples to start with."""

    keys: list[Tensor]  # a layer each: (P, kv_heads, S, dim)
    values: list[Tensor]
    in_prompts: Tensor  # (P, S) what is no padding

    def __init__(self, prompts, sizes):
        """prompts (P, S): tokens, right-aligned; sizes (P,): how many of them."""
        block = Block.of_prompts(prompts, sizes)
        self.in_prompts = block.mask  # (P, S)
        nothing = Block(prompts[:, :0], 0 * sizes, prompts[:, :0])
        super().__init__(block, nothing, [1] * len(prompts))
        self.keys, self.values = [], []

    def attend(self, module, query, key, value, masks, **options):
        self.keys.append(self.in_blocks(key)[0])
        self.values.append(self.in_blocks(value)[0])
        return super().attend(module, query, key, value, masks, **options)

    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.keys + self.values)


class Recorder:
    """Writes down which experts the sampler chooses, for Rollout.experts.

    C columns hold what the routers chose one after the other, call by call, as in Routing.choices.
    A Routing sees every call of torch: around a whole decode step it makes a small one a sixth
    slower. So there is one in each module that has a router, which a pass over one token finds."""

    experts: Tensor  # (N + 1, S + T, C) by row of the page and position; uint8, or int16 if need be
    routings: dict  # module that calls torch.topk -> Routing within it
    choices: list[Choice]  # of the forward pass under way

    def __init__(self, model, page: Page):
        body = body_of(model)
        every = {module: Routing() for module in body.modules()}
        with entered_with(every):
            Prompts(model, page).read_one_token()
        self.routings = {module: one for module, one in every.items() if one.choices}
        found = [choice for one in self.routings.values() for choice in one.choices]
        need(found, f"{model.config.model_type}: the routers of this model cannot be watched")

        self.choices = []
        for routing in self.routings.values():
            routing.choices = self.choices  # one list: in the order of the calls
        largest = max(choice.among for choice in found)
        self.experts = torch.zeros(
            len(page.tokens),
            page.prompts.shape[1] + page.tokens.shape[1] - 1,
            sum(choice.experts.shape[1] for choice in found),
            dtype=torch.uint8 if largest <= 2**8 else torch.int16,
            device=page.tokens.device,
        )

    def take(self) -> Tensor:
        """(tokens, C) what was chosen in the forward pass that has ended."""
        chosen = torch.cat([choice.experts for choice in self.choices], dim=1)
        self.choices.clear()
        return chosen.to(self.experts.dtype)

    def of_samples(self, width: int) -> Tensor:
        return self.experts[:-1, :width].clone()  # without the page's room for longer ones


@contextlib.contextmanager
def entered_with(routings: dict):
    """Within, each module's forward pass runs in its Routing; of nested ones the inner one sees."""
    hooks = []
    for module, routing in routings.items():
        hooks.append(module.register_forward_pre_hook(routing.enter))
        hooks.append(module.register_forward_hook(routing.leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Slots:
    """The layout of sampling: samples under way, a slot each, with room for keys and values.

                  position 0   1   2   3   4   5   6  ...  width - 1
        slot 0             p   p   p   c   c   .   .         keys[layer][0, :, position]
        slot 1             p   p   p   p   p   c   .         values[layer][0, :, position]
        ...

    A decode step reads one token a slot, `token` at `position`, writes its key and value there, and
    draws the next one. Live slots are the first ones. A sample that has ended is not `alive`: it is
    stepped along, in place, until its slot is given to another."""

    token: Tensor  # (slots,) the last token, not yet read
    position: Tensor  # (slots,) its position
    step: Tensor  # (slots,) tokens sampled so far
    row: Tensor  # (slots,) the sample, as a row of the page
    alive: Tensor  # (slots,) 0 or 1
    stepped: int  # how many slots are stepped: the first ones
    free: list[int]  # slots without a sample: before the first step all, later some of the stepped
    keys: list[Tensor]  # a layer each: (slots, kv_heads, width, dim)
    values: list[Tensor]
    pairs: list  # positions of queries and keys of the step under way, from which masks are made

    def __init__(
        self,
        model,
        slots: int,
        width: int,
        prompts: PackedPrompts,
        page: Page,
        eos_ids,
        temperature,
    ):
        self.model, self.page, self.temperature = model, page, temperature
        device = page.tokens.device
        self.range = torch.arange(max(slots, width), device=device)  # of slots, and of positions
        self.eos_ids = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self.state = torch.zeros(slots, 5, dtype=torch.long, device=device)
        self.token, self.position, self.step, self.row, self.alive = self.state.unbind(1)
        self.stepped, self.free = slots, list(range(slots))
        self.keys = [empty_memory(keys, slots, width) for keys in prompts.keys]
        self.values = [empty_memory(values, slots, width) for values in prompts.values]

    def room(self) -> int:
        """How many samples could start."""
        return len(self.free)

    def start(self, samples: list[int], prompts: PackedPrompts, which: list[int]):
        """Samples take free slots, with what was read of their prompts; which: each one's."""
        slots, self.free = self.free[: len(samples)], self.free[len(samples) :]
        self.begin(slots, samples, prompts, which)
        self.row[slots] = torch.tensor(samples, device=self.row.device)

    def begin(self, slots: list[int], samples: list[int], prompts: PackedPrompts, which: list[int]):
        """Slots hold what the samples begin with: all of their prompt but its last token."""
        copy_memory(self.keys, slots, prompts.keys, which)
        copy_memory(self.values, slots, prompts.values, which)
        self.token[slots] = self.page.prompts[samples, -1]
        self.position[slots] = self.page.prompt_sizes[samples] - 1
        self.step[slots] = 0
        self.alive[slots] = 1

    def close_ranks(self):
        """The last live slots move into the free ones, so that fewer are stepped."""
        live = self.stepped - len(self.free)
        moving = sorted(set(range(live, self.stepped)) - set(self.free))
        holes = [slot for slot in self.free if slot < live]
        self.move(moving, holes)
        self.state[live:] = 0  # they may be stepped along
        self.stepped, self.free = live, []

    def move(self, slots: list[int] | Tensor, places: list[int] | Tensor):
        """Places get what slots have: their state, and the keys and values written so far."""
        if len(slots):
            written = int(self.position[slots].max()) + 1
            for memory in self.keys + self.values:
                memory[places, :, :written] = memory[:, :, :written][slots]
        self.state[places] = self.state[slots]

    def release(self) -> int:
        """What has ended gives its slot back; returns how many samples have."""
        self.free = (self.alive[: self.stepped] == 0).nonzero()[:, 0].tolist()
        if self.page.replies is not None and self.free:
            self.free = reply_to(self, self.free)
        return len(self.free)

    def attend(self, module, query, key, value, masks, **options):
        """query, key and value (rows, heads, 1, dim) of one new token a row."""
        keys, values = self.keys[module.layer_idx], self.values[module.layer_idx]
        rows = len(query)
        position = self.position[:rows]
        keys[self.range[:rows], :, position] = key[:, :, 0]
        values[self.range[:rows], :, position] = value[:, :, 0]
        [mask] = masks
        span = mask.shape[3]
        output = attention(
            module, query, keys[:rows, :, :span], values[:rows, :, :span], mask, **options
        )
        return output.contiguous(), None

    @torch.inference_mode()
    def decode_one_token(self, rows: int, span: int):
        """Sample one token in the first rows, all at positions below span; no host sync."""
        ids, position = self.token[:rows, None], self.position[:rows, None]
        self.pairs = [(position, self.range[None, :span])]
        output = self.model(
            ids, position_ids=position, attention_mask=torch.ones_like(ids), use_cache=False
        )
        self.draw(output.logits[:, 0])

    def draw(self, logits: Tensor):
        """A token after each of the first slots, from logits (rows, V)."""
        token, position, step, row, alive = self.state[: len(logits)].unbind(1)
        uniforms = self.page.uniforms[row, step]
        chosen, logprobs = sample(logits, uniforms, self.temperature)

        nowhere = len(self.page.tokens) - 1
        row = torch.where(alive > 0, row, nowhere)
        if self.page.replies is not None:
            chosen, logprobs = self.given_or_drawn(row, step, chosen, logprobs)
        self.page.tokens[row, step] = chosen
        self.page.logprobs[row, step] = logprobs
        self.record_experts(row, position)

        token.copy_(torch.where(alive > 0, chosen, token))
        position += alive
        last = self.page.tokens.shape[1] - 2
        goes_on = (chosen[:, None] != self.eos_ids).all(1) & (step < last)
        if self.page.replies is not None:
            goes_on = self.goes_on_beside_a_tool(row, step, chosen, goes_on)
        step += alive
        alive *= goes_on

    def record_experts(self, row: Tensor, position: Tensor):
        """What the routers chose in this decode step; no host sync: it may be captured."""
        recorder = self.page.recorder
        if recorder is not None:
            recorder.experts[row, position] = recorder.take()

    def given_or_drawn(self, row, step, chosen, logprobs) -> tuple[Tensor, Tensor]:
        """The token that a tool gives for this step, where there is one, instead of the drawn one:
        what others draw does not change, as each step of a row has its own random numbers."""
        given = self.page.forced[row, step]
        is_given = given >= 0
        return torch.where(is_given, given, chosen), torch.where(is_given, 0.0, logprobs)

    def goes_on_beside_a_tool(self, row, step, chosen, goes_on) -> Tensor:
        """A given token ends nothing but at the limit; a drawn one may stop the sample to ask."""
        is_given = self.page.forced[row, step] >= 0
        last = self.page.tokens.shape[1] - 2
        return torch.where(is_given, step < last, goes_on & ~self.page.asks[chosen])


class SharedSlots(Slots):
    """Slots of samples that have drawn the same so far are one, which is stepped once for all.

        slot 0    7 * 6 = 4 2 ; ...      samples 0, 1, 3, 4, 6, 7
        slot 1    7 * 6 = 4 8 ; ...      samples 2, 5

    Where samples of a slot draw different tokens, they part: those of one token keep the slot, the
    others get slots with copies of its keys and values. As the host must see what was drawn, this
    is for a CPU. There are never more slots in use than samples under way, so one is always free.

    `sample` and `slot` say who is where; `row`, `alive` and `free` of a slot are not used."""

    sample: Tensor  # (samples under way,) rows of the page, in the order of their slots
    slot: Tensor  # (samples under way,) each one's; all that share one have taken as many steps
    ended: int  # samples that have ended in the last step

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sample, self.slot = self.range[:0], self.range[:0]
        self.stepped, self.ended = 0, 0

    def room(self) -> int:
        return len(self.state) - len(self.sample)

    def start(self, samples: list[int], prompts: PackedPrompts, which: list[int]):
        """A slot for each prompt; which: each sample's, where equal ones adjoin."""
        which, slot = torch.tensor(which).unique_consecutive(return_inverse=True)
        first = first_of_each(slot, len(which)).tolist()
        slots = list(range(self.stepped, self.stepped + len(which)))
        self.begin(slots, [samples[i] for i in first], prompts, which.tolist())
        self.sample = torch.cat([self.sample, torch.tensor(samples)])
        self.slot = torch.cat([self.slot, self.stepped + slot])
        self.stepped += len(which)

    def close_ranks(self):
        """They are closed: see `part`."""

    def release(self) -> int:
        return self.ended

    def draw(self, logits: Tensor):
        """A token for each sample, from the logits (rows, V) of its slot."""
        step = self.step[self.slot]
        shared = len(logits) < len(self.slot)  # else each sample has its own slot, in order
        uniforms = self.page.uniforms[self.sample, step]
        chosen, logprobs = sample(
            logits[self.slot] if shared else logits, uniforms, self.temperature
        )
        self.page.tokens[self.sample, step] = chosen
        self.page.logprobs[self.sample, step] = logprobs
        recorder = self.page.recorder
        if recorder is not None:
            recorder.experts[self.sample, self.position[self.slot]] = recorder.take()[self.slot]

        last = self.page.tokens.shape[1] - 2
        goes_on = (chosen[:, None] != self.eos_ids).all(1) & (step < last)
        self.ended = len(goes_on) - int(goes_on.sum())
        self.sample, slot = self.sample[goes_on], self.slot[goes_on]
        self.part(slot, chosen[goes_on], logits.shape[1])

    def part(self, slot: Tensor, chosen: Tensor, vocabulary: int):
        """Samples that had a slot together, and did not draw the same, get slots of their own.

        slot, chosen (samples,): where each was, and the token that it drew."""
        distinct, which = (slot * vocabulary + chosen).unique(return_inverse=True)
        before, token = distinct // vocabulary, distinct % vocabulary
        self.stepped = len(distinct)

        # the first token drawn in a slot keeps the slot; what is left over takes what is left free
        stays = torch.ones_like(before, dtype=torch.bool)
        stays[1:] = before[1:] != before[:-1]
        stays &= before < self.stepped
        is_free = torch.ones_like(before, dtype=torch.bool)
        is_free[before[stays]] = False
        place = before.clone()
        place[~stays] = is_free.nonzero()[:, 0]

        self.move(before[~stays], place[~stays])
        self.token[place] = token
        self.position[: self.stepped] += 1
        self.step[: self.stepped] += 1
        self.slot, order = place[which].sort()
        self.sample = self.sample[order]


def empty_memory(prompts: Tensor, slots: int, width: int) -> Tensor:
    """(P, kv_heads, S, dim) -> (slots, kv_heads, width, dim).

    Zeros: what nobody wrote is masked, but 0 * nan is nan."""
    return prompts.new_zeros(slots, prompts.shape[1], width, prompts.shape[3])


def copy_memory(mine: list[Tensor], slots: list[int], theirs: list[Tensor], rows: list[int]):
    for to, source in zip(mine, theirs):
        to[slots, :, : source.shape[2]] = source[rows]


class DecodeStep:
    """slots.decode_one_token, replayed from a CUDA graph while its shape stays the same."""

    def __init__(self, slots: Slots, use_graphs: bool):
        self.slots, self.use_graphs = slots, use_graphs
        self.shape, self.graph = None, None

    def __call__(self, shape: tuple[int, int]):
        if self.graph is not None and shape == self.shape:
            self.graph.replay()
            return
        self.slots.decode_one_token(*shape)
        if self.use_graphs and shape != self.shape:  # it has run once, as a capture requires
            self.shape, self.graph = shape, None  # first frees the memory of the graph before it
            self.graph = capture(self.slots.decode_one_token, shape)


def capture(step: Callable, shape: tuple[int, int]):
    """step, which has run at this shape, as a CUDA graph; None where it cannot be one."""
    graph = torch.cuda.CUDAGraph()
    try:
        # the outer stream: a capture that breaks off leaves its own behind
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            torch.cuda.set_sync_debug_mode("error")  # in time: where CUDA objects, memory is lost
            step(*shape)
        return graph
    except torch.OutOfMemoryError:  # it is no sign that the step cannot be captured
        raise
    except RuntimeError as error:
        warnings.warn(f"sampling without CUDA graphs: {error}", stacklevel=2)
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Pace(typing.NamedTuple):
    """How coarse the shapes of decode steps are, and how often the host looks at the slots."""

    span: int  # the attended positions are a multiple of this
    steps: int  # decode steps between looks, each of which waits for the device
    rows: int  # the stepped slots are a multiple of this
    graphs: bool  # steps are captured and replayed
    shares: bool = False  # samples share a slot until they differ: the host must see each step


# a GPU wants few shapes and few waits; a CPU wants no wasted row
PACE = {
    "cuda": Pace(span=256, steps=8, rows=32, graphs=True),
    "mps": Pace(span=64, steps=4, rows=8, graphs=False),
    "cpu": Pace(span=32, steps=1, rows=1, graphs=False, shares=True),
}


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_ids: list[int],
    pad_id: int,
    generator: torch.Generator | None = None,
    max_slots: int | None = None,
    cache_gb: float | None = None,
    share: Share = Share(),  # noqa: B008 (it is immutable)
    record_experts: bool = False,
    replies: "Replies | None" = None,
) -> Rollout:
    """Sample group_size completions of each prompt (token ids), or of a share of the prompts.

    A Page is the paper that completions are written on, Prompts reads prompts, Slots are writers at
    work (on a CPU one writes for all samples that have drawn the same so far: SharedSlots), and
    `fill_page` is the loop. A model whose attention we cannot replace is sampled by
    transformers' own `generate`.

    temperature: 0 is greedy, with log-probs of temperature 1.
    generator (CPU): it alone decides on tokens, neither max_slots nor cache_gb do.
    max_slots: samples under way at once. cache_gb: of the keys and values of prompts and samples
    together (None: see default_cache_gb); transformers' own caches of other models are not bounded.
    record_experts: keep what routers choose, for SamplerRouting; see Recorder.
    replies: a tool that may write into completions, within max_new_tokens.
    Raises UserError for what cannot be sampled."""
    need(group_size >= 1, f"group_size {group_size}: expected at least 1")
    need(max_new_tokens >= 1, f"max_new_tokens {max_new_tokens}: expected at least 1")
    need(temperature >= 0, f"temperature {temperature}: expected at least 0")
    need(prompts and all(prompts), "prompts: expected one or more, of one token or more")
    largest, rows = max(map(max, prompts)), len(model.get_input_embeddings().weight)
    need(largest < rows, f"prompts: expected tokens below {rows}, the embedding's, got {largest}")

    page = Page(prompts, group_size, max_new_tokens, pad_id, generator, model.device, share)
    if replies is not None:
        need(
            takes_our_attention(model),
            f"--tool: {model.config.model_type} is sampled by transformers' own generate, "
            "expected a model that we sample ourselves",
        )
        page.listen_to(replies)
    with (
        dropout_off(model),
        transposed_weights(model),
        tqdm(None, "sampling", len(page.prompts), leave=False, disable=None) as bar,
    ):
        if takes_our_attention(model):
            with recorded(model, page, record_experts):
                fill_page(model, page, eos_ids, temperature, max_slots, cache_gb, bar)
        else:
            need(not record_experts, f"{model.config.model_type}: {NOT_RECORDED}")
            fill_page_by_transformers(model, page, eos_ids, pad_id, temperature, max_slots, bar)
    samples = page.rollout(eos_ids)
    need(
        samples.sampler_logprobs.isfinite().all(),
        f"{model.config.model_type}: the model's logits are not finite (NaN or inf)",
    )
    return samples


NOT_RECORDED = "transformers' own generate samples it, which does not tell what experts it takes"


@contextlib.contextmanager
def recorded(model, page: Page, record_experts: bool):
    """Within, the experts of every forward pass are written down, where asked."""
    if not record_experts:
        yield
        return
    page.recorder = Recorder(model, page)
    with entered_with(page.recorder.routings):
        yield


def fill_page(model, page: Page, eos_ids, temperature, max_slots, cache_gb, bar):
    """Samples every row of the page, in slots: one that ends makes room for the next."""
    pace = PACE.get(page.tokens.device.type, PACE["cpu"])
    width = page.prompts.shape[1] + page.tokens.shape[1] - 1
    prompts = Prompts(model, page)
    probe = prompts.read_one_token()  # of its keys and values come sizes and shapes
    rows, prompts.at_once = share_memory(page, width, probe.nbytes(), max_slots, cache_gb)
    # what a tool says is a sample's own matter; other devices may have the pace of a CPU
    shares = pace.shares and page.replies is None and page.tokens.device.type == "cpu"
    kind = SharedSlots if shares else Slots
    slots = kind(model, rows, width, probe, page, eos_ids, temperature)
    del probe

    step = DecodeStep(slots, pace.graphs)
    configs, experts = configs_of(model), "grouped_mm"
    if pace.graphs and grouped_product_waits(page.tokens.device):
        experts = "every_expert"
    span = 0
    with our_attention(configs, slots):
        while True:
            # 1. samples that wait take the free slots
            while slots.room() and prompts.waiting():
                samples, chunk, which = prompts.take(slots.room())
                slots.start(samples, chunk, which)
                del chunk  # the last of its samples may have started: nobody holds it then

            # 2. none waits: the last live slots move into the free ones, fewer rows are left
            if slots.room():
                slots.close_ranks()
            if slots.stepped == 0:
                break

            # 3. some tokens for every row, in one of few shapes, so that a graph can be replayed
            longest = int(slots.position[: slots.stepped].max()) + pace.steps
            span = max(span, longest) if prompts.waiting() else longest
            shape = (
                min(round_up(slots.stepped, pace.rows), len(slots.state)),
                min(round_up(span, pace.span), width),
            )
            with experts_by(configs, experts):
                for _ in range(pace.steps):
                    step(shape)

            # 4. what has ended gives its slot back
            bar.update(slots.release())


PROMPT_TOKENS = 2**14  # read at once, padding included: attention needs their square, a prompt each


def share_memory(page: Page, width: int, token_bytes: int, max_slots, cache_gb) -> tuple[int, int]:
    """How many slots, and how many prompt tokens at once, have room; UserError for none.

    Prompts get a quarter of it at most, but room for one, and no more than all would take."""
    if cache_gb is None:
        cache_gb = default_cache_gb(page.tokens.device)
    total, longest = page.prompts.shape
    tokens = int(cache_gb * 1e9 / token_bytes)
    smallest = longest + width
    need(
        tokens >= smallest,
        f"cache_gb {cache_gb:.3g}: expected at least {smallest * token_bytes / 1e9:.3g}, for the "
        "keys and values of one prompt and one completion",
    )
    at_once = max(longest, min(tokens // 4, PROMPT_TOKENS, total * longest))
    at_once = min(at_once, tokens - width)
    rows = (tokens - at_once) // width
    return min(total, max_slots or total, rows), at_once


def default_cache_gb(device: torch.device, later_gb: float = 0.0) -> float:
    """Memory for keys and values where none was said: most of what is free on a GPU, less what the
    caller will want later (gradients, an optimiser's moments); else half of the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0.8 * (free + cached) / 1e9 - later_gb, 0.0)
    if not hasattr(os, "sysconf"):  # Windows does not tell: no bound
        return 1e9
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


class Prompts:
    """Keys and values of the prompts that samples start with: of a chunk of prompts at a time.

    A chunk is read when the first of its samples finds a slot, and forgotten when the last has."""

    at_once: int  # tokens of a chunk, its padding included

    def __init__(self, model, page: Page):
        self.model = model
        keyed = torch.cat([page.prompt_sizes[:, None], page.prompts], dim=1)
        # equal prompts are one where they follow each other; owner: the prompt of each sample
        distinct, owner = torch.unique_consecutive(keyed, dim=0, return_inverse=True)
        self.tokens, self.sizes = distinct[:, 1:], distinct[:, 0]
        self.owner = owner.tolist()
        self.recorder = page.recorder
        self.next = 0  # the first sample that has not started
        self.chunk: PackedPrompts | None = None
        self.first = 0  # the chunk's first prompt
        self.end = 0  # the sample after the chunk's last

    def waiting(self) -> bool:
        return self.next < len(self.owner)

    def take(self, count: int) -> tuple[list[int], PackedPrompts, list[int]]:
        """Up to count samples, prompts that were read, and which of these are the samples'."""
        if self.next == self.end:
            self.read_chunk()
        samples = list(range(self.next, min(self.next + count, self.end)))
        which = [self.owner[sample] - self.first for sample in samples]
        chunk = self.chunk
        self.next += len(samples)
        if self.next == self.end:
            self.chunk = None
        return samples, chunk, which

    def read_chunk(self):
        self.first = self.owner[self.next]
        count, longest = 0, 0
        for size in self.sizes[self.first :].tolist():
            if count and (count + 1) * max(longest, size) > self.at_once:
                break
            count, longest = count + 1, max(longest, size)
        self.end = bisect.bisect_left(self.owner, self.first + count)
        rows = slice(self.first, self.first + count)
        self.chunk = self.read(self.tokens[rows, -longest:], self.sizes[rows])
        if self.recorder is not None:
            self.record_experts(self.chunk)

    def record_experts(self, chunk: PackedPrompts):
        """The choices for the tokens of a chunk's prompts, at every sample that starts with it."""
        chosen = self.recorder.take()
        blocks = chunk.in_blocks(chosen[None, None])[0][:, 0]  # (P, S, C)
        blocks = torch.where(chunk.in_prompts[..., None], blocks, 0)
        which = [owner - self.first for owner in self.owner[self.next : self.end]]
        self.recorder.experts[self.next : self.end, : blocks.shape[1]] = blocks[which]

    def read_one_token(self) -> PackedPrompts:
        """To learn the shapes of keys and values."""
        token = self.read(self.tokens[:1, -1:], self.sizes[:1].clamp(max=1))
        if self.recorder is not None:
            self.recorder.choices.clear()
        return token

    def read(self, tokens: Tensor, sizes: Tensor) -> PackedPrompts:
        prompts = PackedPrompts(tokens, sizes)
        prompts.run(body_of(self.model))
        return prompts


class OurDraw(transformers.LogitsProcessor):
    """Draws as `sample` does within transformers' `generate`, which then takes the only token left.

    So completions depend on the page's uniforms alone, and the log-probs are of what was drawn."""

    def __init__(self, page: Page, rows: Tensor, temperature: float):
        self.page, self.rows, self.temperature = page, rows, temperature
        self.step = 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        uniforms = self.page.uniforms[self.rows, self.step]
        chosen, logprobs = sample(logits, uniforms, self.temperature)
        self.page.tokens[self.rows, self.step] = chosen
        self.page.logprobs[self.rows, self.step] = logprobs
        self.step += 1
        return torch.full_like(logits, -torch.inf).scatter(1, chosen[:, None], 0.0)


def fill_page_by_transformers(model, page: Page, eos_ids, pad_id, temperature, max_slots, bar):
    """Samples every row of the page by the model's own `generate`, with whatever cache it has.

    Prompts of one length at a time: a state must not read padding."""
    for size in page.prompt_sizes.unique().tolist():
        same = (page.prompt_sizes == size).nonzero()[:, 0]
        for rows in same.split(max_slots or len(same)):
            ids = page.prompts[rows, -size:]
            with own_generation_config(model, eos_ids, pad_id):
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=page.tokens.shape[1] - 1,
                    logits_processor=[OurDraw(page, rows, temperature)],
                )
            forget_after_end(page, rows, eos_ids, pad_id)
            bar.update(len(rows))


@contextlib.contextmanager
def own_generation_config(model, eos_ids: list[int], pad_id: int):
    """No penalty, filter or length that the model's own configuration asks for."""
    before = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=eos_ids or None, pad_token_id=pad_id
    )
    try:
        yield
    finally:
        model.generation_config = before


def forget_after_end(page: Page, rows: Tensor, eos_ids: list[int], pad_id: int):
    """`generate` steps rows that have ended along: what was drawn there goes."""
    tokens = page.tokens[rows]
    ends = torch.isin(tokens, torch.tensor(eos_ids, dtype=torch.long, device=tokens.device))
    after = ends.cumsum(1) - ends.long() > 0
    page.tokens[rows] = tokens.masked_fill(after, pad_id)
    page.logprobs[rows] = page.logprobs[rows].masked_fill(after, 0.0)


# ---- a tool

LONGEST_REPLY = 100_000  # characters of a reply that are read: to tokenise more takes time


class Replies:
    """What a tool says to completions.

    It is asked when a token of the policy's completes a marker, say `</calc>`: it gets the text of
    the completion so far. The tokens of what it returns are written into the completion, which then
    goes on. None, or a fault, is no reply. Its text is plain text: no control token comes of it."""

    faults: int  # how often it raised, or returned what is no text
    fault: str  # the first one's text
    asking_tokens: list[int]  # those that can complete the marker: after others nobody asks

    def __init__(self, tool: Tool, tokenizer, vocabulary: int):
        """vocabulary: rows of the model's embedding.

        Raises UserError where no token can complete the marker."""
        self.tool, self.tokenizer, self.vocabulary = tool, tokenizer, vocabulary
        self.faults, self.fault = 0, ""
        known = range(min(len(tokenizer), vocabulary))
        # a token with a part of a character reads as "\ufffd"
        wanted = {tool.after[-1], "\ufffd"}
        self.asking_tokens = [token for token in known if wanted.intersection(self.read([token]))]
        need(
            self.asking_tokens,
            f"--tool-after {tool.after}: no token of the model's tokenizer can complete it",
        )
        self.control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def read(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def to(self, ids: list[int], room: int) -> list[int]:
        """The reply to a completion, cut to the room that is left; [] for none."""
        if not self.is_asked(ids):
            return []
        text = self.read(ids)
        try:
            return self.tokens(self.tool.function(text))[:room]
        except (Exception, SystemExit) as error:  # a user's function may do anything
            self.faults += 1
            self.fault = self.fault or f"--tool: {error!r:.200} on {text!r:.80}"
            return []

    def is_asked(self, ids: list[int]) -> bool:
        """Whether the last token completes the marker."""
        marker = self.tool.after
        tail = self.read(ids[-len(marker.encode()) :])  # a token is a byte at least
        if marker not in tail and "\ufffd" not in tail:
            return False
        return self.read(ids).count(marker) > self.read(ids[:-1]).count(marker)

    def tokens(self, reply: str | None) -> list[int]:
        need(
            reply is None or isinstance(reply, str),
            f"it returned {reply!r:.80}; expected text or None",
        )
        ids = self.tokenizer(
            (reply or "")[:LONGEST_REPLY], add_special_tokens=False, split_special_tokens=True
        ).input_ids
        need(not self.control.intersection(ids), f"{reply!r:.80} holds a control token")
        need(max(ids, default=0) < self.vocabulary, f"{reply!r:.80} does not fit the embedding")
        return ids


def reply_to(slots: Slots, stopped: list[int]) -> list[int]:
    """Samples that stopped to ask the tool go on, with or without a reply. Returns the slots that
    do not, because their samples have ended."""
    page, limit = slots.page, slots.page.tokens.shape[1] - 1
    rows, steps = slots.row[stopped], slots.step[stopped].tolist()
    eos_ids = slots.eos_ids.tolist()
    ended, going = [], []
    for slot, row, step, ids in zip(stopped, rows, steps, page.tokens[rows].tolist()):
        if step == limit or ids[step - 1] in eos_ids:
            ended.append(slot)
            continue
        reply = page.replies.to(ids[:step], room=limit - step)
        page.forced[row, step : step + len(reply)] = page.forced.new_tensor(reply)
        going.append(slot)
    slots.alive[going] = 1
    return ended


# ---- models and tokenizers


class ModelFacts(typing.NamedTuple):
    """What is known of a model before its weights are loaded."""

    tokenizer: transformers.PreTrainedTokenizerBase
    context: int  # tokens
    has_experts: bool
    vocabulary: int  # rows of its embedding: no token id may be larger


def inspect_model(source: str | Path) -> ModelFacts:
    """UserError for what is no causal language model with an end token."""
    need_no_run(source)
    with expecting(f"--model {source}: expected a folder or hub name of a causal language model"):
        config, tokenizer = read_config(source)
        causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        found = config.architectures or [config.model_type]
        need(causal.intersection(found), f"found {', '.join(found)}")
        need(tokenizer.eos_token and len(tokenizer) > 1, "found no end token in its tokenizer")
    vocabulary = config.get_text_config().vocab_size
    return ModelFacts(tokenizer, context_of(config), has_experts(config), vocabulary)


def need_no_run(source: str | Path):
    """The folder of a run is no model, but it has some."""
    saved = Path(source).glob("checkpoints/step-*")
    newest = max(saved, key=lambda path: (len(path.name), path.name), default=None)
    need(newest is None, f"--model {source}: it is the folder of a run; expected one of {newest}")


def read_config(source: str | Path):
    """Configuration and tokenizer; of a folder the headers of its weights are read, too."""
    parts = Path(source).parts  # the hub, which is asked five times, has at most OWNER/NAME
    is_path = len(parts) > 2 or str(source).startswith((".", "/", "~"))
    need(Path(source).exists() or not is_path, "there is no such folder")
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    with expecting("found no tokenizer there (tokenizer.save_pretrained writes one)"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if Path(source).is_dir():
        files = list(Path(source).glob("*.safetensors"))
        need(files, "found no *.safetensors (pickles can run code)")
        for file in files:
            safetensors.safe_open(file, "pt")
    return config, tokenizer


def need_recorded_experts(source: str | Path):
    """UserError for a model whose experts are not told while it samples, before weights load."""
    config, _ = read_config(source)
    with torch.device("meta"):  # the model's classes decide; its weights take no memory there
        model = AutoModelForCausalLM.from_config(config)
    need(takes_our_attention(model), f"{config.model_type}: {NOT_RECORDED}")


def has_experts(config) -> bool:
    """Whether it speaks of any: a dense model that shares its configuration with a mixture does."""
    return "expert" in config.to_json_string()


def context_of(config) -> int:
    """Tokens; where the model does not say, more than anybody asks for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20


def load_model(source: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """A causal language model in evaluation mode; UserError for weights that do not fit."""
    model = load_weights(AutoModelForCausalLM, source, "--model", dtype)
    return model.to(device).eval()


def load_weights(kind: type, source: str | Path, flag: str, dtype):
    """From safetensors alone; where some are missing, transformers would go on with random ones."""
    with expecting(f"{flag} {source}: expected weights that fit its config.json"), quiet_loading():
        model, report = kind.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # it is the report that we judge by
        )
        for name, found, wanted in sorted(report["mismatched_keys"]):
            need(False, f"{name} has the shape {tuple(found)}, not {tuple(wanted)}")
        missing = sorted(report["missing_keys"])
        need(not missing, f"{len(missing)} are missing, {', '.join(missing[:3])} among them")
    return model


@contextlib.contextmanager
def quiet_loading():
    """Without transformers' table of what fits: a sentence of ours says what does not."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def sampler_copy(policy, dtype: torch.dtype):
    """A frozen copy in dtype, as sampler or reference; train.py's refresh renews it in place."""
    sampler = copy.deepcopy(policy).eval().requires_grad_(False)
    for parameter in sampler.parameters():  # not buffers: bf16 rotary frequencies blur positions
        parameter.data = parameter.data.to(dtype)
    return sampler


def encode_prompt(
    tokenizer,
    prompt: str | list[dict],
    system: str | None = None,
    template_args: dict | None = None,
    vocabulary: int | None = None,
) -> list[int]:
    """Token ids of a prompt, in the tokenizer's chat template where it has one.

    prompt: a text, or messages. vocabulary: rows of the model's embedding.
    Raises UserError where the tokenizer does not fit."""
    shown = repr(text_of(prompt)[:60])
    if tokenizer.chat_template:
        ids = in_chat_template(tokenizer, prompt, system, template_args)
    else:
        given = system is not None or template_args
        need(not given, "--system, --chat-template-args: the model has no chat template")
        need(
            isinstance(prompt, str),
            f"prompt {shown}: it is a list of messages, and the model has no chat template",
        )
        ids = tokenizer.encode(prompt)
    need(ids, f"prompt {shown}: expected at least one token")
    largest = max(ids)
    need(
        vocabulary is None or largest < vocabulary,
        f"--model: its tokenizer makes token {largest} of the prompt {shown}, and its "
        f"embedding has {vocabulary} rows; expected a tokenizer that fits the model",
    )
    return ids


def in_chat_template(tokenizer, prompt, system, template_args) -> list[int]:
    chat = messages_of(prompt)
    if system is not None:  # an empty one stands against the template's own
        need(
            chat[0]["role"] != "system",
            f"--system: the prompt {text_of(prompt)[:60]!r} has a system message of its own",
        )
        chat.insert(0, {"role": "system", "content": system})
    with expecting("--system, --chat-template-args, messages: expected what the template takes"):
        return tokenizer.apply_chat_template(
            chat,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **(template_args or {}),
        )


def token_that_completes(ids: list[int], text_so_far: str, tokenizer) -> int:
    """Index of the token with which the decoded text first begins with text_so_far.

    A bisection, as decoding a prefix is the cost. But a character may be several tokens, and a
    byte-fallback tokenizer reads a run of bytes that breaks off as no character at all, so that a
    text which was complete is not, for some tokens. So from what the bisection finds we walk back,
    until a prefix reads as a part of the text, and no more."""

    def read(count):
        return tokenizer.decode(ids[:count], skip_special_tokens=True)

    low, high = 0, len(ids)  # tokens with which it is incomplete, and complete
    while high - low > 1:
        middle = (low + high) // 2
        if read(middle).startswith(text_so_far):
            high = middle
        else:
            low = middle
    first = high
    for count in range(high - 1, 0, -1):
        text = read(count)
        if text.startswith(text_so_far):
            first = count
        elif text_so_far.startswith(text):
            break
    return max(first - 1, 0)


def end_and_pad_ids(model, tokenizer) -> dict:
    """eos_ids, the tokenizer's and the generation config's; pad_id, the pad token or an end."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    eos_ids = sorted({tokenizer.eos_token_id, *ends} - {None})
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0]
    return {"eos_ids": eos_ids, "pad_id": pad_id}


# ---- a model as judge


class RewardModel:
    """(prompts, completions) -> scores of a classifier, in its tokenizer's chat template if any."""

    def __init__(self, source: str, config, tokenizer, device: str):
        tokenizer.truncation_side = "left"  # completions stay
        tokenizer.model_max_length = context_of(config)
        self.template = tokenizer.chat_template
        self.tokenizer = tokenizer
        model = load_weights(
            transformers.AutoModelForSequenceClassification, source, "--reward-model", "auto"
        )
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.classifier = transformers.pipeline(
            "text-classification",
            model.eval(),
            tokenizer=tokenizer,
            device=device,
            function_to_apply="none",
        )

    def __call__(self, prompts: list[str | list[dict]], completions: list[str]) -> list[float]:
        texts = [self.text(prompt, said) for prompt, said in zip(prompts, completions)]
        once = list(dict.fromkeys(texts))  # a batch's rounding would tell equal texts apart
        found = self.classifier(
            once,
            batch_size=16,
            truncation=True,
            add_special_tokens=not self.template,  # a template writes them itself
        )
        scores = {text: one["score"] for text, one in zip(once, found)}
        return [scores[text] for text in texts]

    def text(self, prompt: str | list[dict], said: str) -> str:
        if self.template:
            chat = [*messages_of(prompt), {"role": "assistant", "content": said}]
            return self.tokenizer.apply_chat_template(chat, tokenize=False)
        if isinstance(prompt, str):
            return prompt + said
        return f"{text_of(prompt)}\n\nassistant: {said}"


def reward_model(source: str, device: str) -> RewardModel:
    """A classifier with one output as judge; UserError for what cannot be one."""
    kind = "expected a folder or hub name of a classifier with one output"
    with expecting(f"--reward-model {source}: {kind}"):
        config, tokenizer = read_config(source)
        classifies = "ForSequenceClassification" in str(config.architectures)
        need(
            classifies and config.num_labels == 1,
            f"found {config.architectures or config.model_type} (num_labels {config.num_labels})",
        )
        need(tokenizer.pad_token and len(tokenizer) > 1, "found no padding token in its tokenizer")
    judge = RewardModel(source, config, tokenizer, device)
    with expecting(f"--reward-model {source}: expected a score, a number, of any text"):
        [score] = judge(["1"], ["1"])
        need(abs(score) < 1e30, f"found {score}")
    return judge


# ---- by hand


class Parser(argparse.ArgumentParser):
    """Its complaints are sentences without the usage before them."""

    def error(self, message):
        raise UserError(message.removeprefix("argument "))

    def parse_args(self, arguments=None, namespace=None):
        given, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            self.error(f"unknown flag {unknown[0]}{did_you_mean(unknown[0], flags)}")
        return given


def parse_flags(arguments: list[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = Parser(description="Print completions of a prompt.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or hub name of a model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--system", help="system message, for tokenizers with a chat template")
    parser.add_argument("--prompt-template", default="{prompt}", help="as train.py's")
    parser.add_argument("--chat-template-args", default="{}", help="as train.py's: JSON")
    parser.add_argument("--n", type=int, default=4, help="completions")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--answer", help="print the reward of each completion against it")
    parser.add_argument("--reward", help="as train.py's, with --answer; default math")
    parser.add_argument("--tool", help="as train.py's")
    parser.add_argument("--tool-after", help="as train.py's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=device, choices=("cuda", "cpu", "mps"))
    return parser.parse_args(arguments)


def check_flags(flags: argparse.Namespace):
    built_in = flags.model in ("tiny", "tiny-moe") and not Path(flags.model).exists()
    need(
        not built_in,
        f"--model {flags.model}: it is made by training; run python train.py --model {flags.model} "
        "first, and give the folder of a checkpoint, runs/NAME/checkpoints/step-N",
    )
    need(flags.n >= 1, f"--n {flags.n}: expected at least 1")
    need(
        flags.max_new_tokens >= 1,
        f"--max-new-tokens {flags.max_new_tokens}: expected at least 1",
    )
    need(
        0 <= flags.temperature < float("inf"),
        f"--temperature {flags.temperature}: expected a number of at least 0",
    )
    need(0 <= flags.seed < 2**63, f"--seed {flags.seed}: expected a number in [0, 2^63)")
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    need(here[flags.device], f"--device {flags.device}: expected one that is on this machine")
    need(
        flags.answer is not None or flags.reward is None,
        f"--reward {flags.reward}: needs --answer",
    )


def print_completions(flags: argparse.Namespace):
    check_flags(flags)
    row = {"prompt": flags.prompt, "answer": flags.answer}
    reward = parse_reward(flags.reward or "math")
    if flags.answer is not None:
        reward.check([row])
    tool = parse_tool(flags.tool, flags.tool_after)
    tokenizer, context, _, vocabulary = inspect_model(flags.model)
    replies = Replies(tool, tokenizer, vocabulary) if tool else None
    text = flags.prompt_template.replace("\\n", "\n").replace("{prompt}", flags.prompt)
    with expecting(f"--chat-template-args {flags.chat_template_args}: expected JSON, an object"):
        template_args = {**json.loads(flags.chat_template_args)}
    prompt = encode_prompt(tokenizer, text, flags.system, template_args, vocabulary=vocabulary)
    need(
        len(prompt) < context,
        f"--prompt: expected fewer tokens than the model's context of {context}, "
        f"found {len(prompt)}",
    )
    model = load_model(flags.model, device=flags.device)
    samples = generate(
        model,
        [prompt],
        group_size=flags.n,
        temperature=flags.temperature,
        max_new_tokens=min(flags.max_new_tokens, context - len(prompt)),
        generator=torch.Generator().manual_seed(flags.seed),
        replies=replies,
        **end_and_pad_ids(model, tokenizer),
    )
    for ids, length in zip(samples.completions, samples.lengths):
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        if flags.answer is not None:
            [judged] = reward.score([text], [row])
            need(not reward.faults, f"--reward {flags.reward}: {reward.fault}")
            print(f"[reward {judged.reward:g}] ", end="")
        for line in text.split("\n"):  # may hold escape sequences
            print(printable(line))


def main(arguments: list[str] | None = None) -> int:
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        print_completions(parse_flags(arguments))
    except torch.OutOfMemoryError:
        print("error: out of memory; lower --n or --max-new-tokens", file=sys.stderr)
        return 1
    except (UserError, OSError) as error:
        print("error:", printable(str(error)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
