"""A run: one forward pass and what it keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn import Parameter

from trunkline.attention.core import Core, schedule_of
from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.attention.kv_gather import Pending
from trunkline.attention.mask import AttentionSpan, RowMask
from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk
from trunkline.config import Progress, StreamConfig
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Decoder
from trunkline.engine.grads import GradientSums
from trunkline.engine.memory_layout import INNER, MemoryLayout
from trunkline.engine.ranks import Ranks
from trunkline.engine.replay import ReplayContext
from trunkline.offload.chunked_sequence import ChunkedSequence
from trunkline.offload.stores import Stores

CoreCall = Callable[[Chunk, Tensor, Tensor, Tensor, Scoring], Tensor]  # rows, q, k, v, scoring -> output


@dataclass(slots=True)
class StepState:
    """One forward pass. It owns what it keeps until its backward; several may be outstanding."""

    decoder: Decoder
    config: StreamConfig
    batch: Batch
    replay: ReplayContext
    ranks: Ranks
    chunks: list[Chunk]  # of the sequence, of each the tokens that this rank computes
    rows: list[Chunk]  # that attention of each chunk has on this rank
    layer_parameters: list[list[Parameter]]  # those that are trained, as the model stood at the forward
    other_parameters: list[Parameter]
    versions: list[tuple[Tensor, int]]  # what the replay reads again, with its version at the forward
    attention_spans: Sequence[AttentionSpan]  # of each layer's attention
    stores: Stores
    inputs: list[ChunkedSequence] = field(default_factory=list)  # of each layer; after the last, the final hidden state
    cores: list[Core | HeadGroupsCore | None] = field(default_factory=list)
    row_masks: dict[AttentionSpan, tuple[RowMask, ...]] = field(default_factory=dict)  # what tokens see, of each reach
    sums: GradientSums = field(default_factory=GradientSums)
    dy: ChunkedSequence | None = None  # gradient of the residual stream, at the layer that backward has reached
    lowest_layer: int | None = (
        None  # layer that backward must reach, -1 the embedding; None where only the head is trained
    )
    head_groups: int = 1  # in which attention is computed, one after another
    divisor: Tensor | None = None  # what backward divides the head's sums by; None where the head has done it

    @property
    def layout(self) -> MemoryLayout:
        """Names of what is kept."""
        first = None if self.lowest_layer is None else max(self.lowest_layer, 0)
        return MemoryLayout(self.config, self.decoder.num_layers, first, self.head_groups)

    @property
    def descending(self) -> range:
        """Chunks as a backward sweep meets them."""
        return range(len(self.chunks) - 1, -1, -1)

    def sequence(self, name: str) -> ChunkedSequence:
        """An empty sequence in the store of that name."""
        return ChunkedSequence(len(self.chunks), self.stores, name)

    def sight(self, layer: int) -> tuple[RowMask, ...]:
        """What tokens see in a layer."""
        reach = self.attention_spans[layer]
        if reach not in self.row_masks:
            self.row_masks[reach] = reach.row_masks(self.batch.documents, self.batch.seq_len)
        return self.row_masks[reach]

    def live_chunks(self, layer: int) -> int:
        """Chunks whose keys and values are held at a time while a layer is under way."""
        return schedule_of(self.rows, self.sight(layer), self.ranks.kv_gather).num_live_chunks

    def core(self, layer: int, *, keep: frozenset[str]) -> Core | HeadGroupsCore:
        """A core for a layer, whose outputs, or keys and values, are kept."""
        layout = self.layout
        common = {"kernel": self.config.attn_kernel, "keep_attention": "attention" in keep, "stores": self.stores,
                  "gather": self.ranks.kv_gather, "row_masks": self.sight(layer)}  # fmt: skip
        if self.head_groups > 1:
            return HeadGroupsCore(self.rows, store_names=layout.by_groups(layer), inner_names=INNER, **common)  # type: ignore[arg-type]
        return Core(self.rows, store_names=layout.core(layer), keep_kv="kv" in keep, **common)  # type: ignore[arg-type]

    def for_each_chunk(
        self,
        layer: int,
        work: Callable[[Chunk, Tensor], None],
        *,
        chunks: list[Chunk] | None = None,
        take: bool = False,
    ) -> None:
        """Go through chunks in rising order, side by side where ranks exchange something on the way.

        Args:
            layer: whose inputs are read.
            work: is given a chunk and its input, and has done with it what is to be done when it returns.
            chunks: which; None for all.
            take: the inputs are not wanted again.
        """
        chunks = self.chunks if chunks is None else chunks
        inputs = self.inputs[layer].read([chunk.index for chunk in chunks], take=take)

        def one(chunk: Chunk) -> None:
            work(chunk, inputs.next())

        self.ranks.interleave(partial(one, chunk) for chunk in chunks)
        inputs.release()

    def apply(
        self, layer: int, x_BCE: Tensor, chunk: Chunk, core: CoreCall, known: Callable[[Chunk], Tensor | None] | None
    ) -> Tensor:
        """A layer on one chunk, its attention a core's, between the exchanges that bring it heads and give back tokens.

        Args:
            layer: which.
            x_BCE: its input.
            chunk: which.
            core: the core's method for it.
            known: gives the output of attention where the core knows it beforehand: it is on its way early, then.
        """
        rows, ranks = self.rows[chunk.index], self.ranks
        early = self._send(known, rows)  # in a list, to be let go once it is used

        def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            scoring = scoring.of_heads(ranks.head_range(q.shape[1]))
            q, k, v = ranks.to_heads(q, k, v)
            o = ranks.to_tokens(core(rows, q, k, v, scoring), early.pop() if early else None)
            self.replay.seed(layer, chunk.index, half=1)
            return o

        self.replay.seed(layer, chunk.index)
        return self.decoder.layer(layer, x_BCE, self.batch, chunk, attend)

    def _send(self, known: Callable[[Chunk], Tensor | None] | None, rows: Chunk) -> list[Pending[tuple[Tensor, ...]]]:
        o = None if known is None else known(rows)
        coming = None if o is None else self.ranks.start_to_tokens(o)
        return [] if coming is None else [coming]

    def project(self, layer: int, x_BCE: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """What a core is called with for a chunk, and nothing that follows."""
        self.replay.seed(layer, chunk.index)
        *projections, scoring = self.decoder.project_qkv(layer, x_BCE, self.batch, chunk)
        scoring = scoring.of_heads(self.ranks.head_range(projections[0].shape[1]))
        q, k, v = self.ranks.to_heads(*projections)
        return q, k, v, scoring

    def project_kv(self, layer: int, x_BCE: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The keys and values among them."""
        self.replay.seed(layer, chunk.index)
        _, k, v, _ = self.decoder.project_qkv(layer, x_BCE, self.batch, chunk)
        return self.ranks.to_heads(k, v)

    @staticmethod
    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        """A tensor times a 0-dim factor of a wider dtype, rounded once."""
        return (x.to(factor.dtype) * factor).to(x.dtype)

    def report(self, part: Literal["embed", "forward", "head", "backward"], layer: int, chunk: int, total: int) -> None:
        """Tell the user where the step is."""
        if self.config.progress is not None:
            self.config.progress(Progress(part, layer, self.decoder.num_layers, chunk, total))
