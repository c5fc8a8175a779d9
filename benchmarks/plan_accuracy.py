"""Accuracy of estimates on this machine: estimated and measured numbers of the same steps.

The script first measures the machine as `trunkline tune` does, with one process and with two at a time. It then runs
every setting, and estimates it with the measured profile. Rounds alternate over all settings. The time of a setting is
its minimum over the rounds, because other programs may share the machine. Memory is the peak of the resident set in a
separate process, minus its size before the step.

    python benchmarks/plan_accuracy.py --offload-dir /some/folder
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _alternation import write_json
from _ranks import Job
from _resident import answered, in_own_process, reset_peak, status
from _variants import DTYPES, Setup, build, tokens
from rich.console import Console
from rich.table import Table

import trunkline
from trunkline.distributed.mesh import ParallelDims
from trunkline.plan.estimate import estimate
from trunkline.plan.hardware import Hardware
from trunkline.plan.machine_survey import MachineSurvey
from trunkline.plan.simulated_sharding import ShardingSpec

_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Step to compare.

    Attributes:
        name: name in the table.
        length: tokens in the sequence.
        dtype: dtype of the model.
        ranks: number of ranks that share the sequence (Ulysses).
        settings: settings of `trunkline.stream`.
    """

    name: str
    length: int
    dtype: str = "fp32"
    ranks: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def settings_of(offload_dir: str) -> list[Setting]:
    """Return the steps to compare."""
    squeezed = {"chunk_size": 2_048, "offload_dir": offload_dir, "device_budget": "48MiB"}
    return [
        Setting("8K, chunk 1K", 8_192, settings={"chunk_size": 1_024}),
        Setting("8K, chunk 4K", 8_192, settings={"chunk_size": 4_096}),
        Setting("16K, chunk 2K", 16_384, settings={"chunk_size": 2_048}),
        Setting("16K, nothing kept", 16_384, settings={"chunk_size": 2_048, "keep": ()}),
        Setting("16K, attention and kv kept", 16_384, settings={"chunk_size": 2_048, "keep": ("attention", "kv")}),
        Setting("16K, every second input", 16_384, settings={"chunk_size": 2_048, "checkpoint_every": 2}),
        Setting("16K, bf16", 16_384, "bf16", settings={"chunk_size": 2_048}),
        Setting("16K, disk", 16_384, settings=squeezed),
        Setting("16K, disk, streamed", 16_384, settings={**squeezed, "attn_strategy": "streamed"}),
        Setting("32K, chunk 4K", 32_768, settings={"chunk_size": 4_096}),
        Setting("8K, sp 2", 8_192, ranks=2, settings={"chunk_size": 2_048}),
        Setting("16K, sp 2, nothing kept", 16_384, ranks=2, settings={"chunk_size": 2_048, "keep": ()}),
    ]


# -- in the measured processes ----------------------------------------------------------------------------------------


@cache
def _mesh() -> Any:
    return trunkline.init_mesh(sp=2) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


_models: dict[str, Any] = {}


def serve(what: str, **task: Any) -> Any:
    """Run a task on this rank."""
    mesh = _mesh()
    if what == "tune":
        survey = MachineSurvey(torch.device("cpu"), Path(task["offload_dir"]), (64,))
        for each in survey.tasks:
            survey.run(each)
        return survey.profile()
    setup, setting = Setup(**task["setup"]), Setting(**task["setting"])
    name = setting.name
    if name not in _models:
        _models[name] = trunkline.stream(build(setup, setting.dtype), mesh=mesh, **setting.settings)
        _step(_models[name], tokens(setup, 2 * int(setting.settings["chunk_size"])))
    trunkline.stats(_models[name])
    seconds = _step(_models[name], tokens(setup, setting.length))
    meters = trunkline.stats(_models[name])
    return {"seconds": seconds, "tiers": meters.peaks, "moved": {lane: t.moved for lane, t in meters.lanes.items()}}


def _step(model: Any, ids_BS: torch.Tensor) -> float:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    return time.perf_counter() - start


def _memory(setup: Setup, setting: dict[str, Any]) -> dict[str, Any]:
    """Measure the peak of the resident set during a step, minus its size before the step."""
    torch.set_num_threads(setup.threads)
    given = Setting(**setting)
    model = trunkline.stream(build(setup, given.dtype), **given.settings)
    _step(model, tokens(setup, 2 * int(given.settings["chunk_size"])))
    model.zero_grad(set_to_none=True)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    idle = status("VmRSS")
    reset_peak()
    _step(model, tokens(setup, given.length))
    return {"peak": status("VmHWM") - idle}


# -- the comparison --------------------------------------------------------------------------------------------------


def predicted(setup: Setup, setting: Setting, hardware: Hardware) -> dict[str, Any]:
    """Estimate a step."""
    found = estimate(
        build(setup, setting.dtype), setting.length, device="cpu", hardware=hardware,
        parallel_dims=ParallelDims(sp=setting.ranks), sharding_spec=ShardingSpec(zero=0), **setting.settings,
    )  # fmt: skip
    assert found.step is not None
    device = sum(nbytes for part, nbytes in found.memory["device"].items() if part != "parameters")
    return {"seconds": found.step.seconds, "tiers": found.peaks, "moved": found.moved, "extra": device}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a time is off by 15%, a peak by 5%, or a byte count at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds to measure")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--only", nargs="*", help="run only settings whose name contains one of these texts")
    parser.add_argument("--offload-dir", default=str(Path(__file__).parent),
                        help="folder for the scratch file, on a disk and not in memory")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "plan_accuracy.json",
                        help="JSON file to write")  # fmt: skip
    given = parser.parse_args(arguments)
    console = Console()
    setup = Setup(given.layers, 4_096, 0, torch.get_num_threads())
    settings = [s for s in settings_of(given.offload_dir) if not given.only or any(w in s.name for w in given.only)]
    worlds = sorted({s.ranks for s in settings})
    jobs = {world: Job(world, max(1, torch.get_num_threads() // world), serve) for world in worlds}
    profiles = {}
    for world, job in jobs.items():
        console.print(f"measuring the machine, processes at a time: {world}", style="dim")
        profiles[world] = Hardware.from_figures(
            job.do(what="tune", offload_dir=given.offload_dir)[0], name=f"this machine x {world}"
        )
    found: dict[str, dict[str, Any]] = {s.name: {"seconds": []} for s in settings}
    for number in range(given.rounds):
        shift = number % len(settings)
        for setting in settings[shift:] + settings[:shift]:
            task = {"setup": dataclasses.asdict(setup), "setting": dataclasses.asdict(setting)}
            answer = jobs[setting.ranks].do(what="step", **task)[0]
            found[setting.name]["seconds"].append(answer["seconds"])
            found[setting.name] |= {"tiers": answer["tiers"], "moved": answer["moved"]}
            console.print(f"round {number + 1}: {setting.name} {answer['seconds']:.2f} s", style="dim")
    for job in jobs.values():
        job.close()
    table = Table(header_style="bold", title=f"{given.layers} layers, E=256; minimum of {given.rounds} rounds")
    for column in ("step", "seconds", "predicted", "ratio", "peak MiB", "predicted", "ratio", "stores and lanes"):
        table.add_column(column, justify="left" if column == "step" else "right")
    wrong = 0
    for setting in settings:
        own, said = found[setting.name], predicted(setup, setting, profiles[setting.ranks])
        own["predicted"] = said
        ratio = said["seconds"] / min(own["seconds"])
        exact = own["tiers"] == said["tiers"] and {k: v for k, v in own["moved"].items() if v} == {
            k: v for k, v in said["moved"].items() if v
        }
        cells = ["", "", ""]
        if setting.ranks == 1:
            task = {"setup": dataclasses.asdict(setup), "setting": dataclasses.asdict(setting)}
            own["peak"] = in_own_process(__file__, task)["peak"]
            off = said["extra"] / own["peak"]
            cells = [f"{own['peak'] / _MIB:.1f}", f"{said['extra'] / _MIB:.1f}", f"{off:.3f}"]
            wrong += abs(off - 1) > 0.05
        wrong += abs(ratio - 1) > 0.15 or not exact
        table.add_row(
            setting.name, f"{min(own['seconds']):.2f}", f"{said['seconds']:.2f}", f"{ratio:.3f}", *cells,
            "to the byte" if exact else "[red]different",
        )  # fmt: skip
    console.print(table)
    write_json(given.out, {"settings": found, "profiles": {w: dict(p.figures) for w, p in profiles.items()}})
    console.print(f"wrote {given.out}")
    return int(wrong > 0)


if __name__ == "__main__":
    assert DTYPES
    sys.exit(0 if answered(_memory) else main())
