"""The setups that are compared: as many engines each, and nobody else's stack in the way."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.bench.compare.setups import Setup, setups
from headrace.shared.settings import Settings, load


def settings(**sections: Any) -> Settings:
    return load(env={}, overrides={"up": {"engine": "fake"}, **sections})


def named(given: Settings, chunks: tuple[int, ...] = (), num_gpus: int = 0) -> dict[str, Setup]:
    return {setup.name: setup for setup in setups(given, chunks, num_gpus)}


def test_each_setup_has_as_many_engines_and_as_many_requests_at_once() -> None:
    given = settings(
        up={"engine": "fake", "prefill": 2, "decode": 1}, decode={"slots": 10, "engine": {"a": 1}}
    )
    found = named(given, (512, 2048))
    assert list(found) == ["coupled", "replicas", "replicas-512", "replicas-2048", "pd"]
    stacks = {name: setup.settings for name, setup in found.items() if setup.settings is not None}
    assert {stack.up.prefill + stack.up.decode for stack in stacks.values()} == {3}
    assert {stack.up.decode * stack.decode.slots for stack in stacks.values()} == {30}
    assert {name: stack.decode.colocated for name, stack in stacks.items()} == {
        "replicas": True,
        "replicas-512": True,
        "replicas-2048": True,
        "pd": False,
    }
    assert stacks["replicas"].decode.engine == {"a": 1}
    assert stacks["replicas-512"].decode.engine == {"a": 1, "max_num_batched_tokens": 512}
    assert [name for name, setup in found.items() if setup.is_tuned] == [
        "replicas-512",
        "replicas-2048",
    ]


def test_no_setup_meets_a_stack_of_the_users() -> None:
    given = settings(
        up={"engine": "fake", "nats_url": "nats://mine:4222", "store_dir": "/mine"},
        gateway={"host": "0.0.0.0", "port": 8000, "api_keys": "secret"},
        metrics={"port": 9100},
    )
    for setup in named(given, (512,)).values():
        if setup.settings is not None:
            up, gateway = setup.settings.up, setup.settings.gateway
            assert (up.nats_url, up.store_dir, up.batch) == ("", "", 0)
            assert (gateway.host, gateway.port, gateway.api_keys) == ("127.0.0.1", 0, "")
            assert setup.settings.metrics.port == 0


@pytest.mark.parametrize(
    ("engine", "size", "num_gpus", "why"),
    [
        ("fake", 1, 8, "the fake engine"),
        ("vllm", 1, 0, "2 GPUs, and 0"),
        ("vllm", 2, 3, "4 GPUs, and 3"),
        ("vllm", 2, 4, ""),
    ],
)
def test_vllms_own_server_is_measured_only_where_its_engines_have_gpus(
    engine: str, size: int, num_gpus: int, why: str
) -> None:
    arguments = {"tensor_parallel_size": size}
    given = settings(up={"engine": engine}, model={"name": "/m"}, decode={"engine": arguments})
    cannot = named(given, num_gpus=num_gpus)["coupled"].cannot
    assert why in cannot
    assert bool(why) is bool(cannot)


def test_vllms_own_server_gets_the_same_model_and_arguments() -> None:
    engine = {"max_num_seqs": 64, "enable_prefix_caching": False, "enforce_eager": True}
    engine["compilation_config"] = {"mode": 0}
    given = settings(
        up={"engine": "vllm"},
        model={"name": "/m", "max_model_len": 4096, "served_name": "m"},
        decode={"engine": engine},
    )
    command = " ".join(named(given, num_gpus=2)["coupled"].command)
    assert "vllm.entrypoints.cli.main serve /m --served-model-name m" in command
    for flags in (
        *("--max-model-len 4096", "--block-size 128", "--max-num-seqs 64", "--enforce-eager"),
        *("--no-enable-prefix-caching", '--compilation-config {"mode":0}'),
        *("--data-parallel-size 2", "--port"),
    ):
        assert flags in command
    assert "revision" not in command
    assert "trust-remote-code" not in command
