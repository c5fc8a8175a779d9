import copy
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from trunkline.plan import hardware
from trunkline.plan.hardware import Hardware, figure, points
from trunkline.plan.hardware.interpolation import RateCurve, RateSamples

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = [name for name in hardware.names() if name != "this-machine"]  # which only some developers have
PRODUCTS = ("a100-40g", "a100-80g", "h100-sxm", "h100-pcie", "h200", "b200", "gh200", "l40s", "rtx-4090", "rtx-5090")


def measured(value: float) -> dict:
    return figure(value, "measured here", "2026-11-30")


def sampled(*rows: list[float]) -> dict:
    return points(rows, "measured here", "2026-11-30")


def of_a_cpu() -> dict:
    """Return the figures that a measurement of a CPU writes."""
    attention = {
        dtype: {"64": sampled([1024, 1024, 0, rate], [1024, 1024, 1, rate / 2], [8192, 8192, 0, 2 * rate])}
        for dtype, rate in (("fp32", 1e11), ("bf16", 4e11))
    }
    return {
        "title": "two cores",
        "device_type": "cpu",
        "memory_bytes": measured(16 * 2**30),
        "devices_per_node": measured(1),
        "host_bytes": measured(16 * 2**30),
        "host_bandwidth": measured(2e10),
        "disk": {name: measured(1e9) for name in ("read", "write", "both_read", "both_write")},
        "intra": {"bandwidth": measured(1e9), "latency": measured(1e-4)},
        "inter": {"bandwidth": measured(1e9), "latency": measured(1e-4)},
        "kernel_seconds": measured(1e-6),
        "host_seconds": measured(1e-5),
        "interference": {"fetch": measured(0.25)},
        "peak": {"fp32": measured(2e11), "bf16": measured(8e11)},
        "matmul": {
            "fp32": sampled([128, 128, 128, 5e10], [4096, 4096, 4096, 1.5e11]),
            "bf16": sampled([128, 128, 128, 1e11], [4096, 4096, 4096, 6e11]),
        },
        "attention": {"default": "flash", "flash": {"forward": attention, "backward": attention}},
        "memory": {
            kind: sampled([2**20, 4e10], [2**30, 1e10]) for kind in ("copy", "pointwise", "transcendental", "reduction")
        },
    }


# Bundled profiles


@pytest.mark.parametrize("name", NAMES)
def test_bundled_profiles_are_complete_and_plausible(name: str) -> None:
    kernels = [key for key in hardware.load(name).figures["attention"] if key != "default"]
    for kernel in kernels:
        device = hardware.load(name, attention=kernel)
        assert (device.name, device.attention_kernel, device.device_type) == (name, kernel, "cuda")
        assert 20e9 < device.memory_bytes < 300e9
        link = device.link
        assert link is not None
        assert link.both_to_device <= link.to_device < device.host_bandwidth * 1.1
        assert link.both_to_host <= link.to_host
        assert device.disk.both_read <= device.disk.read
        assert device.inter.bandwidth <= device.intra.bandwidth
        # Cards that hold more than their nominal clock reach 13% above the data sheet; nothing may be above that.
        for dtype in (BF16, FP16, FP32):
            assert 0.4 < device.matmul_rate(dtype, 8192, 8192, 8192) / device.peak_rate(dtype) < 1.14
        for causal, head_dim, direction in itertools.product((True, False), (64, 128), ("forward", "backward")):
            rate = device.attention_rate(direction, BF16, head_dim, 16384, 16384, causal=causal)
            assert 0.08 * device.peak_rate(BF16) < rate < 0.95 * device.peak_rate(BF16)
        for kind in ("copy", "pointwise", "transcendental", "reduction"):
            small, large = (device.memory_rate(kind, nbytes) for nbytes in (2**18, 2**30))
            assert 5 * small < large < 8e12


def test_profiles_of_common_accelerators_come_along() -> None:
    assert set(PRODUCTS) | {"mi300x", "a100-80g-pcie5"} == set(NAMES)
    assert {name for name in NAMES if hardware.load(name).hypothetical} == {"a100-80g-pcie5"}


@pytest.mark.parametrize(
    ("name", "size", "tera"),
    [
        ("a100-80g", (1024, 10240, 5120), 271.2),
        ("h100-sxm", (2048, 2048, 13312), 794.5),
        ("h200", (8192, 8192, 8192), 797.5),
        ("b200", (16384, 16384, 16384), 1745),
        ("gh200", (1024, 15360, 4096), 828.6),
    ],
)
def test_products_reach_what_was_published(name: str, size: tuple[int, int, int], tera: float) -> None:
    assert hardware.load(name).matmul_rate(BF16, *size) == pytest.approx(tera * 1e12, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "kernel", "direction", "length", "causal", "tera"),
    [
        ("a100-80g", None, "forward", 4096, False, 225),
        ("h100-sxm", None, "forward", 32768, True, 355),
        ("h100-sxm", None, "backward", 32768, True, 337),
        ("h100-sxm", "fa3", "forward", 16384, True, 616),
        ("h100-sxm", "fa3", "forward", 16384, False, 648),
        ("h200", "cudnn", "backward", 8192, True, 526),
        ("b200", "fa4", "forward", 8192, True, 1418.1),
        ("b200", "fa4", "backward", 8192, False, 1359.8),
        ("b200", None, "forward", 131072, True, 411),
    ],
)
def test_attention_reaches_what_was_published(
    name: str, kernel: str | None, direction: str, length: int, causal: bool, tera: float
) -> None:
    device = hardware.load(name, attention=kernel)
    assert device.attention_rate(direction, BF16, 128, length, length, causal=causal) == tera * 1e12


def test_a_busy_link_is_slower_in_each_direction() -> None:
    link = hardware.load("a100-80g").link
    assert (link.to_device, link.both_to_device, link.devices_per_uplink) == (26e9, 18.6e9, 2)
    chip = hardware.load("gh200").link
    assert (chip.to_device, chip.to_host, chip.both_to_host) == (346e9, 297e9, 184e9)


def test_the_default_attention_kernel_is_pytorchs_own() -> None:
    assert {hardware.load(name).attention_kernel for name in PRODUCTS} == {"fa2"}
    rates = [
        hardware.load("h100-sxm", attention=kernel).attention_rate("forward", BF16, 128, 16384, 16384, causal=True)
        for kernel in (None, "fa3")
    ]
    assert rates[1] > 1.5 * rates[0]


def test_an_unknown_attention_kernel_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"attention='fa5': .*'h100-sxm' has figures of fa2, fa3, fa4, cudnn"):
        hardware.load("h100-sxm", attention="fa5")


def test_every_figure_has_its_source_and_date() -> None:
    for name in NAMES:
        device = hardware.load(name)
        listed = {key: (source, date) for key, source, date in device.sources()}
        assert {"link.to_device", "host_seconds", "matmul.bf16"} <= set(listed)
        assert all(source.strip() and "2020" <= date <= "2026-11-30" for source, date in listed.values())
    sources = {key: source for key, source, _ in hardware.load("h100-pcie").sources()}
    assert "derived: scaled from H100 SXM by peak" in sources["matmul.bf16"]
    assert sources["host_bandwidth"].startswith("as h100-sxm: as h200: derived: ")


# Interpolation


def test_a_rate_between_two_samples_is_their_geometric_mean() -> None:
    samples = RateSamples([(64, 64, 64, 1e12), (1024, 1024, 1024, 4e12)])
    assert samples.rate(256, 256, 256) == pytest.approx(2e12)
    assert samples.rate(64, 64, 64) == 1e12
    # One octave from the first and three from the second: weights 3^4 to 1.
    near = math.exp((81 * math.log(1e12) + math.log(4e12)) / 82)
    assert samples.rate(128, 128, 128) == pytest.approx(near)


def test_rates_beyond_the_samples_stay() -> None:
    samples = RateSamples([(64, 64, 1e12), (1024, 1024, 4e12)])
    assert samples.rate(2**30, 1024) == samples.rate(2**40, 2**20) == 4e12
    assert samples.rate(1, 0) == 1e12
    curve = RateCurve([(2**30, 8e12), (2**10, 2e12)])
    assert [curve.rate(size) for size in (1, 2**10, 2**40)] == pytest.approx([2e12, 2e12, 8e12])
    assert curve.rate(2**20) == pytest.approx(4e12)


def test_causal_attention_beyond_the_samples_comes_nearer_to_all_pairs() -> None:
    device = hardware.load("h100-sxm", attention="fa3")
    causal, whole = (
        [device.attention_rate("forward", BF16, 128, 16_384 * n, 16_384 * n, causal=flag) for n in (1, 2, 64)]
        for flag in (True, False)
    )
    assert whole == [648e12] * 3
    # A square of n times the length has n^2 times the pairs, and n times what its diagonal costs beside them.
    beside = [n * n * (1 / a - 1 / b) for n, a, b in zip((1, 2, 64), causal, whole, strict=True)]
    assert beside == pytest.approx([n * (1 / 616e12 - 1 / 648e12) for n in (1, 2, 64)], rel=1e-6)


def test_rates_have_no_jumps() -> None:
    device = hardware.load("h100-sxm")
    sizes = [round(256 * 1.01**step) for step in range(480)]  # up to 30,000 in steps of 1%
    rates = [device.matmul_rate(BF16, size, 4096, 4096) for size in sizes]
    assert all(abs(math.log(b / a)) < 0.05 for a, b in itertools.pairwise(rates))
    lengths = [device.attention_rate("forward", BF16, 128, 16384, size, causal=False) for size in sizes]
    assert all(abs(math.log(b / a)) < 0.05 for a, b in itertools.pairwise(lengths))


def test_small_and_thin_products_are_slow() -> None:
    device = hardware.load("a100-80g")
    whole = device.matmul_rate(BF16, 16384, 4096, 4096)
    assert device.matmul_rate(BF16, 16384, 16, 4096) < 0.15 * whole  # an adapter of rank 16
    assert device.matmul_rate(BF16, 128, 4096, 4096) < 0.8 * whole
    assert device.matmul_rate(BF16, 64, 64, 64) < 0.02 * whole


# Dtypes and head dims without samples


def test_head_dims_between_those_known_take_time_in_proportion() -> None:
    device = hardware.load("h100-sxm", attention="fa3")

    def picoseconds(head_dim: int) -> float:
        return 1e12 * head_dim / device.attention_rate("forward", BF16, head_dim, 16384, 16384, causal=False)

    assert picoseconds(96) == pytest.approx((picoseconds(64) + picoseconds(128)) / 2)
    assert picoseconds(80) == pytest.approx(picoseconds(96))  # padded
    assert picoseconds(192) == pytest.approx((picoseconds(128) + picoseconds(256)) / 2)
    assert picoseconds(32) == pytest.approx(picoseconds(64))  # below all of them the time stays
    assert picoseconds(512) == pytest.approx(2 * picoseconds(256))  # above all of them the rate


def test_half_precision_counts_as_bf16_and_fp32_by_peak() -> None:
    device = hardware.load("h200", attention="fa3")
    assert device.matmul_rate(FP16, 4096, 4096, 4096) == device.matmul_rate(BF16, 4096, 4096, 4096)
    assert device.matmul_rate(FP32, 4096, 4096, 4096) == pytest.approx(51.9e12)  # measured
    rates = [device.attention_rate("backward", dtype, 128, 8192, 8192, causal=True) for dtype in (FP32, BF16)]
    assert rates[0] / rates[1] == pytest.approx(67 / 989)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    device = hardware.load("a100-80g")
    for ask in (
        lambda: device.peak_rate(FP64),
        lambda: device.matmul_rate(FP64, 8, 8, 8),
        lambda: device.attention_rate("forward", FP64, 64, 8, 8, causal=True),
        lambda: device.peak_rate(torch.int8),
    ):
        with pytest.raises(
            ValueError, match=r"'a100-80g' has no figures of .* for torch\.(float64|int8), only for bf16"
        ):
            ask()


def test_no_rate_of_a_cpu_follows_from_its_peak() -> None:
    figures = of_a_cpu()
    del figures["matmul"]["fp32"]
    with pytest.raises(ValueError, match=r"no figures of matmul for torch\.float32, only for bf16"):
        Hardware.from_figures(figures).matmul_rate(FP32, 8, 8, 8)


def test_rates_are_computed_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Hardware.from_figures(of_a_cpu())
    first = device.matmul_rate(BF16, 100, 200, 300), device.attention_rate("forward", FP32, 64, 9, 9, causal=True)
    monkeypatch.setattr(RateSamples, "_log_rate", lambda *_: pytest.fail("computed again"))
    again = device.matmul_rate(BF16, 100, 200, 300), device.attention_rate("forward", FP32, 64, 9, 9, causal=True)
    assert again == first


# Profiles of one's own


def test_a_cpu_has_no_link_and_samples_of_its_own() -> None:
    device = Hardware.from_figures(of_a_cpu(), name="here")
    assert (device.link, device.device_type, device.attention_kernel) == (None, "cpu", "flash")
    assert device.interference == {"fetch": 0.25}
    assert device.matmul_rate(FP32, 4096, 4096, 4096) == 1.5e11
    assert device.matmul_rate(BF16, 4096, 4096, 4096) == 6e11
    assert device.attention_rate("backward", FP32, 64, 1024, 1024, causal=True) == 5e10
    assert device.attention_rate("backward", FP32, 64, 8192, 8192, causal=False) == 2e11
    assert device.memory_rate("copy", 2**20) == 4e10


@pytest.mark.parametrize("name", ["here", *NAMES])
def test_a_written_profile_is_read_back_unchanged(name: str, tmp_path: Path) -> None:
    device = Hardware.from_figures(of_a_cpu(), name="here") if name == "here" else hardware.load(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(hardware.to_toml(device.figures), encoding="utf-8")
    again = hardware.load(str(path))
    assert again.figures == device.figures
    assert repr(again) == repr(device)
    assert hardware.parse(path.read_text(encoding="utf-8"), name=name).sources() == device.sources()


def test_a_profile_with_a_base_holds_only_the_differences(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        hardware.to_toml(
            {
                "base": "h200",
                "host_bytes": measured(128e9),
                "link": {"to_device": measured(50e9)},
                "attention": {"default": "fa3"},
            }
        ),
        encoding="utf-8",
    )
    ours, base = hardware.load(str(path)), hardware.load("h200", attention="fa3")
    assert (ours.name, ours.title, ours.attention_kernel) == ("ours", "NVIDIA H200 141 GB SXM, PCIe 5, changed", "fa3")
    assert (ours.host_bytes, ours.link.to_device) == (128_000_000_000, 50e9)
    assert (ours.link.to_host, ours.disk, ours.intra) == (base.link.to_host, base.disk, base.intra)
    assert ours.matmul_rate(BF16, 5000, 5000, 5000) == base.matmul_rate(BF16, 5000, 5000, 5000)
    sources = {key: source for key, source, _ in ours.sources()}
    assert sources["link.to_device"] == "measured here"
    assert sources["link.to_host"].startswith("as h200: ")


def test_a_hypothetical_link_changes_nothing_else() -> None:
    real, asked = hardware.load("a100-80g"), hardware.load("a100-80g-pcie5")
    assert (real.hypothetical, asked.hypothetical) == (False, True)
    assert asked.link.to_device == hardware.load("h100-sxm").link.to_device > 2 * real.link.to_device
    assert asked.link.devices_per_uplink == real.link.devices_per_uplink
    assert (asked.memory_bytes, asked.disk, asked.intra) == (real.memory_bytes, real.disk, real.intra)
    assert Hardware.from_figures({"base": "a100-80g-pcie5"}).hypothetical


def test_an_unknown_device_is_refused_with_the_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"hardware='H100': no such profile; there are h100-(sxm|pcie), h100-"):
        hardware.load("H100")
    with pytest.raises(ValueError, match=r"there are h100-(sxm|pcie), h100-(sxm|pcie), "):
        hardware.load("nvidia-h100")
    with pytest.raises(ValueError, match=r"base='rtx4090': no such profile; there are rtx-4090, rtx-5090, "):
        Hardware.from_figures({"base": "rtx4090"})


def changed(keys: str, value: object) -> dict:
    """The figures of a CPU with one entry replaced, or taken away where the value is None."""
    figures = copy.deepcopy(of_a_cpu())
    *tables, last = keys.split("/")
    table = figures
    for key in tables:
        table = table.setdefault(key, {})
    if value is None:
        del table[last]
    else:
        table[last] = value
    return figures


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("title", None, "title is missing: give a name of the hardware"),
        ("title", 5, "title: input should be a valid string, not 5"),
        ("hypothetical", 1, "hypothetical: input should be a valid boolean, not 1"),
        ("device_type", "tpu", "device_type: input should be 'cuda' or 'cpu', not 'tpu'"),
        ("device_type", "cuda", "link is missing: give the speeds between host memory and device"),
        ("memory_bytes", None, r"memory_bytes is missing: give \{ value = bytes, source"),
        ("memory_bytes", 5, r"memory_bytes: give \{ value = bytes, .*\} and no other keys, not 5"),
        ("memory_bytes", measured(0.5), r"memory_bytes: value must be a positive whole number \(bytes\), not 0\.5"),
        ("host_seconds", measured(-1), r"host_seconds: value must be a positive number \(seconds\), not -1"),
        ("host_seconds", measured(math.nan), "host_seconds: value must be"),
        ("host_seconds", measured(True), "host_seconds: value must be"),
        ("disk/write", None, r"disk\.write is missing: give \{ value = bytes/s"),
        ("inter/latency", None, r"inter\.latency is missing: give \{ value = seconds"),
        ("disk/wrote", measured(1), r"disk\.wrote is not a figure .* give one of both_read, both_write, read, write"),
        (
            "speed",
            measured(1),
            "speed is not a figure of a profile; .* give one of attention, device_type, devices_per",
        ),
        (
            "link",
            {
                name: measured(1)
                for name in ("to_device", "to_host", "both_to_device", "both_to_host", "devices_per_uplink")
            },
            r"link must be left out where device_type is \"cpu\"",
        ),
        (
            "interference/fetch",
            measured(1.0),
            r"interference\.fetch: value must be .* at least 0 and below 1 \(share\)",
        ),
        ("peak/fp8", measured(1), r"peak\.fp8: input should be 'bf16', 'fp16', 'fp32' or 'fp64', not 'fp8'"),
        ("peak/bf16", {"value": 1e12}, r"peak\.bf16: give .* and no other keys, not \{'value': 1"),
        ("peak/bf16", {**measured(1e12), "source": " "}, r"peak\.bf16: source must say where the figure comes from"),
        (
            "peak/bf16",
            {**measured(1e12), "date": "last week"},
            r"peak\.bf16: date must be text like .* not 'last week'",
        ),
        ("matmul", {}, "matmul(: dictionary should have at least 1 item| is missing)"),
        ("matmul", None, "matmul is missing: give a table of figures"),
        ("matmul/bf16", measured(1e12), r"matmul\.bf16: give \{ points = \[\[m, n, k, rate\], …\]"),
        ("matmul/bf16", sampled(), r"matmul\.bf16: points must be a list of \[m, n, k, rate\]"),
        ("matmul/bf16", sampled([1, 2, 3]), r"matmul\.bf16: points must be .*\[m, n, k, rate\], .*; not \[1, 2, 3\]"),
        ("matmul/bf16", sampled([1, 2.5, 3, 4.0]), r"matmul\.bf16: points must be .*whole sizes .*; not \[1, 2\.5"),
        ("memory/copy", sampled([1, 0]), r"memory\.copy: points must be a list of \[bytes, rate\]"),
        ("memory/copy", None, r"memory\.copy is missing: give \{ points = \[\[bytes, rate\]"),
        ("attention/default", "fa9", r"attention\.default must be one of flash, not 'fa9'"),
        ("attention/flash/backward", None, r"attention\.flash\.backward is missing"),
        (
            "attention/flash/forward/bf16/64",
            sampled([8, 8, 1, 1e9]),
            r"attention\.flash\.forward\.bf16\.64: give at least one causal and one other point",
        ),
        ("attention/flash/forward/bf16/64", sampled([8, 8, 2, 1e9]), r"attention.*64: points must be .*not \[8, 8, 2"),
        (
            "attention/flash/forward/bf16/wide",
            sampled([8, 8, 1, 1e9]),
            r"attention.*wide: input should be a valid integer",
        ),
    ],
)
def test_a_malformed_profile_is_refused_by_file_and_key(keys: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^here: {message}"):
        Hardware.from_figures(changed(keys, value), where="here")
    if "nan" not in repr(value):
        path = tmp_path / "own.toml"
        path.write_text(hardware.to_toml(changed(keys, value)), encoding="utf-8")
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {message}"):
            hardware.load(str(path))


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.toml", tmp_path / "broken.toml"
    broken.write_text("title = \n")
    with pytest.raises(ValueError, match=r"missing\.toml'?: cannot be read \(No such file"):
        hardware.load(str(missing))
    with pytest.raises(ValueError, match=r"broken\.toml: not TOML: "):
        hardware.load(str(broken))
