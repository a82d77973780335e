"""Answers, nearest passages, vectors, explanations and metrics of a trained run, as values of JSON.

`realm_jax.api`, the service and the commands share these functions. `train/trained_run.py` opens a run.
"""
