"""The session of ``watch()``: its arguments, coverage, steps, rows, dumps, and what a change of the recipe asks for."""
