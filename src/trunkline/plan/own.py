"""This machine's own profile: where `trunkline tune` leaves it, and where plans find it by name."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

NAME = "this-machine"


def path() -> Path:
    """The file: in the user's folder for settings (XDG Base Directory Specification), whether it exists or not."""
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the specification has relative ones ignored
        config = Path.home() / ".config"
    return config / "trunkline" / f"{NAME}.toml"


def read(where: str) -> dict[str, Any]:
    """The figures in it.

    Args:
        where: what errors begin with.

    Raises:
        ValueError: this machine was not measured yet, or the file is not TOML.
    """
    file = path()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{where}: this machine has not been measured yet ({file} does not exist): run `trunkline tune` first."
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: not TOML: {error}. Run `trunkline tune` again.") from None
