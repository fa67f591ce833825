"""Equations as MathML, which browsers draw themselves, so the site needs no script."""

import html

from docutils import nodes
from latex2mathml.converter import convert


def _visit_inline(translator, node: nodes.math) -> None:
    translator.body.append(convert(html.unescape(node.astext())))
    raise nodes.SkipNode


def _visit_block(translator, node: nodes.math_block) -> None:
    translator.body.append(convert(html.unescape(node.astext()), display="block"))
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
