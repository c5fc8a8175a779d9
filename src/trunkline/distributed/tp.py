"""Tensor parallelism by transformers' own plan, on one axis of the mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

# Styles of modules that are whole on every rank, but see a part of the heads: each rank's gradient is a part.
_PARTIAL_STYLES = {"replicated_with_grad_allreduce"}


class Partial:
    """Modules that are whole on every rank, but see a part of the heads, such as norms of queries and keys.

    transformers would have a hook on their parameters reduce what is accumulated, once too often with several
    micro-batches, and for good. While the model is streamed they are reduced with all others; while it is not, hooks
    like transformers' do it.

    Args:
        parameters: names of theirs.
        modules: them.
        mesh: of the ranks.
    """

    def __init__(self, parameters: set[str], modules: list[nn.Module], mesh: DeviceMesh) -> None:
        self.parameters = parameters
        self._modules = modules
        self._group = mesh.get_group()
        self._handles: list[RemovableHandle] = []
        self._hooked: set[nn.Parameter] = set()

    def put_aside(self) -> None:
        """No hook reduces anything. Twice is once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def put_back(self) -> None:
        """Hooks do it, set when the modules are called: FSDP2 changes their parameters. Twice is once."""
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


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, *, blank: bool = False) -> Partial:
    """Cut the matrices of a model over the ranks of a mesh of one axis, in place.

    Args:
        model: the model, whole.
        mesh: of the ranks.
        blank: its parameters are meant to have no contents.

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
    if not blank and any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError(f"the parameters of this {name} are on the meta device: load its weights before shard().")
    found, modules = expand(model, plan), dict(model.named_modules())
    if any(hasattr(modules.get(n), "base_layer") for n in found):
        raise ValueError(f"LoRA on the matrices of {name} does not go with tp, which cuts them: use sp or cp instead.")
    names = [n for n, style in found.items() if style in _PARTIAL_STYLES and n in modules]
    inside = {n for n, _ in model.named_parameters() if any(n.startswith(f"{module}.") for module in names)}
    apply_tensor_parallelism(model, mesh, {n: style for n, style in found.items() if n not in names})
    model.tie_weights()
    return Partial(inside, [modules[name] for name in names], mesh)


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
