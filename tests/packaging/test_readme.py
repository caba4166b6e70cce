"""The README says what the project declares; a benchmark starts by the command that its own text gives."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def run_config_table():
    """One row per declared key: its default and its comment in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[tool.flwr.app.config]\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^([a-z-]+) = (\S+) +# (.+)$", table, flags=re.MULTILINE)
    assert len(rows) == len(tomllib.loads(text)["tool"]["flwr"]["app"]["config"])
    return "\n".join(f"| `{key}` | `{value}` | {comment.replace('|', 'or')} |" for key, value, comment in rows)


def test_every_run_config_key_stands_in_the_readme_with_its_default_and_meaning():
    assert run_config_table() in README, "replace the table by:\n" + run_config_table()


def test_links_to_files_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("benchmark", sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py")))
def test_a_benchmark_starts_as_its_text_says(benchmark: str) -> None:
    command = f"python -m benchmarks.{benchmark}"
    assert command in (ROOT / "benchmarks" / f"{benchmark}.py").read_text()
    done = subprocess.run(
        [sys.executable, *command.split()[1:], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
