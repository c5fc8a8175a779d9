"""What keys and values leave of the device to what comes after them: a cache is there to go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.kv_cache.segment import in_transit, pair_bytes

if TYPE_CHECKING:
    from trunkline.kv_cache.cache import StreamedCache


def room_to_go_on(cache: StreamedCache, batch: int, longest: int, hidden: int, tokens: int) -> int:
    """Bytes of the device that going on takes: decoded tokens where they collect, and beside them moves or a prompt.

    Args:
        cache: whose.
        batch: rows.
        longest: tokens of the longest chunk that is read.
        hidden: bytes of a token's hidden state, of a row.
        tokens: of a prompt's chunk that this rank has.
    """
    prompt = in_transit(cache.tiers.prefetch) * batch * tokens * hidden + _moving(cache, batch, tokens)
    return cache.open_bytes(batch) + max(prompt, room_to_move(cache, batch, longest))


def least_room(cache: StreamedCache, batch: int, longest: int) -> int:
    """Those without which no token can be decoded after it: the same without a prompt."""
    new_end = cache.open_bytes(batch) if cache.open_end is None else 0
    return new_end + room_to_move(cache, batch, longest)


def room_to_move(cache: StreamedCache, batch: int, longest: int) -> int:
    """Bytes of the device that keys and values take as they are read, or decoded ones as they move to their tier."""
    if not cache.widths:
        return 0  # there are no budgets
    earlier = max((pair_bytes(link.stretch, cache.widths) for link in cache.links), default=0)
    longest_pair = max(earlier, longest * batch * max(map(sum, cache.widths)))
    return max(_moving(cache, batch, cache.capacity), (cache.tiers.prefetch + 1) * longest_pair)


def no_room_to_decode(nbytes: int) -> str:
    """What to say where there is none."""
    return (
        f"device_budget has no room for the {nbytes:,} bytes in which decoded tokens collect and move: raise it, "
        "or use a smaller batch."
    )


def _moving(cache: StreamedCache, batch: int, tokens: int) -> int:
    """Bytes of the device that so many tokens take on their way to their tier."""
    return in_transit(cache.tiers.prefetch) * batch * tokens * max(map(sum, cache.widths))
