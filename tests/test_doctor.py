"""`subquad doctor`: what it says about this machine, and what it finds where something is wrong."""

import json
import re
import warnings
from importlib import metadata

import pytest
import torch
from torch._subclasses import FakeTensorMode

import subquad_cli as cli
from subquad.hub.info import known_names
from subquad.tools import self_test
from subquad_cli import doctor
from subquad_kernels import backend


def examined(capsys, *arguments):
    """The exit status, and the report as an object."""
    status = cli.main(["doctor", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_this_installation(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"python 3\.\d+\.\d+, platform \w+, subquad .*torch .*transformers ", lines[0])
    assert lines[1].startswith("cpu: ")
    assert re.search(r"eager \(.*\): cema, .*\bwkv, working_memory$", lines[2])
    assert all(f"{name} " in lines[3] for name in self_test.stored_logits())
    assert lines[-1] == "problem: none"


def test_stored_logits_are_those_of_the_recurrences(monkeypatch):
    stored = self_test.stored_logits()
    assert stored.keys() <= set(known_names()["embedded models"])
    monkeypatch.setenv("SUBQUAD_BACKEND", "reference")
    for name in ("eagle-abc", "avey-b-abc"):
        found = self_test.logits_of(name, dtype=torch.float64)
        assert self_test.difference(found, stored[name]) < 1e-5
        assert len(stored[name]) == (1 if name == "avey-b-abc" else 2)


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_wrong_results(wrong, monkeypatch, capsys):
    stored = self_test.stored_logits()["eagle-abc"]
    found = [[x + wrong * (n == 3) for n, x in enumerate(row)] for row in stored]
    monkeypatch.setattr(self_test, "stored_logits", lambda: {"eagle-abc": stored})
    monkeypatch.setattr(self_test, "logits_of", lambda name, device: found)
    status, report = examined(capsys)
    assert (status, len(report["problems"])) == (1, 1)
    assert re.match(r"eagle-abc on cpu is wrong: its logits differ by (0\.01|nan) from", report["problems"][0])
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"problem: {report['problems'][0]}"


def test_what_fails_and_what_falls_back(monkeypatch, capsys):
    def logits_of(name, device):
        if name == "eagle-abc":
            raise ImportError("no such operator")
        warnings.warn("`wkv` runs in plain torch: no memory", RuntimeWarning, stacklevel=1)
        return [[0.0]]

    monkeypatch.setattr(self_test, "stored_logits", lambda: {"eagle-abc": [[0.0]], "finch-abc": [[0.0]]})
    monkeypatch.setattr(self_test, "logits_of", logits_of)
    status, report = examined(capsys)
    assert status == 1 and report["problems"] == [
        "eagle-abc on cpu failed: ImportError: no such operator",
        "`wkv` runs in plain torch: no memory",
    ]


def test_packages_that_do_not_fit(monkeypatch, capsys):
    versions = {"transformers": "5.2.0", "torchvision": "0.20.1", "peft": "0.3.0"}
    real, requires = metadata.version, metadata.requires

    def version(name):
        if name == "tqdm":
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    vision = ["torch==2.5.1", 'scipy; extra == "scipy"']
    monkeypatch.setattr(metadata, "requires", lambda name: vision if name == "torchvision" else requires(name))
    status, report = examined(capsys, "--no-test")
    assert status == 1 and report["problems"] == [
        "transformers is 5.2.0; subquad needs transformers>=5.16.",
        "tqdm is not installed; subquad needs tqdm.",
        f"torchvision 0.20.1 needs torch==2.5.1, but torch is {torch.__version__}: install the torchvision that "
        "belongs to it, or remove it.",
    ]
    assert report["versions"]["torchvision"] == "0.20.1"
    assert any(note.startswith("peft is 0.3.0; subquad needs peft>=") for note in report["notes"])


def test_drivers(monkeypatch, capsys, tmp_path):
    driver = tmp_path / "version"
    monkeypatch.setattr(doctor, "DRIVER", driver)

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    status, report = examined(capsys, "--no-test")  # a machine without a GPU
    assert status == 0 and "too old" in " ".join(report["notes"])
    driver.write_text("NVRM version: 470.1\n")
    status, report = examined(capsys, "--no-test")
    assert status == 1 and "too old (found version 11040)" in " ".join(report["problems"])
    monkeypatch.setattr(torch.version, "cuda", None)
    status, report = examined(capsys, "--no-test")
    assert status == 0 and "built without CUDA" in " ".join(report["notes"])


def test_a_gpu_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status, report = examined(capsys, "--no-test")
    assert status == 0, report
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    status, report = examined(capsys, "--no-test")
    assert status == 1 and "needs a C compiler" in report["problems"][0]


def test_backends(monkeypatch, capsys):
    monkeypatch.setenv("SUBQUAD_BACKEND", "reference")
    _, report = examined(capsys, "--no-test")
    assert report["operators"]["cpu"]["wkv"] == {"backend": "reference", "why": "SUBQUAD_BACKEND=reference"}
    monkeypatch.setenv("SUBQUAD_BACKEND", "numpy")
    status, report = examined(capsys, "--no-test")
    assert (
        status == 1
        and "wkv on cpu: SUBQUAD_BACKEND='numpy': `wkv` has eager, reference, triton." in report["problems"]
    )


def test_backends_of_a_gpu(monkeypatch):
    monkeypatch.delenv("SUBQUAD_BACKEND", raising=False)
    device, every = torch.device("cuda:0"), ("eager", "reference", "triton")

    def explained(available=every):
        with FakeTensorMode():
            return backend.explain_backend("wkv", available, device)

    monkeypatch.setattr(backend, "_capable", lambda device: True)
    monkeypatch.setattr(backend, "_HAS_TRITON", True)
    assert explained() == ("triton", "the GPU is supported")
    assert explained(every[:2]) == ("eager", "there are no kernels for it")
    monkeypatch.setattr(backend, "_warned", {("wkv", "too little memory")})
    assert explained() == ("eager", "too little memory")
    monkeypatch.setattr(backend, "_capable", lambda device: False)
    assert explained() == ("eager", "the kernels need compute capability 8.0")
    monkeypatch.setattr(backend, "_HAS_TRITON", False)
    assert explained() == ("eager", "the package triton is not installed")
