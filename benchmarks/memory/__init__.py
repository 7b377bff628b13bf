"""What memory holds, in counts: no time is measured, so the figures are the same on every machine."""
