"""The token that gets a reward: support.reward_placement.place_rewards and token_that_completes."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from rollout import Rollout
from support.reward_placement import place_rewards, token_that_completes
from tools import byte_tokenizer


def tokenizer_of_bytes():
    """One token a byte, as SentencePiece falls back to bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc ."]
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("make", [byte_tokenizer, tokenizer_of_bytes])
def test_a_step_ends_with_the_token_that_completes_its_text(make):
    """Where 。 and → are three tokens, and 🙂 is four. A few decodings find it."""
    tokenizer = make()
    for text in ("abc. a→b。c", "。a→", "a 🙂b 🙂 b.", "abc" * 30 + "→"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        prefixes = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        for end in range(1, len(text) + 1):
            expected = next(n for n, read in enumerate(prefixes) if read.startswith(text[:end]))
            assert token_that_completes(tokenizer.decode, ids, end) == expected
    assert token_that_completes(tokenizer.decode, ids, len(text) + 9) == len(ids) - 1
    calls = []

    def counting(ids):
        calls.append(ids)
        return tokenizer.decode(ids)

    ids = tokenizer.encode("abc" * 1000 + "→" + "abc" * 1000, add_special_tokens=False)
    assert token_that_completes(counting, ids, 3001) == 3002 and len(calls) < 20


def test_step_rewards_stand_at_the_token_that_completes_the_step():
    """Row 0 is ab|c|def|end: a step that ends inside def is complete with def. Row 1 is c|ab: an
    end beyond the text is at the last token, where the completion's own reward is added."""
    tokenizer = byte_tokenizer([("a", "b"), ("d", "e"), ("de", "f")], eos_token="<end>")
    first, second = tokenizer.encode("abcdef"), tokenizer.encode("cab")
    tokens, lengths = torch.tensor([[*first, 0], [*second, 3, 3]]), torch.tensor([4, 2])
    ended = torch.tensor([True, False])
    completions = Rollout.of([[9], [9]], tokens, torch.zeros(2, 4), lengths, ended, 3)
    steps = [[(2, 1.0), (5, 0.25), (6, 0.5)], [(1, 2.0), (3, 1.0), (77, 4.0)]]
    outcomes = torch.tensor([8.0, 16.0])
    token_rewards, step_ends = place_rewards(tokenizer.decode, completions, outcomes, steps)
    assert token_rewards.tolist() == [[1.0, 0, 0.75, 8.0], [2.0, 21.0, 0, 0]]
    assert step_ends.tolist() == [[True, False, True, True], [True, True, False, False]]
