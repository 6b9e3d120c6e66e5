from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily

from psrpc.core.errors import InvalidArgument, PortInUse
from psrpc.metrics.exporter import Family, MetricsServer, histogram
from psrpc.options.settings import OFF

WAIT_S = 30.0


def families() -> Iterator[Family]:
    yield GaugeMetricFamily("pserver_version", "Updates.", value=7)


def get(address: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}/metrics", method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def test_it_is_collected_when_it_is_read() -> None:
    versions = [1.0, 2.0]

    def collect() -> Iterator[Family]:
        yield GaugeMetricFamily("pserver_version", "Updates.", value=versions.pop(0))

    with MetricsServer("127.0.0.1:0", collect) as server:
        assert versions == [1.0, 2.0]
        for version in ("1.0", "2.0"):
            status, text = get(server.address)
            assert status == 200
            assert f"pserver_version {version}\n" in text
        assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_only_be_read(method: str) -> None:
    with MetricsServer("127.0.0.1:0", families) as server:
        assert get(server.address, method)[0] == 405


def test_a_failure_is_that_of_one_reading() -> None:
    fails = [True]

    def collect() -> Iterator[Family]:
        if fails:
            fails.clear()
            raise RuntimeError("not now")
        return families()

    with MetricsServer("127.0.0.1:0", collect) as server:
        assert get(server.address)[0] == 500
        assert get(server.address)[0] == 200


def test_off_is_nothing() -> None:
    with MetricsServer(OFF, families) as server:
        assert server.address == OFF


def test_an_address_that_is_taken_is_named() -> None:
    with (
        MetricsServer("127.0.0.1:0", families) as server,
        pytest.raises(PortInUse, match=rf"{server.address}.*--metrics"),
    ):
        MetricsServer(server.address, families).start()
    with pytest.raises(InvalidArgument, match="has no port"):
        MetricsServer("somewhere", families).start()


def test_a_histogram_of_staleness() -> None:
    family = histogram(
        "pserver_staleness_versions", "Of gradients.", [(("0",), [5, 3, 0, 1])], ["s"]
    )
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    below = {le: value for (name, le), value in samples.items() if name.endswith("_bucket")}
    assert [below[le] for le in ("0.0", "1.0", "2.0", "3.0", "48.0", "+Inf")] == [5, 8, 8, 9, 9, 9]
    assert samples["pserver_staleness_versions_sum", None] == 6
    assert samples["pserver_staleness_versions_count", None] == 9
