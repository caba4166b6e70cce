"""Who takes part: cohorts from seed and round alone, rosters that say what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import cohort
from strategies.roster import Answer, Roster, RosterError
from strategies.rules import client_order


@given(st.lists(st.integers(0, 500), min_size=1, unique=True), st.integers(0, 2**40), st.integers(1, 10**6), st.data())
def test_a_cohort_depends_on_the_clients_the_seed_and_the_round_only(ids, seed, server_round, data) -> None:
    clients = [str(i) for i in ids]
    size = data.draw(st.integers(0, len(ids) + 3))
    drawn = cohort.draw(clients, size, seed, server_round)
    assert drawn == cohort.draw(data.draw(st.permutations(clients)), size, seed, server_round)
    assert len(set(drawn)) == len(drawn) == min(size, len(ids))
    assert list(drawn) == sorted(drawn, key=int)


def test_cohorts_are_uniform() -> None:
    clients = [str(c) for c in range(20)]
    counts = np.zeros(20)
    for server_round in range(1, 2001):
        for client in cohort.draw(clients, 5, 0, server_round):
            counts[int(client)] += 1
    # 500 expected, standard deviation 19.4.
    assert np.abs(counts - 500).max() < 80


def test_another_seed_or_round_gives_another_cohort() -> None:
    clients = [str(c) for c in range(100)]
    assert len({cohort.draw(clients, 10, s, r) for s in range(10) for r in range(1, 11)}) == 100


@pytest.mark.parametrize(
    ("fraction", "minimum", "available", "expected"),
    [(0.1, 1, 100, 10), (0.29, 1, 100, 29), (0.1, 2, 5, 2), (0.0, 1, 5, 1), (1.0, 2, 1, 1), (0.05, 1, 100, 5)],
)
def test_cohort_size_follows_the_fraction(fraction: float, minimum: int, available: int, expected: int) -> None:
    assert cohort.size(fraction, minimum, available) == expected


def test_client_ids_have_one_order() -> None:
    assert sorted(["10", "b", "9", "a", "-1", "²"], key=client_order) == ["9", "10", "-1", "a", "b", "²"]


def logical(node: int, nodes: int, code: str = "x") -> Answer:
    ids = [str(c) for c in range(6) if c % nodes == node]
    return Answer.parse({"client-ids": ids, "hosting": "logical", "num-partitions": nodes, "code-hash": code})


def test_a_roster_of_simulated_nodes_is_complete_when_all_partitions_answered() -> None:
    roster = Roster({11: logical(0, 3), 12: logical(2, 3)})
    assert roster.missing(2) == "2 of 3 nodes are ready, 1 missing"
    roster.answers[13] = logical(1, 3)
    assert roster.missing(2) is None
    assert roster.client_ids == ("0", "1", "2", "3", "4", "5")
    assert roster.node_of["4"] == 13


def test_a_roster_names_nodes_that_did_not_answer_and_why() -> None:
    roster = Roster(silent={5: "ValueError: No `query` function registered"})
    assert "0 of 2 nodes are ready, 2 missing" in str(roster.missing(2))
    assert "node 5: ValueError" in str(roster.missing(2))


def test_nodes_that_left_are_forgotten_and_new_ones_must_be_asked() -> None:
    roster = Roster({1: logical(0, 2), 2: logical(1, 2)}, {3: "no answer"})
    assert roster.update([2, 4]) == {4}
    assert set(roster.answers) == {2}
    assert not roster.silent


def test_other_client_code_is_refused_with_the_usual_cause() -> None:
    roster = Roster({1: logical(0, 1, code="other")})
    roster.check_code(None)
    with pytest.raises(RosterError, match=r"hash other.*hash mine.*started in another project's folder"):
        roster.check_code("mine")


@pytest.mark.parametrize(
    ("record", "pattern"),
    [
        ({}, "client-ids"),
        ({"client-ids": 3}, "client-ids"),
        ({"client-ids": ["0", ""]}, "client-ids"),
        ({"client-ids": ["0"], "hosting": "cloud"}, "'hosting' must be"),
        ({"client-ids": ["0"], "hosting": "own", "num-partitions": "3"}, "num-partitions"),
    ],
)
def test_an_unusable_answer_names_the_key(record: dict, pattern: str) -> None:
    with pytest.raises(RosterError, match=pattern):
        Answer.parse(record)


def test_a_node_without_clients_of_its_own_is_still_a_node() -> None:
    for ids in ([], ""):
        answer = Answer.parse({"client-ids": ids, "hosting": "logical", "num-partitions": 3})
        assert answer.client_ids == ()
