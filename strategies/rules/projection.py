"""The PCD program: bend a primary direction as little as needed so that every row makes progress.

In R^n the program is ``min 1/2 |d - u_0|^2`` subject to ``<u_i, d> >= b_i``, with unit rows ``u_i``, a unit primary
``u_0`` and thresholds ``b_i >= 0``. Its solution is ``d* = u_0 + sum_i mu_i u_i`` with ``mu >= 0``, so all that is
needed is the m x m matrix of cosines K and the alignments ``a_i = <u_i, u_0>``; the multipliers solve

    min 1/2 mu' K mu - c' mu   subject to   mu >= 0,   with   c = b - a.

ProxSuite proposes multipliers, an active-set step polishes them, and `certify` decides from K, a and b alone whether
they are right; no solver's status is ever believed. Where they are not right, an exact least-distance program
(non-negative least squares) either gives them or proves that 0 lies in the convex hull of the rows, in which case no
direction serves all.

With caps ``mu_i <= C_i`` no row can bend the direction by more than ``C_i``, and there always is a solution: in R^n a
threshold may then be missed at the price ``C_i`` per unit, ``min 1/2 |d - u_0|^2 + sum_i C_i max(0, b_i - <u_i, d>)``.

Sources: ``paper/method.md`` (Algorithm 1), Lawson & Hanson (1974), chapter 23.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import qpsolvers
import scipy.linalg
import scipy.optimize
from numpy.typing import NDArray
from proxsuite import proxqp

from .gram import blas
from .updates import Floats

Status = Literal["inactive", "solved", "infeasible", "uncertified"]

PROXQP = "proxqp"
LEAST_DISTANCE = "nnls"
"""Solve by the exact least-distance program alone: quicker where many programs are expected to have no solution."""
LEAST_SQUARES = "bvls"
"""What finds the answer to a program with caps where the solver does not."""
TOLERANCE = 1e-9
"""Largest KKT residual of a certified solution, relative to the direction's length (see `Residuals`)."""
SLACK = 1e-12
"""A constraint violated by less than this (in units of unit rows) counts as met."""
HULL_RESOLUTION = 1e-6
"""Rows whose hull comes closer to 0 than this count as opposed: cosines in float64 cannot tell them from rows that
are (a distance of 1e-6 is 1e-12 in a Gram matrix), and the direction would be made of rounding errors."""
_SPECTRUM_CUT = 1e-13
_POLISH_STEPS = 12
_PROXIMITIES = (1e-8, 1e-6, 1e-10)
_PROXIMAL_STEPS = 10


@dataclass(frozen=True)
class Program:
    """One PCD program in Gram space.

    Parameters
    ----------
    cosines : ndarray of shape (m, m), float64
        K, the cosines between the rows; ones on the diagonal.
    alignments : ndarray of shape (m,), float64
        ``a_i``, cosines between the rows and the primary; zeros if there is no primary.
    thresholds : ndarray of shape (m,), float64
        ``b_i >= 0``, the progress that each row demands of ``d``.
    primary : bool
        Whether ``u_0`` is part of the direction. Without it the program is ``min 1/2 |d|^2``.
    caps : ndarray of shape (m,), float64, or None
        ``C_i >= 0``, finite: the largest multipliers allowed; None: no row is capped.
    """

    cosines: Floats
    alignments: Floats
    thresholds: Floats
    primary: bool = True
    caps: Floats | None = None

    @property
    def upper(self) -> Floats:
        """The caps, infinite where there are none, shape (m,)."""
        return np.full(self.thresholds.size, np.inf) if self.caps is None else self.caps

    @property
    def violations(self) -> Floats:
        """``c = b - a``: by how much the primary alone misses each threshold, shape (m,)."""
        violations: Floats = self.thresholds - self.alignments
        return violations

    def progress(self, multipliers: Floats) -> Floats:
        """``<u_i, d>`` for the direction of these multipliers, shape (m,)."""
        progress: Floats = self.alignments + self.cosines @ multipliers
        return progress

    def direction_norm(self, multipliers: Floats) -> float:
        """``|u_0 + sum_i mu_i u_i|``."""
        own = 1.0 if self.primary else 0.0
        square = own + 2.0 * (multipliers @ self.alignments) + multipliers @ (self.cosines @ multipliers)
        return float(np.sqrt(max(float(square), 0.0)))


@dataclass(frozen=True)
class Residuals:
    """How far multipliers are from the KKT conditions, in float64 from K, a and b.

    Lengths (`primal`) are divided by ``l = max(1, |d|)``, products of a length and a multiplier (`complementarity`,
    `gap`) by ``l max(l, sum mu)``, `dual` by the largest multiplier. Stationarity holds by construction.

    A row with a cap may miss its threshold if its multiplier is at the cap. Multipliers that pass are exact for
    thresholds and caps that differ from the program's by no more than the residuals.

    Parameters
    ----------
    primal : float
        Largest ``b_i - <u_i, d>``, or ``C_i - mu_i`` where that is smaller, or 0.
    dual : float
        Largest ``-mu_i`` or ``mu_i - C_i``, or 0.
    complementarity : float
        Largest ``|mu_i (<u_i, d> - b_i)|``; where a threshold is missed, with ``C_i - mu_i`` if that is smaller.
    gap : float
        Sum of these products, in absolute value: without caps the primal minus the dual objective.
    """

    primal: float
    dual: float
    complementarity: float
    gap: float

    @property
    def worst(self) -> float:
        """The largest of the four; NaN counts as infinite."""
        parts = np.array([self.primal, self.dual, self.complementarity, self.gap])
        return float(np.nan_to_num(parts, nan=np.inf).max())


@dataclass(frozen=True)
class Solution:
    """A program's answer.

    Parameters
    ----------
    status : {"inactive", "solved", "infeasible", "uncertified"}
        "inactive": the primary meets every threshold. "solved" if and only if `residuals` are within `TOLERANCE`.
        "infeasible": `opposed` proves it; never with caps. "uncertified": neither could be shown; the multipliers are
        zero.
    multipliers : ndarray of shape (m,), float64
        ``mu``; zeros unless "solved".
    residuals : Residuals
        Of these multipliers.
    direction_norm : float
        ``|d*|`` for these multipliers.
    found_by : str
        "none", "polish", the solver's name, or "nnls".
    opposed : ndarray of shape (m,), float64, or None
        If infeasible: weights ``lambda >= 0`` that sum to one, with ``|sum_i lambda_i u_i|`` zero up to rounding.
    short : ndarray of shape (m,), bool, or None
        With caps: the rows that are kept below their threshold by their cap.
    """

    status: Status
    multipliers: Floats
    residuals: Residuals
    direction_norm: float
    found_by: str
    opposed: Floats | None = None
    short: NDArray[np.bool_] | None = None


def available_solvers() -> tuple[str, ...]:
    """Names that `solve` accepts: ProxSuite's own, then every dense or sparse QP solver that qpsolvers finds."""
    return (PROXQP, *sorted(set(qpsolvers.available_solvers) - {PROXQP}))


def certify(program: Program, multipliers: Floats) -> Residuals:
    """KKT residuals of given multipliers.

    Parameters
    ----------
    program : Program
        The program.
    multipliers : ndarray of shape (m,), float64
        Any candidate.

    Returns
    -------
    Residuals
        All zero exactly at the solution.
    """
    length = max(1.0, program.direction_norm(multipliers))
    slack = program.progress(multipliers) - program.thresholds
    room = program.upper - multipliers
    products = np.where(slack < 0.0, np.minimum(multipliers, room), multipliers) * slack
    product_scale = length * max(length, float(multipliers.sum()))
    return Residuals(
        primal=float(max(0.0, np.minimum(-slack, room).max())) / length,
        dual=float(max(0.0, -multipliers.min(), -room.min())) / max(1.0, float(multipliers.max())),
        complementarity=float(np.abs(products).max()) / product_scale,
        gap=float(abs(products.sum())) / product_scale,
    )


def solve(program: Program, solver: str = PROXQP) -> Solution:
    """Solve and certify a program.

    Parameters
    ----------
    program : Program
        With m >= 1 rows, all entries finite.
    solver : str
        One of `available_solvers`, or `LEAST_DISTANCE`.

    Returns
    -------
    Solution
        See its `status`. Never raises on an infeasible or degenerate program.

    Raises
    ------
    ValueError
        If an entry is not finite or the shapes disagree.
    """
    _check(program)
    nothing = np.zeros_like(program.thresholds)
    worst_violation = float(program.violations.max())
    if program.primary and worst_violation <= SLACK:
        return _answer(program, nothing, "inactive", "none")
    with blas().limit(limits=1, user_api="blas"):
        for found_by, candidate in () if solver == LEAST_DISTANCE else _candidates(program, solver):
            if certify(program, candidate).worst <= TOLERANCE and _is_proportionate(program, candidate):
                return _answer(program, candidate, "solved", found_by)
        if program.caps is not None:
            return _bounded(program)
        multipliers, opposed = _least_distance(program)
        if opposed is not None:
            return replace(_answer(program, nothing, "infeasible", "nnls"), opposed=opposed)
        for candidate in (*_polished(program, multipliers), multipliers):
            if certify(program, candidate).worst <= TOLERANCE:
                return _answer(program, candidate, "solved", "nnls")
    return _answer(program, nothing, "uncertified", "none")


def irreconcilable(program: Program) -> NDArray[np.bool_]:
    """The rows that can only progress at each other's cost.

    The union of the supports of all ``lambda >= 0`` with ``sum_i lambda_i u_i = 0``: whichever direction harms none of
    them leaves every one of them exactly where it is (Gordan's theorem), while all other rows can still be given their
    full threshold.

    Parameters
    ----------
    program : Program
        An infeasible program.

    Returns
    -------
    ndarray of shape (m,), bool
        True for these rows. With their thresholds set to 0 the program is feasible.
    """
    factor = _factor(program.cosines)
    m, rank = factor.shape
    # maximise sum t subject to <u_i, d> >= t_i, 0 <= t_i <= 1. Directions can be stretched, so a row that can progress
    # at nobody's cost reaches t_i = 1, and only the irreconcilable ones stay at 0.
    outcome = scipy.optimize.linprog(
        np.concatenate([np.zeros(rank), -np.ones(m)]),
        A_ub=np.hstack([-factor, np.eye(m)]),
        b_ub=np.zeros(m),
        bounds=[(None, None)] * rank + [(0.0, 1.0)] * m,
        method="highs",
    )
    if outcome.x is None:  # Without a proof to the contrary nobody is promised progress, which always is feasible.
        return np.ones(m, dtype=bool)
    return np.asarray(outcome.x[rank:] < 0.5)


def relax(program: Program, rows: NDArray[np.bool_]) -> Program:
    """The program with the thresholds of some rows set to 0."""
    return replace(program, thresholds=np.where(rows, 0.0, program.thresholds))


def _check(program: Program) -> None:
    m = program.thresholds.size
    if m == 0 or program.cosines.shape != (m, m) or program.alignments.shape != (m,):
        raise ValueError(
            f"shapes disagree: cosines {program.cosines.shape}, alignments {program.alignments.shape}, "
            f"thresholds {program.thresholds.shape}"
        )
    parts = (program.cosines, program.alignments, program.thresholds)
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("cosines, alignments and thresholds must be finite: screen the updates first")
    if program.caps is not None and not (
        program.caps.shape == (m,) and np.isfinite(program.caps).all() and (program.caps >= 0.0).all()
    ):
        raise ValueError(f"caps must be {m} finite numbers >= 0, got {program.caps}")


def _answer(program: Program, multipliers: Floats, status: Status, found_by: str) -> Solution:
    residuals, length = certify(program, multipliers), program.direction_norm(multipliers)
    short = None
    if program.caps is not None:
        missed = program.thresholds - program.progress(multipliers)
        short = (missed > TOLERANCE * max(1.0, length)) & (status == "solved")
    return Solution(status, multipliers, residuals, length, found_by, short=short)


def _candidates(program: Program, solver: str) -> Iterator[tuple[str, Floats]]:
    guess = _proxqp(program) if solver == PROXQP else _qpsolvers(program, solver)
    if guess is None or not np.isfinite(guess).all():
        return
    guess = np.minimum(np.maximum(guess, 0.0), program.upper)
    for polished in _polished(program, guess):
        yield "polish", polished
    yield solver, guess


def _is_proportionate(program: Program, multipliers: Floats) -> bool:
    if program.caps is not None:  # Rows that all but cancel are held by their caps, not by rounding errors.
        return True
    # Where rows are promised progress, multipliers over their sum are weights of a point in the hull.
    correction = np.sqrt(max(0.0, float(multipliers @ (program.cosines @ multipliers))))
    return bool(correction >= HULL_RESOLUTION * multipliers.sum() or not program.thresholds.any())


def _proxqp(program: Program) -> Floats:
    m = program.thresholds.size
    qp = proxqp.dense.QP(m, 0, 0, True)
    qp.settings.eps_abs = TOLERANCE / 10
    qp.settings.eps_rel = 0.0
    # The library's limits (10000 x 1500) let an infeasible program run for minutes.
    qp.settings.max_iter = 200
    qp.settings.max_iter_in = 100
    qp.settings.initial_guess = proxqp.InitialGuess.EQUALITY_CONSTRAINED_INITIAL_GUESS
    qp.init(program.cosines, -program.violations, None, None, None, None, None, np.zeros(m), program.upper)
    qp.solve()
    return np.array(qp.results.x, dtype=np.float64)


def _qpsolvers(program: Program, solver: str) -> Floats | None:
    zeros = np.zeros(program.thresholds.size)
    try:
        with warnings.catch_warnings():
            # Sparse solvers warn that the matrix is dense, all of them about inaccuracy: the certificate knows better.
            warnings.simplefilter("ignore")
            x = qpsolvers.solve_qp(program.cosines, -program.violations, lb=zeros, ub=program.caps, solver=solver)
    except Exception:  # Solvers raise errors of their own on singular or unbounded programs; the certificate judges.
        return None
    return None if x is None else np.asarray(x, dtype=np.float64)


def _polished(program: Program, guess: Floats) -> Iterator[Floats]:
    """Exact solutions on successive active sets, starting from the guess's own."""
    upper = program.upper
    slack = program.progress(guess) - program.thresholds
    held = upper - guess < -slack
    active = (guess > np.maximum(slack, 0.0)) & ~held
    for _ in range(_POLISH_STEPS):
        multipliers = _on_active_set(program, active, held)
        yield np.minimum(np.maximum(multipliers, 0.0), upper)
        slack = program.progress(multipliers) - program.thresholds
        # Rows whose multiplier turned negative leave, rows that are now violated enter; those beyond their cap are
        # held there, until they make more progress than they need.
        beyond = active & (multipliers > upper)
        following_held = (held & (slack <= SLACK)) | beyond
        following = ((active & (multipliers > 0.0)) | (slack < -SLACK) | held) & ~following_held
        if (following == active).all() and (following_held == held).all():
            return
        active, held = following, following_held


def _on_active_set(program: Program, active: NDArray[np.bool_], held: NDArray[np.bool_]) -> Floats:
    """Multipliers with which the active rows meet their thresholds exactly while the held ones are at their caps."""
    multipliers = np.where(held, program.upper, 0.0)
    if not active.any():
        return multipliers
    matrix = program.cosines[np.ix_(active, active)]
    target = program.violations[active]
    if held.any():
        target = target - program.cosines[np.ix_(active, held)] @ multipliers[held]
    solve_for = _linear_solver(matrix)
    solution = solve_for(target)
    solution += solve_for(target - matrix @ solution)
    multipliers[active] = solution
    return multipliers


def _linear_solver(matrix: Floats) -> Callable[[Floats], Floats]:
    try:
        factor = scipy.linalg.cho_factor(matrix)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(matrix)
        kept = values > _SPECTRUM_CUT * values[-1]
        basis = vectors[:, kept]
        return lambda target: np.asarray(basis @ ((basis.T @ target) / values[kept]))
    return lambda target: np.asarray(scipy.linalg.cho_solve(factor, target))


def _least_distance(program: Program) -> tuple[Floats, Floats | None]:
    """Multipliers by non-negative least squares, or weights that show 0 in the hull of the rows."""
    factor = _factor(program.cosines)
    violations = program.violations
    scale = float(violations.max())
    matrix = np.vstack([factor.T, violations / scale])
    target = np.zeros(matrix.shape[0])
    target[-1] = 1.0
    try:
        with warnings.catch_warnings():
            # Releases of scipy before 1.15 warn of ill-conditioned steps; the certificate knows better.
            warnings.simplefilter("ignore", scipy.linalg.LinAlgWarning)
            u, _ = scipy.optimize.nnls(matrix, target, maxiter=30 * max(matrix.shape))
    except (RuntimeError, np.linalg.LinAlgError):
        # Its iteration limit, or a singular step, on degenerate programs; the caller reports "uncertified".
        return np.zeros_like(violations), None
    if not np.isfinite(u).all():
        return np.zeros_like(violations), None
    remainder = 1.0 - float(violations @ u) / scale
    if remainder <= HULL_RESOLUTION**2:
        return np.zeros_like(violations), u / u.sum()
    return scale * u / remainder, None


def _bounded(program: Program) -> Solution:
    """The answer to a program with caps, which always has one: bounded least squares with a proximal term, polished."""
    for proximity in _PROXIMITIES:
        for guess in _proximal_steps(program, proximity):
            for candidate in (*_polished(program, guess), guess):
                if certify(program, candidate).worst <= TOLERANCE:
                    return _answer(program, candidate, "solved", LEAST_SQUARES)
    return _answer(program, np.zeros_like(program.thresholds), "uncertified", "none")


def _proximal_steps(program: Program, proximity: float) -> Iterator[Floats]:
    """Steps of the proximal-point method: the term makes each a least-squares problem and vanishes as they settle."""
    m = program.thresholds.size
    root = np.asarray(scipy.linalg.cholesky(program.cosines + proximity * np.eye(m)))
    # The bounds of scipy's program must differ, also where a cap is zero.
    above = np.maximum(program.upper, np.finfo(np.float64).tiny)
    multipliers = np.zeros(m)
    for _ in range(_PROXIMAL_STEPS):
        target = scipy.linalg.solve_triangular(root, program.violations + proximity * multipliers, trans="T")
        try:
            found = scipy.optimize.lsq_linear(root, target, (0.0, above), method="bvls", tol=1e-15, max_iter=20 * m)
        except np.linalg.LinAlgError:
            return
        multipliers = np.minimum(np.maximum(found.x, 0.0), program.upper)
        yield multipliers


def _factor(cosines: Floats) -> Floats:
    """S of full column rank with K = S S', shape (m, rank): the rows in coordinates of their own span."""
    values, vectors = np.linalg.eigh(cosines)
    kept = values > _SPECTRUM_CUT * values[-1]
    return np.asarray(vectors[:, kept] * np.sqrt(values[kept]))
