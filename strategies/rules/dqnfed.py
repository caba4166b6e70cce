"""DQN-Fed (Hamidi, Ye 2025): every client's loss falls at the rate of its own quasi-Newton step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .fedavg import averaging_step
from .gram import cosines, norm
from .leastsquares import Rates, common_direction
from .rule import ClientValue, Rule
from .updates import NEWTON_DIRECTION, Aggregate, Floats, Row, State, Updates
from .validation import check_choice, check_learning_rate, check_whole


@dataclass(frozen=True)
class DQNFed(Rule):
    """The shortest common descent direction whose rates of decrease are those of the clients' quasi-Newton steps.

    ``r_i = <g_i, delta_i>`` with ``delta_i = B_i^-1 g_i``, ``u = G^+ r``, ``d = u / |u|^2`` (or ``d = u``, or u with
    the length of FedAvg's step) and ``theta <- theta - eta_g d``. Here ``g_i`` is the gradient at the *end* of local
    training: the client sends it as the update ``theta_t - theta_i = eta_l g_i``, and ``delta_i`` beside it.

    Needs: newton-direction.

    Guarantees: permutation-invariant, non-conflicting, fedavg-direction-when-identical.

    Cost: k^2 n / 2 + k n multiplications on the server; twice the upload, and 2 `newton_memory` vectors on each client.

    Use it when losses are badly conditioned and a client can afford a second vector per round; experimental.

    Parameters
    ----------
    newton_memory : int
        Curvature pairs that a client keeps for L-BFGS, >= 1.
    rate_form : {"mean-norm", "convex", "exact"}
        The length of d. "mean-norm": that of FedAvg's step. "convex": ``d = u / |u|^2``, the paper's minimum-norm
        combination. "exact": ``d = u``, whose rates *equal* those of the quasi-Newton steps.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the paper: L-BFGS for its dense matrices, which do not fit beyond some ten thousand parameters, and
    AdaFed's order-free closed form for its Gram-Schmidt construction. The full text could not be read; the abstract
    fixes that the rates align with the quasi-Newton ones, other details are inferred. Its schedule of ``eta_t`` is not
    known, and ``|u|^-1`` grows without bound as gradients shrink or losses flatten (quasi-Newton steps were up to a
    thousand gradients long on the digits), so by default only the direction is taken. Non-conflict holds where the
    updates are linearly independent. A rate that is not positive or not finite counts as zero.

    References
    ----------
    Hamidi, Ye, *Distributed Quasi-Newton Method for Fair and Fast Federated Learning*, TMLR 2025, arXiv 2501.10877.
    """

    needs: ClassVar[tuple[str, ...]] = (NEWTON_DIRECTION,)
    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "non-conflicting",
        "fedavg-direction-when-identical",
    )

    newton_memory: int = 10
    rate_form: str = "mean-norm"
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_whole("newton_memory", self.newton_memory, 1)
        check_choice("rate_form", self.rate_form, ("mean-norm", "convex", "exact"))
        check_learning_rate(self.server_learning_rate)

    def client_config(self) -> dict[str, ClientValue]:
        """The number of curvature pairs.

        Returns
        -------
        dict
            Key ``newton-memory``.
        """
        return {"newton-memory": self.newton_memory}

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state is not used.

        Parameters
        ----------
        updates : Updates
            The round's updates, with Newton directions.
        state : dict
            Not used.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state as it was.
        """
        norms, block = cosines(updates.rows, (), np.zeros(0))
        # r_i / |g_i| is the direction's component along g_i: no product of two lengths that might overflow.
        pairs = zip(updates.rows, updates.newton_directions, strict=True)
        demands = np.array([_component(row, newton) for row, newton in pairs])
        usable = np.isfinite(demands) & (demands > 0.0)
        found = common_direction(updates, norms, block, np.where(usable, demands, 0.0))
        length = self._length(updates, found)
        status = "stationary" if found.length == 0.0 else "solved" if np.isfinite(length) else "unbounded"
        step = found.unit * length if status == "solved" else np.zeros_like(found.unit)
        ids = updates.client_ids
        diagnostics = {
            "status": status,
            "rank": found.rank,
            "clients-used": int((norms > 0.0).sum()),
            "clamped-clients": [c for c, ok, size in zip(ids, usable, norms, strict=True) if size > 0.0 and not ok],
            "demands": dict(zip(ids, np.where(usable, demands, 0.0).tolist(), strict=True)),
        }
        return Aggregate(step, diagnostics), state

    def _length(self, updates: Updates, found: Rates) -> float:
        if found.length == 0.0:
            return 0.0
        if self.rate_form == "mean-norm":
            return norm(averaging_step(updates, self.server_learning_rate))
        rate = self.server_learning_rate or updates.local_learning_rate
        if self.rate_form == "exact":
            return rate * found.scale * found.length
        return rate / found.scale / found.length


def _component(row: Row, newton: Row) -> float:
    """``<row, newton> / |row|``."""
    length = norm(newton)
    if length == 0.0 or not np.isfinite(length):
        return 0.0 if length == 0.0 else float("nan")
    _, block = cosines((row,), (newton,), _one(length))
    return float(block[0, 1]) * length


def _one(value: float) -> Floats:
    return np.array([value])
