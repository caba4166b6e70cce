from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from server_app.config import ConfigError, ServerConfig
from strategies import METHODS

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def declared() -> dict[str, Any]:
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]


def test_every_key_that_the_app_reads_is_declared_with_the_same_default() -> None:
    assert ServerConfig().resolved() == declared()


def test_defaults_have_the_declared_types() -> None:
    resolved = ServerConfig().resolved()
    assert {key: type(value) for key, value in resolved.items()} == {
        key: type(value) for key, value in declared().items()
    }


def test_an_empty_run_config_gives_the_defaults() -> None:
    assert ServerConfig.from_run_config({}) == ServerConfig()


def test_resolved_values_make_the_same_config_again() -> None:
    config = ServerConfig.from_run_config({"tau": 0.05, "seed": 3, "compare-with": "fedavg", "num-clients": 20})
    assert ServerConfig.from_run_config(config.resolved()) == config


def test_hyper_parameters_go_to_every_method_that_has_them() -> None:
    config = ServerConfig.from_run_config({"tau": 0.05, "server-learning-rate": 0.5, "primary": False})
    assert config.hyper_parameters["fedpcd"]["tau"] == 0.05
    assert config.hyper_parameters["fedpcd"]["primary"] is False
    assert config.hyper_parameters["fedpcd"]["server_learning_rate"] == 0.5
    assert config.hyper_parameters["fedavg"] == {"server_learning_rate": 0.5}


@pytest.mark.parametrize("name", METHODS)
def test_hyper_parameters_are_the_fields_of_the_rule(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(METHODS[name].rule_class)]
    assert list(ServerConfig().hyper_parameters[name]) == fields


def test_the_task_is_read_too() -> None:
    config = ServerConfig.from_run_config({"dataset": "fashion-mnist", "local-learning-rate": 1})
    assert (config.task.dataset, config.task.local_learning_rate) == ("fashion-mnist", 1.0)


def test_strategies_to_compare_with_run_first() -> None:
    assert ServerConfig.from_run_config({"compare-with": "fedavg"}).order == ("fedavg", "fedpcd")


def test_a_strategy_named_twice_runs_once() -> None:
    config = ServerConfig.from_run_config({"compare-with": " fedpcd , fedavg,fedpcd", "strategy": "fedavg"})
    assert config.order == ("fedpcd", "fedavg")


def test_unknown_keys_are_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'tua' \(did you mean 'tau'\?\), 'num_clients' \(.*'num-clients'"):
        ServerConfig.from_run_config({"tua": 0.1, "num_clients": 5, "seed": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "fedpdc"),
        ("strategy", ""),
        ("strategy", 3),
        ("compare-with", "fedavg,nonsense"),
        ("compare-with", "fedavg,"),
        ("num-server-rounds", 0),
        ("num-server-rounds", 3.0),
        ("num-server-rounds", True),
        ("num-server-rounds", "3"),
        ("fraction-train", 0.0),
        ("fraction-train", 1.1),
        ("fraction-train", float("nan")),
        ("evaluate-every", 0),
        ("evaluation", "sometimes"),
        ("round-timeout", 0),
        ("round-timeout", float("inf")),
        ("min-nodes", 0),
        ("wait-for-nodes", -1.0),
        ("norm-screen", -1.0),
        ("tau", 2.0),
        ("tau", "0.1"),
        ("tau", False),
        ("tau", float("nan")),
        ("tau", 10**400),
        ("history-window", 1.5),
        ("history-window", -1),
        ("normalization", "l3"),
        ("ema-beta", 1.0),
        ("primary", 1),
        ("primary", "true"),
        ("on-infeasible", "panic"),
        ("solver", "no-such-solver"),
        ("server-learning-rate", -0.1),
        ("dataset", "imagenet"),
        ("alpha", 0),
    ],
)
def test_a_wrong_value_is_an_error_that_names_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_run_config({key: value})
    text = str(caught.value)
    assert key in text
    assert repr(value) in text


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("strategy", "fedpdc", "fedpcd"),
        ("strategy", "FedAvg", "fedavg"),
        ("compare-with", "fedavgg", "fedavg"),
        ("dataset", "cifar-10", "cifar10"),
        ("model", "resnet-18", "resnet18"),
        ("partition", "dirichlet-class", "dirichlet-classes"),
        ("evaluation", "servre", "server"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_nearest_one(key: str, value: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='{value}' is not allowed: .*; did you mean '{near}'\\?$"):
        ServerConfig.from_run_config({key: value})


def test_a_choice_like_no_other_is_answered_without_a_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_run_config({"dataset": "???"})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("tau", 2.0, "tau=2.0 is not allowed: use a number in [0, 1]"),
        ("history-window", -1, "history-window=-1 is not allowed: use a whole number >= 0"),
        ("normalization", "l3", "normalization='l3' is not allowed: use one of 'l2', 'ema', 'none'"),
    ],
)
def test_a_refused_hyper_parameter_is_told_once(key: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_run_config({key: value})
    assert str(caught.value) == text


def test_values_that_exclude_each_other_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"tau=0\.0, primary=False is not allowed"):
        ServerConfig.from_run_config({"primary": False, "tau": 0})


def test_a_hyper_parameter_with_an_underscored_field_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match="history-window=-1") as caught:
        ServerConfig.from_run_config({"history-window": -1})
    assert "history_window" not in str(caught.value)


def test_a_learning_rate_that_decays_to_zero_is_found_before_training() -> None:
    with pytest.raises(ConfigError, match="local-learning-rate-decay"):
        ServerConfig.from_run_config({"local-learning-rate-decay": 1e-300, "num-server-rounds": 5})


@pytest.mark.parametrize("folder", ["results", "./results", "../results", "~someone/results"])
def test_a_relative_results_folder_is_refused_with_the_reason(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"results-dir=.*SuperLink"):
        ServerConfig.from_run_config({"results-dir": folder})


def test_results_go_to_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ServerConfig().results_path == tmp_path / "fedpcd-results"
    assert ServerConfig.from_run_config({"results-dir": "~/mine"}).results_path == tmp_path / "mine"
