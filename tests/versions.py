"""
Runs the tests in the oldest, in middle and in the newest supported versions of Python, torch and transformers.

    python tests/versions.py                                    all of it, which takes hours
    python tests/versions.py --only floor --part tokenizers     one part in one environment
    python tests/versions.py --quick                            what `.ci/run` runs, in the environment of this Python

Each environment is installed once, in .venv-versions, and takes up to 7 GB if pip finds torch with CUDA. Without a
GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves most of them.

Every part runs in each environment. Between the middle transformers and the newest, the fast tests of some parts run
with each minor version. A part that fails does not end the run; the exit status is then 1. A part also fails if a
test was skipped because a package is missing. Except with --quick, the results are written to docs/versions.json, from
which the documentation makes a table. A run of some parts keeps the results of the others, unless versions have
changed. Logs are in the folder of each environment.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs/versions.json"
FOLDER = ROOT / ".venv-versions"
# The code of this tree is tested, whatever an environment has installed.
SOURCES = [str(ROOT / folder) for folder in ("src", "kernels/torch-ext", "tokenizers", "conversion")]
# Packages whose versions are recorded.
RECORDED = (
    "torch",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
    "peft",
    "accelerate",
)

# What pytest is given for each part, within `tests`.
PARTS = {
    "contract": ["contract"],
    "generation": [
        "test_continuous_batching.py",
        "test_decoding_step.py",
        "test_cuda_graph.py",
        "test_prefix_cache.py",
        "test_prefix_files.py",
        "test_packed_states.py",
        "test_states.py",
        "test_embedded_model.py",
    ],
    "static-cache": ["test_static_cache.py"],
    "training": ["test_training.py"],
    "compile": ["contract/test_compiled.py", "test_state_tuning.py", "models", "-k", "compiled", "-m", "not slow"],
    "repositories": ["test_hub.py", "test_merging.py", "test_push.py", "-m", "not slow"],
    "tokenizers": ["tokenizers"],
    "peft": ["test_adapters.py", "test_state_tuning.py"],
    "pipelines": ["test_pipelines.py", "test_encoder_pipelines.py", "test_serve.py"],
    "kernels": ["kernels/test_operator_contract.py"],
}
# The parts whose tests that are marked as fast run with packages that are laid over those of an environment.
QUICK = ("contract", "generation", "repositories", "tokenizers")


def lower_bounds(*lists: str) -> dict[str, str]:
    """The lower bound of each package in these lists of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = {"python": re.search(r'^requires-python = ">=([\d.]+)"', text, re.MULTILINE)[1]}
    for name in lists:
        packages = re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]
        found |= dict(re.findall(r'"([\w-]+)>=([\d.]+)"', packages))
    return found


OLDEST = lower_bounds("dependencies", "train", "peft", "triton")


@dataclass(frozen=True)
class Environment:
    """
    Attributes:
        python: the version of Python, or None for the environment of this Python, where nothing is installed.
        requirements: what pip is given beside this package and what its tests need.
        overlays: requirements that replace installed packages for a run of the fast tests. They are installed without
            their own requirements. An empty one stands for all tests with what is installed.
    """

    python: str | None
    requirements: tuple[str, ...] = ()
    overlays: tuple[tuple[str, ...], ...] = ((),)


def swap(*versions: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"transformers=={version}",) for version in versions)


ENVIRONMENTS = {
    "floor": Environment(
        OLDEST["python"], tuple(f"{name}=={version}" for name, version in OLDEST.items() if name != "python")
    ),
    # Version 1 of huggingface_hub is the only one that all of these take.
    "middle": Environment(
        "3.11",
        ("torch==2.11.0", "transformers==5.17.0", "huggingface_hub==1.*"),
        ((), *swap("5.18.*", "5.19.*", "5.20.*")),
    ),
    "today": Environment("3.11", ("--constraint", str(ROOT / "constraints-newest.txt"))),
}
# The oldest transformers does not take version 2 of huggingface_hub.
HERE = Environment(
    None, overlays=((f"transformers=={OLDEST['transformers']}", "huggingface_hub==1.*"), *swap("5.20.*"))
)


def run(*command, **options) -> None:
    """Raises SystemExit if the command fails."""
    if subprocess.run(command, **options).returncode:
        raise SystemExit(f"This failed: {' '.join(map(str, command))}")


def interpreter(version: str) -> str:
    """The path of that version of Python: from PATH, or the newest of pyenv."""
    name = f"python{version}"
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    newest_first = sorted(installed, key=lambda path: int(re.findall(r"\d+", path.parts[-3])[-1]), reverse=True)
    for path in (shutil.which(name), *newest_first):
        # pyenv has a script of that name on PATH, even for versions that it does not run.
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return str(path)
    raise SystemExit(
        f"{name} was not found: it is neither on PATH nor in ~/.pyenv/versions. Install it, or name others in --only."
    )


def install(folder: Path, environment: Environment) -> str:
    """The Python of an environment, which is installed or brought up to date if necessary."""
    if environment.python is None:
        return sys.executable
    python, marker = folder / "bin/python", folder / "installed.txt"
    arguments = ["--editable", f"{ROOT}[test]", *environment.requirements]
    files = [ROOT / "pyproject.toml", *(path for path in arguments if path.endswith(".txt"))]
    wanted = "\n".join([*arguments, *(Path(path).read_text(encoding="utf-8") for path in files)])
    if not marker.exists() or marker.read_text(encoding="utf-8") != wanted:
        print(f"Installing {folder}", flush=True)
        if not python.exists():
            run(interpreter(environment.python), "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", *arguments)
        marker.write_text(wanted, encoding="utf-8")
    return str(python)


def lay_over(folder: Path, python: str, requirements: tuple[str, ...]) -> list[str]:
    """Folders with packages that replace those of an environment."""
    if not requirements:
        return []
    target = folder / re.sub(r"[^\w.]+", "-", "-".join(requirements)).strip("-.")
    if not (target / "installed.txt").exists():
        shutil.rmtree(target, ignore_errors=True)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, *requirements)
        (target / "installed.txt").touch()
    return [str(target)]


def versions(python: str, variables: dict[str, str]) -> dict[str, str]:
    """The recorded versions of an environment."""
    code = (
        "import json, platform\n"
        "from importlib.metadata import version\n"
        "import transformers\n"  # an error if its requirements are not met
        f"found = {{name: version(name).partition('+')[0] for name in {RECORDED}}}\n"
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    done = subprocess.run([python, "-c", code], env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The versions of {python} cannot be used together.")
    return json.loads(done.stdout.splitlines()[-1])


def read_report(path: Path) -> tuple[dict[str, int], list[str]]:
    """The numbers in a JUnit report, and what went wrong: tests that failed, and those that lacked a package."""
    numbers, wrong = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(path).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            numbers["failed"] += 1
            wrong.append(name)
        elif skipped is not None:
            numbers["skipped"] += 1
            missing = re.match(r"could not import '([\w.]+)'", skipped.get("message", ""))
            # Modules of transformers are missing in some of its versions.
            if missing and not missing[1].startswith("transformers."):
                wrong.append(f"{name} was skipped because {missing[1]} is missing")
        else:
            numbers["passed"] += 1
    return numbers, wrong


def run_part(
    python: str, arguments: list[str], variables: dict[str, str], log: Path, jobs: int
) -> tuple[dict, list[str]]:
    """The results of a part, and what went wrong."""
    start = datetime.datetime.now()
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, open(log, "w", encoding="utf-8") as output:
        report = Path(work, "report.xml")
        pytest = [python, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal", "-rs", "-p", "no:cacheprovider"]
        command = [*pytest, f"--junitxml={report}", *arguments]
        code = subprocess.run(
            command, cwd=ROOT / "tests", env=variables, stdout=output, stderr=subprocess.STDOUT
        ).returncode
        numbers, wrong = read_report(report) if report.exists() else ({"passed": 0, "failed": 0, "skipped": 0}, [])
    if code and not wrong:  # for example because no test was found
        wrong.append(f"pytest ended with exit code {code}")
    numbers["failed"] = max(numbers["failed"], bool(wrong))
    seconds = round((datetime.datetime.now() - start).total_seconds())
    return {"date": start.date().isoformat(), **numbers, "seconds": seconds}, wrong


def read_record(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_result(path: Path, name: str, found: dict[str, str], part: str, result: dict) -> None:
    """
    Puts a result into the record: one entry for each environment and minor version of transformers. An entry with
    other versions is replaced.
    """

    def key(entry):
        return entry["environment"], entry["versions"]["transformers"].rsplit(".", 1)[0]

    entry, entries = {"environment": name, "versions": found, "parts": {}}, {}
    for other in read_record(path):
        entries[key(other)] = other
    if entries.get(key(entry), entry)["versions"] == found:
        entry = entries.get(key(entry), entry)
    parts = {**entry["parts"], part: result}
    entries[key(entry)] = {**entry, "parts": {each: parts[each] for each in PARTS if each in parts}}
    order = list(ENVIRONMENTS)
    ordered = sorted(entries, key=lambda each: (order.index(each[0]), [int(number) for number in each[1].split(".")]))
    path.write_text(json.dumps([entries[each] for each in ordered], indent=1) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=ENVIRONMENTS, help="an environment; may be given more than once"
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="a part of the tests; may be given more than once"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fast tests of some parts, with the oldest and a middle transformers, in the environment of this Python",
    )
    parser.add_argument("--environments", type=Path, default=FOLDER, metavar="DIR", help="where the environments are")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help="where the results are written")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes that run tests (default: 2)")
    args = parser.parse_args(arguments)
    if args.quick and args.only:
        parser.error("--quick runs in the environment of this Python, so --only cannot name another one.")
    args.part = [part for part in (QUICK if args.quick else PARTS) if not args.part or part in args.part]
    if not args.part:
        parser.error(f"--quick has the parts {', '.join(QUICK)}.")
    return args


def main() -> int:
    args, failed = parse(), False
    environments = {"quick": HERE} if args.quick else {name: ENVIRONMENTS[name] for name in args.only or ENVIRONMENTS}
    for environment in environments.values():  # before hours of tests
        if environment.python:
            interpreter(environment.python)
    for name, environment in environments.items():
        folder = args.environments.resolve() / name
        python = install(folder, environment)
        for requirements in environment.overlays:
            path = os.pathsep.join([*SOURCES, *lay_over(folder, python, requirements)])
            variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
            # From 5.19 to 5.21, transformers cannot pickle any model if the package `kernels` is installed.
            variables["USE_HUB_KERNELS"] = "0"
            found = versions(python, variables)
            print(f"{name}:", ", ".join(f"{package} {version}" for package, version in found.items()), flush=True)
            for part in args.part if not requirements else [part for part in QUICK if part in args.part]:
                log = folder / "logs" / f"{part}-transformers-{found['transformers']}.log"
                tests = [*PARTS[part], "-m", "fast"] if requirements else PARTS[part]
                result, wrong = run_part(python, tests, variables, log, args.jobs)
                print("  {:14}{passed} passed, {failed} failed, {skipped} skipped, {seconds} s".format(part, **result))
                if wrong:
                    failed = True
                    more = [f"and {len(wrong) - 5} more"] if len(wrong) > 5 else []
                    print("    " + "\n    ".join([*wrong[:5], *more, f"See {log}"]))
                sys.stdout.flush()
                if not args.quick:
                    write_result(args.record, name, found, part, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
