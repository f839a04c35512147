"""The bandwidth between devices, and the least one between many, against the links of all pairs."""

import itertools

import numpy as np
import pytest

from agents.planners.pair_links import PairLinks
from automap.cluster import parse_cluster
from automap.group_links import group_link

CLUSTERS = (
    "5xV100",
    "2x2xV100-16GB+1x3xA100@25Gbit",
    "3x1xV100-16GB+2xP100+1x2xV100-16GB",
    "2x3xA100+1xH100+1xA100+4xcpu",
)


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_are_those_of_each_pair(name):
    cluster = parse_cluster(name)
    matrix = PairLinks(cluster).matrix()
    assert not np.diag(matrix).any()
    for one, other in itertools.permutations(range(cluster.num_devices), 2):
        assert matrix[one, other] == group_link(cluster, (one, other)).bytes_per_s
    assert len(np.unique(matrix)) > 2 or len(cluster.hosts) == 1


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("name", CLUSTERS)
def test_least_links_are_those_of_brute_force(name, is_measured):
    """Measured links differ in both directions; a single device has no link."""
    rng = np.random.default_rng(0)
    cluster = parse_cluster(name)
    devices = cluster.num_devices
    if is_measured:
        rates = rng.uniform(1.0, 50.0, (devices, devices)).tolist()
        cluster = parse_cluster({**cluster.to_json(), "bandwidth_GBps": rates})
    links = PairLinks(cluster)
    matrix = links.matrix()
    for _ in range(100):
        order = rng.permutation(devices)
        cut, end = np.sort(rng.integers(1, devices + 1, 2))
        some, others = order[:cut], order[cut:end]
        assert links.least_within(some) == min((matrix[p] for p in itertools.permutations(some, 2)), default=np.inf)
        if len(others):
            assert links.least_to(some, others) == min(matrix[p] for p in itertools.product(some, others))


def test_a_cluster_of_the_largest_size_takes_no_matrix():
    """65,536 devices: a matrix of all pairs would have 34 GB."""
    links = PairLinks(parse_cluster("8192x8xH100"))
    assert links.least_within(np.arange(8)) > links.least_within(np.arange(65536)) > 0.0
    assert links.least_to(np.arange(32768), np.arange(32768, 65536)) == links.least_within(np.arange(65536))
