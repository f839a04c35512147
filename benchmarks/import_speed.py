"""Seconds and peak memory of importing a Llama-70B-size graph: about 5,700 nodes, 10 MB, no weights.

    python benchmarks/import_speed.py [--layers 80]

The graph is written as the exporter writes it: decomposed RMS norms and rotary embeddings, grouped-query attention with
expanded heads, module scopes and stack traces on every node. The committed figures are in benchmarks/results/.
"""

import argparse
import importlib.util
import platform
import time
from pathlib import Path

from onnx import ModelProto, NodeProto, TensorProto, helper

from ir.graph import Graph
from ir.onnx.sandbox import import_model

FLOAT, INT64 = TensorProto.BFLOAT16, TensorProto.INT64
LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY, LENGTH = 80, 8192, 64, 8, 28672, 128256, 4096
HEAD = WIDTH // HEADS
KIND_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"
TRACE = "\n".join(
    f'File "/home/user/project/.venv/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py", '
    f"line {line}, in forward\n    hidden_states = self.forward_step(hidden_states, position_embeddings)"
    for line in range(300, 306)
)


class Builder:
    """Builds the nodes of a graph with the metadata of an exporter."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.inputs = [helper.make_tensor_value_info("input_ids", INT64, ["batch", LENGTH])]
        self.constants: dict[tuple[int, ...], TensorProto] = {}
        self.scope = ""

    def add(self, kind: str, *inputs: str, results: int = 1, **attributes) -> str:
        name = f"val_{len(self.nodes)}"
        outputs = [name] if results == 1 else [f"{name}_{i}" for i in range(results)]
        node = helper.make_node(kind, inputs, outputs, name=f"node_{kind}_{len(self.nodes)}", **attributes)
        scopes = [
            "",
            *(".".join(self.scope.split(".")[: i + 1]) for i in range(self.scope.count(".") + 1)),
            kind.lower(),
        ]
        for key, text in (
            ("namespace", f"{self.scope}: transformers.models.llama/{kind.lower()}: aten.{kind.lower()}.default"),
            ("pkg.torch.onnx.class_hierarchy", str(["transformers.models.llama.modeling_llama"] * (len(scopes) - 1))),
            ("pkg.torch.onnx.name_scopes", str(scopes)),
            (
                "pkg.torch.onnx.fx_node",
                f"%{name} : [num_users=1] = call_function[target=torch.ops.aten.{kind.lower()}]",
            ),
            ("pkg.torch.onnx.stack_trace", TRACE),
        ):
            node.metadata_props.add(key=key, value=text)
        self.nodes.append(node)
        return name

    def weight(self, name: str, *dims: int) -> str:
        value = helper.make_tensor_value_info(f"{self.scope}.{name}", FLOAT, dims)
        value.metadata_props.add(key=KIND_KEY, value="PARAMETER")
        self.inputs.append(value)
        return value.name

    def ints(self, *values: int) -> str:
        if values not in self.constants:
            name = f"val_c{len(self.constants)}"
            self.constants[values] = helper.make_tensor(name, INT64, [len(values)], values)
        return self.constants[values].name

    def norm(self, x: str) -> str:
        wide = self.add("Cast", x, to=TensorProto.FLOAT)
        mean = self.add("ReduceMean", self.add("Pow", wide, "two"), self.ints(-1), keepdims=1)
        root = self.add("Reciprocal", self.add("Sqrt", self.add("Add", mean, "epsilon")))
        return self.add("Mul", self.weight("weight", WIDTH), self.add("Cast", self.add("Mul", wide, root), to=FLOAT))

    def linear(self, x: str, name: str, width: int, out: int) -> str:
        outer, self.scope = self.scope, f"{self.scope}.{name}"
        made = self.add("MatMul", x, self.add("Transpose", self.weight("weight", out, width), perm=[1, 0]))
        self.scope = outer
        return made

    def heads(self, x: str, count: int) -> str:
        return self.add("Transpose", self.add("Reshape", x, self.ints(0, LENGTH, count, HEAD)), perm=[0, 2, 1, 3])

    def rotated(self, x: str, cos: str, sin: str) -> str:
        half = self.ints(HEAD // 2)
        low = self.add("Slice", x, self.ints(0), half, self.ints(3), self.ints(1))
        high = self.add("Slice", x, half, self.ints(2**63 - 1), self.ints(3), self.ints(1))
        turned = self.add("Concat", self.add("Neg", high), low, axis=-1)
        return self.add("Add", self.add("Mul", x, cos), self.add("Mul", turned, sin))

    def repeated(self, x: str) -> str:
        groups = HEADS // KV_HEADS
        wide = self.add("Expand", self.add("Unsqueeze", x, self.ints(2)), self.ints(1, 1, groups, 1, 1))
        return self.add("Reshape", wide, self.ints(0, HEADS, LENGTH, HEAD))

    def layer(self, x: str, number: int, cos: str, sin: str, mask: str) -> str:
        base = f"model.layers.{number}"
        self.scope = f"{base}.input_layernorm"
        y = self.norm(x)
        self.scope = f"{base}.self_attn"
        q, k, v = (
            self.heads(self.linear(y, name, WIDTH, count * HEAD), count)
            for name, count in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS))
        )
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        k, v = self.repeated(k), self.repeated(v)
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.add("Cast", self.add("Add", self.add("Mul", scores, "scale"), mask), to=TensorProto.FLOAT)
        shares = self.add("Cast", self.add("Softmax", scores, axis=-1), to=FLOAT)
        joined = self.add("Transpose", self.add("MatMul", shares, v), perm=[0, 2, 1, 3])
        flat = self.add("Reshape", joined, self.ints(0, LENGTH, WIDTH))
        x = self.add("Add", x, self.linear(flat, "o_proj", WIDTH, WIDTH))
        self.scope = f"{base}.post_attention_layernorm"
        y = self.norm(x)
        self.scope = f"{base}.mlp"
        gate, up = self.linear(y, "gate_proj", WIDTH, FFN), self.linear(y, "up_proj", WIDTH, FFN)
        gated = self.add("Mul", self.add("Mul", gate, self.add("Sigmoid", gate)), up)
        return self.add("Add", x, self.linear(gated, "down_proj", FFN, WIDTH))


def llama_70b(layers: int = LAYERS) -> ModelProto:
    """The model; 70.6 billion parameters at 80 layers."""
    made = Builder()
    made.scope = "model.embed_tokens"
    x = made.add("Gather", made.weight("weight", VOCABULARY, WIDTH), "input_ids", axis=0)
    made.scope = "model.rotary_emb"
    steps = made.add("Cast", made.add("Range", "zero", "length", "one"), to=TensorProto.FLOAT)
    angles = made.add("Mul", made.add("Unsqueeze", steps, made.ints(1)), "inverse")
    whole = made.add("Concat", angles, angles, axis=-1)
    cos, sin = (made.add("Cast", made.add(kind, whole), to=FLOAT) for kind in ("Cos", "Sin"))
    made.scope = "model"
    square = made.add("Expand", "low", made.ints(LENGTH, LENGTH))
    mask = made.add("Trilu", square, made.ints(1), upper=1)
    for number in range(layers):
        x = made.layer(x, number, cos, sin, mask)
    made.scope = "model.norm"
    x = made.norm(x)
    made.scope = "lm_head"
    weight = made.add("Transpose", made.weight("weight", VOCABULARY, WIDTH), perm=[1, 0])
    scores = made.add("MatMul", x, weight)
    half = [("scale", HEAD**-0.5), ("low", -3e38)]
    full = [("two", 2.0), ("epsilon", 1e-5)]
    stored = [
        *made.constants.values(),
        *(helper.make_tensor(name, FLOAT, [], [value]) for name, value in half),
        *(helper.make_tensor(name, TensorProto.FLOAT, [], [value]) for name, value in full),
        *(helper.make_tensor(n, INT64, [], [v]) for n, v in (("zero", 0), ("length", LENGTH), ("one", 1))),
        helper.make_tensor(
            "inverse", TensorProto.FLOAT, [HEAD // 2], [5e5 ** (-2 * i / HEAD) for i in range(HEAD // 2)]
        ),
    ]
    output = helper.make_tensor_value_info(scores, FLOAT, ["batch", LENGTH, VOCABULARY])
    graph = helper.make_graph(made.nodes, "llama_70b", made.inputs, [output], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def limits():
    """The module that measures the child process."""
    path = Path(__file__).with_name("import_limits.py")
    spec = importlib.util.spec_from_file_location("automap_import_limits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Imports the model in the child process alone, then in the way of a user."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=LAYERS)
    layers = parser.parse_args().layers
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    model = llama_70b(layers)
    data = model.SerializeToString()
    print(f"{len(model.graph.node):,} nodes, {len(data) / 1e6:.1f} MB")
    seconds, cpu, peak, status, answer = limits().measure(data)
    assert status == 0 and "error" not in answer, answer
    print(f"child process: {seconds:.2f} s wall, {cpu:.2f} s processor, {peak / (1 << 20):.0f} MiB")
    began = time.perf_counter()
    graph: Graph = import_model(data)
    print(f"import_model, with reading the answer: {time.perf_counter() - began:.2f} s wall")
    print(f"{graph.num_parameters:,} parameters, {len(graph.operators):,} operators")


if __name__ == "__main__":
    main()
