"""The parts of vLLM that turn text into token IDs and back, without an engine: shared by render and derender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import vllm
from vllm import AsyncEngineArgs, envs
from vllm.config import ModelConfig, VllmConfig
from vllm.config.device import DeviceConfig
from vllm.config.reasoning import ReasoningConfig
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.input_processor import InputProcessor

from headrace.engine.vllm_versions import accepted, load_chat_template, structured_outputs_config
from headrace.shared.contract import model_path, served_name
from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStack:
    """vLLM's own front end, as `vllm serve` with the same settings would have it."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    renderer: BaseRenderer[Any]
    input_processor: InputProcessor
    online_renderer: OnlineRenderer
    models: OpenAIModelRegistry
    frontend: dict[str, Any]  #: what `OnlineRenderer` and `OpenAIServingChat` both take
    reasoning_parser: str  #: empty: none


def load(settings: Settings) -> TextStack:
    """Load configuration, tokenizer, template and parsers.

    Raises: SettingsError when vLLM can't make them from these settings.
    """
    try:
        return _load(settings)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise SettingsError(f"vLLM can't load the model's text side: {error}") from error


def _load(settings: Settings) -> TextStack:
    model = settings.model
    path = model_path(settings)
    args = AsyncEngineArgs(
        model=path,
        revision=model.revision or None,
        max_model_len=model.max_model_len or None,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        reasoning_parser=model.reasoning_parser,
    )
    model_config = args.create_model_config()
    model_config.quantization = None  # no kernels run here, and their checks may want a GPU
    envs.VLLM_CPU_KVCACHE_SPACE = 0  # no KV cache either: keeps vLLM from sizing one
    vllm_config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        structured_outputs_config=structured_outputs_config(args),
        reasoning_config=ReasoningConfig(reasoning_parser=model.reasoning_parser)
        if model.reasoning_parser
        else None,
    )
    renderer = renderer_from_config(vllm_config)
    reasoning_parser = vllm_config.structured_outputs_config.reasoning_parser or ""
    given: dict[str, Any] = {
        "request_logger": None,
        "chat_template": load_chat_template(model.chat_template or None),
        "chat_template_content_format": "auto",
        "enable_auto_tools": model.enable_auto_tool_choice,
        "tool_parser": model.tool_call_parser or None,
        "tool_strict_level": model.tool_strict_level,
        "default_chat_template_kwargs": model.default_chat_template_kwargs or None,
    }
    frontend = accepted(OnlineRenderer, given)
    if model.tool_strict_level != "auto" and "tool_strict_level" not in frontend:
        raise SettingsError(
            f"model.tool_strict_level = {model.tool_strict_level!r} needs vLLM 0.31 or later, and this is"
            f" {vllm.__version__}: leave it at 'auto'"
        )
    online_renderer = OnlineRenderer(
        model_config=model_config,
        renderer=renderer,
        reasoning_parser=reasoning_parser or None,
        **frontend,
    )
    return TextStack(
        vllm_config=vllm_config,
        model_config=model_config,
        renderer=renderer,
        input_processor=InputProcessor(vllm_config, renderer=renderer),
        online_renderer=online_renderer,
        models=OpenAIModelRegistry(
            model_config=model_config,
            base_model_paths=[BaseModelPath(name=served_name(settings), model_path=path)],
        ),
        frontend=frontend,
        reasoning_parser=reasoning_parser,
    )
