"""A cache on disk: one safetensors file for each chunk of keys and values, and a page that says what they are.

Written chunk by chunk from whichever tier, beside the place and then moved there: what is on disk is whole. Every rank
writes its own part.
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
from trunkline.kv_cache.budget import least_room, no_room_to_decode, room_to_go_on
from trunkline.kv_cache.cache import StreamedCache
from trunkline.kv_cache.cached_attention import KVFeed
from trunkline.kv_cache.segment import KVSegment, reading_bytes, stores_of

VERSION = 1
_PAGE = "cache.json"
_REST = "rest.safetensors"


def save(cache: StreamedCache, folder: Path, model: dict[str, Any]) -> None:
    """Write a cache.

    Args:
        cache: what to write; it stays as it is.
        folder: new.
        model: what says of a model whether the cache is its own.

    Raises:
        ValueError: the folder exists, or the cache holds nothing.
    """
    if folder.exists():
        raise ValueError(f"'{folder}' exists: give a new folder for the cache.")
    if not cache.length:
        raise ValueError("the cache holds nothing yet: prefill it first.")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    stretches = []
    for number, link in enumerate(cache.links):
        stretch, widths = link.stretch, list[list[int]]()
        count = sum(first < link.stop for first, _ in stretch.places)  # chunks that are not forgotten as a whole
        for chunk in stretch.chunks[count - 1 :: -1]:  # the last has those of all layers
            tensors = _of_chunk(stretch, chunk)
            save_file(tensors, partial / _file(number, chunk))
            tokens = stretch.batch * len(chunk)
            widths = widths or [
                [tensors[f"{kind}.{layer}"].nbytes // tokens if f"{kind}.{layer}" in tensors else 0 for kind in "kv"]
                for layer in range(len(stretch.pairs))
            ]
        stretches.append({
            "start": stretch.start, "stop": link.stop, "rows": link.rows, "batch": stretch.batch, "widths": widths,
            "chunks": [[chunk.start, chunk.stop] for chunk in stretch.chunks[:count]],
            "places": stretch.places[:count], "passed": stretch.passed,
        })  # fmt: skip
    end = cache.open_end
    if end is not None and end.filled:
        pairs = [cache.own_part(layer) for layer in range(len(cache))]
        count = pairs[0][0].shape[2]
        tensors = {f"{kind}.{i}": pair[at].cpu() for i, pair in enumerate(pairs) for at, kind in enumerate("kv")}
        save_file(tensors, partial / _file(len(stretches), Chunk(0, 0, count)))
        stretches.append({
            "start": end.start, "stop": end.stop, "rows": None, "batch": end.batch,
            "widths": [[x.nbytes // (end.batch * count) for x in pair] for pair in pairs],
            "chunks": [[0, count]], "places": [[end.start, end.stop]], "passed": [0] * len(pairs),
        })  # fmt: skip
    page = {
        "version": VERSION, "model": model, "length": cache.length, "batch": cache.batch_size,
        "documents": cache.documents, "stretches": stretches,
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
    """Read into a new cache what another held.

    Args:
        cache: empty.
        folder: as `save` wrote it.
        model: what says whether it is of the same model.
        device: of the model.
        hidden: bytes of a token's hidden state.
        chunk_tokens: of a chunk, for which there shall be room on the device, to go on with.
        size: ranks that have its hidden states.

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
    cache.begin(page["batch"])
    widths = [known["widths"] for known in page["stretches"]]
    cache.widths = [(max(k for k, _ in layer), max(v for _, v in layer)) for layer in zip(*widths, strict=True)]
    most = chunk_tokens if cache.tiers.limited and cache.part[1] == 1 else None
    found = [_Pieces.of(known, most) for known in page["stretches"]]
    longest = max(len(chunk) for pieces in found for chunk in pieces.chunks)
    cache.room = room_to_go_on(cache, page["batch"], longest, hidden, chunk_tokens // size)
    least = least_room(cache, page["batch"], longest)
    for number, (known, pieces) in enumerate(zip(page["stretches"], found, strict=True)):
        rows = None if known["rows"] is None else tuple(known["rows"])
        cache.append(_read_stretch(cache, known, pieces, folder, number, device, least), rows)
    with _opened(folder / _REST, "cpu") as file:
        rest: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    logits = rest["logits"].to(device) if "logits" in rest else None
    documents = tuple(tuple(starts) for starts in page["documents"])
    cache.grown(page["length"], documents, rest["next_positions"], logits, rest["tokens"], rest["positions"])


def _file(number: int, chunk: Chunk) -> str:
    return f"stretch-{number:05}-chunk-{chunk.index:05}.safetensors"


@contextlib.contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    """A file of a cache, whose tensors come to a device.

    Raises:
        ValueError: it is not there, or not what was written.
    """
    try:
        with safe_open(path, "pt", device=device) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"'{path.parent}' is a damaged cache: {path.name} cannot be read ({error}). Prefill and save it anew."
        ) from None


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Chunks of a stretch as they are read.

    Attributes:
        chunks: these.
        places: of their tokens in the sequence.
        source: the chunk in the files that each is of, and where its tokens begin there.
        passed: how many of them, from the first, each layer goes without.
    """

    chunks: list[Chunk]
    places: list[Range]
    source: list[tuple[Chunk, int]]
    passed: list[int]

    @classmethod
    def of(cls, known: dict[str, Any], longest: int | None) -> _Pieces:
        """Those of a page, or where there are longer ones than the longest, pieces of them."""
        found, firsts = cls([], [], [], []), [0]
        for number, ((start, stop), (first, last)) in enumerate(zip(known["chunks"], known["places"], strict=True)):
            written, shift = Chunk(number, start, stop), first - start
            for at, end in spans(start, stop, longest or stop - start):
                found.chunks.append(Chunk(len(found.chunks), at, end))
                # Of ranks that hold parts a chunk has tokens from elsewhere between its own: those stay whole.
                place = (first, last) if longest is None else (min(at + shift, last), min(end + shift, last))
                found.places.append(place)
                found.source.append((written, at - start))
            firsts.append(len(found.chunks))
        found.passed.extend(firsts[count] for count in known["passed"])
        return found


def _of_chunk(stretch: KVSegment, chunk: Chunk) -> dict[str, Tensor]:
    """Keys and values of a chunk, of the layers that still have it."""
    found: dict[str, Tensor] = {}
    for layer, pairs in enumerate(stretch.pairs):
        if chunk.index < stretch.passed[layer]:
            continue
        if chunk.index < stretch.num_resident[layer]:
            k, v = pairs.span(chunk.start, chunk.stop)
        else:
            with KVFeed(iter([(chunk.index, pairs.later)])) as feed:
                k, v = (x.clone() for x in next(feed))
        found |= {f"k.{layer}": k.cpu().contiguous(), f"v.{layer}": v.cpu().contiguous()}
    return found


def _read_stretch(
    cache: StreamedCache, known: dict[str, Any], pieces: _Pieces, folder: Path, number: int, device: torch.device,
    least: int,
) -> KVSegment:  # fmt: skip
    """Read a stretch into the tiers.

    Args:
        cache: that it is of.
        known: what the page says of it.
        pieces: in which it is read.
        folder: of the files.
        number: of the stretch.
        device: of the model.
        least: bytes of the device that stay free at least.
    """
    layers, chunks = range(len(pieces.passed)), pieces.chunks
    asked = cache.tiers, known["batch"], chunks, known["widths"], pieces.passed
    try:
        stores = stores_of(*asked, (cache.room, least))
    except ValueError:
        stores_of(*asked, (0,)).close()  # says what does not fit, if it is not the room
        raise ValueError(no_room_to_decode(least)) from None
    stays = stores.placement is None  # in one buffer for each layer, where no window lets go of some
    resident = [len(chunks) if stays and cache.attention_spans[i].window is None else 0 for i in layers]
    pairs = [KVStore(chunks, resident[i], stores, (f"k {i}", f"v {i}")) for i in layers]
    with stores.close_on_error():
        for chunk, (written, at) in zip(chunks, pieces.source, strict=True):
            with _opened(folder / _file(number, written), str(device)) as file:
                for layer in layers:
                    if chunk.index >= pieces.passed[layer]:
                        k, v = (file.get_slice(f"{kind}.{layer}")[:, :, at : at + len(chunk)] for kind in "kv")
                        pairs[layer].put(chunk, (k.contiguous(), v.contiguous()))
        stores.flush_all()
    places = pieces.places
    stretch = KVSegment(known["start"], known["stop"], known["batch"], chunks, places, pairs, resident, stores)
    stretch.passed = list(pieces.passed)
    if cache.tiers.limited:
        stores.limit_transient(reading_bytes(stretch, cache.widths))
    return stretch
