"""Families of the devices that have a data file, and by whose kernels each is priced (`automap/data/families.json`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources

from automap.documents import read_document

KERNELS = ("own", "alike", "unlike", "foreign")
"""By whose measured kernels a device is priced, from the surest to the least sure:

own      those of its own kind
alike    those of a kind with the same architecture; or published runs of this device were in the fits
unlike   those of another architecture of the same vendor, or of the same with another balance of its units
foreign  those of another vendor
"""


@functools.cache
def families() -> Mapping[str, Mapping[str, str]]:
    """Family -> name of each of its devices -> one of `KERNELS`, in the order in which they are shown."""
    found: Mapping[str, Mapping[str, str]] = read_document(
        resources.files("automap").joinpath("data", "families.json").read_text("utf-8")
    )["families"]
    return found


@functools.cache
def kernels_of() -> Mapping[str, str]:
    """Name of each device that has a data file -> one of `KERNELS`."""
    return {name: kernels for devices in families().values() for name, kernels in devices.items()}
