"""`realm launch --target=queued_resources`: what gcloud is asked, and what a machine does with its startup script."""

import json
import subprocess

import pytest
from clouds import GCLOUD, asked, described, launch
from fake_tools import calls

from realm_jax.launch.queued_resources import STOPPED, UNIT, on_machine, startup_script
from realm_jax.launch.spec import job_specs


def item(name, state="ACTIVE", script=None, slices=1):
    """A queued resource as gcloud tells of it."""
    several = {"multisliceParams": {"nodeCount": slices, "nodeIdPrefix": name}} if slices > 1 else {"nodeId": name}
    node = {"acceleratorType": "v5litepod-64"} | ({} if script is None else {"metadata": {"startup-script": script}})
    where = f"projects/p/locations/z/queuedResources/{name}"
    return {"name": where, "state": {"state": state}, "tpu": {"nodeSpec": [several | {"node": node}]}}


def there(*items):
    """gcloud's answer."""
    return {"match": "gcloud list", "stdout": json.dumps(items)}


def did(folder, verb):
    """What came behind a verb, call for call."""
    found = [[word for word in words if not word.startswith("--quiet")] for words in asked(folder, "gcloud")]
    return [words[words.index(verb) + 1 :] for words in found if verb in words]


def test_what_is_not_there_is_asked_for(tools, capsys):
    folder = tools(there())
    more = ("--spec.trainer.slices=2", "--spec.gcloud.capacity=spot", "--spec.builder.slices=1")
    assert launch(*GCLOUD, *more) == 0
    trainer, builder = [one for one in calls(folder) if "create" in one["words"]]
    assert {"--node-count=2", "--node-prefix=realm-trainer", "--spot", "--quiet"} <= {*trainer["words"]}
    assert "--node-id=realm-builder-0" in builder["words"] and "--process=0" in builder["scripts"][0]
    assert "queued resource realm-builder-0: requested" in capsys.readouterr().out


def test_start_again_goes_on_with_what_is_there(tools, capsys):
    """One that was stopped is started on its machines, one that waits goes on waiting, one that failed to come is
    asked for again."""
    folder = tools(there(item("realm-trainer"), item("realm-builder-0", "WAITING_FOR_RESOURCES")))
    assert launch(*GCLOUD, "--spec.builder.slices=2") == 0
    assert [words[0] for words in did(folder, "create")] == ["realm-builder-1"]
    ((node, *words),) = did(folder, "ssh")
    assert node == "realm-trainer" and {"--worker=all", f"--command={on_machine('start')}"} <= {*words}
    assert "realm-builder-0: is there already, waiting_for_resources" in capsys.readouterr().out


def test_what_has_lost_its_machines_or_has_other_settings_has_to_be_removed_first(tools, capsys):
    for one, told in (
        (item("realm-builder-1", "SUSPENDED"), "realm-builder-1: is suspended; wait until `realm launch delete`"),
        (item("realm-builder-0", script="another"), "realm-builder-0: was created with other settings"),
    ):
        folder = tools(there(one))
        assert launch(*GCLOUD, "--spec.builder.slices=2") == 2
        assert told in capsys.readouterr().err and did(folder, "create") == []


def test_delete_and_stop_reach_all_that_is_there_whatever_the_flags_say(tools, capsys):
    found = [item("realm-trainer", slices=2), item("realm-builder-0"), item("realm-builder-3", "PROVISIONING")]
    found += [item("other-realm-trainer"), item("realm-trainer-2")]
    folder = tools(there(*found))
    assert launch("stop", *GCLOUD, "--spec.builder.slices=1") == 0
    nodes = ["realm-trainer-0", "realm-trainer-1", "realm-builder-0"]
    assert [words[0] for words in did(folder, "ssh")] == nodes * 2, "all are told before any is waited for"
    commands = [words[-1] for words in did(folder, "ssh")]
    assert commands == [f"--command={on_machine(verb)}" for verb in ("stop --no-block", "stop") for _ in nodes]
    assert "queued resource realm-builder-3: is provisioning; it can be deleted" in capsys.readouterr().out
    assert launch("delete", *GCLOUD, "--spec.builder.slices=1") == 0
    assert [words[0] for words in did(folder, "delete")] == ["realm-trainer", "realm-builder-0", "realm-builder-3"]
    assert "queued resource realm-builder-3: is being removed" in capsys.readouterr().out
    tools(there())
    assert launch("delete", *GCLOUD, "--spec.name=typo") == 2
    assert "spec.name=typo: no queued resource of this run is there" in capsys.readouterr().err


def test_a_machine_that_does_not_stop_is_told_once_all_others_were(tools, capsys):
    found = there(item("realm-trainer"), item("realm-builder-0"), item("realm-builder-1"))
    folder = tools(found, {"match": "ssh realm-trainer", "stderr": "ERROR: ssh: handshake failed", "code": 1})
    assert launch("stop", *GCLOUD) == 2
    assert [words[0] for words in did(folder, "ssh")] == ["realm-trainer", "realm-builder-0", "realm-builder-1"] * 2
    assert "machines of realm-trainer: gcloud failed: ssh: handshake failed" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["stop", "delete", "logs"])
def test_resources_of_another_run_of_the_same_name_are_left_alone(tools, capsys, action):
    one, two = described(), described(workdir="gs://bucket/runs/two")
    folder = tools(there(item("realm-trainer", script=startup_script(two, job_specs(two)[0]))))
    assert launch(action, *GCLOUD) == 2
    assert "queued resource realm-trainer: belongs to another --workdir" in capsys.readouterr().err
    assert did(folder, "ssh") == did(folder, "delete") == []
    tools(there(item("realm-trainer", script=startup_script(one, job_specs(one)[0]))))
    assert launch(action, *GCLOUD) == 0


def test_logs_hold_those_of_the_startup_script(tools, capsys):
    folder = tools(there(item("realm-trainer", slices=2)))
    assert launch("logs", *GCLOUD) == 0
    ((node, *words),) = did(folder, "ssh")
    assert node == "realm-trainer-0" and "--unit=realm --unit=google-startup-scripts" in words[-1]
    assert launch("logs", *GCLOUD, "--job=builder") == 2
    assert "--job=builder: there is no such job; choose among trainer" in capsys.readouterr().err
    assert launch("status", *GCLOUD, "--json") == 0
    told = json.loads(capsys.readouterr().out)["resources"]
    assert told == [{"name": "realm-trainer", "state": "active", "detail": "v5litepod-64"}]


# ---- the service


@pytest.mark.parametrize("is_set_up", [True, False])
def test_a_machine_stays_stopped_until_it_is_started_whenever_it_is_told(tmp_path, is_set_up):
    """Before its startup script has come to the service, too, and over boots: the script's own start does nothing."""
    unit, mark = tmp_path / "realm.service", tmp_path / "stopped"
    if is_set_up:
        unit.touch()
    (tmp_path / "sudo").write_text(f'#!/bin/bash\n[ $1 = systemctl ] && echo "${{@:2}}" >>{tmp_path}/calls || "$@"\n')
    (tmp_path / "sudo").chmod(0o755)

    def done(verb):
        command = on_machine(verb).replace(UNIT, str(unit)).replace(STOPPED, str(mark))
        subprocess.run(["bash", "-c", command], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
        return mark.exists()

    assert [done("stop --no-block"), done("stop"), done("start")] == [True, True, False]
    asked_for = ["stop --no-block realm", "stop realm", "start realm"] if is_set_up else []
    assert (tmp_path / "calls").is_file() == is_set_up
    assert not is_set_up or (tmp_path / "calls").read_text().splitlines() == asked_for
    launch = described()
    assert f"ConditionPathExists=!{STOPPED}\n" in startup_script(launch, job_specs(launch)[0])


def service(tmp_path, docker, sleep="exec /usr/bin/sleep 0.01"):
    """The job's own script, with a docker and a sleep that do as they are told; they find themselves in tmp_path."""
    launch = described(restarts=2)
    script = startup_script(launch, job_specs(launch)[0]).partition("<<'END-OF-JOB'\n")[2].partition("END-OF-JOB")[0]
    (tmp_path / "job").write_text(script)
    for name, text in (("docker", docker), ("sleep", sleep)):
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\necho {name} $1 >>calls\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return ["bash", str(tmp_path / "job")], {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def made_calls(tmp_path):
    """What was called, but for the waiting."""
    return [call for call in (tmp_path / "calls").read_text().splitlines() if call != "sleep 1"]


def test_a_service_starts_again_after_crashes_and_preemptions_and_not_after_mistakes(tmp_path):
    words, environment = service(
        tmp_path, "[ $1 = run ] || exit 0\ncode=$(head -n1 codes)\nsed -i 1d codes\nexit $code"
    )
    for codes, wanted, runs in (("75 75 0", 0, 3), ("2", 2, 1), ("1 70 1", 1, 3), ("1 1 0", 0, 3)):
        (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
        (tmp_path / "calls").write_text("")
        done = subprocess.run(words, env=environment, timeout=60)
        made = made_calls(tmp_path)
        assert (done.returncode, made.count("docker run")) == (wanted, runs), codes
        assert made[:2] == ["docker rm", "docker run"], "a container that was left over would have its name"


def test_a_service_that_is_stopped_in_a_pause_starts_nothing_more(tmp_path):
    sleep = "[ ! -s run.pid ] || kill -0 $(cat run.pid) || { echo told >>calls; kill -TERM $PPID; }"
    words, environment = service(tmp_path, "[ $1 = run ] || exit 0\necho $$ >run.pid\nexit 1", sleep)
    done = subprocess.run(words, env=environment, timeout=30)
    made = made_calls(tmp_path)
    assert done.returncode == 0 and made == ["docker rm", "docker run", "told"]


@pytest.mark.parametrize("told", ["before", "after"])
def test_a_service_hands_sigterm_on_to_its_container_and_waits(tmp_path, told):
    """A container that is told before there is one is told again."""
    docker = f"""case $1-{told} in
rm-before) kill -TERM $PPID ;;
run-before | run-after) [ {told} = after ] && kill -TERM $PPID
/usr/bin/sleep 0.2; touch runs; while [ ! -e stopped ]; do /usr/bin/sleep 0.05; done; exit 75 ;;
stop-*) [ -e runs ] && touch stopped ;;
esac"""
    words, environment = service(tmp_path, docker)
    done = subprocess.run(words, env=environment, timeout=30)
    made = made_calls(tmp_path)
    assert done.returncode == 0 and (tmp_path / "stopped").exists()
    assert made[0] == "docker rm" and sorted({*made[1:]}) == ["docker run", "docker stop"]
    assert made.count("docker run") == 1
