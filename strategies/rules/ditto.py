"""Ditto (Li et al. 2021): a model of its own for each client, pulled towards the global one, which FedAvg trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .fedavg import averaging_step
from .rule import ClientValue, Rule
from .updates import PERSONAL_MODEL, Aggregate, State, Updates
from .validation import check_learning_rate, check_range, check_whole


@dataclass(frozen=True)
class Ditto(Rule):
    """The weighted mean of the updates, while each client also trains a personal model around the global one.

    Server: ``theta <- theta - (eta_g / eta_l) sum_i p_i Delta_i``. Client, after its update is made:
    ``v_i <- v_i - eta_l (grad F_i(v_i) + lambda (v_i - theta_t))``, starting at ``theta_t`` the first time.

    Needs: personal-model.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical.

    Cost: as FedAvg on the server; clients train twice and store a model.

    Use it when every client may have a model of its own; its global model is FedAvg's, bit for bit.

    Parameters
    ----------
    personal_weight : float
        lambda, in [0, 1e6]; the authors' grid is 0.05 to 0.2. 0: personal models are trained on local data alone.
    personal_epochs : int
        Epochs of personal training, >= 0; 0 means as many as local epochs.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the paper in nothing. Personal models are evaluated apart from the global one: with few classes per
    client they look near perfect on data like their own.

    References
    ----------
    Li, Hu, Beirami, Smith, *Ditto: Fair and Robust Federated Learning Through Personalization*, arXiv 2012.04221.
    """

    individual_updates: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = (PERSONAL_MODEL,)
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "scale-equivariant", "fedavg-when-identical")

    personal_weight: float = 0.1
    personal_epochs: int = 0
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("personal_weight", self.personal_weight, 0.0, 1e6)
        check_whole("personal_epochs", self.personal_epochs, 0)
        check_learning_rate(self.server_learning_rate)

    def client_config(self) -> dict[str, ClientValue]:
        """How clients train their personal models."""
        return {"personal-weight": float(self.personal_weight), "personal-epochs": int(self.personal_epochs)}

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Average one round.

        Parameters
        ----------
        updates : Updates
            The round's updates.
        state : dict
            Not used.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state as it was.
        """
        return Aggregate(averaging_step(updates, self.server_learning_rate), {"status": "solved"}), state
