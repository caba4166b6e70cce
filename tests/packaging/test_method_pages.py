"""Every method has a page, generated from its docstring and up to date, and every page says everything."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.describe import describe
from strategies.rules import RULES

ROOT = Path(__file__).parents[2]


def test_pages_and_table_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/make_methods.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_is_one_page_per_method_and_the_table() -> None:
    make = runpy.run_path(str(ROOT / "docs/make_methods.py"))
    pages = make["pages"]()
    assert len(pages) == len(RULES) + 1
    assert all(path.read_text() == text for path, text in pages.items())
    assert all(text != "" for text in pages.values())


@pytest.mark.parametrize("name", RULES)
def test_a_docstring_has_every_part_and_explains_every_hyper_parameter(name: str) -> None:
    method = describe(name, RULES[name])
    for part in ("summary", "formula", "needs", "guarantees", "cost", "use", "notes", "references"):
        assert getattr(method, part), part
    for key in method.hyper_parameters:
        assert f"{key.replace('-', '_')} : " in method.parameters, key


def test_the_table_names_the_method_without_a_public_source() -> None:
    assert "FedMC+" in (ROOT / "docs/methods.md").read_text()
