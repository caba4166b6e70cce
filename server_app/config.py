"""The server's settings: strategies, rounds, evaluation and results, from Flower's run config."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from client_app.config import DATASETS, MODELS, PARTITIONS, ConfigError, TaskConfig
from strategies import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["EVALUATIONS", "ConfigError", "ServerConfig"]

EVALUATIONS: Final = ("auto", "server", "federated", "both")
"""Who evaluates: the server's own copy of the data, the clients, or both (and they must agree)."""

_TASK_CHOICES: Final = {"dataset": DATASETS, "model": MODELS, "partition": PARTITIONS}
_DEFAULT_RESULTS = "~/fedpcd-results"
_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a quoted string",
}


@dataclass(frozen=True)
class ServerConfig:
    """What the server runs: one strategy, after those that it is compared with.

    Every field but `task` and `hyper_parameters` is the run-config key of the same name with hyphens for
    underscores; an integer is accepted where a float is meant. The hyper-parameters' keys are the fields of
    the methods' rules.

    Parameters
    ----------
    task : TaskConfig
        Data, model and local training.
    strategy : str
        A name in `strategies.METHODS`.
    compare_with : str
        Names, separated by commas, of strategies trained first on the same seeds.
    num_server_rounds : int
        Rounds of each strategy, >= 1.
    fraction_train : float
        Share of the clients in each round's cohort, in (0, 1].
    evaluate_every : int
        Rounds between evaluations, >= 1; the initial model and the last round are always evaluated.
    evaluation : {"auto", "server", "federated", "both"}
        Who evaluates; auto: the server in simulation, the clients where they own their data.
    round_timeout : float
        Seconds that a round waits for replies, > 0.
    min_nodes : int
        SuperNodes that must be connected before the first round, >= 1.
    wait_for_nodes : float
        Seconds to wait for them, >= 0.
    results_dir : str
        Folder of all runs: absolute or starting with ``~``; empty for ``~/fedpcd-results``.
    run_name : str
        Name of this run's folder; empty for ``<dataset>-<strategy>-seed<seed>-<UTC time>``.
    checkpoint_every : int
        Rounds between checkpoints, >= 0; 0 for none.
    checkpoint_keep : int
        Newest checkpoints that are kept, >= 1.
    resume : str
        Folder of an interrupted run, absolute or starting with ``~``; empty to start a new one.
    min_replies : int
        With fewer usable replies the model stays as it is and the round is skipped, >= 1.
    max_skipped_rounds : int
        So many skipped rounds in a row end the run, >= 1.
    norm_screen : float
        An update longer than this many times the others' median, and than the model itself, is rejected; 0 for off.
    examples_screen : float
        A client that claims more examples than this many times the others' median is rejected; 0 for off.
    hyper_parameters : dict
        Of every method, whether it takes part or not: keyword arguments by method name.

    Raises
    ------
    ConfigError
        If a value has the wrong type or is out of range; names the run-config key.
    """

    task: TaskConfig = field(default_factory=TaskConfig)
    strategy: str = "fedpcd"
    compare_with: str = ""
    num_server_rounds: int = 60
    fraction_train: float = 0.1
    evaluate_every: int = 1
    evaluation: str = "auto"
    round_timeout: float = 3600.0
    min_nodes: int = 2
    wait_for_nodes: float = 120.0
    results_dir: str = ""
    run_name: str = ""
    checkpoint_every: int = 1
    checkpoint_keep: int = 2
    resume: str = ""
    min_replies: int = 1
    max_skipped_rounds: int = 3
    norm_screen: float = 10.0
    examples_screen: float = 1000.0
    hyper_parameters: dict[str, dict[str, Any]] = field(default_factory=lambda: _hyper_parameters({}))

    def __post_init__(self) -> None:
        """Check every field's type, then its range."""
        for name, kind in _own_fields().items():
            object.__setattr__(self, name, _typed(_key(name), getattr(self, name), kind))
        _require_choice("strategy", self.strategy, METHODS)
        for name in self.order:
            expected = f"names out of {_listed(METHODS)}{_suggestion(name, METHODS)}"
            _require(name in METHODS, "compare-with", self.compare_with, expected)
        _require_choice("evaluation", self.evaluation, EVALUATIONS)
        positive = ("num_server_rounds", "evaluate_every", "min_nodes", "checkpoint_keep", "min_replies")
        for name in (*positive, "max_skipped_rounds"):
            _require(getattr(self, name) >= 1, _key(name), getattr(self, name), "an integer >= 1")
        _require(0 < self.fraction_train <= 1, "fraction-train", self.fraction_train, "a number in (0, 1]")
        _require(self.round_timeout > 0, "round-timeout", self.round_timeout, "seconds > 0")
        for name, meaning in (
            ("wait_for_nodes", "seconds >= 0"),
            ("checkpoint_every", "an integer >= 0, 0 for none"),
            ("norm_screen", "a number >= 0, 0 for off"),
            ("examples_screen", "a number >= 0, 0 for off"),
        ):
            _require(getattr(self, name) >= 0, _key(name), getattr(self, name), meaning)
        _check_folder("results-dir", self.results_dir, "'' for ~/fedpcd-results")
        _check_folder("resume", self.resume, "'' to start a new run")
        self.task.learning_rate(self.num_server_rounds)  # raises if it has decayed to zero by then

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return all run-config keys: the task's, the server's own and the methods' hyper-parameters."""
        own = tuple(_key(name) for name in _own_fields())
        methods = (_key(name) for method in METHODS.values() for name in _field_types(method.rule_class))
        return tuple(dict.fromkeys((*TaskConfig.keys(), *own, *methods)))

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> ServerConfig:
        """Read a run config; absent keys take their default.

        Parameters
        ----------
        run_config : mapping
            Flower's run config (``context.run_config``).

        Returns
        -------
        ServerConfig
            The checked settings.

        Raises
        ------
        ConfigError
            If a key is unknown (the nearest known one is suggested), or a value has the wrong type or is out
            of range.
        """
        _check_keys(run_config, cls.keys())
        for key, choices in _TASK_CHOICES.items():
            if isinstance(run_config.get(key), str):
                _require_choice(key, run_config[key], choices)
        return cls(
            task=TaskConfig.from_run_config(run_config),
            hyper_parameters=_hyper_parameters(run_config),
            **{name: run_config[_key(name)] for name in _own_fields() if _key(name) in run_config},
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The strategies in the order in which they run: those compared with first, each once."""
        compared = self.compare_with.split(",") if self.compare_with.strip() else []
        return tuple(dict.fromkeys((*(name.strip() for name in compared), self.strategy)))

    @property
    def results_path(self) -> Path:
        """The folder of all runs, absolute."""
        return Path(self.results_dir or _DEFAULT_RESULTS).expanduser()

    def resolved(self) -> dict[str, bool | int | float | str]:
        """Return the value of every run-config key, defaults included.

        Returns
        -------
        dict
            In the order of `keys`; a run config that repeats this run's settings.
        """
        values = {_key(name): value for name, value in vars(self.task).items()}
        values |= {_key(name): getattr(self, name) for name in _own_fields()}
        for hyper_parameters in self.hyper_parameters.values():
            values |= {_key(name): value for name, value in hyper_parameters.items()}
        return {key: values[key] for key in self.keys()}


def _own_fields() -> dict[str, type]:
    others = ("task", "hyper_parameters")
    return {name: kind for name, kind in _field_types(ServerConfig).items() if name not in others}


def _field_types(kind: type) -> dict[str, type]:
    """Return the fields of a dataclass with their types."""
    hints = typing.get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(kind)}


def _hyper_parameters(run_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read every method's hyper-parameters, and let its rule check them."""
    return {name: _of_rule(method.rule_class, run_config) for name, method in METHODS.items()}


def _of_rule(rule_class: type, run_config: Mapping[str, Any]) -> dict[str, Any]:
    types = _field_types(rule_class)
    given = {
        name: _typed(_key(name), run_config[_key(name)], kind)
        for name, kind in types.items()
        if _key(name) in run_config
    }
    try:
        rule = rule_class(**given)
    except ValueError as error:
        raise ConfigError(_in_keys(str(error), given)) from error
    return {name: getattr(rule, name) for name in types}


def _in_keys(message: str, given: Mapping[str, Any]) -> str:
    """Reword a rule's complaint, which speaks of fields, in run-config keys with their values."""
    for name, value in given.items():
        expected = message.removeprefix(f"{name} must be ").removesuffix(f", got {value!r}")
        if message == f"{name} must be {expected}, got {value!r}":
            return f"{_key(name)}={value!r} is not allowed: use {expected}"
    named = [name for name in given if re.search(rf"\b{name}\b", message)] or list(given)
    for name in given:
        message = re.sub(rf"\b{name}\b", _key(name), message)
    return ", ".join(f"{_key(name)}={given[name]!r}" for name in named) + f" is not allowed: {message}"


def _check_keys(run_config: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = [key for key in run_config if key not in known]
    if not unknown:
        return
    hints = []
    for key in unknown:
        near = difflib.get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.0)
        hints.append(f"{key!r} (did you mean {near[0]!r}?)")
    raise ConfigError(f"unknown run-config key{'s' if len(unknown) > 1 else ''}: {', '.join(hints)}")


def _typed(key: str, value: object, kind: type) -> Any:
    """Return the value in the expected type, or raise; the only conversion is from int to float."""
    if kind is float and type(value) is int and abs(value) <= 2**1023:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{key}={value!r} is not allowed: use {_KINDS[kind]}")
    return value


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r} is not allowed: use {expected}")


def _require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    _require(value in choices, key, value, f"one of {_listed(choices)}{_suggestion(value, choices)}")


def _suggestion(value: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(value.lower(), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_folder(key: str, value: str, otherwise: str) -> None:
    absolute = not value or Path(value).is_absolute() or value == "~" or value.startswith("~/")
    _require(
        absolute,
        key,
        value,
        f"an absolute path, one that starts with ~/, or {otherwise}: a relative one would lie in the folder where "
        "Flower's SuperLink was started, not in yours",
    )


def _key(name: str) -> str:
    return name.replace("_", "-")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
