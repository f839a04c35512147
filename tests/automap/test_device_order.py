"""Orders of the devices against brute force."""

import itertools

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.space.device_order import best_connected, device_orders, min_cut, min_cut_order


def measured(cluster, matrix):
    document = parse_cluster(cluster).to_json()
    return parse_cluster({**document, "bandwidth_GBps": matrix.tolist()})


def two_islands(members, inside=50.0, between=2.0):
    """[n, n] bandwidth of two groups of devices."""
    matrix = np.full((len(members), len(members)), between)
    matrix[np.equal.outer(members, members)] = inside
    return matrix


def test_alike_devices_have_one_order():
    assert device_orders(parse_cluster("2x4xA100")) == (tuple(range(8)),)


def test_kinds_come_in_every_sequence():
    given, swapped = device_orders(parse_cluster("2xV100-16GB+3xP100"))
    assert (given, swapped) == ((0, 1, 2, 3, 4), (2, 3, 4, 0, 1))
    assert len(device_orders(parse_cluster("1xV100-16GB+1xP100+1xA100"))) == 6
    # Hosts of one kind that stand apart are brought together; the order of the numbers stays the first.
    assert device_orders(parse_cluster("1xV100-16GB+2xP100+1xV100-16GB")) == ((0, 1, 2, 3), (0, 3, 1, 2), (1, 2, 0, 3))


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_least_of_all(seed):
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 9, size=(6, 6)).astype(float)
    weight += weight.T
    np.fill_diagonal(weight, rng.integers(0, 9, size=6))

    def cost(side):
        return weight[np.ix_(side, ~side)].sum()

    sides = [np.array(bits, dtype=bool) for bits in itertools.product((0, 1), repeat=6)]
    least = min(cost(side) for side in sides if side.any() and not side.all())
    found = min_cut(weight)
    assert found.any()
    assert not found.all()
    assert cost(found) == least


def test_slow_links_stand_between_the_halves():
    members = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    cluster = measured("8xV100-16GB", two_islands(members))
    orders = device_orders(cluster)
    assert orders == (tuple(range(8)), (0, 3, 5, 6, 1, 2, 4, 7), (7, 4, 2, 1, 6, 5, 3, 0))
    assert min_cut_order(np.ones((4, 4))) == (0, 1, 2, 3)


def test_one_way_links_count_by_their_slower_way():
    matrix = two_islands(np.array([0, 1, 0, 1]))
    matrix[0, 1] = 100.0
    assert min_cut_order(matrix) == (0, 2, 1, 3)


@pytest.mark.parametrize("slow", list(itertools.combinations(range(4), 2)))
def test_whichever_link_is_slow_it_is_within_no_pair(slow):
    matrix = np.full((4, 4), 100.0)
    matrix[slow] = matrix[slow[::-1]] = 0.01
    order = min_cut_order(matrix)
    # Two inner axes of two consecutive devices each.
    assert sorted(order) == [0, 1, 2, 3]
    assert {*order[:2]} != {*slow} != {*order[2:]}


@pytest.mark.parametrize("seed", range(4))
def test_the_best_connected_devices_stay(seed):
    rng = np.random.default_rng(seed)
    weight = rng.uniform(90.0, 100.0, size=(6, 6))
    poor = rng.choice(6, size=2, replace=False)
    weight[poor] = weight[:, poor] = 1.0
    assert {*best_connected(weight)[:4]} == {*range(6)} - {*poor.tolist()}
    assert best_connected(np.ones((4, 4))) == (0, 1, 2, 3)
