"""The console in a real browser, at a whole stack with the fake engine and API keys."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from headrace.shared.api_keys import new_key

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
KEYS = {tenant: new_key() for tenant in ("acme", "globex", "ops")}
WATCHDOG_MS = 120_000  # nothing here waits for time: this ends what would hang
# A browser for tests alone: as root, and in containers with a small /dev/shm, it does not start otherwise.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]

Open = Callable[..., Coroutine[Any, Any, Page]]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a stack that needs a key."""
    if CHROMIUM is None:
        missing = "there is no Chromium on this machine (Debian's package `chromium`)"
        assert not os.environ.get("HEADRACE_NEEDS_CHROMIUM"), missing  # `make test-browser`
        pytest.skip(missing)
    home = tmp_path_factory.mktemp("console")
    settings = ("gateway.port=0", "gateway.operators=ops", "decode.local_prefill_threshold=32")
    sets = [f"--set={setting}" for setting in (*settings, "fake.step_s=0.02")]
    keys = ",".join(f"{tenant}:{key}" for tenant, key in KEYS.items())
    with (home / "up.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", "up", "--engine", "fake", *sets],
            env={**os.environ, "HEADRACE_HOME": str(home), "HEADRACE_GATEWAY_API_KEYS": keys},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready http://"), (home / "up.log").read_text()[-4000:]
        yield line.split()[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        process.stdout.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(url: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def console(browser: Browser, url: str) -> AsyncIterator[Open]:
    """Open the page, as a tenant; what the browser complains of fails the test."""
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    async def open_page(tenant: str | None = None, **context: Any) -> Page:
        contexts.append(await browser.new_context(**context))
        page = await contexts[-1].new_page()
        page.set_default_timeout(WATCHDOG_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: complaints.append(said.text) if "Content Security" in said.text else None,
        )
        await page.goto(f"{url}/console")
        if tenant is not None:
            await page.fill("#key-input", KEYS[tenant])
            await page.press("#key-input", "Enter")
            await page.wait_for_selector(".stage.tone-decode .worker .dot.ready")
        return page

    yield open_page
    for opened in contexts:
        await opened.close()
    assert complaints == []
