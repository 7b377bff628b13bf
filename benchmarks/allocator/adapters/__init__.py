"""One module a block manager: how the benchmark drives it."""
