"""`coordinator run`: runs a cluster, and a program in each of its roles, until the program has ended."""

import argparse
import itertools
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.addresses import parse_page_address
from coordinator.cli.arguments import add_token_file, chosen_token, local_file, without_token
from coordinator.errors import LaunchError
from coordinator.launch.local_job import LocalJob
from coordinator.launch.program_process import Console, create_log_folder
from coordinator.launch.run_request import RunRequest, parse_hosts, read_hostfile, slots_of

_ANY_PORT = "127.0.0.1:0"
# Means the default address of the dashboard: a character that no command-line argument can contain.
_DEFAULT = "\0"


def add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a program on a cluster, on this machine or on others by ssh"
    usage = (
        "coordinator run [options] PROGRAM [ARGUMENT ...]\n       coordinator run [options] -m MODULE [ARGUMENT ...]"
    )
    # `RunRequest` has the defaults.
    running = commands.add_parser(
        "run", help=text, description=text, usage=usage, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    running.add_argument("--workers", type=int, metavar="N", help="worker servers (default 1)")
    running.add_argument("--ps", type=int, metavar="N", help="parameter servers (default 1)")
    text = "start the servers on these hosts by ssh, with N workers on each"
    running.add_argument("--hosts", metavar="HOST:N,...", help=text)
    text = "the same, from a file with lines such as `a slots=2`"
    running.add_argument("--hostfile", type=local_file, metavar="FILE", help=text)
    text = "the hosts of the parameter servers (default: those of the workers, in turn)"
    running.add_argument("--ps-hosts", metavar="HOST:N,...", help=text)
    text = 'reach hosts with this command, such as "ssh -p 2222 -i key" (default ssh)'
    running.add_argument("--ssh", metavar="COMMAND", help=text)
    text = "give each worker N GPUs that no other process sees (default: every worker sees all)"
    running.add_argument("--gpus-per-worker", type=int, metavar="N", help=text)
    text = "start the program again, up to N times, when it is killed or fails; the servers keep running (default 0)"
    running.add_argument("--restarts", type=int, metavar="N", help=text)
    text = "run it as evaluator with a separate cluster: N workers and a parameter server (default 0: none)"
    running.add_argument("--evaluator-workers", type=int, metavar="N", help=text)
    _add_outputs(running)
    running.add_argument("--dry-run", action="store_true", help="print the command of each process, and start none")
    add_program(running)


def _add_outputs(running: argparse.ArgumentParser) -> None:
    text = (
        "keep the logs in a folder there, one for each run: of the servers, and of TensorFlow's C++ code in the program"
    )
    running.add_argument("--log-dir", type=local_file, metavar="FOLDER", help=text)
    text = "write what the program prints to the logs, too, and show all that the servers log"
    running.add_argument("--tee", action="store_true", help=text)
    text = "show what TensorFlow's C++ code logs in the program, and log it in servers"
    running.add_argument("--verbose", action="store_true", help=text)
    text = "set a variable of all processes"
    running.add_argument("--env", type=_variable, action="append", metavar="NAME=VALUE", help=text)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Adds the options of all commands that run a program on a cluster, and then the program."""
    text = "start a server that ends again, up to N times each; `restore_from` then brings back the variables of a "
    text += "parameter server (default 3)"
    parser.add_argument("--server-restarts", type=int, metavar="N", help=text)
    parser.add_argument("--evaluator", action="store_true", help="run the program once more, as evaluator")
    text = "how long the evaluator may run after the chief has ended (default 300)"
    parser.add_argument("--evaluator-timeout", type=float, metavar="SECONDS", help=text)
    text = "how long the servers may take until they answer (default 120)"
    parser.add_argument("--start-timeout", type=float, metavar="SECONDS", help=text)
    text = (
        "show on a page what happens; alone, or with HOST:PORT (default 127.0.0.1:0, any port). HOST:PORT/TOKEN shows "
    )
    text += "the token to all users of the machine"
    parser.add_argument(
        "--dashboard", type=lambda text: text.replace(_DEFAULT, _ANY_PORT), metavar="[HOST:PORT]", help=text
    )
    add_token_file(parser)
    parser.add_argument("--trace", type=local_file, metavar="FILE", help="write a trace for the Perfetto UI")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as for `python -m`")
    parser.add_argument("program", metavar="PROGRAM", help="a Python program")
    text = "passed to the program"
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, type=_argument, metavar="ARGUMENT", help=text)
    # Otherwise argparse reports a missing program as two missing arguments.
    rest.required = False


def with_dashboard_address(arguments: Sequence[str]) -> list[str]:
    """Gives `--dashboard` a value if no address follows, because `argparse` would take the program as the value."""
    pairs = itertools.zip_longest(arguments, arguments[1:], fillvalue="")
    return [
        f"--dashboard={_DEFAULT}" if argument == "--dashboard" and not _is_address(following) else argument
        for argument, following in pairs
    ]


def _is_address(text: str) -> bool:
    try:
        parse_page_address(text, "--dashboard")
    except ValueError:
        return False
    return True


def with_token(address: str | None, path: pathlib.Path | None, environment: Mapping[str, str]) -> str | None:
    """Adds the token of the file or of the environment to a dashboard's address without a token. Raises LaunchError."""
    if address is None:
        if path is not None:
            raise LaunchError("--token-file needs --dashboard.")
        return None
    if not _is_address(address):
        # `RunRequest` refuses the address.
        return address
    page = parse_page_address(address, "--dashboard")
    if page.token and path is not None:
        raise LaunchError("--token-file cannot be given beside a token in --dashboard.")
    token = "" if page.token else chosen_token(path, environment)
    return str(page._replace(token=token)) if token else address


def _argument(text: str) -> str:
    # Undoes `with_dashboard_address` in the program's own arguments.
    return text.removesuffix(f"={_DEFAULT}")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return run_request(_requested(options), without_token(os.environ))


def run_request(request: RunRequest, environment: Mapping[str, str]) -> int:
    """Runs a program on its own cluster; all processes inherit `environment`. Raises LaunchError.

    Returns the exit code of the chief's last start, or the evaluator's exit code if the chief's is 0. The code is 128 +
    n if signal n ended the chief or this command, and 1 if a server did not start.
    """
    console = Console(sys.stdout, sys.stderr)
    if request.dry_run:
        print("\n".join(LocalJob(request, pathlib.Path(), environment, console).commands()))
        return 0
    log_folder = create_log_folder(request.log_dir)
    job = None
    try:
        job = LocalJob(request, log_folder, environment, console)
        console.say(f"starting {_described(request)}.")
        if job.dashboard is not None:
            console.say(f"the dashboard is at {job.dashboard.url} once the program has created its strategy.")
        with console.restored(keyboard=0):
            return job.run()
    finally:
        if request.log_dir is None and not (job and job.is_log_needed):
            shutil.rmtree(log_folder, ignore_errors=True)


def _requested(options: argparse.Namespace) -> RunRequest:
    values: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in vars(options).items()}
    values["dashboard"] = with_token(values.get("dashboard"), values.pop("token_file", None), os.environ)
    path = values.pop("hostfile", None)
    if path is not None:
        if "hosts" in values:
            raise LaunchError("--hosts and --hostfile cannot both be given.")
        values["hosts"] = read_hostfile(path)
    elif "hosts" in values:
        values["hosts"] = parse_hosts("hosts", values["hosts"])
    if "ps_hosts" in values:
        values["ps_hosts"] = parse_hosts("ps_hosts", values["ps_hosts"])
    for count, hosts in (("workers", "hosts"), ("ps", "ps_hosts")):
        if hosts in values:
            values.setdefault(count, slots_of(values[hosts]))
    return RunRequest(**values)


def _described(request: RunRequest) -> str:
    def servers(workers: int, ps: int) -> str:
        return f"{workers} worker{'' if workers == 1 else 's'} and {ps} parameter server{'' if ps == 1 else 's'}"

    described = servers(request.workers, request.ps)
    if request.hosts:
        hosts = dict.fromkeys(host.name for host in (*request.hosts, *request.ps_hosts))
        return f"{described} on {', '.join(hosts)}; docs/security.md says who can reach them"
    if request.evaluator_workers:
        return f"{described}; for the evaluator, {servers(request.evaluator_workers, 1)}"
    return described
