"""Placement of keys and values, and the device bytes left free, so that decoding or another prompt can continue."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trunkline.chunking import Chunk
from trunkline.kv_cache.segment import max_chunk_bytes, num_transit_buffers
from trunkline.offload.placement import FitHints, Placement, StoreRequest
from trunkline.offload.stores import Stores, Tiers

if TYPE_CHECKING:
    from trunkline.kv_cache.cache import StreamedCache

ADVICE = FitHints(less="a shorter input or a smaller batch")


def bytes_to_continue(cache: StreamedCache, batch: int, longest: int, hidden: int, tokens: int) -> int:
    """Return the device bytes of a decode buffer, and of another chunk of prompt or of decoding, whichever is more.

    Args:
        cache: the cache; its `token_bytes` must be known.
        batch: rows.
        longest: tokens of the longest chunk that is read.
        hidden: bytes of a token's hidden state, in one row.
        tokens: this rank's tokens of a chunk of prompt.
    """
    prompt = num_transit_buffers(cache.tiers.prefetch) * batch * tokens * hidden + _transit_bytes(cache, batch, tokens)
    return cache.decode_buffer_bytes(batch) + max(prompt, bytes_to_move(cache, batch, longest))


def bytes_to_decode(cache: StreamedCache, batch: int, longest: int) -> int:
    """Return the device bytes without which not one token can be decoded; arguments as for `bytes_to_continue`.

    They include a decode buffer unless the cache has one.
    """
    new_buffer = cache.decode_buffer_bytes(batch) if cache.decode_buffer is None else 0
    return new_buffer + bytes_to_move(cache, batch, longest)


def bytes_to_move(cache: StreamedCache, batch: int, longest: int) -> int:
    """Return the device bytes that keys and values take while they are read, or flushed: the larger of both.

    0 without budgets.
    """
    if not cache.token_bytes:
        return 0  # there are no budgets
    earlier = max((max_chunk_bytes(view.segment, cache.token_bytes) for view in cache.segments), default=0)
    longest_pair = max(earlier, longest * batch * max(map(sum, cache.token_bytes)))
    return max(_transit_bytes(cache, batch, cache.capacity), (cache.tiers.prefetch + 1) * longest_pair)


def no_room_message(nbytes: int) -> str:
    """Return the error text for a device budget without room to decode."""
    return (
        f"device_budget has no room for the {nbytes:,} bytes in which decoded tokens collect and move: raise it, "
        "or use a smaller batch."
    )


def place_leaving(
    tiers: Tiers, requests: Sequence[StoreRequest], advice: FitHints, spare_bytes: Sequence[int]
) -> tuple[Placement, int]:
    """Place stores so that device bytes stay free; return the placement and their number.

    The first of `spare_bytes` that fits is taken.

    Raises:
        ValueError: the stores do not fit in the budgets, or leave no room.
    """
    for spare in spare_bytes:
        with contextlib.suppress(ValueError):
            return tiers.place(requests, advice, headroom=spare), spare
    tiers.place(requests, advice)  # raises the error that names the tier, unless only the room is lacking
    raise ValueError(no_room_message(spare_bytes[-1]))


def make_stores(
    tiers: Tiers, batch: int, chunks: Sequence[Chunk], token_bytes: Sequence[Sequence[int]],
    num_dropped: Sequence[int], spare_bytes: Sequence[int],
) -> Stores:  # fmt: skip
    """Place the stores of a segment whose tokens exist already; without budgets there is nothing to place.

    Args:
        tiers: of the model.
        batch: rows.
        chunks: this rank's part of each chunk of the segment.
        token_bytes: for each layer, bytes of a token's keys and of its values, in one row.
        num_dropped: for each layer, chunks that it goes without, counted from the first.
        spare_bytes: see `place_leaving`.

    Raises:
        ValueError: the segment does not fit in the budgets, or leaves no room.
    """
    if not tiers.limited:
        return Stores(tiers)
    transit, requests = num_transit_buffers(tiers.prefetch), []
    for layer, pair in enumerate(token_bytes):
        counts = [0 if chunk.index < num_dropped[layer] else len(chunk) * batch for chunk in chunks]
        sizes = tuple(tuple(count * nbytes for count in counts) for nbytes in pair)
        requests.append(StoreRequest((f"k {layer}", f"v {layer}"), sizes, "kv", transit, 0, persistent=True))
    return Stores(tiers, place_leaving(tiers, requests, ADVICE, spare_bytes)[0])


def _transit_bytes(cache: StreamedCache, batch: int, tokens: int) -> int:
    """Return the device bytes of `tokens` tokens in flight to their tier."""
    return num_transit_buffers(cache.tiers.prefetch) * batch * tokens * max(map(sum, cache.token_bytes))
