"""Which folders a report is about."""

from __future__ import annotations

import pytest

from cli.results_folders import runs_in


@pytest.fixture
def results(tmp_path):
    for name in ("b/fedavg", "a/fedpcd", "a/fedavg"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "config.json").touch()
    (tmp_path / "results" / "notes").mkdir()
    return tmp_path.resolve() / "results"


def test_a_folder_of_runs_stands_for_all_its_runs(results):
    assert runs_in([results]) == [results / "a", results / "b"]


def test_runs_and_strategies_and_folders_without_results_are_taken_as_they_are(results):
    folders = [results / "b", results / "a" / "fedpcd", results / "notes"]
    assert runs_in(folders) == folders


def test_relative_folders_become_absolute(results, monkeypatch):
    monkeypatch.chdir(results)
    assert runs_in([results.relative_to(results) / "a"]) == [results / "a"]
