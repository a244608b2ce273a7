"""The lines of a batch for the fault harness, and what must come of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from headrace.engine.fake_text import expected_output

from .check import Violation
from .stack import MODEL

TOPICS = 20
REFUSED_SHARE = 0.01


def make_lines(rng: random.Random, num: int) -> list[dict[str, Any]]:
    """Return lines of which some begin alike, and a few are refused."""
    beginnings = [f"{topic} {'tell me of it ' * rng.randrange(1, 8)}" for topic in range(TOPICS)]
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": MODEL,
                "prompt": f"{rng.choice(beginnings)}{number}",
                "max_tokens": -1 if rng.random() < REFUSED_SHARE else rng.randrange(4, 40),
            },
        }
        for number in range(num)
    ]


def check_files(lines: list[dict[str, Any]], output: bytes, errors: bytes) -> list[Violation]:
    """Every line has one result, and it is the right one; both files are JSON on lines, to their last byte."""
    found: list[Violation] = []
    counts: Counter[str] = Counter()
    bodies = {line["custom_id"]: line["body"] for line in lines}
    for content, is_ok in ((output, True), (errors, False)):
        if content and not content.endswith(b"\n"):
            found.append(Violation("file", "", "does not end with a line end"))
        for raw in content.split(b"\n")[:-1]:
            try:
                line = json.loads(raw)
            except ValueError:
                found.append(Violation("file", "", f"no JSON: {raw[:100]!r}"))
                continue
            custom_id = line["custom_id"]
            counts[custom_id] += 1
            wrong = _wrong(bodies[custom_id], line, is_ok=is_ok)
            if wrong:
                found.append(Violation("result", custom_id, wrong))
    for custom_id in bodies:
        if counts[custom_id] != 1:
            found.append(Violation("count", custom_id, f"has {counts[custom_id]} results"))
    return found


def expected_text(body: dict[str, Any]) -> str:
    """Return the right answer to a request."""
    ids = expected_output(list(body["prompt"].encode()), body["max_tokens"])
    return bytes(i for i in ids if i < 256).decode()


def _wrong(body: dict[str, Any], line: dict[str, Any], *, is_ok: bool) -> str:
    """Say what is wrong with the result of a request; nothing is empty."""
    status = line["response"] and line["response"]["status_code"]
    if body["max_tokens"] < 0:
        return "" if status == 400 and not is_ok else f"was to be refused, and is {line}"
    if status != 200 or not is_ok:
        return f"failed: {line}"
    expected = expected_text(body)
    text = line["response"]["body"]["choices"][0]["text"]
    return "" if text == expected else f"is {text!r}, not {expected!r}"
