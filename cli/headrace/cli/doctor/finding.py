"""What one check found."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's answer. `fail` makes the command fail."""

    name: str
    """The check, a stable word."""
    status: Literal["ok", "warn", "fail", "skip"]
    """`skip`: it can't be checked from here, or has no meaning here."""
    found: str
    """What there is."""
    right: str = ""
    """What would be right. Empty: it is."""
    setting: str = ""
    """What to change: a setting, a variable, or a package. Empty: nothing, or it is not ours."""


def ok(name: str, found: str) -> Finding:
    """It is as it should be."""
    return Finding(name=name, status="ok", found=found)


def skip(name: str, found: str) -> Finding:
    """It says nothing here."""
    return Finding(name=name, status="skip", found=found)


def warn(name: str, found: str, right: str, setting: str = "") -> Finding:
    """It works, and not as well as it could."""
    return Finding(name=name, status="warn", found=found, right=right, setting=setting)


def fail(name: str, found: str, right: str, setting: str = "") -> Finding:
    """It does not work."""
    return Finding(name=name, status="fail", found=found, right=right, setting=setting)
