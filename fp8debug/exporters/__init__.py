"""Fallback lists in the formats of their consumers: importing the package registers them, every file of this folder one."""

from fp8debug.exporters.base import EXPORTERS, Exporter
from fp8debug.registry import register_all

register_all(__name__, __path__)

__all__ = ["EXPORTERS", "Exporter"]
