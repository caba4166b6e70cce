"""From evaluation replies to every client's own metrics. Knows nothing of Flower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from .replies import Reply, count_problem, finite_metrics, metrics_problem, shortened, silence
from .reports import EvaluationReport, Rejection


def evaluation_report(
    server_round: int, answers: Iterable[Reply], asked: tuple[str, ...], weight_key: str
) -> EvaluationReport:
    """Sort evaluation replies into per-client metrics and rejections, each in the order of `asked`.

    Parameters
    ----------
    server_round : int
        The round, counted from 1 (0 before the first).
    answers : iterable of Reply
        What came back, in any order; only metrics and errors are looked at.
    asked : tuple of str
        The clients that were asked.
    weight_key : str
        Metric that holds the number of examples.
    """
    metrics: dict[str, dict[str, float]] = {}
    rejections: dict[str, Rejection] = {}
    for answer in answers:
        client, problem = answer.client_id, metrics_problem(answer.metrics)
        problem = problem or count_problem(answer.metrics.get(weight_key))
        if answer.error is not None:
            rejections[client] = Rejection(client, "error", shortened(answer.error))
        elif problem is not None:
            rejections[client] = Rejection(client, "invalid", problem)
        else:
            metrics[client] = finite_metrics(answer.metrics)
    for client in asked:
        if client not in metrics and client not in rejections:
            rejections[client] = silence(client)
    return EvaluationReport(
        server_round,
        {client: metrics[client] for client in asked if client in metrics},
        tuple(rejections[client] for client in asked if client in rejections),
    )


def weighted_means(metrics: Mapping[str, dict[str, float]], weights: Mapping[str, float]) -> dict[str, float]:
    """Means over clients of every metric that all of them report, shape of one client's metrics.

    Parameters
    ----------
    metrics : mapping of str to dict
        At least one client's metrics.
    weights : mapping of str to float
        Each client's weight, > 0.
    """
    shared = set.intersection(*(set(m) for m in metrics.values()))
    counts = np.array([weights[client] for client in metrics])
    shares = counts / counts.sum()
    with np.errstate(over="ignore"):  # Clients may claim any finite number.
        return {key: float(shares @ [m[key] for m in metrics.values()]) for key in sorted(shared)}
