"""Settings of the service, read from the environment (`AUTOMAP_...`).

Knows no component. Units: bytes, seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from platformdirs import user_data_path
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1 << 20


class Settings(BaseSettings):
    """Everything an operator can set; each field is the variable `AUTOMAP_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="AUTOMAP_", frozen=True)

    redis_url: str | None = None
    """A Redis of your own (`redis://...`, `unix://...`); unset = a private one in the data folder."""
    data_dir: Annotated[Path, AfterValidator(Path.absolute)] = Field(default_factory=lambda: user_data_path("automap"))
    """Folder in which the private Redis keeps its append-only file."""
    num_workers: int = Field(default=1, ge=0, le=256)
    """Worker processes that `automap serve` supervises; each runs one job at a time."""
    max_model_bytes: int = Field(default=64 * MIB, ge=1)
    """Largest model file."""
    max_stored_bytes: int = Field(default=1024 * MIB, ge=1)
    """Largest size of all model files together."""
    max_request_bytes: int = Field(default=4 * MIB, ge=1)
    """Largest body of every other request."""
    max_queued_jobs: int = Field(default=1000, ge=1)
    """Largest number of jobs that wait."""
    max_budget_s: float = Field(default=3600.0, gt=0)
    """Longest search; also the time that a budget in evaluations gets."""
    max_wait_s: float = Field(default=30.0, ge=0)
    """Longest long poll; a longer `wait` is cut to it."""
    max_stream_s: float = Field(default=900.0, gt=0)
    """Longest stream of events; clients that listen on open another, which goes on where this one ended."""
    upload_timeout_s: float = Field(default=120.0, gt=0)
    """Longest upload; one that takes longer is refused."""
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    """Names that the Host header may have (against DNS rebinding); `*` = any."""
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(str.upper)] = (
        "WARNING"
    )
