"""Experiments: the user's script trained again and again, each time in another arm, and what the losses say."""

from fp8debug.trials.bisect import bisect_run
from fp8debug.trials.ledger import Trials
from fp8debug.trials.script import Script
from fp8debug.trials.verify import arms_of, verify_run

__all__ = ["Script", "Trials", "arms_of", "bisect_run", "verify_run"]
