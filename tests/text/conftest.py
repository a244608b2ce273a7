"""vLLM's text side of the demo model: no engine, so it starts in seconds.

vLLM is imported by the fixtures alone: collecting these tests costs nothing where they are not run.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from headrace.derender import renderer as derenderers
from headrace.derender.renderer import Derenderer
from headrace.render import renderer as renderers
from headrace.render.renderer import Renderer
from headrace.shared.messages import Endpoint, Job
from headrace.shared.settings import Settings, load

from .jobs import job_of

MakeJob = Callable[..., Job]


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    """Import vLLM, whose dependencies warn of each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("headrace.engine.vllm_outputs")


@pytest.fixture(scope="session")
def reference(_vllm: None) -> Any:
    """The module that asks vLLM's own server."""
    return importlib.import_module(".reference", __package__)


@pytest.fixture(scope="session")
def settings() -> Settings:
    return load(
        env={},
        overrides={
            "model": {
                "reasoning_parser": "qwen3",
                "tool_call_parser": "hermes",
                "enable_auto_tool_choice": True,
            }
        },
    )


@pytest.fixture(scope="session")
def renderer(_vllm: None) -> Iterator[Renderer]:
    """Renders with no parser."""
    yield from _started(Settings())


@pytest.fixture(scope="session")
def parsing_renderer(_vllm: None, settings: Settings) -> Iterator[Renderer]:
    """Renders with a reasoning and a tool parser."""
    yield from _started(settings)


@pytest.fixture(scope="session")
def strict_renderer(_vllm: None, settings: Settings) -> Iterator[Renderer]:
    """Renders with a tool parser, and holds every tool call to the tool's schema."""
    model = msgspec.structs.replace(settings.model, tool_strict_level="parameter")
    yield from _started(msgspec.structs.replace(settings, model=model))


@pytest.fixture(scope="session")
def derenderer(_vllm: None) -> Derenderer:
    return _derenderer(Settings())


@pytest.fixture(scope="session")
def parsing_derenderer(_vllm: None, settings: Settings) -> Derenderer:
    return _derenderer(settings)


@pytest.fixture(scope="session")
def stack(_vllm: None) -> Any:
    return importlib.import_module("headrace.engine.vllm_text").load(Settings())


@pytest.fixture(scope="session")
def parsing_stack(_vllm: None, settings: Settings) -> Any:
    return importlib.import_module("headrace.engine.vllm_text").load(settings)


@pytest.fixture(scope="session")
def make_job(renderer: Renderer) -> MakeJob:
    return _maker(renderer)


@pytest.fixture(scope="session")
def make_parsing_job(parsing_renderer: Renderer) -> MakeJob:
    return _maker(parsing_renderer)


def _started(settings: Settings) -> Iterator[Renderer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        renderer = renderers.build(settings, "vllm")
        asyncio.run(renderer.start())
    yield renderer
    asyncio.run(renderer.close())


def _derenderer(settings: Settings) -> Derenderer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        derenderer = derenderers.build(settings, "vllm")
        asyncio.run(derenderer.start())
    return derenderer


def _maker(renderer: Renderer) -> MakeJob:
    def make(body: dict[str, Any], endpoint: Endpoint = "chat.completions") -> Job:
        return job_of(renderer, endpoint, json.dumps(body).encode())

    return make
