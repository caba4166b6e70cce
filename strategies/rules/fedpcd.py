"""FedPCD (2026): FedAvg's direction, bent only as far as every client's minimum progress demands."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .fedavg import averaging_step
from .gram import combine, norm
from .history import History
from .normalization import NORMALIZATIONS, observe, scales
from .projection import PROXQP, Program, Solution, available_solvers, irreconcilable, relax, solve
from .rows import VANISHED, Rows, gather
from .rule import Rule
from .updates import Aggregate, Diagnostics, Floats, State, Updates
from .validation import check_choice, check_learning_rate, check_range, check_whole, server_rate


@dataclass(frozen=True)
class FedPCD(Rule):
    """FedAvg's direction, bent only as far as every client's minimum progress demands.

    ``d* = argmin 1/2 |d - g~_0|^2  subject to  <g~_i, d> >= tau |g~_i|^2`` for every participant and for every client
    seen in the last `history_window` rounds; ``d = |gbar| d* / |d*|`` and ``theta <- theta - eta_g d``. Where FedAvg's
    ``gbar`` already meets all constraints the round *is* FedAvg, bit for bit.

    Needs: nothing beyond the updates, which must be individual (no secure aggregation).

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical, norm-preserving.

    Cost: products of the k new rows with all m rows in the window (one pass over both), a program of m variables, one
    combination; memory for the window.

    Use it when clients differ and only some take part in each round: absent clients stay protected for the window.

    Parameters
    ----------
    tau : float
        Minimum progress of every client, in [0, 1]; the paper's grid spans 0.005 to 0.1.
    history_window : int
        H >= 0, in rounds: how long an absent client's last update still constrains. 0: participants only.
    normalization : {"l2", "ema", "none"}
        What ``g~_i`` is: ``g_i`` over its own norm, over a moving average of the client's norms (paper, appendix D),
        or ``g_i`` itself (ablation). The primary is l2-normalised in the first two cases.
    ema_beta : float
        Decay of that moving average (of the *squared* norm, bias-corrected as in PCD), in [0, 1).
    primary : bool
        False drops the primary objective: ``min 1/2 |d|^2`` under the same constraints (ablation; needs tau > 0).
    on_infeasible : {"primary", "relax", "zero"}
        What to do when no direction serves all clients. "primary": this round is FedAvg. "relax": the irreconcilable
        clients are only protected from harm, all others get their tau. "zero": the model stays.
    multiplier_cap : float
        Largest multiplier ``mu_i`` of a client in ``d* = g~_0 + sum_i mu_i g~_i``, in [0, 1e9]; 0: none is capped. One
        client then moves ``d*`` by at most ``cap |g~_i|`` (``|g~_i| = 1`` under "l2"), whatever its direction; who
        needs more misses its tau, and every round has a solution.
    solver : str
        "proxqp" (ProxSuite), or any QP solver that qpsolvers finds installed. Every answer is certified anyway.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the paper: norms are not increased by a small epsilon; zero updates are dropped instead, so results do
    not depend on the scale of the updates. Infeasible programs, which the paper does not treat, follow
    `on_infeasible`.

    References
    ----------
    Irshaid, Varam, AlHajri, *FedPCD: Priority-Constrained Federated Aggregation*, 2026, Algorithm 1.
    Varam, AlHajri, *Priority-Constrained Descent*, arXiv 2606.29521.
    """

    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "fedavg-when-identical",
        "norm-preserving",
    )

    tau: float = 0.02
    history_window: int = 10
    normalization: str = "l2"
    ema_beta: float = 0.8
    primary: bool = True
    on_infeasible: str = "primary"
    multiplier_cap: float = 0.0
    solver: str = PROXQP
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("tau", self.tau, 0.0, 1.0)
        check_whole("history_window", self.history_window, 0)
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        check_range("ema_beta", self.ema_beta, 0.0, 1.0 - 1e-9)
        if not isinstance(self.primary, bool):
            raise ValueError(f"primary must be true or false, got {self.primary!r}")
        if not self.primary and self.tau == 0.0:
            raise ValueError("primary=False needs tau > 0: with tau = 0 the shortest direction is no step at all")
        check_choice("on_infeasible", self.on_infeasible, ("primary", "relax", "zero"))
        check_range("multiplier_cap", self.multiplier_cap, 0.0, 1e9)
        check_choice("solver", self.solver, available_solvers())
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates.
        state : dict
            What the previous round returned; empty at first.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step with its diagnostics, and the state for the next round.
        """
        start = time.perf_counter()
        history = History.from_state(state).usable(updates.round, self.history_window, updates.client_ids)
        rows = gather(updates, history)
        averages = {}
        if self.normalization == "ema":
            averages = observe(state, updates.client_ids, rows.pseudo_gradient_norms[: rows.current], self.ema_beta)
        seconds_gram = time.perf_counter() - start
        aggregate = self._decide(updates, rows, averages)
        aggregate.diagnostics["seconds-gram"] = seconds_gram
        return aggregate, {**rows.remember(updates, self.history_window).to_state(), **averages}

    def _decide(self, updates: Updates, rows: Rows, averages: State) -> Aggregate:
        diagnostics: Diagnostics = {
            "constraints-current": int((rows.norms[: rows.current] > 0).sum()),
            "constraints-cached": len(rows.client_ids) - rows.current,
            "constraints-active": 0,
            "relaxed-clients": [],
            "capped-clients": [],
            "multipliers": {},
        }
        primary_norm, alignments = rows.primary(updates)
        if primary_norm == 0.0:
            return _averaged(updates, self.server_learning_rate, {**diagnostics, "status": "stationary"})
        demands = self._demands(rows, primary_norm, averages)
        used = rows.norms > 0.0
        program = Program(
            rows.cosines[np.ix_(used, used)],
            alignments[used] if self.primary else np.zeros(int(used.sum())),
            self.tau * demands[used],
            self.primary,
            self.multiplier_cap * demands[used] if self.multiplier_cap > 0.0 else None,
        )
        start = time.perf_counter()
        program, solution, relaxed = self._solve(program)
        diagnostics |= _describe(program, solution, alignments[used])
        clients = [c for c, u in zip(rows.client_ids, used, strict=True) if u]
        diagnostics["relaxed-clients"] = [c for c, r in zip(clients, relaxed, strict=True) if r]
        if solution.short is not None:
            diagnostics["capped-clients"] = [c for c, s in zip(clients, solution.short, strict=True) if s]
        # In the paper's terms the multiplier belongs to g~_i, whose length is the demand, not to the unit row.
        diagnostics["multipliers"] = {
            c: float(mu / demand)
            for c, mu, demand in zip(clients, solution.multipliers, demands[used], strict=True)
            if mu > 0.0
        }
        diagnostics["seconds-program"] = time.perf_counter() - start
        return self._step(updates, rows, used, primary_norm, solution, diagnostics)

    def _demands(self, rows: Rows, primary_norm: float, averages: State) -> Floats:
        """``|g~_i| / |g~_0|``: a row of length l demands ``tau l`` per unit of its own direction."""
        if self.normalization == "l2":
            return np.ones(rows.norms.size)
        if self.normalization == "ema":
            return np.asarray(rows.pseudo_gradient_norms / scales(averages, rows.client_ids))
        return np.asarray(rows.norms / rows.learning_rates / (primary_norm / rows.learning_rates[0]))

    def _solve(self, program: Program) -> tuple[Program, Solution, NDArray[np.bool_]]:
        """The program that was solved in the end, its answer, and which rows had to be relaxed."""
        solution = solve(program, self.solver)
        nobody = np.zeros(program.thresholds.size, dtype=bool)
        if solution.status != "infeasible" or self.on_infeasible != "relax":
            return program, solution, nobody
        rows = irreconcilable(program)
        relaxed = relax(program, rows)
        answer = solve(relaxed, self.solver)
        if answer.status in ("inactive", "solved"):
            return relaxed, replace(answer, status="infeasible", opposed=solution.opposed), rows
        return program, replace(answer, status="uncertified"), nobody

    def _step(
        self,
        updates: Updates,
        rows: Rows,
        used: NDArray[np.bool_],
        primary_norm: float,
        solution: Solution,
        diagnostics: Diagnostics,
    ) -> Aggregate:
        stay = solution.status in ("infeasible", "uncertified") and self.on_infeasible == "zero"
        if not solution.multipliers.any() and not stay:
            return _averaged(updates, self.server_learning_rate, diagnostics)
        start = time.perf_counter()
        own = 1.0 if self.primary else 0.0
        coefficients = np.zeros(len(rows.rows))
        if not stay:
            coefficients[: rows.current] = own * updates.weights
            coefficients[used] += solution.multipliers * primary_norm / rows.norms[used]
        step = combine(rows.rows, coefficients)
        # The length of the sum itself: the quadratic form in the cosines loses half the digits of a short direction.
        length = norm(step)
        if length <= VANISHED * primary_norm * (own + solution.multipliers.sum()):
            step[:] = 0.0
        else:
            step *= server_rate(self.server_learning_rate, updates.local_learning_rate) * primary_norm / length
        diagnostics["seconds-combination"] = time.perf_counter() - start
        return Aggregate(step, diagnostics)


def _averaged(updates: Updates, server_learning_rate: float, diagnostics: Diagnostics) -> Aggregate:
    start = time.perf_counter()
    step = averaging_step(updates, server_learning_rate)
    return Aggregate(step, {**diagnostics, "seconds-combination": time.perf_counter() - start})


def _describe(program: Program, solution: Solution, alignments: Floats) -> Diagnostics:
    progress = program.progress(solution.multipliers)
    own = 1.0 if program.primary else 0.0
    towards_primary = own + float(solution.multipliers @ alignments)
    return {
        "status": solution.status,
        "solver": solution.found_by,
        "constraints-active": int((solution.multipliers > 0.0).sum()),
        "tau-met": solution.status in ("inactive", "solved") and (solution.short is None or not solution.short.any()),
        "direction-norm": solution.direction_norm,
        "cosine-to-fedavg": towards_primary / solution.direction_norm if solution.direction_norm > 0.0 else 0.0,
        "smallest-progress": float(progress.min()),
        "kkt-residual": solution.residuals.worst,
    }
