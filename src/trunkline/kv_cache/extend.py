"""The forward of new tokens over a cache: prefill, and each decoded token after it.

Where everything rests on the device a chunk goes through all layers before the next chunk begins: nothing but keys and
values is then as long as the sequence. With budgets, over ranks, or with sharded parameters, all chunks go through a
layer before the next layer begins, as in training: keys and values that leave the device, and parameters that are
gathered, move once for a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trunkline.chunking import Chunk, split
from trunkline.config import StreamConfig
from trunkline.engine import sweeps
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Decoder
from trunkline.engine.ranks import Ranks, padded_length
from trunkline.engine.replay import ReplayContext
from trunkline.engine.step import StepState
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.cached_attention import CacheForward
from trunkline.kv_cache.segment import max_chunk_bytes
from trunkline.kv_cache.segment_placement import hidden_bytes, kv_token_bytes, new_segment, spare_after
from trunkline.kv_cache.writers import DecodeBuffer, SegmentWriter
from trunkline.offload.stores import Stores

_MAX_PREFETCH = 8  # chunks of keys that decoding has on the device at a time: more are no faster


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens over a cache.

    Attributes:
        batch: ids and positions; its documents are those of the whole sequence.
        next_positions: position ids of the token after the last, (1, 1) or (B, 1).
        logits_to_keep: last positions whose logits are returned.
    """

    batch: Batch
    next_positions: Tensor
    logits_to_keep: int = 1


def extend(
    decoder: Decoder,
    config: StreamConfig,
    ranks: Ranks,
    replay: ReplayContext,
    cache: StreamedCache,
    new: NewTokens,
) -> Tensor:
    """Read new tokens into a cache; all ranks call this with the same tokens.

    After an error the cache may be changed: the caller restores it with `StreamedCache.rollback`.

    Args:
        decoder: the model, with the parameters outside its layers unsharded.
        config: settings of `stream`.
        ranks: share the sequence. They divide the new tokens if these are more than a decode buffer holds.
        replay: random state, autocast and kernels of the forward.
        cache: of this model; extended in place.
        new: the new tokens.

    Returns:
        Logits (B, n, V) of the last n positions, n being `new.logits_to_keep`.

    Raises:
        ValueError: rows do not match, or keys and values do not fit in the budgets.
    """
    count = new.batch.seq_len
    in_place = count <= cache.capacity  # few tokens: every rank computes all of them
    chunks = [Chunk(0, 0, count)]
    if in_place:
        ranks = ranks.replicated
    else:
        chunks = split(padded_length(count, ranks.chunk_multiple), config.chunk_tokens(new.batch.input_ids_BS.device))
    rows = [ranks.query_rows(chunk) for chunk in chunks]
    state = StepState(
        decoder=decoder,
        config=config,
        batch=new.batch,
        replay=replay,
        ranks=ranks,
        chunks=[ranks.local_tokens(chunk) for chunk in chunks],
        rows=rows,
        attention_spans=cache.attention_spans,
        stores=Stores(cache.tiers),
    )
    total = cache.length + count
    masks = {span: span.row_masks(new.batch.documents, total) for span in set(cache.attention_spans)}
    row_masks = [masks[span] for span in cache.attention_spans]
    limited = cache.tiers.limited
    with replay.restored(), decoder.streamed_attention(), torch.no_grad():
        cache.expand_rows(len(new.batch.input_ids_BS))
        if limited and not cache.token_bytes:
            cache.token_bytes = kv_token_bytes(state)
            cache.spare_bytes = spare_after(state, cache, 0, hidden_bytes(state))
        by_chunk = len(chunks) == 1 or not (limited or ranks.size > 1 or decoder.is_sharded)
        if in_place:
            writer: SegmentWriter | DecodeBuffer = cache.decode_buffer_for(count)
        else:
            cache.flush()
            writer = new_segment(state, cache, row_masks)
        extension = CacheForward(
            cache.segments,
            writer,
            offset=cache.length,
            chunks=rows,
            row_masks=row_masks,
            kernel=config.attn_kernel,
            ranks=ranks,
            part=cache.part if in_place else (0, 1),
            by_chunk=by_chunk,
            prefetch=_decode_prefetch(cache) if in_place else None,
        )
        with state.stores.close_on_error(), extension.feed:
            sweep = _by_chunk if by_chunk else _by_layer
            x_BTE = sweep(state, extension, new.logits_to_keep)
            state.stores.flush_all()
            logits = decoder.head(x_BTE)
        if isinstance(writer, SegmentWriter):
            writer.end_layer()
            cache.append_segment(writer.segment)
        else:
            writer.commit()
        positions = new.batch.positions(Chunk(0, 0, count))
        cache.commit(total, new.batch.documents, new.next_positions, logits, new.batch.input_ids_BS, positions)
    return logits


def _by_chunk(state: StepState, extension: CacheForward, keep: int) -> Tensor:
    """Run each chunk through all layers; return the last hidden states (B, keep, E)."""
    layers = range(state.decoder.num_layers)
    states = []
    for chunk in state.chunks:
        state.report("embed", -1, chunk.index, len(state.chunks))
        state.replay.seed(-1, chunk.index)
        with state.decoder.recorded_layers(state.batch, chunk) as x_BCE:
            for layer in layers:
                state.report("forward", layer, chunk.index, len(state.chunks))
                following = layer + 1 if layer + 1 < len(layers) else None
                with state.decoder.unsharded(layer, following=following):
                    attend = state.begin_layer(layer, chunk, partial(extension.attend, layer))
                    x_BCE = state.decoder.layer(layer, x_BCE, state.batch, chunk, attend)
        if _is_kept(state, chunk, keep):
            states.append(state.ranks.gather_tokens(x_BCE))
    return _last(state, states, keep)


def _by_layer(state: StepState, extension: CacheForward, keep: int) -> Tensor:
    """Run all chunks through each layer; return the last hidden states (B, keep, E)."""
    sweeps.embed_forward(state, differentiable=False)
    num_layers = state.decoder.num_layers
    for layer in range(num_layers):
        outputs = state.sequence(state.layout.input(layer + 1))
        with state.decoder.unsharded(layer, following=layer + 1 if layer + 1 < num_layers else None):
            inputs = state.read_inputs(layer, take=True)
            state.ranks.interleave(state.chunk_runs(layer, inputs, outputs, partial(extension.attend, layer)))
            inputs.release()
        state.inputs.append(outputs)
    kept = [chunk.index for chunk in state.chunks if _is_kept(state, chunk, keep)]
    states = [state.ranks.gather_tokens(x_BCE) for x_BCE in state.inputs[-1].read(kept)]
    state.inputs[-1].clear()
    return _last(state, states, keep)


def _decode_prefetch(cache: StreamedCache) -> int:
    """Return the chunks of keys, as of values, that decoding has on the device: `prefetch`, or more if they fit.

    While the rest of a layer runs, several chunks can be fetched: with few buffers the fetch lane would wait.
    """
    tiers, room = cache.tiers, cache.tiers.unreserved_bytes("device")
    if room is None or tiers.prefetch == 1 or not cache.segments:
        return tiers.prefetch
    pair = max(max_chunk_bytes(view.segment, cache.token_bytes) for view in cache.segments)
    return max(tiers.prefetch, min(room // pair - 1, _MAX_PREFETCH))  # less the one in use


def _is_kept(state: StepState, chunk: Chunk, keep: int) -> bool:
    """Return True if a chunk has some of the last `keep` tokens, padding aside."""
    stop = sum(len(each) for each in state.chunks[: chunk.index + 1]) * state.ranks.size
    return stop > state.batch.seq_len - keep


def _last(state: StepState, states: list[Tensor], keep: int) -> Tensor:
    """Return the last `keep` hidden states (B, keep, E) of some last chunks, without padding."""
    tail = torch.cat(states, dim=1)
    padding = sum(map(len, state.chunks)) * state.ranks.size - state.batch.seq_len
    stop = tail.shape[1] - padding
    return tail[:, stop - keep : stop]
