"""Every call of a model: sampling completions, and scoring them again with gradients.

Read `generate` (sampling), then `completion_logprobs` (scoring). Sampling runs the model's own
layers with our attention over `Slots`; scoring is its plain forward pass over padded rows.
packing.py, where it is there, does both without computing twice what texts have in common."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import sys
import typing

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from support.data import expecting


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


def padded(texts: list[list[int]], device, **options) -> Tensor:
    """(texts, longest), padded on the right, which no token before it sees."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    return pad_sequence(rows, batch_first=True, **options).to(device)


@functools.cache
def fast_way():
    """support/packing.py; None where it was deleted: then rows are scored and stepped one by one."""
    if importlib.util.find_spec("support.packing") is None:
        return None
    return importlib.import_module("support.packing")


# ---- our attention
#
# An attention layer of transformers hands queries, keys and values to the function that
# `config._attn_implementation` names; the mask is made, once a pass, by the function of that name
# in another table. Ours ask the layout of the moment: where tokens lie is its own matter.

LAYOUT = None  # Prompts or Slots, while one of them runs the model


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
    """Layers forget their activations, and run again in the backward pass: by then `our_attention`
    has been left, so they enter it once more. transformers does so in training mode alone."""

    def contexts():  # of the forward pass, and of the one in the backward pass
        again = our_attention(model, LAYOUT) if LAYOUT else contextlib.nullcontext()
        return contextlib.nullcontext(), again

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def mask_between(queries: Tensor, keys: Tensor, sees) -> Tensor:
    """What is added to scores, (rows, 1, queries, keys), from positions (rows, queries) and (rows
    or 1, keys)."""
    queries, keys = queries[:, None, :, None], keys[:, None, None, :]
    return torch.where(sees(0, 0, queries, keys), 0.0, -torch.inf)


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
    grouped = query.shape[1] != kv_heads
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return output.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous()


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
    tokens: Tensor  # (N + 1, T + 1)
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
        steps = torch.arange(longest, device=tokens.device)

        sizes = [len(prompt) for prompt in self.prompts]
        left = {"padding_side": "left", "padding_value": pad_id}
        prompts = padded(self.prompts, tokens.device, **left)
        return Rollout(
            tokens=torch.cat([prompts, tokens[:, :longest]], dim=1),
            prompt_lengths=tokens.new_tensor(sizes),
            lengths=lengths,
            completion_mask=steps < lengths[:, None],
            sampler_logprobs=self.logprobs[:-1, :longest],
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
            model.base_model(ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def mask(self, sees) -> Tensor:
        return mask_between(self.positions, self.positions, sees)

    def attend(self, module, query, key, value, mask, **options):
        self.keys.append(key)
        self.values.append(value)
        return attention(module, query, key, value, mask, **options), None


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
        prompts = [self.page.prompts[sample] for sample in samples]
        distinct = {id(prompt): prompt for prompt in prompts}
        read = Prompts(self.model, list(distinct.values()))
        number = {name: i for i, name in enumerate(distinct)}
        which = [number[id(prompt)] for prompt in prompts]
        for mine, theirs in zip(self.keys + self.values, read.keys + read.values):
            span = theirs.shape[2]
            mine[slots, :, :span] = theirs[which]

        states = [  # token, position, step, row, alive
            [prompt[-1], len(prompt) - 1, 0, sample, 1] for prompt, sample in zip(prompts, samples)
        ]
        self.state[slots] = self.state.new_tensor(states)
        self.stepped = max(self.stepped, max(slots) + 1)

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


# a GPU wants few shapes, one graph each, and few waits; a CPU wants no wasted row
PACE = {"cuda": Pace(256, 8, 32), "mps": Pace(64, 4, 8), "cpu": Pace(32, 1, 1)}


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
    device, group_size = model.device, uniforms.shape[1]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    page = Page.blank(prompts, uniforms.flatten(0, 1), pad_id, device)
    kind = Slots
    if device.type == "cpu" and fast_way():
        kind = fast_way().SharedSlots
    room = cache_gb or free_gb(device)
    slots = kind(model, page, eos_ids, temperature, room)
    step = DecodeStep(slots)

    waiting = list(range(len(prompts)))
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
                return page.rollout(eos_ids, pad_id)

            # 3. some tokens for every slot
            shape = step.next_shape()
            for _ in range(step.pace.steps):
                step(shape)


class DecodeStep:
    """slots.decode_one_token, in one of few shapes, so that a CUDA graph can be replayed."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.kind = slots.page.tokens.device.type
        self.pace = PACE[self.kind]
        self.captured, self.graph = None, None

    def next_shape(self) -> tuple[int, int]:
        """How many rows, and how many positions, the next steps need; waits for the device."""
        slots, pace = self.slots, self.pace
        all_rows, _, width, _ = slots.keys[0].shape
        longest = int(slots.position[: slots.stepped].max())
        rows = round_up(slots.stepped, pace.rows)
        span = round_up(longest + pace.steps, pace.span)
        return min(rows, all_rows), min(span, width)

    def __call__(self, shape: tuple[int, int]):
        if shape == self.captured:
            self.graph.replay()
            return
        self.slots.decode_one_token(*shape)
        if self.kind == "cuda":  # it has run once, as a capture requires
            self.captured, self.graph = shape, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.slots.decode_one_token(*shape)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def free_gb(device: torch.device) -> float:
    """For keys and values: most of what is free on a GPU, else half of the machine's memory."""
    if device.type == "cuda":
        return 0.8 * torch.cuda.mem_get_info(device)[0] / 1e9
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


# ---- scoring


def micro_batches(rollout: Rollout, tokens: int) -> list[Tensor]:
    """The rows, by length, in parts of at most so many tokens, padding included, or of one row."""
    if fast_way():
        return fast_way().micro_batches(rollout, tokens)
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
    if fast_way():
        found = fast_way().score_tokens(model, rollout, head)
    else:
        found = head(completion_states(model, rollout), rollout.completions[mask])
    page = found.new_zeros(len(found), *mask.shape)
    return page.masked_scatter(mask, found)


def completion_states(model, rollout: Rollout) -> Tensor:
    """Hidden states (tokens, H) that predict the completions' tokens, row by row."""
    ids = padded(rollout.texts(), model.device)
    hidden = model.base_model(ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    row, step = rollout.completion_mask.nonzero(as_tuple=True)
    position = rollout.prompt_lengths[row] + step
    return hidden[row, position - 1]


LOGITS_AT_ONCE = 2**25  # float32: 128 MB


def completion_logprobs(model, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions, and entropies of the distributions, at a temperature.

    Returns both (N, T), float32, 0 on padding; the same bits with and without gradients."""
    output = model.get_output_embeddings()
    config = model.config.get_text_config()
    at_once = max(1, LOGITS_AT_ONCE // config.vocab_size)
    softcap = getattr(config, "final_logit_softcapping", None)

    def chunk(hidden, targets):
        with torch.autocast(hidden.device.type, enabled=False):  # bf16 logits would blur the ratio
            logits = F.linear(hidden.float(), output.weight.float(), output.bias)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logp = (logits / temperature).log_softmax(-1)
        logprobs = logp.gather(1, targets[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return torch.stack([logprobs, entropy])

    def in_chunks(hidden, targets):
        # checkpointed: the backward pass computes the logits of one chunk at a time again
        pairs = zip(hidden.split(at_once), targets.split(at_once))
        parts = [checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs]
        return torch.cat(parts, dim=1)

    logprobs, entropy = score(model, rollout, in_chunks)
    return logprobs, entropy


def completion_values(critic, rollout: Rollout) -> Tensor:
    """The value before each token, (N, T), 0 on padding; critic.value (H + 1,) is its head."""
    weight, bias = critic.value[:-1], critic.value[-1]

    def head(hidden, _):
        values = (hidden.float() * weight).sum(-1) + bias
        return values[None]

    return score(critic, rollout, head)[0]


@torch.no_grad()
def check_scorer(model, prompts: list[list[int]], pad_id: int):
    """Refuses a model that we would sample or score otherwise than its own forward pass does."""
    uniforms = torch.rand(len(prompts), 2, 8, generator=torch.Generator().manual_seed(0))
    samples = generate(model, prompts, uniforms, eos_ids=[], pad_id=pad_id)
    scored, _ = completion_logprobs(model, samples, temperature=1.0)
    own = torch.stack([text_logprobs(model, text)[-8:] for text in samples.texts()])
    for found in (samples.sampler_logprobs, scored):
        gap = float((found - own).abs().max())
        if not gap < 1e-3:  # rounding makes 1e-5
            raise ValueError(f"{model.config.model_type}: log-probs are {gap:.1g} off")


def text_logprobs(model, text: list[int]) -> Tensor:
    """Log-probs of all tokens but the first, by the model's own forward pass."""
    ids = torch.tensor([text], device=model.device)
    logits = model(ids, use_cache=False).logits[0, :-1]
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


# ---- models


def load(kind: type, source: str, **options):
    """A tokenizer or a model, by a class of transformers; never from a pickle, which runs code."""
    with expecting(f"--model {source}: expected a folder or hub name of a causal language model"):
        return kind.from_pretrained(source, **options)


def load_model(source: str, device: str):
    """In float32, and without dropout: in sampling, scoring and training."""
    options = {"dtype": torch.float32, "use_safetensors": True}
    return load(transformers.AutoModelForCausalLM, source, **options).to(device).eval()


def end_and_pad_ids(model, tokenizer) -> dict:
    """eos_ids, the tokenizer's and the generation config's; pad_id, the pad token or an end."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    eos_ids = sorted({*ends, tokenizer.eos_token_id} - {None})
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0]
    return {"eos_ids": eos_ids, "pad_id": pad_id}


def frozen_copy(model, dtype: torch.dtype):
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in copied.parameters():  # not buffers: bf16 rotary frequencies blur positions
        parameter.data = parameter.data.to(dtype)
    return copied


def refresh(copied, model) -> None:
    """A frozen copy takes the model's weights, in place: captured graphs stay valid."""
    copied.load_state_dict(model.state_dict())


def critic_of(policy) -> torch.nn.Module:
    """A copy of the policy with a value that is 0 everywhere: weights and bias."""
    critic = copy.deepcopy(policy)
    width = policy.config.get_text_config().hidden_size
    critic.value = torch.nn.Parameter(torch.zeros(width + 1, device=policy.device))
    return critic


def token_that_completes(tokenizer, ids: list[int], characters: int) -> int:
    """Index of the token with which the text of a completion has so many characters."""
    for token in range(len(ids)):
        if len(tokenizer.decode(ids[: token + 1], skip_special_tokens=True)) >= characters:
            return token
    return len(ids) - 1
