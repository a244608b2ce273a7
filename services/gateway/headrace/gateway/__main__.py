"""`python -m headrace.gateway`: the gateway alone, without the launcher."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from headrace.gateway.service import run
from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings, load


async def _run_until_signal(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    await run(settings, engine=settings.up.engine, stop=stop)


def main() -> int:
    """Run the gateway until SIGINT or SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser(prog="headrace-gateway", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML or JSON file with the settings")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(_run_until_signal(load(arguments.config)))
    except SettingsError as error:
        logging.getLogger(__name__).error("%s", error, extra={"action": "settings_wrong"})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
