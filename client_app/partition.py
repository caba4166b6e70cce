"""Which examples belong to which client."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from client_app import streams
from client_app.config import ConfigError, TaskConfig
from client_app.data import load_dataset

MIN_AUTO_TEST_EXAMPLES: Final = 20
"""The automatic size of a client's test set is never below this; clients then share test examples."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """The examples of every client.

    Parameters
    ----------
    train, test : tuple of numpy.ndarray
        Per client the sorted indices (int64) into the official training and test examples; never empty, and no
        example occurs twice within one client.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]


def load_partition(task: TaskConfig) -> Partition:
    """Return the task's partition; each process computes it once.

    It depends on the data set's labels and on ``num_clients``, ``partition``, ``alpha``, ``shards_per_client``,
    ``test_examples_per_client`` and ``seed``, and on nothing else.

    Parameters
    ----------
    task : TaskConfig
        The task.

    Returns
    -------
    Partition
        Training and test examples per client.

    Raises
    ------
    ConfigError
        If the examples do not suffice for the clients, or a partitioner leaves clients empty or is not installed.
    """
    return _load_partition(task)


def examples_of(task: TaskConfig, index: int | None) -> tuple[Indices, Indices]:
    """Return which training and test examples a client has.

    Parameters
    ----------
    task : TaskConfig
        The task.
    index : int or None
        The client's part of the data, in 0 .. num_clients - 1; None if all are its own.

    Returns
    -------
    tuple of numpy.ndarray
        Sorted int64 indices into the training and the test examples.

    Raises
    ------
    ConfigError
        See `load_partition`.
    """
    if index is None:
        dataset = load_dataset(task)
        return np.arange(len(dataset.train_labels)), np.arange(len(dataset.test_labels))
    partition = load_partition(task)
    return partition.train[index], partition.test[index]


@lru_cache(maxsize=4)
def _load_partition(task: TaskConfig) -> Partition:
    dataset = load_dataset(task)
    return make_partition(task, dataset.train_labels.numpy(), dataset.test_labels.numpy(), dataset.num_classes)


def make_partition(
    task: TaskConfig, train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], num_classes: int
) -> Partition:
    """Divide examples with the given labels among the task's clients.

    Parameters
    ----------
    task : TaskConfig
        The task; the data set's name is not used.
    train_labels, test_labels : numpy.ndarray
        int64 labels in 0 .. num_classes - 1.
    num_classes : int
        Number of classes.

    Returns
    -------
    Partition
        Training and test examples per client.

    Raises
    ------
    ConfigError
        See `load_partition`.
    """
    if task.num_clients > len(train_labels):
        raise ConfigError(
            f"num-clients={task.num_clients} is not allowed: the data set has {len(train_labels)} training "
            "examples and every client needs one; use fewer clients"
        )
    if task.partition == "dirichlet":
        train, mixtures = _label_mixtures(task, train_labels, num_classes)
    else:
        train = _by_partitioner(task, train_labels)
        _reject_empty(task, train)
        counts = np.stack([np.bincount(train_labels[indices], minlength=num_classes) for indices in train])
        mixtures = counts / counts.sum(axis=1, keepdims=True)
    rng = streams.purpose_generator(task.seed, streams.TEST_LAYOUT)
    test = draw_by_mixture(mixtures, _test_size(task, len(test_labels)), test_labels, rng)
    return Partition(train=tuple(train), test=tuple(test))


def _label_mixtures(
    task: TaskConfig, labels: NDArray[np.int64], num_classes: int
) -> tuple[list[Indices], NDArray[np.float64]]:
    rng = streams.purpose_generator(task.seed, streams.LABEL_MIXTURES)
    mixtures = dirichlet_mixtures(task.alpha, task.num_clients, num_classes, rng)
    rng = streams.purpose_generator(task.seed, streams.TRAIN_LAYOUT)
    return draw_by_mixture(mixtures, len(labels) // task.num_clients, labels, rng), mixtures


def dirichlet_mixtures(
    alpha: float, num_clients: int, num_classes: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw each client's label mixture from the symmetric Dirichlet distribution.

    A gamma variable of shape alpha is a gamma variable of shape alpha + 1 times U^(1/alpha); in logarithms this is
    sound for every alpha > 0, where the plain quotient of gamma variables becomes 0/0.

    Parameters
    ----------
    alpha : float
        Concentration, > 0.
    num_clients, num_classes : int
        Shape of the result.
    rng : numpy.random.Generator
        Source of randomness.

    Returns
    -------
    numpy.ndarray
        float64, (num_clients, num_classes); rows are non-negative and sum to 1.
    """
    shape = (num_clients, num_classes)
    logs = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log1p(-rng.random(shape)) / alpha
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    mixtures: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return mixtures


def draw_by_mixture(
    mixtures: NDArray[np.float64], size: int, labels: NDArray[np.int64], rng: np.random.Generator
) -> list[Indices]:
    """Give every client `size` distinct examples whose labels follow the client's mixture.

    The clients' label counts are multinomial. Each class's examples are shuffled once and dealt to the clients in
    turn, starting again when they are used up: no example has two owners where the class suffices for all, and the
    numbers of owners differ by at most one where it does not. Where a client wants more of a class than there is, the
    rest goes to the classes that its mixture likes next.

    Parameters
    ----------
    mixtures : numpy.ndarray
        (clients, classes), rows sum to 1.
    size : int
        Examples per client, from 1 to the number of examples.
    labels : numpy.ndarray
        int64 labels of the examples.
    rng : numpy.random.Generator
        Source of randomness.

    Returns
    -------
    list of numpy.ndarray
        Per client its sorted example indices.
    """
    num_classes = mixtures.shape[1]
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]
    capacity = np.array([len(pool) for pool in pools])
    dealt = np.zeros(num_classes, dtype=np.int64)
    clients = []
    for mixture in mixtures:
        counts = _fit_to_capacity(rng.multinomial(size, mixture), capacity, mixture)
        parts = [
            pools[label][(dealt[label] + np.arange(counts[label])) % capacity[label]]
            for label in np.flatnonzero(counts)
        ]
        dealt += counts
        clients.append(np.sort(np.concatenate(parts)))
    return clients


def _fit_to_capacity(
    counts: NDArray[np.int64], capacity: NDArray[np.int64], mixture: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Cap the counts and hand the overflow to the other classes in the order of the mixture."""
    fitted = np.minimum(counts, capacity)
    overflow = int((counts - fitted).sum())
    for label in np.argsort(-mixture, kind="stable"):
        extra = min(overflow, int(capacity[label] - fitted[label]))
        fitted[label] += extra
        overflow -= extra
    return fitted


def _test_size(task: TaskConfig, available: int) -> int:
    size = task.test_examples_per_client
    if size > available:
        raise ConfigError(
            f"test-examples-per-client={size} is not allowed: the data set has {available} test examples; use at "
            "most that many, or 0 for an automatic size"
        )
    return size or min(max(available // task.num_clients, MIN_AUTO_TEST_EXAMPLES), available)


def _reject_empty(task: TaskConfig, clients: Sequence[Indices]) -> None:
    empty = [str(client) for client, indices in enumerate(clients) if len(indices) == 0]
    if empty:
        shown = ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else "")
        raise ConfigError(
            f"partition={task.partition!r} leaves {len(empty)} of num-clients={task.num_clients} clients without "
            f"examples (alpha={task.alpha}; clients {shown}): use a larger alpha, fewer clients, or "
            "partition='dirichlet', which gives all clients equally many examples"
        )


def _by_partitioner(task: TaskConfig, labels: NDArray[np.int64]) -> list[Indices]:
    """Divide the examples by one of flwr-datasets' partitioners."""
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
        from flwr_datasets import partitioner as flwr_partitioners
    except ImportError as error:
        raise ConfigError(
            f"partition={task.partition!r} needs the package flwr-datasets, which is not installed: "
            "pip install flwr-datasets, or use partition='dirichlet'"
        ) from error
    rng = streams.purpose_generator(task.seed, streams.PARTITIONER)
    partitioner = _PARTITIONERS[task.partition](flwr_partitioners, task, int(rng.integers(2**31)))
    # Shuffled here because the IID partitioner cuts the examples as they come, and sets may be sorted by label.
    order = rng.permutation(len(labels))
    was_shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of pyarrow to flwr-datasets; nothing a user could change
            partitioner.dataset = datasets.Dataset.from_dict({"index": order, "label": labels[order]})
            parts = [partitioner.load_partition(client) for client in range(task.num_clients)]
        return [np.sort(np.asarray(part["index"], dtype=np.int64)) for part in parts]
    except ValueError as error:
        raise ConfigError(
            f"partition={task.partition!r} is not possible with num-clients={task.num_clients}, "
            f"shards-per-client={task.shards_per_client}, alpha={task.alpha}: {error}"
        ) from error
    finally:
        if was_shown:
            datasets.enable_progress_bars()


def _iid(module: Any, task: TaskConfig, _seed: int) -> Any:
    return module.IidPartitioner(num_partitions=task.num_clients)


def _shards(module: Any, task: TaskConfig, seed: int) -> Any:
    return module.ShardPartitioner(
        num_partitions=task.num_clients,
        partition_by="label",
        num_shards_per_partition=task.shards_per_client,
        shuffle=True,
        seed=seed,
    )


def _dirichlet_classes(module: Any, task: TaskConfig, seed: int) -> Any:
    # min_partition_size=0: by default the partitioner draws again until nobody is small, in vain at alpha=0.01.
    return module.DirichletPartitioner(
        num_partitions=task.num_clients,
        partition_by="label",
        alpha=task.alpha,
        min_partition_size=0,
        self_balancing=False,
        shuffle=True,
        seed=seed,
    )


def _pathological(module: Any, task: TaskConfig, seed: int) -> Any:
    return module.PathologicalPartitioner(
        num_partitions=task.num_clients,
        partition_by="label",
        num_classes_per_partition=task.shards_per_client,
        class_assignment_mode="first-deterministic",
        shuffle=True,
        seed=seed,
    )


_PARTITIONERS: Final[dict[str, Callable[[Any, TaskConfig, int], Any]]] = {
    "iid": _iid,
    "shards": _shards,
    "dirichlet-classes": _dirichlet_classes,
    "pathological": _pathological,
}
