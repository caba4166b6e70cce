"""The server: FedPCD in the place where Flower's FedAvg was."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedpcd import FedPCD

from .task import CLASSES

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print how well each client is served."""
    strategy = FedPCD(tau=float(context.run_config["tau"]), fraction_train=0.3, on_evaluation=_print)
    start = ArrayRecord({"weights": Array(np.zeros((65, CLASSES)))})
    strategy.start(grid=grid, initial_arrays=start, num_rounds=int(context.run_config["num-server-rounds"]))


def _print(report) -> None:
    accuracies = sorted(metrics["accuracy"] for metrics in report.metrics.values())
    print(f"round {report.round}: worst client {accuracies[0]:.2f}, mean {sum(accuracies) / len(accuracies):.2f}")
