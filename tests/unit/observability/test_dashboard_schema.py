"""The dashboards are what Grafana takes: each key and each word is one that Grafana's own schema has."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.runtime import Runtime
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "observability" / "grafana" / "dashboards"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
plugins.register_default_plugins()


def faults(dashboard: dict[str, Any]) -> list[str]:
    """Return what Grafana's schema does not know in a dashboard."""
    read = Dashboard.from_json(copy.deepcopy(dashboard))
    kept = json.loads(JSONEncoder().encode(read))
    return [*dropped(dashboard, kept, ""), *misfits(read, "")]


def dropped(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Yield what was lost on the way through the schema's own types: they keep the keys that they know."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key in kept:
                yield from dropped(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is unknown"
    elif isinstance(given, list):
        for number, (value, again) in enumerate(zip(given, kept, strict=True)):
            yield from dropped(value, again, f"{path}[{number}]")
    elif given != kept:
        yield f"{path} is {kept!r} after {given!r}"


def misfits(read: Any, path: str) -> Iterator[str]:
    """Yield the values that are not of their field's type."""
    if isinstance(read, list):
        for number, one in enumerate(read):
            yield from misfits(one, f"{path}[{number}]")
        return
    if not type(read).__module__.startswith("grafana_foundation_sdk.models"):
        return
    if isinstance(read, Panel) and Runtime().panelcfg_config(read.type_val) is None:
        yield f"{path}.type: {read.type_val!r} is no panel of Grafana's"
    for name, hint in get_type_hints(type(read)).items():
        value = getattr(read, name, None)
        if value is not None and not any(fits(value, kind) for kind in alternatives(hint)):
            yield f"{path}.{name}: {value!r} is not {hint}"
        yield from misfits(value, f"{path}.{name}")


def alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(one for part in get_args(hint) for one in alternatives(part))
    return (hint,)


def fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [member.value for member in kind]
    if kind in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (str, bool):
        return isinstance(value, kind)
    return not isinstance(value, str) or kind in (Any, object)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_schema_knows_every_key_and_every_word_of_a_dashboard(name: str) -> None:
    assert faults(DASHBOARDS[name]) == []


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ([], "heading", "x"),
        ([], "type", "timeserie"),
        (["gridPos"], "w", "8"),
        (["options", "legend"], "displayMode", "lisst"),
        (["options", "legend"], "place", "bottom"),
        (["fieldConfig", "defaults", "custom"], "fillOpacty", 8),
        (["targets", 0], "legend", "x"),
    ],
    ids=lambda part: part if isinstance(part, str) else None,
)
def test_a_panel_with_a_mistake_is_found(place: list[Any], key: str, value: Any) -> None:
    broken = copy.deepcopy(DASHBOARDS["operations"])
    part = broken["panels"][0]
    for step in place:
        part = part[step]
    part[key] = value
    assert len(faults(broken)) == 1
