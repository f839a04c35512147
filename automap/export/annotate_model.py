"""Writes the plan in onnx_devices.json beside this file into its ONNX model. It needs the package onnx alone.

    python annotate_model.py model.onnx annotated.onnx

Weights and inputs get shards, and nodes get pipeline stages, in the fields that ONNX has since IR version 11. A node
without weights is in the stage of its inputs. Weights in files beside the model stay there.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx

IR_VERSION = 11
"""The first one with devices."""


def annotate(model: onnx.ModelProto, plan: dict[str, Any]) -> None:
    """Writes a plan into a model.

    Raises:
        ValueError: the model is not that of the plan.
    """
    known = {tensor.name for tensor in (*model.graph.initializer, *model.graph.input)}
    missing = [name for name in plan["tensors"] if name not in known]
    if missing:
        raise ValueError(
            f"the model has no weight or input {missing[0]} of onnx_devices.json; give the model of the plan"
        )
    model.ir_version = max(model.ir_version, IR_VERSION)
    configuration = plan["configuration"]
    model.configuration.add(name=configuration["name"], num_devices=configuration["num_devices"])
    onnx.helper.set_model_props(model, {**{p.key: p.value for p in model.metadata_props}, **plan["metadata"]})
    readers = Counter(name for node in model.graph.node for name in node.input)
    seen: Counter[str] = Counter()
    stage_of: dict[str, int] = {}
    for node in model.graph.node:
        stages = [stage_of[name] for name in node.input if name in stage_of]
        specs = []
        for name in node.input:
            if name in plan["tensors"]:
                use = use_of(name, plan["tensors"][name], seen[name], readers[name])
                seen[name] += 1
                stages.append(use["stage"])
                specs.append((name, use))
        if stages:
            found = node.device_configurations.add(configuration_id=configuration["name"], pipeline_stage=max(stages))
            stage_of |= dict.fromkeys(node.output, max(stages))
            for name, use in specs:
                add_spec(found, name, use)


def use_of(name: str, uses: list[dict[str, Any]], number: int, readers: int) -> dict[str, Any]:
    """The shards of a tensor for one of the nodes that read it.

    Args:
        uses: what the plan's own readers of the tensor do with it, in their order.
        number: number of the reader among those of the file.
        readers: readers in the file.
    """
    if any(use != uses[0] for use in uses) and len(uses) != readers:
        raise ValueError(f"{name} has {readers} readers, and {len(uses)} in the plan; give the model of the plan")
    return uses[min(number, len(uses) - 1)]


def add_spec(found: onnx.NodeDeviceConfigurationProto, name: str, use: dict[str, Any]) -> None:
    """Adds the shards of a tensor: a device, or a group of devices that hold the same, for each."""
    spec = found.sharding_spec.add(tensor_name=name)
    for number, group in enumerate(use["shards"], 1):
        spec.device.append(group[0] if len(group) == 1 else -number)
        if len(group) > 1:
            spec.index_to_device_group_map.add(key=-number, value=group)
    for dim in use["dims"]:
        sharded = spec.sharded_dim.add(axis=dim["axis"])
        for part in dim["parts"]:
            sharded.simple_sharding.add(**part)


def main(source: str, made: str) -> None:
    """Annotates a file."""
    plan = json.loads((Path(__file__).parent / "onnx_devices.json").read_bytes())
    model = onnx.load(source, load_external_data=False)
    annotate(model, plan)
    onnx.save(model, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
