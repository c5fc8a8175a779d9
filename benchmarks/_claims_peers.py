"""Letter f of `claims.py`: published numbers of FPDT, UPipe and Ulysses, and estimates of the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _claims import (
    GIB,
    Answer,
    K,
    M,
    Run,
    checkpointed,
    first_that_fits,
    job_of,
    machine_of,
    model_of,
    streamed,
    tokens,
)  # fmt: skip

from trunkline.hf.flops import attention_flops, linear_flops_per_token
from trunkline.plan.hardware import Hardware
from trunkline.plan.planner import Planner
from trunkline.plan.sweet_spot import DIRECTIONS

# Read from FPDT's figures (arXiv 2408.16978): model, devices, tokens, MFU in FPDT's convention.
_FPDT = (
    ("llama-3-8b", 8, 4 * M, "55.7%"),
    ("llama-3-8b", 4, 2 * M, "about 58%"),
    ("gpt-7b", 4, 2 * M, "about 58%"),
    ("gpt-2.7b", 2, M, "40.5%"),
    ("gpt-13b", 8, 3 * M, "56%"),
    ("gpt-30b", 16, 3 * M, "50%"),
    ("llama-3-70b", 32, 4 * M, "54%"),
)
# Baselines of the same paper: model, devices, tokens, MFU in FPDT's convention, layer inputs offloaded.
_ULYSSES = (
    ("llama-3-8b", 4, 128 * K, "45%", False),
    ("llama-3-8b", 4, 256 * K, "48%", False),
    ("llama-3-8b", 8, 512 * K, "47.2%", True),
)
# Tokens per second and device on 8 x H100 with FlashAttention 3, measured by UPipe's authors: FPDT, UPipe, Ulysses.
_UPIPE = {
    128 * K: (1172, 2281, 2320), 256 * K: (885, 1487, 1504), 512 * K: (621, 867, 879), M: (382, 473, 475),
    2 * M: (220, 246, 246), 3 * M: (153, 166, 162), 4 * M: (120, 126, None), 5 * M: (None, 98, None),
}  # fmt: skip


def peers(out: Path) -> Answer:
    """Estimate letter f: published numbers, and estimates of the same steps."""
    rows, figures = [], []
    for name, devices, length, published, offloaded in _ULYSSES:
        meta_model, cluster = model_of(name), machine_of("a100-80g", devices)
        if offloaded:
            run = streamed(Planner(meta_model, cluster), cluster, job_of(meta_model, cluster, length, (), chunk=length))
        else:
            run = checkpointed(meta_model, cluster, length)
        what = f"Ulysses, checkpointing{', offloaded' if offloaded else ''}"
        rows.append(_mfu_row(f"{name}, {devices} A100", length, f"{what}: {published}", run, "checkpointing"))
        figures.append(run.figures(model=name, devices=devices, length=length, published=published))
    for name, devices, length, published in _FPDT:
        meta_model, cluster = model_of(name), machine_of("a100-80g", devices)
        planner = Planner(meta_model, cluster)
        lean = streamed(planner, cluster, job_of(meta_model, cluster, length, ()))
        best = first_that_fits(planner, meta_model, cluster, length)
        for run in (lean, *([best] if best.keep != lean.keep else [])):
            rows.append(
                _mfu_row(f"{name}, {devices} A100", length, f"FPDT: {published}", run, f"Trunkline keeps {run.kept}")
            )
            figures.append(run.figures(model=name, devices=devices, length=length, published=published))
    meta_model, cluster = model_of("llama-3-8b"), machine_of("h100-sxm", 8, attention="fa3")
    planner = Planner(meta_model, cluster)
    for length, (fpdt, upipe, ulysses) in _UPIPE.items():
        plain = checkpointed(meta_model, cluster, length)
        lean = streamed(planner, cluster, job_of(meta_model, cluster, length, ()))
        best = first_that_fits(planner, meta_model, cluster, length)
        tops = [ceiling(meta_model, cluster.hardware, length, forwards) for forwards in (2, 1)]
        words = [f"{each:,}" if each else "-" for each in (fpdt, upipe, ulysses)]
        said = f"FPDT {words[0]}, UPipe {words[1]}, Ulysses {words[2]}"
        rows.append(["llama-3-8b, 8 H100, FA3", tokens(length), said,
                     f"checkpointing: {_rate(plain)}; Trunkline keeps nothing: {_rate(lean)}; Trunkline keeps "
                     f"{best.kept}: {_rate(best)}", "",
                     f"{best.mfu:.1%}", f"{best.mfu * 4 / 3:.1%}", f"{best.hfu:.1%}",
                     f"{best.rate / max(fpdt or 0, upipe or 0, ulysses or 0):.2f} x best published; upper bounds "
                     f"{tops[0]:,.0f} and {tops[1]:,.0f}"])  # fmt: skip
        figures.append({"length": length, "published": {"fpdt": fpdt, "upipe": upipe, "ulysses": ulysses},
                        "ulysses": plain.figures(), "nothing kept": lean.figures(), "ours": best.figures(),
                        "ceilings": tops})  # fmt: skip
    return Answer(
        "f", "Peers: published and estimated",
        ["model, machine", "tokens", "published (MFU in FPDT's convention, or tokens/s per device)", "estimated",
         "fits", "MFU", "MFU (FPDT)", "HFU", "details"], rows,
        ["If attention is kept, it runs once in our step, but 'MFU (FPDT)' counts it twice. 'MFU (FPDT)' then exceeds "
         "HFU, and can exceed the limit of a step that recomputes attention.",
         "The chunk is the smallest power of two, at least 16K, that gives at most 32 chunks. H100 uses FlashAttention "
         "3. An upper bound counts only matrix products and all-pairs attention, at the profile's fastest rates. The "
         "first bound runs the forward twice, the second bound once.",
         "'Checkpointing' on H100 has no memory limit. The published Ulysses computes the feed-forward in tiles and "
         "offloads layer inputs to host memory. This changes the memory of a step, and hardly its time."],
        ["Not estimated: FPDT's rows with tensor parallelism (32K, 128K, 512K), and Ulysses with ZeRO-3 and without "
         "checkpointing (64K), because the engine always recomputes."], figures,
    )  # fmt: skip


def _mfu_row(who: str, length: int, published: str, run: Run, how: str) -> list[str]:
    more = (
        "" if run.why else f"{run.device / GIB:,.1f} GiB HBM, {run.host / GIB:,.0f} GiB host, {run.waits:.1%} exposed"
    )
    return [who, tokens(length), published, how, run.verdict, *run.speeds, more]


def _rate(run: Run) -> str:
    return "-" if run.why else f"{run.rate:,.0f}"


def ceiling(meta_model: Any, hardware: Hardware, length: int, forwards: int) -> float:
    """Return the tokens per second and device of a step that runs only matrix products and attention.

    Args:
        meta_model: model of the step.
        hardware: profile with the rates; the ones of large products and of all-pairs attention are used.
        length: tokens in the sequence.
        forwards: number of times the forward runs.
    """
    config = meta_model.model.config
    dim = config.hidden_size // config.num_attention_heads
    linear, attention = (
        linear_flops_per_token(meta_model.model),
        attention_flops(meta_model.model, seq_len=length) / length,
    )
    products = linear * (forwards + 2) / 3 / hardware.matmul_rate(torch.bfloat16, 8 * K, 8 * K, 8 * K)
    seen = attention / 3
    forward, backward = (
        hardware.attention_rate(way, torch.bfloat16, dim, 32 * K, 32 * K, causal=False) for way in DIRECTIONS
    )
    # A flash kernel recomputes the scores in its backward: 2.5 times the forward's work, of which MFU counts 2.
    return 1 / (products + seen * (forwards / forward + 2.5 / backward))
