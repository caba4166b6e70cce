"""The task's settings: data, model and local training, read from Flower's run config and checked once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DATASETS: Final = ("digits", "fashion-mnist", "cifar10", "cifar100")
MODELS: Final = ("auto", "mlp", "cnn", "resnet18")
PARTITIONS: Final = ("dirichlet", "iid", "shards", "dirichlet-classes", "pathological")
MAX_SEED: Final = 2**63 - 1

_PAPER_MODELS: Final = {"digits": "mlp", "fashion-mnist": "mlp", "cifar10": "cnn", "cifar100": "resnet18"}
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


class ConfigError(ValueError):
    """A setting has the wrong type or a value out of range; the text names the key, the value and the remedy."""


@dataclass(frozen=True)
class TaskConfig:
    """What is learned, from which data, and how each client trains.

    Every field is the run-config key of the same name with hyphens for underscores. An integer is accepted where a
    float is meant; a float, even an integral one, is not accepted where an integer is meant, and a bool is neither.

    Parameters
    ----------
    dataset : str
        ``digits``, ``fashion-mnist``, ``cifar10`` or ``cifar100``.
    data_dir : str
        Folder of the data sets: absolute or starting with ``~``; empty for ``~/.cache/fedpcd``.
    model : str
        ``auto`` (the paper's model for the data set), ``mlp``, ``cnn`` or ``resnet18``.
    num_clients : int
        Number of clients among which the data are split, >= 1.
    partition : str
        ``dirichlet`` (label mixture per client, equal sizes), or one of flwr-datasets' partitioners: ``iid``,
        ``shards``, ``dirichlet-classes`` (each class is divided over the clients), ``pathological``.
    alpha : float
        Concentration of the Dirichlet partitions, > 0: small values give each client few classes.
    shards_per_client : int
        Shards (``shards``) or classes (``pathological``) per client, >= 1.
    test_examples_per_client : int
        Size of each client's test set; 0 for max(test examples // clients, 20).
    seed : int
        Seed of every random stream, in [0, 2^63 - 1].
    local_epochs : int
        Passes over the client's data per round, >= 1.
    batch_size : int
        Local mini-batch; 0 for the client's whole data in one step.
    local_learning_rate : float
        Local learning rate of round 1, > 0.
    local_learning_rate_decay : float
        Factor by which the local learning rate shrinks each round, in (0, 1].
    device : str
        ``cpu``, ``cuda``, ``cuda:<index>``, or ``auto`` (CUDA where there is one).
    torch_threads : int
        CPU threads of PyTorch in each worker, >= 1. The default 1 makes results independent of the machine's cores.

    Raises
    ------
    ConfigError
        If a value has the wrong type or is out of range.
    """

    dataset: str = "digits"
    data_dir: str = ""
    model: str = "auto"
    num_clients: int = 100
    partition: str = "dirichlet"
    alpha: float = 0.01
    shards_per_client: int = 2
    test_examples_per_client: int = 0
    seed: int = 0
    local_epochs: int = 1
    batch_size: int = 0
    local_learning_rate: float = 0.1
    local_learning_rate_decay: float = 1.0
    device: str = "cpu"
    torch_threads: int = 1

    def __post_init__(self) -> None:
        """Check every field's type, then its range."""
        for field in dataclasses.fields(self):
            value = _typed(_key(field.name), getattr(self, field.name), type(field.default))
            object.__setattr__(self, field.name, value)
        _one_of("dataset", self.dataset, DATASETS)
        _one_of("model", self.model, MODELS)
        _one_of("partition", self.partition, PARTITIONS)
        for name, low in _MINIMA.items():
            value = getattr(self, name)
            _require(value >= low, _key(name), value, f"an integer >= {low}")
        _require(self.seed <= MAX_SEED, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        for name in ("alpha", "local_learning_rate"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, _key(name), value, "a finite number > 0")
        decay = self.local_learning_rate_decay
        _require(0 < decay <= 1, "local-learning-rate-decay", decay, "a number in (0, 1]; 1.0 switches it off")
        _require(bool(_DEVICE.fullmatch(self.device)), "device", self.device, "auto, cpu, cuda or cuda:<index>")
        _check_folder("data-dir", self.data_dir)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return the run-config keys that this class reads."""
        return tuple(_key(field.name) for field in dataclasses.fields(cls))

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> TaskConfig:
        """Read the task's keys from a run config; keys of others are left alone, absent keys take the default.

        Parameters
        ----------
        run_config : Mapping
            Flower's run config (``context.run_config``).

        Returns
        -------
        TaskConfig
            The checked settings.

        Raises
        ------
        ConfigError
            If a value has the wrong type or is out of range.
        """
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: run_config[_key(name)] for name in names if _key(name) in run_config})

    @property
    def data_path(self) -> Path:
        """The folder of the data sets, absolute."""
        return Path(self.data_dir or "~/.cache/fedpcd").expanduser()

    @property
    def model_name(self) -> str:
        """The model's name with ``auto`` resolved to the paper's model for the data set."""
        return _PAPER_MODELS[self.dataset] if self.model == "auto" else self.model

    def learning_rate(self, server_round: int) -> float:
        """Return the local learning rate of a round.

        Parameters
        ----------
        server_round : int
            Round, counted from 1.

        Returns
        -------
        float
            ``local_learning_rate * local_learning_rate_decay ** (server_round - 1)``, > 0.

        Raises
        ------
        ConfigError
            If the rate has decayed to zero, by which no displacement could be divided.
        ValueError
            If the round is below 1.
        """
        if server_round < 1:
            raise ValueError(f"rounds are counted from 1, not {server_round}")
        rate = self.local_learning_rate * self.local_learning_rate_decay ** (server_round - 1)
        if rate == 0.0:
            raise ConfigError(
                f"local-learning-rate-decay={self.local_learning_rate_decay} makes the learning rate zero in round "
                f"{server_round}: use a factor nearer to 1 or fewer rounds"
            )
        return rate


_MINIMA: Final = {
    "num_clients": 1,
    "shards_per_client": 1,
    "test_examples_per_client": 0,
    "seed": 0,
    "local_epochs": 1,
    "batch_size": 0,
    "torch_threads": 1,
}


def _key(field_name: str) -> str:
    return field_name.replace("_", "-")


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r} is not allowed: use {expected}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, key, value, "one of " + ", ".join(allowed))


def _typed(key: str, value: object, expected: type) -> object:
    """Return the value in the expected type, or raise; the only conversion is from int to float."""
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{key} is an integer too large for a float: use a finite number") from None
    if type(value) is expected:
        return value
    hint = {str: "a quoted string", int: "an integer", float: "a number"}[expected]
    raise ConfigError(f"{key}={value!r} is of type {type(value).__name__}: use {hint}")


def _check_folder(key: str, value: str) -> None:
    """Relative folders are refused: Flower's processes run in folders that the user did not choose."""
    absolute = not value or Path(value).is_absolute() or value == "~" or value.startswith("~/")
    _require(absolute, key, value, "an absolute path, one that starts with ~/, or '' for the default")
