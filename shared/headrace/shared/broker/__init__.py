"""The broker: everything headrace does with NATS, and the only package that imports it."""

from headrace.shared.broker.client import Broker, Received, Subscription
from headrace.shared.broker.delivery import Delivery
from headrace.shared.broker.work_queue import WorkQueue

__all__ = ["Broker", "Delivery", "Received", "Subscription", "WorkQueue"]
