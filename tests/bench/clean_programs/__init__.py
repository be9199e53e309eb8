"""Correct programs: architectures, FP8 stacks and trainings that are not those of the diagnosis bench."""
