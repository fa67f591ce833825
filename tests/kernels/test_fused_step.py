"""The kernels of whole blocks equal the model itself, and are few."""

import importlib

import pytest
import torch
from cases import LIVELY, lively
from kernel_cases import DEVICE, TRITON
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.decoding.cuda_graph import FusedToken
from subquad.models import REGISTRY
from subquad_kernels import fused_step


pytestmark = TRITON
# Numbers of channels of the heads, the feed-forward network and the low ranks that are unlike each other.
SIZES = {
    "eagle": {"attention_hidden_size": 64, "head_size": 64},
    "finch": {"attention_hidden_size": 192, "head_size": 96, "lora_rank_tokenshift": 7, "lora_rank_decay": 19},
    "goose": {
        **{"head_dim": 80, "hidden_size": 80, "decay_low_rank_dim": 7, "a_low_rank_dim": 9},
        **{"v_low_rank_dim": 33, "gate_low_rank_dim": 70},
    },
    "goose-7a": {"head_dim": 48, "deep_embed_rank": 5},
    # 5 of 12 slots; more queries than keys; heads of 24 and 16 channels.
    "raven": {
        **{"num_heads": 3, "num_kv_heads": 1, "num_slots": 12, "topk": 5, "expand_k": 1.5, "router_scale": 2},
        **{"use_output_gate": True, "bias_rmm": True},
    },
    "raven-plain": {
        **{"num_heads": 2, "num_slots": 20, "topk": 7, "decay_type": "GLA", "router_score": "softmax"},
        **{"feature_map": "relu"},
    },
    # Heads of 16 and 48 channels, the last one without rotary embeddings. Two tokens are a chunk.
    "gecko": {
        **{"num_heads": 3, "num_rope_heads": 2, "z_dim": 48, "value_dim": 144, "cema_ndim": 5, "chunk_size": 2},
        **{"timenorm_num_groups": 6, "rescale_nffn": True},
    },
    # Heads of 24 and 8 channels.
    "gecko-plain": {
        **{"num_heads": 2, "num_rope_heads": 0, "z_dim": 48, "value_dim": 16, "cema_ndim": 3, "chunk_size": 3},
        **{"timenorm_num_groups": 1, "layernorm_num_groups": 3, "norm_affine": False, "two_hop_residual": True},
        **{"scale_emb": True, "document_boundaries": False},
    },
}
MODELS = [*LIVELY, "raven", "raven-plain", "gecko", "gecko-plain"]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make(name, dtype=torch.float32, device=DEVICE, **sizes):
    model, sizes = name.removesuffix("-plain"), {"hidden_size": 48, "intermediate_size": 112, **SIZES[name], **sizes}
    with torch.device(device):
        return lively(model, **sizes).to(dtype)


@pytest.fixture(autouse=True)
def in_triton(monkeypatch):
    monkeypatch.setattr(fused_step, "choose_backend", lambda *args: "triton")


def fused(model):
    return FusedToken(model, REGISTRY[model.config.model_type].fused)


@torch.no_grad()
def compare(model, rows, tokens=3, masks=False, length=2, bos=()):
    """Tokens behind a text, or behind nothing. In every second row, those at `bos` may begin a document."""
    dtype = model.dtype
    tolerance, read = TOLERANCES[dtype], fused(model).read
    ids = torch.randint(2, 300, (rows, 16), generator=torch.Generator().manual_seed(1)).to(model.device)
    ids[::2, [*bos]] = 1
    cache, other = (model.new_cache(static=True) for _ in range(2))
    for each in (cache, other):
        model(ids[:, :2], cache=each)
        if not length:
            each.reset()
    for n in range(length, length + tokens):
        token, mask = ids[:, n : n + 1], None
        if masks and n > length:
            mask = torch.arange(rows, device=ids.device)[:, None] % 2 != n % 2
        before = {name: x.clone() for name, x in cache.named_states().items()}
        found = read(token, mask, cache)
        expected = model(token, attention_mask=mask, cache=other, logits_to_keep=1).logits[:, -1]
        scale = expected.abs().max()
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=tolerance)
        for name, x in cache.named_states().items():
            y = other.named_states()[name]
            assert x.dtype == y.dtype
            torch.testing.assert_close(x.float(), y.float(), rtol=tolerance, atol=4 * tolerance)
            if mask is not None and "layers" in name:
                assert x[~mask[:, 0]].equal(before[name][~mask[:, 0]])


CASES = [
    ("eagle", torch.float32, 1),
    ("eagle", torch.bfloat16, 3),
    ("finch", torch.float32, 1),
    ("finch", torch.bfloat16, 32),
    ("finch", torch.float16, 3),
    ("goose", torch.float32, 3),
    ("goose", torch.bfloat16, 32),
    ("goose", torch.float16, 1),
    ("goose-7a", torch.float32, 1),
    ("goose-7a", torch.float16, 17),
    ("raven", torch.float32, 1),
    ("raven", torch.float32, 17),
    ("raven", torch.bfloat16, 32),
    ("raven", torch.float16, 3),
    ("raven-plain", torch.float32, 3),
    ("raven-plain", torch.bfloat16, 17),
]


@pytest.mark.quick_cases("eagle-*-3", "finch-*-1", "goose-*-3")
@pytest.mark.parametrize(("name", "dtype", "rows"), CASES)
def test_equals_the_model(name, dtype, rows):
    compare(make(name, dtype), rows, masks=rows > 1)


@pytest.mark.quick_cases("finch")
@pytest.mark.parametrize("name", MODELS)
def test_states_of_zeros(name):
    compare(make(name), 2, tokens=1, length=0)


CHUNKS = [
    ("gecko", torch.float32, 1),
    ("gecko", torch.float32, 17),
    ("gecko", torch.bfloat16, 32),
    ("gecko", torch.float16, 3),
    ("gecko-plain", torch.float32, 3),
    ("gecko-plain", torch.bfloat16, 1),
]


@pytest.mark.quick_cases("gecko-dtype*-1", "gecko-plain-*-3")
@pytest.mark.parametrize(("name", "dtype", "rows"), CHUNKS)
def test_chunks_that_enter_the_memory(name, dtype, rows):
    """And documents that begin within chunks and with them."""
    compare(make(name, dtype), rows, tokens=8 if rows < 17 else 5, masks=rows > 1, bos=(5, 6))


@pytest.mark.parametrize("name", ["finch", "goose"])
def test_inputs_of_several_programs(name):
    """The programs of an output leave their sums to the last one, in this call and in the next."""
    heads = {"head_dim": 64} if name == "goose" else {}
    compare(make(name, hidden_size=192, intermediate_size=400, **heads), 2, tokens=2)


def test_raven_of_several_tiles():
    """All slots are written to."""
    compare(make("raven", hidden_size=288, topk=12, bias_rmm=False, num_hidden_layers=1), 2, tokens=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn": {"layers": [1], "num_heads": 3}}, "`attn` is a RavenAttention"),
        ({"router": "swa"}, "There is no `r_proj`"),
        ({"router_type": "mlp"}, "`attn.r_proj` is a Sequential"),
        ({"use_rope": True}, "Rotary embeddings of slot memories are not fused"),
        ({"intermediate_size": 100}, "must be multiples of 16"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)
def test_ravens_that_it_cannot_read(changes, message):
    with pytest.raises(ValueError, match=message):
        fused(make("raven", **changes))
    model = make("raven")
    model.model.layers[1].mlp_norm.eps = 1e-3
    with pytest.raises(ValueError, match="The norms have 1e-06 and 0.001"):
        fused(model)


def test_gecko_of_several_tiles():
    sizes = {"hidden_size": 288, "timenorm_num_groups": 2, "layernorm_num_groups": 2, "intermediate_size": 272}
    compare(make("gecko", **sizes, num_hidden_layers=1), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu": False}, "There is no `fc3`"),
        ({"z_dim": 24}, r"must be multiples of 16, got \[48, 144, 24, 112\]"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)
def test_geckos_that_it_cannot_read(changes, message):
    with pytest.raises(ValueError, match=message):
        fused(make("gecko", **changes))
    model = make("gecko")
    model.model.layers[1].nffn.norm.eps = 1e-3
    with pytest.raises(ValueError, match="The norms differ"):
        fused(model)
    block = fused(make("gecko")).found[0]
    names = ("heads", "rotated", "norm", "norm_groups", "two_hop")
    numbers = {name: getattr(block, name) for name in names}
    for change, message in (
        ({"cema.alpha": None}, "There must be a matrix `cema.alpha`"),
        ({"gate.bias": None}, "There must be a tensor `gate.bias`"),
        ({"k_k": torch.zeros(48, device=DEVICE)}, "Such a block has no `k_k`"),
        ({"gamma": torch.zeros(4, 32, device=DEVICE)}, "`gamma` must be float32"),
    ):
        changed = {name: x for name, x in (block.parameters | change).items() if x is not None}
        with pytest.raises(ValueError, match=message):
            fused_step.ChunkBlock("working_memory", changed, **numbers)
    for change, message in (
        ({"heads": 5}, "There cannot be 5 heads of 48 and 144 channels"),
        ({"norm_groups": 5}, "There cannot be 6 and 5 groups of 48 channels"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_step.ChunkBlock("working_memory", block.parameters, **numbers | change)


class Operations(TorchDispatchMode):
    """Names of torch's operations that compute something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = function.is_view or any(x in function.__name__ for x in ("empty", "detach", "view", "split"))
        self.names += [] if is_view else [function.__name__]
        return function(*args, **(kwargs or {}))


# The launches of one block for one row, and for more. A change of these numbers is a change of the time of a token.
LAUNCHES = dict.fromkeys(("finch", "raven", "raven-plain"), (8, 8))
LAUNCHES |= {"eagle": (7, 7), "goose": (7, 8), "goose-7a": (8, 9), "gecko": (15, 15), "gecko-plain": (15, 15)}
# Of single tokens, which a block's kernels stand between.
OPERATORS = ("slot_memory", "timestep_decay_norm", "cema", "chunk_attention", "working_memory")


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", MODELS)
def test_launches(name, rows, monkeypatch):
    names = [f"fused_step.{name}_kernels" for name in ("triton", "slot", "gecko")]
    names += [f"{name}.triton_kernels" for name in OPERATORS]
    launched = []
    for name_of_module in names:
        module = importlib.import_module(f"subquad_kernels.{name_of_module}")
        monkeypatch.setattr(module, "launch", lambda kernel, *args, **constants: launched.append(kernel))
    operations = []
    for layers in (2, 3):
        model = make(name, device="meta", num_hidden_layers=layers)
        cache, ids = model.new_cache(static=True), torch.zeros(rows, 1, dtype=torch.long, device="meta")
        model(ids, cache=cache)
        read = fused(model).read
        assert read(ids, None, cache) is not None
        launched.clear()
        with Operations() as computed:
            read(ids, None, cache)
        assert len(launched) == layers * LAUNCHES[name][rows > 1]
        operations.append(computed.names)
    # Whatever torch computes is before or behind the blocks. It looks up a row of RWKV-7a's tables for each of them.
    assert operations[0] == operations[1] or name == "goose-7a"


def test_what_does_not_fit():
    model = make("finch")
    blocks = fused(model).blocks
    x, shift = torch.zeros(2, 1, 48, device=DEVICE), torch.zeros(2, 48, device=DEVICE)
    state = torch.zeros(2, 2, 96, 96, device=DEVICE)
    states = [shift, shift, state]
    assert not blocks(x.double(), [states] * 2) and not blocks(x[:1], [states] * 2)
    for wrong in ([None, shift, state], [shift, shift[:1], state], [shift, shift, state.mT]):
        assert not blocks(x, [states, wrong])
    assert not blocks(x, [states] * 2, torch.ones(2, device=DEVICE))
    assert not any(y.any() for y in (x, shift, state))
    deep, small = fused(make("goose-7a")), {"cores": torch.zeros(2, 2, 1, 4, 4, device=DEVICE)}
    states = [[x.new_zeros(shape, dtype=dtype) for shape, dtype in block.states(2, {})] for block in deep.found]
    assert not deep.blocks(x, states) and not deep.blocks(x, states, None, small)
    many = [torch.zeros(fused_step.MOST_ROWS + 1, *y.shape[1:], device=DEVICE) for y in (x, shift, shift, state)]
    assert not blocks(many[0], [many[1:]] * 2)


def test_blocks_that_it_cannot_read():
    model = make("goose")
    parts = [(block.kind, dict(block.parameters), block.heads, 1e-5, 1e-5) for block in fused(model).found]
    for change, message in (
        ({"key.weight": None}, "There must be a tensor `key.weight`"),
        ({"more": torch.zeros(3)}, "Such a block has no `more`"),
        ({"k_a": torch.zeros(79, device=DEVICE)}, "`k_a` must be float32"),
        ({"key.weight": torch.zeros(80, 80, dtype=torch.int8, device=DEVICE)}, "`key.weight` must be float32"),
        ({"rate.up": torch.zeros(80, 9, device=DEVICE).mT}, "`rate.up` must be .* contiguous"),
        ({"ln1": torch.ones(80, dtype=torch.float64, device=DEVICE)}, "do not read torch.float64"),
        ({"k_k": torch._neg_view(torch.ones(80, device=DEVICE))}, "`k_k` must be a plain tensor"),
    ):
        kind, parameters, *numbers = parts[1]
        changed = {name: x for name, x in (parameters | change).items() if x is not None}
        with pytest.raises(ValueError, match=message):
            fused_step.StepBlock(kind, changed, *numbers)
    block = fused(make("raven")).found[0]
    numbers = {"heads": 3, "kv_heads": 1, "eps": 1e-6, "topk": 5}
    for change, message in (
        ({"router.weight": None}, "There must be a matrix `router.weight`"),
        ({"dt_bias": None}, "There must be a tensor `dt_bias`"),
        ({"gate.weight": None}, "There must be a tensor `g_norm`"),
        ({"slot_decay.weight": torch.zeros(12, 48, device=DEVICE)}, "Such a block has no `slot_decay.weight`"),
        ({"query.weight": torch.zeros(70, 48, device=DEVICE)}, "There cannot be 3 and 1 heads of 70 channels"),
        ({"r_bias": torch.zeros(12, dtype=torch.float64, device=DEVICE)}, "`r_bias` must be float32"),
    ):
        changed = {name: x for name, x in (block.parameters | change).items() if x is not None}
        with pytest.raises(ValueError, match=message):
            fused_step.SlotBlock("slot_memory", changed, **numbers)
    with pytest.raises(ValueError, match="DeepEmbed of rank 65, more than 64"):
        fused(make("goose-7a", deep_embed_rank=65))
    with pytest.raises(ValueError, match="There cannot be 3 heads of 80 channels"):
        fused_step.StepBlock(*parts[1][:2], 3, 1e-5, 1e-5)
    with pytest.raises(ValueError, match="Block 1 reads the values"):
        fused_step.StepBlocks([fused_step.StepBlock(*parts[0])] * 2)
