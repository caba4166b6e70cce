"""The task's settings: data, model and local training, read from Flower's run config and checked once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

IMAGE_FOLDER: Final = "image-folder"
EMBEDDED: Final = "digits"
"""The data set that is read from no folder."""
DATASETS: Final = (EMBEDDED, "fashion-mnist", "cifar10", "cifar100", IMAGE_FOLDER)
MODELS: Final = ("auto", "mlp", "cnn", "resnet18")
PARTITIONS: Final = ("dirichlet", "iid", "shards", "dirichlet-classes", "pathological")
MAX_SEED: Final = 2**63 - 1
DEFAULT_FOLDER: Final = "~/.cache/fedpcd"
"""Where data sets and decoded images are, unless another folder is named."""

_PAPER_MODELS: Final = {"digits": "mlp", "fashion-mnist": "mlp", "cifar10": "cnn", "cifar100": "resnet18"}
_LARGEST_CNN_IMAGE: Final = 64
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")
_NODE_ONLY: Final = {"node-only": True}


class ConfigError(ValueError):
    """A setting has the wrong type or a value out of range; the text names the key, the value and the remedy."""


@dataclass(frozen=True)
class TaskConfig:
    """What is learned, from which data, and how each client trains.

    Every field but the last two is the run-config key of the same name with hyphens for underscores. An integer is
    accepted where a float is meant; a float, even an integral one, is not accepted where an integer is meant, and a
    bool is neither.

    Parameters
    ----------
    dataset : str
        ``digits``, ``fashion-mnist``, ``cifar10``, ``cifar100``, or ``image-folder``: own images in class folders.
    data_dir : str
        Folder of the data sets, divided among the clients: absolute or starting with ``~``; empty for
        ``~/.cache/fedpcd``.
    image_classes : str
        With ``image-folder``: the names of all classes, separated by commas, in the order of their labels.
    image_size : int
        With ``image-folder``: side in pixels of the square to which images are scaled and cropped, 8 to 1024.
    image_channels : int
        With ``image-folder``: 3 (colour) or 1 (grey).
    model : str
        ``auto`` (the paper's model for the data set; for an image folder the CNN up to 64 pixels, ResNet-18 above),
        ``mlp``, ``cnn`` or ``resnet18``.
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
    data_root : str
        Not a run-config key: folder of the data that are this node's own, used instead of `data_dir` unless empty.
    state_dir : str
        Not a run-config key: folder in which a deployed node keeps decoded images; empty in a simulation.

    Raises
    ------
    ConfigError
        If a value has the wrong type or is out of range.
    """

    dataset: str = EMBEDDED
    data_dir: str = ""
    image_classes: str = ""
    image_size: int = 32
    image_channels: int = 3
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
    data_root: str = dataclasses.field(default="", metadata=_NODE_ONLY)
    state_dir: str = dataclasses.field(default="", metadata=_NODE_ONLY)

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
        for name in ("data_dir", "data_root", "state_dir"):
            _check_folder(_key(name), getattr(self, name))
        if self.dataset == IMAGE_FOLDER:
            self._check_images()

    def _check_images(self) -> None:
        size, channels, names = self.image_size, self.image_channels, self.classes
        _require(8 <= size <= 1024, "image-size", size, "a number of pixels from 8 to 1024")
        _require(channels in (1, 3), "image-channels", channels, "3 for colour or 1 for grey")
        usable = all(name and not set(name) & set("/\\") and not name.startswith(".") for name in names)
        _require(
            usable and len(names) == len(set(names)) >= 2,
            "image-classes",
            self.image_classes,
            "the names of all classes, which are those of the folders below train/ and test/, separated by commas, "
            f"e.g. 'benign,malignant' (dataset={IMAGE_FOLDER!r}); their order gives the labels at every site",
        )

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return the run-config keys that this class reads."""
        return tuple(_key(field.name) for field in dataclasses.fields(cls) if not field.metadata)

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
        own = (key for key in cls.keys() if key in run_config)  # noqa: SIM118  # this class is no mapping
        return cls(**{key.replace("-", "_"): run_config[key] for key in own})

    @property
    def data_path(self) -> Path:
        """The folder of the data, absolute."""
        return Path(self.data_root or self.data_dir or DEFAULT_FOLDER).expanduser()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of an image folder's classes, in the order of their labels; empty for the other data sets."""
        if self.dataset != IMAGE_FOLDER:
            return ()
        return tuple(name.strip() for name in self.image_classes.split(","))

    @property
    def model_name(self) -> str:
        """The model's name with ``auto`` resolved."""
        if self.model != "auto":
            return self.model
        own = "cnn" if self.image_size <= _LARGEST_CNN_IMAGE else "resnet18"
        return _PAPER_MODELS.get(self.dataset, own)

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
