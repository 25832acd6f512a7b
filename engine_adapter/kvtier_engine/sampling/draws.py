"""Randomness as a function: the same (seed, counter) gives the same number anywhere.

A request's draw for its n-th token depends on its seed and n alone. So batch composition,
preemption and the machine cannot change it, and nothing needs to be saved.
"""

from __future__ import annotations

import torch

# SplitMix64 (Steele, Lea and Flood, 2014): constants of the increment and of the two mixing steps.
_INCREMENT = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the int64 with the same bits as a uint64; torch multiplies them alike."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask drops the copies of the sign.
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shift_right(values, 30)) * _signed(_MIX_1)
    values = (values ^ _shift_right(values, 27)) * _signed(_MIX_2)
    return values ^ _shift_right(values, 31)


def uniform(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers in [0, 1), one per pair of int64 seed and counter.

    The seed is mixed before the counter is added, so that neighbouring seeds do not run through
    the same numbers one step apart.
    """
    state = _mix(seeds + _signed(_INCREMENT)) + (counters + 1) * _signed(_INCREMENT)
    return _shift_right(_mix(state), 11).double() * 2.0**-53
