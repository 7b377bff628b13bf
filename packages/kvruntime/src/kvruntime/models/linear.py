"""Matrix products whose rows do not depend on how many there are.

A BLAS picks its kernel by the number of rows, and another kernel rounds otherwise. oneDNN on weights
that were packed once uses one kernel from two rows on, and is faster at small batches; it is reached
by the private operators that torch's own compiler uses, so that it is tried on this machine before
it is relied on. Without it, rows come out the same from four rows on (eight on two threads).

Knows weights and rows. Does not know models.
"""

from collections.abc import Iterable

import torch
from torch.nn import functional as F  # noqa: N812 - the name torch users know it by

__all__ = ["Linear", "row_multiple"]

_PACKED_ROWS, _PLAIN_ROWS = 2, 8
_TRIED_ROWS = 192


class Linear:
    """x @ weight.T + bias for rows x, float32 [T, in]; weight [out, in], bias [out] or None.

    Packing makes a second copy of the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = weight.shape
        self._weight, self._bias = weight, bias
        self._packed = _pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, out]."""
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 -- see above
            x, self._packed, self._bias, "none", [], ""
        )
        return product

    def unpack(self) -> None:
        """Use the weight as it is from now on."""
        self._packed = None

    @torch.inference_mode()
    def is_invariant(self) -> bool:
        """Whether it is packed, and any even number of rows gave the same bits in a trial."""
        if self._packed is None:
            return False
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_TRIED_ROWS, self.shape[1], generator=generator)
        whole = self(x)
        counts = (2, 4, 6, 8, 10, 12, 14, 16, 18, 24, 32, 34, 64, 66, 128)
        return all(
            torch.equal(self(x[-count:]), whole[-count:])
            and torch.equal(self(x[:count]), whole[:count])
            for count in counts
        )


def row_multiple(linears: Iterable[Linear]) -> int:
    """The multiple of rows at which all of these are invariant; if need be, unpacks all of them.

    One of each shape is tried, on the threads that torch uses now.
    """
    listed = list(linears)
    by_shape = {linear.shape: linear for linear in listed}
    if all(linear.is_invariant() for linear in by_shape.values()):
        return _PACKED_ROWS
    for linear in listed:
        linear.unpack()
    return _PLAIN_ROWS


@torch.inference_mode()
def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if weight.device.type != "cpu":
        return None
    # The number of rows is a hint; a hint of one would choose another kernel.
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 32)  # noqa: SLF001
    except (AttributeError, NotImplementedError, RuntimeError):  # a torch or a CPU without it
        return None
    return packed
