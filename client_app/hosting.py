"""Which clients a node is, and which part of the data each of them holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from client_app.config import ConfigError
from strategies import protocol

PARTITION_ID: Final = "partition-id"
"""Node-config key (int): set by Flower's simulation; in a deployment, the part of the data that the client takes."""
NUM_PARTITIONS: Final = "num-partitions"
"""Node-config key (int): number of simulated nodes."""
CLIENT_ID: Final = "client-id"
"""Node-config key (str or int): in a deployment, the stable name of the one client that the node is."""


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
    """

    client_ids: tuple[str, ...]
    hosting: str
    num_partitions: int

    def require(self, client_id: str) -> None:
        """Raise ValueError if the node does not serve the client."""
        if client_id not in self.client_ids:
            served = ", ".join(self.client_ids[:10]) + (", ..." if len(self.client_ids) > 10 else "")
            raise ValueError(
                f"{protocol.CLIENT_ID}={client_id!r} is not served by this node, which serves: {served or 'nobody'}"
            )


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


def partition_index(node_config: Mapping[str, Any], client_id: str, num_clients: int) -> int:
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
    int
        In 0 .. num_clients - 1: the client's number in simulation; in a deployment the node config's
        ``partition-id`` if there is one, else the ``client-id`` if it is a number.

    Raises
    ------
    ConfigError
        If a deployed client names no part of the data.
    """
    if CLIENT_ID in node_config and PARTITION_ID in node_config:
        return _integer(node_config, PARTITION_ID, low=0, high=num_clients - 1)
    if client_id.isascii() and client_id.isdecimal() and int(client_id) < num_clients:
        return int(client_id)
    raise ConfigError(
        f"{CLIENT_ID}={client_id!r} does not say which part of the data is the client's: add {PARTITION_ID}=<0 to "
        f"{num_clients - 1}> to the SuperNode's --node-config (num-clients={num_clients})"
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
