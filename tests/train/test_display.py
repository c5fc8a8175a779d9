"""Timer, step progress, plain lines and panel."""

import io
import time

import pytest
import torch
from rich.console import Console

from trunkline import Progress
from trunkline.train.display import (
    Display,
    LiveDisplay,
    RunHeader,
    StepProgress,
    clock_text,
    flops_text,
    make_display,
    sparkline,
    step_line,
    stores_text,
    typical_seconds,
)
from trunkline.train.part_timer import PARTS, PartTimer
from trunkline.train.step_metrics import StepMetrics

INFO = RunHeader(headline=["head [1]"], steps=5, log_every=2, num_micro_batches=1, attention_share=0.5)


LANES = {"fetch": {"bytes": 3e9, "gb_per_second": 1.5, "exposed_seconds": 0.1},
         "stash": {"bytes": 1e9, "gb_per_second": 0.5, "exposed_seconds": 0.15}}  # fmt: skip
IDLE = {lane: {"bytes": 0, "gb_per_second": 0.0, "exposed_seconds": 0.0} for lane in LANES}


def metrics(step: int, loss: float = 2.0, seconds: float = 10.0, lanes=IDLE) -> StepMetrics:
    parts = {**dict.fromkeys(PARTS, 0.0), "forward": seconds * 0.25, "backward": seconds * 0.75}
    return StepMetrics(step, loss, 1.5, 3e-4, 1000, 1000 / seconds, 10**12, 10**11, 3 * 2**30, parts,
                       {"device": 2**30, "host": 0, "disk": 2**32}, lanes)  # fmt: skip


def walk(num_layers: int = 3, num_chunks: int = 4, num_tiles: int = 2):
    """Positions in the order the engine reports them."""
    yield from (Progress("embed", -1, num_layers, c, num_chunks) for c in range(num_chunks))
    yield from (Progress("forward", i, num_layers, c, num_chunks) for i in range(num_layers) for c in range(num_chunks))
    yield from (Progress("head", -1, num_layers, t, num_tiles) for t in range(num_tiles))
    for layer in reversed(range(-1, num_layers)):
        yield from (Progress("backward", layer, num_layers, c, num_chunks) for c in reversed(range(num_chunks)))


def test_timer_is_always_in_one_part():
    clock = PartTimer(torch.device("cpu"))
    begin = time.perf_counter()
    for part in ["data", "forward", "forward", "backward", "forward"]:
        clock.enter(part)
        time.sleep(0.02)
    seconds = clock.stop()
    total = time.perf_counter() - begin
    assert tuple(seconds) == PARTS
    assert sum(seconds.values()) == pytest.approx(total, abs=0.005)
    assert seconds["forward"] >= 0.06
    assert seconds["data"] >= 0.02
    assert seconds["backward"] >= 0.02
    assert (seconds["embed"], seconds["head"], seconds["optimizer"]) == (0.0, 0.0, 0.0)
    clock.enter("head")
    assert clock.stop()["forward"] == 0.0


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_estimate_rises_from_nothing_to_all(num_micro_batches):
    estimate = StepProgress(num_micro_batches, attention_share=0.7)
    estimate.start_step(None)
    seen = []
    for index in range(num_micro_batches):
        estimate.micro_batch = index
        for position in walk():
            estimate.update(position)
            seen.append(estimate.fraction)
    assert seen[0] == 0.0
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    estimate.start_step(None)
    assert estimate.fraction == 0.0


def test_estimate_follows_measured_shares_and_causal_cost():
    estimate = StepProgress(1, attention_share=1.0)
    estimate.start_step({**dict.fromkeys(PARTS, 0.0), "forward": 20.0, "backward": 80.0})
    estimate.update(Progress("forward", 0, 1, 2, 4))
    # Half of the tokens are a quarter of the pairs.
    assert estimate.fraction == pytest.approx(0.2 / 4)
    estimate.update(Progress("backward", 0, 1, 1, 4))
    # The upper half of the chunks, done first in a backward sweep, is three quarters of the pairs.
    assert estimate.fraction == pytest.approx(0.2 + 0.8 * 3 / 4)


def plain() -> tuple[Display, io.StringIO]:
    stream = io.StringIO()
    display = make_display(Console(file=stream))
    assert isinstance(display, Display)
    return display, stream


def test_plain_lines_are_one_every_log_every_steps():
    display, stream = plain()
    display.note("reading")
    display.begin(INFO)
    for step in range(1, 6):
        display.micro_batch(0)
        for position in walk():
            display.progress(position)
        display.step(metrics(step, loss=4.0 / step))
    display.end()
    assert stream.getvalue().splitlines() == [
        "reading",
        "head [1]",
        "step 1/5  loss 4.0000  grad norm 1.500  lr 3.00e-04  100 tokens/s  10.0 s  eta 0:40",
        "step 2/5  loss 2.0000  grad norm 1.500  lr 3.00e-04  100 tokens/s  10.0 s  eta 0:30",
        "step 4/5  loss 1.0000  grad norm 1.500  lr 3.00e-04  100 tokens/s  10.0 s  eta 0:10",
        "step 5/5  loss 0.8000  grad norm 1.500  lr 3.00e-04  100 tokens/s  10.0 s  eta 0:00",
    ]


def panel_text(display: LiveDisplay, width: int) -> str:
    # On a console of its own: the live one adds the codes that move its cursor.
    console = Console(file=io.StringIO(), width=width)
    console.print(display._render())
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_panel_shows_the_position_of_the_sweep(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    display = make_display(console)
    assert isinstance(display, LiveDisplay)
    display.begin(RunHeader(["head"], steps=5, log_every=1, num_micro_batches=2, attention_share=0.5))
    display.micro_batch(1)
    display.progress(Progress("backward", 2, 3, 1, 4))
    text = panel_text(display, width)
    assert "1 of 5" in text
    assert "backward layer 3/3  chunk 2/4  batch 2/2" in text
    display.step(metrics(1, loss=5.0))
    display.step(metrics(2, loss=3.0))
    display.micro_batch(0)
    display.progress(Progress("head", -1, 3, 1, 7))
    text = panel_text(display, width)
    display.end()
    assert "3 of 5" in text
    assert "head  tile 2/7  batch 1/2" in text
    assert "3.0000   from 5.0000" in text
    assert "100 tokens/s" in text
    assert "100.0 GFLOP/s" in text
    assert "3.0 GiB peak" in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text.replace("eta …", "")
    assert "step 2/5  loss 3.0000" in console.file.getvalue()


def test_time_left_counts_the_rest_of_this_step_and_the_steps_after():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = LiveDisplay(console)
    display.begin(INFO)
    assert display.seconds_left() is None
    display.step(metrics(1))
    assert display.seconds_left() == pytest.approx(40.0)
    display.progress(Progress("backward", 2, 3, 3, 4))
    assert 30.0 < display.seconds_left() < 40.0
    display.end()


def test_numbers_are_formatted_for_people():
    assert [clock_text(s) for s in (7.4, 750, 11_100)] == ["0:07", "12:30", "3:05:00"]
    assert [flops_text(f) for f in (None, 5e6, 2.5e9, 4e14, 2e15)] == [
        "",
        "5.0 MFLOP/s",
        "2.5 GFLOP/s",
        "400.0 TFLOP/s",
        "2.0 PFLOP/s",
    ]
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline(list(range(99)), 10)) == 10
    assert typical_seconds([100.0, 1.0, 2.0, 3.0, 2.0, 50.0]) == 2.0


def test_stores_are_shown_where_chunks_move():
    moving = metrics(1, lanes=LANES)
    assert stores_text(moving) == "device 1.0 GiB   disk 4.0 GiB   fetch 1.5 GB/s   stash 0.5 GB/s   2.5% exposed"
    assert step_line(moving, 5).endswith("10.0 s  2.5% exposed")
    assert step_line(metrics(1), 5).endswith("10.0 s")
