"""`trunkline generate`: read a long prompt from files, and print what a model writes behind it, as it comes."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from transformers import TextStreamer

import trunkline
from trunkline.config import Progress as Where
from trunkline.config import StreamConfig
from trunkline.data.tokenizers import Encoder
from trunkline.generation.loading import load_model
from trunkline.units import in_units


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for.

    Attributes:
        model: folder.
        files: of the prompt, one after another; `-` is standard input.
        prompt: text behind that of the files.
        max_new_tokens: most that are written.
        dtype: of the model; see `load_model`.
        device: the same.
        temperature: 0 takes the likeliest token each time.
        top_p: of sampling.
        top_k: of sampling.
        seed: of sampling.
        chat: wrap the prompt in the tokenizer's chat template.
        save_cache: folder for what was read.
        load_cache: folder with what is before the prompt.
        as_json: print one JSON object instead of text.
        stream: settings of `trunkline.stream`.
    """

    model: Path
    files: Sequence[str] = ()
    prompt: str | None = None
    max_new_tokens: int = 256
    dtype: str = "auto"
    device: str = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat: bool = False
    save_cache: Path | None = None
    load_cache: Path | None = None
    as_json: bool = False
    stream: dict[str, Any] = field(default_factory=dict)


class _Printed(TextStreamer):  # type: ignore[misc]
    """Prints text as it comes, or keeps silent; notes when the first new token came."""

    def __init__(self, tokenizer: Any, *, aloud: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._aloud = aloud
        self.first = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Take tokens."""
        if not self.next_tokens_are_prompt and not self.first:
            self.first = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text that is complete."""
        if self._aloud:
            print(text, flush=True, end="\n" if stream_end else "")


def run_generate(asked: Asked) -> None:
    """Read, write, and say how fast it went and what it took.

    Raises:
        ValueError: an argument is wrong; the text names it and the mend.
    """
    _check(asked)
    text, errors = _prompt(asked), Console(stderr=True)
    model, encoder = load_model(asked.model, dtype=asked.dtype, device=asked.device)
    ids = _encoded(text, encoder, asked).to(model.device)
    if asked.load_cache is None and not ids.shape[1]:
        raise ValueError("the prompt is empty: give --file or --prompt with some text.")
    begin = time.perf_counter()
    cache = _read(model, ids, asked, errors)
    read_seconds = time.perf_counter() - begin
    stats = trunkline.stats(model)
    if asked.save_cache is not None:
        trunkline.save_cache(model, cache, asked.save_cache)
        if not asked.max_new_tokens:
            errors.print(f"read {ids.shape[1]:,} tokens in {read_seconds:.2f} s; wrote {asked.save_cache}", style="dim",
                         highlight=False, markup=False)  # fmt: skip
            return
    printed = _Printed(encoder.tokenizer, aloud=not asked.as_json)
    how: dict[str, Any] = {"do_sample": asked.temperature > 0}
    if asked.temperature > 0:
        how |= {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        torch.manual_seed(asked.seed)
    eos, pad = encoder.tokenizer.eos_token_id, encoder.tokenizer.pad_token_id
    if model.generation_config.eos_token_id is None:  # else it may know several
        how["eos_token_id"] = eos
    begin = time.perf_counter()
    new = trunkline.generate(
        model, cache=cache, max_new_tokens=asked.max_new_tokens, streamer=printed,
        pad_token_id=pad if pad is not None else eos, **how,
    )[0]  # fmt: skip
    end = time.perf_counter()
    meters, waited = trunkline.stats(model), end - (printed.first or begin)
    found = {
        "prompt_tokens": ids.shape[1], "cached_tokens": cache.length - ids.shape[1], "new_tokens": len(new),
        "text": encoder.tokenizer.decode(new, skip_special_tokens=True),
        "prefill_seconds": read_seconds,
        "prefill_tokens_per_second": ids.shape[1] / read_seconds,
        "decode_tokens_per_second": (len(new) - 1) / waited if len(new) > 1 else None,
        "kv_bytes": cache.nbytes,
        "peaks": {tier: max(nbytes, stats.peaks[tier]) for tier, nbytes in meters.peaks.items()},
        "process_peak": peak_bytes(model.device),
        "decode_exposed_seconds": {lane: traffic.exposed for lane, traffic in meters.lanes.items()},
    }  # fmt: skip
    if asked.as_json:
        print(json.dumps(found))
        return
    for row in _said(found):
        errors.print(row, style="dim", highlight=False, markup=False)


def _check(asked: Asked) -> None:
    StreamConfig(**asked.stream)
    if asked.max_new_tokens < 0 or (asked.max_new_tokens == 0 and asked.save_cache is None):
        raise ValueError(
            f"--max-new-tokens {asked.max_new_tokens}: give a positive number, or 0 with --save-cache, to read only."
        )
    if asked.temperature < 0:
        raise ValueError(f"--temperature {asked.temperature}: give 0 for the likeliest token, or a positive number.")
    if asked.temperature == 0 and (asked.top_p != 1 or asked.top_k):
        raise ValueError("--top-p and --top-k have no effect without sampling: set --temperature, too.")
    if not 0 < asked.top_p <= 1:
        raise ValueError(f"--top-p {asked.top_p}: give a share above 0, up to 1.")
    if asked.save_cache is not None and asked.save_cache.exists():
        raise ValueError(f"--save-cache: '{asked.save_cache}' exists: give a new folder.")


def _prompt(asked: Asked) -> str:
    """The text of all files, then that of the command line."""
    parts = []
    for name in asked.files:
        try:
            parts.append(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            raise ValueError(f"--file: '{name}' is no file: give text files, or - for standard input.") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--file: '{name}' is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if asked.prompt is not None:
        parts.append(asked.prompt)
    return "".join(parts)  # nothing between them: what is read in two calls is then what one call would read


def _encoded(text: str, encoder: Encoder, asked: Asked) -> torch.Tensor:
    """Token ids (1, S) of the prompt, which goes on where a loaded cache ends."""
    prefix = encoder.prefix if asked.load_cache is None else ()
    if asked.chat:
        if encoder.tokenizer.chat_template is None:
            raise ValueError("--chat: this model's tokenizer has no chat template: leave --chat out.")
        text = encoder.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        prefix = ()  # the template has its own
    if not text:
        return torch.empty(1, 0, dtype=torch.long)
    ids = encoder.encode(text)[len(encoder.prefix) :]
    ids = ids[: len(ids) - len(encoder.suffix)]
    return torch.tensor([[*prefix, *ids.tolist()]])


def _read(model: Any, ids: torch.Tensor, asked: Asked, errors: Console) -> trunkline.StreamedCache:
    """What was read before, and the prompt behind it, with a bar while that takes time."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task(f"reading {ids.shape[1]:,} tokens", total=None)

        def show(where: Where) -> None:
            if bar.live.is_started and where.part == "forward":
                bar.update(line, total=where.num_layers * where.num_chunks, advance=1)

        trunkline.stream(model, **asked.stream, progress=show)
        cache = None if asked.load_cache is None else trunkline.load_cache(model, asked.load_cache)
        if ids.shape[1]:
            return trunkline.prefill(model, ids, cache=cache)
        assert cache is not None
        return cache


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process held: on the device, or, on a CPU, of memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _said(found: dict[str, Any]) -> list[str]:
    peaks = ", ".join(f"{tier} {in_units(nbytes)}" for tier, nbytes in found["peaks"].items() if nbytes)
    lines = [f"read {found['prompt_tokens']:,} tokens in {found['prefill_seconds']:.2f} s, "
             f"{found['prefill_tokens_per_second']:,.0f} tokens/s"]  # fmt: skip
    if found["cached_tokens"]:
        lines[0] += f", behind {found['cached_tokens']:,} that were read before"
    rate = found["decode_tokens_per_second"]
    lines.append(f"wrote {found['new_tokens']:,} tokens" + (f", {rate:,.1f} tokens/s" if rate else ""))
    lines.append(f"keys and values {in_units(found['kv_bytes'])}; peak of what the engine holds: {peaks or 'nothing'}; "
                 f"of the process {in_units(found['process_peak'])}")  # fmt: skip
    waits = {lane: seconds for lane, seconds in found["decode_exposed_seconds"].items() if seconds > 0.001}
    if waits:
        lines.append("decoding waited for " + ", ".join(f"{lane} {seconds:.2f} s" for lane, seconds in waits.items()))
    return lines
