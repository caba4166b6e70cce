"""Finding the app and what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from cli import app_folder
from cli.app_folder import AppFolder, require_app_extra
from cli.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_the_checkout_is_an_app_with_all_declared_defaults():
    app = AppFolder.at(ROOT)
    assert app.path == ROOT.resolve()
    assert app.declared["tau"] == 0.02
    assert app.declared["dataset"] == "digits"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no pyproject.toml"),
        ("[project]\nname = 'x'", "does not describe a Flower app"),
        ("[[[", "does not describe a Flower app"),
        ("[tool.flwr.app.components]\nserverapp = 'other:app'", "another Flower app"),
    ],
)
def test_a_folder_without_this_app_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "pyproject.toml").write_text(content)
    with pytest.raises(UsageError, match=words) as caught:
        AppFolder.at(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_missing_packages_of_the_extra_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(app_folder.APP_EXTRA, "some-package", "no_such_module_anywhere")
    with pytest.raises(UsageError, match=r"some-package.*pip install '\.\[app\]' in the project's folder"):
        require_app_extra()


def test_the_app_checks_its_run_config():
    app = AppFolder.at(ROOT)
    app.check(app.declared)
    with pytest.raises(UsageError, match=r"tau=2\.0 is not allowed"):
        app.check({**app.declared, "tau": 2.0})


def test_an_app_without_a_config_module_is_left_to_check_for_itself(tmp_path):
    AppFolder(tmp_path, {}).check({"dataset": "theirs"})


def test_an_app_whose_config_module_is_another_is_left_to_check_for_itself(tmp_path, monkeypatch):
    (tmp_path / "server_app").mkdir()
    (tmp_path / "server_app" / "config.py").touch()
    monkeypatch.setitem(sys.modules, "server_app.config", ModuleType("server_app.config"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    AppFolder(tmp_path, {}).check({"dataset": "theirs"})


def test_modules_come_from_the_app(tmp_path, monkeypatch):
    (tmp_path / "only_in_this_app.py").write_text("VALUE = 5\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert AppFolder(tmp_path, {}).module("only_in_this_app").VALUE == 5
