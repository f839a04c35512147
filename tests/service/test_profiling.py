"""`automap profile` and `--cluster local`: what is written and said; measuring is tested with the runtime."""

import json
from dataclasses import replace

import pytest

from automap.cluster import parse_cluster
from automap.fitted_curves import Conditions, Constants
from automap.runtime.profiler import measure_host as profiler
from service.command.main import main

MODEL = "zoo:gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=200"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The user's data folder."""
    monkeypatch.setenv("AUTOMAP_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def measured(monkeypatch, cluster, outcome="ok", message=""):
    """Lets every measurement end so; returns how it was asked for."""
    asked = {}

    def measure(**how):
        asked.update(how)
        return profiler.Profile(outcome=outcome, message=message, cluster=cluster, time_s=3.0)

    monkeypatch.setattr(profiler, "profile_host", measure)
    return asked


def test_without_a_profile_local_says_what_to_run(capsys):
    assert main(["estimate", MODEL, "--cluster", "local", "--global-batch", "8"]) == 2
    assert "`automap profile`" in capsys.readouterr().err
    assert main(["clusters"]) == 0
    assert "local: this host has not been measured" in capsys.readouterr().out


def test_a_profile_is_written_and_used(tmp_path, folder, monkeypatch, capsys):
    host = replace(parse_cluster("1x2xcpu"), name="local")
    asked = measured(monkeypatch, host)
    output = tmp_path / "cluster.json"
    assert main(["profile", "-o", str(output), "--time-limit", "60", "--devices", "2"]) == 0
    assert asked == {"time_limit_s": 60.0, "num_devices": 2}
    assert parse_cluster(json.loads(output.read_text())) == host
    assert (folder / "local-cluster.json").read_text() == output.read_text()
    capsys.readouterr()
    assert main(["clusters"]) == 0
    assert "local: this host, 2 x cpu" in capsys.readouterr().out
    words = ["estimate", MODEL, "--cluster", "local", "--global-batch", "8", "--precision", "fp32", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == host.to_json()


def test_a_busy_host_is_named_when_it_is_measured(monkeypatch, capsys):
    busy = Conditions(others=0.4, stolen=0.0, waiting=0.31, spread=0.1)
    host = replace(parse_cluster("1x2xcpu"), name="local", constants=Constants(conditions=busy))
    measured(monkeypatch, host)
    assert main(["profile", "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning: local was not quiet" in shown.err
    assert "other processes had 40% of the time of the cores" in shown.err
    assert "waited for a core 31% of the time" in shown.err
    assert "hypervisor" not in shown.err
    assert json.loads(shown.out)["constants"]["conditions"] == {
        "others": 0.4, "stolen": 0.0, "waiting": 0.31, "spread": 0.1,
    }  # fmt: skip


def test_a_host_that_cannot_be_measured_is_exit_code_1(folder, monkeypatch, capsys):
    measured(monkeypatch, None, "time_limit", "not done after 90 s")
    assert main(["profile"]) == 1
    assert "time limit: not done after 90 s" in capsys.readouterr().err
    assert not folder.exists()
