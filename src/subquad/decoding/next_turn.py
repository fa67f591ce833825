"""Where the answer to a chat ends."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation import StoppingCriteria


# The shapes of the ids in `chat_stops`.
CHAT_STOPS = {"answer": (-1,), "turns": (-1, 2), "blank": (-1,), "line": (-1,), "newline": ()}


class NextTurnCriteria(StoppingCriteria):
    """
    Ends the answers to chats, the rows of `prompt` (N, T) whose last turn is an answer, where another turn begins. The
    ids are those of the generation configuration, `chat_stops`, which `subquad convert` writes. It needs no tokenizer.
    """

    def __init__(self, stops: dict[str, Any], prompt: torch.Tensor):
        try:
            self.ids = {
                name: torch.tensor(stops[name], dtype=torch.long, device=prompt.device).view(shape)
                for name, shape in CHAT_STOPS.items()
            }
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"`chat_stops` of the generation configuration is damaged: {error!r}.") from error
        answer, *turns = (_last_place(prompt, part) for part in (self.ids["answer"], *self.ids["turns"]))
        self.chats = answer > torch.stack(turns).amax(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs) -> torch.Tensor:
        ids, end = self.ids, F.pad(input_ids[:, -4:], (max(0, 4 - input_ids.shape[1]), 0), value=-1)
        second_newline = (end[:, 1] == ids["newline"]) & torch.isin(end[:, 0], ids["line"])
        blank = torch.isin(end[:, 1], ids["blank"]) | second_newline
        chats = self.chats.repeat_interleave(len(end) // len(self.chats))  # one for each beam
        return chats & blank & (end[:, None, 2:] == ids["turns"]).all(-1).any(-1)


def _last_place(ids: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Where `part` (K,) last ends in each row of `ids` (N, T); 0 if it is not there."""
    found = (F.pad(ids, (len(part), 0), value=-1).unfold(1, len(part), 1) == part).all(-1)
    return (found * torch.arange(found.shape[1], device=ids.device)).amax(1)
