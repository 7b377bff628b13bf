"""What more memory does to throughput, and what it does not."""
