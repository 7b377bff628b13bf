"""Paged attention on the CPU beside what this memory can be read at, and beside torch."""
