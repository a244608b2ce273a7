"""The batch process: takes batches, and owns each to its end, or until it ends itself. Also sends the webhooks."""

from __future__ import annotations

import asyncio
import logging

from headrace.batch.errors import NotOwnerError
from headrace.batch.handler import BatchHandler, tell
from headrace.batch.inbox import Inbox
from headrace.batch.ownership import Owned
from headrace.batch.webhooks import Webhooks
from headrace.shared.batches import BatchRecord
from headrace.shared.broker import Delivery, WorkQueue
from headrace.shared.errors import BrokerError, WireError
from headrace.shared.file_store import store_of
from headrace.shared.files import FileStore
from headrace.shared.intake import Intake, Slots, all_or_none, guarded
from headrace.shared.records import Records
from headrace.shared.served_models import Models
from headrace.shared.settings import BatchSettings, EngineKind, Settings
from headrace.shared.subjects import Role
from headrace.shared.worker import Worker, joined

logger = logging.getLogger(__name__)

AGAIN_S = 1.0


async def run(settings: Settings, *, engine: EngineKind, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; what is under way then goes on under the next owner.

    Raises: HeadraceError.
    """
    files = store_of(settings.files)
    async with joined(
        settings,
        Role.BATCH,
        model="",  # it runs whatever models there are
        contract="",
        slots=settings.batch.slots,
        stop=stop,
    ) as worker:
        webhooks = Webhooks(worker.broker, settings.webhooks)
        service = BatchService(worker, settings.batch, files(worker.broker))
        await all_or_none([service.serve(stop), webhooks.serve(stop)])


class BatchService:
    """The batches that this process owns."""

    def __init__(self, worker: Worker, settings: BatchSettings, store: FileStore) -> None:
        self._worker = worker
        self._settings = settings
        self._records = Records(worker.broker)
        self._store = store
        self._inbox = Inbox(worker.broker)
        self._models = Models(worker.table)
        self._by_id: dict[tuple[str, str], set[BatchHandler]] = {}
        self._is_stopping = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Take batches until `stop`. Raises: BrokerError, DeniedError."""
        slots = Slots(self._settings.slots)
        self._worker.describe = lambda: {"num_running": slots.total - slots.free}
        await self._worker.broker.declare_queue(WorkQueue.batch())
        watch = await self._records.watch("batch", self._record_changed)
        intake = Intake(
            self._worker.broker, [WorkQueue.batch()], slots, self._settle, on_stop=self._drain
        )
        await self._worker.enter("ready")
        try:
            await guarded(
                intake.run(stop, drain_timeout_s=self._settings.drain_timeout_s), self._inbox.run()
            )
        finally:
            await watch.unsubscribe()

    async def _drain(self) -> None:
        self._is_stopping = True
        await self._worker.enter("draining")
        for handlers in self._by_id.values():
            for handler in handlers:
                handler.drain()

    def _record_changed(self, tenant: str, batch_id: str) -> None:
        for handler in self._by_id.get((tenant, batch_id), ()):
            handler.record_changed()

    async def _settle(self, delivery: Delivery) -> None:
        """Own a batch; what keeps this worker from it lets the message come again, and counts in its record."""
        try:
            async with delivery.keep_alive():
                is_over = await self._own(delivery)
            if is_over:
                await delivery.ack()
            else:
                await delivery.nak()
        except NotOwnerError as error:  # the message is the other owner's, and not to be touched
            logger.warning("%s", error, extra={"action": "batch_lost"})
        except (BrokerError, WireError) as error:
            logger.warning(
                "batch on %s comes again: %s",
                delivery.subject,
                error,
                extra={"action": "not_settled", "subject": delivery.subject},
            )
        except Exception:
            # Another owner may do better; after so many the batch fails.
            logger.exception(
                "batch on %s made this worker fail",
                delivery.subject,
                extra={"action": "unexpected_error", "subject": delivery.subject},
            )
            await delivery.nak(AGAIN_S)

    async def _own(self, delivery: Delivery) -> bool:
        """Return whether the batch is over, or there is none."""
        tenant, batch_id = delivery.subject.split(".")[3:5]
        owned = await Owned.take(self._records, tenant, batch_id, self._worker.instance)
        if owned is None:
            found = await self._records.get("batch", tenant, batch_id, BatchRecord)
            if found is not None:
                await tell(self._worker, tenant, found[0])  # its owner may have died before
            return True
        logger.info(
            "batch taken",
            extra={"action": "batch_taken", "batch_id": batch_id, "epoch": owned.record.epoch},
        )
        handler = BatchHandler(
            self._worker,
            self._records,
            self._store,
            self._inbox,
            self._models,
            owned,
            max_lines=self._settings.max_lines,
        )
        handlers = self._by_id.setdefault((tenant, batch_id), set())
        handlers.add(handler)
        try:
            if self._is_stopping:
                handler.drain()
            await handler.run()
            if owned.record.is_over:
                await handler.tell()
        finally:
            handlers.discard(handler)
            if not handlers:
                self._by_id.pop((tenant, batch_id), None)
        return owned.record.is_over
