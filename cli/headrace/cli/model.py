"""Turns the model "demo" into a folder and the name that clients call it by."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from headrace.shared import settings as settings_module
from headrace.shared.contract import DEMO, served_name
from headrace.shared.settings import Settings

logger = logging.getLogger(__name__)


def resolve(
    settings: Settings, *, needs_files: bool, progress: Callable[[str], None] = logger.info
) -> Settings:
    """Return the settings with a served name, and with the demo model's folder if `needs_files`.

    Making the folder takes some seconds, once. Raises: DemoModelError when it can't be made.
    """
    name = settings.model.name
    if name == DEMO and needs_files:
        # it needs numpy and gguf, which a gateway has no use for
        from headrace.cli.demo import model as demo_model

        name = str(demo_model.ensure(settings_module.home(), progress=progress))
    model = msgspec.structs.replace(settings.model, name=name, served_name=served_name(settings))
    return msgspec.structs.replace(settings, model=model)
