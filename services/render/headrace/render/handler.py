"""One submission in, one job out; knows no broker."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.render import cache_salt
from headrace.render.renderer import Renderer
from headrace.shared import token_ids
from headrace.shared.choices import check_choices
from headrace.shared.errors import ExpiredError
from headrace.shared.messages import Job, Timings
from headrace.shared.settings import DecodeSettings
from headrace.shared.submission import Submission


class RenderHandler:
    """Turns a `Submission` into a `Job`."""

    def __init__(
        self,
        renderer: Renderer,
        instance: str,
        *,
        tenant_cache_salt: bool = True,
        max_choices: int = DecodeSettings().max_choices,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`tenant_cache_salt`: keep the tenants' cache entries apart."""
        self._tenant_cache_salt = tenant_cache_salt
        self._max_choices = max_choices
        self._renderer = renderer
        self._instance = instance
        self._now = now

    async def handle(self, submission: Submission) -> Job:
        """Render one submission.

        Raises: ExpiredError past its deadline, and whatever the renderer finds wrong (RequestError).
        """
        taken = self._in_time(submission)
        tenant = submission.tenant if self._tenant_cache_salt else ""
        rendered = await self._renderer.render(submission.endpoint, submission.body, tenant)
        prompts = rendered.prompts
        check_choices(rendered.n, len(prompts), self._max_choices)
        if self._tenant_cache_salt:
            prompts = tuple(cache_salt.for_tenant(p, submission.tenant) for p in prompts)
        done = self._in_time(submission)
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
            prompts=prompts,
            n=rendered.n,
            priority=rendered.priority,
            traceparent=submission.traceparent,
            is_own_id=submission.is_own_id,
            reader=submission.reader,
            reply_to=submission.reply_to,
            keeps_result=submission.keeps_result,
            timings=Timings(
                accepted=submission.accepted,
                render_queue_s=max(0.0, taken - submission.accepted),
                render_s=done - taken,
                num_prompt_token_ids=sum(token_ids.count(p.token_ids) for p in prompts),
                workers={"render": self._instance},
            ),
        )

    def _in_time(self, submission: Submission) -> float:
        """Return the time. Raises: ExpiredError past the deadline: nothing more may be spent on it."""
        now = self._now()
        if now > submission.deadline:
            raise ExpiredError(
                f"request {submission.request_id} was not rendered by its deadline, "
                f"{submission.deadline - submission.accepted:.1f} s after it was accepted"
            )
        return now
