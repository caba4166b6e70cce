"""Directions with prescribed cosines: minimum-norm least squares through the Gram matrix of unit rows.

With unit rows U and their cosines ``C = U U'``, the shortest least-squares solution of ``U v = b`` is
``v = U^+ b = U' C^+ b``: a k x k eigenvalue problem, whatever the length of a row. Where the rows are independent all
cosines are met exactly; where they are dependent and the demands contradict each other, v is the least-squares
compromise in units of cosines, so it does not depend on the rows' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .gram import combine, norm
from .updates import Floats, Row, Updates

SPECTRUM_CUT = 1e-10
"""Eigenvalues of C below this share of the largest count as zero, i.e. singular values of U below 1e-5."""
SPECTRUM_NOISE = 1e-13
"""No cut-off is smaller: cosines in float64 cannot tell smaller eigenvalues from zero."""
CONTRADICTION = 1e-8
"""Demands of which the rows' span holds a smaller share than this contradict each other completely."""


@dataclass(frozen=True)
class Demand:
    """The answer to ``U v = b``.

    Parameters
    ----------
    coefficients : ndarray of shape (k,), float64
        ``c = C^+ b``, one per unit row; zeros if the demands contradict each other completely.
    rank : int
        Eigenvalues kept; all k demands are met if and only if it is k.
    """

    coefficients: Floats
    rank: int


def meet(cosines: Floats, demands: Floats, cutoff: float = SPECTRUM_CUT) -> Demand:
    """Coefficients of the shortest combination of unit rows with the demanded inner products.

    Parameters
    ----------
    cosines : ndarray of shape (k, k), float64
        Of nonzero rows; k >= 1.
    demands : ndarray of shape (k,), float64
        ``b``, finite.
    cutoff : float
        Relative cut-off of eigenvalues, in [0, 1]; the largest eigenvalue is always kept.

    Returns
    -------
    Demand
        The coefficients, degree one in the demands.
    """
    largest = float(np.abs(demands).max())
    if largest == 0.0:
        return Demand(np.zeros(demands.size), demands.size)
    values, vectors = np.linalg.eigh(cosines)
    kept = values > max(cutoff, SPECTRUM_NOISE) * values[-1]
    kept[-1] = True
    basis = vectors[:, kept]
    shares = basis.T @ (demands / largest)
    rank = int(kept.sum())
    if np.linalg.norm(shares) <= CONTRADICTION * np.linalg.norm(demands / largest):
        return Demand(np.zeros(demands.size), rank)
    return Demand(np.asarray(basis @ (shares / values[kept]) * largest), rank)


def combine_units(rows: tuple[Row, ...] | list[Row], norms: Floats, coefficients: Floats) -> Floats:
    """``sum_i c_i row_i / |row_i|``, shape (n,); zero rows must have coefficient 0."""
    return combine(rows, coefficients / np.where(norms > 0.0, norms, 1.0))


@dataclass(frozen=True)
class Rates:
    """A direction along which the clients' decrease rates stand in prescribed ratios.

    Parameters
    ----------
    unit : ndarray of shape (n,), float64
        ``u / |u|`` for ``u = G^+ r``; zeros if there is no such direction.
    length : float
        ``|u| / scale``.
    scale : float
        The largest rate per unit of a row; ``|u|`` itself might leave the range of float64.
    weights : ndarray of shape (k,), float64
        Coefficients of ``unit`` in the unit rows; 0 for zero rows.
    rank : int
        Of the nonzero rows.
    """

    unit: Floats
    length: float
    scale: float
    weights: Floats
    rank: int


def common_direction(updates: Updates, norms: Floats, cosines: Floats, demands: Floats) -> Rates:
    """The direction ``G^+ r`` of AdaFed and DQN-Fed, for ``demands = r_i / |g_i|``.

    Parameters
    ----------
    updates : Updates
        The round's updates; only the rows are read.
    norms : ndarray of shape (k,), float64
        Lengths of the rows.
    cosines : ndarray of shape (k, k), float64
        Their cosines.
    demands : ndarray of shape (k,), float64
        Finite and >= 0; those of zero rows, which no direction can meet, are ignored.

    Returns
    -------
    Rates
        The direction; zeros if all demands are zero or contradict each other.
    """
    used = norms > 0.0
    weights, scale = np.zeros(norms.size), float(demands[used].max(initial=0.0))
    if scale == 0.0:
        return Rates(np.zeros(updates.rows[0].size), 0.0, 0.0, weights, int(used.sum()))
    demand = meet(cosines[np.ix_(used, used)], demands[used] / scale)
    weights[used] = demand.coefficients
    unit = combine_units(list(updates.rows), norms, weights)
    length = norm(unit)
    if length > 0.0:
        unit /= length
        weights /= length
    return Rates(unit, length, scale, weights, demand.rank)
