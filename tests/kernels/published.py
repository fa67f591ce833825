"""
The launches of kernels at published sizes, without a GPU: the models of all presets and the cases of the benchmarks
run on tensors without storage, forward and backward, and what their operators launch is recorded.

Import this before `subquad_kernels`, in a process of its own: on such tensors the operators run their kernels here.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers


def _custom_op(name, run=None, **how):
    """As `torch.library.custom_op`, but with the implementation on tensors without storage, too."""
    op = _real(name, run, **how)
    register = op.register_fake
    op.register_fake = lambda fake: register(run)
    return op


_real, torch.library.custom_op = torch.library.custom_op, _custom_op
import subquad_kernels  # noqa: E402, F401


torch.library.custom_op = _real
os.environ["SUBQUAD_BACKEND"] = "triton"
sys.path += [str(Path(__file__).parents[n] / name) for n, name in ((2, "kernels/benchmarks"), (1, ""))]

import benchmark  # noqa: E402
import kernel_cases  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import subquad  # noqa: E402
from subquad.decoding.cuda_graph import find_blocks  # noqa: E402
from subquad.decoding.fused import find_fused  # noqa: E402
from subquad.hub.presets import PRESETS, preset_config  # noqa: E402


DTYPES = (torch.bfloat16, torch.float32)
LAYERS = 4  # of a model, all of one kind or in turns
SHARED = ("benchmark", "measuring")
OPERATORS = sorted({path.stem for path in Path(benchmark.__file__).parent.glob("*.py")} - {*SHARED})


class Empty:
    """In place of random numbers."""

    def normal(self, *shape):
        return torch.empty(shape, device="meta")

    uniform = normal


def of_models(dtype: torch.dtype) -> None:
    """A step of training, a prompt and a token after it, of every preset of a language model."""
    for name in PRESETS:
        config = preset_config(name)
        architecture = subquad.models.REGISTRY[config.model_type]
        if not (architecture.generates or architecture.is_encoder):
            continue
        config.get_text_config().num_hidden_layers = LAYERS
        auto = getattr(transformers, architecture.lm_auto_class)
        with torch.device("meta"):
            model = auto.from_config(config, dtype=dtype).train()
            ids = torch.zeros(8, 2048, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
            if model.can_generate():
                for batch in (1, 8):
                    cache = model.new_cache()
                    model(input_ids=ids[:batch], past_key_values=cache)
                    model(input_ids=ids[:batch, :1], past_key_values=cache)
                    read_fused(model, ids[:batch, :1])


def read_fused(model: transformers.PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """A token as a CUDA graph captures it, if the model has kernels of whole blocks."""
    fused = find_fused(subquad.models.REGISTRY.values(), model)
    if (blocks := find_blocks(model, fused, ids.shape[0])) is not None:
        cache = model.new_cache(static=True)
        model(input_ids=ids, past_key_values=cache)
        assert blocks.read(ids, mask, cache) is not None


def kind_of(module: ModuleType) -> type[benchmark.Case]:
    """The class of the cases that a benchmark measures."""
    name = module.__name__
    (kind,) = (x for x in vars(module).values() if getattr(x, "__module__", "") == name and "ours" in vars(x))
    return kind


def call(case: benchmark.Case) -> dict[str, torch.Tensor]:
    """Calls a case, forward and backward; returns its inputs."""
    inputs = case.inputs(Empty())
    case.ours("triton", case.inplace, **inputs)
    leaves = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
    if case.has_gradients:
        out = case.ours("triton", **leaves)
        (out[0] if isinstance(out, tuple) else out).float().sum().backward()
    return inputs


def of_benchmarks(dtype: torch.dtype) -> None:
    """What the benchmarks check and measure on a GPU."""
    for name in OPERATORS:
        kind = kind_of(importlib.import_module(name))
        for which in ("check", "GPU check", "cuda", "step cuda") if kind.has_kernels else ():
            for case in benchmark.cases_for(kind, which, dtype=dtype, device="meta"):
                call(case)


def of_tests(dtype: torch.dtype) -> None:
    """The small sizes of the tests, but for packed documents, whose boundaries are values."""
    for path in sorted(Path(kernel_cases.__path__[0]).glob("[!_]*.py")):
        operator = importlib.import_module(f"kernel_cases.{path.stem}").OPERATOR
        for example in operator.examples.values() if operator.kernels else ():
            if "triton" not in example.backends or example.sizes.get("dtype", torch.float32) != dtype:
                continue
            arguments = operator.make(**example.sizes)
            if any(isinstance(x, torch.Tensor) and not x.is_floating_point() for x in arguments.values()):
                continue
            given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
            operator.run(given, backend="triton")
            given, leaves = kernel_cases.differentiable(operator, given)
            results = operator.run(given, backend="triton")
            kernel_cases.weighted_gradients(
                results, leaves, [x if x.requires_grad else None for x in results], allow_unused=True
            )


def launches(models: bool = True, small: bool = False) -> Iterator[tuple[Any, dict[str, Any]]]:
    """
    Kernels, and the arguments of their launches by name. Options of a launch are among them. `small` adds the sizes of
    the tests.
    """
    found: list[tuple[Any, dict[str, Any]]] = []

    def record(kernel, *args, grid=None, warmup=False, **named):
        names = [parameter.name for parameter in kernel.params]
        found.append((kernel, {**dict(zip(names, args, strict=False)), **named}))

    run, JITFunction.run = JITFunction.run, record
    try:
        calls: list[Callable[[torch.dtype], None]] = [of_benchmarks, *[of_models] * models, *[of_tests] * small]
        for dtype in DTYPES:
            for call in calls:
                call(dtype)
                yield from found
                found.clear()
    finally:
        JITFunction.run = run
