"""Entry point of the ``fedpcd`` command."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:  # both come with Flower and with the extra
    raise SystemExit(f"fedpcd needs {error.name}: pip install '.[app]' in the project's folder") from None

from . import federation
from .app_folder import AppFolder, Value
from .devices import check_devices
from .engines import default_nodes, run_in_process, run_simulation
from .errors import UsageError
from .methods import account, methods_table
from .reporting import reported_errors
from .results_folders import new_runs, runs_in
from .run_config import overrides

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.add_typer(federation.app, name="federation")


class Engine(StrEnum):
    """How a run is executed."""

    SIMULATION = "simulation"
    IN_PROCESS = "in-process"


AppDir = Annotated[Path, typer.Argument(metavar="APP_DIR", help="Folder of the Flower app.", show_default=".")]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"fedpcd {version('fedpcd')}")
    except PackageNotFoundError:
        print("fedpcd, from a folder and not installed")
    raise typer.Exit


@app.callback()
def _about(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
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
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Go on with an interrupted run in its folder, with its settings."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Virtual SuperNodes.", show_default="one per client of a cohort")
    ] = None,
    cpus_per_client: Annotated[int, typer.Option(min=1, help="CPU cores per Ray worker.")] = 1,
    gpus_per_client: Annotated[
        float, typer.Option(metavar="SHARE", help="GPU share per Ray worker: 0.25 lets four share one.")
    ] = 0.0,
) -> None:
    """Train, evaluate and report; the exit code is 0 only if the run completed.

    For example:

      fedpcd run . --compare-with fedavg

      fedpcd run . -c "tau=0.05 history-window=5" -c seed=1

      fedpcd run . --preset fashion-mnist --compare-with fedavg

      fedpcd run . --engine in-process -c num-server-rounds=5

      fedpcd run . --resume results/digits-fedpcd-seed0-20260131T154500Z
    """
    with reported_errors():
        folder = AppFolder.at(app_dir)
        changes = overrides(folder, preset, run_config or [])
        if changes.get("strategy") == "list":
            Console().print(methods_table())
            return
        if compare_with is not None:
            changes["compare-with"] = compare_with
        if resume is not None:
            changes["resume"] = str(resume.expanduser().resolve())
        earlier = _earlier_settings(folder, changes)
        place = changes["results-dir"] = _absolute(results_dir, str(changes.get("results-dir", "")))
        values = {**folder.declared, **earlier, **changes}
        folder.check(values)  # Flower and Ray take their time to start
        check_devices(folder, values, gpus_per_client)
        _note_repetition(values)
        with new_runs(Path(place)):
            if engine is Engine.SIMULATION:
                run_simulation(
                    folder,
                    changes,
                    nodes=nodes or (default_nodes(values) if earlier else None),
                    cpus_per_client=cpus_per_client,
                    gpus_per_client=gpus_per_client,
                )
            else:
                run_in_process(folder, changes, nodes=nodes)


def _earlier_settings(folder: AppFolder, changes: Mapping[str, Value]) -> Mapping[str, Value]:
    """The settings of the run to go on with, after the app has looked whether it can; none for a new run."""
    if not changes.get("resume"):
        return {}
    library, given = folder.module("server_app.resume"), {**folder.declared, **changes}
    folder.check(given)
    try:
        run = library.interrupted_run(Path(str(changes["resume"])))
        config = folder.module("server_app.config").ServerConfig.from_run_config(given)
        config = library.resumed_config(config, run)
        folder.module("server_app.strategy_folder").clean_complete(run, config.order)
        library.require_something_to_do(run, config)
    except ValueError as error:  # ConfigError
        raise UsageError(str(error)) from error
    settings: Mapping[str, Value] = run.run_config
    return settings


def _absolute(option: Path | None, value: str) -> str:
    """Place of the results: absolute, because the ServerApp does not run in the folder where this command is typed."""
    if option is not None or not value:
        return str((option or Path("results")).expanduser().resolve())
    if not value.startswith(("/", "~")):
        raise UsageError(f"results-dir={value!r} is relative: use --results-dir {value}, meant from the current folder")
    return value


def _note_repetition(run_config: Mapping[str, Value]) -> None:
    """Say so when the strategy is to be compared with itself, which the app leaves out."""
    strategy = run_config.get("strategy")
    if strategy in [name.strip() for name in str(run_config.get("compare-with", "")).split(",")]:
        print(f"compare-with: {strategy} is the strategy of this run already, and is trained once")


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Results folders of runs, or a folder of such folders.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The picture (.png).",
            show_default="comparison.png, in the run's folder if it is one run",
        ),
    ] = None,
    app_dir: Annotated[Path, typer.Option("--app", help="Folder of the Flower app.", show_default=".")] = Path(),
) -> None:
    """Compare finished runs: the fairness table and the picture.

    For example:

      fedpcd report results/digits-fedavg-seed0-* results/digits-fedpcd-seed0-*

      fedpcd report results --output all.png
    """
    with reported_errors():
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise UsageError(f"no such results folder: {', '.join(missing)}")
        if output is not None:
            _check_picture(output)
        library = AppFolder.at(app_dir).module("server_app.report")
        try:
            table, picture = library.compare(runs_in(folders), output and output.resolve())
        except library.ResultsError as error:
            raise UsageError(str(error)) from error
        library.make_console().print(table)
        print(f"picture  {picture}")


def _check_picture(file: Path) -> None:
    if file.suffix.lower() != ".png":
        raise UsageError(f"--output {file}: a picture is a PNG, the file's name has to end with .png")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"--output {file}: there is no folder {file.resolve().parent}")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Tell all about this method.")] = None,
) -> None:
    """List the methods with their hyper-parameters and defaults, or tell all about one.

    For example:

      fedpcd methods

      fedpcd methods craft
    """
    with reported_errors():
        if name is None:
            Console().print(methods_table())
        else:
            Console().print(account(name), markup=False, highlight=False)


if __name__ == "__main__":
    app()
