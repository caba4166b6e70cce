"""One experiment: every strategy of the run config from the same start, evaluated and compared."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from client_app.code_hash import code_hash
from server_app.config import ConfigError, ServerConfig
from server_app.evaluation import ServerEvaluation, check_agreement, initial_arrays, usable_metrics
from server_app.report import compare, make_console
from server_app.results import ResultsWriter, default_run_name, new_run_folder
from strategies import METHODS, protocol
from strategies.describe import describe
from strategies.rules import RULES
from strategies.rules.updates import PERSONAL_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from flwr.serverapp import Grid
    from rich.console import Console

    from server_app.evaluation import ClientMetrics
    from server_app.fairness import Fairness
    from strategies.message import MessageStrategy
    from strategies.reports import EvaluationReport, RoundReport

__all__ = ["ExperimentError", "run_experiment"]

# What Flower says in every round, the dump of all records at the end, and what looks like a fault and is none: that
# nobody evaluates, that a record is empty, the settings of Flower's own sampling, which these strategies replace.
# The progress lines and the results folder say the same, shorter and completely. Everything else passes.
_LOOP_MESSAGES: Final = frozenset(
    {
        "",
        "fraction_evaluate is set to 0.0. Federated evaluation will be skipped.",
        "\t├── ConfigRecord (train): %s",
        "\t├── ConfigRecord (evaluate): %s",
        "\t├──> Sampling:",
        "\t│\t├──Fraction: train (%.2f) | evaluate ( %.2f)",
        "\t│\t├──Minimum nodes: train (%d) | evaluate (%d)",
        "\t│\t└──Minimum available nodes: %d",
        "\t└──> Keys in records:",
        "\t\t├── Weighted by: '%s'",
        "\t\t├── ArrayRecord key: '%s'",
        "\t\t└── ConfigRecord key: '%s'",
        "[ROUND %s/%s]",
        "configure_train: Sampled %s nodes (out of %s)",
        "configure_evaluate: Sampled %s nodes (out of %s)",
        "%s: Received %s results and %s failures",
        "configure_train: %s of %s clients",
        "%s: %s replies count, %s do not",
        "Initial global evaluation results: %s",
        "Global evaluation",
        "\t└──> MetricRecord: %s",
        "\t└──> Aggregated MetricRecord: %s",
        "Final results:",
        "\t%s",
    }
)

_FRUITLESS_ROUNDS: Final = 3
"""Rounds without any usable reply, from the first on, after which a run is given up: something is wrong everywhere."""

_EVALUATORS: Final = {
    "server": "the server",
    "federated": "themselves",
    "both": "the server and themselves",
}


class ExperimentError(RuntimeError):
    """The run cannot be counted as a success; the text says why and where its results lie."""


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
    config = ServerConfig.from_run_config(run_config)
    experiment = _Experiment(config, grid, output)
    summaries: list[dict[str, Any]] = []
    try:
        for name in config.order:
            summaries.append(experiment.run(name))  # noqa: PERF401  # what is finished must survive an exception
    finally:
        # What is finished is shown even if a later strategy fails.
        if summaries:
            experiment.report(config.order[: len(summaries)])
    return summaries


def _list_methods(console: Console) -> None:
    for name, rule in RULES.items():
        method = describe(name, rule)
        defaults = " ".join(f"{key}={value}" for key, value in method.hyper_parameters.items())
        text = f"{name}: {method.summary} Needs: {method.needs} Hyper-parameters: {defaults or 'none'}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Experiment:
    """What the strategies of one experiment share."""

    def __init__(self, config: ServerConfig, grid: Grid, console: Console) -> None:
        self.config = config
        self.grid = grid
        self.console = console
        self.code_hash = code_hash()
        roster = self.strategy(config.strategy, federated=True).roster(grid)
        self.client_ids, self.logical = roster.client_ids, roster.logical
        self.evaluation = _who_evaluates(config.evaluation, logical=roster.logical)
        self.server_evaluation = ServerEvaluation(config.task) if self.evaluation in ("server", "both") else None
        self.initial = initial_arrays(config.task)
        automatic = default_run_name(config.task.dataset, config.strategy, config.task.seed)
        self.folder = new_run_folder(config.results_path, config.run_name or automatic, automatic=not config.run_name)
        self.rounds_left = len(config.order) * config.num_server_rounds
        self.say(f"{len(self.client_ids)} clients, evaluated by {_EVALUATORS[self.evaluation]}")
        self.say(f"results  {self.folder}")

    def say(self, line: str) -> None:
        """Print one line as it is, however long, at once."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def strategy(self, name: str, *, federated: bool, **hooks: Callable[..., None]) -> MessageStrategy:
        """Make a fresh strategy; the seed alone decides its cohorts, so all strategies get the same ones."""
        config = self.config
        return METHODS[name](
            **config.hyper_parameters[name],
            seed=config.task.seed,
            fraction_train=config.fraction_train,
            fraction_evaluate=1.0 if federated else 0.0,
            min_train_nodes=1,
            min_available_nodes=config.min_nodes,
            client_ids="ask",
            code_hash=self.code_hash,
            wait_timeout=config.wait_for_nodes,
            local_learning_rate=config.task.learning_rate,
            norm_screen=config.norm_screen,
            evaluate_every=config.evaluate_every,
            num_rounds=config.num_server_rounds,
            **hooks,
        )

    def run(self, name: str) -> dict[str, Any]:
        """Train one strategy and return its summary."""
        config = self.config
        with ResultsWriter(self.folder / name, self._description(name)) as writer, _quiet_loop():
            run = _Run(self, name, writer)
            run.strategy.start(
                grid=self.grid,
                initial_arrays=self.initial,
                num_rounds=config.num_server_rounds,
                timeout=config.round_timeout,
                train_config=ConfigRecord({protocol.STRATEGY: name}),
                evaluate_config=ConfigRecord({protocol.STRATEGY: name}),
                evaluate_fn=run.evaluate,
            )
            if run.accepted == 0:
                raise ExperimentError(run.nothing_trained(config.num_server_rounds))
            summary = writer.finish(run.arrays)
        return {**summary, "folder": str(writer.folder)}

    def report(self, names: Sequence[str]) -> None:
        """Print the table of these strategies, draw the picture and say where the results lie."""
        table, picture = compare(self.folder / name for name in names)
        self.console.print()
        self.console.print(table)
        self.say(f"picture  {picture}")
        self.say(f"results  {self.folder}")

    def _description(self, name: str) -> dict[str, Any]:
        return {
            "strategy": name,
            "hyper-parameters": self.config.hyper_parameters[name],
            "run-config": self.config.resolved(),
            "code-hash": self.code_hash,
            "hosting": "logical" if self.logical else "own",
            "evaluation": self.evaluation,
            "client-ids": list(self.client_ids),
        }


class _Run:
    """Follows one strategy round by round: evaluates, writes and prints."""

    def __init__(self, experiment: _Experiment, name: str, writer: ResultsWriter) -> None:
        self.experiment = experiment
        self.writer = writer
        self.arrays = experiment.initial
        self.accepted = 0
        self.first_rejection = ""
        rule = METHODS[name].rule_class(**experiment.config.hyper_parameters[name])
        # Only the clients have their personal models.
        self.federated = experiment.evaluation in ("federated", "both") or PERSONAL_MODEL in rule.required()
        self.name = name
        self.strategy = experiment.strategy(
            name, federated=self.federated, on_round=self.on_round, on_evaluation=self.on_evaluation
        )
        self._report: RoundReport | None = None
        self._evaluated: tuple[int, ClientMetrics] = (-1, {})
        self._started = self._round_ended = time.perf_counter()

    def on_round(self, report: RoundReport) -> None:
        """Take the strategy's account of a round's training."""
        self.writer.record_round(report)
        self._report = report
        self.accepted += len(report.accepted)
        if report.rejections and not self.first_rejection:
            first = report.rejections[0]
            self.first_rejection = f"client {first.client_id} in round {report.round}: {first.reason}"
        if self.accepted == 0 and report.round >= _FRUITLESS_ROUNDS:
            raise ExperimentError(self.nothing_trained(report.round))

    def nothing_trained(self, rounds: int) -> str:
        """Say that no reply was usable, and why the first was not."""
        return (
            f"{type(self.strategy).__name__} received no usable reply in {rounds} rounds, so nothing was trained; "
            f"first reason: {self.first_rejection or 'no client was asked'}. All reasons: "
            f"{self.writer.folder / 'rejections.jsonl'}"
        )

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Take the clients' evaluation of a round's model."""
        metrics, rejections = usable_metrics(report)
        self.writer.record_rejections(report.round, "evaluate", rejections)
        self._evaluated = report.round, metrics

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate the global model where that is due, and end the round."""
        self.arrays = self.writer.latest = arrays
        result = None
        if self._due(server_round):
            metrics = self._metrics(server_round, arrays)
            result = self.writer.record_evaluation(server_round, metrics, self._variants())
        now = time.perf_counter()
        seconds, self._round_ended = now - self._round_ended, now
        self._print(server_round, result, seconds)
        if result is None:
            return None
        return MetricRecord(
            {"mean": result.mean, "sigma-c": result.sigma_c, "worst-10": result.worst_10, "jain": result.jain}
        )

    def _due(self, server_round: int) -> bool:
        config = self.experiment.config
        return server_round % config.evaluate_every == 0 or server_round == config.num_server_rounds

    def _metrics(self, server_round: int, arrays: ArrayRecord) -> ClientMetrics:
        """Evaluate per client; where both sides do, they must agree."""
        on_server = self.experiment.server_evaluation
        metrics = on_server(arrays) if on_server is not None else {}
        if not self.federated:
            return metrics
        if server_round == 0:
            self._ask_clients(arrays)
        evaluated_round, on_clients = self._evaluated
        if evaluated_round != server_round:
            raise ExperimentError(f"the strategy did not have the clients evaluate round {server_round}")
        if on_server is None:
            return on_clients
        check_agreement(server_round, metrics, on_clients)
        return metrics

    def _variants(self) -> dict[str, dict[str, float]]:
        """Accuracies of the method's other models: the clients' personal ones, the last iterate of an average."""
        found: dict[str, dict[str, float]] = {}
        personal = {
            client: values[protocol.PERSONAL_ACCURACY]
            for client, values in self._evaluated[1].items()
            if 0.0 <= values.get(protocol.PERSONAL_ACCURACY, -1.0) <= 1.0
        }
        if personal:
            found["personal"] = personal
        on_server, iterate = self.experiment.server_evaluation, self.strategy.last_iterate
        if on_server is not None and iterate is not None:
            found["last-iterate"] = {client: values[protocol.ACCURACY] for client, values in on_server(iterate).items()}
        return found

    def _ask_clients(self, arrays: ArrayRecord) -> None:
        """Have the clients evaluate the initial model; Flower's loop begins only after it."""
        grid, timeout = self.experiment.grid, self.experiment.config.round_timeout
        config = ConfigRecord({protocol.STRATEGY: self.name})
        messages = self.strategy.configure_evaluate(0, arrays, config, grid)
        self.strategy.aggregate_evaluate(0, grid.send_and_receive(messages, timeout=timeout))

    def _print(self, server_round: int, result: Fairness | None, seconds: float) -> None:
        experiment = self.experiment
        total = experiment.config.num_server_rounds
        parts = [f"round {server_round:>{len(str(total))}}/{total}", type(self.strategy).__name__]
        parts += (
            ["not evaluated"] if result is None else [f"mean {result.mean:6.1%}", f"worst 10% {result.worst_10:6.1%}"]
        )
        if self._report is None:
            self._started = time.perf_counter()  # the pace is that of rounds, without setting up and round 0
        else:
            experiment.rounds_left -= 1
            pace = (time.perf_counter() - self._started) / server_round
            parts += [*_describe_training(self._report), f"{seconds:.2f} s"]
            parts.append(f"ETA {_clock(pace * experiment.rounds_left)}")
        experiment.say("  ".join(parts))


def _describe_training(report: RoundReport) -> Iterator[str]:
    """Yield what the round's aggregation has to tell in few words."""
    found = report.diagnostics
    if "constraints-active" in found:
        constraints = found.get("constraints-current", 0) + found.get("constraints-cached", 0)
        yield f"active {found['constraints-active']:>3}/{constraints:<3}"
    if "direction-norm" in found:
        yield f"|d*| {found['direction-norm']:.3f}"
    if found.get("status") not in (None, "inactive", "solved"):
        yield str(found["status"])
    if report.skipped:
        yield "SKIPPED"
    yield f"rejected {len(report.rejections)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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


@contextmanager
def _quiet_loop() -> Iterator[None]:
    """Leave out what Flower's loop logs in every round, as long as a strategy runs."""

    def passes(record: logging.LogRecord) -> bool:
        return record.msg not in _LOOP_MESSAGES

    logger = logging.getLogger("flwr")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
