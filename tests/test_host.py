"""Memory settings: taken where they help, and left alone where a user or a device decides."""

import os
import subprocess
import sys
import types

import pytest

from realm_jax import host

PROGRAM = """
import ctypes, os, sys
from realm_jax import host
calls = []
class Libc:
    def mallopt(self, option, value):
        calls.append((option, value))
host.ctypes.CDLL = lambda name: Libc()
host.platform.libc_ver = lambda: (sys.argv[1], "2.39")
host.release_large_blocks()
assert not calls, "nothing is returned before anything is kept"
host.keep_freed_memory()
print(calls)
calls.clear()
host.release_large_blocks()
print(calls)
"""


@pytest.mark.parametrize(
    "libc, environment, expected",
    [
        (
            "glibc",
            {"JAX_PLATFORMS": "cpu"},
            "[(-8, 4), (-4, 0), (-1, -1), (-2, 67108864)]\n[(-3, 33554432), (-4, 65536)]",
        ),
        ("glibc", {"JAX_PLATFORMS": "cuda,cpu"}, "[]\n[]"),
        ("glibc", {"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "4"}, "[]\n[]"),
        ("musl", {"JAX_PLATFORMS": "cpu"}, "[]\n[]"),
    ],
)
def test_malloc_is_told_to_keep_memory_only_where_jax_runs_on_the_cpu(libc, environment, expected):
    found = subprocess.run([sys.executable, "-c", PROGRAM, libc], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == expected, found.stderr


def test_without_a_wish_the_plugins_that_are_installed_decide(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for installed in ((), ("jax_plugins",), ("libtpu",)):
        monkeypatch.setattr(host.importlib.util, "find_spec", lambda name, some=installed: name in some or None)
        assert host.is_cpu_only() == (not installed)


def test_as_many_files_may_be_open_as_the_system_permits():
    """Of a new process, since a limit that was lowered cannot be raised again."""
    program = (
        "import resource; from realm_jax import host; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); "
        "host.allow_open_files(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "(300, 300)", found.stderr


@pytest.mark.parametrize("given, wanted", [("", "--{}=1048576"), ("--a=b", "--a=b --{}=1048576"), ("--{}=7", "--{}=7")])
def test_the_tpu_compiler_gets_larger_stacks_unless_the_environment_says_how_large(monkeypatch, given, wanted):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given.format(host.STACK_FLAG))
    for _ in range(2):
        host.enlarge_compiler_stacks()
        assert os.environ["LIBTPU_INIT_ARGS"] == wanted.format(host.STACK_FLAG)


def test_writes_that_end_after_a_failed_save_print_nothing(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    ctrl_c = host.CtrlC()
    late = types.SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError("Event loop is closed"))
    other = types.SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError("another"))
    for raised in (late, other):
        ctrl_c._repeat(raised)
    assert shown == [other]
