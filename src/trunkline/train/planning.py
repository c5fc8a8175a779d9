"""A recipe as a plan takes it, and the other way."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trunkline.data import load_encoder
from trunkline.parallel.mesh import Degrees
from trunkline.plan.blank import Blank
from trunkline.plan.choices import Task
from trunkline.plan.planner import Plan
from trunkline.plan.sharding import Spread
from trunkline.plan.states import AdamW
from trunkline.train.models import build_config, tokenizer_spec
from trunkline.train.recipe import ParallelSection, Recipe

_BUDGETS = ("device_budget", "host_budget", "disk", "disk_budget")


def blank_model(recipe: Recipe) -> Blank:
    """The recipe's model without contents: neither weights nor a device are needed.

    Raises:
        ValueError: the recipe's model cannot be made, or cannot be streamed.
    """
    config = build_config(recipe, load_encoder(tokenizer_spec(recipe)))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.model.dtype))
    return Blank.of(model.train())


def task_of(recipe: Recipe) -> Task:
    """What a recipe asks for; what it leaves at its default is the plan's to choose."""
    given = recipe.model_fields_set
    fixed = {name: value for name, value in recipe.stream_settings.items() if name in given and value is not None}
    if fixed.get("chunk_size") == "auto":
        del fixed["chunk_size"]
    optimizer = AdamW(recipe.optimizer.fp32_master)
    parallel = recipe.parallel
    degrees = None
    if parallel != ParallelSection():
        degrees = Degrees(parallel.dp or 1, parallel.sp, parallel.cp, parallel.tp)
    spread = None if degrees is None else spread_of(recipe)
    return Task(recipe.context, recipe.batch_size, optimizer, fixed, degrees, spread, recipe.gradient_accumulation)


def spread_of(recipe: Recipe) -> Spread:
    """How the recipe's parameters are spread over its processes."""
    parallel = recipe.parallel
    masters = recipe.optimizer.fp32_master and recipe.model.dtype != "float32"
    return Spread(parallel.zero, torch.float32 if masters else None, offload=parallel.offload)


def written(recipe: Recipe, plan: Plan) -> Recipe:
    """A recipe with what a plan has chosen."""
    degrees, spread = plan.choice.degrees, plan.choice.spread
    reserved = plan.rehearsal.reserved
    parallel = ParallelSection(dp=degrees.dp, sp=degrees.sp, cp=degrees.cp, tp=degrees.tp, zero=spread.zero,  # type: ignore[arg-type]
                               offload=spread.offload)  # fmt: skip
    changed: dict[str, Any] = {
        "context": plan.task.context, "chunk_size": plan.choice.chunk_size, "keep": plan.choice.keep,
        "inputs_every": plan.choice.inputs_every, "device_budget": plan.room.device,
        "host_budget": reserved.get("host") or None,
        "parallel": parallel,
    }  # fmt: skip
    if reserved.get("disk"):
        changed["disk_budget"] = reserved["disk"]
    return Recipe.model_validate({**recipe.model_dump(), **changed, "parallel": parallel.model_dump()})
