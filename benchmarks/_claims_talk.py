"""Letters a to d of `claims.py`: how few devices, the longest contexts, and a step's memory before and after."""

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
    alone,
    billions,
    chunk_of,
    duration,
    job_of,
    longest,
    machine_of,
    mesh_of,
    model_of,
    ours,
    sharding_spec_of,
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
_SPEEDS = ["MFU", "talk", "HFU"]
_BYTES = ["HBM GiB", "host GiB a node"]
_KEPT = ((("attention",), 1), (("attention",), 4), ((), 1), ((), 4))


def few_devices(_: Path) -> Answer:
    """a: a 1.2B GPT at 1M tokens."""
    meta_model = model_of("gpt-1.2b")
    rows, figures = [], []
    for devices in (1, 2, 4, 8, 16, 32, 64):
        cluster = machine_of(_A100, devices)
        whole, tiled = alone(meta_model, cluster, M, whole_logits=True), alone(meta_model, cluster, M)
        chunked = Run("not needed")
        if devices <= 8:
            chunked = ours(Planner(meta_model, cluster), cluster, job_of(meta_model, cluster, M, ("attention",)))
        own = [chunked.verdict, *chunked.bytes, *chunked.speeds[:2], duration(chunked.seconds)] if devices <= 8 else []
        cells = [str(devices), whole.bytes[0], whole.verdict, tiled.bytes[0], tiled.verdict, *own]
        rows.append(cells + [""] * (11 - len(cells)))
        ways = {"whole logits": whole, "tiles": tiled, "ours": chunked}
        figures += [run.figures(devices=devices, how=how) for how, run in ways.items()]
    config = meta_model.model.config
    stored = 34 * config.hidden_size * config.num_hidden_layers * M
    logits = 10 * config.vocab_size * M
    return Answer(
        "a", f"GPT of {billions(meta_model):.2f}B parameters at 1M tokens: how many A100-80G?",
        ["devices", "alone, whole logits: HBM GiB", "fits", "alone, tiles: HBM GiB", "fits", "ours fits", *_BYTES,
         "MFU", "talk", "a step"], rows,
        [f"Ours: chunks of {tokens(chunk_of(M))}, attention kept. The model has 16 heads: beyond 16 devices keys and "
         "values are gathered."],
        [f"Derived, not estimated (the engine always replays): without checkpointing a layer keeps about 34 bytes for "
         f"each token and hidden unit, {stored / GIB:,.0f} GiB in all, and whole logits in bf16 and float32 with "
         f"their gradient {logits / GIB:,.0f} GiB: "
         f"{(stored + logits) / machine_of(_A100, 1).usable_bytes['device']:,.1f} devices' memory."], figures,
    )  # fmt: skip


def one_device(_: Path) -> Answer:
    """b: a 7B GPT at 2M tokens on one device."""
    meta_model, cluster = model_of("gpt-7b"), machine_of(_A100, 1)
    planner, chunk = Planner(meta_model, cluster), chunk_of(2 * M)
    rows, figures = [], []

    def longest_alone(name: str, fits: Any) -> int:
        length = longest(fits)
        rows.append([name, f"longest {tokens(length)}", "", "", "", "", "", "", ""])
        figures.append({"how": name, "longest": length})
        return length

    def resident(length: int, whole: bool) -> bool:
        return alone(meta_model, cluster, length, whole_logits=whole, timed=False).fits

    longest_alone("alone, whole logits", lambda n: resident(n, True))
    least = longest_alone("alone, logits in tiles", lambda n: resident(n, False))
    longest_alone("alone, tiles, inputs offloaded",
                  lambda n: planner.why_not(job_of(meta_model, cluster, n, (), chunk=n)) == FITS)  # fmt: skip
    for keep, every in _KEPT:
        far = longest(lambda n, keep=keep, every=every: planner.why_not(
            job_of(meta_model, cluster, n, keep, every, chunk)) == FITS, 256 * K)  # fmt: skip
        run = ours(planner, cluster, job_of(meta_model, cluster, 2 * M, keep, every))
        rows.append([f"ours, {run.kept}", f"longest {tokens(far)} ({far / least:.1f} x tiles)", run.verdict, *run.bytes,
                     *run.speeds, duration(run.seconds)])  # fmt: skip
        figures.append(run.figures(longest=far, length=2 * M))
    return Answer(
        "b", f"GPT of {billions(meta_model):.2f}B parameters on one A100-80G, PCIe 4: 2M tokens",
        ["how", "longest", "2M fits", *_BYTES, *_SPEEDS, "a step"], rows,
        [f"Parameters, gradients and optimizer are offloaded in every row ({billions(meta_model) * 16:.0f} GB at 16 "
         f"bytes a parameter); host memory {cluster.host_bytes / GIB:,.0f} GiB, all of it for the one device; chunks "
         f"of {tokens(chunk)}."], [], figures,
    )  # fmt: skip


def eight_devices(_: Path) -> Answer:
    """c: Llama-3-8B at 4M tokens on a node."""
    meta_model, cluster = model_of("llama-3-8b"), machine_of(_A100, 8)
    planner = Planner(meta_model, cluster)
    rows, figures = [], []
    for keep, every in _KEPT:
        run = ours(planner, cluster, job_of(meta_model, cluster, 4 * M, keep, every))
        rows.append([run.kept, run.verdict, *run.bytes, *run.speeds, f"{run.waits:.1%}",
                     "" if run.why else f"{run.rate:.1f}", "" if run.why else duration(run.seconds)])  # fmt: skip
        figures.append(run.figures(length=4 * M))
    return Answer(
        "c", "Llama-3-8B at 4M tokens on 8 A100-80G",
        ["kept", "fits", *_BYTES, *_SPEEDS, "waits", "tokens/s a device", "a step"], rows,
        [f"One node with {cluster.host_bytes / GIB:,.0f} GiB of host memory; chunks of {tokens(chunk_of(4 * M))}."],
        [f"{row[0]}: {figure['why']}" for row, figure in zip(rows, figures, strict=True) if figure["why"]], figures,
    )  # fmt: skip


# -- d -----------------------------------------------------------------------------------------------------------------


def spikes(out: Path) -> Answer:
    """d: memory through a step of a 30B GPT, before and after."""
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
            meta_model, length, title="before: one chunk, whole logits", hardware=cluster.hardware, **common
        ),
        timeline_of(
            estimate(
                meta_model, length, hardware=cluster.hardware, timeline=True, chunk_size=length, keep=(), **common
            ),
            "before: one chunk, logits in tiles", capacity,
        ),
        timeline_of(
            estimate(meta_model, length, hardware=cluster.hardware, timeline=True, **common, **settings),
            f"after: chunks of {tokens(chunk_of(length))}, attention kept", capacity,
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
        ["step", "as a middle layer's backward begins, GiB", "its peak in attention", "its peak elsewhere",
         "at the step's peak: a chunk's own computation", "step's peak", "a step"], rows,
        ["Attention is the longest stretch of a layer's backward, all else in the layer is feed-forward and "
         "projections. Ours has budgets that fill the device: it holds on it what has room there, and the rest is in "
         "host memory. Figure: claims-d.png."], [], figures,
    )  # fmt: skip


def layer_of(line: Timeline, label: str) -> tuple[float, float]:
    """Return the seconds in which a layer's backward begins and ends."""
    own = [(begin, end) for begin, end, name in line.lanes["compute"] if name == label]
    return min(begin for begin, _ in own), max(end for _, end in own)


def peaks(line: Timeline, inside: tuple[float, float]) -> dict[str, int]:
    """Return the bytes when a layer's backward begins, at its peak in attention, and at its peak elsewhere."""
    begin, end = inside
    points = line.memory["device"]
    held = [(max(at, begin), nbytes, min(after, end)) for (at, nbytes), (after, _) in
            zip(points, [*points[1:], (line.seconds, 0)], strict=True) if after > begin and at < end]  # fmt: skip
    # Attention's kernels are what lasts: at these lengths each takes far longer than any product does.
    long = max(stop - start for start, _, stop in held) / 4
    return {
        "before": held[0][1],
        "attention": max(nbytes for start, nbytes, stop in held if stop - start >= long),
        "feed-forward": max(nbytes for start, nbytes, stop in held if stop - start < long),
    }


def draw(lines: list[Timeline], insides: list[tuple[float, float]], capacity: int, path: Path) -> None:
    """Draw each step, and a middle layer's backward beside it, on one scale of memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3 * len(lines)), dpi=150, layout="constrained")
    figure.suptitle("Memory of one of 16 A100-80G through a step: GPT 30B, 40 layers, 1M tokens (estimated)")
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
    axes.axhline(capacity / GIB, color="#c64f00", linewidth=1, linestyle="--", label="the device's memory")
    axes.set_xlim(*inside)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    axes.tick_params(labelleft=True)
    axes.grid(color="#dfe2e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
