"""`coordinator manifest`: prints what a cluster manager needs to run a training."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordinator.launch.kubernetes_manifests import KubernetesJob

# Text that YAML takes as text without quotes.
_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off)$)[A-Za-z/][\w./@-]*(?::[\w./@-]+)*", re.IGNORECASE)


def add_manifest(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
    text = "print what a cluster manager needs to run a training"
    kinds = commands.add_parser("manifest", help=text, description=text, allow_abbrev=False).add_subparsers(
        dest="kind", required=True, metavar="COMMAND"
    )
    text = "print the objects for `kubectl apply -f -`: the program, its workers and its parameter servers"
    usage = "coordinator manifest kubernetes --name NAME --image IMAGE [options] [COMMAND [ARGUMENT ...]]"
    # What is not given is left to the defaults of `KubernetesJob`.
    printing = kinds.add_parser(
        "kubernetes",
        help=text,
        description=text,
        usage=usage,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    printing.add_argument("--name", required=True, metavar="NAME", help="of the job; names of objects begin with it")
    printing.add_argument("--image", required=True, metavar="IMAGE", help="a container image with this library")
    printing.add_argument("--workers", type=int, metavar="N", help="workers (default 1)")
    printing.add_argument("--ps", type=int, metavar="N", help="parameter servers (default 1)")
    text = "use a JobSet, which ends with the program, instead of StatefulSets, which can be scaled"
    printing.add_argument("--jobset", action="store_true", help=text)
    printing.add_argument("--cpu", metavar="QUANTITY", help="what each pod requests, such as 2 or 500m")
    printing.add_argument("--memory", metavar="QUANTITY", help="what each pod requests and may use, such as 8Gi")
    printing.add_argument("--gpu", type=int, metavar="N", help="GPUs of each worker (default 0)")
    text = "the PersistentVolumeClaim to mount at /checkpoints in the program's pod and the parameter servers'"
    printing.add_argument("--checkpoints", metavar="CLAIM", help=text)
    text = "what the program's pod runs, such as `python train.py` (default: the image's own command)"
    printing.add_argument("command_line", nargs=argparse.REMAINDER, metavar="COMMAND", help=text)


def manifest(given: argparse.Namespace) -> int:
    """Runs the command: prints the objects as YAML.

    Returns:
      The exit code.

    Raises:
      SettingError: an argument is not valid.
    """
    settings = vars(given)
    del settings["kind"]
    command = settings.pop("command_line")
    if command[:1] == ["--"]:
        del command[0]
    for item in KubernetesJob(command=command, **settings).objects():
        print("---", *yaml_lines(item), sep="\n")
    return 0


def yaml_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a mapping in YAML. Lists of plain values stand in one line, as in JSON."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield f"{key}:"
            yield from (f"  {line}" for line in yaml_lines(item))
        elif isinstance(item, Sequence) and item and isinstance(item[0], Mapping):
            yield f"{key}:"
            for entry in item:
                first, *rest = yaml_lines(entry)
                yield f"  - {first}"
                yield from (f"    {line}" for line in rest)
        else:
            yield f"{key}: {_scalar(item)}"


def _scalar(item: object) -> str:
    if isinstance(item, str):
        if _PLAIN.fullmatch(item):
            return item
        if '"' in item and item.isprintable():
            return "'" + item.replace("'", "''") + "'"
    return json.dumps(item, ensure_ascii=False)
