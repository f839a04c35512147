"""Hashes of sequences of words, by which kernels find results that they have computed before. Two hashes of each
sequence make it unlikely that another sequence has the same."""

from __future__ import annotations

from numba import int64, types

from automap.jit import borrowing

SEEDS = (1469598103934665603, 7809847782465536322)
"""The two hashes of an empty sequence: arbitrary numbers."""


@borrowing(types.UniTuple(int64, 2)(int64, int64, int64), inner=True)
def mix(one, two, word):
    """The two hashes of a sequence with one more word.

    The first is multiplied by the prime of FNV-1a, the second by the factor of Knuth's MMIX generator.
    """
    one = (one ^ word) * int64(1099511628211)
    one ^= one >> 29
    two = (two + word) * int64(6364136223846793005) + int64(1442695040888963407)
    return one, two ^ (two >> 31)


@borrowing(int64(int64), inner=True)
def scramble(word):
    """The hash of one word. Sums of it are hashes of sets of words. It is the finalizer of splitmix64 (Steele, Lea,
    Flood 2014)."""
    x = word * int64(-7046029254386353131)
    x = (x ^ ((x >> 30) & int64(0x3FFFFFFFF))) * int64(-4658895280553007687)
    x = (x ^ ((x >> 27) & int64(0x1FFFFFFFFF))) * int64(-7723592293110705685)
    return x ^ ((x >> 31) & int64(0x1FFFFFFFF))
