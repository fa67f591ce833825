"""Two processes that share a model by its heads give the answers of one; and products on a CPU."""

import pytest
from engine import VOCABULARY, engine, expected, make_requests, model_directory, serve
from vllm import _custom_ops as ops

from subquad_vllm import parallel


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("rwkv5", "rwkv7", "raven")]


@pytest.mark.parametrize("name", ["rwkv6", "raven-split", "gecko", *SLOW])
def test_tensor_parallel(name, tmp_path):
    model = model_directory(name, tmp_path)
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    with engine(model, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert serve(llm, requests) == expected(model, requests)


def test_products_have_few_numbers_of_rows(tmp_path, monkeypatch):
    """Code is compiled for each of them and kept, so the memory would grow with every new length of a step."""
    assert len({parallel.round_up(count) for count in range(1, 8193)}) == 88
    assert all(count <= parallel.round_up(count) <= 1.125 * count for count in range(1, 8193))
    multiply, found = ops.onednn_mm, set()

    def is_observed(handler, x, bias):
        found.add(x.numel() // x.shape[-1])
        return multiply(handler, x, bias)

    monkeypatch.setattr(ops, "onednn_mm", is_observed)
    model = model_directory("rwkv6", tmp_path)
    requests = make_requests(8, VOCABULARY, longest=100, answer=8)
    with engine(model) as llm:
        assert serve(llm, requests) == expected(model, requests)
    assert len(found) > 4 and found == {parallel.round_up(count) for count in found}
