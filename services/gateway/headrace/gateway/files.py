"""The files of tenants: uploaded, listed, read, deleted. Knows nothing of HTTP, but for the form of an upload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import get_args

import msgspec

from headrace.gateway.errors import (
    MAX_SHOWN_ID,
    BodyTimeoutError,
    NotFoundError,
    StateConflictError,
)
from headrace.gateway.files_upload import UploadForm, check_length, receive
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.shared.batches import BatchRecord, DraftRecord, FilePurpose, FileRecord
from headrace.shared.broker import Broker
from headrace.shared.errors import BadRequestError, ConflictError
from headrace.shared.files import BrokerFiles, FileStore, FileWriter
from headrace.shared.records import Page, Records, new_id

UPLOADS: tuple[FilePurpose, ...] = ("batch", "user_data")
"""What a client may upload a file for; the outputs of batches are made here."""
EXPIRES_AFTER_S = {"batch": 30 * 86_400}  # as OpenAI keeps them; others stay until they are deleted
MIN_EXPIRES_S, MAX_EXPIRES_S = 3_600, 2_592_000
MAX_FILENAME = 255
MAX_LIST = 10_000


class Files:
    """The files of every tenant, each seen by its own alone."""

    def __init__(
        self,
        link: Link,
        *,
        max_bytes: int,
        pace: Pace,
        store_of: Callable[[Broker], FileStore] = BrokerFiles,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._max_bytes = max_bytes
        self._store_of = store_of
        self._pace = pace
        self._clock = clock

    @property
    def store(self) -> FileStore:
        """Where the contents lie. Raises: BrokerError when there was no broker yet."""
        return self._store_of(self._link.broker)

    @property
    def records(self) -> Records:
        """Where the records lie. Raises: BrokerError when there was no broker yet."""
        return Records(self._link.broker)

    async def upload(
        self, tenant: str, chunks: AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> FileRecord:
        """Store what a client uploads; it is there whole, or not at all.

        Raises: RequestError saying what is wrong with it, or what `chunks` raises, and BrokerError.
        """
        form = UploadForm(headers.get("content-type", ""))
        check_length(headers.get("content-length"), self._max_bytes)
        created, file_id = int(self._clock()), new_id("file-")
        await self._note_draft(tenant, file_id)
        writer = FileWriter(self.store, tenant, file_id)
        try:
            record = await self._write(tenant, file_id, created, form, chunks, writer)
        except BaseException:
            if not writer.has_left:
                await self.forget_draft(tenant, file_id)
            raise
        await self.forget_draft(tenant, file_id)
        return record

    async def _write(
        self,
        tenant: str,
        file_id: str,
        created: int,
        form: UploadForm,
        chunks: AsyncIterator[bytes],
        writer: FileWriter,
    ) -> FileRecord:
        async with writer:
            await receive(form, self._in_time(chunks), writer, max_bytes=self._max_bytes)
            if not writer.num_bytes:
                raise BadRequestError("the file is empty", param="file")
            purpose = _purpose(form.fields.get("purpose"))
            expires_after_s = _expires_after_s(form.fields, purpose)
            await writer.finish()
            record = FileRecord(
                id=file_id,
                filename=(form.filename or "")[-MAX_FILENAME:] or "upload",
                purpose=purpose,
                created_at=created,
                num_bytes=writer.num_bytes,
                num_parts=writer.num_parts,
                expires_at=created + expires_after_s if expires_after_s else None,
            )
            await self.records.put("file", tenant, file_id, record, expect=0)
        return record

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record. Raises: NotFoundError."""
        return (await self._found(tenant, file_id))[0]

    async def list(
        self, tenant: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> Page[FileRecord]:
        """Return a tenant's files; `purpose`: those of one alone."""
        now = self._clock()
        return await self.records.list(
            "file",
            tenant,
            FileRecord,
            after=after,
            limit=limit,
            newest_first=newest_first,
            where=lambda file: purpose in (None, file.purpose) and not is_expired(file, now),
        )

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises: NotFoundError, StateConflictError while a batch needs it."""
        await self._found(tenant, file_id)
        await self.remove(tenant, file_id)

    async def remove(self, tenant: str, file_id: str) -> None:
        """Delete a file, also one that is past its time. Raises: as `delete`."""
        while True:
            record, revision = await self._recorded(tenant, file_id)
            await self._check_unused(tenant, record)
            await self._note_draft(tenant, file_id)
            try:
                await self.records.delete("file", tenant, file_id, expect=revision)
            except ConflictError:  # perhaps a batch that begins just now
                continue
            await self.store.delete(tenant, file_id)
            await self.forget_draft(tenant, file_id)
            return

    async def use(self, tenant: str, file_id: str, batch_id: str) -> FileRecord:
        """Note that a batch reads a file, which can't be deleted from then on. Raises: NotFoundError."""
        while True:
            record, revision = await self._found(tenant, file_id)
            running = [batch.id for batch in await self._running(tenant, record)]
            used = msgspec.structs.replace(record, batches=(*running, batch_id))
            try:
                await self.records.put("file", tenant, file_id, used, expect=revision)
            except ConflictError:
                continue
            return used

    async def _note_draft(self, tenant: str, file_id: str) -> None:
        """Note that the content is to be removed unless there is a record; whoever comes last does it."""
        draft = DraftRecord(since=int(self._clock()))
        await self.records.put("draft", tenant, file_id, draft, expect=None)

    async def forget_draft(self, tenant: str, file_id: str) -> None:
        """Note that nothing is left to be removed. Raises: BrokerError."""
        await self.records.delete("draft", tenant, file_id, expect=None)

    async def _found(self, tenant: str, file_id: str) -> tuple[FileRecord, int]:
        record, revision = await self._recorded(tenant, file_id)
        if is_expired(record, self._clock()):
            raise _no_such_file(file_id)
        return record, revision

    async def _recorded(self, tenant: str, file_id: str) -> tuple[FileRecord, int]:
        found = await self.records.find("file", tenant, file_id, FileRecord)
        if found is None:
            raise _no_such_file(file_id)
        return found

    async def _check_unused(self, tenant: str, record: FileRecord) -> None:
        if record.state == "live":
            raise StateConflictError(f"{record.id} is still written; cancel its batch first")
        for batch in await self._running(tenant, record):
            raise StateConflictError(
                f"{record.id} is the input of {batch.id}, which is {batch.status}; cancel it first"
            )

    async def _running(self, tenant: str, record: FileRecord) -> Sequence[BatchRecord]:
        found = [
            await self.records.get("batch", tenant, batch_id, BatchRecord)
            for batch_id in record.batches
        ]
        return [batch for batch, _ in filter(None, found) if not batch.is_over]

    async def _in_time(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks. Raises: BodyTimeoutError when the next one does not come, or the last one too late."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._pace.upload_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + self._pace.body_timeout_s)):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise BodyTimeoutError(
                    f"the file did not arrive: nothing within {self._pace.body_timeout_s:g} s, "
                    f"or not all of it within {self._pace.upload_timeout_s:g} s"
                ) from None
            yield chunk


def _no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id[:MAX_SHOWN_ID]}", param="id")


def is_expired(record: FileRecord, now: float) -> bool:
    """Return whether a file is past its time; it may not be deleted yet."""
    return record.expires_at is not None and record.expires_at <= now


def expires_after_s(anchor: object, seconds: object, where: str) -> int:
    """Return the seconds of an expiry policy. Raises: BadRequestError naming what is wrong of it."""
    if anchor != "created_at":
        raise BadRequestError(
            f"the anchor must be 'created_at', got {str(anchor)[:64]!r}", param=f"{where}.anchor"
        )
    try:
        number = int(str(seconds))
    except ValueError:
        number = 0
    if not MIN_EXPIRES_S <= number <= MAX_EXPIRES_S:
        raise BadRequestError(
            f"seconds must be {MIN_EXPIRES_S:,} to {MAX_EXPIRES_S:,}, got {str(seconds)[:64]!r}",
            param=f"{where}.seconds",
        )
    return number


def _expires_after_s(fields: Mapping[str, str], purpose: FilePurpose) -> int | None:
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return EXPIRES_AFTER_S.get(purpose)
    return expires_after_s(anchor, seconds, "expires_after")


def _purpose(text: str | None) -> FilePurpose:
    for purpose in UPLOADS:
        if text == purpose:
            return purpose
    if text is None:
        raise BadRequestError("'purpose' is a required property", param="purpose")
    known = ", ".join(map(repr, UPLOADS))
    others = f"; {text!r} is for files that are made here" if text in get_args(FilePurpose) else ""
    raise BadRequestError(
        f"{text[:64]!r} is not one of {known} - 'purpose'{others}", param="purpose"
    )
