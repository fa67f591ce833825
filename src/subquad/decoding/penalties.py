"""RWKV's sampling: penalties for tokens that were generated before, which decay."""

import math
from numbers import Real

import torch
from transformers import LogitsProcessor

from ..modeling.arguments import check_counts


class DecayingPenaltyLogitsProcessor(LogitsProcessor):
    """
    Lowers the scores of the tokens that were generated before, as RWKV's runtime does: every such token by `presence`,
    and by `frequency` for each time that it was generated. A time counts 1 at the next token, and `decay` times as
    much at every token after that. The prompt does not count.

    ```python
    inputs = tokenizer("Once", return_tensors="pt")
    penalties = subquad.DecayingPenaltyLogitsProcessor(inputs["input_ids"].shape[1])
    model.generate(**inputs, do_sample=True, logits_processor=[penalties])
    ```

    It keeps nothing between two tokens, so it is exact for every row of a batch, also in beam search.

    Args:
        prompt_length: the number of ids that are given to `generate`, padding included; 0 if only `inputs_embeds` are.
        presence: what is subtracted from the score of every token that was generated.
        frequency: what is subtracted in addition for each time.
        decay: from 0 to 1; 1 means no decay.

    Raises:
        ValueError: if a number is not in its range, or not finite.
    """

    def __init__(self, prompt_length: int, presence: float = 0.3, frequency: float = 0.3, decay: float = 0.996):
        check_counts(0, prompt_length=prompt_length)
        for name, value in {"presence": presence, "frequency": frequency, "decay": decay}.items():
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"`{name}` must be a finite number, got {value!r}.")
        if not 0 <= decay <= 1:
            raise ValueError(f"`decay` must be from 0 to 1, got {decay!r}.")
        self.prompt_length = prompt_length
        self.presence, self.frequency, self.decay = presence, frequency, decay

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """
        Args:
            input_ids: (rows, tokens), the prompt and what was generated after it.
            scores: (rows, vocabulary), floating point.

        Returns:
            the lowered scores, in their dtype.

        Raises:
            ValueError: if there are fewer tokens than the prompt has.
        """
        if input_ids.shape[1] < self.prompt_length:
            raise ValueError(f"`input_ids` has {input_ids.shape[1]} tokens, `prompt_length` is {self.prompt_length}.")
        generated = input_ids[:, self.prompt_length :]
        ages = torch.arange(generated.shape[1] - 1, -1, -1, dtype=torch.float32, device=scores.device)
        weights = (self.frequency * self.decay**ages).expand(generated.shape)
        penalties = torch.zeros(scores.shape, device=scores.device)
        penalties.scatter_(1, generated, self.presence).scatter_add_(1, generated, weights)
        return (scores - penalties).to(scores.dtype)


__all__ = ["DecayingPenaltyLogitsProcessor"]
