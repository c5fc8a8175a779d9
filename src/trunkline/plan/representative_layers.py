"""Layers that are alike are rehearsed once or twice, and stand for all of their kind.

Alike are layers with the same modules, parameters and reach, whose stores rest in the same tiers and whose neighbours
are alike, too. Groups of layers whose inputs are computed together (`checkpoint_every`) stand for groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import Parameter

from trunkline.attention.mask import AttentionSpan
from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk
from trunkline.engine.batch import Batch
from trunkline.engine.decoder import Attend
from trunkline.engine.memory_layout import MemoryLayout
from trunkline.hf.decoder import HuggingFaceDecoder
from trunkline.offload.placement import Placement
from trunkline.plan.device_memory import DeviceMemory
from trunkline.plan.step_trace import SegmentRecorder

Unit = range  # layers that go together


class DecoderSubset:
    """Some layers of a model in the place of all; see `trunkline.engine.decoder.Decoder`.

    Args:
        decoder: the model.
        layers: which of its layers, rising.
        recorder: is told when a layer begins.
        memory: is told which tensors are gradients.
    """

    def __init__(
        self, decoder: HuggingFaceDecoder, layers: Sequence[int], recorder: SegmentRecorder, memory: DeviceMemory
    ) -> None:
        self._decoder, self._layers, self._recorder, self._memory = decoder, list(layers), recorder, memory
        self.num_layers = len(self._layers)
        self.vocab_size = decoder.vocab_size

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """See `Decoder.layer_parameters`."""
        found = self._decoder.layer_parameters
        return [found[layer] for layer in self._layers]

    @property
    def other_parameters(self) -> list[Parameter]:
        """See `Decoder.other_parameters`."""
        return self._decoder.other_parameters

    def streamed_attention(self) -> AbstractContextManager[None]:
        """See `Decoder.streamed_attention`."""
        return self._decoder.streamed_attention()

    def begin(self) -> None:
        """See `Decoder.begin`."""
        self._decoder.begin()

    def unsharded(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> AbstractContextManager[None]:
        """See `Decoder.present`."""
        if layer is None:
            return self._decoder.unsharded(None)
        self._recorder.enter(self._layers[layer])
        after = None if following is None else self._layers[following]
        return self._decoder.unsharded(self._layers[layer], following=after, again=again)

    def graph_params(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """See `Decoder.live`."""
        return self._decoder.graph_params(parameters)

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `Decoder.reduce_grads`."""
        found = self._decoder.reduce_grads(parameters, totals)
        self._memory.note("gradients", sum(x.nbytes for x in found if x is not None))
        return found

    def embed(self, batch: Batch, chunk: Chunk) -> Tensor:
        """See `Decoder.embed`."""
        return self._decoder.embed(batch, chunk)

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """See `Decoder.layer`."""
        return self._decoder.layer(self._layers[index], x_BCE, batch, chunk, attend)

    def project_qkv(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """See `Decoder.project_qkv`."""
        return self._decoder.project_qkv(self._layers[index], x_BCE, batch, chunk)

    def head(self, x_BTE: Tensor) -> Tensor:
        """See `Decoder.head`."""
        return self._decoder.head(x_BTE)


def layer_units(layout: MemoryLayout) -> list[Unit]:
    """The layers of a run in the pieces that can stand for each other, rising."""
    trained = [] if layout.first is None else list(layout.groups())[::-1]
    return [*(range(i, i + 1) for i in range(layout.trained.start)), *trained]


def unit_kinds(
    units: Sequence[Unit],
    layers: nn.ModuleList,
    reaches: Sequence[AttentionSpan],
    layout: MemoryLayout,
    placement: Placement | None,
) -> list[Hashable]:
    """What each unit has in common with those like it."""
    kinds: dict[Hashable, int] = {}

    def number(what: Hashable) -> int:
        return kinds.setdefault(what, len(kinds))

    def of_layer(i: int) -> Hashable:
        parameters = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layers[i].named_parameters())
        tiers: list[Hashable] = []
        if placement is not None:
            for name in (*_names(layout, i), layout.input(i + 1)):
                if name in placement.places:
                    tiers.append(tuple(tier for tier, _ in placement.places[name]))
        return number((repr(layers[i]), parameters, reaches[i], i in layout.trained, tuple(tiers)))

    return [tuple(of_layer(i) for i in unit) for unit in units]


def representatives(kinds: Sequence[Hashable]) -> dict[int, int]:
    """For each unit the one that stands for it: itself, or one of its kind with neighbours of the same kinds.

    Of each kind the first two are kept: what the first leaves to its successor may differ from what comes later.
    """
    last = len(kinds) - 1
    seen: dict[Hashable, list[int]] = {}
    found = {}
    for i, kind in enumerate(kinds):
        around = (kinds[i - 1] if i else None, kind, kinds[i + 1] if i < last else None)
        known = seen.setdefault(around, [])
        if len(known) < 2:
            known.append(i)
        found[i] = i if i in known else known[-1]
    return found


def placement_of_layers(placement: Placement, full: MemoryLayout, chosen: Sequence[int]) -> Placement:
    """The places of a run that has some of another's layers only."""
    some = replace(full, num_layers=len(chosen), first=_first(full, chosen))
    renamed: dict[str, str] = {}
    for own, layer in enumerate(chosen):
        renamed.update(zip(_names(some, own), _names(full, layer), strict=True))
    places, sizes = dict(placement.places), dict(placement.sizes)
    for own_name, name in renamed.items():
        if name in placement.places:
            places[own_name], sizes[own_name] = placement.places[name], placement.sizes[name]
    return replace(placement, places=places, sizes=sizes)


def _first(full: MemoryLayout, chosen: Sequence[int]) -> int | None:
    return None if full.first is None else sum(1 for layer in chosen if layer < full.first)


def _names(layout: MemoryLayout, layer: int) -> Iterator[str]:
    """All stores that are a layer's, in an order that is the same for all layers."""
    core = layout.core(layer)
    yield from (layout.input(layer), core.k, core.v, core.o, core.lse)
    for group in layout.by_groups(layer):
        yield from (group.q, group.k, group.v, group.do, group.o, group.lse)
