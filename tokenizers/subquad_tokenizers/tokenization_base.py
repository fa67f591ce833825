"""Tokenizers that are saved and pushed together with their code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class SelfContainedMixin:
    """
    Mixin for tokenizers, placed before the class of transformers. A tokenizer that is pushed to the Hub loads also if
    this package is not installed.
    """

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
        push_to_hub: bool = False,
        *,
        self_contained: bool = False,
        **kwargs,
    ) -> tuple[str, ...]:
        """
        As in transformers. With `self_contained` or `push_to_hub`, the code of the tokenizer is saved too: the
        directory loads with `trust_remote_code=True` if this package is not installed, and without remote code if it
        is. The code is always saved if the tokenizer was loaded from such a directory.
        """
        with self._with_code(self_contained or push_to_hub or "auto_map" in self.init_kwargs):
            return super().save_pretrained(save_directory, legacy_format, filename_prefix, push_to_hub, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        """As in transformers. The code of the tokenizer is uploaded too."""
        with self._with_code():
            return super().push_to_hub(*args, **kwargs)

    @contextmanager
    def _with_code(self, code: bool = True) -> Iterator[None]:
        # transformers copies the module of a class with this attribute, and the modules that it imports.
        if not code or self._auto_class is not None:
            yield
            return
        self._auto_class = "AutoTokenizer"
        try:
            yield
        finally:
            del self._auto_class
