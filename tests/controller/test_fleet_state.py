import pytest

from baton.errors import NotFound, PeerRefused
from baton.request import Role
from router.controller.fleet_state import DRAINING, FAILED, READY, STANDBY, STARTING, AfterDrain, Announcement, Fleet


def announcement(epoch: int, worker_id: str = "decode-0") -> Announcement:
    return Announcement(worker_id, epoch, f"127.0.0.1:{epoch}", Role.DECODE, pid=epoch)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.expect("decode-0", Role.DECODE)
    return fleet


def test_a_worker_is_starting_until_it_announces_itself(fleet: Fleet) -> None:
    assert fleet.get("decode-0").state == STARTING
    member = fleet.announce(announcement(1))
    assert (member.state, member.address, member.num_restarts) == (READY, "127.0.0.1:1", 0)


def test_a_new_epoch_is_a_restart_and_the_old_one_never_comes_back(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    assert fleet.announce(announcement(2)).num_restarts == 1
    with pytest.raises(PeerRefused, match="was replaced"):
        fleet.announce(announcement(1))
    assert fleet.get("decode-0").epoch == 2


def test_a_late_loss_of_a_replaced_process_does_not_hit_its_successor(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    fleet.announce(announcement(2))
    fleet.lost("decode-0", 1, "silent")
    assert fleet.get("decode-0").state == READY


def test_a_lost_worker_is_back_when_the_same_process_is_heard_again(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    fleet.lost("decode-0", 1, "no answer to 3 heartbeats")
    assert (fleet.get("decode-0").state, fleet.get("decode-0").reason) == (FAILED, "no answer to 3 heartbeats")
    fleet.heard("decode-0", 9)
    assert fleet.get("decode-0").state == FAILED
    fleet.heard("decode-0", 1)
    assert (fleet.get("decode-0").state, fleet.get("decode-0").reason) == (READY, "")


def test_wishes_outlive_a_restart(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    fleet.want_draining("decode-0", True)
    fleet.want_role("decode-0", Role.BOTH)
    member = fleet.announce(announcement(2))
    assert (member.state, member.role, member.draining) == (DRAINING, Role.BOTH, True)
    assert fleet.want_draining("decode-0", False).state == READY


def test_the_version_grows_with_changes_only(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    version = fleet.version
    fleet.announce(announcement(1))
    fleet.heard("decode-0", 1)
    fleet.expect("decode-0", Role.DECODE)
    assert fleet.version == version
    fleet.lost("decode-0", 1, "gone")
    assert fleet.version == version + 1


def test_an_unknown_worker_is_named_with_the_known_ones(fleet: Fleet) -> None:
    with pytest.raises(NotFound, match=r"'decode-7'.*decode-0"):
        fleet.want_draining("decode-7", True)


def test_a_name_is_given_once_whoever_had_it_and_whoever_knew(fleet: Fleet) -> None:
    fleet.expect("decode-2", Role.DECODE)
    assert [fleet.new_name(Role.DECODE) for _ in range(2)] == ["decode-1", "decode-3"]
    fleet.forget("decode-2")
    successor = Fleet(fleet.saved())
    assert [successor.new_name(role) for role in (Role.DECODE, Role.PREFILL)] == ["decode-4", "prefill-0"]


def test_an_ended_worker_is_gone_and_its_straggler_refused_until_it_is_expected_anew(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    version = fleet.version
    fleet.forget("decode-0")
    assert (fleet.members(), fleet.version) == ((), version + 1)
    with pytest.raises(PeerRefused, match="decode-0 was ended"):
        fleet.announce(announcement(1))
    with pytest.raises(PeerRefused, match="decode-0 was ended"):
        Fleet(fleet.saved()).announce(announcement(1))
    fleet.lost("decode-0", 1, "late")
    assert fleet.members() == ()
    fleet.expect("decode-0", Role.DECODE)
    assert fleet.announce(announcement(2)).state == READY


def test_of_an_ended_worker_only_its_name_is_kept(fleet: Fleet) -> None:
    for epoch in (1, 2, 3):
        fleet.announce(announcement(epoch))
    fleet.announce(announcement(7, "decode-1"))
    fleet.announce(announcement(8, "decode-1"))
    fleet.forget("decode-0")
    assert fleet.saved().replaced_epochs == {("decode-1", 7)}
    for epoch in (1, 2, 3):
        with pytest.raises(PeerRefused, match="decode-0 was ended"):
            fleet.announce(announcement(epoch))


def test_a_standby_is_one_that_was_to_be_it_and_still_is_when_it_is_idle(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    fleet.want_draining("decode-0", True, AfterDrain.STANDBY)
    fleet.want_draining("decode-0", False)
    fleet.stand_by("decode-0")
    assert fleet.get("decode-0").state == READY
    fleet.want_draining("decode-0", True, AfterDrain.STANDBY)
    fleet.stand_by("decode-0")
    assert fleet.get("decode-0").state == STANDBY
    assert fleet.announce(announcement(2)).state == DRAINING, "a restarted one has to say first that it is idle"
    assert fleet.want_draining("decode-0", False).after_drain is AfterDrain.STAY


def test_a_process_whose_machine_is_gone_may_not_come_back_and_the_next_one_may(fleet: Fleet) -> None:
    fleet.announce(announcement(1))
    fleet.vanished("decode-0")
    gone = fleet.get("decode-0")
    assert (gone.state, gone.epoch, gone.address) == (STARTING, 0, "")
    with pytest.raises(PeerRefused, match="was replaced"):
        fleet.announce(announcement(1))
    back = fleet.announce(announcement(2))
    assert (back.state, back.num_restarts) == (READY, 1)


@pytest.mark.parametrize("vanishes", [True, False])
def test_who_is_to_return_takes_work_again_with_its_next_process_and_not_before(fleet: Fleet, vanishes: bool) -> None:
    fleet.announce(announcement(1))
    fleet.want_draining("decode-0", True, AfterDrain.RETURN)
    assert fleet.announce(announcement(1)).draining  # it only lost its connection
    if vanishes:
        fleet.vanished("decode-0")
    back = fleet.announce(announcement(2))
    assert (back.state, back.draining, back.after_drain) == (READY, False, AfterDrain.STAY)
    assert back.stays
