"""Render spends nothing on what is too late or too large, before it works and after."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.render.handler import RenderHandler
from headrace.render.renderer import Rendered, Renderer
from headrace.shared.errors import BadRequestError, ExpiredError
from headrace.shared.messages import Prompt
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

PROMPT = Prompt(token_ids=b"\x01\x00\x00\x00", sampling_params=b"\x80")


class Bench:
    """A renderer that takes its time, on a clock of the test's own."""

    served_name, contract, max_model_len = "m", "c", 100

    def __init__(self, **options: Any) -> None:
        self.time, self.takes_s, self.num_rendered = 100.0, 0.0, 0
        self.tenants: list[str] = []
        self.rendered = Rendered(prompts=(PROMPT, PROMPT), n=2, stream=False, priority=0)
        self.handler = RenderHandler(
            cast(Renderer, self), "render-1", max_choices=4, now=lambda: self.time, **options
        )

    async def render(self, endpoint: str, body: bytes, tenant: str) -> Rendered:
        self.num_rendered += 1
        self.tenants.append(tenant)
        self.time += self.takes_s
        return self.rendered

    async def handle(self, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "request_id": "r",
            "tenant": "acme",
            "slug": "m",
            "lane": Lane.RT,
            "endpoint": "completions",
            "deadline": 110.0,
            "accepted": 100.0,
            "body": b"{}",
        }
        return await self.handler.handle(Submission(**values | changes))


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_what_is_past_its_deadline_is_not_rendered(bench: Bench) -> None:
    with pytest.raises(ExpiredError):
        await bench.handle(deadline=99.0)
    assert bench.num_rendered == 0


async def test_what_was_rendered_too_late_costs_no_engine_time(bench: Bench) -> None:
    bench.takes_s = 11.0
    with pytest.raises(ExpiredError):
        await bench.handle()


async def test_as_many_choices_as_allowed_are_a_job_and_one_prompt_more_is_none(
    bench: Bench,
) -> None:
    job = await bench.handle(reader="gateway-1")
    assert (job.n, len(job.prompts), job.reader) == (2, 2, "gateway-1")
    bench.rendered = Rendered(prompts=(PROMPT,) * 3, n=2, stream=False, priority=0)
    with pytest.raises(BadRequestError, match=r"6 choices; a request may have 4 .*max_choices"):
        await bench.handle()


async def test_the_renderer_is_told_whose_entries_it_may_use(bench: Bench) -> None:
    for tenant in ("acme", "globex"):
        await bench.handle(tenant=tenant)
    assert bench.tenants == ["acme", "globex"]


async def test_tenants_that_trust_one_another_share_its_entries() -> None:
    bench = Bench(tenant_cache_salt=False)
    for tenant in ("acme", "globex"):
        await bench.handle(tenant=tenant)
    assert bench.tenants == ["", ""]
