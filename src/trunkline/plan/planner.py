"""Plans: the settings with which a step fits a machine and is fastest, found by rehearsing.

What fits is a matter of bytes alone, and decided by the same placement that a step uses; how long a step takes is
rehearsed, for the few choices that are worth it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trunkline.config import StreamConfig
from trunkline.distributed.mesh import ParallelDims, heads_of
from trunkline.plan import simulated_tp
from trunkline.plan.estimate import Estimate, Estimator, estimate
from trunkline.plan.estimate_timeline import capacity_of, timeline_of, unchunked_timeline
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import loading_bytes, model_states_of
from trunkline.plan.search_space import (
    Candidate,
    Cluster,
    TrainingJob,
    chunk_sizes,
    keep_options,
    longer,
    meshes,
    sharding_specs,
)
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.report.timeline import Timeline
from trunkline.units import format_bytes

Told = Callable[[str], None]
_EXPOSED = 0.03  # share of a step from which a leaner choice, which moves less, is worth a rehearsal
_CHOSEN = ("chunk_size", "keep", "checkpoint_every", "device_budget", "host_budget", "offload_dir", "disk_budget")
_SIZES = 3  # of chunks that are rehearsed, the largest that fit
_PROBE = 2  # chunks of the step that shows what a device holds beside the stores


class DoesNotFit(ValueError):  # noqa: N818 - it is told to users as the ValueError that it is
    """No choice fits; the text says what is missing where, and what would mend it."""


@dataclass(frozen=True, slots=True)
class StoreBudgets:
    """What a choice leaves to the engine's stores on each rank, in bytes.

    Attributes:
        device: budget; negative where even an empty store does not fit.
        host: budget.
        disk: budget.
        beyond: most that the device holds beside the stores.
        static: of these, what it holds from step to step: parameters and optimizer.
    """

    device: int
    host: int
    disk: int
    beyond: int
    static: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice that fits, and its step.

    Attributes:
        task: what is trained.
        machine: on what.
        choice: how.
        room: of the stores.
        rehearsal: of a step.
        model: whole, without contents.
        others: choices that were rehearsed, too, with the seconds of their steps.
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
        """Host memory in which each rank builds the model before its parameters are cut; 0 where they are not."""
        parallel_dims = self.candidate.parallel_dims
        ranks = parallel_dims.dp * parallel_dims.sp * parallel_dims.cp
        return loading_bytes(self.model, self.candidate.sharding_spec, ranks, parallel_dims.tp)

    @property
    def excess(self) -> int:
        """Bytes of the rehearsed peak that the device has no room for; negative where some is left."""
        return sum(self.estimate.memory["device"].values()) - self.cluster.usable_device_bytes

    def gpu_hours(self, tokens: int) -> float:
        """Device hours that a run of so many tokens takes."""
        assert self.estimate.step is not None
        return tokens / self.estimate.step.tokens_per_second / 3600

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `trunkline.stream` on each rank, budgets included; `disk` is left to the user."""
        budgets = {f"{tier}_budget": nbytes for tier, nbytes in self.estimate.reserved.items() if nbytes}
        return {**self.job.fixed, **self.candidate.settings, "device_budget": self.budgets.device, **budgets}


class Planner:
    """Plans for one model on one machine.

    Args:
        model: what is trained, on any device.
        machine: on what.
        tell: told what is tried.
    """

    def __init__(self, model: Any, cluster: Cluster, tell: Told = lambda _: None) -> None:
        self._meta_model = self._whole = model if isinstance(model, MetaModel) else MetaModel.from_model(model)
        self._cluster, self._tell = cluster, tell
        self._num_heads = heads_of(self._meta_model.model)[0]
        self._budgets: dict[tuple[Any, ...], StoreBudgets] = {}

    @property
    def model(self) -> Any:
        """The model, whole and without contents."""
        return self._whole.model

    def best(self, job: TrainingJob) -> Plan:
        """The fastest of the choices that fit and are worth a rehearsal.

        Raises:
            DoesNotFit: none fits.
        """
        self._check_degrees(job)
        with self._cut(job):
            return self._best(job)

    def _best(self, job: TrainingJob) -> Plan:
        tried: list[tuple[Plan, float]] = []
        for parallel_dims in meshes(job, self._cluster, self._num_heads):
            found = self._best_on(job, parallel_dims)
            tried += found
            if found and parallel_dims.sp * parallel_dims.cp == 1:
                break  # replicas that fit on a device each exchange least
        if not tried:
            raise DoesNotFit(self.why_not(job))
        best = min(tried, key=lambda each: each[1])[0]
        alternatives = tuple((plan.candidate, seconds) for plan, seconds in tried if plan is not best)
        return replace(best, alternatives=alternatives)

    def longest(self, job: TrainingJob, *, timed: bool = True) -> Plan:
        """The longest context that any choice fits, with the fastest such choice.

        Args:
            job: its context is where the search begins.
            timed: rehearse a step of it; else the plan's rehearsal has no time.

        Raises:
            DoesNotFit: not even a thousand tokens do.
        """
        self._check_degrees(job)
        with self._cut(job):
            return self._longest(job, timed=timed)

    def _longest(self, job: TrainingJob, *, timed: bool) -> Plan:
        best: tuple[int, Candidate] | None = None
        for parallel_dims in meshes(job, self._cluster, self._num_heads, one_sequence=True):
            for sharding_spec in sharding_specs(job, parallel_dims):
                for keep, every in keep_options(job, self._meta_model.decoder.num_layers):
                    found = self._longest_of(
                        job, parallel_dims, sharding_spec, keep, every, over=best[0] if best else 0
                    )
                    if found is not None:
                        best = found
                        self._tell(f"{best[0]:,} tokens with {best[1]}")
        if best is None:
            raise DoesNotFit(self.why_not(longer(job, 1_024)))
        length, candidate = best
        while True:
            plan = self._plan(longer(job, length), candidate, timed=timed)
            if plan.excess <= 0 or length < 2_048:
                return plan
            # What a device holds beside the stores was more than the probe of a short step showed.
            length = length * 15 // 16 // 1_024 * 1_024

    @contextlib.contextmanager
    def _cut(self, job: TrainingJob) -> Iterator[None]:
        """Have the model as one rank has it, where matrices are cut."""
        with simulated_tp.cut(
            self._whole, 1 if job.parallel_dims is None else job.parallel_dims.tp
        ) as self._meta_model:
            try:
                yield
            finally:
                self._meta_model = self._whole

    def _check_degrees(self, job: TrainingJob) -> None:
        if job.parallel_dims is not None:
            job.parallel_dims.check_world(self._cluster.devices)

    def timelines(self, plan: Plan, title: str) -> tuple[Timeline, Timeline]:
        """A plan's step over time, and the same step without chunks and budgets.

        Args:
            plan: of this planner.
            title: what is planned, for people.
        """
        job, candidate, hardware = plan.job, plan.candidate, self._cluster.hardware
        common: dict[str, Any] = {
            "batch_size": max(job.batch_size // candidate.parallel_dims.dp, 1),
            "parallel_dims": candidate.parallel_dims,
            "sharding_spec": candidate.sharding_spec, "optimizer": job.optimizer, "micro_batches": job.micro_batches,
        }  # fmt: skip
        capacity = capacity_of(hardware, self._cluster.devices)
        with self._cut(job):
            settings = self._arguments(job, candidate, timed=True)["settings"]
            step = estimate(self._meta_model, job.context, hardware=hardware, timeline=True, **common, **settings)
            whole = unchunked_timeline(
                self._meta_model, job.context, title=f"{title}, unchunked", hardware=hardware, **common
            )
        return timeline_of(step, title, capacity), whole

    def why_not(self, job: TrainingJob) -> str:
        """Why nothing fits: what the leanest choice lacks."""
        parallel_dims = list(meshes(job, self._cluster, self._num_heads))[-1]
        sharding_spec = list(sharding_specs(job, parallel_dims))[-1]
        keep, every = list(keep_options(job, self._meta_model.decoder.num_layers))[-1]
        chunk = chunk_sizes(job, self._cluster.hardware)[-1]
        return self._lack(job, Candidate(parallel_dims, sharding_spec, chunk, keep, every)) or "it fits."

    def budgets(self, job: TrainingJob, candidate: Candidate) -> StoreBudgets:
        """What a choice leaves to the engine's stores."""
        key = self._key(job, candidate)
        if key not in self._budgets:
            probe = estimate(
                self._meta_model,
                _PROBE * candidate.chunk_size,
                batch_size=max(job.batch_size // candidate.parallel_dims.dp, 1),
                device=self._cluster.hardware.device_type,
                parallel_dims=candidate.parallel_dims,
                sharding_spec=candidate.sharding_spec,
                optimizer=job.optimizer,
                micro_batches=job.micro_batches,
                chunk_size=candidate.chunk_size,
                **_other(job),
            )
            ranks = candidate.parallel_dims.dp * candidate.parallel_dims.sp * candidate.parallel_dims.cp
            states = model_states_of(
                self._meta_model.model, candidate.sharding_spec, ranks, job.optimizer, micro_batches=job.micro_batches
            )
            static = states.device.total()
            # The optimizer's own step needs room beside what is held, too, when no store is there any more.
            beyond = max(probe.beyond_stores, static + states.step)
            device, host, disk = StreamConfig(**job.fixed).budgets
            self._budgets[key] = StoreBudgets(
                _least(self._cluster.usable_device_bytes - beyond, device),
                _least(max(self._cluster.usable_host_bytes - sum(probe.memory["host"].values()), 0), host),
                _least(self._cluster.usable_disk_bytes, disk), beyond, static,
            )  # fmt: skip
        return self._budgets[key]

    @staticmethod
    def _key(job: TrainingJob, candidate: Candidate) -> tuple[Any, ...]:
        given = repr((job.optimizer, sorted(job.fixed.items())))
        return (
            candidate.parallel_dims,
            candidate.sharding_spec,
            candidate.chunk_size,
            job.batch_size // candidate.parallel_dims.dp,
            given,
        )

    # -- what fits -----------------------------------------------------------------------------------------------------

    def _lack(self, job: TrainingJob, candidate: Candidate) -> str | None:
        """Why a choice does not fit; None where it does."""
        cluster, budgets = self._cluster, self.budgets(job, candidate)
        if budgets.device <= 0:
            per = "each device" if cluster.devices > 1 else "the device"
            return (
                f"{per} has {format_bytes(cluster.usable_device_bytes)} that can be used, and needs "
                f"{format_bytes(budgets.beyond)} before anything is kept ({format_bytes(budgets.static)} "
                f"for parameters and optimizer, the rest for a "
                f"chunk's own computation and gradients), {format_bytes(-budgets.device)} too much with "
                f"{candidate}: more devices, a device with more memory, ranks.offload, or a smaller "
                "chunk_size would mend it."
            )
        if cluster.usable_host_bytes and budgets.host <= 0:
            return (
                f"host memory has {format_bytes(cluster.usable_host_bytes)} for each device, and parameters and "
                "optimizer take all of it (offload): a node with more memory would mend it."
            )
        try:
            self._rehearsing(job, candidate).placed()
        except ValueError as error:
            return f"{error} ({candidate})"
        return None

    def _rehearsing(self, job: TrainingJob, candidate: Candidate, *, timed: bool = False) -> Estimator:
        return Estimator(self._meta_model, job.context, max(job.batch_size // candidate.parallel_dims.dp, 1), None,
                          timeline=False, **self._arguments(job, candidate, timed=timed))  # fmt: skip

    def _arguments(self, job: TrainingJob, candidate: Candidate, *, timed: bool) -> dict[str, Any]:
        budgets, hardware = self.budgets(job, candidate), self._cluster.hardware
        settings: dict[str, Any] = {**_other(job), **candidate.settings, "device_budget": budgets.device}
        if budgets.host:
            settings["host_budget"] = budgets.host
        if budgets.disk:
            settings |= {"offload_dir": ".", "disk_budget": budgets.disk}
        return {
            "device": hardware.device_type,
            "hardware": hardware if timed else None,
            "parallel_dims": candidate.parallel_dims,
            "sharding_spec": candidate.sharding_spec,
            "settings": settings,
        }

    # -- searching -----------------------------------------------------------------------------------------------------

    def _best_on(self, job: TrainingJob, parallel_dims: ParallelDims) -> list[tuple[Plan, float]]:
        """Choices on a mesh that were worth a rehearsal, with the seconds of their steps."""
        found: list[tuple[Plan, float]] = []
        for sharding_spec in sharding_specs(job, parallel_dims):
            fitting = list(self._fitting(job, parallel_dims, sharding_spec))
            if not fitting:
                continue
            keeps = list(dict.fromkeys((candidate.keep, candidate.checkpoint_every) for candidate in fitting))
            for keep, every in keeps:
                sizes = [c for c in fitting if (c.keep, c.checkpoint_every) == (keep, every)]
                before = min((seconds for _, seconds in found), default=float("inf"))
                timed = (each for candidate in sizes if (each := self._timed(job, candidate)) is not None)
                found += itertools.islice(timed, _SIZES)
                if not found:
                    continue
                plan, seconds = min(found, key=lambda each: each[1])
                assert plan.estimate.step is not None
                waits = sum(plan.estimate.step.exposed.values()) / seconds
                if waits < _EXPOSED or seconds >= before:
                    break  # a leaner choice computes more, and there is nothing it could save
            if found:
                break  # what is spread further exchanges more
        return found

    def _fitting(
        self, job: TrainingJob, parallel_dims: ParallelDims, sharding_spec: ShardingSpec
    ) -> Iterator[Candidate]:
        for keep, every in keep_options(job, self._meta_model.decoder.num_layers):
            for chunk in chunk_sizes(job, self._cluster.hardware):
                candidate = Candidate(parallel_dims, sharding_spec, chunk, keep, every)
                if self._lack(job, candidate) is None:
                    yield candidate

    def _timed(self, job: TrainingJob, candidate: Candidate) -> tuple[Plan, float] | None:
        """A step; None where it turns out not to fit."""
        while self._lack(job, candidate) is None:
            plan = self._plan(job, candidate, timed=True)
            assert plan.estimate.step is not None
            self._tell(f"{candidate}: {plan.estimate.step.seconds:,.4g} s a step")
            if plan.excess <= 0:
                return plan, plan.estimate.step.seconds
            # What a device holds beside the stores was more than the probe of a short step showed.
            budgets = self.budgets(job, candidate)
            less = max(plan.excess, budgets.device // 64)
            self._budgets[self._key(job, candidate)] = replace(
                budgets, device=budgets.device - less, beyond=budgets.beyond + less
            )
        return None

    def _plan(self, job: TrainingJob, candidate: Candidate, *, timed: bool) -> Plan:
        rehearsing = self._rehearsing(job, candidate, timed=timed)
        rehearsal = rehearsing.result(backward=True, extrapolate=True, optimizer=job.optimizer,
                                       micro_batches=job.micro_batches)  # fmt: skip
        return Plan(job, self._cluster, candidate, self.budgets(job, candidate), rehearsal, self._whole.model)

    def _longest_of(
        self,
        job: TrainingJob,
        parallel_dims: ParallelDims,
        sharding_spec: ShardingSpec,
        keep: tuple[str, ...],
        every: int,
        *,
        over: int,
    ) -> tuple[int, Candidate] | None:
        """The longest context of such choices, where it is more than `over`, to about 3%."""

        def fits(length: int) -> Candidate | None:
            longer_job = longer(job, length)
            for chunk in chunk_sizes(longer_job, self._cluster.hardware):
                candidate = Candidate(parallel_dims, sharding_spec, chunk, keep, every)
                if self._lack(longer_job, candidate) is None:
                    return candidate
            return None

        low = -(-(over + over // 32) // 1_024) + 1  # in multiples of 1,024 tokens
        candidate = fits(low * 1_024)
        if candidate is None:
            return None
        high = 2 * low
        while (found := fits(high * 1_024)) is not None:
            low, candidate, high = high, found, 2 * high
        while high - low > max(low // 32, 1):
            middle = (low + high) // 2
            found = fits(middle * 1_024)
            if found is None:
                high = middle
            else:
                low, candidate = middle, found
        return low * 1_024, candidate


def _other(job: TrainingJob) -> dict[str, Any]:
    """Given settings that are not chosen."""
    return {name: value for name, value in job.fixed.items() if name not in _CHOSEN}


def _least(budgets: int, given: int | None) -> int:
    return budgets if given is None else min(budgets, given)
