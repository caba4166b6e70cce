"""One strategy's run, followed round by round: evaluated, written, printed, and saved so that it can go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from server_app.evaluation import check_agreement, usable_metrics
from server_app.progress import clock, evaluation_parts, training_parts
from server_app.strategy_folder import clean
from strategies import METHODS, protocol
from strategies.engine import TOO_FEW_REPLIES
from strategies.rules.updates import PERSONAL_MODEL

if TYPE_CHECKING:
    from server_app.evaluation import ClientMetrics
    from server_app.experiment import Experiment
    from server_app.fairness import Fairness
    from server_app.strategy_folder import StrategyFolder
    from strategies.reports import EvaluationReport, RoundReport

__all__ = ["ExperimentError", "StrategyRun"]


class ExperimentError(RuntimeError):
    """The run cannot be counted as a success; the text says why and where its results lie."""


class StrategyRun:
    """Follows one strategy of an experiment.

    Parameters
    ----------
    experiment : Experiment
        What the strategies share.
    name : str
        The strategy's name.
    folder : StrategyFolder
        Where its results go.
    """

    def __init__(self, experiment: Experiment, name: str, folder: StrategyFolder) -> None:
        self.experiment = experiment
        self.folder = folder
        self.writer = folder.writer
        rule = METHODS[name].rule_class(**experiment.config.hyper_parameters[name])
        # Only the clients have their personal models.
        self.federated = experiment.evaluation in ("federated", "both") or PERSONAL_MODEL in rule.required()
        self.strategy = experiment.strategy(
            name, federated=self.federated, on_round=self._on_round, on_evaluation=self._on_evaluation
        )
        self.first_rejection = ""
        self._skipped_in_a_row = 0
        self._client_config = ConfigRecord({protocol.STRATEGY: name})
        self._report: RoundReport | None = None
        self._evaluated: tuple[int, ClientMetrics] = (-1, {})
        self._started = self._round_ended = time.perf_counter()

    def train(self) -> dict[str, Any]:
        """Train to the last round and return the summary.

        Raises
        ------
        ExperimentError
            If too many rounds in a row had to be skipped, or none was of use.
        """
        experiment, config, checkpoint = self.experiment, self.experiment.config, self.folder.checkpoint
        self._client_config.update(self.folder.client_config(logical=experiment.logical))
        with self.writer as writer:
            result = self.strategy.start(
                grid=experiment.grid,
                initial_arrays=experiment.initial if checkpoint is None else checkpoint.arrays,
                num_rounds=config.num_server_rounds,
                timeout=config.round_timeout,
                train_config=self._client_config,
                evaluate_config=self._client_config,
                evaluate_fn=self._evaluate,
                rounds_before=self.folder.rounds_before,
                memory=None if checkpoint is None else checkpoint.memory,
            )
            if self._accepted == 0:
                raise ExperimentError(self._nothing_trained(config.num_server_rounds))
            summary = writer.finish(result.arrays)
        clean(self.folder.path)
        return {**summary, "folder": str(self.folder.path)}

    @property
    def _accepted(self) -> int:
        return sum(len(line["accepted"]) for line in self.writer.rounds.values())

    def _on_round(self, report: RoundReport) -> None:
        """Take the strategy's account of a round's training."""
        self.writer.record_round(report)
        self._report = report
        if report.rejections and not self.first_rejection:
            first = report.rejections[0]
            self.first_rejection = f"client {first.client_id} in round {report.round}: {first.reason}"
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if report.skipped else 0
        if self._skipped_in_a_row >= self.experiment.config.max_skipped_rounds:
            raise ExperimentError(self._gave_up(report))

    def _gave_up(self, report: RoundReport) -> str:
        if self._accepted == 0 and not self._too_few:
            return self._nothing_trained(report.round)
        config = self.experiment.config
        status = report.diagnostics.get("status", "no usable reply")
        last = [f"client {r.client_id}: {r.reason}" for r in report.rejections[:3]]
        return (
            f"{self._skipped_in_a_row} rounds in a row were skipped, the last one being round {report.round} ({status}"
            f"{'; ' if last else ''}{'; '.join(last)}), and max-skipped-rounds={config.max_skipped_rounds}, "
            f"min-replies={config.min_replies}; {self.experiment.how_to_resume()}"
        )

    @property
    def _too_few(self) -> bool:
        return self._report is not None and self._report.diagnostics.get("status") == TOO_FEW_REPLIES

    def _nothing_trained(self, rounds: int) -> str:
        if self._too_few:
            return (
                f"no round of {rounds} had min-replies={self.experiment.config.min_replies} usable replies, so nothing "
                f"was trained; first rejection: {self.first_rejection or 'none'}"
            )
        return (
            f"{type(self.strategy).__name__} received no usable reply in {rounds} rounds, so nothing was trained; "
            f"first reason: {self.first_rejection or 'no client was asked'}. All reasons: "
            f"{self.folder.path / 'rejections.jsonl'}"
        )

    def _on_evaluation(self, report: EvaluationReport) -> None:
        """Take the clients' evaluation of a round's model."""
        metrics, rejections = usable_metrics(report)
        self.writer.record_rejections(report.round, "evaluate", rejections)
        self._evaluated = report.round, metrics

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate the global model where that is due, and end the round."""
        self.writer.latest = arrays
        result = None
        if self._due(server_round):
            metrics = self._metrics(server_round, arrays)
            result = self.writer.record_evaluation(server_round, metrics, self._variants())
        iterate = self.strategy.last_iterate
        self.folder.save(server_round, arrays if iterate is None else iterate, self.strategy.engine.memory)
        self._client_config.update(self.folder.client_config(logical=self.experiment.logical))
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
        messages = self.strategy.configure_evaluate(0, arrays, self._client_config, grid)
        self.strategy.aggregate_evaluate(0, grid.send_and_receive(messages, timeout=timeout))

    def _print(self, server_round: int, result: Fairness | None, seconds: float) -> None:
        experiment = self.experiment
        total = experiment.config.num_server_rounds
        parts = [f"round {server_round:>{len(str(total))}}/{total}", type(self.strategy).__name__]
        parts += evaluation_parts(result)
        if self._report is None:
            self._started = time.perf_counter()  # the pace is that of rounds, without setting up and round 0
        else:
            experiment.rounds_left -= 1
            pace = (time.perf_counter() - self._started) / (server_round - self.folder.rounds_before)
            parts += [*training_parts(self._report), f"{seconds:.2f} s"]
            parts.append(f"ETA {clock(pace * experiment.rounds_left)}")
        experiment.say("  ".join(parts))
