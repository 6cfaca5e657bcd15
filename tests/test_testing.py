"""check_router fails on a router broken in just one way, and passes on a good one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from problems import failed
from torch import Tensor, nn
from torch.nn.functional import linear

from moeffn import Router, RouterConfig, Routing, reference, route
from moeffn.testing import (
    check_layer,
    check_router,
)

EIGHT = RouterConfig(num_experts=8, top_k=3)
Answer = tuple[Tensor, Tensor]


def good(z: Tensor) -> Answer:
    r = route(z, EIGHT)
    return r.experts, r.weights


# ---- routers: each is broken in one way ----------------------------------------------------------------------------


def same_expert_thrice(z: Tensor) -> Answer:
    ids, w = good(z)
    return ids[:, :1].expand(-1, 3), w


def ids_from_one(z: Tensor) -> Answer:
    ids, w = good(z)
    return ids + 1, w


def raw_logits_as_weights(z: Tensor) -> Answer:
    ids, _ = good(z)
    return ids, z.gather(1, ids.long())


def renormalised(z: Tensor) -> Answer:
    ids, w = good(z)
    return ids, w / w.sum(1, keepdim=True)


def bfloat16_choice(z: Tensor) -> Answer:
    ids = torch.sort(z.to(torch.bfloat16), stable=True, descending=True).indices[:, :3]
    return ids, torch.softmax(z, -1).gather(1, ids)


def ties_to_the_highest(z: Tensor) -> Answer:
    r = route(z.flip(1), EIGHT)
    return 7 - r.experts, r.weights


def nan_spreads(z: Tensor) -> Answer:
    ids, w = good(z)
    return ids, w + 0.0 * z.sum()


def nan_gives_expert_zero(z: Tensor) -> Answer:
    ids, w = good(z)
    return torch.where(z.isnan().any(1, keepdim=True), 0, ids), w


def positional(z: Tensor) -> Answer:
    return good(z + torch.sin(torch.arange(z.numel()).view_as(z)))


def softmax_over_tokens(z: Tensor) -> Answer:
    return good(torch.softmax(z, 0) * 20)


def noisy(z: Tensor) -> Answer:
    return good(z + 0.1 * torch.randn_like(z))


def gradient_twice(z: Tensor) -> Answer:
    ids, w = good(z)
    return ids, 2 * w - w.detach()


def detached(z: Tensor) -> Answer:
    ids, w = good(z)
    return ids, w.detach()


def needs_a_token(z: Tensor) -> Answer:
    z.max(0)
    return good(z)


BROKEN_ROUTERS: dict[str, tuple[Callable[[Tensor], Answer], str]] = {
    "valid": (same_expert_thrice, "token 0: expected 3 distinct ids in 0..7"),
    "valid ids": (ids_from_one, "expected 3 distinct ids in 0..7"),
    "valid weights": (raw_logits_as_weights, "expected finite weights of at least 0"),
    "oracle": (renormalised, "token 0: expected ids"),
    "float32 selection": (bfloat16_choice, "the largest float32 logit"),
    "ties": (ties_to_the_highest, r"expected the lowest ids \[0, 1, 2\] for equal logits .*got \[[567, ]+\]"),
    "bad rows": (nan_spreads, "row 2 of 5 all NaN: token 0: expected finite weights"),
    "bad rows ids": (nan_gives_expert_zero, r"row 2 of 5 all NaN: token 2: expected 3 distinct ids.*got \[0, 0, 0\]"),
    "token order": (positional, "when tokens change places"),
    "one token": (softmax_over_tokens, "token 0: expected no change when only token 17 changes"),
    "determinism": (noisy, "of the first run"),
    "gradient": (gradient_twice, "along a random direction of the input"),
    "router gradient": (detached, "weights that depend on the input .*got no gradient"),
    "empty batch": (needs_a_token, "raised IndexError"),
}


@pytest.mark.parametrize("case", BROKEN_ROUTERS)
def test_broken_router_is_found(case: str) -> None:
    router, message = BROKEN_ROUTERS[case]
    name = case.removesuffix(" ids").removesuffix(" weights")
    config = EIGHT if name == "oracle" else None
    text = failed(lambda: check_router(router, num_experts=8, top_k=3, config=config))
    line = next(x for x in text.splitlines() if x.startswith(f"FAILED   {name}:"))
    assert re.search(message, line), line


def test_good_routers_pass() -> None:
    report = check_router(good, num_experts=8, top_k=3)
    assert report.skipped == {"oracle": "no RouterConfig given"} and len(report.passed) == 10
    everything = check_router(functools.partial(route, config=EIGHT), config=EIGHT)
    assert not everything.skipped and len(everything.passed) == 11
    assert not check_router(Router(16, RouterConfig(num_experts=8, top_k=2, score="sigmoid", renormalize=True))).skipped


@pytest.mark.parametrize("function", [route, reference.route])
def test_route_itself_is_a_router_to_check(function: Callable[..., Routing]) -> None:
    report = check_router(function, num_experts=8, top_k=2)
    assert not report.skipped and len(report.passed) == 11
    sigmoid = RouterConfig(num_experts=6, top_k=2, score="sigmoid", renormalize=True, scale=2.0)
    assert not check_router(function, config=sigmoid).skipped

    def off(logits: Tensor, config: RouterConfig) -> Routing:
        return route(logits, RouterConfig(num_experts=8, top_k=2, renormalize=True))

    assert "FAILED   oracle" in failed(lambda: check_router(off, num_experts=8, top_k=2))


def test_softmax_and_topk_with_what_they_lack_skipped() -> None:
    def router(logits: Tensor) -> Answer:
        top = logits.softmax(-1).topk(2)
        return top.indices, top.values

    report = check_router(router, num_experts=8, top_k=2, skip={"ties", "bad rows"})
    assert report.skipped.keys() == {"oracle", "ties", "bad rows"} and "skipped  ties: asked for" in str(report)


class Quiet(nn.Module):
    """A router that keeps its logits to itself; `offset` is added to the logits of expert e, e times."""

    def __init__(self, lowest: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
        self.bias = nn.Parameter(torch.linspace(0, 0.5, 8))
        self.lowest, self.offset = lowest, offset

    def forward(self, x: Tensor) -> Answer:
        wide = torch.promote_types(x.dtype, torch.float32)
        z = linear(x.to(wide), self.weight.to(wide), self.bias.to(wide)) + self.offset * torch.arange(8)
        r = route(z if self.lowest else z.flip(1), EIGHT)
        return r.experts if self.lowest else 7 - r.experts, r.weights


def test_ties_of_a_module_that_returns_no_logits() -> None:
    assert "ties" in check_router(Quiet(), num_experts=8, top_k=3).passed
    text = failed(lambda: check_router(Quiet(lowest=False), num_experts=8, top_k=3))
    assert "FAILED   ties: token 0: expected the lowest ids [0, 1, 2]" in text and text.count("FAILED") == 1
    report = check_router(Quiet(offset=0.1), num_experts=8, top_k=3)
    assert "skipped  ties: the router returns no logits, and parameters of zero" in str(report)
    quiet = Quiet()
    report = check_router(lambda x: quiet(x), num_experts=8, top_k=3, takes="tokens", width=16)
    assert "skipped  ties: the router returns no logits, and a function has no parameters" in str(report)


def test_a_router_or_layer_that_cannot_be_called_is_told_once() -> None:
    text = failed(lambda: check_router(lambda a, b: a, num_experts=8, top_k=3))
    assert "none of 11 properties was reached: raised TypeError" in text and text.count("missing 1 required") == 1
    text = failed(lambda: check_router(nn.Linear(16, 8), num_experts=8, top_k=3))
    assert text.count("expected a Routing, or a tuple") == 1
    text = failed(lambda: check_layer(nn.Linear(16, 8), d_model=4))
    assert "router" not in text and "none of 11 properties was reached: raised RuntimeError" in text


class HalfPrecisionRouter(nn.Module):
    """Logits in the dtype of the model, as many routers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(x, self.weight)
        weights, ids = torch.softmax(logits, -1).topk(4, -1)
        return logits, weights, ids


HINT = "\nhint: compute logits in float32 whatever the model is in"


def test_a_router_in_16_bits_is_told_what_to_do() -> None:
    matrix = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()

    def rounds(x: Tensor) -> Answer:
        top = torch.softmax(x.bfloat16() @ matrix.t(), -1).topk(3)
        return top.indices, top.values

    text = failed(lambda: check_router(rounds, num_experts=8, top_k=3, takes="tokens", width=16))
    assert "FAILED   gradient" in text and text.endswith(HINT)
    text = failed(lambda: check_router(lambda x: x @ matrix.t(), num_experts=8, top_k=3, takes="tokens", width=16))
    assert "no answer to plain input" in text and text.endswith(HINT)
    assert "hint" not in failed(lambda: check_router(renormalised, config=EIGHT))


def test_a_users_module_with_bfloat16_logits_is_found() -> None:
    # vllm-project/vllm#14027: finite, plausible, and other experts
    router = HalfPrecisionRouter().train()
    text = failed(lambda: check_router(router, num_experts=32, top_k=4))
    assert "FAILED   float32 selection" in text and "tokens differ" in text and text.endswith(HINT)
    assert "passed   token order" in text and "passed   gradient" in text  # the rest of it is right
    assert router.training  # left as it came


@pytest.mark.filterwarnings("ignore:RouterConfig with top_k=1")
def test_top1_renormalised_router_is_found() -> None:
    # NVIDIA/Megatron-LM#894
    one = RouterConfig(num_experts=8, top_k=1, renormalize=True)
    text = failed(lambda: check_router(functools.partial(route, config=one), config=one))
    assert text.count("FAILED") == 1 and "FAILED   router gradient" in text and "with top_k = 1" in text
    report = check_router(functools.partial(route, config=one), config=one, skip=["router gradient"])
    assert report.skipped == {"router gradient": "asked for"}


def test_strict_routers_may_refuse_nan() -> None:
    def strict(z: Tensor) -> Answer:
        if not bool(z.isfinite().all()):
            raise ValueError("router logits are not finite")
        return good(z)

    assert "not finite" in check_router(strict, num_experts=8, top_k=3).skipped["bad rows"]


def test_check_router_arguments() -> None:
    with pytest.raises(TypeError, match="num_experts: expected an int, as the router has no RouterConfig"):
        check_router(good)
    with pytest.raises(TypeError, match="top_k: expected an int, as the router has no RouterConfig"):
        check_router(good, num_experts=8)
    with pytest.raises(TypeError, match="width: expected an int, as the router shows no matrix"):
        check_router(good, num_experts=8, top_k=3, takes="tokens")
    with pytest.raises(TypeError, match=r"router: expected a function or an nn.Module, got int 3"):
        check_router(3)
    with pytest.raises(ValueError, match="skip: expected one of 'valid'"):
        check_router(good, num_experts=8, top_k=3, skip=["validity"])
    for skip, got in ((5, "int 5"), ("ties", "str 'ties'")):
        with pytest.raises(TypeError, match=f"skip: expected a collection of names of properties, got {got}"):
            check_router(good, num_experts=8, top_k=3, skip=skip)
    with pytest.raises(ValueError, match="takes: expected one of"):
        check_router(good, num_experts=8, top_k=3, takes="words")  # type: ignore[arg-type]
    assert "a tuple with integer ids" in failed(lambda: check_router(lambda z: z, num_experts=8, top_k=3))


def test_a_function_of_tokens_is_not_blamed_for_what_it_cannot_show() -> None:
    matrix = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    report = check_router(lambda x: good(x @ matrix.t()), num_experts=8, top_k=3, takes="tokens", width=16)
    assert "no copy in bfloat16" in report.skipped["float32 selection"]
    assert "takes no float64" in report.skipped["gradient"]


def test_the_callers_grad_mode_is_not_the_routers_fault() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert "router gradient" in check_router(route, num_experts=8, top_k=2).passed


def test_a_router_of_one_expert_may_have_a_constant_weight() -> None:
    assert "router gradient" in check_router(route, num_experts=1, top_k=1).skipped
