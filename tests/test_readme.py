"""README.md says what is so: its examples run, its tables are those of the stored results, its commands exist."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from moeffn.cli import COMMANDS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = [code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "init_process_group" not in code]


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=50)
    names = {"model": transformers.Qwen3MoeForCausalLM(config)}
    for code in EXAMPLES:  # each goes on from those before it
        exec(compile(code, "README.md", "exec"), names)
    assert len(EXAMPLES) >= 6 and "H200" in "".join(EXAMPLES)
    assert isinstance(names["y"], torch.Tensor) and "logits dw" in capsys.readouterr().out


def test_tables_are_those_of_the_results(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*.png", "__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    runpy.run_path(str(tmp_path / "benchmarks" / "fill_readme.py"), run_name="__main__")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == TEXT


def test_every_command_is_told() -> None:
    assert set(re.findall(r"^\| `moeffn (\w+)", TEXT, re.MULTILINE)) == set(COMMANDS)
