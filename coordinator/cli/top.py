"""`coordinator top`: shows the dashboard of a running program in a terminal."""

import argparse
import http.client
import json
import os
import pathlib
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coordinator.cli.arguments import add_token_file, chosen_token
from coordinator.errors import LaunchError
from coordinator.version import __version__

_COLORS = {"live": "green", "lost": "bold red", "stopped": "dim", "good": "green", "error": "red", "warning": "yellow"}
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_EVENTS = 6
# The number of lines on the screen, without the rows of workers and servers.
_OTHER_LINES = 22
# The least width of a terminal with room for all columns.
_WIDE = 100

State = Mapping[str, Any]


def screen_of(state: State, width: int, height: int | None = None, missed: int = 0) -> RenderableType:
    """Draws an answer of `/api/state` in characters; `missed` counts the failed requests for a newer answer."""
    most_workers = None if height is None else max(3, height - _OTHER_LINES - len(state["servers"]))
    parts = [_headline(state, missed), _workers(state, most_workers, is_narrow=width < _WIDE)]
    if state["advice"]:
        parts.append(Text(f" {state['advice']}", style="dim"))
    if state["servers"]:
        parts.append(_servers(state))
    if state["timeline"]:
        parts.append(_events(state["timeline"][-_MOST_EVENTS:]))
    return Group(*parts)


def _headline(state: State, missed: int) -> RenderableType:
    live = sum(worker["state"] == "live" for worker in state["workers"])
    saved = state["checkpoint_time"]
    figures = [
        ("steps/s", f"{state['rate']:,.1f}", "bold cyan"),
        ("finished", f"{state['finished']:,}", ""),
        ("failed", f"{state['failed']:,}", "red" if state["failed"] else ""),
        ("retried", f"{state['retried']:,}", ""),
        ("running", f"{state['running']:,}", ""),
        ("waiting", f"{state['waiting']:,}", ""),
        ("workers", f"{live}/{len(state['workers'])}", "" if live == len(state["workers"]) else "bold red"),
        ("checkpoint", f"{_duration(state['time'] - saved)} ago" if saved else "none", ""),
        *((name, f"{value:.4g}", "magenta") for name, value in state["values"].items()),
    ]
    texts = [Text.assemble((f"{name} ", "dim"), (text, style)) for name, text, style in figures]
    rates = state["history"]["rates"][-60:]
    # All rates are 0 before the first step.
    highest = max(rates, default=0.0) or 1.0
    bars = "".join(_BARS[round(8 * rate / highest)] for rate in rates)
    body = Group(Columns(texts, padding=(0, 3)), Text(bars, style="cyan", no_wrap=True))
    running = f"{state['program'] or 'coordinator'}, for {_duration(state['time'] - state['started'])}"
    if missed:
        return Panel(body, title=Text(f"{running}: not connected"), title_align="left", border_style="red")
    return Panel(body, title=Text(running), title_align="left", border_style="dim")


def _workers(state: State, most: int | None, *, is_narrow: bool) -> RenderableType:
    table = Table(expand=True, border_style="dim", header_style="dim", box=None, padding=(0, 1))
    for name in ("worker", "state", "runs"):
        table.add_column(name, no_wrap=True, ratio=1 if name == "runs" else None)
    for name in ("for", "steps/s", "idle", "failed", "losses", *(() if is_narrow else ("retried", "of fastest"))):
        table.add_column(name, justify="right", no_wrap=True)
    # If the number of rows is limited, workers that are not live come first.
    workers = sorted(state["workers"], key=lambda row: row["state"] == "live") if most else state["workers"]
    for row in workers[:most]:
        calls = f" x {row['calls']}" if row["calls"] > 1 else ""
        table.add_row(
            Text(f"{row['index']}"),
            Text(row["state"], style=_COLORS[row["state"]]),
            Text(f"{row['function']}{calls}"),
            _duration(state["time"] - row["running_since"]) if row["running_since"] else "",
            f"{row['rate']:,.1f}",
            f"{row['idle']:.0%}",
            f"{row['failed']:d}",
            f"{row['losses']:d}",
            *(() if is_narrow else (f"{row['retried']:d}", f"{row['share']:.0%}")),
        )
    more = len(workers) - len(workers[:most])
    return Panel(Group(table, Text(f"and {more} more", style="dim")) if more else table, border_style="dim")


def _servers(state: State) -> RenderableType:
    table = Table(expand=True, box=None, header_style="dim", padding=(0, 1))
    table.add_column("server")
    for name in ("state", "memory", "processors", "host receives", "host sends"):
        table.add_column(name, justify="right")
    for row in state["servers"]:
        usage = row["usage"]
        word = "live" if usage["is_reachable"] else "lost"
        table.add_row(
            Text(usage["task"]),
            Text(word, style=_COLORS[word]),
            f"{usage['memory'] / 1e6:,.0f} MB",
            f"{row['cores']:.2f}",
            f"{row['receiving'] / 1e6:,.1f} MB/s",
            f"{row['sending'] / 1e6:,.1f} MB/s",
        )
    return Panel(table, border_style="dim")


def _events(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    lines = [
        Text.assemble(
            (f"{time.strftime('%H:%M:%S', time.localtime(entry['time']))}  ", "dim"),
            (entry["text"], _COLORS.get(entry["level"], "")),
            no_wrap=True,
            overflow="ellipsis",
        )
        for entry in reversed(entries)
    ]
    return Panel(Group(*lines), border_style="dim")


def _duration(seconds: float) -> str:
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{max(0.0, seconds):.1f} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


_INTERVAL, _TIMEOUT = 1.0, 5.0
# The command ends after this many failed requests, because the program may be restarted at the same address.
_MOST_MISSED = 15
# Errors if the address is not a URL, does not answer, or is not a dashboard.
_ERRORS = (OSError, ValueError, RecursionError, http.client.HTTPException)
# Errors in drawing an answer of another version or service, which may not have the expected numbers, text and lists.
_STRANGE = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
# The dashboard is on this machine or at the end of a tunnel, never behind a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "show in the terminal what the dashboard of a running program shows"
    showing = commands.add_parser("top", help=text, description=text, allow_abbrev=False)
    text = "the address of the dashboard; a token in it can be seen by all users of the machine"
    showing.add_argument("url", metavar="URL", help=text)
    showing.add_argument("--once", action="store_true", help="print it once")
    add_token_file(showing)


def top(options: argparse.Namespace) -> int:
    """Runs the command until the program or the user ends it; returns its exit code."""
    from rich.console import Console

    console = Console()
    try:
        url = _with_token(options.url, options.token_file)
        state = _read(url)
    except _ERRORS as error:
        raise LaunchError(f"there is no dashboard at {options.url}: {_reason(error)}.") from None
    if options.once:
        console.print(_screen(state, console.width))
        return 0
    try:
        _show(console, url, state)
    except KeyboardInterrupt:
        return 0
    console.print("The program has ended, or its dashboard cannot be reached any more.")
    return 0


def _show(console: Any, url: str, state: Any) -> None:
    """Shows each new state on the whole terminal, until the dashboard has not answered several requests in a row."""
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
    """Draws a state; raises LaunchError if it does not come from a dashboard of this version."""
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
    """Returns why the address cannot be read, in the words of the server or of the operating system."""
    if isinstance(error, urllib.error.HTTPError):
        return error.read().decode(errors="replace").strip().rstrip(".") or str(error)
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason)
