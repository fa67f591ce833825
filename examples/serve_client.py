"""
Talks to a server of `transformers serve` with the client of OpenAI.

    pip install "transformers[serving]"
    subquad run transformers serve                                            # in one terminal
    python examples/serve_client.py "Why is the sky blue?" --model ./finch-1b6 --stop $'\\n\\n'        # in another

`subquad run` registers the architectures in the server, so that it serves repositories on the Hub and the
directories written by `subquad convert`, `subquad export` and training. The server loads a model at the first request
for it, by its path (on the machine of the server) or its name on the Hub. Without a question, this client lists the
models in the server's cache of the Hub. With `subquad run transformers serve MODEL`, the server loads
MODEL when it starts and serves only this model.

The answer is printed while it is generated, and Ctrl-C also stops the generation. A model answers questions if its
tokenizer has a chat template. Any model continues a text with `--complete`:

    python examples/serve_client.py $'X:1\\nT:The Finch\\nM:6/8\\nL:1/8\\nK:D\\n' --complete \\
        --model src/subquad/hub/embedded/finch-abc

RWKV World models end an answer with a blank line instead of a special token, which is why `--stop` is used above; the
text that stops an answer is printed too. The server answers several requests together, and continues a conversation
from the state after its last answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shared import require


require("openai", extra="tools")

from openai import OpenAI  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompt", nargs="?", help="a question, or with --complete a text to continue")
    add("--model", help="directory of the model, or its name on the Hub")
    add("--system", help="system message before the question")
    add("--complete", action="store_true", help="continue the text, without the chat template")
    add("--url", default="http://localhost:8000/v1", help="address of the server")
    add("--max-tokens", type=int, default=512, help="maximum number of new tokens")
    add("--temperature", type=float, help="0 always takes the most likely token (default: the model's)")
    add("--seed", type=int, help="seed of the sampling, which makes it repeatable")
    add("--stop", action="append", help="text that ends the answer; may be repeated")
    arguments = parser.parse_args()
    if arguments.prompt is not None and arguments.model is None:
        parser.error("a question needs --model")
    return arguments


def answer(client: OpenAI, arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the answer in pieces of one or a few tokens."""
    options = {name: getattr(arguments, name) for name in ("model", "max_tokens", "temperature", "seed", "stop")}
    options = {name: value for name, value in options.items() if value is not None}
    if arguments.complete:
        with client.completions.create(prompt=arguments.prompt, stream=True, **options) as stream:
            for chunk in stream:
                yield chunk.choices[0].text
        return
    messages = [{"role": "user", "content": arguments.prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    with client.chat.completions.create(messages=messages, stream=True, **options) as stream:
        for chunk in stream:
            yield chunk.choices[0].delta.content or ""


def main() -> None:
    arguments = parse_arguments()
    client = OpenAI(base_url=arguments.url, api_key="none")  # the client needs a key, and the server ignores it
    if arguments.prompt is None:
        for model in client.models.list():
            print(model.id)
        return
    for text in answer(client, arguments):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
