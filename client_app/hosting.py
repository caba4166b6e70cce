"""Which clients a node is, and which part of the data each of them holds."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from client_app.config import DEFAULT_FOLDER, EMBEDDED, IMAGE_FOLDER, ConfigError, TaskConfig
from strategies import protocol

PARTITION_ID: Final = "partition-id"
"""Node-config key (int): set by Flower's simulation; in a deployment, the part of the data that the client takes."""
NUM_PARTITIONS: Final = "num-partitions"
"""Node-config key (int): number of simulated nodes."""
CLIENT_ID: Final = "client-id"
"""Node-config key (str or int): in a deployment, the stable name of the one client that the node is."""
DATA_ROOT: Final = "data-root"
"""Node-config key (str): in a deployment, the folder of the client's own data, all of which is the client's."""
DATA_DIR: Final = "data-dir"
"""Node-config key (str): this machine's copy of data that are divided among the clients; goes before the run's."""
DEVICE: Final = "device"
"""Node-config key (str): the device of this machine; goes before the run's."""
STATE_DIR: Final = "state-dir"
"""Node-config key (str): in a deployment, the folder in which the client keeps its memory and its decoded images."""

_KEYS: Final = (CLIENT_ID, PARTITION_ID, NUM_PARTITIONS, DATA_ROOT, DATA_DIR, DEVICE, STATE_DIR)
_DEPLOYED_KEYS: Final = (DATA_ROOT, STATE_DIR)


@dataclass(frozen=True)
class Roster:
    """The clients of one node.

    Parameters
    ----------
    client_ids : tuple of str
        The clients, in a stable order; empty if there are more simulated nodes than clients.
    hosting : str
        ``protocol.LOGICAL`` (a simulated node that serves its share of the clients) or ``protocol.OWN``.
    num_partitions : int
        Number of simulated nodes; 0 in a deployment.
    partition_id : int, optional
        The part that a deployed client takes of data which other clients have too; None if its data are its own.
    """

    client_ids: tuple[str, ...]
    hosting: str
    num_partitions: int
    partition_id: int | None = None

    def require(self, client_id: str) -> None:
        """Raise ValueError if the node does not serve the client."""
        if client_id not in self.client_ids:
            served = ", ".join(self.client_ids[:10]) + (", ..." if len(self.client_ids) > 10 else "")
            raise ValueError(
                f"{protocol.CLIENT_ID}={client_id!r} is not served by this node, which serves: {served or 'nobody'}"
            )


def task_on_node(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> TaskConfig:
    """Return the run's task as this node carries it out: with the node's own data and device.

    Parameters
    ----------
    run_config, node_config : Mapping
        Flower's ``context.run_config`` and ``context.node_config``.

    Returns
    -------
    TaskConfig
        The checked settings. A node's ``data-root``, ``data-dir`` and ``device`` go before the run's.

    Raises
    ------
    ConfigError
        If a key of the node config is unknown, or a value of either is not allowed.
    """
    _check_node_config(node_config)
    own = {key: node_config[key] for key in (DATA_DIR, DEVICE) if key in node_config}
    task = TaskConfig.from_run_config({**run_config, **own})
    if CLIENT_ID not in node_config:
        return task
    root, state = node_config.get(DATA_ROOT, ""), node_config.get(STATE_DIR, "")
    if root and task.dataset == EMBEDDED:
        raise ConfigError(
            f"{DATA_ROOT}={root!r} in the node config would not be used: dataset={EMBEDDED!r} comes with the app; "
            f"start the run with dataset={IMAGE_FOLDER!r} and image-classes, or leave {DATA_ROOT} out and give "
            f"{PARTITION_ID}"
        )
    return dataclasses.replace(task, data_root=root, state_dir=state or DEFAULT_FOLDER)


def _check_node_config(node_config: Mapping[str, Any]) -> None:
    for key in node_config:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown key {key!r} in the node config: did you mean {near!r}? Known keys: {', '.join(_KEYS)}"
            )
    for key in (DATA_ROOT, DATA_DIR, STATE_DIR):
        if key in node_config:
            _check_folder(key, node_config[key])
    if DATA_ROOT in node_config and DATA_DIR in node_config:
        raise ConfigError(
            f"{DATA_ROOT}={node_config[DATA_ROOT]!r} and {DATA_DIR}={node_config[DATA_DIR]!r} in the node config "
            f"exclude each other: keep {DATA_ROOT} if all data there are this client's, {DATA_DIR} if they are divided "
            "among the clients"
        )
    for key in _DEPLOYED_KEYS:
        if key in node_config and CLIENT_ID not in node_config:
            raise ConfigError(
                f"{key}={node_config[key]!r} in the node config needs a name for the client whose it is: add "
                f"{CLIENT_ID}='...'"
            )


def _check_folder(key: str, value: object) -> None:
    if not isinstance(value, str) or not (Path(value).is_absolute() or value == "~" or value.startswith("~/")):
        raise ConfigError(
            f"{key}={value!r} in the node config is not allowed: use an absolute path or one that starts with ~/, "
            "since a relative one would depend on the folder in which the SuperNode was started"
        )


def describe(task: TaskConfig, node_config: Mapping[str, Any]) -> Roster:
    """Return a node's roster with the part of shared data that a deployed client takes.

    Parameters
    ----------
    task : TaskConfig
        The task on this node.
    node_config : Mapping
        Flower's ``context.node_config``.

    Raises
    ------
    ConfigError
        See `read_roster` and `partition_index`.
    """
    roster = read_roster(node_config, task.num_clients)
    if roster.hosting == protocol.LOGICAL:
        return roster
    index = partition_index(node_config, roster.client_ids[0], task.num_clients)
    # The public data sets are the same in every folder, an image folder of one's own is not.
    own = bool(task.data_root) and task.dataset == IMAGE_FOLDER
    return dataclasses.replace(roster, partition_id=None if own else index)


def read_roster(node_config: Mapping[str, Any], num_clients: int) -> Roster:
    """Say which clients a node serves.

    Parameters
    ----------
    node_config : Mapping
        Flower's ``context.node_config``.
    num_clients : int
        The run's number of clients; used for simulated nodes only.

    Returns
    -------
    Roster
        One client under its own name if the node config has ``client-id``; otherwise, as in Flower's simulation, all
        clients whose number is ``partition-id`` modulo ``num-partitions``.

    Raises
    ------
    ConfigError
        If the node config has neither, or values out of range.
    """
    if CLIENT_ID in node_config:
        return Roster((_own_id(node_config[CLIENT_ID]),), protocol.OWN, 0)
    missing = [key for key in (PARTITION_ID, NUM_PARTITIONS) if key not in node_config]
    if missing:
        raise ConfigError(
            f"the node config lacks {' and '.join(missing)}: give a SuperNode its name by --node-config "
            f"\"{CLIENT_ID}='...'\", or {PARTITION_ID} and {NUM_PARTITIONS} to share the "
            "run's clients as in a simulation"
        )
    nodes = _integer(node_config, NUM_PARTITIONS, low=1)
    node = _integer(node_config, PARTITION_ID, low=0, high=nodes - 1)
    return Roster(tuple(str(client) for client in range(node, num_clients, nodes)), protocol.LOGICAL, nodes)


def partition_index(node_config: Mapping[str, Any], client_id: str, num_clients: int) -> int | None:
    """Return which part of the data a client holds.

    Parameters
    ----------
    node_config : Mapping
        Flower's ``context.node_config``.
    client_id : str
        A client of this node.
    num_clients : int
        Number of parts.

    Returns
    -------
    int or None
        In 0 .. num_clients - 1: the client's number in simulation; in a deployment the node config's
        ``partition-id`` if there is one, else None (all of it) with a ``data-root``, else the ``client-id`` if it is
        a number.

    Raises
    ------
    ConfigError
        If a deployed client names no part of the data.
    """
    if CLIENT_ID in node_config and PARTITION_ID in node_config:
        return _integer(node_config, PARTITION_ID, low=0, high=num_clients - 1)
    if DATA_ROOT in node_config:
        return None
    if client_id.isascii() and client_id.isdecimal() and int(client_id) < num_clients:
        return int(client_id)
    raise ConfigError(
        f"{CLIENT_ID}={client_id!r} does not say which part of the data is the client's: add {PARTITION_ID}=<0 to "
        f"{num_clients - 1}> to the SuperNode's --node-config (num-clients={num_clients}), or {DATA_ROOT}='<folder>' "
        "if the client has data of its own"
    )


def _own_id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(
            f"{CLIENT_ID}={value!r} in the node config is not allowed: use a non-empty string or a number"
        )
    return str(value)


def _integer(node_config: Mapping[str, Any], key: str, *, low: int, high: int | None = None) -> int:
    value = node_config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ConfigError(f"{key}={value!r} in the node config is not allowed: use {allowed}")
    return value
