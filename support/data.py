"""Mistakes of the user, rows of data, and how prompts become tokens."""

import contextlib
import dataclasses
import difflib
import itertools
import json
import random
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# ---------------------------------------------------------------------- mistakes of the user


class UserError(ValueError):
    """A mistake of the user's, in one sentence: the scripts print it and exit with status 2."""


def need(condition: object, message: str) -> None:
    """Raises UserError with the message where the condition is false."""
    if not condition:
        raise UserError(message)


def reason(error: BaseException) -> str:
    """A line that says what went wrong."""
    text = f"{type(error).__name__}: {error}".removeprefix("UserError: ")
    return f"{text.splitlines()[0]:.300}"


@contextlib.contextmanager
def expecting(what: str) -> Iterator[None]:
    """Whatever goes wrong within is a UserError: what was expected, and a line of why it is not."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {reason(error)}") from error


def printable(text: str) -> str:
    """Text without control characters: a terminal would obey those of a completion."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What a sentence about an unknown word may end with."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def read_rows(
    path: str, flag: str, check: Callable[[object], None], text: str = "prompt"
) -> list[dict]:
    """Rows of a JSONL file, each a text ("question", as in GSM8K, is a prompt) and an answer. A
    prompt may be a conversation, too: a list of messages."""
    source = f"{flag} {path}".strip()
    with expecting(f"{source}: expected a file"):
        lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with expecting(
                f"{source}, line {number}: expected JSON, UTF-8, with {text} and answer"
            ):
                rows.append(read_row(line, text))
                check(rows[-1]["answer"])
    need(rows, f"{source}: expected rows, and the file is empty")
    return rows


def read_row(line: bytes, text: str) -> dict:
    """One row; UserError where it has no text or no answer."""
    is_array = line.lstrip()[:1] == b"["
    need(not is_array, "it is a JSON array: write an object a line (jq -c '.[]' FILE)")
    row = json.loads(line)
    need(isinstance(row, dict), f"found {row!r:.80}, which is no object")
    if "question" in row:
        row = {"prompt": row["question"]} | row
    need({text, "answer"} <= row.keys(), f"found {', '.join(row) or 'none'}")
    if text == "prompt" and isinstance(row[text], list):
        check_conversation(row[text])
        return row
    is_text = isinstance(row[text], str)
    need(is_text, f"field {text}: found {row[text]!r:.80}, expected text")
    need(row[text].encode().strip() or text != "prompt", f"field {text}: no text")
    return row


def check_conversation(messages: list) -> None:
    """UserError for a prompt of messages that no model could answer."""
    kind = 'expected messages, {"role": ..., "content": ...} with texts'
    need(messages, f"field prompt: {kind}, found none")
    for message in messages:
        is_one = isinstance(message, dict) and all(
            isinstance(message.get(field), str) for field in ("role", "content")
        )
        need(is_one, f"field prompt: {kind}, found {message!r:.80}")
        message["content"].encode()  # raises for half a surrogate pair, which no tokenizer takes
    need(
        messages[-1]["role"] != "assistant",
        "field prompt: its last message is the assistant's, expected one that asks for an answer",
    )


def text_of(prompt: str | list[dict]) -> str:
    """A prompt as people read it: of a conversation each message, after its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def messages_of(prompt: str | list[dict]) -> list[dict]:
    """A prompt as a conversation: a text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


def is_held_out(prompt: str) -> bool:
    """One prompt in ten, by its hash: the same in every run, wherever it stands."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def hold_out(rows: list[dict], source: str) -> tuple[list[dict], list[dict]]:
    """(rows to train on, held-out rows): one prompt in ten, by its hash, wherever it stands."""
    prompts = [text_of(row["prompt"]) for row in rows]
    different = sorted(set(prompts))
    need(len(different) > 1, f"{source}: expected two prompts, as one in ten is held out")
    held_out = {prompt for prompt in different if is_held_out(prompt)}
    if not held_out or len(held_out) == len(different):  # a small file
        held_out = {different[0]}
    return (
        [row for row, prompt in zip(rows, prompts) if prompt not in held_out],
        [row for row, prompt in zip(rows, prompts) if prompt in held_out],
    )


def shuffled_epochs(rows: list[dict], seed: int) -> Iterator[dict]:
    """The rows without end, each epoch in an order of its own."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}").sample(rows, len(rows))


@dataclasses.dataclass
class PromptFormat:
    """How the text of a prompt becomes token ids."""

    tokenizer: typing.Any  # of transformers
    flags: typing.Any  # with system, chat_template_args (JSON) and prompt_template

    def encode(self, row: dict) -> dict:
        """The row with "ids", the tokens of its prompt, in the tokenizer's chat template if any."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            prompt = self.flags.prompt_template.replace("{prompt}", prompt)
        if not self.tokenizer.chat_template:
            need(self.flags.system is None, "--system: the model has no chat template")
            return {**row, "ids": self.tokenizer.encode(prompt)}
        chat = messages_of(prompt)
        if self.flags.system is not None:
            chat = [{"role": "system", "content": self.flags.system}, *chat]
        with expecting("--chat-template-args: expected JSON, and what the template takes"):
            ids = self.tokenizer.apply_chat_template(
                chat,
                add_generation_prompt=True,
                return_dict=False,
                **json.loads(self.flags.chat_template_args),
            )
        return {**row, "ids": ids}
