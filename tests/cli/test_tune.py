"""`trunkline tune`: a profile that plans find, a picture beside it, and the text on the way."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from distributed.processes import outcomes, start
from distributed.processes import run as run_ranks
from rich.console import Console

from trunkline.cli import app as cli
from trunkline.cli import tune
from trunkline.plan import hardware, host_overhead, machine_survey, measurements, sweet_spot
from trunkline.plan.hardware.hardware_profile import THIS_MACHINE
from trunkline.plan.machine_survey import MachineSurvey

RANKS = 2


class Disk:
    """Disk of known speed, and a known rate of work beside it."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        pass

    def run(self, directions: tuple[str, ...], work: object, seconds: float) -> dict[str, float]:
        return {"read": 3e9, "write": 2e9, "work": 100.0 - 10 * len(directions)}


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Replace every measurement by a known figure."""
    patch.setattr("trunkline.attention.kernels.processor_has", lambda dtype: True)  # or bf16 has no attention
    patch.setattr(measurements, "matmul", lambda device, dtype, m, n, k: 1e9 * m + 0.123456)
    patch.setattr(measurements, "memory", lambda device, kind, nbytes: 2e10)
    patch.setattr(measurements, "attention", lambda *_, causal: (5e10, 4e10))
    patch.setattr(measurements, "DiskMover", Disk)
    patch.setattr(measurements, "collective", lambda group, device, nbytes: {"bandwidth": 1.5e9, "latency": 2e-4})
    patch.setattr(measurements, "kernel_seconds", lambda device: 1e-6)
    patch.setattr(host_overhead, "host_seconds", lambda machine, device: machine.kernel_seconds * 7)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Nothing is measured, and this user has settings of their own."""
    pretend(monkeypatch)
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD", "LOCAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["tune", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_measured_machine_is_a_profile_with_a_name(quick, capsys, tmp_path):
    assert THIS_MACHINE not in hardware.names()
    with pytest.raises(
        ValueError, match=r"^hardware='this-machine': .* not been measured yet .*: run `trunkline tune`"
    ):
        hardware.load("this-machine")

    code, out, err = run(capsys, "--device", "cpu", "--disk", tmp_path)
    assert (code, err) == (0, "")
    assert hardware.names()[-1] == THIS_MACHINE
    assert sorted(path.name for path in (tmp_path / "config/trunkline").iterdir()) == [
        "this-machine-sweet-spot.png", "this-machine.toml",
    ]  # fmt: skip
    assert "Wrote config/trunkline/this-machine.toml: plans take it as hardware='this-machine'.\n" in out

    machine = hardware.load("this-machine")
    assert (machine.name, machine.device_type, machine.devices_per_node) == ("this-machine", "cpu", 1)
    assert (machine.intra, machine.inter, machine.link) == (None, None, None)
    assert machine.disk.model_dump() == {"read": 3e9, "write": 2e9, "both_read": 3e9, "both_write": 2e9}
    assert machine.interference["fetch"] == pytest.approx(0.1)
    assert (machine.kernel_seconds, machine.host_seconds) == (1e-6, 7e-6)
    assert machine.attention_rate("backward", torch.float32, 128, 4_096, 4_096, causal=True) == 4e10
    # The peak is the fastest product; no figure has more digits than it is worth.
    largest = max(row[-1] for row in machine.figures["matmul"]["fp32"]["points"])
    assert machine.peak_rate(torch.float32) == largest
    assert largest == 1e9 * max(machine_survey.MATMUL)
    assert all("measured" in source for _, source, _ in machine.sources())

    over = tmp_path / "mine.toml"
    over.write_text('base = "this-machine"\ntitle = "with a fast disk"\n')
    assert hardware.load(str(over)).kernel_seconds == 1e-6


def test_the_figures_are_printed(quick, capsys):
    _, out, _ = run(capsys, "--output", "here.toml", "--head-dims", "64", "--device", "cpu")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "attention forward, head dim 64 50 GFLOP/s 50 GFLOP/s",
        "attention backward, head dim 64 40 GFLOP/s 40 GFLOP/s",
        f"matrix products {'4.1 TFLOP/s ' * 2}".strip(),
        "copy 20 GB/s 20 GB/s",
        "disk to host memory 3 GB/s 3 GB/s",
        "host memory to disk 2 GB/s 2 GB/s",
        "within a node not measured: torchrun --nproc-per-node N -m trunkline tune",
        "least time on the device 1 µs",
        "time of the host to issue it 7 µs",
        "Keys and values of Llama-3-8B from disk, while attention computes",
        "forward hidden at every size from 1K tokens",
        "Wrote here.toml: plans take it as hardware='here.toml'.",
        "Drew here-sweet-spot.png",
    ):
        assert line in lines, (line, out)
    assert "head dim 128" not in out
    # Not on a terminal: a line for each task, nothing that moves.
    measured = [line for line in lines if line.endswith(" s") and "attention in" in line]
    assert len(measured) == 2
    assert "\x1b" not in out


def test_a_terminal_shows_a_progress_bar(quick, monkeypatch):
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=100)
    survey = MachineSurvey(torch.device("cpu"), Path.cwd(), (64,))
    tune._measure(survey, terminal)
    count = len(survey.tasks)
    assert f"{count}/{count}" in written.getvalue()
    for task in survey.tasks:
        assert f"  {task} " in written.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "profile.json"], "--output profile.json: give the name of a .toml file."),
        (["--output", "TAKEN.toml"], "no file can be written there"),
        (["--disk", "nowhere"], "disk='nowhere': give a folder that exists and can be written to."),
        (["--device", "tpu"], "--device tpu: give auto, cpu or cuda."),
        (["--head-dims", "64,wide"], "--head-dims 64,wide: give head dims of models with commas between them"),
        (["--head-dims", "0"], "--head-dims 0: give head dims"),
        (["--hardware", "h900"], "hardware='h900': no such profile; there are h"),
        (["--hardware", "h200", "--output", "x.toml"], "--output x.toml: give the name of a .png file."),
        (["--hardware", "h200", "--device", "cpu"], "--hardware measures nothing: leave --disk, --device"),
        (["--hardware", "this-machine"], "run `trunkline tune` first"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(quick, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(tune, "_measure", lambda *_: pytest.fail("measured"))
    Path("TAKEN.toml").mkdir()
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_known_profile_is_drawn_without_measuring(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "_measure", lambda *_: pytest.fail("measured"))
    code, out, _ = run(capsys, "--hardware", "a100-80g")
    assert code == 0
    assert "Keys and values of Llama-3-8B from host memory, while attention computes\n  forward   hidden from" in out
    assert Path("a100-80g-sweet-spot.png").read_bytes().startswith(b"\x89PNG")
    assert run(capsys, "--hardware", "a100-80g", "--output", "folder/x.png")[0] == 0
    assert Path("folder/x.png").is_file()


def test_without_matplotlib_the_profile_is_still_written(quick, capsys, monkeypatch):
    monkeypatch.setattr(sweet_spot, "can_draw", lambda: False)
    code, out, _ = run(capsys)
    assert code == 0
    assert "No picture: matplotlib is not installed. pip install 'trunkline[report]'" in out
    assert hardware.load("this-machine").kernel_seconds == 1e-6
    code, out, err = run(capsys, "--hardware", "h200")
    assert code == 2
    assert "hidden from" in out
    assert "pip install 'trunkline[report]'" in err


def test_a_profile_is_replaced_as_a_whole_or_not_at_all(quick, capsys, monkeypatch):
    run(capsys, "--output", "here.toml")
    before = Path("here.toml").read_text()

    def stop(device: torch.device) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(measurements, "kernel_seconds", stop)
    code, _, err = run(capsys, "--output", "here.toml")
    assert (code, err) == (130, "Interrupted; nothing was written.\n")
    assert Path("here.toml").read_text() == before
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["here-sweet-spot.png", "here.toml"]


@pytest.mark.soak
def test_a_real_machine_is_measured(monkeypatch, capsys, tmp_path):
    """Measure this machine, at few sizes."""
    for name, sizes in (("MATMUL", (64, 128)), ("MEMORY", (2**16, 2**22)), ("ATTENTION", ((128, 128), (128, 256)))):
        monkeypatch.setattr(machine_survey, name, sizes)
    path = tmp_path / "here.toml"
    code, _, err = run(capsys, "--output", path, "--disk", tmp_path, "--head-dims", "32", "--device", "cpu")
    assert (code, err) == (0, "")
    machine = hardware.load(str(path))
    assert 1e8 < machine.matmul_rate(torch.float32, 128, 128, 128) < 1e14
    assert 1e7 < machine.attention_rate("backward", torch.float32, 32, 128, 128, causal=True) < 1e14
    assert 1e8 < machine.memory_rate("copy", 2**22) < 1e13
    assert 1e6 < machine.disk.read < 1e12
    # Python and PyTorch take microseconds for an operator, and more beside other programs.
    assert 1e-7 < machine.host_seconds < 1e-3
    assert path.with_name("here-sweet-spot.png").is_file()


def measured_together(folder: str) -> tuple[int, str]:
    patch = pytest.MonkeyPatch()
    pretend(patch)
    patch.setenv("XDG_CONFIG_HOME", folder)
    written = io.StringIO()
    sys.stdout = written
    return cli.run(["tune", "--device", "cpu", "--head-dims", "64"]), written.getvalue()


def test_ranks_measure_together_and_the_first_writes(tmp_path):
    (code, out), (other_code, other_out) = run_ranks(RANKS, measured_together, str(tmp_path))
    assert (code, other_code, other_out) == (0, 0, "")
    assert "within a node 1.5 GB/s a device, the smallest takes 200 µs" in " ".join(out.split())
    text = (tmp_path / "trunkline/this-machine.toml").read_text()
    machine = hardware.parse(text)
    assert machine.devices_per_node == RANKS
    assert machine.memory_bytes == machine.host_bytes // RANKS
    assert machine.intra.model_dump() == {"bandwidth": 1.5e9, "latency": 2e-4}
    assert machine.inter is None
    # What the node has is what its ranks had at the same time.
    assert (machine.disk.read, machine.host_bandwidth) == (3e9 * RANKS, 2e10 * RANKS)


def fails_on_the_second(folder: str) -> tuple[int, str]:
    patch = pytest.MonkeyPatch()
    pretend(patch)
    if os.environ["RANK"] == "1":
        patch.setattr(
            measurements, "matmul", lambda *_: (_ for _ in ()).throw(ValueError("this rank has no such speed"))
        )
    sys.stderr = written = io.StringIO()
    return cli.run(["tune", "--output", f"{folder}/here.toml"]), written.getvalue()


def test_a_rank_that_fails_takes_the_others_down_with_its_reason(tmp_path):
    (first_ended, first), (second_ended, second) = outcomes(start(RANKS, fails_on_the_second, str(tmp_path)))
    assert not second_ended
    assert second[:2] == ("ValueError", "this rank has no such speed")
    assert first_ended
    assert first == (1, "")  # the second says why
    assert not (tmp_path / "here.toml").exists()
