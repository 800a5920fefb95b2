"""`coordinator top`: what the dashboard of a running program shows, in a terminal."""

import argparse
import http.client
import json
import os
import pathlib
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from coordinator.cli.dashboard_token import add_token_file, chosen_token
from coordinator.errors import LaunchError
from coordinator.version import __version__

_INTERVAL, _TIMEOUT = 1.0, 5.0
# The program may be started again at the same address.
_MOST_MISSED = 15
# Not a URL, no answer, or not a dashboard.
_ERRORS = (OSError, ValueError, RecursionError, http.client.HTTPException)
# What another version, or another service, may have in place of a number, a text or a list.
_STRANGE = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
# The page is on this machine or at the end of a tunnel, never behind a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
    text = "show in the terminal what the dashboard of a running program shows"
    showing = commands.add_parser("top", help=text, description=text, allow_abbrev=False)
    text = "the address of the dashboard; a token in it can be seen by all users of the machine"
    showing.add_argument("url", metavar="URL", help=text)
    showing.add_argument("--once", action="store_true", help="print it once")
    add_token_file(showing)


def top(given: argparse.Namespace) -> int:
    """Runs the command until the program or the user ends it.

    Returns:
      The exit code.

    Raises:
      LaunchError: there is no dashboard at that address.
    """
    from rich.console import Console

    console = Console()
    try:
        url = _with_token(given.url, given.token_file)
        state = _read(url)
    except _ERRORS as error:
        raise LaunchError(f"there is no dashboard at {given.url}: {_reason(error)}.") from None
    if given.once:
        console.print(_screen(state, console.width))
        return 0
    try:
        _show(console, url, state)
    except KeyboardInterrupt:
        return 0
    console.print("The program has ended, or its dashboard cannot be reached any more.")
    return 0


def _show(console: Any, url: str, state: Any) -> None:
    """Shows one state after the other on the whole terminal, until there are no more."""
    from rich.live import Live

    missed, pause = 0, threading.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while missed < _MOST_MISSED:
            live.update(_screen(state, console.width, console.height, missed), refresh=True)
            pause.wait(_INTERVAL)
            try:
                state, missed = _read(url), 0
            except _ERRORS:
                missed += 1


def _screen(state: Any, width: int, height: int | None = None, missed: int = 0) -> Any:
    """Returns what is shown of a state.

    Raises:
      LaunchError: it is not that of a dashboard of this version.
    """
    from coordinator.cli.top_screen import screen_of

    try:
        return screen_of(state, width, height, missed)
    except KeyError as error:
        reason = f"its state has no {error}"
    except _STRANGE as error:
        reason = f"its state cannot be shown: {error}"
    raise LaunchError(f"what answers there is no dashboard of this version of the library ({__version__}): {reason}.")


def _with_token(url: str, path: pathlib.Path | None) -> str:
    if urllib.parse.urlsplit(url).path.strip("/"):
        if path is not None:
            raise LaunchError("--token-file cannot be given beside a token in URL.")
        return url
    return f"{url.rstrip('/')}/{chosen_token(path, os.environ)}"


def _read(url: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("an address begins with http://")
    with _OPENER.open(f"{url.rstrip('/')}/api/state", timeout=_TIMEOUT) as answer:
        return json.load(answer)


def _reason(error: Exception) -> str:
    """Returns what is wrong with the address, as its server or the system says."""
    if isinstance(error, urllib.error.HTTPError):
        return error.read().decode(errors="replace").strip().rstrip(".") or str(error)
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason)
