"""Numbers as text for people."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Return a duration with about three digits, in ns to hours: 1.25 ms, 12 min 05 s."""
    if seconds >= 6000:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02} min"
    if seconds >= 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{short_number(seconds * factor)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def short_number(value: float) -> str:
    """Return a number with about three digits: 1.25, 12.5, 1,250."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def count_text(value: float) -> str:
    """Return a number as text, from 10,000 on with an SI prefix: 9,999, 12.3 k, 45.6 M, 789 T."""
    for prefix, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= unit:
            return f"{short_number(value / (1e3 if prefix == 'k' else unit))} {prefix}"
    return short_number(value)


def percent_text(share: float) -> str:
    """Return a share of 1 as percent: 40.0 %."""
    return f"{100 * share:.1f} %"
