"""--stop: a completion ends with the token that completes a text."""

import tokenizers
import torch
import transformers

import rollout
from support import stop_texts
from tools import BASE, SHAPE, good, metrics, refused

# tokens of one to three characters. "<s" + "t>" is a stop text in two tokens, "x<st>y" holds one
WORDS = ["<pad>", "<eos>", "a", "b", "<s", "t>", "x<st>y", "st", "<", ">", "ab", "\n", "\n\n", "Q:"]
TEXTS = ["<st>", "\n\nQ:"]


def first_stop(words: list[str]) -> int | None:
    """By a loop over strings: the number of tokens up to a stop text or the end token."""
    text = ""
    for count, word in enumerate(words, 1):
        new = text + word
        if word == "<eos>" or any(
            stop in new and new.rindex(stop) + len(stop) > len(text) for stop in TEXTS
        ):
            return count
        text = new
    return None


def test_completions_end_with_the_token_that_completes_a_text(monkeypatch):
    """Against a loop over strings. The stop text stays, is trained on, and is no truncation."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.decoder = tokenizers.decoders.Fuse()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **ends)
    monkeypatch.setattr(stop_texts, "need", lambda *_: None)  # it writes no text: no merges
    stops = stop_texts.StopTexts(tokenizer, TEXTS)
    torch.manual_seed(0)
    shape = transformers.Qwen3Config(**SHAPE | {"vocab_size": len(WORDS)})
    model = transformers.Qwen3ForCausalLM(shape)
    uniforms = torch.rand(10, 16, 12, generator=torch.Generator().manual_seed(1))
    prompts = [[2 + i % 3, *range(2, 2 + i % 5)] for i in range(10)]
    options = dict(eos_ids=[1], pad_id=0, cache_gb=1e-4)
    free = rollout.generate(model, prompts, uniforms, **{**options, "eos_ids": []})
    out = rollout.generate(model, prompts, uniforms, stops=stops, **options)
    endings = set()
    for i, ids in enumerate(free.completions.tolist()):
        words = [WORDS[token] for token in ids]
        count = first_stop(words)
        length = count or len(words)
        assert out.lengths[i] == length, words
        assert out.completions[i, :length].tolist() == ids[:length]
        assert out.truncated[i] == (count is None)
        assert out.completion_mask[i].sum() == length
        endings.add(words[length - 1])
    assert {"<eos>", "t>", "x<st>y", "Q:", ">"} <= endings


def test_completions_of_a_run_end_with_their_stop_texts(place, tmp_path):
    rows = good(tmp_path, f"{BASE} --max-new-tokens 24 --stop 2; --stop #").folder
    texts = [row["completion"] for row in metrics(rows, "samples")]
    assert sum(text.endswith(("2;", "#")) for text in texts) > 2
    assert all(text.count("2;") + text.count("#") <= 1 for text in texts)
    assert metrics(rows)[0]["truncated"] < 1
    assert "--stop 'z': no tokens" in refused(tmp_path / "z", f"{BASE} --stop z")
    assert "expected non-empty strings" in refused(tmp_path / "z", BASE, "--stop", "")
