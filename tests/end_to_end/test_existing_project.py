"""The example of a foreign project works as its README says, with the installed package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from strategies.inprocess import InProcessGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "existing_project"
RUN_CONFIG = {"num-server-rounds": 20, "learning-rate": 0.5, "tau": 0.02}


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from existing_project import client_app, server_app

    yield client_app.app, server_app
    for name in [name for name in sys.modules if name.startswith("existing_project")]:
        del sys.modules[name]


def accuracies(project, capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """Worst and mean accuracy that the example prints for its last round."""
    client_app, server_app = project
    server_app.app(InProcessGrid(client_app, 10, RUN_CONFIG), Context(1, 1, {}, RecordDict(), dict(RUN_CONFIG)))
    return tuple(map(float, re.findall(r"round 20: worst client ([\d.]+), mean ([\d.]+)", capsys.readouterr().out)[0]))


def test_two_lines_turn_a_fedavg_project_into_a_fair_one(project, capsys, monkeypatch) -> None:
    import flwr.serverapp.strategy

    from fedpcd import FedAvg, FedPCD

    assert issubclass(FedPCD, flwr.serverapp.strategy.FedAvg)
    worst, mean = accuracies(project, capsys)
    # The same project with plain averaging, all else equal.
    monkeypatch.setattr(project[1], "FedPCD", lambda tau, **keywords: FedAvg(**keywords))
    plain_worst, plain_mean = accuracies(project, capsys)
    assert worst > plain_worst + 0.4
    assert mean > plain_mean + 0.2
