"""Jobs of bodies, made by what makes them in a render worker."""

from __future__ import annotations

import asyncio

from headrace.render.handler import RenderHandler
from headrace.render.renderer import Renderer
from headrace.shared.messages import Endpoint, Job
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

NOW = 1_700_000_000.0


def job_of(renderer: Renderer, endpoint: Endpoint, body: bytes) -> Job:
    """Return the job of a body; its times and IDs are always the same."""
    submission = Submission(
        request_id="r1",
        tenant="t",
        slug="m",
        lane=Lane.RT,
        endpoint=endpoint,
        deadline=NOW + 60,
        accepted=NOW,
        body=body,
        is_own_id=False,
    )
    handler = RenderHandler(renderer, "render-1", tenant_cache_salt=False, now=lambda: NOW)
    return asyncio.run(handler.handle(submission))
