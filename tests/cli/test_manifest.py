"""Tests of `coordinator manifest`: its output is YAML with the objects that the arguments describe."""

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
    assert main(["manifest", "kubernetes", *options]) == 0
    *_, job = yaml.safe_load_all(capsys.readouterr().out)
    assert "command" not in job["spec"]["template"]["spec"]["containers"][0], "the image runs its own"


# Words and numbers of some version of YAML, what it needs quotes for, breaks of lines, and what cannot be printed.
WORDS = ["y", "n", "N", "yes", "No", "on", "OFF", "true", "null", "~", ".inf", "=", "<<", "1e3", "1.5", "0x1f", "0o7"]
WORDS += ["1_000", "12:30:45", "2001-01-01", "+1", "-1"]
TEXTS = [*WORDS, "", "a: b", "a #b", "- a", "*a", "&a", "!a", "@a", "`a", "%a", "a:", "? a", "{a}", "[a]", "it's \"s"]
TEXTS += ["é\n", "\n", " a ", "a\nb", "a\tb", "a\r", "\x85", "a\u2028b", "\ufeffa", "\x7f", "\0", "\x1b", "😀", "\\a"]


def test_any_text_comes_back_from_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    for text in TEXTS:
        content = {"key": text, "list": [text], "inner": [{"a": text, "b": {text: text}}], "none": {}, "count": 3}
        assert yaml.safe_load(yaml_of([content])) == content
        assert list(yaml.safe_load_all(yaml_of([content, content]))) == [content, content]
    # The objects share no parts by reference.
    name = "null"
    assert main(["manifest", "kubernetes", "--name", name, "--image", name, name, "\x85", "\u2028", "1e3"]) == 0
    printed = capsys.readouterr().out
    expected = KubernetesJob(name=name, image=name, command=[name, "\x85", "\u2028", "1e3"]).objects()
    assert (list(yaml.safe_load_all(printed)), printed.isascii(), "&id" in printed) == (expected, True, False)
    # Another version of YAML takes these for no text.
    for text in WORDS:
        assert yaml_of([{text: text}]).splitlines()[1] in (f'"{text}": "{text}"', f"'{text}': '{text}'")


def test_the_servers_commands_are_those_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr("coordinator.cli.servers.serve_task", lambda environment, **given: served.append(given) or 0)
    for item in KubernetesJob(name="digits", image="image").objects():
        if item["kind"] == "StatefulSet":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            assert main([word.replace("$(TASK_INDEX)", "3") for word in container["command"][1:]]) == 0
    given = [(each["job"], each["index"], each["address"], each["health_port"]) for each in served]
    assert given == [(job, 3, f"digits-{job}-3.digits:2222", 8080) for job in ("ps", "worker")]
