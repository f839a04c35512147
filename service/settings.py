"""Settings of the service, read from the environment (`AUTOMAP_...`).

Knows no component of the service. Units: bytes, seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from platformdirs import user_data_path
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from ir.onnx.readers.limits import LARGEST_FILE

MIB = 1 << 20
GIB = 1 << 30
LARGEST_VALUE = 512 * MIB
"""Most bytes of a value of Redis, which cuts connections that send more (its default of `proto-max-bulk-len`)."""


class Settings(BaseSettings):
    """Everything an operator can set; each field is the variable `AUTOMAP_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="AUTOMAP_", frozen=True)

    redis_url: str | None = None
    """A Redis of your own (`redis://...`, `unix://...`); unset = a private one in the data folder."""
    data_dir: Annotated[Path, AfterValidator(Path.absolute)] = Field(default_factory=lambda: user_data_path("automap"))
    """Folder in which the private Redis keeps its append-only file."""
    num_workers: int = Field(default=1, ge=0, le=256)
    """Worker processes that `automap serve` supervises; each runs one job at a time."""
    max_model_bytes: int = Field(default=LARGEST_FILE, ge=1, le=LARGEST_FILE)
    """Largest model file; of those beyond 64 MiB the weights are taken out before anything is stored."""
    max_uploads: int = Field(default=16, ge=1, le=1000)
    """Largest number of uploads at a time; their bytes are kept in temporary files while they arrive."""
    max_stored_bytes: int = Field(default=1024 * MIB, ge=1)
    """Largest size of what a tenant stores: model files, requests and plans."""
    max_kept_bytes: int = Field(default=256 * MIB, ge=1)
    """Largest size of a tenant's requests and plans; beyond it the oldest jobs that have ended are removed."""
    keep_days: float = Field(default=90.0, gt=0)
    """Days for which a job that has ended is kept."""
    max_request_bytes: int = Field(default=1 * MIB, ge=1, le=LARGEST_VALUE)
    """Largest body of every other request."""
    max_queued_jobs: int = Field(default=1000, ge=1)
    """Largest number of a tenant's jobs that wait."""
    max_search_s_per_day: float = Field(default=1e9, gt=0)
    """Largest sum of a tenant's searches in a day (UTC)."""
    max_job_bytes: int = Field(default=8 * GIB, ge=64 * MIB)
    """Memory that the process of a job may take beyond what its worker has."""
    max_budget_s: float = Field(default=3600.0, gt=0)
    """Longest search; also the time that a budget in evaluations gets."""
    max_wait_s: float = Field(default=30.0, ge=0)
    """Longest long poll; a longer `wait` is cut to it."""
    max_stream_s: float = Field(default=900.0, gt=0)
    """Longest stream of events; clients that listen on open another, which goes on where this one ended."""
    upload_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time in which an upload arrives."""
    body_timeout_s: float = Field(default=20.0, gt=0)
    """Longest time in which a client sends the headers of a request, and the body of one that is not an upload."""
    max_connections: int = Field(default=2000, ge=8)
    """Largest number of open connections; more are answered with 503 and closed."""
    require_keys: bool = False
    """Whether requests need an API key also where only this host reaches the service, as behind a proxy."""
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    """Names that the Host header may have (against DNS rebinding); `*` = any."""
    root_path: str = Field(default="", pattern=r"^(/[A-Za-z0-9_.~-]+)*$", examples=["/automap"])
    """Path below which a proxy has the service, such as `/automap`; empty = the service has a host name of its own."""
    log_format: Literal["text", "json"] = "text"
    """Form of the log: lines for people, or one JSON object a line."""
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(str.upper)] = (
        "WARNING"
    )
