"""A cache on disk: one safetensors file for each chunk of keys and values, and a page that says what they are.

Written chunk by chunk from whichever tier, beside the place and then moved there: what is on disk is whole. Every rank
writes its own part.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trunkline.attention.pairs import Pairs
from trunkline.cache.attention import Feed
from trunkline.cache.placing import room_to_go_on
from trunkline.cache.streamed import StreamedCache
from trunkline.cache.stretch import Stretch, reading_bytes, stores_of
from trunkline.chunking import Chunk

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
        for chunk in stretch.chunks[::-1]:  # the last has those of all layers
            tensors = _of_chunk(stretch, chunk)
            save_file(tensors, partial / _file(number, chunk))
            tokens = stretch.batch * len(chunk)
            widths = widths or [
                [tensors[f"{kind}.{layer}"].nbytes // tokens if f"{kind}.{layer}" in tensors else 0 for kind in "kv"]
                for layer in range(len(stretch.pairs))
            ]
        stretches.append({
            "start": stretch.start, "stop": link.stop, "rows": link.rows, "batch": stretch.batch, "widths": widths,
            "chunks": [[chunk.start, chunk.stop] for chunk in stretch.chunks], "places": stretch.places,
            "passed": stretch.passed,
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
    cache: StreamedCache, folder: Path, model: dict[str, Any], device: torch.device, *, hidden: int, chunk_tokens: int
) -> None:
    """Read into a new cache what another held.

    Args:
        cache: empty.
        folder: as `save` wrote it.
        model: what says whether it is of the same model.
        device: of the model.
        hidden: bytes of a token's hidden state.
        chunk_tokens: of a chunk, for which there shall be room on the device, to go on with.

    Raises:
        ValueError: the folder holds no cache, or another model's; or it does not fit in the budgets.
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
    cache.room = room_to_go_on(cache, page["batch"], hidden, chunk_tokens)
    for number, known in enumerate(page["stretches"]):
        rows = None if known["rows"] is None else tuple(known["rows"])
        cache.append(_read_stretch(cache, known, folder, number, device), rows)
    with safe_open(folder / _REST, "pt") as file:
        rest: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    logits = rest["logits"].to(device) if "logits" in rest else None
    documents = tuple(tuple(starts) for starts in page["documents"])
    cache.grown(page["length"], documents, rest["next_positions"], logits, rest["tokens"], rest["positions"])


def _file(number: int, chunk: Chunk) -> str:
    return f"stretch-{number:05}-chunk-{chunk.index:05}.safetensors"


def _of_chunk(stretch: Stretch, chunk: Chunk) -> dict[str, Tensor]:
    """Keys and values of a chunk, of the layers that still have it."""
    found: dict[str, Tensor] = {}
    for layer, pairs in enumerate(stretch.pairs):
        if chunk.index < stretch.passed[layer]:
            continue
        if chunk.index < stretch.num_resident[layer]:
            k, v = pairs.span(chunk.start, chunk.stop)
        else:
            with Feed(iter([(chunk.index, pairs.later)])) as feed:
                k, v = (x.clone() for x in next(feed))
        found |= {f"k.{layer}": k.cpu().contiguous(), f"v.{layer}": v.cpu().contiguous()}
    return found


def _read_stretch(
    cache: StreamedCache, known: dict[str, Any], folder: Path, number: int, device: torch.device
) -> Stretch:
    chunks = [Chunk(index, *bounds) for index, bounds in enumerate(known["chunks"])]
    places = [(first, last) for first, last in known["places"]]
    layers = range(len(known["passed"]))
    rooms = cache.room, cache.open_bytes(cache.batch_size)
    stores = stores_of(cache.tiers, known["batch"], chunks, known["widths"], known["passed"], rooms)
    stays = stores.placement is None  # in one buffer for each layer, where no window lets go of some
    resident = [len(chunks) if stays and cache.reaches[i].window is None else 0 for i in layers]
    pairs = [Pairs(chunks, resident[i], stores, (f"k {i}", f"v {i}")) for i in layers]
    for chunk in chunks:
        with safe_open(folder / _file(number, chunk), "pt", device=str(device)) as file:
            for layer in layers:
                if chunk.index >= known["passed"][layer]:
                    pairs[layer].put(chunk, (file.get_tensor(f"k.{layer}"), file.get_tensor(f"v.{layer}")))
    stores.settle_all()
    stretch = Stretch(known["start"], known["stop"], known["batch"], chunks, places, pairs, resident, stores)
    stretch.passed = list(known["passed"])
    if cache.tiers.limited:
        stores.only_kept(reading_bytes(stretch, cache.widths))
    return stretch
