"""Activation stores of a step: names, sizes, placement priority.

The live layer's keys, values and their gradients choose their tier first, since every later chunk reads them; then
activations that each layer reads and writes once; then activations that wait for their backward, the last layer first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trunkline.attention.core import CoreStores
from trunkline.attention.head_groups import HeadGroupStores
from trunkline.attention.kernels import resolve
from trunkline.chunking import Chunk
from trunkline.config import StreamConfig
from trunkline.offload.placement import FitHints, Placement, StoreRequest
from trunkline.offload.stores import Tiers

# Names of stores. The first word is the kind; a number after it is a layer, a position in a checkpoint group, or one of
# two that take turns; `.g` is head group g.
#   input       input of a layer, kept from forward to backward
#   live        input of a layer that backward computes again (`checkpoint_every`)
#   pass        input of a layer without a backward
#   dy          final hidden state; then the gradient of the residual stream at the layer that backward has reached
#   o, lse      outputs and log-sum-exps of attention
#   lk, lv      keys and values of the layer that runs now (the live layer)
#   k, v        keys and values that outlive it; of head groups, those that wait for their group's turn
#   dk, dv      sums of the gradients of the live layer's (or group's) keys and values
#   q, do       queries and gradients of outputs, which only head groups store
#   kg, vg      keys and values of the head group that runs now

# Labels of the kinds of stores, for reports.
STORE_LABELS = {
    "input": "layer inputs", "live": "layer inputs", "pass": "layer inputs", "dy": "gradients of hidden states",
    "o": "attention outputs", "lse": "attention outputs", "do": "queries", "q": "queries",
    "k": "keys and values", "v": "keys and values", "lk": "keys and values", "lv": "keys and values",
    "kg": "keys and values", "vg": "keys and values", "dk": "gradients of keys and values",
    "dv": "gradients of keys and values",
}  # fmt: skip

# Stores of the one head group that runs now. Its outputs are in the stores of `MemoryLayout.head_group_stores`.
HEAD_GROUP_STORES = CoreStores("kg", "vg", "-", "-")


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Names of the stores of a step.

    The first word of a name is its kind: stores of one kind are written by one layer at a time.

    Attributes:
        config: settings.
        num_layers: decoder layers.
        first: lowest layer with a backward sweep; None where there is none.
        head_groups: groups of heads that attention is computed in, one after another; 1 is all heads at once.
    """

    config: StreamConfig
    num_layers: int
    first: int | None
    head_groups: int = 1

    @property
    def trained(self) -> range:
        """Layers with a backward sweep."""
        return range(self.num_layers if self.first is None else self.first, self.num_layers)

    def position(self, layer: int) -> int:
        """Return the position of a trained layer in its group of `checkpoint_every` layers."""
        return (layer - self.trained.start) % self.config.checkpoint_every

    def keeps_input(self, layer: int) -> bool:
        """Return True if a layer's input is kept until its backward: of each `checkpoint_every` layers the first's."""
        return layer in self.trained and self.position(layer) == 0

    def input(self, layer: int) -> str:
        """Return the store name of a layer's input; index `num_layers` is the final hidden state."""
        if self.first is None or layer < self.first:
            return f"pass {layer % 2}"
        if layer == self.num_layers:
            return "dy"  # its chunks leave before their gradients come
        return f"input {layer}" if self.keeps_input(layer) else f"live {self.position(layer)}"

    def core(self, layer: int) -> CoreStores:
        """Return the store names of a layer's core, for attention of all heads at once."""
        if layer not in self.trained:
            return CoreStores("lk", "lv", "o", "lse")  # the last two are not used
        output = self._output(layer)
        if not self.saves:
            return CoreStores("lk", "lv", f"o {output}", f"lse {output}")
        kv = layer if "kv" in self.config.keep else self.position(layer)
        return CoreStores(f"k {kv}", f"v {kv}", f"o {output}", f"lse {output}", working_k="lk", working_v="lv")

    @property
    def saves(self) -> bool:
        """True if keys and values have stores beside the live layer's: kept, or recomputed by `checkpoint_every`."""
        return "kv" in self.config.keep or self.config.checkpoint_every > 1

    def head_group_stores(self, layer: int) -> list[HeadGroupStores]:
        """Return the store names of a layer's head groups; all layers share those of q, k, v and do."""
        output = self._output(layer) if layer in self.trained else 0
        return [
            HeadGroupStores(f"q.{g}", f"k.{g}", f"v.{g}", f"do.{g}", f"o.{g} {output}", f"lse.{g} {output}")
            for g in range(self.head_groups)
        ]

    def _output(self, layer: int) -> int:
        return layer if "attention" in self.config.keep else self.position(layer)

    def layer_groups(self) -> Iterator[range]:
        """Yield the trained layers in groups of `checkpoint_every`, the last group first; it may be shorter."""
        every = self.config.checkpoint_every
        for start in reversed(range(self.trained.start, self.trained.stop, every)):
            yield range(start, min(start + every, self.num_layers))


@dataclass(frozen=True, slots=True)
class BytesPerToken:
    """Bytes of one token on this rank, measured for one row of the batch; `times` makes it all rows.

    Attributes:
        hidden: bytes of the residual stream.
        layers: bytes of q, k, v, do, o, lse, dk, dv, by name, for each layer; of this rank's heads.
        num_kv_heads: greatest common divisor of the layers' key/value heads on this rank. The number of head groups
            divides it.
    """

    hidden: int
    layers: list[dict[str, int]]
    num_kv_heads: int

    @staticmethod
    def of_attention(q: Tensor, k: Tensor, v: Tensor, kernel: str, softcap: float | None) -> dict[str, int]:
        """Return the bytes of a layer's tensors, given the arguments of its attention call for one token.

        Args:
            q: queries (B, H, 1, D) of this rank's heads. The bytes are those of all B rows.
            k: keys (B, K, 1, D).
            v: values (B, K, 1, D).
            kernel: a kernel's name, or `auto`; keys and values are stored in its dtype.
            softcap: soft cap of the scores; None for none.

        Raises:
            ValueError: the kernel cannot serve such tensors.
        """
        chosen = resolve(k.device, k.dtype, k.shape[-1], v.shape[-1], kernel, softcap=softcap)
        dtype = chosen.compute_dtype(k.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        num_queries = q[..., 0].numel()
        output = num_queries * v.shape[-1] * q.dtype.itemsize
        return {
            "q": q.numel() * q.dtype.itemsize,
            "k": k.numel() * dtype.itemsize,
            "v": v.numel() * dtype.itemsize,
            "do": output,
            "o": output,
            "lse": num_queries * wide.itemsize,
            "dk": k.numel() * wide.itemsize,
            "dv": v.numel() * wide.itemsize,
        }

    def times(self, rows: int) -> BytesPerToken:
        """Return these bytes times the rows of a batch."""
        layers = [{kind: nbytes * rows for kind, nbytes in layer.items()} for layer in self.layers]
        return BytesPerToken(self.hidden * rows, layers, self.num_kv_heads)

    def widest(self, kind: str) -> int:
        """Return the bytes of a kind of tensor, such as `q`, in the layer where it is largest."""
        return max(layer[kind] for layer in self.layers)


class StoreRequests:
    """Requests of a step's stores for room in the tiers.

    Args:
        layout: names of the stores.
        widths: bytes of one token on this rank, in all rows of the batch.
        chunks: this rank's tokens of each chunk.
        rows: this rank's query rows of each chunk, in attention.
        live_chunks: for each layer, the chunks of keys and values that it holds at a time: all, or fewer where a window
            drops some.
        prefetch: chunks of one store on the device at a time.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        widths: BytesPerToken,
        chunks: Sequence[Chunk],
        rows: Sequence[Chunk],
        live_chunks: Sequence[int],
        prefetch: int,
    ) -> None:
        self._layout, self._widths, self._chunks, self._rows = layout, widths, chunks, rows
        self._live_chunks = live_chunks
        # The user of a reader still holds one chunk while it takes the next.
        self._reading, self._writing = prefetch + 1, max(prefetch - 1, 1)
        self._both = self._reading + self._writing

    def all(self) -> list[StoreRequest]:
        """Return all requests, in the order of their priority."""
        attention = self._live_attention() if self._layout.head_groups == 1 else self._live_groups()
        return attention + self._live_hidden() + self._kept()

    def _request(
        self,
        widths: dict[str, int],
        forward: int,
        backward: int,
        *,
        group: str = "",
        persistent: bool = False,
        hidden: bool = False,
    ) -> StoreRequest:
        chunks = self._chunks if hidden else self._rows
        sizes = tuple(tuple(len(chunk) * width for chunk in chunks) for width in widths.values())
        group = group or next(iter(widths)).split()[0]
        return StoreRequest(tuple(widths), sizes, group, forward, backward, persistent)

    def _live_attention(self) -> list[StoreRequest]:
        """Return requests for the live layer's keys and values, and for what a checkpoint group holds in backward.

        In training these are also the gradients of keys and values. Where backward computes them again, they are also
        the keys and values of each layer of a group, and the outputs and log-sum-exps of its layers but the last.
        """
        layout, both, widest = self._layout, self._both, self._widths.widest
        live = {"lk": "k", "lv": "v"} | ({"dk": "dk", "dv": "dv"} if layout.trained else {})
        sizes = tuple(tuple(self._live(kind, chunk) for chunk in self._rows) for kind in live.values())
        # Where each layer has its own store for later chunks, the live layer's stores have resident chunks only.
        buffers = ("lk", "lv") if layout.saves and layout.trained.start == 0 else ()
        found = [StoreRequest(tuple(live), sizes, "live kv", both, both, persistent=False, resident_only=buffers)]
        if layout.trained and layout.saves and "kv" not in layout.config.keep:
            saved = sorted({layout.core(layer).k for layer in layout.trained})
            found += [self._request({k: widest("k"), f"v{k[1:]}": widest("v")}, both, both, group="kv") for k in saved]
        if layout.trained and "attention" not in layout.config.keep:
            again = {layout.core(layer) for group in layout.layer_groups() for layer in group[:-1]}
            outputs = sorted({(core.o, core.lse) for core in again})
            found += [self._request({o: widest("o"), lse: widest("lse")}, 0, both) for o, lse in outputs]
        return found

    def _live(self, kind: str, chunk: Chunk) -> int:
        """Return the bytes of a chunk's slot in the layer that needs most; 0 if no layer has so many slots."""
        layers = zip(self._widths.layers, self._live_chunks, strict=True)
        return len(chunk) * max((widths[kind] for widths, count in layers if chunk.index < count), default=0)

    def _live_groups(self) -> list[StoreRequest]:
        """Return requests for head groups: keys and values of the group that runs, and the tensors of all groups.

        Outputs and log-sum-exps are among them only where they are not kept; `_kept` requests the others.
        """
        layout, both = self._layout, self._both
        share = {kind: self._widths.widest(kind) // layout.head_groups for kind in self._widths.layers[0]}
        inner = {"kg": share["k"], "vg": share["v"]}
        kinds = ["q", "k", "v"]
        if layout.trained:
            inner |= {"dk": share["dk"], "dv": share["dv"]}
            kinds.append("do")
        found = [self._request(inner, 0, 0, group="inner")]
        names = [f"{kind}.{g}" for g in range(layout.head_groups) for kind in kinds]
        found += [self._request({name: share[name.split(".")[0]]}, both, both) for name in names]
        live = {
            (names.o, names.lse)
            for layer in range(layout.num_layers)
            if "attention" not in layout.config.keep or layer not in layout.trained
            for names in layout.head_group_stores(layer)
        }
        return found + [self._request({o: share["o"], lse: share["lse"]}, both, both) for o, lse in sorted(live)]

    def _live_hidden(self) -> list[StoreRequest]:
        """Return requests for inputs of layers without a backward, and for recomputed inputs of a checkpoint group."""
        layout, hidden, both = self._layout, self._widths.hidden, self._both
        positions = sorted({layout.position(layer) for layer in layout.trained})
        found = [self._request({f"live {position}": hidden}, both, both, hidden=True) for position in positions[1:]]
        if layout.trained.start > 0:
            found += [self._request({f"pass {i}": hidden}, both, 0, hidden=True) for i in range(2)]
        return found

    def _kept(self) -> list[StoreRequest]:
        """Return requests for the activations kept between forward and backward; none without a trained layer."""
        layout, widths, both, keep = self._layout, self._widths, self._both, self._layout.config.keep
        if not layout.trained:
            return []
        found = [self._request({"dy": widths.hidden}, both, both, persistent=True, hidden=True)]
        for layer in reversed(layout.trained):
            width, core, count = widths.layers[layer], layout.core(layer), layout.head_groups
            if "kv" in keep and count == 1:
                kv = {core.k: width["k"], core.v: width["v"]}
                found.append(self._request(kv, both, both, group="kv", persistent=True))
            if "attention" in keep:
                groups = layout.head_group_stores(layer)
                outputs = [(core.o, core.lse)] if count == 1 else [(names.o, names.lse) for names in groups]
                for o, lse in outputs:
                    parts = {o: width["o"] // count, lse: width["lse"] // count}
                    found.append(self._request(parts, both, self._reading, persistent=True))
            if layout.keeps_input(layer):
                twice = not layout.saves and count == 1 and self._live_chunks[layer] < len(self._rows)
                readers = (
                    2 * self._reading if twice else both
                )  # keys and values of a window: see `recompute.kv_before_replay`
                found.append(
                    self._request({f"input {layer}": widths.hidden}, both, readers, persistent=True, hidden=True)
                )
        return found


def advice_on(config: StreamConfig, tiers: Tiers, chunk_size: int) -> FitHints:
    """Return the settings to change that an error about a placement names.

    Args:
        config: settings of the step.
        tiers: budgets of the model.
        chunk_size: tokens of a chunk on all ranks together.
    """
    added = config.host_budget is not None and tiers.budgets["host"].budget is None  # on a CPU, where both add up
    device = ["device_budget"] if config.device_budget is not None else []
    smaller = [f"chunk_size below {chunk_size:,}", "checkpoint_every=1" if config.checkpoint_every > 1 else "",
               "prefetch=1" if config.prefetch > 1 else ""]  # fmt: skip
    less = ["an empty keep" if config.keep else "", "a larger checkpoint_every (in a deep model)", "a shorter input"]
    return FitHints(
        " + ".join([*device, *(["host_budget"] if added else [])]),
        " or ".join(filter(None, smaller)),
        " or ".join(filter(None, less)),
    )


def choose_placement(
    layout: MemoryLayout,
    widths: BytesPerToken,
    chunks: Sequence[Chunk],
    rows: Sequence[Chunk],
    tiers: Tiers,
    *,
    live_chunks: Sequence[int],
    chunk_size: int,
) -> tuple[MemoryLayout, Placement]:
    """Choose the attention strategy of a step, and place its stores.

    `auto` takes the first that fits: resident, then the fewest head groups, then streamed. Resident means that keys,
    values and their gradients of the live layer (or head group) rest on the device for all chunks.

    Args:
        layout: layout with all heads at once.
        widths: bytes of one token on this rank, in all rows of the batch.
        chunks: this rank's tokens of each chunk.
        rows: this rank's query rows of each chunk, in attention.
        tiers: budgets of the model.
        live_chunks: for each layer, the chunks of keys and values that it holds at a time.
        chunk_size: tokens of a chunk on all ranks together.

    Returns:
        Layout with its number of head groups, and the placement.

    Raises:
        ValueError: the stores do not fit, or not with the `attn_strategy` that is set.
    """
    strategy, advice = layout.config.attn_strategy, advice_on(layout.config, tiers, chunk_size)

    def placed(layout: MemoryLayout, *, streamed: bool = False) -> Placement:
        asked = StoreRequests(layout, widths, chunks, rows, live_chunks, tiers.prefetch).all()
        if streamed:
            asked = [replace(request, allow_resident=request.group != "live kv") for request in asked]
        return tiers.place(asked, advice)

    def resident(layout: MemoryLayout, placement: Placement) -> bool:
        cores = (
            [HEAD_GROUP_STORES]
            if layout.head_groups > 1
            else [layout.core(layer) for layer in range(layout.num_layers)]
        )
        names = {name for core in cores for name in core.working_set} & set(placement.places)
        return all(placement.num_on_device(name) == len(chunks) for name in names)

    if strategy == "streamed" and not any(tiers.budgets[tier].budget for tier in tiers.budgets if tier != "device"):
        raise ValueError(
            "attn_strategy='streamed' moves keys and values out of the device, and there is nowhere to move them: set "
            "offload_dir to a folder (or host_budget on an accelerator), or leave attn_strategy at 'auto'."
        )
    if strategy == "streamed":
        return layout, placed(layout, streamed=True)
    if strategy in ("auto", "resident"):
        placement = placed(layout)
        if resident(layout, placement):
            return layout, placement
    num_kv_heads = widths.num_kv_heads
    if strategy in ("auto", "head_groups"):
        for count in (n for n in range(2, num_kv_heads + 1) if num_kv_heads % n == 0):
            grouped = replace(layout, head_groups=count)
            with contextlib.suppress(ValueError):
                found = placed(grouped)
                if resident(grouped, found):
                    return grouped, found
    if strategy == "auto":
        return layout, placement
    if strategy == "head_groups" and num_kv_heads == 1:
        raise ValueError(
            "attn_strategy='head_groups': this model has one key/value head, which cannot be cut: use 'streamed'."
        )
    raise ValueError(
        f"attn_strategy={strategy!r}: keys, values and their gradients of "
        f"{'a layer' if strategy == 'resident' else 'one head'} do not fit in device_budget beside chunks that move. "
        "Raise it, use a smaller chunk_size, or attn_strategy='streamed'."
    )
