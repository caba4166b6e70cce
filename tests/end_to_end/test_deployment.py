"""The same app on real Flower processes: a SuperLink and SuperNodes that are one client each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.federation import Federation, in_process
from tests.end_to_end.test_engines_agree import model_of
from tests.support import assert_same_bits

pytestmark = pytest.mark.slow

CLIENTS = {"site-a": 3, "site-b": 17}
"""Names of the sites, and which part of the data each holds."""
SETTINGS = {"num-server-rounds": 1, "fraction-train": 1.0, "tau": 0.1}


@pytest.mark.timeout(600)
def test_supernodes_that_are_one_client_each_give_the_bits_of_the_in_process_grid(tmp_path: Path) -> None:
    with Federation(CLIENTS, secure=False) as federation:
        run_id = federation.submit({**SETTINGS, "results-dir": str(tmp_path), "run-name": "deployed"})
        assert federation.finish(run_id) == "finished:completed", federation.outcome(run_id)
    assert_same_bits(model_of(tmp_path / "deployed" / "fedpcd"), in_process(tmp_path, CLIENTS, SETTINGS))
