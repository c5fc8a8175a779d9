"""Placement of a prompt's keys and values in tiers, decided from sizes alone before the first layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trunkline.attention.kv_store import KVStore
from trunkline.attention.mask import Range, RowMask
from trunkline.engine.memory_layout import BytesPerToken, advice_on
from trunkline.engine.setup import measure_token, probe_token
from trunkline.engine.step import StepState
from trunkline.kv_cache.budget import bytes_to_continue, bytes_to_decode, place_leaving
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.segment import KVSegment, num_transit_buffers, read_bytes
from trunkline.kv_cache.writers import SegmentWriter
from trunkline.offload.placement import Placement, StoreRequest
from trunkline.offload.stores import Stores


def kv_token_bytes(state: StepState) -> list[tuple[int, int]]:
    """Return for each layer the bytes of a token's keys and of its values, in one row; cached with the tiers."""
    x_BCE = probe_token(state, differentiable=False)
    key = x_BCE.dtype, state.replay.compute_dtype(x_BCE.dtype)
    if key not in state.stores.tiers.bytes_per_token:
        state.stores.tiers.bytes_per_token[key] = measure_token(state, x_BCE)
    widths: BytesPerToken = state.stores.tiers.bytes_per_token[key]
    return [(layer["k"], layer["v"]) for layer in widths.layers]


def new_segment(state: StepState, cache: StreamedCache, row_masks: Sequence[Sequence[RowMask]]) -> SegmentWriter:
    """Create an empty segment for new tokens, this rank's part of it, and its writer.

    With budgets this places its stores, which become the step's stores, and sets `cache.spare_bytes`.

    Args:
        state: step of the new tokens; its `stores` may be replaced.
        cache: the cache that they extend; the segment is not appended to it yet.
        row_masks: for each layer, the mask of each row, or one for all rows.

    Raises:
        ValueError: the segment does not fit in the budgets.
    """
    count, batch, layers = len(state.rows), len(state.batch.input_ids_BS), range(len(row_masks))
    windowed = frozenset(i for i, span in enumerate(state.attention_spans) if span.window is not None)
    ranges = _token_ranges(state, cache.length)
    margin = cache.margin(state.batch.seq_len)
    held = [_num_live(state, ranges, row_masks[i], margin) if i in windowed else count for i in layers]
    limited, num_working = state.stores.tiers.limited, 0
    if limited:
        placement = _place(state, cache, held, windowed)
        state.stores = Stores(state.stores.tiers, placement)
        num_working = state.stores.num_resident(("lk", "lv"), count) if len(windowed) < len(layers) else 0
    stores = state.stores
    resident = [0 if limited or i in windowed else count for i in layers]
    kv = [
        KVStore(state.rows, resident[i], stores, (f"k {i}", f"v {i}"), held[i] if i in windowed else None)
        for i in layers
    ]
    stop = cache.length + state.batch.seq_len
    segment = KVSegment(cache.length, stop, batch, state.rows, ranges, kv, resident, stores)
    working_kv = partial(KVStore, state.rows, num_working, stores, ("lk", "lv")) if num_working else None
    return SegmentWriter(segment, windowed, margin, working_kv, num_working)


def _token_ranges(state: StepState, offset: int) -> list[Range]:
    """Return each chunk's (start, stop) over all ranks, without padding; `offset` tokens are cached before."""
    size = 1 if state.ranks.kv_gather is None else state.ranks.kv_gather.size
    bounds = [(chunk.start * size, min(chunk.stop * size, state.batch.seq_len)) for chunk in state.rows]
    return [(offset + start, offset + max(start, stop)) for start, stop in bounds]


def _num_live(state: StepState, ranges: list[Range], masks: Sequence[RowMask], margin: int) -> int:
    """Return the most chunks that a layer with a window holds at a time, with a margin of tokens before the window."""
    firsts = [min(mask.first_key(start) for mask in masks) - margin for start, _ in ranges]
    needed = [next(i for i, (_, stop) in enumerate(ranges) if stop > max(first, ranges[0][0])) for first in firsts]
    most = max(i - first + 1 for i, first in enumerate(needed))
    # Where ranks gather keys, the first span of the next chunk is sent for before this chunk is done.
    return min(most + (state.ranks.kv_gather is not None), len(ranges))


def spare_after(state: StepState, cache: StreamedCache, longest: int, hidden: int) -> int:
    """Return the device bytes to leave free for later tokens; see `bytes_to_continue`.

    Args:
        state: step of the new tokens.
        cache: the cache that they extend.
        longest: tokens of the longest chunk that is read.
        hidden: bytes of a token's hidden state, in one row.
    """
    tokens = state.config.chunk_tokens(state.batch.input_ids_BS.device) // state.ranks.size
    return bytes_to_continue(cache, len(state.batch.input_ids_BS), longest, hidden, tokens)


def hidden_bytes(state: StepState) -> int:
    """Return the bytes of a token's hidden state, in one row."""
    return probe_token(state, differentiable=False).nbytes


def _place(state: StepState, cache: StreamedCache, held: list[int], windowed: frozenset[int]) -> Placement:
    """Place the stores so that the device keeps room for another prompt, or at least for decoding.

    Sets `cache.spare_bytes` to the bytes left free.
    """
    tiers = state.stores.tiers
    advice = advice_on(state.config, tiers, len(state.chunks[0]) * state.ranks.size)
    longest, hidden = max(map(len, state.rows)), hidden_bytes(state)
    requests = _requests(state, cache, held, windowed, hidden)
    least = bytes_to_decode(cache, len(state.batch.input_ids_BS), longest)
    spare = spare_after(state, cache, longest, hidden), least
    placement, cache.spare_bytes = place_leaving(tiers, requests, advice, spare)
    return placement


def _requests(
    state: StepState, cache: StreamedCache, held: list[int], windowed: frozenset[int], hidden: int
) -> list[StoreRequest]:
    """Return the store requests of a prefill: buffers of the current layer, hidden states, keys and values.

    Each layer holds `held` chunks at a time; a token's hidden state has `hidden` bytes in one row.
    """
    prefetch, batch = state.stores.prefetch, len(state.batch.input_ids_BS)
    both = num_transit_buffers(prefetch)
    widest = [max(widths[which] for widths in cache.token_bytes) * batch for which in (0, 1)]
    requests = list[StoreRequest]()
    if len(windowed) < len(held):
        sizes = tuple(tuple(len(chunk) * width for chunk in state.rows) for width in widest)
        requests.append(StoreRequest(("lk", "lv"), sizes, "live", 0, 0, persistent=False, resident_only=("lk", "lv")))
    states = tuple(len(chunk) * batch * hidden for chunk in state.chunks)
    requests += [StoreRequest((f"pass {i}",), (states,), "pass", both, 0, persistent=False) for i in range(2)]
    for layer, widths in enumerate(cache.token_bytes):
        counts = [len(chunk) * batch if chunk.index < held[layer] else 0 for chunk in state.rows]
        kv = tuple(tuple(count * width for count in counts) for width in widths)
        requests.append(StoreRequest((f"k {layer}", f"v {layer}"), kv, "kv", both, 0, persistent=True))
    if cache.segments:  # they are read while new keys and values move, too
        own = max(prefetch - 1, 1) * max(map(len, state.rows)) * batch * max(map(sum, cache.token_bytes))
        earlier = max(read_bytes(view.segment, cache.token_bytes) for view in cache.segments)
        sizes = ((earlier + own,),)
        requests.append(
            StoreRequest(
                ("earlier",), sizes, "kv", 1, 0, persistent=False, allow_resident=False, resident_only=("earlier",)
            )
        )
    return requests
