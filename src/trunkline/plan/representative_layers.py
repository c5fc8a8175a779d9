"""Layers that represent identical ones, so that a simulated step runs few of them.

Layers are identical if their modules, parameters and attention spans are equal, their stores rest in the same tiers,
and the same holds for their neighbours. With `checkpoint_every` a unit of layers represents another unit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

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

Unit = range  # layers whose inputs backward recomputes together; a single layer where it does not


class DecoderSubset:
    """Decoder that runs some layers of a model; all else is delegated to the whole model's decoder.

    Args:
        decoder: decoder of the whole model.
        layers: layers to run, in rising order.
        recorder: recorder that is told which layer runs.
        memory: memory in which gradients are labelled.
    """

    def __init__(
        self, decoder: HuggingFaceDecoder, layers: Sequence[int], recorder: SegmentRecorder, memory: DeviceMemory
    ) -> None:
        self._decoder, self._layers, self._recorder, self._memory = decoder, list(layers), recorder, memory
        self.num_layers = len(self._layers)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the whole model's decoder."""
        return getattr(self._decoder, name)

    @property
    def layer_parameters(self) -> list[list[Parameter]]:
        """Parameters of each layer of the subset."""
        parameters = self._decoder.layer_parameters
        return [parameters[layer] for layer in self._layers]

    def unsharded(
        self, layer: int | None, *, following: int | None = None, again: bool = False
    ) -> AbstractContextManager[None]:
        """Unshard a layer of the subset as `Decoder.unsharded` does, and tell the recorder that it runs."""
        if layer is None:
            return self._decoder.unsharded(None)
        self._recorder.enter(self._layers[layer])
        following = None if following is None else self._layers[following]
        return self._decoder.unsharded(self._layers[layer], following=following, again=again)

    def reduce_grads(self, parameters: Sequence[Parameter], totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce gradients as `Decoder.reduce_grads` does, and label their memory."""
        grads = self._decoder.reduce_grads(parameters, totals)
        self._memory.label("gradients", sum(x.nbytes for x in grads if x is not None))
        return grads

    def layer(self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk, attend: Attend) -> Tensor:
        """Run a layer of the subset on one chunk."""
        return self._decoder.layer(self._layers[index], x_BCE, batch, chunk, attend)

    def project_qkv(
        self, index: int, x_BCE: Tensor, batch: Batch, chunk: Chunk
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """Project queries, keys and values of a layer of the subset."""
        return self._decoder.project_qkv(self._layers[index], x_BCE, batch, chunk)


def layer_units(layout: MemoryLayout) -> list[Unit]:
    """Return the units that a step's layers are divided into, in rising order; a layer without backward is alone."""
    trained = [] if layout.first is None else list(layout.layer_groups())[::-1]
    return [*(range(i, i + 1) for i in range(layout.trained.start)), *trained]


def unit_kinds(
    units: Sequence[Unit],
    layers: nn.ModuleList,
    spans: Sequence[AttentionSpan],
    layout: MemoryLayout,
    placement: Placement | None,
) -> list[Hashable]:
    """Return a key for each unit; units with equal keys are identical, their neighbours aside.

    Args:
        units: units of the step.
        layers: all decoder layers.
        spans: attention span of each layer.
        layout: stores of the step.
        placement: tiers of the stores; None where everything is on the device.
    """
    kinds: dict[Hashable, int] = {}

    def layer_kind(i: int) -> Hashable:
        parameters = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layers[i].named_parameters())
        tiers: list[Hashable] = []
        if placement is not None:
            for name in (*_store_names(layout, i), layout.input(i + 1)):
                if name in placement.places:
                    tiers.append(tuple(tier for tier, _ in placement.places[name]))
        kind = repr(layers[i]), parameters, spans[i], i in layout.trained, tuple(tiers)
        return kinds.setdefault(kind, len(kinds))  # a number: keys are compared many times

    return [tuple(layer_kind(i) for i in unit) for unit in units]


def representatives(kinds: Sequence[Hashable]) -> dict[int, int]:
    """Map each unit to the unit that represents it: itself, or one with the same kind and the same neighbours' kinds.

    Keys and values are positions in `kinds`. The first two units of a kind represent themselves: the first leaves the
    clock and the stores in a state that the second may find different from the state that all later ones find.
    """
    last = len(kinds) - 1
    run: dict[Hashable, list[int]] = {}  # units that are run, by kind and neighbours' kinds
    represented_by = {}
    for i, kind in enumerate(kinds):
        with_neighbours = (kinds[i - 1] if i else None, kind, kinds[i + 1] if i < last else None)
        alike = run.setdefault(with_neighbours, [])
        if len(alike) < 2:
            alike.append(i)
        represented_by[i] = alike[-1]
    return represented_by


def placement_of_layers(placement: Placement, full: MemoryLayout, chosen: Sequence[int]) -> Placement:
    """Return the placement of a step with the chosen layers only: each has the places that it has in the full step."""
    first = None if full.first is None else sum(1 for layer in chosen if layer < full.first)
    subset = replace(full, num_layers=len(chosen), first=first)
    places, sizes = dict(placement.places), dict(placement.sizes)
    for index, layer in enumerate(chosen):
        for own_name, name in zip(_store_names(subset, index), _store_names(full, layer), strict=True):
            if name in placement.places:
                places[own_name], sizes[own_name] = placement.places[name], placement.sizes[name]
    return replace(placement, places=places, sizes=sizes)


def _store_names(layout: MemoryLayout, layer: int) -> Iterator[str]:
    """Yield the names of a layer's stores, in an order that is the same for all layers."""
    core = layout.core(layer)
    yield from (layout.input(layer), core.k, core.v, core.o, core.lse)
    for group in layout.head_group_stores(layer):
        yield from (group.q, group.k, group.v, group.do, group.o, group.lse)
