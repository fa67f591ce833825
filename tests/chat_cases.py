"""Tiny models that talk."""

import torch
from cases import CASES

from subquad_tokenizers import ByteTokenizer


# What a template of the tiny models puts after an answer. They only say letters.
END = "#"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ 'END' if m.role == 'assistant' else '|' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% if thinking is defined and thinking %} <think{% endif %}{% endif %}"
)
SILENT = [n for n in range(128) if not chr(n).isalpha()]


def save_model(path, case=CASES["rwkv6"], end=END, template=TEMPLATE, seed=0):
    """A tiny model over bytes whose most likely token changes."""
    model = case.model(seed=seed, vocab_size=128)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    model.generation_config.suppress_tokens = SILENT
    model.save_pretrained(path)
    ByteTokenizer(chat_template=template.replace("END", end)).save_pretrained(path)
    return path
