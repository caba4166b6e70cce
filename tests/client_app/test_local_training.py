from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from client_app import streams
from client_app.config import ConfigError, TaskConfig
from client_app.data import load_dataset
from client_app.models import build_model
from client_app.training import (
    EVALUATION_BATCH,
    evaluate,
    example_metrics,
    resolve_device,
    torch_seed,
    torch_threads,
    train_locally,
)

CPU = torch.device("cpu")


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return load_dataset(TaskConfig()).train_examples(np.arange(count))


def train(model: nn.Module, count: int = 40, **changes: object) -> float:
    settings = {"learning_rate": 0.1, "local_epochs": 1, "batch_size": 0, "rng": np.random.default_rng(0)} | changes
    return train_locally(model, *digits(count), **settings)


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_one_full_batch_epoch_is_one_gradient_step() -> None:
    model, reference = build_model(TaskConfig()), build_model(TaskConfig())
    images, labels = digits(40)
    loss = nn.functional.cross_entropy(reference(images), labels)
    gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(reference.parameters())))
    assert train(model) == loss.item()
    assert torch.allclose(vector(model), vector(reference) - 0.1 * gradient, rtol=0, atol=1e-7)


def test_mini_batches_cover_every_example_once_per_epoch() -> None:
    seen: list[torch.Tensor] = []

    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images[:, 0, 0, 0].clone())
            return self.weight.expand(len(images), 10)

    images = torch.arange(10.0).view(10, 1, 1, 1)
    labels = torch.zeros(10, dtype=torch.int64)
    rng = np.random.default_rng(0)
    train_locally(Recorder(), images, labels, learning_rate=0.1, local_epochs=2, batch_size=4, rng=rng)
    assert [len(batch) for batch in seen] == [4, 4, 2, 4, 4, 2]
    first, second = torch.cat(seen[:3]).tolist(), torch.cat(seen[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_reported_loss_weighs_every_example_equally() -> None:
    model = build_model(TaskConfig())
    images, labels = digits(10)
    expected = evaluate(model, images, labels)[1]
    # A step size too small to change the model: the mean over batches of 4, 4 and 2 is then the mean over examples.
    assert train(model, 10, batch_size=4, learning_rate=1e-30) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch_size", [0, 7])
def test_the_same_seed_gives_the_same_bits(batch_size: int) -> None:
    models = [build_model(TaskConfig()) for _ in range(2)]
    losses = [train(m, batch_size=batch_size, local_epochs=3, rng=np.random.default_rng(5)) for m in models]
    assert losses[0] == losses[1]
    assert torch.equal(vector(models[0]), vector(models[1]))


def test_another_order_of_batches_gives_another_model() -> None:
    models = [build_model(TaskConfig()) for _ in range(2)]
    for seed, model in enumerate(models):
        train(model, batch_size=7, rng=np.random.default_rng(seed))
    assert not torch.equal(vector(models[0]), vector(models[1]))


def test_training_lowers_the_loss_on_real_digits() -> None:
    model = build_model(TaskConfig())
    before = evaluate(model, *digits(400))
    train(model, 400, local_epochs=20, batch_size=32)
    after = evaluate(model, *digits(400))
    assert after[0] > 0.95 > 0.3 > before[0]
    assert after[1] < 0.25 * before[1]


def test_a_loss_that_is_not_finite_is_reported_and_not_raised() -> None:
    model = build_model(TaskConfig())
    assert not math.isfinite(train(model, learning_rate=1e30, local_epochs=5))


def test_a_model_with_dropout_trains_the_same_under_the_same_torch_seed() -> None:
    def trained(seed: int) -> torch.Tensor:
        model = nn.Sequential(nn.Dropout(0.5), build_model(TaskConfig()))
        with torch_seed(seed, CPU):
            train(model, local_epochs=3)
        return vector(model)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_evaluation_switches_dropout_off() -> None:
    model = nn.Sequential(nn.Dropout(0.9), build_model(TaskConfig())).train()
    assert evaluate(model, *digits(50)) == evaluate(model, *digits(50))
    assert not model.training


def test_training_switches_dropout_on() -> None:
    model = nn.Sequential(nn.Dropout(0.5), build_model(TaskConfig())).eval()
    train(model)
    assert model.training


def test_accuracy_and_loss_are_means_over_the_examples() -> None:
    class Fixed(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images[:, 0, 0]

    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 1.0], [-1.0, 3.0]])
    labels = torch.tensor([0, 0, 0, 1])
    accuracy, loss = evaluate(Fixed(), logits.view(4, 1, 1, 2), labels)
    expected = [math.log(1 + math.exp(-2)), math.log(2), math.log(1 + math.exp(1)), math.log(1 + math.exp(-4))]
    assert accuracy == 0.75
    assert loss == pytest.approx(sum(expected) / 4, rel=1e-14)


def test_evaluation_in_several_batches_covers_all_examples() -> None:
    model = build_model(TaskConfig())
    images, labels = load_dataset(TaskConfig()).train_examples(np.arange(997).repeat(2))
    assert len(labels) > EVALUATION_BATCH
    correct, losses = example_metrics(model, images, labels)
    assert correct.shape == losses.shape == (1994,)
    assert losses.dtype == np.float64
    assert np.allclose(losses[::2], losses[1::2], rtol=1e-5)
    assert evaluate(model, images, labels) == (correct.mean(), losses.mean())


def test_nothing_to_train_or_to_evaluate_on_is_an_error() -> None:
    model = build_model(TaskConfig())
    with pytest.raises(ValueError, match="no examples"):
        train(model, 0)
    with pytest.raises(ValueError, match="no examples"):
        evaluate(model, *digits(0))


def test_the_number_of_threads_is_set_within_and_put_back_after() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_seeding_torch_leaves_its_random_state_alone_afterwards() -> None:
    before = torch.random.get_rng_state()
    with torch_seed(3, CPU):
        torch.rand(2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_asking_for_cuda_without_one_is_an_error_that_names_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device='{name}'.*0 CUDA devices.*device='cpu'"):
        resolve_device(name)


def test_a_cuda_index_beyond_the_last_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"device='cuda:1'.*1 CUDA devices"):
        resolve_device("cuda:1")


def test_auto_takes_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU


def test_every_seed_round_and_client_has_its_own_stream() -> None:
    triples = [(seed, server_round, client) for seed in (0, 1) for server_round in (1, 2) for client in ("0", "1", "a")]
    draws = {
        tuple(np.random.default_rng(streams.client_sequence(*triple)).integers(2**62, size=2)) for triple in triples
    }
    assert len(draws) == len(triples)


def test_no_clients_stream_is_the_stream_of_another_purpose() -> None:
    purposes = {streams.LABEL_MIXTURES, streams.TRAIN_LAYOUT, streams.TEST_LAYOUT, streams.PARTITIONER}
    purposes.add(streams.INITIAL_PARAMETERS)
    assert len(purposes) == 5
    assert min(purposes) > 10**9


@pytest.mark.parametrize(("client_id", "key"), [("0", 0), ("42", 42)])
def test_a_decimal_client_id_is_its_own_key(client_id: str, key: int) -> None:
    assert streams.client_key(client_id) == key


@pytest.mark.parametrize("client_id", ["042", "site-a", "", "-1", "\uff14\uff12", "1.0"])
def test_other_client_ids_get_a_key_of_their_own(client_id: str) -> None:
    assert streams.client_key(client_id) > 2**64
