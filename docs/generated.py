"""The parts of the site that are made from the package: tables, the commands' help, diagrams, stored records."""

import importlib
import json
import re
import sys
from pathlib import Path

from diagrams import DIAGRAMS, svg

import subquad_cli as cli
from subquad.hub import info, support
from subquad.models import REGISTRY


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.evaluation import TASKS, figures, report, runs  # noqa: E402


# Files that are copied into the site from other folders, by the name of their page.
RECORDS = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def presets_table(model_type: str) -> str:
    """The presets of one architecture: exact counts, and the state between two tokens."""
    rows = []
    for name in REGISTRY[model_type].presets:
        numbers = info.describe(name)
        state = info.labelled(numbers).get("state", "nothing")
        rows.append(
            [f"`{name}`", f"{numbers.parameters:,}", str(numbers.num_hidden_layers), f"{numbers.hidden_size:,}", state]
        )
    return markdown_table(["preset", "parameters", "layers", "width", "kept between two tokens"], rows)


def schedules_table() -> str:
    """The learning rates of pretraining; of architectures with the same recipe only once."""
    recipes = {}
    for architecture in REGISTRY.values():
        if not architecture.processor:  # the recipe of its text model
            recipes.setdefault(id(architecture.recipe), []).append(architecture)
    rows = [
        [", ".join(each.title for each in same), same[0].recipe.peak, same[0].recipe.warmup, same[0].recipe.decay]
        for same in recipes.values()
    ]
    return markdown_table(["architecture", "peak of the learning rate", "warm-up", "decay"], rows)


def classes() -> str:
    """A section for each architecture, with its configuration and models."""
    lines = []
    for architecture in REGISTRY.values():
        lines += [f"## {architecture.title}", "", "```{eval-rst}"]
        lines += [f".. autoclass:: subquad.{architecture.config}", "   :no-members:"]
        for name in dict.fromkeys(architecture.heads.values()):
            lines += [f".. autoclass:: subquad.{name}", "   :members: forward"]
        lines += ["```", ""]
    return "\n".join(lines)


def support_tables() -> dict[str, str]:
    """Tables of supported features by architecture, by file name; and of supported tools, side by side."""
    parts = {}
    for architecture in REGISTRY.values():
        rows = [list(row) for table in support.TABLES for row in support.rows(table, architecture)]
        parts[f"support-{architecture.folder}.md"] = markdown_table(["", architecture.title], rows)
    columns = [dict(support.rows("tools", architecture)) for architecture in REGISTRY.values()]
    rows = [[what, *(column[what] for column in columns)] for what in support.TABLES["tools"]]
    parts["table-tools.md"] = markdown_table(["", *(each.title for each in REGISTRY.values())], rows)
    return parts


def versions_table(record: list[dict]) -> str:
    """The results of `make test-versions`: a column for each set of versions."""

    def cell(result: dict | None) -> str:
        if result is None:
            return "not run"
        counts = [f"{result[name]} {name}" for name in ("passed", "failed", "skipped") if result[name]]
        return ", ".join(counts)

    def dates(entry: dict) -> str:
        found = sorted({result["date"] for result in entry["parts"].values()})
        return " to ".join(dict.fromkeys([found[0], found[-1]]))

    packages = dict.fromkeys(name for entry in record for name in entry["versions"])
    parts = dict.fromkeys(name for entry in record for name in entry["parts"])
    rows = [[f"`{name}`", *(entry["versions"].get(name, "") for entry in record)] for name in packages]
    rows += [[name.replace("-", " "), *(cell(entry["parts"].get(name)) for entry in record)] for name in parts]
    rows.append(["date", *map(dates, record)])
    return markdown_table(["", *(entry["environment"] for entry in record)], rows)


def commands_help() -> str:
    """A section for each command, with its help."""
    parser = cli.build_parser()
    parts = [f"```text\n{parser.format_help()}```\n"]
    subparsers = next(action for action in parser._actions if action.choices)
    for name, command in subparsers.choices.items():
        parts.append(f"## subquad {name}\n\n```text\n{command.format_help()}```\n")
    return "\n".join(parts)


def record(path: str) -> str:
    """A Markdown file of the tree without its title. Links to files that are no pages become plain text."""
    text = (ROOT / path).read_text(encoding="utf-8").partition("\n")[2]
    return LINK.sub(r"\1", text)


def evaluation() -> tuple[str, dict[str, str]]:
    """The page of the stored records of the evaluation, and its figures by file name."""
    lines, pictures = [], {}
    for task in TASKS:
        path = report.RESULTS / f"{task}.json"
        if not path.exists():
            continue
        module, record = importlib.import_module(f"examples.evaluation.{task}"), runs.read_record(path)
        lines += [f"## {module.TITLE}", "", *(f"- {finding}" for finding in module.findings(record)), ""]
        for name, figure in figures.draw(module, record).items():
            pictures[f"evaluation-{name}.svg"] = figures.to_svg(figure, record)
            lines += [f"![Figure of {name}; the table below has the numbers.](evaluation-{name}.svg)", ""]
        lines += [":::{dropdown} All numbers", markdown_table(*module.table(record)), ":::", ""]
        lines += ["Measured by", "", "```text", record["command"], "```", ""]
        lines += [f"on {record['date']} ({record['hardware']}, {runs.seeds_of(record)}).".replace("\n", ", "), ""]
        lines += [f"The cell that took longest took {report.longest(record)}", ""]
    return "\n".join(lines), pictures


def overview() -> str:
    """`llms.txt`: every page, with the first sentence of its text, for programs that read the site."""
    lines = ["# subquad", "", "> Sub-quadratic language models as ordinary Hugging Face models.", ""]
    for path in sorted(Path(__file__).parent.rglob("*.md")):
        if "_generated" in path.parts:
            continue
        title, *paragraphs = path.read_text(encoding="utf-8").split("\n\n")
        plain = next((text for text in paragraphs if text[0].isalpha()), "")
        sentence = re.split(r"(?<=[.:])\s", LINK.sub(r"\1", " ".join(plain.split())))[0]
        page = path.relative_to(Path(__file__).parent).with_suffix(".html").as_posix()
        lines.append(f"- [{title.removeprefix('# ').strip()}]({page}): {sentence}".rstrip(": "))
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Writes all parts that have changed into `folder`."""
    folder.mkdir(exist_ok=True)
    parts = support_tables()
    for model_type, architecture in REGISTRY.items():
        if architecture.presets:
            parts[f"presets-{architecture.folder}.md"] = presets_table(model_type)
    parts |= {f"diagram-{name}.svg": svg(diagram) for name, diagram in DIAGRAMS.items()}
    parts |= {name: record(path) for name, path in RECORDS.items()}
    parts["versions.md"] = versions_table(json.loads((ROOT / "docs/versions.json").read_text(encoding="utf-8")))
    parts["classes.md"] = classes()
    parts["schedules.md"] = schedules_table()
    parts["commands.md"] = commands_help()
    parts["evaluation.md"], pictures = evaluation()
    parts |= pictures
    parts["llms.txt"] = overview()
    parts["embedded.md"] = markdown_table(*report.embedded_models())
    for name, text in parts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
