"""AFL (Mohri et al. 2019): agnostic federated learning, one multiplier per client that climbs with its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine
from .rule import Rule
from .updates import LOSS_BEFORE, Aggregate, Floats, State, Updates, client_order
from .validation import check_choice, check_range

_CLIENTS = "afl-clients"
_MULTIPLIERS = "afl-multipliers"
_ROUNDS = "afl-rounds"
_OFFSET = "afl-mean-offset"


@dataclass(frozen=True)
class AFL(Rule):
    """The mean of the updates under multipliers that follow the losses up, for the worst mixture of clients.

    ``min_w max_{lambda in simplex} sum_i lambda_i F_i(w)`` by projected ascent in lambda: the step is
    ``sum_i lambda_i Delta_i / sum_i lambda_i`` over the participants (their plain mean where that sum is 0), then
    ``lambda_i <- lambda_i + gamma F_i`` for the participants, and the whole of lambda, one entry for each client of
    the population, is projected onto the simplex. The output is the running mean of the models, the first included.

    Needs: loss-before.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical, single-client-is-fedavg,
    convex-combination, weights-sum-to-one.

    Cost: one pass over the updates, ``N log N`` for N clients; memory for one model.

    Use it when the worst-off client is all that counts, and clients are few and mostly present.

    Parameters
    ----------
    multiplier_step : float
        gamma, in [0, 1000]; published grids span 0.01 to 1. 0 keeps the multipliers equal.
    multiplier_order : {"simultaneous", "lambda-first"}
        Whether the step uses the multipliers from before or after this round's losses.
    multiplier_owner : {"client", "slot"}
        Whether a multiplier belongs to a client, or (as in two public implementations, for comparison with their
        tables) to a place in the round's list of participants, whoever stands there.
    afl_output : {"average", "last"}
        The model that counts as the result; training always continues from the last one.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the paper where only some clients take part, which it does not treat: multipliers stay with all
    clients of the population and sum to one over it. A client that appears later starts with an equal share. With
    gamma times a loss far above 1/N the multipliers become one-hot at once.

    References
    ----------
    Mohri, Sivek, Suresh, *Agnostic Federated Learning*, arXiv 1902.00146.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE,)
    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "fedavg-when-identical",
        "single-client-is-fedavg",
        "convex-combination",
        "weights-sum-to-one",
    )

    multiplier_step: float = 0.01
    multiplier_order: str = "simultaneous"
    multiplier_owner: str = "client"
    afl_output: str = "average"

    def __post_init__(self) -> None:
        check_range("multiplier_step", self.multiplier_step, 0.0, 1000.0)
        check_choice("multiplier_order", self.multiplier_order, ("simultaneous", "lambda-first"))
        check_choice("multiplier_owner", self.multiplier_owner, ("client", "slot"))
        check_choice("afl_output", self.afl_output, ("average", "last"))

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """One descent step in the model, one ascent step in the multipliers.

        Parameters
        ----------
        updates : Updates
            The round's updates, with `LOSS_BEFORE`.
        state : dict
            Multipliers by client, rounds so far, and the running mean relative to the current model.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, with the running mean as `output_offset`, and the new state.
        """
        by_client = self.multiplier_owner == "client"
        present = updates.client_ids if by_client else tuple(str(slot) for slot in range(len(updates.rows)))
        owners, before = _multipliers(state, {*present, *(updates.population if by_client else ())})
        places = [owners.index(owner) for owner in present]
        after = before.copy()
        after[places] += self.multiplier_step * updates.metrics[LOSS_BEFORE]
        after = project_to_simplex(after)
        weights = _shares((before if self.multiplier_order == "simultaneous" else after)[places])
        step = combine(updates.rows, weights)
        memory: State = {_CLIENTS: owners, _MULTIPLIERS: after, _ROUNDS: int(state.get(_ROUNDS, 0)) + 1}
        offset = None
        if self.afl_output == "average":
            # The mean of r + 1 models seen from the newest: m_r = r / (r + 1) (m_{r-1} + step).
            offset = step + state[_OFFSET] if _OFFSET in state else step.copy()
            offset *= memory[_ROUNDS] / (memory[_ROUNDS] + 1)
            memory[_OFFSET] = offset
        diagnostics = {
            "status": "solved",
            "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
            "multipliers": dict(zip(owners, after.tolist(), strict=True)),
        }
        return Aggregate(step, diagnostics, offset), memory


def project_to_simplex(values: Floats) -> Floats:
    """The nearest point with entries >= 0 that sum to one.

    Parameters
    ----------
    values : ndarray of shape (n,), float64
        Any finite point, n >= 1.

    Returns
    -------
    ndarray of shape (n,), float64
        ``max(values - theta, 0)`` for the one theta that makes the sum one.
    """
    # A common shift changes nothing, and what lies more than 1 below the largest entry becomes 0 in any case.
    shifted = np.maximum(values - values.max(), -1.0)
    descending = np.sort(shifted)[::-1]
    excess = np.cumsum(descending) - 1.0
    counts = np.arange(1, values.size + 1)
    last = int(np.flatnonzero(descending - excess / counts > 0.0)[-1])
    return np.asarray(np.maximum(shifted - excess[last] / counts[last], 0.0))


def _multipliers(state: State, owners: set[str]) -> tuple[list[str], Floats]:
    """Everyone known and their multipliers; newcomers get an equal share, taken from all others in proportion."""
    known: list[str] = list(state.get(_CLIENTS, []))
    newcomers = sorted(owners - set(known), key=client_order)
    everyone = [*known, *newcomers]
    share = 1.0 / len(everyone)
    old = np.asarray(state.get(_MULTIPLIERS, np.zeros(0)), dtype=np.float64)
    multipliers: Floats = np.concatenate([old * (len(known) * share), np.full(len(newcomers), share)])
    return everyone, multipliers


def _shares(multipliers: Floats) -> Floats:
    total = float(multipliers.sum())
    if total == 0.0:
        return np.full(multipliers.size, 1.0 / multipliers.size)
    shares: Floats = multipliers / total
    return shares
