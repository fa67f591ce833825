"""Checks that `generate` still passes the cache on in untested newer versions of transformers or torch."""

import copy
import os

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .versions import describe_tested, newer_than_tested


logger = logging.get_logger(__name__)
VARIABLE = "SUBQUAD_SELF_CHECK"
# Half precision may differ by this part of the largest logit. A step with an empty state differs by far more.
TOLERANCE = 0.05
PROMPT = (1, 2, 3, 4)
_checked: set[type] = set()


@torch.no_grad()
def difference_of_cache(model: GenerationMixin, device: torch.device | None = None) -> float:
    """
    The largest difference between the logits of a step of `generate` with a cache and without one, relative to the
    largest logit. The step reads a fixed token after a fixed prompt, so nothing is sampled.

    Args:
        device: device of the tokens; the weights of an offloaded model may be on none.
    """
    prompt = torch.tensor([PROMPT], device=device or model.device)
    options = {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    # Without EOS, sampling, and other settings of the model's own configuration.
    plain = copy.copy(model)  # other threads may use the model
    plain.generation_config = GenerationConfig(pad_token_id=0)
    logits = [
        GenerationMixin.generate(
            plain,
            prompt,
            attention_mask=torch.ones_like(prompt),
            prefix_allowed_tokens_fn=lambda row, ids: [PROMPT[0]],
            use_cache=use_cache,
            **options,
        ).logits[1]
        for use_cache in (True, False)
    ]
    return ((logits[0] - logits[1]).abs().max() / logits[1].abs().max().clamp_min(1e-30)).item()


def check_once(model: GenerationMixin, device: torch.device | None = None) -> None:
    """
    Checks the class of a model before its first text, if transformers or torch is newer than what was tested.
    `SUBQUAD_SELF_CHECK=0` turns this off.

    Raises:
        RuntimeError: if `generate` with a cache differs from `generate` without one.
        ValueError: if `SUBQUAD_SELF_CHECK` is neither 0 nor 1.
    """
    if (value := os.environ.get(VARIABLE) or "1") not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}.")
    if type(model) in _checked or model.training or value == "0":
        return
    if newer := newer_than_tested():
        untested = f"{' and '.join(newer)}: newer than what was tested. {describe_tested()}"
        if not difference_of_cache(model, device) <= TOLERANCE:
            raise RuntimeError(
                f"{untested} `generate` of {type(model).__name__} gives other logits with the cache than without it. "
                f"Install versions that were tested, or a newer subquad. {VARIABLE}=0 turns this check off."
            )
        logger.warning_once(f"{untested} A short check of `generate` passed.")
    _checked.add(type(model))
