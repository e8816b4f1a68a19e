"""Every call of a model: sampling completions, and scoring them again with gradients.

    python rollout.py --model runs/demo/checkpoints/step-100 --prompt "7+5*3="

Sampling (`generate`). A completion lives in a slot: one row of the key/value cache, with its own
write position. Prompts are prefilled once and copied to the slots of their group; a slot whose
completion ends takes the next sample, and when none is left the live slots move together so that
the batch shrinks. Random numbers are a hash of (seed, sample, step): a completion depends neither
on the slot it lived in nor on its neighbours.

Scoring (`completion_logprobs`). Each prompt runs once per group, forward and backward; its keys
and values are expanded to the completions, whose logits exist for one chunk of tokens at a time.
"""

import argparse
import contextlib
import copy
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers import AutoTokenizer, Cache
from transformers.masking_utils import causal_mask_function

FAR = 2**30  # the position of a key that no query may see: causality hides it
CHUNK = 2**25  # logits that exist at once while scoring: 128 MB in float32
PREFILL_TOKENS = 8192


@dataclass
class Rollout:
    """N completions of N / group_size prompts; the rows of a group are contiguous.

        |<------- S: prompt_width ------>|<------------- T ------------->|
        pad pad pad  p  p  p  p  p  p  p  c  c  c  c  c  eos pad pad pad pad
                    |<- prompt_lengths ->|<--- lengths ---->|

    tokens (N, S + T); prompt_lengths (N,) and lengths (N,) tokens, lengths up to and including the
    first end token; sampler_logprobs (N, T) float32, 0 on padding; truncated (N,) no end token.
    """

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    sampler_logprobs: torch.Tensor
    truncated: torch.Tensor
    group_size: int

    @property
    def prompt_width(self) -> int:
        return self.tokens.shape[1] - self.sampler_logprobs.shape[1]

    @property
    def completions(self) -> torch.Tensor:
        return self.tokens[:, self.prompt_width :]

    @property
    def completion_mask(self) -> torch.Tensor:
        # from positions: comparing ids with the pad id loses the end token when pad == eos
        steps = torch.arange(self.sampler_logprobs.shape[1], device=self.lengths.device)
        return steps < self.lengths[:, None]

    def __len__(self) -> int:
        return len(self.tokens)

    def map(self, change) -> "Rollout":
        """The rollout whose five tensors are change(tensor)."""
        tensors = (self.tokens, self.prompt_lengths, self.lengths, self.sampler_logprobs)
        return Rollout(*map(change, tensors), change(self.truncated), self.group_size)

    def __getitem__(self, rows) -> "Rollout":
        """The given rows (list, slice or LongTensor); the widths S and T stay."""
        return self.map(lambda tensor: tensor[rows])

    def to(self, device) -> "Rollout":
        return self.map(lambda tensor: tensor.to(device))

    @staticmethod
    def cat(rollouts: "list[Rollout]", pad_id: int) -> "Rollout":
        """All rows in order; prompts and completions are padded to the widest S and T."""
        left = max(r.prompt_width for r in rollouts)
        right = max(r.sampler_logprobs.shape[1] for r in rollouts)
        tokens, logprobs = [], []
        for r in rollouts:
            pad = (left - r.prompt_width, right - r.sampler_logprobs.shape[1])
            tokens.append(F.pad(r.tokens, pad, value=pad_id))
            logprobs.append(F.pad(r.sampler_logprobs, (0, pad[1])))
        return Rollout(
            torch.cat(tokens),
            torch.cat([r.prompt_lengths for r in rollouts]),
            torch.cat([r.lengths for r in rollouts]),
            torch.cat(logprobs),
            torch.cat([r.truncated for r in rollouts]),
            rollouts[0].group_size,
        )


# ---------------------------------------------------------------- attention over our own caches


def slot_mask(
    batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, dtype, device, **kwargs
):
    """Additive mask (rows, 1, queries, keys) from per-row positions, or None where causal is all.

    Our caches return positions as the offsets, (rows, queries) and (rows, keys), so the
    architecture's own mask function (causal, sliding, chunked) is asked about true positions.
    """
    if not torch.is_tensor(q_offset):
        if mask_function is causal_mask_function:
            return None
        q_offset = torch.arange(q_length, device=device)[None]
        kv_offset = torch.arange(kv_length, device=device)[None]
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros_like(rows[:1])
    seen = mask_function(rows, head, q_offset[:, None, :, None], kv_offset[:, None, None, :])
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def slot_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs
):
    """Attention (rows, heads, queries, dim) x (rows, kv_heads, keys, dim); returns (output, None).

    With one query the heads that share a key head are folded into the query length, so keys and
    values are never repeated. Soft-caps and sinks take the explicit path.
    """
    rows, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    if attention_mask is not None:
        attention_mask = attention_mask.to(query.dtype)  # autocast
    if queries == 1:
        query = query.reshape(rows, kv_heads, heads // kv_heads, -1)
    if softcap is None and s_aux is None:
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and queries > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != kv_heads,
        )
    else:
        repeats = query.shape[1] // kv_heads
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attention_mask is None:
            attention_mask = scores.new_full((queries, keys), -torch.inf).triu(1)
        scores = (scores + attention_mask).float()
        if s_aux is not None:  # one learned logit per head that takes mass and gives no value
            sink = s_aux.float().view(1, kv_heads, -1, 1)
            sink = sink if queries == 1 else sink.reshape(1, heads, 1, 1)
            scores = torch.cat([scores, sink.expand(rows, -1, scores.shape[2], 1)], dim=-1)
        output = scores.softmax(-1)[..., :keys].to(value.dtype) @ value
    output = output.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous()
    return output, None


AttentionInterface.register("slots", slot_attention)
AttentionMaskInterface.register("slots", slot_mask)


def has_slots(model) -> bool:
    """Whether keys and values are all the state that the architecture keeps, and we may hold it."""
    config = model.config.get_text_config()
    ordinary = {"full_attention", "sliding_attention", "chunked_attention"}
    kinds = set(getattr(config, "layer_types", None) or ordinary)
    shared = getattr(config, "num_kv_shared_layers", 0)
    return model._supports_attention_backend and kinds <= ordinary and not shared


def checkpoints(model) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextlib.contextmanager
def exact(model):
    """Dropout off and, where the architecture allows it, our attention; restored on the way out."""
    if model.config.is_encoder_decoder:
        name = model.config.model_type
        raise ValueError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    modes = [(module, module.training) for module in model.modules()]
    config, before = model.config, model.config._attn_implementation
    model.eval()
    if has_slots(model):
        config._attn_implementation = "slots"
    if checkpoints(model) and torch.is_grad_enabled():
        for module in model.modules():
            # the layer itself, not what is in it: it checkpoints only while training
            module.training = getattr(module, "gradient_checkpointing", False)
    try:
        yield
    finally:
        config._attn_implementation = before
        for module, training in modes:
            module.training = training


class PrefixCache(Cache):
    """Keys and values of prompts, (prompts, kv_heads, width, dim) per layer, in the graph."""

    def __init__(self):
        super().__init__(layers=[])
        self.keys, self.values = [], []
        self.rows = None

    def expand(self, rows, lengths, queries):
        """From now on row i sees the first lengths[i] tokens of prompt rows[i], and itself."""
        self.rows = rows
        self.queries = queries
        width = self.keys[0].shape[2] if self.keys else 0
        prefix = torch.arange(width, device=queries.device).expand(len(queries), width)
        prefix = prefix.masked_fill(prefix >= lengths[:, None], FAR)
        self.positions = torch.cat([prefix, queries], dim=1)

    def update(self, key, value, layer, *args, **kwargs):
        if self.rows is None:
            self.keys.append(key)
            self.values.append(value)
        elif self.keys:
            key = torch.cat([self.keys[layer][self.rows], key], dim=2)
            value = torch.cat([self.values[layer][self.rows], value], dim=2)
        return key, value

    def get_seq_length(self, layer_idx=0):
        return 0 if self.rows is None else self.queries

    def get_mask_sizes(self, queries, layer_idx=0):
        return (queries, 0) if self.rows is None else (self.positions.shape[1], self.positions)


# ---------------------------------------------------------------- sampling


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser: a bijection of 64-bit integers (int64 multiplication wraps)."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def uniforms(seed: int, samples: torch.Tensor, steps: int) -> torch.Tensor:
    """Two numbers in [0, 1) per sample and step, (len(samples), steps, 2) float32."""
    step = torch.arange(steps, device=samples.device)
    bits = mix(mix(seed + samples * -0x61C8864680B583EB)[:, None] + step * -0x61C8864680B583EB)
    return torch.stack([bits >> 40 & 0xFFFFFF, bits >> 16 & 0xFFFFFF], -1).float() * 2.0**-24


def draw(logits: torch.Tensor, uniform: torch.Tensor, block: int = 256):
    """Exact inverse-CDF draw of one token a row: first a block of the vocabulary, then inside it.

    logits (rows, V) float32, uniform (rows, 2); returns tokens (rows,) and log-probs (rows,).
    """
    rows, vocabulary = logits.shape
    block = min(block, vocabulary)
    peak = logits.amax(-1, keepdim=True)
    mass = F.pad((logits - peak).exp_(), (0, -vocabulary % block)).view(rows, -1, block)
    blocks = mass.sum(-1).cumsum(-1)
    total = blocks[:, -1:]
    chosen = torch.searchsorted(blocks, uniform[:, :1] * total, right=True)
    chosen = chosen.clamp_(max=blocks.shape[1] - 1)
    inside = mass.gather(1, chosen[..., None].expand(-1, -1, block))[:, 0].cumsum(-1)
    token = torch.searchsorted(inside, uniform[:, 1:] * inside[:, -1:], right=True)
    token = (chosen * block + token.clamp_(max=block - 1)).clamp_(max=vocabulary - 1)
    logprobs = logits.gather(1, token) - peak - total.log()
    return token[:, 0], logprobs[:, 0]


def sample(logits: torch.Tensor, uniform: torch.Tensor, temperature, top_k, top_p):
    """Tokens (rows,) and the log-probs of the distribution they were drawn from (rows,)."""
    logits = logits.float()
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], logits.log_softmax(-1).gather(1, token)[:, 0]
    logits = logits / temperature
    if 0 < top_k < logits.shape[1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= top_p  # the first token always stays
        logits = logits.masked_fill(beyond.gather(1, index.argsort()), -torch.inf)
    return draw(logits, uniform)


class Slots(Cache):
    """The completions that are being sampled: slot b is row b of every tensor here.

    keys[layer][b, :, p] is the key of slot b's token at position p. `state` (slots, 5) holds the
    last token, its position, the number of tokens sampled, the sample's index, and alive (0 or 1).
    Architectures that keep other state have no keys: they read all of `ids` again for each token.
    """

    def __init__(self, model, slots, width, samples, steps, eos_ids, options):
        super().__init__(layers=[])
        self.model, self.options = model, options
        device = model.device
        self.keys, self.values = [], []
        self.ids = torch.zeros(slots, width, dtype=torch.long, device=device)
        self.state = torch.zeros(slots, 5, dtype=torch.long, device=device)
        self.uniforms = torch.zeros(slots, steps + 1, 2, device=device)
        self.eos_ids = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self.slot = torch.arange(slots, device=device)
        self.position = torch.arange(width, device=device)[None]
        # one row and one column more, where the dead write
        self.tokens = torch.zeros(samples + 1, steps + 1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(samples + 1, steps + 1, device=device)
        self.lengths = torch.zeros(samples + 1, dtype=torch.long, device=device)

    def update(self, key, value, layer, *args, **kwargs):
        keys, values = self.keys[layer], self.values[layer]
        keys[self.slot[: self.rows], :, self.queries[:, 0]] = key[:, :, 0]
        values[self.slot[: self.rows], :, self.queries[:, 0]] = value[:, :, 0]
        return keys[: self.rows, :, : self.span], values[: self.rows, :, : self.span]

    def get_seq_length(self, layer_idx=0):
        return self.queries

    def get_mask_sizes(self, queries, layer_idx=0):
        return self.span, self.position[:, : self.span]

    def prefill(self, prompts: list[list[int]]):
        """Run prompts (right-padded: causality needs no mask) and keep their keys and values."""
        width = max(map(len, prompts))
        ids = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
        self.prompts = torch.tensor(ids, device=self.state.device)
        self.prefix = PrefixCache()
        if has_slots(self.model):
            self.model.base_model(self.prompts, past_key_values=self.prefix, use_cache=True)
        if not self.keys:
            slots, width = self.ids.shape
            # zeros: what nobody wrote is masked, but 0 * nan would still be nan
            self.keys = [k.new_zeros(slots, k.shape[1], width, k.shape[3]) for k in self.prefix.keys]
            self.values = [
                v.new_zeros(slots, v.shape[1], width, v.shape[3]) for v in self.prefix.values
            ]

    def place(self, slots: list[int], prompts: list[int], state: list[list[int]], seed: int):
        """Copy row prompts[i] of the prefilled batch into slots[i], and start its sample."""
        width = self.prompts.shape[1]
        self.ids[slots, :width] = self.prompts[prompts]
        for layer, (key, value) in enumerate(zip(self.prefix.keys, self.prefix.values)):
            self.keys[layer][slots, :, :width] = key[prompts]
            self.values[layer][slots, :, :width] = value[prompts]
        self.state[slots] = torch.tensor(state, device=self.state.device)
        self.uniforms[slots] = uniforms(seed, self.state[slots, 3], self.uniforms.shape[1])

    def compact(self, rows: int, holes: list[int]) -> int:
        """Move the last live slots into the holes; returns the number of rows that are left."""
        left = rows - len(holes)
        into = [slot for slot in holes if slot < left]
        moved = sorted(set(range(left, rows)) - set(holes))
        if into:
            for tensor in (self.ids, self.state, self.uniforms):
                tensor[into] = tensor[moved]
            for tensor in self.keys + self.values:
                tensor[into, :, : self.span] = tensor[moved, :, : self.span]
        return left

    def decode_one_token(self, rows: int, span: int):
        """One token for the first `rows` slots, whose positions are below `span`; no host sync."""
        token, position, step, samples, alive = self.state[:rows].unbind(1)
        self.rows, self.span, self.queries = rows, span, position[:, None]
        slot = self.slot[:rows]
        if self.keys:
            logits = self.model(
                token[:, None],
                position_ids=self.queries,
                past_key_values=self,
                use_cache=True,
            ).logits[:, 0]
        else:
            self.ids[slot, position] = token
            ids = self.ids[:rows, :span]
            logits = self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            logits = logits[slot, position]
        chosen, logprobs = sample(logits, self.uniforms[slot, step], *self.options)
        out = torch.where(alive > 0, samples, len(self.tokens) - 1)
        self.tokens[out, step] = chosen
        self.logprobs[out, step] = logprobs
        self.lengths[out] = step + 1
        ended = (chosen[:, None] == self.eos_ids).any(1) | (step + 2 == self.tokens.shape[1])
        token.copy_(torch.where(alive > 0, chosen, token))
        position += alive
        step += alive
        alive *= ~ended


@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_ids: list[int],
    pad_id: int,
    generator: torch.Generator | None = None,
    max_slots: int | None = None,
    cache_gb: float | None = None,
    progress=None,
) -> Rollout:
    """Sample group_size completions of each prompt (lists of token ids).

    temperature 0 is greedy, recording log-probs at temperature 1; top_k 0 and top_p 1 are off.
    generator gives one seed; with it completions are the same for any max_slots (rows at once) and
    cache_gb (memory of their keys and values; None: all rows). progress(done, total) is called as
    completions end. Returns a Rollout; raises ValueError for arguments that cannot be sampled.
    """
    prompts = [prompt or [model.config.bos_token_id] for prompt in prompts]
    if [None] in prompts:
        raise ValueError("a prompt is empty, and the model has no bos_token_id to start from")
    if min(group_size, max_new_tokens, len(prompts)) < 1:
        raise ValueError("prompts, group_size and max_new_tokens must be at least 1")
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError("sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device).item()

    total = len(prompts) * group_size
    rows = min(total, max_slots or total)
    longest = max(map(len, prompts))
    options = (temperature, top_k, top_p)
    width = longest + max_new_tokens
    queue = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    waiting = []  # (row of the prefilled batch, sample) of samples that have no slot yet
    slots = Slots(model, rows, width, total, max_new_tokens, list(eos_ids), options)
    finished = -rows
    with exact(model):
        while True:
            holes = (slots.state[:rows, 4] == 0).nonzero()[:, 0].tolist()
            finished += len(holes)
            while holes and (queue or waiting):
                if not waiting:
                    count = max(1, PREFILL_TOKENS // len(prompts[queue[0]]))
                    batch, queue = queue[:count], queue[count:]
                    slots.prefill([prompts[i] for i in batch])
                    waiting = [
                        (row, i * group_size + g)
                        for row, i in enumerate(batch)
                        for g in range(group_size)
                    ]
                now, waiting = waiting[: len(holes)], waiting[len(holes) :]
                state = []
                for _, index in now:
                    prompt = prompts[index // group_size]
                    state.append([prompt[-1], len(prompt) - 1, 0, index, 1])
                slots.place(holes[: len(now)], [row for row, _ in now], state, seed)
                holes = holes[len(now) :]
            if holes:
                rows = slots.compact(rows, holes)
            if progress:
                progress(total - rows - len(waiting) - len(queue) * group_size, total)
            if not rows:
                break
            span = min(width, int(slots.state[:rows, 1].max()) // 32 * 32 + 32)
            slots.decode_one_token(rows, span)

    lengths = slots.lengths[:total]
    steps = int(lengths.max())
    dead = torch.arange(steps, device=lengths.device) >= lengths[:, None]
    completions = slots.tokens[:total, :steps].masked_fill(dead, pad_id)
    last = completions.gather(1, lengths[:, None] - 1)
    padded = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    left = torch.tensor(padded, device=lengths.device).repeat_interleave(group_size, 0)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=lengths.device)
    return Rollout(
        torch.cat([left, completions], 1),
        prompt_lengths.repeat_interleave(group_size),
        lengths,
        slots.logprobs[:total, :steps].masked_fill(dead, 0.0),
        (last != slots.eos_ids).all(1),
        group_size,
    )


def sampler_copy(policy, dtype: torch.dtype):
    """A frozen copy in `dtype` for `generate`; its tensors keep their addresses over refreshes."""
    sampler = copy.deepcopy(policy).eval().requires_grad_(False)
    for parameter in sampler.parameters():
        # parameters only: rotary frequencies are buffers, and in bf16 long positions collapse
        parameter.data = parameter.data.to(dtype)
    return sampler


@torch.no_grad()
def refresh(sampler, policy):
    """Copy the policy's weights and buffers into the sampler, in place."""
    for new, old in zip(policy.parameters(), sampler.parameters(), strict=True):
        old.copy_(new)
    for new, old in zip(policy.buffers(), sampler.buffers(), strict=True):
        old.copy_(new)


# ---------------------------------------------------------------- scoring


def shared_prompts(rollout: Rollout) -> tuple[list[int], list[int]]:
    """(rows that hold the first of each distinct prompt, for each row its index among those)."""
    width = rollout.prompt_width
    prompts = {}
    index = []
    for row, length in zip(rollout.tokens[:, :width].tolist(), rollout.prompt_lengths.tolist()):
        index.append(prompts.setdefault(tuple(row[width - length :]), len(prompts)))
    return [index.index(i) for i in range(len(prompts))], index


def micro_batches(rollout: Rollout, micro_batch_tokens: int | None) -> list[torch.Tensor]:
    """Partition the rows by length under a budget of padded tokens; each prompt counts once.

    Groups stay together unless one alone is over the budget; a row alone may be. Returns
    LongTensors of rows, the longest completions first; the same rollout gives the same parts.
    """
    if micro_batch_tokens is None:
        return [torch.arange(len(rollout))]
    first, prompt_of = shared_prompts(rollout)
    lengths = rollout.lengths.tolist()
    prompt_lengths = rollout.prompt_lengths.tolist()
    groups = [[] for _ in first]
    for row in sorted(range(len(rollout)), key=lambda row: -lengths[row]):
        groups[prompt_of[row]].append(row)

    def cost(rows):
        prompts = {prompt_of[row]: prompt_lengths[row] for row in rows}
        padded = max(lengths[row] for row in rows) * len(rows)
        return padded + max(prompts.values()) * len(prompts)

    batches, batch = [], []
    for group in sorted(groups, key=lambda rows: -lengths[rows[0]]):
        if batch and cost(batch + group) > micro_batch_tokens:
            batches.append(batch)
            batch = []
        for row in group:
            if batch and cost(batch + [row]) > micro_batch_tokens:
                batches.append(batch)
                batch = []
            batch = batch + [row]
    return [torch.tensor(sorted(rows)) for rows in batches + [batch]]


def left_aligned(rollout: Rollout) -> torch.Tensor:
    """Prompt and completion of each row without the padding between the margin and the prompt."""
    shift = rollout.prompt_width - rollout.prompt_lengths
    index = torch.arange(rollout.tokens.shape[1], device=shift.device) + shift[:, None]
    return rollout.tokens.gather(1, index.clamp_(max=rollout.tokens.shape[1] - 1))


def completion_hidden(body, rollout: Rollout) -> torch.Tensor:
    """Hidden states that predict each completion token, (N, longest completion, hidden)."""
    steps = max(1, int(rollout.lengths.max()))
    starts = rollout.prompt_lengths - 1  # the position that predicts the first token
    positions = starts[:, None] + torch.arange(steps, device=starts.device)
    ids = left_aligned(rollout)
    # checkpointing drops the cache with no more than a warning: completions would lose the prompt
    if not has_slots(body) or checkpoints(body):
        hidden = body(ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
        return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
    first, prompt_of = shared_prompts(rollout)
    cache = PrefixCache()
    width = int(starts.max())
    if width:
        body(ids[first, :width], past_key_values=cache, use_cache=True)
    cache.expand(torch.tensor(prompt_of, device=starts.device), starts, positions)
    inputs = rollout.tokens[:, rollout.prompt_width - 1 :][:, :steps]
    return body(
        inputs, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state


class ChunkedHead(torch.autograd.Function):
    """Log-prob of each target and entropy, (M,) each; logits exist for one chunk at a time."""

    @staticmethod
    def logits(hidden, weight, bias, scale, softcap):
        logits = F.linear(hidden, weight, bias).float() * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale, softcap):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = temperature, scale, softcap
        ctx.set_materialize_grads(False)
        logprobs, entropy = [], []
        rows = max(1, CHUNK // len(weight))
        for part, target in zip(hidden.split(rows), targets.split(rows)):
            logits = ChunkedHead.logits(part, weight, bias, scale, softcap) / temperature
            logp = logits.log_softmax(-1)
            logprobs.append(logp.gather(1, target[:, None])[:, 0])
            entropy.append(-(logp.exp() * logp).sum(-1))
        return torch.cat(logprobs), torch.cat(entropy)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, scale, softcap = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        rows = max(1, CHUNK // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = ChunkedHead.logits(hidden[part], weight, bias, scale, softcap)
            logp = (logits / temperature).log_softmax(-1)
            grad = torch.zeros_like(logp)
            if grad_logprobs is not None:
                grad -= logp.exp() * grad_logprobs[part, None]
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_entropy is not None:
                probs = logp.exp()
                entropy = -(probs * logp).sum(-1, keepdim=True)
                grad -= probs * (logp + entropy) * grad_entropy[part, None]
            if softcap is not None:
                grad *= 1 - (logits / softcap) ** 2
            grad = (grad * (scale / temperature)).to(hidden.dtype)
            grad_hidden[part] = grad @ weight.to(grad.dtype)
            grad_weight += grad.T @ hidden[part]
            if bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def token_logprobs(model, hidden: torch.Tensor, targets: torch.Tensor, temperature: float):
    """Log-probs and entropies (M,) of targets (M,) under the model's head on hidden (M, H)."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    bias = getattr(head, "bias", None)
    return ChunkedHead.apply(hidden, head.weight, bias, targets, temperature, scale, softcap)


def completion_logprobs(
    model, rollout: Rollout, *, temperature: float, micro_batch_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the completions and the entropy of each token's distribution, differentiable.

    temperature divides the logits, as in sampling. micro_batch_tokens: padded tokens per forward
    (None: all rows at once). Returns logprobs (N, T) and entropy (N, T), float32, 0 on padding;
    the same values bit for bit with and without gradients. Raises ValueError at temperature 0.
    """
    if temperature <= 0:
        raise ValueError("scoring needs temperature > 0: a greedy policy has no log-probs")
    outputs = rollout.sampler_logprobs.new_zeros(2, *rollout.sampler_logprobs.shape)
    mask = rollout.completion_mask
    with exact(model):
        for rows in micro_batches(rollout, micro_batch_tokens):
            part = rollout[rows]
            hidden = completion_hidden(model.base_model, part)
            row, step = part.completion_mask.nonzero(as_tuple=True)
            targets = part.completions[row, step]
            scores = token_logprobs(model, hidden[row, step], targets, temperature)
            outputs = outputs.index_put(
                (torch.arange(2, device=row.device)[:, None], rows.to(row.device)[row], step),
                torch.stack(scores),
            )
    return outputs[0], outputs[1]


class Critic(nn.Module):
    """A causal body with one float32 number per position: the value of the state there."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.config = body.config
        self.body = body
        self.value = nn.Linear(self.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)


def make_critic(policy) -> Critic:
    """A critic that starts from a copy of the policy's body and values every state at 0."""
    body = copy.deepcopy(policy.base_model).requires_grad_(True)
    return Critic(body).to(policy.device)


def completion_values(
    critic: Critic, rollout: Rollout, *, micro_batch_tokens: int | None = None
) -> torch.Tensor:
    """Value of the state before each completion token, (N, T) float32, 0 on padding."""
    values = torch.zeros_like(rollout.sampler_logprobs)
    with exact(critic.body):
        for rows in micro_batches(rollout, micro_batch_tokens):
            part = rollout[rows]
            row, step = part.completion_mask.nonzero(as_tuple=True)
            hidden = completion_hidden(critic.body, part)[row, step]
            with torch.autocast(hidden.device.type, enabled=False):
                value = critic.value(hidden.float())[:, 0]
            values = values.index_put((rows.to(row.device)[row], step), value)
    return values


@torch.no_grad()
def reward_model_scores(model, rollout: Rollout, *, rows_per_batch: int = 16) -> torch.Tensor:
    """Scores (N,) float32 of prompt + completion by an AutoModelForSequenceClassification.

    The model has one label and the policy's tokenizer. The score is read at the true last token:
    transformers looks for the last id that is not the pad id, which loses the end when pad == eos.
    """
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        raise ValueError("a reward model is a causal body with a `score` head of one label")
    scores = []
    with exact(model):
        for part in torch.arange(len(rollout)).split(rows_per_batch):
            rows = rollout[part]
            ends = rows.prompt_lengths + rows.lengths
            ids = left_aligned(rows)[:, : int(ends.max())]
            hidden = model.base_model(ids, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(ids), device=ids.device), ends - 1]
            scores.append(model.score(last)[:, 0].float())
    return torch.cat(scores)


@contextlib.contextmanager
def routing(model, replay: list[torch.Tensor] | None = None):
    """Record the experts of a mixture-of-experts model, or replay recorded ones (GRPO needs it).

    Yields a list that grows by one LongTensor (tokens, k) per router call. With `replay`, such a
    list, those experts are used again; their weights come from the current router, so that its
    gradient flows. Raises ValueError for a dense model, and for replay under checkpointing.
    """
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    if not routers:
        raise ValueError(f"{model.config.model_type} has no expert router to record or replay")
    if replay is not None and checkpoints(model):
        raise ValueError("routing replay does not work with gradient checkpointing: turn it off")
    recorded = []

    def hook(router, _, output):
        logits, scores, experts = output
        if replay is not None:
            if len(recorded) == len(replay) or replay[len(recorded)].shape != experts.shape:
                raise ValueError("routing replay needs the micro-batches that were recorded")
            experts = replay[len(recorded)]
            weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            scores = weights.to(scores.dtype)
        recorded.append(experts)
        return logits, scores, experts

    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- by hand


def main(arguments: list[str] | None = None) -> int:
    """Print completions of a prompt, with their rewards when the answer is given."""
    parser = argparse.ArgumentParser(description="Sample completions from a model folder.")
    parser.add_argument("--model", required=True, help="folder (or hub name) of the model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--n", type=int, default=4, help="completions")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--reward", default="math", help="verifier, with --answer")
    parser.add_argument("--answer", help="what the verifier compares with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        print(f"--model {args.model}: cannot be loaded: {reason}", file=sys.stderr)
        return 2
    model.to(args.device)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": args.prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
    else:
        prompt = tokenizer.encode(args.prompt)
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    eos_ids = eos if isinstance(eos, list) else [eos]
    rollout = generate(
        model,
        [prompt],
        group_size=args.n,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        eos_ids=eos_ids,
        pad_id=eos_ids[0],
        generator=torch.Generator().manual_seed(args.seed),
    )
    texts = []
    for ids, length in zip(rollout.completions.tolist(), rollout.lengths.tolist()):
        texts.append(tokenizer.decode(ids[:length], skip_special_tokens=True))
    scores = [None] * len(texts)
    if args.answer is not None:
        from rewards import parse_reward

        rows = [{"prompt": args.prompt, "answer": args.answer}] * len(texts)
        scores = parse_reward(args.reward).score(texts, rows)
    for text, score in zip(texts, scores):
        if sys.stdout.isatty():  # a completion may hold escape sequences
            text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        print(text if score is None else f"[reward {score.reward:g}] {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
