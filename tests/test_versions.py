import importlib
import operator
import re
import sys

import keras
import pytest
from keras.src.backend.tensorflow import trainer
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import while_v2

from coordinator.ps_strategy import strategy_parts, tensorflow_internals
from coordinator.ps_strategy.keras import internals as keras_internals
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced
from coordinator.versions import NEWEST, off, private_names_needed, unknown


def test_only_a_newer_minor_version_than_the_tests_know_is_unknown() -> None:
    major, minor = NEWEST["tensorflow"]
    known = {"tensorflow": f"{major}.{minor}.9-dev20261026", "keras": "3.10.0"}
    assert unknown(known) == []
    [text] = unknown({**known, "tensorflow": f"{major}.{minor + 1}.0rc1"})
    assert text.startswith(f"tensorflow {major}.{minor + 1}.0rc1 is newer than {major}.{minor}")
    assert unknown({**known, "keras": "4.0.0"})


def test_what_is_off_is_said_of_the_versions_without_it() -> None:
    assert [bool(off({"tensorflow": version})) for version in ("2.19.1", "2.20.0", "2.21.0")] == [True, True, False]


def test_an_unknown_newer_version_warns_only_once(monkeypatch, caplog) -> None:
    monkeypatch.setitem(NEWEST, "keras", (3, 0))
    monkeypatch.delattr(while_v2, "_zeros_like")
    strategy_parts.warn_of_unknown_versions.cache_clear()
    for _ in range(3):
        strategy_parts.warn_of_unknown_versions()
    newer, *lacks = [record.getMessage() for record in caplog.records]
    assert newer.startswith(f"keras {keras.__version__} is newer than 3.0")
    assert re.fullmatch(
        r"tensorflow 2\S+ lacks \S+while_v2\._zeros_like, without which this fails: A .*", "".join(lacks)
    )
    monkeypatch.undo()
    strategy_parts.warn_of_unknown_versions.cache_clear()


@pytest.mark.parametrize(
    ("internals", "module", "owner", "name", "version"),
    [
        (keras_internals, "patches", trainer, "TFEpochIterator", "keras 3"),
        (tensorflow_internals, "graph_calls", func_graph, "FuncGraph", "tensorflow 2"),
    ],
)
def test_a_version_without_a_private_name_is_refused_with_advice(
    monkeypatch, internals, module, owner, name, version
) -> None:
    monkeypatch.delattr(owner, name)
    monkeypatch.delattr(internals, module)
    monkeypatch.delitem(sys.modules, f"{internals.__name__}.{module}")
    advice = rf"^{version}\S* lacks a private name .*{name}.*: install a version"
    with pytest.raises(ImportError, match=advice) as raised:
        importlib.reload(internals)
    assert "\n" not in str(raised.value)


def test_an_attribute_that_a_class_lacks_is_named_with_its_version() -> None:
    advice = rf"keras {keras.__version__} lacks a private name .*_absent.*: install a version"
    with pytest.raises(ImportError, match=advice), private_names_needed():
        operator.attrgetter("_absent")(keras.layers.RNN)
    with pytest.raises(ImportError, match=advice), attribute_replaced(keras.layers.RNN, "_absent", None):
        pass


def test_a_missing_module_of_another_package_is_not_blamed_on_a_version() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"), private_names_needed():
        importlib.import_module("no_such_module")
