"""A small byte-level BPE of the kind that Avey's models are published with."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


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
