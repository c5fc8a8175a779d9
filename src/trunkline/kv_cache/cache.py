"""`StreamedCache`: the keys and values of a streamed model, as a transformers `Cache` that rests in tiers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import AttentionSpan
from trunkline.chunking import Chunk, zigzag
from trunkline.engine.documents import Starts
from trunkline.engine.ranks import padded_length
from trunkline.kv_cache.budget import ADVICE, bytes_to_move, make_stores, no_room_message
from trunkline.kv_cache.hf_cache import HFCacheInterface
from trunkline.kv_cache.segment import KVSegment, SegmentView, read_bytes
from trunkline.kv_cache.writers import DecodeBuffer
from trunkline.offload.placement import StoreRequest
from trunkline.offload.storage import TierError
from trunkline.offload.stores import Stores, Tiers

DECODE_BUFFER_TOKENS = 256  # decoded tokens that are written in place on the device before they are flushed
_MARGIN = 32  # tokens before a window that stay, so that candidates which decoding rejects can be forgotten again


class StreamedCache(HFCacheInterface):
    """Keys and values of every layer of a streamed model, on the device, in host memory or on disk as its budgets say.

    `trunkline.prefill` returns one; `model.generate(ids, past_key_values=cache)` and `trunkline.generate` continue it.
    Layers with a sliding window keep the keys that later tokens can see, and a few before them. Caches with a common
    prefix (`fork`, beams, several continuations of a prompt) share its memory. Over ranks every rank has a cache, with
    its part of the keys and values.

    Attributes:
        length: tokens of a row, padding included.
        documents: positions of the first tokens of documents, for each row or once for all rows. Padding on the left
            counts as a document.
        logits: of the last token, (B, 1, V), or of the last tokens that were asked for; None where there are none.
        next_positions: position id of the next token, (1, 1) or (B, 1).
        segments: keys and values, without those in the decode buffer.
        decode_buffer: the last decoded tokens; None where there are none.
        token_bytes: for each layer, bytes of a token's keys and of its values, in one row; empty without budgets.
        attention_spans: of each layer.
        capacity: tokens of the decode buffer.
        part: this rank's number, and the number of ranks over which the tokens of keys and values are divided.
        spare_bytes: device bytes that its keys and values leave free for decoding or another prompt.
        max_merged_tokens: most decoded tokens that are merged into one chunk, where the device has a budget.
        tiers: of the model.
    """

    def __init__(self, tiers: Tiers, num_layers: int, part: tuple[int, int] = (0, 1)) -> None:
        super().__init__(num_layers)
        self.documents: tuple[Starts, ...] = ((0,),)
        self.logits: Tensor | None = None
        self.next_positions = torch.zeros(1, 1, dtype=torch.long)
        # Of all tokens, on the CPU: ids (B, n), and position ids (1, n) or (B, n).
        self._ids: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._is_recording = False
        self.segments: list[SegmentView] = []
        self.decode_buffer: DecodeBuffer | None = None
        self.token_bytes: list[tuple[int, int]] = []
        self.attention_spans: Sequence[AttentionSpan] = ()
        self.capacity = padded_length(DECODE_BUFFER_TOKENS, 2 * part[1])
        self.part = part
        self.spare_bytes = self.max_merged_tokens = 0
        self.tiers = tiers

    def __repr__(self) -> str:
        return f"StreamedCache({self._batch} x {self.length:,} tokens, {self.nbytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, in any tier; shared segments count in each of their caches."""
        return sum(x.segment.nbytes for x in self.segments) + (self.decode_buffer.nbytes if self.decode_buffer else 0)

    @property
    def tokens(self) -> Tensor:
        """Ids of all tokens, (B, length), on the CPU."""
        self._ids = [torch.cat(self._ids, 1)] if len(self._ids) > 1 else self._ids
        return self._ids[0] if self._ids else torch.zeros(self._batch, 0, dtype=torch.long)

    @property
    def positions(self) -> Tensor:
        """Position ids of all tokens, (B, length), on the CPU."""
        parts = [part.expand(self._batch, -1) for part in self._positions]
        self._positions = [torch.cat(parts, 1)] if len(parts) > 1 else parts
        return self._positions[0] if parts else torch.zeros(self._batch, 0, dtype=torch.long)

    # -- copies that share memory --------------------------------------------------------------------------------------

    def fork(self) -> StreamedCache:
        """Return another cache of the same tokens, to be continued independently.

        Segments are shared. The decode buffer is copied; where the device has no room for two it is flushed to a
        segment first.
        """
        buffer = self._copy_decode_buffer()
        new = StreamedCache(self.tiers, self._num_layers, self.part)
        new.__dict__ |= {**self.__dict__, "decode_buffer": buffer, "_is_recording": False}
        new.segments, new._ids, new._positions = list(self.segments), list(self._ids), list(self._positions)
        for view in new.segments:
            view.segment.owners.add(new)
        return new

    def _copy_decode_buffer(self) -> DecodeBuffer | None:
        """Copy the decode buffer; where it is empty or the device has no room for two, give it up and return None."""
        buffer = self.decode_buffer
        if buffer is None:
            return None
        if buffer.num_tokens:
            with contextlib.suppress(ValueError):
                return buffer.select_rows(list(range(self._batch)), self._decode_buffer_stores(self._batch))
            self.flush()
        buffer.close()
        self.decode_buffer = None
        return None

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedCache:
        """Return a fork: shared segments never change. Transformers reuses a prefix by deep copies."""
        return self.fork()

    @override
    def select_rows(self, rows: Sequence[int]) -> None:
        rows = list(rows)
        if rows == list(range(self._batch)):
            return
        buffer = None
        if self.decode_buffer is not None and self.decode_buffer.num_tokens:
            buffer = self.decode_buffer.select_rows(rows, self._decode_buffer_stores(len(rows)))
        self.decode_buffer = buffer
        self.segments = [
            SegmentView(view.segment, view.stop, tuple(row if view.rows is None else view.rows[row] for row in rows))
            for view in self.segments
        ]
        if len(self.documents) > 1:
            self.documents = tuple(self.documents[row] for row in rows)
        if len(self.next_positions) > 1:
            self.next_positions = self.next_positions[rows]
        self.logits = None if self.logits is None else self.logits[rows]
        self._ids = [self.tokens[rows]]
        self._positions = [self.positions[rows]]
        self._batch = len(rows)

    # -- state before a forward ----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the state that `rollback` restores. Buffers are not copied: a forward writes behind the last token."""
        buffer = self.decode_buffer
        lists = {name: list(getattr(self, name)) for name in ("segments", "_ids", "_positions")}
        counts = None if buffer is None else (buffer.start, buffer.num_tokens, buffer.num_flushes)
        return {**self.__dict__, **lists, "buffer": counts}

    def rollback(self, state: dict[str, Any]) -> None:
        """Restore a state after a forward that failed."""
        state, segments, length = dict(state), self.segments, state["length"]
        counts = state.pop("buffer")
        if self.decode_buffer is not None and self.decode_buffer is not state["decode_buffer"]:
            self.decode_buffer.close()
        self.__dict__.update(state)
        if self.decode_buffer is not None:
            self.decode_buffer.start, self.decode_buffer.num_tokens, num_flushes = counts
            if self.decode_buffer.num_flushes > num_flushes:
                # The forward flushed the buffer and may have written over its tokens: they are in a segment now.
                self.decode_buffer.reset(length)
                self.segments = [view for view in segments if view.stop <= length]
        for view in self.segments:
            view.segment.owners.add(self)

    def rewind(self) -> None:
        """Forget the last token and the logits, so that it can be read again, at its position in its document."""
        documents, positions = self.documents, self.positions[:, -1:]
        self.crop(-1)
        self.documents, self.next_positions = documents, positions

    # -- new tokens ----------------------------------------------------------------------------------------------------

    def expand_rows(self, batch: int) -> None:
        """Repeat rows to make `batch` of them, for several continuations of each; copies stand side by side.

        Raises:
            ValueError: `batch` is no multiple of the cache's rows.
        """
        if not self._batch:
            self._batch = batch
        elif batch != self._batch and batch % self._batch == 0:
            self.batch_repeat_interleave(batch // self._batch)
        else:
            self.require_rows(batch)

    def require_rows(self, batch: int) -> None:
        """Refuse a number of rows that is no multiple of the cache's; an empty cache takes any number.

        Raises:
            ValueError: it is no multiple.
        """
        if self._batch and batch % self._batch:
            raise ValueError(
                f"input_ids has {batch} rows, and the cache {self._batch}: give as many, or a multiple for several "
                "continuations of each row."
            )

    def decode_buffer_for(self, count: int) -> DecodeBuffer:
        """Return the decode buffer with room for `count` tokens; flush or allocate it first where needed.

        Raises:
            ValueError: the device budget has no room.
        """
        if self.decode_buffer is not None and self.decode_buffer.num_free < count:
            self.flush()
        if self.decode_buffer is None:
            stores = self._decode_buffer_stores(self._batch)
            self.decode_buffer = DecodeBuffer(self.length, self._batch, self._num_layers, self.capacity, stores)
        if not self.decode_buffer.num_tokens:
            self.decode_buffer.reset(self.length)
        return self.decode_buffer

    def flush(self) -> None:
        """Move the tokens of the decode buffer to a segment, merged with earlier segments of decoded tokens.

        The empty buffer stays. Does nothing where it is empty already.

        Raises:
            ValueError: the segment does not fit in the budgets.
        """
        buffer = self.decode_buffer
        if buffer is None or not buffer.num_tokens:
            return
        merged = self._segments_to_merge(buffer)
        try:
            segment = self._flushed_segment(buffer, merged)
        except (ValueError, TierError):
            if not merged:
                raise
            # Merging needs room for the old segments and the new one at the same time: leave the old ones apart.
            segment, merged = self._flushed_segment(buffer, []), []
        for each in merged:
            self.segments.pop()
            each.close()
        self.append_segment(segment)
        buffer.reset(buffer.stop)
        buffer.num_flushes += 1

    def _segments_to_merge(self, buffer: DecodeBuffer) -> list[KVSegment]:
        """Return the last segments of decoded tokens that a flush merges with the buffer, so that there are never many.

        A segment is merged when as many tokens follow it: each token moves log(n) times in all.
        """
        segments: list[KVSegment] = []
        if self.part[1] > 1 or any(span.window is not None for span in self.attention_spans):
            return segments
        tokens, most = buffer.num_tokens, self.max_merged_tokens if self.tiers.limited else math.inf
        for view in reversed(self.segments):
            segment = view.segment
            count, is_own = segment.stop - segment.start, len(segment.owners) == 1 and view.rows is None
            is_whole = is_own and segment.is_mergeable and view.stop == segment.stop and segment.batch == buffer.batch
            if not is_whole or count > tokens or count + tokens > most:
                break
            segments.insert(0, segment)
            tokens += count
        return segments

    def _flushed_segment(self, buffer: DecodeBuffer, merged: list[KVSegment]) -> KVSegment:
        """Write the decode buffer, and the segments merged with it, to a new segment of one chunk."""
        layers, start = range(self._num_layers), merged[0].start if merged else buffer.start
        chunk = Chunk(0, 0, self.local_decoded(0)[0].shape[2] + buffer.start - start)
        without_buffer = self.spare_bytes - self.decode_buffer_bytes(self._batch)  # this cache has one already
        spare = self.spare_bytes, max(without_buffer, 0), bytes_to_move(self, self._batch, len(chunk)), 0
        stores = make_stores(self.tiers, self._batch, [chunk], self.token_bytes, [0] * len(layers), spare)
        kv = [KVStore([chunk], 0, stores, (f"k {i}", f"v {i}")) for i in layers]
        with stores.close_on_error():
            for layer in layers:
                with contextlib.ExitStack() as stack:
                    parts = [stack.enter_context(segment.lend(layer, segment.chunks[0])) for segment in merged]
                    parts.append(self.local_decoded(layer))
                    k, v = (torch.cat([part[i] for part in parts], 2) for i in range(2))
                    del parts  # fetched chunks are given up before the next layer's are fetched
                assert k.shape[2] == len(chunk)
                kv[layer].put(chunk, (k, v))
            stores.flush_all()
        ranges = [(start, buffer.stop)]
        return KVSegment(start, buffer.stop, self._batch, [chunk], ranges, kv, [0] * len(layers), stores)

    def local_decoded(self, layer: int) -> KVPair:
        """Return this rank's part of the decode buffer's keys and values, divided and padded like a prompt."""
        assert self.decode_buffer is not None
        rank, size = self.part
        padded = Chunk(0, 0, padded_length(self.decode_buffer.num_tokens, 1 if size == 1 else 2 * size))
        ranges = zigzag(padded, rank, size).ranges
        k, v = (torch.cat([x[:, :, a:b] for a, b in ranges], 2) for x in self.decode_buffer.view(layer, len(padded)))
        return k, v

    def append_segment(self, segment: KVSegment, rows: tuple[int, ...] | None = None) -> None:
        """Append a segment behind all others.

        Args:
            segment: keys and values of the tokens that follow.
            rows: the row of the segment that each row of this cache reads; None for the same.
        """
        segment.owners.add(self)
        self.segments.append(SegmentView(segment, segment.stop, rows))
        if self.tiers.limited:  # from now on it is only read
            segment.stores.limit_transient(read_bytes(segment, self.token_bytes))

    def commit(
        self,
        stop: int,
        documents: tuple[Starts, ...],
        next_positions: Tensor,
        logits: Tensor | None,
        ids: Tensor,
        positions: Tensor,
    ) -> None:
        """Count new tokens, whose keys and values all layers have stored; drop keys that no later token sees.

        Segments that other caches share keep their keys.

        Args:
            stop: tokens of a row now.
            documents: see `StreamedCache.documents`.
            next_positions: see `StreamedCache.next_positions`.
            logits: see `StreamedCache.logits`.
            ids: of the new tokens, (B, n).
            positions: of the new tokens, (1, n) or (B, n).
        """
        self.length, self.documents, self.next_positions = stop, documents, next_positions
        self.logits = logits
        self._ids.append(ids.cpu())
        self._positions.append(positions.cpu())
        windowed = {span for span in self.attention_spans if span.window is not None}
        first_keys = {span: self._first_key(span, stop) - self.margin(ids.shape[1]) for span in windowed}
        for layer, span in enumerate(self.attention_spans):
            for view in self.segments if span in first_keys else ():
                if len(view.segment.owners) == 1:  # another cache may be cropped, and need them
                    view.segment.drop_before(layer, first_keys[span])
        for view in self.segments if len(windowed) == len(set(self.attention_spans)) else ():
            if view.segment.is_dropped:
                view.segment.owners.discard(self)
        self.segments = [view for view in self.segments if self in view.segment.owners]

    def decode_buffer_bytes(self, batch: int) -> int:
        """Return the bytes of a decode buffer for `batch` rows; 0 without budgets."""
        return self.capacity * batch * sum(map(sum, self.token_bytes))

    def _decode_buffer_stores(self, batch: int) -> Stores:
        if not self.tiers.limited:
            return Stores(self.tiers)
        nbytes = self.decode_buffer_bytes(batch)
        request = StoreRequest(("open",), ((nbytes,),), "open", 0, 0, persistent=True)
        spare = bytes_to_move(self, batch, 0)
        with contextlib.suppress(ValueError):
            placement = self.tiers.place([request], ADVICE, headroom=spare)
            if placement.num_on_device("open"):
                return Stores(self.tiers, placement)
        raise ValueError(no_room_message(nbytes + spare))

    # -- forgetting ----------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Keep as many tokens before a window as a forward reads, since they may be forgotten again."""
        self._is_recording = True

    def margin(self, count: int) -> int:
        """Return how many tokens before a window stay after a forward of `count` tokens."""
        return _MARGIN + (count if self._is_recording else 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, and the logits with them.

        Args:
            tokens_to_remove: their number, negative; 0 removes none. A positive number is the tokens that stay, as in
                earlier transformers.

        Raises:
            ValueError: the cache has fewer tokens, or a window has dropped keys that the next token would see. Nothing
                has changed then.
        """
        stop = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.length)
        if stop < 0:
            raise ValueError(f"crop({tokens_to_remove}): the cache has {self.length} tokens.")
        if stop == self.length:
            return
        documents = tuple(tuple(at for at in starts if at < max(stop, 1)) for starts in self.documents)
        self._require_held(stop, documents)
        self.documents = documents
        for view in self.segments:
            if view.segment.start >= stop:
                view.segment.owners.discard(self)
        self.segments = [
            SegmentView(view.segment, min(view.stop, stop), view.rows)
            for view in self.segments
            if view.segment.start < stop
        ]
        if self.decode_buffer is not None and self.decode_buffer.num_tokens:
            self.decode_buffer.crop(stop)
        positions = self.positions[:, :stop]
        self.next_positions = positions[:, -1:] + 1 if stop else torch.zeros(1, 1, dtype=torch.long)
        self._ids, self._positions = [self.tokens[:, :stop]], [positions]
        self.length, self.logits = stop, None

    def reset(self) -> None:
        """Empty the cache: remove all tokens, segments and the decode buffer."""
        for view in self.segments:
            view.segment.owners.discard(self)
        self.segments, self.length, self.documents, self.logits = [], 0, ((0,),), None
        self._ids, self._positions = [], []
        self.next_positions = torch.zeros(1, 1, dtype=torch.long)
        self._batch = 0
        if self.decode_buffer is not None:
            self.decode_buffer.close()
            self.decode_buffer = None

    def _first_key(self, span: AttentionSpan, stop: int, documents: tuple[Starts, ...] | None = None) -> int:
        """Return the position of the first key that the token at `stop` sees, in any row."""
        return min(mask.first_key(stop) for mask in span.row_masks(documents or self.documents, stop + 1))

    def _require_held(self, stop: int, documents: tuple[Starts, ...]) -> None:
        """Refuse to crop to `stop` tokens if a layer has dropped keys that the next token would see."""
        earliest = min((view.segment.start for view in self.segments), default=self.length)
        if self.decode_buffer is not None and self.decode_buffer.num_tokens:
            earliest = min(earliest, self.decode_buffer.start)
        for layer, span in enumerate(self.attention_spans):
            first = self._first_key(span, stop, documents)
            dropped = [view.segment.dropped_until(layer) for view in self.segments if view.segment.start < stop]
            if stop and max([earliest, *dropped]) > first:
                raise ValueError(
                    f"crop to {stop} tokens: layer {layer} sees {span.window} tokens, and has dropped those before: "
                    "prefill again up to there."
                )
