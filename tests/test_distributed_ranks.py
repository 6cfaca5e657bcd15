"""The dispatchers, the layer, checkpoints and FSDP2 on 2, 3 and 4 processes: one spawn each, many cases.

Over NCCL where there are GPUs enough, else over gloo (see `distributed_ranks`). MOEFFN_TEST_RANKS=8 adds eight
processes. One process reads the checkpoints that two have written.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from distributed_ranks import run_ranks, runs_on
from distributed_worker import SUITES, cases_of

SIZES = [2, 3, 4] + ([8] if os.environ.get("MOEFFN_TEST_RANKS") == "8" else [])
FACTORIES = {"tensor", "zeros", "ones", "full", "empty", "arange", "eye", "rand", "randn", "randint", "randperm",
             "linspace", "Linear", "Sequential", "MoEFFN"}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    runs = {**dict.fromkeys(SIZES, "all"), 1: "checkpoints"}
    return run_ranks("distributed_worker.py", runs, tmp_path_factory.mktemp("ranks"), deadline=400)


def cases() -> list:
    found = []
    for W, suite in [*((W, "all") for W in SIZES), (1, "checkpoints")]:
        for name, case in cases_of(suite).items():
            reason = f"needs one of {getattr(case, 'sizes', ())} ranks"
            found.append(pytest.param(W, name, marks=() if runs_on(case, W) else pytest.mark.skip(reason=reason)))
    return found


@pytest.mark.parametrize(("W", "case"), cases())
def test_case(verdicts, W: int, case: str):
    said = verdicts[W].get(case, ["not reached"] * W)
    assert said == ["ok"] * W, "\n".join(f"rank {r}: {s}" for r, s in enumerate(said) if s != "ok")


def test_no_case_is_left_out():
    """Four ranks run every case, and no case decides by itself to do nothing."""
    assert all(runs_on(case, 4) for case in cases_of("all").values())
    for cls in SUITES["all"]:
        tree = ast.parse(Path(__import__(cls.__module__).__file__).read_text())
        bare = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value is None]
        assert not bare, (cls.__module__, bare)


def test_cases_put_what_they_make_on_the_ranks_device():
    """Every tensor or module that a case makes names a device or goes through `put`: a CPU would not show it."""
    seen = 0
    for cls in SUITES["all"]:
        tree = ast.parse(Path(__import__(cls.__module__).__file__).read_text())
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute | ast.Name)]
        put = {id(inner) for n in calls if name_of(n) == "put" for inner in ast.walk(n)}
        modules = {id(inner) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"
                   for inner in ast.walk(n)}  # parts of a module that is put as a whole
        made = [n for n in calls if name_of(n) in FACTORIES and id(n) not in modules]
        seen += len(made)
        stray = [n.lineno for n in made if id(n) not in put and "device" not in {k.arg for k in n.keywords}]
        assert not stray, (cls.__module__, stray)
    assert seen > 5


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id


def test_checkpoint_of_two_ranks_without_a_group(verdicts, tmp_path_factory):
    """The folder that two ranks wrote loads into an ordinary layer, bit-identical."""
    import torch.distributed.checkpoint as dcp

    from moeffn import MoEConfig, MoEFFN

    path = tmp_path_factory.getbasetemp() / "ranks0" / "checkpoint"
    c = MoEConfig(d_model=8, d_expert=6, num_experts=7, top_k=2, bias=True, d_shared=4, selection_bias=True)
    torch.manual_seed(21)
    want = MoEFFN(c, dtype=torch.float64).state_dict()
    state = {"model": MoEFFN(c, dtype=torch.float64).state_dict()}
    assert not torch.equal(state["model"]["experts.w_in"], want["experts.w_in"])
    dcp.load(state, checkpoint_id=str(path))
    assert all(torch.equal(state["model"][name], value) for name, value in want.items())
