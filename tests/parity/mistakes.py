"""What both servers refuse: status, type, param, code and message."""

from __future__ import annotations

from typing import Any

from .cases import CHAT, TEXT, WEATHER, Case

USER = [{"role": "user", "content": "hi"}]
PARTS = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


def chat(name: str, _differs: str = "", _in_tests: bool = False, **body: Any) -> Case:
    return Case(
        name=name, path=CHAT, body={"messages": USER, **body}, differs=_differs, in_tests=_in_tests
    )


def text(name: str, _differs: str = "", _in_tests: bool = False, **body: Any) -> Case:
    return Case(
        name=name, path=TEXT, body={"prompt": "x", **body}, differs=_differs, in_tests=_in_tests
    )


def raw(name: str, body: str, path: str = CHAT, **about: Any) -> Case:
    return Case(name=name, path=path, body=body, streams=False, **about)


ROUTES = "headrace answers with OpenAI's error object, which SDKs read; vLLM's server with FastAPI's `detail`"
ROLES = "vLLM answers a prompt from which the template may have dropped the message; headrace refuses as OpenAI does"
IMAGES = "headrace serves text whatever the model can do, says so, and names the field"
VOCABULARY = "headrace names the field as well"
SET_HERE = (
    "these belong to the KV transfer between headrace's own stages, so a client can't give them"
)

MISTAKES = [
    raw("no JSON", "{"),
    raw("JSON that ends early", '{"messages": [{"role": "user", "content": "hi"}', in_tests=True),
    raw("no body", ""),
    raw("a list", "[1]"),
    raw("null", "null"),
    raw("a string", '"x"'),
    raw("another media type", '{"messages": []}', headers={"content-type": "text/plain"}),
    raw("another method", "", method="GET", differs=ROUTES),
    raw("an unknown path", "{}", path="frobnicate", differs=ROUTES),
    raw("stream is a word", '{"messages": [{"role": "user", "content": "hi"}], "stream": "maybe"}'),
    raw("an object as model", '{"messages": [{"role": "user", "content": "hi"}], "model": {}}'),
    Case(name="no messages", path=CHAT, body={}, in_tests=True),
    chat("messages of no message", messages=[]),
    chat("messages as a string", messages="x"),
    chat("a message without a role", messages=[{"content": "x"}]),
    chat("content of a number", messages=[{"role": "user", "content": 5}]),
    chat(
        "a role nobody knows",
        _differs=ROLES,
        max_tokens=4,
        temperature=0,
        messages=[{"role": "alien", "content": "x"}],
    ),
    chat(
        "an image for a text model", _differs=IMAGES, messages=[{"role": "user", "content": PARTS}]
    ),
    chat("a model that is not served", model="other", _in_tests=True),
    chat("max_tokens below 0", max_tokens=-1, _in_tests=True),
    chat("max_tokens 0", max_tokens=0),
    chat("max_tokens beyond the context", max_tokens=10**6),
    chat("max_tokens of letters", max_tokens="many"),
    chat("max_tokens of a fraction", max_tokens=1.5),
    chat("temperature below 0", temperature=-1, _in_tests=True),
    chat("temperature of letters", temperature="hot"),
    chat("top_p above 1", top_p=2),
    chat("top_p 0", top_p=0),
    chat("top_k below -1", top_k=-5),
    chat("min_p above 1", min_p=3),
    chat("n 0", n=0),
    chat("n of letters", n="two"),
    chat("n, greedy", n=2, temperature=0),
    chat("a presence penalty of 9", presence_penalty=9),
    chat("a frequency penalty of -9", frequency_penalty=-9),
    chat("a repetition penalty of 0", repetition_penalty=0),
    chat("min_tokens above max_tokens", min_tokens=5, max_tokens=2),
    chat("min_tokens below 0", min_tokens=-1),
    chat("an empty stop", stop=[""]),
    chat("a number as stop", stop=5),
    chat("a stop_token_id of letters", stop_token_ids=["x"]),
    chat("a huge seed", seed=2**70),
    chat("a tool without a function", tools=[{"type": "function"}]),
    chat("an empty list of tools", tools=[]),
    chat("tool_choice without tools", tool_choice="required"),
    chat(
        "a named tool that is not there",
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "x"}},
        _in_tests=True,
    ),
    chat("a tool_choice nobody knows", tools=[WEATHER], tool_choice="maybe"),
    chat("top_logprobs without logprobs", top_logprobs=2),
    chat("top_logprobs of 30", logprobs=True, top_logprobs=30),
    chat("top_logprobs below -1", logprobs=True, top_logprobs=-3),
    chat("a logit_bias out of the vocabulary", logit_bias={"99999": 1}),
    chat("a logit_bias of letters", logit_bias={"x": 1}),
    chat("allowed_token_ids out of the vocabulary", allowed_token_ids=[99999]),
    chat("allowed_token_ids of none", allowed_token_ids=[]),
    chat("an empty bad word", bad_words=[""]),
    chat("a template of one's own", chat_template="x"),
    chat("json_schema without a schema", response_format={"type": "json_schema"}),
    chat("a response_format nobody knows", response_format={"type": "xml"}),
    chat("a wrong regex", structured_outputs={"regex": "("}),
    chat("a wrong grammar", structured_outputs={"grammar": "root ::= ("}),
    chat("a wrong JSON schema", structured_outputs={"json": {"type": "frob"}}),
    chat("two structured outputs", structured_outputs={"regex": "a", "choice": ["b"]}),
    chat("no structured output", structured_outputs={}),
    chat("a choice of none", structured_outputs={"choice": []}),
    chat("a thinking budget without reasoning", thinking_token_budget=5),
    chat(
        "a prompt beyond the context",
        messages=[{"role": "user", "content": "hi " * 5000}],
        _in_tests=True,
    ),
    chat("truncate_prompt_tokens below -1", truncate_prompt_tokens=-2),
    chat("truncate_prompt_tokens beyond the context", truncate_prompt_tokens=99999),
    chat(
        "continue and add a generation prompt",
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    chat("a cache_salt of a number", cache_salt=5),
    chat("an empty cache_salt", cache_salt=""),
    chat("a reasoning_effort nobody knows", reasoning_effort="huge"),
    chat("prompt_logprobs below -1", prompt_logprobs=-5),
    chat("prompt_logprobs of 30", prompt_logprobs=30),
    Case(
        name="prompt_logprobs, streamed",
        path=CHAT,
        streams=False,
        body={"messages": USER, "stream": True, "prompt_logprobs": 1},
    ),
    chat("logprob_token_ids without logprobs", logprob_token_ids=[5]),
    Case(
        name="stream_options without stream",
        path=CHAT,
        streams=False,
        body={"messages": USER, "stream_options": {"include_usage": True}},
    ),
    Case(
        name="stream_options of a word",
        path=CHAT,
        streams=False,
        body={"messages": USER, "stream": True, "stream_options": "x"},
    ),
    chat(
        "kv_transfer_params",
        _differs=SET_HERE,
        kv_transfer_params={"do_remote_prefill": False},
        max_tokens=2,
        temperature=0,
    ),
    chat(
        "kv_transfer_params among vllm_xargs",
        _differs=SET_HERE,
        vllm_xargs={"kv_transfer_params": "x"},
        max_tokens=2,
        temperature=0,
    ),
    Case(name="no prompt", path=TEXT, body={}, in_tests=True),
    text("an empty prompt", prompt=""),
    text("an empty list", prompt=[]),
    text("an empty prompt among others", prompt=["x", ""]),
    text("a number as prompt", prompt=5),
    text("a negative token ID", prompt=[-1]),
    text("a token ID out of the vocabulary", _differs=VOCABULARY, prompt=[5, 99999]),
    text("token IDs and text", prompt=[5, "x"]),
    text("suffix", suffix="y"),
    text("max_tokens 0", max_tokens=0),
    text("max_tokens below 0", max_tokens=-1),
    text("max_tokens beyond the context", max_tokens=10**6),
    text("logprobs of 50", logprobs=50, _in_tests=True),
    text("logprobs below 0", logprobs=-2),
    text("a prompt beyond the context", prompt="hi " * 5000),
    text("a model that is not served", model="other"),
    text("temperature below 0", temperature=-1),
    text("n, greedy", n=2, temperature=0),
    text("an empty stop", stop=""),
    text("a wrong regex", structured_outputs={"regex": "("}),
    Case(
        name="stream_options without stream",
        path=TEXT,
        streams=False,
        body={"prompt": "x", "stream_options": {"include_usage": True}},
    ),
]
