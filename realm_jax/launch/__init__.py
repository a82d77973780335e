"""Start a run somewhere, see it, stop it: one description, several targets. Read `spec.py`, then a target."""
