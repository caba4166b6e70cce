"""A deployed client that hangs ends its own process; nobody else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from client_app.watchdog import ended_after_round_timeout

ROOT = Path(__file__).parents[2]
HANG = """
import time
from flwr.app import Context, RecordDict
from client_app.watchdog import ended_after_round_timeout
context = Context(1, 1, {node_config}, RecordDict(), {{"round-timeout": 1.0}})
with ended_after_round_timeout(context):
    time.sleep({seconds})
print("went on")
"""


@pytest.mark.parametrize(
    ("node_config", "seconds", "ends"),
    [({"client-id": "a"}, 60, True), ({"client-id": "a"}, 0, False), ({"partition-id": 0}, 1.5, False)],
)
def test_only_a_deployed_client_that_outlasts_the_round_is_ended(node_config: dict, seconds: float, ends: bool) -> None:
    code = HANG.format(node_config=node_config, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("went on" in done.stdout) is not ends
    assert ("Timeout" in done.stderr) is ends
    assert (done.returncode != 0) is ends


@pytest.mark.parametrize("limit", [1e10, 1e300, float("inf")])
def test_a_round_without_a_limit_is_no_error(limit: float) -> None:
    context = Context(1, 1, {"client-id": "a"}, RecordDict(), {"round-timeout": limit})
    with ended_after_round_timeout(context):
        pass
