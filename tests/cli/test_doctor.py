"""`trunkline doctor`: a line for each check, aligned on a terminal, plain elsewhere, JSON for programs; exit codes."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from trunkline.cli import app as cli
from trunkline.cli import doctor
from trunkline.plan.checks import Finding, check_disk, check_software
from trunkline.plan.checks.examine import examine

THINGS = {
    "Software": ["python", "torch", "transformers", "other packages", "compiler"],
    "Devices": ["device cpu", "attention fp32", "attention bf16", "attention fp16", "link"],
    "Memory": ["host memory", "swap", "locked memory", "shared memory"],
    "Disk": ["disk", "disk speed"],
    "Processes": ["ranks", "open files"],
    "Environment": ["environment"],
    "Optional packages": list(check_software.OPTIONAL),
}
SPEED = (2e9, 3e9, 2**28)


@pytest.fixture
def quick(monkeypatch):
    """The disk's speed is known, and this machine has no CUDA device."""
    monkeypatch.setattr(check_disk, "measure_disk", lambda folder, nbytes: SPEED)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in list(os.environ):
        if name.startswith(("OMP_", "HF_", "RANK", "WORLD", "LOCAL_")):
            monkeypatch.delenv(name)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def findings_of(capsys, *arguments: object) -> tuple[int, dict[str, dict]]:
    code, out, _ = run(capsys, "--json", *arguments)
    return code, {finding["name"]: finding for finding in json.loads(out)["findings"]}


def test_every_check_has_its_line_in_its_section(quick, capsys, tmp_path):
    code, out, err = run(capsys, "--json", "--disk", tmp_path)
    answer = json.loads(out)
    assert (code, err, answer["ok"]) == (0, "", True)
    found: dict[str, list[str]] = {}
    for finding in answer["findings"]:
        assert list(finding) == ["section", "name", "state", "found", "fix"]
        assert (finding["fix"] is None) == (finding["state"] == "ok")
        assert "could not be checked" not in finding["found"]
        found.setdefault(finding["section"], []).append(finding["name"])
    assert found == THINGS


def test_a_gpu_adds_its_lines(quick, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    names = [finding.name for section, finding in examine(Path("/nowhere")) if section == "Devices"]
    assert names == [
        "device cuda:0", "device cuda:1", "attention fp32", "attention bf16", "attention fp16", "link cuda:0",
        "link cuda:1", "triton",
    ]  # fmt: skip


def test_the_folder_is_the_one_of_the_option(quick, capsys, tmp_path, monkeypatch):
    assert f" in {tmp_path} (" in findings_of(capsys, "--disk", tmp_path)[1]["disk"]["found"]
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(tmp_path))
    assert f" in {tmp_path} (" in findings_of(capsys)[1]["disk"]["found"]


def test_a_failure_exits_with_1_after_all_other_lines(quick, capsys, tmp_path):
    code, found = findings_of(capsys, "--disk", tmp_path / "nowhere")
    assert code == 1
    assert found["disk"]["state"] == "fail"
    assert "disk speed" not in found
    assert found["host memory"]["state"] in ("ok", "warn")
    code, out, _ = run(capsys, "--disk", tmp_path / "nowhere")
    assert code == 1
    assert out.splitlines()[-1].endswith("1 fail: fix this before training.")


def test_warnings_exit_with_0(quick, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(check_disk, "measure_disk", lambda folder, nbytes: (1e6, 1e6, 1))
    code, out, _ = run(capsys, "--disk", tmp_path)
    assert code == 0
    assert "  warn  disk speed      writes 0.00 GB/s" in out
    assert out.splitlines()[-1].endswith("warn: ready to train.")


def test_a_crashing_check_is_one_line(quick, capsys, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr("psutil.swap_memory", refuse)
    code, found = findings_of(capsys, "--disk", tmp_path)
    assert code == 0
    assert found["swap"]["state"] == "warn"
    assert "Permission denied: '/proc/meminfo'" in found["swap"]["found"]
    assert "open files" in found


def test_a_broken_pytorch_is_one_failure_among_other_lines(tmp_path):
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise ImportError('libcudart.so.13: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from trunkline.cli.app import run\n"
        "sys.exit(run(['doctor', '--json', '--disk', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["torch"]["state"] == "fail"
    assert "libcudart" in found["torch"]["found"]
    assert found["device"]["state"] == "warn"
    assert found["ranks"]["state"] == "warn"
    assert "GB/s" in found["disk speed"]["found"]


def test_only_the_first_process_of_a_machine_checks(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(capsys, "--disk", tmp_path / "nowhere") == (0, "", "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run(capsys, "--disk", tmp_path / "nowhere")[0] == 1


SHOWN = [
    ("Memory", Finding("host memory", "ok", "22.2 GiB of 23.5 GiB available")),
    (
        "Memory",
        Finding("locked memory", "warn", "at most 8.0 MiB, " + "and more words " * 8, "ulimit -l unlimited " * 9),
    ),
    ("Disk", Finding("disk", "fail", f"/{'long/' * 30} is not a folder", "Give an existing folder to --disk.")),
]


@pytest.mark.parametrize("width", [80, 120])
def test_columns_on_a_terminal(width):
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    doctor.show(SHOWN, console)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    titles = {"Memory", "Disk", "", lines[-1].rstrip()}
    rows = [line.rstrip() for line in lines if line.rstrip() not in titles]
    for row in rows:  # two columns of room, state, two, name, two, then what was found or how to fix it
        assert re.match(r"  (ok  |warn|fail)  (host memory   |locked memory |disk          )  \S|" + " " * 24 + r"\S|"
                        + " " * 26 + r"\S", row), row  # fmt: skip
    words = re.sub(r"\s+", " ", " ".join(rows))
    assert words.count("ulimit -l unlimited") == 9
    assert words.count("and more words") == 8
    fix = next(i for i, row in enumerate(rows) if row.startswith(" " * 24 + "→ ulimit"))
    assert rows[fix + 1].startswith(" " * 26 + "ulimit") or rows[fix + 1].startswith(" " * 26)
    assert lines[-1].rstrip() == "1 ok, 1 warn, 1 fail: fix this before training."


def test_colours_on_a_terminal():
    console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO())
    doctor.show(SHOWN, console)
    text = console.file.getvalue()
    assert [code in text for code in ("\x1b[32mok", "\x1b[33mwarn", "\x1b[1;31mfail")] == [True] * 3


def test_plain_lines_elsewhere():
    console = Console(width=40, file=io.StringIO())
    doctor.show(SHOWN, console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 + 1 + 3 + 2 + 2  # titles, room between them, findings, fixes, the end
    assert lines[1] == "  ok    host memory     22.2 GiB of 23.5 GiB available"
    assert lines[3].strip() == "→ " + ("ulimit -l unlimited " * 9).strip()


@pytest.mark.soak
def test_a_real_process_is_done_in_time_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "trunkline", "doctor", "--disk", str(tmp_path)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - start
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"disk speed      writes \d+\.\d\d GB/s, reads \d+\.\d\d GB/s", done.stdout)
    assert list(tmp_path.iterdir()) == []
    assert seconds < 30  # 5 on a machine of its own; tests share theirs
