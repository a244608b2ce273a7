"""Parser settings under test: how a model that goes with them writes, and a running derenderer beside vLLM's server."""

from __future__ import annotations

import asyncio
import importlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.derender import renderer as derenderers
from headrace.derender.renderer import Derenderer
from headrace.render import renderer as renderers
from headrace.render.renderer import Renderer
from headrace.shared.messages import Job
from headrace.shared.settings import load

from .jobs import job_of

Calls = list[tuple[str, dict[str, Any]]]

EOS = 2
WEATHER = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = {
    "tools": [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }
        for name, properties in (("weather", WEATHER), ("clock", {}))
    ]
}


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def _qwen3_coder(calls: Calls) -> str:
    return "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm45(calls: Calls) -> str:
    return "".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _llama3_json(calls: Calls) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _pythonic(calls: Calls) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """One way to set parsers, and how a model that goes with them writes."""

    reasoning: str = ""
    tool: str = ""
    calls: Callable[[Calls], str] | None = None
    only_calls: bool = False  #: a call is the whole answer, without words around it
    strips: bool = False  #: vLLM strips the words before a call, in whole answers alone
    empty_arguments: bool = True  #: vLLM streams a call without arguments as it should


PARSERS = {
    "qwen3, hermes": Parsers(reasoning="qwen3", tool="hermes", calls=_hermes),
    "qwen3, qwen3_coder": Parsers(
        reasoning="qwen3", tool="qwen3_coder", calls=_qwen3_coder, strips=True
    ),
    "glm45": Parsers(reasoning="glm45", tool="glm45", calls=_glm45, strips=True),
    "deepseek_r1": Parsers(reasoning="deepseek_r1"),
    "hermes": Parsers(tool="hermes", calls=_hermes),
    "mistral": Parsers(tool="mistral", calls=_mistral, strips=True),
    "llama3_json": Parsers(
        tool="llama3_json", calls=_llama3_json, only_calls=True, empty_arguments=False
    ),
    "pythonic": Parsers(tool="pythonic", calls=_pythonic, only_calls=True),
}


@dataclass(frozen=True, kw_only=True)
class Kit:
    """A running derenderer with these parsers, and vLLM's server with the same ones."""

    parsers: Parsers
    renderer: Renderer
    derenderer: Derenderer
    tokenizer: Any
    reference: Any
    _jobs: dict[str, Job] = field(default_factory=dict)

    def body(self, **more: Any) -> dict[str, Any]:
        tools = TOOLS if self.parsers.tool else {}
        return {"messages": [{"role": "user", "content": "hi"}], **tools, **more}

    def job(self, **more: Any) -> Job:
        """Return the job that render makes of this body."""
        data = json.dumps(self.body(**more)).encode()
        if data.decode() not in self._jobs:
            self._jobs[data.decode()] = job_of(self.renderer, "chat.completions", data)
        return self._jobs[data.decode()]

    def ids(self, *texts: str) -> list[int]:
        """Return the token IDs of each text after the other, so that a border is where one ends."""
        return [
            one for text in texts for one in self.tokenizer.encode(text, add_special_tokens=False)
        ]


def start(parsers: Parsers, folder: Path) -> Kit:
    """Start what reads answers with these parsers, from a model folder."""
    model = {
        "name": str(folder),
        "served_name": "m",
        "reasoning_parser": parsers.reasoning,
        "tool_call_parser": parsers.tool,
        "enable_auto_tool_choice": bool(parsers.tool),
    }
    chosen = load(env={}, overrides={"model": model})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        renderer = renderers.build(chosen, "vllm")
        derenderer = derenderers.build(chosen, "vllm")
        asyncio.run(renderer.start())
        asyncio.run(derenderer.start())
        stack = importlib.import_module("headrace.engine.vllm_text").load(chosen)
    stepping = importlib.import_module(".stepping_reference", __package__)
    return Kit(
        parsers=parsers,
        renderer=renderer,
        derenderer=derenderer,
        tokenizer=stack.renderer.get_tokenizer(),
        reference=stepping.SteppingReference(stack),
    )
