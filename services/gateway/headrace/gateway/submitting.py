"""One request on its way into the pipeline."""

from __future__ import annotations

from headrace.gateway.call import Order
from headrace.gateway.link import Link
from headrace.shared import subjects
from headrace.shared.deadlines import kept_s
from headrace.shared.submission import Submission


async def publish(
    link: Link,
    order: Order,
    *,
    model: str,
    accepted: float,
    deadline: float,
    traceparent: str | None,
    reader: str | None,
    now: float,
) -> bool:
    """Publish a request; return False when the broker has one of this ID already. Times are Unix seconds.

    Raises: QueueFullError, PayloadTooLargeError; BrokerError when it is unknown whether it was accepted.
    """
    submission = Submission(
        request_id=order.request_id,
        tenant=order.tenant,
        slug=subjects.model_slug(model),
        lane=order.lane,
        endpoint=order.endpoint,
        deadline=deadline,
        accepted=accepted,
        body=order.body,
        traceparent=traceparent,
        is_own_id=order.is_own_id,
        reader=None if order.outlives_client else reader,
        keeps_result=order.keeps_result,
    )
    return await link.broker.publish_durable(
        submission.subject,
        submission.body,
        message_id=submission.message_id,
        headers=submission.to_headers(),
        kept_s=kept_s(submission.lane, submission.deadline, now),
    )
