"""What an older vLLM lacks, with stand-ins for it; what this one has, as it is."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.derender.renderer import AnswerStream, Derenderer
from headrace.render.renderer import Renderer
from headrace.shared.errors import BadRequestError, SettingsError
from headrace.shared.messages import Job
from headrace.shared.settings import Settings

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

USER = [{"role": "user", "content": "hi"}]
FUNCTION = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
THINKING = "<think>\nLook it up.\n</think>\n\nIt rains."
CALLING = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def versions(_vllm: None) -> Any:
    from headrace.engine import vllm_versions

    return vllm_versions


@pytest.fixture(scope="module")
def nixl_versions(_vllm: None) -> Any:
    from headrace.engine import nixl_versions

    return nixl_versions


@pytest.fixture(scope="module")
def text_versions(_vllm: None) -> Any:
    from headrace.engine import vllm_versions_text

    return vllm_versions_text


class OldWorker:
    """A NIXL worker of vLLM 0.26, as far as a failed pull goes."""

    def __init__(self) -> None:
        self.failed: queue.Queue[str] = queue.Queue()

    def _handle_failed_transfer(self, request_id: str, handle: None) -> None:
        self.failed.put(request_id)


class NewWorker:
    """A NIXL worker of vLLM 0.32, as far as a failed pull goes."""

    def __init__(self) -> None:
        self._recv_failures: set[str] = set()
        self.counted: list[bool] = []

    def _handle_failed_transfer(
        self, request_id: str, handle: None, failed: set[str], is_counted: bool
    ) -> None:
        failed.add(request_id)
        self.counted.append(is_counted)


class OldRenderer:
    """A renderer of vLLM before 0.32, as far as checking token IDs goes."""

    def __init__(self, renderer: Any) -> None:
        self.get_tokenizer = renderer.get_tokenizer
        self.model_config = renderer.model_config


def test_this_vllm_has_every_name(versions: Any) -> None:
    for name in versions._PLACES:
        assert getattr(versions, name) is not versions._Absent


def test_a_name_that_moved_is_found_where_it_was(
    versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (("vllm.nowhere.at_all", "X"), ("vllm.exceptions", "NoSuchError"))
    monkeypatch.setitem(
        versions._PLACES, "x", (*places, ("vllm.exceptions", "VLLMValidationError"))
    )
    assert versions.x.__name__ == "VLLMValidationError"
    monkeypatch.setitem(versions._PLACES, "x", (*places, versions._Absent))
    assert versions.x is versions._Absent
    monkeypatch.setitem(versions._PLACES, "x", places)
    with pytest.raises(ImportError, match="this vLLM has no x"):
        _ = versions.x


def test_an_argument_that_came_later_is_left_out(versions: Any) -> None:
    def old(first: int, *, second: int = 0) -> None: ...

    assert versions.accepted(old, {"first": 1, "second": 2, "third": 3}) == {
        "first": 1,
        "second": 2,
    }


def test_a_sampling_parameter_that_came_later_is_none(versions: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3)
    assert versions.sampling_field(params, "max_tokens") == 3
    assert versions.sampling_field(params, "of_a_later_release") is None


def test_a_worker_is_asked_what_has_finished_in_its_releases_way(nixl_versions: Any) -> None:
    results = SimpleNamespace(finished_sending={"s"}, finished_recving={"r"}, failed_recving={"f"})
    newer = SimpleNamespace(_recv_failures=set(), get_transfer_results=lambda: results)
    older = SimpleNamespace(get_finished=lambda: ({"s"}, {"r"}))
    assert nixl_versions.finished_transfers(newer) == ({"s"}, {"r"}, {"f"})
    assert nixl_versions.finished_transfers(older) == ({"s"}, {"r"}, set())


def test_a_request_without_blocks_of_its_own_waits_for_none(nixl_versions: Any) -> None:
    assert nixl_versions.awaits_kv(SimpleNamespace(local_block_ids=([1, 2],)))
    assert not nixl_versions.awaits_kv(SimpleNamespace(local_block_ids=()))
    assert not nixl_versions.awaits_kv(SimpleNamespace(local_block_ids=[]))
    marked = SimpleNamespace(local_block_ids=([1],), awaiting_kvs=False)
    assert not nixl_versions.awaits_kv(marked)


def test_a_failed_pull_reaches_each_scheduler_in_its_way(nixl_versions: Any) -> None:
    old, new = OldWorker(), NewWorker()
    assert nixl_versions.popped(old, {"a", "b"}, {"b"}) == {"a", "b"}
    assert old.failed.get_nowait() == "b"
    assert nixl_versions.popped(new, {"a", "b"}, {"b"}) == ({"a", "b"}, {"b"})
    nixl_versions.fail_pull(new, "c")
    assert new._recv_failures == {"c"}
    assert new.counted == [False]
    assert nixl_versions.done_and_failed({"a"}) == ({"a"}, set())
    assert nixl_versions.done_and_failed(({"a"}, {"b"})) == ({"a"}, {"b"})


def test_failed_handshakes_are_counted_once(nixl_versions: Any) -> None:
    old = SimpleNamespace(data={})
    nixl_versions.add_missing_counts(old.data)
    nixl_versions.count_failure(old, "handshake_setup_failed")
    nixl_versions.count_failure(old, "handshake_failed")
    assert old.data == {nixl_versions.FAILED_HANDSHAKES: [1]}
    new = SimpleNamespace(
        data={nixl_versions.FAILED_HANDSHAKES: [1]}, record_failed_handshake=lambda: None
    )
    nixl_versions.count_failure(new, "handshake_setup_failed")
    assert new.data == {nixl_versions.FAILED_HANDSHAKES: [1]}


def played(answer: AnswerStream, token_ids: list[int]) -> list[bytes]:
    """Return all that a client gets of these IDs."""
    chunks = list(answer.feed(0, token_ids, finish_reason="stop").chunks)
    closed = answer.close()
    return [*chunks, *closed.chunks, closed.body]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("endpoint", "text", "body"),
    [
        ("chat.completions", THINKING, {"messages": USER}),
        ("chat.completions", CALLING, {"messages": USER, **TOOLS}),
        ("chat.completions", CALLING, {"messages": USER, **TOOLS, "tool_choice": "required"}),
        ("responses", THINKING, {"input": "hi"}),
        ("responses", CALLING, {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
    ],
)
def test_an_answer_is_the_same_where_vllm_takes_no_prompts(
    endpoint: Any,
    text: str,
    body: dict[str, Any],
    stream: bool,
    text_versions: Any,
    parsing_derenderer: Derenderer,
    make_parsing_job: Callable[..., Job],
    parsing_stack: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not text_versions.TAKES_PROMPTS:
        pytest.skip("this vLLM has no other way")
    job = make_parsing_job({**body, "stream": stream}, endpoint)
    tokenizer = parsing_stack.renderer.get_tokenizer()
    ids = [*tokenizer.encode(text, add_special_tokens=False), 2]
    monkeypatch.setattr(text_versions, "TAKES_PROMPTS", False)
    old = played(parsing_derenderer.open(job), ids)
    monkeypatch.setattr(text_versions, "TAKES_PROMPTS", True)
    assert old == played(parsing_derenderer.open(job), ids)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"include_reasoning": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {**TOOLS, "tool_choice": "required"},
    ],
    ids=str,
)
def test_a_job_says_the_same_of_reasoning_where_vllm_does_not_say_it(
    more: dict[str, Any],
    text_versions: Any,
    renderer: Renderer,
    parsing_renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not text_versions.TELLS_REASONING:
        pytest.skip("this vLLM has no other way")
    from headrace.render import renderer_vllm

    def untold(online: Any, request: Any, generate: Any) -> None:
        text_versions.tell_reasoning(generate, None, None)  # as an older release renders it
        text_versions.add_reasoning(online, request, generate)

    for one in (parsing_renderer, renderer):
        usable = {**more, "tool_choice": "none"} if one is renderer and "tools" in more else more
        body = json.dumps({"messages": USER, **usable}).encode()
        (new,) = asyncio.run(one.render("chat.completions", body)).prompts
        with monkeypatch.context() as patch:
            patch.setattr(text_versions, "TELLS_REASONING", False)
            patch.setattr(renderer_vllm, "add_reasoning", untold)
            (old,) = asyncio.run(one.render("chat.completions", body)).prompts
        assert old.reasoning_ended is new.reasoning_ended
        assert old.reasoning_parser_kwargs == new.reasoning_parser_kwargs


@pytest.mark.parametrize("token_id", [-1, 49152])
def test_a_token_id_outside_the_vocabulary_is_refused_where_the_renderer_checks_none(
    token_id: int, versions: Any, text_versions: Any, stack: Any
) -> None:
    unchecked = OldRenderer(stack.renderer)
    text_versions.validate_token_ids(unchecked, [0, 49151], parameter="prompt")
    with pytest.raises(versions.CLIENT_ERRORS, match=f"Token id {token_id} is out of vocabulary"):
        text_versions.validate_token_ids(unchecked, [0, token_id], parameter="prompt")


def test_a_strict_level_is_refused_where_vllm_has_none(
    versions: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engine import vllm_text

    def old(call: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        taken: dict[str, Any] = versions.accepted(call, arguments)
        return {name: value for name, value in taken.items() if name != "tool_strict_level"}

    monkeypatch.setattr(vllm_text, "accepted", old)
    vllm_text.load(settings)
    model = msgspec.structs.replace(settings.model, tool_strict_level="function")
    with pytest.raises(SettingsError, match=r"needs vLLM 0\.31 or later"):
        vllm_text.load(msgspec.structs.replace(settings, model=model))


def test_an_output_mode_of_a_later_release_is_refused() -> None:
    from vllm import SamplingParams

    from headrace.render import generate_vllm

    def generate(mode: str) -> Any:
        return SimpleNamespace(output_mode=mode, sampling_params=SamplingParams())

    generate_vllm._check_supported(generate("tokens"))
    generate_vllm._check_supported(generate("text"))
    with pytest.raises(BadRequestError) as caught:
        generate_vllm._check_supported(generate("derender"))
    assert caught.value.param == "output_mode"


def test_the_program_that_checks_another_release_passes_with_this_one() -> None:
    program = Path(__file__).parents[2] / "scripts" / "vllm_versions_check.py"
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "12 of 12 ok" in done.stdout
