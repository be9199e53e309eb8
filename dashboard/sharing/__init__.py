"""A run outside the dashboard: a report in one file, figures and tables in a notebook."""
