"""The ClientApp: Flower's Message API and its older API, answered by the same client."""

from __future__ import annotations

import copy
from typing import Final, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp

from client_app import client, client_state
from client_app.client_state import PARTICIPATIONS
from client_app.code_hash import code_hash
from client_app.legacy_client import LegacyClient
from client_app.needs import read_needs, wants_training_split
from client_app.watchdog import ended_after_round_timeout
from strategies import protocol
from strategies.rules.updates import LOSS_BEFORE

_LEGACY_TYPES: Final = ("get_properties", "get_parameters")
_LEGACY_RECORDS: Final = ("fitins.parameters", "evaluateins.parameters")

_legacy_app = ClientApp(client_fn=lambda context: LegacyClient(context).to_client())


class DualApiClientApp(ClientApp):
    """A ClientApp that passes messages of the older API on to a legacy client.

    Flower lets one app serve either API; which of the two a message belongs to is plain from its type and records.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        context = _for_message(message, context)
        with ended_after_round_timeout(context):
            if message.metadata.message_type in _LEGACY_TYPES or any(key in message.content for key in _LEGACY_RECORDS):
                return _legacy_app(message, context)
            return super().__call__(message, context)


def _for_message(message: Message, context: Context) -> Context:
    """Return the context with the settings that the message brings, and the client's memory as of its round."""
    if message.has_error():
        return context
    settings = message.content.config_records.get(protocol.SETTINGS, ConfigRecord())
    configs = (record for record in message.content.config_records.values() if protocol.SERVER_ROUND in record)
    prepared = copy.copy(context)
    prepared.state = client_state.of_message(context, message.metadata.message_type, next(configs, ConfigRecord()))
    prepared.run_config = {**context.run_config, **cast(UserConfig, settings)}
    return prepared


app = DualApiClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which clients this node serves, and from which source."""
    roster = client.describe_node(context)
    record = ConfigRecord(
        {
            protocol.CLIENT_IDS: list(roster.client_ids),
            protocol.HOSTING: roster.hosting,
            protocol.NUM_PARTITIONS: roster.num_partitions,
            protocol.CODE_HASH: code_hash(),
            **({} if roster.partition_id is None else {protocol.PARTITION_ID: roster.partition_id}),
        }
    )
    return Message(RecordDict({protocol.ROSTER: record}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on the training examples of the client that the message names."""
    arrays, config = _content(message)
    order, rate = client.read_order(config), client.read_learning_rate(config)
    result = client.train_client(context, order, rate, arrays.to_torch_state_dict(), read_needs(config))
    metrics = MetricRecord(
        {
            protocol.NUM_EXAMPLES: result.num_examples,
            protocol.TRAIN_LOSS: result.train_loss,
            PARTICIPATIONS: result.participations,
            **result.metrics,
        }
    )
    content = RecordDict({protocol.ARRAYS: ArrayRecord(result.state), protocol.METRICS: metrics})
    if result.newton_direction is not None:
        content[protocol.NEWTON_DIRECTION] = ArrayRecord(result.newton_direction)
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the received model on the test examples of the client that the message names."""
    arrays, config = _content(message)
    order, state = client.read_order(config), arrays.to_torch_state_dict()
    if wants_training_split(config):
        count, loss = client.training_loss(context, order, state)
        record = MetricRecord({protocol.NUM_EXAMPLES: count, LOSS_BEFORE: loss})
        return Message(RecordDict({protocol.METRICS: record}), reply_to=message)
    result = client.evaluate_client(context, order, state, read_needs(config))
    metrics = MetricRecord(
        {
            protocol.NUM_EXAMPLES: result.num_examples,
            protocol.ACCURACY: result.accuracy,
            protocol.LOSS: result.loss,
            **result.personal,
        }
    )
    return Message(RecordDict({protocol.METRICS: metrics}), reply_to=message)


def _content(message: Message) -> tuple[ArrayRecord, ConfigRecord]:
    """Return a message's model and config, or say which record is missing."""
    arrays, config = (message.content.get(name) for name in (protocol.ARRAYS, protocol.CONFIG))
    if not isinstance(arrays, ArrayRecord) or not isinstance(config, ConfigRecord):
        raise ValueError(
            f"the message lacks an ArrayRecord {protocol.ARRAYS!r} or a ConfigRecord {protocol.CONFIG!r}; it holds: "
            f"{', '.join(message.content) or 'nothing'}"
        )
    return arrays, config
