"""The data sets as tensors, loaded once per process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from client_app import data_sources, decoded, image_folder
from client_app.config import DEFAULT_FOLDER, IMAGE_FOLDER, ConfigError, TaskConfig
from client_app.data_sources import Split


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
        What is subtracted from the scaled pixels of each channel, and by what the difference is divided: mean and
        standard deviation of the training pixels, or 0.5 where nobody knows these of all sites.
    classes : tuple of str
        Names of an image folder's classes, by label.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    white: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()


SPECS: Final[dict[str, DatasetSpec]] = {
    spec.name: spec
    for spec in (
        DatasetSpec("digits", (1, 8, 8), 10, 16, (0.3053,), (0.3760,)),
        DatasetSpec("fashion-mnist", (1, 28, 28), 10, 255, (0.2860,), (0.3530,)),
        DatasetSpec("cifar10", (3, 32, 32), 10, 255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        DatasetSpec("cifar100", (3, 32, 32), 100, 255, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    )
}


_SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "digits": (),
    "fashion-mnist": ("FashionMNIST/raw",),
    "cifar10": ("cifar-10-batches-py", "cifar10"),
    "cifar100": ("cifar-100-python", "cifar100"),
    IMAGE_FOLDER: image_folder.SPLITS,
}
"""Where the files of each data set lie below its folder."""


def spec_of(task: TaskConfig) -> DatasetSpec:
    """Return what the task says about its data set; no data are loaded.

    Parameters
    ----------
    task : TaskConfig
        ``dataset`` and, of an image folder, classes, size and channels are used.

    Returns
    -------
    DatasetSpec
        The same on every machine.
    """
    if task.dataset != IMAGE_FOLDER:
        return SPECS[task.dataset]
    shape = (task.image_channels, task.image_size, task.image_size)
    middle = (0.5,) * task.image_channels
    return DatasetSpec(IMAGE_FOLDER, shape, len(task.classes), 255, middle, middle, task.classes)


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
        """What is subtracted from the scaled pixels, per channel."""
        return self.spec.mean

    @property
    def std(self) -> tuple[float, ...]:
        """By what the difference is divided, per channel."""
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
        return images.to(torch.float32).div_(self.spec.white).sub_(mean).div_(std)  # in place: images may fill memory

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
        The data set's settings, ``data_dir``, ``data_root`` and ``state_dir`` are used.

    Returns
    -------
    Dataset
        All training and test examples.

    Raises
    ------
    ConfigError
        If ``data_dir`` or ``data_root`` is given but is no folder; it is not created, since a mistyped folder would
        be filled anew. Of image folders one of the two must be given.
    DataNotFoundError
        If the files are neither there nor to be had; the text says what is expected where.
    DataError
        If files are there but damaged or of an unexpected shape.
    """
    _check_folder(task)
    # A simulation's processes live long enough to read a public data set once; decoding own images may take minutes.
    keeps_decoded = task.state_dir or (DEFAULT_FOLDER if task.dataset == IMAGE_FOLDER else "")
    cache = Path(keeps_decoded).expanduser() / "decoded" if keeps_decoded else None
    return _load(spec_of(task), task.data_path, cache)


def _check_folder(task: TaskConfig) -> None:
    key, value = ("data-root", task.data_root) if task.data_root else ("data-dir", task.data_dir)
    if not value and task.dataset == IMAGE_FOLDER:
        raise ConfigError(
            f"data-dir='' is not allowed with dataset={IMAGE_FOLDER!r}: use the folder that holds train/ and test/; a "
            "site with images of its own sets data-root in its node config instead"
        )
    if value and not task.data_path.is_dir():
        fault = "is not a folder" if task.data_path.exists() else "does not exist"
        default = "" if task.dataset == IMAGE_FOLDER or task.data_root else f" sets, or '' for {DEFAULT_FOLDER}"
        give = "give the one that holds the data" if default else "or give the one that holds the data"
        raise ConfigError(f"{key}={value!r} {fault}: create the folder, {give}{default}")


@lru_cache(maxsize=4)
def _load(spec: DatasetSpec, folder: Path, cache: Path | None) -> Dataset:
    sources = [folder / name for name in _SOURCES[spec.name]]
    train, test = decoded.cached(cache, f"{folder} {spec}", sources, lambda: _read(spec, folder))
    for split in (train, test):
        _check(spec, split)
    return Dataset(
        spec=spec,
        train_images=torch.from_numpy(np.ascontiguousarray(train.images)),
        train_labels=torch.from_numpy(train.labels),
        test_images=torch.from_numpy(np.ascontiguousarray(test.images)),
        test_labels=torch.from_numpy(test.labels),
    )


def _read(spec: DatasetSpec, folder: Path) -> tuple[Split, Split]:
    if spec.name == IMAGE_FOLDER:
        return image_folder.read(folder, spec.classes, spec.image_shape)
    return data_sources.READERS[spec.name](folder)


def _check(spec: DatasetSpec, split: Split) -> None:
    count = len(split.labels)
    if split.images.shape != (count, *spec.image_shape) or split.images.dtype != np.uint8:
        raise data_sources.DataError(
            f"{spec.name}: expected uint8 images of shape {(count, *spec.image_shape)}, found "
            f"{split.images.dtype} {split.images.shape}: the files in data-dir belong to another data set"
        )
    if not set(np.unique(split.labels)) <= set(range(spec.num_classes)):
        raise data_sources.DataError(f"{spec.name}: labels outside 0..{spec.num_classes - 1} in data-dir's files")
