"""What is asked: prompts of random token IDs, or those of a file; one turn or several."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.shared.errors import SettingsError

LOWEST_ID = 100  #: those below are often special


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One conversation: the prompts of its turns, and how long each answer is."""

    turns: tuple[Any, ...]  #: each token IDs or a text, for completions; or messages, for chat
    num_output_token_ids: int
    num_prompt_token_ids: int = 0  #: of all turns; 0: not known before the server counts


def random_asks(
    num: int, *, num_input: int, num_output: int, vocab_size: int, num_turns: int, seed: int
) -> list[Ask]:
    """Return conversations of random token IDs: each turn adds `num_input` IDs behind what was said.

    Raises: SettingsError where `vocab_size` leaves no ID to choose from.
    """
    if vocab_size <= LOWEST_ID:
        raise SettingsError(f"--vocab-size {vocab_size}: random token IDs begin at {LOWEST_ID}")
    made = random.Random(seed)
    return [
        Ask(
            turns=tuple(
                [made.randrange(LOWEST_ID, vocab_size) for _ in range(num_input)]
                for _ in range(num_turns)
            ),
            num_output_token_ids=num_output,
            num_prompt_token_ids=num_input * num_turns,
        )
        for _ in range(num)
    ]


def read_asks(path: Path, num: int, num_output: int) -> list[Ask]:
    """Return the asks of a JSONL file, from its beginning again where it is too short.

    A line has `prompt` (a text or token IDs), `messages`, or ShareGPT's `conversations`; and, if it wants,
    `max_tokens`. A conversation in which no human speaks is left out. Raises: SettingsError for a line that has
    none of these, and for a file without any.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold U+2028 as it is
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: no prompts can be read: {error}") from None
    asks = [
        _read(f"{path}:{number}", line, num_output)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    found = [ask for ask in asks if ask.turns]
    if not found:
        raise SettingsError(f"{path} has no prompt: it needs a JSON object a line")
    return [found[index % len(found)] for index in range(num)]


def _read(place: str, line: str, num_output: int) -> Ask:
    try:
        return _ask(json.loads(line), num_output)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # no object, or of others
        raise SettingsError(f"{place}: it is no prompt: {error!r}") from None


def _ask(line: dict[str, Any], num_output: int) -> Ask:
    output = int(line.get("max_tokens") or line.get("output_len") or num_output)
    if "conversations" in line:
        people = [turn["value"] for turn in line["conversations"] if turn.get("from") == "human"]
        return Ask(turns=tuple(people), num_output_token_ids=output)
    for name in ("prompt", "messages"):
        if line.get(name):
            return Ask(turns=(line[name],), num_output_token_ids=output)
    raise ValueError(f"a line has none of prompt, messages, conversations, but {sorted(line)}")
