from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.config import ConfigError, TaskConfig
from client_app.hosting import Roster, describe, partition_index, read_roster, task_on_node

OWN_IMAGES = {"dataset": "image-folder", "image-classes": "cat,dog"}


@given(clients=st.integers(1, 300), nodes=st.integers(1, 40))
def test_simulated_nodes_serve_every_client_exactly_once(clients: int, nodes: int) -> None:
    rosters = [read_roster({"partition-id": node, "num-partitions": nodes}, clients) for node in range(nodes)]
    served = [client for roster in rosters for client in roster.client_ids]
    assert sorted(served, key=int) == [str(client) for client in range(clients)]
    assert {(roster.hosting, roster.num_partitions) for roster in rosters} == {("logical", nodes)}


def test_a_simulated_node_serves_the_clients_of_its_residue() -> None:
    assert read_roster({"partition-id": 1, "num-partitions": 3}, 8).client_ids == ("1", "4", "7")


@pytest.mark.parametrize(("value", "name"), [("site-a", "site-a"), (7, "7"), ("7", "7")])
def test_a_deployed_node_is_one_client(value: object, name: str) -> None:
    assert read_roster({"client-id": value}, 5) == Roster((name,), "own", 0)


def test_a_client_id_wins_over_a_partition_id() -> None:
    config = {"client-id": "site-a", "partition-id": 1, "num-partitions": 2}
    assert read_roster(config, 5) == Roster(("site-a",), "own", 0)


@pytest.mark.parametrize("value", ["", True, 1.5])
def test_an_unusable_client_id_is_an_error_that_names_it(value: object) -> None:
    with pytest.raises(ConfigError, match="client-id="):
        read_roster({"client-id": value}, 5)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "partition-id and num-partitions"),
        ({"partition-id": 0}, "lacks num-partitions"),
        ({"num-partitions": 1}, "lacks partition-id"),
    ],
)
def test_a_node_without_identity_is_an_error_that_names_the_keys(config: dict[str, int], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}.*client-id"):
        read_roster(config, 5)


@pytest.mark.parametrize(
    ("node", "nodes", "key"),
    [
        (-1, 2, "partition-id"),
        (2, 2, "partition-id"),
        ("0", 2, "partition-id"),
        (0, 0, "num-partitions"),
        (0, True, "num-partitions"),
    ],
)
def test_a_partition_out_of_range_is_an_error_that_names_the_key(node: object, nodes: object, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        read_roster({"partition-id": node, "num-partitions": nodes}, 5)


def test_a_client_of_another_node_is_refused_by_name() -> None:
    roster = read_roster({"partition-id": 0, "num-partitions": 2}, 100)
    roster.require("98")
    with pytest.raises(ValueError, match=r"client-id='3' is not served by this node, which serves: 0, 2, .*\.\.\."):
        roster.require("3")


def test_a_node_without_clients_refuses_everyone() -> None:
    with pytest.raises(ValueError, match="nobody"):
        read_roster({"partition-id": 3, "num-partitions": 4}, 2).require("3")


@pytest.mark.parametrize(
    ("config", "client_id", "index"),
    [
        ({"partition-id": 1, "num-partitions": 2}, "7", 7),
        ({"client-id": 4}, "4", 4),
        ({"client-id": "site-a", "partition-id": 3}, "site-a", 3),
        ({"client-id": "4", "partition-id": 3, "num-partitions": 2}, "4", 3),
        ({"client-id": "site-a", "data-root": "/data"}, "site-a", None),
        ({"client-id": "4", "data-root": "/data"}, "4", None),
        ({"client-id": "site-a", "data-root": "/data", "partition-id": 3}, "site-a", 3),
    ],
)
def test_a_client_knows_its_part_of_the_data(config: dict[str, object], client_id: str, index: int | None) -> None:
    assert partition_index(config, client_id, 10) == index


@pytest.mark.parametrize("client_id", ["site-a", "10", "-1", "\uff11"])
def test_a_deployed_client_without_a_part_of_the_data_is_told_which_key_to_set(client_id: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"client-id='{client_id}'.*partition-id=<0 to 9>.*num-clients=10.*data-root='"
    ):
        partition_index({"client-id": client_id}, client_id, 10)


def test_a_part_of_the_data_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"partition-id=10 .*0 to 9"):
        partition_index({"client-id": "site-a", "partition-id": 10}, "site-a", 10)


def test_a_nodes_own_data_and_device_go_before_the_runs() -> None:
    node = {"client-id": "site-a", "partition-id": 3, "device": "cuda:1", "data-dir": "/mine"}
    task = task_on_node({"data-dir": "/theirs", "device": "cpu", "seed": 3}, node)
    assert (task.seed, task.device, task.data_dir, str(task.data_path)) == (3, "cuda:1", "/mine", "/mine")
    run = {"data-dir": "/theirs", "dataset": "cifar10"}
    own = task_on_node(run, {"client-id": "site-a", "data-root": "/mine", "state-dir": "/state"})
    assert (str(own.data_path), own.state_dir) == ("/mine", "/state")


@pytest.mark.parametrize("part", [{}, {"partition-id": 3}])
def test_data_of_a_sites_own_that_the_run_would_not_read_are_an_error(part: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"data-root='/mine' .* would not be used: dataset='digits'.*'image-folder'"):
        task_on_node({}, {"client-id": "site-a", "data-root": "/mine", **part})


def test_only_deployed_clients_have_a_state_folder() -> None:
    assert task_on_node({}, {"partition-id": 0, "num-partitions": 1}) == TaskConfig()
    assert task_on_node({}, {"client-id": "site-a"}).state_dir == "~/.cache/fedpcd"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            {"data-path": "/x"},
            r"unknown key 'data-path' in the node config: did you mean 'data-root'.*Known keys: client",
        ),
        ({"client_id": "a"}, "unknown key 'client_id' .*did you mean 'client-id'"),
        ({"Device": "cpu"}, "unknown key 'Device' .*did you mean 'device'"),
        ({"data-root": "data"}, "data-root='data' in the node config .*an absolute path"),
        ({"data-dir": "./data"}, "data-dir='./data' in the node config .*an absolute path"),
        ({"state-dir": ""}, "state-dir='' in the node config .*an absolute path"),
        ({"data-root": 3}, "data-root=3 in the node config"),
        (
            {"data-root": "/x", "data-dir": "/y"},
            "data-root='/x' and data-dir='/y' in the node config exclude each other",
        ),
        ({"device": "gpu"}, "device='gpu' is not allowed"),
    ],
)
def test_a_wrong_node_config_is_an_error_that_names_the_key(node: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task_on_node({}, {"client-id": "site-a", **node})


@pytest.mark.parametrize("key", ["data-root", "state-dir"])
def test_folders_of_one_client_need_its_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='/x' in the node config needs a name .*add client-id="):
        task_on_node({}, {"partition-id": 0, "num-partitions": 1, key: "/x"})


@pytest.mark.parametrize(
    ("run", "node", "part"),
    [
        ({}, {"client-id": "2"}, 2),
        ({}, {"client-id": "site-a", "partition-id": 3}, 3),
        ({"dataset": "cifar10"}, {"client-id": "site-a", "partition-id": 3, "data-root": "/x"}, 3),
        (OWN_IMAGES, {"client-id": "site-a", "partition-id": 3, "data-dir": "/x"}, 3),
        (OWN_IMAGES, {"client-id": "site-a", "partition-id": 3, "data-root": "/x"}, None),
        ({"dataset": "cifar10"}, {"client-id": "site-a", "data-root": "/x"}, None),
    ],
)
def test_a_roster_names_the_part_of_data_that_others_have_too(
    run: dict[str, object], node: dict[str, object], part: int | None
) -> None:
    assert describe(task_on_node(run, node), node) == Roster((str(node["client-id"]),), "own", 0, part)


def test_a_simulated_roster_names_no_part_of_the_data() -> None:
    node = {"partition-id": 0, "num-partitions": 1}
    assert describe(TaskConfig(num_clients=2), node) == Roster(("0", "1"), "logical", 1)
