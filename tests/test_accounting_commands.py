"""`moeffn params` and `moeffn plan`, as typed."""

import json
import subprocess
import sys

import pytest

from moeffn.accounting import Workload, clusters, plan_cluster, presets
from moeffn.accounting.presets import close_presets


@pytest.fixture(scope="module")
def invoke():
    import typer
    from typer.testing import CliRunner

    from moeffn.accounting.commands import register

    app = typer.Typer()
    register(app)
    return lambda *args: CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_params_command(invoke, tmp_path):
    result = invoke("params", "Qwen3-30B-A3B")
    assert result.exit_code == 0, result.output
    for text in ("total 30,532,122,624", "active 3,353,032,704", "3,041,867,776", "2,730,702,848", "61.06 GB", "128"):
        assert text in result.output, text
    result = invoke("params", "Qwen3-30B-A3B", "--json", "--format", "fp8")
    data = json.loads(result.output)
    assert data["total"] == 30_532_122_624
    assert data["active"] == {"all": 3_353_032_704, "head": 3_041_867_776, "none": 2_730_702_848}
    assert data["components"]["routed"]["active"] * 16 == data["components"]["routed"]["total"]
    assert data["stored"]["format"] == "fp8"
    assert json.loads(invoke("params", "GLM-4.5", "--convention", "glm", "--json").output)["total"] == 355_233_991_936
    assert "DeepSeek-V3" in invoke("params", "list").output.splitlines()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    result = invoke("params", str(tmp_path / "config.json"))
    assert result.exit_code == 2
    assert "config.hidden_size is missing" in result.output
    assert "source: '' is neither a file nor a preset" in invoke("params", "").output
    (tmp_path / "bytes.json").write_bytes(b"\x80")
    result = invoke("params", str(tmp_path / "bytes.json"))
    assert (result.exit_code, "bytes.json: not JSON" in result.output) == (2, True)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for args, words in ((["params", str(deep)], "not JSON"),
                        (["plan", "Qwen3-30B-A3B", "--trace", str(deep)], "expected a JSON file")):
        result = invoke(*args)
        assert (result.exit_code, words in result.output) == (2, True)
    assert invoke("params", "LongCat-Flash").exit_code == 0


@pytest.mark.parametrize(("name", "rows"), [
    ("gpt-oss-20b", ["0-23 (24x)"]),  # windows in turn, equal in weights
    ("DeepSeek-V3", ["0-2 (3x)", "3-60 (58x)"]),
    ("Qwen3-Next-80B-A3B", ["0-2, 4-6, 8-10, … (36x)", "3, 7, 11, … (12x)"]),
])
def test_params_groups_equal_layers(invoke, name, rows):
    output = invoke("params", name).output
    assert all(row in output for row in rows), output
    assert sum("x)" in line for line in output.splitlines()) == len(rows)


def test_plan_explains_its_clusters(invoke):
    output = invoke("plan", "list").output
    assert all(name in output for name in clusters())
    assert "domain: GPUs joined by fast links" in output


def test_names_of_presets_hold_no_notes():
    assert not [name for name in presets() if set(name) & set("()=/ ,")]
    assert close_presets("Mixtral-8x7") == ["Mixtral-8x7B-v0.1", "Mixtral-8x22B-v0.1", "Mistral-7B-v0.1"]


def test_plan_command(invoke, tmp_path):
    png = tmp_path / "plan.png"
    pytest.importorskip("matplotlib")
    result = invoke("plan", "DeepSeek-V3", "--ranks", "8,16,32", "--tokens", "32", "--png", str(png))
    assert result.exit_code == 0, result.output
    assert "tok/s a GPU" in result.output
    assert "32 tokens a rank: more ranks pay up to 32" in result.output
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    data = json.loads(invoke("plan", "DeepSeek-V3", "--ranks", "16", "--tokens", "32", "--json").output)
    work = Workload(context=4096)
    point = plan_cluster("DeepSeek-V3", "H800", ranks=(16,), tokens_per_rank=(32,), workload=work).points[0]
    assert data["stops_paying"] == {"32": {"ranks": 16, "binds": point.binds}}
    assert data["points"][0]["tokens_per_s_per_gpu"] == pytest.approx(point.tokens_per_s_per_gpu)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([[0, 1, 2, 3, 4, 5, 6, 7]] * 3 + [[8, 9, 10, 11, 12, 13, 14, 15]]))
    args = ("plan", "DeepSeek-V3", "--ranks", "32", "--tokens", "32", "--json", "--trace", str(trace))
    assert json.loads(invoke(*args).output)["points"][0]["rho"] == pytest.approx(3 / 4 * 32)
    trace.write_text(json.dumps([2.0] * 8 + [1.0] * 248))
    assert json.loads(invoke(*args).output)["points"][0]["rho"] == pytest.approx(16 * 32 / 264)
    trace.write_text("{}")
    assert invoke(*args).exit_code == 2


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--ranks", "8,x", "ranks: expected integers separated by commas"), ("--ranks", "0", "ranks: expected at least 1"),
    ("--tokens", "0", "tokens_per_rank: expected at least 1"), ("--cluster", "none", "cluster: expected"),
    ("--dtype", "fp6", "dtype: expected fp8 or bf16"), ("--overlap", "some", "workload.overlap: expected"),
    ("--context", "-5", "workload.context: expected at least 0"), ("--replicas", "-1", "replicas: expected at least 0"),
    ("--png", "/nowhere/plan.png", "png: expected a path that can be written, got '/nowhere/plan.png' (No such file"),
    ("--trace", "/nowhere", "trace: expected a JSON file"),
])
def test_plan_refuses_by_name(invoke, option, value, message):
    result = invoke("plan", "DeepSeek-V3", "--ranks", "8", "--tokens", "32", option, value)
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "a list that is not empty, got []"), ('[NaN, 1]', "finite loads of at least 0, got [nan, 1]"),
    ('["a"]', "finite loads of at least 0"), ("[-1, 2]", "finite loads of at least 0"),
    ('[[0, 1], ["a"]]', "rows of expert ids (-1: none)"), ("[[0, 1], 2]", "rows of expert ids (-1: none)"),
    ("[[-2, 2]]", "rows of expert ids (-1: none)"), ("[[1.5, 2]]", "rows of expert ids (-1: none)"),
    (b"\x80", "a JSON file, got 'utf-8' codec"),
])
def test_plan_refuses_a_trace_by_name(invoke, tmp_path, text, message):
    trace = tmp_path / "trace.json"
    trace.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = invoke("plan", "DeepSeek-V3", "--ranks", "8", "--tokens", "32", "--trace", str(trace))
    assert result.exit_code == 2, result.output
    assert f"trace: expected {message}" in result.output


def test_plan_says_where_ranks_stop_paying(invoke):
    output = invoke("plan", "DeepSeek-V3", "--ranks", "16,32,64,128", "--tokens", "32,128").output
    assert "32 tokens a rank: more ranks pay up to 128, the most that were tried; there exchange binds" in output
    assert "128 tokens a rank: nothing is gained above 32 ranks; there exchange binds" in output
    assert "no size fits in memory" in invoke("plan", "DeepSeek-V3", "--ranks", "1", "--tokens", "32").output


def test_a_plot_without_matplotlib_says_what_is_missing(invoke, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("plan", "DeepSeek-V3", "--ranks", "8", "--png", str(tmp_path / "plan.png"))
    assert result.exit_code == 2
    assert "png: needs matplotlib" in result.output


def test_a_file_that_is_not_there(invoke):
    result = invoke("params", "/nowhere/config.json")
    assert (result.exit_code, "source: no file '/nowhere/config.json'" in result.output) == (2, True)


def test_params_needs_no_torch():
    """As typed, in a process of its own: no torch, and half a second of the processor at most (the best of a few, as
    a busy machine slows it)."""
    code = ("import sys, time; from moeffn.cli import main; sys.argv = ['moeffn', 'params', 'DeepSeek-V3']\n"
            "try: main()\n"
            "except SystemExit as error: assert not error.code\n"
            "loaded = {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
            "assert not loaded, loaded\n"
            "print(time.process_time())")
    for _ in range(5):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        assert "671,026,404,352" in run.stdout
        seconds = float(run.stdout.split()[-1])
        if seconds < 0.5:
            break
    assert seconds < 0.5
