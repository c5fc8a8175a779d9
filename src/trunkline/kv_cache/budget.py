"""Device bytes that a cache must leave free, so that decoding or another prompt can continue it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.kv_cache.segment import max_chunk_bytes, num_transit_buffers

if TYPE_CHECKING:
    from trunkline.kv_cache.cache import StreamedCache


def bytes_to_continue(cache: StreamedCache, batch: int, longest: int, hidden: int, tokens: int) -> int:
    """Return the device bytes that another chunk of prompt takes, or decoding if that is more.

    Args:
        cache: the cache.
        batch: rows.
        longest: tokens of the longest chunk that is read.
        hidden: bytes of a token's hidden state, in one row.
        tokens: this rank's tokens of a chunk of prompt.
    """
    prompt = num_transit_buffers(cache.tiers.prefetch) * batch * tokens * hidden + _transit_bytes(cache, batch, tokens)
    return cache.decode_buffer_bytes(batch) + max(prompt, bytes_to_move(cache, batch, longest))


def bytes_to_decode(cache: StreamedCache, batch: int, longest: int) -> int:
    """Return the device bytes without which not one token can be decoded; arguments as for `bytes_to_continue`."""
    new_buffer = cache.decode_buffer_bytes(batch) if cache.decode_buffer is None else 0
    return new_buffer + bytes_to_move(cache, batch, longest)


def bytes_to_move(cache: StreamedCache, batch: int, longest: int) -> int:
    """Return the device bytes that keys and values take while they are read, or flushed: the larger of both."""
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


def _transit_bytes(cache: StreamedCache, batch: int, tokens: int) -> int:
    """Return the device bytes of `tokens` tokens in flight to their tier."""
    return num_transit_buffers(cache.tiers.prefetch) * batch * tokens * max(map(sum, cache.token_bytes))
