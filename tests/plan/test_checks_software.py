"""What is installed and set: versions below the required ones, compilers that are missing, variables that bite."""

import importlib
from importlib import metadata

import pytest

from trunkline.plan.checks import software
from trunkline.plan.checks.environment import Machine, variables
from trunkline.plan.checks.finding import Check, Finding, attempt


def installed(**versions: str):
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


def test_python():
    assert software.python_version().state == "ok"
    found = software.python_version("3.10.14")
    assert (found.state, found.found) == ("fail", "3.10.14, and >=3.11 is needed")
    assert software.python_version("3.15.0rc1").state == "ok"


def test_the_requirements_are_those_of_the_package():
    needed = software.requirements()
    assert str(needed["torch"].specifier) == ">=2.11"
    assert str(needed["transformers"].specifier) == ">=5.17"
    assert "peft" not in needed  # an extra


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0.dev20260101+cu130"])
def test_torch_that_is_new_enough(version):
    found = software.required("torch", installed(torch=version))
    assert found.state == "ok"
    assert found.found.startswith(f"{version}, built for ")


def test_torch_says_for_what_it_is_built(monkeypatch):
    def built(cuda, hip):
        monkeypatch.setattr("torch.version.cuda", cuda)
        monkeypatch.setattr("torch.version.hip", hip)
        return software.required("torch", installed(torch="2.13.0")).found

    assert built(None, None) == "2.13.0, built for CPUs only"
    assert built("13.0", None) == "2.13.0, built for CUDA 13.0"
    assert built(None, "7.0") == "2.13.0, built for ROCm 7.0"


def test_required_packages_that_are_old_or_missing():
    found = software.required("torch", installed(torch="2.10.1"))
    assert (found.state, found.found) == ("fail", "2.10.1 is installed, and >=2.11 is needed")
    assert found.mend == "pip install 'torch>=2.11'"
    found = software.required("transformers", installed())
    assert (found.state, found.found) == ("fail", "is not installed, and >=5.17 is needed")


@pytest.mark.parametrize("error", [ImportError("cannot import name 'x'"), OSError("libcudart.so.13: cannot open")])
def test_a_package_that_cannot_be_imported(monkeypatch, error):
    def refuse(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    found = software.required("torch", installed(torch="2.13.0"))
    assert found.state == "fail"
    assert str(error) in found.found
    assert "--force-reinstall" in found.mend


def test_the_other_required_packages():
    apart = ("torch", "transformers")
    found = software.other_required(apart)
    assert (found.state, found.found) == ("ok", f"all {len(software.requirements()) - 2} that are required")

    def version(name):
        return "1.20" if name == "numpy" else metadata.version(name)

    found = software.other_required(apart, version)
    assert (found.state, found.found) == ("fail", "numpy 1.20 is installed, and >=1.26 is needed")
    found = software.other_required(apart, installed())
    assert found.state == "fail"
    assert "xxhash is not installed" in found.found
    assert "torch" not in found.found
    assert "'xxhash>=3.4'" in found.mend


def test_optional_packages():
    assert {"peft", "bitsandbytes", "torchao", "flash-attn-3", "flash-attn-4", "liger-kernel", "matplotlib",
            "lm-eval"} == set(software.OPTIONAL)  # fmt: skip
    found = software.optional("peft", installed())
    assert (found.state, found.found) == ("ok", "not installed (LoRA and other adapters)")
    assert software.optional("peft", installed(peft="0.18.0")).found == "0.18.0: LoRA and other adapters"
    found = software.optional("peft", installed(peft="0.12.0"))
    assert found.state == "warn"
    assert found.mend == "pip install 'peft>=0.18'"


def test_compiler(tmp_path):
    def which(*there):
        return lambda name: f"/usr/bin/{name}" if name in there else None

    (tmp_path / "Python.h").touch()
    found = software.compiler({}, which("gcc", "g++"), tmp_path)
    assert (found.state, found.found) == ("ok", "/usr/bin/gcc, /usr/bin/g++, for compile=True")
    found = software.compiler({}, which("gcc"), tmp_path)
    assert (found.state, found.found) == ("warn", "no C++ compiler (g++)")
    found = software.compiler({"CC": "clang", "CXX": "clang++"}, which("clang", "clang++"), tmp_path)
    assert found.state == "ok"
    found = software.compiler({"CC": "clang"}, which("gcc", "g++"), tmp_path)
    assert (found.state, found.found) == ("warn", "no C compiler (clang)")
    found = software.compiler({}, which("gcc", "g++"), tmp_path / "empty")
    assert found.state == "warn"
    assert "no Python.h" in found.found


def test_triton():
    assert software.triton(installed(triton="3.6.0")).found == "3.6.0, for compile=True on CUDA"
    assert software.triton(installed()).state == "warn"


CPU, EIGHT = Machine(16, 0), Machine(16, 8)


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
        ("OMP_NUM_THREADS", "1", Machine(2, 0), None),
        ("OMP_NUM_THREADS", "8", CPU, None),
        ("MKL_NUM_THREADS", "1", EIGHT, "warn"),
        ("ATEN_CPU_CAPABILITY", "default", CPU, "warn"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", CPU, "warn"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", EIGHT, "warn"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", CPU, None),
        ("NCCL_P2P_DISABLE", "1", EIGHT, "warn"),
        ("NCCL_P2P_DISABLE", "1", Machine(16, 1), None),
        ("NCCL_SHM_DISABLE", "1", EIGHT, "warn"),
        ("NCCL_IB_DISABLE", "1", EIGHT, "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", CPU, "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", CPU, None),
        ("TORCH_COMPILE_DISABLE", "1", CPU, "warn"),
        ("HF_HUB_OFFLINE", "1", CPU, "ok"),
        ("HF_HUB_OFFLINE", "0", CPU, None),
    ],
)
def test_variables(name, value, machine, state):
    (found,) = variables(machine, {name: value, "HOME": "/root"})
    if state is None:
        assert found.found == "nothing is set that changes how training goes"
    else:
        assert found.state == state
        assert found.found.startswith(f"{name}={value}: ")


def test_several_variables_have_a_line_each():
    found = variables(EIGHT, {"OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "1", "HF_HUB_OFFLINE": "1"})
    assert [finding.state for finding in found] == ["warn", "warn", "ok"]


def test_a_check_that_breaks_down_is_a_finding():
    def look():
        raise PermissionError(13, "Permission denied", "/sys/x")

    found = attempt(Check("a thing", look))
    assert (found.name, found.state) == ("a thing", "warn")
    assert found.found == "could not be checked: PermissionError: [Errno 13] Permission denied: '/sys/x'"
    with pytest.raises(KeyboardInterrupt):
        attempt(Check("a thing", _interrupt))


def _interrupt():
    raise KeyboardInterrupt


def test_only_what_is_not_well_has_a_mend():
    with pytest.raises(AssertionError):
        Finding("a", "ok", "b", "c")
    with pytest.raises(AssertionError):
        Finding("a", "warn", "b")
