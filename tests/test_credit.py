"""The token that gets a reward: train.place_rewards and data.token_that_completes."""

import types

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout import Rollout
from support.data import token_that_completes
from train import place_rewards


def byte_tokenizer(fallback):
    """One token a byte, as byte-level BPE has it, or as SentencePiece falls back to bytes."""
    if fallback:
        vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
        for letter in "abc .":
            vocabulary[letter] = len(vocabulary)
        inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: number for number, letter in enumerate(letters)}
        inner = Tokenizer(models.BPE(vocabulary, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_step_ends_with_the_token_that_completes_its_text(fallback):
    """The first n such that decode(ids[:n]) starts with the text. 。 and → are three tokens, 🙂 is
    four. A few decodings find it."""
    tokenizer = byte_tokenizer(fallback)
    for text in ("abc. a→b。c", "。a→", "a 🙂b 🙂 b.", "abc" * 30 + "→"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        prefixes = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        for end in range(1, len(text) + 1):
            expected = next(n for n, read in enumerate(prefixes) if read.startswith(text[:end]))
            assert token_that_completes(tokenizer, ids, end) == expected
    assert token_that_completes(tokenizer, ids, len(text) + 9) == len(ids) - 1
    calls = []
    counting = types.SimpleNamespace(
        decode=lambda ids, **options: calls.append(ids) or tokenizer.decode(ids, **options)
    )
    ids = tokenizer.encode("abc" * 1000 + "→" + "abc" * 1000, add_special_tokens=False)
    assert token_that_completes(counting, ids, 3001) == 3002 and len(calls) < 20


class Pieces:
    """A tokenizer whose tokens are strings of several characters. 0 ends, and is special."""

    pieces = ["<end>", "ab", "c", "", "def"]

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(self.pieces[i] for i in ids if i)


def test_step_rewards_stand_at_the_token_that_completes_the_step():
    """Row 0 is ab|c|def|end with ends 2, 3, 5 in characters: a step that ends inside def (5) is
    complete with def. Row 1 is c|ab: an end beyond the text is at the last token, values add up.
    The completion's own reward, 8 and 16, is at the last token."""
    tokens, lengths = torch.tensor([[1, 2, 4, 0], [2, 1, 3, 3]]), torch.tensor([4, 2])
    ended = torch.tensor([True, False])
    completions = Rollout.of([[9], [9]], tokens, torch.zeros(2, 4), lengths, ended, 3)
    steps = [[(2, 1.0), (5, 0.25), (6, 0.5)], [(1, 2.0), (3, 1.0), (77, 4.0)]]
    outcomes = torch.tensor([8.0, 16.0])
    token_rewards, step_ends = place_rewards(Pieces(), completions, outcomes, steps)
    assert token_rewards.tolist() == [[1.0, 0, 0.75, 8.0], [2.0, 21.0, 0, 0]]
    assert step_ends.tolist() == [[True, False, True, True], [True, True, False, False]]
