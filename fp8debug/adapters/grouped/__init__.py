"""The adapter of grouped GEMMs."""

from fp8debug.adapters.grouped.adapter import Grouped

__all__ = ["Grouped"]
