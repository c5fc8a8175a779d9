"""Tensor parallelism by transformers' own plan, along one axis of the mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

# Styles of replicated modules that see a rank's heads only, so that each rank computes a part of their gradient.
_PARTIAL_GRAD_STYLES = {"replicated_with_grad_allreduce"}


class PartialGradModules:
    """Replicated modules that see a rank's heads only, such as norms of queries and keys.

    Their gradients must be summed over the tp ranks. transformers' own hooks sum what is accumulated in `.grad`, which
    is wrong from the second micro-batch on, and cannot be removed. While the model is streamed, gradients are summed
    with those of all other parameters; otherwise hooks of this class do it.

    Args:
        parameters: names of the modules' parameters.
        modules: the modules.
        mesh: mesh of one axis, tp.
    """

    def __init__(self, parameters: set[str], modules: list[nn.Module], mesh: DeviceMesh) -> None:
        self.parameters = parameters
        self._modules = modules
        self._group = mesh.get_group()
        self._handles: list[RemovableHandle] = []
        self._hooked: set[nn.Parameter] = set()

    def suspend(self) -> None:
        """Remove the hooks of this class; a second call changes nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def resume(self) -> None:
        """Set the hooks, of which there are none at first; a second call changes nothing."""
        # The hooks on parameters are set when a module is called, since FSDP2 replaces its parameters.
        if not self._handles:
            self._handles += [module.register_forward_pre_hook(self._hook) for module in self._modules]

    def _hook(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters() if torch.is_grad_enabled() else ():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._reduce))

    def _reduce(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self._group)


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, *, blank: bool = False) -> PartialGradModules:
    """Shard the matrices of a model over the ranks of a mesh of one axis, in place.

    Args:
        model: the unsharded model.
        mesh: mesh of one axis, tp.
        blank: accept parameters on the meta device.

    Returns:
        Modules whose gradients each rank computes a part of. They stay whole, and their hooks are not set yet.

    Raises:
        ValueError: the model has no plan, this transformers cannot apply it, adapters are on matrices of the plan, or
            the weights are not loaded (`blank` allows that).
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
    if not blank and any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError(f"the parameters of this {name} are on the meta device: load its weights before shard().")
    styles, modules = expand_plan(model, plan), dict(model.named_modules())
    if any(hasattr(modules.get(n), "base_layer") for n in styles):
        raise ValueError(f"LoRA on the matrices of {name} does not go with tp, which cuts them: use sp or cp instead.")
    names = [n for n, style in styles.items() if style in _PARTIAL_GRAD_STYLES and n in modules]
    inside = {n for n, _ in model.named_parameters() if any(n.startswith(f"{module}.") for module in names)}
    apply_tensor_parallelism(model, mesh, {n: style for n, style in styles.items() if n not in names})
    model.tie_weights()
    return PartialGradModules(inside, [modules[name] for name in names], mesh)


def expand_plan(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Expand the stars of a tensor-parallel plan into layer numbers.

    Args:
        model: the model.
        plan: styles by name pattern, such as `model.layers.*.self_attn.q_proj`.

    Returns:
        Styles by parameter and module name; a module's parameters come before it. A tied parameter is in it once.
    """
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
