"""Sample completions, and compute their log-probabilities with gradients.

    python rollout.py --model runs/demo/checkpoints/step-100 --prompt "7+5*3="

Read `generate`, then `completion_logprobs`. `generate` calls the model's own forward pass with its
KV cache. `completion_logprobs` calls the model's body, then its head in float32 (`logits_of`). It
has two layouts: a row a sequence, or, an optimisation that can be skipped at first, trees of
sequences with equal beginnings. `check_scorer` compares all with the model's own forward pass."""

import dataclasses
import inspect
import itertools
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: pip install -r requirements.txt")
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from support.command_line import flag, parse
from support.data import IDS, PromptFormat, completion_text, printable, printable_lines
from support.errors import UserError, expecting, need
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
from support.stop_texts import StopTexts
from support.trees import Trees, grow, grow_evenly, in_order, join, masks_of, shares_prefixes


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

    @property
    def latest_action(self) -> Tensor:
        """(N, T): for each token the index of the latest token, up to it, that the policy wrote. A
        tool's tokens are no action: their rewards go to the action before them."""
        indices = torch.arange(self.completion_mask.shape[1], device=self.completion_mask.device)
        return (indices * self.completion_mask).cummax(1).values

    def sequences(self) -> list[list[int]]:
        """The token ids of each row, prompt and completion, without padding."""
        starts = self.prompt_width - self.prompt_lengths
        ends = self.prompt_width + self.lengths
        rows = zip(self.tokens.tolist(), starts.tolist(), ends.tolist())
        return [tokens[start:end] for tokens, start, end in rows]

    def select(self, rows: list[int] | Tensor) -> "Rollout":
        """Some rows. S and T stay."""
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
            wider = rollout._replace(
                tokens=F.pad(rollout.tokens, (left, right), value=pad_id),
                completion_mask=F.pad(rollout.completion_mask, (0, right)),
                sampler_logprobs=F.pad(rollout.sampler_logprobs, (0, right)),
            )
            wide.append(wider)
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
    _, group_size, max_new_tokens = uniforms.shape
    width, context = max(map(len, prompts)) + max_new_tokens, context_of(model.config)
    name = model.config.model_type
    need(width <= context, f"{width} tokens, prompt and completion: this {name} reads {context}")
    prompt_of = [tuple(prompt) for prompt in prompts for _ in range(group_size)]  # of each sample
    uniform_of = uniforms.flatten(0, 1).to(model.device)
    tokens = torch.full(uniform_of.shape, pad_id, device=model.device)
    logprobs = torch.zeros(uniform_of.shape, device=model.device)
    lengths = torch.zeros(len(uniform_of), dtype=torch.long, device=model.device)
    ended = torch.zeros(len(uniform_of), dtype=torch.bool, device=model.device)
    ends = tokens.new_tensor(eos_ids)

    # `batches` measures a sample's cache by a pass over the longest prompt
    for sample_ids in batches(model, prompts, uniforms, cache_gb or free_gb(model.device)):
        # 1. read each distinct prompt once, padded on the left
        distinct = list(dict.fromkeys(prompt_of[i] for i in sample_ids))
        mask = padded([[1] * len(prompt) for prompt in distinct], model.device, left=True)
        cache = DynamicCache(config=model.config)
        logits = next_logits(model, padded(distinct, model.device, pad_id, left=True), mask, cache)
        row_of_prompt = {prompt: row for row, prompt in enumerate(distinct)}
        # samples without an end, and the row of the cache of each: several may share one
        unfinished = tokens.new_tensor(sample_ids)
        row_of = tokens.new_tensor([row_of_prompt[prompt_of[i]] for i in sample_ids])

        # 2. sample one token for each unfinished sample, until all have ended. Samples with equal
        #    tokens so far share a row of the batch and of the KV cache
        for t in range(max_new_tokens):
            token, logprob = sample_token(logits[row_of], uniform_of[unfinished, t], temperature)
            tokens[unfinished, t], logprobs[unfinished, t] = token, logprob
            lengths[unfinished] = t + 1
            ends_here = torch.isin(token, ends)
            if stops is not None:
                ends_here |= stops(tokens[unfinished, : t + 1])
            ended[unfinished] = ends_here
            goes_on = ~ends_here
            unfinished, row_of, token = unfinished[goes_on], row_of[goes_on], token[goes_on]
            if t == max_new_tokens - 1 or len(unfinished) == 0:
                break

            # samples with different tokens get rows of their own; finished rows are dropped. The
            # cache stays as it is if no row split or ended: then the parents are 0, 1, 2, ...
            parent, token, row_of = split_rows(row_of, token, logits.shape[1])
            if not torch.equal(parent, torch.arange(len(mask), device=parent.device)):
                cache.reorder_cache(parent)
                mask = mask[parent]
            mask = F.pad(mask, (0, 1), value=1)
            logits = next_logits(model, token[:, None], mask, cache)
    rollout = Rollout.of(prompt_of, tokens, logprobs, lengths, ended, pad_id)
    finite = rollout.sampler_logprobs.isfinite().all()
    need(finite, f"the logits of this {name} are not finite (NaN or inf)")
    return rollout


def split_rows(row_of: Tensor, token: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give each distinct pair (row, token) a row of its own. Return the old row, `parent`, and the
    token of each new row, and the new row of each sample.

    Tokens a, b, a of three samples in row 0 make two new rows of parent 0, with tokens a and b. The
    samples are then in rows 0, 1, 0."""
    pairs, row_of = (row_of * vocabulary + token).unique(return_inverse=True)
    return pairs // vocabulary, pairs % vocabulary, row_of


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
    """Yield lists of samples, 0 to P * group_size - 1, that are sampled together: as many as
    cache_gb has room for, of similar lengths, or of one where a model cannot ignore padding."""
    _, group_size, max_new_tokens = uniforms.shape
    longest = max(prompts, key=len)
    prompts_at_once = max(1, PROMPT_TOKENS // len(longest))
    room = int(cache_gb * 1e9 / cache_bytes(model, longest, max_new_tokens))
    at_once = max(1, min(room, prompts_at_once * group_size))
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    pads = takes_positions and has_plain_kv_cache(model)

    lengths = [len(prompt) for prompt in prompts for _ in range(group_size)]
    samples = range(len(lengths))
    shortest_first = sorted(samples, key=lambda i: lengths[i])
    by_length = itertools.groupby(shortest_first, key=lambda i: lengths[i])
    together = [shortest_first] if pads else [list(alike) for _, alike in by_length]
    for alike in together:
        for first in range(0, len(alike), at_once):
            yield alike[first : first + at_once]


def cache_bytes(model, prompt: list[int], max_new_tokens: int) -> float:
    """Return the bytes of a sample's KV cache, measured on the prompt. UserError if it has none."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt], device=model.device)
    refused = f"--model: a {model.config.model_type} does not use transformers' KV cache"
    try:
        next_logits(model, ids, torch.ones_like(ids), cache)
    except (AttributeError, ValueError) as error:  # it asks for a cache of its own
        raise UserError(refused) from error
    read = sum(map(nbytes, cache.layers))
    need(read, refused)
    return read * (1 + max_new_tokens / len(prompt))


def nbytes(layer) -> int:
    """Return the bytes of all tensors in a layer of a cache."""
    if isinstance(layer, Tensor):
        return layer.nbytes
    inside = layer if isinstance(layer, dict) else getattr(layer, "__dict__", {})
    return sum(map(nbytes, inside.values()))


def free_gb(device: torch.device) -> float:
    """Return the memory for KV caches: most of a GPU's free one, half of a machine or container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return 0.8 * (free + cached) / 1e9
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; or "max"
    if limit.exists() and limit.read_text().strip().isdecimal():
        room = min(room, int(limit.read_text()))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's, which share the memory
    return 0.5 * room / 1e9 / processes


# ---- log-probabilities ---------------------------------------------------------------------------


def completion_logprobs(
    model,
    rollout: Rollout,
    temperature: float,
    trees: Trees | None = None,
    *,
    entropy: str = "gradient",
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the completions, and entropies of the distributions, at a temperature.

    Both are (N, T), float32, 0 outside the mask, and the same bits with and without gradients.
    trees: the layout of the rollout, if not a row a sequence. A gradient of entropies costs
    time and memory: entropy="value" is without, and with "none" they are 0."""
    mask = rollout.completion_mask
    hidden = hidden_states(model, rollout, trees)
    both = token_logprobs(model, hidden, rollout.completions[mask], temperature, entropy)
    logprobs, entropies = both
    zeros = logprobs.new_zeros(mask.shape)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropies)


def completion_values(critic, rollout: Rollout, trees: Trees | None = None) -> Tensor:
    """Return the critic's value before each token, (N, T), 0 outside the mask."""
    hidden = hidden_states(critic, rollout, trees).float()
    values = (hidden * critic.value[:-1]).sum(-1) + critic.value[-1]
    mask = rollout.completion_mask
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def hidden_states(model, rollout: Rollout, trees: Trees | None) -> Tensor:
    """Return the hidden states (tokens, H) that predict the tokens of the mask, row by row."""
    if trees is None:
        # no token sees the padding on its right: without a mask flash attention can run
        ids, options = padded(rollout.sequences(), model.device), {}
    else:
        masks = masks_of(model, trees)
        ids, options = trees.ids, {"position_ids": trees.positions, "attention_mask": masks}
    hidden = body_of(model)(ids, use_cache=False, **options)[0].flatten(0, 1)
    before = predicting(rollout, trees)
    # hidden[before], as an embedding: its backward pass adds in a fixed order on every device, and
    # is many times faster than that of indexing
    return F.embedding(before, hidden)


def predicting(rollout: Rollout, trees: Trees | None) -> Tensor:
    """Return (tokens,) for each token of the mask, row by row, the index of the token before it
    among all tokens of the forward pass, padding included."""
    if trees is not None:
        return trees.before
    row, t = rollout.completion_mask.nonzero(as_tuple=True)
    # `hidden_states` pads the rows to the longest
    width = (rollout.prompt_lengths + rollout.lengths).max()
    return row * width + rollout.prompt_lengths[row] + t - 1


LOGITS_AT_ONCE = 2**26  # float32: 256 MB


def token_logprobs(
    model, hidden: Tensor, targets: Tensor, temperature: float, entropy: str
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
        entropies = torch.zeros_like(logprobs)
        if entropy != "none":
            with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
                entropies = -(logp.exp() * logp).sum(-1)
        return torch.stack([logprobs, entropies])

    *parts, last = zip(hidden.split(at_once), targets.split(at_once))
    # checkpointed: the backward pass computes the logits of one chunk at a time again. It starts
    # with the last chunk, whose logits may stay
    found = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return torch.cat([*found, chunk(*last)], dim=1)


# ---- micro-batches: rows or trees ----------------------------------------------------------------

WORTHWHILE = 0.7  # trees of at most this part of the tokens of rows are worth a mask
# a token that is computed costs more memory than this: even a model with four layers of 64 keeps
# more numbers of it for the backward pass. So a smaller mask pays
MASK_ELEMENTS_PER_SAVED_TOKEN = 4096


class MicroBatch(typing.NamedTuple):
    rows: Tensor  # (n,) on the CPU: indices into the rollout
    rollout: Rollout  # those rows of it
    trees: Trees | None  # None: a row a sequence


def micro_batches(
    rollout: Rollout, rows: Tensor, most_tokens: int, shares: bool
) -> list[MicroBatch]:
    """Divide rows of a rollout into parts whose forward pass has at most so many tokens, padding
    included, or one row. shares: trees may be used, and are where they save enough."""
    lengths = (rollout.prompt_lengths + rollout.lengths).tolist()
    parts, computed, width = [], 0, 0
    for row in sorted(rows.tolist(), key=lambda row: -lengths[row]):
        if not parts or (len(parts[-1]) + 1) * width > most_tokens:
            parts.append([])
            width = lengths[row]  # of the part: the longest row comes first
        parts[-1].append(row)
        computed += width
    if shares and parts:
        trees, width = grow_evenly(rollout.select(rows).sequences(), most_tokens)
        nodes = len(trees) * width
        saves_much = nodes <= WORTHWHILE * computed
        mask_is_small = nodes * width <= MASK_ELEMENTS_PER_SAVED_TOKEN * (computed - nodes)
        if trees and saves_much and mask_is_small:
            at_once = most_tokens // width
            several = [trees[i : i + at_once] for i in range(0, len(trees), at_once)]
            return [micro_batch_of_trees(rollout, rows, some) for some in several]
    parts = [torch.tensor(part) for part in parts]
    return [MicroBatch(part, rollout.select(part), trees=None) for part in parts]


def micro_batch_of_trees(rollout: Rollout, rows: Tensor, trees: list) -> MicroBatch:
    """Return the micro-batch of the trees, whose sequence `number` is that of rows[number]."""
    numbers = sorted(number for tree in trees for number in tree.paths)
    rows_in_trees = rows[numbers]
    rollout = rollout.select(rows_in_trees)
    # token t of a row of the mask is predicted by the token before it, at a position of its
    # sequence, which is a node of a tree (`join`)
    row, t = rollout.completion_mask.nonzero(as_tuple=True)
    position = rollout.prompt_lengths[row] + t - 1
    return MicroBatch(rows_in_trees, rollout, join(trees, row, position))


# ---- the check of a model ------------------------------------------------------------------------


@torch.no_grad()
def check_scorer(model, prompts, pad_id: int) -> bool:
    """Compare log-probs by the sampler, rows and trees with the model's own forward pass. Tell
    whether trees may be used. UserError where the sampler or rows differ.

    Prompts of two lengths show errors of padding. Completions of a prompt begin alike. One log-prob
    in ten of a mixture may differ: rounding decides between experts with nearly equal scores."""
    name = model.config.model_type
    uniforms = torch.rand(len(prompts), 2, 8, generator=torch.Generator().manual_seed(0))
    uniforms[:, 1, :4] = uniforms[:, 0, :4]
    rollout = generate(model, prompts, uniforms, eos_ids=[], pad_id=pad_id)
    sequences = rollout.sequences()
    own = torch.stack([sequence_logprobs(model, each)[-8:] for each in sequences])
    allowed = 0.1 if has_experts(model.config) else 0.0

    def differ(found: Tensor) -> bool:
        gap = (found - own).abs()
        return bool((~(gap < 1e-3)).float().mean() > allowed)  # NaN, too. Rounding makes 1e-5

    with expecting(f"--model: our scorer cannot run a {name}", (RuntimeError,)):
        by_rows, _ = completion_logprobs(model, rollout, temperature=1.0)
    for who, found in (("sampler", rollout.sampler_logprobs), ("scorer", by_rows)):
        gap = float((found - own).abs().max())
        need(
            not differ(found),
            f"--model: log-probs of our {who} are up to {gap:.1g} away from those of the {name}'s "
            "own forward pass: it cannot be trained here",
        )
    if not shares_prefixes(model):
        return False
    trees = grow(in_order(sequences), width=rollout.tokens.shape[1] + 8)  # some rows
    part = micro_batch_of_trees(rollout, torch.arange(len(sequences)), trees)
    by_trees, _ = completion_logprobs(model, rollout, 1.0, part.trees)
    return not differ(by_trees)


def sequence_logprobs(model, sequence: list[int]) -> Tensor:
    """Return the log-probs of all tokens but the first, by the model's own forward pass."""
    ids = torch.tensor([sequence], device=model.device)
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
    rollout = generate(model, [ids], uniforms, **options)
    for completion in rollout.sequences():
        text = completion_text(tokenizer, completion[len(ids) :], ends["eos_ids"])
        print(printable_lines(text))  # a completion may hold escape sequences


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    transformers.utils.logging.disable_progress_bar()
    try:
        print_completions(parse(Flags, __doc__, arguments))
    except (UserError, OSError) as error:
        print("error:", printable(str(error)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
