"""Common parts of the letters of `claims.py`: models on the meta device, an estimate of each side, and the table.

Nothing is set for a row alone: the chunk follows from the length, everything else from the two functions here that
estimate, `ours` and `alone`.
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
WHOLE_LOGITS = 2**62
FITS = "it fits."  # what Planner.why_not says then
_POSITIONS = 64 * M

ASSUMED = [
    "Estimated, not run: the real engine on tensors without contents, timed with the figures of "
    "trunkline.plan.hardware as they stand. K is 1,024 tokens, M is 1,048,576.",
    "GPTs have the widths of trunkline.train.presets with rotary positions (GPT-NeoX without the parallel residual, "
    "tied head, 50,257 words): a learned table of millions of positions would itself be billions of parameters. Llama "
    "3 has 128,256 words.",
    "bf16; AdamW with float32 masters and gradients. Several devices: one sequence over all of them (Ulysses as far as "
    "the heads go, keys and values gathered beyond), ZeRO-3 with float32 parts. One device: parameters, gradients and "
    "optimizer offloaded to host memory, unless said otherwise.",
    "A device has 96% of its memory less 1.5 GiB, a node 90% of its host memory. 'Alone' is checkpointing without "
    "chunks: each layer replayed from its input, which stays on the device; logits in tiles, or whole where it "
    "says so.",
    "MFU counts causal attention exactly and nothing that is computed again; HFU counts what the devices do; 'talk' is "
    "4/3 of MFU: FPDT's convention, which counts forward twice whether or not attention runs twice.",
]


@dataclass(frozen=True)
class Answer:
    """Table of one letter.

    Attributes:
        letter: of the claim.
        title: what it asks.
        columns: of the table.
        rows: cells, as text.
        assumed: beyond `ASSUMED`.
        notes: what is derived rather than estimated, and what cannot be estimated.
        figures: the numbers behind the rows.
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
        why: it does not fit; empty where it does.
        seconds: of a step.
        rate: tokens a second of a device.
        mfu: causal, recomputation not counted.
        hfu: recomputation counted.
        device: most bytes that a device holds.
        room: that it has.
        host: most bytes of host memory, of a node.
        waits: share of the step in which compute waits for a lane.
        chunk: tokens.
        keep: what is kept.
        every: checkpoint_every.
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
        """Whether the step fits."""
        return not self.why and self.device <= self.room

    @property
    def verdict(self) -> str:
        """Whether it fits, for a table."""
        if self.why:
            return "no"
        return "yes" if self.fits else f"no, {(self.device - self.room) / GIB:,.1f} GiB over"

    @property
    def speeds(self) -> list[str]:
        """MFU, MFU in the talk's convention, and HFU."""
        if self.why:
            return ["", "", ""]
        return [f"{self.mfu:.1%}", f"{self.mfu * 4 / 3:.1%}", f"{self.hfu:.1%}"]

    @property
    def bytes(self) -> list[str]:
        """GiB of a device, and of a node's host memory."""
        return ["", ""] if self.why else [f"{self.device / GIB:,.1f}", f"{self.host / GIB:,.0f}"]

    @property
    def kept(self) -> str:
        """Kept activations, for a table."""
        return kept(self.keep, self.every)

    def figures(self, **what: Any) -> dict[str, Any]:
        """Return the numbers for the file."""
        return {**what, **dataclasses.asdict(self), "fits": self.fits}


def kept(keep: Sequence[str], every: int) -> str:
    """Return the kept activations in words."""
    own = " + ".join(keep) or "nothing"
    return own if every == 1 else f"{own}, every {every}th input"


# -- models ------------------------------------------------------------------------------------------------------------


@cache
def model_of(name: str) -> MetaModel:
    """Build a preset on the meta device."""
    return MetaModel.from_model(_built(name))


@cache
def lora_of(name: str) -> MetaModel:
    """Build a preset with trainable adapters of rank 16 on all linear layers, all else frozen."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = get_peft_model(_built(name), LoraConfig(r=16, target_modules="all-linear"))
    return MetaModel.from_model(model)


def _built(name: str) -> Any:
    fields = dict(PRESETS[name].fields)
    with torch.device("meta"):
        if PRESETS[name].model_type == "gpt2":
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
    """Return the parameters in billions."""
    return sum(p.numel() for p in meta_model.model.parameters()) / 1e9


# -- estimating --------------------------------------------------------------------------------------------------------


def machine_of(name: str, devices: int, host: int | None = None, attention: str | None = None) -> Cluster:
    """Return a cluster of a profile's devices; the host memory of a node is the profile's unless given."""
    hardware = load(name, attention=attention)
    return Cluster(hardware, devices, host or hardware.host_bytes or 0)


def mesh_of(meta_model: MetaModel, cluster: Cluster) -> ParallelDims:
    """Return the mesh in which all devices share one sequence."""
    return next(meshes(TrainingJob(1), cluster, heads_of(meta_model.model)[0], one_sequence=True))


def sharding_spec_of(cluster: Cluster) -> ShardingSpec:
    """Return ZeRO-3 over several devices, or offloaded on one."""
    return ShardingSpec(zero=3, dtype=torch.float32, offload=cluster.devices == 1)


def chunk_of(length: int, chunks: int = 32) -> int:
    """Return the smallest power of two, at least 16K, that cuts a sequence into at most so many chunks."""
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


def ours(planner: Planner, cluster: Cluster, job: TrainingJob) -> Run:
    """Estimate a streamed step; its budgets leave room for everything outside the stores."""
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
            return ours(planner, cluster, job)
        run = Run(planner.why_not(job), keep=keep, every=every)
    return run


def alone(
    meta_model: MetaModel,
    cluster: Cluster,
    length: int,
    *,
    whole_logits: bool = False,
    timed: bool = True,
    parallel_dims: Any = None,
) -> Run:
    """Estimate a step with checkpointing (and Ulysses) alone: one chunk, everything on the device."""
    head: dict[str, Any] = {"logits_budget": WHOLE_LOGITS} if whole_logits else {}
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
    except ValueError as error:  # one chunk has more elements than a kernel may be given
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
    """Return the longest length that fits, to one part in `finest`; 0 if not even the first does."""
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


# -- words -------------------------------------------------------------------------------------------------------------


def tokens(count: float) -> str:
    """Return a number of tokens in K or M."""
    if count >= M:
        return f"{count / M:.3g}M"
    return f"{count / K:.3g}K"


def duration(seconds: float) -> str:
    """Return seconds as text."""
    if seconds >= 36_000:
        return f"{seconds / 3_600:,.1f} h"
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def markdown(answer: Answer) -> str:
    """Return the table in Markdown."""
    lines = ["| " + " | ".join(answer.columns) + " |", "| --- |" + " ---: |" * (len(answer.columns) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in answer.rows]
    own = [f"- Assumed: {text}" for text in answer.assumed] + [f"- {text}" for text in answer.notes]
    return "\n".join([f"## {answer.letter}. {answer.title}", "", *lines, "", *own, ""])
