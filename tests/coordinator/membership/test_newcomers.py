"""A flood of registrations takes no place from workers that work, and none from new ones."""

from __future__ import annotations

import pytest

from coordinator.membership.members import PER_ADDRESS, Worker
from coordinator.membership.membership import MAX_ACTIVE, Membership
from coordinator.membership.shard_places import ShardPlaces
from psrpc.core.errors import ResourceExhausted

FLOOD, FARM, OTHER = "ipv4:192.0.2.66", "ipv4:192.0.2.1", "ipv4:192.0.2.2"


class House:
    """A membership, and who had to go."""

    def __init__(self) -> None:
        self.members = Membership(ShardPlaces(1), lease_s=10.0)
        self.displaced: list[Worker] = []
        self.now = 0.0

    def register(self, incarnation: int, address: str) -> Worker:
        """As the engine does it."""
        self.now += 0.03
        found = self.members.displaced_by(incarnation, address)
        if found is not None:
            assert self.members.leave_worker(found.name)
            self.displaced.append(found)
        return self.members.register_worker(incarnation, "h", 1, "cpu", self.now, address=address)


def active(*workers: Worker) -> bool:
    return all(worker.state == "active" for worker in workers)


@pytest.fixture
def house() -> House:
    return House()


def test_two_hundred_workers_that_start_at_once_have_a_place_each(house: House) -> None:
    workers = [house.register(n, FARM) for n in range(1, 201)]
    assert active(*workers)
    assert len({worker.name for worker in workers}) == 200
    assert not house.displaced


@pytest.mark.parametrize("address", [FLOOD, FARM])
def test_a_flood_displaces_itself(house: House, address: str) -> None:
    """From the machine of the workers, too, where nothing else tells them apart."""
    trained = [house.register(n, FARM) for n in range(1, 9)]
    for worker in trained:
        worker.asked = worker.worked = True
    starting = [house.register(n, FARM) for n in range(9, 17)]
    for worker in starting:
        worker.asked = True
    for n in range(1000, 4000):
        house.register(n, address)
    late = house.register(17, FARM)
    assert active(*trained, *starting, late)
    assert house.members.active_workers <= PER_ADDRESS + 17
    assert {worker.incarnation for worker in house.displaced} <= set(range(1000, 4000))


def test_one_that_has_just_come_is_not_the_first_to_go(house: House) -> None:
    for n in range(1000, 1000 + PER_ADDRESS):
        house.register(n, FARM)
    new = house.register(1, FARM)
    for n in range(3000, 3000 + PER_ADDRESS - 1):
        house.register(n, FARM)
    assert active(new)
    house.register(4000, FARM)
    assert not active(new), "it has done nothing while as many others came"


def test_a_flood_from_many_addresses_displaces_the_one_that_has_most(house: House) -> None:
    worker = house.register(1, FARM)
    for n in range(1000, 1000 + PER_ADDRESS):
        house.register(n, FLOOD)
    for n in range(2000, 2000 + MAX_ACTIVE - PER_ADDRESS):
        house.register(n, OTHER)
    late = house.register(2, FARM)
    assert house.members.active_workers <= MAX_ACTIVE
    assert active(worker, late)


def test_a_job_is_full_once_all_its_workers_work(house: House) -> None:
    for n in range(1, MAX_ACTIVE + 1):
        worker = house.register(n, FARM)
        worker.asked = worker.worked = True
    with pytest.raises(ResourceExhausted, match=f"{MAX_ACTIVE} workers, as many as it can have"):
        house.register(MAX_ACTIVE + 1, OTHER)
    assert not house.displaced


def test_a_worker_that_registers_again_displaces_no_other(house: House) -> None:
    for n in range(1000, 1000 + PER_ADDRESS):
        house.register(n, FARM)
    again = house.register(1000, FARM)
    assert again.name == "worker-0"
    assert not house.displaced
