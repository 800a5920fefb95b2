"""`coordinator simulate`: prints what was seen of a simulated cluster, and draws it."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from coordinator.errors import SettingError

if TYPE_CHECKING:
    from coordinator.simulation.request import Request
    from coordinator.simulation.result import Result

_UNUSABLE = 2

# The results of each rule, one for each value of the sweep.
Series = list[tuple[str, list["Result"]]]


def simulate(given: argparse.Namespace) -> int:
    """Runs the command.

    Args:
      given: its options.

    Returns:
      The exit code; 2 if what was asked for cannot be.
    """
    from coordinator.simulation.request import Request

    try:
        request = Request.of(vars(given))
        series = _series(request)
        print(_text(request, series))
        if given.json is not None:
            _write_json(given, request, series)
        if given.plot is not None:
            _draw(given, request, series)
    except SettingError as error:
        print(f"coordinator simulate: --{error.option.replace('_', '-')} {error.complaint}", file=sys.stderr)
        return _UNUSABLE
    return 0


def _series(request: "Request") -> Series:
    from coordinator.simulation.simulated_cluster import simulate as simulated

    values = request.sweep.values if request.sweep else (None,)
    # All are checked before the first is run.
    settings = [(rule, [request.setting(rule, value) for value in values]) for rule in request.rules]
    return [(rule, [simulated(setting) for setting in of_rule]) for rule, of_rule in settings]


def _text(request: "Request", series: Series) -> str:
    from coordinator.simulation.advice import advice
    from coordinator.simulation.text_report import sheet, table

    if request.sweep:
        rows = [
            (f"{rule} {value}", result)
            for rule, results in series
            for value, result in zip(request.sweep.values, results, strict=True)
        ]
        return table(f"rule, {request.sweep.name}", rows)
    if len(series) > 1:
        return table("rule", [(str(result.setting.rule), result) for _, (result,) in series])
    ((_, (result,)),) = series
    return "\n".join([sheet(result), *(f"note: {sentence}" for sentence in advice(result))])


def _draw(given: argparse.Namespace, request: "Request", series: Series) -> None:
    from coordinator.simulation import picture

    if request.sweep:
        figure = picture.scaling(request.sweep.name, request.sweep.values, series)
    elif len(series) > 1:
        figure = picture.comparison([(str(result.setting.rule), result) for _, (result,) in series])
    else:
        figure = picture.picture(series[0][1][0])
    picture.save(figure, given.plot)


def _write_json(given: argparse.Namespace, request: "Request", series: Series) -> None:
    records = [
        {"rule": str(result.setting.rule), "workers": result.setting.workers, "ps": result.setting.ps}
        | ({request.sweep.name: value} if request.sweep else {})
        | result.summary()
        for _, results in series
        for value, result in zip(request.sweep.values if request.sweep else (None,), results, strict=True)
    ]
    try:
        given.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingError("json", f"cannot be written to {given.json}: {error}") from error
