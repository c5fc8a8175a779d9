"""Time and memory of a prefill, and decoding with keys and values on disk.

Time: a prefill alternates with its attention kernels and matrix products alone, and with transformers' own prefill
(`use_cache`, SDPA) of the same model.

Memory: the peak of the resident set in a separate process, minus its size before and minus keys and values.

Decoding: the rate at which bytes arrive from disk, relative to a sequential read of a file of the same size. The two
alternate. Before each, its file is dropped from the page cache.

    python benchmarks/prefill.py --offload-dir /some/folder
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _alternation import alternate, median, write_json
from _kernels import Bare, Recorder
from _resident import answered, in_own_process, reset_peak, status
from _variants import DTYPES, Setup
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import trunkline

_MIB = 2**20


def build(setup: Setup, dtype: str) -> LlamaForCausalLM:
    """Build a model with the shape of SmolLM2-135M and fewer layers."""
    torch.set_num_threads(setup.threads)
    torch.manual_seed(setup.seed)
    config = LlamaConfig(
        vocab_size=setup.vocab_size, hidden_size=setup.hidden_size, intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers, num_attention_heads=setup.heads, num_key_value_heads=setup.kv_heads,
        head_dim=setup.head_dim, max_position_embeddings=2**20, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DTYPES[dtype]).eval()


def tokens(setup: Setup, length: int) -> Tensor:
    """Return a prompt (1, S)."""
    return torch.randint(0, setup.vocab_size, (1, length), generator=torch.Generator().manual_seed(setup.seed))


@torch.no_grad()
def own_prefill(model: LlamaForCausalLM, ids: Tensor) -> Any:
    """Run transformers' own prefill."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=1)


def kv_bytes(setup: Setup, length: int, dtype: str) -> int:
    """Return the bytes of all keys and values."""
    return 2 * setup.layers * setup.kv_heads * setup.head_dim * length * DTYPES[dtype].itemsize


# -- in separate processes ---------------------------------------------------------------------------------------------


def memory(setup: Setup, dtype: str, length: int, who: str, chunk_size: int) -> dict[str, Any]:
    """Measure the peak of a prefill above the loaded model; `beside` leaves out keys and values."""
    model, ids = build(setup, dtype), tokens(setup, length)
    if who == "trunkline":
        trunkline.stream(model, chunk_size=chunk_size)
        trunkline.prefill(model, ids[:, : 2 * chunk_size])  # load libraries and code
    else:
        own_prefill(model, ids[:, : 2 * chunk_size])
    gc.collect()
    before = status("VmRSS")
    reset_peak()
    kept = trunkline.prefill(model, ids) if who == "trunkline" else own_prefill(model, ids)
    peak = status("VmHWM") - before
    assert kept is not None
    return {"peak": peak, "beside": peak - kv_bytes(setup, length, dtype)}


# -- in this process ---------------------------------------------------------------------------------------------------


def speed(setup: Setup, dtype: str, length: int, chunk_size: int, rounds: int, console: Console) -> dict[str, Any]:
    """Time a prefill, its kernels alone, and transformers' own prefill."""
    model, ids = build(setup, dtype), tokens(setup, length)
    trunkline.stream(model, chunk_size=chunk_size)
    with Recorder() as recorder:
        ours = trunkline.prefill(model, ids).logits
    bare = Bare(recorder.calls)
    trunkline.unstream(model)
    theirs = own_prefill(model, ids).logits
    assert ours is not None
    difference = float((ours[:, -1].float() - theirs[:, -1].float()).abs().max() / theirs.float().abs().max())

    def streamed() -> float:
        trunkline.stream(model, chunk_size=chunk_size)
        begin = time.perf_counter()
        cache = trunkline.prefill(model, ids)
        seconds = time.perf_counter() - begin
        del cache
        trunkline.unstream(model)
        return seconds

    def plain() -> float:
        begin = time.perf_counter()
        found = own_prefill(model, ids)
        seconds = time.perf_counter() - begin
        del found
        return seconds

    ways = {"prefill": streamed, "kernels": lambda: bare.run()["total"], "transformers": plain}
    seconds = alternate(ways, rounds, lambda text: console.print(text, style="dim"))
    ratios = {way: [a / b for a, b in zip(seconds["prefill"], seconds[way], strict=True)] for way in ways}
    return {"seconds": seconds, "ratios": {way: median(found) for way, found in ratios.items()},
            "rounds": ratios, "difference": difference, "calls": recorder.counts}  # fmt: skip


def decoding(setup: Setup, dtype: str, length: int, chunk_size: int, offload_dir: str, count: int) -> dict[str, Any]:
    """Time decoding with keys and values on disk; one core is left to the reader thread."""
    model, ids = build(setup, dtype), tokens(setup, length)
    chunk = 2 * setup.kv_heads * setup.head_dim * chunk_size * DTYPES[dtype].itemsize
    hidden = setup.hidden_size * chunk_size * DTYPES[dtype].itemsize
    live = kv_bytes(setup, length, dtype) // setup.layers
    budget = live + 8 * (chunk + hidden) + kv_bytes(setup, 1_024, dtype)
    trunkline.stream(model, chunk_size=chunk_size, device_budget=budget, offload_dir=offload_dir)
    cache = trunkline.prefill(model, ids)
    trunkline.stats(model)
    torch.set_num_threads(max(setup.threads - 1, 1))
    trunkline.prefill(model, ids[:, :1], cache=cache)  # load code
    on_disk = trunkline.stats(model).lanes["fetch"].moved
    seconds, sequential, shares, scratch = list[float](), list[float](), list[float](), _scratch(offload_dir)
    plain = tempfile.NamedTemporaryFile(dir=offload_dir, buffering=0)  # noqa: SIM115 - open until the function returns
    for _ in range(-(-on_disk // (64 * _MIB))):
        plain.write(os.urandom(64 * _MIB))
    for at in range(count):
        sequential.append(_sequential(plain.fileno()))
        _evict(scratch)
        begin = time.perf_counter()
        trunkline.prefill(model, ids[:, at : at + 1], cache=cache)
        seconds.append(time.perf_counter() - begin)
        shares.append(on_disk / seconds[-1] / sequential[-1])
    fetch = trunkline.stats(model).lanes["fetch"]
    return {
        "on_disk": on_disk, "kv": kv_bytes(setup, length, dtype), "seconds": seconds, "sequential": sequential,
        "shares": shares, "share": median(shares), "exposed_share": fetch.exposed / sum(seconds),
        "busy_share": fetch.busy / sum(seconds),
    }  # fmt: skip


def _scratch(folder: str) -> int:
    """Return the file descriptor of this process's unnamed scratch file."""
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            name = str(each.readlink())
            if name.startswith(str(Path(folder).resolve())) and name.endswith("(deleted)"):
                return int(each.name)
    raise FileNotFoundError(f"no scratch file in {folder}")


def _evict(descriptor: int) -> None:
    """Drop a file from the page cache, so that reads go to the disk."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _sequential(descriptor: int) -> float:
    """Read a file sequentially in reads of 8 MiB, and return the bytes per second."""
    into, done, count = bytearray(8 * _MIB), 0, 1
    _evict(descriptor)
    begin = time.perf_counter()
    while count:
        count = os.preadv(descriptor, [into], done)
        done += count
    return done / (time.perf_counter() - begin)


def main() -> None:
    if answered(memory):
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=65_536, help="tokens in the prompt")
    parser.add_argument("--chunk-size", type=int, default=4_096, help="tokens per chunk")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the model")
    parser.add_argument("--layers", type=int, default=2, help="number of layers for speed and memory")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to measure")
    parser.add_argument("--tokens", type=int, default=16, help="number of tokens to decode")
    parser.add_argument("--decoding-layers", type=int, default=8, help="number of layers for decoding")
    parser.add_argument("--offload-dir", default=tempfile.gettempdir(), help="folder for the scratch file")
    parser.add_argument("--only", nargs="+", choices=("speed", "memory", "decoding"),
                        default=["speed", "memory", "decoding"], help="measurements to make")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "prefill.json",
                        help="JSON file to write")  # fmt: skip
    given = parser.parse_args()
    setup = Setup(given.layers, 49_152, given.chunk_size, given.threads, 576, 9, 3, 64, 1_536)
    console, found = Console(), dict[str, Any]()
    title = (
        f"layers with the shape of SmolLM2, {given.dtype}, {given.length:,} tokens in chunks of {given.chunk_size:,}"
    )
    table = Table(title=f"{title}, {given.threads} threads", header_style="bold", title_justify="left")
    for name, right in (("figure", False), ("measured", True), ("target", True)):
        table.add_column(name, justify="right" if right else "left")
    if "speed" in given.only:
        found["speed"] = each = speed(setup, given.dtype, given.length, given.chunk_size, given.rounds, console)
        what = f"prefill, {given.layers} layers: time / its kernels and matrix products"
        table.add_row(what, f"{each['ratios']['kernels']:.3f}", "1.05")
        table.add_row("time / transformers' own prefill", f"{each['ratios']['transformers']:.3f}", "1")
        table.add_row("largest difference of the last logits, relative", f"{each['difference']:.1e}", "")
    if "memory" in given.only:
        found["memory"] = {}
        for length in (given.length // 4, given.length // 2, given.length):
            for who in ("trunkline", "transformers"):
                task = {"setup": vars_of(setup), "dtype": given.dtype, "length": length, "who": who,
                        "chunk_size": given.chunk_size}  # fmt: skip
                found["memory"][f"{who} {length}"] = each = in_own_process(__file__, task)
                cell = f"{each['beside'] / _MIB:.1f} MiB"
                target = "constant" if who == "trunkline" else ""
                table.add_row(f"{length:,} tokens, {who}: peak without weights and K/V", cell, target)
        ratio = (
            found["memory"][f"transformers {given.length}"]["peak"]
            / found["memory"][f"trunkline {given.length}"]["peak"]
        )
        table.add_row("transformers' peak / Trunkline's peak, including K/V", f"{ratio:.2f}", "")
    if "decoding" in given.only:
        found["decoding"] = each = decoding(
            replace(setup, layers=given.decoding_layers), given.dtype, given.length, given.chunk_size,
            given.offload_dir, given.tokens,
        )  # fmt: skip
        table.add_row(
            f"decoding, {given.decoding_layers} layers: share of K/V on disk",
            f"{each['on_disk'] / each['kv']:.0%}", "",
        )  # fmt: skip
        table.add_row("rate of fetches / sequential read", f"{each['share']:.0%}", "80%")
        table.add_row("compute waits for fetches", f"{each['exposed_share']:.0%} of the time", "")
    console.print(table)
    write_json(given.out, found)
    console.print(f"wrote {given.out}")


def vars_of(setup: Setup) -> dict[str, Any]:
    """Return a setup as a JSON object."""
    return {name: getattr(setup, name) for name in setup.__dataclass_fields__}


if __name__ == "__main__":
    main()
