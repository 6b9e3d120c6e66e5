"""The part of Kubernetes' API that ``kubectl`` uses to submit a cluster: objects in memory, without
admission, schemas or controllers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    "apis/networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "apis/jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "apis/trainer.kubeflow.org/v1alpha1": {
        "TrainJob": "trainjobs",
        "TrainingRuntime": "trainingruntimes",
    },
}
_VERBS = ["create", "delete", "get", "list", "patch"]


@dataclass
class ApiServer:
    """What the server has, and what it refuses.

    Attributes:
        objects: by path.
        calls: method, and path with its query, of all calls that change something.
        lacks: a part of the name of the group that is not installed.
        refusal: code, reason and message of an answer to each call that changes something.
    """

    url: str = ""
    objects: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    refusal: tuple[int, str, str] | None = None
    lacks: str = "nothing"

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
            if "dryRun" not in query:
                self.objects[path] = document
            return 200, document
        if path.endswith("/pods"):
            pods = [each for name, each in self.objects.items() if name.startswith(f"{path}/")]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}
        if path not in self.objects:
            return _status(404, "NotFound", f"{path} not found")
        if method == "DELETE":
            del self.objects[path]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 200, self.objects[path]

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


def _status(code: int, reason: str, message: str) -> tuple[int, Any]:
    kind = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**kind, "reason": reason, "message": message, "code": code}


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Serves on a free port of this machine."""
    state = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            code, document = state.answer(self.command, self.path, self.rfile.read(length))
            content = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PATCH = do_DELETE = do_POST = handle_any  # noqa: N815

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
