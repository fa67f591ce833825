"""Small byte-level BPEs of the kinds that Avey's and Avey-B's models are published with."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


END = "<|endoftext|>"
TEXT = "The Eiffel tower is in Paris, and the Atomium is in Brussels; neither is in L'Aquila or in 東京.\n  Once upon…"


def write_byte_level_bpe(directory: Path, vocabulary: int = 300, **config) -> Tokenizer:
    """Writes `tokenizer.json` and, with these fields, `tokenizer_config.json`; None leaves a field out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END} | config
    fields = {name: value for name, value in fields.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return tokenizer


def encoder_tokenizer(text: str = TEXT, vocabulary: int = 300) -> PreTrainedTokenizerFast:
    """A text becomes [CLS] text [SEP], a pair [CLS] text [SEP] text [SEP]; [MASK] takes the space before it along."""
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*names.values(), AddedToken("[MASK]", lstrip=True, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)
