"""The run directory: its schema, the writer (numpy and pyarrow only) and ``Run``, the reader over DuckDB.

Import the parts by name (``store.write``, ``store.read``): the recording half has no duckdb, the reading half no torch.
"""
