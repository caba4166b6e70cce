"""Entry point of the ``fedpcd`` command."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:  # both come with Flower and with the extra
    raise SystemExit(f"fedpcd needs {error.name}: pip install 'fedpcd[app]'") from None

from .app_folder import APP_PACKAGES, AppFolder
from .engines import run_in_process, run_simulation
from .errors import RunError, UsageError
from .methods import methods_table
from .run_config import overrides

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


class Engine(StrEnum):
    """How a run is executed."""

    SIMULATION = "simulation"
    IN_PROCESS = "in-process"


AppDir = Annotated[Path, typer.Argument(metavar="APP_DIR", help="Folder of the Flower app.", show_default=".")]


@app.callback()
def _about() -> None:
    """Train fairly with FedPCD, compare finished runs, list the methods."""


@app.command()
def run(
    app_dir: AppDir = Path(),
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config",
            "-c",
            metavar="KEY=VALUE...",
            help="Run-config values, or a TOML file; repeatable.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Values from presets/NAME.toml; -c overrides them."),
    ] = None,
    compare_with: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Methods to train first on the same seeds, e.g. fedavg."),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="Flower's Ray simulation, or everything in this process.")
    ] = Engine.SIMULATION,
    results_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Place of the run's folder.", show_default="./results"),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Virtual SuperNodes.", show_default="one per client of a cohort")
    ] = None,
    cpus_per_client: Annotated[int, typer.Option(min=1, help="CPU cores per Ray worker.")] = 1,
) -> None:
    """Train, evaluate and report; the exit code is 0 only if the run completed.

    For example:

      fedpcd run . --compare-with fedavg

      fedpcd run . -c "tau=0.05 history-window=5" -c seed=1

      fedpcd run . --preset fashion-mnist --compare-with fedavg

      fedpcd run . --engine in-process -c num-server-rounds=5
    """
    with _reported_errors():
        folder = AppFolder.at(app_dir)
        changes = overrides(folder, preset, run_config or [])
        if compare_with is not None:
            changes["compare-with"] = compare_with
        if results_dir is not None or not changes.get("results-dir"):
            # Absolute: the ServerApp does not run in the folder where this command was typed.
            changes["results-dir"] = str((results_dir or Path("results")).expanduser().resolve())
        if engine is Engine.SIMULATION:
            run_simulation(folder, changes, nodes=nodes, cpus_per_client=cpus_per_client)
        else:
            run_in_process(folder, changes, nodes=nodes)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Results folders of finished runs.")],
    app_dir: Annotated[Path, typer.Option("--app", help="Folder of the Flower app.", show_default=".")] = Path(),
) -> None:
    """Compare finished runs: the fairness table and the picture.

    For example:

      fedpcd report results/digits-fedavg-seed0-* results/digits-fedpcd-seed0-*
    """
    with _reported_errors():
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise UsageError(f"no such results folder: {', '.join(missing)}")
        library = AppFolder.at(app_dir).module("server_app.report")
        table, picture = library.compare(folder.resolve() for folder in folders)
        library.make_console().print(table)
        print(f"picture: {picture}")


@app.command()
def methods() -> None:
    """List the methods, their hyper-parameters and defaults."""
    Console().print(methods_table())


@contextmanager
def _reported_errors() -> Iterator[None]:
    """Turn errors into one line and an exit code: 2 for wrong input, 1 for a failed run, 130 for Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except UsageError as error:
        _fail(str(error), 2)
    except RunError as error:
        _fail(f"the run failed: {error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in APP_PACKAGES:  # the app's own errors explain themselves
            traceback.print_exc()
        _fail(f"the run failed: {error}", 1)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # unwinds, so that the SuperLink and its processes are ended


def _fail(text: str, code: int) -> NoReturn:
    Console(stderr=True).print(f"fedpcd: {text}", style="bold red", markup=False, highlight=False)
    raise SystemExit(code)


if __name__ == "__main__":
    app()
