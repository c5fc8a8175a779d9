"""Checks of what is installed: Python, the packages that are required, those that add something, and compilers."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trunkline.plan.checks.finding import Finding

Version = Callable[[str], str]

# What each optional package gives, and the oldest version that does; "" for any.
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


def python_version(version: str | None = None) -> Finding:
    """Whether this Python is one that the package is made for.

    Args:
        version: such as "3.11.7"; None is the running one.
    """
    version = platform.python_version() if version is None else version
    needed = metadata.metadata("trunkline")["Requires-Python"]
    if SpecifierSet(needed).contains(version, prereleases=True):
        return Finding("python", "ok", version)
    mend = f"Make an environment with Python {needed} and install trunkline there."
    return Finding("python", "fail", f"{version}, and {needed} is needed", mend)


def requirements() -> dict[str, Requirement]:
    """What the installed package requires, extras left out, by name.

    Raises:
        PackageNotFoundError: trunkline runs from its sources and was never installed.
    """
    parsed = (Requirement(line) for line in metadata.requires("trunkline") or [])
    return {r.name: r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})}


def required(name: str, version: Version = metadata.version) -> Finding:
    """Whether a required package is there, new enough, and can be imported.

    Args:
        name: one of `requirements`.
        version: finds that of a package.
    """
    needed = requirements()[name].specifier
    wrong = _wrong(name, needed, version)
    mend = f"pip install '{name}{needed}'"
    if wrong is not None:
        return Finding(name, "fail", wrong, mend)
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library of CUDA that is not there
        return Finding(name, "fail", f"{version(name)} cannot be imported: {error}", f"{mend} --force-reinstall")
    return Finding(name, "ok", f"{version(name)}{_build(module) if name == 'torch' else ''}")


def other_required(apart: tuple[str, ...] = (), version: Version = metadata.version) -> Finding:
    """Whether the other required packages are there and new enough.

    Args:
        apart: names that have lines of their own.
        version: finds that of a package.
    """
    others = {name: r for name, r in requirements().items() if name not in apart}
    wrong = {name: text for name, r in others.items() if (text := _wrong(name, r.specifier, version)) is not None}
    if not wrong:
        return Finding("other packages", "ok", f"all {len(others)} that are required")
    text = "; ".join(f"{name} {why}" for name, why in wrong.items())
    mend = "pip install " + " ".join(f"'{name}{others[name].specifier}'" for name in wrong)
    return Finding("other packages", "fail", text, mend)


def optional(name: str, version: Version = metadata.version) -> Finding:
    """Whether an optional package is there; where not, what it would give.

    Args:
        name: one of `OPTIONAL`.
        version: finds that of a package.
    """
    gives, needed = OPTIONAL[name]
    try:
        found = version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "ok", f"not installed ({gives})")
    if SpecifierSet(needed).contains(found, prereleases=True):
        return Finding(name, "ok", f"{found}: {gives}")
    return Finding(name, "warn", f"{found}, and {needed} is needed for {gives}", f"pip install '{name}{needed}'")


def compiler(
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    headers: Path | None = None,
) -> Finding:
    """Whether `compile=True` has what it needs: a C and a C++ compiler and Python's headers.

    Args:
        environ: where CC and CXX may name others.
        which: finds a program.
        headers: the folder that should have Python.h; None is this Python's.
    """
    programs = {"C": environ.get("CC", "gcc"), "C++": environ.get("CXX", "g++")}
    missing = {language: name for language, name in programs.items() if which(name) is None}
    if missing:
        text = " and ".join(f"no {language} compiler ({name})" for language, name in missing.items())
        mend = "For compile=True install them (apt install build-essential), or name them in CC and CXX."
        return Finding("compiler", "warn", text, mend)
    headers = Path(sysconfig.get_path("include")) if headers is None else headers
    found = ", ".join(which(name) or name for name in programs.values())
    if not (headers / "Python.h").is_file():
        mend = "For compile=True install them (apt install python3-dev)."
        return Finding("compiler", "warn", f"{found}, but no Python.h in {headers}", mend)
    return Finding("compiler", "ok", f"{found}, for compile=True")


def triton(version: Version = metadata.version) -> Finding:
    """Whether `compile=True` can make kernels for a CUDA device.

    Args:
        version: finds that of a package.
    """
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return Finding("triton", "ok", f"{version(name)}, for compile=True on CUDA")
        except metadata.PackageNotFoundError:
            continue
    mend = "For compile=True pip install triton, in the version that this torch was released with."
    return Finding("triton", "warn", "not installed", mend)


def _wrong(name: str, needed: SpecifierSet, version: Version) -> str | None:
    """What is wrong with a package, None for nothing."""
    try:
        found = version(name)
    except metadata.PackageNotFoundError:
        return f"is not installed, and {needed} is needed"
    return None if needed.contains(found, prereleases=True) else f"{found} is installed, and {needed} is needed"


def _build(torch: object) -> str:
    """For which devices this PyTorch was built."""
    versions = getattr(torch, "version", None)
    cuda, hip = getattr(versions, "cuda", None), getattr(versions, "hip", None)
    if hip:
        return f", built for ROCm {hip}"
    return f", built for CUDA {cuda}" if cuda else ", built for CPUs only"
