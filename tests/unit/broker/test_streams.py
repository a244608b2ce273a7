"""The streams: nothing that waits for a worker may grow without an end."""

from __future__ import annotations

import pytest

from headrace.shared.broker.streams import Stream, streams

QUEUES = [stream for stream in streams(7) if stream.work_queue]


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.name)
def test_every_queue_refuses_what_is_too_much(queue: Stream) -> None:
    assert queue.discard_new
    is_counted = queue.max_msgs_per_subject == 7
    is_short_lived = queue.max_age_s > 0 and queue.max_bytes > 0
    is_each_once = queue.max_msgs_per_subject == 1 and queue.max_bytes > 0
    assert is_counted or is_short_lived or is_each_once
