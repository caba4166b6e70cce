"""The ClientApp: local training and per-client evaluation.

Importing this package inside Flower's simulation process moves that process into the app's own folder and names a
folder for the clients' state; nothing happens anywhere else.

Why the move: Ray workers receive the ClientApp by reference, so each imports ``client_app`` itself, and Ray puts the
driver's *working directory* first on their path. That directory is wherever the long-lived local SuperLink was
started, so another project's ``client_app`` could be imported without a word. Flower loads the ClientApp before it
starts Ray, hence a change of directory made here is in time. The roster's code hash detects what this cannot prevent.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

STATE_DIR_VARIABLE: Final = "FEDPCD_CLIENT_STATE_DIR"
"""Environment variable by which the Ray workers of one simulation share their clients' state (see `client_state`)."""


def _remove_if_mine(folder: str, owner: int) -> None:
    """Remove the state folder when its owner ends; a forked child inherits the exit handler but not the folder."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


if Path(sys.argv[0]).stem == "flwr-simulation":
    os.chdir(Path(__file__).resolve().parent.parent)
    # On a Ray cluster of others neither the folder nor the state below would reach the workers.
    os.environ.pop("RAY_ADDRESS", None)
    os.environ[STATE_DIR_VARIABLE] = tempfile.mkdtemp(prefix="flwr-client-state-")
    atexit.register(_remove_if_mine, os.environ[STATE_DIR_VARIABLE], os.getpid())
