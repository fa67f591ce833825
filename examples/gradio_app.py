"""
A page in a browser to try a model: it continues a text, talks, and looks at pictures.

    pip install "subquad[demo]"
    python examples/gradio_app.py                              # finch-abc, which comes with the package, writes tunes
    python examples/gradio_app.py --model ./goose-0.4b         # any directory, embedded model or name on the Hub
    python examples/gradio_app.py --model ./visualrwkv --dtype bfloat16 --port 7861

Then open http://127.0.0.1:7860. Each token appears as soon as it is generated, and the line below shows the size of
the state, its number of tokens, and their speed. "Text" continues any text. "Chat" is there if the model's
tokenizer has a chat template. If the model reads pictures, as VisualRWKV does, a message may have some.

A conversation is kept as a state, so no earlier turn is read again. The state before each message is kept too, so that
"Undo" and "Retry" need no time. A temperature of 0 always takes the most likely token. The app listens to this machine
only; `--host 0.0.0.0` opens it to the network, without a password.

The app answers one request after the other. A request is refused if its text is too long, if too many wait, or if it
has waited for two minutes. An answer ends after `--seconds`.

Programs ask the same app through gradio_client:

    from gradio_client import Client
    print(Client("http://127.0.0.1:7860").predict("X:1\\nT:The Finch\\n", api_name="/text")[0])
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Queue

import torch
import transformers
from help_formatter import HelpFormatter
from shared import require

from subquad.hub.info import embedded_models, format_bytes
from subquad.states.session import Session
from subquad_cli.answers import ChatFormat, character_streamer
from subquad_cli.common import find_auto_class, find_model, load_reader, read_image, usable_device


# The states before earlier messages are kept, up to this total size.
KEPT_BYTES = 2**28
# Maximum number of waiting requests, and their maximum wait in seconds.
WAITING, WAIT = 32, 120
MOST_IMAGES = 8
TUNE = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", default="finch-abc", help="model directory, embedded model, or name on the Hub")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="dtype of the weights")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--max-characters", type=int, default=2**15, help="length of the longest text that is read")
    add("--seconds", type=float, default=120, help="time after which an answer ends")
    add("--host", default="127.0.0.1", help="address to listen to")
    add("--port", type=int, default=7860, help="port to listen to")
    return parser.parse_args()


@dataclass
class Sampling:
    """Sampling settings. A seed below 0 means none; a temperature of 0 takes the most likely token."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = -1

    def options(self) -> dict:
        """The options of `generate`."""
        options = {"max_new_tokens": int(self.max_new_tokens), "do_sample": self.temperature > 0}
        return options | ({"temperature": self.temperature, "top_p": self.top_p} if self.temperature > 0 else {})


@dataclass
class Conversation:
    """The state after each turn of one user's conversation, by the number of turns."""

    sessions: dict[int, Session] = field(default_factory=dict)

    def before(self, turns: int, model) -> Session:
        """A session that continues after `turns` turns; later ones are dropped, as after "Undo"."""
        self.sessions = {each: session for each, session in self.sessions.items() if each <= turns}
        if turns == 0:
            return Session(model.new_cache())
        if turns not in self.sessions:
            raise ValueError("The state of this conversation is no longer kept; clear the chat and start again.")
        return self.sessions[turns].copy()

    def keep(self, turns: int, session: Session) -> None:
        self.sessions[turns] = session
        while len(self.sessions) > 1 and sum(each.cache.nbytes for each in self.sessions.values()) > KEPT_BYTES:
            del self.sessions[min(self.sessions)]


class Demo:
    """
    A model and its tokenizer, which answer one request at a time.

    Args:
        name: a model directory, an embedded model, or a name on the Hub.
        dtype: dtype of the weights, such as "bfloat16"; "auto" is the files' dtype.
        device: such as "cuda"; None is a GPU if there is one.
        max_characters: maximum length of a text, or of a message with the system message.
        seconds: time after which an answer ends.

    Attributes:
        turns: the turns of the chat template; None if there is none.
        reads_images: whether messages may have pictures.
    """

    def __init__(
        self,
        name: str,
        dtype: str = "auto",
        device: str | None = None,
        max_characters: int = 2**15,
        seconds: float = 120,
    ):
        self.max_characters, self.seconds = max_characters, seconds
        path, device = find_model(name), usable_device(device)
        auto_class = find_auto_class(name, path, images=False)
        self.name, self.reads_images = name, auto_class == "AutoModelForImageTextToText"
        reader = transformers.AutoProcessor if self.reads_images else transformers.AutoTokenizer
        reader = load_reader(reader, name, path)
        self.tokenizer = getattr(reader, "tokenizer", reader)
        self.turns = ChatFormat(reader, name, think=None) if reader.chat_template is not None else None
        model = getattr(transformers, auto_class).from_pretrained(path, dtype=dtype, trust_remote_code=False)
        self.model = model.to(device).eval()
        self.lock = threading.Lock()

    def about(self) -> str:
        """One sentence about the model."""
        size = f"{self.model.num_parameters():,} parameters"
        return f"{type(self.model).__name__}, {size}, {self.model.dtype}, on {self.model.device}."

    def text(self, prompt: str, sampling: Sampling) -> Iterator[tuple[str, str]]:
        """Yields the prompt and its continuation so far, and a line about the state."""
        self._check_length(prompt)
        ids = self.tokenizer(prompt)["input_ids"]
        if not ids and self.tokenizer.bos_token_id is None:
            raise ValueError("The text is empty, and the model has no BOS token.")
        session = Session(self.model.new_cache())
        yield from self._stream(session, ids or [self.tokenizer.bos_token_id], sampling, start=prompt)

    def answer(
        self,
        conversation: Conversation,
        turns: int,
        message: str,
        images: list[str],
        system: str,
        sampling: Sampling,
    ) -> Iterator[tuple[str, str]]:
        """
        Yields the answer so far, and a line about the state.

        Args:
            conversation: is modified: it keeps the state after the answer, even if that was stopped.
            turns: number of turns before the message.
            message: the user's message.
            images: files of pictures, put before the message.
            system: the beginning of the conversation; may be empty.
        """
        self._check_length(message, system)
        if len(images) > MOST_IMAGES:
            raise ValueError(f"The message has {len(images)} images; at most {MOST_IMAGES} are read.")
        for file in images:
            read_image("the file", file)
        session = conversation.before(turns, self.model)
        after = self.turns.after(session.turns, session.rest, session.ended)
        inputs = self.turns.encode(message, images, after, system.strip() or None)
        ids = inputs.pop("input_ids")[0].tolist()
        more = {name: x.to(self.model.device) for name, x in inputs.items()}

        def finish(new: list[int]) -> None:
            session.end_answer(self.tokenizer, new, self.turns.end)
            conversation.keep(turns + 1, session)

        yield from self._stream(session, ids, sampling, self.turns.opening, self.turns.end, finish, **more)

    def _check_length(self, *texts: str) -> None:
        if (length := sum(map(len, texts))) > self.max_characters:
            raise ValueError(f"The text has {length:,} characters; at most {self.max_characters:,} are read.")

    def _stream(
        self,
        session: Session,
        ids: list[int],
        sampling: Sampling,
        start: str = "",
        end: str = "",
        finish: Callable[[list[int]], None] = lambda new: None,
        **more,
    ) -> Iterator[tuple[str, str]]:
        """
        Generates in a thread, and yields the text so far. When the iterator is closed, the thread stops with the next
        token.

        Args:
            start: the beginning of the text.
            end: text that ends the generation and is left out.
            finish: called with the ids of the new tokens.
            more: further options of `generate`.
        """
        pieces: Queue = Queue()  # texts, then None or an error
        stop = threading.Event()
        streamer = character_streamer(self.tokenizer, skip_prompt=True, end=end, write=pieces.put)

        def stopped(input_ids, scores, **kwargs):
            done = stop.is_set() or streamer.ended
            return torch.full((len(input_ids),), done, device=input_ids.device, dtype=torch.bool)

        def work() -> None:
            error = None
            try:
                if not self.lock.acquire(timeout=WAIT):
                    raise TimeoutError("The model is busy with other requests. Try again later.")
                try:
                    if sampling.seed >= 0:
                        transformers.set_seed(int(sampling.seed))
                    options = {**sampling.options(), "max_time": self.seconds, "stopping_criteria": [stopped], **more}
                    finish(session.generate(self.model, ids, streamer=streamer, **options))
                finally:
                    self.lock.release()
            except Exception as raised:
                error = raised
            except BaseException as raised:  # only the reader of its pieces waits for this thread
                error = RuntimeError(f"The generation ended with {type(raised).__name__}.")
            finally:
                pieces.put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        text, count, begun = start, 0, None
        try:
            while isinstance(piece := pieces.get(), str):
                begun = begun or time.perf_counter()
                text, count = text + piece, count + 1
                yield text, self._state_line(session, count, begun)
            if piece is not None:
                raise piece
            yield text, self._state_line(session, count, begun)
        finally:
            stop.set()
            thread.join()

    @staticmethod
    def _state_line(session: Session, count: int, begun: float | None) -> str:
        """The size of the state, and the speed since the first of `count` tokens."""
        cache = session.cache
        line = f"The state holds {cache.get_seq_length():,} tokens in {format_bytes(cache.nbytes)}"
        seconds = time.perf_counter() - begun if begun else 0
        return f"{line}; {(count - 1) / seconds:.0f} tokens per second." if count > 1 and seconds else f"{line}."


def build_app(demo: Demo):
    """The page, a `gradio.Blocks`."""
    import gradio as gr

    def continue_text(prompt, max_new_tokens, temperature, top_p, seed):
        yield from demo.text(prompt, Sampling(max_new_tokens, temperature, top_p, seed))

    def chat(message, history, conversation, system, max_new_tokens, temperature, top_p, seed):
        if not demo.reads_images:
            message = {"text": message, "files": []}
        turns = sum(each["role"] == "assistant" for each in history)
        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
        yield from demo.answer(conversation, turns, message["text"], message["files"], system, sampling)

    with gr.Blocks(title=f"{demo.name} - subquad", analytics_enabled=False) as app:
        gr.Markdown(f"# {demo.name}\n{demo.about()}")
        sampling = Sampling()
        with gr.Accordion("Sampling", open=False):
            controls = [
                gr.Slider(1, 4096, sampling.max_new_tokens, step=1, label="Maximum number of new tokens"),
                gr.Slider(0, 2, sampling.temperature, step=0.05, label="Temperature", info="0 is not random"),
                gr.Slider(0.05, 1, sampling.top_p, step=0.05, label="Top-p"),
                gr.Number(sampling.seed, precision=0, label="Seed", info="-1: another result each time"),
            ]
        state_line = gr.Markdown("Nothing has been read yet.", render=False)
        with gr.Tab("Text"):
            start = TUNE if demo.name in embedded_models() else ""
            text = gr.Textbox(start, lines=16, label="Text", info="The model goes on where it ends.")
            with gr.Row():
                go, stop = gr.Button("Continue", variant="primary"), gr.Button("Stop")
            running = go.click(continue_text, [text, *controls], [text, state_line], api_name="text")
            stop.click(None, cancels=[running])
        if demo.turns is not None:
            with gr.Tab("Chat"):
                gr.ChatInterface(
                    chat,
                    multimodal=demo.reads_images,
                    additional_inputs=[gr.State(Conversation()), gr.Textbox("", label="System message"), *controls],
                    additional_outputs=[state_line],
                    api_name="chat",
                    analytics_enabled=False,
                )
        state_line.render()
    return app


def main() -> None:
    arguments = parse_arguments()
    require("gradio", extra="demo")
    import gradio as gr

    demo = Demo(arguments.model, arguments.dtype, arguments.device, arguments.max_characters, arguments.seconds)
    # Local fonts: gradio's theme would fetch its own from another host.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    build_app(demo).queue(max_size=WAITING).launch(
        server_name=arguments.host, server_port=arguments.port, show_error=True, footer_links=["api"], theme=theme
    )


if __name__ == "__main__":
    main()
