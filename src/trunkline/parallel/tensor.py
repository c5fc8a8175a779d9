"""Tensor parallelism by transformers' own plan, on one axis of the mesh."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

# Styles of modules that are whole on every rank, but see a part of the heads: each rank's gradient is a part.
_PARTIAL_STYLES = {"replicated_with_grad_allreduce"}


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> set[str]:
    """Cut the matrices of a model over the ranks of a mesh of one axis, in place.

    Returns:
        Names of parameters that are whole on every rank, but get a part of their gradient on each.

    Raises:
        ValueError: the model has no plan, or this transformers cannot apply it.
    """
    name = type(model).__name__
    try:
        from transformers.integrations.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise ValueError(
            "tp needs a transformers with apply_tensor_parallelism (5.24 has it): upgrade it, or use sp or cp."
        ) from error
    plan = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise ValueError(f"{name} has no tensor-parallel plan in transformers: use sp or cp instead of tp.")
    if any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError(f"the parameters of this {name} are on the meta device: load its weights before shard().")
    found = expand(model, plan)
    apply_tensor_parallelism(model, mesh, found)
    model.tie_weights()
    partial = [module for module, style in found.items() if style in _PARTIAL_STYLES]
    return {n for n, _ in model.named_parameters() if any(n == m or n.startswith(f"{m}.") for m in partial)}


def expand(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """A plan with the layers' numbers in the place of its stars: parameters and modules by name, parameters first."""
    found: dict[str, str] = {}
    known = dict(model.named_parameters())  # tied ones once
    for name, module in model.named_modules():
        style = plan.get(_starred(name))
        for parameter, _ in module.named_parameters(name, recurse=False):
            own = plan.get(_starred(parameter), style)
            if own is not None and parameter in known:
                found[parameter] = own
        if style is not None:
            found[name] = style
    return found


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
