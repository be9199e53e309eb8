"""Offline tools, one file per command: calibrate, compact, measure (``replay``), speed, import te-stats."""
