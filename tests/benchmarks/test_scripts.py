"""Every script of `benchmarks/` runs, with arguments so small that it takes seconds; a missing file is an error.

Measurements are made up in the form of the files that the scripts read. Figures are not tested here.
"""

import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_up_host import two_ranks

from automap.cluster import parse_cluster
from automap.fitted_curves import COLLECTIVES
from automap.price.curves import attention_curve, gemm_curve
from automap.price.kernels.attention import EARLIER_KEYS, AttentionShape, attention_s
from automap.price.kernels.collectives import collective_s, host_link
from automap.price.kernels.gemm import gemm_s
from automap.runtime.profiler import measure_host as profiler
from automap.validation.errors_by_group import predict
from automap.validation.published_runs import load_runs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHARED = {"constants", "fitting", "fleet", "lightning_on_cpus", "pipeline_oracle", "priced_runs", "torchtitan_on_cpus"}
"""What scripts have in common, and is no script."""
SCRIPTS = {
    "auto_map": "--budget 16 --models vgg19",
    "certificates": "--budget 16 --seconds 0.5 --models gnmt-16 --clusters 8_V100 --profiles {profiles}",
    "clusters_and_tables": "--model vgg19 --devices 2 --tables 1 --kinds H100 --table-model vgg19 --budget 8",
    "cost_graph": "--plans 2 --skeletons 1 --models vgg19",
    "dapple_figure12": "{profiles}/dapple --models VGG-19 --hosts 2",
    "dapple_table4": "{profiles}/dapple --models GNMT-16 --clusters A",
    "dapple_table5": "",
    "decision_speed": "0.001 --problems resnet50_on_2x4xV100 --warm-up 0.001 --network",
    "dqn_ablation": "--evaluations 40 --seeds 1 --problems 12 --variants from_scratch",
    "dqn_alone": "--seeds 1 --seconds 2 --evaluations 64 --only vgg19 --search 16 --known {known}",
    "dqn_pruning": "--evaluations 16 --seeds 1 --models vit",
    "equality": "dp2,_ZeRO_1",
    "finer_pipelines": "levels --evaluations 16 --pairs vit",
    "first_use": "--installed",
    "fit_attention": "{attention}",
    "fit_collectives": "{collectives}",
    "fit_gemm": "{gemm}",
    "frozen_parameters": "--budget 16 --layers 1",
    "fuzz_import": "0.001 1",
    "generated_pairs": "500003-500003 --budget 16 --planner-budget 16 --planners whale,spp",
    "gnn_loopback": "--placements 1 --iterations 1",
    "gnn_placement": "--seconds 0.2 --cells 1 --small 2 --dqn 0 --large 2",
    "gpu_compiled": "{profiles} --shrink 64",
    "gpu_convolutions": "measure {profiles}/convolutions.json --only Inception --shrink 16",
    "gpu_kernels": "--shrink 64",
    "gpu_sharded": "all {profiles}/sharded --only tiny --ways ddp fsdp",
    "gpu_steps": "all {profiles}/steps --only tiny",
    "hf_models": "--models whisper --budget 16",
    "import_limits": "cycle",
    "import_profiles": "{profiles}",
    "import_speed": "--layers 1",
    "led_trials": "--trials 2 --evaluations 64 --only vgg19 --host pipelines",
    "oneflow": "--models resnet50",
    "order_of_runs": "--cluster {cluster} --rounds 1 --model {model}",
    "memory_band": "{runs}",
    "mesh_order": "--only vgg19_on_4x8xA100",
    "network_gap": "--seeds 1 --search 16 --only vgg19 --known {known}",
    "pipedream_speedups": "{profiles}/dapple --workers 2",
    "pipeline_optima": "--only random-12 --budget 16 --seeds 1 --climb 0.2",
    "prove_trainer": "1 --families mlp --clusters 2 --targets automap",
    "planners": "--budget 16 --portfolio 16 --models vgg19 --clusters 7_A100 --planners spp,whale",
    "pricing_speed": "0.001 --models vgg19 --batches 1",
    "problems": "vgg:",
    "prove_exports": "2 --targets deepspeed",
    "prove_plans": "2 --models vit",
    "prove_pruning": "1 --models vgg19_on_1x8xV100-16GB",
    "recipes": "--budget 20 --only BERT --targets megatron-core",
    "real_models": "--budget 16 --models gnmt-16 --clusters 8_V100 --profiles {profiles}",
    "runtime_overhead": "--rounds 1 --model {model}",
    "scarce_memory": "{profiles}/dapple --budget 16 --devices 8 --memory 16 --models gnmt-16 --seeds 1 --planners spp",
    "search_scale": "--budget 16 --blocks 12 --devices 8",
    "searchers": "--searchers random --problems 12 --seeds 1 --evaluations 8",
    "service_chaos": "--jobs 2 --minutes 0.01 --every 0.4 --recoveries 0 --stale 0 --teams 0 --away 0 --workers 1",
    "service_events": "--clients 4 --events 12",
    "service_load": "--jobs 4 --polls 32 --slow 4 --submissions 2 --minutes 0.001 --workers 1",
    "spp_bound": "--instances 3",
    "start_up": "--rounds 1 --only help",
    "step_parts": "--rounds 1 --cluster {cluster} --model {model} --batch 4",
    "sync_training": "--steps 2 --seeds 2 --timed 1",
    "train_exports": "--targets pytorch --plans 1 --evaluations 16",
    "whale_balance": "--models resnet50",
    "zoo_speed": "vgg19",
}
"""Script -> arguments; an underscore is a space inside one."""
WRITER, PHOTOGRAPHER = "readme_demo", "dashboard_pictures"
"""The first runs the demonstration, which has tests of its own; here it writes down what another one shows. The second
needs half a minute of a search in a browser; the dashboard has tests of its own too."""
APART = {"fit_trainers": "{runs}", "held_out": "{runs}"}
"""Those that run in a process of their own, for they change the constants of the price."""
MISSING = {
    "fit_attention": "missing.csv",
    "fit_collectives": "missing.csv",
    "fit_gemm": "missing.csv",
    "fit_trainers": "missing.json",
    "held_out": "missing.json",
    "memory_band": "missing.json",
    "import_profiles": "missing",
    "dapple_figure12": "missing",
    "certificates": "--models gnmt-16 --profiles missing",
    "dapple_table4": "missing",
    "pipedream_speedups": "missing",
    "generated_pairs": "1-1 --profiles missing",
    "planners": "--models gnmt-16 --profiles missing",
    "real_models": "--models gnmt-16 --profiles missing",
    "scarce_memory": "missing --models gnmt-16",
}
"""Scripts that read files -> arguments that name none."""
MODEL = "gpt:layers=2,hidden=32,heads=2,seq_len=16,vocab_size=32"
PROFILE = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Linear(8, 8) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=2048.0, parameter_size=256.0
node3 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.5, activation_size=2048.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
"""  # noqa: E501
"""A layer profile in PipeDream's format."""


def test_every_script_has_a_run():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == SHARED | set(SCRIPTS) | set(APART) | {
        WRITER,
        PHOTOGRAPHER,
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path} of what the scripts read."""
    folder = tmp_path_factory.mktemp("measurements")
    rng = np.random.default_rng(0)

    def table(name, rows):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return folder / name

    devices = {"A100-SXM": "1xA100-80GB", "H100-SXM": "1xH100-80GB"}
    gemms, attentions, collectives = [], [], []
    for gpu, cluster in devices.items():
        device = parse_cluster(cluster).device(0)
        products, attention = gemm_curve(device, "bf16"), attention_curve(device, "bf16", rate=1.0, portable=False)
        for m, n, k in 2.0 ** rng.integers(6, 13, (12, 3)):
            seconds = gemm_s(m, n, k, 1.0, 2.0, 2.0, products)
            gemms.append({"gpu": gpu, "dtype": "bf16", "m": m, "n": n, "k": k, "latency_us": seconds * 1e6})
        for heads, length in ((2.0, 256.0), (8.0, 512.0), (8.0, 2048.0), (16.0, 4096.0), (32.0, 1024.0), (4.0, 8192.0)):
            seconds = attention_s(
                AttentionShape(1.0, heads, heads, length, length, 128.0, 128.0, EARLIER_KEYS, 2.0), attention, False
            )
            row = {"gpu": gpu, "batch": 1, "seq_len": int(length), "num_heads": int(heads), "num_kv_heads": int(heads)}
            attentions.append({**row, "head_dim": 128, "latency_us": seconds * 1e6})
        for ranks in (2, 4, 8):
            link = host_link(ranks, latency_s=1e-5, growth=0.2, bytes_per_s=2e11, small_group=0.3, ramp=2.0)
            for size in (2.0**14, 2.0**20, 2.0**26):
                seconds = collective_s(COLLECTIVES.index("all_reduce"), float(ranks), link, size)
                row = {"gpu": gpu, "op": "all_reduce", "num_gpus": ranks, "gpus_per_node": 8, "bytes": size}
                collectives.append({**row, "time_us": seconds * 1e6, "source": "made up"})
    (folder / "dapple").mkdir()
    profile = folder / "dapple" / "gnmt-16-pbs-64.txt"
    profile.write_text(PROFILE)
    (folder / "dapple" / "vgg-19-pbs-32.txt").write_text(PROFILE)
    runs = folder / "runs.json"
    runs.write_text(json.dumps(made_up_runs()))
    found = [predict(run) for run in load_runs(runs)]
    measured = [{"iteration_s": p.step_time_s, "peak_memory_GB": 1.01e-9 * p.peak_memory_bytes} for p in found]
    timed = [run | {"measured": own} for run, own in zip(made_up_runs(), measured, strict=True)]
    runs.write_text(json.dumps(timed))
    cluster = profiler.build_cluster("cpu", two_ranks(), profiler.step_plans("cpu"))
    (folder / "host.json").write_text(json.dumps(cluster.to_json()))
    return {
        "gemm": table("gemm.csv", gemms),
        "attention": table("attention.csv", attentions),
        "collectives": table("collectives.csv", collectives),
        "runs": runs,
        "profiles": folder,
        "cluster": folder / "host.json",
        "model": MODEL,
        "known": folder / "known.json",
    }


def made_up_runs():
    """Runs of three trainers in three groups, in the form of published ones; each takes a second."""
    model = {"name": "tiny", "layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab_size": 1024, "seq_len": 128}
    found = []

    def add(group, stack, gpu, num_gpus, model, **strategy):
        cluster = {"gpu": gpu, "num_gpus": num_gpus, "gpus_per_node": 8, "intra_link": "NVLink3", "memory_GB": 80}
        cluster["inter_link"] = "8x200Gb/s HDR InfiniBand"
        given = {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 4, "global_batch": 32, "precision": "fp16", "zero_stage": 0}
        run = {"id": f"{group}-{len(found)}", "group": group, "stack": stack, "model": model, "cluster": cluster}
        found.append(run | {"strategy": given | strategy, "measured": {"iteration_s": 1.0}})

    for layers in (2, 4):
        deep = model | {"layers": layers, "name": f"deep-{layers}"}
        add("one", "megatron-lm", "A100-SXM", 8, deep, dp=4, tp=2)
        add("one", "megatron-lm", "A100-SXM", 8, deep, dp=4, pp=2)
        add("two", "megatron-lm", "V100-SXM", 16, deep, dp=8, tp=2)
        add("three", "llm-foundry-fsdp", "A100-SXM", 16, deep, dp=16, zero_stage=3, micro_batch=2, precision="bf16")
    images = {"name": "ResNet-50-v1.5", "vision": {"image": 64}}
    add("images", "deeplearningexamples", "A100-SXM", 8, images, dp=8)
    return found


def run(script, arguments, monkeypatch, folder):
    """Runs the `main` of a script in this process; its exit status."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    optima = importlib.import_module("problems")
    # What is missing there would be searched and kept.
    shutil.copy(BENCHMARKS / "optima.json", folder / "optima.json")
    monkeypatch.setattr(optima, "OPTIMA", folder / "optima.json")
    try:
        return importlib.import_module(script).main() or 0
    except SystemExit as end:
        return end.code or 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs(script, files, monkeypatch, tmp_path, capsys):
    if script in ("hf_models", "first_use", "frozen_parameters"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    arguments = [word.replace("_", " ") for word in SCRIPTS[script].split()]
    status = run(script, [word.format(**files) for word in arguments], monkeypatch, tmp_path)
    said = capsys.readouterr().out
    # Two steps of training tell nothing of noise, and one start on a busy host nothing of a limit.
    inconclusive = {"sync_training": "loss within noise: ", "start_up": "A limit is exceeded."}
    assert status == 0 or (script in inconclusive and inconclusive[script] in said)
    assert re.search(r"\d", said)
    if script.startswith("fit_"):
        # The measurements follow the form that is fitted.
        assert re.search(r"all rows left out: median [0-4]\.\d%", said)


def test_the_table_of_the_planners_is_made_from_their_results(monkeypatch, tmp_path, capsys):
    picture = tmp_path / "picture.svg"
    results = sorted(map(str, (BENCHMARKS / "results").glob("planners-*.txt")))
    assert run("planners", ["--table", *results, "--picture", str(picture)], monkeypatch, tmp_path) == 0
    table, said = capsys.readouterr().out.split("\n\n")
    page = (BENCHMARKS.parent / "docs" / "planners.md").read_text()
    assert len(table.splitlines()) > 30
    assert table in page
    assert said.splitlines()[0] in page.replace("\n", " ")
    assert 1_000 < len(picture.read_text()) < 50_000


@pytest.mark.slow
@pytest.mark.parametrize("failed", [False, True])
def test_what_the_demonstration_shows_is_written_down(failed, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{WRITER}.py"])
    writer = importlib.import_module(WRITER)
    readme, plans = tmp_path / "README.md", tmp_path / "plans"
    old = f"Before\n{writer.BEGIN}old\n{writer.END}\nBehind\n"
    readme.write_text(old)
    monkeypatch.setattr(writer, "README", readme)
    monkeypatch.setattr(writer, "PLANS", plans)

    def shows(folder, *, budget):
        (folder / "net").mkdir(parents=True)
        (folder / "net" / "plan.json").write_text("{}")
        print("The service is here.\n\nnet: fast")
        return int(failed)

    monkeypatch.setattr(writer, "run_demo", shows)
    if failed:
        with pytest.raises(SystemExit):
            writer.main()
        assert readme.read_text() == old and not plans.exists()
        return
    writer.main()
    assert readme.read_text() == old.replace("old", "net: fast")
    assert [path.name for path in plans.iterdir()] == ["net.json"]
    assert "net: fast" in capsys.readouterr().out


def alone(script, arguments, folder):
    """Runs a script in a process of its own."""
    return subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("script", APART)
def test_it_runs_apart(script, files, tmp_path):
    done = alone(script, APART[script].format(**files).split(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "groups left out" in done.stdout


@pytest.mark.slow
def test_a_group_that_takes_twice_as_long_is_seen_when_it_is_left_out(files, tmp_path):
    runs = json.loads(Path(files["runs"]).read_text())
    for each in runs:
        each["measured"]["iteration_s"] *= 2.0 if each["group"] == "three" else 1.0
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    done = alone("held_out", [tmp_path / "runs.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    # Mean errors today and left out, bias, shares of runs and half-widths of bands: stated and blind.
    (line,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("three "))
    runs_of_it, today, left_out, bias, stated, band, *_ = (float(word.rstrip("%")) for word in line)
    assert (runs_of_it, today, stated) == (2.0, 50.0, 0.0)
    assert 10.0 < left_out < 80.0 and bias == -left_out
    assert band < 100.0


@pytest.mark.slow
def test_constants_are_fitted_alone(files, tmp_path):
    done = alone("fit_trainers", [files["runs"], "--only", "clock.A100,micro_batch_ms"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as they are" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line.endswith(")")] == [
        "micro_batch_ms",
        "clock.A100",
    ]


@pytest.mark.slow
def test_a_constant_that_is_not_fitted_is_an_error(files, tmp_path):
    done = alone("fit_trainers", [files["runs"], "--only", "clock.A200"], tmp_path)
    assert done.returncode == 1
    assert "--only: no constant 'clock.A200' is fitted; known: " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", MISSING)
def test_a_missing_file_is_an_error(script, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(script, MISSING[script].split(), monkeypatch, tmp_path) == 2
    assert "missing" in capsys.readouterr().err
