"""The stack that the stored reference answers are compared with."""

from __future__ import annotations

import pytest

from ..real_stack import USUAL, Stacks
from .cases import FLAGS


@pytest.fixture(scope="module")
def stack_url(stacks: Stacks) -> str:
    """A `headrace up` with the flags of the reference server."""
    flags = {f"model.{name}": value for name, value in FLAGS["plain"].items()}
    return stacks.get(**{**USUAL, **flags}).url
