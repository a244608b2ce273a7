"""The deployment's `nats-server.conf` knows every stream and every subject; what rights are worth, a broker shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.shared import subjects
from headrace.shared.broker.streams import Stream, matches, streams
from headrace.shared.subjects import Lane, Role

CONFIG = (Path(__file__).parents[3] / "nats-server.conf").read_text()
QUOTED = re.compile(r'"([^"]+)"')


def rights(role: Role) -> tuple[list[str], list[str]]:
    """Return what a role's user may publish, and what it may subscribe to."""
    block = CONFIG.partition(f"{{ user: {role}, ")[2].partition("\n      } }")[0]
    publish, _, subscribe = block.partition("subscribe:")
    return QUOTED.findall(publish), [word.split()[0] for word in QUOTED.findall(subscribe)]


@pytest.mark.parametrize("stream", streams(1), ids=lambda stream: stream.name)
def test_exactly_the_roles_that_use_a_stream_may_declare_it(stream: Stream) -> None:
    for role in Role:
        publish, _ = rights(role)
        for call in ("INFO", "CREATE"):
            may = f"$JS.API.STREAM.{call}.{stream.name}" in publish
            assert may == (role in stream.roles), (role, call)


def builders() -> dict[str, Callable[..., str]]:
    return {
        name: value
        for name, value in vars(subjects).items()
        if inspect.isfunction(value)
        and inspect.getdoc(value)
        and value.__module__ == subjects.__name__
    }


def built(builder: Callable[..., str]) -> str:
    values = {"lane": Lane.RT, "role": Role.DECODE, "stage": Role.DECODE}
    names = inspect.signature(builder).parameters
    return str(builder(**{name: values.get(name, "x") for name in names}))


@pytest.mark.parametrize("name", sorted(builders()))
def test_some_role_may_publish_each_subject_or_listen_to_it(name: str) -> None:
    try:
        subject = built(builders()[name])
    except subjects.MalformedMessageError:
        return  # it takes subjects apart
    if not subject.startswith(subjects.ROOT) or name in ("req_filter", "job_filter"):
        return  # a token; a filter, which a consumer's rights cover
    allowed = [pattern for role in Role for kind in rights(role) for pattern in kind]
    assert any(matches(pattern, subject) for pattern in allowed), subject
