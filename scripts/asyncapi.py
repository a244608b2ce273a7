"""Writes docs/asyncapi.yaml: what another service publishes and hears, in the form of AsyncAPI 3.

.venv/bin/python -m scripts.asyncapi            # the document
.venv/bin/python -m scripts.asyncapi --check    # say whether it is up to date; change nothing

Subjects come from `subjects.py`, messages from the package `messages`, examples from the golden messages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import yaml

from headrace.shared import subjects, submission
from headrace.shared.broker.streams import DAY_S, OUT_STREAM
from headrace.shared.broker.topology import Topology
from headrace.shared.messages import Cancel, Chunk, Endpoint, Takeover, Terminal
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane
from headrace.shared.wire import tag_of
from scripts.protocol_tables import GOLDEN, ROOT, fields_of

DOCUMENT = ROOT / "docs" / "asyncapi.yaml"
MESSAGES = (Terminal, Chunk, Takeover, Cancel)
#: names of which the token in a subject is shown; a test computes them anew
MODEL_NAMES = (
    "smollm2-135m-instruct",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "org/" + "a" * 59 + "-b",
    "日本語",
)
#: headers that only headrace's own edge sends
OF_THE_EDGE = {submission.ACCEPTED, submission.READER, submission.OWN_ID}

DESCRIPTION = """\
How a service submits requests to headrace over NATS, and gets their answers, without HTTP. Operations are named
from that service's side.

Submit: publish OpenAI's JSON, as a client would send it over HTTP, to `hr.v1.req.<tenant>.<model>.<lane>`, with a
reply subject (a JetStream publish). The publish ack means that the request is accepted: it will have exactly one
end, `ok`, `error`, `cancelled` or `expired`. The same `Nats-Msg-Id` again within 2 minutes is dropped (`duplicate`
in the ack). After that, a `std` or `bulk` request whose result is stored is not computed again; one that still
waits or runs may be computed twice, and has one end all the same.

Wait: `hr.v1.res.<tenant>.<request_id>` keeps the end of a `std` or `bulk` request for 3 days, in the stream HR_RES:
subscribe, then ask for the last message (direct get), and again after a reconnect. Everything of an answer, its end
included, also comes on `hr.v1.out.<tenant>.<request_id>`, and is kept there for 15 minutes, in the stream HR_OUT. A
streamed answer (`"stream": true`) is there alone.

Bodies of answers are msgpack maps. The field `t` holds the type and its version, as `terminal.v1`; fields at their
default are not sent; fields that you do not know are to be ignored. A byte string (`format: binary`) is msgpack's
`bin`; where its description says JSON, it is UTF-8 text. In the examples byte strings are base64; `x-golden` has
the same message as it is sent, in hex.

Large messages: what is larger than half the broker's `max_payload` has an empty body, and a ref in the header
`Hr-Blob`: its parts are in the stream HR_BLOB (see docs/protocol.md, "Large payloads").
"""

MODEL = """\
The served model name as one token. 1. Put the name in lower case. 2. Replace each run of characters other than
`a-z`, `0-9`, `_` and `-` by one `-`. 3. Cut `-` off at both ends. If the result is the name itself, and has at most
64 characters, it is the token. Else: 4. Keep its first 64 characters, and cut `-` off at both ends again. 5. Append
`-` and 6 hex digits in lower case: BLAKE2b of the name as it was, in UTF-8, with a digest of 3 bytes (a parameter
of the hash: not the first 3 bytes of a longer digest).
"""


def document() -> dict[str, Any]:
    """Return the whole document."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "headrace",
            "version": "1.0.0",
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {"local": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": _messages(),
            "schemas": _schemas(),
            "parameters": _parameters(),
        },
    }


def _channels() -> dict[str, Any]:
    tenant, request_id = "{tenant}", "{request_id}"
    _check_kept()
    return {
        "submissions": _channel(
            _address(subjects.req, "TENANT", "MODEL", Lane.STD).replace(".std", ".{lane}"),
            "Requests. A work queue: each is taken by one worker.",
            "submission",
        ),
        "acks": {
            "address": None,
            "title": "The reply subject of a publish",
            "messages": {"ack": {"$ref": "#/components/messages/ack"}},
        },
        "results": _channel(
            _address(subjects.res, "TENANT", "REQUEST_ID"),
            "The end of a `std` or `bulk` request, one message a subject, kept for 3 days in HR_RES.",
            tag_of(Terminal),
        ),
        "answers": _channel(
            _address(subjects.out, "TENANT", "REQUEST_ID"),
            "All of an answer, kept for 15 minutes in HR_OUT. The first terminal that counts is its end. Of "
            "an epoch older than a takeover's, chunks before its `seq` count, and nothing else; but a terminal "
            "without an epoch, and an `ok` one with a body, always does. `seq` has no holes: on seeing one, read "
            "HR_OUT.",
            tag_of(Chunk),
            tag_of(Takeover),
            tag_of(Terminal),
        ),
        "replies": _channel(
            _address(subjects.reply, "TENANT", "TOKEN"),
            "The end once more, for whoever named the subject in `Hr-Reply-To`; not kept.",
            tag_of(Terminal),
        ),
        "cancels": _channel(
            _address(subjects.cancel, "TENANT", "REQUEST_ID"),
            f"Stops a request of {tenant}, wherever {request_id} is. Not kept: a worker that starts later does "
            "not hear it.",
            tag_of(Cancel),
        ),
    }


def _check_kept() -> None:
    """Hold the words above to the streams. Raises: SystemExit."""
    topology = Topology(BrokerSettings(), "admin")
    for subject, name, age_s in (
        (subjects.res("t", "r"), "HR_RES", 3 * DAY_S),
        (subjects.out("t", "r"), OUT_STREAM, 900),
    ):
        stream = topology.stream_of(subject)
        if stream is None or (stream.name, stream.max_age_s) != (name, age_s):
            sys.exit(f"{subject} is not kept as scripts/asyncapi.py says")


def _address(builder: Callable[..., str], *tokens: Any) -> str:
    """Return a subject with its parameters in braces; `tokens` in capitals are parameters."""
    address = builder(*tokens)
    for token in tokens:
        if token == str(token).upper():
            address = address.replace(token, f"{{{token.lower()}}}")
    return address


def _channel(address: str, description: str, *names: str) -> dict[str, Any]:
    parameters = [part[1:-1] for part in address.split(".") if part.startswith("{")]
    return {
        "address": address,
        "description": description,
        "parameters": {name: {"$ref": f"#/components/parameters/{name}"} for name in parameters},
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
    }


def _operations() -> dict[str, Any]:
    def operation(action: str, channel: str, summary: str) -> dict[str, Any]:
        return {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
            "summary": summary,
        }

    ack = {
        "channel": {"$ref": "#/channels/acks"},
        "messages": [{"$ref": "#/channels/acks/messages/ack"}],
    }
    return {
        "submit": {**operation("send", "submissions", "Submit a request."), "reply": ack},
        "receiveResult": operation("receive", "results", "Learn how a request ended."),
        "receiveAnswer": operation("receive", "answers", "Follow a streamed answer."),
        "receiveReply": operation("receive", "replies", "Be told the end of what one submitted."),
        "cancel": operation("send", "cancels", "Stop a request."),
    }


def _parameters() -> dict[str, Any]:
    token = "1 to 128 of `A-Z a-z 0-9 _ -`"
    return {
        "tenant": {"description": f"Whose request it is: {token}.", "examples": ["default"]},
        "model": {
            "description": MODEL,
            "examples": [subjects.model_slug(MODEL_NAMES[0])],
            "x-tokens": {name: subjects.model_slug(name) for name in MODEL_NAMES},
        },
        "lane": {
            "description": "`rt`: a person waits; `std`: asynchronous; `bulk`: when nothing else runs. "
            "Deadlines where none is named: "
            + ", ".join(f"{s:,.0f} s ({lane})" for lane, s in submission.DEFAULT_DEADLINE_S.items())
            + ".",
            "enum": [str(lane) for lane in Lane],
        },
        "request_id": {"description": f"The submitter's choice, new for each request: {token}."},
        "token": {"description": f"The submitter's choice: {token}."},
    }


def _messages() -> dict[str, Any]:
    found: dict[str, Any] = {
        "submission": {
            "summary": "A request: OpenAI's JSON, untouched.",
            "contentType": "application/json",
            "headers": {"$ref": "#/components/schemas/SubmissionHeaders"},
            "payload": {"$ref": "#/components/schemas/SubmissionBody"},
            "examples": [
                {
                    "name": "chat",
                    "headers": {
                        submission.MESSAGE_ID: "default.0c5b8a5e2d7f4b1e9a3c6d8f7e1b2a49",
                        submission.REQUEST_ID: "0c5b8a5e2d7f4b1e9a3c6d8f7e1b2a49",
                        submission.DEADLINE: "1767229200.000000",
                    },
                    "payload": {
                        "model": "smollm2-135m-instruct",
                        "messages": [{"role": "user", "content": "Hi"}],
                    },
                }
            ],
        },
        "ack": {
            "summary": "JetStream's word on a publish: stored, or an error.",
            "contentType": "application/json",
            "payload": {"$ref": "#/components/schemas/PublishAck"},
        },
    }
    for kind in MESSAGES:
        tag = tag_of(kind)
        found[tag] = {
            "summary": (kind.__doc__ or "").partition("\n")[0],
            "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
            "examples": [
                {"name": tag, "payload": json.loads((GOLDEN / f"{tag}.json").read_text())}
            ],
            "x-golden": (GOLDEN / f"{tag}.msgpack").read_bytes().hex(),
        }
    return found


def _schemas() -> dict[str, Any]:
    return {
        "SubmissionHeaders": {
            "type": "object",
            "required": [submission.MESSAGE_ID],
            "properties": _headers(),
        },
        "SubmissionBody": {
            "type": "object",
            "description": "The body of OpenAI's endpoint; what it may hold, and what vLLM adds, is said "
            "in docs/compatibility.md.",
            "required": ["model"],
            "properties": {
                "model": {"type": "string", "description": "The served model name."},
                "stream": {"type": "boolean", "default": False},
            },
        },
        "PublishAck": {
            "type": "object",
            "properties": {
                "stream": {"type": "string"},
                "seq": {"type": "integer"},
                "duplicate": {
                    "type": "boolean",
                    "description": "The same `Nats-Msg-Id` was there already.",
                },
                "error": {
                    "type": "object",
                    "description": "Not accepted. `err_code` 10077: the queue is full, try again later.",
                    "properties": {
                        "code": {"type": "integer"},
                        "err_code": {"type": "integer"},
                        "description": {"type": "string"},
                    },
                },
            },
        },
        **_message_schemas(),
    }


def _headers() -> dict[str, Any]:
    """Return the headers of a submission that another service may set."""
    words = {
        submission.MESSAGE_ID: "Tells a repeated publish, over all tenants: `<tenant>.<request_id>` is a good "
        "one. The request ID where there is no `Hr-Request-Id`, and may then hold no dot.",
        submission.REQUEST_ID: "The request ID, 1 to 128 of `A-Z a-z 0-9 _ -`: it stands in the subjects of "
        "the answer.",
        submission.ENDPOINT: "Which endpoint the body is for. Without it: chat.completions.",
        submission.DEADLINE: "After this the request ends `expired`: Unix seconds. Without it: the body's "
        "`request_timeout`, in seconds from now, or what the lane has.",
        submission.TRACEPARENT: "W3C trace context; a broken one is ignored.",
        submission.REPLY_TO: "Where the end is published as well: `hr.v1.reply.<tenant>.<token>`, with the "
        "tenant of the submission.",
        "Hr-Blob": "The body is a ref to a large payload.",
    }
    found = {name: {"type": "string", "description": text} for name, text in words.items()}
    enum: Any = sorted(msgspec.json.schema(Endpoint)["enum"])
    found[submission.ENDPOINT]["enum"] = enum
    return found


def _message_schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(
        MESSAGES, ref_template="#/components/schemas/{name}"
    )
    for name, schema in components.items():
        docs = {field.name: field.doc for field in fields_of(name)}
        for field, found in schema.get("properties", {}).items():
            if field in docs:
                found["description"] = docs[field]
        _as_draft_7(schema)
    return dict(sorted(components.items()))


def _as_draft_7(schema: Any) -> None:
    """Say in the words of AsyncAPI's schemas what msgspec says in newer ones."""
    if isinstance(schema, list):
        for item in schema:
            _as_draft_7(item)
    elif isinstance(schema, dict):
        if schema.pop("contentEncoding", None):
            schema["format"] = "binary"
        if "prefixItems" in schema:
            schema["items"] = schema.pop("prefixItems")
        for value in schema.values():
            _as_draft_7(value)


# Nothing is written as an alias of an equal thing elsewhere.
_Dumper = type("_Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})


def _text(dumper: Any, text: str) -> Any:
    """Write text of several lines as such."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


yaml.add_representer(str, _text, Dumper=_Dumper)


def written() -> str:
    """Return the document as YAML."""
    head = "# Written by scripts/asyncapi.py: change the messages, the subjects or the script.\n"
    text = yaml.dump(document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return f"{head}{text}"


def main(arguments: list[str]) -> int:
    """Write the document, or say whether it is up to date; return the exit code."""
    text = written()
    if "--check" not in arguments:
        DOCUMENT.write_text(text)
        return 0
    is_stale = not DOCUMENT.exists() or DOCUMENT.read_text() != text
    if is_stale:
        print(f"{DOCUMENT.relative_to(ROOT)} is out of date: run python -m scripts.asyncapi")
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
