"""Casts on the GPU: amax, tiles, the fast paths, both layouts from one read, statistics of the same pass."""
