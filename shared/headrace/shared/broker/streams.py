"""The streams: what each holds, how long, how much of it, and who uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

DAY_S = 86_400
KEPT_IN_A_QUEUE_S = 7 * DAY_S  # how long a file queue's large payloads stay readable
BLOB_S = 600  # of a blob that no stream's message points to

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


def matches(pattern: str, subject: str) -> bool:
    """Whether a stream's pattern captures a subject; `*` and `>` as in NATS."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, found = wanted[:-1], found[: len(wanted) - 1] if len(found) >= len(wanted) else []
    return len(wanted) == len(found) and all(
        w in ("*", f) for w, f in zip(wanted, found, strict=True)
    )
