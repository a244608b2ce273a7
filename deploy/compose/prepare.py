"""What a stack of containers needs before its first start: a password a user of the broker, and the demo model.

Runs as a container of its own that ends, with the volumes of all the others. What is there stays as it is.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

FOLDER = Path("/run/headrace")
ROLES = ("admin", "gateway", "render", "prefill", "decode", "derender", "batch")
BROKER_USERS = (*ROLES, "sys")


def prepare_passwords(folder: Path) -> None:
    """Give each role's folder its own password, and the broker's folder all of them.

    Only the container of a role has the volume with that role's folder. nats-server reads a password as a word of its
    configuration, which must begin with a letter.
    """
    nats = folder / "nats" / "passwords.env"
    known = dict(line.split("=", 1) for line in _read(nats).splitlines())
    for user in BROKER_USERS:
        own = _read(folder / user / "password") if user in ROLES else ""
        variable = f"HEADRACE_{user.upper()}_PASSWORD"
        known[variable] = own or known.get(variable) or f"p{secrets.token_hex(24)}"
        if user in ROLES and not own:
            _write(folder / user / "password", known[variable])
    _write(nats, "".join(f"{name}={password}\n" for name, password in sorted(known.items())))


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _write(path: Path, text: str) -> None:
    """Replace the file in one step: a container that is killed leaves the old one, or the new one."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.rename(path)


def main() -> int:
    """Prepare what is missing; return an exit code."""
    prepare_passwords(FOLDER)
    if os.environ.get("HEADRACE_MODEL_NAME", "demo") == "demo":
        from headrace.cli.demo import model
        from headrace.shared import settings

        model.ensure(settings.home(), progress=lambda line: print(line, file=sys.stderr))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
