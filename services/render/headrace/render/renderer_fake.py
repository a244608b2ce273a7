"""A renderer without vLLM: the prompt's UTF-8 bytes are its token IDs. For load and fault tests."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from headrace.render.renderer import Rendered
from headrace.render.responses_fake import chat_of
from headrace.shared import token_ids
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import BadRequestError, ModelNotFoundError
from headrace.shared.messages import Ask, Endpoint, Prompt
from headrace.shared.settings import Settings

DEFAULT_MAX_TOKENS = 64
ROLES = ("system", "assistant", "user", "function", "tool", "developer")


class _Part(msgspec.Struct):
    text: str
    type: str = "text"


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Request(msgspec.Struct):
    """What both endpoints have in common; the names and defaults are vLLM's."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    stream: bool | None = None
    priority: int = 0
    cache_salt: str | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class _Chat(_Request, kw_only=True):
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class _Completion(_Request, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class _SamplingParams(_Request, kw_only=True):
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class _Generate(msgspec.Struct):
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    sampling_params: _SamplingParams
    model: str | None = None
    stream: bool | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Tokenize(msgspec.Struct):
    prompt: str
    model: str | None = None
    return_token_strs: bool | None = None


class _Detokenize(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]
    model: str | None = None


_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)
_generate_decoder = msgspec.json.Decoder(_Generate)
_tokenize_decoder = msgspec.json.Decoder(_Tokenize)
_detokenize_decoder = msgspec.json.Decoder(_Detokenize)


class FakeRenderer:
    """A `Renderer` that needs no model; it refuses the same mistakes as vLLM's, in fewer words."""

    def __init__(self, settings: Settings) -> None:
        self.contract = contract(settings, engine="fake")
        self.served_name = served_name(settings)
        self.max_model_len = settings.model.max_model_len or settings.fake.max_model_len

    async def start(self) -> None:
        pass

    async def render(self, endpoint: Endpoint, body: bytes, tenant: str = "") -> Rendered:
        if endpoint == "generate":
            return self._generate(body)
        if endpoint == "responses":
            endpoint, body = "chat.completions", chat_of(body)
        decoder = _chat_decoder if endpoint == "chat.completions" else _completion_decoder
        request: _Chat | _Completion = _decoded(decoder, body)
        self._check_model(request.model)
        texts: list[bytes | list[int]]
        if isinstance(request, _Chat):
            texts, logprobs = [_template(request.messages)], _chat_logprobs(request)
        else:
            texts, logprobs = _texts(request.prompt), request.logprobs
        return Rendered(
            prompts=tuple(self._prompt(request, text, logprobs) for text in texts),
            n=request.n or 1,
            stream=bool(request.stream),
            priority=request.priority,
        )

    async def ask(self, ask: Ask) -> bytes:
        if ask.endpoint == "tokenize":
            text: _Tokenize = _decoded(_tokenize_decoder, ask.body)
            self._check_model(text.model)
            ids = list(text.prompt.encode())
            strings = [chr(token_id) for token_id in ids] if text.return_token_strs else None
            return msgspec.json.encode(
                {
                    "count": len(ids),
                    "max_model_len": self.max_model_len,
                    "tokens": ids,
                    "token_strs": strings,
                }
            )
        if ask.endpoint == "detokenize":
            given: _Detokenize = _decoded(_detokenize_decoder, ask.body)
            self._check_model(given.model)
            return msgspec.json.encode(
                {"prompt": bytes(given.tokens).decode("utf-8", errors="replace")}
            )
        raise _unsupported(ask.endpoint)

    async def close(self) -> None:
        pass

    def _generate(self, body: bytes) -> Rendered:
        given: _Generate = _decoded(_generate_decoder, body)
        self._check_model(given.model)
        if given.kv_transfer_params:
            name = "kv_transfer_params"
            raise BadRequestError(f"{name} is set by the server and can't be given", param=name)
        request = msgspec.structs.replace(
            given.sampling_params,
            stream=given.stream,
            priority=given.priority,
            cache_salt=given.cache_salt,
        )
        prompt = self._prompt(request, given.token_ids, given.sampling_params.logprobs)
        return Rendered(
            prompts=(prompt,),
            n=request.n or 1,
            stream=bool(given.stream),
            priority=given.priority,
        )

    def _check_model(self, model: str | None) -> None:
        if model and model != self.served_name:
            raise ModelNotFoundError(
                f"The model `{model}` does not exist. Valid aliases: {self.served_name}.",
                param="model",
            )

    def _prompt(self, request: _Request, text: bytes | list[int], logprobs: int | None) -> Prompt:
        if not text:
            raise BadRequestError("the prompt is empty", param="prompt")
        if max(text) > 255 or min(text) < 0:
            raise BadRequestError("token IDs of the fake engine are 0 to 255", param="prompt")
        room = self.max_model_len - len(text)
        asked = request.max_completion_tokens or request.max_tokens
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
        if max_tokens < 1 or room < 1:
            what = f"max_tokens must be at least 1, got {max_tokens}"
            if room < 1:
                what = f"the prompt has {len(text)} token IDs, more than max_model_len allows"
            raise BadRequestError(
                f"{what} (max_model_len={self.max_model_len})",
                param="input_tokens" if room < 1 else "max_tokens",
            )
        params: dict[str, Any] = {
            "n": request.n or 1,
            "max_tokens": min(max_tokens, room),
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
            "include_stop_str_in_output": request.include_stop_str_in_output,
            "stop": _stops(request.stop),
            "stop_token_ids": request.stop_token_ids or [],
            "seed": request.seed,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "logprobs": logprobs,
        }
        return Prompt(
            token_ids=token_ids.pack(list(text)),
            sampling_params=msgspec.msgpack.encode(params),
            cache_salt=request.cache_salt,
            prompt_logprobs=request.prompt_logprobs,
        )


def _template(messages: list[_ChatMessage]) -> bytes:
    lines = []
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            supported = f"{', '.join(map(repr, ROLES[:-1]))}, and {ROLES[-1]!r}"
            raise BadRequestError(
                f"Invalid value: {message.role!r}. Supported values are: {supported}.",
                param=f"messages[{index}].role",
            )
        lines.append(f"{message.role}: {_text(message.content)}\n")
    return f"{''.join(lines)}assistant: ".encode()


def _text(content: str | list[_Part] | None) -> str:
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise BadRequestError("only text content is supported", param="messages")
        return "\n".join(part.text for part in content)
    return content or ""


def _texts(prompt: str | list[str | int | list[int]]) -> list[bytes | list[int]]:
    if isinstance(prompt, str):
        return [prompt.encode()]
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [
        item.encode() if isinstance(item, str) else item
        for item in prompt
        if not isinstance(item, int)
    ]
    if bool(ids) == bool(texts):
        raise BadRequestError("expected one prompt or a list of prompts", param="prompt")
    return texts or [ids]


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if "" in stops:
        raise BadRequestError("stop cannot contain an empty string", param="stop")
    return stops


def _chat_logprobs(request: _Chat) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(str(error), param=_param(str(error))) from None


def _unsupported(endpoint: str) -> BadRequestError:
    return BadRequestError(f"{endpoint} is not supported by the fake engine")


def _param(message: str) -> str | None:
    """Return the field that msgspec's message names, as in "… - at `$.max_tokens`"."""
    _, found, path = message.rpartition("`$.")
    return path.rstrip("`") if found else None
