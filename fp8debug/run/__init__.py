"""Recording of an unmodified script: ``python -m fp8debug.run``; arms of an experiment; the loss as it passes ``backward()``."""
