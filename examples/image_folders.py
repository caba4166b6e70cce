"""Make image folders of several sites from Fashion-MNIST, to try out a federation of sites with data of their own.

In the project's folder: ``python -m examples.image_folders ~/sites --site site-a --site site-b``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from client_app.config import TaskConfig
from client_app.data import load_dataset
from client_app.partition import load_partition

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle-boot")


def main() -> None:
    """Read the command line and write the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the sites' folders are made")
    parser.add_argument("--site", action="append", required=True, help="name of a site; repeatable")
    parser.add_argument("--alpha", type=float, default=0.5, help="small: every site has few classes")
    parser.add_argument("--images", type=int, default=600, help="training images per site")
    options = parser.parse_args()
    task = TaskConfig(dataset="fashion-mnist", num_clients=len(options.site), alpha=options.alpha)
    partition = load_partition(task)
    for site, train, test in zip(options.site, partition.train, partition.test, strict=True):
        folder = (options.folder / site).expanduser()
        write(folder / "train", *images(task, "train", train, options.images))
        write(folder / "test", *images(task, "test", test, options.images // 5))
        print(f"{folder}: {len(list(folder.glob('train/*')))} classes")
    print(f"image-classes='{','.join(CLASSES)}'")


def images(task: TaskConfig, split: str, indices: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose images, (n, 28, 28) uint8, and their labels."""
    dataset = load_dataset(task)
    chosen = np.random.default_rng(0).choice(indices, min(number, len(indices)), replace=False)
    pixels, labels = (getattr(dataset, f"{split}_{what}").numpy()[chosen] for what in ("images", "labels"))
    return pixels[:, 0], labels


def write(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write one PNG per image into the folder of its class."""
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        target = folder / CLASSES[label] / f"{number:05d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target)


if __name__ == "__main__":
    main()
