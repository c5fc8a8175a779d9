"""The task: pairs of a key and its value lie far apart among noise, and the end of the sequence asks for every one.

    noise … key value … noise … key value … noise | key value key value …
                                                    the last chunk asks: at each key, which value?

Nothing but looking at the place where the pair lies gives the answer: values are drawn anew for every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_KEYS, NUM_VALUES, NUM_NOISE = 512, 32, 64
VOCAB_SIZE = NUM_KEYS + NUM_VALUES + NUM_NOISE  # keys first, then values, then noise
CHANCE = 1 / NUM_VALUES
IGNORE = -100
SHORTEST = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences of the task.

    Attributes:
        ids_BS: tokens, (B, S).
        targets_BS: at each key that asks, its value; elsewhere -100. Already shifted: an answer stands where it is due.
        depth_BP: where the pair of each question lies, in the order of the questions: 0 at the first token, towards 1
            at the end of the part that holds pairs.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    depth_BP: Tensor


def num_pairs(length: int) -> int:
    """Pairs in a sequence: questions take its last quarter, or 1,024 tokens where that is less."""
    if length < SHORTEST or length % 8:
        raise ValueError(f"length={length}: give a multiple of 8 that is at least {SHORTEST}.")
    return min(length // 8, NUM_KEYS)


def chunk_size_of(length: int) -> int:
    """The chunk that makes the last one hold the questions and nothing else, at most 1,024 tokens."""
    return 2 * num_pairs(length)


def draw(batch: int, length: int, generator: torch.Generator) -> Samples:
    """Draw sequences.

    Args:
        batch: how many.
        length: tokens of each, a multiple of 8.
        generator: where chance comes from; the same state gives the same sequences.

    Raises:
        ValueError: the length is too short, or no multiple of 8.
    """
    pairs = num_pairs(length)
    body = length - 2 * pairs
    ids_BS = torch.randint(NUM_KEYS + NUM_VALUES, VOCAB_SIZE, (batch, length), generator=generator)
    keys_BP = torch.rand(batch, NUM_KEYS, generator=generator).argsort(1)[:, :pairs]
    values_BP = torch.randint(NUM_KEYS, NUM_KEYS + NUM_VALUES, (batch, pairs), generator=generator)
    # Sorted places among body - pairs, moved on by the pairs before each: all arrangements without overlap are alike.
    places_BP = torch.rand(batch, body - pairs, generator=generator).argsort(1)[:, :pairs].sort(1).values
    places_BP = places_BP + torch.arange(pairs)
    ids_BS.scatter_(1, places_BP, keys_BP).scatter_(1, places_BP + 1, values_BP)

    order_BP = torch.rand(batch, pairs, generator=generator).argsort(1)
    ids_BS[:, body::2] = keys_BP.gather(1, order_BP)
    ids_BS[:, body + 1 :: 2] = values_BP.gather(1, order_BP)
    targets_BS = torch.full_like(ids_BS, IGNORE)
    targets_BS[:, body::2] = ids_BS[:, body + 1 :: 2]
    return Samples(ids_BS, targets_BS, places_BP.gather(1, order_BP) / body)
