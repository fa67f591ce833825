"""Diagrams of the blocks, as SVG that takes its colours from the page."""

from dataclasses import dataclass, field
from html import escape


WIDTH, BOX, GAP, MARGIN = 640, 46, 26, 12


@dataclass(frozen=True)
class Box:
    """One operation: its name, and below it what it computes. A state is carried from token to token."""

    name: str
    detail: str = ""
    is_state: bool = False


@dataclass(frozen=True)
class Diagram:
    """
    Rows of boxes, which are computed from top to bottom.

    Attributes:
        description: text for readers who cannot see the picture.
        residual: whether the input of the first row is added to the output of the last one.
    """

    title: str
    description: str
    rows: list[list[Box]] = field(default_factory=list)
    residual: bool = True


def _rows(*rows: list[tuple]) -> list[list[Box]]:
    return [[Box(*box) for box in row] for row in rows]


DIAGRAMS = {
    "rwkv5": Diagram(
        "A time mixing of Eagle",
        "Token shift feeds receptance, key, value and gate; the state decays by a learned rate and takes in key and "
        "value; the norm of each head, the gate and the output projection follow.",
        _rows(
            [("token shift", "the token and the one before, mixed by learned weights")],
            [("r", "receptance"), ("k", "key"), ("v", "value"), ("g", "gate")],
            [("S ← diag(w) S + kᵀv", "one matrix for each head; w is learned", True)],
            [("r (S + diag(u) kᵀv)", "what the token reads")],
            [("norm of each head, × SiLU(g), output projection",)],
        ),
    ),
    "rwkv6": Diagram(
        "A time mixing of Finch",
        "As in Eagle, but the token shift and the decay depend on the text through low-rank maps.",
        _rows(
            [("token shift, ddlerp", "how much of the token before: depends on both tokens")],
            [("r", "receptance"), ("w", "decay"), ("k", "key"), ("v", "value"), ("g", "gate")],
            [("S ← diag(w) S + kᵀv", "one matrix for each head; w depends on the token", True)],
            [("r (S + diag(u) kᵀv)", "what the token reads")],
            [("norm of each head, × SiLU(g), output projection",)],
        ),
    ),
    "rwkv7": Diagram(
        "A time mixing of Goose",
        "Token shift feeds receptance, decay, key, value, replacement rate and gate. The state decays, loses a part "
        "of its content under the key, and takes in the new value.",
        _rows(
            [("token shift", "six mixtures of the token and the one before")],
            [("r", "receptance"), ("w", "decay"), ("k, κ", "keys"), ("v", "value"), ("a", "rate"), ("g", "gate")],
            [("S ← S (diag(w) − κᵀ(a ⊙ κ)) + vᵀk", "decay, remove the readout of κ, write", True)],
            [("S rᵀ, norm of each head, + (r · ρ ⊙ k) v", "ρ: the bonus of the current token")],
            [("× g, output projection",)],
        ),
    ),
    "rwkv7_deep_embed": Diagram(
        "A block of RWKV-7b",
        "Goose's time mixing and one head of attention read the stream; the channel mixing has a factor. Rows of "
        "tables, by token id, make the keys, the values and the factor. RWKV-7a has no attention.",
        _rows(
            [("time mixing", "as in Goose", True), ("attention", "capped scores; keys of all tokens", True)],
            [("k, v × rows of two tables", "by token id; RWKV-7b alone")],
            [("relu²", "inner activation of the channel mixing"), ("× factor", "from a row of a third table")],
            [("output projection",)],
        ),
    ),
    "avey": Diagram(
        "Avey",
        "A ranker retrieves earlier splits; the neural processor enriches, contextualizes and fuses.",
        _rows(
            [("ranker", "finds the earlier splits that are most like this one", True)],
            [("enricher", "more features for each token: head and tail")],
            [("head", "goes on as it is"), ("tail", "is contextualized")],
            [("contextualizer", "cosine similarities × a learned matrix, gated")],
            [("fuser", "back to the width of the embedding")],
        ),
    ),
    "avey_b": Diagram(
        "Avey-B",
        "A ranker retrieves earlier splits, a compressor shortens them, and static and dynamic layers alternate.",
        _rows(
            [("ranker", "finds the earlier splits that are most like this one")],
            [("compressor", "this split and the retrieved ones become the rows of one split")],
            [("static layer", "a learned matrix mixes the rows")],
            [("dynamic layer", "the similarity of the rows mixes them")],
            [("fuser", "back to the width of the embedding")],
        ),
    ),
    "raven": Diagram(
        "A slot memory of Raven",
        "A router chooses slots; these decay and take in the token, all others keep their content; the token reads "
        "all slots by softmax.",
        _rows(
            [("q", "query"), ("k", "key"), ("v", "value"), ("router", "top k slots"), ("decay", "of those slots")],
            [("slots ← f ⊙ slots + (1 − f) ⊙ (k, v)", "f = 1 where the router did not choose a slot", True)],
            [("softmax(q · keys of the slots) · values", "the token reads all slots")],
            [("norm, gate, output projection",)],
        ),
    ),
    "gecko": Diagram(
        "The first half of a block of Gecko",
        "Timestep decay normalisation, a complex moving average, attention over two chunks, and a working memory.",
        _rows(
            [("timestep decay normalization", "decayed mean and variance", True)],
            [("moving average (CEMA)", "complex, damped, one for each channel", True)],
            [("q, k", "attention"), ("v", "value"), ("q, k", "memory"), ("r", "gate")],
            [
                ("sliding chunk attention", "this chunk and the one before"),
                ("working memory", "all earlier chunks", True),
            ],
            [("attended × gate + remembered, output projection",)],
        ),
    ),
    "rwkv7_embedding": Diagram(
        "EmbeddingRWKV",
        "Goose reads the text and its end token; the head of a task makes an embedding of the end token's output.",
        _rows(
            [("text, end token",)],
            [("Goose", "a state of constant size", True)],
            [("p", "output at the end token")],
            [("norm of p + W₂ relu(W₁ p)", "one head for each task")],
            [("embedding",)],
        ),
        residual=False,
    ),
    "rwkv7_reranker": Diagram(
        "EmbeddingRWKV's reranker",
        "Goose reads the document, whose states can be saved, then the query. The reranker's blocks read one learned "
        "token after the states of its layers, and give a score.",
        _rows(
            [("document", "read once"), ("query, end token",)],
            [("Goose", "its states after the document may be saved", True)],
            [("a learned token", "input of the reranker"), ("states", "of the layers, after the query", True)],
            [("blocks of Goose", "one token, each after the state of a layer")],
            [("score",)],
        ),
        residual=False,
    ),
    "visual_rwkv": Diagram(
        "VisualRWKV",
        "Vision towers turn an image into patches, a projection into embeddings, and Eagle, Finch or Goose reads them "
        "together with the text.",
        _rows(
            [("image",), ("text with <image>",)],
            [("vision towers", "features of each patch"), ("tokenizer", "ids")],
            [("projection", "to the model's width"), ("embedding",)],
            [("Eagle, Finch or Goose", "a state of constant size", True)],
            [("answer",)],
        ),
        residual=False,
    ),
}


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{style}">{escape(text)}</text>'


def svg(diagram: Diagram) -> str:
    """The diagram as an `<svg>` element for a page with the classes of `subquad.css`."""
    inner = WIDTH - 2 * MARGIN - (60 if diagram.residual else 0)
    step = BOX + GAP
    height = step * len(diagram.rows) + 2 * GAP - GAP + 2 * MARGIN
    centre = MARGIN + inner / 2
    parts = []
    for number, row in enumerate(diagram.rows):
        y = MARGIN + GAP + number * step
        width = (inner - 10 * (len(row) - 1)) / len(row)
        for column, box in enumerate(row):
            x = MARGIN + column * (width + 10)
            middle = x + width / 2
            parts.append(f'<path d="M{middle:.0f} {y - GAP + 4}V{y - 3}" class="arrow"/>')
            style = "state" if box.is_state else "box"
            parts.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BOX}" rx="6" class="{style}"/>')
            parts.append(_text(middle, y + (19 if box.detail else 28), box.name, "name"))
            if box.detail:
                parts.append(_text(middle, y + 36, box.detail, "detail"))
    end = MARGIN + GAP + len(diagram.rows) * step - GAP
    parts.append(f'<path d="M{centre:.0f} {end + 4}V{end + GAP - 3}" class="arrow"/>')
    if diagram.residual:
        x, top = MARGIN + inner + 24, MARGIN + 6
        start = centre if len(diagram.rows[0]) == 1 else centre + 40  # no arrow starts there
        parts.append(f'<path d="M{start:.0f} {top}H{x}V{end + 14}H{centre + 8:.0f}" class="arrow"/>')
        parts.append(_text(x + 14, (top + end) / 2, "+", "name"))
    return (
        f'<svg class="diagram" role="img" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">\n'
        f"<title>{escape(diagram.title)}</title><desc>{escape(diagram.description)}</desc>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>\n' + "\n".join(parts) + "\n</svg>\n"
    )
