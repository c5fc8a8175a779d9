"""Estimate of a step: the real engine on tensors without contents.

The same sweeps, attention and placement run on the `meta` device with simulated lanes. So the bytes that they hold in
each tier and move over each lane are exactly those of a real step. With a hardware profile every operator has a cost
and advances a clock, which gives the time of the step and the part of it that is spent waiting.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from trunkline.config import Progress, resolve_config
from trunkline.distributed.grad_norm import local
from trunkline.distributed.mesh import ParallelDims, heads_of
from trunkline.engine.batch import Batch
from trunkline.engine.loss import mean_loss
from trunkline.engine.memory_layout import STORE_LABELS
from trunkline.engine.replay import ReplayContext, draw_seed
from trunkline.engine.setup import begin_step, probe_token
from trunkline.engine.step import StepState
from trunkline.engine.sweeps import backward as run_backward
from trunkline.engine.sweeps import forward as run_forward
from trunkline.hf import probe
from trunkline.hf.flops import UncountedModuleError, model_flops
from trunkline.hf.introspect import UnsupportedModelError
from trunkline.offload.backends import tiers_for
from trunkline.offload.lanes.base import LANES
from trunkline.offload.lanes.sim_clock import LaneSegment, SimClock
from trunkline.offload.stores import Tiers
from trunkline.plan import representative_layers
from trunkline.plan.cost_model import CostModel
from trunkline.plan.device_memory import DeviceMemory, MemoryTally
from trunkline.plan.hardware import Hardware, load, speeds_of
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import AdamWSpec, ModelStates, model_states_of
from trunkline.plan.op_tracer import OpTracer
from trunkline.plan.simulated_ranks import COMM, SimulatedRanks, collective_link
from trunkline.plan.simulated_sharding import ShardingSpec, SimulatedSharding
from trunkline.plan.simulated_tp import tp_shard
from trunkline.plan.step_trace import Counters, SegmentRecorder, StepSegment, Trace, join_segments
from trunkline.units import TIERS, TierName, format_bytes

_OUTSIDE_STORES = "device, outside stores"  # a tally of the trace beside the three tiers


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Estimated time of one micro-batch, with its share of the optimizer step where there is an optimizer.

    Phases, lanes, waits, operators and memory are those of the first device.

    Attributes:
        seconds: duration in seconds.
        phases: (name, begin, end) in seconds: embed, forward, head, backward, optimizer.
        busy: seconds that each lane (fetch, stash, comm) works.
        exposed: seconds that compute waits for each lane.
        tokens: tokens of the micro-batch, over all replicas.
        devices: devices that share the work.
        model_flops: FLOPs of all devices that the model's mathematics needs (`trunkline.hf.flops`); None where they are
            not known.
        hardware_flops: FLOPs that all devices execute, recomputation included, a kernel's own excepted.
        operators: operators that the host of a device issues.
        peak_flops: peak FLOP/s of one device.
        memory: (second, bytes) of each tier; empty unless `estimate` was given `timeline=True`.
        lanes: (begin, end, label) of the work of each lane and of compute, in seconds; empty like `memory`.
    """

    seconds: float
    phases: list[tuple[str, float, float]]
    busy: dict[str, float]
    exposed: dict[str, float]
    tokens: int
    devices: int
    model_flops: int | None
    hardware_flops: int
    operators: int
    peak_flops: float
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict, repr=False)
    lanes: dict[str, list[LaneSegment]] = field(default_factory=dict, repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one device."""
        return self.tokens / self.seconds / self.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1: causal attention exact, recomputation not counted; None if not known."""
        if self.model_flops is None:
            return None
        return self.model_flops / (self.seconds * self.devices * self.peak_flops)

    @property
    def hardware_utilisation(self) -> float:
        """Hardware FLOPs utilisation, 0 to 1: recomputation counted."""
        return self.hardware_flops / (self.seconds * self.devices * self.peak_flops)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a step: bytes of one rank, and the time of the step.

    Attributes:
        peaks: most bytes that the activation stores hold in each tier (device, host, disk).
        moved: bytes of activations over `fetch` and `stash`; where ranks share a sequence also the bytes that this rank
            sends to them, over `comm`. Parameters and gradients are not included.
        memory: bytes of each tier at its peak, by label: parameters, gradients, optimizer, kept activations, and the
            computation of a chunk. Buffers of libraries are not included.
        step: time of the step; None without a hardware profile.
        outside_stores: most bytes that the device holds outside the activation stores, model states included.
        reserved: least budget in bytes that the stores need in each tier beyond the device; empty without budgets.
    """

    peaks: dict[TierName, int]
    moved: dict[str, int]
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    step: StepTiming | None = None
    outside_stores: int = 0
    reserved: dict[TierName, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for people."""
        held = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in self.peaks.items() if nbytes)
        moved = ", ".join(f"{lane} {format_bytes(nbytes)}" for lane, nbytes in self.moved.items() if nbytes)
        text = f"holds {held}; moves {moved or 'nothing'}"
        if self.step is None:
            return text
        waits = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.step.exposed.items() if seconds > 0)
        speed = f"{self.step.seconds:.4g} s, {self.step.tokens_per_second:,.0f} tokens/s a device"
        return f"{text}; takes {speed}; waits for {waits or 'nothing'}"


def estimate(
    model: PreTrainedModel | MetaModel,
    seq_len: int,
    *,
    batch_size: int = 1,
    documents: Sequence[int] | None = None,
    backward: bool = True,
    device: str | torch.device | None = None,
    hardware: Hardware | str | None = None,
    parallel_dims: ParallelDims | None = None,
    sharding_spec: ShardingSpec | None = None,
    optimizer: AdamWSpec | None = None,
    micro_batches: int = 1,
    extrapolate: bool = True,
    timeline: bool = False,
    **settings: Any,
) -> Estimate:
    """Estimate the memory and the time of a step without computing anything.

    It takes as long as issuing the work does: some milliseconds for each chunk of each layer, and more where keys and
    values are streamed. One or two of the identical layers represent all.

    Args:
        model: unsharded model on any device, `meta` included, in the dtype in which it computes; it is not changed. A
            `MetaModel` saves making one for each call.
        seq_len: tokens of a row, over all ranks.
        batch_size: rows of one replica in a micro-batch.
        documents: tokens of each packed document of a row, `seq_len` in all; None for one document.
        backward: estimate a training step; False estimates a forward without gradients.
        device: device whose default chunk size, budgets and kernels are used; None is the hardware's, or the model's
            own (a CPU for `meta`).
        hardware: profile, or the name of one (`trunkline.plan.hardware`), for the time of the step; None estimates
            bytes only.
        parallel_dims: mesh of such devices; None for one device.
        sharding_spec: sharding of parameters over them; None is the default of `trunkline.shard`.
        optimizer: optimizer whose state is held and whose step is part of the time; None for none. It has no effect
            with `backward=False`.
        micro_batches: micro-batches of the step, of which the last is estimated: accumulated gradients are held, and
            the optimizer's time is divided by their number.
        extrapolate: let layers represent identical ones; False runs all layers.
        timeline: record memory and lanes over time, for a report; it needs `hardware`.
        settings: settings of `trunkline.stream`, all but `mesh`.

    Returns:
        Estimate of the first rank. Its time is that of one micro-batch.

    Raises:
        ValueError: an argument or a setting is out of range, the budgets are too small, the hardware is unknown or has
            no figures of a dtype or of collectives, or the model cannot be streamed.
    """
    dims = ParallelDims() if parallel_dims is None else parallel_dims
    if not isinstance(dims, ParallelDims):
        raise ValueError(f"parallel_dims={dims!r}: give trunkline.ParallelDims(sp=8), for example.")
    meta_model = model if isinstance(model, MetaModel) else MetaModel.from_model(model)
    with tp_shard(meta_model, dims.tp) as on_rank:
        estimator = Estimator(
            meta_model=on_rank, seq_len=seq_len, batch_size=batch_size, documents=documents, device=device,
            hardware=load(hardware) if isinstance(hardware, str) else hardware, parallel_dims=dims,
            sharding_spec=sharding_spec or ShardingSpec(), optimizer=optimizer, micro_batches=micro_batches,
            timeline=timeline, settings=settings,
        )  # fmt: skip
        try:
            return estimator.run(backward=backward, extrapolate=extrapolate)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"{type(on_rank.model).__name__} does not run on the meta device, so no step of it can be estimated: "
                f"{error}"
            ) from error


@dataclass(kw_only=True, eq=False)
class Estimator:
    """Estimate of one step; see `estimate` for the other arguments.

    Attributes:
        meta_model: model as one rank has it.
        settings: settings of `trunkline.stream`.
    """

    meta_model: MetaModel
    seq_len: int
    batch_size: int
    device: str | torch.device | None
    hardware: Hardware | None
    parallel_dims: ParallelDims
    sharding_spec: ShardingSpec
    optimizer: AdamWSpec | None
    micro_batches: int
    settings: dict[str, Any]
    documents: Sequence[int] | None = None
    timeline: bool = False

    def __post_init__(self) -> None:
        """Check the arguments and set up the simulated rank; raise a ValueError if they are out of range."""
        for name, value in (("seq_len", self.seq_len), ("batch_size", self.batch_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: give a positive whole number.")
        if self.documents is not None and (sum(self.documents) != self.seq_len or min(self.documents) < 1):
            raise ValueError(
                f"documents={self.documents!r}: give lengths of at least 1 token that sum to {self.seq_len:,}."
            )
        if "mesh" in self.settings:
            raise ValueError("mesh: an estimate needs no ranks: give parallel_dims=ParallelDims(sp=8), for example.")
        dims, hardware = self.parallel_dims, self.hardware
        dims.check_world(dims.world_size)
        dims.check_heads(*heads_of(self.meta_model.model))
        self._model, self._decoder = self.meta_model.model, self.meta_model.decoder
        self._device = _device(self.device, hardware, self.meta_model.device)
        self._config = resolve_config(None, {**self.settings, "progress": self._on_progress})

        self._clock = SimClock(speeds_of(hardware, dims.world_size), record=self.timeline)
        clock = self._clock if hardware is not None else None
        self._memory, self._host = DeviceMemory(), MemoryTally()
        self._stores = {tier: MemoryTally() for tier in TIERS}
        self._tallies: dict[str, MemoryTally] = {
            "device": self._memory, _OUTSIDE_STORES: self._memory.outside_stores, "host": self._host,
            "disk": self._stores["disk"], **{f"{tier} stores": tally for tier, tally in self._stores.items()},
        }  # fmt: skip
        self._ranks = SimulatedRanks(dims, hardware, clock)
        self._decoder.sharding = self._sharding = None
        if self.sharding_spec.is_sharded(dims.fsdp_size) or dims.fsdp_size > 1:
            fsdp_link = collective_link(dims.fsdp_size, dims.world_size, hardware, clock)
            self._decoder.sharding = self._sharding = SimulatedSharding(
                self._model, self._decoder.layers, self.sharding_spec, fsdp_link, clock, self._memory, self._host
            )
        costs = None if hardware is None else CostModel(hardware)
        tp_link = collective_link(dims.tp, dims.tp, hardware, clock) if dims.tp > 1 else None
        self._op_tracer = OpTracer(costs, self._clock, self._memory, tp_link)
        self._recorder: SegmentRecorder | None = None
        self._tiers = self._new_tiers()

    def run(self, *, backward: bool = True, extrapolate: bool = True) -> Estimate:
        """Simulate the step and return its estimate; see `estimate` for the arguments.

        Raises:
            ValueError: the step does not fit into its budgets.
        """
        spans = self.meta_model.attention_spans
        with probe.random_state_restored(torch.device("cpu")), torch.set_grad_enabled(backward):
            seed, batch = draw_seed(), self._batch()
            full = self.place_stores(batch, seed)
            placement = full.stores.placement
            units = representative_layers.layer_units(full.layout)
            kinds = representative_layers.unit_kinds(units, self._decoder.layers, spans, full.layout, placement)
            represented_by = {i: i for i in range(len(units))}
            if extrapolate:
                represented_by = representative_layers.representatives(kinds)
            chosen = [layer for i in sorted(set(represented_by.values())) for layer in units[i]]
            self._tiers = self._new_tiers()
            if placement is not None:
                # Fewer layers would leave more room than the full step has: each store goes where that one puts it.
                places = representative_layers.placement_of_layers(placement, full.layout, chosen)
                self._tiers.fixed_placement = full.head_groups, places
            segments = self._simulate(batch, seed, chosen)
        states = model_states_of(
            self._model, self.sharding_spec, self.parallel_dims.fsdp_size, self.optimizer if backward else None,
            micro_batches=self.micro_batches,
        )  # fmt: skip
        held = {"device": states.device, _OUTSIDE_STORES: states.device, "host": states.host}
        start = {name: held.get(name, Counter()) for name in self._tallies}
        trace = join_segments(_all_layers(segments, units, represented_by), start)
        return self._estimate(trace, states, {} if placement is None else dict(placement.offloaded), backward=backward)

    def place_stores(self, batch: Batch | None = None, seed: int = 0) -> StepState:
        """Begin a step and choose the tier of every store, without running the sweeps.

        Args:
            batch: batch of the step; None makes it.
            seed: seed of the step's random numbers.

        Raises:
            ValueError: the stores do not fit into their budgets.
        """
        batch = self._batch() if batch is None else batch
        step, differentiable = self._begin(self._decoder, batch, seed, self.meta_model.attention_spans)
        if not self._tiers.limited:
            with step.replay.restored(), step.decoder.streamed_attention(), torch.no_grad():
                probe_token(step, differentiable=differentiable)
        step.stores.close()
        return step

    # -- simulation ----------------------------------------------------------------------------------------------------

    def _begin(self, decoder: Any, batch: Batch, seed: int, spans: Sequence[Any]) -> tuple[StepState, bool]:
        replay = ReplayContext(self._model, batch.input_ids_BS.device, seed)
        return begin_step(decoder, self._config.on(self._device), batch, replay, self._tiers, self._ranks, spans)

    def _simulate(self, batch: Batch, seed: int, chosen: Sequence[int]) -> list[StepSegment]:
        """Run a step with the chosen layers and return its segments."""
        # Model states are counted by arithmetic (`ModelStates`), with their sharding.
        self._memory.ignore([*(local(p) for p in self._model.parameters()), *self._model.buffers(), batch.input_ids_BS])
        self._tiers.observer = self._on_store_bytes
        recorder = self._recorder = SegmentRecorder(self._clock, self._tallies, self._counters, timeline=self.timeline)
        decoder = representative_layers.DecoderSubset(self._decoder, chosen, recorder, self._memory)
        spans = [self.meta_model.attention_spans[layer] for layer in chosen]
        with self._op_tracer.tracing(), self._ranks.guard():
            with decoder.unsharded(None):
                step, differentiable = self._begin(decoder, batch, seed, spans)
                run_forward(step, differentiable=differentiable)
                recorder.begin_phase("head")
                loss = mean_loss(step, differentiable=differentiable)
            if differentiable:
                recorder.begin_phase("backward")
                run_backward(step, torch.empty_like(loss))
                if self._sharding is not None:
                    recorder.enter(None)
                    self._sharding.wait_for_offloaded_grads()
            del step, loss  # their memory is freed inside the last segment
        recorder.finish()
        return recorder.segments

    def _batch(self) -> Batch:
        ids_BS = torch.empty(self.batch_size, self.seq_len, dtype=torch.long, device="meta")
        lengths = [self.seq_len] if self.documents is None else list(self.documents)
        starts = (0, *accumulate(lengths[:-1]))
        count = torch.empty((), dtype=torch.long, device="meta")
        return Batch(ids_BS, None, ids_BS[:, 1:], count, documents=(starts,))

    def _new_tiers(self) -> Tiers:
        clock = None if self.hardware is None else self._clock
        config = self._config
        return tiers_for(self._device, config.budgets, config.offload_dir, config.prefetch, simulated=True, clock=clock)

    # -- measurement ---------------------------------------------------------------------------------------------------

    def _on_progress(self, progress: Progress) -> None:
        # Layers tell the recorder themselves (`DecoderSubset`); the embedding's backward does not.
        if self._recorder is not None and progress.part == "backward" and progress.layer < 0:
            self._recorder.enter(None)

    def _on_store_bytes(self, tier: TierName, kind: str, nbytes: int) -> None:
        label = STORE_LABELS.get(kind, kind)
        self._stores[tier].add(label, nbytes)
        if tier == "device":
            self._memory.label_stored(label, nbytes)  # its tensors are counted already
        elif tier == "host":
            self._host.add(label, nbytes)

    def _counters(self) -> Counters:
        counters: Counters = {
            "seconds": self._clock.compute, "flops": self._op_tracer.flops, "operators": self._op_tracer.operators,
        }  # fmt: skip
        for lane, traffic in (self._tiers.lanes.traffic if self._tiers.limited else {}).items():
            counters[f"{lane} bytes"] = traffic.moved
        counters["comm bytes"] = self._ranks.traffic.moved if self._ranks.traffic is not None else 0
        for name in (*LANES, COMM):
            counters[f"{name} exposed"] = self._clock.exposed.get(name, 0.0)
            counters[f"{name} busy"] = self._clock.busy.get(name, 0.0)
        return counters

    # -- result --------------------------------------------------------------------------------------------------------

    def _estimate(
        self, trace: Trace, states: ModelStates, reserved: dict[TierName, int], *, backward: bool
    ) -> Estimate:
        moved: dict[str, int] = {lane: int(trace.counters.get(f"{lane} bytes", 0)) for lane in LANES}
        if self.parallel_dims.sp * self.parallel_dims.cp > 1:
            moved["comm"] = int(trace.counters["comm bytes"])
        memory: dict[str, dict[str, int]] = {tier: dict(+trace.parts[tier]) for tier in TIERS}
        memory["device"]["activations of a chunk"] = trace.peaks["device"] - sum(memory["device"].values())
        step = None
        if self.hardware is not None:
            seconds = 0.0
            if backward and self.optimizer is not None:
                seconds = states.seconds(
                    self.hardware, offload=self.sharding_spec.offload, devices=self.parallel_dims.fsdp_size
                )
            step = self._timing(trace, seconds / self.micro_batches, backward=backward)
        return Estimate(
            peaks={tier: trace.peaks[f"{tier} stores"] for tier in TIERS}, moved=moved, memory=memory, step=step,
            outside_stores=trace.peaks[_OUTSIDE_STORES], reserved=reserved,
        )  # fmt: skip

    def _timing(self, trace: Trace, optimizer_seconds: float, *, backward: bool) -> StepTiming:
        assert self.hardware is not None
        rows = self.batch_size * self.parallel_dims.dp
        flops = None
        with contextlib.suppress(UncountedModuleError):
            full = self._model if self.meta_model.full_model is None else self.meta_model.full_model
            flops = model_flops(full, seq_len=self.seq_len, batch_size=rows, documents=self.documents)
        counters, phases = trace.counters, list(trace.phases)
        seconds = counters["seconds"] + optimizer_seconds
        if optimizer_seconds:
            phases.append(("optimizer", counters["seconds"], seconds))
        return StepTiming(
            seconds=seconds,
            phases=phases,
            busy={lane: counters[f"{lane} busy"] for lane in (*LANES, COMM)},
            exposed={lane: counters[f"{lane} exposed"] for lane in (*LANES, COMM)},
            tokens=self.seq_len * rows,
            devices=self.parallel_dims.world_size,
            model_flops=flops if backward or flops is None else flops // 3,
            hardware_flops=int(counters["flops"]) * self.parallel_dims.world_size,
            operators=int(counters["operators"]),
            peak_flops=self.hardware.peak_rate(self._model.get_input_embeddings().weight.dtype),
            memory={tier: trace.memory[tier] for tier in TIERS} if self.timeline else {},
            lanes=trace.lanes if self.timeline else {},
        )


def _device(device: str | torch.device | None, hardware: Hardware | None, model_device: torch.device) -> torch.device:
    if device is not None:
        return torch.device(device)
    if hardware is not None:
        return torch.device(hardware.device_type)
    return torch.device("cpu") if model_device.type == "meta" else model_device


def _all_layers(
    segments: Sequence[StepSegment], units: Sequence[range], represented_by: dict[int, int]
) -> list[StepSegment]:
    """Return the segments of all layers in the order of a step, from those of the layers that represent them."""
    unit_of = {layer: i for i, unit in enumerate(units) for layer in unit}
    step: list[StepSegment] = []
    for phase in ("embed", "forward", "head", "backward"):
        in_phase = [segment for segment in segments if segment.phase == phase]
        of_unit: dict[int, list[StepSegment]] = {}
        for segment in in_phase:
            if segment.layer is not None:
                of_unit.setdefault(unit_of[segment.layer], []).append(segment)
        # Segments outside the layers come before the first layer's, or after the last one's.
        in_layers = [i for i, segment in enumerate(in_phase) if segment.layer is not None]
        first, last = (in_layers[0], in_layers[-1]) if in_layers else (len(in_phase), len(in_phase))
        step += in_phase[:first]
        for i in range(len(units)) if phase == "forward" else reversed(range(len(units))):
            shift = units[i].start - units[represented_by[i]].start
            step += [replace(each, layer=(each.layer or 0) + shift) for each in of_unit.get(represented_by[i], [])]
        step += in_phase[last + 1 :]
    return step
