"""Every call of a model: sampling completions, and scoring them again with gradients.

    python rollout.py --model runs/demo/checkpoints/step-100 --prompt "7+5*3="

Read `generate` (sampling), then `completion_logprobs` (scoring). Sampling runs the model's own
layers with our attention over `Slots`; scoring is its plain forward pass over padded rows.
support/extras/packing.py does both without computing twice what texts have in common."""

import dataclasses
import os
import sys
import typing
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.attention import attention, body_of, mask_between, our_attention, takes_our_attention
from support.data import PromptFormat, UserError, need, printable
from support.flags import extra, flag, parse
from support.models import context_of, end_and_pad_ids, has_experts, inspect_model, load_model


class Rollout(typing.NamedTuple):
    """N completions; those of one prompt, a group, are contiguous.

    |<-------- S: prompt_width --------->|<-------------- T ------------->|
    pad pad pad  p   p   p   p   p   p   p   c   c   c   c  eos  pad pad pad
                |<--- prompt_lengths --->|<---- lengths ---->|
    """

    tokens: Tensor  # (N, S + T)
    prompt_lengths: Tensor  # (N,) tokens
    lengths: Tensor  # (N,) completion tokens, the first end token included
    completion_mask: Tensor  # (N, T) the policy's own tokens: no padding, nor what a tool wrote
    sampler_logprobs: Tensor  # (N, T) float32, 0 elsewhere
    truncated: Tensor  # (N,) no end token within max_new_tokens

    def to(self, device) -> "Rollout":
        return Rollout(*[column.to(device) for column in self])

    @property
    def prompt_width(self) -> int:
        return self.tokens.shape[1] - self.sampler_logprobs.shape[1]

    @property
    def completions(self) -> Tensor:  # (N, T)
        return self.tokens[:, self.prompt_width :]

    def texts(self) -> list[list[int]]:
        """Prompt and completion of each row, without padding."""
        starts = self.prompt_width - self.prompt_lengths
        ends = self.prompt_width + self.lengths
        rows = zip(self.tokens.tolist(), starts.tolist(), ends.tolist())
        return [tokens[start:end] for tokens, start, end in rows]

    def __getitem__(self, rows) -> "Rollout":
        """Some rows, by a list, slice or LongTensor; S and T stay."""
        return Rollout(*[column[rows] for column in self])

    @staticmethod
    def cat(rollouts: list["Rollout"], pad_id: int) -> "Rollout":
        """All rows, padded to the widest S and T."""
        widest_prompt = max(rollout.prompt_width for rollout in rollouts)
        widest_completion = max(rollout.completions.shape[1] for rollout in rollouts)

        padded = []
        for rollout in rollouts:
            left = widest_prompt - rollout.prompt_width
            right = widest_completion - rollout.completions.shape[1]
            tokens = F.pad(rollout.tokens, (left, right), value=pad_id)
            mask = F.pad(rollout.completion_mask, (0, right))
            logprobs = F.pad(rollout.sampler_logprobs, (0, right))
            wider = {"tokens": tokens, "completion_mask": mask, "sampler_logprobs": logprobs}
            padded.append(rollout._replace(**wider))
        return Rollout(*map(torch.cat, zip(*padded)))


def padded(texts: list[list[int]], device, value: int = 0, left: bool = False) -> Tensor:
    """(texts, longest), padded on the right, which no token before it sees, or on the left."""
    longest = max(map(len, texts))
    rows = []
    for text in texts:
        padding = [value] * (longest - len(text))
        rows.append(padding + text if left else text + padding)
    return torch.tensor(rows, dtype=torch.long, device=device)


def fast_way(model):
    """support/extras/packing.py, where it is there and the model allows it; else None: rows are
    scored and stepped one by one."""
    return extra("packing") if takes_our_attention(model) else None


# ---- sampling


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (rows,) and their log-probs, from logits (rows, V) and uniform (rows, 1) in (0, 1).

    Temperature 0 is greedy, with log-probs of temperature 1."""
    logp = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        mass = logp.exp().cumsum(-1)
        total = mass[:, -1:]
        token = torch.searchsorted(mass, uniform * total, right=True)
        token = token.clamp(max=logits.shape[1] - 1)
    logprobs = logp.gather(1, token)
    return token[:, 0], logprobs[:, 0]


class Page(typing.NamedTuple):
    """What is being written. One row and one column more than there are samples and steps: rows
    that have ended, and are stepped along with the others, write there."""

    prompts: list[list[int]]  # one for each sample; a group's are one list
    tokens: Tensor  # (N + 1, T + 1) what stands behind an end token is forgotten in the end
    logprobs: Tensor  # (N + 1, T + 1) float32
    uniforms: Tensor  # (N + 1, T + 1): what a sample draws depends on its row and step alone

    @staticmethod
    def blank(prompts, uniforms: Tensor, pad_id: int, device) -> "Page":
        rows, max_new_tokens = uniforms.shape
        shape = (rows + 1, max_new_tokens + 1)
        # never 0, which would draw a token however unlikely
        uniforms = F.pad(uniforms, (0, 1, 0, 1)).clamp(min=2**-25)
        tokens = torch.full(shape, pad_id, device=device)
        logprobs = torch.zeros(shape, device=device)
        return Page(prompts, tokens, logprobs, uniforms.to(device))

    @property
    def max_new_tokens(self) -> int:
        return self.tokens.shape[1] - 1

    def rollout(self, eos_ids: list[int], pad_id: int) -> Rollout:
        tokens = self.tokens[:-1, :-1]
        ends = torch.isin(tokens, tokens.new_tensor(eos_ids))
        ended = ends.any(1)
        first_end = ends.int().argmax(1)
        lengths = torch.where(ended, first_end + 1, self.max_new_tokens)
        longest = int(lengths.max())
        # from positions: comparing ids with the pad id loses the end token when pad == eos
        mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
        completions = tokens[:, :longest].masked_fill(~mask, pad_id)
        logprobs = self.logprobs[:-1, :longest].masked_fill(~mask, 0.0)

        sizes = [len(prompt) for prompt in self.prompts]
        prompts = padded(self.prompts, tokens.device, pad_id, left=True)
        return Rollout(
            tokens=torch.cat([prompts, completions], dim=1),
            prompt_lengths=tokens.new_tensor(sizes),
            lengths=lengths,
            completion_mask=mask,
            sampler_logprobs=logprobs,
            truncated=~ended,
        )


class Prompts:
    """The layout of prompts that are read in one pass, all but their last token: that is the first
    one that a slot reads. Keeps keys and values for slots to begin with."""

    keys: list[Tensor]  # a layer each: (P, kv_heads, S, dim)
    values: list[Tensor]

    def __init__(self, model, prompts: list[list[int]]):
        self.keys, self.values = [], []
        ids = padded([prompt[:-1] or [0] for prompt in prompts], model.device)
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with our_attention(model, self):
            body_of(model)(ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def mask(self, sees) -> Tensor:
        return mask_between(self.positions, self.positions, sees)

    def attend(self, module, query, key, value, mask, **options):
        self.keys.append(key)
        self.values.append(value)
        return attention(module, query, key, value, mask, **options), None


PROMPT_TOKENS = 2**14  # read at once, padding included


class Slots:
    """The layout of sampling: samples under way, a slot each, with room for keys and values.

                  position 0   1   2   3   4   5   6  ...  width - 1
        slot 0             p   p   p   c   c   .   .         keys[layer][0, :, position]
        slot 1             p   p   p   p   p   c   .         values[layer][0, :, position]

    A decode step reads one token a slot, `token` at `position`, writes its key and value there, and
    draws the next one. Live slots are the first ones; one whose sample has ended is not `alive`: it
    is stepped along until it is given to another."""

    token: Tensor  # (slots,) the last token, not yet read
    position: Tensor  # (slots,) its position
    step: Tensor  # (slots,) tokens sampled so far
    row: Tensor  # (slots,) the sample, as a row of the page
    alive: Tensor  # (slots,) 0 or 1
    stepped: int  # how many slots are stepped: the first ones
    keys: list[Tensor]  # a layer each: (slots, kv_heads, width, dim)
    values: list[Tensor]

    def __init__(self, model, page: Page, eos_ids: list[int], temperature: float, cache_gb: float):
        """As many slots as cache_gb has room for, at least one."""
        self.model, self.page = model, page
        self.temperature = temperature
        self.eos_ids = page.tokens.new_tensor(eos_ids)

        width = max(map(len, page.prompts)) + page.max_new_tokens
        probe = Prompts(model, page.prompts[:1])  # its keys and values say sizes
        one_token = [memory[0, :, 0] for memory in probe.keys + probe.values]
        slot_bytes = width * sum(memory.nbytes for memory in one_token)
        fits = int(cache_gb * 1e9 / slot_bytes)
        slots = min(max(fits, 1), len(page.prompts))

        def room(memory):  # zeros: what nobody wrote is masked, but 0 * nan is nan
            _, kv_heads, _, dim = memory.shape
            return memory.new_zeros(slots, kv_heads, width, dim)

        self.keys = [room(keys) for keys in probe.keys]
        self.values = [room(values) for values in probe.values]
        self.range = torch.arange(max(slots, width), device=model.device)
        self.state = page.tokens.new_zeros(slots, 5)
        columns = self.state.unbind(1)
        self.token, self.position, self.step, self.row, self.alive = columns
        self.stepped = 0

    def free(self) -> list[int]:
        """Slots whose sample has ended, then those that are not stepped."""
        alive = self.alive[: self.stepped].tolist()
        ended = [slot for slot, is_alive in enumerate(alive) if not is_alive]
        return ended + list(range(self.stepped, len(self.state)))

    def start(self, slots: list[int], samples: list[int]):
        """Samples take slots, with what was read of their prompts."""
        groups = {}  # id of a prompt -> the prompt, and the slots that begin with it
        for slot, sample in zip(slots, samples):
            prompt = self.page.prompts[sample]
            groups.setdefault(id(prompt), (prompt, []))[1].append(slot)
        groups = list(groups.values())
        longest = max(len(prompt) for prompt, _ in groups)
        at_once = max(1, PROMPT_TOKENS // longest)
        for first in range(0, len(groups), at_once):
            self.read_prompts(groups[first : first + at_once])

        prompts = [self.page.prompts[sample] for sample in samples]
        states = [  # token, position, step, row, alive
            [prompt[-1], len(prompt) - 1, 0, sample, 1] for prompt, sample in zip(prompts, samples)
        ]
        self.state[slots] = self.state.new_tensor(states)
        self.stepped = max(self.stepped, max(slots) + 1)

    def read_prompts(self, groups: list[tuple[list[int], list[int]]]):
        """Slots get the keys and values of their prompts; groups: a prompt and its slots."""
        read = Prompts(self.model, [prompt for prompt, _ in groups])
        which = [i for i, (_, slots) in enumerate(groups) for _ in slots]
        slots = [slot for _, slots in groups for slot in slots]
        for mine, theirs in zip(self.keys + self.values, read.keys + read.values):
            span = theirs.shape[2]
            mine[slots, :, :span] = theirs[which]

    def close_ranks(self):
        """The last live slots move into the free ones, so that fewer are stepped."""
        free = [slot for slot in self.free() if slot < self.stepped]
        live = self.stepped - len(free)
        holes = [slot for slot in free if slot < live]
        moving = [slot for slot in range(live, self.stepped) if slot not in free]
        self.copy(moving, to=holes)
        self.state[holes] = self.state[moving]
        self.state[live:] = 0  # they may be stepped along
        self.stepped = live

    def copy(self, slots: list[int], to: list[int]):
        """Keys and values, all that were written."""
        if not slots:
            return
        written = int(self.position[slots].max()) + 1
        for memory in self.keys + self.values:
            memory[to, :, :written] = memory[slots, :, :written]

    def mask(self, sees) -> Tensor:
        queries, keys = self.position[: self.rows], self.range[: self.span]
        return mask_between(queries[:, None], keys[None], sees)

    def attend(self, module, query, key, value, mask, **options):
        """query, key and value (rows, heads, 1, dim) of one new token a row."""
        keys, values = self.keys[module.layer_idx], self.values[module.layer_idx]
        row, position = self.range[: self.rows], self.position[: self.rows]
        keys[row, :, position] = key[:, :, 0]
        values[row, :, position] = value[:, :, 0]
        seen = slice(self.rows), slice(None), slice(self.span)
        return attention(module, query, keys[seen], values[seen], mask, **options), None

    def decode_one_token(self, rows: int, span: int):
        """Sample one token in the first rows, all at positions below span; no host sync."""
        self.draw(self.read(rows, span))

    def read(self, rows: int, span: int) -> Tensor:
        """The logits (rows, V) after the tokens of the first rows."""
        self.rows, self.span = rows, span  # for `mask` and `attend`
        ids = self.token[:rows, None]
        everything = torch.ones_like(ids)  # or the library would look for padding
        at = self.position[:rows, None]
        output = self.model(ids, position_ids=at, attention_mask=everything, use_cache=False)
        return output.logits[:, 0]

    def draw(self, logits: Tensor):
        """The next token of the first slots."""
        page, states = self.page, self.state[: len(logits)]
        token, position, step, row, alive = states.unbind(1)
        uniform = page.uniforms[row, step]
        chosen, logprobs = sample(logits, uniform[:, None], self.temperature)

        nowhere = len(page.tokens) - 1
        row = torch.where(alive > 0, row, nowhere)
        page.tokens[row, step] = chosen
        page.logprobs[row, step] = logprobs

        token.copy_(torch.where(alive > 0, chosen, token))
        position += alive
        step += alive
        is_end = (chosen[:, None] == self.eos_ids).any(1)
        alive *= ~is_end & (step < page.max_new_tokens)


class Pace(typing.NamedTuple):
    """How coarse the shapes of decode steps are, and how often the host looks at the slots."""

    span: int  # the attended positions are a multiple of this
    steps: int  # decode steps between looks, each of which waits for the device
    rows: int  # the stepped slots are a multiple of this
    graphs: bool = False  # steps are captured and replayed


# a GPU wants few shapes and few waits; a CPU wants no wasted row
PACE = {
    "cuda": Pace(span=256, steps=8, rows=32, graphs=True),
    "mps": Pace(span=64, steps=4, rows=8),
    "cpu": Pace(span=32, steps=1, rows=1),
}


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
) -> Rollout:
    """Sample completions of each of P prompts (token ids).

    uniforms (P, group_size, max_new_tokens) in [0, 1): they alone decide on tokens; cache_gb, for
    the keys and values of samples under way, does not. Temperature 0 is greedy, with log-probs of
    temperature 1."""
    name, group_size = model.config.model_type, uniforms.shape[1]
    width = max(map(len, prompts)) + uniforms.shape[2]
    context = context_of(model.config)
    need(width <= context, f"{width} tokens, prompt and completion: this {name} reads {context}")

    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    page = Page.blank(prompts, uniforms.flatten(0, 1), pad_id, model.device)
    with torch.inference_mode():  # what it makes can take no gradient, and is gone with the slots
        if takes_our_attention(model):
            fill(page, model, eos_ids, temperature, cache_gb or free_gb(model.device))
        else:
            hybrids = extra("hybrids")
            need(hybrids, f"--model: a {name} needs support/extras/hybrids.py, which is not here")
            hybrids.fill(page, model, eos_ids, pad_id, temperature)
    samples = page.rollout(eos_ids, pad_id)
    finite = samples.sampler_logprobs.isfinite().all()
    need(finite, f"the logits of this {name} are not finite (NaN or inf)")
    return samples


def fill(page: Page, model, eos_ids: list[int], temperature: float, cache_gb: float):
    """Samples every row of the page, in slots: one that ends makes room for the next."""
    kind, packing = Slots, extra("packing")
    if model.device.type == "cpu" and packing:
        kind = packing.SharedSlots
    slots = kind(model, page, eos_ids, temperature, cache_gb)
    step = DecodeStep(slots)

    waiting = list(range(len(page.prompts)))
    with our_attention(model, slots):
        while True:
            # 1. samples that wait take the free slots
            free = slots.free()[: len(waiting)]
            if free:
                slots.start(free, waiting[: len(free)])
                waiting = waiting[len(free) :]

            # 2. none waits: the last live slots move into the free ones, fewer are stepped
            elif not waiting:
                slots.close_ranks()
            if slots.stepped == 0:
                return

            # 3. some tokens for every slot
            shape = step.next_shape()
            for _ in range(step.pace.steps):
                step(shape)


class DecodeStep:
    """slots.decode_one_token, in one of few shapes, so that a CUDA graph can be replayed."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.pace = PACE[slots.page.tokens.device.type]
        self.tried, self.graph = None, None  # a shape, and its graph if it could be captured

    def next_shape(self) -> tuple[int, int]:
        """How many rows, and how many positions, the next steps need; waits for the device."""
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
            self.tried, self.graph = shape, None  # first frees the memory of the graph before it
            self.graph = capture(self.slots.decode_one_token, shape)


def capture(step: Callable, shape: tuple[int, int]):
    """A step, which has run at this shape, as a CUDA graph; None where it cannot be one."""
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


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def free_gb(device: torch.device) -> float:
    """For keys and values: most of what is free on a GPU, else half of the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return 0.8 * (free + cached) / 1e9
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


# ---- scoring


def micro_batches(model, rollout: Rollout, tokens: int) -> list[Tensor]:
    """The rows in parts of at most so many tokens that a pass reads, padding too, or of one row."""
    packing = fast_way(model)
    if packing:
        return packing.micro_batches(rollout, tokens)
    lengths = (rollout.prompt_lengths + rollout.lengths).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts = [[]]
    for row in longest_first:
        rows = [*parts[-1], row]
        if parts[-1] and len(rows) * lengths[rows[0]] > tokens:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(sorted(part)) for part in parts if part]


def score(model, rollout: Rollout, head) -> Tensor:
    """What head makes of the hidden state before each own token, (k, N, T), 0 elsewhere.

    head: hidden (tokens, H) and the tokens (tokens,) that they predict -> (k, tokens) float32."""
    mask = rollout.completion_mask
    packing = fast_way(model)
    if packing:
        found = packing.score_tokens(model, rollout, head)
    else:
        found = head(completion_states(model, rollout), rollout.completions[mask])
    page = found.new_zeros(len(found), *mask.shape)
    return page.masked_scatter(mask, found)


def completion_states(model, rollout: Rollout) -> Tensor:
    """Hidden states (tokens, H) that predict the completions' tokens, row by row."""
    ids = padded(rollout.texts(), model.device)
    hidden = body_of(model)(ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    return hidden.flatten(0, 1)[predicting(rollout)]


def predicting(rollout: Rollout) -> Tensor:
    """Of each own token, row by row: which of the tokens that a pass reads, padding and all, stands
    before it; (tokens,)."""
    row, step = rollout.completion_mask.nonzero(as_tuple=True)
    width = (rollout.prompt_lengths + rollout.lengths).max()
    return row * width + rollout.prompt_lengths[row] + step - 1


LOGITS_AT_ONCE = 2**26  # float32: 256 MB


def completion_logprobs(
    model, rollout: Rollout, temperature: float, *, entropy_grad: bool | None = True
) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions, and entropies of the distributions, at a temperature.

    Returns both (N, T), float32, 0 on padding; the same bits with and without gradients. That of
    the entropies costs memory and time even where nothing is made of it: hence entropy_grad. None:
    they are not computed, and 0."""
    at_once = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)

    def chunk(hidden, targets):
        logits = logits_of(model, hidden)
        if temperature != 1:  # a copy of them takes time
            logits = logits / temperature
        logp = logits.log_softmax(-1)
        logprobs = logp.gather(1, targets[:, None])[:, 0]
        entropy = torch.zeros_like(logprobs)
        if entropy_grad is not None:
            with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
                entropy = -(logp.exp() * logp).sum(-1)
        return torch.stack([logprobs, entropy])

    def in_chunks(hidden, targets):
        *parts, last = zip(hidden.split(at_once), targets.split(at_once))
        # checkpointed: the backward pass computes the logits of one chunk at a time again. It
        # begins with the last one, whose logits may as well stay
        found = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
        return torch.cat([*found, chunk(*last)], dim=1)

    logprobs, entropy = score(model, rollout, in_chunks)
    return logprobs, entropy


class HandedOver:
    """What stands for the output of a model's body: hidden states, and None for all else."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index):  # as a tuple's: [0]
        return self.last_hidden_state

    def __getattr__(self, name):
        return None


def logits_of(model, hidden: Tensor) -> Tensor:
    """(M, H) -> (M, V), in float32 whatever autocast says and the weights are: bf16 would blur the
    ratio. By the model's own forward pass, as some heads scale or cap logits, or have layers."""
    body = body_of(model)
    inside = set(body.modules())
    weights = {
        f"{name}.{own}".lstrip("."): weight.float()
        for name, module in model.named_modules()
        if module not in inside
        for own, weight in module.named_parameters(recurse=False)
    }
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    before = vars(body).get("forward")  # seldom there
    body.forward = lambda *_, **options: HandedOver(hidden.float()[None])
    try:
        with torch.autocast(hidden.device.type, enabled=False):
            return functional_call(model, weights, kwargs={"input_ids": ids}).logits[0].float()
    finally:
        del body.forward
        if before:
            body.forward = before


def completion_values(critic, rollout: Rollout) -> Tensor:
    """The value before each token, (N, T), 0 on padding; critic.value (H + 1,) is its head."""
    weight, bias = critic.value[:-1], critic.value[-1]

    def head(hidden, _):
        values = (hidden.float() * weight).sum(-1) + bias
        return values[None]

    return score(critic, rollout, head)[0]


@torch.no_grad()
def check_scorer(model, prompts: list[list[int]], pad_id: int):
    """UserError for a model that we would sample or score otherwise than its own forward pass does.

    Of a mixture one log-prob in ten may differ: rounding chooses where two experts are tied."""
    name = model.config.model_type
    uniforms = torch.rand(len(prompts), 2, 8, generator=torch.Generator().manual_seed(0))
    samples = generate(model, prompts, uniforms, eos_ids=[], pad_id=pad_id)
    scored, _ = completion_logprobs(model, samples, temperature=1.0)
    own = torch.stack([text_logprobs(model, text)[-8:] for text in samples.texts()])
    allowed = 0.1 if has_experts(model.config) else 0.0
    for who, found in (("sampler", samples.sampler_logprobs), ("scorer", scored)):
        gap = (found - own).abs()
        need(
            (~(gap < 1e-3)).float().mean() <= allowed,  # NaN is no gap; rounding makes 1e-5
            f"--model: log-probs of our {who} are up to {float(gap.max()):.1g} away from those of "
            f"the {name}'s own forward pass: it cannot be trained here",
        )


def text_logprobs(model, text: list[int]) -> Tensor:
    """Log-probs of all tokens but the first, by the model's own forward pass."""
    ids = torch.tensor([text], device=model.device)
    logits = model(ids, use_cache=False).logits[0, :-1]
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


# ---- by hand


@dataclasses.dataclass
class Flags:
    model: str | None = flag(None, "a folder, or a name on the hub; required")
    prompt: str | None = flag(None, "a text; required")
    system: str | None = flag(None, "system message, for tokenizers with a chat template")
    prompt_template: str = flag("{prompt}", "text around the prompt, with {prompt} in it")
    chat_template_args: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    samples: int = flag(4, "completions", low=1)
    max_new_tokens: int = flag(256, "of a completion", low=1)
    temperature: float = flag(1.0, "divides the logits; 0: greedy", low=0)
    seed: int = flag(0, "of the samples", low=0)
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "where it runs")


def tried(flags: Flags) -> Iterator[str]:
    """Completions of a prompt."""
    need(flags.model and flags.prompt, "expected --model and --prompt")
    tokenizer, config = inspect_model(flags.model)
    form = PromptFormat(tokenizer, flags, vocabulary=config.get_text_config().vocab_size)
    ids = form.encode({"prompt": flags.prompt})["ids"]
    model = load_model(flags.model, flags.device)
    generator = torch.Generator().manual_seed(flags.seed)
    uniforms = torch.rand(1, flags.samples, flags.max_new_tokens, generator=generator)
    ends = end_and_pad_ids(model, tokenizer)
    samples = generate(model, [ids], uniforms, temperature=flags.temperature, **ends)
    for completion in samples.texts():
        yield tokenizer.decode(completion[len(ids) :], skip_special_tokens=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        for text in tried(parse(Flags, __doc__, sys.argv[1:] if arguments is None else arguments)):
            for line in text.split("\n"):  # may hold escape sequences
                print(printable(line))
    except (UserError, OSError) as error:
        print("error:", printable(str(error)), file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        print("error: out of memory; lower --samples or --max-new-tokens", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
