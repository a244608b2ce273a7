"""vLLM's own HTTP chain beside the pipeline: `python benchmarks/fabric/chain.py --model FOLDER [--cases LIST]`.

What vLLM ships for the same stages is HTTP: `/v1/completions/render`, `/inference/v1/generate`, and
`/v1/completions/derender` once a chunk, with the state of the answer sent there and back. vLLM has no program that
calls them in turn; here this one does, with aiohttp, and its CPU counts apart (`caller`). As vLLM's toy proxy for P/D
does, it sends each prompt to a server for prefill first, with `max_tokens` 1, and then to the one for decode; with
`--one-leg` to that one alone. The engine behind either is the same fake one as in `run.py`; that for prefill has no
step time, and that for decode does not compute the prompt again: it would pull its KV cache, which takes no time
here. FOLDER needs a tokenizer and a `config.json`, no weights. Cases are those of `run.py`,
`streams:step_ms:token_ids`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

import aiohttp
import cases
from cases import HERE, Case
from stack import cpu_of
from window import PROMPT_TOKEN_IDS, Found, keep_open

START_S = 300.0
CASES = "1:5:16,32:20:128"
MODEL = "chain"
PROMPT = " ".join(["the"] * PROMPT_TOKEN_IDS)  # a token ID a word, with most tokenizers


class Chain:
    """The servers, and one way through them."""

    def __init__(
        self, session: aiohttp.ClientSession, render: str, decode: str, prefill: str | None
    ) -> None:
        """URLs; without a `prefill` server the other one computes the prompts."""
        self._session = session
        self._render = render
        self._prefill = prefill
        self._decode = decode

    async def ask(self, num_token_ids: int, found: Found, since: float) -> None:
        """Have one prompt answered; note its chunks that came after `since`."""
        asked, last = time.perf_counter(), None
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": num_token_ids}
        body |= {"ignore_eos": True, "stream": True}
        (request,) = await self._post(f"{self._render}/v1/completions/render", body)
        if (num_prompt := len(request["token_ids"])) != PROMPT_TOKEN_IDS:
            # The engine's time for the prompt, which `alone.py` has too, would be another one.
            raise SystemExit(f"the prompt has {num_prompt} token IDs instead of {PROMPT_TOKEN_IDS}")
        # vLLM leaves out what is the default, 16 here, and takes what is left out for as much as there is room for.
        params = request["sampling_params"] = {
            **request["sampling_params"],
            "max_tokens": num_token_ids,
        }
        if self._prefill is not None:
            first = {**request, "sampling_params": {**params, "max_tokens": 1}, "stream": False}
            await self._post(f"{self._prefill}/inference/v1/generate", first)
        state, num = None, 0
        async with self._session.post(
            f"{self._decode}/inference/v1/generate", json={**request, "stream": True}
        ) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if not chunk["choices"]:
                    continue
                derendered = await self._post(
                    f"{self._render}/v1/completions/derender",
                    {
                        "stream": True,
                        "model": MODEL,
                        "generate_chunk": chunk,
                        "stream_state": state,
                    },
                )
                state, now = derendered["stream_state"], time.perf_counter()
                num_here = len(chunk["choices"][0]["token_ids"])
                num += num_here
                found.note(num_here, now, asked=asked, last=last, since=since)
                last = now
        if num != num_token_ids:
            raise SystemExit(f"{num} token IDs instead of {num_token_ids}")
        found.num_answers += time.perf_counter() >= since

    async def _post(self, url: str, body: Any) -> Any:
        async with self._session.post(url, json=body) as answer:
            if answer.status != 200:
                raise SystemExit(await answer.text())
            return await answer.json()


async def load(case: Case, window_s: float, chain: Chain, pids: dict[str, int]) -> dict[str, Any]:
    """Keep the case's streams open; return what was found, and the servers' CPU, in the window."""

    async def ask(_: str, found: Found, since: float) -> None:
        await chain.ask(case.token_ids, found, since)

    def used() -> dict[str, float]:
        servers = {name: cpu_of(pid) for name, pid in pids.items()}
        return {**servers, "caller": time.process_time()}

    return await keep_open(case.streams, case.ramp_s, window_s, ask, used)


async def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Start vLLM's servers, load them."""
    with ExitStack() as stack:
        urls, pids = {}, {}
        for what in ("render", "decode") if options.one_leg else ("render", "prefill", "decode"):
            urls[what], process = started(what, case, options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            pids[what] = process.pid
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for url in urls.values():
                await until_up(session, url)
            chain = Chain(session, urls["render"], urls["decode"], urls.get("prefill"))
            await chain.ask(4, Found(), float("inf"))  # what is loaded at the first call
            return await load(case, options.window_s, chain, pids)


def started(
    what: str, case: Case, options: argparse.Namespace
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start one of vLLM's servers; return its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    step_s = 0.0 if what == "prefill" else case.step_s
    server = what if what == "render" else "generate"
    command = [sys.executable, str(HERE / "chain_server.py"), server, str(step_s)]
    # With a leg for prefill, the one for decode has the prompt's KV cache: it would pull it.
    command.append("0" if what == "decode" and not options.one_leg else "1")
    command += ["--model", options.model, "--served-model-name", MODEL, "--port", str(port)]
    quiet = subprocess.DEVNULL
    return f"http://127.0.0.1:{port}", subprocess.Popen(command, stdout=quiet, stderr=quiet)


async def until_up(session: aiohttp.ClientSession, url: str) -> None:
    """Return once a server answers."""
    async with asyncio.timeout(START_S):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/v1/models") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    cases.add_options(parser, CASES)
    parser.add_argument("--one-leg", action="store_true", help="no server for prefill")
    options = parser.parse_args()

    def measured(case: Case) -> tuple[dict[str, Any], dict[str, float]]:
        found = asyncio.run(measure(case, options))
        return found, {**found["by_service"], "rest": 0.0}

    rows = cases.rows(options.cases, options.window_s, measured)
    cases.write({"window_s": options.window_s, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
