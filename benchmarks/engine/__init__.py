"""How many tokens engines answer with, on one CPU core, on equal requests of a real model."""
