"""Which GPUs each engine gets: vLLM takes the first it sees, so two engines would share GPU 0."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.shared.errors import SettingsError

VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_TIMEOUT_S = 30


def visible(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the GPUs that this process may give away; none on a CPU box."""
    env = os.environ if env is None else env
    if VARIABLE in env:
        return [gpu.strip() for gpu in env[VARIABLE].split(",") if gpu.strip()]
    try:
        answer = subprocess.run(
            QUERY, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def shared(envs: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the GPUs that more than one of these environments names."""
    uses = Counter(gpu for env in envs for gpu in env.get(VARIABLE, "").split(",") if gpu)
    return sorted(gpu for gpu, num in uses.items() if num > 1)


def assign(gpus: Sequence[str], wanted: Sequence[int]) -> list[list[str]]:
    """Return the GPUs of each engine, given how many each wants; with too few, engines share.

    Raises: SettingsError when one engine alone wants more than there are.
    """
    given: list[list[str]] = []
    first = 0
    for num_gpus in wanted:
        if num_gpus > len(gpus):
            raise SettingsError(
                f"an engine of {num_gpus} GPUs (its tensor_, pipeline_ and data_parallel_size) "
                f"does not fit: {len(gpus)} are visible"
            )
        if first + num_gpus > len(gpus):
            first = 0
        given.append(list(gpus[first : first + num_gpus]))
        first += num_gpus
    return given
