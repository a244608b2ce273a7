from __future__ import annotations

import logging
import sys

import msgspec

from headrace.cli.logs import HumanFormatter, JsonFormatter


def record(**extra: object) -> logging.LogRecord:
    logger = logging.getLogger("headrace.decode")
    return logger.makeRecord(
        logger.name, logging.INFO, __file__, 1, "took %d", (3,), None, extra=extra
    )


def test_a_json_line_carries_the_message_and_the_keys_of_its_caller() -> None:
    line = msgspec.json.decode(JsonFormatter(role="decode-0").format(record(action="took")))
    assert line["message"] == "took 3"
    assert line["level"] == "info"
    assert line["logger"] == "headrace.decode"
    assert line["action"] == "took"
    assert line["role"] == "decode-0"
    assert line["time"].endswith("+00:00")


def test_a_json_line_takes_values_that_json_does_not_know() -> None:
    assert "object" in JsonFormatter().format(record(thing=object()))


def test_a_human_line_ends_with_the_keys_of_its_caller() -> None:
    line = HumanFormatter().format(record(action="took", slots=8))
    assert line.endswith("INFO    headrace.decode: took 3  action=took slots=8")


def test_a_traceback_is_part_of_both_formats() -> None:
    failed = record()
    try:
        raise ValueError("broken")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert "ValueError: broken" in HumanFormatter().format(failed)
    assert "ValueError: broken" in msgspec.json.decode(JsonFormatter().format(failed))["exception"]
