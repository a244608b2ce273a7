"""`headrace serve ROLE`: one worker of one stage, in this process. What containers run."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
from collections.abc import Callable
from typing import Protocol, cast

from headrace.cli import model, side_channel
from headrace.shared import contract
from headrace.shared.errors import EngineDeadError, HeadraceError, SettingsError, StoppedError
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_SETTINGS = 2
EXIT_ENGINE_DEAD = 3

ROLES_WITH_MODEL_FILES = (Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER)
ROLES_WITH_KV = (Role.PREFILL, Role.DECODE)


class Run(Protocol):
    """A service's `run`: returns after `stop` is set and it has drained. Raises: HeadraceError."""

    async def __call__(self, settings: Settings, *, engine: str, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        ...


def serve(role: Role, settings: Settings) -> int:
    """Run one worker until SIGTERM or SIGINT; return the exit code."""
    try:
        engine = settings.up.engine
        needs_files = engine == "vllm" and role in ROLES_WITH_MODEL_FILES
        if needs_files:
            contract.check_vllm()
        resolved = model.resolve(settings, needs_files=needs_files)
        if role in ROLES_WITH_KV:
            resolved = side_channel.resolve(resolved)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_stopped(load(role), resolved, engine))
    except SettingsError as error:
        logger.error("%s", error, extra={"action": "settings_refused"})
        return EXIT_SETTINGS
    except EngineDeadError as error:
        logger.error("the engine is dead: %s", error, extra={"action": "engine_dead"})
        return EXIT_ENGINE_DEAD
    except StoppedError as error:
        logger.info("%s", error, extra={"action": "drained"})
        return EXIT_OK
    except HeadraceError as error:
        logger.error("%s", error, extra={"action": "failed"})
        return EXIT_ERROR
    except Exception:
        logger.exception("%s failed", role, extra={"action": "failed"})
        return EXIT_ERROR
    logger.info("drained", extra={"action": "drained"})
    return EXIT_OK


def load(role: Role) -> Run:
    """Import a role's service. Raises: SettingsError when it is not installed."""
    try:
        module = importlib.import_module(f"headrace.{role}.service")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"role {role} can't run here: module {error.name} is not installed"
        ) from error
    return cast("Run", module.run)


async def _until_stopped(run: Run, settings: Settings, engine: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_or_end() -> None:
        if stop.is_set():
            logger.warning("second signal: ending at once", extra={"action": "ended"})
            os._exit(EXIT_ERROR)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_end)
    await run(settings, engine=engine, stop=stop)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", uvloop.new_event_loop)
