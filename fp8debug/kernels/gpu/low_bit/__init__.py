"""Casts that the tensor cores of Hopper do not have: FP4, FP6, fnuz, scales in E4M3 or in two levels, stochastic rounding."""
