"""Brings the lines of a batch to their results, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from headrace.cli.batch import results as batch_results
from headrace.cli.batch.checkpoint import Checkpoint, Entry, Key, LineId
from headrace.cli.batch.progress import Counts
from headrace.client import Client, Result
from headrace.shared.batch_lines import Line, LineError, Parser, Request
from headrace.shared.errors import ModelNotFoundError, SettingsError
from headrace.shared.served_models import Models

STOPPED = "headrace batch run was stopped"
LINES_BETWEEN_YIELDS = 200


class Runner:
    """Runs what the checkpoint does not have."""

    def __init__(
        self,
        client: Client,
        checkpoint: Checkpoint,
        models: Models,
        counts: Counts,
        *,
        default_model: str | None,
        retry_failed: bool,
    ) -> None:
        self._client = client
        self._checkpoint = checkpoint
        self._models = models
        self._counts = counts
        self._parser = Parser(default_model)
        self._retry_failed = retry_failed
        self._end = 0  # of the last line that was read, in bytes

    async def run(self, lines: Iterable[Line], concurrency: int) -> None:
        """Bring every line to its result, with at most `concurrency` under way, and no more of them in memory.

        Raises: SettingsError, BrokerError, CheckpointError. Then, and when this is cancelled, what is under way is
        cancelled as well.
        """
        free = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    num_bytes, self._end = line.end - self._end, line.end
                    request = self._request(line, num_bytes)
                    if request is not None:
                        await free.acquire()
                        task = group.create_task(self._bring(line, request, num_bytes))
                        task.add_done_callback(lambda _: free.release())
                    elif not line.number % LINES_BETWEEN_YIELDS:
                        await asyncio.sleep(0)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _request(self, line: Line, num_bytes: int) -> Request | None:
        """Return what is to be run for a line. None: it has its result, now at the latest."""
        try:
            request = self._parser.parse(line)
        except LineError as error:
            self._refuse(line, error, num_bytes)
            return None
        entry = self._standing(request.custom_id, request.digest)
        if entry is not None and (entry.is_ok or not self._retry_failed):
            self._counts.skipped(num_bytes)
            return None
        return request

    def _refuse(self, line: Line, error: LineError, num_bytes: int) -> None:
        entry = self._checkpoint.get(error.custom_id or line.number)
        if entry is not None and entry.line_id.digest == line.digest:
            self._counts.skipped(num_bytes)
            return
        if error.custom_id:
            self._standing(error.custom_id, line.digest)
        attempt = 0 if entry is None else entry.line_id.attempt + 1
        line_id = LineId(self._checkpoint.run_id, line.number, line.digest, attempt)
        result = batch_results.of_error(line_id, error.custom_id, error)
        self._checkpoint.write(line_id, error.custom_id, result, is_ok=False)
        self._counts.ended(num_bytes, is_ok=False)

    def _standing(self, key: Key, digest: str) -> Entry | None:
        """Return the result that the output has. Raises: SettingsError when it is that of another request."""
        entry = self._checkpoint.get(key)
        if entry is None or entry.line_id.digest == digest:
            return entry
        if self._retry_failed and not entry.is_ok:
            return entry
        raise SettingsError(
            f"the output file has a result for custom_id {key!r}, of another request than the one that the input "
            "has now: choose another output file, or remove this one"
            + ("" if entry.is_ok else ", or run the failed ones again with --retry-failed")
        )

    async def _bring(self, line: Line, request: Request, num_bytes: int) -> None:
        try:
            await self._models.check(request.model)
        except ModelNotFoundError as error:
            line_id = self._line_id(line, request)
            written = batch_results.of_error(line_id, request.custom_id, error)
            self._checkpoint.write(line_id, request.custom_id, written, is_ok=False)
            self._counts.ended(num_bytes, is_ok=False)
            return
        line_id, result = await self._result(self._line_id(line, request), request)
        written = batch_results.of_result(line_id, request.custom_id, result)
        self._checkpoint.write(line_id, request.custom_id, written, is_ok=result.is_ok)
        self._counts.ended(
            num_bytes,
            is_ok=result.is_ok,
            num_token_ids=result.timings.num_output_token_ids or 0,
        )

    def _line_id(self, line: Line, request: Request) -> LineId:
        entry = self._checkpoint.get(request.custom_id)
        attempt = 0 if entry is None else entry.line_id.attempt + 1
        return LineId(self._checkpoint.run_id, line.number, request.digest, attempt)

    async def _result(self, line_id: LineId, request: Request) -> tuple[LineId, Result]:
        """Return a request's end, whoever computed it, and under which ID. Raises: BrokerError."""
        while True:
            result = await self._client.run(
                request.body,
                lane="bulk",
                endpoint=request.endpoint,
                request_id=str(line_id),
                cancel_reason=STOPPED,
            )
            # A run that was stopped has cancelled what this one asks for again: it has its end, under that ID.
            if result.status != "cancelled" or STOPPED not in (result.error or ""):
                return line_id, result
            line_id = line_id._replace(attempt=line_id.attempt + 1)
