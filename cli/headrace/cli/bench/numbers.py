"""Numbers of the command line, refused by name where no load can be made of them."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """Return a whole number from 0 on. Raises: argparse.ArgumentTypeError."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """Return a whole number from 1 on. Raises: argparse.ArgumentTypeError."""
    return _whole(text, 1)


def positives(text: str) -> list[int]:
    """Return whole numbers from 1 on, comma-separated; perhaps none. Raises: argparse.ArgumentTypeError."""
    return [positive(part) for part in text.split(",") if part]


def rate(text: str) -> float:
    """Return a number above 0, of something a second; `inf` is one. Raises: argparse.ArgumentTypeError."""
    return _above_0(text)


def finite(text: str) -> float:
    """Return a number above 0 that is not infinite. Raises: argparse.ArgumentTypeError."""
    number = _above_0(text)
    if math.isinf(number):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return number


def rates(text: str) -> list[float]:
    """Return finite numbers above 0, comma-separated, each once. Raises: argparse.ArgumentTypeError."""
    found = [finite(part) for part in text.split(",") if part]
    if not found:
        raise argparse.ArgumentTypeError("expected numbers, as 1,2,4")
    return list(dict.fromkeys(found))


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return number


def _above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:  # nor is nan
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number
