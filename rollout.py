"""Sample completions, and compute their log-probs with gradients.

    python rollout.py --model runs/demo/checkpoints/step-100 --prompt "7+5*3="

Read `generate`, then `completion_logprobs`. `generate` calls the model's own forward pass, with its
KV cache. `completion_logprobs` calls the model's body, then its head in float32 (`logits_of`), on
one sequence per row or, as an optimization you can skip at first, on trees of sequences with
common prefixes. `check_scorer` compares all of them with the model's own forward pass."""

import dataclasses
import inspect
import itertools
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
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
from support.prefix_trees import Trees, grow, grow_evenly, in_order, join, masks_of, shares_prefixes
from support.stop_texts import StopTexts

PROMPT_TOKENS = 2**14  # prefilled at once, padding included
LOGITS_AT_ONCE = 2**26  # float32: 256 MB
# use trees only if they have at most this fraction of the rows' tokens, and if their mask is
# smaller than the activations they save (> 4096 floats per token even for tiny models)
WORTHWHILE = 0.7
MASK_ELEMENTS_PER_SAVED_TOKEN = 4096


class Rollout(typing.NamedTuple):
    """N completions of P prompts. The completions of one prompt, a group, are contiguous rows.

    |<-------- S: prompt_width --------->|<-------------- T ------------->|
    pad pad pad  p   p   p   p   p   p   p   c   c   c   c  eos  pad pad pad
                |<--- prompt_lengths --->|<---- lengths ---->|
    """

    tokens: Tensor  # (N, S + T)
    prompt_lengths: Tensor  # (N,) tokens
    lengths: Tensor  # (N,) completion tokens, the end token included
    completion_mask: Tensor  # (N, T) the policy's own tokens: neither padding nor a tool's reply
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
        """For each token, (N, T), the index of the last token up to it that the policy wrote. A
        tool's tokens are not actions: their rewards go to the action before them."""
        indices = torch.arange(self.completion_mask.shape[1], device=self.completion_mask.device)
        return (indices * self.completion_mask).cummax(1).values

    def sequences(self) -> list[list[int]]:
        """The token ids of each row, prompt and completion, without padding."""
        starts = self.prompt_width - self.prompt_lengths
        ends = self.prompt_width + self.lengths
        rows = zip(self.tokens.tolist(), starts.tolist(), ends.tolist())
        return [tokens[start:end] for tokens, start, end in rows]

    def select(self, rows: list[int] | Tensor) -> "Rollout":
        """Select rows. S and T stay the same."""
        return Rollout(*[column[rows] for column in self])

    @staticmethod
    def of(
        prompts: list[list[int]], tokens: Tensor, logprobs: Tensor, lengths: Tensor, ended, pad_id
    ) -> "Rollout":
        """Join N prompts and sampled tokens (N, max_new_tokens), of which the first `lengths` are
        kept. ended (N,) is True where the last of these ends the completion."""
        longest = int(lengths.max())
        # by position: comparing ids with pad_id would lose the end token if pad == eos
        mask = torch.arange(longest, device=tokens.device) < lengths[:, None]
        left = padded(prompts, tokens.device, pad_id, left=True)
        completions = tokens[:, :longest].masked_fill(~mask, pad_id)
        return Rollout(
            tokens=torch.cat([left, completions], 1),
            prompt_lengths=tokens.new_tensor([len(prompt) for prompt in prompts]),
            lengths=lengths,
            completion_mask=mask,
            sampler_logprobs=logprobs[:, :longest].masked_fill(~mask, 0.0),
            truncated=~ended,
        )

    @staticmethod
    def cat(rollouts: list["Rollout"], pad_id: int) -> "Rollout":
        """Stack the rows of all rollouts, padded to the largest S and T."""
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
    """Stack rows of token ids into (rows, longest), padded on the right or on the left."""
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
    """Sample group_size completions for each of P prompts (token ids).

    uniforms (P, group_size, max_new_tokens), in [0, 1), decide the tokens: the same numbers give
    the same completions, up to rounding, whatever cache_gb (memory for KV caches, in GB) is.
    Temperature 0 is greedy. `stops` ends completions at stop strings (`StopTexts`).

    Samples that agree so far share a row of the KV cache. Example: the second token
    of three samples of "a b" and three of "c", where sample 5 ends:

        sample         0      1      2      3      4      5
        tokens so far  a b x  a b x  a b y  c x    c x    c x
        cache row      0      0      1      2      2      2
        new token      p      q      p      p      p      end
        new cache row  0      1      2      3      3              parents, row by row: 0 0 1 2
    """
    _, group_size, max_new_tokens = uniforms.shape
    name, context = model.config.model_type, context_of(model.config)
    width = max(map(len, prompts)) + max_new_tokens
    need(width <= context, f"{width} tokens, prompt included: this {name} reads at most {context}")
    # one row per sample: the completions of prompt 0, then those of prompt 1, ...
    prompt_of = [tuple(prompt) for prompt in prompts for _ in range(group_size)]
    uniform = uniforms.flatten(0, 1).to(model.device)
    tokens = torch.full(uniform.shape, pad_id, device=model.device)
    logprobs = torch.zeros(uniform.shape, device=model.device)
    lengths = torch.zeros(len(prompt_of), dtype=torch.long, device=model.device)
    ended = torch.zeros(len(prompt_of), dtype=torch.bool, device=model.device)
    ends = tokens.new_tensor(eos_ids)

    for samples in batches(model, prompts, uniforms, cache_gb or free_gb(model.device)):
        # 1. prefill each distinct prompt once, left-padded, into a cache row of its own
        distinct = list(dict.fromkeys(prompt_of[i] for i in samples))
        row_of_prompt = {prompt: row for row, prompt in enumerate(distinct)}
        mask = padded([[1] * len(prompt) for prompt in distinct], model.device, left=True)
        cache = DynamicCache(config=model.config)
        logits = next_logits(model, padded(distinct, model.device, pad_id, left=True), mask, cache)
        vocab_size = logits.shape[1]

        # 2. sample token t of all unfinished samples, until none is left
        unfinished = tokens.new_tensor(samples)
        cache_row = tokens.new_tensor([row_of_prompt[prompt_of[i]] for i in samples])
        for t in range(max_new_tokens):
            token, logprob = sample_token(logits[cache_row], uniform[unfinished, t], temperature)
            tokens[unfinished, t], logprobs[unfinished, t] = token, logprob
            lengths[unfinished] = t + 1
            ends_here = torch.isin(token, ends)
            if stops is not None:
                ends_here |= stops(tokens[unfinished, : t + 1])
            ended[unfinished] = ends_here
            goes_on = ~ends_here
            unfinished, cache_row, token = unfinished[goes_on], cache_row[goes_on], token[goes_on]
            if t == max_new_tokens - 1 or len(unfinished) == 0:
                break

            # 3. give each distinct pair (cache row, token) a row, and read the tokens. Copying the
            #    cache is slow: skip it if no row was split or dropped
            pairs, cache_row = (cache_row * vocab_size + token).unique(return_inverse=True)
            parent, token = pairs // vocab_size, pairs % vocab_size
            if not torch.equal(parent, torch.arange(len(mask), device=parent.device)):
                cache.reorder_cache(parent)
                mask = mask[parent]
            mask = F.pad(mask, (0, 1), value=1)
            logits = next_logits(model, token[:, None], mask, cache)
    rollout = Rollout.of(prompt_of, tokens, logprobs, lengths, ended, pad_id)
    need(rollout.sampler_logprobs.isfinite().all(), f"the logits of this {name} are not finite")
    return rollout


def sample_token(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw tokens (n,) from logits (n, V) by the inverse CDF at uniform (n,), in [0, 1). Returns
    them and their log-probs. Temperature 0 is greedy, with log-probs at temperature 1."""
    logp = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        mass = logp.exp().cumsum(-1)
        uniform = uniform.clamp(min=2**-25)[:, None]  # 0 would select token 0, however unlikely
        token = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
        token = token.clamp(max=logits.shape[1] - 1)
    logprobs = logp.gather(1, token)
    return token[:, 0], logprobs[:, 0]


@torch.inference_mode()  # not around `generate`: inference tensors cannot enter autograd later
def next_logits(model, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Append tokens (rows, n) to the cache and return the logits (rows, V) after the last one.

    mask (rows, past + n) is 0 on the left padding."""
    accepts = inspect.signature(model.forward).parameters
    options = {"attention_mask": mask, "past_key_values": cache}
    if "cache_params" in accepts:  # Mamba, which takes a mask only for the prompt
        is_prompt = ids.shape == mask.shape
        options = {"attention_mask": mask if is_prompt else None, "cache_params": cache}
    if "position_ids" in accepts:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        options["position_ids"] = positions[:, -ids.shape[1] :]
    if "logits_to_keep" in accepts:
        options["logits_to_keep"] = 1
    return model(ids, use_cache=True, **options).logits[:, -1]


def batches(model, prompts: list, uniforms: Tensor, cache_gb: float) -> Iterator[list[int]]:
    """Split the P * group_size samples into batches that fit into cache_gb. Prompts in a batch have
    similar lengths, or the same length if the model cannot ignore padding."""
    _, group_size, max_new_tokens = uniforms.shape
    longest = max(prompts, key=len)
    prompts_at_once = max(1, PROMPT_TOKENS // len(longest))
    room = int(cache_gb * 1e9 / cache_bytes(model, longest, max_new_tokens))
    at_once = max(1, min(room, prompts_at_once * group_size))
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    ignores_padding = takes_positions and has_plain_kv_cache(model)
    lengths = [len(prompt) for prompt in prompts for _ in range(group_size)]
    shortest_first = sorted(range(len(lengths)), key=lengths.__getitem__)
    by_length = itertools.groupby(shortest_first, key=lengths.__getitem__)
    groups = [shortest_first] if ignores_padding else [list(samples) for _, samples in by_length]
    for samples in groups:
        for first in range(0, len(samples), at_once):
            yield samples[first : first + at_once]


def cache_bytes(model, prompt: list[int], max_new_tokens: int) -> float:
    """Size in bytes of one sample's KV cache, extrapolated from the prompt's."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt], device=model.device)
    refused = f"--model: a {model.config.model_type} does not use transformers' KV cache"
    with expecting(refused, (AttributeError, ValueError)):  # it needs a cache class of its own
        next_logits(model, ids, torch.ones_like(ids), cache)
    read = sum(map(nbytes, cache.layers))
    need(read, refused)
    return read * (1 + max_new_tokens / len(prompt))


def nbytes(layer) -> int:
    """Total size of the tensors in a layer of a cache, in bytes."""
    if isinstance(layer, Tensor):
        return layer.nbytes
    inside = layer if isinstance(layer, dict) else getattr(layer, "__dict__", {})
    return sum(map(nbytes, inside.values()))


def free_gb(device: torch.device) -> float:
    """GB for KV caches: 80% of a GPU's free memory, else half of all RAM, free or not."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return 0.8 * (free + cached) / 1e9
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # the container's, or "max"
    if limit.exists() and limit.read_text().strip().isdecimal():
        room = min(room, int(limit.read_text()))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
    return 0.5 * room / 1e9 / processes


# ---- log-probabilities ---------------------------------------------------------------------------


def completion_logprobs(
    model,
    rollout: Rollout,
    temperature: float,
    trees: Trees | None = None,
    entropy: str = "gradient",
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each completion token and the entropy there, at a temperature.

    Both are (N, T), float32, 0 outside the mask, and bit-identical with and without gradients.
    trees: the layout, if not one sequence per row. entropy: "gradient", "value" (no gradient, which
    saves time and memory) or "none" (zeros)."""
    mask = rollout.completion_mask
    hidden = hidden_states(model, rollout, trees)
    targets = rollout.completions[mask]
    logprobs, entropies = token_logprobs(model, hidden, targets, temperature, entropy)
    zeros = logprobs.new_zeros(mask.shape)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropies)


def completion_values(critic, rollout: Rollout, trees: Trees | None = None) -> Tensor:
    """The critic's value before each token, (N, T), 0 outside the mask."""
    hidden = hidden_states(critic, rollout, trees).float()
    values = (hidden * critic.value[:-1]).sum(-1) + critic.value[-1]
    mask = rollout.completion_mask
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def hidden_states(model, rollout: Rollout, trees: Trees | None) -> Tensor:
    """For each scored token, the hidden state (tokens, H) that predicts it."""
    if trees is None:
        # padding is on the right, where no token attends to it: no mask, so flash attention can run
        ids, options = padded(rollout.sequences(), model.device), {}
    else:
        ids = trees.ids
        options = {"position_ids": trees.positions, "attention_mask": masks_of(model, trees)}
    hidden = body_of(model)(ids, use_cache=False, **options)[0].flatten(0, 1)
    # as an embedding lookup, whose backward pass adds in a fixed order on every device and is many
    # times faster than that of hidden[...]
    return F.embedding(predicting(rollout, trees), hidden)


def predicting(rollout: Rollout, trees: Trees | None) -> Tensor:
    """For each scored token, (tokens,), the index of the token before it in the flattened input of
    the forward pass."""
    row, t = rollout.completion_mask.nonzero(as_tuple=True)
    position = rollout.prompt_lengths[row] + t - 1
    if trees is not None:
        return trees.nodes[row, position]
    width = (rollout.prompt_lengths + rollout.lengths).max()
    return row * width + position


def token_logprobs(model, hidden, targets, temperature: float, entropy: str) -> Tensor:
    """Return (2, tokens): the log-probs of the targets (tokens,) and the entropies, from hidden
    states (tokens, H). The logits are computed for a chunk of tokens at a time."""
    at_once = LOGITS_AT_ONCE // model.config.get_text_config().vocab_size

    def chunk(hidden, targets):
        logits = logits_of(model, hidden)
        if temperature != 1:  # skip a copy
            logits = logits / temperature
        logp = logits.log_softmax(-1)
        logprobs = logp.gather(1, targets[:, None])[:, 0]
        entropies = torch.zeros_like(logprobs)
        if entropy != "none":
            with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
                entropies = -(logp.exp() * logp).sum(-1)
        return torch.stack([logprobs, entropies])

    *parts, last = zip(hidden.split(at_once), targets.split(at_once))
    # the backward pass recomputes the logits of every chunk but the last, where it starts
    found = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return torch.cat([*found, chunk(*last)], dim=1)


# ---- micro-batches: rows or trees ----------------------------------------------------------------


class MicroBatch(typing.NamedTuple):
    rows: Tensor  # (n,) indices into the rollout, on the CPU
    rollout: Rollout  # these rows
    trees: Trees | None  # None: one sequence per row


def micro_batches(
    rollout: Rollout, rows: Tensor, max_tokens: int, shares: bool
) -> list[MicroBatch]:
    """Split rows of a rollout into micro-batches of at most max_tokens, padding included, or of one
    longer row. shares: use trees where they save enough."""
    lengths = (rollout.prompt_lengths + rollout.lengths).tolist()
    parts, computed, width = [], 0, 0
    for row in sorted(rows.tolist(), key=lambda row: -lengths[row]):
        if not parts or (len(parts[-1]) + 1) * width > max_tokens:
            parts.append([])
            width = lengths[row]  # the first row of a part is its longest
        parts[-1].append(row)
        computed += width
    if shares and parts:
        sequences = in_order(rollout.select(rows).sequences())
        trees, width = grow_evenly(sequences, max_tokens)
        nodes = len(trees) * width
        saves_much = nodes <= WORTHWHILE * computed
        mask_is_small = nodes * width <= MASK_ELEMENTS_PER_SAVED_TOKEN * (computed - nodes)
        at_once = max_tokens // width
        if at_once > 0 and saves_much and mask_is_small:
            several = [trees[i : i + at_once] for i in range(0, len(trees), at_once)]
            return [micro_batch_of_trees(rollout, rows, some) for some in several]
    parts = [torch.tensor(part) for part in parts]
    return [MicroBatch(part, rollout.select(part), trees=None) for part in parts]


def micro_batch_of_trees(rollout: Rollout, rows: Tensor, trees: list) -> MicroBatch:
    """A micro-batch of trees of sequences; sequence i belongs to row rows[i]."""
    rows = rows[sorted(sequence.number for tree in trees for sequence in tree)]
    return MicroBatch(rows, rollout.select(rows), join(trees, rollout.tokens.device))


# ---- the check of a model ------------------------------------------------------------------------


@torch.no_grad()
def check_scorer(model, prompts, pad_id: int) -> bool:
    """Compare the log-probs of the sampler, of rows and of trees with the model's own forward pass.

    Returns whether trees can be used. Raises UserError if the sampler or the rows differ. Prompts
    of two lengths expose padding bugs; completions with a common prefix, sharing bugs. In a mixture
    of experts, one log-prob in ten may differ: near a tie, rounding picks the expert."""
    name = model.config.model_type
    uniforms = torch.rand(len(prompts), 2, 8, generator=torch.Generator().manual_seed(0))
    uniforms[:, 1, :4] = uniforms[:, 0, :4]
    rollout = generate(model, prompts, uniforms, eos_ids=[], pad_id=pad_id)
    sequences = rollout.sequences()
    own = torch.stack([sequence_logprobs(model, each)[-8:] for each in sequences])
    allowed = 0.1 if has_experts(model.config) else 0.0

    def differ(found: Tensor) -> bool:
        gap = (found - own).abs()
        return bool((~(gap < 1e-3)).float().mean() > allowed)  # also for NaN; rounding is 1e-5

    with expecting(f"--model: our scorer cannot run a {name}", (RuntimeError,)):
        by_rows, _ = completion_logprobs(model, rollout, temperature=1.0)
    for who, found in (("sampler", rollout.sampler_logprobs), ("scorer", by_rows)):
        gap = float((found - own).abs().max())
        away = f"log-probs of our {who} differ by up to {gap:.1g} from {name}'s own"
        need(not differ(found), f"--model: {away} forward pass: it cannot be trained here")
    if not shares_prefixes(model):
        return False
    trees = grow(in_order(sequences), width=rollout.tokens.shape[1] + 8)  # more than one tree
    by_trees, _ = completion_logprobs(model, rollout, 1.0, join(trees, model.device))
    return not differ(by_trees)


def sequence_logprobs(model, sequence: list[int]) -> Tensor:
    """Log-probs of all tokens but the first, by the model's own forward pass."""
    ids = torch.tensor([sequence], device=model.device)
    logp = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass
class Flags:
    model: str | None = flag(None, "model folder or Hugging Face hub name, required")
    prompt: str | None = flag(None, "prompt text, required")
    system: str | None = flag(None, "system message for the chat template")
    prompt_template: str = flag("{prompt}", "text around {prompt}; \\n is a line break")
    chat_template_args: str = flag("{}", 'JSON for the chat template: {"enable_thinking": false}')
    stop: list[str] | None = flag(None, "text that ends a completion; may be repeated")
    samples: int = flag(4, "number of completions", low=1)
    max_new_tokens: int = flag(256, "maximum completion length in tokens", low=1)
    temperature: float = flag(1.0, "sampling temperature, 0 for greedy decoding", low=0)
    seed: int = flag(0, "random seed for the samples", low=0)
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "torch device")


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
    rollout = generate(model, [ids], uniforms, temperature=flags.temperature, stops=stops, **ends)
    for completion in rollout.sequences():
        text = completion_text(tokenizer, completion[len(ids) :], ends["eos_ids"])
        print(printable_lines(text))  # a completion may contain escape sequences


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
