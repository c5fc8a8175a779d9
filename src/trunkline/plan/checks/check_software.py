"""Checks of installed software: Python, required and optional packages, and compilers."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trunkline.plan.checks import Finding, judge

# Feature of each optional package, and the oldest version that has it; "" for any.
OPTIONAL: dict[str, tuple[str, str]] = {
    "peft": ("LoRA and other adapters", ">=0.18"),
    "bitsandbytes": ("weights in 4 bits below adapters", ""),
    "torchao": ("weights in 8 bits below adapters", ""),
    "flash-attn-3": ("faster attention on Hopper (H100, H200)", ""),
    "flash-attn-4": ("faster attention on Blackwell (B200)", ""),
    "liger-kernel": ("fused norms, MLPs and rotary positions", ""),
    "matplotlib": ("figures of benchmarks and reports", ">=3.9"),
    "lm-eval": ("standard benchmarks of a trained model", ">=0.4.13"),
}


def check_python() -> Finding:
    """Check that this Python is one that the package supports."""
    version, needed = platform.python_version(), metadata.metadata("trunkline")["Requires-Python"]
    if SpecifierSet(needed).contains(version, prereleases=True):
        return Finding("python", "ok", version)
    fix = f"Make an environment with Python {needed} and install trunkline there."
    return Finding("python", "fail", f"{version}, and {needed} is needed", fix)


def requirements() -> dict[str, SpecifierSet]:
    """Return the versions that the installed trunkline requires, by package, without extras."""
    parsed = map(Requirement, metadata.requires("trunkline") or [])
    return {r.name: r.specifier for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})}


def check_required(name: str) -> Finding:
    """Check that a required package is installed, in a required version, and can be imported; else fail."""
    needed = requirements()[name]
    fix = f"pip install '{name}{needed}'"
    if (problem := _problem(name, needed)) is not None:
        return Finding(name, "fail", problem, fix)
    version, built = metadata.version(name), ""
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library of CUDA that is not there
        return Finding(name, "fail", f"{version} cannot be imported: {error}", f"{fix} --force-reinstall")
    if name == "torch":
        cuda, hip = module.version.cuda, module.version.hip
        built = f", built for {f'ROCm {hip}' if hip else f'CUDA {cuda}' if cuda else 'CPUs only'}"
    return Finding(name, "ok", f"{version}{built}")


def check_other_required(but: tuple[str, ...] = ()) -> Finding:
    """Check that the other required packages are installed in required versions; else fail. None is imported.

    Args:
        but: packages that have lines of their own.
    """
    others = {name: needed for name, needed in requirements().items() if name not in but}
    problems = {name: text for name, needed in others.items() if (text := _problem(name, needed)) is not None}
    if not problems:
        return Finding("other packages", "ok", f"all {len(others)} that are required")
    text = "; ".join(f"{name} {problem}" for name, problem in problems.items())
    fix = "pip install " + " ".join(f"'{name}{others[name]}'" for name in problems)
    return Finding("other packages", "fail", text, fix)


def check_optional(name: str) -> Finding:
    """Check the version of a package of `OPTIONAL`; warn if it is too old. A missing one is `ok`."""
    gives, needed = OPTIONAL[name]
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "ok", f"not installed ({gives})")
    if SpecifierSet(needed).contains(version, prereleases=True):
        return judge(name, f"{version}: {gives}", None)
    return judge(name, f"{version}, and {needed} is needed for {gives}", f"pip install '{name}{needed}'")


def check_compiler() -> Finding:
    """Check that `compile=True` has a C and a C++ compiler and Python's headers; else warn."""
    programs = {"C": os.environ.get("CC", "gcc"), "C++": os.environ.get("CXX", "g++")}
    paths = {language: shutil.which(program) for language, program in programs.items()}
    if None in paths.values():
        missing = [f"no {language} compiler ({programs[language]})" for language, path in paths.items() if path is None]
        fix = "For compile=True install them (apt install build-essential), or name them in CC and CXX."
        return judge("compiler", " and ".join(missing), fix)
    found, headers = ", ".join(map(str, paths.values())), Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return judge("compiler", f"{found}, but no Python.h in {headers}", "apt install python3-dev, for compile=True.")
    return judge("compiler", f"{found}, for compile=True", None)


def check_triton() -> Finding:
    """Check that Triton is installed, which `compile=True` needs on a CUDA device; else warn."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        if _problem(name, SpecifierSet()) is None:
            return Finding("triton", "ok", f"{metadata.version(name)}, for compile=True on CUDA")
    fix = "For compile=True pip install triton, in the version that this torch was released with."
    return Finding("triton", "warn", "not installed", fix)


def _problem(name: str, needed: SpecifierSet) -> str | None:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"is not installed, and {needed} is needed"
    return None if needed.contains(version, prereleases=True) else f"{version} is installed, and {needed} is needed"
