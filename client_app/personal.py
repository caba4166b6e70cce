"""Ditto's personal models: trained by the client for itself, pulled towards the global model, never sent anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn

from client_app import client_state

PERSONAL: Final = "personal-model"
"""Name of the client's record."""


def load_personal(state: RecordDict, memory: str) -> dict[str, torch.Tensor] | None:
    """Return a client's personal model, or None if it never trained one.

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``.
    memory : str
        Name of the client's memory.

    Returns
    -------
    dict or None
        A state dict of CPU tensors.
    """
    record = client_state.load(state, memory).get(PERSONAL)
    return dict(record.to_torch_state_dict()) if isinstance(record, ArrayRecord) else None


def save_personal(state: RecordDict, memory: str, model: nn.Module) -> None:
    """Keep a client's personal model beside what else it remembers."""
    trained = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
    records = client_state.load(state, memory)
    client_state.save(state, memory, {**records, PERSONAL: ArrayRecord(trained)})


def pull_towards(
    model: nn.Module, received: Mapping[str, torch.Tensor], weight: float, learning_rate: float
) -> Callable[[], None]:
    """Return what adds the gradient of ``weight / 2 |v - w|^2`` to a model's gradients.

    Parameters
    ----------
    model : torch.nn.Module
        Holds the personal model ``v`` while it trains.
    received : Mapping
        The received global model's state dict, ``w``.
    weight : float
        ``lambda >= 0``.
    learning_rate : float
        Step size of the SGD that follows.

    Returns
    -------
    callable
        For `client_app.training.train_locally`'s ``pull``. The gradient is taken at v as in the paper; where the step
        times lambda exceeds 1, which would overshoot w and from 2 on diverge, it is taken at the end of the step
        (a proximal step), so that ``lambda -> infinity`` gives ``v = w``.
    """
    pairs = [(p, received[name].to(p.device)) for name, p in model.named_parameters() if p.requires_grad]
    implicit = weight * learning_rate > 1.0

    def pull() -> None:
        for parameter, center in pairs:
            if parameter.grad is None:
                continue
            point = parameter.detach()
            if implicit:
                point = point - learning_rate * parameter.grad
            scale = weight / (1.0 + weight * learning_rate) if implicit else weight
            parameter.grad.add_(point - center, alpha=scale)

    return pull
