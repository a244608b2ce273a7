"""Every other endpoint against vLLM's own routers: the same bodies, the same events, the same words for a mistake."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from headrace.derender import renderer as derenderers
from headrace.derender.renderer import Derenderer
from headrace.render.renderer import Renderer
from headrace.shared import token_ids
from headrace.shared.errors import BadRequestError, RequestError, SettingsError
from headrace.shared.messages import Ask, Endpoint, Job
from headrace.shared.openai_errors import error_body
from headrace.shared.settings import Settings

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MakeJob = Callable[..., Job]

EOS = 2
USER = [{"role": "user", "content": "hi"}]
TEXT = "Paris is très nice 🎉👩‍🚀, isn't it?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALLING = (
    "<think>\nlook it up\n</think>\n\nOne moment."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
PATHS = {
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "chat.completions.render": "/v1/chat/completions/render",
    "completions.render": "/v1/completions/render",
    "chat.completions.derender": "/v1/chat/completions/derender",
    "completions.derender": "/v1/completions/derender",
    "generate": "/inference/v1/generate",
    "responses": "/v1/responses",
}
RANDOM_ID = re.compile(r'(?<=")((?:msg_|rs_|fc_|call_|chatcmpl-tool-)?)[0-9a-f]{16}(?=")')


@dataclass
class Side:
    """Our two services and vLLM's server of the same settings."""

    renderer: Renderer
    derenderer: Derenderer
    stack: Any
    make_job: MakeJob
    reference_app: Any
    apps: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.stack.renderer.get_tokenizer().encode(text, add_special_tokens=False)
        return ids

    def theirs(self, endpoint: str, body: Any, *, ids: list[int] | None = None) -> httpx.Response:
        played = tuple(ids or ())
        if played not in self.apps:
            self.apps[played] = self.reference_app.app(self.stack, list(played))
        app = self.apps[played]

        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"content-type": "application/json", "x-request-id": "q1"}
                return await client.post(PATHS[endpoint], content=content, headers=headers)

        return asyncio.run(post())

    def ask(self, endpoint: Any, body: Any, *, is_own_id: bool = True) -> bytes:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        ask = Ask(
            request_id="q1",
            tenant="t",
            endpoint=endpoint,
            deadline=0.0,
            body=content,
            is_own_id=is_own_id,
        )
        worker = self.derenderer if endpoint.endswith("derender") else self.renderer
        return asyncio.run(worker.ask(ask))

    def play(self, endpoint: Endpoint, body: Any, ids: list[int]) -> tuple[list[bytes], bytes]:
        """Return chunks and body of our answer; of a stream, what it ended with."""
        answer = self.derenderer.open(self.make_job(body, endpoint))
        chunks: list[bytes] = []
        for index, token_id in enumerate(ids):
            end: Any = {"finish_reason": "stop"} if index == len(ids) - 1 else {}
            fed = answer.feed(0, [token_id], **end)
            chunks += fed.chunks
            if fed.stopped:
                break
        closed = answer.close()
        return [*chunks, *closed.chunks], closed.body or closed.result


@pytest.fixture(scope="module")
def reference_app(_vllm: None) -> Any:
    return importlib.import_module(".reference_app", __package__)


@pytest.fixture(scope="module")
def plain(
    renderer: Renderer,
    derenderer: Derenderer,
    stack: Any,
    make_job: MakeJob,
    reference_app: Any,
) -> Side:
    return Side(renderer, derenderer, stack, make_job, reference_app)


@pytest.fixture(scope="module")
def parsing(
    parsing_renderer: Renderer,
    parsing_derenderer: Derenderer,
    parsing_stack: Any,
    make_parsing_job: MakeJob,
    reference_app: Any,
) -> Side:
    return Side(
        parsing_renderer, parsing_derenderer, parsing_stack, make_parsing_job, reference_app
    )


@pytest.fixture(params=["plain", "parsing"])
def side(request: pytest.FixtureRequest) -> Side:
    side: Side = request.getfixturevalue(request.param)
    return side


def anonymous(data: bytes | str) -> Any:
    """Return JSON without random IDs and times; the first random ID is 1, and so on."""
    text = data.decode() if isinstance(data, bytes) else data
    names: dict[str, str] = {}
    text = RANDOM_ID.sub(
        lambda match: names.setdefault(match.group(), f"{match[1]}#{len(names)}"), text
    )
    return json.loads(re.sub(r'"(created|created_at)":\s*\d+', r'"\1": 0', text))


def sse(text: str) -> list[tuple[str, str]]:
    """Return name and data of each event."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), fields["data"]))
    return found


QUESTIONS: list[tuple[str, Any]] = [
    ("tokenize", {"prompt": TEXT}),
    ("tokenize", {"prompt": TEXT, "return_token_strs": True, "add_special_tokens": False}),
    ("tokenize", {"prompt": ""}),
    ("tokenize", {"messages": USER}),
    ("tokenize", {"messages": USER, "add_generation_prompt": False, "tools": [CHAT_TOOL]}),
    ("detokenize", {"tokens": [1, 28120, 665, 2]}),
    ("detokenize", {"tokens": []}),
    ("chat.completions.render", {"messages": USER, "request_id": "mine"}),
    ("chat.completions.render", {"messages": USER, "stream": True, "stop": "x", "seed": 3, "n": 2}),
    ("completions.render", {"prompt": TEXT, "max_tokens": 5}),
    ("completions.render", {"prompt": ["a", "b"], "return_token_offsets": True}),
    ("completions.render", {"prompt": [5, 6, 7], "cache_salt": "salt", "priority": 2}),
]


@pytest.mark.parametrize(("endpoint", "body"), QUESTIONS)
def test_a_question_is_answered_as_by_vllms_server(side: Side, endpoint: str, body: Any) -> None:
    ours, theirs = json.loads(side.ask(endpoint, body)), side.theirs(endpoint, body)
    assert theirs.status_code == 200
    assert ours == theirs.json()


def test_without_a_header_the_bodys_id_counts(side: Side) -> None:
    body = {"messages": USER, "request_id": "mine"}
    ours = json.loads(side.ask("chat.completions.render", body, is_own_id=False))
    assert ours["request_id"] == "chatcmpl-mine"


MISTAKES: list[tuple[str, Any]] = [
    ("tokenize", b"{"),
    ("tokenize", b"[]"),
    ("tokenize", {}),
    ("tokenize", {"prompt": 5}),
    ("tokenize", {"messages": "x"}),
    ("tokenize", {"messages": USER, "chat_template": "x"}),
    ("tokenize", {"prompt": "x", "model": "other"}),
    (
        "tokenize",
        {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
    ),
    ("detokenize", {}),
    ("detokenize", {"tokens": [-1]}),
    ("detokenize", {"tokens": ["x"]}),
    ("detokenize", {"tokens": [1], "model": "other"}),
    ("chat.completions.render", {}),
    ("chat.completions.render", {"messages": USER, "model": "other"}),
    ("chat.completions.render", {"messages": USER, "temperature": -1}),
    ("chat.completions.render", {"messages": [{"role": "user", "content": "hi " * 9000}]}),
    ("completions.render", {"prompt": ""}),
    ("completions.render", {"prompt": "x", "max_tokens": 0}),
    ("chat.completions.derender", {}),
    ("chat.completions.derender", {"generate_response": {"choices": []}, "model": "other"}),
    ("chat.completions.derender", {"stream": True, "generate_chunk": {"choices": [{}]}}),
    ("completions.derender", {"generate_responses": []}),
    ("completions.derender", {"generate_responses": [], "prompt_tokens": [1]}),
    (
        "completions.derender",
        {
            "stream": True,
            "generate_chunk": {"choices": []},
            "stream_state": {"output_chunk_lens": [3]},
        },
    ),
]


@pytest.mark.parametrize(("endpoint", "body"), MISTAKES)
def test_a_mistake_gets_vllms_words(plain: Side, endpoint: str, body: Any) -> None:
    theirs = plain.theirs(endpoint, body)
    with pytest.raises(RequestError) as caught:
        plain.ask(endpoint, body)
    assert caught.value.http_status == theirs.status_code
    assert json.loads(error_body(caught.value)) == theirs.json()


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("detokenize", {"tokens": [49152]}),
        (
            "chat.completions.derender",
            {"generate_response": {"choices": [{"index": 0, "token_ids": [49152]}]}},
        ),
        (
            "completions.derender",
            {
                "stream": True,
                "generate_chunk": {"choices": [{"index": 0, "token_ids": [49152]}]},
            },
        ),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused(
    plain: Side, endpoint: str, body: Any
) -> None:
    with pytest.raises(BadRequestError, match="Token id 49152 is out of vocabulary"):
        plain.ask(endpoint, body)


def test_a_question_for_another_stage_is_refused(plain: Side) -> None:
    ask = Ask(request_id="q", tenant="t", endpoint="tokenize", deadline=0.0, body=b"{}")
    with pytest.raises(BadRequestError, match="derender does not answer 'tokenize'"):
        asyncio.run(plain.derenderer.ask(ask))
    other = msgspec.structs.replace(ask, endpoint="completions.derender")
    with pytest.raises(BadRequestError, match=r"render does not answer 'completions\.derender'"):
        asyncio.run(plain.renderer.ask(other))


def test_render_refuses_what_could_not_be_generated(plain: Side) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://host/image.png"}}
    for body in (
        {"messages": [{"role": "user", "content": [image]}]},
        {"messages": USER, "kv_transfer_params": {"do_remote_decode": True}},
    ):
        with pytest.raises(BadRequestError):
            plain.ask("chat.completions.render", body)


GENERATES: list[dict[str, Any]] = [
    {"sampling_params": {"max_tokens": 50}},
    {"sampling_params": {}, "return_token_ids": True},
    {"sampling_params": {"max_tokens": 10**6}},
    {"sampling_params": {"stop": ["nice"]}},
    {"sampling_params": {"stop": ["nice"]}, "output_mode": "text"},
    {"sampling_params": {"detokenize": False}},
    {"sampling_params": {"skip_special_tokens": False}, "output_mode": "text"},
]


@pytest.mark.parametrize("more", GENERATES)
@pytest.mark.parametrize("stream", [False, True])
def test_generate_answers_as_vllms_server(plain: Side, more: Any, stream: bool) -> None:
    ids = [*plain.encode(TEXT), EOS]
    body = {"token_ids": [1, 2, 3], "stream": stream, "request_id": "q1", **more}
    if stream:
        body["stream_options"] = {"include_usage": True}
    theirs = plain.theirs("generate", body, ids=ids)
    chunks, whole = plain.play("generate", body, ids)
    if not stream:
        assert anonymous(whole) == anonymous(theirs.content)
        return
    events = sse(theirs.text)
    assert events[-1] == ("", "[DONE]")
    assert [anonymous(chunk) for chunk in chunks] == [anonymous(data) for _, data in events[:-1]]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [-1], "sampling_params": {}},
        {"token_ids": [49152], "sampling_params": {}},
        {"token_ids": [1] * 9000, "sampling_params": {}},
        {"token_ids": [1], "sampling_params": {"temperature": -1}},
        {"token_ids": [1], "sampling_params": {"n": 0}},
        {"token_ids": [1], "sampling_params": {"stop": "x", "detokenize": False}},
        {"token_ids": [1], "sampling_params": {"logit_bias": {"99999": 1}}},
        {"token_ids": [1], "sampling_params": {"logprob_token_ids": [99999]}},
        {"token_ids": [1], "sampling_params": {"min_tokens": 5, "max_tokens": 2}},
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "("}}},
        {"token_ids": [1], "sampling_params": {}, "model": "other"},
    ],
)
def test_a_wrong_generate_request_gets_vllms_words(plain: Side, body: Any) -> None:
    theirs = plain.theirs("generate", body)
    with pytest.raises(RequestError) as caught:
        plain.make_job(body, "generate")
    assert caught.value.http_status == theirs.status_code
    ours, expected = json.loads(error_body(caught.value)), theirs.json()
    if body.get("token_ids") == [49152]:  # `param` is render's, as of every other prompt
        ours["error"]["param"] = expected["error"]["param"]
        ours["error"]["message"] = expected["error"]["message"]
    assert ours == expected


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": {}}}}, "kv_transfer_params"),
        ({"content_parts": [{"type": "image_url", "url": "http://host/i.png"}]}, "content_parts"),
        (
            {"sampling_params": {"prompt_logprob_token_ids": [[1]]}},
            "sampling_params.prompt_logprob_token_ids",
        ),
    ],
)
def test_generate_refuses_what_is_the_pipelines_own_or_not_carried(
    plain: Side, more: Any, param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        plain.make_job({"token_ids": [1], "sampling_params": {}, **more}, "generate")
    assert caught.value.param == param


def test_max_tokens_of_a_generate_request_is_what_the_context_leaves(plain: Side) -> None:
    for params in ({}, {"max_tokens": 10**6}, {"max_tokens": None}):
        job = plain.make_job({"token_ids": [1, 2], "sampling_params": params}, "generate")
        given = msgspec.msgpack.decode(job.prompts[0].sampling_params)
        assert given["max_tokens"] == plain.renderer.max_model_len - 2


def test_the_three_calls_give_what_the_one_call_gives(side: Side) -> None:
    chat: dict[str, Any] = {"messages": USER, "max_tokens": 100}
    if side.stack.reasoning_parser:
        chat["tools"] = [CHAT_TOOL]
    ids = [*side.encode(CALLING), EOS]
    rendered = json.loads(side.ask("chat.completions.render", chat))
    _, generated = side.play("generate", rendered, ids)
    body = {
        "generate_response": json.loads(generated),
        "chat_request": chat,
        "prompt_tokens": len(rendered["token_ids"]),
        "prompt_token_ids": rendered["token_ids"],
    }
    derendered = anonymous(side.ask("chat.completions.derender", body))
    assert derendered == anonymous(side.theirs("chat.completions.derender", body).content)
    whole = anonymous(side.play("chat.completions", chat, ids)[1])
    for answer in (derendered, whole):
        for call in answer["choices"][0]["message"].get("tool_calls") or ():
            assert call.pop("id")
    assert derendered["choices"][0]["message"] == whole["choices"][0]["message"]
    assert derendered["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_derendered_as_by_vllms_server(plain: Side, stream: bool) -> None:
    ids = [*plain.encode(TEXT), EOS]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
    generated = {"request_id": "generate-tokens-q1", "choices": [choice]}
    body: dict[str, Any] = {"generate_responses": [generated, generated], "prompt_tokens": [1, 2]}
    if stream:
        body = {"stream": True, "generate_chunk": generated}
    ours = plain.ask("completions.derender", body)
    assert anonymous(ours) == anonymous(plain.theirs("completions.derender", body).content)
    assert TEXT in json.dumps(json.loads(ours), ensure_ascii=False)


def test_the_three_calls_stream_what_vllms_stream_and_derender_give(side: Side) -> None:
    chat: dict[str, Any] = {"messages": USER, "max_tokens": 100, "stream": True}
    if side.stack.reasoning_parser:
        chat["tools"] = [CHAT_TOOL]
    ids = [*side.encode(CALLING), EOS]
    rendered = json.loads(side.ask("chat.completions.render", chat))
    chunks, _ = side.play("generate", rendered, ids)
    state, their_state, content, reasoning, names = None, None, "", "", []
    for chunk in chunks:
        body = {
            "stream": True,
            "generate_chunk": json.loads(chunk),
            "chat_request": chat,
            "prompt_token_ids": rendered["token_ids"],
        }
        ours = json.loads(side.ask("chat.completions.derender", {**body, "stream_state": state}))
        theirs = side.theirs("chat.completions.derender", {**body, "stream_state": their_state})
        expected = theirs.json()
        state, their_state = ours["stream_state"], expected["stream_state"]
        for choice in ours["chunk"]["choices"]:
            content += choice["delta"].get("content") or ""
            reasoning += choice["delta"].get("reasoning") or ""
            names += [
                call["function"]["name"]
                for call in choice["delta"].get("tool_calls") or ()
                if call["function"].get("name")
            ]
        assert anonymous(json.dumps(ours)) == anonymous(theirs.content)
    if side.stack.reasoning_parser:
        assert (content.strip(), names) == ("One moment.", ["weather", "weather"])
        assert "look it up" in reasoning
    else:
        assert content == CALLING


RESPONSES: list[dict[str, Any]] = [
    {"input": "hi"},
    {"input": USER, "instructions": "Be brief.", "max_output_tokens": 200},
    {"input": "hi", "temperature": 0.5, "top_p": 0.9, "metadata": {"tool_calls": "x"}},
    {"input": "hi", "store": False, "include": ["reasoning.encrypted_content"]},
    {"input": "hi", "text": {"format": {"type": "json_object"}}},
    {"input": "hi", "stop": ["moment"]},
]
WITH_TOOLS: list[dict[str, Any]] = [
    {"input": "hi", "tools": [TOOL]},
    {"input": "hi", "tools": [TOOL], "parallel_tool_calls": False},
    {"input": "hi", "include_reasoning": False},
    {"input": "hi", "reasoning": {"effort": "low"}},
]


def compare_responses(side: Side, body: dict[str, Any], stream: bool) -> None:
    ids = [*side.encode(CALLING), EOS]
    body = {**body, "stream": stream, "request_id": "resp_q1"}
    theirs = side.theirs("responses", body, ids=ids)
    assert theirs.status_code == 200, theirs.text
    chunks, whole = side.play("responses", body, ids)
    if not stream:
        assert anonymous(whole) == anonymous(theirs.content)
        Response.model_validate_json(whole)
        return
    events = sse(theirs.text)
    ours = b"\n".join(chunks).decode().splitlines()
    joined, expected = ",".join(ours), ",".join(data for _, data in events)
    assert anonymous(f"[{joined}]") == anonymous(f"[{expected}]")
    assert [json.loads(event)["type"] for event in ours] == [name for name, _ in events]
    for event in ours:
        TypeAdapter(ResponseStreamEvent).validate_json(event)
    assert json.loads(whole) == json.loads(ours[-1])["response"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", RESPONSES)
def test_a_response_is_vllms(side: Side, body: dict[str, Any], stream: bool) -> None:
    compare_responses(side, body, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", WITH_TOOLS)
def test_reasoning_and_tool_calls_of_a_response_are_vllms(
    parsing: Side, body: dict[str, Any], stream: bool
) -> None:
    compare_responses(parsing, body, stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_made_again_is_the_same_byte_for_byte(
    parsing: Side, stream: bool
) -> None:
    ids = [*parsing.encode(CALLING), EOS]
    body = {"input": "hi", "tools": [TOOL], "stream": stream}
    first, again = (parsing.play("responses", body, ids) for _ in range(2))
    assert first == again
    text = (b"".join(first[0]) + first[1]).decode()
    assert '"id":"resp_r1"' in text
    assert '"created_at":1700000000' in text


def test_the_items_of_a_streamed_response_keep_their_ids_to_the_end(parsing: Side) -> None:
    ids = [*parsing.encode(CALLING), EOS]
    body = {"input": "hi", "tools": [TOOL], "stream": True}
    events = [json.loads(chunk) for chunk in parsing.play("responses", body, ids)[0]]
    done = [e["item"]["id"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["id"] for item in events[-1]["response"]["output"]] == done
    assert len(set(done)) == 4
    calls = [item["call_id"] for item in events[-1]["response"]["output"] if "call_id" in item]
    assert len(set(calls)) == 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "http://host/i.png"}],
                    }
                ]
            },
            "input",
        ),
    ],
)
def test_a_response_that_needs_what_is_not_here_is_refused_by_name(
    plain: Side, more: Any, param: str
) -> None:
    with pytest.raises(BadRequestError, match=f"{param}|text content") as caught:
        plain.make_job({"input": "hi", **more}, "responses")
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": "hi", "model": "other"},
        {"input": "hi", "temperature": -1},
        {"input": "hi", "max_output_tokens": -1},
        {"input": "hi", "tool_choice": "required"},
        {"input": "hi", "top_logprobs": 50, "include": ["message.output_text.logprobs"]},
        {"input": "hi", "prompt": {"id": "x"}},
        {"input": "hi " * 9000},
    ],
)
def test_a_wrong_responses_request_gets_vllms_words(plain: Side, body: Any) -> None:
    theirs = plain.theirs("responses", body)
    with pytest.raises(RequestError) as caught:
        plain.make_job(body, "responses")
    assert caught.value.http_status == theirs.status_code
    assert json.loads(error_body(caught.value)) == theirs.json()


def test_derenders_text_side_is_loaded_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def load(settings: Settings) -> None:
        threads.append(threading.current_thread())
        raise SettingsError("seen enough")

    monkeypatch.setattr("headrace.engine.vllm_text.load", load)
    derenderer = derenderers.build(Settings(), "vllm")

    async def start() -> None:
        with pytest.raises(SettingsError, match="seen enough"):
            await derenderer.start()
        await derenderer.close()

    asyncio.run(start())
    assert threads != [threading.main_thread()]


def test_a_response_is_taken_back_as_input(plain: Side) -> None:
    ids = [*plain.encode("Paris."), EOS]
    output = json.loads(plain.play("responses", {"input": "hi"}, ids)[1])["output"]
    items = [{"type": "message", "role": "user", "content": "hi"}, *output]
    items.append({"type": "message", "role": "user", "content": "Why?"})
    response = plain.make_job({"input": items}, "responses")
    answer = {"role": "assistant", "content": "Paris."}
    again = {"role": "user", "content": "Why?"}
    chat = plain.make_job({"messages": [*USER, answer, again]}, "chat.completions")
    assert token_ids.unpack(response.prompts[0].token_ids) == token_ids.unpack(
        chat.prompts[0].token_ids
    )


def test_token_ids_of_a_response_are_those_of_the_same_chat(plain: Side) -> None:
    response = plain.make_job({"input": "hi"}, "responses")
    chat = plain.make_job({"messages": USER}, "chat.completions")
    assert token_ids.unpack(response.prompts[0].token_ids) == token_ids.unpack(
        chat.prompts[0].token_ids
    )
