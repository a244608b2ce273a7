"""How a headrace process writes its log: a line a record on stderr, for people or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import msgspec

from headrace.shared.log_level import set_level
from headrace.shared.messages import LevelName

LogFormat = Literal["human", "json"]
LogLevel = LevelName
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn's own, with escape sequences
}


class HumanFormatter(logging.Formatter):
    """`12:00:01.234 INFO    headrace.decode: ready  action=ready slots=32`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows on lines of its own."""
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        line = f"{time} {record.levelname:<7} {record.name}: {record.getMessage()}"
        extra = " ".join(f"{key}={value}" for key, value in extra_fields(record).items())
        if extra:
            line = f"{line}  {extra}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, the record's own keys."""

    def __init__(self, **constant: str) -> None:
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback is the key `exception`."""
        values: dict[str, Any] = {
            **extra_fields(record),
            **self._constant,
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(values, enc_hook=str).decode()


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the caller gave as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _OWN_FIELDS}


def configure(log_format: LogFormat, level: LogLevel, *, role: str) -> None:
    """Send every record of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role=role) if log_format == "json" else HumanFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)
