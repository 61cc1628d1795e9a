"""The tournament of nodes, and what is made of its times. (Two nodes exchange for real in tests/cluster.)"""

import pytest

from recipe.preflight.network import describe, tournament


@pytest.mark.parametrize("num_nodes", range(2, 10))
def test_every_node_meets_every_other_once(num_nodes: int) -> None:
    rounds = tournament(num_nodes)
    met: list[set[int]] = [set() for _ in range(num_nodes)]
    for partner in rounds:
        for node, other in enumerate(partner):
            assert partner[other] == node, "both know of it"
            if other != node:
                assert other not in met[node]
                met[node].add(other)
    assert all(met[node] == set(range(num_nodes)) - {node} for node in range(num_nodes))
    assert len(rounds) == num_nodes - 1 + num_nodes % 2, "as few rounds as can be"


def test_pairs_are_listed_with_their_bandwidth() -> None:
    (line,) = describe({(0, 1): 45.678}, ["node1", "node2"], 39.2, 16)
    assert line == "network, GB/s each way: node1-node2 45.68; all-reduce over 16 ranks 39.20 (bus)"


def test_a_slow_node_is_named() -> None:
    names = ["a", "b", "c", "d"]
    pairs = {(0, 1): 40.0, (0, 2): 41.0, (0, 3): 5.0, (1, 2): 39.0, (1, 3): 5.0, (2, 3): 6.0}
    _, warning = describe(pairs, names, 5.0, 32)
    assert warning.startswith("warning: d exchanges 5.00 GB/s") and "sbatch --exclude=d" in warning
    assert len(describe(dict.fromkeys(pairs, 40.0), names, 40.0, 32)) == 1


def test_many_pairs_are_summed_up() -> None:
    names = [f"n{i}" for i in range(10)]
    pairs = {(a, b): 10.0 + a for a in range(10) for b in range(a + 1, 10)}
    assert "45 pairs, 10.00 to 18.00" in describe(pairs, names, 9.0, 80)[0]
