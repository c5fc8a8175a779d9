"""Saving and loading of caches: a long prompt is read once, and used in many processes.

A folder has one safetensors file for each chunk of keys and values, and a JSON page that describes them. Files are
written chunk by chunk from any tier, into a temporary folder that is renamed at the end: a folder of that name is
always complete. Over ranks this holds for each rank's part, a folder in it with the rank's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trunkline.api import streamed_forward
from trunkline.attention.kv_store import KVStore
from trunkline.attention.mask import Range
from trunkline.chunking import Chunk, spans
from trunkline.forward import StreamedForward
from trunkline.kv_cache.budget import bytes_to_continue, bytes_to_decode, make_stores
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.segment import KVSegment

VERSION = 2
_PAGE = "cache.json"
_REST = "rest.safetensors"
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_IGNORED_CONFIG = (  # settings that do not change keys and values
    "_attn_implementation",
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
)


def save_cache(model: nn.Module, cache: StreamedCache, folder: str | Path) -> None:
    """Write a cache to a folder: safetensors, chunk by chunk from any tier, and a JSON page.

    Over ranks every rank calls this and writes its own part, to a folder in `folder`.

    Args:
        model: the streamed model of the cache.
        cache: from `trunkline.prefill`; it does not change.
        folder: must not exist; it appears once it is complete. Over ranks this holds for each rank's part in it, not
            for the folder itself.

    Raises:
        ValueError: the folder (over ranks, this rank's part) exists, the cache is empty, or it is another model's or of
            other settings of `stream`.
    """
    forward = streamed_forward(model, "save_cache")
    if cache.tiers is not forward.tiers:
        raise ValueError("this cache is another model's, or of other settings of stream(): it cannot be saved here.")
    folder = _part(Path(folder), forward)
    if folder.exists():
        raise ValueError(f"'{folder}' exists: give a new folder for the cache.")
    if not cache.length:
        raise ValueError("the cache holds nothing yet: prefill it first.")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    segments: list[dict[str, Any]] = []

    def write(
        chunks: Sequence[Chunk], token_ranges: Sequence[Range], num_dropped: list[int],
        tensors_of: Callable[[Chunk], dict[str, Tensor]], **fields: Any,
    ) -> None:  # fmt: skip
        token_bytes = list[list[int]]()
        for chunk in reversed(chunks):  # the last chunk first: a window has dropped it in no layer
            tensors = tensors_of(chunk)
            save_file(tensors, partial / _file(len(segments), chunk))
            tokens = fields["batch"] * len(chunk)
            token_bytes = token_bytes or [
                [tensors[f"{kind}.{layer}"].nbytes // tokens if f"{kind}.{layer}" in tensors else 0 for kind in "kv"]
                for layer in range(len(cache))
            ]
        segments.append({
            **fields, "token_bytes": token_bytes, "chunks": [[chunk.start, chunk.stop] for chunk in chunks],
            "token_ranges": token_ranges, "num_dropped": num_dropped,
        })  # fmt: skip

    for view in cache.segments:
        segment = view.segment
        count = sum(first < view.stop for first, _ in segment.token_ranges)  # chunks that were not cropped entirely
        write(segment.chunks[:count], segment.token_ranges[:count], segment.num_dropped, segment.to_host,
              start=segment.start, stop=view.stop, rows=view.rows, batch=segment.batch)  # fmt: skip
    buffer = cache.decode_buffer
    if buffer is not None and buffer.num_tokens:
        pairs = [cache.local_decoded(layer) for layer in range(len(cache))]
        tensors = {f"{kind}.{i}": x.cpu() for i, pair in enumerate(pairs) for kind, x in zip("kv", pair, strict=True)}
        write([Chunk(0, 0, pairs[0][0].shape[2])], [(buffer.start, buffer.stop)], [0] * len(pairs), lambda _: tensors,
              start=buffer.start, stop=buffer.stop, rows=None, batch=buffer.batch)  # fmt: skip
    page = {
        "version": VERSION, "model": _identity(forward), "length": cache.length, "batch": cache.batch_size,
        "documents": cache.documents, "segments": segments,
    }  # fmt: skip
    rest = {"next_positions": cache.next_positions, "logits": cache.logits, "tokens": cache.tokens,
            "positions": cache.positions}  # fmt: skip
    save_file({name: x.cpu().contiguous() for name, x in rest.items() if x is not None}, partial / _REST)
    (partial / _PAGE).write_text(json.dumps(page), encoding="utf-8")
    partial.rename(folder)


def load_cache(model: nn.Module, folder: str | Path) -> StreamedCache:
    """Load a cache that `save_cache` wrote into the tiers of a model.

    Over ranks every rank calls this and reads its own part.

    Args:
        model: streamed over an equal mesh, with the weights that filled the cache; chunk size and budgets may differ.
        folder: written by `save_cache`.

    Returns:
        The cache.

    Raises:
        ValueError: the folder holds no cache, a damaged one, or that of another model or mesh; or it does not fit in
            the budgets.
    """
    forward = streamed_forward(model, "load_cache")
    cache, folder, device = forward.new_cache(), _part(Path(folder), forward), forward.decoder.device
    try:
        page = json.loads((folder / _PAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{folder}' holds no cache that can be read ({error}): give one that was saved.") from None
    if page.get("version") != VERSION:
        raise ValueError(f"'{folder}' was written in format {page.get('version')}, and this reads {VERSION}.")
    for name, value in _identity(forward).items():
        if page["model"].get(name) != value:
            raise ValueError(
                f"'{folder}' is the cache of another model ({name} is {page['model'].get(name)!r} there and {value!r} "
                "here): prefill it with this one."
            )
    cache.expand_rows(page["batch"])
    widths = [entry["token_bytes"] for entry in page["segments"]]
    cache.token_bytes = [(max(k for k, _ in layer), max(v for _, v in layer)) for layer in zip(*widths, strict=True)]
    # Over ranks a chunk's tokens interleave with other ranks': chunks cannot be cut, and stay as they were written.
    chunk_tokens = forward.config.chunk_tokens(device)
    longest_chunk = chunk_tokens if cache.tiers.limited and cache.part[1] == 1 else None
    plans = [_ReadPlan.of(entry, longest_chunk) for entry in page["segments"]]
    longest = max(len(chunk) for plan in plans for chunk in plan.chunks)
    parameter = next(forward.decoder.model.parameters())
    hidden = forward.decoder.model.config.get_text_config().hidden_size * parameter.dtype.itemsize
    # The device keeps room for another chunk of prompt where it can.
    cache.spare_bytes = bytes_to_continue(cache, page["batch"], longest, hidden, chunk_tokens // forward.ranks.size)
    least = bytes_to_decode(cache, page["batch"], longest)
    for number, (entry, plan) in enumerate(zip(page["segments"], plans, strict=True)):
        rows = None if entry["rows"] is None else tuple(entry["rows"])
        cache.append_segment(_read_segment(cache, entry, plan, folder, number, device, least), rows)
    with _opened(folder / _REST, "cpu") as file:
        rest: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    logits = rest["logits"].to(device) if "logits" in rest else None
    documents = tuple(tuple(starts) for starts in page["documents"])
    cache.commit(page["length"], documents, rest["next_positions"], logits, rest["tokens"], rest["positions"])
    return cache


def _part(folder: Path, forward: StreamedForward) -> Path:
    """Return the folder of this rank's part; the folder itself without a mesh."""
    return folder / forward.ranks.name if forward.ranks.name else folder


def _identity(forward: StreamedForward) -> dict[str, Any]:
    """Return the identity of a model and rank: a cache is used only with an equal one."""
    model = forward.decoder.model
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IGNORED_CONFIG}
    text = json.dumps(config, sort_keys=True, default=str)
    total = 0
    for number, parameter in enumerate(model.parameters(), 1):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        bits = local.detach().contiguous().view(_BITS[local.dtype.itemsize])
        total = (total * 31 + int(bits.sum(dtype=torch.long)) + number) % 2**61
    return {
        "class": type(model).__name__, "config": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "weights": total, "rank": forward.ranks.name,
    }  # fmt: skip


def _file(number: int, chunk: Chunk) -> str:
    return f"segment-{number:05}-chunk-{chunk.index:05}.safetensors"


@contextlib.contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    """Open a cache file for the duration of a `with`; its tensors are loaded to `device`.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        with safe_open(path, "pt", device=device) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"'{path.parent}' is a damaged cache: {path.name} cannot be read ({error}). Prefill and save it anew."
        ) from None


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """Chunks of a segment as they are read: as written, or cut to the reader's chunk size.

    Attributes:
        chunks: the chunks.
        token_ranges: positions of their tokens in the sequence.
        sources: for each chunk, the written chunk that it is part of, and its first token there.
        num_dropped: for each layer, chunks that were dropped, counted from the first.
    """

    chunks: list[Chunk]
    token_ranges: list[Range]
    sources: list[tuple[Chunk, int]]
    num_dropped: list[int]

    @classmethod
    def of(cls, entry: dict[str, Any], longest: int | None) -> _ReadPlan:
        """Plan a segment of the page; chunks longer than `longest` are cut, None leaves all as written."""
        plan, firsts = cls([], [], [], []), [0]
        for number, ((start, stop), (first, last)) in enumerate(
            zip(entry["chunks"], entry["token_ranges"], strict=True)
        ):
            written, shift = Chunk(number, start, stop), first - start
            for at, end in spans(start, stop, longest or stop - start):
                plan.chunks.append(Chunk(len(plan.chunks), at, end))
                bounds = (first, last) if longest is None else (min(at + shift, last), min(end + shift, last))
                plan.token_ranges.append(bounds)
                plan.sources.append((written, at - start))
            firsts.append(len(plan.chunks))
        plan.num_dropped.extend(firsts[count] for count in entry["num_dropped"])
        return plan


def _read_segment(
    cache: StreamedCache, entry: dict[str, Any], plan: _ReadPlan, folder: Path, number: int, device: torch.device,
    least: int,
) -> KVSegment:  # fmt: skip
    """Read a segment, an entry of the page, into the tiers; at least `least` device bytes stay free."""
    layers, chunks = range(len(plan.num_dropped)), plan.chunks
    spare = cache.spare_bytes, least
    stores = make_stores(cache.tiers, entry["batch"], chunks, entry["token_bytes"], plan.num_dropped, spare)
    # Without budgets a layer is one buffer, unless its window drops chunks one by one.
    unlimited = stores.placement is None
    resident = [len(chunks) if unlimited and cache.attention_spans[i].window is None else 0 for i in layers]
    kv = [KVStore(chunks, resident[i], stores, (f"k {i}", f"v {i}")) for i in layers]
    with stores.close_on_error():
        for chunk, (written, at) in zip(chunks, plan.sources, strict=True):
            with _opened(folder / _file(number, written), str(device)) as file:
                for layer in layers:
                    if chunk.index >= plan.num_dropped[layer]:
                        k, v = (file.get_slice(f"{kind}.{layer}")[:, :, at : at + len(chunk)] for kind in "kv")
                        kv[layer].put(chunk, (k.contiguous(), v.contiguous()))
        stores.flush_all()
    ranges = plan.token_ranges
    segment = KVSegment(entry["start"], entry["stop"], entry["batch"], chunks, ranges, kv, resident, stores)
    segment.num_dropped = list(plan.num_dropped)
    return segment
