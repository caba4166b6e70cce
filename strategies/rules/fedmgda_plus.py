"""FedMGDA+ (Hu et al. 2022): the shortest combination of unit updates with weights near the clients' shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine, cosines
from .minnorm import bounded_minimum_norm
from .rule import Rule
from .updates import Aggregate, State, Updates
from .validation import check_choice, check_finite, check_range


@dataclass(frozen=True)
class FedMGDAPlus(Rule):
    """The shortest combination of the clients' unit updates whose weights stay near their shares of the data.

    ``u_i = Delta_i / |Delta_i|``, ``lambda* = argmin |sum_i lambda_i u_i|^2`` over the simplex with
    ``|lambda_i - p_i| <= epsilon``; ``theta <- theta - eta sum_i lambda*_i u_i``.

    Needs: nothing beyond the updates.

    Guarantees: permutation-invariant, row-scale-invariant, fedavg-direction-when-identical.

    Cost: one Gram matrix of the k updates, a program of k variables, one combination.

    Use it when single clients send updates of very different length; the step has at most length `unit_step`.

    Parameters
    ----------
    weight_radius : float
        ``epsilon`` in [0, 1]: 0 averages the unit updates, 1 is MGDA on them.
    weight_center : {"examples", "uniform"}
        ``p_i``: shares of the examples (as in FedLF's and FLGo's code), or equal.
    unit_step : float
        ``eta > 0``, in the units of the parameters: 1 in FLGo and FairFL, the local learning rate in FedLF's code.

    Notes
    -----
    Departs from the authors' text in nothing that could be read; zero updates are left out of the program and the
    centre is renormalised over the others.

    References
    ----------
    Hu, Shaloudegi, Zhang, Yu, *Federated Learning Meets Multi-objective Optimization*, arXiv 2006.11489.
    """

    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "row-scale-invariant",
        "fedavg-direction-when-identical",
    )

    weight_radius: float = 0.1
    weight_center: str = "examples"
    unit_step: float = 1.0

    def __post_init__(self) -> None:
        check_range("weight_radius", self.weight_radius, 0.0, 1.0)
        check_choice("weight_center", self.weight_center, ("examples", "uniform"))
        check_finite("unit_step", self.unit_step, 0.0, above=True)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state is not used."""
        norms, matrix = cosines(updates.rows, (), np.zeros(0))
        used = norms > 0.0
        if not used.any():
            return Aggregate(np.zeros(updates.rows[0].size), {"status": "stationary", "weights": {}}), state
        center = updates.num_examples[used] if self.weight_center == "examples" else np.ones(int(used.sum()))
        found = bounded_minimum_norm(matrix[np.ix_(used, used)], center / center.sum(), self.weight_radius)
        weights, coefficients = np.zeros(norms.size), np.zeros(norms.size)
        weights[used] = found.weights
        if found.status != "stationary":
            coefficients[used] = self.unit_step * found.weights / norms[used]
        diagnostics = {"status": found.status, "weights": updates.by_client(weights)}
        return Aggregate(combine(updates.rows, coefficients), diagnostics), state
