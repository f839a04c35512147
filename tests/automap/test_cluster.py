import json
from pathlib import Path

import numpy as np
import pytest

from automap.cluster import PRESETS, parse_cluster
from automap.errors import ClusterError
from automap.group_links import GroupLink, group_link


@pytest.mark.parametrize("text", PRESETS)
def test_presets_survive_json(text):
    cluster = parse_cluster(text)
    assert parse_cluster(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert len(cluster.node_of) == cluster.num_devices


def test_a_cluster_file_is_read_back(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(parse_cluster("2x4xA100").to_json()))
    assert parse_cluster(str(path)).num_devices == 8


def test_mixed_cluster_numbers_devices_host_by_host():
    cluster = parse_cluster("8xV100-32GB+8xP100")
    assert [cluster.device(i).name for i in (0, 7, 8, 15)] == ["V100-32GB", "V100-32GB", "P100-16GB", "P100-16GB"]
    assert not cluster.is_uniform


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("0xA100", "at least one"),
        ("4x0xA100", "at least one"),
        ("8xFoo", "no device has this name"),
        ("", "not understood"),
        ("8", "not understood"),
        ("-1xA100", "not understood"),
        ("8xV100@nvlink2", "does not connect hosts"),
        ("2x8xV100@25GB/s", "no link between hosts"),
        ("2x8xV100@25gb/s", "no link between hosts"),
        ("8xH100@", "the link between nodes is not understood"),
        ("4xV100@25Gbit+4xP100@25Gbit", "the link between nodes is not understood"),
        ("999999x8xA100", "too many"),
        ("/nowhere/cluster.json", "cannot be read"),
        (8, "not a text or a document"),
    ],
)
def test_bad_text_names_field_value_and_repair(text, word):
    with pytest.raises(ClusterError, match=word) as caught:
        parse_cluster(text)
    assert caught.value.field == "cluster"
    assert caught.value.repair


def test_an_unknown_link_is_refused_with_the_forms_that_are_known():
    with pytest.raises(ClusterError) as caught:
        parse_cluster("4x8xV100@2Zbit")
    listed = caught.value.repair.removeprefix("Use one of ").partition(", any other rate")[0].split(", ")
    assert listed[:4] == ["1Gbit", "10Gbit", "25Gbit", "50Gbit"] and "IB-HDR" in listed and "nvlink2" not in listed
    assert all(parse_cluster(f"4x8xV100@{name}") for name in listed)
    with pytest.raises(ClusterError, match="Did you mean IB-HDR"):
        parse_cluster("4x8xV100@IB-HRD")


@pytest.mark.parametrize(
    "text", ["25Gbps", "25gbps", "25Gb/s", "25Gb", "25GbE", "25GBE", "25 Gbit/s", "25Gbits", "25gigabit", "25GBit/s"]
)
def test_usual_spellings_of_a_link_mean_the_same(text):
    assert parse_cluster(f"2x8xV100@{text}").nodes == parse_cluster("2x8xV100@25Gbit").nodes


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("8xV100@25Gbit", True),
        ("1x8xV100@25Gbit", True),
        ("8xV100", False),
        ("2x4xV100@25Gbit", False),
        ("4xV100+4xP100@25Gbit", False),
    ],
)
def test_a_link_that_one_host_never_uses_is_told(text, is_told):
    found = parse_cluster(parse_cluster(text).to_json()).warnings
    assert ["2x8xV100@25Gbit" in warning for warning in found] == [True] * is_told
    assert not parse_cluster({**parse_cluster("8xV100").to_json(), "name": "user@host"}).warnings


def test_unknown_key_in_file_is_refused():
    document = parse_cluster("8xA100").to_json() | {"speed": 3}
    with pytest.raises(ClusterError, match="unknown key") as caught:
        parse_cluster(document)
    assert caught.value.field == "cluster.speed"


@pytest.mark.parametrize("text", ["3x4xA100-80GB", "2xV100-16GB+3x4xP100+2x8xH100@25Gbit", "4xT4+4xH100"])
def test_a_group_is_as_slow_as_its_slowest_host(text):
    """Host by host, with the devices of each counted one by one."""
    cluster = parse_cluster(text)
    rng = np.random.default_rng(0)
    for size in (2, 3, 5, cluster.num_devices):
        ranks = rng.permutation(cluster.num_devices)[:size].tolist()
        hosts = [cluster.node_of[rank] for rank in ranks]
        rates = []
        for host in hosts:
            link, here = cluster.links[cluster.hosts[host].intra_node_link], hosts.count(host)
            if here > 1:
                rates.append(link.bytes_per_s * link.share_by_ranks.get(str(here), 1.0))
        for host in hosts if len(set(hosts)) > 1 else ():
            node = cluster.hosts[host]
            share = hosts.count(host) / node.num_devices * node.nics
            rates.append(cluster.links[node.inter_node_link].bytes_per_s * share)
        found = group_link(cluster, ranks)
        assert found.bytes_per_s == pytest.approx(min(rates), rel=1e-12)
        assert (found.size, found.hosts) == (size, len(set(hosts)))


def test_groups_inside_a_host_see_its_own_link_and_share_the_nic_between_hosts():
    cluster = parse_cluster("2x8xV100-16GB@25Gbit")
    inside = group_link(cluster, range(8))
    across = group_link(cluster, range(16))
    nvlink, ethernet = (cluster.links[name].efficiency for name in ("nvlink2", "ethernet-25"))
    assert inside.bytes_per_s == pytest.approx(150e9 * nvlink)
    assert across.bytes_per_s == pytest.approx(25e9 / 8 * ethernet)
    assert group_link(cluster, (0, 8)).bytes_per_s == pytest.approx(across.bytes_per_s / 8)
    # Of what each device of two hosts sends to all others 8 in 15 parts leave the host, by an eighth of its NIC.
    assert across.exchange_bytes_per_s == pytest.approx(25e9 / 8 / 8 * ethernet * 15 / 8)
    assert inside.exchange_bytes_per_s == inside.bytes_per_s
    endless = float("inf")
    assert group_link(cluster, (3,)) == GroupLink(
        size=1, hosts=1, bytes_per_s=endless, exchange_bytes_per_s=endless, line_bytes_per_s=endless
    )


@pytest.mark.parametrize("kind", ["GB200", "GB300", "TPU-v4", "TPU-v5p", "TPU-v5e"])
@pytest.mark.parametrize("devices", [1, 4, 8, 36, 72])
def test_a_part_of_a_rack_or_slice_has_one_network_interface_for_each_device(kind, devices):
    cluster = parse_cluster(f"2x{devices}x{kind}")
    assert [node.nics for node in cluster.nodes] == [devices] * len(cluster.nodes)
    # A device sends at the rate of its own interface, however small its part of the rack or slice is.
    link = cluster.links[cluster.nodes[0].inter_node_link]
    assert group_link(cluster, [0, devices]).bytes_per_s == pytest.approx(link.bytes_per_s)


def test_bandwidth_matrix_overrides_links():
    document = parse_cluster("4xA100").to_json()
    document["bandwidth_GBps"] = [[0 if i == j else 1 + min(i, j) for j in range(4)] for i in range(4)]
    cluster = parse_cluster(document)
    assert group_link(cluster, (1, 2, 3)).bytes_per_s == 2e9
    document["bandwidth_GBps"] = [[1.0]]
    with pytest.raises(ClusterError, match="wrong size"):
        parse_cluster(document)


def test_a_bandwidth_matrix_is_square():
    """The row that is not is named."""
    document = parse_cluster("4xA100").to_json()
    document["bandwidth_GBps"] = [[1.0] * 4, [1.0] * 4, [1.0] * 3, [1.0] * 4]
    with pytest.raises(ClusterError, match="wrong size") as found:
        parse_cluster(document)
    assert found.value.field.endswith("bandwidth_GBps[2]")
    assert found.value.value == "3 numbers"


@pytest.mark.parametrize(
    ("value", "word"), [(0, "cannot reach"), (1e-9, "cannot reach"), (-5.0, "out of range"), (1e300, "out of range")]
)
def test_a_bandwidth_matrix_has_no_holes(value, word):
    document = parse_cluster("4xA100").to_json()
    document["bandwidth_GBps"] = [[0.0 if i == j else 100.0 for j in range(4)] for i in range(4)]
    document["bandwidth_GBps"][2][1] = value
    with pytest.raises(ClusterError, match=word) as caught:
        parse_cluster(document)
    assert caught.value.field == "cluster.bandwidth_GBps[2][1]"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("nodes", 0, "inter_node_link"), "ethernet-7", "cluster.nodes[0].inter_node_link"),
        (("nodes", 0, "device"), "Z9000", "cluster.nodes[0].device"),
        (("nodes", 0, "nics"), 0, "cluster.nodes[0].nics"),
        (("nodes", 0, "count"), 65536, "cluster.nodes"),
        (("devices", "A100-80GB", "peak_TFLOPs"), {"fp8": 1.0}, "cluster.devices.A100-80GB.peak_TFLOPs"),
        (("devices", "A100-80GB", "peak_TFLOPs", "bf16"), 1e308, "cluster.devices.A100-80GB.peak_TFLOPs.bf16"),
        (("devices", "A100-80GB", "curves_of"), "Z80", "cluster.devices.A100-80GB.curves_of"),
        (("devices", "A100-80GB", "memory_GiB"), float("nan"), "cluster.devices.A100-80GB.memory_GiB"),
        (("links", "nvlink3", "efficiency"), 0.0, "cluster.links.nvlink3.efficiency"),
        (("links", "nvlink3", "scope"), "between", "cluster.links.nvlink3.scope"),
        (("links", "nvlink3", "share_by_ranks"), {"many": 0.5}, "cluster.links.nvlink3.share_by_ranks"),
        (("links", "nvlink3", "schema"), "automap.link/2", "cluster.links.nvlink3.schema"),
        (("schema",), "automap.plan/1", "cluster.schema"),
        (("nodes", 0, "inter_node_link"), "nvlink3", "cluster.nodes[0].inter_node_link"),
    ],
)
def test_the_field_that_is_wrong_is_named(path, value, field):
    document = json.loads(json.dumps(parse_cluster("4xA100").to_json()))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ClusterError) as caught:
        parse_cluster(document)
    assert caught.value.field == field
    assert caught.value.repair


@pytest.mark.parametrize("text", ["40Gbit", "40GbE", "40Gbps", "40.0Gbit"])
def test_a_rate_that_no_link_has_is_ethernet(text):
    """Its bandwidth is in proportion to that of known Ethernet, and the cluster is read back from its document."""
    cluster, like = parse_cluster(f"2x8xV100@{text}"), parse_cluster("2x8xV100@10Gbit")
    rate, tenth = (group_link(one, (0, 8)).bytes_per_s for one in (cluster, like))
    assert rate == pytest.approx(4.0 * tenth)
    assert parse_cluster(cluster.to_json()) == cluster
    assert parse_cluster("2x8xV100@10.0Gbit").links == like.links
    document = like.to_json()
    document["nodes"][0]["inter_node_link"] = text
    assert group_link(parse_cluster(document), (0, 8)).bytes_per_s == rate


@pytest.mark.parametrize("text", ["0Gbit", "0.0Gbit", "-1Gbit", "nanGbit", "1e400Gbit", "9999999Gbit"])
def test_a_rate_out_of_range_is_refused(text):
    with pytest.raises(ClusterError, match="no link between hosts"):
        parse_cluster(f"2x8xV100@{text}")


@pytest.mark.parametrize(
    ("text", "repair"),
    [
        ("2x8xV100@12.5GB/s", "@100Gbit"),
        ("8 x H100", "Did you mean 8xH100?"),
        ("2*8×H100", "Did you mean 2x8xH100?"),
        ("H100", "Did you mean 1xH100?"),
        ("A100-80GBx8", "Did you mean 8xA100-80GB?"),
        ("8xA100 80GB", "Did you mean 8xA100-80GB?"),
        ("8xMI300", "Did you mean MI300X or "),
        ("our-lab.yaml", "is JSON"),
        (' {"name": "our-lab"}', "file whose name ends in .json"),
        ("clusters/our-lab", "is JSON"),
    ],
)
def test_the_repair_says_what_was_probably_meant(text, repair):
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    assert repair in caught.value.repair


def test_the_example_of_a_cluster_file_is_read():
    text = (Path(__file__).parents[2] / "docs/plan-format.md").read_text()
    example = json.loads(next(part for part in text.split("```json") if "our-lab" in part).partition("```")[0])
    cluster = parse_cluster(example)
    assert cluster.num_devices == 16 and cluster.device(8).name == "our-card"


@pytest.mark.parametrize("precision", ["BF16", "int8"])
def test_a_peak_in_an_unknown_precision_is_refused(precision):
    document = parse_cluster("4xA100").to_json()
    document["devices"]["A100-80GB"]["peak_TFLOPs"][precision] = 1.0
    with pytest.raises(ClusterError, match="unknown precision") as caught:
        parse_cluster(document)
    assert caught.value.field == "cluster.devices.A100-80GB.peak_TFLOPs" and "bf16" in caught.value.repair


@pytest.mark.parametrize(("name", "link"), [("intra_node_link", "nvlink3"), ("inter_node_link", "infiniband-hdr")])
def test_an_unknown_link_of_a_file_is_refused_with_those_of_its_scope(name, link):
    document = parse_cluster("4xA100").to_json()
    document["nodes"][0][name] = "NVLink"
    with pytest.raises(ClusterError) as caught:
        parse_cluster(document)
    assert caught.value.field == f"cluster.nodes[0].{name}"
    assert ("nvlink3" in caught.value.repair, "infiniband-hdr" in caught.value.repair) == (
        link == "nvlink3",
        link == "infiniband-hdr",
    )


def test_a_device_needs_one_general_precision_alone():
    document = parse_cluster("4xA100").to_json()
    document["devices"]["A100-80GB"]["peak_TFLOPs"] = {"bf16": 312.0}
    assert parse_cluster(document).device(0).flops("bf16") == 312e12


def test_a_file_may_name_devices_and_links_that_are_known():
    node = {"device": "A100-80GB", "num_devices": 4, "intra_node_link": "nvlink3", "inter_node_link": "25Gbit"}
    found = parse_cluster({"schema": "automap.cluster/1", "name": "mine", "nodes": [{**node, "nics": 1, "count": 2}]})
    wanted = parse_cluster("2x4xA100@25Gbit")
    assert (found.devices, found.num_devices) == (wanted.devices, 8)
    assert {link.name for link in found.links.values()} == {link.name for link in wanted.links.values()}
    assert parse_cluster(found.to_json()) == found
    with pytest.raises(ClusterError, match="not described") as caught:
        parse_cluster({"name": "mine", "nodes": [{**node, "device": "Z9", "nics": 1}]})
    assert "automap clusters" in caught.value.repair


@pytest.mark.parametrize(
    ("text", "first"),
    [("8xA100-41GB", ["A100-40GB"]), ("8xh10", ["H100"]), ("8xRTX4080-24GB", ["RTX4090-24GB"])],
)
def test_an_unknown_device_is_answered_with_the_few_that_are_most_like_it(text, first):
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text)
    asked, question, further = caught.value.repair.removeprefix("Did you mean ").partition("? ")
    names = asked.split(" or ")
    assert question and names[: len(first)] == first and len(names) <= 3
    kinds = [parse_cluster(f"1x{name}").nodes[0].device for name in names]
    assert len(set(kinds)) == len(kinds)  # each device by one of its names
    assert "automap clusters" in further


def test_a_device_that_is_like_none_is_answered_with_where_the_list_is():
    with pytest.raises(ClusterError) as caught:
        parse_cluster("8xFoo")
    assert caught.value.repair.startswith("`automap clusters`")
