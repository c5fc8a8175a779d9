"""Chunk size from which attention hides the moves: against closed forms, and the bytes that the engine moves."""

import math
from pathlib import Path

import pytest
import torch
from families import build
from plan.profiles import constant

import trunkline
from trunkline.plan import hardware, sweet_spot
from trunkline.plan.sweet_spot import AttentionShape, ChunkPair, bytes_of


@pytest.mark.parametrize(("kv_heads", "devices"), [(8, 1), (32, 1), (8, 2)])
def test_the_crossing_has_a_closed_form(kv_heads: int, devices: int) -> None:
    pairs = sweet_spot.sweet_spot(constant(), AttentionShape(kv_heads=kv_heads), devices=devices)
    # Forward: 4 H D C^2 / 2e14 of attention, 4 K D C bytes at 20 GB/s; two devices share an uplink.
    assert pairs["forward"].crossing == pytest.approx(devices * kv_heads / 32 * 2e14 / 20e9, rel=1e-6)
    # Backward: 12 K D C bytes come while 8 K D C leave: at 10 and 12 GB/s until these have left, then at 20.
    leaves = 8 / 12e9
    comes = leaves + (12 - 10e9 * leaves) / 20e9
    assert pairs["backward"].crossing == pytest.approx(devices * kv_heads / 32 * comes * 1.5e14 / 10, rel=1e-6)


def test_times_are_those_of_work_and_bytes() -> None:
    pair = sweet_spot.sweet_spot(constant(), sizes=(4_096,))["forward"]
    assert pair.attention == (pytest.approx(4 * 32 * 128 * 4_096**2 / 2e14),)
    assert pair.moves == (pytest.approx(2 * 8 * 128 * 2 * 4_096 / 20e9),)


def test_multi_head_attention_on_an_a100_crosses_at_13k() -> None:
    """Multi-head attention on an A100 whose link carries 18.6 GB/s each way, at 196 TFLOP/s backward."""
    names = ("to_device", "to_host", "both_to_device", "both_to_host")
    link = {name: hardware.figure(18.6e9, "measured", "2026") for name in names}
    link["devices_per_uplink"] = hardware.figure(1, "measured", "2026")
    rows = hardware.points([[1, 1, 0, 196e12], [1, 1, 1, 196e12]], "measured", "2026")
    attention = {"default": "fa2", "fa2": {"forward": {"bf16": {"128": rows}}, "backward": {"bf16": {"128": rows}}}}
    machine = constant(link=link, attention=attention)
    assert sweet_spot.sweet_spot(machine, AttentionShape(kv_heads=32))["backward"].crossing == pytest.approx(
        13e3, rel=0.04
    )


def test_without_a_link_keys_and_values_come_from_disk() -> None:
    machine = constant("cpu")
    assert sweet_spot.route(machine) == "disk"
    pair = sweet_spot.sweet_spot(machine, sizes=(1_024,))["forward"]
    assert pair.moves == (pytest.approx(4 * 8 * 128 * 1_024 / 4e9),)


def test_half_dtypes_count_as_fp32_where_a_processor_lacks_them() -> None:
    with_bf16, without = (sweet_spot.sweet_spot(constant("cpu", dtypes=d)) for d in (("bf16", "fp32"), ("fp32",)))
    assert without == with_bf16
    with pytest.raises(ValueError, match=r"no figures of attention\.forward for torch\.float64"):
        sweet_spot.sweet_spot(constant(), AttentionShape(dtype=torch.float64))


def test_a_pair_moves_the_bytes_that_the_engine_moves() -> None:
    """The bytes of n chunks grow with n(n + 1)/2 pairs, and their second difference is a pair's."""
    tokens, step = 64, 4
    shape = AttentionShape("tiny", heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    model = build("llama", torch.float32, num_hidden_layers=1, max_position_embeddings=8_192)

    def of_a_pair(*, backward: bool) -> tuple[int, int]:
        a, b, c = (
            trunkline.estimate(
                model, n * tokens, device="cuda", chunk_size=tokens, backward=backward, attn_strategy="streamed",
                device_budget="170KiB" if backward else "66KiB", host_budget="1GiB",
            ).moved
            for n in (16, 16 + step, 16 + 2 * step)
        )  # fmt: skip
        fetched, written = ((c[lane] - 2 * b[lane] + a[lane]) // step**2 for lane in ("fetch", "stash"))
        return fetched, written

    forward, both = of_a_pair(backward=False), of_a_pair(backward=True)
    assert forward == bytes_of("forward", shape, tokens)
    assert (both[0] - forward[0], both[1] - forward[1]) == bytes_of("backward", shape, tokens)


def pair(*shares: float) -> ChunkPair:
    """Attention takes these shares of the time of moves, at 1K, 2K, 4K, …"""
    sizes = tuple(1_024 * 2**i for i in range(len(shares)))
    return ChunkPair("forward", sizes, shares, (1.0,) * len(shares))


@pytest.mark.parametrize(
    ("found", "crossing", "words"),
    [
        (pair(0.5, 2.0), 1_024 * math.sqrt(2), "hidden from 1.4K tokens"),
        (pair(0.25, 2.0, 8.0), 1_024 * 2 ** (2 / 3), "hidden from 1.6K tokens"),
        (pair(2.0, 0.5, 2.0, 8.0), 2_048 * math.sqrt(2), "hidden from 2.8K tokens"),  # not only for a while
        (pair(0.5, 0.5, 1.0), 4_096, "hidden from 4K tokens"),
        (pair(1.0, 2.0), 0, "hidden at every size from 1K tokens"),
        (pair(0.25, 0.5), math.inf, "not hidden up to 2K tokens"),
    ],
)
def test_crossings(found: ChunkPair, crossing: float, words: str) -> None:
    assert found.crossing == pytest.approx(crossing)
    assert sweet_spot.in_words(found) == words


@pytest.mark.parametrize(
    ("machine", "forward"),
    [
        (hardware.load("a100-80g"), "hidden from"),
        (constant(host_bandwidth=1e6), "not hidden"),
        (constant("cpu", kernel_seconds=10), "hidden at every size"),
    ],
)
def test_a_picture_is_drawn_with_and_without_a_crossing(
    machine: hardware.Hardware, forward: str, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    pairs = sweet_spot.sweet_spot(machine)
    assert sweet_spot.in_words(pairs["forward"]).startswith(forward)
    sweet_spot.draw(pairs, machine, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweet_spot, "can_draw", lambda: False)
    machine = constant()
    with pytest.raises(ValueError, match=r"pip install 'trunkline\[report\]'"):
        sweet_spot.draw(sweet_spot.sweet_spot(machine), machine, tmp_path / "picture.png")
