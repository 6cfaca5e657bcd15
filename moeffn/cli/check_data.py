"""What `moeffn check` works with: the target, random problems, their results, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """Where and what is checked: a torch device, a resolved backend name, and the seed."""

    device: Any
    backend: str
    seed: int

    @property
    def dtypes(self) -> list[Any]:
        import torch

        from .. import backends

        every = (torch.bfloat16, torch.float16, torch.float32)
        return [d for d in every if backends.available(self.backend, self.device, d) is None]


def problem(target: Target, T: int, D: int, F: int, E: int, K: int, dtype: Any, seed: int = 0,
             bias: bool = False) -> tuple[dict[str, Any], Any]:
    """Unit-variance leaves (x, weights, w_in, w_out[, b_in, b_out]) on the device, and ids (T, K) with some -1."""
    import torch

    g = torch.Generator().manual_seed(target.seed * 1000 + seed)

    def randn(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(*shape, generator=g) * scale).to(target.device, dtype).requires_grad_()

    leaves = {"x": randn(T, D), "w_in": randn(E, 2 * F, D, scale=D**-0.5), "w_out": randn(E, D, F, scale=F**-0.5)}
    if bias:
        leaves |= {"b_in": randn(E, 2 * F), "b_out": randn(E, D)}
    leaves["weights"] = torch.rand(T, K, generator=g).to(target.device).requires_grad_()
    skew = torch.rand(E, generator=g) * 2  # some experts are popular, some idle
    ids = (torch.rand(T, E, generator=g) + skew).topk(K, -1).indices.to(torch.int32)
    ids = torch.where(torch.rand(T, K, generator=g) < 0.05, -1, ids).to(torch.int32)
    return leaves, ids.to(target.device)


def upstream(shape: tuple[int, ...]) -> Any:
    """The upstream gradient of every check."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def run(leaves: dict[str, Any], ids: Any, backend: str, dtype: Any = None, grads: bool = True) -> dict[str, Any]:
    """y and, with `grads`, every gradient, for an upstream gradient that depends on the shape alone."""
    import torch

    from .. import ExpertWeights, Routing, moe_ffn

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = {n: t.detach().to(t.dtype if dtype is None else wide if n == "weights" else dtype).requires_grad_(grads)
           for n, t in leaves.items()}
    ew = ExpertWeights(own["w_in"], own["w_out"], own.get("b_in"), own.get("b_out"))
    y = moe_ffn(own["x"], Routing(ids, own["weights"]), ew, backend=backend)
    if not grads:
        return {"y": y}
    y.backward(upstream(tuple(y.shape)).to(y))
    return {"y": y.detach(), **{n: t.grad for n, t in own.items()}}


def errors(got: Any, truth: Any) -> tuple[float, float]:
    got, truth = (t.double().reshape(-1, t.shape[-1]) for t in (got, truth))
    assert bool(got.isfinite().all()), "not finite"
    norm = float(truth.norm())
    if norm == 0:
        return (float(got.norm()),) * 2
    rows = float((got - truth).norm(dim=1).max()) * truth.shape[0] ** 0.5
    return float((got - truth).norm()) / norm, rows / norm
