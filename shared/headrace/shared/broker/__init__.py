"""The broker: everything headrace does with NATS, and the only package that imports it."""

from headrace.shared.broker.admin import Admin, Kept, QueueInfo, ServerInfo, StoreInfo
from headrace.shared.broker.client import Broker
from headrace.shared.broker.connection import DeniedError
from headrace.shared.broker.delivery import Delivery
from headrace.shared.broker.documents import Document, Documents
from headrace.shared.broker.message import Received
from headrace.shared.broker.subscription import Subscription
from headrace.shared.broker.topology import CLIENT
from headrace.shared.broker.work_queue import WorkQueue

__all__ = [
    "CLIENT",
    "Admin",
    "Broker",
    "Delivery",
    "DeniedError",
    "Document",
    "Documents",
    "Kept",
    "QueueInfo",
    "Received",
    "ServerInfo",
    "StoreInfo",
    "Subscription",
    "WorkQueue",
]
