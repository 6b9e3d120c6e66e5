"""An S3 server, one for all tests here, with a bucket for each. Imported where it is used: that
takes a second."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from psrpc.files import remote_calls
from psrpc.ops.retry import RetryPolicy

_numbers = count()


@dataclass(frozen=True)
class Bucket:
    """A bucket and a client of its own, which is not what is tested."""

    name: str
    client: Any

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes) -> str:
        """Writes an object; its URL."""
        self.client.put_object(Bucket=self.name, Key=key, Body=data)
        return self.url(key)

    def put_folder(self, folder: Path, key: str) -> str:
        """Writes the files right in a directory; its URL."""
        for path in folder.iterdir():
            self.put(f"{key}/{path.name}", path.read_bytes())
        return self.url(key)

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def objects(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return sorted(entry["Key"] for entry in found)


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    # It logs every request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user sets it for a store that is not Amazon's; what fails does so at the first try of
    boto's own."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(remote_calls._process, "patience", RetryPolicy(budget_s=0.0))
    yield
    forget_stores()


def forget_stores() -> None:
    """Ends the sessions that s3fs keeps."""
    import fsspec
    from s3fs import S3FileSystem

    for store in list(S3FileSystem._cache.values()):
        if store._s3 is not None:
            store.close_session(fsspec.asyn.get_loop(), store._s3)
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(endpoint: str, environment: None) -> Iterator[Bucket]:
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", endpoint_url=endpoint, config=Config(retries={"max_attempts": 0}))
    found = Bucket(f"data-{next(_numbers)}", client)
    client.create_bucket(Bucket=found.name)
    yield found
    client.close()
