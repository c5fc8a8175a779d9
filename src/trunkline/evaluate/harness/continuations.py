"""Log likelihoods of continuations: shared contexts are read once, other sequences are scored as whole rows."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import trunkline
from trunkline.api import streamed_forward
from trunkline.data.tokenizers import Tokens
from trunkline.engine.batch import IGNORE
from trunkline.generation.prefixes import Prefixes
from trunkline.kv_cache.cache import StreamedCache

# Behind a cache, the logits of a whole continuation exist at once; in whole rows they are computed in tiles.
MOST_BEHIND_CACHE = 256

LogLikelihood = tuple[float, bool]


class Continuation(NamedTuple):
    """Tokens to score behind a context of at least one token."""

    context: Tokens
    ids: Tokens

    @property
    def total(self) -> int:
        """Number of tokens of the context and the continuation together."""
        return len(self.context) + len(self.ids)


def score_continuations(
    model: nn.Module, requests: Sequence[Continuation], *, batch_size: int, share: bool
) -> Iterator[tuple[int, LogLikelihood]]:
    """Score continuations.

    Args:
        model: a streamed model in evaluation mode.
        requests: continuations.
        batch_size: rows at a time: whole sequences, or continuations of one context.
        share: read a context once for all its continuations, and a long common beginning of contexts once for all of
            them. This holds keys and values of all layers; whole rows hold those of one layer. A continuation of more
            than 256 tokens is always a whole row.

    Yields:
        Index of a request, in any order, and a pair: its log likelihood, and whether each of its tokens was the most
        likely one. A continuation without tokens scores (0, True).

    Raises:
        ValueError: keys and values do not fit in the budgets.
    """
    groups: dict[bytes, list[int]] = defaultdict(list)
    whole = []
    for index, request in enumerate(requests):
        if not len(request.ids):
            yield index, (0.0, True)
        elif share and len(request.ids) <= MOST_BEHIND_CACHE:
            groups[hashlib.blake2b(request.context.tobytes()).digest()].append(index)
        else:
            whole.append(index)
    members = list(groups.values())
    alike = Prefixes([requests[group[0]].context for group in members]).sharing()
    shared = [group for at, group in enumerate(members) if len(group) > 1 or at in alike]
    whole += [group[0] for at, group in enumerate(members) if len(group) == 1 and at not in alike]
    # Rows of similar length go together; the longest first, so that a lack of memory shows at once.
    whole.sort(key=lambda index: -requests[index].total)
    for batch in _batches(whole, batch_size):
        yield from zip(batch, _score_rows(model, [requests[index] for index in batch]), strict=True)
    for at, cache in Prefixes([requests[group[0]].context for group in shared]).read(model):
        for batch in _batches(shared[at], batch_size):
            yield from zip(batch, _score_behind(model, cache, [requests[index].ids for index in batch]), strict=True)


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


def _score_rows(model: nn.Module, requests: Sequence[Continuation]) -> list[LogLikelihood]:
    """Score contexts with their continuations in one forward, a row each."""
    device = next(model.parameters()).device
    ids_BS = torch.zeros(len(requests), max(request.total for request in requests), dtype=torch.long)
    labels_BS, mask_BS = torch.full_like(ids_BS, IGNORE), torch.zeros_like(ids_BS)
    for row, request in enumerate(requests):
        begin, end = len(request.context), request.total
        ids_BS[row, :end] = torch.from_numpy(np.concatenate(request).astype(np.int64))
        labels_BS[row, begin:end] = ids_BS[row, begin:end]
        mask_BS[row, :end] = 1
    inputs = {"input_ids": ids_BS, "labels": labels_BS, "attention_mask": mask_BS}
    scores = streamed_forward(model, "score").score(**{name: value.to(device) for name, value in inputs.items()})
    # Positions without a label score 0. In fp32 a sum over a million tokens would lose digits.
    log_probs, greedy = scores.double().sum(-1).tolist()
    return [(a, int(b) == len(request.ids)) for a, b, request in zip(log_probs, greedy, requests, strict=True)]


def _score_behind(model: nn.Module, cache: StreamedCache, rows: Sequence[Tokens]) -> list[LogLikelihood]:
    """Score continuations of one cached context; its last logits predict their first tokens."""
    longest = max(map(len, rows))
    assert cache.logits is not None
    logits_BTV = cache.logits[:, -1:].expand(len(rows), -1, -1)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
    ids_BT = ids_BT.to(next(model.parameters()).device)
    if longest > 1:  # padding comes last, so no scored token sees it
        longer = trunkline.prefill(model, ids_BT[:, :-1], cache=cache.fork(), logits_to_keep=longest - 1)
        assert longer.logits is not None
        logits_BTV = torch.cat([logits_BTV, longer.logits], 1)
    return [_log_likelihood(logits_BTV[row, : len(ids)], ids_BT[row, : len(ids)]) for row, ids in enumerate(rows)]


def _log_likelihood(logits_TV: Tensor, ids_T: Tensor) -> LogLikelihood:
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    log_probs_T = logits_TV.gather(-1, ids_T[:, None])[:, 0] - logits_TV.logsumexp(-1)
    return math.fsum(log_probs_T.tolist()), bool((logits_TV.argmax(-1) == ids_T).all())
