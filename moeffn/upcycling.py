"""upcycle: turn dense FFNs into mixtures that start as the same function.

Granularity 1 ("sparse upcycling", Komatsuzaki et al. 2023): every expert is a copy of the dense FFN and the k weights sum
to 1, so the mixture returns what the dense FFN returns, whatever the router picks. Finer experts use virtual groups (He et
al. 2024): the hidden width is cut into `granularity` slices, a group of experts holds one copy of each slice, and the
experts of a group share their router row, so that whole groups are picked; weights are scaled by the granularity, which
makes the slices of a group sum to the dense output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import checks
from .config import Activation, Layout, MoEConfig, RouterConfig
from .layer import DenseFFN, MoEFFN


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
    """What `upcycle` did. `module` is the MoEFFN, or the model, changed in place. print() shows a line per layer.

    other: weights of the model outside the upcycled FFNs (0 for one FFN), each counted once and always active.
    """

    module: nn.Module
    layers: tuple[UpcycledLayer, ...]
    other: int

    @property
    def total_before(self) -> int:
        return self.other + sum(layer.dense for layer in self.layers)

    @property
    def active_before(self) -> int:
        return self.total_before

    @property
    def total_after(self) -> int:
        return self.other + sum(layer.total for layer in self.layers)

    @property
    def active_after(self) -> int:
        return self.other + sum(layer.active for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"{layer.name or 'FFN'}: {layer.dense:,} weights -> {layer.total:,} total, {layer.active:,} active"
                 for layer in self.layers]
        lines.append(f"all: total {self.total_before:,} -> {self.total_after:,}, "
                     f"active {self.active_before:,} -> {self.active_after:,}")
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

    The router is initialised at random (torch's global generator). At the start the outputs differ from the dense ones by
    rounding only; with granularity > 1 a token whose k-th and next group have the same logit to the last bit of float32
    could mix them. With top_k * granularity = 1 the weight is the constant 1: only the auxiliary losses then train the
    router. Dtype, device and requires_grad follow the dense weights. A transformers model is first given to
    `moeffn.integrations.transformers.replace_ffn` (extra "hf"), which says what it leaves alone.

    Raises ValueError/TypeError for impossible numbers, a width that `granularity` does not divide, an FFN with an output
    gate, or a model without a dense FFN; nothing is changed then.
    """
    checks.instance("model_or_ffn", model_or_ffn, nn.Module)
    for name, value in (("num_experts", num_experts), ("top_k", top_k), ("granularity", granularity)):
        checks.positive_int(name, value)
    if top_k > num_experts:
        raise checks.bad("top_k", f"at most num_experts = {num_experts}", top_k)
    if noise < 0:
        raise checks.bad("noise", "at least 0", noise)
    found = _dense_ffns(model_or_ffn, where)
    for name, ffn in found.items():
        _check(name, ffn, granularity)

    layers = []
    module = model_or_ffn
    before = _size(module)
    made: dict[DenseFFN, MoEFFN] = {}
    for name, ffn in found.items():
        if ffn not in made:  # a module used under two names stays one module
            moe = made[ffn] = _mixture(ffn, num_experts, top_k, granularity, noise, aux_loss_coef, z_loss_coef)
            layers.append(UpcycledLayer(name, _size(ffn), _size(moe), active_weights(moe)))
        if name:
            module.set_submodule(name, made[ffn])
        else:
            module = made[ffn]
    return UpcycleReport(module, tuple(layers), before - sum(layer.dense for layer in layers))


def active_weights(moe: MoEFFN) -> int:
    """Weights of a MoEFFN that one token uses: router and shared expert, and K of the E experts."""
    E, K = moe.config.num_experts, moe.config.top_k
    experts = _size(moe.experts)
    return _size(moe) - experts + experts * K // E


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _dense_ffns(module: nn.Module, where: Callable[[str], bool] | None) -> dict[str, DenseFFN]:
    if isinstance(module, DenseFFN):
        return {"": module}
    if type(module).__module__.startswith("transformers."):
        from .integrations.transformers import replace_ffn

        replace_ffn(module)
    found = {name: m for name, m in module.named_modules(remove_duplicate=False)
             if isinstance(m, DenseFFN) and (where is None or where(name))}
    if not found:
        raise checks.bad("model_or_ffn", "a DenseFFN, or a model that holds one which `where` takes",
                         type(module).__name__)
    return found


def _check(name: str, ffn: DenseFFN, granularity: int) -> None:
    label = name or "model_or_ffn"
    D, F = ffn.w_out.shape
    if F % granularity:
        raise checks.bad("granularity", f"a divisor of the hidden width F = {F} of {label}", granularity)
    if ffn.gate is not None:
        raise checks.bad(label, "a DenseFFN without an output gate", "output_gate=True")
    if ffn.w_in.shape[1] != D:
        raise checks.bad(label, "an FFN that keeps the width", f"{ffn.w_in.shape[1]} -> {D}")


def _mixture(ffn: DenseFFN, copies: int, top: int, G: int, noise: float, aux: float, z: float) -> MoEFFN:
    D, F = ffn.w_out.shape
    E, K = copies * G, top * G
    like = {"device": ffn.w_out.device, "dtype": ffn.w_out.dtype}
    config = MoEConfig(
        d_model=D, d_expert=F // G, num_experts=E, top_k=K, activation=ffn.activation, layout=ffn.layout,
        router=RouterConfig(num_experts=E, top_k=K, renormalize=True, scale=float(G)),
        bias=ffn.b_in is not None or ffn.b_out is not None, aux_loss_coef=aux, z_loss_coef=z)
    moe = MoEFFN(config, **like)
    experts = moe.experts
    with torch.no_grad():
        _fill(experts.w_in, slices_of_rows(ffn.w_in, ffn.activation, ffn.layout, G), noise)
        _fill(experts.w_out, ffn.w_out.view(D, G, F // G).transpose(0, 1), noise)
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
    """Rows of an input projection or its bias, (2F | F, …) -> (G, 2F/G | F/G, …): slice g keeps gate and up together."""
    if not activation.gated:
        return rows.view(G, -1, *rows.shape[1:])
    F = rows.shape[0] // 2
    if layout is Layout.INTERLEAVED:
        return rows.view(G, -1, *rows.shape[1:])
    cut = rows.view(2, G, F // G, *rows.shape[1:]).transpose(0, 1)
    return cut.reshape(G, 2 * (F // G), *rows.shape[1:])


def _fill(parameter: Tensor, slices: Tensor, noise: float = 0.0) -> None:
    """Every group of G experts gets the G slices."""
    G = slices.shape[0]
    parameter.unflatten(0, (-1, G)).copy_(slices.expand(parameter.shape[0] // G, *slices.shape))
    if noise:
        rms = slices.float().square().mean().sqrt().item()
        parameter.add_(torch.randn_like(parameter), alpha=noise * rms)
