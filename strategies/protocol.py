"""The words that server and clients exchange: record names, config keys and metric keys.

A ClientApp that answers with these names works with every strategy of this package. ``client-id`` names one
*logical* client: in simulation one node may serve several, in a deployment a node serves exactly one.
"""

from __future__ import annotations

from typing import Final

ARRAYS: Final = "arrays"
"""ArrayRecord: the model, in both directions."""
CONFIG: Final = "config"
"""ConfigRecord from server to client."""
METRICS: Final = "metrics"
"""MetricRecord from client to server."""
ROSTER: Final = "roster"
"""ConfigRecord in the answer to a QUERY: which clients the node serves (`CLIENT_IDS`, `HOSTING`, `CODE_HASH`)."""

CLIENT_ID: Final = "client-id"
"""Config key (str): the client that a message is meant for."""
SERVER_ROUND: Final = "server-round"
"""Config key (int): the round, counted from 1."""
LOCAL_LEARNING_RATE: Final = "local-learning-rate"
"""Config key (float): the local learning rate of this round."""
STRATEGY: Final = "strategy"
"""Config key (str, optional): who trains. Clients keep a memory of their own for each, so that runs stay paired."""

EXPERIMENT: Final = "experiment"
"""Config key (str, optional): the run, resumed or not; a deployed client keeps its memory under this name."""
CLIENT_STATE: Final = "client-state"
"""Config key (str, optional): folder in which simulated clients, and no others, keep their memory."""
RESUMABLE_SINCE: Final = "resumable-since"
"""Config key (int, optional): oldest round after which the run may be resumed; older memory is of no use."""
RESUMED_AFTER: Final = "resumed-after"
"""Config key (list of int, optional): rounds after which the run was resumed; what clients noted later than that before
it was resumed is no part of the run."""
SETTINGS: Final = "settings"
"""ConfigRecord from server to client (optional): run-config values that go before those of Flower's run, since a run
that is resumed keeps the settings with which it was started."""

CLIENT_IDS: Final = "client-ids"
"""Roster key (list of str): the clients that the node serves."""
HOSTING: Final = "hosting"
"""Roster key (str): `LOGICAL` or `OWN`."""
LOGICAL: Final = "logical"
"""The node is a simulated one and serves its share of the run's clients."""
OWN: Final = "own"
"""The node is one client with its own data."""
NUM_PARTITIONS: Final = "num-partitions"
"""Roster key (int): how many simulated nodes share the run's clients; 0 in a deployment."""
PARTITION_ID: Final = "partition-id"
"""Roster key (int, optional): in a deployment, the part that the client takes of data which others have too."""
CODE_HASH: Final = "code-hash"
"""Roster key (str): hash of the app's source as the node imported it."""

NUM_EXAMPLES: Final = "num-examples"
"""Metric key (int): examples that the client trained or evaluated on."""
TRAIN_LOSS: Final = "train-loss"
"""Metric key (float): mean loss over the client's local training."""
ACCURACY: Final = "accuracy"
"""Metric key (float in [0, 1]): accuracy on the client's own test examples."""
LOSS: Final = "loss"
"""Metric key (float): mean loss on the client's own test examples."""

NEEDS: Final = "needs"
"""Config key (str): what the rule needs of the client beyond its update, names separated by commas."""
SPLIT: Final = "split"
"""Config key (str) of an evaluation message: which examples; `TRAINING_SPLIT`, or absent for the test examples."""
TRAINING_SPLIT: Final = "training"
"""The client answers with ``loss-before``, its mean loss on its training examples at the received model."""
PERSONAL_ACCURACY: Final = "personal-accuracy"
"""Metric key (float in [0, 1]): accuracy of the client's personal model on its own test examples."""
PERSONAL_LOSS: Final = "personal-loss"
"""Metric key (float): mean loss of the client's personal model on its own test examples."""
NEWTON_DIRECTION: Final = "newton-direction"
"""ArrayRecord from client to server: its quasi-Newton direction, by parameter name."""
