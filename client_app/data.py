"""The data sets as tensors, loaded once per process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from client_app import data_sources
from client_app.config import ConfigError, TaskConfig


@dataclass(frozen=True)
class DatasetSpec:
    """What is known about a data set before it is loaded.

    Parameters
    ----------
    name : str
        Value of the run-config key ``dataset``.
    image_shape : tuple of int
        (channels, height, width).
    num_classes : int
        Labels are 0 .. num_classes - 1.
    white : int
        The largest pixel value; pixels are scaled to [0, 1] by it.
    mean, std : tuple of float
        Mean and standard deviation of the scaled training pixels, per channel.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    white: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


SPECS: Final[dict[str, DatasetSpec]] = {
    spec.name: spec
    for spec in (
        DatasetSpec("digits", (1, 8, 8), 10, 16, (0.3053,), (0.3760,)),
        DatasetSpec("fashion-mnist", (1, 28, 28), 10, 255, (0.2860,), (0.3530,)),
        DatasetSpec("cifar10", (3, 32, 32), 10, 255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        DatasetSpec("cifar100", (3, 32, 32), 100, 255, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    )
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set with its official split into training and test examples.

    Parameters
    ----------
    spec : DatasetSpec
        Shape, classes and normalisation.
    train_images, test_images : torch.Tensor
        uint8, (examples, channels, height, width).
    train_labels, test_labels : torch.Tensor
        int64, (examples,).
    """

    spec: DatasetSpec
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @property
    def name(self) -> str:
        """The data set's name, as in the run config."""
        return self.spec.name

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.spec.num_classes

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the scaled training pixels per channel."""
        return self.spec.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the scaled training pixels per channel."""
        return self.spec.std

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Scale pixels to [0, 1], subtract the mean and divide by the standard deviation of each channel.

        Parameters
        ----------
        images : torch.Tensor
            uint8, (examples, channels, height, width).

        Returns
        -------
        torch.Tensor
            float32, same shape.
        """
        mean = torch.tensor(self.spec.mean).view(-1, 1, 1)
        std = torch.tensor(self.spec.std).view(-1, 1, 1)
        return (images.to(torch.float32) / self.spec.white - mean) / std

    def train_examples(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised images (float32) and labels (int64) of the training examples at `indices`."""
        where = torch.from_numpy(indices)
        return self.normalise(self.train_images[where]), self.train_labels[where]

    def test_examples(self, indices: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised images (float32) and labels (int64) of the test examples at `indices`."""
        where = torch.from_numpy(indices)
        return self.normalise(self.test_images[where]), self.test_labels[where]


def load_dataset(task: TaskConfig) -> Dataset:
    """Return the task's data set; each process reads it once and keeps it.

    Parameters
    ----------
    task : TaskConfig
        ``dataset`` and ``data_dir`` are used.

    Returns
    -------
    Dataset
        All training and test examples.

    Raises
    ------
    ConfigError
        If ``data_dir`` is given but is no folder; it is not created, since a mistyped folder would be filled anew.
    DataNotFoundError
        If the files are neither there nor to be had; the text says what is expected where.
    DataError
        If files are there but damaged or of an unexpected shape.
    """
    if task.data_dir and not task.data_path.is_dir():
        fault = "is not a folder" if task.data_path.exists() else "does not exist"
        raise ConfigError(
            f"data-dir={task.data_dir!r} {fault}: create the folder, give the one that holds the data sets, or '' for "
            "~/.cache/fedpcd"
        )
    return _load(task.dataset, task.data_path)


@lru_cache(maxsize=2)
def _load(name: str, folder: Path) -> Dataset:
    spec = SPECS[name]
    train, test = data_sources.READERS[name](folder)
    for split in (train, test):
        _check(spec, split)
    return Dataset(
        spec=spec,
        train_images=torch.from_numpy(np.ascontiguousarray(train.images)),
        train_labels=torch.from_numpy(train.labels),
        test_images=torch.from_numpy(np.ascontiguousarray(test.images)),
        test_labels=torch.from_numpy(test.labels),
    )


def _check(spec: DatasetSpec, split: data_sources.Split) -> None:
    count = len(split.labels)
    if split.images.shape != (count, *spec.image_shape) or split.images.dtype != np.uint8:
        raise data_sources.DataError(
            f"{spec.name}: expected uint8 images of shape {(count, *spec.image_shape)}, found "
            f"{split.images.dtype} {split.images.shape}: the files in data-dir belong to another data set"
        )
    if not set(np.unique(split.labels)) <= set(range(spec.num_classes)):
        raise data_sources.DataError(f"{spec.name}: labels outside 0..{spec.num_classes - 1} in data-dir's files")
