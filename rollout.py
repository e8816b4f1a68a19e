"""Sample completions, and compute their log-probabilities with gradients.

    python rollout.py --model runs/demo/checkpoints/step-100 --prompt "7+5*3="

Read `generate`, then `completion_logprobs`. Both call the model's own forward pass. `generate` uses
its KV cache. `completion_logprobs` has two layouts: a row a text, or, where these save much, trees
of texts with equal beginnings."""

import bisect
import dataclasses
import inspect
import itertools
import math
import os
import sys
import typing
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

from support.data import IDS, PromptFormat, printable
from support.flags import flag, parse
from support.models import (
    body_of,
    context_of,
    end_and_pad_ids,
    has_experts,
    has_plain_kv_cache,
    inspect_model,
    load_model,
    logits_of,
)
from support.user import UserError, need


class Rollout(typing.NamedTuple):
    """N completions of P prompts. The completions of one prompt, a group, are contiguous rows.

    |<-------- S: prompt_width --------->|<-------------- T ------------->|
    pad pad pad  p   p   p   p   p   p   p   c   c   c   c  eos  pad pad pad
                |<--- prompt_lengths --->|<---- lengths ---->|
    """

    tokens: Tensor  # (N, S + T)
    prompt_lengths: Tensor  # (N,) tokens
    lengths: Tensor  # (N,) completion tokens, the end token included
    completion_mask: Tensor  # (N, T) the policy's own tokens: no padding, no tokens of a tool
    sampler_logprobs: Tensor  # (N, T) float32, 0 outside the mask
    truncated: Tensor  # (N,) no end within max_new_tokens

    def to(self, device) -> "Rollout":
        return Rollout(*[column.to(device) for column in self])

    @property
    def prompt_width(self) -> int:
        return self.tokens.shape[1] - self.sampler_logprobs.shape[1]

    @property
    def completions(self) -> Tensor:  # (N, T)
        return self.tokens[:, self.prompt_width :]

    def sequences(self) -> list[list[int]]:
        """The token ids of each row, prompt and completion, without padding."""
        starts = self.prompt_width - self.prompt_lengths
        ends = self.prompt_width + self.lengths
        rows = zip(self.tokens.tolist(), starts.tolist(), ends.tolist())
        return [tokens[start:end] for tokens, start, end in rows]

    def __getitem__(self, rows) -> "Rollout":
        """Some rows, by a list, slice or LongTensor. S and T stay."""
        return Rollout(*[column[rows] for column in self])

    @staticmethod
    def of(
        prompts: list[list[int]], tokens: Tensor, logprobs: Tensor, lengths: Tensor, ended, pad_id
    ) -> "Rollout":
        """Join prompts (N lists) and sampled tokens (N, max_new_tokens). lengths (N,) counts the
        tokens that stay; ended (N,) tells whether the last one of them is an end."""
        longest = int(lengths.max())
        # from positions: comparing ids with the pad id loses the end token where pad == eos
        mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
        completions = tokens[:, :longest].masked_fill(~mask, pad_id)
        return Rollout(
            tokens=torch.cat([padded(prompts, tokens.device, pad_id, left=True), completions], 1),
            prompt_lengths=tokens.new_tensor([len(prompt) for prompt in prompts]),
            lengths=lengths,
            completion_mask=mask,
            sampler_logprobs=logprobs[:, :longest].masked_fill(~mask, 0.0),
            truncated=~ended,
        )

    @staticmethod
    def cat(rollouts: list["Rollout"], pad_id: int) -> "Rollout":
        """Stack all rows, padded to the widest S and T."""
        widest_prompt = max(rollout.prompt_width for rollout in rollouts)
        widest_completion = max(rollout.completions.shape[1] for rollout in rollouts)

        wide = []
        for rollout in rollouts:
            left = widest_prompt - rollout.prompt_width
            right = widest_completion - rollout.completions.shape[1]
            tokens = F.pad(rollout.tokens, (left, right), value=pad_id)
            mask = F.pad(rollout.completion_mask, (0, right))
            logprobs = F.pad(rollout.sampler_logprobs, (0, right))
            wider = {"tokens": tokens, "completion_mask": mask, "sampler_logprobs": logprobs}
            wide.append(rollout._replace(**wider))
        return Rollout(*map(torch.cat, zip(*wide)))


def padded(rows: list[list[int]], device, value: int = 0, left: bool = False) -> Tensor:
    """Return rows of token ids as one tensor (rows, longest), padded on the right or the left."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    side = "left" if left else "right"
    joined = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
    return joined.to(device)


# ---- sampling ------------------------------------------------------------------------------------


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
    """Sample completions of P prompts (token ids).

    uniforms (P, group_size, max_new_tokens), in [0, 1): equal numbers give equal tokens, up to
    rounding, whatever cache_gb (the memory for KV caches) is. Temperature 0 is greedy. stops ends
    completions at stop strings, see `StopTexts`."""
    check_context(model, prompts, uniforms)
    parts = batches(model, prompts, uniforms, cache_gb or free_gb(model.device))
    prompts = [prompt for prompt in prompts for _ in range(uniforms.shape[1])]  # one a sample
    uniforms = uniforms.flatten(0, 1).to(model.device)
    tokens = torch.full(uniforms.shape, pad_id, device=model.device)
    logprobs = torch.zeros(uniforms.shape, device=model.device)
    lengths = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    ends = tokens.new_tensor(eos_ids)

    for batch in parts:
        # 1. read each distinct prompt once, padded on the left
        distinct = list(dict.fromkeys(tuple(prompts[i]) for i in batch))
        mask = padded([[1] * len(prompt) for prompt in distinct], model.device, left=True)
        cache = DynamicCache(config=model.config)
        logits = next_logits(model, padded(distinct, model.device, pad_id, left=True), mask, cache)
        rows = {prompt: row for row, prompt in enumerate(distinct)}
        active = tokens.new_tensor(batch)  # samples without an end
        row_of = tokens.new_tensor([rows[tuple(prompts[i])] for i in batch])

        # 2. sample one token for each active sample, until all have ended. Samples with equal
        #    tokens so far share a row of the batch and of the KV cache
        for step in range(uniforms.shape[1]):
            token, logprob = sample_token(logits[row_of], uniforms[active, step], temperature)
            tokens[active, step], logprobs[active, step] = token, logprob
            lengths[active] = step + 1
            ends_here = torch.isin(token, ends)
            if stops is not None:
                ends_here |= stops(tokens[active, : step + 1])
            ended[active] = ends_here
            active, row_of, token = active[~ends_here], row_of[~ends_here], token[~ends_here]
            if step == uniforms.shape[1] - 1 or len(active) == 0:
                break

            # samples with different tokens get rows of their own; finished rows are dropped
            vocabulary = logits.shape[1]
            next_rows, row_of = (row_of * vocabulary + token).unique(return_inverse=True)
            parent, token = next_rows // vocabulary, next_rows % vocabulary
            if len(parent) != len(mask) or parent.diff().ne(1).any():  # else the cache fits already
                cache.reorder_cache(parent)
                mask = mask[parent]
            mask = F.pad(mask, (0, 1), value=1)
            logits = next_logits(model, token[:, None], mask, cache)
    return check_finite(model, Rollout.of(prompts, tokens, logprobs, lengths, ended, pad_id))


def sample_token(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return tokens (rows,) and their log-probs, from logits (rows, V) and uniform (rows,) in
    [0, 1). Temperature 0 is greedy, with log-probs of temperature 1."""
    logp = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        mass = logp.exp().cumsum(-1)
        # 0 would select the first token, however unlikely
        uniform = uniform.clamp(min=2**-25)[:, None]
        token = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
        token = token.clamp(max=logits.shape[1] - 1)
    logprobs = logp.gather(1, token)
    return token[:, 0], logprobs[:, 0]


@torch.inference_mode()  # only here: inference tensors cannot enter autograd later
def next_logits(model, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Read new tokens (rows, n) into the cache and return the logits (rows, V) after the last one.

    mask (rows, past + n) is 0 on the padding at the left."""
    accepts = inspect.signature(model.forward).parameters
    options = {"attention_mask": mask, "past_key_values": cache}
    if "cache_params" in accepts:  # Mamba, which takes a mask with the prompt alone
        is_prompt = ids.shape == mask.shape
        options = {"attention_mask": mask if is_prompt else None, "cache_params": cache}
    if "position_ids" in accepts:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        options["position_ids"] = positions[:, -ids.shape[1] :]
    if "logits_to_keep" in accepts:
        options["logits_to_keep"] = 1
    return model(ids, use_cache=True, **options).logits[:, -1]


PROMPT_TOKENS = 2**14  # read at once, padding included


def batches(model, prompts: list, uniforms: Tensor, cache_gb: float) -> Iterator[list[int]]:
    """Yield the samples (numbers up to P * group_size) that are sampled together: as many as
    cache_gb has room for, prompts of similar lengths. A model that cannot ignore padding gets
    prompts of one length."""
    _, group_size, max_new_tokens = uniforms.shape
    longest = max(prompts, key=len)
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([longest], device=model.device)
    refused = f"--model: a {model.config.model_type} does not use transformers' KV cache"
    try:
        next_logits(model, ids, torch.ones_like(ids), cache)
    except (AttributeError, ValueError) as error:  # it asks for a cache of its own
        raise UserError(refused) from error
    sample_bytes = sum(map(nbytes, cache.layers)) * (1 + max_new_tokens / len(longest))
    need(sample_bytes, refused)
    prompts_at_once = max(1, PROMPT_TOKENS // len(longest))
    at_once = min(int(cache_gb * 1e9 / sample_bytes), prompts_at_once * group_size)
    at_once = max(1, at_once)
    pads = has_plain_kv_cache(model)
    pads = pads and "position_ids" in inspect.signature(model.forward).parameters

    lengths = [len(prompt) for prompt in prompts for _ in range(group_size)]
    shortest_first = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for _, alike in itertools.groupby(shortest_first, key=lambda i: pads or lengths[i]):
        samples = list(alike)
        for first in range(0, len(samples), at_once):
            yield samples[first : first + at_once]


def nbytes(part) -> int:
    """Return the bytes of all tensors in a layer of a cache."""
    if isinstance(part, Tensor):
        return part.nbytes
    inside = part.values() if isinstance(part, dict) else getattr(part, "__dict__", {}).values()
    return sum(map(nbytes, inside))


def check_context(model, prompts: list[list[int]], uniforms: Tensor) -> None:
    """UserError for completions that might not fit into the context."""
    width, context = max(map(len, prompts)) + uniforms.shape[2], context_of(model.config)
    name = model.config.model_type
    need(width <= context, f"{width} tokens, prompt and completion: this {name} reads {context}")


def check_finite(model, samples: Rollout) -> Rollout:
    finite = samples.sampler_logprobs.isfinite().all()
    need(finite, f"the logits of this {model.config.model_type} are not finite (NaN or inf)")
    return samples


def free_gb(device: torch.device) -> float:
    """Return the memory for KV caches: most of a GPU's free memory, or half of the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return 0.8 * (free + cached) / 1e9
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's, which share the memory
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9 / processes


class StopTexts(transformers.StopStringCriteria):
    """Tells which completions end with the token that completes one of some texts.

    The search is transformers' own. It consists of tensor operations alone, so a CUDA graph can
    hold it, and costs less than a percent of a decode step."""

    def __init__(self, tokenizer, texts: list[str]):
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            written = text in tokenizer.decode(ids)
            need(written, f"--stop {text!r}: no tokens of this tokenizer write it")
        super().__init__(tokenizer, texts)
        self.width = self.maximum_token_len  # no more tokens than the longest text has bytes

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return (rows,) bool for the tokens (rows, n) that each completion has so far."""
        return super().__call__(tokens, None)

    @staticmethod
    def clean_tokenizer_vocab(tokenizer, static_prefix="abcdef", **options):
        """The prefix must be one that the tokenizer writes: a character tokenizer may not know
        these letters."""
        if static_prefix not in tokenizer.decode(tokenizer.encode(static_prefix)):
            words = [tokenizer.decode([i]) for i in range(len(tokenizer))]
            static_prefix = next(word for word in words if word.isalnum())
        parent = transformers.StopStringCriteria
        return parent.clean_tokenizer_vocab(tokenizer, static_prefix, **options)


# ---- log-probabilities ---------------------------------------------------------------------------


def completion_logprobs(
    model,
    completions: Rollout,
    temperature: float,
    trees: "Trees | None" = None,
    *,
    entropy_grad: bool | None = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the completions, and entropies of the distributions, at a temperature.

    Both are (N, T), float32, 0 outside the mask, and the same bits with and without gradients.
    trees: the layout of these completions, if not a row a text. Entropies with gradient cost time
    and memory: entropy_grad switches the gradient off. None leaves them out: they are 0."""
    mask = completions.completion_mask
    if trees is None:
        hidden = take(row_states(model, completions), predicting(completions))
        targets = completions.completions[mask]
        logprobs, entropy = token_logprobs(model, hidden, targets, temperature, entropy_grad)
    else:
        hidden = take(tree_states(model, trees), trees.before)
        found = token_logprobs(model, hidden, trees.targets, temperature, entropy_grad)
        logprobs, entropy = take(found.T, trees.prediction).T
    return scattered(logprobs, mask), scattered(entropy, mask)


def completion_values(critic, completions: Rollout, trees: "Trees | None" = None) -> Tensor:
    """Return the critic's value before each token, (N, T), 0 outside the mask."""
    if trees is None:
        hidden = row_states(critic, completions)
    else:
        hidden = tree_states(critic, trees)
    values = state_values(critic, take(hidden, predicting(completions, trees)))
    return scattered(values, completions.completion_mask)


def predicting(completions: Rollout, trees: "Trees | None" = None) -> Tensor:
    """Return (tokens,) for each token of the mask, row by row, the index of the token before it
    among all tokens of the forward pass, padding included."""
    if trees is not None:
        return trees.before[trees.prediction]
    row, step = completions.completion_mask.nonzero(as_tuple=True)
    width = (completions.prompt_lengths + completions.lengths).max()
    return row * width + completions.prompt_lengths[row] + step - 1


def row_states(model, completions: Rollout) -> Tensor:
    """Return the hidden states (tokens, H) of prompts and completions, a row a text. Padding is on
    the right, where no token sees it, so there is no mask, and flash attention can run."""
    ids = padded(completions.sequences(), model.device)
    return body_of(model)(ids, use_cache=False)[0].flatten(0, 1)


def take(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return rows[numbers]. As an embedding: its backward pass adds in a fixed order on every
    device, and is many times faster than that of indexing."""
    return F.embedding(numbers, rows)


def scattered(values: Tensor, mask: Tensor) -> Tensor:
    """Put values (tokens,), row by row, where the mask (N, T) is; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


LOGITS_AT_ONCE = 2**26  # float32: 256 MB


def token_logprobs(
    model, hidden: Tensor, targets: Tensor, temperature: float, entropy_grad: bool | None
) -> Tensor:
    """Return (2, tokens): log-probs of the targets (tokens,) after hidden states (tokens, H), and
    entropies. Logits exist for a chunk of tokens at a time."""
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

    *parts, last = zip(hidden.split(at_once), targets.split(at_once))
    # checkpointed: the backward pass computes the logits of one chunk at a time again. It starts
    # with the last chunk, whose logits may stay
    found = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return torch.cat([*found, chunk(*last)], dim=1)


def state_values(critic, hidden: Tensor) -> Tensor:
    """Apply the critic's head, (tokens, H) -> (tokens,)."""
    return (hidden.float() * critic.value[:-1]).sum(-1) + critic.value[-1]


# ---- micro-batches: rows or trees ----------------------------------------------------------------
#
# Texts with equal beginnings share them: they are a tree in one row of the forward pass, where a
# node sees its ancestors. Nodes are numbered in the order of the sorted texts: the descendants of
# node j are j + 1 up to end[j] - 1, and i sees j where j <= i < end[j]. Below are the completions
# "c d x" and "c e y" of prompt "a b". Last tokens are predicted, not read.
#
#     node      0  1  2  3  4            sees   0 1 2 3 4        before x: node 3
#     token     a  b  c  d  e            3 (d)  1 1 1 1 .        before y: node 4
#     position  0  1  2  3  3            4 (e)  1 1 1 . 1        before c: node 1, once
#     end       5  5  5  4  5

NODES_OF_A_ROW = 1024  # about: attention looks at every pair of nodes of a row
WORTHWHILE = 0.7  # trees of at most so many tokens, as a part of those of rows, are worth a mask
# numbers of a mask that a saved token may cost. Without checkpointing the backward pass keeps more
# than that for a token of a model of four layers of 64 numbers
MASK_OF_A_TOKEN = 4096


class Trees(typing.NamedTuple):
    """The texts of a micro-batch as R rows of U nodes. Equal tokens after equal texts are predicted
    once."""

    ids: Tensor  # (R, U) tokens
    positions: Tensor  # (R, U) depth in the tree
    end: Tensor  # (R, U) the node of the row after the last descendant
    before: Tensor  # (predictions,) the node that predicts, of all R * U
    targets: Tensor  # (predictions,) the token
    prediction: Tensor  # (tokens,) its number, for each token of the mask, row by row


class MicroBatch(typing.NamedTuple):
    """Completions of one forward pass."""

    rows: Tensor  # (n,) on the CPU, indices into the rollout that was divided
    completions: Rollout
    trees: Trees | None  # None: a row a text


def micro_batches(rollout: Rollout, tokens: int, shares: bool) -> list[MicroBatch]:
    """Divide the rows into parts whose forward pass has at most so many tokens, padding included,
    or one row. shares: trees may be used, and are where they save enough."""
    parts, computed = in_rows(rollout, tokens)
    width = None
    if shares and parts:
        parts_of_trees, nodes, width_of_trees = in_trees(rollout, tokens)
        mask = nodes * width_of_trees
        small = mask <= MASK_OF_A_TOKEN * (computed - nodes)
        if width_of_trees <= tokens and nodes <= WORTHWHILE * computed and small:
            parts, width = parts_of_trees, width_of_trees

    batches = []
    for part in parts:
        rows = torch.tensor(sorted(part))
        completions = rollout[rows]
        trees = None if width is None else plant(completions, width)
        batches.append(MicroBatch(rows, completions, trees))
    return batches


def in_rows(rollout: Rollout, tokens: int) -> tuple[list[list[int]], int]:
    """Return the texts of each micro-batch of rows, the longest ones together, and the number of
    tokens that all of them compute."""
    lengths = (rollout.prompt_lengths + rollout.lengths).tolist()
    parts, computed = [], 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > tokens:
            parts.append([])
        parts[-1].append(row)
        computed += lengths[parts[-1][0]]
    return parts, computed


def in_trees(rollout: Rollout, tokens: int) -> tuple[list[list[int]], int, int]:
    """Return the texts of each micro-batch of trees, the number of nodes that all of them compute,
    and the width of their rows. The rows are of about equal size: padding is computed, too."""
    texts = sorted_texts(rollout)
    longest = int(texts.lengths.max())
    widest = max(longest, min(tokens, max(NODES_OF_A_ROW, 2 * longest)))
    count = rows_of(texts, widest)[-1] + 1
    narrower = range(longest, widest)
    fits = lambda width: rows_of(texts, width)[-1] < count  # noqa: E731
    width = longest + bisect.bisect_left(narrower, True, key=fits)
    width = multiple_of_8(width)

    at_once = max(1, tokens // width)
    parts = [[] for _ in range(math.ceil(count / at_once))]
    for text, row in zip(texts.order.tolist(), rows_of(texts, width)):
        parts[row // at_once].append(text)
    return parts, count * width, width


class SortedTexts(typing.NamedTuple):
    """Texts without their last tokens, which are predicted and not read."""

    order: Tensor  # (N,) their numbers
    ids: Tensor  # (N, longest)
    lengths: Tensor  # (N,)
    shared: Tensor  # (N,) tokens at the beginning that the text before has, too


def sorted_texts(completions: Rollout) -> SortedTexts:
    texts = [text[:-1] for text in completions.sequences()]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    ids = padded([texts[i] for i in order], "cpu")
    lengths = torch.tensor([len(texts[i]) for i in order])
    shared = torch.zeros_like(lengths)
    equal = (ids[1:] == ids[:-1]).long().cumprod(1).sum(1)
    shared[1:] = torch.minimum(equal, torch.minimum(lengths[1:], lengths[:-1]))  # not padding
    return SortedTexts(torch.tensor(order), ids, lengths, shared)


def rows_of(texts: SortedTexts, width: int) -> list[int]:
    """Return for each text the row that has its tree: the next row begins where a text no longer
    fits."""
    row, size, found = -1, width, []  # full: the first text begins a row
    for length, shared in zip(texts.lengths.tolist(), texts.shared.tolist()):
        size += length - shared
        if size > width:
            row, size = row + 1, length
        found.append(row)
    return found


def multiple_of_8(width: int) -> int:
    """Attention with a mask needs rows of such widths to be fast on a GPU."""
    return math.ceil(width / 8) * 8


def plant(completions: Rollout, width: int) -> Trees:
    """Return completions as trees in rows of at most so many nodes."""
    device, completions = completions.tokens.device, completions.to("cpu")
    texts = sorted_texts(completions)
    row = torch.tensor(rows_of(texts, width))
    is_first = row.diff(prepend=torch.tensor([-1])) > 0  # of its row
    shared = texts.shared.masked_fill(is_first, 0)

    # the new nodes of a text follow those of the texts before it in the row
    new = texts.lengths - shared
    before = new.cumsum(0) - new
    first_new = before - before[is_first][row]
    width = multiple_of_8(int((first_new + new).max()))
    first_new += row * width

    # a token that is not new is that of the last text before where it was
    steps = torch.arange(texts.ids.shape[1])
    number = torch.arange(len(row))[:, None]
    owner = torch.where(steps >= shared[:, None], number, 0).cummax(0).values
    nodes = (first_new - shared)[owner] + steps  # (N, longest), among all R * U
    last = nodes.gather(1, texts.lengths[:, None] - 1) % width

    count = int(row[-1] + 1) * width
    is_node = steps < texts.lengths[:, None]
    there = nodes[is_node]
    ids, positions = torch.zeros(2, count, dtype=torch.long)
    ids[there] = texts.ids[is_node]
    positions[there] = steps.expand_as(nodes)[is_node]
    end = torch.arange(count) % width + 1  # a node on padding sees itself, or its softmax is NaN
    end.scatter_reduce_(0, there, (last + 1).expand_as(nodes)[is_node], "amax")

    nodes = nodes[texts.order.argsort()]
    text, step = completions.completion_mask.nonzero(as_tuple=True)
    predictor = nodes[text, completions.prompt_lengths[text] + step - 1]
    targets = completions.completions[completions.completion_mask]
    vocabulary = int(completions.tokens.max()) + 1
    pairs, prediction = (predictor * vocabulary + targets).unique(return_inverse=True)
    in_rows = [column.view(-1, width) for column in (ids, positions, end)]
    found = (*in_rows, pairs // vocabulary, pairs % vocabulary, prediction)
    return Trees(*[column.to(device) for column in found])


def tree_states(model, trees: Trees) -> Tensor:
    """Return the hidden states (R * U, H) of all nodes."""
    i = torch.arange(trees.ids.shape[1], device=trees.ids.device)[:, None]
    j = i.T
    sees = (j <= i) & (i < trees.end[:, None, :])  # (R, U, U)
    distance = trees.positions[:, :, None] - trees.positions[:, None, :]
    masks = {}
    for kind, window in kinds_of_layers(model).items():
        masks[kind] = sees if window is None else sees & (distance < window)
    masks = {kind: additive(model, mask) for kind, mask in masks.items()}
    if len(masks) == 1:
        [masks] = masks.values()
    options = {"position_ids": trees.positions, "attention_mask": masks}
    return body_of(model)(trees.ids, use_cache=False, **options)[0].flatten(0, 1)


def additive(model, sees: Tensor) -> Tensor:
    """Return a mask (R, 1, U, U) in the dtype of the queries: attention would else convert it in
    every layer, and keep each copy."""
    device = sees.device
    dtype = model.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    mask = torch.zeros(sees.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~sees, -torch.inf)[:, None]


def kinds_of_layers(model) -> dict[str, int | None]:
    """Return the sliding window, or None, of each kind of layer."""
    config = model.config.get_text_config(decoder=True)
    kinds, options = get_layer_types_and_kwargs(config)
    return {kind: option.get("sliding_window") for kind, option in zip(kinds, options)}


def shares_prefixes(model) -> bool:
    """Tell whether a model may get trees: it takes our positions, and our mask for each layer."""
    takes = "position_ids" in inspect.signature(body_of(model).forward).parameters
    sdpa = model.config._attn_implementation == "sdpa"
    kinds = set(kinds_of_layers(model))
    return takes and sdpa and kinds <= {"full_attention", "sliding_attention"}


# ---- the check of a model ------------------------------------------------------------------------


@torch.no_grad()
def check_scorer(model, prompts, pad_id: int, sampler=generate) -> bool:
    """Compare log-probs by the sampler, rows and trees with the model's own forward pass. Tell
    whether trees may be used. UserError where the sampler or rows differ.

    Prompts of two lengths show errors of padding. Completions of a prompt begin alike. In a mixture
    of experts rounding decides between two experts with nearly equal scores, so there one log-prob
    in ten may differ."""
    name = model.config.model_type
    uniforms = torch.rand(len(prompts), 2, 8, generator=torch.Generator().manual_seed(0))
    uniforms[:, 1, :4] = uniforms[:, 0, :4]
    samples = sampler(model, prompts, uniforms, eos_ids=[], pad_id=pad_id)
    own = torch.stack([text_logprobs(model, text)[-8:] for text in samples.sequences()])
    allowed = 0.1 if has_experts(model.config) else 0.0

    def differ(found: Tensor) -> bool:
        gap = (found - own).abs()
        return bool((~(gap < 1e-3)).float().mean() > allowed)  # NaN, too. Rounding makes 1e-5

    rows, _ = completion_logprobs(model, samples, temperature=1.0)
    for who, found in (("sampler", samples.sampler_logprobs), ("scorer", rows)):
        gap = float((found - own).abs().max())
        need(
            not differ(found),
            f"--model: log-probs of our {who} are up to {gap:.1g} away from those of the {name}'s "
            "own forward pass: it cannot be trained here",
        )
    if not shares_prefixes(model):
        return False
    trees = plant(samples, width=max(map(len, samples.sequences())))  # several rows
    by_trees, _ = completion_logprobs(model, samples, 1.0, trees)
    return not differ(by_trees)


def text_logprobs(model, text: list[int]) -> Tensor:
    """Return the log-probs of all tokens but the first, by the model's own forward pass."""
    ids = torch.tensor([text], device=model.device)
    logits = model(ids, use_cache=False).logits[0, :-1]
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass
class Flags:
    model: str | None = flag(None, "a folder, or a name on the hub; required")
    prompt: str | None = flag(None, "a text; required")
    system: str | None = flag(None, "system message, for tokenizers with a chat template")
    prompt_template: str = flag("{prompt}", "text around {prompt}; \\n is a line break")
    chat_template_args: str = flag("{}", 'JSON for the template: {"enable_thinking": false}')
    stop: list[str] | None = flag(None, "text that ends a completion; may be given several times")
    samples: int = flag(4, "completions", low=1)
    max_new_tokens: int = flag(256, "limit of a completion", low=1)
    temperature: float = flag(1.0, "divides the logits; 0: greedy", low=0)
    seed: int = flag(0, "seed of the samples", low=0)
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "where the model runs")


def print_completions(flags: Flags) -> None:
    need(flags.model and flags.prompt, "expected --model and --prompt")
    tokenizer, config = inspect_model(flags.model)
    form = PromptFormat(tokenizer, flags, vocabulary=config.get_text_config().vocab_size)
    ids = form.encode({"prompt": flags.prompt})[IDS]
    stops = StopTexts(tokenizer, flags.stop) if flags.stop else None
    model = load_model(flags.model, flags.device)
    generator = torch.Generator().manual_seed(flags.seed)
    uniforms = torch.rand(1, flags.samples, flags.max_new_tokens, generator=generator)
    ends = end_and_pad_ids(model, tokenizer)
    options = {"temperature": flags.temperature, "stops": stops, **ends}
    samples = generate(model, [ids], uniforms, **options)
    for completion in samples.sequences():
        text = tokenizer.decode(completion[len(ids) :], skip_special_tokens=True)
        for line in text.split("\n"):  # a completion may hold escape sequences
            print(printable(line))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    transformers.utils.logging.disable_progress_bar()
    try:
        print_completions(parse(Flags, __doc__, arguments))
    except (UserError, OSError) as error:
        print("error:", printable(str(error)), file=sys.stderr)
        return 2
    except torch.OutOfMemoryError:
        print("error: out of memory; lower --samples or --max-new-tokens", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
