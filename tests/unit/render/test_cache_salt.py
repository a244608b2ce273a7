"""Prefix-cache entries never cross tenants."""

from __future__ import annotations

import json

import pytest

from headrace.render.cache_salt import for_tenant
from headrace.render.handler import RenderHandler
from headrace.render.renderer_fake import FakeRenderer
from headrace.shared import token_ids
from headrace.shared.messages import Prompt
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission


async def rendered(tenant: str, salt: str | None = None, *, is_on: bool = True) -> Prompt:
    renderer = FakeRenderer(Settings())
    handler = RenderHandler(renderer, "render-1", tenant_cache_salt=is_on, now=lambda: 0.0)
    body = {"prompt": "the same prompt"} | ({} if salt is None else {"cache_salt": salt})
    submission = Submission(
        request_id="r1",
        tenant=tenant,
        slug="m",
        lane=Lane.RT,
        endpoint="completions",
        deadline=1.0,
        accepted=0.0,
        body=json.dumps(body).encode(),
    )
    (prompt,) = (await handler.handle(submission)).prompts
    return prompt


def bound_to(prompt: Prompt) -> str:
    return token_ids.prompt_hash(prompt.token_ids, prompt.cache_salt)


async def test_two_tenants_never_share_what_one_shares_with_itself() -> None:
    acme, again, globex = [await rendered(tenant) for tenant in ("acme", "acme", "globex")]
    assert acme.token_ids == globex.token_ids
    assert acme == again
    assert acme.cache_salt != globex.cache_salt
    assert bound_to(acme) != bound_to(globex)


async def test_a_clients_own_salt_counts_within_its_tenant() -> None:
    salts = {
        (await rendered(tenant, salt)).cache_salt
        for tenant in ("acme", "globex")
        for salt in (None, "a", "b")
    }
    assert len(salts) == 6


@pytest.mark.parametrize("salt", ["globex", "globex/", "/globex"])
async def test_no_salt_makes_a_client_another_tenant(salt: str) -> None:
    mine = await rendered("acme", salt)
    assert mine.cache_salt != (await rendered("globex")).cache_salt
    assert mine.cache_salt != (await rendered("acme")).cache_salt
    assert salt not in (mine.cache_salt or "")


async def test_tenants_that_trust_one_another_may_share() -> None:
    assert (await rendered("acme", is_on=False)).cache_salt is None
    assert (await rendered("acme", "a", is_on=False)).cache_salt == "a"


def test_a_salt_that_is_no_text_is_still_a_salt() -> None:
    """JSON may hold half a character, which no message could carry."""
    prompts = [
        Prompt(token_ids=b"", sampling_params=b"", cache_salt=s) for s in ("\ud800", "\ud801")
    ]
    assert len({for_tenant(prompt, "acme").cache_salt for prompt in prompts}) == 2
