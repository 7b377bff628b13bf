"""Block managers side by side: `python -m benchmarks.allocator --help`."""
