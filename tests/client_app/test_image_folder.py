from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from PIL import Image

from client_app import client, data, image_folder
from client_app.app import app as client_app
from client_app.config import ConfigError, TaskConfig
from client_app.data import load_dataset
from client_app.data_sources import DataError, DataNotFoundError
from client_app.partition import load_partition
from server_app.experiment import run_experiment
from server_app.report import make_console
from strategies import RosterError
from strategies.inprocess import InProcessGrid

CLASSES = ("red", "green", "blue")
RUN: dict[str, Any] = {
    "dataset": "image-folder",
    "image-classes": "red,green,blue",
    "image-size": 16,
    "local-learning-rate": 0.1,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep decoded images out of the user's home folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for split in ("train", "test"):
        write_images(folder / split, {"red": 3, "green": 2, "blue": 1})
    return folder


def write_images(folder: Path, counts: dict[str, int], size: tuple[int, int] = (20, 24), end: str = "png") -> None:
    """Write noisy images in each of which its class's colour is the brightest."""
    rng = np.random.default_rng(len(str(folder)))
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            pixels = rng.integers(0, 80, (size[1], size[0], 3), dtype=np.uint8)
            pixels[:, :, CLASSES.index(name)] += np.uint8(150)
            Image.fromarray(pixels).save(folder / name / f"{index}.{end}")


def task(folder: Path, **changes: Any) -> TaskConfig:
    return TaskConfig.from_run_config({**RUN, "data-dir": str(folder), **changes})


def context(node_config: dict[str, Any], **run_config: Any) -> Context:
    return Context(1, 5, {"client-id": "site-a", **node_config}, RecordDict(), {**RUN, **run_config})


def test_labels_follow_image_classes_and_not_the_alphabet(root: Path) -> None:
    dataset = load_dataset(task(root))
    assert torch.bincount(dataset.train_labels).tolist() == [3, 2, 1]
    brightest = dataset.train_images.double().mean(dim=(2, 3)).argmax(dim=1)
    assert torch.equal(brightest, dataset.train_labels)
    assert (dataset.num_classes, dataset.train_images.shape) == (3, (6, 3, 16, 16))


@pytest.mark.parametrize("end", ["png", "jpg", "JPEG", "webp", "bmp", "tif"])
def test_the_usual_formats_are_read(tmp_path: Path, end: str) -> None:
    for split in ("train", "test"):
        write_images(tmp_path / split, {"red": 1}, end=end)
    assert load_dataset(task(tmp_path)).train_labels.tolist() == [0]


def test_images_in_nested_folders_count_and_other_files_do_not(root: Path) -> None:
    write_images(root / "train" / "red" / "2026", {"red": 1})
    (root / "train" / "red" / "notes.txt").write_text("not an image")
    (root / "train" / ".thumbnails").mkdir()
    # What a file manager, a notebook and a copy from a Mac leave: a picture nobody chose, and a file that is none.
    for hidden in (".thumbnails", ".ipynb_checkpoints"):
        write_images(root / "train" / "red" / hidden, {"red": 1})
    (root / "train" / "red" / "._a.png").write_bytes(b"Mac OS X")
    assert len(load_dataset(task(root)).train_labels) == 7


def test_the_shorter_side_is_scaled_and_the_centre_is_kept(tmp_path: Path) -> None:
    pixels = np.zeros((32, 96, 3), np.uint8)
    pixels[:, 32:64] = 200  # the middle third of a wide image is all that is left
    for split in ("train", "test"):
        (tmp_path / split / "red").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / split / "red" / "a.png")
    image = load_dataset(task(tmp_path)).train_images[0]
    assert image.shape == (3, 16, 16)
    assert image[:, :, 2:-2].min() == 200


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    for split in ("train", "test"):
        (tmp_path / split / "red").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / split / "red" / "a.png", exif=turned)
    image = load_dataset(task(tmp_path)).train_images[0]
    assert (int(image[:, :8].max()), int(image[:, 8:].min())) == (0, 255)


def test_grey_images_have_one_channel_and_fixed_normalisation(root: Path) -> None:
    dataset = load_dataset(task(root, **{"image-channels": 1}))
    assert dataset.train_images.shape == (6, 1, 16, 16)
    extremes = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    assert dataset.normalise(extremes).flatten().tolist() == [-1.0, 1.0]


def test_a_site_may_lack_classes(root: Path) -> None:
    for split in ("train", "test"):
        for file in (root / split / "green").iterdir():
            file.unlink()
        (root / split / "green").rmdir()
    assert sorted(set(load_dataset(task(root)).train_labels.tolist())) == [0, 2]


def test_a_folder_of_an_unknown_class_is_an_error_that_names_folder_key_and_likely_name(root: Path) -> None:
    (root / "test" / "Green").mkdir()
    with pytest.raises(DataError, match=r"/test/Green is the folder .*image-classes='red,green,blue'.*mean 'green'"):
        load_dataset(task(root))


def test_an_empty_class_folder_is_an_error_that_names_it(root: Path) -> None:
    (root / "train" / "blue" / "0.png").unlink()
    with pytest.raises(DataError, match=r"/train/blue holds no image .*or remove the folder"):
        load_dataset(task(root))


def test_missing_test_images_are_an_error_that_says_what_is_expected(root: Path) -> None:
    for name in CLASSES:
        for file in (root / "test" / name).iterdir():
            file.unlink()
        (root / "test" / name).rmdir()
    with pytest.raises(DataNotFoundError, match=r"/test holds no folder of a class: expected .*/test/<class>/\*\.png"):
        load_dataset(task(root))
    (root / "test").rmdir()
    with pytest.raises(DataNotFoundError, match=r"there is no folder .*/test: expected .*classes: red, green, blue"):
        load_dataset(task(root))


def test_a_damaged_image_is_an_error_that_names_the_file(root: Path) -> None:
    file = root / "train" / "red" / "1.png"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{file} cannot be used as an image \("):
        load_dataset(task(root))


def test_a_link_to_an_image_that_is_gone_is_an_error_that_names_it(root: Path) -> None:
    file = root / "train" / "red" / "7.png"
    file.symlink_to(root / "gone.png")
    with pytest.raises(DataError, match=rf"{file} cannot be used as an image \("):
        load_dataset(task(root))


def test_pixels_of_16_bits_are_refused_and_not_cut_off(root: Path) -> None:
    file = root / "train" / "red" / "1.png"
    Image.fromarray(np.full((20, 20), 3000, np.uint16)).save(file)
    with pytest.raises(DataError, match=rf"{file} .*more than 8 bits"):
        load_dataset(task(root))


def test_a_pooled_folder_is_divided_among_the_clients(root: Path) -> None:
    partition = load_partition(task(root, **{"num-clients": 3, "partition": "iid"}))
    assert sorted(np.concatenate(partition.train).tolist()) == list(range(6))
    with pytest.raises(ConfigError, match="data-dir='' is not allowed with dataset='image-folder'"):
        load_dataset(TaskConfig.from_run_config(RUN))


def test_all_data_below_data_root_are_the_clients(root: Path) -> None:
    where = context({"data-root": str(root)})
    assert client.describe_node(where).partition_id is None
    result = client.evaluate_client(where, client.Order("site-a", 1), client.initial_state(where))
    assert result.num_examples == 6


def test_with_a_partition_id_only_that_part_of_data_root_is_the_clients(root: Path) -> None:
    where = context({"data-root": str(root), "partition-id": 1}, **{"num-clients": 2, "partition": "iid"})
    count, _ = client.training_loss(where, client.Order("site-a", 1), client.initial_state(where))
    assert count == 3


def test_a_data_root_that_does_not_exist_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data-root='.*/mistyped' does not exist"):
        client.describe_node(context({"data-root": str(tmp_path / "mistyped")}))


# ---- decoded images


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a new process that must not decode."""
    data._load.cache_clear()
    monkeypatch.setattr(image_folder, "read", lambda *_: pytest.fail("decoded again"))


def test_a_new_process_takes_decoded_images_from_the_state_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    node = {"data-root": str(root), "state-dir": str(tmp_path / "state")}
    first = load_dataset(client.task_of(context(node)))
    forbid_decoding(monkeypatch)
    again = load_dataset(client.task_of(context(node)))
    assert torch.equal(first.train_images, again.train_images)
    assert torch.equal(first.test_labels, again.test_labels)
    (file,) = (tmp_path / "state" / "decoded").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(home.iterdir()) == []


def test_without_a_state_folder_decoded_images_are_in_the_cache(root: Path, home: Path) -> None:
    load_dataset(client.task_of(context({"data-root": str(root)})))
    assert len(list((home / ".cache" / "fedpcd" / "decoded").iterdir())) == 1


@pytest.mark.parametrize("change", ["content", "new file", "renamed", "new class folder"])
def test_changed_images_are_decoded_again(root: Path, change: str) -> None:
    load_dataset(task(root))
    file = root / "train" / "red" / "1.png"
    if change == "content":
        Image.new("RGB", (20, 24), "white").save(file)
        os.utime(file, (1, 1))
    elif change == "new file":
        Image.new("RGB", (20, 24), "white").save(file.with_name("7.png"))
    elif change == "renamed":
        file.rename(file.with_name("9.png"))
    else:
        (root / "train" / "violet").mkdir()
    data._load.cache_clear()
    if change == "new class folder":
        with pytest.raises(DataError, match="violet"):
            load_dataset(task(root))
        return
    images = load_dataset(task(root)).train_images
    assert len(images) == (7 if change == "new file" else 6)
    assert bool((images == 255).all(dim=(1, 2, 3)).any()) == (change != "renamed")


def test_other_settings_have_a_cache_of_their_own(root: Path, home: Path) -> None:
    load_dataset(task(root))
    assert (
        load_dataset(task(root, **{"image-classes": "blue,green,red"})).train_labels.tolist()
        != load_dataset(task(root)).train_labels.tolist()
    )
    assert load_dataset(task(root, **{"image-size": 8})).train_images.shape[-1] == 8
    assert len(list((home / ".cache" / "fedpcd" / "decoded").iterdir())) == 3


def test_a_damaged_cache_is_replaced(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset(task(root))
    (file,) = (home / ".cache" / "fedpcd" / "decoded").iterdir()
    file.write_bytes(file.read_bytes()[:200])
    data._load.cache_clear()
    assert torch.equal(load_dataset(task(root)).train_images, first.train_images)
    forbid_decoding(monkeypatch)
    assert torch.equal(load_dataset(task(root)).train_images, first.train_images)


def test_a_state_folder_that_cannot_be_written_costs_time_only(root: Path) -> None:
    # A folder below a file cannot be made, not even by root.
    node = {"data-root": str(root), "state-dir": str(root / "train" / "red" / "0.png")}
    assert len(load_dataset(client.task_of(context(node))).train_labels) == 6


# ---- federations of sites with images of their own


def federation(tmp_path: Path) -> list[dict[str, Any]]:
    """Three sites with different numbers of images of different sizes; the second one has nothing blue."""
    counts = {"site-a": (9, 7, 8), "site-b": (20, 12, 0), "site-c": (4, 5, 6)}
    sizes = {"site-a": (20, 24), "site-b": (64, 40), "site-c": (17, 90)}
    for site, numbers in counts.items():
        for split in ("train", "test"):
            of_class = {name: number for name, number in zip(CLASSES, numbers, strict=True) if number}
            write_images(tmp_path / site / split, of_class, sizes[site], "jpg" if site == "site-b" else "png")
    return [{"client-id": site, "data-root": str(tmp_path / site)} for site in counts]


def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        **RUN,
        "num-server-rounds": 3,
        "fraction-train": 1.0,
        "local-epochs": 5,
        "results-dir": str(tmp_path / "results"),
        "run-name": "run",
        "wait-for-nodes": 30.0,
    }


def run(tmp_path: Path, nodes: list[dict[str, Any]], **changes: Any) -> Path:
    run_config = {**settings(tmp_path), **changes}
    grid = InProcessGrid(client_app, run_config=run_config, node_configs=nodes)
    run_experiment(grid, run_config, make_console(io.StringIO()))
    return tmp_path / "results" / "run" / "fedpcd"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_three_sites_with_their_own_images_train_and_evaluate_together(tmp_path: Path) -> None:
    folder = run(tmp_path, federation(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    assert (config["hosting"], config["evaluation"]) == ("own", "federated")
    final = {row["client_id"]: row for row in rows(folder) if row["round"] == "3"}
    assert {client: int(row["num_examples"]) for client, row in final.items()} == {
        "site-a": 24,
        "site-b": 32,
        "site-c": 15,
    }
    assert min(float(row["accuracy"]) for row in final.values()) > 0.9
    assert (folder / "rejections.jsonl").read_text() == ""


def test_a_site_with_a_broken_image_is_left_out_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    nodes = federation(tmp_path)
    (tmp_path / "site-a" / "train" / "red" / "3.png").write_text("broken")
    folder = run(tmp_path, nodes, **{"min-nodes": 2})
    config = json.loads((folder / "config.json").read_text())
    assert (config["client-ids"], config["divided"]) == (["site-b", "site-c"], False)


def test_if_the_site_is_needed_the_run_is_refused_at_once_with_the_files_name(tmp_path: Path) -> None:
    nodes = federation(tmp_path)
    file = tmp_path / "site-a" / "train" / "red" / "3.png"
    file.write_text("broken")
    with pytest.raises(RosterError, match=rf"refuse it: 2 of 3 nodes are ready(?s:.)*{file} cannot be used") as error:
        run(tmp_path, nodes, **{"min-nodes": 3, "wait-for-nodes": 600.0})
    assert "client-id='site-a': " in str(error.value)
    assert not (tmp_path / "results").exists()


def test_an_image_that_breaks_between_rounds_costs_the_client_its_replies_only(tmp_path: Path) -> None:
    nodes = federation(tmp_path)
    file = tmp_path / "site-c" / "train" / "red" / "2.png"

    def break_image(message: Any, _: Context) -> None:
        if message.metadata.message_type == "train" and message.content["config"]["server-round"] == 2:
            file.write_text("broken")
            data._load.cache_clear()

    run_config = settings(tmp_path)
    grid = InProcessGrid(client_app, run_config=run_config, node_configs=nodes, intercept=break_image)
    run_experiment(grid, run_config, make_console(io.StringIO()))
    lines = (tmp_path / "results" / "run" / "fedpcd" / "rejections.jsonl").read_text().splitlines()
    rejections = [json.loads(line) for line in lines]
    assert {(line["round"], line["client_id"]) for line in rejections} == {(2, "site-c"), (3, "site-c")}
    assert all(str(file) in line["reason"] for line in rejections)


def test_simulated_clients_share_a_pooled_folder(tmp_path: Path) -> None:
    federation(tmp_path)
    run_config = {**settings(tmp_path), "data-dir": str(tmp_path / "site-a"), "num-clients": 4, "alpha": 1.0}
    grid = InProcessGrid(client_app, 2, run_config)
    (summary,) = run_experiment(grid, run_config, make_console(io.StringIO()))
    assert summary["fairness"]["clients"] == 4
