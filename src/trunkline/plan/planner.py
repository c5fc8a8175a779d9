"""Planner: finds the settings with which a step fits a cluster and is fastest.

Whether a candidate fits is decided by bytes alone, with the placement that a step uses. The time of a step is
simulated, for the few candidates that may be fastest.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trunkline.config import StreamConfig, declared_settings
from trunkline.distributed.mesh import ParallelDims, heads_of
from trunkline.plan.estimate import Estimate, Estimator, StepTiming, estimate
from trunkline.plan.estimate_timeline import capacity_of, timeline_of, unchunked_timeline
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import loading_bytes, model_states_of
from trunkline.plan.search_space import (
    Candidate,
    Cluster,
    TrainingJob,
    chunk_sizes,
    keep_options,
    longest_searched,
    meshes,
    sharding_specs,
)
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.plan.simulated_tp import tp_shard
from trunkline.report.timeline import Timeline
from trunkline.units import format_bytes

_EXPOSED = 0.03  # share of a step that waits for lanes, from which candidates that keep less are simulated, too
_SIMULATED_SIZES = 3  # chunk sizes that are simulated, the largest that fit
_PROBE_CHUNKS = 2  # chunks of the short step that shows the device memory outside the stores
# Budgets and folders: settings of the group memory that a user may leave unset.
_NO_BUDGETS = {s.name: None for s in declared_settings() if s.setting.group == "memory" and s.default is None}


class DoesNotFit(ValueError):  # noqa: N818 - users see it as a ValueError
    """No candidate fits; the text reports the shortfall of a tier, and how to fix it."""


@dataclass(frozen=True, slots=True)
class StoreBudgets:
    """Bytes that a candidate leaves to the engine's activation stores on each rank.

    Attributes:
        device: budget on the device; negative where even empty stores do not fit.
        host: budget in host memory.
        disk: budget on disk.
        outside_stores: most bytes on the device outside the stores.
        model_states: the part of `outside_stores` that is held all the time: parameters, optimizer state, and gradients
            of earlier micro-batches.
    """

    device: int
    host: int
    disk: int
    outside_stores: int
    model_states: int

    @property
    def settings(self) -> dict[str, Any]:
        """Budgets as settings of `trunkline.stream`, for estimates only: `offload_dir` is no real scratch folder."""
        return {
            "device_budget": self.device,
            "host_budget": self.host or None,
            "offload_dir": "." if self.disk else None,
            "disk_budget": self.disk or None,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidate that fits, and the estimate of its step.

    Attributes:
        job: step that is planned.
        cluster: machines.
        candidate: chosen settings.
        budgets: bytes for the stores of one rank.
        estimate: estimate of a micro-batch.
        model: model on the `meta` device, unsharded.
        alternatives: other candidates that were simulated, with the seconds of a micro-batch; empty from
            `Planner.longest`.
    """

    job: TrainingJob
    cluster: Cluster
    candidate: Candidate
    budgets: StoreBudgets
    estimate: Estimate
    model: Any
    alternatives: tuple[tuple[Candidate, float], ...] = ()

    @property
    def loading(self) -> int:
        """Bytes of host memory in which each process builds the whole model before sharding; 0 without sharding."""
        dims = self.candidate.parallel_dims
        return loading_bytes(self.model, self.candidate.sharding_spec, dims.fsdp_size, dims.tp)

    @property
    def excess(self) -> int:
        """Bytes by which the estimated peak exceeds one device's usable memory; negative where some is left."""
        return sum(self.estimate.memory["device"].values()) - self.cluster.usable_bytes["device"]

    @property
    def timing(self) -> StepTiming:
        """Time of a micro-batch; a plan from `Planner.longest` with `timed=False` has none, and must not be asked."""
        assert self.estimate.step is not None
        return self.estimate.step

    def gpu_hours(self, tokens: int) -> float:
        """Return the device hours of a run over `tokens` tokens of all devices together."""
        return tokens / self.timing.tokens_per_second / 3600

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Settings by a recipe's groups (`streaming`, `memory`, `ranks`), the job's fixed ones included.

        Budgets are the plan's, in bytes of one rank. `offload_dir` is there only if the job has it.
        """
        reserved = {f"{tier}_budget": nbytes for tier, nbytes in self.estimate.reserved.items() if nbytes}
        fixed = {name: v for name, v in self.job.fixed.items() if name not in _NO_BUDGETS or name == "offload_dir"}
        chosen = {**fixed, **self.candidate.streaming, "device_budget": self.budgets.device, **reserved}
        groups: dict[str, dict[str, Any]] = {"streaming": {}, "memory": {}, "ranks": self.candidate.ranks}
        for declared in declared_settings():
            if declared.name in chosen:
                groups[declared.setting.group][declared.name] = chosen[declared.name]
        return groups


class Planner:
    """Plans for one model on one cluster.

    Args:
        model: model to train, unsharded and on any device, or a `MetaModel`.
        cluster: machines.
        tell: called with a line about each candidate that was simulated, or in `longest` about each longer context.

    Raises:
        UnsupportedModelError: a ValueError: the model cannot be streamed.
    """

    def __init__(self, model: Any, cluster: Cluster, tell: Callable[[str], None] = lambda _: None) -> None:
        self._full = model if isinstance(model, MetaModel) else MetaModel.from_model(model)
        self._local = self._full  # as one rank has it: a shard with tensor parallelism
        self._cluster, self._tell = cluster, tell
        self._num_heads = heads_of(self._full.model)[0]
        self._budgets: dict[tuple[Any, ...], StoreBudgets] = {}

    @property
    def model(self) -> Any:
        """Model on the `meta` device, unsharded."""
        return self._full.model

    def best(self, job: TrainingJob) -> Plan:
        """Return the fastest plan among the few candidates that fit and may be fastest, whose steps are simulated.

        Raises:
            DoesNotFit: no candidate fits.
            ValueError: the job's mesh does not fit the cluster or the model, or the profile lacks figures.
        """
        with self._on_rank(job):
            simulated: list[Plan] = []
            for dims in meshes(job, self._cluster, self._num_heads):
                on_mesh = self._simulate_mesh(job, dims)
                simulated += on_mesh
                if on_mesh and dims.sp * dims.cp == 1:
                    break  # replicas that fit on a device each communicate least
            best = _fastest(simulated)
            if best is None:
                raise DoesNotFit(self.why_not(job))
        others = tuple((plan.candidate, plan.timing.seconds) for plan in simulated if plan is not best)
        return replace(best, alternatives=others)

    def longest(self, job: TrainingJob, *, timed: bool = True) -> Plan:
        """Return a plan for the longest context that any candidate fits, with the fastest candidate that does.

        The context is a multiple of 1,024 tokens, and the longest to about 3%. The search ends at `longest_searched`
        tokens.

        Args:
            job: job whose context is replaced.
            timed: simulate its time; else the plan's estimate has no time.

        Raises:
            DoesNotFit: not even 1,024 tokens fit.
            ValueError: see `best`.
        """
        with self._on_rank(job):
            best: tuple[int, Candidate] | None = None
            for dims in meshes(job, self._cluster, self._num_heads, one_sequence=True):
                for spec in sharding_specs(job, dims):
                    for keep, every in keep_options(job, self._local.decoder.num_layers):
                        longer = self._longest_of(job, Candidate(dims, spec, 0, keep, every), best[0] if best else 0)
                        if longer is not None:
                            best = longer
                            self._tell(f"{best[0]:,} tokens with {best[1]}")
            if best is None:
                raise DoesNotFit(self.why_not(replace(job, context=1_024)))
            length, candidate = best
            while True:
                plan = self._plan(replace(job, context=length), candidate, timed=timed)
                if plan.excess <= 0 or length < 2_048:
                    return plan
                # The full step holds more outside the stores than the short step showed: shorten it.
                length = length * 15 // 16 // 1_024 * 1_024

    def timelines(self, plan: Plan, title: str) -> tuple[Timeline, Timeline]:
        """Return the timeline of a plan's step, and of the same step without chunks and budgets.

        Args:
            plan: plan of this planner.
            title: title for people.
        """
        job, candidate, hardware = plan.job, plan.candidate, self._cluster.hardware
        with self._on_rank(job):
            common = {**self._estimate_arguments(job, candidate), "hardware": hardware}
            settings = self._settings(job, candidate)
            step = estimate(self._local, job.context, timeline=True, **common, **settings)
            unchunked = unchunked_timeline(self._local, job.context, title=f"{title}, unchunked", **common)
        return timeline_of(step, title, capacity_of(hardware, self._cluster.devices)), unchunked

    def why_not(self, job: TrainingJob) -> str:
        """Return text on the shortfall of the candidate that needs the least memory, and how to fix it.

        If that candidate fits, the text says so.
        """
        dims = list(meshes(job, self._cluster, self._num_heads))[-1]
        spec = list(sharding_specs(job, dims))[-1]
        keep, every = list(keep_options(job, self._local.decoder.num_layers))[-1]
        chunk = chunk_sizes(job, self._cluster.hardware)[-1]
        return self._shortfall(job, Candidate(dims, spec, chunk, keep, every)) or "it fits."

    def budgets(self, job: TrainingJob, candidate: Candidate) -> StoreBudgets:
        """Return the bytes that a candidate leaves to the stores, found by simulating a short step.

        A budget that the job fixes is an upper limit. The context does not change them.
        """
        key = self._budgets_key(job, candidate)
        if key not in self._budgets:
            arguments = self._estimate_arguments(job, candidate)
            settings = {
                **job.fixed,
                **_NO_BUDGETS,
                **replace(candidate, keep=("attention",), checkpoint_every=1).streaming,
            }
            probe = estimate(self._local, _PROBE_CHUNKS * candidate.chunk_size, **arguments, **settings)
            states = model_states_of(
                self._local.model, candidate.sharding_spec, candidate.parallel_dims.fsdp_size, job.optimizer,
                micro_batches=job.micro_batches,
            )  # fmt: skip
            held = states.device.total()
            # The optimizer step runs when the stores are empty, and may need more than the sweeps do.
            outside = max(probe.outside_stores, held + states.step)
            usable = self._cluster.usable_bytes
            device, host, disk = StreamConfig(**job.fixed).budgets
            self._budgets[key] = StoreBudgets(
                _least(usable["device"] - outside, device),
                _least(max(usable["host"] - sum(probe.memory["host"].values()), 0), host),
                _least(usable["disk"], disk),
                outside,
                held,
            )
        return self._budgets[key]

    @staticmethod
    def _budgets_key(job: TrainingJob, candidate: Candidate) -> tuple[Any, ...]:
        # Neither keep nor the context changes what lies outside the stores.
        fixed = repr((job.optimizer, job.micro_batches, sorted(job.fixed.items())))
        rows = job.batch_size // candidate.parallel_dims.dp
        return candidate.parallel_dims, candidate.sharding_spec, candidate.chunk_size, rows, fixed

    @contextlib.contextmanager
    def _on_rank(self, job: TrainingJob) -> Iterator[None]:
        """Use one rank's tensor-parallel shard of the model inside the context."""
        if job.parallel_dims is not None:
            job.parallel_dims.check_world(self._cluster.devices)
        with tp_shard(self._full, 1 if job.parallel_dims is None else job.parallel_dims.tp) as self._local:
            try:
                yield
            finally:
                self._local = self._full

    # -- whether a candidate fits --------------------------------------------------------------------------------------

    def _shortfall(self, job: TrainingJob, candidate: Candidate) -> str | None:
        """Return why a candidate does not fit, and how to fix it; None where it fits."""
        usable, budgets = self._cluster.usable_bytes, self.budgets(job, candidate)
        if budgets.device <= 0:
            each = "each device" if self._cluster.devices > 1 else "the device"
            held, states = format_bytes(budgets.outside_stores), format_bytes(budgets.model_states)
            return (
                f"{each} has {format_bytes(usable['device'])} of usable memory, and needs {held} before anything is "
                f"kept ({states} for parameters and optimizer, the rest for gradients and the computation of a chunk): "
                f"{format_bytes(-budgets.device)} too much with {candidate}. Use more devices, a device with more "
                "memory, ranks.offload, or a smaller chunk_size."
            )
        if usable["host"] and budgets.host <= 0:
            return (
                f"host memory has {format_bytes(usable['host'])} for each device, and parameters and optimizer take "
                "all of it (offload). Use a node with more memory."
            )
        try:
            Estimator(
                meta_model=self._local, seq_len=job.context, hardware=None, settings=self._settings(job, candidate),
                **self._estimate_arguments(job, candidate),
            ).place_stores()  # fmt: skip
        except ValueError as error:
            return f"{error} ({candidate})"
        return None

    def _estimate_arguments(self, job: TrainingJob, candidate: Candidate) -> dict[str, Any]:
        return {
            "batch_size": job.rows(candidate.parallel_dims), "device": self._cluster.hardware.device_type,
            "parallel_dims": candidate.parallel_dims, "sharding_spec": candidate.sharding_spec,
            "optimizer": job.optimizer, "micro_batches": job.micro_batches,
        }  # fmt: skip

    def _settings(self, job: TrainingJob, candidate: Candidate) -> dict[str, Any]:
        return {**job.fixed, **candidate.streaming, **self.budgets(job, candidate).settings}

    # -- search --------------------------------------------------------------------------------------------------------

    def _simulate_mesh(self, job: TrainingJob, dims: ParallelDims) -> list[Plan]:
        """Return timed plans of the candidates on a mesh that may be fastest."""
        simulated: list[Plan] = []
        for spec in sharding_specs(job, dims):
            fitting = list(self._fitting(job, dims, spec))
            for _, candidates in itertools.groupby(fitting, lambda found: (found.keep, found.checkpoint_every)):
                before = _fastest(simulated)
                timed = (plan for candidate in candidates if (plan := self._timed(job, candidate)) is not None)
                simulated += itertools.islice(timed, _SIMULATED_SIZES)
                fastest = _fastest(simulated)
                if fastest is None:
                    continue
                step = fastest.timing
                if fastest is before or sum(step.exposed.values()) < _EXPOSED * step.seconds:
                    break  # to keep less means to recompute more, and there is no waiting left that it could save
            if simulated:
                break  # parameters that are sharded further communicate more
        return simulated

    def _fitting(self, job: TrainingJob, dims: ParallelDims, spec: ShardingSpec) -> Iterator[Candidate]:
        for keep, every in keep_options(job, self._local.decoder.num_layers):
            for chunk in chunk_sizes(job, self._cluster.hardware):
                candidate = Candidate(dims, spec, chunk, keep, every)
                if self._shortfall(job, candidate) is None:
                    yield candidate

    def _timed(self, job: TrainingJob, candidate: Candidate) -> Plan | None:
        """Return the timed plan of a candidate; None if the full step turns out not to fit."""
        while self._shortfall(job, candidate) is None:
            plan = self._plan(job, candidate, timed=True)
            self._tell(f"{candidate}: {plan.timing.seconds:,.4g} s a step")
            if plan.excess <= 0:
                return plan
            # The full step holds more outside the stores than the short step showed: give the stores less, try again.
            budgets = self.budgets(job, candidate)
            less = max(plan.excess, budgets.device // 64)
            self._budgets[self._budgets_key(job, candidate)] = replace(
                budgets, device=budgets.device - less, outside_stores=budgets.outside_stores + less
            )
        return None

    def _plan(self, job: TrainingJob, candidate: Candidate, *, timed: bool) -> Plan:
        arguments = {**self._estimate_arguments(job, candidate), **self._settings(job, candidate)}
        hardware = self._cluster.hardware if timed else None
        step = estimate(self._local, job.context, hardware=hardware, **arguments)
        return Plan(job, self._cluster, candidate, self.budgets(job, candidate), step, self._full.model)

    def _longest_of(self, job: TrainingJob, candidate: Candidate, longer_than: int) -> tuple[int, Candidate] | None:
        """Return the longest context of a candidate with any chunk size, to 3%; None if not 3% above `longer_than`."""

        def fitting(kilotokens: int) -> Candidate | None:
            longer = replace(job, context=kilotokens * 1_024)
            for chunk in chunk_sizes(longer, self._cluster.hardware):
                sized = replace(candidate, chunk_size=chunk)
                if self._shortfall(longer, sized) is None:
                    return sized
            return None

        # Doubling, then bisection, in multiples of 1,024 tokens: `low` fits, `high` does not.
        low = -(-(longer_than + longer_than // 32) // 1_024) + 1
        limit = max(longest_searched(job, self._cluster.hardware) // 1_024, 1)
        best = fitting(low) if low <= limit else None
        if best is None:
            return None
        high: int | None = None
        while low < limit if high is None else high - low > max(low // 32, 1):
            middle = min(2 * low, limit) if high is None else (low + high) // 2
            sized = fitting(middle)
            if sized is None:
                high = middle
            else:
                low, best = middle, sized
        return low * 1_024, best


def _fastest(plans: Sequence[Plan]) -> Plan | None:
    return min(plans, key=lambda plan: plan.timing.seconds, default=None)


def _least(nbytes: int, limit: int | None) -> int:
    return nbytes if limit is None else min(nbytes, limit)
