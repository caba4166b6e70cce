"""The folder of one strategy's run: its results, its checkpoints and what simulated clients remember."""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING, Any, Final

from client_app.config import ConfigError
from server_app.checkpoint import Checkpoint, CheckpointStore, settings_hash
from server_app.result_files import ROUNDS
from server_app.results import ResultsWriter
from server_app.resume import CHANGEABLE, PLACES, fixed_settings
from server_app.run_folder import require_unused
from strategies import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from flwr.app import ArrayRecord

    from server_app.config import ServerConfig
    from server_app.resume import InterruptedRun
    from strategies.engine import Memory

__all__ = ["StrategyFolder", "clean", "clean_complete"]

_CHECKPOINTS: Final = "checkpoints"
_CLIENT_STATE: Final = "client-state"
_EXPERIMENT: Final = "experiment"
_RESUMED_AFTER: Final = "resumed-after"


class StrategyFolder:
    """Opens a strategy's folder, to begin in it or to go on.

    Parameters
    ----------
    path : Path
        ``<results-dir>/<run-name>/<strategy>``.
    config : ServerConfig
        The run's settings.
    description : mapping
        ``config.json`` of a new run.
    earlier : mapping or None
        ``config.json`` of the run to go on with, if there is one.
    say : callable (str) -> None
        Prints one line.

    Raises
    ------
    ConfigError
        If the run cannot go on from what is there.
    """

    def __init__(
        self,
        path: Path,
        config: ServerConfig,
        description: Mapping[str, Any],
        earlier: Mapping[str, Any] | None,
        say: Callable[[str], None],
    ) -> None:
        self.path = path
        self._every = config.checkpoint_every
        self._say = say
        self._store = CheckpointStore(path / _CHECKPOINTS, path, config.checkpoint_keep)
        self.checkpoint: Checkpoint | None = None
        if config.resume:
            require_unused(path)
        if config.resume and path.is_dir() and not self._store.rounds and not _has_trained(path):
            # It died before there was anything to go on with.
            shutil.rmtree(path)
            earlier = None
        self._description = dict(description if earlier is None else _still_true(earlier, description, say))
        self._description.setdefault(_EXPERIMENT, f"{path.parent.name}-{secrets.token_hex(4)}")
        self._settings = settings_hash(fixed_settings(self._description["run-config"]))
        if earlier is None:
            self.writer = ResultsWriter(path, self._description)
        else:
            self.checkpoint = self._newest(config, earlier["run-config"]["num-server-rounds"])
            self._description[_RESUMED_AFTER] = [*earlier.get(_RESUMED_AFTER, []), self.checkpoint.round]
            self.writer = ResultsWriter(path, self._description, self.checkpoint.results, self.checkpoint.seconds)
            self.writer.checkpoint_bytes = self._store.size
            self._store.drop_after(self.checkpoint.round)

    @property
    def rounds_before(self) -> int:
        """Rounds that are done already."""
        return self.checkpoint.round if self.checkpoint is not None else 0

    def client_config(self, *, logical: bool) -> dict[str, str | int | list[int]]:
        """What clients are told with every message, so that their memory survives an interruption.

        Parameters
        ----------
        logical : bool
            Whether clients are simulated, on this machine: then they keep their memory here, beside the checkpoints.
        """
        # A run that goes on without further checkpoints has clients that remember its first part.
        if self._every == 0 and self.checkpoint is None:
            return {}
        told: dict[str, str | int | list[int]] = {protocol.RESUMABLE_SINCE: min(self._store.rounds, default=0)}
        if self.checkpoint is not None:
            told[protocol.RESUMED_AFTER] = list(self._description[_RESUMED_AFTER])
        if logical:
            return {**told, protocol.CLIENT_STATE: str(self.path / _CLIENT_STATE)}
        return {**told, protocol.EXPERIMENT: self._description[_EXPERIMENT]}

    def save(self, server_round: int, arrays: ArrayRecord, memory: Memory) -> None:
        """Write a checkpoint at the end of a round, where one is due.

        Parameters
        ----------
        server_round : int
            The round, all of whose results are written; 0 for the initial model.
        arrays : ArrayRecord
            The model that training continues from.
        memory : Memory
            What the strategy knows.
        """
        if self._every == 0 or server_round % self._every != 0:
            return
        model = {name: array.numpy() for name, array in arrays.items()}
        self._store.save(
            Checkpoint(server_round, self._settings, model, memory, self.writer.sizes, self.writer.seconds)
        )
        self.writer.checkpoint_bytes = max(self.writer.checkpoint_bytes, self._store.size)

    def _newest(self, config: ServerConfig, rounds_wanted_before: int) -> Checkpoint:
        checkpoint, problems = self._store.load(self._settings)
        for problem in problems:
            self._say(f"checkpoint not usable: {problem}")
        if checkpoint is None:
            reason = "; ".join(problems) or "it has no checkpoint (checkpoint-every=0?)"
            raise ConfigError(f"resume: {self.path} cannot go on: {reason}. Start a new run")
        done, wanted, every = checkpoint.round, config.num_server_rounds, config.evaluate_every
        if done > wanted:
            raise ConfigError(f"num-server-rounds={wanted} is not allowed: {done} rounds are done")
        if done == wanted != rounds_wanted_before and done % every != 0:
            raise ConfigError(
                f"num-server-rounds={wanted} is not allowed: round {done} is done and was not evaluated "
                f"(evaluate-every={every}), so the run would end without a figure; give at least {done + 1}"
            )
        size = self._store.size / 2**20
        self._say(f"{self.path.name} goes on after round {checkpoint.round}, from a checkpoint of {size:.1f} MiB")
        return checkpoint


def clean_complete(run: InterruptedRun, names: Iterable[str]) -> None:
    """Remove what only a resumption needs from the strategies that are complete; the results stay.

    Parameters
    ----------
    run : InterruptedRun
        A run that may have died before it had cleaned up.
    names : iterable of str
        Its strategies.
    """
    for name in names:
        if run.summary(name) is not None:
            clean(run.folder / name)


def clean(path: Path) -> None:
    """Remove from a strategy's folder what only a resumption needs; the results stay.

    Parameters
    ----------
    path : Path
        ``<results-dir>/<run-name>/<strategy>``.
    """
    CheckpointStore(path / _CHECKPOINTS, path).clear()
    shutil.rmtree(path / _CLIENT_STATE, ignore_errors=True)


def _has_trained(path: Path) -> bool:
    rounds = path / ROUNDS
    return rounds.is_file() and rounds.read_bytes().count(b"\n") > 1


def _still_true(earlier: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]) -> Mapping[str, Any]:
    """``config.json`` of a run that goes on: what it was made of, what may change, and clients that joined."""
    if earlier["hosting"] != now["hosting"]:
        raise ConfigError(
            f"resume: the run's clients were {earlier['hosting']!r}, these are {now['hosting']!r}: a simulation goes "
            "on as a simulation, a deployment as a deployment"
        )
    if earlier["code-hash"] != now["code-hash"]:
        say("the app's code is not that with which the run was started: later rounds may differ")
    joined = [client for client in now["client-ids"] if client not in earlier["client-ids"]]
    settings = {
        key: now["run-config"][key] if key in CHANGEABLE - PLACES else value
        for key, value in earlier["run-config"].items()
    }
    return {**earlier, "run-config": settings, "client-ids": [*earlier["client-ids"], *joined]}
