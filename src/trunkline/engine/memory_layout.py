"""What a run keeps: the names of its stores, how large they are, and which of them may choose their tier first.

The live layer's keys, values and their gradients come first, since every later chunk goes through them; then what each
layer reads and writes once; then what waits for its backward, the last layer's first.
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

# What kinds of stores hold, for people.
WORDS = {
    "input": "layer inputs", "live": "layer inputs", "pass": "layer inputs", "dy": "gradients of hidden states",
    "o": "attention outputs", "lse": "attention outputs", "do": "queries", "q": "queries",
    "k": "keys and values", "v": "keys and values", "lk": "keys and values", "lv": "keys and values",
    "kg": "keys and values", "vg": "keys and values", "dk": "gradients of keys and values",
    "dv": "gradients of keys and values",
}  # fmt: skip

INNER = CoreStores("kg", "vg", "-", "-")  # of the one group of heads that is resident at a time


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Names of the stores of a run.

    The first word of a name is its kind: stores of one kind are written by one layer at a time.

    Attributes:
        config: settings.
        num_layers: decoder layers.
        first: lowest layer with a backward sweep; None where there is none.
        head_groups: how many groups attention is computed in, one after another; 1 takes all heads at once.
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
        """The place of a layer in its group; the input of those at 0 is kept."""
        return (layer - self.trained.start) % self.config.checkpoint_every

    def input(self, layer: int) -> str:
        """The store of a layer's input, or behind the last layer of the final hidden state."""
        if self.first is None or layer < self.first:
            return f"pass {layer % 2}"
        if layer == self.num_layers:
            return "dy"  # its chunks leave before their gradients come
        return f"live {self.position(layer)}" if self.position(layer) else f"input {layer}"

    def core(self, layer: int) -> CoreStores:
        """The stores of a layer's core."""
        if layer not in self.trained:
            return CoreStores("lk", "lv", "o", "lse")  # the last two are not used
        output = self._output(layer)
        if not self.saves:
            return CoreStores("lk", "lv", f"o {output}", f"lse {output}")
        kv = layer if "kv" in self.config.keep else self.position(layer)
        return CoreStores(f"k {kv}", f"v {kv}", f"o {output}", f"lse {output}", working_k="lk", working_v="lv")

    @property
    def saves(self) -> bool:
        """Whether keys and values outlive the sweep in which their layer is live."""
        return "kv" in self.config.keep or self.config.checkpoint_every > 1

    def by_groups(self, layer: int) -> list[HeadGroupStores]:
        """The stores of each head group of a layer."""
        output = self._output(layer) if layer in self.trained else 0
        return [
            HeadGroupStores(f"q.{g}", f"k.{g}", f"v.{g}", f"do.{g}", f"o.{g} {output}", f"lse.{g} {output}")
            for g in range(self.head_groups)
        ]

    def _output(self, layer: int) -> int:
        return layer if "attention" in self.config.keep else self.position(layer)

    def groups(self) -> Iterator[range]:
        """Layers whose inputs are regenerated together, from the last down to the first."""
        every = self.config.checkpoint_every
        for start in reversed(range(self.trained.start, self.trained.stop, every)):
            yield range(start, min(start + every, self.num_layers))


@dataclass(frozen=True, slots=True)
class BytesPerToken:
    """Bytes per position of the sequence, of all rows of a batch.

    Attributes:
        hidden: of the residual stream.
        layers: of each layer's q, k, v, do, o, lse, dk, dv, by name.
        num_kv_heads: that the key/value heads of every layer can be cut into.
    """

    hidden: int
    layers: list[dict[str, int]]
    num_kv_heads: int

    @staticmethod
    def of_attention(q: Tensor, k: Tensor, v: Tensor, kernel: str, softcap: float | None) -> dict[str, int]:
        """Those of a layer, from what it calls its attention with for one token."""
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
        """Those of so many rows."""
        layers = [{kind: nbytes * rows for kind, nbytes in layer.items()} for layer in self.layers]
        return BytesPerToken(self.hidden * rows, layers, self.num_kv_heads)

    def widest(self, kind: str) -> int:
        """That of the layer where it is largest."""
        return max(layer[kind] for layer in self.layers)


class StoreRequests:
    """What the stores of a run ask of the tiers.

    Args:
        layout: their names.
        widths: of everything.
        chunks: of the sequence, of each the tokens of this rank.
        rows: that attention of each chunk has on this rank.
        live_chunks: whose keys and values are held at a time, of each layer; all but where a window lets go of some.
        prefetch: tensors of one store on the device at a time.
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
        # A reader's user still holds the chunk before the one that it takes.
        self._reading, self._writing = prefetch + 1, max(prefetch - 1, 1)
        self._both = self._reading + self._writing

    def all(self) -> list[StoreRequest]:
        """All of them, in the order in which they choose."""
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
        """Keys, values and their gradients of the layer, or of the group of layers, that is under way."""
        layout, both, widest = self._layout, self._both, self._widths.widest
        live = {"lk": "k", "lv": "v"} | ({"dk": "dk", "dv": "dv"} if layout.trained else {})
        sizes = tuple(tuple(self._live(kind, chunk) for chunk in self._rows) for kind in live.values())
        # Where each layer has its own store for later chunks, those of the live layer are for what is resident alone.
        buffers = ("lk", "lv") if layout.saves and layout.trained.start == 0 else ()
        found = [StoreRequest(tuple(live), sizes, "live kv", both, both, persistent=False, resident_only=buffers)]
        if layout.trained and layout.saves and "kv" not in layout.config.keep:
            saved = sorted({layout.core(layer).k for layer in layout.trained})
            found += [self._request({k: widest("k"), f"v{k[1:]}": widest("v")}, both, both, group="kv") for k in saved]
        if layout.trained and "attention" not in layout.config.keep:
            again = {layout.core(layer) for group in layout.groups() for layer in group[:-1]}
            outputs = sorted({(core.o, core.lse) for core in again})
            found += [self._request({o: widest("o"), lse: widest("lse")}, 0, both) for o, lse in outputs]
        return found

    def _live(self, kind: str, chunk: Chunk) -> int:
        """Bytes that the place of a chunk takes in the layer where most are wanted: with a window few have a place."""
        layers = zip(self._widths.layers, self._live_chunks, strict=True)
        return len(chunk) * max((widths[kind] for widths, count in layers if chunk.index < count), default=0)

    def _live_groups(self) -> list[StoreRequest]:
        """The same where attention goes head group by head group, of which one has its keys and values resident."""
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
            for names in layout.by_groups(layer)
        }
        return found + [self._request({o: share["o"], lse: share["lse"]}, both, both) for o, lse in sorted(live)]

    def _live_hidden(self) -> list[StoreRequest]:
        """Layer inputs that do not wait for a backward, and those of a group that are computed again."""
        layout, hidden, both = self._layout, self._widths.hidden, self._both
        positions = sorted({layout.position(layer) for layer in layout.trained})
        found = [self._request({f"live {position}": hidden}, both, both, hidden=True) for position in positions[1:]]
        if layout.trained.start > 0:
            found += [self._request({f"pass {i}": hidden}, both, 0, hidden=True) for i in range(2)]
        return found

    def _kept(self) -> list[StoreRequest]:
        """What is there between forward and backward."""
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
                outputs = [(core.o, core.lse)] if count == 1 else [(n.o, n.lse) for n in layout.by_groups(layer)]
                for o, lse in outputs:
                    parts = {o: width["o"] // count, lse: width["lse"] // count}
                    found.append(self._request(parts, both, self._reading, persistent=True))
            if layout.position(layer) == 0:
                twice = not layout.saves and count == 1 and self._live_chunks[layer] < len(self._rows)
                readers = 2 * self._reading if twice else both  # keys and values of a window: see `again.project_kv`
                found.append(
                    self._request({f"input {layer}": widths.hidden}, both, readers, persistent=True, hidden=True)
                )
        return found


def advice_on(config: StreamConfig, tiers: Tiers, chunk_size: int) -> FitHints:
    """What the messages of a placement say of these settings."""
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


def choose(
    layout: MemoryLayout,
    widths: BytesPerToken,
    chunks: Sequence[Chunk],
    rows: Sequence[Chunk],
    tiers: Tiers,
    *,
    live_chunks: Sequence[int],
    chunk_size: int,
) -> tuple[MemoryLayout, Placement]:
    """Place the stores of a run, by the first strategy that fits or the one that is set.

    Args:
        layout: with all heads at once.
        widths: of everything.
        chunks: of the sequence, of each the tokens of this rank.
        rows: that attention of each chunk has on this rank.
        tiers: where it may rest.
        live_chunks: whose keys and values are held at a time, of each layer.
        chunk_size: tokens of a chunk on all ranks together.

    Returns:
        The layout with its head groups, and the placement.

    Raises:
        ValueError: nothing fits, or not the strategy that is set.
    """
    strategy, advice = layout.config.attn_strategy, advice_on(layout.config, tiers, chunk_size)

    def placed(layout: MemoryLayout, *, streamed: bool = False) -> Placement:
        asked = StoreRequests(layout, widths, chunks, rows, live_chunks, tiers.prefetch).all()
        if streamed:
            asked = [replace(request, allow_resident=request.group != "live kv") for request in asked]
        return tiers.place(asked, advice)

    def resident(layout: MemoryLayout, placement: Placement) -> bool:
        cores = [INNER] if layout.head_groups > 1 else [layout.core(layer) for layer in range(layout.num_layers)]
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
        f"{'a layer' if strategy == 'resident' else 'one head'} do not fit in device_budget beside what is under way: "
        "raise it, use a smaller chunk_size, or attn_strategy='streamed'."
    )
