"""The programs of the page about embeddings run, and so do its fragments, each in one of them."""

import re

import pytest

from tests.pages import snippets
from tests.program_runner import COORDINATOR

SHARDED, ROWWISE, GROWING, SAVED = snippets("docs/embeddings.md")
IMPORTS = ROWWISE.partition("\n\nstrategy = ")[0]
RESOLVER = "resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()"


def train(run_program, tmp_path, program):
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    return run_program(COORDINATOR, "run", "--workers", 2, "--ps", 2, tmp_path / "program.py", timeout=180).stdout


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", [ROWWISE, GROWING], ids=["rowwise", "growing"])
def test_the_programs_of_the_page_train_their_tables(run_program, tmp_path, program):
    [loss] = re.findall(r"^\d\.\d+$", train(run_program, tmp_path, program), re.M)
    assert 0.0 < float(loss) < 2.0


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(200)
def test_the_fragment_with_a_sharded_table_runs(run_program, tmp_path):
    program = [IMPORTS, RESOLVER, SHARDED, "print(len(table.variables), 'parts')", "strategy.close()"]
    assert train(run_program, tmp_path, "\n".join(program)) == "2 parts\n"


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(200)
def test_the_fragment_with_deltas_runs(run_program, tmp_path):
    before, _, last = GROWING.rpartition("strategy.close()\n")
    saved = SAVED.replace('"saved/', f'"{tmp_path}/')
    program = [before, "model = keras.Sequential()", saved, "print('restored')", "strategy.close()", last]
    assert "restored\n" in train(run_program, tmp_path, "\n".join(program))
