"""
Looks for links within a built site that lead nowhere, and ends with status 1 if there are any.

    python docs/links.py build/docs
"""

import os
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and the anchors that others may link to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src"):
                self.links.add(value or "")
            elif name == "id":
                self.anchors.add(value or "")


def dead_links(folder: Path) -> list[str]:
    """Each link of the pages in `folder` whose file or anchor there is none of, as "PAGE: LINK"."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in sorted(page.links):
            scheme, host, target, _, anchor = urlsplit(link)
            if scheme or host:
                continue
            to = Path(os.path.normpath(path.parent / unquote(target))) if target else path
            to = to / "index.html" if to.is_dir() else to
            known = pages[to].anchors | {""} if to in pages else {anchor}
            if not to.exists() or unquote(anchor) not in known:
                dead.append(f"{path.relative_to(folder)}: {link}")
    return dead


if __name__ == "__main__":
    dead = dead_links(Path(sys.argv[1]))
    print("\n".join(dead))
    sys.exit(bool(dead))
