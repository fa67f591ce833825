"""Loading and saving of all processors, with their code."""

import os
import re

from transformers import ProcessorMixin

from ..modeling.arguments import ALIKE, PUSH_ARGUMENTS, UnknownArgument, nearest, parameter_names, refuse_unknown


# Arguments of a call that transformers reads but does not list.
CALL_ARGUMENTS = ("common_kwargs", "sanitize_control_tokens")
# Marks of an assistant's turn in a chat template, in comments as in tokenizers.
HIDDEN_MARK = re.compile(r"\{#-? *(\{% *(?:end)?generation *%\}) *-?#\}")


class SavedProcessor(ProcessorMixin):
    """The base class of all processors. A processor that is pushed to the Hub also loads without this package."""

    @classmethod
    def from_args_and_dict(cls, args, processor_dict, **kwargs):
        """
        As in transformers. The processor keeps the field `auto_map`, a sign that it was saved with its code.

        Raises:
            UnknownArgument: if an argument resembles one of the class but is none. Others go to the tokenizer.
        """
        names = parameter_names(cls.__init__)
        for name in kwargs:
            if name not in names and (hint := nearest(name, names, ALIKE)):
                raise UnknownArgument(f"{cls.__name__} has no setting `{name}`.{hint}")
        made = super().from_args_and_dict(args, processor_dict, **kwargs)
        if "auto_map" in processor_dict:
            processor = made[0] if isinstance(made, tuple) else made  # a tuple with `return_unused_kwargs`
            processor.auto_map = processor_dict["auto_map"]
        return made

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, *, self_contained: bool = False, **kwargs
    ) -> list[str]:
        """
        As in transformers. With `self_contained` or `push_to_hub`, the code of processor and tokenizer is saved too:
        the directory loads with `trust_remote_code=True` without this package, and without remote code if it is
        installed. The code is always saved if the processor was loaded from such a directory, or if the target
        directory has a model with its code.
        """
        # `push_to_hub` passes the second to every kind of object.
        known = {"save_jinja_files", "max_shard_size", *PUSH_ARGUMENTS}
        known |= parameter_names(SavedProcessor.save_pretrained)
        refuse_unknown(kwargs, known, f"{type(self).__name__}.save_pretrained()")
        files = super().save_pretrained(save_directory, push_to_hub, **kwargs)
        if not push_to_hub:
            self._add_code(save_directory, self_contained)
        return files

    def apply_chat_template(self, conversation, chat_template: str | None = None, *args, **kwargs):
        """As in transformers. The template may have the marks of an assistant's turn in comments."""
        templates = self.chat_template if isinstance(self.chat_template, dict) else {"default": self.chat_template}
        template = templates.get(chat_template or "default", chat_template)
        if template is not None:
            template = HIDDEN_MARK.sub(r"\1", template)
        return super().apply_chat_template(conversation, template, *args, **kwargs)

    def validate_inputs(self, images=None, text=None, videos=None, audio=None, **kwargs) -> None:
        """
        As in transformers.

        Raises:
            UnknownArgument: if neither the processor, its tokenizer nor its image processor has an argument.
                transformers ignores it with a warning.
        """
        kinds = self.valid_processor_kwargs.__annotations__
        settings = [*kinds.values(), *(getattr(part, "valid_kwargs", None) for part in vars(self).values())]
        known = {*kinds, *CALL_ARGUMENTS}.union(*(getattr(each, "__annotations__", ()) for each in settings))
        refuse_unknown(kwargs, known, f"{type(self).__name__}()")
        super().validate_inputs(images=images, text=text, videos=videos, audio=audio, **kwargs)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args, **kwargs):
        """transformers' `push_to_hub` and `save_pretrained` call this to upload what they saved."""
        self._add_code(working_dir, self_contained=True)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _add_code(self, directory: str | os.PathLike, self_contained: bool) -> None:
        if self._auto_class is not None:  # transformers has copied the code
            return
        try:
            from subquad.hub.export import add_processor_code
        except ImportError as error:
            if self_contained:
                raise ImportError("Saving a processor with its code needs the package subquad.") from error
        else:
            add_processor_code(self, directory, self_contained)


__all__ = ["SavedProcessor"]
