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
from trunkline.plan.search_space import Choice, Machine, Task, chunk_sizes, kept, longer, meshes, sharding_specs
from trunkline.plan.estimate import Estimate, Estimator, estimate
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.plan.model_states import states_of, whole_bytes
from trunkline.plan.estimate_timeline import before, capacity_of, timeline_of
from trunkline.report.timeline import Timeline
from trunkline.units import in_units

Told = Callable[[str], None]
_EXPOSED = 0.03  # share of a step from which a leaner choice, which moves less, is worth a rehearsal
_CHOSEN = ("chunk_size", "keep", "checkpoint_every", "device_budget", "host_budget", "offload_dir", "disk_budget")
_SIZES = 3  # of chunks that are rehearsed, the largest that fit
_PROBE = 2  # chunks of the step that shows what a device holds beside the stores


class DoesNotFit(ValueError):  # noqa: N818 - it is told to users as the ValueError that it is
    """No choice fits; the text says what is missing where, and what would mend it."""


@dataclass(frozen=True, slots=True)
class Room:
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

    task: Task
    machine: Machine
    choice: Choice
    room: Room
    estimate: Estimate
    model: Any
    others: tuple[tuple[Choice, float], ...] = ()

    @property
    def loading(self) -> int:
        """Host memory in which each rank builds the model before its parameters are cut; 0 where they are not."""
        parallel_dims = self.choice.parallel_dims
        ranks = parallel_dims.dp * parallel_dims.sp * parallel_dims.cp
        return whole_bytes(self.model, self.choice.sharding_spec, ranks, parallel_dims.tp)

    @property
    def excess(self) -> int:
        """Bytes of the rehearsed peak that the device has no room for; negative where some is left."""
        return sum(self.estimate.memory["device"].values()) - self.machine.device_room

    def gpu_hours(self, tokens: int) -> float:
        """Device hours that a run of so many tokens takes."""
        assert self.estimate.step is not None
        return tokens / self.estimate.step.tokens_per_second / 3600

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `trunkline.stream` on each rank, budgets included; `disk` is left to the user."""
        budgets = {f"{tier}_budget": nbytes for tier, nbytes in self.estimate.reserved.items() if nbytes}
        return {**self.task.fixed, **self.choice.settings, "device_budget": self.room.device, **budgets}


class Planner:
    """Plans for one model on one machine.

    Args:
        model: what is trained, on any device.
        machine: on what.
        tell: told what is tried.
    """

    def __init__(self, model: Any, machine: Machine, tell: Told = lambda _: None) -> None:
        self._blank = self._whole = model if isinstance(model, MetaModel) else MetaModel.of(model)
        self._machine, self._tell = machine, tell
        self._num_heads = heads_of(self._blank.model)[0]
        self._rooms: dict[tuple[Any, ...], Room] = {}

    @property
    def model(self) -> Any:
        """The model, whole and without contents."""
        return self._whole.model

    def best(self, task: Task) -> Plan:
        """The fastest of the choices that fit and are worth a rehearsal.

        Raises:
            DoesNotFit: none fits.
        """
        self._check_degrees(task)
        with self._cut(task):
            return self._best(task)

    def _best(self, task: Task) -> Plan:
        tried: list[tuple[Plan, float]] = []
        for parallel_dims in meshes(task, self._machine, self._num_heads):
            found = self._best_on(task, parallel_dims)
            tried += found
            if found and parallel_dims.sp * parallel_dims.cp == 1:
                break  # replicas that fit on a device each exchange least
        if not tried:
            raise DoesNotFit(self.why_not(task))
        best = min(tried, key=lambda each: each[1])[0]
        others = tuple((plan.choice, seconds) for plan, seconds in tried if plan is not best)
        return replace(best, others=others)

    def longest(self, task: Task, *, timed: bool = True) -> Plan:
        """The longest context that any choice fits, with the fastest such choice.

        Args:
            task: its context is where the search begins.
            timed: rehearse a step of it; else the plan's rehearsal has no time.

        Raises:
            DoesNotFit: not even a thousand tokens do.
        """
        self._check_degrees(task)
        with self._cut(task):
            return self._longest(task, timed=timed)

    def _longest(self, task: Task, *, timed: bool) -> Plan:
        best: tuple[int, Choice] | None = None
        for parallel_dims in meshes(task, self._machine, self._num_heads, one_sequence=True):
            for sharding_spec in sharding_specs(task, parallel_dims):
                for keep, every in kept(task, self._blank.decoder.num_layers):
                    found = self._longest_of(
                        task, parallel_dims, sharding_spec, keep, every, over=best[0] if best else 0
                    )
                    if found is not None:
                        best = found
                        self._tell(f"{best[0]:,} tokens with {best[1]}")
        if best is None:
            raise DoesNotFit(self.why_not(longer(task, 1_024)))
        length, choice = best
        while True:
            plan = self._plan(longer(task, length), choice, timed=timed)
            if plan.excess <= 0 or length < 2_048:
                return plan
            # What a device holds beside the stores was more than the probe of a short step showed.
            length = length * 15 // 16 // 1_024 * 1_024

    @contextlib.contextmanager
    def _cut(self, task: Task) -> Iterator[None]:
        """Have the model as one rank has it, where matrices are cut."""
        with simulated_tp.cut(self._whole, 1 if task.parallel_dims is None else task.parallel_dims.tp) as self._blank:
            try:
                yield
            finally:
                self._blank = self._whole

    def _check_degrees(self, task: Task) -> None:
        if task.parallel_dims is not None:
            task.parallel_dims.check_world(self._machine.devices)

    def drawn(self, plan: Plan, title: str) -> tuple[Timeline, Timeline]:
        """A plan's step over time, and the same step without chunks and budgets.

        Args:
            plan: of this planner.
            title: what is planned, for people.
        """
        task, choice, hardware = plan.task, plan.choice, self._machine.hardware
        common: dict[str, Any] = {
            "batch_size": max(task.batch_size // choice.parallel_dims.dp, 1), "parallel_dims": choice.parallel_dims,
            "sharding_spec": choice.sharding_spec, "optimizer": task.optimizer, "micro_batches": task.micro_batches,
        }  # fmt: skip
        capacity = capacity_of(hardware, self._machine.devices)
        with self._cut(task):
            settings = self._arguments(task, choice, timed=True)["settings"]
            step = estimate(self._blank, task.context, hardware=hardware, drawn=True, **common, **settings)
            whole = before(self._blank, task.context, title=f"{title}, unchunked", hardware=hardware, **common)
        return timeline_of(step, title, capacity), whole

    def why_not(self, task: Task) -> str:
        """Why nothing fits: what the leanest choice lacks."""
        parallel_dims = list(meshes(task, self._machine, self._num_heads))[-1]
        sharding_spec = list(sharding_specs(task, parallel_dims))[-1]
        keep, every = list(kept(task, self._blank.decoder.num_layers))[-1]
        chunk = chunk_sizes(task, self._machine.hardware)[-1]
        return self._lack(task, Choice(parallel_dims, sharding_spec, chunk, keep, every)) or "it fits."

    def room(self, task: Task, choice: Choice) -> Room:
        """What a choice leaves to the engine's stores."""
        key = self._key(task, choice)
        if key not in self._rooms:
            probe = estimate(
                self._blank,
                _PROBE * choice.chunk_size,
                batch_size=max(task.batch_size // choice.parallel_dims.dp, 1),
                device=self._machine.hardware.device_type,
                parallel_dims=choice.parallel_dims,
                sharding_spec=choice.sharding_spec,
                optimizer=task.optimizer,
                micro_batches=task.micro_batches,
                chunk_size=choice.chunk_size,
                **_other(task),
            )
            ranks = choice.parallel_dims.dp * choice.parallel_dims.sp * choice.parallel_dims.cp
            states = states_of(
                self._blank.model, choice.sharding_spec, ranks, task.optimizer, micro_batches=task.micro_batches
            )
            static = states.device.total()
            # The optimizer's own step needs room beside what is held, too, when no store is there any more.
            beyond = max(probe.beyond_stores, static + states.step)
            device, host, disk = StreamConfig(**task.fixed).budgets
            self._rooms[key] = Room(
                _least(self._machine.device_room - beyond, device),
                _least(max(self._machine.host_room - sum(probe.memory["host"].values()), 0), host),
                _least(self._machine.disk_room, disk), beyond, static,
            )  # fmt: skip
        return self._rooms[key]

    @staticmethod
    def _key(task: Task, choice: Choice) -> tuple[Any, ...]:
        given = repr((task.optimizer, sorted(task.fixed.items())))
        return (
            choice.parallel_dims,
            choice.sharding_spec,
            choice.chunk_size,
            task.batch_size // choice.parallel_dims.dp,
            given,
        )

    # -- what fits -----------------------------------------------------------------------------------------------------

    def _lack(self, task: Task, choice: Choice) -> str | None:
        """Why a choice does not fit; None where it does."""
        machine, room = self._machine, self.room(task, choice)
        if room.device <= 0:
            per = "each device" if machine.devices > 1 else "the device"
            return (
                f"{per} has {in_units(machine.device_room)} that can be used, and needs {in_units(room.beyond)} before "
                f"anything is kept ({in_units(room.static)} for parameters and optimizer, the rest for a chunk's own "
                f"computation and gradients), {in_units(-room.device)} too much with {choice}: more devices, a device "
                "with more memory, parallel.offload, or a smaller chunk_size would mend it."
            )
        if machine.host_room and room.host <= 0:
            return (
                f"host memory has {in_units(machine.host_room)} for each device, and parameters and optimizer take all "
                "of it (offload): a node with more memory would mend it."
            )
        try:
            self._rehearsing(task, choice).placed()
        except ValueError as error:
            return f"{error} ({choice})"
        return None

    def _rehearsing(self, task: Task, choice: Choice, *, timed: bool = False) -> Estimator:
        return Estimator(self._blank, task.context, max(task.batch_size // choice.parallel_dims.dp, 1), None,
                          drawn=False, **self._arguments(task, choice, timed=timed))  # fmt: skip

    def _arguments(self, task: Task, choice: Choice, *, timed: bool) -> dict[str, Any]:
        room, hardware = self.room(task, choice), self._machine.hardware
        settings: dict[str, Any] = {**_other(task), **choice.settings, "device_budget": room.device}
        if room.host:
            settings["host_budget"] = room.host
        if room.disk:
            settings |= {"offload_dir": ".", "disk_budget": room.disk}
        return {
            "device": hardware.device_type,
            "hardware": hardware if timed else None,
            "parallel_dims": choice.parallel_dims,
            "sharding_spec": choice.sharding_spec,
            "settings": settings,
        }

    # -- searching -----------------------------------------------------------------------------------------------------

    def _best_on(self, task: Task, parallel_dims: ParallelDims) -> list[tuple[Plan, float]]:
        """Choices on a mesh that were worth a rehearsal, with the seconds of their steps."""
        found: list[tuple[Plan, float]] = []
        for sharding_spec in sharding_specs(task, parallel_dims):
            fitting = list(self._fitting(task, parallel_dims, sharding_spec))
            if not fitting:
                continue
            keeps = list(dict.fromkeys((choice.keep, choice.checkpoint_every) for choice in fitting))
            for keep, every in keeps:
                sizes = [c for c in fitting if (c.keep, c.checkpoint_every) == (keep, every)]
                before = min((seconds for _, seconds in found), default=float("inf"))
                timed = (each for choice in sizes if (each := self._timed(task, choice)) is not None)
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

    def _fitting(self, task: Task, parallel_dims: ParallelDims, sharding_spec: ShardingSpec) -> Iterator[Choice]:
        for keep, every in kept(task, self._blank.decoder.num_layers):
            for chunk in chunk_sizes(task, self._machine.hardware):
                choice = Choice(parallel_dims, sharding_spec, chunk, keep, every)
                if self._lack(task, choice) is None:
                    yield choice

    def _timed(self, task: Task, choice: Choice) -> tuple[Plan, float] | None:
        """A step; None where it turns out not to fit."""
        while self._lack(task, choice) is None:
            plan = self._plan(task, choice, timed=True)
            assert plan.estimate.step is not None
            self._tell(f"{choice}: {plan.estimate.step.seconds:,.4g} s a step")
            if plan.excess <= 0:
                return plan, plan.estimate.step.seconds
            # What a device holds beside the stores was more than the probe of a short step showed.
            room = self.room(task, choice)
            less = max(plan.excess, room.device // 64)
            self._rooms[self._key(task, choice)] = replace(room, device=room.device - less, beyond=room.beyond + less)
        return None

    def _plan(self, task: Task, choice: Choice, *, timed: bool) -> Plan:
        rehearsing = self._rehearsing(task, choice, timed=timed)
        rehearsal = rehearsing.result(backward=True, extrapolate=True, optimizer=task.optimizer,
                                       micro_batches=task.micro_batches)  # fmt: skip
        return Plan(task, self._machine, choice, self.room(task, choice), rehearsal, self._whole.model)

    def _longest_of(
        self,
        task: Task,
        parallel_dims: ParallelDims,
        sharding_spec: ShardingSpec,
        keep: tuple[str, ...],
        every: int,
        *,
        over: int,
    ) -> tuple[int, Choice] | None:
        """The longest context of such choices, where it is more than `over`, to about 3%."""

        def fits(length: int) -> Choice | None:
            longer_task = longer(task, length)
            for chunk in chunk_sizes(longer_task, self._machine.hardware):
                choice = Choice(parallel_dims, sharding_spec, chunk, keep, every)
                if self._lack(longer_task, choice) is None:
                    return choice
            return None

        low = -(-(over + over // 32) // 1_024) + 1  # in multiples of 1,024 tokens
        choice = fits(low * 1_024)
        if choice is None:
            return None
        high = 2 * low
        while (found := fits(high * 1_024)) is not None:
            low, choice, high = high, found, 2 * high
        while high - low > max(low // 32, 1):
            middle = (low + high) // 2
            found = fits(middle * 1_024)
            if found is None:
                high = middle
            else:
                low, choice = middle, found
        return low * 1_024, choice


def _other(task: Task) -> dict[str, Any]:
    """Given settings that are not chosen."""
    return {name: value for name, value in task.fixed.items() if name not in _CHOSEN}


def _least(room: int, given: int | None) -> int:
    return room if given is None else min(room, given)
