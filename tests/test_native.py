"""Backend "native": the C++ kernels against the float64 oracle, on every instruction set that this machine runs."""

import pytest
import torch

from moeffn import reference
from moeffn.backends import get
from moeffn.config import SWIGLU
from moeffn.types import ExpertWeights, Routing

native = pytest.importorskip("moeffn._native")


@pytest.fixture(params=native.isas())
def isa(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa("")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_meets_the_error_budget(isa, dtype):
    torch.manual_seed(0)
    T, K, E, D, F = 33, 2, 5, 72, 40
    ew = ExpertWeights((torch.randn(E, 2 * F, D) / D**0.5).to(dtype), (torch.randn(E, D, F) / F**0.5).to(dtype),
                       activation=SWIGLU)
    x, ids, w = torch.randn(T, D).to(dtype), torch.randint(-1, E, (T, K), dtype=torch.int32), torch.rand(T, K)
    exact = reference.moe_ffn(x.double(), Routing(ids, w.double()),
                              ExpertWeights(ew.w_in.double(), ew.w_out.double(), activation=SWIGLU))
    errors = {}
    for name in ("native", "torch"):
        y = get(name).forward(x, get(name).plan(ids, E), w, ew, apply_to="output", save=False)[0].double()
        errors[name] = (y - exact).norm() / exact.norm()
    assert errors["native"] <= 2 * errors["torch"]
