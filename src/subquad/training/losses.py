"""Losses for `Trainer(compute_loss_func=...)`: [`l2wrap_loss`]."""

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput


def l2wrap_loss(
    outputs: ModelOutput,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    *,
    factor: float = 1e-4,
) -> torch.Tensor:
    """
    The loss of a causal model with L2Wrap, as RWKV models are pretrained: the largest logit of each position is pulled
    towards zero, so that logits do not keep growing. The value is the cross-entropy alone. The gradient also
    has `factor` times the largest logit, at this logit, as a mean over the positions that predict a label.

    ```python
    trainer = Trainer(model, arguments, compute_loss_func=l2wrap_loss, ...)
    ```

    Args:
        outputs: of the model, with `logits` (batch, length, vocabulary).
        labels: (batch, length) ids to predict, shifted here; -100 is ignored. The first token of a text that is padded
            on the left counts, although no token predicts it, so pad on the right.
        num_items_in_batch: divisor of the sums; if None, the number of positions that predict a label.
        factor: strength of the pull; 1e-4 in the trainers of RWKV.
    """
    logits = outputs.logits
    predicting = (labels[:, 1:] != -100).to(logits.device)
    largest = logits[:, :-1].max(-1).values.float()
    count = predicting.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).to(logits.device)
    count = count.clamp_min(1)  # if there are none, their sum is 0
    loss = ForCausalLMLoss(logits, labels, logits.shape[-1], count)
    pull = factor / 2 * torch.where(predicting, largest, 0).square().sum() / count
    return loss + (pull - pull.detach())
