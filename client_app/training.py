"""Local SGD and evaluation of one model on one client's examples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from client_app.config import ConfigError

EVALUATION_BATCH: Final = 1000

TORCH_LOCK: Final = threading.RLock()
"""Held by whoever depends on torch's random state or on the process's one model: both are shared by all threads, and
Flower's legacy server calls in-process clients from several at once."""


def resolve_device(name: str) -> torch.device:
    """Return the device of the key ``device``, and make a CUDA device deterministic and as exact as a CPU.

    Parameters
    ----------
    name : str
        ``cpu``, ``cuda``, ``cuda:<index>``, or ``auto`` (CUDA where there is one).

    Returns
    -------
    torch.device
        The device, known to exist.

    Raises
    ------
    ConfigError
        If there is no such CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        available = visible_gpus()
        if (device.index or 0) >= available:
            raise ConfigError(
                f"device={name!r} is not allowed: this process sees {available} CUDA devices; use device='auto' or "
                "device='cpu', or, if the machine has one, let it be seen (CUDA_VISIBLE_DEVICES; in a simulation "
                "fedpcd run --gpus-per-client or Flower's client-resources-num-gpus)"
            )
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False  # convolutions would be exact to three digits only
    return device


def visible_gpus() -> int:
    """Return the number of CUDA devices that this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Run the body with `number` CPU threads in torch, which decides the order of its sums, and so the bits."""
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Run the body with torch's random state seeded (initial parameters, dropout), and put the old state back."""
    with TORCH_LOCK, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def train_locally(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    learning_rate: float,
    local_epochs: int,
    batch_size: int,
    rng: np.random.Generator,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    pull: Callable[[], None] | None = None,
) -> float:
    """Train a model in place by plain SGD on the cross-entropy: no momentum, no weight decay.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on the device of the examples.
    images : torch.Tensor
        float32, (examples, channels, height, width), normalised.
    labels : torch.Tensor
        int64, (examples,).
    learning_rate : float
        Step size, > 0.
    local_epochs : int
        Passes over the examples, >= 1.
    batch_size : int
        Examples per step; the last batch of a pass may be smaller. 0: all examples in one step, in the given order.
    rng : numpy.random.Generator
        Draws the order of the examples in each pass.
    transform : callable, optional
        Maps a batch's mean loss to the loss that is minimised; the returned loss is the one before.
    pull : callable, optional
        Called between a batch's gradient and the step, to add a regulariser's gradient.

    Returns
    -------
    float
        Loss at the moment each example was used, averaged over all uses. Not finite if training diverged; judging
        that is the server's business.

    Raises
    ------
    ValueError
        If there are no examples.
    """
    count = _count(labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    total = 0.0
    for _ in range(local_epochs):
        for batch in _batches(count, batch_size, rng):
            optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            objective = loss if transform is None else transform(loss)
            objective.backward()  # type: ignore[no-untyped-call, unused-ignore]
            if pull is not None:
                pull()
            optimizer.step()
            total += loss.item() * len(labels[batch])
    return total / (count * local_epochs)


def _batches(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[torch.Tensor | slice]:
    if batch_size == 0:
        yield slice(None)
        return
    order = torch.from_numpy(rng.permutation(count))
    for start in range(0, count, batch_size):
        yield order[start : start + batch_size]


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return a model's accuracy and mean loss.

    Parameters
    ----------
    model : torch.nn.Module
        The model, on the device of the examples.
    images : torch.Tensor
        float32, (examples, channels, height, width), normalised.
    labels : torch.Tensor
        int64, (examples,).

    Returns
    -------
    tuple of float
        Accuracy in [0, 1] and mean cross-entropy in nats, both averaged in float64.

    Raises
    ------
    ValueError
        If there are no examples.
    """
    correct, losses = example_metrics(model, images, labels)
    return float(correct.mean()), float(losses.mean())


def example_metrics(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return for every example whether the model is right, and its loss.

    Parameters
    ----------
    model, images, labels
        As for `evaluate`.

    Returns
    -------
    tuple of numpy.ndarray
        bool and float64 (cross-entropy in nats, from float64 logarithms), each (examples,).

    Raises
    ------
    ValueError
        If there are no examples.
    """
    _count(labels)
    model.eval()
    with torch.no_grad():
        starts = range(0, len(images), EVALUATION_BATCH)
        logits = torch.cat([model(images[start : start + EVALUATION_BATCH]) for start in starts]).double()
        losses = functional.cross_entropy(logits, labels, reduction="none")
        correct = logits.argmax(dim=1) == labels
    return correct.cpu().numpy(), losses.cpu().numpy()


def _count(labels: torch.Tensor) -> int:
    if len(labels) == 0:
        raise ValueError("there are no examples to train or to evaluate on")
    return len(labels)
