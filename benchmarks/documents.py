"""Cost of packed documents and of sliding windows: compute is proportional to the visible token pairs.

Packed documents: one sequence of several documents is timed against the same documents one by one, in the same engine
and in alternation. Windows: time per token is measured over growing lengths, with and without a window.

    python benchmarks/documents.py --length 65536 --documents 16 --window 4096 --runs 5
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _alternation import alternate, median, write_json
from _variants import Setup, build, tokens
from rich.console import Console
from rich.table import Table
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

import trunkline


def timed(model: PreTrainedModel, rows: Sequence[torch.Tensor], **given: Any) -> float:
    """Run a forward and a backward of each batch, and return the seconds of all."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    start = time.perf_counter()
    for ids in rows:
        model(input_ids=ids, labels=ids, **given).loss.backward()
    return time.perf_counter() - start


def packed(setup: Setup, length: int, count: int, runs: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Measure a packed sequence, and its documents one by one."""
    model = trunkline.stream(build(setup, "fp32"), chunk_size=setup.chunk_size)
    ids = tokens(setup, length)
    positions = torch.arange(length // count).repeat(count)[None]
    documents = ids.split(length // count, 1)
    timed(model, documents[:1])
    ways = {
        "packed": lambda: timed(model, [ids], position_ids=positions),
        "one by one": lambda: timed(model, documents),
    }
    return alternate(ways, runs, tell)


def windowed(setup: Setup, window: int | None) -> PreTrainedModel:
    """Build a streamed model with a sliding window, or without one for None."""
    config = MistralConfig(
        vocab_size=setup.vocab_size, hidden_size=setup.hidden_size, intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers, num_attention_heads=setup.heads, num_key_value_heads=setup.kv_heads,
        head_dim=setup.head_dim, max_position_embeddings=2**20, use_cache=False, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(setup.seed)
    return trunkline.stream(MistralForCausalLM(config).train(), chunk_size=setup.chunk_size)


def growing(
    setup: Setup, lengths: Sequence[int], window: int, runs: int, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Measure seconds per million tokens: at each length with the window, at the first two lengths without it."""
    models = {window: windowed(setup, window), None: windowed(setup, None)}
    for model in models.values():
        timed(model, [tokens(setup, lengths[0])])

    def once(length: int, window: int | None) -> float:
        return timed(models[window], [tokens(setup, length)]) / length * 1e6

    ways: dict[str, Callable[[], float]] = {
        f"{length:,}": lambda length=length: once(length, window) for length in lengths
    }
    for length in lengths[:2]:
        ways[f"{length:,}, no window"] = lambda length=length: once(length, None)
    return alternate(ways, runs, tell)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if packing costs over 15%, or if a window's time per token changes by over 10%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=65_536, help="tokens in the packed sequence")
    parser.add_argument("--documents", type=int, default=16, help="number of documents in it, of equal length")
    parser.add_argument("--window", type=int, default=4_096, help="tokens in the sliding window")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 32_768, 65_536, 131_072],
                        help="sequence lengths for the sliding window")  # fmt: skip
    parser.add_argument("--layers", type=int, default=1, help="number of layers")
    parser.add_argument("--vocab", type=int, default=512, help="size of the vocabulary")
    parser.add_argument("--chunk-size", type=int, default=4_096, help="tokens per chunk")
    parser.add_argument("--runs", type=int, default=5, help="rounds to measure")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "documents.json",
                        help="JSON file to write")  # fmt: skip
    given = parser.parse_args(arguments)
    setup = Setup(given.layers, given.vocab, given.chunk_size, torch.get_num_threads())
    console = Console()

    def tell(text: str) -> None:
        console.print(text, style="dim")

    seconds = packed(setup, given.length, given.documents, given.runs, tell)
    table = Table(header_style="bold", title=f"{given.length:,} tokens in {given.documents} documents, "
                                             f"medians of {given.runs} rounds")  # fmt: skip
    for column in ("", "seconds", "packed / this", "range over rounds"):
        table.add_column(column, justify="right")
    for name, samples in seconds.items():
        paired = sorted(a / b for a, b in zip(seconds["packed"], samples, strict=True))
        ratio = median(seconds["packed"]) / median(samples)
        table.add_row(name, f"{median(samples):.2f}", f"{ratio:.3f}", f"{paired[0]:.3f} … {paired[-1]:.3f}")
    console.print(table)
    cost = median(seconds["packed"]) / median(seconds["one by one"])

    times = growing(setup, given.lengths, given.window, given.runs, tell)
    first = f"{given.lengths[0]:,}"
    table = Table(header_style="bold", title=f"seconds per million tokens, window {given.window:,}, chunks of "
                                             f"{given.chunk_size:,}")  # fmt: skip
    for column in ("tokens", "seconds", f"ratio to {first}"):
        table.add_column(column, justify="right")
    for name, samples in times.items():
        table.add_row(name, f"{median(samples):.1f}", f"{median(samples) / median(times[first]):.3f}")
    console.print(table)
    flat = [median(samples) / median(times[first]) for name, samples in times.items() if "no" not in name]
    write_json(given.out, {"packed": seconds, "window": times})
    console.print(f"wrote {given.out}")
    return int(cost > 1.15 or max(flat) > 1.1 or min(flat) < 0.9)


if __name__ == "__main__":
    sys.exit(main())
