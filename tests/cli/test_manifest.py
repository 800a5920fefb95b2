"""Tests of `coordinator manifest`: its output is YAML with the objects that the arguments describe."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from coordinator.cli.command_line import main
from coordinator.cli.manifest import yaml_of
from coordinator.launch.kubernetes_manifests import KubernetesJob


@pytest.mark.parametrize("jobset", [False, True], ids=["stateful-sets", "job-set"])
def test_the_command_prints_the_objects_as_yaml(jobset: bool, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"name": "digits", "image": "registry:5000/digits@sha256:1f", "workers": 4, "ps": 2, "cpu": "2"}
    settings |= {"memory": "8Gi", "gpu": 1, "checkpoints": "claim"}
    options = [f"--{name}={value}" for name, value in settings.items()]
    command = ["python", "train.py", "--epochs", "3"]
    assert main(["manifest", "kubernetes", *options, *(["--jobset"] if jobset else []), "--", *command]) == 0
    expected = KubernetesJob(**settings, command=command, jobset=jobset).objects()
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == expected


def test_without_a_command_the_image_runs_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", "kubernetes", "--name", "a", "--image", "b"]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert "command" not in printed[-1]["spec"]["template"]["spec"]["containers"][0]


# Words and numbers of some version of YAML, what it needs quotes for, breaks of lines, and what cannot be printed.
TEXTS = [
    *("y", "n", "Y", "N", "yes", "No", "on", "OFF", "true", "null", "~", "", ".inf", ".NaN", "=", "<<"),
    *("1e3", "1.5", "0x1f", "0o7", "0b1", "1_000", "12:30:45", "2001-01-01", "+1", "-1"),
    *("a: b", "a #b", "- a", "-", "*a", "&a", "!a", "@a", "`a", "%a", "a:", "? a", "{a}", "[a]", 'it\'s "so"', "\\a"),
    *(
        "é\n",
        "\n",
        " a ",
        "a\nb",
        "a\tb",
        "a\r",
        "a\x85b",
        "\x85",
        "a\u2028b",
        "\u2029",
        "\ufeffa",
        "\x7f",
        "\0",
        "\x1b",
        "😀",
    ),
]


def test_any_text_comes_back_from_yaml() -> None:
    for text in TEXTS:
        content = {"key": text, "list": [text], "inner": [{"a": text, "b": {text: text}}], "none": {}, "count": 3}
        assert yaml.safe_load(yaml_of([content])) == content
        assert list(yaml.safe_load_all(yaml_of([content, content]))) == [content, content]


@pytest.mark.parametrize("text", ["y", "N", "yes", "off", "null", "1e3", "0x1f", "0o7", "1_000", "1.5", "2001-01-01"])
def test_what_another_version_of_yaml_takes_for_no_text_has_quotes(text: str) -> None:
    (line,) = yaml_of([{text: text}]).splitlines()[1:]
    assert line in (f'"{text}": "{text}"', f"'{text}': '{text}'")


def test_names_that_are_words_of_yaml_are_names(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("y", "n", "yes", "null", "true"):
        assert main(["manifest", "kubernetes", "--name", name, "--image", name, name, "\x85", "\u2028", "1e3"]) == 0
        printed = capsys.readouterr().out
        expected = KubernetesJob(name=name, image=name, command=[name, "\x85", "\u2028", "1e3"]).objects()
        assert list(yaml.safe_load_all(printed)) == expected
        assert printed.isascii()
        assert "&id" not in printed, "the objects share no parts by reference"


def test_an_argument_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", "kubernetes", "--name", "a", "--image", "b", "python", os.fsdecode(b"\xff")]) == 2
    assert capsys.readouterr().err == "coordinator manifest: '\\udcff' is not UTF-8, as all text of Kubernetes is.\n"


def test_what_kubernetes_would_refuse_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "name": ["Digits", "3d", "a" * 41, "a-"],
        "image": ["my image", ""],
        "workers": ["0"],
        "ps": ["0"],
        "gpu": ["-1"],
        "cpu": ["two"],
        "memory": ["8 GB"],
        "checkpoints": ["/path"],
    }
    for option, value in ((option, value) for option, values in wrong.items() for value in values):
        given = {"name": "digits", "image": "i", option: value}
        assert main(["manifest", "kubernetes", *(f"--{name}={text}" for name, text in given.items())]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"coordinator manifest: --{option} must be ")
        assert not printed.out


def test_the_servers_commands_are_those_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr("coordinator.cli.servers.serve_task", lambda environment, **given: served.append(given) or 0)
    for item in KubernetesJob(name="digits", image="image").objects():
        if item["kind"] == "StatefulSet":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            assert main([word.replace("$(TASK_INDEX)", "3") for word in container["command"][1:]]) == 0
    given = [(each["job"], each["index"], each["address"], each["health_port"]) for each in served]
    assert given == [(job, 3, f"digits-{job}-3.digits:2222", 8080) for job in ("ps", "worker")]


def test_output_that_nothing_reads_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "coordinator", "manifest", "kubernetes", "--name", "a", "--image", "b"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
