"""The Kubernetes manifests: right for the schemas, and true to roles, drain times, ports, streams and consumers."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import kubernetes_validate
import msgspec
import pytest
import yaml

from headrace.cli.plan import drain_timeout_s
from headrace.shared import nats_server
from headrace.shared import settings as settings_module
from headrace.shared.broker.streams import matches, streams
from headrace.shared.broker.work_queue import WorkQueue
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
GUIDE = (ROOT / "docs" / "deploy.md").read_text()
VERSIONS = ("1.30", "1.34")
GPU_ROLES = (Role.PREFILL, Role.DECODE)
PRE_STOP_S = 10


def documents(folder: str) -> list[dict[str, Any]]:
    """Return what the YAML files that a kustomization names say."""
    base = FOLDER / folder
    names = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    files = [base / name for name in names if name.endswith(".yaml")]
    assert {path.name for path in base.glob("*.yaml")} == {
        "kustomization.yaml",
        *(path.name for path in files),
    }
    return [document for path in files for document in yaml.safe_load_all(path.read_text())]


BASE = documents("base")
KEDA = documents("keda")
KUSTOMIZATION = yaml.safe_load((FOLDER / "keda" / "kustomization.yaml").read_text())
DEPLOYMENTS = {Role(d["metadata"]["name"]): d["spec"] for d in BASE if d["kind"] == "Deployment"}


def pod_of(role: Role) -> dict[str, Any]:
    pod: dict[str, Any] = DEPLOYMENTS[role]["template"]["spec"]
    return pod


def container_of(role: Role) -> dict[str, Any]:
    (container,) = pod_of(role)["containers"]
    return dict(container)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", BASE, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_it_fits_the_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_every_role_has_a_deployment_and_a_disruption_budget() -> None:
    assert set(DEPLOYMENTS) == set(Role)
    budgets = {d["metadata"]["name"]: d["spec"] for d in BASE if d["kind"] == "PodDisruptionBudget"}
    assert {role: budgets[role]["selector"] for role in Role} == {
        role: DEPLOYMENTS[role]["selector"] for role in Role
    }


@pytest.mark.parametrize("role", Role)
def test_a_pod_may_drain_before_it_is_killed(role: Role) -> None:
    pre_stop = PRE_STOP_S if role is Role.GATEWAY else 0
    needed_s = drain_timeout_s(Settings(), role) + pre_stop
    assert pod_of(role)["terminationGracePeriodSeconds"] >= needed_s + 5
    if pre_stop:  # until no proxy sends it a request any more
        assert container_of(role)["lifecycle"]["preStop"] == {"sleep": {"seconds": PRE_STOP_S}}


@pytest.mark.parametrize("role", Role)
def test_no_variable_of_a_service_can_look_like_a_setting(role: Role) -> None:
    assert pod_of(role)["enableServiceLinks"] is False


@pytest.mark.parametrize("role", Role)
def test_a_pod_runs_its_role_confined(role: Role) -> None:
    container = container_of(role)
    assert container["args"][:2] == ["serve", role]
    assert pod_of(role)["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (password,) = [v for v in pod_of(role)["volumes"] if "secret" in v]
    assert password["secret"]["items"] == [{"key": role, "path": "password"}]


def reached(role: Role) -> dict[str, Any]:
    """Return which ports of a role's pods are open, each to whom: None is everybody; "*" is every port."""
    labels = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/component": str(role)}
    found: dict[str, Any] = {}
    for policy in (d["spec"] for d in BASE if d["kind"] == "NetworkPolicy"):
        assert policy["policyTypes"] == ["Ingress"]
        if selects(policy["podSelector"], labels):
            for rule in policy["ingress"]:
                for port in rule.get("ports", [{"port": "*"}]):
                    found[port["port"]] = rule.get("from")
    return found


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(labels[key] == value for key, value in selector.get("matchLabels", {}).items()) and (
        all(labels[e["key"]] in e["values"] for e in selector.get("matchExpressions", []))
    )


@pytest.mark.parametrize("role", Role)
def test_engines_are_reached_by_engines_alone_and_only_the_gateway_by_clients(role: Role) -> None:
    ports = reached(role)
    assert ports.pop("metrics") is None
    if role is Role.GATEWAY:
        assert ports == {"http": None}
    elif role in GPU_ROLES:
        ((selector,),) = (source.values() for (source,) in ports.values())
        assert set(ports) == {"*"}
        (expression,) = selector["matchExpressions"]
        assert expression["values"] == [str(role) for role in GPU_ROLES]
    else:
        assert ports == {}
    names = {entry["name"] for entry in container_of(role)["ports"]}
    assert names >= set(reached(role)) - {"*"}


@pytest.mark.parametrize("role", Role)
def test_the_probes_ask_where_the_role_answers(role: Role) -> None:
    settings = common_settings()
    port = settings.gateway.port if role is Role.GATEWAY else settings.metrics.port
    container = container_of(role)
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ports[container[probe]["httpGet"]["port"]] == port
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@pytest.mark.parametrize("role", GPU_ROLES)
def test_an_engine_has_a_gpu_and_is_reached_at_its_pods_address(role: Role) -> None:
    container = container_of(role)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (host,) = [entry for entry in container["env"] if entry["name"] == "HEADRACE_NIXL_HOST"]
    assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert ports["nixl"] == common_settings().nixl.port


def common_settings() -> Settings:
    path = FOLDER / "base" / "headrace.toml"
    return settings_module.load(path, env={}, overrides={"broker": {"password_file": ""}})


class Trigger(msgspec.Struct, forbid_unknown_fields=True):
    """One trigger of KEDA's `nats-jetstream` scaler."""

    type: Literal["nats-jetstream"]
    metadata: Metadata


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """What that scaler reads, all of it text."""

    natsServerMonitoringEndpoint: str
    account: str
    stream: str
    consumer: str
    lagThreshold: Annotated[str, msgspec.Meta(pattern=r"^\d+$")]


class Target(msgspec.Struct, forbid_unknown_fields=True):
    """A Deployment, where nothing else is said."""

    name: Role


class Scaling(msgspec.Struct, forbid_unknown_fields=True):
    """The specification of a ScaledObject."""

    scaleTargetRef: Target
    minReplicaCount: int
    maxReplicaCount: int
    pollingInterval: int
    cooldownPeriod: int
    fallback: dict[str, int]
    advanced: dict[str, Any]
    triggers: list[Trigger]


def scalings() -> dict[Role, Scaling]:
    assert {d["apiVersion"] for d in KEDA} == {"keda.sh/v1alpha1"}
    assert {d["kind"] for d in KEDA} == {"ScaledObject"}
    return {Role(d["metadata"]["name"]): msgspec.convert(d["spec"], Scaling) for d in KEDA}


QUEUES = {
    f"{queue.role}_{lane}": queue
    for queue in WorkQueue.of_model("slug", "pool")
    for lane in Lane
    if queue.consumer.endswith(f"_{lane}")
}
#: derender takes from no queue: its streams are decode's jobs
SCALED_BY = {
    Role.RENDER: Role.RENDER,
    Role.PREFILL: Role.PREFILL,
    Role.DECODE: Role.DECODE,
    Role.DERENDER: Role.DECODE,
}


def test_each_stage_is_scaled_by_all_queues_that_it_serves() -> None:
    found = scalings()
    assert set(found) == {*SCALED_BY, Role.BATCH}
    for role, scaling in found.items():
        assert scaling.scaleTargetRef.name is role
        if role is Role.BATCH:
            (only,) = scaling.triggers
            queue = WorkQueue.batch()
            assert (only.metadata.stream, only.metadata.consumer) == (queue.stream, queue.consumer)
            continue
        wanted = [f"{SCALED_BY[role]}_{lane}" for lane in Lane]
        assert [trigger.metadata.consumer for trigger in scaling.triggers] == wanted
        streams_of = [QUEUES[name].stream for name in wanted]
        assert [trigger.metadata.stream for trigger in scaling.triggers] == streams_of


def test_each_queue_is_in_the_stream_that_the_topology_has_for_it() -> None:
    by_name = {stream.name: stream for stream in streams(1)}
    for queue in QUEUES.values():
        subject = queue.filter_subject.replace("*", "x")
        assert any(matches(pattern, subject) for pattern in by_name[queue.stream].subjects)


def test_each_consumers_name_is_put_in_from_the_running_stack() -> None:
    put_in = {
        (target["select"]["name"], path): entry["source"]["fieldPath"]
        for entry in KUSTOMIZATION["replacements"]
        for target in entry["targets"]
        for path in target["fieldPaths"]
    }
    assert put_in == {
        (role, f"spec.triggers.{index}.metadata.consumer"): f"data.{trigger.metadata.consumer}"
        for role, scaling in scalings().items()
        if role in SCALED_BY
        for index, trigger in enumerate(scaling.triggers)
    }


def test_keda_asks_the_account_of_the_services() -> None:
    config = (ROOT / "nats-server.conf").read_text()
    accounts = {t.metadata.account for scaling in scalings().values() for t in scaling.triggers}
    assert len(accounts) == 1
    assert re.search(rf"^  {accounts.pop()} \{{\n    jetstream: enabled", config, re.MULTILINE)


def test_a_pod_that_is_full_asks_for_another_one() -> None:
    settings = common_settings()
    slots = {
        Role.RENDER: settings.render,
        Role.PREFILL: settings.prefill,
        Role.DECODE: settings.decode,
        Role.BATCH: settings.batch,
    }
    for role, of in slots.items():
        assert {int(t.metadata.lagThreshold) for t in scalings()[role].triggers} == {of.slots}


def test_the_brokers_users_can_be_taken_from_the_configuration_as_the_guide_does(
    tmp_path: Path,
) -> None:
    cut = re.search(r"^ +(sed .+ nats-server\.conf) > accounts\.conf$", GUIDE, re.MULTILINE)
    assert cut is not None
    done = subprocess.run(shlex.split(cut[1]), cwd=ROOT, stdout=subprocess.PIPE, check=True)
    (tmp_path / "accounts.conf").write_bytes(done.stdout)
    (tmp_path / "nats.conf").write_text(
        f"include ./accounts.conf\njetstream {{ store_dir: {tmp_path} }}\n"
    )
    values = yaml.safe_load((FOLDER / "nats-values.yaml").read_text())
    env = dict.fromkeys(values["container"]["env"], "word")
    command = [nats_server.binary(), "-t", "-c", str(tmp_path / "nats.conf")]
    tested = subprocess.run(command, env=env, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stderr


def test_the_broker_has_every_users_password_and_the_limits_of_the_configuration() -> None:
    values = yaml.safe_load((FOLDER / "nats-values.yaml").read_text())
    config = (ROOT / "nats-server.conf").read_text()
    without_comments = "\n".join(line.split("#")[0] for line in config.splitlines())
    assert set(values["container"]["env"]) == set(
        re.findall(r"\$(HEADRACE_\w+_PASSWORD)", without_comments)
    )
    merged = values["config"]["merge"]
    limits, _, _ = without_comments.partition("jetstream {")
    for name, value in re.findall(
        r"^(max_\w+|\w+_deadline|ping_interval|lame_\w+): (\S+)", limits, re.M
    ):
        assert str(merged[name]).strip("<> ") == value.strip('"'), name
    assert merged["feature_flags"] == {"js_ack_fc_v2": False}
