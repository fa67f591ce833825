"""Raven against a plain reading of the paper, and what it has beyond the contract."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same_states, random_ids, tiny_config, tiny_model
from golden_files import read_golden
from huggingface_hub.errors import StrictDataclassClassValidationError

from subquad import RavenCache, RavenConfig, RavenForCausalLM
from subquad.models.raven.modeling_raven import RavenAttention, RavenSlotMemory


PURE = {"attn": None}
FULL = {"attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 1, "use_rope": False}}
BOTH = {
    "num_hidden_layers": 4,
    "attn": [
        {"layers": [1], "num_heads": 2, "window_size": 9, "rope_theta": 500.0},
        {"layers": [2], "num_heads": 3, "num_kv_heads": 1, "use_rope": False},
    ],
}
VARIANTS = {
    "published": PURE | {"use_output_gate": False},
    "gated": PURE,
    "window": {},
    "full": FULL,
    "both": BOTH,
    "mlp router": PURE | {"router_type": "mlp"},
    "softmax": PURE | {"router_score": "softmax"},
    "bias": PURE | {"bias_rmm": True},
    "decay of slots": PURE | {"decay_type": "GLA"},
    "scaled": PURE | {"router_scale": 4},
    "all slots": PURE | {"topk": 12},
    "one slot": PURE | {"topk": 1},
    "shared keys": PURE | {"num_heads": 6, "num_kv_heads": 2},
    "other sizes": PURE | {"expand_k": 0.5, "expand_v": 1.5, "num_slots": 7},
    "relu": PURE | {"feature_map": "relu"},
    "rotary memory": PURE | {"use_rope": True},
    "gsa": PURE | {"router": "gsa", "decay_type": "GLA"},
    "swa": PURE | {"router": "swa"},
}


@torch.no_grad()
@pytest.mark.parametrize("name", ["raven_gated", "raven_plain"])
def test_published_logits(name):
    tensors, weights, config = read_golden(name)
    model, ids, expected = RavenForCausalLM(RavenConfig(**config)).eval(), tensors["input_ids"], tensors["logits"]
    model.load_state_dict(weights)
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-4, rtol=0)
    cache, logits = model.new_cache(), []
    for piece in ids.split([17, *[1] * 28], dim=1):
        logits.append(model(piece, cache=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=2e-4, rtol=0)


# The paper, token by token.


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotary(x, theta):
    size = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(size) / size)
    left, right = x[..., :size], x[..., size:]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def plain_routes(config, layer, x, t):
    """Equation 19 and 20, 22, and table 1: log decay of every slot, (batch, heads, slots)."""
    slots = config.num_slots
    if config.router == "swa":
        return torch.where(torch.arange(slots) == t % slots, -torch.inf, 0.0).expand(len(x), config.num_kv_heads, -1)
    if config.decay_type == "GLA":
        a = F.logsigmoid(layer.f_proj(x).unflatten(-1, (-1, slots))) / config.gate_logit_normalizer
    else:
        a = (-F.softplus(layer.a_proj(x) + layer.dt_bias) * layer.A_log.exp())[..., None]
    if config.router == "gsa":
        return a
    logits = layer.r_proj(x).unflatten(-1, (-1, slots))
    m = logits.sigmoid() if config.router_score == "sigmoid" else logits.softmax(-1)
    choice = m + layer.r_bias if config.bias_rmm else m
    kept = choice >= choice.sort(descending=True).values[..., config.topk - 1 : config.topk]
    g = torch.where(kept, m, 0.0)
    total = g.sum(-1, keepdim=True) + 1e-9 if config.router_score == "sigmoid" else 1
    return a * g / total / config.router_scale


def plain_memory(config, layer, x):
    """Equation 18."""
    phi = F.silu if config.feature_map == "swish" else F.relu
    heads, groups = config.num_heads, config.num_heads // config.num_kv_heads
    q = norm(phi(layer.q_proj(x)).unflatten(-1, (heads, -1)), layer.q_norm.weight, config.norm_eps)
    k = norm(phi(layer.k_proj(x)).unflatten(-1, (heads // groups, -1)), layer.k_norm.weight, config.norm_eps)
    v = F.silu(layer.v_proj(x)).unflatten(-1, (heads // groups, -1))
    if config.use_rope:
        q, k = rotary(q, config.rope_theta), rotary(k, config.rope_theta)
    keys = x.new_zeros(len(x), heads, config.num_slots, q.shape[-1])
    values, out = x.new_zeros(*keys.shape[:3], v.shape[-1]), []
    for t in range(x.shape[1]):
        f = plain_routes(config, layer, x[:, t], t).exp()
        f, k_t, v_t = (y.repeat_interleave(groups, 1) for y in (f[..., None], k[:, t], v[:, t]))
        keys = f * keys + (1 - f) * k_t[:, :, None]
        values = f * values + (1 - f) * v_t[:, :, None]
        weights = (keys @ q[:, t, :, :, None]).softmax(2)
        out.append((values * weights).sum(2))
    out = F.silu(torch.stack(out, 1))
    if config.use_output_gate:
        gate = F.silu(layer.o_gate_proj(x))
        return layer.o_proj(norm(out, layer.o_norm.weight, config.norm_eps).flatten(2) * gate)
    return layer.o_proj(norm(out.flatten(2), layer.g_norm.weight, config.norm_eps))


def plain_attention(config, spec, layer, x):
    heads, kv_heads, length = spec["num_heads"], spec["num_kv_heads"], x.shape[1]
    q, k, v = (
        proj(x).unflatten(-1, (n, -1))
        for proj, n in ((layer.q_proj, heads), (layer.k_proj, kv_heads), (layer.v_proj, kv_heads))
    )
    if spec["use_rope"]:
        q, k = rotary(q, spec["rope_theta"]), rotary(k, spec["rope_theta"])
    k, v = (y.repeat_interleave(heads // kv_heads, 2) for y in (k, v))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (spec["window_size"] or length))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return layer.o_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


def plain(model, ids):
    config, x = model.config, model.model.embeddings(ids)
    for n, block in enumerate(model.model.layers):
        h, spec = norm(x, block.attn_norm.weight, config.norm_eps), config.attention(n)
        x = x + (plain_attention(config, spec, block.attn, h) if spec else plain_memory(config, block.attn, h))
        h, mlp = norm(x, block.mlp_norm.weight, config.norm_eps), block.mlp
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    return model.lm_head(norm(x, model.model.norm.weight, config.norm_eps))


@pytest.mark.parametrize(
    ("variant", "attention"),
    [*((name, "sdpa") for name in VARIANTS), *((name, "eager") for name in ("window", "full"))],
)
def test_the_paper(variant, attention):
    model, ids = tiny_model("raven", **VARIANTS[variant]).double(), random_ids(2, 25)
    model.set_attn_implementation(attention)
    logits, expected = model(ids).logits, plain(model, ids)
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, grad, grad_expected in zip(
        parameters,
        torch.autograd.grad((logits * weights).sum(), list(parameters.values())),
        torch.autograd.grad((expected * weights).sum(), list(parameters.values())),
        strict=True,
    ):
        torch.testing.assert_close(
            grad, grad_expected, atol=1e-8, rtol=1e-7, msg=lambda text, name=name: f"{name} {text}"
        )


# Caches of hybrids and other routers.


@torch.no_grad()
def test_steps_write_the_memory_in_place():
    model, ids = tiny_model("raven", **PURE), random_ids(2, 9)
    cache = model(ids).cache
    slots = cache.layers[0].states["slots"]
    before = slots.clone()
    routes = []
    handle = model.model.layers[0].attn.r_proj.register_forward_hook(lambda _m, _i, out: routes.append(out))
    model(random_ids(2, 1), cache=cache)
    handle.remove()
    assert cache.layers[0].states["slots"] is slots
    written = torch.zeros(2, 3, 12, dtype=torch.bool)
    written.scatter_(2, routes[0].view(2, 3, 12).topk(5).indices, True)
    changed = (slots != before).any(-1)
    assert torch.equal(changed, written)  # and not a bit of the others


def test_states_that_a_graph_holds_are_not_overwritten():
    for fields in ({}, FULL):
        model, ids = tiny_model("raven", **fields), random_ids(1, 12)
        model.requires_grad_(False)
        model.model.layers[1].attn.q_proj.weight.requires_grad_(True)
        cache = model(ids[:, :8]).cache
        loss = model(ids[:, 8:10], cache=cache).logits.sum()
        with torch.no_grad():
            model(ids[:, 10:11], cache=cache)
            logits = model(ids[:, 11:], cache=cache).logits
        loss.backward()
        assert model.model.layers[1].attn.q_proj.weight.grad.abs().sum() > 0
        torch.testing.assert_close(logits, model(ids).logits[:, 11:], atol=1e-4, rtol=1e-4)


def test_a_cache_made_in_inference_mode_and_gradients():
    for fields in ({}, FULL):
        model, ids = tiny_model("raven", **fields), random_ids(1, 9)
        with torch.inference_mode():
            cache = model(ids).cache
        model(ids, cache=cache).logits.sum().backward()


@torch.no_grad()
def test_what_does_not_fit_changes_nothing():
    model, ids = tiny_model("raven", **FULL), random_ids(1, 90)
    cache = model.new_cache(static=True, max_cache_len=64)
    model(ids[:, :10], cache=cache)
    before = cache.clone()
    for inputs in ({}, {"cu_seqlens": torch.tensor([0, 30, 80])}):
        with pytest.raises(ValueError, match="`max_cache_len` of 64 tokens; 90 would"):
            model(ids[:, 10:], cache=cache, **inputs)
        assert_same_states(cache, before)
        assert cache.get_seq_length() == 10


@torch.no_grad()
def test_angles_do_not_depend_on_the_default_dtype():
    model, ids = tiny_model("raven"), random_ids(1, 300)
    expected = model(ids).logits
    torch.set_default_dtype(torch.bfloat16)
    try:
        logits = model(ids).logits
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(logits, expected)


# Noise in training.


def test_noise():
    model, ids = tiny_model("raven").train(), random_ids(2, 30)

    def loss(seed):
        torch.manual_seed(seed)
        return model(ids, labels=ids).loss

    assert loss(0) == loss(0) != loss(1)
    model.config.add_gumbel_noise = False
    quiet = loss(0)
    assert quiet == loss(1)
    assert quiet == model.eval()(ids, labels=ids).loss
    model.config.add_gumbel_noise = True
    assert model(ids, labels=ids).loss == quiet


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_routes_are_the_same_when_they_are_computed_again(use_reentrant, monkeypatch):
    model, ids = tiny_model("raven", **PURE).train(), random_ids(2, 30)
    routes = []
    attn = model.model.layers[1].attn
    route = attn.route
    monkeypatch.setattr(attn, "route", lambda *inputs: routes.append(route(*inputs)) or routes[-1])
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for seed in (0, 1):
        torch.manual_seed(seed)
        model(ids, labels=ids).loss.backward()
    assert len(routes) == 4
    for first, again in (routes[:2], routes[2:]):
        assert torch.equal(first != 0, again != 0)
        torch.testing.assert_close(first, again)
    assert not torch.equal(routes[0] != 0, routes[2] != 0)


def test_noise_is_of_the_gumbel_distribution():
    layer = tiny_model("raven", num_slots=200, topk=1, **PURE).train().model.layers[0].attn
    with torch.no_grad():
        layer.r_proj.weight.zero_()
        layer.r_proj.weight[0] = 2.0 / 48  # a logit of 2 for the first slot, of 0 for the others
    torch.manual_seed(0)
    with torch.no_grad():
        chosen = layer.route(torch.ones(1, 20000, 48), torch.zeros(1, 20000, dtype=torch.long))[0, :, 0] != 0
    share = math.exp(2) / (math.exp(2) + 199)  # which noise of another distribution would not give
    assert chosen.sum(-1).eq(1).all()
    assert abs(chosen[:, 0].float().mean() - share) < 3 * math.sqrt(share / 20000)


# Configuration.


def test_fields_that_published_files_misspell(tmp_path):
    config = RavenConfig(exapnd_k=0.5, exapnd_v=2)
    assert (config.expand_k, config.expand_v) == (0.5, 2)
    assert (config.head_k_dim, config.head_v_dim) == (256, 1024)
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["expand_k"], "exapnd_k" in fields) == (0.5, False)
    assert RavenConfig.from_pretrained(tmp_path).expand_v == 2
    with pytest.raises(ValueError, match=r"`expand_k` \(2\) and `exapnd_k` \(0.5\) differ"):
        RavenConfig(expand_k=2, exapnd_k=0.5)


def test_sizes():
    assert RavenConfig(hidden_size=1024).intermediate_size == 2816
    assert RavenConfig(hidden_size=64, intermediate_size=100).intermediate_size == 100
    config = RavenConfig(hidden_size=64, num_heads=4, num_slots=None)
    assert (config.num_slots, config.topk) == (16, 16)
    spec = {"layers": [3], "num_heads": 8}
    expected = {**spec, "num_kv_heads": 8, "window_size": None, "qkv_bias": False, "use_rope": True, "rope_theta": 1e4}
    for attn in (spec, [spec]):
        config = RavenConfig(attn=attn)
        assert config.attention(3) == expected
        assert config.attention(0) is None
    layers = tiny_model("raven", **BOTH).model.layers
    assert [type(block.attn) for block in layers] == [
        RavenSlotMemory, RavenAttention, RavenAttention, RavenSlotMemory
    ]  # fmt: skip


def test_fields_that_are_set_later(tmp_path):
    tiny_model("raven", **PURE).save_pretrained(tmp_path)
    spec = {"layers": (1,), "num_heads": 3}
    model = RavenForCausalLM.from_pretrained(tmp_path, attn=spec)
    assert isinstance(model.model.layers[1].attn, RavenAttention)
    assert model.config.attn == {**model.config.attn, "layers": [1], "num_kv_heads": 3, "window_size": None}
    cache = model(random_ids(1, 3)).cache
    cache.save(tmp_path / "cache.safetensors")
    RavenCache.load(tmp_path / "cache.safetensors", tiny_config("raven", attn=[spec]))
    with pytest.raises(ValueError, match=r"`topk` must be at most `num_slots` \(12\), got 999"):
        RavenForCausalLM.from_pretrained(tmp_path, topk=999)
    assert RavenForCausalLM.from_pretrained(tmp_path, num_kv_heads=None).config.num_kv_heads == 3
    assert tiny_config("raven", num_key_value_heads=1).num_kv_heads == 1
    assert tiny_config("raven", router="swa", topk=32).topk == 32
    assert tiny_model("raven", attn={"layers": [], "num_heads": 3}).new_cache(static=True).get_max_length() == -1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_slots": 0}, "`num_slots` must be at least 1, got 0"),
        ({"topk": 13}, r"`topk` must be at most `num_slots` \(12\), got 13"),
        ({"num_kv_heads": 2}, r"`num_heads` \(3\) must be a multiple of `num_kv_heads` \(2\)"),
        ({"num_heads": 5}, r"`expand_k` \(1\) times `hidden_size` \(48\) must be a multiple of `num_heads` \(5\)"),
        ({"expand_v": 0.3}, r"`expand_v` \(0.3\) times"),
        ({"router": "abc"}, "`router` must be one of raven, gsa, swa, got 'abc'"),
        ({"router": "gsa"}, "`router` 'gsa' needs `decay_type` 'GLA', got 'Mamba2'"),
        ({"router_type": "linear"}, "`router_type` must be one of lin, mlp, got 'linear'"),
        ({"router_score": "tanh"}, "`router_score` must be one of sigmoid, softmax, got 'tanh'"),
        ({"router_scale": 0}, "`router_scale` must be above 0 and finite, got 0"),
        ({"decay_type": "mamba"}, "`decay_type` must be one of Mamba2, GLA, got 'mamba'"),
        ({"feature_map": "t2r"}, "`feature_map` must be one of swish, relu, got 't2r'"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be one of swish, silu, got 'gelu'"),
        ({"attnres_block_size": 2}, "`attnres_block_size` must be None or 0, got 2"),
        ({"use_short_conv": True}, "`use_short_conv` must be False, got True"),
        ({"expand_k": float("inf")}, r"`expand_k` \(inf\) times"),
        ({"router_scale": float("inf")}, "`router_scale` must be above 0 and finite, got inf"),
        ({"attn": {"num_heads": 3}}, r"`attn\['layers'\]` must be a list .* got None"),
        ({"attn": {"layers": [1], "num_heads": True}}, r"`attn\['num_heads'\]` must divide .* got True"),
        ({"attn": {"layers": [1], "num_heads": 3, "use_rope": "no"}}, r"`attn\['use_rope'\]` must be true or false"),
        ({"attn": {"layers": [1], "num_heads": 3, "rope_theta": None}}, r"`attn\['rope_theta'\]` must be above 0"),
        ({"attn": {"layers": [1, 1], "num_heads": 3}}, "`attn` has layer 1 twice"),
        ({"attn": {"layers": [3], "num_heads": 3}}, r"must be a list of numbers from 0 to 2, got \[3\]"),
        ({"attn": {"layers": [1], "num_heads": 5}}, r"`attn\['num_heads'\]` must divide `hidden_size` \(48\), got 5"),
        ({"attn": {"layers": [1], "num_heads": 3, "num_kv_heads": 2}}, r"`attn\['num_kv_heads'\]` must divide"),
        ({"attn": {"layers": [1], "num_heads": 3, "window_size": 0}}, r"`attn\['window_size'\]` must be at least 1"),
        ({"attn": {"layers": [1], "num_heads": 48}}, r"`attn\['use_rope'\]` needs heads of an even size, got 1"),
        ({"attn": {"layers": [1], "num_heads": 3, "qk_norm": True}}, "`attn` may have layers, .*; got qk_norm"),
    ],
)
def test_wrong_configuration(fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_config("raven", **fields)
