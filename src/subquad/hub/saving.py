"""Loading and saving of all models: safetensors only, and model repositories with their code."""

import os

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.arguments import PUSH_ARGUMENTS, known_arguments, parameter_names, refuse_unknown
from ..modeling.layers import Linear
from .foreign_files import listed


class SavedPreTrainedModel(PreTrainedModel):
    """
    The base class of all models. Weights come from safetensors files only, because unpickling others may run code.
    A model that is pushed to the Hub also loads without this package.
    """

    # Otherwise a rank would begin its part of the sequence with an empty state.
    _supports_context_parallel = False

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        """
        As in transformers, which would load a kernel for a model that never calls it.

        Raises:
            ValueError: if one is requested and the model does not use transformers' attention functions.
        """
        has_choice = self._supports_sdpa or self._supports_flash_attn or self._supports_flex_attn
        if not has_choice and attn_implementation not in (None, "eager"):
            raise ValueError(
                f"`attn_implementation` must be left out or 'eager', got {attn_implementation!r}: "
                f"{type(self).__name__} does not use the attention functions of transformers."
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def post_init(self) -> None:
        """
        As in transformers. In a model to be quantised, the layers below the head become plain ones: bitsandbytes'
        integration replaces no others, and would replace a head that no checkpoint has yet.
        """
        if getattr(self.config, "quantization_config", None) is not None:
            ours = [(name, part) for name, part in self.base_model.named_modules() if type(part) is Linear]
            for name, part in ours:
                plain = nn.Linear.__new__(nn.Linear)
                plain.__dict__.update(part.__dict__)
                self.base_model.set_submodule(name, plain)
        super().post_init()
        self.known_arguments = known_arguments(self)

    # package only
    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers. A byte with two 4-bit weights counts as two."""
        packed = [module.weight for module in self.modules() if getattr(module, "packed", False)]
        return super().num_parameters(only_trainable, exclude_embeddings) + sum(
            weight.numel() for weight in packed if weight.dtype == torch.uint8 and not only_trainable
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        As in transformers, with `use_safetensors=True`. Sizes that published configurations lack are read from the
        checkpoint's tensors.

        Raises:
            ValueError: if the weights are not in safetensors but in files for `subquad convert`; or if weights of the
                model are missing. A head may be missing: it is initialised, to be trained.
        """
        path = pretrained_model_name_or_path
        # package only
        if path is not None:
            from .weight_files import adapted_model, check_directory, check_weights, with_sizes

            check_directory(path)
            source = adapted_model(path, kwargs)
            check_weights(source, kwargs)
            kwargs = with_sizes(cls.config_class, source, kwargs)
        return super().from_pretrained(path, *args, **kwargs | {"use_safetensors": True})

    # package only
    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """As in transformers, for a model and for the base model of an adapter."""
        from .weight_files import check_room

        quantizer = load_config.hf_quantizer
        if checkpoint_files and (quantizer is None or hasattr(quantizer, "check_files")):
            check_room(model, checkpoint_files, packed=quantizer is not None)
            if quantizer is not None:
                quantizer.check_files(model, checkpoint_files)
        return PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info, *args, **kwargs):
        """As in transformers, after checking that all weights below the head were found and fit."""
        path = load_config.pretrained_model_name_or_path
        if loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes:
            name, stored, expected = sorted(loading_info.mismatched_keys)[0]
            raise RuntimeError(
                f"{path}: {name} has the shape {tuple(stored)}, but in the configuration's model it is "
                f"{tuple(expected)}. `ignore_mismatched_sizes=True` initialises such weights."
            )
        if hasattr(load_config.hf_quantizer, "check_loaded"):
            load_config.hf_quantizer.check_loaded(model, loading_info.missing_keys)
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info, *args, **kwargs)
        body = sorted(name for name in loading_info.missing_keys if name.startswith(prefix))
        if path is not None and body:
            message = f"{path}: these weights of {type(model).__name__} are missing: {listed(body)}."
            if others := sorted(loading_info.unexpected_keys):
                message += f" The model type is {model.config.model_type}, the files have {listed(others)}."
            raise ValueError(message)
        return loading_info

    # package only
    def load_adapter(self, peft_model_id: str | os.PathLike | None = None, *args, **kwargs):
        """As in transformers, from safetensors only."""
        from .weight_files import check_adapter

        if peft_model_id is not None and os.path.isdir(peft_model_id):
            check_adapter(peft_model_id)
        return super().load_adapter(peft_model_id, *args, **kwargs)

    # package only
    def save_pretrained(
        self, save_directory: str | os.PathLike, *args, self_contained: bool = False, **kwargs
    ) -> None:
        """
        As in transformers. With `self_contained`, the code of the model is saved too: the directory loads with
        `trust_remote_code=True` if this package is not installed, and without remote code if it is. The code is always
        saved if the model was loaded from such a directory. For a model with an adapter, only the adapter is saved, as
        in transformers.
        """
        save = super().save_pretrained
        if self._saved_by_transformers():
            save(save_directory, *args, **kwargs)
            return
        # Some callers pass the first to every model, although transformers dropped it.
        known = {"safe_serialization", "self_contained", *PUSH_ARGUMENTS}
        known |= parameter_names(PreTrainedModel.save_pretrained)
        refuse_unknown(kwargs, known, f"{type(self).__name__}.save_pretrained()")
        from subquad.hub.push import save_model

        save_model(self, save, save_directory, *args, self_contained=self_contained, **kwargs)

    # package only
    def push_to_hub(self, repo_id: str, **kwargs):
        """
        As in transformers, with the same arguments. The code that the model needs is uploaded too, with its license,
        and a card if there is none. The tokenizer has its own `push_to_hub`.

        Returns:
            the URL of the commit.
        """
        from subquad.hub.push import push_model

        if self._saved_by_transformers():
            return super().push_to_hub(repo_id, **kwargs)
        return push_model(self, repo_id, **kwargs)

    # package only
    def _saved_by_transformers(self) -> bool:
        """Whether transformers copies the code (the model was loaded with its code) or saves only an adapter."""
        return self.is_remote_code() or getattr(self, "_hf_peft_config_loaded", False)
