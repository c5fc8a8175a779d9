"""Cache files: one safetensors file for each chunk of keys and values, and a JSON page that describes them.

Files are written chunk by chunk from any tier, into a temporary folder that is renamed at the end: a folder of that
name is always complete. Each rank writes its own part.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trunkline.attention.kv_store import KVStore
from trunkline.attention.mask import Range
from trunkline.chunking import Chunk, spans
from trunkline.kv_cache.budget import bytes_to_continue, bytes_to_decode, no_room_message
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.segment import KVFeed, KVSegment, make_stores, read_bytes

VERSION = 2
_PAGE = "cache.json"
_REST = "rest.safetensors"


def save(cache: StreamedCache, folder: Path, model: dict[str, Any]) -> None:
    """Write a cache to a folder.

    Args:
        cache: the cache; it does not change.
        folder: must not exist.
        model: identity of the model, which `load` compares.

    Raises:
        ValueError: the folder exists, or the cache is empty.
    """
    if folder.exists():
        raise ValueError(f"'{folder}' exists: give a new folder for the cache.")
    if not cache.length:
        raise ValueError("the cache holds nothing yet: prefill it first.")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    segments = []
    for number, view in enumerate(cache.segments):
        segment, token_bytes = view.segment, list[list[int]]()
        count = sum(first < view.stop for first, _ in segment.token_ranges)  # chunks that were not cropped entirely
        for chunk in segment.chunks[count - 1 :: -1]:  # the last chunk first: a window has dropped it in no layer
            tensors = _chunk_tensors(segment, chunk)
            save_file(tensors, partial / _file(number, chunk))
            tokens = segment.batch * len(chunk)
            token_bytes = token_bytes or [
                [tensors[f"{kind}.{layer}"].nbytes // tokens if f"{kind}.{layer}" in tensors else 0 for kind in "kv"]
                for layer in range(len(segment.kv))
            ]
        segments.append({
            "start": segment.start, "stop": view.stop, "rows": view.rows, "batch": segment.batch,
            "token_bytes": token_bytes, "chunks": [[chunk.start, chunk.stop] for chunk in segment.chunks[:count]],
            "token_ranges": segment.token_ranges[:count], "num_dropped": segment.num_dropped,
        })  # fmt: skip
    buffer = cache.decode_buffer
    if buffer is not None and buffer.num_tokens:
        pairs = [cache.local_decoded(layer) for layer in range(len(cache))]
        count = pairs[0][0].shape[2]
        tensors = {f"{kind}.{i}": pair[at].cpu() for i, pair in enumerate(pairs) for at, kind in enumerate("kv")}
        save_file(tensors, partial / _file(len(segments), Chunk(0, 0, count)))
        segments.append({
            "start": buffer.start, "stop": buffer.stop, "rows": None, "batch": buffer.batch,
            "token_bytes": [[x.nbytes // (buffer.batch * count) for x in pair] for pair in pairs],
            "chunks": [[0, count]], "token_ranges": [[buffer.start, buffer.stop]], "num_dropped": [0] * len(pairs),
        })  # fmt: skip
    page = {
        "version": VERSION, "model": model, "length": cache.length, "batch": cache.batch_size,
        "documents": cache.documents, "segments": segments,
    }  # fmt: skip
    rest = {"next_positions": cache.next_positions, "logits": cache.logits, "tokens": cache.tokens,
            "positions": cache.positions}  # fmt: skip
    save_file({name: x.cpu().contiguous() for name, x in rest.items() if x is not None}, partial / _REST)
    (partial / _PAGE).write_text(json.dumps(page), encoding="utf-8")
    partial.rename(folder)


def load(
    cache: StreamedCache, folder: Path, model: dict[str, Any], device: torch.device, *, hidden: int, chunk_tokens: int,
    size: int,
) -> None:  # fmt: skip
    """Read a folder that `save` wrote into a new cache.

    Args:
        cache: empty.
        folder: the folder.
        model: identity of the model; the cache must be of the same.
        device: of the model.
        hidden: bytes of a token's hidden state.
        chunk_tokens: tokens of a chunk of prompt, for which the device keeps room where it can.
        size: ranks that such a chunk is cut over.

    Raises:
        ValueError: the folder holds no cache, a damaged one, or another model's; or it does not fit in the budgets.
    """
    try:
        page = json.loads((folder / _PAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{folder}' holds no cache that can be read ({error}): give one that was saved.") from None
    if page.get("version") != VERSION:
        raise ValueError(f"'{folder}' was written in format {page.get('version')}, and this reads {VERSION}.")
    for name, value in model.items():
        if page["model"].get(name) != value:
            raise ValueError(
                f"'{folder}' is the cache of another model ({name} is {page['model'].get(name)!r} there and {value!r} "
                "here): prefill it with this one."
            )
    cache.expand_rows(page["batch"])
    widths = [entry["token_bytes"] for entry in page["segments"]]
    cache.token_bytes = [(max(k for k, _ in layer), max(v for _, v in layer)) for layer in zip(*widths, strict=True)]
    # Over ranks a chunk's tokens interleave with other ranks': chunks cannot be cut, and stay as they were written.
    longest_chunk = chunk_tokens if cache.tiers.limited and cache.part[1] == 1 else None
    plans = [_ReadPlan.of(entry, longest_chunk) for entry in page["segments"]]
    longest = max(len(chunk) for plan in plans for chunk in plan.chunks)
    cache.spare_bytes = bytes_to_continue(cache, page["batch"], longest, hidden, chunk_tokens // size)
    least = bytes_to_decode(cache, page["batch"], longest)
    for number, (entry, plan) in enumerate(zip(page["segments"], plans, strict=True)):
        rows = None if entry["rows"] is None else tuple(entry["rows"])
        cache.append_segment(_read_segment(cache, entry, plan, folder, number, device, least), rows)
    with _opened(folder / _REST, "cpu") as file:
        rest: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    logits = rest["logits"].to(device) if "logits" in rest else None
    documents = tuple(tuple(starts) for starts in page["documents"])
    cache.commit(page["length"], documents, rest["next_positions"], logits, rest["tokens"], rest["positions"])


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


def _chunk_tensors(segment: KVSegment, chunk: Chunk) -> dict[str, Tensor]:
    """Return keys and values of a chunk on the CPU, by name; layers that dropped the chunk are left out."""
    tensors: dict[str, Tensor] = {}
    for layer, store in enumerate(segment.kv):
        if chunk.index < segment.num_dropped[layer]:
            continue
        if chunk.index < segment.num_resident[layer]:
            k, v = store.view(chunk.start, chunk.stop)
        else:
            with KVFeed(iter([(chunk.index, store.sequences)])) as feed:
                k, v = (x.clone() for x in next(feed))  # the feed reuses its buffers once it is closed
        tensors |= {f"k.{layer}": k.cpu().contiguous(), f"v.{layer}": v.cpu().contiguous()}
    return tensors


def _read_segment(
    cache: StreamedCache, entry: dict[str, Any], plan: _ReadPlan, folder: Path, number: int, device: torch.device,
    least: int,
) -> KVSegment:  # fmt: skip
    """Read a segment into the tiers.

    Args:
        cache: the cache that it belongs to.
        entry: the segment in the page.
        plan: its chunks as they are read.
        folder: of the files.
        number: of the segment.
        device: of the model.
        least: device bytes that must stay free.
    """
    layers, chunks = range(len(plan.num_dropped)), plan.chunks
    arguments = cache.tiers, entry["batch"], chunks, entry["token_bytes"], plan.num_dropped
    try:
        stores = make_stores(*arguments, (cache.spare_bytes, least))
    except ValueError:
        make_stores(*arguments, (0,)).close()  # raises the error that names the tier, unless only `least` is lacking
        raise ValueError(no_room_message(least)) from None
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
    if cache.tiers.limited:
        stores.limit_transient(read_bytes(segment, cache.token_bytes))
    return segment
