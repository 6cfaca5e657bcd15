"""upcycle: turn dense FFNs into mixtures that start as the same function.

Granularity 1 ("sparse upcycling", Komatsuzaki et al. 2023): every expert is a copy of the dense FFN and the k weights
sum to 1, so the mixture returns what the dense FFN returns, whatever the router picks. Finer experts use virtual groups
(He et al. 2024): the hidden width is cut into `granularity` slices, a group of experts holds one copy of each, and
the experts of a group share their router row, so that whole groups are picked; weights are scaled by the granularity,
which makes the slices of a group sum to the dense output.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import checks
from .accounting.live import read_module
from .config import Activation, Layout, MoEConfig, RouterConfig
from .layer import DenseFFN, MoEFFN
from .listing import listed


@dataclass(frozen=True)
class UpcycledLayer:
    """One FFN before and after, in weights: `dense` is total and active at once, `total` and `active` are the mixture's
    (router included in both)."""

    name: str
    dense: int
    total: int
    active: int


@dataclass(frozen=True)
class UpcycleReport:
    """What `upcycle` did. `module` is the MoEFFN, or the model, changed in place. print() shows it, equal
    layers on one line.

    total_before, total_after: weights of the whole module, a tied weight counted once. idle: those outside the upcycled
    FFNs that one token does not use (experts of mixtures that were there already); None, counted as 0, where experts
    are there of which nothing says how many a token uses.
    """

    module: nn.Module
    layers: tuple[UpcycledLayer, ...]
    total_before: int
    total_after: int
    idle: int | None

    @property
    def active_before(self) -> int:
        return self.total_before - (self.idle or 0)

    @property
    def active_after(self) -> int:
        return self.total_after - (self.idle or 0) - sum(layer.total - layer.active for layer in self.layers)

    def __str__(self) -> str:
        lines = listed((layer.name or "FFN", f"{layer.dense:,} weights -> {layer.total:,} total, "
                        f"{layer.active:,} active") for layer in self.layers)
        lines.append(f"all: total {self.total_before:,} -> {self.total_after:,}, "
                     f"active {self.active_before:,} -> {self.active_after:,}")
        if self.idle is None:
            lines.append("experts that were there already count as active: nothing says how many a token uses")
        return "\n".join(lines)


def upcycle(model_or_ffn: nn.Module, num_experts: int, top_k: int, *, granularity: int = 1, noise: float = 0.0,
            aux_loss_coef: float = 0.0, z_loss_coef: float = 0.0, where: Callable[[str], bool] | None = None
            ) -> UpcycleReport:
    """Replace a dense FFN, or every dense FFN of a model (in place), by a mixture that computes the same function.

    num_experts    copies of the dense FFN; the mixture has E = num_experts * granularity experts
    top_k          copies a token uses; the mixture has K = top_k * granularity experts per token
    granularity    slices of the hidden width F that become experts of their own; must divide F
    noise          standard deviation of normal noise added to the expert matrices, in units of each matrix's root mean
                   square; 0 keeps the function
    aux_loss_coef, z_loss_coef    as in MoEConfig, used in training
    where          for a model: which module names to take (default all)

    The router is initialised at random (torch's global generator). At the start the outputs differ from the dense ones
    by rounding only; with granularity > 1 a token whose k-th and next group have the same logit to the last bit of
    float32 could mix them. With top_k * granularity = 1 the weight is the constant 1: only the auxiliary losses then
    train the router. Dtype, device and requires_grad follow the dense weights. In a model, every `DenseFFN` is
    taken and, where transformers is installed, every dense FFN that `replace_ffn` of the transformers integration would
    replace or has replaced; dropout behind the FFN stays, dropout inside it is left out.

    Raises ValueError/TypeError for impossible numbers, a width that `granularity` does not divide, an FFN with an
    output gate, or a model without a dense FFN; nothing is changed then.
    """
    checks.instance("model_or_ffn", model_or_ffn, nn.Module)
    for name, value in (("num_experts", num_experts), ("top_k", top_k), ("granularity", granularity)):
        checks.positive_int(name, value)
    if top_k > num_experts:
        raise checks.bad("top_k", f"at most num_experts = {num_experts}", top_k)
    checks.non_negative("noise", noise)
    module = model_or_ffn
    found = _sites(module, where)
    for site in found:
        _check(site, granularity)

    layers = []
    before, idle = _size(module), _idle(module)
    for site in found:
        moe = _mixture(site.dense, num_experts, top_k, granularity, noise, aux_loss_coef, z_loss_coef)
        layers.append(UpcycledLayer(site.names[0], site.dense.size, _size(moe), active_weights(moe)))
        placed = nn.Sequential(moe, *site.tail).train(site.dense.training) if site.tail else moe
        for name in site.names:  # a module used under several names stays one module
            if not name:
                module = placed
            else:
                module.set_submodule(name, placed)
        for name in site.emptied:
            module.set_submodule(name, nn.Identity())
    return UpcycleReport(module, tuple(layers), before, _size(module), idle)


def active_weights(moe: MoEFFN) -> int:
    """Weights of a MoEFFN that one token uses: router and shared expert, and K of the E experts."""
    E, K = moe.config.num_experts, moe.config.top_k
    experts = _size(moe.experts)
    return _size(moe) - experts + experts * K // E


def _idle(module: nn.Module) -> int | None:
    """Weights of the experts in `module` that one token does not use; None where nothing says how many it uses."""
    try:
        return sum(w.total - int(w.active("max")) for w in read_module(module).weights())
    except ValueError:
        return None


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class Dense:
    """A dense FFN's tensors, as in DenseFFN."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    activation: Activation
    layout: Layout
    training: bool

    @property
    def size(self) -> int:
        return sum(t.numel() for t in (self.w_in, self.w_out, self.b_in, self.b_out) if t is not None)


@dataclass(frozen=True)
class Site:
    """Where a dense FFN sits: the mixture, then the modules `tail`, go to `names`; `emptied` become identities."""

    names: tuple[str, ...]
    dense: Dense
    tail: tuple[nn.Module, ...] = ()
    emptied: tuple[str, ...] = ()


def _sites(module: nn.Module, where: Callable[[str], bool] | None) -> list[Site]:
    names: dict[nn.Module, list[str]] = {}
    for name, m in module.named_modules(remove_duplicate=False):
        if where is None or where(name):
            names.setdefault(m, []).append(name)
    found = [Site(tuple(names[m]), _dense(m)) for m in names if isinstance(m, DenseFFN)]
    if not isinstance(module, DenseFFN) and importlib.util.find_spec("transformers") is not None:
        from .integrations.dense_sites import dense_sites

        found += dense_sites(module, names)
    if not found:
        raise checks.bad("model_or_ffn", "a dense FFN that moeffn knows, or a model that holds one which `where` takes",
                         type(module).__name__)
    return found


def _dense(ffn: DenseFFN) -> Dense:
    if ffn.gate is not None:
        raise checks.bad("model_or_ffn", "a DenseFFN without an output gate", "output_gate=True")
    return Dense(ffn.w_in, ffn.w_out, ffn.b_in, ffn.b_out, ffn.activation, ffn.layout, ffn.training)


def _check(site: Site, granularity: int) -> None:
    D, F = site.dense.w_out.shape
    label = site.names[0] or "model_or_ffn"
    if F % granularity:
        raise checks.bad("granularity", f"a divisor of the hidden width F = {F} of {label}", granularity)
    if site.dense.w_in.shape[1] != D:
        raise checks.bad(label, "an FFN that keeps the width", f"{site.dense.w_in.shape[1]} -> {D}")


def _mixture(ffn: Dense, copies: int, top: int, G: int, noise: float, aux: float, z: float) -> MoEFFN:
    D, F = ffn.w_out.shape
    E, K = copies * G, top * G
    config = MoEConfig(
        d_model=D, d_expert=F // G, num_experts=E, top_k=K, activation=ffn.activation, layout=ffn.layout,
        router=RouterConfig(num_experts=E, top_k=K, renormalize=True, scale=float(G)),
        bias=ffn.b_in is not None or ffn.b_out is not None, aux_loss_coef=aux, z_loss_coef=z)
    moe = MoEFFN(config, device=ffn.w_out.device, dtype=ffn.w_out.dtype)
    experts = moe.experts
    with torch.no_grad():
        _fill(experts.w_in, slices_of_rows(ffn.w_in, ffn.activation, ffn.layout, G), noise)
        _fill(experts.w_out, ffn.w_out.unflatten(1, (G, F // G)).transpose(0, 1), noise)
        if ffn.b_in is not None and experts.b_in is not None:
            _fill(experts.b_in, slices_of_rows(ffn.b_in, ffn.activation, ffn.layout, G))
        if ffn.b_out is not None and experts.b_out is not None:
            # K slots of weights that sum to G: each slice carries its share of the output bias
            _fill(experts.b_out, (ffn.b_out / G).expand(G, D))
        moe.router.weight.copy_(moe.router.weight[:copies].repeat_interleave(G, 0))
    if ffn.b_in is None:
        experts.b_in = None
    if ffn.b_out is None:
        experts.b_out = None
    for name, p in experts.named_parameters():
        p.requires_grad_(getattr(ffn, name).requires_grad)
    return moe.train(ffn.training)


def slices_of_rows(rows: Tensor, activation: Activation, layout: Layout, G: int) -> Tensor:
    """Rows of an input projection or its bias, (2F | F, …) -> (G, 2F/G | F/G, …): a slice has its gate and its up."""
    if not activation.gated or layout is Layout.INTERLEAVED:
        return rows.unflatten(0, (G, -1))
    return rows.unflatten(0, (2, G, -1)).transpose(0, 1).flatten(1, 2)


def _fill(parameter: Tensor, slices: Tensor, noise: float = 0.0) -> None:
    """Every group of G experts gets the G slices."""
    G = slices.shape[0]
    parameter.unflatten(0, (-1, G)).copy_(slices.expand(parameter.shape[0] // G, *slices.shape))
    if noise:
        rms = slices.float().square().mean().sqrt().item()
        parameter.add_(torch.randn_like(parameter), alpha=noise * rms)
