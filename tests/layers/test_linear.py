"""Products with one row on the CPU, against fp64 and torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gla.layers.linear import linear

# (O, I): below, inside and above the sizes at which an eager step stores the products.
SIZES = [(40, 33), (512, 256), (4096, 33), (2100, 2100)]


@pytest.mark.parametrize(("out", "size"), SIZES)
def test_one_row_in_fp32(out: int, size: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(out, size), torch.randn(out)
    for shape in ((size,), (1, size), (1, 1, size)):
        x = torch.randn(shape)
        want = x.double() @ weight.double().T + bias
        with torch.no_grad():
            got = linear(x, weight, bias)
        assert got.shape == want.shape
        assert float((got - want).abs().max()) <= 2e-6 * size**0.5 * float(want.abs().max())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("out", "size"), SIZES[:2])
def test_autocast_holds_for_one_row_too(out: int, size: int, compiled: bool) -> None:
    torch.manual_seed(0)
    run = torch.compile(linear, backend="eager", fullgraph=True) if compiled else linear
    x, weight = torch.randn(1, 1, size), torch.randn(out, size)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = run(x, weight), F.linear(x, weight)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("x", "weight"),
    [(torch.ones(1, 1, 1), torch.ones(512, 256)), (torch.ones(1, 256), torch.ones(40000, 1))],
)
def test_sizes_that_do_not_fit_are_an_error(x: Tensor, weight: Tensor) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2"):
        linear(x, weight)
