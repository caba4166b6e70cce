"""FedPCD over whole runs against the paper's Algorithm 1 written down in R^n, where a primal solver does the work."""

from __future__ import annotations

import numpy as np
import pytest
import quadprog

from strategies.rules import FedPCD, Updates


class InParameterSpace:
    """Algorithm 1 as it stands in the paper: vectors of n floats, no Gram matrix, no incremental anything."""

    def __init__(self, rule: FedPCD) -> None:
        self.rule = rule
        self.cache: dict[str, tuple[int, np.ndarray]] = {}
        self.squares: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def step(self, updates: Updates) -> np.ndarray:
        rule = self.rule
        gradients = {
            c: row.astype(float) / updates.local_learning_rate
            for c, row in zip(updates.client_ids, updates.rows, strict=True)
        }
        mean = sum(p * g for p, g in zip(updates.weights, gradients.values(), strict=True))
        for client, gradient in gradients.items():
            decay = rule.ema_beta
            self.squares[client] = decay * self.squares.get(client, 0.0) + (1 - decay) * gradient @ gradient
            self.counts[client] = self.counts.get(client, 0) + 1
        recent = {
            c: g for c, (r, g) in self.cache.items() if updates.round - r <= rule.history_window and c not in gradients
        }
        rows = np.stack([g / self.scale(c, g) for c, g in {**gradients, **recent}.items()])
        primary = mean / (1.0 if rule.normalization == "none" else np.linalg.norm(mean))
        target = primary if rule.primary else np.zeros_like(primary)
        thresholds = rule.tau * (rows**2).sum(axis=1)
        direction = quadprog.solve_qp(np.eye(len(target)), target, rows.T.copy(), thresholds)[0]
        self.cache.update({c: (updates.round, g) for c, g in gradients.items()})
        rate = rule.server_learning_rate or updates.local_learning_rate
        scaled: np.ndarray = rate * np.linalg.norm(mean) * direction / np.linalg.norm(direction)
        return scaled

    def scale(self, client: str, gradient: np.ndarray) -> float:
        if self.rule.normalization == "none":
            return 1.0
        if self.rule.normalization == "l2":
            return float(np.linalg.norm(gradient))
        return float(np.sqrt(self.squares[client] / (1 - self.rule.ema_beta ** self.counts[client])))


@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("normalization", ["l2", "ema", "none"])
@pytest.mark.parametrize("history_window", [0, 3])
def test_every_step_of_a_run_is_algorithm_1s(normalization: str, history_window: int, primary: bool) -> None:
    generator = np.random.default_rng(17)
    active = 0
    for run in range(6):
        rule = FedPCD(
            tau=float(generator.choice([0.02, 0.1, 0.5])),
            history_window=history_window,
            normalization=normalization,
            primary=primary,
            server_learning_rate=float(generator.choice([0.0, 0.3])),
        )
        reference, state = InParameterSpace(rule), {}
        tendencies = generator.standard_normal((15, 40)) + generator.standard_normal(40)
        for server_round in range(1, 9):
            chosen = sorted(generator.choice(15, 4, replace=False).tolist())
            rows = tendencies[chosen] + 0.3 * generator.standard_normal((4, 40))
            sizes = 10.0 ** generator.uniform(-2, 2, (4, 1)) if normalization != "none" else 1.0
            batch = Updates(
                server_round,
                tuple(map(str, chosen)),
                tuple((rows * sizes).astype(np.float32 if run % 2 else np.float64)),
                generator.integers(1, 99, 4).astype(float),
                0.1 * 0.9**server_round,
            )
            aggregate, state = rule.aggregate(batch, state)
            active += aggregate.diagnostics["constraints-active"]
            expected = reference.step(batch)
            assert np.linalg.norm(aggregate.step - expected) <= 1e-9 * np.linalg.norm(expected)
    assert active > 20
