"""Read rows from JSONL files, hold some of them out, and turn prompts into tokens."""

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

IDS = "_prompt_ids"  # the field of a row that holds its prompt's token ids


def printable(text: str) -> str:
    """Escape control characters, which a terminal would otherwise interpret."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape control characters except for line breaks."""
    return "\n".join(map(printable, text.split("\n")))


# ---- rows ----------------------------------------------------------------------------------------


def read_rows(path: str, flag: str, check: Callable, field: str = "prompt") -> list[dict]:
    """Read the rows of a JSONL file. Each needs an answer, and text in the given field.

    `check(answer)` raises an error for an answer that can't be used. A prompt may also be a list of
    messages, and its field may be called "question", as in GSM8K."""
    source = f"{flag} {path}".strip()
    with expecting(f"{source}: expected a file"):
        lines = Path(path).read_bytes().split(b"\n")
    expected = f"expected UTF-8 JSONL, one object per line, with {field} and answer"
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with expecting(f"{source}, line {number}: {expected}"):
                rows.append(read_row(line, field))
                check(rows[-1]["answer"])
    need(rows, f"{source}: expected rows, but the file is empty")
    return rows


def read_row(line: bytes, field: str) -> dict:
    """Read one row. Raises UserError if it lacks an answer, or text in the given field."""
    row = json.loads(line, parse_float=number_of)
    if "question" in row:
        row.setdefault("prompt", row["question"])
    need({field, "answer"} <= row.keys(), f"found {', '.join(row)}")
    need("tokens" not in row, "field tokens: rename it; the completion's length takes that name")
    need(row["answer"] is not None, "field answer: found null, expected a string, number or object")
    with expecting("field answer: expected finite numbers"):
        json.dumps(row["answer"], allow_nan=False)  # json.loads accepts NaN at any depth
    text = row[field]
    if field == "prompt" and isinstance(text, list):
        with expecting('field prompt: expected messages like {"role": "user", "content": "text"}'):
            for message in text:
                if isinstance(message["content"], list):  # [{"type": "text", "text": ...}]
                    message["content"] = "".join(part["text"] for part in message["content"])
                (message["role"] + message["content"]).encode()  # raises on lone surrogates
            need(text[-1]["role"] != "assistant", "its last message must not be the assistant's")
        return row
    need(isinstance(text, str), f"field {field}: found {text!r:.80}, expected text")
    need(text.encode().strip() or field != "prompt", f"field {field} contains no text")
    return row


def number_of(digits: str) -> int | float:
    """Read 1e20 and 5.0 as integers, because as floats they would print as 1e+20 and 5.0."""
    number = float(digits)
    return int(Decimal(repr(number))) if number.is_integer() else number


def append_rows(path: Path, rows: list[dict]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_data(config, reward) -> tuple[list[dict], list[dict] | None]:
    """Read the rows of --data and, if it is given, of --eval-data."""
    rows = read_rows(config.data, "--data", reward.check_answer)
    reward.check(rows)
    if not config.eval_data:
        return rows, None
    return rows, read_rows(config.eval_data, "--eval-data", reward.check_answer)


def text_of(prompt: str | list[dict]) -> str:
    """Return a prompt as readable text. In a conversation, each message follows its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def messages_of(prompt: str | list[dict]) -> list[dict]:
    """Return a prompt as a list of messages. A string becomes a single user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def is_held_out(prompt: str) -> bool:
    """Whether to hold out a prompt. Its hash decides, so every run holds out the same tenth."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def hold_out(rows: list[dict], source: str) -> tuple[list[dict], list[dict]]:
    """Split encoded rows into those to train on and those to hold out, about a tenth.

    Many templates strip spaces, so different texts may encode to the same tokens. If one of these
    texts is chosen, all of them are held out."""
    texts = [text_of(row["prompt"]) for row in rows]
    prompts = [tuple(row[IDS]) for row in rows]
    count = len(set(prompts))
    need(count > 1, f"{source}: expected at least two prompts, because one in ten is held out")
    chosen = {prompt for prompt, text in zip(prompts, texts) if is_held_out(text)}
    if len(chosen) in (0, count):  # the hashes may choose none or all of a small file
        chosen = {prompts[texts.index(min(texts))]}
    train = [row for row, prompt in zip(rows, prompts) if prompt not in chosen]
    return train, [row for row, prompt in zip(rows, prompts) if prompt in chosen]


def shuffled_epochs(rows: list[dict], seed: int) -> Iterator[dict]:
    """Yield rows forever, reshuffling them in every epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


# ---- prompts to tokens ---------------------------------------------------------------------------


class PromptFormat:
    """Turns prompts into token ids and knows how long a prompt may be."""

    def __init__(
        self, tokenizer, flags, vocabulary=math.inf, context=math.inf, began: float | None = None
    ):
        """`vocabulary` is the size of the model's embedding. `context` is the longest sequence that
        the model reads, completion included. `began` is when the run began (default: now). A
        template may insert the date, which must not change if the run is resumed on another day."""
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.context = context
        self.system = flags.system
        # shells pass \n as two characters, but leave LaTeX commands such as \neq and \nabla alone
        line_break = r"\\n(?!(?:eq?|eg|abla|u|ot|otin|mid|exists)\b)"
        self.template = re.sub(line_break, "\n", flags.prompt_template)
        with expecting(f"--chat-template-args {flags.chat_template_args}: expected a JSON object"):
            self.template_args = {**json.loads(flags.chat_template_args)}
        if tokenizer.chat_template:
            day = datetime.fromtimestamp(began or time.time())
            self.template_args.setdefault("chat_template", dated(tokenizer, day))
        elif self.system is not None or self.template_args:
            raise UserError("--system, --chat-template-args: the model has no chat template")
        self.longest = context - flags.max_new_tokens  # the most tokens a prompt may have

    def encode(self, row: dict) -> dict:
        """Add the prompt's token ids to a row. Raises UserError for an unreadable prompt."""
        prompt, tokenizer = row["prompt"], self.tokenizer
        shown = f"prompt {text_of(prompt)[:60]!r}"
        if isinstance(prompt, str):
            prompt = self.template.replace("{prompt}", prompt)
        else:
            plain = self.template == "{prompt}"
            need(plain, f"--prompt-template: needs text prompts, but {shown} is a list of messages")
            need(tokenizer.chat_template, f"{shown}: a list of messages needs a chat template")
        if tokenizer.chat_template:
            chat = messages_of(prompt)
            if self.system is not None:  # even an empty one replaces the template's default
                if chat[0]["role"] == "system":
                    raise UserError(f"--system: the {shown} has a system message of its own")
                chat = [{"role": "system", "content": self.system}, *chat]
            flags = "--system, --chat-template-args"
            with expecting(f"{flags}, {shown}: expected values that the chat template accepts"):
                ids = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_dict=False, **self.template_args
                )
        else:
            ids = tokenizer.encode(prompt)

        outside = f"token {max(ids)} of the {shown} is outside its vocabulary of {self.vocabulary}"
        need(max(ids) < self.vocabulary, f"--model: {outside}")
        unknown = tokenizer.unk_token_id
        if unknown in ids and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            characters = sorted(set(text_of(prompt)))
            strange = "".join(c for c in characters if unknown in tokenizer.encode(c))
            raise UserError(f"{shown}: choose another --model to encode the characters {strange!r}")
        return {**row, IDS: ids}

    def encode_problems(self, rows: Iterable[dict]) -> Iterator[dict]:
        """Yield encoded rows, skipping those that leave no room for a completion."""
        return (row for row in map(self.encode, rows) if len(row[IDS]) <= self.longest)

    def encode_rows(self, rows: list[dict], source: str) -> list[dict]:
        """Return a list of encoded rows, and print how many prompts are too long."""
        kept = list(self.encode_problems(rows))
        skipped = len(rows) - len(kept)
        long = f"{skipped} of {len(rows)} prompts have more than {self.longest} tokens, which is"
        sentence = f"{source}: {long} the model's context, {self.context}, minus --max-new-tokens"
        need(kept, sentence)
        if skipped:
            print("skipped:", sentence)
        self.warn_of_special_tokens(kept, source)
        return kept

    def warn_of_special_tokens(self, rows: list[dict], source: str) -> None:
        """Warn about prompts that a template wraps twice, that repeat BOS, or that end with EOS."""
        special = special_tokens(self.tokenizer)
        first = {}  # token -> (what is wrong with it, the first prompt affected)
        for row in rows:
            text, ids = self.template.replace("{prompt}", text_of(row["prompt"])), row[IDS]
            for token in special:
                if token in text and self.tokenizer.decode(ids).count(token) > text.count(token):
                    why = "is already in the prompt, and the template or tokenizer adds it again"
                    first.setdefault(token, (why, text))
            if ids[-1] == self.tokenizer.eos_token_id:
                why = "ends the prompt before the completion (see the tokenizer's add_eos_token)"
                first.setdefault(self.tokenizer.eos_token, (why, text))
        for token, (why, text) in first.items():
            print(f"warning: {source}: {token} {why}; first in '{printable(text[:60])}'")

    def train_and_held_out(self, config, rows, held_out) -> tuple[Iterator[dict], list[dict]]:
        """Return an endless stream of training rows and a list of held-out ones, all encoded."""
        if not config.data:  # a task generates endless rows of both kinds
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
        if len(held_out) > config.eval_prompts:  # sampled, because a file may be sorted
            held_out = random.Random(0).sample(held_out, config.eval_prompts)
        return shuffled_epochs(rows, config.seed), held_out


def dated(tokenizer, day: datetime) -> str:
    """Return the chat template with each strftime_now("%d %b %Y") replaced by the day's date.
    transformers passes only plain data to templates, so the function itself can't be replaced."""
    calls = r"""strftime_now\((["'])(.*?)\1\)"""
    return re.sub(calls, lambda call: repr(day.strftime(call[2])), tokenizer.get_chat_template())


# ---- tokens to text ------------------------------------------------------------------------------


def completion_text(tokenizer, ids: list[int], eos_ids: Collection[int] = ()) -> str:
    """Decode a completion for verifiers and people, without its end, pad and BOS tokens.

    Other special tokens are kept, because <think> and <answer> are often among them."""
    silent = {*eos_ids, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
    return tokenizer.decode([token for token in ids if token not in silent])


def special_tokens(tokenizer) -> list[str]:
    """Return a tokenizer's special tokens, such as <|im_end|>, as text."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
