"""`trunkline generate`: read a long prompt, and print the text that a model writes after it, as it comes."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

import trunkline
from trunkline.cli.console import say
from trunkline.cli.options import Device, Dtype, ModelFolder, command
from trunkline.config import Progress as Position
from trunkline.config import StreamConfig
from trunkline.units import format_bytes

if TYPE_CHECKING:
    import torch

    from trunkline.data.tokenizers import Encoder

# A cache is written once and without gradients; only the last position has logits.
_NO_EFFECT = ("keep", "checkpoint_every", "attn_strategy", "logits_budget")
_EMPTY = "the prompt is empty: give --file or --prompt with some text."


@command(without=_NO_EFFECT, epilog="Prompts, where keys and values rest, and caches on disk: docs/generate.md.")
def generate(
    model: ModelFolder,
    config: StreamConfig,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File with text of the prompt, - for standard input; may be repeated."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt appended after the files.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Most tokens to write; 0 with --save-cache only reads.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of sampling; 0 takes the likeliest token each time.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the tokenizer's chat template.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    save_cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write keys and values of the prompt to a new folder.")
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Continue from a cache that --save-cache wrote.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: text, speeds, peaks.")] = False,
) -> None:
    """Read a prompt of any length, and print the text that a model writes after it."""
    import torch

    from trunkline.generation.loading import load_model

    if not max_new_tokens and save_cache is None:
        raise ValueError("--max-new-tokens 0: give a positive number, or --save-cache, too, to read only.")
    if temperature == 0 and (top_p != 1 or top_k):
        raise ValueError("--top-p and --top-k have no effect without sampling: set --temperature, too.")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p}: give a probability above 0, up to 1.")
    if save_cache is not None and save_cache.exists():
        raise ValueError(f"--save-cache: '{save_cache}' exists: give a new folder.")
    text, errors = "".join([*map(_read_text, file or ()), prompt or ""]), Console(stderr=True)
    if load_cache is None and not text:
        raise ValueError(_EMPTY)
    loaded, encoder = load_model(model, dtype=dtype, device=device)
    ids_1S = _encode(text, encoder, chat=chat, follows_cache=load_cache is not None).to(loaded.device)
    if load_cache is None and not ids_1S.shape[1]:
        raise ValueError(_EMPTY)
    begin = time.perf_counter()
    cache = _prefill(loaded, ids_1S, config, load_cache, errors)
    prefill_seconds = time.perf_counter() - begin
    prefill_peaks = trunkline.stats(loaded).peaks
    if save_cache is not None:
        trunkline.save_cache(loaded, cache, save_cache)
        if not max_new_tokens:
            line = f"read {ids_1S.shape[1]:,} tokens in {prefill_seconds:.2f} s; wrote {save_cache}"
            say(errors, line, style="dim", wrap=True)
            return
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        torch.manual_seed(seed)
    eos, pad = encoder.tokenizer.eos_token_id, encoder.tokenizer.pad_token_id
    if loaded.generation_config.eos_token_id is None:  # a model may have several of its own
        sampling["eos_token_id"] = eos
    streamer = _TimedStreamer(encoder.tokenizer, silent=as_json)
    begin = time.perf_counter()
    new = trunkline.generate(
        loaded, cache=cache, max_new_tokens=max_new_tokens, streamer=streamer,
        pad_token_id=eos if pad is None else pad, **sampling,
    )[0]  # fmt: skip
    decode_seconds = time.perf_counter() - (streamer.first_token_at or begin)
    stats = trunkline.stats(loaded)
    result = {
        "prompt_tokens": ids_1S.shape[1], "cached_tokens": cache.length - ids_1S.shape[1], "new_tokens": len(new),
        "text": encoder.tokenizer.decode(new, skip_special_tokens=True),
        "prefill_seconds": prefill_seconds,
        "prefill_tokens_per_second": ids_1S.shape[1] / prefill_seconds,
        "decode_tokens_per_second": (len(new) - 1) / decode_seconds if len(new) > 1 else None,
        "kv_bytes": cache.nbytes,
        "peaks": {tier: max(nbytes, prefill_peaks[tier]) for tier, nbytes in stats.peaks.items()},
        "process_peak": peak_bytes(loaded.device),
        "decode_exposed_seconds": {lane: traffic.exposed for lane, traffic in stats.lanes.items()},
    }  # fmt: skip
    if as_json:
        print(json.dumps(result))
    else:
        say(errors, *_summary(result), style="dim", wrap=True)


class _TimedStreamer:
    """Streamer of `generate` that prints text as it comes, unless silent, and notes the time of the first new token.

    Attributes:
        next_tokens_are_prompt: whether the next tokens are the prompt, which is not printed; `trunkline.generate` sets
            it, as for a TextStreamer.
        first_token_at: time of the first new token, None before it.
    """

    def __init__(self, tokenizer: Any, *, silent: bool) -> None:
        from transformers import TextStreamer

        self._printer = None if silent else TextStreamer(tokenizer, skip_special_tokens=True)
        self.next_tokens_are_prompt = True
        self.first_token_at: float | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take tokens: first the prompt, then one new token a call."""
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.first_token_at = self.first_token_at or time.perf_counter()
        if self._printer is not None:
            self._printer.put(value)

    def end(self) -> None:
        """Print the text that is left."""
        if self._printer is not None:
            self._printer.end()


def _read_text(name: str) -> str:
    """Read a file of the prompt; `-` is standard input."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"--file: '{name}' is no file: give text files, or - for standard input.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--file: '{name}' is not UTF-8 text ({error.reason} at byte {error.start}).") from None


def _encode(text: str, encoder: Encoder, *, chat: bool, follows_cache: bool) -> torch.Tensor:
    """Return token ids (1, S) of the prompt; no beginning-of-sequence token is added to a chat, or after a cache."""
    import torch

    prefix = () if follows_cache else encoder.prefix
    if chat:
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


def _prefill(
    model: Any, ids_1S: torch.Tensor, config: StreamConfig, load_cache: Path | None, errors: Console
) -> trunkline.StreamedCache:
    """Load the cache, if there is one, and read the prompt after it, with a bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task(f"reading {ids_1S.shape[1]:,} tokens", total=None)

        def advance(position: Position) -> None:
            if bar.live.is_started and position.part == "forward":
                bar.update(line, total=position.num_layers * position.num_chunks, advance=1)

        trunkline.stream(model, config, progress=advance)
        cache = None if load_cache is None else trunkline.load_cache(model, load_cache)
        if ids_1S.shape[1]:
            return trunkline.prefill(model, ids_1S, cache=cache)
        assert cache is not None
        return cache


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated by PyTorch on a CUDA device, or resident on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _summary(result: dict[str, Any]) -> list[str]:
    """Return speeds, sizes and waits as lines of text."""
    peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in result["peaks"].items() if nbytes)
    rate, cached = result["decode_tokens_per_second"], result["cached_tokens"]
    waits = {lane: seconds for lane, seconds in result["decode_exposed_seconds"].items() if seconds > 0.001}
    lines = [
        f"read {result['prompt_tokens']:,} tokens in {result['prefill_seconds']:.2f} s, "
        f"{result['prefill_tokens_per_second']:,.0f} tokens/s{f', after {cached:,} cached tokens' if cached else ''}",
        f"wrote {result['new_tokens']:,} tokens{f', {rate:,.1f} tokens/s' if rate else ''}",
        f"keys and values {format_bytes(result['kv_bytes'])}; peak of activations and cache: {peaks or 'nothing'}; "
        f"of the process: {format_bytes(result['process_peak'])}",
    ]
    if waits:
        lines.append("decoding waited for " + ", ".join(f"{lane} {seconds:.2f} s" for lane, seconds in waits.items()))
    return lines
