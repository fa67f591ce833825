"""The tables of the documentation are those of the descriptors."""

from pathlib import Path

import pytest

from subquad.hub.support import TABLES, rows
from subquad.models import REGISTRY


MODELS = Path(__file__).resolve().parents[1] / "docs/models"


@pytest.mark.fast
@pytest.mark.parametrize("table", TABLES)
def test_a_table_says_something_of_every_architecture(table):
    for architecture in REGISTRY.values():
        said = rows(table, architecture)
        assert [what for what, _ in said] == list(TABLES[table]) and all(cell for _, cell in said)


@pytest.mark.fast
def test_the_tables_agree_with_the_other_fields():
    for architecture in REGISTRY.values():
        support = architecture.support
        assert support.state_tuning.startswith("no") or architecture.tunable_state or architecture.processor
        assert ("decoding in ONNX" in support.export) == (architecture.onnx == ("decode",))
        assert (support.state == "none") == architecture.is_encoder


@pytest.mark.fast
def test_every_architecture_has_a_page():
    pages = {path.stem for path in MODELS.glob("*.md")} - {"index"}
    assert pages == {architecture.folder for architecture in REGISTRY.values()}
