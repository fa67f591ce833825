"""
lm-evaluation-harness with states: shared beginnings of a task's questions, such as the examples of a few-shot prompt,
are read once, and each question is read once for all of its answers.

    python examples/lm_eval/with_states.py run --model subquad --model_args pretrained=./finch-1b6 \
        --tasks arc_easy --num_fewshot 5

takes the options of `lm_eval` and gives the scores of `--model hf`. Questions are scored one at a time; `--batch_size`
is for tasks that generate. On a GPU, this pays off with long shared beginnings.
"""

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from subquad import PrefixCache


@register_model("subquad")
class StateLM(HFLM):
    """
    Args:
        state_bytes: memory for states.
        others: see `HFLM`.
    """

    def __init__(self, *args, state_bytes: int = 2**30, **kwargs):
        super().__init__(*args, **kwargs)
        self.prefixes = PrefixCache(int(state_bytes), shortest=1)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
        # Sorted by their tokens, texts with the same beginning are neighbours.
        order = sorted(range(len(requests)), key=lambda n: (requests[n][1], requests[n][2]))
        answers = {}
        for n in tqdm(order, disable=disable_tqdm, desc="Running loglikelihood requests"):
            request, context, continuation = requests[n]
            ids = (context + continuation)[-(self.max_length + 1) :]
            # The last token of the question is read with the answer, whose first token it predicts.
            known = len(ids) - len(continuation) - 1
            cache = self.prefixes.read(self.model, ids[:known])
            rest = torch.tensor(ids[known:], device=self.device)
            logits = self.model(rest[None, :-1], cache=cache).logits[0].float().log_softmax(-1)
            score = logits.gather(1, rest[1:, None]).sum()
            answers[n] = score.item(), bool((logits.argmax(-1) == rest[1:]).all())
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answers[n])
        return [answers[n] for n in range(len(requests))]

    def _model_generate(self, context, max_length, stop, **options):
        if len(context) == 1 or options.get("attention_mask") is not None:
            options["prefix_cache"] = self.prefixes
        return super()._model_generate(context, max_length, stop, **options)


if __name__ == "__main__":
    import subquad  # noqa: F401, which registers the architectures

    cli_evaluate()
