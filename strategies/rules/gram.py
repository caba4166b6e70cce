"""Norms, Gram matrices and weighted combinations of long rows, in float64 over blocks of parameters.

Rows stay in the dtype in which they came; one block of columns at a time is copied to float64, whose range holds the
squares of every smaller dtype. Float64 rows of extreme size are multiplied by a power of two on the way, which is
exact, so that squares neither overflow nor vanish: rows of size 1e-150 give the same cosines as rows of size 1. BLAS
runs on one thread here: sums are then the same on every machine size, and a block is too small to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from .updates import Floats, Row

_BUFFER_ELEMENTS = 1 << 19
"""Float64 elements of one block over all rows: 4 MiB, which stays in the cache."""
_SAFE_EXPONENT = 300
"""Sums of squares of float64 numbers between 2^-300 and 2^300 stay far inside the range."""
_EXPONENT_LIMIT = 1000


@cache
def blas() -> ThreadpoolController:
    """The thread pools of the numerical libraries loaded so far (looked up once)."""
    return ThreadpoolController()


def norm(row: Row) -> float:
    """Euclidean norm of a row, without overflow or underflow.

    Parameters
    ----------
    row : ndarray of shape (n,)
        Any floating dtype.

    Returns
    -------
    float
        The norm; NaN or infinity if the row holds either.
    """
    scale = _row_scale(row)
    total = 0.0
    with blas().limit(limits=1, user_api="blas"):
        for low in range(0, row.size, _BUFFER_ELEMENTS):
            block = row[low : low + _BUFFER_ELEMENTS].astype(np.float64)
            if scale != 1.0:
                block *= scale
            total += float(block @ block)
    return float(np.sqrt(total) / scale)


def cosines(new: Sequence[Row], cached: Sequence[Row], cached_norms: Floats) -> tuple[Floats, Floats]:
    """Norms of the new rows, and their cosines with the new and the cached rows.

    Parameters
    ----------
    new : sequence of ndarray, each of shape (n,)
        The k rows of this round, finite.
    cached : sequence of ndarray, each of shape (n,)
        The m rows of earlier rounds, none of them zero.
    cached_norms : ndarray of shape (m,), float64
        Their norms, as computed here when they were new.

    Returns
    -------
    norms : ndarray of shape (k,), float64
        Norms of the new rows.
    block : ndarray of shape (k, k + m), float64
        Cosines in [-1, 1]; a zero row has cosine 0 with every row, itself included.
    """
    rows = [*new, *cached]
    k = len(new)
    scales = np.array([*(_row_scale(row) for row in new), *(_scale_for(size) for size in cached_norms.tolist())])
    products = _scaled_products(rows, k, scales)
    scaled_norms = np.concatenate([np.sqrt(np.diag(products[:, :k])), cached_norms * scales[k:]])
    safe = np.where(scaled_norms > 0.0, scaled_norms, 1.0)
    block = np.clip(products / safe[:k, None] / safe[None, :], -1.0, 1.0)
    square = block[:, :k]
    square[:] = np.triu(square, 1) + np.triu(square, 1).T
    np.fill_diagonal(square, np.where(scaled_norms[:k] > 0.0, 1.0, 0.0))
    return scaled_norms[:k] / scales[:k], block


def combine(rows: Sequence[Row], coefficients: Floats) -> Floats:
    """Weighted sum of rows.

    Parameters
    ----------
    rows : sequence of ndarray, each of shape (n,)
        At least one row.
    coefficients : ndarray of shape (len(rows),), float64
        One factor per row; rows with factor 0 are not read.

    Returns
    -------
    ndarray of shape (n,), float64
        ``sum_i coefficients[i] * rows[i]``; the same rows and factors give the same bits.
    """
    used = [i for i in range(len(rows)) if coefficients[i] != 0.0]
    total = np.zeros(rows[0].size)
    if not used:
        return total
    factors = coefficients[used]
    width = max(1, _BUFFER_ELEMENTS // len(used))
    buffer = np.empty((len(used), min(width, total.size)))
    with blas().limit(limits=1, user_api="blas"):
        for low in range(0, total.size, width):
            high = min(low + width, total.size)
            block = buffer[:, : high - low]
            for slot, index in enumerate(used):
                block[slot] = rows[index][low:high]
            np.dot(factors, block, out=total[low:high])
    return total


def _scaled_products(rows: Sequence[Row], k: int, scales: Floats) -> Floats:
    n = rows[0].size
    width = max(64, _BUFFER_ELEMENTS // len(rows))
    buffer = np.empty((len(rows), min(width, n)))
    products = np.zeros((k, len(rows)))
    with blas().limit(limits=1, user_api="blas"):
        for low in range(0, n, width):
            high = min(low + width, n)
            block = buffer[:, : high - low]
            for slot, row in enumerate(rows):
                block[slot] = row[low:high]
                if scales[slot] != 1.0:
                    block[slot] *= scales[slot]
            products += block[:k] @ block.T
    return products


def _row_scale(row: Row) -> float:
    """A power of two that brings a row's entries into the safe range; 1 if they are there already."""
    if row.dtype != np.float64 or row.size == 0:
        return 1.0
    # max and min need no temporary of the row's length, unlike abs.
    return _scale_for(float(max(row.max(), -row.min())))


def _scale_for(size: float) -> float:
    exponent = int(np.frexp(size)[1]) if np.isfinite(size) else 0
    if abs(exponent) <= _SAFE_EXPONENT:
        return 1.0
    return float(np.ldexp(1.0, -max(-_EXPONENT_LIMIT, min(exponent, _EXPONENT_LIMIT))))
