"""How long replays of a trace take, beside the package kvcache-simulator, for the same answers."""
