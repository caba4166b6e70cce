"""The ServerApp that ``flwr run`` and ``fedpcd run`` start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.serverapp import ServerApp

from server_app.experiment import run_experiment

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

__all__ = ["app", "run_experiment"]

app = ServerApp()  # a plain assignment, without annotation: Flower looks for it in the source text


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategies that the run config names; an exception marks the run as failed."""
    run_experiment(grid, context.run_config)
