"""Fallback lists in the formats of their consumers, one file each: importing the package registers them."""

from fp8debug.exporters import json
from fp8debug.exporters.base import EXPORTERS, Exporter

__all__ = ["EXPORTERS", "Exporter", "json"]
