"""The deployment's `nats-server.conf`, with blocks turned on that it ships as comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from headrace.shared.nats_server import NatsServer
from headrace.shared.subjects import Role

CONFIG = Path(__file__).parents[3] / "nats-server.conf"
MONITOR, ANY_PORT = (
    '"127.0.0.1:8222"',
    '"127.0.0.1:-1"',
)  # another broker of this machine may have the first
PASSWORDS = {f"HEADRACE_{name.upper()}_PASSWORD": f"pw-{name}" for name in [*Role, "admin", "sys"]}


def server(folder: Path, text: str, env: Mapping[str, str] | None = None) -> NatsServer:
    """Return a server with this configuration; each user's password is `pw-<user>`."""
    config = folder / "deployed.conf"
    config.write_text(text.replace(MONITOR, ANY_PORT))
    return NatsServer(folder / "nats", config=config, env={**PASSWORDS, **(env or {})})


def block(text: str, name: str) -> str:
    """Return the block `#<name> {` … `#}`, as it stands in its comment."""
    found = re.search(rf"^( *)#{name} \{{\n(?:\1#.*\n)*?\1#\}}\n", text, re.MULTILINE)
    assert found, f"no commented block {name}"
    return found[0]


def turned_on(text: str, name: str) -> str:
    """Return the configuration with that block taken out of its comment."""
    found = block(text, name)
    return text.replace(found, re.sub(r"^( *)#", r"\1", found, flags=re.MULTILINE))
