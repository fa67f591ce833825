"""`subquad doctor`"""

import json
import math
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.hub.foreign_files import one_line


if TYPE_CHECKING:
    import torch

SUMMARY = "check this installation"
DESCRIPTION = """\
Print the versions of packages, the devices, and each operator's implementation on every device, with the reason.
Then the embedded models read a text on every kind of device, which takes about a second on a CPU, and their logits are
compared with stored ones. They also generate with and without a cache, which must not differ. On a GPU the first run
also compiles the kernels, which takes minutes; later runs reuse them.

The exit status is 1 if there are problems, listed at the end. Bug reports should include the whole output.

examples:
  subquad doctor --no-test
  subquad doctor --json
"""
# Besides the requirements of subquad and its extras.
OTHERS = ("torchvision", "torchaudio", "mamba-ssm", "flash-linear-attention", "flash-attn")
DRIVER = Path("/proc/driver/nvidia/version")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-test", action="store_true", help="do not run the embedded models")


def run(args: Namespace) -> int:
    report = examine(test=not args.no_test)
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
    return 1 if report["problems"] else 0


def examine(test: bool = True) -> dict[str, Any]:
    """
    The report of `subquad doctor`: versions; devices; for each device the backend of every operator with the reason,
    and the largest error of the logits of each embedded model; notes; and problems, as sentences.
    """
    report: dict[str, Any] = {"versions": {"python": sys.version.split()[0], "platform": sys.platform}}
    problems, notes = [], []
    report |= {"devices": {}, "operators": {}, "errors": {}, "notes": notes, "problems": problems}
    _check_packages(report["versions"], problems, notes)
    try:
        import torch
    except Exception as error:  # whatever a damaged installation raises
        problems.append(f"torch cannot be imported: {one_line(error)}")
        return report
    _check_devices(torch, report["devices"], problems, notes)
    for device in report["devices"]:
        report["operators"][device] = _backends(torch.device(device), problems)
    if os.environ.get("TRITON_INTERPRET") == "1":
        notes.append("TRITON_INTERPRET=1: Triton's kernels run in its interpreter, thousands of times slower.")
    _check_tested(problems, notes)
    if test:
        for device in dict.fromkeys(name if name == "cpu" else "cuda:0" for name in report["devices"]):
            report["errors"][device] = _test(device, problems)
    return report


def _check_packages(versions: dict[str, str], problems: list[str], notes: list[str]) -> None:
    """Lists the version of every package that subquad can use. Checks that they fit together."""
    from packaging.requirements import Requirement

    def version_of(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    def requirements_of(name):
        found = [Requirement(line) for line in metadata.requires(name) or []]
        # An extra's packages are optional.
        return [(x, x.marker is None or x.marker.evaluate({"extra": ""})) for x in found]

    if (own := version_of("subquad")) is None:
        problems.append("subquad is not installed: it is imported from a folder, so its requirements are not checked.")
        return
    versions["subquad"] = own
    for wanted, needed in requirements_of("subquad"):
        found = version_of(wanted.name)
        if found is not None:
            versions[wanted.name] = found
        elif needed:
            problems.append(f"{wanted.name} is not installed; subquad needs {wanted.name}{wanted.specifier}.")
            continue
        if found and not wanted.specifier.contains(found, prereleases=True):
            where = problems if needed else notes
            where.append(f"{wanted.name} is {found}; subquad needs {wanted.name}{wanted.specifier}.")
    versions |= {name: found for name in OTHERS if (found := version_of(name))}
    # The first two contain code compiled for one version of torch; with another they fail when transformers
    # imports them. And torch calls parts of Triton that change from version to version.
    for name, other in (("torchvision", "torch"), ("torchaudio", "torch"), ("torch", "triton")):
        if name not in versions or other not in versions:
            continue
        for wanted, needed in requirements_of(name):
            if wanted.name == other and needed and not wanted.specifier.contains(versions[other], prereleases=True):
                problems.append(
                    f"{name} {versions[name]} needs {other}{wanted.specifier}, but {other} is {versions[other]}: "
                    f"install the {name if other == 'torch' else other} that belongs to it, or remove it."
                )


def _check_tested(problems: list[str], notes: list[str]) -> None:
    """Notes the tested versions, and installed packages that are newer."""
    try:
        from subquad.modeling.versions import describe_tested, newer_than_tested
    except Exception as error:  # whatever a wrong combination of packages raises
        problems.append(f"transformers cannot be used: {one_line(error)}")
        return
    notes.append(describe_tested())
    notes += [f"{package} is newer than what was tested." for package in newer_than_tested()]


def _check_devices(torch: Any, devices: dict[str, str], problems: list[str], notes: list[str]) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    devices["cpu"] = f"{capability}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    from subquad_kernels.c.native import explain

    library, why = explain()
    notes.append(f"Products of few rows on the CPU: {'our own library' if library else 'torch'} ({why}).")
    from subquad_tokenizers.greedy import explain as explain_tokenizer

    library, why = explain_tokenizer()
    notes.append(f"World tokenizer: {'our own library' if library else 'the tokenizers library'} ({why}).")
    if torch.version.cuda is None and torch.version.hip is None:
        if DRIVER.exists():
            notes.append("There is an NVIDIA GPU, but this torch is built without CUDA: everything runs on the CPU.")
        return
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, AssertionError or an error of the driver
        # Without a driver there is no GPU, and nothing is wrong.
        where = problems if DRIVER.exists() else notes
        where.append(f"torch finds no GPU: {one_line(error)}")
        return
    for n in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(n)
        name = getattr(properties, "gcnArchName", f"compute capability {properties.major}.{properties.minor}")
        devices[f"cuda:{n}"] = f"{properties.name}, {name}, {properties.total_memory / 2**30:.0f} GiB"
    if DRIVER.exists():
        notes.append(DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0])
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    if not any(name and shutil.which(name) for name in compilers):
        problems.append("Triton needs a C compiler to launch kernels: neither $CC nor gcc nor clang is there.")


def _backends(device: "torch.device", problems: list[str]) -> dict[str, dict[str, str]]:
    import subquad_kernels
    from subquad_kernels.backend import explain_backend

    found = {}
    for path in sorted(Path(subquad_kernels.__file__).parent.glob("*/custom_ops.py")):
        name = path.parent.name
        try:
            backend, why = explain_backend(name, import_module(f"subquad_kernels.{name}").BACKENDS, device)
        except Exception as error:  # a wrong SUBQUAD_BACKEND, or a GPU that does not work
            problems.append(f"{name} on {device}: {one_line(error)}")
        else:
            found[name] = {"backend": backend, "why": why}
    return found


def _test(device: str, problems: list[str]) -> dict[str, float | None]:
    """Compares the embedded models with stored logits; a fallback from a kernel to plain torch is a problem."""
    import warnings

    try:
        from transformers.utils import logging

        from subquad.modeling import self_check
        from subquad.tools.self_test import TOLERANCE, difference, difference_of_generate, logits_of, stored_logits
    except Exception as error:
        problems.append(f"transformers cannot be used: {one_line(error)}")
        return {}
    logging.disable_progress_bar()
    errors = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, expected in stored_logits().items():
            try:
                error = difference(logits_of(name, device), expected)
                change = difference_of_generate(name, device)
            except Exception as error:  # whatever a wrong combination of packages raises
                problems.append(f"{name} on {device} failed: {type(error).__name__}: {one_line(error)}")
                continue
            errors[name] = error if math.isfinite(error) else None  # JSON has only finite numbers
            if not error <= TOLERANCE:  # also for NaN
                problems.append(f"{name} on {device} is wrong: its logits differ by {error:.2g} from the stored ones.")
            if not change <= self_check.TOLERANCE:
                problems.append(
                    f"{name} on {device}: `generate` gives other logits with the cache than without; they differ by "
                    f"{change:.2g} of the largest."
                )
    problems += sorted({str(x.message) for x in caught if "runs in plain torch" in str(x.message)})
    return errors


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [", ".join(f"{name} {version}" for name, version in report["versions"].items())]
    for device, text in report["devices"].items():
        lines.append(f"{device}: {text}")
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, found in report["operators"][device].items():
            reasons.setdefault((found["backend"], found["why"]), []).append(name)
        lines += [f"  {backend} ({why}): {', '.join(names)}" for (backend, why), names in reasons.items()]
        if errors := report["errors"].get(device):
            lines.append(
                "  errors of logits: "
                + ", ".join(f"{name} {math.nan if x is None else x:.1g}" for name, x in errors.items())
            )
    lines += [f"note: {text}" for text in report["notes"]]
    return [*lines, *(f"problem: {text}" for text in report["problems"] or ["none"])]
