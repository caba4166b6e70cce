"""Random streams: every draw of a run comes from numpy's SeedSequence over named integers, never from global state."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

# Larger than any round, because SeedSequence([seed, tag]) equals SeedSequence([seed, tag, 0]): a tag that could be a
# round would give a purpose the stream of client 0 in that round.
LABEL_MIXTURES: Final = int.from_bytes(b"mixt")
TRAIN_LAYOUT: Final = int.from_bytes(b"trai")
TEST_LAYOUT: Final = int.from_bytes(b"test")
PARTITIONER: Final = int.from_bytes(b"part")
INITIAL_PARAMETERS: Final = int.from_bytes(b"init")


def purpose_generator(seed: int, purpose: int) -> np.random.Generator:
    """Return the generator of one of the purposes named above."""
    return np.random.default_rng(np.random.SeedSequence([seed, purpose]))


def integer_seed(sequence: np.random.SeedSequence) -> int:
    """Return a non-negative 63-bit seed for libraries that know only integers."""
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def client_sequence(seed: int, server_round: int, client_id: str) -> np.random.SeedSequence:
    """Return the seed sequence of a client's work in one round.

    Parameters
    ----------
    seed : int
        The run's seed.
    server_round : int
        Round, counted from 1.
    client_id : str
        The client's stable id.

    Returns
    -------
    numpy.random.SeedSequence
        Different for each (seed, round, client), the same on every worker.
    """
    return np.random.SeedSequence([seed, server_round, client_key(client_id)])


def client_key(client_id: str) -> int:
    """Return an integer for a client id: its value if it is a plain decimal, else its sha256."""
    if client_id.isascii() and client_id.isdecimal() and str(int(client_id)) == client_id:
        return int(client_id)
    return int.from_bytes(hashlib.sha256(client_id.encode()).digest())
