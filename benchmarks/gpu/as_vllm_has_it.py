"""headrace's connector without what it does for the speed of a pull: what `gap.py` compares it with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.nixl_connector import HeadraceNixlConnector

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PlainConnector(HeadraceNixlConnector):
    """Leaves vLLM's block pool as it is, and does not ask the worker what has come."""

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Leave it."""

    def arrived(self) -> set[str]:
        """Return nothing: the worker tells it with its steps."""
        return set()
