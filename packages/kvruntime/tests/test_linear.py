"""Packed products are used where they keep rows apart, and nowhere else."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name torch users know it by

from kvruntime.models.linear import Linear, row_multiple


def linear(num_out: int = 24, num_in: int = 16, *, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(num_out)
    weight = torch.randn(num_out, num_in, generator=generator)
    return Linear(weight, torch.randn(num_out, generator=generator) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_torch(bias: bool) -> None:  # noqa: FBT001 -- a parameter of pytest
    one = linear(bias=bias)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    expected = F.linear(x.double(), one._weight.double(), None)
    if one._bias is not None:
        expected += one._bias
    torch.testing.assert_close(one(x).double(), expected, rtol=0, atol=1e-5)


def test_one_product_that_mixes_rows_unpacks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [linear(24), linear(32)]
    mixing = both[1].shape
    is_invariant = Linear.is_invariant
    monkeypatch.setattr(
        Linear, "is_invariant", lambda self: self.shape != mixing and is_invariant(self)
    )
    assert row_multiple(both) == 8
    assert all(one._packed is None for one in both)


def test_what_is_not_packed_is_not_relied_on() -> None:
    one = linear()
    one.unpack()
    assert not one.is_invariant()
    assert row_multiple([one]) == 8
