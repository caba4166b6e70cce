"""DQN-Fed's client: gradients at local iterates, and the quasi-Newton direction that they imply (arXiv 2501.10877).

The client walks down its loss by full-batch gradient steps, ``theta^0 = theta_t, ..., theta^E``, and updates a BFGS
matrix B with ``s_e = theta^e - theta^{e-1}`` and ``y_e = grad f(theta^e) - grad f(theta^{e-1})``; the first pair comes
from the model that it received the last time. It reports ``g = grad f(theta^E)`` and ``B^-1 g``. B is n x n, so only
its last pairs are kept (two-loop recursion, L-BFGS).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn
from torch.nn import functional

from client_app import client_state

MEMORY: Final = "curvature"
"""Name of the client's record: the last received parameters and the curvature pairs."""
_CURVATURE: Final = 1e-10

Pair = tuple[torch.Tensor, torch.Tensor]


def quasi_newton(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    learning_rate: float,
    steps: int,
    memory: int,
    state: RecordDict,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Compute a client's gradient and quasi-Newton direction, and remember the curvature.

    Parameters
    ----------
    model : torch.nn.Module
        Holds the received model; its parameters move.
    images, labels : torch.Tensor
        The client's training examples.
    learning_rate : float
        Size of the local gradient steps, > 0.
    steps : int
        E >= 1 steps.
    memory : int
        Curvature pairs to keep, >= 1.
    state : RecordDict
        The node's ``context.state``.
    name : str
        Name of the client's memory.

    Returns
    -------
    tuple of (torch.Tensor, torch.Tensor, float)
        Gradient and direction after E steps, each (n,), in the order of ``model.parameters()``; and the mean loss at
        the E iterates before each step.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    pairs, previous = _recall(state, name, memory, parameters)
    model.train()
    received = _flat(parameters)
    if previous is not None:
        _set(parameters, previous)
        before = _gradient(model, parameters, images, labels)[0]
        _set(parameters, received)
    gradient, loss = _gradient(model, parameters, images, labels)
    if previous is not None:
        _add(pairs, received - previous, gradient - before)
    losses = 0.0
    here = received
    for _ in range(steps):
        losses += loss
        following = here - learning_rate * gradient
        _set(parameters, following)
        new_gradient, loss = _gradient(model, parameters, images, labels)
        _add(pairs, following - here, new_gradient - gradient)
        here, gradient = following, new_gradient
    _remember(state, name, received, pairs)
    return gradient, inverse_times(pairs, gradient), losses / steps


def inverse_times(pairs: deque[Pair] | list[Pair], vector: torch.Tensor) -> torch.Tensor:
    """``B^-1 v`` for the BFGS matrix that starts from the identity and has seen these pairs, oldest first."""
    result = vector.clone()
    factors = []
    for s, y in reversed(pairs):
        factor = (s @ result) / (s @ y)
        result -= factor * y
        factors.append(factor)
    for (s, y), factor in zip(pairs, reversed(factors), strict=True):
        result += (factor - (y @ result) / (s @ y)) * s
    return result


def _add(pairs: deque[Pair], s: torch.Tensor, y: torch.Tensor) -> None:
    # Without positive curvature B would lose its positive definiteness.
    if float(s @ y) > _CURVATURE * float(s.norm() * y.norm()):
        pairs.append((s, y))


def _gradient(
    model: nn.Module, parameters: list[nn.Parameter], images: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, float]:
    loss = functional.cross_entropy(model(images), labels)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]), loss.item()


def _flat(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def _set(parameters: list[nn.Parameter], values: torch.Tensor) -> None:
    with torch.no_grad():
        for parameter, part in zip(parameters, _split(parameters, values), strict=True):
            parameter.copy_(part.view_as(parameter))


def _split(parameters: list[nn.Parameter], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(values, [p.numel() for p in parameters])


def _recall(
    state: RecordDict, name: str, memory: int, parameters: list[nn.Parameter]
) -> tuple[deque[Pair], torch.Tensor | None]:
    record = client_state.load(state, name).get(MEMORY)
    pairs: deque[Pair] = deque(maxlen=memory)
    if not isinstance(record, ArrayRecord):
        return pairs, None
    known: Mapping[str, torch.Tensor] = {
        key: value.to(parameters[0].device) for key, value in record.to_torch_state_dict().items()
    }
    for number in range((len(known) - 1) // 2):
        pairs.append((known[f"s{number}"], known[f"y{number}"]))
    return pairs, known["received"]


def _remember(state: RecordDict, name: str, received: torch.Tensor, pairs: deque[Pair]) -> None:
    arrays = {"received": received.cpu()}
    for number, (s, y) in enumerate(pairs):
        arrays |= {f"s{number}": s.cpu(), f"y{number}": y.cpu()}
    records = client_state.load(state, name)
    client_state.save(state, name, {**records, MEMORY: ArrayRecord(arrays)})
