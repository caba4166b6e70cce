from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.config import ConfigError, TaskConfig

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {_.name.replace("_", "-"): _.default for _ in dataclasses.fields(TaskConfig)}
INTEGER_KEYS, FLOAT_KEYS, STRING_KEYS = (
    [key for key in TaskConfig.keys() if type(DEFAULTS[key]) is kind]  # noqa: SIM118  # no mapping
    for kind in (int, float, str)
)


def test_an_empty_run_config_gives_the_defaults() -> None:
    assert TaskConfig.from_run_config({}) == TaskConfig()


def test_the_defaults_are_the_ones_declared_in_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert set(TaskConfig.keys()) <= set(declared)
    assert TaskConfig.from_run_config(declared) == TaskConfig()


def test_keys_of_other_components_are_left_alone() -> None:
    assert TaskConfig.from_run_config({"tau": "nonsense", "seed": 3}) == TaskConfig(seed=3)


@pytest.mark.parametrize("key", FLOAT_KEYS)
def test_an_integer_is_accepted_where_a_float_is_meant(key: str) -> None:
    value = getattr(TaskConfig.from_run_config({key: 1}), key.replace("-", "_"))
    assert value == 1.0
    assert type(value) is float


@pytest.mark.parametrize("key", INTEGER_KEYS)
@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_only_integers_are_accepted_where_an_integer_is_meant(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=.*use an integer"):
        TaskConfig.from_run_config({key: value})


@pytest.mark.parametrize("key", FLOAT_KEYS)
@pytest.mark.parametrize("value", ["0.5", True, None])
def test_only_numbers_are_accepted_where_a_float_is_meant(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=.*use a number"):
        TaskConfig.from_run_config({key: value})


@pytest.mark.parametrize("key", STRING_KEYS)
@pytest.mark.parametrize("value", [1, 1.5, False])
def test_only_strings_are_accepted_where_a_string_is_meant(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=.*use a quoted string"):
        TaskConfig.from_run_config({key: value})


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("dataset", "mnist", "digits, fashion-mnist, cifar10, cifar100"),
        ("model", "vgg", "auto, mlp, cnn, resnet18"),
        ("partition", "uniform", "dirichlet, iid"),
        ("num-clients", 0, "an integer >= 1"),
        ("shards-per-client", 0, "an integer >= 1"),
        ("test-examples-per-client", -1, "an integer >= 0"),
        ("seed", -1, "an integer >= 0"),
        ("seed", 2**63, "2\\^63 - 1"),
        ("local-epochs", 0, "an integer >= 1"),
        ("batch-size", -1, "an integer >= 0"),
        ("torch-threads", 0, "an integer >= 1"),
        ("alpha", 0.0, "a finite number > 0"),
        ("alpha", float("inf"), "a finite number > 0"),
        ("alpha", float("nan"), "a finite number > 0"),
        ("alpha", 10**400, "a finite number"),
        ("local-learning-rate", 0.0, "a finite number > 0"),
        ("local-learning-rate", float("nan"), "a finite number > 0"),
        ("local-learning-rate-decay", 0.0, "in \\(0, 1\\]"),
        ("local-learning-rate-decay", 1.01, "in \\(0, 1\\]"),
        ("local-learning-rate-decay", float("nan"), "in \\(0, 1\\]"),
        ("device", "gpu", "auto, cpu, cuda"),
        ("device", "cuda:", "auto, cpu, cuda"),
        ("device", "cuda:0 ", "auto, cpu, cuda"),
        ("data-dir", "data", "an absolute path"),
        ("data-dir", "~other", "an absolute path"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_key_and_remedy(key: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^{key}.*{remedy}"):
        TaskConfig.from_run_config({key: value})


def test_a_directly_constructed_config_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="num-clients"):
        TaskConfig(num_clients=-3)


@given(
    st.dictionaries(
        st.sampled_from(TaskConfig.keys()), st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    )
)
def test_any_mapping_gives_a_valid_config_or_an_error_that_names_a_key(run_config: dict[str, object]) -> None:
    problem = ""
    try:
        config = TaskConfig.from_run_config(run_config)
    except ConfigError as error:
        problem = str(error)
    if problem:
        assert problem.startswith(tuple(run_config))
    else:
        assert config.learning_rate(1) == config.local_learning_rate


def test_the_learning_rate_decays_from_the_second_round_on() -> None:
    config = TaskConfig(local_learning_rate=0.5, local_learning_rate_decay=0.5)
    assert [config.learning_rate(server_round) for server_round in (1, 2, 3)] == [0.5, 0.25, 0.125]


def test_a_learning_rate_decayed_to_zero_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"local-learning-rate-decay=0\.1 makes the learning rate zero in round 1000"):
        TaskConfig(local_learning_rate_decay=0.1).learning_rate(1000)


def test_there_is_no_round_zero() -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        TaskConfig().learning_rate(0)


@pytest.mark.parametrize(
    ("dataset", "model"), [("digits", "mlp"), ("fashion-mnist", "mlp"), ("cifar10", "cnn"), ("cifar100", "resnet18")]
)
def test_auto_is_the_papers_model_for_the_data_set(dataset: str, model: str) -> None:
    assert TaskConfig(dataset=dataset).model_name == model


@pytest.mark.parametrize(("size", "model"), [(8, "cnn"), (64, "cnn"), (65, "resnet18"), (224, "resnet18")])
def test_auto_is_a_model_for_the_size_of_own_images(size: int, model: str) -> None:
    assert TaskConfig(dataset="image-folder", image_classes="a,b", image_size=size).model_name == model


@pytest.mark.parametrize("names", ["", "one", "a,b,a", "a,,b", "a/b,c", "../a,b", "a,.b", "a\\b,c"])
def test_classes_that_cannot_be_folders_are_an_error_that_says_what_is_needed(names: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)image-classes=.*names of all classes.*'benign,malignant'"):
        TaskConfig(dataset="image-folder", image_classes=names)
    assert TaskConfig(image_classes=names).classes == ()  # other data sets have their own


def test_classes_keep_their_order_and_may_have_blanks_around_and_inside() -> None:
    task = TaskConfig(dataset="image-folder", image_classes="b, T-shirt top ,a")
    assert task.classes == ("b", "T-shirt top", "a")


@pytest.mark.parametrize(("key", "value"), [("image-size", 7), ("image-size", 1025), ("image-channels", 2)])
def test_impossible_images_are_an_error_that_names_the_key(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{key}={value} is not allowed"):
        TaskConfig.from_run_config({"dataset": "image-folder", "image-classes": "a,b", key: value})


@pytest.mark.parametrize("key", ["data-root", "state-dir"])
def test_settings_of_a_node_are_no_run_config_keys(key: str) -> None:
    assert key not in TaskConfig.keys()  # noqa: SIM118  # no mapping
    assert TaskConfig.from_run_config({key: "/x"}) == TaskConfig()


def test_a_named_model_is_kept() -> None:
    assert TaskConfig(dataset="cifar100", model="cnn").model_name == "cnn"


def test_the_data_folder_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert TaskConfig().data_path == Path("/home/someone/.cache/fedpcd")
    assert TaskConfig(data_dir="~/data").data_path == Path("/home/someone/data")
    assert TaskConfig(data_dir="/srv/data").data_path == Path("/srv/data")


@pytest.mark.parametrize(
    ("preset", "rounds", "batch_size", "learning_rate"),
    [
        ("digits", 60, 0, 0.1),
        ("fashion-mnist", 300, 0, 0.1),
        ("cifar10", 500, 128, 0.05),
        ("cifar100", 500, 64, 0.01),
    ],
)
def test_a_preset_holds_the_papers_protocol(preset: str, rounds: int, batch_size: int, learning_rate: float) -> None:
    values = tomllib.loads((ROOT / "presets" / f"{preset}.toml").read_text())
    task = TaskConfig.from_run_config(values)
    assert values["num-server-rounds"] == rounds
    assert (task.dataset, task.num_clients, task.partition, task.local_epochs) == (preset, 100, "dirichlet", 1)
    assert (task.batch_size, task.local_learning_rate, task.local_learning_rate_decay) == (
        batch_size,
        learning_rate,
        1.0,
    )


@pytest.mark.parametrize("preset", ["digits", "fashion-mnist", "cifar10", "cifar100"])
def test_a_preset_has_only_declared_keys_with_the_declared_types(preset: str) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for key, value in tomllib.loads((ROOT / "presets" / f"{preset}.toml").read_text()).items():
        assert type(value) is type(declared[key]), key
