"""`docs/parity.md`: one row a request."""

from __future__ import annotations

from collections.abc import Iterable

from .cases import CASES, CHAT, FLAGS, TEXT, Case
from .mistakes import MISTAKES
from .recorded import versions
from .verdict import EARLY, Verdict

Rows = list[tuple[Case, dict[str, Verdict]]]

HEAD = """# Answers compared with vLLM's own server

`make parity` writes this page. It starts vLLM's OpenAI server and then `headrace up` on the same model with the same
flags, asks both every request below, whole and streamed, and compares all that a client sees: status, content type,
framing of the events, and every field of every body and chunk.

{counts}

Masked are request IDs, tool call IDs, `created` and `system_fingerprint`, each only where it has its right form.
Logprobs may differ by 1e-4 of their value. The chunks of one choice are compared one by one; where vLLM put several
token IDs into one chunk, because its reader was slow, adjacent chunks that only add text are joined first.

Each prompt is prefilled by the prefill worker, and its KV cache goes to decode by NIXL; vLLM's server is one engine.
Seeded sampling is compared like all else.

Versions: {versions}.

| sign | meaning |
|---|---|
| ✓ | equal in everything |
| ≠ | another answer on purpose; the note says why |
| ✗ | a difference that is a defect |
| early | ✓, but {early} |
"""


def page(rows: Rows) -> str:
    """Return the page."""
    cells = [verdict for _, row in rows for verdict in row.values()]
    equal = sum(verdict.ok and verdict.equal for verdict in cells)
    reasons = sum(verdict.ok and not verdict.equal for verdict in cells)
    counts = (
        f"Of {len(cells)} answers to {len(rows)} requests, {equal} are equal, {reasons} differ on purpose"
        f" and {len(cells) - equal - reasons} are wrong."
    )
    of = ", ".join(f"{name} {value}" for name, value in versions().items())
    parts = [HEAD.format(counts=counts, versions=of, early=EARLY)]
    for title, path in (("Chat completions", CHAT), ("Completions", TEXT)):
        chosen = [row for row in rows if row[0] in CASES and row[0].path == path]
        parts += [f"## {title}\n", _table(chosen)]
    parts += ["## Mistakes\n", _table([row for row in rows if row[0] in MISTAKES])]
    return "\n".join(parts)


def _table(rows: Rows) -> str:
    lines = ["| request | whole | streamed | note |", "|---|---|---|---|"]
    for case, verdicts in rows:
        whole, streamed = _sign(verdicts.get("whole")), _sign(verdicts.get("streamed"))
        lines.append(f"| {_name(case)} | {whole} | {streamed} | {_note(verdicts.values())} |")
    return "\n".join(lines) + "\n"


def _name(case: Case) -> str:
    where = f"{case.path}: " if case in MISTAKES else ""
    parser = FLAGS[case.profile].get("reasoning_parser")
    return f"{where}{case.name}" + (f" (reasoning parser {parser})" if parser else "")


def _sign(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if not verdict.ok:
        return "✗"
    if verdict.note == EARLY:
        return "✓ early"
    return "✓" if verdict.equal else "≠"


def _note(verdicts: Iterable[Verdict]) -> str:
    notes = dict.fromkeys(verdict.note for verdict in verdicts if verdict.note != EARLY)
    return "; ".join(filter(None, notes)).replace("|", "\\|").replace("\n", " ")
