"""vLLM's OpenAI server with a model of ours, asked by many clients at once."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
import requests
from engine import expected, make_requests

import subquad


pytestmark = pytest.mark.xdist_group("server")
MODEL = subquad.embedded_model("finch-abc")
GREEDY = {"model": "finch-abc", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with four slots: its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    command += ["--served-model-name", "finch-abc", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "4096"]
    command += ["--chat-template", template]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    base = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 900
        while not is_ready(base):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(1)
        yield base, process
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def url(server):
    return server[0]


def is_ready(base: str) -> bool:
    try:
        return requests.get(f"{base}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def metric(url: str, name: str) -> float:
    """A number that the server reports about itself."""
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)


def test_many_clients(url, client):
    """Sixteen clients at once, some of which stream; every text is that of `generate`."""
    prompts = make_requests(16, 128, longest=120, answer=24)
    wanted = expected(MODEL, prompts)

    def ask(number):
        prompt, new = prompts[number]
        options = {"prompt": prompt, "max_tokens": new, "stream": number % 2 == 0, **GREEDY}
        options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(**options)
        if number % 2:
            return answer.choices[0].token_ids
        return [token for part in answer for choice in part.choices for token in choice.token_ids]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == wanted


def test_chat(client):
    """A conversation goes through the template; its text is the same streamed and at once."""
    messages = [{"role": "user", "content": "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"}]
    whole = client.chat.completions.create(messages=messages, max_tokens=16, **GREEDY)
    parts = client.chat.completions.create(messages=messages, max_tokens=16, stream=True, **GREEDY)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content and len(text) > 8


def test_a_client_that_leaves_frees_its_slot(url, client):
    """Four clients take all slots with answers of thousands of tokens and leave after the first one."""

    def leave(_):
        stream = client.completions.create(prompt=[3] * 20, max_tokens=4000, stream=True, **GREEDY)
        next(iter(stream))
        stream.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(4)))
    end = time.monotonic() + 30
    while running := metric(url, "vllm:num_requests_running"):
        assert time.monotonic() < end, running
        time.sleep(0.1)
    [(prompt, new)] = made = make_requests(1, 128, answer=8)
    answer = client.completions.create(
        prompt=prompt,
        max_tokens=new,
        model="finch-abc",
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert [answer.choices[0].token_ids] == expected(MODEL, made)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"prompt": [3] * 5000},
        {"prompt": [10**6]},
        {"temperature": -1},
        {"prompt": {"a": 1}},
        {"logprobs": 10**6},
    ],
)
def test_a_malformed_request_harms_no_other(url, client, wrong):
    """It is answered with 4xx while another request is being answered."""
    made = make_requests(2, 128, longest=50, answer=64)[1:]
    answers = []

    def ask():
        [(prompt, new)] = made
        options = {"prompt": prompt, "max_tokens": new, **GREEDY}
        options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        answers.append(client.completions.create(**options).choices[0].token_ids)

    thread = threading.Thread(target=ask)
    thread.start()
    body = {"model": "finch-abc", "prompt": [3], "max_tokens": 4, **wrong}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    thread.join()
    assert 400 <= answer.status_code < 500, answer.text
    assert answers == expected(MODEL, made)


def test_example(url, tmp_path):
    """The example asks a running server and prints a table."""
    example = Path(__file__).resolve().parents[2] / "examples" / "serving" / "clients.py"
    options = ["--url", url, "--clients", "1", "3", "--max-tokens", "6", "--requests", "1"]
    command = [sys.executable, str(example), *options]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["clients", "---:", "1", "3"]
    assert all(float(line.split("|")[2]) > 0 for line in lines[2:])


def test_memory_does_not_grow(server, url, client):
    """Hundreds of short requests leave nothing behind in the server's processes."""
    process = psutil.Process(server[1].pid)

    def ask(number):
        client.completions.create(prompt=[3 + number % 50] * (number % 20 + 1), max_tokens=4, **GREEDY)

    def memory():
        return sum(each.memory_full_info().uss for each in (process, *process.children(recursive=True)))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(200)))
        before = memory()
        list(pool.map(ask, range(400)))
        assert memory() - before < 16 * 2**20
    assert metric(url, "vllm:num_requests_running") == 0
