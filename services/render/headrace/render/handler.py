"""One submission in, one job out; knows no broker."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.render.renderer import Renderer
from headrace.shared import token_ids
from headrace.shared.errors import ExpiredError
from headrace.shared.messages import Job, Timings
from headrace.shared.submission import Submission


class RenderHandler:
    """Turns a `Submission` into a `Job`."""

    def __init__(
        self, renderer: Renderer, instance: str, *, now: Callable[[], float] = time.time
    ) -> None:
        self._renderer = renderer
        self._instance = instance
        self._now = now

    async def handle(self, submission: Submission) -> Job:
        """Render one submission.

        Raises: ExpiredError past its deadline, and whatever the renderer finds wrong (RequestError).
        """
        taken = self._now()
        if taken > submission.deadline:
            raise ExpiredError(
                f"request {submission.request_id} waited {taken - submission.accepted:.1f} s to be "
                "rendered, past its deadline"
            )
        rendered = await self._renderer.render(submission.endpoint, submission.body)
        done = self._now()
        return Job(
            request_id=submission.request_id,
            tenant=submission.tenant,
            model=self._renderer.served_name,
            lane=submission.lane,
            endpoint=submission.endpoint,
            created=int(done),
            published=done,
            deadline=submission.deadline,
            contract=self._renderer.contract,
            body=submission.body,
            stream=rendered.stream,
            prompts=rendered.prompts,
            n=rendered.n,
            priority=rendered.priority,
            traceparent=submission.traceparent,
            timings=Timings(
                accepted=submission.accepted,
                render_queue_s=max(0.0, taken - submission.accepted),
                render_s=done - taken,
                num_prompt_token_ids=sum(token_ids.count(p.token_ids) for p in rendered.prompts),
                workers={"render": self._instance},
            ),
        )
