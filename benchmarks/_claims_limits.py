"""Letters e and g of `claims.py`: the sweet spot of chunks, and what three machines can train of Llama-3-8B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _claims import (
    FITS,
    GIB,
    Answer,
    K,
    M,
    Run,
    duration,
    kept,
    longest,
    lora_of,
    machine_of,
    mesh_of,
    model_of,
    tokens,
)  # fmt: skip
from _claims import ours as stepped

from trunkline.config import KEEPABLE
from trunkline.plan.hardware import load
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.planner import Planner
from trunkline.plan.search_space import Cluster, TrainingJob, sharding_specs
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.plan.sweet_spot import AttentionShape, ChunkPair, draw, sweet_spot

_SHAPES = (
    AttentionShape("7B, no groups", 32, 32, 128),
    AttentionShape("8B, groups of 4", 32, 8, 128),
    AttentionShape("70B, groups of 8", 64, 8, 128),
)
# A profile, an attention kernel that is not the default, and how many devices of a node move at the same time.
_PROFILES = (
    ("a100-80g", None, 1),
    ("h100-sxm", None, 1),
    ("h100-sxm", "fa3", 1),
    ("a100-80g-pcie5", None, 1),
    ("a100-80g", None, 8),
    ("h100-sxm", "fa3", 8),
)
# Hidden, width of the feed-forward and its matrices, by shape: what one layer multiplies.
_LAYERS = {"7B, no groups": (4096, 16384, 2), "8B, groups of 4": (4096, 14336, 3), "70B, groups of 8": (8192, 28672, 3)}


def sweet_spots(out: Path) -> Answer:
    """e: from which chunk on attention hides the moves."""
    rows, figures = [], []
    for name, attention, devices in _PROFILES:
        hardware = load(name, attention=attention)
        for shape in _SHAPES:
            pairs = sweet_spot(hardware, shape, devices=devices)
            if attention is None and devices == 1:
                draw(pairs, hardware, out / f"claims-e-{name}-{shape.name.split(',')[0].lower()}.png", shape)
            both = _together(pairs["forward"], pairs["backward"])
            seqs = {keep: linear_from(hardware, shape, keep) for keep in ((), ("attention",), KEEPABLE)}
            who = ", ".join(
                [name, *([attention] if attention else []), *([f"{devices} at once"] if devices > 1 else [])]
            )
            linear = [tokens(n) if n else "always" for n in seqs.values()]
            rows.append([who, shape.name, *map(_cell, (pairs["forward"], pairs["backward"], both)), *linear])
            figures.append({"profile": name, "attention": attention, "devices": devices, "shape": shape.name,
                            **{d: pair.crossing for d, pair in pairs.items()}, "recomputed": both.crossing,
                            **{f"linear {kept(k, 1)}": n for k, n in seqs.items()}})  # fmt: skip
    return Answer(
        "e", "The sweet spot: from which chunk, or context, on compute hides the moves",
        ["machine", "heads", "forward: chunk", "backward, attention kept: chunk",
         "backward, attention recomputed: chunk", "nothing kept: context", "attention kept: context",
         "attention + kv kept: context"], rows,
        ["Chunk columns: keys and values streamed, pair by pair, as trunkline.plan.sweet_spot has it; one device of "
         "a node at work, or 8 at once. With attention recomputed a pair of the backward is a forward and a backward "
         "together.",
         "Context columns (derived from the same profile): what is kept leaves once in forward, over the link alone; "
         "from this context on forward's own compute takes longer, whatever the chunk."], [], figures,
    )  # fmt: skip


def _together(forward: ChunkPair, backward: ChunkPair) -> ChunkPair:
    both = zip(forward.attention, backward.attention, strict=True), zip(forward.moves, backward.moves, strict=True)
    attention, moves = (tuple(a + b for a, b in each) for each in both)
    return ChunkPair("backward", forward.sizes, attention, moves)


def _cell(pair: ChunkPair) -> str:
    return tokens(pair.crossing) if 0 < pair.crossing < float("inf") else "always" if not pair.crossing else "never"


def linear_from(hardware: Any, shape: AttentionShape, keep: tuple[str, ...]) -> int:
    """Return the context, in tokens, from which a layer's forward hides the offload of its kept tensors; 0 for any.

    A token of a context of S meets S/2 others on average.
    """
    hidden, wide, matrices = _LAYERS[shape.name]
    width = shape.heads * shape.head_dim
    nbytes = 2 * hidden
    if "attention" in keep:
        nbytes += 2 * width + 4 * shape.heads
    if "kv" in keep:
        nbytes += 4 * shape.kv_heads * shape.head_dim
    weights = 2 * hidden * width + 2 * shape.kv_heads * shape.head_dim * hidden + matrices * hidden * wide
    products = 2 * weights / hardware.matmul_rate(shape.dtype, 16 * K, hidden, wide)
    rate = hardware.attention_rate("forward", shape.dtype, shape.head_dim, 32 * K, 32 * K, causal=False)
    wanted = nbytes / hardware.link.to_host - products
    return max(0, round(wanted * rate / (2 * width)))


# -- g -----------------------------------------------------------------------------------------------------------------

_MACHINES = (
    ("H200, 128 GiB host", "h200", 1, 128 * GIB),
    ("A100-80G, 1 TiB host", "a100-80g", 1, K * GIB),
    ("8 x H100, 2 TB host", "h100-sxm", 8, 2 * 10**12),
)
_KEEPS: tuple[tuple[str, ...], ...] = ((), ("attention",), ("kv",), ("attention", "kv"))
_TIMED = (256 * K, 512 * K, M)
_CHUNK = 64 * K


def trainable(_: Path) -> Answer:
    """g: Llama-3-8B, adapters and whole, with everything that may be kept."""
    rows, figures = [], []
    for name, profile, devices, host in _MACHINES:
        cluster = machine_of(profile, devices, host)
        for way, meta_model in (("LoRA", lora_of("llama-3-8b")), ("full", model_of("llama-3-8b"))):
            planner = Planner(meta_model, cluster)
            for keep in _KEEPS:
                timed: dict[int, Run] = {}
                for every in (1, 4):
                    far, timed = _trained(planner, meta_model, cluster, keep, every, timed)
                    rows.append([name, way, kept(keep, every), tokens(far) if far else "none",
                                 *(_step(run, every) for run in timed.values())])  # fmt: skip
                    steps = [run.figures(length=n) for n, run in timed.items()]
                    figures.append({"machine": name, "way": way, "longest": far, "steps": steps,
                                    "keep": keep, "every": every})  # fmt: skip
    return Answer(
        "g", "Llama-3-8B: what three machines can train",
        ["machine", "trained", "kept", "longest", *(f"a step at {tokens(n)}" for n in _TIMED)], rows,
        [f"Chunks of {tokens(_CHUNK)} throughout; the longest context to an eighth, from 128K on; "
         "LoRA of rank 16 on all linear layers (float32 adapters on a frozen "
         "bf16 base). One device: everything on it, or offloaded where that is needed or goes further. Eight: ZeRO-2 "
         "or 3, then with offload. PyTorch's own FlashAttention 2 on all."],
        ["Where a step has no time it does not fit. With every 4th input a step is estimated where it does not fit "
         "with all of them: what is computed again without attention adds about 1%."], figures,
    )  # fmt: skip


def _step(run: Run, every: int) -> str:
    if run.why:
        return ""
    return duration(run.seconds) if run.every == every else f"as above ({duration(run.seconds)})"


def _trained(
    planner: Planner, meta_model: MetaModel, cluster: Cluster, keep: tuple[str, ...], every: int, known: dict[int, Run]
) -> tuple[int, dict[int, Run]]:
    """Return the longest context and its steps; steps that are known to fit are not estimated again."""

    def job(length: int, sharding_spec: ShardingSpec | None = None) -> TrainingJob:
        fixed = {"chunk_size": _CHUNK, "keep": keep, "checkpoint_every": every}
        return TrainingJob(length, fixed=fixed, parallel_dims=mesh_of(meta_model, cluster), sharding_spec=sharding_spec)

    def fits(length: int) -> bool:
        ways = list(sharding_specs(job(length), mesh_of(meta_model, cluster)))
        return any(planner.why_not(job(length, way)) == FITS for way in (ways[0], ways[-1]))

    far = longest(fits, 128 * K, 8)
    steps = {}
    for length in _TIMED:
        steps[length] = known.get(length, Run("it does not fit"))
        if length <= far and steps[length].why:
            steps[length] = stepped(planner, cluster, job(length))
    return far, steps
