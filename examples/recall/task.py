"""Task: pairs of a key and its value are spread among noise, and the end of the sequence asks for every pair.

    noise … key value … noise … key value … noise | key value key value …
                                                    the last chunk asks: at each key, which value?

Values are random in every sequence, so only the pair itself gives the answer.
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
        targets_BS: the value at each key that asks; elsewhere -100. Already shifted: a target is at the position that
            predicts it.
        depth_BP: depth of the pair of each question, in the order of the questions: 0 at the first token, towards 1
            at the end of the part with pairs.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    depth_BP: Tensor


def num_pairs(length: int) -> int:
    """Return the pairs in a sequence: questions take its last quarter, at most 1,024 tokens."""
    if length < SHORTEST or length % 8:
        raise ValueError(f"length={length}: give a multiple of 8 that is at least {SHORTEST}.")
    return min(length // 8, NUM_KEYS)


def chunk_size_of(length: int) -> int:
    """Return the chunk size for which the last chunk holds exactly the questions; at most 1,024 tokens."""
    return 2 * num_pairs(length)


def draw(batch: int, length: int, generator: torch.Generator) -> Samples:
    """Draw sequences.

    Args:
        batch: number of sequences.
        length: tokens of each sequence, a multiple of 8.
        generator: source of randomness; the same state gives the same sequences.

    Raises:
        ValueError: the length is too short or not a multiple of 8.
    """
    pairs = num_pairs(length)
    body = length - 2 * pairs
    ids_BS = torch.randint(NUM_KEYS + NUM_VALUES, VOCAB_SIZE, (batch, length), generator=generator)
    keys_BP = torch.rand(batch, NUM_KEYS, generator=generator).argsort(1)[:, :pairs]
    values_BP = torch.randint(NUM_KEYS, NUM_KEYS + NUM_VALUES, (batch, pairs), generator=generator)
    # Draw sorted places among body - pairs and shift each by the pairs before it: all arrangements without overlap are
    # equally likely.
    places_BP = torch.rand(batch, body - pairs, generator=generator).argsort(1)[:, :pairs].sort(1).values
    places_BP = places_BP + torch.arange(pairs)
    ids_BS.scatter_(1, places_BP, keys_BP).scatter_(1, places_BP + 1, values_BP)

    order_BP = torch.rand(batch, pairs, generator=generator).argsort(1)
    ids_BS[:, body::2] = keys_BP.gather(1, order_BP)
    ids_BS[:, body + 1 :: 2] = values_BP.gather(1, order_BP)
    targets_BS = torch.full_like(ids_BS, IGNORE)
    targets_BS[:, body::2] = ids_BS[:, body + 1 :: 2]
    return Samples(ids_BS, targets_BS, places_BP.gather(1, order_BP) / body)
