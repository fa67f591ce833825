"""The programs that render a chat template without transformers: each is a function of a template and variables."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest


HERE = Path(__file__).parent
PACKAGE = "@huggingface/jinja@0.5.11"
NODE = """
const { Template } = require("@huggingface/jinja");
const [template, cases] = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map((variables) => new Template(template).render(variables))));
"""
# Of llama.cpp's `common` folder, its template engine and what it needs.
SOURCES = (*(f"jinja/{name}" for name in ("lexer", "parser", "runtime", "string", "value")), "json", "unicode")


def raise_exception(message):
    raise ValueError(message)


def render_jinja2(template, cases, directory):
    template = jinja2.Environment().from_string(template)
    return [template.render(raise_exception=raise_exception, **variables) for variables in cases]


def render_minijinja(template, cases, directory):
    minijinja = pytest.importorskip("minijinja")
    environment = minijinja.Environment(templates={"chat": template}, globals={"raise_exception": raise_exception})
    return [environment.render_template("chat", **variables) for variables in cases]


def render_node(template, cases, directory):
    """The package of npm that transformers.js renders with."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}, on Debian the package npm")
    install = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", PACKAGE]
    subprocess.run(install, cwd=directory, check=True)
    return _run(["node", "-e", NODE], directory, [template, cases])


def render_llama_cpp(template, cases, directory):
    """llama.cpp's own engine, from the source that `benchmarks/llama_peer.py` has brought."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "subquad")
    source = next(caches.glob("llama.cpp-*/source"), None)
    if source is None or shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, and the source of llama.cpp that benchmarks/llama_peer.py brings")
    files = [HERE / "llama_jinja.cpp", *(source / "common" / f"{name}.cpp" for name in SOURCES)]
    folders = [f"-I{source / name}" for name in ("common", "vendor", "ggml/include")]
    subprocess.run(["c++", "-std=c++17", "-O0", "-w", *folders, *files, "-o", "render"], cwd=directory, check=True)
    return _run([directory / "render"], directory, [template, cases])


def _run(command, directory, given):
    done = subprocess.run(command, cwd=directory, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ENGINES = [
    render_jinja2,
    render_minijinja,
    render_node,
    pytest.param(render_llama_cpp, marks=pytest.mark.thorough),
]
