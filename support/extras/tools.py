"""A tool that answers in the middle of a completion. The completion is sampled in turns.

    --tool calculator                    answers <calc>12*34</calc> with =408
    --tool my_tool.py:reply@</count>     calls reply(text) once a completion has written </count>

The tool's reply is appended, and the policy continues. The tokens of the reply are no actions of
the policy: `completion_mask` excludes them from ratios, KL, entropy and gradients."""

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout import Rollout
from support.models import context_of
from support.tasks import whole_value
from support.user import expecting, function_of, need, reason


class Tool(NamedTuple):
    """A function that replies to completions while they are sampled."""

    function: Callable[[str], str | None]  # completion so far -> reply, or None
    after: str  # the trigger text: it is called when a completion has just written this


def calculate(completion: str) -> str:
    """Return `=408` for `<calc>12*34</calc>`, or `=?` for other calls.

    A call is two short numbers with + - or * between them. A completion may hold anything."""
    call = completion.rpartition("<calc>")[2].partition("</calc>")[0]
    is_operation = re.fullmatch("[0-9]{1,9}[-+*][0-9]{1,9}", call)
    return f"={whole_value(call)}" if is_operation else "=?"


TOOLS = {"calculator": Tool(calculate, after="</calc>")}
LONGEST_REPLY = 100_000  # characters: to tokenise more takes time


def parse_tool(place: str) -> Tool:
    """Read `--tool`: a name of TOOLS, or file.py:function@TEXT, called after TEXT."""
    if place in TOOLS:
        return TOOLS[place]
    where, _, after = place.partition("@")
    expected = f"expected file.py:function@TEXT, called after TEXT, or one of {', '.join(TOOLS)}"
    with expecting(f"--tool {place}: {expected}"):
        need(":" in where and after, "it is neither")
        return Tool(function_of(where), after)


@dataclasses.dataclass
class Completion:
    """A completion that is being sampled."""

    prompt: list[int]
    uniforms: Tensor  # one for each token that there is room for
    tokens: list[int] = dataclasses.field(default_factory=list)
    own: list[bool] = dataclasses.field(default_factory=list)  # which tokens the policy wrote
    logprobs: list[float] = dataclasses.field(default_factory=list)  # 0 for tokens of the tool
    ended: bool = False  # by an end token of the policy

    def write(self, tokens: list[int], logprobs: list[float], own: bool):
        """Append as many tokens as there is room for."""
        room = len(self.uniforms)
        self.tokens += tokens[:room]
        self.logprobs += logprobs[:room]
        self.own += [own] * len(tokens[:room])
        self.uniforms = self.uniforms[len(tokens) :]

    def rollout(self) -> Rollout:
        row = {
            "tokens": self.prompt + self.tokens,
            "prompt_lengths": len(self.prompt),
            "lengths": len(self.tokens),
            "completion_mask": self.own,
            "sampler_logprobs": self.logprobs,
            "truncated": not self.ended,
        }
        return Rollout(**{name: torch.tensor([value]) for name, value in row.items()})


class Turns:
    """Replace rollout.generate by one with a tool.

    `generate` also stops at tokens that may complete the trigger text. It is called again with the
    replies until all completions have ended."""

    def __init__(self, generate: Callable, tool: Tool, tokenizer):
        self.generate, self.tool, self.tokenizer = generate, tool, tokenizer
        self.faults, self.fault = 0, ""  # how often the tool failed, and the first error
        self.asking = [token for token in range(len(tokenizer)) if self.may_ask(token)]
        need(self.asking, f"--tool: no token of this tokenizer can complete {tool.after!r}")

    def may_ask(self, token: int) -> bool:
        """Return whether a token contains the trigger text, or starts with an end of it.

        A token with a part of a character reads as U+FFFD."""
        text, after = self.read([token]), self.tool.after
        ends = tuple(after[start:] for start in range(len(after)))
        part = "\ufffd" in text and not after.isascii()
        return part or after in text or text.startswith(ends)

    def read(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def __call__(
        self, model, prompts, uniforms: Tensor, *, eos_ids, pad_id, stops=None, **options
    ) -> Rollout:
        """Sample completions with replies. Turns change no token: a row's uniforms decide alone."""
        options |= {"eos_ids": sorted({*eos_ids, *self.asking}), "pad_id": pad_id, "stops": stops}
        completions = []
        for prompt, group in zip(prompts, uniforms):
            completions += [Completion(prompt, row) for row in group]

        under_way = completions
        while under_way:
            texts = [each.prompt + each.tokens for each in under_way]
            width = context_of(model.config) - max(map(len, texts))
            rest = [each.uniforms[:width] for each in under_way]
            rest = pad_sequence(rest, batch_first=True)  # the padding is never used
            turn = self.generate(model, texts, rest[:, None], **options)
            self.take(under_way, turn, eos_ids, stops)
            under_way = [each for each in under_way if len(each.uniforms) and not each.ended]
        written = [each.rollout() for each in completions]
        return Rollout.cat(written, pad_id).to(model.device)

    def take(self, completions: list[Completion], turn: Rollout, eos_ids: list[int], stops):
        """Append the tokens of a turn, and the tool's replies."""
        rows = zip(turn.completions.tolist(), turn.sampler_logprobs.tolist(), turn.lengths.tolist())
        for each, (tokens, logprobs, length) in zip(completions, rows):
            each.write(tokens[:length], logprobs[:length], own=True)
            each.ended = each.tokens[-1] in eos_ids
            if stops is not None:
                each.ended |= bool(stops(torch.tensor([each.tokens])))
            if len(each.uniforms) and not each.ended and self.is_asked(each.tokens):
                reply = self.reply(self.read(each.tokens))
                each.write(reply, [0.0] * len(reply), own=False)

    def is_asked(self, ids: list[int]) -> bool:
        """Return whether the last token completes the trigger text."""
        after = self.tool.after
        return self.read(ids).count(after) > self.read(ids[:-1]).count(after)

    def reply(self, text: str) -> list[int]:
        """Return the tokens of the tool's reply, as plain text without control tokens."""
        try:
            said = self.tool.function(text)
            if said is None:
                return []
            need(isinstance(said, str), f"it returned {said!r:.80}, which is no text")
            plain = {"add_special_tokens": False, "split_special_tokens": True}
            return self.tokenizer.encode(said[:LONGEST_REPLY], **plain)
        except (Exception, SystemExit) as error:  # a user's function may do anything
            self.faults += 1
            self.fault = self.fault or f"{reason(error)} on {text!r:.80}"
            return []

    def measure(self, run, samples: Rollout) -> dict[str, float | Tensor]:
        """Return replies per completion, the share of the tool's tokens, and new failures."""
        if self.fault:
            run.warn("tool", f"the tool failed and gave no reply: {self.fault}")
        failed = run.ranks.sum_numbers({"tool_faults": self.faults})
        self.faults = 0
        own, lengths = samples.completion_mask, samples.lengths
        steps = torch.arange(own.shape[1], device=own.device)
        written = (steps < lengths[:, None]) & ~own
        begins = written[:, 1:] & ~written[:, :-1]  # the first token is always the policy's
        return {
            "tool_calls": begins.sum() / len(written),
            "tool_tokens": written.sum() / lengths.sum(),
            **failed,
        }
