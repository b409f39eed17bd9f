"""The examples, and the programs of the pages in docs/, run."""

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
