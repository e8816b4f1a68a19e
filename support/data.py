"""Rows of JSONL files, and how prompts become tokens."""

import itertools
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from support.user import UserError, expecting, need

IDS = "_prompt_ids"  # the field of a row that holds the tokens of its prompt


def printable(text: str) -> str:
    """Return text without control characters, because a terminal would obey them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with its control characters shown by their codes."""
    return "\n".join(map(printable, text.split("\n")))


# ---- rows ----------------------------------------------------------------------------------------


def read_rows(path: str, flag: str, check: Callable, text: str = "prompt") -> list[dict]:
    """Read the rows of a JSONL file. Each has a text, in the field of that name, and an answer,
    which check(answer) may refuse. A prompt is text or messages; "question" is one, as in GSM8K."""
    source = f"{flag} {path}".strip()
    with expecting(f"{source}: expected a file"):
        lines = Path(path).read_bytes().split(b"\n")
    expected = f"expected an object in JSON, UTF-8, with {text} and answer"
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with expecting(f"{source}, line {number}: {expected}"):
                row = read_row(line, text)
                check(row["answer"])
            rows.append(row)
    need(rows, f"{source}: expected rows, and the file is empty")
    return rows


def read_row(line: bytes, field: str) -> dict:
    """Read one row. Raise UserError if it has no text in the field, or no answer."""
    array = line.lstrip().startswith(b"[")
    need(not array, "found a JSON array; expected JSONL, without brackets, an object a line")
    row = json.loads(line)
    if "question" in row:
        row.setdefault("prompt", row["question"])
    need({field, "answer"} <= row.keys(), f"found {', '.join(row)}")
    need("tokens" not in row, "field tokens: expected another name; rewards get the length by it")
    need(row["answer"] is not None, "field answer: found null, expected a text, number or object")
    text = row[field]
    if field == "prompt" and isinstance(text, list):
        with expecting('field prompt: expected messages, {"role": ..., "content": ...} with texts'):
            for message in text:
                (message["role"] + message["content"]).encode()  # half a surrogate pair is no text
            need(text[-1]["role"] != "assistant", "its last message is the assistant's own")
        return row
    need(isinstance(text, str), f"field {field}: found {text!r:.80}, expected text")
    need(text.encode().strip() or field != "prompt", f"field {field}: no text")
    return row


def append_rows(path: Path, rows: list[dict]) -> None:
    with expecting(f"{path}: cannot be written", OSError), open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_data(config, reward) -> tuple[list[dict], list[dict]]:
    """Return the rows of --data to train on, and held-out rows, of --eval-data or of the same."""
    rows = read_rows(config.data, "--data", reward.check_answer)
    reward.check(rows)
    if config.eval_data:
        held_out = read_rows(config.eval_data, "--eval-data", reward.check_answer)
    else:
        rows, held_out = hold_out(rows, f"--data {config.data}")
    if len(held_out) > config.eval_prompts:  # not the first: a file may be sorted
        held_out = random.Random(0).sample(held_out, config.eval_prompts)
    return rows, held_out


def text_of(prompt: str | list[dict]) -> str:
    """Return a prompt as people read it. Each message of a conversation follows its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def messages_of(prompt: str | list[dict]) -> list[dict]:
    """Return a prompt as a list of messages. A text becomes one message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def is_held_out(prompt: str) -> bool:
    """Return True for one prompt in ten, by its hash: the same in every run, in any order."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def hold_out(rows: list[dict], source: str) -> tuple[list[dict], list[dict]]:
    """Return (rows to train on, held-out rows). All rows with one prompt are on the same side."""
    texts = [text_of(row["prompt"]) for row in rows]
    different = sorted(set(texts))
    need(len(different) > 1, f"{source}: expected two prompts, as one in ten is held out")
    chosen = set(filter(is_held_out, different))
    if len(chosen) in (0, len(different)):  # a small file
        chosen = {different[0]}
    train = [row for row, text in zip(rows, texts) if text not in chosen]
    return train, [row for row, text in zip(rows, texts) if text in chosen]


def shuffled_epochs(rows: list[dict], seed: int) -> Iterator[dict]:
    """Yield the rows forever, each epoch in its own random order."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


# ---- prompts to tokens ---------------------------------------------------------------------------


class PromptFormat:
    """Turns prompts into token ids, and knows how many fit."""

    def __init__(self, tokenizer, flags, vocabulary=math.inf, context=math.inf):
        """flags has system, prompt_template, chat_template_args and max_new_tokens. vocabulary is
        how many tokens the model embeds, context how many it reads, prompt and completion."""
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.context = context
        self.system = flags.system
        # a shell passes \n as two characters, and a line break is meant, but in LaTeX: \neq, \nabla
        line_break = r"\\n(?!(?:eq?|eg|abla|u|ot|otin|mid|exists)\b)"
        self.template = re.sub(line_break, "\n", flags.prompt_template)
        with expecting(f"--chat-template-args {flags.chat_template_args}: expected a JSON object"):
            self.template_args = {**json.loads(flags.chat_template_args)}
        if not tokenizer.chat_template and (self.system is not None or self.template_args):
            raise UserError("--system, --chat-template-args: the model has no chat template")
        limit = flags.max_new_tokens
        need(limit < context, f"--max-new-tokens {limit}: the model's context is {context} tokens")
        self.longest = context - limit  # of a prompt

    def encode(self, row: dict) -> dict:
        """Add the tokens of a row's prompt as IDS. Raise UserError if the model cannot read it."""
        prompt, tokenizer = row["prompt"], self.tokenizer
        shown = f"prompt {text_of(prompt)[:60]!r}"
        if isinstance(prompt, str):
            prompt = self.template.replace("{prompt}", prompt)
        else:
            if self.template != "{prompt}":
                raise UserError(f"--prompt-template: expected texts; {shown} is a list of messages")
            need(tokenizer.chat_template, f"{shown} is a list of messages: no chat template for it")
        if tokenizer.chat_template:
            chat = messages_of(prompt)
            if self.system is not None:  # an empty one replaces the template's default
                has_one = chat[0]["role"] == "system"
                need(not has_one, f"--system: the {shown} has a system message of its own")
                chat = [{"role": "system", "content": self.system}, *chat]
            flags = "--system, --chat-template-args"
            with expecting(f"{flags}, {shown}: expected values that the template takes"):
                ids = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_dict=False, **self.template_args
                )
        else:
            ids = tokenizer.encode(prompt)

        beyond = f"its tokenizer makes token {max(ids)} of the {shown}, it embeds {self.vocabulary}"
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

    def training_problems(self, config, rows: Iterable[dict]) -> Iterator[dict]:
        """Yield encoded rows without end: those of a file in shuffled epochs, or a task's."""
        if config.data:
            return shuffled_epochs(self.encode_rows(rows, f"--data {config.data}"), config.seed)
        return self.encode_problems(rows)

    def encode_rows(self, rows: list[dict], source: str) -> list[dict]:
        """Return the encoded rows of a file as a list, and print how many are too long."""
        kept = list(self.encode_problems(rows))
        skipped = len(rows) - len(kept)
        room = f"{self.longest} tokens, the model's context of {self.context} less --max-new-tokens"
        sentence = f"{source}: {skipped} of {len(rows)} prompts have more than {room}"
        need(kept, sentence)
        if skipped:
            print("skipped:", sentence)
        return kept
