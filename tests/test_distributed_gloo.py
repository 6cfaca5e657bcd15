"""The dispatchers, the layer, checkpoints and FSDP2 on 2, 3 and 4 gloo processes: one spawn each, many cases.

MOEFFN_TEST_RANKS=8 adds eight processes. One process reads the checkpoints that two have written.
"""

from __future__ import annotations

import os

import pytest
import torch
from distributed_ranks import run_ranks
from distributed_worker import case_names

SIZES = [2, 3, 4] + ([8] if os.environ.get("MOEFFN_TEST_RANKS") == "8" else [])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("gloo")
    found = {W: run_ranks("distributed_worker.py", W, "all", folder / str(W), deadline=400) for W in SIZES}
    found[1] = run_ranks("distributed_worker.py", 1, "checkpoints", folder / "1", deadline=60)
    return found


@pytest.mark.parametrize(("W", "case"), [
    *((W, case) for W in SIZES for case in case_names("all")), *((1, case) for case in case_names("checkpoints"))])
def test_case(verdicts, W: int, case: str):
    said = verdicts[W].get(case, ["not reached"] * W)
    assert said == ["ok"] * W, "\n".join(f"rank {r}: {s}" for r, s in enumerate(said) if s != "ok")


def test_checkpoint_of_two_ranks_without_a_group(verdicts, tmp_path_factory):
    """The folder that two ranks wrote loads into an ordinary layer, bit-identical."""
    import torch.distributed.checkpoint as dcp

    from moeffn import MoEConfig, MoEFFN

    path = tmp_path_factory.getbasetemp() / "gloo0" / "checkpoint"
    c = MoEConfig(d_model=8, d_expert=6, num_experts=7, top_k=2, bias=True, d_shared=4, selection_bias=True)
    torch.manual_seed(21)
    want = MoEFFN(c, dtype=torch.float64).state_dict()
    state = {"model": MoEFFN(c, dtype=torch.float64).state_dict()}
    assert not torch.equal(state["model"]["experts.w_in"], want["experts.w_in"])
    dcp.load(state, checkpoint_id=str(path))
    assert all(torch.equal(state["model"][name], value) for name, value in want.items())
