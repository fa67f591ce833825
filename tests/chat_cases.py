"""Tiny models that talk."""

import torch
from cases import CASES
from transformers import GenerationConfig

from subquad_conversion.vocabularies import vocabulary_of
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast


# What a template of the tiny models puts after an answer. They only say letters.
END = "#"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ 'END' if m.role == 'assistant' else '|' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% if thinking is defined and thinking %} <think{% endif %}{% endif %}"
)
SILENT = [n for n in range(128) if not chr(n).isalpha()]


def save_model(path, case=CASES["rwkv6"], end=END, template=TEMPLATE, seed=0):
    """A tiny model over bytes whose most likely token changes."""
    model = case.model(seed=seed, vocab_size=128, num_hidden_layers=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    model.generation_config.suppress_tokens = SILENT
    model.save_pretrained(path)
    ByteTokenizer(chat_template=template.replace("END", end)).save_pretrained(path)
    return path


def save_speaker(path, chain):
    """
    A tiny model of World's vocabulary after whose tokens the next ones of `chain` come, a text without a token twice,
    and a tokenizer, with the generation configuration of a converted one.
    """
    tokenizer = RwkvWorldTokenizerFast()
    ids = tokenizer.encode(chain)
    assert len({*ids}) == len(ids), tokenizer.convert_ids_to_tokens(ids)
    model = CASES["rwkv6"].model(vocab_size=65536)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("output.weight", "feed_forward.value.weight")):  # only the last token matters
                weight.zero_()
        hidden = model.base_model(torch.tensor([ids]).T).last_hidden_state[:, 0]
        head = model.get_output_embeddings().weight.zero_()
        head[ids[1:]] = 100 * torch.nn.functional.normalize(hidden[:-1])
    model.generation_config = GenerationConfig(eos_token_id=0, chat_stops=vocabulary_of(tokenizer).chat_stops)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
