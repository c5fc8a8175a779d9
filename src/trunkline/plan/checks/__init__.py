"""Checks of this machine: each returns findings, and `trunkline doctor` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

State = Literal["ok", "warn", "fail"]
Check: TypeAlias = "Callable[[], Finding | list[Finding]]"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: of the thing that was checked.
        state: `ok`; `warn`: training works, but slower, with less memory, or without some feature; `fail`: training
            does not work.
        found: result of the check, in one line.
        fix: how to fix it; None where the state is `ok`.
    """

    name: str
    state: State
    found: str
    fix: str | None = None

    def __post_init__(self) -> None:
        assert (self.fix is None) == (self.state == "ok"), self


def judge(name: str, found: str, fix: str | None) -> Finding:
    """Return a finding: a warning if there is a fix, `ok` if it is None."""
    return Finding(name, "warn" if fix else "ok", found, fix)


def attempt(name: str, check: Check) -> Iterator[Finding]:
    """Yield the findings of a check; where it raises an exception, yield one warning that names the error."""
    try:
        findings = check()
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        fix = "Fix the problem that the message names, or go on without this line; nothing else depends on it."
        findings = Finding(name, "warn", f"could not be checked: {type(error).__name__}: {reason}", fix)
    yield from [findings] if isinstance(findings, Finding) else findings
