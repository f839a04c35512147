"""The constants that `fit_trainers.py` finds: what each belongs to, where the search for it begins, and its bounds.

Constants that are not listed here are stated in `automap/data`, each with its source, and are never fitted. A constant
belongs to a device kind, a link kind, a trainer or all of them, and serves all its runs; none scales a whole step. A
trainer has a constant of its own for about every ten of its runs, and shares the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from priced_runs import PricedRun

from automap.device_kinds import Device
from automap.problem import WEIGHT_BYTES


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One fitted number."""

    name: str
    prior: float
    low: float
    high: float
    hold: float = 0.01
    """Strength of the prior: what a change by the whole prior adds to the sum of squares."""


FITTED = (
    "alpa", "deeplearningexamples", "deepspeed", "internevo", "llm-foundry-fsdp", "megatron-core",
    "megatron-core-26.06", "megatron-deepspeed", "megatron-lm", "oneflow", "torchtitan-2024",
)  # fmt: skip
TRAINERS = {
    "elementwise_traffic": (
        (("megatron-lm", "megatron-deepspeed", "deepspeed", "oneflow", "alpa"), 1.0),
        (("llm-foundry-fsdp",), 1.2),
        (("megatron-core", "megatron-core-26.06"), 0.8),
        (("deeplearningexamples",), 0.8),
        (("torchtitan-2024",), 0.7),
    ),
    "attention_rate": ((("llm-foundry-fsdp",), 0.5),),
    "host_us_per_operator": (
        (("megatron-deepspeed",), 30.0),
        (("megatron-lm",), 30.0),
        (("megatron-core",), 15.0),
    ),
    "host_us_per_collective": (
        (("megatron-deepspeed",), 40.0),
        (("megatron-lm", "megatron-core", "oneflow", "internevo", "torchtitan-2024"), 40.0),
    ),
    "gradient_overlap": (
        (("llm-foundry-fsdp",), 0.9),
        (("internevo",), 0.9),
        (("oneflow", "alpa"), 0.5),
    ),
    "tensor_overlap": ((("megatron-core", "megatron-core-26.06"), 0.5),),
    "gather_bandwidth_share": (
        (("llm-foundry-fsdp",), 0.25),
        (
            (
                "deepspeed",
                "megatron-core",
                "megatron-core-26.06",
                "megatron-deepspeed",
                "internevo",
                "torchtitan-2024",
            ),
            0.25,
        ),
    ),
    "step_overhead_ms": ((FITTED, 5.0),),
    "send_host_ms": (
        (("alpa", "megatron-core", "megatron-core-26.06", "megatron-deepspeed", "megatron-lm", "oneflow"), 0.25),
    ),
}
"""Fields of automap/data/trainers: which trainers share the constant, and where it begins. A fork runs the kernels of
what it was forked from."""
LIMITS = {
    "elementwise_traffic": (0.5, 2.2, 0.003),
    "attention_rate": (0.2, 1.0, 0.01),
    "host_us_per_operator": (2.0, 90.0, 3.0),
    "host_us_per_collective": (0.0, 300.0, 1.0),
    "gradient_overlap": (0.0, 1.0, 0.3),
    "tensor_overlap": (0.0, 0.95, 0.01),
    "gather_bandwidth_share": (0.05, 0.8, 0.3),
    "step_overhead_ms": (0.0, 20.0, 1.0),
    "send_host_ms": (0.0, 0.8, 0.3),
}
"""Least, most, and strength of the prior. Times of the host are held at their priors: runs of one cluster cannot tell
them from any other slowness, and a fit would explain all of it by the host."""
SHARED = {
    "micro_batch_ms": (0.5, 0.0, 3.0, 1.0),
    "overlap_exponent": (2.2, 1.2, 6.0, 3.0),
    "attention_backward": (3.1, 2.0, 5.0, 0.1),
    "fallback_kernels": (10.0, 0.0, 40.0, 0.01),
    "ring_us": (4.0, 0.0, 30.0, 0.1),
    "fp8_speedup": (1.0, 0.5, 1.5, 0.01),
    "nvfp4_speedup": (1.8, 1.2, 2.0, 0.1),
    "row_scaled_rate": (0.6, 0.3, 1.0, 0.1),
    "quantise_kernels": (1.0, 0.0, 4.0, 0.01),
    "expert_rate": (0.85, 0.3, 1.0, 0.1),
}
"""Constant of automap/data/fitted/step.json -> its prior, its bounds and the strength of the prior."""
CLOCKS = ("V100", "A100", "H100", "H100-96GB", "GB200", "GB300")
POWER = {"H100-96GB": 500.0 / 700.0}
"""Device -> its power limit over that of the device with its chip that has the usual one. The search for its clock
begins lower by the cube root of this: power grows with the clock and the square of the voltage, which rises with it."""
BLACKWELL = ("B200", "B300")
"""Devices whose runs are fitted with those of the GB200, whose chips they have."""
UNKNOWN_CLOCK = 0.85
"""Where the search for a clock begins (assumed). A device of which no runs and none of its chip are known has it."""
GA100 = ("A100-", "A800-", "A30-")
"""Devices with the chip of the A100, whose fitted clock is the highest. Others that its curves price have no fitted
clock: nothing says that they hold theirs as well."""
LINKS = ("rdma", "nvlink")
"""Kinds of links that are fitted: links between hosts that carry RDMA, and the switches inside one host. InfiniBand and
Ethernet have one constant: their adapters are the same, and runs cannot tell a slow network from less overlap. Ethernet
below 100 Gbit/s carries TCP; no run depends on it."""
KINDS = {
    "rdma": ("infiniband", "omni-path", "ethernet-100", "ethernet-200", "ethernet-400", "ethernet-800"),
    "nvlink": ("nvlink",),
}
OF_STEP = ("gradient_overlap", "step_overhead_ms", "send_host_ms", "micro_batch_ms")
"""Constants that only `step` reads, so that the costs of units do not depend on them."""


def constants(trainers: set[str]) -> list[Constant]:
    """All constants that are fitted to runs of some trainers; those of a step come first."""
    found = []
    for key, groups in TRAINERS.items():
        low, high, hold = LIMITS[key]
        for names, prior in groups:
            if trainers & set(names):
                found.append(Constant(name=f"{names[0]}.{key}", prior=prior, low=low, high=high, hold=hold))
    found += [Constant(name=n, prior=p, low=lo, high=hi, hold=h) for n, (p, lo, hi, h) in SHARED.items()]
    clocks = {name: UNKNOWN_CLOCK * POWER.get(name, 1.0) ** (1.0 / 3.0) for name in CLOCKS}
    found += [Constant(name=f"clock.{k}", prior=prior, low=0.4, high=1.1, hold=0.001) for k, prior in clocks.items()]
    found += [Constant(name=f"link.{k}", prior=0.7, low=0.3, high=1.0, hold=0.1) for k in LINKS]
    found += [Constant(name="portable_attention", prior=0.5, low=0.3, high=0.8, hold=0.1)]
    return sorted(found, key=lambda constant: constant.name.split(".")[-1] not in OF_STEP)


def owner(trainer: str, key: str) -> str | None:
    """The trainer that a shared constant of this trainer is named after; None where the constant is stated."""
    return next((names[0] for names, _ in TRAINERS[key] if trainer in names), None)


def link_kind(name: str) -> str:
    """The fitted constant of a link; empty if it has none."""
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), "")


def clock_of(device: Device) -> str:
    """The device whose fitted clock another device uses: itself, or the nearest kind whose kernels were measured,
    which before bf16 is the V100. Empty if it has `UNKNOWN_CLOCK`."""
    if device.name in CLOCKS:
        return device.name
    if device.curves_of == "A100" and "bf16" in device.peak_TFLOPs and not device.name.startswith(GA100):
        return ""
    nearest = device.curves_of if "bf16" in device.peak_TFLOPs else "V100"
    for base in (device.name.split("-")[0], nearest):
        if base in CLOCKS:
            return base
        if base in BLACKWELL:
            return "GB200"
    return "H100"


def parts_of(name: str) -> tuple[str, str]:
    """What a constant belongs to and what it is; the second is empty where all runs share it."""
    kind, dot, key = name.rpartition(".")
    return (kind, key) if dot else (name, "")


def depends(run: PricedRun, name: str) -> bool:
    """Whether a constant can change the price of a run."""
    kind, key = parts_of(name)
    problem = run.problem
    trainer, cluster = problem.trainer, problem.cluster
    is_network = "vision" in run.run.model
    if kind == "clock":
        return any(clock_of(device) == key for device in cluster.devices.values())
    if kind == "link":
        return any(link_kind(link) == key for link in cluster.links)
    if kind == "portable_attention":
        others = any(device.curves_of != "A100" for device in cluster.devices.values())
        return trainer.fused_attention and trainer.portable_attention and others
    if kind in SHARED:
        return {
            "attention_backward": trainer.fused_attention and not is_network,
            "fallback_kernels": not trainer.fused_attention and not is_network,
            "fp8_speedup": problem.precision in WEIGHT_BYTES,
            "quantise_kernels": problem.precision in WEIGHT_BYTES,
            "nvfp4_speedup": problem.precision == "nvfp4",
            "row_scaled_rate": problem.training.scaling == "row",
            "expert_rate": bool(run.run.model.get("moe")),
            "ring_us": len(cluster.hosts) > 1,
        }.get(kind, True)
    if owner(trainer.name, key) != kind:
        return False
    return {
        "elementwise_traffic": not is_network,
        "attention_rate": trainer.fused_attention,
        "gradient_overlap": cluster.num_devices > 1,
        "host_us_per_collective": cluster.num_devices > 1,
        "tensor_overlap": cluster.num_devices > 1,
        "gather_bandwidth_share": run.lowered.zero > 0 and len(cluster.hosts) > 1,
        "send_host_ms": len(run.lowered.layout.stages) > 1,
    }.get(key, True)
