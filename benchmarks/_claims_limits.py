"""Letters e and g of `claims.py`: the sweet spot of the chunk size, and Llama-3-8B on three machines."""

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
    streamed,
    tokens,
)  # fmt: skip

from trunkline.config import KEEPABLE
from trunkline.plan.hardware import load
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.planner import Planner
from trunkline.plan.search_space import Cluster, TrainingJob, sharding_specs
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.plan.sweet_spot import AttentionShape, ChunkPair, draw, sweet_spot

_SHAPES = (
    AttentionShape("7B, MHA", 32, 32, 128),
    AttentionShape("8B, GQA 4", 32, 8, 128),
    AttentionShape("70B, GQA 8", 64, 8, 128),
)
# Profile, attention kernel (None for the default), and the number of devices of a node that transfer at once.
_PROFILES = (
    ("a100-80g", None, 1),
    ("h100-sxm", None, 1),
    ("h100-sxm", "fa3", 1),
    ("a100-80g-pcie5", None, 1),
    ("a100-80g", None, 8),
    ("h100-sxm", "fa3", 8),
)
# Hidden size, intermediate size, and number of feed-forward matrices of one layer, by shape.
_LAYERS = {"7B, MHA": (4096, 16384, 2), "8B, GQA 4": (4096, 14336, 3), "70B, GQA 8": (8192, 28672, 3)}


def sweet_spots(out: Path) -> Answer:
    """Estimate letter e: the smallest chunk, or context, at which compute hides transfers."""
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
                [name, *([attention] if attention else []), *([f"{devices} devices at once"] if devices > 1 else [])]
            )
            linear = [tokens(n) if n else "always" for n in seqs.values()]
            rows.append([who, shape.name, *map(_cell, (pairs["forward"], pairs["backward"], both)), *linear])
            figures.append({"profile": name, "attention": attention, "devices": devices, "shape": shape.name,
                            **{d: pair.crossing for d, pair in pairs.items()}, "recomputed": both.crossing,
                            **{f"linear {kept(k, 1)}": n for k, n in seqs.items()}})  # fmt: skip
    return Answer(
        "e", "The sweet spot: smallest chunk, or context, at which compute hides transfers",
        ["machine", "heads", "chunk: forward", "chunk: backward, attention kept",
         "chunk: backward, attention recomputed", "context: nothing kept", "context: attention kept",
         "context: attention + kv kept"], rows,
        ["Chunk columns: keys and values are streamed pair by pair, as in trunkline.plan.sweet_spot. One device of a "
         "node transfers data, or 8 devices do at once. With attention recomputed, a pair of the backward is a forward "
         "and a backward together.",
         "Context columns, derived from the same profile: the forward offloads kept activations once, with no other "
         "traffic on the link. From this context on, the forward's compute takes longer than this offload, for any "
         "chunk size.",
         "MHA: each query head has its own K/V head. GQA 4: four query heads share a K/V head."], [], figures,
    )  # fmt: skip


def _together(forward: ChunkPair, backward: ChunkPair) -> ChunkPair:
    both = zip(forward.attention, backward.attention, strict=True), zip(forward.moves, backward.moves, strict=True)
    attention, moves = (tuple(a + b for a, b in each) for each in both)
    return ChunkPair("backward", forward.sizes, attention, moves)


def _cell(pair: ChunkPair) -> str:
    return tokens(pair.crossing) if 0 < pair.crossing < float("inf") else "always" if not pair.crossing else "never"


def linear_from(hardware: Any, shape: AttentionShape, keep: tuple[str, ...]) -> int:
    """Return the smallest context, in tokens, at which a layer's forward hides the offload of its kept tensors.

    0 means any context. In a context of S tokens, a token attends to S/2 tokens on average.
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
    """Estimate letter g: Llama-3-8B with LoRA and with full training, for every `keep`."""
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
        ["machine", "trained", "kept", "longest", *(f"step time at {tokens(n)}" for n in _TIMED)], rows,
        [f"Chunks are {tokens(_CHUNK)}. The search for the longest context begins at 128K and has a precision of one "
         "eighth. LoRA has rank 16 on all linear layers (fp32 adapters, frozen bf16 base). One device holds all "
         "parameters, gradients and optimizer state, or offloads them if that is needed or allows a longer context. "
         "Eight devices use ZeRO-2 or ZeRO-3, with offload if needed. The kernel is PyTorch's own FlashAttention 2."],
        ["A cell without a time means that the step does not fit. checkpoint_every=4 is estimated only where "
         "checkpoint_every=1 does not fit. Its recomputation, without attention, adds about 1%."], figures,
    )  # fmt: skip


def _step(run: Run, every: int) -> str:
    if run.why:
        return ""
    return duration(run.seconds) if run.every == every else f"as above ({duration(run.seconds)})"


def _trained(
    planner: Planner, meta_model: MetaModel, cluster: Cluster, keep: tuple[str, ...], every: int, known: dict[int, Run]
) -> tuple[int, dict[int, Run]]:
    """Return the longest context, and the steps by length; do not estimate steps in `known` again."""

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
            steps[length] = streamed(planner, cluster, job(length))
    return far, steps
