"""Where the keys and values of a prompt will rest: decided before its first sweep, from sizes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from trunkline.attention.kv_store import KVStore
from trunkline.attention.mask import Range, RowMask
from trunkline.engine.memory_layout import BytesPerToken, advice_on
from trunkline.engine.setup import measure_token, probe_token
from trunkline.engine.step import StepState
from trunkline.kv_cache.budget import least_room, no_room_to_decode, room_to_go_on
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.segment import KVSegment, in_transit, reading_bytes
from trunkline.kv_cache.writers import SegmentWriter
from trunkline.offload.placement import Placement, StoreRequest
from trunkline.offload.stores import Stores


def bytes_per_token_of(run: StepState) -> list[tuple[int, int]]:
    """Bytes of a token's keys and values, of each layer and row; remembered with the tiers."""
    x_BCE = probe_token(run, differentiable=False)
    key = x_BCE.dtype, run.replay.compute_dtype(x_BCE.dtype)
    if key not in run.stores.tiers.bytes_per_token:
        run.stores.tiers.bytes_per_token[key] = measure_token(run, x_BCE)
    widths: BytesPerToken = run.stores.tiers.bytes_per_token[key]
    return [(layer["k"], layer["v"]) for layer in widths.layers]


def new_stretch(run: StepState, cache: StreamedCache, sights: Sequence[Sequence[RowMask]]) -> SegmentWriter:
    """A stretch for the tokens of a run, with its stores, which become the run's.

    Args:
        run: of the new tokens.
        cache: that they go on from.
        sights: what tokens see, of each layer.

    Raises:
        ValueError: it does not fit in the budgets.
    """
    count, batch, layers = len(run.rows), len(run.batch.input_ids_BS), range(len(sights))
    windowed = frozenset(i for i, reach in enumerate(run.attention_spans) if reach.window is not None)
    places = _places(run, cache.length)
    spare = cache.spare(run.batch.seq_len)
    held = [_most_held(run, places, sights[i], spare) if i in windowed else count for i in layers]
    limited, num_live = run.stores.tiers.limited, 0
    if limited:
        placement = _placed(run, cache, _Asked(held, windowed))
        run.stores = Stores(run.stores.tiers, placement)
        num_live = run.stores.num_resident(("lk", "lv"), count) if len(windowed) < len(layers) else 0
    stores = run.stores
    resident = [0 if limited or i in windowed else count for i in layers]
    pairs = [
        KVStore(run.rows, resident[i], stores, (f"k {i}", f"v {i}"), held[i] if i in windowed else None) for i in layers
    ]
    stretch = KVSegment(
        cache.length, cache.length + run.batch.seq_len, batch, run.rows, places, pairs, resident, stores
    )
    live = partial(KVStore, run.rows, num_live, stores, ("lk", "lv")) if num_live else None
    return SegmentWriter(stretch, windowed, spare, live, num_live)


def _places(run: StepState, offset: int) -> list[Range]:
    """(start, stop) of each chunk's tokens in the sequence, on whichever rank, without padding."""
    size = 1 if run.ranks.kv_gather is None else run.ranks.kv_gather.size
    bounds = [(chunk.start * size, min(chunk.stop * size, run.batch.seq_len)) for chunk in run.rows]
    return [(offset + start, offset + max(start, stop)) for start, stop in bounds]


def _most_held(run: StepState, places: list[Range], sight: Sequence[RowMask], spare: int) -> int:
    """Chunks of a layer with a window that are held at a time, at most, with so many tokens before the window."""
    firsts = [min(each.first_key(start) for each in sight) - spare for start, _ in places]
    met = [next(i for i, (_, stop) in enumerate(places) if stop > max(first, places[0][0])) for first in firsts]
    most = max(i - first + 1 for i, first in enumerate(met))
    # Where ranks hold parts, the first that the next chunk meets are sent for before this one is done.
    return min(most + (run.ranks.kv_gather is not None), len(places))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What layers ask for: how many of their chunks are held at a time, and which have a window."""

    held: list[int]
    windowed: frozenset[int]


def room_after(run: StepState, cache: StreamedCache, longest: int, hidden: int) -> int:
    """Bytes of the device that a run leaves free where it can: see `room_to_go_on`.

    Args:
        run: of new tokens.
        cache: that they go on from.
        longest: tokens of the longest chunk that is read.
        hidden: bytes of a token's hidden state, of a row.
    """
    tokens = run.config.chunk_tokens(run.batch.input_ids_BS.device) // run.ranks.size
    return room_to_go_on(cache, len(run.batch.input_ids_BS), longest, hidden, tokens)


def hidden_bytes(run: StepState) -> int:
    """Bytes of a token's hidden state, of a row."""
    return probe_token(run, differentiable=False).nbytes


def _placed(run: StepState, cache: StreamedCache, asked: _Asked) -> Placement:
    """A placement that leaves room for what follows, if there is one; how much becomes the cache's."""
    tiers, advice = run.stores.tiers, advice_on(run.config, run.stores.tiers, len(run.chunks[0]) * run.ranks.size)
    longest, hidden = max(map(len, run.rows)), hidden_bytes(run)
    requests = _requests(run, cache, asked, hidden)
    least = least_room(cache, len(run.batch.input_ids_BS), longest)
    for room in (room_after(run, cache, longest, hidden), least):
        with contextlib.suppress(ValueError):
            placement = tiers.place(requests, advice, headroom=room)
            cache.room = room
            return placement
    tiers.place(requests, advice)  # says what does not fit, if it is not the room
    raise ValueError(no_room_to_decode(least))


def _requests(run: StepState, cache: StreamedCache, asked: _Asked, hidden: int) -> list[StoreRequest]:
    """What the stores of a prefill ask of the tiers: buffers of the layer under way, hidden states, keys and values.

    Args:
        run: of the new tokens.
        cache: that they go on from.
        asked: by its layers.
        hidden: bytes of a token's hidden state, of a row.
    """
    prefetch, batch = run.stores.prefetch, len(run.batch.input_ids_BS)
    both = in_transit(prefetch)
    widest = [max(widths[which] for widths in cache.widths) * batch for which in (0, 1)]
    found = list[StoreRequest]()
    if len(asked.windowed) < len(asked.held):
        sizes = tuple(tuple(len(chunk) * width for chunk in run.rows) for width in widest)
        found.append(StoreRequest(("lk", "lv"), sizes, "live", 0, 0, persistent=False, resident_only=("lk", "lv")))
    states = tuple(len(chunk) * batch * hidden for chunk in run.chunks)
    found += [StoreRequest((f"pass {i}",), (states,), "pass", both, 0, persistent=False) for i in range(2)]
    for layer, widths in enumerate(cache.widths):
        counts = [len(chunk) * batch if chunk.index < asked.held[layer] else 0 for chunk in run.rows]
        kv = tuple(tuple(count * width for count in counts) for width in widths)
        found.append(StoreRequest((f"k {layer}", f"v {layer}"), kv, "kv", both, 0, persistent=True))
    if cache.links:  # these are read, too, whether or not any of the new are under way
        own = max(prefetch - 1, 1) * max(map(len, run.rows)) * batch * max(map(sum, cache.widths))
        earlier = max(reading_bytes(link.stretch, cache.widths) for link in cache.links)
        sizes = ((earlier + own,),)
        found.append(
            StoreRequest(
                ("earlier",), sizes, "kv", 1, 0, persistent=False, allow_resident=False, resident_only=("earlier",)
            )
        )
    return found
