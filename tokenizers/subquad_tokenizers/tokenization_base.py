"""What the tokenizers of this package add to those of transformers: saving and pushing with their code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class SelfContainedMixin:
    """
    Mixin of a tokenizer, before the class of transformers. What is pushed to the Hub holds the tokenizer's code, and
    `AutoTokenizer.from_pretrained(..., trust_remote_code=True)` loads it where this package is not installed.
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
        As in transformers; with `self_contained` or `push_to_hub`, and where it was loaded from such a directory, the
        tokenizer's code goes along.
        """
        with self._with_code(self_contained or push_to_hub or "auto_map" in self.init_kwargs):
            return super().save_pretrained(save_directory, legacy_format, filename_prefix, push_to_hub, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        """As in transformers; the tokenizer's code goes along."""
        with self._with_code():
            return super().push_to_hub(*args, **kwargs)

    @contextmanager
    def _with_code(self, code: bool = True) -> Iterator[None]:
        # transformers copies the code of a class that is registered so, and the modules that this imports.
        if not code or self._auto_class is not None:
            yield
            return
        self._auto_class = "AutoTokenizer"
        try:
            yield
        finally:
            del self._auto_class
