"""`coordinator top`: what the dashboard of a running program shows, in a terminal."""

import argparse
import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from coordinator.errors import LaunchError

_INTERVAL, _TIMEOUT = 1.0, 5.0
# The program may be started again at the same address.
_MOST_MISSED = 15
# Not a URL, no answer, or not a dashboard.
_ERRORS = (OSError, ValueError, http.client.HTTPException)
# The page is on this machine or at the end of a tunnel, never behind a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
    text = "show in the terminal what the dashboard of a running program shows"
    showing = commands.add_parser("top", help=text, description=text, allow_abbrev=False)
    showing.add_argument("url", metavar="URL", help="the address of the dashboard, with its token")
    showing.add_argument("--once", action="store_true", help="print it once")


def top(given: argparse.Namespace) -> int:
    """Runs the command until the program or the user ends it.

    Returns:
      The exit code.

    Raises:
      LaunchError: there is no dashboard at that address.
    """
    from rich.console import Console

    from coordinator.cli.top_screen import screen_of

    console = Console()
    try:
        state = _read(given.url)
    except _ERRORS as error:
        raise LaunchError(f"there is no dashboard at {given.url}: {_reason(error)}.") from None
    if given.once:
        console.print(screen_of(state, console.width))
        return 0
    try:
        _show(console, given.url, state)
    except KeyboardInterrupt:
        return 0
    console.print("The program has ended, or its dashboard cannot be reached any more.")
    return 0


def _show(console: Any, url: str, state: Any) -> None:
    """Shows one state after the other on the whole terminal, until there are no more."""
    from rich.live import Live

    from coordinator.cli.top_screen import screen_of

    missed, pause = 0, threading.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while missed < _MOST_MISSED:
            live.update(screen_of(state, console.width, console.height, missed), refresh=True)
            pause.wait(_INTERVAL)
            try:
                state, missed = _read(url), 0
            except _ERRORS:
                missed += 1


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
