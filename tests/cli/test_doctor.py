"""`realm doctor`: what it reports, and when it says that runs cannot start."""

import importlib.metadata
import json

import jax
import pytest

from realm_jax.cli import doctor
from realm_jax.cli import main as cli
from realm_jax.host import multiplies_bfloat16


def test_doctor_describes_this_environment_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["devices"].startswith(f"{jax.device_count()} x ") and int(report["cores"]) >= 1
    assert "GiB free of" in report["memory"] and "GiB free in" in report["disk"]


def test_doctor_prints_a_line_for_each_fact(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "settings       JAX_PLATFORMS  cpu\n" in out and "problems       –\n" in out


def test_doctor_reports_a_missing_package_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["no-such-package>=1", "jax<0.5", "flax; extra=='x'"])
    assert cli.main(["doctor"]) == 2
    out = capsys.readouterr().out
    assert "no-such-package is not installed; run `pip install -e .` in your clone of realm_jax" in out
    assert f"jax  {jax.__version__}, outside of the tested <0.5" in out and "flax" not in out


def test_doctor_names_the_extra_of_an_optional_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["no-such-package; extra == 'wandb'"])
    report = doctor.examine()
    assert report["not installed"] == {"pip install -e '.[wandb]'": "no-such-package"} and not report["problems"]


def test_doctor_reports_a_backend_that_does_not_start(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no plugin")

    monkeypatch.setattr(jax, "devices", fail)
    (problem,) = doctor.examine()["problems"]
    assert problem == "JAX does not start: RuntimeError: Unable to initialize backend 'cuda': no plugin"


@pytest.mark.parametrize("flags, known", [("fpu avx2 avx512_bf16", True), ("fpu amx_bf16", True), ("fpu avx2", False)])
def test_instructions_for_bfloat16_are_known_by_the_flags_of_the_processor(tmp_path, flags, known):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert multiplies_bfloat16(str(tmp_path / "cpuinfo")) is known
    assert not multiplies_bfloat16(str(tmp_path / "absent"))
