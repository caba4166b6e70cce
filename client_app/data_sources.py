"""Where the data sets come from: embedded, local files in several layouts, or a download."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray

DEBIAN_FASHION_MNIST: Path = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""

DIGITS_TEST_SIZE: Final = 800
_DIGITS_SPLIT_SEED: Final = 20_240_817
_PROBE_SECONDS: Final = 8.0
_STALL_SECONDS: Final = 20.0

_FASHION_MNIST_MD5: Final = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


class DataError(Exception):
    """Files of a data set are damaged or do not belong to it."""


class DataNotFoundError(DataError):
    """A data set is neither on this machine nor to be had; the text says what is expected where."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of one split: images uint8 (n, channels, height, width), labels int64 (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def read_digits(_folder: Path) -> tuple[Split, Split]:
    """Return scikit-learn's 1,797 digits, pixels 0..16, in a fixed stratified split of 997 and 800.

    Returns
    -------
    tuple of Split
        Training and test examples. The split never depends on a run's seed.
    """
    from sklearn.datasets import load_digits  # imported here: only this data set needs scikit-learn

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    test = _stratified_choice(labels, DIGITS_TEST_SIZE, np.random.default_rng(_DIGITS_SPLIT_SEED))
    return Split(images[~test], labels[~test]), Split(images[test], labels[test])


def _stratified_choice(labels: NDArray[np.int64], size: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mark `size` examples so that each class has its share to within one example."""
    counts = np.bincount(labels)
    exact = counts * size / counts.sum()
    share = np.floor(exact).astype(int)
    share[np.argsort(share - exact, kind="stable")[: size - share.sum()]] += 1
    chosen = np.zeros(len(labels), dtype=bool)
    for label, number in enumerate(share):
        chosen[rng.permutation(np.flatnonzero(labels == label))[:number]] = True
    return chosen


def read_fashion_mnist(folder: Path) -> tuple[Split, Split]:
    """Read Fashion-MNIST by torchvision from ``<folder>/FashionMNIST/raw``.

    Files that are missing there are unpacked from ``.gz`` files in the same folder or of the Debian package
    dataset-fashion-mnist, else downloaded. Every file's md5 is checked.

    Raises
    ------
    DataNotFoundError
        If a file is missing and cannot be downloaded.
    """
    from torchvision.datasets import FashionMNIST

    raw = folder / "FashionMNIST" / "raw"
    sources = [_provide_idx(raw, name) for name in _FASHION_MNIST_MD5]
    for source in sorted({source for source in sources if source not in (raw, None)}):
        log(INFO, "fashion-mnist: unpacked %s to %s", source, raw)
    if None in sources:
        _download(
            "fashion-mnist",
            folder,
            FashionMNIST.mirrors[0],
            lambda temporary: FashionMNIST(temporary, download=True),
            [f"FashionMNIST/raw/{name}" for name in _FASHION_MNIST_MD5],
            expected=f"the four files {', '.join(_FASHION_MNIST_MD5)} (also as .gz) in {raw}, or the Debian package "
            f"dataset-fashion-mnist (apt-get install dataset-fashion-mnist)",
        )
    splits = (FashionMNIST(folder, train=train) for train in (True, False))
    train, test = (Split(split.data.numpy()[:, None], split.targets.numpy()) for split in splits)
    return train, test


def _provide_idx(raw: Path, name: str) -> Path | None:
    """Make sure that one right idx file is in `raw`, unpacking it if need be.

    Returns the folder in which it was found, packed or not; None if there is nothing to unpack.
    """
    target = raw / name
    if target.exists() and _digest(target.read_bytes(), "md5") == _FASHION_MNIST_MD5[name]:
        return raw
    for packed in (raw / f"{name}.gz", DEBIAN_FASHION_MNIST / f"{name}.gz"):
        if packed.exists():
            content = _gunzip(packed)
            if _digest(content, "md5") != _FASHION_MNIST_MD5[name]:
                raise DataError(f"{packed} is not Fashion-MNIST's {name} (wrong md5): remove or replace it")
            _write_atomically(target, content)
            return packed.parent
    return None


def _gunzip(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked ({error}): remove or replace it") from error


def _write_atomically(target: Path, content: bytes) -> None:
    """Write by rename, so that processes which do the same at the same time never see half a file."""
    with _writing_to(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write to {folder} ({error}): set data-dir to a folder that can be written") from error


def read_cifar10(folder: Path) -> tuple[Split, Split]:
    """Read CIFAR-10: torchvision's layout or WebP strips in `folder`, else a download.

    Raises
    ------
    DataNotFoundError
        If it is not in `folder` and cannot be downloaded.
    """
    from torchvision.datasets import CIFAR10

    return _read_cifar(folder, CIFAR10, "cifar10")


def read_cifar100(folder: Path) -> tuple[Split, Split]:
    """Read CIFAR-100 (fine labels): torchvision's layout or WebP strips in `folder`, else a download.

    Raises
    ------
    DataNotFoundError
        If it is not in `folder` and cannot be downloaded.
    """
    from torchvision.datasets import CIFAR100

    return _read_cifar(folder, CIFAR100, "cifar100")


def _read_cifar(folder: Path, torchvision_class: Any, name: str) -> tuple[Split, Split]:
    found = _torchvision_cifar(folder, torchvision_class)
    if found is None and (folder / name / "index.json").exists():
        found = read_strips(folder / name)
    if found is None:
        layout = torchvision_class.base_folder
        _download(
            name,
            folder,
            torchvision_class.url,
            lambda temporary: torchvision_class(temporary, download=True),
            [layout],
            expected=f"torchvision's undamaged files in {folder / layout}, or lossless WebP strips with an index.json "
            f"in {folder / name}",
        )
        found = _torchvision_cifar(folder, torchvision_class)
    if found is None:
        raise DataError(f"{folder / torchvision_class.base_folder} is damaged (wrong md5): remove it")
    return found


def _torchvision_cifar(folder: Path, torchvision_class: Any) -> tuple[Split, Split] | None:
    try:
        splits = [torchvision_class(folder, train=train) for train in (True, False)]
    except RuntimeError:  # torchvision's word for "not there, or an md5 is wrong"
        return None
    train, test = (
        Split(np.asarray(split.data).transpose(0, 3, 1, 2), np.asarray(split.targets, dtype=np.int64))
        for split in splits
    )
    return train, test


def read_strips(folder: Path) -> tuple[Split, Split]:
    """Read a data set stored as lossless WebP strips of square RGB images, one below the other.

    ``index.json`` names for ``train`` and ``test`` the strips in order, the labels, and the sha256 of all pixels
    (uint8; examples, height, width, channels).

    Parameters
    ----------
    folder : Path
        The folder that holds ``index.json`` and the strips.

    Returns
    -------
    tuple of Split
        Training and test examples.

    Raises
    ------
    DataError
        If the index is not understood, a strip is missing or damaged, or the sha256 differs.
    """
    try:
        index = json.loads((folder / "index.json").read_text())
        entries = [index["splits"][split] for split in ("train", "test")]
        train, test = (_read_strip_split(folder, entry) for entry in entries)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}: the strips or their index.json are damaged ({type(error).__name__}: {error}): replace them"
        ) from error
    return train, test


def _read_strip_split(folder: Path, entry: dict[str, Any]) -> Split:
    from PIL import Image

    strips = []
    for name in entry["strips"]:
        with Image.open(folder / name) as image:
            pixels = np.asarray(image.convert("RGB"), dtype=np.uint8)
        strips.append(pixels.reshape(-1, pixels.shape[1], pixels.shape[1], 3))
    images = np.concatenate(strips)
    if _digest(images.tobytes(), "sha256") != entry["sha256_uint8_nhwc"]:
        raise ValueError("the sha256 of the pixels is not the index's")
    labels = np.asarray(entry["labels"], dtype=np.int64)
    if len(labels) != len(images):
        raise ValueError(f"{len(images)} images but {len(labels)} labels")
    return Split(images.transpose(0, 3, 1, 2), labels)


def _digest(content: bytes, algorithm: str) -> str:
    """Return a checksum against damage, not against forgery."""
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()


def _download(
    name: str, folder: Path, url: str, fetch: Callable[[Path], object], products: list[str], *, expected: str
) -> None:
    """Download into a temporary folder and move the products into place; never wait on a dead network."""
    reason = _why_unreachable(url)
    if reason is None:
        with _writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".download-"))
        try:
            with _socket_timeout(_STALL_SECONDS):
                fetch(temporary)
            for product in products:
                _move_into_place(temporary / product, folder / product)
            return
        except (OSError, RuntimeError) as error:
            reason = str(error)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    raise DataNotFoundError(
        f"{name} is not in data-dir ({folder}) and cannot be downloaded from {url} ({reason}). Expected: {expected}. "
        "Put it there, set data-dir to the folder that holds it, or use dataset='digits', which needs no files and no "
        "network."
    )


def _move_into_place(source: Path, target: Path) -> None:
    """Replace a file or a damaged folder by the downloaded one; another process may be doing the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and target.is_dir():
        target.rename(source.with_name(f"{target.name}.replaced"))
    source.replace(target)


def _why_unreachable(url: str) -> str | None:
    """Return why `url` does not answer within seconds, or None if it does.

    The question is asked in a thread of its own because the look-up of a name obeys no timeout.
    """
    answer: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
        except urllib.error.HTTPError:
            answer.append(None)  # a server that answers at all is reachable
        except (OSError, ValueError) as error:
            answer.append(f"no network: {error}")
        else:
            answer.append(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    return answer[0] if answer else f"no answer within {_PROBE_SECONDS:g} s"


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)


READERS: Final[dict[str, Callable[[Path], tuple[Split, Split]]]] = {
    "digits": read_digits,
    "fashion-mnist": read_fashion_mnist,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
}
