"""Preflight: before the first step, check that the run fits this machine, and choose the chunk size of `auto`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch

from trunkline.config import StreamConfig
from trunkline.distributed import failure
from trunkline.hf.introspect import UnsupportedModelError
from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.hardware import Hardware, NoFigures, profile_of
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import AdamWSpec, loading_bytes
from trunkline.plan.search_space import MOST_CHUNKS
from trunkline.train.load_recipe import RecipeError
from trunkline.train.planning import meta_model_of, sharding_spec_of
from trunkline.train.recipe import Recipe
from trunkline.train.world import World
from trunkline.units import format_bytes, parse_bytes
from trunkline.utils.host_limits import free_bytes

_USABLE = 0.96  # share of free memory: an allocator cannot use every block
_SMALLEST = 256  # tokens: the least chunk size that auto tries
_MOST_CHUNKS = 4 * MOST_CHUNKS  # of auto: an estimate of more takes minutes

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """Result of the preflight.

    Attributes:
        recipe: recipe with the chosen chunk size.
        estimate: estimate of a step; None on ranks other than 0, and where none can be made.
        hardware: profile of this machine; None where there is none.
        before: bytes that the process held before, by holder; empty on CUDA.
        note: note for the user; empty for none.
    """

    recipe: Recipe
    estimate: Estimate | None = None
    hardware: Hardware | None = None
    before: dict[str, int] = field(default_factory=dict)
    note: str = ""

    def plan_json(self) -> str | None:
        """Return the text of `plan.json`, which `trunkline report` compares with the run; None without an estimate."""
        if self.estimate is None:
            return None
        step = self.estimate.step
        holders = {**self.estimate.memory, "device": {**self.estimate.memory["device"], **self.before}}
        plan: dict[str, Any] = {
            "hardware": "this machine" if self.hardware is None else self.hardware.title,
            "peaks": {tier: sum(parts.values()) for tier, parts in holders.items()},
            "holders": holders,
            "moved": self.estimate.moved,
        }
        if step is not None:
            plan |= {"seconds": step.seconds, "tokens_per_second": step.tokens_per_second * step.devices,
                      "mfu": step.mfu, "mfu_recompute_counted": step.hardware_utilisation,
                      "exposed": step.exposed}  # fmt: skip
        return json.dumps(plan, indent=1) + "\n"


def preflight(
    recipe: Recipe, config: Any, world: World, device: torch.device, notify: Notify = lambda _: None
) -> PreflightResult:
    """Estimate a step on rank 0, choose a chunk size in place of `auto`, and stop a run that cannot fit.

    With tensor parallelism, or a model that cannot be estimated, nothing is checked, and a note says so.

    Args:
        recipe: recipe of the run.
        config: config of its model.
        world: processes of the run, all of which call this.
        device: device of this process.
        notify: called on rank 0 with a line for each chunk size, where several are tried.

    Returns:
        The recipe with a chunk size in tokens, equal on all ranks, and on rank 0 the estimate.

    Raises:
        RecipeError: on rank 0: it does not fit; the text names the tier, the shortfall and the fix.
        RankError: on another rank: rank 0 has failed.
    """
    usual = StreamConfig(chunk_size=recipe.chunk_size).chunk_tokens(device)
    unchecked = recipe.model_copy(update={"chunk_size": usual})
    if world.parallel_dims.tp > 1:
        note = "note: with tensor parallelism the preflight does not check memory: `trunkline plan` does."
        return PreflightResult(unchecked, note=note)
    found = None
    if world.is_main:
        try:
            found = _estimate_sizes(recipe, config, world, device, notify)
        except UnsupportedModelError as error:  # what cannot be streamed either is refused by stream(), with the reason
            found = PreflightResult(unchecked, note=f"note: {error}")
    if world.mesh is None:
        assert found is not None
        return found
    chunk = int(failure.broadcast_text("chunk_size", None if found is None else str(found.recipe.chunk_size)))
    return found or PreflightResult(recipe.model_copy(update={"chunk_size": chunk}))


def _estimate_sizes(recipe: Recipe, config: Any, world: World, device: torch.device, notify: Notify) -> PreflightResult:
    meta_model = meta_model_of(recipe, config)
    hardware = profile_of(device)
    free = free_bytes(device, world.local_size, recipe.offload_dir)
    _check_loading(recipe, meta_model, world, free)
    fitting: dict[int, Estimate] = {}
    last: RecipeError | None = None
    sizes = _sizes(recipe, device, timed=hardware is not None)
    for chunk in sizes:
        if len(sizes) > 1:
            notify(f"estimating a step in chunks of {chunk:,}")
        try:
            if len(sizes) > 1 and hardware is not None:  # bytes are found out sooner than seconds
                _check(recipe, _step(recipe, meta_model, world, device, None, chunk), free, chunk)
            fitting[chunk] = _step(recipe, meta_model, world, device, hardware, chunk)
            _check(recipe, fitting[chunk], free, chunk)
        except UnsupportedModelError:
            raise
        except ValueError as error:
            fitting.pop(chunk, None)
            last = error if isinstance(error, RecipeError) else RecipeError(str(error))
        if fitting and (len(fitting) == 2 or next(iter(fitting.values())).step is None):
            break
    if not fitting:
        assert last is not None
        raise last
    steps = {chunk: found.step for chunk, found in fitting.items()}
    chunk = min(steps, key=lambda each: 0.0 if (step := steps[each]) is None else step.seconds)
    note = ""
    if recipe.chunk_size == "auto":
        note = f"chunk_size auto: {chunk:,}, " + ("the faster that fits" if len(fitting) > 1 else "which fits")
    before = {"Python and its libraries": psutil.Process().memory_info().rss} if device.type == "cpu" else {}
    return PreflightResult(recipe.model_copy(update={"chunk_size": chunk}), fitting[chunk], hardware, before, note)


def _sizes(recipe: Recipe, device: torch.device, *, timed: bool) -> list[int]:
    """Return the chunk sizes to try: the recipe's, or for auto common sizes for the device, the likeliest first."""
    if recipe.chunk_size != "auto":
        return [recipe.chunk_size]
    usual = StreamConfig().chunk_tokens(device)
    least = max(_SMALLEST, recipe.context // _MOST_CHUNKS)
    smaller = [usual >> n for n in range(1, 16) if usual >> n >= least]
    larger = [2 * usual] if timed and recipe.context > 2 * usual else []
    return [usual, *larger, *smaller]


def _step(
    recipe: Recipe, meta_model: MetaModel, world: World, device: torch.device, hardware: Hardware | None, chunk: int
) -> Estimate:
    settings = {name: value for name, value in recipe.stream_settings.items() if value is not None}
    estimate_on = partial(
        estimate,
        meta_model,
        recipe.context,
        batch_size=recipe.batch_size // world.parallel_dims.dp,
        device=device,
        parallel_dims=world.parallel_dims,
        sharding_spec=sharding_spec_of(recipe),
        optimizer=AdamWSpec(recipe.optimizer.fp32_master),
        micro_batches=recipe.gradient_accumulation,
        **{**settings, "chunk_size": chunk},
    )
    try:
        return estimate_on(hardware=hardware)
    except NoFigures:  # of so many ranks, or of this dtype: bytes are known without
        return estimate_on(hardware=None)


def _check_loading(recipe: Recipe, meta_model: MetaModel, world: World, free: dict[str, int]) -> None:
    """Refuse a model that a process cannot build whole in its share of free host memory, before it is sharded.

    Raises:
        RecipeError: it takes more.
    """
    parallel_dims = world.parallel_dims
    wanted = loading_bytes(
        meta_model.model,
        sharding_spec_of(recipe),
        parallel_dims.dp * parallel_dims.sp * parallel_dims.cp,
        parallel_dims.tp,
    )
    room = int(free.get("host", free["device"]) * _USABLE)
    if wanted > room:
        masters = "optimizer.fp32_master false (half of it), " if recipe.optimizer.fp32_master else ""
        raise RecipeError(
            "this run cannot load its model: each process builds it whole in host memory before ranks.zero shards it, "
            f"which takes {format_bytes(wanted)}, and {format_bytes(room)} is free. Use {masters}fewer processes on "
            "this machine, or one with more memory (preflight: false in the recipe skips this check)."
        )


def _check(recipe: Recipe, estimated: Estimate, free: dict[str, int], chunk: int) -> None:
    """Refuse a step that takes more in a tier than is free for this process.

    Raises:
        RecipeError: it takes more.
    """
    memory = {tier: Counter(parts) for tier, parts in estimated.memory.items()}
    if "host" not in free:  # it is the device
        memory["device"].update(memory.pop("host"))
    elif recipe.host_budget is not None:  # pinned whole, whatever of it is used
        budget = parse_bytes("host_budget", recipe.host_budget) or 0
        memory["host"]["the rest of host_budget"] += max(budget - estimated.peaks["host"], 0)
    for tier, parts in memory.items():
        wanted, room = parts.total(), free.get(tier, 0) * _USABLE
        if wanted <= room:
            continue
        held = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts.most_common(4))
        smaller = f"chunk_size below {chunk:,}, " if chunk > _SMALLEST else ""
        budgets = "a device_budget with host_budget or disk" if recipe.device_budget is None else "smaller budgets"
        fixes = {
            "device": f"{smaller}keep [], {budgets}, optimizer.fp32_master false, or more processes (ranks)",
            "host": "a smaller host_budget with disk, checkpoint_every 4, or a shorter context",
            "disk": "another disk, checkpoint_every 4, keep [], or a shorter context",
        }
        raise RecipeError(
            f"this run does not fit: at its peak a process would hold {format_bytes(wanted)} in its {tier} tier "
            f"({held}), and {format_bytes(int(room))} is free. Use {fixes[tier]}; `trunkline plan` finds settings "
            "that fit (preflight: false in the recipe skips this check)."
        )
