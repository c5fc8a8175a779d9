"""What a check of the machine says, and how one is run so that it always says something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that training depends on, as it was found.

    Attributes:
        name: of the thing.
        state: `ok`; `warn`, where training works but slower or with less than it could have; `fail`, where it does not.
        found: what is there, one line.
        mend: what to do about it; None where the state is `ok`.
    """

    name: str
    state: State
    found: str
    mend: str | None = None

    def __post_init__(self) -> None:
        assert (self.mend is None) == (self.state == "ok"), self


@dataclass(frozen=True, slots=True)
class Check:
    """A check that has not run yet.

    Attributes:
        name: of the thing, also where the check breaks down.
        look: finds out.
    """

    name: str
    look: Callable[[], Finding]


def attempt(check: Check) -> Finding:
    """Run a check. One that breaks down is a finding, too: that this could not be found out, and why."""
    try:
        return check.look()
    except Exception as error:  # whatever a machine comes up with, the other lines are still worth reading
        reason = " ".join(str(error).split()) or "no reason given"
        return Finding(
            check.name,
            "warn",
            f"could not be checked: {type(error).__name__}: {reason}",
            "Mend what the message names, or go on without this line; nothing else depends on it.",
        )
