"""Conversion between a recipe and the planner: the job that a recipe asks for, and the recipe that a plan gives."""

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
from trunkline.train.build_model import build_config, tokenizer_spec
from trunkline.train.recipe import RanksSection, Recipe


def meta_model_of(recipe: Recipe, config: Any = None) -> MetaModel:
    """Build the recipe's model on the `meta` device; neither weights nor an accelerator are needed.

    Args:
        recipe: the recipe.
        config: config of its model; None builds it.

    Returns:
        The model in training mode.

    Raises:
        ValueError: the recipe's model cannot be made, or cannot be streamed.
    """
    config = config or build_config(recipe, load_encoder(tokenizer_spec(recipe)))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.model.dtype))
    return MetaModel.from_model(model.train())


def job_of(recipe: Recipe) -> TrainingJob:
    """Convert a recipe to a job, which fixes the settings that the recipe gives.

    The plan chooses settings of streaming that the recipe leaves out or sets to null, a `chunk_size` of `auto`, and the
    mesh and sharding where `ranks` has its default values. Otherwise both are fixed; `ranks.dp` null is one replica.
    """
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
    """Return the sharding of a recipe's parameters; float32 masters, where it has them, are sharded."""
    ranks = recipe.ranks
    masters = recipe.optimizer.fp32_master and recipe.model.dtype != "float32"
    return ShardingSpec(ranks.zero, torch.float32 if masters else None, offload=ranks.offload)


def planned_recipe(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the settings of a plan, its context included."""
    settings = plan.settings
    budgets = {"host_budget": None, **settings["memory"]}  # no host memory, unless the plan reserves some
    chosen = {"context": plan.job.context, **settings["streaming"], **budgets, "ranks": settings["ranks"]}
    return Recipe.model_validate({**recipe.model_dump(), **chosen})
