"""Stop strings: find the completions that end with one."""

import transformers
from torch import Tensor

from support.errors import need


class StopTexts(transformers.StopStringCriteria):
    """Find the completions whose last token completes one of the texts."""

    def __init__(self, tokenizer, texts: list[str]):
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            written = text in tokenizer.decode(ids)
            need(written, f"--stop {text!r}: no tokens of this tokenizer spell it")
        super().__init__(tokenizer, texts)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: (rows, n), each completion so far. Returns bool (rows,)."""
        return super().__call__(tokens, None)

    @staticmethod
    def clean_tokenizer_vocab(tokenizer, static_prefix="abcdef", **options):
        """Choose another prefix if the tokenizer lacks some of these letters."""
        if static_prefix not in tokenizer.decode(tokenizer.encode(static_prefix)):
            words = [tokenizer.decode([i]) for i in range(len(tokenizer))]
            static_prefix = next(word for word in words if word.isalnum())
        parent = transformers.StopStringCriteria
        return parent.clean_tokenizer_vocab(tokenizer, static_prefix, **options)
