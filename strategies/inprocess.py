"""Flower's Grid inside one process: the same ServerApp, strategy, ClientApp and messages, without Ray or a SuperLink.

For tests and quick runs. Clients answer one after the other, in the order in which they are asked.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

_CLIENT_APP_RAISED = 2
_RUN_ID = 1


class InProcessGrid(Grid):
    """A federation of simulated nodes in this process.

    Parameters
    ----------
    client_app : ClientApp
        Serves every node.
    num_nodes : int
        How many nodes; each gets ``partition-id`` and ``num-partitions`` as in Flower's simulation. Ignored if
        `node_configs` is given.
    run_config : mapping
        The run's configuration, as every client sees it.
    node_configs : sequence of mapping, optional
        One configuration per node, e.g. ``{"client-id": "site-a"}`` as in a deployment.
    intercept : callable (Message, Context) -> Message or None, optional
        Called before the ClientApp: may return a reply instead of it, raise, or return `SILENT` to never answer.
    """

    SILENT = object()

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int = 2,
        run_config: Mapping[str, Any] | None = None,
        node_configs: Iterable[Mapping[str, Any]] | None = None,
        intercept: Callable[[Message, Context], object] | None = None,
    ) -> None:
        # Flower's Message constructor asks in whose name it is made.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = _RUN_ID
        configs = list(
            [{"partition-id": i, "num-partitions": num_nodes} for i in range(num_nodes)]
            if node_configs is None
            else node_configs
        )
        # Node ids are as arbitrary here as Flower's: nothing may depend on them.
        draws = np.random.default_rng().integers(1 << 62, 1 << 63, size=len(configs), dtype=np.uint64)
        self._client_app = client_app
        self._intercept = intercept
        self._numbers = itertools.count(1)
        self._contexts = {
            int(node): Context(_RUN_ID, int(node), dict(config), RecordDict(), cast(UserConfig, dict(run_config or {})))
            for node, config in zip(draws, configs, strict=True)
        }
        self._inbox: dict[str, Message] = {}
        # The older API asks from one thread per client. NumPy parses the header of an array with `ast`, of which
        # CPython 3.11 keeps state that threads share: now and then a client failed with "AST constructor recursion
        # depth mismatch" (python/cpython#106905).
        self._one_at_a_time = threading.Lock()

    def set_run(self, run: Any) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Any:
        """The run, as far as Flower's compatibility layer looks at it."""
        return types.SimpleNamespace(run_id=_RUN_ID)

    def create_message(self, *args: Any, **keywords: Any) -> Message:
        """Refuse: deprecated in Flower; construct a Message instead."""
        raise NotImplementedError("construct flwr.app.Message instead")

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the clients answer at once; `pull_messages` hands the replies out."""
        ids = []
        for message in messages:
            number = str(next(self._numbers))
            message.metadata.__dict__["_message_id"] = number
            ids.append(number)
            reply = self._answer(message)
            if reply is not None:
                self._inbox[number] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to these messages, as far as there are any; each is handed out once."""
        return [self._inbox.pop(number) for number in message_ids if number in self._inbox]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002
        """Send messages and return the replies; whoever is silent now stays so, so there is nothing to wait for."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        try:
            with self._one_at_a_time:
                return self._reply(message)
        except Exception as error:  # As Flower does: a client's exception becomes an error reply.
            return Message(Error(code=_CLIENT_APP_RAISED, reason=f"{type(error).__name__}: {error}"), reply_to=message)

    def _reply(self, message: Message) -> Message | None:
        context = self._contexts[message.metadata.dst_node_id]
        reply = self._intercept(message, context) if self._intercept is not None else None
        if reply is self.SILENT:
            return None
        return cast(Message, reply) if reply is not None else self._client_app(message, context)
