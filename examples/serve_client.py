"""
Talks to a server of `transformers serve` with the client of OpenAI.

    pip install "transformers[serving]"
    subquad run transformers serve                                            # in one terminal
    python examples/serve_client.py "Why is the sky blue?" --model ./finch-1b6 --stop $'\\n\\n'        # in another

`subquad run` makes the architectures known to the server, so that it serves what `subquad convert`, `subquad export`
and training leave, and repositories on the Hub; it loads a model when the first request names it, by its path (as the
server sees it) or its name on the Hub. Without a question this client lists the models that the server finds in the
cache of the Hub. With `subquad run transformers serve MODEL` the server loads MODEL at once, and serves no other.

The answer is printed as it is made, and Ctrl-C ends the making of it, too. Models whose tokenizer has a chat template
answer. The others continue a text, as `--complete` does:

    python examples/serve_client.py $'X:1\\nT:The Finch\\nM:6/8\\nL:1/8\\nK:D\\n' --complete \\
        --model src/subquad/data/finch-abc

A turn of the RWKV World models ends with a blank line and not with a token of its own, hence `--stop` above; what
stops an answer is printed with it. The server answers the requests for a model one after the other, each from the
beginning of its conversation. Its `--continuous-batching` is made of pages of keys and values, which a recurrent state
has not; it is ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from openai import OpenAI


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompt", nargs="?", help="a question, or with --complete a text to continue")
    add("--model", help="directory of the model, or its name on the Hub")
    add("--system", help="what the model is told before the question")
    add("--complete", action="store_true", help="continue the text, without the chat template")
    add("--url", default="http://localhost:8000/v1", help="address of the server")
    add("--max-tokens", type=int, default=512, help="most tokens of the answer")
    add("--temperature", type=float, help="0 takes the likeliest token each time; as the model's files say otherwise")
    add("--seed", type=int, help="makes sampling repeatable")
    add("--stop", action="append", help="text that ends the answer; may be given again")
    arguments = parser.parse_args()
    if arguments.prompt is not None and arguments.model is None:
        parser.error("a question needs --model")
    return arguments


def answer(client: OpenAI, arguments: argparse.Namespace) -> Iterator[str]:
    """The answer, a token or a few at a time."""
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
    client = OpenAI(base_url=arguments.url, api_key="none")  # the server asks for none, the client for any
    if arguments.prompt is None:
        for model in client.models.list():
            print(model.id)
        return
    for text in answer(client, arguments):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
