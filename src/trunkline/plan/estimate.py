"""A rehearsal: a step of the real engine on tensors without contents.

The same sweeps, core and placement run on the `meta` device with virtual lanes, so that what they hold in every tier
and send over every lane is what they will hold and send, to the byte. With a hardware profile every operator has a
cost, and a clock goes on: the step's time, and what of it was waiting.
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
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.offload.stores import Tiers
from trunkline.plan import representative_layers, simulated_tp
from trunkline.plan.cost_model import CostModel
from trunkline.plan.device_memory import DeviceMemory, MemoryTally
from trunkline.plan.hardware import Hardware, speeds_of
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import AdamWSpec, ModelStates, model_states_of
from trunkline.plan.op_tracer import OpTracer
from trunkline.plan.simulated_ranks import COMM, SimulatedRanks, link
from trunkline.plan.simulated_sharding import ShardingSpec, SimulatedSharding
from trunkline.plan.step_trace import Numbers, SegmentRecorder, StepSegment, Trace, compose
from trunkline.units import TIERS, TierName, format_bytes


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When everything would happen.

    Attributes:
        seconds: of the step, its optimizer included where there is one.
        phases: (name, begin, end) in seconds: embed, forward, head, backward, optimizer.
        busy: seconds that each lane (fetch, stash, comm) works.
        exposed: seconds that compute waits for each lane.
        tokens: of the step, all replicas together.
        devices: that share the work.
        model_flops: FLOPs that the mathematics needs (`trunkline.hf.flops`); None where they cannot be counted.
        hardware_flops: those that all devices do, what is computed again included; a kernel's own recomputation is not.
        operators: that the host of a device issues.
        peak_flops: FLOP/s of a device.
        memory: (second, bytes) of each tier, where it was asked for.
        lanes: (begin, end, label) of each lane, where it was asked for.
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
    lanes: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict, repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Of a device."""
        return self.tokens / self.seconds / self.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: causal attention exact, recomputation not counted."""
        if self.model_flops is None:
            return None
        return self.model_flops / (self.seconds * self.devices * self.peak_flops)

    @property
    def hardware_utilisation(self) -> float:
        """FLOPs that were done, recomputed ones included, of those that could have been."""
        return self.hardware_flops / (self.seconds * self.devices * self.peak_flops)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step would do, seen from one rank.

    Attributes:
        peaks: most bytes that the engine's stores hold in each tier.
        moved: bytes that go over each lane.
        memory: all bytes of each tier at its peak, by what they are: parameters, gradients, optimizer, what is kept,
            and what a chunk's own computation takes. A library's own buffers are not among them.
        step: when; None without a hardware profile.
        beyond_stores: most bytes that the device holds beside the engine's stores.
        reserved: bytes that the stores need in each tier beyond the device: the least budget there.
    """

    peaks: dict[TierName, int]
    moved: dict[str, int]
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    step: StepTiming | None = None
    beyond_stores: int = 0
    reserved: dict[TierName, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """In units for people."""
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
    """Run a step of a model without computing anything.

    It takes as long as issuing the work does: some milliseconds for each chunk of each layer, and more where keys and
    values are streamed. Of layers that are alike a few stand for all.

    Args:
        model: on any device, `meta` included, whole, in the dtype in which it computes; it is not changed. A
            `MetaModel` saves making one each time.
        seq_len: tokens of a row (global: all ranks together).
        batch_size: rows, of one replica.
        documents: tokens of each document that a row packs, `seq_len` together; None for one.
        backward: a training step; otherwise a forward without gradients.
        device: the device whose chunk size, budgets and kernels are meant; None is the hardware's, or the model's own
            (a CPU for `meta`).
        hardware: a profile, or the name of one (`trunkline.plan.hardware`): then the step has a time. None for bytes
            alone.
        parallel_dims: of a mesh of such devices; None for one device.
        sharding_spec: how parameters are spread over them; None as `trunkline.shard` does it by default.
        optimizer: whose state is held, and whose step is part of the time; None for none.
        micro_batches: of a step, of which this is the last: gradients of earlier ones are held, and the optimizer's
            time is shared.
        extrapolate: have layers that are alike stand for each other; False goes through all.
        timeline: keep what happened when, for a report.
        settings: of `trunkline.stream`.

    Raises:
        ValueError: an argument or a setting is out of range, the budgets are too small, the hardware is unknown, or the
            model cannot be streamed.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: give a positive whole number.")
    if documents is not None and (sum(documents) != seq_len or min(documents) < 1):
        raise ValueError(f"documents={documents!r}: give lengths of at least 1 token that are {seq_len:,} together.")
    _check_settings(settings, parallel_dims)
    meta_model, parallel_dims = (
        model if isinstance(model, MetaModel) else MetaModel.from_model(model),
        parallel_dims or ParallelDims(),
    )
    with simulated_tp.cut(meta_model, parallel_dims.tp) as own:
        rehearsing = Estimator(own, seq_len, batch_size, documents, device=device, hardware=hardware,
                                parallel_dims=parallel_dims, sharding_spec=sharding_spec or ShardingSpec(),
                                timeline=timeline, settings=settings)  # fmt: skip
        try:
            return rehearsing.result(
                backward=backward, extrapolate=extrapolate, optimizer=optimizer, micro_batches=micro_batches
            )
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"{type(own.model).__name__} cannot be rehearsed on tensors without contents: {error}"
            ) from error


class Estimator:
    """One rehearsal; see `estimate`."""

    def __init__(
        self,
        meta_model: MetaModel,  # as a rank has it
        seq_len: int,
        batch_size: int,
        documents: Sequence[int] | None,
        *,
        device: str | torch.device | None,
        hardware: Hardware | str | None,
        parallel_dims: ParallelDims,
        sharding_spec: ShardingSpec,
        timeline: bool,
        settings: dict[str, Any],
    ) -> None:
        self._meta_model, self._decoder = meta_model.model, meta_model.decoder
        self._whole = meta_model.model if meta_model.whole is None else meta_model.whole
        self._reaches = meta_model.attention_spans
        self._seq_len, self._batch_size, self._documents = seq_len, batch_size, documents
        self._hardware = _loaded(hardware)
        self._parallel_dims, self._sharding_spec, self._timeline = parallel_dims, sharding_spec, timeline
        parallel_dims.check_world(parallel_dims.dp * parallel_dims.sp * parallel_dims.cp * parallel_dims.tp)
        parallel_dims.check_heads(*heads_of(meta_model.model))
        self._device = _device(device, self._hardware, meta_model.device)
        self._config = resolve_config(None, {**settings, "progress": self._progress})
        world = parallel_dims.dp * parallel_dims.sp * parallel_dims.cp
        self._clock = SimClock(speeds_of(self._hardware, world * parallel_dims.tp), record=timeline)
        self._memory = DeviceMemory()
        self._tallies: dict[str, MemoryTally] = {
            "device": self._memory, BEYOND_STORES: self._memory.beyond, "host": MemoryTally(), "disk": MemoryTally(),
        }  # fmt: skip
        clock = None if self._hardware is None else self._clock
        self._ranks = SimulatedRanks(parallel_dims, self._hardware, clock)
        self._decoder.sharding = None
        self._sharding: SimulatedSharding | None = None
        if sharding_spec.cuts(world) or world > 1:
            replicas = link(world, world * parallel_dims.tp, self._hardware, clock)
            self._sharding = self._decoder.sharding = SimulatedSharding(
                self._meta_model,
                self._decoder.layers,
                sharding_spec,
                replicas,
                clock,
                self._memory,
                self._tallies["host"],
            )
        self._observed = OpTracer(
            None if self._hardware is None else CostModel(self._hardware), self._clock, self._memory,
            link(parallel_dims.tp, parallel_dims.tp, self._hardware, clock) if parallel_dims.tp > 1 else None,
        )  # fmt: skip
        self._recorder: SegmentRecorder | None = None
        self._reserved: dict[TierName, int] = {}
        self._tiers = self._new_tiers()

    def result(
        self, *, backward: bool, extrapolate: bool, optimizer: AdamWSpec | None, micro_batches: int = 1
    ) -> Estimate:
        """Rehearse."""
        reaches = self._reaches
        with probe.random_state_restored(torch.device("cpu")), torch.set_grad_enabled(backward):
            seed, batch = draw_seed(), self._batch()
            full = self.placed(batch, seed)
            placement = full.stores.placement
            self._reserved = {} if placement is None else dict(placement.offloaded)
            units = representative_layers.layer_units(full.layout)
            kinds = representative_layers.unit_kinds(units, self._decoder.layers, reaches, full.layout, placement)
            stands = representative_layers.representatives(kinds) if extrapolate else {i: i for i in range(len(units))}
            chosen = [layer for i in sorted(set(stands.values())) for layer in units[i]]
            self._tiers = self._new_tiers()
            if placement is not None:
                self._tiers.fixed_placement = (
                    full.head_groups,
                    representative_layers.placement_of_layers(placement, full.layout, chosen),
                )
            segments = self._segments(batch, seed, chosen, [reaches[layer] for layer in chosen])
        order = _order(segments, units, stands)
        ranks = self._parallel_dims.dp * self._parallel_dims.sp * self._parallel_dims.cp
        states = model_states_of(self._meta_model, self._sharding_spec, ranks, optimizer if backward else None,
                           micro_batches=micro_batches)  # fmt: skip
        course = compose(order, {"device": states.device, BEYOND_STORES: states.device, "host": states.host,
                                 "disk": Counter()})  # fmt: skip
        return self._rehearsal(course, states, backward=backward, optimizer=optimizer, micro_batches=micro_batches)

    def placed(self, batch: Batch | None = None, seed: int = 0) -> StepState:
        """A forward before its first sweep, with everything in its place.

        Raises:
            ValueError: it does not fit.
        """
        run, differentiate = self._begin(self._decoder, self._batch() if batch is None else batch, seed, self._reaches)
        if not self._tiers.limited:
            with run.replay.restored(), run.decoder.streamed_attention(), torch.no_grad():
                probe_token(run, differentiable=differentiate)
        run.stores.close()
        return run

    # -- the run -------------------------------------------------------------------------------------------------------

    def _begin(self, decoder: Any, batch: Batch, seed: int, reaches: Sequence[Any]) -> tuple[StepState, bool]:
        conditions = ReplayContext(self._meta_model, batch.input_ids_BS.device, seed)
        return begin_step(decoder, self._config.on(self._device), batch, conditions, self._tiers, self._ranks, reaches)

    def _segments(self, batch: Batch, seed: int, chosen: Sequence[int], reaches: Sequence[Any]) -> list[StepSegment]:
        """The step with some of the layers."""
        own = [local(p) for p in self._meta_model.parameters()]
        self._memory.know([*own, *self._meta_model.buffers(), batch.input_ids_BS])
        self._tiers.observer = self._note
        recorder = self._recorder = SegmentRecorder(
            self._clock, self._engine_bytes, self._tallies, self._numbers, timeline=self._timeline
        )
        decoder = representative_layers.DecoderSubset(self._decoder, chosen, recorder, self._memory)
        with self._observed.watching(), self._ranks.guard():
            with decoder.unsharded(None):
                run, differentiate = self._begin(decoder, batch, seed, reaches)
                run_forward(run, differentiable=differentiate)
                recorder.phase("head")
                loss = mean_loss(run, differentiable=differentiate)
            if differentiate:
                recorder.phase("backward")
                run_backward(run, torch.empty_like(loss))
                if self._sharding is not None:
                    recorder.enter(None)
                    self._sharding.settle()
            del run, loss
        recorder.finish()
        return recorder.segments

    def _batch(self) -> Batch:
        """A batch without contents."""
        ids_BS = torch.empty(self._batch_size, self._seq_len, dtype=torch.long, device="meta")
        lengths = [self._seq_len] if self._documents is None else list(self._documents)
        starts = (0, *accumulate(lengths[:-1]))
        count = torch.empty((), dtype=torch.long, device="meta")
        return Batch(ids_BS, None, ids_BS[:, 1:], count, documents=(starts,))

    # -- what is noticed -----------------------------------------------------------------------------------------------

    def _new_tiers(self) -> Tiers:
        clock = None if self._hardware is None else self._clock
        config = self._config
        return tiers_for(self._device, config.budgets, config.offload_dir, config.prefetch, simulated=True, clock=clock)

    def _progress(self, progress: Progress) -> None:
        if self._recorder is not None and progress.part == "backward" and progress.layer < 0:
            self._recorder.enter(None)

    def _note(self, tier: str, kind: str, nbytes: int) -> None:
        part = STORE_LABELS.get(kind, kind)
        if tier == "device":
            self._memory.store(part, nbytes)
        else:
            self._tallies[tier].put(part, nbytes)

    def _engine_bytes(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for tier, account in self._tiers.budgets.items():
            found[tier] = account.held, account.peak
            account.peak = account.held
        return found

    def _numbers(self) -> Numbers:
        numbers: Numbers = {"seconds": self._clock.compute, "flops": self._observed.flops,
                            "operators": self._observed.operators}  # fmt: skip
        for lane, traffic in (self._tiers.lanes.traffic if self._tiers.limited else {}).items():
            numbers[f"{lane} bytes"] = traffic.moved
        numbers["comm bytes"] = self._ranks.traffic.moved if self._ranks.traffic is not None else 0
        for name in (*LANES, COMM):
            numbers[f"{name} exposed"] = self._clock.exposed.get(name, 0.0)
            numbers[f"{name} busy"] = self._clock.busy.get(name, 0.0)
        return numbers

    # -- the result ----------------------------------------------------------------------------------------------------

    def _rehearsal(
        self, course: Trace, states: ModelStates, *, backward: bool, optimizer: AdamWSpec | None, micro_batches: int
    ) -> Estimate:
        numbers = course.numbers
        moved: dict[str, int] = {lane: int(numbers.get(f"{lane} bytes", 0)) for lane in LANES}
        if self._parallel_dims.sp * self._parallel_dims.cp > 1:
            moved["comm"] = int(numbers["comm bytes"])
        memory: dict[str, dict[str, int]] = {tier: dict(+course.parts[tier]) for tier in TIERS}
        rest = course.whole["device"] - sum(memory["device"].values())
        memory["device"] |= {"activations of a chunk": rest}
        step = None
        if self._hardware is not None:
            tail = 0.0
            if backward and optimizer is not None:
                ranks = self._parallel_dims.dp * self._parallel_dims.sp * self._parallel_dims.cp
                tail = states.seconds(self._hardware, offload=self._sharding_spec.offload, devices=ranks)
            step = self._step(course, tail / micro_batches, backward=backward)
        return Estimate(
            peaks={tier: course.engine.get(tier, 0) for tier in TIERS},
            moved=moved, memory=memory, step=step, beyond_stores=course.whole[BEYOND_STORES],
            reserved=self._reserved,
        )  # fmt: skip

    def _step(self, course: Trace, tail: float, *, backward: bool) -> StepTiming:
        assert self._hardware is not None
        devices = self._parallel_dims.dp * self._parallel_dims.sp * self._parallel_dims.cp * self._parallel_dims.tp
        flops = None
        with contextlib.suppress(UncountedModuleError):
            flops = model_flops(
                self._whole,
                seq_len=self._seq_len,
                batch_size=self._batch_size * self._parallel_dims.dp,
                documents=self._documents,
            )
        numbers, phases = course.numbers, list(course.phases)
        seconds = numbers["seconds"]
        if tail:
            phases.append(("optimizer", seconds, seconds + tail))
        return StepTiming(
            seconds=seconds + tail,
            phases=phases,
            busy={lane: numbers[f"{lane} busy"] for lane in (*LANES, COMM)},
            exposed={lane: numbers[f"{lane} exposed"] for lane in (*LANES, COMM)},
            tokens=self._seq_len * self._batch_size * self._parallel_dims.dp,
            devices=devices,
            model_flops=flops if backward or flops is None else flops // 3,
            hardware_flops=int(numbers["flops"]) * devices,
            operators=int(numbers["operators"]),
            peak_flops=self._hardware.peak_rate(self._meta_model.get_input_embeddings().weight.dtype),
            memory={tier: course.memory[tier] for tier in TIERS} if self._timeline else {},
            lanes=course.lanes if self._timeline else {},
        )


BEYOND_STORES = "device, beyond stores"


def _check_settings(settings: dict[str, Any], parallel_dims: Any) -> None:
    """Refuse what no step takes.

    Raises:
        ValueError: with the nearest name.
    """
    if parallel_dims is not None and not isinstance(parallel_dims, ParallelDims):
        raise ValueError(f"parallel_dims={parallel_dims!r}: give trunkline.ParallelDims(sp=8), for example.")
    if "mesh" in settings:
        raise ValueError(
            "mesh: an estimate has no ranks: give parallel_dims=ParallelDims(sp=8), for example, in its place."
        )


def _loaded(hardware: Hardware | str | None) -> Hardware | None:
    if isinstance(hardware, str):
        from trunkline.plan.hardware import load

        return load(hardware)
    return hardware


def _device(device: str | torch.device | None, hardware: Hardware | None, own: torch.device) -> torch.device:
    if device is not None:
        return torch.device(device)
    if hardware is not None:
        return torch.device(hardware.device_type)
    return torch.device("cpu") if own.type == "meta" else own


def _order(segments: Sequence[StepSegment], units: Sequence[range], stands: dict[int, int]) -> list[StepSegment]:
    """The segments of all units, from those of the units that stand for them."""
    unit_of = {layer: i for i, unit in enumerate(units) for layer in unit}
    found: list[StepSegment] = []
    for phase in ("embed", "forward", "head", "backward"):
        own = [segment for segment in segments if segment.phase == phase]
        of_unit: dict[int, list[StepSegment]] = {}
        for segment in own:
            if segment.layer is not None:
                of_unit.setdefault(unit_of[segment.layer], []).append(segment)
        around = [i for i, segment in enumerate(own) if segment.layer is not None]
        first, last = (around[0], around[-1]) if around else (len(own), len(own))
        found += own[:first]
        order = range(len(units)) if phase == "forward" else reversed(range(len(units)))
        for i in order:
            # As those of the layers that they stand for.
            ahead = units[i].start - units[stands[i]].start
            found += [replace(each, layer=(each.layer or 0) + ahead) for each in of_unit.get(stands[i], [])]
        found += own[last + 1 :]
    return found
