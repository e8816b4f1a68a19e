"""Stop strings: which completions end with one of some texts."""

import transformers
from torch import Tensor

from support.user import need


class StopTexts(transformers.StopStringCriteria):
    """Tells which completions end with the token that completes one of some texts."""

    def __init__(self, tokenizer, texts: list[str]):
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            written = text in tokenizer.decode(ids)
            need(written, f"--stop {text!r}: no tokens of this tokenizer write it")
        super().__init__(tokenizer, texts)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return (rows,) bool for the tokens (rows, n) that each completion has so far."""
        return super().__call__(tokens, None)

    @staticmethod
    def clean_tokenizer_vocab(tokenizer, static_prefix="abcdef", **options):
        """Take a prefix that the tokenizer writes: one of characters may lack these letters."""
        if static_prefix not in tokenizer.decode(tokenizer.encode(static_prefix)):
            words = [tokenizer.decode([i]) for i in range(len(tokenizer))]
            static_prefix = next(word for word in words if word.isalnum())
        parent = transformers.StopStringCriteria
        return parent.clean_tokenizer_vocab(tokenizer, static_prefix, **options)
