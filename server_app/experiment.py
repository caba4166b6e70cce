"""One experiment: every strategy of the run config from the same start, evaluated and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from client_app.code_hash import code_hash
from server_app.config import ConfigError, ServerConfig
from server_app.evaluation import ServerEvaluation, initial_arrays
from server_app.progress import quiet_loop
from server_app.report import PICTURE, compare, make_console
from server_app.resume import (
    client_settings,
    interrupted_run,
    kept_settings,
    require_something_to_do,
    resumed_config,
)
from server_app.run_folder import default_run_name, new_run_folder
from server_app.strategy_folder import StrategyFolder, clean_complete
from server_app.strategy_run import ExperimentError, StrategyRun
from strategies import METHODS, cohort
from strategies.describe import describe
from strategies.guarded_grid import guarded
from strategies.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flwr.serverapp import Grid
    from rich.console import Console

    from strategies.message import MessageStrategy
    from strategies.roster import Roster

__all__ = ["Experiment", "ExperimentError", "run_experiment"]

_EVALUATORS: Final = {
    "server": "the server",
    "federated": "themselves",
    "both": "the server and themselves",
}


def run_experiment(grid: Grid, run_config: Mapping[str, Any], console: Console | None = None) -> list[dict[str, Any]]:
    """Run every strategy of a run config and compare them.

    The strategies share the initial parameters, the partition, the sequence of cohorts and the clients'
    random streams. Results are on disk as they come in (docs/results.md).

    Parameters
    ----------
    grid : Grid
        Flower's, or `strategies.inprocess.InProcessGrid`.
    run_config : mapping
        Flower's run config; absent keys take their default.
    console : Console, optional
        Where progress and the closing table go; by default standard output.

    Returns
    -------
    list of dict
        The summary of each strategy, in the order in which they ran: the content of its ``summary.json`` and
        ``folder``, its absolute path.

    Raises
    ------
    ConfigError
        If the run config is wrong, before anything is written or trained.
    ExperimentError
        If a strategy never aggregated a round, or server and clients disagree about an accuracy.
    RosterError
        If the nodes did not connect in time, or run other code than the server.
    """
    output = console if console is not None else make_console()
    if run_config.get("strategy") == "list":
        _list_methods(output)
        return []
    experiment = Experiment(run_config, grid, output)
    summaries: list[dict[str, Any]] = []
    try:
        for name in experiment.config.order:
            summaries.append(experiment.run(name))  # noqa: PERF401  # what is finished must survive an exception
    finally:
        # What is finished is shown even if a later strategy fails.
        if summaries:
            experiment.report(experiment.config.order[: len(summaries)])
    return summaries


def _list_methods(console: Console) -> None:
    for name, rule in RULES.items():
        method = describe(name, rule)
        defaults = " ".join(f"{key}={value}" for key, value in method.hyper_parameters.items())
        text = f"{name}: {method.summary} Needs: {method.needs} Hyper-parameters: {defaults or 'none'}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


class Experiment:
    """What the strategies of one experiment share.

    Parameters
    ----------
    run_config : mapping
        Flower's run config.
    grid : Grid
        Flower's grid.
    console : Console
        Where progress goes.
    """

    def __init__(self, run_config: Mapping[str, Any], grid: Grid, console: Console) -> None:
        given = ServerConfig.from_run_config(run_config)
        self.interrupted = interrupted_run(Path(given.resume)) if given.resume else None
        self.config = given if self.interrupted is None else resumed_config(given, self.interrupted)
        self._client_settings = client_settings(self.config, run_config)
        self.grid = guarded(grid)
        self.console = console
        if self.interrupted is not None:
            clean_complete(self.interrupted, self.config.order)
            require_something_to_do(self.interrupted, self.config)
        kept = {} if self.interrupted is None else kept_settings(given, self.interrupted)
        if kept:
            self.say(f"the run keeps {', '.join(f'{key}={value!r}' for key, value in kept.items())}")
        self.code_hash = code_hash()
        # One roster for all strategies: a site that is lost in the first of them must not keep the next from starting.
        self._roster: Roster | None = None
        self._roster = roster = self.strategy(self.config.strategy, federated=True).roster(self.grid)
        self.client_ids, self.logical, self._divided = roster.client_ids, roster.logical, roster.divided
        self._require_large_enough_cohorts()
        self.evaluation = _who_evaluates(self.config.evaluation, logical=roster.logical)
        self.server_evaluation = ServerEvaluation(self.config.task) if self.evaluation in ("server", "both") else None
        self.initial = initial_arrays(self.config.task)
        self.folder = self._folder()
        self.rounds_left = len(self.config.order) * self.config.num_server_rounds
        self.say(f"{len(self.client_ids)} clients, evaluated by {_EVALUATORS[self.evaluation]}")
        self.say(f"results  {self.folder}")

    def say(self, line: str) -> None:
        """Print one line as it is, however long, at once."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def strategy(self, name: str, *, federated: bool, **hooks: Callable[..., None]) -> MessageStrategy:
        """Make a fresh strategy; the seed alone decides its cohorts, so all strategies get the same ones."""
        config = self.config
        strategy = METHODS[name](
            **config.hyper_parameters[name],
            seed=config.task.seed,
            fraction_train=config.fraction_train,
            fraction_evaluate=1.0 if federated else 0.0,
            min_train_nodes=1,
            min_available_nodes=config.min_nodes,
            client_ids="ask",
            code_hash=self.code_hash,
            wait_timeout=config.wait_for_nodes,
            min_replies=config.min_replies,
            local_learning_rate=config.task.learning_rate,
            norm_screen=config.norm_screen,
            examples_screen=config.examples_screen,
            evaluate_every=config.evaluate_every,
            num_rounds=config.num_server_rounds,
            **hooks,
        )
        strategy.client_settings = dict(self._client_settings)
        if self._roster is not None:
            strategy.share_roster(self._roster)
        return strategy

    def run(self, name: str) -> dict[str, Any]:
        """Train one strategy and return its summary; one that is complete already is not trained again."""
        earlier = None
        if self.interrupted is not None:
            summary, earlier = self.interrupted.summary(name), self.interrupted.config(name)
            if summary is not None:
                self.rounds_left -= self.config.num_server_rounds
                return summary
        folder = StrategyFolder(self.folder / name, self.config, self._description(name), earlier, self.say)
        self.rounds_left -= folder.rounds_before
        with quiet_loop():
            return StrategyRun(self, name, folder).train()

    def how_to_resume(self) -> str:
        """How a run that ends now can go on."""
        if self.config.checkpoint_every == 0:
            return "it cannot be resumed, since checkpoint-every=0"
        return f"""when the fault is removed, go on with --run-config "resume='{self.folder}'\""""

    def report(self, names: Sequence[str]) -> None:
        """Print the table of these strategies, draw the picture and say where the results lie."""
        # Of a run that goes on, the picture of its first part is out of date.
        place = self.folder / PICTURE if self.interrupted is not None else None
        table, picture = compare((self.folder / name for name in names), place)
        self.console.print()
        self.console.print(table)
        self.say(f"picture  {picture}")
        self.say(f"results  {self.folder}")

    def _folder(self) -> Path:
        if self.interrupted is not None:
            return self.interrupted.folder
        config = self.config
        automatic = default_run_name(config.task.dataset, config.strategy, config.task.seed)
        return new_run_folder(config.results_path, config.run_name or automatic, automatic=not config.run_name)

    def _require_large_enough_cohorts(self) -> None:
        config = self.config
        size = cohort.size(config.fraction_train, 1, len(self.client_ids))
        if config.min_replies > size:
            raise ConfigError(
                f"min-replies={config.min_replies} is not allowed: a cohort has {size} of the {len(self.client_ids)} "
                f"clients (fraction-train={config.fraction_train:g}), so every round would be skipped; lower it, or "
                "raise fraction-train"
            )

    def _description(self, name: str) -> dict[str, Any]:
        return {
            "strategy": name,
            "hyper-parameters": self.config.hyper_parameters[name],
            "run-config": self.config.resolved(),
            "code-hash": self.code_hash,
            "hosting": "logical" if self.logical else "own",
            "divided": self._divided,
            "evaluation": self.evaluation,
            "client-ids": list(self.client_ids),
        }


def _who_evaluates(wanted: str, *, logical: bool) -> str:
    """Resolve ``evaluation``; the server can only evaluate clients whose data it can make itself."""
    if wanted == "auto":
        return "server" if logical else "federated"
    if not logical and wanted != "federated":
        raise ConfigError(
            f"evaluation={wanted!r} is not possible here: the clients own their data, which the server does not "
            "have; use 'federated' or 'auto'"
        )
    return wanted
