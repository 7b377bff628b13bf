"""Numba kernels for arrays in CPU memory: arithmetic only, no validation."""
