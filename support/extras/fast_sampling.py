"""Sample faster on a GPU: continuous batching in place, and CUDA graphs. Not yet run on a GPU.

`generate` has the signature of rollout.generate and the same results up to rounding. Deleted,
everything still works. It needs fast_scoring.py, whose `fits` tells for which models. On a CPU it
is no faster than the plain sampler, so train.py uses it on CUDA alone. There it should save the
copy of the KV cache that a step of the plain sampler makes, and the launches of its kernels."""

import math
import typing
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout import (
    PROMPT_TOKENS,
    Rollout,
    check_context,
    check_finite,
    free_gb,
    padded,
    sample_token,
)
from support.extras.fast_scoring import attention, mask_between, our_attention
from support.models import body_of


@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    eos_ids: list[int],
    pad_id: int,
    cache_gb: float | None = None,
    stops: Callable[[Tensor], Tensor] | None = None,
) -> Rollout:
    """rollout.generate, with a slot for each active sample. A sample that ends makes room for the
    next one."""
    check_context(model, prompts, uniforms)
    prompts = [prompt for prompt in prompts for _ in range(uniforms.shape[1])]
    with torch.inference_mode():
        slots = Slots(model, prompts, uniforms.flatten(0, 1), cache_gb or free_gb(model.device))
        slots.temperature, slots.stops = temperature, stops
        slots.eos_ids = slots.tokens.new_tensor(eos_ids)
        with our_attention(model, slots):
            sample_all(slots)
    # copies: inference tensors cannot enter autograd later
    tokens, logprobs = slots.tokens[:-1, :-1].clone(), slots.logprobs[:-1, :-1].clone()
    lengths, ended = slots.lengths[:-1].clone(), slots.ended[:-1].clone()
    return check_finite(model, Rollout.of(prompts, tokens, logprobs, lengths, ended, pad_id))


class Pace(typing.NamedTuple):
    """The granularity of decode steps. A GPU wants few shapes and few waits."""

    span: int = 32  # the attended positions are a multiple of this
    steps: int = 1  # decode steps between looks of the host, each of which waits for the device
    rows: int = 1  # the stepped slots are a multiple of this
    graphs: bool = False  # whether steps are captured and replayed


PACE = {"cuda": Pace(span=256, steps=8, rows=32, graphs=True)}  # elsewhere Pace()


def sample_all(slots: "Slots") -> None:
    """Sample all completions."""
    pace = PACE.get(slots.tokens.device.type, Pace())
    waiting = list(range(len(slots.prompts)))
    captured, graph = None, None  # a shape, and its graph if it could be captured
    while True:
        # 1. waiting samples get the free slots
        free = [slot for slot, active in enumerate(slots.active.tolist()) if not active]
        starting = waiting[: len(free)]
        if starting:
            slots.start(free[: len(starting)], starting)
            waiting = waiting[len(starting) :]

        # 2. none is waiting: move the last active slots into the free ones
        elif not waiting:
            slots.compact(free)
        if slots.stepped == 0:
            return

        # 3. some tokens for every slot, in one of few shapes, so that a graph can be replayed
        longest = int(slots.position[: slots.stepped].max())
        rows = math.ceil(slots.stepped / pace.rows) * pace.rows
        span = math.ceil((longest + pace.steps) / pace.span) * pace.span
        shape = min(rows, len(slots.state)), min(span, slots.width)
        for _ in range(pace.steps):
            if graph and shape == captured:
                graph.replay()
                continue
            slots.decode_one_token(*shape)
            if pace.graphs and shape != captured:  # it has run once, as a capture requires
                captured, graph = shape, None  # frees the memory of the graph before it first
                graph = capture(slots.decode_one_token, shape)


def capture(step: Callable, shape: tuple[int, int]):
    """Capture a step that has run at this shape as a CUDA graph. Return None where it fails."""
    graph = torch.cuda.CUDAGraph()
    try:
        # restores the outer stream: a failed capture would keep its own stream current
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            torch.cuda.set_sync_debug_mode("error")  # earlier than CUDA, which would lose memory
            step(*shape)
        return graph
    except torch.OutOfMemoryError:  # no sign that the step cannot be captured
        raise
    except RuntimeError as error:
        warnings.warn(f"sampling without CUDA graphs: {error}", stacklevel=2)
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Prompts:
    """The layout of a pass over prompts without their last token, which is the first one that a
    slot reads. It keeps their KV cache."""

    keys: list[Tensor]  # per layer (P, kv_heads, S, dim)
    values: list[Tensor]

    def __init__(self, model, prompts: list[list[int]]):
        self.keys, self.values = [], []
        ids = padded([prompt[:-1] or [0] for prompt in prompts], model.device)
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with our_attention(model, self):
            body_of(model)(ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def mask(self, sees) -> Tensor:
        return mask_between(self.positions, self.positions, sees)

    def attend(self, module, query, key, value, mask, **options) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        return attention(module, query, key, value, mask, **options)


class Slots:
    """The layout of decode steps: a slot for each active sample, with room for its KV cache.

                  position 0   1   2   3   4   5   6  ...  width - 1
        slot 0             p   p   p   c   c   .   .         keys[layer][0, :, position]
        slot 1             p   p   p   p   p   c   .         values[layer][0, :, position]

    A decode step reads one token a slot, `token` at `position`, writes its key and value there, and
    samples the next token. The stepped slots are the first ones. A slot whose sample has ended is
    not `active`: it is stepped along until it gets another sample."""

    keys: list[Tensor]  # per layer (slots, kv_heads, width, dim)
    values: list[Tensor]
    token: Tensor  # (slots,) the last token, not yet read
    position: Tensor  # (slots,) its position
    step: Tensor  # (slots,) tokens sampled so far
    row: Tensor  # (slots,) the row of the sample below
    active: Tensor  # (slots,) 0 or 1
    stepped: int  # the number of slots that are stepped

    # the samples. One row and one column more than needed: slots whose sample has ended write there
    uniforms: Tensor  # (N + 1, T + 1)
    tokens: Tensor  # (N + 1, T + 1)
    logprobs: Tensor  # (N + 1, T + 1) float32
    lengths: Tensor  # (N + 1,) tokens so far
    ended: Tensor  # (N + 1,) whether the last one is an end

    def __init__(self, model, prompts: list[list[int]], uniforms: Tensor, cache_gb: float):
        """Make as many slots as cache_gb has room for, at least one."""
        self.model, self.prompts = model, prompts
        self.uniforms = F.pad(uniforms, (0, 1, 0, 1)).to(model.device)
        self.tokens = torch.zeros_like(self.uniforms, dtype=torch.long)
        self.logprobs = torch.zeros_like(self.uniforms)
        self.lengths = torch.zeros_like(self.tokens[:, 0])
        self.ended = torch.zeros_like(self.lengths, dtype=torch.bool)

        self.width = max(map(len, prompts)) + uniforms.shape[1]
        probe = Prompts(model, prompts[:1])  # its KV cache has the sizes
        one_token = [memory[0, :, 0] for memory in probe.keys + probe.values]
        slot_bytes = self.width * sum(memory.nbytes for memory in one_token)
        slots = min(max(int(cache_gb * 1e9 / slot_bytes), 1), len(prompts))

        def room(memory):  # zeros: the mask hides unwritten places, but 0 * nan is nan
            _, kv_heads, _, dim = memory.shape
            return memory.new_zeros(slots, kv_heads, self.width, dim)

        self.keys = [room(keys) for keys in probe.keys]
        self.values = [room(values) for values in probe.values]
        self.range = torch.arange(max(slots, self.width), device=model.device)
        self.state = self.tokens.new_zeros(slots, 5)
        self.token, self.position, self.step, self.row, self.active = self.state.unbind(1)
        self.stepped = 0

    def start(self, slots: list[int], rows: list[int]):
        """Give slots to samples, and read each distinct prompt of theirs once."""
        groups, fresh = {}, []  # prompt -> its slots; token, position, step, row, active
        for slot, row in zip(slots, rows):
            prompt = tuple(self.prompts[row])
            groups.setdefault(prompt, []).append(slot)
            fresh.append([prompt[-1], len(prompt) - 1, 0, row, 1])
        self.state[slots] = self.state.new_tensor(fresh)
        self.stepped = max(self.stepped, max(slots) + 1)

        distinct = list(groups)
        at_once = max(1, PROMPT_TOKENS // max(map(len, distinct)))
        for first in range(0, len(distinct), at_once):
            part = distinct[first : first + at_once]
            read = Prompts(self.model, part)
            theirs = [i for i, prompt in enumerate(part) for _ in groups[prompt]]
            mine = [slot for prompt in part for slot in groups[prompt]]
            for memory, found in zip(self.keys + self.values, read.keys + read.values):
                memory[mine, :, : found.shape[2]] = found[theirs]

    def compact(self, free: list[int]):
        """Move the last active slots into the free ones, so that fewer are stepped."""
        count = len(self.state) - len(free)
        holes = [slot for slot in free if slot < count]
        moving = sorted(set(range(count, self.stepped)).difference(free))
        if moving:
            written = int(self.position[moving].max()) + 1
            for memory in self.keys + self.values:
                memory[holes, :, :written] = memory[moving, :, :written]
            self.state[holes] = self.state[moving]
        self.state[count:] = 0  # they may be stepped along
        self.stepped = count

    def mask(self, sees) -> Tensor:
        queries, keys = self.position[: self.rows], self.range[: self.span]
        return mask_between(queries[:, None], keys[None], sees)

    def attend(self, module, query, key, value, mask, **options) -> Tensor:
        """query, key and value (rows, heads, 1, dim) of one new token a row."""
        keys, values = self.keys[module.layer_idx], self.values[module.layer_idx]
        row, position = self.range[: self.rows], self.position[: self.rows]
        keys[row, :, position] = key[:, :, 0]
        values[row, :, position] = value[:, :, 0]
        seen = slice(self.rows), slice(None), slice(self.span)
        return attention(module, query, keys[seen], values[seen], mask, **options)

    def decode_one_token(self, rows: int, span: int):
        """Sample one token in the first rows, all at positions below span. No host sync."""
        self.rows, self.span = rows, span  # for `mask` and `attend`
        token, position, step, row, active = self.state[:rows].unbind(1)
        ids, at = token[:, None], position[:, None]
        ones = torch.ones_like(ids)  # without a mask the library would look for padding
        logits = self.model(ids, position_ids=at, attention_mask=ones, use_cache=False).logits[:, 0]

        sampled, logprobs = sample_token(logits, self.uniforms[row, step], self.temperature)
        row = torch.where(active > 0, row, len(self.tokens) - 1)
        self.tokens[row, step], self.logprobs[row, step] = sampled, logprobs
        ends = (sampled[:, None] == self.eos_ids).any(1)
        if self.stops is not None:
            steps = step[:, None] + torch.arange(1 - self.stops.width, 1, device=step.device)
            last = self.tokens[row[:, None], steps.clamp(min=0)]
            # before the first token stands a number beyond the vocabulary
            ends |= self.stops(last.masked_fill(steps < 0, 2**31 - 1))
        self.lengths[row], self.ended[row] = step + 1, ends

        token.copy_(torch.where(active > 0, sampled, token))
        position += active
        step += active
        active *= ~ends & (step < self.tokens.shape[1] - 1)
