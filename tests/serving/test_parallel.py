"""Two processes that share a model by its heads give the answers of one."""

import pytest
from engine import VOCABULARY, engine, expected, make_requests, model_directory, serve


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("rwkv5", "rwkv7", "raven")]


@pytest.mark.parametrize("name", ["rwkv6", "raven-split", "gecko", *SLOW])
def test_tensor_parallel(name, tmp_path):
    model = model_directory(name, tmp_path)
    requests = make_requests(8, VOCABULARY, longest=100, answer=16)
    with engine(model, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert serve(llm, requests) == expected(model, requests)
