"""Every NATS subject of headrace is built here, and nowhere else.

`docs/protocol.md` has a row for each; a test compares the two.
"""

from __future__ import annotations

import re
from enum import StrEnum
from hashlib import blake2b

from headrace.shared.errors import MalformedMessageError

ROOT = "hr.v1"

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NOT_SLUG = re.compile(r"[^a-z0-9_-]+")


class Lane(StrEnum):
    """How urgent a request is; the first is always taken first."""

    RT = "rt"  # a person waits
    STD = "std"  # asynchronous
    BULK = "bulk"  # batch


class Role(StrEnum):
    """The part that a process plays."""

    GATEWAY = "gateway"
    RENDER = "render"
    PREFILL = "prefill"
    DECODE = "decode"
    DERENDER = "derender"
    BATCH = "batch"


def model_slug(model: str) -> str:
    """Return the subject token of a served model name: lower case, `[a-z0-9_-]`.

    No name (a gateway serves every model) is `-`. A name that had to be changed gets 6 hex digits of its
    hash, so that two names never share a subject.
    """
    slug = _NOT_SLUG.sub("-", model.lower()).strip("-")
    if slug == model and len(slug) <= 64:
        return slug or "-"
    return f"{slug[:64].strip('-')}-{blake2b(model.encode(), digest_size=3).hexdigest()}"


def check_token(token: str, what: str) -> str:
    """Return `token` if it can stand between two dots of a subject.

    Raises: MalformedMessageError naming `what`; a wildcard or a dot here would reach other requests.
    """
    if not _TOKEN.fullmatch(token):
        raise MalformedMessageError(f"{what} must be 1 to 128 of A-Z a-z 0-9 _ -, got {token!r}")
    return token


def req(tenant: str, slug: str, lane: Lane) -> str:
    """Submissions: gateway, batch or any service → render."""
    return f"{ROOT}.req.{check_token(tenant, 'tenant')}.{slug}.{lane}"


def req_filter(slug: str, lane: Lane) -> str:
    """The submissions of one model and lane, of every tenant."""
    return f"{ROOT}.req.*.{slug}.{lane}"


def parse_req(subject: str) -> tuple[str, str, Lane]:
    """Return tenant, model slug and lane of a submission's subject.

    Raises: MalformedMessageError for any other subject.
    """
    parts = subject.split(".")
    if len(parts) != 6 or not subject.startswith(f"{ROOT}.req."):
        raise MalformedMessageError(f"{subject!r} is no {ROOT}.req.<tenant>.<model>.<lane>")
    try:
        return parts[3], parts[4], Lane(parts[5])
    except ValueError:
        raise MalformedMessageError(
            f"lane must be one of {', '.join(Lane)}, got {parts[5]!r}"
        ) from None


def render_ask(slug: str) -> str:
    """Questions that render answers at once: gateway or any service → one render worker (queue group `render`)."""
    return f"{ROOT}.render.ask.{slug}"


def derender_ask(slug: str) -> str:
    """The same for derender: gateway or any service → one derender worker (queue group `derender`)."""
    return f"{ROOT}.derender.ask.{slug}"


def pool(slug: str, contract: str) -> str:
    """Return the token of the workers that share a model and a contract: they alone share a queue."""
    return f"{slug}_{contract[:8]}"


def job(pool: str, tenant: str, lane: Lane) -> str:
    """Rendered jobs: render → a decode worker of the same contract."""
    return f"{ROOT}.job.{pool}.{check_token(tenant, 'tenant')}.{lane}"


def job_filter(pool: str, lane: Lane) -> str:
    """The jobs of one pool and lane, of every tenant."""
    return f"{ROOT}.job.{pool}.*.{lane}"


def prefill(pool: str, lane: Lane) -> str:
    """Prefill tasks: decode → any prefill worker of the same contract."""
    return f"{ROOT}.pf.{pool}.{lane}"


def prefill_worker(pool: str, instance: str) -> str:
    """Prefill tasks for one worker, after another one failed: decode → that prefill worker."""
    return f"{ROOT}.pf.{pool}.{instance}"


def kv(instance: str) -> str:
    """Handoffs: prefill → the decode worker that asked."""
    return f"{ROOT}.kv.{instance}"


def derender_open(slug: str) -> str:
    """Stream opens: decode → one derender worker (queue group `derender`)."""
    return f"{ROOT}.derender.open.{slug}"


def frames(instance: str) -> str:
    """Token frames: decode → the derender worker that was claimed."""
    return f"{ROOT}.frames.{instance}"


def out(tenant: str, request_id: str) -> str:
    """Answer chunks and the terminal: derender → whoever reads the answer."""
    return f"{ROOT}.out.{check_token(tenant, 'tenant')}.{check_token(request_id, 'request_id')}"


def res(tenant: str, request_id: str) -> str:
    """The terminal of a `std` or `bulk` request, kept; the first one wins."""
    return f"{ROOT}.res.{check_token(tenant, 'tenant')}.{check_token(request_id, 'request_id')}"


def res_all(tenant: str) -> str:
    """Every kept terminal of a tenant; a batch worker heeds the ones of its batches' lines."""
    return f"{ROOT}.res.{check_token(tenant, 'tenant')}.*"


def reply(tenant: str, token: str) -> str:
    """The terminal once more, for whoever named this subject in the submission; `token` is the submitter's choice."""
    return f"{ROOT}.reply.{check_token(tenant, 'tenant')}.{check_token(token, 'token')}"


def ctl(instance: str) -> str:
    """Control messages for one decode worker: credits, resync, stop, done."""
    return f"{ROOT}.ctl.worker.{instance}"


def handshake(instance: str) -> str:
    """First contact: decode → one prefill worker, which answers with a handoff of one token ID."""
    return f"{ROOT}.ctl.handshake.{instance}"


def cancel(tenant: str, request_id: str) -> str:
    """Cancel one request, whoever holds it."""
    return (
        f"{ROOT}.ctl.cancel.{check_token(tenant, 'tenant')}.{check_token(request_id, 'request_id')}"
    )


def cancel_all() -> str:
    """Every cancel; each worker keeps the ones that are its own."""
    return f"{ROOT}.ctl.cancel.*.*"


def takeover(tenant: str, request_id: str) -> str:
    """A job has a new owner: decode → every decode and derender worker that may hold the request."""
    return f"{ROOT}.ctl.takeover.{check_token(tenant, 'tenant')}.{check_token(request_id, 'request_id')}"


def takeover_all() -> str:
    """Every takeover; each worker heeds the ones of requests that it holds."""
    return f"{ROOT}.ctl.takeover.*.*"


def owner(instance: str) -> str:
    """Is this request in your hands? Decode → one other decode worker, which answers at once."""
    return f"{ROOT}.ctl.owner.{instance}"


def heartbeat(slug: str, role: Role, instance: str) -> str:
    """Heartbeats: every worker → whoever keeps a table of workers."""
    return f"{ROOT}.ctl.heartbeat.{slug}.{role}.{instance}"


def heartbeats(slug: str = "*") -> str:
    """The heartbeats of one model's workers, or of all."""
    return f"{ROOT}.ctl.heartbeat.{slug}.*.*"


def roll_call() -> str:
    """Asks every worker for a heartbeat at once: a newcomer → all workers."""
    return f"{ROOT}.ctl.roll_call"


def log_level(role: Role) -> str:
    """How much to log: an operator → every process of a role."""
    return f"{ROOT}.ctl.log_level.{role}"


def ping(instance: str) -> str:
    """Is this process there? Whoever watches it → one worker or gateway, which answers at once."""
    return f"{ROOT}.ctl.ping.{instance}"


def dead_letter(stage: Role, slug: str) -> str:
    """Messages that a stage could not read or gave up on: any stage → operators."""
    return f"{ROOT}.dlq.{stage}.{slug}"


def returned(stream: str, sequence: int) -> str:
    """How often a queued message came back unharmed: the worker that gives it back → its next ones."""
    return f"{ROOT}.returned.{stream}.{sequence}"


def blob(blob_id: str) -> str:
    """The parts of a payload too large for one message (claim-check)."""
    return f"{ROOT}.blob.{check_token(blob_id, 'blob_id')}"


def meta(tenant: str, kind: str, record_id: str) -> str:
    """The record of one file, batch, background response, … of a tenant: whoever changes it → who reads it."""
    return (
        f"{ROOT}.meta.{check_token(tenant, 'tenant')}.{check_token(kind, 'kind')}"
        f".{check_token(record_id, 'record_id')}"
    )


def meta_filter(tenant: str, kind: str) -> str:
    """A tenant's records of one kind."""
    return f"{ROOT}.meta.{check_token(tenant, 'tenant')}.{check_token(kind, 'kind')}.*"


def meta_all(kind: str) -> str:
    """Every tenant's records of one kind."""
    return f"{ROOT}.meta.*.{check_token(kind, 'kind')}.*"


def file_part(tenant: str, file_id: str, number: int) -> str:
    """One part of a file's content, counted from 0: gateway, batch → who reads the file."""
    return f"{ROOT}.file.{check_token(tenant, 'tenant')}.{check_token(file_id, 'file_id')}.{number}"


def file_parts(tenant: str, file_id: str) -> str:
    """Every part of one file."""
    return f"{ROOT}.file.{check_token(tenant, 'tenant')}.{check_token(file_id, 'file_id')}.*"


def file_parts_all() -> str:
    """Every part of every tenant's files."""
    return f"{ROOT}.file.*.*.*"


def batch(tenant: str, batch_id: str) -> str:
    """Batches that are to be run: gateway → a batch worker."""
    return f"{ROOT}.batch.{check_token(tenant, 'tenant')}.{check_token(batch_id, 'batch_id')}"


def batch_filter() -> str:
    """The batches of every tenant."""
    return f"{ROOT}.batch.*.*"


def event(tenant: str, kind: str, change: str) -> str:
    """What happened to a request, a response or a batch: whoever decided it → whoever wants to know."""
    return (
        f"{ROOT}.ev.{check_token(tenant, 'tenant')}.{check_token(kind, 'kind')}"
        f".{check_token(change, 'change')}"
    )


def event_filter(kind: str) -> str:
    """The events of one kind, of every tenant."""
    return f"{ROOT}.ev.*.{kind}.*"


def event_change_filter(kind: str, change: str) -> str:
    """The events of one change, of every tenant: whoever decided it → one gateway (queue group `gateway`)."""
    return f"{ROOT}.ev.*.{kind}.{change}"


def hook(tenant: str, endpoint_id: str) -> str:
    """Webhooks that are to be sent to one endpoint of a tenant: batch → a batch worker."""
    return f"{ROOT}.hook.{check_token(tenant, 'tenant')}.{check_token(endpoint_id, 'endpoint_id')}"


def hook_filter() -> str:
    """The webhooks of every tenant."""
    return f"{ROOT}.hook.*.*"
