from __future__ import annotations

import math
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from headrace.cli import gpus, plan
from headrace.cli.supervisor import DRAIN_ORDER, START_ORDER
from headrace.cli.worker import Worker
from headrace.shared import settings as settings_module
from headrace.shared.errors import SettingsError
from headrace.shared.settings import (
    BatchSettings,
    DecodeSettings,
    DerenderSettings,
    GatewaySettings,
    MetricsSettings,
    PrefillSettings,
    Settings,
    UpSettings,
)
from headrace.shared.subjects import Role


def workers(
    settings: Settings, *, env: dict[str, str] | None = None, visible_gpus: list[str] | None = None
) -> list[Worker]:
    return plan.workers(
        settings,
        Path("/run/settings.json"),
        env=env or {},
        visible_gpus=visible_gpus or [],
        log_format="json",
        log_level="debug",
    )


def test_every_role_has_a_place_in_both_orders() -> None:
    assert sorted(DRAIN_ORDER) == sorted(START_ORDER) == sorted(Role)


def test_the_plan_has_as_many_processes_as_the_settings_say() -> None:
    up = UpSettings(gateway=2, render=2, prefill=0, decode=3, derender=1)
    names = [worker.name for worker in workers(Settings(up=up))]
    assert names == [
        *("gateway-0", "gateway-1", "render-0", "render-1"),
        *("decode-0", "decode-1", "decode-2", "derender-0", "batch-0"),
    ]


def test_colocated_engines_have_no_prefill_beside_them_and_gpus_of_their_own() -> None:
    settings = Settings(
        decode=DecodeSettings(colocated=True, engine={"tensor_parallel_size": 2}),
        up=UpSettings(decode=2),
    )
    given = {w.name: w.env.get(gpus.VARIABLE) for w in workers(settings, visible_gpus=[*"0123"])}
    assert not [name for name in given if name.startswith(Role.PREFILL)]
    assert (given["decode-0"], given["decode-1"]) == ("0,1", "2,3")


def test_a_worker_is_served_from_the_written_settings() -> None:
    worker = workers(Settings())[1]
    assert worker.command[1:] == [
        *("-m", "headrace.cli.main", "serve", "render"),
        *("--config", "/run/settings.json", "--instance-index", "0"),
        *("--log-format", "json", "--log-level", "debug"),
    ]
    assert worker.log == Path("/run/logs/render-0.log")


def test_each_process_has_a_metrics_port_of_its_own_if_there_are_any() -> None:
    assert all("HEADRACE_METRICS_PORT" not in worker.env for worker in workers(Settings()))
    planned = workers(Settings(metrics=MetricsSettings(port=9100)))
    ports = [
        settings_module.load(env={"HEADRACE_METRICS_PORT": worker.env["HEADRACE_METRICS_PORT"]})
        for worker in planned
    ]
    assert [settings.metrics.port for settings in ports] == list(range(9100, 9100 + len(planned)))


def test_settings_in_the_environment_do_not_reach_a_worker_again() -> None:
    env = {"HEADRACE_MODEL_NAME": "demo", "HEADRACE_HOME": "/h", "PATH": "/bin"}
    assert plan.worker_env(env) == {"HEADRACE_HOME": "/h", "PATH": "/bin"}


def test_written_settings_are_read_back_the_same(tmp_path: Path) -> None:
    settings = Settings(decode=DecodeSettings(local_prefill_threshold=math.inf))
    path = plan.write_settings(settings, tmp_path)
    assert settings_module.load(path, env={}) == settings


def test_only_the_user_can_read_the_written_settings(tmp_path: Path) -> None:
    path = plan.write_settings(Settings(), tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_each_engine_gets_gpus_of_its_own() -> None:
    settings = Settings(
        prefill=PrefillSettings(engine={"tensor_parallel_size": 2}), up=UpSettings(prefill=2)
    )
    given = {w.name: w.env.get(gpus.VARIABLE) for w in workers(settings, visible_gpus=[*"01234"])}
    assert given == {
        "gateway-0": None,
        "render-0": None,
        "prefill-0": "0,1",
        "prefill-1": "2,3",
        "decode-0": "4",
        "derender-0": None,
        "batch-0": None,
    }


def test_engines_share_the_gpus_when_there_are_too_few() -> None:
    assert gpus.assign(["0"], [1, 1]) == [["0"], ["0"]]


def test_gpus_that_engines_share_are_known() -> None:
    envs = [{gpus.VARIABLE: "0,1"}, {gpus.VARIABLE: "1,2"}, {}, {gpus.VARIABLE: ""}]
    assert gpus.shared(envs) == ["1"]


def test_an_engine_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"an engine of 4 GPUs .* does not fit: 2 are visible"):
        gpus.assign(["0", "1"], [1, 4])


def test_the_gpus_that_are_visible_already_are_the_ones_given_away() -> None:
    assert gpus.visible({gpus.VARIABLE: "3, 5"}) == ["3", "5"]


def test_engines_on_a_cpu_box_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    envs = {worker.role: worker.env for worker in workers(Settings())}
    assert envs[Role.PREFILL]["OMP_NUM_THREADS"] == envs[Role.DECODE]["OMP_NUM_THREADS"] == "4"
    chosen = workers(Settings(), env={"OMP_NUM_THREADS": "1"})
    assert {worker.env["OMP_NUM_THREADS"] for worker in chosen} == {"1"}


def test_port_0_becomes_a_free_port() -> None:
    gateway = msgspec.structs.replace(Settings().gateway, port=0)
    assert plan.with_port(Settings(gateway=gateway)).gateway.port > 0


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port} is in use: choose another"):
            plan.listenable_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"can't listen on 192\.0\.2\.1:8000"):
        plan.listenable_port("192.0.2.1", 8000)


def test_a_run_folder_is_new_and_names_this_process(tmp_path: Path) -> None:
    folder = plan.make_run_folder(tmp_path)
    assert folder.parent == tmp_path / "run"
    assert folder.name.endswith(f"-{os.getpid()}")
    assert (folder / "logs").is_dir()


def test_only_the_last_run_folders_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    ended = 2**22 + 1  # above any process ID
    run = tmp_path / "run"
    for number in range(plan.NUM_RUN_FOLDERS + 5):
        (run / f"20200101-{number:06d}-{ended}" / "logs").mkdir(parents=True)
    running = run / f"20190101-000000-{os.getppid()}"
    notes = run / "0-notes-of-mine"
    running.mkdir()
    notes.mkdir()
    new = plan.make_run_folder(tmp_path)
    kept = sorted(folder.name for folder in run.iterdir())
    assert {new.name, running.name, notes.name} <= set(kept)
    others = [name for name in kept if name.endswith(f"-{ended}")]
    assert others[0] == f"20200101-{6:06d}-{ended}"
    assert len(others) == plan.NUM_RUN_FOLDERS - 1


def test_vllms_sockets_lie_in_the_run_folder_where_their_path_is_not_too_long() -> None:
    def place(folder: str, env: dict[str, str]) -> set[str | None]:
        planned = plan.workers(
            Settings(),
            Path(folder) / "settings.json",
            env=env,
            visible_gpus=[],
            log_format="json",
            log_level="debug",
        )
        engines = [worker.env for worker in planned if worker.role in plan.ENGINE_ROLES]
        return {env.get("VLLM_RPC_BASE_PATH") for env in engines}

    assert place("/run/1", {}) == {"/run/1"}
    assert place("/run/1", {"VLLM_RPC_BASE_PATH": "/chosen"}) == {"/chosen"}
    assert place(f"/run/{'x' * 100}", {}) == {None}


def test_a_role_may_take_its_own_time_to_drain() -> None:
    settings = Settings(
        gateway=GatewaySettings(drain_timeout_s=1),
        prefill=PrefillSettings(drain_timeout_s=2),
        decode=DecodeSettings(drain_timeout_s=3),
        derender=DerenderSettings(drain_timeout_s=4),
        batch=BatchSettings(drain_timeout_s=5),
    )
    times = {worker.role: worker.drain_timeout_s for worker in workers(settings)}
    assert times == {
        **{"gateway": 1, "render": 30, "prefill": 2, "decode": 3},
        **{"derender": 4, "batch": 5},
    }
