"""A sampler of the user's own, with the signature of rollout.generate: --sampler FILE:FUNCTION."""

from collections.abc import Callable

import torch

from rollout import Rollout
from support.user import need


def checked(sampler: Callable) -> Callable:
    """Return a user's sampler with checks: UserError for a result that no run may learn from."""

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
