"""What is asked of both servers: every field of a request that can change an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Profile = Literal["plain", "reasoning"]
"""Which flags both servers have: a tool parser, or a reasoning parser as well."""

FLAGS: dict[Profile, dict[str, str]] = {
    "plain": {"tool_call_parser": "hermes"},
    "reasoning": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
}

CHAT = "chat/completions"
TEXT = "completions"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request, asked whole and streamed."""

    name: str
    path: str  #: below /v1/
    body: dict[str, Any] | str  #: a string is sent as it is
    profile: Profile = "plain"
    streams: bool = True  #: False: the request is no JSON object, or has its own `stream`
    gap: str = (
        ""  #: headrace refuses it with 400 and this `param`; answered, it must be as vLLM answers
    )
    differs: str = ""  #: why headrace's error says something else than vLLM
    in_tests: bool = False  #: its reference is stored, and the tests ask it
    headers: dict[str, str] = field(default_factory=dict)  #: `{mode}` is whole or streamed
    method: str = "POST"


def chat(name: str, content: Any = "What is the capital of France?", **more: Any) -> Case:
    """Return a greedy chat of a few token IDs; `_profile`, `_gap`, `_in_tests` belong to the case."""
    return _case(name, CHAT, {"messages": _messages(content)}, more)


def text(name: str, prompt: Any = "The river rises in the hills and", **more: Any) -> Case:
    """Return a greedy completion of a few token IDs."""
    return _case(name, TEXT, {"prompt": prompt}, more)


def _messages(content: Any) -> Any:
    if isinstance(content, list) and content and "role" in content[0]:
        return content
    return [{"role": "user", "content": content}]


def _case(name: str, path: str, start: dict[str, Any], more: dict[str, Any]) -> Case:
    about = {key[1:]: more.pop(key) for key in list(more) if key.startswith("_")}
    limit = "max_completion_tokens" in more
    defaults: dict[str, Any] = {"temperature": 0} | ({} if limit else {"max_tokens": 10})
    return Case(name=name, path=path, body=start | defaults | more, **about)


SEEDED = {"temperature": 0.9, "seed": 42}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
}
WEATHER_FUNCTION = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": CITY,
}
WEATHER = {"type": "function", "function": WEATHER_FUNCTION}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": CITY}}
ASK_WEATHER = "What is the weather in Paris?"
ONE_CALL = (
    r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Paris|Rome)"\}\}\n</tool_call>'
)
TWO_CALLS = f"{ONE_CALL}\\n{ONE_CALL}"
NUMBERS = "Count: one, two, three, four, five, six, seven, eight, nine, ten. Count again: one, two,"
GRAMMAR = 'root ::= "yes, " word\nword ::= "indeed" | "of course"'
LONG = ([504, 3575, 282, 4649, 314] * 26)[:129]
USAGE = {"stream_options": {"include_usage": True}}
HISTORY = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of Italy?"},
    {"role": "assistant", "content": "Rome"},
    {"role": "user", "content": "And of France?"},
]
THOUGHTS = [
    {"role": "user", "content": "What is 1 plus 1?"},
    {"role": "assistant", "content": "Easy.</think>It is 2."},
    {"role": "user", "content": "What is 2 plus 1?"},
    {"role": "assistant", "content": "Easy.</think>It is 3."},
    {"role": "user", "content": "What is 3 plus 1?"},
]
CALLED = [
    {"role": "user", "content": ASK_WEATHER},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "chatcmpl-tool-0123456789abcdef",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "chatcmpl-tool-0123456789abcdef", "content": "It rains."},
]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<city>", "schema": CITY, "end": "</city>"}],
    "triggers": ["<city>"],
}

CHATS = [
    chat("plain", _in_tests=True),
    chat("the default length", "Say yes.", **{"max_tokens": None}),
    chat("max_completion_tokens", max_completion_tokens=5),
    chat("max_tokens and max_completion_tokens", max_tokens=9, max_completion_tokens=4),
    chat("usage at the end", **USAGE, _in_tests=True),
    chat(
        "usage in every chunk",
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        _in_tests=True,
    ),
    chat("usage not included", stream_options={"include_usage": False}),
    chat("n, seeded", n=3, **SEEDED, _in_tests=True),
    chat(
        "n with usage in every chunk",
        n=2,
        **SEEDED,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat("seed", **SEEDED),
    chat("another seed", temperature=1.3, seed=7),
    chat("a negative seed", temperature=1.0, seed=-3),
    chat("top_p", top_p=0.7, **SEEDED),
    chat("top_k", top_k=5, **SEEDED),
    chat("min_p", min_p=0.2, **SEEDED),
    chat("top_p, top_k and min_p", top_p=0.9, top_k=20, min_p=0.05, **SEEDED),
    chat("logprobs", logprobs=True, _in_tests=True),
    chat("top_logprobs", logprobs=True, top_logprobs=4, _in_tests=True),
    chat("top_logprobs 0", logprobs=True, top_logprobs=0),
    chat("logprobs, seeded, n", n=2, logprobs=True, top_logprobs=2, **SEEDED),
    chat("logprobs of given token IDs", logprobs=True, logprob_token_ids=[504, 1, 2]),
    chat("logprobs as token IDs", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    chat(
        "logprobs of characters in parts",
        "Repeat: 🎉 München 你好",
        logprobs=True,
        top_logprobs=1,
        max_tokens=24,
    ),
    chat("stop", NUMBERS, stop="four", max_tokens=24, _in_tests=True),
    chat(
        "stop across token borders", NUMBERS, stop=["r, f", "e, s"], max_tokens=24, _in_tests=True
    ),
    chat("stop, included", NUMBERS, stop=["five"], include_stop_str_in_output=True, max_tokens=24),
    chat(
        "stop with logprobs",
        NUMBERS,
        stop=["r, f"],
        logprobs=True,
        top_logprobs=1,
        max_tokens=24,
        _in_tests=True,
    ),
    chat("stop that never comes", stop=["nowhere"]),
    chat("stop within min_tokens", NUMBERS, stop=["one", "two"], min_tokens=8, max_tokens=24),
    chat("stop_token_ids", stop_token_ids=[30, 282], _in_tests=True),
    chat("stop_token_ids, included", stop_token_ids=[282], include_stop_str_in_output=True),
    chat("stop_token_ids, special tokens shown", stop_token_ids=[282], skip_special_tokens=False),
    chat("min_tokens", "Say yes.", min_tokens=9),
    chat("ignore_eos", ignore_eos=True, max_tokens=14, _in_tests=True),
    chat(
        "ignore_eos, special tokens shown",
        ignore_eos=True,
        max_tokens=14,
        skip_special_tokens=False,
    ),
    chat("special tokens shown", skip_special_tokens=False),
    chat(
        "no spaces between special tokens",
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    ),
    chat(
        "frequency and presence penalty",
        frequency_penalty=1.5,
        presence_penalty=1.0,
        _in_tests=True,
    ),
    chat("repetition penalty", repetition_penalty=1.6),
    chat("logit_bias", logit_bias={"504": -100, "2": 3.5}),
    chat("bad_words", bad_words=["Paris", "The"], _in_tests=True),
    chat("allowed_token_ids", allowed_token_ids=[504, 3575, 282, 4649, 314, 7042, 30, 2]),
    chat(
        "json_object",
        "Answer in JSON.",
        response_format={"type": "json_object"},
        max_tokens=16,
        _in_tests=True,
    ),
    chat(
        "json_schema",
        ASK_WEATHER,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
        max_tokens=24,
        _in_tests=True,
    ),
    chat("text format", response_format={"type": "text"}),
    chat("choice", structured_outputs={"choice": ["Paris", "London", "Rome"]}),
    chat("regex", structured_outputs={"regex": "[A-Z]{3}-[0-9]{2}"}, _in_tests=True),
    chat("grammar", structured_outputs={"grammar": GRAMMAR}),
    chat("json", structured_outputs={"json": CITY}, max_tokens=24),
    chat(
        "choice, seeded, n",
        structured_outputs={"choice": ["Paris", "London", "Rome"]},
        n=3,
        **SEEDED,
    ),
    chat("tools unused", tools=[WEATHER, CLOCK], max_tokens=16),
    chat(
        "tool_choice auto",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="auto",
        structured_outputs={"regex": ONE_CALL},
        max_tokens=60,
        _in_tests=True,
    ),
    chat(
        "two calls",
        ASK_WEATHER,
        tools=[WEATHER],
        structured_outputs={"regex": TWO_CALLS},
        max_tokens=110,
    ),
    chat(
        "one call of two",
        ASK_WEATHER,
        tools=[WEATHER],
        parallel_tool_calls=False,
        structured_outputs={"regex": TWO_CALLS},
        max_tokens=110,
    ),
    chat(
        "tool calls with logprobs",
        ASK_WEATHER,
        tools=[WEATHER],
        structured_outputs={"regex": ONE_CALL},
        logprobs=True,
        max_tokens=60,
    ),
    chat(
        "tool calls with token IDs and usage",
        ASK_WEATHER,
        tools=[WEATHER],
        structured_outputs={"regex": ONE_CALL},
        return_token_ids=True,
        **USAGE,
        max_tokens=60,
    ),
    chat(
        "a tool call cut off",
        ASK_WEATHER,
        tools=[WEATHER],
        structured_outputs={"regex": ONE_CALL},
        max_tokens=12,
    ),
    chat(
        "tool_choice required",
        ASK_WEATHER,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        max_tokens=60,
        _in_tests=True,
    ),
    chat(
        "tool_choice required, cut off",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=12,
    ),
    chat(
        "tool_choice required, n",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="required",
        n=2,
        max_tokens=60,
        **SEEDED,
    ),
    chat(
        "tool_choice named",
        ASK_WEATHER,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "clock"}},
        max_tokens=30,
        _in_tests=True,
    ),
    chat("tool_choice none", ASK_WEATHER, tools=[WEATHER], tool_choice="none"),
    chat(
        "no parallel tool calls",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    ),
    chat("a tool's answer", CALLED, tools=[WEATHER]),
    chat("reasoning not included", include_reasoning=False),
    chat("reasoning_effort", reasoning_effort="low"),
    chat(
        "chat_template_kwargs", chat_template_kwargs={"add_generation_prompt": False, "custom": 1}
    ),
    chat(
        "the last message continued",
        [*HISTORY, {"role": "assistant", "content": "Par"}],
        continue_final_message=True,
        add_generation_prompt=False,
        _in_tests=True,
    ),
    chat("no generation prompt", add_generation_prompt=False),
    chat("special tokens added", add_special_tokens=True, return_token_ids=True),
    chat("system and history", HISTORY),
    chat("developer", [{"role": "developer", "content": "Be brief."}, *HISTORY[1:]]),
    chat(
        "content in parts",
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is the capital"},
                    {"type": "text", "text": "of France?"},
                ],
            }
        ],
        return_token_ids=True,
        _in_tests=True,
    ),
    chat("a name", [{"role": "user", "name": "Anna", "content": "Who am I?"}]),
    chat("token IDs", return_token_ids=True),
    chat("token IDs, n", return_token_ids=True, n=2, **SEEDED),
    chat("truncated prompt", truncate_prompt_tokens=12, return_token_ids=True),
    chat(
        "truncated on the right",
        truncate_prompt_tokens=12,
        truncation_side="right",
        return_token_ids=True,
    ),
    chat("truncated to the context", truncate_prompt_tokens=-1),
    chat("cache_salt", cache_salt="salt"),
    chat("priority", priority=5),
    chat("user", user="anna", session_id="s"),
    chat("a request ID of the caller", request_id="mine", _in_tests=True),
    chat("a request ID with quotes", request_id='the "first" \\ 1'),
    chat("a request ID in the header", _headers={"X-Request-Id": "parity-chat-{mode}"}),
    chat(
        "a request ID in the header and another in the body",
        request_id="mine",
        _headers={"X-Request-Id": "parity-both-{mode}"},
    ),
    chat("unknown fields", frobnicate=True, metadata={"a": "b"}, store=False, service_tier="auto"),
    chat("the model named", model="smollm2-135m-instruct"),
    chat("no temperature 1", temperature=0.0, top_p=1.0, top_k=-1),
    chat("a long prompt", "The miller counts the sacks, the carter waits with his horse. " * 60),
    chat("multi-byte text", "Repeat after me: 🎉 Grüße aus München, 你好", max_tokens=24),
    chat("an empty message", ""),
    chat("documents", documents=[{"title": "a", "text": "b"}]),
    chat("usage of n", n=2, **SEEDED, **USAGE),
    chat("prompt_logprobs", prompt_logprobs=1, _streams=False),
    chat(
        "echo",
        [*HISTORY, {"role": "assistant", "content": "Par"}],
        echo=True,
        continue_final_message=True,
        add_generation_prompt=False,
        _in_tests=True,
    ),
    chat(
        "echo, n",
        [*HISTORY, {"role": "assistant", "content": "Par"}],
        echo=True,
        n=2,
        **SEEDED,
        **USAGE,
    ),
    chat(
        "echo of parts",
        [
            *HISTORY,
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Par"}, {"type": "text", "text": "is"}],
            },
        ],
        echo=True,
    ),
    chat("echo of a user's message", HISTORY, echo=True),
    chat("echo with tools", CALLED[:2], tools=[WEATHER], echo=True),
    chat("the prompt's text", return_prompt_text=True, _in_tests=True),
    chat(
        "the prompt's text, n, tools",
        CALLED,
        tools=[WEATHER],
        return_prompt_text=True,
        n=2,
        **SEEDED,
    ),
    chat("the prompt's text, truncated", return_prompt_text=True, truncate_prompt_tokens=12),
    chat("prompt_logprobs 0", prompt_logprobs=0, _streams=False),
    chat(
        "prompt_logprobs with logprobs, n",
        prompt_logprobs=2,
        logprobs=True,
        top_logprobs=1,
        n=2,
        **SEEDED,
        _streams=False,
    ),
    chat("prompt_logprobs again, cached", prompt_logprobs=1, _streams=False),
    chat("beam search", use_beam_search=True, n=2, _gap="use_beam_search", _streams=False),
    chat("a structural tag", response_format=TAG, max_tokens=24),
    chat("any JSON", structured_outputs={"json_object": True}, max_tokens=16),
    chat("no stream_options", stream_options=None),
    chat("seed 0, greedy", seed=0),
    chat("top_k 1", top_k=1, **SEEDED),
    chat("min_tokens and stop_token_ids", min_tokens=6, stop_token_ids=[282], ignore_eos=True),
    chat(
        "a tool without parameters",
        ASK_WEATHER,
        tools=[{"type": "function", "function": {"name": "now"}}],
        tool_choice="required",
        max_tokens=30,
    ),
    chat(
        "a tool with a wrong schema",
        ASK_WEATHER,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "frob"}}}],
        tool_choice="required",
    ),
    chat(
        "a strict tool",
        ASK_WEATHER,
        tools=[{"type": "function", "function": {**WEATHER_FUNCTION, "strict": True}}],
        max_tokens=16,
    ),
]

TEXTS = [
    text("plain", _in_tests=True),
    text("the default length", max_tokens=None),
    text("without max_tokens, seeded", **SEEDED),
    text("n, seeded", n=3, **SEEDED),
    text("several prompts", ["One two three", "The miller", "Paris is"], _in_tests=True),
    text("several prompts, n, usage", ["One two three", "The miller"], n=2, **SEEDED, **USAGE),
    text("token IDs as the prompt", [504, 3575, 282, 4649, 314], _in_tests=True),
    text("lists of token IDs", [[504, 3575, 282], [28, 1004, 338]], return_token_ids=True),
    text("one prompt in a list", ["The miller"]),
    text("logprobs", logprobs=3, _in_tests=True),
    text("logprobs 0", logprobs=0),
    text(
        "logprobs, n, several prompts", ["One two three", "The miller"], n=2, logprobs=2, **SEEDED
    ),
    text("logprobs as token IDs", logprobs=1, return_tokens_as_token_ids=True),
    text("echo", echo=True, _in_tests=True),
    text("echo of token IDs", [504, 3575, 282, 4649, 314], echo=True),
    text("echo, several prompts, n", ["One two three", "The miller"], echo=True, n=2, **SEEDED),
    text("echo with usage and token IDs", echo=True, return_token_ids=True, **USAGE),
    text("echo with logprobs", echo=True, logprobs=1),
    text("echo of a truncated prompt", echo=True, truncate_prompt_tokens=3, _in_tests=True),
    text(
        "echo of truncated token IDs",
        [504, 3575, 282, 4649, 314],
        echo=True,
        truncate_prompt_tokens=3,
    ),
    text(
        "echo of lists of token IDs", [[504, 3575, 282], [28, 1004, 338]], echo=True, n=2, **SEEDED
    ),
    text("a request ID of the caller", request_id="mine"),
    text(
        "a request ID in the header",
        ["One two three", "The miller"],
        _headers={"X-Request-Id": "parity-text-{mode}"},
    ),
    *(
        text(
            f"{length} token IDs as the prompt",
            [504, 3575, 282, 4649, 314] * (length // 5) + [28] * (length % 5),
        )
        for length in (1, 127, 128, 129, 256)
    ),
    text("echo, nothing generated", echo=True, max_tokens=0),
    text("prompt_logprobs", prompt_logprobs=2, _streams=False),
    text("prompt_logprobs 0", prompt_logprobs=0, _streams=False),
    text("prompt_logprobs, n", prompt_logprobs=1, n=2, **SEEDED, _streams=False),
    text(
        "prompt_logprobs, several prompts",
        ["One two three", "The miller"],
        prompt_logprobs=1,
        logprobs=1,
        _streams=False,
    ),
    text("prompt_logprobs of 129 token IDs", LONG, prompt_logprobs=1, _streams=False),
    text("echo with logprobs, n", echo=True, logprobs=1, n=2, **SEEDED),
    text("echo with logprobs 0", echo=True, logprobs=0),
    text(
        "echo with logprobs, several prompts",
        ["One two three", "The miller"],
        echo=True,
        logprobs=2,
    ),
    text("echo with logprobs of token IDs", [504, 3575, 282, 4649, 314], echo=True, logprobs=1),
    text("echo with logprobs, nothing generated", echo=True, logprobs=1, max_tokens=0),
    text("echo with logprobs as token IDs", echo=True, logprobs=1, return_tokens_as_token_ids=True),
    text("beam search", use_beam_search=True, n=2, _gap="use_beam_search", _streams=False),
    text("usage at the end", **USAGE),
    text(
        "usage in every chunk",
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        _in_tests=True,
    ),
    text("stop", NUMBERS, stop=" four", max_tokens=24, _in_tests=True),
    text("stop across token borders", NUMBERS, stop=["r, f", "e, s"], max_tokens=24),
    text("stop, included", NUMBERS, stop=["five"], include_stop_str_in_output=True, max_tokens=24),
    text("stop with logprobs", NUMBERS, stop=["r, f"], logprobs=1, max_tokens=24),
    text("stop, several prompts", [NUMBERS, "The miller"], stop=["four", "."], max_tokens=24),
    text("stop_token_ids", stop_token_ids=[30, 281]),
    text("min_tokens and ignore_eos", min_tokens=4, ignore_eos=True, max_tokens=12),
    text("top_p, top_k, min_p", top_p=0.9, top_k=20, min_p=0.05, **SEEDED),
    text("penalties", frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2),
    text("logit_bias", logit_bias={"260": -100}),
    text("bad_words", bad_words=["the"]),
    text("allowed_token_ids", allowed_token_ids=[260, 282, 284, 30, 28]),
    text("json_object", "JSON: ", response_format={"type": "json_object"}),
    text("choice", "Paris or Rome? ", structured_outputs={"choice": ["Paris", "Rome"]}),
    text(
        "regex",
        "A date: ",
        structured_outputs={"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
        max_tokens=16,
    ),
    text("token IDs", return_token_ids=True, _in_tests=True),
    text(
        "special tokens",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        skip_special_tokens=False,
        ignore_eos=True,
        max_tokens=24,
    ),
    text("no special tokens added", add_special_tokens=False, return_token_ids=True),
    text("truncated prompt", truncate_prompt_tokens=3, return_token_ids=True),
    text("cache_salt", cache_salt="salt"),
    text("priority, user, unknown fields", priority=-1, user="anna", best_of=1, frobnicate=1),
    text("multi-byte text", "Grüße aus München 🎉 你好 ", max_tokens=24),
    text("a long prompt", "The miller counts the sacks, the carter waits with his horse. " * 60),
]

REASONING = [
    chat("reasoning", _profile="reasoning"),
    chat("reasoning hidden", include_reasoning=False, _profile="reasoning"),
    chat("reasoning that ends", THOUGHTS, max_tokens=24, _profile="reasoning"),
    chat(
        "reasoning that ends, hidden",
        THOUGHTS,
        max_tokens=24,
        include_reasoning=False,
        _profile="reasoning",
    ),
    chat(
        "reasoning with usage and token IDs",
        THOUGHTS,
        max_tokens=24,
        return_token_ids=True,
        **USAGE,
        _profile="reasoning",
    ),
    chat("reasoning with logprobs", THOUGHTS, max_tokens=24, logprobs=True, _profile="reasoning"),
    chat("reasoning, n", THOUGHTS, n=2, max_tokens=24, **SEEDED, _profile="reasoning"),
    chat("no thinking", **NO_THINKING, _profile="reasoning"),
    chat("reasoning_effort none", reasoning_effort="none", _profile="reasoning"),
    chat(
        "json while thinking",
        THOUGHTS,
        response_format={"type": "json_object"},
        max_tokens=30,
        _profile="reasoning",
    ),
    chat(
        "json without thinking",
        response_format={"type": "json_object"},
        max_tokens=16,
        **NO_THINKING,
        _profile="reasoning",
    ),
    chat(
        "a tool without thinking",
        ASK_WEATHER,
        tools=[WEATHER],
        structured_outputs={"regex": ONE_CALL},
        max_tokens=40,
        **NO_THINKING,
        _profile="reasoning",
    ),
    chat(
        "a required tool while thinking",
        THOUGHTS,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=40,
        _profile="reasoning",
    ),
    chat(
        "a required tool without thinking",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=60,
        **NO_THINKING,
        _profile="reasoning",
    ),
    chat(
        "a named tool without thinking",
        ASK_WEATHER,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=30,
        **NO_THINKING,
        _profile="reasoning",
    ),
    chat("stop while thinking", NUMBERS, stop=["four"], max_tokens=24, _profile="reasoning"),
    chat(
        "a thinking budget", THOUGHTS, thinking_token_budget=3, max_tokens=24, _profile="reasoning"
    ),
]

CASES = [*CHATS, *TEXTS, *REASONING]
