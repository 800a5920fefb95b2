"""`coordinator manifest`: prints what a cluster manager needs to run a training."""

import argparse
import re
from collections.abc import Iterable
from typing import Any

from coordinator.errors import LaunchError
from coordinator.launch.kubernetes_manifests import KubernetesJob, Object

# Text that needs no quotes in any version of YAML, except words for true, false or nothing, which PyYAML quotes. All
# other text gets quotes, because Kubernetes reads some text as numbers that PyYAML does not quote, such as 1e3 and 0o7.
_PLAIN = re.compile(r"(?![yn]$)[a-z/].*", re.IGNORECASE | re.DOTALL)


def add_manifest(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print what a cluster manager needs to run a training"
    kinds = commands.add_parser("manifest", help=text, description=text, allow_abbrev=False).add_subparsers(
        dest="kind", required=True, metavar="COMMAND"
    )
    text = "print the objects for `kubectl apply -f -`: the program, its workers and its parameter servers"
    usage = "coordinator manifest kubernetes --name NAME --image IMAGE [options] [COMMAND [ARGUMENT ...]]"
    # `KubernetesJob` has the defaults.
    no_default = argparse.SUPPRESS
    printing = kinds.add_parser(
        "kubernetes", help=text, description=text, usage=usage, allow_abbrev=False, argument_default=no_default
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


def manifest(options: argparse.Namespace) -> int:
    """Runs the command: prints the objects as YAML; returns its exit code."""
    settings = vars(options)
    del settings["kind"]
    command = settings.pop("command_line")
    if command[:1] == ["--"]:
        del command[0]
    for text in (*settings.values(), *command):
        try:
            str(text).encode()
        except UnicodeEncodeError:
            raise LaunchError(f"{text!r} is not UTF-8, as all text of Kubernetes is.") from None
    print(yaml_of(KubernetesJob(command=command, **settings).objects()), end="")
    return 0


def yaml_of(objects: Iterable[Object]) -> str:
    """Returns objects as documents in YAML, in the form that all versions of YAML read in the same way."""
    # No other command needs PyYAML.
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base gives it
            return True

    def quoted(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')

    Dumper.add_representer(str, quoted)
    written = yaml.dump_all(objects, Dumper=Dumper, explicit_start=True, sort_keys=False, width=float("inf"))
    return str(written)
