"""Tests of the notebook of the tutorial: it is stored without outputs, and runs, interrupted where it says so."""

import json

import pytest

from tests import ROOT
from tests.program_runner import ProgramRunner

NOTEBOOK = ROOT / "examples" / "tutorial" / "training.ipynb"

# Executes the notebook whose path is its argument. Presses Interrupt when the cell that may raise waits in join.
PROGRAM = """
import asyncio, sys, time
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
client = NotebookClient(notebook, kernel_name="python3", timeout=300)
times = {}

def observe(message, cell, index, observed=client.process_message):
    kind, content = message["header"]["msg_type"], message["content"]
    if "raises-exception" in cell.metadata.get("tags", ()):
        if kind == "stream" and "join waits" in content["text"]:
            times["interrupt"] = time.monotonic()
            times["task"] = asyncio.ensure_future(client.km.interrupt_kernel())
        if kind == "error":
            times["error"] = time.monotonic()
    return observed(message, cell, index)

client.process_message = observe
client.execute()
outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
errors = {name: output.ename for name, shown in outputs.items() for output in shown if output.output_type == "error"}
assert errors == {"interrupted": "KeyboardInterrupt"}, errors
assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")

def text(name):
    return "".join(output.text for output in outputs[name] if output.output_type == "stream")

before, after = [line for line in text("cancel").splitlines() if " waiting, " in line]
assert not before.startswith("0 waiting"), before
assert after.startswith("0 waiting, 0 running, "), after
assert "the loss was" in text("more") and "the weights are 2.00 -3.00 0.50 1.00" in text("evaluation")
# With the time in which IPython formats and sends it, on a machine that may be busy.
assert times["error"] - times["interrupt"] < 15, times
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(500)
def test_the_notebook_runs_with_an_interrupted_cell(run_program: ProgramRunner) -> None:
    run_program(PROGRAM, NOTEBOOK, timeout=480)


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]
