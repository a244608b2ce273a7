"""A store that speaks S3, with one bucket: moto's server, in a process of its own, until its stdin is closed."""

from __future__ import annotations

import logging
import sys

from moto.moto_server.threaded_moto_server import ThreadedMotoServer

BUCKET = "files"


def main() -> None:
    """Serve, and say the URL on stdout."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
