"""Alert rules and dashboards ask only for what there is; the documents and files that are generated are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY

from headrace.shared import exposition, metrics

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "observability"
DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
#: of Prometheus itself
ITS_OWN = {"up"}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def ours() -> dict[str, set[str]]:
    """Return every series that headrace exports, with its labels."""
    assert metrics
    assert exposition
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    found: dict[str, set[str]] = {}
    labels = {name: set(labels) for name, _, labels in rows()}
    for name, kind, _ in rows():
        base = name.removesuffix("_total")
        for suffix in suffixes[kind]:
            found[base + suffix] = labels[name] | ({"le"} if suffix == "_bucket" else set())
    return found


def rows() -> list[tuple[str, str, list[str]]]:
    return [
        (name, kind, re.findall(r"`(\w+)`", labels))
        for name, kind, labels, _ in script("metrics_table").rows()
    ]


def vllms() -> set[str]:
    """Return the names of vLLM's own metrics, as its source has them."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'"(vllm:\w+)"', source))
    assert len(names) > 20
    return names | {f"{name}_total" for name in names}


def selectors(query: str) -> Iterator[Any]:
    """Yield the series that a query names, each as a selector. Raises: ValueError when it is no PromQL."""
    found: list[Any] = []

    def visit(expr: Any) -> bool:
        if isinstance(expr, promql_parser.VectorSelector):
            found.append(expr)
        elif isinstance(expr, promql_parser.MatrixSelector):
            found.append(expr.vector_selector)
        return True

    def walk(expr: Any) -> None:
        visit(expr)
        for name in ("expr", "lhs", "rhs"):
            if (child := vars_of(expr).get(name)) is not None:
                walk(child)
        for child in vars_of(expr).get("args", None) or []:
            walk(child)

    walk(promql_parser.parse(query))
    yield from found


def vars_of(expr: Any) -> dict[str, Any]:
    return {name: getattr(expr, name) for name in dir(expr) if not name.startswith("_")}


def queries() -> list[tuple[str, str]]:
    found = [(rule["alert"], str(rule["expr"])) for rule in RULES]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [
                (f"{path.stem}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m"))
                for target in panel["targets"]
            ]
    return found


QUERIES = queries()


@pytest.mark.parametrize(
    "query", [query for _, query in QUERIES], ids=[name for name, _ in QUERIES]
)
def test_every_series_that_is_asked_for_exists_with_its_labels(query: str) -> None:
    known, of_vllm = ours(), vllms()
    named = list(selectors(query))
    assert named
    for selector in named:
        if selector.name in of_vllm | ITS_OWN:
            continue
        assert selector.name in known
        asked = {matcher.name for matcher in selector.matchers.matchers} - {"job", "instance"}
        assert asked <= known[selector.name]


def test_each_grouping_is_by_labels_that_the_series_has() -> None:
    known = ours()
    everywhere = {"instance", "job"}  # from Prometheus
    for name, query in QUERIES:
        for labels, inner in re.findall(r"by \(([^)]*)\) \((?:rate|increase)?\(?([\w:]+)", query):
            if inner in known:
                asked = set(filter(None, re.split(r",\s*", labels)))
                assert asked <= known[inner] | everywhere, name


def test_there_are_three_dashboards_and_each_panel_is_explained() -> None:
    assert {path.stem for path in DASHBOARDS} == {"operations", "latency", "batch"}
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        assert dashboard["uid"] == f"headrace-{path.stem}"
        places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
        assert len(set(places)) == len(places)
        assert all(panel["description"] and panel["targets"] for panel in dashboard["panels"])


def test_each_alert_says_how_bad_it_is_and_what_it_means() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} <= rule["annotations"].keys()


@pytest.mark.parametrize("name", ["metrics_table", "dashboards"])
def test_what_is_generated_is_up_to_date(name: str) -> None:
    assert script(name).main(["--check"]) == 0, "run: make docs"


def test_every_metric_of_the_process_is_in_the_table() -> None:
    exported = {family.name for family in REGISTRY.collect() if family.name.startswith("headrace_")}
    assert exported == {name.removesuffix("_total") for name, _, _ in rows()}


def test_the_configurations_are_yaml_and_name_the_same_ports() -> None:
    files = [*FOLDER.glob("*.y*ml"), *FOLDER.rglob("provisioning/**/*.yaml")]
    parsed = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert len(parsed) >= 5
    scraped = parsed["prometheus.yml"]["scrape_configs"][0]["dns_sd_configs"][0]
    compose = (ROOT / "deploy" / "compose" / "headrace.toml").read_text()
    assert f"port = {scraped['port']}" in compose.partition("[metrics]")[2]
    tempo = parsed["tempo.yaml"]["distributor"]["receivers"]["otlp"]["protocols"]["grpc"][
        "endpoint"
    ]
    target = parsed["otel-collector.yaml"]["exporters"]["otlp/tempo"]["endpoint"]
    assert tempo.rpartition(":")[2] == target.rpartition(":")[2]
