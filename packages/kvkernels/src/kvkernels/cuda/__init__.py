"""CUDA kernels for arrays in GPU memory: their sources, and the launches. CuPy is imported late."""
