"""Checks of what a request names: its model must be there, and its cluster must not be a file of the service."""

from __future__ import annotations

from fastapi import HTTPException

from automap.errors import ClusterError, ModelError
from ir import zoo
from service.jobs.run_job import JobRequest
from service.jobs.store import Store
from service.problems import problem_of


def check_cluster(request: JobRequest) -> None:
    """Refuses the name of a file: only the command line reads files, the service opens no path that a request names.

    Raises:
        ClusterError: the cluster is one.
    """
    if isinstance(request.cluster, str) and request.cluster.endswith(".json"):
        repair = "Send the document itself as an object."
        raise ClusterError("files are not read here", field="cluster", value=request.cluster, repair=repair)


def model_name(model_id: str, request: JobRequest, store: Store) -> str:
    """The name of the one model that the request refers to.

    Raises:
        HTTPException: there is no such model.
        ModelError: not exactly one is named.
    """
    spec = request.model.zoo
    if bool(spec) == bool(model_id):
        repair = "Give the id of an uploaded model, or under zoo the name of a known one."
        raise ModelError("exactly one of model_id and zoo is needed", field="model_id", value=model_id, repair=repair)
    if spec:
        try:
            zoo.check_known(spec)
        except ModelError as fault:
            raise _not_found(fault.at("zoo")) from None
        return spec
    model = store.model(model_id)
    if model is None:
        repair = "Upload the file first: POST /v1/models."
        raise _not_found(ModelError("no such model", field="model_id", value=model_id, repair=repair))
    return model.name


def _not_found(fault: ModelError) -> HTTPException:
    """The error as status 404, for a model that must exist before the request is sent."""
    return HTTPException(404, {**problem_of(fault), "status": 404})
