"""Checks of installed packages, compilers and environment variables."""

import importlib
import os
from importlib import metadata

import pytest

from trunkline.plan.checks import Finding, attempt, check_environment, check_software


@pytest.fixture
def installed(monkeypatch):
    """Return a function that says which packages are installed, and in which versions."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    return install


def test_python_version(monkeypatch):
    assert check_software.check_python().state == "ok"
    monkeypatch.setattr("platform.python_version", lambda: "3.10.14")
    finding = check_software.check_python()
    assert (finding.state, finding.found) == ("fail", "3.10.14, and >=3.11 is needed")
    monkeypatch.setattr("platform.python_version", lambda: "3.15.0rc1")
    assert check_software.check_python().state == "ok"


def test_the_requirements_are_those_of_the_package():
    needed = check_software.requirements()
    assert str(needed["torch"]) == ">=2.11"
    assert str(needed["transformers"]) == ">=5.17"
    assert "peft" not in needed  # an extra


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0.dev20260101+cu130"])
def test_torch_that_is_new_enough(installed, version):
    installed(torch=version)
    finding = check_software.check_required("torch")
    assert finding.state == "ok"
    assert finding.found.startswith(f"{version}, built for ")


@pytest.mark.parametrize(
    ("cuda", "hip", "target"), [(None, None, "CPUs only"), ("13.0", None, "CUDA 13.0"), (None, "7.0", "ROCm 7.0")]
)
def test_torch_names_the_devices_that_it_is_built_for(installed, monkeypatch, cuda, hip, target):
    installed(torch="2.13.0")
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.version.hip", hip)
    assert check_software.check_required("torch").found == f"2.13.0, built for {target}"


def test_required_packages_that_are_old_or_missing(installed):
    installed(torch="2.10.1")
    finding = check_software.check_required("torch")
    assert (finding.state, finding.found) == ("fail", "2.10.1 is installed, and >=2.11 is needed")
    assert finding.fix == "pip install 'torch>=2.11'"
    finding = check_software.check_required("transformers")
    assert (finding.state, finding.found) == ("fail", "is not installed, and >=5.17 is needed")


@pytest.mark.parametrize("error", [ImportError("cannot import name 'x'"), OSError("libcudart.so.13: cannot open")])
def test_a_package_that_cannot_be_imported(installed, monkeypatch, error):
    def refuse(name):
        raise error

    installed(torch="2.13.0")
    monkeypatch.setattr(importlib, "import_module", refuse)
    finding = check_software.check_required("torch")
    assert finding.state == "fail"
    assert str(error) in finding.found
    assert "--force-reinstall" in finding.fix


def test_the_other_required_packages(installed, monkeypatch):
    but = ("torch", "transformers")
    finding = check_software.check_other_required(but)
    count = len(check_software.requirements()) - 2
    assert (finding.state, finding.found) == ("ok", f"all {count} that are required")
    with monkeypatch.context() as patch:
        real = metadata.version
        patch.setattr(metadata, "version", lambda name: "1.20" if name == "numpy" else real(name))
        finding = check_software.check_other_required(but)
    assert (finding.state, finding.found) == ("fail", "numpy 1.20 is installed, and >=1.26 is needed")
    installed()
    finding = check_software.check_other_required(but)
    assert finding.state == "fail"
    assert "xxhash is not installed" in finding.found
    assert "torch" not in finding.found
    assert "'xxhash>=3.4'" in finding.fix


def test_optional_packages(installed):
    assert {"peft", "bitsandbytes", "torchao", "flash-attn-3", "flash-attn-4", "liger-kernel", "matplotlib",
            "lm-eval"} == set(check_software.OPTIONAL)  # fmt: skip
    installed()
    finding = check_software.check_optional("peft")
    assert (finding.state, finding.found) == ("ok", "not installed (LoRA and other adapters)")
    installed(peft="0.18.0")
    assert check_software.check_optional("peft").found == "0.18.0: LoRA and other adapters"
    installed(peft="0.12.0")
    finding = check_software.check_optional("peft")
    assert finding.state == "warn"
    assert finding.fix == "pip install 'peft>=0.18'"


@pytest.mark.parametrize(
    ("environ", "programs", "headers", "state", "text"),
    [
        ({}, "gcc g++", True, "ok", "/usr/bin/gcc, /usr/bin/g++, for compile=True"),
        ({}, "gcc", True, "warn", "no C++ compiler (g++)"),
        ({"CC": "clang", "CXX": "clang++"}, "clang clang++", True, "ok", "/usr/bin/clang, /usr/bin/clang++, for"),
        ({"CC": "clang"}, "gcc g++", True, "warn", "no C compiler (clang)"),
        ({}, "gcc g++", False, "warn", "but no Python.h"),
    ],
)
def test_compiler(tmp_path, monkeypatch, environ, programs, headers, state, text):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in programs.split() else None)
    monkeypatch.setattr("sysconfig.get_path", lambda kind: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    finding = check_software.check_compiler()
    assert finding.state == state
    assert text in finding.found


def test_triton(installed):
    installed(triton="3.6.0")
    assert check_software.check_triton().found == "3.6.0, for compile=True on CUDA"
    installed()
    assert check_software.check_triton().state == "warn"


CPU, EIGHT = (16, 0), (16, 8)  # processors, GPUs


@pytest.mark.parametrize(
    ("name", "value", "machine", "state"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", EIGHT, "ok"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", EIGHT, "warn"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", CPU, None),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", EIGHT, "warn"),
        ("CUDA_LAUNCH_BLOCKING", "1", EIGHT, "warn"),
        ("CUDA_LAUNCH_BLOCKING", "0", EIGHT, None),
        ("TORCH_CUDA_SANITIZER", "1", EIGHT, "warn"),
        ("CUDA_VISIBLE_DEVICES", "", CPU, "warn"),
        ("CUDA_VISIBLE_DEVICES", "-1", CPU, "warn"),
        ("CUDA_VISIBLE_DEVICES", "0,1", EIGHT, None),
        ("OMP_NUM_THREADS", "1", CPU, "warn"),
        ("OMP_NUM_THREADS", "1", (2, 0), None),
        ("OMP_NUM_THREADS", "8", CPU, None),
        ("MKL_NUM_THREADS", "1", EIGHT, "warn"),
        ("ATEN_CPU_CAPABILITY", "default", CPU, "warn"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", CPU, "warn"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", EIGHT, "warn"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", CPU, None),
        ("NCCL_P2P_DISABLE", "1", EIGHT, "warn"),
        ("NCCL_P2P_DISABLE", "1", (16, 1), None),
        ("NCCL_SHM_DISABLE", "1", EIGHT, "warn"),
        ("NCCL_IB_DISABLE", "1", EIGHT, "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", CPU, "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", CPU, None),
        ("TORCH_COMPILE_DISABLE", "1", CPU, "warn"),
        ("HF_HUB_OFFLINE", "1", CPU, "ok"),
        ("HF_HUB_OFFLINE", "0", CPU, None),
    ],
)
def test_variables(name, value, machine, state, monkeypatch):
    (finding,) = findings_of(monkeypatch, machine, {name: value, "HOME": "/root"})
    if state is None:
        assert finding.found == "nothing is set that changes how training goes"
    else:
        assert finding.state == state
        assert finding.found.startswith(f"{name}={value}: ")


def findings_of(monkeypatch, machine: tuple[int, int], environ: dict[str, str]) -> list[Finding]:
    processors, num_gpus = machine
    monkeypatch.setattr(check_environment, "usable_processors", lambda: processors)
    monkeypatch.setattr(os, "environ", environ)
    return check_environment.check_variables(num_gpus)


def test_several_variables_have_a_line_each(monkeypatch):
    findings = findings_of(monkeypatch, EIGHT, {"OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "1", "HF_HUB_OFFLINE": "1"})
    assert [finding.state for finding in findings] == ["warn", "warn", "ok"]


def test_a_check_that_breaks_down_is_a_finding():
    def refuse():
        raise PermissionError(13, "Permission denied", "/sys/x")

    (finding,) = attempt("a thing", refuse)
    assert (finding.name, finding.state) == ("a thing", "warn")
    assert finding.found == "could not be checked: PermissionError: [Errno 13] Permission denied: '/sys/x'"
    with pytest.raises(KeyboardInterrupt):
        list(attempt("a thing", _interrupt))


def _interrupt():
    raise KeyboardInterrupt


def test_only_problems_have_a_fix():
    with pytest.raises(AssertionError):
        Finding("a", "ok", "b", "c")
    with pytest.raises(AssertionError):
        Finding("a", "warn", "b")
