"""Interception of GEMMs in code that torch.compile compiled."""
