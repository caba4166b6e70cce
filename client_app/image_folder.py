"""Own labelled images: ``<folder>/train/<class>/*`` and ``<folder>/test/<class>/*``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from client_app.data_sources import DataError, DataNotFoundError, Split

EXTENSIONS: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Ends of the names of images, in capitals too; other files are left alone."""

SPLITS: Final = ("train", "test")


def read(folder: Path, classes: Sequence[str], shape: tuple[int, int, int]) -> tuple[Split, Split]:
    """Decode all images of a folder, scaled so that the shorter side fits and cropped to the centre.

    Parameters
    ----------
    folder : Path
        Holds ``train`` and ``test``, each with one folder per class, which may have folders in it; names that start
        with a dot are left alone.
    classes : sequence of str
        Names of the classes: the label of an image is its class's position. Some may be absent.
    shape : tuple of int
        Channels (1: grey, or 3) and twice the side in pixels.

    Returns
    -------
    tuple of Split
        Training and test examples, ordered by class name and file name.

    Raises
    ------
    DataNotFoundError
        If ``train`` or ``test`` is missing or holds no image.
    DataError
        If a class folder is unknown or empty, or a file is no readable image; names it.
    """
    train, test = (_decode(_list(folder / split, classes), shape) for split in SPLITS)
    return train, test


def _list(folder: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Return path and label of every image."""
    from torchvision.datasets.folder import make_dataset  # imported here: it takes seconds

    expected = f"expected {folder}/<class>/*{', *'.join(EXTENSIONS[:2])} and so on, classes: {', '.join(classes)}"
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}: {expected}")
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for name in present:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=1)
            raise DataError(
                f"{folder / name} is the folder of a class that image-classes={','.join(classes)!r} does not name"
                + (f" (did you mean {near[0]!r}?)" if near else "")
                + ": rename or remove the folder, or add the class to image-classes for all sites"
            )
    if not present:
        raise DataNotFoundError(f"{folder} holds no folder of a class: {expected}")
    labels = {name: label for label, name in enumerate(classes) if name in present}
    found: list[tuple[str, int]] = make_dataset(str(folder), labels, EXTENSIONS, allow_empty=True)
    # What file managers and notebooks put beside images: ._x.png, .thumbnails/, .ipynb_checkpoints/.
    found = [(path, label) for path, label in found if not _is_hidden(Path(path).relative_to(folder))]
    missing = set(labels.values()) - {label for _, label in found}
    if missing:
        raise DataError(
            f"{folder / classes[min(missing)]} holds no image ({', '.join(EXTENSIONS)}): add some, or remove the "
            "folder if the site has none of this class"
        )
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _decode(examples: list[tuple[str, int]], shape: tuple[int, int, int]) -> Split:
    from torchvision import transforms

    channels, size, _ = shape
    fit = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size)])
    load = partial(_load, fit=fit, mode="L" if channels == 1 else "RGB")
    images = np.empty((len(examples), *shape), dtype=np.uint8)
    with ThreadPoolExecutor() as pool:
        for index, pixels in enumerate(pool.map(load, (path for path, _ in examples))):
            images[index] = pixels
    return Split(images, np.array([label for _, label in examples], dtype=np.int64))


def _load(path: str, fit: Any, mode: str) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut off all brighter pixels instead of scaling them
                raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}): convert it")
            upright = ImageOps.exif_transpose(image).convert(mode)
        pixels = np.asarray(fit(upright))
    except Exception as error:  # Pillow raises whatever a damaged file makes it stumble over
        raise DataError(f"{path} cannot be used as an image ({error}): replace or remove it") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
