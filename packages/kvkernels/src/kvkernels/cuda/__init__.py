"""CUDA kernels for arrays in GPU memory: their sources, and the launches. CuPy is imported late.

`kvkernels.cuda.calls` has what only a GPU does: `swap_blocks` and `merge_states`.
"""
