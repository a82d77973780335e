"""`realm doctor`: what it finds, what it warns of, and when it says that runs cannot start."""

import json
from io import StringIO

import jax
import pytest
from packaging.requirements import Requirement
from rich.console import Console

from realm_jax.cli import doctor
from realm_jax.cli import main as cli
from realm_jax.cli.doctor import GIB
from realm_jax.host import multiplies_bfloat16, waits_for_large_pages

GPU = {"platform": "gpu", "count": 8, "kind": "NVIDIA H100", "memory": 80 * GIB, "error": None}
CPU = {"platform": "cpu", "count": 1, "kind": "cpu", "memory": None, "error": None}
LARGE = {"cores": 16, "memory_total": 128 * GIB, "memory_free": 100 * GIB, "disk_free": 500 * GIB, "folder": "/runs"}
JAX = {"name": "jax", "wanted": "<0.11", "installed": "0.10.2", "fits": True}
GOOD = {
    "realm_jax": "0.1.0",
    "location": "/env/realm_jax",
    "python": "3.11.7 (/env/bin/python)",
    "packages": [JAX],
    "optional": {"gcsfs": None, "s3fs": "2026.2.0"},
    "devices": GPU,
    "machine": LARGE,
    "settings": {},
    "warnings": [],
    "problems": [],
    "usable": True,
}


def shown(report: dict) -> str:
    file = StringIO()
    doctor.show(report, Console(file=file, width=40, soft_wrap=True, highlight=False))
    return file.getvalue()


def test_this_environment_can_run_and_is_described_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] and not report["problems"]
    assert report["devices"]["count"] == jax.device_count() and report["devices"]["platform"] == "cpu"
    assert report["machine"]["cores"] >= 1 and report["machine"]["memory_free"] > 0
    assert f"{jax.device_count()} emulated devices" in " ".join(report["warnings"])


def test_what_is_optional_is_told_by_what_it_is_for():
    text = shown(GOOD)
    assert "gcsfs  absent: no buckets of Google Cloud (gs://…)" in text and "s3fs   2026.2.0" in text


def test_a_good_environment_has_nothing_to_warn_of():
    assert [*doctor.warnings(GOOD), *doctor.problems(GOOD)] == []


@pytest.mark.parametrize(
    "change, warning",
    [
        ({"machine": LARGE | {"cores": 1}}, "one core"),
        ({"machine": LARGE | {"memory_free": GIB}}, "only 1.0 GiB of memory free"),
        ({"machine": LARGE | {"disk_free": GIB}}, "only 1.0 GiB of disk free in /runs"),
        ({"devices": CPU}, "no accelerator"),
        ({"devices": CPU}, "bfloat16"),
        ({"devices": CPU | {"count": 8}}, "8 emulated devices share 16 cores"),
        ({"settings": {"jax_disable_jit": "True"}}, "JAX_DISABLE_JIT"),
        ({"settings": {"jax_enable_x64": "True"}}, "JAX_ENABLE_X64"),
        ({"packages": [JAX | {"installed": "0.11.0", "fits": False}]}, "jax 0.11.0 is outside the tested range <0.11"),
        ({"packages": []}, "versions were not checked"),
    ],
)
def test_what_is_slow_or_untested_is_a_warning_and_no_obstacle(change, warning):
    assert warning in "\n".join(doctor.warnings(GOOD | change))
    assert list(doctor.problems(GOOD | change)) == []


@pytest.mark.parametrize("flags, known", [("fpu avx2 avx512_bf16", True), ("fpu amx_bf16", True), ("fpu avx2", False)])
def test_instructions_for_bfloat16_are_known_by_the_flags_of_the_processor(tmp_path, flags, known):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert multiplies_bfloat16(str(tmp_path / "cpuinfo")) is known
    assert not multiplies_bfloat16(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "setting, tunables, waits",
    [
        ("always [madvise] never\n", "", True),
        ("always [madvise] never\n", "glibc.malloc.hugetlb=1", False),
        ("[always] madvise never\n", "", False),
        ("always madvise [never]\n", "", False),
        (None, "", False),
    ],
)
def test_large_pages_are_advised_where_a_program_gets_them_for_the_asking(
    tmp_path, monkeypatch, setting, tunables, waits
):
    monkeypatch.setattr("realm_jax.host.platform.libc_ver", lambda: ("glibc", "2.39"))
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    if setting:
        (tmp_path / "enabled").write_text(setting)
    assert waits_for_large_pages(str(tmp_path / "enabled")) is waits
    monkeypatch.setattr(doctor, "waits_for_large_pages", lambda: waits)
    advised = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in "\n".join(doctor.warnings(GOOD | {"devices": CPU}))
    assert advised is waits


def test_a_hidden_accelerator_is_found(monkeypatch):
    monkeypatch.setattr(doctor.os.path, "exists", lambda file: file == "/dev/nvidia0")
    report = GOOD | {"devices": CPU}
    assert "pip install -e '.[cuda]'" in "\n".join(doctor.warnings(report))
    hidden = report | {"settings": {"JAX_PLATFORMS": "cpu"}}
    assert "JAX_PLATFORMS hides it" in "\n".join(doctor.warnings(hidden))


def test_a_missing_package_is_a_problem_with_what_to_do_and_exit_code_2(monkeypatch, capsys):
    missing = {"name": "grain", "wanted": ">=0.2.18", "installed": None, "fits": False}
    monkeypatch.setattr(doctor, "required_packages", lambda: [missing])
    assert cli.main(["doctor"]) == 2
    out = capsys.readouterr().out
    assert "grain  MISSING, wanted >=0.2.18" in out
    assert "not installed: grain; run `pip install -e .`" in out


def test_a_backend_that_does_not_start_is_a_problem(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no plugin")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    report = doctor.examine()
    (problem,) = report["problems"]
    assert problem == (
        "JAX does not start with JAX_PLATFORMS=cuda: RuntimeError: Unable to initialize backend 'cuda': no plugin"
    )
    assert not report["usable"]


def test_switches_of_jax_that_are_on_are_found():
    with jax.disable_jit():
        assert doctor.relevant_settings()["jax_disable_jit"] == "True"
    assert "jax_disable_jit" not in doctor.relevant_settings()


@pytest.mark.parametrize(
    "requirement, expected",
    [
        (f"jax=={jax.__version__}", (jax.__version__, True)),
        ("jax<0.5", (jax.__version__, False)),
        ("no-such-package>=1", (None, False)),
    ],
)
def test_a_requirement_is_compared_with_what_is_installed(requirement, expected):
    package = doctor.check(Requirement(requirement))
    assert package is not None and (package["installed"], package["fits"]) == expected


@pytest.mark.parametrize("marker", ['python_version < "3"', 'extra == "cuda"'])
def test_a_requirement_for_another_python_or_an_extra_is_left_out(marker):
    assert doctor.check(Requirement(f"jax; {marker}")) is None


def test_the_report_for_people_is_plain_and_unwrapped_without_a_terminal():
    out = shown(GOOD | {"warnings": ["[one] long line " + "x" * 80]})
    assert "  devices    8 x NVIDIA H100 (gpu, 80.0 GiB each)\n" in out
    assert "  - [one] long line " + "x" * 80 + "\n" in out
    assert out.endswith("runs can start here\n") and "\x1b" not in out
