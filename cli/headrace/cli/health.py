"""`headrace health URL`: one look at a process's own HTTP port, for whatever runs it. Exit code 0: 200."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def check(url: str) -> int:
    """Return 0 if `url` answers 200, else 1, and say what it answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            status = f"{answer.status} {answer.reason}"
            is_well = answer.status == 200
    except urllib.error.HTTPError as error:
        status, is_well = f"{error.code} {error.reason}", False
        error.close()
    except (OSError, ValueError) as error:  # not listening yet; no URL
        status, is_well = str(error), False
    sys.stdout.write(f"{status}\n")
    return 0 if is_well else 1
