"""Every block of code in the README and on the site runs, in the order of its page, or says why it does not."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import tiny_config
from markdown_it import MarkdownIt
from pages import run_page
from PIL import Image
from retrieval_cases import save_pair
from transformers import AutoModelForCausalLM
from visual_cases import save_visual

import subquad
from subquad_tokenizers import RwkvWorldTokenizerFast


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "_generated" not in path.parts)]
REASON = re.compile(r"<!-- not run: (.+) -->\s*")
NAME = re.compile(r"\bsubquad(?:_[a-z]+)?(?:\.[a-zA-Z]\w*)+")
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
# What is shown and not run: output, and files that a reader writes.
NO_CODE = {"text", "yaml", "json", "dockerfile"}


def blocks(page):
    """The language, the code and the reason not to run it of each block of a page; not the directives of the site."""
    found, reason = [], None
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence" and not token.info.startswith("{"):
            found.append((token.info, token.content, reason))
        match = REASON.fullmatch(token.content) if token.type == "html_block" else None
        reason = match and match[1]
    return found


def runnable(page):
    return [(language, code) for language, code, reason in blocks(page) if not reason and language not in NO_CODE]


def each(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What the pages call `./finch-1b6`, `photo.jpg`, ...: tiny models of the same architecture, and a picture."""
    path = tmp_path_factory.mktemp("pages")
    (path / "finch-1b6").symlink_to(subquad.embedded_model("finch-abc"))
    tokenizer = RwkvWorldTokenizerFast()
    AutoModelForCausalLM.from_config(tiny_config("rwkv7", vocab_size=65536)).save_pretrained(path / "goose-0.4b")
    tokenizer.save_pretrained(path / "goose-0.4b")
    save_visual(path / "visual-1b6")
    save_pair(path)
    (path / "notes").mkdir()
    (path / "notes/food.md").write_text("# Food\n\nBread needs flour.\n\nSoup needs vegetables.\n")
    Image.new("RGB", (64, 48), "orange").save(path / "photo.jpg")
    return path


@each(PAGES)
def test_blocks_have_a_language_and_links_a_target(page):
    for language, code, reason in blocks(page):
        assert language in {"python", "bash", *NO_CODE}, code
        assert reason is None or language not in NO_CODE, code
    text = page.read_text(encoding="utf-8")
    for target, _ in LINK.findall(text):
        if target and not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), target


def names(page):
    """The names of our packages in the code that stands inside sentences."""
    inline = [
        child.content
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        for child in token.children or ()
        if child.type == "code_inline"
    ]
    return sorted({name for code in inline for name in NAME.findall(code)})


@pytest.mark.quick_cases("README.md", "docs/start.md")
@each([page for page in PAGES if runnable(page) or names(page)])
def test_the_code_of_a_page_runs(page, directory, tmp_path):
    failed = run_page(page.name, runnable(page), names(page), directory, tmp_path / "output")
    assert failed is None, failed


def test_blocks_that_are_not_run_import_their_names(tmp_path):
    for number, page in enumerate(PAGES):
        code = "\n".join(code for language, code, _ in blocks(page) if language == "python")
        (tmp_path / f"{number}_{page.stem}.py").write_text(code)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--quiet", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_figures_are_those_of_the_records(tmp_path, monkeypatch):
    """
    Their texts, to which the numbers of bars belong; matplotlib's versions place lines differently. The themes differ
    in colours alone.
    """
    monkeypatch.syspath_prepend(DOCS)
    importlib.import_module("figures").main(tmp_path, ["light"])
    drawn, kept = (
        {path.name: re.findall("<!-- (.*?) -->", path.read_text(encoding="utf-8")) for path in folder.glob("*.svg")}
        for folder in (tmp_path, DOCS / "figures")
    )
    assert drawn | {name.replace("light", "dark"): texts for name, texts in drawn.items()} == kept
