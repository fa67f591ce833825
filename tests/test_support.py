"""The tables of the README are those of the descriptors."""

from pathlib import Path

import pytest

from subquad.models import REGISTRY
from subquad.support import TABLES, table, with_tables


README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.fast
def test_the_readme_has_the_tables():
    text = README.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run `python -m subquad.support README.md`"


@pytest.mark.fast
@pytest.mark.parametrize("marker", TABLES)
def test_a_table_has_every_architecture(marker):
    lines = table(marker).splitlines()
    assert all(line.count(" | ") == len(REGISTRY) for line in lines if not line.startswith("| |"))
    for architecture in REGISTRY.values():
        assert architecture.title in lines[0]


@pytest.mark.fast
def test_the_tables_agree_with_the_other_fields():
    for architecture in REGISTRY.values():
        support = architecture.support
        assert support.state_tuning.startswith("no") or architecture.tunable_state or architecture.processor
        assert ("decoding in ONNX" in support.export) == (architecture.onnx == ("decode",))
        assert (support.state == "none") == architecture.is_encoder


def test_a_missing_marker_is_an_error():
    with pytest.raises(ValueError, match="`<!-- table: models -->`"):
        with_tables("nothing")
