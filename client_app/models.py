"""The models: MLP, CNN and ResNet-18, all free of batch statistics."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import torch
from torch import nn

from client_app import streams
from client_app.config import TaskConfig
from client_app.data import DatasetSpec, spec_of
from client_app.training import torch_seed

_MLP_WIDTHS: Final = {"digits": (64,)}
_PAPER_MLP_WIDTHS: Final = (256, 128)
_CNN_GROUPS: Final = 8
_RESNET_GROUPS: Final = 32
_LARGEST_SMALL_STEM_IMAGE: Final = 64


def build_model(task: TaskConfig) -> nn.Module:
    """Return the task's model on the CPU with the initial parameters of the task's seed.

    The parameters depend on ``seed``, ``dataset`` with an image folder's settings, and ``model`` only; torch's global
    random state is neither used nor changed.

    Parameters
    ----------
    task : TaskConfig
        The task.

    Returns
    -------
    torch.nn.Module
        Maps normalised images, float32 (examples, channels, height, width), to logits (examples, classes).
    """
    sequence = np.random.SeedSequence([task.seed, streams.INITIAL_PARAMETERS])
    with torch_seed(streams.integer_seed(sequence), torch.device("cpu")):
        return _BUILDERS[task.model_name](spec_of(task))


def _mlp(spec: DatasetSpec) -> nn.Module:
    """Build a perceptron with ReLU: the paper's two hidden layers of 256 and 128, or one of 64 for digits."""
    channels, height, width = spec.image_shape
    widths = [channels * height * width, *_MLP_WIDTHS.get(spec.name, _PAPER_MLP_WIDTHS)]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], spec.num_classes))


def _cnn(spec: DatasetSpec) -> nn.Module:
    """Build the paper's CNN: three convolutions with GroupNorm, ReLU and max-pooling, then one hidden layer of 256.

    The paper does not say how many groups it uses; here it is 8. Of images from 64 pixels on the hidden layer sees
    averages, so that it does not grow with the image.
    """
    channels, height, _ = spec.image_shape
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
            nn.GroupNorm(_CNN_GROUPS, outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    side, pooling = height // 8, max(1, height // 8 // 4)
    if pooling > 1:
        layers.append(nn.AvgPool2d(pooling))  # the adaptive one has no deterministic gradient on CUDA
    features = 128 * (side // pooling) ** 2
    head = [nn.Flatten(), nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, spec.num_classes)]
    return nn.Sequential(*layers, *head)


def _resnet18(spec: DatasetSpec) -> nn.Module:
    """Build torchvision's ResNet-18 with GroupNorm (32 groups).

    Up to 64 pixels its stem is a 3x3 convolution of stride 1 without max-pooling, above torchvision's own.
    """
    from torchvision.models import resnet18  # imported here: it takes seconds, for every message of a deployed client

    model: nn.Module = resnet18(
        num_classes=spec.num_classes, norm_layer=lambda width: nn.GroupNorm(_RESNET_GROUPS, width)
    )
    channels, size, _ = spec.image_shape
    if size <= _LARGEST_SMALL_STEM_IMAGE:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    return model


_BUILDERS: Final = {"mlp": _mlp, "cnn": _cnn, "resnet18": _resnet18}
