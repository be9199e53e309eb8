"""The reading side: ``Run``, its views over DuckDB, damaged streams, the manifest; no torch."""
