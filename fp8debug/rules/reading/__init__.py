"""Readings of a run that several rules share: the prefilter, traces of a site, losses, structure of the model, forecasts."""
