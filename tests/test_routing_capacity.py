"""apply_capacity: the slots a loop would keep, drops counted, bad arguments."""

from __future__ import annotations

import pytest
import torch

from moeffn import RouterConfig, Routing, apply_capacity, route


def loop_capacity(routing: Routing, E: int, capacity: int, policy: str) -> tuple[list[int], int]:
    ids, w = routing.experts.flatten().tolist(), routing.weights.flatten().tolist()
    out, dropped = list(ids), 0
    for e in range(E):
        slots = [s for s, i in enumerate(ids) if i == e]
        ranked = sorted(slots, key=lambda s: -w[s]) if policy == "weight" else slots
        for s in ranked[capacity:]:
            out[s], dropped = -1, dropped + 1
    return out, dropped


@pytest.mark.parametrize("policy", ["weight", "order"])
@pytest.mark.parametrize("capacity", [0, 1, 3, 100])  # all dropped, one, some, none
def test_capacity_drops_and_counts(policy: str, capacity: int) -> None:
    logits = torch.randn(25, 6).round()  # ties in the weights
    logits[:, 0] += 2.0
    mask = torch.rand(25) < 0.8
    full = route(logits.requires_grad_(), RouterConfig(num_experts=6, top_k=2), token_mask=mask)
    kept, dropped = apply_capacity(full, 6, capacity, policy=policy)  # type: ignore[arg-type]
    want, count = loop_capacity(full, 6, capacity, policy)
    assert kept.experts.flatten().tolist() == want and int(dropped) == count
    gone = kept.experts != full.experts
    assert bool((kept.weights[gone] == 0).all()) and torch.equal(kept.weights[~gone], full.weights[~gone])
    assert int(kept.experts.flatten().clamp(min=-1).add(1).bincount(minlength=7)[1:].max()) <= capacity
    kept.weights.sum().backward()
    assert bool(logits.grad.isfinite().all())


def test_bad_capacity_arguments() -> None:
    logits = torch.randn(5, 8)
    r = route(logits, RouterConfig(num_experts=8, top_k=2))
    with pytest.raises(ValueError, match="capacity: expected at least 0"):
        apply_capacity(r, 8, -1)
    with pytest.raises(ValueError, match="policy: expected one of 'weight', 'order'"):
        apply_capacity(r, 8, 1, policy="random")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="routing: expected Routing"):
        apply_capacity(logits, 8, 1)  # type: ignore[arg-type]
