"""Hardware profiles: memory, bandwidth and compute of a machine, each figure with its source."""

from trunkline.plan.hardware.hardware_profile import Hardware, load, names, parse, profile_of, speeds_of
from trunkline.plan.hardware.profile_schema import (
    CollectiveFigures,
    DiskFigures,
    LinkFigures,
    NoFigures,
    figure,
    points,
    to_toml,
)

__all__ = [
    "CollectiveFigures",
    "DiskFigures",
    "Hardware",
    "LinkFigures",
    "NoFigures",
    "figure",
    "load",
    "names",
    "parse",
    "points",
    "profile_of",
    "speeds_of",
    "to_toml",
]
