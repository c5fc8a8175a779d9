"""SVG as text: elements, and the frame of a chart with its axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkline.report.words import escape

Tick = tuple[float, str]


def element(name: str, content: str = "", /, **attributes: Any) -> str:
    """Return an element. Underscores of attribute names become hyphens, one at the end is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>"


def label(content: str, x: float, y: float, **attributes: Any) -> str:
    """Return text at a place."""
    return element("text", escape(content), x=x, y=y, **attributes)


def rectangle(x: float, y: float, width: float, height: float, content: str = "", **attributes: Any) -> str:
    """Return a rectangle."""
    return element("rect", content, x=x, y=y, width=max(0.0, width), height=max(0.0, height), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True)
class Frame:
    """A chart's area and its scales.

    Attributes:
        width: of the drawing, in its own units: pixels where it is shown at its size.
        height: likewise.
        left: margin, for the labels of the vertical axis.
        top: margin.
        x_low: value at the left edge of the area.
        x_high: value at its right edge.
        y_low: value at its bottom.
        y_high: value at its top.
    """

    width: int
    height: int
    left: int
    top: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    right: int = 14
    bottom: int = 42

    @property
    def area(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom edge of the area."""
        return self.left, self.top, self.width - self.right, self.height - self.bottom

    def x(self, value: float) -> float:
        """Return the place of a value on the horizontal axis."""
        left, _, right, _ = self.area
        return left + (value - self.x_low) / (self.x_high - self.x_low) * (right - left)

    def y(self, value: float) -> float:
        """Return the place of a value on the vertical axis."""
        _, top, _, bottom = self.area
        return bottom - (value - self.y_low) / (self.y_high - self.y_low) * (bottom - top)

    def axes(self, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], x_title: str) -> str:
        """Return grid, ticks and the title of the horizontal axis."""
        left, _, right, bottom = self.area
        parts = []
        for value, written in y_ticks:
            y = self.y(value)
            parts.append(line(left, y, right, y, class_="rule"))
            parts.append(label(written, left - 8, y + 4, text_anchor="end", class_="tick"))
        for value, written in x_ticks:
            x = self.x(value)
            # A label at an edge would stick out of the drawing, were it centred there.
            half = 4 * len(written)
            anchor = "end" if x + half > self.width else "middle"
            parts.append(line(x, bottom, x, bottom + 4, class_="rule"))
            parts.append(label(written, min(x, self.width - 1), bottom + 18, text_anchor=anchor, class_="tick"))
        parts.append(line(left, bottom, right, bottom, class_="axis"))
        parts.append(label(x_title, (left + right) / 2, self.height - 6, text_anchor="middle", class_="tick"))
        return "".join(parts)

    def drawing(self, content: str, title: str, hover: dict[str, Any] | None = None, class_: str = "") -> str:
        """Return the whole SVG.

        Args:
            content: elements.
            title: what it shows, for those who do not see it.
            hover: what the page's script tells of the place under the pointer.
            class_: further classes.
        """
        left, top, right, bottom = self.area
        cross = line(left, top, left, bottom, class_="cross") if hover else ""
        return element(
            "svg",
            content + cross,
            viewBox=f"0 0 {self.width} {self.height}",
            style=f"max-width:{round(self.width * 1.25)}px",
            role="img",
            aria_label=title,
            class_=f"chart {class_}".strip(),
            data_hover={**hover, "left": left, "right": right} if hover else None,
        )
