"""Loading and saving that every model shares: safetensors only, and model repositories that bring their code."""

import os

from torch import nn
from transformers import PreTrainedModel

from .layers import Linear
from .weight_files import unsafe_weights


class SavedPreTrainedModel(PreTrainedModel):
    """
    The base class of all models. Weights come from safetensors files only, because unpickling others may run code.
    What is pushed to the Hub loads where this package is not installed.
    """

    def post_init(self) -> None:
        """
        As in transformers. In a model to be quantised the layers below the head become plain ones: bitsandbytes'
        integration replaces no others, and would replace a head that no checkpoint has yet.
        """
        if getattr(self.config, "quantization_config", None) is not None:
            for module in self.base_model.modules():
                if type(module) is Linear:
                    module.__class__ = nn.Linear
        super().post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        As in transformers, with `use_safetensors=True`.

        Raises:
            ValueError: if there are no weights in safetensors, only in files that `subquad convert` converts.
        """
        path = pretrained_model_name_or_path
        if path is not None and (files := unsafe_weights(path, kwargs)):
            names = ", ".join(sorted(file.name for file in files))
            source = files[0] if len(files) == 1 else files[0].parent
            raise ValueError(
                f"{path}: the weights are in {names}, and only safetensors files are loaded, because unpickling "
                f"others may run code. `subquad convert {source} OUT` makes a directory that loads."
            )
        return super().from_pretrained(path, *args, **kwargs | {"use_safetensors": True})

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        *args,
        self_contained: bool = False,
        **kwargs,
    ) -> None:
        """
        As in transformers. With `self_contained`, the code that the model needs is saved too: the directory loads with
        `trust_remote_code=True` where this package is not installed, and without remote code where it is. A model that
        was loaded from such a directory is always saved like this, because its configuration names the code. For a
        model with an adapter, only the adapter is saved, as in transformers.
        """
        if self._saved_by_transformers():
            super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, *args, **kwargs)
            return
        hub = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS if name in kwargs}
        super().save_pretrained(save_directory, is_main_process, state_dict, False, *args, **kwargs)
        if not is_main_process:
            return
        if self_contained or getattr(self.config, "auto_map", None) is not None:
            try:
                from subquad.hub import add_model_code
            except ImportError as error:
                raise ImportError("`self_contained=True` needs the package subquad.") from error
            add_model_code(save_directory)
        if push_to_hub:
            repo_id = hub.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
            self.push_to_hub(repo_id, source=save_directory, **hub)

    def push_to_hub(self, repo_id: str, **kwargs):
        """
        As in transformers, with the same arguments. The code that the model needs is uploaded too, with its license,
        and a card if there is none. The tokenizer has its own `push_to_hub`.

        Returns:
            the URL of the commit.
        """
        try:
            from subquad.push import push_model
        except ImportError:  # this file is a copy in a repository
            return super().push_to_hub(repo_id, **kwargs)
        if self._saved_by_transformers():
            return super().push_to_hub(repo_id, **kwargs)
        return push_model(self, repo_id, **kwargs)

    def _saved_by_transformers(self) -> bool:
        """Whether transformers copies the code itself (of a model loaded with its code) or saves only an adapter."""
        return self.is_remote_code() or getattr(self, "_hf_peft_config_loaded", False)


_PUSH_ARGUMENTS = (
    "repo_id",
    "token",
    "private",
    "commit_message",
    "commit_description",
    "create_pr",
    "revision",
    "tags",
)
