from __future__ import annotations

import gzip
import hashlib
import json
import logging
import socket
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from client_app import data, data_sources
from client_app.config import ConfigError, TaskConfig
from client_app.data import load_dataset
from client_app.data_sources import DataError, DataNotFoundError, read_fashion_mnist, read_strips

needs_debian_fashion_mnist = pytest.mark.skipif(
    not (data_sources.DEBIAN_FASHION_MNIST / "train-images-idx3-ubyte.gz").exists(),
    reason="Debian's package dataset-fashion-mnist is not installed",
)
RAW = Path("FashionMNIST") / "raw"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every request to a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        use_proxy(monkeypatch, free.getsockname()[1])


def use_proxy(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib reads the environment once and keeps the result


@pytest.fixture
def no_debian_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data_sources, "DEBIAN_FASHION_MNIST", tmp_path / "no-such-package")


def write_strips(folder: Path, per_strip: int = 5) -> tuple[np.ndarray, list[int]]:
    """Write a tiny strip folder with 12 training and 6 test images of 32x32 pixels; return all pixels and labels."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (18, 32, 32, 3), dtype=np.uint8)
    labels = [index % 10 for index in range(18)]
    splits = {}
    for name, part in (("train", slice(0, 12)), ("test", slice(12, 18))):
        images = pixels[part]
        strips = []
        for start in range(0, len(images), per_strip):
            strip = images[start : start + per_strip]
            strips.append(f"{name}_{start:03}.webp")
            Image.fromarray(strip.reshape(-1, 32, 3)).save(folder / strips[-1], lossless=True, exact=True)
        digest = hashlib.sha256(images.tobytes()).hexdigest()
        splits[name] = {"n": len(images), "strips": strips, "labels": labels[part], "sha256_uint8_nhwc": digest}
    (folder / "index.json").write_text(json.dumps({"images_per_strip": per_strip, "splits": splits}))
    return pixels, labels


def test_digits_are_split_into_997_and_800_without_overlap() -> None:
    from sklearn.datasets import load_digits

    train, test = data_sources.read_digits(Path("/nowhere"))
    assert train.images.shape == (997, 1, 8, 8)
    assert test.images.shape == (800, 1, 8, 8)
    together = np.concatenate([train.images, test.images]).reshape(1797, -1)
    original = load_digits().data.astype(np.uint8)
    assert sorted(map(bytes, together)) == sorted(map(bytes, original))


def test_every_class_of_digits_has_its_share_of_the_test_examples() -> None:
    train, test = data_sources.read_digits(Path("/nowhere"))
    counts = np.bincount(test.labels)
    expected = (counts + np.bincount(train.labels)) * 800 / 1797
    assert np.abs(counts - expected).max() < 1


def test_the_split_of_digits_is_always_the_same() -> None:
    first, again = (data_sources.read_digits(Path("/nowhere"))[0] for _ in range(2))
    assert np.array_equal(first.images, again.images)
    assert np.array_equal(first.labels, again.labels)


def test_a_data_set_is_read_once_per_process() -> None:
    assert load_dataset(TaskConfig(seed=1)) is load_dataset(TaskConfig(seed=2, alpha=1.0))


def test_normalised_digits_have_mean_0_and_standard_deviation_1() -> None:
    dataset = load_dataset(TaskConfig())
    images = dataset.normalise(dataset.train_images)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_normalisation_treats_each_channel_by_its_own_constants(tmp_path: Path) -> None:
    write_strips(tmp_path / "cifar10")
    dataset = load_dataset(TaskConfig(dataset="cifar10", data_dir=str(tmp_path)))
    image = torch.full((1, 3, 32, 32), 51, dtype=torch.uint8)
    expected = [(0.2 - mean) / std for mean, std in zip(dataset.mean, dataset.std, strict=True)]
    assert dataset.normalise(image)[0, :, 5, 5].tolist() == pytest.approx(expected, rel=1e-5)


def test_examples_are_the_images_and_labels_at_the_indices() -> None:
    dataset = load_dataset(TaskConfig())
    indices = np.array([3, 900, 5])
    images, labels = dataset.train_examples(indices)
    assert torch.equal(images, dataset.normalise(dataset.train_images)[indices])
    assert labels.tolist() == dataset.train_labels[indices].tolist()
    images, labels = dataset.test_examples(indices[:1])
    assert torch.equal(images, dataset.normalise(dataset.test_images)[3:4])
    assert labels.tolist() == [int(dataset.test_labels[3])]


@needs_debian_fashion_mnist
def test_fashion_mnist_is_unpacked_from_the_debian_package_and_read_by_torchvision(
    tmp_path: Path, no_network: None
) -> None:
    dataset = load_dataset(TaskConfig(dataset="fashion-mnist", data_dir=str(tmp_path)))
    assert dataset.train_images.shape == (60_000, 1, 28, 28)
    assert dataset.test_images.shape == (10_000, 1, 28, 28)
    assert torch.bincount(dataset.train_labels).tolist() == [6000] * 10
    assert torch.bincount(dataset.test_labels).tolist() == [1000] * 10
    assert abs(float(dataset.train_images.double().mean()) / 255 - 0.28604) < 1e-5
    assert len(list((tmp_path / RAW).iterdir())) == 4


@needs_debian_fashion_mnist
def test_a_damaged_unpacked_file_is_replaced_from_the_package(tmp_path: Path, no_network: None) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    (tmp_path / RAW / "t10k-labels-idx1-ubyte").write_bytes(b"cut short")
    assert len(read_fashion_mnist(tmp_path)[1].labels) == 10_000


@needs_debian_fashion_mnist
def test_fashion_mnist_is_unpacked_from_packed_files_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    for file in data_sources.DEBIAN_FASHION_MNIST.glob("*.gz"):
        (tmp_path / RAW / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(data_sources, "DEBIAN_FASHION_MNIST", tmp_path / "no-such-package")
    assert len(read_fashion_mnist(tmp_path)[0].labels) == 60_000


@needs_debian_fashion_mnist
def test_several_readers_may_unpack_fashion_mnist_at_the_same_time(tmp_path: Path, no_network: None) -> None:
    sizes: list[int] = []
    readers = [
        threading.Thread(target=lambda: sizes.append(len(read_fashion_mnist(tmp_path)[1].labels))) for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert sizes == [10_000] * 3
    assert len(list((tmp_path / RAW).iterdir())) == 4


def test_a_packed_file_with_other_content_is_an_error_that_names_it(tmp_path: Path, no_network: None) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    file = tmp_path / RAW / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(b"other images"))
    with pytest.raises(DataError, match=f"{file}.*wrong md5"):
        read_fashion_mnist(tmp_path)


def test_a_packed_file_that_is_cut_short_is_an_error_that_names_it(tmp_path: Path, no_network: None) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    file = tmp_path / RAW / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(DataError, match=f"{file} cannot be unpacked"):
        read_fashion_mnist(tmp_path)


@pytest.mark.parametrize("dataset", ["digits", "fashion-mnist", "cifar10"])
def test_a_data_folder_that_does_not_exist_is_an_error_and_not_created(tmp_path: Path, dataset: str) -> None:
    folder = tmp_path / "mistyped"
    with pytest.raises(ConfigError, match=f"data-dir='{folder}' does not exist: create the folder, give the one"):
        load_dataset(TaskConfig(dataset=dataset, data_dir=str(folder)))
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data-dir='.*file' is not a folder"):
        load_dataset(TaskConfig(data_dir=str(tmp_path / "file")))


def test_a_data_folder_below_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="data-dir='~/data' does not exist"):
        load_dataset(TaskConfig(data_dir="~/data"))
    (tmp_path / "data").mkdir()
    assert load_dataset(TaskConfig(data_dir="~/data")).name == "digits"


def test_the_default_data_folder_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_dataset(TaskConfig()).name == "digits"
    assert list(tmp_path.iterdir()) == []


@needs_debian_fashion_mnist
def test_unpacking_fashion_mnist_is_logged_once(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, logger="flwr")
    expected = f"fashion-mnist: unpacked {data_sources.DEBIAN_FASHION_MNIST} to {tmp_path / RAW}"
    for _ in range(2):  # the second time there is nothing to unpack
        read_fashion_mnist(tmp_path)
        assert [record.getMessage() for record in caplog.records] == [expected]


def test_missing_fashion_mnist_is_an_error_that_says_what_to_do(
    tmp_path: Path, no_network: None, no_debian_package: None
) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        load_dataset(TaskConfig(dataset="fashion-mnist", data_dir=str(tmp_path)))
    text = str(caught.value)
    assert text.startswith(f"fashion-mnist is not in data-dir ({tmp_path})")
    assert "set data-dir to the folder that holds it" in text
    assert str(tmp_path / RAW) in text
    assert "train-images-idx3-ubyte" in text
    assert "apt-get install dataset-fashion-mnist" in text
    assert "dataset='digits'" in text
    assert "no network" in text


@pytest.mark.parametrize(("name", "layout"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_missing_cifar_is_an_error_that_names_both_layouts(
    tmp_path: Path, no_network: None, name: str, layout: str
) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        load_dataset(TaskConfig(dataset=name, data_dir=str(tmp_path)))
    assert str(caught.value).startswith(f"{name} is not in data-dir")
    for expected in (str(tmp_path / layout), str(tmp_path / name), "dataset='digits'"):
        assert expected in str(caught.value)


def test_a_server_that_never_answers_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_debian_package: None
) -> None:
    monkeypatch.setattr(data_sources, "_PROBE_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        use_proxy(monkeypatch, silent.getsockname()[1])
        with pytest.raises(DataNotFoundError, match=r"no answer within 0\.2 s|timed out"):
            read_fashion_mnist(tmp_path)


def test_a_download_lands_in_the_data_folder_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "_why_unreachable", lambda url: None)

    def fetch(folder: Path) -> None:
        assert socket.getdefaulttimeout() is not None
        (folder / "set").mkdir()
        (folder / "set" / "file").write_text("new")
        (folder / "archive.tar.gz").write_text("left over")

    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").write_text("damaged")
    data_sources._download("a-name", tmp_path, "http://example.invalid", fetch, ["set"], expected="a set")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert (tmp_path / "set" / "file").read_text() == "new"
    assert socket.getdefaulttimeout() is None


def test_a_download_that_breaks_off_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "_why_unreachable", lambda url: None)

    def fetch(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("connection reset")

    with pytest.raises(DataNotFoundError, match=r"connection reset.*Expected: a set"):
        data_sources._download("a-name", tmp_path, "http://example.invalid", fetch, ["set"], expected="a set")
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_cannot_be_written_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="set data-dir"):
        data_sources._write_atomically(tmp_path / "file" / "x", b"content")


def test_strips_come_back_pixel_for_pixel(tmp_path: Path) -> None:
    pixels, labels = write_strips(tmp_path / "cifar10")
    dataset = load_dataset(TaskConfig(dataset="cifar10", data_dir=str(tmp_path)))
    images = torch.cat([dataset.train_images, dataset.test_images])
    assert np.array_equal(images.numpy().transpose(0, 2, 3, 1), pixels)
    assert torch.cat([dataset.train_labels, dataset.test_labels]).tolist() == labels
    assert dataset.num_classes == 10


def test_a_changed_pixel_in_a_strip_is_noticed(tmp_path: Path) -> None:
    pixels, _ = write_strips(tmp_path / "cifar10")
    strip = pixels[:5].copy()
    strip[0, 0, 0, 0] ^= 1
    Image.fromarray(strip.reshape(-1, 32, 3)).save(tmp_path / "cifar10" / "train_000.webp", lossless=True, exact=True)
    with pytest.raises(DataError, match="sha256"):
        read_strips(tmp_path / "cifar10")


def test_a_missing_strip_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    write_strips(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "test_005.webp").unlink()
    with pytest.raises(DataError, match=f"{tmp_path / 'cifar10'}.*test_005"):
        read_strips(tmp_path / "cifar10")


@pytest.mark.parametrize("damage", ["labels", "sha256_uint8_nhwc", "strips"])
def test_an_incomplete_index_is_an_error(tmp_path: Path, damage: str) -> None:
    write_strips(tmp_path / "cifar10")
    file = tmp_path / "cifar10" / "index.json"
    index = json.loads(file.read_text())
    del index["splits"]["train"][damage]
    file.write_text(json.dumps(index))
    with pytest.raises(DataError, match=damage):
        read_strips(tmp_path / "cifar10")


def test_a_label_count_that_differs_from_the_images_is_an_error(tmp_path: Path) -> None:
    write_strips(tmp_path / "cifar10")
    file = tmp_path / "cifar10" / "index.json"
    index = json.loads(file.read_text())
    index["splits"]["test"]["labels"].pop()
    file.write_text(json.dumps(index))
    with pytest.raises(DataError, match="6 images but 5 labels"):
        read_strips(tmp_path / "cifar10")


def test_labels_outside_the_classes_are_an_error() -> None:
    split = data_sources.Split(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 10]))
    with pytest.raises(DataError, match=r"labels outside 0\.\.9"):
        data._check(data.SPECS["digits"], split)


def test_images_of_another_shape_are_an_error() -> None:
    split = data_sources.Split(np.zeros((2, 1, 9, 9), np.uint8), np.array([0, 1]))
    with pytest.raises(DataError, match=r"expected uint8 images of shape \(2, 1, 8, 8\)"):
        data._check(data.SPECS["digits"], split)
