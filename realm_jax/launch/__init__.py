"""Start, monitor and stop a run: one description, several targets. Read `spec.py`, then a target."""
