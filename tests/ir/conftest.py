"""Exports of small PyTorch models, made once a session, and the light models of the onnx package."""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT_NAMES = sorted(p.stem.removeprefix("light_") for p in LIGHT.glob("light_*.onnx"))


def _models():
    """The sibling module `models`, which `--import-mode=importlib` does not put on the path."""
    name = "automap_test_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("models.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _export(folder: Path, name: str, batch: int, opset: int) -> bytes:
    """The bytes of an export, which all processes of a session make once."""
    file = folder / f"{name}-{batch}-{opset}.onnx"
    if not file.exists():
        import torch

        from automap.runtime.torch_export import export_onnx

        torch.set_num_threads(1)
        made = export_onnx(lambda: _models().build(name, batch), opset=opset, name=name)
        # Another process may write the same: a file is whole as soon as it has its name.
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(made)
        part.rename(file)
    return file.read_bytes()


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """`export(name, batch=1, opset=20)`: bytes of a weight-free ONNX file."""
    base = tmp_path_factory.getbasetemp()
    # Under xdist the folder above is that of the session, without it that of all sessions.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports"
    folder.mkdir(exist_ok=True)
    return lambda name, batch=1, opset=20: _export(folder, name, batch, opset)


@pytest.fixture(scope="session")
def build() -> Callable:
    """`build(name, batch=1)`: (module, inputs) of the same models."""
    return _models().build


@functools.cache
def _light(name: str) -> bytes:
    return (LIGHT / f"light_{name}.onnx").read_bytes()


@pytest.fixture(scope="session")
def light() -> Callable[[str], bytes]:
    """`light(name)`: bytes of one of the nine light models."""
    return _light


@pytest.fixture(params=LIGHT_NAMES)
def light_name(request: pytest.FixtureRequest) -> str:
    return request.param


EXPORTERS = ("test_architectures", "test_experts")
"""Modules that export by themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever runs PyTorch's exporters takes seconds: `make unit` leaves it out."""
    for item in items:
        if "export" in getattr(item, "fixturenames", ()) or item.path.stem in EXPORTERS:
            item.add_marker("slow")
