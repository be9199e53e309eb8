"""Cures of findings, applied to the faults that ``inject`` plants."""
