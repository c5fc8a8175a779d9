"""Decoded tokens that leave the open end of a cache: as chunks of their tier, few and long ones."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch

from trunkline.attention.kv_store import KVStore
from trunkline.chunking import Chunk
from trunkline.kv_cache.budget import room_to_move
from trunkline.kv_cache.segment import KVSegment, stores_of

if TYPE_CHECKING:
    from trunkline.kv_cache.cache import StreamedCache
    from trunkline.kv_cache.writers import DecodeBuffer


def frozen(cache: StreamedCache, end: DecodeBuffer, joined: list[KVSegment]) -> KVSegment:
    """An open end as a stretch, with those before it that become one with it."""
    layers, start = range(len(cache)), joined[0].start if joined else end.start
    chunk = Chunk(0, 0, cache.own_part(0)[0].shape[2] + end.start - start)
    with_own_end = cache.room - cache.open_bytes(cache.batch_size)
    rooms = cache.room, max(with_own_end, 0), room_to_move(cache, cache.batch_size, len(chunk)), 0
    stores = stores_of(cache.tiers, cache.batch_size, [chunk], cache.widths, [0] * len(layers), rooms)
    pairs = [KVStore([chunk], 0, stores, (f"k {i}", f"v {i}")) for i in layers]
    with stores.close_on_error():
        for layer in layers:
            with contextlib.ExitStack() as stack:
                parts = [*(stack.enter_context(each.one(layer)) for each in joined), cache.own_part(layer)]
                k, v = (torch.cat([part[i] for part in parts], 2) for i in range(2))
                del parts
            assert k.shape[2] == len(chunk)
            pairs[layer].put(chunk, (k, v))
        stores.flush_all()
    return KVSegment(start, end.stop, cache.batch_size, [chunk], [(start, end.stop)], pairs, [0] * len(layers), stores)


def to_join(cache: StreamedCache, end: DecodeBuffer) -> list[KVSegment]:
    """Stretches of decoded tokens that become one with the open end: so that there are never many.

    Each is joined when as many tokens follow it, and so log(n) times in all.
    """
    found: list[KVSegment] = []
    if cache.part[1] > 1 or any(reach.window is not None for reach in cache.attention_spans):
        return found
    tokens, most = end.filled, cache.max_merged_tokens if cache.tiers.limited else math.inf
    for link in reversed(cache.links):
        stretch = link.stretch
        count, is_own = stretch.stop - stretch.start, len(stretch.owners) == 1 and link.rows is None
        is_whole = is_own and stretch.is_frozen and link.stop == stretch.stop and stretch.batch == end.batch
        if not is_whole or count > tokens or count + tokens > most:
            break
        found.insert(0, stretch)
        tokens += count
    return found
