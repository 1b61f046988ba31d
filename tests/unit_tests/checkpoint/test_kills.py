"""A run that is killed at any point goes on from a complete checkpoint and ends as the run that was never killed.

Here some points of training and of a save; `make campaign-checkpoint` goes through all of them.
"""

from __future__ import annotations

import pytest

from tests.helpers.selection import FULL, without
from tests.unit_tests.checkpoint.kill_campaign import Campaign
from tests.unit_tests.checkpoint.kill_cases import Kill

pytestmark = pytest.mark.timeout(900)  # the first test pays for the run that is never killed

IN_TRAINING = [Kill(phase="generate", step=2), Kill(rank=1, phase="update_actor", step=3, at_end=True)]
FEW = 6 if FULL else 1  # points of each kind of save


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("killed"))


@pytest.mark.skipif(not FULL, reason="make test-full: kills in a save are here")
@pytest.mark.parametrize("kill", IN_TRAINING, ids=lambda kill: f"rank {kill.rank} {kill.phase}")
def test_killed_in_training(campaign: Campaign, kill: Kill) -> None:
    campaign.check(kill)


BACKGROUND = without({"in the step": False, "in the background": True}, "in the background")


@pytest.mark.parametrize("background", BACKGROUND.values(), ids=BACKGROUND)
def test_killed_in_a_save(campaign: Campaign, background: bool) -> None:
    """Points evenly spread over rank 0's operations, which are those of every rank and the commit."""
    points = campaign.points(background=background, rank=0)
    assert {"open", "fsync", "rename"} <= {name for name, _ in points}
    step = len(points) / FEW
    for i in range(FEW):
        campaign.check(points[int((i + 0.5) * step)][1])
    if FULL or not background:  # the renames are the same ones
        last = [kill for name, kill in points if name == "rename"][-2:]  # around the folder's getting its name
        for kill in last:
            campaign.check(kill)
