"""Going on with a run that was interrupted: whose settings count, and what is done already."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from client_app.config import ConfigError, TaskConfig
from server_app.config import ServerConfig
from server_app.finished_runs import ResultsError, find_runs
from server_app.result_files import CONFIG, SUMMARY

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CHANGEABLE",
    "PLACES",
    "InterruptedRun",
    "client_settings",
    "fixed_settings",
    "interrupted_run",
    "kept_settings",
    "require_something_to_do",
    "resumed_config",
]

CHANGEABLE: Final = frozenset(
    {
        "num-server-rounds",
        "round-timeout",
        "min-nodes",
        "wait-for-nodes",
        "min-replies",
        "max-skipped-rounds",
        "checkpoint-every",
        "checkpoint-keep",
        "data-dir",
        "device",
        "results-dir",
        "run-name",
        "resume",
    }
)
"""Run-config keys that say where and how long a run goes on; all others decide its numbers and stay as they were."""
PLACES: Final = frozenset({"results-dir", "run-name", "resume"})
"""Those of them that follow from the folder of the run."""
_SEEN_BY_CLIENTS: Final = (*TaskConfig.keys(), "round-timeout")

Value = bool | int | float | str


@dataclass(frozen=True)
class InterruptedRun:
    """What a run's folder says about it.

    Parameters
    ----------
    folder : Path
        ``<results-dir>/<run-name>``.
    run_config : dict
        The settings with which it was started.
    """

    folder: Path
    run_config: dict[str, Value]

    def config(self, strategy: str) -> dict[str, Any] | None:
        """``config.json`` of a strategy, or None if the strategy has not begun."""
        path = self.folder / strategy / CONFIG
        return _read(path) if path.is_file() else None

    def summary(self, strategy: str) -> dict[str, Any] | None:
        """The summary of a strategy that is complete, with its folder; None for others."""
        path = self.folder / strategy / SUMMARY
        summary = _read(path) if path.is_file() else {}
        return {**summary, "folder": str(path.parent)} if summary.get("status") == "completed" else None


def interrupted_run(folder: Path) -> InterruptedRun:
    """Read the folder of an interrupted run.

    Parameters
    ----------
    folder : Path
        The run's folder, or that of one of its strategies.

    Returns
    -------
    InterruptedRun
        Its settings.

    Raises
    ------
    ConfigError
        If the folder holds no run.
    """
    folder = folder.expanduser().resolve()
    if (folder / CONFIG).is_file():
        folder = folder.parent
    try:
        first = find_runs([folder])[0]
    except ResultsError:
        fault = "holds no run" if folder.is_dir() else "does not exist on the server's machine"
        raise ConfigError(
            f"resume={str(folder)!r} {fault}: give the folder <results-dir>/<run-name> of the run that was interrupted"
        ) from None
    return InterruptedRun(folder, dict(_read(first / CONFIG)["run-config"]))


def resumed_config(given: ServerConfig, run: InterruptedRun) -> ServerConfig:
    """Return the settings with which a run goes on: its own, except for what `CHANGEABLE` lists and was given anew.

    Parameters
    ----------
    given : ServerConfig
        The settings of the new Flower run; what was not given there has its default.
    run : InterruptedRun
        The run.

    Raises
    ------
    ConfigError
        If a setting that decides the run's numbers was given another value.
    """
    new, default, result = given.resolved(), ServerConfig().resolved(), dict(run.run_config)
    conflicts = []
    for key, value in new.items():
        if key in CHANGEABLE or key not in result:
            result[key] = value if value != default[key] or key not in result else result[key]
        elif value not in (default[key], result[key]):
            conflicts.append(f"{key}={value!r} (the run has {result[key]!r})")
    if conflicts:
        raise ConfigError(
            f"resume: {', '.join(conflicts)}: a run goes on with its own settings; leave these keys out, or start a "
            "new run"
        )
    result |= {"results-dir": str(run.folder.parent), "run-name": run.folder.name, "resume": str(run.folder)}
    return ServerConfig.from_run_config(result)


def require_something_to_do(run: InterruptedRun, config: ServerConfig) -> None:
    """Refuse to go on with a run that is complete.

    Parameters
    ----------
    run : InterruptedRun
        The run.
    config : ServerConfig
        The settings with which it shall go on, see `resumed_config`.

    Raises
    ------
    ConfigError
        If all strategies are complete, or one of them with another number of rounds.
    """
    summaries = [run.summary(name) for name in config.order]
    rounds = [summary["rounds"] for summary in summaries if summary is not None]
    if any(done != config.num_server_rounds for done in rounds):
        raise ConfigError(
            f"num-server-rounds={config.num_server_rounds} is not allowed: a strategy of this run is complete with "
            f"{rounds[0]} rounds"
        )
    if None not in summaries:
        raise ConfigError(f"resume={str(run.folder)!r}: this run is complete, there is nothing to do")


def kept_settings(given: ServerConfig, run: InterruptedRun) -> dict[str, Value]:
    """Changeable settings that a run keeps although the new Flower run has the default: it may have been meant.

    Parameters
    ----------
    given : ServerConfig
        The settings of the new Flower run, which do not tell a default that was given from one that was not.
    run : InterruptedRun
        The run.
    """
    new, default = given.resolved(), ServerConfig().resolved()
    return {
        key: value
        for key, value in run.run_config.items()
        if key in CHANGEABLE - PLACES and new.get(key) == default.get(key) != value
    }


def fixed_settings(run_config: Mapping[str, Value]) -> dict[str, Value]:
    """The settings that decide a run's numbers."""
    return {key: value for key, value in run_config.items() if key not in CHANGEABLE}


def client_settings(config: ServerConfig, run_config: Mapping[str, Any]) -> dict[str, Value]:
    """What clients must be told because Flower gives them another run config: nothing, unless a run was resumed.

    Parameters
    ----------
    config : ServerConfig
        What counts.
    run_config : mapping
        What Flower gives the clients; absent keys have their default.
    """
    wanted, default = config.resolved(), ServerConfig().resolved()
    return {key: wanted[key] for key in _SEEN_BY_CLIENTS if run_config.get(key, default[key]) != wanted[key]}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"resume: {path} must hold a JSON object")
    return content
