"""Imported last by the process that ranks are forked from.

Every optimizer of torch imports `torch._dynamo`, which would take a second of processor time in each rank. What is
imported stays for good, so that ranks need not search it for garbage.
"""

import gc

import torch._dynamo  # noqa: F401

gc.freeze()
