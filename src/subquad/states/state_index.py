"""
An index of documents: their embeddings, and the states that a model has after reading them. A query then costs only
its own tokens, also when a reranker scores it with many documents.

A directory holds files of states and `index.json`, which names them and is written last. Documents that were removed
stay in their file until all documents of it are removed; [`StateIndex.save`] makes a copy without them.
"""

import json
import os
import warnings
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer

from ..hub.directories import check_free, new_directory
from ..hub.foreign_files import listed, naming, read_json, reading
from ..hub.new_files import locked, replacing
from ..modeling.arguments import check_counts
from ..modeling.cache import RecurrentCache
from ..modeling.state_file import (
    MOST_CHARACTERS,
    ModelIdentity,
    describe_owner,
    open_states,
    read_about,
    read_state_file,
    write_state_file,
)
from ..models import REGISTRY
from .identity import identify
from .packed_states import SCALE, to_int8


INDEX = "index.json"
VERSION = 1
STATE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
EMBEDDINGS = "embeddings"
# A file of states is written once it would have this many bytes, documents or characters of JSON.
FILE_BYTES, FILE_DOCUMENTS, FILE_CHARACTERS = 2**26, 256, 2**21
# Characters of a document's name and text as JSON. The limit lets each file be read again.
MOST_OF_A_DOCUMENT = MOST_CHARACTERS // 2
# Files of states that are open at a time.
OPEN_FILES = 64


@dataclass(frozen=True)
class Match:
    """
    A document that was found.

    Attributes:
        score: the cosine of query and document, or the reranker's probability that the document is relevant.
    """

    id: str
    score: float
    text: str


@dataclass(frozen=True)
class _Entry:
    """A document: its file, its row there, the checksum of its states, the number of tokens in them."""

    file: str
    row: int
    text: str
    checksum: int
    tokens: int


# A document that waits to be written: its name, its text, the number of tokens in its states, and its embedding and
# states by name.
_Document = tuple[str, str, int, dict[str, torch.Tensor]]


class StateIndex:
    """
    An index of documents by embeddings and states. [`StateIndex.create`] makes one, [`StateIndex.load`] opens one. It
    is always saved: every file is complete before `index.json` names it, so an interruption loses at most the
    documents of the file that was not written yet, and adding the same documents again goes on there. Several
    processes may read it; after one has changed it, the others must open it again before they change it. Only one
    thread may use it at a time.

    Attributes:
        directory: its place.
        identity: the embedding model that made it.
        state_dtype: "float32", "float16" or "int8".
        model, tokenizer: those that read texts.
    """

    def __init__(
        self,
        directory: Path,
        model: str | os.PathLike,
        identity: ModelIdentity,
        about: dict[str, Any],
        dtype: str | torch.dtype,
    ):
        self.directory, self.identity, self._about = directory, identity, about
        self.state_dtype: str = about["state_dtype"]
        self._entries: dict[str, _Entry] = {}
        self._rows: dict[str, int] = {}
        self._opened: OrderedDict[str, Any] = OrderedDict()
        self._checked: set[tuple[str, int]] = set()
        self._embeddings: tuple[list[str], np.ndarray] | None = None
        for file, removed in about["files"].items():
            self._read_entries(file, set(removed))
        self.config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self.model = REGISTRY[self.config.model_type].lm_class.from_pretrained(model, dtype=dtype).eval()

    # --- making and opening ---

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike,
        model: str | os.PathLike,
        *,
        state_dtype: str = "float32",
        dtype: str | torch.dtype = "auto",
    ) -> "StateIndex":
        """
        Makes an empty index.

        Args:
            directory: must not exist, or be empty.
            model: directory or Hub name of an embedding model, or of a reranker.
            state_dtype: dtype of the stored states: "float32", "float16", or "int8" with a scale for each row of each
                head's state. The embeddings are float32.
            dtype: dtype of the model; "auto" is that of its weights.

        Raises:
            ValueError: if the directory is occupied, or the model is no embedding model.
        """
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"`state_dtype` must be one of {', '.join(STATE_DTYPES)}, got {state_dtype!r}.")
        directory = Path(directory).resolve()
        check_free(directory)
        identity = _identify(model)
        about = {"subquad_index": VERSION, "model": describe_owner(identity), "state_dtype": state_dtype}
        about |= {"next": 1, "files": {}}
        index = cls(directory, model, identity, about, dtype)
        directory.mkdir(parents=True, exist_ok=True)
        with index._changing():
            _write_json(directory / INDEX, about)
        return index

    @classmethod
    def load(
        cls, directory: str | os.PathLike, model: str | os.PathLike, *, dtype: str | torch.dtype = "auto"
    ) -> "StateIndex":
        """
        Opens an index. Its states are mapped from the files into memory, and read when they are needed.

        Args:
            model: directory or Hub name of the embedding model that made it, or of a reranker that has this model in
                it.
            dtype: dtype of the model; "auto" is that of its weights.

        Raises:
            ValueError: before the model is loaded, if the index is damaged or belongs to another model; the message
                names both.
        """
        directory = Path(directory).resolve()
        about = _read_index(directory)
        identity, owner = _identify(model), ModelIdentity(**about["model"])
        if owner.digest != identity.digest:
            raise ValueError(
                f"{directory} is an index of the embedding model {owner}; given is {identity}, or a reranker with it."
            )
        return cls(directory, model, identity, about, dtype)

    def to(self, device: str | torch.device) -> "StateIndex":
        """Moves the model to a device, and returns the index."""
        self.model.to(device)
        return self

    # --- content ---

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: str) -> bool:
        return id in self._entries

    @property
    def ids(self) -> list[str]:
        """The names of all documents."""
        return list(self._entries)

    def text(self, id: str) -> str:
        """
        The text of a document.

        Raises:
            KeyError: if there is none of that name.
        """
        return self._entry(id).text

    @property
    def nbytes(self) -> int:
        """Size of all files of states."""
        return sum((self.directory / file).stat().st_size for file in self._about["files"])

    # --- changes ---

    @torch.no_grad()
    def add(
        self,
        documents: Mapping[str, str] | Iterable[tuple[str, str]],
        *,
        batch_size: int = 8,
        progress: bool = False,
    ) -> int:
        """
        Reads documents. One that is there with the same text is skipped, and replaced if its text differs.

        Args:
            documents: names and texts. Of a text longer than the tokenizer's `model_max_length`, only the end is read.
            batch_size: documents that are read together.
            progress: whether to show a progress bar on stderr.

        Returns:
            the number of documents that were read.

        Raises:
            ValueError: before any work, if a name occurs twice, or if a text is empty, too long or not valid Unicode.
        """
        check_counts(batch_size=batch_size)
        self._check_unchanged()
        pairs = list(documents.items() if isinstance(documents, Mapping) else documents)
        if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise ValueError(f"`documents` has some names twice: {listed(twice)}.")
        for name, text in pairs:
            _check_document(name, text)
        new = [(name, text) for name, text in pairs if name not in self._entries or self.text(name) != text]
        inputs, longest = [], self.tokenizer.model_max_length
        for name, text in new:
            document = self._encode(self.model.document_text(text), end=False)
            inputs.append((name, text, self._encode(text, end=True), document[-longest:]))
        if cut := sum(len(ids) > longest for _, _, ids, _ in inputs):
            warnings.warn(
                f"{cut} documents have more than {longest} tokens: only their end is read. Split them.",
                stacklevel=2,
            )
        inputs = [(name, text, ids[-longest:], document) for name, text, ids, document in inputs]
        inputs.sort(key=lambda each: len(each[2]))  # little padding
        read = self._read_documents(inputs, batch_size)
        for file in _by_file(tqdm(read, "Reading", len(inputs), unit="documents", disable=not progress)):
            self._write_file(file)
        return len(inputs)

    def remove(self, ids: str | Iterable[str]) -> None:
        """
        Forgets documents. A file is deleted once all of its documents are removed.

        Raises:
            KeyError: before any change, if there is no document of a name.
        """
        if entries := {name: self._entry(name) for name in _names(ids)}:
            with self._changing():
                self._forget(entries)

    def save(self, directory: str | os.PathLike, state_dtype: str | None = None) -> None:
        """
        Writes a copy without the documents that were removed.

        Args:
            directory: must not exist, or be empty. It appears complete or not at all.
            state_dtype: a narrower dtype for the states of the copy; None keeps theirs.

        Raises:
            ValueError: if the directory is occupied, or the dtype is wider.
        """
        kinds, state_dtype = list(STATE_DTYPES), state_dtype or self.state_dtype
        if state_dtype not in kinds or kinds.index(state_dtype) < kinds.index(self.state_dtype):
            narrower = ", ".join(kinds[kinds.index(self.state_dtype) :])
            raise ValueError(f"`state_dtype` must be one of {narrower}, got {state_dtype!r}.")
        directory = Path(directory).resolve()
        check_free(directory)
        with new_directory(directory, self.nbytes) as partial:
            files: dict[str, list[int]] = {}
            for documents in _by_file(map(self._stored_document, self._entries)):
                files[file := _file_name(len(files) + 1)] = []
                self._write_documents(partial / file, documents, state_dtype)
            about = self._about | {"state_dtype": state_dtype, "next": len(files) + 1, "files": files}
            _write_json(partial / INDEX, about)

    def check(self) -> None:
        """
        Reads all files.

        Raises:
            ValueError: if one is damaged; the message names it. Reading states for a query finds damage, too.
        """
        for file in self._about["files"]:
            read_state_file(self.directory / file)

    # --- queries ---

    @torch.no_grad()
    def search(self, query: str, k: int = 10) -> list[Match]:
        """The k documents whose embeddings have the largest cosine with the query's, best first."""
        check_counts(k=k)
        names, embeddings = self._all_embeddings()
        ids = self._encode(self.model.query_text(query), end=True)[-self.tokenizer.model_max_length :]
        found = self.model.embed(self._tensor([ids]), use_cache=False).pooler_output.float()
        scores = embeddings @ torch.nn.functional.normalize(found, dim=-1)[0].cpu().numpy()
        best = np.argsort(-scores, kind="stable")[:k]
        return [Match(names[i], float(scores[i]), self.text(names[i])) for i in best]

    def rank(
        self,
        query: str,
        k: int = 10,
        *,
        candidates: int | None = 100,
        batch_size: int = 16,
        progress: bool = False,
    ) -> list[Match]:
        """
        The k documents with the highest scores of the reranker, best first.

        Args:
            candidates: the number of documents that the reranker scores, at least k, those that
                [`~StateIndex.search`] finds; all documents if None.
            batch_size: documents that the query is read after together.
            progress: whether to show a progress bar on stderr.

        Raises:
            ValueError: if the index was opened with an embedding model alone, or a number is not a
                whole number above 0.
        """
        check_counts(k=k, candidates=1 if candidates is None else candidates, batch_size=batch_size)
        self._check_reranker()
        chosen = self.ids if candidates is None else [each.id for each in self.search(query, max(k, candidates))]
        scores = self.score(query, chosen, batch_size=batch_size, progress=progress)
        best = sorted(zip(scores, chosen, strict=True), key=lambda pair: -pair[0])[:k]
        return [Match(name, score, self.text(name)) for score, name in best]

    @torch.no_grad()
    def score(
        self, query: str, ids: str | Iterable[str], *, batch_size: int = 16, progress: bool = False
    ) -> list[float]:
        """
        The reranker's probabilities that documents are relevant for a query, from their stored states. For the
        arguments see [`~StateIndex.rank`].

        Raises:
            KeyError: before any work, if there is no document of a name.
            ValueError: if states are damaged, the index was opened with an embedding model alone, or `batch_size` is
                not a whole number above 0.
        """
        check_counts(batch_size=batch_size)
        self._check_reranker()
        ids = _names(ids)
        entries = [self._entry(name) for name in ids]
        order = sorted(range(len(entries)), key=lambda i: (entries[i].file, entries[i].row))
        tokens = self._encode(self.model.query_after_document(query), end=True)
        scores = [0.0] * len(entries)
        with tqdm(total=len(entries), unit="documents", desc="Ranking", disable=not progress) as bar:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                cache = self.states_of([ids[i] for i in batch])
                logits = self.model(self._tensor([tokens] * len(batch)), cache=cache, use_cache=False).logits
                for i, score in zip(batch, logits[:, 0].float().sigmoid().tolist(), strict=True):
                    scores[i] = score
                bar.update(len(batch))
        return scores

    def _check_reranker(self) -> None:
        if not hasattr(self.model, "score"):
            raise ValueError(
                f"{self.identity} is an embedding model alone: open the index with the directory of a reranker."
            )

    # --- texts ---

    def _encode(self, text: str, end: bool) -> list[int]:
        """Ids of a text. Names of special tokens in it are ordinary text."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        return [*ids, self.config.end_token_id] if end else ids

    def _tensor(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self.model.device)

    def _padded(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        width = max(map(len, rows))
        ids = [row + [0] * (width - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return {"input_ids": self._tensor(ids), "attention_mask": self._tensor(mask)}

    # --- states ---

    def _read_documents(
        self, inputs: list[tuple[str, str, list[int], list[int]]], batch_size: int
    ) -> Iterator[_Document]:
        """Reads names and texts with their ids, first those for the embedding, then those for the states."""
        for start in range(0, len(inputs), batch_size):
            batch = inputs[start : start + batch_size]
            found = self.model.embed(**self._padded([ids for _, _, ids, _ in batch]), use_cache=False).pooler_output
            found = torch.nn.functional.normalize(found.float(), dim=-1)
            layers = self.model.read(**self._padded([ids for *_, ids in batch]), use_cache=True).cache.layers
            columns = {name: torch.stack([layer.states[name] for layer in layers], 1) for name in layers[0].states}
            columns = {name: x.float().cpu() for name, x in {EMBEDDINGS: found, **columns}.items()}
            for row, (name, text, _, document) in enumerate(batch):
                yield name, text, len(document), {key: x[row] for key, x in columns.items()}

    def _stored_document(self, name: str) -> _Document:
        entry = self._entries[name]
        embedding = self._open(entry.file).get_slice(EMBEDDINGS)[entry.row]
        return name, entry.text, entry.tokens, {EMBEDDINGS: embedding, **self._read_row(entry)}

    def states_of(self, ids: str | Iterable[str]) -> RecurrentCache:
        """
        The states after documents, one row each: a cache of the model, in which a query may be read.

        Raises:
            KeyError: if there is no document of a name.
            ValueError: if no name is given, or states are damaged.
        """
        entries = [self._entry(name) for name in _names(ids)]
        if not entries:
            raise ValueError("`ids` must have at least one name, got none.")
        cache, rows = self.model.new_cache(), [self._read_row(entry) for entry in entries]
        for name in rows[0]:
            dtype = torch.float32 if name in cache.float32_names else self.model.dtype
            first = rows[0][name]
            states = torch.empty(len(first), len(rows), *first.shape[1:], dtype=dtype)
            for i, row in enumerate(rows):
                states[:, i] = row[name]
            for layer, state in zip(cache.layers, states.to(self.model.device), strict=True):
                layer.write(name, state)
        cache.seen_tokens = max(entry.tokens for entry in entries)
        return cache

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = open_states(self.directory / file)
            if len(self._opened) > OPEN_FILES:
                self._opened.popitem(last=False)
        self._opened.move_to_end(file)
        return self._opened[file]

    def _read_row(self, entry: _Entry) -> dict[str, torch.Tensor]:
        """The states of a document by name, (layers, ...) in float32."""
        opened = self._open(entry.file)
        with reading(self.directory / entry.file, "the states"):
            names = [name for name in opened.keys() if name != EMBEDDINGS]
            stored = {name: opened.get_slice(name)[entry.row] for name in names}
        if (place := (entry.file, entry.row)) not in self._checked:
            if _checksum(stored) != entry.checksum:
                raise ValueError(f"{self.directory / entry.file} is damaged or was changed: row {entry.row}.")
            self._checked.add(place)
        return _widened(stored)

    def _all_embeddings(self) -> tuple[list[str], np.ndarray]:
        """The names of all documents, and their embeddings (documents, width)."""
        if self._embeddings is None:
            by_file: dict[str, list[tuple[str, int]]] = {}
            for name, entry in self._entries.items():
                by_file.setdefault(entry.file, []).append((name, entry.row))
            names, parts = [], [np.zeros((0, self.config.hidden_size), np.float32)]
            for file, rows in by_file.items():
                names += [name for name, _ in rows]
                parts.append(self._open(file).get_tensor(EMBEDDINGS).numpy()[[row for _, row in rows]])
            self._embeddings = names, np.concatenate(parts)
        return self._embeddings

    # --- files ---

    def _entry(self, id: str) -> _Entry:
        if id not in self._entries:
            raise KeyError(f"{self.directory} has no document {id!r}.")
        return self._entries[id]

    def _read_entries(self, file: str, removed: set[int]) -> None:
        """Adds the documents of a file, which is not read but for its description."""
        path = self.directory / file
        about = read_about(path)
        if about.get("model") != self._about["model"]:
            raise ValueError(f"{path} is not a file of this index: it belongs to the model {about.get('model')}.")
        with reading(path, "the documents"):
            documents = about["text"]["documents"]
            self._rows[file] = len(documents)
            for row, document in enumerate(documents):
                if row not in removed:
                    name = document.pop("id")
                    self._entries[name] = _Entry(file, row, **document)

    def _write_file(self, documents: list[_Document]) -> None:
        """Writes documents to a new file, and then an index that has it and no earlier texts of them."""
        with self._changing():
            number = self._about["next"]
            self._write_documents(self.directory / (file := _file_name(number)), documents, self.state_dtype)
            replaced = {name: self._entries[name] for name, *_ in documents if name in self._entries}
            self._forget(replaced, {"next": number + 1, "files": {file: []}})
            self._read_entries(file, set())

    def _write_documents(self, path: Path, documents: list[_Document], state_dtype: str) -> None:
        about, columns = [], {}
        for name, text, tokens, row in documents:
            with naming(repr(name)):
                stored = _narrowed({key: x for key, x in row.items() if key != EMBEDDINGS}, STATE_DTYPES[state_dtype])
            about.append({"id": name, "text": text, "tokens": tokens, "checksum": _checksum(stored)})
            for key, x in {EMBEDDINGS: row[EMBEDDINGS], **stored}.items():
                columns.setdefault(key, []).append(x)
        fields = {"sizes": self.model.new_cache().sizes, "seen_tokens": max(each["tokens"] for each in about)}
        fields |= {"dtype": state_dtype, "model": self._about["model"], "text": {"documents": about}}
        write_state_file(path, {key: torch.stack(rows) for key, rows in columns.items()}, fields)

    def _forget(self, entries: dict[str, _Entry], new: dict[str, Any] | None = None) -> None:
        """Writes an index without these documents, and with the values and files in `new`; deletes empty files."""
        files = {file: list(rows) for file, rows in self._about["files"].items()}
        for entry in entries.values():
            files[entry.file].append(entry.row)
        empty = [file for file, rows in files.items() if rows and len(rows) == self._rows[file]]
        files = {file: sorted(rows) for file, rows in files.items() if file not in empty}
        new = dict(new or {})
        about = self._about | new | {"files": files | new.get("files", {})}
        _write_json(self.directory / INDEX, about)
        self._about = about
        for name in entries:
            del self._entries[name]
        for file in empty:
            self._opened.pop(file, None)
            with suppress(OSError):
                (self.directory / file).unlink()
        self._embeddings = None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keeps other processes from changing the index, which nobody has changed since it was opened."""
        with locked(self.directory, wait=True):
            self._check_unchanged()
            yield

    def _check_unchanged(self) -> None:
        """
        Raises:
            ValueError: if another process has changed the index since it was opened.
        """
        path = self.directory / INDEX
        if path.exists() and read_json(path) != self._about:
            raise ValueError(f"{path} was changed by another process; open the index again.")


def _identify(model: str | os.PathLike) -> ModelIdentity:
    """
    Raises:
        ValueError: if the model has no embedding model in it.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if config.model_type not in REGISTRY or REGISTRY[config.model_type].embedder is None:
        known = ", ".join(name for name, each in REGISTRY.items() if each.embedder)
        raise ValueError(f"{model} is of type {config.model_type}; an index needs a model of type {known}.")
    return identify(model)


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    if not path.is_file():
        raise ValueError(f"{directory} is not an index: it has no {INDEX}.")
    about = read_json(path)
    if about.get("subquad_index") != VERSION:
        raise ValueError(f"{path} is not an index that this version can read.")
    kinds = {"model": dict, "state_dtype": str, "next": int, "files": dict}
    wrong = [name for name, kind in kinds.items() if name not in about or not isinstance(about[name], kind)]
    if not wrong and {name: type(value) for name, value in about["model"].items()} != {"name": str, "digest": str}:
        wrong.append("model")
    if not wrong and about["state_dtype"] not in STATE_DTYPES:
        wrong.append("state_dtype")
    for file, rows in about["files"].items() if not wrong else ():
        plain = Path(file).name == file and file.endswith(".safetensors")
        if not plain or not isinstance(rows, list) or not all(type(row) is int for row in rows):
            wrong.append(f"files: {file}")
    if wrong:
        raise ValueError(f"{path} is damaged: `{wrong[0]}` does not have a value that is possible.")
    return about


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_document(name: Any, text: Any) -> None:
    """
    Raises:
        ValueError: if name and text are not strings that can be stored and read.
    """
    if not (isinstance(name, str) and isinstance(text, str) and name and text.strip()):
        raise ValueError(f"`documents`: names and texts must be strings that are not empty, got {name!r}.")
    try:
        f"{name}{text}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`documents`: {name!r} is not valid Unicode: {error}.") from error
    if (size := _characters(name, text)) > MOST_OF_A_DOCUMENT:
        raise ValueError(
            f"`documents`: {name!r} has {size:,} characters as JSON, and may have {MOST_OF_A_DOCUMENT:,}."
        )


def _characters(*texts: str) -> int:
    return sum(len(json.dumps(text)) for text in texts)


def _names(ids: str | Iterable[str]) -> list[str]:
    return [ids] if isinstance(ids, str) else list(ids)


def _file_name(number: int) -> str:
    return f"states-{number:06}.safetensors"


def _by_file(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    """Documents in the groups that are a file."""
    waiting, size, characters = [], 0, 0
    for document in documents:
        waiting.append(document)
        name, text, _, row = document
        size, characters = size + sum(x.nbytes for x in row.values()), characters + _characters(name, text)
        if size >= FILE_BYTES or len(waiting) >= FILE_DOCUMENTS or characters >= FILE_CHARACTERS:
            yield waiting
            waiting, size, characters = [], 0, 0
    if waiting:
        yield waiting


def _checksum(states: dict[str, torch.Tensor]) -> int:
    checksum = 0
    for name in sorted(states):
        checksum = zlib.crc32(states[name].contiguous().view(-1).view(torch.uint8).numpy(), checksum)
    return checksum


def _narrowed(states: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """
    States in another dtype. In int8, matrices have a scale for each row; vectors are float16.

    Raises:
        ValueError: if one is not finite, or too large for float16.
    """
    stored = {}
    for name, x in states.items():
        if dtype == torch.int8 and x.dim() > 2:
            stored[name], stored[name + SCALE] = to_int8(x)
            continue
        stored[name] = x.to(torch.float16 if dtype == torch.int8 else dtype)
    for name, x in stored.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"The state `{name}` is not finite in {str(dtype).removeprefix('torch.')}.")
    return stored


def _widened(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of [`_narrowed`], in float32."""
    states = {}
    for name, x in stored.items():
        if not name.endswith(SCALE):
            states[name] = x.float() * stored.get(name + SCALE, 1)
    return states


__all__ = ["Match", "StateIndex"]
