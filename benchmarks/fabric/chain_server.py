"""vLLM's own HTTP servers around the fake engine: `chain_server.py render|generate STEP_S 0|1 --model FOLDER --port N`.

`render` is what `vllm launch render` runs. `generate` serves vLLM's `/inference/v1/generate` in front of headrace's
fake engine, which computes the prompt itself if `1`, and has it if `0`. `chain.py` starts both.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.render.app_state import init_render_app_state
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser

from headrace.engine.fake_engine import FakeDecodeEngine
from headrace.shared.settings import load


class FakeClient:
    """What vLLM's servers need of an engine, in front of headrace's fake one."""

    errored = False
    is_running = True
    is_stopped = False

    def __init__(self, step_s: float, *, computes: bool, vllm_config: Any, renderer: Any) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = None  # the fake engine takes what it is given
        fake = {"step_s": step_s, "num_blocks": 65_536}
        if not computes:
            fake["prefill_s_per_1k"] = 0.0
        self._engine = FakeDecodeEngine(load(None, overrides={"fake": fake}, env={}))

    async def start(self) -> None:
        """Be ready."""
        await self._engine.start()

    def check_admission(self, *which: Any) -> None:
        """Everybody may."""

    async def is_tracing_enabled(self) -> bool:
        """It is not."""
        return False

    async def abort(self, request_id: Any) -> None:
        """A generator that is closed is aborted already."""

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what each step gives."""
        token_ids = list(prompt["prompt_token_ids"])
        params = {"max_tokens": sampling_params.max_tokens, "ignore_eos": True}
        outputs = self._engine.generate(
            request_id,
            [token_id % 257 for token_id in token_ids],
            msgspec.msgpack.encode(params),
            kv_transfer_params=None,
            cache_salt=None,
            priority=0,
        )
        async for output in outputs:
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=token_ids,
                prompt_logprobs=None,
                outputs=[
                    CompletionOutput(
                        index=0,
                        text="",
                        token_ids=output.token_ids,
                        cumulative_logprob=None,
                        logprobs=None,
                        finish_reason=output.finish_reason,
                    )
                ],
                finished=output.finish_reason is not None,
            )


async def generate(step_s: float, computes: bool, args: Any) -> None:
    """Serve `/inference/v1/generate`, until killed."""
    _, sock = setup_server(args, reuse_port=False)
    from vllm.config import VllmConfig

    vllm_config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
    app = build_app(args, ("render",))
    app.include_router(router)
    await init_render_app_state(vllm_config, app.state, args)
    engine = FakeClient(
        step_s,
        computes=computes,
        vllm_config=vllm_config,
        renderer=app.state.online_renderer.renderer,
    )
    await engine.start()
    app.state.engine_client = engine
    app.state.serving_tokens = ServingTokens(
        engine,  # type: ignore[arg-type]  # of an `EngineClient` it has what is called
        app.state.openai_serving_models,
        app.state.online_renderer,
        request_logger=None,
        force_no_detokenize=True,
    )
    await (await serve_http(app, sock=sock, enable_ssl_refresh=False, access_log=False))


def main() -> None:
    """Serve one of the two."""
    what, step_s, computes, *rest = sys.argv[1:]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [*rest, "--disable-uvicorn-access-log", "--host", "127.0.0.1"]
    )
    served = (
        run_launch_fastapi(args)
        if what == "render"
        else generate(float(step_s), computes == "1", args)
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(served)


if __name__ == "__main__":
    main()
