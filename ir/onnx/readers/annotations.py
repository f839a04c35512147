"""Annotations in `metadata_props` of a node, after Whale (arXiv 2011.09208): what its author asks of a plan.

`automap.replicate` and `automap.split` are true or false, `automap.stage` is the number of a pipeline stage, from 0.
They become constraints on the node's operator, see `automap.annotations`, unless a request's `hints.constraints` names
it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.errors import refuse

ANNOTATION_KEYS = ("automap.replicate", "automap.split", "automap.stage")
MAX_STAGE = 65_535
"""Largest number of a stage, that of `hints.constraints`."""


def stated_annotations(metadata: Mapping[str, str], name: str) -> tuple[tuple[str, int], ...]:
    """The annotations among the metadata of node `name`: key without `automap.` and value, 0 or 1 for false and true.

    Raises:
        ModelError: an annotation has another value.
    """
    found = []
    for key in ANNOTATION_KEYS:
        text = metadata.get(key)
        if text is None:
            continue
        if key == "automap.stage":
            if not (text.isdecimal() and int(text) <= MAX_STAGE):
                repair = f"Write the number of a pipeline stage, from 0 to {MAX_STAGE}."
                raise refuse(
                    f"a node has an annotation that is not a number of a stage ({key})", f"{name}: {text!r}", repair
                )
            found.append(("stage", int(text)))
        elif text.lower() not in ("true", "false"):
            raise refuse(
                f"a node has an annotation that is neither true nor false ({key})",
                f"{name}: {text!r}",
                "Write true or false.",
            )
        else:
            found.append((key.removeprefix("automap."), int(text.lower() == "true")))
    return tuple(found)
