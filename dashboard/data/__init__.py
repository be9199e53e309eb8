"""Queries: from a run to arrays and records, without Dash."""
