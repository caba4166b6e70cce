"""Aggregation rules as pure mathematics: one method per file, numpy and scipy only.

A rule is a `Rule`: a frozen dataclass of hyper-parameters with ``aggregate(updates, state) -> (Aggregate, state)``.
`RULES` is the registry: one line per method; strategies, run-config keys, docs and tests follow from it.
"""

from __future__ import annotations

from .adafed import AdaFed
from .afl import AFL
from .config import ConFIG
from .craft import CRAFT
from .ditto import Ditto
from .dqnfed import DQNFed
from .fedavg import FedAvg
from .fedfa import FedFa
from .fedfv import FedFV
from .fedheal import FedHEAL
from .fedlf import FedLF
from .fedmdfg import FedMDFG
from .fedmgda_plus import FedMGDAPlus
from .fedpcd import FedPCD
from .fedpw import FedPW
from .mgda import MGDA
from .pcd import PCD
from .propfair import PropFair
from .qfedavg import QFedAvg
from .rule import Rule
from .term import TERM
from .updates import Aggregate, State, Updates, client_order

RULES: dict[str, type[Rule]] = {
    "fedavg": FedAvg,
    "fedpcd": FedPCD,
    # the paper's other baselines
    "afl": AFL,
    "qfedavg": QFedAvg,
    "ditto": Ditto,
    "fedmgda-plus": FedMGDAPlus,
    "fedfv": FedFV,
    "fedlf": FedLF,
    "fedheal": FedHEAL,
    "fedpw": FedPW,
    "craft": CRAFT,
    # systems that it cites
    "term": TERM,
    "fedfa": FedFa,
    "propfair": PropFair,
    "mgda": MGDA,
    "fedmdfg": FedMDFG,
    "adafed": AdaFed,
    "dqnfed": DQNFed,
    "config": ConFIG,
    "pcd": PCD,
}

__all__ = ["RULES", "Aggregate", "FedAvg", "FedPCD", "Rule", "State", "Updates", "client_order"]
