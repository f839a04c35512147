"""Imported last by the process that ranks are forked from.

Every optimizer of torch imports `torch._dynamo`: a second of processor time in each rank. And what is imported stays
for good, so that ranks need not look through it for garbage.
"""

import gc

import torch._dynamo  # noqa: F401

gc.freeze()
