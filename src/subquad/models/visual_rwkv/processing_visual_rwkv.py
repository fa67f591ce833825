"""Processor of VisualRWKV: an image processor like CLIP's, and the World tokenizer."""

import os

import numpy as np
from PIL import Image, ImageOps
from transformers.image_utils import make_flat_list_of_images

from ...hub.processing import SavedProcessor
from ...modeling.arguments import check_counts, parameter_names, refuse_unknown


# A blank line ends a turn, so a message of the user must have none. The assistant's blank lines stay as they are,
# up to their last line. An image has a line of its own, before the question, after it, or between the question and
# its repetition, in the order of the message's parts. No space follows the last colon: the space belongs to the
# first token of the answer. So there is none before an answer that transformers continues at its beginning, the place
# of its tag. The marks of an assistant's turn are in comments, because programs other than transformers do not know
# them.
CHAT_TEMPLATE = r"""
{%- set names = {'system': 'System', 'user': 'User', 'assistant': 'Assistant'} -%}
{%- if tools -%}{{- raise_exception('The model was not trained with tools; leave out `tools`.') -}}{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in names -%}
        {{- raise_exception('The role ' ~ message.role ~ ' is none of system, user and assistant.') -}}
    {%- endif -%}
    {%- if message.tool_calls -%}
        {{- raise_exception('The model was not trained with tools; leave out `tool_calls`.') -}}
    {%- endif -%}
    {%- set answer = message.role == 'assistant' -%}
    {%- set turn = namespace(given='', text='', gap='') -%}
    {%- set content = message.content or '' -%}
    {%- if content is string -%}
        {%- set turn.given = content -%}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}
                {%- set turn.given = turn.given ~ '\n<image>\n' -%}
            {%- elif part.type == 'text' -%}
                {%- set turn.given = turn.given ~ part.text -%}
            {%- else -%}
                {{- raise_exception('The type ' ~ part.type ~ ' is none of image and text.') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {%- for line in turn.given.split('\n') -%}
        {%- if line.strip() -%}
            {%- set turn.text = turn.text ~ turn.gap ~ (line if answer else line.rstrip()) -%}
            {%- set turn.gap = '\n' -%}
        {%- elif answer -%}
            {%- set turn.gap = turn.gap ~ line ~ '\n' -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set text = turn.text.lstrip() -%}
    {%- set space = ' ' if text and not text.startswith('CONTINUE_FINAL_MESSAGE_TAG') else '' -%}
    {{- names[message.role] ~ ':' -}}
    {%- if answer -%}
        {#- {% generation %} -#}{{- space ~ text ~ '\n\n' -}}{#- {% endgeneration %} -#}
    {%- else -%}
        {{- space ~ text ~ '\n\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
""".strip()


# The models with three towers were trained with all images of a turn at its beginning.
LINES = r"""    {%- for line in turn.given.split('\n') -%}"""
IMAGES_FIRST = r"""
    {%- if not answer -%}
        {%- set pieces = turn.given.split('<image>') -%}
        {%- set turn.given = '<image>\n' * (pieces | length - 1) ~ pieces | join -%}
    {%- endif -%}
""".strip("\n")
CHAT_TEMPLATES = {False: CHAT_TEMPLATE, True: CHAT_TEMPLATE.replace(LINES, f"{IMAGES_FIRST}\n{LINES}")}


def _in_8_bits(images):
    """Converts images of 16 bits to 8 bits. The path of an 8-bit image stays a path."""
    if isinstance(images, list | tuple):
        return [_in_8_bits(image) for image in images]
    if isinstance(images, str) and os.path.isfile(images):
        with Image.open(images) as image:
            return _in_8_bits(ImageOps.exif_transpose(image)) if image.mode.startswith("I;16") else images
    if isinstance(images, Image.Image) and images.mode.startswith("I;16"):
        return Image.fromarray(_in_8_bits(np.asarray(images, dtype=np.uint16)))
    if isinstance(images, np.ndarray) and images.dtype == np.uint16:
        return (images / 257).round().astype(np.uint8)
    return images


class VisualRwkvProcessor(SavedProcessor):
    """
    Images and text for VisualRWKV: `processor(images=..., text="User: <image>\n...")` makes the inputs of the model.
    `apply_chat_template` makes them from a conversation, whose messages have parts of type "image" and "text".

    Args:
        image_processor: a `CLIPImageProcessor` for the image size of the tower, or of the first one.
        tokenizer: a [`RwkvWorldTokenizerFast`], or another. `image_token` is added to it if it is missing.
        image_seq_length: number of placeholders of an image, the model's `config.num_image_tokens`.
        chat_template: by default the published models' template, `User: <image>` and a line with the question. With
            three towers, all images of a message come before its text.
        image_token: the placeholder of an image in a text.
        other_images: settings of the image processor that are different for the images of other towers, by the name
            of the model's argument: `{"pixel_values_sam": {"size": ...}, ...}`.
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        image_seq_length: int = 577,
        chat_template: str | None = None,
        image_token: str = "<image>",
        other_images: dict[str, dict] | None = None,
        **kwargs,
    ):
        refuse_unknown(kwargs, parameter_names(type(self).__init__), f"{type(self).__name__}()")
        check_counts(image_seq_length=image_seq_length)
        self.image_seq_length = image_seq_length
        self.image_token = image_token
        self.other_images = other_images or {}
        if chat_template is None:
            chat_template = CHAT_TEMPLATES[bool(self.other_images)]
        tokenizer.add_special_tokens({"extra_special_tokens": [image_token]}, replace_extra_special_tokens=False)
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        # Both save their template to the same file.
        tokenizer.chat_template = chat_template
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)

    def prepare_inputs_layout(self, images=None, *args, **kwargs):
        """As in transformers, but greyscale images of 16 bits are scaled to 8 bits instead of turning white."""
        return super().prepare_inputs_layout(_in_8_bits(images), *args, **kwargs)

    def validate_inputs(self, images=None, text=None, **kwargs) -> None:
        """
        Raises:
            ValueError: if the number of images is not the number of placeholders in the texts.
        """
        places = [sample.count(self.image_token) for sample in text or ()]
        if isinstance(images, list | tuple) and images and isinstance(images[0], list | tuple):
            given = [len(row) for row in images]
        else:
            given = 0 if images is None else len(make_flat_list_of_images(images))
            places = sum(places)
        if text is not None and given != places:
            raise ValueError(f"`text` has {places} {self.image_token} for {given} `images`.")
        super().validate_inputs(images=images, text=text, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        """Names of the model's arguments that the processor makes."""
        return [*super().model_input_names, *self.other_images]

    def _process_images(self, images, **kwargs):
        """As in transformers, and for the other towers."""
        processed, replacements = super()._process_images(images, **kwargs)
        for name, settings in self.other_images.items():
            processed[name] = self.image_processor(images, **{**kwargs, **settings})["pixel_values"]
        return processed, replacements

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs) -> str:
        """The placeholders of an image."""
        return self.image_token * self.image_seq_length

    def post_process_image_text_to_text(self, generated_outputs, skip_special_tokens=True, **kwargs) -> list[str]:
        """As in transformers, without the blank line that ends an answer."""
        texts = super().post_process_image_text_to_text(generated_outputs, skip_special_tokens, **kwargs)
        return [text.rstrip("\n") for text in texts]


__all__ = ["VisualRwkvProcessor"]
