from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.config import ConfigError, TaskConfig
from client_app.partition import Partition, dirichlet_mixtures, draw_by_mixture, load_partition, make_partition

# Label counts of the official splits; the partition looks at nothing else.
SHAPES = {"digits": (997, 800, 10), "fashion-mnist": (60_000, 10_000, 10), "cifar100": (50_000, 10_000, 100)}


def labels(examples: int, classes: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(np.arange(examples) % classes)


def owners(clients: tuple[np.ndarray, ...], examples: int) -> np.ndarray:
    return np.bincount(np.concatenate(clients), minlength=examples)


def same(first: Partition, second: Partition) -> bool:
    return all(
        np.array_equal(mine, yours)
        for mine, yours in zip(first.train + first.test, second.train + second.test, strict=True)
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_a_hundred_clients_get_equally_many_distinct_examples(name: str, alpha: float) -> None:
    train, test, classes = SHAPES[name]
    partition = make_partition(TaskConfig(alpha=alpha), labels(train, classes), labels(test, classes), classes)
    assert [len(indices) for indices in partition.train] == [train // 100] * 100
    assert [len(indices) for indices in partition.test] == [max(test // 100, 20)] * 100
    for indices in partition.train + partition.test:
        assert len(np.unique(indices)) == len(indices)


@pytest.mark.parametrize("name", SHAPES)
def test_no_example_is_shared_where_its_class_suffices_and_sharing_is_even_where_not(name: str) -> None:
    train, test, classes = SHAPES[name]
    train_labels, test_labels = labels(train, classes), labels(test, classes)
    partition = make_partition(TaskConfig(), train_labels, test_labels, classes)
    for clients, their_labels in ((partition.train, train_labels), (partition.test, test_labels)):
        numbers = owners(clients, len(their_labels))
        for label in range(classes):
            mine = numbers[their_labels == label]
            assert mine.max() - mine.min() <= 1
            assert mine.max() <= 1 or mine.sum() > len(mine)


def test_a_small_alpha_gives_clients_almost_one_class_and_a_large_one_all() -> None:
    train_labels, test_labels = labels(60_000, 10), labels(10_000, 10)

    def effective_classes(alpha: float) -> float:
        partition = make_partition(TaskConfig(alpha=alpha), train_labels, test_labels, 10)
        shares = np.stack([np.bincount(train_labels[_], minlength=10) / len(_) for _ in partition.train])
        return float(np.mean(1 / (shares**2).sum(axis=1)))

    assert effective_classes(0.01) < 1.3
    assert 1.5 < effective_classes(0.1) < 3.5
    assert effective_classes(1000.0) > 9


def test_a_clients_test_labels_follow_its_training_labels() -> None:
    train_labels, test_labels = labels(60_000, 10), labels(10_000, 10)
    partition = make_partition(TaskConfig(alpha=0.1), train_labels, test_labels, 10)
    for train, test in zip(partition.train, partition.test, strict=True):
        train_share = np.bincount(train_labels[train], minlength=10) / len(train)
        test_share = np.bincount(test_labels[test], minlength=10) / len(test)
        assert np.abs(train_share - test_share).sum() < 0.5


def test_the_same_settings_give_the_same_partition_and_another_seed_another() -> None:
    train_labels, test_labels = labels(1000, 10), labels(500, 10)
    first = make_partition(TaskConfig(seed=3), train_labels, test_labels, 10)
    assert same(first, make_partition(TaskConfig(seed=3), train_labels, test_labels, 10))
    other = make_partition(TaskConfig(seed=4), train_labels, test_labels, 10)
    assert not same(first, other)
    # Both halves: which test examples stand for a mixture is drawn too.
    one_class = np.zeros(200, dtype=np.int64)
    seeds = [make_partition(TaskConfig(seed=s, num_clients=5), one_class, one_class, 1) for s in (3, 4)]
    assert any((a != b).any() for a, b in zip(seeds[0].test, seeds[1].test, strict=True))


def test_the_partition_does_not_depend_on_how_clients_train() -> None:
    train_labels, test_labels = labels(1000, 10), labels(500, 10)
    first = make_partition(TaskConfig(), train_labels, test_labels, 10)
    other = TaskConfig(local_epochs=7, batch_size=3, local_learning_rate=1.0, model="cnn", torch_threads=2)
    assert same(first, make_partition(other, train_labels, test_labels, 10))


def test_the_training_sets_do_not_depend_on_the_size_of_the_test_sets() -> None:
    train_labels, test_labels = labels(1000, 10), labels(500, 10)
    first = make_partition(TaskConfig(), train_labels, test_labels, 10)
    second = make_partition(TaskConfig(test_examples_per_client=7), train_labels, test_labels, 10)
    assert all(np.array_equal(mine, yours) for mine, yours in zip(first.train, second.train, strict=True))
    assert {len(indices) for indices in second.test} == {7}


def test_a_client_that_wants_more_of_a_class_than_there_is_gets_what_it_likes_next() -> None:
    few_of_class_0 = np.array([0] * 3 + [1] * 50 + [2] * 50)
    [indices] = draw_by_mixture(np.array([[0.9, 0.02, 0.08]]), 40, few_of_class_0, np.random.default_rng(0))
    counts = np.bincount(few_of_class_0[indices], minlength=3)
    assert counts[0] == 3
    assert counts[2] > counts[1]
    assert counts.sum() == 40


def test_one_client_gets_everything() -> None:
    partition = make_partition(TaskConfig(num_clients=1), labels(50, 10), labels(30, 10), 10)
    assert partition.train[0].tolist() == list(range(50))
    assert partition.test[0].tolist() == list(range(30))


@settings(deadline=None, max_examples=60)
@given(
    examples=st.integers(1, 200),
    classes=st.integers(1, 12),
    clients=st.integers(1, 20),
    alpha=st.sampled_from([1e-300, 1e-6, 0.01, 1.0, 1e6, 1e300]),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_split_is_complete_distinct_and_even(
    examples: int, classes: int, clients: int, alpha: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    some_labels = rng.integers(0, classes, examples)
    mixtures = dirichlet_mixtures(alpha, clients, classes, rng)
    assert np.isfinite(mixtures).all()
    assert np.allclose(mixtures.sum(axis=1), 1.0)
    size = max(examples // clients, 1)
    parts = draw_by_mixture(mixtures, size, some_labels, rng)
    numbers = owners(tuple(parts), examples)
    for part in parts:
        assert len(part) == len(np.unique(part)) == size
    for label in np.unique(some_labels):
        mine = numbers[some_labels == label]
        assert mine.max() - mine.min() <= 1


def test_mixtures_have_the_dirichlet_mean_and_variance() -> None:
    alpha, classes = 0.5, 4
    mixtures = dirichlet_mixtures(alpha, 20_000, classes, np.random.default_rng(0))
    variance = (1 / classes) * (1 - 1 / classes) / (classes * alpha + 1)
    assert mixtures.mean(axis=0) == pytest.approx([0.25] * classes, abs=0.01)
    assert mixtures.var(axis=0) == pytest.approx([variance] * classes, rel=0.05)


def test_more_clients_than_examples_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"num-clients=1000 .*997"):
        load_partition(TaskConfig(num_clients=1000))


def test_more_test_examples_than_there_are_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"test-examples-per-client=801 .*800"):
        load_partition(TaskConfig(test_examples_per_client=801))


def test_a_partition_is_computed_once_per_process() -> None:
    assert load_partition(TaskConfig(seed=11)) is load_partition(TaskConfig(seed=11))


@pytest.mark.parametrize("partition", ["iid", "shards", "pathological", "dirichlet-classes"])
def test_a_partitioner_of_flwr_datasets_gives_every_example_at_most_one_owner(partition: str) -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    task = TaskConfig(partition=partition, alpha=1.0, num_clients=10)
    train_labels, test_labels = labels(1000, 10), labels(500, 10)
    first = make_partition(task, train_labels, test_labels, 10)
    assert len(first.train) == len(first.test) == 10
    assert min(len(indices) for indices in first.train) > 0
    assert owners(first.train, 1000).max() == 1
    assert same(first, make_partition(task, train_labels, test_labels, 10))
    assert not same(first, make_partition(TaskConfig(**{**vars(task), "seed": 1}), train_labels, test_labels, 10))


def test_iid_clients_see_every_class_even_if_the_examples_are_sorted() -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    train_labels = np.sort(labels(1000, 10))
    partition = make_partition(TaskConfig(partition="iid", num_clients=5), train_labels, labels(500, 10), 10)
    assert [len(indices) for indices in partition.train] == [200] * 5
    assert all(len(np.unique(train_labels[indices])) == 10 for indices in partition.train)


@pytest.mark.parametrize("partition", ["shards", "pathological"])
def test_shards_and_pathological_limit_the_classes_of_a_client(partition: str) -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    train_labels, test_labels = labels(1000, 10), labels(500, 10)
    task = TaskConfig(partition=partition, num_clients=10, shards_per_client=2)
    clients = make_partition(task, train_labels, test_labels, 10)
    for train, test in zip(clients.train, clients.test, strict=True):
        classes = set(train_labels[train])
        assert len(classes) <= 2
        assert set(test_labels[test]) <= classes


def test_clients_left_without_examples_are_an_error_that_advises_dirichlet() -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    with pytest.raises(ConfigError, match=r"num-clients=100.*alpha=0\.01.*partition='dirichlet'"):
        load_partition(TaskConfig(partition="dirichlet-classes"))


def test_settings_that_a_partitioner_refuses_are_an_error_that_names_them() -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    with pytest.raises(ConfigError, match=r"partition='pathological' is not possible.*shards-per-client=11"):
        load_partition(TaskConfig(partition="pathological", num_clients=10, shards_per_client=11))


def test_a_missing_flwr_datasets_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(ConfigError, match="partition='iid' needs the package flwr-datasets"):
        make_partition(TaskConfig(partition="iid"), labels(1000, 10), labels(500, 10), 10)


def test_our_own_partition_does_not_need_flwr_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    assert len(make_partition(TaskConfig(), labels(1000, 10), labels(500, 10), 10).train) == 100
