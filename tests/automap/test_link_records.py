"""Exchanges between neighbours of a pipeline: devices that send at once share the network interfaces of their hosts."""

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.group_links import group_link
from automap.price.evaluator import Evaluator
from automap.price.link_records import link_record
from automap.price.stage_layout import PipelineLayouts
from automap.problem import Problem
from ir import zoo

MODEL = zoo.build("gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128")


def sent(cluster, senders, receivers):
    """Bytes/s of each sender."""
    layouts = PipelineLayouts(Problem.build(MODEL, cluster, {"global_batch": 64}))
    one, other = np.array(senders), np.array(receivers)
    return layouts.sends.of((layouts.pattern(one), layouts.pattern(other)), one, other)[1]


def gathers(cluster, share):
    """Bytes/s of ZeRO's gathers over all devices, and of rings over them."""
    cluster = parse_cluster(cluster)
    link = group_link(cluster, range(cluster.num_devices))
    return float(link_record(link, share).gather_bytes_per_s), link.bytes_per_s


def test_gathers_reach_what_a_slow_network_has():
    """On 10 Gbit/s the network itself is slower than what gathers reach on the slowest network that was fitted."""
    rates = [gathers(f"4x8xH100@{gbit}Gbit", 0.141) for gbit in (1, 10, 25, 50, 100, 200, 400, 800)]
    found = [rate for rate, _ in rates]
    assert found == sorted(found) and all(rate <= ring for rate, ring in rates)
    assert [rate for rate, _ in rates[:4]] == [ring for _, ring in rates[:4]]
    # From 50 GB/s for eight devices on, where shares were fitted, they have their share of the line.
    assert found[-2:] == pytest.approx([0.141 * 50e9, 0.141 * 100e9])


def test_gathers_leave_a_host_no_faster_than_its_devices_are_linked():
    rate, ring = gathers("4x8xH100-PCIe", 0.379)
    assert rate == ring < 63e9 < 0.379 * 8 * 50e9


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_those_that_send_to_another_host_divide_its_interface(count):
    cluster = parse_cluster("2x8xV100-16GB@25Gbit")
    rate = sent(cluster, range(8 - count, 8), range(8, 8 + count))
    assert rate == pytest.approx(cluster.links[cluster.hosts[0].inter_node_link].bytes_per_s / count)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_device_with_an_interface_of_its_own_has_no_more_than_that(count):
    cluster = parse_cluster("2x8xH100")
    rate = sent(cluster, range(8 - count, 8), range(8, 8 + count))
    assert rate == pytest.approx(cluster.links[cluster.hosts[0].inter_node_link].bytes_per_s)


@pytest.mark.parametrize(
    ("first", "before", "after"),
    [(2, 4, 12), (2, 12, 4), (2, 6, 6), (0, 12, 12), (4, 8, 12), (6, 3, 2), (1, 9, 3), (7, 1, 4)],
)
def test_the_slowest_pair_counts(first, before, after):
    """Counted pair by pair; several that send to one divide its link."""
    cluster = parse_cluster("3x8xV100-16GB@25Gbit")
    senders, receivers = list(range(first, first + before)), list(range(first + before, first + before + after))
    most = max(len(senders), len(receivers))
    pairs = [(senders[i * len(senders) // most], receivers[i * len(receivers) // most]) for i in range(most)]
    crossing = [(a, b) for a, b in pairs if a // 8 != b // 8]
    interface = cluster.links[cluster.hosts[0].inter_node_link].bytes_per_s
    rates = []
    for a, b in crossing:
        beside = {x for x, _ in crossing if x // 8 == a // 8}, {y for _, y in crossing if y // 8 == b // 8}
        turns = max(1.0, len(receivers) / len(senders))
        rates.append(min(interface / len(beside[0]), interface, turns * interface / len(beside[1])))
    assert crossing
    wanted = min(rates) / max(1.0, len(senders) / len(receivers))
    assert sent(cluster, senders, receivers) == pytest.approx(wanted)


def test_a_single_stage_boundary_is_not_slower_than_a_wide_one_for_as_many_bytes():
    """One device that sends a whole tensor takes as long as eight that send an eighth each over the same interface."""
    cluster = parse_cluster("2x8xV100-16GB@25Gbit")
    evaluator = Evaluator(Problem.build(MODEL, cluster, {"global_batch": 64}))
    narrow = evaluator.layout_of([((7,), (1, 1)), ((8,), (1, 1))])
    wide = evaluator.layout_of([(tuple(range(8)), (8, 1)), (tuple(range(8, 16)), (8, 1))])
    assert narrow.send_bytes_per_s[0] == pytest.approx(8 * wide.send_bytes_per_s[0])
