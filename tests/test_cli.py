"""The command line: readable errors on one line with code 2, doctor, presets, bench at small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moeffn
from moeffn import backends
from moeffn.cli import COMMANDS, main

TINY = {"d_model": 32, "d_expert": 16, "num_experts": 8, "top_k": 2}


def run(capsys, *args: object) -> tuple[int, str, str]:
    """-> exit code, stdout, stderr of `moeffn args` in this process."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def python(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A new interpreter that finds the same moeffn as this one, whatever the working directory."""
    home = str(Path(moeffn.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": home, "COLUMNS": "200"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=timeout,
                          check=False, cwd="/")


def test_help_lists_every_command_and_python_m_is_the_same():
    shown = python("-m", "moeffn", "--help")
    assert shown.returncode == 0, shown.stderr
    for name in COMMANDS:
        assert f" {name} " in shown.stdout


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, f"moeffn {moeffn.__version__}\n")


def test_help_imports_no_torch():
    code = ("import sys\nfrom moeffn.cli import main\n"
            "try: main(['--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)")
    assert python("-c", code).stdout.endswith("False\n")


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_its_own_help(command, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize(("args", "words"), [
    (["dctor"], "No such command 'dctor'. Did you mean 'doctor'?"),
    (["doctor", "--jsn"], "No such option: --jsn"),
    (["bench"], "Missing argument 'PRESET'"),
    (["bench", "mixtral-8x7"], "`moeffn params list` shows; near ones: Mixtral-8x7B-v0.1"),
    (["bench", ""], "PRESET: expected a file config.json, or a preset that `moeffn params list` shows, got ''"),
    (["bench", "/"], "PRESET: expected a file config.json, or a folder that holds one, got the folder '/'"),
    (["bench", "TINY", "--tokens", "1,x"], "--tokens: expected ints separated by commas, got '1,x'"),
    (["bench", "TINY", "--tokens", "0"], "--tokens: expected counts of at least 1"),
    (["bench", "TINY", "--seed", "x"], "--seed"),
    (["bench", "TINY", "--dtype", "int8"], "--dtype: expected one of 'bfloat16', 'float16', 'float32', got 'int8'"),
    (["bench", "TINY", "--backend", "cuda"], "backend: expected one of 'auto', 'reference'"),
    (["bench", "TINY", "--device", "tpu"], "--device: expected one of 'cpu', 'cuda', got 'tpu'"),
    (["bench", "TINY", "--num-experts", "1"], "--num-experts: expected top_k = 2 to 8, got 1"),
    (["bench", "TINY", "--routing", "zpf:1"], "routing: expected one of uniform, balanced"),
    (["demo", "--out", "/no/such/folder/x.png"], "--out: expected the path of a .png file in a folder that exists"),
    (["demo", "--top-k", "9"], "top_k: expected at most num_experts = 8, got 9"),
])
def test_user_errors_are_one_line_with_code_2(args, words, tiny, capsys):
    code, out, err = run(capsys, *[tiny if a == "TINY" else a for a in args])
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert err.strip().startswith("error: ")
    assert words in err


@pytest.mark.parametrize(("text", "words"), [
    ('{"model_type": "mixtral", "hidden_size": 32}',
     "config.json: num_hidden_layers is missing (read as num_layers too): it is never filled from a default"),
    ('{"model_type": "qwen3_moe", "hidden_size": "a"}', "config.json: hidden_size: expected an integer, got str 'a'"),
    ('{"model_type": "mixtral", "hidden_', "config.json: expected a JSON object"),
    ("[" * 100_000, "config.json: expected a JSON object"),
    ('{"model_type": "gpt5"}', "model_type: expected a mixture"),
    ("{}", "model_type: expected a mixture"),
    ('{"d_model": 32, "d_expert": 16, "num_experts": 8}', "top_k: expected an int, got no such key"),
    ('{"d_model": 32, "d_expert": 16, "num_experts": 8, "topk": 2}', "topk: expected a field of MoEConfig (top_k?)"),
    ('{"d_model": 32, "d_expert": 16, "num_experts": 8, "top_k": 9}', "top_k: expected at most num_experts = 8, got 9"),
    ('{"d_model": "32", "d_expert": 16, "num_experts": 8, "top_k": 2}', "d_model: expected an int, got str '32'"),
])
def test_a_bad_config_names_its_key(text, words, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    for given in (path, tmp_path):
        code, _, err = run(capsys, "bench", given)
        assert code == 2
        assert words in err


def test_a_config_that_is_no_text_is_a_users_error(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(b"\x80")
    code, _, err = run(capsys, "bench", tmp_path)
    assert code == 2
    assert "expected a JSON object, got bytes that are no text" in err


def test_our_own_faults_keep_their_traceback(monkeypatch):
    from moeffn.cli import doctor

    def broken():
        raise ValueError("not a message of checks")

    monkeypatch.setattr(doctor, "inspect_machine", broken)
    with pytest.raises(ValueError, match="not a message"):
        main(["doctor"])


def test_doctor_says_what_runs_and_why_not(capsys, monkeypatch):
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert {row["backend"] for row in found["backends"]} == set(backends.BACKENDS)
    import torch

    for row in found["backends"]:
        expected = backends.available(row["backend"], torch.device(row["device"]), getattr(torch, row["dtype"]))
        assert row["why_not"] == expected
        assert row["why_not"] is None or len(row["why_not"]) > 5
    assert found["packages"]["torch"] == torch.__version__
    assert found["threads"]["torch"] == torch.get_num_threads()
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for name in backends.BACKENDS:
        line = next(line for line in out.splitlines() if line.startswith(f"│ {name}"))
        dtypes, why = line.split("│")[3:5]  # what does not run says why, what runs says what it runs
        assert ("none" in dtypes) == bool(why.strip())


def test_doctor_names_the_extra_of_a_missing_package(capsys, monkeypatch):
    from moeffn.cli import doctor

    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "transformers" else "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "pip install 'moeffn[hf]'" in run(capsys, "doctor")[1]


@pytest.fixture
def quick(monkeypatch):
    """Ceilings given instead of measured, and as few calls as a median needs."""
    from moeffn import measure

    monkeypatch.setattr(measure, "matmul_ceiling", lambda device, dtype: 1e11)
    monkeypatch.setattr(measure, "read_ceiling", lambda device: 1e10)
    once = measure.median_seconds
    monkeypatch.setattr(measure, "median_seconds",
                        lambda call, device, **_: once(call, device, at_least=0.0, calls=3, warmup=1))


@pytest.mark.parametrize("spec", ["uniform", "balanced", "zipf:1.2", "hot:2", "single"])
def test_bench_routings_show_their_load(spec, tiny, quick, capsys):
    code, out, _ = run(capsys, "bench", tiny, "--tokens", "64", "--routing", spec, "--json", "--dtype", "float32")
    assert code == 0
    load = json.loads(out)["rows"][0]["max_over_mean_load"]
    low, high = {"balanced": (1.0, 1.0), "uniform": (1.0, 2.5), "zipf:1.2": (1.5, 4.0), "hot:2": (4.0, 4.0),
                 "single": (4.0, 4.0)}[spec]
    assert low <= load <= high + 1e-9


def test_bench_measures_checks_and_counts(tiny, capsys):
    code, out, _ = run(capsys, "bench", tiny, "--tokens", "1,16", "--train", "--json")
    found = json.loads(out)
    assert code == 0
    expert, router = 3 * 32 * 16, 8 * 32
    assert found["weights_total"] == 8 * expert + router
    assert found["weights_active"] == 2 * expert + router
    assert found["backend"] == backends.resolve("auto", *_cpu("bfloat16"))
    assert [row["tokens"] for row in found["rows"]] == [1, 16]
    assert min(found["ceilings"].values()) > 0
    for row in found["rows"]:
        assert 0 < row["output_error"] <= row["output_budget"]
        assert 0 < row["gradient_error"] <= row["gradient_budget"]
        assert row["forward_backward"]["ms"] > 0 < row["forward"]["ms"]
        flops = row["tokens"] * 2 * (2 * expert + router)
        assert row["forward"]["gflops"] * row["forward"]["ms"] * 1e6 == pytest.approx(flops)


def test_bench_json_holds_plain_values(tiny, quick, capsys):
    config = json.loads(run(capsys, "bench", tiny, "--tokens", "4", "--json")[1])["config"]
    assert config["activation"]["kind"] == "silu" and config["layout"] == "concat"
    assert "key" not in config["activation"] and config["d_expert"] == 16


def test_bench_table_fits_80_columns(tiny, quick, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "bench", tiny, "--tokens", "1024", "--train")[1].splitlines()
    head = next(line for line in out if line.split()[:1] == ["T"])
    assert head.split() == ["T", "pass", "ms", "tokens/s", "GFLOP/s", "MFU", "%", "GB/s", "MBU", "%", "load", "error"]
    rows = [line.split() for line in out if line.split()[:1] == ["1024"]]
    assert [(row[1], len(row)) for row in rows] == [("fwd", 10), ("fwd+bwd", 8)]  # nothing cut or wrapped


def _cpu(dtype: str):
    import torch

    return torch.device("cpu"), getattr(torch, dtype)


def test_bench_with_fewer_experts_says_so(tiny, quick, capsys):
    code, out, _ = run(capsys, "bench", tiny, "--tokens", "4", "--num-experts", "3")
    assert code == 0
    assert "3 experts of 8, fewer held" in " ".join(out.split())


def test_bench_reports_a_wrong_backend(tiny, quick, capsys, monkeypatch):
    """The check at real size is a check: a kernel that returns something else is marked."""
    from moeffn import measure

    right = measure.moe_ffn
    monkeypatch.setattr(measure, "moe_ffn", lambda *a, **k: right(*a, **k) * 1.1)
    assert "WRONG" in run(capsys, "bench", tiny, "--tokens", "4")[1]


def test_bench_refuses_a_block_that_does_not_fit(monkeypatch, capsys):
    from moeffn.cli import doctor

    monkeypatch.setattr(doctor, "memory", lambda: {"total": 8 * 10**9, "available": 8 * 10**9})
    begin = time.perf_counter()
    code, _, err = run(capsys, "bench", "deepseek-v3", "--tokens", "1")
    assert code == 2
    assert time.perf_counter() - begin < 5  # nothing is filled before
    weights = 2 * (256 * 3 * 7168 * 2048 + 3 * 7168 * 2048 + 256 * 7168)
    found = int(err.split("bfloat16:")[1].split("bytes")[0].replace(",", "").strip())
    assert weights <= found < 1.01 * weights
    fitting = int(err.split("--num-experts")[1].split()[0])
    assert 8 <= fitting < 256


# Sizes as the models' own cards print them: (D, F, E, K, S).
@pytest.mark.parametrize(("name", "sizes"), [
    ("mixtral-8x7b", (4096, 14336, 8, 2, 0)),
    ("olmoe-1b-7b", (2048, 1024, 64, 8, 0)),
    ("qwen3-30b-a3b", (2048, 768, 128, 8, 0)),
    ("deepseek-v3", (7168, 2048, 256, 8, 2048)),
    ("gpt-oss-20b", (2880, 2880, 32, 4, 0)),
    ("glm-4.5-air", (4096, 1408, 128, 8, 1408)),
])
def test_presets_have_the_published_sizes(name, sizes):
    from moeffn.presets import load_block

    _, c = load_block(name)
    assert (c.d_model, c.d_expert, c.num_experts, c.top_k, c.d_shared) == sizes


def test_every_preset_loads_or_is_refused_by_its_family():
    """The names are those of `moeffn params`; sizes agree with what it counts."""
    from moeffn.accounting import block, count, presets
    from moeffn.presets import load_block

    loaded = 0
    for name in presets():
        try:
            label, config = load_block(name)
        except ValueError as error:
            assert str(error).startswith(f"{name}: "), error
            continue
        loaded += 1
        layer = next(layer for layer in count(name).layers if layer.num_experts)
        assert (label, config.num_experts, config.top_k) == (name, layer.num_experts, layer.top_k)
        assert block.active_weights(block.Block.of(config)) < layer.active < layer.total
    assert loaded >= 40
    deepseek = load_block("deepseek-v3")[1]
    assert (deepseek.route.num_groups, deepseek.route.topk_groups) == (8, 4)
    oss = load_block("gpt-oss-20b")[1]
    assert oss.activation == moeffn.SWIGLU_OAI and oss.bias and oss.layout is moeffn.Layout.INTERLEAVED
