"""The part of Kubernetes' API with which ``kubectl`` submits a cluster and looks at it: objects in
memory, without admission or schemas. Controllers see what is applied and deleted, and say which
pods there are."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

_RESOURCES = {
    "api/v1": {
        "ConfigMap": "configmaps",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Pod": "pods",
        "Secret": "secrets",
    },
    "apis/batch/v1": {"Job": "jobs"},
    "apis/networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "apis/jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "apis/trainer.kubeflow.org/v1alpha1": {
        "TrainJob": "trainjobs",
        "TrainingRuntime": "trainingruntimes",
    },
}
_KINDS = {plural: kind for kinds in _RESOURCES.values() for kind, plural in kinds.items()}
_VERBS = ["create", "delete", "get", "list", "patch"]


@dataclass
class ApiServer:
    """What the server has, and what it refuses.

    Attributes:
        objects: by path.
        calls: method, and path with its query, of all calls that change something.
        lacks: a part of the name of the group that is not installed.
        refusal: code, reason and message of an answer to each call that changes something.
        applied: gets the path of each object that has been applied.
        deleted: gets the path of each object that has been deleted.
        pods: returns the pods of controllers, by path.
        log: returns the log of one of these, by path.
        executed: runs a command in one of these; returns exit code, output and errors.
    """

    url: str = ""
    objects: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    refusal: tuple[int, str, str] | None = None
    lacks: str = "nothing"
    applied: Callable[[str], None] = lambda _: None
    deleted: Callable[[str], None] = lambda _: None
    pods: Callable[[], Mapping[str, Any]] = dict
    log: Callable[[str], str] = str
    executed: Callable[[str, Sequence[str]], tuple[int, bytes, bytes]] = lambda *_: (1, b"", b"")

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        """Returns the code and the document of the answer to a call."""
        path, query = urlsplit(target).path.strip("/"), parse_qs(urlsplit(target).query)
        found = self._discovery(path)
        if found is not None:
            return 200, found
        if method != "GET":
            self.calls.append((method, target))
            if self.refusal:
                return _status(*self.refusal)
        if method == "PATCH":
            document = yaml.safe_load(body)
            if "kind" not in document:
                # Not applied, but a patch.
                document = _patched(self.objects[path], document)
            if "dryRun" not in query:
                self.objects[path] = document
                self.applied(path)
            return 200, document
        pods = self.pods()
        if kind := _KINDS.get(path.rpartition("/")[2]):
            named = {**self.objects, **pods}
            items = [each for name, each in named.items() if name.startswith(f"{path}/")]
            wanted = query.get("labelSelector", [""])[0]
            items = [each for each in items if _selected(each, wanted)]
            version = path.partition("/namespaces/")[0].split("/", 1)[1]
            head = {"kind": f"{kind}List", "apiVersion": version, "metadata": {}}
            return 200, {**head, "items": items}
        if path.removesuffix("/log") in pods and path.endswith("/log"):
            return 200, self.log(path.removesuffix("/log"))
        if path not in self.objects and path not in pods:
            return _status(404, "NotFound", f"{path} not found")
        if method == "DELETE":
            self.objects.pop(path, None)
            self.deleted(path)
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 200, pods.get(path) or self.objects[path]

    def _discovery(self, path: str) -> Any:
        served = {p: r for p, r in _RESOURCES.items() if self.lacks not in p}
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            groups = []
            for each in served:
                if each.startswith("apis/"):
                    _, name, last = each.split("/")
                    one = {"groupVersion": f"{name}/{last}", "version": last}
                    groups.append({"name": name, "versions": [one], "preferredVersion": one})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path == "openapi/v3":
            documents = {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in served}
            return {"paths": documents}
        if path.startswith("openapi/v3/"):
            return _parameters(path.removeprefix("openapi/v3/"))
        if path in served:
            resources = [
                {
                    "name": name,
                    "singularName": "",
                    "namespaced": True,
                    "kind": kind,
                    "verbs": _VERBS,
                }
                for kind, name in served[path].items()
            ]
            version = path.partition("/")[2]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        return None


def _parameters(version: str) -> Any:
    """Says that the server itself checks fields and rehearses: `kubectl` looks for both."""
    _, _, name = version.partition("/")
    group, _, last = name.rpartition("/")
    named = [{"name": each, "in": "query"} for each in ("dryRun", "fieldValidation")]
    paths = {
        f"/{version}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {"group": group, "version": last, "kind": kind},
                "parameters": named,
            }
        }
        for kind, plural in _RESOURCES[version].items()
    }
    info = {"title": "Kubernetes", "version": "1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths}


def _patched(value: Any, patch: Any) -> Any:
    if not (isinstance(value, dict) and isinstance(patch, dict)):
        return patch
    return value | {name: _patched(value.get(name), each) for name, each in patch.items()}


def _selected(document: Any, wanted: str) -> bool:
    """Returns whether an object has the labels of a selector such as ``a=b,c=d``; all of the pods
    that tests put in by hand are selected."""
    labels = document["metadata"].get("labels")
    pairs = [each.split("=") for each in wanted.split(",") if each]
    return labels is None or all(labels.get(name) == value for name, value in pairs)


def _status(code: int, reason: str, message: str) -> tuple[int, Any]:
    kind = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**kind, "reason": reason, "message": message, "code": code}


def kubeconfig(server: ApiServer, folder: Path) -> dict[str, str]:
    """Returns the environment with which ``kubectl`` finds the server."""
    config = folder / "config"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\n"
        f"clusters: [{{name: a, cluster: {{server: '{server.url}'}}}}]\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "users: [{name: a, user: {}}]\n"
    )
    # In HOME it caches what a server at an address has.
    return {"KUBECONFIG": str(config), "HOME": str(folder)}


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Serves on a free port of this machine."""
    state = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            code, document = state.answer(self.command, self.path, self.rfile.read(length))
            text = isinstance(document, str)
            content = document.encode() if text else json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if text else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            target = urlsplit(self.path)
            if target.path.endswith("/exec"):
                pod = target.path.strip("/").removesuffix("/exec")
                self._answer_exec(state.executed(pod, parse_qs(target.query)["command"]))
            else:
                self.handle_any()

        def _answer_exec(self, ended: tuple[int, bytes, bytes]) -> None:
            """Answers on a WebSocket, in which the first byte of a frame is a channel."""
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
            accepted = base64.b64encode(sha1(key.encode()).digest()).decode()
            self.send_header("Sec-WebSocket-Accept", accepted)
            self.end_headers()
            code, output, errors = ended
            status: Any = {"status": "Success"}
            if code:
                causes = [{"reason": "ExitCode", "message": str(code)}]
                said = {"reason": "NonZeroExitCode", "details": {"causes": causes}}
                status = {"status": "Failure", "message": f"exit code {code}", **said}
            frames = [b"\x01" + output, b"\x02" + errors, b"\x03" + json.dumps(status).encode()]
            for frame in frames:
                self.wfile.write(b"\x82\x7f" + len(frame).to_bytes(8, "big") + frame)
            self.wfile.write(b"\x88\x02" + (1000).to_bytes(2, "big"))
            self.close_connection = True

        do_PATCH = do_DELETE = do_POST = handle_any  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
