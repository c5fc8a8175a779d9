"""What a streamed model remembers of the tokens it has read: a transformers `Cache` that rests in tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trunkline.attention.kv_store import KVPair
from trunkline.attention.mask import AttentionSpan
from trunkline.chunking import Chunk, zigzag
from trunkline.engine.documents import Starts
from trunkline.engine.ranks import padded_length
from trunkline.kv_cache.budget import no_room_to_decode, room_to_move
from trunkline.kv_cache.cached_attention import SegmentView
from trunkline.kv_cache.flush import frozen, to_join
from trunkline.kv_cache.hf_cache import HFCacheInterface
from trunkline.kv_cache.segment import ADVICE, KVSegment, reading_bytes
from trunkline.kv_cache.writers import DecodeBuffer
from trunkline.offload.placement import StoreRequest
from trunkline.offload.storage import TierError
from trunkline.offload.stores import Stores, Tiers

DECODE_BUFFER_TOKENS = 256  # that come in place, one by one as they are decoded, before they move on to their tier
_SPARE = 32  # tokens before a window that stay: candidates that are refused in decoding can be forgotten again
_COPIED = (
    "length",
    "documents",
    "logits",
    "next_positions",
    "widths",
    "attention_spans",
    "room",
    "max_merged_tokens",
    "_batch",
)


class StreamedCache(HFCacheInterface):
    """Keys and values of every layer of a streamed model, on the device, in host memory or on disk as its budgets say.

    `trunkline.prefill` gives one; `model.generate(ids, past_key_values=cache)` and `trunkline.generate` go on from it.
    Layers with a sliding window keep what later tokens can see. Several caches may share what they have in common
    (`fork`, beams, several continuations of a prompt): it is held once.

    Attributes:
        length: tokens of a row, padding included.
        documents: first tokens of documents, of each row, or once for all rows. Padding on the left is one.
        logits: of the last token, (B, 1, V), or of as many as were asked for; None where there are none.
        next_positions: position id of the next token, (1, 1) or (B, 1).
        part: (rank, size) of the ranks that hold parts of keys and values, token by token.
        capacity: tokens of the open end.
        room: bytes of the device that its keys and values leave free, to go on with.
        max_merged_tokens: decoded tokens that become one chunk where the device has a budget.
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
        self.links: list[SegmentView] = []
        self.open_end: DecodeBuffer | None = None
        self.widths: list[tuple[int, int]] = []  # bytes of a token's keys and values, of each layer and row
        self.attention_spans: Sequence[AttentionSpan] = ()
        self.capacity = padded_length(DECODE_BUFFER_TOKENS, 2 * part[1])
        self.part = part
        self.room = self.max_merged_tokens = 0
        self.tiers = tiers

    def __repr__(self) -> str:
        return f"StreamedCache({self._batch} x {self.length:,} tokens, {self.nbytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, in whichever tier."""
        return sum(link.stretch.nbytes for link in self.links) + (self.open_end.nbytes if self.open_end else 0)

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

    def belongs_to(self, tiers: Tiers) -> bool:
        """Whether it rests in these."""
        return self.tiers is tiers

    # -- copies that share ---------------------------------------------------------------------------------------------

    def fork(self) -> StreamedCache:
        """Another cache of the same tokens, which goes on by itself; what is there already is shared."""
        new = StreamedCache(self.tiers, self._num_layers, self.part)
        new.open_end = self._copied_end()
        for name in _COPIED:
            setattr(new, name, getattr(self, name))
        new.links, new._ids, new._positions = list(self.links), list(self._ids), list(self._positions)
        for link in new.links:
            link.stretch.owners.add(new)
        return new

    def _copied_end(self) -> DecodeBuffer | None:
        """An open end like this one; None where there is no room for both, and its tokens have moved on."""
        end = self.open_end
        if end is None:
            return None
        if end.filled:
            with contextlib.suppress(ValueError):
                return end.rearranged(list(range(self._batch)), self._stores_of_open_end(self._batch))
            self.freeze()
        end.close()
        self.open_end = None
        return None

    def __copy__(self) -> StreamedCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedCache:
        """What is shared is never changed, so that a fork is as good: transformers' own way to reuse a prefix."""
        return self.fork()

    def rearranged(self, rows: Sequence[int]) -> None:
        """Have rows that are copies of these rows of before.

        Raises:
            ValueError: there is no room for the open end of so many rows. Nothing has changed then.
        """
        rows = list(rows)
        if rows == list(range(self._batch)):
            return
        open_end = None
        if self.open_end is not None and self.open_end.filled:
            open_end = self.open_end.rearranged(rows, self._stores_of_open_end(len(rows)))
        self.open_end = open_end
        self.links = [
            SegmentView(link.stretch, link.stop, tuple(row if link.rows is None else link.rows[row] for row in rows))
            for link in self.links
        ]
        if len(self.documents) > 1:
            self.documents = tuple(self.documents[row] for row in rows)
        if len(self.next_positions) > 1:
            self.next_positions = self.next_positions[rows]
        self.logits = None if self.logits is None else self.logits[rows]
        self._ids = [self.tokens[rows]]
        self._positions = [self.positions[rows]]
        self._batch = len(rows)

    def snapshot(self) -> dict[str, Any]:
        """What `rollback` takes: everything but what is written in place, behind the last token."""
        end = self.open_end
        lists = {name: list(getattr(self, name)) for name in ("links", "_ids", "_positions")}
        return {**self.__dict__, **lists, "end": None if end is None else (end.start, end.filled, end.times_frozen)}

    def rollback(self, state: dict[str, Any]) -> None:
        """Be again what it was."""
        state, links, length = dict(state), self.links, state["length"]
        end = state.pop("end")
        if self.open_end is not None and self.open_end is not state["open_end"]:
            self.open_end.close()
        self.__dict__.update(state)
        if self.open_end is not None:
            self.open_end.start, self.open_end.filled, times_frozen = end
            if self.open_end.times_frozen > times_frozen:  # its tokens have moved on, and its buffers have others
                self.open_end.emptied(length)
                self.links = [link for link in links if link.stop <= length]
        for link in self.links:
            link.stretch.owners.add(self)

    def rewind(self) -> None:
        """Forget the last token such that it can be read again: what begins with it still does."""
        documents, positions = self.documents, self.positions[:, -1:]
        self.crop(-1)
        self.documents, self.next_positions = documents, positions

    def begin(self, batch: int) -> None:
        """Make ready for new tokens of so many rows.

        Raises:
            ValueError: it has other rows.
        """
        if not self._batch:
            self._batch = batch
        elif batch != self._batch and batch % self._batch == 0:  # several continuations of each row
            self.batch_repeat_interleave(batch // self._batch)
        else:
            self.require_rows(batch)

    def require_rows(self, batch: int) -> None:
        """Refuse new tokens of rows that cannot go on from these.

        Raises:
            ValueError: they are no multiple.
        """
        if self._batch and batch % self._batch:
            raise ValueError(
                f"input_ids has {batch} rows, and the cache {self._batch}: give as many, or a multiple for several "
                "continuations of each row."
            )

    def open_end_for(self, count: int) -> DecodeBuffer:
        """An open end with room for so many tokens."""
        if self.open_end is not None and self.open_end.room < count:
            self.freeze()
        if self.open_end is None:
            stores = self._stores_of_open_end(self._batch)
            self.open_end = DecodeBuffer(self.length, self._batch, self._num_layers, self.capacity, stores)
        if not self.open_end.filled:
            self.open_end.emptied(self.length)
        return self.open_end

    def freeze(self) -> None:
        """Have the open end move on to its tier."""
        end = self.open_end
        if end is None or not end.filled:
            return
        joined = to_join(self, end)
        try:
            stretch = frozen(self, end, joined)
        except (ValueError, TierError):
            if not joined:
                raise
            stretch, joined = frozen(self, end, []), []  # there is no room for both while one becomes the other
        for each in joined:
            self.links.pop()
            each.close()
        self.append(stretch)
        if self.tiers.limited:
            stretch.stores.limit_transient(reading_bytes(stretch, self.widths))
        end.emptied(end.stop)
        end.times_frozen += 1

    def own_part(self, layer: int) -> KVPair:
        """Keys and values of the open end: of ranks that hold parts this one's, cut as those of a long prompt are."""
        assert self.open_end is not None
        rank, size = self.part
        whole = Chunk(0, 0, padded_length(self.open_end.filled, 1 if size == 1 else 2 * size))
        ranges = zigzag(whole, rank, size).ranges
        k, v = (torch.cat([x[:, :, a:b] for a, b in ranges], 2) for x in self.open_end.span(layer, len(whole)))
        return k, v

    def append(self, stretch: KVSegment, rows: tuple[int, ...] | None = None) -> None:
        """Hold another stretch, behind all others.

        Args:
            stretch: which.
            rows: of it, that each row of this cache reads; None for the same.
        """
        stretch.owners.add(self)
        self.links.append(SegmentView(stretch, stretch.stop, rows))

    def grown(
        self,
        stop: int,
        documents: tuple[Starts, ...],
        next_positions: Tensor,
        logits: Tensor | None,
        ids: Tensor,
        positions: Tensor,
    ) -> None:
        """All layers have had new tokens, up to this place: let go of what no later one can see.

        Args:
            stop: tokens of a row now.
            documents: see `StreamedCache.documents`.
            next_positions: the same.
            logits: the same.
            ids: of the new tokens, (B, n).
            positions: of the new tokens, (1, n) or (B, n).
        """
        self.length, self.documents, self.next_positions = stop, documents, next_positions
        self.logits = logits
        self._ids.append(ids.cpu())
        self._positions.append(positions.cpu())
        windows = {reach for reach in self.attention_spans if reach.window is not None}
        firsts = {reach: self._first_key(reach, stop) - self.spare(ids.shape[1]) for reach in windows}
        for layer, reach in enumerate(self.attention_spans):
            for link in self.links if reach in firsts else ():
                if len(link.stretch.owners) == 1:
                    link.stretch.let_go(layer, firsts[reach])
        for link in self.links if len(windows) == len(set(self.attention_spans)) else ():
            if link.stretch.is_passed:
                link.stretch.owners.discard(self)
        self.links = [link for link in self.links if self in link.stretch.owners]

    def open_bytes(self, batch: int) -> int:
        """Bytes of an open end for so many rows."""
        return self.capacity * batch * sum(sum(widths) for widths in self.widths)

    def _stores_of_open_end(self, batch: int) -> Stores:
        if not self.tiers.limited:
            return Stores(self.tiers)
        nbytes = self.open_bytes(batch)
        request = StoreRequest(("open",), ((nbytes,),), "open", 0, 0, persistent=True)
        spare = room_to_move(self, batch, 0)
        with contextlib.suppress(ValueError):
            placement = self.tiers.place([request], ADVICE, headroom=spare)
            if placement.num_on_device("open"):
                return Stores(self.tiers, placement)
        raise ValueError(no_room_to_decode(nbytes + spare))

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Hold as many tokens before a window as a forward reads: they may be forgotten again."""
        self._is_recording = True

    def spare(self, count: int) -> int:
        """Tokens before a window that stay when a forward has read so many."""
        return _SPARE + (count if self._is_recording else 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: so many, as a negative number. A positive one is what is left, as in earlier transformers.

        Raises:
            ValueError: it has not so many, or a window has let go of what the next token would see.
        """
        stop = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.length)
        if stop < 0:
            raise ValueError(f"crop({tokens_to_remove}): the cache has {self.length} tokens.")
        if stop == self.length:
            return
        documents = tuple(tuple(at for at in starts if at < max(stop, 1)) for starts in self.documents)
        self._require_held(stop, documents)
        self.documents = documents
        for link in self.links:
            if link.stretch.start >= stop:
                link.stretch.owners.discard(self)
        self.links = [
            SegmentView(link.stretch, min(link.stop, stop), link.rows)
            for link in self.links
            if link.stretch.start < stop
        ]
        if self.open_end is not None and self.open_end.filled:
            self.open_end.shortened(stop)
        positions = self.positions[:, :stop]
        self.next_positions = positions[:, -1:] + 1 if stop else torch.zeros(1, 1, dtype=torch.long)
        self._ids, self._positions = [self.tokens[:, :stop]], [positions]
        self.length, self.logits = stop, None

    def reset(self) -> None:
        """Hold nothing."""
        for link in self.links:
            link.stretch.owners.discard(self)
        self.links, self.length, self.documents, self.logits = [], 0, ((0,),), None
        self._ids, self._positions = [], []
        self.next_positions = torch.zeros(1, 1, dtype=torch.long)
        self._batch = 0
        if self.open_end is not None:
            self.open_end.close()
            self.open_end = None

    def _first_key(self, reach: AttentionSpan, stop: int, documents: tuple[Starts, ...] | None = None) -> int:
        """Place of the first key that a token sees, of any row."""
        return min(each.first_key(stop) for each in reach.row_masks(documents or self.documents, stop + 1))

    def _require_held(self, stop: int, documents: tuple[Starts, ...]) -> None:
        """Refuse to forget tokens down to a place from which on a layer would miss keys."""
        earliest = min((link.stretch.start for link in self.links), default=self.length)
        if self.open_end is not None and self.open_end.filled:
            earliest = min(earliest, self.open_end.start)
        for layer, reach in enumerate(self.attention_spans):
            first = self._first_key(reach, stop, documents)
            gone = [link.stretch.gone(layer) for link in self.links if link.stretch.start < stop]
            if stop and max([earliest, *gone]) > first:
                raise ValueError(
                    f"crop to {stop} tokens: layer {layer} sees {reach.window} tokens, and has let go of those before: "
                    "prefill again up to there."
                )
