"""The data files of devices and links are plausible and say where their numbers are from; a user can add some."""

import dataclasses
import json
from pathlib import Path

import pytest

from automap.cluster import parse_cluster
from automap.device_kinds import Device, known_devices, known_links, own_devices, own_folder, own_links
from automap.errors import ClusterError
from automap.families import KERNELS, families, kernels_of
from automap.links import Link
from automap.price.curves import is_measured
from automap.problem import Problem
from automap.records import to_json
from ir import zoo

DEVICES = {device.name: device for device in known_devices()}
LINKS = {link.name: link for link in known_links()}
ORIGINS = ("datasheet: ", "derived: ", "measured", "fitted: ", "counted: ", "assumed")
GEFORCE = ("RTX3090-24GB", "RTX4090-24GB", "RTX5090-32GB")


@pytest.mark.parametrize("item", [*DEVICES.values(), *LINKS.values()], ids=lambda item: item.name)
def test_every_number_says_where_it_is_from(item: Device | Link) -> None:
    source = item.source or {}
    stated = {"peak_TFLOPs", "share_by_ranks", "intra_node_link", "inter_node_link", "curves_of"}
    for key in dataclasses.fields(item):
        value = getattr(item, key.name)
        if isinstance(value, int | float) or (key.name in stated and value):
            assert source.get(key.name, "").startswith(ORIGINS), key.name
    assert set(source) <= {key.name for key in dataclasses.fields(item)}


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_a_device_is_plausible(device: Device) -> None:
    """No precision is slower than a wider one; memory is slower than caches, and faster than links."""
    order = [p for p in ("nvfp4", "mxfp8", "fp8", "bf16", "fp16", "tf32", "fp32") if p in device.peak_TFLOPs]
    peaks = [device.peak_TFLOPs[precision] for precision in order]
    assert peaks == sorted(peaks, reverse=True)
    intra, inter = LINKS[device.intra_node_link], LINKS[device.inter_node_link]
    assert (intra.scope, inter.scope) == ("intra", "inter")
    assert intra.bandwidth_GBps < device.hbm_bandwidth_GBps
    # FLOPs for each byte of memory, at the best rate: from one (a processor) to thousands (nvfp4).
    assert 1 < peaks[0] * 1e3 / device.hbm_bandwidth_GBps < 2000
    assert device.memory_GiB * 1e3 < 1e3 * device.hbm_bandwidth_GBps


@pytest.mark.parametrize("name", GEFORCE)
def test_geforce_cards_accumulate_in_fp32_at_half_of_the_rate(name: str) -> None:
    """Their tensor cores then do twice what the plain cores do, where cards for servers do four times as much."""
    peaks = DEVICES[name].peak_TFLOPs
    assert peaks["bf16"] == peaks["fp16"] == pytest.approx(2 * peaks["fp32"], rel=0.01)
    full = DEVICES["L4-24GB"].peak_TFLOPs
    assert full["bf16"] == pytest.approx(4 * full["fp32"], rel=0.01)


def test_names_and_aliases_are_given_once() -> None:
    for items in (DEVICES.values(), LINKS.values()):
        names = [name for item in items for name in {name.lower() for name in (item.name, *item.aliases)}]
        assert len(names) == len(set(names))


def test_a_full_mesh_gives_a_group_the_links_among_it() -> None:
    for name in ("infinity-fabric-3", "gaudi2-ethernet", "gaudi3-ethernet"):
        shares = LINKS[name].share_by_ranks
        assert {int(size): share for size, share in shares.items()} == {
            size: pytest.approx((size - 1) / 7, abs=1e-3) for size in range(2, 8)
        }


def test_devices_on_pcie_share_what_their_host_carries() -> None:
    """All of a host together send as much as two of them."""
    for name in ("pcie3", "pcie4", "pcie5"):
        link = LINKS[name]
        for size in range(2, 17):
            assert size * link.group_bytes_per_s(size) == pytest.approx(2 * link.bytes_per_s, rel=0.01)


def test_all_networks_with_rdma_reach_one_share_of_their_rate() -> None:
    """Ethernet has the adapters of InfiniBand, so neither is faster at the same rate."""
    between = [link for link in LINKS.values() if link.scope == "inter"]
    with_rdma = {link.name: link.efficiency for link in between if link.bandwidth_GBps >= 12.5}
    assert {"infiniband-ndr", "ethernet-400", "efa-3200", "omni-path-100"} <= set(with_rdma)
    assert len(set(with_rdma.values())) == 1


def test_ethernet_of_any_rate_is_like_that_of_the_next_known_one() -> None:
    for rate, known in (("12Gbit", "ethernet-10"), ("80Gbit", "ethernet-50"), ("160Gbit", "ethernet-100")):
        node = parse_cluster(f"2x1xA100@{rate}")
        link = node.links[node.nodes[0].inter_node_link]
        assert link.efficiency == LINKS[known].efficiency


def test_every_device_is_in_one_family_and_its_kernels_are_as_said() -> None:
    named = [device for devices in families().values() for device in devices]
    assert sorted(named) == sorted(DEVICES)
    for name, kernels in kernels_of().items():
        assert kernels in KERNELS
        assert is_measured(DEVICES[name]) == (kernels == "own")
    assert all(kernels_of()[name] == "foreign" for family in ("AMD", "Intel", "Google") for name in families()[family])


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty configuration folder of the user's; it is read once, after files were written."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for folder in ("devices", "links"):
        own_folder(folder).mkdir(parents=True)


def write(folder: str, item: Device | Link, **changed: object) -> Path:
    """Writes a file of the user's own; returns its path."""
    path = own_folder(folder) / f"{item.name}.json"
    path.write_text(json.dumps(to_json(item) | changed))
    return path


CARD = dataclasses.replace(DEVICES["RTX4090-24GB"], name="Card-32GB", aliases=("Card",), memory_GiB=32.0)
CABLE = dataclasses.replace(LINKS["ethernet-100"], name="cable", aliases=())


def test_a_device_and_a_link_of_ones_own() -> None:
    write("links", CABLE)
    write("devices", dataclasses.replace(CARD, inter_node_link="cable"))
    cluster = parse_cluster("2x4xcard")
    assert [device.memory_GiB for device in cluster.devices.values()] == [32.0]
    assert cluster.nodes[0].inter_node_link == "cable"
    assert parse_cluster("2x4xA100@cable").nodes[0].inter_node_link == "cable"
    assert [d.name for d in own_devices()] == ["Card-32GB"]
    assert [link.name for link in own_links()] == ["cable"]
    assert Problem.build(zoo.build("gpt2"), "2x4xCard", {"global_batch": 8}).cluster.devices == cluster.devices
    # The lists that problems are drawn from and published runs are looked up in are the package's.
    assert CARD.name not in {device.name for device in known_devices()}


def test_a_device_of_ones_own_may_have_ethernet_of_any_rate() -> None:
    write("devices", dataclasses.replace(CARD, inter_node_link="40Gbps"))
    assert parse_cluster("2x4xcard").links == parse_cluster("2x4xcard@40Gbit").links


@pytest.mark.parametrize(
    ("changed", "field", "word"),
    [
        ({"memory_GiB": -1}, "memory_GiB", "out of range"),
        ({"memory": 3}, "memory", "unknown key"),
        ({"peak_TFLOPs": {"fp8": 3}}, "peak_TFLOPs", "no arithmetic"),
        ({"curves_of": "H1000"}, "curves_of", "Did you mean H100"),
        ({"intra_node_link": "nvlink9"}, "intra_node_link", "Did you mean nvlink"),
        ({"intra_node_link": "ethernet-100"}, "intra_node_link", "Use one of gaudi2-ethernet"),
        ({"inter_node_link": "nvlink4"}, "inter_node_link", "does not connect hosts"),
        ({"name": "h100"}, "name", "this name is taken"),
        ({"aliases": ["A100"]}, "name", "this name is taken"),
    ],
)
def test_a_broken_file_is_named_with_its_field(changed: dict[str, object], field: str, word: str) -> None:
    path = write("devices", CARD, **changed)
    with pytest.raises(ClusterError, match=word) as caught:
        parse_cluster("8xH100")
    assert caught.value.field == f"{path}.{field}"
    assert caught.value.repair


def test_a_file_that_is_no_json_is_named() -> None:
    path = own_folder("links") / "cable.json"
    path.write_text("{")
    with pytest.raises(ClusterError) as caught:
        parse_cluster("8xH100")
    assert str(path) in str(caught.value)
