"""The examples, and the programs of the pages in docs/, run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("torch", reason="torch is not installed")


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "examples" / "python").glob("*.py")))
def test_example(name):
    assert run(ROOT / "examples" / "python" / name)


@pytest.mark.parametrize("name", ["python.md", "megatron.md"])
def test_page(name, tmp_path):
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / name).read_text(), re.M | re.S)
    assert len(programs) == 1 and programs[0].count("\n") <= 30
    (tmp_path / "program.py").write_text(programs[0])
    assert run(tmp_path / "program.py")


def test_evaluation_of_the_shipped_models(tmp_path):
    for module in ("safetensors", "matplotlib"):
        pytest.importorskip(module)
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    script = ROOT / "python" / "tiny_moe" / "evaluate.py"
    run(script, "--windows", 4, "--json", figures, "--plot", plot)
    assert "<svg" in plot.read_text()
    page = (ROOT / "docs" / "nvfp4-quality.md").read_text()
    published = {
        name: [float(figure) for figure in re.findall(r"(\d\.\d{4})", row)]
        for name, row in re.findall(r"^\| `([\w.-]+)` \| (\d.*)$", page, re.M)
    }
    for variant, result in json.loads(figures.read_text()).items():
        assert result["bits_per_byte"]["bf16"] == pytest.approx(published[f"tiny-{variant}"][0], abs=0.03)
        for layer, errors in result["relative_l2"].items():  # of the whole text there, of a part here
            assert list(errors.values()) == pytest.approx(published[layer], rel=0.05)
        bits = result["bits_per_byte"]
        assert bits["bf16"] < 2.5, "the model is the trained one"
        assert abs(bits["nvfp4"] - bits["bf16"]) < 0.06 and abs(bits["nvfp4-weights"] - bits["bf16"]) < 0.06
        assert 0.85 < result["agreement"]["nvfp4"] < 1
        for errors in result["relative_l2"].values():
            assert 0.02 < errors["nvfp4-weights"] < errors["nvfp4"] < 0.15
