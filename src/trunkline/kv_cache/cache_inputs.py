"""Arguments of a forward over a cache: checks before the first layer runs, and conversion to `NewTokens`.

Rows of different lengths are padded on the left, as transformers' `generate` pads them. Padding is a document of its
own, so that no token sees it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from trunkline.engine import documents
from trunkline.engine.batch import Batch
from trunkline.engine.documents import Starts
from trunkline.hf import inputs
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.extend import NewTokens

CACHE_ARGUMENTS = (
    "cache",
    "past_key_values",
)  # of the argument that is a cache, in one release of transformers or another
_IGNORED = ("cache_position",)


def cache_argument(model: Any) -> str:
    """Return the name of the cache argument of a model's forward."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), CACHE_ARGUMENTS[0])


def take_cache(given: dict[str, Any], name: str, new: Callable[[], StreamedCache]) -> StreamedCache | None:
    """Remove the arguments about a cache from those of a forward, and return the cache.

    Args:
        given: the arguments by name.
        name: of the model, for messages.
        new: makes an empty cache.

    Returns:
        The cache that was passed; a new one for `use_cache` or for an empty `DynamicCache`; None without a cache.

    Raises:
        ValueError: a cache of transformers holds tokens or is of another class, or labels were passed, too.
    """
    use_cache = given.pop("use_cache", None)
    caches = [value for value in (given.pop(each, None) for each in CACHE_ARGUMENTS) if value is not None]
    for each in _IGNORED:
        given.pop(each, None)
    if given.get("labels") is not None or given.get("shift_labels") is not None:
        if use_cache or caches:
            raise ValueError("labels go without a cache: leave use_cache and past_key_values out.")
        return None
    if not caches:
        return new() if use_cache else None
    given_cache = caches[0]
    if isinstance(given_cache, StreamedCache):
        return given_cache
    if type(given_cache) is not DynamicCache or getattr(given_cache, "offloading", False):
        raise ValueError(
            f"a {type(given_cache).__name__} (cache_implementation) has no effect on a streamed {name}: keys and "
            "values rest where the budgets of stream() say. Leave it out."
        )
    if given_cache.get_seq_length():
        raise ValueError(
            f"past_key_values is a {type(given_cache).__name__} that holds tokens: a streamed {name} goes on from a "
            "cache of its own, which trunkline.prefill(model, input_ids) gives."
        )
    cache = new()  # `generate` made an empty cache for a new generation: ours takes its place
    if any(getattr(layer, "record_past", False) for layer in given_cache.layers):
        cache.activate_past_recording()
    return cache


def read_new_tokens(given: dict[str, Any], name: str, vocab_size: int, cache: StreamedCache) -> NewTokens:
    """Check the arguments of a forward over a cache, and convert them to new tokens.

    Args:
        given: the arguments by name, after `take_cache`.
        name: of the model, for messages.
        vocab_size: number of token embeddings of the model.
        cache: the tokens read before; may be empty.

    Raises:
        ValueError: an argument has a wrong shape or range, or does not continue where the cache ends.
    """
    ids_BS = inputs.token_ids(given, name, vocab_size)
    count = ids_BS.shape[1]
    cache.require_rows(len(ids_BS))
    keep = given.get("logits_to_keep") or 1
    if not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep={keep!r}: give a number of last positions (0 and 1 both give the last).")
    padding = _padding(given.get("attention_mask"), ids_BS, cache)
    read = _continued if cache.length else _first_tokens
    starts, positions = read(given, ids_BS, padding, cache)
    following = torch.tensor([[count - 1]]) if positions is None else positions[:, -1:]
    return NewTokens(Batch(ids_BS, positions, documents=starts), following + 1, min(keep, count))


def _padding(mask: Any, ids_BS: Tensor, cache: StreamedCache) -> list[int] | None:
    """Return the padding on the left of each row of the whole sequence, in tokens; None without a mask."""
    if mask is None:
        return None
    rows, count = ids_BS.shape
    widths = (cache.length + count, count)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != rows or mask.shape[1] not in widths:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be of shape {(rows, widths[0])}, all tokens so far, not {shape}.")
    real = (mask != 0).cpu()
    padding = real.shape[1] - real.sum(1)
    if not torch.equal(real, torch.arange(real.shape[1]) >= padding[:, None]):
        raise ValueError(
            "attention_mask must be 0 for padding on the left and 1 for tokens (tokenizer.padding_side='left'): with a "
            "cache the next token comes on the right. trunkline.prefill takes padding on the right, too."
        )
    if cache.length and mask.shape[1] == count:
        if bool(padding.any()):
            raise ValueError("attention_mask has padding between the cache and the new tokens: leave it out.")
        return None
    counts: list[int] = padding.tolist()
    if max(counts) >= real.shape[1]:
        raise ValueError("attention_mask has a row without any token: give at least one a row.")
    return counts


def _first_tokens(
    given: dict[str, Any], ids_BS: Tensor, padding: list[int] | None, cache: StreamedCache
) -> tuple[tuple[Starts, ...], Tensor | None]:
    """Return the starts of documents, and position ids, for the first tokens of a cache."""
    if padding is None or not any(padding):
        return documents.read(given, ids_BS, None)
    first = torch.tensor(padding, device=ids_BS.device)[:, None]
    indices = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    positions = given.get("position_ids")
    if positions is None:
        positions = indices - first
    elif not isinstance(positions, Tensor) or positions.ndim > 2:
        documents.read({"position_ids": positions}, ids_BS, None)  # raises the error that names what is wrong
        raise ValueError("position_ids of three dimensions do not go with padding: give those of text, (B, S).")
    else:
        rows = positions.expand(len(padding), -1).where(indices >= first, indices)
        positions = documents.read({"position_ids": rows}, ids_BS, None).position_ids
    assert positions is not None
    positions = positions.masked_fill(indices < first, 0)
    if any(given.get(each) is not None for each in documents.ARGUMENTS):
        raise ValueError("packed documents and padding on the left do not go together: pack without padding.")
    starts = documents.read({"position_ids": positions}, ids_BS, None).starts
    of_rows = starts * len(padding) if len(starts) == 1 else starts
    pairs = zip(of_rows, padding, strict=True)
    return tuple(tuple(sorted({0, pad, *(at for at in row if at >= pad)})) for row, pad in pairs), positions


def _continued(
    given: dict[str, Any], ids_BS: Tensor, padding: list[int] | None, cache: StreamedCache
) -> tuple[tuple[Starts, ...], Tensor]:
    """Return the starts of documents of the whole sequence, and position ids of tokens that continue a cache."""
    rows, count = ids_BS.shape
    cached = cache.documents
    repeats = max(rows // cache.batch_size, 1)
    row_starts = tuple(
        starts for starts in (cached * cache.batch_size if len(cached) == 1 else cached) for _ in range(repeats)
    )
    if padding is not None and any(
        pad and (len(starts) < 2 or starts[1] != pad) for pad, starts in zip(padding, row_starts, strict=False)
    ):
        raise ValueError(
            "attention_mask has other padding than the rows that the cache was made of: pass the mask of all tokens so "
            "far, with as much padding on the left."
        )
    for argument in documents.ARGUMENTS:
        if given.get(argument) is not None:
            raise ValueError(
                f"{argument} goes with the first tokens of a cache: pass position_ids, from 0 where one begins."
            )
    following = cache.next_positions.to(ids_BS.device)
    following = following.repeat_interleave(repeats, 0) if len(following) > 1 else following
    positions = given.get("position_ids")
    if positions is None:
        return cached if len(cached) == 1 else row_starts, following + torch.arange(count, device=ids_BS.device)
    new = documents.read({"position_ids": positions}, ids_BS, None)
    assert new.position_ids is not None
    continues = (new.position_ids[:, :1] == following).expand(rows, 1).flatten().tolist()
    begins = (new.position_ids[:, 0] == 0).expand(rows).tolist()
    if not all(a or b for a, b in zip(continues, begins, strict=True)):
        raise ValueError(
            f"position_ids begin at {new.position_ids[:, 0].tolist()}, and the cache ends before "
            f"{following.flatten().tolist()}: go on from there, or begin a document at 0."
        )
    new_starts = new.starts * rows if len(new.starts) == 1 else new.starts
    of_all = tuple(
        (*starts, *(cache.length + at for at in own[1 if same else 0 :]))
        for starts, own, same in zip(row_starts, new_starts, continues, strict=True)
    )
    return (of_all[:1] if len(set(of_all)) == 1 else of_all), new.position_ids
