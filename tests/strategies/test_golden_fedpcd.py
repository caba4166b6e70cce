"""FedPCD against published and independently computed numbers."""
# ruff: noqa: E501  (rows of numbers)

from __future__ import annotations

import numpy as np
import pytest

from strategies.rules import FedPCD
from strategies.rules.projection import Program, solve
from tests.support import updates

UNIT = [
    [0.984807753012208, 0.17364817766693033],
    [0.7071067811865476, 0.7071067811865475],
    [-0.9063077870366499, 0.4226182617406995],
]
R4 = [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]]
ANTIPODAL = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0]]

# Inputs and float64 outputs of an independent reference (eps = 0), which reproduces the example on the authors' page:
# name: rows, weights, tau, multipliers, step, feasible.
GOLDEN = {
    "page example": (UNIT, [1, 1, 1], 0.25, [0.0, 0.0, 0.3559069840022931], [0.09581518837076329, 0.49814486519105616], True),
    "tau 0": (UNIT, [1, 1, 1], 0.0, [0.0, 0.0, 0.10590698400229327], [0.21438406671140384, 0.4597481147095882], True),
    "tau 1: two active": (UNIT, [1, 1, 1], 1.0, [3.7958650730185073, 0.0, 4.215297618410585], [0.06621279398867594, 0.5029361022545046], True),
    "no-op": ([[2.0, 0.0], [0.0, 1.0]], [0.75, 0.25], 0.1, [0.0, 0.0], [1.5, 0.25], True),
    "weights": (R4, [0.2, 0.5, 0.3], 0.1, [0.0075499672957951465, 0.0, 0.0], [-0.14581083836835074, 0.2080154707683877, 1.299056583513232, -0.05404402063368492], True),
    "antipodal: primary": (ANTIPODAL, [1, 1, 1], 0.2, [0.0, 0.0, 0.0], [1 / 3, -1 / 3, 0.0], False),
    "antipodal: tau 0": (ANTIPODAL, [1, 1, 1], 0.0, [0.0, 0.7071067811865474, 0.0], [0.4714045207910317, 0.0, 0.0], True),
    "zero client": ([[1.0, 0.0], [0.0, 0.0], [-0.5, 1.0]], [1, 1, 1], 0.3, [0.0, 0.0, 0.0], [1 / 6, 1 / 3], True),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_step_and_multipliers_equal_the_reference(name: str) -> None:
    rows, weights, tau, multipliers, step, feasible = GOLDEN[name]
    aggregate, _ = FedPCD(tau=tau).aggregate(updates(rows, weights), {})
    found = [aggregate.diagnostics["multipliers"].get(str(i), 0.0) for i in range(len(rows))]
    np.testing.assert_allclose(aggregate.step, step, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found, multipliers, rtol=0, atol=1e-9)
    assert (aggregate.diagnostics["status"] != "infeasible") == feasible


def test_page_example_has_the_published_progress_and_multiplier() -> None:
    # The authors' page: clients at 10, 45 and 155 degrees, tau 0.25: mu_3 = .36, only client 3 active.
    aggregate, _ = FedPCD(tau=0.25).aggregate(updates(UNIT), {})
    assert aggregate.diagnostics["constraints-active"] == 1
    assert round(aggregate.diagnostics["multipliers"]["2"], 2) == 0.36
    assert aggregate.diagnostics["smallest-progress"] == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(("tau", "angle"), [(0.0, 65.0), (1.0, 82.5)])
def test_page_example_turns_to_the_published_angle(tau: float, angle: float) -> None:
    aggregate, _ = FedPCD(tau=tau).aggregate(updates(UNIT), {})
    assert np.degrees(np.arctan2(aggregate.step[1], aggregate.step[0])) == pytest.approx(angle, abs=0.05)


@pytest.mark.parametrize(
    ("degrees", "tau", "published"),
    [
        # PCD's page: primary (1, 0), one secondary of unit length.
        (150, 0.0, (0.25, 0.433)),
        (150, 0.3, (-0.0098, 0.583)),
        (150, 0.7, (-0.3562, 0.783)),
        (60, 0.0, (1.0, 0.0)),
        (60, 0.3, (1.0, 0.0)),
        (60, 0.7, (1.1, 0.1732)),
    ],
)
def test_one_secondary_gives_pcds_published_direction(degrees: int, tau: float, published: tuple[float, float]) -> None:
    secondary = np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))])
    solution = solve(Program(np.eye(1), secondary[:1], np.array([tau])))
    direction = np.array([1.0, 0.0]) + solution.multipliers[0] * secondary
    np.testing.assert_allclose(direction, published, atol=6e-4)
    assert solution.multipliers[0] == pytest.approx(max(0.0, tau - secondary[0]), abs=1e-12)
