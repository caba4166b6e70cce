from __future__ import annotations

import pytest
import torch
from torch import nn

from client_app.config import DATASETS, TaskConfig
from client_app.data import spec_of
from client_app.models import build_model

IMAGES = {"image_classes": "a,b,c"}
PUBLIC = [dataset for dataset in DATASETS if dataset != "image-folder"]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dataset", "parameters"),
    [
        ("digits", 64 * 64 + 64 + 64 * 10 + 10),
        ("fashion-mnist", 235_146),
        ("cifar10", 620_810),
        ("cifar100", 11_220_132),
    ],
)
def test_the_papers_models_have_the_published_sizes(dataset: str, parameters: int) -> None:
    assert count(build_model(TaskConfig(dataset=dataset))) == parameters


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet18"])
def test_every_model_fits_every_data_set(dataset: str, model: str) -> None:
    task = TaskConfig(dataset=dataset, model=model, **IMAGES)
    logits = build_model(task)(torch.zeros(2, *spec_of(task).image_shape))
    assert logits.shape == (2, spec_of(task).num_classes)


@pytest.mark.parametrize("size", [8, 13, 28, 31, 33, 63, 64, 65, 100, 224])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet18", "auto"])
def test_every_model_fits_images_of_any_size(size: int, channels: int, model: str) -> None:
    task = TaskConfig(dataset="image-folder", model=model, image_size=size, image_channels=channels, **IMAGES)
    logits = build_model(task)(torch.zeros(1, channels, size, size))
    assert logits.shape == (1, 3)
    assert bool(torch.isfinite(logits).all())


def test_the_cnn_does_not_grow_with_the_image() -> None:
    sizes = [
        count(build_model(TaskConfig(dataset="image-folder", model="cnn", image_size=size, **IMAGES)))
        for size in (32, 64, 224, 1024)
    ]
    assert max(sizes) < 4 * sizes[0]


@pytest.mark.parametrize("size", [64, 65])
def test_resnet18_has_torchvisions_stem_for_images_above_64_pixels(size: int) -> None:
    model = build_model(TaskConfig(dataset="image-folder", model="resnet18", image_size=size, **IMAGES))
    assert model.conv1.kernel_size == ((3, 3) if size == 64 else (7, 7))
    assert isinstance(model.maxpool, nn.Identity if size == 64 else nn.MaxPool2d)


@pytest.mark.parametrize("dataset", PUBLIC)
def test_initial_parameters_depend_on_the_seed_alone(dataset: str) -> None:
    torch.manual_seed(1)
    first = build_model(TaskConfig(dataset=dataset, seed=5)).state_dict()
    torch.manual_seed(2)
    again = build_model(TaskConfig(dataset=dataset, seed=5, num_clients=7, batch_size=3)).state_dict()
    other = build_model(TaskConfig(dataset=dataset, seed=6)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_building_a_model_leaves_torchs_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    build_model(TaskConfig())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dataset", DATASETS)
def test_no_model_keeps_batch_statistics(dataset: str) -> None:
    model = build_model(TaskConfig(dataset=dataset, **IMAGES))
    assert list(model.buffers()) == []
    assert len(model.state_dict()) == len(list(model.parameters()))


def test_resnet18_keeps_the_resolution_of_small_images_in_its_stem() -> None:
    model = build_model(TaskConfig(dataset="cifar100"))
    stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    assert stem(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    assert {type(m) for m in model.modules() if "Norm" in type(m).__name__} == {nn.GroupNorm}
