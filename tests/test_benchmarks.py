"""Benchmarks replace functions of the package by name, so these names must exist."""

import pkgutil
import sys

from scripts import ROOT, script

from realm_jax.storage import PosixFolder


def test_the_drill_times_functions_that_exist(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    drill = script("benchmarks/drill.py")
    places = [place for places in drill.PHASES.values() for place in places]
    assert places and all(callable(pkgutil.resolve_name(place)) for place in places)
    assert all(callable(getattr(PosixFolder, name)) for name in drill.OPERATIONS)
