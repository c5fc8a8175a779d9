"""Letters a to d of `claims.py`: number of devices, longest contexts, and memory through a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from _claims import (
    FITS,
    GIB,
    Answer,
    K,
    M,
    Run,
    billions,
    checkpointed,
    chunk_of,
    duration,
    job_of,
    longest,
    machine_of,
    mesh_of,
    model_of,
    sharding_spec_of,
    streamed,
    tokens,
)  # fmt: skip

from trunkline.plan.estimate import estimate
from trunkline.plan.estimate_timeline import capacity_of, timeline_of, unchunked_timeline
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.planner import Planner
from trunkline.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_A100 = "a100-80g"
_SPEEDS = ["MFU", "MFU (FPDT)", "HFU"]
_BYTES = ["HBM GiB", "host GiB per node"]
_KEPT = ((("attention",), 1), (("attention",), 4), ((), 1), ((), 4))


def few_devices(_: Path) -> Answer:
    """Estimate letter a: a 1.2B GPT at 1M tokens, on 1 to 64 devices."""
    meta_model = model_of("gpt-1.2b")
    rows, figures = [], []
    for devices in (1, 2, 4, 8, 16, 32, 64):
        cluster = machine_of(_A100, devices)
        full = checkpointed(meta_model, cluster, M, full_logits=True)
        tiled = checkpointed(meta_model, cluster, M)
        chunked = Run("not needed")
        if devices <= 8:
            chunked = streamed(Planner(meta_model, cluster), cluster, job_of(meta_model, cluster, M, ("attention",)))
        own = [chunked.verdict, *chunked.bytes, *chunked.speeds[:2], duration(chunked.seconds)] if devices <= 8 else []
        cells = [str(devices), full.bytes[0], full.verdict, tiled.bytes[0], tiled.verdict, *own]
        rows.append(cells + [""] * (11 - len(cells)))
        ways = {"full logits": full, "tiled logits": tiled, "Trunkline": chunked}
        figures += [run.figures(devices=devices, how=how) for how, run in ways.items()]
    config = meta_model.model.config
    stored = 34 * config.hidden_size * config.num_hidden_layers * M
    logits = 10 * config.vocab_size * M
    return Answer(
        "a", f"GPT of {billions(meta_model):.2f}B parameters at 1M tokens: how many A100-80G does a step need?",
        ["devices", "checkpointing, full logits: HBM GiB", "fits", "checkpointing, tiled logits: HBM GiB", "fits",
         "Trunkline fits", *_BYTES, "MFU", "MFU (FPDT)", "step time"], rows,
        [f"Trunkline uses chunks of {tokens(chunk_of(M))} and keeps attention. The model has 16 heads, so more than 16 "
         "devices gather keys and values."],
        [f"Derived, not estimated, because the engine always recomputes: without checkpointing a layer keeps about 34 "
         f"bytes per token and hidden unit, {stored / GIB:,.0f} GiB in all. Full logits in bf16 and fp32 with their "
         f"gradient take {logits / GIB:,.0f} GiB. Together they fill the memory of "
         f"{(stored + logits) / machine_of(_A100, 1).usable_bytes['device']:,.1f} devices."], figures,
    )  # fmt: skip


def one_device(_: Path) -> Answer:
    """Estimate letter b: a 7B GPT at 2M tokens on one device."""
    meta_model, cluster = model_of("gpt-7b"), machine_of(_A100, 1)
    planner, chunk = Planner(meta_model, cluster), chunk_of(2 * M)
    rows, figures = [], []

    def longest_checkpointed(name: str, fits: Any) -> int:
        length = longest(fits)
        rows.append([name, tokens(length), "", "", "", "", "", "", ""])
        figures.append({"how": name, "longest": length})
        return length

    def resident(length: int, full_logits: bool) -> bool:
        return checkpointed(meta_model, cluster, length, full_logits=full_logits, timed=False).fits

    longest_checkpointed("checkpointing, full logits", lambda n: resident(n, True))
    least = longest_checkpointed("checkpointing, tiled logits", lambda n: resident(n, False))
    longest_checkpointed("checkpointing, tiled logits, inputs offloaded",
                         lambda n: planner.why_not(job_of(meta_model, cluster, n, (), chunk=n)) == FITS)  # fmt: skip
    for keep, every in _KEPT:
        far = longest(lambda n, keep=keep, every=every: planner.why_not(
            job_of(meta_model, cluster, n, keep, every, chunk)) == FITS, 256 * K)  # fmt: skip
        run = streamed(planner, cluster, job_of(meta_model, cluster, 2 * M, keep, every))
        rows.append([f"Trunkline keeps {run.kept}", f"{tokens(far)} ({far / least:.1f} x tiled)", run.verdict,
                     *run.bytes, *run.speeds, duration(run.seconds)])  # fmt: skip
        figures.append(run.figures(longest=far, length=2 * M))
    return Answer(
        "b", f"GPT of {billions(meta_model):.2f}B parameters on one A100-80G, PCIe 4: 2M tokens",
        ["method", "longest", "2M fits", *_BYTES, *_SPEEDS, "step time"], rows,
        [f"Every row offloads parameters, gradients and optimizer state: {billions(meta_model) * 16:.0f} GB at 16 "
         f"bytes per parameter. The one device uses all {cluster.host_bytes / GIB:,.0f} GiB of host memory. Chunks are "
         f"{tokens(chunk)}."],
        ["The longest contexts fit in every tier. The full estimate, with step time, is for 2M tokens only."], figures,
    )  # fmt: skip


def eight_devices(_: Path) -> Answer:
    """Estimate letter c: Llama-3-8B at 4M tokens on a node of 8 devices."""
    meta_model, cluster = model_of("llama-3-8b"), machine_of(_A100, 8)
    planner = Planner(meta_model, cluster)
    rows, figures = [], []
    for keep, every in _KEPT:
        run = streamed(planner, cluster, job_of(meta_model, cluster, 4 * M, keep, every))
        rows.append([run.kept, run.verdict, *run.bytes, *run.speeds, f"{run.waits:.1%}",
                     "" if run.why else f"{run.rate:.1f}", "" if run.why else duration(run.seconds)])  # fmt: skip
        figures.append(run.figures(length=4 * M))
    return Answer(
        "c", "Llama-3-8B at 4M tokens on 8 A100-80G",
        ["kept", "fits", *_BYTES, *_SPEEDS, "exposed", "tokens/s per device", "step time"], rows,
        [f"The node has {cluster.host_bytes / GIB:,.0f} GiB of host memory. Chunks are {tokens(chunk_of(4 * M))}. "
         "'Exposed' is the share of the step in which compute waits for transfers."],
        [f"Row '{row[0]}': {figure['why']}" for row, figure in zip(rows, figures, strict=True) if figure["why"]],
        figures,
    )  # fmt: skip


# -- d -----------------------------------------------------------------------------------------------------------------


def spikes(out: Path) -> Answer:
    """Estimate letter d: memory through a step of a 30B GPT, with checkpointing and with Trunkline."""
    meta_model, cluster, length = model_of("gpt-30b"), machine_of(_A100, 16), M
    common: dict[str, Any] = {
        "parallel_dims": mesh_of(meta_model, cluster),
        "sharding_spec": sharding_spec_of(cluster),
        "optimizer": AdamWSpec(),
    }
    job = job_of(meta_model, cluster, length, ("attention",))
    groups = Planner(meta_model, cluster).best(job).settings
    settings: dict[str, Any] = {**groups["streaming"], **groups["memory"]}
    capacity = capacity_of(cluster.hardware, 16)
    lines = [
        unchunked_timeline(
            meta_model, length, title="checkpointing: one chunk, full logits", hardware=cluster.hardware, **common
        ),
        timeline_of(
            estimate(
                meta_model, length, hardware=cluster.hardware, timeline=True, chunk_size=length, keep=(), **common
            ),
            "checkpointing: one chunk, tiled logits", capacity,
        ),
        timeline_of(
            estimate(meta_model, length, hardware=cluster.hardware, timeline=True, **common, **settings),
            f"Trunkline: chunks of {tokens(chunk_of(length))}, attention kept", capacity,
        ),
    ]  # fmt: skip
    middle = meta_model.decoder.num_layers // 2
    rows, figures = [], []
    for line in lines:
        inside = layer_of(line, f"backward {middle}")
        parts = peaks(line, inside)
        parts |= {"own": line.holders["device"]["activations of a chunk"],
                  "peak": max(nbytes for _, nbytes in line.memory["device"])}  # fmt: skip
        rows.append([line.title, *(f"{nbytes / GIB:,.1f}" for nbytes in parts.values()), duration(line.seconds)])
        figures.append({"title": line.title, "seconds": line.seconds, "layer": inside, **parts})
    draw(lines, [layer_of(line, f"backward {middle}") for line in lines], cluster.hardware.memory_bytes,
         out / "claims-d.png")  # fmt: skip
    return Answer(
        "d", f"GPT of {billions(meta_model):.1f}B parameters, 40 layers, on 16 A100-80G: memory of a step at 1M tokens",
        ["step", "start of a middle layer's backward, GiB", "peak in its attention", "peak in the rest of it",
         "activations of one chunk, at the step's peak", "peak of the step", "step time"], rows,
        ["Attention is the longest part of a layer's backward. The rest of it is feed-forward and projections. "
         "Trunkline's budgets fill the device: activations stay on the device as long as they fit, and the others go "
         "to host memory. Figure: claims-d.png."], [], figures,
    )  # fmt: skip


def layer_of(line: Timeline, label: str) -> tuple[float, float]:
    """Return the times, in seconds, at which a layer's backward begins and ends."""
    own = [(begin, end) for begin, end, name in line.lanes["compute"] if name == label]
    return min(begin for begin, _ in own), max(end for _, end in own)


def peaks(line: Timeline, inside: tuple[float, float]) -> dict[str, int]:
    """Return the bytes at the start of a layer's backward, at its peak in attention, and at its peak in the rest."""
    begin, end = inside
    points = line.memory["device"]
    held = [(max(at, begin), nbytes, min(after, end)) for (at, nbytes), (after, _) in
            zip(points, [*points[1:], (line.seconds, 0)], strict=True) if after > begin and at < end]  # fmt: skip
    # At these lengths an attention kernel takes far longer than any matrix product: long intervals are attention.
    long = max(stop - start for start, _, stop in held) / 4
    return {
        "before": held[0][1],
        "attention": max(nbytes for start, nbytes, stop in held if stop - start >= long),
        "feed-forward": max(nbytes for start, nbytes, stop in held if stop - start < long),
    }


def draw(lines: list[Timeline], insides: list[tuple[float, float]], capacity: int, path: Path) -> None:
    """Draw the memory of each step and of a middle layer's backward, with a shared memory axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3 * len(lines)), dpi=150, layout="constrained")
    figure.suptitle("Estimated memory of one of 16 A100-80G through a step: GPT 30B, 40 layers, 1M tokens")
    axes = figure.subplots(len(lines), 2, sharey=True)
    for line, inside, (whole, layer) in zip(lines, insides, axes, strict=True):
        _memory(whole, line, (0, line.seconds), capacity)
        whole.set_title(line.title, fontsize=10)
        for phase in line.phases:
            if phase.name == "backward":
                whole.axvline(phase.begin, color="#1b1f24", linewidth=0.8, linestyle=":", label="backward begins")
        _memory(layer, line, inside, capacity)
        layer.set_title("backward of a middle layer", fontsize=10)
        whole.legend(fontsize=8, loc="upper right")
    axes[0, 0].set_ylim(0)
    figure.savefig(path, metadata={"Software": None})


def _memory(axes: Axes, line: Timeline, inside: tuple[float, float], capacity: int) -> None:
    points = line.memory["device"]
    axes.step([at for at, _ in points], [nbytes / GIB for _, nbytes in points], where="post", color="#0072b2",
              linewidth=1)  # fmt: skip
    axes.axhline(capacity / GIB, color="#c64f00", linewidth=1, linestyle="--", label="device memory")
    axes.set_xlim(*inside)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    axes.tick_params(labelleft=True)
    axes.grid(color="#dfe2e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
