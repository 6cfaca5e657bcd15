"""A rank that is late, sends too little or dies: the others end within their deadline with an error that names it."""

from __future__ import annotations

import pytest
from distributed_faults import Faults
from distributed_ranks import run_ranks


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, list[str]]:
    return run_ranks("distributed_faults.py", {3: "all"}, tmp_path_factory.mktemp("faults"), deadline=120)[3]


@pytest.mark.parametrize("case", [n[len("case_"):] for n in vars(Faults) if n.startswith("case_")])
def test_case(verdicts, case: str):
    said = verdicts.get(case, ["not reached"] * 3)
    assert said == ["ok"] * 3, "\n".join(f"rank {r}: {s}" for r, s in enumerate(said) if s != "ok")
