"""A Hub on this machine: the parts of its protocol that huggingface_hub uses for models, over HTTP, in memory."""

import base64
import fnmatch
import hashlib
import json
import re
import sys
import threading
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


# Files that `.gitattributes` of a new repository puts into LFS.
LFS_PATTERNS = ("*.bin", "*.gguf", "*.h5", "*.npz", "*.onnx", "*.pt", "*.pth", "*.safetensors")
ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS).encode()
# Larger files go through LFS on the Hub, whatever their name.
LARGEST_REGULAR = 10 * 2**20
NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass(frozen=True)
class Commit:
    """Files are paths with their contents; those of `lfs` are stored by their SHA-256."""

    oid: str
    title: str
    description: str
    files: dict[str, bytes]
    lfs: frozenset[str]


@dataclass
class Repository:
    """`refs` are branches and pull requests, by their full names, each with its commits from the first to the last."""

    name: str
    private: bool
    refs: dict[str, list[Commit]] = field(default_factory=dict)

    def __post_init__(self):
        self.commit("refs/heads/main", "initial commit", "", {".gitattributes": ATTRIBUTES}, frozenset())

    def commit(self, ref: str, title: str, description: str, files: dict[str, bytes], lfs: frozenset[str]) -> Commit:
        parents = self.refs.setdefault(ref, [])
        content = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items())
        oid = hashlib.sha1(repr((len(parents), title, content)).encode()).hexdigest()
        parents.append(Commit(oid, title, description, files, lfs))
        return parents[-1]

    def resolve(self, revision: str) -> Commit | None:
        for ref in (f"refs/heads/{revision}", revision):
            if ref in self.refs:
                return self.refs[ref][-1]
        return next((each for commits in self.refs.values() for each in commits if each.oid == revision), None)

    @property
    def commits(self) -> list[Commit]:
        return self.refs["refs/heads/main"]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1].files


class HubServer(ThreadingHTTPServer):
    """
    The server; a context manager that listens while it is entered.

    Attributes:
        url: the endpoint.
        storage: address of LFS, of another host than the Hub's, to which the client sends no token.
        tokens: token to its user and whether it may write; a user owns the namespace of that name.
        repositories: by name.
        objects: contents that LFS holds, by SHA-256.
        requests: method and path of every request.
        problems: requests that this server does not know, and errors of its own.
        break_uploads: that many uploads of LFS objects end with a broken connection halfway.
        break_downloads: as many downloads of LFS objects, likewise.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.storage = f"http://localhost:{self.server_address[1]}"
        self.tokens = {"hf_user": ("user", True), "hf_reader": ("reader", False), "hf_other": ("other", True)}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.break_uploads = 0
        self.break_downloads = 0
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may go away
            self.problems.append(traceback.format_exc())

    def repository(self, name: str, private: bool = False) -> Repository:
        """Makes a repository, as its owner would."""
        self.repositories[name] = Repository(name, private)
        return self.repositories[name]


class Refusal(Exception):
    """An answer other than success, with the headers that huggingface_hub makes its errors of."""

    def __init__(self, status: int, message: str, code: str = "", commit: str = ""):
        self.status, self.message, self.headers = status, message, {"X-Error-Message": message}
        if code:
            self.headers["X-Error-Code"] = code
        if commit:
            self.headers["X-Repo-Commit"] = commit


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args):
        pass

    def answer(self, status: int = 200, body: bytes | dict | list = b"", **headers: str) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content_Type", "application/json")
        headers.setdefault("Content_Length", str(len(body)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.server.requests.append((self.command, unquote(url.path)))
        # Segments are matched as they are written, because a revision may have a `/`, as %2F.
        method = "GET" if self.command == "HEAD" else self.command
        found = ((re.fullmatch(route, url.path), verb, action) for (verb, route), action in ROUTES.items())
        match, action = next(((m, act) for m, verb, act in found if m and verb == method), (None, Handler.missing))
        if match is None:
            self.server.problems.append(f"unknown: {self.command} {self.path}")
        # Also of a request that is refused: the next one comes after it.
        if action is not Handler.upload:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            # Uploads and downloads need no token, as on the Hub, where their address is signed.
            self.user, self.writes = (None, False) if action in SIGNED else self.authorize()
            parts = {name: unquote(part) for name, part in match.groupdict().items()} if match else {}
            with self.server.lock:
                action(self, **parts)
        except Refusal as refusal:
            self.answer(refusal.status, {"error": refusal.message}, **refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def authorize(self) -> tuple[str | None, bool]:
        header = self.headers.get("Authorization")
        if header is None:
            return None, False
        try:
            return self.server.tokens[header.removeprefix("Bearer ")]
        except KeyError:
            raise Refusal(401, "Invalid credentials in Authorization header") from None

    def missing(self) -> None:
        raise Refusal(404, "Not found")

    def open(self, repo: str, write: bool = False) -> Repository:
        """A repository for reading, or for writing."""
        repository = self.server.repositories.get(repo)
        owner = self.user == repo.split("/")[0]
        if repository is None or (repository.private and not owner):
            raise Refusal(401 if self.user is None else 404, "Repository not found", "RepoNotFound")
        if write and self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if write and not (owner and self.writes):
            raise Refusal(403, f"You don't have the rights to write to {repo}")
        return repository

    def commit_of(self, repository: Repository, revision: str) -> Commit:
        if (commit := repository.resolve(revision)) is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def whoami(self) -> None:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        self.answer(body={"type": "user", "name": self.user, "orgs": []})

    def create(self) -> None:
        fields = json.loads(self.body)
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        owner = fields.get("organization") or self.user
        name = f"{owner}/{fields['name']}"
        if owner != self.user or not self.writes:
            raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{owner}".')
        body = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repositories:
            return self.answer(409, body | {"error": "You already created this model repo"})
        # Early versions of huggingface_hub have another name for it.
        self.server.repository(name, fields.get("private", fields.get("visibility") == "private"))
        self.answer(body=body)

    def info(self, repo: str, revision: str = "main") -> None:
        repository = self.open(repo)
        commit = self.commit_of(repository, revision)
        files = [{"rfilename": path} for path in sorted(commit.files)]
        self.answer(
            body={
                "id": repo,
                "modelId": repo,
                "sha": commit.oid,
                "private": repository.private,
                "tags": [],
                "siblings": files,
            }
        )

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        commit = self.commit_of(self.open(repo), revision)
        found, folders = [], set()
        prefix = f"{folder}/" if folder else ""
        for path, data in sorted(commit.files.items()):
            inside = path.removeprefix(prefix)
            if not path.startswith(prefix):
                continue
            if "/" in inside and self.query.get("recursive", "").lower() not in ("1", "true"):
                folders.add(prefix + inside.split("/")[0])
                continue
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
            if path in commit.lfs:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            found.append(entry)
        if folder and not found and not folders:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound", commit.oid)
        self.answer(body=[*({"type": "directory", "path": path, "oid": ""} for path in sorted(folders)), *found])

    def refs(self, repo: str) -> None:
        lists: dict[str, list] = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
        for ref, commits in self.open(repo).refs.items():
            kind = "branches" if ref.startswith("refs/heads/") else "pullRequests"
            name = ref.removeprefix("refs/heads/")
            lists[kind].append({"name": name, "ref": ref, "targetCommit": commits[-1].oid})
        self.answer(body=lists)

    def branch(self, repo: str, revision: str) -> None:
        repository = self.open(repo, write=True)
        ref = f"refs/heads/{revision}"
        if revision.startswith("refs/"):
            raise Refusal(400, f"Invalid reference for a branch: {revision}")
        if ref in repository.refs:
            raise Refusal(409, f"Reference already exists: {ref}")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repository.refs[ref] = [self.commit_of(repository, start)]
        self.answer()

    def validate_yaml(self) -> None:
        self.answer(body={"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        repository = self.open(repo, write="create_pr" not in self.query)
        commit = self.commit_of(repository, revision)
        files = []
        for each in json.loads(self.body)["files"]:
            path, data = each["path"], commit.files.get(each["path"])
            lfs = is_lfs(path, each["size"])
            oid = None if data is None else hashlib.sha256(data).hexdigest() if lfs else git_oid(data)
            mode = "lfs" if lfs else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(body={"files": files, "commitOid": commit.oid})

    def batch(self, repo: str) -> None:
        fields = json.loads(self.body)
        self.open(repo, write="ref" in fields)  # a pull request names none
        objects = []
        for each in fields["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.server.objects:
                verify = {"href": f"{self.server.url}/{repo}.git/info/lfs/objects/verify"}
                entry["actions"] = {"upload": {"href": f"{self.server.storage}/lfs/{each['oid']}"}, "verify": verify}
            objects.append(entry)
        self.answer(body={"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def upload(self, oid: str) -> None:
        size = int(self.headers["Content-Length"])
        if self.server.break_uploads:
            self.server.break_uploads -= 1
            self.rfile.read(size // 2)
            self.hang_up()
            return
        data = self.rfile.read(size)
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refusal(400, "The content is not what was announced.")
        self.server.objects[oid] = data
        self.answer()

    def verify(self, repo: str) -> None:
        fields = json.loads(self.body)
        if len(self.server.objects.get(fields["oid"], b"")) != fields["size"]:
            raise Refusal(422, "The object is missing or has another size.")
        self.answer()

    def commit(self, repo: str, revision: str) -> None:
        opens_pull_request = "create_pr" in self.query
        repository = self.open(repo, write=not opens_pull_request)
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if opens_pull_request and revision != "main":
            raise Refusal(400, "A pull request is opened against main.")
        parent = self.commit_of(repository, revision)
        files, lfs, header = dict(parent.files), set(parent.lfs), {}
        for line in self.body.splitlines():
            key, value = (json.loads(line)[name] for name in ("key", "value"))
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                lfs.discard(value["path"])
            elif key == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise Refusal(400, f"{value['path']} was not uploaded.")
                files[value["path"]] = self.server.objects[value["oid"]]
                lfs.add(value["path"])
            elif key == "deletedFile" and value["path"] in files:
                del files[value["path"]]
                lfs.discard(value["path"])
            else:
                raise Refusal(400, f"{key} of {value} cannot be done.")
        answer = {}
        if opens_pull_request:
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
            ref = f"refs/pr/{number}"
            repository.refs[ref] = [parent]
            answer = {"pullRequestUrl": f"{self.server.url}/{repo}/discussions/{number}"}
        else:
            ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        made = repository.commit(ref, header["summary"], header["description"], files, frozenset(lfs))
        url = f"{self.server.url}/{repo}/commit/{made.oid}"
        self.answer(body={"success": True, "commitOid": made.oid, "commitUrl": url, **answer})

    def resolve(self, repo: str, revision: str, path: str) -> None:
        commit = self.commit_of(self.open(repo), revision)
        if path not in commit.files:
            raise Refusal(404, "Entry not found", "EntryNotFound", commit.oid)
        data = commit.files[path]
        if path not in commit.lfs:
            return self.send_data(data, git_oid(data), X_Repo_Commit=commit.oid)
        oid = hashlib.sha256(data).hexdigest()
        linked = {"X_Linked_Etag": f'"{oid}"', "X_Linked_Size": str(len(data)), "X_Repo_Commit": commit.oid}
        self.answer(302, Location=f"{self.server.storage}/lfs/{oid}", **linked)

    def download(self, oid: str) -> None:
        if oid not in self.server.objects:
            raise Refusal(404, "Not found")
        self.send_data(self.server.objects[oid], oid)

    def send_data(self, data: bytes, etag: str, **headers: str) -> None:
        size, status, first = len(data), 200, 0
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
            if first > last:
                return self.answer(416, Content_Range=f"bytes */{size}")
            data, status = data[first : last + 1], 206
            headers["Content_Range"] = f"bytes {first}-{last}/{size}"
        headers |= {"ETag": f'"{etag}"', "Accept_Ranges": "bytes", "Content_Length": str(len(data))}
        if self.server.break_downloads and self.command == "GET" and self.path.startswith("/lfs/"):
            self.server.break_downloads -= 1
            self.answer(status, data[: len(data) // 2], **headers)
            self.hang_up()
            return
        self.answer(status, data, **headers)

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(path: str, size: int) -> bool:
    return size > LARGEST_REGULAR or any(fnmatch.fnmatch(path, pattern) for pattern in LFS_PATTERNS)


REVISION = r"(?P<revision>[^/]+)"
ROUTES = {
    ("GET", "/api/agent-harnesses"): Handler.missing,  # the client ignores a missing answer
    ("GET", "/api/whoami-v2"): Handler.whoami,
    ("POST", "/api/repos/create"): Handler.create,
    ("POST", "/api/validate-yaml"): Handler.validate_yaml,
    ("GET", f"/api/models/{NAME}"): Handler.info,
    ("GET", f"/api/models/{NAME}/revision/{REVISION}"): Handler.info,
    ("GET", f"/api/models/{NAME}/refs"): Handler.refs,
    ("GET", f"/api/models/{NAME}/tree/{REVISION}"): Handler.tree,
    ("GET", f"/api/models/{NAME}/tree/{REVISION}/(?P<folder>.+)"): Handler.tree,
    ("POST", f"/api/models/{NAME}/branch/{REVISION}"): Handler.branch,
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}"): Handler.preupload,
    ("POST", f"/api/models/{NAME}/commit/{REVISION}"): Handler.commit,
    ("POST", f"/{NAME}.git/info/lfs/objects/batch"): Handler.batch,
    ("POST", f"/{NAME}.git/info/lfs/objects/verify"): Handler.verify,
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})"): Handler.upload,
    ("GET", "/lfs/(?P<oid>[0-9a-f]{64})"): Handler.download,
    ("GET", f"/{NAME}/resolve/{REVISION}/(?P<path>.+)"): Handler.resolve,
}
SIGNED = (Handler.upload, Handler.download)
