"""A small search that a worker runs before it forks processes for jobs, so that these start faster.

It imports modules, fills tables of formulas and templates, and calls kernels once. Without it every job would do this
again, which takes longer than a small search itself.
"""

from __future__ import annotations

from service.jobs.run_job import JobRequest, ModelOptions, import_graph, run_job

_REQUEST = JobRequest(
    model=ModelOptions(zoo="gpt:layers=2,hidden=64,heads=2,seq_len=32,vocab_size=64"),
    cluster="2xV100-16GB",
    training={"global_batch": 8},
    budget="2",
)


def rehearse() -> None:
    """Searches once, and forgets what was found."""
    run_job(_REQUEST, lambda: import_graph(b"", _REQUEST), on_progress=lambda p: None, should_stop=lambda: False)
