"""Models whose layers remember more than keys and values: state spaces, linear attention, hybrids.

transformers' own `generate` samples them, with whatever cache they have; each token is drawn by us,
so that completions depend on the page's uniforms alone and log-probs are of what was drawn."""

from collections.abc import Iterator

import torch
import transformers
from torch import Tensor

from rollout import Page, sample

ROWS_AT_ONCE = 128


class OurDraw(transformers.LogitsProcessor):
    """Draws as `sample` does, and leaves `generate` one token to take."""

    def __init__(self, page: Page, rows: list[int], temperature: float):
        self.page, self.rows, self.temperature = page, rows, temperature
        self.step = 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        uniforms = self.page.uniforms[self.rows, self.step]
        chosen, logprobs = sample(logits, uniforms[:, None], self.temperature)
        self.page.tokens[self.rows, self.step] = chosen
        self.page.logprobs[self.rows, self.step] = logprobs
        self.step += 1
        return torch.full_like(logits, -torch.inf).scatter(1, chosen[:, None], 0.0)


def fill(page: Page, model, eos_ids: list[int], pad_id: int, temperature: float):
    """Samples every row of the page."""
    before = model.generation_config
    # without the penalties, filters and lengths that the model's own configuration asks for
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=eos_ids or None, pad_token_id=pad_id
    )
    for rows in alike(page.prompts):
        ids = torch.tensor([page.prompts[row] for row in rows], device=model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=page.max_new_tokens,
            logits_processor=[OurDraw(page, rows, temperature)],
        )
    model.generation_config = before


def alike(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Rows whose prompts have one length, some at a time: a state must not read padding."""
    by_length = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    # the shortest first: Recurrent Gemma takes a prompt of one token for more of the text before
    for _, rows in sorted(by_length.items()):
        for first in range(0, len(rows), ROWS_AT_ONCE):
            yield rows[first : first + ROWS_AT_ONCE]
