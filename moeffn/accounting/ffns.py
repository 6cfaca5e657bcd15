"""The weights of FFNs: dense and mixture-of-experts. d is the model width."""

from __future__ import annotations

from .weights import Weight, matrix


def dense(d: int, width: int, *, gated: bool = True, bias: bool = False, part: str = "dense", copies: int = 1,
          used: int | None = None, idle: int = 0) -> list[Weight]:
    """Two matrices, or three when gated, with their biases; `copies` of them with `used` at work are experts."""
    if width == 0:
        return []
    inward = matrix(part, width, d, bias, copies, used, idle)
    return inward * (2 if gated else 1) + matrix(part, d, width, bias, copies, used, idle)


def moe(d: int, width: int, experts: int, top_k: int, *, gated: bool = True, bias: bool = False, shared: int = 0,
        shared_bias: bool = False, shared_gate: bool = False, router_bias: bool = False, selection: str = "",
        idle: int = 0, latent: int = 0, where: str = "config.num_experts_per_tok") -> list[Weight]:
    """A mixture of `experts` experts of `width`, `top_k` a token, beside shared experts of `shared` width in all.

    selection: "" none, "buffer" or "parameter": the bias of an auxiliary-loss-free router, one value an expert.
    idle: experts that compute nothing; the router scores them too. latent: experts work on `latent` channels, with
    one projection down and one up for all of them, always at work (a part of their own).
    """
    if not 1 <= top_k <= experts + idle:
        raise ValueError(f"{where}: {top_k} experts per token, of {experts + idle}")
    found = matrix("router", experts + idle, d, router_bias)
    if selection:
        found.append(Weight("router", (experts + idle,), "buffer" if selection == "buffer" else "bias"))
    inner = latent or d
    found += dense(inner, width, gated=gated, bias=bias, part="routed", copies=experts, used=top_k, idle=idle)
    if latent:
        found += matrix("latent", latent, d) + matrix("latent", d, latent)
    found += dense(d, shared, gated=gated, bias=bias or shared_bias, part="shared")
    if shared and shared_gate:
        found += matrix("shared_gate", 1, d)
    return found
