"""Tools that answer in the middle of a completion, which is then sampled in turns.

    --tool calculator                    answers <calc>12*34</calc> with =408
    --tool my_tool.py:reply@</count>     calls reply(text) after a completion has written </count>

The tool's reply is appended, and the policy continues. `completion_mask` excludes the tokens of the
reply, because they aren't actions of the policy."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout import Rollout
from support.data import completion_text
from support.errors import expecting, need, reason
from support.models import context_of
from support.tasks import whole_value
from support.user_code import function_of


class Tool(NamedTuple):
    """A function that replies to completions while they are sampled."""

    function: Callable[[str], str | None]  # completion so far -> reply, or None
    after: str  # trigger text: the function is called once a completion has written it


def calculate(completion: str) -> str:
    """Return `=408` for `<calc>12*34</calc>`, or `=?` if it isn't an operation on short numbers."""
    call = completion.rpartition("<calc>")[2].partition("</calc>")[0]
    is_operation = re.fullmatch("[0-9]{1,9}[-+*][0-9]{1,9}", call)
    return f"={whole_value(call)}" if is_operation else "=?"


TOOLS = {"calculator": Tool(calculate, after="</calc>")}


def parse_tool(place: str) -> Tool:
    """Read `--tool`: a name in TOOLS, or file.py:function@TEXT."""
    if place in TOOLS:
        return TOOLS[place]
    where, _, after = place.partition("@")
    expected = f"expected file.py:function@TEXT, called after TEXT, or one of {', '.join(TOOLS)}"
    with expecting(f"--tool {place}: {expected}"):
        need(after, "it is neither")
        return Tool(function_of(where), after)


def first_stop(stops: Callable | None, ids: list[int], start: int) -> int | None:
    """Return the first length > start at which a stop string ends, whatever turn it began in."""
    if stops is None:
        return None
    beginnings = [torch.tensor(ids[:end]) for end in range(start + 1, len(ids) + 1)]
    no_token = 2**31 - 1  # padding in which no stop string is found
    ends = stops(pad_sequence(beginnings, True, no_token, padding_side="left")).nonzero()
    return start + 1 + int(ends[0]) if len(ends) else None


class Turns:
    """Wrap `generate` to add a tool: stop where it may have been asked, append its reply, go on."""

    def __init__(self, generate: Callable, tool: Tool, tokenizer):
        self.generate = generate
        self.tool = tool
        self.tokenizer = tokenizer
        self.faults: list[str] = []  # why the tool failed on each of the last completions, or ""
        ends = tuple(tool.after[start:] for start in range(len(tool.after)))
        self.asking = []  # tokens that contain the trigger text, or start with a suffix of it
        for token in range(len(tokenizer)):
            text = self.read([token])
            if tool.after in text or text.startswith(ends):
                self.asking.append(token)
        need(self.asking, f"--tool: no token of this tokenizer can complete {tool.after!r}")

    def read(self, ids: list[int]) -> str:
        return completion_text(self.tokenizer, ids)

    def __call__(
        self, model, prompts, uniforms: Tensor, *, eos_ids, pad_id, stops=None, **options
    ) -> Rollout:
        """Sample with replies. Each position keeps its own uniform, so turns change no token."""
        options |= {"eos_ids": sorted({*eos_ids, *self.asking}), "pad_id": pad_id, "stops": stops}
        prompts = [prompt for prompt, group in zip(prompts, uniforms) for _ in group]
        uniforms = uniforms.flatten(0, 1)  # (N, T)
        limit = uniforms.shape[1]
        tokens = torch.zeros(uniforms.shape, dtype=torch.long)
        mask = tokens.bool()  # tokens of the policy
        logprobs = tokens.float()  # 0 for tokens of the tool
        lengths = [0] * len(prompts)
        ended = [False] * len(prompts)  # by a token of the policy
        self.faults = [""] * len(prompts)

        rows = range(len(prompts))  # unfinished completions
        while rows:
            texts = [prompts[row] + tokens[row, : lengths[row]].tolist() for row in rows]
            width = context_of(model.config) - max(map(len, texts))
            rest = [uniforms[row, lengths[row] :][:width] for row in rows]
            rest = pad_sequence(rest, batch_first=True)  # the padding is never used
            turn = self.generate(model, texts, rest[:, None], **options).to("cpu")
            for i, row in enumerate(rows):
                start = lengths[row]
                count = min(int(turn.lengths[i]), limit - start)
                tokens[row, start : start + count] = turn.completions[i, :count]
                ids = tokens[row, : start + count].tolist()
                stop = first_stop(stops, ids, start)
                ids = ids[:stop]
                end = len(ids)
                logprobs[row, start:end] = turn.sampler_logprobs[i, : end - start]
                mask[row, start:end] = True
                ended[row] = ids[-1] in eos_ids or stop is not None
                if end < limit and not ended[row] and self.is_asked(ids):
                    reply = self.reply(row, self.read(ids))[: limit - end]
                    tokens[row, end : end + len(reply)] = torch.tensor(reply, dtype=torch.long)
                    end += len(reply)
                lengths[row] = end
            rows = [row for row in rows if lengths[row] < limit and not ended[row]]
        lengths = torch.tensor(lengths)
        samples = Rollout.of(prompts, tokens, logprobs, lengths, torch.tensor(ended), pad_id)
        return samples._replace(completion_mask=mask[:, : lengths.max()]).to(model.device)

    def is_asked(self, ids: list[int]) -> bool:
        """Return whether the last token completes the trigger text."""
        after = self.tool.after
        return self.read(ids).count(after) > self.read(ids[:-1]).count(after)

    def reply(self, row: int, text: str) -> list[int]:
        """Return the tool's reply as tokens of plain text, without control tokens."""
        try:
            said = self.tool.function(text)
            if said is None:
                return []
            plain = {"add_special_tokens": False, "split_special_tokens": True}
            return self.tokenizer.encode(said, **plain)
        except (Exception, SystemExit) as error:  # a user's function may do anything
            self.faults[row] = f"--tool: {reason(error)} on {text!r:.80}"
            return []

    def abstain(self, verdicts: list, ranks) -> list:
        """Return the verdicts on the latest completions, with abstentions where the tool failed: a
        reward could teach the policy to make it fail."""
        faults = [fault for faults in ranks.gather(self.faults) for fault in faults]
        for i, verdict in enumerate(verdicts):
            if faults[i]:
                completion, row, terms = verdict.completion, verdict.row, verdict.terms
                verdicts[i] = verdict.abstention(completion, row, terms, faults[i])
        return verdicts

    def measure(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return the mean number of replies per completion."""
        mask, lengths = rollout.completion_mask, rollout.lengths
        places = torch.arange(mask.shape[1], device=mask.device)
        replies = (places < lengths[:, None]) & ~mask
        begins = replies[:, 1:] & ~replies[:, :-1]  # the first token is always the policy's
        return {"tool_calls": begins.sum() / len(mask)}
