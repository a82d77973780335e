"""A bucket that fails in every way that buckets do."""

from fsspec.implementations.memory import MemoryFileSystem

from realm_jax.storage import Bucket


class Faulty(MemoryFileSystem):
    """A bucket that lists from a cache until it is told not to, and fails as often as `faults` says.

    faults: for each operation what its calls raise, one after another, None for nothing; 'late' raises although the
    write has happened.
    """

    cachable = False
    protocol = "faulty"

    def __init__(self, faults=()):
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.faults = {operation: list(errors) for operation, errors in dict(faults).items()}
        self.listed: dict[str, list[str]] = {}

    def _fail(self, operation):
        fault = self.faults[operation].pop(0) if self.faults.get(operation) else None
        if fault is not None:
            raise fault

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._fail("write")
        super().pipe_file(path, value, mode=mode, **kwargs)
        self._fail("late")

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._fail("read")
        return super().cat_file(path, start=start, end=end, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._fail("list")
        if path not in self.listed:
            self.listed[path] = super().ls(path, detail=False, **kwargs)
        return self.listed[path]

    def invalidate_cache(self, path=None):
        self.listed.clear()


def bucket(**faults):
    waited = []
    folder = Bucket("memory://runs/one", Faulty(faults), waited.append)
    folder.waited = waited
    return folder


def http(code):
    return OSError(f"HTTP {code}")
