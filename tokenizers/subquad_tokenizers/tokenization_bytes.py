"""A tokenizer for ABC music: one token for each ASCII character."""

import tokenizers
from tokenizers import decoders, models, normalizers
from transformers import AddedToken, PreTrainedTokenizerFast

from .tokenization_base import SelfContainedMixin


# Letters and signs in titles of tunes with an obvious spelling in ASCII but no decomposition.
_SPELLINGS = {
    "[‘’‚′]": "'",
    "[“”„″«»]": '"',
    "[‐‑‒–—―−]": "-",
    "♯": "#",
    "♭": "b",
    "♮": "=",
    "⁄": "/",
    "ß": "ss",
    "æ": "ae",
    "Æ": "AE",
    "œ": "oe",
    "Œ": "OE",
    "ø": "o",
    "Ø": "O",
    "đ": "d",
    "Đ": "D",
    "ð": "d",
    "Ð": "D",
    "þ": "th",
    "Þ": "Th",
    "ł": "l",
    "Ł": "L",
    "ı": "i",
}

VOCAB_SIZE = 128
DOCUMENT_BOUNDARY = "\0"


class ByteTokenizer(SelfContainedMixin, PreTrainedTokenizerFast):
    """
    Byte-level tokenizer with V = 128 tokens, for music in ABC notation (section 10.1 of "Eagle and Finch",
    arXiv:2404.05892). An id is the ASCII code of its character. Id 0, the character NUL, is the boundary between
    documents: it is the BOS, EOS and padding token, and is left out when special tokens are skipped in decoding.

    ASCII text decodes to itself. In other text, accents are removed and compatibility characters are decomposed (é
    becomes e, ﬁ becomes fi). Quotation marks, dashes, ♯, ♭ and some letters get an ASCII spelling. Every other
    character becomes a question mark.

    It needs no files: `ByteTokenizer()`.

    Args:
        tokenizer_file: path of a `tokenizer.json` that this class saved.
        bos_token: the token that begins a document.
        eos_token: the token that ends a document.
        pad_token: the padding token.
        padding_side: "left" by default, which generation needs.
        kwargs: as in `PreTrainedTokenizerFast`.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        tokenizer_file: str | None = None,
        bos_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        eos_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        pad_token: str | AddedToken | None = DOCUMENT_BOUNDARY,
        **kwargs,
    ):
        if tokenizer_file is None and kwargs.get("tokenizer_object") is None:
            self._tokenizer = _build_backend()
        kwargs["backend"] = "tokenizers"
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(
            tokenizer_file=tokenizer_file, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, **kwargs
        )

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs):
        """Leaves the files to `__init__`: the base class would rebuild the tokenizer from parts of a file."""
        return kwargs


def _build_backend() -> tokenizers.Tokenizer:
    # Without merges, BPE makes a token of each character.
    backend = tokenizers.Tokenizer(models.BPE(vocab={chr(code): code for code in range(VOCAB_SIZE)}, merges=[]))
    spellings = [normalizers.Replace(tokenizers.Regex(source), target) for source, target in _SPELLINGS.items()]
    other = normalizers.Replace(tokenizers.Regex(r"[^\x00-\x7f]"), "?")
    # The spellings come after NFKD, for letters that also have an accent, such as ǿ.
    backend.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), *spellings, other])
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(DOCUMENT_BOUNDARY, normalized=False, special=True)])
    return backend
