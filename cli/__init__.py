"""The fp8debug command line: one file per command, no arithmetic."""
