"""The stack that the stored reference answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.cli.demo import model as demo_model
from headrace.shared import settings

from .servers import headrace_stack


@pytest.fixture(scope="module")
def stack_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `headrace up` with the flags of the reference server."""
    model = demo_model.ensure(settings.home(), progress=lambda _: None)
    home = tmp_path_factory.mktemp("parity")
    (home / "models").mkdir()
    (home / "models" / model.name).symlink_to(model)
    with headrace_stack("plain", home, home / "up.log") as url:
        yield url
