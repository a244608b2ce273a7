"""`make parity`: ask both servers everything, store the reference answers, write the page.

Names of cases as arguments ask only those, and write nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

from headrace.cli.demo import model as demo_model
from headrace.shared import settings

from . import recorded, report
from .cases import CASES, FLAGS, Case, Profile
from .client import Answer
from .mistakes import MISTAKES
from .servers import headrace_stack, vllm_server
from .verdict import judge

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"

logger = logging.getLogger("parity")

Answers = dict[str, dict[str, Answer]]


def main(words: list[str]) -> int:
    """Return 1 when an answer differs without a reason."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    cases = [
        case
        for case in [*CASES, *MISTAKES]
        if not words or any(word in recorded.key_of(case) for word in words)
    ]
    model = demo_model.ensure(settings.home(), progress=lambda _: None)
    scratch = Path(tempfile.mkdtemp(prefix="parity-"))
    logger.info("logs and answers: %s", scratch)
    theirs: Answers = {}
    ours: Answers = {}
    for profile in FLAGS:
        chosen = [case for case in cases if case.profile == profile]
        if chosen:
            _ask(profile, chosen, model, scratch, theirs, ours)
    rows = judged(cases, theirs, ours)
    if not words:
        recorded.store(theirs)
        PAGE.write_text(report.page(rows))
    return 1 if any(not verdict.ok for _, row in rows for verdict in row.values()) else 0


def judged(cases: list[Case], theirs: Answers, ours: Answers) -> report.Rows:
    """Judge every answer, and log what is wrong."""
    rows: report.Rows = []
    for case in cases:
        key = recorded.key_of(case)
        row = {mode: judge(case, theirs[key], ours[key], mode) for mode in ours[key]}
        rows.append((case, row))
        for mode, verdict in row.items():
            if not verdict.ok:
                logger.info("✗ %s, %s: %s", key, mode, verdict.note)
    logger.info("%d requests compared", len(rows))
    return rows


def _ask(
    profile: Profile, cases: list[Case], model: Path, scratch: Path, theirs: Answers, ours: Answers
) -> None:
    """Ask one server after the other: never more engines at once than headrace's own two."""
    with vllm_server(profile, model, scratch / f"vllm-{profile}.log") as url:
        theirs |= recorded.ask_all(url, cases)
    (scratch / "theirs.json").write_text(json.dumps(theirs, indent=1))
    home = scratch / profile
    (home / "models").mkdir(parents=True)
    (home / "models" / model.name).symlink_to(model)
    with headrace_stack(profile, home, scratch / f"headrace-{profile}.log") as url:
        ours |= recorded.ask_all(url, cases)
    (scratch / "ours.json").write_text(json.dumps(ours, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
