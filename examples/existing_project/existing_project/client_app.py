"""A client as many Flower projects have it."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import examples, probabilities, train

app = ClientApp()


def _own(context: Context) -> tuple[np.ndarray, np.ndarray]:
    return examples(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train on this client's digits."""
    images, labels = _own(context)
    weights = message.content["arrays"]["weights"].numpy()
    weights = train(weights, images, labels, float(context.run_config["learning-rate"]))
    arrays = ArrayRecord({"weights": Array(weights)})
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(labels)})}), reply_to=message
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the accuracy on this client's digits."""
    images, labels = _own(context)
    predicted = probabilities(message.content["arrays"]["weights"].numpy(), images).argmax(axis=1)
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": float((predicted == labels).mean())})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
