"""Run-config values from the command line and from presets."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.app_folder import AppFolder, flatten
from cli.errors import UsageError
from cli.run_config import overrides, parse, preset_file, to_toml

ROOT = Path(__file__).parents[2]
DECLARED = {"tau": 0.02, "seed": 0, "primary": True, "strategy": "fedpcd"}


@pytest.fixture
def app(tmp_path):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "small.toml").write_text('seed = 3\ntau = 1\nstrategy = "fedavg"\n')
    return AppFolder(tmp_path, DECLARED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tau=0.5", {"tau": 0.5}),
        ("tau=1", {"tau": 1.0}),
        ("tau=1e-3 seed=7", {"tau": 0.001, "seed": 7}),
        ("primary=false", {"primary": False}),
        ("strategy=fedavg", {"strategy": "fedavg"}),
        ("strategy='fed avg'", {"strategy": "fed avg"}),
        ('strategy="0.5"', {"strategy": "0.5"}),
        ("strategy=a=b", {"strategy": "a=b"}),
        ("strategy=", {"strategy": ""}),
        ("", {}),
    ],
)
def test_a_value_takes_the_type_of_the_declared_default(text, expected):
    values = parse(text, DECLARED)
    assert values == expected
    assert {key: type(value) for key, value in values.items()} == {key: type(value) for key, value in expected.items()}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tua=0.1", ["'tua'", "did you mean 'tau'"]),
        ("history_window=1", ["'history_window'"]),
        ("seed=0.5", ["seed", "'0.5'", "an integer"]),
        ("tau=much", ["tau", "'much'", "a number"]),
        ("primary=yes", ["primary", "'yes'", "true or false"]),
        ("tau", ["'tau'", "key=value", ".toml"]),
        ("strategy='open", ["quotation"]),
    ],
)
def test_a_wrong_pair_is_refused_with_its_key_and_the_remedy(text, words):
    with pytest.raises(UsageError) as caught:
        parse(text, DECLARED)
    assert all(word in str(caught.value) for word in words)


def test_later_sources_win_and_a_preset_comes_first(app, tmp_path):
    extra = tmp_path / "extra.toml"
    extra.write_text("seed = 5\n")
    assert overrides(app, "small", []) == {"seed": 3, "tau": 1.0, "strategy": "fedavg"}
    assert overrides(app, "small", ["seed=4", str(extra)])["seed"] == 5
    assert overrides(app, "small", [str(extra), "seed=4"])["seed"] == 4
    assert overrides(app, None, []) == {}


def test_a_preset_may_be_a_path(app, tmp_path):
    assert preset_file(app, str(tmp_path / "presets" / "small.toml")).name == "small.toml"


def test_an_unknown_preset_names_those_that_exist(app):
    with pytest.raises(UsageError, match=r"'large'.*small"):
        overrides(app, "large", [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("tua = 1.0", ["'tua'", "file.toml", "'tau'"]),
        ("seed = 1.5", ["seed", "1.5", "an integer"]),
        ("seed = true", ["seed", "True", "an integer"]),
        ("primary = 1", ["primary", "1", "true or false"]),
        ("strategy = 1", ["strategy", "1", "a string"]),
        ("seed = [1]", ["seed", "[1]"]),
        ("seed =", ["file.toml"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(app, tmp_path, content, words):
    file = tmp_path / "file.toml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        overrides(app, None, [str(file)])
    assert all(word in str(caught.value) for word in words)


def test_a_missing_file_is_named(app):
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        overrides(app, None, ["nowhere.toml"])


VALUES = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text())


@given(st.dictionaries(st.text(min_size=1), VALUES))
def test_toml_written_for_flower_reads_back_as_it_was(values):
    assert tomllib.loads(to_toml(values)) == values


def test_nested_tables_become_dotted_keys():
    assert flatten({"a": {"b": 1, "c": {"d": "x"}}, "e": 2.0}) == {"a.b": 1, "a.c.d": "x", "e": 2.0}


@pytest.mark.parametrize("preset", sorted(file.stem for file in (ROOT / "presets").glob("*.toml")))
def test_every_shipped_preset_is_accepted_by_this_command_and_by_the_app(preset):
    from server_app.config import ServerConfig

    app = AppFolder.at(ROOT)
    chosen = overrides(app, preset, [])
    assert chosen["dataset"] == preset
    config = ServerConfig.from_run_config({**app.declared, **chosen})
    assert config.task.dataset == preset
