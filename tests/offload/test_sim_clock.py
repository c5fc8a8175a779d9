"""Simulated clock: times that are worked out by hand."""

from __future__ import annotations

import pytest

from trunkline.offload.lanes.sim_clock import QueueSpeeds, SimClock

LINK = QueueSpeeds(
    alone={"in": 10.0, "out": 8.0},
    pairs={"in": ("out", 6.0), "out": ("in", 4.0)},
)


def test_compute_runs_operators_one_after_another() -> None:
    clock = SimClock(QueueSpeeds())
    clock.run(2, "a")
    clock.run(3, "b")
    assert clock.compute == pytest.approx(5)
    assert clock.busy["compute"] == pytest.approx(5)


def test_an_item_is_ready_when_compute_ends_its_earlier_work() -> None:
    clock = SimClock(LINK, record=True)
    clock.run(2, "a")
    job = clock.submit("in", 30, label="x")
    clock.run(1, "b")
    clock.wait(job)
    assert job.begin == pytest.approx(2)
    assert clock.compute == pytest.approx(5)
    assert clock.exposed == {"in": pytest.approx(2)}
    assert clock.segments["compute"] == [(0, pytest.approx(2), "a"), (pytest.approx(2), pytest.approx(3), "b")]
    assert clock.segments["in"] == [(pytest.approx(2), pytest.approx(5), "x")]


def test_an_item_that_has_ended_exposes_nothing() -> None:
    clock = SimClock(LINK)
    job = clock.submit("in", 30)
    clock.run(4, "a")
    clock.wait(job)
    assert clock.compute == pytest.approx(4)
    assert clock.exposed == {"in": pytest.approx(0)}


def test_both_directions_share_a_link_in_any_order_of_submission() -> None:
    """10 units in alone until second 1, then 6 a second beside 4 out: in is over at 1 + 20/6, out goes on alone."""
    for first in ("in", "out"):
        clock = SimClock(LINK)
        if first == "in":
            coming = clock.submit("in", 30)
            clock.run(1, "a")
            leaving = clock.submit("out", 40)
        else:
            coming = clock.submit("in", 30)
            clock.run(1, "a")
            leaving = clock.submit("out", 40)
        for job in (coming, leaving) if first == "in" else (leaving, coming):
            clock.wait(job)
        shared = 20 / 6
        assert coming.end == pytest.approx(1 + shared)
        assert leaving.end == pytest.approx(1 + shared + (40 - 4 * shared) / 8)


def test_items_of_a_queue_keep_their_order_and_wait_for_others() -> None:
    clock = SimClock(LINK)
    stash = clock.submit("out", 8)
    fetch = clock.submit("in", 10, after=stash)
    later = clock.submit("in", 10)
    clock.wait(later)
    assert stash.end == pytest.approx(1)
    assert (fetch.begin, fetch.end) == (pytest.approx(1), pytest.approx(2))
    assert later.begin == pytest.approx(2)


def test_a_busy_queue_slows_compute() -> None:
    """Half its speed for the three seconds of the job: two seconds of work take three and a half."""
    clock = SimClock(QueueSpeeds(alone={"in": 10.0}, slowdown={"in": 0.5}))
    clock.submit("in", 30)
    clock.run(2, "a")
    assert clock.compute == pytest.approx(3.5)


def test_compute_waits_for_a_slow_host() -> None:
    clock = SimClock(QueueSpeeds(host_seconds=0.5))
    for _ in range(4):
        clock.issue()
        clock.run(0.1, "a")
    assert clock.compute == pytest.approx(2.1)
    for _ in range(4):
        clock.issue()
        clock.run(1, "b")
    assert clock.compute == pytest.approx(6.5)  # from 2.5, when the first of these was issued


def test_a_synchronous_host_adds_its_time_to_compute() -> None:
    clock = SimClock(QueueSpeeds(host_seconds=0.5, synchronous=True))
    for _ in range(4):
        clock.issue()
        clock.run(1, "a")
    assert clock.compute == pytest.approx(6)
