"""Several processes give the same as one."""

import functools
import gc
import importlib.util
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from unittest import mock

import pages  # noqa: F401 (its processes, and those here, import nothing again)
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from cases import CASES, CAUSAL, ENCODERS, lm_class, random_ids, tiny_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from subquad_tokenizers import ByteTokenizer


ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "distributed"
# rwkv5 is split as rwkv6 is, and rwkv7 as rwkv7_deep_embed.
MODELS = [name for name in (*CAUSAL, *ENCODERS) if name not in ("rwkv5", "rwkv7")]
SIZE = 2
on_cpus = pytest.mark.skipif(torch.accelerator.is_available(), reason="the processes meet on CPUs, by gloo")


# Processes.


def launch(work, environment, *arguments):
    """Runs a function in several processes, with the environment that `torchrun` gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**environment, "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mp.start_processes(_begin, (work, environment, arguments), SIZE, start_method="forkserver")


def _begin(rank, work, environment, arguments):
    gc.freeze()  # what was imported is not searched for garbage
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(ROOT)
    torch.set_num_threads(1)
    work(*arguments)
    dist.destroy_process_group()


def environment_of(configuration):
    """What `accelerate launch` adds to the environment of the processes that it starts."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    found = {}
    arguments = ["--config_file", str(EXAMPLE / configuration), str(EXAMPLE / "train.py")]
    with mock.patch("torch.distributed.run.run", lambda arguments: found.update(os.environ)):
        launch_command(launch_command_parser().parse_args(arguments))
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


# The example.


@functools.cache
def script():
    spec = importlib.util.spec_from_file_location("distributed_train", EXAMPLE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(path, model_type, output, batch_size, *options):
    arguments = {
        **{"model": path / model_type, "text": path / "text.txt", "output": output / model_type},
        **{"length": 24, "batch-size": batch_size, "steps": 3, "log-every": 1},
        "checkpoint-every": 2 if model_type == "avey-b" else 3,
    }
    with mock.patch.object(sys, "argv", ["train.py", *(f"--{k}={v}" for k, v in arguments.items()), *options]):
        script().main()


def train_all(path, output, models, sharded):
    """Each model; `sharded` ones compute their blocks twice, and one goes on from the checkpoint in the middle."""
    accept_cpus()
    for model_type in models:
        train(path, model_type, output / "whole", 2, *(["--gradient-checkpointing"] if sharded else []))
    if sharded:
        if dist.get_rank() == 0:
            middle = "avey-b-checkpoints/checkpoint-2"
            shutil.copytree(output / "whole" / middle, output / "resumed" / middle)
        dist.barrier()
        train(path, "avey-b", output / "resumed", 2, "--resume", f"--model={path / 'other'}")


def accept_cpus():
    """accelerate keeps FSDP to accelerators, and DeepSpeed compiles an operator that gloo does without."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = __init__
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def checkpoint(output):
    return output.with_name(f"{output.name}-checkpoints") / "checkpoint-3"


def losses(output):
    history = json.loads((checkpoint(output) / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Models, a text, and the results of the example in one process that reads all rows of a step."""
    path = tmp_path_factory.mktemp("alone")
    shutil.copy(ROOT / "examples" / "abc_check.py", path / "text.txt")
    tiny_model("avey-b", seed=1, vocab_size=128, mask_token_id=127).save_pretrained(path / "other")
    ByteTokenizer(mask_token="\x7f").save_pretrained(path / "other")
    for model_type in MODELS:
        fields = CASES[model_type].quiet  # noise is one of a process
        mask = {"mask_token_id": 127} if model_type == "avey-b" else {}
        tiny_model(model_type, vocab_size=128, **mask, **fields).save_pretrained(path / model_type)
        ByteTokenizer(mask_token="\x7f").save_pretrained(path / model_type)
        train(path, model_type, path / "whole", 2 * SIZE)
    return path


@on_cpus
@pytest.mark.parametrize(
    ("configuration", "part", "models"),
    [
        pytest.param(None, "model.safetensors", MODELS, marks=pytest.mark.thorough),
        # `test_shards` has the others.
        ("fsdp2.yaml", "pytorch_model_fsdp_0/__1_0.distcp", ["rwkv6", "gecko", "avey-b"]),
        pytest.param(
            *("zero3.yaml", "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt", MODELS),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["ddp", "fsdp2", "zero3"],
)
def test_processes_share_a_training(configuration, part, models, alone, tmp_path):
    environment = {} if configuration is None else environment_of(configuration)
    if configuration == "zero3.yaml":
        pytest.importorskip("deepspeed")
        fields = json.loads((EXAMPLE / "zero3.json").read_text())
        fields["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # no weight is too small to be shared
        (tmp_path / "zero3.json").write_text(json.dumps(fields))
        environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(tmp_path / "zero3.json")
    launch(train_all, environment, alone, tmp_path, models, configuration is not None)
    outputs = [path.parent for path in tmp_path.glob("*/*/config.json")]
    assert len(outputs) == len(models) + (configuration is not None)
    for output in outputs:
        model_type, expected = output.name, alone / "whole" / output.name
        assert (checkpoint(output) / part).exists()
        assert losses(output) == pytest.approx(losses(expected), rel=1e-5)
        auto_class = getattr(transformers, lm_class(model_type))
        model, info = auto_class.from_pretrained(output, output_loading_info=True)
        assert not any(info.values())
        parameters = auto_class.from_pretrained(expected).parameters()
        for (name, p), q in zip(model.named_parameters(), parameters, strict=True):
            # Attention does not depend on Gecko's bias of keys, and AdamW makes steps of the noise in its gradient.
            torch.testing.assert_close(p, q, atol=1e-3 if name.endswith("mega.beta") else 1e-5, rtol=0)
        if scalar := CASES[model_type].scalar:
            assert load_file(output / "model.safetensors")[scalar].shape == ()


@pytest.mark.fast
@torch.no_grad()
def test_a_scalar_of_the_files_is_a_vector_of_the_model(tmp_path):
    """FSDP shards no scalars; those of Avey-B are published as such."""
    model, ids = tiny_model("avey-b"), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    vectors, scalars = model.state_dict(), load_file(tmp_path / "model.safetensors")
    name = CASES["avey-b"].scalar
    assert (vectors[name].shape, scalars[name].shape) == ((1,), ())
    save_file({name: vectors[name] for name in scalars}, tmp_path / "model.safetensors", {"format": "pt"})
    from_vectors, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    others = [from_vectors]
    for weights in (vectors, scalars):
        others.append(tiny_model("avey-b", seed=1))
        others[-1].load_state_dict(weights | {"lm_head.weight": vectors["lm_head.weight"]})
    for other in others:
        assert torch.equal(other(ids).logits, model(ids).logits)


# What is sharded without a Trainer.


def shard(model):
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module)
    return fully_shard(model)


def new_training(model_type, seed, wrap=lambda model: model):
    model = wrap(tiny_model(model_type, seed=seed))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def step(model, optimizer, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(path, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "moments": moments}, checkpoint_id=path)


def load(path, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "moments": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def use_shards(path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for model_type in MODELS:
        # What one process has saved goes on in two, and they save it again.
        training = new_training(model_type, 1, shard)
        load(path / "one" / model_type, *training)
        step(*training, random_ids(2 * SIZE, 23, seed=1)[2 * rank : 2 * rank + 2])
        save(path / "two" / model_type, *training)

        ids, model = random_ids(2, 11, seed=rank), tiny_model(model_type)
        if CASES[model_type].causal:
            options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            assert torch.equal(shard(tiny_model(model_type)).generate(ids, **options), model.generate(ids, **options))

        # Sharded as it is loaded, and saved whole.
        source, target = path / "files" / model_type, path / "again" / model_type
        sharding = transformers.distributed.DistributedConfig(fsdp_size=SIZE)
        loaded = getattr(transformers, lm_class(model_type)).from_pretrained(source, distributed_config=sharding)
        blocks = [x for x in loaded.modules() if type(x).__name__.endswith(tuple(loaded._no_split_modules))]
        assert blocks and all(isinstance(block, FSDPModule) for block in blocks)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        loaded.save_pretrained(target)
        if rank == 0:
            expected, found = (load_file(directory / "model.safetensors") for directory in (source, target))
            # Of tied weights, transformers gathers and writes both.
            torch.testing.assert_close({name: found[name] for name in expected}, expected, atol=0, rtol=0)


@on_cpus
def test_shards(tmp_path):
    trainings = {}
    for model_type in MODELS:
        tiny_model(model_type).save_pretrained(tmp_path / "files" / model_type)
        trainings[model_type] = new_training(model_type, 0)
        step(*trainings[model_type], random_ids(2 * SIZE, 23))
        save(tmp_path / "one" / model_type, *trainings[model_type])
    launch(use_shards, {}, tmp_path)
    for model_type, training in trainings.items():
        step(*training, random_ids(2 * SIZE, 23, seed=1))
        loaded = new_training(model_type, 2)
        load(tmp_path / "two" / model_type, *loaded)
        (weights, moments), (expected_weights, expected_moments) = (get_state_dict(*x) for x in (loaded, training))
        torch.testing.assert_close(weights, expected_weights)
        torch.testing.assert_close(moments["state"], expected_moments["state"])
