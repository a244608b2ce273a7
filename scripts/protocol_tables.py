"""Writes the generated parts of docs/protocol.md, and the golden messages.

.venv/bin/python scripts/protocol_tables.py             # the document
.venv/bin/python scripts/protocol_tables.py --check     # say whether it is up to date; change nothing
.venv/bin/python scripts/protocol_tables.py --golden    # <tag>.msgpack from each <tag>.json

A golden message is written by hand as `tests/unit/golden/<tag>.json` (bytes in base64); it is the example in the
document too. What lies between `<!-- generated:NAME -->` and `<!-- /generated -->` comes from the package `messages`
and from `streams.py`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import msgspec

from headrace.shared import messages, token_ids, wire
from headrace.shared.broker import WorkQueue
from headrace.shared.broker.streams import MIB, Stream, streams
from headrace.shared.messages import Frame, Job, Tokens
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role
from headrace.shared.wire import TAG_FIELD, Message

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "protocol.md"
GOLDEN = ROOT / "tests" / "unit" / "golden"

NUM_PROMPT_TOKEN_IDS = 1_000
PROMPT_BYTES = 4_400  # of English text that makes so many token IDs
BLOCK_SIZE = 128

UNITS = {"_s": "seconds", "_bytes": "bytes"}
#: closed sets of words that fields hold
WORDS: dict[str, Any] = {
    "Endpoint": messages.Endpoint,
    "RenderAsk": messages.RenderAsk,
    "DerenderAsk": messages.DerenderAsk,
    "Status": messages.Status,
    "FinishReason": messages.FinishReason,
    "LevelName": messages.LevelName,
    "Lane": Lane,
    "Role": Role,
}
#: who fills the structs in whose docstring no arrow says it
SENDERS = {
    "Prompt": "render",
    "PromptLogprobs": "the engine that computed the prompt",
    "Timings": "each stage",
    "Failure": "the stage that failed",
    "Tokens": "decode",
    "StreamEnd": "decode",
    "DeadLetter": "the stage that gave up",
}

_BLOCK = re.compile(r"(<!-- generated:(\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_ABSENT = re.compile(r"(None|Empty|0): ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a struct, as its source says it."""

    name: str
    type: str
    default: str | None  #: source text; None: required
    doc: str


def structs() -> dict[str, type[msgspec.Struct]]:
    """Return every struct of the messages by name."""
    return {
        name: value
        for name, value in vars(messages).items()
        if inspect.isclass(value)
        and issubclass(value, msgspec.Struct)
        and value.__module__.startswith(messages.__name__)
    }


def message_types() -> dict[str, type[Message]]:
    """Return every message by tag."""
    return {
        wire.tag_of(struct): struct for struct in structs().values() if issubclass(struct, Message)
    }


def fields_of(name: str) -> list[Field]:
    """Return the fields of a struct, each with the docstring under it."""
    (definition,) = ast.parse(inspect.getsource(structs()[name])).body
    assert isinstance(definition, ast.ClassDef)
    found = []
    for index, node in enumerate(definition.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        below = definition.body[index + 1 : index + 2]
        found.append(
            Field(
                name=node.target.id,
                type=ast.unparse(node.annotation),
                default=None if node.value is None else _default(node.value),
                doc=_docstring(below[0]) if below else "",
            )
        )
    return found


def _default(node: ast.expr) -> str:
    """Return a default as its source says it; a factory's as what it makes."""
    text = ast.unparse(node)
    return "{}" if text == "msgspec.field(default_factory=dict)" else text


def _docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def unit_of(field: Field) -> str:
    """Return a field's unit, from its docstring or its name."""
    if "(Unix seconds)" in field.doc:
        return "Unix seconds"
    if field.name.startswith("num_") or field.name == "slots":
        return "count"
    return next((unit for end, unit in UNITS.items() if field.name.endswith(end)), "")


def row(field: Field, sender: str) -> str:
    """Return a field's line of the table."""
    sentences = re.split(r"(?<=\.) ", field.doc)
    absent = [s for s in sentences if _ABSENT.match(s)]
    set_by = [s for s in sentences if s.startswith("Set by ")]
    meaning = [s for s in sentences if s not in absent and s not in set_by]
    default = "required" if field.default is None else f"`{field.default}`"
    if absent:
        first = absent[0].removesuffix(".")
        told = _ABSENT.sub("", first) if field.default is not None else first
        default = f"{default}: {told}" if field.default is not None else f"required; {told}"
    cells = [
        f"`{field.name}`",
        f"`{field.type.replace(' | ', ' or ')}`",
        unit_of(field),
        " ".join(meaning).replace(" (Unix seconds)", ""),
        default,
        set_by[0].removeprefix("Set by ").removesuffix(".") if set_by else sender,
    ]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def sender_of(struct: type[msgspec.Struct]) -> str:
    """Return who fills a struct, unless a field says otherwise."""
    arrow = re.search(r"(?:: |^)([^:]+?) →", inspect.getdoc(struct) or "")
    return arrow[1] if arrow else SENDERS[struct.__name__]


def field_table(struct: type[msgspec.Struct]) -> str:
    """Return the table of a struct's fields."""
    found = fields_of(struct.__name__)
    if not found:
        return "No fields."
    head = "| field | type | unit | meaning | default | set by |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(row(field, sender_of(struct)) for field in found)])


def example(message: msgspec.Struct) -> str:
    """Return a message as JSON, with words in angle brackets for bytes that are none."""
    built = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=str)
    told = {name: _told(value, name) for name, value in built.items()}
    text = json.dumps(told, indent=1, ensure_ascii=False)
    short = re.sub(r"\[\s+([^\[\]{}]{1,80}?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    return f"```json\n{short}\n```"


def _told(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        if TAG_FIELD in value:
            return f"<a {value[TAG_FIELD]}>"
        return {key: _told(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_told(item, name) for item in value]
    if not isinstance(value, bytes):
        return value
    if name == "token_ids":
        return f"<{token_ids.count(value)} token IDs, packed>"
    try:
        return json.loads(value)
    except ValueError:
        return f"<{len(value)} bytes>"


def golden(tag: str) -> Message:
    """Return the golden message of a type."""
    return msgspec.json.decode((GOLDEN / f"{tag}.json").read_bytes(), type=message_types()[tag])


def readable(message: Message) -> bytes:
    """Return a golden message's JSON file."""
    return (
        msgspec.json.format(msgspec.json.encode(message, order="deterministic"), indent=2) + b"\n"
    )


def sizes(tag: str) -> list[tuple[str, int]]:
    """Return what a message weighs in which case, in bytes."""
    cases: dict[str, list[tuple[str, Message]]] = {
        "job.v1": [("a prompt of 1,000 token IDs", _long_job())],
        "prefill.v1": [
            ("a prompt of 1,000 token IDs", _with(golden("prefill.v1"), token_ids=_long_prompt()))
        ],
        "handoff.v1": [("8 KV blocks, for 1,000 token IDs", _long_handoff())],
        "open.v1": [("a prompt of 1,000 token IDs", _with(golden("open.v1"), job=_long_job()))],
        "frame.v1": [
            ("1 stream, 1 token ID", _frame(1)),
            ("32 streams, 1 token ID each", _frame(32)),
            ("empty, as a probe", _frame(0)),
        ],
        "chunk.v1": [("1 token of a chat", golden("chunk.v1"))],
        "terminal.v1": [("after a stream", _with(golden("terminal.v1"), body=b""))],
    }
    return [
        (case, len(wire.encode(message)))
        for case, message in cases.get(tag, [("the example", golden(tag))])
    ]


def _with(message: Message, **changes: Any) -> Message:
    return msgspec.structs.replace(message, **changes)


def _long_prompt() -> bytes:
    return token_ids.pack(range(NUM_PROMPT_TOKEN_IDS))


def _long_job() -> Message:
    job = golden("job.v1")
    assert isinstance(job, Job)
    prompt = msgspec.structs.replace(job.prompts[0], token_ids=_long_prompt())
    return _with(job, prompts=(prompt,), body=job.body + b" " * PROMPT_BYTES)


def _long_handoff() -> Message:
    handoff = golden("handoff.v1")
    assert isinstance(handoff, messages.Handoff)
    num_blocks = -(-NUM_PROMPT_TOKEN_IDS // BLOCK_SIZE)
    blocks = {"remote_block_ids": [list(range(400, 400 + num_blocks))]}
    return _with(
        handoff, kv_transfer_params=handoff.kv_transfer_params | blocks, prompt_logprobs=None
    )


def _frame(num_streams: int) -> Message:
    tokens = tuple(
        Tokens(stream_id=1_000 + i, index=500, choice=0, token_ids=token_ids.pack([20_000]))
        for i in range(num_streams)
    )
    return Frame(decode_instance="decode-1f2e3d4c", seq=70_000, tokens=tokens)


def message_block(tag: str) -> str:
    """Return example, field table and sizes of a message."""
    weights = "; ".join(f"{num:,} ({case})" for case, num in sizes(tag))
    table = field_table(message_types()[tag])
    return f"{example(golden(tag))}\n\n{table}\n\nBytes: {weights}.\n"


def words_block() -> str:
    """Return the closed sets of words that fields hold."""
    lines = []
    for name, kind in WORDS.items():
        words = (
            list(kind) if inspect.isclass(kind) and issubclass(kind, StrEnum) else get_args(kind)
        )
        lines.append(f"- `{name}`: {', '.join(f'`{word}`' for word in words)}")
    return "\n".join(lines) + "\n"


def streams_block() -> str:
    """Return the table of streams."""
    head = (
        "| stream | subjects | kept in | kind | age limit | size limit | when full |\n"
        "|---|---|---|---|---|---|---|"
    )
    found = streams(BrokerSettings().max_queued_per_subject)
    return "\n".join([head, *(_stream_row(stream) for stream in found)]) + "\n"


def _stream_row(stream: Stream) -> str:
    size = [f"{stream.max_bytes // MIB} MiB"] if stream.max_bytes >= 0 else []
    if stream.max_msgs_per_subject > 0:
        plural = "s" if stream.max_msgs_per_subject > 1 else ""
        size.append(f"{stream.max_msgs_per_subject:,} message{plural} a subject")
    age = _age(stream.max_age_s) if stream.max_age_s else "none"
    cells = [
        f"`{stream.name}`",
        ", ".join(f"`{subject}`" for subject in stream.subjects),
        "memory" if stream.memory else "file",
        "work queue" if stream.work_queue else "log",
        age + (", or the message's own" if stream.message_ttl else ""),
        ", ".join(size) or "none",
        "refuses" if stream.discard_new else "drops its oldest",
    ]
    return "| " + " | ".join(cells) + " |"


def _age(seconds: int) -> str:
    day, minute = 86_400, 60
    if seconds % day == 0:
        days = seconds // day
        return "1 day" if days == 1 else f"{days} days"
    return f"{seconds // minute} min"


def consumers_block() -> str:
    """Return the table of a model's consumers."""
    head = "| stream | consumer | filter | `ack_wait` | taken by |\n|---|---|---|---|---|"
    rows = [
        f"| `{queue.stream}` | `{queue.consumer}` | `{queue.filter_subject}` | {queue.ack_wait_s:g} s "
        f"| {queue.role} |"
        for queue in (
            *WorkQueue.of_model("MODEL", "POOL"),
            WorkQueue.prefill_worker("POOL", "INSTANCE"),
            WorkQueue.batch(),
            WorkQueue.events("batch"),
            WorkQueue.events("response"),
            WorkQueue.hooks(),
        )
    ]
    table = "\n".join([head, *rows]) + "\n"
    return re.sub("MODEL|POOL|INSTANCE", lambda word: f"<{word[0].lower()}>", table)


def blocks() -> dict[str, Callable[[], str]]:
    """Return what makes each generated part, by the name in its marker."""
    made: dict[str, Callable[[], str]] = {
        "words": words_block,
        "streams": streams_block,
        "consumers": consumers_block,
    }
    for tag in message_types():
        made[tag] = lambda tag=tag: message_block(tag)  # type: ignore[misc]
    for name, struct in structs().items():
        if not issubclass(struct, Message):
            made[name] = lambda struct=struct: f"{field_table(struct)}\n"  # type: ignore[misc]
    return made


def generated(text: str) -> str:
    """Return the document with every generated part made anew.

    Raises: SystemExit for a marker of an unknown name.
    """
    made = blocks()

    def fill(match: re.Match[str]) -> str:
        if match[2] not in made:
            sys.exit(f"{DOCUMENT.name}: nothing makes {match[2]!r}; there are {', '.join(made)}")
        return f"{match[1]}{made[match[2]]()}{match[3]}"

    return _BLOCK.sub(fill, text)


def write_golden() -> None:
    """Write the bytes of every golden message, and its JSON in one form.

    Raises: SystemExit for a message type without a JSON file.
    """
    for tag in message_types():
        path = GOLDEN / f"{tag}.json"
        if not path.is_file():
            sys.exit(f"write {path.relative_to(ROOT)} first: one message with every field set")
        message = golden(tag)
        path.write_bytes(readable(message))
        path.with_suffix(".msgpack").write_bytes(wire.encode(message))


def main(argv: list[str] | None = None) -> int:
    """Write the document, or say whether it is up to date; return the exit code."""
    parser = argparse.ArgumentParser(description="The generated parts of docs/protocol.md.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="change nothing; 1 when out of date")
    group.add_argument("--golden", action="store_true", help="write the golden messages' bytes")
    options = parser.parse_args(argv)
    if options.golden:
        write_golden()
        return 0
    text = DOCUMENT.read_text()
    new = generated(text)
    if options.check:
        if new != text:
            print(f"{DOCUMENT.relative_to(ROOT)} is out of date: run scripts/protocol_tables.py")
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
