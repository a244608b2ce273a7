"""A stack of compose.yaml under a project name of its own, driven by whichever Compose is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from ..polling import wait_until
from ..ports import free_port

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 900.0
POLL_S = 1.0


def compose_command() -> list[str]:
    """Return `docker compose` where it is installed, else `docker-compose`."""
    found = subprocess.run(["docker", "compose", "version"], capture_output=True)
    if found.returncode == 0:
        return ["docker", "compose"]
    assert shutil.which("docker-compose"), "neither `docker compose` nor `docker-compose` is there"
    return ["docker-compose"]


class Stack:
    """Containers of one project."""

    def __init__(self) -> None:
        self.project = f"headrace-test-{os.getpid()}"
        self.port = free_port()
        self._command = compose_command()

    @property
    def url(self) -> str:
        """The gateway's address."""
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str) -> str:
        """Run one Compose command; return its stdout."""
        done = subprocess.run(
            [*self._command, "--project-name", self.project, *arguments],
            cwd=ROOT,
            env={**os.environ, "GATEWAY_PORT": str(self.port)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=WATCHDOG_S,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: code {done.returncode}"
        return done.stdout

    def docker(self, *arguments: str) -> str:
        """Run one docker command; return its stdout."""
        return subprocess.run(
            ["docker", *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=60
        ).stdout

    def containers(self, service: str) -> list[str]:
        """Return the IDs of a service's containers, stopped ones too."""
        labels = (f"project={self.project}", f"service={service}")
        filters = [
            part for label in labels for part in ("--filter", f"label=com.docker.compose.{label}")
        ]
        return self.docker("ps", "--all", "--quiet", *filters).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Return what Docker knows of a container."""
        (found,) = json.loads(self.docker("inspect", container))
        return dict(found)

    def crash(self, container: str) -> None:
        """Kill what runs in a container, as a crash would; `docker kill` would count as a wish."""
        subprocess.run(["docker", "exec", container, "sh", "-c", "kill -9 -1"], timeout=60)

    def get(self, path: str) -> Any:
        """Return what the gateway answers with 200."""
        answer = httpx.get(f"{self.url}{path}", timeout=30, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def stages(self) -> dict[str, int]:
        """Return how many ready workers each stage has; none while the gateway can't be asked."""
        try:
            answer = httpx.get(f"{self.url}/ready", timeout=10, trust_env=False).json()
        except (httpx.TransportError, ValueError):
            return {}
        models = list(answer.get("models", {}).values())
        return dict(models[0]["stages"]) if models else {}

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; there is no event to wait for across containers."""
        wait_until(what, condition, within_s=WATCHDOG_S, poll_s=POLL_S)

    def until_ready(self, **stages: int) -> None:
        """Return once each named stage has so many ready workers."""
        self.until(f"ready {stages}", lambda: stages.items() <= self.stages().items())
