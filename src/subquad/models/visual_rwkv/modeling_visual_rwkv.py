"""VisualRWKV, section 10.2 of "Eagle and Finch": images in front of Eagle, Finch and Goose (RWKV-5, 6 and 7)."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CLIPVisionModel,
    Dinov2WithRegistersModel,
    PreTrainedModel,
    SamVisionModel,
    SiglipVisionModel,
    SuppressTokensLogitsProcessor,
)
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
from ..rwkv7.modeling_rwkv7 import Rwkv7Model
from .configuration_visual_rwkv import VisualRwkvConfig, VisualRwkvTowersConfig


TEXT_MODELS = {"rwkv5": Rwkv5Model, "rwkv6": Rwkv6Model, "rwkv7": Rwkv7Model}
# The number of tensors that pass through the blocks beside x: Goose's `v_first`.
BESIDE_X = {"rwkv5": 0, "rwkv6": 0, "rwkv7": 1}
NO_ATTENTION = "eager"  # transformers' name for it
# Arguments of `forward` with a row for each image.
IMAGES = ("pixel_values", "pixel_values_siglip", "pixel_values_sam", "image_features")


def like(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """x in the dtype and on the device of a module. A hook that offloads a module moves its inputs itself."""
    parameter = next(module.parameters())
    return x.to(parameter.dtype) if parameter.is_meta else x.to(parameter)


class VisualRwkvClipProjection(Linear):
    """The features of CLIP's tower, pooled and projected."""

    def __init__(self, config: VisualRwkvConfig):
        super().__init__(config.vision_config.hidden_size, config.text_config.hidden_size, bias=False)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (images, 1 + patches, width), the output of the tower; returns (images, num_image_tokens, hidden_size)."""
        return super().forward(self.pool(x))

    def pool(self, x: torch.Tensor) -> torch.Tensor:
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


class VisualRwkvGatedProjection(nn.Module):
    """The features of three towers f, pooled and projected: LN(W_o (f * sigmoid(W_g f)))."""

    def __init__(self, config: VisualRwkvConfig):
        super().__init__()
        self.config = config
        width, hidden_size = config.vision_config.hidden_size, config.text_config.hidden_size
        self.gate = Linear(width, width, bias=False)
        self.o_proj = Linear(width, hidden_size, bias=False)
        self.ln_v = nn.LayerNorm(hidden_size, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (images, patches, width), the output of the towers; returns (images, num_image_tokens, hidden_size)."""
        x = self.pool(x)
        return self.ln_v(self.o_proj(x * torch.sigmoid(self.gate(x))))

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        grid, side = self.config.grid_size, self.config.patches_per_side
        if grid in (-1, side):
            return x
        return F.adaptive_avg_pool2d(torch.unflatten(x.mT, 2, (side, side)), grid).flatten(2).mT


class VisualRwkvTowers(PreTrainedModel):
    """DINOv2 with registers, SigLIP and the encoder of SAM, which read the same image in their own sizes."""

    config: VisualRwkvTowersConfig
    config_class = VisualRwkvTowersConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, config: VisualRwkvTowersConfig):
        super().__init__(config)
        # SAM has relative positions in its scores, which only these two kinds of attention can add.
        if config.sam._attn_implementation != "eager":
            config.sam._attn_implementation = "sdpa"
        self.dino = Dinov2WithRegistersModel(config.dino)
        self.siglip = SiglipVisionModel(config.siglip)
        self.sam = SamVisionModel(config.sam)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every tower has its own rules."""

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, pixel_values_siglip: torch.Tensor, pixel_values_sam: torch.Tensor
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values, pixel_values_siglip, pixel_values_sam: the images for each tower, each (images, channels,
                image_size, image_size).

        Returns:
            the features of all towers for each patch, (images, patches, hidden_size), as `last_hidden_state`.
        """
        images = zip(*(x.split(1) for x in (pixel_values, pixel_values_siglip, pixel_values_sam)), strict=True)
        # One by one: a layer of SAM has 0.8 GB of scores for an image of 1024 x 1024, in float32.
        features = torch.cat([self._read_image(*image) for image in images])
        return BaseModelOutputWithPooling(last_hidden_state=features)

    def _read_image(self, dino: torch.Tensor, siglip: torch.Tensor, sam: torch.Tensor) -> torch.Tensor:
        """The features of one image, (1, patches, hidden_size): of the first two towers, of the last layer but one."""
        dino, siglip = self.dino.embeddings(dino), self.siglip.embeddings(siglip)
        for layer in self.dino.encoder.layer[:-1]:
            dino = layer(dino)
        dino = dino[:, 1 + self.config.dino.num_register_tokens :]
        for layer in self.siglip.encoder.layers[:-1]:
            siglip = layer(siglip, None)
        # Channels of four neighbours become those of one patch.
        sam = F.pixel_unshuffle(self.sam(sam).last_hidden_state, 2).flatten(2).mT
        return torch.cat((dino, siglip, sam), dim=-1)


# By type of the vision configuration: the towers, the projection, and arguments of the towers that transformers does
# not list in their signature.
TOWERS = {
    "clip_vision_model": (CLIPVisionModel, VisualRwkvClipProjection, {"output_hidden_states", "output_attentions"}),
    "visual_rwkv_towers": (VisualRwkvTowers, VisualRwkvGatedProjection, set()),
}


class VisualRwkvPreTrainedModel(RecurrentPreTrainedModel):
    config: VisualRwkvConfig
    config_class = VisualRwkvConfig
    base_model_prefix = "model"
    input_modalities = ("image", "text")
    # Not in published files, and unused: it stands for patches that are hidden from DINOv2 in training.
    _keys_to_ignore_on_load_missing = [r"vit\.dino\.embeddings\.mask_token"]
    # These concern the towers; the text model has no softmax attention.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The projection and the head; the towers and the text model have their own rules."""
        if module is getattr(self, "head", None):
            init.orthogonal_(module.weight, gain=0.5)
        elif isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=5**0.5)  # the default of nn.Linear
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @classmethod
    def is_custom_code(cls) -> bool:
        """
        False, so that transformers initialises all weights that a checkpoint lacks. For custom code it skips modules
        that have no parameters of their own, such as attention in the tower.
        """
        return False

    @property
    def device(self) -> torch.device:
        """The device of the text model, and of the inputs; the towers may be elsewhere."""
        return self.base_model.rwkv.device

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """As in transformers, for the towers: the text model has no attention."""
        if not isinstance(attn_implementation, dict):
            chosen = dict.fromkeys(("", "vision_config"), attn_implementation)
            attn_implementation = {**chosen, "text_config": NO_ATTENTION}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The towers, for images."""
        return self.base_model.vit if modality == "image" else super().get_encoder(modality)

    def get_decoder(self) -> nn.Module:
        """The text model."""
        return self.base_model.rwkv

    def set_decoder(self, decoder: nn.Module) -> None:
        self.base_model.rwkv = decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.rwkv.get_input_embeddings()

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base_model.rwkv.set_input_embeddings(new_embeddings)

    def new_cache(self, static: bool = False, max_cache_len: int | None = None) -> RecurrentCache:
        """An empty cache of the text model; see [`RecurrentPreTrainedModel.new_cache`]."""
        return self.base_model.rwkv.new_cache(static, max_cache_len)


class VisualRwkvModel(VisualRwkvPreTrainedModel):
    """The vision towers (`vit`), the projection (`proj`) and a language model's blocks (`rwkv`), without a head."""

    def __init__(self, config: VisualRwkvConfig):
        super().__init__(config)
        tower_class, projection_class, unlisted = TOWERS[config.vision_config.model_type]
        self.vit = tower_class(config.vision_config)
        self.proj = projection_class(config)
        # The chosen attention implementation applies to the towers.
        config.text_config._attn_implementation = NO_ATTENTION
        self.rwkv = TEXT_MODELS[config.text_config.model_type](config.text_config)
        self.tower_arguments = parameter_names(tower_class.forward) | unlisted
        self.post_init()

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        pixel_values_siglip: torch.Tensor | None = None,
        pixel_values_sam: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (images, channels, image_size, image_size), from the processor.
            pixel_values_siglip, pixel_values_sam: the same images for the other two towers, if there are three.

        Returns:
            the output of the tower, with the embeddings that replace each image's placeholders as `pooler_output`
            (images, num_image_tokens, hidden_size). `forward` and `generate` take them as `image_features`, so that
            an image that is asked about again is not encoded again.

        Raises:
            ValueError: if a shape does not fit its tower.
            UnknownArgument: if neither the tower nor transformers' hooks read an argument.
        """
        refuse_unknown(kwargs, self.tower_arguments, f"{type(self).__name__}.get_image_features()")
        pixels = self._check_images((pixel_values, pixel_values_siglip, pixel_values_sam, None))
        # A frozen tower may have another dtype than the parts that are trained, and be on another device.
        outputs = self.vit(**{name: like(x, self.vit) for name, x in pixels.items()}, return_dict=True, **kwargs)
        outputs.pooler_output = self.proj(like(outputs.last_hidden_state, self.proj))
        return outputs

    def _check_images(self, given: tuple[torch.Tensor | None, ...]) -> dict[str, torch.Tensor]:
        """
        Args:
            given: the arguments that `IMAGES` names.

        Returns:
            those that are not None, by name; empty if they hold no images.

        Raises:
            ValueError: if they are not those of the model, or have other shapes.
        """
        images = {name: x for name, x in zip(IMAGES, given, strict=True) if x is not None}
        if not any(map(len, images.values())):
            return {}
        shapes: dict[str, tuple[int, ...]] = self.config.image_shapes
        if "image_features" in images:
            shapes = {"image_features": (self.config.num_image_tokens, self.config.text_config.hidden_size)}
        if images.keys() != shapes.keys():
            expected, got = (", ".join(f"`{name}`" for name in names) for names in (shapes, images))
            raise ValueError(f"The images of a call must be {expected}, got {got}.")
        for name, x in images.items():
            if tuple(x.shape[1:]) != shapes[name]:
                wanted = ", ".join(map(str, shapes[name]))
                raise ValueError(f"`{name}` must be (images, {wanted}), got {tuple(x.shape)}.")
        if len({len(x) for x in images.values()}) > 1:
            counts = ", ".join(f"{len(x)} in `{name}`" for name, x in images.items())
            raise ValueError(f"Every tower must get the same images, got {counts}.")
        return images

    def find_images(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """The placeholders, bool (batch, length). An embedding equal to the placeholder's counts as one."""
        if input_ids is not None:
            return input_ids == self.config.image_token_id
        placeholder = torch.tensor(self.config.image_token_id, device=inputs_embeds.device)
        return (inputs_embeds == self.get_input_embeddings()(placeholder)).all(-1)

    def check_places(self, images: dict[str, torch.Tensor], tokens: Tokens) -> None:
        """
        Args:
            images: the images that were given, by argument.
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
        name, given = next(iter(images.items()), ("pixel_values", ()))
        if sum(counts) != len(given) * size:
            raise ValueError(
                f"`{name}` holds {len(given)} images of {size} features, but `input_ids` (or `inputs_embeds`) has "
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
        patches = self.config.num_image_tokens - self.config.has_class_token
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
        pixel_values_siglip: torch.Tensor | None = None,
        pixel_values_sam: torch.Tensor | None = None,
        image_features: torch.Tensor | None = None,
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
            pixel_values_siglip, pixel_values_sam: the same images for SigLIP and SAM, (images, channels, image_size,
                image_size) with the size of the tower, if the model has three towers.
            image_features: (images, num_image_tokens, hidden_size), the `pooler_output` of `get_image_features`,
                instead of pixels: the towers are not run.

        Returns:
            last_hidden_state, cache and hidden_states as in [`Rwkv5Model`].

        Raises:
            ValueError: before any work, if an argument does not fit, or images do not match placeholders;
                the message names it.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        given = check_inputs(self.rwkv.config, input_ids, inputs_embeds)
        images = self._check_images((pixel_values, pixel_values_siglip, pixel_values_sam, image_features))
        reads = can_read_values(given) if images else input_ids is not None and should_check(given)
        placeholders = self.find_images(input_ids, inputs_embeds) if images or reads else None
        wanted = {"images": placeholders} if reads else {}
        masks = attention_mask, position_ids, cu_seqlens
        x, tokens, cache, use_cache = self.rwkv.start_forward(
            input_ids, inputs_embeds, *masks, cache, use_cache, wanted=wanted, **kwargs
        )
        if wanted:
            self.check_places(images, tokens)
        order = None
        if images:
            if (features := images.get("image_features")) is None:
                features = self.get_image_features(**images, return_dict=True).pooler_output
            x = x.masked_scatter(placeholders.unsqueeze(-1).to(x.device), features.to(x.device, x.dtype))
            order = self.backward_order(placeholders)

        hidden_states = (x,)
        stream = (x, *[None] * BESIDE_X[self.rwkv.config.model_type])
        for block in self.rwkv.blocks[: self.rwkv.config.num_hidden_layers]:
            backward = order is not None and block.layer_idx % 2 == 1
            stream = tuple(reorder(y, order) for y in stream) if backward else stream
            stream = block(*stream, tokens, cache)
            stream = stream if isinstance(stream, tuple) else (stream,)
            stream = tuple(reorder(y, order) for y in stream) if backward else stream
            if output_hidden_states:
                hidden_states += (stream[0],)
        outputs = self.finish_forward(self.rwkv.ln_out(stream[0]), tokens, cache, use_cache)
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

    def __init__(self, config: VisualRwkvConfig):
        super().__init__(config)
        self.model = VisualRwkvModel(config)
        self._tied_weights_keys = {"head.weight": f"model.rwkv.{self.model.rwkv._input_embed_layer}.weight"}
        self.head = Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @property
    def unpredicted_id(self) -> int:
        return self.config.image_token_id

    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        pixel_values_siglip: torch.Tensor | None = None,
        pixel_values_sam: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """See [`VisualRwkvModel.get_image_features`]."""
        return self.model.get_image_features(pixel_values, pixel_values_siglip, pixel_values_sam, **kwargs)

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
        pixel_values_siglip: torch.Tensor | None = None,
        pixel_values_sam: torch.Tensor | None = None,
        image_features: torch.Tensor | None = None,
        **kwargs,
    ) -> RecurrentCausalLMOutput:
        """
        Args:
            input_ids, pixel_values, attention_mask, position_ids, cache, inputs_embeds, use_cache, cu_seqlens,
                pixel_values_siglip, pixel_values_sam, image_features: see [`VisualRwkvModel`].
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
            pixel_values_siglip=pixel_values_siglip,
            pixel_values_sam=pixel_values_sam,
            image_features=image_features,
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
        images = {name: kwargs[name] for name in IMAGES if kwargs.get(name) is not None}
        for name in images:
            inputs.pop(name, None)
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if not images or (ids is not None and ids.shape[1] == 1 and not is_first_iteration):  # a generated token
            return inputs
        unread = self._count_images(ids, embeds)
        total = self._count_images(None, inputs_embeds) if ids is None else self._count_images(input_ids)
        device = (embeds if ids is None else ids).device
        for name, x in images.items():
            if len(x) == sum(total):  # the images of the whole conversation
                x = torch.cat([row[len(row) - new :] for row, new in zip(x.split(total), unread, strict=True)])
            if sum(unread) or (is_first_iteration and len(x)):
                inputs[name] = x.to(device)
        return inputs

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.Tensor | None = None,
        **model_kwargs,
    ) -> tuple[torch.Tensor, dict]:
        """As in transformers, but the images of a row are repeated together, not one by one."""
        images = {name: model_kwargs.pop(name) for name in IMAGES if model_kwargs.get(name) is not None}
        if images and expand_size > 1:
            embeds = model_kwargs.get("inputs_embeds")
            rows = self._count_images(input_ids if embeds is None else None, embeds)
            for name, x in images.items():
                if sum(rows) != len(x):
                    raise ValueError(f"`{name}` holds {len(x)} images, the placeholders are for {rows}.")
                images[name] = torch.cat([part for row in x.split(rows) for part in [row] * expand_size])
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
