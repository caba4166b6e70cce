"""Shortest vectors in the convex hull of rows, from norms and cosines alone; every answer is certified.

``minnorm(V) = V' lambda*`` with ``lambda* = argmin |V' lambda|^2`` over the simplex. It satisfies ``<v_i, d> >= |d|^2``
for every row, and is zero exactly if 0 lies in the hull. Source: Desideri, *Multiple-gradient descent algorithm*, 2012.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from proxsuite import proxqp

from .gram import blas
from .projection import LEAST_DISTANCE, Program, solve
from .updates import Floats

GAP = 1e-12
"""Largest duality gap of a certified weighting of unit rows; it bounds the squared error of the direction."""
_AT_BOUND = (1e-7, 1e-6, 1e-5, 1e-4, 1e-9)
ROUNDING = 1e-15
"""A gap that no further candidate can improve."""
_ROUNDS = 30


@dataclass(frozen=True)
class Weighting:
    """Weights of a convex combination.

    Parameters
    ----------
    weights : ndarray of shape (m,), float64
        ``lambda >= 0``, sum 1.
    status : {"solved", "stationary", "uncertified"}
        "stationary": 0 lies in the hull, up to the resolution of cosines.
    """

    weights: Floats
    status: str


def minimum_norm(cosines: Floats, norms: Floats) -> Weighting:
    """Weights of the shortest vector in the hull of rows.

    With ``u_i = v_i / |v_i|`` the program ``min 1/2 |d|^2, <u_i, d> >= 1 / |v_i|`` has the same direction and, up to
    their sum, the same multipliers; `projection.solve` certifies it or proves that 0 lies in the hull.

    Parameters
    ----------
    cosines : ndarray of shape (m, m), float64
        Between the rows, m >= 1.
    norms : ndarray of shape (m,), float64
        Lengths of the rows, > 0.

    Returns
    -------
    Weighting
        Uniform weights if neither answer could be certified.
    """
    program = Program(cosines, np.zeros_like(norms), norms.min() / norms, primary=False)
    # Layers smaller than the cohort often have 0 in their hull, which ProxQP takes all its iterations not to find.
    solution = solve(program, LEAST_DISTANCE)
    if solution.status == "uncertified":
        solution = solve(program)
    shares = solution.multipliers if solution.opposed is None else solution.opposed
    if solution.status not in ("solved", "infeasible") or not shares.any():
        return Weighting(np.full(norms.size, 1.0 / norms.size), "uncertified")
    weights = shares * (norms.min() / norms)
    status = "solved" if solution.status == "solved" else "stationary"
    return Weighting(np.asarray(weights / weights.sum()), status)


def bounded_minimum_norm(cosines: Floats, center: Floats, radius: float) -> Weighting:
    """Weights of the shortest combination of unit rows within a box around given weights.

    ``min |sum_i lambda_i u_i|^2`` subject to ``sum lambda = 1``, ``0 <= lambda <= 1``, ``|lambda - center| <= radius``
    (FedMGDA+). The linearised gap certifies the answer: ``<lambda - x, K lambda>`` at most `GAP` for every feasible x.

    Parameters
    ----------
    cosines : ndarray of shape (m, m), float64
        Between the unit rows.
    center : ndarray of shape (m,), float64
        Weights >= 0 that sum to 1.
    radius : float
        In [0, 1].

    Returns
    -------
    Weighting
        The best weights found; "stationary" if their combination vanishes.
    """
    low, high = np.maximum(center - radius, 0.0), np.minimum(center + radius, 1.0)
    best, gap = center, _gap(cosines, center, low, high)
    with blas().limit(limits=1, user_api="blas"):
        for candidate in _candidates(cosines, center, low, high):
            found = _gap(cosines, candidate, low, high)
            if found < gap:
                best, gap = candidate, found
            if gap <= ROUNDING:
                break
    if float(best @ cosines @ best) <= GAP:
        return Weighting(best, "stationary")
    return Weighting(best, "solved" if gap <= GAP else "uncertified")


def _candidates(cosines: Floats, center: Floats, low: Floats, high: Floats) -> Iterator[Floats]:
    guess = _proxqp(cosines, low, high)
    if not np.isfinite(guess).all():
        guess = center
    start = _feasible(guess, low, high)
    yield start
    # Which weights the solver leaves at a bound depends on its accuracy; a wrong guess can make the sets below cycle.
    for resolution in _AT_BOUND:
        yield from _active_sets(cosines, start, low, high, resolution)


def _active_sets(cosines: Floats, start: Floats, low: Floats, high: Floats, resolution: float) -> Iterator[Floats]:
    current = start
    free = (current > low + resolution) & (current < high - resolution)
    for _ in range(_ROUNDS):
        polished = _on_free_set(cosines, np.where(free, current, np.where(current < (low + high) / 2, low, high)), free)
        current = _feasible(polished, low, high)
        yield current
        slopes = cosines @ current
        level = float(slopes[free].mean()) if free.any() else float(np.median(slopes))
        stuck = ((current <= low) & (slopes < level - GAP)) | ((current >= high) & (slopes > level + GAP))
        following = ((current > low) & (current < high)) | (stuck & (high > low))
        if (following == free).all():
            return
        free = following


def _on_free_set(cosines: Floats, weights: Floats, free: NDArray[np.bool_]) -> Floats:
    count = int(free.sum())
    if count == 0:
        return weights
    fixed = np.where(free, 0.0, weights)
    system = np.zeros((count + 1, count + 1))
    system[:count, :count] = cosines[np.ix_(free, free)]
    system[:count, count] = system[count, :count] = 1.0
    target = np.append(-(cosines @ fixed)[free], 1.0 - fixed.sum())
    solution = np.linalg.lstsq(system, target, rcond=None)[0]
    result = fixed.copy()
    result[free] = solution[:count]
    return result


def _feasible(weights: Floats, low: Floats, high: Floats) -> Floats:
    """The nearest weights within the bounds that sum to 1: a common shift, found by bisection, then clipping."""
    below, above = float((low - weights).min()), float((high - weights).max())
    for _ in range(200):
        shift = 0.5 * (below + above)
        if np.clip(weights + shift, low, high).sum() < 1.0:
            below = shift
        else:
            above = shift
    return np.asarray(np.clip(weights + above, low, high))


def _gap(cosines: Floats, weights: Floats, low: Floats, high: Floats) -> float:
    slopes = cosines @ weights
    best, left = low.copy(), 1.0 - low.sum()
    for i in np.argsort(slopes, kind="stable"):
        add = min(float(high[i] - low[i]), left)
        best[i] += add
        left -= add
    return float(slopes @ (weights - best))


def _proxqp(cosines: Floats, low: Floats, high: Floats) -> Floats:
    m = low.size
    qp = proxqp.dense.QP(m, 1, 0, True)
    qp.settings.eps_abs = 1e-10
    qp.settings.eps_rel = 0.0
    qp.settings.max_iter = 200
    qp.settings.max_iter_in = 100
    qp.init(cosines, np.zeros(m), np.ones((1, m)), np.ones(1), None, None, None, low, high)
    qp.solve()
    return np.array(qp.results.x, dtype=np.float64)
