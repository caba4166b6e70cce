"""The two ways to run the app: Flower's Ray simulation, or everything in this process."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .app_folder import AppFolder, Value, require_app_extra
from .errors import RunError
from .superlink import LocalSuperLink

COMPLETED = "finished:completed"
FAILED = "finished:failed"


def default_nodes(run_config: Mapping[str, Value]) -> int:
    """One virtual SuperNode per client of a cohort, and at least ``min-nodes``.

    The engine hands each node one message per 0.1 s, so fewer nodes would make the cohort queue. How many
    nodes there are does not change a run's result: clients are logical and keep their own data.
    """
    cohort = math.ceil(float(run_config["fraction-train"]) * int(run_config["num-clients"]))
    return max(cohort, int(run_config["min-nodes"]))


def run_simulation(
    app: AppFolder,
    changes: Mapping[str, Value],
    *,
    nodes: int | None,
    cpus_per_client: int,
    gpus_per_client: float = 0.0,
) -> None:
    """Run the app through ``flwr run`` on a SuperLink of its own and wait for the end.

    Raises
    ------
    RunError
        If the run does not end as ``finished:completed``.
    """
    require_app_extra()
    nodes = nodes or default_nodes({**app.declared, **changes})
    with LocalSuperLink(app.path) as superlink:
        size = f"num-supernodes={nodes} client-resources-num-cpus={cpus_per_client}"
        size += f" client-resources-num-gpus={gpus_per_client}" if gpus_per_client else ""
        run_id = superlink.submit(changes, size)
        superlink.stream(run_id)
        status, details = superlink.outcome(run_id)
    if status != COMPLETED:
        raise RunError(_reason(status, details))


def _reason(status: str, details: str) -> str:
    """Return why a run did not complete: the exception's own words where there was one."""
    if status == FAILED and details:
        return re.sub(r"^\w+ failed with exception: ", "", details)
    return f"{status}: {details}" if details else status


def run_in_process(app: AppFolder, changes: Mapping[str, Value], *, nodes: int | None) -> None:
    """Run the same ServerApp and ClientApp in this process, without Ray and without a SuperLink."""
    run_config = {**app.declared, **changes}
    client_app = app.module("client_app.app").app
    server = app.module("server_app.app")
    grid = app.module("strategies.inprocess").InProcessGrid(
        client_app, num_nodes=nodes or int(run_config["min-nodes"]), run_config=run_config
    )
    with _flower_log_on_stdout():
        server.run_experiment(grid, run_config)


@contextmanager
def _flower_log_on_stdout() -> Iterator[None]:
    """Let Flower log where the progress goes, so that the order is kept; in colour on a terminal only."""
    from flwr.common.logger import console_handler  # late: Flower takes a second, `fedpcd --help` need not wait

    coloured = console_handler.colored
    stream = console_handler.setStream(sys.stdout)
    console_handler.colored = sys.stdout.isatty()
    try:
        yield
    finally:
        console_handler.colored = coloured
        if stream is not None:  # it was another one
            console_handler.setStream(stream)
