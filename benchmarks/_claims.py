"""Shared parts of `claims.py`: models on the meta device, estimates of both sides, and the Markdown table.

No setting is tuned for one row. The chunk size follows from the sequence length. All other settings come from two
functions: `streamed` estimates Trunkline, `checkpointed` estimates gradient checkpointing without chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from trunkline.distributed.mesh import ParallelDims, heads_of
from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.hardware import load
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.planner import DoesNotFit, Planner
from trunkline.plan.search_space import Cluster, TrainingJob, meshes
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.train.presets import PRESETS

K, M, GIB = 2**10, 2**20, 2**30
FULL_LOGITS = 2**62  # bytes; a logits_budget above any size, so that the loss has one tile
FITS = "it fits."  # answer of Planner.why_not for a job that fits
_POSITIONS = 64 * M

ASSUMED = [
    "Every row is an estimate, not a run. The real engine runs on tensors without data, and a simulated clock times "
    "each operator with the rates in trunkline.plan.hardware, unchanged. K is 1,024 tokens. M is 1,048,576 tokens.",
    "GPT models have the layer sizes of trunkline.train.presets, with rotary positions: GPT-NeoX without parallel "
    "residual, with tied embeddings and a vocabulary of 50,257. A learned table of millions of positions would itself "
    "have billions of parameters. Llama 3 has a vocabulary of 128,256.",
    "Models are in bf16. AdamW has fp32 master weights and gradients. Several devices share one sequence: Ulysses "
    "splits the heads as far as their number allows, and keys and values are gathered beyond that. ZeRO-3 shards "
    "parameters in fp32. A single device offloads parameters, gradients and optimizer state to host memory, unless a "
    "table says otherwise.",
    "A step may use 96% of a device's memory minus 1.5 GiB, and 90% of a node's host memory.",
    "'Checkpointing' is gradient checkpointing without chunks. It recomputes each layer from its input, and the inputs "
    "stay on the device. It computes logits in tiles ('tiled logits'), or all at once ('full logits').",
    "MFU counts causal attention exactly and does not count recomputation. HFU counts all work of the devices. 'MFU "
    "(FPDT)' is 4/3 of MFU. This is FPDT's convention: it counts the forward twice, even if attention runs once.",
]


@dataclass(frozen=True)
class Answer:
    """Table of one letter.

    Attributes:
        letter: letter of the claim.
        title: title of the table.
        columns: column headers.
        rows: cells, as text.
        assumed: assumptions of this table, in addition to `ASSUMED`.
        notes: numbers derived by hand, and cases that cannot be estimated.
        figures: numbers behind the rows, for the JSON file.
    """

    letter: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """Estimate of a step, or the reason why it does not fit.

    Attributes:
        why: reason why the step does not fit; empty if it fits.
        seconds: time of the step.
        rate: tokens per second and device.
        mfu: MFU with causal attention, without recomputation.
        hfu: MFU including recomputation.
        device: peak bytes of a device.
        room: bytes of a device that a step may use.
        host: peak bytes of host memory, per node.
        waits: share of the step in which compute waits for a lane.
        chunk: tokens per chunk.
        keep: kept activations.
        every: value of `checkpoint_every`.
    """

    why: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    mfu: float = 0.0
    hfu: float = 0.0
    device: int = 0
    room: int = 0
    host: int = 0
    waits: float = 0.0
    chunk: int = 0
    keep: tuple[str, ...] = ()
    every: int = 1

    @property
    def fits(self) -> bool:
        """True if the step fits."""
        return not self.why and self.device <= self.room

    @property
    def verdict(self) -> str:
        """Cell of a table: yes, no, or the missing memory."""
        if self.why:
            return "no"
        return "yes" if self.fits else f"no, {(self.device - self.room) / GIB:,.1f} GiB short"

    @property
    def speeds(self) -> list[str]:
        """Cells of a table: MFU, MFU in FPDT's convention, and HFU."""
        if self.why:
            return ["", "", ""]
        return [f"{self.mfu:.1%}", f"{self.mfu * 4 / 3:.1%}", f"{self.hfu:.1%}"]

    @property
    def bytes(self) -> list[str]:
        """Cells of a table: GiB of a device, and GiB of host memory per node."""
        return ["", ""] if self.why else [f"{self.device / GIB:,.1f}", f"{self.host / GIB:,.0f}"]

    @property
    def kept(self) -> str:
        """Cell of a table: the kept activations."""
        return kept(self.keep, self.every)

    def figures(self, **what: Any) -> dict[str, Any]:
        """Return the numbers for the JSON file."""
        return {**what, **dataclasses.asdict(self), "fits": self.fits}


def kept(keep: Sequence[str], every: int) -> str:
    """Describe the kept activations."""
    own = " + ".join(keep) or "nothing"
    return own if every == 1 else f"{own}, checkpoint_every={every}"


# -- models ------------------------------------------------------------------------------------------------------------


@cache
def model_of(name: str) -> MetaModel:
    """Build a preset on the meta device."""
    return MetaModel.from_model(_built(name))


@cache
def lora_of(name: str) -> MetaModel:
    """Build a preset with LoRA adapters of rank 16 on all linear layers; everything else is frozen."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = get_peft_model(_built(name), LoraConfig(r=16, target_modules="all-linear"))
    return MetaModel.from_model(model)


def _built(name: str) -> Any:
    fields = dict(PRESETS[name])
    with torch.device("meta"):
        if fields.pop("model_type") == "gpt2":
            width = fields["n_embd"]
            config = GPTNeoXConfig(
                vocab_size=50_257, hidden_size=width, num_hidden_layers=fields["n_layer"],
                num_attention_heads=fields["n_head"], intermediate_size=4 * width, max_position_embeddings=_POSITIONS,
                use_parallel_residual=False, tie_word_embeddings=True,
            )  # fmt: skip
            return GPTNeoXForCausalLM(config).to(torch.bfloat16)
        config = LlamaConfig(**fields, vocab_size=128_256, max_position_embeddings=_POSITIONS)
        return LlamaForCausalLM(config).to(torch.bfloat16)


def billions(meta_model: MetaModel) -> float:
    """Return the number of parameters in billions."""
    return sum(p.numel() for p in meta_model.model.parameters()) / 1e9


# -- estimating --------------------------------------------------------------------------------------------------------


def machine_of(name: str, devices: int, host: int | None = None, attention: str | None = None) -> Cluster:
    """Return a cluster of a profile's devices; `host` replaces the profile's host memory per node."""
    hardware = load(name, attention=attention)
    return Cluster(hardware, devices, host or hardware.host_bytes or 0)


def mesh_of(meta_model: MetaModel, cluster: Cluster) -> ParallelDims:
    """Return the mesh that spreads one sequence over all devices."""
    return next(meshes(TrainingJob(1), cluster, heads_of(meta_model.model)[0], one_sequence=True))


def sharding_spec_of(cluster: Cluster) -> ShardingSpec:
    """Return ZeRO-3, with offload if there is only one device."""
    return ShardingSpec(zero=3, dtype=torch.float32, offload=cluster.devices == 1)


def chunk_of(length: int, chunks: int = 32) -> int:
    """Return the smallest power of two, at least 16K, that cuts a sequence into at most `chunks` chunks."""
    size = 16 * K
    while length > chunks * size:
        size *= 2
    return size


def job_of(
    meta_model: MetaModel, cluster: Cluster, length: int, keep: Sequence[str], every: int = 1, chunk: int | None = None,
    **fixed: Any,
) -> TrainingJob:  # fmt: skip
    """Return the job of a streamed step."""
    settings = {"chunk_size": chunk or chunk_of(length), "keep": tuple(keep), "checkpoint_every": every, **fixed}
    return TrainingJob(
        length, fixed=settings, parallel_dims=mesh_of(meta_model, cluster), sharding_spec=sharding_spec_of(cluster)
    )


def streamed(planner: Planner, cluster: Cluster, job: TrainingJob) -> Run:
    """Estimate a streamed step; its budgets leave room for all memory outside the activation stores."""
    own = {"chunk": job.fixed["chunk_size"], "keep": job.fixed["keep"], "every": job.fixed["checkpoint_every"]}
    try:
        plan = planner.best(job)
    except DoesNotFit as error:
        return Run(str(error), **own)
    return _run(plan.estimate, cluster, **own)


def first_that_fits(planner: Planner, meta_model: MetaModel, cluster: Cluster, length: int) -> Run:
    """Estimate the first step that fits: attention kept with all layer inputs, then with fewer, then nothing kept."""
    run = Run("nothing was tried")
    for keep, every in ((("attention",), 1), (("attention",), 4), (("attention",), 8), ((), 1), ((), 4)):
        job = job_of(meta_model, cluster, length, keep, every)
        if planner.why_not(job) == FITS:
            return streamed(planner, cluster, job)
        run = Run(planner.why_not(job), keep=keep, every=every)
    return run


def checkpointed(
    meta_model: MetaModel,
    cluster: Cluster,
    length: int,
    *,
    full_logits: bool = False,
    timed: bool = True,
    parallel_dims: Any = None,
) -> Run:
    """Estimate a step with checkpointing, and Ulysses on several devices: one chunk, everything on the device."""
    head: dict[str, Any] = {"logits_budget": FULL_LOGITS} if full_logits else {}
    try:
        found = estimate(
            meta_model,
            length,
            device=cluster.hardware.device_type,
            hardware=cluster.hardware if timed else None,
            parallel_dims=parallel_dims or mesh_of(meta_model, cluster),
            sharding_spec=sharding_spec_of(cluster),
            optimizer=AdamWSpec(),
            chunk_size=length,
            keep=(),
            **head,
        )
    except ValueError as error:  # one chunk has more elements than a kernel accepts
        return Run(str(error), chunk=length)
    return _run(found, cluster, chunk=length)


def _run(found: Estimate, cluster: Cluster, **own: Any) -> Run:
    device, host = (sum(found.memory[tier].values()) for tier in ("device", "host"))
    memory: dict[str, Any] = {
        "device": device,
        "room": cluster.usable_bytes["device"],
        "host": host * cluster.devices_per_node,
    }
    step = found.step
    if step is None:
        return Run(**memory, **own)
    return Run(seconds=step.seconds, rate=step.tokens_per_second, mfu=step.mfu or 0.0, hfu=step.hardware_utilisation,
               waits=sum(step.exposed.values()) / step.seconds, **memory, **own)  # fmt: skip


def longest(fits: Callable[[int], bool], begin: int = 16 * K, finest: int = 32) -> int:
    """Return the longest length that fits, with a precision of 1/`finest`; 0 if `begin` does not fit."""
    if not fits(begin):
        return 0
    low = begin
    while fits(2 * low):
        low *= 2
    step = low // 2
    while step >= max(low // finest, K):
        if fits(low + step):
            low += step
        step //= 2
    return low


# -- text --------------------------------------------------------------------------------------------------------------


def tokens(count: float) -> str:
    """Format a number of tokens in K or M."""
    if count >= M:
        return f"{count / M:.3g}M"
    return f"{count / K:.3g}K"


def duration(seconds: float) -> str:
    """Format seconds."""
    if seconds >= 36_000:
        return f"{seconds / 3_600:,.1f} h"
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def markdown(answer: Answer) -> str:
    """Format the table, its assumptions and its notes in Markdown."""
    lines = ["| " + " | ".join(answer.columns) + " |", "| --- |" + " ---: |" * (len(answer.columns) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in answer.rows]
    own = [f"- Assumed: {text}" for text in answer.assumed] + [f"- {text}" for text in answer.notes]
    return "\n".join([f"## {answer.letter}. {answer.title}", "", *lines, "", *own, ""])
