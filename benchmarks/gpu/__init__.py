"""The CUDA kernels on a GPU: `run.py` is one plain script, `peers.py` what stands beside them."""
