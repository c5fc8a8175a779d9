"""A recipe as a plan takes it, and the other way."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trunkline.data import load_encoder
from trunkline.distributed.mesh import ParallelDims
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.planner import Plan
from trunkline.plan.search_space import TrainingJob
from trunkline.plan.simulated_sharding import ShardingSpec
from trunkline.train.models import build_config, tokenizer_spec
from trunkline.train.recipe import RanksSection, Recipe

_BUDGETS = ("device_budget", "host_budget", "offload_dir", "disk_budget")


def meta_model_of(recipe: Recipe) -> MetaModel:
    """The recipe's model without contents: neither weights nor a device are needed.

    Raises:
        ValueError: the recipe's model cannot be made, or cannot be streamed.
    """
    config = build_config(recipe, load_encoder(tokenizer_spec(recipe)))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.model.dtype))
    return MetaModel.from_model(model.train())


def job_of(recipe: Recipe) -> TrainingJob:
    """What a recipe asks for; what it leaves at its default is the plan's to choose."""
    given = recipe.model_fields_set
    fixed = {name: value for name, value in recipe.stream_settings.items() if name in given and value is not None}
    if fixed.get("chunk_size") == "auto":
        del fixed["chunk_size"]
    optimizer = AdamWSpec(recipe.optimizer.fp32_master)
    ranks = recipe.ranks
    parallel_dims = None
    if ranks != RanksSection():
        parallel_dims = ParallelDims(ranks.dp or 1, ranks.sp, ranks.cp, ranks.tp)
    sharding_spec = None if parallel_dims is None else sharding_spec_of(recipe)
    return TrainingJob(
        recipe.context, recipe.batch_size, optimizer, fixed, parallel_dims, sharding_spec, recipe.gradient_accumulation
    )


def sharding_spec_of(recipe: Recipe) -> ShardingSpec:
    """How the recipe's parameters are spread over its processes."""
    ranks = recipe.ranks
    masters = recipe.optimizer.fp32_master and recipe.model.dtype != "float32"
    return ShardingSpec(ranks.zero, torch.float32 if masters else None, offload=ranks.offload)


def written(recipe: Recipe, plan: Plan) -> Recipe:
    """A recipe with what a plan has chosen."""
    parallel_dims, sharding_spec = plan.candidate.parallel_dims, plan.candidate.sharding_spec
    reserved = plan.estimate.reserved
    ranks = RanksSection(
        dp=parallel_dims.dp,
        sp=parallel_dims.sp,
        cp=parallel_dims.cp,
        tp=parallel_dims.tp,
        zero=sharding_spec.zero,  # type: ignore[arg-type]
        offload=sharding_spec.offload,
    )
    changed: dict[str, Any] = {
        "context": plan.job.context, "chunk_size": plan.candidate.chunk_size, "keep": plan.candidate.keep,
        "checkpoint_every": plan.candidate.checkpoint_every, "device_budget": plan.budgets.device,
        "host_budget": reserved.get("host") or None,
        "ranks": ranks,
    }  # fmt: skip
    if reserved.get("disk"):
        changed["disk_budget"] = reserved["disk"]
    return Recipe.model_validate({**recipe.model_dump(), **changed, "ranks": ranks.model_dump()})
