"""Sample faster on a GPU: continuous batching in place, and CUDA graphs. Not yet run on a GPU.

`generate` has the signature of rollout.generate and the same results up to rounding. Deleted,
everything still works. It needs fast_scoring.py, whose `fits` tells for which models. On a CPU it
is no faster than the plain sampler, so train.py uses it on CUDA alone. There it should save the
copy of the KV cache that a step of the plain sampler makes, and the launches of its kernels."""

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
    output = Output.empty(uniforms.flatten(0, 1), pad_id, model.device)
    with torch.inference_mode():
        slots = Slots(model, prompts, output, cache_gb or free_gb(model.device))
        slots.temperature, slots.stops = temperature, stops
        slots.eos_ids = output.tokens.new_tensor(eos_ids)
        sample_all(slots)
    tokens, logprobs = output.tokens[:-1, :-1].clone(), output.logprobs[:-1, :-1].clone()
    lengths, ended = output.lengths[:-1].clone(), output.ended[:-1].clone()
    return check_finite(model, Rollout.of(prompts, tokens, logprobs, lengths, ended, pad_id))


def sample_all(slots: "Slots") -> None:
    """Sample all completions."""
    step = DecodeStep(slots)
    waiting = list(range(len(slots.prompts)))
    with our_attention(slots.model, slots):
        while True:
            # 1. waiting samples get the free slots
            free = slots.free()[: len(waiting)]
            if free:
                slots.start(free, waiting[: len(free)])
                waiting = waiting[len(free) :]

            # 2. none is waiting: move the last active slots into the free ones
            elif not waiting:
                slots.compact()
            if slots.stepped == 0:
                return

            # 3. some tokens for every slot
            shape = step.next_shape()
            for _ in range(step.pace.steps):
                step(shape)


class Output(typing.NamedTuple):
    """The samples. One row and one column more than needed: slots whose sample has ended are
    stepped along with the others and write there."""

    uniforms: Tensor  # (N + 1, T + 1)
    tokens: Tensor  # (N + 1, T + 1)
    logprobs: Tensor  # (N + 1, T + 1) float32
    lengths: Tensor  # (N + 1,) tokens so far
    ended: Tensor  # (N + 1,) whether the last one is an end

    @staticmethod
    def empty(uniforms: Tensor, pad_id: int, device) -> "Output":
        samples, max_new_tokens = uniforms.shape
        shape = (samples + 1, max_new_tokens + 1)
        return Output(
            uniforms=F.pad(uniforms, (0, 1, 0, 1)).to(device),
            tokens=torch.full(shape, pad_id, device=device),
            logprobs=torch.zeros(shape, device=device),
            lengths=torch.zeros(samples + 1, dtype=torch.long, device=device),
            ended=torch.zeros(samples + 1, dtype=torch.bool, device=device),
        )

    @property
    def max_new_tokens(self) -> int:
        return self.tokens.shape[1] - 1


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

    token: Tensor  # (slots,) the last token, not yet read
    position: Tensor  # (slots,) its position
    step: Tensor  # (slots,) tokens sampled so far
    row: Tensor  # (slots,) the row of the sample in the output
    active: Tensor  # (slots,) 0 or 1
    stepped: int  # the number of slots that are stepped
    keys: list[Tensor]  # per layer (slots, kv_heads, width, dim)
    values: list[Tensor]

    def __init__(self, model, prompts: list[list[int]], output: Output, cache_gb: float):
        """Make as many slots as cache_gb has room for, at least one."""
        self.model, self.prompts, self.output = model, prompts, output
        width = max(map(len, prompts)) + output.max_new_tokens
        probe = Prompts(model, prompts[:1])  # its KV cache has the sizes
        one_token = [memory[0, :, 0] for memory in probe.keys + probe.values]
        slot_bytes = width * sum(memory.nbytes for memory in one_token)
        slots = min(max(int(cache_gb * 1e9 / slot_bytes), 1), len(prompts))

        def room(memory):  # zeros: the mask hides unwritten places, but 0 * nan is nan
            _, kv_heads, _, dim = memory.shape
            return memory.new_zeros(slots, kv_heads, width, dim)

        self.keys = [room(keys) for keys in probe.keys]
        self.values = [room(values) for values in probe.values]
        self.range = torch.arange(max(slots, width), device=model.device)
        self.state = output.tokens.new_zeros(slots, 5)
        columns = self.state.unbind(1)
        self.token, self.position, self.step, self.row, self.active = columns
        self.stepped = 0

    def free(self) -> list[int]:
        """Return slots whose sample has ended, then those that are not stepped."""
        active = self.active[: self.stepped].tolist()
        ended = [slot for slot, is_active in enumerate(active) if not is_active]
        return ended + list(range(self.stepped, len(self.state)))

    def start(self, slots: list[int], rows: list[int]):
        """Give slots to samples, and read each distinct prompt of theirs once."""
        groups = {}  # prompt -> its slots
        for slot, row in zip(slots, rows):
            groups.setdefault(tuple(self.prompts[row]), []).append(slot)
        at_once = max(1, PROMPT_TOKENS // max(map(len, groups)))
        pairs = list(groups.items())
        for first in range(0, len(pairs), at_once):
            self.read_prompts(pairs[first : first + at_once])

        fresh = []  # token, position, step, row, active
        for row in rows:
            prompt = self.prompts[row]
            fresh.append([prompt[-1], len(prompt) - 1, 0, row, 1])
        self.state[slots] = self.state.new_tensor(fresh)
        self.stepped = max(self.stepped, max(slots) + 1)

    def read_prompts(self, pairs: list[tuple[tuple[int, ...], list[int]]]):
        """Copy the KV cache of each prompt into its slots."""
        read = Prompts(self.model, [list(prompt) for prompt, _ in pairs])
        which = [i for i, (_, slots) in enumerate(pairs) for _ in slots]
        slots = [slot for _, slots in pairs for slot in slots]
        for mine, theirs in zip(self.keys + self.values, read.keys + read.values):
            mine[slots, :, : theirs.shape[2]] = theirs[which]

    def compact(self):
        """Move the last active slots into the free ones, so that fewer are stepped."""
        free = [slot for slot in self.free() if slot < self.stepped]
        count = self.stepped - len(free)
        holes = [slot for slot in free if slot < count]
        moving = [slot for slot in range(count, self.stepped) if slot not in free]
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
        ids = self.token[:rows, None]
        ones = torch.ones_like(ids)  # without a mask the library would look for padding
        at = self.position[:rows, None]
        logits = self.model(ids, position_ids=at, attention_mask=ones, use_cache=False).logits[:, 0]

        output, (token, position, step, row, active) = self.output, self.state[:rows].unbind(1)
        sampled, logprobs = sample_token(logits, output.uniforms[row, step], self.temperature)
        row = torch.where(active > 0, row, len(output.tokens) - 1)
        output.tokens[row, step], output.logprobs[row, step] = sampled, logprobs
        ends = (sampled[:, None] == self.eos_ids).any(1)
        if self.stops is not None:
            ends |= self.stops(self.last_tokens(row, step, self.stops.width))
        output.lengths[row], output.ended[row] = step + 1, ends

        token.copy_(torch.where(active > 0, sampled, token))
        position += active
        step += active
        active *= ~ends & (step < output.max_new_tokens)

    def last_tokens(self, row: Tensor, step: Tensor, width: int) -> Tensor:
        """Return the last tokens (rows, width) up to a step. Places before the first token hold a
        number beyond the vocabulary."""
        steps = step[:, None] - width + 1 + self.range[:width]
        tokens = self.output.tokens[row[:, None], steps.clamp(min=0)]
        return tokens.masked_fill(steps < 0, 2**31 - 1)


class Pace(typing.NamedTuple):
    """The granularity of decode steps. A GPU wants few shapes and few waits."""

    span: int  # the attended positions are a multiple of this
    steps: int  # decode steps between looks of the host, each of which waits for the device
    rows: int  # the stepped slots are a multiple of this
    graphs: bool = False  # whether steps are captured and replayed


PACE = {
    "cuda": Pace(span=256, steps=8, rows=32, graphs=True),
    "mps": Pace(span=64, steps=4, rows=8),
    "cpu": Pace(span=32, steps=1, rows=1),
}


class DecodeStep:
    """slots.decode_one_token in one of few shapes, so that a CUDA graph can be replayed."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.pace = PACE[slots.output.tokens.device.type]
        self.tried, self.graph = None, None  # a shape, and its graph if it could be captured

    def next_shape(self) -> tuple[int, int]:
        """Return the rows and positions that the next steps need. Waits for the device."""
        slots, pace = self.slots, self.pace
        all_rows, _, width, _ = slots.keys[0].shape
        longest = int(slots.position[: slots.stepped].max())
        rows = round_up(slots.stepped, pace.rows)
        span = round_up(longest + pace.steps, pace.span)
        return min(rows, all_rows), min(span, width)

    def __call__(self, shape: tuple[int, int]):
        if self.graph and shape == self.tried:
            self.graph.replay()
            return
        self.slots.decode_one_token(*shape)
        if self.pace.graphs and shape != self.tried:  # it has run once, as a capture requires
            self.tried, self.graph = shape, None  # frees the memory of the graph before it first
            self.graph = capture(self.slots.decode_one_token, shape)


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


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
