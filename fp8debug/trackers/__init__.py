"""Experiment trackers, a file for each: importing the package registers them and imports none of their libraries."""

from fp8debug.registry import register_all
from fp8debug.trackers.base import TRACKERS, Tracker, TrackerRun

register_all(__name__, __path__, r"to_")

__all__ = ["TRACKERS", "Tracker", "TrackerRun"]
