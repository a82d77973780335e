"""The version of the package, in a module without imports, so that every other module can record it."""

__version__ = "0.1.0"
