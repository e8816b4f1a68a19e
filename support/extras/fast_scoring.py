"""Compute log-probs faster: prefix sharing and no padding. Deleted, everything still works.

Tokens that several completions have in common, most of all the prompt of a group, go through the
model once, and all tokens go through it as one sequence. The functions have the signatures of
rollout.py and the same results up to rounding. `fits` tells for which models: layers have a KV
cache and no other state, and transformers lets us replace their attention."""

import contextlib
import functools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rollout import Rollout, padded, scattered, state_values, token_logprobs
from support.models import body_of, has_plain_kv_cache

# model types that claim to accept any attention function, and do not accept ours
NOT_OURS = {
    "diffllama": "two attentions a layer",
    "doge": "computes with the mask",
    "gemma4_unified": "a mask that looks positions up in a table",
    "hrm_text": "runs through its layers more than once",
    "llama4": "scales queries by their index in the pass, not by their position",
    "llama4_text": "the same",
}


def fits(model) -> bool:
    """Tell whether the functions of this file can run the model."""
    replaced = model._supports_attention_backend and model.config.model_type not in NOT_OURS
    return replaced and has_plain_kv_cache(model)


def completion_logprobs(
    model, rollout: Rollout, temperature: float, *, entropy_grad: bool | None = True
) -> tuple[Tensor, Tensor]:
    """rollout.completion_logprobs, with every distinct prefix computed once."""
    packed, mask = packed_of(rollout), rollout.completion_mask
    hidden = packed.hidden_states(model)
    found = token_logprobs(model, hidden, packed.targets, temperature, entropy_grad)
    logprobs, entropy = take(found.T, packed.prediction).T
    return scattered(logprobs, mask), scattered(entropy, mask)


def completion_values(critic, rollout: Rollout) -> Tensor:
    """rollout.completion_values, with every distinct prefix computed once."""
    packed = packed_of(rollout)
    values = state_values(critic, packed.hidden_states(critic))
    return scattered(take(values[:, None], packed.prediction)[:, 0], rollout.completion_mask)


def predicting(rollout: Rollout) -> Tensor:
    """rollout.predicting, among the nodes of the forward pass."""
    packed = packed_of(rollout)
    return packed.parents[packed.prediction]


def micro_batches(rollout: Rollout, tokens: int) -> list[Tensor]:
    """Divide the rows, in their order, into parts of at most so many distinct prefixes, or one row.
    Groups stay together, except at the borders of parts."""
    parts, trie = [], {}
    for row, text in enumerate(rollout.sequences()):
        path_of(text, trie)
        if not parts or len(trie) > tokens:
            parts.append([])
            trie = {}
            path_of(text, trie)
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]


# ---- texts as a trie -----------------------------------------------------------------------------
#
# Every distinct prefix of the texts is a node. Nodes are numbered as they appear: first those of
# prompts, then those of texts without their last token, which the model never reads. Below
# are the completions "c d x" and "c e y" of prompt "a b", and "g z" of prompt "f".
#
#     text        path          new nodes     node      0   1   2   3   4   5   6 | 7   8   9
#     a b         0 1           0 1           token     a   b   f   c   d   e   g | x   y   z
#     f           2             2             parent   -1   0  -1   1   3   3   2 | 4   5   6
#     a b c d     0 1 3 4       3 4
#     a b c e     0 1 3 5       5
#     f g         2 6           6
#
# The new nodes of a text are the last ones of its path, numbered consecutively. The last tokens, to
# the right of the line, are predicted.

Trie = dict[tuple[int, int], int]  # (parent, token) -> node, in the order of nodes


def path_of(text: list[int], trie: Trie) -> list[int]:
    """Return the nodes of a text, one a token, and add the missing ones to the trie."""
    path, node = [], -1
    for token in text:
        node = trie.setdefault((node, token), len(trie))
        path.append(node)
    return path


class Block:
    """Texts side by side in attention: the new nodes of each are queries, its path are the keys.
    Padding is any node."""

    def __init__(self, growing: list[tuple[list[int], int]], device):
        """growing: paths, each with the number of its new nodes."""
        paths, counts = zip(*growing)
        self.keys = padded(paths, device)  # (rows, longest path)
        steps = torch.arange(max(counts), device=device)
        counts = torch.tensor(counts, device=device)[:, None]
        ends = torch.tensor([[len(path)] for path in paths], device=device)
        # a query on padding must see a key, or its softmax is NaN: keep it inside sliding windows
        self.positions = (ends - counts + steps).clamp(max=self.keys.shape[1] - 1)
        self.queries = self.keys.gather(1, self.positions)  # (rows, most new nodes)
        self.is_new = (steps < counts).flatten().nonzero()[:, 0]  # queries that are no padding

    def mask(self, sees) -> Tensor:
        """Keys on padding stand behind the queries of their row, which do not see them."""
        steps = torch.arange(self.keys.shape[1], device=self.keys.device)
        return mask_between(self.positions, steps[None], sees)

    def attend(self, module, query, key, value, mask, **options) -> Tensor:
        """query, key, value (nodes, heads, dim) -> (new nodes, heads, dim)."""
        query = take(query, self.queries).transpose(1, 2)  # (rows, heads, queries, dim)
        key = take(key, self.keys).transpose(1, 2)
        value = take(value, self.keys).transpose(1, 2)
        output = attention(module, query, key, value, mask, **options)
        return output.flatten(0, 1)[self.is_new]


def take(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return rows[numbers]. As an embedding: its backward pass adds in a fixed order on every
    device, and is many times faster than that of indexing."""
    return F.embedding(numbers, rows.flatten(1)).unflatten(-1, rows.shape[1:])


@functools.lru_cache(maxsize=64)
def packed_of(rollout: Rollout) -> "Packed":
    """Made once for the same tensors, which nothing changes in place: the updates score the same
    micro-batches as the pass for pi_old."""
    return Packed(rollout)


class Packed:
    """The nodes of a rollout in one forward pass: the model's matrices see them as one sequence.

    It predicts the nodes of completions, each once, from the hidden state of its parent:

        completions    c d x   c e y   g z        predicted   3   4   5   6   7   8   9
        nodes          3 4 7   3 5 8   6 9        parents     1   3   3   2   4   5   6
        prediction     0 1 4   0 2 5   3 6        targets     c   d   e   g   x   y   z

    prediction (tokens,) has, for each token of the mask, row by row, its index in targets."""

    def __init__(self, rollout: Rollout):
        trie, device = {}, rollout.tokens.device
        texts, sizes = rollout.sequences(), rollout.prompt_lengths.tolist()
        prompts = dict.fromkeys(tuple(text[:size]) for text, size in zip(texts, sizes))
        self.blocks = []  # prompts, then texts. Together their new nodes are all nodes in order
        for part in (prompts, [text[:-1] for text in texts]):
            paths, growing = [], []
            for text in part:
                before = len(trie)
                paths.append(path_of(text, trie))
                if len(trie) > before:
                    growing.append((paths[-1], len(trie) - before))
            if growing:
                self.blocks.append(Block(growing, device))
        nodes_read = len(trie)

        for path, text in zip(paths, texts):  # the last tokens are predicted, not read
            path.append(trie.setdefault((path[-1], text[-1]), len(trie)))
        nodes = padded([path[size:] for path, size in zip(paths, sizes)], device)
        nodes = nodes[rollout.completion_mask[:, : nodes.shape[1]]]
        predicted, self.prediction = nodes.unique(return_inverse=True)
        parents, tokens = torch.tensor(list(trie), device=device).T
        self.parents, self.targets = parents[predicted], tokens[predicted]
        self.ids = tokens[None, :nodes_read]  # that the model reads

    def hidden_states(self, model) -> Tensor:
        """Return those (predictions, H) before the targets."""
        ones = torch.ones_like(self.ids)  # without a mask the library would look for padding
        at = torch.cat([block.positions.flatten()[block.is_new] for block in self.blocks])[None]
        with our_attention(model, self):
            output = body_of(model)(self.ids, position_ids=at, attention_mask=ones, use_cache=False)
        return take(output[0][0], self.parents)

    def mask(self, sees) -> list[Tensor]:
        return [block.mask(sees) for block in self.blocks]

    def attend(self, module, query, key, value, masks, **options) -> Tensor:
        """query, key, value (1, heads, nodes, dim) -> (1, nodes, heads, dim)."""
        nodes = [states[0].transpose(0, 1) for states in (query, key, value)]
        pairs = zip(self.blocks, masks)
        outputs = [block.attend(module, *nodes, mask, **options) for block, mask in pairs]
        return torch.cat(outputs)[None]


# ---- our attention in the layers of transformers -------------------------------------------------
#
# An attention layer of transformers calls the function that `config._attn_implementation` names.
# Before the layers, the function of that name in another table makes the mask, once a pass. Ours
# find the layout of the tokens (Packed, or one of fast_sampling.py) in the config that both get.


def attend_in_layout(module, query, key, value, attention_mask, **options):
    return module.config.layout.attend(module, query, key, value, attention_mask, **options), None


def mask_of_layout(config, mask_function, **_):
    """mask_function(row, head, query, key) is the library's: whether one position sees another."""
    return config.layout.mask(mask_function)


AttentionInterface.register("ours", attend_in_layout)
AttentionMaskInterface.register("ours", mask_of_layout)


@contextlib.contextmanager
def our_attention(model, layout):
    """Let layout.attend be the attention of the model inside the block."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in parts}.values()
    before = [(each._attn_implementation, getattr(each, "layout", None)) for each in configs]
    for config in configs:
        config._attn_implementation, config.layout = "ours", layout
    try:
        yield
    finally:
        for config, (implementation, outer) in zip(configs, before):
            config._attn_implementation, config.layout = implementation, outer
            if outer is None:
                del config.layout  # or a checkpoint's config.json would have it


def attention_now(model):
    """Return the context in which the model runs now, for `checkpoint_layers`."""
    layout = getattr(model.config, "layout", None)
    return our_attention(model, layout) if layout else contextlib.nullcontext()


def mask_between(queries: Tensor, keys: Tensor, sees) -> Tensor:
    """Return the mask (rows, 1, queries, keys) that is added to scores: 0 or -inf, from positions
    (rows, queries) and (rows or 1, keys)."""
    queries, keys = queries[:, None, :, None], keys[:, None, None, :]
    return torch.where(sees(0, 0, queries, keys), 0.0, -torch.inf)


# devices where key heads shared by query heads, with a mask, use a slow kernel: copy the heads
EXPAND_HEADS = {"cuda"}


def attention(module, query, key, value, mask, scaling=None, **options):
    """Return softmax attention (rows, queries, heads, dim) of query (rows, heads, queries, dim) and
    key, value (rows, kv_heads, keys, dim), with a mask that is added to the scores."""
    mask = mask.to(query.dtype)
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        # the fused kernel has no capped scores and no attention sinks. The model's own file has
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, scaling=scaling, **options)[0]

    rows, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    if queries == 1:  # heads that share a key head become its queries: nothing is copied
        query = query.reshape(rows, kv_heads, heads // kv_heads, -1)
    elif query.device.type in EXPAND_HEADS:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return output.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous()
