"""Which backend serves a call: the one in whose memory the arrays lie. It imports none before its turn."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvkernels.arguments import AttentionCall, WriteCall
from kvkernels.cuda.arrays import is_on_device


class Backend(Protocol):
    """What serves the public calls, whose arguments it checks before it writes anything.

    Each function does what the public one of its name says.
    """

    def paged_attention(self, call: AttentionCall) -> Any:
        """Attend."""

    def write_kv(self, call: WriteCall) -> None:
        """Write new tokens."""

    def gather_kv(
        self,
        k_cache: Any,
        v_cache: Any,
        block_table: Any,
        seq_lens: Any,
        *,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        kv_dtype: str | None = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Read tokens."""

    def copy_blocks(self, caches: Sequence[Any], copies: Iterable[Any], stream: Any = None) -> None:
        """Copy blocks within a pool."""

    def swap_blocks(
        self,
        sources: Sequence[Any],
        destinations: Sequence[Any],
        copies: Iterable[Any],
        *,
        stream: Any = None,
    ) -> None:
        """Copy blocks to another pool."""

    def merge_states(
        self,
        outs: Sequence[Any],
        lses: Sequence[Any],
        *,
        sinks: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Merge results."""


def backend_of(*arrays: Any) -> Backend:
    """Return the backend of arrays: CUDA's if one of them lies in the memory of a GPU."""
    if any(map(is_on_device, arrays)):
        from kvkernels.cuda import calls as cuda  # noqa: PLC0415  # most callers have no GPU

        return cuda
    from kvkernels.cpu import calls as cpu  # noqa: PLC0415  # importing Numba is slow

    return cpu
