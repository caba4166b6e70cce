"""Who takes part: cohorts from seed and round alone, rosters that say what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import cohort
from strategies.roster import Answer, CodeMismatchError, NoAnswerError, Roster, RosterError
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


def test_who_evaluates_is_not_who_trains() -> None:
    clients = [str(c) for c in range(100)]
    overlaps = [
        len({*cohort.draw(clients, 10, 0, r)} & {*cohort.draw(clients, 10, 0, r, "evaluate")}) for r in range(1, 101)
    ]
    assert np.mean(overlaps) < 2


@pytest.mark.parametrize(
    ("fraction", "minimum", "available", "expected"),
    [(0.1, 1, 100, 10), (0.29, 1, 100, 29), (0.1, 2, 5, 2), (0.0, 1, 5, 1), (1.0, 2, 1, 1), (0.05, 1, 100, 5)],
)
def test_cohort_size_follows_the_fraction(fraction: float, minimum: int, available: int, expected: int) -> None:
    assert cohort.size(fraction, minimum, available) == expected


def test_client_ids_have_one_order() -> None:
    assert sorted(["10", "b", "9", "a", "-1", "²", "9" * 5000], key=client_order)[:-1] == [
        "9",
        "10",
        "-1",
        "9" * 5000,
        "a",
        "b",
    ]


def logical(node: int, nodes: int, code: str = "x") -> Answer:
    ids = [str(c) for c in range(6) if c % nodes == node]
    return Answer.parse({"client-ids": ids, "hosting": "logical", "num-partitions": nodes, "code-hash": code})


def own(*clients: str, code: str = "x", part: int | None = None) -> Answer:
    shared = {} if part is None else {"partition-id": part}
    return Answer.parse({"client-ids": list(clients), "hosting": "own", "code-hash": code, **shared})


class Nodes:
    """Nodes with prepared answers; a list gives one answer per question."""

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def ask(self, nodes, patience):
        self.asked += nodes
        found = {}
        for node in nodes:
            answer = self.answers[node]
            found[node] = answer.pop(0) if isinstance(answer, list) else answer
        return found

    def join(self, roster: Roster, nodes: int = 1, clients: int = 1, timeout: float = 0.0) -> list[str]:
        return roster.wait(lambda: list(self.answers), self.ask, nodes=nodes, clients=clients, timeout=timeout)


def test_a_roster_of_simulated_nodes_is_complete_when_all_partitions_answered() -> None:
    nodes, roster = Nodes(a=logical(0, 3), b=logical(2, 3)), Roster()
    with pytest.raises(RosterError, match="2 of 3 nodes are ready, 1 missing"):
        nodes.join(roster)
    nodes.answers["c"] = logical(1, 3)
    assert nodes.join(roster, nodes=99) == []
    assert roster.client_ids == ("0", "1", "2", "3", "4", "5")
    assert roster.node_of["4"] == "c"
    assert nodes.asked == ["a", "b", "c"]


def test_of_a_deployment_no_fewer_simulated_nodes_than_the_run_needs_are_believed() -> None:
    nodes = Nodes(a=logical(0, 2), b=logical(1, 2))
    with pytest.raises(RosterError, match=r"2 of 5 nodes are ready, 3 missing; .* num-partitions=2.*min-nodes"):
        nodes.join(Roster(deployed=True), nodes=5)
    assert nodes.join(Roster(deployed=True), nodes=2) == []


@pytest.mark.parametrize("claim", [logical(0, 1), logical(2, 5)])
def test_one_node_alone_does_not_decide_that_the_federation_is_simulated(monkeypatch, claim: Answer) -> None:
    monkeypatch.setattr("strategies.roster._POLL_SECONDS", 0.0)
    nodes, roster = Nodes(first=claim, a=own("1"), b=own("2")), Roster(deployed=True)
    joining = iter([["first"], ["first"], ["first", "a", "b"]])
    (warning,) = roster.wait(lambda: next(joining), nodes.ask, nodes=2, clients=1, timeout=60.0)
    assert "node first does not take part" in warning
    assert "all nodes need a client-id" in warning
    assert (roster.client_ids, roster.logical) == (("1", "2"), False)
    assert list(roster.silent) == ["first"]


def test_nodes_of_two_kinds_of_which_neither_is_enough_are_an_error_with_both_named() -> None:
    with pytest.raises(RosterError, match=r"(?s)nodes refuse it: 1 of 2 nodes are ready.*node b: it is one of 0 'own'"):
        Nodes(a=logical(0, 1), b=own("1")).join(Roster(deployed=True), nodes=2)


def test_what_the_federation_is_stays_settled_when_all_nodes_leave() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2")), Roster()
    nodes.join(roster, nodes=2)
    nodes.answers = {"late": logical(0, 1)}
    (odd, goes_on) = nodes.join(roster, nodes=2)
    assert "node late does not take part" in odd
    assert "the run goes on" in goes_on
    assert roster.client_ids == ()


def test_a_node_is_one_client_for_a_whole_run() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2"), c=own("3")), Roster()
    nodes.join(roster, nodes=3)
    del nodes.answers["a"], nodes.answers["b"]
    nodes.join(roster, nodes=1)
    # Node b returns in the name of a site that is away.
    nodes.answers["b"] = own("1")
    (warning,) = nodes.join(roster, nodes=1)
    assert "node b does not take part: it was client '2' before and says client '1' now" in warning
    nodes.answers |= {"a": own("1")}
    nodes.join(roster, nodes=1)
    assert roster.node_of == {"3": "c", "1": "a"}


def test_a_late_node_is_one_client_too_even_while_others_are_missing() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2")), Roster()
    nodes.join(roster, nodes=2)
    del nodes.answers["b"]
    nodes.answers["late"] = own("3")
    nodes.join(roster, nodes=3)
    del nodes.answers["late"]
    nodes.join(roster, nodes=3)
    nodes.answers["late"] = own("2")
    assert any("it was client '3' before and says client '2' now" in warning for warning in nodes.join(roster))
    assert roster.client_ids == ("1",)


def test_a_node_does_not_take_the_part_of_the_data_of_a_site_that_is_away() -> None:
    nodes, roster = Nodes(a=own("1", part=1), b=own("2", part=2)), Roster()
    nodes.join(roster, nodes=2)
    nodes.answers = {}
    nodes.join(roster)
    nodes.answers = {"b": own("2", part=1)}
    assert any("was client '2' with partition-id=2 before" in warning for warning in nodes.join(roster))
    nodes.answers["newcomer"] = own("3", part=1)
    assert any("clients '1' and '3' have the same part" in warning for warning in nodes.join(roster))
    nodes.answers["a"] = own("1", part=1)
    nodes.join(roster)
    assert roster.node_of == {"1": "a"}


def test_simulated_clients_are_their_own_nodes_again_when_that_returns() -> None:
    nodes, roster = Nodes(a=logical(0, 2), b=logical(1, 2)), Roster()
    nodes.join(roster)
    del nodes.answers["a"]
    nodes.answers["late"] = logical(0, 2)
    nodes.join(roster)
    assert roster.node_of["0"] == "late"
    nodes.answers["a"] = logical(0, 2)
    nodes.join(roster)
    assert roster.node_of["0"] == "a"


def test_a_client_that_another_node_served_meanwhile_is_its_own_nodes_again_when_that_returns() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2")), Roster()
    nodes.join(roster, nodes=2)
    del nodes.answers["a"]
    nodes.answers["thief"] = own("1")
    nodes.join(roster)
    assert roster.node_of["1"] == "thief"
    nodes.answers["a"] = own("1")
    nodes.join(roster)
    assert roster.node_of == {"1": "a", "2": "b"}


def test_before_the_first_round_a_site_may_still_correct_its_client_id() -> None:
    nodes, roster = Nodes(a=own("wrong")), Roster()
    with pytest.raises(RosterError):
        nodes.join(roster, nodes=2)
    nodes.answers = {}
    with pytest.raises(RosterError):
        nodes.join(roster, nodes=2)
    nodes.answers = {"a": own("1"), "b": own("2")}
    nodes.join(roster, nodes=2)
    assert roster.client_ids == ("1", "2")


def test_nodes_that_did_not_answer_are_named_and_asked_again_while_they_are_needed(monkeypatch) -> None:
    monkeypatch.setattr("strategies.roster._POLL_SECONDS", 0.0)
    slow = NoAnswerError("TimeoutError: busy")
    nodes, roster = Nodes(a=own("1"), b=[slow] * 3 + [own("2")]), Roster()
    warnings = nodes.join(roster, nodes=2, timeout=5.0)
    assert roster.client_ids == ("1", "2")
    assert warnings == ["node b does not take part: TimeoutError: busy"]
    silent, empty = Nodes(a=NoAnswerError("no query function")), Roster()
    with pytest.raises(RosterError, match=r"(?s)0 of 2 nodes are ready, 2 missing\n  node a: no query function"):
        silent.join(empty, nodes=2)


REFUSAL = RosterError("device='cuda' is not there")


@pytest.mark.parametrize("answers", [{"a": REFUSAL, "b": REFUSAL}, {"a": own("1"), "b": REFUSAL}])
def test_a_run_that_nodes_refuse_ends_at_once_with_their_reasons(answers: dict) -> None:
    nodes = Nodes(**answers)
    with pytest.raises(RosterError, match=r"(?s)the run cannot start, since nodes refuse it: .*device='cuda' is not"):
        nodes.join(Roster(), nodes=2, timeout=600.0)
    assert nodes.asked == ["a", "b"]


def test_simulated_nodes_that_refuse_end_the_run_at_once_too() -> None:
    nodes = Nodes(a=logical(0, 3), b=REFUSAL, c=REFUSAL)
    with pytest.raises(RosterError, match=r"1 of 3 nodes are ready, 2 missing\n  2 nodes: device='cuda'"):
        nodes.join(Roster(), timeout=600.0)


def test_a_node_that_refuses_is_no_reason_to_end_while_others_may_still_answer(monkeypatch) -> None:
    monkeypatch.setattr("strategies.roster._POLL_SECONDS", 0.0)
    slow = NoAnswerError("it did not answer")
    nodes, roster = Nodes(a=own("1"), b=REFUSAL, c=[slow, slow, own("3")]), Roster()
    (refused, late) = nodes.join(roster, nodes=2, timeout=60.0)
    assert roster.client_ids == ("1", "3")
    assert ("device='cuda'" in refused, "did not answer" in late) == (True, True)


def test_a_node_that_refuses_is_no_reason_to_end_while_nodes_are_missing_anyway(monkeypatch) -> None:
    monkeypatch.setattr("strategies.roster._POLL_SECONDS", 0.0)
    nodes, roster = Nodes(a=REFUSAL), Roster()
    joining = iter([["a"], ["a"], ["a", "b"], ["a", "b", "c"]])
    nodes.answers |= {"b": own("2"), "c": own("3")}
    # With b there are two answers, one of them a refusal: at that moment two nodes are impossible.
    with pytest.raises(RosterError, match="1 of 2 nodes are ready, 1 missing"):
        roster.wait(lambda: next(joining), nodes.ask, nodes=2, clients=1, timeout=60.0)
    assert next(joining) == ["a", "b", "c"]


def test_a_refusal_in_a_run_under_way_ends_nothing() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2")), Roster()
    nodes.join(roster, nodes=2)
    del nodes.answers["b"]
    nodes.answers["c"] = REFUSAL
    warnings = nodes.join(roster, nodes=2)
    assert roster.client_ids == ("1",)
    assert any("the run goes on" in warning for warning in warnings)


def test_two_sites_with_the_same_part_of_the_data_are_named_before_the_first_round() -> None:
    with pytest.raises(RosterError, match=r"'site-a' and 'site-b' have the same part of the data: .*partition-id=3"):
        Nodes(a=own("site-a", part=3), b=own("site-b", part=3)).join(Roster())


def test_sites_with_their_own_data_or_other_parts_get_along() -> None:
    roster = Roster()
    sites = {"a": own("site-a", part=3), "b": own("site-b", part=4), "c": own("site-c"), "d": own("site-d")}
    assert Nodes(**sites).join(roster) == []
    assert len(roster.client_ids) == 4


def test_a_late_site_with_a_part_that_is_taken_is_left_out() -> None:
    nodes, roster = Nodes(a=own("site-a", part=3)), Roster()
    nodes.join(roster)
    nodes.answers["b"] = own("site-b", part=3)
    (warning,) = nodes.join(roster)
    assert "node b does not take part: clients 'site-a' and 'site-b' have the same part" in warning
    assert roster.client_ids == ("site-a",)


def test_a_site_that_comes_back_as_another_node_keeps_its_part() -> None:
    nodes, roster = Nodes(a=own("site-a", part=3)), Roster()
    nodes.join(roster)
    nodes.answers["b"] = own("site-a", part=3)
    nodes.join(roster)
    del nodes.answers["a"]
    assert nodes.join(roster) == []
    assert roster.node_of == {"site-a": "b"}


def test_a_silent_node_is_left_alone_once_enough_others_are_ready() -> None:
    nodes, roster = Nodes(a=own("1"), b=RosterError("busy")), Roster()
    nodes.join(roster)
    nodes.join(roster)
    assert nodes.asked == ["a", "b"]


def test_nodes_that_left_are_forgotten_and_new_ones_are_asked() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2")), Roster()
    nodes.join(roster)
    del nodes.answers["a"]
    nodes.answers["c"] = own("3")
    nodes.join(roster)
    assert roster.client_ids == ("2", "3")
    assert nodes.asked == ["a", "b", "c"]


def test_too_few_clients_are_counted() -> None:
    with pytest.raises(RosterError, match="1 of 3 clients are reachable"):
        Nodes(a=own("1")).join(Roster(), clients=3)


def test_other_client_code_is_refused_with_the_usual_cause_before_the_first_round() -> None:
    Nodes(a=logical(0, 1, code="other")).join(Roster())
    with pytest.raises(CodeMismatchError, match=r"hash other.*hash mine.*started in another project's folder"):
        Nodes(a=logical(0, 1, code="other")).join(Roster("mine"))


LATE = {
    "other code": (own("2", code="other"), "runs other client code"),
    "simulated": (logical(1, 1000, code="mine"), "all nodes need a client-id"),
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_node_that_does_not_fit_never_ends_the_run(name: str) -> None:
    nodes, roster = Nodes(a=own("1", code="mine")), Roster("mine")
    nodes.join(roster)
    nodes.answers["late"], pattern = LATE[name]
    (warning,) = nodes.join(roster)
    assert pattern in warning
    assert roster.client_ids == ("1",)
    assert nodes.join(roster) == []


def test_two_nodes_that_claim_the_same_client_are_named_before_the_first_round() -> None:
    with pytest.raises(RosterError, match=r"node b claims clients that node a serves already: 3\. Give every"):
        Nodes(a=own("3"), b=own("3")).join(Roster())


def test_a_client_that_a_late_node_claims_too_stays_with_the_first() -> None:
    nodes, roster = Nodes(a=own("3")), Roster()
    nodes.join(roster)
    nodes.answers["b"] = own("3")
    assert nodes.join(roster) == ["node b claims clients that node a serves already: 3"]
    assert roster.node_of == {"3": "a"}


def test_a_run_under_way_goes_on_without_nodes_that_left_and_waits_for_them_only_once() -> None:
    nodes, roster = Nodes(a=own("1"), b=own("2")), Roster()
    nodes.join(roster, nodes=2)
    del nodes.answers["b"]
    (warning,) = nodes.join(roster, nodes=2)
    assert "the run goes on after waiting for 0 s: 1 of 2 nodes are ready, 1 missing" in warning
    assert nodes.join(roster, nodes=2, timeout=60.0) == []
    assert roster.client_ids == ("1",)
    nodes.answers["b"] = own("2")
    assert nodes.join(roster, nodes=2, timeout=60.0) == []
    assert roster.client_ids == ("1", "2")


def test_one_reason_of_many_nodes_is_said_once() -> None:
    nodes = Nodes(**{f"n{i}": RosterError("device='cuda' is not there") for i in range(10)})
    with pytest.raises(RosterError) as error:
        nodes.join(Roster(), nodes=2)
    assert str(error.value).count("device='cuda'") == 1
    assert "10 nodes: device='cuda' is not there" in str(error.value)


@pytest.mark.parametrize(
    ("record", "pattern"),
    [
        ({}, "client-ids"),
        ({"client-ids": 3}, "client-ids"),
        ({"client-ids": ["0", ""]}, "client-ids"),
        ({"client-ids": ["9" * 5000], "hosting": "own"}, "up to 200 printable characters"),
        ({"client-ids": ["a\x1b[2J\nforged"], "hosting": "own"}, "printable"),
        ({"client-ids": ["1", "2"], "hosting": "own"}, "is one client, and this one claims 2"),
        ({"client-ids": [], "hosting": "own"}, "is one client, and this one claims 0"),
        ({"client-ids": ["1", "1"], "hosting": "logical", "num-partitions": 1}, "different names"),
        ({"client-ids": ["1"], "hosting": "own", "code-hash": "9" * 201}, "'code-hash' must be a checksum"),
        ({"client-ids": ["1"], "hosting": "own", "code-hash": "a\nb"}, "'code-hash' must be a checksum"),
        ({"client-ids": ["0"], "hosting": "cloud"}, "'hosting' must be"),
        ({"client-ids": ["0"], "hosting": "logical", "num-partitions": "3"}, "num-partitions"),
        ({"client-ids": ["0"], "hosting": "logical", "num-partitions": 10**9}, "num-partitions"),
        ({"client-ids": ["0"], "hosting": "own", "partition-id": "3"}, "partition-id"),
        ({"client-ids": ["0"], "hosting": "own", "partition-id": -1}, "partition-id"),
    ],
)
def test_an_unusable_answer_names_the_key(record: dict, pattern: str) -> None:
    with pytest.raises(RosterError, match=pattern) as error:
        Answer.parse(record)
    assert len(str(error.value)) < 200


def test_a_node_without_clients_of_its_own_is_still_a_node() -> None:
    for ids in ([], ""):
        answer = Answer.parse({"client-ids": ids, "hosting": "logical", "num-partitions": 3})
        assert answer.client_ids == ()
