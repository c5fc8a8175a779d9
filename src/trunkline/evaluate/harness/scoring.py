"""Log-likelihoods of continuations: contexts that are shared are read once, all others go in whole rows."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

import trunkline
from trunkline.api import streamed_forward
from trunkline.data.tokenizers import Tokens
from trunkline.engine.batch import IGNORE
from trunkline.evaluate.harness.text import Pair
from trunkline.generation.prefixes import Prefixes
from trunkline.kv_cache.cache import StreamedCache

# Of a longer continuation the logits, which behind a cache exist at once, would be large; in whole rows they are tiled.
MOST_BEHIND = 256

Score = tuple[float, bool]


def score(model: nn.Module, pairs: Sequence[Pair], *, batch_size: int, share: bool) -> Iterator[tuple[int, Score]]:
    """Score continuations.

    Args:
        model: streamed, in evaluation mode.
        pairs: what to score.
        batch_size: rows at a time: whole sequences, or continuations of one context.
        share: read a context once for all its continuations, and what contexts begin with in common once for all of
            them. Keys and values of all layers are held then, of whole rows those of one layer.

    Yields:
        Index of a pair, in any order, and its score: log probability, and whether each token was the likeliest.

    Raises:
        ValueError: keys and values do not fit in the budgets.
    """
    groups: dict[bytes, list[int]] = defaultdict(list)
    whole = []
    for index, pair in enumerate(pairs):
        if not len(pair.continuation):
            yield index, (0.0, True)
        elif share and len(pair.continuation) <= MOST_BEHIND:
            groups[hashlib.blake2b(pair.context.tobytes()).digest()].append(index)
        else:
            whole.append(index)
    members = list(groups.values())
    alike = Prefixes([pairs[group[0]].context for group in members]).sharing()
    shared = [group for at, group in enumerate(members) if len(group) > 1 or at in alike]
    whole += [group[0] for at, group in enumerate(members) if len(group) == 1 and at not in alike]
    whole.sort(key=lambda index: -len(pairs[index]))  # rows of about one length together, and what is too large first
    for some in _batches(whole, batch_size):
        yield from zip(some, _whole(model, [pairs[index] for index in some]), strict=True)
    for at, cache in Prefixes([pairs[group[0]].context for group in shared]).read(model):
        for some in _batches(shared[at], batch_size):
            yield from zip(some, _behind(model, cache, [pairs[index].continuation for index in some]), strict=True)


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _whole(model: nn.Module, pairs: Sequence[Pair]) -> list[Score]:
    """Contexts with continuations, a row each, in one forward."""
    device = next(model.parameters()).device
    ids_BS = torch.zeros(len(pairs), max(map(len, pairs)), dtype=torch.long)
    labels_BS, mask_BS = torch.full_like(ids_BS, IGNORE), torch.zeros_like(ids_BS)
    for row, pair in enumerate(pairs):
        begin, end = len(pair.context), len(pair)
        ids_BS[row, :end] = torch.from_numpy(np.concatenate([pair.context, pair.continuation]).astype(np.int64))
        labels_BS[row, begin:end] = ids_BS[row, begin:end]
        mask_BS[row, :end] = 1
    given = {"input_ids": ids_BS, "labels": labels_BS, "attention_mask": mask_BS}
    found = streamed_forward(model, "score").score(**{name: value.to(device) for name, value in given.items()})
    # Without a label both are 0. Sums over a million tokens would lose digits in fp32.
    log_probs, greedy = found.double().sum(-1).tolist()
    return [(a, int(b) == len(pair.continuation)) for a, b, pair in zip(log_probs, greedy, pairs, strict=True)]


def _behind(model: nn.Module, cache: StreamedCache, continuations: Sequence[Tokens]) -> list[Score]:
    """Continuations of one context that has been read: rows over one cache, and its logits for their first tokens."""
    device = next(model.parameters()).device
    longest = max(map(len, continuations))
    assert cache.logits is not None
    logits_BTV = cache.logits[:, -1:].expand(len(continuations), -1, -1)
    ids_BT = torch.zeros(len(continuations), longest, dtype=torch.long)
    for row, ids in enumerate(continuations):
        ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
    ids_BT = ids_BT.to(device)
    if longest > 1:  # what follows the last token is not wanted; rows that are shorter see nothing of their padding
        longer = trunkline.prefill(model, ids_BT[:, :-1], cache=cache.fork(), logits_to_keep=longest - 1)
        assert longer.logits is not None
        logits_BTV = torch.cat([logits_BTV, longer.logits], 1)
    return [_row(logits_BTV[row, : len(ids)], ids_BT[row, : len(ids)]) for row, ids in enumerate(continuations)]


def _row(logits_TV: Tensor, ids_T: Tensor) -> Score:
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    log_probs_T = logits_TV.gather(-1, ids_T[:, None])[:, 0] - logits_TV.logsumexp(-1)
    return math.fsum(log_probs_T.tolist()), bool((logits_TV.argmax(-1) == ids_T).all())
