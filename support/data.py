"""Rows of JSONL files, and how prompts become tokens."""

import itertools
import json
import math
import random
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from support.errors import UserError, expecting, need

IDS = "_prompt_ids"  # the field of a row that holds the tokens of its prompt


def printable(text: str) -> str:
    """Escape control characters, which a terminal would act on."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape the control characters of a text, except for its line breaks."""
    return "\n".join(map(printable, text.split("\n")))


# ---- rows ----------------------------------------------------------------------------------------


def read_rows(path: str, flag: str, check: Callable, text: str = "prompt") -> list[dict]:
    """Read the rows of a JSONL file. Each has an answer and a string in the field that text names.

    check(answer) may refuse an answer. A prompt is a string or a list of messages; "question" is
    accepted in its place, as in GSM8K."""
    source = f"{flag} {path}".strip()
    with expecting(f"{source}: expected a file"):
        lines = Path(path).read_bytes().split(b"\n")
    expected = f"expected UTF-8 JSONL, one object per line, with {text} and answer"
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with expecting(f"{source}, line {number}: {expected}"):
                row = read_row(line, text)
                check(row["answer"])
            rows.append(row)
    need(rows, f"{source}: expected rows, but the file is empty")
    return rows


def read_row(line: bytes, field: str) -> dict:
    """Read one row. Raises UserError if it has no answer, or no text in the field."""
    row = json.loads(line, parse_float=number_of)
    if "question" in row:
        row.setdefault("prompt", row["question"])
    need({field, "answer"} <= row.keys(), f"found {', '.join(row)}")
    need("tokens" not in row, "field tokens: rename it; to rewards it is the completion's length")
    need(row["answer"] is not None, "field answer: found null, expected text, number or object")
    with expecting("field answer: expected finite numbers"):
        json.dumps(row["answer"], allow_nan=False)  # Python's parser takes NaN, at any depth
    text = row[field]
    if field == "prompt" and isinstance(text, list):
        with expecting('field prompt: expected messages, {"role": ..., "content": ...} with texts'):
            for message in text:
                if isinstance(message["content"], list):  # [{"type": "text", "text": ...}]
                    message["content"] = "".join(part["text"] for part in message["content"])
                (message["role"] + message["content"]).encode()  # refuses lone surrogates
            need(text[-1]["role"] != "assistant", "its last message is the assistant's own")
        return row
    need(isinstance(text, str), f"field {field}: found {text!r:.80}, expected text")
    need(text.encode().strip() or field != "prompt", f"field {field}: no text")
    return row


def number_of(digits: str) -> int | float:
    """Read 1e20 and 5.0 as integers: floats would print as 1e+20 and 5.0."""
    number = float(digits)
    return int(Decimal(repr(number))) if number.is_integer() else number


def append_rows(path: Path, rows: list[dict]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_data(config, reward) -> tuple[list[dict], list[dict] | None]:
    """Read the rows of --data and those of --eval-data, if it is given."""
    rows = read_rows(config.data, "--data", reward.check_answer)
    reward.check(rows)
    if not config.eval_data:
        return rows, None
    return rows, read_rows(config.eval_data, "--eval-data", reward.check_answer)


def text_of(prompt: str | list[dict]) -> str:
    """Return a prompt as people read it: each message of a conversation after its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def messages_of(prompt: str | list[dict]) -> list[dict]:
    """Return a prompt as a list of messages. A string becomes one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def is_held_out(prompt: str) -> bool:
    """Choose one prompt in ten by its hash: the same ones in every run, in any order."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def hold_out(rows: list[dict], source: str) -> tuple[list[dict], list[dict]]:
    """Split encoded rows into those to train on and those held out, a tenth of the prompts.

    Different texts may encode to the same tokens, because many templates strip spaces. Such prompts
    are all held out if one of them is chosen."""
    texts = [text_of(row["prompt"]) for row in rows]
    prompts = [tuple(row[IDS]) for row in rows]
    count = len(set(prompts))
    need(count > 1, f"{source}: expected at least two prompts: one in ten is held out")
    chosen = {prompt for prompt, text in zip(prompts, texts) if is_held_out(text)}
    if len(chosen) in (0, count):  # a small file
        chosen = {prompts[texts.index(min(texts))]}
    train = [row for row, prompt in zip(rows, prompts) if prompt not in chosen]
    return train, [row for row, prompt in zip(rows, prompts) if prompt in chosen]


def shuffled_epochs(rows: list[dict], seed: int) -> Iterator[dict]:
    """Yield the rows forever, reshuffled in every epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


# ---- prompts to tokens ---------------------------------------------------------------------------


class PromptFormat:
    """Turns prompts into token ids, and knows how many tokens fit."""

    def __init__(
        self, tokenizer, flags, vocabulary=math.inf, context=math.inf, began: float | None = None
    ):
        """vocabulary: size of the model's embedding. context: longest sequence that it reads, with
        the completion. began: when the run began (default: now). Templates may write the date, and
        a run resumed on another day must not train on different prompts."""
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.context = context
        self.system = flags.system
        # a shell passes \n as two characters; don't break LaTeX commands such as \neq and \nabla
        line_break = r"\\n(?!(?:eq?|eg|abla|u|ot|otin|mid|exists)\b)"
        self.template = re.sub(line_break, "\n", flags.prompt_template)
        with expecting(f"--chat-template-args {flags.chat_template_args}: expected a JSON object"):
            self.template_args = {**json.loads(flags.chat_template_args)}
        if not tokenizer.chat_template and (self.system is not None or self.template_args):
            raise UserError("--system, --chat-template-args: the model has no chat template")
        if tokenizer.chat_template:
            day = datetime.fromtimestamp(began or time.time())
            self.template_args.setdefault("chat_template", dated(tokenizer, day))
        self.longest = context - flags.max_new_tokens  # of a prompt

    def encode(self, row: dict) -> dict:
        """Add the tokens of a row's prompt as IDS. Raises UserError if the model can't read it."""
        prompt, tokenizer = row["prompt"], self.tokenizer
        shown = f"prompt {text_of(prompt)[:60]!r}"
        if isinstance(prompt, str):
            prompt = self.template.replace("{prompt}", prompt)
        else:
            if self.template != "{prompt}":
                raise UserError(f"--prompt-template: expected texts; {shown} is a list of messages")
            need(tokenizer.chat_template, f"{shown}: a list of messages needs a chat template")
        if tokenizer.chat_template:
            chat = messages_of(prompt)
            if self.system is not None:  # an empty one replaces the template's default
                has_one = chat[0]["role"] == "system"
                need(not has_one, f"--system: the {shown} has a system message of its own")
                chat = [{"role": "system", "content": self.system}, *chat]
            flags = "--system, --chat-template-args"
            with expecting(f"{flags}, {shown}: expected values that the template accepts"):
                ids = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_dict=False, **self.template_args
                )
        else:
            ids = tokenizer.encode(prompt)

        beyond = f"token {max(ids)} of the {shown} is beyond the {self.vocabulary} that it embeds"
        need(max(ids) < self.vocabulary, f"--model: {beyond}")
        unknown = tokenizer.unk_token_id
        if unknown in ids and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            letters = sorted(set(text_of(prompt)))
            strange = "".join(c for c in letters if unknown in tokenizer.encode(c))
            raise UserError(f"{shown}: expected another --model for the characters {strange!r}")
        return {**row, IDS: ids}

    def encode_problems(self, rows: Iterable[dict]) -> Iterator[dict]:
        """Yield encoded rows, without those that leave no room for a completion."""
        return (row for row in map(self.encode, rows) if len(row[IDS]) <= self.longest)

    def encode_rows(self, rows: list[dict], source: str) -> list[dict]:
        """Return encoded rows as a list. Prints how many are too long."""
        kept = list(self.encode_problems(rows))
        skipped = len(rows) - len(kept)
        room = f"{self.longest} tokens, the model's context, {self.context}, minus --max-new-tokens"
        sentence = f"{source}: {skipped} of {len(rows)} prompts have more than {room}"
        need(kept, sentence)
        if skipped:
            print("skipped:", sentence)
        self.warn_of_special_tokens(kept, source)
        return kept

    def warn_of_special_tokens(self, rows: list[dict], source: str) -> None:
        """Warn of prompts wrapped in a template twice, with two BOS tokens, or already ended."""
        special = special_tokens(self.tokenizer)
        first = {}  # token -> what is wrong with it, and the first such prompt
        for row in rows:
            text, ids = self.template.replace("{prompt}", text_of(row["prompt"])), row[IDS]
            for token in special:
                if token in text and self.tokenizer.decode(ids).count(token) > text.count(token):
                    why = "is already in the prompt, and the template or tokenizer adds it again"
                    first.setdefault(token, (why, text))
            if ids[-1] == self.tokenizer.eos_token_id:
                why = "ends the prompt before the completion: see add_eos_token of --model"
                first.setdefault(self.tokenizer.eos_token, (why, text))
        for token, (why, text) in first.items():
            print(f"warning: {source}: {token} {why}; first in '{printable(text[:60])}'")

    def train_and_held_out(self, config, rows, held_out) -> tuple[Iterator[dict], list[dict]]:
        """Return an endless stream of training problems, and the held-out ones, all encoded."""
        if not config.data:  # a task generates both endlessly
            held_out = list(itertools.islice(held_out, config.eval_prompts))
            return self.encode_problems(rows), self.encode_rows(held_out, f"--task {config.task}")
        rows = self.encode_rows(rows, f"--data {config.data}")
        if config.eval_data:
            held_out = self.encode_rows(held_out, f"--eval-data {config.eval_data}")
            trained = {tuple(row[IDS]) for row in rows}
            known = sum(tuple(row[IDS]) in trained for row in held_out)
            if known > 0:
                share = f"{known} of {len(held_out)} prompts"
                print(f"warning: --eval-data: {share} are also in --data")
        else:
            rows, held_out = hold_out(rows, f"--data {config.data}")
        if len(held_out) > config.eval_prompts:  # not the first: a file may be sorted
            held_out = random.Random(0).sample(held_out, config.eval_prompts)
        return shuffled_epochs(rows, config.seed), held_out


def dated(tokenizer, day: datetime) -> str:
    """Return the chat template with the dates that it writes, strftime_now("%d %b %Y"), filled in.
    transformers passes a template only plain data, so this function cannot be replaced."""
    calls = r"""strftime_now\((["'])(.*?)\1\)"""
    return re.sub(calls, lambda call: repr(day.strftime(call[2])), tokenizer.get_chat_template())


# ---- tokens to text ------------------------------------------------------------------------------


def completion_text(tokenizer, ids: list[int], eos_ids: Collection[int] = ()) -> str:
    """Decode a completion as verifiers and people read it, without end, pad and BOS tokens.

    Other special tokens stay: many tokenizers have <think> and <answer> among them."""
    silent = {*eos_ids, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
    return tokenizer.decode([token for token in ids if token not in silent])


def special_tokens(tokenizer) -> list[str]:
    """Return the tokens that structure a text, such as <|im_end|>."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
