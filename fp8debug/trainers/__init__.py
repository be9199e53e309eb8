"""Sources of steps and losses: importing the package registers the loops, every file of this folder one."""

from fp8debug.registry import register_all
from fp8debug.trainers.base import LOOPS, Loop, LoopRecorder, loop_of

register_all(__name__, __path__)

__all__ = ["LOOPS", "Loop", "LoopRecorder", "loop_of"]
