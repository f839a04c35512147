"""Clusters whose devices have less memory, so that small models are scarce of it."""

from dataclasses import replace

from automap.cluster import parse_cluster


def cluster_with(gib, name):
    """The cluster of this name with so many GiB on each device."""
    found = parse_cluster(name)
    return replace(found, devices={kind: replace(one, memory_GiB=gib) for kind, one in found.devices.items()})
