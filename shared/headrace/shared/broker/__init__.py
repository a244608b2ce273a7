"""The broker: everything headrace does with NATS, and the only package that imports it."""

from headrace.shared.broker.admin import Admin, Kept, QueueInfo
from headrace.shared.broker.client import Broker, Subscription
from headrace.shared.broker.connection import DeniedError
from headrace.shared.broker.delivery import Delivery
from headrace.shared.broker.message import Received
from headrace.shared.broker.topology import CLIENT
from headrace.shared.broker.work_queue import WorkQueue

__all__ = [
    "CLIENT",
    "Admin",
    "Broker",
    "Delivery",
    "DeniedError",
    "Kept",
    "QueueInfo",
    "Received",
    "Subscription",
    "WorkQueue",
]
