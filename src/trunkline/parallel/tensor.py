"""Tensor parallelism by transformers' own plan, on one axis of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

# Styles of modules that are whole on every rank, but see a part of the heads: each rank's gradient is a part.
_PARTIAL_STYLES = {"replicated_with_grad_allreduce"}


@dataclass(frozen=True, slots=True)
class Partial:
    """Modules that are whole on every rank, but see a part of the heads, such as norms of queries and keys.

    transformers has a hook reduce their gradients whenever one is accumulated, which is once too often with several
    micro-batches. While the model is streamed they are reduced with all others, and its way is put aside.

    Attributes:
        parameters: names of theirs.
        modules: them.
        forwards: transformers' own, which set the hook.
    """

    parameters: set[str]
    modules: list[nn.Module]
    forwards: list[Callable[..., Any]]

    def put_aside(self) -> None:
        """The modules are called as they were. Twice is once."""
        for module in self.modules:
            module.__dict__.pop("forward", None)

    def put_back(self) -> None:
        """The modules are transformers' again."""
        for module, forward in zip(self.modules, self.forwards, strict=True):
            module.forward = forward


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> Partial:
    """Cut the matrices of a model over the ranks of a mesh of one axis, in place.

    Returns:
        What gets a part of its gradient on each rank.

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
    modules = dict(model.named_modules())
    names = [name for name, style in found.items() if style in _PARTIAL_STYLES and name in modules]
    inside = {n for n, _ in model.named_parameters() if any(n.startswith(f"{name}.") for name in names)}
    partial = [modules[name] for name in names]
    return Partial(inside, partial, [module.forward for module in partial])


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
