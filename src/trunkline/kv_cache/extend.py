"""The forward of new tokens over a cache: prefill is the first of these, a decoded token each that follows.

Where everything rests on the device a chunk goes through all layers before the next begins: beside keys and values
nothing is as long as the sequence then. Where budgets move keys and values out, or ranks exchange, a layer has all its
chunks first, as in training: what leaves the device, and parameters that are gathered, move once for a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trunkline.attention.mask import AttentionSpan
from trunkline.chunking import Chunk, split
from trunkline.config import StreamConfig
from trunkline.engine import sweeps
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Decoder
from trunkline.engine.documents import Starts
from trunkline.engine.ranks import Ranks, padded_length
from trunkline.engine.replay import ReplayContext
from trunkline.engine.step import StepState
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.cached_attention import CachedCore, CacheForward
from trunkline.kv_cache.segment import pair_bytes, reading_bytes
from trunkline.kv_cache.segment_placement import bytes_per_token_of, hidden_bytes, new_stretch, room_after
from trunkline.kv_cache.writers import DecodeBuffer, SegmentWriter
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader
from trunkline.offload.stores import Stores, Tiers

_DEEP = 8  # chunks of keys that few new tokens have on the device at a time: more bring nothing


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens over a cache.

    Attributes:
        batch: their ids and positions.
        documents: first tokens of documents in the whole sequence, of each row, or once for all.
        next_positions: position ids of the token after the last, (1, 1) or (B, 1).
        logits_to_keep: of so many last positions logits are wanted.
    """

    batch: Batch
    documents: tuple[Starts, ...]
    next_positions: Tensor
    logits_to_keep: int = 1


def extend(
    decoder: Decoder,
    config: StreamConfig,
    tiers: Tiers,
    ranks: Ranks,
    conditions: ReplayContext,
    reaches: Sequence[AttentionSpan],
    cache: StreamedCache,
    new: NewTokens,
) -> Tensor:
    """Have a cache read new tokens.

    Args:
        decoder: the model, with what is in no layer present.
        config: settings.
        tiers: of the model.
        ranks: that share the sequence.
        conditions: under which it runs.
        reaches: of each layer's attention.
        cache: of this model.
        new: tokens.

    Returns:
        Logits (B, n, V) of the last n positions, as many as are wanted.

    Raises:
        ValueError: rows do not match, or keys and values do not fit in the budgets.
    """
    count = new.batch.seq_len
    in_place = count <= cache.capacity
    chunks = [Chunk(0, 0, count)]
    if in_place:
        ranks = ranks.replicated
    else:
        chunks = split(padded_length(count, ranks.chunk_multiple), config.chunk_tokens(new.batch.input_ids_BS.device))
    own, rows = [ranks.local_tokens(chunk) for chunk in chunks], [ranks.query_rows(chunk) for chunk in chunks]
    run = StepState(decoder, config, new.batch, conditions, ranks, own, rows, [], [], [], reaches, Stores(tiers))
    total = cache.length + count
    found = {reach: reach.row_masks(new.documents, total) for reach in set(reaches)}
    sights = [found[reach] for reach in reaches]
    with conditions.restored(), decoder.streamed_attention(), torch.no_grad():
        cache.begin(len(new.batch.input_ids_BS))
        if tiers.limited and not cache.widths:
            cache.widths = bytes_per_token_of(run)
            cache.room = room_after(run, cache, 0, hidden_bytes(run))
        by_chunk = len(chunks) == 1 or not (tiers.limited or ranks.size > 1 or decoder.is_sharded)
        if in_place:
            writer: SegmentWriter | DecodeBuffer = cache.open_end_for(count)
        else:
            cache.freeze()
            writer = new_stretch(run, cache, sights)
        extension = CacheForward(
            cache.links, writer, offset=cache.length, chunks=rows, sights=sights, batch=len(new.batch.input_ids_BS),
            kernel=config.attn_kernel, ranks=ranks, part=cache.part if in_place else (0, 1), by_chunk=by_chunk,
            prefetch=_depth(cache) if in_place else None,
        )  # fmt: skip
        with run.stores.close_on_error(), extension.feed:
            sweep = _by_chunk if by_chunk else _by_layer
            x_BTE = sweep(run, extension, new.logits_to_keep)
            run.stores.flush_all()
            logits = decoder.head(x_BTE)
        if isinstance(writer, SegmentWriter):
            writer.end_layer()
            if tiers.limited:
                writer.stretch.stores.limit_transient(reading_bytes(writer.stretch, cache.widths))
            cache.append(writer.stretch)
        else:
            writer.grown()
        positions = new.batch.positions(Chunk(0, 0, count))
        cache.grown(total, new.documents, new.next_positions, logits, new.batch.input_ids_BS, positions)
    return logits


def _by_chunk(run: StepState, extension: CacheForward, keep: int) -> Tensor:
    """Each chunk through all layers; gives the last hidden states (B, keep, E)."""
    layers = range(run.decoder.num_layers)
    cores, found = [extension.core(layer) for layer in layers], []
    for chunk in run.chunks:
        run.report("embed", -1, chunk.index, len(run.chunks))
        run.replay.seed(-1, chunk.index)
        with run.decoder.recorded_layers(run.batch, chunk) as x_BCE:
            for layer in layers:
                run.report("forward", layer, chunk.index, len(run.chunks))
                following = layer + 1 if layer + 1 < len(layers) else None
                with run.decoder.unsharded(layer, following=following):
                    attention = run.attention(layer, chunk, cores[layer].forward)
                    x_BCE = run.decoder.layer(layer, x_BCE, run.batch, chunk, attention)
        if _is_wanted(run, chunk, keep):
            found.append(run.ranks.gather_tokens(x_BCE))
    return _last(run, found, keep)


def _by_layer(run: StepState, extension: CacheForward, keep: int) -> Tensor:
    """All chunks through each layer; gives the last hidden states (B, keep, E)."""
    sweeps.embed_forward(run, differentiable=False)
    num_layers = run.decoder.num_layers
    for layer in range(num_layers):
        outputs = run.sequence(run.layout.input(layer + 1))
        with run.decoder.unsharded(layer, following=layer + 1 if layer + 1 < num_layers else None):
            inputs, core = run.read_inputs(layer, take=True), extension.core(layer)
            run.ranks.interleave(
                partial(_chunk_of_layer, run, layer, core, inputs, outputs, chunk) for chunk in run.chunks
            )
            inputs.release()
        run.inputs.append(outputs)
    wanted = [chunk.index for chunk in run.chunks if _is_wanted(run, chunk, keep)]
    found = [run.ranks.gather_tokens(x_BCE) for x_BCE in run.inputs[-1].read(wanted)]
    run.inputs[-1].clear()
    return _last(run, found, keep)


def _chunk_of_layer(
    run: StepState, layer: int, core: CachedCore, inputs: Reader, outputs: ChunkedSequence, chunk: Chunk
) -> None:
    run.report("forward", layer, chunk.index, len(run.chunks))
    x_BCE = inputs.next()
    attention = run.attention(layer, chunk, core.forward)
    outputs.stash(chunk.index, run.decoder.layer(layer, x_BCE, run.batch, chunk, attention))


def _depth(cache: StreamedCache) -> int:
    """Chunks of keys, as of values, that few new tokens have on the device at a time: `prefetch`, or more if they fit.

    The rest of a layer takes a token as long as several chunks take to arrive: with few, the lane would wait for it.
    """
    tiers, room = cache.tiers, cache.tiers.unreserved_bytes("device")
    if room is None or tiers.prefetch == 1 or not cache.links:
        return tiers.prefetch
    pair = max(pair_bytes(link.stretch, cache.widths) for link in cache.links)
    return max(tiers.prefetch, min(room // pair - 1, _DEEP))  # less one that was handed out before


def _is_wanted(run: StepState, chunk: Chunk, keep: int) -> bool:
    """Whether a chunk has some of the last tokens, padding aside."""
    stop = sum(len(each) for each in run.chunks[: chunk.index + 1]) * run.ranks.size
    return stop > run.batch.seq_len - keep


def _last(run: StepState, found: list[Tensor], keep: int) -> Tensor:
    tail = torch.cat(found, dim=1)
    padding = sum(map(len, run.chunks)) * run.ranks.size - run.batch.seq_len
    stop = tail.shape[1] - padding
    return tail[:, stop - keep : stop]
