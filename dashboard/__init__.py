"""The fp8debug dashboard: data (SQL), figures (pure), pages."""
