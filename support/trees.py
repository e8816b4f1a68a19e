"""Sequences of tokens with equal beginnings as trees, so that a forward pass reads these once.

A tree is a row of the forward pass, where a node, a token, sees its ancestors. Nodes are numbered
in the order of the sorted sequences: the descendants of node j are j + 1 up to end[j] - 1, and i
sees j where j <= i < end[j]. Below are the completions "c d x" and "c e y" of prompt "a b". Their
last tokens are predicted, not read.

    node      0  1  2  3  4            sees   0 1 2 3 4        before x: node 3
    token     a  b  c  d  e            3 (d)  1 1 1 1 .        before y: node 4
    position  0  1  2  3  3            4 (e)  1 1 1 . 1        before c: node 1
    end       5  5  5  4  5
"""

import inspect
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import get_layer_types_and_kwargs

from support.models import body_of

NODES_OF_A_ROW = 1024  # about: attention looks at every pair of nodes of a row


class Trees(NamedTuple):
    """The trees of a micro-batch, R rows of U nodes."""

    ids: Tensor  # (R, U) tokens
    positions: Tensor  # (R, U) depth in the tree
    end: Tensor  # (R, U) the node of the row after the last descendant
    before: Tensor  # (tokens,) the node, of all R * U, that predicts each token that is scored

    def visible(self, window: int | None = None) -> Tensor:
        """Return (R, U, U) whether node i sees node j, within a sliding window of positions."""
        node = torch.arange(self.ids.shape[1], device=self.ids.device)
        sees = (node[:, None] >= node) & (node[:, None] < self.end[:, None, :])
        if window is not None:
            distance = self.positions[:, :, None] - self.positions[:, None, :]
            sees &= distance < window
        return sees


class Tree(NamedTuple):
    """The nodes of a row."""

    ids: list[int]
    positions: list[int]
    end: list[int]
    paths: dict[int, list[int]]  # number of a sequence -> its nodes


class Sequence(NamedTuple):
    number: int  # its place among the sequences that were given
    ids: list[int]  # without the last token, which is not read
    shared: int  # tokens at the beginning that the sequence before it has, too


def in_order(sequences: list[list[int]]) -> list[Sequence]:
    """Return the sequences sorted, so that those with equal beginnings are neighbours."""
    sequences = [ids[:-1] for ids in sequences]
    found, before = [], []
    for number in sorted(range(len(sequences)), key=sequences.__getitem__):
        ids = sequences[number]
        shared = len(os.path.commonprefix([before, ids]))  # of two lists
        found.append(Sequence(number, ids, shared))
        before = ids
    return found


def grow_evenly(sequences: list[list[int]], most_tokens: int) -> tuple[list[Tree], int]:
    """Return trees in as few rows as possible, and the smallest width for that, because padding is
    computed, too: a multiple of 8, for fast attention. No tree for more than most_tokens."""
    sequences = in_order(sequences)
    longest = multiple_of_8(max(len(sequence.ids) for sequence in sequences))
    if longest > most_tokens:
        return [], 0
    widest = min(max(NODES_OF_A_ROW, 2 * longest), most_tokens) // 8 * 8
    trees = grow(sequences, widest)
    fewest, nodes = len(trees), sum(len(tree.ids) for tree in trees)
    width = max(longest, multiple_of_8(nodes / fewest))
    while True:  # at the widest they fit
        trees = grow(sequences, width)
        if len(trees) <= fewest:
            return trees, width
        width += 8


def multiple_of_8(number: float) -> int:
    return 8 * math.ceil(number / 8)


def grow(sequences: list[Sequence], width: int) -> list[Tree]:
    """Return the trees of sequences `in_order`, of at most so many nodes, or of one sequence."""
    trees, path = [], []  # path: nodes of the sequence before. The first `shared` are ours, too
    for number, ids, shared in sequences:
        if not trees or len(trees[-1].ids) + len(ids) - shared > width:
            trees.append(Tree([], [], [], {}))
            shared = 0
        tree = trees[-1]
        new = range(len(tree.ids), len(tree.ids) + len(ids) - shared)
        path = path[:shared] + list(new)
        tree.ids.extend(ids[shared:])
        tree.positions.extend(range(shared, len(ids)))
        tree.end.extend(new)
        tree.paths[number] = path
        for node in path:
            tree.end[node] = new.stop
    return trees


def join(trees: list[Tree], row_of: Tensor, position: Tensor) -> Trees:
    """Return trees as tensors. Their sequences, sorted by number, are rows 0, 1, ... of a batch.
    Token i, one to score, is predicted by the token at position[i] of row row_of[i]."""
    width = multiple_of_8(max(len(tree.ids) for tree in trees))
    rows, paths = [], {}
    for row, tree in enumerate(trees):
        padding = range(len(tree.ids), width)
        # a node on padding sees itself: a softmax over nothing would be NaN
        ends = [*tree.end, *(node + 1 for node in padding)]
        zeros = [0] * len(padding)
        rows.append((tree.ids + zeros, tree.positions + zeros, ends))
        for number, path in tree.paths.items():
            paths[number] = [row * width + node for node in path]
    ids, positions, end = torch.tensor(rows, device=row_of.device).unbind(1)
    ordered = [torch.tensor(paths[number], device=row_of.device) for number in sorted(paths)]
    node_of = pad_sequence(ordered, batch_first=True)  # (rows, longest)
    return Trees(ids, positions, end, before=node_of[row_of, position])


# ---- how a model reads them ----------------------------------------------------------------------


def masks_of(model, trees: Trees) -> Tensor | dict[str, Tensor]:
    """Return the mask (R, 1, U, U) that is added to scores, or one for each kind of layer."""
    kind = trees.ids.device.type
    # the dtype of the queries: attention would convert another one in every layer, and keep each
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    masks = {}
    for layers, window in kinds_of_layers(model).items():
        hidden = ~trees.visible(window)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        masks[layers] = mask.masked_fill_(hidden, -torch.inf)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def kinds_of_layers(model) -> dict[str, int | None]:
    """Return the sliding window, or None, of each kind of layer."""
    config = model.config.get_text_config(decoder=True)
    kinds, options = get_layer_types_and_kwargs(config)
    return {kind: option.get("sliding_window") for kind, option in zip(kinds, options)}


def shares_prefixes(model) -> bool:
    """Tell whether a model may get trees: it takes our positions, and our mask for each layer."""
    takes = "position_ids" in inspect.signature(body_of(model).forward).parameters
    sdpa = model.config._attn_implementation == "sdpa"
    kinds = set(kinds_of_layers(model))
    return takes and sdpa and kinds <= {"full_attention", "sliding_attention"}
