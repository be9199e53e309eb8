"""Figures: from records to Plotly's dictionaries, without a run and without Dash."""
