"""Processor of VisualRWKV: CLIP's image processor and the World tokenizer."""

import os
from contextlib import ExitStack

from transformers import ProcessorMixin
from transformers.image_utils import make_flat_list_of_images


# A blank line ends a turn, so there must be none inside a message; an image stands on a line of its own, where it is
# among the parts of the content: before the question, after it, or between the question and its repetition. No space
# follows the last colon: the space belongs to the first token of the answer.
CHAT_TEMPLATE = r"""
{%- set names = {'system': 'System', 'user': 'User', 'assistant': 'Assistant'} -%}
{%- for message in messages -%}
    {%- if message.role not in names -%}
        {{- raise_exception('The role ' ~ message.role ~ ' is none of system, user and assistant.') -}}
    {%- endif -%}
    {%- set content = message.content or '' -%}
    {%- if content is not string -%}
        {%- set parts = namespace(text='') -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                {%- set parts.text = parts.text ~ '\n<image>\n' -%}
            {%- elif part.type == 'text' -%}
                {%- set parts.text = parts.text ~ part.text -%}
            {%- else -%}
                {{- raise_exception('The type ' ~ part.type ~ ' is none of image and text.') -}}
            {%- endif -%}
        {%- endfor -%}
        {%- set content = parts.text -%}
    {%- endif -%}
    {%- set content = content.replace('\r\n', '\n').split('\n') | select | join('\n') | trim -%}
    {%- set content = (' ' ~ content if content else '') ~ '\n\n' -%}
    {{- names[message.role] ~ ':' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- content -}}{%- endgeneration -%}
    {%- else -%}
        {{- content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
""".strip()


class VisualRwkvProcessor(ProcessorMixin):
    """
    Images and text for VisualRWKV: `processor(images=..., text="User: <image>\n...")` makes the inputs of the model,
    `apply_chat_template` those of a conversation whose messages have parts of type "image" and "text".

    Args:
        image_processor: a `CLIPImageProcessor` for the tower's size of images.
        tokenizer: a [`RwkvWorldTokenizerFast`], or another; `image_token` is added where it lacks that.
        num_image_tokens: placeholders that an image takes, the model's `config.num_image_tokens`.
        chat_template: by default that of the published models, `User: <image>` and a line with the question.
        image_token: what stands for an image in a text.
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        num_image_tokens: int = 577,
        chat_template: str | None = CHAT_TEMPLATE,
        image_token: str = "<image>",
        **kwargs,
    ):
        if num_image_tokens < 1:
            raise ValueError(f"`num_image_tokens` must be at least 1, got {num_image_tokens}.")
        self.num_image_tokens = num_image_tokens
        self.image_token = image_token
        tokenizer.add_special_tokens({"extra_special_tokens": [image_token]}, replace_extra_special_tokens=False)
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        # The two save theirs to one file.
        tokenizer.chat_template = chat_template
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)

    def validate_inputs(self, images=None, text=None, **kwargs) -> None:
        """
        Raises:
            ValueError: where there are more images than texts have places for them, or fewer.
        """
        given = 0 if images is None else len(make_flat_list_of_images(images))
        places = sum(sample.count(self.image_token) for sample in text or ())
        if text is not None and given != places:
            raise ValueError(f"`text` has {places} {self.image_token} for {given} `images`.")
        super().validate_inputs(images=images, text=text, **kwargs)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs) -> str:
        """The placeholders of an image."""
        return self.image_token * self.num_image_tokens

    def post_process_image_text_to_text(self, generated_outputs, skip_special_tokens=True, **kwargs) -> list[str]:
        """As in transformers, without the blank line that ends an answer."""
        texts = super().post_process_image_text_to_text(generated_outputs, skip_special_tokens, **kwargs)
        return [text.rstrip("\n") for text in texts]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        push_to_hub: bool = False,
        *,
        self_contained: bool = False,
        **kwargs,
    ):
        """
        As in transformers; with `self_contained` or `push_to_hub`, the code of processor and tokenizer goes along, and
        the directory loads with `trust_remote_code=True` where this package is not installed.
        """
        with ExitStack() as stack:
            if (self_contained or push_to_hub) and self._auto_class is None:
                # transformers copies the code of a class that is registered so, and the tokenizers here do as it does.
                self._auto_class = "AutoProcessor"
                stack.callback(delattr, self, "_auto_class")
            return super().save_pretrained(save_directory, push_to_hub, **kwargs)


__all__ = ["VisualRwkvProcessor"]
