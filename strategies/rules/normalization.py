"""Moving averages of the clients' pseudo-gradient norms, for FedPCD's EMA normalisation (paper, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .updates import Floats, State

NORMALIZATIONS = ("l2", "ema", "none")


def observe(state: State, client_ids: Sequence[str], norms: Floats, beta: float) -> State:
    """Take this round's norms into the clients' moving averages.

    The average is that of PCD: ``v <- beta v + (1 - beta) |g|^2``, per client and per participation, read as
    ``sqrt(v / (1 - beta^t))``. Square roots are stored, so that no square overflows or vanishes.

    Parameters
    ----------
    state : dict
        Holds what this function returned before, or nothing.
    client_ids : sequence of str
        The k participants.
    norms : ndarray of shape (k,), float64
        Norms of their pseudo-gradients.
    beta : float
        Decay, in [0, 1).

    Returns
    -------
    dict
        Keys ``ema-clients``, ``ema-roots``, ``ema-counts`` and ``ema-beta``.
    """
    clients = list(state.get("ema-clients", []))
    roots = dict(zip(clients, state.get("ema-roots", np.zeros(0)).tolist(), strict=True))
    counts = dict(zip(clients, state.get("ema-counts", np.zeros(0)).tolist(), strict=True))
    for client_id, norm in zip(client_ids, norms.tolist(), strict=True):
        roots[client_id] = float(np.hypot(np.sqrt(beta) * roots.get(client_id, 0.0), np.sqrt(1.0 - beta) * norm))
        counts[client_id] = counts.get(client_id, 0) + 1
    return {
        "ema-clients": list(roots),
        "ema-roots": np.array(list(roots.values())),
        "ema-counts": np.array(list(counts.values()), dtype=np.int64),
        "ema-beta": beta,
    }


def scales(averages: State, client_ids: Sequence[str]) -> Floats:
    """The bias-corrected moving average of each client's norm, shape (len(client_ids),).

    A client that only ever sent zero updates has the average 1, so that dividing its zero row by it changes nothing.
    """
    corrected = averages["ema-roots"] / np.sqrt(1.0 - averages["ema-beta"] ** averages["ema-counts"])
    known = dict(zip(averages["ema-clients"], corrected.tolist(), strict=True))
    return np.array([known[client_id] or 1.0 for client_id in client_ids])
