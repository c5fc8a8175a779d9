"""The layout of src/trunkline: imports point downwards only, and the way from a forward to the kernel is short."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import build
from oracle import tokens

import trunkline
from trunkline.attention.kernels import CpuFlashKernel

SOURCE = Path(trunkline.__file__).parent
# Lowest first: a package, or a module at the top, imports only those before it.
LAYERS = (
    *("units", "config", "chunking", "utils", "offload", "attention", "engine", "hf", "distributed", "kv_cache"),
    *("forward", "api", "data", "generation", "report", "plan", "evaluate", "train", "cli", "__main__"),
)
MOST_FRAMES = 10


def imported(tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and module of each import of trunkline, those within functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trunkline":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in modules else str(node.module)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "trunkline")


def upward_imports(sources: dict[str, str]) -> list[str]:
    """Return the imports of modules (by dotted name, with their text) that point to a higher layer."""
    found = []
    for name, text in sources.items():
        layer = name.split(".")[1] if "." in name else ""  # the package itself offers public names of all layers
        for line, target in imported(ast.parse(text), set(sources)):
            below = target.split(".")[1] if "." in target else ""
            if layer and below and LAYERS.index(below) > LAYERS.index(layer):
                found.append(f"{name}:{line} imports {target}")
    return found


def sources() -> dict[str, str]:
    paths = {path: path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py")}
    return {".".join(p.parts).removesuffix(".__init__"): path.read_text() for path, p in paths.items()}


def test_imports_point_downwards_so_that_packages_have_no_cycles() -> None:
    found = sources()
    assert {name.split(".")[1] for name in found if "." in name} == set(LAYERS)
    assert upward_imports(found) == []


@pytest.mark.parametrize(
    "text",
    ["from trunkline.train import loop", "import trunkline.cli", "def f():\n    from trunkline.api import stream"],
)
def test_an_upward_import_is_found(text: str) -> None:
    found = sources() | {"trunkline.engine.step": text}
    assert len(upward_imports(found)) == 1


def test_input_ids_reach_the_kernel_in_ten_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []
    forward = CpuFlashKernel.forward

    def recorded(kernel: CpuFlashKernel, *args: torch.Tensor, **kwargs: float) -> tuple[torch.Tensor, torch.Tensor]:
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(SOURCE)]
        stacks.append([f"{Path(f.filename).stem}.{f.name}" for f in frames])
        return forward(kernel, *args, **kwargs)  # type: ignore[arg-type]

    model = trunkline.stream(build("llama", torch.float32), chunk_size=8)
    ids = tokens(1, 16)
    monkeypatch.setattr(CpuFlashKernel, "forward", recorded)
    model(input_ids=ids, labels=ids)
    assert stacks
    assert all(len(frames) <= MOST_FRAMES for frames in stacks), stacks[0]
