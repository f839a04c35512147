"""Annotations in `metadata_props` of a node, by which the author of a file constrains plans (as in Whale).

`automap.replicate` and `automap.split` are true or false, `automap.stage` is the number of a pipeline stage, from 0.
They become constraints on the node's operator (see `automap.annotations`) unless `hints.constraints` of a request name
that operator. Whale: arXiv 2011.09208.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.errors import refuse

ANNOTATION_KEYS = ("automap.replicate", "automap.split", "automap.stage")
MAX_STAGE = 65_535
"""Largest number of a stage, as in `hints.constraints`."""


def stated_annotations(metadata: Mapping[str, str], name: str) -> tuple[tuple[str, int], ...]:
    """The annotations in the metadata of node `name`.

    Returns:
        pairs of a key without `automap.` and its value; false is 0, true is 1.

    Raises:
        ModelError: the value of an annotation is invalid.
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
