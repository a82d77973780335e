"""Benchmarks replace functions of the package by name, so these names must exist."""

import pkgutil
import sys

from scripts import ROOT, script

from realm_jax.storage import PosixFolder


def test_the_drill_times_functions_that_exist(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    drill = script("benchmarks/drill.py")
    functions = [name for names in drill.PHASES.values() for name in names]  # MODULE:FUNCTION
    assert functions and all(callable(pkgutil.resolve_name(name)) for name in functions)
    assert all(callable(getattr(PosixFolder, name)) for name in drill.OPERATIONS)
