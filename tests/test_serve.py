"""`transformers serve` with models of this package, asked with the client of OpenAI."""

import asyncio
import importlib
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import tiny_model
from chat_cases import save_speaker
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad
from subquad.hub import export as hub
from subquad_cli import main
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast


openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HEADER = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"
FINCH = "subquad/finch-abc"
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """
    What the server is asked for: architectures of several kinds with a byte tokenizer, a model with the World
    tokenizer, and finch-abc as `subquad export` makes it, in the cache of the Hub.
    """
    directory = tmp_path_factory.mktemp("models")
    for model_type in ("rwkv7", "avey", "gecko"):
        model = tiny_model(model_type, vocab_size=128)
        model.generation_config.eos_token_id = None  # it goes on for ever
        model.save_pretrained(directory / model_type)
        ByteTokenizer().save_pretrained(directory / model_type)
    tiny_model("rwkv6", vocab_size=65536).save_pretrained(directory / "world")
    RwkvWorldTokenizerFast().save_pretrained(directory / "world")
    save_speaker(directory / "calling", 'json[{"arguments":{"a":1},"id":"","name":"f"}]\n```\n\nUser:')
    save_speaker(directory / "thinking", "think>\n\nSo。\n\nUser:")
    repository = directory / "hub" / f"models--{FINCH.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    hub.export(subquad.embedded_model("finch-abc"), repository / "snapshots" / ("0" * 40))
    return directory


@pytest.fixture(scope="module")
def world(models):
    """The path of the model with the World tokenizer, and both, loaded here."""
    return str(models / "world"), *load(models / "world")


@pytest.fixture(scope="module")
def url(models):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "subquad_cli",
        "run",
        "transformers",
        "serve",
        "--device",
        "cpu",
        "--port",
        str(port),
    ]
    environment = os.environ | {"HF_HUB_CACHE": str(models / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = models / "log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()
                with socket.socket() as probe:
                    if probe.connect_ex(("localhost", port)) == 0:
                        break
                time.sleep(0.2)
            yield f"http://localhost:{port}/v1"
        finally:
            process.kill()  # its own end takes seconds


def connect(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(url):
    with connect(url) as client:
        yield client


def load(path):
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def continuation(model, tokenizer, prompt, **options):
    """What the model itself continues a text or a conversation with."""
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": 12, **options})[0]
    return tokenizer.decode(ids[inputs.input_ids.shape[1] :], skip_special_tokens=True)


def complete(client, **options):
    return client.completions.create(**options).choices[0].text


@pytest.mark.parametrize("model_type", ["rwkv7", "avey"])
def test_completion(client, models, model_type):
    path = str(models / model_type)
    expected = continuation(*load(path), HEADER)
    result = client.completions.create(model=path, prompt=HEADER, **GREEDY)
    (choice,) = result.choices
    assert choice.text == expected and choice.finish_reason == "length"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(HEADER), 12)
    *chunks, last = client.completions.create(model=path, prompt=HEADER, stream=True, **GREEDY)
    # A byte is a token: they come one by one.
    assert [chunk.choices[0].text for chunk in chunks] == list(expected)
    assert last.choices[0].finish_reason == "length" and last.usage.completion_tokens == 12


def test_chat(client, url, models, world):
    path, model, tokenizer = world
    messages = [
        {"role": "system", "content": "You are a bird."},
        {"role": "user", "content": "Hello,\r\n\r\n世界!"},
        {"role": "assistant", "content": "Tweet."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]
    request = {"model": path, "messages": messages, "temperature": 0, "max_tokens": 40}
    expected = continuation(model, tokenizer, messages, max_new_tokens=40)
    message = tokenizer.parse_response(expected, prefix="Assistant:")
    (choice,) = client.chat.completions.create(**request).choices
    assert (choice.message.role, choice.message.content) == (message["role"], message["content"])
    # A character of several bytes comes when it is complete.
    chunks = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **request)]
    assert "".join(chunks) == expected and sum(map(bool, chunks)) > 30 and not expected.isascii()
    with connect(url) as another, pytest.raises(openai.InternalServerError):  # this tokenizer has no chat template
        another.chat.completions.create(**request | {"model": str(models / "rwkv7")})


def test_responses(client, world):
    path, *loaded = world
    messages = [{"role": "user", "content": "Why?"}]
    expected = continuation(*loaded, messages, max_new_tokens=20)
    request = {"model": path, "input": messages, "temperature": 0, "max_output_tokens": 20}
    assert client.responses.create(stream=False, **request).output_text == expected
    events = client.responses.create(stream=True, **request)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(client, models, stream):
    """A call is read, whatever its form, and the answer ends where the model begins the user's next turn."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    request = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "temperature": 0, "max_tokens": 60}
    answer = client.chat.completions.create(model=str(models / "calling"), stream=stream, **request)
    if stream:
        *chunks, last = answer
        [call] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        last, [call] = answer, answer.choices[0].message.tool_calls
        text = answer.choices[0].message.content
    assert (call.function.name, call.function.arguments, text) == ("f", '{"a": 1}', "")
    assert last.choices[0].finish_reason == "tool_calls" and last.usage.completion_tokens < 30


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(client, models, stream, thinking):
    request = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 60}
    request["extra_body"] = {"chat_template_kwargs": {"thinking": thinking}}
    answer = client.chat.completions.create(model=str(models / "thinking"), stream=stream, **request)
    found = [
        chunk.choices[0].delta if stream else chunk.choices[0].message for chunk in (answer if stream else [answer])
    ]
    texts = ["".join(getattr(part, name, None) or "" for part in found) for name in ("reasoning_content", "content")]
    assert texts == (["\n\nSo。", ""] if thinking else ["", "So。"])


def test_requests_at_once(client, models):
    """Of several models and of one, streamed and not."""
    requests = [
        {"model": str(models / model_type), "prompt": f"X:{n}\n", "max_tokens": 30, "temperature": 0}
        for model_type in ("avey", "gecko")
        for n in range(2)
    ]
    alone = [complete(client, **request) for request in requests]
    assert len(set(alone)) == 4

    def ask(request):
        chunks = client.completions.create(stream=True, **request)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        streamed = [pool.submit(ask, request) for request in requests]
        whole = [pool.submit(complete, client, **request) for request in requests]
        assert [result.result() for result in (*streamed, *whole)] == alone * 2


def test_a_client_that_goes_away(client, models):
    """The model is free for the next request, and answers it as if the first had not been."""
    request = {"model": str(models / "gecko"), "prompt": "X:1\n", "temperature": 0}
    expected = complete(client, max_tokens=5, **request)
    # The server notices at once, or only when Python next collects garbage: then it makes the whole answer.
    stream = client.completions.create(max_tokens=4000, stream=True, **request)
    text = "".join(next(stream).choices[0].text for _ in range(5))
    stream.close()
    assert text == expected
    assert complete(client, max_tokens=5, **request) == expected


def test_requests_have_their_own_options(client):
    """Of requests that are answered together, each has its temperature and its seed."""
    requests = [
        {"model": FINCH, "prompt": HEADER, "max_tokens": 40, "temperature": temperature, "seed": seed}
        for temperature in (0, 1.5)
        for seed in (1, 2, 1)
    ]
    with ThreadPoolExecutor(6) as pool:
        *greedy, one, two, again = pool.map(lambda request: complete(client, **request), requests)
    assert len(set(greedy)) == 1 and one == again and len({greedy[0], one, two}) == 3


@pytest.mark.slow
def test_two_hundred_connections(url):
    """Clients that come and go: some leave in the middle of an answer. The others get what they would alone."""
    expected = {}

    async def ask(client, number, draw):
        prompt, tokens = HEADER + "ABc|" * (number % 20), draw.randint(1, 60)
        request = {"model": FINCH, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        await asyncio.sleep(draw.random() * 20)
        if draw.random() < 0.5:
            stream = await client.completions.create(stream=True, **request)
            left, text = draw.choice([3, 10**6]), ""
            async for chunk in stream:
                text += chunk.choices[0].text
                if (left := left - 1) == 0:
                    break
            await stream.close()
        else:
            text = (await client.completions.create(**request)).choices[0].text
        return prompt, text

    async def everybody():
        draw = random.Random(0)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
            return await asyncio.gather(*(ask(client, number, draw) for number in range(200)))

    answers = asyncio.run(everybody())
    with connect(url) as client:
        for prompt, text in answers:
            if prompt not in expected:
                expected[prompt] = complete(client, model=FINCH, prompt=prompt, max_tokens=60, temperature=0)
            assert expected[prompt].startswith(text)


def test_stop(client):
    request = {"model": FINCH, "prompt": HEADER, "max_tokens": 60, "temperature": 0}
    whole = complete(client, **request)
    assert whole.index("|") < whole.index("\n")
    for stop in ("|", ["\n", "|"]):
        (choice,) = client.completions.create(stop=stop, **request).choices
        assert choice.text == whole[: whole.index("|") + 1] and choice.finish_reason == "stop"
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stop="\n", stream=True, **request))
    assert streamed == whole[: whole.index("\n") + 1]


def test_client_example(url, world, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("serve_client")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["serve_client", "--url", url, *arguments])
        example.main()
        return capsys.readouterr().out

    assert run().splitlines()[0] == FINCH  # newer servers also list what they have loaded

    path, *loaded = world
    arguments = ("--complete", "--model", FINCH, "--temperature", "0", "--max-tokens", "20")
    model, tokenizer = load(subquad.embedded_model("finch-abc"))
    assert run(HEADER, *arguments) == continuation(model, tokenizer, HEADER, max_new_tokens=20) + "\n"
    assert run(HEADER, *arguments, "--stop", "|").endswith("|\n")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    arguments = ("Why?", "--system", "Be brief.", "--model", path, "--temperature", "0", "--max-tokens", "12")
    assert run(*arguments) == continuation(*loaded, messages) + "\n"
    with pytest.raises(SystemExit):
        run("Why?")


def test_commands_that_are_not_there(capsys):
    assert main(["run", "no-such-command", "--port", "1"]) == 2
    assert "no installed package has the command 'no-such-command'" in capsys.readouterr().err
