"""State of a step: one forward pass, and the activations it keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn import Parameter

from trunkline.attention.core import Core, schedule_of
from trunkline.attention.head_groups import HeadGroupsCore
from trunkline.attention.mask import AttentionSpan, RowMask
from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk
from trunkline.config import Progress, StreamConfig
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Attend, Decoder
from trunkline.engine.grads import GradientSums
from trunkline.engine.memory_layout import HEAD_GROUP_STORES, MemoryLayout
from trunkline.engine.ranks import Ranks
from trunkline.engine.replay import ReplayContext
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader
from trunkline.offload.stores import Stores

# Method of a core: query rows, q, k, v, scoring -> output. `core_call` names the core's method; `attend` the function
# that a layer calls, which wraps it.
CoreCall = Callable[[Chunk, Tensor, Tensor, Tensor, Scoring], Tensor]


@dataclass(slots=True, kw_only=True)
class StepState:
    """State of one forward pass and its backward. It owns the kept activations; several may be outstanding.

    Attributes:
        decoder: the model in pieces.
        config: settings.
        batch: token ids, positions, targets, documents, of the whole sequence on every rank.
        replay: random state, autocast and kernel choice of the forward, for its replay in backward.
        ranks: ranks that share the sequence.
        chunks: for each chunk of the sequence, the tokens that this rank computes outside attention.
        rows: for each chunk, the query rows that this rank computes in attention, numbered from 0 on this rank.
        attention_spans: how far back each layer attends.
        stores: budgets and places of everything that is kept.
        layer_parameters: trained parameters of each layer, as the model stood at the forward.
        other_parameters: trained parameters outside the layers.
        versions: tensors that the replay reads again, each with its version counter at the forward.
        inputs: this rank's input of each layer; behind the last layer the final hidden state, until the loss takes it.
        cores: attention of each layer that has a backward; None for the others, and once the backward is done.
        row_masks: visible keys of each row of the batch, by attention span; filled when a layer first asks.
        grad_sums: sums over this rank's chunks of parameter gradients.
        dy: gradient of the residual stream at the layer that backward has reached; None before the loss, and where no
            layer has a backward.
        lowest_layer: lowest layer that backward must reach; -1 is the embedding, None only the head (or no backward).
        head_groups: groups of heads that attention is computed in, one after another; 1 is all heads at once.
        divisor: divisor of the loss that backward still has to apply; None where the head has applied it.
    """

    decoder: Decoder
    config: StreamConfig
    batch: Batch
    replay: ReplayContext
    ranks: Ranks
    chunks: list[Chunk]
    rows: list[Chunk]
    attention_spans: Sequence[AttentionSpan]
    stores: Stores
    layer_parameters: list[list[Parameter]] = field(default_factory=list)
    other_parameters: list[Parameter] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    inputs: list[ChunkedSequence] = field(default_factory=list)
    cores: list[Core | HeadGroupsCore | None] = field(default_factory=list)
    row_masks: dict[AttentionSpan, tuple[RowMask, ...]] = field(default_factory=dict)
    grad_sums: GradientSums = field(default_factory=GradientSums)
    dy: ChunkedSequence | None = None
    lowest_layer: int | None = None
    head_groups: int = 1
    divisor: Tensor | None = None

    @property
    def layout(self) -> MemoryLayout:
        """Names of the stores of this step, as far as it knows its lowest trained layer."""
        first = None if self.lowest_layer is None else max(self.lowest_layer, 0)
        return MemoryLayout(self.config, self.decoder.num_layers, first, self.head_groups)

    @property
    def ascending(self) -> range:
        """Chunk indices in the order of a forward sweep."""
        return range(len(self.chunks))

    @property
    def descending(self) -> range:
        """Chunk indices in the order of a backward sweep."""
        return range(len(self.chunks) - 1, -1, -1)

    def sequence(self, store: str) -> ChunkedSequence:
        """Return an empty chunked sequence that rests in a store."""
        return ChunkedSequence(len(self.chunks), self.stores, store)

    def read_inputs(self, layer: int, *, take: bool = False) -> Reader:
        """Read the inputs of a layer, chunks ascending; with `take` each is dropped once it is handed out."""
        return self.inputs[layer].read(self.ascending, take=take)

    def row_masks_of(self, layer: int) -> tuple[RowMask, ...]:
        """Return the mask of each row of the batch in a layer; one mask where all rows have the same documents."""
        span = self.attention_spans[layer]
        if span not in self.row_masks:
            self.row_masks[span] = span.row_masks(self.batch.documents, self.batch.seq_len)
        return self.row_masks[span]

    def num_live_chunks(self, layer: int) -> int:
        """Return how many chunks of keys and values a layer holds at a time: all, or fewer with a sliding window."""
        return schedule_of(self.rows, self.row_masks_of(layer), self.ranks.kv_gather).num_live_chunks

    def new_core(self, layer: int, *, keep: frozenset[str]) -> Core | HeadGroupsCore:
        """Create the attention core of a layer.

        Args:
            layer: index of the layer.
            keep: activations to keep for backward, as in `StreamConfig.keep`; head groups cannot keep `kv`.
        """
        layout = self.layout
        if self.head_groups > 1:
            return HeadGroupsCore(
                self.rows,
                kernel=self.config.attn_kernel,
                keep_attention="attention" in keep,
                stores=self.stores,
                store_names=layout.head_group_stores(layer),
                inner_names=HEAD_GROUP_STORES,
                gather=self.ranks.kv_gather,
                row_masks=self.row_masks_of(layer),
            )
        return Core(
            self.rows,
            kernel=self.config.attn_kernel,
            keep_attention="attention" in keep,
            keep_kv="kv" in keep,
            stores=self.stores,
            store_names=layout.core(layer),
            gather=self.ranks.kv_gather,
            row_masks=self.row_masks_of(layer),
        )

    def begin_layer(
        self, layer: int, chunk: Chunk, core_call: CoreCall, load_output: Callable[[Chunk], Tensor | None] | None = None
    ) -> Attend:
        """Begin a layer on one chunk: seed its random state, and return the attention function that it must call.

        That function exchanges this rank's tokens (all heads) for this rank's heads (all query rows) before the core's
        call, and back after it. Then it seeds the second half of the layer.

        Args:
            layer: index of the layer.
            chunk: tokens that this rank computes.
            core_call: method of the layer's core that computes attention, or returns the kept output.
            load_output: method that loads the chunk's output before `core_call` returns it; it may return None. The
                output is sent at once, so that the exchange between ranks overlaps with the first half of the layer.
                None where `core_call` computes the output.

        Returns:
            Function of q (B, H, C, D), k and v (B, K, C, D) and the scoring, of all heads; it returns the output
            (B, H, C, D). Call it once.
        """
        rows, ranks = self.rows[chunk.index], self.ranks
        output = None if load_output is None else load_output(rows)
        pending = [] if output is None else [ranks.start_to_tokens(output)]
        # A layer draws from two seeds, before and after attention: between them another chunk may draw.
        self.replay.seed(layer, chunk.index)

        def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            scoring = scoring.of_heads(ranks.head_range(q.shape[1]))
            q, k, v = ranks.to_heads(q, k, v)
            o = ranks.to_tokens(core_call(rows, q, k, v, scoring), pending.pop() if pending else None)
            self.replay.seed(layer, chunk.index, half=1)
            return o

        return attend

    def chunk_runs(
        self,
        layer: int,
        inputs: Reader,
        outputs: ChunkedSequence,
        core_call: CoreCall,
        load_output: Callable[[Chunk], Tensor | None] | None = None,
        *,
        backward_of: int | None = None,
    ) -> Iterator[Callable[[], None]]:
        """Yield a function for each chunk, ascending, that runs a layer on it without gradients.

        `Ranks.interleave` calls them: over ranks, a chunk that waits in an exchange lets the next one compute.

        Args:
            layer: index of the layer.
            inputs: reader of the layer's inputs.
            outputs: sequence that receives the layer's outputs.
            core_call: see `begin_layer`.
            load_output: see `begin_layer`.
            backward_of: layer whose backward needs these outputs, for the progress function; None in forward.
        """
        count = len(self.chunks)

        def run_chunk(chunk: Chunk) -> None:
            if backward_of is None:
                self.report("forward", layer, chunk.index, count)
            else:
                self.report("backward", backward_of, count - 1, count)  # no chunk of that backward is done yet
            x_BCE = inputs.next()
            attend = self.begin_layer(layer, chunk, core_call, load_output)
            outputs.stash(chunk.index, self.decoder.layer(layer, x_BCE, self.batch, chunk, attend))

        return (partial(run_chunk, chunk) for chunk in self.chunks)

    def project_qkv(self, layer: int, x_BCE: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """Run a layer on one chunk up to its attention call, and return the arguments of the core's call.

        Returns:
            q (B, H, C, D), k and v (B, K, C, D) and the scoring, of this rank's query rows and heads.
        """
        self.replay.seed(layer, chunk.index)
        *qkv, scoring = self.decoder.project_qkv(layer, x_BCE, self.batch, chunk)
        scoring = scoring.of_heads(self.ranks.head_range(qkv[0].shape[1]))
        q, k, v = self.ranks.to_heads(*qkv)
        return q, k, v, scoring

    def project_kv(self, layer: int, x_BCE: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, float | None]:
        """Run a layer on one chunk up to its attention call, and return the arguments of `Core.append_kv`.

        Returns:
            k and v (B, K, C, D), of this rank's query rows and heads, and the soft cap.
        """
        self.replay.seed(layer, chunk.index)
        _, k, v, scoring = self.decoder.project_qkv(layer, x_BCE, self.batch, chunk)
        k, v = self.ranks.to_heads(k, v)
        return k, v, scoring.softcap

    def report(self, part: Literal["embed", "forward", "head", "backward"], layer: int, chunk: int, total: int) -> None:
        """Tell the user's progress function, if there is one, which chunk comes next; arguments as in `Progress`."""
        if self.config.progress is not None:
            self.config.progress(Progress(part, layer, self.decoder.num_layers, chunk, total))
