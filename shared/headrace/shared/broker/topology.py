"""Streams and consumers: what they are, and how they come to be as they should.

Declared by every process at its start and after each reconnect: memory streams go away with the broker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.shared.broker.connection import Connection, DeniedError
from headrace.shared.broker.work_queue import WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import (
    ROOT,
    Lane,
    Role,
    batch_filter,
    file_parts_all,
    hook_filter,
    job_filter,
    req_filter,
)

logger = logging.getLogger(__name__)

API_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 1.0  # a stream without a leader never answers: it is asked again
CONSUMER_TIMEOUT_S = 2.0
DAY_S = 86_400
KEPT_IN_A_QUEUE_S = 7 * DAY_S  # how long a file queue's large payloads stay readable
BLOB_S = 600  # of a blob that no stream's message points to

CLIENT = (
    "client"  # the role of another service: it declares nothing, and reads its own subjects alone
)

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
_STREAM_NAME_IN_USE = 10058

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One stream; `roles` may use it, and declare it when it is missing."""

    name: str
    subjects: tuple[str, ...]
    roles: frozenset[Role]
    memory: bool = False
    work_queue: bool = False
    max_age_s: int = 0  #: 0: no limit
    max_bytes: int = -1  #: reserved in the broker's store; -1: no limit
    discard_new: bool = False  #: a full stream refuses; else it drops its oldest
    max_msgs_per_subject: int = -1
    message_ttl: bool = False  #: each message may name its own age limit

    def config(self, replicas: int) -> dict[str, Any]:
        """Return the stream as the broker's API takes it."""
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": "workqueue" if self.work_queue else "limits",
            "storage": "memory" if self.memory else "file",
            "num_replicas": replicas,
            "max_age": self.max_age_s * 10**9,
            "max_bytes": self.max_bytes,
            "max_msgs": -1,
            "max_msgs_per_subject": self.max_msgs_per_subject,
            "max_msg_size": -1,
            "max_consumers": -1,
            "discard": "new" if self.discard_new else "old",
            "duplicate_window": 120 * 10**9,
            "allow_direct": True,
        }
        if self.discard_new and self.max_msgs_per_subject > 0:
            config["discard_new_per_subject"] = True
        if self.message_ttl:
            config["allow_msg_ttl"] = True
        return config

    @property
    def blob_ttl_s(self) -> int:
        """How long a large payload that this stream points to must stay readable."""
        if self.max_age_s:
            return self.max_age_s
        return BLOB_S if self.memory else KEPT_IN_A_QUEUE_S


def _roles(*roles: Role) -> frozenset[Role]:
    return frozenset(roles)


BLOB_STREAM = "HR_BLOB"
OUT_STREAM = "HR_OUT"
META_STREAM = "HR_META"
FILE_STREAM = "HR_FILE"
EVENT_STREAM = "HR_EV"


def streams(max_queued_per_subject: int) -> tuple[Stream, ...]:
    """Return every stream."""
    rt, std, bulk = Lane.RT, Lane.STD, Lane.BULK
    gateway, render, pf, decode, derender, batch = Role
    return (
        Stream(
            name="HR_REQ_RT",
            subjects=(req_filter("*", rt),),
            roles=_roles(gateway, render),
            work_queue=True,
            discard_new=True,
            max_bytes=512 * MIB,
            max_msgs_per_subject=max_queued_per_subject,
        ),
        Stream(
            name="HR_REQ",
            subjects=(req_filter("*", std), req_filter("*", bulk)),
            roles=_roles(gateway, render, batch),
            work_queue=True,
            discard_new=True,
            max_msgs_per_subject=max_queued_per_subject,
        ),
        Stream(
            name="HR_JOB_RT",
            subjects=(job_filter("*", rt),),
            roles=_roles(render, decode),
            work_queue=True,
            discard_new=True,
            max_bytes=512 * MIB,
            max_msgs_per_subject=max_queued_per_subject,
        ),
        Stream(
            name="HR_JOB",
            subjects=(job_filter("*", std), job_filter("*", bulk)),
            roles=_roles(render, decode),
            work_queue=True,
            discard_new=True,
            max_msgs_per_subject=max_queued_per_subject,
        ),
        Stream(
            name="HR_PF",
            subjects=(f"{ROOT}.pf.>",),
            roles=_roles(decode, pf),
            memory=True,
            work_queue=True,
            discard_new=True,
            max_age_s=300,
            max_bytes=256 * MIB,
        ),
        Stream(
            name=OUT_STREAM,
            subjects=(f"{ROOT}.out.>",),
            roles=_roles(gateway, render, decode, derender, batch),
            memory=True,
            max_age_s=900,
            max_bytes=512 * MIB,
        ),
        Stream(
            name="HR_RES",
            subjects=(f"{ROOT}.res.>",),
            roles=_roles(gateway, render, decode, derender, batch),
            discard_new=True,
            max_msgs_per_subject=1,
            max_age_s=3 * DAY_S,
        ),
        Stream(
            name="HR_CANCEL",
            subjects=(f"{ROOT}.ctl.cancel.*.*",),
            roles=_roles(*Role),
            memory=True,
            max_msgs_per_subject=1,
            max_age_s=DAY_S,
            max_bytes=16 * MIB,
        ),
        Stream(
            name="HR_DLQ",
            subjects=(f"{ROOT}.dlq.>",),
            roles=_roles(render, pf, decode, derender),
            max_age_s=14 * DAY_S,
        ),
        Stream(
            name="HR_RETURNED",
            subjects=(f"{ROOT}.returned.*.*",),
            roles=_roles(render, pf, decode),
            max_msgs_per_subject=1,
            max_age_s=KEPT_IN_A_QUEUE_S,
        ),
        Stream(
            name=BLOB_STREAM,
            subjects=(f"{ROOT}.blob.*",),
            roles=_roles(*Role),
            discard_new=True,
            max_age_s=14 * DAY_S,  # no blob outlives the messages that point to it
            message_ttl=True,
        ),
        Stream(
            name=META_STREAM,
            subjects=(f"{ROOT}.meta.*.*.*",),
            roles=_roles(gateway, batch),
            max_msgs_per_subject=1,
            message_ttl=True,
        ),
        Stream(
            name=FILE_STREAM,
            subjects=(file_parts_all(),),
            roles=_roles(gateway, batch),
            discard_new=True,  # a part that is there stays as it is
            max_msgs_per_subject=1,
        ),
        Stream(
            name="HR_BATCH",
            subjects=(batch_filter(),),
            roles=_roles(gateway, batch),
            work_queue=True,
            discard_new=True,
            max_bytes=64 * MIB,
            max_msgs_per_subject=1,
        ),
        Stream(
            name=EVENT_STREAM,
            subjects=(f"{ROOT}.ev.*.*.*",),
            roles=_roles(render, decode, derender, batch),
            max_age_s=3 * DAY_S,
            max_bytes=256 * MIB,
        ),
        Stream(
            name="HR_HOOK",
            subjects=(hook_filter(),),
            roles=_roles(batch),
            work_queue=True,
            discard_new=True,
            max_bytes=64 * MIB,
            max_age_s=KEPT_IN_A_QUEUE_S,  # the last try is days after the first
        ),
    )


class ApiError(BrokerError):
    """The broker's JetStream API said no; `err_code` is its own number for why."""

    def __init__(self, message: str, *, err_code: int) -> None:
        super().__init__(message)
        self.err_code = err_code


async def api(
    connection: Connection, name: str, body: Any = None, *, timeout_s: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """Call `$JS.API.<name>`. Raises: ApiError, or BrokerError when there is no answer."""
    message = await connection.request(
        f"$JS.API.{name}",
        b"" if body is None else msgspec.json.encode(body),
        timeout_s=timeout_s,
    )
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    if error := answer.get("error"):
        raise ApiError(
            f"{name}: {error.get('description')}", err_code=int(error.get("err_code", 0))
        )
    return answer


class Topology:
    """Declares the streams and consumers that one process uses."""

    def __init__(self, settings: BrokerSettings, role: str) -> None:
        self._replicas = settings.replicas
        self._streams = streams(settings.max_queued_per_subject)
        # With users, the broker's permissions hold each role to its own streams (nats-server.conf).
        self._only = Role(role) if settings.password and role in set(Role) else None
        self._declares = role != CLIENT

    def stream_of(self, subject: str) -> Stream | None:
        """Return the stream that captures a subject, or None."""
        return next(
            (s for s in self._streams if any(_matches(f, subject) for f in s.subjects)), None
        )

    async def declare_streams(self, connection: Connection) -> None:
        """Make the streams as they should be. Raises: BrokerError."""
        if not self._declares:
            return
        await asyncio.gather(
            *(
                self._declare_stream(connection, stream)
                for stream in self._streams
                if self._only is None or self._only in stream.roles
            )
        )

    async def declare_consumers(self, connection: Connection, slug: str, pool: str) -> None:
        """Make the consumers of one model and contract as they should be. Raises: BrokerError."""
        await asyncio.gather(
            *(
                self.declare_consumer(connection, queue)
                for queue in WorkQueue.of_model(slug, pool)
                if self._only is None or self._only is queue.role
            )
        )

    async def _declare_stream(self, connection: Connection, stream: Stream) -> None:
        config = stream.config(self._replicas)
        found = await self._stream_config(connection, stream.name)
        if found is None:
            first = {}
            if stream.memory:
                # A sequence that was never used before: an ack of a message of the stream that went away
                # with the broker must not hit a new message.
                first = {"first_seq": time.time_ns() // 10**6}
            try:
                await api(connection, f"STREAM.CREATE.{stream.name}", config | first)
                logger.info("stream created", extra={"action": "declare", "stream": stream.name})
                return
            except ApiError as error:
                if error.err_code != _STREAM_NAME_IN_USE:
                    raise
            found = await self._stream_config(connection, stream.name) or {}
        wrong = _differences(config, found)
        if not wrong:
            return
        try:
            # What we don't name stays as it is: an operator may have set placement or a description.
            await api(connection, f"STREAM.UPDATE.{stream.name}", found | config)
            logger.info(
                "stream updated: %s", wrong, extra={"action": "declare", "stream": stream.name}
            )
        except (DeniedError, ApiError) as error:
            logger.warning(
                "stream %s stays as it is (%s), because: %s",
                stream.name,
                wrong,
                error,
                extra={"action": "declare", "stream": stream.name},
            )

    async def _stream_config(self, connection: Connection, name: str) -> dict[str, Any] | None:
        try:
            config: dict[str, Any] = (
                await api(connection, f"STREAM.INFO.{name}", timeout_s=INFO_TIMEOUT_S)
            )["config"]
        except ApiError as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise
            return None
        return config

    async def declare_consumer(self, connection: Connection, queue: WorkQueue) -> None:
        """Make one consumer as it should be. Raises: BrokerError."""
        # Without an "action" the broker creates it, or updates what may be updated.
        await api(
            connection,
            f"CONSUMER.CREATE.{queue.stream}.{queue.consumer}.{queue.filter_subject}",
            {"stream_name": queue.stream, "config": queue.config(self._replicas)},
            timeout_s=CONSUMER_TIMEOUT_S,
        )


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} is {found.get(key)!r} and should be {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    )


def _matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, found = wanted[:-1], found[: len(wanted) - 1] if len(found) >= len(wanted) else []
    return len(wanted) == len(found) and all(
        w in ("*", f) for w, f in zip(wanted, found, strict=True)
    )
