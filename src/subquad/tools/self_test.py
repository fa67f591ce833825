"""
A self-test of this installation: the embedded models read a text, and their logits must match stored ones, which come
from the recurrences as written in the papers, in float64.

`python -m subquad.tools.self_test` writes them to `self_test.json`.
"""

import functools
import json
import os
from pathlib import Path

import torch
import transformers

from .. import lm_auto_class
from ..hub.info import embedded_model, known_names
from ..modeling.self_check import difference_of_cache


REFERENCES = Path(__file__).parent / "self_test.json"
TOLERANCE = 1e-3
TOKENS = 90  # more than one chunk or window of every embedded model
EVERY = 8  # one in this many logits is compared


@functools.lru_cache(maxsize=1)  # `subquad doctor` needs two results from each model
def _load(name: str, device: str | torch.device, dtype: torch.dtype) -> transformers.PreTrainedModel:
    path = embedded_model(name)
    model_type = transformers.AutoConfig.from_pretrained(path).model_type
    auto_class = getattr(transformers, lm_auto_class(model_type))
    return auto_class.from_pretrained(path, dtype=dtype).eval().to(device)


def logits_of(name: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> list[list[float]]:
    """
    Some logits of an embedded model: after a text in one call and, if the model keeps a state, one more token.
    """
    model = _load(name, device, dtype)
    ids = 2 + torch.arange(TOKENS + 1, device=device)[None] ** 2 % 100
    with torch.no_grad():
        out = model(ids[:, :-1])
        found = [out.logits[0, -1]]
        if model.can_generate():
            found.append(model(ids[:, -1:], cache=out.cache).logits[0, -1])
    return [logits[::EVERY].double().tolist() for logits in found]


def difference_of_generate(name: str, device: str | torch.device = "cpu") -> float:
    """See [`difference_of_cache`], for an embedded model; 0 for an encoder, which does not generate."""
    model = _load(name, device, torch.float32)
    return difference_of_cache(model) if model.can_generate() else 0.0


def stored_logits() -> dict[str, list[list[float]]]:
    """The expected results of [`logits_of`], by name of the model."""
    return json.loads(REFERENCES.read_text(encoding="utf-8"))


def difference(found: list[list[float]], expected: list[list[float]]) -> float:
    """The largest difference of two logits; NaN if any logit is NaN."""
    return (torch.tensor(found) - torch.tensor(expected)).abs().max().item()


if __name__ == "__main__":
    os.environ["SUBQUAD_BACKEND"] = "reference"
    names = known_names()["embedded models"]
    logits = {name: logits_of(name, dtype=torch.float64) for name in names}
    rounded = {name: [[round(x, 5) for x in row] for row in rows] for name, rows in logits.items()}
    REFERENCES.write_text(f"{json.dumps(rounded, indent=2)}\n", encoding="utf-8")
