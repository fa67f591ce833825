"""VisualRWKV, section 10.2 of "Eagle and Finch": images in front of Eagle (RWKV-5) and Finch (RWKV-6)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPVisionModel, SuppressTokensLogitsProcessor
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

from subquad_kernels.tracing import can_read_values

from ...decoding.generation import RecurrentGenerationMixin
from ...modeling.arguments import checks_arguments, parameter_names, refuse_unknown
from ...modeling.base import RecurrentPreTrainedModel
from ...modeling.cache import RecurrentCache
from ...modeling.heads import CausalLMHead
from ...modeling.layers import Linear, check_inputs, chosen_states
from ...modeling.padding import Tokens, reorder, should_check
from ...modeling.versions import RecurrentCausalLMOutput, RecurrentModelOutput
from ..rwkv5.modeling_rwkv5 import Rwkv5Model
from ..rwkv6.modeling_rwkv6 import Rwkv6Model
from .configuration_visual_rwkv import VisualRwkvConfig


TEXT_MODELS = {"rwkv5": Rwkv5Model, "rwkv6": Rwkv6Model}
NO_ATTENTION = "eager"  # transformers' name for it


class VisualRwkvPreTrainedModel(RecurrentPreTrainedModel):
    config: VisualRwkvConfig
    config_class = VisualRwkvConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    # These concern the tower; the text model has no softmax attention.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The projection and the head; the tower and the text model have their own rules."""
        if module is getattr(self, "proj", None):
            init.kaiming_uniform_(module.weight, a=5**0.5)  # the default of nn.Linear
        elif module is getattr(self, "head", None):
            init.orthogonal_(module.weight, gain=0.5)

    @classmethod
    def is_custom_code(cls) -> bool:
        """
        False, so that transformers initialises all weights that a checkpoint lacks. For custom code it skips modules
        that have no parameters of their own, such as attention in the tower.
        """
        return False

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """As in transformers, for the tower: the text model has no attention."""
        if not isinstance(attn_implementation, dict):
            chosen = dict.fromkeys(("", "vision_config"), attn_implementation)
            attn_implementation = {**chosen, "text_config": NO_ATTENTION}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The tower, for images."""
        return self.base_model.vit if modality == "image" else super().get_encoder(modality)

    def get_decoder(self) -> nn.Module:
        """The text model."""
        return self.base_model.rwkv

    def set_decoder(self, decoder: nn.Module) -> None:
        self.base_model.rwkv = decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.rwkv.embeddings

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base_model.rwkv.embeddings = new_embeddings

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> RecurrentCache:
        """An empty cache of the text model; see [`RecurrentPreTrainedModel.new_cache`]."""
        return self.base_model.rwkv.new_cache(static, max_cache_len)


class VisualRwkvModel(VisualRwkvPreTrainedModel):
    """CLIP's vision tower (`vit`), the projection (`proj`) and Eagle's or Finch's blocks (`rwkv`), without a head."""

    def __init__(self, config: VisualRwkvConfig):
        super().__init__(config)
        self.vit = CLIPVisionModel(config.vision_config)
        self.proj = Linear(config.vision_config.hidden_size, config.text_config.hidden_size, bias=False)
        # The chosen attention implementation applies to the tower.
        config.text_config._attn_implementation = NO_ATTENTION
        self.rwkv = TEXT_MODELS[config.text_config.model_type](config.text_config)
        self.tower_arguments = parameter_names(CLIPVisionModel.forward) | {"output_hidden_states", "output_attentions"}
        self.post_init()

    @can_return_tuple
    def get_image_features(self, pixel_values: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (images, channels, image_size, image_size), from CLIP's image processor.

        Returns:
            the output of the tower, with the embeddings that replace each image's placeholders as `pooler_output`
            (images, num_image_tokens, hidden_size).

        Raises:
            ValueError: if the shape does not fit the tower.
            UnknownArgument: if neither the tower nor transformers' hooks read an argument.
        """
        refuse_unknown(kwargs, self.tower_arguments, f"{type(self).__name__}.get_image_features()")
        self._check_pixels(pixel_values)
        outputs = self.vit(pixel_values.to(self.vit.dtype), return_dict=True, **kwargs)
        # A frozen tower may have another dtype than the parts that are trained.
        outputs.pooler_output = self.proj(self.pool(outputs.last_hidden_state).to(self.rwkv.dtype))
        return outputs

    def _check_pixels(self, pixel_values: torch.Tensor) -> None:
        vision = self.config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        if pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != shape:
            wanted = ", ".join(map(str, shape))
            raise ValueError(f"`pixel_values` must be (images, {wanted}), got {tuple(pixel_values.shape)}.")

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """The features (images, num_image_tokens, width) of the tower's output x (images, 1 + patches, width)."""
        grid, first = self.config.grid_size, self.config.class_token_first
        token, patches = x[:, :1], x[:, 1:]
        if grid == 0:
            return token
        if grid == 1 and first:
            return x.mean(1, keepdim=True)
        if grid > 0:
            side = self.config.patches_per_side
            squares = torch.unflatten(patches.transpose(1, 2), 2, (side, side))
            patches = F.avg_pool2d(squares, side // grid).flatten(2).transpose(1, 2)
        return torch.cat((token, patches) if first else (patches, token), dim=1)

    def find_images(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """The placeholders, bool (batch, length). An embedding equal to the placeholder's counts as one."""
        if input_ids is not None:
            return input_ids == self.config.image_token_id
        placeholder = torch.tensor(self.config.image_token_id, device=inputs_embeds.device)
        return (inputs_embeds == self.get_input_embeddings()(placeholder)).all(-1)

    def check_images(self, images: int, tokens: Tokens) -> None:
        """
        Args:
            images: the number of images that were given.
            tokens: of the call, with the known placeholders, `images`.

        Raises:
            ValueError: if they do not fit: each image needs `num_image_tokens` consecutive placeholders, in one call
                and one document, without padding among them.
        """
        size, placeholders = self.config.num_image_tokens, tokens.known["images"]
        inside = placeholders & ((placeholders.cumsum(1) - 1) % size > 0)
        broken = inside & ~np.pad(placeholders, ((0, 0), (1, 0)))[:, :-1]
        if "cu_seqlens" in tokens.known:
            broken |= inside & np.isin(np.arange(inside.size), tokens.known["cu_seqlens"]).reshape(inside.shape)
        if "mask" in tokens.known:
            broken |= placeholders & ~tokens.known["mask"]
        counts = placeholders.sum(1).tolist()
        if sum(counts) != images * size:
            raise ValueError(
                f"`pixel_values` holds {images} images of {size} features, but `input_ids` (or `inputs_embeds`) has "
                f"{sum(counts)} placeholders of the id {self.config.image_token_id}."
            )
        if broken.any() or any(count % size for count in counts):
            raise ValueError(
                f"The {size} placeholders of an image (id {self.config.image_token_id}) must follow one another in "
                f"one row, one document and one call, with no padding among them; the rows have {counts}."
            )

    def _index_in_image(self, placeholders: torch.Tensor) -> torch.Tensor:
        """The index of each placeholder in its image, from 0 on, (batch, length)."""
        return (placeholders.cumsum(1) - 1) % self.config.num_image_tokens

    def backward_order(self, placeholders: torch.Tensor) -> torch.Tensor | None:
        """
        The order in which every second block reads, (batch, length): the patches of each image from the last to the
        first, and all other tokens at their position. It is its own inverse. None if all blocks read forward.
        """
        patches = self.config.num_image_tokens - 1
        if self.config.reading_order == "forward" or patches < 2:
            return None
        first = int(self.config.class_token_first)
        position = torch.arange(placeholders.shape[1], device=placeholders.device).expand_as(placeholders)
        index = self._index_in_image(placeholders) - first
        is_patch = placeholders & (index >= 0) & (index < patches)
        return torch.where(is_patch, position + patches - 1 - 2 * index, position)

    @checks_arguments
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentModelOutput:
        """
        Args:
            input_ids: (batch, length) token ids, with `config.num_image_tokens` consecutive placeholders
                (`config.image_token_id`) for each image. A row may have any number of images.
            pixel_values: (images, channels, image_size, image_size), the images of all rows, one after the other.
                Later calls with `cache` only need the images of their own placeholders.
            inputs_embeds: (batch, length, hidden_size), instead of `input_ids`. With `pixel_values`, embeddings equal
                to the placeholder's are replaced.
            attention_mask, position_ids, cache, use_cache, cu_seqlens: see [`Rwkv5Model`].

        Returns:
            last_hidden_state, cache and hidden_states as in [`Rwkv5Model`].

        Raises:
            ValueError: before any work, if an argument does not fit, or images do not match placeholders;
                the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        given = check_inputs(self.rwkv.config, input_ids, inputs_embeds)
        images = 0 if pixel_values is None else len(pixel_values)
        if images:
            self._check_pixels(pixel_values)
        reads = can_read_values(given) if images else input_ids is not None and should_check(given)
        placeholders = self.find_images(input_ids, inputs_embeds) if images or reads else None
        wanted = {"images": placeholders} if reads else {}
        masks = attention_mask, position_ids, cu_seqlens
        x, tokens, cache, use_cache = self.rwkv.start_forward(
            input_ids, inputs_embeds, *masks, cache, use_cache, wanted=wanted, **kwargs
        )
        if wanted:
            self.check_images(images, tokens)
        order = None
        if images:
            features = self.get_image_features(pixel_values, return_dict=True).pooler_output
            x = x.masked_scatter(placeholders.unsqueeze(-1).to(x.device), features.to(x.device, x.dtype))
            order = self.backward_order(placeholders)

        hidden_states = (x,)
        for block in self.rwkv.blocks[: self.rwkv.config.num_hidden_layers]:
            backward = order is not None and block.layer_idx % 2 == 1
            x = reorder(x, order) if backward else x
            x = block(x, tokens, cache)
            x = reorder(x, order) if backward else x
            if output_hidden_states:
                hidden_states += (x,)
        outputs = self.finish_forward(self.rwkv.ln_out(x), tokens, cache, use_cache)
        hidden_states = (*hidden_states[:-1], outputs.last_hidden_state)
        outputs.hidden_states = chosen_states(hidden_states, output_hidden_states)
        if order is not None and cache is not None and cache.records_past:
            # A part of an image that was read backward cannot be removed.
            cache.keep_past(int(tokens.known["images"].any(0)[::-1].argmax()))
        return outputs


class VisualRwkvForConditionalGeneration(CausalLMHead, RecurrentGenerationMixin, VisualRwkvPreTrainedModel):
    """VisualRWKV with a language modeling head."""

    lm_head_name = "head"
    _tp_plan = {"head": "colwise_gather_output"}
    _tied_weights_keys = {"head.weight": "model.rwkv.embeddings.weight"}

    def __init__(self, config: VisualRwkvConfig):
        super().__init__(config)
        self.model = VisualRwkvModel(config)
        self.head = Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @property
    def unpredicted_id(self) -> int:
        return self.config.image_token_id

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """See [`VisualRwkvModel.get_image_features`]."""
        return self.model.get_image_features(pixel_values, **kwargs)

    @checks_arguments
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentCausalLMOutput:
        """
        Args:
            input_ids, pixel_values, attention_mask, position_ids, cache, inputs_embeds, use_cache,
                cu_seqlens: see [`VisualRwkvModel`].
            labels: (batch, kept) ids to predict, shifted inside the model, as in [`Rwkv5ForCausalLM`]. Placeholders
                among them are ignored too.
            logits_to_keep: the number of last tokens to compute logits for (0: all), or the indices of the tokens.

        Returns:
            loss if `labels` are given, logits (batch, kept, vocabulary), cache, hidden_states.

        Raises:
            ValueError: before any work, if an argument does not fit; the message names it.
        """
        return super().forward(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs,
    ) -> dict:
        """As in transformers, with only the images whose placeholders this call reads."""
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if (pixel_values := kwargs.get("pixel_values")) is None:
            return inputs
        inputs.pop("pixel_values", None)
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if ids is not None and ids.shape[1] == 1 and not is_first_iteration:  # a generated token
            return inputs
        unread = self._count_images(ids, embeds)
        total = self._count_images(None, inputs_embeds) if ids is None else self._count_images(input_ids)
        if len(pixel_values) == sum(total):  # the images of the whole conversation
            rows = zip(pixel_values.split(total), unread, strict=True)
            pixel_values = torch.cat([row[len(row) - new :] for row, new in rows])
        if sum(unread) or (is_first_iteration and len(pixel_values)):
            inputs["pixel_values"] = pixel_values.to((embeds if ids is None else ids).device)
        return inputs

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.Tensor | None = None,
        **model_kwargs,
    ) -> tuple[torch.Tensor, dict]:
        """As in transformers, but the images of a row are repeated together, not one by one."""
        pixel_values = model_kwargs.pop("pixel_values", None)
        if pixel_values is not None and expand_size > 1:
            embeds = model_kwargs.get("inputs_embeds")
            rows = self._count_images(input_ids if embeds is None else None, embeds)
            if sum(rows) != len(pixel_values):
                raise ValueError(f"`pixel_values` holds {len(pixel_values)} images, the placeholders are for {rows}.")
            pixel_values = torch.cat([row.repeat(expand_size, 1, 1, 1) for row in pixel_values.split(rows)])
        images = {} if pixel_values is None else {"pixel_values": pixel_values}
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        return input_ids, model_kwargs | images

    def _count_images(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None) -> list[int]:
        """Number of images of each row."""
        return (self.model.find_images(input_ids, inputs_embeds).sum(1) // self.config.num_image_tokens).tolist()

    def _get_logits_processor(self, *args, device: torch.device | None = None, **kwargs):
        """As in transformers, but placeholders are never generated."""
        processors = super()._get_logits_processor(*args, device=device, **kwargs)
        # First: after `top_k=1`, the placeholder might be the only token left.
        processors.insert(0, SuppressTokensLogitsProcessor([self.config.image_token_id], device=device))
        return processors


__all__ = ["VisualRwkvForConditionalGeneration", "VisualRwkvModel", "VisualRwkvPreTrainedModel"]
