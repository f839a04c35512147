from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from automap.cluster import parse_cluster
from automap.runtime.launch import host


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets this host have GPUs of the given models, in the files of the driver; none of them: no driver."""
    monkeypatch.setattr(host, "_DRIVER", tmp_path / "nvidia")

    def has(*models: str) -> None:
        for number, model in enumerate(models):
            folder = tmp_path / "nvidia/gpus" / f"0000:{number:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {model}\nIRQ: 7\n")

    return has


@pytest.mark.parametrize(
    ("model", "cluster", "is_this"),
    [
        ("NVIDIA H100 80GB HBM3", "1x8xH100", True),
        ("NVIDIA H100 80GB HBM3", "1x4xH100-80GB", True),
        ("NVIDIA H100 80GB HBM3", "1x9xH100", False),
        ("NVIDIA H100 80GB HBM3", "2x4xH100", False),
        ("NVIDIA H100 80GB HBM3", "1x8xH100-96GB", False),
        ("NVIDIA H100 80GB HBM3", "1x8xH100-PCIe", False),
        ("NVIDIA H100 PCIe", "1x8xH100-PCIe", True),
        ("NVIDIA H100 PCIe", "1x8xH100", False),
        ("NVIDIA H200", "1x8xH200", True),
        ("NVIDIA H200", "1x8xH100", False),
        ("NVIDIA A100-SXM4-40GB", "8xA100", False),
        ("NVIDIA A100-SXM4-40GB", "8xA100-40GB", True),
        ("Tesla V100-SXM2-16GB", "8xV100-16GB", True),
        ("Tesla V100-SXM2-32GB", "8xV100-16GB", False),
        ("Tesla P40", "8xP40-24GB", True),
        ("Tesla P40", "1x2xcpu", False),
        ("NVIDIA GB200", "8xB200", False),
    ],
)
def test_a_cluster_is_this_host_if_its_gpus_are(
    gpus: Callable[..., None], model: str, cluster: str, is_this: bool
) -> None:
    gpus(*[model] * 8)
    assert (host.lacking(parse_cluster(cluster)) is None) == is_this


def test_a_measured_description_is_this_host_whatever_its_name(gpus: Callable[..., None]) -> None:
    cpu = parse_cluster("1x2xcpu")
    assert host.lacking(cpu) is None
    mine = host.as_name(host.processor())
    device = replace(cpu.device(0), name=mine)
    measured = replace(cpu, name="ours", nodes=(replace(cpu.nodes[0], device=mine),), devices={mine: device})
    assert host.lacking(measured) is None
    other = replace(
        measured, nodes=(replace(cpu.nodes[0], device="Z80"),), devices={"Z80": replace(device, name="Z80")}
    )
    assert host.lacking(other) == "needs 2 x Z80; this host has no GPU"
    gpus("NVIDIA RTX 4090")
    assert host.lacking(measured) == f"needs 2 x {mine}; this host has 1 x NVIDIA RTX 4090"
    of_gpu = replace(device, name="NVIDIA-RTX-4090")
    node = replace(cpu.nodes[0], device=of_gpu.name, num_devices=1)
    assert host.lacking(replace(cpu, nodes=(node,), devices={of_gpu.name: of_gpu})) is None
