"""Sequences with common prefixes as trees, so that a forward pass computes each prefix once.

A tree is one row of the forward pass. Its nodes are tokens, which attend to their ancestors. Nodes
are numbered in the order of the sorted sequences, so node i attends to j if j <= i < end[j]. Below,
"c d x" and "c e y" are completions of "a b"; their last tokens are only predicted, not read.

    node      0  1  2  3  4        attends to  0 1 2 3 4       sequence   its nodes
    token     a  b  c  d  e            3 (d)   1 1 1 1 .       a b c d    0 1 2 3
    position  0  1  2  3  3            4 (e)   1 1 1 . 1       a b c e    0 1 2 4
    end       5  5  5  4  5
"""

import inspect
import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import get_layer_types_and_kwargs

from support.models import body_of

NODES_PER_ROW = 1024  # approximate limit: attention compares every pair of nodes in a row


class Trees(NamedTuple):
    """The trees of a micro-batch: R rows of U nodes, padding included, for n sequences."""

    ids: Tensor  # (R, U) tokens
    positions: Tensor  # (R, U) depth in the tree
    end: Tensor  # (R, U) one past the last descendant
    nodes: Tensor  # (n, longest) index in ids.flatten() of each token of a sequence


class Sequence(NamedTuple):
    number: int  # index among the sequences given to `in_order`
    ids: list[int]  # without the last token, which is never read
    shared: int  # length of the prefix shared with the previous sequence of the tree


def in_order(sequences: list[list[int]]) -> list[Sequence]:
    """Sort sequences so that those with a common prefix are neighbours."""
    sequences = [ids[:-1] for ids in sequences]
    found, previous = [], []
    for number in sorted(range(len(sequences)), key=sequences.__getitem__):
        ids = sequences[number]
        shared = len(os.path.commonprefix([previous, ids]))  # works on lists, too
        found.append(Sequence(number, ids, shared))
        previous = ids
    return found


def grow(sequences: list[Sequence], width: int) -> list[list[Sequence]]:
    """Group sequences from `in_order` into trees of at most `width` nodes, or of one sequence."""
    trees, nodes = [], 0
    for sequence in sequences:
        nodes += len(sequence.ids) - sequence.shared
        if not trees or nodes > width:
            trees.append([])
            sequence = sequence._replace(shared=0)
            nodes = len(sequence.ids)
        trees[-1].append(sequence)
    return trees


def grow_evenly(sequences: list[Sequence], max_tokens: int) -> tuple[list[list[Sequence]], int]:
    """Return as few trees as possible, and the smallest width that fits them, because padding costs
    compute, too. Widths are multiples of 8, for fast attention."""
    longest = multiple_of_8(max(len(sequence.ids) for sequence in sequences))
    widest = max(longest, min(max(NODES_PER_ROW, 2 * longest), max_tokens) // 8 * 8)
    fewest = len(grow(sequences, widest))
    narrowest = max(longest, multiple_of_8(count_nodes(sequences) // fewest))
    for width in range(narrowest, widest + 1, 8):
        trees = grow(sequences, width)
        if len(trees) <= fewest:  # always true at the widest
            return trees, width


def count_nodes(sequences: list[Sequence]) -> int:
    return sum(len(sequence.ids) - sequence.shared for sequence in sequences)


def multiple_of_8(number: int) -> int:
    return (number + 7) // 8 * 8


def join(trees: list[list[Sequence]], device) -> Trees:
    """Lay out each tree as a row. The rows of Trees.nodes are sorted by Sequence.number."""
    width = multiple_of_8(max(map(count_nodes, trees)))
    rows, paths = [], {}
    for row, tree in enumerate(trees):
        ids, positions, path = [], [], []
        # padding attends to itself: a softmax over nothing would be NaN
        end = list(range(1, width + 1))
        for number, tokens, shared in tree:
            path = path[:shared] + list(range(len(ids), len(ids) + len(tokens) - shared))
            ids += tokens[shared:]
            positions += range(shared, len(tokens))
            for node in path:
                end[node] = len(ids)
            paths[number] = torch.tensor(path) + row * width
        padding = [0] * (width - len(ids))
        rows.append((ids + padding, positions + padding, end))
    ids, positions, end = torch.tensor(rows, device=device).unbind(1)
    nodes = pad_sequence([paths[number] for number in sorted(paths)], batch_first=True)
    return Trees(ids, positions, end, nodes.to(device))


def masks_of(model, trees: Trees) -> Tensor | dict[str, Tensor]:
    """Return the additive attention mask (R, 1, U, U), or one for each type of layer."""
    kind = trees.ids.device.type
    # in the dtype of the queries: otherwise every layer would convert the mask and keep a copy
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    node = torch.arange(trees.ids.shape[1], device=trees.ids.device)
    is_ancestor = (node[:, None] >= node) & (node[:, None] < trees.end[:, None, :])
    masks = {}
    for layers, window in kinds_of_layers(model).items():
        visible = is_ancestor
        if window is not None:
            distance = trees.positions[:, :, None] - trees.positions[:, None, :]
            visible = visible & (distance < window)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        masks[layers] = mask.masked_fill_(~visible, -torch.inf)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def kinds_of_layers(model) -> dict[str, int | None]:
    """Return the sliding window of each type of layer, or None if it has none."""
    config = model.config.get_text_config(decoder=True)
    kinds, options = get_layer_types_and_kwargs(config)
    return {kind: option.get("sliding_window") for kind, option in zip(kinds, options)}


def shares_prefixes(model) -> bool:
    """Whether trees can be used: the model takes our positions, and every layer takes our mask."""
    takes_positions = "position_ids" in inspect.signature(body_of(model).forward).parameters
    sdpa = model.config._attn_implementation == "sdpa"
    kinds = set(kinds_of_layers(model))
    return takes_positions and sdpa and kinds <= {"full_attention", "sliding_attention"}
